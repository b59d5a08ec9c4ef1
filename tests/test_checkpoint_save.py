"""Writing checkpoints: equal bits when read again, names that others expect, atomic, resumable; the command line."""

import json
import os

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoint_reference import MODELS, as_dict, bits, golden, moe, relative, tiny
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmoe.checkpoint import (
    FORMATS,
    Checkpoint,
    CheckpointError,
    MemoryCheckpoint,
    load_moe_layer,
    load_moe_layers,
    quantize_folder,
    read_rest,
    save,
    save_checkpoint,
)
from jmoe.checkpoint.cli import main
from jmoe.checkpoint.export import reciprocal
from jmoe.placement import placement_from_slots

PARTIAL = "model-00001-of-00003.safetensors"


def keys(ckpt, part):
    return {k.split(part, 1)[1] for k in ckpt.tensors if part in k}


@pytest.mark.parametrize(
    "scheme, quant", [("nvfp4_modelopt", "modelopt_fp4"), ("mxfp8", "mxfp8"), ("fp8_block", "fp8_block")]
)
def test_what_is_quantised_is_read_again_with_equal_bits(scheme, quant, rng, tmp_path):
    config, tensors = tiny(rng, layers=2, dtype=ml_dtypes.bfloat16)
    source = MemoryCheckpoint(config, tensors)
    layers, rest = load_moe_layers(source, quant=quant), read_rest(source)
    forms = [scheme] + ["nvfp4_ct"] * (scheme == "nvfp4_modelopt")
    for form in forms:
        save_checkpoint(tmp_path / form, config, layers, rest, scheme=form)
        with Checkpoint(tmp_path / form) as ckpt:
            assert ckpt.scheme.name == form
            assert bits(load_moe_layers(ckpt)) == bits(layers) and bits(read_rest(ckpt)) == bits(rest)
            suffixes = keys(ckpt, "model.layers.1.mlp.experts.2.up_proj.")
            assert (
                suffixes
                == {
                    "nvfp4_modelopt": {"weight", "weight_scale", "weight_scale_2", "input_scale"},
                    "nvfp4_ct": {"weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"},
                    "mxfp8": {"weight", "weight_scale"},
                    "fp8_block": {"weight", "weight_scale_inv"},
                }[form]
            )
            if form == "nvfp4_ct":  # divisors
                stem = "model.layers.1.mlp.experts.2.down_proj"
                assert ckpt.read(stem + ".weight_global_scale").shape == (1,)
                assert ckpt.read(stem + ".weight_global_scale")[0] > 100
            if form == "nvfp4_modelopt":
                assert ckpt.tensors["model.layers.1.mlp.experts.2.down_proj.weight_scale_2"].shape == ()
    own = json.loads((tmp_path / scheme / "config.json").read_text())["quantization_config"]
    assert own["quant_method"] == {"fp8_block": "fp8"}.get(scheme, "modelopt")
    assert (tmp_path / scheme / "hf_quant_config.json").exists() == (scheme != "fp8_block")
    assert any("lm_head" in p for p in own.get("ignore", own.get("modules_to_not_convert")))


@pytest.mark.parametrize(
    "name, fmt, tolerance",
    [
        ("qwen3_moe_nvfp4_ct", "nvfp4", 1e-5),
        ("qwen3_moe_nvfp4_modelopt", "nvfp4_ct", 1e-5),  # the divisor of such a scale may be an ulp away
        ("qwen3_moe_mxfp8", "mxfp8", 1e-5),
        ("deepseek_v3_fp8", "fp8_block", 0.004),  # routed experts bit for bit, the shared one decoded to BF16
        ("gpt_oss_mxfp4", "mxfp4", 1e-5),
        ("gpt_oss_mxfp4", "bfloat16", 1e-5),
        ("deepseek_v3_fp8", "bfloat16", 0.004),
        ("mixtral", "bfloat16", 1e-5),
        ("gpt_oss", "bfloat16", 1e-5),
    ],
)
def test_converted_folders_keep_the_golden_output(name, fmt, tolerance, tmp_path):
    quantize_folder(MODELS / name, tmp_path / "out", format=fmt)
    with Checkpoint(tmp_path / "out") as ckpt, Checkpoint(MODELS / name) as source:
        assert ckpt.scheme.name == FORMATS[fmt][0]
        params = load_moe_layer(ckpt, 1, dtype="float32", dequantize="float32")
        x, y = golden(MODELS / name, 1)
        assert relative(moe(x, as_dict(params), ckpt.moe_config), y) <= tolerance
        if fmt != "bfloat16" and "modelopt" not in name:
            assert bits(load_moe_layer(ckpt, 1).experts) == bits(load_moe_layer(source, 1).experts)
        assert set(read_rest(ckpt)) == set(read_rest(source))


