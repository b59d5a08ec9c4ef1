"""Whole models: logits of the quantised Qwen3 folders, and a draft that does not change what is written."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_reference import MODELS, relative
from jax.sharding import Mesh

from jmoe.checkpoint import Checkpoint, load_moe_layers, read_rest, save_checkpoint

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import qwen3_moe  # noqa: E402
import speculative  # noqa: E402

FOLDERS = ("qwen3_moe_nvfp4_modelopt", "qwen3_moe_nvfp4_ct", "qwen3_moe_mxfp8")
forward = jax.jit(lambda model, ids: model(ids))


def golden(name):
    arrays = np.load(MODELS / name / "golden.npz")
    return jnp.asarray(arrays["input_ids"], jnp.int32), arrays["logits"], arrays["bf16_logits"]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", FOLDERS)
def test_logits_of_quantised_folders(name, ranks, tmp_path):
    """Decoded to float32 they are the reference implementation's; kept low-bit, 40 dB from it at least."""
    ids, logits, unquantised = golden(name)
    assert relative(unquantised, logits) > 0.02  # quantising did something
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("ep",)) if ranks > 1 else None
    if ranks == 1:
        with Checkpoint(MODELS / name) as ckpt:
            layers = load_moe_layers(ckpt, dtype="float32", dequantize="float32")
            save_checkpoint(tmp_path / "decoded", ckpt.config, layers, read_rest(ckpt, dtype="float32"))
        decoded = qwen3_moe.stack_layers(qwen3_moe.load(tmp_path / "decoded", dtype="float32"))
        assert relative(forward(decoded, ids), logits) <= 2e-5
    if ranks > 1 and name != FOLDERS[0]:
        return  # one folder with four ranks is enough for the whole model; the blocks are tested with all
    kept = qwen3_moe.stack_layers(qwen3_moe.load(MODELS / name, mesh=mesh, dtype="float32"))
    assert relative(forward(kept, ids), logits) <= 0.01
    low_bit = [leaf for leaf in jax.tree.leaves(kept) if leaf.dtype in (jnp.uint8, ml_dtypes.float8_e4m3fn)]
    assert low_bit  # it really is kept that way


def test_a_draft_changes_nothing_but_the_number_of_calls():
    model = qwen3_moe.load(MODELS / "qwen3_moe", dtype="float32")
    stacked = qwen3_moe.stack_layers(model)
    draft = qwen3_moe.stack_layers(speculative.first_layers(model, 2))  # all of them: a perfect draft
    ids = jnp.asarray([[7, 3, 200, 11]], jnp.int32)
    tokens, plain, calls = speculative.run(stacked, draft, ids, steps=12, window=2)
    np.testing.assert_array_equal(tokens, plain)
    assert calls == 1 + -(-11 // 3)  # the prompt settles one token, every call three more
    worse = jax.tree.map(lambda a: jnp.roll(a, 1, 0) if a.shape == draft.lm_head.weight.shape else a, draft)
    tokens, plain, calls = speculative.run(stacked, worse, ids, steps=12, window=2)
    np.testing.assert_array_equal(tokens, plain)
    assert 5 < calls <= 12
    one = speculative.first_layers(model)
    assert one.config.num_layers == len(one.layers) == 1 and len(model.layers) == model.config.num_layers == 2
