"""`jmoe doctor`: what is wrong with this machine's setup, found from facts that are gathered first.

`gather()` looks at the machine; every check is a pure function of the `Facts`, so each broken setup has a test that
needs no GPU. `jmoe.selftest` then runs the layer.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from typing import Literal

from . import caps as device_caps
from .caps import parse_capability

OLDEST_JAX, KERNELS_JAX, NEXT_JAX = (0, 10, 2), (0, 11), (0, 13)
MINIMUM_DRIVER = {12: 525, 13: 580}  # NVIDIA driver branch that a CUDA major version needs
BUSY_BYTES, BUSY_PERCENT = 1 << 30, 10
PLUGIN_PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")


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
    jax_error: why it could not, or why it found no GPU. jax_devices: (kind, compute capability) of each device of JAX.
    peers: for ordered pairs of CUDA devices, (memory access, native atomics); None if the driver could not be asked.
    mosaic_error: why Pallas Mosaic GPU cannot be imported. env: the variables that matter, where they are set.
    """

    python: str = ""
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    jax_platform: str = "cpu"
    jax_error: str = ""
    jax_devices: tuple[tuple[str, tuple[int, int] | None], ...] = ()
    peers: Mapping[tuple[int, int], tuple[bool, bool]] | None = None
    mosaic_error: str = ""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def jax(self) -> tuple[int, ...]:
        return version(self.packages.get("jax", ""))

    @property
    def on_gpu(self) -> bool:
        return self.jax_platform == "gpu"

    @property
    def plugins(self) -> dict[str, str]:
        return {name: self.packages[name] for name in PLUGIN_PACKAGES if name in self.packages}


@dataclasses.dataclass(frozen=True)
class Finding:
    """level: "problem" (something does not work), "warning" (slower or less than it could be) or "ok". todo: what to
    do."""

    level: Literal["problem", "warning", "ok"]
    what: str
    todo: str = ""


def version(text: str) -> tuple[int, ...]:
    """ "0.11.2.dev3" -> (0, 11, 2); "" -> ()."""
    parts = []
    for part in text.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def _branch(driver: str) -> int:
    return (version(driver) or (0,))[0]


def best_extra(driver: str) -> str:
    """The extra of jmoe that fits a driver."""
    return "cuda13" if _branch(driver) >= MINIMUM_DRIVER[13] else "cuda12"


# --- the checks


def check_gpu(f: Facts) -> list[Finding]:
    """Is there a GPU at all?"""
    if f.gpus:
        names = ", ".join(sorted({g.name for g in f.gpus}))
        return [Finding("ok", f"{len(f.gpus)} GPU{'s' * (len(f.gpus) > 1)} ({names}), driver {f.driver}")]
    if f.on_gpu:
        return [Finding("ok", f"JAX has {len(f.jax_devices)} GPUs (nvidia-smi could not be asked)")]
    return [
        Finding(
            "warning",
            "no GPU: nvidia-smi lists none",
            "Everything runs on the CPU through the portable implementations, with the same results and no speed. If "
            "there should be a GPU, check that the NVIDIA driver is loaded (nvidia-smi) and that a container was "
            "started "
            "with --gpus all.",
        )
    ]


def check_plugin(f: Facts) -> list[Finding]:
    """Can JAX see the GPUs that are there?"""
    if not f.gpus or f.on_gpu:
        return []
    if not f.plugins:
        extra = best_extra(f.driver)
        return [
            Finding(
                "problem",
                f"JAX has no CUDA plugin: it runs on {f.jax_platform or 'nothing'} beside {len(f.gpus)} idle GPUs",
                f"pip install 'jmoe[{extra}]' (driver {f.driver} takes CUDA {extra[4:]}).",
            )
        ]
    wanted = f.env.get("JAX_PLATFORMS", "")
    if wanted and not {"cuda", "gpu"} & set(wanted.split(",")):
        return [
            Finding("warning", f"JAX_PLATFORMS={wanted} keeps JAX off the GPUs", "Unset JAX_PLATFORMS to use them.")
        ]
    if f.env.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"):
        return [
            Finding(
                "warning",
                f"CUDA_VISIBLE_DEVICES={f.env['CUDA_VISIBLE_DEVICES']!r} hides all GPUs",
                "Unset CUDA_VISIBLE_DEVICES, or list the GPUs to use: 0,1.",
            )
        ]
    return [
        Finding(
            "problem",
            f"JAX does not start on the GPUs: {f.jax_error or 'no reason given'}",
            "Fix the version findings in this list first; then run `python -c 'import jax; jax.devices(\"cuda\")'` for "
            "the whole message.",
        )
    ]


