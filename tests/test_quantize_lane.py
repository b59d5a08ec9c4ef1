"""The per-thread arithmetic of the GPU kernels, run with numpy registers on hard data, equals the reference."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from quantize_numpy import Numpy, U

from pallas_kernels.quantize import BlockFormat, FourOverSix, get_format, lane, quantize
from pallas_kernels.quantize.encode import encode_unit

O = Numpy()  # noqa: E741


def words_of(x):
    """[M, V] -> V words (f32) or V/2 words of the threads' registers, each [M]."""
    if x.dtype == np.float32:
        return [U(x[:, i].view(np.uint32)) for i in range(x.shape[1])]
    b = x.view(np.uint16).astype(np.uint32)
    return [U(b[:, i] | b[:, i + 1] << 16) for i in range(0, x.shape[1], 2)]


def hard_rows(rng, block, dtype):
    """Blocks [M, block]: normal, of every magnitude, with outliers, subnormal, zero, -0, NaN, infinity, ties."""
    m = 512
    x = rng.standard_normal((m, block)).astype(np.float32)
    x[64:256] *= np.float32(2.0) ** rng.integers(-120, 120, (192, 1)).astype(np.float32)
    x[256:320] *= np.where(rng.random((64, block)) < 0.05, 300, 1)
    x[320:340] *= np.float32(2.0**-126)
    x[340:350] = 0
    x[350:360] = -0.0
    x[360, 3], x[361, 0], x[362, 1], x[363, 2] = np.nan, -np.nan, np.inf, -np.inf
    x[364:400] = np.round(x[364:400] * 4) / 4
    x[400:420, 1:] = 0
    x[420:440] = np.float32(3e38) * np.sign(x[420:440])
    x[440:460, 1:] *= np.float32(2.0**-100)
    with np.errstate(over="ignore"):
        return x.astype(dtype)


KINDS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def run_lane(x, kind, fmt, params=None):
    """Codes (bytes) [M, ...] and scales [M] of the blocks x [M, B], each block held by one thread."""
    words = words_of(x)
    nv = params and params(lane.amax_bits(O, words, kind))
    out, scale = encode_unit(O, words, kind, lane.to_floats(O, words, kind), 1, nv, fmt)
    scale = np.asarray(scale) if fmt.scale == "f32" else np.asarray(scale) & 0xFF
    return np.stack([np.asarray(w) for w in out], -1).view(np.uint8).reshape(len(x), -1), scale


QUANTIZE = jax.jit(quantize, static_argnames=("fmt", "implementation"))
NV_FORMATS = [
    BlockFormat("plain", "e2m1", 16, "e4m3", global_scale="token"),
    *(
        BlockFormat("fos", "e2m1", 16, "e4m3", global_scale="token", four_over_six=FourOverSix(top, error))
        for top, error in ((256, "mse"), (448, "mae"))
    ),
]


@pytest.mark.filterwarnings("ignore:(overflow|invalid|divide|underflow):RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_floor", "mxfp4", "mxfp4_floor", "fp8_128", "fp8_128_ue8m0"])
def test_one_threads_block_equals_the_reference(name, kind, rng):
    fmt = get_format(name)
    x = hard_rows(rng, fmt.block, KINDS[kind])
    with np.errstate(all="ignore"):
        codes, scales = run_lane(x, kind, fmt)
    q = QUANTIZE(jnp.asarray(x), fmt=fmt, implementation="reference")
    want = np.asarray(q.block_scale)[:, 0]
    if fmt.scale == "f32":
        scales, want = scales.view(np.float32), want.view(np.float32)
    np.testing.assert_array_equal(scales, want)
    np.testing.assert_array_equal(codes, np.asarray(q.data).view(np.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", range(len(NV_FORMATS)), ids=["plain", "4o6_256_mse", "4o6_448_mae"])
def test_one_threads_nvfp4_block_and_row_scale_equal_the_reference(index, kind, rng):
    """Rows of four blocks: the row scale comes from the row's finite maximum, as in the per-token kernel."""
    fmt = NV_FORMATS[index]
    wide = rng.standard_normal((241, 64)).astype(np.float32) * np.float32(2.0) ** np.arange(-120, 121)[:, None]
    with np.errstate(over="ignore"):
        x = np.concatenate([hard_rows(rng, 16, KINDS[kind]), wide.astype(KINDS[kind]).reshape(-1, 16)])
    rows = x.reshape(-1, 64)

    def params(amax):
        per_row = np.where(np.asarray(amax) >= lane.INF, 0, amax).reshape(-1, 4).max(1)
        s, g, stored, large = lane.row_scale(O, U(np.repeat(per_row, 4)), fmt.e4m3_max)
        params.stored = np.asarray(stored)[::4]
        return lane.NvScale(O, s, g, large, four_over_six=fmt.four_over_six is not None)

    with np.errstate(all="ignore"):
        codes, scales = run_lane(x, kind, fmt, params)
    q = QUANTIZE(jnp.asarray(rows), fmt=fmt, implementation="reference")
    np.testing.assert_array_equal(params.stored, np.asarray(q.global_scale))
    np.testing.assert_array_equal(scales.reshape(-1, 4), np.asarray(q.block_scale).view(np.uint8))
    np.testing.assert_array_equal(codes.reshape(-1, 32), np.asarray(q.data))


@pytest.mark.parametrize("kind", ["silu", "swiglu_oai"])
def test_the_gated_product_of_one_thread_is_the_formula_and_keeps_nan(kind):
    values = np.float32([-np.inf, -1e30, -90, -7.5, -1, -1e-30, 0, 0.3, 6.9, 7.1, 88, 1e30, np.inf, np.nan])
    gate, up = (a.reshape(-1) for a in np.meshgrid(values, values))
    with np.errstate(all="ignore"):
        got = lane.swiglu(O, gate, up, kind, 1.702, 7.0)
    if kind == "silu":
        want = jax.nn.silu(gate) * up
    else:
        clipped = jnp.minimum(gate, 7.0)
        want = clipped * jax.nn.sigmoid(1.702 * clipped) * (jnp.clip(up, -7.0, 7.0) + 1)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-35)
