"""How the kernels for many rows find their tiles: the tables, thread by thread, the bisection, and what tiles cover."""

import jax.numpy as jnp
import numpy as np
import pytest
from permute_emulator import Threads
from quantize_emulator import POISON, Memory

from pallas_kernels.grouped_matmul import tiles
from pallas_kernels.grouped_matmul.schedule import max_tiles

SIZES = (
    [1, 0, 7, 64, 65, 191, 192, 193],
    [0] * 8,
    [1000] + [0] * 7,
    [2000] * 8,
    [132] * 7,
    [3, -5, 0, 9],
    [11],
    [0, 5] * 60,
    [300, 40, 420, 1],
)
SHAPES = [(128, 0), (256, 0), (128, 128), (128, 152)]


def written(sizes, block, slab):
    """The tables that a block's threads write, by the numpy double of a thread's operations."""
    groups = len(sizes)
    machine = Threads(1, 384)
    Memory.machine = machine
    tables = [Memory(np.full(4 * (groups + 1), POISON, np.uint8), shared=True) for _ in range(3)]
    source = Memory(np.asarray(sizes, np.int32).view(np.uint8))
    tiles.write_tiles(machine, groups, block, slab, source, tables)
    return [t.data.view(np.int32) for t in tables]


@pytest.mark.parametrize("sizes", [*SIZES, [3] * 256, list(range(255))], ids=lambda s: f"{len(s)}-{s[0]}")
@pytest.mark.parametrize(("block", "slab"), SHAPES)
def test_threads_make_the_same_tables_as_xla(sizes, block, slab):
    expected = tiles.make_tiles(jnp.asarray(sizes, jnp.int32), block, slab)
    for actual, wanted in zip(written(sizes, block, slab), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_larger_groups_come_first_and_equal_ones_in_their_order():
    made = tiles.make_tiles(jnp.asarray([5, 300, 0, 5, 129], jnp.int32), 128)
    np.testing.assert_array_equal(made.order, [1, 4, 0, 3, 2, 5])
    np.testing.assert_array_equal(made.tile_start, [0, 3, 5, 6, 7, 7])
    np.testing.assert_array_equal(made.row_start, [0, 5, 305, 305, 310, 439])


class Rows:
    """Which rows of M some tiles cover, and that they stay within one group unless it is smaller than a box."""

    def __init__(self, sizes, m, box=64):
        self.bounds = np.minimum(np.concatenate([[0], np.cumsum(np.maximum(sizes, 0)), [10**6]]), m)
        self.covered, self.count, self.box = np.full(m, -2), 0, box

    def cover(self, weight, start, rows):
        group = np.searchsorted(self.bounds, start, side="right") - 1
        end = self.bounds[group + 1]
        assert start + rows <= end or (rows == self.box and end - self.bounds[group] < self.box)
        self.covered[start : min(start + rows, end)] = weight
        self.count += 1

    def expected(self, offset, weights):
        owner = np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds)) - offset
        tail = np.arange(len(self.covered)) >= self.bounds[-2]
        return np.where((owner >= 0) & (owner < weights) & ~tail, owner, -1)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"{len(s)}-{s[0]}")
@pytest.mark.parametrize(("block", "slab"), SHAPES)
@pytest.mark.parametrize(("offset", "weights"), [(0, None), (2, 3)])
def test_tiles_cover_every_row_once_with_its_own_weight_in_no_more_boxes_than_needed(
    sizes, block, slab, offset, weights
):
    m, groups = 1000, len(sizes)
    weights = groups if weights is None else weights
    made = tiles.make_tiles(jnp.asarray(sizes, jnp.int32), block, slab)
    how = dict(num_groups=groups, num_rows=m, block=block)
    count = int(tiles.num_tiles(made, **how, slab=slab))
    assert count <= max_tiles(m, groups, block)
    without_tail = int(tiles.num_tiles(made, **how, slab=slab, zero_tail=False))
    rows = Rows(sizes, m)
    sides = []
    for index in range(count):
        tile = tiles.find_tile(made, jnp.int32(index), **how, num_weights=weights, group_offset=offset)
        assert int(tile.weight) == -1 or index < without_tail
        if not slab:
            weight, first, last, boxes, _ = map(int, tiles.read_boxes(tile, block, 64))
            for box in range(boxes):
                rows.cover(weight, last if box == boxes - 1 else first + box * 64, 64)
            continue
        for rank in (0, 1):
            paired, side, slab_rows, boxes_of = tiles.read_pair(tile, rank, block, slab, 64)
            weight, first, last, boxes, group_rows = map(int, boxes_of)
            sides.append((int(tile.start), int(first), int(side)))
            if int(slab_rows) > 64:
                assert not paired and slab_rows <= slab and first + slab_rows == int(tile.end)
                rows.cover(weight, first, int(slab_rows))
            else:
                for box in range(boxes):
                    rows.cover(weight, last if box == boxes - 1 else first + box * 64, 64)
            assert group_rows == int(tile.end) - int(tile.start)
    np.testing.assert_array_equal(rows.covered, rows.expected(offset, weights))
    if slab:  # every piece of rows meets both halves of the columns
        assert {(*s[:2], 1 - s[2]) for s in sides} == set(sides)
    else:
        assert rows.count == np.sum(-(-np.diff(rows.bounds) // 64))
