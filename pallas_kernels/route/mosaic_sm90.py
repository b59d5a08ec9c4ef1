"""Choosing experts on NVIDIA GPUs: a warp takes a token, a lane every 32nd expert, and K rounds find the largest score.

XLA sorts all E scores of each token, in five kernels. Exponentials come from the hardware (2 ulp), so weights differ
from the reference's in their last bits, and scores that are that close may change places.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ..permute.thread import F, P, Pointer, Thread, U, launch
from .reference import NORMALIZE_EPS, Rule

WARPS = 4  # of a block
MAX_EXPERTS = 512  # 16 scores in each lane
ABS, INF, NAN, SIGN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000, 0x80000000
KEY_OF_MINUS_INF = 0x007FFFFF
LOG2E = 1.4426950408889634
LOG2E_LOW = 1.925963033500e-08  # what is left of log2(e) beyond its float32
MAGIC = 1.5 * 2.0**23  # adding and subtracting it rounds to an integer


@dataclasses.dataclass(frozen=True)
class Task:
    tokens: int
    experts: int
    rule: Rule
    has_bias: bool
    has_valid: bool

    @property
    def each(self) -> int:
        """Experts of a lane."""
        return self.experts // 32


def obstacle(tokens: int, experts: int, rule: Rule) -> str | None:
    """Why the kernel cannot do it, or None."""
    if tokens == 0 or experts % 32 or experts > MAX_EXPERTS:
        return f"it takes tokens, and experts in multiples of 32 up to {MAX_EXPERTS}, not {experts}"
    if rule.top_k > 32:
        return f"it chooses up to 32 experts, not {rule.top_k}"
    if rule.num_groups is not None and experts // rule.num_groups % 32:
        return f"it takes groups of multiples of 32 experts, not of {experts // rule.num_groups}"
    return None


def _exp(o: Thread, x: F) -> F:
    """e^x for x <= 0, to 2 ulp for every size of x; zero below 2^-126."""
    x = o.where(x < o.F(-200.0), o.F(-200.0), x)  # -Inf would meet itself below
    n = (x * o.F(LOG2E) + o.F(MAGIC)) + o.F(-MAGIC)
    fraction = o.fma(x, o.F(LOG2E_LOW), o.fma(x, o.F(LOG2E), -n))
    return o.exp2_approx(fraction) * o.exp2_approx(n)


def _key(o: Thread, x: F) -> U:
    """uint32 in the order of float32; NaN as -Inf, -0 as 0."""
    bits = o.bits(x + o.F(0.0))
    key = o.where(bits >= U(SIGN), bits ^ 0xFFFFFFFF, bits | SIGN)
    return o.where((bits & ABS) > U(INF), U(KEY_OF_MINUS_INF), key)


def _value(o: Thread, key: U) -> F:
    return o.float(o.where(key >= U(SIGN), key ^ SIGN, key ^ 0xFFFFFFFF))


def _sum(o: Thread, x: F) -> F:
    for mask in (16, 8, 4, 2, 1):
        x = x + o.float(o.shuffle_xor(o.bits(x), mask))
    return x


def _scores(o: Thread, t: Task, logits: list[F]) -> list[F]:
    if t.rule.order == "topk_then_softmax":
        return logits
    if t.rule.score == "sigmoid":
        out = []
        for x in logits:
            e = _exp(o, o.float(o.bits(x) | SIGN))  # e^-|x|
            part = o.div(o.F(1.0), e + o.F(1.0))
            out.append(o.where(o.bits(x) >= U(SIGN), e * part, part))
        return out
    top = functools.reduce(o.umax, [_key(o, x) for x in logits])
    top = _value(o, o.warp_max(top))
    parts = [_exp(o, x + -top) for x in logits]
    total = _sum(o, functools.reduce(lambda a, b: a + b, parts))
    return [o.div(p, total) for p in parts]


def _largest(o: Thread, keys: list[U], ids: list[U]) -> tuple[U, U]:
    """(key, id) of the warp's largest key, ties to the lower id; the same in all lanes."""
    best, at = keys[0], ids[0]
    for key, index in zip(keys[1:], ids[1:], strict=True):
        better = key > best
        best, at = o.where(better, key, best), o.where(better, index, at)
    top = o.warp_max(best)
    return top, o.warp_min(o.where(best.same(top), at, U(0xFFFFFFFF)))


