"""Static scales of activations from a sample of them, for formats with one global scale for each tensor.

Letters: T sample tokens, D hidden, F expert width, E experts, P physical slots.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from numpy.typing import ArrayLike

from jmoe.config import MoEConfig
from jmoe.experts import gated_activation
from jmoe.params import MoEParams
from jmoe.router import route, router_logits
from pallas_kernels.quantize import QTensor, dequantize

TOP = 448 * 6  # what the largest magnitude of an NVFP4 tensor is mapped to, before its block scales


def _float(w, dtype=jnp.float32):
    return dequantize(w, dtype) if isinstance(w, QTensor) else w.astype(dtype)


@functools.partial(jax.jit, static_argnames="config")
def _maxima(params: MoEParams, x: jax.Array, slots: jax.Array, *, config: MoEConfig):
    logits = router_logits(x, params.router, params.router_bias)
    x = x.astype(jnp.float32)
    ids = route(
        logits, config.router, top_k=config.num_experts_per_tok, correction_bias=params.correction_bias
    ).ids  # [T, K]
    experts = params.experts

    def one(arguments):
        gate_up, bias, expert = arguments
        hidden = jnp.einsum("td,hfd->htf", x, _float(gate_up))
        if bias is not None:
            hidden = hidden + bias.astype(jnp.float32)[:, None, :]  # [2, T, F]
        hidden = gated_activation(hidden[0], hidden[1], config)  # [T, F]
        mine = jnp.any(ids == expert, axis=1)[:, None]
        return jnp.max(jnp.where(mine & jnp.isfinite(hidden), jnp.abs(hidden), 0))

    inner = lax.map(one, (experts.gate_up, experts.gate_up_bias, slots))
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0)), inner


def calibrate(params: MoEParams, config: MoEConfig, x: jax.Array, *, slots: ArrayLike | None = None) -> MoEParams:
    """`params` with static decode scales measured on x [T, D], inputs of this layer's MoE block.

    input_scale [] = max|x| / 2688, one for all experts and ranks; intermediate_scale [P] = the same of each expert's
    activation output over the tokens routed to it. An expert that no sample reached takes the largest of the others.
    slots: logical expert of each physical slot [P], if that is not the identity. ValueError for a sample that has no
    finite value but zeros, or of another width.
    """
    if x.ndim != 2 or x.shape[1] != config.hidden_size or not x.shape[0]:
        raise ValueError(
            f"x has shape {x.shape}; give at least one token of this layer's input, [T, {config.hidden_size}]."
        )
    slots = (
        jnp.arange(params.experts.down.shape[0], dtype=jnp.int32) if slots is None else jnp.asarray(slots, jnp.int32)
    )
    top, inner = _maxima(params, x, slots.reshape(-1), config=config)
    if not float(top) > 0 or not float(jnp.max(inner)) > 0:
        raise ValueError(
            "The calibration sample is all zero or not finite: a scale of it would be 0 and its reciprocal infinite. "
            "Give real inputs of this layer, or leave the scales dynamic."
        )
    inner = jnp.where(inner > 0, inner, jnp.max(inner))
    experts = dataclasses.replace(
        params.experts, input_scale=top / jnp.float32(TOP), intermediate_scale=inner / jnp.float32(TOP)
    )
    return dataclasses.replace(params, experts=experts)
