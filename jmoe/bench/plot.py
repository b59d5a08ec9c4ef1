"""PNG pictures of benchmark records. Needs matplotlib (the `plot` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .common import Record

COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#e0a030", "#6a4c93", "#3aa6a0", "#8c564b", "#7f7f7f", "#b5651d", "#444444")


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
    fig, axes = plt.subplots(
        len(units), 1, figsize=(10, height), squeeze=False, height_ratios=[0.45 * len(g) + 1.0 for g in groups]
    )
    for ax, unit, group in zip(axes[:, 0], units, groups, strict=True):
        ys = range(len(group))
        ax.barh(ys, [r.value for r in group], height=0.5, color=COLOURS[0], label="jmoe")
        peers = [(y, r.peer) for y, r in zip(ys, group, strict=True) if r.peer is not None]
        if peers:
            names = dict.fromkeys(r.peer_name for r in group if r.peer is not None)
            ax.barh(
                [y + 0.36 for y, _ in peers],
                [p for _, p in peers],
                height=0.2,
                color=COLOURS[1],
                label=", ".join(names),
            )
        ceilings = [(y, r.ceiling) for y, r in zip(ys, group, strict=True) if r.ceiling is not None and r.meaningful]
        if ceilings:
            names = dict.fromkeys(r.ceiling_name for r in group if r.ceiling is not None)
            ax.scatter([c for _, c in ceilings], [y for y, _ in ceilings], marker="|", s=220, color="black", zorder=3)
            ax.scatter([], [], marker="|", s=120, color="black", label="ceiling: " + ", ".join(names))
        for y, r in zip(ys, group, strict=True):
            ax.annotate(
                f"{r.value:.4g}", (r.value, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
            )
        ax.set_yticks(list(ys), [f"{r.name}  {r.case}" for r in group], fontsize=8)
        ax.invert_yaxis()
        better = "less is better" if group[0].lower_is_better else "more is better"
        ax.set_xlabel(f"{unit}  ({better})")
        ax.margins(x=0.12)
        ax.grid(axis="x", alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.0 + 0.35 / (0.45 * len(group) + 0.3)), ncols=3)
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
) -> None:
    """Values over the parameter `x` (logarithmic), a line for each record name, one panel for each unit.

    Peers are dashed lines, one for each peer name; a ceiling is a dotted level, left out where speeds mean nothing.
    """
    plt = _pyplot()
    records = [r for r in records if r.value is not None and x in r.parameters]
    if not records:
        raise ValueError(f"There is nothing to plot: no record has a value and the parameter {x!r}.")
    units = list(dict.fromkeys(r.unit for r in records))
    fig, axes = plt.subplots(len(units), 1, figsize=(9, 4.6 * len(units) + 0.6), squeeze=False)
    for ax, unit in zip(axes[:, 0], units, strict=True):
        group = [r for r in records if r.unit == unit]
        names = list(dict.fromkeys(r.name for r in group))
        for i, name in enumerate(names):
            points = sorted((r.parameters[x], r.value) for r in group if r.name == name)
            ax.plot(*zip(*points, strict=True), marker="o", ms=4, color=COLOURS[i % len(COLOURS)], label=name)
        peers = {(r.peer_name, r.parameters[x], r.peer) for r in group if r.peer is not None}
        for i, name in enumerate(sorted({p[0] for p in peers})):
            points = sorted((px, py) for n, px, py in peers if n == name)
            colour = COLOURS[-1 - i % len(COLOURS)]
            ax.plot(*zip(*points, strict=True), ls="--", marker="s", ms=3, color=colour, label=name)
        for name, level in sorted(
            {(r.ceiling_name, r.ceiling) for r in group if r.ceiling is not None and r.meaningful}
        ):
            ax.axhline(level, ls=":", color="black", lw=1)
            ax.annotate(name, (0.01, level), xycoords=("axes fraction", "data"), fontsize=8, va="bottom")
        ax.set_xscale("log", base=2)
        xs = sorted({r.parameters[x] for r in group})
        ax.set_xticks(xs, [f"{v:g}" if v < 10_000 else f"{v / 1024:g}k" for v in xs], fontsize=9)
        ax.minorticks_off()
        ax.set_xlabel(x_label)
        ax.set_ylabel(f"{unit}  ({'less' if group[0].lower_is_better else 'more'} is better)")
        if log_y:
            ax.set_yscale("log")
        else:
            ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    fig.suptitle(_title(records, title), fontsize=11)
    _save(plt, fig, path)


def _save(plt, fig, path: str | Path) -> None:
    fig.tight_layout()
    fig.savefig(path, dpi=140)
    plt.close(fig)
