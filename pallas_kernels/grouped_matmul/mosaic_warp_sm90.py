"""Grouped matmul for Hopper, few rows per group, 4-bit weights: by the warps' own matrix instruction (mosaic_warp.py).

Blocks, tiles and operands are as in mosaic_decode_sm90.py, which hands over to this kernel. What differs: the products
are those of single warps, which need no large pieces of dequantised weights; block scales are copied on their own, for
512 bytes of a weight's row at a time; and a warpgroup brings the activations into the order that the lanes have, so
that no kernel has to before (2 us).

H200, NVFP4, us and share of the copy bandwidth, warpgroups' instruction | this kernel: (64 tokens, K=7168, N=4096, 32
groups) 147 0.84 | 136 0.90; (256, 4096, 3072, 32) 73 0.72 | 61 0.86, by four warpgroups with two stages 63; gate and up
of Qwen3-30B-A3B, 64 tokens, 74 0.70 | 62 0.85 (MXFP4 74 | 59), of which scales that are copied 16 bytes at a time and
global scales read at the end of a tile had cost 4; down 44 0.59 | 38 0.69. The second takes 57 without multiplying: 3
pass before the first stage is there, and the last multiprocessor ends 3 after the median. Scales copied 128 bytes at a
time, weights called into L2 ahead, or two blocks of 64 rows for each warpgroup gained nothing. Tiles of 16 tokens take
74 instead of 63, as long as the other kernel: no rule of the table ships them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import mosaic_warp
from .bounds import num_words
from .gate import Gate, gated_product
from .mosaic_dequant import Packed
from .mosaic_few_rows import ROWS, copied_or_not, finished, store_rows, tile_factor, tiles_of_block
from .mosaic_sm90 import SWIZZLE, compiler_params, drain, num_sms, swizzled

if TYPE_CHECKING:
    from .mosaic_decode_sm90 import DecodeConfig

SCALE_CHUNKS = 4  # pieces of 128 bytes of a weight's row whose scales are copied together
SCALE_STAGES = 2
ELEMENTS = 2 * SWIZZLE  # of such a piece


def smem_bytes(config: DecodeConfig, packed: Packed, parts: int) -> int:
    """Shared memory of one block, barriers left out."""
    c = config
    stage = c.chunks * (parts * c.block_n + c.block_t * 4) * SWIZZLE
    return c.stages * stage + SCALE_STAGES * parts * c.block_n * max(c.chunks, SCALE_CHUNKS) * packed.scales


def _body(
    sizes,
    offset,
    x,
    w,
    scales,
    factors,
    bias,
    out,
    w_smem,
    x_smem,
    s_smem,
    bounds_smem,
    out_smem,
    full,
    empty,
    x_full,
    x_ready,
    s_full,
    s_empty,
    *,
    config,
    packed,
    gate,
    num_groups,
    shifted,
    zero_tail,
    interpret,
):
    c: DecodeConfig = config
    n = out.shape[1]
    parts = range(w.shape[1])
    wide = c.chunks * SWIZZLE
    steps = pl.cdiv(w.shape[3], wide)
    # Scales of as many steps as there are in SCALE_CHUNKS pieces come together, in stages of their own.
    together = max(1, SCALE_CHUNKS // c.chunks)
    s_width, s_groups = s_smem.shape[3], pl.cdiv(steps, together)
    wg = lax.axis_index("wg")
    each_tile = tiles_of_block(
        sizes,
        offset if shifted else None,
        bounds_smem,
        shape=out.shape,
        num_weights=w.shape[0],
        num_groups=num_groups,
        block_t=c.block_t,
        block_n=c.block_n,
        zero_tail=zero_tail,
    )

    def steps_of(weight):
        return jnp.where(weight >= 0, steps, 0)

    def scale_slot(j, step):
        """Where the scales of a tile's j-th step are; `step` counts the steps of all tiles."""
        index = lax.div(step, steps) * s_groups + lax.div(j, together)
        return index, lax.rem(index, SCALE_STAGES)

    @pl.when(wg == c.consumers)
    def _produce():
        def copy_tokens(j, slot, row, at, count):
            for chunk in range(c.chunks):
                source = x.at[pl.ds(row, count), pl.ds((j * c.chunks + chunk) * ELEMENTS, ELEMENTS)]
                plgpu.copy_gmem_to_smem(source, x_smem.at[slot, chunk, pl.ds(at, count)], x_full.at[slot])

        def per_tile(tile, step):
            weight, first, rows, n_tile = tile
            columns = pl.ds(n_tile * c.block_n, c.block_n)

            def copy_scales(j, step):
                index, slot = scale_slot(j, step)

                @pl.when(index >= SCALE_STAGES)
                def _():
                    plgpu.barrier_wait(s_empty.at[slot])

                for part in parts:
                    source = scales.at[weight, part, columns, pl.ds(lax.div(j, together) * s_width, s_width)]
                    plgpu.copy_gmem_to_smem(source, s_smem.at[slot, part], s_full.at[slot])

            def per_step(j, step):
                slot = lax.rem(step, c.stages)

                @pl.when(step >= c.stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                # First, so that they are arranged when the weights arrive.
                for at, count in c.copied:
                    some = functools.partial(copy_tokens, j, slot, first + at, at, count)
                    copied_or_not(at == 0 or rows > at, some, x_full.at[slot], c.chunks)
                pl.when(lax.rem(j, together) == 0)(lambda: copy_scales(j, step))
                for part in parts:
                    source = w.at[weight, part, columns, pl.ds(j * wide, wide)]
                    plgpu.copy_gmem_to_smem(source, w_smem.at[slot, part], full.at[slot])
                return step + 1

            return lax.fori_loop(0, steps_of(weight), per_step, step)

        end = each_tile(per_tile)
        drain(end, c.stages, empty)
        drain(lax.div(end, steps) * s_groups, SCALE_STAGES, s_empty)

    @pl.when(wg == c.consumers + 1 if not interpret else False)
    def _arrange():
        def per_tile(tile, step):
            def per_step(_, step):
                slot = lax.rem(step, c.stages)
                plgpu.barrier_wait(x_full.at[slot])
                mosaic_warp.arrange_in_place(x_smem.at[slot])
                plgpu.commit_smem()
                plgpu.barrier_arrive(x_ready.at[slot])
                return step + 1

            return lax.fori_loop(0, steps_of(tile[0]), per_step, step)

        each_tile(per_tile)

    @pl.when(wg < c.consumers)
    def _multiply():
        mine = pl.ds(wg * ROWS, ROWS)

        def per_tile(tile, step):
            weight, first, rows, n_tile = tile
            row = n_tile * c.block_n + wg * ROWS
            known = [tile_factor(factors, packed, weight, part) for part in parts]

            def per_step(j, carry):
                step, accs = carry
                slot = lax.rem(step, c.stages)
                _, s_slot = scale_slot(j, step)

                @pl.when(lax.rem(j, together) == 0)
                def _():
                    plgpu.barrier_wait(s_full.at[s_slot])

                plgpu.barrier_wait(full.at[slot])
                plgpu.barrier_wait((x_full if interpret else x_ready).at[slot])
                here = pl.ds(lax.rem(j, together) * (c.chunks * packed.scales), c.chunks * packed.scales)
                accs = mosaic_warp.multiply(
                    accs,
                    [w_smem.at[slot, part, mine] for part in parts],
                    [s_smem.at[s_slot, part, mine, here] for part in parts],
                    x_smem.at[slot],
                    packed,
                    interpret=interpret,
                )
                if not interpret:
                    mosaic_warp.end_reading()
                plgpu.barrier_arrive(empty.at[slot])

                @pl.when((lax.rem(j, together) == together - 1) | (j == steps - 1))
                def _():
                    plgpu.barrier_arrive(s_empty.at[s_slot])

                return step + 1, accs

            zeros = plgpu.layout_cast(jnp.zeros((ROWS, c.block_t), jnp.float32), plgpu.Layout.WGMMA)
            end, values = lax.fori_loop(0, steps_of(weight), per_step, (step, [zeros for _ in parts]))
            values = [
                finished(value, known[part], factors, bias, packed, weight, part, row)
                for part, value in enumerate(values)
            ]
            value = (gated_product(values[0], values[1], gate) if gate else values[0]).astype(out.dtype)
            if not interpret:
                store_rows(value, out, first, rows, row, jnp.where(row < n, ROWS, 0))
                return end
            out_smem.at[wg][...] = value.T

            @pl.when(row < n)
            def _():
                def one(r, _):
                    source = out_smem.at[wg, pl.ds(r, 1)]
                    plgpu.copy_smem_to_gmem(source, out.at[pl.ds(first + r, 1), pl.ds(row, ROWS)])
                    return ()

                lax.fori_loop(0, rows, one, ())

            return end

        each_tile(per_tile)


def run(
    sizes,
    offset: jax.Array,
    x: jax.Array,
    w: jax.Array,
    scales: jax.Array,
    factors: jax.Array,
    bias: jax.Array,
    *,
    config: DecodeConfig,
    packed: Packed,
    gate: Gate | None,
    out_dtype,
    num_groups: int,
    shifted: bool,
    zero_tail: bool,
    interpret,
) -> jax.Array:
    """What mosaic_decode_sm90.grouped_matmul_decode is called for, with its arguments checked and made whole by it.

    sizes: int32 [groups] or, for more groups than a kernel adds up, their Bounds. shifted: whether `offset` counts.
    factors, bias: [1] where there are none.
    """
    c, parts = config, w.shape[1]
    s_width = max(c.chunks, SCALE_CHUNKS) * packed.scales
    if interpret:  # what reaches over the end of a row is not filled up with zeros there
        w, scales = (
            jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, -a.shape[3] % b)))
            for a, b in ((w, c.chunks * SWIZZLE), (scales, s_width))
        )
    kernel = plgpu.kernel(
        functools.partial(
            _body,
            config=c,
            packed=packed,
            gate=gate,
            num_groups=num_groups,
            shifted=shifted,
            zero_tail=zero_tail,
            interpret=bool(interpret),
        ),
        out_type=jax.ShapeDtypeStruct((x.shape[0], w.shape[2]), out_dtype),
        grid=(c.num_blocks or num_sms() * c.per_sm,),
        grid_names=("block",),
        num_threads=c.consumers + (1 if interpret else 2),
        thread_name="wg",
        scratch_types=dict(
            w_smem=plgpu.SMEM((c.stages, parts, c.block_n, c.chunks * SWIZZLE), w.dtype, transforms=swizzled(w.dtype)),
            x_smem=plgpu.SMEM((c.stages, c.chunks, c.block_t, ELEMENTS), x.dtype),
            s_smem=plgpu.SMEM((SCALE_STAGES, parts, c.block_n, s_width), jnp.uint8),
            bounds_smem=plgpu.SMEM((2, num_words(num_groups) if isinstance(sizes, jax.Array) else 8), jnp.int32),
            out_smem=plgpu.SMEM((c.consumers, c.block_t, ROWS) if interpret else (1, 8, 8), out_dtype),
            full=plgpu.Barrier(num_arrivals=parts, num_barriers=c.stages),
            empty=plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages),
            x_full=plgpu.Barrier(num_arrivals=c.chunks * len(c.copied), num_barriers=c.stages),
            x_ready=plgpu.Barrier(num_arrivals=1, num_barriers=c.stages),
            s_full=plgpu.Barrier(num_arrivals=parts, num_barriers=SCALE_STAGES),
            s_empty=plgpu.Barrier(num_arrivals=c.consumers, num_barriers=SCALE_STAGES),
        ),
        compiler_params=compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(sizes, offset, x, w, scales, factors, bias)
