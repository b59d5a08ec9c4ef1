"""How the kernels for many rows find their tiles by themselves, without a schedule made before.

A block's threads add up the group sizes at the start of the kernel; a tile's group is then found by bisection. Groups
come in the order of their sizes, the largest first: a round of tiles takes as long as its largest, and the last rounds
should be short.

M rows, sorted by group; G groups. A tile covers at most `block` rows of one group and is read as boxes of `box` rows,
so that a kernel can use copies of a fixed size whatever the group sizes are: the last box of a group does not reach
over the group's end but is moved up until it ends there, and computes some rows twice (with the same operations in
the same order, so both writes carry the same bits). Only groups smaller than one box need row-wise stores.

Where two blocks share the weights (`slab`), two tiles of one group that follow each other are a pair: each block takes
one, and the two indices stand for two halves of the columns. What a group has beyond whole pairs, if it is no more than
`slab` rows, is one tile of both blocks, each with half of the columns; else it is another pair.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .schedule import max_tiles, sums_before

#: Each thread compares its group with all others, and shared memory holds the tables beside the stages: of more groups,
#: XLA makes the tables.
MAX_GROUPS = 128


class Tiles(NamedTuple):
    """int32 [G + 1]. Entry G of each is the tail of rows that no group owns, with row_start the sum of all sizes.

    row_start: first row of each group. order: the groups, largest first. tile_start: the first tile of each in that
    order.
    """

    row_start: jax.Array
    order: jax.Array
    tile_start: jax.Array


class Tile(NamedTuple):
    """Where a tile lies: int32 [].

    weight: index of the weight matrix, -1 where the tile is to be zero. first: the row that the tile would begin with
    if tiles of a group followed each other without moving up. start, end: rows of its group, cut at M.
    """

    weight: jax.Array
    first: jax.Array
    start: jax.Array
    end: jax.Array


def count_tiles(rows, block: int, slab: int = 0):
    """Tiles of a group: of `block` rows each, or in pairs and a slab (block to 2 * block rows; 0: no pairs).

    rows: anything with the operators of whole numbers.
    """
    if not slab:
        return (rows + (block - 1)) // block
    pair = 2 * block
    return rows // pair * 2 + (rows % pair + (slab - 1)) // slab


def make_tiles(group_sizes: jax.Array, block: int, slab: int = 0) -> Tiles:
    """The tables for groups of these sizes (int32 [G]; negative sizes count as zero), in XLA."""
    sizes = jnp.maximum(group_sizes.astype(jnp.int32), 0)
    order = jnp.argsort(-sizes, stable=True).astype(jnp.int32)
    order = jnp.append(order, jnp.int32(sizes.shape[0]))
    return Tiles(sums_before(sizes), order, sums_before(count_tiles(sizes[order[:-1]], block, slab)))


def write_tiles(o, num_groups: int, block: int, slab: int, sizes, tables):
    """`make_tiles` by all threads of a block, more than G of them.

    o: operations of one thread (permute.thread.Thread). sizes: pointer to global memory; the tables are pointers to
    shared memory, G + 1 words each.
    """
    me = o.thread()
    mine = sizes.at(me, 4).load(1, me < o.U(num_groups))[0]
    mine = o.where(mine < o.U(1 << 31), mine, o.U(0))
    here = me < o.U(num_groups + 1)
    held = tables[-1]  # the sizes, until all threads have seen them
    held.at(None, 0, me * 4).store([mine], here)
    o.barrier()

    def compare(i, row, place, tile):
        size = held.at(None, 0, i * 4).load(1)[0]
        above = i < me
        before = size >= o.where(above, mine, mine + 1)  # larger, or as large and above
        row = row + o.where(above, size, o.U(0))
        place = place + o.where(before, o.U(1), o.U(0))
        return row, place, tile + o.where(before, count_tiles(size, block, slab), o.U(0))

    row, place, tile = o.loop(num_groups, compare, [o.U(0)] * 3)
    o.barrier()
    for table, index, value in zip(tables, (me, place, place), (row, me, tile), strict=True):
        table.at(None, 0, index * 4).store([value], here)
    o.barrier()


def num_tiles(tiles: Tiles, num_groups: int, num_rows: int, block: int, slab: int = 0, *, zero_tail: bool = True):
    """How many tiles there are; inside a kernel, `tiles` holds references."""
    count = tiles.tile_start[num_groups]
    if zero_tail:
        count = count + count_tiles(jnp.maximum(num_rows - tiles.row_start[num_groups], 0), block, slab)
    return jnp.minimum(count, max_tiles(num_rows, num_groups, block))


def uneven(tiles: Tiles, num_groups: int):
    """Whether the largest group has more than twice the rows of the middle one.

    Tiles of large groups compute while those of small ones wait for their weights: with groups in order of size, it
    pays to have half of the blocks begin at the end.
    """

    def rows(place: int):
        group = tiles.order[place]
        return tiles.row_start[jnp.minimum(group + 1, num_groups)] - tiles.row_start[group]

    return rows(0) > 2 * rows(num_groups // 2)


def find_tile(
    tiles: Tiles, index, *, num_groups: int, num_rows: int, block: int, num_weights: int, group_offset
) -> Tile:
    """The index-th tile. The weight of group g is g - group_offset, if that is in [0, num_weights).

    An index past the last tile is nobody's: kernels look ahead, and do not use what they get.
    """
    place, step = jnp.int32(0), 1 << (num_groups.bit_length() - 1)
    while step:  # the last group in order that begins at or before this tile
        there = place + step
        reached = (there <= num_groups) & (tiles.tile_start[jnp.minimum(there, num_groups)] <= index)
        place, step = jnp.where(reached, there, place), step // 2
    group = tiles.order[place]
    start = jnp.minimum(tiles.row_start[group], num_rows)
    end = jnp.minimum(tiles.row_start[jnp.minimum(group + 1, num_groups)], num_rows)
    end = jnp.where(group == num_groups, num_rows, end)
    weight = group - group_offset
    owned = (group < num_groups) & (weight >= 0) & (weight < num_weights)
    first = start + (index - tiles.tile_start[place]) * block
    return Tile(jnp.where(owned, weight, -1), first, start, end)


def read_boxes(tile: Tile, block: int, box: int):
    """(weight, first row, first row of the last box, boxes, rows of its group) of a tile.

    A group's boxes are spread evenly over its tiles: 5 are 3 and 2, not 4 and 1, which would fetch the weights for one
    box. Box i < boxes - 1 begins at first row + i * box; only the last box is moved up, so that a tile costs no more
    than its rows rounded up to whole boxes. boxes is 0 where a sum of sizes was cut at M. A group with fewer rows than
    a box has one box, which reaches over its end.
    """
    weight, first, start, end = tile
    count = jnp.maximum(lax.div(end - start + (block - 1), jnp.int32(block)), 1)
    boxes = lax.div(end - start + (box - 1), jnp.int32(box))
    rows = lax.div(boxes + count - 1, count) * box
    return _boxes(weight, start + lax.div(first - start, jnp.int32(block)) * rows, start, end, rows, box)


def _boxes(weight, first, start, end, most, box: int):
    """What read_boxes returns for a tile of at most `most` rows from `first` on."""
    rows = jnp.maximum(jnp.minimum(end - first, most), 0)
    boxes = lax.div(rows + (box - 1), jnp.int32(box))
    last = jnp.maximum(start, first + rows - box)
    return jnp.where(boxes > 0, weight, -1), jnp.minimum(first, last), last, boxes, end - start


def read_pair(tile: Tile, rank, block: int, slab: int, box: int):
    """(paired, side, rows of the slab, what read_boxes returns) for one of two blocks, rank 0 or 1, of a tile index.

    side: which half of the columns. A slab of more than `block` rows has no boxes; one of fewer may have both.
    """
    weight, first, start, end = tile
    index = lax.div(first - start, jnp.int32(block))
    even = index - lax.rem(index, jnp.int32(2))
    left = end - start - even * block
    paired = left > slab
    mine = start + (even + jnp.where(paired, rank, 0)) * block
    rows = jnp.where(paired, 0, jnp.maximum(left, 0))
    return paired, jnp.where(paired, index - even, rank), rows, _boxes(weight, mine, start, end, block, box)
