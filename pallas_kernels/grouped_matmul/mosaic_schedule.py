"""`schedule.tile_schedule` as one kernel of one block of threads, in place of XLA's three or four.

G groups, T tiles. One thread for each group adds up rows and tiles, then one for each tile bisects for its group.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ..permute.thread import Pointer, Thread, U, launch

MAX_GROUPS = 1023  # and the rows that belong to none: one thread for each
FIELDS = ("weight", "first", "start", "end", "row_start", "tile_start")


@dataclasses.dataclass(frozen=True)
class Task:
    """rows M, block rows of a tile, weights: groups that have one. offset: whether the first of them is an operand."""

    groups: int
    rows: int
    block: int
    weights: int
    tiles: int
    offset: bool

    @property
    def threads(self) -> int:
        return min(1024, -(-max(self.groups + 1, min(self.tiles, 1024)) // 128) * 128)


def _word(base: Pointer, index) -> Pointer:
    return base.at(None, 0, index * 4)


def _sums(o: Thread, value: U, sums: Pointer, warps: int) -> U:
    """Sum of `value` over all threads before this one."""
    lane, warp = o.lane(), o.thread() >> 5
    upto = value
    for distance in (1, 2, 4, 8, 16):
        upto = upto + o.where(lane >= U(distance), o.shuffle_up(upto, distance), U(0))
    _word(sums, warp).store([upto], lane.same(U(31)))
    o.barrier()
    of_warps = _word(sums, lane).load(1, lane < U(warps))[0]
    return upto - value + o.warp_add(o.where(lane < warp, of_warps, U(0)))


def schedule(o: Thread, t: Task, refs: dict[str, Pointer]):
    me, m, last = o.thread(), U(t.rows), U(t.groups)
    warps = t.threads // 32
    # Shared words: two times the sums of warps [32], then rows and tiles before each group [G + 1].
    sums = refs["scratch"]
    rows = sums.at(None, 0, 4 * 64)
    tiles = rows.at(None, 0, 4 * (t.groups + 1))
    size = _word(refs["group_sizes"], me).load(1, me < last)[0]
    size = o.where(size >= U(0x80000000), U(0), size)
    row_start = _sums(o, size, sums, warps)
    tile_start = _sums(o, (size + (t.block - 1)) // t.block, sums.at(None, 0, 4 * 32), warps)
    here = me < U(t.groups + 1)
    for memory, value, name in ((rows, row_start, "row_start"), (tiles, tile_start, "tile_start")):
        _word(memory, me).store([value], here)
        _word(refs[name], me).store([value], here)
    o.barrier()
    offset = refs["offset"].load(1)[0] if t.offset else U(0)
    bits = t.groups.bit_length()

    def tile(i):
        index = i * t.threads + me
        inside = index < U(t.tiles)
        group = U(0)
        for bit in reversed(range(bits)):
            above = group + (1 << bit)
            start = _word(tiles, o.umin(above, last)).load(1)[0]
            group = o.where((above < U(t.groups + 1)) & (index >= start), above, group)
        tail = group.same(last)
        begin = _word(rows, group).load(1)[0]
        turn = index - _word(tiles, group).load(1)[0]
        end = o.umin(_word(rows, o.umin(group + 1, last)).load(1)[0], m)
        start = o.umin(begin, m)
        weight = group - offset
        weight = o.where((weight < U(t.weights)) & (group < last), weight, U(0xFFFFFFFF))
        unused = tail & (turn >= m)
        values = (weight, start + turn * t.block, start, o.where(tail, m, end))
        for name, value in zip(FIELDS, values, strict=False):
            _word(refs[name], index).store([o.where(unused, U(0), value)], inside)
        return ()

    o.loop(-(-t.tiles // t.threads), tile)


@functools.partial(jax.jit, static_argnums=0)
def run_schedule(t: Task, group_sizes: jax.Array, offset: jax.Array | None) -> tuple[jax.Array, ...]:
    """group_sizes int32 [G], offset int32 [] or None -> the fields of `schedule.Schedule`."""
    operands = {"group_sizes": group_sizes}
    if offset is not None:
        operands["offset"] = offset.reshape(1)
    sizes = (t.tiles,) * 4 + (t.groups + 1,) * 2
    outputs = {name: jax.ShapeDtypeStruct((n,), jnp.int32) for name, n in zip(FIELDS, sizes, strict=True)}
    words = 64 + 2 * (t.groups + 1)
    out = launch(schedule, t, operands, outputs, blocks=1, threads=t.threads, scratch_words=words, name="tile_schedule")
    return tuple(out[name] for name in FIELDS)
