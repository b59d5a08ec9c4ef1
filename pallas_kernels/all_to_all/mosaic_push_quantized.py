"""One-sided dispatch that quantises on the way: bf16 rows in, packed MXFP8 or NVFP4 rows out (Mosaic GPU).

Letters: T tokens on this rank, D hidden size, R ranks, C rows reserved for each source rank, B block size.

Warpgroup 0 of a block loads rows into a ring; the other warpgroups take turns at quantising one in registers, writing
the packed row to shared memory and storing it to each rank that it goes to. The bytes equal those of quantising first,
and the arithmetic of one row hides behind the stores of the others.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.quantize.emit import Ops, Pointer
from pallas_kernels.quantize.formats import BlockFormat, get_format

from .mosaic_common import (
    SHARED_MEMORY,
    Form,
    Schedule,
    completion,
    int32,
    kernel_params,
    row_bytes,
    send_counts,
    share,
    stride_of,
)
from .mosaic_encode import KINDS, PackedRow, encode_row


def reason_not(shape: tuple[int, ...], dtype, fmt: str | BlockFormat) -> str | None:
    """Why the kernel cannot quantise rows [T, D] of `dtype` to `fmt`; None where it can."""
    fmt = get_format(fmt)
    if not fmt.row_local:
        return f"format {fmt.name!r} has scales that rows share; the kernel sees one row at a time"
    if jnp.dtype(dtype).name not in KINDS:
        return f"the kernel quantises {', '.join(KINDS)}, not {jnp.dtype(dtype).name}"
    if shape[-1] % fmt.block:
        return f"blocks of {fmt.block} do not divide rows of {shape[-1]} values"
    if shape[-1] * jnp.dtype(dtype).itemsize % 16 or fmt.data_bytes(shape[-1]) % 16:
        return (
            f"rows of {shape[-1]} values, {fmt.data_bytes(shape[-1])} bytes quantised: bulk copies move multiples of 16"
        )
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
    apart: bool = False,
    warpgroups: int = 3,
    schedule: Schedule | None = None,
) -> tuple[list[jax.Array], jax.Array]:
    """Quantises row t of x and stores the packed row at `[own rank, slot[t, r]]` of rank r, where slot[t, r] >= 0.

    x: bf16, f16 or f32 [T, D]. tail: uint8 [T, row_bytes - layout.tail_start], what follows the scales in each row
    (ids, weights); bytes in front of `layout.tail_offset` are overwritten. slot: int32 [T, R]. counts: int32 [R].
    Returns ([uint8 [R, C, row_bytes]], received counts int32 [R]), filled as `push_rows` does. apart: two arrays, the
    rows cut behind their data, which the receiver then need not copy out of them.
    Batched form: target int32 [T, K] with slot [T, K], counts [R * E_loc], num_ranks R and num_local E_loc, and results
    as `push_batched` gives them. Raises ValueError for what `reason_not` names.
    """
    fmt = get_format(fmt)
    reason = reason_not(x.shape, x.dtype, fmt)
    if reason:
        raise ValueError(f"push_quantized: {reason}. Quantise first and use push_rows.")
    tokens, width = x.shape
    if target is None:
        form, tables = Form(axis_name, slot.shape[1], capacity), (slot,)
    else:
        assert num_ranks is not None
        form, tables = Form(axis_name, num_ranks, capacity, num_local), (target, slot)
    places = form.places
    row, tail_bytes = layout.row_bytes, layout.row_bytes - layout.tail_start
    schedule = schedule or Schedule.for_tokens(tokens, stages=9)
    cut = fmt.data_bytes(width)
    parts = ((0, cut), (cut, row - cut)) if apart else ((0, row),)  # start and size in the packed row
    stride = stride_of(row, 1, schedule)
    fitting = min(schedule.stages, SHARED_MEMORY // (row_bytes(x) + stride))
    # A warpgroup frees a stage when it is done with its next row, so it needs two. And a multiple of the warpgroups:
    # each stage belongs to one of them, which misses no phase of it.
    warpgroups = min(warpgroups, fitting // 2)
    if warpgroups == 0:
        raise ValueError(
            f"push_quantized: rows of {width} {x.dtype} leave no room for two of them in {SHARED_MEMORY} bytes of "
            "shared memory. Quantise first and use push_rows."
        )
    stages = fitting // warpgroups * warpgroups

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType()))
    def quantize_row(_, *refs):
        source, out, maxima = (Pointer(_shared_address(ref), shared=True) for ref in refs)
        encode_row(Ops(), fmt, x.dtype.name, width, layout, source, out, maxima, mgpu.warpgroup_barrier)

    def body(x_ref, tail_ref, counts_ref, *refs):
        table_refs = refs[: len(tables)]
        *out_refs, out_counts_ref, rows, packed, scratch, full, empty = refs[len(tables) :]
        block = lax.axis_index("block")
        role = lax.axis_index("warpgroup")
        blocks = int32(schedule.blocks)
        trips = share(int32(tokens), block, blocks)

        @pl.when(role == 0)
        def _load():
            def step(i, _):
                stage = lax.rem(i, int32(stages))

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[stage])

                token = block + i * blocks
                bounds = dict(oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(token, 1)], rows.at[stage], full.at[stage], **bounds)  # pyright: ignore[reportArgumentType]
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
                quantize_row(rows.at[stage], packed.at[stage], scratch.at[first])
                plgpu.commit_smem()
                for peer, place in found:

                    @pl.when(place >= 0)
                    def _(peer=peer, place=place):
                        for out_ref, (start, size) in zip(out_refs, parts, strict=True):
                            target = plgpu.remote_ref(out_ref, {axis_name: peer})  # pyright: ignore[reportArgumentType]
                            plgpu.copy_smem_to_gmem(
                                packed.at[stage, :, pl.ds(start, size)],
                                target.at[pl.ds(place, 1), pl.ds(0, size)],
                                commit_group=False,
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
                send_counts(counts_ref, out_counts_ref, axis_name, form.num_ranks, form.num_local or 1, schedule.blocks)

            plgpu.wait_smem_to_gmem(0)
            completion(axis_name, form.num_ranks, schedule, signallers=warpgroups, waiter=role == 1)  # pyright: ignore[reportArgumentType]

    total = form.num_counts * capacity
    *outs, out_counts = plgpu.kernel(
        body,
        out_type=(
            *(jax.ShapeDtypeStruct((total, stride_of(size, 1, schedule)), jnp.uint8) for _, size in parts),
            jax.ShapeDtypeStruct((form.num_counts,), jnp.int32),
        ),
        scratch_types=[
            plgpu.SMEM((stages, 1, width), x.dtype),
            plgpu.SMEM((stages, 1, stride), jnp.uint8),
            plgpu.SMEM((warpgroups, 4), jnp.int32),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        **kernel_params(schedule, f"push_{fmt.name}", warpgroups=1 + warpgroups),
    )(x, tail, counts, *tables)
    outs = [out[:, :size] for out, (_, size) in zip(outs, parts, strict=True)]  # fuses into whatever reads the rows
    return [form.shaped(out) for out in outs], form.shaped_counts(out_counts)


def _shared_address(ref) -> ir.Value:
    """The address of a reference into shared memory, its offset included, as an i64."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu_utils.memref_ptr(ref))
