"""The kernel that chooses experts, run thread by thread on the host, against the reference."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import permute_emulator
import pytest

from pallas_kernels.route import Rule, mosaic_sm90, reference


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    permute_emulator.install(monkeypatch, mosaic_sm90)


RULES = {
    "softmax": (128, Rule(8)),
    "softmax, plain and scaled": (64, Rule(4, normalize=False, scaling=16.0)),
    "softmax of the chosen": (32, Rule(4, order="topk_then_softmax")),
    "sigmoid with bias": (64, Rule(6, score="sigmoid")),
    "groups by their best two": (256, Rule(8, score="sigmoid", scaling=2.5, num_groups=8, group_topk=4)),
    "groups by their best": (128, Rule(6, normalize=False, num_groups=4, group_topk=2, group_score="max")),
}


def choose(logits, bias, rule, valid=None):
    logits = jnp.asarray(logits, jnp.float32)
    assert mosaic_sm90.obstacle(*logits.shape, rule) is None
    return mosaic_sm90.run_choose(rule, logits, None if bias is None else jnp.asarray(bias, jnp.float32), valid)


@pytest.mark.parametrize("name", RULES)
def test_kernel_equals_the_reference(name, rng):
    experts, rule = RULES[name]
    logits = rng.normal(size=(37, experts)).astype(np.float32) * 3
    bias = rng.normal(size=experts).astype(np.float32) * 0.3 if rule.score == "sigmoid" else None
    ids, weights = choose(logits, bias, rule)
    expected = reference.select(jnp.asarray(logits), bias if bias is None else jnp.asarray(bias), rule)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_allclose(
        weights, reference.weigh(jnp.asarray(logits), bias if bias is None else jnp.asarray(bias), expected, rule), 1e-6
    )


@pytest.mark.parametrize("name", ["softmax", "softmax of the chosen", "sigmoid with bias"])
def test_ties_go_to_the_lower_id(name, rng):
    experts, rule = RULES[name]
    logits = rng.integers(-1, 2, (20, experts)).astype(np.float32)
    logits[0] = 0
    logits[1, ::2] = -0.0
    ids, _ = choose(logits, None, rule)
    order = np.argsort(-logits, axis=1, kind="stable")[:, : rule.top_k]
    np.testing.assert_array_equal(ids, order)


@pytest.mark.parametrize("name", ["groups by their best two", "groups by their best"])
def test_ties_between_groups_go_to_the_first(name, rng):
    experts, rule = RULES[name]
    logits = np.tile(rng.normal(size=(5, experts // rule.num_groups)), (1, rule.num_groups)).astype(np.float32)
    ids, _ = choose(logits, None, rule)
    np.testing.assert_array_equal(ids, reference.select(jnp.asarray(logits), None, rule))
    assert (np.asarray(ids) < experts // rule.num_groups * rule.group_topk).all()


def test_a_token_with_nan_scores_has_nan_weights_and_no_other_does(rng):
    experts, rule = RULES["softmax"]
    logits = rng.normal(size=(6, experts)).astype(np.float32)
    logits[1, 5], logits[3, 7], logits[4, 9] = np.nan, np.inf, -np.inf
    ids, weights = map(np.asarray, choose(logits, None, rule))
    assert ((ids >= 0) & (ids < experts)).all()
    np.testing.assert_array_equal(np.isnan(weights).all(1), [False, True, False, True, False, False])
    np.testing.assert_array_equal(np.isnan(weights).any(1), np.isnan(weights).all(1))
    assert 9 not in ids[4]


def test_invalid_tokens_go_nowhere_whatever_they_hold(rng):
    experts, rule = RULES["softmax"]
    logits = rng.normal(size=(9, experts)).astype(np.float32)
    valid = np.arange(9) % 3 > 0
    logits[0], logits[3] = np.nan, np.inf
    ids, weights = map(np.asarray, choose(logits, None, rule, jnp.asarray(valid)))
    all_ids, all_weights = map(np.asarray, choose(logits, None, rule))
    np.testing.assert_array_equal(ids, np.where(valid[:, None], all_ids, -1))
    np.testing.assert_array_equal(weights, np.where(valid[:, None], all_weights, 0))


def test_exponentials_are_good_to_two_units_for_every_size_of_logit(rng):
    experts, rule = 32, dataclasses.replace(RULES["softmax"][1], top_k=32, normalize=False)
    logits = np.linspace(0, -80, experts, dtype=np.float32)[None]
    _, weights = choose(logits, None, rule)
    exact = np.exp(logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum()))
    np.testing.assert_allclose(np.asarray(weights, np.float64), exact, rtol=1e-6)


def test_what_the_kernel_cannot_do_is_said():
    assert "multiples of 32" in mosaic_sm90.obstacle(4, 60, Rule(4))
    assert "groups of multiples" in mosaic_sm90.obstacle(4, 128, Rule(4, num_groups=8, group_topk=2))
    assert "32 experts, not 40" in mosaic_sm90.obstacle(4, 128, Rule(40))
