"""4-over-6 of one thread: its codes for every float32, and its blocks on hard data, equal the reference."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from quantize_numpy import Numpy
from test_quantize_lane import words_of

from pallas_kernels.quantize import (
    BlockFormat,
    FourOverSix,
    four_over_six,
    lane,
    reference,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
O = Numpy()  # noqa: E741
KINDS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
MAXIMA = {
    m: BlockFormat("4o6", "e2m1", 16, "e4m3", global_scale="tensor", four_over_six=FourOverSix(m)) for m in (256, 448)
}
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
N = 4000


# ---- codes


def check_codes(y):
    """Both ways of finding codes, on float32 values in [0, 7) of which there is a multiple of 8."""
    y = y.reshape(8, -1)
    code = sum((y >= t if up else y > t).astype(np.uint32) for t, up in zip(TIES, [0, 1, 0, 1, 0, 1, 0], strict=True))
    want = sum(code[i] << np.uint32(4 * i) for i in range(8))
    np.testing.assert_array_equal(four_over_six.codes_to_seven(O, list(y)), want)
    low = (y <= 4.5).all(0)
    np.testing.assert_array_equal(np.asarray(four_over_six.codes_to_six(O, list(y), 16, 1 << 16))[low], want[low])
    return y.size, low.sum() * 8


def test_codes_around_every_boundary_and_of_numbers_of_all_sizes(rng):
    boundaries = np.concatenate([TIES, [0.5, 1, 1.5, 2, 3, 4, 4.5, 6]]).astype(np.float32).view(np.uint32)
    near = (boundaries.astype(np.int64)[:, None] + np.arange(-20000, 20000)).astype(np.uint32).view(np.float32)
    for values in near:
        check_codes(values)
    small = 2.0 ** rng.uniform(-149, 2.1, 80000)
    check_codes(np.concatenate([[0] * 8, small]).astype(np.float32))
    check_codes(rng.uniform(0, 6.999, 80000).astype(np.float32))


@pytest.mark.slow
def test_codes_of_every_float32_from_a_64th_to_7():
    first, last = (int(np.float32(v).view(np.uint32)) for v in (2.0**-6, 7))
    seen = np.sum(
        [
            check_codes(np.arange(a, min(a + 2**21, last), dtype=np.uint32).view(np.float32))
            for a in range(first, last, 2**21)
        ],
        0,
    )
    assert seen[0] == last - first and seen[1] > 0.9 * (np.float32(4.5).view(np.uint32) - first)


# ---- blocks


def scales(rng, kind, n):
    """Decode scales g: of any value, as a bfloat16 maximum gives them, powers of two (where many codes tie)."""
    if kind == "any":
        return (2.0 ** rng.uniform(-20, 5, n)).astype(np.float32)
    power = (2.0 ** rng.integers(-12, 8, n)).astype(np.float32)
    if kind == "power":
        return power
    amax = rng.uniform(1, 2, n).astype(ml_dtypes.bfloat16).astype(np.float32) * power
    return np.float32(1) / (np.float32(1536) / amax)


def signs(rng, x):
    return x * rng.choice([-1, 1], x.shape)


def to_maximum(x, top):
    return x / np.abs(x).max(1, keepdims=True) * np.asarray(top)[:, None]


def blocks_normal(rng, g):
    """Maxima over the whole range of scales."""
    return to_maximum(rng.standard_normal((N, 16)), g * np.exp(rng.uniform(np.log(2.0**-6 * 6), np.log(300 * 6), N)))


def blocks_at_code_ties(rng, g):
    """Most values where a scale's codes tie, and the block's maximum such that it has that scale."""
    s = E4M3[rng.integers(8, 120, N)][:, None]
    at = rng.choice([*TIES, 0, 0.5, 1, 1.5, 2, 3, 4, 4.5, 6], (N, 16))
    y = np.where(rng.random((N, 16)) < rng.random((N, 1)), at, rng.uniform(0, 4, (N, 16)))
    y[:, 0] = rng.choice([6, 4, 5.75, 6.25, 4.125, 3.9], N)
    return signs(rng, y * s * g[:, None])


def blocks_at_the_limits(rng, g):
    """Scales around the smallest normal one, the largest, and those between which the quick way goes."""
    base = rng.choice([2.0**-6, 2.0**-7, 2.0**-8, 2.0**-9, 2.0**-10, 298.6, 300.0, 448.0, 500.0, 1e4, 1e-5], N)
    base *= rng.choice([1, 1 - 2.0**-8, 1 + 2.0**-8, 1.3, 0.7], N)
    return to_maximum(rng.standard_normal((N, 16)), base * 6 * g)


def blocks_with_ties_of_the_candidates(rng, g):
    """Small integers times the scale; whole E2M1 codes times a block scale."""
    integers = rng.integers(0, 13, (N, 16)) * rng.choice([0.5, 1, 2, 4, 8, 16, 32, 64], (N, 1))
    whole = rng.choice([0, 0.5, 1, 1.5, 2, 3, 4, 6], (N, 16)) * E4M3[rng.integers(8, 120, N)][:, None]
    return signs(rng, np.where(rng.random((N, 1)) < 0.5, integers, whole) * g[:, None])


def blocks_with_odd_values(rng, g):
    """Zeros of both signs, whole blocks of them, NaN, infinity, one value alone, all values near the maximum."""
    x = rng.standard_normal((N, 16)) * g[:, None] * 500
    what = rng.random((N, 16))
    x = np.where(what < 0.5, np.where(what < 0.25, -0.0, 0.0), x)
    x[: N // 8], x[N // 8 : N // 4] = 0, -0.0
    x[N // 4 : N // 3, 1:] = -0.0
    x[N // 3 : N // 2][what[N // 3 : N // 2] > 0.98] = np.nan
    x[N // 2 : 2 * N // 3][what[N // 2 : 2 * N // 3] > 0.98] = -np.inf
    tail = slice(3 * N // 4, N)
    x[tail] = signs(rng, rng.uniform(0.7, 1, x[tail].shape)) * g[tail, None] * 1500
    return x


def blocks_far_from_the_scale(rng, g):
    return rng.standard_normal((N, 16)) * 2.0 ** rng.integers(-130, 126, (N, 1))


BLOCKS = [
    blocks_normal,
    blocks_at_code_ties,
    blocks_at_the_limits,
    blocks_with_ties_of_the_candidates,
    blocks_with_odd_values,
    blocks_far_from_the_scale,
]


@jax.jit
def reference_(x, g):
    return {m: reference.quantize(x, fmt, global_scale=g) for m, fmt in MAXIMA.items()}


def run_blocks(x, kind, g, fmt):
    """(codes [M, 8], scales [M]) of blocks x [M, 16] with tensor scales g [M]."""
    nv = lane.NvScale(O, *lane.given_scale(O, g, fmt.e4m3_max), four_over_six=True)
    out, scale = four_over_six.encode_block(O, words_of(x), kind, nv, fmt.four_over_six)
    return np.stack([np.asarray(w) for w in out], -1).view(np.uint8).reshape(len(x), -1), np.asarray(scale) & 0xFF


@pytest.mark.parametrize("how", ["any", "maximum", "power"])
@pytest.mark.parametrize("make", BLOCKS, ids=[f.__name__ for f in BLOCKS])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_equal_the_reference(kind, make, how, rng):
    g = scales(rng, how, N)
    if make is blocks_far_from_the_scale:
        g = (g * 2.0 ** rng.integers(-95, 100, N)).astype(np.float32)
    with np.errstate(all="ignore"):
        x = make(rng, g).astype(KINDS[kind])
        want = reference_(jnp.asarray(x), jnp.asarray(g))
        for m, fmt in MAXIMA.items():
            codes, found = run_blocks(x, kind, g, fmt)
            np.testing.assert_array_equal(found, np.asarray(want[m].block_scale).view(np.uint8)[:, 0])
            np.testing.assert_array_equal(codes, np.asarray(want[m].data))
    if make is blocks_normal:
        assert O.rare < (0.004 if kind == "bf16" else 0.01)  # else the quick way has not been tested


def test_rows_so_large_or_small_that_all_blocks_go_the_slow_way(rng):
    for exponent, slow in ((-105, True), (-92, True), (-88, False), (98, False), (105, True), (110, True)):
        g = np.full(N, 2.0**exponent * 1.37, np.float32)
        x = (rng.standard_normal((N, 16)) * 2.0 ** rng.uniform(0, 9, (N, 1)) * g[0]).astype(ml_dtypes.bfloat16)
        codes, found = run_blocks(x, "bf16", g, MAXIMA[256])
        assert O.rare == 1 if slow else O.rare < 0.01
        want = reference_(jnp.asarray(x), jnp.asarray(g))[256]
        np.testing.assert_array_equal(found, np.asarray(want.block_scale).view(np.uint8)[:, 0])
        np.testing.assert_array_equal(codes, np.asarray(want.data))
