"""What the Blackwell kernel can do. It compiles to machine code without spills, and the interpreter agrees with the
reference, but nobody has run it on a Blackwell GPU yet: it serves only those who name it.

Letters: M rows, K contraction, N columns, G groups.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import compat
from ..quantize import FORMATS, QTensor, dequantize
from .schedule import tile_schedule

_HALF = ("bfloat16", "float16")
_OUT = (*_HALF, "float32")


def why_not(problem) -> str | None:
    """Why this kernel cannot do a Problem, or None."""
    if not compat.KERNELS_SUPPORTED:
        return compat.KERNELS_REASON
    capability = problem.compute_capability
    if problem.platform not in ("gpu", "cuda") or capability is None or capability.split(".")[0] != "10":
        where = problem.platform + (f" {capability}" if capability else "")
        return f"the kernel is for NVIDIA GPUs of compute capability 10.x (compiled, not yet run), this is {where}"
    if problem.op == "drhs":
        return "the gradient of the weights is left to the other implementations"
    if problem.out not in _OUT:
        return f"out_dtype={problem.out}: the kernel writes {', '.join(_OUT)}"
    if problem.n % 64 or problem.k % 64 or problem.n < 128 or problem.k < 128:
        return f"N={problem.n}, K={problem.k}: the kernel takes multiples of 64 from 128 on"
    x, w = FORMATS.get(problem.x), FORMATS.get(problem.w)
    if w is None:
        if problem.w not in _HALF:
            return f"w is {problem.w}: the kernel takes {', '.join(_HALF)}, or a block format on both sides"
        return None if x or problem.x in _HALF else f"x is {problem.x}: the kernel takes {', '.join(_HALF)}"
    if problem.op == "dlhs":
        return "gradients through quantised weights are left to the other implementations"
    if x is None or (x.element, x.scale, x.block) != (w.element, w.scale, w.block) or w.scale == "f32":
        return (
            f"x is {problem.x} and w {problem.w}: with block scales the matrix unit takes the same elements and scales "
            "on both sides, MXFP8, MXFP4 or NVFP4"
        )
    return None


def _run(x, w, group_sizes, group_offset, out_dtype, *, transposed: bool, **options) -> jax.Array:
    from .mosaic_blackwell_sm100 import BLOCK_M, BOX, BlackwellConfig, grouped_matmul

    m, n = x.shape[0], w.shape[2 if transposed else 1]
    if m == 0 or w.shape[0] == 0:
        return jnp.zeros((m, n), out_dtype)
    rows = max(m, BOX)
    if rows > m:
        pad = lambda a: jnp.pad(a, ((0, rows - m), *((0, 0),) * (a.ndim - 1))) if a.ndim else a  # noqa: E731
        x = jax.tree.map(pad, x)
    block_n = 128 if isinstance(w, QTensor) or n < 256 else 256
    schedule = tile_schedule(
        group_sizes, num_rows=rows, block=BLOCK_M, group_offset=group_offset, num_weights=w.shape[0]
    )
    config = BlackwellConfig(block_n)
    out = grouped_matmul(
        x,
        w,
        schedule,
        config=config,
        out_dtype=jnp.dtype(out_dtype),
        transposed=transposed,
        **options,
    )
    return out[:m]


def forward(x, w, group_sizes, *, group_offset=None, out_dtype, zero_tail=True, interpret=None) -> jax.Array:
    """As portable.grouped_matmul; activations in block formats are dequantised where the weights are floats."""
    if not isinstance(w, QTensor):
        x = dequantize(x, w.dtype) if isinstance(x, QTensor) else x
        w = w.astype(x.dtype)
    how = dict(zero_tail=zero_tail, interpret=interpret)
    return _run(x, w, group_sizes, group_offset, out_dtype, transposed=False, **how)


def dlhs(dy, w, group_sizes, *, group_offset=None, out_dtype, interpret=None) -> jax.Array:
    """As portable.grouped_matmul_dlhs, for float weights."""
    w = w.astype(dy.dtype)
    return _run(dy, w, group_sizes, group_offset, out_dtype, transposed=True, interpret=interpret)
