"""How the kernels for few rows find their tiles: the sums of a warp, run lane by lane, and the bisection."""

import jax.numpy as jnp
import numpy as np
import pytest
from permute_emulator import Threads
from quantize_emulator import POISON, Memory

from pallas_kernels.grouped_matmul import bounds
from pallas_kernels.grouped_matmul.schedule import num_tiles, read_tile, tile_schedule

SIZES = ([1, 0, 7, 64, 65, 191, 192, 193], [0] * 8, [1000] + [0] * 7, [2000] * 8, [-5, 3, 0, 9], [11], [0, 5] * 60)


def written(sizes, block):
    """The words that a warp writes, by the numpy double of a thread's operations."""
    groups, words = len(sizes), bounds.num_words(len(sizes))
    machine = Threads(1, 128)
    Memory.machine = machine
    out = [np.full(4 * words, POISON, np.uint8) for _ in range(2)]
    source = Memory(np.asarray(sizes, np.int32).view(np.uint8))
    bounds.write_bounds(machine, groups, block, source, *(Memory(o, shared=True) for o in out))
    return [o.view(np.int32)[: groups + 1] for o in out]


@pytest.mark.parametrize("sizes", [*SIZES, [3] * 512, [1, 0, 40] * 341])
@pytest.mark.parametrize("block", [8, 24, 64])
def test_a_warp_adds_up_the_same_bounds_as_xla(sizes, block):
    expected = bounds.make_bounds(jnp.asarray(sizes, jnp.int32), block)
    for actual, wanted in zip(written(sizes, block), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("block", [8, 24, 256])
@pytest.mark.parametrize(("offset", "weights"), [(0, None), (2, 3)])
def test_bisection_finds_the_tiles_of_the_schedule(sizes, block, offset, weights):
    m, groups = 1000, len(sizes)
    weights = groups if weights is None else weights
    device = jnp.asarray(sizes, jnp.int32)
    schedule = tile_schedule(device, num_rows=m, block=block, group_offset=offset, num_weights=weights)
    found = bounds.make_bounds(device, block)
    for zero_tail in (True, False):
        count = int(num_tiles(schedule, m, block, zero_tail=zero_tail))
        assert count == int(bounds.num_tiles(found, groups, m, block, zero_tail=zero_tail))
    for index in range(int(num_tiles(schedule, m, block))):
        weight, top, _, rows = read_tile(schedule, index, block, block)
        how = dict(num_groups=groups, num_rows=m, block=block, num_weights=weights, group_offset=offset)
        mine = bounds.find_tile(found, jnp.int32(index), **how)
        if int(rows) > 0 or int(mine[2]) > 0:
            assert tuple(map(int, mine)) == (int(weight), int(top), int(rows)), index
