"""Experts with quantised weights and activations: signal-to-noise, one quantisation, contracts, gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.config import MoEConfig, QuantConfig
from jmoe.experts import (
    EXPERTS,
    ExpertWeights,
    apply_batched_experts,
    apply_experts,
    gated,
    gated_activation,
    grouped,
    inputs,
)
from jmoe.experts.weights import flat_gate_up
from pallas_kernels.grouped_matmul import Problem, mosaic_entry
from pallas_kernels.quantize import QTensor, dequantize, quantize, quantize_weights, swiglu_quantize

D, F, E, K, N = 256, 128, 4, 2, 64

apply = jax.jit(apply_experts, static_argnames=("config", "experts", "quantize_input", "implementation"))
quantize_jit = jax.jit(quantize, static_argnames=("fmt", "alignment"))
dequantize_jit = jax.jit(dequantize, static_argnums=1)


def make_config(quant=None, **changes) -> MoEConfig:
    sizes = dict(hidden_size=D, intermediate_size=F, num_experts=E, num_experts_per_tok=K, dtype="float32")
    return MoEConfig(**(sizes | changes), quant=QuantConfig(**(quant or {})))


def make_params(rng, d=D, f=F) -> ExpertWeights:
    return ExpertWeights(
        jnp.asarray(rng.normal(size=(E, 2, f, d)) * d**-0.5, jnp.float32),
        jnp.asarray(rng.normal(size=(E, d, f)) * f**-0.5, jnp.float32),
    )


def make_rows(rng, d=D, k=K, low=0, dtype=jnp.float32):
    return (
        jnp.asarray(rng.normal(size=(N, d)), dtype),
        jnp.asarray(rng.integers(low, E, (N, k)), jnp.int32),
        jnp.asarray(rng.uniform(0.1, 1, (N, k)), jnp.float32),
    )


def quantize_params(params, fmt):
    return ExpertWeights(quantize_weights(params.gate_up, fmt, scale_axes=(1,)), quantize_weights(params.down, fmt))


def decibel(clean, noisy):
    clean, noisy = np.asarray(clean, np.float64), np.asarray(noisy, np.float64)
    return 10 * np.log10(np.sum(clean**2) / np.sum((clean - noisy) ** 2))


# (weights, activations, intermediate): floor and ceiling in dB. Floors of single formats are the design's; those of
# whole
# recipes are 1.15 times, the ceilings 0.8 times the relative error published for a SwiGLU block (fp8 0.064, mxfp8
# 0.067,
# mxfp4 weights 0.197, nvfp4 weights 0.167, nvfp4 throughout 0.233).
RECIPES = {
    (None, "mxfp8", None): (26, 31),
    (None, "mxfp4", None): (12, 18),
    (None, "nvfp4", None): (16, 20),
    (None, "nvfp4_token_4o6", None): (16, 20),
    ("mxfp4", "mxfp8", None): (12.9, 16.1),
    ("nvfp4", None, None): (14.3, 17.5),
    ("fp8_128x128", "fp8_128", "fp8_128"): (22.6, 25.9),
    ("mxfp8", "mxfp8", "mxfp8"): (22.2, 25.5),
    ("nvfp4", "nvfp4_token", "nvfp4_token"): (11.4, 14.6),
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: "-".join(f or "float" for f in r))
def test_signal_to_noise_has_its_floor_and_its_ceiling(rng, recipe):
    weights_fmt, activations, intermediate = recipe
    params, (x, ids, weights) = make_params(rng), make_rows(rng)
    config = make_config(dict(activations=activations, weights=weights_fmt, intermediate=intermediate))

    @jax.jit
    def run(x, params):
        if weights_fmt is not None:
            params = quantize_params(params, weights_fmt)
        return apply_experts(x, ids, weights, params, config, quantize_input=activations is not None)

    floor, ceiling = RECIPES[recipe]
    assert floor < decibel(apply(x, ids, weights, params, make_config()), run(x, params)) < ceiling


def test_sender_receiver_and_experts_quantise_to_the_same_output_bit_for_bit_F05_F08(rng):
    fmt = "nvfp4_token"
    params, (x, ids, weights) = make_params(rng), make_rows(rng, low=-1, dtype="bfloat16")
    config = make_config(dict(activations=fmt), dtype="bfloat16")
    q = quantize_jit(x, fmt=fmt)
    sent = apply(q, ids, weights, params, config)
    received = apply(x, ids, weights, params, config, quantize_input=True)
    deferred = apply(x, ids, weights, params, config, experts="grouped_deferred", quantize_input=True)
    np.testing.assert_array_equal(sent, received)
    np.testing.assert_array_equal(sent, deferred)
    by_hand = apply(dequantize_jit(q, jnp.float32), ids, weights, params, make_config(dtype="bfloat16"))
    np.testing.assert_array_equal(by_hand, sent)


def test_every_legal_pairing_quantises_the_input_exactly_once_F08(rng, monkeypatch):
    params, (x, ids, weights) = make_params(rng), make_rows(rng)
    valid = jnp.ones((E, N // E), bool)
    counted = []

    def counting(x, fmt, **options):
        counted.append(fmt.name)
        return quantize(x, fmt, **options)

    monkeypatch.setattr(inputs, "quantize", counting)
    for fmt in ("mxfp8", "mxfp4", "nvfp4", "nvfp4_token", "nvfp4_token_4o6", "fp8_128"):
        config = make_config(dict(activations=fmt))
        arrived = jax.eval_shape(lambda x: quantize(x, "mxfp8"), x[:2]) if fmt == "mxfp8" else None
        for name, spec in EXPERTS.items():
            counted.clear()
            if spec.form == "batched":
                blocks = x.reshape(E, -1, D)
                jax.eval_shape(
                    lambda x, c=config: apply_batched_experts(x, valid, params, c, quantize_input=True), blocks
                )
            else:
                jax.eval_shape(
                    lambda x, c=config, n=name: apply_experts(
                        x, ids, weights, params, c, experts=n, quantize_input=True
                    ),
                    x,
                )
            assert counted == [fmt]
        if arrived is not None:
            counted.clear()
            jax.eval_shape(lambda q, c=config: apply_experts(q, ids[:2], weights[:2], params, c), arrived)
            assert counted == []


def test_quantising_twice_would_be_seen_and_is_refused_F08(rng):
    params = make_params(rng, d=64)
    x = jnp.linspace(-3, 3, 64, dtype=jnp.float32)[None]
    config = make_config(dict(activations="mxfp4"), hidden_size=64)
    once = quantize_jit(x, fmt="mxfp4")
    twice = quantize_jit(dequantize_jit(quantize_jit(x, fmt="nvfp4_token"), jnp.float32), fmt="mxfp4")
    ids, weights = jnp.zeros((1, K), jnp.int32), jnp.ones((1, K))
    out = apply(x, ids, weights, params, config, quantize_input=True)
    np.testing.assert_array_equal(out, apply(once, ids, weights, params, config))
    assert np.any(out != apply(twice, ids, weights, params, config))
    with pytest.raises(ValueError, match=r"'mxfp4'.*second time; pass quantize_input=False"):
        apply_experts(once, ids, weights, params, config, quantize_input=True)
    with pytest.raises(ValueError, match=r"activations='mxfp4'.*nobody would.*quantize_input=True"):
        apply_experts(x, ids, weights, params, config)
    with pytest.raises(ValueError, match=r"activations is None"):
        apply_experts(x, ids, weights, params, make_config(hidden_size=64), quantize_input=True)
    with pytest.raises(ValueError, match=r"'grouped_deferred' expect unquantised.*'mxfp4'.*experts='grouped'"):
        apply_experts(once, ids, weights, params, config, experts="grouped_deferred")


@pytest.mark.parametrize(
    ("arrived", "wanted"), [("nvfp4", "nvfp4_token"), ("nvfp4_token", "nvfp4"), ("mxfp8", "mxfp4")]
)
def test_another_contract_is_refused_and_both_are_named_F14(rng, arrived, wanted):
    params, (x, ids, weights) = make_params(rng), make_rows(rng)
    q = jax.eval_shape(lambda x: quantize(x, arrived), x)
    with pytest.raises(ValueError, match=rf"arrived as '{arrived}'.*take '{wanted}'.*send '{wanted}'"):
        jax.eval_shape(lambda q: apply_experts(q, ids, weights, params, make_config(dict(activations=wanted))), q)


def test_rounding_rules_and_4over6_share_a_contract_F14(rng):
    params, (x, ids, weights) = make_params(rng), make_rows(rng)
    for arrived, wanted in (("mxfp8_floor", "mxfp8"), ("nvfp4_token_4o6", "nvfp4_token"), ("fp8_128_ue8m0", "fp8_128")):
        q = jax.eval_shape(lambda x, f=arrived: quantize(x, f), x)
        config = make_config(dict(activations=wanted))
        assert jax.eval_shape(lambda q, c=config: apply_experts(q, ids, weights, params, c), q).shape == (N, D)


def test_fp8_that_the_transport_made_is_requantised_for_a_layer_of_another_format_F06(rng):
    params, (x, ids, weights) = make_params(rng), make_rows(rng, dtype="bfloat16")
    config = make_config(dict(activations="mxfp8"), dtype="bfloat16")
    q = quantize_jit(x, fmt="fp8_128")
    again = quantize_jit(dequantize_jit(q, jnp.bfloat16), fmt="mxfp8")
    np.testing.assert_array_equal(
        apply(q, ids, weights, params, config, quantize_input=True), apply(again, ids, weights, params, config)
    )


def test_a_quantised_wire_of_an_unquantised_layer_is_dequantised_as_it_is_read(rng):
    params, (x, ids, weights) = make_params(rng), make_rows(rng)
    q = quantize_jit(x, fmt="mxfp8")
    a = apply(q, ids, weights, params, make_config())
    np.testing.assert_allclose(a, apply(dequantize_jit(q, jnp.float32), ids, weights, params, make_config()), atol=1e-6)


@pytest.mark.parametrize(
    "x, w, rows, wanted",
    [
        ("bfloat16", "bfloat16", 4096, None),
        ("mxfp8", "bfloat16", 4096, "bfloat16"),
        ("nvfp4_token", "nvfp4", 4096, "bfloat16"),
        ("fp8_128", "fp8_128x128", 4096, None),
        ("fp8_128", "fp8_128x128", 64, "bfloat16"),  # few rows for each expert: another kernel
    ],
)
def test_the_kernels_say_in_which_dtype_they_want_quantised_rows(x, w, rows, wanted):
    problem = Problem("forward", rows, 256, 512, 8, x, w, "bfloat16", "gpu", "9.0")
    assert mosaic_entry.dequantises(problem) == wanted


@pytest.mark.parametrize("where", ["wire", "experts"])
def test_rows_that_are_dequantised_on_their_way_give_the_same_output_and_gradient(rng, monkeypatch, where):
    params, (x, ids, weights) = make_params(rng), make_rows(rng, low=-1)
    config = make_config(dict(activations="mxfp8") if where == "experts" else None)
    q = quantize_jit(x, fmt="mxfp8")

    def run(x, weights, params):
        if where == "experts":
            return apply_experts(x, ids, weights, params, config, quantize_input=True)
        return apply_experts(q, ids, weights, params, config, straight_through=x)

    def both():
        loss = jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(run(*a))), (0, 1, 2))
        return jax.tree.leaves(jax.jit(loss)(x, weights, params))

    expected = both()
    monkeypatch.setattr(grouped, "input_dtype", lambda *_, **__: "float32")
    for a, b in zip(both(), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_padded_columns_of_the_wire_do_not_reach_the_output_F17(rng):
    params, (x, ids, weights) = make_params(rng, d=96), make_rows(rng, d=96)
    config = make_config(dict(activations="mxfp8", mx_alignment=256), hidden_size=96)
    wide, narrow = quantize_jit(x, fmt="mxfp8", alignment=256), quantize_jit(x, fmt="mxfp8", alignment=0)
    assert wide.data.shape == (N, 256) and wide.block_scale.shape == (N, 8)
    expected = apply(narrow, ids, weights, params, config)
    assert expected.shape == (N, 96)
    np.testing.assert_array_equal(apply(wide, ids, weights, params, config), expected)
    np.testing.assert_array_equal(apply(x, ids, weights, params, config, quantize_input=True), expected)


def test_nan_in_rows_of_nobody_does_not_change_a_tensor_wide_scale_F23(rng):
    params, (x, ids, weights) = make_params(rng), make_rows(rng)
    config = make_config(dict(activations="nvfp4", intermediate="nvfp4"))
    ids = ids.at[::3].set(-1)
    for garbage in (jnp.nan, 1e30):
        dirty = apply(x.at[::3].set(garbage), ids, weights, params, config, quantize_input=True)
        np.testing.assert_array_equal(
            dirty, apply(x.at[::3].set(0.0), ids, weights, params, config, quantize_input=True)
        )


def test_static_scales_of_each_expert_serve_deferring_experts_only(rng):
    params, (x, ids, weights) = make_params(rng), make_rows(rng, k=1)
    config = make_config(dict(activations="nvfp4", intermediate="nvfp4"), num_experts_per_tok=1)
    scales = jnp.asarray([1.0, 2.0, 3.0, 5.0]) / 2688
    each = dataclasses.replace(params, input_scale=scales, intermediate_scale=scales * 0.7)
    out = apply(x, ids, weights, each, config, experts="grouped_deferred", quantize_input=True)
    for e in range(E):
        one = dataclasses.replace(params, input_scale=scales[e], intermediate_scale=scales[e] * 0.7)
        mine = np.asarray(ids[:, 0]) == e
        np.testing.assert_array_equal(out[mine], apply(x, ids, weights, one, config, quantize_input=True)[mine])
    with pytest.raises(ValueError, match=r"take one input scale, got input_scale \(4,\).*'grouped_deferred'"):
        apply_experts(x, ids, weights, each, config, quantize_input=True)


@pytest.mark.parametrize("fmt", ["fp8_128x128", "nvfp4"])
def test_quantised_weights_give_the_output_and_input_gradient_of_their_dequantised_form(rng, fmt):
    f = 96  # not a multiple of 128: tiles of gate and up must not be merged
    params, (x, ids, weights) = make_params(rng, f=f), make_rows(rng)
    config = make_config(dict(weights=fmt), intermediate_size=f)

    @jax.jit
    def run(x, params):
        q = quantize_params(params, fmt)
        wide = ExpertWeights(dequantize(q.gate_up, jnp.float32), dequantize(q.down, jnp.float32))
        plain = make_config(intermediate_size=f)
        return [
            jax.value_and_grad(lambda x, p=p, c=c: jnp.sum(jnp.sin(apply_experts(x, ids, weights, p, c))))(x)
            for p, c in ((q, config), (wide, plain))
        ]

    (a, da), (b, db) = run(x, params)
    np.testing.assert_allclose(a, b, rtol=1e-5)
    np.testing.assert_allclose(da, db, atol=1e-5)


def test_weights_must_be_kept_in_the_format_of_the_configuration(rng):
    params, (x, ids, weights) = make_params(rng), make_rows(rng)
    q = jax.eval_shape(lambda p: quantize_params(p, "mxfp8"), params)
    for given, wanted in ((params, "nvfp4"), (q, "nvfp4")):
        kept = "mxfp8" if given is q else "float32"
        with pytest.raises(ValueError, match=rf"gate_up is kept as {kept}.*weights='nvfp4'.*quantize_weights"):
            jax.eval_shape(lambda p, w=wanted: apply_experts(x, ids, weights, p, make_config(dict(weights=w))), given)


def test_gradients_pass_straight_through_every_quantisation(rng):
    params, (x, ids, weights) = make_params(rng), make_rows(rng)
    config = make_config(dict(activations="mxfp8", intermediate="mxfp8"))

    def fake(a):
        return a + jax.lax.stop_gradient(dequantize(quantize(jax.lax.stop_gradient(a), "mxfp8"), jnp.float32) - a)

    def dense(x, weights, params):
        hidden = jnp.einsum("nd,ehfd->nehf", fake(x), params.gate_up)
        hidden = fake(gated_activation(hidden[:, :, 0], hidden[:, :, 1], config))
        y = jnp.einsum("nef,edf->ned", hidden, params.down)
        chosen = ids[:, :, None] == jnp.arange(E)[None, None]
        return jnp.einsum("ne,ned->nd", jnp.sum(jnp.where(chosen, weights[:, :, None], 0.0), axis=1), y)

    def ours(x, weights, params):
        return apply_experts(x, ids, weights, params, config, quantize_input=True)

    def deferred(x, weights, params):
        return apply_experts(x, ids, weights, params, config, experts="grouped_deferred", quantize_input=True)

    def run(function):
        loss = jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(function(*a))), (0, 1, 2))
        return jax.tree.leaves(jax.jit(loss)(x, weights, params))

    expected, got = run(dense), run(ours)
    for a, b in zip(got, expected, strict=True):
        # A last-bit difference in the products moves a few quantised intermediates by one step.
        assert np.linalg.norm(a - b) < 5e-3 * np.linalg.norm(b)
    for a, b in zip(run(deferred), got, strict=True):
        np.testing.assert_array_equal(a, b)

    def through(x, stand_in):
        return jnp.sum(jnp.sin(apply_experts(x, ids, weights, params, config, straight_through=stand_in)))

    q = quantize_jit(x, fmt="mxfp8")
    np.testing.assert_array_equal(jax.jit(jax.grad(through, 1))(q, x * jnp.nan), got[1])


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_a_projection_that_quantises_gives_the_results_and_gradients_of_the_steps(rng, monkeypatch, activation):
    fmt, calls = "fp8_128", []
    config = make_config(dict(activations=fmt, weights="fp8_128x128", intermediate=fmt), activation=activation)
    params, (x, ids, weights) = quantize_params(make_params(rng), "fp8_128x128"), make_rows(rng, low=-1)

    def kernel(rows, w, sizes, gate, fmt, *, zero_tail):
        calls.append(gate.kind)
        assert not zero_tail
        both = grouped.grouped_matmul(rows, flat_gate_up(w), sizes)
        q = swiglu_quantize(both, fmt, activation=gate.kind, alpha=gate.alpha, limit=gate.limit)
        past = jnp.arange(rows.shape[0])[:, None] >= jnp.sum(sizes)
        return dataclasses.replace(q, block_scale=jnp.where(past, jnp.nan, q.block_scale))

    def run():
        def output(x, weights):
            return apply_experts(x, ids, weights, params, config, quantize_input=True)

        loss = jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(output(*a))), (0, 1))
        return jax.jit(output)(x, weights), jax.jit(loss)(x, weights)

    expected = run()
    assert not calls
    monkeypatch.setattr(gated, "gated_quantize_obstacle", lambda *a, **k: None)
    monkeypatch.setattr(gated, "gated_matmul_quantize", kernel)
    jax.tree.map(np.testing.assert_array_equal, run(), expected)
    assert calls == [activation]  # and under differentiation the steps


def test_the_batched_form_takes_quantised_rows_and_reads_no_padding_F45(rng):
    params = make_params(rng)
    x = jnp.asarray(rng.normal(size=(E, 9, D)), jnp.bfloat16)
    valid = jnp.arange(9)[None] < jnp.asarray([9, 0, 1, 5])[:, None]
    config = make_config(dict(activations="nvfp4_token"), dtype="bfloat16", num_experts_per_tok=1)
    q = quantize_jit(x, fmt="nvfp4_token")
    assert q.global_scale.shape == (E, 9)
    dirty = QTensor(q.data, q.block_scale, jnp.where(valid, q.global_scale, jnp.nan), q.format, q.k)
    run = jax.jit(apply_batched_experts, static_argnames=("config", "quantize_input"))
    out = run(dirty, valid, params, config)
    np.testing.assert_array_equal(out, run(x, valid, params, config, quantize_input=True))
    assert np.isfinite(out).all() and not np.any(np.asarray(out)[~np.asarray(valid)]) and np.any(out)


@pytest.mark.parametrize(("backend", "ranks"), [("local", 1), ("nvlink_two_sided", 4), ("low_latency", 4)])
def test_an_fp8_layer_joins_its_gated_projection_with_the_quantisation_wherever_a_kernel_can(
    monkeypatch, backend, ranks
):
    quant, calls = QuantConfig(activations="fp8_128", weights="fp8_128x128", intermediate="fp8_128"), []
    config = MoEConfig(128, 128, 8, 2, quant=quant)
    params = jmoe.quantize_params(jmoe.init_params(jax.random.key(0), config), "fp8_128x128")
    x = jax.random.normal(jax.random.key(1), (64, 128), jnp.bfloat16)
    mesh = jax.make_mesh((ranks,), ("ep",), devices=jax.devices()[:ranks]) if ranks > 1 else None

    def kernel(rows, w, sizes, gate, fmt, *, zero_tail):
        calls.append(rows.format.name)
        both = grouped.grouped_matmul(rows, flat_gate_up(w), sizes, out_dtype=jnp.bfloat16)
        return swiglu_quantize(both, fmt)

    def run():
        layer = jmoe.build_moe(config, mesh=mesh, backend=backend)
        return jax.jit(lambda p, x: jmoe.moe(layer, p, x))(params, x)

    apart = run()
    monkeypatch.setattr(mosaic_entry, "why_not_gated_quantize", lambda *a, **k: None)
    monkeypatch.setattr(gated, "gated_matmul_quantize", kernel)
    np.testing.assert_array_equal(run(), apart)
    assert calls == ["fp8_128"]
