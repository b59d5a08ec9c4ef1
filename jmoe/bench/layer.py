"""`jmoe bench layer`: the whole MoE layer, from tokens to tokens, beside stock JAX and eager PyTorch.

T tokens on one rank, D hidden size, F expert width, E experts, K experts per token, R ranks.

On one GPU the layer runs with BF16, FP8-128, MXFP8 and NVFP4 weights; on several, expert-parallel over all of them with
the same tokens on each, with every format on the wire. A figure is the median of chains of calls inside one jit. The
ceiling is what two matmuls over sorted rows could do at the rates that were measured in the same run
(`layer_case.roofline_seconds`). `parameters` has what `jmoe explain` predicted, and for some the number of kernels of a
call and the sum of their own times, those of the dependence between calls included.

Layers are lowered in several processes, while PyTorch is timed in one more. Then some are compiled, in parallel, and
timed when that is done, and then others: the most telling first, because a run may be cut short.
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

from . import layer_peers, lowering
from .common import Attempts, NoProgress, Progress, Record, wanted
from .layer_case import AXIS, FP8, Case, Ceilings, Matmuls, Variant, case_name, quantised, random_params, record
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
    """Every shape, number of tokens and format, and the peers; those that `wanted(only, ...)` names.

    Raises RuntimeError at the end if a layer failed; `progress` has been told the figures of the others by then.
    """
    progress, attempt = progress or NoProgress(), Attempts()
    shapes, stages = (SMOKE_SHAPES, SMOKE_STAGES) if smoke else (SHAPES, STAGES)
    mesh = Mesh(np.array(jax.devices()), (AXIS,)) if len(jax.devices()) > 1 else None
    progress.start(1 + 2 * len(stages))
    eager = layer_peers.start_torch({} if smoke else _of_torch(only))
    plans = [Stage(shape, shapes[shape], tokens, smoke, only) for shape, tokens in stages]
    cases = [plan.cases(mesh, attempt) for plan in plans]
    every = [case for each in cases for case in each]
    why = "they are small" if smoke else lowering.obstacle()
    progress.step(f"lowering {len(every)} layers, {f'in this process: {why}' if why else 'and PyTorch'}")
    exported = {} if why else _exported(every, attempt)
    stock = [plan.stock(attempt) for plan in plans]
    times: dict[str, dict[int, float]] = attempt(PEERS[0], eager.result) or {}  # XLA tunes on the GPU: PyTorch first
    matmuls = Matmuls(smoke)
    limits: Ceilings | None = None
    records: list[Record] = []
    held: dict[Any, MoEParams] = {}
    for plan, layers, plain in zip(plans, cases, stock, strict=True):
        what = f"{plan.shape}, {', '.join(map(str, plan.tokens))} tokens"
        progress.step(f"{what}: compiling {len(layers)} layers")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            jobs = [(f"a matmul of {n}", pool.submit(matmuls.compile, n)) for n in matmuls.dtypes if limits is None]
            jobs += [(p.title, pool.submit(p.compile)) for p in plain]
            for case in layers:
                if attempt(case.title, functools.partial(case.lower, exported.get(case.title))):
                    jobs.append((case.title, pool.submit(case.compile)))
            for title, job in jobs:
                attempt(title, job.result)
        limits = limits or matmuls.measure()
        progress.step(what)
        for one in plan.measure(layers, plain, times.get(plan.shape, {}), limits, held, attempt):
            records.append(one)
            progress.record(one)
    for shape in shapes:
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


def _exported(cases: Sequence[Case], attempt: Attempts) -> dict[str, bytes | None]:
    """Each case's program by its title, lowered in another process; None where that failed."""
    with lowering.processes() as pool:
        jobs = {case.title: pool.submit(_lowered, case.shape, case.tokens, case.variant, case.ranks) for case in cases}
        return {title: attempt(title, job.result) for title, job in jobs.items()}


