"""From the layer's parameters back to a family's tensors: names, layouts and the configuration that declares them.

Letters: D hidden, F expert width, E logical experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jmoe.experts import ExpertWeights
from jmoe.params import MoEParams
from jmoe.placement import Placement
from pallas_kernels.quantize import QTensor

from .errors import CheckpointError
from .families import Family
from .families.base import layers as num_layers
from .schemes import KINDS, Kind

Tensors = dict[str, np.ndarray]

# Schemes that a family's experts can be written in, under names that other engines read.
_PER_EXPERT = ("unquantised", "nvfp4_modelopt", "nvfp4_ct", "mxfp8", "fp8_block")
_INTERLEAVED = ("unquantised", "mxfp4")


def check_target(family: Family, scheme: str) -> Kind | None:
    """The `Kind` of a target scheme (None: unquantised). ValueError if the family is not written in it."""
    possible = _INTERLEAVED if family.interleaved else _PER_EXPERT
    if scheme not in possible:
        raise ValueError(
            f"A {family.name} model cannot be written as {scheme!r}, for which no names are in use; choose one of "
            f"{', '.join(possible)}."
        )
    return KINDS.get(scheme)


def reciprocal(scale: np.ndarray) -> np.ndarray:
    """Float32 d with fl(1/d) == scale, for every scale that was made as fl(1/d)."""
    return np.float32(1) / np.asarray(scale, np.float32)


def _host(x) -> np.ndarray:
    return np.asarray(jax.device_get(x))


def _quantised(stem: str, kind: Kind, data, scale, global_scale, input_scale) -> Tensors:
    """Tensors of one linear module."""
    out = {f"{stem}.{kind.data}": data, f"{stem}.{kind.scale[0]}": scale}
    for suffix, value in ((kind.global_scale, global_scale), (kind.input_scale, input_scale)):
        if suffix is not None and value is not None:
            value = np.asarray(value, np.float32)
            out[f"{stem}.{suffix}"] = reciprocal(value).reshape(1) if kind.divisor else value.reshape(())
    return out


def _check(name: str, w: Any, kind: Kind | None) -> None:
    have = w.format.name if isinstance(w, QTensor) else None
    wanted = {"nvfp4": ("nvfp4", "nvfp4_4o6"), "fp8_128x128": ("fp8_128x128", "fp8_128x128_ue8m0")}  # decode alike
    if have not in ((None,) if kind is None else wanted.get(kind.format, (kind.format,))):
        have = have or getattr(w, "dtype", None)
        raise CheckpointError(
            f"{name} is kept as {have}, which {kind.name if kind else 'unquantised'} does not store; load it with "
            "quant=... or dequantize=... for that scheme first."
        )
    if isinstance(w, QTensor) and w.layout != "row_major":
        raise CheckpointError(f"{name} has swizzled block scales; a checkpoint stores them row by row.")


def _expert_slots(experts: ExpertWeights, num_experts: int, placement: Placement | None) -> np.ndarray:
    if placement is not None:
        return np.asarray(placement.replicas)[:, 0]
    slots = experts.down.shape[0]
    if slots != num_experts:
        raise ValueError(
            f"The parameters have {slots} expert slots for {num_experts} experts; pass the placement that they follow."
        )
    return np.arange(num_experts)


def _logical(tree: Any, slots: np.ndarray) -> Any:
    return jax.tree.map(lambda a: _host(a)[slots] if a.ndim else _host(a), tree)


def _per_expert(names: tuple[str, ...], prefix: str, w: Any, kind: Kind | None, num_experts: int) -> Tensors:
    out: Tensors = {}
    for e in range(num_experts):
        for half, name in enumerate(names):
            stem = f"{prefix}.{name.format(e=e)}"
            source = w.down if half == 2 else w.gate_up
            at = (e,) if half == 2 else (e, half)
            if kind is None:
                out[stem + ".weight"] = source[at]
                continue
            static = w.intermediate_scale if half == 2 else w.input_scale
            if static is not None and static.ndim:
                static = static[e]
            g = None if source.global_scale is None else source.global_scale[at]
            out |= _quantised(stem, kind, source.data[at], source.block_scale[at], g, static)
    return out


def _interleave(a: np.ndarray) -> np.ndarray:
    """[E, 2, F, ...] -> [E, 2F, ...] with gate and up in alternating rows."""
    return np.ascontiguousarray(np.moveaxis(a, 1, 2)).reshape(a.shape[0], -1, *a.shape[3:])


def _fused(family: Family, prefix: str, w: Any, kind: Kind | None) -> Tensors:
    """gpt-oss: stacks with alternating rows, transposed where they are not quantised."""
    out: Tensors = {}
    for name, source, turn in zip(family.fused, (w.gate_up, w.down), (_interleave, lambda a: a), strict=True):
        stem = f"{prefix}.{name}"
        if kind is None:
            out[stem] = np.ascontiguousarray(np.swapaxes(turn(source), 1, 2))
        else:
            data = turn(source.data)
            out[stem + kind.fused_data] = data.reshape(*data.shape[:2], -1, 16)
            out[stem + kind.fused_scale[0]] = turn(source.block_scale)
    if w.gate_up_bias is not None:
        out[f"{prefix}.{family.fused[0]}_bias"] = _interleave(w.gate_up_bias)
        out[f"{prefix}.{family.fused[1]}_bias"] = w.down_bias
    return out


def moe_tensors(
    family: Family, layer: int, params: MoEParams, scheme: str, num_experts: int, placement: Placement | None = None
) -> Tensors:
    """All tensors of one MoE block under the family's names, on the host. Shared experts must be unquantised."""
    kind, prefix = check_target(family, scheme), family.prefix(layer)
    for name in ("gate_up", "down"):
        _check(f"layer {layer}'s {name}", getattr(params.experts, name), kind)
    experts = _logical(params.experts, _expert_slots(params.experts, num_experts, placement))
    if family.expert is None:
        out = _fused(family, prefix, experts, kind)
    else:
        out = _per_expert(family.expert, prefix, experts, kind, num_experts)
    out[f"{prefix}.{family.router}"] = _host(params.router)
    for name, value in ((family.router_bias, params.router_bias), (family.correction_bias, params.correction_bias)):
        if name is not None:
            out[f"{prefix}.{name}"] = _host(value)
    if family.shared is not None and params.shared_gate_up is not None:
        _check(f"layer {layer}'s shared expert", params.shared_gate_up, None)
        parts = (*_host(params.shared_gate_up), _host(params.shared_down))
        out |= {f"{prefix}.{name}.weight": part for name, part in zip(family.shared, parts, strict=True)}
    return out


