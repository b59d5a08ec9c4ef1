"""`jmoe bench grouped-matmul`: grouped matmul against the roofline, stock JAX and CUTLASS.

T rows, K contraction, N columns, E groups. With many rows per group the figure is TFLOP/s; with few it is GB/s of the
bytes of the weights that were touched, as a share of the copy bandwidth measured in the same run. The whole operation
is timed, what lays out its tiles included.

Few rows take as long as a few small kernels, so their calls follow each other without one between (as torch's do): each
has group sizes of its own, and where few groups are active, other groups than the 15 before. Many rows are timed in
chains, in which each call needs the one before.

Products of many rows heat a GPU to its power limit within milliseconds, and then it slows down (an H200 to 1.4 of
1.98 GHz). So they are timed under load, after half as long of the same; "burst" is the same in 21 calls after a pause.
A chain costs half a millisecond once, for its launch and the last wait, of which the events that time torch see less.
So a figure is what a second chain adds to the first, on both sides.
torch's CUTLASS kernels are peers where torch is installed: the same load, in turns with ours. Everything is compiled
before anything is timed, in threads.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.grouped_matmul import grouped_matmul, tuning
from pallas_kernels.quantize import QTensor, dequantize, quantize, quantize_weights

from .common import NoProgress, Progress, Record, copy_bandwidth, wanted
from .timing import depend

_SHARED = {"cluster": 2, "share": "weights"}
CANDIDATES = {
    "prefill": [
        {**tile, "lead": lead}
        for tile in (
            {"block_n": 192},
            _SHARED,
            {**_SHARED, "slab": 144, "out_slots": 1},
            {"block_m": 256, "block_n": 128, "cluster": 2},
        )
        for lead in (0, 2)
    ],
    "decode": [
        {"block_t": t, "consumers": c, "chunks": k, "stages": s, "per_sm": p}
        for t in (8, 16, 32, 64)
        for c, k, s, p in (
            *((1, 2, 5, 2), (1, 4, 2, 3), (2, 2, 5, 1), (2, 4, 2, 1), (2, 2, 2, 2), (2, 4, 3, 1)),
            *((4, 1, 5, 1), (4, 2, 2, 1)),
        )
    ],
    "4 bits": [  # besides those of "decode"
        {"block_t": t, "consumers": c, "chunks": k, "stages": s, "per_sm": p, "warp": True}
        for t in (8, 16)
        for c, k, s, p in ((4, 2, 2, 1), (4, 1, 4, 1), (3, 2, 3, 1), (2, 2, 4, 1), (2, 2, 2, 2))
    ],
}
DENSE_TFLOPS = {"bf16": 989.0, "fp8": 1979.0}  # H100 and H200 SXM, datasheet, without sparsity
DECODE_ROWS = 64
ROUNDS = 5, 4  # of how many calls after the first, in a chain of many rows: 6 to 25 ms
SERIES, TIMES = 32, 8  # calls of few rows in a turn, and turns of a chain: 2 to 100 ms
PAUSE = 0.02  # seconds before each burst
LOAD = 0.5  # seconds of chains, of which the second half counts
SHOWN = 16  # rows of a group that the error is taken from
_IMPOSSIBLE = np.float32(1.2345678e30)


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

    def draws(self, count: int, seed: int = 0) -> np.ndarray:
        """int32 [count, E], all with the same sum. Active groups are others each time, until all have had a turn."""
        rng = np.random.default_rng(seed)
        order = rng.permutation(self.groups)
        return np.stack([self._sizes(rng, np.roll(order, -i * (self.active or 1))) for i in range(count)])

    def _sizes(self, rng: np.random.Generator, order: np.ndarray) -> np.ndarray:
        active = order[: self.active or self.groups]
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

    @property
    def even(self) -> bool:
        """Whether all groups have as many rows, as torch's do."""
        return self.sizes == "equal" and self.active is None


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
STOCK = "stock JAX (lax.ragged_dot), bf16"
PEERS = {
    "bf16": "torch._grouped_mm",
    "fp8": "torch._scaled_grouped_mm, one scale for each row",
    TRAINING: "torch._grouped_mm and its gradients",
}


