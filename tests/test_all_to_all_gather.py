"""The combine that gathers the experts' rows and sums them: every warpgroup's work run on the host, and its seam."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_helpers import ROUTINGS, garbage_engine, mesh_of, routing
from jax.sharding import PartitionSpec
from permute_emulator import Threads
from quantize_emulator import POISON, Memory
from quantize_numpy import U

from jmoe import backends, compat
from jmoe.backends.engine import ENGINE, GATHERING_CAPACITY, reduce_gathering
from jmoe.caps import DeviceCaps
from jmoe.config import MoEConfig
from jmoe.experts import ExpertWeights, apply_experts, apply_experts_unsummed
from jmoe.layer import build_moe, moe
from jmoe.params import init_params
from jmoe.payload import row_layout
from pallas_kernels.all_to_all import mosaic_sum as sums
from pallas_kernels.permute.rows import combine_rows

needs_kernels = pytest.mark.skipif(not compat.KERNELS_SUPPORTED, reason=compat.KERNELS_REASON)


class Warpgroup:
    """Runs the programs of one warpgroup, with its tables in shared memory."""

    def __init__(self, group):
        self.group, self.machine = group, Threads(1, sums.THREADS)
        self.tables = [np.full(4 * group.table_words, POISON, np.uint8) for _ in range(2)]

    def turn(self, i, source, out, rows, places, weights, first, count, region=None):
        """As the kernel's `gather` and `add`: the rows of turn i, and what turn i + 1 will need."""
        Memory.machine, o, g = self.machine, self.machine, self.group
        now, following = (Memory(self.tables[(i + s) % 2], shared=True) for s in (0, 1))
        weights = None if weights is None else Memory(data(weights))
        with np.errstate(all="ignore"):
            found = sums.fetch(o, g, U(first), U(count), Memory(data(places)), weights, region)
            sums.add_group(o, g, now, Memory(data(source)), Memory(out), U(rows))
            sums.keep(o, g, following, found)

    def places(self, i, row):
        """The places of a row of turn i, as the kernel looks them up."""
        return self.tables[i % 2].view(np.int32)[row * self.group.warps * self.group.stride :]


