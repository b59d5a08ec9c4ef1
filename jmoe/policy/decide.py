"""decide(): which bytes travel, and who quantises the activations. Plain Python, run once when a layer is built.

Letters: T tokens on one rank, D hidden size, F expert width, K experts per token, R ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Literal, Protocol

from pallas_kernels.quantize.formats import FORMATS

from ..backends import get_backend
from ..backends.engine import MAX_RANKS
from ..caps import LINKS, DeviceCaps
from ..config import QUANT_ALIASES, MoEConfig, QuantConfig
from . import table
from .measured import against_nccl
from .names import activation_format
from .table import BACKENDS, FLOAT_WIRES, BackendRow, Form, Rule, Where, family


class Experts(Protocol):
    """What a decision needs to know of an implementation of the experts. form: a Form, or "any"."""

    @property
    def name(self) -> str: ...
    @property
    def form(self) -> str: ...
    @property
    def expects_unquantized_inputs(self) -> bool: ...


Transport = Literal["none", "kernel", "hierarchical", "xla"]


@dataclasses.dataclass(frozen=True)
class BackendOptions:
    """Opt-ins of single backends. Each changes its own backend and no other.

    deepep_ll_nvfp4: the low_latency dispatch quantises to NVFP4 (environment: JMOE_DEEPEP_LL_NVFP4=1).
    """

    deepep_ll_nvfp4: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> BackendOptions:
        """The options in the environment (default: this process's). ValueError for a value that is not 0 or 1."""
        value = (os.environ if environ is None else environ).get("JMOE_DEEPEP_LL_NVFP4", "0")
        if value not in ("", "0", "1"):
            raise ValueError(f"JMOE_DEEPEP_LL_NVFP4={value!r} is not understood; set it to 1 or 0, or unset it.")
        return cls(deepep_ll_nvfp4=value == "1")


@functools.cache
def process_options() -> BackendOptions:
    """The environment's options, read at the first decision and never again."""
    return BackendOptions.from_env()


@dataclasses.dataclass(frozen=True)
class Decision:
    """What was decided for one layer. Hashable and static.

    backend, form: how tokens move. wire: what travels: "bfloat16", "float16", "float32" or a format's name.
    where: who makes the experts' low-bit input (or, where they want none, the low-bit wire): "sender", "kernel" (the
        sender's dispatch kernel), "receiver", "experts", "nobody".
    on_receive: what is done to a row that arrived: "pass", "quantize", "dequantize", "requantize" (dequantise, then
        quantise to another format) or "cast".
    delivered: the format in which the experts get their input, None: in the layer's dtype.
    quant_dtype: the format the experts compute with; equals delivered, except where the experts quantise for
    themselves. defer: the rows stay unquantised because the experts asked for that.
    scale: float32 scale that the format of the activations (or else of the wire) has beside its block scales: "none",
        "token" (each row's own; on a quantised wire it travels in the row) or "static" (one number for all ranks).
    combine_wire: what expert outputs travel back as.
    transport: "none", "kernel" (remote writes), "hierarchical" (between hosts first, then inside them) or "xla";
        transport_reason says why.
    native: whether this device's matrix units take `quant_dtype` as it is.
    reason: why, in one or two sentences. notes: what else a user may want to know.
    """

    backend: str
    form: Form
    wire: str
    where: Where
    on_receive: Literal["pass", "quantize", "dequantize", "requantize", "cast"]
    delivered: str | None
    quant_dtype: str | None
    defer: bool
    scale: Literal["none", "token", "static"]
    combine_wire: str
    transport: Transport
    transport_reason: str
    native: bool
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def quantised_wire(self) -> bool:
        """Whether what travels is a block format."""
        return self.wire in FORMATS


def decide(
    config: MoEConfig,
    *,
    backend: str = "auto",
    num_ranks: int = 1,
    tokens: int = 1,
    caps: DeviceCaps | None = None,
    experts: Experts | None = None,
    options: BackendOptions | None = None,
) -> Decision:
    """Decide what travels for a layer.

    backend: a name or alias, or "auto". num_ranks: R. tokens: T, for each rank. caps: of the devices (None: detected).
    experts: the implementation of the experts, None: one that fits. options: backends' opt-ins, None: the process's.

    Raises ValueError where the backend cannot do what the configuration asks for, naming what it can do and what to use
    instead; NotImplementedError where "auto" finds no backend, with every backend's reason.
    """
    caps = DeviceCaps.detect() if caps is None else caps
    options = process_options() if options is None else options
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks} must be at least 1.")
    if tokens < 0:
        raise ValueError(f"tokens={tokens} must not be negative.")
    if (config.quant or QuantConfig()).wire == "fastest":
        return _fastest(config, backend, num_ranks, tokens, caps, experts, options)
    if backend != "auto":
        return _decide(config, get_backend(backend).name, num_ranks, caps, experts, options)
    _check_activations(config)
    _check_wire(config)
    reasons = []
    for name, why in candidates(config, num_ranks=num_ranks, tokens=tokens, caps=caps):
        try:
            decision = _decide(config, name, num_ranks, caps, experts, options)
        except ValueError as refusal:
            reasons.append(f"{name}: {refusal}")
            continue
        return dataclasses.replace(decision, reason=f"backend='auto' chose {name}: {why}. {decision.reason}")
    raise NotImplementedError(
        f"backend='auto' found no backend for {_asked(config)} on {num_ranks} ranks. " + " | ".join(reasons)
    )


