"""The remote-write kernels, as far as a machine without GPUs can tell: arithmetic, lowering for CUDA, refusals."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from quantize_emulator import Machine, Memory

from jmoe import compat
from jmoe.backends import Engine, dispatch_payload, exchange_for, get_backend
from jmoe.backends.base import received_valid
from jmoe.backends.combine import decoder, returned
from jmoe.backends.engine import ENGINE, ROW_UNIT, engine_reason, remote_write_engine
from jmoe.caps import DeviceCaps
from jmoe.payload import pack, return_layout, row_layout
from pallas_kernels.all_to_all import mosaic_encode as encode
from pallas_kernels.quantize import FORMATS
from pallas_kernels.quantize.reference import quantize

needs_kernels = pytest.mark.skipif(not compat.KERNELS_SUPPORTED, reason=compat.KERNELS_REASON)


def hard_rows(rng, rows, width):
    """bf16 rows with every kind of trouble: wide ranges, ties, zeros, NaN, random bits (infinity apart)."""
    x = rng.standard_normal((rows, width)) * np.exp(3 * rng.standard_normal((rows, width // 16))).repeat(16, 1)
    x = np.array((x * np.exp(8 * rng.standard_normal((rows, 1)))).astype(np.float32).astype(jnp.bfloat16))
    bits = rng.integers(0, 2**16, width).astype(np.uint16)
    x[0] = np.where((bits & 0x7FFF) == 0x7F80, np.uint16(1), bits).view(x.dtype)
    x[1] = 0
    x[2, :40] = np.nan
    x[3, 5] = -0.0
    x[4, 32:64] = 0
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -1.25, -2.5, -5, 4], np.float32)
    x[5:9] = rng.choice(ties, (4, width)).astype(x.dtype)
    return x


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.row_local])
@pytest.mark.parametrize("width", [384, 2688, 4096])
def test_a_row_quantised_in_shared_memory_has_the_references_bytes(rng, name, width):
    """The threads of one warpgroup, run on the host, against quantising and packing."""
    fmt, layout = FORMATS[name], row_layout(width, name, 2)
    x = hard_rows(rng, 10, width)
    x[9, 100] = np.inf
    ids = rng.integers(0, 8, (10, 2)).astype(np.int32)
    weights = rng.random((10, 2), np.float32)
    want = np.asarray(jax.jit(lambda v, i, w: pack(quantize(v, name), i, w, layout))(jnp.asarray(x), ids, weights))
    place = encode.PackedRow(layout.scale_offset, layout.row_scale_offset, layout.ids_offset, layout.row_bytes)
    got = want.copy()
    got[:, : layout.ids_offset] = 0xA5
    got[:, place.tail_start : layout.ids_offset] = 0  # as the tail's copy leaves it
    machine = Machine(1, encode.THREADS)
    Memory.machine = machine
    for i in range(10):
        parts = (x[i].view(np.uint8), got[i], np.zeros(16, np.uint8))
        memory = (Memory(part, shared=True) for part in parts)
        with np.errstate(all="ignore"):
            encode.encode_row(machine, fmt, x.dtype.name, width, place, *memory, machine.barrier)
    ends = [
        layout.data_bytes,
        layout.scale_offset + layout.scale_bytes,
        layout.row_scale_offset + layout.row_scale_bytes,
    ]
    starts = [0, layout.scale_offset, layout.row_scale_offset]
    written = np.zeros(layout.row_bytes, bool)
    for start, end in zip(starts, ends, strict=True):
        written[start:end] = True
    np.testing.assert_array_equal(got[:, written], want[:, written])
    np.testing.assert_array_equal(got[:, layout.ids_offset :], want[:, layout.ids_offset :])


def lowered(ranks, function, *shapes):
    """The StableHLO of `function` inside shard_map over `ranks` devices, lowered for CUDA."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:ranks]), ("ep",))
    args = [jax.ShapeDtypeStruct((ranks, *shape), dtype) for shape, dtype in shapes]
    local = lambda *a: jax.tree.map(lambda v: v[None], function(*[v[0] for v in a]))  # noqa: E731
    mapped = compat.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    return jax.jit(mapped).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernels(ranks, tokens=16):
    """name -> (function, argument shapes) of every kernel at a small size."""
    from pallas_kernels.all_to_all import (
        mosaic_combine,
        mosaic_combine_gather,
        mosaic_combine_push,
        mosaic_push,
        mosaic_push_quantized,
        mosaic_ragged,
    )
    from pallas_kernels.all_to_all.mosaic_common import Schedule

    i32, bf16, u8 = jnp.int32, jnp.bfloat16, jnp.uint8
    common = dict(axis_name="ep", capacity=tokens)
    batched = dict(common, num_ranks=ranks, num_local=2)
    cases = {
        "push_rows": (
            functools.partial(mosaic_push.push_rows, **common),
            [((tokens, 4112), u8), ((tokens, ranks), i32), ((ranks,), i32)],
        ),
        "push_batched": (
            functools.partial(mosaic_push.push_batched, **batched),
            [((tokens, 2880), bf16), ((tokens, 4), i32), ((tokens, 4), i32), ((2 * ranks,), i32)],
        ),
        "combine_rows": (
            functools.partial(mosaic_combine.combine_rows, **common),
            [((ranks * tokens, 2880), bf16), ((tokens, ranks), i32)],
        ),
        "push_apart": (
            lambda x, a, b, slot, counts: mosaic_push.push_apart((x, (a, b)), slot, counts, **common),
            [((tokens, 2880), bf16), *[((tokens, 8), i32)] * 2, ((tokens, ranks), i32), ((ranks,), i32)],
        ),
        "push_apart, batched, copied at the receiver": (
            lambda x, tail, target, slot, counts: mosaic_push.push_apart(
                (x, tail), slot, counts, target=target, fan_out=True, **batched
            ),
            [
                ((tokens, 2880), bf16),
                ((tokens, 64), u8),
                ((tokens, 4), i32),
                ((tokens, 4), i32),
                ((2 * ranks,), i32),
            ],
        ),
        "push_apart, batched": (
            lambda x, tail, target, slot, counts: mosaic_push.push_apart(
                (x, tail), slot, counts, target=target, **batched
            ),
            [((tokens, 2880), bf16), ((tokens, 64), u8), ((tokens, 4), i32), ((tokens, 4), i32), ((2 * ranks,), i32)],
        ),
        "combine_rows_pushed": (
            functools.partial(mosaic_combine_push.combine_rows_pushed, **common),
            [((ranks * tokens, 2880), bf16), ((tokens, ranks), i32), ((ranks,), i32)],
        ),
        "combine_gathered": (
            functools.partial(mosaic_combine_gather.combine_gathered, out_dtype=jnp.float32, **common),
            [
                ((3 * ranks * tokens, 2880), bf16),
                ((ranks * tokens, 22), i32),
                ((ranks * tokens, 22), jnp.float32),
                ((tokens, ranks), i32),
                ((ranks,), i32),
            ],
        ),
        "push_rows, bounded wait": (
            functools.partial(mosaic_push.push_rows, schedule=Schedule(min(tokens, 8), 4, wait_limit=1000), **common),
            [((tokens, 4112), u8), ((tokens, ranks), i32), ((ranks,), i32)],
        ),
        "combine_batched": (
            functools.partial(mosaic_combine.combine_batched, out_dtype=jnp.float32, **batched),
            [
                ((2, ranks * tokens, 1024), bf16),
                ((tokens, 4), i32),
                ((tokens, 4), i32),
                ((tokens, 4), jnp.float32),
            ],
        ),
        "ragged": (
            functools.partial(mosaic_ragged.ragged_push, axis_name="ep", num_ranks=ranks),
            [((tokens, 64), bf16), ((tokens, 64), bf16)] + [((3 * ranks,), i32)] * 3,
        ),
    }
    back = return_layout(2880, "mxfp8")
    row = encode.PackedRow(back.scale_offset, back.row_scale_offset, back.ids_offset, back.row_bytes)
    cases["push_back_quantized"] = (
        functools.partial(mosaic_push_quantized.push_back_quantized, fmt="mxfp8", layout=row, axis_name="ep"),
        [((ranks * tokens, 2880), jnp.float32), ((ranks,), i32)],
    )
    for name, width in (("mxfp8", 2880), ("nvfp4_token", 2880), ("fp8_128", 4096), ("nvfp4_token_4o6", 2048)):
        layout = row_layout(width, name, 4)
        row = encode.PackedRow(layout.scale_offset, layout.row_scale_offset, layout.ids_offset, layout.row_bytes)
        tail = row.row_bytes - row.tail_start
        tails = (16, tail - 16) if name == "fp8_128" else (tail,)
        cases[name] = (
            lambda x, *rest, name=name, row=row, tails=tails: mosaic_push_quantized.push_quantized(
                x, rest[: len(tails)], *rest[len(tails) :], fmt=name, layout=row, apart=name == "fp8_128", **common
            ),
            [
                ((tokens, width), bf16),
                *[((tokens, n), u8) for n in tails],
                ((tokens, ranks), i32),
                ((ranks,), i32),
            ],
        )
    return cases


