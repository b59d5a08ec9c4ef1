"""What `jmoe doctor` looks at: the facts of a machine, and the probes that find them.

Nothing here imports JAX before a probe runs, so that a broken JAX is a finding and not a traceback. Tests describe
other machines by giving `gather` other probes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

PLUGIN_PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
PACKAGES = ("jmoe", "jax", "jaxlib", "flax", "jax-triton", *PLUGIN_PACKAGES, "nvidia-nccl-cu12", "nvidia-nccl-cu13")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "XLA_FLAGS")
SMI_FIELDS = "driver_version,index,name,memory.total,memory.used,utilization.gpu,mig.mode.current"

Peers = Mapping[tuple[int, int], tuple[bool, bool]]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU as the driver sees it (nvidia-smi), before this process used it. Memory in bytes, utilization in %."""

    index: int
    name: str
    memory_total: int = 0
    memory_used: int = 0
    utilization: int = 0
    mig: bool = False


@dataclasses.dataclass(frozen=True)
class Facts:
    """What was found. Nothing here is a judgement.

    packages: installed versions by package name (jax, jaxlib, the CUDA plugins, NCCL, flax, jmoe). driver: of NVIDIA,
    "" if there is none. gpus: as the driver sees them. jax_platform: where JAX runs by default, "" if it cannot start;
    jax_error: why it could not, or why it found no GPU. plugin_error: what JAX's CUDA plugin complained of when it was
    loaded. jax_devices: (kind, compute capability) of each device of JAX. peers: for ordered pairs of CUDA devices,
    (memory access, native atomics); None if the driver could not be asked. mosaic_error: why Pallas Mosaic GPU cannot
    be imported. env: the variables that matter, where they are set.
    """

    python: str = ""
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    jax_platform: str = "cpu"
    jax_error: str = ""
    plugin_error: str = ""
    jax_devices: tuple[tuple[str, tuple[int, int] | None], ...] = ()
    peers: Peers | None = None
    mosaic_error: str = ""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def jax(self) -> tuple[int, ...]:
        """JAX's version as numbers, () where it is not installed."""
        return version(self.packages.get("jax", ""))

    @property
    def on_gpu(self) -> bool:
        """Whether JAX runs on GPUs."""
        return self.jax_platform == "gpu"

    @property
    def plugins(self) -> dict[str, str]:
        """Installed CUDA plugins of JAX and their versions."""
        return {name: self.packages[name] for name in PLUGIN_PACKAGES if name in self.packages}

    @property
    def visible_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that CUDA_VISIBLE_DEVICES leaves (all of them where it is not a list of numbers)."""
        chosen = self.env.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if not all(c.strip().isdigit() for c in chosen):
            return self.gpus
        return tuple(g for g in self.gpus if g.index in {int(c) for c in chosen})


def version(text: str) -> tuple[int, ...]:
    """ "0.11.2.dev3" -> (0, 11, 2); "" -> ()."""
    parts = []
    for part in text.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


# --- probes


def package_version(name: str) -> str | None:
    """The installed version of a package, None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def ask_nvidia_smi() -> str:
    """CSV with a line of SMI_FIELDS for each GPU; "" where nvidia-smi is absent or fails."""
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def jax_devices(platform_name: str | None) -> Sequence[Any]:
    """JAX's devices, by default or of one platform. Raises what JAX raises."""
    import jax

    return jax.devices() if platform_name is None else jax.devices(platform_name)


def peer_access(ordinals: tuple[int, ...]) -> Peers | None:
    """See `jmoe.caps.peer_matrix`."""
    from .caps import peer_matrix

    return peer_matrix(ordinals)


def import_mosaic() -> None:
    """Imports Pallas Mosaic GPU. Raises whatever is wrong with it."""
    import jax.experimental.pallas.mosaic_gpu  # noqa: F401


