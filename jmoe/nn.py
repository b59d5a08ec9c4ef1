"""The MoE layer as a Flax NNX module.

Letters: D hidden, F expert width, E experts, P expert slots (E, or more where E does not divide into the ranks).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.quantize import QTensor

from .backends import Axis
from .check import check_params, check_placement
from .config import MoEConfig
from .experts import ExpertWeights
from .layer import MoELayer, axis_names, build_moe, mesh_in_context, moe, moe_with_stats
from .params import DENSE_PARTS, EXPERT_PARTS, MoEParams, init_params
from .router import MoEStats


class QuantizedParam(nnx.Variable):
    """Expert weights in a block format (a QTensor). Not an nnx.Param, so nnx.grad and optimisers leave them alone."""


class CorrectionBias(nnx.Variable):
    """The router's selection bias (DeepSeek "noaux_tc"): updated from load statistics, never by gradients."""


class StaticScale(nnx.Variable):
    """A calibrated decode scale of quantised activations: part of the checkpoint, never trained."""


_SCALES = ("input_scale", "intermediate_scale")


class MoE(nnx.Module):
    """A Mixture-of-Experts layer, expert-parallel over one axis of a mesh.

    Arguments:
        config: MoEConfig.
        backend: how tokens move: a backend's name, or "auto".
        mesh: the mesh, or None for the one in context (`jax.set_mesh`) when the layer is called; without any the layer
            runs on one rank. A mesh without `expert_axis` is refused, except for backend="local".
        expert_axis: the mesh axis (or axes) that the experts are spread over.
        token_axes: the mesh axes that the tokens are spread over (None: all axes of the mesh).
        overlap_chunks: parts of the tokens that are exchanged one after another; see `build_moe`.
        param_dtype: dtype of the parameters. The computation's dtype is `config.dtype`.
        init: function (key, config, *, dtype, placement) -> MoEParams, as `init_params`. placement: None, or where
            experts that do not divide into the ranks are to be.
        rngs: nnx.Rngs; one key of its "params" stream is used.

    Attributes: router [E, D], gate_up [P, 2, F, D] (index 0 gate, 1 up), down [P, D, F]; where the configuration has
    them router_bias [E], correction_bias [E], gate_up_bias [P, 2, F], down_bias [P, D], shared_gate_up [2, Fs, D],
    shared_down [D, Fs], shared_gate [D]; with static activation scales input_scale and intermediate_scale, [] or [P].
    Absent ones are None.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        backend: str = "auto",
        mesh: jax.sharding.Mesh | None = None,
        expert_axis: Axis = "ep",
        token_axes: tuple[str, ...] | None = None,
        overlap_chunks: int = 1,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        init: Callable[..., MoEParams] = init_params,
        rngs: nnx.Rngs,
    ):
        self._configure(config, backend, mesh, expert_axis, token_axes, overlap_chunks)
        placement = check_placement(self.layer, None)
        params = init(rngs.params(), config, dtype=param_dtype, placement=placement)
        check_params(params, config)
        self._set(params)

    @classmethod
    def from_params(cls, config: MoEConfig, params: MoEParams, **kwargs: Any) -> MoE:
        """A module around existing arrays, such as those of `jmoe.checkpoint`. `kwargs`: as for MoE, without rngs."""
        return cls(config, init=lambda *_, **__: params, rngs=nnx.Rngs(0), **kwargs)

    def _configure(self, config, backend, mesh, expert_axis, token_axes, overlap_chunks):
        self.config, self.backend, self.mesh = config, backend, mesh
        self.expert_axis, self.token_axes, self.overlap_chunks = expert_axis, token_axes, overlap_chunks
        _ = self.layer  # every refusal happens when the module is made, not when it is first called

    def _set(self, params: MoEParams) -> None:
        for name in DENSE_PARTS:
            self._set_part(name, getattr(params, name), sharded=False)
        for name in EXPERT_PARTS:
            self._set_part(name, getattr(params.experts, name), sharded=True)
        bias = params.correction_bias
        self.correction_bias = nnx.data(None) if bias is None else CorrectionBias(bias)
        for name in _SCALES:
            scale = getattr(params.experts, name)
            setattr(self, name, nnx.data(None) if scale is None else StaticScale(scale))

    def _set_part(self, name: str, value, *, sharded: bool) -> None:
        if value is None:
            setattr(self, name, nnx.data(None))
        elif isinstance(value, QTensor):
            setattr(self, name, QuantizedParam(value))
        else:
            # Flax refuses sharding names without a mesh that has them, so annotate only where there is one.
            mesh = self.mesh or mesh_in_context()
            here = mesh is not None and set(axis_names(self.expert_axis)) <= set(mesh.axis_names)
            annotate = sharded and here and self.mesh is None
            names: dict[str, Any] = (
                {"out_sharding": (self.expert_axis, *(None,) * (value.ndim - 1))} if annotate else {}
            )
            setattr(self, name, nnx.Param(value, **names))

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

    @property
    def params(self) -> MoEParams:
        """The module's arrays as the pytree that the functional form takes."""

        def value(name: str) -> Any:
            variable = getattr(self, name)
            return None if variable is None else variable.get_value()

        return MoEParams(
            experts=ExpertWeights(**{name: value(name) for name in (*EXPERT_PARTS, *_SCALES)}),
            correction_bias=value("correction_bias"),
            **{name: value(name) for name in DENSE_PARTS},
        )

    def __call__(self, x: jax.Array, *, valid: jax.Array | None = None) -> jax.Array:
        """x [..., D] -> [..., D] (or `config.hidden_size_unpadded` columns), in x's dtype.

        valid: bool of x's leading shape; tokens where it is False are not routed and come out as zero.
        """
        return moe(self.layer, self.params, x, valid=valid)

    def call_with_stats(self, x: jax.Array, *, valid: jax.Array | None = None) -> tuple[jax.Array, MoEStats]:
        """As `__call__`, with the losses and counts of this batch beside the output."""
        return moe_with_stats(self.layer, self.params, x, valid=valid)

    def explain(self, tokens: int) -> str:
        """What travels for `tokens` tokens in all, who quantises it, and why, as text."""
        return self.layer.explain(tokens)


def quantize_experts(module: MoE, format: str) -> MoE:
    """The same layer with its expert weights kept in a block format, for inference."""
    from .layer import quantize_params

    config = dataclasses.replace(module.config, quant=dataclasses.replace(module.config.quant, weights=format))
    return MoE.from_params(
        config,
        quantize_params(module.params, format),
        backend=module.backend,
        mesh=module.mesh,
        expert_axis=module.expert_axis,
        token_axes=module.token_axes,
        overlap_chunks=module.overlap_chunks,
    )
