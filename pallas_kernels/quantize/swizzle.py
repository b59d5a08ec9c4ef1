"""The 128x4 order in which block-scaled matrix units read scales (cuBLAS: "block scaling factors layout").

Byte (m, c) of a scale matrix [M, C] lies at
  (m//128) * ceil(C/4) * 512 + (c//4) * 512 + (m%32) * 16 + ((m%128)//32) * 4 + c%4;
rows are padded to 128 and columns to 4 with zeros, because the units read the padding (0x7F or 0xFF there would be
NaN).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def swizzled_size(m: int, c: int) -> int:
    """Bytes of a swizzled [m, c] scale matrix."""
    return -(-m // 128) * -(-c // 4) * 512


def _as_bytes(s: jax.Array) -> jax.Array:
    if s.dtype.itemsize != 1:
        raise ValueError(
            f"The 128x4 scale order is for one-byte scales (E8M0 or E4M3), got {s.dtype}; keep float32 scales "
            "row-major."
        )
    return s if s.dtype == jnp.uint8 else lax.bitcast_convert_type(s, jnp.uint8)


def swizzle_scales(s: jax.Array) -> jax.Array:
    """[..., M, C] one-byte scales -> [..., ceil(M/128)*ceil(C/4)*512] uint8, padding zero. ValueError for float32."""
    s = _as_bytes(s)
    *lead, m, c = s.shape
    rows, cols = -(-m // 128), -(-c // 4)
    s = jnp.pad(s, [(0, 0)] * len(lead) + [(0, rows * 128 - m), (0, cols * 4 - c)])
    s = jnp.moveaxis(s.reshape(*lead, rows, 4, 32, cols, 4), (-4, -3, -2), (-2, -3, -4))  # rows, cols, 32, 4, 4
    return s.reshape(*lead, rows * cols * 512)


def unswizzle_scales(flat: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Inverse of `swizzle_scales`: [..., bytes] uint8 -> [..., M, C] uint8 for shape (M, C).

    ValueError where the bytes are not those of such scales.
    """
    m, c = shape
    rows, cols = -(-m // 128), -(-c // 4)
    if flat.shape[-1] != swizzled_size(m, c):
        raise ValueError(
            f"Swizzled scales of {m} rows and {c} columns have {swizzled_size(m, c)} bytes, got {flat.shape[-1]}; "
            "pass the shape of the scales before they were swizzled."
        )
    lead = flat.shape[:-1]
    s = jnp.moveaxis(flat.reshape(*lead, rows, cols, 32, 4, 4), (-2, -3, -4), (-4, -3, -2))
    return s.reshape(*lead, rows * 128, cols * 4)[..., :m, :c]
