"""Makes what is measured or computed in the documentation: tables and picture of the README, and two pages of docs/.

Sources: docs/figures/*.json, each written by `python -m jmoe bench NAME --json docs/figures/NAME.json` on GPUs (`-` in
NAME becomes `_`; `NAME_2gpus.json` and the like add what another run showed), docs/figures/training.json of
`examples/train.py`, and jmoe's own rules (`jmoe.support`). Text between `<!-- made: NAME -->` and `<!-- end: NAME -->`
is replaced; the rest of a file is left alone.

    python docs/make.py           writes the texts, and the pictures whose figures have changed
    python docs/make.py --check   changes nothing; exit status 1, and what is out of step
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import os
import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(Path(__file__).parent))

from tables import layer_details, layer_text, model_text, number, table  # pyright: ignore[reportMissingImports]

from jmoe import compat, support
from jmoe.bench import BENCHES, module_name, plot
from jmoe.bench.common import Record, read_json
from jmoe.bench.compare import duration
from jmoe.formats import FORMATS, bits_per_value, dequantize, quantize, sqnr

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "figures"
PICTURE = FIGURES / "throughput.png"
CURVES = FIGURES / "training.png"

# What the README shows: panels of the picture, each of one benchmark, with patterns of names and cases. A pattern shows
# the first record that fits: every line stands for one figure of one run. docs/figures.md has all of them.
PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "quantize",
        "quantise 16384 x 7168 bfloat16",
        tuple((f"^quantise {f}$", "^16384x7168") for f in ("mxfp8", "fp8_128", "nvfp4_token", "nvfp4_token_4o6")),
    ),
    (
        "dispatch",
        "dispatch and combine, 8192 tokens of 7168 on each rank",
        (
            (r"^dispatch nvlink_one_sided bfloat16", r"T=8192 "),
            (r"^dispatch nvlink_one_sided mxfp8", r"T=8192 "),
            (r"^dispatch nvlink_one_sided nvfp4_token", r"T=8192 "),
            (r"^combine nvlink_one_sided bfloat16", r"T=8192 "),
        ),
    ),
    (
        "grouped-matmul",
        "grouped matmul, many rows",
        tuple(
            (f"^{f}{how}$", f"T={t} K=4096 N=3072 E=32$")
            for f in ("bf16", "fp8")
            for t in (8192, 32768)
            for how in ("", ", burst")
        ),
    ),
    (
        "grouped-matmul",
        "grouped matmul, few rows: bytes of weights",
        ((r"^bf16$", r"T=64 K=7168"), (r"^fp8_128x128$", r"T=64 K=7168"), (r"^nvfp4$", r"T=64 K=7168")),
    ),
    *(
        (
            "layer",
            f"the whole layer, {shape}, {tokens} tokens",
            ((r"^BF16$", f"^{shape} T={tokens}$"), (r"^FP8-128$", f"^{shape} T={tokens}$"))
            + ((r"^NVFP4 weights$", f"^{shape} T={tokens}$"), (r"^EP, BF16 wire$", f"^{shape} T={tokens} R=2")),
        )
        for shape, tokens in (("qwen3-30b-a3b", 8192), ("qwen3-30b-a3b", 64), ("half deepseek-v3", 8192))
    ),
    ("model", "prefill, Qwen3-30B-A3B shape", ((r"^prefill, BF16", "."), (r"^prefill, FP8", "."))),
    (
        "model",
        "decode, Qwen3-30B-A3B shape, batch 1",
        ((r"^decode, BF16", r"^batch 1,"), (r"^decode, NVFP4", r"^batch 1,")),
    ),
    (
        "model",
        "decode, Qwen3-30B-A3B shape, batch 64",
        ((r"^decode, BF16", r"^batch 64,"), (r"^decode, NVFP4", r"^batch 64,")),
    ),
)
JMOE = "#1b6ca8"  # colours
PEERS = ("#d1495b", "#e0a030", "#7f7f7f", "#6a4c93", "#2e8b57", "#8c564b", "#c71585", "#3aa6a0")
PLOTTED = ("quantize", "dispatch", "grouped-matmul")  # benchmarks that have a picture of their own in docs/figures.md
GRIDS = {"layer": layer_text, "model": model_text}  # benchmarks whose tables have a column for each way
MOST = 8  # lines of a benchmark without headlines that fit


def files(folder: Path, bench: str) -> list[Path]:
    """Of a benchmark: the one that has its name, and those of other machines."""
    name = bench.replace("-", "_")
    return [*folder.glob(f"{name}.json"), *sorted(folder.glob(f"{name}_*.json"))]


def load(folder: Path = FIGURES) -> dict[str, list[Record]]:
    """Benchmark -> records, of the files that there are. ValueError for a file that is not what its name says."""
    runs: dict[str, list[Record]] = {}
    for bench in BENCHES:
        for path in files(folder, bench):
            name, records = read_json(path)
            if name != bench:
                raise ValueError(f"{path} is of `jmoe bench {name}`; its name says {bench}. Rename it.")
            if not records or not all(r.meaningful for r in records):
                raise ValueError(f"{path} has figures that say nothing about speed (a smoke run?); make it on GPUs.")
            if impossible := [r.name for r in records if r.value is not None and r.value <= 0]:
                raise ValueError(f"{path} has figures below zero, which are noise: {', '.join(impossible)}.")
            runs[bench] = runs.get(bench, []) + records
    return runs


def panels(runs: dict[str, list[Record]]) -> list[tuple[str, str, list[Record]]]:
    """(benchmark, title, records) of what the README shows; a run that no pattern fits by its first records."""
    found = []
    for bench, title, patterns in PANELS:
        shown: list[Record] = []
        for name, case in patterns:
            records = runs.get(bench, [])
            fits = (r for r in records if re.search(name, r.name) and re.search(case, r.case) and r not in shown)
            shown += [r for r in [next(fits, None)] if r is not None]
        found += [(bench, title, shown)] if shown else []
    for bench, records in runs.items():
        if bench not in [b for b, _, _ in found]:
            first = records[0].unit  # one panel has one axis
            found.append((bench, BENCHES[bench], [r for r in records if r.unit == first][:MOST]))
    return found


def peers(r: Record, records: Sequence[Record]) -> dict[str, float]:
    """The peers' figures for a record, in its unit: its own, or records of the same case that are of a peer."""
    several = dict(r.parameters.get("peers") or {})
    if r.peer is not None:
        several.setdefault(r.peer_name, r.peer)
        names = {other.peer_name for other in records if other.peer is not None}
        for other in records:
            if other.name in names and (other.case, other.unit) == (r.case, r.unit) and other.value is not None:
                several.setdefault(other.name, other.value)
    return several


