"""The Hopper grouped matmul on a Hopper GPU: every kernel and configuration at its edge shapes, against float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matmul_helpers import edge_sizes, exact, normal, relative

from pallas_kernels.grouped_matmul import Gate, Problem, gated_product, mosaic_entry, tuning
from pallas_kernels.quantize import dequantize, quantize, quantize_weights

pytestmark = pytest.mark.gpu
N, K, G = 384, 512, 16
DECODE_VARIANTS = [
    dict(block_t=8, consumers=4, chunks=1, stages=4, per_sm=1, pieces=2),
    dict(block_t=16, consumers=3, chunks=1, stages=4, per_sm=1),
    dict(block_t=24, consumers=2, chunks=1, stages=4, per_sm=1),
    dict(block_t=8, consumers=1, chunks=2, stages=4, per_sm=2, rows=32),
]


@pytest.fixture(autouse=True)
def hopper():
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    problem = Problem("forward", 64, N, K, G, "bfloat16", "bfloat16", "bfloat16", device.platform, capability)
    reason = mosaic_entry.why_not(problem)
    if reason is not None:
        pytest.skip(reason)


def sizes_of(kind, m, rng):
    if kind == "edges":
        sizes = edge_sizes(m)
    elif kind == "zipf":
        p = 1 / np.arange(1, G + 1)
        sizes = rng.multinomial(m, rng.permutation(p / p.sum()))
    elif kind == "half in one":
        sizes = np.full(G, m // 2 // (G - 1))
        sizes[5] = m - sizes.sum() + sizes[5]
    elif kind == "tail":
        sizes = rng.multinomial(m // 2, np.full(G, 1 / G))
    else:
        sizes = np.zeros(G, int)
    return sizes.astype(np.int32)


def poison(m, n):
    """Leaves NaN in the memory that the next output of this size is likely to take."""
    jnp.full((m, n), jnp.nan, jnp.bfloat16).block_until_ready()


@pytest.mark.parametrize("fmt", [None, "mxfp8", "mxfp4", "nvfp4", "fp8_128x128"])
@pytest.mark.parametrize("m", [7, 64, 193, 2047])
def test_products_equal_float32_for_ragged_sizes(rng, fmt, m):
    x, w = normal(rng, m, K), normal(rng, G, N, K)
    q = w if fmt is None else quantize_weights(w, fmt)
    plain = w if fmt is None else dequantize(q, jnp.float32)
    run = jax.jit(lambda x, w, s: mosaic_entry.forward(x, w, s, out_dtype=jnp.bfloat16))
    for kind in ("edges", "zipf", "half in one", "tail", "none"):
        sizes = sizes_of(kind, m, rng)
        poison(m, N)
        y = run(x.at[sizes.sum() :].set(jnp.nan), q, jnp.asarray(sizes))
        assert relative(y, exact(x, plain, jnp.asarray(sizes))) < 4e-3, kind
        assert not np.any(np.asarray(y[sizes.sum() :], np.float32)), kind


@pytest.mark.parametrize("rows", [8, 16, 64, 10**9])
@pytest.mark.parametrize("kernel", ["prefill", "decode"])
def test_every_shipped_configuration_is_right_at_edge_sizes(rng, monkeypatch, kernel, rows):
    monkeypatch.setattr(mosaic_entry, "DECODE_ROWS", 0 if kernel == "prefill" else 10**9)
    config = tuning.lookup(kernel, weights="bfloat16", rows=rows, n=N, k=K)
    monkeypatch.setattr(tuning, "lookup", lambda *a, **k: config)
    m = 1500
    x, w, sizes = normal(rng, m, K), normal(rng, G, N, K), sizes_of("edges", m, rng)
    poison(m, N)
    y = mosaic_entry.forward(x, w, jnp.asarray(sizes), out_dtype=jnp.bfloat16)
    assert relative(y, exact(x, w, jnp.asarray(sizes))) < 4e-3


TILES = [
    {},
    {"cluster": 2},
    {"block_n": 192, "lead": 2},
    {"block_m": 256, "block_n": 128, "prefetch": 4},
    {"block_m": 256, "block_n": 128, "cluster": 2, "lead": 2},
    {"cluster": 2, "share": "weights"},
    {"cluster": 2, "share": "weights", "lead": 2, "prefetch": 4},
]


@pytest.mark.parametrize("m", [1, 65, 193, 8191])
@pytest.mark.parametrize("config", TILES, ids=str)
def test_tiles_of_every_shape_give_the_products_at_edge_sizes(rng, monkeypatch, config, m):
    monkeypatch.setattr(mosaic_entry, "DECODE_ROWS", 0)
    n = 448  # an even number of tiles of 128 and of 256 columns, as clusters want, of which the last is not whole
    x, w = normal(rng, m, K), normal(rng, G, n, K)
    with tuning.override({"prefill": config}):
        run = jax.jit(lambda x, w, s: mosaic_entry.forward(x, w, s, out_dtype=jnp.bfloat16))
        for kind in ("edges", "zipf", "half in one", "tail"):
            sizes = sizes_of(kind, m, rng)
            poison(m, n)
            for _ in range(3):  # what one warpgroup overwrites too early is not overwritten every time
                y = run(x, w, jnp.asarray(sizes))
                assert relative(y, exact(x, w, jnp.asarray(sizes))) < 4e-3, kind


def test_nan_in_one_group_reaches_no_other(rng):
    m = 1500
    x, w, sizes = normal(rng, m, K), normal(rng, G, N, K), sizes_of("edges", m, rng)
    ends = np.cumsum(sizes)
    bad = slice(ends[2], ends[3])
    y = mosaic_entry.forward(x.at[bad].set(jnp.nan), w, jnp.asarray(sizes), out_dtype=jnp.bfloat16)
    bad_rows = np.isnan(np.asarray(y, np.float32)).any(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(bad_rows), np.arange(ends[2], ends[3]))
    dw = mosaic_entry.drhs(y.at[bad].set(jnp.nan), x, jnp.asarray(sizes), num_groups=G, out_dtype=jnp.bfloat16)
    bad_groups = np.isnan(np.asarray(dw, np.float32)).any(axis=(1, 2))
    np.testing.assert_array_equal(np.flatnonzero(bad_groups), [3])


@pytest.mark.parametrize("m", [192, 2044])
@pytest.mark.parametrize("config", [{}, {"cluster": 1, "block_m": 128}], ids=str)
def test_fp8_products_equal_those_of_the_dequantised_operands(rng, monkeypatch, config, m):
    monkeypatch.setattr(mosaic_entry, "DECODE_ROWS", 0)
    monkeypatch.setattr(tuning, "lookup", lambda *a, **k: config)
    x, w = quantize(normal(rng, m, K), "fp8_128"), quantize_weights(normal(rng, G, 512, K), "fp8_128x128")
    for kind in ("edges", "zipf", "tail", "none"):
        sizes = sizes_of(kind, m, rng)
        y = mosaic_entry.forward(x, w, jnp.asarray(sizes), out_dtype=jnp.bfloat16)
        expected = exact(dequantize(x, jnp.float32), dequantize(w, jnp.float32), jnp.asarray(sizes))
        assert relative(y, expected) < 4e-3, kind


def test_gradients_equal_float32_and_empty_groups_are_exactly_zero(rng):
    m = 2047
    x, w, dy = normal(rng, m, K), normal(rng, G, N, K), normal(rng, m, N)
    for kind in ("edges", "zipf", "half in one", "tail", "none"):
        sizes = sizes_of(kind, m, rng)
        poison(m, K)
        dx = mosaic_entry.dlhs(dy, w, jnp.asarray(sizes), out_dtype=jnp.bfloat16)
        assert relative(dx, exact(dy, jnp.swapaxes(w, 1, 2), jnp.asarray(sizes))) < 4e-3, kind
        total, row = sizes.sum(), 0
        dw = mosaic_entry.drhs(
            dy.at[total:].set(jnp.nan),
            x.at[total:].set(jnp.nan),
            jnp.asarray(sizes),
            num_groups=G,
            out_dtype=jnp.float32,
        )
        for g, size in enumerate(sizes):
            a, b = (np.asarray(v[row : row + size], np.float32) for v in (dy, x))
            assert relative(dw[g], a.T @ b) < 1e-4, (kind, g)
            row += size


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
def test_the_gated_product_equals_float32(rng, kind):
    m, gate = 1500, Gate(kind)
    x, w = normal(rng, m, K), normal(rng, G, 2, N, K) * jnp.bfloat16(0.1)
    sizes = jnp.asarray(sizes_of("edges", m, rng))
    poison(m, N)
    y = mosaic_entry.gated(x, w, sizes, gate, out_dtype=jnp.bfloat16)
    expected = gated_product(exact(x, w[:, 0], sizes), exact(x, w[:, 1], sizes), gate)
    assert relative(y, expected.at[sizes.sum() :].set(0)) < 4e-3


@pytest.mark.parametrize("fmt", [None, "mxfp8", "mxfp4", "nvfp4", "nvfp4_token", "fp8_128x128"])
@pytest.mark.parametrize("m", [7, 193, 2047])
def test_the_gated_product_of_few_rows_or_quantised_weights_with_bias_equals_float32(rng, fmt, m):
    if fmt is None and m > 1000:
        pytest.skip("many rows of BF16 weights are for the kernel without a bias")
    x, w = normal(rng, m, K), normal(rng, G, 2, N, K) * jnp.bfloat16(0.1)
    bias = jnp.asarray(rng.standard_normal((G, 2, N), np.float32))
    q = w if fmt is None else quantize(w, fmt) if fmt == "nvfp4_token" else quantize_weights(w, fmt)
    plain = w if fmt is None else dequantize(q, jnp.float32)
    for kind, spread in (("silu", "edges"), ("gelu", "zipf"), ("swiglu_oai", "tail"), ("silu", "none")):
        sizes = jnp.asarray(sizes_of(spread, m, rng))
        owner = np.repeat(np.arange(G + 1), [*np.asarray(sizes), m - int(sizes.sum())])
        of_rows = jnp.concatenate([bias, jnp.zeros_like(bias[:1])])[owner]
        poison(m, N)
        y = mosaic_entry.gated(x, q, sizes, Gate(kind), bias=bias, out_dtype=jnp.bfloat16)
        halves = [exact(x, plain[:, i], sizes) + of_rows[:, i] for i in (0, 1)]
        expected = gated_product(*halves, Gate(kind)).at[sizes.sum() :].set(0)
        assert relative(y, expected) < 4e-3, (kind, spread)


@pytest.mark.parametrize("fmt", [None, "mxfp8", "mxfp4", "nvfp4", "fp8_128x128"])
@pytest.mark.parametrize(("m", "k"), [(60, 768), (193, 768), (60, 4352), (60, 320), (2047, 320)])
def test_k_may_be_no_multiple_of_a_stage_or_a_swizzle(rng, fmt, m, k):
    n = 448
    x, w, sizes = normal(rng, m, k), normal(rng, G, n, k), jnp.asarray(sizes_of("edges", m, rng))
    q = w if fmt is None else quantize_weights(w, fmt)
    plain = w if fmt is None else dequantize(q, jnp.float32)
    poison(m, n)
    y = mosaic_entry.forward(x, q, sizes, out_dtype=jnp.bfloat16)
    assert relative(y, exact(x, plain, sizes)) < 4e-3


@pytest.mark.parametrize(("held", "offset"), [(G, 0), (5, 3), (5, 0)])
def test_a_part_of_the_groups_gives_its_rows_and_zeros_elsewhere(rng, held, offset):
    m = 200
    x, w, sizes = normal(rng, m, K), normal(rng, G, N, K), sizes_of("edges", m, rng)
    mine = slice(offset, offset + held)
    poison(m, N)
    y = mosaic_entry.forward(x, w[mine], jnp.asarray(sizes), group_offset=jnp.int32(offset), out_dtype=jnp.bfloat16)
    others = jnp.zeros_like(w).at[mine].set(w[mine])
    assert relative(y, exact(x, others, jnp.asarray(sizes))) < 4e-3


@pytest.mark.parametrize("groups", [1, 31, 32, 128, 1100])
def test_any_number_of_groups_is_added_up_in_the_kernel(rng, groups):
    m = 300
    sizes = rng.multinomial(m, np.full(groups, 1 / groups)).astype(np.int32)
    x, w = normal(rng, m, 128), normal(rng, groups, 64, 128)
    y = mosaic_entry.forward(x, w, jnp.asarray(sizes), out_dtype=jnp.bfloat16)
    assert relative(y, exact(x, w, jnp.asarray(sizes))) < 4e-3


@pytest.mark.parametrize("fmt", [None, "nvfp4", "mxfp4", "fp8_128x128"])
@pytest.mark.parametrize("config", DECODE_VARIANTS, ids=str)
def test_decode_variants_that_no_rule_ships_are_right_at_edge_sizes(rng, fmt, config):
    m, n = 193, 320  # tiles reach over the end of N
    x, w = normal(rng, m, K), normal(rng, G, n, K)
    q = w if fmt is None else quantize_weights(w, fmt)
    plain = w if fmt is None else dequantize(q, jnp.float32)
    with tuning.override({"decode": config}):
        for spread in ("edges", "zipf", "tail"):
            sizes = jnp.asarray(sizes_of(spread, m, rng))
            poison(m, n)
            y = mosaic_entry.forward(x, q, sizes, out_dtype=jnp.bfloat16)
            assert relative(y, exact(x, plain, sizes)) < 4e-3, spread


@pytest.mark.parametrize("fmt", [None, "nvfp4", "fp8"])
@pytest.mark.parametrize("m", [96, 2047])
def test_rows_that_nobody_reads_need_not_be_written(rng, fmt, m):
    x, w, sizes = normal(rng, m, K), normal(rng, G, N, K), jnp.asarray(sizes_of("tail", m, rng))
    if fmt == "fp8":
        x, w = quantize(x, "fp8_128"), quantize_weights(w, "fp8_128x128")
    elif fmt:
        w = quantize_weights(w, fmt)
    whole, part = (
        mosaic_entry.forward(x, w, sizes, out_dtype=jnp.bfloat16, zero_tail=zero_tail) for zero_tail in (True, False)
    )
    total = int(sizes.sum())
    np.testing.assert_array_equal(np.asarray(part[:total], np.float32), np.asarray(whole[:total], np.float32))
