"""A decode step of one sequence on one GPU, in as few kernels as there are: eleven for a layer.

At one token a layer of `qwen3_moe.py` reads its weights in some 25 us, and each kernel more costs two. So attention is
done by the three kernels of `pallas_kernels.decode`, and what a layer adds to the stream is added by the next kernel
that reads it. The results are those of `Qwen3Moe.hidden`, up to the order of sums.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jmoe.core import exchange_and_compute
from jmoe.nn import MoE
from jmoe.router import route
from pallas_kernels import decode

AHEAD = False  # whether attention brings the output projection's weights into the L2 cache


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
    if mlp.router.dtype != jnp.bfloat16 or mlp.router_bias is not None or mlp.shared_gate_up is not None:
        return "it is for routers in bfloat16, without bias and shared experts"
    return None


def experts(mlp: MoE, x: jax.Array, logits: jax.Array, valid: jax.Array) -> jax.Array:
    """The MoE layer for x [1, D] with the router's logits [1, E]."""
    layer, params = mlp.layer, mlp.params
    routing = route(
        logits,
        layer.config.router,
        top_k=layer.config.num_experts_per_tok,
        correction_bias=params.correction_bias,
        valid=valid,
    )
    y, _ = exchange_and_compute(
        layer, params.experts, x, routing.ids, routing.weights, placement=None, out_dtype=x.dtype
    )
    return y


@jax.jit
def run_block(layer: Any, x, y, rotation, pair, seen, slot, valid):
    """One layer for x + y [1, D] (y None: x) -> what its attention left, what its experts add, keys and values.

    A jitted function of its own, so that equal layers are traced once.
    """
    at, eps = layer.self_attn, layer.self_attn.config.norm_eps
    scale = lambda norm: norm.scale[...].astype(x.dtype)  # noqa: E731
    qkv, x, _ = decode.normed_linear(x, scale(layer.input_layernorm), at.qkv_proj.weight[...], add=y, eps=eps)
    out = at.o_proj.weight[...]
    ahead = out if AHEAD else None
    norms = scale(at.q_norm), scale(at.k_norm)
    parts, pair = decode.attend(qkv, *norms, rotation, pair, seen, slot, eps=eps, ahead=ahead)
    x = decode.merged_linear(parts, out, x)
    norm, router = scale(layer.post_attention_layernorm), layer.mlp.router[...]
    logits, _, normed = decode.normed_linear(x, norm, router, eps=eps, out_dtype=jnp.float32)
    return x, experts(layer.mlp, normed, logits, valid[:, 0]), pair


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
