"""The remote-write kernels on two or more GPUs: every byte equals what the portable collectives deliver.

Run as `JMOE_TEST_GPU=1 NCCL_NVLS_ENABLE=0 pytest tests/gpu/test_all_to_all_gpu.py`, in one process: it compiles
programs side by side, a batch before the first of its tests.
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_ranks import (
    NEEDS_GPUS,
    NUM_RANKS,
    ROUTERS,
    as_bits,
    digest,
    for_shapes,
    mapped,
    program_of,
    put,
    route,
)
from jax import lax

from jmoe.backends import combine, dispatch_float, dispatch_payload, exchange_for, finish, get_backend, start
from jmoe.backends.base import received_valid
from jmoe.backends.engine import ENGINE
from jmoe.payload import row_layout

pytestmark = NEEDS_GPUS


def differing(a, b, valid=None):
    """Elements of two arrays or QTensors whose bits differ, in the rows that are valid."""
    wrong = jnp.int32(0)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        same = as_bits(x) == as_bits(y)
        if valid is not None and x.ndim:  # a scale of the whole tensor has no rows
            same |= ~valid.reshape(-1, *(1,) * (x.ndim - 1))
        wrong += jnp.sum(~same, dtype=jnp.int32)
    return wrong


@functools.cache
def filler(nbytes):
    return mapped(lambda v: jnp.full((nbytes // 4,), jnp.nan, jnp.float32) + v)


def poison(nbytes):
    """Fills and frees memory on every device, so that a result that is not written holds NaN, not an old result."""
    jax.block_until_ready(filler(nbytes)(*put(np.zeros((NUM_RANKS, 1), np.float32))))


def exchanges(backend, tokens, experts, top_k):
    """The exchange through the kernels and the one through the portable collectives."""
    sizes = dict(tokens=tokens, num_ranks=NUM_RANKS, num_local=experts // NUM_RANKS, top_k=top_k, axis_name="ep")
    return [exchange_for(backend, engine=e, **sizes) for e in (ENGINE, None)]


def both_ways(backend, tokens, wire, hidden, experts, top_k):
    """(ids, seed) of one rank -> by how much dispatch and combine through the kernels and through XLA differ,

    how many rows arrive, and digests of what the kernels gave.
    """
    backend = get_backend(backend)
    kernel, portable = exchanges(backend, tokens, experts, top_k)
    layout = row_layout(hidden, wire, top_k)

    def run(ids, seed):
        key = jax.random.fold_in(jax.random.key(seed[0]), kernel.rank())
        weights = jax.random.uniform(key, ids.shape)
        x = jax.random.normal(jax.random.fold_in(key, 2), (tokens, hidden), jnp.bfloat16)
        plan = backend.plan(ids, kernel)
        common = dict(backend=backend, layout=layout)
        flight = start(x, ids, weights, plan, exchange=kernel, **common)
        got = finish(flight, plan, exchange=kernel, **common)
        want = dispatch_payload(x, ids, weights, plan, exchange=portable, **common)
        counts = backend.exchange_counts(plan, portable)
        valid = received_valid(backend, counts, plan, portable)
        results = {
            "counts": jnp.sum(flight.counts != counts) + jnp.sum(got.counts != want.counts),
            "ids": jnp.sum(got.ids != want.ids) + differing(got.weights, want.weights),
            "data": differing(got.x, want.x, valid),
        }
        y = jax.random.normal(jax.random.fold_in(key, 3), (backend.num_rows(kernel), hidden), jnp.bfloat16)
        y = jnp.where(valid[:, None], y, jnp.nan)  # what nobody sent must not be read
        recv_ids = jnp.where(valid[:, None], 0, -1)
        back = functools.partial(combine, y, weights, plan, backend=backend, recv_ids=recv_ids, out_dtype=jnp.float32)
        a, b = back(exchange=kernel), back(exchange=portable)
        close = jnp.abs(a - b) <= (0 if backend.form == "standard" else 1e-5 * jnp.abs(b) + 1e-6)
        results["combine"] = jnp.sum(~close)
        if hidden % 32 == 0:
            results["mxfp8 combine"] = differing(
                back(exchange=kernel, wire="mxfp8"), back(exchange=portable, wire="mxfp8")
            )
        return results, jnp.sum(valid), (digest(got.x, valid), digest(a))

    return run


def check(run, ids):
    """Asserts that nothing differs, and that a second run gives the same bits; how many rows travelled."""
    arrays = put(ids, np.zeros((NUM_RANKS, 1), np.int32))
    wrong, valid, bits = run(*arrays)
    wrong = {name: int(np.asarray(v).sum()) for name, v in wrong.items()}
    assert not any(wrong.values()), wrong
    for first, second in zip(bits, run(*arrays)[2], strict=True):
        np.testing.assert_array_equal(first, second)
    return int(np.asarray(valid).sum())


def exchanged(backend, tokens, wire, hidden, experts, top_k):
    return for_shapes(both_ways(backend, tokens, wire, hidden, experts, top_k), (tokens, top_k), (1,))


MANY = 32 * NUM_RANKS  # experts
FEW = 8 * NUM_RANKS


@pytest.mark.parametrize(
    "tokens, hidden, top_k",
    [(0, 4096, 8), (1, 7168, 22), (7, 2880, 4), (128, 4096, 22), (1023, 2880, 8), (8192, 7168, 8)],
)
@program_of(lambda tokens, hidden, top_k: exchanged("nvlink_one_sided", tokens, "bfloat16", hidden, MANY, top_k))
def test_dispatch_and_combine_equal_the_portable_collectives(program, tokens, hidden, top_k):
    for router in ROUTERS:
        poison(max(1, min(tokens, 1023)) * hidden * 4)
        sent = check(program, route(router, tokens, MANY, top_k))
        assert (sent == 0) == (router == "invalid" or tokens == 0), router


def tokens_of(hidden):
    return 1023 if hidden == 7168 else 300


def on_wire(wire, hidden):
    width = 2816 if wire == "fp8_128" and hidden % 128 else hidden
    return exchanged("nvlink_one_sided", tokens_of(hidden), wire, width, FEW, 4)


@pytest.mark.parametrize("wire", ["mxfp8", "nvfp4_token", "nvfp4", "fp8_128", "float32"])
@pytest.mark.parametrize("hidden", [2880, 4096, 7168])
@program_of(on_wire)
def test_every_wire_format_travels_bit_for_bit(program, wire, hidden):
    for router in ("uniform", "zipf", "one_rank", "empty_rank"):
        assert check(program, route(router, tokens_of(hidden), FEW, 4)) > 0


@pytest.mark.parametrize(
    "backend, wire", [("low_latency", "nvfp4_token"), ("low_latency", "fp8_128"), ("nixl_ep", "bfloat16")]
)
@pytest.mark.parametrize("tokens, top_k", [(0, 4), (1, 1), (64, 22), (128, 8), (140, 8)])
@program_of(lambda backend, wire, tokens, top_k: exchanged(backend, tokens, wire, 4096, MANY, top_k))
def test_batched_form_equals_the_portable_collectives(program, backend, wire, tokens, top_k):
    for router in ROUTERS:
        check(program, route(router, tokens, MANY, top_k))


def test_masked_ranks_receive_nothing_and_a_new_mask_does_not_retrace():
    backend, experts, tokens, top_k = get_backend("nixl_ep"), 8 * NUM_RANKS, 32, 4
    kernel, portable = exchanges(backend, tokens, experts, top_k)
    layout = row_layout(2048, "bfloat16", top_k)
    traces = []

    def run(ids, mask):
        traces.append(0)
        key = jax.random.fold_in(jax.random.key(0), kernel.rank())
        x = jax.random.normal(key, (tokens, 2048), jnp.bfloat16)
        weights = jax.random.uniform(key, ids.shape)
        plan = backend.plan(ids, kernel, rank_mask=mask)
        outs, counts = [], []
        for exchange in (kernel, portable):
            got = dispatch_payload(x, ids, weights, plan, backend=backend, layout=layout, exchange=exchange)
            y = jnp.where(got.ids >= 0, got.x, jnp.nan)
            outs.append(combine(y, weights, plan, backend=backend, exchange=exchange, recv_ids=got.ids))
            counts.append(got.counts)
        return jnp.sum(outs[0] != outs[1]), jnp.sum(counts[0] != counts[1]), jnp.sum(counts[0])

    run = mapped(run)
    ids = route("uniform", tokens, experts, top_k)
    for absent in (None, 0, NUM_RANKS - 1):
        mask = np.tile(np.arange(NUM_RANKS) != absent, (NUM_RANKS, 1))
        wrong, wrong_counts, rows = (np.asarray(v) for v in run(*put(ids, mask)))
        assert wrong[mask[0]].sum() == 0 and wrong_counts.sum() == 0  # what an absent rank computes is nobody's
        assert [bool(n) for n in rows] == list(mask[0])
    assert len(traces) == 1


def gradients(wire):
    """Of dispatch and combine through the kernels and through XLA: by how much they differ."""
    backend, tokens, top_k, hidden = get_backend("nvlink_one_sided"), 65, 4, 2048
    layout = row_layout(hidden, wire, top_k)

    def run(ids):
        key = jax.random.fold_in(jax.random.key(1), lax.axis_index("ep"))
        x = jax.random.normal(key, (tokens, hidden), jnp.float32)
        weights = jax.random.uniform(key, ids.shape)
        grads = []
        for exchange in exchanges(backend, tokens, FEW, top_k):

            def loss(x, weights, exchange=exchange):
                plan = backend.plan(ids, exchange)
                got = dispatch_float(x, ids, weights, plan, backend=backend, exchange=exchange, layout=layout)
                real = jnp.any(got.ids >= 0, axis=1, keepdims=True)
                y = jnp.where(real, got.x * jnp.sum(got.weights, axis=1, keepdims=True), 0)
                back = dict(recv_ids=got.ids, out_dtype=jnp.float32)
                return jnp.sum(combine(y, weights, plan, backend=backend, exchange=exchange, **back) ** 2)

            grads.append(jax.grad(loss, argnums=(0, 1))(x, weights))
        return [jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)) for a, b in zip(*grads, strict=True)]

    return for_shapes(run, (tokens, top_k))


@pytest.mark.parametrize("wire", ["bfloat16", "mxfp8"])
@program_of(gradients)
def test_gradients_equal_those_of_the_portable_collectives(program, wire):
    for error in program(*put(route("uniform", 65, FEW, 4))):
        assert float(np.asarray(error).max()) < 1e-6


def many_layers():
    tokens, top_k = 64, 4
    run = both_ways("nvlink_one_sided", tokens, "mxfp8", 1024, FEW, top_k)

    def many(seed):
        def one(i, bad):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), i), lax.axis_index("ep"))
            ids = lax.top_k(jax.random.uniform(key, (tokens, FEW)), top_k)[1].astype(jnp.int32)
            ids = jnp.where(jax.random.uniform(jax.random.fold_in(key, 1), ids.shape) < 0.2, -1, ids)
            return bad + sum(v.astype(jnp.int32) for v in jax.tree.leaves(run(ids, seed + i)[0]))

        return lax.fori_loop(0, 2000, one, jnp.int32(0))

    return for_shapes(many, (1,))


@program_of(many_layers)
def test_two_thousand_random_layers_in_a_row(program):
    bad = program(*put(np.zeros((NUM_RANKS, 1), np.int32)))
    assert int(np.asarray(bad).sum()) == 0


def test_a_bounded_wait_names_the_rank_that_does_not_arrive():
    """In a process of its own, which takes the memory that it needs: what a kernel prints appears when it ends."""
    little = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    run = subprocess.run([sys.executable, "-c", ABSENT_RANK], capture_output=True, text=True, timeout=100, env=little)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line for line in run.stdout.splitlines() if line.startswith("exchange:")]
    assert lines and all("0 signals of rank 1" in line for line in lines), run.stdout
    assert f"exchange: rank {NUM_RANKS - 1}" in run.stdout and "done" in run.stdout


ABSENT_RANK = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P
from jmoe import compat
from pallas_kernels.all_to_all import mosaic_common as common

n = min(jax.device_count(), 8)
schedule = common.Schedule(blocks=1, wait_limit=20000)

def body(out_ref):
    arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((n,)))
    me = lax.axis_index("ep")
    for step in range(n):
        @pl.when(me != 1)
        def _():
            pl.semaphore_signal(arrived.at[me], device_id={"ep": common.peer_of(me, step + 1, n)})
    for source in range(n):
        common.wait_for(arrived.at[source], 1, schedule.wait_limit, me, source)
    out_ref[0] = me

kernel = lambda _: plgpu.kernel(
    body, out_type=jax.ShapeDtypeStruct((1,), jnp.int32), **common.kernel_params(schedule, "absent", warpgroups=1))()
mesh = jax.sharding.Mesh(np.array(jax.devices()[:n]), ("ep",))
run = jax.jit(compat.shard_map(kernel, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
print("done", jax.block_until_ready(run(jnp.zeros((n,), jnp.int32))))
"""


