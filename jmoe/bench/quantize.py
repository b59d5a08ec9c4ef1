"""`jmoe bench quantize`: block quantisation and its inverse against the copy bandwidth of the same run, with peers.

T rows, D columns of bfloat16. Bytes that count: the input once, data and scales once. One jitted call quantises many
input sets that together exceed the L2 cache and returns every result, so that nothing is cached, merged or dropped;
several such calls are in flight, so that Python does not count. Few rows are timed in a chain inside one jit, where
each call waits for the one before (one small kernel more for each call). Tensor-wide scales are given, as in serving.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmoe import formats
from jmoe.formats import FORMATS, QTensor, dequantize, quantize

from . import quantize_peers
from .common import NoProgress, Progress, Record, copy_bandwidth, num_sets, relative_error, time_chain
from .plot import bars

SHAPES = ((16384, 7168), (8192, 4096), (128, 7168))
QUANTISED = ("mxfp8", "mxfp4", "fp8_128", "fp8_128_ue8m0", "nvfp4", "nvfp4_token", "nvfp4_4o6", "nvfp4_token_4o6")
DEQUANTISED = ("mxfp8", "mxfp4", "fp8_128", "nvfp4", "nvfp4_token")
FEW_ROWS = 256
SMOKE_SHAPES, SMOKE_FORMATS = ((16, 256),), ("mxfp8", "fp8_128", "nvfp4_token")


def seconds(f: Callable[[Any], Any], sets: list[Any], *, smoke: bool) -> float:
    """Median seconds of f(one set)."""
    if sets[0].shape[0] <= FEW_ROWS and not smoke:
        return time_chain(f, [(s,) for s in sets]).median
    once = jax.jit(f)  # traced and lowered once for all sets
    run = jax.jit(lambda sets: [once(s) for s in sets])
    jax.block_until_ready(run(sets))
    calls, repeats = (1, 1) if smoke else (8, 5)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            out = run(sets)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / (calls * len(sets)))
    return statistics.median(times)


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


def differing_bytes(a: QTensor, b: QTensor) -> int:
    """Bytes of data and block scales in which two quantised arrays differ."""
    pairs = ((a.data, b.data), (a.block_scale, b.block_scale))
    return sum(int((np.asarray(x).view(np.uint8) != np.asarray(y).view(np.uint8)).sum()) for x, y in pairs)


def run(smoke: bool, progress: Progress | None = None) -> list[Record]:
    """All figures. smoke: tiny shapes, correctness only."""
    progress = progress or NoProgress()
    shapes = SMOKE_SHAPES if smoke else SHAPES
    quantised = SMOKE_FORMATS if smoke else QUANTISED
    dequantised = SMOKE_FORMATS[:1] if smoke else DEQUANTISED
    progress.start(len(shapes) * (len(quantised) + len(dequantised)))
    copy = copy_bandwidth()
    records = []
    for rows, columns in shapes:
        sets = inputs(rows, columns, smoke=smoke)
        record = functools.partial(_record, rows=rows, columns=columns, copy=copy, smoke=smoke)
        for name in quantised:
            progress.step(f"quantise {name} {rows}x{columns}")
            records.append(_quantise(name, sets, record, smoke))
        for name in dequantised if rows > FEW_ROWS or smoke else ():
            progress.step(f"dequantise {name} {rows}x{columns}")
            records.append(_dequantise(name, sets, record, smoke))
        del sets
    return records


def _quantise(name: str, sets, record, smoke: bool) -> Record:
    g = given_scale(name)
    rows, columns = sets[0].shape
    taken = seconds(lambda x: quantize(x, name, global_scale=g), sets, smoke=smoke)
    peers = {"plain XLA": seconds(functools.partial(quantize_peers.plain_xla, name=name), sets, smoke=smoke)}
    if rows > FEW_ROWS and not smoke:
        peers |= quantize_peers.torch_seconds(name, rows, columns)
    error, wrong = _check(name, columns)
    return record(f"quantise {name}", name, taken, peers, error, wrong=wrong)


@functools.lru_cache(maxsize=64)
def _check(name: str, columns: int) -> tuple[float, int]:
    """Relative error of 64 rows that are quantised and back, and bytes that are not the reference's."""
    g = given_scale(name)
    sample = inputs(64, columns, smoke=True)[0]
    q = jax.jit(lambda x: quantize(x, name, global_scale=g))(sample)
    reference = jax.jit(lambda x: quantize(x, name, global_scale=g, implementation="reference"))(sample)
    error = relative_error(jax.jit(functools.partial(dequantize, dtype=jnp.float32))(q), sample)
    return error, differing_bytes(q, reference)


def _dequantise(name: str, sets, record, smoke: bool) -> Record:
    g = given_scale(name)
    make = jax.jit(lambda x: quantize(x, name, global_scale=g))
    quantised = [make(x) for x in sets]
    taken = seconds(dequantize, quantised, smoke=smoke)
    plain = seconds(quantize_peers.plain_xla_inverse, quantised, smoke=smoke)
    error, _ = _check(name, sets[0].shape[1])
    return record(f"dequantise {name}", name, taken, {"plain XLA": plain}, error)


def _record(title, name, taken, peers, error, *, rows, columns, copy, smoke, wrong: int = 0) -> Record:
    moved = moved_bytes(name, rows, columns)
    best = min(peers, key=peers.get)
    rates = {peer: moved / s / 1e9 for peer, s in peers.items()}
    return Record(
        name=title,
        case=f"{rows}x{columns} bfloat16",
        value=moved / taken / 1e9,
        unit="GB/s",
        seconds=taken,
        ceiling=copy,
        ceiling_name="copy bandwidth of this run",
        peer=rates[best],
        peer_name=best,
        error=error,
        error_name="relative error",
        meaningful=not smoke,
        parameters={"T": rows, "D": columns, "format": name, "differing_bytes": wrong, "peers": rates},
    )


def plot(records: list[Record], path: str | Path) -> None:
    """Bars of the bandwidths with the peers and the copy bandwidth."""
    bars(records, path, title="block quantisation")
