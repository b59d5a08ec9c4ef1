"""The kernels that sort and move rows, and lay tiles over them, run thread by thread on the host, against XLA."""

import jax.numpy as jnp
import numpy as np
import permute_emulator
import pytest

from pallas_kernels.permute import mosaic_rows, mosaic_slots, mosaic_sort
from pallas_kernels.permute.rows import _sum_of_rows, _take
from pallas_kernels.permute.slots import _rank_slots
from pallas_kernels.permute.sort import _sort
from pallas_kernels.quantize import dequantize, quantize


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    permute_emulator.install(monkeypatch, mosaic_sort, mosaic_rows, mosaic_slots)


@pytest.mark.parametrize("run", ["one block", "several blocks"])
@pytest.mark.parametrize("n,k,groups,places", [(1, 8, 128, 8), (300, 2, 5, 600), (70, 8, 200, 400), (130, 1, 1, 130)])
def test_sort_kernels_equal_the_xla_sort(rng, monkeypatch, run, n, k, groups, places):
    if run == "several blocks":
        monkeypatch.setattr(mosaic_sort, "ONE_BLOCK", 0)
        monkeypatch.setattr(mosaic_sort, "MAX_BLOCKS", 2)
    for low, high in ((0, groups), (-2, groups + 2), (groups - 1, groups), (-1, 0)):
        ids = jnp.asarray(rng.integers(low, high, (n, k)), jnp.int32)
        task = mosaic_sort.make_task(n * k, k, groups, places)
        assert task.blocks == 1 or run == "several blocks"
        out = mosaic_sort.run_sort(task, ids.reshape(-1))
        expected = _sort(ids, groups, places)
        np.testing.assert_array_equal(out["source"], expected.source)
        np.testing.assert_array_equal(out["position"].reshape(n, k), expected.position)
        np.testing.assert_array_equal(out["group_sizes"], expected.group_sizes)
        np.testing.assert_array_equal(out["dropped"], expected.dropped[None])


def test_tasks_of_large_sorts_share_the_work_among_blocks():
    task = mosaic_sort.make_task(32768 * 8, 8, 128, 32768 * 8)
    assert 100 <= task.blocks <= mosaic_sort.MAX_BLOCKS and task.run * task.blocks >= task.total


@pytest.mark.parametrize("dtype,columns", [("bfloat16", 24), ("float32", 12), ("uint8", 36), ("float32", 1)])
def test_gather_kernel_moves_whole_rows_and_fills_zeros(rng, dtype, columns):
    x = jnp.asarray(rng.integers(1, 100, (13, columns)), dtype)
    source = jnp.asarray(rng.integers(-1, 13, 50), jnp.int32)
    np.testing.assert_array_equal(mosaic_rows.run_gather(x, source), _take(x, source))


@pytest.mark.parametrize(
    "dtype,columns,k", [("bfloat16", 24, 4), ("float32", 12, 3), ("uint8", 36, 1), ("float32", 1, 8)]
)
def test_spread_kernel_writes_each_row_to_its_places_and_nothing_else(rng, dtype, columns, k):
    x = jnp.asarray(rng.integers(1, 100, (13, columns)), dtype)
    ids = jnp.asarray(rng.integers(-1, 6, (13, k)), jnp.int32)
    order = _sort(ids, 6, 13 * k)
    got = np.asarray(mosaic_rows.run_spread(x, order.position, places=13 * k))
    used = np.asarray(order.source) >= 0
    np.testing.assert_array_equal(got[used], _take(x, order.source)[used])
    assert (got[~used].view(np.uint8) == permute_emulator.POISON).all()


def test_gather_without_fill_leaves_places_that_hold_nothing(rng):
    x = jnp.asarray(rng.integers(1, 100, (13, 24)), jnp.bfloat16)
    source = jnp.asarray(rng.integers(-1, 13, 50), jnp.int32)
    got, used = np.asarray(mosaic_rows.run_gather(x, source, fill=False)), np.asarray(source) >= 0
    np.testing.assert_array_equal(got[used], _take(x, source)[used])
    assert (got[~used].view(np.uint8) == permute_emulator.POISON).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "fmt,columns,k",
    [
        ("mxfp8", 96, 8),
        ("mxfp4", 64, 3),
        ("fp8_128", 256, 4),
        ("nvfp4", 48, 1),
        ("nvfp4_token", 112, 8),
        ("mxfp8", 72, 2),
    ],
)
def test_spread_of_quantised_rows_dequantises_them(rng, fmt, columns, k, dtype):
    x = jnp.asarray(rng.standard_normal((13, columns)) * 10.0 ** rng.integers(-3, 3, (13, 1)), jnp.bfloat16)
    x = x.at[3].set(jnp.nan).at[4].set(0)
    q = quantize(x, fmt, alignment=32 if fmt.startswith("mx") else 0)
    order = _sort(jnp.asarray(rng.integers(-1, 6, (13, k)), jnp.int32), 6, 13 * k)
    got = np.asarray(mosaic_rows.run_spread_decoded(q, order.position, places=13 * k, dtype=dtype))
    used = np.asarray(order.source) >= 0
    expected = _take(dequantize(q, dtype), order.source).astype(jnp.float32)
    np.testing.assert_array_equal(got.astype(np.float32)[used], expected[used])
    assert (got[~used].view(np.uint8) == permute_emulator.POISON).all()


@pytest.mark.parametrize("dtype,out", [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")])
@pytest.mark.parametrize("k", [3, 8])
def test_combine_kernel_adds_in_order_and_skips_empty_places(rng, dtype, out, k):
    y = jnp.asarray(rng.standard_normal((40, 24)), dtype)
    position = jnp.asarray(rng.integers(-1, 40, (17, k)), jnp.int32)
    weights = jnp.asarray(np.where(position < 0, np.nan, rng.standard_normal((17, k))), jnp.float32)
    got = mosaic_rows.run_combine(y, position, weights, out_dtype=out)
    np.testing.assert_array_equal(got, _sum_of_rows(y, position, weights, out))


@pytest.mark.parametrize("tokens,k,ranks,local", [(1, 8, 2, 64), (130, 3, 4, 5), (3000, 8, 2, 4), (64, 8, 16, 2)])
def test_slots_kernel_equals_the_xla_slots(rng, tokens, k, ranks, local):
    for low, high in ((-2, ranks * local + 2), (0, local), (-1, 0)):
        ids = jnp.asarray(rng.integers(low, high, (tokens, k)), jnp.int32)
        for capacity in (tokens, tokens // 3):
            out = mosaic_slots.run_slots(mosaic_slots.Task(tokens, k, ranks, local, capacity), ids)
            expected = _rank_slots(ids, ranks, local, capacity)
            np.testing.assert_array_equal(out["slot"], expected.slot)
            np.testing.assert_array_equal(out["counts"], expected.counts)
            np.testing.assert_array_equal(out["dropped"][0], expected.dropped)
