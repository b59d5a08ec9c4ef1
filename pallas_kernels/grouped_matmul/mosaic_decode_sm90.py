"""Grouped matmul for Hopper with the operands exchanged: weights on the matrix unit's M side, tokens on its N side.

For few rows per group: a group of 8 tokens costs an instruction of 8 columns, not 64 rows of padding, and the weights
stream through once at memory speed. For quantised weights, also with many rows: the M side may come from registers,
so weights are dequantised there, on their way from shared memory to the matrix unit (mosaic_dequant.py).

Two variants share the code: one weight ([G, N, K]), or gate and up projection ([G, 2, F, K], N = F), whose products
meet in the same lanes, so that only act(gate) * up is stored. A bias is added to either.

Blocks are small enough for two on one multiprocessor where `per_sm` says so, and hold as many bytes in flight as
shared memory allows. Only weights of groups that have rows are read. The kernel finds its tiles itself (bounds.py).

4-bit weights and few rows go to mosaic_warp_sm90.py, where `warp` of the configuration says so.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..compat import store_slowly
from . import mosaic_warp_sm90 as by_warps
from .bounds import MAX_GROUPS, make_bounds, num_words
from .gate import Gate, gated_product
from .mosaic_dequant import Packed, dequantise, permute_columns
from .mosaic_few_rows import ROWS as _ROWS
from .mosaic_few_rows import copied_or_not, finished, store_rows, tile_factor, tiles_of_block
from .mosaic_sm90 import BOX, SWIZZLE, as_views, compiler_params, drain, num_sms, row_views, swizzled

_WIDTH = 64  # BF16 elements in one swizzle


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Tile shape of the kernel with exchanged operands.

    block_t: tokens of a tile. consumers: multiplying warpgroups, each with `rows` rows of the weight. chunks: pieces of
    128 bytes of a weight's row in one stage. per_sm: blocks on one multiprocessor.
    pieces: parts in which a chunk is dequantised, with fewer registers each. (To prepare one part while the matrix unit
    works on the last gained nothing: the other warpgroups do that.)
    rows: 32 gives tiles half as large, for weights that are too few for all multiprocessors; the matrix unit then works
    on 64 rows of which half are left over.
    warp: multiply 4-bit weights with the warps' own instruction (mosaic_warp_sm90.py); for up to 32 tokens.
    likely: of a tile of 8 tokens, how many are always copied; the others only where there are more. All eight for each
    of many small tiles are a quarter more bytes out of the L2 cache.
    """

    block_t: int = 16
    consumers: int = 1
    chunks: int = 2
    stages: int = 5
    per_sm: int = 2
    pieces: int = 1
    rows: int = _ROWS
    warp: bool = False
    likely: int = 8
    num_blocks: int | None = None

    def __post_init__(self):
        if self.block_t not in (8, 16, 24, 32, 48, 64, 128, 192, 256):
            raise ValueError(f"block_t={self.block_t}: choose 8, 16, 24, 32, 48 or a multiple of 64 up to 256.")
        if self.consumers not in (1, 2, 3, 4):
            raise ValueError(f"consumers={self.consumers}: choose 1 to 4.")
        if self.chunks not in (1, 2, 4, 8):
            raise ValueError(f"chunks={self.chunks}: choose 1, 2, 4 or 8.")
        if self.pieces not in (1, 2):
            raise ValueError(f"pieces={self.pieces}: choose 1 or 2.")
        if self.rows not in (32, _ROWS) or (self.rows < _ROWS and self.block_t > BOX):
            raise ValueError(
                f"rows={self.rows}, block_t={self.block_t}: choose rows={_ROWS}, or 32 up to block_t={BOX}."
            )
        if self.likely not in (1, 2, 4, 8):
            raise ValueError(f"likely={self.likely}: choose 1, 2, 4 or 8.")
        if self.warp and (self.block_t > 32 or self.rows < _ROWS or self.pieces > 1):
            raise ValueError(
                f"warp=True with block_t={self.block_t}, rows={self.rows}, pieces={self.pieces}: choose block_t up to "
                f"32, rows={_ROWS} and pieces=1."
            )

    @property
    def block_n(self) -> int:
        return self.consumers * self.rows

    @property
    def held_n(self) -> int:
        """Rows of a weight in shared memory: the last warpgroup's matrix unit reads 64."""
        return self.block_n - self.rows + _ROWS

    @property
    def registers(self) -> tuple[int, int] | None:
        """Of a thread that copies and one that multiplies, where the even share is not enough.

        A block gets 168, 128 or 96 for each thread of 3, 4 or 5 warpgroups: asking for more in all would wait forever.
        """
        many = self.block_t >= 64 and self.per_sm == 1
        return {2: (40, 232) if many else None, 3: (40, 152), 4: (32, 112)}.get(self.consumers)

    @property
    def direct(self) -> bool:
        """Whether results are stored from registers, not through shared memory."""
        return self.block_t <= 16

    @property
    def box(self) -> int:
        """Tokens that are copied together; see schedule.tile_schedule."""
        return min(self.block_t, BOX)

    @property
    def copied(self) -> tuple[tuple[int, int], ...]:
        """(first, count) of the tokens that are copied together, of a tile that is no larger than a box."""
        if self.block_t > 8 or self.likely == 8:
            return ((0, self.block_t),)
        return ((0, self.likely), (self.likely, self.block_t - self.likely))

    def fitted(self, row_bytes: int) -> DecodeConfig:
        """With smaller stages where a weight's row is short and its last stage would be partly empty."""
        pieces = -(-row_bytes // SWIZZLE)
        if pieces % self.chunks == 0 or pieces >= 8 * self.chunks:
            return self
        chunks = next(c for c in (4, 2, 1) if c < self.chunks and pieces % c == 0)  # a few scales must fill 16 bytes
        return dataclasses.replace(self, chunks=chunks, stages=self.stages * self.chunks // chunks)

    def expecting(self, rows: int) -> DecodeConfig:
        """For groups of about so many rows."""
        return self if rows > 4 else dataclasses.replace(self, likely=1 << (rows - 1).bit_length())

    def smem_bytes(self, packed: Packed | None = None, itemsize: int = 2, parts: int = 1) -> int:
        """Shared memory of one block, barriers left out. parts: 2 where gate and up are multiplied together."""
        if self.warp and packed:
            return by_warps.smem_bytes(self, packed, parts)
        tokens = 2 * packed.per_byte if packed else 1
        scales = max(16, self.chunks * packed.scales) if packed and packed.scales else 0
        held = parts * self.held_n
        stage = self.chunks * (held + self.block_t * tokens) * SWIZZLE + held * scales
        return self.stages * stage + (0 if self.direct else self.consumers * _ROWS * self.box * itemsize)


def x_copies_of(config: DecodeConfig, packed: Packed | None) -> int:
    """Into how many copies a step's part of some rows of x is divided."""
    if not packed:
        return config.chunks
    joined = config.block_t == config.box and len(config.copied) == 1
    return 1 if joined else config.chunks * packed.chunk // _WIDTH


def store_transposed(ref, value):
    """value [rows of the weight, tokens] to ref [tokens, rows of the weight], element by element."""
    store_slowly(ref.T, plgpu.layout_cast(value, plgpu.Layout.WGMMA))


def box_rows(first, rows, index: int, box: int):
    """First row of the index-th box of a tile: boxes follow each other, but none reaches over the tile's end."""
    if index == 0:
        return first
    return jnp.maximum(jnp.minimum(first + index * box, first + rows - box), first)


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
    a_smem,
    out_smem,
    bounds_smem,
    full,
    empty,
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
    x_smem, x_load = as_views(x_smem, 2, interpret)
    bytes_k = c.chunks * SWIZZLE
    wide = bytes_k // jnp.dtype(w.dtype).itemsize  # elements of w's array in one stage
    x_chunks = c.chunks * (2 * packed.per_byte if packed else 1)
    k_steps = pl.cdiv(w.shape[3], wide)
    boxes = c.block_t // c.box
    x_copies = x_copies_of(c, packed)
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

    @pl.when(wg == c.consumers)
    def _produce():
        if c.registers:
            plgpu.set_max_registers(c.registers[0], action="decrease")

        def copy_tokens(j, slot, row, at, count):
            """Rows of x, from `row`, to the place `at` of a stage; in x_copies copies."""
            rows_of, here = pl.ds(row, count), pl.ds(at, count)
            if packed and x_copies == 1:
                source = x.at[pl.ds(j * x_chunks, x_chunks), rows_of]
                plgpu.copy_gmem_to_smem(source, x_load.at[slot, :, here], full.at[slot])
                return
            for i in range(x_chunks):
                columns = pl.ds(j * wide + i * _WIDTH, _WIDTH)
                source = x.at[j * x_chunks + i, rows_of] if packed else x.at[rows_of, columns]
                plgpu.copy_gmem_to_smem(source, x_load.at[slot, i, here], full.at[slot])

        def per_tile(tile, step):
            weight, first, rows, n_tile = tile
            col = n_tile * c.block_n

            def per_step(j, step):
                slot = lax.rem(step, c.stages)

                @pl.when(step >= c.stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                columns, held = pl.ds(col, c.block_n), pl.ds(0, c.block_n)
                for part in parts:
                    source = w.at[weight, part, columns, pl.ds(j * wide, wide)]
                    plgpu.copy_gmem_to_smem(source, w_smem.at[slot, part, held], full.at[slot])
                if packed and packed.scales:
                    # At least 16 bytes of each row, of which a stage may need only some.
                    start = j * (c.chunks * packed.scales)
                    width = s_smem.shape[3]
                    if width > c.chunks * packed.scales:
                        start = lax.div(start, width) * width
                    for part in parts:
                        source = scales.at[weight, part, columns, pl.ds(start, width)]
                        plgpu.copy_gmem_to_smem(source, s_smem.at[slot, part, held], full.at[slot])
                for box in range(boxes if boxes > 1 else 0):
                    copy_tokens(j, slot, box_rows(first, rows, box, c.box), box * c.box, c.box)
                for at, count in c.copied if boxes == 1 else ():
                    some = functools.partial(copy_tokens, j, slot, first + at, at, count)
                    copied_or_not(at == 0 or rows > at, some, full.at[slot], x_copies)
                return step + 1

            return lax.fori_loop(0, jnp.where(weight >= 0, k_steps, 0), per_step, step)

        drain(each_tile(per_tile), c.stages, empty)

    @pl.when(wg < c.consumers)
    def _multiply():
        if c.registers:
            plgpu.set_max_registers(c.registers[1], action="increase")
        my_rows = pl.ds(wg * c.rows, _ROWS)
        pieces = c.pieces if packed else 1
        products = packed.chunk // _WIDTH // pieces if packed else 1  # of 64 columns, in one piece

        def product(acc, part, slot, j, chunk, piece):
            """acc += weights of a piece of a 128-byte chunk of step j times the tokens."""
            here = w_smem.at[slot, part, my_rows, pl.ds(chunk * (wide // c.chunks), wide // c.chunks)]
            if packed is None:
                plgpu.wgmma(acc, here, x_smem.at[slot, chunk].T)
                return
            s = None
            if packed.scales:
                start = chunk * packed.scales
                if s_smem.shape[3] > c.chunks * packed.scales:
                    start = lax.rem(j * (c.chunks * packed.scales), s_smem.shape[3]) + start
                s = s_smem.at[slot, part, my_rows, pl.ds(start, packed.scales)]
            values = dequantise(here, s, packed, interpret=interpret, piece=piece, pieces=pieces)
            if interpret:  # the interpreter multiplies from shared memory only
                a_smem.at[wg][...] = values
            for i in range(products):
                columns = slice(i * _WIDTH, (i + 1) * _WIDTH)
                a = a_smem.at[wg, :, columns] if interpret else values[:, columns]
                plgpu.wgmma(acc, a, x_smem.at[slot, (chunk * pieces + piece) * products + i].T)

        def accumulate(weight, step):
            """The sums over K in one accumulator each, for formats whose scales are applied to the weights."""

            def scope(*accs):
                def per_step(j, step):
                    slot = lax.rem(step, c.stages)
                    plgpu.barrier_wait(full.at[slot])
                    for i in range(c.chunks * pieces):
                        for part in parts:
                            product(accs[part], part, slot, j, i // pieces, i % pieces)
                        if packed:
                            plgpu.wgmma_wait(0)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])
                    return step + 1

                steps = jnp.where(weight >= 0, k_steps, 0)
                end = lax.fori_loop(0, steps, per_step, step)
                return end, [acc[...] for acc in accs]

            accs = [plgpu.WGMMAAccumulatorRef((_ROWS, c.block_t), jnp.float32) for _ in parts]
            return pl.run_scoped(scope, *accs)

        def accumulate_scaled(weight, col, step):
            """Each 128 elements of K are summed on their own and scaled in float32: the scale covers the whole tile."""
            row_block = jnp.minimum(lax.div(col + wg * c.rows, 128), scales.shape[2] - 1)
            last = scales.shape[3] - 1

            def per_step(j, carry):
                step, totals = carry
                slot = lax.rem(step, c.stages)

                def factor(part, i):
                    return scales[weight, part, row_block, jnp.minimum(j * c.chunks + i, last)]

                factors_of = [[factor(part, i) for i in range(c.chunks)] for part in parts]
                plgpu.barrier_wait(full.at[slot])
                for chunk in range(c.chunks):

                    def scope(*accs, chunk=chunk):
                        for part in parts:
                            for piece in range(pieces):
                                product(accs[part], part, slot, j, chunk, piece)
                        return [acc[...] for acc in accs]

                    accs = [plgpu.WGMMAAccumulatorRef((_ROWS, c.block_t), jnp.float32) for _ in parts]
                    sums = pl.run_scoped(scope, *accs)
                    totals = [t + s * factors_of[p][chunk] for p, (t, s) in enumerate(zip(totals, sums, strict=True))]
                plgpu.barrier_arrive(empty.at[slot])
                return step + 1, totals

            zeros = [plgpu.layout_cast(jnp.zeros((_ROWS, c.block_t), jnp.float32), plgpu.Layout.WGMMA) for _ in parts]
            return lax.fori_loop(0, jnp.where(weight >= 0, k_steps, 0), per_step, (step, zeros))

        def per_tile(tile, step):
            weight, first, rows, n_tile = tile
            col = n_tile * c.block_n
            known = [tile_factor(factors, packed, weight, part) for part in parts]
            if packed and not packed.scales:
                end, values = accumulate_scaled(weight, col, step)
            else:
                end, values = accumulate(weight, step)
            w_row = col + wg * c.rows
            values = [
                finished(value, known[part], factors, bias, packed, weight, part, w_row)
                for part, value in enumerate(values)
            ]
            value = (gated_product(values[0], values[1], gate) if gate else values[0]).astype(out.dtype)
            columns, mine = pl.ds(w_row, c.rows), pl.ds(0, c.rows)
            inside = w_row < n  # single rows are not clipped where a tile reaches over the end of N
            if c.direct and not interpret:
                store_rows(value, out, first, rows, w_row, jnp.where(inside, c.rows, 0))
                return end
            for box in range(boxes):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store_transposed(out_smem.at[wg], value[:, box * c.box : (box + 1) * c.box])
                plgpu.commit_smem()
                row = box_rows(first, rows, box, c.box)
                one_by_one = inside
                if c.rows == _ROWS:
                    one_by_one = inside & (rows < c.box)

                    @pl.when(inside & (rows >= c.box))
                    def _(row=row):
                        plgpu.copy_smem_to_gmem(out_smem.at[wg], out.at[pl.ds(row, c.box), columns])

                if box == 0:

                    @pl.when(one_by_one)
                    def _(row=row):
                        def one(r, _):
                            source = out_smem.at[wg, pl.ds(r, 1), mine]
                            plgpu.copy_smem_to_gmem(source, out.at[pl.ds(row + r, 1), columns])
                            return ()

                        lax.fori_loop(0, rows, one, ())

            return end

        each_tile(per_tile)
        if interpret or not c.direct:
            plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("config", "packed", "gate", "out_dtype", "zero_tail", "interpret"))
def grouped_matmul_decode(
    x: jax.Array,  # [M, K]
    w: jax.Array,  # [G, P, N, K] like x, or uint8 [G, P, N, K / packed.per_byte]
    group_sizes: jax.Array,  # int32 [groups]
    scales: jax.Array | None = None,  # uint8 [G, P, N, K / block]; f32: float32 [G, P, N / 128, K / 128]
    factors: jax.Array | None = None,  # float32 [G, P] (1 where all are alike) or [G, P, N], NVFP4's global scales
    bias: jax.Array | None = None,  # float32 [G, P, N]
    group_offset: jax.Array | None = None,  # int32 [], the group that w[0] belongs to
    *,
    config: DecodeConfig = DecodeConfig(),  # noqa: B008
    packed: Packed | None = None,
    gate: Gate | None = None,
    out_dtype=None,
    zero_tail: bool = True,
    interpret=None,
) -> jax.Array:  # [M, N]
    """Rows of x times the transposed weight of their group, BF16 or `packed`, plus `bias`.

    P is 1, or 2 with `gate`: then gate(first product) * (second product).

    M >= config.box; N and K multiples of 64; for packed weights, rows of w are multiples of 128 bytes and rows of
    scales multiples of 16 bytes.
    """
    (m, k), (_, parts, n, _) = x.shape, w.shape
    c = config
    if parts != (2 if gate else 1):
        raise ValueError(f"w {w.shape}: its second axis is gate and up, 2 with gate= and else 1.")
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if m < c.box or n % 64 or k % 64:
        raise ValueError(
            f"x {x.shape}, w {w.shape}: this kernel takes M >= {c.box} and N, K that are multiples of 64; "
            "pad the arrays or choose a smaller block_t."
        )
    s_smem = plgpu.SMEM((1, 1, 1, 16), jnp.uint8)
    x_chunks = c.chunks
    if packed:
        if scales is None:
            raise ValueError(f"w {w.shape} is packed and has no scales; pass them.")
        if w.shape[3] % 128 or (packed.scales and scales.shape[3] % 16):
            raise ValueError(
                f"w {w.shape} with scales {scales.shape}: rows of w must be multiples of 128 bytes, and rows of scales "
                "multiples of 16 bytes; pad K."
            )
        if not c.warp:
            x = permute_columns(x, packed)
        x_chunks *= packed.chunk // _WIDTH
        if packed.scales:
            s_smem = plgpu.SMEM((c.stages, parts, c.held_n, max(16, c.chunks * packed.scales)), jnp.uint8)
    if c.rows < _ROWS:  # 64 values are read from any multiple of c.rows
        factors, bias = (
            a if a is None or a.ndim < 3 else jnp.pad(a, ((0, 0), (0, 0), (0, _ROWS - c.rows))) for a in (factors, bias)
        )
    unused = jnp.zeros((1,), jnp.float32)
    x_copies = x_copies_of(c, packed) * (c.block_t // c.box) * len(c.copied)
    summed = not interpret and group_sizes.shape[0] <= MAX_GROUPS  # by the kernel itself
    sizes = group_sizes.astype(jnp.int32) if summed else make_bounds(group_sizes, c.block_t)
    offset = jnp.zeros((1,), jnp.int32) if group_offset is None else group_offset.astype(jnp.int32).reshape(1)
    shifted = group_offset is not None
    if c.warp:
        if packed is None or scales is None or packed.element != "e2m1":
            raise ValueError("warp=True: it is for 4-bit weights; choose warp=False.")
        how = dict(config=c, packed=packed, gate=gate, num_groups=group_sizes.shape[0], zero_tail=zero_tail)
        how |= dict(shifted=shifted, out_dtype=out_dtype, interpret=interpret)
        rest = (unused if a is None else a for a in (factors, bias))
        return by_warps.run(sizes, offset, x, w, scales, *rest, **how)
    arrivals = x_copies + parts * (2 if packed and packed.scales else 1)
    kernel = plgpu.kernel(
        functools.partial(
            _body,
            config=c,
            packed=packed,
            gate=gate,
            num_groups=group_sizes.shape[0],
            shifted=shifted,
            zero_tail=zero_tail,
            interpret=bool(interpret),
        ),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(c.num_blocks or num_sms() * c.per_sm,),
        grid_names=("block",),
        num_threads=c.consumers + 1,
        thread_name="wg",
        scratch_types=dict(
            w_smem=plgpu.SMEM(
                (c.stages, parts, c.held_n, c.chunks * SWIZZLE // w.dtype.itemsize),
                w.dtype,
                transforms=swizzled(w.dtype),
            ),
            x_smem=row_views((c.stages, x_chunks, c.block_t, _WIDTH), x.dtype, plain=False, interpret=bool(interpret)),
            s_smem=s_smem,
            a_smem=plgpu.SMEM((c.consumers, _ROWS, packed.chunk // c.pieces if packed and interpret else 8), x.dtype),
            out_smem=plgpu.SMEM((c.consumers, c.box, _ROWS) if interpret or not c.direct else (1, 8, 8), out_dtype),
            bounds_smem=plgpu.SMEM((2, num_words(group_sizes.shape[0]) if summed else 8), jnp.int32),
            full=plgpu.Barrier(num_arrivals=arrivals, num_barriers=c.stages),
            empty=plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages),
        ),
        compiler_params=compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(sizes, offset, x, w, *(unused if a is None else a for a in (scales, factors, bias)))
