"""The router against formulas written out in numpy, token by token."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe import router
from jmoe.config import RouterConfig

T, E, K = 37, 16, 4


def best(values, k):
    """Indices of the k largest, ties to the lower index."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def reference(logits, config, top_k, correction_bias=None):
    """One token at a time, float64."""
    ids, weights = [], []
    for row in np.asarray(logits, np.float64):
        if config.order == "topk_then_softmax":
            chosen = best(row, top_k)
            w = np.exp(row[chosen] - row[chosen].max())
            w = w / w.sum()
        else:
            scores = 1 / (1 + np.exp(-row)) if config.score == "sigmoid" else np.exp(row) / np.exp(row).sum()
            selection = scores + (0 if correction_bias is None else np.asarray(correction_bias, np.float64))
            eligible = range(len(row))
            if config.num_groups:
                size = len(row) // config.num_groups
                groups = [selection[g * size : (g + 1) * size] for g in range(config.num_groups)]
                depth = 2 if config.group_score == "top2sum" else 1
                strength = [sum(sorted(g)[-depth:]) for g in groups]
                kept = set(best(strength, config.group_topk))
                eligible = [e for e in eligible if e // size in kept]
            chosen = sorted(eligible, key=lambda e: (-selection[e], e))[:top_k]
            w = scores[chosen]
            if config.normalize:
                w = w / (w.sum() + 1e-20)
        ids.append(chosen)
        weights.append(w * config.scaling)
    return np.array(ids), np.array(weights)


def deepseek(**changes):
    kind = dict(score="sigmoid", scaling=2.5, num_groups=4, group_topk=2, use_correction_bias=True)
    return RouterConfig(**(kind | changes))


CONFIGS = {
    "softmax_normalised": RouterConfig(),  # Qwen3-MoE, Mixtral
    "softmax_plain_scaled": RouterConfig(normalize=False, scaling=16.0),
    "topk_then_softmax": RouterConfig(order="topk_then_softmax", use_bias=True),  # gpt-oss
    "sigmoid": RouterConfig(score="sigmoid"),
    "groups_by_maximum": RouterConfig(normalize=False, num_groups=8, group_topk=3, group_score="max"),  # DeepSeek-V2
    "noaux_tc": deepseek(),  # DeepSeek-V3
    "correction_bias_without_groups": RouterConfig(score="sigmoid", use_correction_bias=True),
}


@functools.partial(jax.jit, static_argnames=("config", "top_k"))
def route(logits, config, top_k, correction_bias=None, valid=None):
    return router.route(logits, config, top_k=top_k, correction_bias=correction_bias, valid=valid)


statistics = jax.jit(router.router_stats, static_argnames="config")


@pytest.mark.parametrize("name", CONFIGS)
def test_ids_and_weights_are_those_of_the_formulas(name, rng):
    config = CONFIGS[name]
    logits = rng.normal(size=(T, E)).astype(np.float32) * 2
    bias = rng.normal(size=E).astype(np.float32) * 0.3 if config.use_correction_bias else None
    got = route(logits, config, K, bias)
    ids, weights = reference(logits, config, K, bias)
    assert got.ids.dtype == jnp.int32 and got.weights.dtype == jnp.float32
    np.testing.assert_array_equal(got.ids, ids)
    np.testing.assert_allclose(got.weights, weights, rtol=2e-6)


def test_the_correction_bias_selects_and_does_not_weigh():
    logits = jnp.array([[2.0, 1.0, 0.0, -1.0]])
    bias = jnp.array([0.0, 0.0, 0.0, 1.0])  # lifts expert 3 above all others
    got = route(logits, RouterConfig(score="sigmoid", normalize=False, use_correction_bias=True), 2, bias)
    assert got.ids.tolist() == [[3, 0]]
    np.testing.assert_allclose(got.weights, jax.nn.sigmoid(jnp.array([[-1.0, 2.0]])), rtol=1e-6)


def test_experts_outside_the_best_groups_are_never_chosen_even_when_eligible_scores_are_negative():
    # With zeros instead of -Inf for ineligible experts, those would win against eligible ones with a negative bias.
    logits = jnp.zeros((1, 8))
    bias = jnp.array([-2.0, -2.0, -3.0, -3.0, -9.0, -9.0, -9.0, -9.0])
    config = deepseek(num_groups=4, group_topk=2)
    assert route(logits, config, 4, bias).ids.tolist() == [[0, 1, 2, 3]]


def test_ties_go_to_the_lower_expert():
    for config in (RouterConfig(), RouterConfig(order="topk_then_softmax"), RouterConfig(score="sigmoid")):
        assert route(jnp.zeros((3, E)), config, K).ids.tolist() == [[0, 1, 2, 3]] * 3
    signed = jnp.array([[-0.0, 0.0, -0.0, 0.0]])
    assert route(signed, RouterConfig(order="topk_then_softmax"), 2).ids.tolist() == [[0, 1]]
    saturated = jnp.full((1, E), 60.0).at[0, 0].set(50.0)  # both have sigmoid 1 in float32
    assert route(saturated, RouterConfig(score="sigmoid"), 2).ids.tolist() == [[0, 1]]
    assert route(jnp.zeros((1, E)), deepseek(), K, jnp.zeros(E)).ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("name", CONFIGS)
def test_ill_formed_logits_stay_in_range_and_make_only_their_own_token_nan(name, rng):
    config = CONFIGS[name]
    clean = rng.normal(size=(T, E)).astype(np.float32)
    bias = jnp.zeros(E) if config.use_correction_bias else None
    logits = clean.copy()
    logits[1, 5] = np.nan
    logits[3] = np.nan
    logits[5] = -np.inf
    logits[7, 2] = np.inf
    logits[9, 2] = -np.inf
    logits[11, :] = np.inf
    got = jax.tree.map(np.asarray, route(logits, config, K, bias))
    assert ((got.ids >= 0) & (got.ids < E)).all()
    assert all(len(set(row)) == K for row in got.ids.tolist())
    assert np.isnan(got.weights[[1, 3]]).all()
    if config.score == "softmax":  # no finite distribution exists
        assert np.isnan(got.weights[[5, 7, 11]]).all()
    else:
        assert np.isfinite(got.weights).sum() == got.weights.size - 2 * K
    assert 2 not in got.ids[9] or got.weights[9][got.ids[9] == 2] == 0
    others = np.setdiff1d(np.arange(T), [1, 3, 5, 7, 9, 11])
    expected = route(clean, config, K, bias)
    np.testing.assert_array_equal(got.ids[others], expected.ids[others])
    np.testing.assert_array_equal(got.weights[others], expected.weights[others])


def test_a_nan_correction_bias_is_seen_in_every_output():
    got = route(jnp.zeros((2, 4)), deepseek(num_groups=None, group_topk=None), 2, jnp.zeros(4).at[3].set(jnp.nan))
    assert np.isnan(got.weights).all() and (got.ids >= 0).all()


def test_invalid_tokens_have_no_expert_no_weight_and_no_gradient(rng):
    logits = rng.normal(size=(T, E)).astype(np.float32)
    valid = rng.random(T) < 0.5
    poisoned = np.where(valid[:, None], logits, np.nan)
    got = route(poisoned, RouterConfig(), K, valid=valid)
    whole = route(logits, RouterConfig(), K)
    np.testing.assert_array_equal(got.ids, np.where(valid[:, None], whole.ids, -1))
    np.testing.assert_array_equal(got.weights, np.where(valid[:, None], whole.weights, 0))

    def loss(v):
        stats = statistics(v, route(v, RouterConfig(), K, valid=valid).ids, RouterConfig(), valid=valid)
        weights = route(v, RouterConfig(), K, valid=valid).weights
        return (weights**2).sum() + router.load_balance_loss(stats) + router.z_loss(stats)

    gradient = jax.jit(jax.grad(loss))(poisoned)
    assert np.isfinite(gradient).all() and not gradient[~valid].any() and gradient[valid].any(axis=1).all()


def test_no_tokens_is_an_ordinary_case():
    got = route(jnp.zeros((0, E)), deepseek(), K, jnp.zeros(E))
    chex.assert_shape([got.ids, got.weights], (0, K))
    stats = statistics(jnp.zeros((0, E)), got.ids, deepseek())
    assert router.load_balance_loss(stats) == 0 and router.z_loss(stats) == 0


@pytest.mark.parametrize("name", ["softmax_normalised", "topk_then_softmax", "noaux_tc"])
def test_weights_differentiate_like_the_formula_with_fixed_ids(name, rng):
    config = CONFIGS[name]
    logits = jnp.asarray(rng.normal(size=(3, E)), jnp.float32)
    bias = jnp.zeros(E) if config.use_correction_bias else None
    cotangent = jnp.asarray(rng.normal(size=(3, K)), jnp.float32)
    ids = np.asarray(route(logits, config, K, bias).ids)

    def formula(v):
        scores = jnp.take_along_axis(v, ids, axis=-1)
        if config.score == "sigmoid":
            chosen = 1 / (1 + jnp.exp(-scores))
        else:
            chosen = jnp.exp(scores)  # normalising over the chosen cancels the softmax's denominator
        return (chosen / chosen.sum(-1, keepdims=True) * config.scaling * cotangent).sum()

    got = jax.grad(lambda v: (route(v, config, K, bias).weights * cotangent).sum())(logits)
    np.testing.assert_allclose(got, jax.grad(formula)(logits), rtol=1e-4, atol=1e-6)


def test_bfloat16_logits_are_scored_in_float32(rng):
    logits = jnp.asarray(rng.normal(size=(T, E)), jnp.bfloat16)
    got, wide = route(logits, RouterConfig(), K), route(logits.astype(jnp.float32), RouterConfig(), K)
    chex.assert_trees_all_equal(got, wide)


def test_router_logits_are_a_float32_product_with_bias(rng):
    x, w, b = rng.normal(size=(T, 24)), rng.normal(size=(E, 24)), rng.normal(size=E)
    got = router.router_logits(*(jnp.asarray(a, jnp.float32) for a in (x, w, b)))
    np.testing.assert_allclose(got, x @ w.T + b, rtol=1e-5, atol=1e-5)
    half = router.router_logits(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16))
    assert half.dtype == jnp.float32


