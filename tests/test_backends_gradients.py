"""Dispatch and combine as each other's derivative, on all backends, straight through a quantised wire."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_helpers import (
    ALL,
    Case,
    D,
    K,
    P,
    T,
    garbage_engine,
    inputs,
    mesh_for,
    mesh_of,
    physical_of,
    routing,
    toy_experts,
)
from jax.sharding import PartitionSpec

from jmoe import backends, compat
from jmoe.backends.hierarchical import hierarchical_engine
from jmoe.payload import row_layout
from jmoe.placement import to_physical

MOVERS = [b for b in ALL if b not in ("nvlink_one_sided", "nixl_ep")]  # those two move rows as others here do
CASES = [Case(b, 4, "float32", "float32") for b in MOVERS]
CASES += [Case(b, 4, "float32", "float32", engine=garbage_engine(b)) for b in ("nvlink_one_sided", "low_latency")]
HOSTS = dict(num_hosts=2, engine=hierarchical_engine())
CASES += [Case(b, 4, "float32", "float32", **HOSTS) for b in ("nvlink_one_sided", "low_latency")]
CASES += [Case("nvlink_one_sided", 4, "float32", "float32", axis=("host", "local"), **HOSTS)]
QUANTISED = [Case("nvlink_one_sided", 4, "mxfp8", "float32", "mxfp8", **HOSTS)]
QUANTISED += [Case(b, 4, "mxfp8", "float32", "mxfp8") for b in ("nvlink_two_sided", "low_latency")]


def name_of(case):
    how = "" if case.engine is None else f"-{case.engine.name}" + ("-two_axes" if case.axis != "ep" else "")
    return f"{case.backend}-{case.wire}{how}"


@functools.cache
def gradients_fn(case):
    """jit: (x, weights, gains, ids, cotangent) -> (output, gradients of <output, cotangent> in x, weights, gains)."""
    ex = case.exchange

    def body(x, weights, gains, ids):
        physical = to_physical(ids, case.placement)
        plan = case.impl.plan(physical, ex)
        got = backends.dispatch_float(x, physical, weights, plan, **case.options())
        y = toy_experts(got, gains, ex)
        return backends.combine(
            y, weights, plan, backend=case.impl, exchange=ex, recv_ids=got.ids, wire=case.combine_wire
        )

    split = PartitionSpec(case.axis)
    specs = (split, split, PartitionSpec(), split)
    layer = compat.shard_map(body, mesh=mesh_for(case), in_specs=specs, out_specs=split)

    @jax.jit
    def run(x, weights, gains, ids, cotangent):
        out, vjp = jax.vjp(lambda x, w, g: layer(x, w, g, ids), x, weights, gains)
        return out, vjp(cotangent)

    return run


def reference(case, x, weights, gains, ids, cotangent):
    physical = physical_of(case, ids).reshape(-1, K)
    valid = physical >= 0
    g = np.where(valid, np.asarray(gains)[np.maximum(physical, 0)], 0)
    x, w, c = np.asarray(x), np.asarray(weights), np.asarray(cotangent)
    dot = (x * c).sum(1, keepdims=True)
    dgains = np.zeros(case.placement.num_physical)
    np.add.at(dgains, physical[valid], (w * dot)[valid])
    return (w * g).sum(1, keepdims=True) * c, g * dot, dgains


@pytest.mark.parametrize("case", CASES + QUANTISED, ids=name_of)
def test_gradients_are_those_of_one_device(case):
    for name in ("uniform", "duplicates", "empty_ranks", "out_of_range", "all_invalid"):
        rng = np.random.default_rng(23)
        x, ids, weights, gains = inputs(case, rng, name)
        cotangent = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
        out, (dx, dw, dg) = gradients_fn(case)(x, weights, gains, ids, cotangent)
        want = reference(case, x, weights, gains, ids, cotangent)
        assert dx.dtype == jnp.float32 and dw.shape == (4 * T, K)
        if case.wire != "float32":  # straight through: dx does not see the quantisation at all
            np.testing.assert_allclose(dx, want[0], rtol=1e-5, atol=1e-5)
            continue
        for got, expected in zip((dx, dw, dg), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
        unused = np.setdiff1d(np.arange(len(gains)), physical_of(case, ids))
        np.testing.assert_array_equal(np.asarray(dg)[unused], 0)
    assert not np.asarray(out).any()  # all_invalid came last


@pytest.mark.parametrize("backend", ("nvlink_two_sided", "low_latency"))
def test_cotangents_travel_in_the_layers_dtype_and_are_added_in_float32(backend):
    case = Case(backend, 4, "mxfp8", "bfloat16")
    rng = np.random.default_rng(29)
    x, ids, weights, gains = inputs(case, rng, "uniform")
    cotangent = jnp.ones(x.shape, jnp.bfloat16)
    _, (dx, dw, _) = gradients_fn(case)(x, weights, gains, ids, cotangent)
    want, _, _ = reference(case, x.astype(jnp.float32), weights, gains, ids, cotangent.astype(jnp.float32))
    assert dx.dtype == jnp.bfloat16 and dw.dtype == jnp.float32
    error = np.linalg.norm(np.asarray(dx, np.float32) - want) / np.linalg.norm(want)
    assert error < 0.006


@pytest.mark.parametrize("case", [*CASES[:2], *(c for c in CASES if c.engine is not None)], ids=name_of)
def test_F23_cotangents_of_padding_and_of_other_ranks_weights_are_not_looked_at(case):
    def body(x, weights, ids):
        physical = to_physical(ids, case.placement)
        plan = case.impl.plan(physical, case.exchange)

        def dispatch(x, weights):
            got = backends.dispatch_float(x, physical, weights, plan, **case.options())
            return (got.x, got.weights), got.ids

        (rows, own), vjp, local = jax.vjp(dispatch, x, weights, has_aux=True)
        real = jnp.any(local >= 0, axis=1, keepdims=True)
        return vjp((jnp.where(real, jnp.ones_like(rows), jnp.nan), jnp.where(local >= 0, jnp.ones_like(own), jnp.nan)))

    x, ids, weights, _ = inputs(case, np.random.default_rng(61), "some_invalid")
    split = PartitionSpec(case.axis)
    dx, dw = jax.jit(compat.shard_map(body, mesh=mesh_for(case), in_specs=split, out_specs=split))(x, weights, ids)
    physical = physical_of(case, ids).reshape(-1, K)
    places = physical if case.impl.form == "batched" else physical // case.placement.num_local
    rows = [len(set(np.where(p >= 0, q, -1)) - {-1}) for p, q in zip(physical, places, strict=True)]
    np.testing.assert_array_equal(dx, np.broadcast_to(np.float32(rows)[:, None], dx.shape))
    np.testing.assert_array_equal(dw, (physical >= 0) if case.impl.form == "standard" else np.zeros_like(physical))


@pytest.mark.parametrize("backend", MOVERS)
def test_F10_send_and_send_back_are_transposes(backend):
    case = Case(backend, 4)
    ex, impl = case.exchange, case.impl
    rows = impl.num_rows(ex)

    def body(x, y, g, ids):
        plan = impl.plan(to_physical(ids, case.placement), ex)
        sent, transpose = jax.vjp(lambda x: impl.send(x, plan, ex), x)
        shaped = y.reshape(sent.shape)
        back, transpose_back = jax.vjp(lambda y: impl.send_back(y, plan, ex), shaped)
        (x_bar,) = transpose(shaped)
        (y_bar,) = transpose_back(g[:, : back.shape[1]])
        padding = impl.send(jnp.ones_like(x), plan, ex)
        flat = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
        return flat(sent), back, x_bar, flat(y_bar), jnp.sum(back, axis=1), flat(padding)

    run = jax.jit(compat.shard_map(body, mesh=mesh_of(4), in_specs=(P, P, P, P), out_specs=P))
    for name in ("uniform", "duplicates", "some_invalid", "all_invalid"):
        rng = np.random.default_rng(31)
        shapes = ((4 * T, D), (4 * rows, D), (4 * T, 4, D))
        x, y, g = (jnp.asarray(rng.integers(-8, 9, shape), jnp.float32) for shape in shapes)
        ids = jnp.asarray(routing(name, rng, 4))
        sent, back, x_bar, y_bar, back_sum, padding = map(np.asarray, run(x, y, g, ids))
        y, g = np.asarray(y), np.asarray(g)[:, : back.shape[1]]
        assert (sent * y).sum() == (np.asarray(x) * back_sum).sum()  # <send x, y> = <x, send_back y>; integers: exact
        assert (back * g).sum() == (y * y_bar).sum()
        np.testing.assert_array_equal(x_bar, back_sum)  # the VJP is that transpose
        np.testing.assert_array_equal(sent[padding[:, 0] == 0], 0)  # empty slots arrive as zeros


def test_the_row_of_cotangents_is_as_wide_as_what_travels():
    back = row_layout(2880, "bfloat16", 4)
    assert back.row_bytes == 2 * 2880 + 32
