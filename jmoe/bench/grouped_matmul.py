"""`jmoe bench grouped-matmul`: grouped matmul against the roofline, stock JAX and CUTLASS.

T rows, K contraction, N columns, E groups. With many rows per group the figure is TFLOP/s; with few it is GB/s of the
bytes of the weights that were touched, as a share of the copy bandwidth measured in the same run. The whole operation
is timed, the schedule of tiles included. torch's CUTLASS kernels are peers where torch is installed: both sides run the
same number of calls back to back, in turns and after the same pause, because a GPU at its power limit slows down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.grouped_matmul import grouped_matmul, tuning
from pallas_kernels.quantize import QTensor, dequantize, quantize, quantize_weights

from .common import (
    NoProgress,
    Progress,
    Record,
    chain,
    copy_bandwidth,
    jit_donating,
    relative_error,
    time_chain,
)

CANDIDATES = {
    "prefill": [
        {**tile, "lead": lead, "prefetch": prefetch}
        for tile in (
            {},
            {"block_n": 192},
            {"cluster": 2, "share": "weights"},
            {"block_m": 256, "block_n": 128},
            {"block_m": 256, "block_n": 128, "cluster": 2},
        )
        for lead, prefetch in ((0, 0), (2, 0), (2, 4))
    ],
    "decode": [
        {"block_t": t, "consumers": c, "chunks": k, "stages": s, "per_sm": p}
        for t in (8, 16, 32, 64)
        for c, k, s, p in (
            *((1, 2, 5, 2), (1, 4, 2, 3), (2, 2, 5, 1), (2, 4, 2, 1), (2, 2, 2, 2), (2, 4, 3, 1)),
            *((4, 1, 5, 1), (4, 2, 2, 1)),
        )
    ],
}
DENSE_TFLOPS = {"bf16": 989.0, "fp8": 1979.0}  # H100 and H200 SXM, datasheet, without sparsity
DECODE_ROWS = 64
PREFILL_CALLS, DECODE_CALLS = 20, 200  # in one chain, and of torch's: 6 to 25 ms
PAUSE = 0.02  # seconds before each chain


@dataclasses.dataclass(frozen=True)
class Shape:
    """active: groups that have rows, None for all. sizes: how the rows spread over them."""

    rows: int
    k: int
    n: int
    groups: int
    active: int | None = None
    sizes: str = "equal"

    @property
    def case(self) -> str:
        spread = "" if self.sizes == "equal" else f" {self.sizes}"
        active = "" if self.active is None else f" ({self.active} active)"
        return f"T={self.rows} K={self.k} N={self.n} E={self.groups}{active}{spread}"

    @property
    def decode(self) -> bool:
        return self.rows <= DECODE_ROWS * (self.active or self.groups)

    def group_sizes(self, rng: np.random.Generator) -> np.ndarray:
        """int32 [E], with the same sum for every draw."""
        active = rng.permutation(self.groups)[: self.active or self.groups]
        sizes = np.zeros(self.groups, np.int32)
        if self.sizes == "zipf":
            p = 1.0 / np.arange(1, len(active) + 1)
            sizes[active] = rng.multinomial(self.rows, p / p.sum())
        elif self.sizes == "half in one":
            sizes[active] = self.rows // 2 // max(len(active) - 1, 1)
            sizes[active[0]] += self.rows - sizes.sum()
        else:
            sizes[active] = self.rows // len(active)
            sizes[active[: self.rows - sizes.sum()]] += 1
        return sizes


SHAPES = (
    Shape(8192, 4096, 3072, 32),
    Shape(32768, 4096, 3072, 32),
    Shape(32768, 2048, 1536, 128),
    Shape(8192, 4096, 3072, 32, sizes="zipf"),
    Shape(8192, 4096, 3072, 32, sizes="half in one"),
    Shape(32768, 4096, 3072, 32, sizes="zipf"),
    Shape(32768, 4096, 3072, 32, sizes="half in one"),
    Shape(32768, 2048, 1536, 128, active=28),
    Shape(256, 4096, 3072, 32),
    Shape(64, 7168, 4096, 32),
    Shape(8, 2048, 1536, 128, active=8),
)
SMOKE_SHAPES = (Shape(512, 128, 128, 4), Shape(8, 128, 128, 4, active=2), Shape(96, 128, 128, 4, sizes="zipf"))
FORMATS = ("bf16", "fp8", "mxfp8", "mxfp4", "nvfp4", "fp8_128x128")
SMOKE_FORMATS = ("bf16", "fp8", "nvfp4")
TRAINING = "bf16 forward+backward"
PEERS = {
    "bf16": "torch._grouped_mm",
    "fp8": "torch._scaled_grouped_mm, one scale for each row",
    TRAINING: "torch._grouped_mm and its gradients",
}


def operands(key: jax.Array, shape: Shape, fmt: str):
    """x [T, K] and w [E, N, K]: "bf16"; "fp8": both in blocks of 128; else BF16 rows and weights of that format."""
    x = jax.random.normal(key, (shape.rows, shape.k), jnp.bfloat16)
    w = jax.random.normal(jax.random.fold_in(key, 1), (shape.groups, shape.n, shape.k), jnp.bfloat16)
    w = w * jnp.bfloat16(0.02)
    if fmt in ("bf16", TRAINING):
        return x, w
    if fmt == "fp8":
        return quantize(x, "fp8_128"), quantize_weights(w, "fp8_128x128")
    return x, quantize_weights(w, fmt)


def weight_bytes(w: jax.Array | QTensor, touched: float) -> float:
    """Bytes of the weights of `touched` groups, scales included."""
    return w.nbytes * touched / w.shape[0]


@functools.partial(jax.jit, static_argnames="out_dtype")
def _matmul(x, w, sizes, *, out_dtype=jnp.bfloat16):
    return grouped_matmul(x, w, sizes, out_dtype=out_dtype)


@jax.jit
def _train(x, w, sizes):
    """The product, and both gradients of a sum that weights it with itself."""
    y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
    return y, *back(y)


def _error(x, w, sizes: np.ndarray, groups: int = 3) -> float:
    """Relative error against the float32 product of the dequantised operands, in the first occupied groups."""
    y = _matmul(x, w, jnp.asarray(sizes))
    x = dequantize(x, jnp.float32) if isinstance(x, QTensor) else x.astype(jnp.float32)
    ends = np.cumsum(sizes)
    actual, exact = [], []
    for g in np.flatnonzero(sizes)[:groups]:
        rows = slice(int(ends[g] - sizes[g]), int(ends[g]))
        one = jax.tree.map(lambda a, g=g: a[g : g + 1] if a.ndim and a.shape[0] == len(sizes) else a, w)
        one = dequantize(one, jnp.float32) if isinstance(one, QTensor) else one.astype(jnp.float32)
        exact.append(np.asarray(jnp.matmul(x[rows], one[0].T, precision=lax.Precision.HIGHEST)))
        actual.append(np.asarray(y[rows].astype(jnp.float32)))
    return relative_error(np.concatenate(actual), np.concatenate(exact))


class Torch:
    """torch in a process of its own, which runs a call as often as it is told to; nothing without torch or a GPU."""

    def __init__(self, enabled: bool):
        found = enabled and jax.default_backend() == "gpu" and importlib.util.find_spec("torch") is not None
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", _TORCH]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) if found else None

    def ask(self, *question) -> float | None:
        """("load", T, K, N, E, kind) prepares a call, and is None if torch cannot; (calls,) times it, in seconds."""
        if self.process is None or self.process.stdin is None or self.process.stdout is None:
            return None
        try:
            print(json.dumps(question), file=self.process.stdin, flush=True)
            return json.loads(self.process.stdout.readline() or "null")
        except BrokenPipeError:
            return None

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()


_TORCH = """
import json, sys, torch
def load(t, k, n, e, kind):
    train = "backward" in kind
    x = torch.randn(t, k, device="cuda", dtype=torch.bfloat16, requires_grad=train)
    w = (torch.randn(e, n, k, device="cuda", dtype=torch.bfloat16) * .02).requires_grad_(train)
    ends = torch.arange(1, e + 1, device="cuda", dtype=torch.int32) * (t // e)
    if kind == "fp8":
        x, w = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn).transpose(-2, -1)
        ones = torch.ones(t, device="cuda"), torch.ones(e, n, device="cuda")
        return lambda: torch._scaled_grouped_mm(x, w, *ones, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)
    product = lambda: torch._grouped_mm(x, w.transpose(-2, -1), offs=ends)
    if not train:
        return product
    dy = torch.randn(t, n, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.autograd.grad(product(), (x, w), dy)
for line in sys.stdin:
    first, *rest = json.loads(line)
    try:
        if first == "load":
            call = None
            call = load(*rest)
            call(); torch.cuda.synchronize()
            answer = 1.0
        else:
            a, b = torch.cuda.Event(True), torch.cuda.Event(True)
            a.record(); [call() for _ in range(first)]; b.record(); torch.cuda.synchronize()
            answer = a.elapsed_time(b) / first / 1e3
    except Exception:
        answer = None
    print(json.dumps(answer), flush=True)
"""


def _beside(torch: Torch, calls: int, once, rounds: int = 5) -> tuple[float, float]:
    """Median seconds of one call, of ours (`once()` is a chain of `calls`) and of torch's, in turns."""
    ours, theirs = [], []
    for _ in range(rounds + 1):
        for run, times in ((once, ours), (lambda: torch.ask(calls), theirs)):
            time.sleep(PAUSE)
            times.append(run())
    return statistics.median(ours[1:]), statistics.median(theirs[1:])


def run(smoke: bool, progress: Progress | None = None) -> list[Record]:
    """Every shape in every format; FP8 activations and training only where rows are many (and equal)."""
    progress = progress or NoProgress()
    shapes, formats = (SMOKE_SHAPES, SMOKE_FORMATS) if smoke else (SHAPES, FORMATS)
    cases = [(s, f) for s in shapes for f in formats if not (f == "fp8" and s.decode)]
    cases += [(s, TRAINING) for s in shapes if not s.decode and s.sizes == "equal" and s.active is None]
    progress.start(len(cases))
    records = []
    with contextlib.closing(Torch(not smoke)) as torch:
        copy = copy_bandwidth()
        for i, (shape, fmt) in enumerate(cases):
            progress.step(f"{fmt} {shape.case}")
            records.append(measure(shape, fmt, jax.random.key(i), copy, torch, smoke))
    return records


def _chain_once(step, inputs, calls: int):
    """A function that runs a chain of at least `calls` calls and returns the seconds of one."""
    calls = -(-calls // len(inputs)) * len(inputs)
    run = jit_donating(chain(step, calls=calls))
    firsts, rest = tuple(i[0] for i in inputs), tuple((None, *i[1:]) for i in inputs)
    firsts = jax.tree.map(jnp.copy, firsts)

    def once() -> float:
        nonlocal firsts
        start = time.perf_counter()
        firsts, results = run(firsts, rest)
        jax.block_until_ready((firsts, results))
        return (time.perf_counter() - start) / calls

    once()
    return once


def measure(shape: Shape, fmt: str, key: jax.Array, copy: float, torch: Torch | None, smoke: bool = False) -> Record:
    """One figure: `fmt` is one of FORMATS or TRAINING; copy: GB/s of the copy bandwidth."""
    rng = np.random.default_rng(0)
    draws = 1 if smoke else 2 if shape.active is None else 16
    x, w = operands(key, shape, fmt)
    sizes = [shape.group_sizes(rng) for _ in range(draws)]
    # Different groups are active in each call of the chain, so that small shapes do not run from the L2 cache.
    inputs = [(jnp.asarray(s), x, w) for s in sizes]
    call = _train if fmt == TRAINING else _matmul

    def step(s, x, w):
        return call(x, w, s)

    peer_seconds = None
    even = shape.sizes == "equal" and shape.active is None
    if torch and fmt in PEERS and even and torch.ask("load", shape.rows, shape.k, shape.n, shape.groups, fmt):
        calls = DECODE_CALLS if shape.decode else PREFILL_CALLS
        seconds, peer_seconds = _beside(torch, calls, _chain_once(step, inputs, calls))
    elif smoke:
        seconds = time_chain(step, inputs, calls=2, repeats=1).median
    else:
        seconds = time_chain(step, inputs, calls=DECODE_CALLS if shape.decode else PREFILL_CALLS).median
    flops = 2.0 * shape.rows * shape.k * shape.n * (3 if fmt == TRAINING else 1)
    touched = float(np.mean([(s > 0).sum() for s in sizes]))
    amount, unit = (weight_bytes(w, touched) / 1e9, "GB/s") if shape.decode else (flops / 1e12, "TFLOP/s")
    if shape.decode:
        ceiling, ceiling_name = copy, "copy"
    else:
        ceiling, ceiling_name = DENSE_TFLOPS["fp8" if fmt == "fp8" else "bf16"], "datasheet"
    peer = None if peer_seconds is None else amount / peer_seconds
    return Record(
        name=fmt,
        case=shape.case,
        value=amount / seconds,
        unit=unit,
        seconds=seconds,
        ceiling=ceiling,
        ceiling_name=ceiling_name,
        peer=peer,
        peer_name="" if peer is None else PEERS[fmt],
        error=_error(x, w, sizes[0]),
        error_name="relative to float32",
        meaningful=not smoke and jax.default_backend() == "gpu",
        parameters={**dataclasses.asdict(shape), "format": fmt},
    )


def tune(progress: Progress | None = None) -> list[Record]:
    """Times the candidates of every shape and weight format, and writes the fastest as rules to `tuning.USER_FILE`."""
    progress = progress or NoProgress()
    formats = [f for f in FORMATS if f != "fp8"]
    cases = [(s, f) for s in SHAPES if s.sizes == "equal" for f in formats if s.decode or f == "bf16"]
    progress.start(len(cases))
    records, rules = [], []
    for i, (shape, fmt) in enumerate(cases):
        progress.step(f"{fmt} {shape.case}")
        kernel = "decode" if shape.decode else "prefill"
        rows = tuning.rows_per_group(shape.rows, shape.groups)
        timed = []
        for candidate in CANDIDATES[kernel]:
            with tuning.override({kernel: candidate}):
                _matmul.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
                try:
                    record = measure(shape, fmt, jax.random.key(i), 1.0, None)
                except ValueError:  # does not fit into shared memory, or not this shape
                    continue
            if record.error is not None and record.error < 4e-3:
                timed.append((record.seconds, candidate, record))
        if timed:
            _, candidate, record = min(timed, key=lambda t: t[0])
            weights = {"bf16": "bfloat16"}.get(fmt, fmt)
            rule = dict(kernel=kernel, weights=weights, max_rows=rows, n=shape.n, k=shape.k, config=candidate)
            rules.append(rule)
            records.append(dataclasses.replace(record, name=f"{fmt} {candidate}", ceiling=None, ceiling_name=""))
    _matmul.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    tuning.write_rules(tuning.USER_FILE, rules)
    return records
