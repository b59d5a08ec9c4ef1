"""`jmoe bench dispatch`: dispatch and combine over the links, every backend and wire format, with peers.

T tokens on one rank, D hidden size, K experts per token, R ranks.

A dispatch is timed from bf16 rows to received rows (quantising and packing included), a combine from the experts' rows
to the owner's sums; routing and plan are made before. Remote bytes are what has to cross the link in one direction: a
row for each (token, other rank), the most that any rank sends. Logical bytes count the own rank too. A collective moves
its padding as well, which is not counted in its favour. Each figure is the median of chains of calls inside one jit.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmoe import compat
from jmoe.backends import combine, dispatch_payload, exchange_for, get_backend, start
from jmoe.backends.engine import remote_write_engine
from jmoe.payload import row_layout, to_bytes

from .common import LINK_GBPS, NoProgress, Progress, Record
from .plot import lines

AXIS = "ep"
DECODE_TOKENS = 256  # the batched form is for decoding
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768)
WIRES = ("bfloat16", "mxfp8", "nvfp4_token", "fp8_128")
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


def _mapped(mesh, function):
    """`function` of one rank's arrays, jitted over the mesh; outside, arrays have a leading axis of ranks."""

    def local(*args):
        return jax.tree.map(lambda v: v[None], function(*jax.tree.map(lambda v: v[0], args)))

    return jax.jit(compat.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))


def _put(mesh, *arrays):
    return [jax.device_put(a, NamedSharding(mesh, P(AXIS))) for a in arrays]


def _after(small: jax.Array, result: jax.Array) -> jax.Array:
    """`small` (int32), which nobody can compute before `result`: adds a 0 that the compiler cannot know."""
    first = lax.bitcast_convert_type(result.reshape(-1)[:1].astype(jnp.float32), jnp.int32)[0]
    return small + (first == jnp.int32(0x7FC12345)).astype(jnp.int32)


def _seconds(mesh, step, arrays, small, timer: Timer) -> float:
    """Median seconds of one `step(small, *arrays) -> array`, in chains of dependent calls on all ranks."""

    def chain(small, *arrays):
        out = None
        for _ in range(timer.calls):
            out = step(small, *arrays)
            small = _after(small, out)
        assert out is not None  # at least one call
        return out.reshape(-1)[:1], small

    return _time(_mapped(mesh, chain), (small, *arrays), timer)


def _time(run, arguments, timer: Timer) -> float:
    jax.block_until_ready(run(*arguments))
    seconds = []
    for _ in range(timer.repeats):
        begin = time.perf_counter()
        jax.block_until_ready([run(*arguments) for _ in range(timer.chains)])
        seconds.append((time.perf_counter() - begin) / (timer.chains * timer.calls))
    return statistics.median(seconds)


def _tokens(rng, shape: Shape, num_ranks: int, tokens: int):
    """ids int32 [R, T, K] of a uniform router, weights and rows."""
    ids = np.argsort(rng.random((num_ranks * tokens, shape.experts), np.float32), axis=-1)[:, : shape.top_k]
    ids = ids.reshape(num_ranks, tokens, shape.top_k).astype(np.int32)
    weights = rng.random(ids.shape, np.float32)
    return ids, weights


def _rows_sent(ids, num_local: int, num_ranks: int, batched: bool) -> tuple[int, int]:
    """(remote, logical) rows of the rank that sends most."""
    owner = ids // num_local  # [R, T, K]
    if batched:
        sent = np.stack([(owner == r).sum(axis=(1, 2)) for r in range(num_ranks)], axis=1)
    else:
        sent = np.stack([(owner == r).any(axis=2).sum(axis=1) for r in range(num_ranks)], axis=1)
    logical = sent.sum(axis=1)
    return int((logical - np.diag(sent)).max()), int(logical.max())


