"""The kernels that route, sort and move rows lower for NVIDIA GPUs, under jit, vmap and differentiation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe import compat
from jmoe.config import MoEConfig
from jmoe.layer import build_moe, moe
from jmoe.params import init_params
from pallas_kernels.permute import combine_rows, gather_dequantized, gather_rows, rank_slots, sort_by_expert
from pallas_kernels.permute.thread import CONFIRMED, pick
from pallas_kernels.quantize import quantize
from pallas_kernels.route import Rule, choose_experts

pytestmark = pytest.mark.skipif(not compat.KERNELS_SUPPORTED, reason=compat.KERNELS_REASON)
KERNEL = dict(implementation="mosaic_sm90")


def lowered(f, *shapes):
    arguments = [jax.ShapeDtypeStruct(*s) for s in shapes]
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def count(text):
    return len(re.findall(r"custom_call @mosaic_gpu", text))


X, IDS, W = ((64, 256), jnp.bfloat16), ((64, 8), jnp.int32), ((64, 8), jnp.float32)


@pytest.mark.parametrize(
    "f, shapes, kernels",
    [
        (lambda ids: sort_by_expert(ids, 128, **KERNEL), [IDS], 1),
        (lambda ids: sort_by_expert(ids, 128, **KERNEL), [((8192, 8), jnp.int32)], 2),
        (lambda x, s, p: gather_rows(x, s, p, **KERNEL), [X, ((512,), jnp.int32), IDS], 1),
        (lambda x, s, p: gather_rows(x, s, p, fill=False, **KERNEL), [X, ((512,), jnp.int32), IDS], 1),
        (
            lambda x, s, p: gather_dequantized(quantize(x, "mxfp8", implementation="reference"), s, p, **KERNEL),
            [X, ((512,), jnp.int32), IDS],
            1,
        ),
        (lambda ids: rank_slots(ids, num_ranks=4, num_local=32, capacity=64, **KERNEL), [IDS], 1),
        (lambda y, p, w: combine_rows(y, p, w, **KERNEL), [((512, 256), jnp.bfloat16), IDS, W], 1),
        (lambda x: choose_experts(x, None, Rule(8), **KERNEL), [((64, 128), jnp.float32)], 1),
    ],
)
def test_each_is_one_kernel_or_two(f, shapes, kernels):
    assert count(lowered(f, *shapes)) == kernels


def test_the_gradient_of_the_gather_is_the_combine_kernel():
    def loss(x, s, p):
        return gather_rows(x, s, p, fill=False, **KERNEL).astype(jnp.float32).sum()

    assert count(lowered(jax.grad(loss), X, ((512,), jnp.int32), IDS)) == 1  # the forward gather is not needed


def test_the_gradient_of_quantised_rows_is_the_combine_kernel_too():
    def loss(x, s, p):
        q = quantize(x, "mxfp8", implementation="reference")
        return gather_dequantized(q, s, p, straight_through=x, **KERNEL).astype(jnp.float32).sum()

    assert count(lowered(jax.grad(loss), X, ((512,), jnp.int32), IDS)) == 1


def test_a_mapped_axis_falls_back_to_xla():
    text = lowered(jax.vmap(lambda x: choose_experts(x, None, Rule(8), **KERNEL)), ((3, 64, 128), jnp.float32))
    assert "mosaic_gpu" not in text


def test_the_layer_uses_those_that_are_confirmed_and_on_a_cpu_none():
    assert {"sort", "gather", "combine", "route"} <= CONFIRMED
    config = MoEConfig(256, 128, 32, 4)
    layer = build_moe(config)
    params = jax.eval_shape(lambda: init_params(jax.random.key(0), config, dtype=jnp.bfloat16))
    traced = jax.jit(lambda p, x: moe(layer, p, x)).trace(params, jax.ShapeDtypeStruct((16, 256), jnp.bfloat16))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for name in ("choose_experts", "sort_place", "combine_rows"):
        assert name in text
    assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_an_unknown_implementation_or_an_impossible_one_is_refused():
    args = jnp.ones(3)
    with pytest.raises(ValueError, match="choose None or one of mosaic_sm90, xla"):
        pick("sort", "cuda", None, np.sin, np.sin, args)
    with pytest.raises(ValueError, match="cannot do this: it takes tokens.*multiples of 32"):
        choose_experts(jnp.zeros((4, 40)), None, Rule(8), **KERNEL)
    with pytest.raises(ValueError, match="1 to 1024 groups, not 2000"):
        sort_by_expert(jnp.zeros((4, 2), jnp.int32), 2000, **KERNEL)
