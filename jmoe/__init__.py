"""Expert-parallel Mixture-of-Experts for JAX on NVIDIA GPUs.

The names are loaded when they are first used, so that `jmoe doctor` starts where JAX itself cannot be imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import MoEConfig as MoEConfig
    from .config import QuantConfig as QuantConfig
    from .config import RouterConfig as RouterConfig
    from .experts import ExpertWeights as ExpertWeights
    from .layer import MoELayer as MoELayer
    from .layer import build_moe as build_moe
    from .layer import moe as moe
    from .layer import moe_local as moe_local
    from .layer import moe_local_with_stats as moe_local_with_stats
    from .layer import moe_with_stats as moe_with_stats
    from .layer import quantize_params as quantize_params
    from .params import MoEParams as MoEParams
    from .params import init_params as init_params
    from .placement import Placement as Placement
    from .placement import even_placement as even_placement
    from .policy import Decision as Decision
    from .policy import decide as decide
    from .router import MoEStats as MoEStats

__version__ = "0.1.0"

# Public name -> the module that has it; a test compares this with the imports above.
_MODULES = {
    "MoEConfig": "config",
    "QuantConfig": "config",
    "RouterConfig": "config",
    "ExpertWeights": "experts",
    "MoELayer": "layer",
    "build_moe": "layer",
    "moe": "layer",
    "moe_local": "layer",
    "moe_local_with_stats": "layer",
    "moe_with_stats": "layer",
    "quantize_params": "layer",
    "MoEParams": "params",
    "init_params": "params",
    "Placement": "placement",
    "even_placement": "placement",
    "Decision": "policy",
    "decide": "policy",
    "MoEStats": "router",
}

__all__ = [*_MODULES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jmoe' has no attribute {name!r}; it has {', '.join(_MODULES)}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