def _limit_to_groups(o: Thread, t: Task, keys: list[U], ids: list[U]) -> list[U]:
    groups, best = t.rule.num_groups, t.rule.group_topk
    assert groups is not None and best is not None
    size = t.each // groups  # consecutive scores of a lane that belong to one group
    strength = []
    for g in range(groups):
        mine = slice(g * size, (g + 1) * size)
        key, winner = _largest(o, keys[mine], ids[mine])
        value = _value(o, key)
        if t.rule.group_score == "top2sum":
            rest = [o.where(i.same(winner), U(0), k) for k, i in zip(keys[mine], ids[mine], strict=True)]
            value = value + _value(o, _largest(o, rest, ids[mine])[0])
        strength.append(_key(o, value))
    out = []
    for g in range(groups):
        ahead = U(0)
        for h in range(groups):
            if h != g:
                wins = strength[h] >= strength[g] if h < g else strength[h] > strength[g]
                ahead = ahead + o.where(wins, U(1), U(0))
        eligible = ahead < U(best)
        out += [o.where(eligible, k, U(KEY_OF_MINUS_INF)) for k in keys[g * size : (g + 1) * size]]
    return out


def choose(o: Thread, t: Task, refs: dict[str, Pointer], token: U | None = None, where: P | None = None) -> tuple[U, F]:
    """Returns the id and the weight of place `lane` of the warp's token, for what follows in the same kernel.

    token, where: which token, and whether this warp stores what it finds; None where each warp has a token of its own.
    """
    rule, lane = t.rule, o.lane()
    token = o.block() * WARPS + (o.thread() >> 5) if token is None else token
    inside = token < U(t.tokens)
    ids = [lane + 32 * j for j in range(t.each)]
    row = refs["logits"].at(token, 4 * t.experts, lane * 4)
    logits = [o.float(row.at(None, 0, 128 * j).load(1, inside)[0]) for j in range(t.each)]
    scores = selection = _scores(o, t, logits)
    if t.has_bias:
        bias = [o.float(refs["bias"].at(None, 0, i * 4).load(1)[0]) for i in ids]
        selection = [s + b for s, b in zip(scores, bias, strict=True)]
    nan = U(0)
    for s in selection:
        nan = nan | o.where((o.bits(s) & ABS) > U(INF), U(1), U(0))
    ill_formed = o.warp_or(nan).same(U(1))
    keys = [_key(o, s) for s in selection]
    if rule.num_groups is not None:
        keys = _limit_to_groups(o, t, keys, ids)

    chosen, mine, first = U(0), U(0), U(0)
    for k in range(rule.top_k):
        _, winner = _largest(o, keys, ids)
        bits = U(0)
        for j in range(t.each):
            hit = ids[j].same(winner)
            bits = o.where(hit, o.bits(scores[j]), bits)
            keys[j] = o.where(hit, U(0), keys[j])  # below every key
        bits = o.warp_or(bits)
        first = bits if k == 0 else first
        here = lane.same(U(k))
        chosen, mine = o.where(here, winner, chosen), o.where(here, bits, mine)

    used = lane < U(rule.top_k)
    weight = o.float(mine)
    if rule.order == "topk_then_softmax":
        weight = _exp(o, weight + -o.float(first))
    weight = o.where(used, weight, o.F(0.0))
    if rule.order == "topk_then_softmax":
        weight = o.div(weight, _sum(o, weight))
    elif rule.normalize:
        weight = o.div(weight, _sum(o, weight) + o.F(NORMALIZE_EPS))
    weight = o.where(ill_formed, o.float(U(NAN)), weight * o.F(rule.scaling))
    if t.has_valid:
        valid = refs["valid"].at(token, 1).load(1, inside, bits=8)[0] > U(0)
        weight, chosen = o.where(valid, weight, o.F(0.0)), o.where(valid, chosen, U(0xFFFFFFFF))
    used = used if where is None else used & where
    refs["ids"].at(token, 4 * rule.top_k, lane * 4).store([chosen], inside & used)
    refs["weights"].at(token, 4 * rule.top_k, lane * 4).store([o.bits(weight)], inside & used)
    return chosen, weight


@functools.partial(jax.jit, static_argnums=0)
def run_choose(
    rule: Rule, logits: jax.Array, bias: jax.Array | None, valid: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """logits float32 [T, E], bias float32 [E], valid bool [T] -> ids int32 [T, K], weights float32 [T, K]."""
    tokens, experts = logits.shape
    task = Task(tokens, experts, rule, bias is not None, valid is not None)
    operands = {"logits": logits}
    if bias is not None:
        operands["bias"] = bias
    if valid is not None:
        operands["valid"] = valid.astype(jnp.uint8)
    shape = (tokens, rule.top_k)
    outputs = {"ids": jax.ShapeDtypeStruct(shape, jnp.int32), "weights": jax.ShapeDtypeStruct(shape, jnp.float32)}
    blocks = -(-tokens // WARPS)
    out = launch(choose, task, operands, outputs, blocks=blocks, threads=32 * WARPS, name="choose_experts")
    return out["ids"], out["weights"]
