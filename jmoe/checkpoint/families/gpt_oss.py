"""gpt-oss: top-k then softmax, biases everywhere, clamped SwiGLU; fused stacks whose rows alternate gate and up."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Family, Shapes, attention, layers, outside, size


def is_moe(hf: Mapping, layer: int) -> bool:
    return True


def rest(hf: Mapping) -> tuple[Shapes, Shapes]:
    linears, params = outside(hf)
    for layer in range(layers(hf)):
        prefix = f"model.layers.{layer}"
        attention(hf, prefix, linears, params, norms=False, output_bias=True)
        params[prefix + ".self_attn.sinks"] = (size(hf, "num_attention_heads"),)
    return linears, params


FAMILY = Family(
    name="gpt_oss",
    block="mlp",
    router="router.weight",
    is_moe=is_moe,
    rest=rest,
    expert=None,
    interleaved=True,
    router_bias="router.bias",
)