@dataclasses.dataclass(frozen=True)
class Probes:
    """The questions that `gather` asks, each as a function; the defaults ask this machine."""

    python: Callable[[], str] = platform.python_version
    package: Callable[[str], str | None] = package_version
    nvidia_smi: Callable[[], str] = ask_nvidia_smi
    devices: Callable[[str | None], Sequence[Any]] = jax_devices
    peers: Callable[[tuple[int, ...]], Peers | None] = peer_access
    mosaic: Callable[[], None] = import_mosaic
    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)


def gather(probes: Probes | None = None) -> Facts:
    """Look at a machine. Never raises: whatever a probe raises is one of the facts.

    nvidia-smi is asked before JAX starts, so that what it says of the GPUs' use is about other processes.
    """
    probes = probes or Probes()
    driver, gpus = parse_nvidia_smi(probes.nvidia_smi())
    versions = {name: probes.package(name) for name in PACKAGES}
    with _complaints() as complaints:
        started = _jax(probes, expect_gpu=bool(gpus))
    ordinals = started.pop("ordinals")
    mosaic_error = ""
    if started["jax_platform"]:
        try:
            probes.mosaic()
        except Exception as e:
            mosaic_error = _line(e)
    return Facts(
        python=probes.python(),
        packages={name: v for name, v in versions.items() if v is not None},
        driver=driver,
        gpus=gpus,
        plugin_error=complaints[-1] if complaints else "",
        peers=probes.peers(ordinals) if len(ordinals) > 1 else None,
        mosaic_error=mosaic_error,
        env={k: probes.environ[k] for k in VARIABLES if k in probes.environ},
        **started,
    )


def _line(e: BaseException) -> str:
    message = str(e).strip().splitlines()
    return f"{type(e).__name__}: {message[0]}" if message else type(e).__name__


def _jax(probes: Probes, *, expect_gpu: bool) -> dict[str, Any]:
    """The facts about JAX's devices, and their CUDA ordinals."""
    try:
        devices = list(probes.devices(None))
    except Exception as e:
        return dict(jax_platform="", jax_error=_line(e), jax_devices=(), ordinals=())
    name, error = devices[0].platform, ""
    if expect_gpu and name != "gpu":
        try:
            probes.devices("cuda")
        except Exception as e:
            error = _line(e)
    capability = [str(getattr(d, "compute_capability", None) or "").split(".") for d in devices]
    pairs = [(int(c[0]), int(c[1])) if len(c) == 2 and all(p.isdigit() for p in c) else None for c in capability]
    ordinals = tuple(getattr(d, "local_hardware_id", i) for i, d in enumerate(devices)) if name == "gpu" else ()
    kinds = tuple((d.device_kind, pair) for d, pair in zip(devices, pairs, strict=True))
    return dict(jax_platform=name, jax_error=error, jax_devices=kinds, ordinals=ordinals)


class _Collector(logging.Handler):
    def __init__(self):
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.texts.append(_line(error) if error is not None else record.getMessage().strip().splitlines()[-1])


@contextlib.contextmanager
def _complaints() -> Iterator[list[str]]:
    """What JAX logs about plugins that do not load, instead of the traceback that it would print."""
    logger, collector = logging.getLogger("jax._src.xla_bridge"), _Collector()
    before = logger.propagate
    logger.addHandler(collector)
    logger.propagate = False
    try:
        yield collector.texts
    finally:
        logger.removeHandler(collector)
        logger.propagate = before


def parse_nvidia_smi(text: str) -> tuple[str, tuple[Gpu, ...]]:
    """Driver version and GPUs from a CSV of SMI_FIELDS. Fields that are not supported count as 0."""
    driver, gpus = "", []
    for line in text.splitlines():
        parts = [p.strip() for p in line.split(",")]
        if len(parts) != 7 or not parts[1].isdigit():
            continue
        driver = parts[0]
        total, used, busy = (int(p) if p.isdigit() else 0 for p in parts[3:6])
        gpus.append(Gpu(int(parts[1]), parts[2], total * 2**20, used * 2**20, busy, parts[6] == "Enabled"))
    return driver, tuple(gpus)
