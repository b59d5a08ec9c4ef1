"""The quantised forms that expert weights are stored in: their tensor names, and how a folder's form is found.

A scheme is found twice, from the configuration and from the tensors, and the two must agree. Formulas (W is [out, in],
blocks run along `in`): ModelOpt multiplies (e2m1 * weight_scale * weight_scale_2), compressed-tensors divides by its
global scale, DeepSeek's weight_scale_inv multiplies despite its name, MX scales are 2^(byte - 127).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Mapping
from typing import NoReturn

from .errors import CheckpointError
from .safetensors import TensorInfo


@dataclasses.dataclass(frozen=True)
class Kind:
    """Names and types of one scheme: `module.<suffix>` of a linear module, `name<fused suffix>` of a fused stack.

    format: name in `jmoe.formats`. data/scale/global_scale/input_scale: suffixes, the first alternative is written.
    divisor: the global scales are reciprocals. data_types/scale_types: header dtypes that are accepted.
    """

    name: str
    format: str
    data: str
    scale: tuple[str, ...]
    fused_data: str
    fused_scale: tuple[str, ...]
    data_types: tuple[str, ...]
    scale_types: tuple[str, ...]
    global_scale: str | None = None
    fused_global: str | None = None
    input_scale: str | None = None
    fused_input: str | None = None
    divisor: bool = False
    block: int = 16
    block_rows: int = 1

    @property
    def packed(self) -> bool:
        return self.format.startswith(("nvfp4", "mxfp4"))


_E8M0 = ("U8", "F8_E8M0")
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            name="nvfp4_modelopt",
            format="nvfp4",
            data="weight",
            scale=("weight_scale",),
            fused_data="",
            fused_scale=("_weight_scale",),
            data_types=("U8", "F4"),
            scale_types=("F8_E4M3",),
            global_scale="weight_scale_2",
            fused_global="_weight_scale_2",
            input_scale="input_scale",
            fused_input="_input_scale",
        ),
        Kind(
            name="nvfp4_ct",
            format="nvfp4",
            data="weight_packed",
            scale=("weight_scale",),
            fused_data="_packed",
            fused_scale=("_scale",),
            data_types=("U8", "F4"),
            scale_types=("F8_E4M3",),
            global_scale="weight_global_scale",
            fused_global="_global_scale",
            input_scale="input_global_scale",
            fused_input="_input_global_scale",
            divisor=True,
        ),
        Kind(
            name="mxfp8",
            format="mxfp8",
            data="weight",
            scale=("weight_scale", "weight_scale_inv"),
            fused_data="",
            fused_scale=("_weight_scale", "_scale_inv"),
            data_types=("F8_E4M3",),
            scale_types=_E8M0,
            block=32,
        ),
        Kind(
            name="fp8_block",
            format="fp8_128x128",
            data="weight",
            scale=("weight_scale_inv", "weight_scale", "scale"),
            fused_data="",
            fused_scale=("_scale_inv", "_weight_scale_inv"),
            data_types=("F8_E4M3",),
            scale_types=("F32", "BF16", *_E8M0),
            block=128,
            block_rows=128,
        ),
        Kind(
            name="mxfp4",
            format="mxfp4",
            data="weight_blocks",
            scale=("weight_scales",),
            fused_data="_blocks",
            fused_scale=("_scales",),
            data_types=("U8",),
            scale_types=_E8M0,
            block=32,
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a folder's linear modules are stored. kind: None if nothing is quantised. ignore: patterns of exceptions.

    A pattern is a module's name, a prefix of it, one of its parts, a shell pattern, or "re:" and a regular expression.
    pow2: the FP8 block scales are powers of two (scale_fmt "ue8m0").
    """

    kind: Kind | None = None
    ignore: tuple[str, ...] = ()
    pow2: bool = False

    @property
    def name(self) -> str:
        """Name of the scheme, a key of `KINDS` or "unquantised"."""
        return self.kind.name if self.kind else "unquantised"

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(p for p in self.ignore if not p.startswith("re:"))

    @functools.cached_property
    def _patterns(self) -> tuple[re.Pattern, ...]:
        out = []
        for pattern in self.ignore:
            if pattern.startswith("re:"):
                try:
                    out.append(re.compile(pattern[3:]))
                except re.error as e:
                    raise CheckpointError(f"The ignore pattern {pattern!r} is not a regular expression ({e}).") from e
            elif any(c in pattern for c in "*?["):
                out.append(re.compile(fnmatch.translate(pattern)))
        return tuple(out)

    def ignores(self, module: str) -> bool:
        """Whether `module` is on the ignore list, with or without a leading "model."."""
        if not self.ignore:
            return False
        other = module.removeprefix("model.") if module.startswith("model.") else "model." + module
        return self._covers(module) or self._covers(other)

    def _covers(self, name: str) -> bool:
        parts = name.split(".")
        if not self._names.isdisjoint(parts) or any(".".join(parts[: i + 1]) in self._names for i in range(len(parts))):
            return True
        return any(p.match(name) for p in self._patterns)


