"""The exchange over hosts in two steps: byte for byte the flat one on arrival, and the same sums on the way back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_helpers import ROUTINGS, Case, E, K, T, as_bytes, exchange_fn, inputs, mesh_for
from flax import nnx
from jax.sharding import PartitionSpec

from jmoe import backends, compat
from jmoe.backends.base import received_valid
from jmoe.backends.engine import ENGINE
from jmoe.backends.hierarchical import hierarchical_engine
from jmoe.caps import DeviceCaps
from jmoe.config import MoEConfig, QuantConfig
from jmoe.layer import build_moe, moe
from jmoe.nn import MoE
from jmoe.params import init_params
from jmoe.payload import FLOAT_WIRES, row_layout, wire_names
from jmoe.placement import to_physical
from jmoe.plan import host_capacity

AXES = ("ep", ("host", "local"))


def two_level(case, num_hosts=2, axis="ep", inner=None):
    return dataclasses.replace(case, num_hosts=num_hosts, axis=axis, engine=hierarchical_engine(inner))


def exact_inputs(case, rng, name):
    """Rows of small integers and weights of 1/8 steps: float32 sums of them are exact in any order."""
    x, ids, weights, gains = inputs(case, rng, name)
    return jnp.round(4 * x.astype(jnp.float32)).astype(x.dtype), ids, weights, gains


def same(got, want):
    """Equal bytes in rows that hold something, equal ids, weights and counts everywhere."""
    for name in ("ids", "weights", "counts"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    real = (np.asarray(want.ids) >= 0).any(1)
    if not real.size:  # no tokens anywhere
        return
    for a, b in zip(jax.tree.leaves(got.x), jax.tree.leaves(want.x), strict=True):
        a, b = as_bytes(a), as_bytes(b)
        np.testing.assert_array_equal(*((a[real], b[real]) if len(a) == len(real) else (a, b)))


@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("backend", ("nvlink_one_sided", "low_latency"))
def test_every_routing_arrives_as_in_one_step_and_comes_back_to_the_same_sums(backend, axis):
    flat = Case(backend, 8, dtype="float32", wire="float32")
    for seed, name in enumerate(ROUTINGS):
        args = exact_inputs(flat, np.random.default_rng(seed), name)
        want_out, want, want_dropped = exchange_fn(flat)(*args)
        out, got, dropped = exchange_fn(two_level(flat, axis=axis))(*args)
        same(got, want)
        np.testing.assert_array_equal(dropped, want_dropped)
        np.testing.assert_array_equal(out, want_out)  # -0.0 and 0.0 apart


WIRES = [w for w in wire_names() if w not in FLOAT_WIRES] + list(FLOAT_WIRES)


@pytest.mark.parametrize("wire", WIRES)
def test_every_wire_format_arrives_bit_for_bit(wire):
    flat = Case("nvlink_one_sided", 8, wire, hidden=128)
    args = inputs(flat, np.random.default_rng(7), "uniform")
    same(exchange_fn(two_level(flat))(*args)[1], exchange_fn(flat)(*args)[1])


SHAPES = [
    dict(num_ranks=8, num_hosts=4),
    dict(num_ranks=8, num_hosts=8),  # one rank on each host
    dict(num_ranks=4, num_hosts=2, tokens=1),
    dict(num_ranks=4, num_hosts=2, tokens=0),
    dict(num_ranks=8, num_hosts=2, capacity_factor=0.5),  # drops rows
    dict(num_ranks=8, num_hosts=4, capacity_factor=1.0),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()))
@pytest.mark.parametrize("backend", ("nvlink_one_sided", "low_latency"))
def test_any_number_of_hosts_and_any_capacity(backend, shape):
    shape = dict(shape)
    hosts = shape.pop("num_hosts")
    flat = Case(backend, **shape, dtype="float32", wire="float32")
    lost = 0
    for name in ("uniform", "one_hot_rank", "out_of_range"):
        args = exact_inputs(flat, np.random.default_rng(3), name)
        want_out, want, want_dropped = exchange_fn(flat)(*args)
        out, got, dropped = exchange_fn(two_level(flat, hosts))(*args)
        same(got, want)
        np.testing.assert_array_equal(dropped, want_dropped)
        np.testing.assert_array_equal(out, want_out)
        lost += int(np.sum(want_dropped))
    assert (lost > 0) == (flat.capacity_factor is not None)


def inner_with_garbage(**hooks):
    """A stand-in for the kernel inside a host: serves a named axis and leaves garbage in empty slots."""
    batched = backends.get_backend("low_latency")

    def push(rows, plan, ex):
        assert isinstance(ex.axis_name, str) and ex.groups is None
        bad = jnp.full((rows.shape[1],), 1 if rows.dtype == jnp.uint8 else jnp.nan, rows.dtype)
        return batched.send(rows, plan, ex, fill=bad), batched.exchange_counts(plan, ex)

    def reduce(y, weights, plan, ex, out_dtype):
        return batched.sum_back(batched.give_back(y, plan, ex), plan, weights=weights).astype(out_dtype)

    return backends.Engine("garbage", push, reduce, **hooks)


@pytest.mark.parametrize("backend", ("nvlink_one_sided", "low_latency"))
@pytest.mark.parametrize("wire", ("bfloat16", "mxfp8"))
def test_a_kernel_inside_the_host_needs_no_clean_slots(backend, wire):
    flat = Case(backend, 8, wire, "float32")
    kernel = two_level(flat, axis=AXES[1], inner=inner_with_garbage())
    assert "the garbage kernel inside" in kernel.impl.transport(kernel.exchange)
    for name in ("uniform", "empty_ranks", "all_invalid"):
        args = exact_inputs(flat, np.random.default_rng(19), name)
        want_out, want, _ = exchange_fn(flat)(*args)
        out, got, _ = exchange_fn(kernel)(*args)
        same(got, want)
        np.testing.assert_array_equal(out, want_out)


def test_each_token_crosses_once_to_each_host_and_its_places_are_those_of_the_flat_plan():
    case = two_level(Case("nvlink_one_sided", 8), 4)  # hosts of two ranks
    _, ids, _, _ = inputs(case, np.random.default_rng(2), "uniform")

    def plan_of(ids):
        plan = case.impl.plan(to_physical(ids, case.placement), case.exchange)
        return jax.tree.map(lambda v: v[None], plan)

    spec = PartitionSpec("ep")
    plan = jax.jit(compat.shard_map(plan_of, mesh=mesh_for(case), in_specs=spec, out_specs=spec))(ids)
    physical = np.asarray(to_physical(ids, case.placement)).reshape(8, T, K)
    hosts = physical // (2 * case.placement.num_local)
    sent = 0
    for rank in range(8):
        crossing = [len({h for h in row if h >= 0}) for row in hosts[rank]]
        between = jax.tree.map(lambda v, rank=rank: np.asarray(v[rank]), plan.hosts.between)
        assert between.counts.sum() == sum(crossing)
        sent += sum(crossing)
        np.testing.assert_array_equal((between.slot >= 0).sum(1), crossing)
        # what this rank fans out is what the ranks of its number sent to its host, in the flat plan's slots
        inside = jax.tree.map(lambda v, rank=rank: np.asarray(v[rank]), plan.hosts.inside)
        sources = [2 * h + rank % 2 for h in range(4)]
        mine = [np.asarray(plan.slot)[s][:, rank // 2 * 2 :][:, :2] for s in sources]
        used = np.concatenate([slots[(slots >= 0).any(1)] for slots in mine])
        np.testing.assert_array_equal(inside.slot[(inside.slot >= 0).any(1)], used)
        np.testing.assert_array_equal(inside.counts.reshape(2, 4).T, [(slots >= 0).sum(0) for slots in mine])
    assert sent < int(plan.counts.sum())  # the flat exchange sends a row for each rank


def test_the_collectives_between_hosts_move_one_row_for_each_token_and_host():
    """Counted in the program: bytes of its all-to-alls, by the ranks that take part."""
    case = two_level(Case("nvlink_one_sided", 8, "mxfp8", hidden=512))
    args = inputs(case, np.random.default_rng(0), "uniform")
    text = str(jax.make_jaxpr(exchange_fn(case))(*args))
    rails = [line for line in text.splitlines() if "all_to_all[" in line]
    assert len(rails) >= 4  # dispatch and combine, each between hosts and inside one
    assert f"u8[2,{T},{case.layout.row_bytes}]" in text and f"bf16[2,{T},512]" in text


def test_quantised_sums_travel_between_hosts():
    flat = Case("nvlink_one_sided", 8, "float32", "float32", hidden=128)
    quantised = two_level(dataclasses.replace(flat, combine_wire="mxfp8"))
    args = inputs(flat, np.random.default_rng(5), "uniform")
    want, got = (np.asarray(exchange_fn(case)(*args)[0]) for case in (flat, quantised))
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 0.01 < error < 0.04  # 28 to 40 dB: MXFP8's own error, of two sums a token


def test_what_cannot_go_in_two_steps_is_refused():
    make = functools.partial(backends.exchange_for, tokens=T, num_local=2, top_k=K, axis_name="ep", num_hosts=2)
    for name in ("nixl_ep", "nvlink_two_sided"):
        with pytest.raises(ValueError, match=f"'{name}' cannot exchange over 2 hosts.*num_hosts=1"):
            make(backends.get_backend(name), num_ranks=4)
    one_sided = backends.get_backend("nvlink_one_sided")
    with pytest.raises(ValueError, match="2 hosts in two steps with 5 ranks"):
        make(one_sided, num_ranks=5)
    ex = make(one_sided, num_ranks=4, engine=hierarchical_engine())
    flat_plan = one_sided.plan(jnp.zeros((T, K), jnp.int32), dataclasses.replace(ex, engine=None))
    with pytest.raises(ValueError, match="made for an exchange in one step"):
        ex.engine.push(jnp.zeros((T, 16), jnp.uint8), flat_plan, ex)


def test_memory_counts_what_goes_between_hosts():
    backend, layout = backends.get_backend("nvlink_one_sided"), row_layout(7168, "bfloat16", 8)
    make = functools.partial(
        backends.exchange_for, backend, tokens=512, num_ranks=16, num_local=16, top_k=8, axis_name="ep"
    )
    flat, two = make(), make(engine=hierarchical_engine(), num_hosts=2)
    assert two.host_capacity == 512 and make(num_hosts=2, capacity_factor=0.125).host_capacity == 8 * 32
    sizes = backend.memory(layout, two)
    assert sizes.pop("between_hosts") == 2 * 2 * 512 * (layout.row_bytes + 2 * 7168)
    assert sizes == backend.memory(layout, flat)
    assert host_capacity(100, targets=4, capacity=3) == 12
    assert "between hosts, once for each (token, host)" in backend.transport(two)


def test_received_rows_of_two_steps_are_the_counted_ones():
    case = two_level(Case("nvlink_one_sided", 8), axis=AXES[1])
    _, ids, weights, _ = inputs(case, np.random.default_rng(11), "zipf")

    def body(ids, weights):
        physical = to_physical(ids, case.placement)
        plan = case.impl.plan(physical, case.exchange)
        x = jnp.ones((T, case.hidden), jnp.bfloat16)
        flight = backends.start(x, physical, weights, plan, **case.options())
        got = backends.finish(flight, plan, **case.options())
        valid = received_valid(case.impl, flight.counts, plan, case.exchange)
        return flight.counts, valid, jnp.any(got.ids >= 0, axis=1)

    spec = PartitionSpec(case.axis)
    counts, valid, real = jax.jit(compat.shard_map(body, mesh=mesh_for(case), in_specs=spec, out_specs=spec))(
        ids, weights
    )
    np.testing.assert_array_equal(valid, real)
    assert int(counts.sum()) == int(real.sum()) > 0 and E == 10


TWO_HOSTS = DeviceCaps("cpu", None, 8, "network", num_hosts=2)


@pytest.mark.parametrize("axis, activations", [(AXES[0], None), (AXES[1], "mxfp8")], ids=str)
def test_the_layer_chooses_two_steps_on_two_hosts_and_computes_the_same(axis, activations):
    config = MoEConfig(64, 32, 16, 4, dtype="float32", quant=QuantConfig(activations=activations))
    case = Case("nvlink_one_sided", 8, num_hosts=2, axis=axis)
    mesh = mesh_for(case)
    layer = build_moe(config, mesh=mesh, expert_axis=axis, caps=TWO_HOSTS)
    flat = build_moe(config, mesh=mesh, expert_axis=axis, caps=TWO_HOSTS, backend="nvlink_two_sided")
    assert layer.decision(3).transport == "hierarchical" and layer.exchange(3).engine is hierarchical_engine()
    assert "between 2 hosts, once for each (token, host)" in " ".join(layer.explain(24).split())
    assert layer.memory(3)["between_hosts"] > 0
    params = init_params(jax.random.key(0), config)
    x = jax.random.normal(jax.random.key(1), (24, 64))
    cotangent = jax.random.normal(jax.random.key(2), (24, 64))

    def run(layer):
        out, vjp = jax.vjp(lambda params, x: moe(layer, params, x), params, x)
        return out, vjp(cotangent)

    got, want = (jax.jit(functools.partial(run, a))() for a in (layer, flat))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


def test_a_module_takes_an_expert_axis_of_two(rng):
    mesh = jax.make_mesh((2, 4), ("host", "local"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    module = MoE(MoEConfig(32, 16, 16, 2), mesh=mesh, expert_axis=("host", "local"), rngs=nnx.Rngs(0))
    one = MoE.from_params(module.config, module.params)
    x = jnp.asarray(rng.standard_normal((16, 32)), jnp.float32)
    assert module.layer.num_ranks == 8 and module.layer.token_axes == ("host", "local")
    run = jax.jit(lambda module, x: module(x))
    np.testing.assert_allclose(run(module, x), run(one, x), rtol=0.02, atol=0.02)
    with jax.set_mesh(mesh):
        inside = MoE(module.config, expert_axis=("host", "local"), rngs=nnx.Rngs(0))
        assert inside.gate_up.get_value().sharding.spec[0] == ("host", "local")
        single = build_moe(module.config, mesh=mesh, expert_axis=("local",), token_axes=("local",))
    assert single.expert_axis == "local" and single.num_ranks == 4


def test_the_kernels_of_one_host_exchange_over_one_axis_and_say_so():
    config, hopper = MoEConfig(32, 16, 16, 2), DeviceCaps("gpu", (9, 0), 8, "nvlink")
    mesh = jax.sharding.AbstractMesh((1, 8), ("host", "gpu"))
    layer = build_moe(config, mesh=mesh, expert_axis=("host", "gpu"), caps=hopper)
    if compat.KERNELS_SUPPORTED:
        assert layer.expert_axis == "gpu" and layer.decision(4).transport == "kernel"
    two = build_moe(
        config, mesh=jax.sharding.AbstractMesh((2, 4), ("a", "b")), expert_axis=("a", "b"), caps=hopper,
        backend="nvlink_one_sided",
    )  # fmt: skip
    assert two.decision(4).transport == "xla" and two.exchange(4).engine is None
    assert "exchange over one mesh axis" in two.decision(4).transport_reason


def test_a_kernel_inside_a_host_needs_an_axis_of_its_own():
    caps = dataclasses.replace(TWO_HOSTS, local_kernels=True)
    with pytest.raises(ValueError, match=r"expert_axis='ep'.*mesh with axes \(hosts, ranks of a host\)"):
        build_moe(MoEConfig(32, 16, 16, 2), mesh=mesh_for(Case("nvlink_one_sided", 8)), caps=caps)
    mesh = mesh_for(Case("nvlink_one_sided", 8, num_hosts=2, axis=AXES[1]))
    layer = build_moe(MoEConfig(32, 16, 16, 2), mesh=mesh, expert_axis=AXES[1], caps=caps)
    assert layer.exchange(4).engine is hierarchical_engine(ENGINE)


@pytest.mark.skipif(not compat.KERNELS_SUPPORTED, reason=compat.KERNELS_REASON)
@pytest.mark.parametrize("backend", ("nvlink_one_sided", "low_latency"))
def test_the_kernels_inside_a_host_lower_for_cuda_and_their_peers_are_its_ranks(backend):
    case = Case(backend, 8, "bfloat16", hidden=256, num_hosts=2, axis=AXES[1], engine=hierarchical_engine(ENGINE))
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs(case, np.random.default_rng(0), "uniform")]
    text = exchange_fn(case).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    kernels = ["push_rows", "combine_rows", *(["exchange_slots"] if backend == "nvlink_one_sided" else [])]
    assert text.count("mosaic_gpu_v2") == len(kernels) and all(name in text for name in kernels)
    assert text.count("stablehlo.all_to_all") >= 3  # the plan's message, rows there, sums back


def test_checkpointed_layers_in_a_scan_have_the_gradients_of_the_exchange_in_one_step():
    config = MoEConfig(32, 16, 16, 4, dtype="float32", quant=QuantConfig(activations="mxfp8"))
    params = [init_params(jax.random.key(i), config) for i in range(2)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *params)
    x = jax.random.normal(jax.random.key(2), (16, 32))

    def gradients(backend):
        layer = build_moe(config, mesh=mesh_for(Case("nvlink_one_sided", 8)), caps=TWO_HOSTS, backend=backend)
        add = lambda h, p: (h + jax.checkpoint(functools.partial(moe, layer))(p, h), None)  # noqa: E731
        return jax.jit(jax.grad(lambda params, x: jnp.sum(jax.lax.scan(add, x, params)[0] ** 2)))(stacked, x)

    got, want = gradients("auto"), gradients("nvlink_two_sided")
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-3), got, want)