def _fastest(
    config: MoEConfig,
    backend: str,
    num_ranks: int,
    tokens: int,
    caps: DeviceCaps,
    experts: Experts | None,
    options: BackendOptions,
) -> Decision:
    """The decision with the lossless wire or, where that should be faster, with a quantised one."""
    from .explain import dispatch_seconds

    def attempt(wire: str) -> Decision:
        changed = dataclasses.replace(config, quant=dataclasses.replace(config.quant, wire=wire))
        return decide(
            changed, backend=backend, num_ranks=num_ranks, tokens=tokens, caps=caps, experts=experts, options=options
        )

    plain = attempt("auto")
    if plain.transport == "none" or config.quant.activations is not None:
        return plain
    try:
        packed = attempt(table.FASTEST_WIRE)
    except (ValueError, NotImplementedError):  # blocks that do not divide the rows, or nobody carries them
        return plain
    known = (dispatch_seconds(config, d, num_ranks=num_ranks, tokens=tokens, caps=caps) for d in (plain, packed))
    times = [t for t in known if t is not None]
    if len(times) < 2:
        why = f"wire='fastest' keeps {plain.wire}: nothing like this machine was measured."
        return dataclasses.replace(plain, notes=(*plain.notes, why))
    microseconds = [f"{1e6 * t:.0f} us as {d.wire}" for t, d in zip(times, (plain, packed), strict=True)]
    chosen = packed if times[1] < times[0] else plain
    why = f"wire='fastest': a dispatch of {tokens} tokens should take {' and '.join(microseconds)}."
    return dataclasses.replace(chosen, notes=(*chosen.notes, why))


