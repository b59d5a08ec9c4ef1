"""Sorting rows by expert without a comparison sort: counts and prefix sums over chunks of the assignments.

Few assignments are ranked directly, each against all others: XLA makes three kernels of that instead of seven, and at
decode the number of kernels is what the sort costs (each about 2 us on an H200).

Letters: N rows, K experts per row, G experts (groups), M = N * K assignments (or fewer, where capped).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import mosaic_sort
from .thread import environment_obstacle, pick

SMALL = 1024  # up to so many assignments are ranked directly
CHUNK = 128  # assignments that are ranked against each other; the chunks' counts are int32 [N * K / 128, G]


class Sorted(NamedTuple):
    """The rows in order of their experts. All int32.

    source: [M] the row each place comes from, -1 past the last assignment. position: [N, K] the place of each
    assignment, -1 where there is none. group_sizes: [G] places of each expert. dropped: [] assignments that found no
    place, 0 unless `num_places` was given.
    """

    source: jax.Array
    position: jax.Array
    group_sizes: jax.Array
    dropped: jax.Array


def sort_by_expert(
    ids: jax.Array, num_groups: int, *, num_places: int | None = None, implementation: str | None = None
) -> Sorted:
    """Orders the assignments ids [N, K] by expert; within an expert by row, then by place in the row.

    ids: int32; anything outside [0, num_groups) is no assignment. An expert may come more than once in a row.
    num_places: the static number M of places, N * K (always enough) unless given; the assignments that come last are
        dropped if there are more, and counted.
    implementation: "mosaic_sm90", "xla" or None for the best that can.
    """
    n, k = ids.shape
    total = n * k
    m = total if num_places is None else min(num_places, total)
    why = environment_obstacle()
    if total == 0 or m == 0 or total >= 1 << 30:
        why = f"it sorts 1 to 2^30 assignments into at least one place, not {total} into {m}"
    elif not 0 < num_groups <= mosaic_sort.MAX_GROUPS:
        why = f"it takes 1 to {mosaic_sort.MAX_GROUPS} groups, not {num_groups}"

    def kernel(ids):
        out = mosaic_sort.run_sort(mosaic_sort.make_task(total, k, num_groups, m), ids.reshape(total))
        return Sorted(out["source"], out["position"].reshape(n, k), out["group_sizes"], out["dropped"].reshape(()))

    def plain(ids):
        return _sort(ids, num_groups, m)

    return pick("sort", implementation, why, kernel, plain, ids.astype(jnp.int32))


def _sort(ids: jax.Array, num_groups: int, m: int) -> Sorted:
    n, k = ids.shape
    total = n * k
    if total <= SMALL:
        return _rank_directly(ids, num_groups, m)
    chunks = -(-total // CHUNK)
    flat = jnp.where((ids >= 0) & (ids < num_groups), ids, -1).astype(jnp.int32).reshape(total)
    flat = jnp.pad(flat, (0, chunks * CHUNK - total), constant_values=-1).reshape(chunks, CHUNK)
    is_group = flat[:, :, None] == jnp.arange(num_groups, dtype=jnp.int32)[None, None, :]
    counts = jnp.sum(is_group, axis=1, dtype=jnp.int32)  # [chunks, G]
    sizes = jnp.sum(counts, axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(sizes) - sizes
    before = (
        starts[None, :] + jnp.cumsum(counts, axis=0) - counts
    )  # [chunks, G] place of a chunk's first of each expert
    earlier = jnp.tril(jnp.ones((CHUNK, CHUNK), bool), -1)[None]
    rank = jnp.sum((flat[:, :, None] == flat[:, None, :]) & earlier, axis=2, dtype=jnp.int32)  # [chunks, CHUNK]
    valid = flat >= 0
    place = jnp.take_along_axis(before, jnp.maximum(flat, 0), axis=1) + rank
    place = jnp.where(valid & (place < m), place, -1).reshape(-1)[:total]
    ends = jnp.minimum(starts + sizes, m)
    row = jnp.arange(total, dtype=jnp.int32) // k if k else jnp.zeros((0,), jnp.int32)
    return Sorted(
        source=scatter_to_places(row, place, m),
        position=place.reshape(n, k),
        group_sizes=ends - jnp.minimum(starts, m),
        dropped=jnp.maximum(jnp.sum(sizes) - m, 0).astype(jnp.int32),
    )


def _rank_directly(ids: jax.Array, num_groups: int, num_places: int) -> Sorted:
    n, k = ids.shape
    valid = (ids >= 0) & (ids < num_groups)
    key = jnp.where(valid, ids, num_groups).astype(jnp.int32).reshape(n * k)  # those that are none come last
    index = jnp.arange(n * k, dtype=jnp.int32)
    before = (key[None, :] < key[:, None]) | ((key[None, :] == key[:, None]) & (index[None, :] < index[:, None]))
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    place = jnp.where(valid.reshape(-1) & (place < num_places), place, -1)
    here = place[None, :] == jnp.arange(num_places, dtype=jnp.int32)[:, None]
    entry = jnp.sum(jnp.where(here, index[None, :] + 1, 0), axis=1, dtype=jnp.int32) - 1
    group = jnp.arange(num_groups, dtype=jnp.int32)[:, None]
    starts = jnp.sum(key[None, :] < group, axis=1, dtype=jnp.int32)
    ends = jnp.sum(key[None, :] <= group, axis=1, dtype=jnp.int32)
    return Sorted(
        source=entry // max(k, 1),  # -1 stays -1
        position=place.reshape(n, k),
        group_sizes=jnp.minimum(ends, num_places) - jnp.minimum(starts, num_places),
        dropped=jnp.maximum(jnp.sum(valid, dtype=jnp.int32) - num_places, 0),
    )


def merge_duplicates(ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same assignments with every expert at most once in a row: its first place has the sum of its weights.

    ids int32 [N, K], weights [N, K]; the other places get id -1 and weight 0. Differentiable in weights.
    """
    k = ids.shape[1]
    same = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]  # [N, K, K]
    repeated = jnp.any(same & jnp.tril(jnp.ones((k, k), bool), -1)[None], axis=2)
    kept = (ids >= 0) & ~repeated
    total = jnp.sum(jnp.where(same & kept[:, :, None], weights[:, None, :], 0), axis=2)
    return jnp.where(repeated, -1, ids), total.astype(weights.dtype)


def scatter_to_places(values: jax.Array, place: jax.Array, num_places: int) -> jax.Array:
    """out[place[i]] = values[i], integers; -1 where nothing lands.

    Places are unique or -1, so the order is immaterial.
    """
    out = jnp.full((num_places,), -1, values.dtype)
    # A negative index would wrap around even with mode="drop": send those past the end instead.
    return out.at[jnp.where(place < 0, num_places, place)].set(values, mode="drop")
