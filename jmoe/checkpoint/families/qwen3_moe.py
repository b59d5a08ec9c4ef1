"""Qwen3-MoE: softmax router, optional renormalisation; per-expert tensors, or fused ones in resaved checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from jmoe.config import MoEConfig, RouterConfig

from .base import Family, Shapes, activation, attention, compute_dtype, dense_mlp, get, layers, outside, size


def moe_config(hf: Mapping) -> MoEConfig:
    return MoEConfig(
        hidden_size=size(hf, "hidden_size"),
        intermediate_size=size(hf, "moe_intermediate_size"),
        num_experts=size(hf, "num_experts", "num_local_experts"),
        num_experts_per_tok=size(hf, "num_experts_per_tok"),
        router=RouterConfig(normalize=bool(get(hf, "norm_topk_prob", default=False))),
        activation=activation(hf),
        dtype=compute_dtype(hf),
    )


def is_moe(hf: Mapping, layer: int) -> bool:
    step = size(hf, "decoder_sparse_step", default=1)
    return layer not in get(hf, "mlp_only_layers", default=[]) and (layer + 1) % step == 0


def rest(hf: Mapping) -> tuple[Shapes, Shapes]:
    linears, params = outside(hf)
    for layer in range(layers(hf)):
        prefix = f"model.layers.{layer}"
        attention(hf, prefix, linears, params, norms=True, output_bias=True)
        if not is_moe(hf, layer):
            dense_mlp(hf, prefix, linears)
    return linears, params


FAMILY = Family(
    name="qwen3_moe",
    block="mlp",
    router="gate.weight",
    moe_config=moe_config,
    is_moe=is_moe,
    rest=rest,
    expert=("experts.{e}.gate_proj", "experts.{e}.up_proj", "experts.{e}.down_proj"),
)
