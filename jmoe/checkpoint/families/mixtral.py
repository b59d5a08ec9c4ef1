"""Mixtral: softmax over all experts, the chosen two renormalised; w1 is gate, w3 up, w2 down."""

from __future__ import annotations

from collections.abc import Mapping

from jmoe.config import MoEConfig, RouterConfig

from .base import Family, Shapes, activation, attention, compute_dtype, layers, outside, size


def moe_config(hf: Mapping) -> MoEConfig:
    return MoEConfig(
        hidden_size=size(hf, "hidden_size"),
        intermediate_size=size(hf, "intermediate_size"),
        num_experts=size(hf, "num_local_experts"),
        num_experts_per_tok=size(hf, "num_experts_per_tok"),
        router=RouterConfig(normalize=True),
        activation=activation(hf),
        dtype=compute_dtype(hf),
    )


def is_moe(hf: Mapping, layer: int) -> bool:
    return True


def rest(hf: Mapping) -> tuple[Shapes, Shapes]:
    linears, params = outside(hf)
    for layer in range(layers(hf)):
        attention(hf, f"model.layers.{layer}", linears, params, norms=False, output_bias=False)
    return linears, params


FAMILY = Family(
    name="mixtral",
    block="block_sparse_moe",
    router="gate.weight",
    moe_config=moe_config,
    is_moe=is_moe,
    rest=rest,
    expert=("experts.{e}.w1", "experts.{e}.w3", "experts.{e}.w2"),
)
