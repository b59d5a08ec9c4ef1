"""The Blackwell grouped matmul without a Blackwell GPU: its scale layout, its numerics in the interpreter, its code.

The interpreter has no block-scaled products: there the two primitives that read scales are replaced by what the
documentation of the matrix unit says they compute, so that addresses, rows, scales and stores of the kernel are tested.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot_report import aot_report
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import Problem, api, blackwell_entry, grouped_matmul, portable
from pallas_kernels.grouped_matmul.schedule import max_tiles, num_tiles, tile_schedule
from pallas_kernels.quantize import QTensor, dequantize, quantize, quantize_weights, swizzle_scales, swizzled_size

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the GPU interpreter of Pallas is there from JAX 0.11 on"
)
G, N = 5, 192
SIZES = {
    "ends inside boxes": (320, [0, 1, 70, 200, 29]),
    "a tail": (193, [7, 0, 129, 0, 0]),
    "few rows": (9, [4, 0, 1, 0, 2]),
}
FORMATS = {"mxfp8": "mxfp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4", "nvfp4_token": "nvfp4"}  # of rows: of weights


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(jnp.bfloat16)


def unscrambled(pieces):
    """Scales of 128 rows as the matrix unit reads them from [1, C / 4, 32, 16]: row 32 a + b, column 4 c + d."""
    return pieces.astype(jnp.float32).reshape(-1, 32, 4, 4).transpose(2, 1, 0, 3).reshape(128, -1)


@pytest.fixture
def interpreted(monkeypatch):
    """blackwell_entry's functions in the interpreter, on two blocks, with block-scaled products."""
    from pallas_kernels.grouped_matmul import mosaic_blackwell_sm100 as kernel

    copied = {}
    product = plgpu.tcgen05_mma

    def copy_scales(source, target):
        copied[id(target)] = source

    def scaled_product(acc, a, b, barrier, *, accumulate, a_scale=None, b_scale=None):
        if a_scale is None:
            product(acc, a, b, barrier, accumulate=accumulate)
            return

        def values(elements, scales):
            scales = unscrambled(copied.pop(id(scales))[...])
            return elements.astype(jnp.float32) * jnp.repeat(scales, elements.shape[1] // scales.shape[1], axis=1)

        new = lax.dot_general(
            values(a[...], a_scale),
            values(b[...].T, b_scale),
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
        )
        plgpu.async_store_tmem(acc, jnp.where(accumulate, plgpu.async_load_tmem(acc) + new, new))
        plgpu.barrier_arrive(barrier)

    monkeypatch.setattr(plgpu, "async_copy_scales_to_tmem", copy_scales)
    monkeypatch.setattr(plgpu, "tcgen05_mma", scaled_product)
    monkeypatch.setattr(kernel, "num_sms", lambda: 2)
    kernel.grouped_matmul.clear_cache()
    yield lambda f, *args, **options: f(*args, **options, interpret=plgpu.InterpretGPUParams())
    kernel.grouped_matmul.clear_cache()


@needs_interpreter
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_bf16_products_equal_float32_for_ragged_sizes(rng, interpreted, name, transposed):
    m, sizes = SIZES[name]
    total, sizes = sum(sizes), jnp.asarray(sizes, jnp.int32)
    x, w = normal(rng, m, N if transposed else 128), normal(rng, G, N, 128)
    ours = blackwell_entry.dlhs if transposed else blackwell_entry.forward
    plain = portable.grouped_matmul_dlhs if transposed else portable.grouped_matmul
    y = interpreted(ours, x.at[total:].set(jnp.nan), w, sizes, out_dtype=jnp.bfloat16)
    expected = plain(x.astype(jnp.float32), w.astype(jnp.float32), sizes, out_dtype=jnp.float32)
    assert relative(y, expected) < 4e-3
    assert not np.any(np.asarray(y[total:], np.float32))


@needs_interpreter
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", ["ends inside boxes", "few rows"])
def test_block_scaled_products_equal_those_of_the_dequantised_operands(rng, interpreted, fmt, name):
    m, sizes = SIZES[name]
    total, sizes = sum(sizes), jnp.asarray(sizes, jnp.int32)
    x, w = normal(rng, m, 320), normal(rng, G, N, 320) * jnp.exp2(jnp.arange(G, dtype=jnp.bfloat16))[:, None, None]
    x = x * jnp.exp2((jnp.arange(m) % 7).astype(jnp.bfloat16))[:, None]
    q, qw = jax.jit(lambda x, w: (quantize(x, fmt), quantize_weights(w, FORMATS[fmt])))(x, w)
    y = interpreted(blackwell_entry.forward, q, qw, sizes, out_dtype=jnp.bfloat16)
    expected = portable.grouped_matmul(
        dequantize(q, jnp.float32), dequantize(qw, jnp.float32), sizes, out_dtype=jnp.float32
    )
    assert relative(y, expected) < 4e-3
    assert not np.any(np.asarray(y[total:], np.float32))


@needs_interpreter
def test_a_global_scale_for_each_output_column_and_a_part_of_the_groups(rng, interpreted):
    m, sizes = SIZES["ends inside boxes"]
    sizes = jnp.asarray(sizes, jnp.int32)
    q, qw = jax.jit(lambda x, w: (quantize(x, "nvfp4_token"), quantize_weights(w, "nvfp4")))(
        normal(rng, m, 256), normal(rng, 2, N, 256)
    )
    columns = jnp.exp2((jnp.arange(2 * N, dtype=jnp.float32) % 5).reshape(2, N))
    scaled = QTensor(qw.data, qw.block_scale, qw.global_scale[:, None] * columns, qw.format, qw.k)
    options = dict(group_offset=jnp.int32(2), out_dtype=jnp.float32)
    y = interpreted(blackwell_entry.forward, q, scaled, sizes, **options)
    wide = dequantize(qw, jnp.float32) * columns[:, :, None]
    expected = portable.grouped_matmul(dequantize(q, jnp.float32), wide, sizes, **options)
    assert relative(y, expected) < 1e-5
    assert not np.any(np.asarray(y[271:], np.float32)) and np.any(np.asarray(y[1:271], np.float32))


@needs_interpreter
def test_nan_in_one_group_reaches_no_other(rng, interpreted):
    m, sizes = SIZES["ends inside boxes"]
    x, w = normal(rng, m, 128).at[1:71].set(jnp.nan), normal(rng, G, N, 128)
    q, qw = jax.jit(lambda x, w: (quantize(x, "mxfp8"), quantize_weights(w, "mxfp8")))(x, w)
    y = interpreted(blackwell_entry.forward, q, qw, jnp.asarray(sizes, jnp.int32), out_dtype=jnp.float32)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(y).any(axis=1)), np.arange(1, 71))


