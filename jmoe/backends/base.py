"""The interface that all ways of moving tokens share.

T tokens on one rank, W row width, D hidden size, K experts per token, R ranks, E_loc physical experts on one rank, C
slots reserved for each pair of source and target, N received rows: R * C (standard), E_loc * R * C (batched).

Received row n = source * C + slot (standard) or (local expert * R + source) * C + slot (batched).
Everything here runs inside shard_map over one named axis; other axes of the mesh are untouched.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jmoe import payload
from jmoe.plan import Form, Plan, host_capacity, make_plan
from pallas_kernels.permute import Unsummed

Axis = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Engine:
    """A kernel that moves rows in a backend's layout in place of the portable collectives.

    push(rows [T, W], plan, exchange) -> (received [N, W] or [E_loc, R * C, W], counts): what `Backend.send` returns,
        but slots in which nothing arrived may hold garbage; counts int32 [R] or [E_loc, R] say how many rows are real.
    reduce(y, weights, plan, exchange, out_dtype) -> [T, D]: what `combine` returns for unquantised rows y [N, D]: the
        sum over ranks in rank order (weights None), or of weights [T, K] times rows in order of k (batched); f32
        inside.
    push_encoding(x [T, D], ids, weights, plan, exchange, layout) -> (rows uint8 [N, row_bytes], counts, None): `push`
        of the packed rows, quantised and packed on the way, with the same bytes; or (rows without their data, counts,
        data uint8 [N, data_bytes]). None where it cannot do that for these rows and this layout.
    push_apart(x [T, D], ids int32 [T, K], weights f32 [T, K], plan, exchange): float rows that need neither packing nor
        unpacking, ([N, D], what follows the data in a packed row as bytes or words [N, ...], counts); None where it
        cannot do that.
    give_back(rows [N, W], counts int32 [R] or [E_loc, R], plan, exchange) -> [S, C, W]: what `Backend.give_back`
        returns for the first `counts` rows of each source; slots that nobody filled may hold garbage.
    prepare(plan, exchange): the plan with what this engine needs besides, found once for all directions.
    reduce_as(y, weights, plan, exchange, out_dtype, wire, counts): `reduce` of float rows that travel quantised, counts
        int32 [R] or [E_loc, R] of them real; None where it cannot do that.
    reduce_unsummed(rows, plan, exchange, out_dtype, counts) -> [T, D]: `reduce` of `rows.summed(exchange.dtype)`, bit
        for bit, without making them first, counts int32 [R] of them real; None where it cannot do that for these rows.
        Not differentiated.
    words: how `Backend.transport` speaks of it. staged: whether it fills buffers as the portable collectives do.
    row_unit: bytes to a multiple of which received rows and their parts are rounded up.
    collects(exchange, form, row_bytes): whether `reduce` of such rows needs a buffer for what comes back.
    fans_out(exchange, form, tokens, top_k, data_bytes): whether a batched dispatch of rows with so many bytes of data
        sends them once to each rank, which copies them to the token's other experts.
    gathers(exchange, form): whether `reduce_unsummed` takes the sums, which then need no buffer of their own.
    """

    name: str
    push: Callable[[jax.Array, Plan, Exchange], tuple[jax.Array, jax.Array]]
    reduce: Callable[[jax.Array, jax.Array | None, Plan, Exchange, jnp.dtype], jax.Array]
    push_encoding: Callable[..., tuple[jax.Array, jax.Array, jax.Array | None] | None] | None = None
    push_apart: Callable[..., tuple[jax.Array, jax.Array, jax.Array] | None] | None = None
    give_back: Callable[[jax.Array, jax.Array, Plan, Exchange], jax.Array] | None = None
    prepare: Callable[[Plan, Exchange], Plan] | None = None
    reduce_as: Callable[..., jax.Array | None] | None = None
    reduce_unsummed: Callable[[Unsummed, Plan, Exchange, jnp.dtype, jax.Array], jax.Array | None] | None = None
    words: str = ""
    staged: bool = False
    row_unit: int = 1
    collects: Callable[[Exchange, str, int], bool] = lambda exchange, form, row_bytes: False
    gathers: Callable[[Exchange, str], bool] = lambda exchange, form: False
    fans_out: Callable[[Exchange, str, int, int, int], bool] = lambda *sizes: False


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The static facts of one layer's exchange.

    axis_name: the expert axis of the mesh, or several of them, the first slowest (None only for one rank outside
    shard_map). num_ranks R, num_local E_loc, capacity C. dtype: of unquantised rows on the wire, forward and backward.
    engine: what moves the rows in place of portable collectives, None for those. num_hosts: H, of an exchange that goes
    from host to host first; host_capacity: C_h, rows of each pair of source rank and host. groups: ranks that exchange
    among themselves, if not all do: num_ranks in each group, in rank order.
    """

    axis_name: Axis | None
    num_ranks: int
    num_local: int
    capacity: int
    dtype: str = "bfloat16"
    engine: Engine | None = None
    num_hosts: int = 1
    host_capacity: int = 0
    groups: tuple[tuple[int, ...], ...] | None = None

    @property
    def num_physical(self) -> int:
        """P = R * E_loc, physical expert slots of all ranks."""
        return self.num_ranks * self.num_local

    def rank(self) -> jax.Array:
        """This rank's index on the expert axis (or in its group), int32 []."""
        if self.axis_name is None:
            return jnp.zeros((), jnp.int32)
        index = lax.axis_index(self.axis_name).astype(jnp.int32)
        if self.groups is None:
            return index
        places = {rank: place for group in self.groups for place, rank in enumerate(group)}
        return jnp.asarray([places[rank] for rank in range(len(places))], jnp.int32)[index]


