"""What the Triton kernels can do; they are loaded only when one of them is called, because jax-triton is optional.

On an H200, at (M, K, N, G) = (8192, 4096, 3072, 32) in BF16: 403 us (512 TFLOP/s), where the Hopper kernel took 388 us
and `lax.ragged_dot` 8862 us in the same run; MXFP8, MXFP4 and NVFP4 weights 646 to 736 us, FP8 in blocks of 128 887 us.

Letters: M rows, K contraction, N columns, G groups.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..optional_triton import missing as missing
from ..quantize import FORMATS, QTensor, dequantize
from . import portable

_HALF = ("bfloat16", "float16")
_OUT = (*_HALF, "float32")
OLDEST = (8, 0)  # compute capability; BF16 on the matrix unit and asynchronous copies begin there


def why_not(problem) -> str | None:
    """Why these kernels cannot do a Problem, or None."""
    capability = problem.compute_capability
    if problem.platform not in ("gpu", "cuda") or capability is None:
        return f"the Triton kernels are for NVIDIA GPUs, this is {problem.platform}"
    if tuple(map(int, capability.split("."))) < OLDEST:
        return f"the Triton kernels need compute capability 8.0, this is {capability}"
    if missing():
        return missing()
    if problem.out not in _OUT:
        return f"out_dtype={problem.out}: the kernels write {', '.join(_OUT)}"
    x, w = FORMATS.get(problem.x), FORMATS.get(problem.w)
    if x is None and problem.x not in _HALF:
        return f"x is {problem.x}: the kernels take {', '.join(_HALF)} or a block format"
    if w is None:
        return (
            None if problem.w in _HALF else f"w is {problem.w}: the kernels take {', '.join(_HALF)} or a block format"
        )
    if problem.op == "drhs":
        return None
    if problem.x == "float16":
        return "x is float16 and w quantised: the kernels take bfloat16 with quantised weights"
    if w.scale == "f32" and w.block_rows == 1:
        return "w has a scale for each row and 128 columns; the kernels take fp8_128x128 weights"
    return None


def _half(x, like) -> jax.Array:
    return dequantize(x, like) if isinstance(x, QTensor) else x


def forward(x, w, group_sizes, *, zero_tail: bool = True, **options) -> jax.Array:
    """As portable.grouped_matmul. Activations in block formats are dequantised to BF16 first."""
    del zero_tail  # always written
    from . import triton_sm80

    x = _half(x, jnp.bfloat16 if isinstance(w, QTensor) else w.dtype)
    return triton_sm80.forward(x, w, group_sizes, **options)


def dlhs(dy, w, group_sizes, **options) -> jax.Array:
    """As portable.grouped_matmul_dlhs, and left to it where w has a global scale for each output column."""
    if isinstance(w, QTensor) and w.global_scale is not None and w.global_scale.ndim == 2:
        return portable.grouped_matmul_dlhs(dy, w, group_sizes, **options)
    from . import triton_sm80

    return triton_sm80.dlhs(dy, w, group_sizes, **options)


def drhs(dy, x, group_sizes, **options) -> jax.Array:
    """As portable.grouped_matmul_drhs."""
    from . import triton_sm80

    return triton_sm80.drhs(dy, _half(x, dy.dtype), group_sizes, **options)
