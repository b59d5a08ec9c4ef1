"""Static configuration of a Mixture-of-Experts layer: frozen, hashable, validated when it is made.

Letters: D hidden size, F expert intermediate size, E experts in all, K experts per token.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels.quantize.formats import FORMATS

Score = Literal["softmax", "sigmoid"]
Order = Literal["score_then_topk", "topk_then_softmax"]
Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai"]

# Names of layer-level quantisation contracts that other systems use, and the activation format each stands for here.
QUANT_ALIASES = {
    "none": None,
    "bf16": None,
    "bfloat16": None,
    "nvfp4_online": "nvfp4_token",  # per token, dynamic row scale
    "modelopt_fp4": "nvfp4",  # per tensor, static scale
    "fp8": "fp8_128",
    "fp8_block": "fp8_128",
}


def _choice(what: str, value, allowed) -> None:
    if value not in allowed:
        raise ValueError(f"{what}={value!r} is not known; choose one of {', '.join(map(repr, allowed))}.")


def _positive(what: str, value) -> None:
    if not _is_integer(value) or value <= 0:
        raise ValueError(f"{what} must be a positive integer, got {value!r}.")


def _is_integer(value) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How router logits become expert ids and weights.

    score: what turns logits into scores. order: "score_then_topk" scores all E experts and selects K of them;
    "topk_then_softmax" selects K logits and takes the softmax over those (gpt-oss). normalize divides the K weights by
    their sum. scaling multiplies the weights after that. num_groups/group_topk: the experts form `num_groups` equal
    groups, of which the `group_topk` best are eligible (DeepSeek "noaux_tc"); a group's score is the sum of its two
    best experts ("top2sum") or its best one ("max"). use_bias: the router's linear map has a bias.
    use_correction_bias: a bias that is added to the scores for the selection only, never to the weights.
    """

    score: Score = "softmax"
    order: Order = "score_then_topk"
    normalize: bool = True
    scaling: float = 1.0
    num_groups: int | None = None
    group_topk: int | None = None
    group_score: Literal["top2sum", "max"] = "top2sum"
    use_bias: bool = False
    use_correction_bias: bool = False

    def __post_init__(self):
        _choice("score", self.score, ("softmax", "sigmoid"))
        _choice("order", self.order, ("score_then_topk", "topk_then_softmax"))
        _choice("group_score", self.group_score, ("top2sum", "max"))
        if (self.num_groups is None) != (self.group_topk is None):
            raise ValueError(
                f"num_groups={self.num_groups} and group_topk={self.group_topk}: give both for group-limited "
                "selection, or neither."
            )
        if self.num_groups is not None:
            _positive("num_groups", self.num_groups)
            _positive("group_topk", self.group_topk)
            if (self.group_topk or 0) > self.num_groups:
                raise ValueError(f"group_topk={self.group_topk} exceeds num_groups={self.num_groups}.")
        if self.order == "topk_then_softmax" and (self.score != "softmax" or self.num_groups is not None):
            raise ValueError(
                'order="topk_then_softmax" selects raw logits: it goes with score="softmax" and without groups; '
                'use order="score_then_topk" for sigmoid scores or group-limited selection.'
            )
        if not _is_number(self.scaling):
            raise ValueError(f"scaling={self.scaling!r} must be a finite number; 1.0 leaves the weights as they are.")