def data(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def emulate(d, y, position, weights, slot, counts, wire, out_dtype):
    """What `combine_gathered` does on all ranks, sender by sender and adder by adder; arrays of all ranks."""
    ranks, width, top_k = d.num_ranks, y.shape[-1], position.shape[-1]
    i32 = np.int32
    sent = sums.Group(d.rows, top_k, width, y.dtype.name, wire.name)
    added = sums.Group(d.group, ranks, width, wire.name, out_dtype.name, weighted=False, fresh=True)
    arrivals = np.full((ranks, ranks * d.capacity, width), np.nan, wire)
    arrived = np.zeros((ranks, ranks, d.num_chunks), int)
    written = np.zeros(arrivals.shape[:2], int)
    for me in range(ranks):
        going = [i32(counts[(me + s) % ranks, me]) for s in range(1, ranks + 1)]
        for sender in range(d.blocks * d.senders):
            group, sender = Warpgroup(sent), i32(sender)
            trips = i32(d.sender_trips(sender, going))
            for i in range(-1, trips):
                peer, chunk, rows, _ = (int(v) for v in d.unit(i32(i), sender, going, trips, i32(me)))
                _, _, more, first = (int(v) for v in d.unit(i32(i + 1), sender, going, trips, i32(me)))
                out = np.full((d.rows, width), np.nan, wire).view(np.uint8).reshape(-1)
                group.turn(i, y[me], out, rows, position[me], weights[me], first, more)
                if rows:
                    there = me * d.capacity + chunk * d.rows
                    arrivals[peer, there : there + rows] = out.view(wire).reshape(d.rows, width)[:rows]
                    written[peer, there : there + rows] += 1
                    arrived[peer, me, chunk] += 1
    results = np.full((ranks, d.tokens, width), np.nan, out_dtype)
    for me in range(ranks):
        memory = data(results[me])
        turns = np.zeros(d.tokens, int)
        for adder in range(d.blocks * d.adders):
            group, adder = Warpgroup(added), i32(adder)
            trips = i32(d.adder_trips(adder))
            for i in range(-1, trips):
                token, rows = (int(v) for v in d.tokens_of(i32(i), adder, trips))
                following, more = (int(v) for v in d.tokens_of(i32(i + 1), adder, trips))
                for place, rank in ((group.places(i, t)[r], r) for t in range(rows) for r in range(ranks)):
                    assert place < 0 or arrived[me, rank, int(d.chunk_of(i32(place), i32(rank)))] == 1
                out = memory[token * width * out_dtype.itemsize :]
                group.turn(i, arrivals[me], out, rows, slot[me], None, following, more, d.capacity)
                turns[token : token + rows] += 1
        assert (turns == 1).all()
        results[me] = memory.view(out_dtype).reshape(d.tokens, width)
    sizes = counts.T[..., None]  # [owner's view: rank r stores counts[owner, r] rows at the owner]
    expected = (np.arange(d.capacity) < sizes.transpose(1, 0, 2)).reshape(ranks, -1)
    np.testing.assert_array_equal(written, expected)
    return results


def exchange(rng, ranks, tokens, width, top_k, capacity, dtype, share):
    """Rows as experts leave them on all ranks: NaN wherever nothing may be read."""
    slot = np.full((ranks, tokens, ranks), -1, np.int32)
    counts = np.zeros((ranks, ranks), np.int32)
    for owner in range(ranks):
        for r in range(ranks):
            chosen = np.flatnonzero(rng.random(tokens) < share)[:capacity]
            slot[owner, chosen, r] = np.arange(len(chosen))
            counts[owner, r] = len(chosen)
    places = ranks * capacity * top_k
    position = np.full((ranks, ranks * capacity, top_k), -1, np.int32)
    y = np.full((ranks, places, width), np.nan, dtype)
    for r in range(ranks):
        real = (np.arange(capacity) < counts[:, r, None]).reshape(-1)
        used = real[:, None] & (rng.random((ranks * capacity, top_k)) < 0.6)
        position[r][used] = rng.permutation(places)[: used.sum()]
        y[r, position[r][used]] = rng.standard_normal((used.sum(), width))
    weights = np.where(position >= 0, rng.standard_normal(position.shape), np.nan).astype(np.float32)
    return y, position, weights, slot, counts


def in_two_steps(y, position, weights, slot, capacity, wire, out_dtype):
    """The sums of each rank by `permute.combine_rows`, then the owners' sums over ranks."""
    ranks, tokens, _ = slot.shape
    rows = [
        np.asarray(combine_rows(*(jnp.asarray(a[r]) for a in (y, position, weights)), out_dtype=wire))
        for r in range(ranks)
    ]
    out = np.zeros((ranks, tokens, y.shape[-1]), np.float32)
    for me in range(ranks):
        for r in range(ranks):
            sent = slot[me, :, r] >= 0
            out[me, sent] += rows[r][me * capacity + slot[me, sent, r]].astype(np.float32)
    return out.astype(out_dtype)


@needs_kernels
@pytest.mark.parametrize(
    "ranks, tokens, width, top_k, capacity, dtype, wire, out, blocks",
    [
        (2, 37, 264, 8, 37, "bfloat16", "bfloat16", "bfloat16", 1),  # whole chunks and a rest
        (4, 21, 2880, 4, 21, "bfloat16", "bfloat16", "float32", 2),  # pieces that do not divide among the warps
        (2, 9, 64, 22, 9, "bfloat16", "bfloat16", "bfloat16", 3),  # more terms than loads in flight
        (8, 19, 24, 3, 6, "float32", "float32", "bfloat16", 1),  # overflow
        (3, 1, 256, 1, 1, "float16", "float16", "float32", 1),
        (2, 5, 7168, 8, 5, "bfloat16", "float32", "float32", 4),  # one row to a chunk
    ],
)
def test_warpgroups_together_give_the_bits_of_the_two_steps(
    rng, ranks, tokens, width, top_k, capacity, dtype, wire, out, blocks
):
    from pallas_kernels.all_to_all.mosaic_combine_gather import Division

    wire, out = jnp.dtype(wire), jnp.dtype(out)
    for share, (senders, adders) in ((0.7, (2, 2)), (1.0, (3, 1)), (0.0, (1, 2))):
        arrays = exchange(rng, ranks, tokens, width, top_k, capacity, jnp.dtype(dtype), share)
        sizes = dict(tokens=tokens, capacity=capacity, num_ranks=ranks, row_bytes=width * wire.itemsize, blocks=blocks)
        d = Division.of(**sizes, senders=senders, adders=adders)
        got = emulate(d, *arrays, wire, out)
        want = in_two_steps(*arrays[:4], capacity, wire, out)
        assert np.isfinite(want.astype(np.float32)).all()
        np.testing.assert_array_equal(data(got), data(want))


@needs_kernels
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens, blocks", [(8192, 132), (8192, 114), (128, 128), (1, 1)])
def test_every_chunk_is_sent_once_and_every_sender_serves_all_ranks(ranks, tokens, blocks):
    from pallas_kernels.all_to_all.mosaic_combine_gather import Division

    for row_bytes in (4096, 14336):
        sizes = dict(tokens=tokens, capacity=tokens, num_ranks=ranks, row_bytes=row_bytes, blocks=blocks)
        d = Division.of(**sizes, senders=2, adders=2)
        going = [np.int32(tokens - 3 * s if tokens > 30 else tokens) for s in range(ranks)]
        sender = np.arange(d.blocks * d.senders, dtype=np.int32)
        trips = np.asarray(d.sender_trips(sender, going))
        turn = np.arange(trips.max(), dtype=np.int32)[:, None]
        peer, chunk, rows, first = (np.asarray(v) for v in d.unit(turn, sender[None], going, trips[None], np.int32(1)))
        some = rows > 0
        covered = np.zeros((ranks, tokens), int)
        for p, f, n in zip(peer[some], first[some] - peer[some] * tokens, rows[some], strict=True):
            covered[p, f : f + n] += 1
        for s, size in enumerate(going):
            assert (covered[(2 + s) % ranks] == (np.arange(tokens) < size)).all()
        if tokens == 8192:
            assert (trips.max() - trips[: d.takers].min()) <= 1 and d.takers > 0.96 * len(sender)
            assert all(len(np.unique(peer[:ranks, s])) == ranks for s in range(d.takers))


D, F, E, K, RANKS = 64, 32, 8, 3, 4
CONFIG = MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, num_experts_per_tok=K)
STANDARD = tuple(b.name for b in backends.BACKENDS.values() if b.form == "standard" and b.name != "local")