def cases(smoke: bool) -> list[tuple[Shape, str]]:
    """What is measured, the most telling first: groups of unlike sizes and the largest arrays only in BF16 and FP8."""
    shapes, formats = (SMOKE_SHAPES, SMOKE_FORMATS) if smoke else (SHAPES, FORMATS)
    many, few = [s for s in shapes if not s.decode], [s for s in shapes if s.decode]
    even = [s for s in many if s.even]
    chosen = [(s, f) for s in even for f in ("bf16", "fp8")]
    chosen += [(s, f) for s in few for f in formats if f != "fp8"]
    chosen += [(even[0], f) for f in formats if f not in ("bf16", "fp8")]
    chosen += [(even[0], STOCK), *((s, TRAINING) for s in even)]
    return chosen + [(s, "bf16") for s in many if not s.even]


def operands(key: jax.Array, shape: Shape, fmt: str):
    """x [T, K] and w [E, N, K]: "bf16"; "fp8": both in blocks of 128; else BF16 rows and weights of that format."""
    x = jax.random.normal(key, (shape.rows, shape.k), jnp.bfloat16)
    w = jax.random.normal(jax.random.fold_in(key, 1), (shape.groups, shape.n, shape.k), jnp.bfloat16)
    w = w * jnp.bfloat16(0.02)
    if fmt in ("bf16", TRAINING, STOCK):
        return x, w
    if fmt == "fp8":
        return quantize(x, "fp8_128"), quantize_weights(w, "fp8_128x128")
    return x, quantize_weights(w, fmt)


def weight_bytes(w: jax.Array | QTensor, touched: float) -> float:
    """Bytes of the weights of `touched` groups, scales included."""
    return w.nbytes * touched / w.shape[0]


def _product(x, w, sizes):
    return grouped_matmul(x, w, sizes, out_dtype=jnp.bfloat16)


def _stock(x, w, sizes):
    return lax.ragged_dot(x, jnp.swapaxes(w, 1, 2), sizes)


def _train(x, w, sizes):
    """The product, and both gradients of a sum that weights it with itself."""
    y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
    return y, *back(y)


def _chain(call: Callable[..., Any], rounds: int, each: int) -> Callable[..., Any]:
    """(sizes [draws, E], x, w) -> the result of the last of 1 + rounds * each calls; each needs the one before.

    One small kernel before each: it takes the next draw of sizes, if an element of every result is not an impossible
    number (which no compiler can know). Another one counts the rounds.
    """

    def run(draws, x, w):
        def one_round(i, results):
            for j in range(each):
                tokens = [leaf[(0,) * leaf.ndim].astype(jnp.float32) for leaf in jax.tree.leaves(results)]
                never = jnp.stack(tokens).max() == _IMPOSSIBLE
                draw = lax.rem(1 + i * each + j, draws.shape[0])
                results = call(x, w, draws[draw] + never.astype(jnp.int32))
            return results

        return lax.fori_loop(0, rounds, one_round, call(x, w, draws[0]))

    return run


def _series(call: Callable[..., Any], turns: int) -> Callable[..., Any]:
    """(sizes [draws] of [E], x, w) -> the result of the last of a call for each of them, `turns` times over.

    No other kernel is between the calls of a turn, and one small one between turns, which need each other. A loop's
    arrays stay where they are, so that XLA records its body in a command buffer once; those of a program that is called
    again are elsewhere each time, and with 32 calls of 10 us it is the host that is measured.
    """

    def run(draws, x, w):
        def turn(_, carry):
            results = [call(carry[0], w, sizes) for sizes in draws]
            return depend(carry[0], results), results[-1]

        none = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(call, x, w, draws[0]))
        return lax.fori_loop(0, turns, turn, (x, none))[1]

    return run


