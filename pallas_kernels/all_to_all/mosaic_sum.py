"""Sums of rows that one warpgroup gathers by a table of places: the arithmetic of the combine that gathers.

Letters: D columns of a row, J terms of a row's sum.

A group of up to four rows and more is worked on at once: each warp has a row of its own while there are enough of them,
and the warps share a row otherwise. The places of a group lie in shared memory; those of the next group are on their
way from device memory while this one is added up. Written for one thread, as `mosaic_encode` is.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.permute.mosaic_rows import KINDS, NOTHING, add_rows, packed

from .mosaic_encode import THREADS

WARPS = THREADS // 32
LOADS = 16  # of 16 bytes each that a thread has in flight, 64 registers


@dataclasses.dataclass(frozen=True)
class Group:
    """rows of a group (a power of two), each the sum of `terms` J rows of `columns` D; dtypes of them and of the sum.

    weighted: whether terms have weights. fresh: whether the rows are written while the kernel runs.
    """

    rows: int
    terms: int
    columns: int
    dtype: str
    out: str
    weighted: bool = True
    fresh: bool = False

    @property
    def places(self) -> int:
        return self.rows * self.terms

    @property
    def weights_offset(self) -> int:
        """Bytes from a table's places to its weights."""
        return -(-self.places // 4) * 16

    @property
    def table_words(self) -> int:
        return self.weights_offset // 4 * (2 if self.weighted else 1)


def fetch(o, g: Group, first, count, places, weights=None, region: int | None = None) -> list[tuple]:
    """What `keep` puts into a table: words `first` .. `first` + `count` of `places`, and of `weights`.

    region: rows of a source; then places are slots [.., J] of each of J sources, one region behind the other.
    """
    found = []
    for start in range(0, g.places, THREADS):
        index = (o.thread() & (THREADS - 1)) + start
        inside = index < count
        place = o.where(inside, places.at(first + index, 4).load(1, inside)[0], o.U(NOTHING))
        if region is not None:
            place = o.where(place.same(o.U(NOTHING)), place, (index % g.terms) * region + place)
        weight = None if weights is None else weights.at(first + index, 4).load(1, inside)[0]
        found.append((index, place, weight))
    return found


def keep(o, g: Group, table, found: list[tuple]) -> None:
    for index, place, weight in found:
        inside = None if g.places % THREADS == 0 else index < o.U(g.places)
        table.at(None, 0, index * 4).store([place], inside)
        if weight is not None:
            table.at(None, 0, index * 4 + g.weights_offset).store([weight], inside)


def add_group(o, g: Group, table, source, out, count) -> None:
    """Row i of `out` = sum over j of weights[i, j] * source[places[i, j]] for i < `count`, j ascending, in float32."""
    kind, out_kind = KINDS[g.dtype], KINDS[g.out]
    size, values = (4, 4) if kind == "f32" else (2, 8)
    pieces, out_piece = g.columns // values, values * (4 if out_kind == "f32" else 2)
    warps = max(1, WARPS // g.rows)  # that share a row
    at_once, threads = WARPS // warps, 32 * warps
    steps = -(-pieces // threads)
    unroll = min(steps, 4, max(1, LOADS // g.terms))
    turns = -(-steps // unroll)
    batch = LOADS // unroll
    thread = o.thread() & (THREADS - 1)
    column = thread & (threads - 1)

    def words(row, offset, terms):
        """The words of these terms of a row of the table."""
        wide = 4 if g.terms % 4 == 0 and terms.start % 4 == 0 and len(terms) % 4 == 0 else 1
        at = table.at(None, 0, row * (4 * g.terms) + (offset + 4 * terms.start))
        return [w for k in range(0, len(terms), wide) for w in at.load(wide, offset=4 * k)]

    def of_row(row):
        def add_pieces(i, carried):
            at = [i * (unroll * threads) + (column + u * threads) for u in range(unroll)]
            inside = [None if pieces == turns * unroll * threads else piece < o.U(pieces) for piece in at]
            totals = [[o.F(0.0)] * values for _ in at]
            for start in range(0, g.terms, batch):
                terms = range(start, min(start + batch, g.terms))
                places = words(row, 0, terms)
                full = [~place.same(o.U(NOTHING)) for place in places]
                # Stands for 1, by which a product is exact.
                weights = words(row, g.weights_offset, terms) if g.weighted else [o.bits(o.F(1.0))] * len(terms)
                rows = [source.at(place, g.columns * size) for place in places]
                loaded = []
                for piece, here in zip(at, inside, strict=True):
                    where = full if here is None else [here & there for there in full]
                    loaded.append(
                        [r.at(None, 0, piece * 16).load(4, w, fresh=g.fresh) for r, w in zip(rows, where, strict=True)]
                    )
                totals = [add_rows(o, t, of, weights, full, kind) for t, of in zip(totals, loaded, strict=True)]
            for piece, here, total in zip(at, inside, totals, strict=True):
                result = packed(o, total, out_kind)
                there = out.at(row, pieces * out_piece, piece * out_piece)
                for k in range(0, len(result), 4):
                    there.at(None, 0, 4 * k).store(result[k : k + 4], here)
            return carried

        o.loop(turns, [], add_pieces)

    for first in range(0, g.rows, at_once):
        row = (thread // threads) + first
        o.when(row < count, lambda row=row: of_row(row))
