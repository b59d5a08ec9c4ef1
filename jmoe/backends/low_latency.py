"""Batched form for decoding: each local expert has C slots for every source rank, [E_loc, R * C, row].

Experts read their rows without sorting. A token that has several experts on one rank travels once for each of them, and
its rows come back one by one; the owner applies the routing weights, in order of k.
"""

from __future__ import annotations

import jax

from jmoe import payload
from jmoe.plan import Plan

from .base import Backend, Exchange

# Hidden sizes for which DeepEP's low-latency kernels are compiled.
DEEPEP_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)


class LowLatency(Backend):
    """Batched form: a row for each (token, expert), C slots for each (source, expert). See the module."""

    name = "low_latency"
    aliases = ("deepep_low_latency",)
    form = "batched"
    plan_form = "batched"
    portable = "lax.all_to_all"
    kernel_slot = True

    def capacity(self, tokens, *, num_ranks, num_local, top_k, factor):
        """C slots for each pair of source rank and physical expert."""
        return payload.capacity(tokens, num_ranks * num_local, top_k, factor)

    def forward(self, buffer: jax.Array, plan: Plan, ex: Exchange) -> jax.Array:
        received = self._all_to_all(buffer, ex).reshape(ex.num_ranks, ex.num_local, ex.capacity, buffer.shape[-1])
        return received.swapaxes(0, 1).reshape(ex.num_local, ex.num_ranks * ex.capacity, buffer.shape[-1])

    def give_back(self, y: jax.Array, plan: Plan, ex: Exchange) -> jax.Array:
        by_source = y.reshape(ex.num_local, ex.num_ranks, ex.capacity, y.shape[-1]).swapaxes(0, 1)
        return self._all_to_all(by_source.reshape(ex.num_physical, ex.capacity, y.shape[-1]), ex)

    def round_hidden(self, hidden: int, wire: str) -> int:
        """The next size for which DeepEP's low-latency kernels exist: 2100 becomes 2560; ValueError beyond 8192."""
        for size in DEEPEP_HIDDEN_SIZES:
            if size >= hidden:
                payload.row_layout(size, wire, 0)
                return size
        raise ValueError(
            f"hidden size {hidden} exceeds what backend {self.name!r} is compiled for in DeepEP; sizes are "
            f"{', '.join(map(str, DEEPEP_HIDDEN_SIZES))}. Use 'deepep_high_throughput' or 'nvlink_one_sided' there."
        )