def _lowered(shape: str, tokens: int, variant: Variant, ranks: int) -> bytes:
    mesh = Mesh(np.array(jax.devices()[:ranks]), (AXIS,)) if ranks > 1 else None
    return Case.make(shape, SHAPES[shape], tokens, variant, mesh=mesh).exported()


@dataclasses.dataclass(frozen=True)
class Stage:
    """A shape with some numbers of tokens on each rank."""

    shape: str
    config: MoEConfig
    tokens: tuple[int, ...]
    smoke: bool
    only: re.Pattern[str] | None

    def cases(self, mesh: Mesh | None, attempt: Attempts) -> list[Case]:
        """The layers that are wanted, in order."""
        found = []
        for tokens in self.tokens:
            for variants, where in ((VARIANTS, None), (WIRES if mesh is not None else (), mesh)):
                case = case_name(self.shape, tokens, 1 if where is None else where.size)
                for variant in variants:
                    if (self.smoke or tokens in variant.tokens) and wanted(self.only, variant.name, case):
                        how: Any = dict(mesh=where, smoke=self.smoke)
                        make = functools.partial(Case.make, self.shape, self.config, tokens, variant, **how)
                        found.append(attempt(f"{variant.name} {case}", make))
        return [case for case in found if case is not None]

    def stock(self, attempt: Attempts) -> list[layer_peers.Stock]:
        """Stock JAX where that is wanted and fits into the memory, lowered."""
        found = []
        for t in self.tokens:
            asked = self.smoke or t in VARIANTS[0].tokens
            if not asked or not wanted(self.only, PEERS[1], case_name(self.shape, t, 1)):
                continue
            if layer_peers.stock_bytes(self.config, t) < STOCK_BYTES:
                calls = 2 if t > 1024 else 20
                make = functools.partial(layer_peers.Stock.make, self.shape, self.config, t, calls=calls)
                found.append(attempt(f"{PEERS[1]} {case_name(self.shape, t, 1)}", make))
        return [p for p in found if p is not None]

    def measure(
        self,
        cases: Sequence[Case],
        plain: Sequence[layer_peers.Stock],
        eager: dict[int, float],
        limits: Ceilings,
        held: dict[Any, MoEParams],
        attempt: Attempts,
    ) -> Iterator[Record]:
        """The layers' records, then those of the peers. eager: PyTorch's seconds by tokens. held: parameters so far."""
        if self.shape not in held:
            held[self.shape] = random_params(jax.random.key(0), self.config)
        exact = held[self.shape]
        eager = {t: seconds for t, seconds in eager.items() if t in self.tokens}
        peers = dict(zip(PEERS, (eager, self._stock_seconds(plain, exact, attempt)), strict=True))
        for case in cases:
            beside = {n: ts[case.tokens] for n, ts in peers.items() if case.tokens in ts and case.ranks == 1}

            def measure(case=case, beside=beside):
                key = (self.shape, case.config.quant.weights, case.ranks)
                if key not in held:
                    held[key] = case.placed(quantised(exact, case.config.quant))
                return case.measure(held[key], exact, limits, smoke=self.smoke, peers=beside)

            one = attempt(case.title, measure) if case.compiled else None
            if one is not None:
                yield one
        for name, times in peers.items():
            for t, seconds in times.items():
                yield record(self.shape, self.config, t, name, seconds, 1, 0.0, smoke=self.smoke)

    def _stock_seconds(
        self, programs: Sequence[layer_peers.Stock], exact: MoEParams, attempt: Attempts
    ) -> dict[int, float]:
        """By tokens."""
        programs = [p for p in programs if p.compiled]
        weights = layer_peers.stock_weights(exact) if programs else ()
        times = {}
        for p in programs:
            repeats = 1 if self.smoke or p.tokens > 1024 else 3
            seconds = attempt(p.title, functools.partial(p.seconds, weights, repeats))
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
