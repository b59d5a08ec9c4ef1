"""The Hopper grouped matmul on a Hopper GPU: every kernel and configuration at its edge shapes, against float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matmul_helpers import EDGES, assert_gated, edge_sizes, exact, normal, relative, weights, with_nan

from pallas_kernels.grouped_matmul import Gate, Problem, gated_product, mosaic_entry, tuning
from pallas_kernels.quantize import dequantize, quantize

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


def run(op, **options):
    """One of mosaic_entry's functions in BF16, jitted; group sizes are data."""
    return jax.jit(lambda a, b, sizes: getattr(mosaic_entry, op)(a, b, sizes, out_dtype=jnp.bfloat16, **options))


@pytest.mark.parametrize("fmt", [None, "mxfp8", "mxfp4", "nvfp4", "fp8_128x128"])
@pytest.mark.parametrize("m", [7, 193, 2047])
def test_products_equal_float32_for_ragged_sizes(rng, fmt, m):
    x, (w, plain), product = normal(rng, m, K), weights(fmt, G, N, K), run("forward")
    for kind in ("edges", "zipf", "half in one", "tail", "none"):
        sizes = sizes_of(kind, m, rng)
        poison(m, N)
        y = product(with_nan(x, slice(sizes.sum(), None)), w, jnp.asarray(sizes))
        assert relative(y, exact(x, plain, sizes)) < 4e-3, kind
        assert not np.any(np.asarray(y[sizes.sum() :], np.float32)), kind


@pytest.mark.parametrize(("kernel", "rows"), [("prefill", 10**9), ("decode", 8), ("decode", 16), ("decode", 64)])
def test_every_shipped_configuration_is_right_at_edge_sizes(rng, monkeypatch, kernel, rows):
    monkeypatch.setattr(mosaic_entry, "DECODE_ROWS", 0 if kernel == "prefill" else 10**9)
    config = tuning.lookup(kernel, weights="bfloat16", rows=rows, n=N, k=K)
    m = 1500
    x, (w, plain), sizes = normal(rng, m, K), weights(None, G, N, K), sizes_of("edges", m, rng)
    poison(m, N)
    with tuning.override({kernel: config}):
        y = run("forward")(x, w, jnp.asarray(sizes))
    assert relative(y, exact(x, plain, sizes)) < 4e-3


TILES = [
    {},
    {"cluster": 2},
    {"block_n": 192, "lead": 2},
    {"block_m": 256, "block_n": 128},
    {"block_m": 256, "block_n": 128, "cluster": 2, "lead": 2},
    {"cluster": 2, "share": "weights"},
    {"cluster": 2, "share": "weights", "lead": 2},
    {"cluster": 2, "share": "weights", "lead": 2, "slab": 128},
    {"cluster": 2, "share": "weights", "lead": 2, "slab": 144, "out_slots": 1},
]


def edge_cases(m, rng):
    """(name, sizes) of G groups: every kind of spread, and every edge as the number of rows in all."""
    yield from ((kind, sizes_of(kind, m, rng)) for kind in ("edges", "zipf", "half in one", "tail"))
    for total in EDGES:
        if total <= m:
            yield f"{total} rows", rng.multinomial(total, np.full(G, 1 / G)).astype(np.int32)
    around = np.asarray([72, 80, 81, 96, 97, 112, 128, 129, 132, 143, 144, 145, 255, 256, 257, 300])  # slabs and pairs
    if around.sum() <= m:
        yield "around slabs", around.astype(np.int32)


@pytest.mark.parametrize("m", [1, 193, 8191])
@pytest.mark.parametrize("config", TILES, ids=str)
def test_tiles_of_every_shape_give_the_products_at_edge_sizes(rng, monkeypatch, config, m):
    monkeypatch.setattr(mosaic_entry, "DECODE_ROWS", 0)
    n = 448  # an even number of tiles of 128 and of 256 columns, as clusters want, of which the last is not whole
    x, (w, plain) = normal(rng, m, K), weights(None, G, n, K)
    with tuning.override({"prefill": config}):
        product = run("forward")
        for kind, sizes in edge_cases(m, rng):
            expected = exact(x, plain, sizes)
            poison(m, n)
            for _ in range(3):  # what one warpgroup overwrites too early is not overwritten every time
                assert relative(product(x, w, jnp.asarray(sizes)), expected) < 4e-3, kind


