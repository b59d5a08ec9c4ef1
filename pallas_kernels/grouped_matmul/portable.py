"""Grouped matmul in plain XLA, for any platform: a loop over the occupied groups, and in each over tiles of its rows.

Letters: M rows, K contraction, N columns, G groups, bm rows of a tile.

Cost. With s_g rows in group g: sum over g of ceil(s_g / bm) tiles of 2 * bm * N * K operations, at most
M/bm + min(G, M) tiles, and one read (and dequantisation) of the weight of each group that has rows. Nothing is spent on
empty groups or on rows past the sum. Beside the result it needs one weight slice in float32 and one tile.

`lax.ragged_dot` is not used: on CPU and on NVIDIA GPUs XLA multiplies every row with every group, masked.
Milliseconds, JAX 0.10.2, 2 CPU cores that other work shared, best of 25 (float32 | bfloat16 operands; "dense" is the
reference's einsum over all pairs, "one" a single [M, K] x [K, N] product, the same operations without groups):

    M     K    N     G   portable     ragged_dot   dense        one
    8     512  512   32  1.6 | 1.5    35 | 36      2.1 | 23     0.3 | 0.2
    64    512  512   32  7.6 | 11     96 | 74      34 | 79      0.6 | 0.8
    512   256  512   8   2.3 | 2.4    14 | 41      55 | 79      0.9 | 2.1
    512   256  512   32  3.4 | 5.2    137 | 213    582 | 513    1.5 | 2.0
    4096  512  512   16  30 | 45      1867 | 2629  3697 | 3511  71 | 100
    2048  512  1024  1   30 | 57      61 | 84      80 | 83      61 | 94

so `ragged_dot` loses even with a single group. On one H200 (JAX 0.11.2, bf16, equal groups, one call):

    M      K     N     G    portable  ragged_dot
    8      2048  1536  128  0.84      0.92
    512    2048  1536  128  9.6       1.4
    8192   4096  3072  32   3.7       8.3
    65536  2048  1536  128  11.0      -

There each turn of the loop costs 70 to 100 us of launches, so that a few rows in each of many groups are where
`ragged_dot` is ahead, with temporaries of M * G * K values; a kernel is the answer to that.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..quantize import QTensor, dequantize
from .schedule import held_bounds

BLOCK_M = (8, 16, 32, 64, 128, 256, 512)  # advertised tile heights
CPU_MAX_BLOCK_M = 128  # taller tiles waste more at the ends of groups than they gain there; on GPUs a turn is dear


class Groups(NamedTuple):
    """Where the rows of the groups that `w` holds lie, within M rows. All int32."""

    start: jax.Array  # [G_local]
    size: jax.Array  # [G_local]
    occupied: jax.Array  # [G_local] the non-empty groups first, in order
    count: jax.Array  # [] how many are non-empty


def local_groups(group_sizes: jax.Array, group_offset: jax.Array | None, num_local: int, num_rows: int) -> Groups:
    """Row ranges of groups offset..offset+num_local; groups past the end of `group_sizes` are empty."""
    starts, ends = held_bounds(group_sizes, num_rows, group_offset, num_local)
    sizes = ends - starts
    busy = sizes > 0
    index = jnp.arange(num_local, dtype=jnp.int32)
    slot = jnp.where(busy, jnp.cumsum(busy, dtype=jnp.int32) - 1, num_local)
    occupied = jnp.zeros_like(index).at[slot].set(index, mode="drop")
    return Groups(starts, sizes, occupied, jnp.sum(busy, dtype=jnp.int32))


def choose_block_m(num_rows: int, num_groups: int) -> int:
    """The smallest tile that holds an even share of the rows, within BLOCK_M (and on CPUs CPU_MAX_BLOCK_M)."""
    share = -(-num_rows // num_groups)
    if jax.default_backend() == "cpu":
        share = min(share, CPU_MAX_BLOCK_M)
    return next((b for b in BLOCK_M if b >= share), BLOCK_M[-1])


def _part(a: jax.Array | QTensor, index: jax.Array, take) -> jax.Array:
    """take(array, index) of a float array, or of each part of a QTensor, which is then dequantised to float32."""
    # XLA:CPU widens bf16 and fp8 before it slices them, and moves the widening of the whole array out of the loop (20
    # times slower for 8 rows of 32 groups). Behind a barrier that hangs on the index it stays here, on the slice.
    a, index = lax.optimization_barrier((a, index))
    if not isinstance(a, QTensor):
        return take(a, index)
    scale = a.global_scale
    if scale is not None and scale.ndim:
        scale = take(scale, index)
    part = dataclasses.replace(a, data=take(a.data, index), block_scale=take(a.block_scale, index), global_scale=scale)
    return dequantize(part, jnp.float32)


def _group(w: jax.Array | QTensor, g: jax.Array, dtype) -> jax.Array:
    """The weight of group g, [N, K]. A QTensor is dequantised to float32, this one slice only."""
    part = _part(w, g, lambda a, g: lax.dynamic_index_in_dim(a, g, keepdims=False))
    return part if isinstance(w, QTensor) else part.astype(dtype)


def _rows(x: jax.Array | QTensor, row: jax.Array, num: int) -> jax.Array:
    """Rows row..row+num of x, [num, K]. Of a QTensor only these rows are dequantised, to float32."""
    return _part(x, row, lambda a, row: lax.dynamic_slice_in_dim(a, row, num))


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


def grouped_matmul(
    x, w, group_sizes, *, group_offset=None, out_dtype, zero_tail: bool = True, block_m: int | None = None
) -> jax.Array:
    """x [M, K], w [G, N, K] -> [M, N]; either may be a QTensor.

    `block_m`: one of BLOCK_M, None to choose by M and G. `zero_tail`: rows past the sum are zero in any case.
    """
    del zero_tail
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
        a = jnp.where(mine[:, None], _rows(dy, row, block), 0)
        b = jnp.where(mine[:, None], _rows(x, row, block), 0)
        return acc + _dot(a, b, (0, 0))

    def finish(g, acc, out):
        return lax.dynamic_update_index_in_dim(out, acc.astype(out_dtype), g, 0)

    return _loop(groups, block, lambda g, out: (None, jnp.zeros((n, k), jnp.float32)), tile, finish, out)
