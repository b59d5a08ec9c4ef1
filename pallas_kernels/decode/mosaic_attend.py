"""Attention of one token to a cache, in parts, for NVIDIA GPUs, written for one thread.

A block takes up to `SLOTS` slots at a time of one key head and all query heads that share it. R = H / G query heads of
a key head; the other letters as in `api`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ..permute.thread import F, P, Pointer, Thread, U
from .mosaic_common import HEAD, LOG2E, add_lanes, floats, launch_updating, pack, turns

MAX_PARTS = 16
SLOTS = 128  # of the cache, that a block has in flight
ATTEND_THREADS = 512
NEVER = -1e30  # a score that is not seen


@dataclasses.dataclass(frozen=True)
class Attend:
    """heads H, groups G; slots N of the cache, in parts of `length`, a multiple of SLOTS."""

    heads: int
    groups: int
    slots: int
    parts: int
    length: int
    eps: float

    @property
    def share(self) -> int:
        return self.heads // self.groups

    @property
    def warps(self) -> int:
        return ATTEND_THREADS // 32

    # Shared memory, in bytes: queries float32 [R, h]; the new key, bfloat16 [h]; sums float32 [R]; scores, and then
    # terms, float32 [length, R]; each warp's sums float32 [R, h].
    @property
    def key_at(self) -> int:
        return 4 * HEAD * self.share

    @property
    def sums_at(self) -> int:
        return self.key_at + 2 * HEAD

    @property
    def scores_at(self) -> int:
        return self.sums_at + 64

    @property
    def outs_at(self) -> int:
        return self.scores_at + 4 * self.length * self.share

    @property
    def scratch_words(self) -> int:
        return self.outs_at // 4 + self.warps * self.share * HEAD


def parts(slots: int) -> int:
    """Into how many parts a cache is divided."""
    return min(MAX_PARTS, -(-slots // SLOTS))


def _rotated(o: Thread, t: Attend, refs: dict[str, Pointer], row: U, scale: Pointer, inside: P) -> list[U]:
    """Row of qkv [*, h] with norm and rotation, 4 values of each lane as 2 words."""
    lane = o.lane()
    values = floats(o, refs["qkv"].at(row, 2 * HEAD, lane * 8).load(2, inside))
    squares = o.F(0.0)
    for v in values:
        squares = o.fma(v, v, squares)
    inverse = o.rsqrt_approx(add_lanes(o, squares) * o.F(1 / HEAD) + o.F(t.eps))
    factor = floats(o, scale.at(lane, 8).load(2))
    words = pack(o, [v * (inverse * f) for v, f in zip(values, factor, strict=True)])
    mine, others = floats(o, words), floats(o, [o.shuffle_xor(w, 16) for w in words])
    angle = (lane & 15) * 16
    cos, sin = (refs[n].at(None, 0, angle).load(4) for n in ("cos", "sin"))
    upper = lane >= U(16)
    out = []
    for a, b, c, s in zip(mine, others, cos, sin, strict=True):
        turn = b * o.float(s)
        out.append(o.fma(a, o.float(c), o.where(upper, turn, -turn)))
    return pack(o, out)


def _by_head(o: Thread, sums: list[F]) -> F:
    """sums[r] of R heads in each of 16 lanes -> in lane i the total over the 16 lanes of head i // (16 / R)."""
    lane, mask = o.lane(), 8
    while len(sums) > 1:
        half = len(sums) // 2
        upper = (lane & mask).same(U(mask))
        kept = []
        for low, high in zip(sums[:half], sums[half:], strict=True):
            sent = o.shuffle_xor(o.bits(o.where(upper, low, high)), mask)
            kept.append(o.where(upper, high, low) + o.float(sent))
        sums, mask = kept, mask // 2
    masks = [m for m in (8, 4, 2, 1) if m <= mask]
    return add_lanes(o, sums[0], masks)