@pytest.mark.parametrize("config", [{}, {"lead": 2}, *(c for c in TILES if "share" in c)], ids=str)
def test_tiles_of_transposed_and_gated_weights(rng, config):
    m, n = 2600, 512
    x, (w, plain) = normal(rng, m, K), weights(None, G, K, n)
    sizes = dict(edge_cases(m, rng))["around slabs"]
    dy = normal(rng, m, K)
    with tuning.override({"dlhs": config, "gated": config}):
        dx = run("dlhs")(dy, w, jnp.asarray(sizes))
        assert relative(dx, exact(dy, np.swapaxes(plain, 1, 2), sizes)) < 4e-3
        both, plain = weights(None, G, 2, 256, K, scale=0.1)
        y = mosaic_entry.gated(x, both, jnp.asarray(sizes), Gate("silu"), out_dtype=jnp.bfloat16)
    assert relative(y, gated_product(*(jnp.asarray(exact(x, plain[:, i], sizes)) for i in (0, 1)), Gate("silu"))) < 4e-3


def test_nan_in_one_group_reaches_no_other(rng):
    m = 1500
    x, (w, _), sizes = normal(rng, m, K), weights(None, G, N, K), sizes_of("edges", m, rng)
    ends = np.cumsum(sizes)
    bad = slice(ends[2], ends[3])
    y = run("forward")(with_nan(x, bad), w, jnp.asarray(sizes))
    bad_rows = np.isnan(np.asarray(y, np.float32)).any(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(bad_rows), np.arange(ends[2], ends[3]))
    dw = run("drhs", num_groups=G)(y, x, jnp.asarray(sizes))
    bad_groups = np.isnan(np.asarray(dw, np.float32)).any(axis=(1, 2))
    np.testing.assert_array_equal(np.flatnonzero(bad_groups), [3])


@pytest.mark.parametrize("m", [192, 2044])
@pytest.mark.parametrize("config", [{}, {"cluster": 1, "block_m": 128}], ids=str)
def test_fp8_products_equal_those_of_the_dequantised_operands(rng, monkeypatch, config, m):
    monkeypatch.setattr(mosaic_entry, "DECODE_ROWS", 0)
    x, (w, plain) = jax.jit(lambda x: quantize(x, "fp8_128"))(normal(rng, m, K)), weights("fp8_128x128", G, 512, K)
    exact_x = jax.jit(lambda x: dequantize(x, jnp.float32))(x)
    with tuning.override({"fp8": config}):
        product = run("forward")
        for kind in ("edges", "zipf", "tail", "none"):
            sizes = sizes_of(kind, m, rng)
            assert relative(product(x, w, jnp.asarray(sizes)), exact(exact_x, plain, sizes)) < 4e-3, kind


def test_gradients_equal_float32_and_empty_groups_are_exactly_zero(rng):
    m = 2047
    x, (w, plain), dy = normal(rng, m, K), weights(None, G, N, K), normal(rng, m, N)
    dlhs, drhs = run("dlhs"), run("drhs", num_groups=G)
    for kind in ("edges", "zipf", "half in one", "tail", "none"):
        sizes = sizes_of(kind, m, rng)
        poison(m, K)
        dx = dlhs(dy, w, jnp.asarray(sizes))
        assert relative(dx, exact(dy, np.swapaxes(plain, 1, 2), sizes)) < 4e-3, kind
        rest, row = slice(sizes.sum(), None), 0
        dw = np.asarray(drhs(with_nan(dy, rest), with_nan(x, rest), jnp.asarray(sizes)), np.float32)
        for g, size in enumerate(sizes):
            a, b = (np.asarray(v[row : row + size], np.float32) for v in (dy, x))
            assert relative(dw[g], a.T @ b) < 4e-3, (kind, g)
            row += size


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
def test_the_gated_product_equals_float32(rng, kind):
    m, gate = 1500, Gate(kind)
    x, (w, plain) = normal(rng, m, K), weights(None, G, 2, N, K, scale=0.1)
    sizes = sizes_of("edges", m, rng)
    poison(m, N)
    y = mosaic_entry.gated(x, w, jnp.asarray(sizes), gate, out_dtype=jnp.bfloat16)
    expected = gated_product(*(jnp.asarray(exact(x, plain[:, i], sizes)) for i in (0, 1)), gate)
    assert relative(y[: sizes.sum()], expected[: sizes.sum()]) < 4e-3
    assert not np.any(np.asarray(y[sizes.sum() :], np.float32))


