"""What a model family's file says: configuration, tensor names of the MoE block, names and shapes of the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jmoe.config import MoEConfig, from_hf

from ..errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family. Names are relative to `model.layers.N.<block>.`.

    is_moe(hf, layer): whether that decoder layer has a MoE block. rest(hf): (linear modules of everything but the MoE
    blocks with their [out, in] shapes, parameters that are not linear modules with their shapes). expert: names of
    gate, up and down of one expert, "{e}" for its number. interleaved: the fused stacks hold gate and up in alternating
    rows, and unquantised ones are transposed ([E, D, 2F], [E, F, D]), as gpt-oss does. shared: gate, up, down of the
    shared expert. tolerated: regular expressions of names that may be there and are not read.
    """

    name: str
    block: str
    router: str
    is_moe: Callable[[Mapping, int], bool]
    rest: Callable[[Mapping], tuple[Shapes, Shapes]]
    expert: tuple[str, str, str] | None
    fused: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    interleaved: bool = False
    router_bias: str | None = None
    correction_bias: str | None = None
    shared: tuple[str, str, str] | None = None
    tolerated: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq", r".*\.[qkv]_scale", r".*\.(k|v)_proj\.(k|v)_scale")

    def moe_config(self, hf: Mapping) -> MoEConfig:
        """The layer's configuration."""
        return from_hf({**hf, "model_type": self.name})

    def prefix(self, layer: int) -> str:
        return f"model.layers.{layer}.{self.block}"


_MISSING = object()


def get(hf: Mapping, *names: str, default: Any = _MISSING) -> Any:
    """The first of `names` that config.json has (and that is not null), checked to be a number, string or list."""
    for name in names:
        if hf.get(name) is not None:
            return hf[name]
    if default is not _MISSING:
        return default
    raise CheckpointError(f"config.json: {' or '.join(map(repr, names))} is missing; it is needed to size the model.")


def size(hf: Mapping, *names: str, default: Any = _MISSING) -> int:
    """As `get`, for a positive integer."""
    value = get(hf, *names, default=default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise CheckpointError(f"config.json: {names[0]!r} must be a positive integer, got {value!r}.")
    return value


def layers(hf: Mapping) -> int:
    """The number of decoder layers."""
    value = size(hf, "num_hidden_layers")
    if value > 10_000:
        raise CheckpointError(f"config.json: num_hidden_layers={value} is more than a model has (10000).")
    return value


def outside(hf: Mapping) -> tuple[Shapes, Shapes]:
    """Embedding, final norm and output head, which all families share."""
    d, vocab = size(hf, "hidden_size"), size(hf, "vocab_size")
    linears = {} if get(hf, "tie_word_embeddings", default=False) else {"lm_head": (vocab, d)}
    return linears, {"model.embed_tokens.weight": (vocab, d), "model.norm.weight": (d,)}


def attention(hf: Mapping, prefix: str, linears: Shapes, params: Shapes, *, norms: bool, output_bias: bool) -> None:
    """Adds a grouped-query attention block with its two layer norms. norms: per-head RMS norms of queries and keys."""
    d = size(hf, "hidden_size")
    heads = size(hf, "num_attention_heads")
    width = size(hf, "head_dim", default=d // heads)
    kv = size(hf, "num_key_value_heads", default=heads) * width
    at = prefix + ".self_attn."
    linears |= {at + "q_proj": (heads * width, d), at + "k_proj": (kv, d), at + "v_proj": (kv, d)}
    linears[at + "o_proj"] = (d, heads * width)
    if get(hf, "attention_bias", default=False):
        params |= {at + "q_proj.bias": (heads * width,), at + "k_proj.bias": (kv,), at + "v_proj.bias": (kv,)}
        if output_bias:
            params[at + "o_proj.bias"] = (d,)
    if norms:
        params |= {at + "q_norm.weight": (width,), at + "k_norm.weight": (width,)}
    layer_norms(hf, prefix, params)


def layer_norms(hf: Mapping, prefix: str, params: Shapes) -> None:
    d = size(hf, "hidden_size")
    params |= {prefix + ".input_layernorm.weight": (d,), prefix + ".post_attention_layernorm.weight": (d,)}


def dense_mlp(hf: Mapping, prefix: str, linears: Shapes) -> None:
    """Adds the gated MLP of a layer that has no experts."""
    d, f = size(hf, "hidden_size"), size(hf, "intermediate_size")
    linears |= {prefix + ".mlp.gate_proj": (f, d), prefix + ".mlp.up_proj": (f, d), prefix + ".mlp.down_proj": (d, f)}
