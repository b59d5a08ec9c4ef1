"""From activations to what travels: casting, quantising, and the one scale that all ranks of a per-tensor format share.

T tokens on one rank, D hidden size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.payload import RowLayout
from pallas_kernels.quantize import QTensor, dequantize, exact, get_format, quantize
from pallas_kernels.quantize.reference import encode_scale


def shared_global_scale(x: jax.Array, fmt: str, axis_name: str | None) -> jax.Array:
    """The decode scale of a per-tensor format for the rows of all ranks together: float32 [], equal on every rank."""
    bits = exact.magnitude(exact.f32_bits(x))
    amax = jnp.max(jnp.where(bits < exact.INF, bits, jnp.uint32(0)), initial=0).astype(jnp.int32)
    if axis_name is not None:
        amax = lax.pmax(amax, axis_name)
    encode = encode_scale(amax.astype(jnp.uint32), get_format(fmt).e4m3_max)
    return exact.exact_div(jnp.ones_like(encode), encode)


def uniform_global_scale(scales: jax.Array, axis_name: str | None) -> jax.Array:
    """One decode scale for all experts of all ranks, the largest of the ranks' own: float32 [].

    A sender does not know which expert will read a row, so scales of single experts cannot be used before the exchange.
    """
    largest = jnp.max(scales.astype(jnp.float32))
    return largest if axis_name is None else lax.pmax(largest, axis_name)


def encode_rows(
    x: jax.Array | QTensor, layout: RowLayout, *, axis_name: str | None, global_scale: jax.Array | None = None
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


def decode_rows(x: jax.Array | QTensor, dtype) -> jax.Array:
    """The float rows [N, D] that received rows stand for."""
    return dequantize(x, dtype) if isinstance(x, QTensor) else x.astype(dtype)