def case(name, tokens, seed=0):
    """x, ids, weights, gate and up, and down, of all ranks."""
    rng = np.random.default_rng(seed)
    n = RANKS * tokens
    ids = routing(name, rng, RANKS, tokens=tokens, num_experts=E, top_k=K) if n else np.zeros((0, K), np.int32)
    return (
        jnp.asarray(rng.standard_normal((n, D)), jnp.bfloat16),
        jnp.asarray(ids),
        jnp.asarray(rng.random((n, K)), jnp.float32),
        jnp.asarray(rng.standard_normal((E, 2, F, D)) / 8, jnp.bfloat16),
        jnp.asarray(rng.standard_normal((E, D, F)) / 6, jnp.bfloat16),
    )


def layer(name, tokens, *, summed, wire=None, engine=None, gradient=False, config=CONFIG):
    """Dispatch, experts and combine on all ranks; the experts' outputs summed before `combine`, or by it."""
    backend, layout = backends.get_backend(name), row_layout(D, "bfloat16", K)
    exchange = backends.exchange_for(
        backend, tokens=tokens, num_ranks=RANKS, num_local=E // RANKS, top_k=K, axis_name="ep", engine=engine
    )

    def run(x, ids, weights, gate_up, down):
        params = ExpertWeights(gate_up, down)
        plan = backend.plan(ids, exchange)
        got = backends.dispatch_float(x, ids, weights, plan, backend=backend, exchange=exchange, layout=layout)
        real = jnp.any(got.ids >= 0, axis=1, keepdims=True)
        arrived = jnp.where(real, got.x, jnp.nan), got.ids, got.weights, params, config
        if summed:
            whole = name == "allgather_reducescatter" or wire is not None
            y = apply_experts(*arrived, out_dtype=jnp.float32 if whole else jnp.bfloat16)
        else:
            y = apply_experts_unsummed(*arrived)
        back = dict(backend=backend, exchange=exchange, recv_ids=got.ids, wire=wire, out_dtype=jnp.float32)
        return backends.combine(y, weights, plan, **back)

    def gradients(x, ids, weights, *params):
        loss = lambda x, weights, *params: jnp.sum(jnp.sin(run(x, ids, weights, *params)))  # noqa: E731
        return jax.grad(loss, (0, 1, 2, 3))(x, weights, *params)

    split = PartitionSpec("ep")
    function = gradients if gradient else run
    return jax.jit(compat.shard_map(function, mesh=mesh_of(RANKS), in_specs=split, out_specs=split))


