"""Gated experts over rows sorted by expert: permute, gate and up, activation, down, weighted sum.

Rows are moved into expert order before the matmuls and summed after them. On an H200 (Qwen3-30B-A3B, BF16) that takes
80 + 73 us of 1200 with 8192 tokens and 2 + 3 us of 283 with 64; a matmul that gathers would need one copy for each row
and stage, because Hopper's copy engine has no gather, and one that adds up would need atomics, which are not
deterministic.

Letters: N received rows, D hidden, K ids of a row, E experts held here, F expert width, M = N * K places in expert
order, S rows of one expert in the batched form.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import grouped_matmul, input_dtype
from pallas_kernels.permute import (
    Sorted,
    Unsummed,
    gather_dequantized,
    gather_rows,
    merge_duplicates,
    sort_by_expert,
)
from pallas_kernels.quantize import QTensor

from ..config import MoEConfig
from . import few
from .bias import group_rows
from .gated import gated_projection, quantised_projection
from .inputs import check_input, quantize_rows
from .table import get_experts
from .weights import ExpertWeights, check_weights, in_dtype


def apply_experts(
    x: jax.Array | QTensor,
    ids: jax.Array,
    weights: jax.Array,
    params: ExpertWeights,
    config: MoEConfig,
    *,
    experts: str = "grouped",
    quantize_input: bool = False,
    straight_through: jax.Array | None = None,
    order: Sorted | None = None,
    out_dtype=jnp.float32,
    implementation: str | None = None,
) -> jax.Array:
    """Runs each row through those of its experts that are held here, and sums their outputs with its weights.

    Arguments:
        x: [N, D] float array, or a row-wise QTensor in the format config.quant.activations (any, where that is None: it
            is then dequantised as it is read). Rows without a valid id may hold anything, NaN too.
        ids: int32 [N, K], index into the experts held here; anything outside [0, E) is not computed.
        weights: float32 [N, K].
        params: ExpertWeights of the E experts held here.
        experts: "grouped" or "grouped_deferred", see EXPERTS.
        quantize_input: whether this call quantises x to config.quant.activations. "grouped" does so once for each row
            ([N, D]), "grouped_deferred" after the permutation, where a per-tensor format may have a static scale for
            each expert (params.input_scale [E]).
        straight_through: for a QTensor x, the float [N, D] array it stands for; its values are not read, it receives
            the gradient of the dequantised x.
        order: sort_by_expert(ids, E), where the caller has made it already (for example with fewer places).
        out_dtype: what the float32 sums are cast to.
        implementation: of the grouped matmul, None for the best.

    Returns: out_dtype [N, D], or [N, hidden_size_unpadded] where the configuration has that.

    Differentiable in float x, weights, float params and `straight_through`; quantisation is passed straight through.

    Raises ValueError for shapes and formats that do not fit; if the rows would be quantised twice or, although the
    configuration asks for it, never; and for a QTensor of another contract (per-token against per-tensor NVFP4).
    """

    def in_steps(x, ids, weights, params):
        rows = apply_experts_unsummed(
            x,
            ids,
            weights,
            params,
            config,
            experts=experts,
            quantize_input=quantize_input,
            straight_through=straight_through,
            order=order,
            implementation=implementation,
        )
        return rows.summed(out_dtype)

    how: Any = dict(quantize_input=quantize_input, implementation=implementation)
    if order is None and takes_few_rows(x, ids, params, config, experts=experts, **how):
        assert not isinstance(x, QTensor)
        return few.few_rows(x, ids, weights, params, config, in_steps, out_dtype=out_dtype)
    return in_steps(x, ids, weights, params)


def takes_few_rows(
    x: jax.Array | QTensor,
    ids: jax.Array,
    params: ExpertWeights,
    config: MoEConfig,
    *,
    experts: str = "grouped",
    quantize_input: bool = False,
    implementation: str | None = None,
) -> bool:
    """Whether `apply_experts` of these takes the way of few rows (few.py), which leaves nothing unsummed."""
    if implementation is not None or get_experts(experts).form != "standard":
        return False
    return few.obstacle(x, ids, params, config, quantize_input=quantize_input) is None


def apply_experts_unsummed(
    x: jax.Array | QTensor,
    ids: jax.Array,
    weights: jax.Array,
    params: ExpertWeights,
    config: MoEConfig,
    *,
    experts: str = "grouped",
    quantize_input: bool = False,
    straight_through: jax.Array | None = None,
    order: Sorted | None = None,
    implementation: str | None = None,
) -> Unsummed:
    """`apply_experts` but for the last step, for whoever takes the weighted sums of the outputs on their way."""
    spec = get_experts(experts)
    if spec.form != "standard":
        raise ValueError(
            f"experts={experts!r} take the {spec.form} form [E, S, D]; call apply_batched_experts for them, or use "
            "'grouped' or 'grouped_deferred' here."
        )
    check_weights(params, config)
    check_input(x, config, spec, quantize_input=quantize_input)
    if ids.ndim != 2 or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"ids {ids.shape} and weights {weights.shape} must both be [N, K] with the N={x.shape[0]} rows of x."
        )
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"ids are {ids.dtype}; they are indices of experts: cast them to int32.")
    num_experts = params.gate_up.shape[0]
    if order is None:
        if ids.shape[1] > num_experts:  # then distinct ids need fewer places than N * K
            ids, weights = merge_duplicates(ids, weights)
        order = sort_by_expert(ids, num_experts, num_places=ids.shape[0] * min(ids.shape[1], num_experts))
    if config.apply_router_weight_on_input:
        row_weight = gather_rows(weights.astype(jnp.float32), order.source, order.position)  # [M, 1]
        weights = jnp.ones_like(weights)
    else:
        row_weight = None
    y = _compute(x, order, row_weight, params, config, spec, quantize_input, straight_through, implementation)  # [M, D]
    return Unsummed(y, order.position, weights.astype(jnp.float32), config.output_size)


def apply_batched_experts(
    x: jax.Array | QTensor,
    valid: jax.Array,
    params: ExpertWeights,
    config: MoEConfig,
    *,
    quantize_input: bool = False,
    straight_through: jax.Array | None = None,
    weights: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The batched form: x [E, S, D] (array or QTensor), block e through expert e, where valid [E, S] is True.

    Returns float32 [E, S, D] (or hidden_size_unpadded columns), not weighted, zero where `valid` is False; those rows
    may hold anything. weights: float32 [E, S], needed only for config.apply_router_weight_on_input. The other arguments
    are those of `apply_experts`. The work is that of the valid rows.
    Raises ValueError for shapes that do not fit, and where the weights are needed and missing.
    """
    on_input = config.apply_router_weight_on_input
    if on_input and weights is None:
        raise ValueError(
            "config.apply_router_weight_on_input=True needs the weights [E, S] of the rows; pass weights=."
        )
    num_experts, slots = valid.shape
    if x.shape[:2] != valid.shape or num_experts != params.gate_up.shape[0]:
        raise ValueError(
            f"x {x.shape} and valid {valid.shape} must be [E, S, D] and [E, S] with E={params.gate_up.shape[0]}, the "
            "experts held here."
        )
    check_weights(params, config)
    spec = get_experts("batched")
    check_input(x, config, spec, quantize_input=quantize_input)
    ids = jnp.where(valid, jnp.arange(num_experts, dtype=jnp.int32)[:, None], -1).reshape(-1, 1)
    order = sort_by_expert(ids, num_experts)
    flat = _flat_rows(x)
    if straight_through is not None:
        straight_through = straight_through.reshape(num_experts * slots, x.shape[-1])
    row_weight = None
    if on_input and weights is not None:
        row_weight = gather_rows(weights.reshape(-1, 1).astype(jnp.float32), order.source, order.position)
    y = _compute(flat, order, row_weight, params, config, spec, quantize_input, straight_through, implementation)
    out = gather_rows(y, order.position[:, 0], order.source[:, None]).astype(jnp.float32)
    return out[:, : config.output_size].reshape(num_experts, slots, config.output_size)