def _strings(where: str, value) -> tuple[str, ...]:
    value = value if value is not None else []
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise CheckpointError(f"{where}: the list of modules that are not quantised must hold strings, got {value!r}.")
    return tuple(value)


_HOW = (
    "supported are ModelOpt NVFP4 and MXFP8, compressed-tensors nvfp4-pack-quantized and mxfp8-quantized, fp8 with "
    "weight_block_size [128, 128], and mxfp4; convert the checkpoint, or pass scheme=... if the configuration is wrong."
)


def _refuse(where: str, what: str) -> NoReturn:
    raise CheckpointError(f"{where}: {what} is not supported; {_HOW}")


def _modelopt(where: str, q: Mapping) -> Scheme:
    algo, group = q.get("quant_algo"), q.get("group_size")
    names = {"NVFP4": "nvfp4_modelopt", "MXFP8": "mxfp8"}
    if not isinstance(algo, str) or algo not in names:
        _refuse(where, f"quant_algo={algo!r}")
    kind = KINDS[names[algo]]
    if group not in (None, kind.block):
        _refuse(where, f"group_size={group!r} for {algo}, whose blocks are {kind.block}")
    ignore = q.get("ignore", q.get("exclude_modules"))
    return Scheme(kind, _strings(where, ignore))


def scheme_from_config(config: Mapping, hf_quant: Mapping | None, folder: str) -> Scheme:
    """The scheme that config.json's quantization_config (and hf_quant_config.json, if there is one) declare."""
    where = f"{folder}/config.json: quantization_config"
    q = config.get("quantization_config", config.get("compression_config"))
    declared = None
    if q is not None:
        if not isinstance(q, Mapping):
            raise CheckpointError(f"{where} must be an object, got {type(q).__name__}.")
        method = q.get("quant_method")
        if method in ("modelopt", "modelopt_fp4", "modelopt_mxfp8"):
            declared = _modelopt(where, q)
        elif method == "compressed-tensors":
            formats = {"nvfp4-pack-quantized": "nvfp4_ct", "mxfp8-quantized": "mxfp8"}
            name = q.get("format")
            if not isinstance(name, str) or name not in formats:
                _refuse(where, f"format={name!r}")
            declared = Scheme(KINDS[formats[name]], _strings(where, q.get("ignore")))
        elif method == "fp8":
            if q.get("weight_block_size") != [128, 128]:
                _refuse(where, f"quant_method='fp8' with weight_block_size={q.get('weight_block_size')!r}")
            ignore = _strings(where, q.get("modules_to_not_convert", q.get("ignored_layers")))
            declared = Scheme(KINDS["fp8_block"], ignore, pow2=q.get("scale_fmt") == "ue8m0")
        elif method == "mxfp4":
            declared = Scheme(KINDS["mxfp4"], _strings(where, q.get("modules_to_not_convert")))
        else:
            _refuse(where, f"quant_method={method!r}")
    if hf_quant is not None:
        where = f"{folder}/hf_quant_config.json"
        q = hf_quant.get("quantization")
        if not isinstance(q, Mapping):
            raise CheckpointError(f"{where}: 'quantization' must be an object.")
        other = _modelopt(where, q)
        if declared is not None and declared.kind is not other.kind:
            raise CheckpointError(
                f"{folder}: config.json declares {declared.name} and hf_quant_config.json declares {other.name}; "
                "remove the wrong one, or pass scheme=... with the right name."
            )
        declared = declared if declared is not None else other
    return declared or Scheme()