def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_array_equal(data(x), data(y))


@pytest.mark.parametrize("wire", [None, "mxfp8"])
@pytest.mark.parametrize("name", STANDARD)
def test_every_backend_takes_rows_that_are_yet_to_be_summed(name, wire):
    tokens = 6
    want, got = (layer(name, tokens, summed=summed, wire=wire) for summed in (True, False))
    for router in ROUTINGS:
        arrays = case(router, tokens)
        same_bits(got(*arrays), want(*arrays))


def gathering_engine(monkeypatch, calls, *, refuses=False):
    """The engine's own way to its kernel, in whose place the portable collectives move what is summed first."""
    mosaic = pytest.importorskip("pallas_kernels.all_to_all.mosaic_combine_gather")
    backend, portable = backends.get_backend("nvlink_one_sided"), garbage_engine("nvlink_one_sided")

    def moved(y, position, weights, slot, counts, *, axis_name, capacity, wire_dtype, out_dtype):
        calls.append((y.shape, position.shape))
        assert (axis_name, capacity) == ("ep", slot.shape[0]) and counts.shape == (RANKS,)
        rows = combine_rows(y, position, weights, out_dtype=wire_dtype)
        back = jax.lax.all_to_all(rows.reshape(RANKS, capacity, -1), axis_name, 0, 0)
        total = jnp.zeros((slot.shape[0], y.shape[1]), jnp.float32)
        for r in range(RANKS):
            place = slot[:, r]
            total = total + jnp.where(place[:, None] >= 0, back[r][jnp.maximum(place, 0)].astype(jnp.float32), 0)
        return total.astype(out_dtype)

    monkeypatch.setattr(mosaic, "combine_gathered", moved)
    if refuses:
        monkeypatch.setattr(mosaic, "reason_not", lambda *_: "it is asked to refuse")
    assert backend.kernel_slot
    return portable, dataclasses.replace(portable, reduce_unsummed=reduce_gathering)


@needs_kernels
@pytest.mark.parametrize("tokens", [6, 1, 0])
def test_an_engine_that_sums_gives_the_bits_of_the_two_steps(monkeypatch, tokens):
    calls = []
    engines = gathering_engine(monkeypatch, calls)
    want, got = (layer("nvlink_one_sided", tokens, summed=False, engine=engine) for engine in engines)
    for router in ROUTINGS:
        arrays = case(router, tokens)
        same_bits(got(*arrays), want(*arrays))
    assert len(calls) == (1 if tokens else 0)  # traced once; of no tokens there is nothing to send


@needs_kernels
def test_a_gradient_is_that_of_the_two_steps(monkeypatch):
    calls = []
    engines = gathering_engine(monkeypatch, calls)
    want, got = (layer("nvlink_one_sided", 6, summed=False, engine=engine, gradient=True) for engine in engines)
    arrays = case("uniform", 6)
    grads = got(*arrays)
    same_bits(grads, want(*arrays))
    assert len(calls) == 1 and all(np.abs(np.asarray(g, np.float32)).sum() > 0 for g in grads)


@needs_kernels
def test_what_the_kernel_cannot_sum_is_summed_before_it(monkeypatch):
    """Rows that it refuses, a quantised wire, and a hidden size of which the last columns are padding."""
    calls = []
    engines = gathering_engine(monkeypatch, calls, refuses=True)
    arrays = case("uniform", 6)
    same_bits(*(layer("nvlink_one_sided", 6, summed=False, engine=engine)(*arrays) for engine in engines))
    portable, engine = gathering_engine(monkeypatch, calls)
    narrow = dataclasses.replace(CONFIG, hidden_size_unpadded=D - 8)
    for how in (dict(wire="mxfp8"), dict(config=narrow)):
        same_bits(*(layer("nvlink_one_sided", 6, summed=False, engine=e, **how)(*arrays) for e in (portable, engine)))
    assert not calls