@pytest.mark.parametrize("fmt", [None, "mxfp8", "mxfp4", "nvfp4", "nvfp4_token", "fp8_128x128"])
@pytest.mark.parametrize("m", [7, 193, 2047])
def test_the_gated_product_of_few_rows_or_quantised_weights_with_bias_equals_float32(rng, fmt, m):
    if fmt is None and m > 1000:
        pytest.skip("many rows of BF16 weights are for the kernel without a bias")
    x, (w, plain) = normal(rng, m, K), weights(fmt, G, 2, N, K, scale=0.1)
    bias = rng.standard_normal((G, 2, N), np.float32)
    for gate, spreads in ((Gate("silu"), ("edges", "zipf", "none")), (Gate("swiglu_oai"), ("tail",))):
        product = jax.jit(
            lambda x, w, sizes, bias, gate=gate: mosaic_entry.gated(
                x, w, sizes, gate, bias=bias, out_dtype=jnp.bfloat16
            )
        )
        for spread in spreads:
            sizes = sizes_of(spread, m, rng)
            poison(m, N)
            y = product(x, w, jnp.asarray(sizes), bias)
            assert_gated(y, x, plain, bias, sizes, gate, spread)


@pytest.mark.parametrize("fmt", [None, "mxfp8", "mxfp4", "nvfp4", "fp8_128x128"])
@pytest.mark.parametrize(("m", "k"), [(60, 768), (60, 4352), (2047, 320)])
def test_k_may_be_no_multiple_of_a_stage_or_a_swizzle(rng, fmt, m, k):
    n = 448
    x, (w, plain), sizes = normal(rng, m, k), weights(fmt, G, n, k), sizes_of("edges", m, rng)
    poison(m, n)
    assert relative(run("forward")(x, w, jnp.asarray(sizes)), exact(x, plain, sizes)) < 4e-3


def test_a_part_of_the_groups_gives_its_rows_and_zeros_elsewhere(rng):
    for m, held in ((200, G), (200, 5), (2000, 5)):
        x, (w, plain), sizes = normal(rng, m, K), weights(None, G, N, K), sizes_of("edges", m, rng)
        product = jax.jit(
            lambda x, w, s, offset: mosaic_entry.forward(x, w, s, group_offset=offset, out_dtype=jnp.bfloat16)
        )
        for offset in (0, 3) if held < G else (0,):
            mine, others = slice(offset, offset + held), np.zeros_like(plain)
            others[mine] = plain[mine]
            poison(m, N)
            y = product(x, w[mine], jnp.asarray(sizes), jnp.int32(offset))
            assert relative(y, exact(x, others, sizes)) < 4e-3


@pytest.mark.parametrize("groups", [1, 31, 32, 128, 1100])
def test_any_number_of_groups_is_added_up_in_the_kernel(rng, monkeypatch, groups):
    m = 300
    sizes = rng.multinomial(m, np.full(groups, 1 / groups)).astype(np.int32)
    x, (w, plain) = normal(rng, m, 128), weights(None, groups, 64, 128)
    for rows in (10**9, 0):
        monkeypatch.setattr(mosaic_entry, "DECODE_ROWS", rows)
        assert relative(run("forward")(x, w, jnp.asarray(sizes)), exact(x, plain, sizes)) < 4e-3


