"""Redundant experts: a placement that balances the ranks for a measured load, and moving the weights to it.

Letters: E logical experts, R ranks, E_loc physical slots on a rank, P = R * E_loc, S most replicas of one expert.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from .experts import ExpertWeights
from .params import MoEParams
from .placement import Placement, placement_from_slots

Parameters = TypeVar("Parameters", MoEParams, ExpertWeights)


def max_replicas(num_experts: int, num_ranks: int, num_local: int) -> int:
    """S: the most replicas that an expert can have in such a placement, one on each rank at most."""
    return min(num_ranks, num_ranks * num_local - num_experts + 1)


def with_room(placement: Placement, replicas: int | None = None) -> Placement:
    """The same with `replicas` columns (None: `max_replicas`), so that every placement of its size has its shapes.

    ValueError where an expert has more replicas than that.
    """
    room = replicas or max_replicas(placement.num_experts, placement.num_ranks, placement.num_local)
    table = np.asarray(placement.replicas)
    if room < table.shape[1] and (table[:, room:] >= 0).any():
        raise ValueError(f"replicas={room}, but an expert has {int((table >= 0).sum(1).max())}; leave replicas out.")
    table = np.pad(table, ((0, 0), (0, max(0, room - table.shape[1]))), constant_values=-1)[:, :room]
    return Placement(np.asarray(placement.slots), table, np.asarray(placement.num_replicas))


def _count_replicas(load: np.ndarray, slots: int, most: int) -> np.ndarray:
    """Replicas of each expert: every further slot goes to the expert whose replicas carry most. Ties: lowest id."""
    count = np.ones(len(load), np.int64)
    heap = [(-load[e], e) for e in range(len(load)) if most > 1]
    heapq.heapify(heap)
    for _ in range(slots - len(load)):
        if not heap:
            break  # every expert is on every rank: the remaining slots stay empty
        _, e = heapq.heappop(heap)
        count[e] += 1
        if count[e] < most:
            heapq.heappush(heap, (-load[e] / count[e], e))
    return count


def _pack(share: np.ndarray, count: np.ndarray, num_ranks: int, num_local: int) -> list[list[int]]:
    """Replicas to ranks, heaviest first, each to the least loaded rank that has room and not yet this expert."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    load = np.zeros(num_ranks)
    for e in sorted(range(len(share)), key=lambda e: (-share[e], e)):
        for _ in range(count[e]):
            free = [r for r in range(num_ranks) if len(ranks[r]) < num_local]
            fresh = [r for r in free if e not in ranks[r]]
            if fresh:
                r = min(fresh, key=lambda r: (load[r], r))
            else:  # only ranks that have it have room: move something there from a rank that has not
                r, moved = _make_room(e, ranks, free)
                ranks[free[0]].append(moved)
                ranks[r].remove(moved)
                load[free[0]] += share[moved]
                load[r] -= share[moved]
            ranks[r].append(e)
            load[r] += share[e]
    _refine(ranks, load, share)
    return ranks


def _make_room(e: int, ranks: list[list[int]], free: list[int]) -> tuple[int, int]:
    """(rank without e, an expert on it that the first free rank lacks). There is one: the free rank is not full."""
    there = ranks[free[0]]
    for r, held in enumerate(ranks):
        if e not in held:
            for other in held:
                if other not in there:
                    return r, other
    raise AssertionError("more replicas than ranks")


def _refine(ranks: list[list[int]], load: np.ndarray, share: np.ndarray, rounds: int = 256) -> None:
    """Swaps a pair of experts between the busiest rank and another one while that lowers the busiest of the two."""
    for _ in range(rounds):
        top = int(np.argmax(load))
        best = None
        for r in range(len(ranks)):
            if r == top:
                continue
            for a in ranks[top]:
                if a in ranks[r]:
                    continue
                for b in ranks[r]:
                    if b in ranks[top]:
                        continue
                    gain = share[a] - share[b]
                    peak = max(load[top] - gain, load[r] + gain)
                    if peak < load[top] * (1 - 1e-9) and (best is None or peak < best[0]):
                        best = (peak, r, a, b, gain)
        if best is None:
            return
        _, r, a, b, gain = best
        ranks[top][ranks[top].index(a)], ranks[r][ranks[r].index(b)] = b, a
        load[top] -= gain
        load[r] += gain


