"""A handful of tokens through their experts in two kernels, instead of six or seven that sort, move and sum up rows.

Letters: N rows, D hidden, K ids of a row, E experts held here, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import decode
from pallas_kernels.quantize import QTensor
from pallas_kernels.route import Rule, choose_experts

from ..config import MoEConfig
from .gated import gate_of, joined
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
    gate = gate_of(config)

    def in_steps(x, ids, weights, *params):
        return otherwise(x, ids, weights, ExpertWeights(*params))

    def together(x, weights, gate_up, down, gate_up_bias, down_bias, ids):
        held = in_dtype(ExpertWeights(gate_up, down), x.dtype)
        how: Any = dict(gate=gate, gate_up_bias=gate_up_bias, down_bias=down_bias, out_dtype=out_dtype)
        return decode.experts(x, ids, weights, held.gate_up, held.down, **how, otherwise=in_steps)

    floats = (x, weights, params.gate_up, params.down, params.gate_up_bias, params.down_bias)
    y = joined(together, lambda x, weights, *rest: in_steps(x, rest[-1], weights, *rest[:-1]), floats, ids)
    return y[:, : config.output_size]


def routed_row(
    x: jax.Array,
    logits: jax.Array,
    rule: Rule,
    bias: jax.Array | None,
    valid: jax.Array | None,
    params: ExpertWeights,
    config: MoEConfig,
    otherwise: Callable[..., jax.Array],
    *,
    out_dtype,
) -> tuple[jax.Array, jax.Array]:
    """One token's choice of experts and `few_rows` of it, where neither has an `obstacle`: the sums, and ids [1, K].

    logits: float32 [1, E]; bias [E] and valid [1] as for `choose_experts`. otherwise: as for `few_rows`.
    """
    gate = gate_of(config)

    def in_steps(x, logits, bias, valid, *params):
        ids, weights = choose_experts(logits, bias, rule, valid=valid)
        return otherwise(x, ids, weights, ExpertWeights(*params)), ids, weights

    def together(x, logits, bias, gate_up, down, gate_up_bias, down_bias, valid):
        held = in_dtype(ExpertWeights(gate_up, down), x.dtype)
        how: Any = dict(gate=gate, gate_up_bias=gate_up_bias, down_bias=down_bias, out_dtype=out_dtype)
        how |= dict(bias=bias, valid=valid, otherwise=in_steps)
        return decode.routed_experts(x, logits, rule, held.gate_up, held.down, **how)

    floats = (x, logits, bias, params.gate_up, params.down, params.gate_up_bias, params.down_bias)
    y, ids, _ = joined(
        together, lambda x, logits, bias, *rest: in_steps(x, logits, bias, rest[-1], *rest[:-1]), floats, valid
    )
    return y[:, : config.output_size], ids


def routed_obstacle(
    x: jax.Array, logits: jax.Array, rule: Rule, params: ExpertWeights, config: MoEConfig
) -> str | None:
    """Why `routed_row` cannot do it, or None."""
    ids: Any = jax.ShapeDtypeStruct((x.shape[0], rule.top_k), jnp.int32)
    reason = decode.routed_obstacle(x, logits, rule)
    return reason or obstacle(x, ids, params, config, quantize_input=False)
