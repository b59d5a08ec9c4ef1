"""The combine whose rows travel quantised: who visits and stores which row, the sums, and its place in the engine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import permute_emulator
import pytest
from exchange_helpers import ROUTINGS, mesh_of, routing
from jax.sharding import PartitionSpec

from jmoe import backends, compat
from jmoe.backends.combine import pack_returned
from jmoe.backends.engine import ENGINE, packed_row
from jmoe.payload import return_layout, row_layout, unpack_data
from pallas_kernels.quantize import dequantize

pytestmark = pytest.mark.skipif(not compat.KERNELS_SUPPORTED, reason=compat.KERNELS_REASON)

P = PartitionSpec("ep")


@pytest.mark.parametrize("received", [(0, 0, 0), (3, 0, 5), (5, 5, 5), (0, 1, 0)])
def test_every_row_that_came_is_stored_once_where_it_came_from(monkeypatch, received):
    from pallas_kernels.all_to_all import mosaic_common as common

    form = common.WayBack("ep", 3, 5)
    for me in range(3):
        monkeypatch.setattr(common.lax, "axis_index", lambda name, me=me: np.int32(me))
        table = np.asarray(received, np.int32)
        stored = []
        for turn in range(int(form.turns(15, table))):
            row = int(form.row(np.int32(turn)))
            ((peer, place),) = form.places(np.int32(turn), table)
            assert int(peer) == row // 5 == (me + 1 + turn) % 3  # the link always has something to do
            if int(place) >= 0:
                assert int(place) == me * 5 + row % 5
                stored.append(row)
        assert sorted(stored) == [5 * rank + slot for rank in range(3) for slot in range(received[rank])]


def odd_rows(rng, ranks, capacity, hidden):
    """Float32 rows whose quantised ones hold zeros of both signs, NaN and the smallest and largest scales."""
    y = rng.standard_normal((ranks * capacity, hidden)).astype(np.float32)
    y[0] = -0.0
    y[1] *= 1e-38
    y[2] *= 1e37
    y[3, :40] = np.nan
    y[4] = np.where(np.arange(hidden) % 2, 1e-3, -1e-9)
    return jnp.asarray(y)


@pytest.mark.parametrize("wire", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("ranks, hidden", [(2, 96), (3, 2880)])
def testpacked_rows_are_summed_as_if_they_were_decoded_first(monkeypatch, rng, wire, out, ranks, hidden):
    from pallas_kernels.all_to_all import mosaic_sum_packed

    permute_emulator.install(monkeypatch, mosaic_sum_packed)
    tokens, capacity, layout = 7, 6, return_layout(hidden, wire)
    y = odd_rows(rng, ranks, capacity, hidden)
    rows = pack_returned(y, wire)
    wide = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % 128)), constant_values=0xA5)
    slot = rng.integers(-1, capacity, (tokens, ranks)).astype(np.int32)
    slot[0], slot[1, 0] = -1, 0
    values = np.asarray(dequantize(unpack_data(rows, layout), jnp.float32)).reshape(ranks, capacity, hidden)
    want = np.zeros((tokens, hidden), np.float32)
    for rank in range(ranks):  # in this order, as the portable combine adds
        part = np.where(slot[:, rank, None] >= 0, values[rank, slot[:, rank]], np.float32(0))
        want = part if rank == 0 else want + part
    sums = mosaic_sum_packed.sum_rows_packed(
        wide, jnp.asarray(slot), columns=hidden, fmt=layout.format, layout=packed_row(layout), out_dtype=out
    )
    want = jnp.asarray(want).astype(out)
    assert sums.dtype == want.dtype
    nan = np.isnan(np.asarray(want, np.float32))
    assert nan.any() or not (slot[:, 0] == 3).any()
    np.testing.assert_array_equal(np.isnan(np.asarray(sums, np.float32)), nan)
    bits = np.uint16 if out == "bfloat16" else np.uint32
    np.testing.assert_array_equal(np.asarray(sums).view(bits)[~nan], np.asarray(want).view(bits)[~nan])


def test_what_the_kernel_cannot_sum_is_named():
    from pallas_kernels.all_to_all.mosaic_sum_packed import reason_not
    from pallas_kernels.quantize import FORMATS

    assert reason_not(FORMATS["mxfp8"], 2880, jnp.bfloat16) is None
    assert "powers of two" in reason_not(FORMATS["nvfp4_token"], 2880, jnp.bfloat16)
    assert "blocks of 32" in reason_not(FORMATS["mxfp8"], 2896, jnp.bfloat16)
    assert "not int8" in reason_not(FORMATS["mxfp8"], 2880, jnp.int8)


def pushed_by_xla(y, received, *, fmt, layout, axis_name):
    """What `push_back_quantized` delivers, with garbage in what it does not write."""
    ranks = received.shape[0]
    rows = pack_returned(y, fmt.name)
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % 128)), constant_values=0xFF)
    real = jnp.arange(y.shape[0] // ranks)[None] < received[:, None]
    rows = jnp.where(real.reshape(-1, 1), rows, jnp.uint8(0xFF))
    return jax.lax.all_to_all(rows, axis_name, 0, 0, tiled=True)


def summed_by_xla(rows, slot, *, columns, fmt, layout, out_dtype):
    tokens, ranks = slot.shape
    values = dequantize(unpack_data(rows[:, : layout.row_bytes], return_layout(columns, fmt.name)), jnp.float32)
    values = values.reshape(ranks, -1, columns)
    total = jnp.zeros((tokens, columns), jnp.float32)
    for rank in range(ranks):
        part = values[rank, jnp.maximum(slot[:, rank], 0)]
        total = total + jnp.where(slot[:, rank, None] >= 0, part, 0)
    return total.astype(out_dtype)


@pytest.mark.parametrize("name", ["nvlink_one_sided", "low_latency"])
@pytest.mark.parametrize("routed", ROUTINGS)
def test_the_engines_quantised_combine_is_the_portable_one(monkeypatch, rng, name, routed):
    from pallas_kernels.all_to_all import mosaic_push_quantized, mosaic_sum_packed

    pushed = []
    push = lambda *a, **k: pushed.append(0) or pushed_by_xla(*a, **k)  # noqa: E731
    monkeypatch.setattr(mosaic_push_quantized, "push_back_quantized", push)
    monkeypatch.setattr(mosaic_sum_packed, "sum_rows_packed", summed_by_xla)
    ranks, tokens, hidden, top_k = 4, 6, 64, 3
    backend = backends.get_backend(name)
    sizes = dict(tokens=tokens, num_ranks=ranks, num_local=3, top_k=top_k, axis_name="ep", capacity_factor=0.75)
    portable, kernel = (backends.exchange_for(backend, engine=e, **sizes) for e in (None, ENGINE))
    if name == "low_latency":  # whose rows travel one by one: no kernel sums them, and none here gives them back
        kernel = dataclasses.replace(kernel, engine=dataclasses.replace(ENGINE, give_back=None))
    layout = row_layout(hidden, "bfloat16", top_k)

    def run(x, ids, weights):
        plan = backend.plan(ids, portable)
        got = backends.dispatch_payload(x, ids, weights, plan, backend=backend, exchange=portable, layout=layout)

        def back(y, exchange):
            y = jnp.where(jnp.any(got.ids >= 0, axis=1, keepdims=True), y, jnp.nan)
            return backends.combine(
                y, weights, plan, backend=backend, exchange=exchange, recv_ids=got.ids, wire="mxfp8"
            )

        y = got.x.astype(jnp.float32) * 3
        return [back(y, e) for e in (portable, kernel)]

    ids = routing(routed, rng, ranks, tokens=tokens, num_experts=3 * ranks, top_k=top_k)
    x = rng.standard_normal((ranks * tokens, hidden)).astype(jnp.bfloat16)
    weights = rng.random(ids.shape, np.float32)
    mapped = compat.shard_map(run, mesh=mesh_of(ranks), in_specs=P, out_specs=P)
    want, got = jax.jit(mapped)(x, ids, weights)
    assert bool(pushed) == (name == "nvlink_one_sided")
    assert (float(np.abs(np.asarray(want, np.float32)).sum()) > 0) == (routed not in ("all_invalid",))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
