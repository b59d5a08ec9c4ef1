"""Makes what is measured or computed in the documentation: tables and picture of the README, and two pages of docs/.

Sources: docs/figures/*.json, each written by `python -m jmoe bench NAME --json docs/figures/NAME.json` on GPUs (`-` in
NAME becomes `_`), and jmoe's own rules (`jmoe.support`). Text between `<!-- made: NAME -->` and `<!-- end: NAME -->` is
replaced; the rest of a file is left alone.

    python docs/make.py           writes the texts, and the picture where a figure has changed
    python docs/make.py --check   changes nothing; exit status 1, and what is out of step
"""

from __future__ import annotations

import argparse
import hashlib
import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

from jmoe import support
from jmoe.bench import BENCHES
from jmoe.bench.common import Record, read_json
from jmoe.formats import FORMATS, bits_per_value

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "figures"
PICTURE = FIGURES / "throughput.png"

# What the README shows of each benchmark, in this order: patterns of a record's name and case. A pattern shows the
# first record that fits, so that every line stands for one figure of one run. docs/figures.md has all of them.
HEADLINES: dict[str, tuple[tuple[str, str], ...]] = {
    "quantize": (
        (r"quantise mxfp8$", r"^16384x7168"),
        (r"quantise fp8_128$", r"^16384x7168"),
        (r"quantise nvfp4_token$", r"^16384x7168"),
        (r"quantise nvfp4_token_4o6$", r"^16384x7168"),
    ),
    "dispatch": (
        (r"^dispatch nvlink_one_sided bfloat16", r"T=8192 "),
        (r"^dispatch nvlink_one_sided mxfp8", r"T=8192 "),
        (r"^dispatch nvlink_one_sided nvfp4_token", r"T=8192 "),
        (r"^combine nvlink_one_sided bfloat16", r"T=8192 "),
    ),
    "grouped-matmul": (
        (r"^bf16$", r"T=32768 K=4096 N=3072 E=32$"),
        (r"^fp8$", r"T=32768 K=4096 N=3072 E=32$"),
        (r"^bf16$", r"T=64 K=7168"),
        (r"^nvfp4$", r"T=64 K=7168"),
    ),
    "layer": ((r".", r"T=8192"), (r".", r"T=64\b"), (r".", r"T=1\b")),
    "model": ((r"prefill", r"."), (r"decode", r"batch 1\b"), (r"decode", r"batch 64\b")),
}
JMOE, PEERS = "#1b6ca8", ("#d1495b", "#e0a030", "#7f7f7f", "#6a4c93", "#2e8b57", "#8c564b")  # colours
MOST = 8  # lines of a benchmark without headlines that fit


def load(folder: Path = FIGURES) -> dict[str, list[Record]]:
    """Benchmark -> records, of the files that there are. ValueError for a file that is not what its name says."""
    runs = {}
    for bench in BENCHES:
        path = folder / f"{bench.replace('-', '_')}.json"
        if not path.exists():
            continue
        name, records = read_json(path)
        if name != bench:
            raise ValueError(f"{path} is of `jmoe bench {name}`; its name says {bench}. Rename it.")
        if not records or not all(r.meaningful for r in records):
            raise ValueError(f"{path} has figures that say nothing about speed (a smoke run?); make it on GPUs.")
        runs[bench] = records
    return runs


def headlines(bench: str, records: Sequence[Record]) -> list[Record]:
    """The records that the README shows."""
    found = []
    for name, case in HEADLINES.get(bench, ()):
        fits = (r for r in records if re.search(name, r.name) and re.search(case, r.case) and r not in found)
        found += [r for r in [next(fits, None)] if r is not None]
    return found or sorted(records, key=lambda r: r.peer is None)[:MOST]


# --- text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return (
        f"{seconds * 1e6:.3g} us"
        if seconds < 1e-3
        else f"{seconds * 1e3:.3g} ms"
        if seconds < 1
        else f"{seconds:.3g} s"
    )


