"""PNG pictures of benchmark records. Needs matplotlib (the `plot` extra)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from .common import Record
from .compare import number

COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#e0a030", "#6a4c93", "#3aa6a0", "#8c564b", "#7f7f7f", "#b5651d", "#444444")
COLOURS += ("#c71585", "#94b447", "#5b8ff9")


def draw(module: ModuleType, bench: str, records: Sequence[Record], path: str | Path) -> None:
    """The picture of a benchmark's records: by its module's own `plot`, or as bars."""
    if hasattr(module, "plot"):
        module.plot(records, path)
    else:
        bars(records, path, title=f"jmoe bench {bench}")


def _pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ValueError(
            "A picture was asked for, and matplotlib is not installed. The figures are available as text and with "
            "--json; for a picture run `pip install 'jmoe[plot]'`."
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _title(records: Sequence[Record], title: str) -> str:
    env = records[0].environment
    where = f"{env['num_devices']} x {env['device_kind']}, JAX {env['jax']}" if env else ""
    smoke = "" if any(r.meaningful for r in records) else "  (smoke run: speeds are not meaningful)"
    return f"{title}\n{where}{smoke}".strip()


def bars(records: Sequence[Record], path: str | Path, *, title: str = "jmoe bench") -> None:
    """Horizontal bars of the values, one panel for each unit, with the peer as a thin bar and the ceiling as a mark."""
    plt = _pyplot()
    records = [r for r in records if r.value is not None]
    units = list(dict.fromkeys(r.unit for r in records))
    if not records:
        raise ValueError("There is nothing to plot: no record has a value.")
    groups = [[r for r in records if r.unit == u] for u in units]
    height = sum(0.45 * len(g) + 1.0 for g in groups) + 0.8
    ratios = [0.45 * len(g) + 1.0 for g in groups]
    fig, axes = plt.subplots(
        len(units), 1, figsize=(10, height), squeeze=False, height_ratios=ratios, layout="constrained"
    )
    for ax, unit, group in zip(axes[:, 0], units, groups, strict=True):
        ys = range(len(group))
        ax.barh(ys, [r.value for r in group], height=0.5, color=COLOURS[0], label="jmoe")
        names = dict.fromkeys(r.peer_name for r in group if r.peer is not None)
        for colour, name in zip(COLOURS[1:], names, strict=False):
            peers = [(y + 0.36, r.peer) for y, r in zip(ys, group, strict=True) if r.peer and r.peer_name == name]
            ax.barh([y for y, _ in peers], [p for _, p in peers], height=0.2, color=colour, label=name)
        ceilings = [(y, r.ceiling) for y, r in zip(ys, group, strict=True) if r.ceiling is not None and r.meaningful]
        if ceilings:
            names = dict.fromkeys(r.ceiling_name for r in group if r.ceiling is not None)
            ax.scatter([c for _, c in ceilings], [y for y, _ in ceilings], marker="|", s=220, color="black", zorder=3)
            ax.scatter([], [], marker="|", s=120, color="black", label="ceiling: " + ", ".join(names))
        widest = max(v for r in group for v in (r.value, r.ceiling, r.peer) if v is not None)
        for y, r in zip(ys, group, strict=True):
            assert r.value is not None
            inside = r.value > 0.2 * widest  # where neither the bar's end nor a ceiling's mark crosses the digits
            crossed = r.meaningful and r.ceiling is not None and 0 <= r.value - r.ceiling < 0.1 * widest
            end = r.ceiling if crossed and r.ceiling is not None else r.value
            place = {"xytext": (-4, 0), "ha": "right", "color": "white"} if inside else {"xytext": (4, 0)}
            ax.annotate(number(r.value), (end, y), textcoords="offset points", va="center", fontsize=8, **place)
        ax.set_yticks(list(ys), [f"{r.name}  {r.case}" for r in group], fontsize=8)
        ax.invert_yaxis()
        better = "less is better" if group[0].lower_is_better else "more is better"
        ax.set_xlabel(f"{unit}  ({better})")
        ax.margins(x=0.12, y=0.01)
        ax.grid(axis="x", alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    fig.suptitle(_title(records, title), fontsize=11)
    _save(plt, fig, path)


def lines(
    records: Sequence[Record],
    path: str | Path,
    *,
    x: str,
    x_label: str,
    title: str = "jmoe bench",
    log_y: bool = False,
    panel: Callable[[Record], str] = lambda r: r.unit,
    label: Callable[[Record], str] = lambda r: r.name,
    dashed: Callable[[Record], bool] = lambda r: False,
    columns: int = 1,
) -> None:
    """Values over the parameter `x` (logarithmic): panels by `panel`, in each a line for each `label`.

    A label has one colour in all panels. Peers are dashed lines, one for each peer name, and so are the records that
    `dashed` says are peers; a ceiling is a dotted level, left out where speeds mean nothing.
    """
    plt = _pyplot()
    records = [r for r in records if r.value is not None and x in r.parameters]
    if not records:
        raise ValueError(f"There is nothing to plot: no record has a value and the parameter {x!r}.")
    panels = list(dict.fromkeys(panel(r) for r in records))
    labels = list(dict.fromkeys(label(r) for r in records))
    peer_names = sorted({r.peer_name for r in records if r.peer is not None})
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(labels)}
    colours |= {name: COLOURS[-1 - i % len(COLOURS)] for i, name in enumerate(peer_names)}
    rows = -(-len(panels) // columns)
    width = 7.0 if columns == 1 else 4.2 * columns
    fig, axes = plt.subplots(
        rows,
        columns,
        figsize=(width + 2.4, (4.6 if columns == 1 else 3.6) * rows + 0.6),
        squeeze=False,
        layout="constrained",
    )
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    for ax, name in zip(axes.flat, panels, strict=False):
        _panel(ax, [r for r in records if panel(r) == name], x, label, dashed, colours, log_y)
        ax.set_xlabel(x_label)
        if len(panels) > 1:
            ax.set_title(name, fontsize=10)
    handles = {text: h for ax in axes.flat for h, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.suptitle(_title(records, title), fontsize=11)
    fig.legend(handles.values(), handles.keys(), fontsize=8, loc="outside right center", frameon=False)
    _save(plt, fig, path)


def _panel(ax, records: Sequence[Record], x: str, label, dashed, colours: dict[str, str], log_y: bool) -> None:
    """The lines of one panel."""
    for name in dict.fromkeys(label(r) for r in records):
        mine = [r for r in records if label(r) == name]
        style = {"ls": "--", "marker": "s", "ms": 3} if dashed(mine[0]) else {"marker": "o", "ms": 4}
        points = sorted((r.parameters[x], r.value) for r in mine)
        ax.plot(*zip(*points, strict=True), **style, color=colours[name], label=name)
    peers = {(r.peer_name, r.parameters[x], r.peer) for r in records if r.peer is not None}
    for name in sorted({p[0] for p in peers}):
        points = sorted((px, py) for n, px, py in peers if n == name)
        ax.plot(*zip(*points, strict=True), ls="--", marker="s", ms=3, color=colours[name], label=name)
    for name, level in sorted({(r.ceiling_name, r.ceiling) for r in records if r.ceiling is not None and r.meaningful}):
        ax.axhline(level, ls=":", color="black", lw=1)
        ax.annotate(name, (0.01, level), xycoords=("axes fraction", "data"), fontsize=8, va="bottom")
    ax.set_xscale("log", base=2)
    xs = sorted({r.parameters[x] for r in records})
    ax.set_xticks(xs, [f"{v:g}" if v < 10_000 else f"{v / 1024:g}k" for v in xs], fontsize=9)
    ax.minorticks_off()
    ax.set_ylabel(f"{records[0].unit}  ({'less' if records[0].lower_is_better else 'more'} is better)", fontsize=9)
    if log_y:
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, 1.05 * ax.get_ylim()[1])  # room for the uppermost marker, whose values may lie far from 0
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)


def _save(plt, fig, path: str | Path) -> None:
    fig.savefig(path, dpi=140)
    plt.close(fig)
