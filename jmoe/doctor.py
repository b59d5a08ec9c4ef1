"""`jmoe doctor`: what is wrong with this machine's setup, found from facts that `jmoe.machine` gathers first.

Every check is a pure function of the `Facts`, so each broken setup has a test that needs no GPU. `jmoe.selftest` then
runs the layer. `examine` does all of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .machine import Facts, Probes, gather, version

if TYPE_CHECKING:
    from .caps import DeviceCaps
    from .selftest import Case, Result

OLDEST_JAX, KERNELS_JAX, NEXT_JAX = (0, 10, 2), (0, 11), (0, 13)
EVEN_REGISTERS_JAX = (0, 12)  # pallas_kernels.compat.REGISTERS_MOVE says why
MINIMUM_DRIVER = {12: 525, 13: 580}  # NVIDIA driver branch that a CUDA major version needs
BUSY_BYTES, BUSY_PERCENT = 1 << 30, 10


@dataclasses.dataclass(frozen=True)
class Finding:
    """level: "problem" (something does not work), "warning" (slower or less than it could be) or "ok". todo: what to
    do."""

    level: Literal["problem", "warning", "ok"]
    what: str
    todo: str = ""


def _branch(driver: str) -> int:
    return (version(driver) or (0,))[0]


def best_extra(driver: str) -> str:
    """The extra of jmoe that fits a driver."""
    return "cuda13" if _branch(driver) >= MINIMUM_DRIVER[13] else "cuda12"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


# --- the checks


def check_gpu(f: Facts) -> list[Finding]:
    """Is there a GPU at all?"""
    if f.gpus:
        names = ", ".join(sorted({g.name for g in f.gpus}))
        hidden = len(f.gpus) - len(f.visible_gpus)
        visible = f"; CUDA_VISIBLE_DEVICES={f.env['CUDA_VISIBLE_DEVICES']} hides {hidden}" if hidden else ""
        return [Finding("ok", f"{_count(len(f.gpus), 'GPU')} ({names}), driver {f.driver}{visible}")]
    if f.on_gpu:
        return [Finding("ok", f"JAX has {_count(len(f.jax_devices), 'GPU')} (nvidia-smi could not be asked)")]
    return [
        Finding(
            "warning",
            "no GPU: nvidia-smi lists none",
            "Everything runs on the CPU, with the same results and no speed. If there should be a GPU: `nvidia-smi` "
            "must list it, which needs the NVIDIA driver, and in a container `docker run --gpus all`.",
        )
    ]


def check_start(f: Facts) -> list[Finding]:
    """Does JAX start, and on the GPUs that are there?"""
    if not f.jax_platform:
        again = f"pip install -U 'jmoe[{best_extra(f.driver)}]'" if f.gpus else "pip install -U jmoe"
        return [
            Finding(
                "problem",
                f"JAX does not start: {f.jax_error or 'no reason given'}",
                f"Fix the version findings in this list first, if there are any; else `{again}` brings JAX and jaxlib "
                "of one version.",
            )
        ]
    if not f.gpus or f.on_gpu:
        return []
    if not f.plugins:
        extra = best_extra(f.driver)
        return [
            Finding(
                "problem",
                f"JAX has no CUDA plugin: it runs on {f.jax_platform} beside {_count(len(f.gpus), 'idle GPU')}",
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
    if f.plugin_error:
        major = next(iter(f.plugins))[8:10]
        return [
            Finding(
                "problem",
                f"JAX's CUDA plugin does not load: {f.plugin_error}",
                f"pip install -U 'jmoe[cuda{major}]' brings the CUDA libraries that it was built for. If they are "
                "installed, LD_LIBRARY_PATH may put others before them: unset it.",
            )
        ]
    return [
        Finding(
            "problem",
            f"JAX does not start on the GPUs: {f.jax_error or 'no reason given'}",
            "Fix the version findings in this list first; then `python -c 'import jax; jax.devices(\"cuda\")'` gives "
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
        plugin = f", CUDA {majors[0]} plugin of the same version" if majors else ""
        same = jaxlib == f.packages["jax"]
        jaxlib = "" if same else f", jaxlib {jaxlib}"
        found.append(Finding("ok", f"Python {f.python}, JAX {f.packages['jax']}{jaxlib}{plugin}"))
    return found


def check_kernels_jax(f: Facts) -> list[Finding]:
    """Is JAX new enough for the GPU kernels, and does its compiler let them have the registers they want?"""
    if not f.on_gpu or not f.jax or KERNELS_JAX <= f.jax < EVEN_REGISTERS_JAX or f.jax >= NEXT_JAX:
        return []
    if EVEN_REGISTERS_JAX <= f.jax < NEXT_JAX:
        return [
            Finding(
                "warning",
                f"JAX {f.packages['jax']} compiles kernels with libnvJitLink, which keeps warpgroups from handing "
                "registers to each other: some grouped matmuls use smaller tiles than under JAX 0.11",
                f"pip install 'jax[{best_extra(f.driver)}]<0.12' for the tiles that the figures were measured with.",
            )
        ]
    newer = "" if version(f.python) >= (3, 12) else " in Python 3.12 or newer, which JAX 0.11 needs"
    return [
        Finding(
            "problem",
            f"JAX {f.packages['jax']} is too old for the GPU kernels, which need 0.11: plain XLA runs in their place",
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
                "through the host's memory",
                "`nvidia-smi topo -p2p r` shows the reason. Usual ones: PCIe access control (ACS) or the IOMMU is on, "
                "a virtual machine without peer-to-peer, MIG. Choose GPUs of one NVLink domain with "
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
    busy = [g for g in f.visible_gpus if g.memory_used > BUSY_BYTES or g.utilization > BUSY_PERCENT]
    if not busy:
        return []
    free = [str(g.index) for g in f.visible_gpus if g not in busy]
    used = "; ".join(
        f"GPU {g.index} has {g.memory_used / 2**30:.1f} of {g.memory_total / 2**30:.0f} GiB in use and is "
        f"{g.utilization} % busy"
        for g in busy
    )
    todo = (
        f"CUDA_VISIBLE_DEVICES={','.join(free)} leaves the free ones."
        if free
        else "Wait, or end the processes that `nvidia-smi` lists."
    )
    of = f"{len(busy)} of {_count(len(f.visible_gpus), 'GPU')} {'is' if len(busy) == 1 else 'are'}"
    what = f"{of} in use by other processes: {used}. Memory may run out, and figures will vary"
    return [Finding("warning", what, todo)]


def check_mig(f: Facts) -> list[Finding]:
    """Are the GPUs cut into slices?"""
    if not any(g.mig for g in f.visible_gpus):
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
    check_start,
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
    """One group of kernels: whether it runs here; why it does not, and what runs in its place."""

    name: str
    runs: bool
    why: str


def device_caps(f: Facts) -> DeviceCaps:
    """The devices that JAX has, as the policy describes them."""
    from .caps import DeviceCaps, link_of

    on_gpu, count = f.on_gpu, max(len(f.jax_devices), 1)
    name, capability = f.jax_devices[0] if f.jax_devices else ("", None)
    link = "local" if count == 1 else link_of(f.peers) if on_gpu else "host"
    new = f.jax >= KERNELS_JAX
    why = "" if new else f"the kernels need JAX 0.11 or newer, this is {f.packages.get('jax', 'none')}"
    return DeviceCaps(f.jax_platform or "cpu", capability, count, link, kernels=new, kernels_reason=why, name=name)


def kernels(f: Facts) -> list[Kernel]:
    """The kernels of `pallas_kernels`, and whether they can run on these devices, by their own reasons."""
    if not f.jax_platform:
        return [Kernel("all kernels", False, "JAX does not start")]
    if not f.on_gpu:
        return [Kernel("all kernels", False, "JAX has no GPU; plain XLA runs in their place, with the same results")]
    if f.jax < KERNELS_JAX:
        why = f"JAX {f.packages.get('jax')} is older than 0.11; plain XLA runs in their place, with the same results"
        return [Kernel("all kernels", False, why)]
    if f.mosaic_error:
        why = f"Pallas Mosaic GPU cannot be imported ({f.mosaic_error}); plain XLA runs in their place"
        return [Kernel("all kernels", False, why)]
    from .support import kernel_reasons

    return [Kernel(name, why is None, why or "") for name, why in kernel_reasons(device_caps(f)).items()]


# --- everything


@dataclasses.dataclass(frozen=True)
class Report:
    """What `examine` found. self_test is empty where it was not asked for."""

    findings: list[Finding]
    kernels: list[Kernel]
    self_test: list[Result]

    @property
    def status(self) -> int:
        """Exit status: 1 if something does not work, 0 if all does (there may be warnings)."""
        problem = any(f.level == "problem" for f in self.findings)
        return int(problem or any(r.status == "failed" for r in self.self_test))

    @property
    def warned(self) -> bool:
        """Whether there is a warning."""
        return any(f.level == "warning" for f in self.findings)

    def verdict(self) -> str:
        """One sentence for the end of the page."""
        problems = sum(f.level == "problem" for f in self.findings)
        warnings = sum(f.level == "warning" for f in self.findings)
        failed = sum(r.status == "failed" for r in self.self_test)
        parts = [_count(n, what) for n, what in ((problems, "problem"), (warnings, "warning")) if n]
        parts += [f"{_count(failed, 'self-test')} failed"] if failed else []
        if self.status:
            return ", ".join(parts) + ": something here does not work until it is mended."
        return f"{parts[0]}; what this machine has works." if parts else "Nothing is wrong."

    def to_json(self) -> dict[str, Any]:
        """Everything as plain dictionaries, lists, numbers and strings."""
        found = {"findings": self.findings, "kernels": self.kernels, "self_test": self.self_test}
        return {"status": self.status} | {k: [dataclasses.asdict(x) for x in v] for k, v in found.items()}


def examine(
    probes: Probes | None = None,
    *,
    self_test: bool = True,
    cases: Sequence[Case] | None = None,
    step: Callable[[str], None] = lambda _: None,
) -> Report:
    """Look at a machine and, where JAX starts, test what it computes.

    probes: questions to the machine (None: this one). cases: of the self-test (None: `jmoe.selftest.CASES`). step:
    called with the name of each case before it runs.
    """
    facts = gather(probes)
    findings = diagnose(facts)
    able: list[Kernel] = []
    results: list[Result] = []
    try:
        able = kernels(facts)
        if self_test and facts.jax_platform:
            from .selftest import CASES, run_self_test

            results = run_self_test(step, cases=CASES if cases is None else cases)
    except Exception as e:  # neither raises by itself: a package that they import is broken, and that is a finding
        again = "pip install --force-reinstall jmoe brings what it depends on in versions that fit."
        findings.insert(0, Finding("problem", f"jmoe cannot be imported: {type(e).__name__}: {e}", again))
    return Report(findings, able, results)
