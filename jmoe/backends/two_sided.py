"""Fixed-capacity all-to-all: C rows for every pair of ranks, through XLA's collective (NCCL on GPUs), on any link."""

from __future__ import annotations

import jax

from jmoe.plan import Plan

from .base import Backend, Exchange


class TwoSided(Backend):
    """C rows for every pair of ranks through `lax.all_to_all`. See the module."""

    name = "nvlink_two_sided"
    aliases = ("flashinfer_nvlink_two_sided", "flashinfer_all2allv")
    portable = "lax.all_to_all"

    def forward(self, buffer: jax.Array, plan: Plan, ex: Exchange) -> jax.Array:
        return self._all_to_all(buffer, ex).reshape(-1, buffer.shape[-1])

    def give_back(self, y: jax.Array, plan: Plan, ex: Exchange) -> jax.Array:
        return self._all_to_all(y.reshape(ex.num_ranks, ex.capacity, y.shape[-1]), ex)
