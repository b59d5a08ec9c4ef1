"""Ragged all-to-all from an all-gather and a masked gather: any platform, any dtype, for tests and small sizes.

Memory and traffic are R times the operand; use it where XLA has no ragged all-to-all (XLA:CPU).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def ragged_all_to_all_reference(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    axis_index_groups: None = None,
) -> jax.Array:
    """The meaning of `jax.lax.ragged_all_to_all`; see `pallas_kernels.all_to_all.ragged_all_to_all`."""
    del recv_sizes, axis_index_groups  # every sender's sizes are gathered
    num_ranks = lax.axis_size(axis_name)
    if output.shape[0] == 0 or operand.shape[0] == 0:
        return output
    me = lax.axis_index(axis_name)
    per_peer = input_offsets.shape[0] // num_ranks
    table = jnp.stack([input_offsets, send_sizes, output_offsets]).astype(jnp.int32)
    gathered = lax.all_gather(table, axis_name)  # [R, 3, slices]
    mine = lax.dynamic_slice_in_dim(gathered, me * per_peer, per_peer, axis=2)  # slices that come here
    begin, size, place = (mine[:, i].reshape(-1, 1) for i in range(3))  # [R * per_peer, 1]
    rows = jnp.arange(output.shape[0], dtype=jnp.int32)[None, :]
    hit = (rows >= place) & (rows < place + size)  # [R * per_peer, M]
    # Slices do not overlap, so at most one hits a row: its number is the index of the first hit.
    which = jnp.argmax(hit, axis=0).astype(jnp.int32)
    source = which // per_peer
    offset = jnp.take(begin[:, 0] - place[:, 0], which, axis=0, mode="clip") + rows[0]
    pool = lax.all_gather(operand, axis_name, tiled=True)  # [R * T, ...]
    taken = jnp.take(pool, source * operand.shape[0] + offset, axis=0, mode="clip")
    found = jnp.any(hit, axis=0).reshape(-1, *([1] * (output.ndim - 1)))
    return jnp.where(found, taken, output)
