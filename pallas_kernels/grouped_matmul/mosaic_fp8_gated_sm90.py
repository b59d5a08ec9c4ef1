"""FP8 gate and up projection for Hopper and what follows them: act(gate) * up, quantised in blocks of 128 columns.

x [M, D] in E4M3 with a scale for 128 columns of a row, w [G, 2, F, D] with one for 128 x 128, gate before up. What is
written is FP8 [M, F] and its scales: neither gate and up nor their product go to memory.

A tile is 128 rows x 128 columns of F, and a stage holds 128 rows of the gate's weights and 128 of the up projection's.
Each multiplying warpgroup has a box of 64 rows and all 128 columns, which are one block of the result: the maximum of
a row lies in four lanes. Its two totals and a product are 192 registers, more than an even share (see
compat.REGISTERS_MOVE). A tile of one box is for one of them, while the other goes on: fetching the weights takes as
long as the products, and nothing has to be exchanged. Products, scales, boxes and stages are those of
mosaic_fp8_sm90.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..quantize import BlockFormat, lane, reference
from ..quantize.emit import F, Ops
from ..quantize.exact import e4m3_code, f32_bits
from .gate import Gate, gated_product
from .mosaic_fp8_sm90 import BLOCK, copy_boxes, product, tiles_in_order
from .mosaic_sm90 import (
    arrive,
    as_views,
    compiler_params,
    fill_stages,
    follow,
    lead_on,
    load_rows,
    num_sms,
    row_views,
    swizzled,
    wasteful,
)
from .mosaic_tiles import (
    BOX,
    CONSUMERS,
    offset_of,
    store_rows,
    tables,
    tiles_of,
    where_inside,
)
from .schedule import each_tile

_BLOCK_M = CONSUMERS * BOX
_TILE_F = 128  # columns of the result in a tile, under one scale
_E4M3 = jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class GatedFp8Config:
    """stages, cluster, lead: as in mosaic_sm90.Config.

    What ends a tile is 660 instructions of a warp, 129 of them exponentials and reciprocals at 8 cycles each: counted,
    about 1400 cycles. Two steps of a warpgroup that has the matrix unit to itself take as long; hence the lead.
    65536 rows on an H200, D=2048, F=768, 128 groups and D=7168, F=2048, 32 groups: 458 us and 3.39 ms; without a lead
    466 us and 3.72 ms, without clusters 582 us and 4.60 ms. With 232 instead of 224 registers it is not faster.
    """

    stages: int = 4
    cluster: int = 2
    lead: int = 2
    num_blocks: int | None = None

    def __post_init__(self):
        if not 1 <= self.lead <= self.stages:
            raise ValueError(f"lead={self.lead}: choose 1 to {self.stages}, the stages; none gets further alone.")

    def fitted(self, tiles: int) -> GatedFp8Config:
        """For `tiles` tiles along F: without a cluster, of which one block would have nothing to do too often."""
        return dataclasses.replace(self, cluster=1) if wasteful(self.cluster, tiles) else self

    def smem_bytes(self) -> int:
        """Shared memory of one block, barriers left out."""
        stage = (_BLOCK_M + 2 * _TILE_F) * BLOCK
        return self.stages * stage + CONSUMERS * BOX * _TILE_F


# ---- the result of a box

_ROWS = plgpu.Layout.WGMMA.reduce(1)  # what belongs to a row, in the four lanes that hold it


def _each(function, count: int, *arrays):
    """function(operations, value of each array) -> `count` values, for all values of float arrays in registers."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir.dialects import vector

    first = arrays[0]
    outs = [np.empty_like(first.registers) for _ in range(count)]
    for index in np.ndindex(first.registers.shape):
        values = [first.registers[index]] * count
        for i in range(values[0].type.shape[0]):
            at: Any = dict(dynamic_position=[], static_position=[i])
            new = function(Ops(), *(F(vector.extract(a.registers[index], **at)) for a in arrays))
            values = [vector.insert(f.v, value, **at) for f, value in zip(new, values, strict=True)]
        for out, value in zip(outs, values, strict=True):
            out[index] = value
    return tuple(mgpu.FragmentedArray(_registers=out, _layout=first.layout, _is_signed=None) for out in outs)


