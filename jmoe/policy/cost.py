"""What an exchange should take: bytes on the links, and times from measurements on a machine that is named.

Letters: T tokens on one rank, D hidden size, E experts, K experts per token, R ranks, C rows reserved per source rank.
"""

from __future__ import annotations

import math

from ..caps import DeviceCaps
from ..config import MoEConfig
from ..plan import host_capacity
from .decide import Decision

MEASURED_ON = "2 x H200, NVLink 4"

# (remote bytes in one direction of one rank, seconds): rows of 7168 bfloat16, 128 to 32768 of them.
CURVES: dict[str, tuple[tuple[float, float], ...]] = {
    "remote_writes": ((1.84e6, 20e-6), (14.7e6, 56e-6), (117e6, 350e-6), (470e6, 1312e-6)),
    "collectives": ((1.84e6, 22e-6), (14.7e6, 50e-6), (117e6, 455e-6), (470e6, 1603e-6)),
    "ragged": ((1.84e6, 216e-6), (14.7e6, 2.9e-3), (117e6, 21.7e-3), (470e6, 157e-3)),  # lax.ragged_all_to_all
}


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
) -> float:
    """Rows that leave one rank in a dispatch (and come back in a combine), padding included where it travels.

    capacity: C of this backend, for each pair of source and target (batched: of source and expert). num_hosts: H.
    kernel_inside: whether a kernel, which sends no padding, moves the rows of an exchange in two steps inside a host.
    """
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


def exchange_seconds(decision: Decision, nbytes: float, caps: DeviceCaps) -> float | None:
    """Predicted seconds of moving `nbytes` out of each rank. None where nothing like this machine was measured."""
    if decision.transport == "none":
        return 0.0
    if caps.link != "nvlink" or caps.compute_capability is None or caps.compute_capability[0] != 9:
        return None
    kind = "remote_writes" if decision.transport == "kernel" else "collectives"
    if decision.backend == "deepep_high_throughput" and decision.transport == "xla":
        kind = "ragged"
    return _interpolate(CURVES[kind], nbytes)


def _interpolate(curve: tuple[tuple[float, float], ...], x: float) -> float:
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
