"""What a call of the layer is given, checked against what the layer is while it is traced: nothing is broadcast, cut or
left out silently.

Letters: D hidden, E experts, R ranks, E_loc expert slots on one rank, Fs the shared expert's width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.compat import refuse_varying
from pallas_kernels.quantize import QTensor

from .backends import BACKENDS, get_backend
from .config import MoEConfig
from .params import DENSE_PARTS, EXPERT_PARTS, MoEParams
from .placement import Placement, even_placement

if TYPE_CHECKING:
    from .layer import MoELayer


def check_count(tokens: int) -> None:
    """ValueError unless it is a number of tokens."""
    if not isinstance(tokens, int | np.integer) or tokens < 0:
        raise ValueError(f"tokens={tokens!r} must be a number of tokens: an integer, 0 or more.")


def check_tokens(x: jax.Array | np.ndarray, config: MoEConfig) -> jax.Array:
    """x as a jax.Array; ValueError unless it is an array of floats of 16 bits or more."""
    if isinstance(x, np.ndarray):
        x = jnp.asarray(x)
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        raise ValueError(f"x is a {type(x).__name__}; the layer takes an array [..., {config.hidden_size}].")
    if not _is_float(dtype):
        raise ValueError(
            f"x is {dtype}{list(x.shape)}; the layer takes bfloat16, float16 or float32 and answers in x's dtype. "
            f"Cast it, for example to {config.dtype}; QuantConfig(activations=) quantises inside the layer."
        )
    return x


def _is_float(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1


def check_params(params: MoEParams, config: MoEConfig) -> None:
    """ValueError (TypeError for another kind of object) unless the arrays are those that the configuration names.

    Those of the experts are checked where they are used (`jmoe.experts.weights.check_weights`); here, that they are
    floats or QTensors and hold equally many experts.
    """
    if not isinstance(params, MoEParams):
        raise TypeError(
            f"params is a {type(params).__name__}; the layer takes a MoEParams, as init_params, load_moe_layer and the "
            "attribute params of a Flax module give it."
        )
    d, fs = config.hidden_size, config.shared_intermediate_size
    expected = {
        "router": (config.num_experts, d),
        "router_bias": (config.num_experts,) if config.router.use_bias else None,
        "shared_gate_up": (2, fs, d) if fs else None,
        "shared_down": (d, fs) if fs else None,
        "shared_gate": (d,) if config.shared_gate else None,
    }
    for name in DENSE_PARTS:
        value = getattr(params, name)
        have = None if value is None else tuple(value.shape)
        if have != expected[name]:
            raise ValueError(
                f"MoEParams.{name} has shape {have}; a layer with num_experts={config.num_experts}, hidden_size={d}, "
                f"router.use_bias={config.router.use_bias}, shared_intermediate_size={fs} and shared_gate="
                f"{config.shared_gate} takes {expected[name]}. Change the configuration or the parameters."
            )
    experts, scales = params.experts, ("input_scale", "intermediate_scale")
    held = None if experts.gate_up is None else experts.gate_up.shape[0]
    for name in (*EXPERT_PARTS, *scales):
        value = getattr(experts, name)
        if value is not None and value.shape[:1] != (held,) and not (name in scales and value.ndim == 0):
            raise ValueError(
                f"ExpertWeights.{name} has shape {tuple(value.shape)} and gate_up holds {held} experts; all of them "
                "must hold equally many."
            )
    for owner, names in ((params, DENSE_PARTS), (experts, EXPERT_PARTS)):
        for name in names:
            value = getattr(owner, name)
            if value is None or isinstance(value, QTensor):
                continue
            if not _is_float(value.dtype):
                raise ValueError(
                    f"{type(owner).__name__}.{name} is an array of {value.dtype}, whose scales would be missing. Give "
                    "bfloat16, float16 or float32, or a QTensor (quantize_params, load_moe_layer)."
                )


def check_placement(layer: MoELayer, placement: Placement | None, *, masked: bool = False) -> Placement | None:
    """The placement to use: the one given, the even one, or None where slot p holds expert p and no rank is masked.

    ValueError unless it is one of this layer's experts in this layer's slots.
    """
    e, r, local = layer.config.num_experts, layer.num_ranks, layer.num_local
    if placement is None:
        if local != -(-e // r):
            raise ValueError(
                f"The layer was built with num_local={local}, {r * local} slots for {e} experts, and no placement says "
                "what they hold. Pass placement= (jmoe.rebalance.plan_placement, jmoe.placement.placement_from_slots), "
                "or leave num_local out."
            )
        return even_placement(e, r) if masked or e != r * local else None
    if (placement.num_ranks, placement.num_local) != (r, local):
        raise ValueError(
            f"The placement has {placement.num_ranks} ranks x {placement.num_local} slots, the layer {r} x {local}; "
            f"build the layer with num_local={placement.num_local}, or use another placement."
        )
    if placement.num_experts != e:
        raise ValueError(
            f"The placement is one of {placement.num_experts} experts and the layer has {e}; use one of {e} experts."
        )
    return placement


def check_rank_mask(layer: MoELayer, rank_mask: jax.Array | None, tokens: int) -> None:
    """ValueError for a mask that is not bool [R], or for a backend in which ranks cannot be absent."""
    if rank_mask is None:
        return
    name = layer.decision(tokens).backend
    if not get_backend(name).takes_rank_mask:
        able = " or ".join(repr(b.name) for b in BACKENDS.values() if b.takes_rank_mask)
        raise ValueError(
            f"rank_mask was given and backend {name!r} has no rank mask; ranks may come and go with {able} only. Build "
            "the layer with that backend, or leave rank_mask out."
        )
    if rank_mask.shape != (layer.num_ranks,) or rank_mask.dtype != jnp.bool_:
        raise ValueError(
            f"rank_mask is {rank_mask.dtype}{list(rank_mask.shape)}; it must be bool[{layer.num_ranks}], one for each "
            "rank, True for those that are alive."
        )


def check_local(layer: MoELayer, params: MoEParams, x: jax.Array) -> None:
    """ValueError unless this is traced in a shard_map over the layer's expert axis, with this rank's experts only."""
    if layer.num_ranks > 1:
        size = _ranks_here(layer)
        if size != layer.num_ranks:
            where = "outside of one" if size is None else f"over {size} ranks"
            raise ValueError(
                f"moe_local takes one rank's tokens, inside a jax.shard_map over {layer.expert_axis!r} with "
                f"{layer.num_ranks} ranks, and was called {where}. For global arrays call moe(layer, params, x)."
            )
        refuse_varying("moe_local", x)
    held = params.experts.gate_up.shape[0]
    if held != layer.num_local:
        raise ValueError(
            f"This rank was given the weights of {held} experts and has {layer.num_local} slots; inside shard_map pass "
            f"its own slots only: in_specs of P({layer.expert_axis!r}) for every array of params.experts."
        )


def check_global(layer: MoELayer) -> None:
    """ValueError inside a shard_map over the layer's expert axis, where arrays are those of one rank."""
    if layer.num_ranks > 1 and _ranks_here(layer) is not None:
        raise ValueError(
            f"moe takes global arrays and enters a shard_map over {layer.expert_axis!r} itself, and was called inside "
            "one. There, call moe_local(layer, params, x) with this rank's tokens and experts."
        )


def _ranks_here(layer: MoELayer) -> int | None:
    """Ranks of the expert axis in the shard_map that is being traced; None outside of one."""
    try:
        return lax.axis_size(layer.expert_axis)
    except NameError:
        return None