def peers(r: Record) -> dict[str, float]:
    """Every peer's figure of a record, in its unit."""
    several = r.parameters.get("peers") or {}
    return dict(several) or ({r.peer_name: r.peer} if r.peer is not None else {})


def figure_row(r: Record) -> list[str]:
    share = "" if r.share is None else f"{100 * r.share:.0f} % of {r.ceiling_name}"
    others = ", ".join(f"{name} {number(value)}" for name, value in peers(r).items())
    times = "" if r.against_peer is None else f"{r.against_peer:.2f} x"
    error = "" if r.error is None else f"{r.error:.1e}"
    return [r.name, r.case, f"{number(r.value)} {r.unit}", duration(r.seconds), share, others, times, error]


FIGURE_HEAD = ("what", "shape", "jmoe", "time", "share of the ceiling", "peers", "against the best", "error")


def where(records: Sequence[Record]) -> str:
    e = records[0].environment
    torch = f", torch {e['torch']}" if e.get("torch") else ""
    return f"{e['num_devices']} x {e['device_kind']}, JAX {e['jax']}{torch}, {str(e['time'])[:10]}"


def figures_text(runs: dict[str, list[Record]]) -> str:
    """The README's figures: the picture, and a table of headlines for each benchmark."""
    if not runs:
        return "No figures are committed yet: `python -m jmoe bench NAME --json docs/figures/NAME.json` writes them."
    parts = ["![throughput of jmoe and its peers](docs/figures/throughput.png)"]
    keep = [0, 1, 2, 4, 5, 6]  # times and errors are in docs/figures.md
    for bench, records in runs.items():
        rows = [[figure_row(r)[i] for i in keep] for r in headlines(bench, records)]
        parts += [f"**{BENCHES[bench]}** ({where(records)})", table([FIGURE_HEAD[i] for i in keep], rows)]
    return "\n\n".join(parts)


def all_figures_text(runs: dict[str, list[Record]]) -> str:
    """Every record of every run."""
    if not runs:
        return "None yet."
    parts = []
    for bench, records in runs.items():
        errors = ", ".join(dict.fromkeys(r.error_name for r in records if r.error_name))
        parts += [
            f"## {bench}",
            f"{BENCHES[bench]} ({where(records)})" + (f"; error: {errors}" if errors else ""),
            table(FIGURE_HEAD, [figure_row(r) for r in records]),
        ]
    return "\n\n".join(parts)


def _name(fmt: str | None) -> str:
    return "bfloat16" if fmt is None else f"`{fmt}`"


def support_text() -> str:
    """The README's support matrix: backends by formats, and what does the work on each architecture."""
    hopper = "Hopper"
    rows = []
    for backend in support.backends():
        cells = [support.exchange(backend, fmt, hopper) for fmt in support.ACTIVATIONS]
        rows.append([f"`{backend}`", *("refused" if c.status == "refused" else c.why for c in cells)])
    by_format = table(["backend", *map(_name, support.ACTIVATIONS)], rows)
    parts = []
    parts.append(["quantise, dequantise", *(_cell(support.quantising(a)) for a in support.ARCHITECTURES)])
    for backend in ("nvlink_two_sided", "nvlink_one_sided", "deepep_high_throughput", "low_latency"):
        cells = [_cell(support.exchange(backend, None, a)) for a in support.ARCHITECTURES]
        parts.append([f"exchange, `{backend}`", *cells])
    for fmt in support.WEIGHTS:
        cells = [_cell(support.matmul(None, fmt, a)) for a in support.ARCHITECTURES]
        parts.append([f"matmul, {_name(fmt)} weights", *cells])
    both = [_cell(support.matmul("fp8_128", "fp8_128x128", a)) for a in support.ARCHITECTURES]
    parts.append(["matmul, `fp8_128` rows and `fp8_128x128` weights", *both])
    by_machine = table(["", *support.ARCHITECTURES], parts)
    return "\n\n".join(
        [
            "Who quantises the activations, for each backend and family of formats (refused: `ValueError` when the\n"
            "layer is built, naming what to use instead):",
            by_format,
            "What does the work, and whether tests have **run** there or it has only been compiled:",
            by_machine,
        ]
    )


