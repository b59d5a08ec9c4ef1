"""Quantise and dequantise kernels for NVIDIA GPUs (written for Hopper; PTX of sm_90 and later).

M rows, K values of a row, V values of a thread ("unit"), B block size, C block scales of a row.

The data streams through registers: no shared memory, no TMA. Units of neighbouring columns go to neighbouring threads,
so a warp reads and writes whole runs of memory; several units per thread keep enough bytes in flight. Formats whose
scales follow from one block use a flat grid over all units (`_blocks`; `_stream` for much data in 4-over-6); per-token
NVFP4 gives a row to a warp or to a block of threads, keeps the row's packed values in registers, takes the maximum over
the row and quantises from the registers (`_rows`; `_walk_rows` for many short rows), so that the input is read once;
4-over-6 has too much code for that and reads its row again, from the cache.

Why Mosaic and not Triton: Pallas' Triton backend is deprecated from JAX 0.11 on; a plain kernel in it reached 3500 GB/s
for MXFP8, this one 3900. What `jmoe bench quantize` measured on an H200 is in docs/figures.md. Kernels alone, as a
share of 3970 GB/s, which the pass of a chain over 256 MiB moved in the same run (and 4200 without what is between its
kernels): 16384 x 7168 bfloat16 MXFP8, MXFP4, FP8 128 and NVFP4 1.07, NVFP4 per token 0.99, 4-over-6 0.92 and per token
0.81; 8192 x 4096 MXFP8 and FP8 128 1.01, MXFP4 0.96, NVFP4 0.98, per token 0.88 to 0.91, 4-over-6 0.83 and per token
0.70. 128 rows: one kernel, 3.4 to 5.9 us in a chain.

At copy speed the schedulers have about 19 issue slots for a value. Hopper has no E2M1 conversion: NVFP4 takes 11
instructions for a value and 4-over-6 17: a block of 16 takes 270, or 300 with a scale per token, its share of the row's
maximum and scale included. That is what limits 4-over-6: with 339 and 350, which took 84 % of the issue slots of busy
multiprocessors (Nsight Compute), its kernels took 98 and 105 us, now 82 and 93.

What did not help per-token 4-over-6 (93 us): groups that walk over rows and read them again, 16 of 64 threads to a
multiprocessor (103 us: with 30 MB of rows in flight they are no longer in the cache), 10 (97 us, 93 with two units to a
round of the loop); the next row fetched into L2 meanwhile (123 us); rows in shared memory (108 to 115 us), copied there
asynchronously while the row before is quantised (92 to 96 us; with copies that bypass the first-level cache 140 us).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import compat
from . import lane
from .emit import Ops, P, Pointer, U
from .encode import encode_unit
from .formats import BlockFormat
from .packed import Packed

KINDS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
MAX_UNITS = 8  # units of a row that one thread of `_rows` keeps in registers


@dataclasses.dataclass(frozen=True)
class Tuning:
    """values: V. units: units per thread of `_blocks`. threads: threads per block. grid: blocks of `_stream` and
    `_walk_rows`, 0 where `_blocks` and `_rows` do it. row_threads: threads that share a row of `_rows`."""

    values: int = 16
    units: int = 4
    threads: int = 128
    grid: int = 0
    row_threads: int = 128

    @property
    def units_of_block(self) -> int:
        """Units that a block of `_blocks` takes."""
        return self.threads * self.units


@dataclasses.dataclass(frozen=True)
class Task:
    """What a kernel does, all static. rows: M of the output. source_rows: rows of x. k: values of a row of x.

    columns: Kp. row_stride: values between rows of x. gather: source rows come from an index array. activation: None,
    or the values are act(x[:, :k]) * x[:, k:2k]. counted: a row count is an operand. scale_rows: rows that share a
    tensor-wide scale; from_data: it comes from the maximum. count_scale: rows for each counted row.
    """

    fmt: BlockFormat
    rows: int
    source_rows: int
    k: int
    columns: int
    dtype: str
    row_stride: int
    swizzled: bool = False
    gather: bool = False
    counted: bool = False
    activation: str | None = None
    alpha: float = 1.0
    limit: float = 0.0
    packed: Packed | None = None
    scale_rows: int = 0
    from_data: bool = False
    count_scale: int = 1
    tuning: Tuning = Tuning()

    @property
    def kind(self) -> str:
        return KINDS[self.dtype]

    @property
    def itemsize(self) -> int:
        return 4 if self.kind == "f32" else 2

    @property
    def lanes(self) -> int:
        """Threads that share a block."""
        return self.fmt.block // self.tuning.values

    @property
    def scale_columns(self) -> int:
        return self.fmt.num_scales(self.columns)

    @property
    def units(self) -> int:
        """Units of a row, with those that only pad swizzled scales."""
        columns = self.scale_columns
        return (-(-columns // 4) * 4 if self.swizzled else columns) * self.lanes

    def flattened(self) -> Task:
        """The same work on rows of one block each, where the blocks of x, data and scales follow each other."""
        plain = not (self.swizzled or self.gather or self.activation or self.packed)
        blocks = self.k // self.fmt.block
        if not plain or self.columns != self.k or self.k % self.fmt.block or self.fmt.global_scale == "token":
            return self
        b, rows = self.fmt.block, self.rows * blocks
        wide = dict(rows=rows, source_rows=rows, scale_rows=self.scale_rows * blocks, count_scale=blocks)
        return dataclasses.replace(self, k=b, columns=b, row_stride=b, **wide)

    @property
    def full(self) -> bool:
        """Whether every thread of `_blocks` and `_dequantize` has work, so that nothing needs a predicate."""
        exact = self.all_rows * self.units % self.tuning.units_of_block == 0
        return exact and not self.counted and self.fmt.global_scale != "token"

    @property
    def all_rows(self) -> int:
        """Rows with those that only pad swizzled scales."""
        return -(-self.rows // 128) * 128 if self.swizzled else self.rows


def _all(*conditions: P | None) -> P | None:
    """Conjunction of those that are not None (always true)."""
    out = None
    for c in conditions:
        if c is not None:
            out = c if out is None else out & c
    return out


class _Io:
    """Addresses and predicates of one kernel."""

    def __init__(self, o: Ops, task: Task, refs: dict, *, full: bool = False):
        self.o, self.task, self.refs, self.full = o, task, {name: Pointer(r) for name, r in refs.items()}, full
        self.count = self.refs["count"].load(1)[0] * task.count_scale if task.counted else None

    def valid(self, row: U) -> P | None:
        """Rows that are written: those below the count, and padding rows of swizzled scales."""
        t = self.task
        if self.count is None:
            return None if self.full else row < U(t.all_rows)
        if t.swizzled:
            return (row < self.count) | ((row >= U(t.rows)) & (row < U(t.all_rows)))
        return (row < self.count) & (row < U(t.rows))

    def real(self, row: U, unit: U, columns: int) -> P | None:
        """Valid units of rows and columns that are not padding."""
        t = self.task
        return _all(
            self.valid(row),
            row < U(t.rows) if t.swizzled else None,
            unit < U(columns // t.tuning.values) if t.units * t.tuning.values > columns else None,
        )

    def load(self, row: U, unit: U, inside: P | None = None) -> list[list[U]]:
        """Words of the unit's values; [gate, up] with an activation. Zeros outside x and where `inside` is false."""
        t = self.task
        ok = _all(self.real(row, unit, t.k), inside)
        source = row
        if t.gather:
            source = self.refs["index"].at(row, 4).load(1, ok)[0]
            ok = _all(ok, source < U(t.source_rows))  # negative ones are large
        words = t.tuning.values * t.itemsize // 4
        out = []
        for part in range(2 if t.activation else 1):
            at = self.refs["x"].at(source, t.row_stride * t.itemsize, unit * (t.tuning.values * t.itemsize))
            at = at.at(None, 0, part * t.k * t.itemsize)
            out.append([w for i in range(0, words, 4) for w in at.load(4, ok, offset=4 * i)])
        return out

    def values(self, loaded: list[list[U]]):
        """(words or None, dtype of the words, float32 values) after the activation."""
        o, t = self.o, self.task
        if not t.activation:
            return loaded[0], t.kind, lane.to_floats(o, loaded[0], t.kind)
        gate, up = (lane.to_floats(o, part, t.kind) for part in loaded)
        values = [lane.swiglu(o, g, u, t.activation, t.alpha, t.limit) for g, u in zip(gate, up, strict=True)]
        return [o.bits(v) for v in values], "f32", values

    def store_data(self, row: U, unit: U, words: list[U]):
        t = self.task
        ok = self.real(row, unit, t.columns)
        size = 4 * len(words)
        stride = t.packed.row_bytes if t.packed else t.fmt.data_bytes(t.columns)
        at = self.refs["data"].at(row, stride, unit * size)
        for i in range(0, len(words), 4):
            at.at(None, 0, 4 * i).store(words[i : i + 4], ok)

    def store_scale(self, row: U, unit: U, scale: U):
        """The block's first thread writes its scale."""
        t = self.task
        ok = _all(self.valid(row), (unit % t.lanes).same(U(0)) if t.lanes > 1 else None)
        column = unit // t.lanes
        size = t.fmt.scale_bytes
        if t.swizzled:
            tile = (row // 128) * (-(-t.scale_columns // 4) * 512) + (column // 4) * 512
            at = self.refs["scale"].at(None, 0, tile + (row % 32) * 16 + ((row % 128) // 32) * 4 + column % 4)
        elif t.packed:
            at = self.refs["data"].at(row, t.packed.row_bytes, column * size).at(None, 0, t.packed.scale_offset)
        else:
            at = self.refs["scale"].at(row, t.scale_columns * size, column * size)
        at.store([scale], ok, bits=8 * size)

    def store_tail(self, row: U, unit: U, units: int):
        """Packed rows: the words after the scales (ids, weights, padding) come from the `tail` operand."""
        p = self.task.packed
        assert p is not None
        words = (p.row_bytes - p.tail_offset) // 4
        ok = self.valid(row)
        for first in range(0, words, units):
            index = unit + first
            here = _all(ok, index < U(words))
            word = self.refs["tail"].at(row, 4 * words, index * 4).load(1, here)
            self.refs["data"].at(row, p.row_bytes, index * 4).at(None, 0, p.tail_offset).store(word, here)
        # The row scale, if any, fills up its own word; what is left is the gap after the block scales.
        end = p.scale_offset + self.task.scale_columns * self.task.fmt.scale_bytes
        for offset in range(end, p.tail_offset if p.row_scale_offset is None else p.row_scale_offset):
            first = _all(ok, unit.same(U(0)))
            self.refs["data"].at(row, p.row_bytes, offset).store([U(0)], first, bits=8)

    def matrix(self, row: U) -> U:
        """Which tensor-wide scale the row has."""
        return row // self.task.scale_rows if self.task.scale_rows < self.task.rows else U(0)

    def nv_scale(self, row: U) -> lane.NvScale:
        """The tensor-wide scale of this row, from the `tensor` operand [matrices]: scales, or bits of the maximum."""
        t, o = self.task, self.o
        inside = self.valid(row) if t.scale_rows < t.rows else None
        word = self.refs["tensor"].at(self.matrix(row), 4).load(1, inside)[0]
        if t.from_data:
            s, g, _, a = lane.row_scale(o, word, t.fmt.e4m3_max)
        else:
            s, g, a = lane.given_scale(o, o.float(word), t.fmt.e4m3_max)
        return lane.NvScale(o, s, g, a, four_over_six=t.fmt.four_over_six is not None)


def _quantize_unit(o: Ops, io: _Io, row: U, unit: U, loaded, nv: lane.NvScale | None):
    """Scale, round and store one unit."""
    words, kind, values = io.values(loaded)
    out, scale = encode_unit(o, words, kind, values, io.task.lanes, nv, io.task.fmt)
    io.store_data(row, unit, out)
    io.store_scale(row, unit, scale)


def _blocks(o: Ops, task: Task, refs: dict):
    """Every thread takes `units` units of the flat [rows, units] space, a block of threads apart."""
    io, tune = _Io(o, task, refs, full=task.full), task.tuning
    first = o.block() * tune.units_of_block + o.thread()
    one_scale = task.fmt.global_scale and task.scale_rows >= task.rows
    common = io.nv_scale(U(0)) if one_scale else None
    flat = [first + u * tune.threads for u in range(tune.units)]
    places = [(f // task.units, f % task.units) for f in flat]
    loaded = [io.load(row, unit) for row, unit in places]
    for (row, unit), words in zip(places, loaded, strict=True):
        nv = common if one_scale or not task.fmt.global_scale else io.nv_scale(row)
        _quantize_unit(o, io, row, unit, words, nv)
        if task.packed:
            io.store_tail(row, unit, task.units)


def _stream(o: Ops, task: Task, refs: dict):
    """A grid that runs at once walks over all units and loads the next while it computes one. One unit to a thread.

    Two units in a round of the loop, so that no word has to change its register: 0.80 of copy, with one 0.77. The last
    unit of all is done again where there is no first one left, so that it needs no predicate; a second is left out.
    """
    io, tune = _Io(o, task, refs, full=True), task.tuning
    total, step = task.all_rows * task.units, tune.threads * tune.grid
    common = io.nv_scale(U(0))

    def place(flat: U) -> tuple[U, U]:
        return flat // task.units, flat % task.units

    def two(_, carried: list[U]) -> list[U]:
        flat, *words = carried
        second = flat + step
        (after,) = io.load(*place(o.umin(second, U(total - 1))))
        _quantize_unit(o, io, *place(flat), [words], common)
        ahead = o.umin(second + step, U(total - 1))
        (words,) = io.load(*place(ahead))
        o.when(second < U(total), lambda: _quantize_unit(o, io, *place(second), [after], common))
        return [ahead, *words]

    flat = o.umin(o.block() * tune.threads + o.thread(), U(total - 1))
    (words,) = io.load(*place(flat))
    o.loop(pl.cdiv(total, 2 * step), [flat, *words], two)


def _block_max(o: Ops, top: U, slots: Pointer, warps: int, meet: Callable[[], None]) -> U:
    """Maximum over `warps` neighbouring warps of what is already the maximum of each warp.

    slots: shared memory, a word for each warp of the block. meet: waits for all of these warps.
    """
    warp = o.thread() >> 5
    slots.at(None, 0, warp * 4).store([top], (o.thread() & 31).same(U(0)))
    meet()
    mine = warp // warps * warps + o.thread() % warps
    return o.warp_max(slots.at(None, 0, mine * 4).load(1)[0])


def _group_max(o: Ops, top: U, scratch, tune: Tuning, turn: int) -> U:
    """Maximum over the `row_threads` threads of a group, which comes here by itself, with turn 0 and 1 in turns."""
    top, warps = o.warp_max(top), tune.row_threads // 32
    if warps == 1:
        return top
    group = o.thread() // tune.row_threads
    slots = Pointer(scratch, shared=True).at(None, 0, turn * (tune.threads // 8))
    return _block_max(o, top, slots, warps, lambda: o.barrier_of(group, tune.row_threads))


def _row_scale(o: Ops, io: _Io, row: U, first: U, top: U) -> lane.NvScale:
    """Writes the scale that follows from a row's maximum (float32 bits); first: the thread's number in the row."""
    task = io.task
    s, g, stored, large = lane.row_scale(o, top, task.fmt.e4m3_max)
    ok = _all(io.valid(row), first.same(U(0)), None if io.full else row < U(task.rows))
    if task.packed:
        assert task.packed.row_scale_offset is not None
        at = io.refs["data"].at(row, task.packed.row_bytes, task.packed.row_scale_offset)
    else:
        at = io.refs["row_scale"].at(row, 4)
    at.store([o.bits(stored)], ok)
    return lane.NvScale(o, s, g, large, four_over_six=task.fmt.four_over_six is not None)


def _rows(o: Ops, task: Task, refs: dict):
    """Per-token scales: `row_threads` threads load a row, find its maximum and quantise it."""
    scratch = refs.pop("scratch")
    io, tune = _Io(o, task, refs), task.tuning
    group = tune.row_threads
    row, first = o.block() * (tune.threads // group) + o.thread() // group, o.thread() % group
    places = -(-task.units // group)
    units = [first + group * j for j in range(places)]
    here = [unit < U(task.units) for unit in units]
    loaded = []
    top = U(0)
    if task.fmt.four_over_six:
        loaded = [io.load(row, unit, inside) for unit, inside in zip(units, here, strict=True)]
        blocks, kinds, _ = zip(*(io.values(words) for words in loaded), strict=True)
        top = lane.finite_amax_bits(o, blocks, kinds[0])
    else:
        for unit, inside in zip(units, here, strict=True):
            words = io.load(row, unit, inside)
            loaded.append(words)
            values, kind, _ = io.values(words)
            amax = lane.amax_bits(o, values, kind)
            top = o.umax(top, o.where(amax >= U(lane.INF), U(0), amax))
    top = o.warp_max(top)
    if group > 32:
        top = _block_max(o, top, Pointer(scratch, shared=True), group // 32, o.barrier)
    nv = _row_scale(o, io, row, first, top)
    if task.fmt.four_over_six:
        # Much code and many registers for a unit: a loop that reads the row again, from the first-level cache.
        def one(i: U, carried: list[U]) -> list[U]:
            unit = first + i * group
            inside = unit < U(task.units)
            o.when(inside, lambda: _quantize_unit(o, io, row, unit, io.load(row, unit, inside), nv))
            return carried

        o.loop(places, [], one)
    else:
        for unit, inside, words in zip(units, here, loaded, strict=True):
            # A branch that the compiler cannot remove keeps it from interleaving units, which costs registers and with
            # them rows in flight.
            some = inside & o.opaque(U(1)).same(U(1))
            o.when(some, functools.partial(_quantize_unit, o, io, row, unit, words, nv))
    if task.packed:
        io.store_tail(row, first, group)


def _walk_rows(o: Ops, task: Task, refs: dict):
    """Per-token scales: a grid that runs at once, whose groups of `row_threads` threads go from row to row.

    While a group quantises a row it loads its next one. Two rows in a round of the loop, as in `_stream`. Every thread
    has as many units of a row.
    """
    scratch = refs.pop("scratch")
    io, tune = _Io(o, task, refs, full=True), task.tuning
    group = tune.row_threads
    first, step, total = o.thread() % group, tune.threads // group * tune.grid, task.rows
    units = [first + group * j for j in range(task.units // group)]

    def load(row: U) -> list[U]:
        row = o.umin(row, U(total - 1))
        return [w for unit in units for w in io.load(row, unit)[0]]

    def quantize_row(row: U, words: list[U], turn: int):
        size = len(words) // len(units)
        blocks = [words[size * j : size * (j + 1)] for j in range(len(units))]
        top = _group_max(o, lane.finite_amax_bits(o, blocks, task.kind), scratch, tune, turn)
        nv = _row_scale(o, io, row, first, top)
        for j, (unit, block) in enumerate(zip(units, blocks, strict=True)):
            one = functools.partial(_quantize_unit, o, io, row, unit, [block], nv)
            o.when(o.opaque(U(1)).same(U(1)), one) if j else one()  # a branch for the reason in `_rows`

    def two(_, carried: list[U]) -> list[U]:
        row, *words = carried
        second = row + step
        after = load(second)
        o.when(row < U(total), lambda: quantize_row(row, words, 0))
        ahead = second + step
        words_ahead = load(ahead)
        o.when(second < U(total), lambda: quantize_row(second, after, 1))
        return [ahead, *words_ahead]

    row = o.thread() // group * tune.grid + o.block()  # so that a last round is spread over the multiprocessors
    o.loop(pl.cdiv(total, 2 * step), [row, *load(row)], two)


def _maxima(o: Ops, task: Task, refs: dict):
    """Largest finite block maximum (float32 bits) of each block of threads, for dynamic tensor-wide scales."""
    scratch = refs.pop("scratch")
    io, tune = _Io(o, task, refs), task.tuning
    first = o.block() * (tune.threads * tune.units) + o.thread()
    top = U(0)
    for u in range(tune.units):
        flat = first + u * tune.threads
        words, kind, _ = io.values(io.load(flat // task.units, flat % task.units))
        amax = lane.amax_bits(o, words, kind)
        top = o.umax(top, o.where(amax >= U(lane.INF), U(0), amax))
    top = o.warp_max(top)
    top = _block_max(o, top, Pointer(scratch, shared=True), tune.threads // 32, o.barrier)
    io.refs["top"].at(o.block(), 4).store([top], o.thread().same(U(0)))


def _dequantize(o: Ops, task: Task, refs: dict):
    """Every thread decodes `units` units of V values; task.dtype is the output's."""
    io, tune, fmt = _Io(o, task, refs, full=task.full), task.tuning, task.fmt
    first = o.block() * (tune.threads * tune.units) + o.thread()
    words = tune.values * fmt.bits // 32
    stride = task.packed.row_bytes if task.packed else fmt.data_bytes(task.columns)
    work = []
    for u in range(tune.units):
        flat = first + u * tune.threads
        row, unit = flat // task.units, flat % task.units
        ok = io.real(row, unit, task.k)
        column = unit // task.lanes
        size = fmt.scale_bytes
        data = io.refs["data"].at(row, stride, unit * (4 * words)).load(words, ok)
        if task.swizzled:
            tile = (row // 128) * (-(-task.scale_columns // 4) * 512) + (column // 4) * 512
            at = io.refs["scale"].at(None, 0, tile + (row % 32) * 16 + ((row % 128) // 32) * 4 + column % 4)
        elif task.packed:
            at = io.refs["data"].at(row, stride, column * size).at(None, 0, task.packed.scale_offset)
        else:
            at = io.refs["scale"].at(row, task.scale_columns * size, column * size)
        scale = at.load(1, ok, bits=8 * size)[0]
        row_scale = None
        if fmt.global_scale == "tensor":
            row_scale = (
                io.refs["row_scale"]
                .at(row // task.scale_rows if task.scale_rows < task.rows else U(0), 4)
                .load(1, ok)[0]
            )
        elif fmt.global_scale == "token" and task.packed:
            assert task.packed.row_scale_offset is not None
            row_scale = io.refs["data"].at(row, stride, task.packed.row_scale_offset).load(1, ok)[0]
        elif fmt.global_scale == "token":
            row_scale = io.refs["row_scale"].at(row, 4).load(1, ok)[0]
        work.append((row, unit, ok, data, scale, row_scale))
    for row, unit, ok, data, scale, row_scale in work:
        values = lane.decode(o, data, scale, row_scale, fmt)
        if task.kind == "f32":
            out = [o.bits(v) for v in values]
        else:
            out = [o.pack_half(values[i], values[i + 1], task.kind) for i in range(0, len(values), 2)]
        at = io.refs["out"].at(row, task.k * task.itemsize, unit * (tune.values * task.itemsize))
        for i in range(0, len(out), 4):
            at.at(None, 0, 4 * i).store(out[i : i + 4], ok)


def _launch(program, task: Task, operands: dict, outputs: dict, blocks: int, *, scratch: bool = False) -> dict:
    """Run `program` with these operands (arrays) and outputs (ShapeDtypeStructs) on a grid of `blocks`."""
    names = (*operands, *outputs, *(("scratch",) if scratch else ()))

    def body(*refs):
        @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() for _ in refs))
        def emit(ctx, *memrefs):
            del ctx
            program(Ops(), task, dict(zip(names, memrefs, strict=True)))

        emit(*refs)

    threads = task.tuning.threads // 128
    kernel = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=(plgpu.SMEM((task.tuning.threads // 16,), jnp.int32),) if scratch else (),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        num_threads=threads if threads > 1 else None,
        thread_name="group" if threads > 1 else None,
    )
    return dict(zip(outputs, kernel(*operands.values()), strict=True))


def tuned(task: Task, *, decode: bool = False) -> Task:
    """task with the tuning that measured best on an H200 (`jmoe bench quantize`)."""
    if decode:  # 16 bytes of output per thread: whole sectors
        return dataclasses.replace(task, tuning=Tuning(values=8, units=4 if task.fmt.element == "e4m3" else 2))
    if task.fmt.global_scale == "token":
        return dataclasses.replace(task, tuning=_row_tuning(task))
    total, tuning = task.all_rows * task.units, Tuning()
    dense = task.flattened() is not task
    if task.fmt.four_over_six:
        # As many threads as fit, which makes the assembler use 64 registers: with a quarter more instructions than now
        # 0.72 of copy, and 0.64 in blocks of 128 threads.
        # (With float32 values the next unit does not fit in them.)
        grid = _multiprocessors()
        dense = dense and task.itemsize == 2 and not task.counted and task.scale_rows >= task.rows
        if dense and total >= 4 * 1024 * grid:
            tuning = Tuning(units=1, threads=1024, grid=grid)
        else:
            tuning = Tuning(units=1)
    elif 2**20 <= total < 2**22 and dense:
        # Short runs want many small pieces. 8192 x 4096: MXFP8 0.92 of copy (0.89 without), NVFP4 0.84 (0.79).
        if task.fmt.element == "e4m3":
            tuning = Tuning(units=1, threads=512)
        elif task.fmt.global_scale:
            tuning = Tuning(units=2)
    return dataclasses.replace(task, tuning=tuning)


def _row_tuning(task: Task) -> Tuning:
    """For per-token scales."""
    if task.fmt.four_over_six:
        # At most eight units for each thread, and as few idle places as may be. 16384 x 7168: 64 threads 0.66 of copy,
        # 128 threads 0.62, and in another way of timing 0.55 and 0.44 for 8192 x 4096.
        wide_enough = [n for n in (64, 32, 128, 256, 512) if task.units <= MAX_UNITS * n]
        threads = min(wide_enough, key=lambda n: pl.cdiv(task.units, n) * n)
        return Tuning(threads=max(threads, 128), row_threads=threads)
    plain = not (task.swizzled or task.gather or task.activation or task.packed or task.counted)
    if plain and task.columns == task.k and task.itemsize == 2 and task.units in (64, 128, 192, 256):
        # Kernels of 8192 x 4096 0.88-0.91 of copy, of `_rows` 0.80; of 16384 x 2048 0.88 and 0.83. Longer rows are not
        # better this way: 16384 x 7168 1.00 and 0.99, 4096 x 7168 0.87 and 0.89.
        group = task.units // 2
        # JAX 0.12's code, made for later linking, needs more than the 64 registers that 1024 threads leave each.
        threads = 1024 if group != 96 and compat.REGISTERS_MOVE else 768
        if task.rows >= 2 * threads // group * _multiprocessors():
            return Tuning(threads=threads, row_threads=group, grid=_multiprocessors())
    if task.units <= 64:
        return Tuning(row_threads=32)
    # 8192 x 4096: 0.77-0.81 of copy with a unit for each thread, 0.74 with two
    threads = 256 if 128 < task.units <= 256 else 128
    while task.units > 4 * threads and threads < 512:
        threads *= 2
    return Tuning(threads=threads, row_threads=threads)


def _multiprocessors() -> int:
    """Of this process's GPU; 132 (H200) where it has none and only compiles."""
    device = jax.devices()[0]
    return getattr(device, "core_count", None) or 132


def _flat_blocks(task: Task) -> int:
    return pl.cdiv(task.all_rows * task.units, task.tuning.units_of_block)


def _outputs(task: Task) -> dict:
    fmt = task.fmt
    struct = jax.ShapeDtypeStruct
    if task.packed:
        return {"data": struct((task.rows, task.packed.row_bytes), jnp.uint8)}
    data = jnp.float8_e4m3fn if fmt.element == "e4m3" else jnp.uint8
    outputs = {"data": struct((task.rows, fmt.data_bytes(task.columns)), data)}
    if task.swizzled:
        outputs["scale"] = struct((task.all_rows * -(-task.scale_columns // 4) * 4,), jnp.uint8)
    else:
        scale = {"e8m0": jnp.uint8, "e4m3": jnp.float8_e4m3fn, "f32": jnp.float32}[fmt.scale]
        outputs["scale"] = struct((task.rows, task.scale_columns), scale)
    if fmt.global_scale == "token":
        outputs["row_scale"] = struct((task.rows,), jnp.float32)
    return outputs


@functools.partial(jax.jit, static_argnums=0)
def run_quantize(task: Task, operands: dict) -> dict:
    """Launch the kernel for `task`. operands: x, and as the task says index, count, tensor, tail (in this order).

    Returns data, scale (not for packed rows), row_scale (per-token formats, not for packed rows).
    """
    outputs = _outputs(task)
    if task.fmt.global_scale != "token":
        flat = task.flattened()
        if task.tuning.grid:
            return _launch(_stream, flat, operands, outputs, task.tuning.grid)
        return _launch(_blocks, flat, operands, outputs, _flat_blocks(flat))
    if task.tuning.grid:
        return _launch(_walk_rows, task, operands, outputs, task.tuning.grid, scratch=True)
    blocks = pl.cdiv(task.all_rows, task.tuning.threads // task.tuning.row_threads)
    return _launch(_rows, task, operands, outputs, blocks, scratch=True)


def empty(task: Task) -> dict:
    """The outputs of a task without rows."""
    return {name: jnp.zeros(out.shape, out.dtype) for name, out in _outputs(task).items()}


@functools.partial(jax.jit, static_argnums=0)
def run_maxima(task: Task, operands: dict) -> jax.Array:
    """uint32 bits of the largest finite block maximum of x."""
    task = dataclasses.replace(task.flattened(), tuning=Tuning(units=8))
    blocks = _flat_blocks(task)
    top = _launch(_maxima, task, operands, {"top": jax.ShapeDtypeStruct((blocks,), jnp.uint32)}, blocks, scratch=True)
    return jnp.max(top["top"])


@functools.partial(jax.jit, static_argnums=0)
def run_dequantize(task: Task, operands: dict) -> jax.Array:
    """[rows, k] of task.dtype. operands: data, scale (not for packed rows), row_scale (formats with a global scale)."""
    out = {"out": jax.ShapeDtypeStruct((task.rows, task.k), jnp.dtype(task.dtype))}
    if task.fmt.global_scale != "token":
        task = task.flattened()
    return _launch(_dequantize, task, operands, out, _flat_blocks(task))["out"]