def check_versions(f: Facts) -> list[Finding]:
    """Do JAX, jaxlib, the plugin and the driver belong together?"""
    found: list[Finding] = []
    jaxlib = f.packages.get("jaxlib", "")
    majors = sorted({int(name[8:10]) for name in f.plugins})
    for name, installed in f.plugins.items():
        if installed != jaxlib:
            found.append(
                Finding(
                    "problem",
                    f"mismatched plugin: {name} is {installed} and jaxlib is {jaxlib or 'missing'}; JAX ignores it",
                    f"pip install 'jax[cuda{name[8:10]}]=={f.packages.get('jax', jaxlib)}'",
                )
            )
    for major in majors:
        halves = [n for n in (f"jax-cuda{major}-plugin", f"jax-cuda{major}-pjrt") if n not in f.plugins]
        if halves:
            found.append(
                Finding("problem", f"{halves[0]} is missing beside its other half", f"pip install 'jmoe[cuda{major}]'")
            )
        if f.driver and _branch(f.driver) < MINIMUM_DRIVER[major]:
            found.append(
                Finding(
                    "problem",
                    f"driver {f.driver} is too old for CUDA {major}, which needs {MINIMUM_DRIVER[major]} or newer",
                    f"Update the NVIDIA driver, or install 'jmoe[{best_extra(f.driver)}]' instead.",
                )
            )
    if len(majors) > 1:
        found.append(
            Finding(
                "problem",
                "CUDA plugins for CUDA 12 and 13 are both installed",
                f"pip uninstall the one that is not wanted; driver {f.driver or 'here'} takes {best_extra(f.driver)}.",
            )
        )
    if f.jax and f.jax < OLDEST_JAX:
        found.append(
            Finding("problem", f"JAX {f.packages['jax']} is older than 0.10.2", "pip install -U 'jax>=0.10.2,<0.13'")
        )
    if f.jax >= NEXT_JAX:
        found.append(
            Finding(
                "warning",
                f"JAX {f.packages['jax']} is newer than any that jmoe was tested with",
                "pip install 'jax<0.13'",
            )
        )
    if not found and f.jax:
        plugin = f", {', '.join(f'{n} {v}' for n, v in f.plugins.items())}" if f.plugins else ""
        found.append(Finding("ok", f"Python {f.python}, JAX {f.packages['jax']}, jaxlib {jaxlib}{plugin}"))
    return found


def check_kernels_jax(f: Facts) -> list[Finding]:
    """Is JAX new enough for the GPU kernels?"""
    if not f.on_gpu or not f.jax or f.jax >= KERNELS_JAX:
        return []
    newer = "" if version(f.python) >= (3, 12) else " in Python 3.12 or newer, which JAX 0.11 needs"
    return [
        Finding(
            "problem",
            f"JAX {f.packages['jax']} is too old for the GPU kernels, which need 0.11: the portable implementations "
            f"run",
            f"pip install -U 'jmoe[{best_extra(f.driver)}]'{newer}.",
        )
    ]


