"""The exchange in two steps on GPUs: NCCL between "hosts" of one GPU each, the kernels inside a "host" of all of them.

Run as `JMOE_TEST_GPU=1 NCCL_NVLS_ENABLE=0 pytest tests/gpu/test_hierarchical_gpu.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_ranks import NEEDS_GPUS, program_of
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmoe import compat
from jmoe.backends import combine, dispatch_payload, exchange_for, get_backend
from jmoe.backends.engine import ENGINE
from jmoe.backends.hierarchical import hierarchical_engine
from jmoe.payload import row_layout, to_bytes

pytestmark = NEEDS_GPUS

TOKENS = 512


def exchanges(backend, tokens, hidden, top_k):
    """The same exchange in one step through XLA, and in two: hosts of one GPU, and one host of all GPUs."""
    ranks = jax.device_count()
    flat = exchange_for(backend, tokens=tokens, num_ranks=ranks, num_local=8, top_k=top_k, axis_name=("host", "local"))
    spread = exchange_for(
        backend,
        tokens=tokens,
        num_ranks=ranks,
        num_local=8,
        top_k=top_k,
        axis_name=("host", "local"),
        engine=hierarchical_engine(ENGINE),
        num_hosts=ranks,
    )
    # One host: nothing goes between hosts, and everything through the kernels inside.
    together = dataclasses.replace(spread, num_hosts=1, host_capacity=tokens)
    return flat, spread, together


def one_and_two_steps(backend, wire, hosts):
    tokens, hidden, top_k, ranks = TOKENS, 4096, 4, jax.device_count()
    backend = get_backend(backend)
    flat, spread, together = exchanges(backend, tokens, hidden, top_k)
    two = spread if hosts == "hosts of one GPU" else together
    shape = (ranks, 1) if two is spread else (1, ranks)
    mesh = jax.make_mesh(shape, ("host", "local"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layout = row_layout(hidden, wire, top_k)

    def run(seed):
        key = jax.random.fold_in(jax.random.key(seed[0]), flat.rank())
        noise = (
            jax.random.gumbel(key, (tokens, 8 * ranks)) - jnp.log1p(jnp.arange(8 * ranks, dtype=jnp.float32))[None, :]
        )
        ids = lax.top_k(noise, top_k)[1].astype(jnp.int32)
        ids = jnp.where(jax.random.uniform(key, ids.shape) < 0.1, -1, ids)
        weights = jax.random.uniform(jax.random.fold_in(key, 1), ids.shape)
        x = jax.random.normal(jax.random.fold_in(key, 2), (tokens, hidden), jnp.bfloat16)

        def once(ex):
            plan = backend.plan(ids, ex)
            got = dispatch_payload(x, ids, weights, plan, backend=backend, exchange=ex, layout=layout)
            y = jax.random.normal(jax.random.fold_in(key, 3), (backend.num_rows(ex), hidden), jnp.bfloat16)
            y = jnp.where(jnp.any(got.ids >= 0, axis=1, keepdims=True), y, jnp.nan)
            back = functools.partial(combine, y, weights, plan, backend=backend, exchange=ex, recv_ids=got.ids)
            return got, back(out_dtype=jnp.float32)

        (want, want_sum), (got, got_sum) = once(flat), once(two)
        real = jnp.any(want.ids >= 0, axis=1)
        wrong = jnp.sum(got.ids != want.ids) + jnp.sum(got.weights != want.weights) + jnp.sum(got.counts != want.counts)
        for a, b in zip(jax.tree.leaves(got.x), jax.tree.leaves(want.x), strict=True):
            a, b = (to_bytes(v.reshape(v.shape[0], -1)) for v in (a, b))
            wrong += jnp.sum((a != b) & real[:, None])
        # sums of hosts are rounded to bfloat16 on their way
        error = jnp.sum((got_sum - want_sum) ** 2) / jnp.sum(want_sum**2)
        return wrong.reshape(1), error.reshape(1), jnp.sum(real).reshape(1)

    split = P(("host", "local"))
    seeds = jax.ShapeDtypeStruct((ranks,), jnp.int32, sharding=NamedSharding(mesh, split))
    return jax.jit(compat.shard_map(run, mesh=mesh, in_specs=split, out_specs=split)), [seeds]


@pytest.mark.parametrize("backend", ["nvlink_one_sided", "low_latency"])
@pytest.mark.parametrize("wire", ["bfloat16", "mxfp8"])
@pytest.mark.parametrize("hosts", ["hosts of one GPU", "one host"])
@program_of(one_and_two_steps)
def test_two_steps_deliver_the_bytes_of_one_and_sum_alike(program, backend, wire, hosts):
    seeds = jax.device_put(np.zeros(jax.device_count(), np.int32), program.input_shardings[0][0])
    wrong, error, arrived = (np.asarray(a) for a in program(seeds))
    assert int(wrong.sum()) == 0 and int(arrived.sum()) > TOKENS
    assert np.sqrt(error.max()) < 0.004
