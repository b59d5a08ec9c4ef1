"""The layer: router, dispatch, experts and combine put together, as pure functions of arrays.

`build_moe` checks everything once and returns a static description; `moe` is the layer on global arrays (it enters
shard_map itself); `moe_local` is the same inside the caller's own shard_map.

Letters: T tokens on one rank, D hidden, E experts, K experts per token, R ranks of the expert axis, E_loc expert slots
on one rank, P = R * E_loc.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.grouped_matmul import IMPLEMENTATIONS
from pallas_kernels.quantize import QTensor, quantize_weights

from . import compat
from .backends import Axis, Exchange, exchange_for, get_backend
from .backends.engine import ENGINE, remote_write_engine
from .backends.hierarchical import hierarchical_engine
from .caps import DeviceCaps, count_hosts
from .check import check_count, check_global, check_local, check_params, check_placement, check_rank_mask, check_tokens
from .config import MoEConfig
from .core import route_and_compute
from .experts import ExpertsSpec, ExpertWeights, get_experts, shared_expert
from .params import MoEParams
from .payload import RowLayout, row_layout
from .placement import Placement, to_physical_order
from .policy import Decision, decide, explain
from .policy.render import to_text
from .router import MoEStats, router_logits, router_stats, summarize

AnyMesh = Mesh | AbstractMesh


def mesh_in_context() -> AnyMesh | None:
    """The mesh that `jax.set_mesh` has put in context, None if there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


