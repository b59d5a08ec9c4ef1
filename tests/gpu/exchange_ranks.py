"""What the GPU tests of the exchange share: which machines they need, arrays of all ranks, and routers.

With eight virtual CPU devices the helpers work too; the kernels need GPUs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmoe import compat
from jmoe.backends.engine import engine_reason
from jmoe.caps import DeviceCaps

NEEDS_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(
        jax.devices()[0].platform == "gpu" and engine_reason(DeviceCaps.detect()) is not None,
        reason="the kernels cannot serve these devices",
    ),
]

ROUTERS = ("uniform", "zipf", "one_rank", "empty_rank", "invalid")
UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
NUM_RANKS = min(jax.device_count(), 8)


def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[:NUM_RANKS]), ("ep",))


def mapped(function):
    """`function` of one rank's arrays, over all devices; arrays have a leading axis of ranks outside."""
    local = lambda *a: jax.tree.map(lambda v: v[None], function(*[v[0] for v in a]))  # noqa: E731
    return jax.jit(compat.shard_map(local, mesh=mesh(), in_specs=P("ep"), out_specs=P("ep")))


def program_of(build):
    """The test takes `program`: build(its parameters) = (jitted function, arguments or their shapes), compiled."""

    def mark(test):
        test.build = build
        return test

    return mark


def for_shapes(function, *shapes, dtypes=(jnp.int32,)):
    """What `program_of` asks for, from a function of one rank's arrays and the shapes of those; int32 if not said."""
    sharding = NamedSharding(mesh(), P("ep"))
    dtypes = dtypes if len(dtypes) == len(shapes) else dtypes * len(shapes)
    arrays = [
        jax.ShapeDtypeStruct((NUM_RANKS, *shape), dtype, sharding=sharding)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    return mapped(function), arrays


def put(*arrays):
    return [jax.device_put(a, NamedSharding(mesh(), P("ep"))) for a in arrays]


def as_bits(a):
    """The bits of an array's elements, as unsigned integers."""
    return lax.bitcast_convert_type(a, UNSIGNED[a.dtype.itemsize])


def digest(arrays, valid=None):
    """uint32, a sum of all elements' bits times odd numbers that depend on the place; of the rows that are valid."""
    total = jnp.uint32(0)
    for a in jax.tree.leaves(arrays):
        bits = as_bits(a)
        if valid is not None and a.ndim:  # a scale of the whole tensor has no rows
            bits = jnp.where(valid.reshape(-1, *(1,) * (a.ndim - 1)), bits, jnp.zeros((), bits.dtype))
        bits = bits.reshape(-1).astype(jnp.uint32)
        factor = lax.iota(jnp.uint32, bits.size) * jnp.uint32(2654435762) + jnp.uint32(1)
        total = total * jnp.uint32(31) + jnp.sum(bits * factor, dtype=jnp.uint32)
    return total


def route(router, tokens, experts, top_k, seed=0, *, repeat=False):
    """ids int32 [R, T, K] of all ranks by a router of that name.

    "one_rank" repeats ids of a token where that rank has too few experts for it, or with `repeat` at random.
    """
    rng = np.random.default_rng(seed)
    noise = rng.gumbel(size=(NUM_RANKS, tokens, experts)).astype(np.float32)
    if router == "zipf":
        noise -= np.log1p(np.arange(experts, dtype=np.float32))
    if router == "one_rank" and not repeat:
        noise[..., experts // NUM_RANKS :] = -np.inf
    ids = np.argsort(-noise, axis=-1, kind="stable")[..., :top_k]
    if router == "one_rank":
        ids = ids % (experts // NUM_RANKS)
    if router == "empty_rank":
        ids[0] = -1
    if router == "invalid":
        ids[:] = -1
    return ids.astype(np.int32)
