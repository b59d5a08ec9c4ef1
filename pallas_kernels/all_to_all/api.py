"""ragged_all_to_all: `jax.lax.ragged_all_to_all` that runs on every platform and has the right derivative.

T rows of the operand on one rank, M rows of the output, R ranks, S slices (S a multiple of R; slice i goes to rank
i // (S / R), so a rank may send several slices to each peer, for example one for each expert).
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import compat
from ..choice import batchable
from .reference import ragged_all_to_all_reference

Implementation = Literal["reference", "lax", "mosaic"]
IMPLEMENTATIONS: tuple[str, ...] = ("reference", "lax", "mosaic")
MAX_RANKS = 8  # GPUs of one process whose memory XLA maps for a kernel
MAX_ROW_BYTES = 100 * 1024  # two rows must fit in a block's shared memory
_NARROW = (jnp.bool_, jnp.float4_e2m1fn, jnp.int4, jnp.uint4)


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    axis_index_groups: None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Exchanges slices of rows whose sizes are known only at run time. Signature and meaning of lax.ragged_all_to_all.

    Args:
      operand: [T, ...] rows to send. output: [M, ...] of the same dtype and trailing shape; rows that no slice covers
        keep their values.
      input_offsets, send_sizes: int [S], where each slice starts in `operand` and how many rows it has (0 is ordinary).
      output_offsets: int [S], where the slice starts in the *receiver's* output.
      recv_sizes: int [S], rows of the slices that arrive here, ordered by source; the all_to_all of send_sizes.
      axis_name: the mesh axis (or axes) to exchange over, inside shard_map. axis_index_groups: must be None.
      implementation: "lax" (XLA's operation; not on CPU), "reference" (all-gather and a masked gather), "mosaic"
        (remote writes between the GPUs of one process), or None: the reference on CPU, and on GPUs the kernel where
        `kernel_reason` names no obstacle, else lax's.
    Returns:
      [M, ...]. Slices must not overlap in an output. Differentiable in operand and output; slices of operand that
      overlap may be sent but not differentiated (their cotangents would have to be added).
    Raises ValueError for shapes and dtypes that do not fit, and for an implementation that cannot serve them.
    """
    if axis_index_groups is not None:
        raise ValueError(
            "axis_index_groups is not supported; the exchange spans the whole axis. Give the groups an axis of their "
            "own in the mesh and pass its name."
        )
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is not known; choose one of {', '.join(map(repr, IMPLEMENTATIONS))}, "
            "or None to let the platform decide."
        )
    _check(operand, output, (input_offsets, send_sizes, output_offsets, recv_sizes))
    tables = tuple(t.astype(jnp.int32) for t in (input_offsets, send_sizes, output_offsets, recv_sizes))
    return _exchange(axis_name, implementation, operand.shape[0], operand, output, *tables)


def kernel_reason(operand: jax.Array, axis_name, num_ranks: int) -> str | None:
    """Why the remote-write kernel cannot exchange rows like `operand`; None where it can."""
    if not compat.KERNELS_SUPPORTED:
        return compat.KERNELS_REASON
    if jax.process_count() > 1:
        return "it reaches the GPUs of one process only, and there are several processes"
    capability = getattr(jax.devices()[0], "compute_capability", None)  # None where there is no GPU
    if capability is not None and float(capability) < 9:
        return f"it needs GPUs of compute capability 9.0 or newer, these have {capability}"
    if not isinstance(axis_name, str):
        return f"it exchanges over one mesh axis, not over {axis_name}"
    if num_ranks < 2:
        return "one rank has no peers"
    if num_ranks > MAX_RANKS:
        return f"it serves at most {MAX_RANKS} ranks, the axis has {num_ranks}"
    row_bytes = math.prod(operand.shape[1:]) * operand.dtype.itemsize
    if row_bytes == 0 or row_bytes % 16 or row_bytes > MAX_ROW_BYTES or operand.dtype in _NARROW:
        return f"rows of {row_bytes} bytes of {operand.dtype}: it takes multiples of 16 up to {MAX_ROW_BYTES}"
    return None


