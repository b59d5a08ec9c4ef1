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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jmoe.config import MoEConfig, QuantConfig
from jmoe.params import MoEParams

from . import layer_peers
from .common import NoProgress, Progress, Record, wanted
from .layer_case import AXIS, Case, Ceilings, Variant, case_name, ceilings, quantised, random_params, record
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
STOCK_BYTES = 70e9  # of temporaries, from which stock JAX is left out
SMOKE_SHAPES = {"tiny": MoEConfig(128, 128, 8, 2)}
SMOKE_TOKENS = (1, 24)
VARIANTS = (
    Variant("BF16", QuantConfig(), (1, 64, 256, 8192, 32768)),
    Variant(
        "FP8-128",
        QuantConfig(activations="fp8_128", weights="fp8_128x128", intermediate="fp8_128"),
        (64, 8192, 32768),
    ),
    Variant("NVFP4 weights", QuantConfig(weights="nvfp4"), (1, 64)),
    Variant("MXFP8 weights", QuantConfig(weights="mxfp8"), (64,)),
)
WIRES = (
    Variant("EP, BF16 wire", QuantConfig(wire="bfloat16"), (1, 64, 512, 2048, 8192)),
    Variant("EP, MXFP8 wire", QuantConfig(wire="mxfp8"), (64, 512, 2048, 8192)),
    Variant("EP, NVFP4 wire", QuantConfig(wire="nvfp4_token"), (64, 512, 2048, 8192)),
    Variant("EP, FP8-128 wire", QuantConfig(wire="fp8_128"), (8192,)),
)


