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
    BOX,
    CONSUMERS,
    SWIZZLE,
    as_views,
    compiler_params,
    drain,
    load_rows,
    num_sms,
    row_views,
    store_rows,
    swizzled,
    walk,
)
from .schedule import Schedule, each_tile, num_tiles, read_tile

_BLOCK = 128  # columns of K under one scale, and the depth of one stage
_PART = 128  # columns of the output that are summed and scaled together


@dataclasses.dataclass(frozen=True)
class Fp8Config:
    """block_n: columns of a tile, 128 or 256. cluster, band, stages, out_slots: as in mosaic_sm90.Config."""

    block_n: int = 128
    stages: int = 5
    cluster: int = 1
    band: int = 0
    out_slots: int = 2
    num_blocks: int | None = None

    def __post_init__(self):
        if self.block_n not in (128, 256):
            raise ValueError(f"block_n={self.block_n}: choose 128 or 256.")


def _body(
    schedule,
    x,
    sx,
    w,
    sw,
    out,
    a_smem,
    b_smem,
    out_smem,
    full,
    empty,
    *,
    config: Fp8Config,
    zero_tail,
    interpret,
):
    c = config
    k, n = x.shape[1], out.shape[1]
    a_smem, a_load = as_views(a_smem, 2, interpret)
    out_write, out_box, out_row = as_views(out_smem, 3, interpret)
    k_steps = k // _BLOCK
    n_tiles = pl.cdiv(n, c.block_n * c.cluster)
    parts = c.block_n // _PART
    wg = lax.axis_index("wg")
    num_m = num_tiles(schedule, x.shape[0], 2 * BOX, zero_tail=zero_tail)
    blocks = lax.axis_size("block")
    my_tiles = lax.div(num_m * n_tiles - lax.axis_index("block") + blocks - 1, blocks)

    def tile_at(i):
        m_tile, n_tile = walk(lax.axis_index("block") + i * blocks, num_m, n_tiles, c.band)
        if c.cluster > 1:
            n_tile = n_tile * c.cluster + lax.axis_index("cluster")
        return *read_tile(schedule, m_tile, 2 * BOX, BOX), n_tile

    @pl.when(wg == CONSUMERS)
    def _produce():
        plgpu.set_max_registers(40, action="decrease")

        def per_tile(tile, step):
            weight, row0, row1, _, n_tile = tile
            col = n_tile * c.block_n

            def per_step(j, step):
                slot = lax.rem(step, c.stages)

                @pl.when(step >= c.stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                ks = pl.ds(j * _BLOCK, _BLOCK)
                shared: Any = dict(collective_axes="cluster") if c.cluster > 1 else {}
                for box, row in enumerate((row0, row1)):
                    target = a_load.at[slot, pl.ds(box * BOX, BOX)]
                    plgpu.copy_gmem_to_smem(x.at[pl.ds(row, BOX), ks], target, full.at[slot], **shared)
                plgpu.copy_gmem_to_smem(w.at[weight, pl.ds(col, c.block_n), ks], b_smem.at[slot], full.at[slot])
                return step + 1

            return lax.fori_loop(0, jnp.where(weight >= 0, k_steps, 0), per_step, step)

        drain(each_tile(my_tiles, tile_at, per_tile), c.stages, empty)

    @pl.when(wg < CONSUMERS)
    def _multiply():
        plgpu.set_max_registers(232, action="increase")
        chunk_n = SWIZZLE // jnp.dtype(out.dtype).itemsize
        last_block = sw.shape[1] - 1

        def per_tile(tile, step):
            weight, row0, row1, rows, n_tile = tile
            col = n_tile * c.block_n
            blocks_n = [jnp.minimum(lax.div(col, _PART) + p, last_block) for p in range(parts)]

            first = jnp.where(wg == 0, row0, row1)

            def scales_of(j):
                """Row scales [64] and the scale of each part, read a step ahead into registers.

                Rows begin anywhere, which the copy engine does not take for the contiguous axis of an array.
                """
                at = jnp.minimum(j, k_steps - 1)
                rows = load_rows(sx.at[at, pl.ds(first, BOX)])
                return rows, tuple(sw[jnp.maximum(weight, 0), b, at] for b in blocks_n)

            def per_step(j, carry):
                step, (row_scale, scales), totals = carry
                slot = lax.rem(step, c.stages)
                following = scales_of(j + 1)
                plgpu.barrier_wait(full.at[slot])
                new = []
                for p in range(parts):

                    def scope(acc, p=p):
                        b = b_smem.at[slot, pl.ds(p * _PART, _PART)]
                        plgpu.wgmma(acc, a_smem.at[slot, pl.ds(wg * BOX, BOX)], b.T)
                        return acc[...]

                    part = pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef((BOX, _PART), jnp.float32))
                    factor = lax.broadcast_in_dim(row_scale * scales[p], (BOX, _PART), (0,))
                    new.append(totals[p] + part * factor)
                plgpu.barrier_arrive(empty.at[slot])
                return step + 1, following, tuple(new)

            zero = plgpu.layout_cast(jnp.zeros((BOX, _PART), jnp.float32), plgpu.Layout.WGMMA)
            steps = jnp.where(weight >= 0, k_steps, 0)
            end, _, totals = lax.fori_loop(0, steps, per_step, (step, scales_of(0), (zero,) * parts))
            # The second box of a group with fewer rows than one box is the first again: it has nothing to store.
            my_rows = jnp.where((rows < BOX) & (wg == 1), 0, rows)
            chunk = 0
            for p in range(parts):
                value = totals[p].astype(out.dtype)
                for start in range(0, _PART, chunk_n):
                    slot = chunk % c.out_slots
                    plgpu.wait_smem_to_gmem(c.out_slots - 1, wait_read_only=True)
                    store_rows(
                        value[:, start : start + chunk_n],
                        first,
                        my_rows,
                        pl.ds(col + p * _PART + start, chunk_n),
                        out,
                        out_write.at[wg, slot],
                        out_box.at[wg, slot],
                        out_row.at[wg, slot],
                    )
                    chunk += 1
            return end

        each_tile(my_tiles, tile_at, per_tile)
        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("config", "out_dtype", "zero_tail", "interpret"))