@needs_kernels
def test_what_the_kernel_cannot_sum_is_named():
    from pallas_kernels.all_to_all.mosaic_combine_gather import combine_gathered, reason_not

    bf16, place = jnp.bfloat16, lambda k: jnp.zeros((4, k), jnp.int32)
    for width in (2048, 2880, 4096, 7168):
        for k in (1, 8, 22):
            assert reason_not(jnp.zeros((4, width), bf16), place(k), bf16, jnp.float32) is None
    assert "not int8" in reason_not(jnp.zeros((4, 64), jnp.int8), place(8), bf16, bf16)
    assert "multiples of 8" in reason_not(jnp.zeros((4, 36), bf16), place(8), bf16, bf16)
    assert "not 40" in reason_not(jnp.zeros((4, 64), bf16), place(40), bf16, bf16)
    assert "do not fit" in reason_not(jax.ShapeDtypeStruct((4, 32768), bf16), place(8), bf16, bf16)
    with pytest.raises(ValueError, match="multiples of 8.*combine_rows"):
        combine_gathered(
            jnp.zeros((4, 36), bf16), place(8), jnp.zeros((4, 8)), place(2), place(2)[0], axis_name="ep", capacity=2
        )


def test_a_combine_has_a_buffer_for_sums_or_one_for_what_arrives():
    def buffers(name, tokens, wire=None):
        backend = backends.get_backend(name)
        sizes = dict(tokens=tokens, num_ranks=2, num_local=4, top_k=2, axis_name="ep")
        exchange = backends.exchange_for(backend, engine=ENGINE, **sizes)
        found = backend.memory(row_layout(2048, "bfloat16", 2), exchange, combine_row_bytes=wire)
        return found["combine_send"], found["combine_receive"]

    many, few = GATHERING_CAPACITY, GATHERING_CAPACITY - 1
    assert buffers("nvlink_one_sided", many) == (0, 2 * many * 2 * 2048)
    assert buffers("nvlink_one_sided", few) == (2 * few * 2 * 2048, 0)
    assert buffers("nvlink_one_sided", many, wire=2112) == (2 * many * 4 * 2048, 2 * many * 2176)
    assert buffers("low_latency", many)[1] == 0


@needs_kernels
@pytest.mark.parametrize("tokens", [GATHERING_CAPACITY, GATHERING_CAPACITY - 1])
def test_a_layer_of_many_tokens_sums_in_the_exchange_and_says_so(tokens):
    config = dataclasses.replace(CONFIG, hidden_size=256, intermediate_size=128)
    params = jax.eval_shape(lambda key: init_params(key, config, dtype=jnp.bfloat16), jax.random.key(0))
    caps = DeviceCaps("gpu", (9, 0), 2, "nvlink")
    layer = build_moe(config, mesh=mesh_of(2), expert_axis="ep", backend="nvlink_one_sided", caps=caps)
    x = jax.ShapeDtypeStruct((2 * tokens, 256), jnp.bfloat16)

    def combines(gradient):
        run = lambda params, x: moe(layer, params, x).astype(jnp.float32).sum()  # noqa: E731
        traced = jax.jit(jax.value_and_grad(run) if gradient else run).trace(params, x)
        return set(re.findall(r"combine_\w+(?=_mosaic_gpu)", traced.lower(lowering_platforms=("cuda",)).as_text()))

    joined = tokens >= GATHERING_CAPACITY
    assert combines(False) == {"combine_gathered" if joined else "combine_rows"}
    # combine_rows is the dispatch's derivative as well
    assert combines(True) == ({"combine_gathered", "combine_rows"} if joined else {"combine_rows"})
    said = " ".join(layer.explain(2 * tokens).split())
    assert ("sums of the experts' outputs on their way" in said) == joined
    assert ("172 against 228 us at D 2048" in said) == joined
