"""`jmoe bench layer`: the whole MoE layer, from tokens to tokens, beside stock JAX and eager PyTorch.

T tokens on one rank, D hidden size, F expert width, E experts, K experts per token, R ranks.

On one GPU the layer runs with BF16, FP8-128, MXFP8 and NVFP4 weights; on several, expert-parallel over all of them with
the same tokens on each, with every format on the wire. A figure is the median of chains of calls inside one jit. The
ceiling is what two matmuls over sorted rows could do at the rates that were measured in the same run
(`layer_case.roofline_seconds`). `parameters` has what `jmoe explain` predicted, and for some the number of kernels of a
call and the sum of their own times, those of the dependence between calls included.

Layers are lowered first, while PyTorch is timed in a process of its own, then compiled in parallel, and timed when all
that is done: the most telling first, because a run may be cut short.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jmoe.config import MoEConfig, QuantConfig
from jmoe.params import MoEParams

from . import layer_peers
from .common import NoProgress, Progress, Record, time_chain, wanted
from .layer_case import AXIS, Case, Ceilings, Variant, case_name, ceilings, inputs, quantised, random_params, record
from .plot import lines

SHAPES = {
    "qwen3-30b-a3b": MoEConfig(2048, 768, 128, 8),
    "half deepseek-v3": MoEConfig(7168, 2048, 64, 8),
}
TOKENS = {  # of each shape, the most telling first
    "qwen3-30b-a3b": (8192, 64, 1, 2048, 512, 256, 32768),
    "half deepseek-v3": (8192, 64, 1),
}
PEERS = ("torch eager", "stock JAX")
SMOKE_SHAPES = {"tiny": MoEConfig(128, 128, 8, 2)}
SMOKE_TOKENS = (1, 24)
VARIANTS = (
    Variant("BF16", QuantConfig(), (1, 64, 256, 8192, 32768)),
    Variant(
        "FP8-128",
        QuantConfig(activations="fp8_128", weights="fp8_128x128", intermediate="fp8_128"),
        (64, 8192, 32768),
    ),
    Variant("NVFP4 weights", QuantConfig(weights="nvfp4"), (1, 64, 256)),
    Variant("MXFP8 weights", QuantConfig(weights="mxfp8"), (1, 64)),
)
WIRES = (
    Variant("EP, BF16 wire", QuantConfig(wire="bfloat16"), (1, 64, 512, 2048, 8192)),
    Variant("EP, MXFP8 wire", QuantConfig(wire="mxfp8"), (64, 512, 2048, 8192)),
    Variant("EP, NVFP4 wire", QuantConfig(wire="nvfp4_token"), (64, 512, 2048, 8192)),
    Variant("EP, FP8-128 wire", QuantConfig(wire="fp8_128"), (8192,)),
)


def _stock(config: MoEConfig, tokens: int, params: MoEParams, smoke: bool) -> float | None:
    """Seconds of the layer in stock JAX; None where it does not fit into memory."""
    if layer_peers.stock_bytes(config, tokens) > 70e9:
        return None
    weights = layer_peers.stock_weights(params)
    xs = inputs(config, tokens, 2)
    step = functools.partial(layer_peers.stock_layer, top_k=config.num_experts_per_tok)
    calls, repeats = (2, 1) if smoke or tokens > 1024 else (20, 3)
    return time_chain(step, [(x, *weights) for x in xs], calls=calls, repeats=repeats).median


def _cases(
    shape: str, limits: Ceilings, smoke: bool, mesh: Mesh | None, only: re.Pattern[str] | None
) -> Iterator[Case]:
    """The layers of a shape, in the order in which they are to be timed, lowered."""
    config = (SMOKE_SHAPES if smoke else SHAPES)[shape]
    for tokens in _tokens(shape, smoke):
        for variants, where in ((VARIANTS, None), (WIRES if mesh is not None else (), mesh)):
            case = case_name(shape, tokens, 1 if where is None else where.size)
            for variant in variants:
                if (smoke or tokens in variant.tokens) and wanted(only, variant.name, case):
                    yield Case.make(shape, config, tokens, variant, limits, mesh=where, smoke=smoke)


def _tokens(shape: str, smoke: bool) -> tuple[int, ...]:
    return SMOKE_TOKENS if smoke else TOKENS[shape]


def run(smoke: bool, progress: Progress | None = None, *, only: re.Pattern[str] | None = None) -> list[Record]:
    """Every shape, number of tokens and format, then the peers of the shape; those that `wanted(only, ...)` names."""
    progress = progress or NoProgress()
    shapes = SMOKE_SHAPES if smoke else SHAPES
    mesh = Mesh(np.array(jax.devices()), (AXIS,)) if len(jax.devices()) > 1 else None
    progress.start(3 * len(shapes))
    limits = ceilings(smoke)
    records = []
    for shape, config in shapes.items():
        progress.step(f"{shape}: lowering and compiling, and PyTorch")
        peer_tokens = [t for t in _tokens(shape, smoke) if smoke or t in VARIANTS[0].tokens]
        of_torch, of_stock = (
            tuple(t for t in peer_tokens if wanted(only, name, case_name(shape, t, 1))) for name in PEERS
        )
        torch = layer_peers.start_torch(config, of_torch) if of_torch and not smoke else None
        with concurrent.futures.ThreadPoolExecutor() as pool:
            cases, jobs = [], []
            for case in _cases(shape, limits, smoke, mesh, only):
                cases.append(case)
                jobs += [pool.submit(case.compile)] if torch is None else []
            eager = {} if torch is None else torch()
            for job in jobs or [pool.submit(case.compile) for case in cases]:  # not while PyTorch is timed: XLA tunes
                job.result()
        progress.step(f"{shape}: stock JAX")
        exact = random_params(jax.random.key(0), config)
        stock = {t: s for t in of_stock if (s := _stock(config, t, exact, smoke)) is not None}
        peers = dict(zip(PEERS, (eager, stock), strict=True))
        progress.step(f"{shape}: {len(cases)} layers")
        held: dict[tuple, MoEParams] = {}
        for case in cases:
            key = (case.config.quant.weights, case.ranks)
            if key not in held:
                held[key] = case.placed(quantised(exact, case.config.quant))
            beside = {n: ts[case.tokens] for n, ts in peers.items() if case.tokens in ts and case.ranks == 1}
            records.append(case.measure(held[key], exact, limits, smoke=smoke, peers=beside))
            progress.record(records[-1])
        more = [
            record(shape, config, t, name, seconds, 1, 0.0, smoke=smoke)
            for name, times in peers.items()
            for t, seconds in times.items()
        ]
        more += crossovers([r for r in records if r.parameters["shape"] == shape])
        for r in more:
            progress.record(r)
        records += more
        del exact, held, cases
    return records


def crossovers(records: Sequence[Record]) -> list[Record]:
    """From how many tokens on each rank a quantised wire makes the layer faster than a BF16 wire does: one row a wire.

    records: of one shape. value: the least T measured from which on it is faster at every T, None if it is not at the
    largest. parameters: times as fast, by T.
    """
    plain, *quantised_wires = WIRES
    seconds = {(r.name, r.parameters["T"]): r.seconds for r in records if r.parameters["R"] > 1}
    out = []
    for wire in quantised_wires:
        shared = sorted(t for name, t in seconds if name == wire.name and (plain.name, t) in seconds)
        if not shared:
            continue
        times = {t: seconds[plain.name, t] / seconds[wire.name, t] for t in shared}
        first = None
        for t in reversed(shared):
            if times[t] <= 1:
                break
            first = t
        like = next(r for r in records if r.name == wire.name)
        parameters = {k: like.parameters[k] for k in ("shape", "D", "F", "E", "K", "R")}
        out.append(
            Record(
                name=f"{wire.name} faster from",
                case=f"{like.parameters['shape']} R={like.parameters['R']}",
                value=first,
                unit="tokens",
                lower_is_better=True,
                meaningful=like.meaningful,
                parameters={**parameters, "times_as_fast": {str(t): round(s, 3) for t, s in times.items()}},
            )
        )
    return out


def plot(records: list[Record], path: str | Path) -> None:
    """Tokens per second over tokens; peers are lines of their own."""
    records = [r for r in records if r.unit == "tokens/s"]
    shape = records[0].parameters["shape"] if records else ""
    mine = [dataclasses.replace(r, peer=None, ceiling=None) for r in records if r.parameters.get("shape") == shape]
    lines(mine, path, x="T", x_label="tokens on one rank", title=f"the MoE layer, {shape}", log_y=True)
