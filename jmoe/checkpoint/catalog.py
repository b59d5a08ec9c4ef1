"""Every tensor that a model of a family must have, found in a folder: what is missing, left over, or disagrees.

Only headers are read here. Letters: D hidden, F expert width, E experts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from .errors import CheckpointError, list_keys
from .families import Family
from .families.base import layers as num_layers
from .safetensors import TensorInfo
from .schemes import Kind, Scheme

FLOATS = ("BF16", "F16", "F32")


@dataclasses.dataclass(frozen=True)
class Linear:
    """Where one weight is: an [out, in] matrix of a module, or a whole stack of them when `stacked`.

    shape: logical, [out, in] or [E, out, in]. kind: None where it is stored as it is. transposed: stored [E, in, out].
    """

    name: str
    shape: tuple[int, ...]
    data: str
    kind: Kind | None = None
    scale: str | None = None
    global_scale: str | None = None
    input_scale: str | None = None
    transposed: bool = False

    def key(self, field: str) -> str:
        """The name of one of its tensors: "data", "scale", "global_scale" or "input_scale"."""
        value = getattr(self, field)
        assert value is not None, f"{self.name} has no {field}"
        return value


@dataclasses.dataclass(frozen=True)
class MoEBlock:
    """Where one layer's MoE block is. experts: (gate, up, down) of each one, or None where `fused` has the stacks."""

    layer: int
    router: str
    router_bias: str | None
    correction_bias: str | None
    experts: tuple[tuple[Linear, Linear, Linear], ...] | None
    fused: tuple[Linear, Linear] | None
    fused_bias: tuple[str, str] | None
    shared: tuple[Linear, Linear, Linear] | None

    def linears(self, e: int, gate_up: bool) -> tuple[Linear, ...]:
        """Where expert e's gate and up (or down) are: two linears (or one), or the one stack that holds them."""
        if self.fused is not None:
            return (self.fused[0 if gate_up else 1],)
        assert self.experts is not None
        return self.experts[e][:2] if gate_up else self.experts[e][2:]

    @property
    def kind(self) -> Kind | None:
        return self.linears(0, True)[0].kind


@dataclasses.dataclass(frozen=True)
class Catalog:
    """blocks: MoE blocks by layer. linears, params: all other linear modules and parameters. skipped: not read."""

    blocks: dict[int, MoEBlock]
    linears: dict[str, Linear]
    params: tuple[str, ...]
    skipped: tuple[str, ...]