# --- text


def figure_row(r: Record, records: Sequence[Record]) -> list[str]:
    share = "" if r.share is None else f"{100 * r.share:.0f} % of {r.ceiling_name}"
    others = ", ".join(f"{name} {number(value)}" for name, value in peers(r, records).items())
    times = "" if r.against_peer is None else f"{r.against_peer:.2f} x"
    error = "" if r.error is None else f"{r.error:.1e}"
    each = "" if r.seconds is None else duration(r.seconds)
    value = "-" if r.value is None else f"{number(r.value)} {r.unit}"
    return [r.name, r.case, value, each, share, others, times, error]


FIGURE_HEAD = ("what", "shape", "jmoe", "time", "share of the ceiling", "peers", "against the best", "error")


def where(records: Sequence[Record]) -> str:
    machines = []
    for e in (r.environment for r in records):
        torch = f", torch {e['torch']}" if e.get("torch") else ""
        machines.append(f"{e['num_devices']} x {e['device_kind']}, JAX {e['jax']}{torch}, {str(e['time'])[:10]}")
    return "; ".join(dict.fromkeys(machines))


def figures_text(runs: dict[str, list[Record]]) -> str:
    """The README's figures: the picture, and a table of headlines for each benchmark."""
    if not runs:
        return "No figures are committed yet: `python -m jmoe bench NAME --json docs/figures/NAME.json` writes them."
    parts = ["![throughput of jmoe and its peers](docs/figures/throughput.png)"]
    keep = [0, 1, 2, 4, 5, 6]  # times and errors are in docs/figures.md
    for bench, records in runs.items():
        if bench in GRIDS:
            parts += [f"**{BENCHES[bench]}** ({where(records)})", GRIDS[bench](records)]
            continue
        shown = [r for b, _, group in panels(runs) for r in group if b == bench]
        rows = [[figure_row(r, records)[i] for i in keep] for r in shown]
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
            *([f"![{bench}](figures/{plot_of(bench).name})"] if bench in PLOTTED else []),
            table(FIGURE_HEAD, [figure_row(r, records) for r in records]),
        ]
        parts += [details] if bench == "layer" and (details := layer_details(records)) else []
    return "\n\n".join(parts)


def training() -> dict | None:
    """What `examples/train.py` wrote of its last runs."""
    path = CURVES.with_suffix(".json")
    return json.loads(path.read_text()) if path.exists() else None


