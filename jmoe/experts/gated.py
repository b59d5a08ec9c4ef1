"""From the sorted rows to the input of the down projection: gate and up, bias, activation, and their gradient.

Letters: M places in expert order, D hidden, E experts held here, F expert width.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import (
    Gate,
    gated_matmul,
    gated_matmul_quantize,
    gated_obstacle,
    gated_quantize_obstacle,
    grouped_matmul,
)
from pallas_kernels.quantize import QTensor, get_format, swiglu_quantize

from ..config import MoEConfig
from .activation import gated_activation
from .bias import group_rows
from .weights import ExpertWeights, flat_gate_up, gate_or_up


def gate_of(config: MoEConfig) -> Gate:
    """The activation, as the kernels take it."""
    return Gate(config.activation, config.swiglu_alpha, config.swiglu_limit)


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

    Rows past the last place may hold anything.

    Arguments:
        rows: [M, D] in expert order, array or QTensor. through: [M, D], takes the gradient where rows is a QTensor.
        sizes: int32 [E]. row_weight: float32 [M, 1], multiplies gate and up (before the bias), or None.

    Where one kernel does it all, gate and up are never written to memory; under differentiation they are, because the
    gradient needs them: computing them again would cost more than that.
    """
    apart = functools.partial(_apart, config, implementation)
    w, bias = params.gate_up, params.gate_up_bias
    gate = gate_of(config)
    how: Any = dict(bias=bias is not None, out_dtype=config.jnp_dtype, implementation=implementation)
    if row_weight is not None or gated_obstacle(rows, w, **how) is not None:
        return apart(rows, through, w, bias, sizes, row_weight)

    def together(rows, through, w, bias, sizes):
        del through
        return gated_matmul(rows, w, sizes, gate, bias=bias, out_dtype=config.jnp_dtype, zero_tail=False)

    def in_steps(rows, through, w, bias, sizes):
        return apart(rows, through, w, bias, sizes, None)

    return joined(together, in_steps, (rows, through, w, bias), sizes)


def joined(together, apart, floats, sizes):
    """together(*floats, sizes), or where a gradient is taken apart(*floats, sizes), which has one.

    floats: arrays; what is None or a QTensor takes no gradient.
    """
    active = [a is not None and not isinstance(a, QTensor) for a in floats]

    def forward(*args):
        *floats, sizes = args

        def of_active(*values):
            given = iter(values)
            return apart(*(next(given) if on else a for on, a in zip(active, floats, strict=True)), sizes)

        return jax.vjp(of_active, *(a for on, a in zip(active, floats, strict=True) if on))

    def backward(pull, dy):
        grads = iter(pull(dy))
        return *(next(grads) if on else None for on in active), None

    joined = jax.custom_vjp(together)
    joined.defvjp(forward, backward)
    return joined(*floats, sizes)


def quantised_projection(
    rows: jax.Array | QTensor,
    through: jax.Array | None,
    params: ExpertWeights,
    sizes: jax.Array,
    config: MoEConfig,
    *,
    row_weight: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[QTensor, jax.Array] | None:
    """`gated_projection` quantised to config.quant.intermediate, and its float form, which takes the gradient.

    Activation and quantisation are one step, or with the matmul one kernel, so that the float form is only made where a
    gradient is taken: elsewhere its values are not there to be read. None where that cannot be done, or where gate, up
    and activation are one kernel.
    """
    fmt, w = config.quant.intermediate, params.gate_up
    plain = row_weight is None and params.gate_up_bias is None and config.activation in ("silu", "swiglu_oai")
    if fmt is None or not plain or not get_format(fmt).row_local:
        return None
    apart = functools.partial(_quantised_apart, config, implementation)
    gate = gate_of(config)
    if gated_quantize_obstacle(rows, w, gate, fmt, implementation=implementation) is None:

        def together(rows, through, w, sizes):
            del through
            q = gated_matmul_quantize(rows, w, sizes, gate, fmt, zero_tail=False)
            return q, jnp.zeros(q.shape, config.jnp_dtype)

        return joined(together, apart, (rows, through, w), sizes)
    how: Any = dict(bias=False, out_dtype=config.jnp_dtype, implementation=implementation)
    if gated_obstacle(rows, w, **how) is None or flat_gate_up(w) is None:
        return None
    return apart(rows, through, w, sizes)


def _quantised_apart(config, implementation, rows, through, w, sizes):
    """The same by a grouped matmul and an activation that quantises; for weights that lie flat."""
    flat = flat_gate_up(w)
    assert flat is not None
    how: Any = dict(out_dtype=config.jnp_dtype, zero_tail=False, implementation=implementation)
    both = grouped_matmul(rows, flat, sizes, straight_through=through, **how)  # [M, 2 * F]
    q = swiglu_quantize(
        jax.lax.stop_gradient(both),
        config.quant.intermediate,
        activation=config.activation,
        alpha=config.swiglu_alpha,
        limit=config.swiglu_limit,
        num_valid_rows=jnp.sum(sizes),
    )
    f = config.intermediate_size
    return q, gated_activation(both[:, :f], both[:, f:], config).astype(config.jnp_dtype)


def _apart(config, implementation, rows, through, w, bias, sizes, row_weight):
    """The same in steps: a grouped matmul (two, where a scale of the weights would straddle gate and up), then XLA."""
    dtype, f, num_places = config.jnp_dtype, config.intermediate_size, rows.shape[0]

    def matmul(w):
        how: Any = dict(out_dtype=dtype, zero_tail=False, implementation=implementation)
        return grouped_matmul(rows, w, sizes, straight_through=through, **how)

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