def grouped_matmul_fp8(
    x: jax.Array,  # float8_e4m3fn [M, K]
    sx: jax.Array,  # float32 [M, K / 128]
    w: jax.Array,  # float8_e4m3fn [G, N, K]
    sw: jax.Array,  # float32 [G, N / 128, K / 128]
    schedule: Schedule,  # for block=128
    *,
    config: Fp8Config = Fp8Config(),  # noqa: B008
    out_dtype=jnp.bfloat16,
    zero_tail: bool = True,
    interpret=None,
) -> jax.Array:  # [M, N]
    """Rows of x times the transposed weight of their group. M >= 64; N a multiple of 64, K of 128."""
    (m, k), n = x.shape, w.shape[1]
    c = config
    out_dtype = jnp.dtype(out_dtype)
    if m < BOX or n % 64 or k % _BLOCK:
        raise ValueError(
            f"x {x.shape}, w {w.shape}: this kernel takes M >= {BOX}, N a multiple of 64 and K of {_BLOCK}; "
            "pad the arrays."
        )
    if c.cluster > 1:
        empty = plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=CONSUMERS, num_barriers=c.stages)
    else:
        empty = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=c.stages)
    out_shape = (CONSUMERS, c.out_slots, BOX, SWIZZLE // out_dtype.itemsize)
    kernel = plgpu.kernel(
        functools.partial(_body, config=c, zero_tail=zero_tail, interpret=bool(interpret)),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(c.num_blocks or num_sms() // c.cluster,),
        grid_names=("block",),
        cluster=(c.cluster,) if c.cluster > 1 else (),
        cluster_names=("cluster",) if c.cluster > 1 else (),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=dict(
            a_smem=row_views((c.stages, 2 * BOX, _BLOCK), x.dtype, plain=False, interpret=bool(interpret)),
            b_smem=plgpu.SMEM((c.stages, c.block_n, _BLOCK), w.dtype, transforms=swizzled(w.dtype)),
            out_smem=row_views(out_shape, out_dtype, plain=True, interpret=bool(interpret)),
            full=plgpu.Barrier(num_arrivals=3, num_barriers=c.stages),
            empty=empty,
        ),
        compiler_params=compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )
    # A box at the end of the rows may reach past them.
    return kernel(schedule, x, jnp.pad(sx.T, ((0, 0), (0, BOX))), w, sw)
