"""`jmoe bench dispatch`: dispatch and combine over the links, every backend and wire format, with peers.

T tokens on one rank, D hidden size, K experts per token, R ranks, S targets of a plan, N received rows.

A dispatch is timed from bf16 rows to received rows (quantising and packing included), a combine from the experts' rows
to the owner's sums; routing and plan are made before. Remote bytes are what has to cross the link in one direction: a
row for each (token, other rank) or, in the batched form, for each (token, expert elsewhere), the most that any rank
sends. Logical bytes count the own rank too. A collective moves its padding as well, which is not counted in its favour.
Each figure is the median of chains of dependent calls inside one jit.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmoe import compat
from jmoe.backends import Backend, Exchange, combine, dispatch_payload, exchange_for, get_backend, start
from jmoe.backends.engine import remote_write_engine
from jmoe.backends.scales import pack_rows
from jmoe.payload import RowLayout, row_layout, to_bytes, unpack_data
from pallas_kernels.all_to_all import ragged_all_to_all

from .common import LINK_GBPS, NoProgress, Progress, Record
from .plot import lines
from .timing import depend

AXIS = "ep"
DECODE_TOKENS = 256  # the batched form is for decoding
TOKENS = (1, 16, 128, 512, 2048, 8192, 32768)
RAGGED_TOKENS = (128, 512, 2048, 8192)  # lax.ragged_all_to_all takes 22 ms of 8192 rows
WIRES = ("bfloat16", "mxfp8", "nvfp4_token", "fp8_128")
COMBINE_WIRES = ("bfloat16", "mxfp8")
SMOKE_BACKENDS = ("nvlink_one_sided", "low_latency")
MEASURED = ("allgather_reducescatter", "nvlink_two_sided", "deepep_high_throughput", *SMOKE_BACKENDS)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The layer whose tokens travel; DeepSeek-V3's by default."""

    hidden: int = 7168
    experts: int = 256
    top_k: int = 8


@dataclasses.dataclass(frozen=True)
class Timer:
    """calls in one jitted chain, chains between two looks at the clock, and how often."""

    calls: int = 20
    chains: int = 3
    repeats: int = 5