@needs_kernels
@pytest.mark.parametrize("ranks", [2, 8])
def test_every_kernel_lowers_for_cuda_without_multicast(ranks):
    for name, (function, shapes) in kernels(ranks).items():
        text = lowered(ranks, function, *shapes)
        assert "mosaic_gpu" in text, name
        assert "multimem" not in text and "nvshmem" not in text, name


@needs_kernels
def test_one_token_needs_one_block():
    for name, (function, shapes) in kernels(2, tokens=1).items():
        assert "mosaic_gpu" in lowered(2, function, *shapes), name


@needs_kernels
def test_every_index_is_the_share_of_one_turn():
    from pallas_kernels.all_to_all.mosaic_common import share

    for count in (-3, 0, 1, 5, 7, 8, 63):
        for turns in (1, 3, 8):
            mine = [int(share(np.int32(count), np.int32(turn), np.int32(turns))) for turn in range(turns)]
            visited = sorted(turn + i * turns for turn in range(turns) for i in range(mine[turn]))
            assert visited == list(range(max(count, 0))), (count, turns)


@needs_kernels
def test_there_are_no_more_blocks_than_multiprocessors(monkeypatch):
    """The combine that writes waits in every block for other blocks, so all must be resident."""
    from pallas_kernels.all_to_all import mosaic_common as common

    smaller = types.SimpleNamespace(platform="gpu", core_count=114)  # an H100 on PCIe
    monkeypatch.setattr(common.jax, "devices", lambda: [smaller])
    assert [common.Schedule.for_tokens(t).blocks for t in (0, 1, 7, 8192)] == [1, 1, 7, 114]
    monkeypatch.undo()
    assert common.Schedule.for_tokens(8192).blocks == 132


