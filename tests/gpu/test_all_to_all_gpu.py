"""The remote-write kernels on two or more GPUs: every byte equals what the portable collectives deliver.

Run as `JMOE_TEST_GPU=1 NCCL_NVLS_ENABLE=0 pytest tests/gpu/test_all_to_all_gpu.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmoe import compat
from jmoe.backends import combine, dispatch_payload, exchange_for, get_backend, start
from jmoe.backends.base import received_valid
from jmoe.backends.engine import ENGINE, engine_reason
from jmoe.caps import DeviceCaps
from jmoe.payload import row_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(
        jax.devices()[0].platform == "gpu" and engine_reason(DeviceCaps.detect()) is not None,
        reason="the kernels cannot serve these devices",
    ),
]

ROUTERS = ("uniform", "zipf", "one_rank", "empty_rank", "invalid")
UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
TOKENS = (1, 7, 128, 1023, 8192)


def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()), ("ep",))


def mapped(function):
    """`function` of one rank's arrays, over all devices; arrays have a leading axis of ranks outside."""
    local = lambda *a: jax.tree.map(lambda v: v[None], function(*[v[0] for v in a]))  # noqa: E731
    return jax.jit(compat.shard_map(local, mesh=mesh(), in_specs=P("ep"), out_specs=P("ep")))


def put(*arrays):
    return [jax.device_put(a, NamedSharding(mesh(), P("ep"))) for a in arrays]


