"""Moving rows into expert order and back. Gathers in both directions, also in the gradients: no floating-point scatter.

On NVIDIA GPUs the kernels of `mosaic_rows` do it, elsewhere XLA, with the same results.

Letters: N rows, K experts per row, M places in expert order, D columns.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ..quantize import QTensor, dequantize
from . import mosaic_rows
from .sort import scatter_to_places
from .thread import environment_obstacle, pick


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] along the first axis, zeros where index is -1."""
    if x.shape[0] == 0:
        return jnp.zeros((*index.shape, *x.shape[1:]), x.dtype)
    taken = jnp.take(x, jnp.maximum(index, 0), axis=0, mode="clip")
    keep = (index >= 0).reshape(index.shape + (1,) * (x.ndim - 1))
    return jnp.where(keep, taken, jnp.zeros((), x.dtype))


def _take_rows(x: jax.Array, source: jax.Array, position: jax.Array, fill: bool, implementation: str | None):
    """x[source] of whole rows; without `fill`, rows where source is -1 may hold anything."""
    places, top_k = source.shape[0], position.shape[1]
    why = mosaic_rows.gather_obstacle(x, places) if x.ndim == 2 else f"x has {x.ndim} axes"
    why = why or environment_obstacle()

    def plain(args):
        return _take(args[0], args[1])

    if fill or not 0 < top_k <= mosaic_rows.MAX_K:
        return pick("gather", implementation, why, lambda a: mosaic_rows.run_gather(*a, fill=fill), plain, (x, source))

    def kernel(args):
        return mosaic_rows.run_spread(args[0], args[2], places=places)

    return pick("spread", implementation, why, kernel, plain, (x, source, position))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(fill, implementation, x, source, position):
    return _take_rows(x, source, position, fill, implementation)


def _gather_fwd(fill, implementation, x, source, position):
    return _gather(fill, implementation, x, source, position), position


def _gather_bwd(fill, implementation, position, dy):
    del fill
    ones = jnp.ones(position.shape, jnp.float32)
    return _combine(dy.dtype.name, implementation, dy, position, ones), None, None


_gather.defvjp(_gather_fwd, _gather_bwd)


Rows = TypeVar("Rows", jax.Array, QTensor)


def gather_rows(
    x: Rows, source: jax.Array, position: jax.Array, *, fill: bool = True, implementation: str | None = None
) -> Rows:
    """Rows in expert order: x [N, D] -> [M, D], zeros where source is -1.

    Arguments:
        x: float array, or a row-wise QTensor, of which every part is moved (the values of padding rows are never read).
        source: int32 [M], position: int32 [N, K], both of `sort_by_expert`.
        fill: False where nobody reads the rows of -1: they may then hold anything, and cost nothing.
        implementation: "mosaic_sm90", "xla" or None for the best that can.

    The gradient of a row is the float32 sum over its K places, in their order. A QTensor is a constant.
    Raises ValueError for a QTensor whose rows do not stand alone.
    """
    if not isinstance(x, QTensor):
        return _gather(fill, implementation, x, source, position)
    _check_rows(x)
    data, block_scale, scale = jax.tree.map(lax.stop_gradient, (x.data, x.block_scale, x.global_scale))
    return dataclasses.replace(  # constants, because the kernel has no derivative
        x,
        data=_take_rows(data, source, position, fill, implementation),
        block_scale=_take_rows(block_scale, source, position, fill, implementation),
        global_scale=_take(scale, source) if scale is not None and scale.ndim else scale,
    )


