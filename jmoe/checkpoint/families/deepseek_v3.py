"""DeepSeek-V3 and R1 (and models of their shape): sigmoid scores, groups, a correction bias, a shared expert, MLA."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Family, Shapes, dense_mlp, get, layer_norms, layers, outside, size


def is_moe(hf: Mapping, layer: int) -> bool:
    return layer >= get(hf, "first_k_dense_replace", default=0) and layer % size(hf, "moe_layer_freq", default=1) == 0


def rest(hf: Mapping) -> tuple[Shapes, Shapes]:
    linears, params = outside(hf)
    d, heads = size(hf, "hidden_size"), size(hf, "num_attention_heads")
    nope, rope = size(hf, "qk_nope_head_dim"), size(hf, "qk_rope_head_dim")
    value, kv_rank = size(hf, "v_head_dim"), size(hf, "kv_lora_rank")
    q_rank = get(hf, "q_lora_rank", default=None)
    bias = bool(get(hf, "attention_bias", default=False))
    for layer in range(layers(hf)):
        prefix = f"model.layers.{layer}"
        at = prefix + ".self_attn."
        if q_rank is None:
            linears[at + "q_proj"] = (heads * (nope + rope), d)
        else:
            linears |= {at + "q_a_proj": (q_rank, d), at + "q_b_proj": (heads * (nope + rope), q_rank)}
            params[at + "q_a_layernorm.weight"] = (q_rank,)
        linears[at + "kv_a_proj_with_mqa"] = (kv_rank + rope, d)
        params[at + "kv_a_layernorm.weight"] = (kv_rank,)
        linears |= {at + "kv_b_proj": (heads * (nope + value), kv_rank), at + "o_proj": (d, heads * value)}
        if bias:
            params |= {at + "kv_a_proj_with_mqa.bias": (kv_rank + rope,), at + "o_proj.bias": (d,)}
            if q_rank is not None:
                params[at + "q_a_proj.bias"] = (q_rank,)
        layer_norms(hf, prefix, params)
        if not is_moe(hf, layer):
            dense_mlp(hf, prefix, linears)
    return linears, params


FAMILY = Family(
    name="deepseek_v3",
    block="mlp",
    router="gate.weight",
    is_moe=is_moe,
    rest=rest,
    expert=("experts.{e}.gate_proj", "experts.{e}.up_proj", "experts.{e}.down_proj"),
    correction_bias="gate.e_score_correction_bias",
    shared=("shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj"),
)
