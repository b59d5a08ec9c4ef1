"""The arrays of one MoE layer, as a pytree. Weights are [..., out, in], as in Hugging Face checkpoints.

Letters: D hidden, F expert width, Fs shared expert's width, E logical experts, P = R * E_loc physical expert slots.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.quantize import QTensor

from .config import MoEConfig
from .experts import ExpertWeights
from .placement import Placement, to_physical_order

# Names of the arrays that a Flax module trains: those of MoEParams itself, and those of its experts.
DENSE_PARTS = ("router", "router_bias", "shared_gate_up", "shared_down", "shared_gate")
EXPERT_PARTS = ("gate_up", "down", "gate_up_bias", "down_bias")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEParams:
    """router [E, D]; router_bias [E]; correction_bias [E] float32 (selection only); experts: ExpertWeights over P
    slots; shared expert: shared_gate_up [2, Fs, D], shared_down [D, Fs], shared_gate [D]. Absent parts are None.
    """

    router: jax.Array
    experts: ExpertWeights
    router_bias: jax.Array | None = None
    correction_bias: jax.Array | None = None
    shared_gate_up: jax.Array | QTensor | None = None
    shared_down: jax.Array | QTensor | None = None
    shared_gate: jax.Array | None = None


def _fan_in(key, shape, dtype):
    """LeCun-style initialisation over the last (contracted) axis: variance 1 / fan_in."""
    return (jax.random.truncated_normal(key, -2, 2, shape, jnp.float32) * (shape[-1] ** -0.5 / 0.87962566)).astype(
        dtype
    )


def init_params(
    key: jax.Array, config: MoEConfig, *, dtype: jax.typing.DTypeLike = jnp.float32, placement: Placement | None = None
) -> MoEParams:
    """Random parameters: truncated normal, variance 1/fan_in; biases zero.

    placement: brings the experts into its physical order, P slots with zeros in those that are unused (None: E experts
    in their own order). An expert's numbers are the same in both. ValueError for a placement of other experts.
    """
    d, f, e, fs = config.hidden_size, config.intermediate_size, config.num_experts, config.shared_intermediate_size
    keys = iter(jax.random.split(key, 6))
    experts = ExpertWeights(
        gate_up=_fan_in(next(keys), (e, 2, f, d), dtype),
        down=_fan_in(next(keys), (e, d, f), dtype),
        gate_up_bias=jnp.zeros((e, 2, f), dtype) if config.use_bias else None,
        down_bias=jnp.zeros((e, d), dtype) if config.use_bias else None,
    )
    if placement is not None:
        experts = jax.tree.map(lambda leaf: to_physical_order(leaf, placement), experts)
    return MoEParams(
        router=_fan_in(next(keys), (e, d), dtype),
        experts=experts,
        router_bias=jnp.zeros((e,), dtype) if config.router.use_bias else None,
        correction_bias=jnp.zeros((e,), jnp.float32) if config.router.use_correction_bias else None,
        shared_gate_up=_fan_in(next(keys), (2, fs, d), dtype) if fs else None,
        shared_down=_fan_in(next(keys), (d, fs), dtype) if fs else None,
        shared_gate=_fan_in(next(keys), (d,), dtype) if config.shared_gate else None,
    )
