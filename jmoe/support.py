"""What goes together: backends, formats and architectures, from the rules that the layer and the kernels follow.

Nothing here decides anything: every cell is the answer of `jmoe.policy.decide`, of a kernel's own reason not to run, or
of both. The README's tables and `jmoe doctor` are made from it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from pallas_kernels.grouped_matmul import IMPLEMENTATIONS, Gate, Problem, mosaic_entry
from pallas_kernels.grouped_matmul import triton_entry as triton
from pallas_kernels.permute.thread import CONFIRMED, environment_obstacle
from pallas_kernels.quantize.api import kernel_obstacle, triton_obstacle
from pallas_kernels.quantize.formats import FORMATS

from .backends.engine import engine_reason
from .caps import DeviceCaps
from .config import MoEConfig, QuantConfig
from .policy import BACKENDS, decide
from .policy.table import FAMILIES

# Two devices of each kind, as they are usually linked.
ARCHITECTURES: dict[str, DeviceCaps] = {
    "CPU": DeviceCaps("cpu", None, 2, "host"),
    "Ampere": DeviceCaps("gpu", (8, 0), 2, "nvlink", name="NVIDIA A100"),
    "Ada": DeviceCaps("gpu", (8, 9), 2, "host", name="NVIDIA L40S"),
    "Hopper": DeviceCaps("gpu", (9, 0), 2, "nvlink", name="NVIDIA H200"),
    "Blackwell": DeviceCaps("gpu", (10, 0), 2, "nvlink", name="NVIDIA B200"),
}
# Where the test suites have passed: tests/ on CPUs, tests/gpu on H200s. For the others the code has been compiled only.
RUN_ON = frozenset({"CPU", "Hopper"})
ACTIVATIONS = (None, *FAMILIES)  # a family's first format stands for it
WEIGHTS = (None, "fp8_128x128", "mxfp8", "mxfp4", "nvfp4")
_LAYER = MoEConfig(4096, 2048, 64, 8)  # sizes that no kernel refuses
_ROWS = 8192  # of a prefill
ROW_KERNELS = ("route", "slots", "sort", "gather", "spread", "combine")  # names as in CONFIRMED


@dataclasses.dataclass(frozen=True)
class Support:
    """One cell. status: "run" (tests pass there), "compiled" (nobody has run it there) or "refused" (ValueError when
    the layer is built). how: what does the work: a kernel's name or "XLA", "" where there is nothing to do. why: who
    quantises, or the refusal.
    """

    status: Literal["run", "compiled", "refused"]
    how: str = ""
    why: str = ""


def _status(architecture: str) -> Literal["run", "compiled"]:
    return "run" if architecture in RUN_ON else "compiled"


def exchange(backend: str, activations: str | None, architecture: str) -> Support:
    """Whether a backend serves activations of this format (None: bfloat16) on two devices of an architecture."""
    config = dataclasses.replace(_LAYER, quant=QuantConfig(activations=activations))
    caps = ARCHITECTURES[architecture]
    ranks = 1 if backend == "local" else caps.num_devices
    try:
        decision = decide(config, backend=backend, num_ranks=ranks, tokens=_ROWS, caps=caps)
    except ValueError as refusal:
        return Support("refused", why=str(refusal))
    how = {"none": "", "xla": "XLA", "hierarchical": "kernel in a host, XLA between"}.get(decision.transport, "kernel")
    return Support(_status(architecture), how, decision.where)


def _problem(activations: str | None, weights: str | None, caps: DeviceCaps) -> Problem:
    n, k, groups = 2 * _LAYER.intermediate_size, _LAYER.hidden_size, _LAYER.num_experts
    capability = None if caps.compute_capability is None else "{}.{}".format(*caps.compute_capability)
    kinds = activations or "bfloat16", weights or "bfloat16", "bfloat16"
    return Problem("forward", _ROWS, n, k, groups, *kinds, caps.platform, capability)


def matmul(activations: str | None, weights: str | None, architecture: str) -> Support:
    """What multiplies activations and weights of these formats (None: bfloat16); with all extras installed."""
    problem = _problem(activations, weights, ARCHITECTURES[architecture])
    able = [i for i in IMPLEMENTATIONS if i.why_not(problem) in (None, triton.missing())]
    chosen = next(i.name for i in able if not i.opt_in)
    how = ["XLA" if chosen == "portable" else chosen]
    if architecture not in RUN_ON:  # there "run" would be said of what only a name chooses, too
        how += [f"{i.name} by name" for i in able if i.opt_in]
    return Support(_status(architecture), ", ".join(how))


def quantising(architecture: str) -> Support:
    """What quantises on an architecture; with all extras installed."""
    capability = _capability(ARCHITECTURES[architecture])
    how = "XLA"
    if capability is not None:
        triton_why = _quantise_in_triton(capability)
        if kernel_obstacle(capability) is None:
            how = "mosaic_sm90"
        elif triton_why is None or triton_why == triton.missing():
            how = "triton"
    return Support(_status(architecture), how)


def _capability(caps: DeviceCaps) -> float | None:
    return None if caps.compute_capability is None else float("{}.{}".format(*caps.compute_capability))


def _quantise_in_triton(capability: float) -> str | None:
    hidden = _LAYER.hidden_size
    return triton_obstacle((_ROWS, hidden), FORMATS["mxfp8"], hidden, capability)


def kernel_reasons(caps: DeviceCaps) -> dict[str, str | None]:
    """Every group of kernels: why it does not run on these devices, or None where it does."""
    capability = _capability(caps)
    if not caps.kernels:
        return {"all kernels": caps.kernels_reason}
    if capability is None:
        return {"all kernels": "there is no GPU"}
    problem = _problem(None, None, caps)
    reasons: dict[str, str | None] = {"quantise and dequantise": kernel_obstacle(capability)}
    if reasons["quantise and dequantise"]:
        reasons["quantise, triton"] = _quantise_in_triton(capability)
    for one in IMPLEMENTATIONS:
        if one.name != "portable":
            why = one.why_not(problem)
            named = f"only where implementation={one.name!r} asks for it: {one.opt_in}"
            reasons[f"grouped matmul, {one.name}"] = why or (named if one.opt_in else None)
    fp8 = _problem("fp8_128", "fp8_128x128", caps)
    why = mosaic_entry.why_not_gated_quantize(fp8, Gate(), FORMATS["fp8_128"], bias=False)
    reasons["FP8 gate and up that are quantised in the matmul"] = why
    why = environment_obstacle(capability)
    named = "only where implementation='mosaic_sm90' asks for it: not confirmed on a GPU since its last change"
    for names, reason in (
        ([n for n in ROW_KERNELS if n in CONFIRMED], why),
        ([n for n in ROW_KERNELS if n not in CONFIRMED], why or named),
    ):
        if names:
            reasons[f"{', '.join(names)} rows"] = reason
    few = {"experts", "routed_experts"} <= CONFIRMED
    reasons["experts of a few tokens"] = why if few else (why or named)
    alone = "there is one GPU: nothing has to be exchanged" if caps.num_devices < 2 else None
    reasons["exchange by remote writes"] = alone or engine_reason(caps)
    return reasons


def backends() -> tuple[str, ...]:
    """The backends' names, in the order of the policy's table."""
    return tuple(BACKENDS)
