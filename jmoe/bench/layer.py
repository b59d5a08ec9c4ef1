"""`jmoe bench layer`: the whole MoE layer, from tokens to tokens, beside stock JAX and eager PyTorch.

T tokens on one rank, D hidden size, F expert width, E experts, K experts per token, R ranks.

On one GPU the layer runs with BF16, FP8-128, MXFP8 and NVFP4 weights; on several, expert-parallel over all of them with
the same tokens on each, with every format on the wire. A figure is the median of chains of calls inside one jit. The
ceiling is what two matmuls over sorted rows could do at the rates that were measured in the same run
(`layer_case.roofline_seconds`). `parameters` has what `jmoe explain` predicted, and for some the number of kernels of a
call and the sum of their own times, those of the dependence between calls included.

A run goes in stages, the most telling first, because it may be cut short. In each the layers are lowered (one after
another, 2 s for one with many rows), compiled in parallel, and timed when all that is done. PyTorch is timed in a
process of its own while the first stage is lowered.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jmoe.config import MoEConfig, QuantConfig
from jmoe.params import MoEParams

from . import layer_peers
from .common import Attempts, NoProgress, Progress, Record, wanted
from .layer_case import AXIS, FP8, Case, Ceilings, Variant, case_name, ceilings, quantised, random_params, record
from .plot import lines

SHAPES = {
    "qwen3-30b-a3b": MoEConfig(2048, 768, 128, 8),
    "half deepseek-v3": MoEConfig(7168, 2048, 64, 8),
}
STAGES = (  # (shape, tokens), the most telling first
    ("qwen3-30b-a3b", (8192, 64, 1)),
    ("half deepseek-v3", (8192, 64)),
    ("qwen3-30b-a3b", (2048, 512, 32768)),
)
PEERS = ("torch eager", "stock JAX")
STOCK_BYTES = 50e9  # of temporaries, from which stock JAX is left out
SMOKE_SHAPES = {"tiny": MoEConfig(128, 128, 8, 2)}
SMOKE_STAGES = (("tiny", (1, 24)),)
VARIANTS = (
    Variant("BF16", QuantConfig(), (1, 64, 8192, 32768)),
    Variant("FP8-128", FP8, (64, 8192)),
    Variant("NVFP4 weights", QuantConfig(weights="nvfp4"), (1, 64)),
    Variant("MXFP8 weights", QuantConfig(weights="mxfp8"), (1, 64)),
    Variant("MXFP4 weights", QuantConfig(weights="mxfp4"), (1, 64)),
)
EACH = (1, 64, 512, 2048, 8192)
WIRES = (
    Variant("EP, BF16 wire", QuantConfig(wire="bfloat16"), EACH),
    Variant("EP, MXFP8 wire", QuantConfig(wire="mxfp8"), EACH),
    Variant("EP, NVFP4 wire", QuantConfig(wire="nvfp4_token"), EACH),
    Variant("EP, FP8-128 wire", QuantConfig(wire="fp8_128"), EACH),
)


def run(smoke: bool, progress: Progress | None = None, *, only: re.Pattern[str] | None = None) -> list[Record]:
    """Every stage's numbers of tokens and formats, and the peers; those that `wanted(only, ...)` names.

    Raises RuntimeError at the end if a layer failed; `progress` has been told the figures of the others by then.
    """
    progress, attempt = progress or NoProgress(), Attempts()
    shapes, stages = (SMOKE_SHAPES, SMOKE_STAGES) if smoke else (SHAPES, STAGES)
    mesh = Mesh(np.array(jax.devices()), (AXIS,)) if len(jax.devices()) > 1 else None
    progress.start(1 + 2 * len(stages))
    progress.step("ceilings")
    limits = ceilings(smoke)
    eager = layer_peers.start_torch({} if smoke else _of_torch(only))
    records: list[Record] = []
    of_torch: dict[str, dict[int, float]] = {}
    for i, (shape, tokens) in enumerate(stages):
        progress.step(f"{shape}, {tokens} tokens: lowering and compiling")
        stage = Stage(shape, shapes[shape], tokens, limits, smoke, only)
        programs = stage.programs(mesh, eager, attempt)
        if i == 0:
            of_torch = attempt(PEERS[0], eager.result) or {}
        progress.step(f"{shape}, {tokens} tokens: {len(programs.layers)} layers")
        for one in stage.measure(programs, of_torch.get(shape, {}), attempt):
            records.append(one)
            progress.record(one)
        if shape not in [s for s, _ in stages[i + 1 :]]:
            for one in compared([r for r in records if r.parameters["shape"] == shape]):
                records.append(one)
                progress.record(one)
    attempt.check()
    return records


def _of_torch(only: re.Pattern[str] | None) -> dict[str, tuple[MoEConfig, tuple[int, ...]]]:
    """Shape -> its configuration and the numbers of tokens for which PyTorch is timed."""
    found = {}
    for shape, config in SHAPES.items():
        each = (t for s, tokens in STAGES if s == shape for t in tokens if t in VARIANTS[0].tokens)
        found[shape] = config, tuple(t for t in each if wanted(only, PEERS[0], case_name(shape, t, 1)))
    return {shape: (config, tokens) for shape, (config, tokens) in found.items() if tokens}


@dataclasses.dataclass(frozen=True)
class Programs:
    """What is timed, compiled: the layers in order, and stock JAX's."""

    layers: list[Case]
    stock: list[layer_peers.Stock]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A shape with some numbers of tokens on each rank."""

    shape: str
    config: MoEConfig
    tokens: tuple[int, ...]
    limits: Ceilings
    smoke: bool
    only: re.Pattern[str] | None

    def _wanted(self, mesh: Mesh | None) -> list[tuple[int, Variant, Mesh | None]]:
        found = []
        for tokens in self.tokens:
            for variants, where in ((VARIANTS, None), (WIRES if mesh is not None else (), mesh)):
                case = case_name(self.shape, tokens, 1 if where is None else where.size)
                for variant in variants:
                    if (self.smoke or tokens in variant.tokens) and wanted(self.only, variant.name, case):
                        found.append((tokens, variant, where))
        return found

    def programs(self, mesh: Mesh | None, eager: concurrent.futures.Future[Any], attempt: Attempts) -> Programs:
        """Lowered, and then compiled in parallel: not before `eager` is done, because XLA tunes on the GPU."""
        made: list[tuple[str, Any]] = []
        for t, variant, where in self._wanted(mesh):
            what = f"{variant.name} {case_name(self.shape, t, 1 if where is None else where.size)}"
            how: Any = dict(mesh=where, smoke=self.smoke)
            lower = functools.partial(Case.make, self.shape, self.config, t, variant, self.limits, **how)
            made += [(what, case)] if (case := attempt(what, lower)) is not None else []
        plain = []
        for t in self.tokens:
            case = case_name(self.shape, t, 1)
            asked = (self.smoke or t in VARIANTS[0].tokens) and wanted(self.only, PEERS[1], case)
            if asked and layer_peers.stock_bytes(self.config, t) < STOCK_BYTES:
                stock = layer_peers.Stock.make(self.config, t, calls=2 if t > 1024 else 20)
                plain.append((f"{PEERS[1]} {case}", stock))
        concurrent.futures.wait([eager])
        with concurrent.futures.ThreadPoolExecutor() as pool:
            jobs = [(what, pool.submit(program.compile)) for what, program in [*made, *plain]]
            for what, job in jobs:
                attempt(what, job.result)
        return Programs([c for _, c in made if c.compiled], [p for _, p in plain if p.compiled])

    def measure(self, programs: Programs, eager: dict[int, float], attempt: Attempts) -> Iterator[Record]:
        """The layers' records, then those of the peers. eager: PyTorch's seconds by tokens."""
        exact = random_params(jax.random.key(0), self.config)
        stock = self._stock_seconds(programs.stock, exact, attempt)
        eager = {t: seconds for t, seconds in eager.items() if t in self.tokens}
        peers = dict(zip(PEERS, (eager, stock), strict=True))
        held: dict[tuple, MoEParams] = {}
        for case in programs.layers:
            key = (case.config.quant.weights, case.ranks)
            if key not in held:
                held[key] = case.placed(quantised(exact, case.config.quant))
            beside = {n: ts[case.tokens] for n, ts in peers.items() if case.tokens in ts and case.ranks == 1}
            measure = functools.partial(case.measure, held[key], exact, self.limits, smoke=self.smoke, peers=beside)
            one = attempt(f"{case.variant.name} {case_name(self.shape, case.tokens, case.ranks)}", measure)
            if one is not None:
                yield one
        for name, times in peers.items():
            for t, seconds in times.items():
                yield record(self.shape, self.config, t, name, seconds, 1, 0.0, smoke=self.smoke)

    def _stock_seconds(
        self, programs: list[layer_peers.Stock], exact: MoEParams, attempt: Attempts
    ) -> dict[int, float]:
        """By tokens."""
        weights = layer_peers.stock_weights(exact) if programs else ()
        times = {}
        for p in programs:
            repeats = 1 if self.smoke or p.tokens > 1024 else 3
            what = f"{PEERS[1]} {case_name(self.shape, p.tokens, 1)}"
            seconds = attempt(what, functools.partial(p.seconds, weights, repeats))
            times |= {} if seconds is None else {p.tokens: seconds}
        return times


def compared(records: Sequence[Record]) -> list[Record]:
    """How many times as fast as in BF16 the layer is with quantised weights, and on several GPUs with quantised wires.

    records: of one shape. In "x", one record for each figure that has one in BF16 beside it. In "tokens", one for each
    wire: the least number of tokens on a rank from which on it is faster wherever both were measured, None if it is not
    so with the most.
    """
    out = []
    for variants, several in ((VARIANTS, False), (WIRES, True)):
        plain, *quantised_ones = (v.name for v in variants)
        figures = {(r.name, r.parameters["T"]): r for r in records if (r.parameters["R"] > 1) == several}
        for name in quantised_ones:
            times = {}
            for t in sorted(t for n, t in figures if n == name and (plain, t) in figures):
                mine, base = figures[name, t], figures[plain, t]
                assert mine.seconds and base.seconds
                times[t] = base.seconds / mine.seconds
                how: Any = dict(
                    meaningful=mine.meaningful,
                    parameters={k: mine.parameters[k] for k in ("shape", "D", "F", "E", "K", "R")},
                )
                out.append(Record(f"{name} against BF16", mine.case, times[t], "x", **how))
            if times and several:
                slower = max((t for t, x in times.items() if x <= 1), default=0)
                case = f"{mine.parameters['shape']} R={mine.parameters['R']}"
                first = min((t for t in times if t > slower), default=None)
                out.append(Record(f"{name} faster from", case, first, "tokens", lower_is_better=True, **how))
    return out


def plot(records: list[Record], path: str | Path) -> None:
    """Tokens per second over tokens; peers are lines of their own."""
    records = [r for r in records if r.unit == "tokens/s"]
    shape = records[0].parameters["shape"] if records else ""
    mine = [dataclasses.replace(r, peer=None, ceiling=None) for r in records if r.parameters.get("shape") == shape]
    lines(mine, path, x="T", x_label="tokens on one rank", title=f"the MoE layer, {shape}", log_y=True)
