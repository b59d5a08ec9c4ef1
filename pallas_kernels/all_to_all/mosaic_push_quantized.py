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
    WayBack,
    completion,
    int32,
    kernel_params,
    row_bytes,
    send_counts,
    share,
    stride_of,
)
from .mosaic_encode import KINDS, PackedRow, encode_row
from .mosaic_fan_out import fan_out_of


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
    tail: tuple[jax.Array, ...],
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
    fan_out: bool = False,
    warpgroups: int = 3,
    schedule: Schedule | None = None,
) -> tuple[list[jax.Array], jax.Array]:
    """Quantises row t of x and stores the packed row at `[own rank, slot[t, r]]` of rank r, where slot[t, r] >= 0.

    x: bf16, f16 or f32 [T, D]. tail: uint8 [T, multiples of 16], in all row_bytes - layout.tail_start, what follows the
    scales in each row (ids, weights); bytes in front of `layout.tail_offset` are overwritten. slot: int32 [T, R].
    counts: int32 [R]. Returns ([uint8 [R, C, row_bytes]], received counts int32 [R]), filled as `push_rows` does.
    apart: two arrays, the rows cut behind their data, which the receiver then need not copy out of them.
    Batched form: target int32 [T, K] with slot [T, K], counts [R * E_loc], num_ranks R and num_local E_loc, and results
    as `push_batched` gives them. fan_out, with apart: the data crosses the link once for each rank and is copied there;
    see `mosaic_fan_out`. Raises ValueError for what `reason_not` names.
    """
    if target is None:
        form, tables = Form(axis_name, slot.shape[1], capacity), (slot,)
    else:
        assert num_ranks is not None
        form, tables = Form(axis_name, num_ranks, capacity, num_local), (target, slot)
    assert sum(part.shape[1] for part in tail) == layout.row_bytes - layout.tail_start
    cut = get_format(fmt).data_bytes(x.shape[1])
    parts = ((0, cut), (cut, layout.row_bytes - cut)) if apart else ((0, layout.row_bytes),)
    assert apart or not fan_out
    *outs, out_counts = _push(x, tail, tables, counts, form, parts, fmt, layout, warpgroups, schedule, fan_out)
    outs = [out[:, :size] for out, (_, size) in zip(outs, parts, strict=True)]  # fuses into whatever reads the rows
    return [form.shaped(out) for out in outs], form.shaped_counts(out_counts)


