"""What a call is given is checked while it is traced: a wrong thing raises, names the argument and says what to do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jmoe import MoEConfig, QuantConfig, RouterConfig, build_moe, init_params, moe, moe_local
from jmoe.compat import KERNELS_SUPPORTED, shard_map
from jmoe.placement import placement_from_slots
from pallas_kernels.all_to_all import ragged_all_to_all
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.quantize import quantize

D, F, E, K, T = 64, 32, 8, 2, 16
PLAIN = MoEConfig(D, F, E, K, dtype="float32")
RICH = dataclasses.replace(
    PLAIN, router=RouterConfig(use_bias=True), use_bias=True, shared_intermediate_size=24, shared_gate=True
)
ONE, MANY = (1,), (4,)


def layer_of(config=PLAIN, ranks=ONE, **options):
    mesh = jax.make_mesh(ranks, ("ep",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[: ranks[0]])
    return build_moe(config, mesh=mesh, **options)


def trace(layer, params, x=None, **options):
    """The shape that the call would have; nothing is computed."""
    x = jnp.zeros((T, D)) if x is None else x
    return jax.eval_shape(lambda p, x: moe(layer, p, x, **options), params, x).shape


def params_with(config=PLAIN, **changes):
    params = init_params(jax.random.key(0), config)
    of_experts = {k: changes.pop(k) for k in tuple(changes) if hasattr(params.experts, k)}
    return dataclasses.replace(params, **changes, experts=dataclasses.replace(params.experts, **of_experts))


@pytest.mark.parametrize("ranks", [ONE, MANY])
@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (PLAIN, dict(router=jnp.zeros((E + 1, D))), r"router has shape \(9, 64\).*takes \(8, 64\)"),
        (PLAIN, dict(router=jnp.zeros((E - 1, D))), r"router has shape \(7, 64\)"),
        (PLAIN, dict(router=None), "router has shape None"),
        (PLAIN, dict(router_bias=jnp.zeros(E)), "router_bias has shape.*router.use_bias=False"),
        (PLAIN, dict(shared_gate_up=jnp.zeros((2, 24, D))), "shared_gate_up has.*shared_intermediate_size=0"),
        (PLAIN, dict(shared_down=jnp.zeros((D, 24))), "shared_down has shape"),
        (RICH, dict(router_bias=None), "router_bias has shape None"),
        (RICH, dict(router_bias=jnp.zeros(1)), r"router_bias has shape \(1,\)"),
        (RICH, dict(shared_gate_up=None, shared_down=None, shared_gate=None), "shared_gate_up has shape None"),
        (RICH, dict(shared_down=jnp.zeros((D, 12))), r"shared_down has shape \(64, 12\).*takes \(64, 24\)"),
        (RICH, dict(shared_gate=None), "shared_gate has shape None"),
        (RICH, dict(down=jnp.zeros((E - 1, D, F))), "down has shape.*gate_up holds 8 experts"),
        (RICH, dict(input_scale=jnp.ones(3)), r"input_scale has shape \(3,\)"),
        (PLAIN, dict(down=jnp.zeros((E, D, F), jnp.int8)), "down is an array of int8.*QTensor"),
        (PLAIN, dict(gate_up=jnp.zeros((E, 2, F, D), jnp.float8_e4m3fn)), "gate_up is an array of float8_e4m3fn"),
    ],
)
def test_parameters_that_the_configuration_does_not_name_are_refused(config, changes, message, ranks):
    layer = layer_of(config, ranks)
    assert trace(layer, params_with(config)) == (T, D)
    with pytest.raises(ValueError, match=message):
        trace(layer, params_with(config, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_size=64.0), "hidden_size must be a positive integer, got 64.0"),
        (dict(quant="mxfp8"), r"quant='mxfp8' is not a QuantConfig; give QuantConfig\(activations="),
        (dict(router="softmax"), "router='softmax' is not a RouterConfig"),
        (dict(shared_intermediate_size=-1), "shared_intermediate_size=-1 must be"),
        (dict(shared_intermediate_size=1.5), "shared_intermediate_size=1.5 must be"),
        (dict(shared_gate=True), "shared_gate=True without a shared expert"),
        (dict(hidden_size_unpadded=1.5), "hidden_size_unpadded=1.5 must lie"),
        (dict(capacity_factor=float("inf")), "capacity_factor=inf must be positive, or None"),
        (dict(capacity_factor="1"), "capacity_factor='1' must be positive"),
        (dict(intermediate_size=17, quant=QuantConfig(intermediate="nvfp4")), "intermediate='nvfp4'.*17 is odd.*mxfp8"),
        (dict(hidden_size=33, quant=QuantConfig(weights="mxfp4")), "weights='mxfp4'.*hidden_size=33.*odd"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_when_it_is_made(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAIN, **changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(activations=5), "activations=5 must be the name of a format"),
        (dict(activations=["mxfp8"]), "activations=.*must be the name"),
        (dict(intermediate="fp8_128x128"), "intermediate='fp8_128x128' is not known.*'fp8_128'"),
        (dict(combine_wire="float32"), "combine_wire='float32'.*None.*or as 'mxfp8'"),
        (dict(wire=None), "wire=None must be 'auto'"),
        (dict(mx_alignment="a"), "mx_alignment='a' must be 0 or a multiple of 32"),
    ],
)
def test_a_quantisation_that_cannot_be_is_refused_when_it_is_made(fields, message):
    with pytest.raises(ValueError, match=message):
        QuantConfig(**fields)


def test_small_conveniences_of_the_configuration():
    assert dataclasses.replace(PLAIN, quant=None).quant == QuantConfig()
    assert MoEConfig(np.int64(D), F, E, K, dtype="float32") == PLAIN
    with pytest.raises(ValueError, match="scaling=nan must be"):
        RouterConfig(scaling=float("nan"))
    with pytest.raises(ValueError, match="config is a str; from_hf takes the dict of a config.json"):
        MoEConfig.from_hf("folder/config.json")
    with pytest.raises(
        ValueError, match="do not divide hidden_size=100. Leave it unquantised, or set.*mx_alignment=32"
    ):
        quant = QuantConfig(activations="mxfp8")
        layer_of(dataclasses.replace(PLAIN, hidden_size=100, quant=quant), MANY)
    with pytest.raises(ValueError, match="wire='zzz' is not known; choose one of 'auto'"):
        layer_of(dataclasses.replace(PLAIN, quant=QuantConfig(wire="zzz")), MANY)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float8_e4m3fn"])
def test_tokens_must_be_floats(dtype):
    with pytest.raises(ValueError, match=rf"x is {dtype}\[16, 64\].*Cast it"):
        trace(layer_of(), params_with(), jnp.zeros((T, D), dtype))


def test_what_is_no_array_or_no_params_is_named():
    layer, params = layer_of(), params_with()
    with pytest.raises(ValueError, match="x is a list"):
        moe(layer, params, [[0.0] * D])
    with pytest.raises(ValueError, match=r"x has shape \(\)"):
        moe(layer, params, jnp.float32(0))
    with pytest.raises(TypeError, match="params is a dict.*init_params"):
        moe(layer, {"router": params.router}, jnp.zeros((T, D)))
    assert moe(layer, params, np.zeros((T, D), np.float32)).dtype == jnp.float32
    for call in (moe, moe_local):
        with pytest.raises(TypeError, match=r"layer is a MoEConfig; it must be what build_moe"):
            call(PLAIN, params, jnp.zeros((T, D)))
    masked = moe(layer, params, jnp.ones((T, D)), valid=[True] * 4 + [False] * (T - 4))
    assert masked[:4].any() and not masked[4:].any()


def test_what_build_moe_cannot_take_is_named():
    with pytest.raises(TypeError, match="config is a dict; build_moe takes a MoEConfig"):
        build_moe({"hidden_size": 64})
    with pytest.raises(TypeError, match="mesh is a list; build_moe takes a jax.sharding.Mesh"):
        build_moe(PLAIN, mesh=jax.devices())
    for options in (dict(expert_axis=0), dict(token_axes=("ep", None))):
        with pytest.raises(ValueError, match="must be the name of a mesh axis, or a tuple of names"):
            build_moe(PLAIN, mesh=layer_of(ranks=MANY).mesh, **options)
    assert layer_of(ranks=MANY, token_axes=["ep"]) == layer_of(ranks=MANY)


@pytest.mark.parametrize("tokens", [-1, 1.5, "8"])
def test_a_number_of_tokens_is_an_integer_and_not_negative(tokens):
    for ask in (layer_of().explain, layer_of(ranks=MANY).explain, layer_of().decision, layer_of().memory):
        with pytest.raises(ValueError, match=f"tokens={tokens!r} must be a number of tokens"):
            ask(tokens)


@pytest.mark.parametrize("kernel", ["grouped_matmul", "quantize", "ragged_all_to_all"])
def test_kernels_in_a_shard_map_that_checks_varying_axes_say_how_to_turn_that_off(kernel):
    if kernel != "grouped_matmul" and not KERNELS_SUPPORTED:
        pytest.skip("without kernels XLA does it, which carries them")
    none = jnp.zeros((4,), jnp.int32)
    call = {
        "grouped_matmul": lambda x: grouped_matmul(x, x[None], jnp.full((1,), 4, jnp.int32)),
        "quantize": lambda x: quantize(x, "mxfp8").data,
        "ragged_all_to_all": lambda x: ragged_all_to_all(x, x, none, none, none, none, axis_name="ep"),
    }[kernel]
    for check in (True, False):
        mapped = jax.shard_map(
            call, mesh=layer_of(ranks=MANY).mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=check
        )
        if check:
            with pytest.raises(ValueError, match="shard_map that checks varying axes.*check_vma=False"):
                jax.eval_shape(mapped, jnp.zeros((16, 64)))
        else:
            assert jax.eval_shape(mapped, jnp.zeros((16, 64))).shape[0] == 16


def test_a_placement_must_be_one_of_this_layer():
    params = params_with()
    with pytest.raises(ValueError, match="num_local=3, 12 slots for 8 experts, and no placement"):
        trace(layer_of(ranks=MANY, num_local=3), params)
    with pytest.raises(ValueError, match="placement is one of 6 experts and the layer has 8"):
        slots = placement_from_slots([[0, 1], [2, 3], [4, 5], [0, 1]], 6)
        trace(layer_of(ranks=MANY), params, placement=slots)


def test_a_rank_mask_is_for_backends_with_one_and_for_every_rank():
    params = params_with()
    with pytest.raises(ValueError, match="backend 'nvlink_two_sided' has no rank mask.*'nixl_ep'"):
        trace(layer_of(ranks=MANY, backend="nvlink_two_sided"), params, rank_mask=jnp.ones(4, bool))
    for mask in (jnp.ones(3, bool), jnp.ones(4, jnp.int32)):
        with pytest.raises(ValueError, match=r"rank_mask is .*must be bool\[4\]"):
            trace(layer_of(ranks=MANY, backend="nixl_ep"), params, rank_mask=mask)


def test_moe_local_wants_its_shard_map_and_its_own_experts():
    params, x = params_with(), jnp.zeros((T, D))
    layer = layer_of(ranks=MANY, backend="nvlink_two_sided")
    with pytest.raises(ValueError, match="inside a jax.shard_map over 'ep' with 4 ranks, and was called outside"):
        moe_local(layer, params, x)
    with pytest.raises(ValueError, match="called over 2 ranks"):
        local_over(layer_of(ranks=(2,)).mesh, layer, params, x, P("ep"))
    with pytest.raises(ValueError, match="weights of 8 experts and has 2 slots.*in_specs"):
        local_over(layer.mesh, layer, params, x, P())
    with pytest.raises(ValueError, match="moe takes global arrays.*call moe_local"):
        local_over(layer.mesh, layer, params, x, P("ep"), function=moe)
    with pytest.raises(ValueError, match="pass check_vma=False"):
        local_over(layer.mesh, layer, params, x, P("ep"), over=jax.shard_map)
    assert local_over(layer.mesh, layer, params, x, P("ep")) == (T, D)


def local_over(mesh, layer, params, x, experts, *, function=moe_local, over=shard_map):
    specs = dataclasses.replace(jax.tree.map(lambda _: P(), params), experts=experts)
    f = over(lambda p, x: function(layer, p, x), mesh=mesh, in_specs=(specs, P("ep")), out_specs=P("ep"))
    return jax.eval_shape(f, params, x).shape
