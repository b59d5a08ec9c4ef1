"""Dispatch on top of any backend: tokens in, received rows out.

T tokens on one rank, D hidden size, K experts per token, R ranks, E_loc physical experts on one rank, N received rows.

`dispatch_payload` keeps a quantised payload quantised and is for inference. `dispatch_float` gives float rows and
differentiates straight through the quantised wire; its derivative is a combine with the same plan, in which cotangents
travel in the layer's dtype and are added in float32 in rank order.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.payload import RowLayout, check_choices, pack, row_layout, unpack, unpack_data, unpack_weights
from jmoe.plan import Plan
from pallas_kernels.derivatives import first_only
from pallas_kernels.quantize import QTensor

from .base import Backend, Exchange, received_valid
from .scales import decode_rows, pack_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InFlight:
    """Rows on their way: the result of `start`, to be given to `finish` where they are needed.

    data: None, or the rows' data where it travelled apart from what follows it (`rows` then holds the rest).
    """

    rows: jax.Array
    counts: jax.Array | None
    global_scale: jax.Array | None
    data: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Received:
    """What a rank received: N rows, of which those with id -1 in every place hold garbage that must not be used.

    x: array or QTensor [N, D]. ids: int32 [N, K] local expert ids, -1 for none; [N, 1] in the batched form, whose row
    (e * R + source) * C + slot belongs to expert e. weights: float32 like ids, the routing weights; ones in the batched
    form, whose weights `combine` applies. counts: int32 [R] or (batched) [E_loc, R], rows that hold something.
    """

    x: jax.Array | QTensor
    ids: jax.Array
    weights: jax.Array
    counts: jax.Array


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
    engine = exchange.engine if backend.kernel_slot else None
    if engine is not None and engine.push_encoding is not None:
        sent = engine.push_encoding(x, ids, weights, plan, exchange, layout)
        if sent is not None:
            return InFlight(sent[0], sent[1], None, sent[2])
    if engine is not None and engine.push_apart is not None and layout.format is None:
        assert not isinstance(x, QTensor)  # whose layout names a format
        check_choices(ids, weights, layout)
        apart = engine.push_apart(x.astype(layout.dtype), ids, weights, plan, exchange)
        if apart is not None:
            return InFlight(apart[1], apart[2], None, apart[0])
    rows, global_scale = pack_rows(x, ids, weights, layout, axis_name=exchange.axis_name, global_scale=global_scale)
    if engine is not None:
        received, counts = engine.push(rows, plan, exchange)
    else:
        received, counts = backend.send(rows, plan, exchange, fill=jnp.asarray(layout.empty_row())), None
    return InFlight(received.reshape(-1, layout.row_bytes), counts, global_scale)


def finish(flight: InFlight, plan: Plan, *, backend: Backend, exchange: Exchange, layout: RowLayout) -> Received:
    """The rows of a `start`, unpacked. `finish(start(...)) == dispatch_payload(...)` bit for bit."""
    valid = None
    if flight.counts is not None:
        valid = received_valid(backend, flight.counts, plan, exchange)
    elif backend.takes_rank_mask:  # rows from masked ranks are not looked at
        full = jnp.full((exchange.num_local, exchange.num_ranks), exchange.capacity, jnp.int32)
        valid = received_valid(backend, full, plan, exchange)
    x, ids, weights = unpack(
        flight.rows,
        layout,
        rank=exchange.rank(),
        num_local=exchange.num_local,
        valid=valid,
        global_scale=flight.global_scale,
        data=flight.data,
    )
    shape = (exchange.num_ranks, exchange.capacity)
    if backend.form == "batched":
        shape = (exchange.num_local, *shape)
        expert = jnp.arange(exchange.num_local, dtype=jnp.int32)
        expert = jnp.broadcast_to(expert[:, None, None], shape).reshape(-1, 1)
        ids = jnp.where(jnp.any(ids == expert, axis=1, keepdims=True), expert, -1)
        weights = (ids >= 0).astype(jnp.float32)
    counts = flight.counts
    if counts is None or backend.takes_rank_mask:
        counts = jnp.sum(jnp.any(ids >= 0, axis=1).reshape(shape), axis=-1, dtype=jnp.int32)
    return Received(x, ids, weights, counts)


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
    """Like `dispatch_payload`, but the result's rows have the dtype of x, and it differentiates in x and weights.

    The derivative passes straight through the quantised wire, as if the rows had travelled unchanged.
    """
    return Received(*_dispatch(backend, exchange, layout, x, weights, ids, plan, global_scale))


def _quantised_dispatch(
    backend, exchange, layout, x, weights, ids, plan, global_scale
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    got = dispatch_payload(
        x, ids, weights, plan, backend=backend, exchange=exchange, layout=layout, global_scale=global_scale
    )
    return decode_rows(got.x, x.dtype), got.ids, got.weights, got.counts


_dispatch = jax.custom_vjp(_quantised_dispatch, nondiff_argnums=(0, 1, 2))


def _dispatch_fwd(backend, exchange, layout, x, weights, ids, plan, global_scale):
    out = _dispatch(backend, exchange, layout, x, weights, ids, plan, global_scale)
    return out, (plan, out[1], jnp.zeros((0,), x.dtype))


def _dispatch_bwd(backend, exchange, layout, residuals, cotangents):
    plan, local, like = residuals  # `like` carries the dtype of x
    dx, _, dweights, _ = first_only(cotangents)
    dx = jnp.where(jnp.any(local >= 0, axis=1, keepdims=True), dx, 0).astype(exchange.dtype)
    engine = exchange.engine if backend.kernel_slot else None
    if backend.form == "batched":  # the weights do not enter here; combine applies them
        no_dweights = jnp.zeros((plan.num_tokens, layout.top_k), jnp.float32)
        if engine is not None:
            dx = engine.reduce(dx, no_dweights + 1, plan, exchange, jnp.dtype(jnp.float32))
        else:
            dx = backend.sum_back(backend.give_back(dx, plan, exchange), plan)
        return dx.astype(like.dtype), no_dweights, None, None, None
    dweights = jnp.where(local >= 0, dweights, 0)
    if engine is not None:
        dx = engine.reduce(dx, None, plan, exchange, jnp.dtype(jnp.float32))
        dweights = backend.sum_back(backend.return_rows(dweights, local, plan, exchange), plan)
        return dx.astype(like.dtype), dweights, None, None, None
    back = row_layout(layout.hidden, exchange.dtype, layout.top_k)  # both cotangents travel in one row
    decode = lambda rows: (decode_rows(unpack_data(rows, back), jnp.float32), unpack_weights(rows, back))  # noqa: E731
    buffer = backend.give_back(pack(dx, local, dweights, back), plan, exchange)
    dx, dweights = backend.sum_back(buffer, plan, decode=decode)
    return dx.astype(like.dtype), dweights, None, None, None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


def in_chunks(function, arrays, num_chunks: int):
    """`function` over chunks of the leading axis of `arrays`, as equal as can be, results concatenated.

    The chunks do not depend on one another, so XLA may run the collectives of one beside the matmuls of the next.
    Raises ValueError where num_chunks is not positive; of fewer tokens than chunks each is a chunk of its own.
    """
    if num_chunks < 1:
        raise ValueError(f"num_chunks={num_chunks} must be positive; 1 does not split the tokens.")
    tokens = jax.tree.leaves(arrays)[0].shape[0]
    num_chunks = max(1, min(num_chunks, tokens))
    ends = [tokens * (i + 1) // num_chunks for i in range(num_chunks)]
    results = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        results.append(function(jax.tree.map(lambda a: lax.slice_in_dim(a, start, end), arrays)))  # noqa: B023
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=0), *results)
