"""Tiles of the Hopper kernels for many rows: which of them a block has, and how they are stored.

A kernel finds its tiles by itself (tiles.py). Rows are stored in boxes of 64, single rows only where a group has fewer,
and slabs transposed.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .tiles import MAX_GROUPS, Tiles, make_tiles, write_tiles

BOX = 64  # rows of x that are copied together
CONSUMERS = 2  # multiplying warpgroups
SLAB_STEP = 16


def tables(group_sizes: jax.Array, block: int, slab: int, interpret) -> tuple[Any, Any]:
    """(operand, scratch) of a kernel that finds its tiles by `tiles_of`: the sizes, or where it cannot add them up
    itself, the tables that XLA has made."""
    groups = group_sizes.shape[0]
    if interpret or groups > MAX_GROUPS:
        return make_tiles(group_sizes, block, slab), plgpu.SMEM((8,), jnp.int32)
    return group_sizes.astype(jnp.int32), plgpu.SMEM((3, groups + 1), jnp.int32)


def table_bytes(groups: int) -> int:
    """Shared memory for `tables`, and 1 KB for barriers."""
    return pl.cdiv(12 * (min(groups, MAX_GROUPS) + 1), 1024) * 1024 + 1024


def offset_of(group_offset: jax.Array | None) -> jax.Array:
    """A group's offset, 0 for None, as kernels take it."""
    return jnp.zeros((1,), jnp.int32) if group_offset is None else jnp.asarray(group_offset, jnp.int32).reshape(1)


def tiles_of(sizes, scratch, block: int, slab: int) -> Tiles:
    """The tables of a kernel's tiles, from its operand and scratch; by all threads of a block together."""
    if isinstance(sizes, Tiles):
        return sizes
    from ..permute.thread import Pointer, Thread

    words = scratch.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def write(ctx, sizes, scratch):
        del ctx
        start = Pointer(scratch, shared=True)
        rows = [start.at(None, 0, 4 * words * i) for i in range(3)]
        write_tiles(Thread(), words - 1, block, slab, Pointer(sizes), rows)

    write(sizes, scratch)  # pyright: ignore[reportCallIssue]
    return Tiles(*(scratch.at[i] for i in range(3)))


def nth_tile(i):
    """Index of a block's i-th tile. Every second round goes backwards: rounds of unequal tiles even out."""
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    return i * blocks + jnp.where(lax.rem(i, 2) == 1, blocks - 1 - block, block)


def tiles_of_block(count):
    """How many of `count` tiles a block has."""
    rounds = lax.div(count, lax.axis_size("block"))
    return rounds + jnp.where(nth_tile(rounds) < count, 1, 0)


def walk(index, num_m, num_n: int, band: int):
    """Tile coordinates (along M, along N) of the index-th tile: bands of `band` columns, snaking along M."""
    if band in (0, num_n) or num_n % band:
        return index // num_n, lax.rem(index, num_n)
    per_band = num_m * band
    which = lax.div(index, per_band)
    within = lax.rem(index, per_band)
    m = lax.div(within, band)
    m = jnp.where(lax.rem(which, 2) == 1, num_m - 1 - m, m)
    return m, which * band + lax.rem(within, band)


def where_inside(column, size: int, tile: int):
    """As pl.when(column < size), for tiles of `tile` columns.

    Pallas leaves an axis of length 1 out of a copy, and with it the copy engine's check: where N is 64, columns past it
    would be stored as the first.
    """
    return pl.when(column < size) if size % tile else lambda store: store()


def stores_under_way(chunk: int, out_slots: int, size: int, tile: int) -> int:
    """How many stores may be under way when the slot of a tile's chunk-th is overwritten; slots take turns.

    Zero for the first, because the last tile may have ended with the same slot, and where `where_inside` leaves stores
    out.
    """
    return 0 if size % tile else min(chunk, out_slots - 1)


def store_box(value, first_row, columns, out_gmem, write_view, box_view):
    """Stores value [64, C] at out[first_row:, columns]."""
    write_view[...] = value
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(box_view, out_gmem.at[pl.ds(first_row, BOX), columns])


def store_rows(value, first_row, rows, columns, out_gmem, write_view, box_view, row_view):
    """Stores value [64, C] at out[first_row:, columns]: a whole box, or row by row where the group has fewer rows."""

    @pl.when(rows >= BOX)
    def _():
        store_box(value, first_row, columns, out_gmem, write_view, box_view)

    @pl.when((rows < BOX) & (rows > 0))
    def _():
        row_view[...] = value
        plgpu.commit_smem()

        def one(i, _):
            plgpu.copy_smem_to_gmem(row_view.at[pl.ds(i, 1)], out_gmem.at[pl.ds(first_row + i, 1), columns])
            return ()

        lax.fori_loop(0, rows, one, ())


def held_by(slab_rows, held: int):
    """Whether a slab of so many rows is one of those that are rounded up to `held`."""
    return (slab_rows > held - SLAB_STEP) & (slab_rows <= held)


def store_slab(value, first_row, rows, columns, out_gmem, write_view, box_view, row_view):
    """Stores value [64, C] transposed at out[first_row:, columns]: all C rows of `out`, or if given the first `rows`.

    What is beyond whole runs of 8 rows goes row by row.
    """
    count = value.shape[1]

    def write(view, value):
        value = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
        view.at[pl.ds(0, value.shape[1])].T[...] = value
        plgpu.commit_smem()

    def copy(source, start, size, row):
        target = out_gmem.at[pl.ds(first_row + row, size), columns]
        plgpu.copy_smem_to_gmem(source.at[pl.ds(start, size)], target)

    write(write_view, value)
    if rows is None:
        copy(box_view, 0, count, 0)
        return
    for start in range(0, count, 8):
        pl.when(rows >= start + 8)(functools.partial(copy, box_view, start, 8, start))
    left = lax.rem(rows, 8)

    @pl.when((left > 0) & (rows > 0))
    def _():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the whole runs are read from the same bytes
        last = count - min(count, SLAB_STEP)
        write(row_view, value[:, last:])

        def one(i, _):
            row = rows - left + i
            copy(row_view, row - last, 1, row)
            return ()

        lax.fori_loop(0, left, one, ())


def columns_halve(width: int) -> bool:
    """Whether the warpgroups can take half the columns each, in the chunks of 64 that are stored."""
    return width % (CONSUMERS * 64) == 0


def shares(boxes: int, wg, width: int) -> list[tuple[Any, Any, int]]:
    """(box, first column, columns) of what a multiplying warpgroup does of a tile of `boxes` boxes x `width` columns.

    Where an odd box cannot be halved in chunks of 64 columns, the second warpgroup gets a box that is not there.
    """
    whole, odd = divmod(boxes, CONSUMERS)
    if odd and not columns_halve(width):
        whole, odd = whole + 1, 0
    half = width // CONSUMERS
    return [(wg * whole + i, 0, width) for i in range(whole)] + [(boxes - 1, wg * half, half)] * odd