def candidates(config: MoEConfig, *, num_ranks: int, tokens: int, caps: DeviceCaps) -> tuple[tuple[str, str], ...]:
    """Backends in the order in which "auto" tries them, each with its reason."""
    # The batched backends come last: they only take batched experts, and nothing else does.
    batched = (("low_latency", "the experts are batched"), ("nixl_ep", "the experts are batched"))
    if num_ranks == 1:
        return (("local", "there is one rank"), *batched)
    many_ranks, many_experts = table.ALLGATHER_RANKS_MANY_EXPERTS
    k = config.num_experts_per_tok
    small = num_ranks <= table.ALLGATHER_RANKS or (num_ranks <= many_ranks and k >= many_experts)
    gather = ("allgather_reducescatter", f"a token goes to most of {num_ranks} ranks anyway (top-{k})")
    two_sided = ("nvlink_two_sided", f"{num_ranks} ranks, {LINKS[caps.link]}, exchange by all-to-all through XLA")
    portable = (gather, two_sided) if small else (two_sided, gather)
    if caps.link == "network":
        ragged = ("deepep_high_throughput", "the ranks are spread over several processes or hosts")
        spread = [ragged, two_sided, gather] if caps.ragged else [two_sided, gather, ragged]
        if _in_two_steps(BACKENDS["nvlink_one_sided"], caps, num_ranks):
            once = f"{num_ranks} ranks on {caps.num_hosts} hosts: each token crosses once to each host that needs it"
            spread.insert(0, ("nvlink_one_sided", once))
        return (*spread, *batched)
    if remote_writes(caps)[0] and tokens >= table.ONE_SIDED_FROM_TOKENS:
        why = f"remote writes over NVLink are ahead of NCCL at every size measured ({against_nccl()})"
        order = [("nvlink_one_sided", why), *portable]
        if tokens < table.LOW_LATENCY_BELOW_TOKENS:
            order.insert(0, ("low_latency", f"{tokens} tokens for each rank is a decode batch"))
        return (*order, *batched)
    return (*portable, *batched)


def remote_writes(caps: DeviceCaps) -> tuple[bool, str]:
    """Whether Pallas kernels can write to the other ranks' memory, and if not, why."""
    if caps.platform != "gpu":
        return False, f"there are no GPUs here ({caps.platform})"
    if caps.compute_capability is None or caps.compute_capability < table.REMOTE_WRITES_SINCE:
        return False, f"{caps.generation} is older than Hopper (sm_90)"
    if not caps.kernels:
        return False, caps.kernels_reason or "this JAX is too old for the kernels"
    if caps.link == "network":
        return False, "remote writes work within one process, and the ranks are in several"
    if caps.link == "host":
        return False, "the GPUs have no access to each other's memory"
    if caps.num_devices > MAX_RANKS:
        return False, f"the kernels serve {MAX_RANKS} GPUs of a process and there are {caps.num_devices}"
    return True, ""


def _in_two_steps(row: BackendRow, caps: DeviceCaps, num_ranks: int) -> bool:
    """Whether rows go between hosts first, and are fanned out inside them (`jmoe.backends.hierarchical`)."""
    return (
        row.uses == "remote_writes"
        and not get_backend(row.name).takes_rank_mask  # a masked rank could not pass on rows of others
        and num_ranks % caps.num_hosts == 0
        and 1 < caps.num_hosts < num_ranks
    )


def transport(row: BackendRow, caps: DeviceCaps, num_ranks: int) -> tuple[Transport, str]:
    """What moves the bytes of a backend on this machine, and why."""
    if row.uses == "nothing" or num_ranks == 1:
        return "none", "one rank: nothing travels"
    if row.uses == "collectives":
        return "xla", "XLA's collectives" + (" (NCCL)" if caps.platform == "gpu" else "")
    able, why_not = remote_writes(caps)
    if able:
        return "kernel", "remote writes from Pallas kernels"
    if _in_two_steps(row, caps, num_ranks):
        nccl = " (NCCL)" if caps.platform == "gpu" else ""
        inside = "remote writes" if caps.local_kernels else f"lax.all_to_all, because {why_not.rstrip('.')}"
        return "hierarchical", (
            f"lax.all_to_all{nccl} between {caps.num_hosts} hosts, once for each (token, host); inside a host {inside}"
        )
    what = "lax.ragged_all_to_all" if row.uses == "ragged" and caps.platform == "gpu" else "lax.all_to_all"
    return "xla", f"{what} with the same layout and results, because {why_not.rstrip('.')}"


# --- one backend


