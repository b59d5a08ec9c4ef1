"""Grouped matmul in plain jnp: every row times every group, then the row's own group is selected. For tests only.

Letters: M rows, K contraction, N columns, G groups.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ..quantize import QTensor, dequantize


def row_groups(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """The group that each row belongs to, int32 [M]; G for rows past the sum of the sizes."""
    ends = jnp.cumsum(group_sizes)
    return jnp.sum(jnp.arange(num_rows)[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)  # [M]


def grouped_matmul_reference(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor,
    group_sizes: jax.Array,
    *,
    group_offset: jax.Array | int | None = None,
    out_dtype=None,
) -> jax.Array:
    """As `grouped_matmul`, in float32 over all M * G row-group pairs. Differentiable by jax.grad in float x and w."""
    rows = dequantize(x, jnp.float32) if isinstance(x, QTensor) else x
    weight = dequantize(w, jnp.float32) if isinstance(w, QTensor) else w.astype(rows.dtype)
    wide = (rows.astype(jnp.float32), weight.astype(jnp.float32))
    products = jnp.einsum("mk,gnk->gmn", *wide, precision=lax.Precision.HIGHEST)  # [G, M, N]
    local = row_groups(group_sizes, x.shape[0]) - jnp.asarray(0 if group_offset is None else group_offset, jnp.int32)
    mine = local[None, :] == jnp.arange(w.shape[0])[:, None]  # [G, M]
    return jnp.sum(jnp.where(mine[:, :, None], products, 0.0), axis=0).astype(out_dtype or rows.dtype)
