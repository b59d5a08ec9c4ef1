"""Where experts live: logical expert ids, physical slots, and the conventions in which ids leave this library.

E logical experts, R ranks, E_loc physical slots on each rank. Physical slot p = rank * E_loc + local. Routing speaks
of logical experts; everything after it (plan, backends, experts) speaks of physical ids, and the weights of the experts
are kept in physical order [R * E_loc, ...]. An id that is not an expert is -1 everywhere inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Sentinel = Literal["minus_one", "num_experts", "foreign"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placement:
    """Which expert each physical slot holds. A pytree of int32 arrays, so a rebalanced one does not retrace.

    slots: [R, E_loc], the logical expert of each physical slot, -1 where the slot is unused.
    replicas: [E, S], the physical slots that hold each logical expert, ascending, padded with -1.
    num_replicas: [E].
    """

    slots: jax.Array | np.ndarray
    replicas: jax.Array | np.ndarray
    num_replicas: jax.Array | np.ndarray

    @property
    def num_ranks(self) -> int:
        """R."""
        return self.slots.shape[0]

    @property
    def num_local(self) -> int:
        """E_loc, physical slots on one rank."""
        return self.slots.shape[1]

    @property
    def num_physical(self) -> int:
        """P = R * E_loc, physical expert slots of all ranks."""
        return self.slots.shape[0] * self.slots.shape[1]

    @property
    def num_experts(self) -> int:
        """E, logical experts."""
        return self.replicas.shape[0]


def placement_from_slots(slots: Sequence[Sequence[int]] | np.ndarray, num_experts: int) -> Placement:
    """The placement in which physical slot [r, l] holds logical expert slots[r][l] (-1: none). Experts may repeat.

    Raises ValueError where a slot names no expert of 0..num_experts-1, or an expert has no slot at all.
    """
    try:
        table = np.asarray(slots)
    except ValueError:  # numpy's, about an inhomogeneous shape
        lengths = sorted({len(row) for row in slots})
        raise ValueError(f"slots has rows of {lengths} entries; fill the shorter ones up with -1.") from None
    if table.size and not np.issubdtype(table.dtype, np.integer):
        raise ValueError(f"slots holds {table.dtype}; expert ids are integers.")
    table = table.astype(np.int32)
    if table.ndim != 2:
        raise ValueError(f"slots has shape {table.shape}; give one row of expert ids for each rank, [R, E_loc].")
    if table.size and (table.min() < -1 or table.max() >= num_experts):
        raise ValueError(
            f"slots names experts {int(table.min())}..{int(table.max())}; ids lie in 0..{num_experts - 1}, and -1 "
            "marks an unused slot. Check num_experts or the table."
        )
    flat = table.reshape(-1)
    homes = [np.flatnonzero(flat == e) for e in range(num_experts)]
    missing = [e for e, h in enumerate(homes) if not len(h)]
    if missing:
        raise ValueError(
            f"Experts {missing[:8]} have no slot; every one of the {num_experts} experts needs at least one. Add ranks "
            "or slots, or give each expert a place."
        )
    replicas = np.full((num_experts, max(len(h) for h in homes)), -1, np.int32)
    for e, h in enumerate(homes):
        replicas[e, : len(h)] = h
    return Placement(table, replicas, np.array([len(h) for h in homes], np.int32))


def even_placement(num_experts: int, num_ranks: int) -> Placement:
    """Experts in order, as evenly as they go: the first E % R ranks own one more, E_loc = ceil(E / R).

    ValueError unless both numbers are positive.
    """
    if num_experts <= 0 or num_ranks <= 0:
        raise ValueError(f"num_experts={num_experts} and num_ranks={num_ranks} must both be positive.")
    base, extra = divmod(num_experts, num_ranks)
    slots = np.full((num_ranks, base + bool(extra)), -1, np.int32)
    start = 0
    for rank in range(num_ranks):
        size = base + (rank < extra)
        slots[rank, :size] = np.arange(start, start + size)
        start += size
    return placement_from_slots(slots, num_experts)


def to_physical(
    ids: jax.Array,
    placement: Placement,
    *,
    rank_mask: jax.Array | None = None,
    first_token: jax.Array | int = 0,
) -> jax.Array:
    """Physical slots of routed experts.

    Args:
      ids: int32 [T, K] logical ids; anything outside [0, E) means "no expert".
      placement: where experts live. Of several replicas, token t takes number (first_token + t) mod (live replicas).
      rank_mask: bool [R], which ranks are alive. Tokens avoid replicas on the others; an expert with no live replica
        becomes -1 (count those with `num_unreachable`).
      first_token: index of the first of these tokens, so that ranks can start at different replicas.
    Returns:
      int32 [T, K] physical ids, -1 where there is no expert.
    """
    valid = (ids >= 0) & (ids < placement.num_experts)
    safe = jnp.where(valid, ids, 0)
    replicas = jnp.asarray(placement.replicas)
    homes = jnp.take(replicas, safe, axis=0, mode="clip")  # [T, K, S]
    if rank_mask is None and replicas.shape[1] == 1:
        return jnp.where(valid, homes[..., 0], -1)
    live = homes >= 0
    if rank_mask is not None:
        owner = jnp.where(live, homes, 0) // placement.num_local
        live &= jnp.take(rank_mask, owner, axis=0, mode="clip")
    count = jnp.sum(live, axis=-1, dtype=jnp.int32)  # [T, K]
    token = jnp.asarray(first_token, jnp.int32) + jnp.arange(ids.shape[0], dtype=jnp.int32)
    choice = jax.lax.rem(jnp.broadcast_to(token[:, None], count.shape), jnp.maximum(count, 1))
    order = jnp.cumsum(live, axis=-1, dtype=jnp.int32) - 1
    chosen = live & (order == choice[..., None])
    picked = jnp.sum(jnp.where(chosen, homes, 0), axis=-1)
    return jnp.where(valid & (count > 0), picked, -1)


def num_unreachable(ids: jax.Array, physical: jax.Array, placement: Placement) -> jax.Array:
    """int32 []: assignments of `ids` that name a real expert but got no physical slot, its ranks being masked."""
    valid = (ids >= 0) & (ids < placement.num_experts)
    return jnp.sum(valid & (physical < 0), dtype=jnp.int32)


def to_local(physical: jax.Array, rank: jax.Array | int, num_local: int) -> jax.Array:
    """Ids within rank's own slots, -1 for everything that is not there."""
    local = physical - jnp.asarray(rank, jnp.int32) * num_local
    return jnp.where((physical >= 0) & (local >= 0) & (local < num_local), local, -1)


