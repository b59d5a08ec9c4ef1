"""What the kernels compute, in plain JAX. Letters as in `api`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from ..grouped_matmul import gated_product
from ..quantize import QTensor, dequantize
from ..route.reference import mask_rows, select, weigh

LOG2E = math.log2(math.e)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x [..., D] with a root mean square of 1 along D, times scale [D]; in x's dtype."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + jnp.float32(eps))
    return (wide * (inverse * scale.astype(jnp.float32)[(None,) * (x.ndim - 1)])).astype(x.dtype)


def linear(x: jax.Array, w: jax.Array, dtype) -> jax.Array:
    """x [1, D], w [N, D] -> [1, N], summed in float32."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32).astype(dtype)


def normed_linear(x, scale, w, add, places, weights, *, eps, out_dtype, copies):
    if places is not None:
        there = places >= 0
        rows = jnp.where(there[:, None], add[jnp.maximum(places, 0)].astype(jnp.float32), jnp.float32(0))
        add = (rows * jnp.where(there, weights, jnp.float32(0))[:, None]).sum(0, keepdims=True).astype(x.dtype)
    total = x if add is None else x + add
    normed = rms_norm(total, scale, eps)
    return linear(normed, w, out_dtype), total, jnp.broadcast_to(normed, (copies, x.shape[1]))


def route(rule, logits, bias, valid):
    ids = select(mask_rows(logits, valid), bias, rule)
    weights = weigh(mask_rows(logits, valid), bias, ids, rule)
    ids = jnp.where(valid[:, None], ids, -1)[0]
    places = (ids[None, :] < ids[:, None]).sum(1, dtype=jnp.int32)
    sizes = (ids[:, None] == jnp.arange(logits.shape[1], dtype=jnp.int32)[None]).sum(0, dtype=jnp.int32)
    return jnp.where(valid[:, None], weights, jnp.float32(0))[0], jnp.where(valid, places, -1), sizes


def experts(x, ids, weights, gate_up, down, gate_up_bias, down_bias, *, gate, out_dtype):
    there = (ids >= 0) & (ids < gate_up.shape[0])
    chosen = jnp.where(there, ids, 0)  # [T, K]
    f32 = jnp.float32

    def of_chosen(w):
        return (dequantize(w, f32) if isinstance(w, QTensor) else w.astype(f32))[chosen]

    both = jnp.einsum("td,tkifd->tkif", x.astype(f32), of_chosen(gate_up), precision="highest")
    if gate_up_bias is not None:
        both = both + of_chosen(gate_up_bias)
    hidden = gated_product(both[:, :, 0], both[:, :, 1], gate).astype(x.dtype)
    y = jnp.einsum("tkf,tkdf->tkd", hidden.astype(f32), of_chosen(down), precision="highest")
    if down_bias is not None:
        y = y + of_chosen(down_bias)
    y = jnp.where(there[..., None], y, f32(0)) * jnp.where(there, weights, f32(0))[..., None]
    return y.sum(1).astype(out_dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Each pair (i, i + h/2) of x [H, h] by its angle; cos, sin [h/2]."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[None], sin[None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(qkv, q_scale, k_scale, cos, sin, keys, values, valid, slot, *, eps, splits):
    _, groups, slots, size = keys.shape
    heads = qkv.shape[1] // size - 2 * groups
    rows = qkv.reshape(-1, size)
    q = rotate(rms_norm(rows[:heads], q_scale, eps), cos, sin)
    k = rotate(rms_norm(rows[heads : heads + groups], k_scale, eps), cos, sin)
    write = jax.lax.dynamic_update_slice_in_dim
    keys = write(keys, k[None, :, None], slot, axis=2)
    values = write(values, rows[None, heads + groups :, None], slot, axis=2)
    q = q.astype(jnp.float32).reshape(groups, -1, size) * jnp.float32(size**-0.5 * LOG2E)
    scores = jnp.einsum("grh,gnh->grn", q, keys[0].astype(jnp.float32), precision="highest")
    seen = valid & (jnp.arange(slots, dtype=jnp.int32)[None] <= slot)
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    pad = -slots % splits
    scores = jnp.pad(scores, ((0, 0), (0, 0), (0, pad)), constant_values=-jnp.inf)
    scores = scores.reshape(groups, -1, splits, (slots + pad) // splits)  # [G, H/G, splits, N/splits]
    top = jnp.maximum(scores.max(-1), jnp.float32(-1e30))
    p = jnp.exp2(scores - top[..., None])
    total = p.sum(-1)
    v = jnp.pad(values[0].astype(jnp.float32), ((0, 0), (0, pad), (0, 0))).reshape(groups, splits, -1, size)
    out = jnp.einsum("grsn,gsnh->sgrh", p, v, precision="highest")
    over = jnp.moveaxis(total, 2, 0).reshape(splits, groups, -1, 1)
    out = jnp.where(over > 0, out / jnp.where(over > 0, over, 1.0), 0.0)
    weight = jnp.moveaxis(jnp.stack([top, total], -1), 2, 0).reshape(splits, heads, 2)
    return out.reshape(splits, heads, size).astype(qkv.dtype), weight, keys, values


def merge(out: jax.Array, weight: jax.Array) -> jax.Array:
    """Partial results [splits, H, h] with (log2 of the largest term, sum) [splits, H, 2] -> [1, H * h]."""
    share = jnp.exp2(weight[..., 0] - weight[..., 0].max(0)[None]) * weight[..., 1]
    share = share / share.sum(0)[None]
    return (share[..., None] * out.astype(jnp.float32)).sum(0).reshape(1, -1).astype(out.dtype)
