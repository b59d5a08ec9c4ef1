"""Quantised checkpoints: kept low-bit, decoded, found and refused as they should be; and mutations that must show."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_reference import MODELS, as_dict, bits, clone, golden, moe, read_tensors, reconfigure, relative, rewrite
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmoe.checkpoint import Checkpoint, CheckpointError, load_moe_layer, read_rest
from jmoe.layer import build_moe
from jmoe.layer import moe as moe_layer
from jmoe.placement import local_slice, placement_from_slots
from pallas_kernels.quantize import QTensor, dequantize, quantize

QUANTISED = {
    "qwen3_moe_nvfp4_modelopt": ("nvfp4_modelopt", "nvfp4", 4.5),
    "qwen3_moe_nvfp4_ct": ("nvfp4_ct", "nvfp4", 4.5),
    "qwen3_moe_mxfp8": ("mxfp8", "mxfp8", 8.25),
    "deepseek_v3_fp8": ("fp8_block", "fp8_128x128", 8.002),
    "gpt_oss_mxfp4": ("mxfp4", "mxfp4", 4.25),
}
EXPERT = "model.layers.1.mlp.experts.3.up_proj"


def over(ranks):
    return NamedSharding(Mesh(np.array(jax.devices()[:ranks]), ("ep",)), PartitionSpec("ep"))


def error(folder, name, **options):
    """Relative error of layer 1's block against the golden output."""
    with Checkpoint(folder, **options) as ckpt:
        params = load_moe_layer(ckpt, 1, dtype="float32", dequantize="float32")
        x, y = golden(MODELS / name, 1)
        return relative(moe(x, as_dict(params), ckpt.moe_config), y)


@pytest.mark.parametrize("name", QUANTISED)
def test_weights_stay_low_bit_in_memory(name):
    scheme, fmt, per_weight = QUANTISED[name]
    with Checkpoint(MODELS / name) as ckpt:
        assert ckpt.scheme.name == scheme
        experts = load_moe_layer(ckpt, 1).experts
        config = ckpt.moe_config
        weights = 3 * config.num_experts * config.hidden_size * config.intermediate_size
        assert isinstance(experts.gate_up, QTensor) and isinstance(experts.down, QTensor)
        assert experts.gate_up.format.name == experts.down.format.name == fmt
        e, d, f = config.num_experts, config.hidden_size, config.intermediate_size
        assert experts.gate_up.shape == (e, 2, f, d) and experts.down.shape == (e, d, f)
        used = 8 * (experts.gate_up.nbytes + experts.down.nbytes) / weights
        assert (
            per_weight <= used <= per_weight * 1.01 + 0.02
        )  # global scales and partial blocks of these small matrices
        decoded = load_moe_layer(ckpt, 1, dequantize="bfloat16").experts
        assert decoded.down.dtype == decoded.gate_up.dtype == jnp.bfloat16
        exact = load_moe_layer(ckpt, 1, dequantize=jnp.float32).experts
        np.testing.assert_array_equal(np.asarray(exact.gate_up).astype(ml_dtypes.bfloat16), decoded.gate_up)


@pytest.mark.parametrize("name, ranks", [*((n, 4) for n in QUANTISED), ("qwen3_moe_nvfp4_modelopt", 1)])
def test_low_bit_layer_against_the_dequantised_forward(name, ranks):
    with Checkpoint(MODELS / name) as ckpt:
        config = dataclasses.replace(ckpt.moe_config, dtype="float32")
        x, y = golden(MODELS / name, 1)
        sharding = over(ranks) if ranks > 1 else None
        params = load_moe_layer(ckpt, 1, sharding=sharding, dtype="float32")
        built = build_moe(config, mesh=sharding.mesh if sharding else None)
        forward = jax.jit(lambda p, x: moe_layer(built, p, x))
        assert relative(forward(params, jnp.asarray(x)), y) <= 0.01  # 40 dB
        if ckpt.scheme.name.startswith("nvfp4") and ranks > 1:  # mutation: every rank has the first rank's scales
            experts = params.experts
            scale = jnp.tile(experts.down.global_scale[:4], 4)
            stale = dataclasses.replace(experts, down=dataclasses.replace(experts.down, global_scale=scale))
            unsliced = jax.device_put(
                dataclasses.replace(params, experts=stale), jax.tree.map(lambda a: a.sharding, params)
            )
            assert relative(forward(unsliced, jnp.asarray(x)), y) > 0.01


