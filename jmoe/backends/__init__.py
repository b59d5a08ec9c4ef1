"""Ways of moving tokens to their experts and back, behind one interface."""

from __future__ import annotations

from .allgather import AllGatherReduceScatter
from .base import Backend as Backend
from .base import Engine as Engine
from .base import Exchange as Exchange
from .exchange import InFlight as InFlight
from .exchange import Received as Received
from .exchange import combine as combine
from .exchange import dispatch_float as dispatch_float
from .exchange import dispatch_payload as dispatch_payload
from .exchange import exchange_for as exchange_for
from .exchange import finish as finish
from .exchange import in_chunks as in_chunks
from .exchange import shared_global_scale as shared_global_scale
from .exchange import start as start
from .exchange import uniform_global_scale as uniform_global_scale
from .local import Local
from .low_latency import LowLatency
from .nixl import NixlEP
from .one_sided import OneSided
from .ragged import Ragged
from .two_sided import TwoSided

BACKENDS: dict[str, Backend] = {
    b.name: b for b in (Local(), AllGatherReduceScatter(), TwoSided(), OneSided(), Ragged(), LowLatency(), NixlEP())
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
