"""What the kernels for few rows per group share: tiles that they find themselves, and what follows a tile's products.

M rows, sorted by group; G groups; N columns of the output, which are rows of a weight; P parts of a weight (gate, up).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .bounds import Bounds, find_tile, num_tiles, num_words, write_bounds
from .mosaic_dequant import Packed
from .mosaic_sm90 import load_rows

ROWS = 64  # of a weight, for one warpgroup


def bounds_of(sizes, scratch, block: int) -> Bounds:
    """The bounds of the groups: those given, or each warp's sums of the sizes, in `scratch` [2, words] (shared)."""
    if isinstance(sizes, Bounds):
        return sizes
    from ..permute.thread import Pointer, Thread

    groups = sizes.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def write(ctx, sizes, scratch):
        del ctx
        start = Pointer(scratch, shared=True)
        rows, tiles = start, start.at(None, 0, 4 * num_words(groups))
        write_bounds(Thread(), groups, block, Pointer(sizes), rows, tiles)

    write(sizes, scratch)  # pyright: ignore[reportCallIssue]
    return Bounds(scratch.at[0], scratch.at[1])


def tiles_of_block(sizes, offset, scratch, *, shape, num_weights, num_groups, block_t, block_n, zero_tail):
    """each(work): step = work((weight, first row, rows, tile along N), step) for a block's tiles, from step 0.

    shape: [M, N]. offset: int32 [1], the group that weight 0 belongs to; None for the first group. A tile is looked up
    when its turn comes: to do so ahead would delay the first one, and shared memory is near.
    """
    bounds = bounds_of(sizes, scratch, block_t)
    groups = dict(num_groups=num_groups, num_rows=shape[0], block=block_t)
    first_group = 0 if offset is None else offset[0]
    n_tiles = pl.cdiv(shape[1], block_n)
    count = num_tiles(bounds, **groups, zero_tail=zero_tail) * n_tiles
    block, blocks = lax.axis_index("block"), lax.axis_size("block")

    def read(i):
        index = block + i * blocks
        tile = lax.div(index, n_tiles)
        found = find_tile(bounds, tile, **groups, num_weights=num_weights, group_offset=first_group)
        return *found, lax.rem(index, n_tiles)

    mine = lax.div(count - block + blocks - 1, blocks)
    return lambda work: lax.fori_loop(0, mine, lambda i, step: work(read(i), step), jnp.int32(0))


def copied_or_not(there, copies, barrier, count: int):
    """`copies`, which arrive on the barrier `count` times, if `there`; else only the arrivals."""
    if there is True:
        copies()
        return
    pl.when(there)(copies)

    @pl.when(jnp.logical_not(there))
    def _():
        for _ in range(count):
            plgpu.barrier_arrive(barrier)


def tile_factor(factors, packed: Packed | None, weight, part: int):
    """What all products of a tile are multiplied with, or None. Best read before them: it takes half a microsecond.

    factors: float32 [G, P] (1 where all are alike), or [G, P, N] (then None), NVFP4's global scales.
    """
    if packed and packed.scale == "e8m0":
        return packed.factor
    if packed and packed.scale == "e4m3" and len(factors.shape) == 2:
        place = (jnp.maximum(weight, 0), part)
        return factors[*(i if size > 1 else 0 for i, size in zip(place, factors.shape, strict=True))] * packed.factor
    return None


def finished(value, factor, factors, bias, packed: Packed | None, weight, part: int, row):
    """Products [64, T] of a weight's rows from `row` on, with the format's factor and the bias [G, P, N], if any."""

    def of_rows(ref):
        # Past the end of the weight others are read, but nothing is stored there.
        return load_rows(ref.at[jnp.maximum(weight, 0), part, pl.ds(jnp.minimum(row, ref.shape[2] - ROWS), ROWS)])

    if factor is not None:
        value = value * factor
    elif packed and packed.scale == "e4m3":
        value = value * lax.broadcast_in_dim(of_rows(factors) * packed.factor, value.shape, (0,))
    if len(bias.shape) == 3:
        owned = jnp.where(weight >= 0, 1.0, 0.0)
        value = value + lax.broadcast_in_dim(of_rows(bias) * owned, value.shape, (0,))
    return value


def store_rows(value: jax.Array, out_ref, first, rows, column, columns):
    """value [64, T] transposed to out_ref[first : first + min(rows, T), column : column + columns] in device memory.

    From registers, element by element: what few tokens come to is too little for a way through shared memory and its
    waits. columns: 64, 32 or 0.
    """
    split, layout = plgpu.Layout.WG_SPLAT, plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(), split, split, split, split))
    def store(ctx, value, out, *scalars):
        del ctx
        _emit_store(value, out, *(a.registers.item() for a in scalars))

    store(plgpu.layout_cast(value, layout), out_ref, first, rows, column, columns)  # pyright: ignore[reportCallIssue]


def _emit_store(value, out, first, rows, column, columns):
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    i32, i64, i8 = (ir.IntegerType.get_signless(n) for n in (32, 64, 8))
    utils = mgpu.utils
    size = utils.bitwidth(value.mlir_dtype) // 8
    width = ir.MemRefType(out.type).shape[1]

    def const(v):
        return arith.constant(i32, v)

    # A lane holds rows g and g + 8 (of 16 for its warp) and tokens 2t and 2t + 1 (of 8).
    thread = utils.thread_idx()
    lane, warp = arith.andi(thread, const(31)), arith.andi(arith.shrui(thread, const(5)), const(3))
    token = arith.muli(arith.andi(lane, const(3)), const(2))
    warp_row = arith.muli(warp, const(16))
    at = arith.addi(column, arith.addi(warp_row, arith.shrui(lane, const(2))))
    row = arith.muli(arith.extui(i64, arith.addi(first, token)), arith.constant(i64, width))
    offset = arith.muli(arith.addi(row, arith.extui(i64, at)), arith.constant(i64, size))
    pointer = utils.getelementptr(utils.memref_ptr(out), [offset], i8)
    mine = arith.cmpi(arith.CmpIPredicate.slt, warp_row, columns)
    left = arith.select(mine, arith.subi(rows, token), const(0))  # tokens from this lane's first one on
    registers = value.registers.reshape(value.shape[1] // 8, 2)
    kind, letter = {2: ("b16", "h"), 4: ("b32", "r")}[size]
    text = f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.{kind} [$0], $1; }}"
    for eight in range(registers.shape[0]):
        for i in range(2):
            there = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.sgt, left, const(8 * eight + i)))
            for half in range(2):
                element = vector.extract(registers[eight, half], dynamic_position=[], static_position=[i])
                bits = arith.bitcast(ir.IntegerType.get_signless(8 * size), element)
                here = utils.getelementptr(pointer, [((8 * eight + i) * width + 8 * half) * size], i8)
                llvm.inline_asm(None, [here, bits, there], text, f"l,{letter},r,~{{memory}}", has_side_effects=True)
