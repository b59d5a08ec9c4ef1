"""Up to 32 pairs of a token and one of its experts: their matmuls, written for one thread; see vector_weights.py.

`run_multiply` is gate and up with the activation, `run_chosen` the same of one token, whose experts it chooses, and
`run_sum` the down projection with the weighted sum of each token's experts. Pairs of one expert share what is read of
its weights, up to `columns` of them; the first of them is their leader, and does the work.

Behind `grouped_matmul` they would gain little: on an H200, 8 rows of 8 groups (K=2048, N=1536) took 7.9 us instead of
9.8 in NVFP4 and 15.5 instead of 14.5 in BF16, 32 rows of 32 groups 26 instead of 20 and 53 instead of 48.

Letters: T tokens, K pairs of a token, G experts, N rows of a weight.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..permute.thread import F, P, Pointer, Thread, U, launch
from ..quantize import QTensor
from ..route import mosaic_sm90 as route
from .gate import Gate
from .vector_weights import (
    TILE,
    Share,
    Weight,
    describe,
    multiply,
    operands,
    prefetch,
    row_factor,
    rows_of,
    store_tokens,
    token_bytes,
)
from .vector_weights import obstacle as weight_obstacle

MAX_PAIRS = 32  # one in each lane
MAX_COLUMNS = 8  # of the matrix instruction
NOBODY = 0xFFFFFFFF
SHARED_BYTES = 200 * 1024
TOKEN_BYTES = 36 * 1024  # of the tokens of one expert, so that six blocks fit a multiprocessor
SPLITS = 4  # warps of a block in `run_multiply`
SUM_WARPS = 16  # of a block in `run_sum`
PREFETCHED_BYTES = 24 * 2**20  # half of L2
LOG2E = math.log2(math.e)


def gated(o: Thread, gate: Gate, g: F, u: F) -> F:
    """`gate.gated_product`."""
    one = o.F(1.0)

    def sigmoid(x: F) -> F:
        return o.rcp_approx(o.exp2_approx(x * o.F(-LOG2E)) + one)

    if gate.kind == "swiglu_oai":
        limit = o.F(gate.limit)
        g = o.where(limit < g, limit, g)  # NaN stays
        u = o.where(limit < u, limit, u)
        u = o.where(u < -limit, -limit, u)
        return g * sigmoid(g * o.F(gate.alpha)) * (u + one)
    if gate.kind == "silu":
        return g * sigmoid(g) * u
    if gate.kind == "gelu_tanh":  # 1 + tanh(x) = 2 * sigmoid(2x)
        inner = o.F(0.7978845608028654) * (g + o.F(0.044715) * g * g * g)
        return g * sigmoid(inner + inner) * u
    x = g * o.F(0.7071067811865476)
    size = o.abs(x)
    t = o.rcp_approx(o.fma(size, o.F(0.3275911), one))
    series = o.F(1.061405429)
    for c in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = o.fma(series, t, o.F(c))
    tail = series * t * o.exp2_approx(size * size * o.F(-LOG2E))
    both = o.where(x < o.F(0.0), tail, o.F(2.0) - tail)  # 1 + erf
    return o.F(0.5) * g * both * u


@dataclasses.dataclass(frozen=True)
class Group:
    """Pairs that share the weights of `expert`: `pairs`, of which `count` are. leads: whether `pair` is their first."""

    expert: U
    leads: P
    count: U
    pairs: Sequence[U]

    def of_column(self, o: Thread, column: U) -> U:
        """The pair in a column, NOBODY where there is none."""
        found = self.pairs[0]
        for j, pair in enumerate(self.pairs[1:], 1):
            found = o.where(column.same(o.U(j)), pair, found)
        return o.where(column < self.count, found, o.U(NOBODY))


def group_of(o: Thread, pair: U, mine: U, experts: int, columns: int) -> Group:
    """The group of `pair`, the same in all lanes of a warp. mine: the expert of the lane's own pair, or above all."""
    lane = o.lane()
    expert = o.warp_min(o.where(lane.same(pair), mine, o.U(NOBODY)))
    same = mine.same(expert)
    mask = o.warp_or(o.where(same, o.U(1) << lane, o.U(0)))
    before = o.popcount(mask & ((o.U(1) << pair) - 1))
    leads = expert < o.U(experts)
    if columns == 1:
        return Group(expert, leads, o.U(1), [pair])
    leads = leads & (before % columns).same(o.U(0))
    place = o.popcount(mask & ((o.U(1) << lane) - 1)) - before
    pairs = [pair]
    for j in range(1, columns):
        pairs.append(o.warp_min(o.where(same & place.same(o.U(j)), lane, o.U(NOBODY))))
    return Group(expert, leads, o.umin(o.popcount(mask) - before, o.U(columns)), pairs)


