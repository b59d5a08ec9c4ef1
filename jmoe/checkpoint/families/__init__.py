"""The model families whose checkpoints are known, one file each."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import CheckpointError
from . import deepseek_v3, gpt_oss, mixtral, qwen3_moe
from .base import Family

FAMILIES: dict[str, Family] = {m.FAMILY.name: m.FAMILY for m in (qwen3_moe, mixtral, deepseek_v3, gpt_oss)}
_SAME = {"kimi_k2": "deepseek_v3"}  # model types with another family's names


def family_of(hf: Mapping, where: str) -> Family:
    """The family of a config.json; a CheckpointError lists those that are known."""
    name = hf.get("model_type")
    known = _SAME.get(name, name) if isinstance(name, str) else name
    if not isinstance(known, str) or known not in FAMILIES:
        raise CheckpointError(
            f"{where}: model_type={name!r} is not known; known are {', '.join([*FAMILIES, *_SAME])}. Save the model in "
            "one of these forms, or load its tensors with jmoe.checkpoint.SafetensorsFile."
        )
    return FAMILIES[known]


__all__ = ["FAMILIES", "Family", "family_of"]