def training_text(result: dict | None) -> str:
    """The runs with different dispatches, and their curves."""
    if result is None:
        return "No runs are committed yet."
    rows = []
    for quant, r in result["figures"].items():
        losses = [h["train"] for h in result["runs"][quant]]
        last = sum(losses[-10:]) / len(losses[-10:])
        share = "" if r["mfu"] is None else f"{100 * r['mfu']:.1f} %"
        name = "unquantised" if quant == "none" else f"`{quant}`"
        rows.append([name, f"{r['tokens_per_second']:,.0f}", share, f"{last:.3f}"])
    head = ("dispatch", "tokens/s", "of the datasheet's BF16 peak", "bits per byte, mean of the last 10 steps")
    first = next(iter(result["figures"].values()))
    size = (
        f"{first['parameters'] / 1e9:.1f} billion parameters on {first['devices']} x {first['device_kind']}, "
        f"{first['steps']} steps of {first['batch']} x {first['context']} bytes:"
    )
    return "\n\n".join([size, table(head, rows), "![training loss by dispatch](figures/training.png)"])


def draw_training(path: Path) -> None:
    """The curves of `training.json`, as `examples/train.py` draws them."""
    sys.path.append(str(Path(__file__).parent.parent / "examples"))
    import train  # pyright: ignore[reportMissingImports]

    train.plot(training(), path, Source=training_digest())


def training_digest() -> str:
    return hashlib.sha256(CURVES.with_suffix(".json").read_bytes()).hexdigest()


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
            "Triton kernels come with `pip install 'jmoe[triton]'`; without them XLA does that work.",
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


@functools.cache
def formats_text() -> str:
    """The formats, with what one value costs and how good it is."""
    x = np.random.default_rng(0).standard_normal((256, 1024), np.float32).astype(jnp.bfloat16)
    rows = []
    for name, f in FORMATS.items():
        scale = {"f32": "float32", "e8m0": "E8M0", "e4m3": "E4M3"}[f.scale]
        block = f"{f.block_rows} x {f.block}" if f.block_rows > 1 else str(f.block)
        notes = [f"float32 per {f.global_scale}"] if f.global_scale else []
        notes += ["4-over-6"] if f.four_over_six else []
        notes += ["power of two"] if f.pow2 else []
        notes += ["rounded down"] if f.scale == "e8m0" and f.rule == "floor" else []
        q = jax.jit(functools.partial(quantize, fmt=name))(x)  # two programs: a cast and its inverse in one are elided
        noise = sqnr(x.astype(np.float32), jax.jit(functools.partial(dequantize, dtype=jnp.float32))(q))
        cells = [f"`{name}`", f.element.upper(), block, ", ".join([scale, *notes])]
        rows.append([*cells, f"{bits_per_value(name):.4g}", f"{noise:.1f} dB"])
    return table(["format", "values", "block", "scales", "bits per value", "SQNR of Gaussian data"], rows)


