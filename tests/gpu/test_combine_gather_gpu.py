"""The combine that gathers and sums the experts' rows itself, on two or more GPUs: the bits of the two steps.

Run as `JMOE_TEST_GPU=1 NCCL_NVLS_ENABLE=0 pytest tests/gpu/test_combine_gather_gpu.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_ranks import NEEDS_GPUS, NUM_RANKS, ROUTERS, UNSIGNED, mapped, put, route
from jax import lax

from jmoe.backends import combine, dispatch_payload, exchange_for, get_backend
from jmoe.backends.engine import ENGINE, GATHERING_ENGINE
from jmoe.payload import row_layout
from pallas_kernels.permute import Unsummed, merge_duplicates, sort_by_expert

pytestmark = NEEDS_GPUS

BACKEND = get_backend("nvlink_one_sided")


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
    """(ids, seed) of one rank -> elements in which the two forms of combine differ, and rows that were sent."""
    two_steps, joined = (
        exchange_by(engine, tokens, experts, top_k, capacity_factor) for engine in (ENGINE, GATHERING_ENGINE)
    )

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
        a, b, c = (combine(rows, weights, plan, exchange=e, **back) for e in (two_steps, joined, joined))
        a, b, c = (lax.bitcast_convert_type(v, UNSIGNED[v.dtype.itemsize]) for v in (a, b, c))
        return jnp.sum((a != b) | (b != c)), jnp.sum(plan.counts)

    return run


def check(run, ids, seed=0):
    """Asserts that nothing differs; how many rows travelled."""
    wrong, rows = (np.asarray(v) for v in run(*put(ids, np.full((NUM_RANKS, 1), seed, np.int32))))
    assert not wrong.any(), wrong
    return int(rows.sum())


@pytest.mark.parametrize(
    "tokens, hidden, top_k",
    [(0, 4096, 8), (1, 7168, 22), (7, 2880, 4), (128, 2048, 8), (1023, 2880, 22), (4096, 4096, 1), (8192, 2048, 8)],
)
def test_the_bits_are_those_of_the_two_steps(tokens, hidden, top_k):
    experts = 32 * NUM_RANKS
    run = mapped(both_ways(tokens, hidden, top_k, experts))
    for router in ROUTERS:
        sent = check(run, route(router, tokens, experts, top_k, repeat=True))
        assert (sent == 0) == (router == "invalid" or tokens == 0), router


@pytest.mark.parametrize("tokens", [64, 2048])
def test_rows_beyond_the_capacity_and_sums_in_bfloat16(tokens):
    experts = 8 * NUM_RANKS
    run = mapped(both_ways(tokens, 7168, 4, experts, out_dtype=jnp.bfloat16, capacity_factor=0.75))
    for router in ROUTERS[:4]:
        assert check(run, route(router, tokens, experts, 4, repeat=True)) > 0


@pytest.mark.parametrize("tokens, calls", [(48, 1000), (2048, 100)])
def test_many_random_layers_in_a_row(tokens, calls):
    experts, top_k = 8 * NUM_RANKS, 4
    run = both_ways(tokens, 1032, top_k, experts)

    def many(seed):
        def one(i, bad):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), i), lax.axis_index("ep"))
            ids = lax.top_k(jax.random.uniform(key, (tokens, experts)), top_k)[1].astype(jnp.int32)
            ids = jnp.where(jax.random.uniform(jax.random.fold_in(key, 1), ids.shape) < 0.2, -1, ids)
            return bad + run(ids, seed + i)[0].astype(jnp.int32)

        return lax.fori_loop(0, calls, one, jnp.int32(0))

    bad = mapped(many)(*put(np.zeros((NUM_RANKS, 1), np.int32)))
    assert int(np.asarray(bad).sum()) == 0
