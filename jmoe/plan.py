"""Who gets which token, and in which slot: computed from the ids alone, the same on every run.

T tokens on this rank, K experts per token, R ranks, E_loc physical experts on one rank, C slots reserved for each pair
of source and target. A target is a rank (standard) or a physical expert (batched). Slots are prefix sums over the
tokens: no atomics, no sort, no floating point.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.permute import member_slots, rank_slots

Form = Literal["standard", "gathered", "batched"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """One rank's sending plan. S targets: S = R, or S = R * E_loc in the batched form.

    member: bool [T, R], the token has an expert on that rank (a token goes once to each such rank).
    slot: int32 [T, R] or (batched) [T, K], the row in the target's region, -1 where nothing is sent. Of several equal
        ids in one token's top-k the batched form sends the first only; `merge` says where the others' weights go.
    counts: int32 [S], rows sent to each target.
    src_token: int32 [S, C], the token in each slot, -1 where empty.
    dropped: int32 [], assignments (token, k) that capacity, or a masked rank, lost.
    alive: bool [R], ranks that take part.
    target: batched: int32 [T, K], the physical expert of each assignment, -1 for none. Else None.
    merge: batched: int32 [T, K], the first k of this token with the same expert, -1 for none. Else None.
    src_choice: batched: int32 [S, C], the k of the token in each slot, -1 where empty. Else None.
    received: int32 [R], rows that come here from each source, where a backend needs them to move rows. Else None.
    hosts: the same exchange in two steps, where it goes from host to host first. Else None.
    """

    member: jax.Array
    slot: jax.Array
    counts: jax.Array
    src_token: jax.Array
    dropped: jax.Array
    alive: jax.Array
    target: jax.Array | None
    merge: jax.Array | None
    src_choice: jax.Array | None
    form: Form = dataclasses.field(metadata={"static": True})
    received: jax.Array | None = None
    hosts: TwoLevel | None = None

    @property
    def num_tokens(self) -> int:
        """T, tokens on this rank."""
        return self.member.shape[0]

    @property
    def capacity(self) -> int:
        """C, slots reserved for each pair of source and target."""
        return self.src_token.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TwoLevel:
    """A plan in two steps, for R = H * L ranks on H hosts, rank r being number r % L of host r // L.

    between: standard plan of this rank's tokens, its targets the H hosts: a token crosses once to each host that holds
        one of its experts, to the rank there that has this rank's number.
    inside: batched plan of the H * C_h rows that arrive so, its targets the L ranks of this host. To it, a target of
        the whole exchange and the host that a row came from are one "expert" (target * H + host), which makes the
        rows land where the whole exchange wants them: row (e * L + number) * C + slot.
    """

    between: Plan
    inside: Plan


def make_plan(
    ids: jax.Array,
    *,
    num_ranks: int,
    num_local: int,
    capacity: int,
    form: Form = "standard",
    rank_mask: jax.Array | None = None,
) -> Plan:
    """The plan for this rank's tokens.

    Args:
      ids: int32 [T, K] physical ids; anything outside [0, R * E_loc) is no expert and is never sent.
      capacity: C. Rows beyond it are not sent and their assignments are counted in `dropped`; C = T never drops.
      form: "standard" one row per (token, rank); "batched" one row per (token, expert); "gathered" every rank gets all
        rows in token order (all-gather), which needs C = T.
      rank_mask: bool [R], ranks that are alive; nothing is sent to the others.
    Raises ValueError for another form, and for a gathered plan with C != T.
    """
    if form == "gathered" and capacity != ids.shape[0]:
        raise ValueError(
            f"capacity={capacity} with {ids.shape[0]} tokens: an all-gather moves every row, so its capacity is the "
            "number of tokens. Set capacity_factor=None, or use another backend."
        )
    num_physical = num_ranks * num_local
    alive = jnp.ones((num_ranks,), bool) if rank_mask is None else rank_mask.astype(bool)
    valid = (ids >= 0) & (ids < num_physical)  # [T, K]
    safe = jnp.where(valid, ids, 0)
    owner = safe // num_local
    usable = valid & jnp.take(alive, owner, axis=0, mode="clip")
    ranks = jnp.arange(num_ranks, dtype=jnp.int32).reshape(1, 1, -1)
    member = jnp.any(usable[..., None] & (owner[..., None] == ranks), axis=1)  # [T, R]
    if form == "batched":
        return _batched(ids, valid, usable, member, alive, num_physical, capacity)
    tokens = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    if form == "gathered":
        slot = jnp.broadcast_to(tokens, member.shape)
        src_token = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32)[None, :], (num_ranks, capacity))
        counts = jnp.full((num_ranks,), capacity, jnp.int32)
        dropped = jnp.sum(valid & ~usable, dtype=jnp.int32)
        return Plan(member, slot, counts, src_token, dropped, alive, None, None, None, "gathered")
    if form != "standard":
        raise ValueError(f"form={form!r} is not known; choose 'standard', 'batched' or 'gathered'.")
    usable_ids = ids if rank_mask is None else jnp.where(usable, ids, -1)
    slot, counts, dropped = rank_slots(usable_ids, num_ranks=num_ranks, num_local=num_local, capacity=capacity)
    if rank_mask is not None:
        dropped = dropped + jnp.sum(valid & ~usable, dtype=jnp.int32)
    src_token = _invert(slot, ranks[0], tokens, num_ranks, capacity)
    return Plan(member, slot, counts, src_token, dropped, alive, None, None, None, "standard")


def _invert(slot: jax.Array, target: jax.Array, value: jax.Array, num_targets: int, capacity: int) -> jax.Array:
    """Table [S, C] with `value` at (target, slot), -1 elsewhere. Every index is written at most once."""
    flat = jnp.where(slot >= 0, target * capacity + slot, num_targets * capacity)  # past the end: dropped
    table = jnp.full((num_targets * capacity,), -1, jnp.int32)
    value = jnp.broadcast_to(value, slot.shape)
    return table.at[flat.reshape(-1)].set(value.reshape(-1), mode="drop").reshape(num_targets, capacity)


def _batched(ids, valid, usable, member, alive, num_physical: int, capacity: int) -> Plan:
    """One row per (token, expert); equal ids within a token share it."""
    num_tokens, top_k = ids.shape
    choice = jnp.arange(top_k, dtype=jnp.int32).reshape(1, -1)
    same = usable[:, :, None] & usable[:, None, :] & (ids[:, :, None] == ids[:, None, :])  # [T, K, K]
    merge = jnp.where(usable, jnp.argmax(same, axis=2).astype(jnp.int32), -1)  # the first k with this expert
    first = merge == choice
    target = jnp.where(usable, ids, -1)
    experts = jnp.arange(num_physical, dtype=jnp.int32).reshape(1, 1, -1)
    wants = jnp.any(target[..., None] == experts, axis=1)  # [T, S]
    table, counts = member_slots(wants, capacity)
    slot = jnp.take_along_axis(table, jnp.maximum(target, 0), axis=1)  # [T, K]
    dropped = jnp.sum(valid & ~(usable & (slot >= 0)), dtype=jnp.int32)
    slot = jnp.where(first & usable, slot, -1)
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    src_token = _invert(slot, target, tokens, num_physical, capacity)
    src_choice = _invert(slot, target, choice, num_physical, capacity)
    return Plan(member, slot, counts, src_token, dropped, alive, target, merge, src_choice, "batched")


def merge_weights(weights: jax.Array, plan: Plan) -> jax.Array:
    """Weights [T, K] of the rows that a batched plan sends: equal experts of one token added up in order of k."""
    assert plan.merge is not None
    choice = jnp.arange(weights.shape[1], dtype=jnp.int32).reshape(1, -1)
    total = jnp.zeros_like(weights)
    for k in range(weights.shape[1]):
        total = total + jnp.where(plan.merge[:, k : k + 1] == choice, weights[:, k : k + 1], 0)
    return total


def host_capacity(tokens: int, *, targets: int, capacity: int) -> int:
    """C_h, rows for each pair of source rank and host that never overflow: `targets` of a host take C rows each."""
    return min(tokens, targets * capacity)


def plan_between_hosts(plan: Plan, *, num_hosts: int, capacity: int) -> tuple[Plan, jax.Array]:
    """The first step of a plan (see `TwoLevel`), and what the hosts must know to take the second.

    Args:
      plan: standard or batched, of R ranks. num_hosts: H, a divisor of R. capacity: C_h of `host_capacity`.
    Returns:
      (plan with hosts as targets, int32 [H, C_h * J + targets of one host]: for each host the places of its rows,
      local target * C + slot or -1, J to a row, then the number of rows for each local target).
    """
    num_ranks = plan.member.shape[1]
    targets = plan.counts.shape[0] // num_hosts  # of one host
    columns = jnp.arange(num_ranks, dtype=jnp.int32)[None, :]
    target = jnp.broadcast_to(columns, plan.slot.shape) if plan.target is None else plan.target
    sent = plan.slot >= 0
    host = jnp.where(sent, target // targets, -1)  # [T, R or K]
    hosts = jnp.arange(num_hosts, dtype=jnp.int32)[None, :]
    member = jnp.any(host[..., None] == hosts[:, None, :], axis=1)  # [T, H]
    slot, counts = member_slots(member, capacity)
    tokens = jnp.arange(plan.num_tokens, dtype=jnp.int32)[:, None]
    src_token = _invert(slot, hosts, tokens, num_hosts, capacity)
    alive = jnp.ones((num_hosts,), bool)
    first = Plan(member, slot, counts, src_token, jnp.zeros((), jnp.int32), alive, None, None, None, "standard")

    place = jnp.where(sent, target % targets * plan.capacity + plan.slot, -1)
    if plan.target is None:  # a host's ranks are neighbours: L columns are enough
        of_host = place.reshape(plan.num_tokens, num_hosts, num_ranks // num_hosts).swapaxes(0, 1)  # [H, T, L]
    else:
        of_host = jnp.where(host[None] == hosts.T[..., None], place[None], -1)  # [H, T, K]
    if plan.num_tokens:
        of_host = jnp.take_along_axis(of_host, jnp.maximum(src_token, 0)[..., None], axis=1)  # [H, C_h, J]
        of_host = jnp.where(src_token[..., None] >= 0, of_host, -1)
    return first, jnp.concatenate([of_host.reshape(num_hosts, -1), plan.counts.reshape(num_hosts, -1)], axis=1)


def plan_inside_host(message: jax.Array, *, num_ranks: int, num_targets: int, capacity: int, rows: int) -> Plan:
    """The second step of a plan (see `TwoLevel`).

    Args:
      message: int32 [H, ...], row h what `plan_between_hosts` made at the rank of host h with this rank's number.
      num_ranks: L. num_targets: targets of one host. capacity: C. rows: C_h, from each host.
    """
    num_hosts = message.shape[0]
    places, counts = message[:, :-num_targets], message[:, -num_targets:]  # [H, C_h * J], [H, targets]
    # With no rows at all J cannot be read off; it has no meaning then.
    places = places.reshape(num_hosts, rows, -1) if rows else jnp.zeros((num_hosts, 0, num_ranks), jnp.int32)
    source = jnp.arange(num_hosts, dtype=jnp.int32).reshape(-1, 1, 1)
    sent, size = places >= 0, max(capacity, 1)
    flat = lambda a: jnp.where(sent, a, -1).reshape(num_hosts * rows, places.shape[2])  # noqa: E731
    target, slot = flat(places // size * num_hosts + source), flat(places % size)
    choice = jnp.broadcast_to(jnp.arange(places.shape[2], dtype=jnp.int32), slot.shape)
    row = jnp.arange(slot.shape[0], dtype=jnp.int32)[:, None]
    slots = num_targets * num_hosts
    ranks = jnp.arange(num_ranks, dtype=jnp.int32).reshape(1, 1, -1)
    return Plan(
        member=jnp.any((target // (slots // num_ranks))[..., None] == ranks, axis=1),
        slot=slot,
        counts=counts.T.reshape(-1),
        src_token=_invert(slot, target, row, slots, capacity),
        dropped=jnp.zeros((), jnp.int32),
        alive=jnp.ones((num_ranks,), bool),
        target=target,
        merge=jnp.where(slot >= 0, choice, -1),
        src_choice=_invert(slot, target, choice, slots, capacity),
        form="batched",
    )
