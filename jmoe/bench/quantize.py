"""`jmoe bench quantize`: block quantisation and its inverse against the copy bandwidth of the same run, with peers.

T rows, D columns of bfloat16. Bytes that count: the input once, data and scales once. One jitted call goes over many
input sets that together exceed the L2 cache, in rounds where they take less than a millisecond, and keeps every result,
so that nothing is cached, merged or dropped; several such calls are in flight, so that Python does not count. Programs
are timed in turns. Few rows are timed in a chain inside one jit, where each call waits for the one before (one small
kernel more for each call). Tensor-wide scales are given, as in serving.

Short kernels do not reach the bandwidth of a large copy, and no pass over as many bytes does: beside the share of the
large copy each record has that of an elementwise pass over the same array, timed in the same way.
The profiler's kernel times, without the microseconds between kernels, stand beside both.
Everything is compiled at once, in threads; the torch peers run in a process of their own meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmoe import formats
from jmoe.formats import FORMATS, QTensor, dequantize, quantize

from .common import (
    NoProgress,
    Progress,
    Record,
    chain,
    copy_bandwidth,
    jit_donating,
    num_sets,
    relative_error,
    time_chain,
)
from .plot import bars
from .profile import busy_seconds
from .quantize_peers import TorchPeers, plain_xla, plain_xla_inverse

SHAPES = ((16384, 7168), (8192, 4096), (128, 7168))
QUANTISED = ("mxfp8", "mxfp4", "fp8_128", "fp8_128_ue8m0", "nvfp4", "nvfp4_token", "nvfp4_4o6", "nvfp4_token_4o6")
DEQUANTISED = ("mxfp8", "mxfp4", "fp8_128", "nvfp4", "nvfp4_token")
FEW_ROWS, FEW_CALLS = 256, 1600
SECONDS, TURNS = 15e-3, 5  # of calls that are timed together, each time that it is a program's turn
BYTES = 3.6e9  # of inputs in a call's rounds: making the results of a call takes Python up to half a millisecond
OURS, PLAIN = "jmoe", "plain XLA"
SMOKE_SHAPES, SMOKE_FORMATS = ((16, 256),), ("mxfp8", "fp8_128", "nvfp4_token")


class Program:
    """f, compiled for a list of input sets; f(one set) is what is timed. What goes wrong is raised by `seconds`."""

    def __init__(self, f: Callable[[Any], Any], sets: list[Any], *, smoke: bool):
        """sets: arrays, or their shapes where only those are known yet."""
        self.f, self.smoke = f, smoke
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(sets))
        self.rounds = 1 if smoke else max(1, int(BYTES / size))
        self.few = sets[0].shape[0] <= FEW_ROWS and not smoke
        self.calls = -(-FEW_CALLS // len(sets)) * len(sets)
        self.error: Exception | None = None
        try:
            self.lowered = self._lower(sets)
        except Exception as e:
            self.error = e

    def _lower(self, sets: list[Any]):
        once = jax.jit(self.f)  # traced and lowered once for all sets
        if self.few:
            chained = jit_donating(chain(once, calls=self.calls))
            return chained.lower(tuple(sets), tuple((None,) for _ in sets))
        return jax.jit(functools.partial(in_rounds, once, self.rounds)).lower(sets)

    def compile(self) -> None:
        """Compiles, in a thread for instance."""
        if self.error is None:
            try:
                self.run = self.lowered.compile()
            except Exception as e:
                self.error = e

    def start(self, sets: list[Any]) -> list[Any]:
        """The results of all sets (none for few rows); makes ready for `sample`."""
        if self.error is not None:
            raise self.error
        if self.few:
            return []
        jax.block_until_ready(self.run(sets))
        start = time.perf_counter()
        out = jax.block_until_ready(self.run(sets))
        self.calls = 1 if self.smoke else math.ceil(SECONDS / (time.perf_counter() - start))
        return out

    def sample(self, sets: list[Any]) -> float:
        """Seconds of f(one set)."""
        if self.few:
            return time_chain(self.f, [(s,) for s in sets], calls=self.calls, repeats=2, wrap=lambda _: self.run).median
        start = time.perf_counter()
        for _ in range(self.calls):
            out = self.run(sets)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / (self.calls * self.rounds * len(sets))


def in_turns(programs: list[Program], operands: list[list[Any]], turns: int) -> list[float]:
    """Median seconds of each program, which has been started."""
    times = [[p.sample(sets) for p, sets in zip(programs, operands, strict=True)] for _ in range(turns)]
    return [statistics.median(one) for one in zip(*times, strict=True)]


def in_rounds(once: Callable[[Any], Any], rounds: int, sets: list[Any]) -> list[Any]:
    """once(set) of all sets, `rounds` times, of which the last counts.

    The barrier makes the sets of a round depend on its number, so that XLA for GPUs leaves the round in the loop.
    """
    if rounds == 1:
        return [once(s) for s in sets]

    def again(i: jax.Array, _: list[Any]) -> list[Any]:
        later, _ = lax.optimization_barrier((sets, i))
        return [once(s) for s in later]

    results = jax.tree.map(
        lambda like: jnp.empty(like.shape, like.dtype), jax.eval_shape(lambda: again(jnp.int32(0), []))
    )
    return lax.fori_loop(0, rounds, again, results)


def elementwise(words: jax.Array) -> jax.Array:
    """A pass that reads and writes every byte once. (Of 32-bit words: XLA is a quarter slower with 16 bits.)"""
    return words ^ jnp.uint32(1)


def moved_bytes(name: str, rows: int, columns: int) -> int:
    """Bytes that quantising or dequantising bfloat16 has to move."""
    return rows * (2 * columns + formats.row_bytes(name, columns))


def inputs(rows: int, columns: int, *, smoke: bool) -> list[jax.Array]:
    """bfloat16 N(0,1) input sets, many where one takes only microseconds."""
    count = 2 if smoke else max(num_sets(2 * rows * columns), 8 if rows * columns > 2**26 else 16)
    make = jax.jit(lambda key: jax.random.normal(key, (rows, columns), jnp.float32).astype(jnp.bfloat16))
    return [make(jax.random.key(i)) for i in range(count)]


def given_scale(name: str) -> jax.Array | None:
    """A tensor-wide decode scale that fits N(0,1) data; None where the format has none."""
    fmt = FORMATS[name]
    return jnp.float32(5.5 / (6 * fmt.e4m3_max)) if fmt.global_scale == "tensor" else None


def without_scale(x: jax.Array, name: str) -> QTensor:
    """`quantize` without the tensor-wide scale that it was given: a program copies a constant into each of its results,
    which would be a small copy more for each call."""
    g = given_scale(name)
    q = quantize(x, name, global_scale=g)
    return q if g is None else dataclasses.replace(q, global_scale=None)


def with_scale(q: QTensor, name: str) -> QTensor:
    """q of `without_scale` as `quantize` gives it."""
    g = given_scale(name)
    return q if g is None else dataclasses.replace(q, global_scale=g)


def differing_bytes(a: QTensor, b: QTensor) -> int:
    """Bytes of data and block scales in which two quantised arrays differ."""
    pairs = ((a.data, b.data), (a.block_scale, b.block_scale))
    return sum(int((np.asarray(x).view(np.uint8) != np.asarray(y).view(np.uint8)).sum()) for x, y in pairs)


def run(smoke: bool, progress: Progress | None = None) -> list[Record]:
    """All figures. smoke: tiny shapes, correctness only."""
    progress = progress or NoProgress()
    shapes = SMOKE_SHAPES if smoke else SHAPES
    torch = TorchPeers([] if smoke or jax.default_backend() != "gpu" else [s for s in shapes if s[0] > FEW_ROWS])
    sets = {shape: inputs(*shape, smoke=smoke) for shape in shapes}
    words = {shape: [_as_words(x) for x in xs] for shape, xs in sets.items()}
    programs = {key: Program(*about, smoke=smoke) for key, about in _plan(sets, words, smoke).items()}
    progress.start(len(programs))
    with concurrent.futures.ThreadPoolExecutor(max(2, (os.cpu_count() or 2) - 4)) as pool:
        checks = [pool.submit(_check, key[1], key[2][1]) for key in programs if key[0] == "quantise" and key[3] == OURS]
        for _ in pool.map(Program.compile, programs.values()):
            progress.step("compiling")
        for check in checks:
            check.result()
    torch.wait()
    progress.start(len(programs))
    copy, records, passes = copy_bandwidth(), [], {}
    kernels: dict[tuple, float] = {}
    quantised: dict[tuple[str, tuple[int, int]], list[QTensor]] = {}
    taken: dict[tuple, float] = {}
    for shape in shapes:
        about = {key: program for key, program in programs.items() if key[2] == shape}
        operands: dict[tuple, list[Any]] = {key: sets[shape] for key in about}
        operands["elementwise", "", shape, "XLA"] = words[shape]
        for key, program in about.items():
            kind, name, _, how = key
            if kind == "dequantise":
                operands[key] = quantised[name, shape]
            if how != PLAIN:
                progress.step(f"{kind} {name} {shape[0]}x{shape[1]}")
                out = program.start(operands[key])
                if kind == "quantise" and name in DEQUANTISED:
                    quantised[name, shape] = [with_scale(q, name) for q in out]
        ours = [key for key in about if key[3] != PLAIN]
        turns = 1 if smoke else TURNS
        times = in_turns([programs[key] for key in ours], [operands[key] for key in ours], turns)
        taken |= zip(ours, times, strict=True)
        alone = [key for key in ours if not programs[key].few]
        runs = [functools.partial(programs[key].run, operands[key]) for key in alone]
        for key, seconds in zip(alone, busy_seconds(runs) or [], strict=False):
            kernels[key] = seconds / (programs[key].rounds * len(sets[shape]))
        passes[shape] = 4 * shape[0] * shape[1] / taken["elementwise", "", shape, "XLA"] / 1e9
        for key, program in about.items():
            if key[3] == PLAIN:
                records.append(
                    _against_peers(key, program, operands[key], taken, torch, (copy, passes, kernels), smoke)
                )
                progress.step(f"{records[-1].name} {records[-1].case}, peers")
                progress.record(records[-1])
    return records


def _against_peers(key, program: Program, own, taken, torch: TorchPeers, ceilings, smoke: bool) -> Record:
    """The record of a format and shape, whose peers are timed or looked up here."""
    kind, name, shape, _ = key
    copy, passes, kernels = ceilings
    peers, failed = {}, {}
    try:
        program.start(own)
        (peers[PLAIN],) = in_turns([program], [own], 1 if smoke else TURNS)
    except Exception as e:  # of the peer: the others' figures are still worth having
        failed[PLAIN] = f"{type(e).__name__}: {str(e)[:200]}"
    if kind == "quantise" and not program.few:
        peers |= torch.seconds.get((name, *shape), {})
        failed |= torch.reasons
    more = _kernel_time(kernels, kind, name, shape, max(passes, key=lambda s: s[0] * s[1]))
    more["peers_that_failed"] = failed
    return _record(kind, name, shape, taken[kind, name, shape, OURS], peers, copy, passes, smoke, more)


@jax.jit
def _as_words(x: jax.Array) -> jax.Array:
    """The bytes of bfloat16 x [T, D] as uint32 [T, D/2]."""
    return jax.lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 2), jnp.uint32)


def _plan(sets: dict, words: dict, smoke: bool) -> dict[tuple, tuple[Callable[[Any], Any], list[Any]]]:
    """What is timed, in order: (kind, format, shape, whose) -> function and its input sets."""
    plan: dict[tuple, tuple[Callable[[Any], Any], list[Any]]] = {}
    for shape, xs in sets.items():
        plan["elementwise", "", shape, "XLA"] = elementwise, words[shape]
        for name in SMOKE_FORMATS if smoke else QUANTISED:
            plan["quantise", name, shape, OURS] = functools.partial(without_scale, name=name), xs
            plan["quantise", name, shape, PLAIN] = functools.partial(plain_xla, name=name), xs
            if shape[0] > FEW_ROWS and name in DEQUANTISED or smoke and name == SMOKE_FORMATS[0]:
                like = [jax.eval_shape(lambda x, name=name: with_scale(without_scale(x, name), name), xs[0])] * len(xs)
                plan["dequantise", name, shape, OURS] = dequantize, like
                plan["dequantise", name, shape, PLAIN] = plain_xla_inverse, like
    return plan


@functools.lru_cache(maxsize=64)
def _check(name: str, columns: int) -> tuple[float, int]:
    """Relative error of 64 rows that are quantised and back, and bytes that are not the reference's."""
    g = given_scale(name)
    sample = inputs(64, columns, smoke=True)[0]
    q = jax.jit(lambda x: quantize(x, name, global_scale=g))(sample)
    reference = jax.jit(lambda x: quantize(x, name, global_scale=g, implementation="reference"))(sample)
    error = relative_error(jax.jit(functools.partial(dequantize, dtype=jnp.float32))(q), sample)
    return error, differing_bytes(q, reference)