def plan_placement(tokens_per_expert: ArrayLike, *, num_ranks: int, num_local: int) -> Placement:
    """A placement with replicas that balances the ranks for a measured load (as EPLB does).

    Args:
      tokens_per_expert: [E], non-negative counts; their sum over layers or a window of steps, as the user likes.
      num_ranks, num_local: R ranks with E_loc physical slots each, R * E_loc >= E.
    Returns a Placement whose shapes depend on E, R and E_loc only, so that applying it does not retrace. Deterministic.
      A rank holds an expert at most once. Slots are left empty (-1) only where every expert is on every rank.
    Raises ValueError for loads that are negative or not finite, and for too few slots.
    """
    load = np.asarray(tokens_per_expert, np.float64)
    if load.ndim != 1 or not len(load) or not np.isfinite(load).all() or (load < 0).any():
        raise ValueError(
            f"tokens_per_expert of shape {load.shape} must be one non-negative finite count for each expert; pass the "
            "layer's statistics, or ones."
        )
    experts, slots = len(load), num_ranks * num_local
    if num_ranks < 1 or slots < experts:
        raise ValueError(
            f"{num_ranks} ranks x {num_local} slots do not hold {experts} experts; use num_local >= "
            f"{-(-experts // max(num_ranks, 1))}."
        )
    load = np.where(load > 0, load, min(1e-3, load[load > 0].min(initial=1.0) * 1e-3))  # spread idle experts, too
    count = _count_replicas(load, slots, min(num_ranks, slots - experts + 1))
    ranks = _pack(load / count, count, num_ranks, num_local)
    table = np.full((num_ranks, num_local), -1, np.int32)
    for r, held in enumerate(ranks):
        table[r, : len(held)] = sorted(held)
    return with_room(placement_from_slots(table, experts))


def rank_loads(tokens_per_expert: ArrayLike, placement: Placement) -> np.ndarray:
    """Tokens on each rank [R] if every expert's tokens are spread evenly over its replicas."""
    slots = np.asarray(placement.slots)
    share = np.asarray(tokens_per_expert, np.float64) / np.asarray(placement.num_replicas)
    return np.where(slots >= 0, share[np.maximum(slots, 0)], 0).sum(axis=1)


def _sources(old: Placement, new: Placement) -> np.ndarray:
    """For each new slot, an old slot that holds the same expert: on the same rank if there is one, else the first."""
    if old.num_experts != new.num_experts:
        raise ValueError(f"The placements are for {old.num_experts} and {new.num_experts} experts; they must agree.")
    held = np.asarray(old.replicas)
    flat = np.asarray(new.slots).reshape(-1)
    out = np.zeros(len(flat), np.int32)
    for p, e in enumerate(flat):
        if e >= 0:
            homes = held[e][held[e] >= 0]
            same = homes[homes // old.num_local == p // new.num_local]
            out[p] = same[0] if len(same) else homes[0]
    return out


@functools.cache
def _mover(sharding, donate: bool):
    def take(leaf, index):
        return jnp.take(leaf, index, axis=0, mode="clip")

    return jax.jit(take, out_shardings=sharding, donate_argnums=(0,) if donate else ())


def move_experts(params: Parameters, old: Placement, new: Placement, *, donate: bool = False) -> Parameters:
    """Expert weights in the physical order of `old`, in that of `new`: every per-expert leaf, scales and biases too.

    params: MoEParams or ExpertWeights; of the first, only the experts change. Shapes and shardings stay, so that a
    model compiled for them is not traced again; one compiled program serves every rebalancing. Leaves go one after the
    other: each is gathered from all ranks, and `donate` frees the old one then (nothing may use it any more).
    ValueError if a leaf's leading axis is not the old placement's number of slots, or the placements differ in size.
    """
    if isinstance(params, MoEParams):
        return dataclasses.replace(params, experts=move_experts(params.experts, old, new, donate=donate))
    if not isinstance(params, ExpertWeights):
        raise ValueError(f"params is a {type(params).__name__}; give MoEParams or ExpertWeights.")
    if old.num_physical != new.num_physical or old.num_ranks != new.num_ranks:
        raise ValueError(
            f"The placements have {old.num_ranks} x {old.num_local} and {new.num_ranks} x {new.num_local} slots; a "
            "running model keeps its number of slots. Load the weights with the new placement instead."
        )
    index = jnp.asarray(_sources(old, new))

    def move(path, leaf):
        if leaf.ndim == 0:
            return leaf  # one number for all experts
        if leaf.shape[0] != old.num_physical:
            raise ValueError(
                f"experts{jax.tree_util.keystr(path)} has shape {leaf.shape}, not {old.num_physical} slots first; "
                "bring it into the old placement's order (jmoe.placement.to_physical_order)."
            )
        where = leaf.sharding if isinstance(leaf.sharding, jax.sharding.NamedSharding) else None
        return jax.block_until_ready(_mover(where, donate)(leaf, index))

    return jax.tree_util.tree_map_with_path(move, params)
