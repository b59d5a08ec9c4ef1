"""One-sided dispatch that quantises on the way: bf16 rows in, packed MXFP8 or NVFP4 rows out (Mosaic GPU).

Letters: T tokens on this rank, D hidden size, R ranks, C rows reserved for each source rank, B block size.

Warpgroup 0 of a block loads rows into a ring; the other warpgroups take turns at quantising one in registers, writing
the packed row to shared memory and storing it to each rank that it goes to. The bytes equal those of quantising first,
and the arithmetic of one row hides behind the stores of the others.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.quantize.formats import BlockFormat, get_format

from . import mosaic_encode as encode
from .mosaic_common import (
    SHARED_MEMORY,
    Schedule,
    batched_places,
    completion,
    int32,
    kernel_params,
    send_counts,
    share,
    standard_places,
    stride_of,
)

LANES = 128  # threads of a warpgroup; each quantises one block at a time
FORMATS = ("mxfp8", "mxfp8_floor", "nvfp4_token")


@dataclasses.dataclass(frozen=True)
class PackedRow:
    """Where the parts of a packed row lie, in bytes: data at 0, block scales, the row's scale, then the rest."""

    scale_offset: int
    row_scale_offset: int
    tail_offset: int
    row_bytes: int

    @property
    def tail_start(self) -> int:
        """Start of the bytes that the caller supplies: `tail_offset` rounded down to 16, as bulk copies need it."""
        return self.tail_offset // 16 * 16


def reason_not(shape: tuple[int, ...], dtype, fmt: str | BlockFormat) -> str | None:
    """Why the kernel cannot quantise rows [T, D] of `dtype` to `fmt`; None where it can."""
    fmt = get_format(fmt)
    if fmt.name not in FORMATS:
        return f"format {fmt.name!r} is quantised before the exchange (in the kernel: {', '.join(FORMATS)})"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"the kernel quantises bfloat16 rows, not {jnp.dtype(dtype).name}"
    if shape[-1] % fmt.block or shape[-1] < LANES * fmt.block or shape[-1] % 32:
        return f"rows of {shape[-1]} values: the kernel needs a multiple of 32, at least {LANES * fmt.block}"
    return None


