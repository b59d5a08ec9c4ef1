"""Dispatch, experts and combine of one rank's routed tokens: the part of the layer that follows the router.

Letters: T tokens on one rank, D hidden, K experts per token, N received rows, R ranks, E_loc expert slots on one rank.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantize import QTensor, get_format

from .backends import combine, get_backend, in_chunks, shared_global_scale, uniform_global_scale
from .backends.base import Axis
from .backends.scales import encode_rows
from .backends.straight_through import dispatch
from .experts import (
    ExpertWeights,
    apply_batched_experts,
    apply_experts,
    apply_experts_unsummed,
    few,
    get_experts,
    takes_few_rows,
)
from .placement import Placement, num_unreachable, to_physical
from .policy import Decision
from .router import checked_rule, route

if TYPE_CHECKING:
    from .layer import MoELayer
    from .params import MoEParams


def route_and_compute(
    layer: MoELayer,
    params: MoEParams,
    x: jax.Array,
    logits: jax.Array,
    *,
    valid: jax.Array | None,
    placement: Placement | None,
    rank_mask: jax.Array | None,
    out_dtype=jnp.float32,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens with router logits [T, E] to their experts and back: as `exchange_and_compute`, ids int32 [T, K] between.

    valid: bool [T] or None. The others are as for `exchange_and_compute`.
    """
    config, bias = layer.config, params.correction_bias
    how: Any = dict(top_k=config.num_experts_per_tok, correction_bias=bias, valid=valid)
    decision = layer.decision(x.shape[0])
    alone = decision.backend == "local" and placement is None and rank_mask is None and layer.implementation is None
    quant = config.quant
    if (
        alone
        and quant.activations is None
        and quant.combine_wire is None
        and get_experts(_kind(layer)).form == "standard"
    ):
        x, logits = x.astype(config.jnp_dtype), logits.astype(jnp.float32)
        rule = checked_rule(logits, config.router, **how)
        if few.routed_obstacle(x, logits, rule, params.experts, config) is None:
            bias = None if bias is None else bias.astype(jnp.float32)

            def in_steps(x, ids, weights, experts):
                return apply_experts(x, ids, weights, experts, config, experts=_kind(layer), out_dtype=out_dtype)

            with jax.named_scope("experts"):
                y, ids = few.routed_row(
                    x, logits, rule, bias, valid, params.experts, config, in_steps, out_dtype=out_dtype
                )
            return y, ids, jnp.int32(0)
    with jax.named_scope("router"):
        routing = route(logits, config.router, **how)
    where: Any = dict(placement=placement, rank_mask=rank_mask, out_dtype=out_dtype)
    y, dropped = exchange_and_compute(layer, params.experts, x, routing.ids, routing.weights, **where)
    return y, routing.ids, dropped


