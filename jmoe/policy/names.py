"""What the names of quantisation schemes stand for, and which contracts they make.

Two NVFP4 contracts exist and are not interchangeable. Per token: every row has its own dynamic float32 scale. Per
tensor: one static float32 scale, fixed when the layer is loaded, the same on all ranks. With rows of standard
deviation 1e-3 and 1e3, per-token keeps both to a relative error of 0.09; per-tensor loses the small row entirely.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from ..config import QUANT_ALIASES
from .table import ACTIVATION_FORMATS, family


def activation_format(name: str | None) -> str | None:
    """The activation format that `name` stands for, None for unquantised. Unknown names come back as they are."""
    return QUANT_ALIASES.get(name, name) if name is not None else None


@dataclasses.dataclass(frozen=True)
class Contract:
    """What a checkpoint's scheme asks of the activations.

    format: of the activations. scale: "token" (dynamic, in the QTensor), "static" (one number, from the checkpoint) or
    "none". missing_scale: the value of a static scale that the checkpoint does not have. convert_weights: the weights
    are quantised at load.
    """

    format: str
    scale: Literal["token", "static", "none"]
    missing_scale: float | None
    convert_weights: bool


def resolve_contract(
    name: str, *, serialized: bool = False, per_token: bool = False, per_token_opt_in: bool = False
) -> Contract:
    """The contract of a scheme.

    serialized: the checkpoint's weights are in the format already. per_token: the caller wants per-token activation
    scales. per_token_opt_in: the user has explicitly allowed those for a serialized ModelOpt checkpoint, whose scales
    were calibrated per tensor. Raises ValueError for combinations that do not exist, and names the one that does.
    """
    if name == "nvfp4_online":
        if serialized:
            raise ValueError(
                "'nvfp4_online' was asked for a checkpoint that is NVFP4 already; it converts BF16, FP16 or FP8 "
                "weights "
                "when they are loaded. Use 'modelopt_fp4' for a serialized checkpoint."
            )
        return Contract("nvfp4_token", "token", None, True)
    if name == "modelopt_fp4":
        if per_token and not serialized:
            raise ValueError(
                "'modelopt_fp4' was asked for per-token activation scales on weights that are converted at load; its "
                "scales are static, one for each tensor. Use 'nvfp4_online' for per-token scales."
            )
        if per_token and per_token_opt_in:
            return Contract("nvfp4_token", "token", None, False)
        if per_token:
            raise ValueError(
                "'modelopt_fp4' was asked for per-token activation scales on a serialized checkpoint, whose scales "
                "were "
                "calibrated per tensor. Leave per_token off, or allow it with per_token_opt_in=True; 'nvfp4_online' is "
                "the per-token scheme for unquantised checkpoints."
            )
        return Contract("nvfp4", "static", 1.0, not serialized)
    fmt = activation_format(name)
    if fmt is None or fmt not in ACTIVATION_FORMATS:
        known = ("nvfp4_online", "modelopt_fp4", *ACTIVATION_FORMATS)
        raise ValueError(
            f"Quantisation scheme {name!r} makes no contract about activations; choose one of {', '.join(known)}."
        )
    kind = family(fmt)
    scale = "token" if kind == "nvfp4_token" else "static" if kind == "nvfp4" else "none"
    return Contract(fmt, scale, 1.0 if scale == "static" else None, not serialized)


def draft_scheme(
    *, per_token: bool, source_ignored: bool, fp4_ignored: bool, checkpoint_fp8: bool
) -> Literal["nvfp4", "fp8", "unquantised"]:
    """The scheme of the MoE layers of an embedded draft head (MTP, EAGLE); its linear layers follow their ignore list.

    per_token: the target uses per-token NVFP4. source_ignored: the layer is on the ignore list of the source
    checkpoint. fp4_ignored: it is on the explicit ignore list of the NVFP4 conversion. checkpoint_fp8: the source is
    FP8.
    """
    if not fp4_ignored and (per_token or not source_ignored):
        return "nvfp4"
    if source_ignored:
        return "unquantised"
    return "fp8" if checkpoint_fp8 else "unquantised"
