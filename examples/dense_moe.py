"""A Mixture-of-Experts layer as many Flax models have it: every expert computes every token, and the weights of experts
that a token did not choose are zero.

The arithmetic is E/K times what is needed, nothing is exchanged, and every chip holds every expert. With a handful of
tiny experts on one GPU that is nevertheless the fastest way, which is why `train.py --dense-experts` uses it; the
arrays have the names and shapes of `jmoe.nn.MoE`, so the two take each other's weights.

Letters: T tokens, D hidden, F expert width, E experts, K experts per token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jmoe.config import MoEConfig
from jmoe.formats import dequantize, quantize
from jmoe.router import MoEStats, route, router_logits, router_stats, summarize


def straight_through(x: jax.Array, fmt: str) -> jax.Array:
    """x as it looks after a trip in the block format `fmt`; the gradient passes as if nothing had happened."""
    rounded = dequantize(quantize(jax.lax.stop_gradient(x), fmt), x.dtype)
    return jax.lax.stop_gradient(rounded) + (x - jax.lax.stop_gradient(x))


class DenseMoE(nnx.Module):
    """Attributes: router [E, D], gate_up [E, 2, F, D] (0 gate, 1 up), down [E, D, F]. SiLU-gated experts without
    biases.
    """

    def __init__(self, config: MoEConfig, *, param_dtype=jnp.float32, rngs: nnx.Rngs):
        d, f, e = config.hidden_size, config.intermediate_size, config.num_experts
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=())
        self.router = nnx.Param(init(rngs.params(), (e, d), param_dtype))
        self.gate_up = nnx.Param(init(rngs.params(), (e * 2 * f, d), param_dtype).reshape(e, 2, f, d))
        self.down = nnx.Param(init(rngs.params(), (e * d, f), param_dtype).reshape(e, d, f))
        self.config = config

    def __call__(self, x: jax.Array, *, valid: jax.Array | None = None) -> jax.Array:
        """x [..., D] -> [..., D]."""
        return self.call_with_stats(x, valid=valid)[0]

    def call_with_stats(self, x: jax.Array, *, valid: jax.Array | None = None) -> tuple[jax.Array, MoEStats]:
        c, rows = self.config, x.reshape(-1, x.shape[-1]).astype(self.config.jnp_dtype)  # [T, D]
        mask = None if valid is None else valid.reshape(-1)
        logits = router_logits(rows, self.router[...])
        routing = route(logits, c.router, top_k=c.num_experts_per_tok, valid=mask)
        chosen = routing.ids[:, :, None] == jnp.arange(c.num_experts, dtype=jnp.int32)[None, None, :]  # [T, K, E]
        weights = jnp.where(chosen, routing.weights[:, :, None], 0.0).sum(axis=1).astype(rows.dtype)  # [T, E]
        if c.quant.activations is not None:
            rows = straight_through(rows, c.quant.activations)
        gate_up = jnp.einsum("td,epfd->tepf", rows, self.gate_up[...].astype(rows.dtype))
        hidden = jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1] * weights[:, :, None]  # [T, E, F]
        y = jnp.einsum("tef,edf->td", hidden, self.down[...].astype(rows.dtype))
        stats = router_stats(logits, routing.ids, c.router, valid=mask)
        return y.reshape(x.shape).astype(x.dtype), summarize(stats, jnp.int32(0))