class Bench:
    """What all cases share: devices, sizes, and what was measured once for several of them."""

    def __init__(self, shape: Shape, timer: Timer, *, meaningful: bool):
        devices = jax.devices()[:8]
        self.mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
        self.num_ranks = len(devices)
        self.shape = dataclasses.replace(shape, experts=shape.experts // len(devices) * len(devices))
        self.timer, self.meaningful = timer, meaningful
        self.engine = remote_write_engine() if len(devices) > 1 else None
        self._peers: dict[tuple[int, int], float] = {}
        self._inputs: tuple[int, tuple[jax.Array, ...]] | None = None

    def mapped(self, function, **jit):
        """`function` of one rank's arrays, jitted over the mesh; outside, arrays have a leading axis of ranks."""

        def local(*args):
            return jax.tree.map(lambda v: v[None], function(*jax.tree.map(lambda v: v[0], args)))

        return jax.jit(compat.shard_map(local, mesh=self.mesh, in_specs=P(AXIS), out_specs=P(AXIS)), **jit)

    def inputs(self, tokens: int) -> tuple[jax.Array, ...]:
        """ids int32 [R, T, K] of a uniform router, weights and bf16 rows."""
        if self._inputs is None or self._inputs[0] != tokens:
            shape = self.shape

            def make(rank):
                keys = jax.random.split(jax.random.fold_in(jax.random.key(tokens), rank[0]), 3)
                _, ids = lax.top_k(jax.random.uniform(keys[0], (tokens, shape.experts)), shape.top_k)
                weights = jax.random.uniform(keys[1], ids.shape)
                return ids.astype(jnp.int32), weights, jax.random.normal(keys[2], (tokens, shape.hidden), jnp.bfloat16)

            self._inputs = None  # frees the others first
            self._inputs = (tokens, self.mapped(make)(self.put(np.arange(self.num_ranks, dtype=np.int32)[:, None])))
        return self._inputs[1]

    def put(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, NamedSharding(self.mesh, P(AXIS)))

    def seconds(self, step, first: jax.Array, *rest) -> float:
        """Median seconds of one `step(first, *rest)`, each call of a chain waiting for the one before."""

        def chain(first, *rest):
            def one(_, first):
                return depend(first, lax.optimization_barrier(step(first, *rest)))

            return lax.fori_loop(0, self.timer.calls, one, first)

        run = self.mapped(chain, donate_argnums=0)
        first = run(jnp.copy(first), *rest)
        taken = []
        for _ in range(self.timer.repeats):
            jax.block_until_ready(first)
            begin = time.perf_counter()
            for _ in range(self.timer.chains):
                first = run(first, *rest)
            jax.block_until_ready(first)
            taken.append((time.perf_counter() - begin) / (self.timer.chains * self.timer.calls))
        return statistics.median(taken)

    def peer(self, row_bytes: int, tokens: int) -> float:
        """Seconds of NCCL's dense exchange of the same rows: T rows of `row_bytes` to every rank."""
        if (row_bytes, tokens) not in self._peers:
            exchange = functools.partial(lax.all_to_all, axis_name=AXIS, split_axis=0, concat_axis=0, tiled=True)
            rows = np.random.default_rng(0).integers(0, 256, (1, 1, row_bytes), np.uint8)
            many = self.mapped(lambda v: jnp.tile(v, (self.num_ranks * tokens, 1)))
            rows = many(self.put(np.repeat(rows, self.num_ranks, 0)))
            self._peers[row_bytes, tokens] = self.seconds(exchange, rows)
        return self._peers[row_bytes, tokens]


@dataclasses.dataclass(frozen=True)
class Case:
    """One backend, wire format and number of tokens, on one machine."""

    bench: Bench
    backend: Backend
    wire: str
    tokens: int

    @property
    def layout(self) -> RowLayout:
        return row_layout(self.bench.shape.hidden, self.wire, self.bench.shape.top_k)

    def exchange(self, *, kernel: bool) -> Exchange:
        """By the backend's kernel where it has one that runs here, or by the portable collectives."""
        shape, num_ranks = self.bench.shape, self.bench.num_ranks
        return exchange_for(
            self.backend,
            tokens=self.tokens,
            num_ranks=num_ranks,
            num_local=shape.experts // num_ranks,
            top_k=shape.top_k,
            axis_name=AXIS,
            engine=self.bench.engine if kernel and self.backend.kernel_slot else None,
        )

    def measure(self) -> list[Record]:
        bench, exchange = self.bench, self.exchange(kernel=True)
        ids, weights, x = bench.inputs(self.tokens)
        plan = bench.mapped(lambda ids: self.backend.plan(ids, exchange))(ids)

        def dispatch(x, ids, weights, plan):
            flight = start(x, ids, weights, plan, backend=self.backend, exchange=exchange, layout=self.layout)
            return flight.rows if flight.data is None else (flight.rows, flight.data)

        counts = np.asarray(plan.counts).reshape(bench.num_ranks, bench.num_ranks, -1).sum(-1)  # [source, target]
        seconds = bench.seconds(dispatch, x, ids, weights, plan)
        wrong, row = self.wrong_bytes(exchange), self.layout.row_bytes
        records = [self.record("dispatch", self.wire, seconds, row, counts, exchange, wrong, "wrong bytes")]
        if self.layout.format is not None:
            return records
        return records + [self.combine(wire, plan, counts, exchange) for wire in COMBINE_WIRES]

    def combine(self, wire: str, plan, counts, exchange: Exchange) -> Record:
        """The way back in bf16 or in a quantised format."""
        bench, as_wire = self.bench, None if wire == "bfloat16" else wire
        ids, weights, x = bench.inputs(self.tokens)
        portable = self.exchange(kernel=False)

        def receive(x, ids, weights, plan):
            got = dispatch_payload(x, ids, weights, plan, backend=self.backend, exchange=portable, layout=self.layout)
            assert isinstance(got.x, jax.Array)  # a float wire
            return jnp.where(jnp.any(got.ids >= 0, axis=1, keepdims=True), got.x, 0), got.ids

        y, recv_ids = bench.mapped(receive)(x, ids, weights, plan)
        send_back = functools.partial(combine, backend=self.backend, wire=as_wire)

        def step(y, weights, plan, recv_ids, x):
            del x
            return send_back(y, weights, plan, exchange=exchange, recv_ids=recv_ids)

        def compare(y, weights, plan, recv_ids, x):
            out = send_back(y, weights, plan, exchange=exchange, recv_ids=recv_ids, out_dtype=jnp.float32)
            if self.backend.form == "batched":
                times = jnp.sum(jnp.where(plan.target >= 0, weights, 0), axis=1, keepdims=True)
            else:
                times = jnp.sum(plan.member, axis=1, keepdims=True).astype(jnp.float32)
            want = x.astype(jnp.float32) * times
            return jnp.sum((out - want) ** 2), jnp.sum(want**2)

        rest = (weights, plan, recv_ids, x)
        error, norm = (float(np.asarray(v, np.float64).sum()) for v in bench.mapped(compare)(y, *rest))
        seconds = bench.seconds(step, y, *rest)
        row = 2 * bench.shape.hidden if as_wire is None else row_layout(bench.shape.hidden, wire, 0).row_bytes
        error = float(np.sqrt(error / norm)) if norm else 0.0
        return self.record("combine", wire, seconds, row, counts, exchange, error, "relative error")

    def wrong_bytes(self, exchange: Exchange) -> float:
        """Share of the received data's bytes that are not those which their senders packed."""
        me, num_local, batched = exchange.rank, exchange.num_local, self.backend.form == "batched"

        def differing(ids, weights, x):
            plan = self.backend.plan(ids, exchange)
            got = dispatch_payload(x, ids, weights, plan, backend=self.backend, exchange=exchange, layout=self.layout)
            rows, _ = pack_rows(x, ids, weights, self.layout, axis_name=AXIS)
            rows, token = lax.all_gather(rows, AXIS), lax.all_gather(plan.src_token, AXIS)  # [R, T, row], [R, S, C]
            if batched:
                token = lax.dynamic_slice_in_dim(token, me() * num_local, num_local, axis=1).swapaxes(0, 1)
            else:
                token = lax.dynamic_index_in_dim(token, me(), axis=1, keepdims=False)
            source = jnp.arange(self.bench.num_ranks, dtype=jnp.int32)[:, None]
            valid = (token >= 0).reshape(-1)
            sent = rows[source, jnp.maximum(token, 0)].reshape(-1, self.layout.row_bytes)
            want = jax.tree.leaves(unpack_data(sent, self.layout))
            wrong = jnp.int32(0)
            for a, b in zip(jax.tree.leaves(got.x), want, strict=True):
                a, b = (to_bytes(v.reshape(v.shape[0], -1)) for v in (a, b))
                wrong += jnp.sum((a != b) & valid[:, None], dtype=jnp.int32)
            return wrong, jnp.sum(valid, dtype=jnp.int32)

        inputs = self.bench.inputs(self.tokens)
        wrong, rows = (float(np.asarray(v, np.float64).sum()) for v in self.bench.mapped(differing)(*inputs))
        return wrong / (rows * self.layout.payload_bytes) if rows else 0.0

    def record(self, what, wire, seconds, row_bytes, counts, exchange, error, error_name) -> Record:
        bench, tokens = self.bench, self.tokens
        logical = counts.sum(axis=1)
        remote = int((logical - np.diag(counts)).max())
        logical = int(logical.max())
        several = bench.num_ranks > 1
        rate = lambda rows, s: rows * row_bytes / s / 1e9  # noqa: E731
        peer = rate(tokens * (bench.num_ranks - 1), bench.peer(row_bytes, tokens)) if several else None
        facts = dict(T=tokens, D=bench.shape.hidden, K=bench.shape.top_k, R=bench.num_ranks)
        return Record(
            name=f"{what} {self.backend.name} {wire}" + (" (kernel)" if exchange.engine is not None else ""),
            case=" ".join(f"{k}={v}" for k, v in facts.items()),
            value=rate(remote if several else logical, seconds),
            unit="GB/s of remote bytes" if several else "GB/s of local bytes",
            seconds=seconds,
            ceiling=LINK_GBPS if several else None,
            ceiling_name="NVLink 4, one direction" if several else "",
            peer=peer,
            peer_name="lax.all_to_all (dense, the same rows)" if several else "",
            error=error,
            error_name=error_name,
            meaningful=bench.meaningful,
            parameters=facts
            | dict(
                wire=wire,
                backend=self.backend.name,
                what=what,
                logical_gbps=rate(logical, seconds),
                remote_rows=remote,
                row_bytes=row_bytes,
                peer_seconds=bench.peer(row_bytes, tokens) if several else None,
            ),
        )


def ragged(bench: Bench, tokens: int, slices: int) -> Record:
    """`ragged_all_to_all` of T rows to every rank, in `slices` slices for each, against lax.ragged_all_to_all."""
    num_ranks, hidden = bench.num_ranks, bench.shape.hidden
    size, pieces = tokens // slices, "1 slice" if slices == 1 else f"{slices} slices"

    def tables():
        entry = jnp.arange(num_ranks * slices, dtype=jnp.int32)
        there = lax.axis_index(AXIS).astype(jnp.int32) * tokens + entry % slices * size
        sizes = jnp.full_like(entry, size)
        return entry * size, sizes, there, sizes

    def seconds(implementation: Literal["lax"] | None, timer: Timer) -> float:
        def chain(rows, into):
            def one(_, carry):  # what was received is sent next
                x, into = carry
                return ragged_all_to_all(x, into, *tables(), axis_name=AXIS, implementation=implementation), x

            return lax.fori_loop(0, timer.calls, one, (rows, into))

        run = bench.mapped(chain, donate_argnums=(0, 1))
        carry = run(rows(), jax.tree.map(jnp.zeros_like, rows()))
        taken = []
        for _ in range(timer.repeats):
            jax.block_until_ready(carry)
            begin = time.perf_counter()
            carry = run(*carry)
            jax.block_until_ready(carry)
            taken.append((time.perf_counter() - begin) / timer.calls)
        return statistics.median(taken)

    def rows() -> jax.Array:
        x = bench.inputs(tokens)[2]
        return bench.mapped(lambda x: jnp.concatenate([x] * num_ranks))(x)

    def wrong(x):
        got = ragged_all_to_all(x, jnp.zeros_like(x), *tables(), axis_name=AXIS)
        want = lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True)
        return jnp.mean((got != want).astype(jnp.float32))

    on_gpu = jax.default_backend() == "gpu"
    error = float(np.asarray(bench.mapped(wrong)(rows())).max())
    mine = seconds(None, bench.timer)
    peer = seconds("lax", Timer(2, 1, 3)) if on_gpu and num_ranks > 1 else None  # milliseconds each
    remote = tokens * (num_ranks - 1) if num_ranks > 1 else tokens
    rate = lambda s: remote * 2 * hidden / s / 1e9  # noqa: E731
    facts = dict(T=tokens, D=hidden, R=num_ranks, slices=slices)
    return Record(
        name=f"ragged_all_to_all, {pieces} for each rank",
        case=" ".join(f"{k}={v}" for k, v in facts.items()),
        value=rate(mine),
        unit="GB/s of remote bytes" if num_ranks > 1 else "GB/s of local bytes",
        seconds=mine,
        ceiling=LINK_GBPS if num_ranks > 1 else None,
        ceiling_name="NVLink 4, one direction" if num_ranks > 1 else "",
        peer=None if peer is None else rate(peer),
        peer_name="" if peer is None else "lax.ragged_all_to_all",
        error=error,
        error_name="wrong values",
        meaningful=bench.meaningful,
        parameters=facts | dict(what="ragged_all_to_all", wire="bfloat16", backend=pieces),
    )