@dataclasses.dataclass(frozen=True)
class Multiply:
    """pairs: rows of the result. top_k: pairs of a row of x. experts: G of the weight. bias: its dtype, or None.
    following: the stack of weights that these experts multiply with next. choice: how the experts of the only token are
    chosen from the router's logits, where they are not given.
    """

    w: Weight
    share: Share
    pairs: int
    top_k: int
    columns: int
    experts: int
    gate: Gate
    bias: str | None
    out: str
    following: Weight | None
    choice: route.Task | None

    @property
    def tiles(self) -> int:
        return -(-self.w.rows // TILE)

    @property
    def warps(self) -> int:
        return -(-self.share.splits // 4) * 4

    # Shared memory, in bytes: tokens, sums float32 [splits, 2, TILE, columns].
    @property
    def sums_at(self) -> int:
        return self.columns * token_bytes(self.w, self.share)

    @property
    def scratch_words(self) -> int:
        return self.sums_at // 4 + self.share.splits * 2 * TILE * self.columns


def multiply_rows(o: Thread, t: Multiply, refs: dict[str, Pointer]):
    lane, scratch = o.lane(), refs["scratch"]
    pair, tile = o.block() // t.tiles, o.block() % t.tiles

    def tokens_of(group: Group):
        def row_of(column: U):
            there = None if t.columns == 1 else column < group.count
            found = group.of_column(o, column) if t.columns > 1 else pair
            if there is not None:
                found = o.where(there, found, o.U(0))
            return refs["x"].at(found // t.top_k, 2 * t.w.columns), there

        return store_tokens(o, t.w, t.share, t.columns, row_of, scratch, 32 * t.warps)

    if t.choice:  # by every warp: another kernel, or a barrier, would take longer
        first = o.block().same(o.U(0)) & (o.thread() < o.U(32))
        of_choice = refs | ({"bias": refs["choice_bias"]} if t.choice.has_bias else {})
        chosen, _ = route.choose(o, t.choice, of_choice, o.U(0), first)
        expert = o.warp_min(o.where(lane.same(pair), chosen, o.U(NOBODY)))
        group = Group(expert, expert < o.U(t.experts), o.U(1), [pair])
    elif t.columns == 1:
        expert = refs["ids"].at(pair, 4).load(1)[0]
        group = Group(expert, expert < o.U(t.experts), o.U(1), [pair])
    else:
        mine = refs["ids"].at(lane, 4).load(1, lane < o.U(t.pairs))[0]
        mine = o.where((mine < o.U(t.experts)) & (lane < o.U(t.pairs)), mine, o.U(NOBODY))
        group = group_of(o, pair, mine, t.experts, t.columns)

    def work():
        row, column = o.thread() & (TILE - 1), o.thread() // TILE
        first, expert, warp = tile * TILE, group.expert, o.thread() >> 5
        split = o.umin(warp, o.U(t.share.splits - 1))
        finish_tokens = tokens_of(group)
        tiles = [rows_of(o, t.w, refs, "w", expert * 2 + i, first) for i in range(2)]
        last = o.umin(first + row, o.U(t.w.rows - 1))
        factors = [row_factor(o, t.w, refs, "w", (expert, i, last)) for i in range(2)]
        biases = [_bias(o, refs, t.bias, (expert * 2 + i) * t.w.rows + last) for i in range(2)]
        slot = lane >> 2
        slot = o.where(slot < group.count, slot, o.U(0))
        x = scratch if t.columns == 1 else scratch.at(slot, token_bytes(t.w, t.share))

        def ready():
            finish_tokens()
            o.barrier()

        sums = multiply(o, t.w, t.share, tiles, split, x, ready)
        kept = scratch.at(None, 0, t.sums_at)
        if t.following:  # while other blocks end and the next kernel begins; earlier it would be in their way
            most = PREFETCHED_BYTES // t.pairs
            prefetch(o, t.following, refs, "next", expert, tile, t.tiles, most)
        _keep(o, t.columns, kept.at(split, 2 * TILE * t.columns * 4), sums, warp < o.U(t.share.splits))
        o.barrier()
        mine = column < o.U(t.columns)
        at = kept.at(o.where(mine, row * t.columns + column, o.U(0)), 4)
        totals = []
        for i in range(2):
            total = o.F(0.0)
            for s in range(t.share.splits):
                total = total + o.float(at.load(1, offset=((s * 2 + i) * TILE * t.columns) * 4)[0])
            totals.append(o.fma(total, factors[i], biases[i]))
        found = group.of_column(o, column) if t.columns > 1 else pair
        there = mine & (column < group.count) & (first + row < o.U(t.w.rows))
        index = o.where(there, found, o.U(0)) * t.w.rows + (first + row)
        _store(o, refs["out"], index, gated(o, t.gate, *totals), t.out, there)

    o.when(group.leads, work)


def _keep(o: Thread, columns: int, at: Pointer, tiles: list[list[F]], where: P):
    """Sums of a warp to float32 [tile, TILE, columns] in shared memory."""
    g, t = o.lane() >> 2, o.lane() & 3
    width = min(columns, 2)
    here = where & (t < o.U(-(-columns // 2)))
    for i, sums in enumerate(tiles):
        for half in range(2):
            row = at.at(g + (i * TILE + 8 * half), columns * 4, t * 8 if columns > 1 else 0)
            row.store([o.bits(v) for v in sums[2 * half : 2 * half + width]], here)


def _store(o: Thread, out: Pointer, index: U, value: F, dtype: str, where: P):
    if dtype == "float32":
        out.at(index, 4).store([o.bits(value)], where)
    else:
        half = {"bfloat16": "bf16", "float16": "f16"}[dtype]
        out.at(index, 2).store([o.pack_half(value, o.F(0.0), half)], where, bits=16)


def _bias(o: Thread, refs: dict[str, Pointer], dtype: str | None, index: U) -> F:
    if dtype is None:
        return o.F(0.0)
    if dtype == "float32":
        return o.float(refs["bias"].at(index, 4).load(1)[0])
    return o.float(refs["bias"].at(index, 2).load(1, bits=16)[0] << 16)


@dataclasses.dataclass(frozen=True)
class Sum:
    """The weighted sum over a token's pairs; tokens: T. The others are as in `Multiply`."""

    w: Weight
    share: Share
    tokens: int
    top_k: int
    columns: int
    experts: int
    bias: str | None
    out: str

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k

    @property
    def blocks(self) -> int:
        return -(-self.w.rows // TILE)

    @property
    def items(self) -> int:
        """Products of a block: of each pair, split."""
        return self.pairs * self.share.splits

    @property
    def warps(self) -> int:
        return min(SUM_WARPS, -(-self.items // 4) * 4)

    # Shared memory, in bytes: a row of each pair, sums float32 [pairs, splits, TILE], experts and weights of the pairs.
    @property
    def sums_at(self) -> int:
        return self.pairs * token_bytes(self.w, self.share)

    @property
    def pairs_at(self) -> int:
        return self.sums_at + self.items * TILE * 4

    @property
    def scratch_words(self) -> int:
        return self.pairs_at // 4 + 2 * MAX_PAIRS


def sum_rows(o: Thread, t: Sum, refs: dict[str, Pointer]):
    lane, warp, scratch = o.lane(), o.thread() >> 5, refs["scratch"]
    first = o.block() * TILE
    inside = lane < o.U(t.pairs)
    mine = refs["ids"].at(lane, 4).load(1, inside)[0]
    weight = refs["weights"].at(lane, 4).load(1, inside)[0]
    mine = o.where(inside & (mine < o.U(t.experts)), mine, o.U(NOBODY))
    known = scratch.at(None, 0, t.pairs_at)
    known.at(lane, 8).store([mine, weight], warp.same(o.U(0)))
    finish_tokens = store_tokens(
        o, t.w, t.share, t.pairs, lambda p: (refs["x"].at(p, 2 * t.w.columns), None), scratch, 32 * t.warps
    )
    kept, started = scratch.at(None, 0, t.sums_at), [False]

    def ready():
        if not started[0]:
            started[0] = True
            finish_tokens()
            o.barrier()

    def work(item: U):
        pair, split = item // t.share.splits, item % t.share.splits
        group = group_of(o, pair, mine, t.experts, t.columns)
        leads = group.leads & (item < o.U(t.items))
        expert = o.where(leads, group.expert, o.U(0))
        tile = rows_of(o, t.w, refs, "w", expert, first)
        found = group.of_column(o, lane >> 2) if t.columns > 1 else pair
        found = o.where(found < o.U(t.pairs), found, o.umin(pair, o.U(t.pairs - 1)))
        x = scratch.at(found, token_bytes(t.w, t.share))
        rows = [o.umin(first + (lane >> 2) + 8 * i, o.U(t.w.rows - 1)) for i in range(2)]
        factors = [row_factor(o, t.w, refs, "w", (expert, 0, r)) for r in rows]
        biases = [_bias(o, refs, t.bias, expert * t.w.rows + r) for r in rows]
        (sums,) = multiply(o, t.w, t.share, [tile], split, x, ready, leads)
        once = split.same(o.U(0))
        for half in range(2):
            bias = o.where(once, biases[half], o.F(0.0))
            for j in range(min(2, t.columns)):
                column = (lane & 3) * 2 + j
                to = group.of_column(o, column) if t.columns > 1 else pair
                there = leads & (to < o.U(t.pairs)) & (column < o.U(t.columns))
                at = o.where(there, to * t.share.splits + split, o.U(0))
                at = kept.at(at, 4 * TILE, ((lane >> 2) + 8 * half) * 4)
                at.store([o.bits(o.fma(sums[2 * half + j], factors[half], bias))], there)

    trips = -(-t.items // t.warps)
    for trip in range(trips):
        work(warp + trip * t.warps)
    o.barrier()
    token, row = o.thread() // TILE, o.thread() & (TILE - 1)
    for start in range(0, t.tokens, t.warps * 2):
        at = token + start
        here = at < o.U(t.tokens)
        at = o.where(here, at, o.U(0))
        total = o.F(0.0)
        for k in range(t.top_k):
            pair = at * t.top_k + k
            expert, weight = known.at(pair, 8).load(2)
            part = o.F(0.0)
            for s in range(t.share.splits):
                part = part + o.float(kept.at(pair * t.share.splits + s, 4 * TILE, row * 4).load(1)[0])
            total = o.where(expert < o.U(t.experts), o.fma(o.float(weight), part, total), total)
        column = first + row
        _store(o, refs["out"], at * t.w.rows + column, total, t.out, here & (column < o.U(t.w.rows)))


def _columns(tokens: int, row_bytes: int) -> int:
    """Tokens of one expert that are multiplied together."""
    columns = 1
    while columns < min(tokens, MAX_COLUMNS) and 2 * columns * row_bytes <= TOKEN_BYTES:
        columns *= 2
    return columns


def _multiply_task(x, w, *, pairs, gate, bias, out, following=None, choice=None) -> Multiply:
    kept = describe(w)
    share = Share.of(kept, SPLITS, 2)
    columns = _columns(x.shape[0], token_bytes(kept, share))
    dtype = None if bias is None else str(bias.dtype)
    top_k = pairs // x.shape[0]
    following = None if following is None else describe(following)
    out = str(jnp.dtype(out))
    return Multiply(kept, share, pairs, top_k, columns, w.shape[0], gate, dtype, out, following, choice)


def _obstacle(x: Any, w: Any, pairs: int, bias: Any) -> str | None:
    """Why neither kernel can do this, but for what shared memory holds."""
    if not 0 < pairs <= MAX_PAIRS:
        return f"it takes up to {MAX_PAIRS} pairs of a token and an expert, not {pairs}"
    if bias is not None and str(bias.dtype) not in ("bfloat16", "float32"):
        return f"it adds a bias of bfloat16 or float32, not {bias.dtype}"
    return weight_obstacle(x, w)


def multiply_obstacle(x: Any, w: Any, pairs: int, *, bias: Any = None) -> str | None:
    """Why `run_multiply` cannot do this, or None. pairs: rows of the result."""
    reason = _obstacle(x, w, pairs, bias)
    if reason is None:
        task = _multiply_task(x, w, pairs=pairs, gate=Gate(), bias=None, out="float32")
        if 4 * task.scratch_words > SHARED_BYTES:
            reason = f"rows of {x.shape[1]} values do not fit its shared memory"
    return reason


@functools.partial(jax.jit, static_argnames=("gate", "out_dtype"))
def run_multiply(
    x: jax.Array,
    w: jax.Array | QTensor,
    ids: jax.Array,
    *,
    gate: Gate,
    bias: jax.Array | None = None,
    following: jax.Array | QTensor | None = None,
    out_dtype: Any,
) -> jax.Array:
    """gate(w[e, 0] . x + bias[e, 0]) * (w[e, 1] . x + bias[e, 1]) for each pair of a row of x [T, K] and an e.

    Returns [pairs, N]. w: [G, 2, N, K]. ids: int32 [pairs], a multiple of T; what is not in [0, G) is none, and its row
    may be anything. bias: [G, 2, N]. following: a stack of the same experts' weights, which is brought into L2.
    """
    pairs = ids.shape[0]
    task = _multiply_task(x, w, pairs=pairs, gate=gate, bias=bias, out=out_dtype, following=following)
    given = {"x": x, "ids": ids, **operands(w, "w")}
    given |= {} if bias is None else {"bias": bias}
    given |= {} if following is None else operands(following, "next")
    return launch(
        multiply_rows,
        task,
        given,
        {"out": jax.ShapeDtypeStruct((pairs, task.w.rows), out_dtype)},
        blocks=pairs * task.tiles,
        threads=32 * task.warps,
        scratch_words=task.scratch_words,
        name="expert_rows_gated",
    )["out"]


@functools.partial(jax.jit, static_argnames=("rule", "gate"))
def run_chosen(
    x: jax.Array,
    w: jax.Array | QTensor,
    logits: jax.Array,
    *,
    rule: route.Rule,
    bias: jax.Array | None,
    valid: jax.Array | None,
    gate: Gate,
    gate_up_bias: jax.Array | None,
    following: jax.Array | QTensor,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`run_multiply` of one token x [1, D] with w [G, 2, F, D] of the experts that `choose_experts` chooses for it.

    logits: float32 [1, G]; bias, valid: as for `choose_experts`. Returns [K, F], ids int32 [1, K], weights float32
    [1, K].
    """
    choice = route.Task(1, logits.shape[1], rule, bias is not None, valid is not None)
    how: Any = dict(pairs=rule.top_k, gate=gate, bias=gate_up_bias, out=x.dtype)
    task = _multiply_task(x, w, **how, following=following, choice=choice)
    given = {"x": x, "logits": logits, **operands(w, "w"), **operands(following, "next")}
    given |= {} if gate_up_bias is None else {"bias": gate_up_bias}
    given |= {} if bias is None else {"choice_bias": bias}
    given |= {} if valid is None else {"valid": valid.astype(jnp.uint8)}
    results = {
        "out": jax.ShapeDtypeStruct((rule.top_k, task.w.rows), x.dtype),
        "ids": jax.ShapeDtypeStruct((1, rule.top_k), jnp.int32),
        "weights": jax.ShapeDtypeStruct((1, rule.top_k), jnp.float32),
    }
    out = launch(
        multiply_rows, task, given, results, blocks=task.pairs * task.tiles, threads=32 * task.warps,
        scratch_words=task.scratch_words, name="chosen_rows_gated",
    )  # fmt: skip
    return out["out"], out["ids"], out["weights"]


def _sum_task(x, w, *, tokens, bias, out) -> Sum:
    kept, pairs = describe(w), x.shape[0]
    share = Share.of(kept, max(1, SUM_WARPS // pairs), 1)
    columns = 1 if tokens == 1 else _columns(tokens, 0)
    dtype = None if bias is None else str(bias.dtype)
    return Sum(kept, share, tokens, pairs // tokens, columns, w.shape[0], dtype, str(jnp.dtype(out)))


def sum_obstacle(x: Any, w: Any, tokens: int, *, bias: Any = None) -> str | None:
    """Why `run_sum` cannot do this, or None. x: [pairs, F]."""
    pairs = x.shape[0]
    reason = _obstacle(x, w, pairs, bias)
    if reason is None:
        task = _sum_task(x, w, tokens=tokens, bias=None, out="float32")
        if 4 * task.scratch_words > SHARED_BYTES:
            reason = f"{pairs} rows of {x.shape[1]} values do not fit its shared memory"
    return reason


@functools.partial(jax.jit, static_argnames=("out_dtype",))
def run_sum(
    x: jax.Array,
    w: jax.Array | QTensor,
    ids: jax.Array,
    weights: jax.Array,
    *,
    bias: jax.Array | None = None,
    out_dtype: Any,
) -> jax.Array:
    """sum over k of weights[t, k] * (w[ids[t, k]] . x[t * K + k] + bias[ids[t, k]]), over valid ids -> [T, N].

    x: [T * K, F]. w: [G, N, F]. ids: int32 [T, K]; anything outside [0, G) is none, and its x may be anything. weights:
    float32 [T, K]. bias: [G, N].
    """
    tokens = ids.shape[0]
    task = _sum_task(x, w, tokens=tokens, bias=bias, out=out_dtype)
    given = {"x": x, "ids": ids.reshape(-1), "weights": weights.reshape(-1), **operands(w, "w")}
    given |= {} if bias is None else {"bias": bias}
    return launch(
        sum_rows,
        task,
        given,
        {"out": jax.ShapeDtypeStruct((tokens, task.w.rows), out_dtype)},
        blocks=task.blocks,
        threads=32 * task.warps,
        scratch_words=task.scratch_words,
        name="expert_sum",
    )["out"]
