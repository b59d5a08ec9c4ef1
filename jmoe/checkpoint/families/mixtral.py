"""Mixtral: softmax over all experts, the chosen two renormalised; w1 is gate, w3 up, w2 down."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Family, Shapes, attention, layers, outside


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
    is_moe=is_moe,
    rest=rest,
    expert=("experts.{e}.w1", "experts.{e}.w3", "experts.{e}.w2"),
)
