"""Expert-parallel Mixture-of-Experts for JAX on NVIDIA GPUs."""

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