def _activate(gate, up, activation: Gate, *, interpret: bool) -> jax.Array:
    """The gated product of totals [64, C] in registers, by the operations of swiglu_quantize."""
    if interpret:
        return gated_product(gate, up, activation)
    layout = plgpu.Layout.WGMMA
    out = plgpu.ShapeDtypeStruct(gate.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout), return_type=(out,))
    def emit(ctx, gate, up):
        del ctx
        kind = activation.kind, activation.alpha, activation.limit
        return _each(lambda o, g, u: (lane.swiglu(o, g, u, *kind),), 1, gate, up)

    return emit(gate, up)[0]  # pyright: ignore[reportIndexIssue, reportCallIssue]


def _scales(largest, fmt: BlockFormat, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """(scales, their reciprocals) of rows with these largest magnitudes, [64]; NaN for NaN."""
    if interpret:
        return reference.fp8_scale(f32_bits(largest), fmt)
    out = plgpu.ShapeDtypeStruct(largest.shape, jnp.float32, layout=_ROWS)

    @plgpu.inline_mgpu(arg_types=(_ROWS,), return_type=(out, out))
    def emit(ctx, largest):
        del ctx

        def both(o, largest):
            scale, inverse = lane.fp8_scale(o, o.bits(largest), fmt)
            return o.float(scale), inverse

        return _each(both, 2, largest)

    return emit(largest)  # pyright: ignore[reportReturnType, reportCallIssue]


def _store_scales(scale, rows, out, *, interpret: bool):
    """The first `rows` scales to out [64] in global memory."""
    if interpret:

        def one(i, _):
            out[i] = scale[i]
            return ()

        lax.fori_loop(0, jnp.minimum(rows, BOX), one, ())
        return

    @plgpu.inline_mgpu(arg_types=(_ROWS, plgpu.Layout.WG_SPLAT, plgpu.RefType()))
    def emit(ctx, scale, rows, out):
        del ctx
        from jax.experimental.mosaic import gpu as mgpu
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm

        utils, i32, f32 = mgpu.utils, ir.IntegerType.get_signless(32), ir.F32Type.get()
        text = "{ .reg .pred p; setp.lt.s32 p, $2, $3; @p st.global.f32 [$0], $1; }"
        start, rows = utils.memref_ptr(out), rows.registers.item()

        def store(value, index):
            row = arith.index_cast(i32, index[0])
            here = utils.getelementptr(start, [row], f32)
            llvm.inline_asm(None, [here, value, row, rows], text, "l,f,r,r,~{memory}", has_side_effects=True)

        scale.foreach(store)

    emit(scale, rows, out)  # pyright: ignore[reportCallIssue]


def _codes(value, inverse, *, interpret: bool) -> jax.Array:
    """value * inverse [64] in E4M3."""
    value = value * lax.broadcast_in_dim(inverse, value.shape, (0,))
    if interpret:  # where a cast does not saturate
        return lax.bitcast_convert_type(e4m3_code(value), _E4M3)
    return value.astype(_E4M3)


# ---- the kernel


def _body(
    sizes,
    offset,
    x,
    sx,
    w,
    sw,
    out,
    out_scale,
    tiles_smem,
    a_smem,
    b_smem,
    out_smem,
    full,
    empty,
    ahead,
    *,
    config: GatedFp8Config,
    gate: Gate,
    fmt: BlockFormat,
    num_groups,
    zero_tail,
    interpret,
):
    c = config
    (m, k), f = x.shape, out.shape[1]
    a_smem, a_load = as_views(a_smem, 2, interpret)
    out_write, out_box, out_row = as_views(out_smem, 3, interpret)
    k_steps = k // BLOCK
    num_blocks = f // _TILE_F
    f_tiles = pl.cdiv(num_blocks, c.cluster)
    wg = lax.axis_index("wg")
    tiles = tiles_of(sizes, tiles_smem, _BLOCK_M, 0)
    groups = dict(num_groups=num_groups, num_rows=m, block=_BLOCK_M)

    def tiles_here():
        """As in mosaic_sm90."""
        held = dict(num_weights=w.shape[0], group_offset=offset[0])
        return tiles_in_order(tiles, f_tiles, groups, held, cluster=c.cluster, zero_tail=zero_tail)

    @pl.when(wg == CONSUMERS)
    def _produce():
        plgpu.set_max_registers(48, action="decrease")
        my_tiles, tile_at = tiles_here()

        def load_stage(tile, j, slot):
            weight, block = tile[0], tile[-1]
            ks = pl.ds(j * BLOCK, BLOCK)
            shared: Any = dict(collective_axes="cluster") if c.cluster > 1 else {}
            copy_boxes(x, a_load.at[slot], full.at[slot], tile[1:4], ks, shared, interpret=interpret)
            for part in range(2):
                source = w.at[weight, part, pl.ds(block * _TILE_F, _TILE_F), ks]
                target = b_smem.at[slot, pl.ds(part * _TILE_F, _TILE_F)]
                plgpu.copy_gmem_to_smem(source, target, full.at[slot])

        fill_stages(my_tiles, tile_at, load_stage, k_steps, c.stages, empty)

    @pl.when(wg < CONSUMERS)
    def _multiply():
        plgpu.set_max_registers(224, action="increase")
        my_tiles, tile_at = tiles_here()

        def stage(step):
            """Waits for the stage of a step, and returns its place."""
            slot = lax.rem(step, c.stages)
            lead_on(wg, ahead, step == c.lead)
            plgpu.barrier_wait(full.at[slot])
            return slot

        def release(slot):
            arrive(empty.at[slot], cluster=c.cluster, interpret=interpret)

        def totals(box, row, tile, step, steps):
            """The sums over K of gate and up, [64, 128] each."""
            weight, block = jnp.maximum(tile[0], 0), jnp.minimum(tile[-1], num_blocks - 1)

            def read(j):
                """The scales of step j in registers: of the weights, and [64] of the rows."""
                at = jnp.minimum(j, k_steps - 1)
                return [sw[weight, part, block, at] for part in range(2)], load_rows(sx.at[at, pl.ds(row, BOX)])

            def per_step(j, carry):
                step, (of_weights, of_rows), sums = carry
                following = read(j + 1)
                slot = stage(step)
                new = []
                for part in range(2):
                    factor = of_rows * of_weights[part]
                    a = a_smem.at[slot, pl.ds(box * BOX, BOX)]
                    products = product(a, b_smem.at[slot, pl.ds(part * _TILE_F, _TILE_F)], interpret=interpret)
                    if part:
                        release(slot)
                    new.append(sums[part] + products * lax.broadcast_in_dim(factor, products.shape, (0,)))
                return step + 1, following, new

            zeros = [plgpu.layout_cast(jnp.zeros((BOX, _TILE_F), jnp.float32), plgpu.Layout.WGMMA) for _ in range(2)]
            return lax.fori_loop(0, steps, per_step, (step, read(0), zeros))[2]

        def finish(box, tile, step, steps):
            """All of a box of a tile."""
            (_, first, last, boxes, group_rows), block = tile[:5], tile[-1]
            row = jnp.where(box < boxes - 1, first + box * BOX, last)
            of_gate, of_up = totals(box, row, tile, step, steps)
            value = _activate(of_gate, of_up, gate, interpret=interpret)
            scale, inverse = _scales(jnp.max(jnp.abs(value), axis=1), fmt, interpret=interpret)
            codes = _codes(value, inverse, interpret=interpret)

            @where_inside(block * _TILE_F, f, _TILE_F * c.cluster)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                views = [view.at[wg] for view in (out_write, out_box, out_row)]
                store_rows(codes, row, group_rows, pl.ds(block * _TILE_F, _TILE_F), out, *views)
                _store_scales(scale, group_rows, out_scale.at[block, pl.ds(row, BOX)], interpret=interpret)

        def per_tile(tile, step):
            steps, boxes = jnp.where(tile[0] >= 0, k_steps, 0), tile[3]
            turn = lax.rem(lax.div(step, k_steps), CONSUMERS)  # who takes a single box
            box = jnp.where(boxes == 1, lax.rem(wg + turn, CONSUMERS), wg)
            pl.when(box < boxes)(functools.partial(finish, box, tile, step, steps))
            pl.when(box >= boxes)(lambda: lax.fori_loop(0, steps, lambda j, _: release(stage(step + j)), None))
            return step + steps

        follow(wg, ahead)
        end = each_tile(my_tiles, tile_at, per_tile)
        lead_on(wg, ahead, end <= c.lead)
        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("gate", "fmt", "config", "zero_tail", "interpret"))