def _record(kind, name, shape, seconds, peers, copy, passes, smoke: bool, more: dict[str, Any]) -> Record:
    rows, columns = shape
    moved = moved_bytes(name, rows, columns)
    best = min(peers, key=peers.get, default="")
    rates = {peer: moved / s / 1e9 for peer, s in peers.items()}
    error, wrong = _check(name, columns)
    return Record(
        name=f"{kind} {name}",
        case=f"{rows}x{columns} bfloat16",
        value=moved / seconds / 1e9,
        unit="GB/s",
        seconds=seconds,
        ceiling=copy,
        ceiling_name="copy bandwidth of this run",
        peer=rates.get(best),
        peer_name=best,
        error=error,
        error_name="relative error",
        meaningful=not smoke,
        parameters={
            "T": rows,
            "D": columns,
            "format": name,
            "differing_bytes": wrong,
            "peers": rates,
            "elementwise_pass": passes[shape],
            "share_of_elementwise_pass": moved / seconds / 1e9 / passes[shape],
            **more,
        },
    )


def _kernel_time(kernels, kind, name, shape, largest) -> dict[str, Any]:
    """Seconds of the kernel alone, and its bandwidth as a share of that of the largest elementwise pass's kernel."""
    ours, passed = kernels.get((kind, name, shape, OURS)), kernels.get(("elementwise", "", largest, "XLA"))
    if not ours or not passed:
        return {}
    share = moved_bytes(name, *shape) / ours / (4 * largest[0] * largest[1] / passed)
    return {"kernel_seconds": ours, "kernel_share_of_elementwise_pass": share}


def plot(records: list[Record], path: str | Path) -> None:
    """Bars of the bandwidths with the peers and the copy bandwidth."""
    bars(records, path, title="block quantisation")
