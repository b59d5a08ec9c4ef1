"""One-sided dispatch for NVIDIA GPUs of one host: rows are stored straight into the receivers' buffers (Mosaic GPU).

Letters: T tokens on this rank, W row width, R ranks, C rows reserved for each source rank, K experts per token,
E_loc experts on one rank.

A token's row is loaded once into shared memory and stored from there to every place it goes to, the own rank included.
Blocks are persistent and take every num_blocks-th token, so that each sends about the same number of bytes whatever the
router did; a token's destinations are visited starting after the own rank, so that the ranks do not all aim at one.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mosaic_common import (
    Form,
    Schedule,
    completion,
    int32,
    kernel_params,
    row_bytes,
    send_counts,
    share,
    stages_for,
    stride_of,
)
from .mosaic_fan_out import fan_out_of


def push_rows(
    rows: jax.Array,
    slot: jax.Array,
    counts: jax.Array,
    *,
    axis_name: str,
    capacity: int,
    schedule: Schedule | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Stores row t of this rank at `[own rank, slot[t, r]]` of rank r's result, for every r with slot[t, r] >= 0.

    rows: [T, W] of any dtype of 8 bits or more, W * itemsize a multiple of 16 bytes. slot: int32 [T, R], -1 where the
    token does not go. counts: int32 [R], rows that go to each rank. Inside shard_map over `axis_name`.
    Returns (received [R, C, W], received_counts int32 [R]). Rows of source r from received_counts[r] on are not
    written: they hold whatever was in that memory, and the counts say so. Bytes over the link: one row for each
    (token, other rank).
    """
    form = Form(axis_name, slot.shape[1], capacity)
    (out,), out_counts = _push([rows], (slot,), counts, form, "push_rows", schedule)
    return out, out_counts


def push_apart(
    pieces: Sequence[jax.Array | tuple[jax.Array, ...]],
    slot: jax.Array,
    counts: jax.Array,
    *,
    axis_name: str,
    capacity: int,
    target: jax.Array | None = None,
    num_ranks: int | None = None,
    num_local: int = 1,
    fan_out: bool = False,
    schedule: Schedule | None = None,
) -> tuple[list[jax.Array], jax.Array]:
    """`push_rows` of several arrays [T, W_i] at once: nobody has to join them before or to part them afterwards.

    Each array's rows are of multiples of 16 bytes. Arrays of one dtype in a tuple arrive side by side, as one. Returns
    ([received [R, C, W_i] for each], counts int32 [R]). Batched form: target int32 [T, K] with slot [T, K], counts
    [R * E_loc], num_ranks R and num_local E_loc, and results as `push_batched` gives them, for each array. fan_out: the
    first array's rows cross the link once for each rank and are copied there; see `mosaic_fan_out`.
    """
    if target is None:
        form, tables = Form(axis_name, slot.shape[1], capacity), (slot,)
    else:
        assert num_ranks is not None
        form, tables = Form(axis_name, num_ranks, capacity, num_local), (target, slot)
    return _push(pieces, tables, counts, form, "push_apart", schedule, fan_out=fan_out)


