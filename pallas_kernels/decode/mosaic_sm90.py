"""The kernels of a decode step of one token, for NVIDIA GPUs, written for one thread.

A linear map reads its weights once: each warp takes `rows` rows of [N, D], its lanes 16 bytes each, and adds up in
float32. Its loads are on their way while the block makes its copy of the input row (a norm, or the sum of attention's
parts) in shared memory. Every block does that for itself: from the L2 cache it costs less than one more kernel.

Attention: a block takes up to `SLOTS` slots at a time of one key head and all query heads that share it. Letters as in
`api`; R = H / G query heads of a key head.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from ..permute.thread import F, P, Pointer, Thread, U, launch
from ..quantize import lane as lanes
from ..route import Rule
from ..route import mosaic_sm90 as route

MULTIPROCESSORS = 132  # of an H200; others have about as many
HEAD = 128  # size of a head
MAX_PARTS = 16
SLOTS = 128  # of the cache, that a block has in flight
ATTEND_THREADS = 512
UNROLLED = 8  # rows of a warp, beyond which its code is a loop
EXPERT_WARPS = 4  # of a block
NEVER = -1e30  # a score that is not seen
LOG2E = math.log2(math.e)


def _sum(o: Thread, x: F, masks=(16, 8, 4, 2, 1)) -> F:
    for mask in masks:
        x = x + o.float(o.shuffle_xor(o.bits(x), mask))
    return x


def _pack(o: Thread, values: list[F]) -> list[U]:
    return [o.pack_half(values[i], values[i + 1], "bf16") for i in range(0, len(values), 2)]


def _floats(o: Thread, words: list[U]) -> list[F]:
    return lanes.to_floats(o, words, "bf16")


# --- linear maps


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
            words = _pack(o, [a + b for a, b in zip(_floats(o, words), _floats(o, more), strict=True)])
        scale = refs["scale"].at(piece, 16).load(4, inside)
        values = _floats(o, words)
        for v in values:
            squares = o.fma(v, v, squares)
        pieces.append((piece, inside, words, values, scale))
    total = _sum(o, squares)
    stats = refs["scratch"].at(None, 0, 2 * t.columns)
    stats.at(o.thread() >> 5, 4).store([o.bits(total)], o.lane() < U(1))
    o.barrier()
    total = o.F(0.0)
    for w in range(0, t.threads // 32, 4):
        for word in stats.at(None, 0, 4 * w).load(4):
            total = total + o.float(word)
    inverse = o.rsqrt_approx(total * o.F(1 / t.columns) + o.F(t.eps))
    for piece, inside, words, values, scale in pieces:
        scale = _floats(o, scale)
        normed = _pack(o, [v * (inverse * s) for v, s in zip(values, scale, strict=True)])
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
        out = [a + o.mul_rounded(factor, v) for a, v in zip(out, _floats(o, words), strict=True)]
    return _pack(o, out)


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
                out = [o.fma(shares[p] * over, v, s) for v, s in zip(_floats(o, words), out, strict=True)]
        refs["scratch"].at(piece, 16).store(_pack(o, out), inside)


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
            for i, (a, b) in enumerate(zip(_floats(o, words[c]), _floats(o, x), strict=True)):
                sums[i % 4] = o.fma(a, b, sums[i % 4])
        total = _sum(o, (sums[0] + sums[1]) + (sums[2] + sums[3]))
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
    return _floats(o, [o.pack_half(x, o.F(0.0), "bf16")])[0]


def _half(o: Thread, at: Pointer, where: P) -> F:
    """One bfloat16."""
    return o.float(at.load(1, where, bits=16)[0] << 16)


# --- attention


@dataclasses.dataclass(frozen=True)
class Attend:
    """heads H, groups G; slots N of the cache, in parts of `length`, a multiple of SLOTS.

    ahead: lines of 128 bytes that further blocks bring into the L2 cache meanwhile.
    """

    heads: int
    groups: int
    slots: int
    parts: int
    length: int
    eps: float
    ahead: int = 0

    @property
    def busy(self) -> int:
        """Blocks that attend."""
        return self.groups * self.parts

    @property
    def blocks(self) -> int:
        return max(MULTIPROCESSORS, self.busy + 1) if self.ahead else self.busy

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
    values = _floats(o, refs["qkv"].at(row, 2 * HEAD, lane * 8).load(2, inside))
    squares = o.F(0.0)
    for v in values:
        squares = o.fma(v, v, squares)
    inverse = o.rsqrt_approx(_sum(o, squares) * o.F(1 / HEAD) + o.F(t.eps))
    factor = _floats(o, scale.at(lane, 8).load(2))
    words = _pack(o, [v * (inverse * f) for v, f in zip(values, factor, strict=True)])
    mine, others = _floats(o, words), _floats(o, [o.shuffle_xor(w, 16) for w in words])
    angle = (lane & 15) * 16
    cos, sin = (refs[n].at(None, 0, angle).load(4) for n in ("cos", "sin"))
    upper = lane >= U(16)
    out = []
    for a, b, c, s in zip(mine, others, cos, sin, strict=True):
        turn = b * o.float(s)
        out.append(o.fma(a, o.float(c), o.where(upper, turn, -turn)))
    return _pack(o, out)


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
    return _sum(o, sums[0], masks)


def attend_and_prefetch(o: Thread, t: Attend, refs: dict[str, Pointer]):
    """Attention needs few of the blocks that there is room for; the others fetch what the next kernel reads."""
    attends = o.block() < U(t.busy)
    o.when(attends, lambda: attend(o, t, refs))

    def fetch():
        threads = (t.blocks - t.busy) * ATTEND_THREADS
        first = (o.block() - t.busy) * ATTEND_THREADS + o.thread()
        for i in range(-(-t.ahead // threads)):
            line = first + i * threads
            refs["ahead"].at(line, 128).prefetch(line < U(t.ahead))

    o.when(~attends, fetch)


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
        wide = [o.bits(v * o.F(HEAD**-0.5 * LOG2E)) for v in _floats(o, q)]
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
            k = _floats(o, [o.where(own, m, w) for m, w in zip(mine, words, strict=True)])
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

    _turns(o, t.length // SLOTS, score)
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

    total = _sum(o, o.float(_fold(o, t.length // 32, term, o.bits(o.F(0.0)))))
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
            v = _floats(o, [o.where(own, m, w) for m, w in zip(own_value, words, strict=True)])
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


def _turns(o: Thread, count: int, body):
    if count == 1:
        body(U(0))
    else:

        def turn(i: U) -> list[U]:
            body(i)
            return []

        o.loop(count, turn, [])


# --- experts


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
        values = _floats(o, x.at(None, 0, 512 * c).at(o.lane(), 16).load(4))
        for i, (a, b) in enumerate(zip(_floats(o, chunk), values, strict=True)):
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
        gate, up = (_sum(o, _dot(o, row, refs["x"], o.F(0.0))) for row in rows)
        silu = gate * o.rcp_approx(o.exp2_approx(gate * o.F(-LOG2E)) + o.F(1.0))
        word = o.pack_half(silu * up, o.F(0.0), "bf16")
        refs["hidden"].at(k * t.width + f, 2).store([word], inside & (o.lane() < U(1)), bits=16)

    _turns(o, t.rows, row)


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
        word = o.pack_half(_sum(o, total), o.F(0.0), "bf16")
        refs["out"].at(d, 2).store([word], inside & (o.lane() < U(1)), bits=16)

    _turns(o, t.rows, row)


# --- what they can do, and how they are called


def linear_obstacle(x: jax.Array, w: jax.Array, out_dtype) -> str | None:
    """Why the kernel cannot do it, or None."""
    if not (x.dtype == w.dtype == jnp.bfloat16 and out_dtype in (jnp.bfloat16, jnp.float32)):
        return f"it multiplies bfloat16 and gives bfloat16 or float32, not {x.dtype}, {w.dtype} and {out_dtype}"
    if w.shape[1] % 256 or not w.shape[0]:
        return f"it takes rows in multiples of 256 values, not of {w.shape[1]}"
    return None


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


def merged_obstacle(out: jax.Array, w: jax.Array, add: jax.Array) -> str | None:
    """Why the kernel cannot do it, or None."""
    if out.shape[2] != HEAD or not out.dtype == add.dtype == jnp.bfloat16:
        return f"it takes bfloat16 heads of {HEAD}, not {out.dtype} ones of {out.shape[2]}"
    return linear_obstacle(add, w, out.dtype)


def _launch(program, task, operands, outputs, *, updated: tuple[str, ...] = (), **how) -> dict[str, jax.Array]:
    """`launch` with some operands that are written in place; they are among the results."""
    refs = {name: jax.new_ref(operands[name]) for name in updated}
    out = launch(program, task, {**operands, **refs}, outputs, **how)
    return out | {name: jax.freeze(ref) for name, ref in refs.items()}


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
    how = dict(adds=adds, weighted=places is not None, eps=eps, copies=copies)
    task = Linear(columns, outputs, threads, _rows(outputs, threads), wide, True, **how)
    operands = {"x": x, "scale": scale.astype(x.dtype), "w": w}
    operands |= {n: a for n, a in (("add", add), ("places", places), ("weights", weights)) if a is not None}
    results = {
        "out": jax.ShapeDtypeStruct((1, outputs), out_dtype),
        "total": jax.ShapeDtypeStruct(x.shape, x.dtype),
        "normed": jax.ShapeDtypeStruct((copies, columns), x.dtype),
    }
    out = _launch(
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
    out = _launch(
        linear, task, operands, {"out": jax.ShapeDtypeStruct(add.shape, add.dtype)}, blocks=task.blocks,
        threads=task.threads, scratch_words=task.scratch_words, name="merged_linear",
    )  # fmt: skip
    return out["out"]


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
    how = dict(threads=32 * EXPERT_WARPS)
    task = Experts(top_k, columns, width, each(top_k * width))
    operands, results = (
        {"x": x, "ids": ids, "gate_up": gate_up},
        {"hidden": jax.ShapeDtypeStruct((top_k, width), x.dtype)},
    )
    out = _launch(expert_up, task, operands, results, blocks=top_k * task.up_blocks, name="expert_up", **how)
    task = Experts(top_k, columns, width, each(columns))
    operands = {"hidden": out["hidden"], "ids": ids, "weights": weights, "down": down}
    results = {"out": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    return _launch(expert_down, task, operands, results, blocks=task.down_blocks, name="expert_down", **how)["out"]


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
    how = dict(blocks=1, threads=32 * route.WARPS, name="choose_and_sort")
    out = _launch(choose_and_sort, task, operands, results, **how)
    return out["weights"], out["places"], out["sizes"]


@functools.partial(jax.jit, static_argnames=("eps", "splits"))
def run_attend(qkv, q_scale, k_scale, cos, sin, keys, values, valid, slot, ahead=None, *, eps: float, splits: int):
    _, groups, slots, size = keys.shape
    heads = qkv.shape[1] // size - 2 * groups
    length = -(-slots // (splits * SLOTS)) * SLOTS
    task = Attend(heads, groups, slots, splits, length, eps, 0 if ahead is None else ahead.nbytes // 128)
    operands = dict(
        qkv=qkv, q_scale=q_scale.astype(qkv.dtype), k_scale=k_scale.astype(qkv.dtype), cos=cos, sin=sin,
        valid=valid.astype(jnp.uint8), slot=slot.reshape(1), keys=keys, values=values,
    )  # fmt: skip
    program = attend
    if ahead is not None:
        operands["ahead"], program = ahead, attend_and_prefetch
    results = {
        "out": jax.ShapeDtypeStruct((splits, heads, size), qkv.dtype),
        "weight": jax.ShapeDtypeStruct((splits, heads, 2), jnp.float32),
    }
    out = _launch(
        program, task, operands, results, updated=("keys", "values"), blocks=task.blocks, threads=ATTEND_THREADS,
        scratch_words=task.scratch_words, name="attend_token",
    )  # fmt: skip
    return out["out"], out["weight"], out["keys"], out["values"]
