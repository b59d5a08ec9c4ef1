"""Replicated experts: the planner, moving every per-expert leaf, and doing it under a running model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_reference import MODELS, bits, golden
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmoe import rebalance
from jmoe.checkpoint import Checkpoint, load_moe_layer
from jmoe.layer import build_moe, moe
from jmoe.placement import even_placement, placement_from_slots
from jmoe.rebalance import max_replicas, move_experts, plan_placement, rank_loads, with_room


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 24), st.integers(1, 6), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_plans_are_valid_balanced_and_of_one_shape(experts, ranks, spare, seed):
    rng = np.random.default_rng(seed)
    num_local = -(-experts // ranks) + spare
    load = rng.zipf(1.5, experts).clip(max=10**6) * (rng.random(experts) < 0.9)
    plan = plan_placement(load, num_ranks=ranks, num_local=num_local)
    slots = np.asarray(plan.slots)
    assert slots.shape == (ranks, num_local)
    assert plan.replicas.shape == (experts, max_replicas(experts, ranks, num_local))
    for held in slots:
        held = held[held >= 0]
        assert len(set(held)) == len(held)  # never twice on one rank
    counts = np.bincount(slots[slots >= 0], minlength=experts)
    assert (counts >= 1).all() and (counts == np.asarray(plan.num_replicas)).all()
    if (slots < 0).any():
        assert (counts == min(ranks, plan.replicas.shape[1])).all()  # empty only where nothing could be added
    loads = rank_loads(load, plan)
    assert np.isclose(loads.sum(), load.sum())
    share = (load / counts).max() if experts else 0
    assert loads.max() <= load.sum() / ranks + share + 1e-6  # list scheduling's bound
    again = plan_placement(load, num_ranks=ranks, num_local=num_local)
    assert bits(plan) == bits(again)


def test_a_hot_expert_gets_replicas_and_the_ranks_balance():
    load = np.ones(16)
    load[5] = 48  # three quarters of all tokens
    before = rank_loads(load, even_placement(16, 4))
    plan = plan_placement(load, num_ranks=4, num_local=5)
    after = rank_loads(load, plan)
    assert int(plan.num_replicas[5]) == 4
    assert before.max() / before.mean() > 3 and after.max() / after.mean() < 1.02


@pytest.mark.parametrize(
    "load, ranks, slots, match",
    [
        ([1, -1], 1, 2, "non-negative finite count"),
        ([1, np.nan], 1, 2, "non-negative finite count"),
        ([], 1, 2, "non-negative finite count"),
        ([1, 1, 1], 2, 1, "do not hold 3 experts; use num_local >= 2"),
    ],
)
def test_loads_and_sizes_that_make_no_plan(load, ranks, slots, match):
    with pytest.raises(ValueError, match=match):
        plan_placement(load, num_ranks=ranks, num_local=slots)


RANKS, NUM_LOCAL = 4, 5


@pytest.fixture(scope="module")
def model():
    """The NVFP4 model's second block over four ranks with one spare slot each, placed by a first plan."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:RANKS]), ("ep",)), PartitionSpec("ep"))
    first = plan_placement(np.ones(16), num_ranks=RANKS, num_local=NUM_LOCAL)
    with Checkpoint(MODELS / "qwen3_moe_nvfp4_modelopt") as ckpt:
        params = load_moe_layer(
            ckpt, 1, sharding=sharding, placement=first, dtype="float32", static_scales="per_expert"
        )
        config = dataclasses.replace(ckpt.moe_config, dtype="float32")
    layer = build_moe(config, mesh=sharding.mesh, num_local=NUM_LOCAL)
    traces = []

    def forward(params, placement, x):
        traces.append(1)
        return moe(layer, params, x, placement=placement)

    x, y = golden(MODELS / "qwen3_moe_nvfp4_modelopt", 1)
    return jax.jit(forward), params, first, jnp.asarray(x), y, traces