def gated_matmul_fp8(
    x: jax.Array,  # float8_e4m3fn [M, D]
    sx: jax.Array,  # float32 [M, D / 128]
    w: jax.Array,  # float8_e4m3fn [G, 2, F, D]
    sw: jax.Array,  # float32 [G, 2, F / 128, D / 128]
    group_sizes: jax.Array,  # int32 [groups]
    group_offset: jax.Array | None = None,  # int32 [], the group that w[0] belongs to
    *,
    gate: Gate,
    fmt: BlockFormat,
    config: GatedFp8Config = GatedFp8Config(),  # noqa: B008
    zero_tail: bool = True,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:  # float8_e4m3fn [M, F], float32 [M, F / 128]
    """The gated products of each row with its group, quantised to fmt. M >= 64; F and D multiples of 128."""
    (m, k), f = x.shape, w.shape[2]
    c = config.fitted(f // _TILE_F)
    if m < BOX or f % _TILE_F or k % BLOCK:
        raise ValueError(
            f"x {x.shape}, w {w.shape}: this kernel takes M >= {BOX}, and F and D that are multiples of {BLOCK}; "
            "pad the arrays."
        )
    if c.cluster > 1:
        empty = plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=CONSUMERS, num_barriers=c.stages)
    else:
        empty = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=c.stages)
    sizes, tiles_smem = tables(group_sizes, _BLOCK_M, 0, interpret)
    kernel = plgpu.kernel(
        functools.partial(
            _body,
            config=c,
            gate=gate,
            fmt=fmt,
            num_groups=group_sizes.shape[0],
            zero_tail=zero_tail,
            interpret=bool(interpret),
        ),
        out_type=(jax.ShapeDtypeStruct((m, f), _E4M3), jax.ShapeDtypeStruct((f // _TILE_F, m), jnp.float32)),
        grid=(c.num_blocks or num_sms() // c.cluster,),
        grid_names=("block",),
        cluster=(c.cluster,) if c.cluster > 1 else (),
        cluster_names=("cluster",) if c.cluster > 1 else (),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=dict(
            tiles_smem=tiles_smem,
            a_smem=row_views((c.stages, _BLOCK_M, BLOCK), x.dtype, plain=False, interpret=bool(interpret)),
            b_smem=plgpu.SMEM((c.stages, 2 * _TILE_F, BLOCK), w.dtype, transforms=swizzled(w.dtype)),
            out_smem=row_views((CONSUMERS, BOX, _TILE_F), _E4M3, plain=True, interpret=bool(interpret)),
            full=plgpu.Barrier(num_arrivals=_BLOCK_M // BOX + 2, num_barriers=c.stages),
            empty=empty,
            ahead=plgpu.Barrier(),
        ),
        compiler_params=compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )
    # A box at the end of the rows may reach past them. In this order XLA makes one kernel of it, not two.
    sx = jnp.pad(sx, ((0, BOX), (0, 0))).T
    data, scale = kernel(sizes, offset_of(group_offset), x, sx, w, sw)
    return data, scale.T
