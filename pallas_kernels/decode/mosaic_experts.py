"""One token's experts on NVIDIA GPUs: which they are, written for one thread; and a few tokens through theirs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..grouped_matmul import Gate, mosaic_vector
from ..permute.thread import Pointer, Thread, U
from ..route import Rule
from ..route import mosaic_sm90 as route
from .mosaic_common import launch_updating


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


def experts_obstacle(x, ids, gate_up, down, gate_up_bias, down_bias) -> str | None:
    """Why the kernels cannot do it, or None."""
    pairs, width = ids.size, gate_up.shape[2]
    why = mosaic_vector.multiply_obstacle(x, gate_up, pairs, bias=gate_up_bias)
    hidden = jax.ShapeDtypeStruct((pairs, width), x.dtype)
    return why or mosaic_vector.sum_obstacle(hidden, down, x.shape[0], bias=down_bias)


@functools.partial(jax.jit, static_argnames=("gate", "out_dtype"))
def run_experts(x, ids, weights, gate_up, down, gate_up_bias, down_bias, *, gate: Gate, out_dtype) -> jax.Array:
    how: Any = dict(gate=gate, bias=gate_up_bias, following=down, out_dtype=x.dtype)
    hidden = mosaic_vector.run_multiply(x, gate_up, ids.reshape(-1), **how)
    return mosaic_vector.run_sum(hidden, down, ids, weights, bias=down_bias, out_dtype=out_dtype)


@functools.partial(jax.jit, static_argnames=("rule", "gate", "out_dtype"))
def run_routed(x, logits, bias, valid, gate_up, down, gate_up_bias, down_bias, *, rule: Rule, gate: Gate, out_dtype):
    how: Any = dict(rule=rule, bias=bias, valid=valid, gate=gate, gate_up_bias=gate_up_bias, following=down)
    hidden, ids, weights = mosaic_vector.run_chosen(x, gate_up, logits, **how)
    y = mosaic_vector.run_sum(hidden, down, ids, weights, bias=down_bias, out_dtype=out_dtype)
    return y, ids, weights


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
