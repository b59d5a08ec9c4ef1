"""The plan against plain loops: who gets which token, in which slot, and what capacity loses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_helpers import ROUTINGS, E, routing
from hypothesis import given, settings
from hypothesis import strategies as st

from jmoe.plan import make_plan, merge_weights
from pallas_kernels.permute.slots import _members_before

R, E_LOC, K, T = 4, 3, 4, 7


@functools.cache
def jitted(form, capacity, tokens=T):
    del tokens
    return jax.jit(functools.partial(make_plan, num_ranks=R, num_local=E_LOC, capacity=capacity, form=form))


def oracle(ids, capacity, form):
    """(slots of (token, target) pairs that are sent, tokens by target, assignments lost)."""
    slots, dropped = {}, 0
    used = np.zeros(R if form == "standard" else R * E_LOC, int)
    for t, row in enumerate(ids):
        valid = [int(p) for p in row if 0 <= p < R * E_LOC]
        targets = [p // E_LOC for p in valid] if form == "standard" else valid
        for s in sorted(set(targets)):
            if used[s] < capacity:
                slots[t, s] = used[s]
            else:
                dropped += targets.count(s)
            used[s] += 1
    return slots, np.minimum(used, capacity), dropped


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    name=st.sampled_from(ROUTINGS),
    seed=st.integers(0, 2**20),
    capacity=st.sampled_from((0, 2, T)),
    form=st.sampled_from(("standard", "batched")),
)
def test_F21_F22_F25_plan_agrees_with_plain_loops(name, seed, capacity, form):
    ids = routing(name, np.random.default_rng(seed), 1, tokens=T, num_experts=R * E_LOC, top_k=K)
    plan = jitted(form, capacity)(jnp.asarray(ids))
    slots, counts, dropped = oracle(ids, capacity, form)
    np.testing.assert_array_equal(plan.counts, counts)
    assert int(plan.dropped) == dropped
    src = np.full(plan.src_token.shape, -1)
    for (t, s), slot in slots.items():
        src[s, slot] = t
    np.testing.assert_array_equal(plan.src_token, src)
    for t, row in enumerate(ids):
        if form == "standard":
            want = [slots.get((t, r), -1) for r in range(R)]
        else:
            seen = [int(p) not in row[:k].tolist() for k, p in enumerate(row)]
            want = [slots.get((t, int(p)), -1) if first else -1 for p, first in zip(row, seen, strict=True)]
        np.testing.assert_array_equal(plan.slot[t], want)
        owners = {int(p) // E_LOC for p in row if 0 <= p < R * E_LOC}
        np.testing.assert_array_equal(plan.member[t], [r in owners for r in range(R)])
    if form == "batched" and capacity:
        choice = np.asarray(plan.src_choice)
        for (t, s), slot in slots.items():
            assert ids[t, choice[s, slot]] == s and np.asarray(plan.slot)[t, choice[s, slot]] == slot


def test_F21_a_token_goes_once_to_each_rank_that_holds_one_of_its_experts():
    plan = make_plan(jnp.asarray([[2, 3, 2, 3]], jnp.int32), num_ranks=2, num_local=2, capacity=1)
    np.testing.assert_array_equal(plan.counts, [0, 1])
    np.testing.assert_array_equal(plan.slot, [[-1, 0]])


def test_F22_overflow_is_counted_in_assignments_and_an_exact_fit_passes():
    ids = jnp.asarray([[0, 1], [1, 5], [0, 1]], jnp.int32)  # three tokens to rank 0
    tight = make_plan(ids, num_ranks=2, num_local=3, capacity=2)
    assert int(tight.dropped) == 2 and np.asarray(tight.counts).tolist() == [2, 1]
    exact = make_plan(ids, num_ranks=2, num_local=3, capacity=3)
    assert int(exact.dropped) == 0 and np.asarray(exact.counts).tolist() == [3, 1]


@pytest.mark.parametrize("form", ("standard", "batched", "gathered"))
def test_F27_no_tokens(form):
    plan = make_plan(jnp.zeros((0, K), jnp.int32), num_ranks=R, num_local=E_LOC, capacity=0, form=form)
    assert not np.asarray(plan.counts).any() and int(plan.dropped) == 0
    assert plan.slot.shape[0] == 0 and plan.src_token.size == 0


def test_a_masked_rank_is_sent_nothing_and_its_losses_are_counted():
    ids = jnp.asarray([[0, 4], [5, 11]], jnp.int32)
    for form in ("standard", "batched"):
        plan = make_plan(
            ids, num_ranks=R, num_local=E_LOC, capacity=2, form=form, rank_mask=jnp.asarray([True, False, True, True])
        )
        assert int(plan.dropped) == 2
        assert not np.asarray(plan.counts).reshape(R, -1)[1].any() and int(np.sum(plan.counts)) == 2


def test_equal_experts_of_a_token_share_a_row_and_add_their_weights():
    ids = jnp.asarray([[3, 1, 3, 3], [-1, 2, 2, 9]], jnp.int32)
    plan = make_plan(ids, num_ranks=2, num_local=2, capacity=2, form="batched")
    np.testing.assert_array_equal(plan.merge, [[0, 1, 0, 0], [-1, 1, 1, -1]])
    np.testing.assert_array_equal(plan.slot >= 0, [[True, True, False, False], [False, True, False, False]])
    weights = jnp.asarray([[1.0, 2, 4, 8], [16, 32, 64, 128]])
    np.testing.assert_array_equal(merge_weights(weights, plan), [[13, 2, 0, 0], [0, 96, 0, 0]])


def test_F32_plan_is_the_same_on_every_run_and_slots_follow_token_order():
    ids = jnp.asarray(routing("zipf", np.random.default_rng(1), 1, tokens=T, num_experts=E, top_k=3))
    plans = [jax.tree.map(np.asarray, jitted("standard", T)(ids)) for _ in range(20)]
    for plan in plans[1:]:
        jax.tree.map(np.testing.assert_array_equal, plan, plans[0])
    for column in plans[0].slot.T:
        np.testing.assert_array_equal(column[column >= 0], np.arange((column >= 0).sum()))


def test_plans_that_make_no_sense_are_refused():
    ids = jnp.zeros((4, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"capacity=2 with 4 tokens.*capacity_factor=None"):
        make_plan(ids, num_ranks=2, num_local=2, capacity=2, form="gathered")
    with pytest.raises(ValueError, match=r"form='ragged' is not known.*'batched'"):
        make_plan(ids, num_ranks=2, num_local=2, capacity=2, form="ragged")


@pytest.mark.parametrize("tokens,targets", [(0, 2), (1, 3), (32, 1), (1000, 5), (17000, 2), (530000, 1)])
def test_running_counts_are_those_of_a_cumulative_sum(rng, tokens, targets):
    member = rng.random((tokens, targets)) < 0.6
    before, total = jax.jit(_members_before)(jnp.asarray(member))
    np.testing.assert_array_equal(before, np.cumsum(member, axis=0) - member)
    np.testing.assert_array_equal(total, member.sum(axis=0))
