"""Swapping weights under a compiled model: one trace, the same buffers, all or nothing, no mixture for any thread."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_reference import MODELS, bits, golden, read_tensors, rewrite, tiny
from checkpoint_reference import clone as clone_folder
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmoe.checkpoint import (
    Checkpoint,
    CheckpointError,
    LiveWeights,
    LoadOptions,
    MemoryCheckpoint,
    MetadataChangedError,
    Weights,
    load_moe_layers,
    load_weights,
    reload,
)
from jmoe.checkpoint import reload as reload_function
from jmoe.layer import build_moe, moe

A = MODELS / "qwen3_moe_nvfp4_modelopt"
STEM = "model.layers.1.mlp.experts.3.up_proj"


@pytest.fixture(scope="module")
def b_folder(tmp_path_factory):
    """B: A with other numbers, among them a doubled global scale."""

    def change(tensors):
        for key in list(tensors):
            if key.endswith("weight_scale_2"):
                tensors[key] = (tensors[key] * 2).astype(np.float32)
            elif key.endswith("gate.weight"):
                tensors[key] = tensors[key][::-1].copy()

    return rewrite(clone_folder(A.name, tmp_path_factory.mktemp("b") / "model"), change)


def over(ranks):
    return NamedSharding(Mesh(np.array(jax.devices()[:ranks]), ("ep",)), PartitionSpec("ep"))


def owned(tree):
    """Copies whose buffers belong to the runtime, as they do on every device but the CPU."""
    return jax.tree.map(lambda a: jax.jit(jnp.copy, out_shardings=a.sharding)(a), tree)


def pointers(tree):
    return [[s.data.unsafe_buffer_pointer() for s in a.addressable_shards] for a in jax.tree.leaves(tree)]


@pytest.mark.parametrize("ranks, staging", [(1, "device"), (2, "host")])
def test_F34_reload_is_bitwise_in_the_same_buffers_and_traces_once(ranks, staging, b_folder):
    sharding = over(ranks) if ranks > 1 else None
    options = LoadOptions(sharding=sharding, dtype="float32")
    with Checkpoint(A) as a:
        config = dataclasses.replace(a.moe_config, dtype="float32")
        params = owned(load_moe_layers(a, [1], sharding=sharding, dtype="float32"))
    built, traces = build_moe(config, mesh=sharding.mesh if sharding else None), []

    @jax.jit
    def model(params, x):
        traces.append(1)
        return moe(built, params[1], x)

    x = jnp.asarray(golden(A, 1)[0][:4])
    # numpy's views of CPU arrays would hold on to their buffers, so look at copies
    first, where, outputs = bits(owned(params)), pointers(params), [np.asarray(model(params, x))]
    for folder in (b_folder, A):
        old = params
        params = reload_function(old, folder, options=options, staging=staging)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old)) and pointers(params) == where
        outputs.append(np.asarray(model(params, x)))
    assert not np.array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])
    assert bits(params) == first and len(traces) == 1


def test_F34_a_whole_model_from_memory_and_from_trees(b_folder, rng):
    config, tensors = tiny(rng, layers=2)
    source = MemoryCheckpoint(config, tensors)
    weights = owned(load_weights(source))
    trained = {k: jnp.asarray(v + 1) for k, v in tensors.items()}  # what an RL trainer would hand over
    where = pointers(weights)
    weights = reload(weights, MemoryCheckpoint(config, trained))
    assert isinstance(weights, Weights) and pointers(weights) == where
    np.testing.assert_array_equal(weights.rest["lm_head.weight"], tensors["lm_head.weight"] + 1)
    key = "model.layers.1.mlp.experts.2.down_proj.weight"
    np.testing.assert_array_equal(weights.moe[1].experts.down[2], tensors[key] + 1)
    minus = jax.tree.map(lambda a: np.asarray(a) - 2, weights)  # a tree of numpy arrays
    weights = reload(weights, minus)
    np.testing.assert_array_equal(weights.moe[1].experts.down[2], tensors[key] + 1 - 2)
    assert pointers(weights) == where


def test_F34_online_quantised_weights_are_reloaded_in_the_same_way(rng):
    config, tensors = tiny(rng)
    options = LoadOptions(quant="mxfp8", sharding=over(2))
    source = MemoryCheckpoint(config, tensors)
    weights = load_weights(source, options)
    other = MemoryCheckpoint(config, {k: v * 2 for k, v in tensors.items()})
    wanted = bits(load_weights(other, options))
    assert bits(reload(weights, other, options=options)) == wanted


def damage(params, what):
    """One changed leaf of layer 1's experts."""
    down = params[1].experts.down
    new = {
        "shape": lambda: down.global_scale[:2],
        "type": lambda: down.global_scale.astype(jnp.bfloat16),
        "python float": lambda: 1.0,
        "weak type": lambda: jnp.full(down.global_scale.shape, 1.0),
        "sharding": lambda: jax.device_put(down.global_scale, over(2)),
        "gone": lambda: None,
    }[what]()
    if what == "weak type":
        assert new.weak_type
    experts = dataclasses.replace(params[1].experts, down=dataclasses.replace(down, global_scale=new))
    return {1: dataclasses.replace(params[1], experts=experts)}


