"""The remote-write kernels as an engine of the one-sided and batched backends.

T tokens on one rank, W row width, D hidden size, R ranks, E_loc experts on one rank, C slots of a source rank.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.caps import DeviceCaps
from jmoe.payload import RowLayout, from_bytes, return_layout, to_bytes
from jmoe.plan import Plan
from pallas_kernels.permute import Unsummed
from pallas_kernels.quantize import QTensor

from .base import Engine, Exchange

ROW_UNIT = 128  # bytes of a line: received rows start on whole ones
MAX_RANKS = 8  # devices of one process whose memory XLA maps for a kernel
_UNIT = 16  # bytes; bulk copies move multiples of this
# Bytes of a source rank's slots, and of one row, from which the combine that writes is ahead of the one that reads:
# two H200s, 8192 rows of 14 KiB 366 against 383 us, of 8 KiB 236 against 231, of 4 KiB 157 against 130; 1024 rows of
# 14 KiB 73 against 69.
WRITING_BYTES, WRITING_ROW = 58e6, 12 * 1024
# Slots of a source rank (its tokens, where none is dropped) from which the combine takes the experts' sums itself,
# instead of a kernel before it: two H200s, K = 8, see `measured.GATHERING`; even at 1024 rows and 128, and behind at 1.
GATHERING_CAPACITY = 2048


# Bytes that a batched dispatch saves the link, at least, from which a token's data crosses it once for each rank and is
# copied there to the token's other experts: two H200s, K = 8, BF16 rows of 14 KiB, 128 of them 23.6 against 35.2 us, 32
# (1.4 MB) 19.0 against 21.3, 8 (0.3 MB) 22.0 against 19.6; MXFP8, 128 (2.8 MB) 32.1 against 37.8, 32 (0.7 MB) 21.9
# against 20.4.
FAN_OUT_BYTES = 1.2e6


def engine_reason(caps: DeviceCaps) -> str | None:
    """Why the kernels cannot serve these devices; None where they can."""
    if not caps.kernels:
        return caps.kernels_reason
    if caps.platform != "gpu" or caps.compute_capability is None or caps.compute_capability < (9, 0):
        return (
            f"the remote-write kernels need NVIDIA GPUs of compute capability 9.0 or newer, these are {caps.describe()}"
        )
    if caps.link not in ("nvlink", "pcie"):
        return f"the remote-write kernels need peer access within one process, these devices are {caps.describe()}"
    if caps.num_devices > MAX_RANKS:
        return (
            f"the remote-write kernels serve at most {MAX_RANKS} GPUs of one process, the mesh has {caps.num_devices}"
        )
    return None


def remote_write_engine(caps: DeviceCaps | None = None) -> Engine | None:
    """The engine for these devices (None: all that JAX sees), or None where `engine_reason` names an obstacle."""
    return None if engine_reason(DeviceCaps.detect() if caps is None else caps) else ENGINE


def _padded(rows: jax.Array, width: int) -> jax.Array:
    return rows if rows.shape[1] == width else jnp.pad(rows, ((0, 0), (0, width - rows.shape[1])))


def push(rows: jax.Array, plan: Plan, exchange: Exchange) -> tuple[jax.Array, jax.Array]:
    """Rows [T, W] to where the plan says; see `Engine.push`. Slots beyond the counts are not written."""
    from pallas_kernels.all_to_all import mosaic_push

    num_ranks, num_local, capacity = exchange.num_ranks, exchange.num_local, exchange.capacity
    batched = plan.form == "batched"
    width = rows.shape[1]
    if rows.size == 0 or capacity == 0:
        shape = (num_local, num_ranks * capacity, width) if batched else (num_ranks * capacity, width)
        return jnp.zeros(shape, rows.dtype), jnp.zeros((num_local, num_ranks) if batched else (num_ranks,), jnp.int32)
    unit = max(1, _UNIT // rows.dtype.itemsize)
    wide = _padded(rows, -(-width // unit) * unit)
    axis = exchange.axis_name
    assert isinstance(axis, str)  # `exchange_for` refuses several ranks without an axis
    if batched:
        assert plan.target is not None
        out, counts = mosaic_push.push_batched(
            wide,
            plan.target,
            plan.slot,
            plan.counts,
            axis_name=axis,
            num_ranks=num_ranks,
            num_local=num_local,
            capacity=capacity,
        )
    else:
        out, counts = mosaic_push.push_rows(wide, plan.slot, plan.counts, axis_name=axis, capacity=capacity)
        out = out.reshape(-1, out.shape[-1])
    return out[..., :width], counts


def fans_out(exchange: Exchange, form: str, tokens: int, top_k: int, data_bytes: int) -> bool:
    """Whether a batched dispatch of rows with so many bytes of data copies them at the receiver."""
    num_ranks = exchange.num_ranks
    saved = tokens * data_bytes * max(0, top_k - num_ranks) * (num_ranks - 1) / num_ranks
    if form != "batched" or saved < FAN_OUT_BYTES:
        return False
    from pallas_kernels.all_to_all.mosaic_common import Form, Schedule
    from pallas_kernels.all_to_all.mosaic_fan_out import FanOut

    sizes = Form(str(exchange.axis_name), num_ranks, exchange.capacity, exchange.num_local)
    return FanOut(sizes, tokens, top_k, Schedule.for_tokens(tokens, counts=sizes.num_counts).blocks).obstacle is None


def packed_row(layout: RowLayout):
    from pallas_kernels.all_to_all.mosaic_encode import PackedRow

    return PackedRow(layout.scale_offset, layout.row_scale_offset, layout.ids_offset, layout.row_bytes)


def push_encoding(
    x: jax.Array | QTensor,
    ids: jax.Array,
    weights: jax.Array,
    plan: Plan,
    exchange: Exchange,
    layout: RowLayout,
) -> tuple[jax.Array, jax.Array, jax.Array | None] | None:
    """Quantises rows [T, D] in the kernel that sends them; see `Engine.push_encoding`."""
    from pallas_kernels.all_to_all import mosaic_push_quantized

    fmt = layout.format
    if isinstance(x, QTensor) or fmt is None or layout.columns != layout.hidden or x.size == 0:
        return None
    if mosaic_push_quantized.reason_not(x.shape, x.dtype, fmt):
        return None
    row = packed_row(layout)
    tail = to_bytes(ids.astype(jnp.int32)), to_bytes(weights.astype(jnp.float32))
    before = layout.ids_offset - row.tail_start
    if before or tail[0].shape[1] % _UNIT:  # what bulk copies cannot move side by side is joined before
        joined = jnp.concatenate(tail, axis=1)
        after = layout.row_bytes - layout.ids_offset - joined.shape[1]
        tail = (jnp.pad(joined, ((0, 0), (before, after))),)
    assert isinstance(exchange.axis_name, str)
    batched = plan.form == "batched"
    (data, rest), counts = mosaic_push_quantized.push_quantized(
        x,
        tail,
        plan.slot,
        plan.counts,
        fmt=fmt,
        layout=row,
        axis_name=exchange.axis_name,
        capacity=exchange.capacity,
        target=plan.target if batched else None,
        num_ranks=exchange.num_ranks,
        num_local=exchange.num_local if batched else 1,
        apart=True,
        fan_out=fans_out(exchange, plan.form, ids.shape[0], ids.shape[1], layout.data_bytes),
    )
    return from_bytes(rest.reshape(-1, rest.shape[-1]), jnp.int32), counts, data.reshape(-1, layout.data_bytes)


def push_apart(
    x: jax.Array, ids: jax.Array, weights: jax.Array, plan: Plan, exchange: Exchange
) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    """Rows [T, D], and ids and weights [T, K] side by side in words; see `Engine.push_apart`."""
    from pallas_kernels.all_to_all import mosaic_push

    if x.size == 0 or ids.size == 0 or x.shape[1] * x.dtype.itemsize % _UNIT:
        return None
    words = ids.astype(jnp.int32), lax.bitcast_convert_type(weights.astype(jnp.float32), jnp.int32)
    unit = _UNIT // 4
    if ids.shape[1] % unit:  # what bulk copies cannot move side by side is joined before
        words = (_padded(jnp.concatenate(words, axis=1), -(-2 * ids.shape[1] // unit) * unit),)
    assert isinstance(exchange.axis_name, str)
    batched = plan.form == "batched"
    (data, rest), counts = mosaic_push.push_apart(
        (x, words),
        plan.slot,
        plan.counts,
        axis_name=exchange.axis_name,
        capacity=exchange.capacity,
        target=plan.target if batched else None,
        num_ranks=exchange.num_ranks,
        num_local=exchange.num_local if batched else 1,
        fan_out=fans_out(exchange, plan.form, ids.shape[0], ids.shape[1], x.shape[1] * x.dtype.itemsize),
    )
    return data.reshape(-1, x.shape[1]), rest.reshape(-1, rest.shape[-1]), counts


def give_back(rows: jax.Array, counts: jax.Array, plan: Plan, exchange: Exchange) -> jax.Array:
    """Received rows [N, W] to the slots of their owners, [S, C, W]; see `Engine.give_back`."""
    from pallas_kernels.all_to_all import mosaic_ragged

    num_ranks, num_local, capacity = exchange.num_ranks, exchange.num_local, exchange.capacity
    batched = plan.form == "batched"
    width = rows.shape[-1]
    rows = rows.reshape(-1, width)
    shape = (num_ranks * num_local if batched else num_ranks, capacity, width)
    if rows.size == 0:
        return jnp.zeros(shape, rows.dtype)
    unit = max(1, _UNIT // rows.dtype.itemsize)
    wide = _padded(rows, -(-width // unit) * unit)
    slices = num_local if batched else 1  # of each peer; entry (peer, expert)
    peer = jnp.arange(num_ranks, dtype=jnp.int32)[:, None]
    expert = jnp.arange(slices, dtype=jnp.int32)[None, :]
    here = (expert * num_ranks + peer) * capacity
    there = jnp.broadcast_to((exchange.rank() * slices + expert) * capacity, here.shape)
    sizes = counts.reshape(slices, num_ranks).T
    axis = exchange.axis_name
    assert isinstance(axis, str)
    out = mosaic_ragged.ragged_push(
        wide,
        lax.empty((shape[0] * capacity, wide.shape[1]), wide.dtype),
        here.reshape(-1),
        sizes.reshape(-1).astype(jnp.int32),
        there.reshape(-1),
        axis_name=axis,
        num_ranks=num_ranks,
    )
    return out[:, :width].reshape(shape)


def reduce(y: jax.Array, weights: jax.Array | None, plan: Plan, exchange: Exchange, out_dtype: jnp.dtype) -> jax.Array:
    """Experts' rows y [N, D] added up at their owners, [T, D]; see `Engine.reduce`."""
    from pallas_kernels.all_to_all import mosaic_combine, mosaic_combine_push

    tokens, width = plan.num_tokens, y.shape[-1]
    if tokens == 0 or y.size == 0:
        return jnp.zeros((tokens, width), out_dtype)
    y = y.reshape(-1, width)
    wide = _padded(y, max(mosaic_combine.MIN_HIDDEN, -(-width // 8) * 8))
    axis = exchange.axis_name
    assert isinstance(axis, str)
    if plan.form == "batched":
        assert plan.target is not None and weights is not None
        out = mosaic_combine.combine_batched(
            wide.reshape(exchange.num_local, -1, wide.shape[1]),
            plan.target,
            plan.slot,
            weights,
            axis_name=axis,
            num_ranks=exchange.num_ranks,
            num_local=exchange.num_local,
            capacity=exchange.capacity,
            out_dtype=out_dtype,
        )
    elif _writes(exchange, plan.form, width * y.dtype.itemsize):
        out = mosaic_combine_push.combine_rows_pushed(
            wide, plan.slot, plan.counts, axis_name=axis, capacity=exchange.capacity, out_dtype=out_dtype
        )
    else:
        out = mosaic_combine.combine_rows(
            wide, plan.slot, axis_name=axis, capacity=exchange.capacity, out_dtype=out_dtype
        )
    return out[:, :width]


def reduce_as(
    y: jax.Array,
    weights: jax.Array | None,
    plan: Plan,
    exchange: Exchange,
    out_dtype: jnp.dtype,
    *,
    wire: str,
    counts: jax.Array,
) -> jax.Array | None:
    """Experts' rows y [N, D] quantised on their way to the owners and added up there; see `Engine.reduce_as`."""
    from pallas_kernels.all_to_all import mosaic_push_quantized, mosaic_sum_packed

    if exchange.num_ranks == 1 or plan.form != "standard" or plan.num_tokens == 0 or y.size == 0:
        return None
    layout = return_layout(y.shape[1], wire)
    fmt = layout.format
    if fmt is None or layout.columns != layout.hidden:
        return None
    if mosaic_push_quantized.reason_not(y.shape, y.dtype, fmt):
        return None
    if mosaic_sum_packed.reason_not(fmt, layout.hidden, out_dtype):
        return None
    assert isinstance(exchange.axis_name, str)
    row = packed_row(layout)
    rows = mosaic_push_quantized.push_back_quantized(y, counts, fmt=fmt, layout=row, axis_name=exchange.axis_name)
    return mosaic_sum_packed.sum_rows_packed(
        rows, plan.slot, columns=layout.hidden, fmt=fmt, layout=row, out_dtype=out_dtype
    )


def gathers(exchange: Exchange, form: str) -> bool:
    """Whether combine takes the experts' sums itself, where the kernel can."""
    return form == "standard" and exchange.capacity >= GATHERING_CAPACITY


def reduce_unsummed(
    rows: Unsummed, plan: Plan, exchange: Exchange, out_dtype: jnp.dtype, counts: jax.Array
) -> jax.Array | None:
    """Experts' outputs added up on their way where that is faster; see `Engine.reduce_unsummed`."""
    return reduce_gathering(rows, plan, exchange, out_dtype, counts) if gathers(exchange, plan.form) else None


def reduce_gathering(
    rows: Unsummed, plan: Plan, exchange: Exchange, out_dtype: jnp.dtype, counts: jax.Array
) -> jax.Array | None:
    """Experts' outputs added up on their way to the owners, and there, [T, D]; None where the kernel cannot do it."""
    from pallas_kernels.all_to_all import mosaic_combine_gather

    y, position, weights, width = rows
    if plan.num_tokens == 0 or y.size == 0 or position.size == 0:
        return jnp.zeros((plan.num_tokens, width), out_dtype)
    if plan.form != "standard" or mosaic_combine_gather.reason_not(y, position, exchange.dtype, out_dtype):
        return None
    assert isinstance(exchange.axis_name, str)
    return mosaic_combine_gather.combine_gathered(
        y,
        position,
        weights,
        plan.slot,
        counts,
        axis_name=exchange.axis_name,
        capacity=exchange.capacity,
        wire_dtype=exchange.dtype,
        out_dtype=out_dtype,
    )


def _writes(exchange: Exchange, form: str, row_bytes: int) -> bool:
    return form == "standard" and row_bytes >= WRITING_ROW and exchange.capacity * row_bytes >= WRITING_BYTES


ENGINE = Engine(
    "remote-write",
    push,
    reduce,
    push_encoding,
    push_apart,
    give_back=give_back,
    reduce_as=reduce_as,
    reduce_unsummed=reduce_unsummed,
    row_unit=ROW_UNIT,
    collects=lambda exchange, form, row_bytes: gathers(exchange, form) or _writes(exchange, form, row_bytes),
    gathers=gathers,
    fans_out=fans_out,
)
