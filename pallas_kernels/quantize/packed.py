"""Packed wire rows: data, block scales, row scale and a tail of words in one uint8 row, at given byte offsets."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from . import reference
from .formats import BlockFormat


@dataclasses.dataclass(frozen=True)
class Packed:
    """Byte offsets of a packed row: data at 0, block scales, row scale (or None), tail words up to the end."""

    row_bytes: int
    scale_offset: int
    row_scale_offset: int | None
    tail_offset: int


def rows_layout(
    fmt: BlockFormat,
    columns: int,
    *,
    row_bytes: int,
    scale_offset: int,
    row_scale_offset: int | None,
    tail_offset: int,
    tail_words: int,
) -> Packed:
    """The checked layout. ValueError where the parts overlap, are out of order or not aligned."""
    data, scales = fmt.data_bytes(columns), fmt.num_scales(columns) * fmt.scale_bytes
    parts = [("data", 0, data), ("block scales", scale_offset, scales)]
    if (fmt.global_scale == "token") != (row_scale_offset is not None):
        raise ValueError(
            f"row_scale_offset={row_scale_offset} with {fmt.name!r}: a row carries a scale of its own exactly where "
            "the format has one per token."
        )
    if row_scale_offset is not None:
        parts.append(("row scale", row_scale_offset, 4))
    parts.append(("tail", tail_offset, 4 * tail_words))
    end = 0
    for name, offset, size in parts:
        if offset < end or (name in ("row scale", "tail") or fmt.scale_bytes == 4) and offset % 4:
            raise ValueError(
                f"Packed row of {fmt.name!r}: {name} at byte {offset} with the part before it ending at {end}; the "
                "order is data, block scales, row scale, tail, and 4-byte parts start at multiples of 4."
            )
        end = offset + size
    if row_bytes % 16 or end > row_bytes:
        raise ValueError(f"row_bytes={row_bytes} must be a multiple of 16 and hold the {end} bytes of the parts.")
    return Packed(row_bytes, scale_offset, row_scale_offset, tail_offset)


def _bytes(a: jax.Array) -> jax.Array:
    """[M, ...] -> uint8 [M, bytes]."""
    if a.dtype != jnp.uint8:
        a = lax.bitcast_convert_type(a, jnp.uint8)
    return a.reshape(a.shape[0], -1)


def quantize_rows_reference(
    fmt: BlockFormat, columns: int, rows: Packed, x, tail, global_scale=None, num_valid_rows=None
) -> jax.Array:
    """uint8 [M, row_bytes] by concatenation."""
    x = jnp.pad(x, ((0, 0), (0, columns - x.shape[1])))
    q = reference.quantize(x, fmt, global_scale=global_scale, num_valid_rows=num_valid_rows)
    parts = [(0, _bytes(q.data)), (rows.scale_offset, _bytes(q.block_scale))]
    if rows.row_scale_offset is not None and q.global_scale is not None:
        parts.append((rows.row_scale_offset, _bytes(q.global_scale[:, None])))
    parts.append((rows.tail_offset, _bytes(tail)))
    out, end = [], 0
    for offset, part in (*parts, (rows.row_bytes, jnp.zeros((x.shape[0], 0), jnp.uint8))):
        out += [jnp.zeros((x.shape[0], offset - end), jnp.uint8), part]
        end = offset + part.shape[1]
    # Without the empty ones: in a scan that is differentiated they crash the CPU compiler of JAX 0.11.
    return jnp.concatenate([part for part in out if part.shape[1]], axis=1)
