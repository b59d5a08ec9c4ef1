"""One rank: nothing moves. R = 1, C = T, and received row t is token t."""

from __future__ import annotations

import jax

from jmoe.plan import Plan

from .base import Backend, Exchange


class Local(Backend):
    """One rank: rows stay where they are, in the order of the tokens."""

    name = "local"
    aliases = ("none",)
    plan_form = "gathered"
    portable = "nothing (one rank)"
    max_ranks = 1

    def capacity(self, tokens, *, num_ranks, num_local, top_k, factor):
        return tokens

    def forward(self, buffer: jax.Array, plan: Plan, ex: Exchange) -> jax.Array:
        return buffer.reshape(-1, buffer.shape[-1])

    def give_back(self, y: jax.Array, plan: Plan, ex: Exchange) -> jax.Array:
        return y.reshape(1, -1, y.shape[-1])

    def fill_slots(self, x, plan, *, fill=None):
        return x[None]  # every token has its slot: no gather

    def collective_sum(self, y, ex):
        return y

    def memory(self, layout, ex, *, combine_row_bytes=None):
        return {"dispatch_send": 0, "dispatch_receive": 0, "combine_send": 0, "combine_receive": 0}
