"""Shared by the tests of the exchange: routings, a plain oracle of who receives what, and one jitted exchange per
case."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jmoe import backends, compat
from jmoe.payload import row_layout
from jmoe.placement import even_placement, to_physical
from pallas_kernels.quantize import QTensor

P = PartitionSpec("ep")
ALL = tuple(name for name in backends.BACKENDS if name != "local")  # everything that moves tokens
T, D, E, K = 6, 32, 10, 3  # tokens per rank; 10 experts do not divide among 4 or 8 ranks

ROUTINGS = (
    "uniform",
    "zipf",
    "one_hot_expert",
    "one_hot_rank",
    "empty_ranks",
    "all_invalid",
    "some_invalid",
    "duplicates",
    "out_of_range",
)


def routing(name, rng, num_ranks, *, tokens=T, num_experts=E, top_k=K):
    """Logical ids int32 [R * T, K]."""
    n = num_ranks * tokens
    distinct = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(n)]) if n else np.zeros((0, top_k))
    ids = distinct.astype(np.int32)
    if name == "zipf":
        p = 1.0 / np.arange(1, num_experts + 1) ** 1.5
        ids = np.stack([rng.choice(num_experts, top_k, replace=False, p=p / p.sum()) for _ in range(n)])
    elif name == "one_hot_expert":
        ids[:] = -1
        ids[:, 0] = num_experts - 1
    elif name == "one_hot_rank":
        owned = even_placement(num_experts, num_ranks).slots[num_ranks - 1]
        ids = rng.choice(owned[owned >= 0], (n, top_k))
    elif name == "empty_ranks":
        ids.reshape(num_ranks, -1, top_k)[::2] = -1
    elif name == "all_invalid":
        ids[:] = -1
    elif name == "some_invalid":
        ids[rng.random(ids.shape) < 0.5] = -1
    elif name == "duplicates":
        ids[:, 1:] = ids[:, :1]
    elif name == "out_of_range":
        ids[rng.random(ids.shape) < 0.3] = num_experts
        ids[rng.random(ids.shape) < 0.2] = 2**31 - 1
        ids[rng.random(ids.shape) < 0.1] = -(2**31)
    return ids.astype(np.int32)


def expected_rows(physical, backend, num_ranks, num_local, capacity):
    """Plain loops: for each rank, received row -> (source rank, token, local expert or None)."""
    rows = [{} for _ in range(num_ranks)]
    for source, tokens in enumerate(physical):
        used = {}
        for t, ids in enumerate(tokens):
            valid = [int(p) for p in ids if 0 <= p < num_ranks * num_local]
            if backend.plan_form == "gathered":
                for r in range(num_ranks):
                    rows[r][source * capacity + t] = (source, t, None)
            elif backend.form == "standard":
                for r in sorted({p // num_local for p in valid}):
                    slot = used.setdefault(r, 0)
                    used[r] += 1
                    if slot < capacity:
                        rows[r][source * capacity + slot] = (source, t, None)
            else:
                for p in sorted(set(valid)):
                    slot = used.setdefault(p, 0)
                    used[p] += 1
                    if slot < capacity:
                        r, e = divmod(p, num_local)
                        rows[r][(e * num_ranks + source) * capacity + slot] = (source, t, e)
    return rows


def mesh_of(num_ranks):
    return jax.make_mesh((num_ranks,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_ranks])


def mesh_for(case):
    """The case's mesh: one axis "ep", or two of its hosts and of the ranks in them."""
    if isinstance(case.axis, str):
        return mesh_of(case.num_ranks)
    shape = (case.num_hosts, case.num_ranks // case.num_hosts)
    types = (AxisType.Auto,) * 2
    return jax.make_mesh(shape, case.axis, axis_types=types, devices=jax.devices()[: case.num_ranks])


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of exchanging: everything static."""

    backend: str
    num_ranks: int
    wire: str = "bfloat16"
    dtype: str = "bfloat16"
    combine_wire: str | None = None
    capacity_factor: float | None = None
    tokens: int = T
    hidden: int = D
    engine: backends.Engine | None = None
    num_hosts: int = 1
    axis: str | tuple[str, str] = "ep"

    @property
    def placement(self):
        return even_placement(E, self.num_ranks)

    @property
    def impl(self):
        return backends.get_backend(self.backend)

    @property
    def layout(self):
        return row_layout(self.hidden, self.wire, K)

    @property
    def exchange(self):
        return backends.exchange_for(
            self.impl,
            tokens=self.tokens,
            num_ranks=self.num_ranks,
            num_local=self.placement.num_local,
            top_k=K,
            axis_name=self.axis,
            capacity_factor=self.capacity_factor,
            dtype=self.dtype,
            engine=self.engine,
            num_hosts=self.num_hosts,
        )

    def options(self):
        return {"backend": self.impl, "exchange": self.exchange, "layout": self.layout}


def toy_experts(got, gains, exchange):
    """Expert p multiplies its rows by gains[p]. Reads nothing of rows without an id, and leaves NaN in their
    outputs."""
    real = jnp.any(got.ids >= 0, axis=1, keepdims=True)
    x = got.x if not isinstance(got.x, QTensor) else backends.scales.decode_rows(got.x, jnp.float32)
    x = jnp.where(real, x.astype(jnp.float32), 0)
    local = jnp.maximum(got.ids, 0) + exchange.rank() * exchange.num_local
    factor = jnp.sum(
        jnp.where(got.ids >= 0, got.weights * jnp.take(gains, local, mode="clip"), 0), axis=1, keepdims=True
    )
    return jnp.where(real, x * factor, jnp.nan)


@functools.cache
def exchange_fn(case: Case):
    """jit: (x [R*T, D], ids [R*T, K], weights, gains [R*E_loc]) -> (output, Received, dropped [R]) of all ranks."""
    ex = case.exchange

    def body(x, ids, weights, gains):
        physical = to_physical(ids, case.placement)
        plan = case.impl.plan(physical, ex)
        got = backends.dispatch_payload(x, physical, weights, plan, **case.options())
        y = toy_experts(got, gains, ex)
        out = backends.combine(
            y, weights, plan, backend=case.impl, exchange=ex, recv_ids=got.ids, wire=case.combine_wire
        )
        got = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (1,)) if leaf.ndim == 0 else leaf, got)
        return out, got, plan.dropped.reshape(1)

    split = PartitionSpec(case.axis)
    return jax.jit(
        compat.shard_map(
            body,
            mesh=mesh_for(case),
            in_specs=(split, split, split, PartitionSpec()),
            out_specs=(split, split, split),
        )
    )


def inputs(case: Case, rng, name):
    n = case.num_ranks * case.tokens
    x = jnp.asarray(rng.normal(size=(n, case.hidden)), jnp.dtype(case.dtype))
    ids = jnp.asarray(routing(name, rng, case.num_ranks, tokens=case.tokens))
    weights = jnp.asarray(rng.integers(1, 9, (n, K)) / 8, jnp.float32)
    gains = jnp.asarray(2.0 ** rng.integers(-2, 3, case.placement.num_physical), jnp.float32)
    return x, ids, weights, gains


def physical_of(case: Case, ids):
    return np.asarray(to_physical(ids, case.placement)).reshape(case.num_ranks, case.tokens, K)


def as_bytes(x):
    x = np.asarray(x)
    return x.reshape(x.shape[0], -1).view(np.uint8) if x.ndim > 1 else x.reshape(-1, 1).view(np.uint8)


def garbage_engine(name):
    """A stand-in for a push kernel: moves the rows, and leaves garbage (NaN data, ids of real experts) in empty
    slots."""
    backend = backends.get_backend(name)

    def push(rows, plan, ex):
        bad = jnp.full((rows.shape[1],), 0xFF if rows.dtype == jnp.uint8 else jnp.nan, rows.dtype)
        if rows.dtype == jnp.uint8:
            width = (rows.shape[1] // 4) * 4
            ids = np.zeros(rows.shape[1], np.uint8)
            ids[:width:4] = 1  # every aligned word reads as id 1
            bad = jnp.where(jnp.arange(rows.shape[1]) < rows.shape[1] // 2, bad, jnp.asarray(ids))
        return backend.send(rows, plan, ex, fill=bad), backend.exchange_counts(plan, ex)

    def reduce(y, weights, plan, ex, out_dtype):
        return backend.sum_back(backend.give_back(y, plan, ex), plan, weights=weights).astype(out_dtype)

    return backends.Engine("garbage", push, reduce)