def test_F48_moving_all_leaves_changes_nothing_and_does_not_retrace(model):
    forward, params, first, x, y, traces = model
    before = np.asarray(forward(params, first, x))
    assert np.linalg.norm(before - y) / np.linalg.norm(y) < 0.01
    turned = with_room(placement_from_slots(np.asarray(first.slots)[:, ::-1], 16))  # every slot of a rank elsewhere
    np.testing.assert_array_equal(np.asarray(forward(move_experts(params, first, turned), turned, x)), before)
    rng = np.random.default_rng(3)
    old, current = first, params
    for _ in range(3):
        new = plan_placement(rng.zipf(1.4, 16), num_ranks=RANKS, num_local=NUM_LOCAL)
        assert not np.array_equal(new.slots, old.slots)
        current = move_experts(current, old, new)
        out = np.asarray(forward(current, new, x))  # other ranks: the same sums, in another order
        assert np.linalg.norm(out - before) / np.linalg.norm(before) < 1e-6
        old = new
    assert len(traces) == 1
    shardings = [(a.sharding, b.sharding) for a, b in zip(*map(jax.tree.leaves, (params, current)), strict=True)]
    assert all(a == b for a, b in shardings)
    assert bits(move_experts(current, old, first)) == bits(params)  # and back again


@pytest.mark.parametrize("leaf", ["gate_up.block_scale", "gate_up.global_scale", "down.data", "down.block_scale"])
def test_F48_a_leaf_that_is_left_behind_is_noticed(model, leaf):
    """Mutation: the same move with one leaf forgotten must change the output, or the test above would prove nothing."""
    forward, params, first, x, _, _ = model
    new = plan_placement(np.arange(16)[::-1] + 1, num_ranks=RANKS, num_local=NUM_LOCAL)
    moved = move_experts(params, first, new)
    weight, field = leaf.split(".")
    stale = dataclasses.replace(
        getattr(moved.experts, weight), **{field: getattr(getattr(params.experts, weight), field)}
    )
    broken = dataclasses.replace(moved, experts=dataclasses.replace(moved.experts, **{weight: stale}))
    right, wrong = (np.asarray(forward(p, new, x)) for p in (moved, broken))
    assert np.linalg.norm(wrong - right) / np.linalg.norm(right) > 1e-3


def test_F48_static_scales_and_biases_move_too(model):
    _, params, first, _, _, _ = model
    new = plan_placement(np.arange(16) + 1, num_ranks=RANKS, num_local=NUM_LOCAL)
    moved = move_experts(params, first, new)
    scale = {}
    for p, e in enumerate(np.asarray(first.slots).reshape(-1)):
        scale[int(e)] = float(params.experts.intermediate_scale[p])
    got = np.asarray(moved.experts.intermediate_scale)
    for p, e in enumerate(np.asarray(new.slots).reshape(-1)):
        assert e < 0 or got[p] == np.float32(scale[int(e)])


def test_moves_that_do_not_fit_are_refused(model):
    _, params, first, _, _, _ = model
    with pytest.raises(ValueError, match="4 x 5 and 4 x 4 slots; a running model keeps its number"):
        move_experts(params, first, even_placement(16, 4))
    with pytest.raises(ValueError, match=r"shape \(20, .*not 16 slots first"):
        move_experts(params, even_placement(16, 4), even_placement(16, 4))
    with pytest.raises(ValueError, match="give MoEParams or ExpertWeights"):
        move_experts({}, first, first)
    other = placement_from_slots([[0, 1, 2, 3, 4]] * 4, 5)
    with pytest.raises(ValueError, match="for 16 and 5 experts"):
        move_experts(params, first, other)
    assert with_room(even_placement(4, 2), 3).replicas.shape == (4, 3)
    with pytest.raises(ValueError, match="replicas=1, but an expert has 4"):
        with_room(placement_from_slots([[0, 1]] * 4, 2), 1)


def test_an_expert_that_stays_on_its_rank_is_not_fetched_from_another():
    old = placement_from_slots([[0, 1], [1, 2], [2, 0]], 3)
    new = placement_from_slots([[1, 2], [0, 1], [0, 2]], 3)
    taken = rebalance._sources(old, new)
    np.testing.assert_array_equal(np.asarray(old.slots).reshape(-1)[taken], np.asarray(new.slots).reshape(-1))
    stays = np.array([True, False, False, True, True, True])  # by slots of the new placement
    np.testing.assert_array_equal(taken[stays] // 2, (np.arange(6) // 2)[stays])
