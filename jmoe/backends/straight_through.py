"""Dispatch for a layer that is both run and trained: what is quantised arrives quantised, and still has a gradient.

T tokens on one rank, D hidden size, K experts per token, N received rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jmoe.payload import RowLayout
from jmoe.plan import Plan

from .base import Backend, Exchange
from .dispatch import Received, _dispatch_bwd, dispatch_float, dispatch_payload


def dispatch(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    plan: Plan,
    *,
    backend: Backend,
    exchange: Exchange,
    layout: RowLayout,
    global_scale: jax.Array | None = None,
) -> tuple[Received, jax.Array | None]:
    """`dispatch_payload` with a way back for gradients.

    Returns what arrived and, where that is a QTensor, a float [N, D] array of x's dtype that stands for it: its values
    mean nothing, and its cotangent is taken for that of the dequantised rows and sent back to x (`apply_experts` takes
    it as `straight_through`). None where the rows arrive as float and carry their own gradient.
    """
    if layout.format is None:
        got = dispatch_float(
            x, ids, weights, plan, backend=backend, exchange=exchange, layout=layout, global_scale=global_scale
        )
        return got, None
    got, through, received_weights = _dispatch(backend, exchange, layout, x, weights, ids, plan, global_scale)
    return Received(got.x, got.ids, received_weights, got.counts), through


def _primal(backend, exchange, layout, x, weights, ids, plan, global_scale) -> tuple[Received, jax.Array, jax.Array]:
    got = dispatch_payload(
        x, ids, weights, plan, backend=backend, exchange=exchange, layout=layout, global_scale=global_scale
    )
    return got, jnp.zeros(got.x.shape, x.dtype), got.weights


_dispatch = jax.custom_vjp(_primal, nondiff_argnums=(0, 1, 2))


def _forward(backend, exchange, layout, x, weights, ids, plan, global_scale):
    out = _dispatch(backend, exchange, layout, x, weights, ids, plan, global_scale)
    return out, (plan, out[0].ids, jnp.zeros((0,), x.dtype))


def _backward(backend, exchange, layout, residuals, cotangents):
    _, dx, dweights = cotangents
    return _dispatch_bwd(backend, exchange, layout, residuals, (dx, None, dweights, None))


_dispatch.defvjp(_forward, _backward)
