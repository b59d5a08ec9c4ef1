"""Slots of an exchange for NVIDIA GPUs: which row of each rank's region a token takes. One kernel of one block.

T tokens, K experts per token, R ranks, C slots. Threads take a tile of tokens at a time; the slot of a token at a rank
is what earlier tiles and earlier warps have there plus its rank within the warp. In XLA it takes five small kernels.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from .thread import Pointer, Thread, U, launch

MAX_RANKS = 16  # each costs a thread registers and a warp four reductions
MAX_TOKENS = 8192  # eight tiles, one after another
NOTHING = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class Task:
    """tokens T, top_k K, ranks R with `local` experts each, capacity C."""

    tokens: int
    top_k: int
    ranks: int
    local: int
    capacity: int

    @property
    def threads(self) -> int:
        return min(1024, -(-self.tokens // 128) * 128)


def obstacle(tokens: int, top_k: int, ranks: int) -> str | None:
    """Why the kernel cannot do it, or None."""
    if not 0 < tokens <= MAX_TOKENS or not 0 < top_k <= 32 or not 0 < ranks <= MAX_RANKS:
        return f"it takes 1 to {MAX_TOKENS} tokens and up to 32 experts of each on {MAX_RANKS} ranks"
    return None


def slots(o: Thread, t: Task, refs: dict[str, Pointer]):
    me, warp, lane = o.thread(), o.thread() >> 5, o.lane()
    warps, ranks = t.threads // 32, range(t.ranks)
    table = refs["scratch"]  # members in each warp and rank [warps, R], then the assignments lost
    lost = table.at(None, 0, 4 * warps * t.ranks)
    lost.store([U(0)], me.same(U(0)))

    def tile(i, missed, *before):
        token = i * t.threads + me
        inside = token < U(t.tokens)
        width = 4 if t.top_k % 4 == 0 else 1
        ids = [
            word
            for k in range(0, t.top_k, width)
            for word in refs["ids"].at(token, 4 * t.top_k, 4 * k).load(width, inside)
        ]
        valid = [inside & (e < U(t.ranks * t.local)) for e in ids]  # negative ids are large
        owner = [o.where(v, e // t.local, U(0)) for v, e in zip(valid, ids, strict=True)]
        mine = U(0)
        for v, r in zip(valid, owner, strict=True):
            mine = mine | o.where(v, U(1) << r, U(0))
        members = [o.warp_or(((mine >> r) & 1) << lane) for r in ranks]
        o.barrier()  # the table of the tile before is not needed any more
        for r in ranks:
            table.at(None, 0, (warp * t.ranks + r) * 4).store([o.popcount(members[r])], lane.same(U(0)))
        o.barrier()
        full, after = U(0), []
        for r in ranks:
            of_warps = table.at(None, 0, (lane * t.ranks + r) * 4).load(1, lane < U(warps))[0]
            order = before[r] + o.warp_add(o.where(lane < warp, of_warps, U(0)))
            order = order + o.popcount(members[r] & ((U(1) << lane) - 1))
            member = ((mine >> r) & 1).same(U(1))
            fits = member & (order < U(t.capacity))
            refs["slot"].at(token, 4 * t.ranks, 4 * r).store([o.where(fits, order, U(NOTHING))], inside)
            full = full | o.where(fits, U(0), U(1 << r))
            after.append(before[r] + o.warp_add(of_warps))
        if t.capacity < t.tokens:
            for v, r in zip(valid, owner, strict=True):
                missed = missed + o.where(v, (full >> r) & 1, U(0))
        return missed, *after

    missed, *total = o.loop(-(-t.tokens // t.threads), tile, [U(0)] * (1 + t.ranks))
    o.add_shared(lost, missed, missed > U(0))
    o.barrier()
    refs["dropped"].store(lost.load(1), me.same(U(0)))
    for r in ranks:
        refs["counts"].at(None, 0, 4 * r).store([o.umin(total[r], U(t.capacity))], me.same(U(0)))


@functools.partial(jax.jit, static_argnums=0)
def run_slots(t: Task, ids: jax.Array) -> dict[str, jax.Array]:
    """ids int32 [T, K] -> slot [T, R], counts [R], dropped [1], all int32."""
    sizes = {"slot": (t.tokens, t.ranks), "counts": (t.ranks,), "dropped": (1,)}
    outputs = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in sizes.items()}
    words = t.threads // 32 * t.ranks + 1
    return launch(
        slots, t, {"ids": ids}, outputs, blocks=1, threads=t.threads, scratch_words=words, name="exchange_slots"
    )
