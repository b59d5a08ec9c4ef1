"""Draft heads: what their experts become, and the workspace they share with the target."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jmoe.checkpoint import draft_format, share_workspace
from jmoe.config import MoEConfig, QuantConfig
from jmoe.layer import build_moe, moe
from jmoe.params import init_params
from jmoe.payload import Workspace

MODULE = "model.layers.61.mlp.experts.0.up_proj"
FP8, NVFP4 = "fp8_128x128", "nvfp4"

# per_token, ignored by the source, on the explicit list, checkpoint is FP8
TABLE = {
    (False, False, False, False): NVFP4,
    (False, False, False, True): NVFP4,
    (False, False, True, False): None,
    (False, False, True, True): FP8,
    (False, True, False, False): None,
    (False, True, False, True): None,
    (False, True, True, False): None,
    (False, True, True, True): None,
    (True, False, False, False): NVFP4,
    (True, False, False, True): NVFP4,
    (True, False, True, False): None,
    (True, False, True, True): FP8,
    (True, True, False, False): NVFP4,  # the draft inherits
    (True, True, False, True): NVFP4,
    (True, True, True, False): None,
    (True, True, True, True): None,
}


@pytest.mark.parametrize("row", TABLE)
def test_F39_draft_experts(row):
    per_token, source, explicit, fp8 = row
    stem = "layers.61.mlp"
    for pattern, module in itertools.product((stem, "model." + stem), (MODULE, MODULE.removeprefix("model."))):
        ignore = {"source_ignore": ["lm_head", pattern] * source, "fp4_ignore": ["re:.*other", pattern] * explicit}
        assert draft_format(module, per_token=per_token, checkpoint_fp8=fp8, **ignore) == TABLE[row]


def test_F39_table_is_complete():
    assert set(TABLE) == set(itertools.product((False, True), repeat=4))


@pytest.mark.parametrize("row", [r for r in TABLE if r[0]])
def test_F39_linear_layers_follow_the_lists_whatever_the_target_does(row):
    _, source, explicit, fp8 = row
    module = "model.layers.61.self_attn.q_proj"
    ignore = {"source_ignore": [module] * source, "fp4_ignore": [module] * explicit}
    got = draft_format(module, per_token=True, checkpoint_fp8=fp8, is_moe=False, **ignore)
    assert got == TABLE[(False, *row[1:])]


def test_target_and_draft_share_one_workspace_whatever_the_order():
    """A quantised target and a BF16 draft: the union is that of the larger rows, and both still compute the same."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("ep",))
    base = MoEConfig(hidden_size=64, intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    quant = QuantConfig(activations="mxfp8", weights=None, wire="mxfp8")
    target = build_moe(dataclasses.replace(base, quant=quant), mesh=mesh, backend="nvlink_two_sided")
    draft = build_moe(base, mesh=mesh, backend="nvlink_two_sided")
    both = share_workspace(target, draft, tokens=8)
    assert both == share_workspace(draft, target, tokens=8) == share_workspace(draft, target, draft, tokens=8)
    alone = [share_workspace(layer, tokens=8) for layer in (target, draft)]
    assert alone[0].dispatch_bytes < alone[1].dispatch_bytes == both.dispatch_bytes
    assert isinstance(both, Workspace) and both.total >= max(w.total for w in alone)
    other = build_moe(dataclasses.replace(base, num_experts_per_tok=1), mesh=mesh)
    with pytest.raises(ValueError, match="top_k=2 and top_k=1 cannot share one workspace"):
        share_workspace(target, other, tokens=8)
    with pytest.raises(ValueError, match="at least one layer"):
        share_workspace(tokens=8)
    params = init_params(jax.random.key(0), base)
    x = jax.random.normal(jax.random.key(1), (16, 64), jnp.bfloat16)

    @jax.jit
    def step(params, x):  # one program that runs both, as speculative decoding does
        return moe(target, params, x), moe(draft, params, x)

    quantised, plain = step(params, x)
    error = jnp.linalg.norm((quantised - plain).astype(jnp.float32)) / jnp.linalg.norm(plain.astype(jnp.float32))
    assert 0.01 < float(error) < 0.1