def _asked(config: MoEConfig) -> str:
    quant = config.quant or QuantConfig()
    name = activation_format(quant.activations)
    return f"quant dtype {name!r}" if name is not None else f"unquantised {config.dtype}"


def _with_options(row: BackendRow, options: BackendOptions) -> BackendRow:
    for option, (backend, rules, carries) in table.OPT_INS.items():
        if row.name == backend and getattr(options, option):
            row = dataclasses.replace(row, rules=row.rules | rules, carries=carries)
    return row


def _decide(
    config: MoEConfig,
    backend: str,
    num_ranks: int,
    caps: DeviceCaps,
    experts: Experts | None,
    options: BackendOptions,
) -> Decision:
    quant = config.quant or QuantConfig()
    row = _with_options(BACKENDS[backend], options)
    name = activation_format(quant.activations)
    _check_pairing(row, num_ranks, experts)
    _check_format(row, name, config)
    defer = name is not None and experts is not None and experts.expects_unquantized_inputs
    if defer and not row.defers:
        assert experts is not None
        able = ", ".join(r.name for r in BACKENDS.values() if r.defers)
        raise ValueError(
            f"Experts {experts.name!r} want unquantised inputs and quantise them to {name!r} themselves, and backend "
            f"{row.name!r} quantises in its dispatch or right after it and cannot leave that to them. Backends that "
            f"can: {able}. Use one of those, or experts that take {name!r} as it arrives."
        )
    if defer and quant.wire in FORMATS:
        assert experts is not None
        raise ValueError(
            f"Experts {experts.name!r} want unquantised inputs and quantise them to {name!r} themselves, and "
            f"wire={quant.wire!r} would quantise them before that. With these experts the wire can be "
            f"{', '.join(FLOAT_WIRES)}: leave QuantConfig.wire at 'auto', or use experts that take {name!r} as it "
            f"arrives."
        )
    rule = None if name is None else row.rules[family(name)]
    wire, why = _wire(config, quant, row, name, rule, defer)
    where, on_receive, delivered = _steps(config, row, name, rule, wire, defer)
    moving, moving_why = transport(row, caps, num_ranks)
    native, device_note = _device_note(name or (wire if wire in FORMATS else None), caps)
    scale = _scale(name if name is not None else wire)
    notes = [device_note] if device_note else []
    if row.uses == "ragged" and caps.link == "network" and not caps.ragged:
        notes.append(
            "This JAX refuses a ragged all-to-all between processes, unless XLA_FLAGS has "
            "--xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback=true."
        )
    if on_receive == "requantize":
        notes.append(f"The activations are quantised twice: to {wire} for the wire, then to {name} for the experts.")
    if scale == "static" and wire in FORMATS and num_ranks > 1:
        notes.append(f"{wire} has one static scale, the same number on every rank and for every expert.")
    return Decision(
        backend=row.name,
        form=row.form,
        wire=wire,
        where=where,
        on_receive=on_receive,
        delivered=delivered,
        quant_dtype=name,
        defer=defer,
        scale=scale,
        combine_wire=quant.combine_wire or config.dtype,
        transport=moving,
        transport_reason=moving_why,
        native=native,
        reason=why,
        notes=tuple(notes),
    )


def _check_pairing(row: BackendRow, num_ranks: int, experts: Experts | None) -> None:
    if row.name == "local" and num_ranks > 1:
        raise ValueError(
            f"Backend 'local' was asked to serve {num_ranks} ranks; it serves one and moves nothing. Use "
            f"backend='auto', "
            "or one of " + ", ".join(n for n in BACKENDS if n != "local") + "."
        )
    if experts is not None and experts.form not in (row.form, "any"):
        same = ", ".join(r.name for r in BACKENDS.values() if r.form == experts.form)
        raise ValueError(
            f"Backend {row.name!r} delivers tokens in {row.form} form and experts {experts.name!r} take them in "
            f"{experts.form} form. Backends in {experts.form} form: {same}. Use one of those, or {row.form} experts."
        )