def written_and_read(tokens, hidden):
    from pallas_kernels.all_to_all.mosaic_combine import combine_rows
    from pallas_kernels.all_to_all.mosaic_combine_push import combine_rows_pushed

    backend = get_backend("nvlink_one_sided")
    exchange, _ = exchanges(backend, tokens, FEW, 4)

    def run(ids):
        key = jax.random.fold_in(jax.random.key(0), exchange.rank())
        plan = backend.plan(ids, exchange)
        y = jax.random.normal(key, (backend.num_rows(exchange), hidden), jnp.bfloat16)
        valid = received_valid(backend, backend.exchange_counts(plan, exchange), plan, exchange)
        y = jnp.where(valid[:, None], y, jnp.nan)
        common = dict(axis_name="ep", capacity=exchange.capacity, out_dtype=jnp.float32)
        read = combine_rows(y, plan.slot, **common)
        written = combine_rows_pushed(y, plan.slot, plan.counts, **common)
        return differing(read, written)

    return for_shapes(run, (tokens, 4))


@pytest.mark.parametrize("tokens, hidden", [(7, 7168), (1023, 2880), (4096, 7168)])
@program_of(written_and_read)
def test_combine_that_writes_equals_the_one_that_reads(program, tokens, hidden):
    for router in ROUTERS:
        wrong = program(*put(route(router, tokens, FEW, 4)))
        assert int(np.asarray(wrong).sum()) == 0, router


