"""What quantisers must do with every kind of data: contracts F11-F18 and known failures of other implementations.

A name that ends in _bug_N refers to the failure's number in the project's log of public reports of quantiser bugs.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantize import (
    FORMATS,
    BlockFormat,
    FourOverSix,
    dequantize,
    exact,
    quantize,
    quantize_weights,
    swizzle_scales,
    unswizzle_scales,
)

KINDS = ["mxfp8", "mxfp8_floor", "mxfp4", "fp8_128", "nvfp4", "nvfp4_token_4o6"]  # one of each scale rule


@functools.partial(jax.jit, static_argnames=("fmt", "alignment", "layout"))
def q_(x, fmt, alignment=0, layout="row_major"):
    return quantize(x, fmt, alignment=alignment, layout=layout, implementation="reference")


@functools.partial(jax.jit, static_argnames=("fmt",))
def round_trip(x, fmt):
    return dequantize(quantize(x, fmt, implementation="reference"), jnp.float32, implementation="reference")


@functools.partial(jax.jit, static_argnames=("dtype",))
def dq_(q, dtype=jnp.float32):
    return dequantize(q, dtype, implementation="reference")


@functools.partial(jax.jit, static_argnames=("fmt",))
def q_with_scale(x, fmt, global_scale):
    return quantize(x, fmt, global_scale=global_scale, implementation="reference")


def row(*values, k=32, dtype=jnp.float32):
    """[1, k] with these leading values and zeros."""
    x = np.zeros((1, k), np.float32)
    x[0, : len(values)] = values
    return jnp.asarray(x).astype(dtype)


def as_bytes(a):
    a = np.asarray(a)
    return a.view(np.uint8) if a.ndim else a[None].view(np.uint8)


def normal(*shape, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, jnp.bfloat16)


# ---- F11-F18


def test_F11_e2m1_ties_saturation_and_packing():
    ties = jnp.asarray([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 100.0, -0.1, -0.0, -5.0], jnp.float32)
    codes = np.asarray(jax.jit(exact.e2m1_code)(ties))
    np.testing.assert_array_equal(codes, [0, 2, 2, 4, 4, 6, 6, 7, 7, 8, 8, 14])
    values = np.asarray(exact.e2m1_value(jnp.arange(16, dtype=jnp.uint8)))
    np.testing.assert_array_equal(
        np.asarray(exact.e2m1_code(jnp.asarray(values))), np.arange(16)
    )  # all codes round-trip
    q = q_(row(0.5, 1.0, -6.0, 3.0), "mxfp4")  # amax 6: scale 1
    assert as_bytes(q.data)[0, :2].tolist() == [0x21, 0x5F]  # low nibble is the even column (bug_36)


def test_F12_nvfp4_per_tensor_is_finite_for_zeros_and_for_1e30_beside_1e_minus_30():
    q = q_(jnp.zeros((2, 32), jnp.bfloat16), "nvfp4")
    assert not as_bytes(q.data).any() and not as_bytes(q.block_scale).any() and np.isfinite(q.global_scale)
    x = jnp.concatenate([jnp.full((1, 32), 1e30), jnp.full((1, 32), 1e-30)]).astype(jnp.bfloat16)
    y = np.asarray(round_trip(x, "nvfp4"))
    assert np.isfinite(y).all() and (y[1] == 0).all()
    np.testing.assert_allclose(y[0], 1e30, rtol=0.01)


@pytest.mark.parametrize("fmt", ["nvfp4_token", "nvfp4_token_4o6"])
def test_F13_per_token_rows_do_not_see_each_other(fmt):
    x = jnp.concatenate([jnp.zeros((1, 64)), normal(1, 64) * 1e-3, normal(1, 64) * 1e3], dtype=jnp.float32)
    q, y = q_(x, fmt), np.asarray(round_trip(x, fmt))
    assert np.isfinite(y).all()
    assert not as_bytes(q.data)[0].any() and not as_bytes(q.block_scale)[0].any() and q.global_scale[0] == 0
    for i in (1, 2):
        assert np.linalg.norm(y[i] - x[i]) < 0.12 * np.linalg.norm(x[i])
        alone = q_(x[i : i + 1], fmt.replace("_token", ""))
        np.testing.assert_array_equal(as_bytes(alone.data)[0], as_bytes(q.data)[i])
        np.testing.assert_array_equal(as_bytes(alone.block_scale)[0], as_bytes(q.block_scale)[i])
        assert alone.global_scale == q.global_scale[i]


def test_F14_per_token_and_per_tensor_are_different_contracts():
    x = jnp.concatenate([normal(1, 256) * 1e-3, normal(1, 256, seed=1) * 1e3], dtype=jnp.float32)

    def error(fmt):
        return np.linalg.norm(round_trip(x, fmt) - x, axis=1) / np.linalg.norm(x, axis=1)

    assert (error("nvfp4_token") < 0.12).all()
    assert error("nvfp4")[0] > 0.9 and error("nvfp4")[1] < 0.12
    assert q_(x, "nvfp4").format.global_scale == "tensor" and q_(x, "nvfp4").global_scale.shape == ()
    assert q_(x, "nvfp4_token").format.global_scale == "token" and q_(x, "nvfp4_token").global_scale.shape == (2,)


def test_F15_four_over_six_takes_the_smaller_error_and_ties_go_to_six():
    def make(top, error):
        return BlockFormat("t", "e2m1", 16, "e4m3", global_scale="token", four_over_six=FourOverSix(top, error))

    def loss(z, power):
        return (np.abs(np.asarray(z, np.float64) - np.asarray(y)) ** power).reshape(16, 4, 16).sum(-1)

    x = row(1.0, *[0.75] * 15, k=16)
    q = q_(x, make(256, "mae"))
    assert as_bytes(q.block_scale)[0, 0] == 0x7C and as_bytes(q.data)[0, 0] == 0x56  # scale 384, codes 6 (4) and 5 (3)
    np.testing.assert_array_equal(np.asarray(round_trip(x, make(256, "mae"))), np.asarray(x))
    q = q_(x, make(448, "mae"))  # 1.5*448 saturates: a tie, so 6
    assert as_bytes(q.block_scale)[0, 0] == 0x7E and as_bytes(q.data)[0, 0] & 15 == 7
    np.testing.assert_allclose(np.asarray(q.global_scale), 1 / 2688, rtol=1e-6)
    assert not as_bytes(q_(jnp.zeros((1, 16)), make(256, "mse")).block_scale).any()
    y = normal(16, 64).astype(jnp.float32)
    for error, power in (("mae", 1), ("mse", 2)):
        # The plain candidate with the same global scale is what 4-over-6 falls back to: no block may get worse.
        rule = make(256, error)
        q = q_(y, rule)
        plain = dq_(q_with_scale(y, "nvfp4_token", q.global_scale))
        chosen, six = loss(round_trip(y, rule), power), loss(plain, power)
        assert (chosen <= six * 1.0001 + 1e-12).all() and chosen.sum() < 0.95 * six.sum()
    for bad in (dict(e4m3_max=300), dict(error="max")):
        with pytest.raises(ValueError, match="300|max"):
            FourOverSix(**bad)


def test_F16_mxfp8_scale_bytes_and_exact_powers_of_two():
    amax = [1.0, 448.0, 449.0, 500.0, 0.0, 560.0]
    x = jnp.zeros((6, 32)).at[:, 3].set(jnp.asarray(amax))
    assert np.asarray(q_(x, "mxfp8").block_scale)[:, 0].tolist() == [119, 127, 128, 128, 0, 128]
    powers = np.float32(2.0) ** np.arange(-110, 128, dtype=np.float32)
    x = jnp.zeros((len(powers), 32)).at[:, 0].set(jnp.asarray(powers))
    np.testing.assert_array_equal(np.asarray(round_trip(x, "mxfp8"))[:, 0], powers)
    y = jnp.asarray(np.random.default_rng(0).uniform(0, 1e-37, (4, 32)), jnp.bfloat16)
    assert np.isfinite(np.asarray(round_trip(y, "mxfp8"))).all()
    z = normal(64, 128).astype(jnp.float32)
    clipped = np.abs(np.asarray(round_trip(z, "mxfp8"))).reshape(64, 4, 32).max(-1)
    assert (clipped >= np.abs(np.asarray(z)).reshape(64, 4, 32).max(-1) * (1 - 1 / 16)).all()  # no block clips


def test_F17_alignment_pads_columns_with_zeros_and_is_not_the_block_size_bug_38():
    x = normal(3, 2880)
    q = q_(x, "mxfp8", alignment=256)
    chex.assert_shape(q.data, (3, 3072))
    chex.assert_shape(q.block_scale, (3, 96))
    assert q.shape == (3, 2880) and not as_bytes(q.data)[:, 2880:].any() and not as_bytes(q.block_scale)[:, 90:].any()
    plain = q_(x, "mxfp8")
    chex.assert_shape(plain.data, (3, 2880))
    np.testing.assert_array_equal(as_bytes(plain.data), as_bytes(q.data)[:, :2880])
    np.testing.assert_array_equal(np.asarray(dq_(q)), np.asarray(dq_(plain)))
    chex.assert_shape(q_(normal(3, 64), "mxfp8").data, (3, 64))


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4", "nvfp4_token"])
def test_F18_swizzled_layout_is_the_swizzle_of_row_major_scales(fmt):
    x = normal(37, 160)
    flat, plain = q_(x, fmt, layout="swizzled"), q_(x, fmt)
    np.testing.assert_array_equal(np.asarray(flat.block_scale), np.asarray(swizzle_scales(plain.block_scale)))
    np.testing.assert_array_equal(as_bytes(flat.data), as_bytes(plain.data))
    np.testing.assert_array_equal(np.asarray(dq_(flat)), np.asarray(dq_(plain)))


def test_F18_swizzle_positions_and_inverse():
    s = jnp.asarray(np.random.default_rng(0).integers(1, 255, (130, 5)), jnp.uint8)
    flat = np.asarray(swizzle_scales(s))
    assert flat.shape == (2048,)
    for (m, c), at in {(1, 0): 16, (32, 0): 4, (0, 4): 512, (127, 3): 511, (128, 0): 1024, (129, 4): 1552}.items():
        assert flat[at] == s[m, c]
    np.testing.assert_array_equal(np.asarray(unswizzle_scales(jnp.asarray(flat), (130, 5))), np.asarray(s))
    stack = jnp.stack([s, s[::-1]])  # each matrix of a stack starts at a 128-row boundary of its own
    np.testing.assert_array_equal(np.asarray(swizzle_scales(stack))[1], np.asarray(swizzle_scales(s[::-1])))


def test_swizzle_padding_is_zero_and_the_tile_order_agrees_with_its_inverse_bug_22_bug_23():
    flat = np.asarray(swizzle_scales(jnp.full((1, 1), 0x38, jnp.uint8)))
    assert flat.shape == (512,) and flat[0] == 0x38 and not flat[1:].any()
    q = q_(normal(5, 2880), "mxfp8", layout="swizzled")  # 90 scale columns, padded to 92
    valid = np.asarray(swizzle_scales(jnp.ones((5, 90), jnp.uint8)))
    assert not np.asarray(q.block_scale)[valid == 0].any()


# ---- laws and quality


@pytest.mark.parametrize("fmt", KINDS)
def test_quantising_a_dequantised_array_changes_no_value(fmt):
    """DQ(Q(DQ(q))) == DQ(q) with the same global scale; where the block maximum keeps its binade, the bytes agree."""
    x = normal(8, 256)
    q = q_(x, fmt)
    y = dq_(q)
    again = q_with_scale(y, fmt, q.global_scale)
    if FORMATS[fmt].four_over_six or FORMATS[fmt].scale == "f32":
        # 4-over-6 may settle on the other, equally exact scale; a float32 scale may move by an ulp.
        np.testing.assert_allclose(np.asarray(dq_(again)), np.asarray(y), rtol=3e-7)
        return
    z = dq_(again)
    np.testing.assert_array_equal(np.asarray(z), np.asarray(y))
    third = q_with_scale(z, fmt, q.global_scale)
    chex.assert_trees_all_equal(jax.tree.map(as_bytes, third), jax.tree.map(as_bytes, again))
    same = as_bytes(again.block_scale) == as_bytes(q.block_scale)
    assert same.mean() > 0.8  # the maximum of some blocks rounds down to the top of the binade below
    keep = np.repeat(same, FORMATS[fmt].block * FORMATS[fmt].bits // 8, -1)
    np.testing.assert_array_equal(as_bytes(again.data)[keep], as_bytes(q.data)[keep])


# Signal-to-noise in dB on N(0,1): measured values of published implementations are 31.5-31.8 (8 bit), 30.7 (OCP floor),
# 18.8 (MXFP4), 20.4 (NVFP4), 21.2 (4-over-6).
SQNR_RANGE = {
    "mxfp8": (31.2, 32.0),
    "mxfp8_floor": (30.3, 31.1),
    "mxfp4": (18.4, 19.1),
    "mxfp4_floor": (18.4, 19.2),
    "nvfp4": (20.1, 20.8),
    "nvfp4_token": (20.1, 20.8),
    "nvfp4_4o6": (20.9, 21.6),
    "nvfp4_token_4o6": (20.9, 21.6),
    "fp8_128": (31.4, 32.2),
    "fp8_128_ue8m0": (31.1, 32.0),
    "fp8_128x128": (31.2, 32.0),
    "fp8_128x128_ue8m0": (31.1, 32.0),
}


@pytest.mark.parametrize("fmt", FORMATS)
def test_signal_to_noise_is_within_its_floor_and_ceiling(fmt):
    x = np.asarray(normal(128, 1024, seed=3)).astype(np.float64)
    noise = np.asarray(round_trip(jnp.asarray(x, jnp.bfloat16), fmt)).astype(np.float64) - x
    low, high = SQNR_RANGE[fmt]
    assert low <= 10 * np.log10((x**2).sum() / (noise**2).sum()) <= high


@pytest.mark.parametrize("fmt", KINDS)
def test_quantising_commutes_with_moving_rows(fmt):
    x = normal(8, 256) * jnp.exp2(jnp.arange(8.0)[:, None]).astype(jnp.bfloat16)
    order = np.array([3, 1, 5, 0, 2, 7, 4, 6])
    moved, q = q_(x[order], fmt), q_(x, fmt)
    np.testing.assert_array_equal(as_bytes(moved.data), as_bytes(q.data)[order])
    np.testing.assert_array_equal(as_bytes(moved.block_scale), as_bytes(q.block_scale)[order])
    assert FORMATS[fmt].row_local == (FORMATS[fmt].global_scale != "tensor")
    if FORMATS[fmt].row_local:
        alone = q_(x.at[1:].set(1e30), fmt)
        np.testing.assert_array_equal(as_bytes(alone.data)[0], as_bytes(q.data)[0])


# ---- NaN, infinity, zero, small


@pytest.mark.parametrize("fmt", [*KINDS, "fp8_128x128"])
def test_a_nan_gives_a_nan_scale_and_costs_only_its_block_bug_21(fmt):
    spec = FORMATS[fmt]
    x = normal(8, 256).at[0, 5].set(jnp.nan).at[0, 6].set(-jnp.nan)
    y, clean = np.asarray(round_trip(x, fmt)), np.asarray(round_trip(x.at[0, : spec.block].set(0), fmt))
    if spec.block_rows > 1:
        assert np.isnan(y[:, : spec.block]).all() and np.isfinite(y[:, spec.block :]).all()
        return
    assert np.isnan(y[0, : spec.block]).all()
    np.testing.assert_array_equal(y[0, spec.block :], clean[0, spec.block :])
    np.testing.assert_array_equal(y[1:], clean[1:])
    scale = as_bytes(q_(x, fmt).block_scale)[0]
    assert {"e8m0": scale[0] == 255, "e4m3": scale[0] == 0x7F, "f32": np.isnan(q_(x, fmt).block_scale[0, 0])}[
        spec.scale
    ]


@pytest.mark.parametrize("fmt", KINDS)
def test_infinity_saturates_or_is_nan_but_never_a_silent_small_number(fmt):
    x = normal(8, 256).at[0, 0].set(jnp.inf).at[0, 1].set(-jnp.inf)
    y, spec = np.asarray(round_trip(x, fmt)), FORMATS[fmt]
    if spec.scale == "e4m3" or spec.rule == "floor":
        assert np.isnan(y[0, : spec.block]).all()
    else:
        assert y[0, 0] > 1e38 and y[0, 1] < -1e38
    assert np.isfinite(y[0, spec.block :]).all() and (y[0, spec.block :] != 0).mean() > 0.8


@pytest.mark.parametrize("fmt", [*KINDS, "fp8_128x128"])
def test_zero_rows_are_exact_zeros_bug_8_bug_10_bug_11_bug_43_bug_44(fmt):
    x = normal(8, 256).at[1].set(0)
    assert (np.asarray(round_trip(x, fmt))[1] == 0).all()
    q = q_(jnp.zeros((8, 256), jnp.bfloat16), fmt)
    y = np.asarray(round_trip(jnp.zeros((8, 256), jnp.bfloat16), fmt))
    assert (y == 0).all() and not as_bytes(q.data).any()
    assert all(np.isfinite(np.asarray(leaf).astype(np.float32)).all() for leaf in jax.tree.leaves(q))


def test_negative_zero_keeps_its_sign():
    for fmt, code in (("mxfp8", 0x80), ("fp8_128", 0x80), ("mxfp4", 0x88), ("nvfp4_token", 0x88)):
        assert (as_bytes(q_(jnp.full((1, 128), -0.0), fmt).data) == code).all(), fmt


def test_tiny_mxfp8_blocks_keep_their_values_bug_1_bug_3_bug_43():
    x = row(2.8094e-36, -1.4988e-36, 9.1835e-40, dtype=jnp.bfloat16)  # the third is subnormal
    q = q_(x, "mxfp8")
    assert np.asarray(q.block_scale)[0, 0] == 1 and as_bytes(q.data)[0, :4].tolist() == [0x77, 0xF0, 0x1A, 0x00]
    low = q_(row(2.0**-126, 2.0**-140, -(2.0**-149)), "mxfp8")  # byte 0 stands for 2^-127, a subnormal scale
    assert np.asarray(low.block_scale)[0, 0] == 0
    y = as_bytes(dq_(low)).view(np.uint32)[0, :3]
    assert y[0] == 0x00800000 and y[1] == 0 and y[2] == 0x80000000  # 2^-126; the others are below 2^-9 * 2^-127
    one = q_(row(2.0**-127), "mxfp8")
    assert as_bytes(dq_(one)).view(np.uint32)[0, 0] == 0x00400000
    assert as_bytes(dq_(one, jnp.bfloat16)).view(np.uint16)[0, 0] == 0x0040


def test_f32_maximum_is_not_rounded_to_bf16_before_its_exponent_is_taken_bug_4():
    assert np.asarray(q_(row(1.9999), "mxfp8_floor").block_scale)[0, 0] == 119
    assert np.asarray(q_(row(np.nextafter(np.float32(448), np.float32(500))), "mxfp8").block_scale)[0, 0] == 128


def test_scales_round_up_so_that_nothing_clips_bug_5_bug_6_bug_16():
    q = q_(row(560.0), "mxfp8")
    assert np.asarray(q.block_scale)[0, 0] == 128 and as_bytes(q.data)[0, 0] == 0x79
    assert np.asarray(dq_(q))[0, 0] == 576
    assert (
        np.asarray(round_trip(row(7.9), "mxfp4"))[0, 0] == 8 and np.asarray(round_trip(row(11.9), "mxfp4"))[0, 0] == 12
    )
    assert np.asarray(round_trip(row(7.9), "mxfp4_floor"))[0, 0] == 6  # what OCP's rule does


def test_dormant_expert_rows_do_not_turn_into_nan_bug_7():
    x = row(1e-36, k=128)
    assert (as_bytes(q_(x, "fp8_128").data) & 0x7F == 0).all()
    for fmt in ("fp8_128", "fp8_128_ue8m0", "nvfp4", "nvfp4_token", "mxfp8"):
        assert np.isfinite(np.asarray(round_trip(x, fmt))).all(), fmt


def test_each_expert_has_its_own_tensor_scale_and_gate_and_up_share_one_bug_13_bug_12():
    w = normal(2, 2, 16, 64).astype(jnp.float32) * jnp.asarray([1.0, 2.0**-10]).reshape(2, 1, 1, 1)
    w = w.at[:, 1].multiply(0.25)
    q = jax.jit(lambda w: quantize_weights(w, "nvfp4", scale_axes=(1,)))(w)
    g = np.asarray(q.global_scale)
    assert g.shape == (2, 2) and (g[:, 0] == g[:, 1]).all() and g[0, 0] > 100 * g[1, 0]
    y = np.asarray(dq_(q))
    for e in range(2):
        noise = ((y[e] - np.asarray(w[e])) ** 2).sum() / (np.asarray(w[e]) ** 2).sum()
        assert 19.5 < -10 * np.log10(noise) < 22
    alone = np.asarray(jax.jit(lambda w: quantize_weights(w, "nvfp4").global_scale)(w))
    assert alone.shape == (2, 2) and (alone[:, 1] < alone[:, 0]).all()


def test_global_scale_is_a_multiplier_and_is_used_bug_14_bug_40():
    x = normal(4, 64).astype(jnp.float32)
    g = jnp.float32(1 / 300)
    q = q_with_scale(x, "nvfp4", g)
    assert q.global_scale == g
    np.testing.assert_allclose(np.asarray(dq_(q)), np.asarray(x), atol=0.7)
    assert 19.5 < -10 * np.log10(np.mean((np.asarray(dq_(q)) - x) ** 2) / np.mean(x**2)) < 21.5


def test_power_of_two_scales_are_rounded_before_quantising_bug_15():
    x = jnp.linspace(-3, 3, 128, dtype=jnp.float32)[None]
    q = q_(x, "fp8_128_ue8m0")
    assert np.asarray(q.block_scale)[0, 0] == 0.0078125 and np.asarray(dq_(q))[0, 0] == -3.0


@pytest.mark.parametrize("fmt", [*KINDS, "fp8_128x128"])
def test_payload_is_made_with_the_stored_scale_under_jit_bug_16_bug_42(fmt):
    """Both in one jit equals the two apart: no cast round trip is dropped, no unrounded scale is used."""
    x = normal(8, 256)
    apart = dq_(jax.block_until_ready(q_(x, fmt)))
    np.testing.assert_array_equal(np.asarray(round_trip(x, fmt)), np.asarray(apart))
    assert (np.asarray(apart) != np.asarray(x).astype(np.float32)).any()


def test_ties_go_to_the_even_code_bug_18():
    q = q_(row(6.0, 0.75, 1.75, 3.5), "mxfp4")
    assert np.asarray(dq_(q))[0, :4].tolist() == [6.0, 1.0, 2.0, 4.0]


# ---- shapes and arguments


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "nvfp4_token_4o6", "fp8_128x128"])
def test_empty_stacked_and_ragged_shapes(fmt):
    spec = FORMATS[fmt]
    for shape in ((0, 256), (1, 2, 3, 160)):
        q = q_(jnp.ones(shape, jnp.bfloat16), fmt)
        assert q.shape == shape
        tiles = -(-shape[-2] // spec.block_rows)
        chex.assert_shape(q.block_scale, (*shape[:-2], tiles, -(-shape[-1] // spec.block)))
        y = np.asarray(dq_(q))
        assert y.shape == shape
        np.testing.assert_allclose(y, np.ones(shape), rtol=0.04)


def test_float16_and_float32_inputs_equal_their_values_in_float32():
    x = normal(2, 64).astype(jnp.float16).at[0, 1].set(6e-8)  # a float16 subnormal
    for fmt in ("mxfp8", "nvfp4_token"):
        a, b = q_(x, fmt), q_(x.astype(jnp.float32), fmt)
        chex.assert_trees_all_equal(jax.tree.map(as_bytes, a), jax.tree.map(as_bytes, b))


def test_rows_beyond_the_count_do_not_change_the_others():
    x = normal(6, 64)
    poisoned = x.at[4:].set(1e30).at[5, 3].set(jnp.nan)
    for fmt in ("mxfp8", "nvfp4"):
        f = jax.jit(lambda x, n, fmt=fmt: quantize(x, fmt, num_valid_rows=n))
        a, b = f(poisoned, jnp.int32(4)), q_(x[:4], fmt)
        np.testing.assert_array_equal(as_bytes(a.data)[:4], as_bytes(b.data))
        np.testing.assert_array_equal(as_bytes(a.block_scale)[:4], as_bytes(b.block_scale))


def test_errors_say_what_is_wrong_and_what_to_do():
    x = jnp.ones((2, 64), jnp.bfloat16)
    for call, words in (
        (lambda: quantize(x, "fp7"), "not known.*mxfp8"),
        (lambda: quantize(x.astype(jnp.int32), "mxfp8"), "bfloat16.*cast"),
        (lambda: quantize(x, "mxfp8", global_scale=jnp.float32(1)), "no global scale"),
        (lambda: quantize(x, "nvfp4_token", global_scale=jnp.float32(1)), "one scale per row"),
        (lambda: quantize(x, "mxfp8", alignment=48), "multiple of the block"),
        (lambda: quantize(x, "fp8_128", layout="swizzled"), "row_major"),
        (lambda: quantize(x, "mxfp8", layout="column"), "choose"),
        (lambda: quantize(x, "mxfp8", implementation="cuda"), "choose"),
        (lambda: quantize(jnp.ones((2, 15)), "nvfp4"), "odd number"),
        (lambda: quantize_weights(jnp.ones((2, 3, 4)), "nvfp4", scale_axes=(1,)), "leading axes"),
        (lambda: swizzle_scales(jnp.ones((2, 2), jnp.float32)), "one-byte"),
        (lambda: dequantize(jnp.ones((2, 32)), jnp.float32), "takes a QTensor"),
        (lambda: dequantize(quantize(jnp.ones((2, 32)), "mxfp8"), jnp.int32), "floats.*int32"),
        (lambda: unswizzle_scales(jnp.zeros(512, jnp.uint8), (200, 5)), "bytes"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
