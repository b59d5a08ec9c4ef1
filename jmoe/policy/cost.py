"""What an exchange should take: bytes on the links, and times from measurements on a machine that is named.

Letters: T tokens on one rank, D hidden size, E experts, K experts per token, R ranks, C rows reserved per source rank.
"""

from __future__ import annotations

import math

from pallas_kernels.quantize.formats import FORMATS

from ..caps import DeviceCaps
from ..config import MoEConfig
from ..plan import host_capacity
from .decide import Decision
from .measured import CURVES, Curve
from .measured import MEASURED_ON as MEASURED_ON


def ranks_per_token(config: MoEConfig, num_ranks: int) -> float:
    """Ranks that hold at least one of a token's K experts, on average, for a router without preferences."""
    e, k = config.num_experts, config.num_experts_per_tok
    others = e - e / num_ranks
    missed = math.exp(
        math.lgamma(others + 1) - math.lgamma(others - k + 1) - math.lgamma(e + 1) + math.lgamma(e - k + 1)
    ) if others > k - 1 else 0.0  # fmt: skip
    return num_ranks * (1 - missed)


def remote_rows(
    decision: Decision,
    config: MoEConfig,
    *,
    num_ranks: int,
    tokens: int,
    capacity: int,
    num_hosts: int = 1,
    kernel_inside: bool = False,
    once: bool = False,
) -> float:
    """Rows that leave one rank in a dispatch (and come back in a combine), padding included where it travels.

    capacity: C of this backend, for each pair of source and target (batched: of source and expert). num_hosts: H.
    kernel_inside: whether a kernel, which sends no padding, moves the rows of an exchange in two steps inside a host.
    once: whether a token's row goes once to each rank in the batched form too, and is copied there.
    """
    if once:
        return tokens * ranks_per_token(config, num_ranks) * (num_ranks - 1) / num_ranks
    if decision.transport != "hierarchical":
        return _rows(decision, config, num_ranks, tokens, capacity, share=(num_ranks - 1) / num_ranks)
    across = host_rows(decision, config, num_ranks=num_ranks, tokens=tokens, capacity=capacity, num_hosts=num_hosts)
    inside = (
        tokens * _copies(decision, config, num_ranks)
        if kernel_inside
        else _slots(decision, config, num_ranks, capacity)
    )
    return across + inside * (num_ranks - num_hosts) / num_ranks


def host_rows(
    decision: Decision, config: MoEConfig, *, num_ranks: int, tokens: int, capacity: int, num_hosts: int
) -> float:
    """Those of `remote_rows` that cross from one host to another."""
    if decision.transport == "hierarchical":
        targets = round(_slots(decision, config, num_ranks, 1)) // num_hosts
        return float((num_hosts - 1) * host_capacity(tokens, targets=targets, capacity=capacity))
    return _rows(decision, config, num_ranks, tokens, capacity, share=(num_hosts - 1) / num_hosts)


def _rows(decision: Decision, config: MoEConfig, num_ranks: int, tokens: int, capacity: int, share: float) -> float:
    """Rows of one rank that go to a share of all targets."""
    if decision.backend == "allgather_reducescatter":
        return num_ranks * tokens * share
    if decision.transport == "kernel" or decision.backend == "deepep_high_throughput":
        return tokens * _copies(decision, config, num_ranks) * share
    return _slots(decision, config, num_ranks, capacity) * share


def _copies(decision: Decision, config: MoEConfig, num_ranks: int) -> float:
    """Rows of one token, without padding."""
    return config.num_experts_per_tok if decision.form == "batched" else ranks_per_token(config, num_ranks)


def _slots(decision: Decision, config: MoEConfig, num_ranks: int, capacity: int) -> float:
    """Rows of one rank with padding: C for each target."""
    return num_ranks * capacity * (-(-config.num_experts // num_ranks) if decision.form == "batched" else 1)


def exchange_seconds(decision: Decision, nbytes: float, caps: DeviceCaps, *, back: bool = False) -> float | None:
    """Predicted seconds of moving `nbytes` out of each rank, and quantising them where the kernel that sends does it.

    back: in a combine. None where nothing like this machine was measured.
    """
    if decision.transport == "none":
        return 0.0
    if caps.link != "nvlink" or caps.compute_capability is None or caps.compute_capability[0] != 9:
        return None
    kind = "remote_writes" if decision.transport == "kernel" else "collectives"
    if decision.backend == "deepep_high_throughput" and decision.transport == "xla":
        kind = "ragged"
    if kind == "remote_writes" and back:
        kind = "remote_writes, back"
        if decision.combine_wire in FORMATS:
            if decision.form == "batched":  # by XLA
                return None
            kind = "remote_writes, back, quantised"
    elif kind == "remote_writes" and decision.quantised_wire:
        kind = "remote_writes, quantised"
    return _interpolate(CURVES[kind], nbytes)


def gathering_seconds(moving: float, sums: float) -> float:
    """Of a combine that takes the experts' sums on its way, from the seconds of either alone: they overlap in part.

    The exponent is fitted to `measured.GATHERING`; 1 would be one after the other, infinity the longer of the two.
    """
    return (moving**1.5 + sums**1.5) ** (1 / 1.5)


def _interpolate(curve: Curve, x: float) -> float:
    """Seconds for x bytes: linear between the points in logarithms, constant below them, proportional above."""
    if x <= curve[0][0]:
        return curve[0][1]
    if x >= curve[-1][0]:
        return curve[-1][1] * x / curve[-1][0]
    for (x0, y0), (x1, y1) in zip(curve, curve[1:], strict=False):
        if x <= x1:
            t = math.log(x / x0) / math.log(x1 / x0)
            return math.exp(math.log(y0) + t * math.log(y1 / y0))
    raise AssertionError("the points of a curve ascend")
