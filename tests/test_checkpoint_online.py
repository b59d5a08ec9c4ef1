"""Quantising while loading: contracts, joint scales, what is refused, calibration."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_reference import MODELS, as_dict, bits, gated, golden, routing, tiny
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmoe.checkpoint import (
    ONLINE,
    Checkpoint,
    CheckpointError,
    MemoryCheckpoint,
    calibrate,
    load_moe_layer,
    resolve_quant,
    write_safetensors,
)
from jmoe.checkpoint import online as online_module
from pallas_kernels.quantize import QTensor

EXPERT = "model.layers.0.mlp.experts"


def over(ranks):
    return NamedSharding(Mesh(np.array(jax.devices()[:ranks]), ("ep",)), PartitionSpec("ep"))


def test_F37_nvfp4_online_load(rng, monkeypatch):
    """Joint scale of gate and up, scale 1 of an all-zero expert, NaN weights ignored in the maximum; R=1 equals R=4."""
    config, tensors = tiny(rng, dtype=ml_dtypes.bfloat16)
    tensors[f"{EXPERT}.0.gate_proj.weight"][0, 0] = 1
    tensors[f"{EXPERT}.0.up_proj.weight"][0, 0] = 10
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"{EXPERT}.1.{name}.weight"][:] = 0
    tensors[f"{EXPERT}.2.up_proj.weight"][0, 0] = np.nan
    tensors[f"{EXPERT}.2.up_proj.weight"][5, 5] = 3
    source = MemoryCheckpoint(config, tensors)
    one = load_moe_layer(source, 0, quant="nvfp4_online").experts
    g = np.asarray(one.gate_up.global_scale)
    assert g.shape == (4, 2) and (g[:, 0] == g[:, 1]).all()  # one scale for w1 and w3
    np.testing.assert_allclose(g[:3, 0], [10 / 2688, 1, 3 / 2688], rtol=2e-7)
    scale = np.asarray(one.gate_up.block_scale).astype(np.float32)
    assert (scale[1] == 0).all() and not np.asarray(one.gate_up.data)[1].any()
    assert np.argwhere(np.isnan(scale)).tolist() == [[2, 1, 0, 0]]  # the NaN costs its own block only
    down = np.abs(np.stack([tensors[f"{EXPERT}.{e}.down_proj.weight"] for e in (0, 2, 3)]).astype(np.float32))
    np.testing.assert_allclose(np.asarray(one.down.global_scale)[[0, 2, 3]], down.max((1, 2)) / 2688, rtol=2e-7)
    assert one.input_scale is None  # activations are per token

    monkeypatch.setattr(online_module, "CHUNK_BYTES", 1)  # expert by expert
    four = load_moe_layer(source, 0, quant="nvfp4_online", sharding=over(2)).experts
    assert bits(one) == bits(four) and four.down.data.sharding.shard_shape(four.down.data.shape)[0] == 2


def test_F37_what_nvfp4_online_refuses(rng, tmp_path):
    config, tensors = tiny(rng, d=24)
    with pytest.raises(ValueError, match="multiple of 16, got 24"):
        load_moe_layer(MemoryCheckpoint(config, tensors), 0, quant="nvfp4_online")
    config, tensors = tiny(rng)
    twice = {f"{EXPERT}.0.w1.weight": tensors[f"{EXPERT}.0.gate_proj.weight"]}
    with pytest.raises(CheckpointError, match=r"unexpected keys \(1 in all: model.layers.0.mlp.experts.0.w1.weight"):
        MemoryCheckpoint(config, {**tensors, **twice})  # a second tensor for the same shard of one expert
    for name, stored in (("qwen3_moe_mxfp8", "mxfp8"), ("qwen3_moe_nvfp4_ct", "nvfp4_ct"), ("gpt_oss_mxfp4", "mxfp4")):
        with Checkpoint(MODELS / name) as ckpt, pytest.raises(ValueError, match=f"the checkpoint stores {stored}"):
            load_moe_layer(ckpt, 0, quant="nvfp4_online")
    with Checkpoint(MODELS / "qwen3_moe") as ckpt:
        with pytest.raises(ValueError, match="exclude each other"):
            load_moe_layer(ckpt, 0, quant="mxfp8", dequantize="bfloat16")
        with pytest.raises(ValueError, match="quant='int4' is not known; choose one of nvfp4_online"):
            load_moe_layer(ckpt, 0, quant="int4")


def test_F37_the_same_key_in_two_shards_is_an_error(rng, tmp_path):
    import json

    config, tensors = tiny(rng)
    key = f"{EXPERT}.0.gate_proj.weight"
    write_safetensors(tmp_path / "a.safetensors", tensors)
    write_safetensors(tmp_path / "b.safetensors", {key: tensors[key], "lm_head.bias": np.zeros(3, np.float32)})
    index = {"weight_map": {**dict.fromkeys(tensors, "a.safetensors"), "lm_head.bias": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"b.safetensors: '{key}': the same key is also in .*a.safetensors"):
        Checkpoint(tmp_path)


def test_fp8_checkpoints_are_converted_and_low_bit_ones_are_kept(rng):
    with Checkpoint(MODELS / "deepseek_v3_fp8") as ckpt:
        params = load_moe_layer(ckpt, 1, quant="mxfp8")
        assert params.experts.down.format.name == "mxfp8"
        assert params.shared_down.format.name == "fp8_128x128"  # only routed experts are converted
        kept = load_moe_layer(ckpt, 1, quant="fp8_block")
        assert bits(kept) == bits(load_moe_layer(ckpt, 1))
    with Checkpoint(MODELS / "qwen3_moe_nvfp4_modelopt") as ckpt:
        assert bits(load_moe_layer(ckpt, 1, quant="modelopt_fp4")) == bits(load_moe_layer(ckpt, 1))


def test_online_memory_is_that_of_the_format(rng):
    config, tensors = tiny(rng, d=128, f=128, experts=2)
    source = MemoryCheckpoint(config, tensors)
    for quant, per_weight in (("mxfp8", 8.25), ("fp8_block", 8 + 32 / 128**2)):
        experts = load_moe_layer(source, 0, quant=quant).experts
        assert isinstance(experts.down, QTensor)
        assert 8 * (experts.gate_up.nbytes + experts.down.nbytes) == per_weight * 2 * 3 * 128 * 128


@pytest.mark.parametrize("allow", [False, True])
def test_F38_modelopt_fp4_contract(allow):
    """The table of contracts: three rows, with and without the opt-in."""
    token, tensor = "nvfp4_token", "nvfp4"
    assert resolve_quant("nvfp4_online", allow_per_token=allow).activations == token
    assert resolve_quant("nvfp4_online", "fp8_block", per_token=True, allow_per_token=allow).activations == token
    with pytest.raises(ValueError, match="per_token=False.*use quant='modelopt_fp4' for per-tensor NVFP4"):
        resolve_quant("nvfp4_online", per_token=False, allow_per_token=allow)

    assert resolve_quant("modelopt_fp4", allow_per_token=allow).activations == tensor
    with pytest.raises(ValueError, match="per tensor with static scales.*contract of quant='nvfp4_online'"):
        resolve_quant("modelopt_fp4", per_token=True, allow_per_token=allow)

    for stored in ("nvfp4_modelopt", "nvfp4_ct"):
        assert resolve_quant("modelopt_fp4", stored, allow_per_token=allow).activations == tensor
        if allow:
            got = resolve_quant("modelopt_fp4", stored, per_token=True, allow_per_token=True)
            assert got.activations == got.intermediate == token and got.weights == "nvfp4"
        else:
            with pytest.raises(ValueError, match="needs allow_per_token=True, or use .*'nvfp4_online'"):
                resolve_quant("modelopt_fp4", stored, per_token=True)
    with pytest.raises(ValueError, match="quantising twice would add both errors. Use quant='mxfp8'"):
        resolve_quant("modelopt_fp4", "mxfp8", allow_per_token=allow)
    with pytest.raises(ValueError, match="its activations are mxfp8; use quant='nvfp4_online' for per-token NVFP4"):
        resolve_quant("mxfp8", per_token=True, allow_per_token=allow)
    assert {n: resolve_quant(n).weights for n in ONLINE} == {n: o.weights for n, o in ONLINE.items()}


def test_F38_an_absent_static_scale_is_one(rng, tmp_path):
    config, tensors = tiny(rng)
    experts = load_moe_layer(MemoryCheckpoint(config, tensors), 0, quant="modelopt_fp4").experts
    assert experts.input_scale.shape == () and float(experts.input_scale) == 1.0
    np.testing.assert_array_equal(experts.intermediate_scale, np.ones(4, np.float32))
    assert experts.input_scale.dtype == jnp.float32 and not experts.input_scale.weak_type


def test_calibration_measures_what_the_layer_sees():
    with Checkpoint(MODELS / "gpt_oss") as ckpt:  # biases, clamped SwiGLU, top-k then softmax
        params, config = load_moe_layer(ckpt, 1, dtype="float32"), ckpt.moe_config
        x, _ = golden(MODELS / "gpt_oss", 1)
        x = x[:7]  # few enough tokens that some expert sees none
        got = calibrate(params, config, jnp.asarray(x)).experts
        assert np.isclose(float(got.input_scale), np.abs(x).max() / 2688, rtol=1e-6)
        plain = {k: None if v is None else v.astype(np.float64) for k, v in as_dict(params).items()}
        ids, _ = routing(x.astype(np.float64), plain, config)
        wanted = np.zeros(config.num_experts)
        for t, row in enumerate(ids):
            for e in row:
                gate, up = plain["gate_up"][e] @ x[t] + plain["gate_up_bias"][e]
                wanted[e] = max(wanted[e], np.abs(gated(gate, up, config)).max())
        wanted = np.where(wanted > 0, wanted, wanted.max())
        np.testing.assert_allclose(got.intermediate_scale, wanted / 2688, rtol=1e-5)
        with pytest.raises(ValueError, match="all zero or not finite"):
            calibrate(params, config, jnp.zeros((7, 64)))
        with pytest.raises(ValueError, match=r"give at least one token of this layer's input, \[T, 64\]"):
            calibrate(params, config, jnp.zeros((0, 64)))