@dataclasses.dataclass(frozen=True)
class MoELayer:
    """A checked layer: everything that is decided before tracing. Hashable, made by `build_moe`.

    mesh: None for one rank. expert_axis: the axis of the mesh over which the experts are spread, or several of them,
    the first slowest; token_axes: those over which the tokens are. num_ranks R, num_local E_loc. backend: the name
    asked for ("auto" decides for each token count). experts: the kind of experts, "auto" or a name in
    `jmoe.experts.EXPERTS`. caps: of the devices. implementation: of the grouped matmul, None for the best.
    overlap_chunks: parts of the tokens that are exchanged and computed one after another.
    """

    config: MoEConfig
    mesh: AnyMesh | None
    expert_axis: Axis
    token_axes: tuple[str, ...]
    num_ranks: int
    num_local: int
    backend: str
    experts: str
    caps: DeviceCaps
    implementation: str | None = None
    overlap_chunks: int = 1

    @property
    def token_shards(self) -> int:
        """Into how many parts the tokens are split."""
        return math.prod(self.mesh.shape[a] for a in self.token_axes) if self.mesh is not None else 1

    def decision(self, tokens: int) -> Decision:
        """What travels, and who quantises, for `tokens` tokens on each rank. ValueError unless it is 0 or more."""
        check_count(tokens)
        return _decide(self, tokens)

    def layout(self, tokens: int) -> RowLayout:
        """The packed row of one token."""
        quant = self.config.quant
        decision = self.decision(tokens)
        return row_layout(
            self.config.hidden_size, decision.wire, self.config.num_experts_per_tok, mx_alignment=quant.mx_alignment
        )

    def exchange(self, tokens: int) -> Exchange:
        """The static facts of the exchange of `tokens` tokens on each rank."""
        config, decision = self.config, self.decision(tokens)
        engine, hosts = None, 1
        if decision.transport == "kernel":
            engine = remote_write_engine(self.caps)
        elif decision.transport == "hierarchical":
            hosts = self.caps.num_hosts
            engine = hierarchical_engine(ENGINE if self.caps.local_kernels else None)
        return exchange_for(
            get_backend(decision.backend),
            tokens=tokens,
            num_ranks=self.num_ranks,
            num_local=self.num_local,
            top_k=config.num_experts_per_tok,
            axis_name=self.expert_axis if self.mesh is not None and self.num_ranks > 1 else None,
            capacity_factor=config.capacity_factor,
            dtype=config.dtype,
            engine=engine,
            num_hosts=hosts,
        )

    def memory(self, tokens: int) -> dict[str, int]:
        """Bytes of this layer's buffers on one rank for `tokens` tokens on it: the exchange's, and the experts' own.

        expert_rows: the sorted input, the gate and up projections, the activation and the outputs of every place that
        the received rows can need (N * K of them; the work is that of the places in use).
        """
        backend, exchange = get_backend(self.decision(tokens).backend), self.exchange(tokens)
        combine_row = None
        if self.config.quant.combine_wire is not None:
            combine_row = row_layout(
                self.config.output_size, self.config.quant.combine_wire, 0, mx_alignment=32
            ).row_bytes
        sizes = backend.memory(self.layout(tokens), exchange, combine_row_bytes=combine_row)
        ids = 1 if backend.form == "batched" else self.config.num_experts_per_tok
        width = 2 * self.config.hidden_size + 3 * self.config.intermediate_size
        sizes["expert_rows"] = backend.num_rows(exchange) * ids * width * self.config.jnp_dtype.itemsize
        return sizes

    def explain(self, tokens: int) -> str:
        """What happens to `tokens` tokens in all: what travels, who quantises it and why, bytes, alternatives.

        ValueError unless `tokens` is an integer of 0 or more.
        """
        check_count(tokens)
        return to_text(
            explain(
                self.config,
                backend=self.backend,
                num_ranks=self.num_ranks,
                tokens=-(-tokens // self.token_shards),
                caps=self.caps,
                experts=self._experts_spec,
            )
        )

    @property
    def _experts_spec(self) -> ExpertsSpec | None:
        return None if self.experts == "auto" else get_experts(self.experts)


@functools.lru_cache(maxsize=4096)
def _decide(layer: MoELayer, tokens: int) -> Decision:
    return decide(
        layer.config,
        backend=layer.backend,
        num_ranks=layer.num_ranks,
        tokens=tokens,
        caps=layer.caps,
        experts=layer._experts_spec,
    )


def axis_names(axis: Axis) -> tuple[str, ...]:
    """One axis or several, as several."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def _hosts_along(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Hosts over which the ranks along `axes` are spread; 1 where that differs elsewhere in the mesh."""
    last = [mesh.axis_names.index(a) for a in axes]
    rows = np.moveaxis(mesh.devices, last, range(-len(last), 0)).reshape(-1, math.prod(mesh.shape[a] for a in axes))
    found = {count_hosts(list(row)) for row in rows}
    return found.pop() if len(found) == 1 else 1


def build_moe(
    config: MoEConfig,
    *,
    mesh: AnyMesh | None = None,
    expert_axis: Axis = "ep",
    token_axes: tuple[str, ...] | None = None,
    backend: str = "auto",
    experts: str = "auto",
    num_local: int | None = None,
    caps: DeviceCaps | None = None,
    implementation: str | None = None,
    overlap_chunks: int = 1,
) -> MoELayer:
    """Check a layer against a mesh, before anything is traced.

    Arguments:
        config: what the layer computes, and what is quantised.
        mesh: the devices; None is one rank, and so is a mesh without `expert_axis`, for backend="local" only.
        expert_axis: the mesh axis over which experts are spread, or several of them, the first slowest: (hosts, ranks
            of a host). token_axes: those over which tokens are (None: all).
        backend: how tokens move, a name of `jmoe.backends.BACKENDS` or an alias, or "auto".
        experts: a name of `jmoe.experts.EXPERTS`, or "auto".
        num_local: expert slots on each rank, where a placement has replicas (None: ceil(E / R)).
        caps: the devices' capabilities (None: detected from the mesh).
        implementation: of the grouped matmul (None: the best that can run).
        overlap_chunks: into how many parts the tokens of a rank are split, so that the exchange of one part may run
            beside the matmuls of another (1: not). XLA overlaps its own collectives so; the remote-write kernels take
            their turn with the matmuls, and nothing was measured to gain from it.

    Raises ValueError for whatever cannot work: an unknown or unsupported combination of backend, format and experts,
    axes that the mesh lacks. Each message says what is possible. TypeError for a config or mesh of another type.
    """
    if not isinstance(config, MoEConfig):
        raise TypeError(
            f"config is a {type(config).__name__}; build_moe takes a MoEConfig. MoEConfig.from_hf makes one of the "
            "dict of a config.json."
        )
    if mesh is not None and not isinstance(mesh, AnyMesh):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}; build_moe takes a jax.sharding.Mesh, as jax.make_mesh makes it, or None "
            "for one rank."
        )
    named = {"expert_axis": expert_axis} | ({} if token_axes is None else {"token_axes": token_axes})
    for name, value in named.items():
        if not all(isinstance(a, str) for a in (value if isinstance(value, tuple | list) else (value,))):
            raise ValueError(f"{name}={value!r} must be the name of a mesh axis, or a tuple of names.")
    return _build(
        config,
        mesh,
        axis_names(expert_axis),
        None if token_axes is None else axis_names(token_axes),
        backend,
        experts,
        num_local,
        caps,
        implementation,
        overlap_chunks,
    )