def kind_from_tensors(tensors: Mapping[str, TensorInfo], folder: str) -> tuple[Kind | None, str]:
    """(the scheme that names and types say, the key that says so)."""
    for key, info in tensors.items():
        if info.dtype == "I32" and key.endswith("_packed"):
            raise CheckpointError(f"{info.where()}: packed integers (INT4) are not supported; {_HOW}")
    for key in tensors:
        if key.endswith(("_scales", "_blocks")):
            return KINDS["mxfp4"], key
        if key.endswith(("weight_scale_2", "_weight_scale_2")):
            return KINDS["nvfp4_modelopt"], key
        if key.endswith(("weight_packed", "weight_global_scale", "_proj_packed")):
            return KINDS["nvfp4_ct"], key
    for key, info in tensors.items():
        if info.dtype == "F8_E4M3" and not key.endswith("_scale"):
            kind = _fp8_kind(tensors, key, info)
            if kind is not None:
                return kind, key
    return None, ""


def _fp8_kind(tensors: Mapping[str, TensorInfo], key: str, info: TensorInfo) -> Kind | None:
    """MXFP8 or 128x128, by the type and shape of the scale that belongs to an E4M3 weight."""
    stem = key.removesuffix(".weight")
    candidates = [f"{stem}.{s}" for s in ("weight_scale", "weight_scale_inv", "scale")]
    candidates += [f"{key}{s}" for s in ("_weight_scale", "_scale_inv", "_weight_scale_inv")]
    for name in candidates:
        scale = tensors.get(name)
        if scale is None or len(info.shape) < 2:
            continue
        if scale.shape in ((), (1,)):
            raise CheckpointError(f"{scale.where()}: FP8 with one scale for the whole weight is not supported; {_HOW}")
        out, inner = info.shape[-2:]
        blocks = scale.shape[-2:] == (-(-out // 128), -(-inner // 128)) and scale.shape[-2:] != (out, -(-inner // 32))
        return KINDS["fp8_block" if scale.dtype not in _E8M0 or blocks else "mxfp8"]
    return None


def find_scheme(
    config: Mapping, hf_quant: Mapping | None, tensors: Mapping[str, TensorInfo], folder: str, override: str | None
) -> Scheme:
    """The scheme of a folder; a CheckpointError if configuration and tensors say different things.

    override: a name of `KINDS` or "unquantised" that replaces what the configuration declares.
    """
    kind, key = kind_from_tensors(tensors, folder)
    if override is not None:
        if override != "unquantised" and override not in KINDS:
            raise CheckpointError(f"scheme={override!r} is not known; choose one of unquantised, {', '.join(KINDS)}.")
        declared, said = Scheme(KINDS.get(override)), f"scheme={override!r} was asked for"
    else:
        declared = scheme_from_config(config, hf_quant, folder)
        said = f"the configuration declares {declared.name}"
    if kind is not declared.kind:
        found = f"{key!r} ({tensors[key].dtype}) belongs to {kind.name}" if kind else "no tensor has a scale"
        raise CheckpointError(
            f"{folder}: {said}, but {found}. Correct quantization_config, or pass scheme=... with the right one of "
            f"unquantised, {', '.join(KINDS)}."
        )
    return declared