class _Attempts:
    """Runs steps of which some may fail, so that those that work give their figures before the failures are raised."""

    def __init__(self):
        self.failed: list[str] = []

    def __call__(self, what: str, step: Callable[[], Any]) -> Any:
        """step(), or None where it fails."""
        try:
            return step()
        except Exception as e:
            self.failed.append(f"{what}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
            return None

    def check(self) -> None:
        if self.failed:
            raise RuntimeError("These layers could not be measured: " + "; ".join(self.failed))


def _wanted(
    shape: str, smoke: bool, mesh: Mesh | None, only: re.Pattern[str] | None
) -> list[tuple[int, Variant, Mesh | None]]:
    """The layers of a shape, in the order in which they are to be timed."""
    found = []
    for tokens in _tokens(shape, smoke):
        for variants, where in ((VARIANTS, None), (WIRES if mesh is not None else (), mesh)):
            case = case_name(shape, tokens, 1 if where is None else where.size)
            for variant in variants:
                if (smoke or tokens in variant.tokens) and wanted(only, variant.name, case):
                    found.append((tokens, variant, where))
    return found


def _tokens(shape: str, smoke: bool) -> tuple[int, ...]:
    return SMOKE_TOKENS if smoke else TOKENS[shape]


def run(smoke: bool, progress: Progress | None = None, *, only: re.Pattern[str] | None = None) -> list[Record]:
    """Every shape, number of tokens and format, then the peers of the shape; those that `wanted(only, ...)` names.

    Raises RuntimeError at the end if a layer failed; `progress` has been told the figures of the others by then.
    """
    progress, attempt = progress or NoProgress(), _Attempts()
    shapes = SMOKE_SHAPES if smoke else SHAPES
    mesh = Mesh(np.array(jax.devices()), (AXIS,)) if len(jax.devices()) > 1 else None
    progress.start(3 * len(shapes))
    limits = ceilings(smoke)
    records: list[Record] = []
    for shape, config in shapes.items():
        progress.step(f"{shape}: lowering and compiling, and PyTorch")
        cases, plain, eager = _programs(shape, config, limits, smoke, mesh, only, attempt)
        progress.step(f"{shape}: stock JAX")
        exact = random_params(jax.random.key(0), config)
        weights = layer_peers.stock_weights(exact) if plain else ()
        stock = {}
        for p in plain:
            what, repeats = f"{PEERS[1]} {case_name(shape, p.tokens, 1)}", 1 if smoke or p.tokens > 1024 else 3
            seconds = attempt(what, functools.partial(p.seconds, weights, repeats))
            stock |= {} if seconds is None else {p.tokens: seconds}
        del weights, plain
        peers = dict(zip(PEERS, (eager, stock), strict=True))
        progress.step(f"{shape}: {len(cases)} layers")
        held: dict[tuple, MoEParams] = {}
        found = []
        for case in cases:
            key = (case.config.quant.weights, case.ranks)
            if key not in held:
                held[key] = case.placed(quantised(exact, case.config.quant))
            beside = {n: ts[case.tokens] for n, ts in peers.items() if case.tokens in ts and case.ranks == 1}
            measure = functools.partial(case.measure, held[key], exact, limits, smoke=smoke, peers=beside)
            one = attempt(f"{case.variant.name} {case_name(shape, case.tokens, case.ranks)}", measure)
            if one is not None:
                found.append(one)
                progress.record(one)
        more = [
            record(shape, config, t, name, seconds, 1, 0.0, smoke=smoke)
            for name, times in peers.items()
            for t, seconds in times.items()
        ]
        more += wires_compared(found)
        for r in more:
            progress.record(r)
        records += found + more
        del exact, held, cases
    attempt.check()
    return records


def _programs(
    shape: str,
    config: MoEConfig,
    limits: Ceilings,
    smoke: bool,
    mesh: Mesh | None,
    only: re.Pattern[str] | None,
    attempt: _Attempts,
) -> tuple[list[Case], list[layer_peers.Stock], dict[int, float]]:
    """A shape's layers in order, stock JAX's, all compiled, and PyTorch's seconds by tokens."""
    tokens = [t for t in _tokens(shape, smoke) if smoke or t in VARIANTS[0].tokens]
    of_torch, of_stock = (tuple(t for t in tokens if wanted(only, n, case_name(shape, t, 1))) for n in PEERS)
    torch = layer_peers.start_torch(config, of_torch) if of_torch and not smoke else None
    with concurrent.futures.ThreadPoolExecutor() as pool:
        made: list[tuple[str, Any]] = []
        jobs = []
        for t, variant, where in _wanted(shape, smoke, mesh, only):
            what = f"{variant.name} {case_name(shape, t, 1 if where is None else where.size)}"
            lower = functools.partial(Case.make, shape, config, t, variant, limits, mesh=where, smoke=smoke)
            made += [(what, case)] if (case := attempt(what, lower)) is not None else []
            if torch is None and case is not None:
                jobs.append(pool.submit(case.compile))
        plain = [
            (f"{PEERS[1]} {case_name(shape, t, 1)}", layer_peers.Stock.make(config, t, calls=2 if t > 1024 else 20))
            for t in of_stock
            if layer_peers.stock_bytes(config, t) < STOCK_BYTES
        ]
        eager = {} if torch is None else torch()
        jobs = jobs or [pool.submit(case.compile) for _, case in made]  # not while PyTorch is timed: XLA tunes
        jobs += [pool.submit(p.compile) for _, p in plain]
        for (what, _), job in zip([*made, *plain], jobs, strict=True):
            attempt(what, job.result)
    return [c for _, c in made if c.compiled], [p for _, p in plain if p.compiled], eager


def wires_compared(records: Sequence[Record]) -> list[Record]:
    """How many times as fast as with a BF16 wire the layer is with each quantised one, and from how many tokens on.

    records: of one shape. Of each wire, one record in "x" for each number of tokens on a rank, and one in "tokens": the
    least from which on it is faster wherever both were measured, None if it is not so with the most.
    """
    plain, *quantised_wires = (wire.name for wire in WIRES)
    figures = {(r.name, r.parameters["T"]): r for r in records if r.parameters["R"] > 1}
    out = []
    for wire in quantised_wires:
        times = {}
        for t in sorted(t for name, t in figures if name == wire and (plain, t) in figures):
            mine, base = figures[wire, t], figures[plain, t]
            assert mine.seconds and base.seconds
            times[t] = base.seconds / mine.seconds
            how: Any = dict(
                meaningful=mine.meaningful,
                parameters={k: mine.parameters[k] for k in ("shape", "D", "F", "E", "K", "R")},
            )
            out.append(Record(f"{wire} against BF16", mine.case, times[t], "x", **how))
        if times:
            slower = max((t for t, x in times.items() if x <= 1), default=0)
            shape, ranks = mine.parameters["shape"], mine.parameters["R"]
            first = min((t for t in times if t > slower), default=None)
            out.append(
                Record(f"{wire} faster from", f"{shape} R={ranks}", first, "tokens", lower_is_better=True, **how)
            )
    return out


def plot(records: list[Record], path: str | Path) -> None:
    """Tokens per second over tokens; peers are lines of their own."""
    records = [r for r in records if r.unit == "tokens/s"]
    shape = records[0].parameters["shape"] if records else ""
    mine = [dataclasses.replace(r, peer=None, ceiling=None) for r in records if r.parameters.get("shape") == shape]
    lines(mine, path, x="T", x_label="tokens on one rank", title=f"the MoE layer, {shape}", log_y=True)
