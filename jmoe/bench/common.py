"""What all benchmarks share: the record of one figure, timing of chains, and the ceilings measured beside them.

How things are timed. A jitted call costs about 100 us of Python before the device starts, so a step is timed as a chain
of at least 20 calls inside one jit, each depending on the one before, cycling through input sets that together exceed
the L2 cache, and the median of at least 5 chains is reported. Ceilings (copy bandwidth) are measured in the same run.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

L2_BYTES = 60 * 2**20  # NVIDIA H200; input sets together must be larger than this
SHORT_CALL = 20e-6  # seconds; steps shorter than this are timed in longer chains
LINK_GBPS = 450.0  # NVLink 4 (H100, H200), one direction, datasheet


@dataclasses.dataclass(frozen=True)
class Record:
    """One figure of a benchmark.

    name: what was measured ("mxfp8"). case: the shape in words ("16384x7168 bfloat16"); (name, case, unit) identifies a
    record between runs. value, ceiling, peer are all in `unit`; ceiling_name and peer_name say what they are. seconds:
    of one call. error: against the float32 reference, error_name says which error it is. lower_is_better: for times.
    meaningful: False where the speed says nothing (smoke runs, a CPU stand-in). parameters: numbers for plots and
    filters (T, D, R, ...). environment: filled in by the command for all records of a run.
    """

    name: str
    case: str
    value: float | None
    unit: str
    seconds: float | None = None
    ceiling: float | None = None
    ceiling_name: str = ""
    peer: float | None = None
    peer_name: str = ""
    error: float | None = None
    error_name: str = ""
    lower_is_better: bool = False
    meaningful: bool = True
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """Share of the ceiling that was reached, 1.0 at the ceiling."""
        return _ratio(self.value, self.ceiling, self.lower_is_better)

    @property
    def against_peer(self) -> float | None:
        """How many times as good as the peer: above 1 is faster."""
        return _ratio(self.value, self.peer, self.lower_is_better)

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.name, self.case, self.unit)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "share": self.share, "against_peer": self.against_peer}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """The inverse of `to_json`; ValueError names the fields that are missing."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        missing = [n for n in ("name", "case", "value", "unit") if n not in data]
        if missing:
            raise ValueError(f"A benchmark record lacks {', '.join(missing)}; it holds {', '.join(sorted(data))}.")
        return cls(**{k: v for k, v in data.items() if k in fields})


def _ratio(value: float | None, other: float | None, lower_is_better: bool) -> float | None:
    if value is None or other is None or not value or not other:
        return None
    return other / value if lower_is_better else value / other


class Progress(Protocol):
    """What a benchmark tells whoever watches."""

    def start(self, total: int) -> None:
        """There will be `total` steps."""

    def step(self, description: str) -> None:
        """The next step begins."""


class NoProgress:
    def start(self, total: int) -> None:
        pass

    def step(self, description: str) -> None:
        pass


def environment() -> dict[str, Any]:
    """Versions, devices and time of this run, for the JSON file. Imports nothing that is not there already."""
    devices = jax.devices()
    torch = sys.modules.get("torch")
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "torch": None if torch is None else torch.__version__,
        "jmoe": _version("jmoe"),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "compute_capability": str(getattr(devices[0], "compute_capability", "")),
        "num_devices": len(devices),
    }


