"""Which kernels a jitted function runs on a GPU, and how long each takes, from the profiler's own records.

The whole of a function is not the sum of its kernels: what is missing is launches, copies and waits between them. A
benchmark that reports both shows which of the two to work on.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel (or copy) of a call, in the order of their starts.

    name: as the driver has it. scope: the `jax.named_scope` path of the operation it came from, "" where unknown.
    seconds: median over the calls.
    """

    name: str
    scope: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """kernels: of one call. span: seconds from the first kernel's start to the last one's end, median over the calls.

    busy: the sum of the kernels' own times.
    """

    kernels: tuple[Kernel, ...]
    span: float

    @property
    def busy(self) -> float:
        return sum(k.seconds for k in self.kernels)


def profile(f: Callable[..., Any] | jax.stages.Compiled, *args: Any, calls: int = 5) -> Profile | None:
    """The kernels of one call of `f(*args)` on the first GPU; None without a GPU or without the profiler's records."""
    if jax.default_backend() != "gpu":
        return None
    compiled = f if isinstance(f, jax.stages.Compiled) else jax.jit(f).lower(*args).compile()
    for _ in range(3):
        jax.block_until_ready(compiled(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(compiled(*args))
        files = list(Path(folder).rglob("*.xplane.pb"))
        events = _device_events(files[0]) if files else []
    if not events or len(events) % calls:
        return None
    count = len(events) // calls
    runs = [events[i * count : (i + 1) * count] for i in range(calls)]
    scopes = _scopes(compiled.as_text())
    kernels = tuple(
        Kernel(name, scopes.get(_plain(name), ""), statistics.median(run[i][2] for run in runs) / 1e9)
        for i, (_, name, _) in enumerate(runs[0])
    )
    span = statistics.median(run[-1][0] + run[-1][2] - run[0][0] for run in runs) / 1e9
    return Profile(kernels, span)


def totals(run: Callable[[], Any]) -> tuple[int, float, float] | None:
    """(kernels, sum of their seconds, seconds from the first to the last) of `run()` on the first GPU, warm already."""
    if jax.default_backend() != "gpu":
        return None
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        files = list(Path(folder).rglob("*.xplane.pb"))
        events = _device_events(files[0]) if files else []
    if not events:
        return None
    span = events[-1][0] + events[-1][2] - events[0][0]
    return len(events), sum(e[2] for e in events) / 1e9, span / 1e9


def busy_seconds(runs: Sequence[Callable[[], Any]], pause: float = 3e-3) -> list[float] | None:
    """Seconds of the kernels of each of `runs`, warm already, on the first GPU, all in one record of the profiler.

    The runs are `pause` seconds apart, which is how their kernels are told from each other. None without a GPU, without
    records, or where they do not fall into as many groups.
    """
    if jax.default_backend() != "gpu":
        return None
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for run in runs:
                jax.block_until_ready(run())
                time.sleep(pause)
        files = list(Path(folder).rglob("*.xplane.pb"))
        events = _device_events(files[0]) if files else []
    return _grouped(events, pause * 1e9 / 2, len(runs))


def _grouped(events: Sequence[tuple[float, str, float]], gap: float, count: int) -> list[float] | None:
    """Sum of the durations, in seconds, of each of `count` groups of events that pauses above `gap` ns separate."""
    sums, end = [], -float("inf")
    for start, _, duration in events:
        if start - end > gap:
            sums.append(0.0)
        sums[-1] += duration / 1e9
        end = max(end, start + duration)
    return sums if len(sums) == count else None


def _device_events(path: Path) -> list[tuple[float, str, float]]:
    """(start ns, name, duration ns) of everything that ran on the first GPU, in order."""
    data = jax.profiler.ProfileData.from_file(str(path))
    events = []
    for plane in data.planes:
        if plane.name != "/device:GPU:0":
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):  # the other lines repeat these events by module and by operation
                events += [(e.start_ns, e.name, e.duration_ns) for e in line.events]
    return sorted(events)


def _plain(name: str) -> str:
    return re.sub(r"[^0-9a-zA-Z]", "_", name)


def _scopes(hlo: str | None) -> dict[str, str]:
    """Instruction name (as kernels are named after them) -> op_name of its metadata."""
    found = re.findall(r'%?([\w.\-]+) = [^\n]*metadata=\{[^}]*op_name="([^"]*)"', hlo or "")
    return {_plain(name): scope for name, scope in found}