@needs_interpreter
@pytest.mark.parametrize("c", [8, 10, 23])
def test_pieces_of_scales_are_the_swizzled_layout_and_the_unit_reads_each_in_its_place(rng, c):
    from pallas_kernels.grouped_matmul import mosaic_blackwell_sm100 as kernel

    scales = jnp.asarray(rng.integers(0, 255, (2, 200, c)), jnp.uint8)
    columns = -(-c // 8) * 8
    pieces = lax.bitcast_convert_type(kernel.scale_pieces(scales, jnp.float8_e8m0fnu, columns), jnp.uint8)
    assert pieces.shape == (2, 2, columns // 4, 32, 16)
    if c % 8 == 0:  # without padding they are the bytes of swizzle_scales
        assert swizzled_size(200, c) == pieces[0].size
        np.testing.assert_array_equal(pieces.reshape(2, -1), swizzle_scales(scales))
    for r in (0, 1):
        read = np.concatenate([unscrambled(pieces[1, r, i : i + 2]) for i in range(0, columns // 4, 2)], axis=1)
        expected = np.zeros((128, columns))
        rows = scales[1, 128 * r : 128 * (r + 1)]
        expected[: rows.shape[0], :c] = rows
        np.testing.assert_array_equal(read, expected)


@needs_interpreter
@pytest.mark.parametrize("sizes", [[1, 0, 7, 64, 65, 191, 192, 193], [0] * 8, [1000] + [0] * 7, [2000] * 8])
def test_the_rows_of_a_tile_are_those_whose_scales_it_gets(sizes):
    from pallas_kernels.grouped_matmul import mosaic_blackwell_sm100 as kernel

    schedule = tile_schedule(jnp.asarray(sizes, jnp.int32), num_rows=1000, block=kernel.BLOCK_M)
    rows = np.asarray(kernel.tile_rows(schedule, 1000))
    assert rows.shape == (max_tiles(1000, 8, kernel.BLOCK_M), 128) and rows.min() >= 0 and rows.max() < 1000
    ends = np.minimum(np.cumsum(sizes), 1000)
    covered = set()
    for t in range(int(num_tiles(schedule, 1000, kernel.BLOCK_M, zero_tail=False))):
        g = int(schedule.weight[t])
        start = ends[g] - min(sizes[g], ends[g])
        mine = rows[t][(rows[t] >= start) & (rows[t] < ends[g])]
        covered |= set(mine)
        if ends[g] - start >= kernel.BOX:  # whole boxes are stored: none may hold a row of another group
            assert len(mine) == 128
    assert covered == set(range(ends[-1]))


def problem(x, w, op="forward", capability="10.0", n=512, k=512):
    return Problem(op, 256, n, k, 8, x, w, "bfloat16", "gpu", capability)


def test_it_serves_only_those_who_name_it_and_says_why_it_cannot(monkeypatch):
    if not hasattr(plgpu, "InterpretGPUParams"):
        assert "JAX >= 0.11" in blackwell_entry.why_not(problem("bfloat16", "bfloat16"))
        return
    for x, w in (("bfloat16", "bfloat16"), ("mxfp8", "mxfp8"), ("nvfp4_token", "nvfp4"), ("mxfp8", "bfloat16")):
        for capability in ("10.0", "10.3"):
            assert blackwell_entry.why_not(problem(x, w, capability=capability)) is None
            assert api.choose(problem(x, w, capability=capability)).name != "mosaic_sm100"
            assert api.choose(problem(x, w, capability=capability), "mosaic_sm100").name == "mosaic_sm100"
    for why, asked in {
        "10.x (compiled, not yet run), this is gpu 9.0": problem("bfloat16", "bfloat16", capability="9.0"),
        "same elements and scales": problem("bfloat16", "nvfp4"),
        "x is mxfp8 and w nvfp4": problem("mxfp8", "nvfp4"),
        "fp8_128x128": problem("fp8_128", "fp8_128x128"),
        "multiples of 64": problem("bfloat16", "bfloat16", n=100),
        "gradient of the weights": problem("bfloat16", "bfloat16", op="drhs"),
        "gradients through quantised weights": problem("bfloat16", "mxfp8", op="dlhs"),
    }.items():
        assert why in blackwell_entry.why_not(asked), why
        with pytest.raises(ValueError, match="cannot use implementation='mosaic_sm100'"):
            api.choose(asked, "mosaic_sm100")
    with pytest.raises(ValueError, match="compiled, not yet run"):
        grouped_matmul(jnp.ones((8, 128)), jnp.ones((2, 128, 128)), jnp.asarray([4, 4]), implementation="mosaic_sm100")


@pytest.mark.aot
@needs_interpreter
@pytest.mark.slow
def test_it_compiles_to_blackwell_machine_code_without_spills():
    report = aot_report("aot_blackwell.py")
    assert len(report) == 8
    for name, (registers, spilled, _) in report.items():
        assert 16 <= registers <= 200 and spilled == 0, (name, registers, spilled)