def ignore_patterns(hf: Mapping, family: Family) -> Iterator[str]:
    """Shell patterns of all linear modules that stay unquantised when the routed experts are quantised."""
    yield "lm_head"
    yield "model.layers.*.self_attn*"
    yield f"model.layers.*.{family.block}.{family.router.removesuffix('.weight')}"
    if family.shared is not None:
        yield f"model.layers.*.{family.block}.{family.shared[0].rpartition('.')[0]}*"
    for layer in range(num_layers(hf)):
        if not family.is_moe(hf, layer):
            yield f"model.layers.{layer}.{family.block}.*_proj"


def _plain_modules(hf: Mapping, family: Family) -> Iterator[str]:
    """The same as full names, for readers that know no patterns."""
    yield from family.rest(hf)[0]
    for layer in range(num_layers(hf)):
        if family.is_moe(hf, layer):
            prefix = family.prefix(layer)
            yield f"{prefix}.{family.router.removesuffix('.weight')}"
            yield from (f"{prefix}.{name}" for name in family.shared or ())


def _regex(pattern: str) -> str:
    return "re:" + ".*".join(re.escape(part) for part in pattern.split("*")) + "$" if "*" in pattern else pattern


def quantized_config(hf: Mapping, family: Family, scheme: str) -> tuple[dict, dict | None]:
    """(config.json, hf_quant_config.json or None) that declare the scheme, in the form other engines expect."""
    config = {k: v for k, v in hf.items() if k not in ("quantization_config", "compression_config")}
    kind = check_target(family, scheme)
    if kind is None:
        return config, None
    ignore = list(ignore_patterns(hf, family))
    separate = None
    if scheme == "nvfp4_ct":
        numbers = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "symmetric": True}
        group = {"targets": ["Linear"], "weights": {**numbers, "dynamic": False}}
        group |= {"input_activations": {**numbers, "dynamic": "local"}, "format": "nvfp4-pack-quantized"}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": group},
            "ignore": [_regex(p) for p in ignore],
            "quantization_status": "compressed",
        }
    elif scheme == "fp8_block":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": sorted(_plain_modules(hf, family)),
        }
    elif scheme == "mxfp4":
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ignore}
    else:
        algo = {"quant_algo": "NVFP4" if kind.format == "nvfp4" else "MXFP8", "group_size": kind.block}
        config["quantization_config"] = {"quant_method": "modelopt", **algo, "ignore": ignore}
        separate = {
            "producer": {"name": "jmoe"},
            "quantization": {**algo, "kv_cache_quant_algo": None, "exclude_modules": ignore},
        }
    return config, separate