def test_tokens_per_expert_counts_every_assignment_and_no_sentinel(rng):
    ids = rng.integers(-2, E + 2, size=(T, K)).astype(np.int32)
    expected = [(ids == e).sum() for e in range(E)]
    assert router.tokens_per_expert(jnp.asarray(ids), E).tolist() == expected


def test_the_losses_are_those_of_the_papers(rng):
    logits = rng.normal(size=(T, E)).astype(np.float32)
    for config in (RouterConfig(), RouterConfig(score="sigmoid")):
        ids = np.asarray(route(logits, config, K).ids)
        stats = statistics(jnp.asarray(logits), jnp.asarray(ids), config)
        wide = logits.astype(np.float64)
        score = np.exp(wide) if config.score == "softmax" else 1 / (1 + np.exp(-wide))
        p = (score / score.sum(1, keepdims=True)).mean(0)
        f = np.array([(ids == e).mean() for e in range(E)])
        np.testing.assert_allclose(router.load_balance_loss(stats), E * (f * p).sum(), rtol=1e-5)
        np.testing.assert_allclose(router.z_loss(stats), (np.log(np.exp(wide).sum(1)) ** 2).mean(), rtol=1e-5)


def test_the_balance_loss_is_one_when_balanced_and_e_when_collapsed():
    balanced = statistics(jnp.zeros((E, E)), jnp.arange(E, dtype=jnp.int32)[:, None], RouterConfig())
    np.testing.assert_allclose(router.load_balance_loss(balanced), 1.0, rtol=1e-6)
    collapsed = statistics(jnp.zeros((E, E)).at[:, 3].set(100.0), jnp.full((E, 1), 3, jnp.int32), RouterConfig())
    np.testing.assert_allclose(router.load_balance_loss(collapsed), float(E), rtol=1e-6)


