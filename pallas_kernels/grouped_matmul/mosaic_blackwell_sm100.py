"""Grouped matmul for Blackwell (sm_100a), with the matrix unit's own block scales: compiled, not yet run by anybody.

Three warpgroups of a persistent block loop over output tiles of 128 x block_n: one feeds a ring of shared-memory stages
through TMA, one issues the products into tensor memory, one stores the finished tile while the next is multiplied into
the other half of tensor memory. Rows come as boxes of 64, as in the Hopper kernel (mosaic_sm90), so that ragged groups
need no other masks than row-wise stores of groups with fewer than 64 rows.

Operands: BF16 or F16 on both sides; or MXFP8 (E4M3, E8M0 scales of 32), MXFP4 (E2M1, E8M0 scales of 32) or NVFP4 (E2M1,
E4M3 scales of 16) on both sides. A stage is 128 bytes of K. Scales come in the 128x4 order of quantize.swizzle, which
cuts them into pieces of 512 bytes for 128 rows and 4 blocks: those of the weights as they are, those of the rows once
for each tile, because a tile begins at any row. Global scales multiply the float32 sum.

Letters: M rows, K contraction, N columns, G groups, T tiles of rows, C block scales of a row (rounded up to 4).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..quantize import QTensor, swizzle_scales
from .mosaic_sm90 import BOX, SWIZZLE, as_views, compiler_params, drain, num_sms, row_views, walk
from .schedule import Schedule, each_tile, num_tiles, read_tile

BLOCK_M = 2 * BOX
SCALE_ROWS = 128  # of a piece of swizzled scales
ACC_SLOTS = 2
SMEM_BYTES = 227 * 1024
PRODUCER, MULTIPLIER, WRITER = range(3)


@dataclasses.dataclass(frozen=True)
class BlackwellConfig:
    """block_n: columns of an output tile (128 with block scales, whose place in tensor memory is for 128 rows).

    stages: of shared memory. band: columns of tiles walked together before moving along N (0: all).
    """

    block_n: int = 128
    stages: int = 4
    band: int = 0
    num_blocks: int | None = None

    def __post_init__(self):
        if self.block_n not in (64, 128, 192, 256):
            raise ValueError(f"block_n={self.block_n}: choose 64, 128, 192 or 256.")


@dataclasses.dataclass(frozen=True)
class Operands:
    """What one stage of 128 bytes of K holds. dtype: of the elements; scale: dtype of their block scales, if any."""

    dtype: jnp.dtype
    scale: jnp.dtype | None = None
    block: int = 0

    @property
    def depth(self) -> int:
        """Elements in 128 bytes."""
        return 256 if self.dtype == jnp.float4_e2m1fn else SWIZZLE // self.dtype.itemsize

    @property
    def scales(self) -> int:
        """Block scales of a row in one stage, a multiple of 4."""
        return self.depth // self.block if self.block else 0

    def smem(self, shape: tuple[int, ...], tile: int = 8):
        """Shared memory as the matrix unit reads it, copied in multiples of `tile` rows: the bytes are the same for all
        (see mosaic_sm90.row_views)."""
        transforms = (plgpu.TilingTransform((tile, self.depth)), plgpu.SwizzleTransform(SWIZZLE))  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(shape, self.dtype, transforms=transforms)


def operands(x: jax.Array | QTensor) -> Operands:
    if not isinstance(x, QTensor):
        return Operands(jnp.dtype(x.dtype))
    element = jnp.float8_e4m3fn if x.format.element == "e4m3" else jnp.float4_e2m1fn
    scale = jnp.float8_e8m0fnu if x.format.scale == "e8m0" else jnp.float8_e4m3fn
    return Operands(jnp.dtype(element), jnp.dtype(scale), x.format.block)


def elements(x: jax.Array | QTensor, depth: int) -> jax.Array:
    """The elements in their own dtype, those of a QTensor with zeros up to whole stages (a copy, where K has none).

    Pairs of E2M1 are unpacked only in name.
    """
    if not isinstance(x, QTensor):
        return x
    data = lax.bitcast_convert_type(x.data, jnp.uint8)
    stage = depth if x.format.element == "e4m3" else depth // 2
    data = jnp.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, -data.shape[-1] % stage)])
    if x.format.element == "e4m3":
        return lax.bitcast_convert_type(data, jnp.float8_e4m3fn)
    pairs = lax.bitcast_convert_type(data, jnp.float4_e2m1fn)
    return pairs.reshape(*data.shape[:-1], 2 * data.shape[-1])


def scale_pieces(scales: jax.Array, dtype, columns: int) -> jax.Array:
    """Block scales [..., R, c] as pieces [..., ceil(R / 128), columns / 4, 32, 16] for the matrix unit.

    columns: c rounded up to whole stages. What is added are zero bytes, which are finite in both scale types.
    """
    *lead, rows, c = scales.shape
    as_bytes = lax.bitcast_convert_type(scales, jnp.uint8)
    padded = jnp.pad(as_bytes, [(0, 0)] * (len(lead) + 1) + [(0, columns - c)])
    flat = swizzle_scales(padded).reshape(*lead, -(-rows // SCALE_ROWS), columns // 4, 32, 16)
    return lax.bitcast_convert_type(flat, dtype)


def tile_rows(schedule: Schedule, num_rows: int) -> jax.Array:
    """The rows of x in each tile, in the order in which its two boxes lie in shared memory: int32 [T, 128].

    Rows past the last are given as the last: what they hold is not stored.
    """
    tiles = jnp.arange(schedule.weight.shape[0], dtype=jnp.int32)
    _, row0, row1, _ = jax.vmap(lambda t: read_tile(schedule, t, BLOCK_M, BOX))(tiles)
    box = jnp.arange(BOX, dtype=jnp.int32)
    rows = jnp.concatenate([row0[:, None] + box[None, :], row1[:, None] + box[None, :]], axis=1)
    return jnp.clip(rows, 0, num_rows - 1)


def _body(schedule, x, w, extra, out, scratch, *, config, operands, transposed, zero_tail, interpret):
    c, ops = config, operands
    a_smem, b_smem, acc = scratch["a"], scratch["b"], scratch["acc"]
    full, consumed, done, stored = (scratch[name] for name in ("full", "consumed", "done", "stored"))
    a_smem, a_load = as_views(a_smem, 2, interpret)
    out_write, out_box, out_row = as_views(scratch["out"], 3, interpret)
    n = out.shape[1]
    k_steps = pl.cdiv(x.shape[1], ops.depth)
    n_tiles = pl.cdiv(n, c.block_n)
    wg = lax.axis_index("wg")
    num_m = num_tiles(schedule, x.shape[0], BLOCK_M, zero_tail=zero_tail)
    blocks = lax.axis_size("block")
    my_tiles = lax.div(num_m * n_tiles - lax.axis_index("block") + blocks - 1, blocks)

    def tile_at(i):
        m_tile, n_tile = walk(lax.axis_index("block") + i * blocks, num_m, n_tiles, c.band)
        return *read_tile(schedule, m_tile, BLOCK_M, BOX), m_tile, n_tile

    def steps_of(weight):
        return jnp.where(weight >= 0, k_steps, 0)

    @pl.when(wg == PRODUCER)
    def _produce():
        plgpu.set_max_registers(96, action="decrease")

        def per_tile(tile, step):
            weight, row0, row1, _, m_tile, n_tile = tile
            columns = pl.ds(n_tile * c.block_n, c.block_n)

            def per_step(j, step):
                slot = lax.rem(step, c.stages)

                @pl.when(step >= c.stages)
                def _():
                    plgpu.barrier_wait(consumed.at[slot])

                ks = pl.ds(j * ops.depth, ops.depth)
                for box, row in enumerate((row0, row1)):
                    target = a_load.at[slot, pl.ds(box * BOX, BOX)]
                    plgpu.copy_gmem_to_smem(x.at[pl.ds(row, BOX), ks], target, full.at[slot])
                source = w.at[weight, ks, columns] if transposed else w.at[weight, columns, ks]
                plgpu.copy_gmem_to_smem(source, b_smem.at[slot], full.at[slot])
                if ops.block:
                    pieces = pl.ds(j * (ops.scales // 4), ops.scales // 4)
                    source = extra["x_scales"].at[pl.ds(m_tile, 1), pieces]
                    plgpu.copy_gmem_to_smem(source, scratch["a_scales"].at[slot], full.at[slot])
                    source = extra["w_scales"].at[weight, pl.ds(n_tile, 1), pieces]
                    plgpu.copy_gmem_to_smem(source, scratch["b_scales"].at[slot], full.at[slot])
                return step + 1

            return lax.fori_loop(0, steps_of(weight), per_step, step)

        drain(each_tile(my_tiles, tile_at, per_tile), c.stages, consumed)

    @pl.when(wg == MULTIPLIER)
    def _multiply():
        plgpu.set_max_registers(96, action="decrease")

        def per_tile(tile, step):
            weight = tile[0]
            finished = lax.div(step, k_steps)  # tiles multiplied so far: each takes k_steps
            acc_slot = lax.rem(finished, ACC_SLOTS)

            @pl.when((weight >= 0) & (finished >= ACC_SLOTS))
            def _():
                plgpu.barrier_wait(stored.at[acc_slot])

            def per_step(j, step):
                slot = lax.rem(step, c.stages)
                plgpu.barrier_wait(full.at[slot])
                b = b_smem.at[slot] if transposed else b_smem.at[slot].T
                scales = {}
                if ops.block:
                    # The scales' place in tensor memory is free when the stage is: both wait for the same products.
                    place = pl.ds(slot * ops.scales, ops.scales)
                    for name in ("a_scale", "b_scale"):
                        scales[name] = scratch[f"{name}_tmem"].at[:, place]
                        plgpu.async_copy_scales_to_tmem(scratch[f"{name}s"].at[slot], scales[name])
                target = acc.at[:, pl.ds(acc_slot * c.block_n, c.block_n)]
                plgpu.tcgen05_mma(target, a_smem.at[slot], b, consumed.at[slot], accumulate=j > 0, **scales)
                return step + 1

            end = lax.fori_loop(0, steps_of(weight), per_step, step)

            @pl.when(weight >= 0)
            def _():
                plgpu.tcgen05_commit_arrive(done.at[acc_slot])

            return end

        drain(lax.div(each_tile(my_tiles, tile_at, per_tile), k_steps), ACC_SLOTS, stored)

    @pl.when(wg == WRITER)
    def _write():
        plgpu.set_max_registers(232, action="increase")
        chunk_n = SWIZZLE // jnp.dtype(out.dtype).itemsize

        def store(value, chunk, row0, row1, rows, columns):
            slot = chunk % 2
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)

            @pl.when(rows >= BOX)
            def _():
                out_write.at[slot][...] = value
                plgpu.commit_smem()
                for box, row in enumerate((row0, row1)):
                    source = out_box.at[slot, pl.ds(box * BOX, BOX)]
                    plgpu.copy_smem_to_gmem(source, out.at[pl.ds(row, BOX), columns], commit_group=box == 1)

            @pl.when(rows < BOX)
            def _():
                out_row.at[slot][...] = value
                plgpu.commit_smem()

                def one(i, _):
                    source = out_row.at[slot, pl.ds(i, 1)]
                    plgpu.copy_smem_to_gmem(source, out.at[pl.ds(row0 + i, 1), columns], commit_group=False)
                    return ()

                lax.fori_loop(0, rows, one, ())
                plgpu.commit_smem_to_gmem_group()

        def per_tile(tile, finished):
            weight, row0, row1, rows, m_tile, n_tile = tile
            acc_slot = lax.rem(finished, ACC_SLOTS)
            layout = plgpu.Layout.TCGEN05
            load: Callable[..., jax.Array] = plgpu.load  # whose index JAX 0.10 requires, and 0.12 refuses
            first = n_tile * c.block_n

            @pl.when(weight >= 0)
            def _():
                plgpu.barrier_wait(done.at[acc_slot])
                by_row = None
                if "x_factor" in extra:
                    by_row = load(extra["x_factor"].at[m_tile], layout=layout.reduce(1), optimized=False)
                for chunk in range(c.block_n // chunk_n):
                    start = first + chunk * chunk_n
                    at = pl.ds(acc_slot * c.block_n + chunk * chunk_n, chunk_n)
                    value = plgpu.async_load_tmem(acc.at[:, at], layout=layout)
                    if by_row is not None:
                        value = value * lax.broadcast_in_dim(by_row, value.shape, (0,))
                    if "w_factor" in extra:
                        source = extra["w_factor"].at[weight, pl.ds(start, chunk_n)]
                        by_column = load(source, layout=layout.reduce(0), optimized=False)
                        value = value * lax.broadcast_in_dim(by_column, value.shape, (1,))
                    store(value.astype(out.dtype), chunk, row0, row1, rows, pl.ds(start, chunk_n))
                plgpu.wait_load_tmem()
                plgpu.barrier_arrive(stored.at[acc_slot])

            @pl.when(weight < 0)
            def _():
                zero = plgpu.layout_cast(jnp.zeros((BLOCK_M, chunk_n), out.dtype), layout)
                for chunk in range(c.block_n // chunk_n):
                    store(zero, chunk, row0, row1, rows, pl.ds(first + chunk * chunk_n, chunk_n))

            return finished + (weight >= 0).astype(jnp.int32)

        each_tile(my_tiles, tile_at, per_tile)
        plgpu.wait_smem_to_gmem(0)


def _scratch(c: BlackwellConfig, ops: Operands, out_dtype, *, transposed: bool, interpret: bool) -> dict:
    chunk_n = SWIZZLE // out_dtype.itemsize
    b_shape = (ops.depth, c.block_n) if transposed else (c.block_n, ops.depth)
    a_shape = (c.stages, BLOCK_M, ops.depth)
    scratch = dict(
        a=ops.smem(a_shape) if interpret else plgpu.RefUnion(ops.smem(a_shape), ops.smem(a_shape, tile=1)),
        b=ops.smem((c.stages, *b_shape)),
        out=row_views((2, BLOCK_M, chunk_n), out_dtype, plain=True, interpret=interpret),
        acc=plgpu.TMEM((BLOCK_M, ACC_SLOTS * c.block_n), jnp.float32),
        full=plgpu.Barrier(num_arrivals=5 if ops.block else 3, num_barriers=c.stages),
        consumed=plgpu.Barrier(num_arrivals=1, num_barriers=c.stages, orders_tensor_core=True),
        done=plgpu.Barrier(num_arrivals=1, num_barriers=ACC_SLOTS, orders_tensor_core=True),
        stored=plgpu.Barrier(num_arrivals=1, num_barriers=ACC_SLOTS, orders_tensor_core=True),
    )
    if ops.scale is not None:
        for name in ("a_scale", "b_scale"):
            scratch[f"{name}s"] = plgpu.SMEM((c.stages, 1, ops.scales // 4, 32, 16), ops.scale)
            scratch[f"{name}_tmem"] = plgpu.TMEM(
                (SCALE_ROWS, c.stages * ops.scales), ops.scale, layout=plgpu.TMEMLayout.SCALES_LAYOUT
            )
    return scratch


@functools.partial(jax.jit, static_argnames=("config", "out_dtype", "transposed", "zero_tail", "interpret"))
def grouped_matmul(
    x: jax.Array | QTensor,  # [M, K]
    w: jax.Array | QTensor,  # [G, N, K]; transposed: [G, K, N]
    schedule: Schedule,  # for block=BLOCK_M
    *,
    config: BlackwellConfig = BlackwellConfig(),  # noqa: B008
    out_dtype=jnp.bfloat16,
    transposed: bool = False,
    zero_tail: bool = True,
    interpret=None,
) -> jax.Array:  # [M, N]
    """Rows of x times the weight of their group; x and w of one dtype, or QTensors with the same elements and scales.

    M >= 64, N a multiple of 64 and at least config.block_n, K of float operands a multiple of 64. transposed: for float
    weights. zero_tail: without it, rows past the sum of the group sizes are left unwritten.
    """
    ops, out_dtype = operands(x), jnp.dtype(out_dtype)
    if ops != operands(w):
        raise ValueError(f"x is {operands(x)} and w {operands(w)}: the matrix unit takes the same kind on both sides.")
    if ops.block and (transposed or config.block_n != SCALE_ROWS):
        raise ValueError(f"block scales go with block_n={SCALE_ROWS} and weights [G, N, K]; use those.")
    a, b = elements(x, ops.depth), elements(w, ops.depth)
    m, n = a.shape[0], b.shape[2 if transposed else 1]
    if m < BOX or n % 64 or n < config.block_n:
        raise ValueError(
            f"x {x.shape}, w {w.shape}: this kernel takes M >= {BOX} and N >= {config.block_n}, N a multiple of 64; "
            "pad the arrays."
        )
    extra: dict[str, jax.Array] = {}
    if isinstance(x, QTensor) and isinstance(w, QTensor):
        rows = tile_rows(schedule, m)  # [T, 128]
        columns = pl.cdiv(a.shape[1], ops.depth) * ops.scales
        by_tile = x.block_scale[rows]  # [T, 128, c]
        extra["x_scales"] = scale_pieces(by_tile, ops.scale, columns)[:, 0]
        extra["w_scales"] = scale_pieces(w.block_scale, ops.scale, columns)
        if x.global_scale is not None:
            extra["x_factor"] = jnp.broadcast_to(x.global_scale.astype(jnp.float32), (m,))[rows]
        if w.global_scale is not None:
            scale = w.global_scale.astype(jnp.float32)
            scale = scale if scale.ndim == 2 else jnp.broadcast_to(scale, (b.shape[0],))[:, None]
            scale = jnp.broadcast_to(scale, b.shape[:2])
            extra["w_factor"] = jnp.pad(scale, ((0, 0), (0, -n % config.block_n)))
    kernel = plgpu.kernel(
        functools.partial(
            _body,
            config=config,
            operands=ops,
            transposed=transposed,
            zero_tail=zero_tail,
            interpret=bool(interpret),
        ),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(config.num_blocks or num_sms(),),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[_scratch(config, ops, out_dtype, transposed=transposed, interpret=bool(interpret))],
        compiler_params=compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(schedule, a, b, extra)
