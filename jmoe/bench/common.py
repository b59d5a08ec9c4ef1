"""What all benchmarks share: the record of one figure, its file, and (from `timing`) how a step is timed.

Timing: chains of many calls inside one jit, input sets that together exceed the L2 cache, medians of at least 5 chains;
ceilings (copy bandwidth) and peers are measured in the same run.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .timing import Timing as Timing
from .timing import chain as chain
from .timing import copy_bandwidth as copy_bandwidth
from .timing import feed_back as feed_back
from .timing import jit_donating as jit_donating
from .timing import num_sets as num_sets
from .timing import time_call as time_call
from .timing import time_chain as time_chain

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
        """What identifies a record between two runs."""
        return (self.name, self.case, self.unit)

    def to_json(self) -> dict[str, Any]:
        """All fields, and the two ratios, as a plain dictionary."""
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

    def record(self, record: Record) -> None:
        """One figure is known; what `run` returns has it again. A run that is cut short keeps what was told here."""


class NoProgress:
    """A `Progress` that nobody watches."""

    def start(self, total: int) -> None:
        pass

    def step(self, description: str) -> None:
        pass

    def record(self, record: Record) -> None:
        pass


class Attempts:
    """Runs steps of which some may fail, so that those that work give their figures before the failures are raised."""

    def __init__(self):
        self.failed: list[str] = []

    def __call__(self, what: str, step: Callable[[], Any]) -> Any:
        """step(), or None where it fails."""
        try:
            return step()
        except Exception as e:
            self.failed.append(f"{what}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
            return None

    def check(self) -> None:
        """Raises RuntimeError with all failures, if there were any."""
        if self.failed:
            raise RuntimeError("These could not be measured: " + "; ".join(self.failed))


def wanted(only: re.Pattern[str] | None, name: str, case: str) -> bool:
    """Whether the record of this name and case is to be measured: `only` is found in them, or is None."""
    return only is None or only.search(f"{name} {case}") is not None


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
