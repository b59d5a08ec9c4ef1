"""What each leaf of a layer is made of: from a family's tensors to the layer's layout, without reading anything yet.

Letters: D hidden, F expert width, E logical experts, P = R * E_loc physical slots. Layout: gate_up [P, 2, F, D] (gate
first), down [P, D, F], router [E, D], as `jmoe.params` has them, whatever the family stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jmoe.experts import ExpertWeights
from jmoe.params import MoEParams
from jmoe.placement import Placement
from pallas_kernels.quantize import BlockFormat, QTensor, get_format

from . import host
from .catalog import Linear, MoEBlock
from .errors import CheckpointError, list_keys
from .fields import FLOAT32, Field, scalars
from .folder import Source
from .leaves import Index, Leaf, bounds, in_parallel, lengths, stacked
from .schemes import Kind

StaticScales = Literal["uniform", "per_expert"] | None
_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def as_dtype(dtype) -> np.dtype | None:
    """A numpy dtype of bfloat16, float16 or float32 (name or type); None stays None."""
    if dtype is None:
        return None
    try:
        value = np.dtype(_DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:  # numpy knows no such type
        value = None
    if value not in [np.dtype(d) for d in _DTYPES.values()]:
        raise ValueError(
            f"dtype={dtype!r} is not a type for weights; choose {', '.join(_DTYPES)}, or None to keep them."
        )
    return value


def _format(source: Source, kind: Kind) -> BlockFormat:
    return get_format(kind.format + ("_ue8m0" if source.scheme.pow2 and kind.name == "fp8_block" else ""))


def _qtensor(source: Source, block: MoEBlock, kind: Kind, slots: Sequence[int], gate_up: bool) -> Any:
    """A QTensor of leaves: elements and scales as they are stored, the scales checked when they are read."""
    data, scale = Field(source, block, "data", gate_up), Field(source, block, "scale", gate_up)

    def check(value: np.ndarray, e: int, half: int) -> None:
        where = source.tensors[scale.key(e, half)].where()
        has_zero = (host.scales_to_float(value) == 0).any()
        elements = data.whole(e, half) if has_zero else np.zeros((0, 0), data.dtype)
        host.check_scales(value, f"{where} (expert {e})", elements, kind, pow2=source.scheme.pow2)

    def checked(value: np.ndarray, e: int, index: Index) -> np.ndarray:
        for i, part in enumerate(value if gate_up else value[None]):
            check(part, e, index[0].start + i if gate_up else 0)
        return host.kept_scales(value, kind)

    global_scale = None
    if kind.global_scale is not None:
        of = scalars(source, block, "global_scale", gate_up)
        shape = (len(slots), 2) if gate_up else (len(slots),)
        global_scale = stacked(shape, FLOAT32, slots, lambda e, index: of(e)[index[0]] if gate_up else of(e)[0])
    return _tree(
        data.leaf(slots, np.dtype(np.uint8) if kind.packed else None),
        scale.leaf(slots, host.scale_dtype(kind), checked),
        global_scale,
        _format(source, kind),
        data.matrix[-1] * (2 if kind.packed else 1),
    )


def _tree(data: Any, block_scale: Any, global_scale: Any, fmt: BlockFormat, k: int) -> Any:
    """A QTensor whose leaves are `Leaf`: the structure of the arrays that they will become."""
    return QTensor(data, block_scale, global_scale, fmt, k)


def decoded(q: Any, kind: Kind, dtype: np.dtype) -> Leaf:
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
    experts = range(1 if block.fused is not None else source.moe_config.num_experts)
    linears = [linear for e in experts for gate_up in (True, False) for linear in block.linears(e, gate_up)]
    absent = [linear.name for linear in linears if linear.input_scale is None]
    if len(absent) == len(linears):
        return None, None
    if absent:
        raise CheckpointError(
            f"{source.name}: some experts of layer {block.layer} have an input scale and some have none "
            f"({list_keys(absent)}); they must all have one, or load with static_scales=None."
        )
    first, second = (scalars(source, block, "input_scale", gate_up) for gate_up in (True, False))

    def per_expert(of: Callable) -> Leaf:
        leaf = stacked((len(slots),), FLOAT32, slots, lambda e, index: of(e).max())

        def read(index: Index) -> np.ndarray:
            values = leaf.read(index)
            unused = np.asarray(slots)[index[0]] < 0
            return np.where(unused, np.float32(1), values)

        return Leaf(leaf.shape, FLOAT32, read, experts=True)

    if mode == "per_expert":
        return per_expert(first), per_expert(second)
    everyone = range(source.moe_config.num_experts)
    uniform = lambda index: np.asarray(max(first(e).max() for e in everyone), FLOAT32)  # noqa: E731
    return Leaf((), FLOAT32, uniform), per_expert(second)


def _weight(source: Source, block: MoEBlock, slots, gate_up: bool, dtype, dequantize) -> Any:
    kind = block.kind
    if kind is None:
        return Field(source, block, "data", gate_up).leaf(slots, dtype)
    q = _qtensor(source, block, kind, slots, gate_up)
    return decoded(q, kind, dequantize) if dequantize is not None else q


def param(source: Source, key: str, dtype: np.dtype | None) -> Leaf:
    """A parameter that is not quantised, as a leaf."""
    info = source.tensors[key]
    wanted = dtype or info.numpy_dtype
    return Leaf(info.stored_shape, wanted, lambda index: source.read(key, index).astype(wanted, copy=False))


def linear_qtensor(source: Source, linears: Sequence[Linear]) -> Any:
    """A QTensor of leaves of one quantised matrix, or of several of equal shape stacked on a new first axis."""
    first, kind = linears[0], linears[0].kind
    assert kind is not None
    lead = (len(linears),) if len(linears) > 1 else ()

    def stack(read: Callable[[Linear], np.ndarray], index: Index) -> np.ndarray:
        if not lead:
            return read(first)[index]
        return np.stack([read(linear) for linear in linears[index[0]]])[(slice(None), *index[1:])]

    def scale_of(linear: Linear) -> np.ndarray:
        info = source.tensors[linear.key("scale")]
        value = source.read(info.key)
        has_zero = (host.scales_to_float(value) == 0).any()
        data = source.read(linear.data) if has_zero else np.zeros((0, 0), np.uint8)
        host.check_scales(value, info.where(), data, kind, pow2=source.scheme.pow2)
        return host.kept_scales(value, kind)

    def global_of(linear: Linear) -> np.ndarray:
        info = source.tensors[linear.key("global_scale")]
        value = source.read(info.key).reshape(()).astype(np.float32)
        host.check_positive(value, info.where(), "it")
        return np.float32(1) / value if kind.divisor else value

    data, scale = source.tensors[first.data], source.tensors[first.key("scale")]
    return _tree(
        Leaf(
            (*lead, *data.stored_shape),
            np.dtype(np.uint8) if kind.packed else data.numpy_dtype,
            lambda index: stack(lambda linear: source.read(linear.data), index),
        ),
        Leaf((*lead, *scale.stored_shape), host.scale_dtype(kind), lambda index: stack(scale_of, index)),
        Leaf(lead, FLOAT32, lambda index: stack(global_of, index)) if kind.global_scale is not None else None,
        _format(source, kind),
        first.shape[-1],
    )


def _shared(source: Source, linears: Sequence[Linear], dtype, dequantize) -> Any:
    kind = linears[0].kind
    if kind is not None:
        q = linear_qtensor(source, linears)
        return decoded(q, kind, dequantize) if dequantize is not None else q
    parts = [param(source, linear.data, dtype) for linear in linears]
    if len(parts) == 1:
        return parts[0]
    shape = (len(parts), *parts[0].shape)
    return Leaf(shape, parts[0].dtype, lambda index: np.stack([p.read(index[1:]) for p in parts[index[0]]]))


def _biases(source: Source, block: MoEBlock, slots, dtype) -> tuple[Any, Any]:
    if block.fused_bias is None:
        return None, None
    first, second = block.fused_bias
    f, d = source.moe_config.intermediate_size, source.moe_config.hidden_size
    kept = dtype or source.tensors[first].numpy_dtype

    def gate_up(e: int, index: Index) -> np.ndarray:
        value = source.read(first, (slice(e, e + 1),))[0]
        parts = [value[0::2], value[1::2]] if source.family.interleaved else np.split(value, 2)
        return np.stack(parts)[index]

    def down(e: int, index: Index) -> np.ndarray:
        return source.read(second, (slice(e, e + 1), *index))[0]

    return stacked((len(slots), 2, f), kept, slots, gate_up), stacked((len(slots), d), kept, slots, down)


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
            f"layer={layer!r} of {source.name} has no MoE block; those that have one are {', '.join(map(str, blocks))}."
        )
    block = blocks[layer]
    num_experts = source.moe_config.num_experts
    slots: Sequence[int] = range(num_experts)
    if placement is not None and placement.num_experts != num_experts:
        raise ValueError(
            f"placement is for {placement.num_experts} experts, {source.name} has {num_experts}; make one for them."
        )
    if placement is not None:
        slots = [int(s) for s in np.asarray(placement.slots).reshape(-1)]
    shared, shared_type = block.shared, dequantize if dequantize_shared == "same" else dequantize_shared
    static: Any = (None, None) if dequantize is not None else _static_scales(source, block, slots, static_scales)
    bias = _biases(source, block, slots, dtype)
    optional: Any = lambda key, dtype: None if key is None else param(source, key, dtype)  # noqa: E731
    return MoEParams(
        router=optional(block.router, dtype),
        router_bias=optional(block.router_bias, dtype),
        correction_bias=optional(block.correction_bias, FLOAT32),
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
