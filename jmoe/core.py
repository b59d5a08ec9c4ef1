"""Dispatch, experts and combine of one rank's routed tokens: the part of the layer that follows the router.

Letters: T tokens on one rank, D hidden, K experts per token, N received rows, R ranks, E_loc expert slots on one rank.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.quantize import QTensor, get_format

from .backends import combine, get_backend, shared_global_scale, uniform_global_scale
from .backends.straight_through import dispatch
from .experts import ExpertWeights, apply_batched_experts, apply_experts, get_experts
from .placement import Placement, num_unreachable, to_physical
from .policy import Decision

if TYPE_CHECKING:
    from .layer import MoELayer


def exchange_and_compute(
    layer: MoELayer,
    experts: ExpertWeights,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    *,
    placement: Placement,
    rank_mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Routed tokens through their experts, wherever those are. Inside shard_map, or on one rank.

    Arguments:
        layer: of `build_moe`. experts: this rank's E_loc slots.
        x: [T, D]. ids: int32 [T, K] logical ids, -1 for none. weights: float32 [T, K].
    Returns: float32 [T, output size], and int32 [] assignments that were lost to capacity or to masked ranks.

    Differentiable in x, weights and float experts; quantisation is passed straight through.
    """
    tokens = x.shape[0]
    decision, layout, ex = layer.decision(tokens), layer.layout(tokens), layer.exchange(tokens)
    backend, config = get_backend(decision.backend), layer.config
    with jax.named_scope("plan"):
        physical = to_physical(ids, placement, rank_mask=rank_mask, first_token=ex.rank() * tokens)
        plan = backend.plan(physical, ex, rank_mask=rank_mask if backend.takes_rank_mask else None)
        dropped = plan.dropped + num_unreachable(ids, physical, placement)

    x = x.astype(config.jnp_dtype)
    experts, scale = _input_scale(experts, x, physical, decision, ex.axis_name)
    with jax.named_scope("dispatch"):
        got, through = dispatch(
            x, physical, weights, plan, backend=backend, exchange=ex, layout=layout, global_scale=scale
        )
    rows = got.x if isinstance(got.x, QTensor) else got.x.astype(config.jnp_dtype)
    quantize_input = decision.on_receive in ("quantize", "requantize") or decision.where == "experts"
    with jax.named_scope("experts"):
        if backend.form == "batched":
            blocks = (ex.num_local, ex.num_ranks * ex.capacity)
            split = lambda a: a.reshape(*blocks, *a.shape[1:]) if a.ndim else a  # noqa: E731
            y = apply_batched_experts(
                jax.tree.map(split, rows),
                got.ids.reshape(blocks) >= 0,
                experts,
                config,
                quantize_input=quantize_input,
                straight_through=None if through is None else split(through),
                implementation=layer.implementation,
            ).reshape(backend.num_rows(ex), -1)
        else:
            kind = layer.experts if layer.experts != "auto" else "grouped"
            assert get_experts(kind).form == "standard"
            y = apply_experts(
                rows,
                got.ids,
                got.weights,
                experts,
                config,
                experts=kind,
                quantize_input=quantize_input,
                straight_through=through,
                implementation=layer.implementation,
            )
    with jax.named_scope("combine"):
        out = combine(
            y,
            weights,
            plan,
            backend=backend,
            exchange=ex,
            recv_ids=got.ids,
            wire=config.quant.combine_wire,
            out_dtype=jnp.float32,
        )
    return out, dropped


def _input_scale(
    experts: ExpertWeights, x: jax.Array, physical: jax.Array, decision: Decision, axis_name: str | None
) -> tuple[ExpertWeights, jax.Array | None]:
    """The experts with the decode scale of a per-tensor activation format, and the one to quantise with before sending.

    Without a static scale it is that of all ranks' routed tokens together, so that the numbers do not depend on how
    many ranks there are, nor on who quantises.
    """
    scale = experts.input_scale
    formats = [f for f in (decision.quant_dtype, decision.wire if decision.quantised_wire else None) if f is not None]
    per_tensor = [f for f in formats if get_format(f).global_scale == "tensor"]
    if not per_tensor:
        return experts, None
    if scale is None:
        routed = jnp.any(physical >= 0, axis=1, keepdims=True)
        scale = shared_global_scale(jnp.where(routed, x, jnp.zeros((), x.dtype)), per_tensor[0], axis_name)
        return dataclasses.replace(experts, input_scale=scale), scale
    if decision.where == "experts" or (decision.form == "batched" and not decision.quantised_wire):
        return experts, None  # rows are quantised beside their expert, each with that expert's own scale
    # Whoever quantises a row once for all its experts needs one number that serves every one of them.
    scale = uniform_global_scale(scale, axis_name)
    return dataclasses.replace(experts, input_scale=scale), scale
