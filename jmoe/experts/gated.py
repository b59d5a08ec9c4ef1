"""From the sorted rows to the input of the down projection: gate and up, bias, activation, and their gradient.

Letters: M places in expert order, D hidden, E experts held here, F expert width.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import Gate, gated_matmul, gated_obstacle, grouped_matmul
from pallas_kernels.quantize import QTensor

from ..config import MoEConfig
from .activation import gated_activation
from .bias import group_rows
from .weights import ExpertWeights, flat_gate_up, gate_or_up


def gated_projection(
    rows: jax.Array | QTensor,
    through: jax.Array | None,
    params: ExpertWeights,
    sizes: jax.Array,
    config: MoEConfig,
    *,
    row_weight: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """act(gate) * up of each row with its expert, [M, F] of the layer's dtype, not yet quantised.

    Arguments:
        rows: [M, D] in expert order, array or QTensor. through: [M, D], takes the gradient where rows is a QTensor.
        sizes: int32 [E]. row_weight: float32 [M, 1], multiplies gate and up (before the bias), or None.

    Where one kernel does it all, gate and up are never written to memory; under differentiation they are, because the
    gradient needs them: computing them again would cost more than that.
    """
    apart = functools.partial(_apart, config, implementation)
    w, bias = params.gate_up, params.gate_up_bias
    gate = Gate(config.activation, config.swiglu_alpha, config.swiglu_limit)
    how = dict(bias=bias is not None, out_dtype=config.jnp_dtype, implementation=implementation)
    if row_weight is not None or gated_obstacle(rows, w, gate, **how) is not None:
        return apart(rows, through, w, bias, sizes, row_weight)

    floats = (rows, through, w, bias)
    active = [a is not None and not isinstance(a, QTensor) for a in floats]

    @jax.custom_vjp
    def together(rows, through, w, bias, sizes):
        del through
        return gated_matmul(rows, w, sizes, gate, bias=bias, out_dtype=config.jnp_dtype)

    def forward(*args):
        *floats, sizes = args

        def of_active(*values):
            given = iter(values)
            return apart(*(next(given) if on else a for on, a in zip(active, floats, strict=True)), sizes, None)

        return jax.vjp(of_active, *(a for on, a in zip(active, floats, strict=True) if on))

    def backward(pull, dy):
        grads = iter(pull(dy))
        return *(next(grads) if on else None for on in active), None

    together.defvjp(forward, backward)
    return together(*floats, sizes)


def _apart(config, implementation, rows, through, w, bias, sizes, row_weight):
    """The same in steps: a grouped matmul (two, where a scale of the weights would straddle gate and up), then XLA."""
    dtype, f, num_places = config.jnp_dtype, config.intermediate_size, rows.shape[0]

    def matmul(w):
        return grouped_matmul(rows, w, sizes, straight_through=through, out_dtype=dtype, implementation=implementation)

    flat = flat_gate_up(w)
    if flat is not None:
        hidden = matmul(flat).reshape(num_places, 2, f)
        gate, up = hidden[:, 0], hidden[:, 1]
    else:
        gate, up = (matmul(gate_or_up(w, i)) for i in (0, 1))
    if row_weight is not None:  # the same as weighting the input, and exact for quantised rows too
        gate, up = gate.astype(jnp.float32) * row_weight, up.astype(jnp.float32) * row_weight
    if bias is not None:
        each = group_rows(bias.reshape(sizes.shape[0], -1), sizes, num_places)
        each = each.astype(jnp.float32).reshape(num_places, 2, f)
        gate, up = gate.astype(jnp.float32) + each[:, 0], up.astype(jnp.float32) + each[:, 1]
    return gated_activation(gate, up, config).astype(dtype)
