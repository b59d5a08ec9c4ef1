"""Which rows of which group each tile of a grouped matmul works on, computed on the device.

M rows, sorted by group; G groups. A tile covers at most `block` rows of one group and is read as boxes of `box` rows,
so that a kernel can use copies of a fixed size whatever the group sizes are: the last tile of a group does not reach
over the group's end but is moved up until it ends there, and computes some rows twice (with the same operations in
the same order, so both writes carry the same bits). Only groups smaller than one box need row-wise stores.

Everything is written as sums over masks, not as prefix sums and gathers, which gives two small kernels instead of
five. Two matmuls over the same rows share them. The Hopper kernels need none: see bounds.py and tiles.py.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Schedule(NamedTuple):
    """Tiles in row order. All int32. A kernel reads one entry of the first four arrays for each tile.

    weight: index of the weight matrix, -1 where the tile is to be zero. first: the row that the tile would begin with
    if tiles of a group followed each other without moving up. start, end: rows of its group, cut at M. row_start,
    tile_start: first row and first tile of each group; entry G is the tail of rows that no group owns.
    """

    weight: jax.Array  # [T]
    first: jax.Array  # [T]
    start: jax.Array  # [T]
    end: jax.Array  # [T]
    row_start: jax.Array  # [G + 1]
    tile_start: jax.Array  # [G + 1]


def max_tiles(num_rows: int, num_groups: int, block: int) -> int:
    """Upper bound on the number of tiles, the tail of rows that belong to no group included."""
    return num_rows // block + num_groups + 1


def sums_before(values: jax.Array) -> jax.Array:
    """Sums of the entries before each of [G + 1] places. [G] -> [G + 1]."""
    size = values.shape[0]
    mask = jnp.arange(size)[None, :] < jnp.arange(size + 1)[:, None]
    return jnp.sum(jnp.where(mask, values[None, :], 0), axis=1, dtype=jnp.int32)


def group_bounds(group_sizes: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """First row and one past the last row of each group, cut at M. Two int32 [G]; negative sizes count as zero."""
    sizes = jnp.maximum(group_sizes.astype(jnp.int32), 0)
    starts = jnp.minimum(sums_before(sizes)[:-1], num_rows)
    return starts, jnp.minimum(starts + sizes, num_rows)


def held_bounds(
    group_sizes: jax.Array, num_rows: int, group_offset: jax.Array | None, num_held: int
) -> tuple[jax.Array, jax.Array]:
    """`group_bounds` of the groups group_offset .. group_offset + num_held - 1; those past the end are empty."""
    bounds = group_bounds(group_sizes, num_rows)
    if group_offset is None:
        return bounds
    # Padded first, because dynamic_slice moves a window that sticks out back inside.
    starts, ends = (jax.lax.dynamic_slice(jnp.pad(a, (0, num_held)), (group_offset,), (num_held,)) for a in bounds)
    return starts, ends


def tile_schedule(
    group_sizes: jax.Array,  # [G]
    *,
    num_rows: int,
    block: int,
    group_offset: jax.Array | int | None = None,
    num_weights: int | None = None,
) -> Schedule:
    """The tiles of `block` rows for groups of these sizes (negative sizes count as zero; the sum is cut at M).

    group_offset, num_weights: the weight of group g is g - group_offset; groups without a weight in [0, num_weights)
        give tiles of zeros. Defaults: 0 and G.
    """
    num_groups = group_sizes.shape[0]
    sizes = jnp.maximum(group_sizes.astype(jnp.int32), 0)
    row_start, tile_start = sums_before(sizes), sums_before((sizes + block - 1) // block)
    group = jnp.arange(num_groups + 1, dtype=jnp.int32)
    start = jnp.minimum(row_start, num_rows)
    end = jnp.where(group == num_groups, num_rows, jnp.minimum(row_start + jnp.pad(sizes, (0, 1)), num_rows))
    tile_end = tile_start + jnp.where(group == num_groups, num_rows, jnp.pad((sizes + block - 1) // block, (0, 1)))
    num_weights = num_groups if num_weights is None else num_weights
    offset = 0 if group_offset is None else jnp.asarray(group_offset, jnp.int32).reshape(())
    weight = group - offset
    weight = jnp.where((weight >= 0) & (weight < num_weights) & (group < num_groups), weight, -1)
    t = jnp.arange(max_tiles(num_rows, num_groups, block), dtype=jnp.int32)[:, None]
    mine = (t >= tile_start[None, :]) & (t < tile_end[None, :])  # [T, G + 1]

    def pick(values):
        return jnp.sum(jnp.where(mine, values, 0), axis=1, dtype=jnp.int32)

    first = pick(start[None, :] + (t - tile_start[None, :]) * block)
    return Schedule(pick(weight[None, :]), first, pick(start[None, :]), pick(end[None, :]), row_start, tile_start)


def num_tiles(schedule: Schedule, num_rows: int, block: int, *, zero_tail: bool = True):
    """How many tiles there are; inside a kernel, `schedule` holds references."""
    last = schedule.tile_start.shape[0] - 1
    count = schedule.tile_start[last]
    if zero_tail:
        tail = jnp.maximum(num_rows - schedule.row_start[last], 0)
        count = count + jax.lax.div(tail + (block - 1), jnp.int32(block))
    return jnp.minimum(count, schedule.weight.shape[0])


def each_tile(count, read, work):
    """step = work(tile, step) for tiles 0 .. count - 1, from step 0; the next tile is read before work begins.

    read(i) -> what the schedule says about the i-th tile of this block.
    """

    def body(i, carry):
        step, tile = carry
        following = read(i + 1)
        return work(tile, step), following

    return jax.lax.fori_loop(0, count, body, (jnp.int32(0), read(0)))[0]


def read_tile(schedule: Schedule, index, block: int, box: int):
    """(weight, first row, first row of the last box, rows) of a tile; rows <= 0 where a sum of sizes was cut at M.

    An index past the last tile is read as the last: kernels look ahead.
    """
    index = jnp.maximum(jnp.minimum(index, schedule.weight.shape[0] - 1), 0)
    first, start, end = (a[index] for a in (schedule.first, schedule.start, schedule.end))
    top = jnp.maximum(jnp.minimum(first, end - block), start)
    rows = jnp.minimum(end - top, block)
    weight = jnp.where(rows > 0, schedule.weight[index], -1)
    return weight, top, jnp.maximum(top, top + rows - box), rows
