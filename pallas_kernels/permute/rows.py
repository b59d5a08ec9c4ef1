"""Moving rows into expert order and back. Gathers in both directions, also in the gradients: no floating-point scatter.

Letters: N rows, K experts per row, M places in expert order, D columns.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ..quantize import QTensor
from .sort import scatter_to_places


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] along the first axis, zeros where index is -1."""
    if x.shape[0] == 0:
        return jnp.zeros((*index.shape, *x.shape[1:]), x.dtype)
    taken = jnp.take(x, jnp.maximum(index, 0), axis=0, mode="clip")
    keep = (index >= 0).reshape(index.shape + (1,) * (x.ndim - 1))
    return jnp.where(keep, taken, jnp.zeros((), x.dtype))


@jax.custom_vjp
def _gather(x, source, position):
    del position
    return _take(x, source)


def _gather_fwd(x, source, position):
    return _gather(x, source, position), position


def _gather_bwd(position, dy):
    dx = jnp.zeros((position.shape[0], *dy.shape[1:]), jnp.float32)
    for k in range(position.shape[1]):
        dx = dx + _take(dy, position[:, k]).astype(jnp.float32)
    return dx.astype(dy.dtype), None, None


_gather.defvjp(_gather_fwd, _gather_bwd)


Rows = TypeVar("Rows", jax.Array, QTensor)


def gather_rows(x: Rows, source: jax.Array, position: jax.Array) -> Rows:
    """Rows in expert order: x [N, D] -> [M, D], zeros where source is -1.

    Arguments:
        x: float array, or a row-wise QTensor, of which every part is moved (the values of padding rows are never read).
        source: int32 [M], position: int32 [N, K], both of `sort_by_expert`.

    The gradient of a row is the float32 sum over its K places, in their order. A QTensor is a constant.
    """
    if not isinstance(x, QTensor):
        return _gather(x, source, position)
    if x.format.block_rows != 1 or x.layout != "row_major":
        raise ValueError(
            f"Rows of a QTensor with format {x.format.name!r} and layout={x.layout!r} cannot be moved one by one; it "
            "takes a format with scales for each row and layout='row_major': dequantise or unswizzle it first."
        )
    scale = x.global_scale
    return dataclasses.replace(
        x,
        data=_take(x.data, source),
        block_scale=_take(x.block_scale, source),
        global_scale=_take(scale, source) if scale is not None and scale.ndim else scale,
    )


def _rounded(product: jax.Array, place: jax.Array) -> jax.Array:
    """The float32 product itself, as a value of its own that cannot be contracted with a sum into one FMA.

    XLA:CPU contracts in some lanes of a vector loop and not in others, through selects too, so that a row's last bit
    would depend on where the row lies. Adding an integer zero that no compiler knows (places are -1 .. 2^30) prevents
    it; of two bits, because a zero of one bit becomes a select again.
    """
    zero = lax.shift_right_logical(place + 1, 30)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(product, jnp.int32) + zero, jnp.float32)


@jax.custom_vjp
def combine_rows(y: jax.Array, position: jax.Array, weights: jax.Array) -> jax.Array:
    """Weighted sum of each row's results: y [M, D], position int32 [N, K], weights [N, K] -> float32 [N, D].

    out[n] = sum over k of weights[n, k] * y[position[n, k]], in the order of k, in float32; places of -1 add nothing,
    whatever their weight is. Deterministic; differentiable in y and weights.
    """
    out = jnp.zeros((position.shape[0], y.shape[1]), jnp.float32)
    for k in range(position.shape[1]):
        place = position[:, k, None]
        term = weights[:, k, None].astype(jnp.float32) * _take(y, position[:, k]).astype(jnp.float32)
        out = out + jnp.where(place >= 0, _rounded(term, place), 0)
    return out


def _combine_fwd(y, position, weights):
    return combine_rows(y, position, weights), (y, position, weights)


def _combine_bwd(residuals, dout):
    y, position, weights = residuals
    n, k = position.shape
    flat = position.reshape(-1)
    entry = scatter_to_places(jnp.arange(n * k, dtype=jnp.int32), flat, y.shape[0])  # [M]
    weight = _take(weights.reshape(-1), entry).astype(jnp.float32)
    row = jnp.where(entry >= 0, entry // max(k, 1), -1)
    dy = (weight[:, None] * _take(dout, row)).astype(y.dtype)
    columns = [jnp.sum(dout * _take(y, position[:, j]).astype(jnp.float32), axis=1) for j in range(k)]
    dw = jnp.stack(columns, axis=1) if columns else jnp.zeros((n, 0), jnp.float32)
    dw = jnp.where(position >= 0, dw, 0)  # a gradient that is NaN belongs to its own row only
    return dy, None, dw.astype(weights.dtype)


combine_rows.defvjp(_combine_fwd, _combine_bwd)
