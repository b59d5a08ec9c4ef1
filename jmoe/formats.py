"""The number formats of jmoe: the names that configurations use, what each costs, and how good it is.

Quantising itself is in `pallas_kernels.quantize`; its public names are re-exported here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.quantize import FORMATS as FORMATS
from pallas_kernels.quantize import BlockFormat as BlockFormat
from pallas_kernels.quantize import FourOverSix as FourOverSix
from pallas_kernels.quantize import QTensor as QTensor
from pallas_kernels.quantize import dequantize as dequantize
from pallas_kernels.quantize import get_format as get_format
from pallas_kernels.quantize import quantize as quantize
from pallas_kernels.quantize import quantize_weights as quantize_weights
from pallas_kernels.quantize import swizzle_scales as swizzle_scales
from pallas_kernels.quantize import unswizzle_scales as unswizzle_scales

PLAIN_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}  # unquantised wire dtypes


def wire_names() -> tuple[str, ...]:
    """Names of everything a row can travel as: the plain dtypes and the formats with one scale row per data row."""
    return (*PLAIN_BYTES, *(name for name, fmt in FORMATS.items() if fmt.block_rows == 1))


def row_bytes(name: str | BlockFormat, k: int) -> int:
    """Bytes of one row of k values: data, block scales, and a float32 row scale where the format has one per token.

    A tensor-wide scale is one number for the whole array and not counted. ValueError for an unknown name and for weight
    formats, whose scales are shared by 128 rows.
    """
    if isinstance(name, str) and name in PLAIN_BYTES:
        return PLAIN_BYTES[name] * k
    if isinstance(name, str) and name not in FORMATS:
        raise ValueError(f"Wire format {name!r} is not known; choose one of {', '.join(wire_names())}.")
    fmt = get_format(name)
    if fmt.block_rows > 1:
        raise ValueError(
            f"{fmt.name!r} shares scales between {fmt.block_rows} rows, so that one row has no size of its own; "
            f"choose one of {', '.join(wire_names())}."
        )
    return fmt.data_bytes(k) + fmt.num_scales(k) * fmt.scale_bytes + (4 if fmt.global_scale == "token" else 0)


def bits_per_value(name: str | BlockFormat) -> float:
    """Bits of one value with its share of the block scale, e.g. 8.25 for MXFP8 and 4.5 for NVFP4."""
    if isinstance(name, str) and name in PLAIN_BYTES:
        return 8.0 * PLAIN_BYTES[name]
    fmt = get_format(name)
    return fmt.bits + 8 * fmt.scale_bytes / (fmt.block * fmt.block_rows)


def describe(name: str | BlockFormat | None) -> str:
    """One line about a format, for people."""
    if name is None or (isinstance(name, str) and name in PLAIN_BYTES):
        plain = name or "bfloat16"
        return f"{plain}, unquantised, {8 * PLAIN_BYTES[plain]} bits per value"
    fmt = get_format(name)
    block = f"{fmt.block_rows}x{fmt.block}" if fmt.block_rows > 1 else str(fmt.block)
    scale = "float32" if fmt.scale == "f32" else fmt.scale.upper()
    parts = [f"{fmt.element.upper()} values", f"{scale} scale per {block}"]
    if fmt.pow2:
        parts[-1] += " (a power of two)"
    if fmt.scale == "e8m0" and fmt.rule == "floor":
        parts[-1] += " rounded down (OCP)"
    if fmt.global_scale:
        parts.append(f"float32 scale per {fmt.global_scale}")
    if fmt.four_over_six:
        parts.append(f"4-over-6 by {fmt.four_over_six.error}, scales up to {fmt.four_over_six.e4m3_max}")
    return f"{', '.join(parts)}, {bits_per_value(fmt):.4g} bits per value"


def sqnr(x: ArrayLike, y: ArrayLike) -> float:
    """Signal-to-quantisation-noise ratio of y against x in dB, over the whole array, in float64; inf where equal.

    ValueError for arrays of different shapes.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.shape != y.shape:
        raise ValueError(f"sqnr compares arrays of one shape, got {x.shape} and {y.shape}.")
    noise = np.sum((x - y) ** 2)
    return float("inf") if noise == 0 else float(10 * np.log10(np.sum(x**2) / noise))