# --- scales in other types and places


def test_block_scales_may_be_bfloat16_or_powers_of_two(tmp_path):
    name = "deepseek_v3_fp8"

    def half(tensors):
        for key in [k for k in tensors if k.endswith("_scale_inv")]:
            tensors[key] = tensors[key].astype(ml_dtypes.bfloat16)

    assert 1e-5 < error(rewrite(clone(name, tmp_path / "bf16"), half), name) < 0.005

    def powers(tensors, dtype):
        for key in [k for k in tensors if k.endswith("_scale_inv")]:
            exponent = np.ceil(np.log2(tensors[key]))
            tensors[key] = {
                "f32": np.exp2(exponent).astype(np.float32),
                "e8m0": (exponent + 127).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu),
                "u8": (exponent + 127).astype(np.uint8),
            }[dtype]

    loaded = []
    for dtype in ("f32", "e8m0", "u8"):
        folder = rewrite(clone(name, tmp_path / dtype), lambda t, dtype=dtype: powers(t, dtype))
        reconfigure(folder, lambda c: c["quantization_config"].update(scale_fmt="ue8m0"))
        with Checkpoint(folder) as ckpt:
            loaded.append(load_moe_layer(ckpt, 1))
            assert loaded[-1].experts.down.format.name == "fp8_128x128_ue8m0"
    assert bits(loaded[0]) == bits(loaded[1]) == bits(loaded[2])

    folder = reconfigure(clone(name, tmp_path / "lies"), lambda c: c["quantization_config"].update(scale_fmt="ue8m0"))
    with (
        Checkpoint(folder) as ckpt,
        pytest.raises(CheckpointError, match="not powers of two, though scale_fmt is 'ue8m0'"),
    ):
        load_moe_layer(ckpt, 1)

    def powers_but_in_the_shared_expert(tensors):
        kept = {k: v for k, v in tensors.items() if "shared_experts" in k}
        powers(tensors, "f32")
        tensors.update(kept)

    rewrite(folder, powers_but_in_the_shared_expert)
    with Checkpoint(folder) as ckpt, pytest.raises(CheckpointError, match="shared_experts.*not powers of two"):
        load_moe_layer(ckpt, 1)


@pytest.mark.parametrize("name", ["qwen3_moe_nvfp4_modelopt", "qwen3_moe_nvfp4_ct", "qwen3_moe_mxfp8"])
def test_a_quantised_matrix_outside_the_experts_is_decoded(name, tmp_path):
    module = "model.layers.0.self_attn.q_proj"
    q = []

    def quantise(tensors):
        w = jnp.asarray(tensors.pop(f"{module}.weight"))
        q.append(quantize(w, QUANTISED[name][1]))
        data, scale, g = (
            None if a is None else np.asarray(a) for a in (q[0].data, q[0].block_scale, q[0].global_scale)
        )
        one = np.ones((), np.float32)
        forms = {
            "nvfp4_modelopt": dict(weight=data, weight_scale=scale, weight_scale_2=g, input_scale=one),
            "nvfp4_ct": dict(weight_packed=data, weight_scale=scale, weight_global_scale=g, input_global_scale=one),
            "mxfp8": dict(weight=data, weight_scale=scale),
        }
        parts = forms[QUANTISED[name][0]]
        if "weight_global_scale" in parts:  # compressed-tensors stores what the values were divided by
            parts["weight_global_scale"] = (1 / parts["weight_global_scale"]).reshape(1).astype(np.float32)
        tensors.update({f"{module}.{suffix}": part for suffix, part in parts.items()})

    def ignore_the_others(config):
        kept = [p for p in config["quantization_config"]["ignore"] if "self_attn" not in p]
        others = [f"model.layers.{i}.self_attn.{n}_proj" for i in range(2) for n in "qkvo"]
        config["quantization_config"]["ignore"] = kept + [o for o in others if o != module]

    folder = reconfigure(rewrite(clone(name, tmp_path / "folder"), quantise), ignore_the_others)
    with Checkpoint(folder) as ckpt:
        got = read_rest(ckpt, dtype="float32", only=lambda key: module in key)
    np.testing.assert_allclose(got[f"{module}.weight"], dequantize(q[0], jnp.float32), rtol=1e-6)


