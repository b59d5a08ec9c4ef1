"""Weight gradient of the BF16 grouped matmul for Hopper: out[g] = dy[rows of g]^T @ x[rows of g], [G, N, K].

The contraction runs over a group's rows in steps of 64. Steps begin at a multiple of 8 rows (what TMA can address in
the matrix unit's tiling), so the first and the last step of a group may hold rows of its neighbours: those are
overwritten with zeros in both operands before the product, which keeps a neighbour's NaN out as well. Groups without
rows store zeros.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mosaic_sm90 import BOX, CONSUMERS, SWIZZLE, compiler_params, drain, num_sms, swizzled
from .mosaic_tiles import stores_under_way, where_inside

_STEP = 64


@dataclasses.dataclass(frozen=True)
class DrhsConfig:
    """Output tile block_n x block_k (of N and K); each of two warpgroups multiplies 64 of the 128 rows."""

    block_k: int = 256
    stages: int = 4
    out_slots: int = 2
    num_blocks: int | None = None

    def __post_init__(self):
        if self.block_k % 128 or not 128 <= self.block_k <= 256:
            raise ValueError(f"block_k={self.block_k}: choose 128 or 256.")

    block_n = CONSUMERS * BOX


def _body(starts, ends, dy, x, out, a_smem, b_smem, out_smem, full, empty, masked, *, config: DrhsConfig):
    c = config
    groups, n, k = out.shape
    n_tiles, k_tiles = pl.cdiv(n, c.block_n), pl.cdiv(k, c.block_k)
    wg = lax.axis_index("wg")
    blocks = lax.axis_size("block")
    my_tiles = lax.div(groups * n_tiles * k_tiles - lax.axis_index("block") + blocks - 1, blocks)

    def tile(i):
        index = lax.axis_index("block") + i * blocks
        group = lax.div(index, n_tiles * k_tiles)
        within = lax.rem(index, n_tiles * k_tiles)
        start, end = starts[group], ends[group]
        base = lax.div(start, 8)
        steps = jnp.where(end > start, lax.div(end - base * 8 + _STEP - 1, _STEP), 0)
        return (
            group,
            start,
            end,
            base,
            steps,
            lax.div(within, k_tiles) * c.block_n,
            lax.rem(within, k_tiles) * c.block_k,
        )

    @pl.when(wg == CONSUMERS)
    def _produce():
        plgpu.set_max_registers(40, action="decrease")

        def per_tile(i, step):
            _, _, _, base, steps, row_n, col_k = tile(i)

            def per_step(j, step):
                slot = lax.rem(step, c.stages)

                @pl.when(step >= c.stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                rows = pl.ds((base + j * (_STEP // 8)) * 8, _STEP)
                plgpu.copy_gmem_to_smem(dy.at[rows, pl.ds(row_n, c.block_n)], a_smem.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(x.at[rows, pl.ds(col_k, c.block_k)], b_smem.at[slot], full.at[slot])
                return step + 1

            return lax.fori_loop(0, steps, per_step, step)

        drain(lax.fori_loop(0, my_tiles, per_tile, jnp.int32(0)), c.stages, empty)

    @pl.when(wg < CONSUMERS)
    def _multiply():
        plgpu.set_max_registers(232, action="increase")
        chunk_k = SWIZZLE // jnp.dtype(out.dtype).itemsize
        half = c.block_k // CONSUMERS

        def clear(view, low, high):
            """Zeros in the rows of view [64, C] outside [low, high)."""
            for start in range(0, view.shape[1], 64):
                ref = view.at[:, pl.ds(start, 64)]
                row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (_STEP, 64), 0), plgpu.Layout.WGMMA)
                ref[...] = jnp.where((row >= low) & (row < high), ref[...], jnp.zeros((), ref.dtype))

        def per_tile(i, step):
            group, start, end, base, steps, row_n, col_k = tile(i)

            def scope(acc):
                def per_step(j, step):
                    slot = lax.rem(step, c.stages)
                    low, high = start - base * 8 - j * _STEP, end - base * 8 - j * _STEP
                    plgpu.barrier_wait(full.at[slot])

                    @pl.when((low > 0) | (high < _STEP))
                    def _():
                        clear(a_smem.at[slot, :, pl.ds(wg * BOX, BOX)], low, high)
                        clear(b_smem.at[slot, :, pl.ds(wg * half, half)], low, high)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(masked)
                        plgpu.barrier_wait(masked)

                    plgpu.wgmma(acc, a_smem.at[slot, :, pl.ds(wg * BOX, BOX)].T, b_smem.at[slot])
                    plgpu.wgmma_wait(1)

                    @pl.when(j > 0)
                    def _():
                        plgpu.barrier_arrive(empty.at[lax.rem(step - 1, c.stages)])

                    return step + 1

                last = lax.fori_loop(0, steps, per_step, step)
                value = acc[...].astype(out.dtype)

                @pl.when(steps > 0)
                def _():
                    plgpu.barrier_arrive(empty.at[lax.rem(last - 1, c.stages)])

                return last, value

            last, value = pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef((BOX, c.block_k), jnp.float32))
            for chunk, at in enumerate(range(0, c.block_k, chunk_k)):

                @where_inside(col_k + at, k, c.block_k)
                def _(chunk=chunk, slot=chunk % c.out_slots, at=at):
                    plgpu.wait_smem_to_gmem(stores_under_way(chunk, c.out_slots, k, c.block_k), wait_read_only=True)
                    out_smem.at[wg, slot][...] = value[:, at : at + chunk_k]
                    plgpu.commit_smem()
                    window = out.at[group, pl.ds(row_n + wg * BOX, BOX), pl.ds(col_k + at, chunk_k)]
                    plgpu.copy_smem_to_gmem(out_smem.at[wg, slot], window)

            return last

        lax.fori_loop(0, my_tiles, per_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("config", "out_dtype", "interpret"))
def grouped_matmul_drhs(
    dy: jax.Array,  # [M, N]
    x: jax.Array,  # [M, K]
    starts: jax.Array,  # int32 [G], first row of each group
    ends: jax.Array,  # int32 [G], one past its last row
    *,
    config: DrhsConfig = DrhsConfig(),  # noqa: B008
    out_dtype=None,
    interpret=None,
) -> jax.Array:  # [G, N, K]
    """Weight gradient of every group. M a multiple of 8 and at least 64; N and K multiples of 64."""
    (m, n), (_, k) = dy.shape, x.shape
    c = config
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if m % 8 or m < _STEP or n % 64 or k % 64:
        raise ValueError(
            f"dy {dy.shape}, x {x.shape}: this kernel takes M >= {_STEP} that is a multiple of 8, and N, K that are "
            "multiples of 64; pad the arrays."
        )
    kernel = plgpu.kernel(
        functools.partial(_body, config=c),
        out_type=jax.ShapeDtypeStruct((starts.shape[0], n, k), out_dtype),
        grid=(c.num_blocks or num_sms(),),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=dict(
            a_smem=plgpu.SMEM((c.stages, _STEP, c.block_n), dy.dtype, transforms=swizzled(dy.dtype)),
            b_smem=plgpu.SMEM((c.stages, _STEP, c.block_k), x.dtype, transforms=swizzled(x.dtype)),
            out_smem=plgpu.SMEM(
                (CONSUMERS, c.out_slots, BOX, SWIZZLE // out_dtype.itemsize),
                out_dtype,
                transforms=swizzled(out_dtype),
            ),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            empty=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=c.stages),
            masked=plgpu.Barrier(num_arrivals=CONSUMERS),
        ),
        compiler_params=compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(starts, ends, dy, x)