def _version(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- timing


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median and the best of `repeats` chains of `calls` calls."""

    median: float
    best: float
    calls: int
    repeats: int


def tie(value: Any, *after: Any) -> Any:
    """`value`, which nobody can compute before `after` is complete (one element of each leaf of `after` is used)."""
    tokens = [leaf[(0,) * leaf.ndim] for leaf in jax.tree.leaves(after)]
    return lax.optimization_barrier((value, tokens))[0]


def chain(step: Callable[..., Any], *, calls: int = 20) -> Callable[[Sequence[Any]], Any]:
    """A function of a list of input sets (tuples of arguments) that calls `step` `calls` times, one after another.

    The dependence costs one scalar slice for each leaf of the result. Put the chain inside shard_map, not around it:
    outside, that slice would be a collective. A step whose output has the type of its first argument can be chained
    without the slice by `feed_back`.
    """

    def chained(inputs: Sequence[Any]) -> Any:
        out = step(*inputs[0])
        for i in range(1, calls):
            out = step(*tie(tuple(inputs[i % len(inputs)]), out))
        return out

    return chained


def feed_back(step: Callable[..., Any], *, calls: int = 20) -> Callable[[Sequence[Any]], Any]:
    """As `chain`, for a step whose result replaces the first argument of the next call."""

    def chained(inputs: Sequence[Any]) -> Any:
        out = inputs[0][0]
        for i in range(calls):
            out = lax.optimization_barrier(step(out, *inputs[i % len(inputs)][1:]))
        return out

    return chained


def time_call(f: Callable[..., Any], *args: Any, repeats: int = 5, warmup: int = 2) -> tuple[float, float]:
    """Median and best seconds of `f(*args)`, complete, over `repeats` calls after `warmup` calls."""
    for _ in range(warmup):
        jax.block_until_ready(f(*args))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), min(seconds)


def time_chain(
    step: Callable[..., Any],
    inputs: Sequence[Sequence[Any]],
    *,
    calls: int | None = None,
    repeats: int = 5,
    build: Callable[..., Callable[[Sequence[Any]], Any]] = chain,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.jit,
) -> Timing:
    """Seconds of one call of `step`, timed as this module's docstring says.

    inputs: tuples of arguments, cycled through; see `num_sets`. calls: of one chain; None: 20, or 100 where a call
    turns out to be shorter than 20 us. build: `chain` or `feed_back`. wrap: what makes the chain runnable; a caller
    that measures several devices passes `lambda f: jax.jit(shard_map(f, ...))`.
    """
    if not inputs:
        raise ValueError("time_chain needs at least one input set, got none; pass a list of argument tuples.")
    sets = [tuple(s) for s in inputs]
    median, best = time_call(wrap(build(step, calls=calls or 20)), sets, repeats=repeats)
    if calls is None and median / 20 < SHORT_CALL and jax.default_backend() == "gpu":
        calls = 100
        median, best = time_call(wrap(build(step, calls=calls)), sets, repeats=repeats)
    calls = calls or 20
    return Timing(median / calls, best / calls, calls, repeats)


def num_sets(nbytes: int, *, at_most: int = 16) -> int:
    """How many input sets of `nbytes` each exceed twice the L2 cache (at least 2)."""
    return int(min(max(2, -(-2 * L2_BYTES // max(nbytes, 1))), at_most))


def copy_bandwidth(nbytes: int | None = None, *, device: jax.Device | None = None) -> float:
    """GB/s, read plus written, of a device-to-device copy of `nbytes` (default 256 MiB on a GPU, 1 MiB elsewhere)."""
    device = device or jax.local_devices()[0]
    if nbytes is None:
        nbytes = 256 * 2**20 if device.platform == "gpu" else 2**20
    x = jax.device_put(np.random.default_rng(0).integers(0, 2**32, nbytes // 4, dtype=np.uint32), device)
    timing = time_chain(lambda v: v ^ np.uint32(1), [(x,)], calls=20, build=feed_back)
    return 2 * x.nbytes / timing.best / 1e9


def relative_error(actual: Any, reference: Any) -> float:
    """Relative Frobenius error ||actual - reference|| / ||reference||, in float64 on the host."""
    a = np.asarray(jnp.asarray(actual).astype(jnp.float32), np.float64)
    b = np.asarray(jnp.asarray(reference).astype(jnp.float32), np.float64)
    norm = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) / norm if norm else float(np.linalg.norm(a))


# --- files


def write_json(path: str | Path, bench: str, records: Sequence[Record]) -> None:
    """Write a run as {"bench", "environment", "records"}. NaN and Inf become null, so that any reader takes it."""
    env = dict(records[0].environment) if records else environment()
    rows = [{k: _finite(v) for k, v in r.to_json().items() if k != "environment"} for r in records]
    Path(path).write_text(json.dumps({"bench": bench, "environment": env, "records": rows}, indent=1) + "\n")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def read_json(path: str | Path) -> tuple[str, list[Record]]:
    """The name and the records of a file that `write_json` wrote. ValueError says what is wrong with another file."""
    try:
        data = json.loads(Path(path).read_text())
        env, rows, bench = data["environment"], data["records"], data["bench"]
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file; `jmoe bench NAME --json FILE` writes one.") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as e:
        raise ValueError(f"{path} is not a benchmark file ({e!r}); `jmoe bench NAME --json FILE` writes one.") from None
    return bench, [Record.from_json({**r, "environment": env}) for r in rows]