def test_statistics_of_shards_add_up_to_those_of_the_whole(rng):
    logits = jnp.asarray(rng.normal(size=(32, E)), jnp.float32)
    valid = jnp.asarray(rng.random(32) < 0.7)
    config = RouterConfig()

    @jax.jit
    def stats(v, m):
        return router.router_stats(v, route(v, config, K, valid=m).ids, config, valid=m)

    parts = [stats(logits[i : i + 8], valid[i : i + 8]) for i in range(0, 32, 8)]
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *parts)
    chex.assert_trees_all_close(total, stats(logits, valid), rtol=1e-5)
    here = np.flatnonzero(valid)
    chex.assert_trees_all_close(total, stats(logits[here], valid[here]), rtol=1e-5)  # the others do not count
    summary = router.summarize(total, jnp.int32(3))
    assert summary.tokens_per_expert.sum() == K * valid.sum() and summary.dropped == 3


def test_what_does_not_fit_is_refused_with_what_would():
    z, cfg = jnp.zeros((5, 8)), RouterConfig()
    with pytest.raises(ValueError, match=r"float32\[2, 5, 8\]; route\(\) takes floating point \[tokens, experts\]"):
        router.route(jnp.zeros((2, 5, 8)), cfg, top_k=2)
    with pytest.raises(ValueError, match="int32"):
        router.route(jnp.zeros((5, 8), jnp.int32), cfg, top_k=2)
    with pytest.raises(ValueError, match=r"top_k=9 of 8 experts: choose 1\.\.8"):
        router.route(z, cfg, top_k=9)
    with pytest.raises(ValueError, match="8 experts do not form 3 equal groups"):
        router.route(z, RouterConfig(num_groups=3, group_topk=1), top_k=2)
    with pytest.raises(ValueError, match="correction_bias is missing, and the router's use_correction_bias is True"):
        router.route(z, deepseek(), top_k=2)
    with pytest.raises(ValueError, match="correction_bias was given, and the router's use_correction_bias is False"):
        router.route(z, cfg, top_k=2, correction_bias=jnp.zeros(8))
    with pytest.raises(ValueError, match=r"shape \(7,\); it must be \(8,\)"):
        router.route(z, deepseek(), top_k=2, correction_bias=jnp.zeros(7))
    with pytest.raises(ValueError, match=r"valid is bool\[4\]; it must be bool\[5\]"):
        router.route(z, cfg, top_k=2, valid=jnp.ones(4, bool))