def _wrong_bytes(mesh, backend, kernel, portable, layout, arrays) -> float:
    """Share of received bytes in which the exchange differs from the portable collective of the same backend."""

    def differing(ids, weights, x):
        plan = backend.plan(ids, kernel)
        send = functools.partial(dispatch_payload, x, ids, weights, plan, backend=backend, layout=layout)
        got, want = send(exchange=kernel), send(exchange=portable)
        valid = jnp.any(want.ids >= 0, axis=1)
        wrong = 4 * (jnp.sum(got.ids != want.ids) + jnp.sum(got.weights != want.weights))
        for a, b in zip(jax.tree.leaves(got.x), jax.tree.leaves(want.x), strict=True):
            a, b = (to_bytes(v.reshape(v.shape[0], -1)) for v in (a, b))
            wrong += jnp.sum((a != b) & valid[:, None])
        return wrong, jnp.sum(valid) * layout.row_bytes

    wrong, total = (float(np.asarray(v, np.float64).sum()) for v in _mapped(mesh, differing)(*arrays))
    return wrong / total if total else 0.0


def _combine_error(mesh, backend, exchange, layout, arrays) -> float:
    """Relative error of dispatch and combine around experts that return their input."""

    def compare(ids, weights, x):
        plan = backend.plan(ids, exchange)
        shared = dict(backend=backend, exchange=exchange)
        got = dispatch_payload(x, ids, weights, plan, layout=layout, **shared)
        assert isinstance(got.x, jax.Array)  # a float wire
        out = combine(got.x, weights, plan, recv_ids=got.ids, out_dtype=jnp.float32, **shared)
        if backend.form == "batched":
            times = jnp.sum(jnp.where(plan.target >= 0, weights, 0), axis=1, keepdims=True)
        else:
            times = jnp.sum(plan.member, axis=1, keepdims=True).astype(jnp.float32)
        want = x.astype(jnp.float32) * times
        return jnp.sum((out - want) ** 2), jnp.sum(want**2)

    error, norm = (float(np.asarray(v, np.float64).sum()) for v in _mapped(mesh, compare)(*arrays))
    return float(np.sqrt(error / norm)) if norm else 0.0


def _all_to_all_seconds(mesh, row_bytes: int, tokens: int, timer: Timer) -> float:
    """NCCL's dense exchange of the same rows: T rows of `row_bytes` to every rank."""
    num_ranks = mesh.devices.size
    rows = np.random.default_rng(0).integers(0, 256, (num_ranks, num_ranks * tokens, row_bytes), np.uint8)

    def chain(rows):
        for _ in range(timer.calls):
            rows = lax.all_to_all(rows, AXIS, 0, 0, tiled=True)
        return rows[:1, :1]

    return _time(_mapped(mesh, chain), _put(mesh, rows), timer)


def cases(tokens, wires, backends):
    """(backend name, wire, tokens) of all figures; only backends with a kernel take every wire format."""
    for t in tokens:
        for name in backends:
            if get_backend(name).form == "batched" and t > DECODE_TOKENS:
                continue
            for wire in wires if get_backend(name).kernel_slot else wires[:1]:
                yield name, wire, t


