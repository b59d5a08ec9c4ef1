"""`ragged_all_to_all` on NVIDIA GPUs of one host: slices are stored straight into the peers' outputs (Mosaic GPU).

Letters: N rows of the operand, M rows of the output, W row width, R ranks, S slices for each peer.

Slices are cut into chunks of about 16 KiB. Chunk c of slice i belongs to block (i + c) mod num_blocks, so one long
slice is spread over all blocks, many short ones too, and empty ones cost almost nothing. Blocks start at different
peers: some copy this rank's own rows while others wait for the link.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mosaic_common import Schedule, completion, int32, kernel_params, row_bytes, share, stages_for

CHUNK_BYTES = 16 * 1024


def ragged_push(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    *,
    axis_name: str,
    num_ranks: int,
    schedule: Schedule | None = None,
) -> jax.Array:
    """`jax.lax.ragged_all_to_all` on rows: the offsets' meaning is the same, receive sizes are not needed.

    operand: [N, W], output: [M, W], W * itemsize a multiple of 16 bytes. input_offsets, send_sizes, output_offsets:
    int32 [R * S], entry i belongs to peer i // S; output offsets count rows of the receiver's output. Returns `output`
    with the received slices written over it. Offsets and sizes must be in range: nothing is checked on the device.
    """
    nbytes = row_bytes(operand)
    width = operand.shape[1]
    per_peer = send_sizes.shape[0] // num_ranks
    chunk = 1
    while 2 * chunk * nbytes <= CHUNK_BYTES and chunk < 64:
        chunk *= 2
    sizes = [chunk >> shift for shift in range(chunk.bit_length())]  # a chunk of n rows is copied bit by bit of n
    schedule = schedule or Schedule.for_tokens(operand.shape[0])
    stages = stages_for(schedule, chunk * nbytes)
    in_flight = min(schedule.in_flight, stages - 1)
    blocks = int32(schedule.blocks)

    def body(operand_ref, input_ref, size_ref, output_ref, out_ref, ring, full, empty):
        me = lax.axis_index(axis_name)
        block = lax.axis_index("block")
        role = lax.axis_index("warpgroup")

        def walk(visit):
            """Calls visit(count, peer, first row here, first row there, rows) for each chunk of this block."""

            def entry(e, count):
                step = lax.div(e, int32(per_peer))
                peer = lax.rem(me + int32(1) + block + step, int32(num_ranks))
                index = peer * int32(per_peer) + (e - step * int32(per_peer))
                base = lax.rem(index, blocks)
                rows = size_ref[index]
                here, there = input_ref[index], output_ref[index]
                chunks = lax.div(rows + int32(chunk - 1), int32(chunk))
                first = lax.rem(block - base + blocks, blocks)
                trips = share(chunks, first, blocks)

                def one(i, count):
                    start = (first + i * blocks) * int32(chunk)
                    visit(count, peer, here + start, there + start, jnp.minimum(rows - start, int32(chunk)))
                    return count + int32(1)

                return lax.fori_loop(int32(0), trips, one, count)

            lax.fori_loop(int32(0), int32(num_ranks * per_peer), entry, int32(0))

        def pieces(rows):
            """(size, offset, present) of the copies that make up a chunk of `rows` rows."""
            return [(size, rows & int32(-2 * size), (rows & int32(size)) != 0) for size in sizes]

        @pl.when(role == 0)
        def _load():
            def visit(count, peer, here, there, rows):
                stage = lax.rem(count, int32(stages))

                @pl.when(count >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[stage])

                for size, offset, present in pieces(rows):
                    plgpu.copy_gmem_to_smem(
                        operand_ref.at[pl.ds(here + offset, size)],
                        ring.at[stage, pl.ds(offset, size)],
                        full.at[stage],
                        oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                        predicate=present,  # pyright: ignore[reportCallIssue]
                    )

            walk(visit)

        @pl.when(role == 1)
        def _store():
            def visit(count, peer, here, there, rows):
                stage = lax.rem(count, int32(stages))
                plgpu.barrier_wait(full.at[stage])
                target = plgpu.remote_ref(out_ref, {axis_name: peer})  # pyright: ignore[reportArgumentType]
                for size, offset, present in pieces(rows):
                    plgpu.copy_smem_to_gmem(
                        ring.at[stage, pl.ds(offset, size)],
                        target.at[pl.ds(there + offset, size)],
                        present,
                        commit_group=False,
                    )
                plgpu.commit_smem_to_gmem_group()

                @pl.when(count >= in_flight)
                def _():
                    plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
                    plgpu.barrier_arrive(empty.at[lax.rem(count - int32(in_flight), int32(stages))])

            walk(visit)
            plgpu.wait_smem_to_gmem(0)
            completion(axis_name, num_ranks, schedule)

    out_ref = jax.new_ref(output)
    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=[
            plgpu.SMEM((stages, chunk, width), operand.dtype),
            plgpu.Barrier(num_arrivals=len(sizes), num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        **kernel_params(schedule, "ragged_all_to_all"),
    )(operand, input_offsets, send_sizes, output_offsets, out_ref)
    return jax.freeze(out_ref)