def _cell(c: support.Support) -> str:
    how = f" ({c.how})" if c.how else ""
    return f"**run**{how}" if c.status == "run" else f"{c.status}{how}"


def all_support_text() -> str:
    """The whole product of architectures, backends and formats."""
    parts = []
    for architecture, caps in support.ARCHITECTURES.items():
        rows = []
        for backend in support.backends():
            cells = [support.exchange(backend, fmt, architecture) for fmt in support.ACTIVATIONS]
            rows.append([f"`{backend}`", *map(_cell, cells)])
        heads = ["backend", *map(_name, support.ACTIVATIONS)]
        parts += [f"## {architecture} ({caps.describe()})", table(heads, rows)]
    refusals = {}
    for backend in support.backends():
        for fmt in support.ACTIVATIONS:
            cell = support.exchange(backend, fmt, "Hopper")
            if cell.status == "refused":
                refusals.setdefault(cell.why, None)
    return "\n\n".join([*parts, "## Refusals", *(f"* {why}" for why in refusals)])


def formats_text() -> str:
    """The formats, with what one value costs."""
    rows = []
    for name, f in FORMATS.items():
        scale = {"f32": "float32", "e8m0": "E8M0", "e4m3": "E4M3"}[f.scale]
        block = f"{f.block_rows} x {f.block}" if f.block_rows > 1 else str(f.block)
        notes = [f"float32 per {f.global_scale}"] if f.global_scale else []
        notes += ["4-over-6"] if f.four_over_six else []
        notes += ["power of two"] if f.pow2 else []
        notes += ["rounded down"] if f.scale == "e8m0" and f.rule == "floor" else []
        rows.append([f"`{name}`", f.element.upper(), block, ", ".join([scale, *notes]), f"{bits_per_value(name):.4g}"])
    return table(["format", "values", "block", "scales", "bits per value"], rows)


def texts(runs: dict[str, list[Record]]) -> dict[Path, str]:
    """File -> what it should hold."""
    made = {
        "figures": figures_text(runs),
        "all figures": all_figures_text(runs),
        "support": support_text(),
        "all support": all_support_text(),
        "formats": formats_text(),
    }
    out = {}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        out[path] = fill(path.read_text(), made, path)
    return out


def fill(text: str, made: dict[str, str], path: Path) -> str:
    """`text` with what lies between marks replaced. ValueError for a mark that nothing is made for, or left open."""
    pattern = re.compile(r"<!-- made: (.+?) -->\n.*?<!-- end: \1 -->", re.DOTALL)

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in made:
            raise ValueError(f"{path}: nothing is made for {name!r}; there are {', '.join(made)}.")
        return f"<!-- made: {name} -->\n{made[name]}\n<!-- end: {name} -->"

    filled = pattern.sub(replace, text)
    if filled.count("<!-- made: ") != len(pattern.findall(text)):
        raise ValueError(f"{path}: a mark `<!-- made: NAME -->` has no `<!-- end: NAME -->`.")
    return filled


# --- the picture


def digest(folder: Path = FIGURES) -> str:
    """Of everything that the picture is made from."""
    files = sorted(folder.glob("*.json"))
    return hashlib.sha256(b"".join(f.name.encode() + f.read_bytes() for f in files)).hexdigest()


def drawn_from(path: Path) -> str | None:
    """The digest that a picture of `draw` carries, None for any other file."""
    if not path.exists():
        return None
    data, at = path.read_bytes(), 8
    while at + 8 <= len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        if kind == b"tEXt" and body.startswith(b"Source\0"):
            return body.partition(b"\0")[2].decode("latin-1")
        at += 12 + size
    return None


