"""Sums of packed quantised rows at their owner: the end of a combine whose rows travel quantised (Mosaic GPU).

Letters: T tokens on this rank, D hidden size, R ranks, C rows reserved for each rank.

Rows are decoded in registers and added in float32, so that they are read once and nothing decoded is stored. Written
for one thread, as the kernels of `permute` are; a thread has a piece of a token.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.permute.mosaic_rows import KINDS, NOTHING, packed
from pallas_kernels.permute.thread import Pointer, Thread, U, launch
from pallas_kernels.quantize import BlockFormat, lane

from .mosaic_encode import PackedRow

THREADS = 256
VALUES = 16  # of a piece; blocks are multiples of it


@dataclasses.dataclass(frozen=True)
class SumPacked:
    """tokens T of `columns` D values, one row from each of `ranks` R, in regions of `capacity` C rows of `fmt`.

    row: the parts of a packed row; row_bytes from one to the next. out: a key of KINDS.
    """

    tokens: int
    ranks: int
    capacity: int
    columns: int
    fmt: BlockFormat
    row: PackedRow
    row_bytes: int
    out: str

    @property
    def per_row(self) -> int:
        return self.columns // VALUES


def sum_packed(o: Thread, t: SumPacked, refs: dict[str, Pointer]):
    fmt, kind = t.fmt, KINDS[t.out]
    flat = o.block() * THREADS + o.thread()
    token, piece = flat // t.per_row, flat % t.per_row
    inside = token < U(t.tokens)
    found = []
    for rank in range(t.ranks):
        slot = refs["slot"].at(token, 4 * t.ranks, 4 * rank).load(1, inside)[0]
        here = inside & ~slot.same(U(NOTHING))
        of_row = lambda offset, slot=slot, rank=rank: refs["rows"].at(slot + rank * t.capacity, t.row_bytes, offset)  # noqa: E731
        data = of_row(piece * (VALUES * fmt.bits // 8)).load(VALUES * fmt.bits // 32, here)
        scale = of_row(piece // (fmt.block // VALUES) * fmt.scale_bytes).at(None, 0, t.row.scale_offset)
        scale = scale.load(1, here, bits=8 * fmt.scale_bytes)[0]
        found.append((data, scale))
    total = None
    for data, scale in found:  # a row that did not come is zeros
        values = lane.decode(o, data, scale, None, fmt)
        total = values if total is None else [a + b for a, b in zip(total, values, strict=True)]
    assert total is not None
    words = packed(o, total, kind)
    size = 4 * len(words)
    at = refs["out"].at(token, t.per_row * size, piece * size)
    for i in range(0, len(words), 4):
        at.at(None, 0, 4 * i).store(words[i : i + 4], inside)


def reason_not(fmt: BlockFormat, columns: int, out_dtype) -> str | None:
    """Why the kernel cannot sum rows of `columns` values in `fmt`; None where it can."""
    if fmt.scale != "e8m0":  # by which a product is exact, so that a sum that the compiler fuses with it is the same
        return f"it decodes formats whose scales are powers of two in a byte, not {fmt.name!r}"
    if columns % fmt.block:
        return f"blocks of {fmt.block} do not divide rows of {columns} values"
    if jnp.dtype(out_dtype).name not in KINDS:
        return f"it returns {', '.join(KINDS)}, not {jnp.dtype(out_dtype).name}"
    return None


def sum_rows_packed(
    rows: jax.Array, slot: jax.Array, *, columns: int, fmt: BlockFormat, layout: PackedRow, out_dtype
) -> jax.Array:
    """out[t] = sum over r of the values of rows[r * C + slot[t, r]], in float32, r ascending, where slot[t, r] >= 0.

    rows: uint8 [R * C, bytes], bytes a multiple of 16, packed rows of `columns` D values in `fmt`. slot: int32 [T, R].
    Returns [T, D] of `out_dtype`; tokens that went nowhere are zero. Raises ValueError for what `reason_not` names.
    """
    reason = reason_not(fmt, columns, out_dtype)
    if reason:
        raise ValueError(f"sum_rows_packed: {reason}. Decode the rows first.")
    tokens, ranks = slot.shape
    out = jax.ShapeDtypeStruct((tokens, columns), out_dtype)
    task = SumPacked(
        tokens, ranks, rows.shape[0] // ranks, columns, fmt, layout, rows.shape[1], jnp.dtype(out_dtype).name
    )
    blocks = -(-tokens * task.per_row // THREADS)
    operands = {"rows": rows, "slot": slot}
    return launch(sum_packed, task, operands, {"out": out}, blocks=blocks, threads=THREADS, name="sum_packed")["out"]