def test_axes_of_a_single_swizzle_are_not_stored_past_their_end(rng, monkeypatch):
    monkeypatch.setattr(mosaic_entry, "DECODE_ROWS", 0)
    m = 1500
    x, (w, plain), sizes = normal(rng, m, 64), weights(None, G, 64, 64), sizes_of("edges", m, rng)
    y = run("forward")(x, w, jnp.asarray(sizes))
    assert relative(y, exact(x, plain, sizes)) < 4e-3
    assert relative(run("dlhs")(x, w, jnp.asarray(sizes)), exact(x, np.swapaxes(plain, 1, 2), sizes)) < 4e-3
    dw, row = np.asarray(run("drhs", num_groups=G)(x, x, jnp.asarray(sizes)), np.float32), 0
    for g, size in enumerate(sizes):
        a = np.asarray(x[row : row + size], np.float32)
        assert relative(dw[g], a.T @ a) < 4e-3, g
        row += size
    x8 = jax.jit(lambda x: quantize(x, "fp8_128"))(normal(rng, m, 128))
    w8, plain8 = weights("fp8_128x128", G, 64, 128)
    exact_x = jax.jit(lambda x: dequantize(x, jnp.float32))(x8)
    assert relative(run("forward")(x8, w8, jnp.asarray(sizes)), exact(exact_x, plain8, sizes)) < 4e-3


@pytest.mark.parametrize("fmt", [None, "nvfp4", "mxfp4", "fp8_128x128"])
@pytest.mark.parametrize("config", DECODE_VARIANTS, ids=str)
def test_decode_variants_that_no_rule_ships_are_right_at_edge_sizes(rng, fmt, config):
    m, n = 193, 320  # tiles reach over the end of N
    x, (w, plain) = normal(rng, m, K), weights(fmt, G, n, K)
    with tuning.override({"decode": config}):
        product = run("forward")
        for spread in ("edges", "zipf", "tail"):
            sizes = sizes_of(spread, m, rng)
            poison(m, n)
            assert relative(product(x, w, jnp.asarray(sizes)), exact(x, plain, sizes)) < 4e-3, spread


@pytest.mark.parametrize("fmt", [None, "nvfp4", "fp8"])
@pytest.mark.parametrize("m", [96, 2047])
def test_rows_that_nobody_reads_need_not_be_written(rng, fmt, m):
    x, sizes = normal(rng, m, K), sizes_of("tail", m, rng)
    w, _ = weights("fp8_128x128" if fmt == "fp8" else fmt, G, N, K)
    if fmt == "fp8":
        x = jax.jit(lambda x: quantize(x, "fp8_128"))(x)
    whole, part = (run("forward", zero_tail=zero_tail)(x, w, jnp.asarray(sizes)) for zero_tail in (True, False))
    total = int(sizes.sum())
    np.testing.assert_array_equal(np.asarray(part[:total], np.float32), np.asarray(whole[:total], np.float32))


def test_tuning_writes_the_faster_candidate_and_it_is_used(rng, monkeypatch, tmp_path):
    from jmoe.bench import grouped_matmul as bench

    monkeypatch.setattr(tuning, "USER_FILE", tmp_path / "user.json")
    monkeypatch.setattr(bench, "LOAD", 0.02)
    narrow, wide, too_large = {"block_n": 64}, {"cluster": 2, "share": "weights", "lead": 2}, {"stages": 8}
    monkeypatch.setattr(bench, "CANDIDATES", {"prefill": [narrow, wide, too_large]})
    (record,) = bench.tune(shapes=[bench.Shape(8192, 1024, 1024, 8)], formats=["bf16"])
    assert record.meaningful and record.error < 4e-3
    (rule,) = tuning.read_rules(tuning.USER_FILE)
    assert rule["config"] == wide  # tiles of 64 columns load the rows four times as often
    assert tuning.lookup("prefill", weights="bfloat16", rows=1024, n=1024, k=1024) == wide
    tuning._rules.cache_clear()