@functools.lru_cache(maxsize=1024)
def _build(
    config: MoEConfig,
    mesh: AnyMesh | None,
    expert_axes: tuple[str, ...],
    token_axes: tuple[str, ...] | None,
    backend: str,
    experts: str,
    num_local: int | None,
    caps: DeviceCaps | None,
    implementation: str | None,
    overlap_chunks: int,
) -> MoELayer:
    axes = () if mesh is None else tuple(mesh.axis_names)
    expert_axis: Axis = expert_axes[0] if len(expert_axes) == 1 else expert_axes
    if token_axes is None:
        token_axes = axes
    if len(set(expert_axes)) < len(expert_axes):
        raise ValueError(f"expert_axis={expert_axis!r} names an axis twice; name each axis of the experts once.")
    unknown = [a for a in token_axes if a not in axes]
    if unknown:
        raise ValueError(
            f"token_axes={token_axes} names axes that the mesh does not have: {unknown}; it has {axes}. Leave "
            "token_axes out to spread the tokens over all of them."
        )
    if any(a in axes and a not in token_axes for a in expert_axes):
        raise ValueError(
            f"The expert axis {expert_axis!r} is not among token_axes={token_axes}: tokens must be spread over the "
            "axis along which they are exchanged. Add it, or leave token_axes out."
        )
    if axes and not set(expert_axes) <= set(axes):
        if backend not in ("local", "none"):
            raise ValueError(
                f"backend={backend!r} spreads the experts over the mesh axis {expert_axis!r}, but the mesh has {axes}. "
                "Name one of them as expert_axis, or use backend='local', with which every device has all experts."
            )
        mesh, token_axes = None, ()
    num_ranks = math.prod(mesh.shape[a] for a in expert_axes) if mesh is not None else 1
    if caps is None:
        caps = DeviceCaps.detect(list(mesh.devices.flat) if isinstance(mesh, Mesh) else None)
        caps = dataclasses.replace(
            caps,
            num_devices=max(num_ranks, 1),
            link="local" if num_ranks == 1 else caps.link,
            num_hosts=_hosts_along(mesh, expert_axes) if isinstance(mesh, Mesh) else 1,
        )
    if not isinstance(expert_axis, str) and mesh is not None and not caps.local_kernels:
        several = tuple(a for a in expert_axes if mesh.shape[a] > 1) or expert_axes[-1:]
        expert_axis = several[0] if len(several) == 1 else several
        if caps.kernels and caps.link in ("nvlink", "pcie") and len(several) > 1:
            why = f"the remote-write kernels exchange over one mesh axis, and the experts are spread over {several}"
            caps = dataclasses.replace(caps, kernels=False, kernels_reason=why)
    if caps.local_kernels and isinstance(expert_axis, str):
        raise ValueError(
            f"caps.local_kernels=True with expert_axis={expert_axis!r}: the kernel inside a host needs an axis that "
            "spans one host. Use a mesh with axes (hosts, ranks of a host) and pass both as expert_axis."
        )
    if not isinstance(overlap_chunks, int) or overlap_chunks < 1:
        raise ValueError(f"overlap_chunks={overlap_chunks} must be at least 1, which does not split the tokens.")
    names = tuple(i.name for i in IMPLEMENTATIONS)
    if implementation is not None and implementation not in names:
        raise ValueError(
            f"grouped_matmul has no implementation={implementation!r}; there are {', '.join(map(repr, names))}, or "
            "None to choose."
        )
    slots = -(-config.num_experts // num_ranks)
    if num_local is not None and (not isinstance(num_local, int) or num_local < slots):
        raise ValueError(
            f"num_local={num_local} slots on each of {num_ranks} ranks do not hold {config.num_experts} experts; at "
            f"least {slots} are needed."
        )
    layer = MoELayer(
        config,
        mesh,
        expert_axis,
        tuple(token_axes),
        num_ranks,
        num_local or slots,
        backend,
        experts,
        caps,
        implementation,
        overlap_chunks,
    )
    decision = layer.decision(1)
    layer.layout(1)
    if decision.form == "batched" and config.apply_router_weight_on_input:
        raise ValueError(
            f"apply_router_weight_on_input=True with backend {decision.backend!r}: batched backends apply the weights "
            "at the token's owner. Use a standard backend ('nvlink_one_sided', 'nvlink_two_sided', ...)."
        )
    return layer


def quantize_params(params: MoEParams, fmt: str) -> MoEParams:
    """The same parameters with expert weights kept in a block format; gate and up of an expert share a global scale.

    fmt: a format of weights or activations, see `jmoe.formats.FORMATS`; expert weights become QTensors of the same
    shapes.
    Raises ValueError for weights that are quantised already, and for a format that does not fit their shape.
    """
    gate_up, down = params.experts.gate_up, params.experts.down
    if isinstance(gate_up, QTensor) or isinstance(down, QTensor):
        raise ValueError(
            "quantize_params was given expert weights that are quantised already; quantising twice adds up the errors. "
            "Start from the float weights, or use the parameters as they are."
        )
    gate_up, down = quantize_weights(gate_up, fmt, scale_axes=(1,)), quantize_weights(down, fmt)
    return dataclasses.replace(params, experts=dataclasses.replace(params.experts, gate_up=gate_up, down=down))


def moe_local(
    layer: MoELayer,
    params: MoEParams,
    x: jax.Array,
    *,
    valid: jax.Array | None = None,
    placement: Placement | None = None,
    rank_mask: jax.Array | None = None,
) -> jax.Array:
    """The layer on one rank's tokens, inside the caller's shard_map over the layer's expert axis.

    Arguments:
        params: MoEParams whose experts are this rank's E_loc slots; everything else is replicated.
        x: [T, D], T the same on all ranks. valid: bool [T].
        placement: where the experts are (None: evenly, in order). rank_mask: bool [R], live ranks ("nixl_ep" only).
    Returns: [T, output size] in x's dtype.
    Raises ValueError, while tracing, for shapes that do not fit the layer.
    """
    return _local(layer, params, x, valid, placement, rank_mask)[0]


def moe_local_with_stats(
    layer: MoELayer,
    params: MoEParams,
    x: jax.Array,
    *,
    valid: jax.Array | None = None,
    placement: Placement | None = None,
    rank_mask: jax.Array | None = None,
) -> tuple[jax.Array, MoEStats]:
    """As `moe_local`, with the statistics of all ranks' tokens together (equal on every rank)."""
    y, logits, ids, dropped = _local(layer, params, x, valid, placement, rank_mask)
    stats = router_stats(logits, ids, layer.config.router, valid=valid)
    if layer.mesh is not None:
        stats, dropped = jax.lax.psum((stats, dropped), layer.token_axes)
    return y, summarize(stats, dropped)


def check_layer(layer: object) -> None:
    """TypeError for what `build_moe` did not make."""
    if not isinstance(layer, MoELayer):
        raise TypeError(f"layer is a {type(layer).__name__}; it must be what build_moe(config, mesh=...) returned.")


def _local(layer: MoELayer, params: MoEParams, x, valid, placement, rank_mask):
    check_layer(layer)
    config = layer.config
    x = check_tokens(x, config)
    if x.ndim != 2 or x.shape[1] != config.hidden_size:
        raise ValueError(f"x has shape {x.shape}; moe_local takes [tokens, {config.hidden_size}]: reshape it first.")
    check_params(params, config)
    check_local(layer, params, x)
    check_rank_mask(layer, rank_mask, x.shape[0])
    placement = check_placement(layer, placement, masked=rank_mask is not None)
    with jax.named_scope("router"):
        logits = router_logits(x, params.router, params.router_bias)
    shares = params.shared_gate_up is not None
    how: Any = dict(valid=valid, placement=placement, rank_mask=rank_mask)
    y, ids, dropped = route_and_compute(layer, params, x, logits, **how, out_dtype=jnp.float32 if shares else x.dtype)
    if params.shared_gate_up is not None:
        with jax.named_scope("shared_expert"):
            assert params.shared_down is not None
            shared = shared_expert(x, params.shared_gate_up, params.shared_down, config, gate=params.shared_gate)
            y = y + (shared if valid is None else jnp.where(valid[:, None], shared, jnp.float32(0)))
    return y.astype(x.dtype), logits, ids, dropped


def moe(
    layer: MoELayer,
    params: MoEParams,
    x: jax.Array,
    *,
    valid: jax.Array | None = None,
    placement: Placement | None = None,
    rank_mask: jax.Array | None = None,
) -> jax.Array:
    """The layer on global arrays.

    Arguments:
        layer: of `build_moe`.
        params: MoEParams with experts in physical order [P, ...] (E where it divides into the ranks). Where E does not,
            weights of exactly E experts are accepted and padded in the call.
        x: [..., D]. valid: bool of x's leading shape; False tokens are not routed and give zero.
        placement, rank_mask: as for `moe_local`.
    Returns: [..., output size] in x's dtype.
    Raises ValueError, while tracing, for shapes, weights or a placement that do not fit the layer.
    """
    return _global(layer, params, x, valid, placement, rank_mask, with_stats=False)[0]


def moe_with_stats(
    layer: MoELayer,
    params: MoEParams,
    x: jax.Array,
    *,
    valid: jax.Array | None = None,
    placement: Placement | None = None,
    rank_mask: jax.Array | None = None,
) -> tuple[jax.Array, MoEStats]:
    """As `moe`, with losses, tokens per expert and the number of dropped assignments."""
    y, stats = _global(layer, params, x, valid, placement, rank_mask, with_stats=True)
    assert stats is not None
    return y, stats


def _global(layer: MoELayer, params: MoEParams, x, valid, placement, rank_mask, *, with_stats: bool):
    check_layer(layer)
    config = layer.config
    x = check_tokens(x, config)
    valid = None if valid is None else jnp.asarray(valid)
    rank_mask = None if rank_mask is None else jnp.asarray(rank_mask)
    lead = x.shape[:-1]
    if x.shape[-1:] != (config.hidden_size,) or (valid is not None and valid.shape != lead):
        raise ValueError(
            f"x has shape {x.shape} and valid {None if valid is None else valid.shape}; the layer takes "
            f"[..., {config.hidden_size}] and a mask of x's leading shape."
        )
    check_params(params, config)
    check_global(layer)
    placement = check_placement(layer, placement)
    params = _in_physical_order(layer, params, placement)

    def local(params, x, valid, placement, rank_mask):
        rows = x.reshape(-1, x.shape[-1])
        flags = None if valid is None else valid.reshape(-1)
        options = dict(valid=flags, placement=placement, rank_mask=rank_mask)
        if with_stats:
            y, stats = moe_local_with_stats(layer, params, rows, **options)
        else:
            y, stats = moe_local(layer, params, rows, **options), None
        return y.reshape(*x.shape[:-1], y.shape[-1]), stats

    if layer.mesh is None:
        return local(params, x, valid, placement, rank_mask)

    shards, spec = layer.token_shards, P(layer.token_axes)
    tokens = math.prod(lead)
    pad = 0
    # The leading axis does not split evenly: flatten, and pad with invalid tokens. XLA (JAX 0.10 to 0.12) does not
    # compile gradients through a shard_map of empty arrays, hence a token for each rank where there is none.
    if not lead or lead[0] % shards or not tokens:
        pad = -tokens % shards if tokens else shards
        x = jnp.pad(compat.replicate(x, layer.mesh).reshape(tokens, x.shape[-1]), ((0, pad), (0, 0)))
        if valid is not None:
            valid = compat.replicate(valid, layer.mesh)
        flags = jnp.ones((tokens,), bool) if valid is None else valid.reshape(-1)
        valid = jnp.pad(flags, (0, pad)) if pad or valid is not None else None
    # Static scales that are one number for all experts have no axis to split.
    split = lambda leaf: P(layer.expert_axis) if leaf.ndim else P()  # noqa: E731
    specs = dataclasses.replace(jax.tree.map(lambda _: P(), params), experts=jax.tree.map(split, params.experts))
    arguments = (params, x, valid, placement, rank_mask)
    in_specs = (
        specs,
        spec,
        None if valid is None else spec,
        jax.tree.map(lambda _: P(), placement),
        None if rank_mask is None else P(),
    )
    arguments = compat.reshard(arguments, layer.mesh, in_specs)
    mapped = compat.shard_map(local, mesh=layer.mesh, in_specs=in_specs, out_specs=(spec, P() if with_stats else None))
    y, stats = mapped(*arguments)
    if y.shape[:-1] != lead:
        y = compat.replicate(y, layer.mesh)[:tokens].reshape(*lead, y.shape[-1])
    return y, stats


def _in_physical_order(layer: MoELayer, params: MoEParams, placement: Placement | None) -> MoEParams:
    """Parameters with P expert slots; E experts in logical order are placed where the two differ."""
    held, slots = params.experts.gate_up.shape[0], layer.num_ranks * layer.num_local
    if held == slots:
        return params
    if held != layer.config.num_experts:
        raise ValueError(
            f"The expert weights hold {held} experts; this layer takes {slots} slots in physical order, or its "
            f"{layer.config.num_experts} experts in logical order."
        )
    assert placement is not None  # without one, the experts are as many as the slots
    place = lambda leaf: to_physical_order(leaf, placement) if leaf.ndim else leaf  # noqa: E731
    experts: ExpertWeights = jax.tree.map(place, params.experts)
    return dataclasses.replace(params, experts=experts)