def gather_dequantized(
    q: QTensor,
    source: jax.Array,
    position: jax.Array,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    straight_through: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`dequantize(q, dtype)` in expert order: q [N, D] -> [M, D]; places where source is -1 may hold anything.

    Each row is read once, quantised, and dequantised once. source, position, implementation: as for `gather_rows`.
    straight_through: the float array [N, D] that q stands for. Its values are not read; its gradient is, for each row,
        the float32 sum over the row's places.
    Raises ValueError for a QTensor whose rows do not stand alone.
    """
    _check_rows(q)
    return _gather_decoded(jnp.dtype(dtype).name, implementation, straight_through, q, source, position)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_decoded(dtype, implementation, straight_through, q, source, position):
    del straight_through

    def kernel(args):
        q, _, position = args
        return mosaic_rows.run_spread_decoded(q, position, places=source.shape[0], dtype=dtype)

    def plain(args):
        q, source, position = args
        return _take_rows(dequantize(q, dtype), source, position, False, implementation)

    why = mosaic_rows.decode_obstacle(q, position, dtype) or environment_obstacle()
    return pick("spread_decoded", implementation, why, kernel, plain, (q, source, position))


def _gather_decoded_fwd(dtype, implementation, straight_through, q, source, position):
    like = None if straight_through is None else jnp.zeros((0,), straight_through.dtype)
    return _gather_decoded(dtype, implementation, straight_through, q, source, position), (position, like)


def _gather_decoded_bwd(dtype, implementation, residuals, dy):
    del dtype
    position, like = residuals
    if like is None:
        return None, None, None, None
    ones = jnp.ones(position.shape, jnp.float32)
    return _combine(like.dtype.name, implementation, dy, position, ones), None, None, None


_gather_decoded.defvjp(_gather_decoded_fwd, _gather_decoded_bwd)


def _check_rows(q: QTensor) -> None:
    if q.format.block_rows != 1 or q.layout != "row_major":
        raise ValueError(
            f"Rows of a QTensor with format {q.format.name!r} and layout={q.layout!r} cannot be moved one by one; it "
            "takes a format with scales for each row and layout='row_major': dequantise or unswizzle it first."
        )


def _rounded(product: jax.Array, place: jax.Array) -> jax.Array:
    """The float32 product itself, as a value of its own that cannot be contracted with a sum into one FMA.

    XLA:CPU contracts in some lanes of a vector loop and not in others, through selects too, so that a row's last bit
    would depend on where the row lies. Adding an integer zero that no compiler knows (places are -1 .. 2^30) prevents
    it; of two bits, because a zero of one bit becomes a select again.
    """
    zero = lax.shift_right_logical(place + 1, 30)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(product, jnp.int32) + zero, jnp.float32)


def _sum_of_rows(y: jax.Array, position: jax.Array, weights: jax.Array, out_dtype: str) -> jax.Array:
    out = jnp.zeros((position.shape[0], y.shape[1]), jnp.float32)
    for k in range(position.shape[1]):
        place = position[:, k, None]
        term = weights[:, k, None].astype(jnp.float32) * _take(y, position[:, k]).astype(jnp.float32)
        out = out + jnp.where(place >= 0, _rounded(term, place), 0)
    return out.astype(out_dtype)


def _weighted_sum(y, position, weights, out_dtype: str, implementation: str | None) -> jax.Array:
    why = mosaic_rows.combine_obstacle(y, position, out_dtype) if y.ndim == 2 else f"y has {y.ndim} axes"
    why = why or environment_obstacle()

    def kernel(args):
        return mosaic_rows.run_combine(*args, out_dtype=out_dtype)

    def plain(args):
        y, position, weights = args
        return _sum_of_rows(y, position, weights, out_dtype)

    return pick("combine", implementation, why, kernel, plain, (y, position, weights))


def combine_rows(
    y: jax.Array,
    position: jax.Array,
    weights: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> jax.Array:
    """Weighted sum of each row's results: y [M, D], position int32 [N, K], weights float32 [N, K] -> [N, D].

    out[n] = sum over k of weights[n, k] * y[position[n, k]], in the order of k, in float32, then cast to `out_dtype`;
    places of -1 add nothing, whatever their weight is. Deterministic; differentiable in y and weights.
    implementation: "mosaic_sm90", "xla" or None for the best that can.
    """
    return _combine(jnp.dtype(out_dtype).name, implementation, y, position, weights.astype(jnp.float32))


class Unsummed(NamedTuple):
    """Rows [N, columns] yet to be summed: row n is `combine_rows` of these, its first `columns` columns.

    y: [M, D], results by place. position: int32 [N, K], -1 for none. weights: float32 [N, K].
    """

    y: jax.Array
    position: jax.Array
    weights: jax.Array
    columns: int

    def summed(self, out_dtype: jax.typing.DTypeLike) -> jax.Array:
        """[N, columns] of `out_dtype`."""
        return combine_rows(self.y, self.position, self.weights, out_dtype=out_dtype)[:, : self.columns]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _combine(out_dtype, implementation, y, position, weights):
    return _weighted_sum(y, position, weights, out_dtype, implementation)


def _combine_fwd(out_dtype, implementation, y, position, weights):
    return _combine(out_dtype, implementation, y, position, weights), (y, position, weights)


def _combine_bwd(out_dtype, implementation, residuals, dout):
    del out_dtype, implementation
    y, position, weights = residuals
    dout = dout.astype(jnp.float32)
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


_combine.defvjp(_combine_fwd, _combine_bwd)
