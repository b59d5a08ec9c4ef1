"""What a gated projection does with its two halves, inside a kernel: act(gate) * up in float32.

Written with what Mosaic lowers (no erf, no clip), and the same operations outside of it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

GateKind = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai"]


@dataclasses.dataclass(frozen=True)
class Gate:
    """The product of gate and up: "silu", "gelu" (erf), "gelu_tanh", or "swiglu_oai" with its alpha and clamp limit."""

    kind: GateKind = "silu"
    alpha: float = 1.702
    limit: float = 7.0


def _erf(x: jax.Array) -> jax.Array:
    """Within 1.5e-7 everywhere: Abramowitz and Stegun 7.1.26, in Horner's form."""
    size = jnp.abs(x)
    t = 1.0 / (1.0 + 0.3275911 * size)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = series * jnp.exp(-size * size)
    return jnp.where(x < 0, tail - 1.0, 1.0 - tail)


def gated_product(gate: jax.Array, up: jax.Array, activation: Gate) -> jax.Array:
    """activation(gate) * up in float32."""
    if activation.kind == "swiglu_oai":
        gate = jnp.minimum(gate, activation.limit)
        up = jnp.maximum(jnp.minimum(up, activation.limit), -activation.limit)
        return gate / (1.0 + jnp.exp(-activation.alpha * gate)) * (up + 1.0)
    if activation.kind == "silu":
        return gate / (1.0 + jnp.exp(-gate)) * up
    if activation.kind == "gelu":
        return 0.5 * gate * (1.0 + _erf(gate * 0.7071067811865476)) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return 0.5 * gate * (1.0 + jnp.tanh(inner)) * up
