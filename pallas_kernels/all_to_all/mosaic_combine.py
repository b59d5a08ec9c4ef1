"""One-sided combine on NVIDIA GPUs of one host: owners read the experts' rows where they lie and add them (Mosaic GPU).

Letters: T tokens on this rank, D hidden size, R ranks, C rows reserved for each source rank, J rows a token gets back
(R in the standard form, K in the batched one), K experts per token, E_loc experts on one rank.

No staging copy and no receive buffer: a row crosses the link once, into the shared memory of the block that adds it.
A token's rows are added in float32 in a fixed order, so the same inputs give the same bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mosaic_common import (
    Schedule,
    announce_done,
    done_semaphores,
    int32,
    kernel_params,
    row_bytes,
    share,
    stages_for,
    wait_for_all,
)

MIN_HIDDEN = 256


def combine_rows(
    y: jax.Array,
    slot: jax.Array,
    *,
    axis_name: str,
    capacity: int,
    out_dtype=None,
    schedule: Schedule | None = None,
) -> jax.Array:
    """out[t] = sum over r of rank r's y[own rank * C + slot[t, r]], in float32, r ascending, where slot[t, r] >= 0.

    y: [R * C, D] bf16, f16 or f32, the experts' results on this rank, row (source rank, slot). slot: int32 [T, R], the
    plan with which the rows were dispatched. Inside shard_map over `axis_name`. Returns [T, D] of `out_dtype` (y's).
    Tokens that went nowhere are zero.
    """
    num_ranks = slot.shape[1]

    def source(me, token, j, slot_ref):
        place = slot_ref[token, j]
        return j, jnp.where(place >= 0, me * int32(capacity) + place, int32(-1))

    return _combine(y, (slot,), source, num_ranks, axis_name, num_ranks, slot.shape[0], out_dtype, schedule)


def combine_batched(
    y: jax.Array,
    ids: jax.Array,
    slot: jax.Array,
    weights: jax.Array,
    *,
    axis_name: str,
    num_ranks: int,
    num_local: int,
    capacity: int,
    out_dtype=None,
    schedule: Schedule | None = None,
) -> jax.Array:
    """out[t] = sum over k of weights[t, k] * y_owner[expert, own rank * C + slot[t, k]] in float32, k ascending.

    y: [E_loc, R * C, D], each local expert's results. ids: int32 [T, K] physical experts (owner = id // E_loc).
    slot: int32 [T, K], -1 where nothing was sent. weights: f32 [T, K]. Returns [T, D] of `out_dtype` (y's).
    """
    per_expert = num_ranks * capacity

    def source(me, token, j, ids_ref, slot_ref, _):
        place, expert = slot_ref[token, j], jnp.maximum(ids_ref[token, j], int32(0))
        peer = lax.div(expert, int32(num_local))
        row = (expert - peer * int32(num_local)) * int32(per_expert) + me * int32(capacity) + place
        return peer, jnp.where(place >= 0, row, int32(-1))

    flat = y.reshape(num_local * per_expert, y.shape[-1])
    tables = (ids, slot, weights)
    return _combine(flat, tables, source, ids.shape[1], axis_name, num_ranks, ids.shape[0], out_dtype, schedule)


def column_chunks(width: int) -> tuple[int, list[int]]:
    """Length and starts of the column chunks that one warpgroup adds at a time; the last may overlap the one before."""
    if width < MIN_HIDDEN or width % 8:
        raise ValueError(
            f"combine of rows of {width} values: the kernel takes multiples of 8 from {MIN_HIDDEN} on; "
            "pad the hidden size or use implementation='xla'."
        )
    length = 1024
    while length > width:
        length //= 2
    starts = list(range(0, width - length + 1, length))
    if starts[-1] + length < width:
        starts.append(width - length)
    return length, starts


def _combine(y, tables, source, per_token, axis_name, num_ranks, tokens, out_dtype, schedule):
    width = y.shape[-1]
    schedule = schedule or Schedule.for_tokens(tokens)
    stages = stages_for(schedule, row_bytes(y))
    length, starts = column_chunks(width)
    out_dtype = jnp.dtype(out_dtype or y.dtype)
    weighted = len(tables) == 3

    def body(y_ref, *refs):
        table_refs, (out_ref, ring, full, empty) = refs[: len(tables)], refs[len(tables) :]
        me = lax.axis_index(axis_name)
        block = lax.axis_index("block")
        role = lax.axis_index("warpgroup")
        blocks = int32(schedule.blocks)
        trips = share(int32(tokens), block, blocks)
        read = done_semaphores(num_ranks, unused=1)

        @pl.when(role == 0)
        def _load():
            def step(i, count):
                token = block + i * blocks
                found = [source(me, token, int32(j), *table_refs) for j in range(per_token)]
                for peer, row in found:
                    stage = lax.rem(count, int32(stages))

                    @pl.when(row >= 0)
                    def _(peer=peer, row=row, stage=stage, count=count):
                        @pl.when(count >= stages)
                        def _():
                            plgpu.barrier_wait(empty.at[stage])

                        remote = plgpu.remote_ref(y_ref, {axis_name: peer})  # pyright: ignore[reportArgumentType]
                        plgpu.copy_gmem_to_smem(
                            remote.at[pl.ds(row, 1)],
                            ring.at[stage],
                            full.at[stage],
                            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                        )

                    count = count + (row >= 0).astype(jnp.int32)
                return count

            lax.fori_loop(int32(0), trips, step, int32(0))

        @pl.when(role == 1)
        def _add():
            def step(i, count):
                token = block + i * blocks

                def add_row(j, carry):
                    _, row = source(me, token, j, *table_refs)
                    weight = table_refs[2][token, j] if weighted else None

                    def add(_, carry):
                        count, sums = carry
                        stage = lax.rem(count, int32(stages))
                        plgpu.barrier_wait(full.at[stage])
                        values = [ring[stage, 0, pl.ds(start, length)].astype(jnp.float32) for start in starts]
                        plgpu.barrier_arrive(empty.at[stage])
                        if weight is not None:
                            values = [weight * value for value in values]
                        return count + int32(1), tuple(total + value for total, value in zip(sums, values, strict=True))

                    return lax.fori_loop(int32(0), (row >= 0).astype(jnp.int32), add, carry)

                layout = plgpu.Layout.WG_STRIDED((length,), vec_size=min(8, length // 128))
                zeros = tuple(plgpu.layout_cast(jnp.zeros((length,), jnp.float32), layout) for _ in starts)
                count, sums = lax.fori_loop(int32(0), int32(per_token), add_row, (count, zeros))

                @pl.when(i == trips - int32(1))
                def _():
                    announce_done(read, axis_name, num_ranks)  # the other ranks may now reuse their rows

                for start, total in zip(starts, sums, strict=True):
                    out_ref[token, pl.ds(start, length)] = total.astype(out_dtype)
                return count

            lax.fori_loop(int32(0), trips, step, int32(0))

            @pl.when(trips == 0)
            def _():
                announce_done(read, axis_name, num_ranks)

            wait_for_all(read, axis_name, num_ranks, schedule)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, width), out_dtype),
        scratch_types=[
            plgpu.SMEM((stages, 1, width), y.dtype),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        **kernel_params(schedule, "combine_rows"),
    )(y, *tables)
