"""Rows of a weight read from memory into registers and multiplied there, for a handful of tokens.

The copy engine's pipeline needs 3 us before its first stage is there, which is as long as eight experts' 4-bit weights
take. Here every load is issued as soon as the expert is known, and nothing waits for another warp before its products
are added up.

A warp takes tiles of 16 rows: lane 4g + t has rows g and g + 8, and of each 64 bytes of them (a unit) the t-th 16 (a
piece). In registers the weights become BF16 pairs as in mosaic_dequant.py, multiplied with their block's scale, and go
to the warps' matrix instruction with up to 8 tokens as its columns. The order of a sum does not matter, so that of 8
neighbouring values of a token, 16 bytes in shared memory, is that of the pairs that a lane has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..permute.thread import F, P, Pointer, Thread, U
from ..quantize import QTensor

TILE = 16  # rows of a weight
UNIT = 64  # bytes of a row
BLOCK_ROWS = 128  # rows under one float32 scale

UNROLLED = 4  # turns of a warp, beyond which its code is a loop
_HALVES = {"bfloat16": "bf16", "float16": "f16"}
_BLOCKS = {("e4m3", "e8m0"): 32, ("e2m1", "e8m0"): 32, ("e2m1", "e4m3"): 16, ("e4m3", "f32"): 128}


@dataclasses.dataclass(frozen=True)
class Weight:
    """A stack of matrices [.., rows, columns] as it lies in memory.

    element: "bf16", "f16", "e4m3" or "e2m1". scale: of its blocks, "e8m0", "e4m3" or "f32", "" for none. row_bytes,
    scale_bytes: of a row of elements, and of a row of scales. factors: shape of the global scales [G or 1, P or 1], or
    of each row [G, P, N]; () for none.
    """

    rows: int
    columns: int
    element: str
    scale: str
    row_bytes: int
    scale_bytes: int
    factors: tuple[int, ...]

    @property
    def half(self) -> str:
        """What the matrix instruction multiplies."""
        return "f16" if self.element == "f16" else "bf16"

    @property
    def parts(self) -> int:
        """Eight elements each, of a piece."""
        return {"e4m3": 2, "e2m1": 4}.get(self.element, 1)

    @property
    def pieces(self) -> int:
        """Of a row."""
        return self.row_bytes // 16

    @property
    def units(self) -> int:
        return -(-self.row_bytes // UNIT)

    @property
    def factor(self) -> float:
        """What every sum still has to be multiplied with, besides the global scales."""
        if not self.scale:
            return 1.0
        from .mosaic_dequant import Packed

        return Packed(self.element, self.scale, _BLOCKS[self.element, self.scale]).factor  # pyright: ignore[reportArgumentType]


def obstacle(x: Any, w: jax.Array | QTensor) -> str | None:
    """Why rows of w [.., N, K] cannot be read and multiplied with rows of x [.., K] here, or None."""
    k = x.shape[-1]
    if isinstance(x, QTensor) or str(x.dtype) not in _HALVES:
        return "it takes rows of bfloat16 or float16"
    if k % 8:
        return f"it takes K in multiples of 8, not {k}"
    if not isinstance(w, QTensor):
        return None if w.dtype == x.dtype else f"x is {x.dtype} and w {w.dtype}"
    fmt = w.format
    if (fmt.scale == "f32") != (fmt.block_rows == BLOCK_ROWS) or w.layout != "row_major" or x.dtype != jnp.bfloat16:
        return f"it does not multiply {x.dtype} with {w.layout} weights of {fmt.name}"
    if w.data.shape[-1] % 16:
        return f"it reads rows in 16 bytes, not {w.data.shape[-1]} of them"
    return None


def describe(w: jax.Array | QTensor) -> Weight:
    """w [G, N, K], or [G, P, N, K]."""
    rows, columns = w.shape[-2:]
    if not isinstance(w, QTensor):
        return Weight(rows, columns, _HALVES[str(w.dtype)], "", 2 * columns, 0, ())
    factors = ()
    if w.global_scale is not None:
        factors = w.global_scale.shape
        if len(factors) == w.ndim - 1:  # one for each row
            factors = (factors[0], *((1,) if w.ndim == 3 else ()), *factors[1:])
        factors += (1,) * (2 - len(factors))
    scales = w.block_scale.shape[-1] * w.format.scale_bytes
    return Weight(rows, columns, w.format.element, w.format.scale, w.data.shape[-1], scales, factors)


def operands(w: jax.Array | QTensor, name: str) -> dict[str, jax.Array]:
    """The arrays that a kernel is given for w, by the names under which `rows_of` and `row_factor` look for them."""
    if not isinstance(w, QTensor):
        return {name: w}
    out = {name: lax.bitcast_convert_type(w.data, jnp.uint8), f"{name}_scales": w.block_scale}
    if w.format.scale != "f32":
        out[f"{name}_scales"] = lax.bitcast_convert_type(w.block_scale, jnp.uint8)
    if w.global_scale is not None:
        out[f"{name}_factors"] = w.global_scale.astype(jnp.float32).reshape(-1)
    return out


def row_factor(o: Thread, w: Weight, refs: dict[str, Pointer], name: str, place: Sequence[U | int]) -> F:
    """What the sums of the row at `place` [G, P, N] are multiplied with."""
    constant = o.F(w.factor)
    if not w.factors:
        return constant
    index = o.U(0)
    for size, i in zip(w.factors, place, strict=False):
        index = index * size + (i if size > 1 else 0)
    return o.float(refs[f"{name}_factors"].at(index, 4).load(1)[0]) * constant


@dataclasses.dataclass(frozen=True)
class Share:
    """How a row's units are shared: `splits` warps take trips * window of them each; window: units read ahead."""

    splits: int
    trips: int
    window: int

    @staticmethod
    def of(w: Weight, splits: int, tiles: int) -> Share:
        """16 loads at once if that is all there is to read, else 8 and the next 8 while these are multiplied."""
        splits = min(splits, w.units)
        each = -(-w.units // splits)
        trips = 1 if each <= 8 // tiles else -(-each // (4 // tiles))
        return Share(splits, trips, -(-each // trips))

    @property
    def each(self) -> int:
        """Units of a warp."""
        return self.trips * self.window

    @property
    def units(self) -> int:
        return self.splits * self.each


def prefetch(o: Thread, w: Weight, refs: dict[str, Pointer], name: str, matrix: U, share: U, shares: int, most: int):
    """Asks for the share-th of `shares` parts of a matrix of the stack, of at most so many bytes, by one thread."""
    one = o.thread().same(o.U(0))
    rows = min(w.rows, most // (w.row_bytes + (0 if w.scale == "f32" else w.scale_bytes)))
    for kind, row_bytes in ((name, w.row_bytes), (f"{name}_scales", 0 if w.scale == "f32" else w.scale_bytes)):
        size, total = w.rows * row_bytes, rows * row_bytes
        if total and not (size % 16 or total % 16):
            part = -(-total // (16 * shares)) * 16
            start = share * part
            left = o.umin(o.U(total) - o.umin(start, o.U(total)), o.U(part))
            o.prefetch(refs[kind].at(matrix, size, start), left, one & (left > o.U(0)))


# A token's values in shared memory.


def token_pieces(w: Weight, share: Share) -> int:
    """Pieces of 8 values, those past the end of a row, which are zeros, included."""
    return share.units * 4 * w.parts


def token_bytes(w: Weight, share: Share) -> int:
    """From a token to the next: 64 bytes off a multiple of 128, so that 8 lanes read 128 bytes of all banks."""
    size = 16 * token_pieces(w, share)
    return size + (64 - size) % 128


def store_tokens(
    o: Thread,
    w: Weight,
    share: Share,
    tokens: int,
    row_of: Callable[[U], tuple[Pointer, P | None]],
    shared: Pointer,
    threads: int,
    *,
    at_once: int = 4,
) -> Callable[[], None]:
    """Tokens to shared memory, by a block's threads: the first loads here, the rest by the function that it returns.

    Loads return in order: what is loaded after the weights waits for them.

    row_of: where a token's values are, and whether there are any (else they are zeros).
    """
    pieces, stride = token_pieces(w, share), token_bytes(w, share)
    total = tokens * pieces

    def load(n: int):
        index = o.thread() + n * threads
        token, piece = (o.U(0), index) if tokens == 1 else (index // pieces, index % pieces)
        at, there = row_of(token)
        inside = (index < o.U(total)) & (piece < o.U(w.columns // 8))
        words = at.at(piece, 16).load(4, inside if there is None else inside & there)
        unit, rest = piece // (4 * w.parts), piece % (4 * w.parts)
        place = (unit * w.parts + rest % w.parts) * 4 + rest // w.parts
        return token, place, index < o.U(total), words

    def store(loaded):
        for token, place, inside, words in loaded:
            shared.at(token, stride, place * 16).store(_in_pairs(o, w, words), inside)

    turns = range(-(-total // threads))
    first = [load(n) for n in turns[:at_once]]

    def finish():
        store(first)
        for start in range(at_once, len(turns), at_once):
            store([load(n) for n in turns[start : start + at_once]])

    return finish


def _in_pairs(o: Thread, w: Weight, words: list[U]) -> list[U]:
    """8 values in the order in which `_values` has those of a weight."""
    if w.parts == 1:
        return words
    a, b, c, d = words
    first, second = ((a, c), (b, d)) if w.parts == 4 else ((a, b), (c, d))
    return [o.prmt(*two, selector) for two in (first, second) for selector in (0x5410, 0x7632)]


# A weight's rows in registers.


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where a lane's two rows of a tile begin, and their scales."""

    data: tuple[Pointer, Pointer]
    scales: tuple[Pointer, ...]


def rows_of(o: Thread, w: Weight, refs: dict[str, Pointer], name: str, matrix: U, first: U) -> Rows:
    """Of the tile from row `first` of a matrix of the stack on; rows past the end are the last one."""
    mine = [o.umin(first + (o.lane() >> 2) + 8 * i, o.U(w.rows - 1)) for i in range(2)]
    data = tuple(refs[name].at(matrix * w.rows + row, w.row_bytes) for row in mine)
    if not w.scale:
        return Rows(data, ())  # pyright: ignore[reportArgumentType]
    at = refs[f"{name}_scales"]
    if w.scale == "f32":  # one for the tile
        blocks = -(-w.rows // BLOCK_ROWS)
        block = o.umin(first // BLOCK_ROWS, o.U(blocks - 1))
        return Rows(data, (at.at(matrix * blocks + block, w.scale_bytes),))  # pyright: ignore[reportArgumentType]
    return Rows(data, tuple(at.at(matrix * w.rows + row, w.scale_bytes) for row in mine))  # pyright: ignore[reportArgumentType]


def _scale_width(w: Weight) -> tuple[int, int]:
    """(bits of a piece's scales, log2 of the pieces that share them)."""
    return {"e8m0": (8, w.element == "e4m3"), "e4m3": (16, 0), "f32": (32, 3)}[w.scale]


def multiply(
    o: Thread,
    w: Weight,
    share: Share,
    tiles: Sequence[Rows],
    split: U,
    x: Pointer,
    ready: Callable[[], None],
    where: P | None = None,
) -> list[list[F]]:
    """The products of one warp: of each tile four sums, as `Thread.mma` leaves them.

    split: which part of the rows. x: where the token that is the lane's column begins in shared memory; `ready` is
    called once the first loads are on their way, and then x can be read. where: whether there is anything to read.
    """
    lane, window = o.lane(), share.window
    exact = 4 * share.units == w.pieces  # nothing past a row's end is read
    first = split * (4 * share.each) + (lane & 3)
    x = x.at(split * share.each, UNIT * w.parts, (lane & 3) * 16)

    def piece_of(base: Pointer, start: U, unit: int, *, size: int, shift: int, words: int, bits: int = 32) -> list[U]:
        if exact and not 4 * unit % (1 << shift):
            at = base.at(start >> shift if shift else start, size)
            return at.load(words, where, bits=bits, offset=(4 * unit >> shift) * size, fresh=True)
        piece = start + 4 * unit if exact else o.umin(start + 4 * unit, o.U(w.pieces - 1))
        return base.at(piece >> shift if shift else piece, size).load(words, where, bits=bits, fresh=True)

    def load(start: U, unit: int) -> list[U]:
        out = []
        for tile in tiles:
            for base in tile.data:
                out += piece_of(base, start, unit, size=16, shift=0, words=4)
            for base in tile.scales:
                bits, shift = _scale_width(w)
                out += piece_of(base, start, unit, size=bits // 8, shift=int(shift), words=1, bits=bits)
        return out

    def add_unit(loaded: list[U], at: Pointer, unit: int, sums: list[list[list[F]]]):
        """sums: [tile][chain][4]; two chains, so that an instruction need not wait for the last one."""
        width = 8 + len(tiles[0].scales)
        zero = [o.F(0.0)] * 4
        started = [[zero, zero] for _ in tiles] if w.scale == "f32" else sums
        scales = [_scales(o, w, loaded[width * i + 8 : width * (i + 1)]) for i in range(len(tiles))]
        for part in range(w.parts):
            tokens = at.load(4, offset=(unit * w.parts + part) * UNIT)
            for i in range(len(tiles)):
                words = loaded[width * i : width * i + 8]
                low, high = (_values(o, w, words[4 * h : 4 * h + 4], scales[i], h, part) for h in range(2))
                started[i] = [
                    o.mma(
                        [low[2 * n], high[2 * n], low[2 * n + 1], high[2 * n + 1]],
                        tokens[2 * n : 2 * n + 2],
                        started[i][n],
                        w.half,
                    )
                    for n in range(2)
                ]
        if w.scale != "f32":
            return started
        out = []
        for i in range(len(tiles)):
            scale = o.float(loaded[width * i + 8])
            both = zip(*started[i], sums[i][0], strict=True)
            out.append([[o.fma(scale, a + b, total) for a, b, total in both], zero])
        return out

    def turn(loaded: list[list[U]], at: Pointer, sums, following: U | None):
        ahead = []
        for unit in range(window):
            sums = add_unit(loaded[unit], at, unit, sums)
            if following is not None:
                ahead.append(load(following, unit))
        return ahead, sums

    loaded = [load(first, unit) for unit in range(window)]
    ready()
    sums = [[[o.F(0.0)] * 4 for _ in range(2)] for _ in tiles]
    step = window * UNIT * w.parts  # bytes of a token
    # Where little is to be done with what is loaded, code that is no loop loads all of it first, into all registers:
    # gate and up of 8 experts in BF16 took 16.2 instead of 14.2 us. Blocks of one tile are large, with fewer registers.
    simple = w.scale in ("", "f32")
    if share.trips <= (UNROLLED // 2 if simple and len(tiles) == 1 else UNROLLED):
        for trip in range(share.trips):
            last = trip + 1 == share.trips
            following = None if last else first + 4 * window * (trip + 1)
            loaded, sums = turn(loaded, x.at(None, 0, trip * step), sums, following)
    else:
        width = len(loaded[0])

        def body(i: U, *flat: U) -> list[U]:
            loaded = [list(flat[n * width : (n + 1) * width]) for n in range(window)]
            sums = _unflat(o, flat[window * width :], len(tiles))
            ahead, sums = turn(loaded, x.at(i, step), sums, first + (i + 1) * (4 * window))
            return [*(word for unit in ahead for word in unit), *_flat(o, sums)]

        start = [*(word for unit in loaded for word in unit), *_flat(o, sums)]
        flat = o.loop(share.trips - 1, body, start, rolled=simple)
        loaded = [list(flat[n * width : (n + 1) * width]) for n in range(window)]
        sums = _unflat(o, flat[window * width :], len(tiles))
        _, sums = turn(loaded, x.at(None, 0, (share.trips - 1) * step), sums, None)
    return [[a + b for a, b in zip(*chains, strict=True)] for chains in sums]


def _flat(o: Thread, sums) -> list[U]:
    return [o.bits(v) for chains in sums for chain in chains for v in chain]


def _unflat(o: Thread, flat: Sequence[U], tiles: int):
    values = [o.float(v) for v in flat]
    return [[values[8 * i + 4 * n : 8 * i + 4 * n + 4] for n in range(2)] for i in range(tiles)]


def _scales(o: Thread, w: Weight, loaded: list[U]) -> list[U]:
    """What a lane's rows are multiplied with in BF16, as pairs: of all its elements, or of each half of them."""
    if not w.scale:
        return []
    if w.scale == "f32":
        return [o.U(0x7B807B80)] * 2  # 2^120: what the bits of E4M3 lack
    if w.scale == "e8m0":  # bytes become exponents, + 64 and at most that of infinity
        return [o.umin(s + 64, o.U(0xFF)) * 0x00800080 for s in loaded]
    # E4M3 bits (a scale has no sign) as BF16 are scale * 2^-120: times 2^127 and 2^100.
    pairs = [o.prmt(s, o.U(0), 0x4140) << 4 for s in loaded]
    return [o.mul_bf16(o.mul_bf16(p, o.U(0x7F007F00)), o.U(0x71807180)) for p in pairs]


def _values(o: Thread, w: Weight, words: list[U], scales: list[U], row: int, part: int) -> list[U]:
    """The part-th 8 elements of a piece as pairs, times their scale."""
    if w.parts == 1:
        return words
    scale = scales[row]
    if w.element == "e4m3":
        return [v for word in words[2 * part : 2 * part + 2] for v in _e4m3(o, word, scale)]
    if w.scale == "e4m3":  # two blocks in a piece
        scale = o.half_twice(scale, part >= 2)
    return _e2m1(o, words[part], scale)


def _e4m3(o: Thread, word: U, scale: U) -> list[U]:
    """Elements 0 and 2, and 1 and 3."""
    low = o.mul_bf16((word << 4) & 0x07F007F0, scale) ^ ((word << 8) & 0x80008000)
    return [low, o.mul_bf16((word >> 4) & 0x07F007F0, scale) ^ (word & 0x80008000)]


def _e2m1(o: Thread, word: U, scale: U) -> list[U]:
    """Elements i and i + 4, for i below 4; see mosaic_dequant.E2M1."""
    out = []
    for moved, kept in ((word << 2, word << 8), (word >> 6, word)):
        both = o.select_bits(0x01DC01DC, moved, kept)
        out += [o.mul_bf16(v & 0x81C081C0, scale) for v in (both << 4, both)]
    return out