class _Finder:
    """Looks tensors up, remembers what was used and what was missing, and checks types and shapes on the way."""

    def __init__(self, tensors: Mapping[str, TensorInfo], family: Family, scheme: Scheme):
        self.tensors, self.family, self.scheme = tensors, family, scheme
        self.used: set[str] = set()
        self.missing: list[str] = []

    def param(
        self, key: str, *shapes: tuple[int, ...], types: tuple[str, ...] = FLOATS, what: str = "a parameter"
    ) -> str:
        info = self.tensors.get(key)
        if info is None:
            self.missing.append(key)
            return key
        self.used.add(key)
        if info.dtype not in types:
            raise CheckpointError(f"{info.where()}: has type {info.dtype}; {what} may be {', '.join(types)}.")
        if shapes and info.shape not in shapes:
            hint = ""
            if what == "a block scale" and info.shape != shapes[0]:
                hint = " Scales in a swizzled or padded order cannot be told from garbage: store them row by row."
            raise CheckpointError(f"{info.where()}: has shape {info.shape}; {what} here must be {shapes[0]}.{hint}")
        return key

    def _scale_shape(self, shape: tuple[int, ...], kind: Kind) -> tuple[int, ...]:
        *lead, out, inner = shape
        return (*lead, -(-out // kind.block_rows), -(-inner // kind.block))

    def _check_blocks(self, where: str, shape: tuple[int, ...], kind: Kind) -> None:
        if kind.block_rows == 1 and shape[-1] % kind.block:
            raise CheckpointError(
                f"{where}: rows of {shape[-1]} elements do not divide into the blocks of {kind.block} of {kind.name}."
            )

    def _plain(self, key: str) -> bool:
        return key in self.tensors and self.tensors[key].dtype in FLOATS

    def _not_ignored(self, key: str, kind: Kind) -> CheckpointError:
        info = self.tensors[key]
        return CheckpointError(
            f"{info.where()}: is stored as {info.dtype}, but the configuration says {kind.name} and does not ignore "
            f"{key.removesuffix('.weight')!r}; add it to the ignore list or quantise it."
        )

    def linear(self, module: str, shape: tuple[int, ...], *, expert: bool) -> Linear:
        kind, key = self.scheme.kind, module + ".weight"
        plain = self._plain(key)
        ignored = self.scheme.ignores(module)
        if kind is None or ignored or (plain and not expert):
            if (
                kind is not None
                and not plain
                and any(f"{module}.{s}" in self.tensors for s in (kind.data, *kind.scale))
            ):
                raise CheckpointError(
                    f"{module!r} is on the configuration's ignore list, but is stored in {kind.name}; correct the list."
                )
            return Linear(module, shape, self.param(key, shape, what="an unquantised weight"))
        if plain:
            raise self._not_ignored(key, kind)
        name = lambda suffix: f"{module}.{suffix}"  # noqa: E731
        return self._quantised(
            module, shape, kind, name, name(kind.data), kind.scale, kind.global_scale, kind.input_scale
        )

    def fused(self, stem: str, shape: tuple[int, int, int]) -> Linear:
        kind = self.scheme.kind
        if kind is None or self.scheme.ignores(stem) or self.scheme.ignores(stem.rpartition(".")[0]):
            turned = (shape[0], shape[2], shape[1])
            transposed = self.family.interleaved
            key = self.param(stem, turned if transposed else shape, what="an unquantised stack")
            return Linear(stem, shape, key, transposed=transposed)
        if self._plain(stem):
            raise self._not_ignored(stem, kind)
        name = lambda suffix: stem + suffix  # noqa: E731
        data = name(kind.fused_data)
        return self._quantised(stem, shape, kind, name, data, kind.fused_scale, kind.fused_global, kind.fused_input)

    def _quantised(self, module, shape, kind, name, data, scales, global_scale, input_scale) -> Linear:
        self._check_blocks(module, shape, kind)
        stacked = len(shape) == 3
        if (
            stacked
            and kind.block_rows > 1
            and shape[1] % (2 * kind.block_rows)
            and module.endswith(self.family.fused[0])
        ):
            raise CheckpointError(
                f"{module}: {shape[1] // 2} rows of gate do not divide into the blocks of {kind.block_rows} rows of "
                f"{kind.name}: one block would hold rows of gate and up. Store each expert's gate and up on their own."
            )
        info = self.tensors.get(data)
        stored = shape
        if kind.packed and (info is None or info.dtype != "F4"):
            stored = (*shape[:-1], shape[-1] // 2)
        if kind.name == "mxfp4":
            stored = (*shape[:-1], shape[-1] // 32, 16)
        self.param(data, stored, types=kind.data_types, what=f"a {kind.name} weight")
        scale = next((name(s) for s in scales if name(s) in self.tensors), name(scales[0]))
        self.param(scale, self._scale_shape(shape, kind), types=kind.scale_types, what="a block scale")
        found_global = found_input = None
        if global_scale is not None:
            scalars = ((shape[0],), (shape[0], 1), (shape[0], 1, 1)) if stacked else ((), (1,))
            found_global = self.param(name(global_scale), *scalars, types=("F32",), what="a global scale")
            if name(input_scale) in self.tensors:
                either = (*scalars, (), (1,)) if stacked else scalars
                found_input = self.param(name(input_scale), *either, types=("F32",), what="an input scale")
        return Linear(module, shape, data, kind, scale, found_global, found_input)

    def block(self, hf: Mapping, layer: int) -> MoEBlock:
        family = self.family
        config, prefix = family.moe_config(hf), family.prefix(layer)
        e, d, f = config.num_experts, config.hidden_size, config.intermediate_size
        experts = fused = bias = shared = None
        stem = f"{prefix}.{family.fused[0]}"
        if family.expert is None or any(stem + s in self.tensors for s in ("", "_packed", "_blocks", "_scale_inv")):
            down = f"{prefix}.{family.fused[1]}"
            fused = (self.fused(stem, (e, 2 * f, d)), self.fused(down, (e, d, f)))
            if config.use_bias:
                bias = (self.param(stem + "_bias", (e, 2 * f)), self.param(down + "_bias", (e, d)))
        else:
            gate, up, down = (f"{prefix}.{name}" for name in family.expert)
            experts = tuple(
                (
                    self.linear(gate.format(e=i), (f, d), expert=True),
                    self.linear(up.format(e=i), (f, d), expert=True),
                    self.linear(down.format(e=i), (d, f), expert=True),
                )
                for i in range(e)
            )
            kinds = {part.kind for expert in experts for part in expert}
            if len(kinds) > 1:
                ignored = next(part.name for expert in experts for part in expert if part.kind is None)
                raise CheckpointError(
                    f"{prefix}: some experts are quantised and some, as {ignored!r}, are not; a layer's experts are "
                    "kept in one array and must all be stored alike."
                )
        if family.shared is not None and config.shared_intermediate_size:
            fs = config.shared_intermediate_size
            gate, up, down = (f"{prefix}.{name}" for name in family.shared)
            shared = (
                self.linear(gate, (fs, d), expert=False),
                self.linear(up, (fs, d), expert=False),
                self.linear(down, (d, fs), expert=False),
            )
        optional = lambda name, shape: self.param(f"{prefix}.{name}", shape) if name else None  # noqa: E731
        return MoEBlock(
            layer,
            self.param(f"{prefix}.{family.router}", (e, d), what="a router weight"),
            optional(family.router_bias, (e,)),
            optional(family.correction_bias, (e,)),
            experts,
            fused,
            bias,
            shared,
        )


def _skipped(hf: Mapping, family: Family, keys: set[str]) -> set[str]:
    """Keys that may be there and are not read: rotary tables, KV-cache scales, next-token-prediction layers."""
    patterns = list(family.tolerated)
    if hf.get("tie_word_embeddings"):
        patterns.append(r"lm_head\.weight")
    matcher = re.compile("|".join(f"(?:{p})" for p in patterns))
    out = {key for key in keys if matcher.fullmatch(key)}
    if hf.get("num_nextn_predict_layers"):
        layers = num_layers(hf)
        for key in keys - out:
            found = re.match(r"model\.layers\.(\d{1,6})\.", key)
            if found and int(found[1]) >= layers:
                out.add(key)
    return out


def build_catalog(
    hf: Mapping, family: Family, scheme: Scheme, tensors: Mapping[str, TensorInfo], folder: str
) -> Catalog:
    """Finds every tensor of the model; missing or left-over keys are one CheckpointError that lists them."""
    finder = _Finder(tensors, family, scheme)
    linear_shapes, param_shapes = family.rest(hf)
    moe_layers = [i for i in range(num_layers(hf)) if family.is_moe(hf, i)]
    experts = family.moe_config(hf).num_experts
    if experts > 1 << 20 or (len(moe_layers) * experts > 100 * len(tensors) + 100_000):
        raise CheckpointError(
            f"{folder}: config.json has {experts} experts in each of {len(moe_layers)} layers, but only {len(tensors)} "
            "tensors are there; the configuration belongs to another model."
        )
    blocks = {i: finder.block(hf, i) for i in moe_layers}
    linears = {name: finder.linear(name, shape, expert=False) for name, shape in linear_shapes.items()}
    for key, shape in param_shapes.items():
        finder.param(key, shape)
    left = set(tensors) - finder.used
    skipped = _skipped(hf, family, left)
    left -= skipped
    if finder.missing or left:
        parts = []
        if finder.missing:
            parts.append(f"missing keys ({list_keys(finder.missing)})")
        if left:
            files = sorted({tensors[key].file for key in left})
            parts.append(f"unexpected keys ({list_keys(left)}; in {', '.join(files[:3])})")
        raise CheckpointError(
            f"{folder}: does not hold a {family.name} model stored as {scheme.name}: {'; '.join(parts)}. Expected are "
            "exactly the tensors that config.json describes."
        )
    return Catalog(blocks, linears, tuple(param_shapes), tuple(sorted(skipped)))
