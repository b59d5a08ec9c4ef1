"""One token's experts, for NVIDIA GPUs, written for one thread: which they are, and their matmuls row by row."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ..permute.thread import F, P, Pointer, Thread, U
from ..route import Rule
from ..route import mosaic_sm90 as route
from .mosaic_common import LOG2E, MULTIPROCESSORS, add_lanes, floats, launch_updating, turns

EXPERT_WARPS = 4  # of a block


@dataclasses.dataclass(frozen=True)
class Route:
    """The choice of experts, of one token."""

    choice: route.Task


def choose_and_sort(o: Thread, t: Route, refs: dict[str, Pointer]):
    """The token's experts, and where its copies lie once they are in expert order. Ids of a token are different."""
    chosen, _ = route.choose(o, t.choice, refs)
    lane, first, top_k = o.lane(), o.thread() < U(32), t.choice.rule.top_k
    nobody = U(0xFFFFFFFF)
    ids = [o.warp_min(o.where(lane.same(U(k)), chosen, nobody)) for k in range(top_k)]
    place = U(0)
    for other in ids:
        place = place + o.where(other < chosen, U(1), U(0))
    place = o.where(chosen.same(nobody), nobody, place)
    refs["places"].at(lane, 4).store([place], first & (lane < U(top_k)))
    for start in range(0, t.choice.experts, 32):
        expert, size = lane + start, U(0)
        for other in ids:
            size = o.where(other.same(expert), U(1), size)
        refs["sizes"].at(expert, 4).store([size], first)


