"""A handful of tokens through their experts in two kernels, instead of six or seven that sort, move and sum up rows.

Letters: N rows, D hidden, K ids of a row, E experts held here, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import decode
from pallas_kernels.grouped_matmul import Gate
from pallas_kernels.quantize import QTensor

from ..config import MoEConfig
from .gated import joined
from .weights import ExpertWeights, in_dtype


def obstacle(x: Any, ids: jax.Array, params: ExpertWeights, config: MoEConfig, *, quantize_input: bool) -> str | None:
    """Why it goes another way, or None."""
    if isinstance(x, QTensor) or quantize_input or config.quant.intermediate is not None:
        return "its kernels take activations that are not quantised"
    if config.apply_router_weight_on_input or x.dtype != config.jnp_dtype:
        return f"its kernels take rows of {config.dtype}, and weight the experts' outputs"
    held = jax.eval_shape(lambda p: in_dtype(p, x.dtype), params)
    biases = dict(gate_up_bias=held.gate_up_bias, down_bias=held.down_bias)
    return decode.experts_obstacle(x, ids, held.gate_up, held.down, **biases)


def few_rows(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    params: ExpertWeights,
    config: MoEConfig,
    otherwise: Callable[..., jax.Array],
    *,
    out_dtype,
) -> jax.Array:
    """`apply_experts` where there is no `obstacle`.

    otherwise: the same of (x, ids, weights, params), for devices that the kernels are not for and for gradients.
    """
    gate = Gate(config.activation, config.swiglu_alpha, config.swiglu_limit)

    def in_steps(x, ids, weights, *params):
        return otherwise(x, ids, weights, ExpertWeights(*params))

    def together(x, weights, gate_up, down, gate_up_bias, down_bias, ids):
        held = in_dtype(ExpertWeights(gate_up, down), x.dtype)
        how: Any = dict(gate=gate, gate_up_bias=gate_up_bias, down_bias=down_bias, out_dtype=out_dtype)
        return decode.experts(x, ids, weights, held.gate_up, held.down, **how, otherwise=in_steps)

    floats = (x, weights, params.gate_up, params.down, params.gate_up_bias, params.down_bias)
    y = joined(together, lambda x, weights, *rest: in_steps(x, rest[-1], weights, *rest[:-1]), floats, ids)
    return y[:, : config.output_size]
