"""What travels and when: every format, shared scales, split dispatch, other meshes, absent ranks."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_helpers import ALL, Case, D, E, K, P, T, as_bytes, exchange_fn, inputs, mesh_of, routing, toy_experts
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jmoe import backends, compat
from jmoe.backends.scales import encode_rows
from jmoe.payload import row_layout, wire_names
from jmoe.placement import even_placement, num_unreachable, placement_from_slots, to_physical
from pallas_kernels.quantize import FORMATS, quantize

ROW_LOCAL = [n for n in wire_names() if n in FORMATS and FORMATS[n].row_local and FORMATS[n].rule != "floor"]


def test_F46_quantise_then_send_equals_send_then_quantise_for_every_row_local_format():
    case = Case("nvlink_two_sided", 4, hidden=128)
    ex, impl = case.exchange, case.impl

    def body(x, ids, weights):
        plan = impl.plan(to_physical(ids, case.placement), ex)
        physical = to_physical(ids, case.placement)
        send = functools.partial(backends.dispatch_payload, plan=plan, backend=impl, exchange=ex)
        plain = send(x, physical, weights, layout=row_layout(128, "bfloat16", K))
        out = {}
        for name in ROW_LOCAL:
            layout = row_layout(128, name, K)
            inside = send(x, physical, weights, layout=layout)
            before = send(quantize(x, name), physical, weights, layout=layout) if name == "nvfp4_token" else inside
            out[name] = before, inside, quantize(plain.x, name)
        return plain, out

    run = jax.jit(compat.shard_map(body, mesh=mesh_of(4), in_specs=P, out_specs=P))
    x, ids, weights, _ = inputs(case, np.random.default_rng(37), "some_invalid")
    plain, out = run(x, ids, weights)
    real = (np.asarray(plain.ids) >= 0).any(1)
    assert real.any() and not real.all() and len(ROW_LOCAL) >= 6
    for name, (before, inside, after) in out.items():
        assert before.x.format.name == name
        np.testing.assert_array_equal(before.ids, plain.ids)
        np.testing.assert_array_equal(before.weights, plain.weights)
        for a, b, c in zip(*map(jax.tree.leaves, (before.x, inside.x, after)), strict=True):
            np.testing.assert_array_equal(as_bytes(a)[real], as_bytes(c)[real])
            np.testing.assert_array_equal(as_bytes(a)[real], as_bytes(b)[real])


def test_F19_one_scale_for_all_ranks_makes_per_tensor_rows_equal_those_of_one_device():
    case = Case("nvlink_two_sided", 4, "nvfp4")
    ex, impl = case.exchange, case.impl

    def body(x, ids, weights, scales, own):
        physical = to_physical(ids, case.placement)
        plan = impl.plan(physical, ex)
        g = backends.uniform_global_scale(scales, "ep")
        static = backends.dispatch_payload(x, physical, weights, plan, global_scale=g, **case.options())
        dynamic = backends.dispatch_payload(x, physical, weights, plan, **case.options())
        sources = backends.dispatch_payload(
            own, physical, weights, plan, backend=impl, exchange=ex, layout=row_layout(D, "float32", K)
        )
        one = lambda q: (q.x.data, q.x.block_scale, q.x.global_scale.reshape(1))  # noqa: E731
        return one(static), one(dynamic), sources.x[:, 0], sources.ids

    run = jax.jit(compat.shard_map(body, mesh=mesh_of(4), in_specs=P, out_specs=P))
    x, ids, weights, _ = inputs(case, np.random.default_rng(41), "uniform")
    index = jnp.broadcast_to(jnp.arange(4 * T, dtype=jnp.float32)[:, None], (4 * T, D))
    scales = jnp.asarray([1, 2, 4, 8], jnp.float32) / 1024
    static, dynamic, source, local = run(x, ids, weights, scales, index)
    real = (np.asarray(local) >= 0).any(1)
    token = np.asarray(source)[real].astype(int)
    np.testing.assert_array_equal(static[2], 8 / 1024)
    assert len(set(np.asarray(dynamic[2]).tolist())) == 1
    given = jax.jit(lambda x, g: quantize(x, "nvfp4", global_scale=g))
    for got in (static, dynamic):
        alone = given(x, got[2][0])
        np.testing.assert_array_equal(as_bytes(got[0])[real], as_bytes(alone.data)[token])
        np.testing.assert_array_equal(as_bytes(got[1])[real], as_bytes(alone.block_scale)[token])
    np.testing.assert_array_equal(dynamic[2][0], jax.jit(lambda x: quantize(x, "nvfp4").global_scale)(x))


def test_only_per_tensor_formats_share_a_scale():
    x = jnp.ones((T, D), jnp.bfloat16)
    scale = lambda wire: jax.eval_shape(  # noqa: E731
        lambda x: encode_rows(x, row_layout(D, wire, K), axis_name=None, global_scale=jnp.float32(2))[1], x
    )
    assert scale("nvfp4").shape == ()
    assert scale("nvfp4_token") is scale("mxfp8") is scale("float16") is None


@pytest.mark.parametrize("backend", ("nvlink_two_sided", "low_latency"))
def test_F49_finish_of_start_in_two_jitted_functions_equals_dispatch(backend):
    case = Case(backend, 4, "mxfp8")
    x, ids, weights, gains = inputs(case, np.random.default_rng(43), "zipf")

    def begin(x, ids, weights):
        physical = to_physical(ids, case.placement)
        return backends.start(x, physical, weights, case.impl.plan(physical, case.exchange), **case.options())

    def end(flight, ids):
        plan = case.impl.plan(to_physical(ids, case.placement), case.exchange)
        return backends.finish(flight, plan, **case.options())

    mesh = mesh_of(4)
    flight = jax.jit(compat.shard_map(begin, mesh=mesh, in_specs=P, out_specs=P))(x, ids, weights)
    got = jax.jit(compat.shard_map(end, mesh=mesh, in_specs=P, out_specs=P))(flight, ids)
    _, want, _ = exchange_fn(case)(x, ids, weights, gains)
    chex.assert_trees_all_equal(got, want)


@pytest.mark.parametrize("backend", [b for b in ALL if b not in ("nvlink_one_sided", "nixl_ep")])
def test_the_expert_axis_of_an_explicit_two_axis_mesh(backend):
    case = Case(backend, 4)
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(AxisType.Explicit,) * 2)
    spec = PartitionSpec(("dp", "ep"))

    def body(x, ids, weights, gains):
        physical = to_physical(ids, case.placement)
        plan = case.impl.plan(physical, case.exchange)
        got = backends.dispatch_payload(x, physical, weights, plan, **case.options())
        y = toy_experts(got, gains, case.exchange)
        return backends.combine(y, weights, plan, backend=case.impl, exchange=case.exchange, recv_ids=got.ids)

    rng = np.random.default_rng(47)
    halves = [inputs(case, rng, name) for name in ("uniform", "one_hot_rank")]
    gains = halves[0][3]
    with jax.set_mesh(mesh):
        whole = [jax.device_put(jnp.concatenate([h[i] for h in halves]), NamedSharding(mesh, spec)) for i in range(3)]
        layer = compat.shard_map(body, mesh=mesh, in_specs=(spec, spec, spec, PartitionSpec()), out_specs=spec)
        out = jax.jit(layer)(*whole, jax.device_put(gains, NamedSharding(mesh, PartitionSpec())))
    alone = [exchange_fn(case)(*h[:3], gains)[0] for h in halves]
    np.testing.assert_array_equal(as_bytes(np.asarray(out)), np.concatenate([as_bytes(a) for a in alone]))


def test_nixl_ep_routes_around_absent_ranks_without_a_retrace():
    placement = placement_from_slots([[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 5, 5]], 6)
    backend = backends.get_backend("nixl_ep")
    ex = backends.exchange_for(backend, tokens=T, num_ranks=4, num_local=3, top_k=K, axis_name="ep", dtype="float32")
    layout = row_layout(D, "float32", K)
    slots = jnp.asarray(placement.slots)

    @chex.assert_max_traces(n=1)
    def body(x, ids, weights, mask):
        physical = to_physical(ids, placement, rank_mask=mask, first_token=ex.rank() * T)
        plan = backend.plan(physical, ex, rank_mask=mask)
        got = backends.dispatch_payload(x, physical, weights, plan, backend=backend, exchange=ex, layout=layout)
        alive = jnp.take(mask, ex.rank(), mode="clip")
        expert = jnp.take(slots[ex.rank()], jnp.maximum(got.ids[:, 0], 0), mode="clip").astype(jnp.float32)
        y = jnp.where((got.ids >= 0) & alive, got.x * (expert[:, None] + 1), jnp.nan)
        out = backends.combine(y, weights, plan, backend=backend, exchange=ex, recv_ids=got.ids)
        lost = num_unreachable(ids, physical, placement)
        return out, jnp.sum(got.counts, axis=0, keepdims=True), lost.reshape(1), plan.dropped.reshape(1)

    run = jax.jit(compat.shard_map(body, mesh=mesh_of(4), in_specs=(P, P, P, PartitionSpec()), out_specs=P))
    rng = np.random.default_rng(53)
    x = jnp.asarray(rng.normal(size=(4 * T, D)), jnp.float32)
    ids = jnp.asarray(routing("uniform", rng, 4, num_experts=6))
    weights = jnp.ones((4 * T, K), jnp.float32)
    for alive, orphans in (([1, 1, 1, 1], []), ([0, 1, 1, 1], []), ([1, 1, 1, 0], [5]), ([1, 0, 0, 1], [3])):
        mask = jnp.asarray(alive, bool)
        out, received, lost, dropped = run(x, ids, weights, mask)
        served = ~np.isin(np.asarray(ids), orphans)
        factor = np.where(served, np.asarray(ids) + 1, 0).sum(1, keepdims=True)
        tokens = np.repeat(np.asarray(alive, bool), T)  # rows of absent ranks are not served
        np.testing.assert_allclose(out[tokens], (np.asarray(x) * factor)[tokens], rtol=1e-6)
        assert np.asarray(lost).sum() == (~served).sum() and not np.asarray(dropped).any()
        absent = ~np.asarray(alive, bool)
        assert not np.asarray(received)[absent].any() and not np.asarray(received)[:, absent].any()
        assert np.asarray(received)[~absent][:, ~absent].all()


def test_R_1_equals_R_8():
    one, eight = Case("local", 1, tokens=8 * T), Case("nvlink_two_sided", 8)
    x, ids, weights, _ = inputs(eight, np.random.default_rng(59), "uniform")
    gains = np.float32(2.0) ** np.arange(-5, 5)
    place = lambda case: jnp.asarray(  # noqa: E731
        np.where(case.placement.slots >= 0, gains[case.placement.slots], 0).reshape(-1)
    )
    a, _, _ = exchange_fn(one)(x, ids, weights, place(one))
    b, _, _ = exchange_fn(eight)(x, ids, weights, place(eight))
    error = np.linalg.norm(np.asarray(a, np.float32) - np.asarray(b, np.float32)) / np.linalg.norm(
        np.asarray(a, np.float32)
    )
    assert error < 0.006
    assert even_placement(E, 8).num_local == 2