@needs_kernels
def test_received_rows_can_start_on_whole_lines():
    from pallas_kernels.all_to_all.mosaic_common import LINE, Schedule, stride_of

    aligned = Schedule(align_rows=True)
    assert [stride_of(w, 1, aligned) for w in (128, 4112, 7456, 14400)] == [128, 4224, 7552, 14464]
    assert [stride_of(w, 2, aligned) for w in (7168, 2880, 8)] == [7168, 2880, 64]
    assert stride_of(4112, 1, Schedule(align_rows=False)) == 4112
    assert ROW_UNIT == LINE  # what the layer's memory counts is what the kernels take


@needs_kernels
def test_column_chunks_cover_the_row_in_whole_vectors():
    from pallas_kernels.all_to_all.mosaic_combine import column_chunks

    for width in (256, 264, 1000, 1024, 2048, 2880, 4096, 7168, 8192):
        length, starts = column_chunks(width)
        covered = np.zeros(width, bool)
        for start in starts:
            assert start % 8 == 0 and start + length <= width
            covered[start : start + length] = True
        assert covered.all(), width


@needs_kernels
def test_rows_that_bulk_copies_cannot_move_are_refused():
    from pallas_kernels.all_to_all.mosaic_common import Schedule, row_bytes, stages_for

    with pytest.raises(ValueError, match="multiples of 16"):
        row_bytes(jnp.zeros((2, 9), jnp.bfloat16))
    with pytest.raises(ValueError, match="too long"):
        stages_for(Schedule(), 120 * 1024)
    assert stages_for(Schedule(stages=8), 14336) == 8
    assert stages_for(Schedule(stages=8), 60 * 1024) == 3


