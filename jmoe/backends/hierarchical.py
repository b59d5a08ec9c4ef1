"""The exchange over several hosts in two steps: between hosts first, inside a host second.

R = H * L ranks on H hosts, rank r being number r % L of host r // L. T tokens on one rank, W row width, D hidden size,
C_h slots for each pair of source rank and host, C for each pair of source and target, N received rows.

Dispatch: a token's row crosses once to each host that holds one of its experts, to the rank there with the sender's own
number, by XLA's all-to-all (NCCL) among the ranks of one number; that rank fans it out inside its host. What arrives is
the flat exchange's [N, W], byte for byte. Combine goes the same way back: rows are added inside the host in float32,
the sum crosses once for each (token, host) in the layer's dtype (or as MXFP8), and the owner adds the hosts' sums in
float32, host by host. With K = 8 and two hosts of 8 GPUs, 256 experts, the network carries 1.0 rows a token instead of
the flat exchange's 3.3.

Inside the host the rows move through a kernel's `push` and `reduce` (`inner`; opt-in, see `DeviceCaps.local_kernels`),
else through lax.all_to_all. On two GPUs of one process both steps deliver the flat exchange's bytes, as one host of two
and as two of one (tests/gpu).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.plan import Plan, TwoLevel, plan_between_hosts, plan_inside_host

from .base import Axis, Engine, Exchange
from .combine import decoder, pack_returned
from .low_latency import LowLatency
from .two_sided import TwoSided

_BETWEEN, _INSIDE = TwoSided(), LowLatency()


def hierarchical_engine(inner: Engine | None = None) -> Engine:
    """The engine of an `Exchange` with num_hosts > 1. inner: a kernel that serves the ranks of one host.

    The kernel needs an axis of the mesh that spans one host and nothing else: an expert axis (hosts, ranks of a host).
    Over a single axis, where its peers would have no name, the rows inside a host move through lax.all_to_all.
    """
    return _engine(inner)


@functools.cache  # equal exchanges need one and the same engine
def _engine(inner: Engine | None) -> Engine:
    within = f"the {inner.name} kernel" if inner is not None else "lax.all_to_all"
    return Engine(
        "hierarchical",
        functools.partial(_push, inner),
        functools.partial(_reduce, inner, wire=None),
        prepare=_prepare,
        reduce_as=functools.partial(_reduce, inner),
        words=f"lax.all_to_all between hosts, once for each (token, host), and {within} inside",
        staged=inner is None,
    )


def levels(plan: Plan, ex: Exchange) -> tuple[Exchange, Exchange]:
    """The exchange between hosts (H ranks) and the one inside a host (L ranks), as seen from this rank."""
    hosts, per_host = ex.num_hosts, ex.num_ranks // ex.num_hosts
    rails = tuple(tuple(range(number, ex.num_ranks, per_host)) for number in range(per_host))
    blocks = tuple(tuple(range(h * per_host, (h + 1) * per_host)) for h in range(hosts))
    targets = ex.num_local if plan.form == "batched" else 1
    assert ex.axis_name is not None  # `exchange_for` refuses several ranks without an axis
    between: tuple[Axis, tuple | None] = ex.axis_name, rails
    inside: tuple[Axis, tuple | None] = ex.axis_name, blocks
    if isinstance(ex.axis_name, tuple):
        size = 1
        for i, name in enumerate(ex.axis_name):
            if size == hosts and i:  # the axes up to here number the hosts
                between, inside = (_axes(ex.axis_name[:i]), None), (_axes(ex.axis_name[i:]), None)
            size *= lax.axis_size(name)
    return (
        Exchange(between[0], hosts, 1, ex.host_capacity, ex.dtype, groups=between[1]),
        Exchange(inside[0], per_host, targets * hosts, ex.capacity, ex.dtype, groups=inside[1]),
    )


def _axes(names: tuple[str, ...]) -> Axis:
    return names[0] if len(names) == 1 else names


def _kernel(inner: Engine | None, inside: Exchange) -> Engine | None:
    return inner if isinstance(inside.axis_name, str) and inside.groups is None else None


def _prepare(plan: Plan, ex: Exchange) -> Plan:
    """The plan with its two steps. The ranks of one number tell each other where their rows go (4 bytes a place)."""
    outer, inside = levels(plan, ex)
    between, message = plan_between_hosts(plan, num_hosts=ex.num_hosts, capacity=ex.host_capacity)
    second = plan_inside_host(
        _BETWEEN._all_to_all(message, outer),
        num_ranks=inside.num_ranks,
        num_targets=plan.counts.shape[0] // ex.num_hosts,
        capacity=ex.capacity,
        rows=ex.host_capacity,
    )
    return dataclasses.replace(plan, hosts=TwoLevel(between, second))


def _steps(plan: Plan) -> TwoLevel:
    if plan.hosts is None:
        raise ValueError(
            "This plan was made for an exchange in one step; a plan of an exchange over hosts comes from "
            "`backend.plan(ids, exchange)` with that exchange."
        )
    return plan.hosts


def _push(inner: Engine | None, rows: jax.Array, plan: Plan, ex: Exchange) -> tuple[jax.Array, jax.Array]:
    """Rows [T, W] to where the plan says; see `Engine.push`."""
    two, (outer, inside) = _steps(plan), levels(plan, ex)
    arrived = _BETWEEN.send(rows, two.between, outer)  # [H * C_h, W]
    kernel = _kernel(inner, inside)
    if kernel is not None:
        got, counts = kernel.push(arrived, two.inside, inside)
    else:
        got, counts = _INSIDE.send(arrived, two.inside, inside), _INSIDE.exchange_counts(two.inside, inside)
    if plan.form == "batched":
        shape = (ex.num_local, ex.num_ranks)
        return got.reshape(shape[0], shape[1] * ex.capacity, rows.shape[1]), counts.reshape(shape)
    return got.reshape(ex.num_ranks * ex.capacity, rows.shape[1]), counts.reshape(-1)


def _reduce(
    inner: Engine | None,
    y: jax.Array,
    weights: jax.Array | None,
    plan: Plan,
    ex: Exchange,
    out_dtype: jnp.dtype,
    wire: str | None,
    counts: jax.Array | None = None,
) -> jax.Array:
    """Experts' rows y [N, D] added up inside their host, then at their owners, [T, D]; see `Engine.reduce`.

    wire: None sends the hosts' sums in y's dtype, else the format in which they travel. counts: not needed.
    """
    del counts
    y = y.astype(ex.dtype)
    two, (outer, inside) = _steps(plan), levels(plan, ex)
    if weights is not None:  # the owner's weights go where the rows are added
        weights = _BETWEEN.send(weights, two.between, outer)
    kernel = _kernel(inner, inside)
    if kernel is not None:
        applied = jnp.ones(two.inside.slot.shape, jnp.float32) if weights is None else weights
        sums = kernel.reduce(y, applied, two.inside, inside, jnp.dtype(jnp.float32 if wire else y.dtype))
    else:
        sums = _INSIDE.sum_back(_INSIDE.give_back(y, two.inside, inside), two.inside, weights=weights)
    if wire is None:
        back = _BETWEEN.give_back(sums.astype(y.dtype), two.between, outer)
        return _BETWEEN.sum_back(back, two.between).astype(out_dtype)
    back = _BETWEEN.give_back(pack_returned(sums, wire), two.between, outer)
    return _BETWEEN.sum_back(back, two.between, decode=decoder(y.shape[-1], wire)).astype(out_dtype)