def check_peers(f: Facts) -> list[Finding]:
    """Can the GPUs reach each other's memory?"""
    if not f.on_gpu or len(f.jax_devices) < 2:
        return []
    if f.peers is None:
        return [Finding("warning", "peer access is unknown: libcuda.so.1 could not be asked", "Check the driver.")]
    shut = [f"{a} -> {b}" for (a, b), (access, _) in sorted(f.peers.items()) if not access]
    if shut:
        return [
            Finding(
                "problem",
                f"no peer access between GPUs {', '.join(shut)}: the one-sided kernels cannot run, and NCCL goes "
                f"through "
                "the host's memory",
                "`nvidia-smi topo -p2p r` shows the reason. Usual ones: PCIe access control (ACS) or the IOMMU is "
                "on, a "
                "virtual machine without peer-to-peer, MIG. Choose GPUs of one NVLink domain with "
                "CUDA_VISIBLE_DEVICES.",
            )
        ]
    if not all(atomics for _, atomics in f.peers.values()):
        return [
            Finding(
                "warning",
                "the GPUs reach each other over PCIe, not NVLink: exchanges are bound by some 25 to 50 GB/s",
                "Prefer a quantised wire, QuantConfig(wire='mxfp8'), and fewer ranks.",
            )
        ]
    return [Finding("ok", f"peer access over NVLink between all {len(f.jax_devices)} GPUs")]


def check_nccl(f: Facts) -> list[Finding]:
    """Is there an NCCL for the collectives of several GPUs?"""
    installed = [(n, v) for n, v in f.packages.items() if n.startswith("nvidia-nccl-")]
    if installed:
        return [Finding("ok", f"NCCL {installed[0][1]} ({installed[0][0]})")]
    if f.on_gpu and len(f.jax_devices) > 1:
        return [
            Finding(
                "warning",
                "no nvidia-nccl package: collectives use the system's libnccl.so.2, if there is one",
                f"pip install 'jmoe[{best_extra(f.driver)}]' brings the one that JAX was built for.",
            )
        ]
    return []


def check_busy(f: Facts) -> list[Finding]:
    """Is somebody else using the GPUs?"""
    busy = [g for g in f.gpus if g.memory_used > BUSY_BYTES or g.utilization > BUSY_PERCENT]
    if not busy:
        return []
    free = [str(g.index) for g in f.gpus if g not in busy]
    used = "; ".join(
        f"GPU {g.index} has {g.memory_used / 2**30:.1f} of {g.memory_total / 2**30:.0f} GiB in use, {g.utilization} "
        f"% busy"
        for g in busy
    )
    todo = (
        f"CUDA_VISIBLE_DEVICES={','.join(free)} uses the free ones."
        if free
        else "Wait, or end the processes that `nvidia-smi` lists."
    )
    return [
        Finding(
            "warning",
            f"{len(busy)} of {len(f.gpus)} GPUs are in use by other processes: {used}. Figures will vary",
            todo,
        )
    ]


def check_mig(f: Facts) -> list[Finding]:
    """Are the GPUs cut into slices?"""
    if not any(g.mig for g in f.gpus):
        return []
    return [
        Finding(
            "warning",
            "MIG is on: a slice is one rank, and slices have no access to each other's memory",
            "Run one rank for each slice with backend='nvlink_two_sided', or have the administrator switch MIG off.",
        )
    ]


CHECKS: tuple[Callable[[Facts], list[Finding]], ...] = (
    check_gpu,
    check_versions,
    check_plugin,
    check_kernels_jax,
    check_peers,
    check_nccl,
    check_busy,
    check_mig,
)


def diagnose(facts: Facts) -> list[Finding]:
    """All findings, problems first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(found, key=lambda x: ("problem", "warning", "ok").index(x.level))


# --- which kernels can run


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One group of kernels: whether it runs here, and if not, why and what runs instead."""

    name: str
    runs: bool
    why: str


