"""Experts in float: against a dense formula, with gradients, sentinels and both forms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import MoEConfig, QuantConfig
from jmoe.experts import (
    EXPERTS,
    ExpertWeights,
    apply_batched_experts,
    apply_experts,
    gated_activation,
    get_experts,
    shared_expert,
)
from pallas_kernels.grouped_matmul import api, portable, row_groups
from pallas_kernels.permute import sort_by_expert
from pallas_kernels.quantize import dequantize, quantize_weights

D, F, E, K, N = 64, 48, 5, 3, 40


def make_config(**changes) -> MoEConfig:
    return MoEConfig(**(dict(hidden_size=D, intermediate_size=F, num_experts=E, num_experts_per_tok=K) | changes))


CONFIG = make_config(dtype="float32")
apply = jax.jit(apply_experts, static_argnames=("config", "experts", "quantize_input", "implementation"))
batched = jax.jit(apply_batched_experts, static_argnames=("config", "quantize_input", "implementation"))


def make_params(rng, dtype=jnp.float32, bias=False, e=E, d=D, f=F) -> ExpertWeights:
    def normal(*shape, scale=1.0):
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    return ExpertWeights(
        normal(e, 2, f, d, scale=d**-0.5),
        normal(e, d, f, scale=f**-0.5),
        normal(e, 2, f) if bias else None,
        normal(e, d) if bias else None,
    )


def make_rows(rng, dtype=jnp.float32, n=N, k=K, low=-1, high=E + 1):
    return (
        jnp.asarray(rng.normal(size=(n, D)), dtype),
        jnp.asarray(rng.integers(low, high, (n, k)), jnp.int32),
        jnp.asarray(rng.uniform(0.1, 1, (n, k)), jnp.float32),
    )


def dense(x, ids, weights, params, config):
    """Every row through every expert, in float32."""
    params = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    hidden = jnp.einsum("nd,ehfd->nehf", x.astype(jnp.float32), params.gate_up)
    if params.gate_up_bias is not None:
        hidden = hidden + params.gate_up_bias[None]
    hidden = gated_activation(hidden[:, :, 0], hidden[:, :, 1], config)
    y = jnp.einsum("nef,edf->ned", hidden, params.down)
    if params.down_bias is not None:
        y = y + params.down_bias[None]
    chosen = ids[:, :, None] == jnp.arange(y.shape[1])[None, None]
    return jnp.einsum("ne,ned->nd", jnp.sum(jnp.where(chosen, weights[:, :, None], 0.0), axis=1), y)


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


def finite(tree):
    return all(np.isfinite(np.asarray(a, np.float32)).all() for a in jax.tree.leaves(tree))


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_output_and_every_gradient_equal_the_dense_formula(rng, activation):
    config = make_config(dtype="float32", activation=activation, use_bias=True)
    params = make_params(rng, bias=True)
    x, ids, weights = make_rows(rng)
    x = x * 4  # gpt-oss's clamp acts

    def run(function):
        def loss(x, weights, params):
            y = function(x, ids, weights, params, config)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(x, weights, params)

    (_, y), grads = run(apply_experts)
    (_, expected), expected_grads = run(dense)
    assert y.dtype == jnp.float32 and relative(y, expected) < 2e-6
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert relative(a, b) < 1e-5


def test_activations_are_the_published_formulas(rng):
    from math import erf, exp, tanh

    gate, up = rng.normal(size=64) * 6, rng.normal(size=64) * 6
    sigmoid = np.vectorize(lambda v: 1 / (1 + exp(-v)))
    clipped = np.minimum(gate, 7.0)
    expected = {
        "silu": gate * sigmoid(gate) * up,
        "gelu": gate * 0.5 * (1 + np.vectorize(erf)(gate / 2**0.5)) * up,
        "gelu_tanh": gate * 0.5 * (1 + np.vectorize(tanh)((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up,
        "swiglu_oai": clipped * sigmoid(1.702 * clipped) * (np.clip(up, -7, 7) + 1),
    }
    for name, value in expected.items():
        out = gated_activation(jnp.asarray(gate), jnp.asarray(up), make_config(activation=name))
        np.testing.assert_allclose(out, value, rtol=3e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 8e-3), ("float16", 1e-3)])
def test_half_precision_stays_within_its_rounding(rng, dtype, bound):
    params, (x, ids, weights) = make_params(rng, dtype), make_rows(rng, dtype)
    y = apply(x, ids, weights, params, make_config(dtype=dtype))
    assert y.dtype == jnp.float32 and bound / 40 < relative(y, dense(x, ids, weights, params, CONFIG)) < bound


def test_ids_of_other_ranks_and_sentinels_are_ignored_whatever_their_rows_hold_F23_F24_F25(rng):
    params, (x, ids, weights) = make_params(rng), make_rows(rng, low=0, high=E)
    ids = ids.at[:, 1].set(jnp.asarray(rng.choice([-1, E, E + 7, -9, 2**31 - 1], N), jnp.int32)).at[::4].set(-1)
    ids = jnp.where(ids == E - 1, 0, ids)  # nobody comes to the last expert: its weights are not read
    dead = (ids < 0) | (ids >= E)
    params = dataclasses.replace(params, gate_up=params.gate_up.at[E - 1].set(jnp.nan))
    dirty_x = x.at[::4].set(jnp.nan)
    dirty_weights = jnp.where(dead, jnp.nan, weights)

    def loss(x, weights, params):
        y = apply_experts(x, ids, weights, params, CONFIG)
        return jnp.sum(jnp.square(y)), y

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    (_, y), (dx, dweights, dparams) = run(dirty_x, dirty_weights, params)
    (_, clean), _ = run(x, weights, params)
    np.testing.assert_array_equal(y, clean)
    assert finite((y, dx, dweights, dparams)) and not np.any(y[::4]) and not np.any(dx[::4])
    assert not np.any(dparams.gate_up[E - 1]) and not np.any(dparams.down[E - 1])
    assert not np.any(np.where(dead, dweights, 0))
    expected = dense(x, ids, weights, jax.tree.map(jnp.nan_to_num, params), CONFIG)
    assert relative(y, expected) < 2e-6


def test_no_rows_or_no_valid_rows_give_zeros_and_zero_gradients_F27(rng):
    params = make_params(rng)
    empty = apply(jnp.zeros((0, D)), jnp.zeros((0, K), jnp.int32), jnp.zeros((0, K)), params, CONFIG)
    assert empty.shape == (0, D)
    x, ids, weights = make_rows(rng)

    def loss(params, x):
        return jnp.sum(apply_experts(x, jnp.full_like(ids, -1), weights, params, CONFIG))

    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x * jnp.nan)
    assert value == 0 and not any(np.any(g) for g in jax.tree.leaves(grads))


def identity_like(rng):
    """Experts whose output is a fixed linear map of the input: gelu(large gate) is the gate itself, up is a copy."""
    gate_up = jnp.zeros((E, 2, F, D)).at[:, 0, :, 0].set(1000.0).at[:, 1, :, :].set(jnp.eye(F, D)[None])
    return ExpertWeights(gate_up, jnp.broadcast_to(jnp.eye(D, F)[None] / 1000, (E, D, F)))


def test_routing_weights_are_applied_exactly_once_F29(rng):
    config = make_config(dtype="float32", activation="gelu", num_experts_per_tok=2)
    x, ids, _ = make_rows(rng, k=2, low=0, high=E)
    x = x.at[:, 0].set(1.0).at[:, F:].set(0.0)
    out = apply(x, ids, jnp.full((N, 2), jnp.asarray([[0.25, 0.75]])), identity_like(rng), config)
    np.testing.assert_allclose(out, x, atol=1e-6)
    twice = apply(x, ids, jnp.full((N, 2), jnp.asarray([[0.5, 1.5]])), identity_like(rng), config)
    np.testing.assert_allclose(twice, 2 * out, atol=1e-6)


def test_weights_on_the_input_equal_weights_on_the_output_for_linear_experts_F31(rng):
    x, ids, weights = make_rows(rng, k=1, low=0, high=E)
    x = x.at[:, 0].set(1.0).at[:, F:].set(0.0)
    on_output = make_config(dtype="float32", activation="gelu", num_experts_per_tok=1)
    on_input = dataclasses.replace(on_output, apply_router_weight_on_input=True)
    params = identity_like(rng)
    # The map is gate * up, of degree two in the input: weighting both inputs by sqrt(w) is weighting the output by w.
    a = apply(x, ids, weights, params, on_output)
    b = apply(x, ids, jnp.sqrt(weights), params, on_input)
    np.testing.assert_allclose(a, b, atol=1e-6)
    nonlinear = make_params(rng)
    direct = dense(x * weights, ids, jnp.ones_like(weights), nonlinear, on_output)
    assert relative(apply(x, ids, weights, nonlinear, on_input), direct) < 2e-6
    with pytest.raises(ValueError, match=r"num_experts_per_tok=1"):
        make_config(num_experts_per_tok=2, apply_router_weight_on_input=True)


def test_twenty_runs_are_bitwise_equal_and_reordering_rows_reorders_outputs_F32(rng):
    params, (x, ids, weights) = make_params(rng, "bfloat16"), make_rows(rng, "bfloat16")
    config = make_config()
    first = apply(x, ids, weights, params, config)
    for _ in range(20):
        np.testing.assert_array_equal(first, apply(x, ids, weights, params, config))
    shuffle = rng.permutation(N)
    np.testing.assert_array_equal(first[shuffle], apply(x[shuffle], ids[shuffle], weights[shuffle], params, config))
    jaxpr = jax.make_jaxpr(jax.grad(lambda x, p: apply_experts(x, ids, weights, p, config).sum(), (0, 1)))(x, params)
    assert "scatter-add" not in str(jaxpr)


def test_unpadded_columns_equal_the_unpadded_layer_F17(rng):
    small = make_params(rng, d=D - 16)
    padded = ExpertWeights(
        jnp.pad(small.gate_up, ((0, 0), (0, 0), (0, 0), (0, 16))), jnp.pad(small.down, ((0, 0), (0, 16), (0, 0)))
    )
    x, ids, weights = make_rows(rng)
    config = make_config(dtype="float32", hidden_size_unpadded=D - 16)
    out = apply(x, ids, weights, padded, config)
    assert out.shape == (N, D - 16)
    expected = apply(x[:, : D - 16], ids, weights, small, make_config(dtype="float32", hidden_size=D - 16))
    np.testing.assert_allclose(out, expected, atol=1e-6)
    shared = shared_expert(x, padded.gate_up[0], padded.down[0], config)
    assert shared.shape == (N, D - 16)


def test_duplicates_of_an_expert_in_a_row_count_each_time_also_with_more_ids_than_experts(rng):
    x, _, weights = make_rows(rng, k=4)
    params = make_params(rng, e=2)
    ids = jnp.asarray(rng.integers(-1, 3, (N, 4)), jnp.int32)
    config = make_config(dtype="float32", num_experts_per_tok=4)
    grad = jax.jit(jax.value_and_grad(lambda w: jnp.sum(jnp.sin(apply_experts(x, ids, w, params, config)))))
    expected = jax.jit(jax.value_and_grad(lambda w: jnp.sum(jnp.sin(dense(x, ids, w, params, config)))))
    for a, b in zip(grad(weights), expected(weights), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_an_order_with_fewer_places_drops_the_last_assignments_only_F22(rng):
    params, (x, ids, weights) = make_params(rng), make_rows(rng, low=0, high=E)
    order = sort_by_expert(ids, E, num_places=100)
    assert order.dropped == N * K - 100
    out = apply(x, ids, weights, params, CONFIG, order=order)
    expected = dense(x, jnp.where(order.position >= 0, ids, -1), weights, params, CONFIG)
    assert relative(out, expected) < 2e-6


def test_the_batched_form_equals_the_standard_form_and_reads_no_padding_F45(rng):
    slots = 9
    params = make_params(rng, "bfloat16", bias=True)
    config = make_config(use_bias=True, num_experts_per_tok=1)
    counts = jnp.asarray([9, 0, 1, 5, 8], jnp.int32)
    valid = jnp.arange(slots)[None, :] < counts[:, None]
    x = jnp.asarray(rng.normal(size=(E, slots, D)), "bfloat16")
    dirty = jnp.where(valid[:, :, None], x, jnp.nan)
    ids = jnp.where(valid, jnp.arange(E, dtype=jnp.int32)[:, None], -1).reshape(-1, 1)

    def batched_form(x, params):
        out = apply_batched_experts(x, valid, params, config)
        return jnp.sum(jnp.square(out)), out

    def standard_form(x, params):
        out = apply_experts(x.reshape(-1, D), ids, jnp.ones((E * slots, 1)), params, config)
        return jnp.sum(jnp.square(out)), out.reshape(E, slots, D)

    def run(function, x):
        return jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True))(x, params)

    (_, out), grads = run(batched_form, dirty)
    (_, standard), standard_grads = run(standard_form, x)
    assert out.dtype == jnp.float32 and out.shape == (E, slots, D) and not np.any(np.asarray(out)[~np.asarray(valid)])
    np.testing.assert_array_equal(out, standard)
    assert finite(grads) and not np.any(np.asarray(grads[0])[~np.asarray(valid)])
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(standard_grads), strict=True):
        np.testing.assert_array_equal(a, b)


def test_batched_weights_on_the_input_F31(rng):
    config = make_config(dtype="float32", num_experts_per_tok=1, apply_router_weight_on_input=True)
    params = make_params(rng)
    x = jnp.asarray(rng.normal(size=(E, 4, D)), jnp.float32)
    weights = jnp.asarray(rng.uniform(size=(E, 4)), jnp.float32)
    valid = jnp.ones((E, 4), bool)
    out = batched(x, valid, params, config, weights=weights)
    plain = dataclasses.replace(config, apply_router_weight_on_input=False)
    np.testing.assert_allclose(out, batched(x * weights[..., None], valid, params, plain), atol=1e-5)
    with pytest.raises(ValueError, match=r"pass weights="):
        apply_batched_experts(x, valid, params, config)


def test_the_shared_expert_is_a_gated_mlp_with_an_optional_gate(rng):
    params, (x, _, _) = make_params(rng), make_rows(rng)
    gate = jnp.asarray(rng.normal(size=D), jnp.float32)
    config = make_config(dtype="float32")
    everyone = dense(x, jnp.zeros((N, 1), jnp.int32), jnp.ones((N, 1)), params, config)
    assert relative(shared_expert(x, params.gate_up[0], params.down[0], config), everyone) < 2e-6
    gated = dataclasses.replace(config, shared_intermediate_size=F, shared_gate=True)
    expected = everyone * jax.nn.sigmoid(x @ gate)[:, None]
    assert relative(shared_expert(x, params.gate_up[0], params.down[0], gated, gate=gate), expected) < 2e-6
    for c, g in ((config, gate), (gated, None)):
        with pytest.raises(ValueError, match=r"shared_gate=.*gate \[D\] goes"):
            shared_expert(x, params.gate_up[0], params.down[0], c, gate=g)


def test_the_table_says_what_each_kind_of_experts_takes():
    assert {name: (s.form, s.expects_unquantized_inputs) for name, s in EXPERTS.items()} == {
        "grouped": ("standard", False),
        "grouped_deferred": ("standard", True),
        "batched": ("batched", False),
    }
    with pytest.raises(ValueError, match=r"'marlin' is not known.*'grouped', 'grouped_deferred', 'batched'"):
        get_experts("marlin")


def test_arguments_that_do_not_fit_are_refused_with_what_would(rng):
    params, (x, ids, weights) = make_params(rng), make_rows(rng)
    transposed = dataclasses.replace(params, gate_up=jnp.swapaxes(params.gate_up, 2, 3))
    valid = jnp.ones((E, 8), bool)
    for message, call in (
        (r"gate_up has shape .*takes \(5, 2, 48, 64\)", lambda: apply_experts(x, ids, weights, transposed, CONFIG)),
        (
            r"gate_up_bias has shape None.*biases come with use_bias",
            lambda: apply_experts(x, ids, weights, params, make_config(dtype="float32", use_bias=True)),
        ),
        (r"48 columns, but hidden_size=64", lambda: apply_experts(x[:, :48], ids, weights, params, CONFIG)),
        (r"both be \[N, K\]", lambda: apply_experts(x, ids, weights[:, :1], params, CONFIG)),
        (r"both be \[N, K\]", lambda: apply_experts(x, ids[:, 0], weights[:, 0], params, CONFIG)),
        (r"ids are float32", lambda: apply_experts(x, ids.astype(jnp.float32), weights, params, CONFIG)),
        (
            r"batched form.*apply_batched_experts",
            lambda: apply_experts(x, ids, weights, params, CONFIG, experts="batched"),
        ),
        (r"\[E, S, D\] and \[E, S\]", lambda: apply_batched_experts(x, valid, params, CONFIG)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("fmt", [None, "nvfp4"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
def test_the_fused_projection_gives_the_same_results_and_gradients_as_the_steps(rng, monkeypatch, activation, fmt):
    from jmoe.experts import gated
    from pallas_kernels.grouped_matmul import gated_product, grouped_matmul_reference

    def kernel(x, w, sizes, gate, *, bias, out_dtype, zero_tail):
        assert not zero_tail
        w = dequantize(w, jnp.float32) if fmt else w
        owner = jnp.clip(row_groups(sizes, x.shape[0]), 0, w.shape[0] - 1)
        halves = [grouped_matmul_reference(x, w[:, i], sizes) + bias[owner, i] for i in (0, 1)]
        y = gated_product(*halves, gate).astype(out_dtype)
        return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None], y, jnp.nan)

    config = make_config(dtype="float32", activation=activation, use_bias=True, quant=QuantConfig(weights=fmt))
    params, (x, ids, weights) = make_params(rng, bias=True), make_rows(rng)
    params = dataclasses.replace(params, gate_up_bias=params.gate_up_bias * 0.3)
    if fmt:
        both = {name: quantize_weights(getattr(params, name), fmt) for name in ("gate_up", "down")}
        params = dataclasses.replace(params, **both)

    def run():
        def loss(x, weights, bias):
            p = dataclasses.replace(params, gate_up_bias=bias)
            return jnp.sum(jnp.sin(apply_experts(x, ids, weights, p, config)))

        y = jax.jit(lambda *a: apply_experts(*a, config))(x, ids, weights, params)
        return y, jax.jit(jax.grad(loss, (0, 1, 2)))(x, weights, params.gate_up_bias)

    expected = run()
    calls = []
    monkeypatch.setattr(gated, "gated_obstacle", lambda *a, **k: None)
    monkeypatch.setattr(gated, "gated_matmul", lambda *a, **k: calls.append(1) or kernel(*a, **k))
    actual = run()
    assert calls
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative(a, b) < 3e-6


@pytest.mark.parametrize("intermediate", [None, "mxfp8", "nvfp4", "nvfp4_token"])
def test_nothing_depends_on_what_lies_past_the_last_place(rng, monkeypatch, intermediate):
    """The kernels leave those rows unwritten: here they are NaN. Under differentiation they are written."""
    config = make_config(dtype="float32", use_bias=True, quant=QuantConfig(intermediate=intermediate))
    params, (x, ids, weights) = make_params(rng, bias=True), make_rows(rng)
    assert np.any(ids < 0)

    def outputs():
        loss = lambda x, w, p: jnp.sum(apply_experts(x, ids, w, p, config) ** 2)  # noqa: E731
        blocks, valid = x.reshape(E, -1, D), (ids[:, 0] >= 0).reshape(E, -1)
        return (
            apply_experts(x, ids, weights, params, config),
            apply_batched_experts(blocks, valid, params, config),
            jax.grad(loss, argnums=(0, 1, 2))(x, weights, params),
        )

    wanted = outputs()
    poisoned = []

    def forward(x, w, group_sizes, *, zero_tail=True, **options):
        y = portable.grouped_matmul(x, w, group_sizes, **options)
        if zero_tail:
            return y
        poisoned.append(y.shape)
        return jnp.where(jnp.arange(y.shape[0])[:, None] < jnp.sum(group_sizes), y, jnp.nan)

    unwritten = dataclasses.replace(api.IMPLEMENTATIONS[-1], name="unwritten", forward=forward)
    monkeypatch.setattr(api, "IMPLEMENTATIONS", (unwritten, *api.IMPLEMENTATIONS))
    jax.tree.map(np.testing.assert_array_equal, outputs(), wanted)
    assert len(poisoned) == 4
