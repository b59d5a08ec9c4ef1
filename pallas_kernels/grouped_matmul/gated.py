"""Gate and up projection with what stands between them and the down projection, in one kernel where one can.

`gated_matmul` gives act(gate) * up, `gated_matmul_quantize` that in the format of the down projection's input.

Letters: M rows, K contraction, F columns of each projection, G groups.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..quantize import BlockFormat, QTensor, get_format
from . import mosaic_entry
from .api import problem_of
from .gate import Gate


def gated_obstacle(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor,
    *,
    bias: bool = False,
    out_dtype=None,
    implementation: str | None = None,
) -> str | None:
    """Why `gated_matmul` cannot take these, or is slower than the two steps apart; None where it is the way to go.

    implementation: the one asked for; only "mosaic_sm90" has the fused kernel, and who names it gets it slower too.
    """
    if implementation not in (None, "mosaic_sm90"):
        return f"implementation={implementation!r} has no kernel that joins gate and up"
    m, k, groups, n = x.shape[0], x.shape[1], w.shape[0], w.shape[2]
    problem = problem_of("forward", m, n, k, groups, x, w, _dtype(x, out_dtype))
    reason = mosaic_entry.why_not_gated(problem, bias=bias)
    return mosaic_entry.slower_gated(problem) if reason is None and implementation is None else reason


def _dtype(x, out_dtype):
    return out_dtype or (jnp.float32 if isinstance(x, QTensor) else x.dtype)


def gated_matmul(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor,
    group_sizes: jax.Array,
    gate: Gate,
    *,
    bias: jax.Array | None = None,
    group_offset: jax.Array | None = None,
    out_dtype=None,
    zero_tail: bool = True,
) -> jax.Array:
    """gate(w[g, 0] @ x[m] + bias[g, 0]) * (w[g, 1] @ x[m] + bias[g, 1]) for g, the group of row m; all in float32.

    Arguments: as of `grouped_matmul`, but w [G, 2, F, K] holds gate and up; bias: [G, 2, F] or None.

    Returns: [M, F]; rows of no group are zero (see zero_tail). Neither gate nor up is written to memory, nor rounded.
    There is no gradient.

    Raises ValueError with the reason of `gated_obstacle` where it cannot: compute the projections apart there.
    """
    reason = gated_obstacle(x, w, bias=bias is not None, out_dtype=out_dtype, implementation="mosaic_sm90")
    if reason is not None:
        raise ValueError(f"gated_matmul cannot do this: {reason}; use grouped_matmul and gated_product.")
    how: Any = dict(bias=bias, group_offset=group_offset, out_dtype=_dtype(x, out_dtype), zero_tail=zero_tail)
    return mosaic_entry.gated(x, w, group_sizes, gate, **how)


def gated_quantize_obstacle(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor,
    gate: Gate,
    fmt: str | BlockFormat,
    *,
    bias: bool = False,
    implementation: str | None = None,
) -> str | None:
    """Why `gated_matmul_quantize` cannot take these; None where it can. The arguments are those of `gated_obstacle`.

    It is the faster way, us of the two steps | of one on an H200, 65536 rows: 653 | 458 (K=2048, F=768, 128 groups),
    4562 | 3387 (K=7168, F=2048, 32 groups).
    """
    if implementation not in (None, "mosaic_sm90"):
        return f"implementation={implementation!r} has no kernel that joins gate and up"
    m, k, groups, n = x.shape[0], x.shape[1], w.shape[0], w.shape[2]
    problem = problem_of("forward", m, n, k, groups, x, w, _dtype(x, None))
    return mosaic_entry.why_not_gated_quantize(problem, gate, get_format(fmt), bias=bias)


def gated_matmul_quantize(
    x: QTensor,
    w: QTensor,
    group_sizes: jax.Array,
    gate: Gate,
    fmt: str | BlockFormat,
    *,
    group_offset: jax.Array | None = None,
    zero_tail: bool = True,
) -> QTensor:
    """`gated_matmul`'s float32 result quantised to fmt, [M, F]: FP8 throughout, for many rows per group.

    Arguments: as of `gated_matmul`; x "fp8_128", w "fp8_128x128", fmt "fp8_128" or one that decodes alike. Rows of no
    group have the codes and scales of zero rows (see zero_tail).

    Neither gate and up nor their product is written to memory. Exponentials are the hardware's, as in
    `swiglu_quantize`. There is no gradient.

    Raises ValueError with the reason of `gated_quantize_obstacle` where it cannot.
    """
    fmt = get_format(fmt)
    reason = gated_quantize_obstacle(x, w, gate, fmt, implementation="mosaic_sm90")
    if reason is not None:
        raise ValueError(f"gated_matmul_quantize cannot do this: {reason}; use grouped_matmul and swiglu_quantize.")
    return mosaic_entry.gated_quantize(x, w, group_sizes, gate, fmt, group_offset=group_offset, zero_tail=zero_tail)