def kernels(f: Facts) -> list[Kernel]:
    """The kernels of `pallas_kernels`, and whether they can run on these devices."""
    capability = f.jax_devices[0][1] if f.jax_devices else None
    if not f.on_gpu or capability is None:
        blocked = "there is no GPU; plain XLA runs instead"
    elif f.jax < KERNELS_JAX:
        blocked = f"JAX {f.packages.get('jax')} is older than 0.11; plain XLA runs instead"
    elif f.mosaic_error:
        blocked = f"Pallas Mosaic GPU cannot be imported ({f.mosaic_error}); plain XLA runs instead"
    else:
        blocked = ""

    def on(name: str, majors: tuple[int, ...], what: str) -> Kernel:
        if blocked:
            return Kernel(name, False, blocked)
        assert capability is not None
        if capability[0] not in majors:
            return Kernel(name, False, f"made for {what}; this is sm_{capability[0]}{capability[1]}")
        return Kernel(name, True, what)

    remote = on("one-sided exchange", (9, 10), "Hopper and Blackwell")
    if remote.runs and len(f.jax_devices) < 2:
        remote = Kernel(remote.name, False, "there is one GPU: nothing has to be exchanged")
    elif remote.runs and (f.peers is None or not all(access for access, _ in f.peers.values())):
        remote = Kernel(remote.name, False, "the GPUs have no peer access; XLA's collectives run instead")
    triton = "jax-triton" in f.packages
    ampere = on("grouped matmul, Triton", (8,), "Ampere and Ada")
    if ampere.runs and not triton:
        ampere = Kernel(ampere.name, False, "jax-triton is not installed: pip install 'jmoe[triton]'")
    return [
        on("quantise and dequantise", (9, 10), "Hopper and Blackwell"),
        on("grouped matmul, Hopper", (9,), "Hopper (sm_90a)"),
        on("grouped matmul, block-scaled", (10,), "Blackwell (sm_100a)"),
        ampere,
        remote,
    ]


# --- looking at the machine


def gather() -> Facts:
    """Look at this machine. Asks nvidia-smi before JAX starts, so that other processes' use of the GPUs is seen."""
    driver, gpus = _nvidia_smi()
    env = {k: os.environ[k] for k in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "XLA_FLAGS") if k in os.environ}
    packages = _packages()
    jax_platform, jax_error, devices, ordinals = _jax(bool(gpus))
    mosaic_error = ""
    try:
        import jax.experimental.pallas.mosaic_gpu  # noqa: F401
    except Exception as e:  # whatever is broken there is a finding, not a crash
        mosaic_error = f"{type(e).__name__}: {e}"
    return Facts(
        python=platform.python_version(),
        packages=packages,
        driver=driver,
        gpus=gpus,
        jax_platform=jax_platform,
        jax_error=jax_error,
        jax_devices=devices,
        peers=device_caps.peer_matrix(ordinals) if len(ordinals) > 1 else None,
        mosaic_error=mosaic_error,
        env=env,
    )


def _packages() -> dict[str, str]:
    wanted = ("jmoe", "jax", "jaxlib", "flax", "jax-triton", *PLUGIN_PACKAGES, "nvidia-nccl-cu12", "nvidia-nccl-cu13")
    found = {}
    for name in wanted:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _jax(expect_gpu: bool):
    """(platform, error, devices, CUDA ordinals) of JAX in this process."""
    import jax

    try:
        devices = jax.devices()
    except Exception as e:  # a broken installation is what is being looked for
        return "", f"{type(e).__name__}: {e}", (), ()
    platform_name, error = devices[0].platform, ""
    if expect_gpu and platform_name != "gpu":
        try:
            jax.devices("cuda")
        except Exception as e:
            error = str(e).splitlines()[0]
    kinds = tuple((d.device_kind, parse_capability(getattr(d, "compute_capability", None))) for d in devices)
    ordinals = (
        tuple(getattr(d, "local_hardware_id", i) for i, d in enumerate(devices)) if platform_name == "gpu" else ()
    )
    return platform_name, error, kinds, ordinals


def _nvidia_smi() -> tuple[str, tuple[Gpu, ...]]:
    fields = "driver_version,index,name,memory.total,memory.used,utilization.gpu,mig.mode.current"
    try:
        text = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return "", ()
    return parse_nvidia_smi(text)


def parse_nvidia_smi(text: str) -> tuple[str, tuple[Gpu, ...]]:
    """Driver version and GPUs from the CSV that `_nvidia_smi` asks for. Fields that are not supported count as 0."""
    driver, gpus = "", []
    for line in text.splitlines():
        parts = [p.strip() for p in line.split(",")]
        if len(parts) != 7 or not parts[1].isdigit():
            continue
        driver = parts[0]
        total, used, busy = (int(p) if p.isdigit() else 0 for p in parts[3:6])
        gpus.append(Gpu(int(parts[1]), parts[2], total * 2**20, used * 2**20, busy, parts[6] == "Enabled"))
    return driver, tuple(gpus)
