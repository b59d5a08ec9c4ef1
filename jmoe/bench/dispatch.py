"""`jmoe bench dispatch`: dispatch and combine over the links, every backend and wire format, with peers.

T tokens on one rank, D hidden size, K experts per token, R ranks, S targets of a plan, N received rows.

A dispatch is timed from bf16 rows to received rows (quantising and packing included), a combine from the experts' rows
to the owner's sums; routing and plan are made before. Remote bytes are what has to cross the link in one direction: a
row for each (token, other rank) or, in the batched form where the receiver does not copy it, for each (token, expert
elsewhere), the most that any rank sends. Logical bytes count the own rank and copies too. A collective moves its
padding as well, which is not counted in its favour.
Each figure is the median of chains of dependent calls inside one jit; the dependence is one small kernel of a call.
Programs are compiled side by side, and nothing is compiled while something is timed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmoe.backends import Backend, Exchange, combine, dispatch_payload, exchange_for, get_backend, start
from jmoe.backends.engine import remote_write_engine
from jmoe.backends.scales import pack_rows
from jmoe.payload import RowLayout, row_layout, to_bytes, unpack_data
from jmoe.plan import Plan
from pallas_kernels.all_to_all import ragged_all_to_all

from . import dispatch_peers
from .common import LINK_GBPS, NoProgress, Progress, Record, wanted
from .plot import lines
from .programs import AXIS, CHAIN_SECONDS, Chain, Program, Ranks, Timer

DECODE_TOKENS = 256  # the batched form is for decoding
TOKENS = (8192, 128, 1, 1024, 32768)  # the most telling first: a run may be cut short
RAGGED_TOKENS = (128, 1024, 8192)  # lax.ragged_all_to_all takes 22 ms of 8192 rows
WIRES = ("bfloat16", "mxfp8", "nvfp4_token", "fp8_128")
COMBINE_WIRES = ("bfloat16", "mxfp8")
SMOKE_BACKENDS = ("nvlink_one_sided", "low_latency")
MEASURED = ("nvlink_one_sided", "low_latency", "nvlink_two_sided", "allgather_reducescatter", "deepep_high_throughput")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The layer whose tokens travel; DeepSeek-V3's by default."""

    hidden: int = 7168
    experts: int = 256
    top_k: int = 8


