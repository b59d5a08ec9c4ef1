"""As `low_latency`, with ranks that may come and go: a mask, passed as data, says which ranks take part.

Tokens are re-routed to replicas on live ranks by `jmoe.placement.to_physical(rank_mask=...)`; the plan sends nothing to
a masked rank, counts what that lost, and rows that a masked rank sent are not looked at. A new mask does not retrace.
"""

from __future__ import annotations

from .low_latency import LowLatency


class NixlEP(LowLatency):
    """`LowLatency` with a rank mask: bool [R], True for the ranks that take part. See the module."""

    name = "nixl_ep"
    aliases = ("elastic",)
    takes_rank_mask = True
