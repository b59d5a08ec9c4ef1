"""Few rows on a Hopper GPU, against float32: 4-bit weights by the warps' own matrix instruction, and groups that have
more rows than are likely."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matmul_helpers import assert_gated, exact, normal, relative, weights, with_nan
from test_grouped_matmul_gpu import hopper, poison, sizes_of  # noqa: F401

from pallas_kernels.grouped_matmul import Gate, mosaic_entry, tuning

pytestmark = pytest.mark.gpu
G, N, K = 16, 320, 2880  # neither is a multiple of a tile or of 128 bytes
CONFIGS = [
    dict(block_t=8, consumers=4, chunks=2, stages=2, per_sm=1, warp=True),
    dict(block_t=8, consumers=3, chunks=2, stages=3, per_sm=1, warp=True),
    dict(block_t=8, consumers=2, chunks=2, stages=2, per_sm=1, warp=True),
    dict(block_t=16, consumers=2, chunks=1, stages=4, per_sm=1, warp=True),
]


def forward():
    """The product, compiled at its first call, which is when the tuning counts."""
    return jax.jit(lambda x, w, sizes: mosaic_entry.forward(x, w, sizes, out_dtype=jnp.bfloat16))


def assert_products(rng, fmt, m, n, k, spreads):
    x, (w, plain) = normal(rng, m, k), weights(fmt, G, n, k)
    product = forward()
    for spread in spreads:
        sizes = sizes_of(spread, m, rng)
        poison(m, n)
        y = product(with_nan(x, slice(sizes.sum(), None)), w, jnp.asarray(sizes))
        assert relative(y, exact(x, plain, sizes)) < 4e-3, spread


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_products_equal_float32(rng, fmt, config):
    with tuning.override({"decode": config}):
        assert_products(rng, fmt, 193, N, K, ("edges", "zipf", "tail", "none"))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_no_stage_is_overwritten_while_it_is_read(rng, fmt):
    """Tiles of 16 tokens had wrong products once in 40 calls."""
    m = 193
    x, (w, plain) = normal(rng, m, K), weights(fmt, G, N, K)
    sizes = sizes_of("zipf", m, rng)
    wanted = exact(x, plain, sizes)
    product = forward()
    with tuning.override({"decode": CONFIGS[-1]}):
        for call in range(100):
            assert relative(product(x, w, jnp.asarray(sizes)), wanted) < 4e-3, call


@pytest.mark.parametrize("fmt", ["nvfp4_token", "mxfp4"])
@pytest.mark.parametrize("config", CONFIGS[2:], ids=str)
def test_gated_products_with_bias_equal_float32(rng, fmt, config):
    m, gate = 150, Gate("swiglu_oai")
    x, (w, plain) = normal(rng, m, K), weights(fmt, G, 2, N, K, scale=0.1)
    bias = rng.standard_normal((G, 2, N), np.float32)
    with tuning.override({"decode_gated": config}):
        product = jax.jit(
            lambda x, w, sizes, bias: mosaic_entry.gated(x, w, sizes, gate, bias=bias, out_dtype=jnp.bfloat16)
        )
        for spread in ("edges", "tail"):
            sizes = sizes_of(spread, m, rng)
            poison(m, N)
            y = product(x, w, jnp.asarray(sizes), bias)
            assert_gated(y, x, plain, bias, sizes, gate, spread)


@pytest.mark.parametrize("fmt", [None, "fp8_128x128", "mxfp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("m", [8, 24, 50])
def test_groups_that_have_more_rows_than_are_likely(rng, fmt, m):
    """1, 2 or 4 rows of a tile are always copied, the others of 8 only where a group has more."""
    assert_products(rng, fmt, m, 320, 2048, ("half in one", "zipf", "tail", "none"))