def push_quantized(
    x: jax.Array,
    tail: jax.Array,
    slot: jax.Array,
    counts: jax.Array,
    *,
    fmt: str | BlockFormat,
    layout: PackedRow,
    axis_name: str,
    capacity: int,
    target: jax.Array | None = None,
    num_ranks: int | None = None,
    num_local: int = 1,
    warpgroups: int = 3,
    schedule: Schedule | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Quantises row t of x and stores the packed row at `[own rank, slot[t, r]]` of rank r, where slot[t, r] >= 0.

    x: bf16 [T, D]. tail: uint8 [T, row_bytes - layout.tail_start], what follows the scales in each row (ids, weights);
    bytes in front of `layout.tail_offset` are overwritten. slot: int32 [T, R]. counts: int32 [R]. Returns (uint8
    [R, C, row_bytes], received counts int32 [R]) as `push_rows` does.
    Batched form: target int32 [T, K] with slot [T, K], counts [R * E_loc], num_ranks R and num_local E_loc, and results
    as `push_batched` gives them. Raises ValueError for what `reason_not` names.
    """
    fmt = get_format(fmt)
    reason = reason_not(x.shape, x.dtype, fmt)
    if reason:
        raise ValueError(f"push_quantized: {reason}. Quantise first and use push_rows.")
    tokens, width = x.shape
    if target is None:
        num_ranks = slot.shape[1]
        tables, places = (slot,), standard_places(axis_name, num_ranks, capacity)
    else:
        assert num_ranks is not None
        tables, places = (target, slot), batched_places(axis_name, num_ranks, num_local, capacity)
    blocks_per_row = width // fmt.block
    data_bytes = fmt.data_bytes(width)
    row, tail_bytes = layout.row_bytes, layout.row_bytes - layout.tail_start
    schedule = schedule or Schedule.for_tokens(tokens, stages=9)
    # A multiple of the quantising warpgroups: each stage belongs to one of them, which misses no phase of it.
    stages = min(schedule.stages, SHARED_MEMORY // (2 * width + row)) // warpgroups * warpgroups
    if stages == 0:
        raise ValueError(
            f"push_quantized: rows of {width} values leave no room for {warpgroups} of them in shared memory. "
            "Use fewer warpgroups, or quantise first and use push_rows."
        )
    starts = [*range(0, blocks_per_row - LANES + 1, LANES)]
    if starts[-1] + LANES < blocks_per_row:
        starts.append(blocks_per_row - LANES)  # overlaps the one before: the same bytes are written twice
    nvfp4 = fmt.element == "e2m1"
    half = fmt.block // 2
    lane_width = half if nvfp4 else fmt.block
    lane_layout = plgpu.Layout.TILED(
        plgpu.Tiling(((LANES, lane_width), (32, lane_width), (4 if nvfp4 else 8,))),
        warp_dims=(-5,),
        lane_dims=(-3,),
        vector_dim=-1,
    )
    scale_layout = lane_layout.reduce(1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(
            (LANES, lane_width), jnp.int32 if nvfp4 else jnp.bfloat16, layout=lane_layout
        ),
    )
    def load_words(_, ref):
        signed = True if nvfp4 else None
        return mgpu.FragmentedArray.load_untiled(ref, layout=lane_layout.to_mgpu(), is_signed=signed, optimized=False)  # pyright: ignore[reportArgumentType]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), lane_layout))
    def store_data(_, ref, value):
        value.store_untiled(ref, optimized=False)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scale_layout))
    def store_scales(_, ref, value):
        value.store_untiled(ref, optimized=False)

    def divide(numerator, x):
        @plgpu.inline_mgpu(
            arg_types=(scale_layout,),
            return_type=plgpu.ShapeDtypeStruct((LANES,), jnp.float32, layout=scale_layout),
        )
        def quotient(_, value):
            return _round_to_nearest_quotient(numerator, value)

        return quotient(x)  # pyright: ignore[reportCallIssue]

    def body(x_ref, tail_ref, counts_ref, *refs):
        table_refs = refs[: len(tables)]
        out_ref, out_counts_ref, (rows, words), packed, full, empty = refs[len(tables) :]
        block = lax.axis_index("block")
        role = lax.axis_index("warpgroup")
        blocks = int32(schedule.blocks)
        trips = share(int32(tokens), block, blocks)

        def load_block(stage, start):
            if nvfp4:
                return load_words(words.at[stage, pl.ds(start, LANES)])  # pyright: ignore[reportCallIssue]
            return load_words(rows.at[stage, pl.ds(start, LANES)]).astype(jnp.float32)  # pyright: ignore[reportCallIssue]

        def write(stage, start, data, scales):
            out = packed.at[stage, 0, pl.ds(0, data_bytes)].reshape(blocks_per_row, data_bytes // blocks_per_row)
            store_data(out.at[pl.ds(start, LANES)], data)  # pyright: ignore[reportCallIssue]
            store_scales(packed.at[stage, 0, pl.ds(layout.scale_offset + start, LANES)], scales)  # pyright: ignore[reportCallIssue]

        def quantize_row(stage):
            if not nvfp4:
                for start in starts:
                    write(stage, start, *encode.mxfp8_blocks(load_block(stage, start), fmt))
                return
            amax = [encode.pair_amax(load_block(stage, start)) for start in starts]
            largest = encode.finite_or_zero(amax[0])
            for more in amax[1:]:
                largest = jnp.maximum(largest, encode.finite_or_zero(more))
            stored, *scales = encode.token_scales(lax.broadcast(jnp.max(largest), (LANES,)), fmt, divide)
            for start, block_amax in zip(starts, amax, strict=True):
                write(stage, start, *encode.nvfp4_blocks(load_block(stage, start), block_amax, *scales, divide))  # pyright: ignore[reportCallIssue]
            bits = jnp.max(lax.bitcast_convert_type(stored, jnp.int32))  # all equal
            for i in range(4):
                byte = lax.shift_right_logical(bits, int32(8 * i)) & int32(0xFF)
                packed[stage, 0, layout.row_scale_offset + i] = byte.astype(jnp.uint8)

        @pl.when(role == 0)
        def _load():
            def step(i, _):
                stage = lax.rem(i, int32(stages))

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[stage])

                token = block + i * blocks
                bounds = dict(oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
                plgpu.copy_gmem_to_smem(x_ref.at[token], rows.at[stage], full.at[stage], **bounds)  # pyright: ignore[reportArgumentType]
                plgpu.copy_gmem_to_smem(
                    tail_ref.at[pl.ds(token, 1)],
                    packed.at[stage, :, pl.ds(layout.tail_start, tail_bytes)],
                    full.at[stage],
                    **bounds,  # pyright: ignore[reportArgumentType]
                )
                return ()

            lax.fori_loop(int32(0), trips, step, ())

        @pl.when(role > 0)
        def _quantize_and_store():
            first = role - int32(1)
            mine = share(trips, first, int32(warpgroups))

            def find(n):
                token = block + (first + n * int32(warpgroups)) * blocks
                return tuple(places(jnp.minimum(token, int32(tokens - 1)), *table_refs))

            def step(n, found):
                i = first + n * int32(warpgroups)
                stage = lax.rem(i, int32(stages))
                following = find(n + int32(1))
                plgpu.barrier_wait(full.at[stage])
                quantize_row(stage)
                plgpu.commit_smem()
                for peer, place in found:

                    @pl.when(place >= 0)
                    def _(peer=peer, place=place):
                        target = plgpu.remote_ref(out_ref, {axis_name: peer})  # pyright: ignore[reportArgumentType]
                        plgpu.copy_smem_to_gmem(
                            packed.at[stage], target.at[pl.ds(place, 1), pl.ds(0, row)], commit_group=False
                        )

                plgpu.commit_smem_to_gmem_group()

                @pl.when(n > 0)
                def _():
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    plgpu.barrier_arrive(empty.at[lax.rem(i - int32(warpgroups), int32(stages))])

                return following

            lax.fori_loop(int32(0), mine, step, find(int32(0)))

            @pl.when(role == 1)
            def _():
                send_counts(counts_ref, out_counts_ref, axis_name, num_ranks, num_local, schedule.blocks)

            plgpu.wait_smem_to_gmem(0)
            completion(axis_name, num_ranks, schedule, signallers=warpgroups, waiter=role == 1)  # pyright: ignore[reportArgumentType]

    out, out_counts = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_ranks * num_local * capacity, stride_of(row, 1, schedule)), jnp.uint8),
            jax.ShapeDtypeStruct((num_ranks * num_local,), jnp.int32),
        ),
        scratch_types=[
            plgpu.RefUnion(
                plgpu.SMEM((stages, blocks_per_row, fmt.block), jnp.bfloat16),
                plgpu.SMEM((stages, blocks_per_row, half), jnp.int32),
            ),
            plgpu.SMEM((stages, 1, row), jnp.uint8),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        **kernel_params(schedule, f"push_{fmt.name}", warpgroups=1 + warpgroups),
    )(x.reshape(tokens, blocks_per_row, fmt.block), tail, counts, *tables)
    out = out[:, :row]  # fuses into whatever reads the rows
    if target is None:
        return out.reshape(num_ranks, capacity, row), out_counts
    return out.reshape(num_local, num_ranks * capacity, row), out_counts.reshape(num_ranks, num_local).T


def _round_to_nearest_quotient(numerator: int, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    """numerator / x by `div.rn.f32`; Mosaic's own division is `div.full`, which may be 2 ulp off."""
    f32 = ir.F32Type.get()
    registers = np.empty_like(x.registers)
    for index in np.ndindex(registers.shape):
        register: ir.Value = x.registers[index]  # pyright: ignore[reportAssignmentType]  # one element
        operands = [mgpu.c(float(numerator), f32), vector.extract(register, [], [0])]
        registers[index] = vector.broadcast(
            register.type, llvm.inline_asm(f32, operands, "div.rn.f32 $0, $1, $2;", "=f,f,f")
        )
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)
