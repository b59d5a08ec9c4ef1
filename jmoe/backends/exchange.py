"""Dispatch and combine on top of any backend: payload in, rows out, and back again, with their derivatives.

T tokens on one rank, D hidden size, K experts per token, R ranks, E_loc physical experts on one rank, N received rows.

Two ways in: `dispatch_payload` keeps a quantised payload quantised and is for inference; `dispatch_float` gives float rows
and differentiates straight through the quantised wire. Their way out is `combine`. Dispatch and combine are each other's
derivative with the same plan: cotangents travel in the layer's dtype and are added in float32 in rank order.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmoe.payload import RowLayout, from_bytes, pack, row_layout, to_bytes, unpack, unpack_data
from jmoe.plan import Plan, merge_weights
from pallas_kernels.quantize import QTensor, dequantize, exact, get_format, quantize
from pallas_kernels.quantize.reference import encode_scale

from .base import Backend, Exchange, received_valid


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InFlight:
    """Rows on their way: the result of `start`, to be given to `finish` when they are needed."""

    rows: jax.Array
    counts: jax.Array | None
    global_scale: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Received:
    """What a rank received: N rows, those with ids -1 in every place being garbage that must not be used.

    x: array or QTensor [N, D]. ids: int32 [N, K] local expert ids, -1 for none ([N, 1] in the batched form, where row
    (e * R + source) * C + slot belongs to expert e). weights: float32 like ids, the routing weights; ones in the batched
    form, whose weights are applied by `combine`. counts: int32 [R] or (batched) [E_loc, R], rows from each source.
    """

    x: jax.Array | QTensor
    ids: jax.Array
    weights: jax.Array
    counts: jax.Array


def shared_global_scale(x: jax.Array, fmt: str, axis_name: str | None) -> jax.Array:
    """The decode scale of a per-tensor format for the rows of all ranks together: float32 [], equal on every rank."""
    bits = exact.magnitude(exact.f32_bits(x))
    amax = jnp.max(jnp.where(bits < exact.INF, bits, jnp.uint32(0)), initial=0).astype(jnp.int32)
    if axis_name is not None:
        amax = lax.pmax(amax, axis_name)
    encode = encode_scale(amax.astype(jnp.uint32), get_format(fmt).e4m3_max)
    return exact.exact_div(jnp.ones_like(encode), encode)


def uniform_global_scale(scales: jax.Array, axis_name: str | None) -> jax.Array:
    """One decode scale for all experts of all ranks, the largest of the ranks' own: float32 [].

    A sender does not know which expert will read a row, so scales of single experts cannot be used before the exchange.
    """
    largest = jnp.max(scales.astype(jnp.float32))
    return largest if axis_name is None else lax.pmax(largest, axis_name)


def encode(x: jax.Array | QTensor, layout: RowLayout, *, axis_name: str | None, global_scale: jax.Array | None = None):
    """x in the form that travels: as it is, cast to a float wire, or quantised.

    Returns:
      (array or QTensor, global decode scale or None). Per-tensor formats take `global_scale`, or the one of all ranks'
      data together (one max over the axis).
    """
    fmt = layout.format
    if isinstance(x, QTensor):
        return x, (x.global_scale if fmt and fmt.global_scale == "tensor" else None)
    if fmt is None:
        return x.astype(layout.dtype), None
    if fmt.global_scale == "tensor":
        if global_scale is None:
            global_scale = shared_global_scale(x, layout.wire, axis_name)
        global_scale = jnp.asarray(global_scale, jnp.float32)
    else:
        global_scale = None
    alignment = layout.columns if layout.columns != layout.hidden else 0
    return quantize(x, fmt, global_scale=global_scale, alignment=alignment), global_scale


def start(
    x: jax.Array | QTensor,
    ids: jax.Array,
    weights: jax.Array,
    plan: Plan,
    *,
    backend: Backend,
    exchange: Exchange,
    layout: RowLayout,
    global_scale: jax.Array | None = None,
) -> InFlight:
    """Quantise where the layout says so, pack, and send. Arguments as for `dispatch_payload`."""
    payload, global_scale = encode(x, layout, axis_name=exchange.axis_name, global_scale=global_scale)
    rows = pack(payload, ids, weights, layout)
    if exchange.engine is not None and backend.kernel_slot:
        received, counts = exchange.engine.push(rows, plan, exchange)
    else:
        fill = jnp.asarray(layout.empty_row())
        received, counts = backend.send(rows, plan, exchange, fill=fill), None
    return InFlight(received.reshape(-1, layout.row_bytes), counts, global_scale)


def finish(flight: InFlight, plan: Plan, *, backend: Backend, exchange: Exchange, layout: RowLayout) -> Received:
    """The rows of a `start`, unpacked. `finish(start(...)) == dispatch_payload(...)` bit for bit."""
    valid = None
    if flight.counts is not None:
        valid = received_valid(backend, flight.counts, plan, exchange)
    elif backend.takes_rank_mask:
        full = jnp.full((exchange.num_local, exchange.num_ranks), exchange.capacity, jnp.int32)
        valid = received_valid(backend, full, plan, exchange)  # rows of masked ranks are not looked at
    x, ids, weights = unpack(
        flight.rows,
        layout,
        rank=exchange.rank(),
        num_local=exchange.num_local,
        valid=valid,
        global_scale=flight.global_scale,
    )
    shape = (exchange.num_ranks, exchange.capacity)
    if backend.form == "batched":
        shape = (exchange.num_local, *shape)
        expert = jnp.arange(exchange.num_local, dtype=jnp.int32)
        expert = jnp.broadcast_to(expert[:, None, None], shape).reshape(-1, 1)
        ids = jnp.where(jnp.any(ids == expert, axis=1, keepdims=True), expert, -1)
        weights = jnp.where(ids >= 0, jnp.ones(ids.shape, jnp.float32), 0)
    arrived = jnp.any(ids >= 0, axis=1).reshape(shape)
    return Received(x, ids, weights, jnp.sum(arrived, axis=-1, dtype=jnp.int32))


def dispatch_payload(
    x: jax.Array | QTensor,
    ids: jax.Array,
    weights: jax.Array,
    plan: Plan,
    *,
    backend: Backend,
    exchange: Exchange,
    layout: RowLayout,
    global_scale: jax.Array | None = None,
) -> Received:
    """Send tokens to the ranks of their experts; what is quantised stays so. Not differentiable (see `dispatch_float`).

    Args:
      x: [T, D] float, quantised here if the layout's wire is a format; or a QTensor of that format.
      ids: int32 [T, K] physical ids. weights: float32 [T, K]. plan: of these ids, by `backend.plan`.
      layout: of the rows. global_scale: decode scale of per-tensor formats, equal on all ranks; None: from the data.
    """
    flight = start(x, ids, weights, plan, backend=backend, exchange=exchange, layout=layout, global_scale=global_scale)
    return finish(flight, plan, backend=backend, exchange=exchange, layout=layout)


def dispatch_float(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    plan: Plan,
    *,
    backend: Backend,
    exchange: Exchange,
    layout: RowLayout,
    global_scale: jax.Array | None = None,
) -> Received:
    """Like `dispatch_payload`, with x of the result in the dtype of `x`, and differentiable in `x` and `weights`.

    The derivative passes straight through the quantised wire, as if the rows had travelled unchanged.
    """
    rows, local, received_weights, counts = _dispatch(
        backend, exchange, layout, x, weights, ids, plan, None if global_scale is None else global_scale
    )
    return Received(rows, local, received_weights, counts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _dispatch(backend, exchange, layout, x, weights, ids, plan, global_scale):
    got = dispatch_payload(
        x, ids, weights, plan, backend=backend, exchange=exchange, layout=layout, global_scale=global_scale
    )
    rows = dequantize(got.x, x.dtype) if isinstance(got.x, QTensor) else got.x.astype(x.dtype)
    return rows, got.ids, got.weights, got.counts


def _dispatch_fwd(backend, exchange, layout, x, weights, ids, plan, global_scale):
    out = _dispatch(backend, exchange, layout, x, weights, ids, plan, global_scale)
    return out, (plan, out[1], jnp.zeros((0,), x.dtype))


def _dispatch_bwd(backend, exchange, layout, residuals, cotangents):
    plan, local, like = residuals
    dx, _, dweights, _ = cotangents
    real = jnp.any(local >= 0, axis=1, keepdims=True)
    dx = jnp.where(real, dx, 0).astype(exchange.dtype)
    if backend.form == "batched":
        dx = _return_sum(dx, None, plan, backend, exchange)
        return dx.astype(like.dtype), jnp.zeros((plan.num_tokens, layout.top_k), jnp.float32), None, None, None
    dweights = jnp.where(local >= 0, dweights, 0)
    if exchange.engine is not None and backend.kernel_slot:
        dx = exchange.engine.reduce(dx, None, plan, exchange, jnp.dtype(jnp.float32))
        dweights = _return_sum(dweights, None, plan, backend, exchange)
    else:
        split = dx.shape[1] * dx.dtype.itemsize
        split_up = -(-split // 4) * 4
        parts = [to_bytes(dx), jnp.zeros((dx.shape[0], split_up - split), jnp.uint8), to_bytes(dweights)]
        dtype = dx.dtype

        def decode(rows):
            return jnp.concatenate(
                [
                    from_bytes(rows[:, :split], dtype).astype(jnp.float32),
                    from_bytes(rows[:, split_up:], jnp.float32),
                ],
                axis=1,
            )

        width = dx.shape[1]
        both = _return_sum(jnp.concatenate(parts, axis=1), None, plan, backend, exchange, decode=decode)
        dx, dweights = both[:, :width], both[:, width:]
    return dx.astype(like.dtype), dweights, None, None, None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


def _return_sum(y, weights, plan: Plan, backend: Backend, exchange: Exchange, *, decode=None, buffer=None) -> jax.Array:
    """Rows y [N, W] back to their owners and added up there in order of rank or k, float32 [T, W]."""
    if decode is None:
        decode = lambda rows: rows.astype(jnp.float32)  # noqa: E731
    if buffer is None:
        buffer = backend.give_back(y, plan, exchange)
    total = None
    for s in range(backend.num_slots(plan)):
        rows, sent = backend.pick(buffer, plan, s)
        part = decode(rows)
        if weights is not None:
            part = part * weights[:, s : s + 1]
        part = jnp.where(sent[:, None], part, 0)
        total = part if total is None else total + part
    assert total is not None
    return total


def combine(
    y: jax.Array,
    weights: jax.Array,
    plan: Plan,
    *,
    backend: Backend,
    exchange: Exchange,
    recv_ids: jax.Array,
    wire: str | None = None,
    out_dtype=None,
) -> jax.Array:
    """Expert outputs back to the tokens' owners and added up there.

    Args:
      y: [N, D] float (float32 as the experts leave it), one row for each received row: the weighted sum over the row's
        local experts (standard), or the output of the row's expert (batched).
      weights: float32 [T, K], the routing weights; used by the batched form only, whose owner applies them.
      plan: the plan of the dispatch. recv_ids: `Received.ids`; rows without an id are not used.
      wire: None sends rows in the exchange's dtype (the all-gather backend sends float32 sums); "mxfp8" quantises them.
    Returns:
      [T, D] of out_dtype (None: the exchange's dtype). The sum is float32, over ranks in rank order or over k in order.
    Differentiable in y and weights; straight through a quantised wire.
    """
    if wire not in (None, "mxfp8"):
        raise ValueError(
            f"combine wire={wire!r}: expert outputs return in the layer's dtype (None) or as 'mxfp8'. Choose one of these."
        )
    out = jnp.dtype(exchange.dtype if out_dtype is None else out_dtype)
    return _combine(backend, exchange, wire, out, y, weights, plan, recv_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _combine(backend, exchange, wire, out_dtype, y, weights, plan, recv_ids):
    if exchange.engine is not None and backend.kernel_slot and wire is None:
        applied = merge_weights(weights, plan) if backend.form == "batched" else None
        return exchange.engine.reduce(y.astype(exchange.dtype), applied, plan, exchange, out_dtype)
    return _combine_portable(backend, exchange, wire, out_dtype, y, weights, plan, recv_ids)[0]


def _combine_portable(backend, exchange, wire, out_dtype, y, weights, plan, recv_ids):
    """The combined rows, and what came back to this owner ([S, C, D] or packed; None after a collective sum)."""
    applied = merge_weights(weights, plan) if backend.form == "batched" else None
    if wire is None:
        if backend.plan_form == "gathered":
            real = jnp.any(recv_ids >= 0, axis=1, keepdims=True)
            summed = backend.collective_sum(jnp.where(real, y.astype(jnp.float32), 0), exchange)
            if summed is not None:
                return summed.astype(out_dtype), None
        buffer = backend.give_back(y.astype(exchange.dtype), plan, exchange)
        return _return_sum(None, applied, plan, backend, exchange, buffer=buffer).astype(out_dtype), buffer
    layout = row_layout(y.shape[1], wire, 0, mx_alignment=32)
    packed, buffer = _pack_rows(y, layout, recv_ids), None
    buffer = backend.give_back(packed, plan, exchange)
    decode = lambda rows: dequantize(unpack_data(rows, layout), jnp.float32)  # noqa: E731
    return _return_sum(None, applied, plan, backend, exchange, buffer=buffer, decode=decode).astype(out_dtype), buffer


def _pack_rows(y, layout: RowLayout, recv_ids):
    """Quantised rows [N, row_bytes]; rows without an id become zeros."""
    real = jnp.any(recv_ids >= 0, axis=1, keepdims=True)
    y = jnp.where(real, y, 0)
    nothing = jnp.zeros((y.shape[0], 0), jnp.int32)
    payload, _ = encode(y, layout, axis_name=None)
    return pack(payload, nothing, nothing.astype(jnp.float32), layout)


def _combine_fwd(backend, exchange, wire, out_dtype, y, weights, plan, recv_ids):
    like = jnp.zeros((0,), y.dtype)
    if backend.form == "batched":  # the weights' derivative needs the rows that came back
        out, buffer = _combine_portable(backend, exchange, wire, out_dtype, y, weights, plan, recv_ids)
        return out, (plan, recv_ids, weights, buffer, like)
    out = _combine(backend, exchange, wire, out_dtype, y, weights, plan, recv_ids)
    return out, (plan, recv_ids, weights, None, like)


def _combine_bwd(backend, exchange, wire, out_dtype, residuals, dout):
    plan, recv_ids, weights, buffer, like = residuals
    real = jnp.any(recv_ids >= 0, axis=1, keepdims=True)
    d = dout.astype(exchange.dtype)
    if backend.form == "standard":
        if exchange.engine is not None and backend.kernel_slot:
            dy, _ = exchange.engine.push(d, plan, exchange)
        else:
            dy = backend.send(d, plan, exchange)
        dy = jnp.where(real, dy.reshape(-1, d.shape[1]), 0)
        return dy.astype(like.dtype), jnp.zeros_like(weights), None, None
    dtype, width = d.dtype, d.shape[1]
    # The weight rides with the cotangent of its row and is applied where the row arrives, in float32.
    slots = backend.fill_slots(d, plan)  # [S, C, D]
    merged = merge_weights(weights, plan)
    row = jnp.maximum(plan.src_token, 0) * merged.shape[1] + jnp.maximum(plan.src_choice, 0)
    if merged.size:
        applied = jnp.take(merged.reshape(-1), row, mode="clip")
        applied = jnp.where(plan.src_token >= 0, applied, 0)[..., None]  # [S, C, 1]
        slots = (slots.astype(jnp.float32) * applied).astype(dtype)
    dy = backend.forward(slots, plan, exchange).reshape(-1, width)
    dy = jnp.where(real, dy, 0).astype(like.dtype)
    decode = None
    if wire is not None:
        layout = row_layout(width, wire, 0, mx_alignment=32)
        decode = lambda rows: dequantize(unpack_data(rows, layout), jnp.float32)  # noqa: E731
    columns = []
    for k in range(backend.num_slots(plan)):
        rows, sent = backend.pick(buffer, plan, k)
        rows = rows.astype(jnp.float32) if decode is None else decode(rows)
        products = jnp.sum(jnp.where(sent[:, None], rows * dout.astype(jnp.float32), 0), axis=1)
        columns.append(products)
    per_row = jnp.stack(columns, axis=1)  # [T, K], of the first of equal experts
    shared = jnp.take_along_axis(per_row, jnp.maximum(plan.merge, 0), axis=1)
    return dy, jnp.where(plan.merge >= 0, shared, 0), None, None


_combine.defvjp(_combine_fwd, _combine_bwd)


def in_chunks(function, arrays, num_chunks: int):
    """`function` over equal chunks of the leading axis of `arrays`, results concatenated.

    The chunks do not depend on one another, so XLA may run the collectives of one beside the matmuls of the next. The
    leading axis must be a multiple of num_chunks.
    """
    tokens = jax.tree.leaves(arrays)[0].shape[0]
    if num_chunks < 1 or tokens % num_chunks:
        raise ValueError(
            f"num_chunks={num_chunks} does not divide {tokens} tokens; chunks must be equal. Use a divisor, or pad the "
            "tokens with `jmoe.payload.pad_tokens`."
        )
    size = tokens // num_chunks
    take = lambda i: jax.tree.map(lambda a: lax.slice_in_dim(a, i * size, (i + 1) * size), arrays)  # noqa: E731
    results = [function(take(i)) for i in range(num_chunks)]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=0), *results)


def exchange_for(
    backend: Backend,
    *,
    tokens: int,
    num_ranks: int,
    num_local: int,
    top_k: int,
    axis_name: str | None,
    capacity_factor: float | None = None,
    dtype: str = "bfloat16",
    engine=None,
) -> Exchange:
    """The static facts of an exchange of `tokens` tokens on each rank. ValueError where the backend cannot serve it."""
    if backend.max_ranks is not None and num_ranks > backend.max_ranks:
        raise ValueError(
            f"backend {backend.name!r} serves {backend.max_ranks} rank, the mesh has {num_ranks} on the expert axis; use "
            "'allgather_reducescatter', 'nvlink_two_sided' or another that moves tokens."
        )
    if num_ranks > 1 and axis_name is None:
        raise ValueError(
            f"axis_name=None with {num_ranks} ranks: an exchange needs the name of the mesh's expert axis. Pass it."
        )
    size = backend.capacity(tokens, num_ranks=num_ranks, num_local=num_local, top_k=top_k, factor=capacity_factor)
    return Exchange(axis_name, num_ranks, num_local, size, np.dtype(dtype).name, engine)