@dataclasses.dataclass(frozen=True)
class Experts:
    """The matmuls of one token's K experts. columns D, width F. rows: of each matrix, for a warp."""

    top_k: int
    columns: int
    width: int
    rows: int

    @property
    def up_blocks(self) -> int:
        """Of each expert."""
        return -(-self.width // (EXPERT_WARPS * self.rows))

    @property
    def down_blocks(self) -> int:
        return -(-self.columns // (EXPERT_WARPS * self.rows))


def _dot(o: Thread, words: list[list[U]], x: Pointer, first: F) -> F:
    """A lane's part of the product of a row of weights, in chunks of 256 values, and of x, added to `first`."""
    sums = [first, *[o.F(0.0)] * 3]
    for c, chunk in enumerate(words):
        values = floats(o, x.at(None, 0, 512 * c).at(o.lane(), 16).load(4))
        for i, (a, b) in enumerate(zip(floats(o, chunk), values, strict=True)):
            sums[i % 4] = o.fma(a, b, sums[i % 4])
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


def _row(o: Thread, at: Pointer, values: int, where: P) -> list[list[U]]:
    return [at.at(o.lane(), 16, 512 * c).load(4, where) for c in range(values // 256)]


def expert_up(o: Thread, t: Experts, refs: dict[str, Pointer]):
    """silu(gate) * up of each expert: a warp takes rows of both matrices."""
    k, block = o.block() // t.up_blocks, o.block() % t.up_blocks
    first = (block * EXPERT_WARPS + (o.thread() >> 5)) * t.rows
    expert = refs["ids"].at(k, 4).load(1)[0]
    matrix = refs["gate_up"].at(expert, 4 * t.width * t.columns)
    there = ~expert.same(U(0xFFFFFFFF))

    def row(j: U):
        f = first + j
        inside = f < U(t.width)
        rows = [_row(o, matrix.at(f + i * t.width, 2 * t.columns), t.columns, there & inside) for i in (0, 1)]
        gate, up = (add_lanes(o, _dot(o, row, refs["x"], o.F(0.0))) for row in rows)
        silu = gate * o.rcp_approx(o.exp2_approx(gate * o.F(-LOG2E)) + o.F(1.0))
        word = o.pack_half(silu * up, o.F(0.0), "bf16")
        refs["hidden"].at(k * t.width + f, 2).store([word], inside & (o.lane() < U(1)), bits=16)

    turns(o, t.rows, row)


def expert_down(o: Thread, t: Experts, refs: dict[str, Pointer]):
    """The weighted sum of the experts' outputs: a warp takes rows of all their matrices."""
    first = (o.block() * EXPERT_WARPS + (o.thread() >> 5)) * t.rows
    ids = [refs["ids"].at(None, 0, 4 * k).load(1)[0] for k in range(t.top_k)]
    there = [~i.same(U(0xFFFFFFFF)) for i in ids]
    loaded = [refs["weights"].at(None, 0, 4 * k).load(1)[0] for k in range(t.top_k)]
    weights = [o.float(o.where(here, w, U(0))) for here, w in zip(there, loaded, strict=True)]

    def row(j: U):
        d = first + j
        inside = d < U(t.columns)
        total = o.F(0.0)
        for start in range(0, t.top_k, 2):  # more at a time, and only one block would fit a multiprocessor
            few = range(start, min(start + 2, t.top_k))
            matrices = [refs["down"].at(ids[k], 2 * t.width * t.columns).at(d, 2 * t.width) for k in few]
            rows = [_row(o, m, t.width, there[k] & inside) for k, m in zip(few, matrices, strict=True)]
            for k, row in zip(few, rows, strict=True):
                hidden = refs["hidden"].at(None, 0, 2 * t.width * k)
                total = o.fma(weights[k], _dot(o, row, hidden, o.F(0.0)), total)
        word = o.pack_half(add_lanes(o, total), o.F(0.0), "bf16")
        refs["out"].at(d, 2).store([word], inside & (o.lane() < U(1)), bits=16)

    turns(o, t.rows, row)


def experts_obstacle(x: jax.Array, gate_up: jax.Array, down: jax.Array, top_k: int) -> str | None:
    """Why the kernels cannot do it, or None."""
    kinds = [str(a.dtype) for a in (x, gate_up, down)]
    if kinds != ["bfloat16"] * 3:
        return f"they multiply bfloat16, not {', '.join(kinds)}"
    if x.shape[1] % 256 or gate_up.shape[2] % 256:
        return f"they take rows in multiples of 256 values, not of {x.shape[1]} and {gate_up.shape[2]}"
    if top_k > 32:
        return f"they take up to 32 experts of a token, not {top_k}"
    return None


@jax.jit
def run_experts(x: jax.Array, ids: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    (top_k,), (_, _, width, columns) = ids.shape, gate_up.shape
    each = lambda rows: -(-rows // (4 * MULTIPROCESSORS * EXPERT_WARPS))  # noqa: E731  # four blocks to each
    threads = 32 * EXPERT_WARPS
    task = Experts(top_k, columns, width, each(top_k * width))
    operands = {"x": x, "ids": ids, "gate_up": gate_up}
    results = {"hidden": jax.ShapeDtypeStruct((top_k, width), x.dtype)}
    blocks = top_k * task.up_blocks
    out = launch_updating(expert_up, task, operands, results, blocks=blocks, threads=threads, name="expert_up")
    task = Experts(top_k, columns, width, each(columns))
    operands = {"hidden": out["hidden"], "ids": ids, "weights": weights, "down": down}
    results = {"out": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    blocks = task.down_blocks
    out = launch_updating(expert_down, task, operands, results, blocks=blocks, threads=threads, name="expert_down")
    return out["out"]


@functools.partial(jax.jit, static_argnums=0)
def run_route(
    rule: Rule, logits: jax.Array, bias: jax.Array | None, valid: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    experts, top_k = logits.shape[1], rule.top_k
    task = Route(route.Task(1, experts, rule, bias is not None, True))
    operands = {"logits": logits, "valid": valid.astype(jnp.uint8)} | ({} if bias is None else {"bias": bias})
    results = {
        "ids": jax.ShapeDtypeStruct((top_k,), jnp.int32),
        "weights": jax.ShapeDtypeStruct((top_k,), jnp.float32),
        "places": jax.ShapeDtypeStruct((top_k,), jnp.int32),
        "sizes": jax.ShapeDtypeStruct((experts,), jnp.int32),
    }
    threads = 32 * route.WARPS
    out = launch_updating(choose_and_sort, task, operands, results, blocks=1, threads=threads, name="choose_and_sort")
    return out["weights"], out["places"], out["sizes"]