def throughput(r: Record) -> tuple[float, str, dict[str, float]]:
    """(value, unit, peers) of a record, more is better: times become tokens per second."""
    tokens = r.parameters.get("T") or r.parameters.get("tokens")
    if not r.lower_is_better:
        return float(r.value or 0.0), r.unit, peers(r)
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}.get(r.unit)
    if tokens and scale and r.value:
        rate = lambda time: tokens / (time * scale) / 1e3  # noqa: E731
        return rate(r.value), "thousand tokens/s", {n: rate(v) for n, v in peers(r).items() if v}
    return float(r.value or 0.0), f"{r.unit}, less is better", peers(r)


def draw(runs: dict[str, list[Record]], path: Path) -> None:
    """One panel for each benchmark and unit: jmoe's bar, its peers' below it, the ceiling as a mark."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = []
    for bench, records in runs.items():
        by_unit: dict[str, list[tuple[Record, float, dict[str, float]]]] = {}
        for r in headlines(bench, records):
            value, unit, others = throughput(r)
            by_unit.setdefault(unit, []).append((r, value, others))
        panels += [(bench, unit, group) for unit, group in by_unit.items()]
    names = list(dict.fromkeys(n for _, _, group in panels for _, _, others in group for n in others))
    colours = {name: PEERS[i % len(PEERS)] for i, name in enumerate(names)}
    bars = [sum(1 + len(others) for _, _, others in group) + 0.8 * len(group) for _, _, group in panels]
    heights = [0.24 * n + 0.75 for n in bars]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(10, sum(heights) + 0.9), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for ax, (bench, unit, group) in zip(axes[:, 0], panels, strict=True):
        y, ticks, top = 0.0, [], 0.0
        for r, value, others in group:
            start = y
            for name, v in {"jmoe": value, **others}.items():
                ax.barh(y, v, height=0.85, color=colours.get(name, JMOE))
                ax.annotate(number(v), (v, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7.5)
                y, top = y + 1, max(top, v)
            if r.ceiling and not r.lower_is_better:
                ax.plot([r.ceiling] * 2, [start - 0.5, y - 0.5], color="black", lw=1.2)
                top = max(top, r.ceiling)
            ticks.append(((start + y - 1) / 2, f"{r.name}\n{r.case}"))
            y += 0.8
        ax.set_yticks([t for t, _ in ticks], [label for _, label in ticks], fontsize=7.5)
        ax.set_xlim(0, top * 1.09)
        ax.invert_yaxis()
        ax.set_xlabel(unit, fontsize=8)
        ax.tick_params(axis="x", labelsize=8)
        ax.set_title(f"{BENCHES[bench]}  ({where(runs[bench])})", fontsize=8.5, loc="left")
        ax.grid(axis="x", alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    handles: list = [plt.Rectangle((0, 0), 1, 1, color=c) for c in (JMOE, *colours.values())]
    handles.append(plt.Line2D([], [], color="black", lw=1.2))
    labels = ["jmoe", *colours, "ceiling"]
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Source": digest(path.parent)})
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit status 1 if something is out of step"
    )
    args = parser.parse_args(argv)
    try:
        runs = load()
        wanted = texts(runs)
    except ValueError as e:
        print(e, file=sys.stderr)
        return 1
    stale = [path for path, text in wanted.items() if path.read_text() != text]
    if runs and drawn_from(PICTURE) != digest():
        stale.append(PICTURE)
    if not runs and PICTURE.exists():
        print(f"{PICTURE.relative_to(ROOT)} is there without any figures; delete it.", file=sys.stderr)
        return 1
    for path in stale:
        if args.check:
            print(
                f"{path.relative_to(ROOT)} is out of step with its sources: run `python docs/make.py`.", file=sys.stderr
            )
        elif path == PICTURE:
            draw(runs, path)
        else:
            path.write_text(wanted[path])
    if not args.check:
        print("written: " + (", ".join(str(p.relative_to(ROOT)) for p in stale) or "nothing, all is in step"))
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