def test_e8m0_scales_may_have_their_own_type_and_name(tmp_path):
    def change(tensors):
        for key in [k for k in tensors if k.endswith(".weight_scale")]:
            tensors[key + "_inv"] = tensors.pop(key).view(ml_dtypes.float8_e8m0fnu)

    folder = rewrite(clone("qwen3_moe_mxfp8", tmp_path / "m"), change)
    with Checkpoint(folder) as a, Checkpoint(MODELS / "qwen3_moe_mxfp8") as b:
        assert bits(load_moe_layer(a, 0)) == bits(load_moe_layer(b, 0))


def fuse(tensors, suffixes, experts=16):
    """Per-expert quantised tensors as fused stacks; scalars become one for each expert."""
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp.experts"
        for suffix, name in suffixes.items():
            take = lambda e, p, s=suffix, x=prefix: tensors.pop(f"{x}.{e}.{p}.{s}")  # noqa: E731
            parts = [[take(e, p) for p in ("gate_proj", "up_proj", "down_proj")] for e in range(experts)]
            if parts[0][0].ndim < 2:
                pairs = [max(g, u) for g, u, _ in parts]  # equal but for input scales, of which the larger one counts
            else:
                pairs = [np.concatenate([g, u]) for g, u, _ in parts]
            tensors[f"{prefix}.gate_up_proj{name}"] = np.stack(pairs).reshape(experts, *np.shape(pairs[0]))
            tensors[f"{prefix}.down_proj{name}"] = np.stack([d for _, _, d in parts])


def test_fused_quantised_layout(tmp_path):
    suffixes = {
        "weight": "",
        "weight_scale": "_weight_scale",
        "weight_scale_2": "_weight_scale_2",
        "input_scale": "_input_scale",
    }
    name = "qwen3_moe_nvfp4_modelopt"
    folder = rewrite(clone(name, tmp_path / "m"), lambda t: fuse(t, suffixes))
    with Checkpoint(folder) as a, Checkpoint(MODELS / name) as b:
        assert bits(load_moe_layer(a, 0, sharding=over(4))) == bits(load_moe_layer(b, 0))


def test_fused_fp8_whose_blocks_hold_gate_and_up_is_refused(tmp_path):
    def change(tensors):
        prefix = "model.layers.1.mlp.experts"
        parts = {
            n: [tensors.pop(f"{prefix}.{e}.{n}.weight") for e in range(16)]
            for n in ("gate_proj", "up_proj", "down_proj")
        }
        for key in [k for k in tensors if k.startswith(prefix) and k.endswith("_scale_inv")]:
            del tensors[key]
        pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        tensors[f"{prefix}.gate_up_proj"] = np.stack([np.concatenate(p) for p in pairs])
        tensors[f"{prefix}.gate_up_proj_scale_inv"] = np.ones((16, 1, 1), np.float32)
        tensors[f"{prefix}.down_proj"] = np.stack(parts["down_proj"])
        tensors[f"{prefix}.down_proj_scale_inv"] = np.ones((16, 1, 1), np.float32)

    with pytest.raises(CheckpointError, match="64 rows of gate do not divide into the blocks of 128 rows of fp8_block"):
        Checkpoint(rewrite(clone("deepseek_v3_fp8", tmp_path / "m"), change))


