"""The Flax modules: NNX conventions, and the Linen form with the same numbers."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType

from jmoe import MoEConfig, QuantConfig, RouterConfig, even_placement
from jmoe import linen as jmoe_linen
from jmoe.nn import MoE, QuantizedParam, quantize_experts

CONFIG = MoEConfig(32, 32, 4, 2, dtype="float32")
ROUTER = RouterConfig(score="sigmoid", use_correction_bias=True)
RICH = dataclasses.replace(CONFIG, router=ROUTER, use_bias=True, shared_intermediate_size=16, shared_gate=True)
X = jax.random.normal(jax.random.key(7), (3, 5, 32))


def mesh_of(ranks):
    return jax.make_mesh((ranks,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])


@pytest.fixture(scope="module")
def module():
    return MoE(RICH, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def output(module):
    return np.asarray(nnx.jit(lambda m, x: m(x))(module, X))


def test_nnx_jit_plain_jit_and_split_merge_agree(module, output):
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda m, x: m(x))(module, X)), output)
    graph, state = nnx.split(module)
    again = jax.jit(lambda s, x: nnx.merge(graph, s)(x))(state, X)
    np.testing.assert_array_equal(np.asarray(again), output)
    assert output.shape == X.shape and np.isfinite(output).all()


def test_eval_shape_has_the_shapes_and_no_arrays():
    abstract = nnx.eval_shape(lambda: MoE(RICH, rngs=nnx.Rngs(0)))
    shapes = {k[0]: v.get_value().shape for k, v in nnx.to_flat_state(nnx.state(abstract))}
    assert shapes["gate_up"] == (4, 2, 32, 32) and shapes["down"] == (4, 32, 32) and shapes["router"] == (4, 32)
    assert shapes["correction_bias"] == (4,) and shapes["shared_gate_up"] == (2, 16, 32)


def test_gradients_reach_every_parameter_and_not_the_correction_bias(module):
    grads = nnx.jit(nnx.grad(lambda m: (m(X) ** 2).sum()))(module)
    flat = {k[0]: v.get_value() for k, v in nnx.to_flat_state(grads)}
    assert "correction_bias" not in flat
    assert set(flat) == {"router", "gate_up", "down", "gate_up_bias", "down_bias"} | {
        "shared_gate_up",
        "shared_down",
        "shared_gate",
    }
    assert all(float(jnp.abs(g).sum()) > 0 for g in flat.values())


def test_quantised_experts_are_their_own_kind_of_variable_and_get_no_gradient(module, output):
    low = quantize_experts(module, "mxfp8")
    assert isinstance(low.gate_up, QuantizedParam) and low.config.quant.weights == "mxfp8"
    got = np.asarray(nnx.jit(lambda m, x: m(x))(low, X))
    error = np.linalg.norm(got - output) / np.linalg.norm(output)
    assert 0.005 < error < 0.08
    flat = {k[0] for k, _ in nnx.to_flat_state(nnx.jit(nnx.grad(lambda m: (m(X) ** 2).sum()))(low))}
    assert "gate_up" not in flat and "router" in flat
    graph, state = nnx.split(low)
    np.testing.assert_array_equal(np.asarray(nnx.jit(lambda m, x: m(x))(nnx.merge(graph, state), X)), got)


def test_parameters_are_sharded_where_a_mesh_is_in_context_and_plain_elsewhere():
    assert MoE(CONFIG, rngs=nnx.Rngs(0)).gate_up.get_value().sharding.is_fully_replicated
    with jax.set_mesh(mesh_of(4)):
        module = MoE(CONFIG, rngs=nnx.Rngs(0))
        assert module.gate_up.get_value().sharding.spec[0] == "ep"
        assert module.router.get_value().sharding.is_fully_replicated
        many = nnx.jit(lambda m, x: m(x))(module, X)
    one = nnx.jit(lambda m, x: m(x))(MoE(CONFIG, rngs=nnx.Rngs(0)), X)
    chex.assert_trees_all_close(np.asarray(many), np.asarray(one), rtol=1e-5, atol=1e-5)


def test_a_seed_makes_the_same_model_on_any_number_of_ranks_also_where_experts_do_not_divide():
    config = dataclasses.replace(RICH, num_experts=6)
    one = MoE(config, rngs=nnx.Rngs(0))
    alone = nnx.jit(lambda m, x: m(x))(one, X)
    linen = [jmoe_linen.MoE(config, mesh=mesh) for mesh in (None, mesh_of(4))]
    outputs = [jax.jit(m.apply)(jax.jit(m.init)(jax.random.key(0), X), X) for m in linen]
    np.testing.assert_allclose(np.asarray(outputs[1]), np.asarray(outputs[0]), rtol=1e-5, atol=1e-6)
    for ranks in (4, 8):
        module = MoE(config, mesh=mesh_of(ranks), rngs=nnx.Rngs(0))
        assert module.gate_up.shape == (8, 2, 32, 32)
        got = nnx.jit(lambda m, x: m(x))(module, X)
        np.testing.assert_allclose(np.asarray(got), np.asarray(alone), rtol=1e-5, atol=1e-6)
        order = np.asarray(even_placement(6, ranks).replicas)[:, 0]  # as docs/flax.md saves them
        np.testing.assert_array_equal(np.asarray(module.down[...])[order], np.asarray(one.down[...]))


def test_an_explicit_mesh_argument_needs_no_context():
    module = MoE(CONFIG, mesh=mesh_of(2), backend="nvlink_two_sided", rngs=nnx.Rngs(0))
    y, stats = nnx.jit(lambda m, x: m.call_with_stats(x))(module, X)
    one = nnx.jit(lambda m, x: m(x))(MoE(CONFIG, rngs=nnx.Rngs(0)), X)
    chex.assert_trees_all_close(np.asarray(y), np.asarray(one), rtol=1e-5, atol=1e-5)
    assert int(stats.tokens_per_expert.sum()) == 15 * 2
    assert "nvlink_two_sided" in module.explain(64)


def test_orbax_saves_and_restores_float_and_quantised_modules(module, tmp_path):
    for name, one in (("float", module), ("low", quantize_experts(module, "nvfp4"))):
        graph, state = nnx.split(one)
        with ocp.StandardCheckpointer() as saver:
            saver.save(tmp_path / name, nnx.to_pure_dict(state))
            saver.wait_until_finished()
            restored = saver.restore(tmp_path / name, jax.tree.map(jnp.zeros_like, nnx.to_pure_dict(state)))
        nnx.replace_by_pure_dict(state, restored)
        want = np.asarray(nnx.jit(lambda m, x: m(x))(one, X))
        np.testing.assert_array_equal(np.asarray(nnx.jit(lambda m, x: m(x))(nnx.merge(graph, state), X)), want)


def test_refusals_happen_when_the_module_is_made():
    config = dataclasses.replace(CONFIG, quant=QuantConfig(activations="int8"))
    with pytest.raises(ValueError, match=r"int8.*not a format"):
        MoE(config, rngs=nnx.Rngs(0))


def test_linen_form_has_the_same_parameters_and_numbers(module, output):
    linen = jmoe_linen.MoE(RICH)
    variables = jax.eval_shape(linen.init, jax.random.key(0), X)
    assert set(variables["params"]) == {k[0] for k, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    params = {name: getattr(module, name).get_value() for name in variables["params"]}
    state = {"correction_bias": module.correction_bias.get_value()}
    filled = {"params": params, "moe_state": state}
    np.testing.assert_allclose(np.asarray(jax.jit(linen.apply)(filled, X)), output, rtol=1e-5, atol=1e-6)
    _, stats = jax.jit(lambda v, x: linen.apply(v, x, method="call_with_stats"))(filled, X)
    assert int(stats.tokens_per_expert.sum()) == 15 * 2
    assert np.isfinite(np.asarray(jax.jit(linen.init)(jax.random.key(0), X)["params"]["gate_up"])).all()
