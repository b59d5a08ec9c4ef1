"""Where groups and their tiles begin: what a kernel needs to find its tiles by itself, without a schedule made before.

A schedule (schedule.py) costs two small kernels before the matmul, which few rows cannot hide. Here every warp adds up
the group sizes itself, at the start of the kernel, and a tile's group is searched for in eighths: shared memory answers
seven questions at once as soon as one.

M rows, sorted by group; G groups. A tile covers at most `block` rows of one group, as in schedule.py.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .schedule import max_tiles, sums_before

#: More groups than that are added up by XLA: a lane of a warp has up to 33 of them.
MAX_GROUPS = 1024


class Bounds(NamedTuple):
    """int32; entry G is the tail of rows that no group owns. What lies behind it is never read.

    row_start, tile_start: first row and first tile of each group.
    """

    row_start: jax.Array  # [G + 1] or longer
    tile_start: jax.Array  # [G + 1] or longer


def num_words(num_groups: int) -> int:
    """Length of each array that `write_bounds` fills."""
    return 32 * (num_groups // 32 + 1)


def make_bounds(group_sizes: jax.Array, block: int) -> Bounds:
    """The bounds of groups of these sizes (int32 [G]; negative sizes count as zero), in XLA."""
    sizes = jnp.maximum(group_sizes.astype(jnp.int32), 0)
    return Bounds(sums_before(sizes), sums_before((sizes + block - 1) // block))


def write_bounds(o, num_groups: int, block: int, sizes, row_start, tile_start):
    """`make_bounds` by one warp, each lane for num_groups // 32 + 1 neighbouring groups.

    o: operations of one thread (permute.thread.Thread). sizes: pointer to global memory; the others to shared memory,
    num_words(num_groups) long. Several warps may do it at once, to the same memory: they write the same.
    """
    lane, each = o.lane(), num_groups // 32 + 1
    rows, tiles, mine = o.U(0), o.U(0), []
    for i in range(each):
        index = lane * each + i
        size = sizes.at(index, 4).load(1, index < o.U(num_groups))[0]
        size = o.where(size < o.U(1 << 31), size, o.U(0))
        mine.append((index, rows, tiles))
        rows, tiles = rows + size, tiles + (size + (block - 1)) // block
    all_rows, all_tiles = rows, tiles
    for distance in (1, 2, 4, 8, 16):
        counts = lane >= o.U(distance)
        all_rows, all_tiles = (
            total + o.where(counts, o.shuffle_up(total, distance), o.U(0)) for total in (all_rows, all_tiles)
        )
    for index, before_row, before_tile in mine:
        row_start.at(None, 0, index * 4).store([all_rows - rows + before_row])
        tile_start.at(None, 0, index * 4).store([all_tiles - tiles + before_tile])
    o.warp_barrier()


def num_tiles(bounds: Bounds, num_groups: int, num_rows: int, block: int, *, zero_tail: bool = True):
    """How many tiles there are; inside a kernel, `bounds` holds references."""
    count = bounds.tile_start[num_groups]
    if zero_tail:
        tail = jnp.maximum(num_rows - bounds.row_start[num_groups], 0)
        count = count + lax.div(tail + (block - 1), jnp.int32(block))
    return jnp.minimum(count, max_tiles(num_rows, num_groups, block))


def find_tile(bounds: Bounds, index, *, num_groups: int, num_rows: int, block: int, num_weights: int, group_offset):
    """(weight, first row, rows) of a tile; -1 for the weight where it is to be zero, rows <= 0 where there are none.

    The last tile of a group is moved up until it ends with the group, as in schedule.py. The weight of group g is
    g - group_offset. An index past the last tile is nobody's: kernels look ahead, and do not use what they get.
    """
    group, step = jnp.int32(0), 8 ** ((num_groups.bit_length() - 1) // 3)
    while step:  # the last group that begins at or before this tile
        begun = jnp.int32(0)
        for i in range(1, min(8, num_groups // step + 1)):
            there = group + i * step
            reached = (there <= num_groups) & (bounds.tile_start[jnp.minimum(there, num_groups)] <= index)
            begun += jnp.where(reached, 1, 0)
        group, step = group + begun * step, step // 8
    row_start = bounds.row_start[group]
    start = jnp.minimum(row_start, num_rows)
    end = jnp.minimum(bounds.row_start[jnp.minimum(group + 1, num_groups)], num_rows)
    end = jnp.where(group == num_groups, num_rows, end)
    first = start + (index - bounds.tile_start[group]) * block
    top = jnp.maximum(jnp.minimum(first, end - block), start)
    rows = jnp.minimum(end - top, block)
    weight = group - group_offset
    owned = (group < num_groups) & (weight >= 0) & (weight < num_weights) & (rows > 0)
    return jnp.where(owned, weight, -1), top, rows