def test_a_layer_on_the_ignore_list_stays_plain(tmp_path):
    folder = clone("qwen3_moe_nvfp4_modelopt", tmp_path / "m")
    plain = read_tensors(MODELS / "qwen3_moe")

    def change(tensors):
        for key in [k for k in tensors if k.startswith("model.layers.0.mlp.experts")]:
            del tensors[key]
        tensors.update({k: v for k, v in plain.items() if k.startswith("model.layers.0.mlp.experts")})

    rewrite(folder, change)
    with pytest.raises(CheckpointError, match="is stored as BF16, but the configuration says nvfp4_modelopt"):
        Checkpoint(folder)
    for pattern in ("model.layers.0.mlp.experts", "layers.0.mlp*", "model.layers.0.*"):
        reconfigure(folder, lambda c, p=pattern: c["quantization_config"].update(ignore=["lm_head", p]))
        with Checkpoint(folder) as ckpt:
            assert load_moe_layer(ckpt, 0).experts.down.dtype == jnp.bfloat16
            assert isinstance(load_moe_layer(ckpt, 1).experts.down, QTensor)
    reconfigure(folder, lambda c: c["quantization_config"].update(ignore=["re:model.layers.[01].mlp.*"]))
    with pytest.raises(CheckpointError, match="on the configuration's ignore list, but is stored in nvfp4_modelopt"):
        Checkpoint(folder)
    reconfigure(folder, lambda c: c["quantization_config"].update(ignore=["re:(((", "lm_head"]))
    with pytest.raises(CheckpointError, match="not a regular expression"):
        Checkpoint(folder)


def test_one_expert_that_is_not_like_the_others(tmp_path):
    folder = clone("qwen3_moe_nvfp4_modelopt", tmp_path / "m")
    plain = read_tensors(MODELS / "qwen3_moe")

    def change(tensors):
        for key in [k for k in tensors if k.startswith(EXPERT + ".")]:
            del tensors[key]
        tensors[EXPERT + ".weight"] = plain[EXPERT + ".weight"]

    rewrite(folder, change)
    reconfigure(folder, lambda c: c["quantization_config"]["ignore"].append(EXPERT))
    with pytest.raises(CheckpointError, match=f"some experts are quantised and some, as '{EXPERT}', are not"):
        Checkpoint(folder)


# --- finding the scheme


