"""The Hopper kernels behind `grouped_matmul`: what they can do, and which of them does it.

Few rows per group, or quantised weights: mosaic_decode_sm90. FP8 on both sides in blocks of 128: mosaic_fp8_sm90, or
mosaic_fp8_gated_sm90 where what gate and up come to is quantised again. Otherwise mosaic_sm90, and mosaic_drhs_sm90 for
the gradient of the weights. Activations in other block formats are dequantised to BF16 first.

Letters: M rows, K contraction, N columns, G groups.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import compat
from ..quantize import FORMATS, BlockFormat, QTensor, dequantize, quantize
from . import tuning
from .schedule import held_bounds

if TYPE_CHECKING:
    from .gate import Gate

_HALF = ("bfloat16", "float16")
_OUT = (*_HALF, "float32")
#: Up to this many rows per group the weights' bytes are what counts, and the kernel with exchanged operands is faster.
DECODE_ROWS = 64
_GATED_ROWS = 128  # columns of gate and up that a block takes in the gated kernel for few rows
_NUM_SMS = 132


def _family(fmt: BlockFormat) -> str:
    """Formats that differ only in how they were rounded are read in the same way."""
    if fmt.element == "e4m3":
        return {"e8m0": "mxfp8", "f32": "fp8_128x128" if fmt.block_rows == 128 else "fp8_128"}[fmt.scale]
    return {"e8m0": "mxfp4", "e4m3": "nvfp4"}[fmt.scale]


def why_not(problem) -> str | None:
    """Why these kernels cannot do a Problem, or None."""
    if not compat.KERNELS_SUPPORTED:
        return compat.KERNELS_REASON
    if problem.platform not in ("gpu", "cuda") or problem.compute_capability != "9.0":
        where = problem.platform + (f" {problem.compute_capability}" if problem.compute_capability else "")
        return f"the kernels are for NVIDIA GPUs of compute capability 9.0, this is {where}"
    if problem.out not in _OUT:
        return f"out_dtype={problem.out}: the kernels write {', '.join(_OUT)}"
    if problem.n % 64 or problem.k % 64:
        return f"N={problem.n}, K={problem.k}: the kernels take multiples of 64"
    x, w = FORMATS.get(problem.x), FORMATS.get(problem.w)
    if x is None and problem.x not in _HALF:
        return f"x is {problem.x}: the kernels take {', '.join(_HALF)} or a block format"
    if problem.op == "drhs":
        return None if w is not None or problem.w in _HALF else f"x is {problem.w}: the kernels take {', '.join(_HALF)}"
    if w is None:
        return (
            None if problem.w in _HALF else f"w is {problem.w}: the kernels take {', '.join(_HALF)} or a block format"
        )
    if problem.op == "dlhs":
        return "gradients through quantised weights are left to the portable implementation"
    family = _family(w)
    if family == "fp8_128":
        return "w has a scale for each row and 128 columns; the kernels take fp8_128x128 weights"
    return None


def dequantises(problem) -> str | None:
    """The dtype to which `forward` and `gated` dequantise an x in a block format; None where they read it as it is."""
    if problem.x not in FORMATS:
        return None
    if problem.w not in FORMATS:
        return problem.w
    x, w = FORMATS[problem.x], FORMATS[problem.w]
    return None if _reads_fp8(problem.m, problem.k, problem.groups, x, w) else "bfloat16"


def _reads_fp8(m: int, k: int, groups: int, x: BlockFormat, w: BlockFormat) -> bool:
    """Whether the FP8 kernel multiplies these as they are."""
    formats = _family(x) == "fp8_128" and _family(w) == "fp8_128x128"
    return formats and tuning.rows_per_group(m, groups) > DECODE_ROWS and k % 128 == 0


def _half(x: Any, like) -> jax.Array:
    """x as the matrix unit takes it: BF16 from block formats, else the dtype it has."""
    return dequantize(x, like) if isinstance(x, QTensor) else x


def _pad_rows(x: jax.Array, rows: int) -> jax.Array:
    return x if x.shape[0] >= rows else jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))


def _config(kernel: str, cls, weights: str, num_rows: int, num_groups: int, n: int, k: int):
    rows, weight_rows = tuning.rows_per_group(num_rows, num_groups), min(num_rows, num_groups) * n
    return cls(**tuning.lookup(kernel, weights=weights, rows=rows, n=n, k=k, weight_rows=weight_rows))


def forward(x, w, group_sizes, *, group_offset=None, out_dtype, zero_tail=True, interpret=None) -> jax.Array:
    """As portable.grouped_matmul. interpret: run in the interpreter of the GPU backend, for tests without a GPU."""
    m, n = x.shape[0], w.shape[1]
    if m == 0 or w.shape[0] == 0:
        return jnp.zeros((m, n), out_dtype)
    how: dict[str, Any] = dict(zero_tail=zero_tail, interpret=interpret)
    if isinstance(w, QTensor):
        if isinstance(x, QTensor) and _reads_fp8(m, x.k, w.shape[0], x.format, w.format):
            return _fp8(x, w, group_sizes, group_offset, out_dtype, **how)
        return _exchanged(_half(x, jnp.bfloat16), w, group_sizes, group_offset, out_dtype, **how)
    x = _half(x, w.dtype)
    w = w.astype(x.dtype)
    if tuning.rows_per_group(m, w.shape[0]) <= DECODE_ROWS:
        return _exchanged(x, w, group_sizes, group_offset, out_dtype, **how)
    return _direct("prefill", x, w, group_sizes, group_offset, out_dtype, **how)


def _direct(kernel, x, w, group_sizes, group_offset, out_dtype, *, n=None, **options) -> jax.Array:
    from .mosaic_sm90 import BOX, Config, grouped_matmul

    m, k = x.shape
    c = _config(kernel, Config, str(w.dtype), m, w.shape[0], n or w.shape[1], k)
    how: Any = dict(config=c, out_dtype=jnp.dtype(out_dtype), **options)
    return grouped_matmul(_pad_rows(x, BOX), w, group_sizes, group_offset, **how)[:m]


def _exchanged(x, w, group_sizes, group_offset, out_dtype, *, gate=None, bias=None, **options) -> jax.Array:
    from .mosaic_decode_sm90 import DecodeConfig, grouped_matmul_decode
    from .mosaic_dequant import Packed

    (m, k), groups, n = x.shape, w.shape[0], w.shape[-2]
    data: Any = w
    scales, factors, packed, name = None, None, None, str(x.dtype)
    if isinstance(w, QTensor):
        fmt = w.format
        packed, name = Packed(fmt.element, fmt.scale, fmt.block), _family(fmt)
        data, scales = lax.bitcast_convert_type(w.data, jnp.uint8), w.block_scale
        if packed.scales:
            scales = lax.bitcast_convert_type(scales, jnp.uint8)
            scales = jnp.pad(scales, [(0, 0)] * (scales.ndim - 1) + [(0, -scales.shape[-1] % 16)])
            factors = _factors(w)
        # The copies want rows of a multiple of 128 bytes. Others (K = 2880 in MXFP4) are padded here, in every call: as
        # dear as reading all groups twice, but the portable implementation takes 70 us and more for each group.
        data = jnp.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, -data.shape[-1] % 128)])
        x = jnp.pad(x, ((0, 0), (0, data.shape[-1] * packed.per_byte - k))).astype(jnp.bfloat16)
    if not gate:
        data, scales, bias = (None if a is None else a[:, None] for a in (data, scales, bias))
    c = _config("decode_gated" if gate else "decode", DecodeConfig, name, m, groups, n, k)
    c = c.fitted(data.shape[-1] * data.dtype.itemsize).expecting(tuning.rows_per_group(m, groups))
    out = grouped_matmul_decode(
        _pad_rows(x, c.box),
        data,
        group_sizes,
        scales,
        factors,
        None if bias is None else bias.astype(jnp.float32),
        group_offset,
        config=c,
        packed=packed,
        gate=gate,
        out_dtype=jnp.dtype(out_dtype),
        **options,
    )
    return out[:m]


def _factors(w: QTensor) -> jax.Array:
    """The global scales of w [G, N, K] or [G, P, N, K] as [G, P] or [G, P, N]; 1 for G or P where all are alike."""
    scale = jnp.ones((), jnp.float32) if w.global_scale is None else w.global_scale.astype(jnp.float32)
    if len(w.shape) == 3 and scale.ndim == 2:  # [G, N]
        return scale[:, None]
    return scale.reshape(scale.shape + (1,) * (2 - scale.ndim))


def _fp8(x, w, group_sizes, group_offset, out_dtype, **options) -> jax.Array:
    from .mosaic_fp8_sm90 import Fp8Config, grouped_matmul_fp8
    from .mosaic_sm90 import BOX

    m, n = x.shape[0], w.shape[1]
    c = _config("fp8", Fp8Config, "fp8_128x128", m, w.shape[0], n, x.shape[1])
    data, scale = _pad_rows(x.data, BOX), _pad_rows(x.block_scale, BOX)
    how: Any = dict(config=c, out_dtype=jnp.dtype(out_dtype), **options)
    return grouped_matmul_fp8(data, scale, w.data, w.block_scale, group_sizes, group_offset, **how)[:m]


def dlhs(dy, w, group_sizes, *, group_offset=None, out_dtype, interpret=None) -> jax.Array:
    """As portable.grouped_matmul_dlhs, for float weights."""
    if dy.shape[0] == 0 or w.shape[0] == 0:
        return jnp.zeros((dy.shape[0], w.shape[2]), out_dtype)
    w = w.astype(dy.dtype)
    return _direct(
        "dlhs", dy, w, group_sizes, group_offset, out_dtype, n=w.shape[2], transposed=True, interpret=interpret
    )


def drhs(dy, x, group_sizes, *, num_groups: int, group_offset=None, out_dtype, interpret=None) -> jax.Array:
    """As portable.grouped_matmul_drhs."""
    from .mosaic_drhs_sm90 import DrhsConfig, grouped_matmul_drhs

    m, n = dy.shape
    x = _half(x, dy.dtype).astype(dy.dtype)
    if m == 0 or num_groups == 0:
        return jnp.zeros((num_groups, n, x.shape[1]), out_dtype)
    c = _config("drhs", DrhsConfig, str(dy.dtype), m, num_groups, n, x.shape[1])
    rows = max(64, m + -m % 8)
    dy, x = _pad_rows(dy, rows), _pad_rows(x, rows)
    starts, ends = held_bounds(group_sizes, rows, group_offset, num_groups)
    return grouped_matmul_drhs(dy, x, starts, ends, config=c, out_dtype=jnp.dtype(out_dtype), interpret=interpret)


def why_not_gated(problem, *, bias: bool) -> str | None:
    """Why `gated` cannot do a forward Problem whose w is [G, 2, N, K], or None."""
    reason = why_not(problem)
    if reason is not None:
        return reason
    if bias and problem.w in _HALF and tuning.rows_per_group(problem.m, problem.groups) > DECODE_ROWS:
        return "the kernel for many rows per group adds no bias"
    return None


def slower_gated(problem) -> str | None:
    """Why `gated` is slower than the two steps apart, as far as it has been timed (H200); None where it is faster.

    Qwen3-30B-A3B (K=2048, F=768, 128 groups), us of both steps apart | together: BF16 65536 rows 694 | 622, 512 rows
    182 | 181, 8 rows 18 | 23; NVFP4 512 rows 87 | 75.
    """
    w = FORMATS.get(problem.w)
    if w is not None and w.element != "e2m1":
        return f"gate and up of {problem.w} weights have not been timed together"
    if tuning.rows_per_group(problem.m, problem.groups) > DECODE_ROWS:
        return None if w is None else f"many rows and {problem.w} weights have not been timed together"
    waves = min(problem.m, problem.groups) * problem.n / (_GATED_ROWS * _NUM_SMS)
    if math.ceil(waves) > 1.1 * waves:
        return "gate and up together leave too few tiles for all multiprocessors to have an equal share"
    return None


def gated(
    x: Any,
    w: Any,
    group_sizes: jax.Array,
    gate: Gate,
    *,
    bias: jax.Array | None = None,
    group_offset=None,
    out_dtype,
    zero_tail: bool = True,
    interpret=None,
) -> jax.Array:
    """gate(x . w[g, 0] + bias[g, 0]) * (x . w[g, 1] + bias[g, 1]) in one kernel; see `why_not_gated`.

    x [M, K], w [G, 2, F, K], arrays or QTensors, bias [G, 2, F] -> [M, F]. No gradient of its own.
    """
    m, groups, f = x.shape[0], w.shape[0], w.shape[2]
    if m == 0 or groups == 0:
        return jnp.zeros((m, f), out_dtype)
    quantised = isinstance(w, QTensor)
    x = _half(x, jnp.bfloat16 if quantised else w.dtype)
    if not quantised:
        w = w.astype(x.dtype)
    how: dict[str, Any] = dict(zero_tail=zero_tail, interpret=interpret)
    if quantised or tuning.rows_per_group(m, groups) <= DECODE_ROWS:
        return _exchanged(x, w, group_sizes, group_offset, out_dtype, gate=gate, bias=bias, **how)
    if bias is not None:
        raise ValueError("The kernel for many rows per group adds no bias; add it to separate projections.")
    return _direct("gated", x, w, group_sizes, group_offset, out_dtype, n=f, gate=gate, **how)


def why_not_gated_quantize(problem, gate: Gate, fmt: BlockFormat, *, bias: bool) -> str | None:
    """Why `gated_quantize` cannot do a forward Problem whose w is [G, 2, N, K], or None."""
    reason = why_not(problem)
    if reason is not None:
        return reason
    x, w = FORMATS.get(problem.x), FORMATS.get(problem.w)
    if x is None or w is None or not _reads_fp8(problem.m, problem.k, problem.groups, x, w):
        return (
            f"x is {problem.x} [{problem.m}, {problem.k}] and w {problem.w} of {problem.groups} groups: it takes "
            f"fp8_128 and fp8_128x128, K a multiple of 128, and more than {DECODE_ROWS} rows per group"
        )
    if (fmt.element, fmt.scale, fmt.block_rows) != ("e4m3", "f32", 1) or problem.n % fmt.block:
        return f"its result is {fmt.name} of {problem.n} columns: it makes fp8_128 of a multiple of 128"
    if gate.kind not in ("silu", "swiglu_oai") or bias:
        return f"activation {gate.kind!r}, bias={bias}: it computes 'silu' and 'swiglu_oai', and adds no bias"
    if not compat.REGISTERS_MOVE:
        return "its totals need more registers than JAX 0.12 leaves to a warpgroup"
    return None


def gated_quantize(
    x: QTensor,
    w: QTensor,
    group_sizes: jax.Array,
    gate: Gate,
    fmt: BlockFormat,
    *,
    group_offset=None,
    zero_tail: bool = True,
    interpret=None,
) -> QTensor:
    """`gated`, quantised to fmt, in one kernel; see `why_not_gated_quantize`."""
    from .mosaic_fp8_gated_sm90 import GatedFp8Config, gated_matmul_fp8
    from .mosaic_sm90 import BOX

    m, groups, f = x.shape[0], w.shape[0], w.shape[2]
    if m == 0 or groups == 0:
        return quantize(jnp.zeros((m, f), jnp.float32), fmt)
    c = _config("fp8_gated", GatedFp8Config, "fp8_128x128", m, groups, f, x.k)
    data, scale = gated_matmul_fp8(
        _pad_rows(x.data, BOX),
        _pad_rows(x.block_scale, BOX),
        w.data,
        w.block_scale,
        group_sizes,
        group_offset,
        gate=gate,
        fmt=fmt,
        config=c,
        zero_tail=zero_tail,
        interpret=interpret,
    )
    return QTensor(data[:m], scale[:m], None, fmt, f)
