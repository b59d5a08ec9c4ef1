"""Loading the four families: golden outputs, both layouts, shards, local experts only, and keys that do not fit."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_reference import (
    MODELS,
    as_dict,
    bits,
    clone,
    golden,
    moe,
    read_tensors,
    reconfigure,
    relative,
    rewrite,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmoe.checkpoint import (
    Checkpoint,
    CheckpointError,
    MemoryCheckpoint,
    load_moe_layer,
    load_moe_layers,
    load_weights,
    read_rest,
    write_safetensors,
)
from jmoe.checkpoint import leaves as leaves_module
from jmoe.checkpoint import load as load_module
from jmoe.checkpoint.plan import plan_moe_layer
from jmoe.layer import build_moe
from jmoe.layer import moe as moe_layer
from jmoe.placement import placement_from_slots

FOLDERS = sorted(p.name for p in MODELS.iterdir() if p.is_dir())
FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]


def mesh_of(ranks):
    return Mesh(np.array(jax.devices()[:ranks]), ("ep",))


def over(ranks):
    return NamedSharding(mesh_of(ranks), PartitionSpec("ep"))


def test_all_nine_folders_are_there():
    assert len(FOLDERS) == 9


@pytest.mark.parametrize("name", FOLDERS)
def test_blocks_match_the_reference_implementation(name):
    with Checkpoint(MODELS / name) as ckpt:
        for layer in ckpt.moe_layers:
            params = load_moe_layer(ckpt, layer, dtype="float32", dequantize="float32")
            x, y = golden(MODELS / name, layer)
            assert relative(moe(x, as_dict(params), ckpt.moe_config), y) <= 1e-5


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_through_the_layer_match_the_reference_implementation(name, ranks):
    with Checkpoint(MODELS / name) as ckpt:
        layer = ckpt.moe_layers[-1]
        config = dataclasses.replace(ckpt.moe_config, dtype="float32")
        params = load_moe_layer(ckpt, layer, sharding=over(ranks) if ranks > 1 else None, dtype="float32")
        x, y = golden(MODELS / name, layer)
        built = build_moe(config, mesh=mesh_of(ranks) if ranks > 1 else None)
        out = jax.jit(lambda p, x: moe_layer(built, p, x))(params, jnp.asarray(x))
        assert relative(out, y) <= 1e-5


def fuse(tensors, prefix, experts):
    """Per-expert Qwen3-MoE tensors into the fused layout of resaved checkpoints."""
    names = ("gate_proj", "up_proj", "down_proj")
    part = {n: [tensors.pop(f"{prefix}.experts.{e}.{n}.weight") for e in range(experts)] for n in names}
    gate_up = [np.concatenate(pair) for pair in zip(part["gate_proj"], part["up_proj"], strict=True)]
    tensors[f"{prefix}.experts.gate_up_proj"] = np.stack(gate_up)
    tensors[f"{prefix}.experts.down_proj"] = np.stack(part["down_proj"])


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    folder = clone("qwen3_moe", tmp_path_factory.mktemp("fused") / "model")
    return rewrite(folder, lambda t: [fuse(t, f"model.layers.{i}.mlp", 16) for i in (0, 1)])


def test_fused_and_per_expert_layouts_load_alike(fused):
    with Checkpoint(fused) as a, Checkpoint(MODELS / "qwen3_moe") as b:
        for sharding in (None, over(4)):
            for layer in (0, 1):
                one, other = (load_moe_layer(c, layer, sharding=sharding) for c in (a, b))
                assert bits(one) == bits(other)


def test_gate_and_up_in_the_wrong_order_are_noticed(fused, tmp_path):
    """Mutation: a swap passes every check of shapes; the golden output is what notices it."""

    def swap(tensors):
        stack = tensors["model.layers.1.mlp.experts.gate_up_proj"]
        half = stack.shape[1] // 2
        tensors["model.layers.1.mlp.experts.gate_up_proj"] = np.concatenate([stack[:, half:], stack[:, :half]], 1)

    folder = tmp_path / "swapped"
    folder.mkdir()
    for file in fused.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    with Checkpoint(rewrite(folder, swap)) as ckpt:
        params = load_moe_layer(ckpt, 1, dtype="float32")
        x, y = golden(MODELS / "qwen3_moe", 1)
        assert relative(moe(x, as_dict(params), ckpt.moe_config), y) > 0.1


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "qwen3_moe_nvfp4_ct", "gpt_oss_mxfp4", "deepseek_v3_fp8"])
def test_shards_hold_what_the_whole_holds_and_read_nothing_else(name):
    with Checkpoint(MODELS / name) as ckpt:
        layer = ckpt.moe_layers[-1]
        whole = load_moe_layer(ckpt, layer)
        seen = []
        read = ckpt.read
        ckpt.read = lambda key, index=(), out=None: seen.append((key, read(key, index, out=out))) or seen[-1][1]
        sharded = load_moe_layer(ckpt, layer, sharding=over(4))
        assert bits(whole) == bits(sharded)
        for leaf in jax.tree.leaves(sharded.experts):
            parts = 4 if leaf.ndim else 1
            assert {s.data.shape[:1] for s in leaf.addressable_shards} == {
                (leaf.shape[0] // parts,) if leaf.ndim else ()
            }
        assert all(leaf.sharding.is_fully_replicated for leaf in (sharded.router,))
        weights = [(k, a) for k, a in seen if "experts" in k and a.ndim > 1 and "shared" not in k]
        counts = {k: sum(a.nbytes for other, a in weights if other == k) for k, _ in weights}
        for key, nbytes in counts.items():  # every device's experts once; interleaved rows of gate and up together
            assert nbytes == ckpt.tensors[key].nbytes, key


def test_one_device_reads_its_experts_only():
    with Checkpoint(MODELS / "qwen3_moe") as ckpt:
        seen = set()
        read = ckpt.read
        ckpt.read = lambda key, index=(), out=None: seen.add(key) or read(key, index, out=out)
        leaf = plan_moe_layer(ckpt, 0).experts.down
        part = leaf.read((slice(4, 6), slice(0, 128), slice(0, 96)))
        assert part.shape == (2, 128, 96)
        assert seen == {f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in (4, 5)}


def test_uneven_and_chosen_placements_put_experts_in_their_slots():
    with Checkpoint(MODELS / "qwen3_moe") as ckpt:
        whole = np.asarray(load_moe_layer(ckpt, 0, dtype="float32").experts.down)
        uneven = load_moe_layer(ckpt, 0, sharding=over(3), dtype="float32").experts.down  # 6, 5, 5 experts
        assert uneven.shape == (18, 128, 96)
        order = [*range(6), *range(6, 11), -1, *range(11, 16), -1]
        for slot, expert in enumerate(order):
            np.testing.assert_array_equal(uneven[slot], whole[expert] if expert >= 0 else 0)
        slots = np.array([list(range(8)) + [0, 15], list(range(8, 16)) + [0, -1]])
        placed = load_moe_layer(
            ckpt, 0, sharding=over(2), placement=placement_from_slots(slots, 16), dtype="float32"
        ).experts.down
        for slot, expert in enumerate(slots.reshape(-1)):
            np.testing.assert_array_equal(placed[slot], whole[expert] if expert >= 0 else 0)
        with pytest.raises(ValueError, match="2 ranks, the sharding cuts the experts into 4"):
            load_moe_layer(ckpt, 0, sharding=over(4), placement=placement_from_slots(slots, 16))
        with pytest.raises(ValueError, match="expert axis; expert weights are sharded by experts only"):
            load_moe_layer(ckpt, 0, sharding=NamedSharding(mesh_of(4), PartitionSpec(None, "ep")))


def test_a_whole_model_in_threads(monkeypatch):
    with Checkpoint(MODELS / "qwen3_moe_mxfp8") as ckpt:
        slow = load_moe_layers(ckpt)
        monkeypatch.setattr(load_module, "PARALLEL_BYTES", 0)
        monkeypatch.setattr(leaves_module, "PARALLEL_BYTES", 0)
        with jax.default_device(jax.devices()[3]):
            fast = load_moe_layers(ckpt, progress=False)
        assert bits(slow) == bits(fast) and list(fast) == [0, 1]
        assert fast[1].experts.down.data.devices() == {jax.devices()[3]}
        assert bits(load_moe_layers(ckpt, [1], sharding=over(2))) == bits({1: slow[1]})


def test_types_are_kept_or_converted():
    with Checkpoint(MODELS / "deepseek_v3") as ckpt:
        kept, asked = load_moe_layer(ckpt, 1), load_moe_layer(ckpt, 1, dtype=jnp.float32)
        assert kept.experts.down.dtype == kept.router.dtype == jnp.bfloat16
        assert kept.correction_bias.dtype == jnp.float32  # selection depends on its last bits
        assert {leaf.dtype for leaf in jax.tree.leaves(asked)} == {jnp.dtype("float32")}
        with pytest.raises(ValueError, match="'int8' is not a type for weights; choose bfloat16"):
            load_moe_layer(ckpt, 1, dtype="int8")
        with pytest.raises(ValueError, match="layer=0 .*no MoE block; those that have one are 1"):
            load_moe_layer(ckpt, 0)


def test_the_rest_of_a_model_is_everything_else():
    with Checkpoint(MODELS / "deepseek_v3_fp8") as ckpt:
        rest = read_rest(ckpt, dtype="float32")
        moe_keys = {k for k in ckpt.tensors if k.startswith("model.layers.1.mlp.")}
        names = {k for k in ckpt.tensors if k not in moe_keys and not k.endswith("_scale_inv")}
        assert set(rest) == names and "model.layers.0.mlp.down_proj.weight" in rest
        tensors = read_tensors(MODELS / "deepseek_v3_fp8")
        scale = tensors["model.layers.0.mlp.down_proj.weight_scale_inv"]  # [1, 2]: the second block is 64 wide
        q = tensors["model.layers.0.mlp.down_proj.weight"].astype(np.float32)
        wanted = np.concatenate([q[:, :128] * scale[0, 0], q[:, 128:] * scale[0, 1]], 1)
        np.testing.assert_array_equal(rest["model.layers.0.mlp.down_proj.weight"], wanted)
        only = read_rest(ckpt, sharding=over(2), only=lambda k: k.startswith("model.norm"))
        assert set(only) == {"model.norm.weight"} and only["model.norm.weight"].dtype == jnp.bfloat16
        assert only["model.norm.weight"].sharding.is_fully_replicated


def test_tensors_in_memory_load_like_those_on_disk():
    config = json.loads((MODELS / "gpt_oss" / "config.json").read_text())
    arrays = {k: jnp.asarray(v) for k, v in read_tensors(MODELS / "gpt_oss").items()}
    memory = MemoryCheckpoint(config, arrays)
    with Checkpoint(MODELS / "gpt_oss") as ckpt:
        assert memory.moe_layers == ckpt.moe_layers and memory.moe_config == ckpt.moe_config
        assert bits(load_moe_layer(memory, 1)) == bits(load_moe_layer(ckpt, 1))
    with pytest.raises(CheckpointError, match="type complex128"):
        MemoryCheckpoint(config, {**arrays, "x": np.zeros(2, np.complex128)})


def split(folder, parts):
    """Rewrites a single-file folder as shards with an index; returns (shard names, index)."""
    tensors = read_tensors(folder)
    (folder / "model.safetensors").unlink()
    keys, names, weight_map = sorted(tensors), [], {}
    for i in range(parts):
        names.append(f"model-{i + 1:05d}-of-{parts:05d}.safetensors")
        mine = keys[i::parts]
        write_safetensors(folder / names[-1], {k: tensors[k] for k in mine})
        weight_map |= dict.fromkeys(mine, names[-1])
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return names, index


def test_shards_with_an_index(tmp_path):
    folder = clone("mixtral", tmp_path / "m")
    names, index = split(folder, 3)
    with Checkpoint(folder) as ckpt, Checkpoint(MODELS / "mixtral") as whole:
        assert bits(load_moe_layer(ckpt, 1)) == bits(load_moe_layer(whole, 1))
    path = folder / "model.safetensors.index.json"

    def refused(match, **changes):
        path.write_text(json.dumps({**index, **changes}))
        with pytest.raises(CheckpointError, match=match):
            Checkpoint(folder)

    key = "lm_head.weight"
    other = next(n for n in names if n != index["weight_map"][key])
    for bad in ("../" + names[0], "/etc/x.safetensors", "sub/" + names[0], "x\0.safetensors", "config.json", 5):
        refused("must be a .safetensors file in the same folder", weight_map={**index["weight_map"], key: bad})
    refused("lists keys that their file does not have", weight_map={**index["weight_map"], key: other})
    refused("cannot be opened", weight_map={**index["weight_map"], key: "absent.safetensors"})
    refused("does not list keys", weight_map={k: v for k, v in index["weight_map"].items() if k != key})
    refused("no 'weight_map' object", weight_map=[1])
    write_safetensors(folder / "zz.safetensors", {key: np.zeros(2, np.float32)})
    refused("the same key is also in", weight_map={**index["weight_map"], "x": "zz.safetensors"})


def test_links_are_followed_and_loops_are_not(tmp_path):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):  # as in a hub cache: snapshots of links to blobs
        os.symlink(MODELS / "mixtral" / name, folder / name)
    with Checkpoint(folder) as ckpt:
        assert ckpt.moe_layers == (0, 1)
    (folder / "model.safetensors").unlink()
    os.symlink("model.safetensors", folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors: cannot be opened"):
        Checkpoint(folder)


def test_missing_and_unexpected_keys_are_listed(tmp_path):
    def change(tensors):
        for e in range(7):
            del tensors[f"model.layers.1.mlp.experts.{e}.up_proj.weight"]
        tensors["model.layers.0.mlp.experts.16.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["model.layers.2.input_layernorm.weight"] = np.zeros(2, np.float32)

    folder = rewrite(clone("qwen3_moe", tmp_path / "m"), change)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    text = str(caught.value)
    assert "missing keys (7 in all: model.layers.1.mlp.experts.0.up_proj.weight, " in text
    assert "experts.4.up_proj.weight, ...)" in text and "experts.5.up_proj" not in text
    assert "unexpected keys (2 in all: model.layers.0.mlp.experts.16.up_proj.weight, " in text
    assert "model.safetensors" in text


def test_keys_that_are_not_read_are_tolerated_and_named(tmp_path):
    def change(tensors):
        tensors["model.layers.2.mlp.experts.0.up_proj.weight"] = np.zeros((2, 2), np.float32)  # next-token prediction
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)

    with Checkpoint(rewrite(clone("deepseek_v3", tmp_path / "m"), change)) as ckpt:
        assert ckpt.catalog.skipped == (
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            "model.layers.2.mlp.experts.0.up_proj.weight",
        )


def test_dense_layers_and_tied_heads_of_qwen3(tmp_path):
    folder = clone("qwen3_moe", tmp_path / "m")

    def config(c):
        c |= {"mlp_only_layers": [0], "tie_word_embeddings": True}

    def dense(tensors):
        for key in [k for k in tensors if k.startswith("model.layers.0.mlp.")]:
            del tensors[key]
        del tensors["lm_head.weight"]
        for name, shape in (("gate_proj", (192, 128)), ("up_proj", (192, 128)), ("down_proj", (128, 192))):
            tensors[f"model.layers.0.mlp.{name}.weight"] = np.zeros(shape, ml_dtypes.bfloat16)

    with Checkpoint(rewrite(reconfigure(folder, config), dense)) as ckpt:
        assert ckpt.moe_layers == (1,) and "lm_head.weight" not in read_rest(ckpt)
        assert read_rest(ckpt)["model.layers.0.mlp.up_proj.weight"].shape == (192, 128)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"model_type": "llama"}, "model_type='llama' is not known; known are qwen3_moe, mixtral"),
        ({"model_type": None}, "model_type=None is not known"),
        ({"hidden_size": "128"}, "'?hidden_size'? must be a positive integer"),
        ({"hidden_size": 64}, "has shape"),
        ({"num_hidden_layers": 10**6}, "more than a model has"),
        ({"num_hidden_layers": 3}, "missing keys"),
        ({"num_local_experts": 8}, "unexpected keys|has shape"),
        ({"num_local_experts": 2**30}, "1073741824 experts in each of 2 layers, but only 117 tensors"),
        ({"num_experts_per_tok": 17}, "does not describe a qwen3_moe model"),
        ({"moe_intermediate_size": None}, "lacks 'moe_intermediate_size'"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
    ],
)
def test_configurations_that_do_not_fit(change, match, tmp_path):
    folder = reconfigure(clone("qwen3_moe", tmp_path / "m"), lambda c: c.update(change))
    with pytest.raises(CheckpointError, match=match):
        Checkpoint(folder)


def test_a_path_or_a_closed_folder_in_place_of_an_open_one_is_named():
    folder = MODELS / "qwen3_moe"
    for load in (lambda f: load_moe_layer(f, 0), load_weights, read_rest):
        with pytest.raises(TypeError, match="ckpt is a .*; give an open checkpoint: `with Checkpoint"):
            load(folder)
    with Checkpoint(folder) as ckpt:
        with pytest.raises(ValueError, match="layer='0' of .*has no MoE block; those that have one are 0, 1"):
            load_moe_layer(ckpt, "0")
        with pytest.raises(ValueError, match="dtype='int4x' is not a type for weights; choose"):
            load_moe_layer(ckpt, 0, dtype="int4x")
    with pytest.raises(ValueError, match="model.safetensors: was closed; read from it while it is open"):
        load_moe_layer(ckpt, 0)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="config.json: cannot be opened"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(CheckpointError, match="model.safetensors: cannot be opened"):
        Checkpoint(tmp_path)