@pytest.mark.parametrize(
    "name, change, match",
    [
        ("qwen3_moe", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "declares nvfp4_modelopt, but no tensor"),
        (
            "qwen3_moe_mxfp8",
            {"quant_algo": "NVFP4", "group_size": 16},
            "declares nvfp4_modelopt, but .* belongs to mxfp8",
        ),
        ("qwen3_moe_nvfp4_ct", None, "declares unquantised, but .* belongs to nvfp4_ct"),
        (
            "qwen3_moe_nvfp4_modelopt",
            {"quant_algo": "FP8"},
            "quant_algo='FP8' is not supported; supported are ModelOpt",
        ),
        ("qwen3_moe_nvfp4_modelopt", {"group_size": 32}, "group_size=32 for NVFP4, whose blocks are 16"),
        ("qwen3_moe_nvfp4_modelopt", {"quant_method": "awq"}, "quant_method='awq' is not supported"),
        ("qwen3_moe_nvfp4_modelopt", {"ignore": "lm_head"}, "must hold strings"),
        ("qwen3_moe_nvfp4_ct", {"format": "pack-quantized"}, "format='pack-quantized' is not supported"),
        ("deepseek_v3_fp8", {"weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
        ("gpt_oss_mxfp4", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "declares fp8_block, but .* mxfp4"),
    ],
)
def test_configuration_and_tensors_must_agree(name, change, match, tmp_path):
    def edit(config):
        if change is None:
            del config["quantization_config"]
        else:
            config.setdefault("quantization_config", {}).update(change)

    folder = reconfigure(clone(name, tmp_path / "m"), edit)
    with pytest.raises(CheckpointError, match=match) as caught:
        Checkpoint(folder)
    assert "scheme=" in str(caught.value) or "strings" in str(caught.value)


def test_the_scheme_may_be_named_or_stand_in_its_own_file(tmp_path):
    folder = clone("qwen3_moe_nvfp4_modelopt", tmp_path / "m")
    quant = {}
    reconfigure(folder, lambda c: quant.update(c.pop("quantization_config")))
    assert error(folder, "qwen3_moe_nvfp4_modelopt", scheme="nvfp4_modelopt") <= 1e-5
    with pytest.raises(ValueError, match="scheme='fp4' is not known; choose one of unquantised, nvfp4_modelopt"):
        Checkpoint(folder, scheme="fp4")
    own = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": quant["ignore"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    assert error(folder, "qwen3_moe_nvfp4_modelopt") <= 1e-5
    reconfigure(folder, lambda c: c.update(quantization_config={"quant_method": "modelopt", "quant_algo": "MXFP8"}))
    with pytest.raises(
        CheckpointError, match="config.json declares mxfp8 and hf_quant_config.json declares nvfp4_modelopt"
    ):
        Checkpoint(folder)


def test_int4_and_per_tensor_fp8_are_refused(tmp_path):
    def int4(tensors):
        for key in [k for k in tensors if k.endswith("weight_packed")]:
            tensors[key] = np.zeros((96, 16), np.int32)

    with pytest.raises(CheckpointError, match=r"INT4\) are not supported"):
        Checkpoint(rewrite(clone("qwen3_moe_nvfp4_ct", tmp_path / "a"), int4))

    def scalar(tensors):
        for key in [k for k in tensors if k.endswith("weight_scale_inv")]:
            tensors[key.removesuffix("_inv")] = np.float32(1)
            del tensors[key]

    with pytest.raises(CheckpointError, match="FP8 with one scale for the whole weight is not supported"):
        Checkpoint(rewrite(clone("deepseek_v3_fp8", tmp_path / "b"), scalar))


# --- static scales of activations


def scales_1248(tensors):
    """Input scales 1, 2, 4, 8 of experts 0 to 3, the others 1; intermediate scales e + 1."""
    for key in [k for k in tensors if k.endswith(".input_scale")]:
        e = int(key.split(".")[5])
        value = e + 1 if ".down_proj." in key else 2**e if e < 4 else 1
        tensors[key] = np.float32(value)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    return rewrite(clone("qwen3_moe_nvfp4_modelopt", tmp_path_factory.mktemp("scaled") / "m"), scales_1248)


def test_F19_input_scale_is_one_number_for_all_ranks(scaled):
    with Checkpoint(scaled) as ckpt:
        one, four = load_moe_layer(ckpt, 1).experts, load_moe_layer(ckpt, 1, sharding=over(4)).experts
    assert one.input_scale.shape == () and float(one.input_scale) == 8.0
    assert four.input_scale.sharding.is_fully_replicated and float(four.input_scale) == 8.0


def test_F20_per_expert_scales_are_cut_with_the_experts(scaled):
    with Checkpoint(scaled) as ckpt:
        experts = load_moe_layer(ckpt, 1, sharding=over(4), static_scales="per_expert").experts
        wanted = np.array([1, 2, 4, 8] + [1] * 12, np.float32)
        np.testing.assert_array_equal(experts.input_scale, wanted)
        np.testing.assert_array_equal(experts.intermediate_scale, np.arange(1, 17))
        for rank, shard in enumerate(sorted(experts.intermediate_scale.addressable_shards, key=lambda s: s.device.id)):
            np.testing.assert_array_equal(shard.data, np.arange(1, 17)[4 * rank : 4 * rank + 4])
        slots = np.array([[5, 0], [1, 3], *[[2 * i, 2 * i + 1] for i in range(8)]][:8])
        slots = np.concatenate([np.arange(16).reshape(4, 4), np.full((4, 1), -1)], 1)
        padded = load_moe_layer(
            ckpt, 1, sharding=over(4), placement=placement_from_slots(slots, 16), static_scales="per_expert"
        ).experts
        assert (np.asarray(padded.input_scale) > 0).all() and float(padded.intermediate_scale[4]) == 1.0
        with pytest.raises(ValueError, match="do not match"):
            local_slice(np.ones(5, np.float32), 0, placement_from_slots(slots, 16))
        none = load_moe_layer(ckpt, 1, static_scales=None).experts
        assert none.input_scale is None and none.intermediate_scale is None
        with pytest.raises(ValueError, match="static_scales='all' is not known"):
            load_moe_layer(ckpt, 1, static_scales="all")


def test_input_scales_of_both_nvfp4_forms_are_decode_scales():
    with Checkpoint(MODELS / "qwen3_moe_nvfp4_modelopt") as a, Checkpoint(MODELS / "qwen3_moe_nvfp4_ct") as b:
        one, other = load_moe_layer(a, 1).experts, load_moe_layer(b, 1).experts
        np.testing.assert_allclose(one.input_scale, other.input_scale, rtol=2e-7)
        np.testing.assert_allclose(one.intermediate_scale, other.intermediate_scale, rtol=2e-7)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -1.0])
