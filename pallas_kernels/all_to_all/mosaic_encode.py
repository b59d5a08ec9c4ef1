"""Quantises one row in shared memory, for the dispatch kernel: a warpgroup turns it into a packed row.

Letters: D values of a row, B block size, V values that a thread takes at a time (a "unit").

The arithmetic is that of the quantisation kernels (`pallas_kernels.quantize.encode`), so the bytes are those of
quantising before the exchange. Written for one thread, against an operations object `o` (`emit.Ops` in kernels, a numpy
double in tests), with pointers into shared memory.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.quantize import lane
from pallas_kernels.quantize.encode import encode_unit
from pallas_kernels.quantize.formats import BlockFormat

VALUES = 16  # V: a whole NVFP4 block
THREADS = 128
KINDS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclasses.dataclass(frozen=True)
class PackedRow:
    """Where the parts of a packed row lie, in bytes: data at 0, block scales, the row's scale, then the rest."""

    scale_offset: int
    row_scale_offset: int
    tail_offset: int
    row_bytes: int

    @property
    def tail_start(self) -> int:
        """Start of the bytes that the caller supplies: `tail_offset` rounded down to 16, as bulk copies need it."""
        return self.tail_offset // 16 * 16


def encode_row(o, fmt: BlockFormat, dtype: str, width: int, row: PackedRow, x, packed, scratch, barrier) -> None:
    """Writes data, block scales and row scale of the `width` values at `x` into the packed row at `packed`.

    Called by all threads of a warpgroup. dtype: a key of KINDS. scratch: 4 words for this warpgroup alone; barrier():
    waits for all of its threads (both only for formats with a scale for each row). B is a multiple of V.
    """
    kind = KINDS[dtype]
    words = VALUES * (4 if kind == "f32" else 2) // 4
    units, lanes = width // VALUES, fmt.block // VALUES
    thread = o.thread() & (THREADS - 1)
    places = [thread + THREADS * i for i in range(-(-units // THREADS))]

    def each_unit(visit):
        """visit(unit, whether it exists or None for always), in every warp that has a unit at all."""
        for i, unit in enumerate(places):
            if THREADS * (i + 1) <= units:
                visit(unit, None)
            else:  # whole warps, because the threads of a block exchange values
                o.when((unit & 0xFFFFFFE0) < o.U(units), lambda unit=unit: visit(unit, unit < o.U(units)))

    def load(unit, inside):
        at = x.at(None, 0, unit * (4 * words))
        return [w for i in range(0, words, 4) for w in at.at(None, 0, 4 * i).load(4, inside)]

    nv = None
    if fmt.global_scale == "token":
        top = _row_maximum(o, kind, places, units, load, scratch, thread, barrier)
        s, g, stored, large = lane.row_scale(o, top, fmt.e4m3_max)
        nv = lane.NvScale(o, s, g, large, four_over_six=fmt.four_over_six is not None)
        packed.at(None, 0, row.row_scale_offset).store([o.bits(stored)], thread.same(o.U(0)))

    def encode(unit, inside):
        loaded = load(unit, inside)
        values = None if nv is not None else lane.to_floats(o, loaded, kind)
        codes, scale = encode_unit(o, loaded, kind, values, lanes, nv, fmt)
        packed.at(None, 0, unit * (VALUES * fmt.bits // 8)).store(codes, inside)
        first = inside
        if lanes > 1:
            first = (unit & (lanes - 1)).same(o.U(0))
            first = first if inside is None else first & inside
        at = packed.at(None, 0, row.scale_offset).at(None, 0, (unit // lanes) * fmt.scale_bytes)
        at.store([scale], first, bits=8 * fmt.scale_bytes)

    each_unit(encode)


def _row_maximum(o, kind, places, units, load, scratch, thread, barrier):
    """Bits of the row's largest magnitude among blocks that are finite: one that is not costs only itself."""
    top = o.U(0)
    for i, unit in enumerate(places):
        inside = None if THREADS * (i + 1) <= units else unit < o.U(units)
        amax = lane.amax_bits(o, load(unit, inside), kind)
        top = o.umax(top, o.where(amax >= o.U(lane.INF), o.U(0), amax))
    top = o.warp_max(top)
    scratch.at(None, 0, (thread >> 5) * 4).store([top], (thread & 31).same(o.U(0)))
    barrier()
    return o.warp_max(scratch.at(None, 0, (thread & 3) * 4).load(1)[0])