def test_reciprocals_come_back():
    divisors = (np.arange(1 << 23, dtype=np.uint32) + np.uint32(0x3F800000)).view(np.float32)  # all of one binade
    scales = np.float32(1) / divisors
    np.testing.assert_array_equal(np.float32(1) / reciprocal(scales), scales)
    rng = np.random.default_rng(1)
    anything = np.exp(rng.uniform(-40, 40, 1000)).astype(np.float32)
    np.testing.assert_allclose(np.float32(1) / reciprocal(anything), anything, rtol=1.2e-7)


def test_parameters_in_physical_order_are_written_in_logical_order(rng, tmp_path):
    config, tensors = tiny(rng)
    source = MemoryCheckpoint(config, tensors)
    placement = placement_from_slots([[3, 0, 1], [2, 1, -1]], 4)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("ep",)), PartitionSpec("ep"))
    layers = load_moe_layers(source, sharding=sharding, placement=placement)
    save_checkpoint(tmp_path / "out", config, layers, read_rest(source), placement=placement)
    with Checkpoint(tmp_path / "out") as ckpt:
        assert bits(load_moe_layer(ckpt, 0)) == bits(load_moe_layer(source, 0))
    with pytest.raises(ValueError, match="6 expert slots for 4 experts; pass the placement"):
        save_checkpoint(tmp_path / "other", config, layers, read_rest(source))


def test_what_cannot_be_written_is_refused_and_leaves_nothing(rng, tmp_path):
    config, tensors = tiny(rng)
    source = MemoryCheckpoint(config, tensors)
    layers, rest = load_moe_layers(source), read_rest(source)
    with pytest.raises(CheckpointError, match="kept as float32, which mxfp8 does not store; load it with quant="):
        save_checkpoint(tmp_path / "a", config, layers, rest, scheme="mxfp8")
    with pytest.raises(
        ValueError, match="qwen3_moe model cannot be written as 'mxfp4'.*choose one of unquantised, nvfp4"
    ):
        save_checkpoint(tmp_path / "b", config, layers, rest, scheme="mxfp4")
    with pytest.raises(ValueError, match=r"has parameters of \[\]; the configuration has MoE blocks in \[0\]"):
        save_checkpoint(tmp_path / "c", config, {}, rest)
    with pytest.raises(ValueError, match="gpt_oss model cannot be written as 'nvfp4_modelopt'"):
        quantize_folder(MODELS / "gpt_oss", tmp_path / "d", format="nvfp4")
    with pytest.raises(ValueError, match="format='int4' is not known"):
        quantize_folder(MODELS / "gpt_oss", tmp_path / "e", format="int4")
    assert not any((tmp_path / name).exists() for name in "abcde")
    save_checkpoint(tmp_path / "f", config, layers, rest)
    with pytest.raises(CheckpointError, match="cannot be made .*choose a place that can be written to"):
        quantize_folder(MODELS / "mixtral", MODELS / "README.md" / "x", format="mxfp8")
    with pytest.raises(CheckpointError, match="exists already"):
        save_checkpoint(tmp_path / "f", config, layers, rest)