class Backend(abc.ABC):
    """One way of moving tokens. Stateless; obtained from `get_backend`."""

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    form: ClassVar[Literal["standard", "batched"]] = "standard"
    plan_form: ClassVar[Form] = "standard"
    portable: ClassVar[str]  # the collective that moves rows where no kernel does
    kernel_slot: ClassVar[bool] = False  # whether Exchange.engine is used
    output_is_reduced: ClassVar[bool] = True  # combine returns sums over all ranks: nothing may add them up again
    takes_rank_mask: ClassVar[bool] = False  # whether ranks may be absent
    max_ranks: ClassVar[int | None] = None

    def __repr__(self) -> str:
        return f"<backend {self.name}>"

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def capacity(self, tokens: int, *, num_ranks: int, num_local: int, top_k: int, factor: float | None) -> int:
        """C for `tokens` tokens on each rank; T where factor is None."""
        del num_local
        return payload.capacity(tokens, num_ranks, top_k, factor)

    def num_rows(self, ex: Exchange) -> int:
        """N, rows that a rank receives, padding included."""
        return ex.num_ranks * ex.capacity * (ex.num_local if self.form == "batched" else 1)

    def num_slots(self, plan: Plan) -> int:
        """Rows that can come back for one token: R (standard) or K (batched)."""
        return plan.slot.shape[1]

    def memory(
        self, layout: payload.RowLayout, ex: Exchange, *, combine_row_bytes: int | None = None
    ) -> dict[str, int]:
        """Bytes of the buffers of one exchange on one rank: what arrives, and what the portable collectives stage."""
        back = jnp.dtype(ex.dtype).itemsize * layout.hidden if combine_row_bytes is None else combine_row_bytes
        rows = self.num_rows(ex)
        engine = ex.engine if self.kernel_slot and ex.engine is not None and not ex.engine.staged else None
        unit = 1 if engine is None else engine.row_unit
        parts = (layout.data_bytes, layout.row_bytes - layout.data_bytes)  # a kernel may deliver them apart
        row = sum(-(-part // unit) * unit for part in parts)
        kernel = engine if combine_row_bytes is None else None  # of the combine
        sizes = {
            "dispatch_send": rows * layout.row_bytes if engine is None else 0,
            "dispatch_receive": rows * row,
            "combine_send": 0 if kernel and kernel.gathers(ex, self.form) else rows * back,
            "combine_receive": 0 if kernel and not kernel.collects(ex, self.form, back) else rows * back,
        }
        if engine is not None and combine_row_bytes is not None and engine.reduce_as is not None and ex.num_hosts == 1:
            if self.form == "standard":  # the kernel that sends quantises the experts' float32 sums where they lie
                sizes["combine_send"] = rows * 4 * layout.hidden
                sizes["combine_receive"] = rows * -(-back // unit) * unit
        if ex.num_hosts > 1:  # what goes to the hosts and what comes from them
            sizes["between_hosts"] = 2 * ex.num_hosts * ex.host_capacity * (layout.row_bytes + back)
        return sizes

    def round_hidden(self, hidden: int, wire: str) -> int:
        """The hidden size that the library which this backend is named after would use for `hidden`.

        jmoe's own transport moves any size; this is for layers that must match buffers or checkpoints made for it.
        """
        payload.row_layout(hidden, wire, 0)  # refuses what cannot travel
        return hidden

    def transport(self, ex: Exchange) -> str:
        """What moves the rows, in words."""
        if ex.engine is not None and self.kernel_slot:
            return ex.engine.words or f"the {ex.engine.name} kernel"
        note = ", the same layout and results as its kernel" if self.kernel_slot else ""
        return f"{self.portable}{note}"

    # -- plan ----------------------------------------------------------------------------------------------------------

    def plan(self, ids: jax.Array, ex: Exchange, *, rank_mask: jax.Array | None = None) -> Plan:
        """The plan of this rank's physical ids [T, K]."""
        if rank_mask is not None and not self.takes_rank_mask:
            raise ValueError(
                f"backend {self.name!r} has no rank mask; ranks may come and go with 'nixl_ep' only. Use that backend, "
                "or leave rank_mask out."
            )
        plan = make_plan(
            ids,
            num_ranks=ex.num_ranks,
            num_local=ex.num_local,
            capacity=ex.capacity,
            form=self.plan_form,
            rank_mask=rank_mask,
        )
        if self.kernel_slot and ex.engine is not None and ex.engine.prepare is not None:
            return ex.engine.prepare(plan, ex)
        return plan

    # -- buffers: what the portable collectives exchange ---------------------------------------------------------------

    @abc.abstractmethod
    def forward(self, buffer: jax.Array, plan: Plan, ex: Exchange) -> jax.Array:
        """Owner's slots [S, C, W] -> received rows."""

    @abc.abstractmethod
    def give_back(self, y: jax.Array, plan: Plan, ex: Exchange) -> jax.Array:
        """Received rows -> owner's slots [S, C, W]; the inverse of `forward` on the slots that are in use."""

    def return_rows(self, y: jax.Array, recv_ids: jax.Array, plan: Plan, ex: Exchange) -> jax.Array:
        """`give_back` of the rows that have an id, by the exchange's kernel if it has one; other slots hold garbage."""
        if ex.engine is None or ex.engine.give_back is None or not self.kernel_slot:
            return self.give_back(y, plan, ex)
        return ex.engine.give_back(y, self.received_counts(recv_ids, ex), plan, ex)

    def received_counts(self, recv_ids: jax.Array, ex: Exchange) -> jax.Array:
        """Rows that have an id, of each source: int32 [R], or (batched) [E_loc, R] for each local expert."""
        shape = (ex.num_ranks, ex.capacity)
        shape = (ex.num_local, *shape) if self.form == "batched" else shape
        return jnp.sum(jnp.any(recv_ids >= 0, axis=1).reshape(shape), axis=-1, dtype=jnp.int32)

    def fill_slots(self, x: jax.Array, plan: Plan, *, fill: jax.Array | None = None) -> jax.Array:
        """Rows [T, W] in the slots of the plan, [S, C, W]; empty slots hold `fill` [W] or zeros."""
        empty = jnp.zeros((x.shape[-1],), x.dtype) if fill is None else jnp.asarray(fill, x.dtype)
        if x.shape[0] == 0:
            return jnp.broadcast_to(empty, (*plan.src_token.shape, x.shape[-1]))
        rows = jnp.take(x, jnp.maximum(plan.src_token, 0), axis=0, mode="clip")
        return jnp.where((plan.src_token >= 0)[..., None], rows, empty[None, None, :])

    def pick(self, buffer: jax.Array, plan: Plan, s: int) -> tuple[jax.Array, jax.Array]:
        """From the owner's slots: each token's s-th row [T, W] (garbage where none) and whether there is one [T]."""
        slot = plan.slot[:, s]
        sent = slot >= 0
        if buffer.shape[1] == 0 or plan.num_tokens == 0:
            return jnp.zeros((plan.num_tokens, buffer.shape[-1]), buffer.dtype), sent
        region = jnp.maximum(plan.target[:, s], 0) if plan.target is not None else jnp.int32(s)
        flat = buffer.reshape(-1, buffer.shape[-1])
        return jnp.take(flat, region * plan.capacity + jnp.maximum(slot, 0), axis=0, mode="clip"), sent

    def sum_back(self, buffer: jax.Array, plan: Plan, *, weights: jax.Array | None = None, decode=None) -> Any:
        """What came back to the owner, [S, C, W], added up for each token in order of rank or of k: float32 [T, W].

        weights: float32 [T, R or K], factors of the rows. decode: rows [T, W] to a pytree of float32 arrays.
        """
        decode = decode or (lambda rows: rows.astype(jnp.float32))
        total = None
        for s in range(self.num_slots(plan)):
            rows, sent = self.pick(buffer, plan, s)
            factor = None if weights is None else weights[:, s : s + 1]

            def part(value, sent=sent, factor=factor):
                value = value if factor is None else value * factor
                return jnp.where(sent[:, None], value, 0)

            parts = jax.tree.map(part, decode(rows))
            total = parts if total is None else jax.tree.map(jnp.add, total, parts)
        return total

    # -- the linear pair -----------------------------------------------------------------------------------------------

    def send(self, x: jax.Array, plan: Plan, ex: Exchange, *, fill: jax.Array | None = None) -> jax.Array:
        """Rows of any dtype to where the plan says: [T, W] -> [N, W] (standard) or [E_loc, R * C, W] (batched).

        Slots in which nothing was sent arrive as `fill` [W] (zeros if None). The transpose (and VJP) is the sum of
        `send_back` over its second axis.
        """
        if fill is not None:
            return self.forward(self.fill_slots(x, plan, fill=fill), plan, ex)
        return _send(self, ex, x, plan)

    def send_back(self, y: jax.Array, plan: Plan, ex: Exchange) -> jax.Array:
        """Rows as `send` returned them back to their owners: [T, R, W] (standard) or [T, K, W] (batched).

        Zero where nothing was sent. Rows of slots in which nothing was sent are not read.
        """
        return _send_back(self, ex, y, plan)

    def exchange_counts(self, plan: Plan, ex: Exchange) -> jax.Array:
        """Rows received: int32 [R] from each source, or (batched) [E_loc, R] for each local expert from each source."""
        received = self._all_to_all(plan.counts.reshape(ex.num_ranks, -1, 1), ex)  # [R, E_loc or 1, 1]
        alive = plan.alive.reshape(-1, 1)
        counts = jnp.where(alive, received[..., 0], 0)
        return counts.T if self.form == "batched" else counts[:, 0]

    def _all_to_all(self, buffer: jax.Array, ex: Exchange) -> jax.Array:
        """Block r of the leading axis to rank r; block r of the result came from rank r."""
        if ex.axis_name is None or ex.num_ranks == 1 or buffer.size == 0:
            return buffer
        return lax.all_to_all(
            buffer, ex.axis_name, split_axis=0, concat_axis=0, tiled=True, axis_index_groups=ex.groups
        )

    # -- what differs in how sums are formed ---------------------------------------------------------------------------

    def collective_sum(self, y: jax.Array, ex: Exchange) -> jax.Array | None:
        """Sum of float32 rows [N, D] over ranks by one collective, [T, D]; None where the owner adds up single rows."""
        del y, ex
        return None


def exchange_for(
    backend: Backend,
    *,
    tokens: int,
    num_ranks: int,
    num_local: int,
    top_k: int,
    axis_name: Axis | None,
    capacity_factor: float | None = None,
    dtype: str = "bfloat16",
    engine: Engine | None = None,
    num_hosts: int = 1,
) -> Exchange:
    """The static facts of an exchange of `tokens` tokens on each rank. ValueError where the backend cannot serve it.

    num_hosts: over how many hosts the ranks are spread, in equal blocks, for an engine that takes two steps.
    """
    if backend.max_ranks is not None and num_ranks > backend.max_ranks:
        raise ValueError(
            f"backend {backend.name!r} serves {backend.max_ranks} rank, the mesh has {num_ranks} on the expert axis; "
            "use 'allgather_reducescatter', 'nvlink_two_sided' or another that moves tokens."
        )
    if num_ranks > 1 and axis_name is None:
        raise ValueError(
            f"axis_name=None with {num_ranks} ranks: an exchange needs the name of the mesh's expert axis. Pass it."
        )
    size = backend.capacity(tokens, num_ranks=num_ranks, num_local=num_local, top_k=top_k, factor=capacity_factor)
    across = 0
    if num_hosts > 1:
        if num_ranks % num_hosts or not backend.kernel_slot or backend.takes_rank_mask:
            raise ValueError(
                f"backend {backend.name!r} cannot exchange over {num_hosts} hosts in two steps with {num_ranks} ranks: "
                "the hosts must hold equally many, and the backends that do it are 'nvlink_one_sided' and "
                "'low_latency' (with a rank mask, a masked rank could not pass on rows of others). Use num_hosts=1."
            )
        targets = num_ranks // num_hosts * (num_local if backend.form == "batched" else 1)
        across = host_capacity(tokens, targets=targets, capacity=size)
    return Exchange(axis_name, num_ranks, num_local, size, jnp.dtype(dtype).name, engine, num_hosts, across)


def received_valid(backend: Backend, counts: jax.Array, plan: Plan, ex: Exchange) -> jax.Array:
    """bool [N]: slots of the received rows in which something arrived from a live rank, by counts of each source."""
    place = jnp.arange(ex.capacity, dtype=jnp.int32)
    counts = jnp.where(plan.alive if backend.form == "standard" else plan.alive[None, :], counts, 0)
    return (place.reshape((1,) * counts.ndim + (-1,)) < counts[..., None]).reshape(-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _send(backend: Backend, ex: Exchange, x: jax.Array, plan: Plan) -> jax.Array:
    return backend.forward(backend.fill_slots(x, plan), plan, ex)


def _send_fwd(backend, ex, x, plan):
    return _send(backend, ex, x, plan), plan


def _send_bwd(backend, ex, plan, dy):
    return jnp.sum(backend.send_back(dy, plan, ex), axis=1), None


_send.defvjp(_send_fwd, _send_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _send_back(backend: Backend, ex: Exchange, y: jax.Array, plan: Plan) -> jax.Array:
    buffer = backend.give_back(y, plan, ex)
    picked = [backend.pick(buffer, plan, s) for s in range(backend.num_slots(plan))]
    rows = [jnp.where(sent[:, None], row, jnp.zeros((), row.dtype)) for row, sent in picked]
    return jnp.stack(rows, axis=1)


def _send_back_fwd(backend, ex, y, plan):
    return _send_back(backend, ex, y, plan), plan


def _send_back_bwd(backend, ex, plan, g):
    num_tokens, num_slots, width = g.shape  # [T, R or K, W]
    if num_tokens == 0:
        buffer = jnp.zeros((*plan.src_token.shape, width), g.dtype)
    else:
        if plan.src_choice is None:
            which = jnp.arange(num_slots, dtype=jnp.int32)[:, None]  # slot (r, c) takes g[token, r]
        else:
            which = jnp.maximum(plan.src_choice, 0)
        row = jnp.maximum(plan.src_token, 0) * num_slots + which
        taken = jnp.take(g.reshape(-1, width), row, axis=0, mode="clip")
        buffer = jnp.where((plan.src_token >= 0)[..., None], taken, jnp.zeros((), g.dtype))
    return backend.forward(buffer, plan, ex), None


_send_back.defvjp(_send_back_fwd, _send_back_bwd)