def _error(x, w, sizes, results):
    """Relative error of up to SHOWN rows of each of the first occupied groups against the dequantised operands' product
    in float32."""
    y = jax.tree.leaves(results)[0]

    def rows_of(a, rows):
        one = jax.tree.map(lambda v: v[rows] if v.ndim else v, a)
        return dequantize(one, jnp.float32) if isinstance(a, QTensor) else one.astype(jnp.float32)

    ends = jnp.cumsum(sizes)
    wrong, exact = 0.0, 0.0
    for group in jnp.argsort(sizes == 0, stable=True)[:3]:
        rows = ends[group] - sizes[group] + jnp.arange(SHOWN)
        here = (jnp.arange(SHOWN) < sizes[group])[:, None]
        rows = jnp.minimum(rows, y.shape[0] - 1)
        product = jnp.matmul(rows_of(x, rows), rows_of(w, group[None])[0].T, precision=lax.Precision.HIGHEST)
        wrong += jnp.sum(jnp.where(here, y[rows].astype(jnp.float32) - product, 0.0) ** 2)
        exact += jnp.sum(jnp.where(here, product, 0.0) ** 2)
    return jnp.sqrt(wrong / exact)


class Program:
    """A format at a shape, for any group sizes: its operands, a chain of calls, and the error of the last one."""

    def __init__(self, shape: Shape, fmt: str, smoke: bool = False, like: Program | None = None):
        """like: a program of the same shape and format, whose operands and error this one takes."""
        call = {TRAINING: _train, STOCK: _stock}.get(fmt, _product)
        make = jax.jit(lambda key: operands(key, shape, fmt))
        key = jax.eval_shape(lambda: jax.random.key(0))
        x, w = jax.eval_shape(make, key)
        sizes = jax.ShapeDtypeStruct((shape.groups,), jnp.int32)
        self.series = shape.decode
        if self.series:
            self.draws, turns = (1, 1) if smoke else (SERIES, TIMES)
            run, draws, self.calls = _series(call, turns), [sizes] * self.draws, self.draws * turns
        else:
            rounds, each = (1, 1) if smoke or fmt == STOCK else ROUNDS
            run, self.calls = _chain(call, rounds, each), 1 + rounds * each
            self.draws = 1 if smoke else 2
            draws = jax.ShapeDtypeStruct((self.draws, shape.groups), jnp.int32)
        self._like, self._run = like, jax.jit(run).lower(draws, x, w)
        if like is None:
            self._rest = make.lower(key), jax.jit(_error).lower(x, w, sizes, jax.eval_shape(call, x, w, sizes))

    def compile(self) -> None:
        """May run in a thread; nothing may be timed meanwhile. A program that is like another comes after it."""
        self.run = self._run.compile()
        if self._like is None:
            self.make, self.error = (lowered.compile() for lowered in self._rest)
        else:
            self.make, self.error = self._like.make, self._like.error

    def chain(self, shape: Shape, x, w) -> tuple[Callable[[int], float], float, float]:
        """What runs so many chains, in seconds; how many groups a call touches; and the error of the last."""
        sizes = shape.draws(self.draws)
        draws = [jnp.asarray(s) for s in sizes] if self.series else jnp.asarray(sizes)
        results = self.run(draws, x, w)
        last = (self.calls - 1) % len(sizes)
        error = float(self.error(x, w, jnp.asarray(sizes[last]), results))
        del results

        def seconds(chains: int) -> float:
            start = time.perf_counter()
            jax.block_until_ready([self.run(draws, x, w) for _ in range(chains)])
            return time.perf_counter() - start

        return seconds, float(np.mean(np.sum(sizes > 0, axis=1))), error


def _programs(wanted_cases: Sequence[tuple[Shape, str]], smoke: bool) -> dict[tuple, Program]:
    """One for each format and size of arrays, compiled."""
    programs = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = []
        for shape, fmt in wanted_cases:
            if _key(shape, fmt) not in programs:
                programs[_key(shape, fmt)] = program = Program(shape, fmt, smoke)
                waiting.append(pool.submit(program.compile))
        for future in waiting:
            future.result()
    return programs


def _key(shape: Shape, fmt: str) -> tuple:
    return fmt, shape.rows, shape.k, shape.n, shape.groups, shape.decode, shape.decode and shape.active