def cases(tokens, wires, backends):
    """(backend name, wire, tokens) of all figures."""
    for t in tokens:
        for name in backends:
            if get_backend(name).form == "standard" or t <= DECODE_TOKENS:
                yield from ((name, wire, t) for wire in wires)


def run(smoke: bool, progress: Progress | None = None, tokens: tuple[int, ...] = TOKENS) -> list[Record]:
    """All figures on all devices of this process (at most 8). smoke: tiny shapes, correctness only."""
    progress = progress or NoProgress()
    if smoke:
        ranks = min(8, len(jax.devices()))
        bench = Bench(Shape(256, 4 * ranks, 2), Timer(1, 1, 1), meaningful=False)
        todo = list(cases((8,), ("bfloat16", "mxfp8"), SMOKE_BACKENDS))
        slices = [(8, 1), (8, 4)]
    else:
        bench = Bench(Shape(), Timer(), meaningful=True)
        todo = list(cases(tokens, WIRES, MEASURED))
        slices = [(t, n) for t in tokens if t in RAGGED_TOKENS for n in (1, 32)]
    progress.start(len(todo) + len(slices))
    records = []
    for name, wire, count in todo:
        progress.step(f"{name} {wire} T={count}")
        records += Case(bench, get_backend(name), wire, count).measure()
    for count, n in slices:
        progress.step(f"ragged_all_to_all, {n} slices, T={count}")
        records.append(ragged(bench, count, n))
    return records


def plot(records: list[Record], path: str | Path) -> None:
    """Bandwidth over the tokens of one rank: a panel for each direction and wire format, a line for each backend."""
    lines(
        sorted(records, key=lambda r: r.parameters["what"] != "dispatch"),
        path,
        x="T",
        x_label="tokens on one rank",
        title="dispatch and combine",
        panel=lambda r: f"{r.parameters['what']}, {r.parameters['wire']}",
        label=lambda r: r.parameters["backend"],
        columns=3,
    )
