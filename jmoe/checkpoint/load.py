"""From a checkpoint to arrays: `load_moe_layer`, `load_moe_layers`, `read_rest`.

Letters: E logical experts, P = R * E_loc physical slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import jax

from jmoe.params import MoEParams
from jmoe.placement import Placement, even_placement

from .folder import Checkpoint, MemoryCheckpoint, Source
from .leaves import materialize, num_ranks
from .online import allocate_layers, load_online
from .plan import StaticScales, as_dtype, plan_moe_layer, plan_rest
from .progress import progress_bar

PARALLEL_BYTES = 256 << 20  # of a checkpoint; smaller ones are read layer by layer


def check_source(source: object) -> None:
    """TypeError for a path in place of an open checkpoint."""
    if not isinstance(source, Checkpoint | MemoryCheckpoint):
        raise TypeError(
            f"ckpt is a {type(source).__name__}; give an open checkpoint: `with Checkpoint(folder) as ckpt:`, or a "
            "MemoryCheckpoint."
        )


def placement_for(source: Source, sharding, placement: Placement | None) -> Placement | None:
    """`placement`, or the even one over the ranks of `sharding` (None for one rank)."""
    check_source(source)
    ranks = num_ranks(sharding)
    if placement is None:
        return even_placement(source.moe_config.num_experts, ranks) if ranks > 1 else None
    if ranks > 1 and placement.num_ranks != ranks:
        raise ValueError(
            f"placement has {placement.num_ranks} ranks, the sharding cuts the experts into {ranks}; use {ranks} ranks."
        )
    return placement


def load_moe_layer(
    ckpt: Source,
    layer: int,
    *,
    sharding: jax.sharding.Sharding | None = None,
    placement: Placement | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    dequantize: jax.typing.DTypeLike | None = None,
    quant: str | None = None,
    static_scales: StaticScales = "uniform",
) -> MoEParams:
    """The parameters of one decoder layer's MoE block.

    Args:
      ckpt: an open `Checkpoint` or `MemoryCheckpoint`.
      layer: number of the decoder layer.
      sharding: NamedSharding(mesh, P(axis)) of the expert axis; everything else is replicated over its mesh. Each
        device reads its own experts only. None: all on the default device.
      placement: which expert each physical slot holds; None spreads them evenly.
      dtype: type of what is stored unquantised ("float32", "bfloat16", ...); None keeps it.
      dequantize: None keeps low-bit weights as `QTensor`; a type decodes them to it, expert by expert.
      quant: None, or a name of `jmoe.checkpoint.ONLINE` ("nvfp4_online", "modelopt_fp4", "mxfp8", "fp8_block"):
        quantises unquantised (or FP8) expert weights on their device, a few experts at a time.
      static_scales: what becomes of a checkpoint's scales of activations: "uniform" (one input scale for all experts,
        the largest, usable by a sender), "per_expert", or None (activations get dynamic scales).
    Raises CheckpointError (a ValueError) that names file and key where the data contradicts itself, ValueError for
    arguments that do not go together.
    """
    return _load(
        ckpt,
        layer,
        sharding=sharding,
        placement=placement_for(ckpt, sharding, placement),
        dtype=dtype,
        dequantize=dequantize,
        quant=quant,
        static_scales=static_scales,
    )


def _load(ckpt, layer, *, sharding, placement, dtype, dequantize, quant, static_scales, into=None) -> MoEParams:
    options = {"placement": placement, "dtype": as_dtype(dtype), "static_scales": static_scales}
    if quant is not None:
        if dequantize is not None:
            raise ValueError(f"quant={quant!r} and dequantize={dequantize!r} exclude each other; give one of them.")
        return load_online(ckpt, layer, quant, sharding=sharding, into=into, **options)
    return materialize(plan_moe_layer(ckpt, layer, dequantize=as_dtype(dequantize), **options), sharding)


def load_moe_layers(
    ckpt: Source,
    layers: Iterable[int] | None = None,
    *,
    sharding: jax.sharding.Sharding | None = None,
    placement: Placement | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    dequantize: jax.typing.DTypeLike | None = None,
    quant: str | None = None,
    static_scales: StaticScales = "uniform",
    progress: bool | None = None,
) -> dict[int, MoEParams]:
    """Several layers (None: all that have a MoE block), by number. progress: a bar on stderr; None: on a terminal.

    Other arguments as `load_moe_layer`.
    """
    wanted = list(ckpt.catalog.blocks if layers is None else layers)
    placement = placement_for(ckpt, sharding, placement)
    room = {}
    if quant is not None and dequantize is None:
        room = allocate_layers(ckpt, wanted, quant, sharding=sharding, placement=placement)
    with progress_bar(f"Loading {ckpt.name}", len(wanted), show=progress) as bar:
        device = getattr(jax.config, "jax_default_device", None)  # the caller's, which threads do not inherit

        def load(layer: int) -> MoEParams:
            with jax.default_device(device):
                params = _load(
                    ckpt,
                    layer,
                    sharding=sharding,
                    placement=placement,
                    dtype=dtype,
                    dequantize=dequantize,
                    quant=quant,
                    static_scales=static_scales,
                    into=room.pop(layer, None),
                )
                jax.block_until_ready(params)
            bar.advance(1)
            return params

        if sum(info.nbytes for info in ckpt.tensors.values()) < PARALLEL_BYTES:
            return {layer: load(layer) for layer in wanted}
        # Two layers at a time, so that one is read while the other is on its way to the devices.
        with ThreadPoolExecutor(2) as pool:
            return dict(zip(wanted, pool.map(load, wanted), strict=True))


def read_rest(
    ckpt: Source,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    sharding: jax.sharding.Sharding | None = None,
    only: Callable[[str], bool] | None = None,
) -> dict[str, jax.Array]:
    """Everything outside the MoE blocks: attention, norms, embedding, head and dense MLPs, by Hugging Face name.

    Linear weights are [out, in]; where the file holds them quantised they come decoded (bfloat16 unless `dtype` says
    otherwise). sharding: a NamedSharding whose mesh they are replicated over. only: names for which it is true.
    """
    check_source(ckpt)
    plan = plan_rest(ckpt, dtype=as_dtype(dtype))
    return materialize({k: v for k, v in plan.items() if only is None or only(k)}, sharding)
