"""Linear maps of one row, for NVIDIA GPUs, written for one thread.

A linear map reads its weights once: each warp takes `rows` rows of [N, D], its lanes 16 bytes each, and adds up in
float32. Its loads are on their way while the block makes its copy of the input row (a norm, or the sum of attention's
parts) in shared memory. Every block does that for itself: from the L2 cache it costs less than one more kernel.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ..permute.thread import F, P, Pointer, Thread, U
from .mosaic_common import HEAD, MULTIPROCESSORS, add_lanes, floats, launch_updating, pack

UNROLLED = 8  # rows of a warp, beyond which its code is a loop


@dataclasses.dataclass(frozen=True)
class Linear:
    """A linear map of D to N. threads of a block, rows of a warp; wide: whether the result is float32.

    norm: the input is a row to be normed, after what is to be added to it: nothing (adds 0), a row (1, has no weights)
    or the weighted sum of `adds` rows; otherwise it is `parts` parts of an attention, and the result is added to a row.
    eps: of the norm. copies: of the normed row.
    """

    columns: int
    outputs: int
    threads: int
    rows: int
    wide: bool
    norm: bool
    adds: int = 0
    weighted: bool = False
    parts: int = 0
    eps: float = 0.0
    copies: int = 1

    @property
    def per_block(self) -> int:
        return self.threads // 32 * self.rows

    @property
    def blocks(self) -> int:
        return -(-self.outputs // self.per_block)

    @property
    def each(self) -> int:
        """Pieces of 8 values that a thread makes of the input row."""
        return -(-self.columns // (8 * self.threads))

    @property
    def scratch_words(self) -> int:
        return self.columns // 2 + 32


def _make_normed(o: Thread, t: Linear, refs: dict[str, Pointer]):
    """The normed row to shared memory, and from the first blocks to memory too."""
    first = o.block() < U(1)
    squares, pieces = o.F(0.0), []
    for i in range(t.each):
        piece = o.thread() + i * t.threads
        inside = piece < U(t.columns // 8)
        words = refs["x"].at(piece, 16).load(4, inside)
        if t.adds:
            more = _weighted(o, t, refs, piece, inside) if t.weighted else refs["add"].at(piece, 16).load(4, inside)
            words = pack(o, [a + b for a, b in zip(floats(o, words), floats(o, more), strict=True)])
        scale = refs["scale"].at(piece, 16).load(4, inside)
        values = floats(o, words)
        for v in values:
            squares = o.fma(v, v, squares)
        pieces.append((piece, inside, words, values, scale))
    total = add_lanes(o, squares)
    stats = refs["scratch"].at(None, 0, 2 * t.columns)
    stats.at(o.thread() >> 5, 4).store([o.bits(total)], o.lane() < U(1))
    o.barrier()
    total = o.F(0.0)
    for w in range(0, t.threads // 32, 4):
        for word in stats.at(None, 0, 4 * w).load(4):
            total = total + o.float(word)
    inverse = o.rsqrt_approx(total * o.F(1 / t.columns) + o.F(t.eps))
    for piece, inside, words, values, scale in pieces:
        scale = floats(o, scale)
        normed = pack(o, [v * (inverse * s) for v, s in zip(values, scale, strict=True)])
        refs["scratch"].at(piece, 16).store(normed, inside)
        refs["total"].at(piece, 16).store(words, inside & first)
        for start in range(0, t.copies, t.blocks):
            copy = o.block() + start
            refs["normed"].at(copy, 2 * t.columns, piece * 16).store(normed, inside & (copy < U(t.copies)))


def _weighted(o: Thread, t: Linear, refs: dict[str, Pointer], piece: U, inside: P) -> list[U]:
    """8 values of the sum of rows with weights; a place of -1 is none, and then its weight may be anything."""
    places = [refs["places"].at(None, 0, 4 * k).load(1)[0] for k in range(t.adds)]
    weights = [refs["weights"].at(None, 0, 4 * k).load(1)[0] for k in range(t.adds)]
    there = [~p.same(U(0xFFFFFFFF)) for p in places]
    rows = [
        refs["add"].at(p, 2 * t.columns, piece * 16).load(4, inside & here)
        for p, here in zip(places, there, strict=True)
    ]
    out = [o.F(0.0)] * 8
    for words, weight, here in zip(rows, weights, there, strict=True):
        factor = o.float(o.where(here, weight, U(0)))
        out = [a + o.mul_rounded(factor, v) for a, v in zip(out, floats(o, words), strict=True)]
    return pack(o, out)


def _make_merged(o: Thread, t: Linear, refs: dict[str, Pointer]):
    """The sum of the parts to shared memory."""
    heads = t.columns // HEAD
    for i in range(t.each):
        piece = o.thread() + i * t.threads
        inside = piece < U(t.columns // 8)
        head = piece // (HEAD // 8)
        weights = [refs["weight"].at(head, 8, p * 8 * heads).load(2, inside) for p in range(t.parts)]
        top = functools.reduce(o.fmax, [o.float(w[0]) for w in weights])
        shares = [o.exp2_approx(o.float(w[0]) + -top) * o.float(w[1]) for w in weights]
        over = o.rcp_approx(functools.reduce(lambda a, b: a + b, shares))
        out = [o.F(0.0)] * 8
        for start in range(0, t.parts, 4):  # more at a time would not fit the registers beside the weights
            few = range(start, min(start + 4, t.parts))
            loaded = [refs["parts"].at(piece, 16, p * 2 * t.columns).load(4, inside) for p in few]
            for p, words in zip(few, loaded, strict=True):
                out = [o.fma(shares[p] * over, v, s) for v, s in zip(floats(o, words), out, strict=True)]
        refs["scratch"].at(piece, 16).store(pack(o, out), inside)


def linear(o: Thread, t: Linear, refs: dict[str, Pointer]):
    lane, warp = o.lane(), o.thread() >> 5
    row = o.block() * t.per_block + warp * t.rows
    chunks = t.columns // 256

    def weights(j: U | int):
        at = refs["w"].at(row + j, 2 * t.columns, lane * 16)
        here = row + j < U(t.outputs)
        if isinstance(j, U):
            here = here & (j < U(t.rows))
        return [at.at(None, 0, 512 * c).load(4, here) for c in range(chunks)]

    def multiply(j: U | int, words: list[list[U]]):
        here = row + j < U(t.outputs)
        sums = [o.F(0.0)] * 4
        for c in range(chunks):
            x = refs["scratch"].at(None, 0, 512 * c).at(lane, 16).load(4)
            for i, (a, b) in enumerate(zip(floats(o, words[c]), floats(o, x), strict=True)):
                sums[i % 4] = o.fma(a, b, sums[i % 4])
        total = add_lanes(o, (sums[0] + sums[1]) + (sums[2] + sums[3]))
        write = here & (lane < U(1))
        if not t.norm:
            total = _half(o, refs["add"].at(row + j, 2), write) + _round(o, total)
        if t.wide:
            refs["out"].at(row + j, 4).store([o.bits(total)], write)
        else:
            refs["out"].at(row + j, 2).store([o.pack_half(total, o.F(0.0), "bf16")], write, bits=16)

    loaded = weights(0)
    (_make_normed if t.norm else _make_merged)(o, t, refs)
    o.barrier()
    if t.rows <= UNROLLED:
        for j in range(t.rows):
            words, loaded = loaded, weights(j + 1) if j + 1 < t.rows else []
            multiply(j, words)
    else:

        def turn(j: U, *flat: U) -> list[U]:
            following = weights(j + 1)
            multiply(j, [list(flat[4 * c : 4 * c + 4]) for c in range(chunks)])
            return [w for chunk in following for w in chunk]

        o.loop(t.rows, turn, [w for chunk in loaded for w in chunk])


def _round(o: Thread, x: F) -> F:
    return floats(o, [o.pack_half(x, o.F(0.0), "bf16")])[0]


def _half(o: Thread, at: Pointer, where: P) -> F:
    """One bfloat16."""
    return o.float(at.load(1, where, bits=16)[0] << 16)


def linear_obstacle(x: jax.Array, w: jax.Array, out_dtype) -> str | None:
    """Why the kernel cannot do it, or None."""
    if not (x.dtype == w.dtype == jnp.bfloat16 and out_dtype in (jnp.bfloat16, jnp.float32)):
        return f"it multiplies bfloat16 and gives bfloat16 or float32, not {x.dtype}, {w.dtype} and {out_dtype}"
    if w.shape[1] % 256 or not w.shape[0]:
        return f"it takes rows in multiples of 256 values, not of {w.shape[1]}"
    return None


def merged_obstacle(out: jax.Array, w: jax.Array, add: jax.Array) -> str | None:
    """Why the kernel cannot do it, or None."""
    if out.shape[2] != HEAD or not out.dtype == add.dtype == jnp.bfloat16:
        return f"it takes bfloat16 heads of {HEAD}, not {out.dtype} ones of {out.shape[2]}"
    return linear_obstacle(add, w, out.dtype)


def _rows(outputs: int, threads: int) -> int:
    """Rows of a warp."""
    warps = MULTIPROCESSORS * threads // 32
    each = -(-outputs // warps)
    return each if each <= 4 * UNROLLED else -(-outputs // (4 * warps))


@functools.partial(jax.jit, static_argnames=("eps", "out_dtype", "copies"))
def run_normed_linear(
    x: jax.Array,
    scale: jax.Array,
    w: jax.Array,
    add: jax.Array | None,
    places: jax.Array | None,
    weights: jax.Array | None,
    *,
    eps: float,
    out_dtype,
    copies: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    (outputs, columns), wide = w.shape, jnp.dtype(out_dtype) == jnp.float32
    # One block to a multiprocessor, or four for a large vocabulary; few warps to a block where there are few rows.
    threads = 128 if outputs <= 1024 else 256
    adds = 0 if add is None else 1 if places is None else places.shape[0]
    task = Linear(
        columns,
        outputs,
        threads,
        _rows(outputs, threads),
        wide,
        True,
        adds=adds,
        weighted=places is not None,
        eps=eps,
        copies=copies,
    )
    operands = {"x": x, "scale": scale.astype(x.dtype), "w": w}
    operands |= {n: a for n, a in (("add", add), ("places", places), ("weights", weights)) if a is not None}
    results = {
        "out": jax.ShapeDtypeStruct((1, outputs), out_dtype),
        "total": jax.ShapeDtypeStruct(x.shape, x.dtype),
        "normed": jax.ShapeDtypeStruct((copies, columns), x.dtype),
    }
    out = launch_updating(
        linear,
        task,
        operands,
        results,
        blocks=task.blocks,
        threads=threads,
        scratch_words=task.scratch_words,
        name="normed_linear",
    )
    return out["out"], out["total"], out["normed"]


@jax.jit
def run_merged_linear(parts: jax.Array, weight: jax.Array, w: jax.Array, add: jax.Array) -> jax.Array:
    outputs, columns = w.shape
    # Many warps to a block: each block reads all parts.
    task = Linear(columns, outputs, 512, _rows(outputs, 512), False, False, parts=parts.shape[0])
    operands = {"parts": parts, "weight": weight, "w": w, "add": add}
    out = launch_updating(
        linear, task, operands, {"out": jax.ShapeDtypeStruct(add.shape, add.dtype)}, blocks=task.blocks,
        threads=task.threads, scratch_words=task.scratch_words, name="merged_linear",
    )  # fmt: skip
    return out["out"]
