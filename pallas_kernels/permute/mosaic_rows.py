"""Moving rows for NVIDIA GPUs: into expert order, and the weighted sum back.

N rows, K experts per row, M places, D columns. Every thread moves a few pieces of 16 bytes (4 or 8 where rows are no
multiple of that), neighbouring pieces by neighbouring threads. Places that hold nothing are not read.

Into expert order: `spread` reads each row once and writes it to its places; `gather` reads it once for each of them,
in the order of the places, and also fills places that hold nothing. `spread_decoded` is `spread` of quantised rows,
which it dequantises on the way: once each, instead of once for each place.

On an H200, 16384 rows of 2048 BF16 with four places each of 131072: gather 205 us (154 without filling what holds
nothing), spread 112; of MXFP8 rows 107, of NVFP4 110, where moving them and dequantising all places took twice as long
as moving BF16.
"""

from __future__ import annotations

import dataclasses
import functools

import jax

from ..quantize import BlockFormat, QTensor, lane
from .thread import Pointer, Thread, U, launch

THREADS = 256
KINDS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
MAX_K = 32  # each is a load in flight
NOTHING = 0xFFFFFFFF
VALUES = 8  # that a thread decodes: 16 bytes of a 16-bit result
_FILL = 132 * 2048  # threads that fill an H200


@dataclasses.dataclass(frozen=True)
class Gather:
    """places M of rows of `row_bytes`; a piece is `words` words, `pieces` of them to a thread.

    fill: whether places that hold nothing are written.
    """

    places: int
    row_bytes: int
    words: int
    pieces: int
    fill: bool = True

    @property
    def per_row(self) -> int:
        return self.row_bytes // (4 * self.words)


@dataclasses.dataclass(frozen=True)
class Spread:
    """rows N of `row_bytes`, each to at most top_k K places; a piece is `words` words."""

    rows: int
    top_k: int
    row_bytes: int
    words: int

    @property
    def per_row(self) -> int:
        return self.row_bytes // (4 * self.words)


@dataclasses.dataclass(frozen=True)
class SpreadDecoded:
    """rows N of `columns` values in `fmt` (`stored` with padding), each to at most top_k K places of dtype `out`.

    row_scales: how many global scales there are, one or N. A piece is VALUES values.
    """

    rows: int
    top_k: int
    columns: int
    stored: int
    fmt: BlockFormat
    out: str
    row_scales: int

    @property
    def per_row(self) -> int:
        return self.columns // VALUES


@dataclasses.dataclass(frozen=True)
class Combine:
    """rows N, top_k K, columns D; dtype of y, out of the result. A piece is 16 bytes of y."""

    rows: int
    top_k: int
    columns: int
    dtype: str
    out: str

    @property
    def values(self) -> int:
        return 4 if self.dtype == "float32" else 8

    @property
    def per_row(self) -> int:
        return self.columns // self.values


def gather(o: Thread, t: Gather, refs: dict[str, Pointer]):
    first = o.block() * (THREADS * t.pieces) + o.thread()
    moves = []
    for i in range(t.pieces):
        flat = first + i * THREADS
        place, piece = flat // t.per_row, flat % t.per_row
        inside = place < U(t.places)
        source = refs["source"].at(place, 4).load(1, inside)[0]
        full = inside & ~source.same(U(NOTHING))
        moves.append((place, piece, inside, refs["x"].at(source, t.row_bytes, piece * (4 * t.words)), full))
    values = [at.load(t.words, full) for *_, at, full in moves]
    for (place, piece, inside, _, full), value in zip(moves, values, strict=True):
        refs["out"].at(place, t.row_bytes, piece * (4 * t.words)).store(value, inside if t.fill else full)


def _of_row(refs: dict[str, Pointer], name: str, row: U, top_k: int, inside) -> list[U]:
    """The K words of a row of an array [N, K]."""
    width = 4 if top_k % 4 == 0 else 1
    return [word for k in range(0, top_k, width) for word in refs[name].at(row, 4 * top_k, 4 * k).load(width, inside)]


def spread(o: Thread, t: Spread, refs: dict[str, Pointer]):
    flat = o.block() * THREADS + o.thread()
    row, piece = flat // t.per_row, flat % t.per_row
    inside = row < U(t.rows)
    offset = piece * (4 * t.words)
    value = refs["x"].at(row, t.row_bytes, offset).load(t.words, inside)
    for place in _of_row(refs, "position", row, t.top_k, inside):
        refs["out"].at(place, t.row_bytes, offset).store(value, inside & ~place.same(U(NOTHING)))