@needs_kernels
def test_what_the_kernel_cannot_quantise_is_named():
    from pallas_kernels.all_to_all.mosaic_push_quantized import reason_not

    assert reason_not((4, 7168), jnp.bfloat16, "mxfp8") is None
    assert reason_not((4, 2880), jnp.float32, "nvfp4_token") is None
    assert "blocks of 128" in reason_not((4, 2880), jnp.bfloat16, "fp8_128")
    assert "not int8" in reason_not((4, 7168), jnp.int8, "mxfp8")
    assert "40 bytes" in reason_not((4, 80), jnp.bfloat16, "nvfp4_token")
    assert "rows share" in reason_not((4, 7168), jnp.bfloat16, "nvfp4")


def test_the_engine_says_which_devices_it_cannot_serve():
    hopper = DeviceCaps("gpu", (9, 0), 8, "nvlink")
    assert engine_reason(hopper) is None and remote_write_engine(hopper) is ENGINE
    assert "9.0" in engine_reason(DeviceCaps("gpu", (8, 0), 8, "nvlink"))
    assert "9.0" in engine_reason(DeviceCaps("cpu", None, 8, "host"))
    assert "peer access" in engine_reason(DeviceCaps("gpu", (9, 0), 16, "network"))
    assert "at most 8" in engine_reason(DeviceCaps("gpu", (9, 0), 16, "nvlink"))
    assert engine_reason(DeviceCaps("gpu", (9, 0), 2, "nvlink", kernels=False, kernels_reason="old")) == "old"
    assert remote_write_engine(DeviceCaps("cpu", None, 8, "host")) is None


@pytest.mark.parametrize("wire", ["bfloat16", "mxfp8"])
@pytest.mark.parametrize("name", ["nvlink_one_sided", "low_latency"])
def test_every_hook_of_an_engine_leads_to_the_same_dispatch(name, wire):
    """An engine that moves rows with the portable collectives, through each of its ways in."""
    backend = get_backend(name)
    layout = row_layout(64, wire, 2)
    make = functools.partial(
        exchange_for, backend, tokens=6, num_ranks=4, num_local=2, top_k=2, axis_name="ep", capacity_factor=0.75
    )

    def portable(exchange):
        return dataclasses.replace(exchange, engine=None)

    def push(rows, plan, exchange):
        out = backend.send(rows, plan, portable(exchange)).reshape(-1, rows.shape[1])
        counts = backend.exchange_counts(plan, portable(exchange))
        filled = received_valid(backend, counts, plan, portable(exchange))[:, None]
        return jnp.where(filled, out, jnp.ones((), out.dtype)), counts  # garbage where nothing arrived

    def push_apart(x, ids, weights, plan, exchange):
        tail = pack(x[:, :0], ids, weights, dataclasses.replace(layout, columns=0))
        return push(x, plan, exchange)[0], *push(tail, plan, exchange)

    def push_encoding(x, ids, weights, plan, exchange, layout):
        if layout.format is None:
            return None
        return *push(pack(quantize(x, layout.wire), ids, weights, layout), plan, exchange), None

    def push_encoding_apart(x, ids, weights, plan, exchange, layout):
        if layout.format is None:
            return None
        rows, counts, _ = push_encoding(x, ids, weights, plan, exchange, layout)
        return rows[:, layout.data_bytes :], counts, rows[:, : layout.data_bytes]

    engines = [
        None,
        Engine("push", push, ENGINE.reduce),
        Engine("apart", push, ENGINE.reduce, push_apart=push_apart),
        Engine("encoding", push, ENGINE.reduce, push_encoding=push_encoding),
        Engine("encoding apart", push, ENGINE.reduce, push_encoding=push_encoding_apart),
    ]

    def run(x, ids, weights):
        results = []
        for engine in engines:
            exchange = make(engine=engine)
            plan = backend.plan(ids, exchange)
            got = dispatch_payload(x, ids, weights, plan, backend=backend, exchange=exchange, layout=layout)
            real = jnp.any(got.ids >= 0, axis=1, keepdims=True)
            leaves = [jnp.where(real, v.astype(jnp.float32), 0) for v in jax.tree.leaves(got.x)]
            results.append((leaves, got.ids, got.weights, got.counts))
        return results

    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 6, 64)).astype(jnp.bfloat16)
    ids = rng.integers(-1, 8, (4, 6, 2)).astype(np.int32)
    weights = rng.random((4, 6, 2), np.float32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("ep",))
    local = lambda *a: jax.tree.map(lambda v: v[None], run(*[v[0] for v in a]))  # noqa: E731
    first, *others = jax.jit(compat.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))(x, ids, weights)
    assert int(np.asarray(first[3]).sum()) > 0
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


