"""Sums of rows that one warpgroup gathers by a table of places: the arithmetic of the combine that gathers.

Letters: D columns of a row, J terms of a row's sum.

A group is up to four rows, one for each warp, or more warps to a row where there are fewer. Each warp has the places of
its row in shared memory; those of the next group are on their way from device memory while this one is added up. Where
a row may lack terms (of a token's experts a rank holds some), the places that hold something come first, so that what
is not there is neither read nor added: at two ranks half of the terms.
Written for one thread, as the kernels of `permute` are.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.permute.mosaic_rows import KINDS, NOTHING, add_rows, packed

THREADS = 128
WARPS = THREADS // 32
LOADS = 8  # of 16 bytes each that a thread has in flight, 32 registers
BATCH = 4  # terms whose loads are issued together


@dataclasses.dataclass(frozen=True)
class Group:
    """rows of a group (1, 2 or 4), each the sum of `terms` J <= 32 rows of `columns` D; dtypes of them and of the sum.

    weighted: whether terms have weights, and may be missing. fresh: whether the rows are written while the kernel runs.
    """

    rows: int
    terms: int
    columns: int
    dtype: str
    out: str
    weighted: bool = True
    fresh: bool = False

    @property
    def warps(self) -> int:
        """Warps that share a row."""
        return WARPS // self.rows

    @property
    def stride(self) -> int:
        """Words of a table from one warp's places to the next one's."""
        return -(-self.terms // BATCH) * BATCH

    @property
    def weights_offset(self) -> int:
        """Bytes from a table's places to its weights."""
        return 4 * WARPS * self.stride

    @property
    def table_words(self) -> int:
        return WARPS * self.stride * (2 if self.weighted else 1)


def fetch(o, g: Group, first, count, places, weights=None, region: int | None = None) -> tuple:
    """What `keep` puts into a table: the places and weights of rows `first` .. `first` + `count`, a term to each lane.

    places, weights: [.., J]. region: rows of a source; then places are slots in the regions of J sources.
    """
    lane, row = o.lane(), _row(o, g)
    inside = (row < count) & (lane < o.U(g.terms))
    index = (first + row) * g.terms + lane
    place = o.where(inside, places.at(index, 4).load(1, inside)[0], o.U(NOTHING))
    if region is not None:
        place = o.where(place.same(o.U(NOTHING)), place, lane * region + place)
    return place, None if weights is None else weights.at(index, 4).load(1, inside)[0]


def keep(o, g: Group, table, found: tuple) -> None:
    """Stores what was fetched, those of a weighted row that hold something first, in their order."""
    place, weight = found
    lane = o.lane()
    at = lane
    if g.weighted:
        bit = o.U(1) << lane
        full = ~place.same(o.U(NOTHING))
        those = o.warp_or(o.where(full, bit, o.U(0)))
        before = o.popcount(those & (bit - 1))
        at = o.where(full, before, o.popcount(those) + lane - before)
    at = _warp(o) * g.stride + at
    inside = lane < o.U(g.stride)
    table.at(None, 0, at * 4).store([place], inside)
    if weight is not None:
        table.at(None, 0, at * 4 + g.weights_offset).store([weight], inside)


def add_group(o, g: Group, table, source, out, count) -> None:
    """Row i of `out` = sum over j of weights[i, j] * source[places[i, j]] for i < `count`, j ascending, in float32."""
    row = _row(o, g)
    o.when(row < count, lambda: _add_row(o, g, table.at(None, 0, _warp(o) * (4 * g.stride)), source, out, row))


def _warp(o):
    return (o.thread() >> 5) & (WARPS - 1)


def _row(o, g: Group):
    """The row of a group that this thread's warp works on."""
    return _warp(o) // g.warps


def _add_row(o, g: Group, table, source, out, row) -> None:
    kind, out_kind = KINDS[g.dtype], KINDS[g.out]
    size, values = (4, 4) if kind == "f32" else (2, 8)
    pieces, out_piece = g.columns // values, values * (4 if out_kind == "f32" else 2)
    threads = 32 * g.warps
    steps = -(-pieces // threads)
    batch = min(BATCH, g.terms)
    unroll = min(steps, 4, LOADS // batch)
    turns = -(-steps // unroll)
    column = o.thread() & (threads - 1)

    def words(offset, terms):
        wide = 1 if terms == 3 else terms
        return [w for k in range(0, terms, wide) for w in table.load(wide, offset=offset + 4 * k)]

    def add_terms(start, at, inside, totals):
        """totals [unroll][values] + the terms from `start` on, as one list of bits."""
        places = words(4 * start, batch)
        full = [~place.same(o.U(NOTHING)) for place in places]
        # Without weights 1, by which a product is exact.
        weights = words(g.weights_offset + 4 * start, batch) if g.weighted else [o.bits(o.F(1.0))] * batch
        rows = [source.at(place, g.columns * size) for place in places]
        loaded = []
        for piece, here in zip(at, inside, strict=True):
            where = full if here is None else [here & there for there in full]
            loaded.append(
                [r.at(None, 0, piece * 16).load(4, w, fresh=g.fresh) for r, w in zip(rows, where, strict=True)]
            )
        sums = [add_rows(o, total, of, weights, full, kind) for total, of in zip(totals, loaded, strict=True)]
        return [o.bits(v) for total in sums for v in total]

    def add_pieces(i):
        at = [i * (unroll * threads) + (column + u * threads) for u in range(unroll)]
        inside = [None if pieces == turns * unroll * threads else piece < o.U(pieces) for piece in at]
        totals = [[o.F(0.0)] * values for _ in at]
        for start in range(0, g.terms, batch):

            def more(start=start, totals=totals):
                return add_terms(start, at, inside, totals)

            if start and g.weighted:  # all threads of a warp branch alike
                some = ~words(4 * start, 1)[0].same(o.U(NOTHING))
                flat = o.rarely(some, more, [o.bits(v) for total in totals for v in total])
            else:
                flat = more()
            totals = [[o.float(w) for w in flat[u * values : (u + 1) * values]] for u in range(unroll)]
        for piece, here, total in zip(at, inside, totals, strict=True):
            result = packed(o, total, out_kind)
            there = out.at(row, pieces * out_piece, piece * out_piece)
            for k in range(0, len(result), 4):
                there.at(None, 0, 4 * k).store(result[k : k + 4], here)
        return []

    o.loop(turns, add_pieces)
