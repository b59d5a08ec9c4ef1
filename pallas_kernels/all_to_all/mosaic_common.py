"""What the remote-write kernels share: launch schedule, completion protocol, checks.

Protocol. XLA puts a barrier across the devices in front of every kernel with remote references, so on entry all ranks'
buffers exist and all semaphores are zero: nothing has to be agreed before the first remote write. At the end every
block of every rank signals every other rank once its own writes are complete, and block 0 waits for all of those
signals, so the kernel retires on a rank only when everything that will ever be written to its results has arrived.
Semaphores come from `pl.get_global`: those of `scratch_types` are replicated for each block.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SHARED_MEMORY = 200 * 1024  # bytes of a block's shared memory given to rings of rows (Hopper has 227 KiB)
LINE = 128  # bytes
int32 = np.int32  # numpy scalars become literals; jnp ones would be captured as operands of the kernel


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a kernel is laid over the GPU.

    blocks: persistent blocks, at most one for each multiprocessor (they spin at the end, so all must be resident).
    stages: rows in flight in a block's shared memory. in_flight: rows whose stores may still be reading shared memory
    before the oldest is waited for.
    wait_limit: for debugging, how often the final wait looks for a rank's signals before it prints which rank is
    missing and goes on with whatever has arrived (None: it waits for ever). align_rows: received rows start on whole
    lines of 128 bytes, and so they do in shared memory.
    """

    blocks: int = 132
    stages: int = 8
    in_flight: int = 2
    wait_limit: int | None = None
    align_rows: bool = True

    @classmethod
    def for_tokens(cls, tokens: int, *, counts: int = 0, stages: int = 8) -> Schedule:
        """A block for each token, up to one on each multiprocessor, of which an H200 has 132.

        counts: how many a dispatch sends besides, a block for every 8 of them at least, as it stores one by one.
        """
        return cls(blocks=max(1, min(132, multiprocessors(), max(tokens, counts // 8))), stages=stages)


def multiprocessors() -> int:
    """Multiprocessors of the GPU that JAX sees; 132 where it sees none and only compiles."""
    device = jax.devices()[0]
    return int(getattr(device, "core_count", 0) or 132) if device.platform == "gpu" else 132


def stages_for(schedule: Schedule, nbytes: int) -> int:
    """Ring stages that fit. Raises ValueError for rows of which not even two fit in shared memory."""
    fitting = min(schedule.stages, SHARED_MEMORY // nbytes)
    if fitting < 2:
        raise ValueError(
            f"A row of {nbytes} bytes is too long for the remote-write kernels: at most {SHARED_MEMORY // 2} bytes; "
            "use implementation='xla', or a narrower wire format."
        )
    return fitting


def row_bytes(rows: jax.Array) -> int:
    """Bytes of one row. Raises ValueError where rows cannot be moved by bulk copies."""
    nbytes = rows.shape[-1] * rows.dtype.itemsize
    if nbytes % 16 or jnp.issubdtype(rows.dtype, jnp.bool_):
        raise ValueError(
            f"Rows of {rows.shape[-1]} {rows.dtype} are {nbytes} bytes; bulk copies move multiples of 16. "
            "Pad the rows (jmoe.payload does), or use implementation='xla'."
        )
    return nbytes


def stride_of(width: int, itemsize: int, schedule: Schedule) -> int:
    """Elements from one received row to the next.

    The link and the L2 cache move whole lines. Measured on two H200s, 8192 rows for each: of 4112 bytes laid end to end
    154 us, on whole lines 123; of 7456 bytes 213 and 201.
    """
    unit = LINE // itemsize if schedule.align_rows else 1
    return -(-width // unit) * unit


def share(count, turn, turns):
    """How many of the indices 0..count-1 are turn, turn + turns, turn + 2 * turns, ..."""
    return lax.div(jnp.maximum(count - turn + turns - int32(1), int32(0)), turns)


def peer_of(me, step, num_ranks: int):
    """The rank `step` places (up to R) after `me`, around the ring."""
    peer = me + (int32(step) if isinstance(step, int) else step)
    return jnp.where(peer >= num_ranks, peer - int32(num_ranks), peer)


def kernel_params(schedule: Schedule, name: str, *, warpgroups: int = 2) -> dict:
    """Arguments of plgpu.kernel that all kernels share."""
    return dict(
        grid=(schedule.blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def standard_places(axis_name: str, num_ranks: int, capacity: int):
    """A function (token, slot_ref [T, R]) -> [(peer, row of its result or -1)] that starts after the own rank."""

    def places(token, slot_ref):
        me = lax.axis_index(axis_name)
        found = []
        for step in range(num_ranks):
            peer = peer_of(me, step + 1, num_ranks)
            place = slot_ref[token, peer]
            found.append((peer, jnp.where(place >= 0, me * int32(capacity) + place, int32(-1))))
        return found

    return places


def batched_places(axis_name: str, num_ranks: int, num_local: int, capacity: int):
    """A function (token, target_ref [T, K], slot_ref [T, K]) -> [(peer, row of its result or -1)]."""

    def places(token, target_ref, slot_ref):
        me = lax.axis_index(axis_name)
        found = []
        for k in range(target_ref.shape[1]):
            expert, place = jnp.maximum(target_ref[token, k], int32(0)), slot_ref[token, k]
            peer = lax.div(expert, int32(num_local))
            row = ((expert - peer * int32(num_local)) * int32(num_ranks) + me) * int32(capacity) + place
            found.append((peer, jnp.where(place >= 0, row, int32(-1))))
        return found

    return places


@dataclasses.dataclass(frozen=True)
class Form:
    """How a push lays out what arrives: R * C rows by source rank; or batched, E_loc * R * C rows by expert.

    num_local: E_loc of the batched form, None otherwise.
    """

    axis_name: str
    num_ranks: int
    capacity: int
    num_local: int | None = None

    @property
    def places(self):
        if self.num_local is None:
            return standard_places(self.axis_name, self.num_ranks, self.capacity)
        return batched_places(self.axis_name, self.num_ranks, self.num_local, self.capacity)

    @property
    def num_counts(self) -> int:
        return self.num_ranks * (self.num_local or 1)

    def turns(self, tokens: int, *tables):
        """How many rows are looked at, by all blocks together."""
        del tables
        return int32(tokens)

    def row(self, turn):
        """The row of a turn."""
        return turn

    def shaped(self, out: jax.Array) -> jax.Array:
        """Rows [R * C, W] as [R, C, W], or batched as [E_loc, R * C, W]."""
        if self.num_local is None:
            return out.reshape(self.num_ranks, self.capacity, out.shape[1])
        return out.reshape(self.num_local, self.num_ranks * self.capacity, out.shape[1])

    def shaped_counts(self, counts: jax.Array) -> jax.Array:
        """Received counts as int32 [R], or batched as [E_loc, R]."""
        return counts if self.num_local is None else counts.reshape(self.num_ranks, self.num_local).T


@dataclasses.dataclass(frozen=True)
class WayBack(Form):
    """Rows as `Form` delivered them, [R * C, ...] by source, go back to the slots of their sources.

    The table says how many came from each rank, int32 [R]. Turns visit the ranks after the own one in turn, so that
    the link always has something to do.
    """

    def turns(self, tokens: int, *tables):
        (received_ref,) = tables
        longest = received_ref[0]
        for rank in range(1, self.num_ranks):
            longest = jnp.maximum(longest, received_ref[rank])
        return longest * int32(self.num_ranks)

    def _place(self, turn):
        slot = lax.div(turn, int32(self.num_ranks))
        step = turn - slot * int32(self.num_ranks) + int32(1)
        return peer_of(lax.axis_index(self.axis_name), step, self.num_ranks), slot

    def row(self, turn):
        peer, slot = self._place(turn)
        return peer * int32(self.capacity) + slot

    @property
    def places(self):
        def places(turn, received_ref):
            peer, slot = self._place(turn)
            here = lax.axis_index(self.axis_name) * int32(self.capacity) + slot
            return [(peer, jnp.where(slot < received_ref[peer], here, int32(-1)))]

        return places


def send_counts(counts_ref, out_counts_ref, axis_name: str, num_ranks: int, num_local: int, blocks: int) -> None:
    """Stores counts [R * E_loc] of this rank at its place in every rank's result; each block sends a few of them."""
    me = lax.axis_index(axis_name)
    block = lax.axis_index("block")

    def one(i, _):
        index = block + i * int32(blocks)
        peer = lax.div(index, int32(num_local))
        place = me * int32(num_local) + index - peer * int32(num_local)
        plgpu.remote_ref(out_counts_ref, {axis_name: peer})[place] = counts_ref[index]  # pyright: ignore[reportArgumentType]
        return ()

    total = int32(num_ranks * num_local)
    lax.fori_loop(int32(0), lax.div(total - block + int32(blocks - 1), int32(blocks)), one, ())


def completion(
    axis_name: str,
    num_ranks: int,
    schedule: Schedule,
    *,
    signallers: int = 1,
    waiter=True,
    every_block: bool = False,
) -> None:
    """Tells the other ranks that this warpgroup's writes have completed; block 0 waits until all blocks of those have.

    signallers, waiter, every_block: as for `wait_for_all`.
    """
    arrived = done_semaphores(num_ranks)
    announce_done(arrived, axis_name, num_ranks)
    wait_for_all(arrived, axis_name, num_ranks, schedule, signallers=signallers, waiter=waiter, every_block=every_block)


def done_semaphores(num_ranks: int, unused: int = 0):
    """A semaphore for each rank. unused: more of them, for a number that no other kernel of a layer has.

    XLA makes zeros of one shape once and copies them for the next kernel, which takes 1.0 us, and zeros of its own 0.4.
    """
    return pl.get_global(plgpu.SemaphoreType.REGULAR((num_ranks + unused,)))


def announce_done(arrived, axis_name: str, num_ranks: int) -> None:
    """Signals every other rank that what this warpgroup did has completed."""
    me = lax.axis_index(axis_name)
    for step in range(1, num_ranks):
        pl.semaphore_signal(arrived.at[me], device_id={axis_name: peer_of(me, step, num_ranks)})


def wait_for_all(
    arrived,
    axis_name: str,
    num_ranks: int,
    schedule: Schedule,
    *,
    signallers: int = 1,
    waiter=True,
    every_block: bool = False,
) -> None:
    """Block 0 waits until `signallers` warpgroups of all blocks of all other ranks have announced.

    waiter: true in the one warpgroup that waits. every_block: all blocks wait, in order to read what has arrived. With
    a `schedule.wait_limit` the wait gives up after that many looks and prints which rank is missing.
    """
    me = lax.axis_index(axis_name)

    @pl.when((every_block | (lax.axis_index("block") == 0)) & waiter)
    def _():
        for step in range(1, num_ranks):
            source = peer_of(me, step, num_ranks)
            wait_for(arrived.at[source], schedule.blocks * signallers, schedule.wait_limit, me, source)


def wait_for(semaphore, count: int, limit: int | None, me, source) -> None:
    """Waits until `semaphore` reads `count`; at most `limit` looks, then says who did not arrive and goes on."""
    if limit is None:
        pl.semaphore_wait(semaphore, count, decrement=False)
        return

    def look(i, seen):
        return lax.cond(seen < count, lambda: pl.semaphore_read(semaphore), lambda: seen)

    seen = lax.fori_loop(int32(0), int32(limit), look, int32(0))

    @pl.when(seen < count)
    def _():
        pl.debug_print("exchange: rank {} has {} signals of rank {}", me, seen, source)

    @pl.when(seen >= count)
    def _():
        pl.semaphore_wait(semaphore, count, decrement=False)  # returns at once; acquires what was written
