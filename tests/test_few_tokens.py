"""A few rows times their experts' weights by the kernels that read these into registers, run thread by thread."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import permute_emulator
import pytest
from aot_report import aot_report

from jmoe import compat
from jmoe.config import MoEConfig, QuantConfig, RouterConfig
from jmoe.experts import ExpertWeights, apply_experts, takes_few_rows
from jmoe.layer import build_moe, moe, moe_with_stats, quantize_params
from jmoe.params import init_params
from pallas_kernels import decode
from pallas_kernels.decode import mosaic_experts, reference
from pallas_kernels.grouped_matmul import Gate, mosaic_vector, vector_weights
from pallas_kernels.quantize import QTensor, dequantize, quantize_weights
from pallas_kernels.route import Rule, choose_experts
from pallas_kernels.route import mosaic_sm90 as route_sm90

FORMATS = ("bfloat16", "nvfp4", "mxfp4", "mxfp8", "fp8_128x128")


@pytest.fixture
def on_the_host(monkeypatch):
    permute_emulator.install(monkeypatch, mosaic_vector, vector_weights, mosaic_experts, route_sm90)


def draw(rng, *shape, dtype=jnp.bfloat16, scale=1.0):
    return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32).astype(dtype)


def weights(rng, fmt, *shape):
    """Kept in fmt, and as float64."""
    w = draw(rng, *shape, dtype=jnp.dtype(fmt) if fmt.endswith("16") else jnp.bfloat16, scale=shape[-1] ** -0.5)
    if not fmt.endswith("16"):
        w = quantize_weights(w, fmt)
    return w, plain(w)


def plain(w):
    return np.asarray(dequantize(w, jnp.float32) if isinstance(w, QTensor) else w, np.float64)


def close(actual, expected, limit=1e-5):
    a, b = (np.asarray(x, np.float64) for x in (actual, expected))
    assert a.shape == b.shape
    assert np.linalg.norm(a - b) <= limit * np.linalg.norm(b), np.linalg.norm(a - b) / np.linalg.norm(b)


def silu(x):
    return x / (1 + np.exp(-x))


#: tokens, experts of each, rows and columns of a weight, experts: one token, no whole tile, several units and turns, a
#: row that ends within a unit
SIZES = [(1, 2, 48, 256, 4), (3, 3, 40, 384, 5), (8, 1, 64, 1024, 9), (2, 4, 16, 2560, 3), (1, 1, 33, 96, 2)]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_of_pairs(on_the_host, rng, fmt, size):
    tokens, top_k, rows, columns, experts = size
    if fmt == "fp8_128x128":
        columns += -columns % 128
    both, exact = weights(rng, fmt, experts, 2, rows, columns)
    x = draw(rng, tokens, columns)
    ids = rng.integers(-1, experts + 1, tokens * top_k).astype(np.int32)
    ids[0] = experts - 1
    wide, valid = np.asarray(x, np.float64), (ids >= 0) & (ids < experts)
    gates = [[exact[ids[p], i] @ wide[p // top_k] for i in range(2)] for p in np.flatnonzero(valid)]
    expected = np.stack([silu(gate) * up for gate, up in gates])
    for dtype, limit in ((jnp.float32, 1e-5), (jnp.bfloat16, 4e-3)):
        y = mosaic_vector.run_multiply(x, both, jnp.asarray(ids), gate=Gate(), out_dtype=dtype)
        assert y.dtype == dtype and y.shape == (tokens * top_k, rows)
        close(np.asarray(y, np.float64)[valid], expected, limit)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_weighted_sum_of_pairs(on_the_host, rng, fmt, size):
    tokens, top_k, rows, columns, experts = size
    if fmt == "fp8_128x128":
        columns += -columns % 128
    w, exact = weights(rng, fmt, experts, rows, columns)
    x = draw(rng, tokens * top_k, columns)
    ids = rng.integers(-1, experts + 1, (tokens, top_k)).astype(np.int32)
    ids[0, 0] = experts - 1
    factors = rng.normal(size=ids.shape)
    valid = (ids >= 0) & (ids < experts)
    x = x.at[np.flatnonzero(~valid)].set(jnp.nan)  # what nobody has made
    factors[~valid] = np.nan
    expected = np.zeros((tokens, rows))
    for t, k in zip(*np.nonzero(valid), strict=True):
        expected[t] += factors[t, k] * (exact[ids[t, k]] @ np.asarray(x[t * top_k + k], np.float64))
    args = x, w, jnp.asarray(ids), jnp.asarray(factors, jnp.float32)
    close(mosaic_vector.run_sum(*args, out_dtype=jnp.float32), expected)
    nobody = mosaic_vector.run_sum(x, w, jnp.full_like(args[2], -1), args[3], out_dtype=jnp.float32)
    assert not np.asarray(nobody).any()


@pytest.mark.parametrize("scale", [(), (3,), (3, 2), (3, 2, 32)])
def test_every_form_of_global_scale(on_the_host, rng, scale):
    (both, _), (down, _) = weights(rng, "nvfp4", 3, 2, 32, 128), weights(rng, "nvfp4", 3, 48, 32)
    of_down = {3: (3, 48), 2: (3,)}.get(len(scale), scale)

    def scaled(w, shape):
        return dataclasses.replace(w, global_scale=jnp.asarray(rng.uniform(0.1, 2, shape), jnp.float32))

    both, down = scaled(both, scale), scaled(down, of_down)
    x, ids, factors = draw(rng, 2, 128), jnp.asarray([[0, 2], [1, 2]], jnp.int32), jnp.ones((2, 2), jnp.float32)
    h = mosaic_vector.run_multiply(x, both, ids.reshape(-1), gate=Gate("gelu_tanh"), out_dtype=jnp.float32)
    gate = [np.einsum("mnk,mk->mn", plain(both)[np.asarray(ids).ravel(), i], np.repeat(x, 2, 0)) for i in range(2)]
    close(h, np.asarray(jax.nn.gelu(gate[0], approximate=True)) * gate[1], 1e-4)
    y = mosaic_vector.run_sum(h.astype(jnp.bfloat16), down, ids, factors, out_dtype=jnp.float32)
    each = np.einsum("mnk,mk->mn", plain(down)[np.asarray(ids).ravel()], np.asarray(h.astype(jnp.bfloat16), np.float64))
    close(y, each.reshape(2, 2, -1).sum(1))


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("fmt", ["bfloat16", "float16", "mxfp4"])
def test_experts_are_what_plain_jax_computes(on_the_host, rng, fmt, kind):
    dtype = jnp.float16 if fmt == "float16" else jnp.bfloat16
    (gate_up, _), (down, _) = weights(rng, fmt, 6, 2, 96, 128), weights(rng, fmt, 6, 128, 96)
    x = draw(rng, 3, 128, dtype=dtype, scale=3.0)
    ids = jnp.asarray([[5, 0, 5], [-1, 6, 2], [-1, -1, -1]], jnp.int32)  # twice the same, none, above all
    factors = jnp.asarray(rng.normal(size=(3, 3)), jnp.float32).at[2].set(jnp.nan)
    biases = draw(rng, 6, 2, 96), draw(rng, 6, 128, dtype=jnp.float32)
    how = dict(gate=Gate(kind, limit=2.0), out_dtype=jnp.float32)
    for bias in ((None, None), biases):
        args = x, ids, factors, gate_up, down, *bias
        assert mosaic_experts.experts_obstacle(x, ids, gate_up, down, *bias) is None
        y = mosaic_experts.run_experts(*args, **how)
        close(y, reference.experts(*args, **how), 2e-3)
        assert not np.asarray(y)[2].any()


@pytest.mark.parametrize("valid", [None, True, False])
@pytest.mark.parametrize("rule", [Rule(8), Rule(4, score="sigmoid", num_groups=2, group_topk=1, scaling=2.5)], ids=str)
def test_one_token_and_its_choice_of_experts(on_the_host, rng, rule, valid):
    (gate_up, _), (down, _) = weights(rng, "nvfp4", 64, 2, 32, 64), weights(rng, "nvfp4", 64, 64, 32)
    x, logits = draw(rng, 1, 64), draw(rng, 1, 64, dtype=jnp.float32, scale=3.0)
    bias = draw(rng, 64, dtype=jnp.float32) if rule.num_groups else None
    flag = None if valid is None else jnp.asarray([valid])
    biases = draw(rng, 64, 2, 32), draw(rng, 64, 64)
    how = dict(gate=Gate(), out_dtype=jnp.float32)
    y, ids, factors = mosaic_experts.run_routed(x, logits, bias, flag, gate_up, down, *biases, rule=rule, **how)
    expected_ids, expected_factors = choose_experts(logits, bias, rule, valid=flag)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(factors, expected_factors, 1e-6)
    close(y, reference.experts(x, expected_ids, expected_factors, gate_up, down, *biases, **how), 2e-3)
    assert np.asarray(y).any() == (valid is not False)


def test_a_token_that_is_nan_stays_alone(on_the_host, rng):
    (gate_up, _), (down, _) = weights(rng, "mxfp8", 3, 2, 64, 128), weights(rng, "mxfp8", 3, 128, 64)
    x = draw(rng, 4, 128)
    ids, factors = jnp.asarray([[0, 1], [1, 2], [1, 0], [2, 1]], jnp.int32), jnp.ones((4, 2), jnp.float32)
    how = dict(gate=Gate(), out_dtype=jnp.float32)
    clean = np.asarray(mosaic_experts.run_experts(x, ids, factors, gate_up, down, None, None, **how))
    dirty = x.at[1].set(jnp.nan)
    y = np.asarray(mosaic_experts.run_experts(dirty, ids, factors, gate_up, down, None, None, **how))
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2, 3]], clean[[0, 2, 3]])


def test_what_the_kernels_cannot_do_is_said(rng):
    x, (gate_up, _), (down, _) = (
        draw(rng, 4, 128),
        weights(rng, "mxfp8", 3, 2, 64, 128),
        weights(rng, "mxfp8", 3, 128, 64),
    )
    factors = jnp.ones((4, 9), jnp.float32)
    kernel = dict(implementation="mosaic_sm90")
    with pytest.raises(ValueError, match="up to 32 pairs of a token and an expert, not 36"):
        decode.experts(x, factors.astype(jnp.int32), factors, gate_up, down, **kernel)
    two = factors[:, :2]
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        decode.experts(x.astype(jnp.float32), two.astype(jnp.int32), two, gate_up, down, **kernel)
    with pytest.raises(ValueError, match="does not multiply float16 with row_major weights of mxfp8"):
        decode.experts(x.astype(jnp.float16), two.astype(jnp.int32), two, gate_up, down, **kernel)
    with pytest.raises(ValueError, match=r"it takes \[T, D\], \[T, K\]"):
        decode.experts(x, two[:2].astype(jnp.int32), two, gate_up, down)
    wide = jax.ShapeDtypeStruct((1, 2, 64, 131072), jnp.bfloat16)
    assert "do not fit its shared memory" in mosaic_vector.multiply_obstacle(
        jax.ShapeDtypeStruct((8, 131072), jnp.bfloat16), wide, 8
    )


@pytest.mark.skipif(not compat.KERNELS_SUPPORTED, reason=compat.KERNELS_REASON)
@pytest.mark.parametrize("fmt", [None, "nvfp4"])
@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_how_many_kernels_a_layer_of_few_tokens_has(fmt, tokens):
    config = MoEConfig(256, 128, 32, 8, quant=QuantConfig(weights=fmt))
    layer = build_moe(config)

    def make():
        params = init_params(jax.random.key(0), config, dtype=jnp.bfloat16)
        return quantize_params(params, fmt) if fmt else params

    args = jax.eval_shape(make), jax.ShapeDtypeStruct((tokens, 256), jnp.bfloat16)
    traced = jax.jit(lambda p, x: moe(layer, p, x)).trace(*args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = {
        1: {"chosen_rows_gated", "expert_sum"},
        4: {"choose_experts", "expert_rows_gated", "expert_sum"},
        5: {"choose_experts", "sort_place", "combine_rows"},
    }
    every = set().union(*kernels.values())
    assert {name for name in every if name in text} == kernels[tokens]
    assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_gradients_and_mapped_axes_take_the_other_way(rng):
    config = MoEConfig(64, 48, 4, 2, dtype="bfloat16")
    params = ExpertWeights(draw(rng, 4, 2, 48, 64, scale=0.1), draw(rng, 4, 64, 48, scale=0.1))
    x, ids, factors = draw(rng, 3, 64), jnp.asarray([[0, 1], [3, -1], [1, 2]], jnp.int32), jnp.ones((3, 2), jnp.float32)
    if compat.KERNELS_SUPPORTED:
        assert takes_few_rows(x, ids, params, config)

    def loss(x, factors, params, **how):
        return (apply_experts(x, ids, factors, params, config, **how) ** 2).sum()

    ours = jax.grad(loss, argnums=(0, 1, 2))(x, factors, params)
    theirs = jax.grad(lambda *a: loss(*a, implementation="portable"), argnums=(0, 1, 2))(x, factors, params)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)
    mapped = jax.vmap(lambda x: apply_experts(x, ids, factors, params, config))(jnp.stack([x, x * 2]))
    close(mapped[0], apply_experts(x, ids, factors, params, config), 1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_of_one_token_has_the_gradients_of_its_steps(masked):
    config = MoEConfig(64, 48, 32, 2, dtype="bfloat16", router=RouterConfig(use_correction_bias=True))
    params = init_params(jax.random.key(0), config, dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (1, 64), jnp.bfloat16)
    valid = jnp.asarray([False]) if masked else None

    def results(layer):
        def loss(params, x):
            y, stats = moe_with_stats(layer, params, x, valid=valid)
            return (y.astype(jnp.float32) ** 2).sum() + stats.load_balance_loss, stats.tokens_per_expert

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)(params, x)

    ours, theirs = results(build_moe(config)), results(build_moe(config, implementation="portable"))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.aot
@pytest.mark.skipif(not compat.KERNELS_SUPPORTED, reason=compat.KERNELS_REASON)
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_machine_code_spills_no_register(arch):
    report = aot_report("aot_few_tokens.py", arch)
    assert len(report) == 5 * 2 * (2 * 2 + 1)
    assert all(registers and not spilled for registers, spilled, _ in report.values()), report
