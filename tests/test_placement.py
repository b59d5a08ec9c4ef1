"""Where experts live, and the conventions in which ids leave the library."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmoe.placement import (
    even_placement,
    local_slice,
    num_unreachable,
    placement_from_slots,
    to_global,
    to_local,
    to_physical,
    to_physical_order,
    with_sentinel,
)

ODD_IDS = [[0, 9, -1], [10, 3, 2**31 - 1], [-(2**31), 5, 7]]


def int32(values):
    return jnp.asarray(values, jnp.int32)


def test_F43_experts_that_do_not_divide_are_shared_three_three_two_two():
    placement = even_placement(10, 4)
    np.testing.assert_array_equal(placement.slots, [[0, 1, 2], [3, 4, 5], [6, 7, -1], [8, 9, -1]])
    assert (placement.num_ranks, placement.num_local, placement.num_physical, placement.num_experts) == (4, 3, 12, 10)
    physical = np.asarray(to_physical(int32(np.arange(10)[:, None]), placement))[:, 0]
    np.testing.assert_array_equal(physical // 3, [0, 0, 0, 1, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(placement.slots.reshape(-1)[physical], np.arange(10))


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_every_expert_has_one_slot_and_ranks_differ_by_at_most_one(num_experts, num_ranks):
    slots = even_placement(num_experts, num_ranks).slots
    assert slots.shape == (num_ranks, -(-num_experts // num_ranks))
    np.testing.assert_array_equal(np.sort(slots[slots >= 0]), np.arange(num_experts))
    owned = (slots >= 0).sum(1)
    assert owned.max() - owned.min() <= 1 and (np.diff(owned) <= 0).all()


def test_F25_ids_that_name_no_expert_stay_minus_one():
    physical = np.asarray(to_physical(int32(ODD_IDS), even_placement(10, 4)))
    np.testing.assert_array_equal(physical, [[0, 10, -1], [-1, 3, -1], [-1, 5, 7]])
    assert to_physical(jnp.zeros((0, 3), jnp.int32), even_placement(10, 4)).shape == (0, 3)


def test_replicas_are_taken_in_turn_and_only_from_live_ranks():
    placement = placement_from_slots([[0, 1], [0, 2], [0, 1], [3, -1]], 4)
    np.testing.assert_array_equal(placement.num_replicas, [3, 2, 1, 1])
    ids = int32([[0, 1, 2]] * 6)
    turn = np.asarray(to_physical(ids, placement))
    np.testing.assert_array_equal(turn, [[0, 1, 3], [2, 5, 3], [4, 1, 3], [0, 5, 3], [2, 1, 3], [4, 5, 3]])
    np.testing.assert_array_equal(to_physical(ids[1:], placement, first_token=1), turn[1:])
    mask = jnp.asarray([True, False, True, True])
    masked = to_physical(ids, placement, rank_mask=mask)
    np.testing.assert_array_equal(masked, [[0, 1, -1], [4, 5, -1]] * 3)
    assert int(num_unreachable(ids, masked, placement)) == 6
    nobody = to_physical(ids, placement, rank_mask=jnp.zeros(4, bool))
    np.testing.assert_array_equal(nobody, -1)


def test_a_new_placement_or_mask_does_not_retrace():
    traces = []

    @jax.jit
    def run(ids, placement, mask):
        traces.append(1)
        return to_physical(ids, placement, rank_mask=mask)

    ids = int32([[0, 1]])
    first = run(ids, placement_from_slots([[0, 1], [1, 0]], 2), jnp.asarray([True, True]))
    second = run(ids, placement_from_slots([[1, 0], [0, 1]], 2), jnp.asarray([False, True]))
    assert len(traces) == 1
    np.testing.assert_array_equal(first, [[0, 1]])
    np.testing.assert_array_equal(second, [[2, 3]])


def test_F42_local_and_global_ids_are_inverses_and_foreign_experts_mark_nothing():
    np.testing.assert_array_equal(to_global(int32([0, 1, -1]), 2, 2), [4, 5, -1])
    np.testing.assert_array_equal(to_local(int32([4, 5, -1, 3, 6, 99]), 2, 2), [0, 1, -1, -1, -1, -1])
    np.testing.assert_array_equal(to_global(int32([2, 7]), 2, 2), [-1, -1])
    for rank in range(4):
        local = int32([0, 1, -1])
        np.testing.assert_array_equal(to_local(to_global(local, rank, 2), rank, 2), local)
        foreign = with_sentinel(int32([-1]), 8, "foreign", rank=rank, num_local=2)
        assert int(foreign[0]) == (7 if rank == 0 else 0)


def test_F23_outward_conventions_mark_every_id_that_is_no_expert():
    ids = int32([3, -1, 8, 2**31 - 1])
    np.testing.assert_array_equal(with_sentinel(ids, 8, "minus_one"), [3, -1, -1, -1])
    np.testing.assert_array_equal(with_sentinel(ids, 8, "num_experts"), [3, 8, 8, 8])
    with pytest.raises(ValueError, match=r"'zero' is not known.*'num_experts'"):
        with_sentinel(ids, 8, "zero")


def test_F20_each_rank_takes_its_own_part_of_per_expert_scales_and_no_other_length():
    placement, alphas = even_placement(8, 4), jnp.arange(1.0, 9.0)
    for rank in range(4):
        np.testing.assert_array_equal(local_slice(alphas, rank, placement), alphas[2 * rank : 2 * rank + 2])
    with pytest.raises(ValueError, match=r"\(5,\) do not match 8 physical experts.*to_physical_order"):
        local_slice(jnp.ones(5), 0, placement)


def test_F48_parameters_follow_their_experts():
    placement = placement_from_slots([[2, 0], [1, 0], [2, -1]], 3)
    values = jnp.asarray([[1.0, 2], [3, 4], [5, 6]])
    np.testing.assert_array_equal(
        to_physical_order(values, placement), [[5, 6], [1, 2], [3, 4], [1, 2], [5, 6], [0, 0]]
    )
    np.testing.assert_array_equal(to_physical_order(int32([7, 8, 9]).astype(jnp.uint8), placement), [9, 7, 8, 7, 9, 0])
    with pytest.raises(ValueError, match=r"no leading axis of 3 experts"):
        to_physical_order(values[:2], placement)


def test_placements_that_leave_an_expert_homeless_are_refused():
    with pytest.raises(ValueError, match=r"Experts \[1\] have no slot"):
        placement_from_slots([[0], [2]], 3)
    with pytest.raises(ValueError, match=r"names experts 0..3; ids lie in 0..2"):
        placement_from_slots([[0, 1], [2, 3]], 3)
    with pytest.raises(ValueError, match=r"one row of expert ids for each rank"):
        placement_from_slots([0, 1, 2], 3)
    with pytest.raises(ValueError, match=r"rows of \[1, 2\] entries; fill the shorter ones up with -1"):
        placement_from_slots([[0, 1], [2]], 3)
    with pytest.raises(ValueError, match=r"float64; expert ids are integers"):
        placement_from_slots([[0, 1.5], [2, 0]], 3)
    with pytest.raises(ValueError, match=r"must both be positive"):
        even_placement(0, 4)
