"""An explanation as a terminal shows it."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..config import QuantConfig
from ..formats import describe
from . import cost
from .explain import Alternative, Explanation
from .layer_cost import MEASURED_ON

WHERE = {
    "sender": "the sender, before the rows leave",
    "kernel": "the sender's dispatch kernel, on the way out",
    "receiver": "the receiver, when the rows have arrived",
    "experts": "the experts themselves",
    "nobody": "nobody",
}
ON_RECEIVE = {
    "pass": "taken as they are",
    "quantize": "quantised",
    "dequantize": "dequantised",
    "requantize": "dequantised, then quantised to the experts' format",
    "cast": "cast to the layer's dtype",
}
BUFFERS = {
    "dispatch_send": "dispatch, staged to send",
    "dispatch_receive": "dispatch, received",
    "combine_send": "combine, to send",
    "combine_receive": "combine, received",
    "between_hosts": "between hosts, both ways",
}


def size(nbytes: float) -> str:
    """Bytes with a decimal unit."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def duration(seconds: float | None) -> str:
    """Seconds with a unit; "?" for None, "-" for nothing to do."""
    if seconds is None:
        return "?"
    if seconds == 0:
        return "-"
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _pairs(rows: list[tuple[str, str]]) -> Padding:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column()
    for key, value in rows:
        grid.add_row(key, Text(value))
    return Padding(grid, (0, 0, 1, 2))


def _heading(text: str) -> Text:
    return Text(text, style="bold")


