"""One-sided combine for many tokens: experts' rows are stored at their owners, which add them on arrival (Mosaic GPU).

Letters: T tokens on this rank, D hidden size, R ranks, C rows reserved for each source rank.

Remote writes use the link better than the remote reads of `mosaic_combine` (two H200s, 8192 rows of 7168: 366 us, the
reading one 383), and cost a receive buffer of R * C rows.
Rows travel in chunks of a few slots, in slot order; slots follow token order, so the owner's tokens become complete in
about the order in which its blocks add them, and adding hides behind the link. Each chunk has a semaphore of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mosaic_combine import column_chunks
from .mosaic_common import SHARED_MEMORY, Schedule, int32, kernel_params, peer_of, row_bytes, share

# Bytes of the rows that share a semaphore. A block has two such chunks on their way; with half of that 8192 rows of
# 14 KiB take 435 us in place of 363.
CHUNK_BYTES = 28 * 1024
ADDERS = 2  # warpgroups of a block that add


def combine_rows_pushed(
    y: jax.Array,
    slot: jax.Array,
    counts: jax.Array,
    *,
    axis_name: str,
    capacity: int,
    out_dtype=None,
    schedule: Schedule | None = None,
) -> jax.Array:
    """out[t] = sum over r of rank r's y[own rank * C + slot[t, r]], in float32, r ascending, where slot[t, r] >= 0.

    As `mosaic_combine.combine_rows`, bit for bit. counts: int32 [R], rows that this rank sent to each rank. All blocks
    must be resident at once: no more of them than multiprocessors.
    """
    width = y.shape[-1]
    num_ranks, tokens = slot.shape[1], slot.shape[0]
    schedule = schedule or Schedule.for_tokens(tokens)
    chunk_rows = max(1, min(8, CHUNK_BYTES // row_bytes(y)))  # each is a copy of its own in the code
    stages = max(2, min(schedule.stages, SHARED_MEMORY // (chunk_rows * row_bytes(y))))
    length, starts = column_chunks(width)
    out_dtype = jnp.dtype(out_dtype or y.dtype)
    num_chunks = -(-capacity // chunk_rows)

    def body(y_ref, slot_ref, counts_ref, out_ref, arrivals_ref, ring, full, empty):
        me = lax.axis_index(axis_name)
        block = lax.axis_index("block")
        role = lax.axis_index("warpgroup")
        blocks = int32(schedule.blocks)
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((num_ranks, num_chunks)))
        read = pl.get_global(plgpu.SemaphoreType.REGULAR)

        def walk(visit, carry):
            """visit(peer, chunk, rows, carry) for this block's share of the rows that go to each other rank."""
            peers = [peer_of(me, s, num_ranks) for s in range(1, num_ranks)]
            sizes = [plgpu.remote_ref(counts_ref, {axis_name: peer})[me] for peer in peers]  # pyright: ignore[reportArgumentType]
            longest = sizes[0]
            for size in sizes[1:]:
                longest = jnp.maximum(longest, size)
            chunks = lax.div(longest + int32(chunk_rows - 1), int32(chunk_rows))
            trips = share(chunks, block, blocks)

            def step(i, carry):
                chunk = block + i * blocks
                for peer, size in zip(peers, sizes, strict=True):
                    rows = jnp.minimum(size - chunk * int32(chunk_rows), int32(chunk_rows))
                    carry = visit(peer, chunk, rows, carry)
                return carry

            carry = lax.fori_loop(int32(0), trips, step, carry)
            for peer in peers:  # this warpgroup has read the counts: their owner may leave
                pl.semaphore_signal(read, device_id={axis_name: peer})
            return carry

        @pl.when(role == 0)
        def _load():
            def visit(peer, chunk, rows, count):
                stage = lax.rem(count, int32(stages))

                @pl.when(rows > 0)
                def _():
                    @pl.when(count >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[stage])

                    for k in range(chunk_rows):
                        here = peer * int32(capacity) + chunk * int32(chunk_rows) + int32(k)
                        plgpu.copy_gmem_to_smem(
                            y_ref.at[pl.ds(here, 1)],
                            ring.at[stage, pl.ds(k, 1)],
                            full.at[stage],
                            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                            predicate=rows > k,  # pyright: ignore[reportCallIssue]
                        )

                return count + (rows > 0).astype(jnp.int32)

            walk(visit, int32(0))

        @pl.when(role == 1)
        def _push():
            def announce(peer, chunk):
                pl.semaphore_signal(arrived.at[me, chunk], device_id={axis_name: peer})

            def visit(peer, chunk, rows, carry):
                count, last_peer, last_chunk = carry
                stage = lax.rem(count, int32(stages))

                @pl.when(rows > 0)
                def _():
                    plgpu.barrier_wait(full.at[stage])
                    target = plgpu.remote_ref(arrivals_ref, {axis_name: peer})  # pyright: ignore[reportArgumentType]
                    for k in range(chunk_rows):
                        there = me * int32(capacity) + chunk * int32(chunk_rows) + int32(k)
                        plgpu.copy_smem_to_gmem(
                            ring.at[stage, pl.ds(k, 1)], target.at[pl.ds(there, 1)], rows > k, commit_group=False
                        )
                    plgpu.commit_smem_to_gmem_group()

                    @pl.when(count > 0)
                    def _():
                        plgpu.wait_smem_to_gmem(1)  # the chunk before is complete at its owner
                        plgpu.barrier_arrive(empty.at[lax.rem(count - int32(1), int32(stages))])
                        announce(last_peer, last_chunk)

                some = rows > 0
                return (
                    count + some.astype(jnp.int32),
                    jnp.where(some, peer, last_peer),
                    jnp.where(some, chunk, last_chunk),
                )

            count, last_peer, last_chunk = walk(visit, (int32(0), int32(0), int32(0)))

            @pl.when(count > 0)
            def _():
                plgpu.wait_smem_to_gmem(0)
                announce(last_peer, last_chunk)

            @pl.when(block == 0)
            def _():
                pl.semaphore_wait(read, 2 * (num_ranks - 1) * schedule.blocks, decrement=False)

        @pl.when(role > 1)
        def _add():
            first = role - int32(2)
            trips = share(int32(tokens), block, blocks)
            mine = share(trips, first, int32(ADDERS))

            def step(n, _):
                token = block + (first + n * int32(ADDERS)) * blocks

                def add_from(source_ref, row, present, sums):
                    def add(_, sums):
                        values = [source_ref[row, pl.ds(start, length)].astype(jnp.float32) for start in starts]
                        return tuple(total + value for total, value in zip(sums, values, strict=True))

                    return lax.fori_loop(int32(0), present.astype(jnp.int32), add, sums)

                def add_rank(rank, sums):
                    place = slot_ref[token, rank]
                    here = rank == me

                    @pl.when((place >= 0) & ~here)
                    def _():
                        pl.semaphore_wait(arrived.at[rank, lax.div(place, int32(chunk_rows))], 1, decrement=False)

                    sums = add_from(arrivals_ref, rank * int32(capacity) + place, (place >= 0) & ~here, sums)
                    return add_from(y_ref, me * int32(capacity) + place, (place >= 0) & here, sums)

                layout = plgpu.Layout.WG_STRIDED((length,), vec_size=min(8, length // 128))
                zeros = tuple(plgpu.layout_cast(jnp.zeros((length,), jnp.float32), layout) for _ in starts)
                sums = lax.fori_loop(int32(0), int32(num_ranks), add_rank, zeros)
                for start, total in zip(starts, sums, strict=True):
                    out_ref[token, pl.ds(start, length)] = total.astype(out_dtype)
                return ()

            lax.fori_loop(int32(0), mine, step, ())

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((tokens, width), out_dtype),
            jax.ShapeDtypeStruct((num_ranks * capacity, width), y.dtype),
        ),
        scratch_types=[
            plgpu.SMEM((stages, chunk_rows, width), y.dtype),
            plgpu.Barrier(num_arrivals=chunk_rows, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        **kernel_params(schedule, "combine_rows_pushed", warpgroups=2 + ADDERS),
    )(y, slot, counts)[0]