def _kernel(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    from . import mosaic_ragged

    del recv_sizes
    if operand.shape[0] == 0 or output.shape[0] == 0:
        return output
    rows, into = operand.reshape(operand.shape[0], -1), output.reshape(output.shape[0], -1)
    out = mosaic_ragged.ragged_push(
        rows,
        into,
        input_offsets,
        send_sizes,
        output_offsets,
        axis_name=axis_name,
        num_ranks=lax.axis_size(axis_name),
    )
    return out.reshape(output.shape)


def _check(operand, output, tables) -> None:
    if operand.dtype != output.dtype or operand.shape[1:] != output.shape[1:]:
        raise ValueError(
            f"operand {operand.dtype}{operand.shape} and output {output.dtype}{output.shape} must agree in dtype and "
            "in all axes but the first; make the output for the operand."
        )
    shapes = {t.shape for t in tables}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise ValueError(
            f"Offsets and sizes have shapes {[t.shape for t in tables]}; each must be [slices], of equal length. "
            "Flatten them."
        )
    for t in tables:
        if not jnp.issubdtype(t.dtype, jnp.integer):
            raise ValueError(f"Offsets and sizes must be integers, got {t.dtype}; cast them to int32.")


def _run(axis_name, implementation, operand, output, *tables):
    num_ranks = lax.axis_size(axis_name)
    if tables[0].shape[0] % num_ranks:
        raise ValueError(
            f"{tables[0].shape[0]} slices do not divide among {num_ranks} ranks; give the same number of slices for "
            "every rank, empty ones with size 0."
        )
    reference = functools.partial(ragged_all_to_all_reference, axis_name=axis_name)
    xla = functools.partial(lax.ragged_all_to_all, axis_name=axis_name)
    kernel = functools.partial(_kernel, axis_name=axis_name)
    reason = kernel_reason(operand, axis_name, num_ranks)
    if implementation == "mosaic" and reason is not None:
        raise ValueError(
            f'implementation="mosaic" of ragged_all_to_all cannot serve this: {reason}. Use None or "lax".'
        )
    if num_ranks == 1 and implementation is None:
        return reference(operand, output, *tables)
    if implementation is not None:
        return {"reference": reference, "lax": xla, "mosaic": kernel}[implementation](operand, output, *tables)

    if reason is None:
        compat.refuse_varying("ragged_all_to_all", (operand, output, *tables))

    # JAX cannot map a ragged all-to-all over an axis of its operands, nor a kernel; the reference can be.
    def plain(args):
        return reference(*args)

    default = batchable(lambda args: xla(*args), plain)
    gpu = default if reason else batchable(lambda args: kernel(*args), plain)
    return lax.platform_dependent((operand, output, *tables), cpu=plain, cuda=gpu, default=default)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _exchange(axis_name, implementation, num_rows, operand, output, *tables):
    del num_rows
    return _run(axis_name, implementation, operand, output, *tables)


def _exchange_fwd(axis_name, implementation, num_rows, operand, output, *tables):
    return _exchange(axis_name, implementation, num_rows, operand, output, *tables), tables


def _exchange_bwd(axis_name, implementation, num_rows, tables, ct):
    input_offsets, send_sizes, output_offsets, recv_sizes = tables
    swap = functools.partial(lax.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0, tiled=True)
    arrived = swap(output_offsets)  # where the slices that came here start in this rank's output
    source = swap(input_offsets)  # where they started at their senders
    zeros = jnp.zeros((num_rows, *ct.shape[1:]), ct.dtype)
    d_operand = _run(axis_name, implementation, ct, zeros, arrived, recv_sizes, source, send_sizes)
    d_output = jnp.where(_covered(arrived, recv_sizes, ct), jnp.zeros((), ct.dtype), ct)
    no_grad = np.zeros(input_offsets.shape, jax.dtypes.float0)
    return d_operand, d_output, no_grad, no_grad, no_grad, no_grad


def _covered(starts, sizes, like):
    """bool [M, 1, ...]: rows that some slice covers. Counts of openings less closings; empty slices cancel."""
    rows = like.shape[0]
    edges = jnp.zeros((rows + 1,), jnp.int32)
    edges = edges.at[starts].add(1, mode="drop").at[starts + sizes].add(-1, mode="drop")
    return (jnp.cumsum(edges)[:rows] > 0).reshape(-1, *([1] * (like.ndim - 1)))


_exchange.defvjp(_exchange_fwd, _exchange_bwd)
