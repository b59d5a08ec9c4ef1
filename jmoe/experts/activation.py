"""What stands between the two matmuls of a gated expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..config import MoEConfig


def gated_activation(gate: jax.Array, up: jax.Array, config: MoEConfig) -> jax.Array:
    """act(gate) * up, elementwise in float32, for `config.activation`; see MoEConfig."""
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    if config.activation == "silu":
        return jax.nn.silu(gate) * up
    if config.activation in ("gelu", "gelu_tanh"):
        return jax.nn.gelu(gate, approximate=config.activation == "gelu_tanh") * up
    limit = config.swiglu_limit
    gate = jnp.minimum(gate, limit)
    return gate * jax.nn.sigmoid(config.swiglu_alpha * gate) * (jnp.clip(up, -limit, limit) + 1)