def run(smoke: bool, progress: Progress | None = None) -> list[Record]:
    """All figures on all devices of this process (at most 8). smoke: tiny shapes, correctness only."""
    progress = progress or NoProgress()
    devices = jax.devices()[:8]
    num_ranks = len(devices)
    mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
    shape = Shape(256, 4 * num_ranks, 2) if smoke else Shape(experts=256 // num_ranks * num_ranks)
    wires = ("bfloat16", "mxfp8") if smoke else WIRES
    timer = Timer(1, 1, 1) if smoke else Timer()
    engine = remote_write_engine() if num_ranks > 1 else None
    todo = list(cases((8,) if smoke else TOKENS, wires, SMOKE_BACKENDS if smoke else MEASURED))
    progress.start(len(todo))
    peers: dict[tuple[int, int], float] = {}
    records = []
    for name, wire, tokens in todo:
        progress.step(f"{name} {wire} T={tokens}")
        records += _measure(mesh, shape, name, wire, tokens, engine, timer, peers, smoke)
    return records


def _measure(mesh, shape, name, wire, tokens, engine, timer, peers, smoke) -> list[Record]:
    backend = get_backend(name)
    num_ranks = mesh.devices.size
    num_local = shape.experts // num_ranks
    make = functools.partial(
        exchange_for,
        backend,
        tokens=tokens,
        num_ranks=num_ranks,
        num_local=num_local,
        top_k=shape.top_k,
        axis_name=AXIS,
    )
    exchange, portable = make(engine=engine if backend.kernel_slot else None), make()
    layout = row_layout(shape.hidden, wire, shape.top_k)
    rng = np.random.default_rng(tokens)
    ids, weights = _tokens(rng, shape, num_ranks, tokens)
    remote, logical = _rows_sent(ids, num_local, num_ranks, backend.form == "batched")
    x = rng.standard_normal((num_ranks, tokens, shape.hidden), np.float32).astype(jnp.bfloat16)
    arrays = _put(mesh, ids, weights, x)
    plan = _mapped(mesh, lambda ids: backend.plan(ids, exchange))(arrays[0])

    def dispatch(small, ids, weights, x, plan):
        plan = dataclasses.replace(plan, counts=plan.counts + small[0], slot=plan.slot + small[0])
        flight = start(x, ids, weights, plan, backend=backend, exchange=exchange, layout=layout)
        return flight.rows if flight.data is None else flight.data

    small = _put(mesh, np.zeros((num_ranks, 1), np.int32))[0]
    key = (layout.row_bytes, tokens)
    if key not in peers:
        peers[key] = _all_to_all_seconds(mesh, layout.row_bytes, tokens, timer)
    case = f"T={tokens} D={shape.hidden} K={shape.top_k} R={num_ranks}"
    common = dict(T=tokens, D=shape.hidden, K=shape.top_k, R=num_ranks, wire=wire, backend=name)

    def record(what, seconds, row_bytes, peer_seconds, error, error_name):
        rate = lambda rows, s: rows * row_bytes / s / 1e9  # noqa: E731
        rows = remote if num_ranks > 1 else logical
        return Record(
            name=f"{what} {name} {wire}" + (" (kernel)" if exchange.engine is not None else ""),
            case=case,
            value=rate(rows, seconds),
            unit="GB/s of remote bytes" if num_ranks > 1 else "GB/s of local bytes",
            seconds=seconds,
            ceiling=LINK_GBPS if num_ranks > 1 else None,
            ceiling_name="NVLink 4, one direction" if num_ranks > 1 else "",
            peer=rate(tokens * (num_ranks - 1), peer_seconds) if num_ranks > 1 else None,
            peer_name="lax.all_to_all (dense, the same rows)" if num_ranks > 1 else "",
            error=error,
            error_name=error_name,
            meaningful=not smoke,
            parameters=dict(common, what=what, logical_gbps=rate(logical, seconds), remote_rows=remote),
        )

    seconds = _seconds(mesh, dispatch, (*arrays, plan), small, timer)
    wrong = _wrong_bytes(mesh, backend, exchange, portable, layout, arrays)
    records = [record("dispatch", seconds, layout.row_bytes, peers[key], wrong, "wrong bytes")]
    if wire != "bfloat16":
        return records

    y = _mapped(mesh, lambda x, plan: backend.send(x, plan, portable).reshape(-1, shape.hidden))(arrays[2], plan)

    def give_back(small, y, weights, plan):
        plan = dataclasses.replace(plan, slot=plan.slot + small[0])
        recv_ids = jnp.zeros((y.shape[0], 1), jnp.int32)
        return combine(y, weights, plan, backend=backend, exchange=exchange, recv_ids=recv_ids)

    seconds = _seconds(mesh, give_back, (y, arrays[1], plan), small, timer)
    error = _combine_error(mesh, backend, exchange, layout, arrays)
    row_bytes = 2 * shape.hidden
    key = (row_bytes, tokens)
    if key not in peers:
        peers[key] = _all_to_all_seconds(mesh, row_bytes, tokens, timer)
    return [*records, record("combine", seconds, row_bytes, peers[key], error, "relative error")]


def plot(records: list[Record], path: str | Path) -> None:
    """Bandwidth over the tokens of one rank, a line for each backend and wire format, peers dashed."""
    lines(records, path, x="T", x_label="tokens on one rank", title="dispatch and combine")
