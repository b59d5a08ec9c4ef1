"""What a whole layer should take on one rank: the router, the rows' way into expert order and back, and the matmuls.

Letters: T tokens on one rank, D hidden size, F expert width, E experts, K experts per token, R ranks, E_loc experts on
one rank. The model is a sum over stages of the larger of operations and bytes, each at a rate that was measured
(`RATES`), so it says what to expect and what would help; tests/test_layer_cost.py holds it against the measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pallas_kernels.grouped_matmul.mosaic_vector import MAX_PAIRS

from ..caps import DeviceCaps
from ..config import MoEConfig
from ..formats import bits_per_value

MEASURED_ON = "H200"


@dataclasses.dataclass(frozen=True)
class Few:
    """A handful of tokens, whose experts' weights are read straight into registers (`jmoe.experts.few`).

    pairs: of a token and an expert, up to how many. fixed: seconds of a call that does nothing, for one token; more: of
    each further one. stream: bytes per second of weights, in any format.
    """

    pairs: int
    fixed: float
    more: float
    stream: float


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of one kind of GPU.

    fixed: seconds of a call that does nothing, all its small kernels together, by the format of the weights: for some
    the activation is a kernel of its own, or scales have to be brought into order. rows: bytes per second, read and
    written, of moving rows (from and to memory; what is read several times comes from the L2 cache). flops: operations
    per second of a grouped matmul with many rows, and stream: bytes per second of weights with few rows, both by the
    format of the weights ("float" for BF16, "fp8" for 1x128 by 128x128 blocks on both sides). waste: rows of each
    expert that are computed for nothing, because tiles have a fixed height.
    """

    fixed: Mapping[str, float]
    rows: float
    flops: Mapping[str, float]
    stream: Mapping[str, float]
    waste: float
    few: Few


@dataclasses.dataclass(frozen=True)
class LayerTime:
    """Predicted seconds of one call on one rank, by stage.

    permute: of moving rows into expert order. sums: of the weighted sums of the experts' outputs, 0 where the exchange
    takes them on its way.
    """

    router: float
    permute: float
    matmuls: float
    sums: float
    exchange: float = 0.0

    @property
    def total(self) -> float:
        return self.router + self.permute + self.matmuls + self.sums + self.exchange


# Fitted to docs/figures/layer.json and layer_2gpus.json. The rate of many rows with quantised
# weights is that of grouped matmuls alone.
H200 = Rates(
    fixed={"float": 20e-6, "fp8": 28e-6, "mxfp8": 28e-6, "nvfp4": 20e-6, "mxfp4": 28e-6},
    rows=3.9e12,
    flops={"float": 600e12, "fp8": 900e12, "quantised": 330e12},
    stream={"float": 4.4e12, "fp8": 3.9e12, "mxfp8": 3.8e12, "nvfp4": 3.1e12, "mxfp4": 3.0e12},
    waste=20.0,
    few=Few(pairs=MAX_PAIRS, fixed=11.2e-6, more=3e-6, stream=4.15e12),
)


def rates_for(caps: DeviceCaps) -> Rates | None:
    """The rates of this kind of machine, None where nothing like it was measured or the kernels cannot run."""
    hopper = caps.compute_capability is not None and caps.compute_capability[0] == 9
    return H200 if hopper and caps.kernels else None


def _kind(config: MoEConfig) -> tuple[str, str]:
    """Keys of `Rates.flops` and `Rates.stream`."""
    weights = config.quant.weights
    if weights is None:
        return "float", "float"
    if weights.startswith("fp8") and (config.quant.activations or "").startswith("fp8"):
        return "fp8", "fp8"
    family = next((f for f in ("nvfp4", "mxfp4", "mxfp8") if weights.startswith(f)), "mxfp8")
    return "quantised", family


def layer_seconds(config: MoEConfig, *, tokens: int, num_ranks: int, caps: DeviceCaps) -> LayerTime | None:
    """Without the exchange. tokens: T. None where nothing like this machine was measured."""
    rates = rates_for(caps)
    if rates is None or tokens == 0:
        return None
    d, f, e, k = config.hidden_size, config.intermediate_size, config.num_experts, config.num_experts_per_tok
    places = tokens * k  # on every rank, for a router without preferences
    local = -(-e // num_ranks)
    active = local * (1 - (1 - k / e) ** (tokens * num_ranks))
    flops, stream = _kind(config)
    bits = bits_per_value(config.quant.weights or config.dtype)
    rows = tokens * num_ranks
    plain = config.quant.activations is None and config.quant.intermediate is None
    if plain and not config.apply_router_weight_on_input and rows * k <= rates.few.pairs:
        read = active * 3 * d * f * bits / 8 / rates.few.stream
        return LayerTime(rates.few.fixed + (rows - 1) * rates.few.more, 0.0, read, 0.0)
    many = places / max(active, 1) > 64
    rows = places + (rates.waste * active if many else 0)
    matmuls = 0.0
    for n, width in ((2 * f, d), (d, f)):
        compute = 2.0 * rows * n * width / rates.flops[flops]
        memory = active * n * width * bits / 8 / rates.stream[stream]
        matmuls += (compute**4 + memory**4) ** 0.25  # whoever takes longer, with a little of the other
    element = 1 if config.quant.activations is not None else 2
    gather = places * d * element + tokens * d * 2
    activation = places * f * 3 * 2 if flops == "quantised" else 0  # elsewhere the matmul of gate and up does it
    sums = places * d * 2 + tokens * d * 2
    router = tokens * (2 * d + 8 * e) / rates.rows
    return LayerTime(rates.fixed[stream] + router, (gather + activation) / rates.rows, matmuls, sums / rates.rows)