def attend(o: Thread, t: Attend, refs: dict[str, Pointer]):
    share, lane, warp = t.share, o.lane(), o.thread() >> 5
    group, part = o.block() // t.parts, o.block() % t.parts
    first = part * t.length
    slot = refs["slot"].load(1)[0]
    shared = refs["scratch"]
    new_key, scores = shared.at(None, 0, t.key_at), shared.at(None, 0, t.scores_at)

    # Queries, and this token's key.
    for start in range(0, share + 1, t.warps):
        r = warp + start
        is_q, inside = r < U(share), r < U(share + 1)
        row = o.where(is_q, group * share + r, group + t.heads)
        q = _rotated(o, t, refs, row, refs["q_scale"], is_q)
        k = _rotated(o, t, refs, row, refs["k_scale"], inside & ~is_q)
        wide = [o.bits(v * o.F(HEAD**-0.5 * LOG2E)) for v in floats(o, q)]
        shared.at(r, 4 * HEAD, lane * 16).store(wide, is_q)
        new_key.at(lane, 8).store(k, inside & ~is_q)
    o.barrier()

    # Scores: half a warp takes a slot, a lane 8 of its dimensions.
    small = lane & 15
    queries = [
        [o.float(w) for i in (0, 16) for w in shared.at(None, 0, 4 * HEAD * r + i).at(small, 32).load(4)]
        for r in range(share)
    ]
    keys = refs["keys"].at(group, 2 * HEAD * t.slots)
    mine = new_key.at(small, 16).load(4)
    step = 2 * t.warps  # slots of all warps

    def score(i: U):
        places = [i * SLOTS + (warp * 2 + (lane >> 4) + n * step) for n in range(SLOTS // step)]
        at = [first + p for p in places]
        seen = [(a < U(t.slots)) & ~(a > slot) for a in at]
        loaded = [keys.at(a, 2 * HEAD, small * 16).load(4, here) for a, here in zip(at, seen, strict=True)]
        valid = [refs["valid"].at(a, 1).load(1, here, bits=8)[0] for a, here in zip(at, seen, strict=True)]
        for place, a, here, words, flag in zip(places, at, seen, loaded, valid, strict=True):
            own = a.same(slot)
            k = floats(o, [o.where(own, m, w) for m, w in zip(mine, words, strict=True)])
            sums = []
            for q in queries:
                dot = o.F(0.0)
                for x, y in zip(q, k, strict=True):
                    dot = o.fma(x, y, dot)
                sums.append(dot)
            total = o.where(here & (flag > U(0)), _by_head(o, sums), o.F(NEVER))
            each = 16 // share  # lanes that have the same head's
            write = (small & (each - 1)).same(U(0))
            scores.at(place, 4 * share, (small // each) * 4).store([o.bits(total)], write)

    turns(o, t.length // SLOTS, score)
    o.barrier()

    # Terms of the softmax: a warp takes a query head.
    head = warp
    inside = head < U(share)
    column = o.where(inside, head, U(0)) * 4

    def largest(i: U, top: U) -> list[U]:
        mine = o.float(scores.at(i * 32 + lane, 4 * share, column).load(1)[0])
        return [o.bits(o.fmax(o.float(top), mine))]

    top = o.float(_fold(o, t.length // 32, largest, o.bits(o.F(NEVER))))
    for mask in (16, 8, 4, 2, 1):
        top = o.fmax(top, o.float(o.shuffle_xor(o.bits(top), mask)))

    def term(i: U, total: U) -> list[U]:
        at = scores.at(i * 32 + lane, 4 * share, column)
        mine = o.float(at.load(1)[0])
        p = o.where(mine < o.F(NEVER / 2), o.F(0.0), o.exp2_approx(mine + -top))
        at.store([o.bits(p)], inside)
        return [o.bits(o.float(total) + p)]

    total = add_lanes(o, o.float(_fold(o, t.length // 32, term, o.bits(o.F(0.0)))))
    leader = inside & (lane < U(1))
    shared.at(None, 0, t.sums_at).at(head, 4).store([o.bits(total)], leader)
    weight = refs["weight"].at(part * t.heads + group * share + head, 8)
    weight.store([o.bits(top), o.bits(total)], leader)
    o.barrier()

    # Values: a warp takes a slot, a lane 4 dimensions of all query heads.
    values = refs["values"].at(group, 2 * HEAD * t.slots)
    own_value = refs["qkv"].at(group + (t.heads + t.groups), 2 * HEAD, lane * 8).load(2)

    def add_up(i: U, *sums: U) -> list[U]:
        places = [i * SLOTS + (warp + n * t.warps) for n in range(SLOTS // t.warps)]
        at = [first + p for p in places]
        seen = [(a < U(t.slots)) & ~(a > slot) for a in at]
        loaded = [values.at(a, 2 * HEAD, lane * 8).load(2, here) for a, here in zip(at, seen, strict=True)]
        out = [o.float(s) for s in sums]
        for place, a, words in zip(places, at, loaded, strict=True):
            own = a.same(slot)
            v = floats(o, [o.where(own, m, w) for m, w in zip(own_value, words, strict=True)])
            width = min(4, share)
            terms = [o.float(w) for r in range(0, share, width) for w in scores.at(place, 4 * share, 4 * r).load(width)]
            out = [o.fma(terms[n // 4], v[n % 4], s) for n, s in enumerate(out)]
        return [o.bits(s) for s in out]

    sums = [o.bits(o.F(0.0))] * (4 * share)
    sums = _fold_all(o, t.length // SLOTS, add_up, sums)
    outs = shared.at(None, 0, t.outs_at)
    for r in range(share):
        outs.at(warp * share + r, 4 * HEAD, lane * 16).store(sums[4 * r : 4 * r + 4])
    o.barrier()
    for start in range(0, share * HEAD // 2, ATTEND_THREADS):
        pair = o.thread() + start
        inside = pair < U(share * HEAD // 2)
        low = high = o.F(0.0)
        for w in range(t.warps):
            a, b = outs.at(pair, 8, 4 * HEAD * share * w).load(2, inside)
            low, high = low + o.float(a), high + o.float(b)
        over = o.float(shared.at(None, 0, t.sums_at).at(pair // (HEAD // 2), 4).load(1, inside)[0])
        none = ~(over > o.F(0.0))
        inverse = o.where(none, o.F(0.0), o.div(o.F(1.0), o.where(none, o.F(1.0), over)))
        word = o.pack_half(low * inverse, high * inverse, "bf16")
        refs["out"].at(part * t.groups + group, 2 * HEAD * share, pair * 4).store([word], inside)

    # The cache, by whoever's part it is.
    here = ~(slot < first) & (slot < first + t.length) & (o.thread() < U(HEAD // 8))
    key_words = new_key.at(small, 16).load(4)
    value_words = refs["qkv"].at(group + (t.heads + t.groups), 2 * HEAD, small * 16).load(4)
    keys.at(slot, 2 * HEAD, small * 16).store(key_words, here)
    values.at(slot, 2 * HEAD, small * 16).store(value_words, here)


def _fold_all(o: Thread, count: int, body, carry: list[U]) -> list[U]:
    """carry = body(i, *carry) for i below count."""
    return list(body(U(0), *carry)) if count == 1 else o.loop(count, body, carry)


def _fold(o: Thread, count: int, body, carry: U) -> U:
    for i in range(count if count <= 8 else 0):
        (carry,) = body(U(i), carry)
    return carry if count <= 8 else o.loop(count, body, [carry])[0]


def attend_obstacle(qkv: jax.Array, keys: jax.Array) -> str | None:
    """Why the kernel cannot do it, or None."""
    _, groups, slots, size = keys.shape
    if size != HEAD or not qkv.dtype == keys.dtype == jnp.bfloat16:
        return f"it takes bfloat16 heads of {HEAD}, not {keys.dtype} ones of {size}"
    share = (qkv.shape[1] // size - 2 * groups) / groups
    if share not in (1, 2, 4, 8):
        return f"it takes 1, 2, 4 or 8 query heads to a key head, not {share:g}"
    if slots > MAX_PARTS * 2048:
        return f"it takes up to {MAX_PARTS * 2048} slots, not {slots}"
    return None


@functools.partial(jax.jit, static_argnames=("eps", "splits"))
def run_attend(qkv, q_scale, k_scale, cos, sin, keys, values, valid, slot, *, eps: float, splits: int):
    _, groups, slots, size = keys.shape
    heads = qkv.shape[1] // size - 2 * groups
    length = -(-slots // (splits * SLOTS)) * SLOTS
    task = Attend(heads, groups, slots, splits, length, eps)
    operands = dict(
        qkv=qkv, q_scale=q_scale.astype(qkv.dtype), k_scale=k_scale.astype(qkv.dtype), cos=cos, sin=sin,
        valid=valid.astype(jnp.uint8), slot=slot.reshape(1), keys=keys, values=values,
    )  # fmt: skip
    results = {
        "out": jax.ShapeDtypeStruct((splits, heads, size), qkv.dtype),
        "weight": jax.ShapeDtypeStruct((splits, heads, 2), jnp.float32),
    }
    out = launch_updating(
        attend, task, operands, results, updated=("keys", "values"), blocks=groups * splits, threads=ATTEND_THREADS,
        scratch_words=task.scratch_words, name="attend_token",
    )  # fmt: skip
    return out["out"], out["weight"], out["keys"], out["values"]
