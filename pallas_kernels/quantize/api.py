"""The public entry points; each picks an implementation.

"reference" is plain XLA and runs everywhere. "mosaic_sm90" is one Pallas kernel (two for a tensor-wide scale that is
taken from the data); it needs JAX >= 0.11 and an NVIDIA GPU of compute capability 9.0 or later, and columns in
multiples of 16. "triton" needs jax-triton and a GPU of compute capability 8.0, and only quantises. None takes the first
kernel on CUDA that can, else the reference. All give the same bytes.

tests/gpu holds every path of the kernel to the reference on a GPU, tests/test_quantize_programs.py on the host.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from .. import compat
from ..choice import on_cuda
from ..optional_triton import missing
from . import exact, reference
from .formats import BlockFormat, get_format
from .qtensor import QTensor

IMPLEMENTATIONS = ("reference", "mosaic_sm90", "triton")
MAX_ROW_UNITS = 8 * 512  # 16-column units of a row that a per-token kernel keeps in registers: 65536 columns


def quantize(
    x: jax.Array,
    fmt: str | BlockFormat,
    *,
    global_scale: jax.Array | None = None,
    alignment: int = 0,
    layout: Literal["row_major", "swizzled"] = "row_major",
    num_valid_rows: jax.Array | None = None,
    implementation: str | None = None,
) -> QTensor:
    """Quantise x [..., K] (bfloat16, float16 or float32) over its last axis.

    fmt: a name in FORMATS or a BlockFormat. global_scale: decode scale g for formats that have one, () or a leading
    part of x.shape[:-1] ("tensor"), x.shape[:-1] ("token"); None computes it from the data. alignment: columns are
    padded with zeros to a multiple of this (0: not). layout: order of the block scales, "row_major" or "swizzled"
    (one-byte scales). num_valid_rows: int32 scalar; rows (of the flattened leading axes) from there on need not be
    quantised, their content is unspecified and they do not count in a tensor-wide maximum.
    implementation: None picks the best one, else one of IMPLEMENTATIONS.
    Raises ValueError for a format, shape, dtype or implementation that cannot be used, and says what can.
    The derivative is zero: give layers a custom_vjp.
    """
    fmt = get_format(fmt)
    reference.check_quantize(x, fmt, global_scale, layout)
    columns = reference.padded_size(x.shape[-1], fmt, alignment)
    plain = functools.partial(reference.quantize, fmt=fmt, alignment=alignment, layout=layout)
    why = _quantize_obstacle(x.shape, fmt, global_scale)
    if layout == "swizzled" and x.ndim > 2:
        why = why or "it swizzles the scales of one matrix at a time, not of a stack"
    args = {"x": lax.stop_gradient(x)}
    if global_scale is not None:
        args["global_scale"] = jnp.asarray(global_scale, jnp.float32)
    if num_valid_rows is not None:
        args["num_valid_rows"] = jnp.asarray(num_valid_rows, jnp.int32)

    def kernel(args):
        return _quantize_kernel(fmt, columns, layout, **args)

    def triton_kernel(args):
        from . import triton_sm80

        options = {name: value for name, value in args.items() if name != "x"}
        return triton_sm80.quantize(args["x"], fmt, layout=layout, **options)

    triton = triton_obstacle(x.shape, fmt, columns), triton_kernel
    return _pick(implementation, why, kernel, lambda args: plain(**args), args, triton)


def gather_quantize(
    x: jax.Array, indices: jax.Array, fmt: str | BlockFormat, *, implementation: str | None = None
) -> QTensor:
    """Quantise the rows x[indices] of x [N, K] without forming them; indices int32 [M] outside 0..N-1 give zero rows.

    For formats without a tensor-wide scale (a gather does not change the others' bytes). ValueError otherwise.
    """
    fmt = get_format(fmt)
    reference.check_quantize(x, fmt, None, "row_major")
    if x.ndim != 2 or indices.ndim != 1 or not fmt.row_local:
        raise ValueError(
            f"gather_quantize of {fmt.name!r} with x {x.shape} and indices {indices.shape}: x is [N, K], indices [M], "
            "and the format has scales of its own for each row; quantise first and gather the QTensor otherwise."
        )
    columns = reference.padded_size(x.shape[-1], fmt, 0)

    def plain(args):
        x, indices = args["x"], args["indices"]
        inside = (indices >= 0) & (indices < x.shape[0])
        if not x.shape[0]:
            return reference.quantize(jnp.zeros((indices.shape[0], x.shape[1]), x.dtype), fmt)
        rows = jnp.take(x, jnp.where(inside, indices, 0), axis=0, mode="clip")
        return reference.quantize(jnp.where(inside[:, None], rows, jnp.zeros((), x.dtype)), fmt)

    def kernel(args):
        return _quantize_kernel(fmt, columns, "row_major", args["x"], indices=args["indices"])

    why = _quantize_obstacle((indices.shape[0], x.shape[1]), fmt, None) or ("x has no rows" if not x.shape[0] else None)
    args = {"x": lax.stop_gradient(x), "indices": indices.astype(jnp.int32)}
    return _pick(implementation, why, kernel, plain, args)


def swiglu_quantize(
    gate_up: jax.Array,
    fmt: str | BlockFormat,
    *,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    num_valid_rows: jax.Array | None = None,
    implementation: str | None = None,
) -> QTensor:
    """Quantise act(gate) * up for gate_up [M, 2F] (gate in the first F columns), computed in float32.

    activation: "silu", or "swiglu_oai": clip(g, max=limit) * sigmoid(alpha*g) * (clip(u, -limit, limit) + 1). The
    kernel takes exponentials from the hardware, so that values may differ in their last bits and a code by one step.
    Returns a QTensor of [M, F]. Raises ValueError for another activation or shape, and for a format with a tensor-wide
    scale.
    """
    fmt = get_format(fmt)
    reference.check_quantize(gate_up, fmt, None, "row_major")
    if activation not in ("silu", "swiglu_oai"):
        raise ValueError(f"activation={activation!r}: choose 'silu' or 'swiglu_oai', or apply it before `quantize`.")
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or not fmt.row_local:
        raise ValueError(
            f"swiglu_quantize of {fmt.name!r} with gate_up {gate_up.shape}: it is [M, 2F], and the format has scales "
            "of its own for each row; use `quantize` on the product otherwise."
        )
    width = gate_up.shape[1] // 2
    args = {"x": lax.stop_gradient(gate_up)}
    if num_valid_rows is not None:
        args["num_valid_rows"] = jnp.asarray(num_valid_rows, jnp.int32)

    def plain(args):
        gate, up = (part.astype(jnp.float32) for part in jnp.split(args["x"], 2, axis=1))
        if activation == "swiglu_oai":
            gate, up = jnp.minimum(gate, jnp.float32(limit)), jnp.clip(up, -limit, limit) + jnp.float32(1)
            act = gate * jax.nn.sigmoid(jnp.float32(alpha) * gate)
        else:
            act = jax.nn.silu(gate)
        return reference.quantize(act * up, fmt, num_valid_rows=args.get("num_valid_rows"))

    def kernel(args):
        return _quantize_kernel(
            fmt, width, "row_major", k=width, activation=activation, alpha=alpha, limit=limit, **args
        )

    why = _quantize_obstacle((gate_up.shape[0], width), fmt, None)
    return _pick(implementation, why, kernel, plain, args)


def quantize_rows(
    x: jax.Array,
    fmt: str | BlockFormat,
    tail: jax.Array,
    *,
    row_bytes: int,
    scale_offset: int,
    tail_offset: int,
    row_scale_offset: int | None = None,
    columns: int | None = None,
    global_scale: jax.Array | None = None,
    num_valid_rows: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Quantise x [M, K] straight into packed rows uint8 [M, row_bytes]: data, block scales, row scale, tail.

    Data is at offset 0, the row's block scales (row-major) at scale_offset, the float32 row scale of per-token formats
    at row_scale_offset. tail: int32 [M, W] (ids, bit-cast weights), copied to tail_offset; it ends at or before the
    row's end. Offsets of 4-byte parts and row_bytes are multiples of 4; row_bytes is one of 16. Gaps are zero.
    columns: K padded (None: K). global_scale: () decode scale, which formats with a tensor-wide scale must be given; it
    is not written. Rows from num_valid_rows on are unspecified.
    Raises ValueError for offsets that overlap, and for a tensor-wide format without global_scale.
    """
    from .packed import quantize_rows_reference, rows_layout

    fmt = get_format(fmt)
    reference.check_quantize(x, fmt, global_scale, "row_major")
    columns = columns or reference.padded_size(x.shape[-1], fmt, 0)
    rows = rows_layout(
        fmt,
        columns,
        row_bytes=row_bytes,
        scale_offset=scale_offset,
        row_scale_offset=row_scale_offset,
        tail_offset=tail_offset,
        tail_words=tail.shape[-1],
    )
    if fmt.global_scale == "tensor" and (global_scale is None or jnp.shape(global_scale)):
        raise ValueError(
            f"quantize_rows with {fmt.name!r} needs global_scale of shape (): a row does not carry the scale of its "
            "tensor, so that sender and receiver must share it."
        )
    if x.ndim != 2 or tail.shape[:-1] != x.shape[:1] or tail.dtype != jnp.int32:
        raise ValueError(
            f"quantize_rows takes x [M, K] and tail int32 [M, W], got {x.shape}, {tail.shape} {tail.dtype}."
        )
    args = {"x": lax.stop_gradient(x), "tail": tail}
    if global_scale is not None:
        args["global_scale"] = jnp.asarray(global_scale, jnp.float32)
    if num_valid_rows is not None:
        args["num_valid_rows"] = jnp.asarray(num_valid_rows, jnp.int32)

    def kernel(args):
        return _quantize_kernel(fmt, columns, "row_major", packed=rows, **args)

    def plain(args):
        return quantize_rows_reference(fmt, columns, rows, **args)

    why = _quantize_obstacle(x.shape, fmt, None)
    return _pick(implementation, why, kernel, plain, args)


def dequantize(
    q: QTensor, dtype: jax.typing.DTypeLike = jnp.bfloat16, *, implementation: str | None = None
) -> jax.Array:
    """The array [..., k] of `dtype` that q stands for, rounded once from float32.

    Raises ValueError for what is no QTensor, a dtype that is no float, or an implementation that cannot do it.
    """
    if not isinstance(q, QTensor):
        raise ValueError(f"dequantize got a {type(q).__name__}; it takes a QTensor, as quantize returns it.")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dequantize gives floats, such as bfloat16, and was asked for {jnp.dtype(dtype)}.")
    fmt, why = q.format, None
    if fmt.block_rows > 1:
        why = f"{fmt.name!r} shares scales between rows"
    elif q.k % 16 or jnp.dtype(dtype).name not in ("bfloat16", "float16", "float32"):
        why = f"it takes columns in multiples of 16 and gives bfloat16, float16 or float32, not {q.k} and {dtype}"
    elif q.layout == "swizzled" and q.data.ndim > 2:
        why = "it reads the swizzled scales of one matrix at a time, not of a stack"
    else:
        why = kernel_obstacle()
    return _pick(
        implementation, why, lambda q: _dequantize_kernel(q, dtype), lambda q: reference.dequantize(q, dtype), q
    )


# ---- choosing


@functools.lru_cache(maxsize=1)
def _gpu_capability() -> float | None:
    """Compute capability of the process's first GPU; None without one (a program may still be compiled for one)."""
    try:
        return float(jax.devices("gpu")[0].compute_capability)
    except (RuntimeError, AttributeError, ValueError):
        return None


def kernel_obstacle(capability: float | None = None) -> str | None:
    """Why no kernel runs on a GPU of this compute capability (None: this process's first GPU); None where one can."""
    if not compat.KERNELS_SUPPORTED:
        return compat.KERNELS_REASON
    capability = _gpu_capability() if capability is None else capability
    if capability is not None and capability < 9.0:
        return f"it needs a GPU of compute capability 9.0 or later (this one has {capability})"
    return None


def _quantize_obstacle(shape, fmt: BlockFormat, global_scale) -> str | None:
    """Why the kernel cannot quantise an array of this shape; None where it can."""
    if fmt.block_rows > 1:
        return f"{fmt.name!r} shares scales between rows"
    if shape[-1] % 16 or shape[-1] == 0:
        return f"it takes columns in multiples of 16, not {shape[-1]}"
    if math.prod(shape) // 16 >= 1 << 31:
        return f"it counts 16-column units in 31 bits, {shape} has more"
    if fmt.global_scale == "token" and global_scale is not None:
        return "it computes per-token scales and does not take them"
    if fmt.global_scale == "token" and shape[-1] > 16 * MAX_ROW_UNITS:
        return f"it keeps a row of at most {16 * MAX_ROW_UNITS} columns in registers, not {shape[-1]}"
    return kernel_obstacle()


def triton_obstacle(shape, fmt: BlockFormat, columns: int, capability: float | None = None) -> str | None:
    """Why the Triton kernel cannot quantise an array of this shape to `columns` columns; None where it can.

    capability: of the GPU (None: of this process's first one).
    """
    capability = _gpu_capability() if capability is None else capability
    if capability is None or capability < 8.0:
        return "it needs a GPU of compute capability 8.0 or later"
    if fmt.block_rows > 1 or fmt.four_over_six:
        return f"it does not quantise to {fmt.name!r}"
    if columns != shape[-1] or columns % fmt.block or math.prod(shape) == 0:
        return f"it takes whole blocks of {fmt.block} columns and no padding, not {shape} padded to {columns} columns"
    return missing()


def _pick(implementation, why: str | None, kernel, plain, args, triton=("it only quantises", None)):
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation={implementation!r} is not known; choose None or one of {', '.join(IMPLEMENTATIONS)}."
        )
    if implementation == "triton" or (implementation is None and why and triton[0] is None):
        why, kernel = triton
    if implementation not in (None, "reference") and why:
        raise ValueError(f"implementation={implementation!r} cannot do this: {why}; use 'reference' or None.")
    if implementation == "reference" or why:
        return plain(args)
    return on_cuda(kernel, plain, args, always=implementation is not None)