class Torch:
    """torch in a process of its own, which runs a call as often as it is told to; nothing without torch or a GPU."""

    def __init__(self, enabled: bool):
        found = enabled and jax.default_backend() == "gpu" and importlib.util.find_spec("torch") is not None
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", _TORCH]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) if found else None

    def ask(self, *question) -> float | None:
        """("load", T, K, N, E, kind) prepares a call, None if torch cannot; (calls,) gives the seconds of so many."""
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
            a.record()
            for _ in range(first):
                call()  # whose results go at once: the gradients of 42 calls would not fit beside JAX's memory
            b.record(); torch.cuda.synchronize()
            answer = a.elapsed_time(b) / 1e3
    except Exception:
        answer = None
    print(json.dumps(answer), flush=True)
"""


Side = Callable[[int], float]  # seconds of so many chains, one after another


def _second(pairs: Sequence[tuple[float, float]]) -> float:
    """Seconds that a second chain adds, from those of one and of two."""
    one, two = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    return two - one


def _bursts(*sides: Side, rounds: int = 5) -> list[float]:
    """Seconds of a chain of each side, in turns, each after a pause."""
    times: list[list[tuple[float, float]]] = [[] for _ in sides]

    def after_a_pause(side: Side, chains: int) -> float:
        time.sleep(PAUSE)
        return side(chains)

    for _ in range(rounds + 1):
        for side, pairs in zip(sides, times, strict=True):
            pairs.append((after_a_pause(side, 1), after_a_pause(side, 2)))
    return [_second(pairs[1:]) for pairs in times]


def _under_load(*sides: Side) -> list[float]:
    """Seconds of a chain of each side, in two turns, each after a while of nothing else."""
    times: list[list[tuple[float, float]]] = [[] for _ in sides]
    for _ in range(2 if len(sides) > 1 else 1):
        for side, pairs in zip(sides, times, strict=True):
            turn, start = [], time.perf_counter()
            while time.perf_counter() - start < LOAD:
                turn.append((side(1), side(2)))
            pairs += turn[len(turn) // 2 :]
    return [_second(pairs) for pairs in times]


def run(smoke: bool, progress: Progress | None = None, only: re.Pattern[str] | None = None) -> list[Record]:
    """What `cases` says. only: of the figures whose name and case it is found in."""
    progress = progress or NoProgress()
    chosen = [(s, f) for s, f in cases(smoke) if wanted(only, f, s.case)]
    progress.start(len(chosen) + 1)
    progress.step("compiling")
    records = []
    with contextlib.closing(Torch(not smoke)) as torch:
        programs = _programs(chosen, smoke)
        copy = copy_bandwidth()
        for i, (shape, fmt) in enumerate(chosen):
            progress.step(f"{fmt} {shape.case}")
            found = measure(programs[_key(shape, fmt)], shape, fmt, jax.random.key(i), copy, torch, smoke)
            for record in found:
                progress.record(record)
            records += found
    return records


def measure(
    program: Program, shape: Shape, fmt: str, key: jax.Array, copy: float, torch: Torch | None, smoke: bool = False
) -> list[Record]:
    """The figure of `fmt` (one of FORMATS, TRAINING or STOCK), and with torch as a peer that of bursts.

    copy: GB/s of the copy bandwidth.
    """
    x, w = program.make(key)
    ours, touched, error = program.chain(shape, x, w)
    sides: list[Side] = [ours]
    if torch and fmt in PEERS and shape.even:
        if torch.ask("load", shape.rows, shape.k, shape.n, shape.groups, fmt):
            sides.append(lambda chains: torch.ask(chains * program.calls) or math.nan)
    flops = 2.0 * shape.rows * shape.k * shape.n * (3 if fmt == TRAINING else 1)
    amount, unit = (weight_bytes(w, touched) / 1e9, "GB/s") if shape.decode else (flops / 1e12, "TFLOP/s")
    if shape.decode:
        ceiling, ceiling_name = copy, "copy"
    else:
        ceiling, ceiling_name = DENSE_TFLOPS["fp8" if fmt == "fp8" else "bf16"], "datasheet"

    def record(name: str, seconds: float, peer: float | None = None) -> Record:
        """seconds, peer: of a chain."""
        seconds, peer = seconds / program.calls, None if peer is None else peer / program.calls
        return Record(
            name=name,
            case=shape.case,
            value=amount / seconds,
            unit=unit,
            seconds=seconds,
            ceiling=ceiling,
            ceiling_name=ceiling_name,
            peer=None if peer is None else amount / peer,
            peer_name="" if peer is None else PEERS[fmt],
            error=error,
            error_name="relative to float32",
            meaningful=not smoke and jax.default_backend() == "gpu",
            parameters={**dataclasses.asdict(shape), "format": fmt},
        )

    if smoke:
        return [record(fmt, ours(1))]
    if shape.decode or fmt == STOCK:
        return [record(fmt, *_bursts(*sides))]
    short = [record(f"{fmt}, burst", *_bursts(*sides))] if len(sides) > 1 or not shape.even else []
    return [record(fmt, *_under_load(*sides)), *short]


def tune(
    progress: Progress | None = None,
    only: re.Pattern[str] | None = None,
    shapes: Sequence[Shape] = SHAPES,
    formats: Sequence[str] = FORMATS,
) -> list[Record]:
    """Times the candidates of every shape and weight format, and writes the fastest as rules to `tuning.USER_FILE`.

    Each rule is written as soon as it is known, before those that the file has. only: as for `run`.
    """
    progress = progress or NoProgress()
    chosen = [(s, f) for s in shapes if s.sizes == "equal" for f in formats if f != "fp8" and (s.decode or f == "bf16")]
    chosen = [(s, f) for s, f in chosen if wanted(only, f, s.case)]
    progress.start(len(chosen))
    records = []
    for i, (shape, fmt) in enumerate(chosen):
        progress.step(f"{fmt} {shape.case}")
        kernel = "decode" if shape.decode else "prefill"
        timed = [
            (record.seconds, candidate, record)
            for candidate, program in _candidates(kernel, shape, fmt)
            for record in measure(program, shape, fmt, jax.random.key(i), 1.0, None)[:1]
            if record.error is not None and record.error < 4e-3
        ]
        if timed:
            _, candidate, record = min(timed, key=lambda t: t[0] or 0.0)
            _keep(dict(kernel=kernel, **_where(shape, fmt), config=candidate))
            records.append(dataclasses.replace(record, name=f"{fmt} {candidate}", ceiling=None, ceiling_name=""))
            progress.record(records[-1])
    return records


def _where(shape: Shape, fmt: str) -> dict[str, Any]:
    """What a rule for this shape and format says, besides the kernel and its configuration."""
    rows = tuning.rows_per_group(shape.rows, shape.groups)
    return dict(weights={"bf16": "bfloat16"}.get(fmt, fmt), max_rows=rows, n=shape.n, k=shape.k)


def _keep(rule: dict[str, Any]) -> None:
    """Writes a rule before those of the user's file that hold for something else."""

    def place(r):
        return {name: value for name, value in r.items() if name != "config"}

    there = tuning.read_rules(tuning.USER_FILE) if tuning.USER_FILE.is_file() else ()
    tuning.write_rules(tuning.USER_FILE, [rule, *(r for r in there if place(r) != place(rule))])


def _candidates(kernel: str, shape: Shape, fmt: str) -> list[tuple[dict[str, Any], Program]]:
    """The candidates that this shape can have, compiled; first what it has now."""
    where = _where(shape, fmt)
    rows = where.pop("max_rows")
    now = tuning.lookup(kernel, rows=rows, weight_rows=min(shape.rows, shape.groups) * shape.n, **where)
    candidates = [now, *CANDIDATES[kernel], *(CANDIDATES["4 bits"] if shape.decode and fmt.endswith("fp4") else ())]
    if shape.decode:  # tiles for a group's rows, or twice as many
        fitting = sorted({c["block_t"] for c in candidates[1:] if c["block_t"] >= rows})[:2]
        candidates = [now, *(c for c in candidates[1:] if c["block_t"] in fitting)]
    able: list[tuple[dict[str, Any], Program]] = []
    for i, candidate in enumerate(candidates):
        if candidate in candidates[:i]:
            continue
        try:
            with tuning.override({kernel: candidate}):
                able.append((candidate, Program(shape, fmt, like=able[0][1] if able else None)))
        except ValueError:  # does not fit into shared memory, or not this shape
            continue
    if able:
        able[0][1].compile()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda pair: pair[1].compile(), able[1:]))
    return able