RAGGED_ROWS, RAGGED_WIDTH = 256, 144


def ragged_push_and_reference(slices, dtype):
    from pallas_kernels.all_to_all import ragged_all_to_all_reference
    from pallas_kernels.all_to_all.mosaic_ragged import ragged_push

    def run(*arrays):
        got = ragged_push(*arrays[:5], axis_name="ep", num_ranks=NUM_RANKS)
        return got, ragged_all_to_all_reference(*arrays, axis_name="ep")

    rows, table = (RAGGED_ROWS, RAGGED_WIDTH), (NUM_RANKS * slices,)
    return for_shapes(run, rows, rows, *[table] * 4, dtypes=(dtype, dtype, *[jnp.int32] * 4))


@pytest.mark.parametrize("slices", [1, 5])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.uint8, jnp.float32])
@program_of(ragged_push_and_reference)
def test_ragged_push_equals_its_reference(program, slices, dtype):
    num_ranks, shape = NUM_RANKS, (NUM_RANKS, RAGGED_ROWS, RAGGED_WIDTH)
    rng = np.random.default_rng(slices)
    size = rng.integers(0, RAGGED_ROWS // (num_ranks * slices), (num_ranks, num_ranks, slices))
    size[0, 1] = 0
    before = lambda a: np.concatenate([np.zeros_like(a[..., :1]), np.cumsum(a, -1)[..., :-1]], -1)  # noqa: E731
    flat = size.reshape(num_ranks, -1)
    source = before(flat)
    arrived = size.transpose(1, 0, 2).reshape(num_ranks, -1)  # [receiver, source * slices]
    place = before(arrived).reshape(num_ranks, num_ranks, slices).transpose(1, 0, 2).reshape(num_ranks, -1)
    tables = [a.astype(np.int32) for a in (source, flat, place, arrived)]
    x, output = (np.asarray(jnp.asarray(rng.integers(0, 200, shape)).astype(dtype)) for _ in range(2))
    got, want = (np.asarray(v) for v in program(*put(x, output, *tables)))
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
