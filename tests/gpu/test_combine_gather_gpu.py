"""The combine that gathers and sums the experts' rows itself, on two or more GPUs: the bits of the two steps.

Run as `JMOE_TEST_GPU=1 NCCL_NVLS_ENABLE=0 pytest tests/gpu/test_combine_gather_gpu.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_ranks import NEEDS_GPUS, NUM_RANKS, ROUTERS, as_bits, digest, for_shapes, program_of, put, route
from jax import lax

from jmoe.backends import combine, dispatch_payload, exchange_for, get_backend
from jmoe.backends.engine import ENGINE, reduce_gathering
from jmoe.payload import row_layout
from pallas_kernels.permute import Unsummed, merge_duplicates, sort_by_expert

pytestmark = NEEDS_GPUS

BACKEND = get_backend("nvlink_one_sided")
TWO_STEPS = dataclasses.replace(ENGINE, reduce_unsummed=None)
JOINED = dataclasses.replace(ENGINE, reduce_unsummed=reduce_gathering)  # whatever the number of rows


def exchange_by(engine, tokens, experts, top_k, capacity_factor=None):
    sizes = dict(tokens=tokens, num_ranks=NUM_RANKS, num_local=experts // NUM_RANKS, top_k=top_k, axis_name="ep")
    return exchange_for(BACKEND, engine=engine, capacity_factor=capacity_factor, **sizes)


def arrive(ids, weights, exchange):
    """The plan of these ids, and of what arrives: ids, places and weights of the rows, and how many places are used."""
    plan = BACKEND.plan(ids, exchange)
    x = jnp.zeros((ids.shape[0], 64), jnp.bfloat16)
    layout = row_layout(64, "bfloat16", ids.shape[1])
    got = dispatch_payload(x, ids, weights, plan, backend=BACKEND, exchange=exchange, layout=layout)
    local, factors = got.ids, got.weights
    if local.shape[1] > exchange.num_local:
        local, factors = merge_duplicates(local, factors)
    places = local.shape[0] * min(local.shape[1], exchange.num_local)
    order = sort_by_expert(local, exchange.num_local, num_places=places)
    return plan, got.ids, order.position, factors, jnp.sum(order.group_sizes)


def both_ways(tokens, hidden, top_k, experts, *, out_dtype=jnp.float32, capacity_factor=None):
    """(ids, seed) of one rank -> elements in which the two forms of combine differ, rows that were sent, a digest."""
    two_steps, joined = (exchange_by(engine, tokens, experts, top_k, capacity_factor) for engine in (TWO_STEPS, JOINED))

    def run(ids, seed):
        key = jax.random.fold_in(jax.random.key(seed[0]), lax.axis_index("ep"))
        weights = jax.random.uniform(key, ids.shape)
        plan, recv_ids, position, factors, used = arrive(ids, weights, two_steps)
        places = position.shape[0] * min(top_k, two_steps.num_local)
        y = jax.random.normal(key, (places, hidden), jnp.bfloat16)
        y = jnp.where((jnp.arange(places) < used)[:, None], y, jnp.nan)  # nobody reads past the last place
        factors = jnp.where(position >= 0, factors, jnp.nan)
        rows = Unsummed(y, position, factors, hidden)
        back = dict(backend=BACKEND, recv_ids=recv_ids, out_dtype=out_dtype)
        a, b = (combine(rows, weights, plan, exchange=e, **back) for e in (two_steps, joined))
        return jnp.sum(as_bits(a) != as_bits(b)), jnp.sum(plan.counts), digest(b)

    return run


def check(run, ids):
    """Asserts that nothing differs, and that a second run gives the same bits; how many rows travelled."""
    arrays = put(ids, np.zeros((NUM_RANKS, 1), np.int32))
    wrong, rows, bits = (np.asarray(v) for v in run(*arrays))
    assert not wrong.any(), wrong
    np.testing.assert_array_equal(bits, run(*arrays)[2])
    return int(rows.sum())


def with_all(tokens, hidden, top_k):
    return for_shapes(both_ways(tokens, hidden, top_k, 32 * NUM_RANKS), (tokens, top_k), (1,))


@pytest.mark.parametrize(
    "tokens, hidden, top_k",
    [(0, 4096, 8), (1, 7168, 22), (7, 2880, 4), (128, 2048, 8), (1023, 2880, 22), (4096, 4096, 1), (8192, 2048, 8)],
)
@program_of(with_all)
def test_the_bits_are_those_of_the_two_steps(program, tokens, hidden, top_k):
    for router in ROUTERS:
        sent = check(program, route(router, tokens, 32 * NUM_RANKS, top_k, repeat=True))
        assert (sent == 0) == (router == "invalid" or tokens == 0), router


EXPERTS, TOP_K = 8 * NUM_RANKS, 4


def with_little_capacity(tokens):
    run = both_ways(tokens, 7168, TOP_K, EXPERTS, out_dtype=jnp.bfloat16, capacity_factor=0.75)
    return for_shapes(run, (tokens, TOP_K), (1,))


@pytest.mark.parametrize("tokens", [64, 2048])
@program_of(with_little_capacity)
def test_rows_beyond_the_capacity_and_sums_in_bfloat16(program, tokens):
    for router in ROUTERS[:4]:
        assert check(program, route(router, tokens, EXPERTS, TOP_K, repeat=True)) > 0


def many_layers(tokens, calls):
    run = both_ways(tokens, 1032, TOP_K, EXPERTS)

    def many(seed):
        def one(i, bad):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), i), lax.axis_index("ep"))
            ids = lax.top_k(jax.random.uniform(key, (tokens, EXPERTS)), TOP_K)[1].astype(jnp.int32)
            ids = jnp.where(jax.random.uniform(jax.random.fold_in(key, 1), ids.shape) < 0.2, -1, ids)
            return bad + run(ids, seed + i)[0].astype(jnp.int32)

        return lax.fori_loop(0, calls, one, jnp.int32(0))

    return for_shapes(many, (1,))


@pytest.mark.parametrize("tokens, calls", [(48, 1000), (2048, 100)])
@program_of(many_layers)
def test_many_random_layers_in_a_row(program, tokens, calls):
    bad = program(*put(np.zeros((NUM_RANKS, 1), np.int32)))
    assert int(np.asarray(bad).sum()) == 0
