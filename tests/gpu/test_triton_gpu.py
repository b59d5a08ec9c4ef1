"""The Triton kernels on a GPU of compute capability 8.0 or later, where jax-triton is installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matmul_helpers import edge_sizes, exact, normal, relative, weights, with_nan

from pallas_kernels.grouped_matmul import Problem, grouped_matmul, triton_entry
from pallas_kernels.quantize import QTensor, dequantize, quantize

pytestmark = pytest.mark.gpu
G = 16
SHAPES = [(384, 512), (200, 328)]  # N, K; the second divides no tile


@pytest.fixture(autouse=True)
def able():
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    problem = Problem("forward", 64, 128, 128, G, "bfloat16", "bfloat16", "bfloat16", device.platform, capability)
    reason = triton_entry.why_not(problem)
    if reason is not None:
        pytest.skip(reason)


def product_and_gradient(x, w, sizes, dy):
    """(x . w, gradient of x) through the public function."""

    def run(x, w, sizes, dy):
        y, pull = jax.vjp(lambda x: grouped_matmul(x, w, sizes, implementation="triton"), x)
        return y, *pull(dy)

    return jax.jit(run)(x, w, sizes, dy)


@pytest.mark.parametrize("fmt", [None, "mxfp8", "mxfp4", "nvfp4", "fp8_128x128"])
@pytest.mark.parametrize("m", [1, 193, 2047])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_and_gradients_equal_float32_for_ragged_sizes(rng, fmt, m, n, k):
    x, (weight, plain), dy = normal(rng, m, k), weights(fmt, G, n, k), normal(rng, m, n)
    sizes = edge_sizes(m)
    total, rest = sizes.sum(), slice(sizes.sum(), None)
    y, dx = product_and_gradient(with_nan(x, rest), weight, jnp.asarray(sizes), with_nan(dy, rest))
    assert relative(y, exact(x, plain, sizes)) < 4e-3
    assert relative(dx, exact(dy, np.swapaxes(plain, 1, 2), sizes)) < 4e-3
    assert not np.any(np.asarray(y[total:], np.float32)) and not np.any(np.asarray(dx[total:], np.float32))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_gradient_of_the_weights_equals_float32_and_is_zero_for_empty_groups(rng, n, k):
    m = 2047
    x, (w, _), dy, sizes = normal(rng, m, k), weights(None, G, n, k), normal(rng, m, n), edge_sizes(m)
    bad = slice(int(sizes[:3].sum()), int(sizes[:4].sum()))  # group 3
    dirty = with_nan(x, bad, slice(sizes.sum(), None))

    @jax.jit
    def run(x, w, dy):
        _, pull = jax.vjp(lambda w: grouped_matmul(x, w, jnp.asarray(sizes), implementation="triton"), w)
        return pull(dy)[0]

    dw, row = run(dirty, w, dy), 0
    for g, size in enumerate(sizes):
        a, b = (np.asarray(v[row : row + size], np.float32) for v in (dy, x))
        if g == 3:
            assert np.isnan(np.asarray(dw[g], np.float32)).any()
        else:
            assert relative(dw[g], a.T @ b) < 4e-3, g
        row += size


def test_a_global_scale_for_each_output_column_and_a_part_of_the_groups(rng):
    (n, k), m = SHAPES[0], 1500
    x, (weight, _), sizes = normal(rng, m, k), weights("nvfp4", 4, n, k), edge_sizes(m)
    columns = weight.global_scale[:, None] * jnp.exp2((jnp.arange(n) % 5).astype(jnp.float32))[None, :]
    scaled = QTensor(weight.data, weight.block_scale, columns, weight.format, weight.k)
    plain = dequantize(scaled, jnp.float32)
    y = grouped_matmul(x, scaled, jnp.asarray(sizes), group_offset=3, implementation="triton")
    start, end = int(sizes[:3].sum()), int(sizes[:7].sum())
    assert relative(y[start:end], exact(x[start:end], plain, sizes[3:7])) < 4e-3
    assert not np.any(np.asarray(y[:start], np.float32)) and not np.any(np.asarray(y[end:], np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp8_floor", "mxfp4", "fp8_128", "fp8_128_ue8m0", "nvfp4", "nvfp4_token"])
def test_quantisation_gives_the_bytes_of_the_reference(rng, fmt, dtype):
    x = rng.standard_normal((65, 768), np.float32) * np.exp2(rng.integers(-30, 30, (65, 1)).astype(np.float32))
    x[1] = 0.25 * rng.integers(-30, 30, 768)
    x[2, ::2], x[2, 1::2] = 0.0, -0.0
    x[3, ::70], x[4, ::90] = np.nan, np.inf
    x = jnp.asarray(x).astype(dtype)
    for options in ({}, {"global_scale": jnp.float32(0.0123)}) if fmt == "nvfp4" else ({},):
        ours, plain = (
            jax.jit(lambda x, how=how, o=options: quantize(x, fmt, implementation=how, **o))(x)
            for how in ("triton", "reference")
        )
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
            a, b = (np.atleast_1d(np.asarray(v)).view(np.uint8) for v in (a, b))
            np.testing.assert_array_equal(a, b)