def spread_decoded(o: Thread, t: SpreadDecoded, refs: dict[str, Pointer]):
    fmt, kind = t.fmt, KINDS[t.out]
    flat = o.block() * THREADS + o.thread()
    row, piece = flat // t.per_row, flat % t.per_row
    inside = row < U(t.rows)
    data = refs["data"].at(row, fmt.data_bytes(t.stored), piece * (VALUES * fmt.bits // 8))
    data = data.load(VALUES * fmt.bits // 32, inside)
    scale = refs["scale"].at(
        row, fmt.num_scales(t.stored) * fmt.scale_bytes, piece // (fmt.block // VALUES) * fmt.scale_bytes
    )
    scale = scale.load(1, inside, bits=8 * fmt.scale_bytes)[0]
    row_scale = None
    if fmt.global_scale:
        row_scale = refs["row_scale"].at(row if t.row_scales > 1 else None, 4).load(1, inside)[0]
    places = _of_row(refs, "position", row, t.top_k, inside)
    values = lane.decode(o, data, scale, row_scale, fmt)
    if kind == "f32":
        words = [o.bits(v) for v in values]
    else:
        words = [o.pack_half(values[i], values[i + 1], kind) for i in range(0, VALUES, 2)]
    size = 4 * len(words)
    for place in places:
        at = refs["out"].at(place, t.per_row * size, piece * size)
        here = inside & ~place.same(U(NOTHING))
        for i in range(0, len(words), 4):
            at.at(None, 0, 4 * i).store(words[i : i + 4], here)


def add_rows(o, total: list, loaded: list, weights: list, full: list, kind: str) -> list:
    """total + each weight times its row's values, one after another; `loaded` is 0 where not `full`."""
    for words, weight, here in zip(loaded, weights, full, strict=True):
        # A weight without a place may be NaN.
        factor = o.float(o.where(here, weight, o.U(0)))
        values = lane.to_floats(o, words, kind)
        total = [a + o.mul_rounded(factor, v) for a, v in zip(total, values, strict=True)]
    return total


def packed(o, values: list, kind: str) -> list:
    """float32 values as words of "bf16", "f16" or "f32"."""
    if kind == "f32":
        return [o.bits(v) for v in values]
    return [o.pack_half(values[i], values[i + 1], kind) for i in range(0, len(values), 2)]


def combine(o: Thread, t: Combine, refs: dict[str, Pointer]):
    kind, out = KINDS[t.dtype], KINDS[t.out]
    flat = o.block() * THREADS + o.thread()
    row, piece = flat // t.per_row, flat % t.per_row
    inside = row < U(t.rows)
    positions, weights = (_of_row(refs, name, row, t.top_k, inside) for name in ("position", "weights"))
    full = [inside & ~p.same(U(NOTHING)) for p in positions]
    row_bytes = t.columns * (4 if kind == "f32" else 2)
    loaded = [refs["y"].at(p, row_bytes, piece * 16).load(4, here) for p, here in zip(positions, full, strict=True)]
    total = add_rows(o, [o.F(0.0)] * t.values, loaded, weights, full, kind)
    result = packed(o, total, out)
    size = 4 * len(result)
    at = refs["out"].at(row, t.per_row * size, piece * size)
    for i in range(0, len(result), 4):
        words = result[i : i + 4]
        at.at(None, 0, 4 * i).store(words, inside)


def gather_obstacle(x: jax.Array, places: int) -> str | None:
    row_bytes = x.dtype.itemsize * x.shape[1]
    if x.shape[0] == 0 or places == 0 or row_bytes == 0:
        return "there is nothing to move"
    if row_bytes % 4:
        return f"rows of {row_bytes} bytes are no multiple of 4"
    if places * row_bytes // 4 >= 1 << 31:
        return "it counts pieces in 31 bits"
    return None


def decode_obstacle(q: QTensor, position: jax.Array, dtype: str) -> str | None:
    """Why `spread_decoded` cannot do it, or None."""
    (rows, columns), top_k = q.shape, position.shape[1]
    if rows == 0 or columns == 0 or not 0 < top_k <= MAX_K:
        return f"there is nothing to move, or more than {MAX_K} places of a row"
    if columns % VALUES or dtype not in KINDS:
        return f"it takes columns in multiples of {VALUES} and gives {', '.join(KINDS)}, not {columns} and {dtype}"
    return None


def combine_obstacle(y: jax.Array, position: jax.Array, out: str) -> str | None:
    rows, top_k = position.shape
    if y.shape[0] == 0 or rows == 0 or not 0 < top_k <= MAX_K:
        return f"there is nothing to add up, or more than {MAX_K} places of a row"
    if y.dtype.name not in KINDS or out not in KINDS:
        return f"it takes {', '.join(KINDS)}"
    if y.shape[1] % 8:
        return f"it takes columns in multiples of 8, not {y.shape[1]}"
    return None


def _blocks(pieces: int, per_thread: int) -> int:
    return -(-pieces // (THREADS * per_thread))


def _words(row_bytes: int) -> int:
    return next(w for w in (4, 2, 1) if row_bytes % (4 * w) == 0)


@functools.partial(jax.jit, static_argnames="fill")
def run_gather(x: jax.Array, source: jax.Array, *, fill: bool = True) -> jax.Array:
    """x [N, D], source int32 [M] with -1 for none -> [M, D], zeros there (anything without `fill`)."""
    row_bytes, places = x.dtype.itemsize * x.shape[1], source.shape[0]
    words = _words(row_bytes)
    count = places * row_bytes // (4 * words)
    pieces = next(p for p in (4, 2, 1) if p == 1 or count >= p * _FILL)
    task = Gather(places, row_bytes, words, pieces, fill)
    out = {"out": jax.ShapeDtypeStruct((places, x.shape[1]), x.dtype)}
    operands = {"x": x, "source": source}
    blocks = _blocks(count, pieces)
    return launch(gather, task, operands, out, blocks=blocks, threads=THREADS, name="gather_rows")["out"]


@functools.partial(jax.jit, static_argnames="places")
def run_spread(x: jax.Array, position: jax.Array, *, places: int) -> jax.Array:
    """x [N, D], position int32 [N, K] with -1 for none -> [M, D]; a place that no row has is not written."""
    row_bytes, (rows, top_k) = x.dtype.itemsize * x.shape[1], position.shape
    task = Spread(rows, top_k, row_bytes, _words(row_bytes))
    out = {"out": jax.ShapeDtypeStruct((places, x.shape[1]), x.dtype)}
    operands = {"x": x, "position": position}
    blocks = _blocks(rows * task.per_row, 1)
    return launch(spread, task, operands, out, blocks=blocks, threads=THREADS, name="spread_rows")["out"]


@functools.partial(jax.jit, static_argnames=("places", "dtype"))
def run_spread_decoded(q: QTensor, position: jax.Array, *, places: int, dtype: str) -> jax.Array:
    """Row-wise q [N, D], position int32 [N, K] with -1 for none -> [M, D]; a place that no row has is not written."""
    rows, top_k = position.shape
    operands = {"data": q.data, "scale": q.block_scale, "position": position}
    if q.global_scale is not None:
        operands["row_scale"] = q.global_scale.reshape(-1)
    stored = q.data.shape[1] * 8 // q.format.bits
    row_scales = 0 if q.global_scale is None else q.global_scale.size
    task = SpreadDecoded(rows, top_k, q.k, stored, q.format, dtype, row_scales)
    out = {"out": jax.ShapeDtypeStruct((places, q.k), dtype)}
    blocks = _blocks(rows * task.per_row, 1)
    return launch(spread_decoded, task, operands, out, blocks=blocks, threads=THREADS, name="spread_decoded")["out"]


@functools.partial(jax.jit, static_argnames="out_dtype")
def run_combine(y: jax.Array, position: jax.Array, weights: jax.Array, *, out_dtype: str) -> jax.Array:
    """y [M, D], position int32 [N, K], weights float32 [N, K] -> [N, D] of out_dtype."""
    rows, top_k = position.shape
    task = Combine(rows, top_k, y.shape[1], y.dtype.name, out_dtype)
    out = {"out": jax.ShapeDtypeStruct((rows, y.shape[1]), out_dtype)}
    operands = {"y": y, "position": position, "weights": weights}
    blocks = _blocks(rows * task.per_row, 1)
    return launch(combine, task, operands, out, blocks=blocks, threads=THREADS, name="combine_rows")["out"]