def route(key, router, tokens, experts, top_k, rank, num_ranks):
    """ids int32 [T, K] and weights of one rank by a router of that name."""
    noise = jax.random.gumbel(key, (tokens, experts))
    if router == "zipf":
        noise -= jnp.log1p(jnp.arange(experts, dtype=jnp.float32))[None, :]
    if router == "one_rank":
        noise = jnp.where((jnp.arange(experts) < experts // num_ranks)[None, :], noise, -jnp.inf)
    ids = lax.top_k(noise, top_k)[1].astype(jnp.int32)
    if router == "one_rank":
        ids = ids % (experts // num_ranks)
    if router == "empty_rank":
        ids = jnp.where(rank == 0, -1, ids)
    if router == "invalid":
        ids = jnp.full_like(ids, -1)
    return ids, jax.random.uniform(jax.random.fold_in(key, 1), ids.shape)


def poison(shape):
    """Fills and frees memory on every device, so that a result that is not written holds NaN, not an old result."""
    size = int(np.prod(shape))
    jax.block_until_ready(mapped(lambda v: jnp.full((size,), jnp.nan) + v)(*put(np.zeros((jax.device_count(), 1)))))


def both_ways(backend, router, tokens, wire, hidden, experts, top_k):
    """One dispatch and combine of one rank through the kernels and through XLA: numbers of differing bytes."""
    backend = get_backend(backend)
    num_ranks = jax.device_count()
    make = functools.partial(
        exchange_for,
        backend,
        tokens=tokens,
        num_ranks=num_ranks,
        num_local=experts // num_ranks,
        top_k=top_k,
        axis_name="ep",
    )
    kernel, portable = make(engine=ENGINE), make()
    layout = row_layout(hidden, wire, top_k)

    def run(seed):
        rank = kernel.rank()
        key = jax.random.fold_in(jax.random.key(seed[0]), rank)
        ids, weights = route(key, router, tokens, experts, top_k, rank, num_ranks)
        x = jax.random.normal(jax.random.fold_in(key, 2), (tokens, hidden), jnp.bfloat16)
        plan = backend.plan(ids, kernel)
        send = functools.partial(dispatch_payload, x, ids, weights, plan, backend=backend, layout=layout)
        got, want = send(exchange=kernel), send(exchange=portable)
        counts = backend.exchange_counts(plan, portable)
        valid = received_valid(backend, counts, plan, portable)
        flight = start(x, ids, weights, plan, backend=backend, layout=layout, exchange=kernel)
        wrong_counts = jnp.sum(flight.counts != counts) + jnp.sum(got.counts != want.counts)
        wrong_bytes = jnp.sum(got.ids != want.ids) + jnp.sum(got.weights != want.weights)
        for a, b in zip(jax.tree.leaves(got.x), jax.tree.leaves(want.x), strict=True):
            a, b = (lax.bitcast_convert_type(v, UNSIGNED[v.dtype.itemsize]).reshape(v.shape[0], -1) for v in (a, b))
            wrong_bytes += jnp.sum((a != b) & valid[:, None])
        y = jax.random.normal(jax.random.fold_in(key, 3), (backend.num_rows(kernel), hidden), jnp.bfloat16)
        y = jnp.where(valid[:, None], y, jnp.nan)  # what nobody sent must not be read
        recv_ids = jnp.where(valid[:, None], 0, -1)
        back = functools.partial(combine, y, weights, plan, backend=backend, recv_ids=recv_ids, out_dtype=jnp.float32)
        a, b = back(exchange=kernel), back(exchange=portable)
        again = back(exchange=kernel)
        close = jnp.abs(a - b) <= (0 if backend.form == "standard" else 1e-5 * jnp.abs(b) + 1e-6)
        repeated = lax.bitcast_convert_type(a, jnp.int32) == lax.bitcast_convert_type(again, jnp.int32)
        return wrong_counts, wrong_bytes, jnp.sum(~close), jnp.sum(~repeated), jnp.sum(valid)

    return run


def check(run, seed=0):
    num_ranks = jax.device_count()
    out = mapped(run)(*put(np.full((num_ranks, 1), seed, np.int32)))
    counts, sent, back, repeated, valid = (int(np.asarray(v).sum()) for v in out)
    assert (counts, sent, back, repeated) == (0, 0, 0, 0)
    return valid


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("router", ROUTERS)
def test_dispatch_and_combine_equal_the_portable_collectives(router, tokens):
    experts = 8 * jax.device_count()
    poison((min(tokens, 1023) * 7168 * 2,))
    valid = check(
        both_ways("nvlink_one_sided", router, tokens, "bfloat16", 2880 if tokens == 1023 else 7168, experts, 8)
    )
    assert (valid == 0) == (router == "invalid")


@pytest.mark.parametrize("wire", ["mxfp8", "nvfp4_token", "fp8_128", "float32"])
@pytest.mark.parametrize("hidden", [2048, 4096, 7168])
def test_every_wire_format_travels_bit_for_bit(wire, hidden):
    experts = 8 * jax.device_count()
    assert check(both_ways("nvlink_one_sided", "uniform", 300, wire, hidden, experts, 4)) > 0


@pytest.mark.parametrize("top_k", [1, 22])
@pytest.mark.parametrize("router", ROUTERS)
def test_batched_form_equals_the_portable_collectives(router, top_k):
    experts = 32 * jax.device_count()
    check(both_ways("low_latency", router, 64, "nvfp4_token", 4096, experts, top_k))


def test_two_thousand_random_layers_in_a_row():
    run = both_ways("nvlink_one_sided", "uniform", 64, "mxfp8", 1024, 8 * jax.device_count(), 4)

    def many(seed):
        def one(i, bad):
            out = run(seed + i)
            return bad + sum(v.astype(jnp.int32) for v in out[:4])

        return lax.fori_loop(0, 2000, one, jnp.int32(0))

    num_ranks = jax.device_count()
    bad = mapped(many)(*put(np.zeros((num_ranks, 1), np.int32)))
    assert int(np.asarray(bad).sum()) == 0


@pytest.mark.parametrize("tokens, hidden", [(7, 7168), (1023, 2880), (4096, 7168)])
def test_combine_that_writes_equals_the_one_that_reads(tokens, hidden):
    from pallas_kernels.all_to_all.mosaic_combine import combine_rows
    from pallas_kernels.all_to_all.mosaic_combine_push import combine_rows_pushed

    num_ranks = jax.device_count()
    backend = get_backend("nvlink_one_sided")
    exchange = exchange_for(backend, tokens=tokens, num_ranks=num_ranks, num_local=8, top_k=4, axis_name="ep")

    def run(seed):
        rank = exchange.rank()
        key = jax.random.fold_in(jax.random.key(seed[0]), rank)
        ids, _ = route(key, "uniform", tokens, 8 * num_ranks, 4, rank, num_ranks)
        plan = backend.plan(ids, exchange)
        y = jax.random.normal(key, (backend.num_rows(exchange), hidden), jnp.bfloat16)
        valid = received_valid(backend, backend.exchange_counts(plan, exchange), plan, exchange)
        y = jnp.where(valid[:, None], y, jnp.nan)
        common = dict(axis_name="ep", capacity=exchange.capacity, out_dtype=jnp.float32)
        read = combine_rows(y, plan.slot, **common)
        written = combine_rows_pushed(y, plan.slot, plan.counts, **common)
        return jnp.sum(lax.bitcast_convert_type(read, jnp.int32) != lax.bitcast_convert_type(written, jnp.int32))

    for seed in range(3):
        wrong = mapped(run)(*put(np.full((num_ranks, 1), seed, np.int32)))
        assert int(np.asarray(wrong).sum()) == 0


@pytest.mark.parametrize("slices", [1, 5])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.uint8, jnp.float32])
def test_ragged_push_equals_its_reference(slices, dtype):
    from pallas_kernels.all_to_all import ragged_all_to_all_reference
    from pallas_kernels.all_to_all.mosaic_ragged import ragged_push

    num_ranks, rows, width = jax.device_count(), 256, 144
    rng = np.random.default_rng(slices)
    size = rng.integers(0, rows // (num_ranks * slices), (num_ranks, num_ranks, slices))
    size[0, 1] = 0
    before = lambda a: np.concatenate([np.zeros_like(a[..., :1]), np.cumsum(a, -1)[..., :-1]], -1)  # noqa: E731
    flat = size.reshape(num_ranks, -1)
    source = before(flat)
    arrived = size.transpose(1, 0, 2).reshape(num_ranks, -1)  # [receiver, source * slices]
    place = before(arrived).reshape(num_ranks, num_ranks, slices).transpose(1, 0, 2).reshape(num_ranks, -1)
    tables = [a.astype(np.int32) for a in (source, flat, place, arrived)]
    x = np.asarray(jnp.asarray(rng.integers(0, 200, (num_ranks, rows, width))).astype(dtype))
    output = np.asarray(jnp.asarray(rng.integers(0, 200, (num_ranks, rows, width))).astype(dtype))
    kernel = lambda x, o, i, s, d, r: ragged_push(x, o, i, s, d, axis_name="ep", num_ranks=num_ranks)  # noqa: E731
    reference = functools.partial(ragged_all_to_all_reference, axis_name="ep")
    got, want = (np.asarray(mapped(f)(*put(x, output, *tables))) for f in (kernel, reference))
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