def _flat_rows(x):
    """[E, S, D] -> [E * S, D]; a QTensor part by part, with a scale for each block ([E]) spread over its rows."""
    if not isinstance(x, QTensor):
        return x.reshape(x.shape[0] * x.shape[1], x.shape[-1])
    scale = x.global_scale
    if scale is not None and scale.ndim:
        scale = jnp.broadcast_to(scale.reshape(*scale.shape, *(1,) * (2 - scale.ndim)), x.shape[:2]).reshape(-1)
    data, block_scale = (a.reshape(a.shape[0] * a.shape[1], a.shape[-1]) for a in (x.data, x.block_scale))
    return dataclasses.replace(x, data=data, block_scale=block_scale, global_scale=scale)


def _compute(x, order, row_weight, params, config, spec, quantize_input, straight_through, implementation):
    """Unweighted outputs in expert order, [M, D] of the layer's dtype; anything past the last place."""
    dtype, quant, sizes = config.jnp_dtype, config.quant, order.group_sizes
    params = in_dtype(params, dtype)
    num_places = order.source.shape[0]

    def matmul(rows, w, through):
        # Nobody reads past the last place.
        how: Any = dict(out_dtype=dtype, zero_tail=False, implementation=implementation)
        return grouped_matmul(rows, w, sizes, straight_through=through, **how)

    rows, through = _input_rows(x, order, params, config, spec, quantize_input, straight_through, implementation)
    how = dict(row_weight=row_weight, implementation=implementation)
    pair = quantised_projection(rows, through, params, sizes, config, **how)
    if pair is None:
        hidden = gated_projection(rows, through, params, sizes, config, **how)  # [M, F]
        if quant.intermediate is not None:
            scale = _place_scale(params.intermediate_scale, sizes, num_places)
            q = quantize_rows(hidden, quant.intermediate, num_valid_rows=jnp.sum(sizes), scale=scale)
            pair = q, hidden
    y = matmul(hidden, params.down, None) if pair is None else matmul(pair[0], params.down, pair[1])
    if params.down_bias is not None:
        bias = group_rows(params.down_bias, sizes, num_places)
        y = (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(dtype)
    return y


def _input_rows(x, order, params, config, spec, quantize_input, straight_through, implementation):
    """The first matmul's input in expert order, and the float array that takes its gradient if that is quantised."""
    fmt, dtype = config.quant.activations, config.jnp_dtype

    def sort(a):
        return gather_rows(a, order.source, order.position, fill=False)  # no matmul reads past the last place

    def sort_quantised(q, through):
        how: Any = dict(num_rows=order.source.shape[0], out_dtype=dtype, implementation=implementation)
        wanted = input_dtype(q, params.gate_up, **how)
        if wanted is None:
            return sort(q), None if through is None else sort(through)
        return gather_dequantized(q, order.source, order.position, dtype=wanted, straight_through=through), None

    through = straight_through if isinstance(x, QTensor) or not quantize_input else x
    if not quantize_input:
        return sort_quantised(x, through) if isinstance(x, QTensor) else (sort(x), None)
    alignment = config.quant.mx_alignment
    scale = params.input_scale
    if spec.per_expert_input_scale:
        rows, num_places = sort(x), order.source.shape[0]
        scale = _place_scale(scale, order.group_sizes, num_places)
        total = jnp.sum(order.group_sizes)
        q = quantize_rows(rows, fmt, num_valid_rows=total, scale=scale, alignment=alignment, dtype=dtype)
        return q, None if through is None else sort(through)
    if scale is not None and scale.ndim:
        raise ValueError(
            f"experts={spec.name!r} quantise each row once for all its experts and take one input scale, got "
            f"input_scale {scale.shape}; reduce it to its maximum, or use experts='grouped_deferred'."
        )
    valid = jnp.any(order.position >= 0, axis=1)
    return sort_quantised(quantize_rows(x, fmt, valid=valid, scale=scale, alignment=alignment, dtype=dtype), through)


def _place_scale(scale, sizes, num_places):
    """Static scales [E] spread over the places of each expert; [] and None as they are."""
    if scale is None or scale.ndim == 0:
        return scale
    return group_rows(scale.astype(jnp.float32)[:, None], sizes, num_places, fill=1.0)[:, 0]