def test_F35_metadata_changes_are_refused_before_anything_changes():
    with Checkpoint(A) as a:
        params = load_moe_layers(a, [1])
    before, where = bits(params), pointers(params)
    for what, text in {
        "shape": r"global_scale is float32\[2\], was float32\[16\]",
        "type": r"is bfloat16\[16\], was float32\[16\]",
        "python float": "is a float, was float32",
        "weak type": r"is float32\[16\] weak, was float32\[16\]",
        "sharding": "has sharding .*was",
        "gone": "global_scale is gone",
    }.items():
        with pytest.raises(MetadataChangedError, match="[Mm]etadata changed: .*" + text) as caught:
            reload(params, damage(params, what))
        assert isinstance(caught.value, RuntimeError) and "No weight was modified" in str(caught.value)
        assert bits(params) == before and pointers(params) == where
    other = MODELS / "qwen3_moe_mxfp8"
    with pytest.raises(MetadataChangedError, match="metadata changed"):
        reload(params, other)
    with pytest.raises(MetadataChangedError, match="metadata changed"):
        reload(params, A, options=LoadOptions(dtype="float32"))
    with pytest.raises(MetadataChangedError, match="a format or another static field differs"):
        down = params[1].experts.down
        fmt = dataclasses.replace(down.format, name="nvfp4_other")
        experts = dataclasses.replace(params[1].experts, down=dataclasses.replace(down, format=fmt))
        reload(params, {1: dataclasses.replace(params[1], experts=experts)})
    with pytest.raises(ValueError, match="staging='disk' is not known"):
        reload(params, A, staging="disk")
    assert bits(params) == before and not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_F35_a_failed_read_leaves_the_old_weights_working(tmp_path, monkeypatch):
    bad = rewrite(
        clone_folder(A.name, tmp_path / "nan"), lambda t: t.update({STEM + ".weight_scale_2": np.float32(np.nan)})
    )
    cut = clone_folder(A.name, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-5])
    with Checkpoint(A) as a:
        live = LiveWeights(load_moe_layers(a, [1]))
        with live.use() as params:
            before = bits(params)
        for staging in ("device", "host"):
            with pytest.raises(CheckpointError, match=f"{STEM}.weight_scale_2.*finite and positive"):
                live.reload(bad, staging=staging)
            with pytest.raises(CheckpointError, match="do not lie within"):
                live.reload(cut, staging=staging)
        reads = []

        def failing(key, index=(), out=None, read=a.read):  # the disk goes away in the middle
            reads.append(key)
            if len(reads) > 40:
                raise OSError("input/output error")
            return read(key, index, out=out)

        monkeypatch.setattr(a, "read", failing)
        with pytest.raises(OSError, match="input/output"):
            live.reload(a)
        monkeypatch.undo()
        with live.use() as params:
            assert bits(params) == before and live.version == 0
        live.reload(a)  # and the next one goes through
        with live.use() as params:
            assert bits(params) == before and live.version == 1


