"""Expert weights: what they are, and whether they fit a configuration.

Letters: E experts held here, F expert width, D hidden.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.quantize import BlockFormat, QTensor, get_format

from ..config import MoEConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """The weights of E experts, [.., out, in] as in checkpoints.

    gate_up: [E, 2, F, D] (index 0 gate, 1 up); down: [E, D, F]; float arrays, or QTensors (constants for gradients).
    gate_up_bias: [E, 2, F]; down_bias: [E, D].
    input_scale, intermediate_scale: float32 decode scales, [] or [E], of the inputs of the two matmuls, where those are
        quantised per tensor with static scales (NVFP4 checkpoints have them); None computes them from the data.
    """

    gate_up: jax.Array | QTensor
    down: jax.Array | QTensor
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    input_scale: jax.Array | None = None
    intermediate_scale: jax.Array | None = None


def decodes_alike(a: str | BlockFormat, b: str | BlockFormat) -> bool:
    """Whether data of the one format is read correctly as the other: they differ at most in how they round."""
    a, b = get_format(a), get_format(b)
    fields = ("element", "block", "scale", "block_rows", "global_scale")
    return all(getattr(a, f) == getattr(b, f) for f in fields)


def check_weights(params: ExpertWeights, config: MoEConfig) -> None:
    """Raise ValueError where the arrays do not fit the configuration, or are not kept in its weight format."""
    e, f, d = params.gate_up.shape[0], config.intermediate_size, config.hidden_size
    expected = {
        "gate_up": (e, 2, f, d),
        "down": (e, d, f),
        "gate_up_bias": (e, 2, f) if config.use_bias else None,
        "down_bias": (e, d) if config.use_bias else None,
    }
    for name, shape in expected.items():
        value = getattr(params, name)
        have = None if value is None else tuple(value.shape)
        if have != shape:
            raise ValueError(
                f"ExpertWeights.{name} has shape {have}; a layer with intermediate_size={f}, hidden_size={d} and "
                f"use_bias={config.use_bias} takes {shape}: weights are [.., out, in], biases come with use_bias=True."
            )
    wanted = config.quant.weights
    for name in ("gate_up", "down"):
        value = getattr(params, name)
        quantised = isinstance(value, QTensor)
        kept = value.format.name if quantised else value.dtype
        if wanted is not None and not (quantised and decodes_alike(value.format, wanted)):
            raise ValueError(
                f"ExpertWeights.{name} is kept as {kept}, but config.quant.weights={wanted!r}; quantise "
                f"it with quantize_weights(w, {wanted!r}), or set config.quant.weights to what it is."
            )


def in_dtype(params: ExpertWeights, dtype) -> ExpertWeights:
    """Float matrices in the dtype of the computation (parameters that are trained have a wider one)."""
    cast = lambda w: w if isinstance(w, QTensor) else w.astype(dtype)  # noqa: E731
    return dataclasses.replace(params, gate_up=cast(params.gate_up), down=cast(params.down))


def flat_gate_up(w: jax.Array | QTensor) -> jax.Array | QTensor | None:
    """gate_up [E, 2, F, D] as one stack [E, 2 * F, D]; None where tiles of 128 rows would straddle gate and up."""
    if not isinstance(w, QTensor):
        return w.reshape(w.shape[0], -1, w.shape[-1])
    e, two, f = w.data.shape[:3]
    if f % w.format.block_rows:
        return None
    scale = w.global_scale
    if scale is not None and scale.ndim:  # [E, 2] or [E]: one for each output column
        scale = scale.reshape(scale.shape + (1,) * (3 - scale.ndim))
        scale = jnp.broadcast_to(scale, (e, two, f)).reshape(e, two * f)
    return dataclasses.replace(
        w,
        data=w.data.reshape(e, two * f, -1),
        block_scale=w.block_scale.reshape(e, -1, w.block_scale.shape[-1]),
        global_scale=scale,
    )


def gate_or_up(w: QTensor, index: int) -> QTensor:
    """One half of a quantised gate_up, [E, F, D]."""
    scale = w.global_scale
    return dataclasses.replace(
        w,
        data=w.data[:, index],
        block_scale=w.block_scale[:, index],
        global_scale=scale[:, index] if scale is not None and scale.ndim > 1 else scale,
    )
