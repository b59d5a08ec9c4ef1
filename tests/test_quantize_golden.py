"""The quantisers equal vectors made by independent implementations (tests/data/golden_quant.npz), eagerly and jitted.

Sources of the vectors: "ao_" torchao, "np_" a numpy/ml_dtypes implementation, "t_" exhaustive tables, made on CPU from
seeded data. No tolerance, except that FP8 scales from another formula may differ by one ulp.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quantize import (
    BlockFormat,
    FourOverSix,
    dequantize,
    exact,
    quantize,
    reference,
    swizzle_scales,
    unswizzle_scales,
)

GOLDEN = np.load(pathlib.Path(__file__).parent / "data" / "golden_quant.npz")
X = GOLDEN["x"].view(ml_dtypes.bfloat16)  # [4, 8, 256]


def four_over_six(scale, e4m3_max, error):
    rule = FourOverSix(e4m3_max=e4m3_max, error=error)
    return BlockFormat("golden", "e2m1", 16, "e4m3", global_scale=scale, four_over_six=rule)


CASES = {
    "ao_mxfp8_rceil": "mxfp8",
    "ao_mxfp8_floor": "mxfp8_floor",
    "ao_mxfp4_rceil": "mxfp4",
    "ao_mxfp4_floor": "mxfp4_floor",
    "np_nvfp4_tensor": "nvfp4",
    "np_nvfp4_token": "nvfp4_token",
    "np_fp8_1x128_f32": "fp8_128",
    "np_fp8_1x128_ue8m0": "fp8_128_ue8m0",
    "np_4o6_256mse_tensor": "nvfp4_4o6",
    "np_4o6_256mse_token": "nvfp4_token_4o6",
    "np_4o6_256mae_tensor": four_over_six("tensor", 256, "mae"),
    "np_4o6_256mae_token": four_over_six("token", 256, "mae"),
    "np_4o6_448mae_tensor": four_over_six("tensor", 448, "mae"),
    "np_4o6_448mae_token": four_over_six("token", 448, "mae"),
}


QUANTIZE = jax.jit(quantize, static_argnames=("fmt", "implementation"))
DEQUANTIZE = jax.jit(dequantize, static_argnums=(1,))


def as_bytes(a):
    return np.asarray(a).view(np.uint8)


EAGER = ("ao_mxfp8_rceil", "np_nvfp4_token")


@pytest.mark.parametrize("name, jitted", [*((name, True) for name in CASES), *((name, False) for name in EAGER)])
def test_quantiser_equals_golden_bytes(name, jitted):
    run = functools.partial(QUANTIZE if jitted else quantize, fmt=CASES[name], implementation="reference")
    for i, data in enumerate(GOLDEN["names"]):
        q = run(jnp.asarray(X[i]))
        want = GOLDEN[name + ("_q" if name + "_q" in GOLDEN else "_p")][i]
        np.testing.assert_array_equal(as_bytes(q.data), want, err_msg=f"data, {data}")
        scale = GOLDEN[name + "_s"][i]
        np.testing.assert_array_equal(np.asarray(q.block_scale).view(scale.dtype), scale, err_msg=f"scales, {data}")
        if q.global_scale is not None:
            got, want = np.asarray(q.global_scale).reshape(-1), np.float32(1) / GOLDEN[name + "_senc"][i]
            if q.format.global_scale == "token":  # a zero row has decode scale 0 here, 1 there
                want = np.where(np.abs(X[i].astype(np.float32)).max(-1) == 0, np.float32(0), want)
            np.testing.assert_array_equal(got, want, err_msg=f"global scale, {data}")


@pytest.mark.parametrize("name, suffix", [("fp8_128x128", "f32"), ("fp8_128x128_ue8m0", "ue8m0")])
def test_ragged_128x128_weight_blocks_equal_golden(name, suffix):
    q = QUANTIZE(jnp.asarray(GOLDEN["x_w"].view(ml_dtypes.bfloat16)), fmt=name, implementation="reference")
    np.testing.assert_array_equal(as_bytes(q.data), GOLDEN[f"np_fp8_128x128_{suffix}_w_q"])
    np.testing.assert_array_equal(np.asarray(q.block_scale), GOLDEN[f"np_fp8_128x128_{suffix}_w_s"])


def test_fp8_128_agrees_with_torchaos_other_formula_to_one_ulp():
    for i, data in enumerate(GOLDEN["names"]):
        if data == "zero":  # other epsilon
            continue
        q = QUANTIZE(jnp.asarray(X[i]), fmt="fp8_128")
        ulps = np.abs(np.asarray(q.block_scale).view(np.int32) - GOLDEN["ao_fp8_1x128_s"][i].view(np.int32))
        assert ulps.max() <= 1
        steps = np.abs(as_bytes(q.data).astype(int) - GOLDEN["ao_fp8_1x128_q"][i].astype(int))
        assert steps.max() <= 1 and (steps != 0).mean() <= 0.0015


def test_nvfp4_agrees_with_torchao_outside_ties_and_its_scale_floor():
    for i, data in enumerate(GOLDEN["names"]):
        q = QUANTIZE(jnp.asarray(X[i]), fmt="nvfp4")
        scale, theirs = as_bytes(q.block_scale), GOLDEN["ao_nvfp4_s"][i]
        differ = scale != theirs
        assert (theirs[differ] == 8).all() and (scale[differ] < 8).all(), data  # torchao's floor is byte 8 = 2^-6
        ties = np.unpackbits(GOLDEN["np_nvfp4_tensor_tiebits"][i], axis=-1).astype(bool)
        codes = np.stack([as_bytes(q.data) & 15, as_bytes(q.data) >> 4], -1).reshape(8, 256)
        their_codes = GOLDEN["ao_nvfp4_p"][i]
        their_codes = np.stack([their_codes & 15, their_codes >> 4], -1).reshape(8, 256)
        clear = ~ties & ~np.repeat(differ, 16, -1)
        np.testing.assert_array_equal(codes[clear], their_codes[clear], err_msg=data)


def test_F11_every_e2m1_midpoint_and_its_neighbours():
    x = jnp.asarray(GOLDEN["x_tie"].view(ml_dtypes.bfloat16))
    for fmt, name in (
        ("nvfp4", "tie_np_nvfp4_tensor"),
        ("mxfp4", "tie_ao_mxfp4_rceil"),
        ("mxfp4_floor", "tie_ao_mxfp4_floor"),
    ):
        q = QUANTIZE(x, fmt=fmt)
        np.testing.assert_array_equal(as_bytes(q.data), GOLDEN[name + "_p"], err_msg=fmt)
        np.testing.assert_array_equal(as_bytes(q.block_scale), GOLDEN[name + "_s"], err_msg=fmt)


@pytest.mark.parametrize("shape", [(130, 5), (8, 16), (257, 3)])
def test_F18_swizzled_scales_equal_golden(shape):
    s = GOLDEN[f"sw_in_{shape[0]}x{shape[1]}"]
    flat = swizzle_scales(jnp.asarray(s))
    np.testing.assert_array_equal(np.asarray(flat), GOLDEN[f"ao_sw_{shape[0]}x{shape[1]}"])
    np.testing.assert_array_equal(np.asarray(unswizzle_scales(flat, shape)), s)


def test_element_casts_equal_the_exhaustive_tables():
    bits = jnp.arange(65536, dtype=jnp.uint32) << 16
    nan = np.isnan(np.asarray(exact.from_bits(bits)))
    e4m3 = np.asarray(jax.jit(lambda b: exact.e4m3_code(exact.from_bits(b)))(bits))
    np.testing.assert_array_equal(e4m3[~nan], GOLDEN["t_bf16_to_e4m3_sat"][~nan])
    e2m1 = np.asarray(jax.jit(lambda b: exact.e2m1_code(exact.from_bits(b)))(bits))
    np.testing.assert_array_equal(e2m1[~nan], GOLDEN["t_bf16_to_e2m1_sat"][~nan])


@pytest.mark.parametrize("element, block, name", [("e4m3", 32, "mxfp8"), ("e2m1", 32, "mxfp4")])
@pytest.mark.parametrize("rule, suffix", [("ceil", "rceil"), ("floor", "floor")])
def test_e8m0_scale_of_every_bf16_maximum_equals_the_table(element, block, name, rule, suffix):
    table = GOLDEN[f"t_bf16amax_to_e8m0_{name}_{suffix}"]
    bits = jnp.arange(len(table), dtype=jnp.uint32) << 16
    got = jax.jit(lambda b: reference.e8m0_scale(b, BlockFormat("t", element, block, "e8m0", rule=rule)))(bits)
    np.testing.assert_array_equal(np.asarray(got), table)


def test_element_values_equal_the_tables():
    codes = jnp.arange(256, dtype=jnp.uint8)
    np.testing.assert_array_equal(np.asarray(exact.e4m3_value(codes)), GOLDEN["t_e4m3_val"].view(np.float32))
    e2m1 = np.asarray(exact.e2m1_value(codes[:16]))
    np.testing.assert_array_equal(e2m1.view(np.uint32), GOLDEN["t_e2m1_val"])


def test_golden_bytes_decode_to_the_golden_matmul():
    """The dequantised operands give the float64 product that was stored with the vectors."""
    a = QUANTIZE(jnp.asarray(X[0]), fmt="mxfp8")
    w = QUANTIZE(jnp.asarray(GOLDEN["x_gemm_w"].view(ml_dtypes.bfloat16)), fmt="mxfp8")
    product = np.asarray(DEQUANTIZE(a, jnp.float32), np.float64) @ np.asarray(DEQUANTIZE(w, jnp.float32), np.float64).T
    np.testing.assert_allclose(product, GOLDEN["ao_mxfp8_gemm_out_f64"], rtol=1e-12, atol=1e-9)