def push_back_quantized(
    y: jax.Array,
    received: jax.Array,
    *,
    fmt: str | BlockFormat,
    layout: PackedRow,
    axis_name: str,
    warpgroups: int = 3,
    schedule: Schedule | None = None,
) -> jax.Array:
    """Quantises what arrived and stores it in the slots that it came from: row c of rank r at [own rank, c] of rank r.

    y: bf16, f16 or f32 [R * C, D], by source rank. received: int32 [R], rows from each rank: c < received[r]. Returns
    uint8 [R * C, at least row_bytes], packed rows from each rank, on whole lines; slots that no row came from are not
    written, nor is what follows a row's scales. Raises ValueError for what `reason_not` names.
    """
    num_ranks = received.shape[0]
    form = WayBack(axis_name, num_ranks, y.shape[0] // num_ranks)
    whole = ((0, layout.row_bytes),)
    return _push(y, (), (received,), None, form, whole, fmt, layout, warpgroups, schedule)[0]


def _push(x, tail, tables, counts, form: Form, parts, fmt, layout: PackedRow, warpgroups, schedule, fan_out=False):
    """parts: start and size in the packed row of what each result [R * C, ...] gets. counts: None to send none."""
    fmt = get_format(fmt)
    reason = reason_not(x.shape, x.dtype, fmt)
    if reason:
        raise ValueError(f"push_quantized: {reason}. Quantise first and use push_rows.")
    tokens, width = x.shape
    axis_name, places = form.axis_name, form.places
    schedule = schedule or Schedule.for_tokens(tokens, counts=form.num_counts, stages=9)
    stride = stride_of(layout.row_bytes, 1, schedule)
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
    sent = () if counts is None else (counts,)
    fan = fan_out_of(form, tokens, tables, schedule) if fan_out else None

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType()))
    def quantize_row(_, *refs):
        source, out, maxima = (Pointer(_shared_address(ref), shared=True) for ref in refs)
        encode_row(Ops(), fmt, x.dtype.name, width, layout, source, out, maxima, mgpu.warpgroup_barrier)

    def body(x_ref, *refs):
        refs = list(refs)
        take = lambda n: [refs.pop(0) for _ in range(n)]  # noqa: E731
        tail_refs, table_refs, counts_refs = take(len(tail)), take(len(tables)), take(len(sent))
        out_refs, out_counts_refs = take(len(parts)), take(len(sent))
        (rows, packed, scratch, full, empty), fanned = take(5), refs  # the last are scratch of `fan`
        block = lax.axis_index("block")
        role = lax.axis_index("warpgroup")
        blocks = int32(schedule.blocks)
        trips = share(form.turns(tokens, *table_refs), block, blocks)

        @pl.when(role == 0)
        def _load():
            if fan is not None:
                fan.fetch(*table_refs, *fanned[:2])

            def step(i, _):
                stage = lax.rem(i, int32(stages))

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[stage])

                token = form.row(block + i * blocks)
                bounds = dict(oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(token, 1)], rows.at[stage], full.at[stage], **bounds)  # pyright: ignore[reportArgumentType]
                start = layout.tail_start
                for ref in tail_refs:
                    into = packed.at[stage, :, pl.ds(start, ref.shape[1])]
                    plgpu.copy_gmem_to_smem(ref.at[pl.ds(token, 1)], into, full.at[stage], **bounds)  # pyright: ignore[reportArgumentType]
                    start += ref.shape[1]
                return ()

            lax.fori_loop(int32(0), trips, step, ())

        @pl.when(role > 0)
        def _quantize_and_store():
            first = role - int32(1)
            mine = share(trips, first, int32(warpgroups))

            def find(n):
                token = block + (first + n * int32(warpgroups)) * blocks
                found = places(jnp.minimum(token, int32(tokens - 1)), *table_refs)
                return tuple(found if fan is None else fan.by_link(found))

            def step(n, found):
                i = first + n * int32(warpgroups)
                stage = lax.rem(i, int32(stages))
                following = find(n + int32(1))
                plgpu.barrier_wait(full.at[stage])
                quantize_row(rows.at[stage], packed.at[stage], scratch.at[first])
                plgpu.commit_smem()

                def store(peer, place, which):
                    @pl.when(place >= 0)
                    def _():
                        for out_ref, (start, size) in list(zip(out_refs, parts, strict=True))[which]:
                            target = plgpu.remote_ref(out_ref, {axis_name: peer})  # pyright: ignore[reportArgumentType]
                            plgpu.copy_smem_to_gmem(
                                packed.at[stage, :, pl.ds(start, size)],
                                target.at[pl.ds(place, 1), pl.ds(0, size)],
                                commit_group=False,
                            )

                for peer, place, *data in found:
                    if data:
                        store(peer, data[0], slice(1))
                    store(peer, place, slice(len(data), None))

                plgpu.commit_smem_to_gmem_group()

                @pl.when(n > 0)
                def _():
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    plgpu.barrier_arrive(empty.at[lax.rem(i - int32(warpgroups), int32(stages))])

                return following

            lax.fori_loop(int32(0), mine, step, find(int32(0)))

            for counts_ref, out_counts_ref in zip(counts_refs, out_counts_refs, strict=True):

                @pl.when(role == 1)
                def _(here=counts_ref, there=out_counts_ref):
                    send_counts(here, there, axis_name, form.num_ranks, form.num_local or 1, schedule.blocks)

            plgpu.wait_smem_to_gmem(0)
            if fan is not None:

                @pl.when(role == 1)
                def _():
                    plgpu.barrier_wait(fanned[1])  # the other ranks' plans have been read

            completion(
                axis_name,
                form.num_ranks,
                schedule,
                signallers=warpgroups,
                waiter=role == 1,  # pyright: ignore[reportArgumentType]
                every_block=fan is not None,
            )
            if fan is not None:

                @pl.when(role == 1)
                def _(fan=fan):  # through the first stage, which belongs to this warpgroup
                    fan.copy(fanned[0], out_refs[0], packed.at[0, :, pl.ds(0, parts[0][1])], fanned[2])

    total = form.num_counts * form.capacity
    return plgpu.kernel(
        body,
        out_type=(
            *(jax.ShapeDtypeStruct((total, stride_of(size, 1, schedule)), jnp.uint8) for _, size in parts),
            *(jax.ShapeDtypeStruct((form.num_counts,), jnp.int32) for _ in sent),
        ),
        scratch_types=[
            plgpu.SMEM((stages, 1, width), x.dtype),
            plgpu.SMEM((stages, 1, stride), jnp.uint8),
            plgpu.SMEM((warpgroups, 4), jnp.int32),
            plgpu.Barrier(num_arrivals=1 + len(tail), num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            *(fan.scratch if fan else ()),
        ],
        **kernel_params(schedule, f"push_{fmt.name}", warpgroups=1 + warpgroups),
    )(x, *tail, *tables, *sent)


def _shared_address(ref) -> ir.Value:
    """The address of a reference into shared memory, its offset included, as an i64."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu_utils.memref_ptr(ref))
