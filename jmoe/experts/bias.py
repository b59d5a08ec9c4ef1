"""One row of a table for each place of a group, with a gradient that adds nothing atomically.

Letters: G groups, M places in expert order, D columns.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import row_groups
from pallas_kernels.grouped_matmul.portable import grouped_matmul_drhs


def group_rows(table: jax.Array, group_sizes: jax.Array, num_places: int, *, fill: float = 0.0) -> jax.Array:
    """table [G, D] -> [M, D]: the row of each place's group, `fill` past the last group. Differentiable in table."""
    return _group_rows(table, group_sizes, num_places, fill)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _group_rows(table, group_sizes, num_places, fill):
    groups = row_groups(group_sizes, num_places)
    taken = jnp.take(table, groups, axis=0, mode="clip")
    return jnp.where((groups < table.shape[0])[:, None], taken, jnp.asarray(fill, table.dtype))


def _forward(table, group_sizes, num_places, fill):
    return _group_rows(table, group_sizes, num_places, fill), (group_sizes, jnp.zeros((0,), table.dtype))


def _backward(num_places, fill, residuals, dy):
    group_sizes, like = residuals
    ones = jnp.ones((num_places, 1), dy.dtype)
    sums = grouped_matmul_drhs(dy, ones, group_sizes, num_groups=group_sizes.shape[0], out_dtype=like.dtype)
    return sums[:, :, 0], None


_group_rows.defvjp(_forward, _backward)
