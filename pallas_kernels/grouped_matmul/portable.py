"""Grouped matmul in plain XLA, for any platform: a loop over the occupied groups, and in each over tiles of its rows.

Letters: M rows, K contraction, N columns, G groups, bm rows of a tile.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..quantize import QTensor, dequantize

BLOCK_M = (8, 16, 32, 64, 128)  # advertised tile heights; on CPUs taller ones waste more at group ends than they gain


class Groups(NamedTuple):
    """Where the rows of the groups that `w` holds lie, within M rows. All int32."""

    start: jax.Array  # [G_local]
    size: jax.Array  # [G_local]
    occupied: jax.Array  # [G_local] the non-empty groups first, in order
    count: jax.Array  # [] how many are non-empty


def local_groups(group_sizes: jax.Array, group_offset: jax.Array | None, num_local: int, num_rows: int) -> Groups:
    """Row ranges of groups offset..offset+num_local; groups past the end of `group_sizes` are empty."""
    sizes = jnp.maximum(group_sizes.astype(jnp.int32), 0)
    ends = jnp.minimum(jnp.cumsum(sizes), num_rows)
    starts = jnp.minimum(jnp.cumsum(sizes) - sizes, num_rows)
    sizes = ends - starts
    if group_offset is not None:
        # Padded first, because dynamic_slice moves a window that sticks out back inside.
        starts, sizes = (
            lax.dynamic_slice(jnp.pad(a, (0, num_local)), (group_offset,), (num_local,)) for a in (starts, sizes)
        )
    busy = sizes > 0
    index = jnp.arange(num_local, dtype=jnp.int32)
    slot = jnp.where(busy, jnp.cumsum(busy, dtype=jnp.int32) - 1, num_local)
    occupied = jnp.zeros_like(index).at[slot].set(index, mode="drop")
    return Groups(starts, sizes, occupied, jnp.sum(busy, dtype=jnp.int32))


def choose_block_m(num_rows: int, num_groups: int) -> int:
    """The smallest tile that holds an even share of the rows, within BLOCK_M."""
    share = -(-num_rows // num_groups)
    return next((b for b in BLOCK_M if b >= share), BLOCK_M[-1])


def _group(w: jax.Array | QTensor, g: jax.Array, dtype) -> jax.Array:
    """The weight of group g, [N, K]. A QTensor is dequantised to float32, this one slice only."""

    def take(a):
        return lax.dynamic_index_in_dim(a, g, keepdims=False)

    if not isinstance(w, QTensor):
        return take(w).astype(dtype)
    scale = w.global_scale
    part = dataclasses.replace(
        w,
        data=take(w.data),
        block_scale=take(w.block_scale),
        global_scale=take(scale) if scale is not None and scale.ndim else scale,
    )
    return dequantize(part, jnp.float32)


def _rows(x: jax.Array | QTensor, row: jax.Array, num: int) -> jax.Array:
    """Rows row..row+num of x, [num, K]. Of a QTensor only these rows are dequantised, to float32."""

    def take(a):
        return lax.dynamic_slice_in_dim(a, row, num)

    if not isinstance(x, QTensor):
        return take(x)
    scale = x.global_scale
    part = dataclasses.replace(
        x,
        data=take(x.data),
        block_scale=take(x.block_scale),
        global_scale=take(scale) if scale is not None and scale.ndim else scale,
    )
    return dequantize(part, jnp.float32)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product with float32 accumulation. Unequal dtypes meet in float32; float32 operands are not rounded (no TF32)."""
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _window(groups: Groups, g: jax.Array, tile: jax.Array, block: int, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """First row of a tile of group g, moved back where it would leave the array, and which of its rows it is to do."""
    start = groups.start[g]
    first = start + tile * block
    row = jnp.minimum(first, num_rows - block)
    index = row + jnp.arange(block, dtype=jnp.int32)
    return row, (index >= first) & (index < start + groups.size[g])


def _loop(groups: Groups, block: int, body_group, body_tile, finish_group, carry):
    """For each occupied group: state = body_group(g); body_tile(state, g, tile, acc) over its tiles; finish_group."""

    def group(i, carry):
        g = groups.occupied[i]
        state, acc = body_group(g, carry)
        tiles = (groups.size[g] + block - 1) // block
        acc = lax.fori_loop(0, tiles, lambda t, acc: body_tile(state, g, t, acc), acc)
        return finish_group(g, acc, carry)

    return lax.fori_loop(0, groups.count, group, carry)


def _row_product(x, w, group_sizes, group_offset, out_dtype, block_m, *, contract: int, columns: int) -> jax.Array:
    """out[m] = x[m] . w[group of m], contracting w's axis `contract`. [M, columns], zero outside the local groups."""
    num_rows, num_groups = x.shape[0], w.shape[0]
    out = jnp.zeros((num_rows, columns), out_dtype)
    if num_rows == 0:
        return out
    groups = local_groups(group_sizes, group_offset, num_groups, num_rows)
    block = min(block_m or choose_block_m(num_rows, num_groups), num_rows)
    dtype = jnp.float32 if isinstance(x, QTensor) else x.dtype

    def tile(weight, g, t, out):
        row, mine = _window(groups, g, t, block, num_rows)
        y = _dot(_rows(x, row, block), weight, (1, contract)).astype(out_dtype)
        y = jnp.where(mine[:, None], y, lax.dynamic_slice_in_dim(out, row, block))
        return lax.dynamic_update_slice_in_dim(out, y, row, 0)

    return _loop(groups, block, lambda g, out: (_group(w, g, dtype), out), tile, lambda g, acc, _: acc, out)


def grouped_matmul(x, w, group_sizes, *, group_offset=None, out_dtype, block_m: int | None = None) -> jax.Array:
    """x [M, K], w [G, N, K] -> [M, N]; either may be a QTensor.

    `block_m`: one of BLOCK_M, None to choose by M and G.
    """
    return _row_product(x, w, group_sizes, group_offset, out_dtype, block_m, contract=1, columns=w.shape[1])


def grouped_matmul_dlhs(dy, w, group_sizes, *, group_offset=None, out_dtype, block_m: int | None = None) -> jax.Array:
    """Gradient of x: dy [M, N], w [G, N, K] -> [M, K]."""
    return _row_product(dy, w, group_sizes, group_offset, out_dtype, block_m, contract=0, columns=w.shape[2])


def grouped_matmul_drhs(
    dy, x, group_sizes, *, num_groups: int, group_offset=None, out_dtype, block_m: int | None = None
) -> jax.Array:
    """Gradient of w: dy [M, N], x [M, K] array or QTensor -> [G, N, K]; a group's sum is kept in float32."""
    (num_rows, n), k = dy.shape, x.shape[1]
    out = jnp.zeros((num_groups, n, k), out_dtype)
    if num_rows == 0:
        return out
    groups = local_groups(group_sizes, group_offset, num_groups, num_rows)
    block = min(block_m or choose_block_m(num_rows, num_groups), num_rows)

    def tile(_, g, t, acc):
        row, mine = _window(groups, g, t, block, num_rows)
        # Both sides: a NaN row of a neighbouring group times a zero would still be NaN.
        a = jnp.where(mine[:, None], lax.dynamic_slice_in_dim(dy, row, block), 0)
        b = jnp.where(mine[:, None], _rows(x, row, block), 0)
        return acc + _dot(a, b, (0, 0))

    def finish(g, acc, out):
        return lax.dynamic_update_index_in_dim(out, acc.astype(out_dtype), g, 0)

    return _loop(groups, block, lambda g, out: (None, jnp.zeros((n, k), jnp.float32)), tile, finish, out)
