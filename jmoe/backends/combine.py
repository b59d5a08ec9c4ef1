"""Combine on top of any backend: expert outputs back to the tokens' owners, and added up there.

T tokens on one rank, D hidden size, K experts per token, R ranks, S targets of a plan, C slots of each, N received
rows.

The sum is float32, over ranks in rank order (standard) or over k with the routing weights (batched), so it does not
depend on the order in which rows arrive. Its derivative is a dispatch of the cotangent with the same plan.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jmoe.payload import return_layout, unpack_data
from jmoe.plan import Plan, merge_weights
from pallas_kernels.permute import Unsummed

from .base import Backend, Exchange
from .scales import decode_rows, pack_rows


def combine(
    y: jax.Array | Unsummed,
    weights: jax.Array,
    plan: Plan,
    *,
    backend: Backend,
    exchange: Exchange,
    recv_ids: jax.Array,
    counts: jax.Array | None = None,
    wire: str | None = None,
    out_dtype=None,
) -> jax.Array:
    """Expert outputs back to the tokens' owners and added up there.

    Args:
      y: [N, D] float (float32 as the experts leave it), one row for each received row: the weighted sum over the row's
        local experts (standard), or the output of the row's expert (batched). Or the outputs of which those sums are
        yet to be taken (standard): by the kernel that sends, where the exchange's engine can, else here.
      weights: float32 [T, K], the routing weights; used by the batched form only, whose owner applies them.
      plan: the plan of the dispatch. recv_ids: `Received.ids`; rows without an id are not used, whatever they hold.
      counts: `Received.counts`; None: counted here.
      wire: None sends rows in the exchange's dtype (the all-gather backend adds float32 on its way); "mxfp8" quantises.
    Returns:
      [T, D] of out_dtype (None: the exchange's dtype).
    Differentiable in y and weights, straight through a quantised wire.
    Raises ValueError for another wire.
    """
    if wire not in (None, "mxfp8"):
        raise ValueError(
            f"combine wire={wire!r}: expert outputs return in the layer's dtype (None) or as 'mxfp8'. Use one of these."
        )
    out_dtype = jnp.dtype(exchange.dtype if out_dtype is None else out_dtype)
    if counts is None and exchange.engine is not None and backend.kernel_slot:
        counts = backend.received_counts(recv_ids, exchange)
    if isinstance(y, Unsummed):
        engine = exchange.engine if backend.kernel_slot and wire is None else None
        if engine is not None and engine.reduce_unsummed is not None and y.columns == y.y.shape[1]:
            weights = jax.lax.stop_gradient(weights)
            arrays = (y.y, y.weights, y.position, weights, plan, recv_ids, counts)
            return _combine_unsummed(backend, exchange, out_dtype, *arrays)
        y = y.summed(_returned_dtype(backend, exchange, wire))
    return _combine(backend, exchange, wire, out_dtype, y, weights, plan, recv_ids, counts)


def _returned_dtype(backend: Backend, exchange: Exchange, wire: str | None):
    """The dtype in which the experts' sums leave for their owners, so that they are cast once, where they are made."""
    adds_float32 = type(backend).collective_sum is not Backend.collective_sum
    return jnp.float32 if adds_float32 or wire is not None else exchange.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _combine_unsummed(backend, exchange, out_dtype, y, factors, position, weights, plan, recv_ids, counts):
    """`_combine` of the rows' sums, which the engine's kernel takes where it can."""
    rows = Unsummed(y, position, factors, y.shape[1])
    out = exchange.engine.reduce_unsummed(rows, plan, exchange, out_dtype, counts)
    if out is None:
        rows = rows.summed(_returned_dtype(backend, exchange, None))
        out = _combine(backend, exchange, None, out_dtype, rows, weights, plan, recv_ids, counts)
    return out


def _combine_unsummed_fwd(backend, exchange, out_dtype, *arrays):
    return _combine_unsummed(backend, exchange, out_dtype, *arrays), arrays


def _combine_unsummed_bwd(backend, exchange, out_dtype, arrays, dout):
    y, factors, position, weights, plan, recv_ids, _ = arrays
    dtype = _returned_dtype(backend, exchange, None)
    like = jnp.zeros((0,), dtype)
    drows = _combine_bwd(backend, exchange, None, out_dtype, (plan, recv_ids, weights, None, like), dout)[0]
    _, pull = jax.vjp(lambda y, factors: Unsummed(y, position, factors, y.shape[1]).summed(dtype), y, factors)
    return *pull(drows), None, None, None, None, None


_combine_unsummed.defvjp(_combine_unsummed_fwd, _combine_unsummed_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _combine(backend, exchange, wire, out_dtype, y, weights, plan, recv_ids, counts):
    engine = exchange.engine if backend.kernel_slot else None
    applied = merge_weights(weights, plan) if engine is not None and backend.form == "batched" else None
    if engine is not None and wire is None:
        return engine.reduce(y.astype(exchange.dtype), applied, plan, exchange, out_dtype)
    if engine is not None and engine.reduce_as is not None:
        out = engine.reduce_as(y, applied, plan, exchange, out_dtype, wire=wire, counts=counts)
        if out is not None:
            return out
    if wire is None:
        total = backend.collective_sum(_real_rows(y, recv_ids).astype(jnp.float32), exchange)
        if total is not None:
            return total.astype(out_dtype)
    return _sum(returned(backend, exchange, wire, y, plan, recv_ids), backend, wire, out_dtype, y, weights, plan)


def _real_rows(y: jax.Array, recv_ids: jax.Array) -> jax.Array:
    """y with zeros in the rows that hold nothing."""
    return jnp.where(jnp.any(recv_ids >= 0, axis=1, keepdims=True), y, jnp.zeros((), y.dtype))


def returned(backend, exchange, wire, y, plan, recv_ids) -> jax.Array:
    """The owner's slots, [S, C, D] of the exchange's dtype or uint8 [S, C, row]."""
    if wire is None:
        return backend.return_rows(y.astype(exchange.dtype), recv_ids, plan, exchange)
    return backend.return_rows(pack_returned(_real_rows(y, recv_ids), wire), recv_ids, plan, exchange)


def pack_returned(y: jax.Array, wire: str) -> jax.Array:
    """Rows [N, D] as they travel back in a quantised format: uint8 [N, row]."""
    nothing = jnp.zeros((y.shape[0], 0), jnp.int32)
    return pack_rows(y, nothing, nothing.astype(jnp.float32), return_layout(y.shape[1], wire), axis_name=None)[0]


def decoder(hidden: int, wire: str | None):
    """Rows as they came back to float32 [T, D]."""
    if wire is None:
        return lambda rows: rows.astype(jnp.float32)
    layout = return_layout(hidden, wire)
    return lambda rows: decode_rows(unpack_data(rows, layout), jnp.float32)


def _sum(buffer, backend, wire, out_dtype, y, weights, plan):
    applied = merge_weights(weights, plan) if backend.form == "batched" else None
    total = backend.sum_back(buffer, plan, weights=applied, decode=decoder(y.shape[1], wire))
    return total.astype(out_dtype)


def _combine_fwd(backend, exchange, wire, out_dtype, y, weights, plan, recv_ids, counts):
    like = jnp.zeros((0,), y.dtype)
    if backend.form == "standard":
        out = _combine(backend, exchange, wire, out_dtype, y, weights, plan, recv_ids, counts)
        return out, (plan, recv_ids, weights, None, like)
    buffer = returned(backend, exchange, wire, y, plan, recv_ids)  # the weights' derivative needs these rows
    out = _sum(buffer, backend, wire, out_dtype, y, weights, plan)
    return out, (plan, recv_ids, weights, buffer, like)


def _combine_bwd(backend, exchange, wire, out_dtype, residuals, dout):
    plan, recv_ids, weights, buffer, like = residuals
    d = dout.astype(exchange.dtype)
    if backend.form == "standard":
        if exchange.engine is not None and backend.kernel_slot:
            dy, _ = exchange.engine.push(d, plan, exchange)
        else:
            dy = backend.send(d, plan, exchange)
        dweights = jnp.zeros_like(weights)
    else:
        dy = backend.forward(_weighted_slots(d, weights, plan, backend), plan, exchange)
        dweights = _weight_cotangents(dout, buffer, plan, backend, decoder(d.shape[1], wire))
    dy = _real_rows(dy.reshape(-1, d.shape[1]), recv_ids)
    return dy.astype(like.dtype), dweights, None, None, None


_combine.defvjp(_combine_fwd, _combine_bwd)


def _weighted_slots(d: jax.Array, weights: jax.Array, plan: Plan, backend: Backend) -> jax.Array:
    """Cotangents in the slots of their rows, each times the weight that the row was given: [S, C, D]."""
    slots = backend.fill_slots(d, plan)
    if weights.size == 0:
        return slots
    assert plan.src_choice is not None
    row = jnp.maximum(plan.src_token, 0) * weights.shape[1] + jnp.maximum(plan.src_choice, 0)
    factor = jnp.take(merge_weights(weights, plan).reshape(-1), row, mode="clip")[..., None]
    factor = jnp.where((plan.src_token >= 0)[..., None], factor, 0)
    return (slots.astype(jnp.float32) * factor).astype(d.dtype)


def _weight_cotangents(dout, buffer, plan: Plan, backend: Backend, decode) -> jax.Array:
    """float32 [T, K]: the product of each returned row with its token's cotangent."""
    products = []
    for k in range(backend.num_slots(plan)):
        rows, sent = backend.pick(buffer, plan, k)
        product = jnp.where(sent[:, None], decode(rows) * dout.astype(jnp.float32), 0)
        products.append(jnp.sum(product, axis=1))
    first = jnp.stack(products, axis=1)  # at the first of equal experts
    assert plan.merge is not None
    shared = jnp.take_along_axis(first, jnp.maximum(plan.merge, 0), axis=1)
    return jnp.where(plan.merge >= 0, shared, 0)
