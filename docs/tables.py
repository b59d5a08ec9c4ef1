"""The documentation's tables of the layer and of generation: a row for each number of tokens, a column for each way."""

from __future__ import annotations

from collections.abc import Sequence

from jmoe.bench import layer, model
from jmoe.bench.common import Record
from jmoe.bench.compare import duration
from jmoe.caps import DeviceCaps
from jmoe.config import MoEConfig
from jmoe.policy import explain

H200 = DeviceCaps("gpu", (9, 0), 2, "nvlink", name="NVIDIA H200")
ALONE = (*(v.name for v in layer.VARIANTS), *layer.PEERS)  # columns, in this order
WIRES = tuple(w.name for w in layer.WIRES)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def layer_text(records: Sequence[Record]) -> str:
    """Times of a call, for each shape on one GPU and on several, and what the profiler and `explain` say of them."""
    parts = []
    timed = [r for r in records if r.unit == "tokens/s" and r.seconds]
    for shape in dict.fromkeys(r.parameters["shape"] for r in timed):
        figures = {(r.name, r.parameters["T"], r.parameters["R"]): r for r in timed if r.parameters["shape"] == shape}
        for ranks in sorted({r for _, _, r in figures}):
            parts += _times(shape, ranks, figures)
    return "\n\n".join([*parts, "\n".join(f"* {line}" for line in _said(timed))])


def _times(shape: str, ranks: int, figures: dict[tuple[str, int, int], Record]) -> list[str]:
    """The table of a shape on so many GPUs: cells are a call's time, and how many times as fast as BF16 that is."""
    order = ALONE if ranks == 1 else WIRES
    names = [n for n in order if any((n, r) == (name, ranks) for name, _, r in figures)]
    rows = []
    for tokens in sorted({t for _, t, r in figures if r == ranks}):
        base, alone = figures.get((order[0], tokens, ranks)), figures.get((ALONE[0], tokens, 1))
        row = [f"{tokens:,}"]
        for name in names:
            r = figures.get((name, tokens, ranks))
            cell = "" if r is None else duration(r.seconds)
            if r is not None and base is not None and r is not base:
                times = _seconds(base) / _seconds(r)
                cell += f" ({times:.2f} x)" if times > 0.1 else f" ({times:.2g} x)"
            elif r is not None and ranks > 1 and alone is not None:
                cell += f" ({_seconds(r) / _seconds(alone):.2f} of one GPU's time)"
            row.append(cell)
        rows.append(row)
    head = [n.removeprefix("EP, ") for n in names]
    if ranks == 1:
        return [f"{shape}, one GPU (in brackets: times as fast as {order[0]})", table(["tokens", *head], rows)]
    what = f"{shape}, expert-parallel over {ranks} GPUs (in brackets: times as fast as the BF16 wire)"
    return [what, table(["tokens on each", *head], rows)]


def _seconds(r: Record) -> float:
    assert r.seconds is not None
    return r.seconds


def _said(records: Sequence[Record]) -> list[str]:
    """From which number of tokens on a wire is faster, what lies between kernels, and how good predictions are."""
    out = []
    for shape in dict.fromkeys(r.parameters["shape"] for r in records):
        first = [
            c for c in layer.compared([r for r in records if r.parameters["shape"] == shape]) if c.unit == "tokens"
        ]
        if first:
            whens = [
                "nowhere" if not r.value else "from 1 token" if r.value == 1 else f"from {number(r.value)} tokens"
                for r in first
            ]
            wires = [r.name.removesuffix(" wire faster from").removeprefix("EP, ") for r in first]
            each = ", ".join(f"{wire} {when}" for wire, when in zip(wires, whens, strict=True))
            out.append(f"Wires with which {shape} is faster than with BF16, by tokens on each GPU: {each}.")
    for ranks in sorted({r.parameters["R"] for r in records}):
        spans: dict[str, list[float]] = {}
        for p in (r.parameters for r in records):
            if p["R"] == ranks and "busy_us" in p:
                spans.setdefault("one token" if p["T"] == 1 else "several tokens", []).append(
                    p["span_us"] / p["busy_us"]
                )
        if spans:
            on = "one GPU" if ranks == 1 else f"{ranks} GPUs"
            each = ", ".join(f"of {what} {min(xs):.2f} to {max(xs):.2f}" for what, xs in spans.items())
            out.append(f"What a call spans on {on}, over the sum of its kernels' own times: {each}.")
    right = [x for r in records if (x := predicted(r)) is not None]
    if right:
        out.append(f"`jmoe explain`, fitted to such times, predicts {min(right):.2f} to {max(right):.2f} of these.")
    return out


def predicted(r: Record) -> float | None:
    """What `jmoe explain` says of a layer's time, over that time; None for other records."""
    quants = {v.name: v.quant for v in layer.VARIANTS + layer.WIRES}
    if r.name not in quants or not r.seconds:
        return None
    p = r.parameters
    config = MoEConfig(p["D"], p["F"], p["E"], p["K"], quant=quants[r.name])
    found = explain(config, num_ranks=p["R"], tokens=p["T"], caps=H200).chosen.layer
    return None if found is None else found.total / r.seconds


def layer_details(records: Sequence[Record]) -> str:
    """Kernels and predictions of every layer for which they are known."""
    head = ("what", "shape", "time", "kernels", "their own times", "first to last", "over their sum", "predicted")
    rows = []
    for r in records:
        p = r.parameters
        if r.seconds is None or "busy_us" not in p:
            continue
        busy, span = (p[k] * 1e-6 for k in ("busy_us", "span_us"))
        times = [duration(s) for s in (r.seconds, busy, span)]
        x = predicted(r)
        right = "" if x is None else f"{x:.2f}"
        rows.append([r.name, r.case, times[0], f"{p['kernels']:.0f}", times[1], times[2], f"{span / busy:.2f}", right])
    return table(head, rows) if rows else ""


def model_text(records: Sequence[Record]) -> str:
    """Tokens per second of prefill and of decoding by batch, for each format of the weights, with the share of the
    ceiling."""
    columns = list(dict.fromkeys((r.parameters["R"], r.parameters["weights"]) for r in records))
    order = [w.name for w in model.WEIGHTS]
    columns.sort(key=lambda c: (c[0], order.index(c[1])))
    rows: dict[str, dict[tuple[int, str], str]] = {}
    for r in sorted(records, key=lambda r: (r.parameters["what"] == "decode", r.parameters["B"])):
        p = r.parameters
        what = "prefill" if p["what"] == "prefill" else f"decode, {r.case.partition(', R=')[0]}"
        share = "" if r.share is None else f", {100 * r.share:.0f} %"
        rows.setdefault(what, {})[p["R"], p["weights"]] = number(r.value) + share
    head = [f"{w} weights" + ("" if ranks == 1 else f", {ranks} GPUs") for ranks, w in columns]
    ceilings = dict.fromkeys(f"{r.parameters['what']}: {r.ceiling_name}" for r in records)
    body = [[what, *(cells.get(c, "") for c in columns)] for what, cells in rows.items()]
    return table(["tokens/s, share of the ceiling", *head], body) + f"\n\nCeilings: {'; '.join(ceilings)}."
