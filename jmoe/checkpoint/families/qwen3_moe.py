"""Qwen3-MoE: softmax router, optional renormalisation; per-expert tensors, or fused ones in resaved checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Family, Shapes, attention, dense_mlp, get, layers, outside, size


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
    is_moe=is_moe,
    rest=rest,
    expert=("experts.{e}.gate_proj", "experts.{e}.up_proj", "experts.{e}.down_proj"),
)