@dataclasses.dataclass(frozen=True)
class QuantConfig:
    """What is quantised in a layer. Every field is the name of a format in `jmoe.formats`, or None for unquantised.

    activations: the layer's quant dtype, in which the first matmul of the experts takes its input; also what a
        quantising backend sends. weights: the format the expert weights are kept in. intermediate: the format of
        silu(gate)*up, the input of the down projection; without a static scale (`ExpertWeights.intermediate_scale`)
        "nvfp4" takes that of the rows at hand, and numbers depend on how many ranks and chunks there are, which with
        "nvfp4_token" they do not. wire: "auto" lets `jmoe.policy` decide what travels, without a loss that nobody asked
        for; "fastest" lets unquantised activations travel as MXFP8 where that should be faster, by measurements, for
        the tokens and the machine at hand; "bfloat16" or a format's name overrides it.
        combine_wire: None sends expert outputs back in the layer's dtype; "mxfp8" quantises each rank's sums: 8192 rows
        of 7168 come back in 243 instead of 346 us on two H200s by the kernels, and in twice the time through XLA.
    mx_alignment: pads the hidden size of MX payloads to a multiple of this (256 for TRT-LLM style consumers; 0: none).
    """

    activations: str | None = None
    weights: str | None = None
    intermediate: str | None = None
    wire: str = "auto"
    combine_wire: str | None = None
    mx_alignment: int = 0

    def __post_init__(self):
        for field in ("activations", "weights", "intermediate", "combine_wire"):
            value = getattr(self, field)
            if not isinstance(value, str | None):
                raise ValueError(f"{field}={value!r} must be the name of a format, or None for unquantised.")
            if value in QUANT_ALIASES:
                object.__setattr__(self, field, QUANT_ALIASES[value])
        if not isinstance(self.wire, str):
            raise ValueError(f"wire={self.wire!r} must be 'auto', 'fastest' or the name of what travels.")
        if self.weights is not None:
            _choice("weights", self.weights, tuple(FORMATS))
        if self.intermediate is not None:
            _choice("intermediate", self.intermediate, tuple(f.name for f in FORMATS.values() if f.block_rows == 1))
        if self.combine_wire not in (None, "mxfp8"):
            raise ValueError(
                f"combine_wire={self.combine_wire!r}: expert outputs travel back in the layer's dtype (None) or as "
                "'mxfp8'; other formats lose too much in the partial sums."
            )
        if not _is_integer(self.mx_alignment) or self.mx_alignment < 0 or self.mx_alignment % 32:
            raise ValueError(f"mx_alignment={self.mx_alignment!r} must be 0 or a multiple of 32.")


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """One MoE layer.

    hidden_size D, intermediate_size F (of one expert), num_experts E, num_experts_per_tok K.
    activation: of the gate ("silu", "gelu" (erf), "gelu_tanh") or "swiglu_oai", gpt-oss's clamped SwiGLU:
        clip(g, max=limit) * sigmoid(alpha * g) * (clip(u, -limit, limit) + 1).
    use_bias: experts have biases. shared_intermediate_size: width of the always-on shared expert, 0 for none.
    shared_gate: the shared expert's output is multiplied by sigmoid(x @ gate) (Qwen2-MoE).
    hidden_size_unpadded: columns of the output where D is padded (None: D).
    quant: a QuantConfig, "auto" for QuantConfig(wire="fastest"), or None for QuantConfig().
    capacity_factor: None is dropless; otherwise each (source, destination) rank pair has room for
        ceil(capacity_factor * T * min(K, R) / R) rows (at most T) and the rows beyond are counted as dropped.
    dtype: computation and wire dtype of unquantised data ("bfloat16", "float16" or "float32").
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    router: RouterConfig = RouterConfig()
    quant: QuantConfig = QuantConfig()
    activation: Activation = "silu"
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    use_bias: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    hidden_size_unpadded: int | None = None
    capacity_factor: float | None = None
    apply_router_weight_on_input: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self):
        if self.quant is None or self.quant == "auto":
            object.__setattr__(self, "quant", QuantConfig(wire="auto" if self.quant is None else "fastest"))
        if not isinstance(self.quant, QuantConfig):
            raise ValueError(
                f"quant={self.quant!r} is not a QuantConfig; give QuantConfig(activations=FORMAT, weights=FORMAT), "
                "'auto' for a wire that is quantised where that is faster, or None."
            )
        if not isinstance(self.router, RouterConfig):
            raise ValueError(f"router={self.router!r} is not a RouterConfig; RouterConfig() is softmax and top-k.")
        for field in ("hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok"):
            _positive(field, getattr(self, field))
        if not _is_integer(self.shared_intermediate_size) or self.shared_intermediate_size < 0:
            raise ValueError(
                f"shared_intermediate_size={self.shared_intermediate_size!r} must be a positive integer, or 0 for no "
                "shared expert."
            )
        if self.shared_gate and not self.shared_intermediate_size:
            raise ValueError("shared_gate=True without a shared expert; give it a width with shared_intermediate_size.")
        for field, sizes in (
            ("weights", (self.hidden_size, self.intermediate_size)),
            ("intermediate", (self.intermediate_size,)),
        ):
            name = getattr(self.quant, field)
            if name is not None and FORMATS[name].bits == 4 and any(size % 2 for size in sizes):
                raise ValueError(
                    f"QuantConfig.{field}={name!r} keeps two values in a byte, and one of hidden_size="
                    f"{self.hidden_size} and intermediate_size={self.intermediate_size} is odd. Use a format of 8 bits "
                    "('mxfp8'), or pad the size."
                )
        _choice("activation", self.activation, ("silu", "gelu", "gelu_tanh", "swiglu_oai"))
        _choice("dtype", self.dtype, ("bfloat16", "float16", "float32"))
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"num_experts_per_tok={self.num_experts_per_tok} exceeds num_experts={self.num_experts}.")
        groups = self.router.num_groups
        if groups is not None:
            if self.num_experts % groups:
                raise ValueError(
                    f"num_experts={self.num_experts} does not divide into router.num_groups={groups} equal groups."
                )
            eligible = (self.router.group_topk or 0) * (self.num_experts // groups)
            if eligible < self.num_experts_per_tok:
                raise ValueError(
                    f"group_topk={self.router.group_topk} groups hold {eligible} experts, fewer than "
                    f"num_experts_per_tok={self.num_experts_per_tok}."
                )
        if self.capacity_factor is not None and not (_is_number(self.capacity_factor) and self.capacity_factor > 0):
            raise ValueError(f"capacity_factor={self.capacity_factor!r} must be positive, or None for dropless.")
        if self.apply_router_weight_on_input and self.num_experts_per_tok != 1:
            raise ValueError(
                "apply_router_weight_on_input=True is only defined for num_experts_per_tok=1, got "
                f"{self.num_experts_per_tok}; apply the weights on the output instead."
            )
        unpadded = self.hidden_size_unpadded
        if unpadded is not None and not (_is_integer(unpadded) and 0 < unpadded <= self.hidden_size):
            raise ValueError(f"hidden_size_unpadded={unpadded!r} must lie in 1..hidden_size={self.hidden_size}.")

    @property
    def jnp_dtype(self):
        """`dtype` as a numpy dtype."""
        return jnp.dtype(self.dtype)

    @property
    def output_size(self) -> int:
        """Columns of the output: hidden_size_unpadded where it is given, else D."""
        return self.hidden_size_unpadded or self.hidden_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], **overrides: Any) -> MoEConfig:
        """The layer described by a Hugging Face `config.json` (as a dict); see `from_hf`."""
        return from_hf(config, **overrides)


_HF_FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss")
_HF_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def from_hf(config: Mapping[str, Any], **overrides: Any) -> MoEConfig:
    """Read a Hugging Face model configuration (the dict of `config.json`) into a MoEConfig.

    Knows qwen3_moe, qwen2_moe, mixtral, deepseek_v2, deepseek_v3 and gpt_oss. `overrides` are MoEConfig fields.
    Raises ValueError for another family, and for a missing or unsupported entry.
    """
    if not isinstance(config, Mapping):
        raise ValueError(
            f"config is a {type(config).__name__}; from_hf takes the dict of a config.json: json.load it, or pass "
            "`Checkpoint(folder).config`."
        )
    try:
        fields = _fields(config)
    except (TypeError, OverflowError) as e:
        raise ValueError(f"config.json holds an entry of the wrong type ({e}); give the model's own.") from e
    return MoEConfig(**(fields | overrides))


def _fields(config: Mapping) -> dict:
    family = config.get("model_type")
    if family not in _HF_FAMILIES:
        raise ValueError(
            f"model_type={family!r} is not a family that from_hf knows ({', '.join(_HF_FAMILIES)}); "
            "make a MoEConfig by hand for it."
        )

    def get(*names, default=dataclasses.MISSING):
        for name in names:
            if config.get(name) is not None:
                return config[name]
        if default is dataclasses.MISSING:
            raise ValueError(f"config.json of family {family!r} lacks {' / '.join(map(repr, names))}.")
        return default

    act = get("hidden_act", default="silu")
    if act not in _HF_ACTIVATIONS:
        raise ValueError(f"hidden_act={act!r} is not supported; supported: {', '.join(_HF_ACTIVATIONS)}.")
    fields: dict = dict(
        hidden_size=get("hidden_size"),
        num_experts=get("n_routed_experts", "num_experts", "num_local_experts"),
        num_experts_per_tok=get("num_experts_per_tok"),
        activation=_HF_ACTIVATIONS[act],
    )
    dtype = get("dtype", "torch_dtype", default="bfloat16")
    fields["dtype"] = dtype if dtype in ("bfloat16", "float16", "float32") else "bfloat16"
    if family in ("qwen3_moe", "qwen2_moe"):
        fields["intermediate_size"] = get("moe_intermediate_size")
        fields["router"] = RouterConfig(normalize=bool(get("norm_topk_prob", default=False)))
        if family == "qwen2_moe":
            fields |= dict(shared_intermediate_size=get("shared_expert_intermediate_size"), shared_gate=True)
    elif family == "mixtral":
        fields["intermediate_size"] = get("intermediate_size")
        fields["router"] = RouterConfig(normalize=True)
    elif family in ("deepseek_v2", "deepseek_v3"):
        width = get("moe_intermediate_size")
        sigmoid = get("scoring_func", default="sigmoid" if family == "deepseek_v3" else "softmax") == "sigmoid"
        groups = get("n_group", default=1)
        if family == "deepseek_v2":
            groups = groups if get("topk_method", default="greedy") == "group_limited_greedy" else 1
        fields["intermediate_size"] = width
        fields["shared_intermediate_size"] = width * get("n_shared_experts", default=0)
        fields["router"] = RouterConfig(
            score="sigmoid" if sigmoid else "softmax",
            normalize=bool(get("norm_topk_prob", default=True)),
            scaling=float(get("routed_scaling_factor", default=1.0)),
            num_groups=groups if groups > 1 else None,
            group_topk=get("topk_group") if groups > 1 else None,
            group_score="top2sum" if family == "deepseek_v3" else "max",
            use_correction_bias=family == "deepseek_v3",
        )
    else:  # gpt_oss
        fields |= dict(
            intermediate_size=get("intermediate_size"),
            activation="swiglu_oai",
            swiglu_alpha=float(get("swiglu_alpha", default=1.702)),
            swiglu_limit=float(get("swiglu_limit", default=7.0)),
            use_bias=True,
            router=RouterConfig(order="topk_then_softmax", use_bias=True),
        )
    return fields