def derive(weights):
    """Values that depend on weights: what a kernel multiplies its accumulator by."""
    experts = weights[1].experts
    alpha1 = experts.input_scale * experts.gate_up.global_scale
    alpha2 = experts.intermediate_scale * experts.down.global_scale
    return {"alpha1": alpha1, "alpha2": alpha2, "g1_scale_c": alpha1[:, 0] / experts.intermediate_scale}


def test_F36_derived_scales_are_made_from_the_new_weights(b_folder):
    with Checkpoint(A) as a, Checkpoint(b_folder) as b:
        weights = owned(load_moe_layers(a, [1]))
        fresh = jax.jit(derive)(load_moe_layers(b, [1]))
    derived = jax.jit(derive)(weights)
    old, where = jax.tree.map(np.asarray, derived), pointers(derived)
    old = jax.tree.map(np.copy, old)
    weights, derived = reload((weights, derived), b_folder, derive=derive)
    for name in ("alpha1", "alpha2", "g1_scale_c"):
        np.testing.assert_array_equal(derived[name], 2 * old[name])  # B doubles every weight_scale_2
    assert bits(derived) == bits(fresh) and pointers(derived) == where
    with pytest.raises(MetadataChangedError, match="alpha1"):
        reload((weights, {**derived, "alpha1": derived["alpha1"][:2]}), A, derive=derive)
    assert bits(derived) == bits(fresh)

    live = LiveWeights(weights, derive=derive)
    live.reload(A)
    with live.use() as (_, now):
        np.testing.assert_array_equal(now["alpha1"], old["alpha1"])


def test_threads_see_one_set_of_weights_or_the_other():
    """A function that is 0 only if all leaves come from one set, called by threads while A, B, A, ... are loaded."""
    shapes = {f"w{i}": (64, 64) for i in range(12)}
    trees = [{k: np.full(s, v, np.float32) for k, s in shapes.items()} for v in (1.0, 2.0)]
    live = LiveWeights(owned({k: jnp.asarray(v) for k, v in trees[0].items()}))
    traces = []

    @jax.jit
    def model(params, x):
        traces.append(1)
        first = params["w0"][0, 0]
        spread = sum(jnp.sum(jnp.abs(w - first)) for w in params.values())
        return spread, first * x

    seen, errors, stop = set(), [], threading.Event()

    def call():
        try:
            while not stop.is_set():
                with live.use() as params:
                    spread, y = model(params, jnp.float32(1))
                assert float(spread) == 0, "a mixture"
                seen.add(float(y))
        except BaseException as e:  # noqa: BLE001 - reported by the main thread
            errors.append(e)

    threads = [threading.Thread(target=call) for _ in range(3)]
    with live.use() as params:
        model(params, jnp.float32(1))
    for thread in threads:
        thread.start()
    for turn in range(60):
        live.reload(trees[(turn + 1) % 2], staging="host" if turn % 4 == 3 else "device")
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert seen == {1.0, 2.0} and live.version == 60 and len(traces) == 1


def test_F33_the_output_may_take_the_input_buffer():
    """payload_in_workspace: with the input donated the result is the same, and no more temporary memory is needed."""
    with Checkpoint(MODELS / "mixtral") as ckpt:
        params = load_moe_layers(ckpt, [1], dtype="float32")[1]
        built = build_moe(dataclasses.replace(ckpt.moe_config, dtype="float32"))
    x = np.asarray(golden(MODELS / "mixtral", 1)[0], np.float32)
    forward = lambda p, x: moe(built, p, x)  # noqa: E731
    copied = jax.jit(forward).lower(params, x).compile()
    donated = jax.jit(forward, donate_argnums=1).lower(params, x).compile()
    given = owned(jnp.asarray(x))
    pointer = given.unsafe_buffer_pointer()
    out = donated(params, given)
    np.testing.assert_array_equal(out, copied(params, jnp.asarray(x)))
    assert given.is_deleted() and out.unsafe_buffer_pointer() == pointer
    temp = [c.memory_analysis().temp_size_in_bytes for c in (donated, copied)]
    assert temp[0] <= temp[1]


def test_the_readers_names_are_what_the_folder_holds():
    assert STEM + ".weight_scale_2" in read_tensors(A)
