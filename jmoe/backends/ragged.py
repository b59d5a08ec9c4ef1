"""Ragged all-to-all: only the rows in use travel, so the bytes on the link follow the routing, not the capacity.

Received rows lie where the fixed-capacity all-to-all puts them (source * C + slot), which makes the two
interchangeable; slots in which nothing was sent are zeros, or the fill row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jmoe import payload
from jmoe.plan import Plan
from pallas_kernels.all_to_all import ragged_all_to_all

from .base import Backend, Exchange


class Ragged(Backend):
    """Only rows in use travel; they arrive where `TwoSided` puts them. See the module."""

    name = "deepep_high_throughput"
    aliases = ("ragged",)
    portable = "ragged all-to-all"

    def plan(self, ids: jax.Array, ex: Exchange, *, rank_mask: jax.Array | None = None) -> Plan:
        plan = super().plan(ids, ex, rank_mask=rank_mask)
        return dataclasses.replace(plan, received=self.exchange_counts(plan, ex))  # once for all directions

    def send(self, x: jax.Array, plan: Plan, ex: Exchange, *, fill: jax.Array | None = None) -> jax.Array:
        if fill is None:
            return super().send(x, plan, ex)
        return self._exchange(self.fill_slots(x, plan), plan.counts, plan.received, ex, fill)

    def forward(self, buffer: jax.Array, plan: Plan, ex: Exchange) -> jax.Array:
        return self._exchange(buffer, plan.counts, plan.received, ex)

    def give_back(self, y: jax.Array, plan: Plan, ex: Exchange) -> jax.Array:
        shape = (ex.num_ranks, ex.capacity, y.shape[-1])
        return self._exchange(y, plan.received, plan.counts, ex).reshape(shape)

    def _exchange(self, rows, send_counts, recv_counts, ex: Exchange, fill: jax.Array | None = None) -> jax.Array:
        """Slice r of the rows [R * C, W], `send_counts[r]` rows from r * C on, to this rank's region at rank r."""
        width = rows.shape[-1]
        rows = rows.reshape(-1, width)
        if ex.axis_name is None or rows.size == 0:
            return rows
        empty = jnp.zeros((width,), rows.dtype) if fill is None else jnp.asarray(fill, rows.dtype)
        output = jnp.broadcast_to(empty[None, :], rows.shape)
        starts = jnp.arange(ex.num_ranks, dtype=jnp.int32) * ex.capacity
        mine = jnp.broadcast_to(ex.rank() * ex.capacity, (ex.num_ranks,))
        return ragged_all_to_all(rows, output, starts, send_counts, mine, recv_counts, axis_name=ex.axis_name)

    def round_hidden(self, hidden: int, wire: str) -> int:
        """Rows of whole 512-byte units, as DeepEP's normal kernels take them: 2880 bfloat16 become 3072."""
        layout = payload.row_layout(hidden, wire, 0)
        rounded = -(-layout.data_bytes // 512) * 512
        return rounded * hidden // layout.data_bytes if layout.columns == hidden else layout.columns
