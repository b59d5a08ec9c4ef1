"""BF16 grouped matmul for Hopper with few rows per group: weights stream through once at memory speed.

The operands trade places: 64 rows of a weight matrix are the matrix unit's M side and `block_t` tokens its N side, so
a group of 8 tokens costs an instruction of 8 columns, not 64 rows of padding. Blocks are small (two fit on one
multiprocessor) and hold as many bytes in flight as shared memory allows. Only groups that have rows are read.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mosaic_sm90 import SWIZZLE, as_views, compiler_params, drain, num_sms, row_views, swizzled
from .schedule import TILE_FIELDS

_ROWS = 64


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """block_t: tokens of a tile. consumers: multiplying warpgroups, each with 64 rows of the weight.
    chunks: 128-byte columns of K in one stage. per_sm: blocks on one multiprocessor."""

    block_t: int = 16
    consumers: int = 1
    chunks: int = 2
    stages: int = 5
    per_sm: int = 2
    num_blocks: int | None = None

    def __post_init__(self):
        if self.block_t % 8 or not 8 <= self.block_t <= 128:
            raise ValueError(f"block_t={self.block_t}: choose a multiple of 8 from 8 to 128.")
        if self.consumers not in (1, 2):
            raise ValueError(f"consumers={self.consumers}: choose 1 or 2.")

    @property
    def block_n(self) -> int:
        return self.consumers * _ROWS

    def smem_bytes(self, itemsize: int = 2) -> int:
        stage = (self.block_n + self.block_t) * self.chunks * SWIZZLE
        return self.stages * stage + self.block_n * self.block_t * itemsize


def _body(tiles, count, x, w, out, w_smem, x_smem, out_smem, full, empty, *, config: DecodeConfig, interpret: bool):
    c = config
    _, k = x.shape
    _, n, _ = w.shape
    x_smem, x_load = as_views(x_smem, 2, interpret)
    width = SWIZZLE // jnp.dtype(x.dtype).itemsize
    k_steps = pl.cdiv(k, width * c.chunks)
    n_tiles = pl.cdiv(n, c.block_n)
    wg = lax.axis_index("wg")
    blocks = lax.axis_size("block")
    my_tiles = lax.div(count[0] * n_tiles - lax.axis_index("block") + blocks - 1, blocks)

    def tile(i):
        index = lax.axis_index("block") + i * blocks
        t = lax.div(index, n_tiles)
        field = [tiles[t * TILE_FIELDS + j] for j in (0, 1, 3)]
        return *field, lax.rem(index, n_tiles) * c.block_n

    @pl.when(wg == c.consumers)
    def _produce():
        def per_tile(i, step):
            weight, row, _, col = tile(i)

            def per_step(j, step):
                slot = lax.rem(step, c.stages)

                @pl.when(step >= c.stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                plgpu.copy_gmem_to_smem(
                    w.at[weight, pl.ds(col, c.block_n), pl.ds(j * (width * c.chunks), width * c.chunks)],
                    w_smem.at[slot],
                    full.at[slot],
                )
                for chunk in range(c.chunks):
                    ks = pl.ds(j * (width * c.chunks) + chunk * width, width)
                    plgpu.copy_gmem_to_smem(x.at[pl.ds(row, c.block_t), ks], x_load.at[slot, chunk], full.at[slot])
                return step + 1

            return lax.fori_loop(0, jnp.where(weight >= 0, k_steps, 0), per_step, step)

        drain(lax.fori_loop(0, my_tiles, per_tile, jnp.int32(0)), c.stages, empty)

    @pl.when(wg < c.consumers)
    def _multiply():
        def per_tile(i, step):
            weight, row, rows, col = tile(i)

            def scope(acc):
                def per_step(j, step):
                    slot = lax.rem(step, c.stages)
                    plgpu.barrier_wait(full.at[slot])
                    for chunk in range(c.chunks):
                        plgpu.wgmma(
                            acc,
                            w_smem.at[slot, pl.ds(wg * _ROWS, _ROWS), pl.ds(chunk * width, width)],
                            x_smem.at[slot, chunk].T,
                        )
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])
                    return step + 1

                end = lax.fori_loop(0, jnp.where(weight >= 0, k_steps, 0), per_step, step)
                return end, acc[...].astype(out.dtype)

            end, value = pl.run_scoped(scope, plgpu.ACC((_ROWS, c.block_t), jnp.float32))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem.at[wg].T[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA)
            plgpu.commit_smem()
            columns = pl.ds(col + wg * _ROWS, _ROWS)

            @pl.when(rows == c.block_t)
            def _():
                plgpu.copy_smem_to_gmem(out_smem.at[wg], out.at[pl.ds(row, c.block_t), columns])

            @pl.when(rows < c.block_t)
            def _():
                def one(r, _):
                    plgpu.copy_smem_to_gmem(out_smem.at[wg, pl.ds(r, 1)], out.at[pl.ds(row + r, 1), columns])
                    return ()

                lax.fori_loop(0, rows, one, ())

            return end

        lax.fori_loop(0, my_tiles, per_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("config", "out_dtype", "interpret"))
def grouped_matmul_decode(
    x: jax.Array,  # [M, K]
    w: jax.Array,  # [G, N, K]
    tiles: jax.Array,  # int32, from schedule.tile_schedule(block_m=config.block_t, box=config.block_t)
    count: jax.Array,  # int32 [1]
    *,
    config: DecodeConfig = DecodeConfig(),
    out_dtype=None,
    interpret=None,
) -> jax.Array:  # [M, N]
    """Rows of x times the transposed weight of their group. M >= block_t; N and K multiples of 64."""
    (m, k), (_, n, _) = x.shape, w.shape
    c = config
    out_dtype = out_dtype or x.dtype
    if m < c.block_t or n % 64 or k % 64:
        raise ValueError(
            f"x {x.shape}, w {w.shape}: this kernel takes M >= {c.block_t} and N, K that are multiples of 64; "
            "pad the arrays or choose a smaller block_t."
        )
    width = SWIZZLE // x.dtype.itemsize
    kernel = plgpu.kernel(
        functools.partial(_body, config=c, interpret=bool(interpret)),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(c.num_blocks or num_sms() * c.per_sm,),
        grid_names=("block",),
        num_threads=c.consumers + 1,
        thread_name="wg",
        scratch_types=dict(
            w_smem=plgpu.SMEM((c.stages, c.block_n, width * c.chunks), w.dtype, transforms=swizzled(w.dtype)),
            x_smem=row_views((c.stages, c.chunks, c.block_t, width), x.dtype, plain=False, interpret=bool(interpret)),
            out_smem=plgpu.SMEM((c.consumers, c.block_t, _ROWS), out_dtype),
            full=plgpu.Barrier(num_arrivals=1 + c.chunks, num_barriers=c.stages),
            empty=plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages),
        ),
        compiler_params=compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(tiles, count, x, w)
