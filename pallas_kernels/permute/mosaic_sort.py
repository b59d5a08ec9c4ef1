"""Sorting by expert for NVIDIA GPUs: one kernel where a block of threads can do it alone, else one that counts and one
that places.

A = N * K assignments, G experts. A block takes a run of assignments; within it, tiles of one assignment per thread. The
place of an assignment is: where its expert starts, plus what earlier blocks, earlier tiles and earlier warps have of
that expert, plus its rank within the warp. Only counts are added up by atomics, so the order does not depend on timing.

The same in XLA is a dozen small kernels.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from .thread import Pointer, Thread, U, launch

MAX_GROUPS = 1024  # one thread for each
ONE_BLOCK = 4096  # assignments up to which a second kernel costs more than it saves
MAX_BLOCKS = 128  # each reads the counts of all


@dataclasses.dataclass(frozen=True)
class Task:
    """total: A. top_k: K. places: M, places that exist. run: assignments of a block, a multiple of `threads`."""

    total: int
    top_k: int
    groups: int
    places: int
    threads: int
    run: int

    @property
    def blocks(self) -> int:
        return -(-self.total // self.run)

    @property
    def warps(self) -> int:
        return self.threads // 32


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def make_task(total: int, top_k: int, groups: int, places: int) -> Task:
    threads = min(1024, _up(max(min(total, 1024), groups), 128))
    run = _up(total, threads) if total <= ONE_BLOCK else _up(-(-total // MAX_BLOCKS), threads)
    return Task(total, top_k, groups, places, threads, run)


def _word(base: Pointer, index) -> Pointer:
    return base.at(None, 0, index * 4)


def _id(o: Thread, t: Task, ids: Pointer, index: U):
    """(id, whether it is one)."""
    inside = index < U(t.total)
    value = ids.at(index, 4).load(1, inside)[0]
    return value, inside & (value < U(t.groups))  # negative ids are large


def _histogram(o: Thread, t: Task, ids: Pointer, counts: Pointer):
    """counts[g] = assignments of this block's run to g, in shared memory."""
    me = o.thread()
    _word(counts, me).store([U(0)], me < U(t.groups))
    o.barrier()

    def tile(i):
        value, valid = _id(o, t, ids, o.block() * t.run + i * t.threads + me)
        o.add_shared(_word(counts, o.where(valid, value, U(0))), U(1), valid)
        return ()

    o.loop(t.run // t.threads, tile)
    o.barrier()


def count(o: Thread, t: Task, refs: dict[str, Pointer]):
    """Writes counts [blocks, G]."""
    _histogram(o, t, refs["ids"], refs["scratch"])
    me = o.thread()
    mine = me < U(t.groups)
    value = _word(refs["scratch"], me).load(1, mine)
    refs["counts"].at(o.block() * t.groups + me, 4).store(value, mine)


def place(o: Thread, t: Task, refs: dict[str, Pointer]):
    """Writes source [M], position [A], group_sizes [G] and dropped [1]; without "counts" one block does it all."""
    me, warp, lane = o.thread(), o.thread() >> 5, o.lane()
    here = me < U(t.groups)
    # Shared words: the place of each expert's next assignment [G], sums of warps [32], counts of warps [warps, G].
    following = refs["scratch"]
    sums = following.at(None, 0, 4 * t.groups)
    table = sums.at(None, 0, 4 * 32)

    if "counts" in refs:

        def add(i, total, before):
            value = refs["counts"].at(i * t.groups + me, 4).load(1, here)[0]
            return total + value, before + o.where(i < o.block(), value, U(0))

        total, before = o.loop(t.blocks, add, (U(0), U(0)))
    else:
        _histogram(o, t, refs["ids"], following)
        total, before = _word(following, me).load(1, here)[0], U(0)
        o.barrier()

    upto = total  # sum of the totals up to this thread's, within the warp
    for distance in (1, 2, 4, 8, 16):
        upto = upto + o.where(lane >= U(distance), o.shuffle_up(upto, distance), U(0))
    _word(sums, warp).store([upto], lane.same(U(31)))
    o.barrier()
    of_warps = _word(sums, lane).load(1, lane < U(t.warps))[0]
    start = upto - total + o.warp_add(o.where(lane < warp, of_warps, U(0)))
    everything = o.warp_add(of_warps)
    _word(following, me).store([start + before], here)
    m = U(t.places)
    first = o.block().same(U(0))
    size = o.umin(start + total, m) - o.umin(start, m)
    _word(refs["group_sizes"], me).store([size], here & first)
    used = o.umin(everything, m)
    refs["dropped"].store([everything - used], first & me.same(U(0)))

    def tile(i):
        o.barrier()  # the table of the tile before is not needed any more
        for j in range(-(-t.warps * t.groups // t.threads)):
            word = me + j * t.threads
            _word(table, word).store([U(0)], word < U(t.warps * t.groups))
        o.barrier()
        index = o.block() * t.run + i * t.threads + me
        value, valid = _id(o, t, refs["ids"], index)
        safe = o.where(valid, value, U(0))
        same = o.match(o.where(valid, value, U(0xFFFFFFFF)))
        rank = o.popcount(same & ((U(1) << lane) - 1))
        cell = _word(table, warp * t.groups + safe)
        cell.store([o.popcount(same)], valid & rank.same(U(0)))
        o.barrier()
        run = _word(following, me).load(1, here)[0]
        for w in range(t.warps):
            at = _word(table, me + w * t.groups)
            of_warp = at.load(1, here)[0]
            at.store([run], here)
            run = run + of_warp
        _word(following, me).store([run], here)
        o.barrier()
        at = cell.load(1, valid)[0] + rank
        placed = valid & (at < m)
        refs["position"].at(index, 4).store([o.where(placed, at, U(0xFFFFFFFF))], index < U(t.total))
        refs["source"].at(o.where(placed, at, U(0)), 4).store([index // t.top_k], placed)
        return ()

    o.loop(t.run // t.threads, tile)
    step = t.blocks * t.threads

    def rest(i):
        index = i * step + o.block() * t.threads + me
        refs["source"].at(index, 4).store([U(0xFFFFFFFF)], (index >= used) & (index < m))
        return ()

    o.loop(-(-t.places // step), rest)


@functools.partial(jax.jit, static_argnums=0)
def run_sort(t: Task, ids: jax.Array) -> dict[str, jax.Array]:
    """ids int32 [A] -> source [M], position [A], group_sizes [G], dropped [1]; A > 0, 0 < G <= MAX_GROUPS."""
    operands = {"ids": ids}
    if t.blocks > 1:
        out = {"counts": jax.ShapeDtypeStruct((t.blocks, t.groups), jnp.int32)}
        operands |= launch(
            count, t, operands, out, blocks=t.blocks, threads=t.threads, scratch_words=t.groups, name="sort_count"
        )
    sizes = {"source": t.places, "position": t.total, "group_sizes": t.groups, "dropped": 1}
    outputs = {name: jax.ShapeDtypeStruct((n,), jnp.int32) for name, n in sizes.items()}
    words = t.groups + 32 + t.warps * t.groups
    return launch(
        place, t, operands, outputs, blocks=t.blocks, threads=t.threads, scratch_words=words, name="sort_place"
    )
