"""The whole kernels, run thread by thread on the host: addresses, predicates and options against the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantize_emulator

from pallas_kernels import compat
from pallas_kernels.quantize import (
    FORMATS,
    api,
    dequantize,
    gather_quantize,
    mosaic_sm90,
    quantize,
    quantize_rows,
    reference,
)
from pallas_kernels.quantize.mosaic_sm90 import Tuning

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
KERNEL = "mosaic_sm90"


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    quantize_emulator.install(monkeypatch)
    monkeypatch.setattr(api, "kernel_obstacle", lambda *_: None)
    monkeypatch.setattr(api, "_pick", lambda how, why, kernel, plain, args, *_, **__: (plain if how else kernel)(args))


@functools.partial(jax.jit, static_argnames=("fmt", "alignment", "layout"))
def want_(x, fmt, alignment=0, layout="row_major", global_scale=None, num_valid_rows=None):
    return reference.quantize(
        x, fmt, alignment=alignment, layout=layout, global_scale=global_scale, num_valid_rows=num_valid_rows
    )


def rows(m, k, seed=0):
    x = np.random.default_rng(seed).standard_normal((m, k)).astype(np.float32)
    x[m // 2] = 0
    x[m // 3, 5] = np.nan
    x[m // 4] *= 1e-12
    return jnp.asarray(x, jnp.bfloat16)


def same(a, b, count=None):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape and x.dtype == y.dtype
        x, y = (np.atleast_1d(v)[: count if v.ndim else 1].view(np.uint8) for v in (x, y))
        np.testing.assert_array_equal(x, y)


CASES = [
    ("mxfp8", (5, 96), {}),
    ("mxfp4", (9, 2880), {}),
    ("fp8_128", (3, 400), {}),  # the last block is ragged
    ("nvfp4", (7, 144), {}),
    ("nvfp4_4o6", (4, 96), {}),
    ("nvfp4_token", (6, 96), {}),  # a row for a warp
    ("nvfp4_token", (3, 2880), {}),  # a row for a block of threads
    ("nvfp4_token_4o6", (2, 1040), {}),
    ("mxfp8", (130, 160), dict(layout="swizzled", alignment=256)),
    ("nvfp4_token", (130, 80), dict(layout="swizzled")),
    ("nvfp4", (6, 128), dict(global_scale=jnp.asarray(1 / 900, jnp.float32))),
]


@pytest.mark.parametrize("fmt, shape, options", CASES, ids=[f"{c[0]}-{c[1]}-{len(c[2])}" for c in CASES])
def test_the_program_writes_the_references_bytes_and_nothing_else(fmt, shape, options):
    x = rows(*shape)
    same(quantize(x, fmt, **options), want_(x, fmt, **options))


@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_128", "nvfp4", "nvfp4_4o6"])
def test_every_division_of_the_work_gives_the_same_bytes(fmt, monkeypatch):
    def tuned(task):
        return dataclasses.replace(task, tuning=Tuning(units=1, threads=512))

    monkeypatch.setattr(mosaic_sm90, "tuned", tuned)
    for shape in ((48, 512), (7, 384)):  # with and without threads that have nothing to do
        x = rows(*shape)
        same(quantize(x, fmt), want_(x, fmt))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=["bf16", "f16", "f32"])
def test_four_over_six_of_any_input_gives_the_references_bytes(dtype):
    x, g = rows(3, 528).astype(dtype), jnp.float32(1 / 500)
    same(quantize(x, "nvfp4_token_4o6"), want_(x, "nvfp4_token_4o6"))
    same(quantize(x, "nvfp4_4o6", global_scale=g), want_(x, "nvfp4_4o6", global_scale=g))


def test_four_over_six_with_options_gives_the_references_bytes():
    x = rows(5, 96)
    same(quantize(x, "nvfp4_4o6"), want_(x, "nvfp4_4o6"))  # the scale from the data
    options = dict(alignment=64, layout="swizzled")
    same(quantize(x, "nvfp4_token_4o6", **options), want_(x, "nvfp4_token_4o6", **options))
    n = jnp.int32(3)
    got = quantize(x, "nvfp4_token_4o6", num_valid_rows=n)
    same(got, want_(x, "nvfp4_token_4o6", num_valid_rows=n), 3)


def test_a_grid_that_walks_over_all_units_gives_the_same_bytes(monkeypatch):
    """As 4-over-6 does with much data, two units to a round: a whole number of rounds, half a one
    more, ends in the first and the second half, fewer units than threads."""
    monkeypatch.setattr(mosaic_sm90, "tuned", lambda t: dataclasses.replace(t, tuning=Tuning(threads=128, grid=2)))
    g = jnp.float32(1 / 500)
    for shape in ((64, 256), (48, 256), (37, 432), (33, 256), (3, 160)):
        x = rows(*shape)
        got = quantize(x, "nvfp4_4o6", global_scale=g)
        same(got, want_(x, "nvfp4_4o6", global_scale=g))


def test_row_maxima_leave_out_blocks_that_are_not_finite():
    x = np.random.default_rng(0).standard_normal((20, 528)).astype(np.float32)
    x[np.arange(20), np.arange(20) * 26] = np.where(np.arange(20) % 2, np.nan, -np.inf)
    x[np.arange(20), np.arange(20) * 26 // 16 * 16 + 3] = 1e4  # in the same block
    x[7] = np.nan
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        same(
            quantize(jnp.asarray(x, dtype), "nvfp4_token_4o6"),
            want_(jnp.asarray(x, dtype), "nvfp4_token_4o6"),
        )


@pytest.mark.parametrize("threads", [32, 64, 128, 256])
@pytest.mark.parametrize("fmt", ["nvfp4_token", "nvfp4_token_4o6"])
def test_any_number_of_threads_to_a_row_gives_the_same_bytes(fmt, threads, monkeypatch):
    tuning = Tuning(threads=max(threads, 128), row_threads=threads)
    monkeypatch.setattr(mosaic_sm90, "tuned", lambda task: dataclasses.replace(task, tuning=tuning))
    for shape in ((6, 1024), (5, 1040)):
        x = rows(*shape)
        same(quantize(x, fmt), want_(x, fmt))


@pytest.mark.parametrize("threads", [32, 64, 96])
def test_rows_that_groups_of_threads_walk_over_give_the_same_bytes(threads, monkeypatch):
    """Rounds for some of the groups only, a last one for one of the two rows of a round, fewer rows than groups."""
    tuning = Tuning(threads=4 * threads, row_threads=threads, grid=2)
    monkeypatch.setattr(mosaic_sm90, "tuned", lambda task: dataclasses.replace(task, tuning=tuning))
    for count, units in ((37, 2), (16, 2), (27, 1), (3, 3)):
        x = rows(count, 16 * threads * units)
        same(quantize(x, "nvfp4_token"), want_(x, "nvfp4_token"))


def test_many_short_rows_are_walked_over_where_nothing_else_is_asked():
    task = mosaic_sm90.Task(FORMATS["nvfp4_token"], 8192, 8192, 4096, 4096, "bfloat16", 4096)
    tuning = mosaic_sm90.tuned(task).tuning
    threads = 1024 if compat.REGISTERS_MOVE else 768
    assert (tuning.threads, tuning.row_threads) == (threads, 128) and tuning.grid
    for other in (dict(counted=True), dict(gather=True), dict(rows=1500), dict(dtype="float32"), dict(swizzled=True)):
        assert not mosaic_sm90.tuned(dataclasses.replace(task, **other)).tuning.grid
    for columns in (1024, 2048, 3072, 4096):
        tuning = mosaic_sm90.tuned(dataclasses.replace(task, rows=10**5, k=columns, columns=columns)).tuning
        assert tuning.grid and tuning.threads % 128 == 0 and columns // 16 % tuning.row_threads == 0


def test_much_data_takes_the_walking_grid_where_it_can():
    task = mosaic_sm90.Task(FORMATS["nvfp4_4o6"], 16384, 16384, 7168, 7168, "bfloat16", 7168, scale_rows=16384)
    assert mosaic_sm90.tuned(task).tuning.grid
    for other in (dict(counted=True), dict(scale_rows=8192), dict(gather=True), dict(rows=64)):
        assert not mosaic_sm90.tuned(dataclasses.replace(task, **other)).tuning.grid


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4", "nvfp4_token"])
@pytest.mark.parametrize("count", [0, 3, 9])
def test_rows_from_the_count_on_are_neither_read_nor_written(fmt, count):
    x = rows(9, 112)
    got = quantize(x.at[count:].set(jnp.inf), fmt, num_valid_rows=jnp.int32(count))
    same(got, want_(x, fmt, num_valid_rows=jnp.int32(count)), count)
    assert (np.asarray(got.data).view(np.uint8)[count:] == quantize_emulator.POISON).all()


def test_stacked_tensor_scales_and_zero_rows():
    x = rows(12, 64).reshape(3, 4, 64)
    g = jnp.asarray([0.01, 3e-5, 2.0], jnp.float32)
    same(quantize(x, "nvfp4", global_scale=g), want_(x, "nvfp4", global_scale=g))
    for fmt in ("mxfp8", "nvfp4", "nvfp4_token"):
        same(quantize(x[:, :0], fmt), want_(x[:, :0], fmt))


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_4o6"])
def test_blocks_far_above_the_given_tensor_scale_saturate(fmt):
    x = rows(12, 64)
    x = x.at[:3].set(jnp.sign(x[:3]) * jnp.asarray([[1e3], [1e20], [3e38]], jnp.bfloat16))
    for g in (1 / 700, 3e-5, 2.0):
        same(quantize(x, fmt, global_scale=jnp.float32(g)), want_(x, fmt, global_scale=jnp.float32(g)))


def test_gathered_rows_and_sentinels():
    x = rows(8, 112)
    indices = jnp.asarray([5, -1, 0, 7, 8, 2, 2, 2**31 - 1, -(2**31)], jnp.int32)
    for fmt in ("mxfp8", "nvfp4_token"):
        same(gather_quantize(x, indices, fmt), gather_quantize(x, indices, fmt, implementation="reference"))


@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_128", "nvfp4", "nvfp4_token"])
def test_packed_rows_are_written_whole(fmt):
    spec, k = FORMATS[fmt], 384
    scale_offset = spec.data_bytes(k)
    end = scale_offset + spec.num_scales(k) * spec.scale_bytes
    row_scale = -(-end // 4) * 4 if spec.global_scale == "token" else None
    tail_offset = -(-(end if row_scale is None else row_scale + 4) // 4) * 4
    options = dict(
        row_bytes=-(-(tail_offset + 24) // 16) * 16,
        scale_offset=scale_offset,
        row_scale_offset=row_scale,
        tail_offset=tail_offset,
        global_scale=jnp.float32(0.002) if fmt == "nvfp4" else None,
    )
    x, tail = rows(5, k), jnp.arange(30, dtype=jnp.int32).reshape(5, 6)
    plain = functools.partial(quantize_rows, implementation="reference", **options)
    same(quantize_rows(x, fmt, tail, **options), jax.jit(lambda x, t: plain(x, fmt, t))(x, tail))


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "fp8_128", "nvfp4", "nvfp4_token"])
def test_decoding_programs_give_the_references_values(fmt):
    for shape, dtype, options in (
        ((5, 400), jnp.bfloat16, {}),
        ((3, 112), jnp.float32, {}),
        ((130, 160), jnp.float16, dict(layout="swizzled", alignment=256)),
    ):
        if FORMATS[fmt].scale == "f32" and options:
            continue
        q = want_(rows(*shape), fmt, **options)
        got = np.asarray(dequantize(q, dtype), np.float32)
        np.testing.assert_array_equal(got, np.asarray(reference.dequantize(q, dtype), np.float32))
