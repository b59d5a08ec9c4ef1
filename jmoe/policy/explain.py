"""explain(): what a layer would do on a machine, in numbers: bytes, buffers, predicted times, and every alternative.

Letters: T tokens on one rank, D hidden size, K experts per token, R ranks, E_loc experts on one rank, C rows reserved.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.quantize.formats import FORMATS

from ..backends import get_backend
from ..backends.base import Exchange
from ..backends.engine import remote_write_engine
from ..caps import DeviceCaps
from ..config import MoEConfig, QuantConfig
from ..formats import bits_per_value
from ..payload import row_layout
from ..plan import host_capacity
from . import cost, table
from .decide import BackendOptions, Decision, Experts, decide
from .layer_cost import LayerTime, layer_seconds, rates_for
from .measured import gathering


@dataclasses.dataclass(frozen=True)
class RowBytes:
    """Bytes of one token's row on the wire, part by part."""

    data: int
    block_scales: int
    row_scale: int
    ids: int
    weights: int
    padding: int
    total: int


@dataclasses.dataclass(frozen=True)
class Alternative:
    """One backend for the layer. decision is None where it refuses; refusal is its message.

    rows_away: rows that leave a rank in one dispatch, on average, padding that travels included. dispatch_bytes,
    combine_bytes: those rows' bytes, for each rank and direction; host_bytes: of a dispatch, what leaves the host.
    dispatch_seconds, combine_seconds: predicted from measurements (`cost.MEASURED_ON`), None where nothing like this
    machine was measured; a combine's include the experts' sums where it takes them. layer: the same for the whole
    layer, by stage. memory: bytes of the exchange buffers of one
    rank, by buffer.
    """

    backend: str
    decision: Decision | None = None
    refusal: str = ""
    row: RowBytes | None = None
    rows_away: float = 0.0
    host_bytes: float = 0.0
    dispatch_bytes: float = 0.0
    combine_bytes: float = 0.0
    dispatch_seconds: float | None = None
    combine_seconds: float | None = None
    layer: LayerTime | None = None
    memory: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found. chosen: the layer as asked for. alternatives: every backend for this number of ranks."""

    config: MoEConfig
    num_ranks: int
    tokens: int
    caps: DeviceCaps
    chosen: Alternative
    alternatives: tuple[Alternative, ...]
    blackwell: Alternative
    weight_bytes: int
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The whole explanation as plain dictionaries, lists, numbers and strings."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """The explanation as a terminal shows it, 100 columns wide and without colours."""
        from .render import to_text

        return to_text(self)


def explain(
    config: MoEConfig,
    *,
    backend: str = "auto",
    num_ranks: int = 1,
    tokens: int = 1,
    caps: DeviceCaps | None = None,
    experts: Experts | None = None,
    options: BackendOptions | None = None,
) -> Explanation:
    """The decision for a layer with its costs, beside what every other backend and a Blackwell machine would do.

    The arguments are those of `decide`, and so are the errors: a refused combination raises instead of being explained.
    """
    caps = DeviceCaps.detect() if caps is None else caps

    def alternative(name: str, machine: DeviceCaps) -> Alternative:
        decision = decide(
            config,
            backend=name,
            num_ranks=num_ranks,
            tokens=tokens,
            caps=machine,
            experts=experts,
            options=options,
        )
        return _costs(config, decision, num_ranks, tokens, machine)

    def attempt(name: str, machine: DeviceCaps) -> Alternative:
        try:
            return alternative(name, machine)
        except (ValueError, NotImplementedError) as refusal:
            return Alternative(backend=name, refusal=str(refusal))

    chosen = alternative(backend, caps)
    newer = blackwell_caps(caps, num_ranks)
    local_experts = -(-config.num_experts // num_ranks)
    matrix = 3 * config.intermediate_size * config.hidden_size
    bits = bits_per_value((config.quant or QuantConfig()).weights or config.dtype)
    return Explanation(
        config=config,
        num_ranks=num_ranks,
        tokens=tokens,
        caps=caps,
        chosen=chosen,
        alternatives=tuple(attempt(n, caps) for n in table.BACKENDS if (n == "local") == (num_ranks == 1)),
        blackwell=attempt(backend, newer),
        weight_bytes=round(local_experts * matrix * bits / 8),
        advice=_advice(config, chosen, num_ranks, tokens, caps),
    )


def blackwell_caps(caps: DeviceCaps, num_ranks: int) -> DeviceCaps:
    """The same machine with Blackwell GPUs in it."""
    link = caps.link if caps.link == "network" else "nvlink" if num_ranks > 1 else "local"
    hosts = caps.num_hosts if caps.num_devices >= num_ranks else 1
    return DeviceCaps("gpu", (10, 0), max(caps.num_devices, num_ranks), link, name="Blackwell GPU", num_hosts=hosts)


def row_bytes(config: MoEConfig, wire: str) -> RowBytes:
    """The parts of a row that travels as `wire`."""
    layout = row_layout(
        config.hidden_size, wire, config.num_experts_per_tok, mx_alignment=(config.quant or QuantConfig()).mx_alignment
    )
    ids = weights = 4 * config.num_experts_per_tok
    parts = (layout.data_bytes, layout.scale_bytes, layout.row_scale_bytes, ids, weights)
    return RowBytes(*parts, padding=layout.row_bytes - sum(parts), total=layout.row_bytes)


def _costs(config: MoEConfig, decision: Decision, num_ranks: int, tokens: int, caps: DeviceCaps) -> Alternative:
    quant = config.quant or QuantConfig()
    backend = get_backend(decision.backend)
    local = -(-config.num_experts // num_ranks)
    capacity = backend.capacity(
        tokens,
        num_ranks=num_ranks,
        num_local=local,
        top_k=config.num_experts_per_tok,
        factor=config.capacity_factor,
    )
    layout = row_layout(config.hidden_size, decision.wire, config.num_experts_per_tok, mx_alignment=quant.mx_alignment)
    if decision.combine_wire in FORMATS:
        back = row_layout(config.hidden_size, decision.combine_wire, 0, mx_alignment=quant.mx_alignment).row_bytes
    else:
        back = jnp.dtype(decision.combine_wire).itemsize * config.hidden_size
        if decision.backend == "allgather_reducescatter":
            back = 4 * config.hidden_size  # psum_scatter adds in float32
    hosts, across = (caps.num_hosts if decision.transport == "hierarchical" else 1), 0
    if hosts > 1:
        targets = num_ranks // hosts * (local if decision.form == "batched" else 1)
        across = host_capacity(tokens, targets=targets, capacity=capacity)
    exchange = Exchange(
        axis_name=None,
        num_ranks=num_ranks,
        num_local=local,
        capacity=capacity,
        dtype=config.dtype,
        num_hosts=hosts,
        host_capacity=across,
        engine=remote_write_engine(caps) if decision.transport == "kernel" else None,
    )
    engine = exchange.engine
    gathers = engine is not None and decision.combine_wire not in FORMATS and engine.gathers(exchange, decision.form)
    if gathers:
        note = f"The combine takes the weighted sums of the experts' outputs on their way ({gathering()})."
        decision = dataclasses.replace(decision, notes=(*decision.notes, note))
    memory = backend.memory(layout, exchange, combine_row_bytes=back if decision.combine_wire in FORMATS else None)
    if hosts > 1 and caps.local_kernels:  # reads and writes rows where they lie
        memory = memory | {"dispatch_send": 0, "combine_receive": 0}
    counted: dict[str, Any] = dict(num_ranks=num_ranks, tokens=tokens, capacity=capacity, num_hosts=caps.num_hosts)
    k = config.num_experts_per_tok
    once = engine is not None and engine.fans_out(exchange, decision.form, tokens, k, layout.data_bytes)
    inside = caps.local_kernels
    rows = cost.remote_rows(decision, config, **counted, kernel_inside=inside, once=once)
    rows_back = cost.remote_rows(decision, config, **counted, kernel_inside=inside)
    dispatch = cost.exchange_seconds(decision, rows * layout.row_bytes, caps)
    rates = rates_for(caps)
    if once and dispatch is not None and rates is not None:
        dispatch += 2 * (rows_back - rows) * layout.data_bytes / rates.rows
    combine = cost.exchange_seconds(decision, rows_back * back, caps, back=True)
    layer = layer_seconds(config, tokens=tokens, num_ranks=num_ranks, caps=caps)
    if layer is not None:
        if gathers and combine is not None:
            combine, layer = cost.gathering_seconds(combine, layer.sums), dataclasses.replace(layer, sums=0.0)
        layer = None if dispatch is None or combine is None else dataclasses.replace(layer, exchange=dispatch + combine)
    return Alternative(
        backend=decision.backend,
        decision=decision,
        row=row_bytes(config, decision.wire),
        rows_away=rows,
        host_bytes=cost.host_rows(decision, config, **counted) * layout.row_bytes,
        dispatch_bytes=rows * layout.row_bytes,
        combine_bytes=rows_back * back,
        dispatch_seconds=dispatch,
        combine_seconds=combine,
        layer=layer,
        memory=memory,
    )


def dispatch_seconds(
    config: MoEConfig, decision: Decision, *, num_ranks: int, tokens: int, caps: DeviceCaps
) -> float | None:
    """Predicted seconds of one dispatch, quantisation included; None where nothing like this machine was measured."""
    moving = _costs(config, decision, num_ranks, tokens, caps).dispatch_seconds
    rates = rates_for(caps)
    if moving is None or rates is None:
        return None
    inside = decision.transport == "kernel"  # the kernel that sends rows quantises them on the way
    return moving + (tokens * config.hidden_size * 3 / rates.rows if decision.quantised_wire and not inside else 0.0)


def _advice(config: MoEConfig, chosen: Alternative, num_ranks: int, tokens: int, caps: DeviceCaps) -> tuple[str, ...]:
    """What the user could ask for and the policy does not do unasked, because it changes the numbers."""
    decision = chosen.decision
    assert decision is not None and chosen.row is not None
    advice = []
    if num_ranks > 1 and decision.quant_dtype is None and not decision.quantised_wire:
        usable = [
            name
            for name in ("mxfp8", "nvfp4_token", "nvfp4")
            if name in table.members(table.BACKENDS[decision.backend].carries)
            and config.hidden_size % FORMATS[name].block == 0
        ]
        if usable:
            saved = chosen.row.total / row_bytes(config, usable[0]).total
            sent = chosen.dispatch_bytes
            where = {
                "network": f"about {table.COMPRESSION_PAYS_TOKENS_NETWORK} tokens for each rank between hosts",
                "nvlink": f"about {table.COMPRESSION_PAYS_BYTES / 1e6:.0f} MB for each rank on NVLink",
            }
            pays = {
                "network": tokens >= table.COMPRESSION_PAYS_TOKENS_NETWORK,
                "nvlink": sent >= table.COMPRESSION_PAYS_BYTES,
            }.get(caps.link)
            does = "Whether it pays here was not measured" if pays is None else "It pays" if pays else "It does not pay"
            here = "" if pays is None else " here"
            advice.append(
                f"QuantConfig(wire={usable[0]!r}) would make the rows {saved:.2f} x smaller, with a quantisation "
                f"error. {does}{here}: break-even is {where.get(caps.link, where['nvlink'])}, and this layer sends "
                f"{tokens} tokens, {sent / 1e6:.3g} MB."
            )
    between_hosts = num_ranks > 1 and caps.link == "network"
    if between_hosts and decision.combine_wire not in FORMATS and tokens >= table.QUANTISED_COMBINE_TOKENS:
        advice.append(
            f"QuantConfig(combine_wire='mxfp8') pays from about {table.QUANTISED_COMBINE_TOKENS} tokens for each rank, "
            "and adds its error to every partial sum."
        )
    return (*advice, *_faster_weights(config, num_ranks, tokens, caps))


def _faster_weights(config: MoEConfig, num_ranks: int, tokens: int, caps: DeviceCaps) -> list[str]:
    """Formats of the weights (and activations) with which the experts should be at least 1.2 times as fast."""
    now = layer_seconds(config, tokens=tokens, num_ranks=num_ranks, caps=caps)
    if now is None or config.quant.weights is not None:
        return []
    advice = []
    for changes in ({"weights": "nvfp4"}, {"weights": "fp8_128x128", "activations": "fp8_128"}):
        quant = dataclasses.replace(config.quant, **changes)
        then = layer_seconds(dataclasses.replace(config, quant=quant), tokens=tokens, num_ranks=num_ranks, caps=caps)
        if then is not None and now.total > 1.2 * then.total:
            asked = ", ".join(f"{k}={v!r}" for k, v in changes.items())
            advice.append(
                f"QuantConfig({asked}) would take the experts of {tokens} tokens from {1e6 * now.total:.0f} to "
                f"{1e6 * then.total:.0f} us, with a quantisation error."
            )
    return advice
