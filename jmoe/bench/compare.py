"""Printing the records of one run, and comparing those of two."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .common import Record

NOT_MEANINGFUL = "(*) this run says nothing about speed: tiny shapes, or a device that stands in for another."


def number(value: float | None) -> str:
    """A figure for people: four digits, and thousands apart where there are more; "-" for none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Seconds for people, in the unit that fits; "-" for none."""
    if seconds is None:
        return "-"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _short(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


class _Names:
    """Long names, said once below the table: cells refer to them by a letter where there are several."""

    def __init__(self, what: str, names: Sequence[str]):
        self.what, self.names = what, [n for n in dict.fromkeys(names) if n]

    def mark(self, name: str) -> str:
        return f" ({chr(97 + self.names.index(name))})" if name and len(self.names) > 1 else ""

    def legend(self) -> str:
        if not self.names:
            return ""
        return f"{self.what}: " + "; ".join(self.mark(n).strip() + " " * (len(self.names) > 1) + n for n in self.names)


def table(records: Sequence[Record], *, title: str) -> Table:
    """A table with a row for each record. Speeds that are not meaningful are dimmed and marked with (*)."""
    out = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    units = dict.fromkeys(r.unit for r in records)
    ceilings = _Names("ceiling", [r.ceiling_name for r in records if r.ceiling is not None])
    peers = _Names("peer", [r.peer_name for r in records if r.peer is not None])
    errors = _Names("error", [r.error_name for r in records if r.error is not None])
    out.add_column("what")
    out.add_column("case")
    value = next(iter(units)) if len(units) == 1 else "value"
    for column in (value, "time", "ceiling", "share", "peer", "vs peer", "error"):
        out.add_column(column, justify="right")
    for r in records:
        unit = "" if len(units) == 1 else f" {r.unit}"
        share, times = r.share, r.against_peer
        out.add_row(
            r.name,
            r.case,
            "-" if r.value is None else f"{number(r.value)}{unit}{'' if r.meaningful else ' (*)'}",
            duration(r.seconds),
            "-" if r.ceiling is None else f"{number(r.ceiling)}{ceilings.mark(r.ceiling_name)}",
            "-" if share is None else _short(share),
            "-" if r.peer is None else f"{number(r.peer)}{peers.mark(r.peer_name)}",
            "-" if times is None else f"{times:.2f} x",
            "-" if r.error is None else f"{r.error:.2g}{errors.mark(r.error_name)}",
            style="" if r.meaningful else "dim",
        )
    legend = [line for line in (ceilings.legend(), peers.legend(), errors.legend()) if line]
    if not all(r.meaningful for r in records):
        legend.append(NOT_MEANINGFUL)
    out.caption = Text("\n".join(legend))
    out.caption_justify = "left"
    return out


def lines(records: Sequence[Record], *, title: str) -> Text:
    """The same for narrow terminals: what was measured on one line, its figures on the next."""
    out = Text(f"{title}\n", style="")
    for r in records:
        parts = ["-" if r.value is None else f"{number(r.value)} {r.unit}{'' if r.meaningful else ' (*)'}"]
        if r.seconds is not None:
            parts.append(duration(r.seconds))
        if r.share is not None:
            parts.append(f"{_short(r.share)} of {r.ceiling_name}")
        if r.against_peer is not None:
            parts.append(f"{r.against_peer:.2f} x {r.peer_name}")
        if r.error is not None:
            parts.append(f"{r.error_name} {r.error:.2g}")
        out.append(f"\n{r.name}, {r.case}\n", style="bold" if r.meaningful else "dim bold")
        out.append(f"  {', '.join(parts)}", style="" if r.meaningful else "dim")
    if not all(r.meaningful for r in records):
        out.append(f"\n\n{NOT_MEANINGFUL}")
    return out


def report(console: Console, records: Sequence[Record], *, title: str) -> None:
    """Print `table`, or `lines` where the terminal is too narrow for it."""
    wide = table(records, title=title)
    fits = Measurement.get(console, console.options.update(max_width=1000), wide).maximum <= console.width
    console.print(wide if fits else lines(records, title=title), highlight=False)


@dataclasses.dataclass(frozen=True)
class Change:
    """One figure in two runs. gain: how many times as good the second run is; above 1 is better."""

    name: str
    case: str
    unit: str
    before: float | None
    after: float | None
    gain: float | None
    verdict: str


def compare(before: Sequence[Record], after: Sequence[Record], *, threshold: float = 0.05) -> list[Change]:
    """What changed from one run to another, in the order of `before`, then what is new.

    threshold: relative change up to which a figure counts as the same (runs vary by a few percent). Verdicts: "better",
    "worse", "same", "not meaningful" (either run says nothing about speed), "only before", "only after".
    """
    old, new = {r.key: r for r in before}, {r.key: r for r in after}
    changes = []
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key), new.get(key)
        gain, verdict = None, "only before" if b is None else "only after"
        if a is not None and b is not None:
            verdict = "not meaningful"
            if a.meaningful and b.meaningful and a.value and b.value:
                gain = a.value / b.value if b.lower_is_better else b.value / a.value
                verdict = "better" if gain > 1 + threshold else "worse" if gain < 1 - threshold else "same"
        changes.append(Change(*key, a.value if a else None, b.value if b else None, gain, verdict))
    return changes


def compare_table(changes: Sequence[Change], *, title: str) -> Table:
    """A table with a row for each figure of two runs, the verdict last."""
    out = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    out.add_column("what", overflow="fold")
    out.add_column("case", overflow="fold")
    for column in ("A", "B", "times as good", "verdict"):
        out.add_column(column, justify="right")
    colours = {"better": "green", "worse": "red"}
    for c in changes:
        out.add_row(
            c.name,
            c.case,
            f"{number(c.before)} {c.unit}",
            f"{number(c.after)} {c.unit}",
            "-" if c.gain is None else f"{c.gain:.2f} x",
            c.verdict,
            style=colours.get(c.verdict, ""),
        )
    return out


def differing_environment(before: Sequence[Record], after: Sequence[Record]) -> dict[str, tuple[object, object]]:
    """Entries of the two environments that differ, apart from the time: versions, devices."""
    a = dict(before[0].environment) if before else {}
    b = dict(after[0].environment) if after else {}
    return {k: (a.get(k), b.get(k)) for k in sorted({*a, *b} - {"time"}) if a.get(k) != b.get(k)}
