"""A decode step of one sequence on one GPU, in as few kernels as there are: six for a layer.

At one token a layer of `qwen3_moe.py` reads its weights in some 25 us, and each kernel more costs two. So a layer is

    what the last layer added, norm and projections | attention in parts | the parts' sum and the output projection |
    norm and router | choice of experts, gate, up and activation | down and the weighted sum

by the kernels of `pallas_kernels.decode`. Experts whose weights those do not read go through the grouped matmuls, in
eight kernels or a few more. The results are those of `Qwen3Moe.hidden`, up to the order of sums and roundings.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jmoe.experts.gated import gate_of, gated_projection
from jmoe.experts.weights import in_dtype
from jmoe.nn import MoE
from jmoe.router import checked_rule
from pallas_kernels import decode
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.route import choose_experts


def why_not(model: Any, batch: int) -> str | None:
    """Why a step of `batch` sequences cannot be done here, or None."""
    c = model.config
    if batch != 1:
        return "it is for one sequence"
    if jax.default_backend() != "gpu" or decode.obstacle():
        return decode.obstacle() or "its kernels are for GPUs"
    if c.dtype != "bfloat16" or c.attention_bias or c.dense_layers or c.tie_embeddings:
        return "it is for models in bfloat16, with experts in every layer, without biases and tied embeddings"
    if not isinstance(model.layers, nnx.List):
        return "its layers are stacked"
    mlp: MoE = model.layers[0].mlp
    if not isinstance(mlp, MoE) or mlp.layer.num_ranks != 1:
        return "its experts are spread over several devices"
    m, biased = mlp.config, (mlp.router_bias, mlp.gate_up_bias, mlp.down_bias)
    if mlp.router.dtype != jnp.bfloat16 or any(b is not None for b in biased) or mlp.shared_gate_up is not None:
        return "it is for routers in bfloat16, without biases and shared experts"
    if m.quant.activations or m.quant.intermediate or m.apply_router_weight_on_input or m.output_size != m.hidden_size:
        return "its experts' activations are quantised, weighted beforehand, or padded"
    return None


def direct(mlp: MoE, x: jax.Array) -> bool:
    """Whether the experts' matmuls are kernels for one token, too, and not grouped matmuls."""
    held = in_dtype(mlp.params.experts, x.dtype)
    ids = jax.ShapeDtypeStruct((1, mlp.config.num_experts_per_tok), jnp.int32)
    return decode.experts_obstacle(x, ids, held.gate_up, held.down) is None


def experts(mlp: MoE, rows: jax.Array, logits: jax.Array, valid: jax.Array) -> jax.Array | decode.Weighted:
    """The MoE layer for one token: rows [1 or K, D] are copies of it, logits [1, E] the router's, valid [1]."""
    config, params = mlp.config, mlp.params
    how: Any = dict(top_k=config.num_experts_per_tok, correction_bias=params.correction_bias, valid=valid)
    rule = checked_rule(logits, config.router, **how)
    held = in_dtype(params.experts, rows.dtype)
    if direct(mlp, rows):
        gate, bias = gate_of(config), params.correction_bias
        if decode.routed_obstacle(rows, logits, rule) is None:
            return decode.routed_experts(
                rows, logits, rule, held.gate_up, held.down, bias=bias, valid=valid, gate=gate
            )[0]
        ids, weights = choose_experts(logits, bias, rule, valid=valid)
        return decode.experts(rows, ids, weights, held.gate_up, held.down, gate=gate)
    weights, places, sizes = decode.route(logits, params.correction_bias, rule, valid=valid)
    hidden = gated_projection(rows, None, held, sizes, config)
    y = grouped_matmul(hidden, held.down, sizes, out_dtype=rows.dtype, zero_tail=False)
    return decode.Weighted(y, places, weights)


@jax.jit
def run_block(layer: Any, x, y, rotation, pair, seen, slot, valid):
    """One layer for x + y [1, D] (y None: x) -> what its attention left, what its experts add, keys and values.

    A jitted function of its own, so that equal layers are traced once.
    """
    at, eps = layer.self_attn, layer.self_attn.config.norm_eps
    scale = lambda norm: norm.scale[...].astype(x.dtype)  # noqa: E731
    qkv, x, _ = decode.normed_linear(x, scale(layer.input_layernorm), at.qkv_proj.weight[...], add=y, eps=eps)
    norms = scale(at.q_norm), scale(at.k_norm)
    parts, pair = decode.attend(qkv, *norms, rotation, pair, seen, slot, eps=eps)
    x = decode.merged_linear(parts, at.o_proj.weight[...], x)
    norm, router = scale(layer.post_attention_layernorm), layer.mlp.router[...]
    how = dict(out_dtype=jnp.float32, copies=1 if direct(layer.mlp, x) else layer.mlp.config.num_experts_per_tok)
    logits, _, rows = decode.normed_linear(x, norm, router, eps=eps, **how)
    return x, experts(layer.mlp, rows, logits, valid[:, 0]), pair


def read(model: Any, ids: jax.Array, valid: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    """Reads ids [1, 1] after what the cache holds -> float32 logits [1, V], the cache. valid: bool [1, 1]."""
    c, slot = model.config, cache.used
    position = (cache.valid.sum(dtype=jnp.int32) + valid[0, 0] - 1).astype(jnp.float32)
    half = c.head_dim // 2
    angle = position * c.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    rotation = jnp.cos(angle), jnp.sin(angle)
    seen = jax.lax.dynamic_update_slice_in_dim(cache.valid, valid, slot, axis=1)
    x, y, kv = model.embed(ids)[0], None, []
    for layer, pair in zip(model.layers, cache.kv, strict=True):
        x, y, pair = run_block(layer, x, y, rotation, pair, seen, slot, valid)
        kv.append(pair)
    norm, head = model.norm.scale[...].astype(x.dtype), model.lm_head.weight[...]
    logits, _, _ = decode.normed_linear(x, norm, head, add=y, eps=c.norm_eps, out_dtype=jnp.float32)
    return logits, dataclasses.replace(cache, kv=tuple(kv), valid=seen, used=slot + 1)
