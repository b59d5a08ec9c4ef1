"""FP8 grouped matmul for Hopper: E4M3 operands, one float32 scale for 128 columns of a row of x and for 128 x 128 of w.

The matrix unit sums FP8 products with fewer bits than float32 and knows no scales, so every 128 columns of K are
summed on their own, scaled, and added to the float32 total in ordinary registers. The two multiplying warpgroups take
turns: one scales while the other's products run. Tiles, boxes and stages are those of mosaic_sm90.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mosaic_sm90 import (
    SMEM_BYTES,
    SWIZZLE,
    arrive,
    as_views,
    compiler_params,
    fill_stages,
    load_rows,
    num_sms,
    row_views,
    swizzled,
    wasteful,
)
from .mosaic_tiles import (
    BOX,
    CONSUMERS,
    nth_tile,
    offset_of,
    shares,
    store_box,
    store_rows,
    stores_under_way,
    table_bytes,
    tables,
    tiles_of,
    tiles_of_block,
    walk,
    where_inside,
)
from .schedule import each_tile
from .tiles import find_tile, num_tiles, read_boxes, uneven

BLOCK = 128  # columns of K under one scale, and the depth of one stage
_TILE_N = 128  # columns of a tile, under one scale of the weights


@dataclasses.dataclass(frozen=True)
class Fp8Config:
    """Tiles of block_m x 128. cluster, band, stages, out_slots: as in mosaic_sm90.Config."""

    block_m: int = 256
    stages: int = 4
    cluster: int = 2
    band: int = 0
    out_slots: int = 2
    num_blocks: int | None = None

    def __post_init__(self):
        if self.block_m not in (2 * BOX, 4 * BOX):
            raise ValueError(f"block_m={self.block_m}: choose {2 * BOX} or {4 * BOX}.")

    def fitted(self, tiles: int, groups: int) -> Fp8Config:
        """As mosaic_sm90.Config.fitted."""
        c = dataclasses.replace(self, cluster=1) if wasteful(self.cluster, tiles) else self
        fits = c.smem_bytes() + table_bytes(groups) <= SMEM_BYTES
        return c if fits else dataclasses.replace(c, out_slots=1)

    def smem_bytes(self) -> int:
        """Shared memory of one block with BF16 results, barriers left out."""
        stage = (self.block_m + _TILE_N) * BLOCK
        return self.stages * stage + CONSUMERS * self.out_slots * BOX * SWIZZLE


def product(a, b, *, interpret: bool) -> jax.Array:
    """a [64, 128] times b [C, 128] transposed, both in shared memory: [64, C] in registers.

    The first of the four instructions overwrites the accumulator. Pallas' own would add to one that has to be zeroed
    before, which takes about as long as the scaling.
    """
    columns = b.shape[0]
    if interpret:

        def scope(acc):
            plgpu.wgmma(acc, a, b.T)
            return acc[...]

        return pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef((BOX, columns), jnp.float32))
    import numpy as np
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import fragmented_array as fa
    from jax.experimental.mosaic.gpu import mma_utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    tiles = plgpu.RefType(swizzled(jnp.float8_e4m3fn))
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(tiles, tiles), return_type=plgpu.ShapeDtypeStruct((BOX, columns), jnp.float32, layout=layout)
    )
    def multiply(ctx, a, b):
        del ctx
        describe = functools.partial(mma_utils.create_descriptor, swizzle=SWIZZLE)
        (a_start, a_step), _, _ = describe(a, large_tile=(BOX, BLOCK), group_size=(BOX, BLOCK), logical_k_major=False)
        b = mgpu.utils.memref_transpose(b, (1, 0, 3, 2))
        (b_start, b_step), _, _ = describe(
            b, large_tile=(BLOCK, BLOCK), group_size=(BLOCK, columns), logical_k_major=True
        )
        one = ir.VectorType.get((1,), ir.F32Type.get())
        count = columns // 2
        text = _ptx(columns, a_step[1][0] >> 4, b_step[1][0] >> 4)
        struct = llvm.inline_asm(
            llvm.StructType.get_literal([one] * count),
            [a_start, b_start],  # pyright: ignore[reportArgumentType]
            text,
            ",".join(["=f"] * count + ["l", "l"]),
            has_side_effects=True,
        )
        registers = np.empty((count,), dtype=object)
        registers[:] = [llvm.extractvalue(one, struct, [i]) for i in range(count)]  # pyright: ignore[reportArgumentType]
        out = mgpu.FragmentedArray(
            _registers=registers.reshape(fa.WGMMA_LAYOUT_ACC_32BIT.registers_shape((BOX, columns))),
            _layout=fa.WGMMA_LAYOUT_ACC_32BIT,
            _is_signed=None,
        )
        return out.to_layout(fa.WGMMA_LAYOUT)

    return multiply(a, b)  # pyright: ignore[reportReturnType, reportCallIssue]


def _ptx(columns: int, a_step: int, b_step: int) -> str:
    """128 columns of K in four instructions, waited for. Steps are those of the matrix descriptors."""
    count = columns // 2
    sums = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    lines = [
        "{ .reg .pred p; .reg .b64 a, b;",
        f"mov.b64 a, ${count}; mov.b64 b, ${count + 1};",
        "setp.ne.b32 p, 0, 0; wgmma.fence.sync.aligned;",
    ]
    for i in range(4):
        if i:
            lines.append(f"add.s64 a, a, {a_step}; add.s64 b, b, {b_step};")
        if i == 1:
            lines.append("setp.eq.b32 p, 0, 0;")
        lines.append(f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3 {sums}, a, b, p, 1, 1;")
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"])


def tiles_in_order(tiles, n_tiles: int, groups: dict, held: dict, *, cluster: int, band: int = 0, zero_tail: bool):
    """(how many tiles this block has, what the i-th of them is: read_boxes and its place along N).

    groups, held: keyword arguments of num_tiles and find_tile. n_tiles: along N, for a whole cluster.
    """
    num_m = num_tiles(tiles, **groups, zero_tail=zero_tail)
    count = tiles_of_block(num_m * n_tiles)
    turned = (lax.rem(lax.axis_index("block"), 2) == 1) & uneven(tiles, groups["num_groups"])

    def tile_at(i):
        i = jnp.where(turned, jnp.maximum(count - 1 - i, 0), i)
        m_tile, n_tile = walk(nth_tile(i), num_m, n_tiles, band)
        tile = find_tile(tiles, m_tile, **groups, **held)
        if cluster > 1:
            n_tile = n_tile * cluster + lax.axis_index("cluster")
        return *read_boxes(tile, groups["block"], BOX), n_tile

    return count, tile_at


def copy_boxes(x, target, barrier, where, ks, shared: dict[str, Any], *, interpret: bool):
    """Columns ks of a tile's boxes of x, to target [block_m, 128]; shared: the axis that they are multicast along.

    where: (first row, first row of the last box, boxes), as from read_boxes.
    """
    first, last, boxes = where
    for box in range(target.shape[0] // BOX):
        row = jnp.where(box < boxes - 1, first + box * BOX, last)
        needed: Any = dict(predicate=box < boxes) if box and not interpret else {}
        part = target.at[pl.ds(box * BOX, BOX)]
        plgpu.copy_gmem_to_smem(x.at[pl.ds(row, BOX), ks], part, barrier, **shared, **needed)


def _body(
    sizes,
    offset,
    x,
    sx,
    w,
    sw,
    out,
    tiles_smem,
    a_smem,
    b_smem,
    out_smem,
    full,
    empty,
    *,
    config: Fp8Config,
    num_groups,
    zero_tail,
    interpret,
):
    c = config
    k, n = x.shape[1], out.shape[1]
    a_smem, a_load = as_views(a_smem, 2, interpret)
    out_write, out_box, out_row = as_views(out_smem, 3, interpret)
    k_steps = k // BLOCK
    max_boxes = c.block_m // BOX
    n_tiles = pl.cdiv(n, _TILE_N * c.cluster)
    wg = lax.axis_index("wg")
    tiles = tiles_of(sizes, tiles_smem, c.block_m, 0)
    groups = dict(num_groups=num_groups, num_rows=out.shape[0], block=c.block_m)

    def tiles_here():
        """As in mosaic_sm90."""
        held = dict(num_weights=w.shape[0], group_offset=offset[0])
        return tiles_in_order(tiles, n_tiles, groups, held, cluster=c.cluster, band=c.band, zero_tail=zero_tail)

    last_block = sw.shape[1] - 1

    @pl.when(wg == CONSUMERS)
    def _produce():
        plgpu.set_max_registers(40, action="decrease")
        my_tiles, tile_at = tiles_here()

        def load_stage(tile, j, slot):
            weight, n_tile = tile[0], tile[-1]
            ks = pl.ds(j * BLOCK, BLOCK)
            shared: Any = dict(collective_axes="cluster") if c.cluster > 1 else {}
            copy_boxes(x, a_load.at[slot], full.at[slot], tile[1:4], ks, shared, interpret=interpret)
            columns = pl.ds(n_tile * _TILE_N, _TILE_N)
            plgpu.copy_gmem_to_smem(w.at[weight, columns, ks], b_smem.at[slot], full.at[slot])

        fill_stages(my_tiles, tile_at, load_stage, k_steps, c.stages, empty)

    @pl.when(wg < CONSUMERS)
    def _multiply():
        plgpu.set_max_registers(232, action="increase")
        my_tiles, tile_at = tiles_here()
        chunk_n = SWIZZLE // jnp.dtype(out.dtype).itemsize

        def tile_of(boxes, tile, step, steps):
            """A tile of this many boxes, which is known when the kernel is compiled."""
            weight, first, last, _, group_rows, n_tile = tile
            work = shares(boxes, wg, _TILE_N)
            rows_of = [jnp.where(box < boxes - 1, first + box * BOX, last) for box, _, _ in work]

            def read(j):
                """The scales of step j in registers: of the weights, and [64] of each piece of work."""
                at = jnp.minimum(j, k_steps - 1)
                scale = sw[jnp.maximum(weight, 0), jnp.minimum(n_tile, last_block), at]
                return scale, [load_rows(sx.at[at, pl.ds(row, BOX)]) for row in rows_of]

            def per_step(j, carry):
                step, now, totals = carry
                slot = lax.rem(step, c.stages)
                following = read(j + 1)
                plgpu.barrier_wait(full.at[slot])
                new = []
                for i, (box, first_column, columns) in enumerate(work):
                    factor = now[1][i] * now[0]
                    a, b = a_smem.at[slot, pl.ds(box * BOX, BOX)], b_smem.at[slot, pl.ds(first_column, columns)]
                    part = product(a, b, interpret=interpret)
                    if i + 1 == len(work):
                        arrive(empty.at[slot], cluster=c.cluster, interpret=interpret)
                    new.append(totals[i] + part * lax.broadcast_in_dim(factor, part.shape, (0,)))
                return step + 1, following, new

            zeros = [
                plgpu.layout_cast(jnp.zeros((BOX, columns), jnp.float32), plgpu.Layout.WGMMA) for _, _, columns in work
            ]
            _, _, totals = lax.fori_loop(0, steps, per_step, (step, read(0), zeros))
            chunk = 0
            for row, (_, first_column, columns), total in zip(rows_of, work, totals, strict=True):
                value = total.astype(out.dtype)
                for start in range(0, columns, chunk_n):
                    slot = chunk % c.out_slots
                    column = n_tile * _TILE_N + first_column + start
                    part, where = value[:, start : start + chunk_n], (pl.ds(column, chunk_n), out)
                    views = [view.at[wg, slot] for view in (out_write, out_box, out_row)]

                    @where_inside(column, n, _TILE_N)
                    def _(chunk=chunk, part=part, row=row, where=where, views=views):
                        plgpu.wait_smem_to_gmem(stores_under_way(chunk, c.out_slots, n, _TILE_N), wait_read_only=True)
                        if boxes > 1:
                            store_box(part, row, *where, *views[:2])
                        else:
                            store_rows(part, row, group_rows, *where, *views)

                    chunk += 1

        def per_tile(tile, step):
            steps = jnp.where(tile[0] >= 0, k_steps, 0)
            for boxes in range(1, max_boxes + 1):
                pl.when(tile[3] == boxes)(functools.partial(tile_of, boxes, tile, step, steps))
            return step + steps

        each_tile(my_tiles, tile_at, per_tile)
        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("config", "out_dtype", "zero_tail", "interpret"))
def grouped_matmul_fp8(
    x: jax.Array,  # float8_e4m3fn [M, K]
    sx: jax.Array,  # float32 [M, K / 128]
    w: jax.Array,  # float8_e4m3fn [G, N, K]
    sw: jax.Array,  # float32 [G, N / 128, K / 128]
    group_sizes: jax.Array,  # int32 [groups]
    group_offset: jax.Array | None = None,  # int32 [], the group that w[0] belongs to
    *,
    config: Fp8Config = Fp8Config(),  # noqa: B008
    out_dtype=jnp.bfloat16,
    zero_tail: bool = True,
    interpret=None,
) -> jax.Array:  # [M, N]
    """Rows of x times the transposed weight of their group. M >= 64; N a multiple of 64, K of 128."""
    (m, k), n = x.shape, w.shape[1]
    c = config.fitted(pl.cdiv(n, _TILE_N), group_sizes.shape[0])
    out_dtype = jnp.dtype(out_dtype)
    if m < BOX or n % 64 or k % BLOCK:
        raise ValueError(
            f"x {x.shape}, w {w.shape}: this kernel takes M >= {BOX}, N a multiple of 64 and K of {BLOCK}; "
            "pad the arrays."
        )
    if c.cluster > 1:
        empty = plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=CONSUMERS, num_barriers=c.stages)
    else:
        empty = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=c.stages)
    out_shape = (CONSUMERS, c.out_slots, BOX, SWIZZLE // out_dtype.itemsize)
    sizes, tiles_smem = tables(group_sizes, c.block_m, 0, interpret)
    kernel = plgpu.kernel(
        functools.partial(
            _body,
            config=c,
            num_groups=group_sizes.shape[0],
            zero_tail=zero_tail,
            interpret=bool(interpret),
        ),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(c.num_blocks or num_sms() // c.cluster,),
        grid_names=("block",),
        cluster=(c.cluster,) if c.cluster > 1 else (),
        cluster_names=("cluster",) if c.cluster > 1 else (),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=dict(
            tiles_smem=tiles_smem,
            a_smem=row_views((c.stages, c.block_m, BLOCK), x.dtype, plain=False, interpret=bool(interpret)),
            b_smem=plgpu.SMEM((c.stages, _TILE_N, BLOCK), w.dtype, transforms=swizzled(w.dtype)),
            out_smem=row_views(out_shape, out_dtype, plain=True, interpret=bool(interpret)),
            full=plgpu.Barrier(num_arrivals=c.block_m // BOX + 1, num_barriers=c.stages),
            empty=empty,
        ),
        compiler_params=compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )
    # A box at the end of the rows may reach past them. In this order XLA makes one kernel of it, not two.
    sx = jnp.pad(sx, ((0, BOX), (0, 0))).T
    return kernel(sizes, offset_of(group_offset), x, sx, w, sw)
