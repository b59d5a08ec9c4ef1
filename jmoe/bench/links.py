"""`jmoe bench links`: what the order in which a dispatch visits its peers does to the links, simulated row by row.

T tokens on one rank, K experts per token, E experts, R ranks in one NVLink domain, D hidden size.

The model. Every rank has one link into a switch that never blocks, and one out of it. In one turn a link carries one
row; all rows of a dispatch have the same bytes, so turns are bytes exactly. A rank has 132 blocks, and each of them at
most two units on their way: a token's rows, issued together, where the order is token by token, or one row where it is
peer by peer. In each turn every sender offers the oldest row whose receiver is not taken yet, and the switch serves
until nobody has one: no link idles that could be used. What is left is what the order itself costs.

Seconds. A turn takes as long as a row of that format takes on two H200s, where the order cannot matter: the bandwidth
of the push kernel measured there, less its fixed time, which is paid once. Not in the model: a fixed time that grows
with R (signals of each rank), switches of several stages, and NVLink 5, whose links are twice as wide.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from pathlib import Path
from typing import Literal

import numpy as np

from jmoe.payload import row_layout
from jmoe.policy.cost import ranks_per_token
from jmoe.shapes import get_shape

from .common import NoProgress, Progress, Record
from .plot import COLOURS, _pyplot

Order = Literal["token rotated", "token ascending", "peer rotated", "peer ascending"]
ORDERS: dict[Order, str] = {
    "token rotated": "token by token, peers from the next rank on (the kernel)",
    "token ascending": "token by token, peers from rank 0 on",
    "peer rotated": "peer by peer, from the next rank on",
    "peer ascending": "peer by peer, from rank 0 on (naive)",
}
ROUTERS = ("uniform", "zipf", "one rank")
BLOCKS, IN_FLIGHT = 132, 2  # of the push kernel's schedule
RANKS = (2, 4, 8, 16, 72)
TOKENS = 4096
LAYER = get_shape("deepseek-v3")

# Bytes per second of remote rows that the push kernel moved between two H200s, 8192 tokens of 7168 on each, by format;
# and what one token took.
MEASURED_TOKENS, FIXED_SECONDS = 8192, 11.5e-6
MEASURED = {"bfloat16": 336.5e9, "mxfp8": 302.8e9, "nvfp4_token": 272.8e9}
WIRES = tuple(MEASURED)


@dataclasses.dataclass(frozen=True)
class Load:
    """What a simulated dispatch did.

    delivered: rows [R, R], from each rank (first axis) to each. turns: until the last row arrived. busy: for each turn
    and receiver, whether its link carried a row, bool [turns, R].
    """

    delivered: np.ndarray
    turns: int
    busy: np.ndarray

    @property
    def busiest(self) -> int:
        """Rows on the link that has most of them: no order takes fewer turns."""
        return max(int(self.delivered.sum(axis).max(initial=0)) for axis in (0, 1))

    @property
    def stretch(self) -> float:
        """Turns over those of the best order possible, at least 1."""
        return self.turns / self.busiest if self.busiest else 1.0


def route(router: str, num_ranks: int, tokens: int, *, seed: int = 0) -> np.ndarray:
    """Which ranks the tokens of each rank go to: bool [R, T, R].

    router: "uniform", "zipf" (expert e is asked for in proportion to 1 / (e + 1)) or "one rank" (all on rank 0).
    """
    experts, top_k = LAYER.num_experts, LAYER.num_experts_per_tok
    if router not in ROUTERS:
        raise ValueError(f"router={router!r} is not known; choose one of {', '.join(ROUTERS)}.")
    rng = np.random.default_rng(seed)
    per_rank = -(-experts // num_ranks)
    popular = -np.log(np.arange(1, experts + 1)) if router == "zipf" else np.zeros(experts)
    if router == "one rank":
        popular = np.where(np.arange(experts) < per_rank, 0.0, -np.inf)
    noise = rng.gumbel(size=(num_ranks * tokens, experts)) + popular
    chosen = np.argsort(-noise, axis=1, kind="stable")[:, : min(top_k, int(np.isfinite(popular).sum()))]
    member = np.zeros((num_ranks * tokens, num_ranks), bool)
    np.put_along_axis(member, chosen // per_rank, True, axis=1)
    return member.reshape(num_ranks, tokens, num_ranks)


def units(member: np.ndarray, rank: int, order: Order, blocks: int = BLOCKS) -> list[list[tuple[int, ...]]]:
    """For each block of a rank, in the order in which it issues them, the peers of each unit. The own rank needs no
    link. member: bool [R, T, R].
    """
    num_ranks, tokens = member.shape[0], member.shape[1]
    around = [(rank + step) % num_ranks for step in range(1, num_ranks)]
    peers = around if order.endswith("rotated") else sorted(around)
    out = []
    for block in range(min(blocks, max(tokens, 1))):
        mine = member[rank, block::blocks]
        if order.startswith("token"):
            rows = [tuple(p for p in peers if row[p]) for row in mine]
            out.append([unit for unit in rows if unit])
        else:
            out.append([(p,) for p in peers for row in mine if row[p]])
    return out


def simulate(
    member: np.ndarray, order: Order, *, blocks: int = BLOCKS, in_flight: int = IN_FLIGHT, window: int | None = None
) -> Load:
    """Runs a dispatch to its end. member: bool [R, T, R], see `route`.

    window: how many of a rank's oldest rows on their way may overtake one another, 1 for links that keep the order of
    the stores (None: all of them).
    """
    num_ranks = member.shape[0]
    never = np.iinfo(np.int64).max
    waiting = [[deque() for _ in range(num_ranks)] for _ in range(num_ranks)]  # (issue number, unit)
    oldest = np.full((num_ranks, num_ranks), never)  # issue number of the first row that waits from s to r
    todo = [[deque(block) for block in units(member, rank, order, blocks)] for rank in range(num_ranks)]
    flying = [[deque() for _ in rank] for rank in todo]  # units of a block on their way: [rows left, block]
    issued = [0] * num_ranks
    in_order: list[dict[int, None]] = [{} for _ in range(num_ranks)]  # issue numbers that wait, oldest first
    delivered = np.zeros((num_ranks, num_ranks), np.int64)
    busy = []

    def issue(rank: int, block: int) -> None:
        peers = todo[rank][block].popleft()
        unit = [len(peers), block]
        flying[rank][block].append(unit)
        for peer in peers:
            waiting[rank][peer].append((issued[rank], unit))
            in_order[rank][issued[rank]] = None
            oldest[rank, peer] = waiting[rank][peer][0][0]
            issued[rank] += 1

    for _ in range(in_flight):
        for rank in range(num_ranks):
            for block in range(len(todo[rank])):
                if todo[rank][block]:
                    issue(rank, block)
    turn = 0
    while (oldest < never).any():
        free_sender, free_receiver = np.ones(num_ranks, bool), np.ones(num_ranks, bool)
        pairs = []
        last = np.full(num_ranks, never)  # the youngest row that each rank may offer
        if window is not None:
            for rank, numbers in enumerate(in_order):
                last[rank] = next(itertools.islice(numbers, window - 1, None), never)
        while True:  # offers and their acceptance, until nobody has a row for a free receiver
            offers = free_sender[:, None] & free_receiver[None, :] & (oldest <= last[:, None])
            offer = np.where(offers, oldest, never)
            best = offer.argmin(axis=1)
            senders = np.flatnonzero(offer[np.arange(num_ranks), best] < never)
            if not len(senders):
                break
            first = np.argsort((senders - turn) % num_ranks, kind="stable")  # whose turn it is, is served first
            receivers, where = np.unique(best[senders[first]], return_index=True)
            for receiver, sender in zip(receivers, senders[first][where], strict=True):
                pairs.append((int(sender), int(receiver)))
                free_sender[sender] = free_receiver[receiver] = False
        touched = []
        for sender, receiver in pairs:
            delivered[sender, receiver] += 1
            queue = waiting[sender][receiver]
            number, unit = queue.popleft()
            del in_order[sender][number]
            oldest[sender, receiver] = queue[0][0] if queue else never
            unit[0] -= 1
            if unit[0] == 0:
                touched.append((sender, unit[1]))
        for sender, block in touched:  # a block goes on when its first units are complete, in order
            while flying[sender][block] and not flying[sender][block][0][0]:
                flying[sender][block].popleft()
                if todo[sender][block]:
                    issue(sender, block)
        busy.append(~free_receiver)
        turn += 1
    return Load(delivered, turn, np.array(busy, bool).reshape(turn, num_ranks))


def row_seconds(wire: str) -> float:
    """Of one row on a link, while rows follow one another: from the two-GPU measurement."""
    rows = MEASURED_TOKENS * ranks_per_token(LAYER, 2) / 2
    row = row_layout(LAYER.hidden_size, wire, LAYER.num_experts_per_tok).row_bytes
    return row / MEASURED[wire] - FIXED_SECONDS / rows


def seconds(turns: int, wire: str) -> float:
    """Of a dispatch that takes `turns` turns of a row that travels as `wire`."""
    return FIXED_SECONDS + turns * row_seconds(wire)


def run(smoke: bool, progress: Progress | None = None) -> list[Record]:
    """Predicted times of every order, number of ranks and wire format, on no devices; about a minute."""
    progress = progress or NoProgress()
    ranks, tokens = ((2, 4), 32) if smoke else (RANKS, TOKENS)
    progress.start(len(ranks) * len(ORDERS))
    records = []
    for num_ranks in ranks:
        member = route("uniform", num_ranks, tokens)
        wanted = member.sum(axis=1).astype(np.int64)  # rows [R, R] from each rank to each other one
        np.fill_diagonal(wanted, 0)
        for order, words in ORDERS.items():
            progress.step(f"R={num_ranks} {order}")
            load = simulate(member, order)
            lost = int(np.abs(load.delivered - wanted).sum()) / max(1, int(wanted.sum()))
            for wire in WIRES if order == "token rotated" else WIRES[:1]:
                predicted, best = seconds(load.turns, wire), seconds(load.busiest, wire)
                records.append(
                    Record(
                        name=f"dispatch {order}",
                        case=f"T={tokens} D={LAYER.hidden_size} K={LAYER.num_experts_per_tok} R={num_ranks} {wire}",
                        value=1e6 * predicted,
                        unit="us, predicted",
                        seconds=predicted,
                        ceiling=1e6 * best,
                        ceiling_name="the busiest link without a gap",
                        error=lost,
                        error_name="rows lost or doubled",
                        lower_is_better=True,
                        meaningful=not smoke,
                        parameters=dict(
                            R=num_ranks, T=tokens, order=order, words=words, wire=wire, stretch=load.stretch,
                            busiest_link_rows=load.busiest, row_ns=1e9 * row_seconds(wire),
                        ),
                    )
                )  # fmt: skip
    return records


def plot(records: list[Record], path: str | Path) -> None:
    """Predicted times over the number of ranks, and the links of eight ranks over time."""
    plt = _pyplot()
    fig, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    first = [r for r in records if r.parameters["wire"] == WIRES[0]]
    ranks = sorted({r.parameters["R"] for r in first})
    for colour, (order, words) in zip(COLOURS, ORDERS.items(), strict=False):
        points = [(r.parameters["R"], r.value) for r in first if r.parameters["order"] == order]
        axes[0, 0].plot(*zip(*points, strict=True), marker="o", ms=4, color=colour, label=words)
    best = [(r.parameters["R"], r.ceiling) for r in first if r.parameters["order"] == "token rotated"]
    axes[0, 0].plot(*zip(*best, strict=True), ls=":", color="black", label="the busiest link without a gap")
    for wire in WIRES[1:]:
        points = [(r.parameters["R"], r.value) for r in records if r.parameters["wire"] == wire]
        axes[0, 0].plot(*zip(*points, strict=True), ls="--", marker="s", ms=3, color=COLOURS[0], alpha=0.6)
        axes[0, 0].annotate(wire, points[-1], xytext=(-4, 5), textcoords="offset points", fontsize=8, ha="right")
    axes[0, 0].set(xscale="log", xlabel="ranks in one NVLink domain", ylabel="us, predicted  (less is better)")
    axes[0, 0].set_xticks(ranks, [str(r) for r in ranks])
    axes[0, 0].minorticks_off()
    axes[0, 0].set(yscale="log", ylim=(None, 6 * max(r.value or 0 for r in first)))  # room for the legend
    axes[0, 0].set_title(f"one dispatch, {first[0].case.split(' R=')[0]}, bfloat16 and (dashed) narrower", fontsize=10)
    axes[0, 0].legend(fontsize=8, frameon=False)

    shown, tokens = 8, 512
    member = route("uniform", shown, tokens)
    turn = 1e6 * row_seconds(WIRES[0])
    loads = {order: simulate(member, order) for order in ORDERS}
    for colour, (order, load) in zip(COLOURS, loads.items(), strict=False):
        smooth = np.convolve(load.busy.mean(axis=1), np.ones(50) / 50, mode="valid")
        axes[0, 1].plot(turn * np.arange(len(smooth)), smooth, color=colour, label=order)
    axes[0, 1].set(xlabel="us", ylabel="share of links that carry a row", ylim=(0, 1.05))
    axes[0, 1].set_title(f"{shown} ranks, {tokens} tokens on each, bfloat16", fontsize=10)
    axes[0, 1].legend(fontsize=8, frameon=False)
    end = turn * max(load.turns for load in loads.values())
    for ax, order in zip(axes[1], ("peer ascending", "token rotated"), strict=True):
        load = loads[order]
        step = max(1, load.turns // 300)
        steps = load.turns // step
        image = load.busy[: steps * step].reshape(steps, step, shown).mean(axis=1).T
        extent = (0, turn * load.turns, shown - 0.5, -0.5)
        shades = ax.imshow(image, aspect="auto", cmap="viridis", vmin=0, vmax=1, extent=extent, interpolation="nearest")
        ax.set(xlim=(0, end), xlabel="us", ylabel="receiver", facecolor=shades.cmap(0.0))  # idle after the last row
        ax.set_title(ORDERS[order], fontsize=10)
    fig.colorbar(shades, ax=axes[1], label="its link carries a row", fraction=0.025)
    for ax in axes[0]:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    smoke = "" if any(r.meaningful for r in records) else "  (smoke run: speeds are not meaningful)"
    fig.suptitle(f"Link load by order of the rows: simulated, with the time of a row on two H200s{smoke}", fontsize=11)
    fig.savefig(path, dpi=140)
    plt.close(fig)
