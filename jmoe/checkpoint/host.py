"""Stored numbers on the host: decoding to float32, and refusing scales that cannot be meant.

Everything here is numpy on small pieces (one expert at a time); the formulas are those of `schemes`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .errors import CheckpointError
from .schemes import Kind

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_PAIRS = np.stack([_E2M1[np.arange(256) & 15], _E2M1[np.arange(256) >> 4]], axis=-1)  # [byte, low then high nibble]
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E8M0 = np.ldexp(np.float32(1), np.arange(-127, 128)).astype(np.float32)
_E8M0 = np.append(_E8M0, np.float32(np.nan))


def scales_to_float(scale: np.ndarray) -> np.ndarray:
    """Float32 values of block scales: E4M3, E8M0 (bytes or float8_e8m0fnu), bfloat16 or float32."""
    if scale.dtype == ml_dtypes.float8_e4m3fn:
        return _E4M3[scale.view(np.uint8)]
    if scale.dtype in (np.uint8, ml_dtypes.float8_e8m0fnu):
        return _E8M0[scale.view(np.uint8)]
    return scale.astype(np.float32)


def scale_dtype(kind: Kind) -> np.dtype:
    """The type that block scales have in memory: E4M3, E8M0 bytes, or float32."""
    types = {"nvfp4": ml_dtypes.float8_e4m3fn, "mxfp8": np.uint8, "mxfp4": np.uint8}
    return np.dtype(types.get(kind.format, np.float32))


def kept_scales(scale: np.ndarray, kind: Kind) -> np.ndarray:
    """Stored block scales in the type that they have in memory."""
    kept = scale_dtype(kind)
    return scales_to_float(scale) if kept == np.float32 else scale.view(kept)


def unpack(data: np.ndarray, kind: Kind) -> np.ndarray:
    """Float32 values of the elements [..., K]; packed E2M1 has its even element in the low nibble."""
    if kind.packed:
        return _PAIRS[data.view(np.uint8)].reshape(*data.shape[:-1], data.shape[-1] * 2)
    return _E4M3[data.view(np.uint8)]


def expand_scales(scale: np.ndarray, shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    """Block scales [..., ceil(N/rows), ceil(K/block)] repeated to one for each element of [..., N, K], cropped."""
    out = np.repeat(scale, kind.block, axis=-1)[..., : shape[-1]]
    if kind.block_rows > 1:
        out = np.repeat(out, kind.block_rows, axis=-2)[..., : shape[-2], :]
    return out


def decode(data: np.ndarray, scale: np.ndarray, global_scale: np.ndarray | None, kind: Kind) -> np.ndarray:
    """Float32 [..., N, K] of one stored matrix or a stack; global_scale is the decode scale of each matrix, [...]."""
    value = unpack(data, kind)
    value *= expand_scales(scales_to_float(scale), value.shape, kind)
    if global_scale is not None:
        value *= np.asarray(global_scale, np.float32)[..., None, None]
    return value


def check_positive(values: np.ndarray, where: str, what: str) -> None:
    """CheckpointError unless every value is finite and above zero. For scalars: a zero there is a lost calibration."""
    bad = ~(np.isfinite(values) & (values > 0))
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise CheckpointError(
            f"{where}: {what} holds {float(values[at])!r}{f' at {at}' if at else ''} ({int(bad.sum())} such values); "
            "it must be finite and positive. The checkpoint was not calibrated or is damaged; convert it again."
        )


def check_scales(scale: np.ndarray, where: str, data: np.ndarray, kind: Kind, *, pow2: bool = False) -> None:
    """CheckpointError for block scales that are NaN, infinite or negative, or zero over data that is not.

    data: the elements the scales belong to, as stored. pow2: they must be powers of two (scale_fmt "ue8m0").
    """
    values = scales_to_float(scale)
    bad = ~np.isfinite(values) | np.signbit(values)
    if bad.any():
        check_positive(np.where(bad, values, 1), where, "its block scale")
        raise CheckpointError(f"{where}: holds a block scale of -0; a block scale is never negative.")
    zero = values == 0
    if zero.any():
        elements = np.abs(unpack(data, kind))
        lost = expand_scales(zero, elements.shape, kind) & (elements > 0)
        if lost.any():
            raise CheckpointError(
                f"{where}: {int(zero.sum())} block scales are 0 over elements that are not; the block's weights would "
                "vanish. The checkpoint is damaged; convert it again."
            )
    if pow2 and (np.frexp(values[~zero])[0] != 0.5).any():
        raise CheckpointError(
            f"{where}: holds scales that are not powers of two, though scale_fmt is 'ue8m0'; remove scale_fmt from "
            "quantization_config if they are plain float32 scales."
        )
