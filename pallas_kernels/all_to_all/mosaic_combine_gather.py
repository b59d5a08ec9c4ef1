"""One-sided combine that also sums a row's experts: their outputs are gathered where they lie (Mosaic GPU).

Letters: T tokens on this rank, D hidden size, R ranks, C rows reserved for each source rank, N = R * C received rows, K
experts of a row, M places in expert order.

In place of `permute.combine_rows` followed by `mosaic_combine_push.combine_rows_pushed`: of 8192 tokens of 2048 at two
ranks the sums are 64 MiB that need not be written and read again, and they are formed while the link is busy.

Warpgroups that send take chunks of a few rows in slot order, each chunk for one rank, ranks in rotated order and the
own one last: they add up the rows in registers, and a bulk copy stores the chunk at its owner. Each chunk has a
semaphore. Warpgroups that add take a few tokens each, wait for their chunks, and add up what the ranks sent.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.permute.mosaic_rows import KINDS, MAX_K
from pallas_kernels.permute.thread import Thread
from pallas_kernels.quantize.emit import Pointer, U

from .mosaic_common import SHARED_MEMORY, Schedule, int32, kernel_params, peer_of, share
from .mosaic_sum import Group, add_group, fetch, keep

CHUNK_BYTES = 28 * 1024  # of the rows that share a semaphore, where there are enough of them
# Warpgroups of a block, at 80 registers a thread. Two H200s, 8192 tokens of 2048, K = 8: 172 us, two and two 204, four
# and two 171; the two kernels that it replaces 228.
SENDERS, ADDERS = 3, 3
MAX_ROWS = 4  # of a chunk, and tokens of an adder: one for each warp
BUFFERS = 2  # of a sender: one is filled while the other is on its way


@dataclasses.dataclass(frozen=True)
class Division:
    """Who does what. Chunk c has rows c * `rows` .. of those that go to a rank; a unit is a chunk for one rank.

    tokens T, capacity C, num_ranks R. rows of a chunk and `group`, tokens of an adder's turn: powers of two. blocks;
    senders, adders: warpgroups of each block. takers: how many senders of all blocks take turns.
    """

    tokens: int
    capacity: int
    num_ranks: int
    rows: int
    group: int
    blocks: int
    senders: int
    adders: int
    takers: int

    @classmethod
    def of(
        cls, *, tokens: int, capacity: int, num_ranks: int, row_bytes: int, blocks: int, senders: int, adders: int
    ) -> Division:
        every = blocks * senders
        fitting = min(CHUNK_BYTES, SHARED_MEMORY // (senders * BUFFERS)) // row_bytes
        rows = _power_of_two(min(MAX_ROWS, fitting, capacity * num_ranks // every))
        takers = every
        if -(-capacity // rows) * num_ranks > every:  # each serves the ranks in turn: takers = 1 modulo R
            takers -= (every - 1) % num_ranks
        group = _power_of_two(min(MAX_ROWS, tokens // (blocks * adders)))
        return cls(tokens, capacity, num_ranks, rows, group, blocks, senders, adders, takers)

    @property
    def num_chunks(self) -> int:
        return -(-self.capacity // self.rows)

    def sender_trips(self, sender, going):
        """Units of a sender. going: rows for the ranks after this one, in the order of the ring, the own one last."""
        longest = going[0]
        for size in going[1:]:
            longest = jnp.maximum(longest, size)
        units = lax.div(longest + int32(self.rows - 1), int32(self.rows)) * int32(self.num_ranks)
        return jnp.where(sender < self.takers, share(units, sender, int32(self.takers)), int32(0))

    def unit(self, i, sender, going, trips, me):
        """A sender's i-th: rank, chunk, rows (none before the first and past the last), and the first of them."""
        index = sender + i * int32(self.takers)
        chunk = lax.div(index, int32(self.num_ranks))
        step = index - chunk * int32(self.num_ranks)
        peer = peer_of(me, step + int32(1), self.num_ranks)
        size = going[0]
        for s in range(1, self.num_ranks):
            size = jnp.where(step == s, going[s], size)
        start = chunk * int32(self.rows)
        rows = jnp.where((i >= 0) & (i < trips), jnp.clip(size - start, int32(0), int32(self.rows)), int32(0))
        return peer, chunk, rows, peer * int32(self.capacity) + start

    def adder_trips(self, adder):
        groups = -(-self.tokens // self.group)
        return share(int32(groups), adder, int32(self.adders * self.blocks))

    def tokens_of(self, i, adder, trips):
        """The first token of an adder's i-th turn, and how many (none before the first and past the last)."""
        token = (adder + i * int32(self.adders * self.blocks)) * int32(self.group)
        rows = jnp.clip(int32(self.tokens) - token, int32(0), int32(self.group))
        return jnp.maximum(token, int32(0)), jnp.where((i >= 0) & (i < trips), rows, int32(0))

    def chunk_of(self, place, rank):
        """The chunk of row `place` = rank * C + slot of what arrived."""
        return lax.div(place - rank * int32(self.capacity), int32(self.rows))


def _power_of_two(n: int) -> int:
    """The largest one up to n; 1 for less."""
    return 1 << max(1, n).bit_length() - 1


def reason_not(y: jax.Array, position: jax.Array, wire_dtype, out_dtype, *, senders: int = SENDERS) -> str | None:
    """Why the kernel cannot sum rows y [M, D] by position [N, K] and send them; None where it can."""
    width, top_k = y.shape[1], position.shape[1]
    names = [jnp.dtype(d).name for d in (y.dtype, wire_dtype, out_dtype)]
    if not all(name in KINDS for name in names):
        return f"it takes, sends and returns {', '.join(KINDS)}, not {', '.join(names)}"
    if width % 8 or width == 0:
        return f"it takes rows in multiples of 8 values, not {width}"
    if not 0 < top_k <= MAX_K:
        return f"it takes 1 to {MAX_K} experts of a row, not {top_k}"
    row_bytes = width * jnp.dtype(wire_dtype).itemsize
    if senders * BUFFERS * row_bytes > SHARED_MEMORY:
        return f"{senders * BUFFERS} rows of {row_bytes} bytes do not fit in {SHARED_MEMORY} bytes of shared memory"
    return None


def combine_gathered(
    y: jax.Array,
    position: jax.Array,
    weights: jax.Array,
    slot: jax.Array,
    received: jax.Array,
    *,
    axis_name: str,
    capacity: int,
    wire_dtype=None,
    out_dtype=None,
    senders: int = SENDERS,
    adders: int = ADDERS,
    schedule: Schedule | None = None,
) -> jax.Array:
    """out[t] = sum over r of rank r's s[own rank * C + slot[t, r]], in float32, r ascending, where slot[t, r] >= 0,

    with s[n] = sum over k of weights[n, k] * y[position[n, k]], in float32, k ascending, where position[n, k] >= 0,
    rounded to `wire_dtype` (y's). Bit for bit what `permute.combine_rows` and `combine_rows_pushed` give.

    y: [M, D]. position: int32 [R * C, K], -1 for none. weights: float32 like it. slot: int32 [T, R]. received: int32
    [R], rows that came from each rank. Returns [T, D] of `out_dtype` (y's). Inside shard_map over `axis_name`. All
    blocks must be resident at once: no more of them than multiprocessors.
    Raises ValueError for what `reason_not` names.
    """
    wire_dtype, out_dtype = jnp.dtype(wire_dtype or y.dtype), jnp.dtype(out_dtype or y.dtype)
    reason = reason_not(y, position, wire_dtype, out_dtype, senders=senders)
    if reason:
        raise ValueError(f"combine_gathered: {reason}. Sum the rows first and use combine_rows.")
    (tokens, num_ranks), width, top_k = slot.shape, y.shape[1], position.shape[1]
    row_bytes = width * wire_dtype.itemsize
    blocks = (schedule or Schedule.for_tokens(tokens)).blocks
    schedule = dataclasses.replace(schedule or Schedule(), blocks=blocks)
    sizes = dict(tokens=tokens, capacity=capacity, num_ranks=num_ranks, row_bytes=row_bytes, blocks=blocks)
    d = Division.of(**sizes, senders=senders, adders=adders)
    sent = Group(d.rows, top_k, width, y.dtype.name, wire_dtype.name)
    added = Group(d.group, num_ranks, width, wire_dtype.name, out_dtype.name, weighted=False, fresh=True)
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 6 + (scalar,) * 3)
    def gather(_, y, position, weights, now, following, out, rows, first, count):
        """Adds up a chunk of `rows` rows, and fetches the places of the next one: `count` rows from `first` on."""
        o, rows, first, count = Thread(), _word(rows), _word(first), _word(count)
        found = fetch(o, sent, first, count, _pointer(position), _pointer(weights))
        add_group(o, sent, _pointer(now), _pointer(y), _pointer(out), rows)
        keep(o, sent, _pointer(following), found)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 5 + (scalar,) * 3)
    def add(_, arrivals, slot, now, following, out, rows, first, count):
        o, rows, first, count = Thread(), _word(rows), _word(first), _word(count)
        found = fetch(o, added, first, count, _pointer(slot), region=capacity)
        add_group(o, added, _pointer(now), _pointer(arrivals), _pointer(out), rows)
        keep(o, added, _pointer(following), found)
        mgpu_utils.warpgroup_barrier()

    def body(y_ref, position_ref, weights_ref, slot_ref, received_ref, out_ref, arrivals_ref, chunks, tables, slots):
        me = lax.axis_index(axis_name)
        block = lax.axis_index("block")
        role = lax.axis_index("warpgroup")
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((num_ranks, d.num_chunks)))

        @pl.when(role < senders)
        def _send():
            others = [peer_of(me, s, num_ranks) for s in range(1, num_ranks)]
            going = [received_ref[peer] for peer in [*others, me]]
            sender = role * int32(blocks) + block
            trips = d.sender_trips(sender, going)

            def announce(peer, chunk):
                pl.semaphore_signal(arrived.at[me, chunk], device_id={axis_name: peer})

            def step(i, carry):
                count, last_peer, last_chunk = carry
                peer, chunk, rows = d.unit(i, sender, going, trips, me)[:3]
                more, first = d.unit(i + int32(1), sender, going, trips, me)[2:]
                now, following = (tables.at[role, lax.rem(i + int32(s), int32(2))] for s in (2, 3))
                buffer = chunks.at[role, lax.rem(count, int32(BUFFERS))]
                gather(y_ref, position_ref, weights_ref, now, following, buffer, rows, first, more)  # pyright: ignore[reportCallIssue]
                plgpu.commit_smem()

                @pl.when(rows > 0)
                def _():
                    target = plgpu.remote_ref(arrivals_ref, {axis_name: peer})  # pyright: ignore[reportArgumentType]
                    there = me * int32(capacity) + chunk * int32(d.rows)

                    def copy(start, size):
                        source = buffer.at[pl.ds(start, size)]
                        plgpu.copy_smem_to_gmem(source, target.at[pl.ds(there + start, size)], commit_group=False)

                    @pl.when(rows == d.rows)
                    def _():
                        copy(0, d.rows)

                    @pl.when(rows < d.rows)
                    def _():
                        lax.fori_loop(int32(0), rows, lambda k, _: copy(k, 1) or (), ())

                    plgpu.commit_smem_to_gmem_group()

                    @pl.when(count > 0)
                    def _():
                        plgpu.wait_smem_to_gmem(BUFFERS - 1)  # the chunk before is complete at its owner
                        announce(last_peer, last_chunk)

                some = rows > 0
                return (
                    count + some.astype(jnp.int32),
                    jnp.where(some, peer, last_peer),
                    jnp.where(some, chunk, last_chunk),
                )

            # The turn before the first fetches the places of that.
            count, last_peer, last_chunk = lax.fori_loop(int32(-1), trips, step, (int32(0), int32(0), int32(0)))

            @pl.when(count > 0)
            def _():
                plgpu.wait_smem_to_gmem(0)
                announce(last_peer, last_chunk)

        @pl.when(role >= senders)
        def _add():
            adder = (role - int32(senders)) * int32(blocks) + block
            trips = d.adder_trips(adder)

            def step(i, _):
                token, rows = d.tokens_of(i, adder, trips)
                following, more = d.tokens_of(i + int32(1), adder, trips)
                now, then = (slots.at[role - int32(senders), lax.rem(i + int32(s), int32(2))] for s in (2, 3))

                def wait_for_rank(rank, _):
                    last = int32(-1)
                    for t in range(d.group):
                        place = now[int32(t * added.warps * added.stride) + rank]
                        chunk = d.chunk_of(place, rank)
                        here = (rows > t) & (place >= 0)

                        @pl.when(here & (chunk != last))
                        def _(rank=rank, chunk=chunk):
                            pl.semaphore_wait(arrived.at[rank, chunk], 1, decrement=False)

                        last = jnp.where(here, chunk, last)
                    return ()

                lax.fori_loop(int32(0), int32(num_ranks), wait_for_rank, ())
                out = out_ref.at[pl.ds(token, 1)]
                add(arrivals_ref, slot_ref, now, then, out, rows, following, more)  # pyright: ignore[reportCallIssue]
                return ()

            lax.fori_loop(int32(-1), trips, step, ())

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((tokens, width), out_dtype),
            jax.ShapeDtypeStruct((num_ranks * capacity, width), wire_dtype),
        ),
        scratch_types=[
            plgpu.SMEM((senders, BUFFERS, d.rows, width), wire_dtype),
            plgpu.SMEM((senders, 2, sent.table_words), jnp.int32),
            plgpu.SMEM((adders, 2, added.table_words), jnp.int32),
        ],
        **kernel_params(schedule, "combine_gathered", warpgroups=senders + adders),
    )(y, position, weights.astype(jnp.float32), slot, received)[0]


def _word(value) -> U:
    return U(value.registers.item())


def _pointer(ref) -> Pointer:
    """To the start of a reference, its offset included."""
    address = llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu_utils.memref_ptr(ref))
    return Pointer(address, shared=mgpu_utils.is_smem_ref(ref))
