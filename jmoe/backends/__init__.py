"""Ways of moving tokens to their experts and back, behind one interface."""

from __future__ import annotations

from .allgather import AllGatherReduceScatter
from .base import Axis as Axis
from .base import Backend as Backend
from .base import Engine as Engine
from .base import Exchange as Exchange
from .base import exchange_for as exchange_for
from .combine import combine as combine
from .dispatch import InFlight as InFlight
from .dispatch import Received as Received
from .dispatch import dispatch_float as dispatch_float
from .dispatch import dispatch_payload as dispatch_payload
from .dispatch import finish as finish
from .dispatch import in_chunks as in_chunks
from .dispatch import start as start
from .local import Local
from .low_latency import LowLatency
from .nixl import NixlEP
from .one_sided import OneSided
from .ragged import Ragged
from .scales import shared_global_scale as shared_global_scale
from .scales import uniform_global_scale as uniform_global_scale
from .two_sided import TwoSided

BACKENDS: dict[str, Backend] = {
    b.name: b
    for b in (
        Local(),
        AllGatherReduceScatter(),
        TwoSided(),
        OneSided(),
        Ragged(),
        LowLatency(),
        NixlEP(),
    )
}
ALIASES: dict[str, str] = {alias: b.name for b in BACKENDS.values() for alias in b.aliases}


def get_backend(name: str | Backend) -> Backend:
    """The backend called `name`, or by a name that other systems use for it. ValueError lists all names."""
    if isinstance(name, Backend):
        return name
    canonical = ALIASES.get(name, name)
    if canonical not in BACKENDS:
        raise ValueError(
            f"backend={name!r} is not known; choose one of {', '.join(map(repr, BACKENDS))}, or an alias: "
            f"{', '.join(f'{a} ({b})' for a, b in ALIASES.items())}."
        )
    return BACKENDS[canonical]
