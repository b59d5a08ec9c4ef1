"""The public entry points; each picks an implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import reference
from .formats import BlockFormat
from .qtensor import QTensor


def quantize(
    x: jax.Array,
    fmt: str | BlockFormat,
    *,
    global_scale: jax.Array | None = None,
    alignment: int = 0,
    layout: str = "row_major",
    num_valid_rows: jax.Array | None = None,
    implementation: str | None = None,
) -> QTensor:
    """Quantise x [..., K] (bfloat16, float16 or float32) over its last axis.

    fmt: a name in FORMATS or a BlockFormat. global_scale: decode scale g for formats that have one, () or a leading
    part of x.shape[:-1] ("tensor"), x.shape[:-1] ("token"); None computes it from the data. alignment: columns are
    padded with zeros to a multiple of this (0: not). layout: order of the block scales, "row_major" or "swizzled"
    (one-byte scales). num_valid_rows: int32 scalar; rows (of the flattened leading axes) from there on need not be
    quantised, their content is unspecified and they do not count in a tensor-wide maximum.
    implementation: None picks the best one; "reference" is plain XLA.
    Raises ValueError for a format, shape, dtype or implementation that cannot be used, and says what can.
    """
    _check(implementation)
    return reference.quantize(
        x, fmt, global_scale=global_scale, alignment=alignment, layout=layout, num_valid_rows=num_valid_rows
    )


def dequantize(q: QTensor, dtype=jnp.bfloat16, *, implementation: str | None = None) -> jax.Array:
    """The array [..., k] of `dtype` that q stands for, rounded once from float32."""
    _check(implementation)
    return reference.dequantize(q, dtype)


def _check(implementation):
    if implementation not in (None, "reference"):
        raise ValueError(f"implementation={implementation!r} is not known; choose None or 'reference'.")