def _check_format(row: BackendRow, name: str | None, config: MoEConfig) -> None:
    if name is None:
        return
    others = [f for f in table.FALLBACKS if f != row.name]
    elsewhere = " or ".join(f"backend={f!r}" for f in others) + (" takes" if len(others) == 1 else " take")
    takes = f"It takes {config.dtype} unquantised and {', '.join(table.members(tuple(row.rules)))}"
    if name not in FORMATS or family(name) == "weights":
        kind = "is not a format that jmoe has" if name not in FORMATS else "is a format of weights, not of activations"
        raise ValueError(
            f"Backend {row.name!r} was asked for activations in quant dtype {name!r}, which {kind}. {takes}. Choose "
            f"one of those; {elsewhere} every activation format that there is."
        )
    if family(name) not in row.rules:
        because = table.REFUSAL_REASONS.get((row.name, family(name)))
        raise ValueError(
            f"Backend {row.name!r} does not take activations in quant dtype {name!r}"
            f"{': ' + because if because else ''}. {takes}. Choose one of those; {elsewhere} {name!r} too."
        )
    _check_block(name, config, f"activations={name!r}")


def _check_activations(config: MoEConfig) -> None:
    """Refuse what no backend could do, before "auto" asks each of them."""
    name = activation_format((config.quant or QuantConfig()).activations)
    if name is None:
        return
    if name not in table.ACTIVATION_FORMATS:
        kind = "is a format of weights, not of activations" if name in FORMATS else "is not a format that jmoe has"
        raise ValueError(
            f"Activations in quant dtype {name!r} were asked for, which {kind}. Formats of activations are "
            f"{', '.join(table.ACTIVATION_FORMATS)}. Choose one of those, or None for unquantised."
        )
    _check_block(name, config, f"activations={name!r}")


def _check_wire(config: MoEConfig) -> None:
    """Refuse a name that nothing has, before "auto" asks each backend."""
    wire, known = config.quant.wire, ("auto", "fastest", *FLOAT_WIRES, *table.ACTIVATION_FORMATS)
    if wire not in (*known, *FORMATS, *QUANT_ALIASES):
        raise ValueError(f"wire={wire!r} is not known; choose one of {', '.join(map(repr, known))}.")