def test_an_input_scale_that_was_not_calibrated_is_refused(value, tmp_path):
    folder = rewrite(
        clone("qwen3_moe_nvfp4_modelopt", tmp_path / "m"),
        lambda t: t.update({EXPERT + ".input_scale": np.float32(value)}),
    )
    with Checkpoint(folder) as ckpt:
        with pytest.raises(CheckpointError, match=f"{EXPERT}.input_scale.*must be finite and positive"):
            load_moe_layer(ckpt, 1)
        assert load_moe_layer(ckpt, 1, static_scales=None).experts.input_scale is None


def test_some_input_scales_are_as_bad_as_a_wrong_one(tmp_path):
    folder = rewrite(clone("qwen3_moe_nvfp4_modelopt", tmp_path / "m"), lambda t: t.pop(EXPERT + ".input_scale"))
    with Checkpoint(folder) as ckpt, pytest.raises(CheckpointError, match="some experts .* and some have none"):
        load_moe_layer(ckpt, 1)


# --- mutations: what must not pass


def swap_names(tensors):
    for key in [k for k in tensors if ".gate_proj." in k and k.startswith("model.layers.1")]:
        other = key.replace("gate_proj", "up_proj")
        tensors[key], tensors[other] = tensors[other], tensors[key]


def reciprocal(suffix):
    def change(tensors):
        for key in [k for k in tensors if k.endswith(suffix)]:
            tensors[key] = (1 / tensors[key]).astype(tensors[key].dtype)

    return change


def swap_nibbles(tensors):
    for key in [k for k in tensors if k.endswith((".weight_packed", "_blocks"))]:
        tensors[key] = (tensors[key] >> 4) | (tensors[key] << 4)


def contiguous_halves(tensors):
    """gpt-oss rows in the order of everyone else: all gate rows, then all up rows."""
    for key in [k for k in tensors if "gate_up_proj" in k]:
        tensors[key] = np.concatenate([tensors[key][:, 0::2], tensors[key][:, 1::2]], 1)


@pytest.mark.parametrize(
    "name, change",
    [
        ("qwen3_moe_mxfp8", swap_names),
        ("qwen3_moe_nvfp4_modelopt", reciprocal(".weight_scale_2")),
        ("qwen3_moe_nvfp4_ct", reciprocal(".weight_global_scale")),
        ("qwen3_moe_nvfp4_ct", swap_nibbles),
        ("deepseek_v3_fp8", reciprocal("_scale_inv")),
        ("gpt_oss_mxfp4", swap_nibbles),
        ("gpt_oss_mxfp4", contiguous_halves),
    ],
)
def test_mutated_weights_miss_the_golden_output(name, change, tmp_path):
    assert error(rewrite(clone(name, tmp_path / "m"), change), name) > 0.05


@pytest.mark.parametrize("name, suffix", [
    ("qwen3_moe_nvfp4_modelopt", "weight_scale"),
    ("qwen3_moe_nvfp4_modelopt", "weight_scale_2"),
    ("qwen3_moe_nvfp4_ct", "weight_global_scale"),
    ("qwen3_moe_mxfp8", "weight_scale"),
    ("deepseek_v3_fp8", "weight_scale_inv"),
])  # fmt: skip
def test_a_dropped_scale_is_missed(name, suffix, tmp_path):
    folder = rewrite(clone(name, tmp_path / "m"), lambda t: t.pop(f"{EXPERT}.{suffix}"))
    with pytest.raises(CheckpointError, match=rf"missing keys \(1 in all: {EXPERT}.{suffix}\)"):
        Checkpoint(folder)
