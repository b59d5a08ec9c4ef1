"""The whole layer: every backend and rank count computes the same function, and so do its gradients."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jmoe import MoEConfig, QuantConfig, RouterConfig, build_moe, init_params, moe, moe_local, moe_with_stats
from jmoe.backends import BACKENDS
from jmoe.compat import shard_map
from jmoe.layer import quantize_params

D, F, E, K, T = 128, 64, 8, 2, 64
STANDARD = tuple(name for name, b in BACKENDS.items() if b.form == "standard" and name != "local")
BATCHED = tuple(name for name, b in BACKENDS.items() if b.form == "batched")
CONFIG = MoEConfig(D, F, E, K, dtype="float32")


def mesh_of(shape, names=("ep",), kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=jax.devices()[: int(np.prod(shape))])


def inputs(config=CONFIG, shape=(T,), seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    return init_params(keys[0], config), jax.random.normal(keys[1], (*shape, config.hidden_size))


def dense(params, x, config=CONFIG):
    """Every expert on every token, in float64 numpy: no code shared with the layer."""
    x = np.asarray(x, np.float64)
    w = {name: np.asarray(getattr(params.experts, name), np.float64) for name in ("gate_up", "down")}
    logits = x @ np.asarray(params.router, np.float64).T
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    top = np.argsort(-scores, axis=-1, kind="stable")[:, : config.num_experts_per_tok]
    out = np.zeros((x.shape[0], config.hidden_size))
    for t, experts in enumerate(top):
        weights = scores[t, experts] / scores[t, experts].sum()
        for e, weight in zip(experts, weights, strict=True):
            gate, up = w["gate_up"][e] @ x[t]
            out[t] += weight * (w["down"][e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def error(a, b):
    return float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))


def snr(a, b):
    return -20 * np.log10(error(a, b))


def run(config, params, x, backend="nvlink_two_sided", mesh=None, **options):
    layer = build_moe(config, mesh=mesh, backend=backend, **options)
    return jax.jit(lambda p, x: moe(layer, p, x))(params, x)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("backend", STANDARD + BATCHED)
def test_F46_every_backend_and_rank_count_computes_the_dense_layer(backend, ranks):
    params, x = inputs()
    got = run(CONFIG, params, x, backend, mesh_of((ranks,)))
    assert error(got, dense(params, x)) < 1e-6


@pytest.mark.parametrize("backend", ["nvlink_two_sided", "low_latency"])
@pytest.mark.parametrize("chunks", [2, 3])
def test_tokens_exchanged_in_chunks_give_the_whole_layer(backend, chunks):
    params, x = inputs()
    whole = run(CONFIG, params, x, backend, mesh_of((4,)))
    parts = run(CONFIG, params, x, backend, mesh_of((4,)), overlap_chunks=chunks)
    assert error(parts, np.asarray(whole, np.float64)) < 1e-6
    with pytest.raises(ValueError, match="overlap_chunks=0"):
        build_moe(CONFIG, overlap_chunks=0)


def test_one_rank_computes_the_dense_layer_with_any_leading_shape():
    params, x = inputs(shape=(4, 3, 5))
    got = run(CONFIG, params, x, "auto")
    assert got.shape == x.shape
    assert error(got.reshape(-1, D), dense(params, x.reshape(-1, D))) < 1e-6


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shape", [(16, 4), (3, 7), (1,)])
def test_two_axis_mesh_of_either_kind_and_token_counts_that_do_not_divide(kind, shape):
    params, x = inputs(shape=shape)
    mesh = mesh_of((2, 4), ("dp", "ep"), kind)
    layer = build_moe(CONFIG, mesh=mesh, backend="nvlink_two_sided")
    with jax.set_mesh(mesh):
        y, stats = jax.jit(lambda p, x: moe_with_stats(layer, p, x))(params, x)
    tokens = int(np.prod(shape))
    assert y.shape == x.shape and error(np.asarray(y).reshape(-1, D), dense(params, x.reshape(-1, D))) < 1e-6
    assert int(stats.tokens_per_expert.sum()) == tokens * K and int(stats.dropped) == 0


@pytest.mark.parametrize("shape", [(2, 4), (8, 1)])
@pytest.mark.parametrize("backend", ["auto", "low_latency", "deepep_high_throughput"])
def test_F46_a_tensor_wide_scale_is_that_of_the_tokens_of_all_axes(backend, shape):
    config = dataclasses.replace(CONFIG, quant=QuantConfig(activations="nvfp4"))
    params, x = inputs(config)
    x = x * jnp.linspace(0.1, 8, T)[:, None]  # each rank's own maximum is another one
    one = np.asarray(run(config, params, x, "auto"))
    mesh = mesh_of(shape, ("dp", "ep"))
    assert error(run(config, params, x, backend, mesh), one) < 1e-6
    if shape == (2, 4) and backend == "auto":  # inside a shard_map over the experts' axis only, "dp" is one array
        layer = build_moe(config, mesh=mesh, backend="nvlink_two_sided")
        specs = (dataclasses.replace(jax.tree.map(lambda _: P(), params), experts=P("ep")), P("ep"))
        local = functools.partial(moe_local, layer)
        mine = jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=P("ep"), axis_names=frozenset({"ep"}), check_vma=False
        )
        assert error(jax.jit(mine)(params, x), one) < 1e-6


def test_F23_masked_tokens_do_not_count_in_a_tensor_wide_scale():
    config = dataclasses.replace(CONFIG, quant=QuantConfig(activations="nvfp4"))
    params, x = inputs(config)
    valid = np.arange(T) % 4 > 0
    loud = jnp.where(jnp.asarray(valid)[:, None], x, 1e4)
    for layer in (build_moe(config), build_moe(config, mesh=mesh_of((4,)), backend="nvlink_two_sided")):
        f = jax.jit(lambda p, x, layer=layer: moe(layer, p, x, valid=jnp.asarray(valid)))
        np.testing.assert_array_equal(f(params, loud), f(params, x))


def test_stats_are_those_of_one_rank():
    params, x = inputs()
    one = jax.jit(lambda p, x: moe_with_stats(build_moe(CONFIG), p, x))(params, x)[1]
    layer = build_moe(CONFIG, mesh=mesh_of((8,)), backend="nvlink_two_sided")
    many = jax.jit(lambda p, x: moe_with_stats(layer, p, x))(params, x)[1]
    chex.assert_trees_all_equal(one.tokens_per_expert, many.tokens_per_expert)
    chex.assert_trees_all_close(one, many, rtol=1e-5)


def test_moe_local_inside_the_callers_own_shard_map():
    params, x = inputs()
    mesh = mesh_of((4,))
    layer = build_moe(CONFIG, mesh=mesh, backend="nvlink_two_sided")
    specs = dataclasses.replace(
        jax.tree.map(lambda _: P(), params), experts=jax.tree.map(lambda _: P("ep"), params.experts)
    )
    body = shard_map(lambda p, x: moe_local(layer, p, x) * 2, mesh=mesh, in_specs=(specs, P("ep")), out_specs=P("ep"))
    assert error(jax.jit(body)(params, x), 2 * dense(params, x)) < 1e-6


@pytest.mark.parametrize("backend", STANDARD + BATCHED)
def test_R8_gradients_equal_R1_gradients(backend):
    config = dataclasses.replace(CONFIG, quant=QuantConfig(activations="mxfp8"))
    params, x = inputs()

    def gradients(layer):
        loss = lambda p, x: (moe(layer, p, x) * jnp.sin(x)).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)

    one = gradients(build_moe(config))
    many = gradients(build_moe(config, mesh=mesh_of((8,)), backend=backend))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        assert np.linalg.norm(a) > 0
        assert error(b, np.asarray(a, np.float64)) < 2e-6


@pytest.mark.parametrize("backend", ["nvlink_two_sided", "deepep_high_throughput"])
def test_gradients_can_be_mapped_over_sequences(backend):
    params, x = inputs(shape=(2, 8))
    layer = build_moe(CONFIG, mesh=mesh_of((2,)), backend=backend)

    def gradient(x):
        return jax.grad(lambda x: (moe(layer, params, x) ** 2).sum())(x)

    mapped = jax.jit(jax.vmap(gradient))(x)
    assert error(mapped, np.asarray(jax.jit(gradient)(x), np.float64)) < 1e-6


@pytest.mark.parametrize("backend", ["local", "nvlink_two_sided", "low_latency"])
def test_a_gradient_of_a_gradient_is_refused_where_it_would_be_wrong(backend):
    params, x = inputs()
    layer = build_moe(CONFIG, mesh=None if backend == "local" else mesh_of((4,)), backend=backend)

    def twice(x):
        return jax.grad(lambda x: (jax.grad(lambda x: (moe(layer, params, x) ** 2).sum())(x) ** 2).sum())(x)

    with pytest.raises(NotImplementedError, match="derivative of a gradient.*first derivatives only"):
        jax.eval_shape(twice, x)


def test_experts_without_tokens_have_exactly_zero_weight_gradients():
    params, x = inputs()
    favoured = jnp.zeros_like(params.router).at[:2].set(params.router[:2])
    params = dataclasses.replace(params, router=favoured)
    x = jnp.abs(x)
    params = dataclasses.replace(params, router=jnp.concatenate([jnp.ones((2, D)), -jnp.ones((E - 2, D))]))
    layer = build_moe(CONFIG, mesh=mesh_of((4,)), backend="nvlink_two_sided")
    grads = jax.jit(jax.grad(lambda p: (moe(layer, p, x) ** 2).sum()))(params)
    gate_up = np.asarray(grads.experts.gate_up)
    assert np.all(gate_up[2:] == 0) and np.all(np.abs(gate_up[:2]).sum(axis=(1, 2, 3)) > 0)


# Output SNR, dB, of a layer whose activations travel (and are multiplied) in a format: at least, at most.
LAYER_SNR = {
    "mxfp8": (26, 40),
    "fp8_128": (26, 40),
    "nvfp4": (16, 26),
    "nvfp4_token": (16, 26),
    "nvfp4_token_4o6": (16, 27),
    "mxfp4": (12, 24),
}


@pytest.mark.parametrize("fmt", LAYER_SNR)
def test_layer_snr_has_its_floor_and_ceiling_and_who_quantises_changes_nothing(fmt):
    params, x = inputs()
    want = dense(params, x)
    config = dataclasses.replace(CONFIG, quant=QuantConfig(activations=fmt))
    plain = dataclasses.replace(CONFIG, quant=QuantConfig(activations=fmt, wire="float32"))
    mesh, (low, high) = mesh_of((4,)), LAYER_SNR[fmt]
    sent = np.asarray(run(config, params, x, "allgather_reducescatter", mesh))
    assert low <= snr(sent, want) <= high
    # Quantise-then-send equals send-then-quantise, on another backend too.
    np.testing.assert_array_equal(np.asarray(run(plain, params, x, "nvlink_two_sided", mesh)), sent)


def test_F19_static_scales_of_single_experts_become_one_number_wherever_rows_are_quantised_once():
    config = dataclasses.replace(CONFIG, quant=QuantConfig(activations="nvfp4"))
    params, x = inputs()

    def scaled(scale):
        return dataclasses.replace(params, experts=dataclasses.replace(params.experts, input_scale=scale))

    own = scaled(jnp.linspace(0.5, 1.0, E) / 448)
    sender = np.asarray(run(config, own, x, "nvlink_two_sided", mesh_of((4,))))
    receiver = np.asarray(run(config, own, x, "deepep_high_throughput", mesh_of((4,))))
    np.testing.assert_array_equal(receiver, sender)
    largest = run(config, scaled(jnp.float32(1 / 448)), x, "nvlink_two_sided", mesh_of((4,)))
    np.testing.assert_array_equal(np.asarray(largest), sender)


@pytest.mark.parametrize("backend", STANDARD + BATCHED)
def test_F46_a_quantised_layer_is_the_same_on_every_backend_and_rank_count(backend):
    fmt = "nvfp4_token" if backend in STANDARD else "nvfp4"
    config = dataclasses.replace(CONFIG, quant=QuantConfig(activations=fmt))
    params, x = inputs()
    one = np.asarray(run(config, params, x, "auto"), np.float64)
    assert error(run(config, params, x, backend, mesh_of((8,))), one) < 1e-6


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "nvfp4", "fp8_128x128"])
def test_quantised_weights_have_their_floor_and_ceiling(fmt):
    config = dataclasses.replace(CONFIG, intermediate_size=128, quant=QuantConfig(weights=fmt))
    params, x = inputs(config)
    want = dense(params, x, config)
    got = run(config, quantize_params(params, fmt), x, mesh=mesh_of((4,)))
    low, high = {"mxfp8": (26, 38), "fp8_128x128": (26, 38), "nvfp4": (14, 24), "mxfp4": (12, 22)}[fmt]
    assert low <= snr(got, want) <= high


def test_mxfp8_combine_wire_is_near_and_not_equal():
    params, x = inputs()
    plain = np.asarray(run(CONFIG, params, x, mesh=mesh_of((4,))), np.float64)
    config = dataclasses.replace(CONFIG, quant=QuantConfig(combine_wire="mxfp8"))
    assert 28 < snr(run(config, params, x, mesh=mesh_of((4,))), plain) < 45


def test_F43_experts_that_do_not_divide_into_the_ranks():
    config = dataclasses.replace(CONFIG, num_experts=10)
    params, x = inputs(config)
    for backend in ("nvlink_two_sided", "low_latency"):
        got = run(config, params, x, backend, mesh_of((4,)))
        assert error(got, dense(params, x, config)) < 1e-6


def test_F22_capacity_overflow_is_counted():
    config = dataclasses.replace(CONFIG, capacity_factor=0.5)
    params, x = inputs(config)
    layer = build_moe(config, mesh=mesh_of((4,)), backend="nvlink_two_sided")
    y, stats = jax.jit(lambda p, x: moe_with_stats(layer, p, x))(params, x)
    assert int(stats.dropped) > 0 and np.isfinite(np.asarray(y)).all()
    roomy = build_moe(dataclasses.replace(config, capacity_factor=8.0), mesh=mesh_of((4,)), backend="nvlink_two_sided")
    assert int(jax.jit(lambda p, x: moe_with_stats(roomy, p, x))(params, x)[1].dropped) == 0


@pytest.mark.parametrize("backend", STANDARD + BATCHED)
def test_F27_no_tokens_at_all_and_no_valid_tokens(backend):
    params, x = inputs()
    layer = build_moe(CONFIG, mesh=mesh_of((4,)), backend=backend)
    empty = jnp.zeros((3, 0, D))
    both = jax.jit(jax.value_and_grad(lambda p, x: moe(layer, p, x).sum(), argnums=(0, 1)))
    total, (dparams, dx) = both(params, empty)
    assert total == 0 and dx.shape == empty.shape and not any(np.any(leaf) for leaf in jax.tree.leaves(dparams))
    specs = dataclasses.replace(jax.tree.map(lambda _: P(), params), experts=P("ep"))
    local = shard_map(
        lambda p, x: moe_local(layer, p, x), mesh=layer.mesh, in_specs=(specs, P("ep")), out_specs=P("ep")
    )
    assert jax.eval_shape(local, params, empty[0]).shape == (0, D)
    y, stats = jax.jit(lambda p, x, v: moe_with_stats(layer, p, x, valid=v))(params, x, jnp.zeros((T,), bool))
    assert np.all(np.asarray(y) == 0) and int(stats.tokens_per_expert.sum()) == 0


def test_a_NaN_token_and_invalid_garbage_harm_nobody_else():
    params, x = inputs()
    want = np.asarray(run(CONFIG, params, x, mesh=mesh_of((4,))))
    poisoned = x.at[5].set(jnp.nan).at[9].set(jnp.inf)
    valid = jnp.ones((T,), bool).at[9].set(False)
    layer = build_moe(CONFIG, mesh=mesh_of((4,)), backend="nvlink_two_sided")
    got = np.asarray(jax.jit(lambda p, x, v: moe(layer, p, x, valid=v))(params, poisoned, valid))
    assert np.isnan(got[5]).all() and np.all(got[9] == 0)
    others = np.delete(np.arange(T), [5, 9])
    np.testing.assert_array_equal(got[others], want[others])


def test_F32_twenty_runs_are_bitwise_equal():
    config = dataclasses.replace(CONFIG, quant=QuantConfig(activations="nvfp4_token"))
    params, x = inputs(config)
    layer = build_moe(config, mesh=mesh_of((8,)), backend="nvlink_two_sided")
    f = jax.jit(lambda p, x: moe(layer, p, x))
    first = np.asarray(f(params, x))
    for _ in range(19):
        np.testing.assert_array_equal(np.asarray(f(params, x)), first)


def test_shared_expert_padded_hidden_and_sigmoid_router_work_together():
    router = RouterConfig(score="sigmoid", scaling=2.5, num_groups=4, group_topk=2, use_correction_bias=True)
    config = dataclasses.replace(CONFIG, router=router, shared_intermediate_size=32, hidden_size_unpadded=100)
    params, x = inputs(config)
    one = run(config, params, x, "auto")
    many = run(config, params, x, "nvlink_two_sided", mesh_of((8,)))
    assert one.shape == (T, 100) and error(many, np.asarray(one, np.float64)) < 1e-6
    layer, valid = build_moe(config), jnp.arange(T) % 3 > 0
    masked = np.asarray(jax.jit(lambda p, x: moe(layer, p, x, valid=valid))(params, x))
    assert not masked[::3].any() and error(masked[valid], np.asarray(one, np.float64)[valid]) < 1e-6


def test_nixl_rank_mask_is_data_and_does_not_retrace():
    params, x = inputs()
    layer = build_moe(CONFIG, mesh=mesh_of((4,)), backend="nixl_ep")
    f = jax.jit(chex.assert_max_traces(lambda p, x, m: moe_with_stats(layer, p, x, rank_mask=m), n=1))
    y, stats = f(params, x, jnp.ones((4,), bool))
    assert error(y, dense(params, x)) < 1e-6 and int(stats.dropped) == 0
    _, stats = f(params, x, jnp.array([True, True, False, True]))
    assert int(stats.dropped) == int(stats.tokens_per_expert[4:6].sum()) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mesh=(("ep",), (4,)), token_axes=("dp",)), r"token_axes=\('dp',\).*does not have.*Leave token_axes"),
        (dict(mesh=(("dp", "ep"), (2, 4)), token_axes=("dp",)), "not among token_axes.*Add it"),
        (dict(mesh=(("dp",), (4,)), backend="nvlink_two_sided"), "has .'dp',.*expert_axis, or use backend='local'"),
        (dict(mesh=(("data",), (4,))), "'auto' spreads the experts.*'ep'.*has .'data',.*expert_axis, or .*'local'"),
        (dict(mesh=(("ep",), (4,)), num_local=1), "num_local=1 slots.*at least 2"),
        (dict(mesh=(("ep",), (4,)), num_local=2.5), "num_local=2.5 slots.*at least 2"),
        (dict(mesh=(("ep",), (4,)), overlap_chunks=1.5), "overlap_chunks=1.5 must be at least 1"),
        (dict(mesh=(("ep",), (4,)), implementation="cuda"), "no implementation='cuda'; there are .*'portable'"),
        (dict(mesh=(("ep",), (4,)), expert_axis=("ep", "ep")), "names an axis twice"),
        (dict(mesh=(("ep",), (4,)), backend="local"), "'local' was asked to serve 4 ranks"),
    ],
)
def test_F47_refusals_come_before_tracing_and_say_what_to_do(options, message):
    names, shape = options.pop("mesh")
    with pytest.raises(ValueError, match=message):
        build_moe(CONFIG, mesh=mesh_of(shape, names), **options)


def test_a_mesh_without_the_expert_axis_is_one_rank_for_who_asks_for_that():
    assert build_moe(CONFIG, mesh=mesh_of((4,), ("data",)), backend="local").num_ranks == 1


def test_one_token_axis_may_be_a_name():
    assert build_moe(CONFIG, mesh=mesh_of((4,)), token_axes="ep").token_axes == ("ep",)


def test_wrong_shapes_are_refused_with_the_shape_that_is_right():
    params, x = inputs()
    layer = build_moe(CONFIG)
    with pytest.raises(ValueError, match=r"\[\.\.\., 128\]"):
        moe(layer, params, x[:, :64])
    small = dataclasses.replace(params, experts=jax.tree.map(lambda a: a[:3], params.experts))
    with pytest.raises(ValueError, match="hold 3 experts"):
        moe(layer, small, x)


def test_explain_and_memory_state_bytes():
    config = MoEConfig(7168, 2048, 256, 8, quant=QuantConfig(activations="nvfp4_token"))
    layer = build_moe(config, mesh=mesh_of((8,)), backend="nvlink_two_sided")
    text = layer.explain(4096)
    row = layer.layout(512).row_bytes
    assert row == 4112 and f"{row} = 3584 data" in text and "nvfp4_token" in text
    assert layer.memory(512)["dispatch_receive"] == 8 * 512 * row