class Bench(Ranks):
    """The ranks, what travels between them, and the kernels that move it."""

    def __init__(self, shape: Shape, timer: Timer, *, meaningful: bool, only: re.Pattern[str] | None = None):
        """only: which figures are wanted; see `common.wanted`."""
        super().__init__(timer)
        self.shape = dataclasses.replace(shape, experts=shape.experts // self.num_ranks * self.num_ranks)
        self.engine = remote_write_engine() if self.num_ranks > 1 else None
        self.meaningful, self.only = meaningful, only

    def facts(self, tokens: int) -> dict[str, int]:
        return dict(T=tokens, D=self.shape.hidden, K=self.shape.top_k, R=self.num_ranks)

    def case(self, tokens: int) -> str:
        return " ".join(f"{k}={v}" for k, v in self.facts(tokens).items())

    def wants(self, name: str, tokens: int, more: str = "") -> bool:
        return wanted(self.only, name, self.case(tokens) + more)


@dataclasses.dataclass(frozen=True)
class Figure:
    """What is timed, what says how wrong it is (two numbers of each rank), and the record of the two."""

    chain: Chain
    check: Program
    record: Callable[[float, list[float]], Record]

    def measure(self) -> Record:
        return self.record(self.chain.seconds, [float(np.asarray(v, np.float64).sum()) for v in self.check.result])


class Tokens:
    """All programs of one T, and what they share."""

    def __init__(self, bench: Bench, tokens: int):
        self.bench, self.tokens = bench, tokens
        shape = bench.shape

        def make(rank):
            keys = jax.random.split(jax.random.fold_in(jax.random.key(tokens), rank[0]), 3)
            _, ids = lax.top_k(jax.random.uniform(keys[0], (tokens, shape.experts)), shape.top_k)
            weights = jax.random.uniform(keys[1], ids.shape)
            return jax.random.normal(keys[2], (tokens, shape.hidden), jnp.bfloat16), ids.astype(jnp.int32), weights

        ranks = jax.device_put(np.arange(bench.num_ranks, dtype=np.int32)[:, None], bench.sharding)
        self.inputs = Program(bench, make, ranks)  # x, of which chains make each call depend on the last, ids, weights
        self._plans: dict[str, Program] = {}
        self._peers: dict[int, Chain] = {}

    def plan(self, backend: Backend, exchange: Exchange) -> Program:
        if backend.name not in self._plans:
            self._plans[backend.name] = Program(
                self.bench, lambda inputs: backend.plan(inputs[1], exchange), self.inputs
            )
        return self._plans[backend.name]

    def calls(self, rows: float, row_bytes: int) -> int:
        """Of a chain that moves so many rows over a link in each call."""
        return self.bench.timer.calls or int(min(500, max(4, CHAIN_SECONDS / (15e-6 + rows * row_bytes / 300e9))))

    def peer(self, row_bytes: int) -> Chain:
        """NCCL's dense exchange of the same rows: T rows of `row_bytes` to every rank."""
        if row_bytes not in self._peers:
            bench, rows = self.bench, self.bench.num_ranks * self.tokens
            exchange = functools.partial(lax.all_to_all, axis_name=AXIS, split_axis=0, concat_axis=0, tiled=True)
            make = lambda _: jnp.tile(jax.random.bits(jax.random.key(0), (1, row_bytes), jnp.uint8), (rows, 1))  # noqa: E731
            calls = self.calls(self.tokens * (bench.num_ranks - 1), row_bytes)
            self._peers[row_bytes] = Chain(bench, exchange, Program(bench, make, self.inputs), calls=calls)
        return self._peers[row_bytes]


@dataclasses.dataclass(frozen=True)
class Case:
    """One backend, wire format and number of tokens, on one machine."""

    at: Tokens
    backend: Backend
    wire: str

    @property
    def layout(self) -> RowLayout:
        return row_layout(self.at.bench.shape.hidden, self.wire, self.at.bench.shape.top_k)

    def exchange(self, *, kernel: bool) -> Exchange:
        """By the backend's kernel where it has one that runs here, or by the portable collectives."""
        bench = self.at.bench
        return exchange_for(
            self.backend,
            tokens=self.at.tokens,
            num_ranks=bench.num_ranks,
            num_local=bench.shape.experts // bench.num_ranks,
            top_k=bench.shape.top_k,
            axis_name=AXIS,
            engine=bench.engine if kernel and self.backend.kernel_slot else None,
        )

    def name(self, what: str, wire: str) -> str:
        kernel = self.exchange(kernel=True).engine is not None
        return f"{what} {self.backend.name} {wire}" + (" (kernel)" if kernel else "")

    def wanted(self, what: str, wire: str) -> bool:
        return self.at.bench.wants(self.name(what, wire), self.at.tokens)

    def figures(self) -> list[Figure]:
        """Those that are wanted."""
        exchange = self.exchange(kernel=True)
        figures = [self._dispatch(exchange)] if self.wanted("dispatch", self.wire) else []
        back = [wire for wire in COMBINE_WIRES if self.wanted("combine", wire)]
        if back and self.layout.format is None:
            at, plan = self.at, self.at.plan(self.backend, exchange)
            received = Program(at.bench, self._receive, at.inputs, plan)
            figures += [self._combine(wire, plan, received, exchange) for wire in back]
        return figures

    def _dispatch(self, exchange: Exchange) -> Figure:
        at, layout, plan = self.at, self.layout, self.at.plan(self.backend, exchange)

        def dispatch(inputs, plan):
            x, ids, weights = inputs
            flight = start(x, ids, weights, plan, backend=self.backend, exchange=exchange, layout=layout)
            return flight.rows if flight.data is None else flight.data  # apart, one kernel writes both

        calls = at.calls(at.tokens * (at.bench.num_ranks - 1), layout.row_bytes)
        chain = Chain(at.bench, dispatch, at.inputs, plan, calls=calls)
        check = Program(at.bench, functools.partial(self._wrong_bytes, exchange), at.inputs, plan)
        share = lambda wrong, rows: wrong / (rows * layout.payload_bytes) if rows else 0.0  # noqa: E731
        record = self._record("dispatch", self.wire, layout.row_bytes, plan, share, "wrong bytes")
        return Figure(chain, check, record)

    def _receive(self, inputs, plan):
        """The rows that experts would give back if they gave back what they get, and the ids of what arrived."""
        exchange, (x, ids, weights) = self.exchange(kernel=False), inputs
        got = dispatch_payload(x, ids, weights, plan, backend=self.backend, exchange=exchange, layout=self.layout)
        assert isinstance(got.x, jax.Array)  # a float wire
        return jnp.where(jnp.any(got.ids >= 0, axis=1, keepdims=True), got.x, 0), got.ids

    def _combine(self, wire: str, plan: Program, received: Program, exchange: Exchange) -> Figure:
        """The way back in bf16 or in a quantised format."""
        at, hidden = self.at, self.at.bench.shape.hidden
        as_wire = None if wire == "bfloat16" else wire
        row_bytes = 2 * hidden if as_wire is None else row_layout(hidden, wire, 0).row_bytes
        send_back = functools.partial(combine, backend=self.backend, wire=as_wire, exchange=exchange)

        def compare(received, inputs, plan):
            (y, recv_ids), (x, _, weights) = received, inputs
            out = send_back(y, weights, plan, recv_ids=recv_ids, out_dtype=jnp.float32)
            if self.backend.form == "batched":
                times = jnp.sum(jnp.where(plan.target >= 0, weights, 0), axis=1, keepdims=True)
            else:
                times = jnp.sum(plan.member, axis=1, keepdims=True).astype(jnp.float32)
            want = x.astype(jnp.float32) * times
            return jnp.sum((out - want) ** 2), jnp.sum(want**2)

        def step(received, inputs, plan):
            return send_back(received[0], inputs[2], plan, recv_ids=received[1])

        calls = at.calls(at.tokens * (at.bench.num_ranks - 1), row_bytes)
        chain = Chain(at.bench, step, received, at.inputs, plan, calls=calls)
        check = Program(at.bench, compare, received, at.inputs, plan)
        error = lambda wrong, norm: (wrong / norm) ** 0.5 if norm else 0.0  # noqa: E731
        record = self._record("combine", wire, row_bytes, plan, error, "relative error")
        return Figure(chain, check, record)

    def _wrong_bytes(self, exchange: Exchange, inputs, plan):
        """How many of the received data's bytes are not those which their senders packed, and rows received."""
        me, num_local, batched = exchange.rank, exchange.num_local, self.backend.form == "batched"
        x, ids, weights = inputs
        got = dispatch_payload(x, ids, weights, plan, backend=self.backend, exchange=exchange, layout=self.layout)
        rows, _ = pack_rows(x, ids, weights, self.layout, axis_name=AXIS)
        rows, token = lax.all_gather(rows, AXIS), lax.all_gather(plan.src_token, AXIS)  # [R, T, row], [R, S, C]
        if batched:
            token = lax.dynamic_slice_in_dim(token, me() * num_local, num_local, axis=1).swapaxes(0, 1)
        else:
            token = lax.dynamic_index_in_dim(token, me(), axis=1, keepdims=False)
        source = jnp.arange(exchange.num_ranks, dtype=jnp.int32)[:, None]
        valid = (token >= 0).reshape(-1)
        sent = rows[source, jnp.maximum(token, 0)].reshape(-1, self.layout.row_bytes)
        want = jax.tree.leaves(unpack_data(sent, self.layout))
        wrong = jnp.int32(0)
        for a, b in zip(jax.tree.leaves(got.x), want, strict=True):
            a, b = (to_bytes(v.reshape(v.shape[0], -1)) for v in (a, b))
            wrong += jnp.sum((a != b) & valid[:, None], dtype=jnp.int32)
        return wrong, jnp.sum(valid, dtype=jnp.int32)

    def _record(self, what, wire, row_bytes, plan: Program, error_of, error_name):
        """(seconds, two numbers of the check) -> the record."""
        at, bench = self.at, self.at.bench
        several = bench.num_ranks > 1
        peer = at.peer(row_bytes) if several else None
        exchange = self.exchange(kernel=True)
        sizes = (self.backend.form, at.tokens, bench.shape.top_k, self.layout.data_bytes)
        once = what == "dispatch" and exchange.engine is not None and exchange.engine.fans_out(exchange, *sizes)

        def record(seconds: float, found: list[float]) -> Record:
            counts = np.asarray(plan.result.counts).reshape(bench.num_ranks, bench.num_ranks, -1).sum(-1)
            logical = counts.sum(axis=1)  # of each source
            if once:
                counts = rows_once(plan.result, exchange.num_local)
            remote = int((counts.sum(axis=1) - np.diag(counts)).max())
            return _record(
                at,
                self.name(what, wire),
                seconds,
                remote if several else int(logical.max()),
                row_bytes,
                peer=peer and peer.seconds,
                error=error_of(*found),
                error_name=error_name,
                what=what,
                wire=wire,
                backend=self.backend.name,
                logical_gbps=int(logical.max()) * row_bytes / seconds / 1e9,
            )

        return record


def rows_once(plan: Plan, num_local: int) -> np.ndarray:
    """Tokens of each rank (first axis) with an expert on each rank, of a batched plan of all ranks: int [R, R]."""
    target, slot = np.asarray(plan.target), np.asarray(plan.slot)  # [R, T, K]
    owner = np.where(slot >= 0, target // num_local, -1)
    return np.stack([(owner == rank).any(axis=2).sum(axis=1) for rank in range(len(target))], axis=1)


def _record(
    at: Tokens,
    name: str,
    seconds: float | None,
    rows: int,
    row_bytes: int,
    *,
    peer: float | None = None,
    peer_name: str = "lax.all_to_all (dense, the same rows)",
    peer_rows: int | None = None,
    error: float | None = None,
    error_name: str = "",
    case: str = "",
    **parameters: Any,
) -> Record:
    """rows: that leave a rank in one call. peer: seconds, for peer_rows (None: T rows to every other rank)."""
    bench = at.bench
    several = bench.num_ranks > 1
    rate = lambda rows, s: rows * row_bytes / s / 1e9  # noqa: E731
    dense = at.tokens * (bench.num_ranks - 1)
    return Record(
        name=name,
        case=bench.case(at.tokens) + case,
        value=rate(rows, seconds) if seconds else None,
        unit="GB/s of remote bytes" if several else "GB/s of local bytes",
        seconds=seconds,
        ceiling=LINK_GBPS if several else None,
        ceiling_name="NVLink 4, one direction" if several else "",
        peer=rate(peer_rows or dense, peer) if peer else None,
        peer_name=peer_name if peer else "",
        error=error,
        error_name=error_name,
        meaningful=bench.meaningful,
        parameters=bench.facts(at.tokens) | dict(remote_rows=rows, row_bytes=row_bytes, peer_seconds=peer) | parameters,
    )


def ragged(at: Tokens, slices: int) -> list[Figure]:
    """`ragged_all_to_all` of T rows to every rank, in `slices` slices for each, against lax.ragged_all_to_all."""
    bench, num_ranks, tokens = at.bench, at.bench.num_ranks, at.tokens
    size, pieces = tokens // slices, "1 slice" if slices == 1 else f"{slices} slices"
    name, more = f"ragged_all_to_all, {pieces} for each rank", f" slices={slices}"
    if not bench.wants(name, tokens, more):
        return []

    def tables():
        entry = jnp.arange(num_ranks * slices, dtype=jnp.int32)
        there = lax.axis_index(AXIS).astype(jnp.int32) * tokens + entry % slices * size
        sizes = jnp.full_like(entry, size)
        return entry * size, sizes, there, sizes

    def exchange(implementation, carry):  # what was received is sent next
        x, into = carry
        return ragged_all_to_all(x, into, *tables(), axis_name=AXIS, implementation=implementation), x

    def rows(inputs):
        x = jnp.concatenate([inputs[0]] * num_ranks)
        return x, jnp.zeros_like(x)

    def wrong(both):
        x, into = both
        got = ragged_all_to_all(x, into, *tables(), axis_name=AXIS)
        want = lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True)
        return jnp.mean((got != want).astype(jnp.float32)), jnp.ones(())

    row_bytes, remote = 2 * bench.shape.hidden, tokens * max(num_ranks - 1, 1)
    make = Program(bench, rows, at.inputs)
    chain = Chain(bench, functools.partial(exchange, None), make, calls=at.calls(remote, row_bytes), waits=False)
    xla = None
    if jax.default_backend() == "gpu" and num_ranks > 1:  # milliseconds each
        xla = Chain(bench, functools.partial(exchange, "lax"), make, calls=2, per_turn=2, waits=False)

    def record(seconds: float, found: list[float]) -> Record:
        return _record(
            at,
            name,
            seconds,
            remote,
            row_bytes,
            peer=xla and xla.seconds,
            peer_name=f"lax.ragged_all_to_all, {pieces}",
            error=found[0] / found[1],
            error_name="wrong values",
            case=more,
            what="ragged_all_to_all",
            wire="bfloat16",
            backend=f"ragged_all_to_all, {pieces}",
        )

    return [Figure(chain, Program(bench, wrong, make), record)]


def torch_name(what: str, wire: str) -> str:
    return f"{what}, rows of {wire}"


def torch_records(at: Tokens, found: dispatch_peers.Found, lengths: dict[str, int]) -> list[Record]:
    """What PyTorch took for the same bytes. lengths: of a dispatched row of each wire format."""
    records = []
    for what, reason in found.reasons.items():
        for wire, row_bytes in lengths.items():
            size = (what, at.tokens, row_bytes)
            if size in found.asked and at.bench.wants(torch_name(what, wire), at.tokens):
                seconds = found.seconds.get(size)
                records.append(
                    _record(
                        at,
                        torch_name(what, wire),
                        seconds,
                        at.tokens * (at.bench.num_ranks - 1),
                        row_bytes,
                        case="" if seconds else f" not measured: {reason}",
                        what="dispatch",
                        wire=wire,
                        backend=what,
                    )
                )
    return records


def cases(tokens, wires, backends):
    """(backend name, wire, tokens) of all figures."""
    for t in tokens:
        for name in backends:
            if get_backend(name).form == "standard" or t <= DECODE_TOKENS:
                yield from ((name, wire, t) for wire in wires)


def run(
    smoke: bool,
    progress: Progress | None = None,
    tokens: tuple[int, ...] = TOKENS,
    *,
    only: re.Pattern[str] | None = None,
) -> list[Record]:
    """All figures on all devices of this process (at most 8); of those that `only` names.

    smoke: tiny shapes, correctness only.
    """
    progress = progress or NoProgress()
    if smoke:
        ranks = min(8, len(jax.devices()))
        bench = Bench(Shape(256, 4 * ranks, 2), Timer(1, 1), meaningful=False, only=only)
        tokens, wires, backends, slices = (8,), ("bfloat16", "mxfp8"), SMOKE_BACKENDS, (1, 4)
    else:
        bench = Bench(Shape(), Timer(), meaningful=True, only=only)
        wires, backends, slices = WIRES, MEASURED, (1, 32)
    progress.start(2 * len(tokens))
    lengths = {wire: row_layout(bench.shape.hidden, wire, bench.shape.top_k).row_bytes for wire in wires}
    names = [torch_name(what, wire) for what in dispatch_peers.LIMIT_SECONDS for wire in wires]
    skip = smoke or not any(bench.wants(name, t) for name in names for t in tokens)
    torch = bench.pool.submit(
        dispatch_peers.torch_seconds, tokens, sorted(set(lengths.values())), bench.num_ranks, skip=skip
    )
    records, waiting, ready = [], list(tokens), []

    def keep(record: Record) -> None:
        records.append(record)
        progress.record(record)

    while waiting or ready:
        # PyTorch has the GPUs for about as long as it takes to lower the programs of all T, which needs one core.
        while waiting and not (ready and torch.done()):
            t = waiting.pop(0)
            progress.step(f"T={t}: compiling")
            at, figures = Tokens(bench, t), []
            for name, wire, _ in cases((t,), wires, backends):
                figures += Case(at, get_backend(name), wire).figures()
            for n in slices:
                figures += ragged(at, n) if smoke or t in RAGGED_TOKENS else []
            ready.append((at, figures))
        bench.compile()
        found = torch.result()
        while ready:
            at, figures = ready.pop(0)
            progress.step(f"T={at.tokens}: measuring")
            while figures:
                keep(figures.pop(0).measure())  # its programs and their results are let go
            for record in torch_records(at, found, lengths):
                keep(record)
    return records


def plot(records: list[Record], path: str | Path) -> None:
    """Bandwidth over the tokens of one rank: a panel for each direction and wire format, a line for each backend."""
    lines(
        sorted(records, key=lambda r: ["dispatch", "combine", "ragged_all_to_all"].index(r.parameters["what"])),
        path,
        x="T",
        x_label="tokens on one rank",
        title="dispatch and combine",
        panel=lambda r: f"{r.parameters['what']}, {r.parameters['wire']}",
        label=lambda r: r.parameters["backend"],
        dashed=lambda r: r.parameters["backend"] in (dispatch_peers.NCCL, dispatch_peers.NVSHMEM),
        columns=3,
    )
