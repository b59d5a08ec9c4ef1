"""The shared expert: a dense gated MLP that every token passes through, on the token's own rank.

Letters: T tokens, D hidden, Fs the shared expert's width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantize import QTensor, dequantize

from ..config import MoEConfig
from .activation import gated_activation


def _linear(x: jax.Array, w: jax.Array | QTensor) -> jax.Array:
    """x [T, in] by w [.., out, in] -> float32 [T, .., out]; x's dtype decides how the operands are rounded."""
    w = dequantize(w, x.dtype) if isinstance(w, QTensor) else w.astype(x.dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (w.ndim - 1,)), ((), ()))
    return lax.dot_general(x, w, dims, precision=precision, preferred_element_type=jnp.float32)


def shared_expert(
    x: jax.Array,
    gate_up: jax.Array | QTensor,
    down: jax.Array | QTensor,
    config: MoEConfig,
    *,
    gate: jax.Array | None = None,
) -> jax.Array:
    """x [T, D], gate_up [2, Fs, D], down [D, Fs] -> float32 [T, D] (or hidden_size_unpadded columns).

    gate: [D]; the output is multiplied by sigmoid(x @ gate) (Qwen2-MoE). A QTensor is dequantised.
    ValueError if `gate` is given for a configuration without shared_gate, or missing for one with it.
    """
    if (gate is not None) != config.shared_gate:
        raise ValueError(
            f"shared_gate={config.shared_gate}, but gate is {'missing' if gate is None else 'given'}; the gate [D] "
            "goes with config.shared_gate=True and only with it."
        )
    x = x.astype(config.jnp_dtype)
    hidden = _linear(x, gate_up)  # [T, 2, Fs]
    hidden = gated_activation(hidden[:, 0], hidden[:, 1], config).astype(x.dtype)
    y = _linear(hidden, down)
    if gate is not None:
        y = y * jax.nn.sigmoid(_linear(x, gate.reshape(1, -1)))
    return y[:, : config.output_size]