def texts(runs: dict[str, list[Record]]) -> dict[Path, str]:
    """File -> what it should hold."""
    made = {
        "figures": figures_text(runs),
        "all figures": all_figures_text(runs),
        "support": support_text(),
        "all support": all_support_text(),
        "formats": formats_text(),
        "training": training_text(training()),
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


def plot_of(bench: str) -> Path:
    """The picture of one benchmark, as `jmoe bench NAME --plot` draws it."""
    return FIGURES / f"{bench.replace('-', '_')}.png"


def draw_plot(bench: str, records: list[Record]) -> None:
    path = plot_of(bench)
    plot.draw(importlib.import_module(module_name(bench)), bench, records, path)
    from PIL import Image, PngImagePlugin

    info = PngImagePlugin.PngInfo()
    info.add_text("Source", digest(path.parent, (bench,)))
    with Image.open(path) as image:
        image.load()
        image.save(path, pnginfo=info)


def digest(folder: Path = FIGURES, benches: Sequence[str] = tuple(BENCHES)) -> str:
    """Of everything that a picture of these benchmarks is made from."""
    sources = [f for bench in sorted(benches) for f in files(folder, bench)]
    return hashlib.sha256(b"".join(f.name.encode() + f.read_bytes() for f in sources)).hexdigest()


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


def draw(runs: dict[str, list[Record]], path: Path) -> None:
    """A bar for each record, below it those of its peers, the ceiling as a mark; one axis for each panel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = []  # panel -> (label, jmoe's value, ceiling, peers that are not shown in it yet)
    for bench, _, group in panels(runs):
        seen: set[tuple[str, float]] = set()
        lines = []
        for r in group:
            others = {n: v for n, v in peers(r, runs[bench]).items() if (n, v) not in seen}
            seen |= set(others.items())
            lines.append((r, others))
        bars.append(lines)
    names = list(dict.fromkeys(n for lines in bars for _, others in lines for n in others))
    colours = {name: PEERS[i % len(PEERS)] for i, name in enumerate(names)}
    heights = [0.24 * sum(1.6 + len(others) for _, others in lines) + 0.75 for lines in bars]
    half = next(i for i in range(len(bars) + 1) if sum(heights[:i]) >= sum(heights) / 2)
    columns = [c for c in (list(range(half)), list(range(half, len(bars)))) if c]
    tallest = max(sum(heights[i] for i in c) for c in columns)
    figure = plt.figure(figsize=(7.5 * len(columns), tallest + 0.7), layout="constrained")
    *parts, legend = figure.subfigures(2, len(columns), height_ratios=(tallest, 0.5), squeeze=False).flat[
        : len(columns) + 1
    ]
    for part, column in zip(parts, columns, strict=True):
        rest = tallest - sum(heights[i] for i in column)  # left empty below the shorter column
        ratios = [*(heights[i] for i in column), max(rest, 1e-3)]
        axes = part.subplots(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
        axes[-1].axis("off")
        for ax, i in zip(axes, column, strict=False):
            bench, title, group = panels(runs)[i]
            _panel(ax, f"{title}\n{where(group)}", group, bars[i], colours)
    handles: list = [plt.Rectangle((0, 0), 1, 1, color=c) for c in (JMOE, *colours.values())]
    handles.append(plt.Line2D([], [], color="black", lw=1.5))
    labels = ["jmoe", *colours, "ceiling"]
    legend.legend(handles, labels, loc="center left", ncols=len(labels), fontsize=8, frameon=False)
    figure.savefig(path, dpi=100, metadata={"Source": digest(path.parent)})
    plt.close(figure)


def _panel(ax, title: str, group: list[Record], lines, colours: dict[str, str]) -> None:
    """One axis. lines: (record, peers to draw below it)."""
    top = max(max([r.value or 0.0, r.ceiling or 0.0, *others.values()]) for r, others in lines)
    common = os.path.commonprefix([r.case for r in group])
    y, ticks = 0.0, []
    for r, others in lines:
        for name, v in {"jmoe": r.value or 0.0, **others}.items():
            ax.barh(y, v, height=0.85, color=colours.get(name, JMOE))
            inside = v > 0.2 * top
            where_text = dict(xytext=(-4 if inside else 4, 0), ha="right" if inside else "left")
            colour = "white" if inside else "black"
            text = dict(textcoords="offset points", va="center", fontsize=7.5, color=colour, zorder=5)
            crossed = (
                name == "jmoe" and r.ceiling is not None and 0 <= v - r.ceiling < 0.1 * top
            )  # by the ceiling's mark
            ax.annotate(number(v), (r.ceiling if crossed else v, y), **where_text, **text)
            if name == "jmoe":
                rest = r.case[len(common) :].strip()  # what the other cases do not say
                ticks.append((y, f"{r.name} ({rest})" if rest else r.name))
                if r.ceiling:
                    ax.plot([r.ceiling] * 2, [y - 0.5, y + 0.5], color="black", lw=1.5)
            y += 1
        y += 0.6
    ax.set_yticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=7.5)
    ax.set_xlim(0, top * 1.09)
    ax.set_ylim(y - 0.9, -0.8)
    ax.set_xlabel(f"{group[0].unit}{', less is better' if group[0].lower_is_better else ''}", fontsize=8)
    ax.tick_params(axis="x", labelsize=8)
    ax.xaxis.set_major_formatter("{x:,.0f}" if top < 1e6 else lambda x, _: f"{x / 1e6:g} M")
    ax.set_title(title, fontsize=8.5, loc="left")
    ax.grid(axis="x", alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit status 1 if something is out of step"
    )
    args = parser.parse_args(argv)
    if not compat.KERNELS_SUPPORTED:
        print(
            f"The tables state what kernels can do; make them with JAX >= 0.11. {compat.KERNELS_REASON}",
            file=sys.stderr,
        )
        return 1
    try:
        runs = load()
        wanted = texts(runs)
    except ValueError as e:
        print(e, file=sys.stderr)
        return 1
    stale = [path for path, text in wanted.items() if path.read_text() != text]
    if runs and drawn_from(PICTURE) != digest():
        stale.append(PICTURE)
    plots = {plot_of(bench): bench for bench in PLOTTED if bench in runs}
    stale += [path for path, bench in plots.items() if drawn_from(path) != digest(FIGURES, (bench,))]
    if training() and drawn_from(CURVES) != training_digest():
        stale.append(CURVES)
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
        elif path in plots:
            draw_plot(plots[path], runs[plots[path]])
        elif path == CURVES:
            draw_training(path)
        else:
            path.write_text(wanted[path])
    if not args.check:
        print("written: " + (", ".join(str(p.relative_to(ROOT)) for p in stale) or "nothing, all is in step"))
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
