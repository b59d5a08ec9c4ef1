"""gpt-oss: top-k then softmax, biases everywhere, clamped SwiGLU; fused stacks whose rows alternate gate and up."""

from __future__ import annotations

from collections.abc import Mapping

from jmoe.config import MoEConfig, RouterConfig

from .base import Family, Shapes, attention, compute_dtype, get, layers, outside, size


def moe_config(hf: Mapping) -> MoEConfig:
    return MoEConfig(
        hidden_size=size(hf, "hidden_size"),
        intermediate_size=size(hf, "intermediate_size"),
        num_experts=size(hf, "num_local_experts", "num_experts"),
        num_experts_per_tok=size(hf, "num_experts_per_tok", "experts_per_token"),
        router=RouterConfig(order="topk_then_softmax", use_bias=True),
        activation="swiglu_oai",
        swiglu_alpha=float(get(hf, "swiglu_alpha", default=1.702)),
        swiglu_limit=float(get(hf, "swiglu_limit", default=7.0)),
        use_bias=True,
        dtype=compute_dtype(hf),
    )


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
    moe_config=moe_config,
    is_moe=is_moe,
    rest=rest,
    expert=None,
    interleaved=True,
    router_bias="router.bias",
)