def push_batched(
    rows: jax.Array,
    target: jax.Array,
    slot: jax.Array,
    counts: jax.Array,
    *,
    axis_name: str,
    num_ranks: int,
    num_local: int,
    capacity: int,
    schedule: Schedule | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Stores row t once for each of its experts, at `[expert, own rank * C + slot[t, k]]` of the expert's owner.

    rows: [T, W] as for `push_rows`. target: int32 [T, K] physical experts (owner = target // E_loc). slot: int32
    [T, K], -1 where nothing is sent. counts: int32 [R * E_loc], rows that go to each expert.
    Returns (received [E_loc, R * C, W], received counts int32 [E_loc, R]); rows beyond the counts are not written.
    """
    form = Form(axis_name, num_ranks, capacity, num_local)
    (out,), out_counts = _push([rows], (target, slot), counts, form, "push_rows", schedule)
    return out, out_counts


def _push(pieces, tables, counts, form: Form, name, schedule, *, fan_out: bool = False):
    """Warpgroup 0 keeps the rings of rows full; warpgroup 1 stores each row to its places, then signals.

    pieces: arrays [T, W_i], or tuples of them that lie side by side; a row is one row of each piece, and each piece has
    a ring and a result of its own. Returns these and the received counts, both as `form` has them.
    """
    axis_name, places = form.axis_name, form.places
    total = form.num_counts * form.capacity
    pieces = [piece if isinstance(piece, tuple) else (piece,) for piece in pieces]
    arrays = [array for piece in pieces for array in piece]
    tokens = arrays[0].shape[0]
    for array in arrays:
        row_bytes(array)
    widths = [sum(array.shape[1] for array in piece) for piece in pieces]
    dtypes = [piece[0].dtype for piece in pieces]
    schedule = schedule or Schedule.for_tokens(tokens, counts=form.num_counts)
    strides = [stride_of(width, dtype.itemsize, schedule) for width, dtype in zip(widths, dtypes, strict=True)]
    stages = stages_for(schedule, sum(s * d.itemsize for s, d in zip(strides, dtypes, strict=True)))
    in_flight = min(schedule.in_flight, stages - 1)
    fan = fan_out_of(form, tokens, tables, schedule) if fan_out else None

    def body(*refs):
        refs = list(refs)
        take = lambda n: [refs.pop(0) for _ in range(n)]  # noqa: E731
        piece_refs = [take(len(piece)) for piece in pieces]
        (counts_ref,), table_refs = take(1), take(len(tables))
        out_refs, (out_counts_ref,), rings, (full, empty) = take(len(pieces)), take(1), take(len(pieces)), take(2)
        fanned = refs  # scratch of `fan`
        block = lax.axis_index("block")
        role = lax.axis_index("warpgroup")
        blocks = int32(schedule.blocks)
        trips = share(int32(tokens), block, blocks)

        @pl.when(role == 0)
        def _load():
            if fan is not None:
                fan.fetch(*table_refs, *fanned[:2])

            def step(i, _):
                stage = lax.rem(i, int32(stages))

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[stage])

                for side_by_side, ring in zip(piece_refs, rings, strict=True):
                    start = 0
                    for ref in side_by_side:
                        plgpu.copy_gmem_to_smem(
                            ref.at[pl.ds(block + i * blocks, 1)],
                            ring.at[stage, :, pl.ds(start, ref.shape[1])],
                            full.at[stage],
                            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                        )
                        start += ref.shape[1]
                return ()

            lax.fori_loop(int32(0), trips, step, ())

        @pl.when(role == 1)
        def _store():
            def find(i):
                found = places(jnp.minimum(block + i * blocks, int32(tokens - 1)), *table_refs)
                return tuple(found if fan is None else fan.by_link(found))

            def step(i, found):
                stage = lax.rem(i, int32(stages))
                following = find(i + int32(1))  # asked for one row ahead, so that nobody waits for the tables
                plgpu.barrier_wait(full.at[stage])

                def store(peer, place, which):
                    @pl.when(place >= 0)
                    def _():
                        for out_ref, ring, width in list(zip(out_refs, rings, widths, strict=True))[which]:
                            target = plgpu.remote_ref(out_ref, {axis_name: peer})  # pyright: ignore[reportArgumentType]
                            plgpu.copy_smem_to_gmem(
                                ring.at[stage, :, pl.ds(0, width)],
                                target.at[pl.ds(place, 1), pl.ds(0, width)],
                                commit_group=False,
                            )

                for peer, place, *data in found:
                    if data:
                        store(peer, data[0], slice(1))
                    store(peer, place, slice(len(data), None))

                plgpu.commit_smem_to_gmem_group()

                @pl.when(i >= in_flight)
                def _():
                    plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
                    plgpu.barrier_arrive(empty.at[lax.rem(i - int32(in_flight), int32(stages))])

                return following

            lax.fori_loop(int32(0), trips, step, find(int32(0)))
            send_counts(counts_ref, out_counts_ref, axis_name, form.num_ranks, form.num_local or 1, schedule.blocks)
            plgpu.wait_smem_to_gmem(0)  # complete at the receiver, not only read from shared memory
            if fan is not None:
                plgpu.barrier_wait(fanned[1])  # the other ranks' plans have been read
            completion(axis_name, form.num_ranks, schedule, every_block=fan is not None)
            if fan is not None:
                fan.copy(fanned[0], out_refs[0], rings[0].at[0, :, pl.ds(0, widths[0])], fanned[2])

    *received, out_counts = plgpu.kernel(
        body,
        out_type=(
            *(jax.ShapeDtypeStruct((total, stride), dtype) for stride, dtype in zip(strides, dtypes, strict=True)),
            jax.ShapeDtypeStruct((form.num_counts,), jnp.int32),
        ),
        scratch_types=[
            *(plgpu.SMEM((stages, 1, stride), dtype) for stride, dtype in zip(strides, dtypes, strict=True)),
            plgpu.Barrier(num_arrivals=len(arrays), num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            *(fan.scratch if fan else ()),
        ],
        **kernel_params(schedule, name),
    )(*arrays, counts, *tables)
    # slices that fuse into whatever reads the rows
    received = [form.shaped(out[:, :width]) for out, width in zip(received, widths, strict=True)]
    return received, form.shaped_counts(out_counts)
