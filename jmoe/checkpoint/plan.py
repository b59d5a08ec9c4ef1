"""What each leaf of a layer is made of: from a family's tensors to the layer's layout, without reading anything yet.

Letters: D hidden, F expert width, E logical experts, P = R * E_loc physical slots. Layout: gate_up [P, 2, F, D] (gate
first), down [P, D, F], router [E, D], as `jmoe.params` has them, whatever the family stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import ml_dtypes
import numpy as np

from jmoe.experts import ExpertWeights
from jmoe.params import MoEParams
from jmoe.placement import Placement
from pallas_kernels.quantize import QTensor, get_format

from . import host
from .catalog import Linear, MoEBlock
from .errors import CheckpointError, list_keys
from .folder import Source
from .leaves import Index, Leaf, bounds, in_parallel, lengths, stacked
from .schemes import Kind

StaticScales = Literal["uniform", "per_expert"] | None
_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def as_dtype(dtype) -> np.dtype | None:
    """A numpy dtype of bfloat16, float16 or float32 (name or type); None stays None."""
    if dtype is None:
        return None
    value = np.dtype(_DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    if value not in [np.dtype(d) for d in _DTYPES.values()]:
        raise ValueError(
            f"dtype={dtype!r} is not a type for weights; choose {', '.join(_DTYPES)}, or None to keep them."
        )
    return value


class _Field:
    """One field (elements, scales or biases) of a layer's gate_up or down stack, read by expert.

    rows x cols: size of one matrix in stored elements. `one(e, halves, rest)` returns [halves..., rows, cols].
    """

    def __init__(self, source: Source, block: MoEBlock, name: str, gate_up: bool):
        self.source, self.block, self.name, self.gate_up = source, block, name, gate_up
        linear = self._linear(0, 0)
        info = source.tensors[getattr(linear, name)]
        self.dtype = info.numpy_dtype
        shape = info.stored_shape
        if block.fused is not None:
            if linear.kind is not None and linear.kind.name == "mxfp4" and name == "data":
                shape = (*shape[:2], shape[2] * shape[3])
            if linear.transposed:
                shape = (shape[0], shape[2], shape[1])
            shape = (shape[1] // 2, shape[2]) if gate_up else shape[1:]
        self.matrix = tuple(shape)

    def _linear(self, e: int, half: int) -> Linear:
        if self.block.fused is not None:
            return self.block.fused[0 if self.gate_up else 1]
        return self.block.experts[e][half if self.gate_up else 2]

    def key(self, e: int, half: int = 0) -> str:
        return getattr(self._linear(e, half), self.name)

    def _fused(self, e: int, halves: slice | None, rest: Index) -> np.ndarray:
        """Of a stack [E, ...]: gate and up alternate (gpt-oss) or follow each other."""
        linear = self._linear(e, 0)
        key = getattr(linear, self.name)
        rows = self.matrix[0]
        alternate = self.source.family.interleaved
        if self.gate_up and not alternate:
            parts = [
                self.source.read(key, (slice(e, e + 1), slice(h * rows + rest[0].start, h * rows + rest[0].stop)))[0]
                for h in range(halves.start, halves.stop)
            ]
            return np.stack(parts)[(slice(None), slice(None), *rest[1:])]
        value = self.source.read(key, (slice(e, e + 1),))[0]
        if linear.transposed:
            value = value.T
        value = value.reshape(value.shape[0], -1)
        if self.gate_up:
            return np.stack([value[h::2][rest] for h in range(halves.start, halves.stop)])
        return value[rest]

    def one(self, e: int, index: Index) -> np.ndarray:
        """Elements of expert e at `index`: (halves, rows, cols) of gate_up, (rows, cols) of down."""
        halves, rest = (index[0], index[1:]) if self.gate_up else (None, index)
        if self.block.fused is not None:
            return self._fused(e, halves, rest)
        if not self.gate_up:
            return self.source.read(self.key(e), rest)
        return np.stack([self.source.read(self.key(e, h), rest) for h in range(halves.start, halves.stop)])

    def _fill(self, e: int, index: Index, out: np.ndarray) -> None:
        """As `one`, into out, for matrices that are stored one by one."""
        if not self.gate_up:
            self.source.read(self.key(e), index, out=out)
            return
        for i, h in enumerate(range(index[0].start, index[0].stop)):
            self.source.read(self.key(e, h), index[1:], out=out[i])

    def leaf(self, slots: Sequence[int], dtype: np.dtype | None, convert: Callable | None = None) -> Leaf:
        shape = (len(slots), 2, *self.matrix) if self.gate_up else (len(slots), *self.matrix)
        kept = np.dtype(dtype or self.dtype)
        if convert is None and kept == self.dtype and self.block.fused is None:
            return stacked(shape, kept, slots, fill=self._fill)

        def fetch(e: int, index: Index) -> np.ndarray:
            value = self.one(e, index)
            return convert(value, e, index) if convert else value

        return stacked(shape, kept, slots, fetch)


def _global(source: Source, block: MoEBlock, name: str, gate_up: bool) -> Callable[[int], np.ndarray]:
    """Decode scales of expert e: [2] for gate_up, [] for down. Divisors become multipliers."""

    def of(e: int) -> np.ndarray:
        if block.fused is not None:
            linear = block.fused[0 if gate_up else 1]
            key, index = getattr(linear, name), slice(e, e + 1)
            if source.tensors[key].shape in ((), (1,)):
                index = ()
            values = np.repeat(source.read(key, index).reshape(-1), 2 if gate_up else 1)
            linears = [linear] * len(values)
        else:
            linears = block.experts[e][:2] if gate_up else block.experts[e][2:]
            values = np.concatenate([source.read(getattr(li, name)).reshape(-1) for li in linears])
        for value, linear in zip(values, linears, strict=True):
            key = getattr(linear, name)
            host.check_positive(value, source.tensors[key].where(), "it")
        values = values.astype(np.float32)
        if linears[0].kind.divisor:
            values = np.float32(1) / values
            host.check_positive(values, source.tensors[getattr(linears[0], name)].where(), "its reciprocal")
        return values if gate_up else values[0]

    return of


def _qtensor(source: Source, block: MoEBlock, slots: Sequence[int], gate_up: bool) -> QTensor:
    """A QTensor of leaves: elements and scales as they are stored, the scales checked when they are read."""
    kind = block.kind
    data = _Field(source, block, "data", gate_up)
    scale = _Field(source, block, "scale", gate_up)
    to_f32 = kind.name == "fp8_block"
    stored = {"nvfp4": ml_dtypes.float8_e4m3fn, "mxfp8": np.uint8, "mxfp4": np.uint8}.get(kind.format, np.float32)

    def check(value: np.ndarray, e: int, half: int) -> None:
        where = source.tensors[scale.key(e, half)].where()
        elements = np.zeros((0, 0), data.dtype)
        if (host.scales_to_float(value) == 0).any():
            whole = tuple(slice(0, n) for n in data.matrix)
            elements = data.one(e, (slice(half, half + 1), *whole))[0] if gate_up else data.one(e, whole)
        host.check_scales(value, f"{where} (expert {e})", elements, kind, pow2=source.scheme.pow2)

    def checked(value: np.ndarray, e: int, index: Index) -> np.ndarray:
        if gate_up:
            for i, part in enumerate(value):
                check(part, e, index[0].start + i)
        else:
            check(value, e, 0)
        return host.scales_to_float(value) if to_f32 else value.view(stored)

    global_scale = None
    if kind.global_scale is not None:
        of = _global(source, block, "global_scale", gate_up)
        shape = (len(slots), 2) if gate_up else (len(slots),)
        global_scale = stacked(
            shape, np.dtype(np.float32), slots, lambda e, index: of(e)[index[0]] if gate_up else of(e)
        )
    fmt = get_format(kind.format + ("_ue8m0" if source.scheme.pow2 and to_f32 else ""))
    k = data.matrix[-1] * (2 if kind.packed else 1)
    return QTensor(
        data.leaf(slots, np.dtype(np.uint8) if kind.packed else None),
        scale.leaf(slots, np.dtype(stored), checked),
        global_scale,
        fmt,
        k,
    )


def decoded(q: QTensor, kind: Kind, dtype: np.dtype) -> Leaf:
    """The leaf [..., N, K] of `dtype` that a QTensor of leaves stands for, decoded one matrix stack at a time."""
    shape = (*q.data.shape[:-1], q.k)

    def matrices(lead: Index) -> np.ndarray:
        parts = [leaf.read(bounds(lead, leaf.shape)) for leaf in (q.data, q.block_scale)]
        g = None if q.global_scale is None else q.global_scale.read(bounds(lead, q.global_scale.shape))
        return host.decode(parts[0], parts[1], g, kind)

    def read(index: Index) -> np.ndarray:
        index = bounds(index, shape)
        lead, inner = index[:-2], index[-2:]
        if not lead:
            return matrices(())[inner].astype(dtype)
        out = np.empty(lengths(index), dtype)

        def one(i: int) -> None:
            at = index[0].start + i
            out[i] = matrices((slice(at, at + 1), *lead[1:]))[0][(..., *inner)].astype(dtype)

        in_parallel(one, out.shape[0], out.nbytes)
        return out

    return Leaf(shape, dtype, read, experts=q.data.experts)


def _static_scales(source: Source, block: MoEBlock, slots, mode: StaticScales) -> tuple[Leaf | None, Leaf | None]:
    """Decode scales of the inputs of the two matmuls, from the checkpoint's input scales; None where it has none.

    "uniform": one input scale [] for all experts of all ranks, the largest, so that a sender can quantise a token
    before it knows who computes it. "per_expert": [P]. The second matmul's are [P] in both. An expert's is the larger
    of gate's and up's.
    """
    if mode not in ("uniform", "per_expert", None):
        raise ValueError(f"static_scales={mode!r} is not known; choose 'uniform', 'per_expert' or None (dynamic).")
    if block.kind is None or block.kind.input_scale is None or mode is None:
        return None, None
    linears = block.fused or [linear for expert in block.experts for linear in expert]
    absent = [linear.name for linear in linears if linear.input_scale is None]
    if len(absent) == len(linears):
        return None, None
    if absent:
        raise CheckpointError(
            f"{source.name}: some experts of layer {block.layer} have an input scale and some have none "
            f"({list_keys(absent)}); they must all have one, or load with static_scales=None."
        )
    first, second = (_global(source, block, "input_scale", gate_up) for gate_up in (True, False))
    f32 = np.dtype(np.float32)

    def per_expert(of: Callable) -> Leaf:
        leaf = stacked((len(slots),), f32, slots, lambda e, index: of(e).max())

        def read(index: Index) -> np.ndarray:
            values = leaf.read(index)
            unused = np.asarray(slots)[index[0]] < 0
            return np.where(unused, np.float32(1), values)

        return Leaf(leaf.shape, f32, read, experts=True)

    if mode == "per_expert":
        return per_expert(first), per_expert(second)
    everyone = range(source.moe_config.num_experts)
    return Leaf((), f32, lambda index: np.asarray(max(first(e).max() for e in everyone), f32)), per_expert(second)


def _weight(source: Source, block: MoEBlock, slots, gate_up: bool, dtype, dequantize) -> Leaf | QTensor:
    if block.kind is None:
        return _Field(source, block, "data", gate_up).leaf(slots, dtype)
    q = _qtensor(source, block, slots, gate_up)
    return decoded(q, block.kind, dequantize) if dequantize is not None else q


def param(source: Source, key: str | None, dtype: np.dtype | None) -> Leaf | None:
    """A parameter that is not quantised, as a leaf."""
    if key is None:
        return None
    info = source.tensors[key]
    wanted = dtype or info.numpy_dtype
    return Leaf(info.stored_shape, wanted, lambda index: source.read(key, index).astype(wanted, copy=False))


def linear_qtensor(source: Source, linears: Sequence[Linear]) -> QTensor:
    """A QTensor of leaves of one quantised matrix, or of several of equal shape stacked on a new first axis."""
    kind, first = linears[0].kind, linears[0]
    lead = (len(linears),) if len(linears) > 1 else ()
    stored = {"nvfp4": ml_dtypes.float8_e4m3fn, "mxfp8": np.uint8, "mxfp4": np.uint8}.get(kind.format, np.float32)
    to_f32 = kind.name == "fp8_block"

    def stack(parts: list[np.ndarray], index: Index) -> np.ndarray:
        return np.stack(parts[index[0]])[(slice(None), *index[1:])] if lead else parts[0][index]

    def scale_of(linear: Linear) -> np.ndarray:
        value = source.read(linear.scale)
        has_zero = (host.scales_to_float(value) == 0).any()
        data = source.read(linear.data) if has_zero else np.zeros((0, 0), np.uint8)
        host.check_scales(value, source.tensors[linear.scale].where(), data, kind, pow2=source.scheme.pow2)
        return host.scales_to_float(value) if to_f32 else value.view(stored)

    def global_of(linear: Linear) -> np.ndarray:
        value = source.read(linear.global_scale).reshape(()).astype(np.float32)
        host.check_positive(value, source.tensors[linear.global_scale].where(), "it")
        return np.float32(1) / value if kind.divisor else value

    data = source.tensors[first.data]
    data_type = np.dtype(np.uint8) if kind.packed else data.numpy_dtype
    return QTensor(
        Leaf((*lead, *data.stored_shape), data_type, lambda i: stack([source.read(li.data) for li in linears], i)),
        Leaf(
            (*lead, *source.tensors[first.scale].stored_shape),
            np.dtype(stored),
            lambda i: stack([scale_of(li) for li in linears], i),
        ),
        None
        if kind.global_scale is None
        else Leaf(lead, np.dtype(np.float32), lambda i: stack([global_of(li) for li in linears], i)),
        get_format(kind.format + ("_ue8m0" if source.scheme.pow2 and to_f32 else "")),
        first.shape[-1],
    )


def _shared(source: Source, linears: Sequence[Linear], dtype, dequantize) -> Leaf | QTensor:
    if linears[0].kind is not None:
        q = linear_qtensor(source, linears)
        return decoded(q, linears[0].kind, dequantize) if dequantize is not None else q
    parts = [param(source, li.data, dtype) for li in linears]
    if len(parts) == 1:
        return parts[0]
    shape = (len(parts), *parts[0].shape)
    return Leaf(shape, parts[0].dtype, lambda index: np.stack([p.read(index[1:]) for p in parts[index[0]]]))


def plan_moe_layer(
    source: Source,
    layer: int,
    *,
    placement: Placement | None = None,
    dtype: np.dtype | None = None,
    dequantize: np.dtype | None = None,
    dequantize_shared: np.dtype | Literal["same"] | None = "same",
    static_scales: StaticScales = "uniform",
) -> MoEParams:
    """One layer's parameters as a tree of `Leaf`: nothing is read yet. Arguments as `load_moe_layer`.

    dequantize_shared: what happens to the shared expert, if not the same as to the routed ones.
    """
    blocks = source.catalog.blocks
    if layer not in blocks:
        raise ValueError(
            f"layer={layer} of {source.name} has no MoE block; those that have one are {', '.join(map(str, blocks))}."
        )
    block = blocks[layer]
    num_experts = source.moe_config.num_experts
    if placement is not None and placement.num_experts != num_experts:
        raise ValueError(
            f"placement is for {placement.num_experts} experts, {source.name} has {num_experts}; make one for them."
        )
    slots = range(num_experts) if placement is None else [int(s) for s in np.asarray(placement.slots).reshape(-1)]
    bias = [None, None]
    if block.fused_bias is not None:
        names = block.fused_bias
        halves, d = source.moe_config.intermediate_size, source.moe_config.hidden_size
        kept = dtype or source.tensors[names[0]].numpy_dtype

        def gate_up_bias(e: int, index: Index) -> np.ndarray:
            value = source.read(names[0], (slice(e, e + 1),))[0]
            parts = [value[0::2], value[1::2]] if source.family.interleaved else np.split(value, 2)
            return np.stack(parts)[index]

        bias[0] = stacked((len(slots), 2, halves), kept, slots, gate_up_bias)
        bias[1] = stacked(
            (len(slots), d), kept, slots, lambda e, index: source.read(names[1], (slice(e, e + 1), *index))[0]
        )
    shared, shared_type = block.shared, dequantize if dequantize_shared == "same" else dequantize_shared
    static = (None, None) if dequantize is not None else _static_scales(source, block, slots, static_scales)
    return MoEParams(
        router=param(source, block.router, dtype),
        router_bias=param(source, block.router_bias, dtype),
        correction_bias=param(source, block.correction_bias, np.dtype(np.float32)),
        experts=ExpertWeights(
            gate_up=_weight(source, block, slots, True, dtype, dequantize),
            down=_weight(source, block, slots, False, dtype, dequantize),
            gate_up_bias=bias[0],
            down_bias=bias[1],
            input_scale=static[0],
            intermediate_scale=static[1],
        ),
        shared_gate_up=_shared(source, shared[:2], dtype, shared_type) if shared else None,
        shared_down=_shared(source, shared[2:], dtype, shared_type) if shared else None,
    )


def plan_rest(source: Source, *, dtype: np.dtype | None = None) -> dict[str, Leaf]:
    """Everything outside the MoE blocks as leaves by Hugging Face name; quantised matrices decode to `dtype`."""
    out = {}
    for name, linear in source.catalog.linears.items():
        if linear.kind is None:
            out[name + ".weight"] = param(source, linear.data, dtype)
        else:
            target = dtype or np.dtype(ml_dtypes.bfloat16)
            out[name + ".weight"] = decoded(linear_qtensor(source, [linear]), linear.kind, target)
    for key in source.catalog.params:
        out[key] = param(source, key, dtype)
    return out
