"""The batched dispatch's way for tokens with several experts on one rank: across the link once, then copied there.

Letters: T tokens on one rank, K experts per token, R ranks, E_loc experts on one rank, C rows reserved for each source.

In the batched form a token's row goes to each of its experts. Of 256 experts on two ranks a token has four of K = 8 on
the other one, and four times the bytes cross the link. Here the data goes to the first of a rank's experts only (what
follows the data goes to all of them). Once everything has arrived, blocks copy data from there to the other places: the
sources' plans, from which those follow, are fetched while the first rows travel.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mosaic_common import Form, Schedule, int32, peer_of

TABLE_BYTES = 24 * 1024  # of shared memory for the plans' parts that a block needs


@dataclasses.dataclass(frozen=True)
class FanOut:
    """Of `tokens` T with `top_k` K experts each: of `blocks`, block b copies n = `of_block` tokens of each other rank,

    from b * n on.
    """

    form: Form
    tokens: int
    top_k: int
    blocks: int

    @property
    def of_block(self) -> int:
        return -(-self.tokens // self.blocks)

    @property
    def obstacle(self) -> str | None:
        """Why the plans cannot be fetched; None where they can."""
        if self.form.num_local is None:
            return "only the batched form sends a token to one rank more than once"
        if self.top_k % 4:
            return f"rows of {self.top_k} words: bulk copies move multiples of 4"
        if 8 * (self.form.num_ranks - 1) * self.of_block * self.top_k > TABLE_BYTES:
            return (
                f"the plans of {self.of_block} tokens of each rank do not fit in {TABLE_BYTES} bytes of shared memory"
            )
        return None

    @property
    def scratch(self) -> list:
        """Shared memory: the plans' parts [R - 1, 2, n, K], a barrier for them, and one for a row."""
        shape = (self.form.num_ranks - 1, 2, self.of_block, self.top_k)
        return [
            plgpu.SMEM(shape, jnp.int32),
            plgpu.Barrier(num_arrivals=2 * (self.form.num_ranks - 1)),
            plgpu.Barrier(),
        ]

    def by_link(self, found):
        """A token's [(peer, place)] as [(peer, place, place that the data is stored at or -1)]."""
        me = lax.axis_index(self.form.axis_name)
        out = []
        for k, (peer, place) in enumerate(found):
            again = jnp.bool_(False)
            for other, there in found[:k]:
                again = again | ((other == peer) & (there >= 0))
            out.append((peer, place, jnp.where(again & (peer != me), int32(-1), place)))
        return out

    def first_token(self, block):
        """The first token of a block, and of the part of the plans that it fetches."""
        first = block * int32(self.of_block)
        return first, jnp.minimum(first, int32(self.tokens - self.of_block))

    def places(self, source, words):
        """Rows of this rank's result for a token of `source`: the one that came over the link, and the others.

        words: its K pairs (target, slot). All -1 where there is nothing to copy, single ones where there is no other.
        """
        form = self.form
        assert form.num_local is not None
        me = lax.axis_index(form.axis_name)
        first, others = int32(-1), []
        for target, slot in words:
            expert = jnp.maximum(target, int32(0))
            here = (lax.div(expert, int32(form.num_local)) == me) & (slot >= 0)
            row = (expert - me * int32(form.num_local)) * int32(form.num_ranks) + source
            row = jnp.where(here, row * int32(form.capacity) + slot, int32(-1))
            others.append(jnp.where(first >= 0, row, int32(-1)))
            first = jnp.where(first >= 0, first, row)
        return first, others

    def fetch(self, target_ref, slot_ref, tables, ready) -> None:
        """Starts to fetch this block's part of the other ranks' plans."""
        me = lax.axis_index(self.form.axis_name)
        start = self.first_token(lax.axis_index("block"))[1]
        for step in range(1, self.form.num_ranks):
            peer = {self.form.axis_name: peer_of(me, step, self.form.num_ranks)}
            for which, ref in enumerate((target_ref, slot_ref)):
                rows = plgpu.remote_ref(ref, peer).at[pl.ds(start, self.of_block)]  # pyright: ignore[reportArgumentType]
                into = tables.at[step - 1, which]
                plgpu.copy_gmem_to_smem(rows, into, ready, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    def copy(self, tables, out_ref, buffer, arrived) -> None:
        """Copies data [.., W] of this block's tokens to all their places, a row at a time through `buffer` [1, W]."""
        me = lax.axis_index(self.form.axis_name)
        first_token, start = self.first_token(lax.axis_index("block"))
        columns = pl.ds(0, buffer.shape[1])
        for step in range(1, self.form.num_ranks):
            source = peer_of(me, step, self.form.num_ranks)

            def one(i, _, step=step, source=source):
                token = first_token + i
                at = jnp.minimum(token - start, int32(self.of_block - 1))
                words = [(tables[step - 1, 0, at, k], tables[step - 1, 1, at, k]) for k in range(self.top_k)]
                first, others = self.places(source, words)
                several = others[0] >= 0
                for row in others[1:]:
                    several = several | (row >= 0)

                @pl.when(several & (token < self.tokens))
                def _():
                    from_row = out_ref.at[pl.ds(first, 1), columns]  # pyright: ignore[reportArgumentType]
                    plgpu.copy_gmem_to_smem(from_row, buffer, arrived, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
                    plgpu.barrier_wait(arrived)
                    for row in others:

                        @pl.when(row >= 0)
                        def _(row=row):
                            into = out_ref.at[pl.ds(row, 1), columns]
                            plgpu.copy_smem_to_gmem(buffer, into, commit_group=False)

                    plgpu.commit_smem_to_gmem_group()
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                return ()

            lax.fori_loop(int32(0), int32(self.of_block), one, ())
        plgpu.wait_smem_to_gmem(0)


def fan_out_of(form: Form, tokens: int, tables, schedule: Schedule) -> FanOut:
    """Of a batched push with tables (target, slot) [T, K]. ValueError where it cannot be."""
    fan = FanOut(form, tokens, tables[0].shape[1], schedule.blocks)
    if fan.obstacle:
        raise ValueError(f"fan_out: {fan.obstacle}. Push without it.")
    return fan