@needs_kernels
@pytest.mark.parametrize("name", ["nvlink_one_sided", "low_latency"])
@pytest.mark.parametrize("wire", [None, "mxfp8"])
def test_rows_given_back_by_the_kernel_are_the_portable_ones(monkeypatch, name, wire):
    """The engine's slices, moved by the reference of the kernel, with garbage in what nobody fills."""
    from pallas_kernels.all_to_all import mosaic_ragged, ragged_all_to_all_reference

    def moved(rows, into, here, sizes, there, *, axis_name, num_ranks):
        assert num_ranks == 4
        received = jax.lax.all_to_all(sizes, axis_name, 0, 0, tiled=True)
        into = jnp.full_like(into, 0xFF if into.dtype == jnp.uint8 else jnp.nan)
        return ragged_all_to_all_reference(rows, into, here, sizes, there, received, axis_name=axis_name)

    monkeypatch.setattr(mosaic_ragged, "ragged_push", moved)
    backend = get_backend(name)
    layout = row_layout(64, "bfloat16", 3)
    exchange = exchange_for(backend, tokens=6, num_ranks=4, num_local=2, top_k=3, axis_name="ep", capacity_factor=0.75)
    engine = Engine("give back", ENGINE.push, ENGINE.reduce, give_back=ENGINE.give_back)

    def run(x, ids, weights):
        plan = backend.plan(ids, exchange)
        got = dispatch_payload(x, ids, weights, plan, backend=backend, exchange=exchange, layout=layout)
        y = jnp.where(jnp.any(got.ids >= 0, axis=1, keepdims=True), got.x.astype(jnp.float32) * 3, jnp.nan)
        results = []
        for e in (exchange, dataclasses.replace(exchange, engine=engine)):
            buffer = returned(backend, e, wire, y, plan, got.ids)
            results.append(backend.sum_back(buffer, plan, decode=decoder(64, wire)))
        return results

    rng = np.random.default_rng(5)
    x = rng.standard_normal((4, 6, 64)).astype(jnp.bfloat16)
    ids = rng.integers(-1, 8, (4, 6, 3)).astype(np.int32)
    weights = rng.random((4, 6, 3), np.float32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("ep",))
    local = lambda *a: jax.tree.map(lambda v: v[None], run(*[v[0] for v in a]))  # noqa: E731
    want, got = jax.jit(compat.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))(x, ids, weights)
    assert float(np.abs(want).sum()) > 0
    np.testing.assert_array_equal(got, want)


def test_ragged_all_to_all_names_what_its_kernel_cannot_do():
    from pallas_kernels.all_to_all.api import kernel_reason

    rows = jnp.zeros((4, 64), jnp.bfloat16)
    if not compat.KERNELS_SUPPORTED:
        assert "0.11" in kernel_reason(rows, "ep", 2)
        return
    assert kernel_reason(rows, "ep", 2) is None
    assert kernel_reason(rows.reshape(4, 8, 8), "ep", 8) is None
    assert "at most 8" in kernel_reason(rows, "ep", 16)
    assert "no peers" in kernel_reason(rows, "ep", 1)
    assert "one mesh axis" in kernel_reason(rows, ("a", "b"), 4)
    assert "multiples of 16" in kernel_reason(rows[:, :9], "ep", 2)
    assert "multiples of 16" in kernel_reason(jnp.zeros((4, 32), jnp.bool_), "ep", 2)


@needs_kernels
def test_ragged_all_to_all_takes_the_kernel_on_gpus_and_the_reference_here(rng):
    from pallas_kernels.all_to_all import ragged_all_to_all

    def exchange(x, *tables):
        return ragged_all_to_all(x, jnp.zeros_like(x), *tables, axis_name="ep")

    shapes = [((6, 8, 8), jnp.bfloat16)] + [((2,), jnp.int32)] * 4
    text = lowered(2, exchange, *shapes)
    assert "mosaic_gpu" in text and "ragged_all_to_all" in text
    assert "mosaic_gpu" not in lowered(2, exchange, ((6, 9), jnp.bfloat16), *shapes[1:])
    alone = lowered(1, exchange, *shapes)
    assert "mosaic_gpu" not in alone and "ragged_all_to_all" not in alone
