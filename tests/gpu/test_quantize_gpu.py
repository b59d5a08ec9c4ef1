"""The quantisation kernels on a GPU give the reference's bytes, for every format, option and kind of data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantize import (
    FORMATS,
    dequantize,
    gather_quantize,
    quantize,
    quantize_rows,
    swiglu_quantize,
)

pytestmark = pytest.mark.gpu
ROW_FORMATS = [name for name, fmt in FORMATS.items() if fmt.block_rows == 1]
KERNEL, REFERENCE = "mosaic_sm90", "reference"


def hard(rows, k, dtype=jnp.bfloat16, seed=0):
    """Rows: normal, of every magnitude, with outliers, subnormal, zero, -0, NaN, infinite, exact, huge."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, k)).astype(np.float32)
    kind = np.arange(rows) % 16
    x[kind == 1] *= np.float32(2.0) ** rng.integers(-120, 120, ((kind == 1).sum(), 1))
    x[kind == 2] *= np.where(rng.random(((kind == 2).sum(), k)) < 0.02, 300, 1)
    x[kind == 3] *= np.float32(2.0**-126)
    x[kind == 4] = 0
    x[kind == 5] = -0.0
    x[kind == 6, 3], x[kind == 6, k // 2] = np.nan, -np.nan
    x[kind == 7, k - 1], x[kind == 7, 1] = np.inf, -np.inf
    x[kind == 8] = np.round(x[kind == 8] * 4) / 4
    x[kind == 9] = np.float32(3e38) * np.sign(x[kind == 9])
    x[kind == 10] *= np.float32(2.0) ** rng.integers(-30, 30, ((kind == 10).sum(), k))
    x[kind == 11, 1:] = 0
    with np.errstate(over="ignore"):
        return jnp.asarray(x.astype(jnp.dtype(dtype)))


def same(a, b, rows=None):
    """Bytes of all leaves agree (NaN with any NaN, in float leaves), in the first `rows` rows."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = (np.asarray(v)[:rows] if v.ndim else np.asarray(v) for v in (x, y))
        assert x.shape == y.shape and x.dtype == y.dtype
        if x.dtype.kind == "f" and x.dtype.itemsize > 1 or x.dtype == jnp.bfloat16:
            x, y = (np.asarray(v, np.float32) for v in (x, y))
            x, y = (np.where(np.isnan(v), np.float32(np.nan), v).view(np.uint32) for v in (x, y))
        else:
            x, y = (np.ascontiguousarray(v).view(np.uint8) for v in (x, y))
        wrong = np.argwhere(x != y)
        first = tuple(wrong[0]) if len(wrong) else ()
        assert not len(wrong), f"{len(wrong)} differ, the first at {first}: {x[first]}, not {y[first]}"


@functools.partial(jax.jit, static_argnames=("fmt", "implementation", "alignment", "layout"))
def q_(x, fmt, implementation, alignment=0, layout="row_major", global_scale=None, num_valid_rows=None):
    return quantize(
        x,
        fmt,
        implementation=implementation,
        alignment=alignment,
        layout=layout,
        global_scale=global_scale,
        num_valid_rows=num_valid_rows,
    )


def on_cpu(f, *args):
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return f(*jax.device_put(args, cpu))


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_bytes_equal_the_reference_on_gpu_and_cpu(fmt):
    x = hard(64, 1408)
    got = q_(x, fmt, KERNEL)
    same(got, on_cpu(lambda x: q_(x, fmt, REFERENCE), x))
    same(got, q_(x, fmt, REFERENCE))


def at_ties(rows, k, g, seed=0):
    """Values at which the codes of some block scale tie, the first of each block such that it has that scale."""
    rng = np.random.default_rng(seed)
    scale = np.arange(8, 120, dtype=np.uint8)[rng.integers(0, 112, (rows, k // 16, 1))].view(jnp.float8_e4m3fn)
    y = rng.choice([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 4.5], (rows, k // 16, 16))
    y[..., 0] = rng.choice([6, 4, 5.75, 6.25, 4.125, 3.9], y.shape[:2])
    y *= rng.choice([-1, 1], y.shape) * scale.astype(np.float32) * g
    return jnp.asarray(y.reshape(rows, k), jnp.bfloat16)


@pytest.mark.parametrize("fmt", ["nvfp4_4o6", "nvfp4_token_4o6"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=["bf16", "f16", "f32"])
def test_four_over_six_of_any_input(fmt, dtype):
    for rows, k in ((64, 1408), (257, 96), (5, 20480)):
        x = hard(rows, k, dtype, seed=k)
        same(q_(x, fmt, KERNEL), on_cpu(lambda x: q_(x, fmt, REFERENCE), x))


@pytest.mark.parametrize("rows", [1408, 1301])
def test_four_over_six_of_so_much_data_that_a_grid_walks_over_it(rows):
    for g in (1 / 700, 2.0**-9, 1 / (1536 / 1.3671875), 2.0):
        g = jnp.float32(g)
        for x in (hard(rows, 7168), at_ties(rows, 7168, float(g))):
            want = q_(x, "nvfp4_4o6", REFERENCE, global_scale=g)
            same(q_(x, "nvfp4_4o6", KERNEL, global_scale=g), want)


def test_four_over_six_where_codes_tie():
    for g in (2.0**-9, 1 / (1536 / 1.3671875), 1e-3):
        x = at_ties(512, 1024, g)
        for scale in (jnp.float32(g), jnp.full(512, g, jnp.float32)):
            want = q_(x, "nvfp4_4o6", REFERENCE, global_scale=scale)
            same(q_(x, "nvfp4_4o6", KERNEL, global_scale=scale), want)
        same(q_(x, "nvfp4_token_4o6", KERNEL), q_(x, "nvfp4_token_4o6", REFERENCE))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32], ids=["f16", "f32"])
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "fp8_128", "nvfp4", "nvfp4_token", "nvfp4_token_4o6"])
def test_bytes_equal_the_reference_for_other_inputs(fmt, dtype):
    x = hard(64, 1408, dtype)
    same(q_(x, fmt, KERNEL), on_cpu(lambda x: q_(x, fmt, REFERENCE), x))


@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_128", "nvfp4", "nvfp4_token", "nvfp4_token_4o6"])
def test_row_lengths_and_row_counts(fmt):
    for rows, k in ((1, 128), (3, 2880), (257, 96), (5, 7168), (2, 20480)):
        x = hard(rows, k, seed=k)
        same(q_(x, fmt, KERNEL), on_cpu(lambda x: q_(x, fmt, REFERENCE), x))
    assert q_(hard(0, 128), fmt, KERNEL).data.shape[0] == 0


@pytest.mark.parametrize("rows, k", [(2200, 4096), (4300, 2048), (2200, 3072), (8500, 1024)])
def test_so_many_rows_that_groups_of_threads_walk_over_them(rows, k):
    for dtype in (jnp.bfloat16, jnp.float16):
        x = hard(rows, k, dtype, seed=k)
        same(q_(x, "nvfp4_token", KERNEL), q_(x, "nvfp4_token", REFERENCE))


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_4o6"])
def test_given_tensor_scales_one_and_a_stack(fmt):
    x = hard(48, 256).reshape(3, 16, 256)
    for g in (jnp.float32(1 / 700), jnp.asarray([0.01, 3e-5, 2.0], jnp.float32)):
        same(q_(x, fmt, KERNEL, global_scale=g), q_(x, fmt, REFERENCE, global_scale=g))


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "nvfp4_token"])
def test_swizzled_scales_with_zero_padding_and_aligned_columns(fmt):
    x = hard(130, 2880)
    same(q_(x, fmt, KERNEL, layout="swizzled"), q_(x, fmt, REFERENCE, layout="swizzled"))
    options = dict(alignment=256, layout="swizzled")
    got = q_(x, fmt, KERNEL, **options)
    same(got, q_(x, fmt, REFERENCE, **options))
    back = jax.jit(dequantize, static_argnames=("dtype", "implementation"))
    same(back(got, implementation=KERNEL), back(got, implementation=REFERENCE))


@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_128", "nvfp4", "nvfp4_token"])
def test_rows_beyond_the_count_are_skipped(fmt):
    x = hard(64, 512)
    for n in (0, 1, 37, 64):
        n = jnp.int32(n)
        same(q_(x, fmt, KERNEL, num_valid_rows=n), q_(x, fmt, REFERENCE, num_valid_rows=n), rows=int(n))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "fp8_128", "nvfp4", "nvfp4_token"])
def test_dequantised_values_equal_the_reference(fmt, dtype):
    for k in (1408, 2880):
        q = q_(hard(64, k), fmt, REFERENCE)
        back = jax.jit(dequantize, static_argnames=("dtype", "implementation"))
        got = back(q, dtype=dtype, implementation=KERNEL)
        same(got, on_cpu(functools.partial(back, dtype=dtype, implementation=REFERENCE), q))


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "fp8_128", "nvfp4", "nvfp4_token"])
def test_no_cast_round_trip_is_elided_in_one_jit(fmt):
    x = hard(64, 256)
    f = jax.jit(lambda x: dequantize(quantize(x, fmt), jnp.float32))
    plain = functools.partial(dequantize, dtype=jnp.float32, implementation=REFERENCE)
    g = jax.jit(lambda x: plain(quantize(x, fmt, implementation=REFERENCE)))
    want = on_cpu(lambda x: dequantize(q_(x, fmt, REFERENCE), jnp.float32, implementation=REFERENCE), x)
    same(f(x), want)
    same(g(x), want)


@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_128", "nvfp4_token"])
def test_gathered_rows_and_sentinels(fmt):
    x = hard(40, 384)
    indices = jnp.asarray([5, -1, 0, 39, 40, 7, 7, 2**31 - 1, -(2**31)], jnp.int32)
    f = jax.jit(lambda x, i, how: gather_quantize(x, i, fmt, implementation=how), static_argnames="how")
    got = f(x, indices, how=KERNEL)
    same(got, f(x, indices, how=REFERENCE))
    for i in (1, 4, 7, 8):
        assert not np.asarray(got.data).view(np.uint8)[i].any()


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_128", "nvfp4_token"])
def test_swiglu_then_quantise_agrees_with_the_reference(fmt, activation):
    x = jax.random.normal(jax.random.key(0), (64, 2 * 768), jnp.float32).astype(jnp.bfloat16)
    f = jax.jit(
        lambda x, how: swiglu_quantize(x, fmt, activation=activation, implementation=how), static_argnames="how"
    )
    got, want = f(x, how=KERNEL), f(x, how=REFERENCE)
    scales = [np.asarray(q.block_scale).view(np.uint8) for q in (got, want)]
    assert (scales[0] != scales[1]).mean() < (0.02 if fmt != "fp8_128" else 0.5)
    a, b = (np.asarray(dequantize(q, jnp.float32)) for q in (got, want))
    assert np.linalg.norm(a - b) < 0.01 * np.linalg.norm(b)
    steps = np.asarray(got.data).view(np.uint8) != np.asarray(want.data).view(np.uint8)
    assert steps.mean() < 0.01


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_a_nan_of_gate_or_up_marks_its_block(activation):
    x = jax.random.normal(jax.random.key(0), (64, 2 * 768), jnp.float32).astype(jnp.bfloat16)
    x = x.at[3, 5].set(jnp.nan).at[9, 768 + 700].set(jnp.nan)
    q = jax.jit(lambda x: swiglu_quantize(x, "fp8_128", activation=activation, implementation=KERNEL))(x)
    np.testing.assert_array_equal(np.argwhere(np.isnan(q.block_scale)), [[3, 0], [9, 5]])


@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_128", "nvfp4", "nvfp4_token", "mxfp4"])
def test_packed_rows_equal_the_concatenated_parts(fmt):
    spec, k = FORMATS[fmt], 2048 + 128
    x = hard(33, k)
    tail = jax.random.randint(jax.random.key(1), (33, 12), -(2**31), 2**31 - 1, jnp.int32)
    scale_offset = spec.data_bytes(k)
    end = scale_offset + spec.num_scales(k) * spec.scale_bytes
    row_scale = -(-end // 4) * 4 if spec.global_scale == "token" else None
    tail_offset = -(-(end if row_scale is None else row_scale + 4) // 4) * 4
    options = dict(
        row_bytes=-(-(tail_offset + 48) // 16) * 16,
        scale_offset=scale_offset,
        row_scale_offset=row_scale,
        tail_offset=tail_offset,
        global_scale=jnp.float32(0.002) if fmt == "nvfp4" else None,
    )
    f = jax.jit(lambda x, t, how: quantize_rows(x, fmt, t, implementation=how, **options), static_argnames="how")
    same(f(x, tail, how=KERNEL), f(x, tail, how=REFERENCE))


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4_token"])
def test_offsets_beyond_two_to_the_32_bytes(fmt):
    """2.15e9 values: rows repeat with a period that no power of two has, so that a wrapped address shows."""
    rows, k, period = 123520, 17408, 96
    # All in one jit, so that what is decoded takes the memory of what was quantised.
    needed = rows * (2 * k + FORMATS[fmt].data_bytes(k) + 4 * FORMATS[fmt].num_scales(k))
    memory = jax.devices()[0].memory_stats()
    free = memory["bytes_limit"] - memory["bytes_in_use"]
    if free < 1.02 * needed:
        pytest.skip(f"it needs {needed / 2**30:.1f} GiB and this process has {free / 2**30:.1f} GiB left")
    tile = hard(period, k)
    edges = [0, rows - 4, 2**31 // k - 2, 2**31 // (2 * k) - 2, 2**32 // (2 * k) - 2]

    @jax.jit
    def around(tile):
        q = quantize(tile[jnp.arange(rows) % period], fmt, implementation=KERNEL)
        both = q, dequantize(q, implementation=KERNEL)
        return [jax.tree.map(lambda v, at=at: jax.lax.slice_in_dim(v, at, at + 4), both) for at in edges]

    q = q_(tile, fmt, REFERENCE)
    both = q, jax.jit(functools.partial(dequantize, implementation=REFERENCE))(q)
    for at, got in zip(edges, around(tile), strict=True):
        same(got, jax.tree.map(lambda v, at=at: v[(np.arange(4) + at) % period], both))


def test_vmap_gives_the_same_bytes():
    x = hard(32, 256).reshape(2, 16, 256)
    same(
        jax.vmap(lambda x: quantize(x, "nvfp4_token"))(x).data,
        quantize(x, "nvfp4_token", implementation=REFERENCE).data,
    )