# ---- operands of the kernels


def _quantize_kernel(
    fmt: BlockFormat,
    columns: int,
    layout: Literal["row_major", "swizzled"],
    x: jax.Array,
    *,
    global_scale=None,
    num_valid_rows=None,
    indices=None,
    tail=None,
    packed=None,
    k: int | None = None,
    activation=None,
    alpha=1.0,
    limit=0.0,
):
    from . import mosaic_sm90

    *lead, width = x.shape
    source_rows = math.prod(lead)
    rows = source_rows if indices is None else indices.shape[0]
    k = k or width
    matrices = 1 if global_scale is None else global_scale.size
    task = mosaic_sm90.Task(
        fmt,
        rows,
        source_rows,
        k,
        columns,
        x.dtype.name,
        width,
        swizzled=layout == "swizzled",
        gather=indices is not None,
        counted=num_valid_rows is not None,
        activation=activation,
        alpha=alpha,
        limit=limit,
        packed=packed,
        scale_rows=max(rows // max(matrices, 1), 1),
        from_data=global_scale is None,
    )
    task = mosaic_sm90.tuned(task)
    operands = {"x": x.reshape(source_rows, width)}
    if indices is not None:
        operands["index"] = indices
    if num_valid_rows is not None:
        operands["count"] = num_valid_rows.reshape(1)
    g = None
    if fmt.global_scale == "tensor":
        if global_scale is None:
            top = mosaic_sm90.run_maxima(task, operands) if rows else jnp.uint32(0)
            s = reference.encode_scale(top, fmt.e4m3_max)
            g = exact.exact_div(jnp.ones_like(s), s)
            operands["tensor"] = top.reshape(1)
        else:
            g = global_scale
            operands["tensor"] = g.reshape(matrices)
    if tail is not None and packed is not None:
        words = (packed.row_bytes - packed.tail_offset) // 4
        operands["tail"] = jnp.pad(tail, ((0, 0), (0, words - tail.shape[1])))
    if rows == 0:
        out = mosaic_sm90.empty(task)
    else:
        out = mosaic_sm90.run_quantize(task, operands)
    if packed is not None:
        return out["data"]
    lead = tuple(lead) if indices is None else (rows,)
    scale = out["scale"] if layout == "swizzled" else out["scale"].reshape(*lead, out["scale"].shape[-1])
    if fmt.global_scale == "token":
        g = out["row_scale"].reshape(lead)
    return QTensor(out["data"].reshape(*lead, out["data"].shape[-1]), scale, g, fmt, k, layout)


def _dequantize_kernel(q: QTensor, dtype):
    from . import mosaic_sm90

    *lead, last = q.data.shape
    rows, columns, fmt = math.prod(lead), last * 8 // q.format.bits, q.format
    if rows == 0:
        return jnp.zeros(q.shape, dtype)
    matrices = q.global_scale.size if fmt.global_scale == "tensor" and q.global_scale is not None else 1
    task = mosaic_sm90.Task(
        fmt,
        rows,
        rows,
        q.k,
        columns,
        jnp.dtype(dtype).name,
        q.k,
        swizzled=q.layout == "swizzled",
        scale_rows=rows // matrices,
    )
    operands = {"data": q.data.reshape(rows, last), "scale": q.block_scale}
    if q.global_scale is not None:
        operands["row_scale"] = q.global_scale.reshape(-1)
    return mosaic_sm90.run_dequantize(mosaic_sm90.tuned(task, decode=True), operands).reshape(q.shape)
