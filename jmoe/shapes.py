"""Layers of real models by name, for `jmoe explain`, benchmarks and tests. Sizes are those of their config.json."""

from __future__ import annotations

from .config import MoEConfig, RouterConfig

_DEEPSEEK = RouterConfig(score="sigmoid", scaling=2.5, num_groups=8, group_topk=4, use_correction_bias=True)
_GPT_OSS = RouterConfig(order="topk_then_softmax", use_bias=True)


def _gpt_oss(num_experts: int) -> MoEConfig:
    return MoEConfig(2880, 2880, num_experts, 4, router=_GPT_OSS, activation="swiglu_oai", use_bias=True)


SHAPES: dict[str, MoEConfig] = {
    "qwen3-30b-a3b": MoEConfig(2048, 768, 128, 8),
    "qwen3-235b-a22b": MoEConfig(4096, 1536, 128, 8),
    "mixtral-8x7b": MoEConfig(4096, 14336, 8, 2),
    "deepseek-v3": MoEConfig(7168, 2048, 256, 8, router=_DEEPSEEK, shared_intermediate_size=2048),
    # A quarter of the experts, with the same work for each token: what fits on one GPU in BF16 with room to spare.
    "deepseek-v3-64": MoEConfig(7168, 2048, 64, 8, router=_DEEPSEEK, shared_intermediate_size=2048),
    "deepseek-v2-lite": MoEConfig(
        2048, 1408, 64, 6, router=RouterConfig(normalize=False), shared_intermediate_size=2816
    ),
    "kimi-k2": MoEConfig(
        7168,
        2048,
        384,
        8,
        router=RouterConfig(score="sigmoid", scaling=2.827, use_correction_bias=True),
        shared_intermediate_size=2048,
    ),
    "gpt-oss-120b": _gpt_oss(128),
    "gpt-oss-20b": _gpt_oss(32),
    "tiny": MoEConfig(128, 96, 16, 4),
}


def get_shape(name: str) -> MoEConfig:
    """The layer called `name`; ValueError lists the names that exist."""
    if name not in SHAPES:
        raise ValueError(f"There is no shape {name!r}; choose one of {', '.join(SHAPES)}.")
    return SHAPES[name]