def test_a_killed_run_leaves_nothing_that_loads_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    source = MODELS / "qwen3_moe_mxfp8"
    written, allowed, original = [], [], save.write_safetensors

    def counting(path, *args, **kwargs):
        if len(written) == allowed[-1]:
            raise KeyboardInterrupt
        original(path, *args, **kwargs)
        written.append(path.name)

    monkeypatch.setattr(save, "write_safetensors", counting)
    for shards in (0, 1, 2):
        allowed.append(shards)
        with pytest.raises(KeyboardInterrupt):
            quantize_folder(source, out, format="mxfp8")
        assert not out.exists() and partial.exists()
        with pytest.raises(CheckpointError, match="is still being written"):
            Checkpoint(partial)
    with pytest.raises(CheckpointError, match="holds the beginning of another conversion"):
        quantize_folder(source, out, format="bfloat16")
    allowed.append(None)
    (partial / "junk.safetensors.tmp").write_bytes(b"half a shard")
    steps = []
    for name in ("rename", "unlink"):  # killed between any two of the last steps
        real = getattr(os, name)

        def dying(*args, name=name, real=real, **kwargs):
            if name not in steps:
                steps.append(name)
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, dying)
    with pytest.raises(KeyboardInterrupt):
        quantize_folder(source, out, format="mxfp8")
    assert not out.exists()
    try:
        quantize_folder(source, out, format="mxfp8")
    except KeyboardInterrupt:  # pathlib calls os.unlink on some versions only
        with pytest.raises(CheckpointError, match="is still being written"):
            Checkpoint(out)
        quantize_folder(source, out, format="mxfp8")
    assert written == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]  # none of them twice
    assert not partial.exists()
    with Checkpoint(out) as a, Checkpoint(source) as b:
        assert bits(load_moe_layers(a)) == bits(load_moe_layers(b)) and bits(read_rest(a)) == bits(read_rest(b))


def test_parameters_are_written_anew_after_an_interruption(rng, tmp_path, monkeypatch):
    config, tensors = tiny(rng)
    source = MemoryCheckpoint(config, tensors)
    layers, rest = load_moe_layers(source), read_rest(source)
    original = save.write_safetensors

    def dying(path, *args, **kwargs):
        if "00002" in path.name:
            raise KeyboardInterrupt
        original(path, *args, **kwargs)

    monkeypatch.setattr(save, "write_safetensors", dying)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "out", config, layers, {k: v * 0 for k, v in rest.items()})
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    save_checkpoint(tmp_path / "out", config, layers, rest)  # other values: nothing of the first attempt may stay
    with Checkpoint(tmp_path / "out") as ckpt:
        assert bits(read_rest(ckpt)) == bits(rest) and bits(load_moe_layer(ckpt, 0)) == bits(layers[0])
    assert os.listdir(tmp_path) == ["out"]


def test_two_writers_do_not_meet(tmp_path, monkeypatch):
    original = save.write_safetensors

    def second(path, *args, **kwargs):
        monkeypatch.setattr(save, "write_safetensors", original)
        with pytest.raises(CheckpointError, match="is being written by another process"):
            quantize_folder(MODELS / "mixtral", tmp_path / "out", format="bfloat16")
        original(path, *args, **kwargs)

    monkeypatch.setattr(save, "write_safetensors", second)
    quantize_folder(MODELS / "mixtral", tmp_path / "out", format="bfloat16")
    with Checkpoint(tmp_path / "out") as ckpt:
        assert ckpt.moe_layers == (0, 1)


def test_the_command_line(tmp_path, capsys):
    out = tmp_path / "out"
    assert main([str(MODELS / "qwen3_moe_mxfp8"), str(out), "--format", "bfloat16", "--quiet"]) == 0
    assert "unquantised, 2.7 MB, 1.72 of the 1.6 MB of IN" in capsys.readouterr().out
    assert main([str(MODELS / "qwen3_moe_mxfp8"), str(tmp_path / "b"), "--format", "nvfp4"]) == 1
    assert "quantising twice would add both errors" in capsys.readouterr().err
    assert main([str(tmp_path / "absent"), str(tmp_path / "c"), "--format", "nvfp4"]) == 1
    assert "is not a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(out), str(tmp_path / "d"), "--format", "int4"])
    capsys.readouterr()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_tokenizer_files_come_along(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for path in (MODELS / "mixtral").iterdir():
        os.symlink(path, source / path.name)
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("old")
    quantize_folder(source, tmp_path / "out", format="bfloat16", progress=True)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert "tokenizer.json" in names and "pytorch_model.bin" not in names and "golden.npz" not in names
