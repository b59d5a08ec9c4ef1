"""Quantising while loading: BF16, F16 or FP8 experts become low-bit ones on their device, a few experts at a time.

Contracts: "nvfp4_online" quantises activations per token, "modelopt_fp4" per tensor with static scales; they are not
interchangeable. Gate and up of an expert share one global scale, down has its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.compat import shard_map
from jmoe.config import QuantConfig
from jmoe.params import MoEParams
from jmoe.placement import Placement
from pallas_kernels.quantize import QTensor, get_format, quantize_weights

from .folder import Source
from .leaves import Leaf, bounds, materialize, num_ranks, to_array
from .plan import StaticScales, plan_moe_layer

CHUNK_BYTES = 256 << 20  # of unquantised weights that are on a device at a time


@dataclasses.dataclass(frozen=True)
class Online:
    """weights, activations: formats. accepts: schemes of checkpoints that it converts. serialized: kept as they are."""

    weights: str
    activations: str | None
    accepts: tuple[str, ...] = ("unquantised", "fp8_block")
    serialized: tuple[str, ...] = ()


ONLINE: dict[str, Online] = {
    "nvfp4_online": Online("nvfp4", "nvfp4_token"),
    "modelopt_fp4": Online("nvfp4", "nvfp4", serialized=("nvfp4_modelopt", "nvfp4_ct")),
    "mxfp8": Online("mxfp8", "mxfp8", serialized=("mxfp8",)),
    "fp8_block": Online("fp8_128x128", "fp8_128", accepts=("unquantised",), serialized=("fp8_block",)),
    "mxfp4": Online("mxfp4", None, serialized=("mxfp4",)),
}


def resolve_quant(
    quant: str, stored: str = "unquantised", *, per_token: bool | None = None, allow_per_token: bool = False
) -> QuantConfig:
    """The layer's quantisation for a contract and a checkpoint's scheme.

    Args:
      quant: a name of `ONLINE`. stored: the checkpoint's scheme (`Checkpoint.scheme.name`).
      per_token: what is asked for NVFP4 activations; None takes the contract's own.
      allow_per_token: the explicit opt-in that lets a serialized "modelopt_fp4" checkpoint run per token.
    Raises ValueError where the contract does not have what is asked, and names the one that has.
    """
    if quant not in ONLINE:
        raise ValueError(f"quant={quant!r} is not known; choose one of {', '.join(ONLINE)}.")
    spec = ONLINE[quant]
    if stored not in (*spec.accepts, *spec.serialized):
        choices = [n for n, o in ONLINE.items() if stored in (*o.accepts, *o.serialized)]
        raise ValueError(
            f"quant={quant!r} converts {' or '.join(spec.accepts)} experts, but the checkpoint stores {stored}: "
            f"quantising twice would add both errors. Use quant={' or '.join(map(repr, choices)) or None}, quant=None "
            "to keep what is stored, or convert from the original checkpoint."
        )
    activations = spec.activations
    if quant == "modelopt_fp4" and per_token:
        if stored not in spec.serialized:
            raise ValueError(
                "quant='modelopt_fp4' quantises activations per tensor with static scales; per_token=True is the "
                "contract of quant='nvfp4_online': use that."
            )
        if not allow_per_token:
            raise ValueError(
                "quant='modelopt_fp4' runs a serialized checkpoint per tensor; per_token=True needs "
                "allow_per_token=True, or use an unquantised checkpoint with quant='nvfp4_online'."
            )
        activations = "nvfp4_token"
    elif per_token is not None and per_token != (activations == "nvfp4_token"):
        other, scope = ("nvfp4_online", "per-token") if per_token else ("modelopt_fp4", "per-tensor")
        raise ValueError(
            f"quant={quant!r} with per_token={per_token}: its activations are {activations or 'not quantised'}; use "
            f"quant={other!r} for {scope} NVFP4."
        )
    return QuantConfig(activations=activations, weights=spec.weights, intermediate=activations)


def _quantize(w: jax.Array, fmt: str, joint: bool) -> QTensor:
    return quantize_weights(w, fmt, scale_axes=(1,) if joint else ())


@functools.cache
def _filler(fmt: str, joint: bool, sharding: jax.sharding.NamedSharding | None):
    """fill(buffers, chunk, first): quantises a chunk of experts into the buffers, from `first` of each rank on.

    One program over all devices, each on its own experts; the buffers are donated.
    """

    def fill(buffers: QTensor, chunk: jax.Array, first: jax.Array) -> QTensor:
        q = _quantize(chunk, fmt, joint)
        return jax.tree.map(lambda b, x: jax.lax.dynamic_update_slice_in_dim(b, x, first, 0), buffers, q)

    if sharding is not None:
        spec = sharding.spec
        none = jax.sharding.PartitionSpec()
        fill = shard_map(fill, mesh=sharding.mesh, in_specs=(spec, spec, none), out_specs=spec)
    return jax.jit(fill, donate_argnums=0)


def allocate(leaf: Leaf, fmt: str, sharding: jax.sharding.Sharding | None, *, joint: bool) -> QTensor:
    """Zeros on the devices, of the size that the leaf's weights will have in `fmt`."""
    k, block = leaf.shape[-1], get_format(fmt)
    if block.block_rows == 1 and k % block.block:
        raise ValueError(
            f"{fmt!r} needs a contracted size that is a multiple of {block.block}, got {k} in weights of shape "
            f"{leaf.shape}; use quant='fp8_block', or keep the layer unquantised."
        )
    shapes = jax.eval_shape(lambda w: _quantize(w, fmt, joint), jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype)))
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=sharding), shapes)