def _layer(e: Explanation) -> list[tuple[str, str]]:
    c, quant = e.config, e.config.quant or QuantConfig()
    local = -(-c.num_experts // e.num_ranks)
    return [
        ("layer", f"D {c.hidden_size}, F {c.intermediate_size}, {c.num_experts} experts, top {c.num_experts_per_tok}"),
        ("activations", describe(quant.activations or c.dtype)),
        ("weights", f"{describe(quant.weights or c.dtype)}; {size(e.weight_bytes)} on each rank"),
        ("ranks", f"{e.num_ranks}, {local} experts and {e.tokens} tokens on each"),
        ("machine", e.caps.describe()),
    ]


def _decision(a: Alternative) -> list[tuple[str, str]]:
    d, r = a.decision, a.row
    assert d is not None and r is not None
    parts = [
        (r.data, "data"),
        (r.block_scales, "block scales"),
        (r.row_scale, "row scale"),
        (r.ids, "expert ids"),
        (r.weights, "weights"),
        (r.padding, "padding"),
    ]
    rows = [
        ("backend", f"{d.backend}, {d.form} form"),
        ("moved by", d.transport_reason),
    ]
    by = WHERE[d.where]
    if d.transport != "none":
        row = " + ".join(f"{n} {what}" for n, what in parts if n)
        each = "expert of the token" if d.form == "batched" else "rank with an expert of the token"
        rows += [
            ("travels", f"{d.wire}: {describe(d.wire)}"),
            ("bytes per row", f"{r.total} = {row}; one row for each {each}"),
            ("back", describe(d.combine_wire)),
        ]
    elif d.where == "sender":
        by = "this rank, once, before its experts sort the rows"
    rows += [("quantised by", by), ("on arrival", ON_RECEIVE[d.on_receive])]
    if d.scale != "none":
        kept = {"token": "each token's own", "static": "one static number, equal on all ranks"}
        rows.append(("float32 scale", kept[d.scale]))
    rows.append(("why", d.reason))
    if a.layer is not None:
        t = a.layer
        parts = [("router and launches", t.router), ("moving rows", t.permute), ("matmuls", t.matmuls)]
        parts += [(name, s) for name, s in (("sums", t.sums), ("exchange", t.exchange)) if s]
        stages = ", ".join(f"{name} {duration(s)}" for name, s in parts)
        rows.append(("should take", f"{duration(t.total)}: {stages} (from measurements on {MEASURED_ON})"))
    return rows + [("note", note) for note in d.notes]


def _table(e: Explanation, *, wide: bool) -> Table:
    """One line for each backend; a narrow terminal goes without who quantises and the bytes of a row.

    Over several hosts the bytes that leave a host take the place of times, of which none are predicted there.
    """
    out = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    hosts = e.caps.num_hosts > 1
    timed = wide and not hosts and any(a.layer for a in e.alternatives)  # then the whole layer takes the place of "by"
    for column in ("backend", "travels", "by") if wide and not timed else ("backend", "travels"):
        out.add_column(column, no_wrap=True)
    times = ("dispatch", "combine", "layer") if timed else ("dispatch", "combine")
    for column in ("B/row", "sent", *(("to hosts",) if hosts else times), "buffers")[not wide :]:
        out.add_column(column, justify="right", no_wrap=True)
    for a in e.alternatives:
        mine = a.backend == e.chosen.backend
        name = ("> " if mine else "  ") + a.backend
        if a.decision is None or a.row is None:
            out.add_row(name, "refused", style="dim")
            continue
        cells = [name, a.decision.wire]
        if wide:
            cells += [str(a.row.total)] if timed else [a.decision.where, str(a.row.total)]
        cells.append(size(a.dispatch_bytes))
        if hosts:
            cells.append(size(a.host_bytes))
        else:
            layer = [duration(a.layer.total if a.layer else None)] if timed else []
            cells += [duration(a.dispatch_seconds), duration(a.combine_seconds), *layer]
        cells.append(size(sum(a.memory.values())))
        out.add_row(*cells, style="bold" if mine else "")
    return out


def _blackwell(e: Explanation) -> str:
    a, d = e.blackwell, e.chosen.decision
    if a.decision is None or d is None:
        return f"It would refuse: {a.refusal}"
    n = a.decision
    moves = "Nothing would travel" if n.transport == "none" else f"{n.backend} would send {n.wire}"
    same = (n.backend, n.wire, n.where) == (d.backend, d.wire, d.where)
    by = "nothing is quantised" if n.where == "nobody" else f"quantised by {WHERE[n.where]}"
    text = f"{moves}{', as here' if same else f' ({n.transport_reason})'}; {by}. "
    if n.quant_dtype is None:
        return text + (
            "The experts take unquantised rows, so its block-scaled matrix units would idle: activations='mxfp8' or "
            "'nvfp4_token' would use them."
        )
    return text + " ".join(n.notes)


def render(e: Explanation, *, width: int = 100) -> Group:
    """Everything, for `rich.console.Console.print`."""
    parts = [
        _heading("What is asked for"),
        _pairs(_layer(e)),
        _heading("What happens"),
        _pairs(_decision(e.chosen)),
    ]
    if e.chosen.memory and sum(e.chosen.memory.values()):
        lines = [(BUFFERS.get(k, k), size(v)) for k, v in e.chosen.memory.items() if v]
        parts += [
            _heading("Exchange buffers of one rank"),
            _pairs([*lines, ("in all", size(sum(e.chosen.memory.values())))]),
        ]
    if e.num_ranks > 1:
        note = "sent: what leaves one rank in a dispatch. buffers: those of one rank. "
        if e.caps.num_hosts > 1:
            note += "to hosts: what of it leaves its host. "
        if any(a.dispatch_seconds for a in e.alternatives):
            note += f"Times are predicted from measurements on {cost.MEASURED_ON}."
        else:
            note += f"Times are not predicted: the measurements are from {cost.MEASURED_ON}."
        parts += [_heading("All backends, for this layer"), Padding(_table(e, wide=width >= 100), (0, 0, 0, 1))]
        parts.append(Padding(Text(note, style="dim"), (0, 0, 1, 2)))
    refusals: dict[str, tuple[list[str], str]] = {}
    for a in (a for a in e.alternatives if a.decision is None):  # said once where several say the same
        refusals.setdefault(a.refusal.replace(repr(a.backend), ""), ([], a.refusal))[0].append(a.backend)
    if refusals:
        rows = [(", ".join(names), text) for names, text in refusals.values()]
        parts += [_heading("Why the others refuse"), _pairs(rows)]
    if e.caps.generation != "Blackwell":
        parts += [_heading("On Blackwell"), Padding(Text(_blackwell(e)), (0, 0, 1, 2))]
    if e.advice:
        parts += [_heading("What you could ask for"), *(Padding(Text(line), (0, 0, 1, 2)) for line in e.advice)]
    return Group(*parts)


def to_text(e: Explanation, *, width: int = 100) -> str:
    """The explanation as plain text, `width` columns wide and without colours."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(e, width=width))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).strip() + "\n"