def exchange_and_compute(
    layer: MoELayer,
    experts: ExpertWeights,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    *,
    placement: Placement | None,
    rank_mask: jax.Array | None = None,
    out_dtype=jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """Routed tokens through their experts, wherever those are. Inside shard_map, or on one rank.

    Arguments:
        layer: of `build_moe`. experts: this rank's E_loc slots.
        x: [T, D]. ids: int32 [T, K] logical ids, -1 for none. weights: float32 [T, K].
        placement: None where physical slot p holds expert p.
        out_dtype: what the float32 sums are cast to.
    Returns: [T, output size], and int32 [] assignments that were lost to capacity or to masked ranks.

    Differentiable in x, weights and float experts; quantisation is passed straight through.
    """
    tokens = x.shape[0]
    each = -(-tokens // layer.overlap_chunks)  # of one chunk
    decision, layout, ex = layer.decision(each), layer.layout(each), layer.exchange(each)
    backend, config = get_backend(decision.backend), layer.config
    with jax.named_scope("plan"):
        physical, unreachable = ids, jnp.int32(0)
        if placement is not None:
            physical = to_physical(ids, placement, rank_mask=rank_mask, first_token=ex.rank() * tokens)
            unreachable = num_unreachable(ids, physical, placement)
    x = x.astype(config.jnp_dtype)
    experts, scale = _input_scale(experts, x, physical, decision, ex.axis_name, _token_axes(layer))
    wire = config.quant.combine_wire
    if backend.name == "local" and wire is None:
        # One rank: a row that goes nowhere needs no plan, no packing and no buffers.
        rows, _ = encode_rows(x, layout, axis_name=None, global_scale=scale)
        with jax.named_scope("experts"):
            out = apply_experts(
                rows if isinstance(rows, QTensor) else rows.astype(config.jnp_dtype),
                physical,
                weights,
                experts,
                config,
                experts=_kind(layer),
                straight_through=x if isinstance(rows, QTensor) else None,
                out_dtype=out_dtype,
                **_how(layer, decision),
            )
        return out, unreachable

    def exchanged(chunk):
        x, physical, weights = chunk
        return _exchange(layer, experts, x, physical, weights, scale, rank_mask, out_dtype)

    out, dropped = in_chunks(exchanged, (x, physical, weights), layer.overlap_chunks)
    return out, jnp.sum(dropped) + unreachable


def _exchange(
    layer: MoELayer,
    experts: ExpertWeights,
    x: jax.Array,
    physical: jax.Array,
    weights: jax.Array,
    scale: jax.Array | None,
    rank_mask: jax.Array | None,
    out_dtype,
) -> tuple[jax.Array, jax.Array]:
    """Some of the tokens to the experts' ranks, through the experts, and back: [T, output size], dropped int32 [1]."""
    tokens = x.shape[0]
    decision, layout, ex = layer.decision(tokens), layer.layout(tokens), layer.exchange(tokens)
    backend, config = get_backend(decision.backend), layer.config
    wire = config.quant.combine_wire
    with jax.named_scope("plan"):
        plan = backend.plan(physical, ex, rank_mask=rank_mask if backend.takes_rank_mask else None)
    with jax.named_scope("dispatch"):
        got, through = dispatch(
            x, physical, weights, plan, backend=backend, exchange=ex, layout=layout, global_scale=scale
        )
    rows = got.x if isinstance(got.x, QTensor) else got.x.astype(config.jnp_dtype)
    with jax.named_scope("experts"):
        if backend.form == "batched":
            blocks = (ex.num_local, ex.num_ranks * ex.capacity)
            split = lambda a: a.reshape(*blocks, *a.shape[1:]) if a.ndim else a  # noqa: E731
            y = apply_batched_experts(
                jax.tree.map(split, rows),
                got.ids.reshape(blocks) >= 0,
                experts,
                config,
                straight_through=None if through is None else split(through),
                **_how(layer, decision),
            )
            y = y.reshape(-1, y.shape[-1])
        else:
            assert get_experts(_kind(layer)).form == "standard"
            how: Any = dict(experts=_kind(layer), **_how(layer, decision))
            given = rows, got.ids, got.weights, experts, config
            if takes_few_rows(rows, got.ids, experts, config, **how):
                # As the kernel that sends them takes them; who else does so casts them on its way.
                sent = ex.dtype if ex.engine is not None and wire is None else jnp.float32
                y = apply_experts(*given, **how, straight_through=through, out_dtype=sent)
            else:
                y = apply_experts_unsummed(*given, **how, straight_through=through)
    with jax.named_scope("combine"):
        back = functools.partial(combine, backend=backend, exchange=ex, wire=wire, out_dtype=out_dtype)
        out = back(y, weights, plan, recv_ids=got.ids, counts=got.counts)
    return out, plan.dropped.reshape(1)


def _kind(layer: MoELayer) -> str:
    return layer.experts if layer.experts != "auto" else "grouped"


def _how(layer: MoELayer, decision: Decision) -> dict[str, Any]:
    """What the experts of both forms are told: whether they quantise their input, and by which kernel they multiply."""
    quantize_input = decision.on_receive in ("quantize", "requantize") or decision.where == "experts"
    return dict(quantize_input=quantize_input, implementation=layer.implementation)


def _token_axes(layer: MoELayer) -> tuple[str, ...]:
    """Axes over which the tokens are spread, of those that the shard_map being traced has in scope."""

    def in_scope(axis: str) -> bool:
        try:
            return lax.axis_size(axis) > 0
        except NameError:
            return False

    return tuple(axis for axis in layer.token_axes if in_scope(axis))


def _input_scale(
    experts: ExpertWeights,
    x: jax.Array,
    physical: jax.Array,
    decision: Decision,
    axis_name: Axis | None,
    token_axes: tuple[str, ...],
) -> tuple[ExpertWeights, jax.Array | None]:
    """The experts with the decode scale of a per-tensor activation format, and the one to quantise with before sending.

    Without a static scale it is that of all routed tokens together, also of other axes of the mesh, so that the numbers
    do not depend on how many ranks there are, nor on who quantises.
    """
    scale = experts.input_scale
    formats = [f for f in (decision.quant_dtype, decision.wire if decision.quantised_wire else None) if f is not None]
    per_tensor = [f for f in formats if get_format(f).global_scale == "tensor"]
    if not per_tensor:
        return experts, None
    if scale is None:
        routed = jnp.any(physical >= 0, axis=1, keepdims=True)
        scale = shared_global_scale(jnp.where(routed, x, jnp.zeros((), x.dtype)), per_tensor[0], token_axes or None)
        return dataclasses.replace(experts, input_scale=scale), scale
    if decision.where == "experts" or (decision.form == "batched" and not decision.quantised_wire):
        return experts, None  # rows are quantised beside their expert, each with that expert's own scale
    # Whoever quantises a row once for all its experts needs one number that serves every one of them.
    scale = uniform_global_scale(scale, axis_name)
    return dataclasses.replace(experts, input_scale=scale), scale
