"""The MoE layer as a Flax Linen module, with the parameters of the NNX one (`jmoe.nn.MoE`): same names, same shapes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from .backends import Axis
from .check import check_placement
from .config import MoEConfig
from .experts import ExpertWeights
from .layer import MoELayer, build_moe, mesh_in_context, moe, moe_with_stats
from .params import DENSE_PARTS, EXPERT_PARTS, MoEParams, init_params
from .router import MoEStats


class MoE(linen.Module):
    """A Mixture-of-Experts layer, expert-parallel over one axis of a mesh.

    Arguments: those of `jmoe.nn.MoE` but for rngs and init. Collections: "params" holds router, gate_up, down and the
    optional biases and shared expert; "moe_state" holds correction_bias, which gradients do not touch. Losses and
    counts: `module.apply(variables, x, method="call_with_stats")`.
    """

    config: MoEConfig
    backend: str = "auto"
    mesh: jax.sharding.Mesh | None = None
    expert_axis: Axis = "ep"
    token_axes: tuple[str, ...] | None = None
    overlap_chunks: int = 1
    param_dtype: jnp.dtype = jnp.float32

    @property
    def layer(self) -> MoELayer:
        """The checked, static description of this layer on the mesh at hand."""
        return build_moe(
            self.config,
            mesh=self.mesh if self.mesh is not None else mesh_in_context(),
            expert_axis=self.expert_axis,
            token_axes=self.token_axes,
            backend=self.backend,
            overlap_chunks=self.overlap_chunks,
        )

    def setup(self):
        """Declares the parameters; called by Flax."""
        placement = check_placement(self.layer, None)

        def init(key) -> MoEParams:
            return init_params(key, self.config, dtype=self.param_dtype, placement=placement)

        shapes = jax.eval_shape(init, jax.random.key(0))
        leaf = {name: getattr(shapes, name) for name in DENSE_PARTS} | {
            name: getattr(shapes.experts, name) for name in EXPERT_PARTS
        }

        def of(name):
            def make(key):
                params = init(key)
                return getattr(params.experts if name in EXPERT_PARTS else params, name)

            return make

        self.weights = {name: self.param(name, of(name)) for name, shape in leaf.items() if shape is not None}
        bias = shapes.correction_bias
        self.correction_bias = (
            None if bias is None else self.variable("moe_state", "correction_bias", jnp.zeros, bias.shape, bias.dtype)
        )

    def _params(self) -> MoEParams:
        weights: dict[str, Any] = self.weights

        def get(name: str) -> Any:
            return weights.get(name)

        return MoEParams(
            experts=ExpertWeights(**{name: get(name) for name in EXPERT_PARTS}),
            correction_bias=None if self.correction_bias is None else self.correction_bias.value,
            **{name: get(name) for name in DENSE_PARTS},
        )

    def __call__(self, x: jax.Array, *, valid: jax.Array | None = None) -> jax.Array:
        """x [..., D] -> [..., D], in x's dtype. valid: bool of x's leading shape; other tokens give zero."""
        return moe(self.layer, self._params(), x, valid=valid)

    def call_with_stats(self, x: jax.Array, *, valid: jax.Array | None = None) -> tuple[jax.Array, MoEStats]:
        """As `__call__`, with the losses and counts of this batch beside the output."""
        return moe_with_stats(self.layer, self._params(), x, valid=valid)
