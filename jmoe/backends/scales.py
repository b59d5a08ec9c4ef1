"""From activations to what travels: casting, quantising, and the one scale that all ranks of a per-tensor format share.

T tokens on one rank, D hidden size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.payload import RowLayout, pack
from pallas_kernels.quantize import QTensor, dequantize, exact, get_format, quantize, quantize_rows
from pallas_kernels.quantize.reference import encode_scale

from .base import Axis


def shared_global_scale(x: jax.Array, fmt: str, axis_name: Axis | None) -> jax.Array:
    """The decode scale of a per-tensor format for the rows of all ranks together: float32 [], equal on every rank."""
    bits = exact.magnitude(exact.f32_bits(x))
    amax = jnp.max(jnp.where(bits < exact.INF, bits, jnp.uint32(0)), initial=0).astype(jnp.int32)
    if axis_name is not None:
        amax = lax.pmax(amax, axis_name)
    encode = encode_scale(amax.astype(jnp.uint32), get_format(fmt).e4m3_max)
    return exact.exact_div(jnp.ones_like(encode), encode)


def uniform_global_scale(scales: jax.Array, axis_name: Axis | None) -> jax.Array:
    """One decode scale for all experts of all ranks, the largest of the ranks' own: float32 [].

    A sender does not know which expert will read a row, so scales of single experts cannot be used before the exchange.
    """
    largest = jnp.max(scales.astype(jnp.float32))
    return largest if axis_name is None else lax.pmax(largest, axis_name)


def encode_rows(
    x: jax.Array | QTensor, layout: RowLayout, *, axis_name: Axis | None, global_scale: jax.Array | None = None
) -> tuple[jax.Array | QTensor, jax.Array | None]:
    """x [T, D] in the form that travels: a QTensor as it is, else cast to a float wire or quantised.

    Returns:
      (rows, the global decode scale that receivers need or None). Per-tensor formats take `global_scale`, which must be
      equal on all ranks; None computes it from all ranks' data together (one maximum over the axis).
    """
    fmt = layout.format
    if isinstance(x, QTensor):
        return x, x.global_scale if x.format.global_scale == "tensor" else None
    if fmt is None:
        return x.astype(layout.dtype), None
    if fmt.global_scale != "tensor":
        global_scale = None
    elif global_scale is None:
        global_scale = shared_global_scale(x, layout.wire, axis_name)
    else:
        global_scale = jnp.asarray(global_scale, jnp.float32)
    alignment = layout.columns if layout.columns != layout.hidden else 0
    return quantize(x, fmt, global_scale=global_scale, alignment=alignment), global_scale


def pack_rows(
    x: jax.Array | QTensor,
    ids: jax.Array,
    weights: jax.Array,
    layout: RowLayout,
    *,
    axis_name: Axis | None,
    global_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """`pack` of `encode_rows`: rows as they travel, uint8 [T, row_bytes], and the global decode scale or None.

    A kernel that quantises writes the packed rows itself, so that they are not written twice.
    """
    fmt = layout.format
    if isinstance(x, QTensor) or fmt is None or x.size == 0 or layout.ids_offset == layout.row_bytes:
        payload, global_scale = encode_rows(x, layout, axis_name=axis_name, global_scale=global_scale)
        return pack(payload, ids, weights, layout), global_scale
    if fmt.global_scale != "tensor":
        global_scale = None
    elif global_scale is None:
        global_scale = shared_global_scale(x, layout.wire, axis_name)
    tail = jnp.concatenate([ids.astype(jnp.int32), lax.bitcast_convert_type(weights.astype(jnp.float32), jnp.int32)], 1)
    rows = quantize_rows(
        x,
        fmt,
        tail,
        row_bytes=layout.row_bytes,
        scale_offset=layout.scale_offset,
        row_scale_offset=layout.row_scale_offset if layout.row_scale_bytes else None,
        tail_offset=layout.ids_offset,
        columns=layout.columns,
        global_scale=global_scale,
    )
    return rows, global_scale


def decode_rows(x: jax.Array | QTensor, dtype) -> jax.Array:
    """The float rows [N, D] that received rows stand for."""
    return dequantize(x, dtype) if isinstance(x, QTensor) else x.astype(dtype)
