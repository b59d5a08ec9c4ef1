"""The table of formats, its sizes, and properties that hold for any data (hypothesis)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jmoe import formats
from pallas_kernels.quantize import exact


def test_row_bytes_are_the_bytes_of_a_quantised_row():
    for name in formats.wire_names():
        if name in formats.PLAIN_BYTES:
            assert formats.row_bytes(name, 96) == 96 * jnp.dtype(name).itemsize
            continue
        q = jax.eval_shape(
            lambda x, name=name: formats.quantize(x, name), jax.ShapeDtypeStruct((5, 2880), jnp.bfloat16)
        )
        scalar = 4 if formats.FORMATS[name].global_scale == "tensor" else 0
        assert formats.row_bytes(name, 2880) * 5 + scalar == q.nbytes, name


def test_wire_names_hold_no_weight_formats_and_errors_list_them():
    assert "fp8_128x128" not in formats.wire_names() and "nvfp4_token" in formats.wire_names()
    with pytest.raises(ValueError, match="128 rows.*choose one of bfloat16"):
        formats.row_bytes("fp8_128x128", 256)
    with pytest.raises(ValueError, match="not known; choose one of bfloat16"):
        formats.row_bytes("int3", 256)


def test_bits_per_value_and_descriptions():
    assert formats.bits_per_value("mxfp8") == 8.25 and formats.bits_per_value("nvfp4") == 4.5
    assert formats.bits_per_value("fp8_128x128") == pytest.approx(8.002, abs=1e-3)
    assert formats.describe(None) == "bfloat16, unquantised, 16 bits per value"
    lines = {formats.describe(name) for name in formats.FORMATS}
    assert len(lines) == len(formats.FORMATS)
    assert formats.describe("nvfp4_token").startswith("E2M1 values, E4M3 scale per 16, float32 scale per token")


def test_sqnr_in_decibels():
    x = np.ones(4)
    assert formats.sqnr(x, x) == float("inf")
    assert formats.sqnr(x, x + np.array([0.1, -0.1, 0.1, -0.1])) == pytest.approx(20.0)
    with pytest.raises(ValueError, match=r"one shape, got \(4,\) and \(1,\)"):  # nothing is broadcast
        formats.sqnr(x, x[:1])


def test_a_qtensor_is_a_pytree_whose_format_is_static():
    q = jax.jit(lambda x: formats.quantize(x, "nvfp4_token"))(jnp.ones((2, 64), jnp.bfloat16))
    leaves, tree = jax.tree.flatten(q)
    assert len(leaves) == 3 and jax.tree.unflatten(tree, leaves).format is q.format
    assert q.nbytes == 2 * 32 + 2 * 4 + 2 * 4 and q.ndim == 2


DIVIDE = jax.jit(exact.exact_div)
SCALE = jax.jit(lambda x, n: exact.scale_pow2(exact.f32_bits(x), n))
ROUND_TRIPS = {
    name: jax.jit(lambda x, name=name: formats.dequantize(formats.quantize(x, name), jnp.float32))
    for name in ("mxfp8", "mxfp4", "nvfp4_token", "nvfp4_token_4o6", "fp8_128")
}
positive = st.floats(2.0**-60, 2.0**60, width=32)


@settings(max_examples=60, deadline=None)
@given(a=hnp.arrays(np.float32, 64, elements=positive), b=hnp.arrays(np.float32, 64, elements=positive))
def test_exact_division_is_correctly_rounded(a, b):
    np.testing.assert_array_equal(np.asarray(DIVIDE(a, b)), a / b)


@settings(max_examples=60, deadline=None)
@given(
    bits=hnp.arrays(np.uint32, 64, elements=st.integers(0, 2**32 - 1)),
    n=hnp.arrays(np.int32, 64, elements=st.integers(-60, 127)),
)
def test_scaling_by_a_power_of_two_is_exact_for_every_bit_pattern(bits, n):
    x = bits.view(np.float32)
    got = np.asarray(SCALE(x, n)).view(np.uint32)
    with np.errstate(all="ignore"):
        exact = np.ldexp(x.astype(np.float64), n)
        want = exact.astype(np.float32)
    finite = np.isfinite(x) & np.isfinite(want)
    normal = finite & (np.abs(exact) >= 2.0**-126)
    np.testing.assert_array_equal(got[normal], want.view(np.uint32)[normal])
    small = finite & ~normal  # truncated rather than rounded
    assert (np.abs((got[small] & 0x7FFFFFFF).astype(int) - (want.view(np.uint32)[small] & 0x7FFFFFFF)) <= 1).all()
    assert (np.isnan(got.view(np.float32)) == np.isnan(x)).all()


@settings(max_examples=40, deadline=None)
@given(
    x=hnp.arrays(np.float32, (2, 128), elements=st.floats(-(2.0**40), 2.0**40, width=32)),
    name=st.sampled_from(sorted(ROUND_TRIPS)),
)
def test_every_value_is_within_half_a_step_of_its_block(x, name):
    """|x^ - x| <= amax * (half the largest step of the element type, with what the rounding of the scale adds)."""
    y, fmt = ROUND_TRIPS[name](x), formats.FORMATS[name]
    block = np.abs(x).reshape(2, -1, fmt.block).max(-1)
    bound = {"e4m3": 1 / 14, "e2m1": 1 / 3}[fmt.element]
    error = np.abs(np.asarray(y, np.float64) - x).reshape(2, -1, fmt.block).max(-1)
    # Below the smallest scale of a block in its row, and below that of any row (g >= 2^-116, times 2^-9, times 1/2).
    floor = np.maximum(np.abs(x).max(-1, keepdims=True) * 2.0**-17, 2.0**-126) if fmt.scale == "e4m3" else 1e-9
    assert (error <= bound * block + floor).all()
    assert (np.sign(np.asarray(y)) * np.sign(x) >= 0).all()


@settings(max_examples=30, deadline=None)
@given(
    x=hnp.arrays(np.float32, (2, 128), elements=st.floats(-(2.0**20), 2.0**20, width=32)),
    n=st.integers(-20, 20),
    name=st.sampled_from(["mxfp8", "mxfp4", "nvfp4_token", "nvfp4_token_4o6"]),
)
def test_a_power_of_two_moves_through_the_quantiser(x, n, name):
    x = np.where(np.abs(x) < 2.0**-40, np.float32(0), x)
    y = ROUND_TRIPS[name](x)
    z = ROUND_TRIPS[name](x * np.float32(2.0**n))
    np.testing.assert_array_equal(np.asarray(z), np.asarray(y) * np.float32(2.0**n))