def to_global(local: jax.Array, rank: jax.Array | int, num_local: int) -> jax.Array:
    """Physical ids of a rank's local ids; anything outside [0, E_loc) becomes -1."""
    valid = (local >= 0) & (local < num_local)
    return jnp.where(valid, local + jnp.asarray(rank, jnp.int32) * num_local, -1)


def with_sentinel(
    ids: jax.Array, num_experts: int, convention: Sentinel, *, rank: jax.Array | int = 0, num_local: int = 0
) -> jax.Array:
    """Ids for an outside consumer, with its own mark for "no expert". Every id outside [0, E) counts as that.

    convention: "minus_one" (-1), "num_experts" (E), or "foreign": an expert that this rank does not own, which DeepEP's
    receivers use: E - 1 on the rank whose slots start at 0, and 0 on all others.
    ValueError for another convention.
    """
    if convention == "minus_one":
        mark = jnp.int32(-1)
    elif convention == "num_experts":
        mark = jnp.int32(num_experts)
    elif convention == "foreign":
        mark = jnp.where(jnp.asarray(rank, jnp.int32) * num_local == 0, jnp.int32(num_experts - 1), jnp.int32(0))
    else:
        raise ValueError(f"convention={convention!r} is not known; choose 'minus_one', 'num_experts' or 'foreign'.")
    return jnp.where((ids >= 0) & (ids < num_experts), ids, mark)


def to_physical_order(values: jax.Array, placement: Placement) -> jax.Array:
    """One leaf of the experts' parameters in physical order: [E, ...] -> [R * E_loc, ...], zeros in unused slots.

    ValueError for a leaf without E values in its leading axis.
    """
    if values.shape[:1] != (placement.num_experts,):
        raise ValueError(
            f"A leaf of shape {values.shape} has no leading axis of {placement.num_experts} experts; give values of "
            "all experts, in logical order."
        )
    slots = jnp.asarray(placement.slots).reshape(-1)
    used = (slots >= 0).reshape(-1, *([1] * (values.ndim - 1)))
    rows = jnp.take(values, jnp.maximum(slots, 0), axis=0, mode="clip")
    return jnp.where(used, rows, jnp.zeros((), values.dtype))


def local_slice(values: jax.Array, rank: jax.Array | int, placement: Placement) -> jax.Array:
    """A rank's part of per-expert values in physical order, [R * E_loc, ...] -> [E_loc, ...].

    Raises ValueError for any other length: a scale vector of the wrong length must never be used in part.
    """
    if values.shape[:1] != (placement.num_physical,):
        raise ValueError(
            f"Per-expert values of shape {values.shape} do not match {placement.num_physical} physical experts "
            f"({placement.num_ranks} ranks x {placement.num_local}); give one entry for each (`to_physical_order`)."
        )
    return jax.lax.dynamic_slice_in_dim(values, jnp.asarray(rank, jnp.int32) * placement.num_local, placement.num_local)