def _check_block(name: str, config: MoEConfig, asked: str) -> None:
    """Blocks must divide the hidden size, padded as MX consumers want it."""
    fmt, hidden = FORMATS[name], config.hidden_size
    alignment = (config.quant or QuantConfig()).mx_alignment
    columns = -(-hidden // alignment) * alignment if fmt.scale == "e8m0" and alignment else hidden
    if columns % fmt.block:
        fitting = ", ".join(n for n in table.ACTIVATION_FORMATS if hidden % FORMATS[n].block == 0)
        choices = f"Formats whose blocks do are {fitting}. Choose one of those, leave" if fitting else "Leave"
        advice = "set QuantConfig.mx_alignment=32" if fmt.scale == "e8m0" else "pad the hidden size"
        raise ValueError(
            f"{asked} quantises blocks of {fmt.block} elements, which do not divide hidden_size={hidden}. {choices} it "
            f"unquantised, or {advice}."
        )


def _wire(
    config: MoEConfig, quant: QuantConfig, row: BackendRow, name: str | None, rule: Rule | None, defer: bool
) -> tuple[str, str]:
    """What travels, and why."""
    if quant.wire != "auto":
        return _requested_wire(config, quant, row)
    if name is None or rule is None:
        travels = "" if row.uses == "nothing" else ", so that is what travels"
        return config.dtype, f"The experts take {config.dtype}{travels}."
    if defer:
        return config.dtype, f"The experts quantise to {name} themselves, so {config.dtype} travels."
    carries = ", ".join(table.members(tuple(f for f in row.rules if row.rules[f].quantised_wire)))
    why = rule.why.format(carries=carries)
    if row.uses == "nothing":
        return name, f"{why[0].upper()}{why[1:]}."
    return (
        (name, f"{name} travels: {why}.") if rule.quantised_wire else (config.dtype, f"{config.dtype} travels: {why}.")
    )


def _requested_wire(config: MoEConfig, quant: QuantConfig, row: BackendRow) -> tuple[str, str]:
    asked = {"none": config.dtype, "bf16": "bfloat16"}.get(quant.wire, quant.wire)
    if asked in FLOAT_WIRES:
        return asked, f"QuantConfig.wire={quant.wire!r} was asked for."
    asked = activation_format(asked)
    assert asked is not None
    usable = table.members(row.carries)
    if asked not in usable:
        because = table.REFUSAL_REASONS.get((row.name, family(asked))) if asked in FORMATS else None
        others = [
            r.name for r in BACKENDS.values() if r.name not in (row.name, "local") and asked in table.members(r.carries)
        ]
        instead = f", or use {' or '.join(map(repr, others))}" if others else ""
        raise ValueError(
            f"Backend {row.name!r} was asked to send wire={quant.wire!r}{': ' + because if because else ''}. It can "
            f"send {', '.join((*FLOAT_WIRES, *usable))}. Set QuantConfig.wire to one of those or 'auto'{instead}."
        )
    wanted = activation_format(quant.activations)
    if family(asked) == "nvfp4" and wanted is not None and family(wanted) == "nvfp4_token":
        raise ValueError(
            f"Backend {row.name!r} was asked to send wire={quant.wire!r} for activations={wanted!r}: a per-tensor "
            f"payload has no place for a token's scale, and small rows would be lost. Set QuantConfig.wire to "
            f"{wanted!r}, {config.dtype!r} or 'auto'."
        )
    _check_block(asked, config, f"wire={asked!r}")
    return asked, f"QuantConfig.wire={quant.wire!r} was asked for."


def _steps(
    config: MoEConfig, row: BackendRow, name: str | None, rule: Rule | None, wire: str, defer: bool
) -> tuple[Where, Literal["pass", "quantize", "dequantize", "requantize", "cast"], str | None]:
    """Who quantises, what the receiver does, and what the experts get: one quantisation of the activations in all,
    unless the user asked for a wire in another format than the experts'.
    """
    deliver = None if defer else name
    if wire in FORMATS:
        rule_of_wire = row.rules.get(family(wire))
        sender: Where = "kernel" if rule_of_wire is not None and rule_of_wire.where == "kernel" else "sender"
        if deliver is not None and family(deliver) == family(wire):  # they differ at most in how they round
            return sender, "pass", wire
        return (sender, "dequantize", None) if deliver is None else (sender, "requantize", deliver)
    unchanged: Literal["pass", "cast"] = "pass" if wire == config.dtype else "cast"
    if name is None:
        return "nobody", unchanged, None
    if defer or (rule is not None and rule.where == "experts"):
        return "experts", unchanged, None
    return "receiver", "quantize", name


def _scale(fmt: str | None) -> Literal["none", "token", "static"]:
    kind = FORMATS[fmt].global_scale if fmt in FORMATS else None
    return "token" if kind == "token" else "static" if kind == "tensor" else "none"


def _device_note(fmt: str | None, caps: DeviceCaps) -> tuple[bool, str]:
    """Whether the matrix units take `fmt` as it is, and what that means for the experts."""
    if fmt is None:
        return False, ""
    if caps.compute_capability is None:
        return (
            False,
            f"On {caps.generation} {fmt} is exact arithmetic on dequantised values: it shows what the format costs.",
        )
    if caps.compute_capability[0] in table.NATIVE.get(family(fmt), ()):
        return True, f"{caps.generation} multiplies {fmt} as it is: it saves bytes on the wire and time in the matmul."
    return False, (
        f"{caps.generation} has no matrix units for {fmt}: it saves bytes on the wire and in memory, and is "
        f"dequantised on "
        "its way into the matmul."
    )
