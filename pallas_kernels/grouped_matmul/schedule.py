"""Which rows of which group each tile of a grouped matmul works on, computed on the device.

M rows, sorted by group; G groups. A tile covers at most `block_m` rows of one group and is read as boxes of `box`
rows, so that a kernel can use copies of a fixed size whatever the group sizes are: the last tile of a group does not
reach over the group's end but is moved up until it ends there, and computes some rows twice (with the same operations
in the same order, so both writes carry the same bits). Only groups smaller than one box need row-wise stores.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

#: int32 fields of a tile: weight matrix (-1: write zeros), first row of box 0, first row of the last box, rows.
TILE_FIELDS = 4


def max_tiles(num_rows: int, num_groups: int, block_m: int) -> int:
    """Upper bound on the number of tiles, the tail of rows that belong to no group included."""
    return num_rows // block_m + num_groups + 1


def group_bounds(group_sizes: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """First row and one past the last row of each group, clipped to [0, M]; entry G is the tail that no group owns.

    group_sizes: int32 [G]. Negative sizes count as zero. Returns two int32 [G + 1].
    """
    sizes = jnp.maximum(group_sizes.astype(jnp.int32), 0)
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), jnp.int32(num_rows))
    ends = jnp.concatenate([ends, jnp.full((1,), num_rows, jnp.int32)])
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    return starts, ends


def tile_schedule(
    group_sizes: jax.Array,  # [G]
    *,
    num_rows: int,
    block_m: int,
    box: int,
    group_offset: jax.Array | int | None = None,
    num_weights: int | None = None,
    zero_tail: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Tiles in row order, and how many there are.

    group_offset, num_weights: the weight of group g is g - group_offset; groups without a weight in [0, num_weights)
        give tiles of zeros. Defaults: 0 and G.
    zero_tail: also emit tiles (weight -1) for the rows past the sum of the group sizes.
    Returns (tiles int32 [max_tiles * 4] as TILE_FIELDS says, count int32 [1]).
    """
    num_groups = group_sizes.shape[0]
    num_weights = num_groups if num_weights is None else num_weights
    starts, ends = group_bounds(group_sizes, num_rows)
    per_group = -((starts - ends) // block_m)
    if not zero_tail:
        per_group = per_group.at[num_groups].set(0)
    tile_ends = jnp.cumsum(per_group, dtype=jnp.int32)
    t = jnp.arange(max_tiles(num_rows, num_groups, block_m), dtype=jnp.int32)
    group = jnp.sum(t[:, None] >= tile_ends[None, :], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, num_groups)
    start, end = starts[group], ends[group]
    index = t - (tile_ends - per_group)[group]
    first = jnp.maximum(jnp.minimum(start + index * block_m, end - block_m), start)
    rows = jnp.minimum(end - first, block_m)
    last = jnp.maximum(first, jnp.minimum(first + block_m, end) - box)
    offset = jnp.int32(0) if group_offset is None else jnp.asarray(group_offset, jnp.int32).reshape(())
    weight = group - offset
    weight = jnp.where((weight >= 0) & (weight < num_weights) & (group < num_groups), weight, -1)
    return jnp.stack([weight, first, last, rows], axis=1).reshape(-1), tile_ends[-1:]