def _chunk(count: int, nbytes: int) -> int:
    """Experts at a time: a divisor of `count`, so that one program serves all chunks."""
    most = max(1, min(count, CHUNK_BYTES * count // max(nbytes, 1)))
    return next(n for n in range(most, 0, -1) if count % n == 0)


def quantize_leaf(
    leaf: Leaf, fmt: str, sharding: jax.sharding.Sharding | None, *, joint: bool, into: QTensor | None = None
) -> QTensor:
    """A leaf of float weights [P, ..., N, K] as a QTensor on its devices. joint: axis 1 shares one global scale.

    into: buffers of `allocate`, which are donated; None makes them.
    """
    spread = sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
    fill, ranks = _filler(fmt, joint, spread), num_ranks(spread)
    out = allocate(leaf, fmt, sharding, joint=joint) if into is None else into
    per_rank = leaf.shape[0] // ranks
    step = _chunk(per_rank, math.prod(leaf.shape[1:]) * leaf.dtype.itemsize * per_rank)
    for first in range(0, per_rank, step):

        def read(index, first=first):
            index = bounds(index, (ranks * step, *leaf.shape[1:]))
            start = index[0].start // step * per_rank + first
            return leaf.read((slice(start, start + step), *index[1:]))

        chunk = to_array(Leaf((ranks * step, *leaf.shape[1:]), leaf.dtype, read, experts=True), sharding)
        out = jax.block_until_ready(fill(out, chunk, jnp.int32(first)))  # no more than this chunk is unquantised
    return out


def plan_online(source: Source, layer: int, quant: str, **options: Any) -> tuple[Online, bool, MoEParams]:
    """(the contract, whether the stored experts are kept as they are, the layer's plan with experts to quantise)."""
    stored, block = source.scheme.name, source.catalog.blocks.get(layer)
    if block is not None and block.kind is None:
        stored = "unquantised"  # also where the scheme's ignore list exempts this layer
    resolve_quant(quant, stored)
    spec = ONLINE[quant]
    kept = stored in spec.serialized
    decode = None if kept or stored == "unquantised" else np.dtype(np.float32)
    return spec, kept, plan_moe_layer(source, layer, dequantize=decode, **{"dequantize_shared": None, **options})


def allocate_layers(
    source: Source, layers, quant: str, *, sharding: jax.sharding.Sharding | None, placement: Placement | None
) -> dict[int, tuple[QTensor, QTensor] | None]:
    """Room for the quantised experts of several layers, made before anything unquantised is on the devices.

    Buffers that are allocated among transient ones keep the odd sizes of the gaps that those leave.
    """
    out: dict[int, tuple[QTensor, QTensor] | None] = {}
    for layer in layers:
        spec, kept, plan = plan_online(source, layer, quant, placement=placement)
        experts: Any = plan.experts
        out[layer] = (
            None
            if kept
            else (
                allocate(experts.gate_up, spec.weights, sharding, joint=True),
                allocate(experts.down, spec.weights, sharding, joint=False),
            )
        )
    return out


def load_online(
    source: Source,
    layer: int,
    quant: str,
    *,
    sharding: jax.sharding.Sharding | None = None,
    placement: Placement | None = None,
    dtype: np.dtype | None = None,
    dequantize_shared: np.dtype | None = None,
    static_scales: StaticScales = "uniform",
    into: tuple[QTensor, QTensor] | None = None,
) -> MoEParams:
    """One layer with its routed experts quantised by the contract `quant`; the rest as it is stored.

    into: buffers of `allocate_layers`. Under "modelopt_fp4" absent static scales are 1.0; `calibrate` replaces them.
    """
    spec, kept, plan = plan_online(
        source,
        layer,
        quant,
        placement=placement,
        dtype=dtype,
        dequantize_shared=dequantize_shared,
        static_scales=static_scales,
    )
    experts: Any = plan.experts
    room = into or (None, None)
    params = materialize(
        dataclasses.replace(plan, experts=dataclasses.replace(experts, gate_up=None, down=None)), sharding
    )
    if kept:
        gate_up, down = materialize((experts.gate_up, experts.down), sharding)
    else:
        gate_up = quantize_leaf(experts.gate_up, spec.weights, sharding, joint=True, into=room[0])
        down = quantize_leaf(experts.down, spec.weights, sharding, joint=False, into=room[1])
    static = {}
    if spec.activations == "nvfp4" and params.experts.input_scale is None:
        slots = experts.gate_up.shape[0]
        one = lambda index: np.ones([s.stop - s.start for s in index], np.float32)  # noqa: E731
        ones = [Leaf((), np.dtype(np.float32), one), Leaf((slots,), np.dtype(np.float32), one, experts=True)]
        ones[1] = dataclasses.replace(ones[1], read=lambda index: one(bounds(index, (slots,))))
        static = dict(zip(("input_scale", "intermediate_scale"), materialize(ones, sharding), strict=True))
    return dataclasses.replace(
        params, experts=dataclasses.replace(params.experts, gate_up=gate_up, down=down, **static)
    )
