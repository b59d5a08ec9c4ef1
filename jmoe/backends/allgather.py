"""Every rank sees every token: all-gather of the rows, reduce-scatter of float32 sums. For few ranks, on any link.

Received row r * T + t is token t of rank r, on every rank; tokens without an expert on this rank carry only ids -1.
Moves R * T rows where an all-to-all moves about R * T * (1 - (1 - 1/R)^K); the difference vanishes for K >= R.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.plan import Plan

from .base import Backend, Exchange


class AllGatherReduceScatter(Backend):
    """All-gather of rows, reduce-scatter of float32 sums. See the module."""

    name = "allgather_reducescatter"
    aliases = ("naive", "ag_rs")
    plan_form = "gathered"
    portable = "lax.all_gather and lax.psum_scatter"

    def capacity(self, tokens, *, num_ranks, num_local, top_k, factor):
        """T: an all-gather has room for every row, whatever the factor."""
        return tokens

    def send(self, x: jax.Array, plan: Plan, ex: Exchange, *, fill=None) -> jax.Array:
        if fill is None:
            return super().send(x, plan, ex)
        return self._gather(x, ex)  # every slot is in use

    def fill_slots(self, x, plan, *, fill=None):
        return x[None]  # one copy for all ranks

    def forward(self, buffer: jax.Array, plan: Plan, ex: Exchange) -> jax.Array:
        if buffer.shape[0] == 1:
            return self._gather(buffer[0], ex)
        return self._all_to_all(buffer, ex).reshape(-1, buffer.shape[-1])

    def _gather(self, x: jax.Array, ex: Exchange) -> jax.Array:
        if ex.axis_name is None or ex.num_ranks == 1:
            return x
        if x.size == 0:
            return jnp.zeros((ex.num_ranks * x.shape[0], x.shape[1]), x.dtype)
        return lax.all_gather(x, ex.axis_name, axis=0, tiled=True)

    def give_back(self, y: jax.Array, plan: Plan, ex: Exchange) -> jax.Array:
        return self._all_to_all(y.reshape(ex.num_ranks, -1, y.shape[-1]), ex)

    def collective_sum(self, y: jax.Array, ex: Exchange) -> jax.Array | None:
        if ex.axis_name is None or ex.num_ranks == 1 or y.size == 0:
            return y[: ex.capacity]
        return lax.psum_scatter(y, ex.axis_name, scatter_dimension=0, tiled=True)

    def memory(self, layout, ex, *, combine_row_bytes=None):
        rows = ex.num_ranks * ex.capacity
        back = 4 * layout.hidden if combine_row_bytes is None else combine_row_bytes
        return {
            "dispatch_send": ex.capacity * layout.row_bytes,
            "dispatch_receive": rows * layout.row_bytes,
            "combine_send": rows * back,
            "combine_receive": ex.capacity * back if combine_row_bytes is None else rows * back,
        }
