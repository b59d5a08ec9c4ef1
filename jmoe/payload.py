"""What one token's row is on the wire, and how many bytes a layer needs for moving tokens.

T tokens on one rank, D hidden size, K experts per token, R ranks, C rows reserved per source rank, N received rows.

A row is uint8: data | block scales | row scale | K int32 physical expert ids | K float32 routing weights. Each part
starts at a multiple of its element size and the row ends at a multiple of 16 bytes, so that one aligned copy moves all
of it. The ids are global, so one row serves every rank it goes to; a receiver keeps the ids it owns. The layout follows
from what is sent, never from what the layer would like to compute in.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantize.formats import FORMATS, BlockFormat
from pallas_kernels.quantize.qtensor import QTensor

FLOAT_WIRES = ("bfloat16", "float16", "float32")
ROW_ALIGNMENT = 16
_SCALE_DTYPES = {"e8m0": jnp.uint8, "e4m3": jnp.float8_e4m3fn, "f32": jnp.float32}


def _align(offset: int, size: int) -> int:
    return -(-offset // size) * size


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Where each part of a row lies, in bytes. Made by `row_layout`.

    hidden: D. wire: "bfloat16", "float16", "float32" or a format's name. top_k: K ids and K weights (0: none travel).
    columns: elements of data in a row, D padded to the alignment of MX consumers.
    """

    hidden: int
    wire: str
    top_k: int
    columns: int

    @property
    def format(self) -> BlockFormat | None:
        """The block format that travels, None for a float wire."""
        return FORMATS.get(self.wire)

    @property
    def dtype(self):
        """Dtype of the data as the receiver sees it: the float wire's, float8_e4m3fn, or uint8 (two E2M1)."""
        fmt = self.format
        if fmt is None:
            return jnp.dtype(self.wire)
        return jnp.dtype(jnp.float8_e4m3fn if fmt.element == "e4m3" else jnp.uint8)

    @property
    def scale_dtype(self):
        """dtype of the block scales as they travel."""
        fmt = self.format
        return None if fmt is None else jnp.dtype(_SCALE_DTYPES[fmt.scale])

    @property
    def data_bytes(self) -> int:
        """Bytes of the row's elements."""
        fmt = self.format
        return fmt.data_bytes(self.columns) if fmt else self.columns * self.dtype.itemsize

    @property
    def num_scales(self) -> int:
        """Block scales of the row."""
        fmt = self.format
        return fmt.num_scales(self.columns) if fmt else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of the block scales of one row."""
        fmt = self.format
        return self.num_scales * fmt.scale_bytes if fmt else 0

    @property
    def row_scale_bytes(self) -> int:
        """4 where each token has its own float32 scale. A scale of the whole tensor does not travel."""
        fmt = self.format
        return 4 if fmt and fmt.global_scale == "token" else 0

    @property
    def payload_bytes(self) -> int:
        """Data and all scales of one token, without padding between them."""
        return self.data_bytes + self.scale_bytes + self.row_scale_bytes

    @property
    def scale_offset(self) -> int:
        """Byte at which the block scales begin."""
        fmt = self.format
        return _align(self.data_bytes, fmt.scale_bytes if fmt else 1)

    @property
    def row_scale_offset(self) -> int:
        """Byte at which the row's float32 scale begins."""
        end = self.scale_offset + self.scale_bytes
        return _align(end, 4) if self.row_scale_bytes else end

    @property
    def ids_offset(self) -> int:
        """Byte at which the expert ids (int32 [K]) begin."""
        return _align(self.row_scale_offset + self.row_scale_bytes, 4)

    @property
    def weights_offset(self) -> int:
        """Byte at which the routing weights (float32 [K]) begin."""
        return self.ids_offset + 4 * self.top_k

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, a multiple of 16."""
        return _align(self.weights_offset + 4 * self.top_k, ROW_ALIGNMENT)

    def empty_row(self) -> np.ndarray:
        """uint8 [row_bytes] of a slot in which nothing was sent: zeros, and -1 for each id."""
        row = np.zeros(self.row_bytes, np.uint8)
        row[self.ids_offset : self.weights_offset] = 0xFF
        return row


def row_layout(hidden: int, wire: str, top_k: int, *, mx_alignment: int = 0) -> RowLayout:
    """The row of a token of `hidden` elements that travels as `wire` with `top_k` ids and weights.

    mx_alignment pads the columns of MX formats (scale e8m0) to a multiple of itself, as TRT-LLM style consumers want
    (256); other formats and float wires ignore it. Raises ValueError for an unknown wire, for a format whose scales
    cannot travel with a row, and for a hidden size that its blocks do not divide.
    """
    if hidden <= 0 or top_k < 0:
        raise ValueError(f"hidden={hidden} must be positive and top_k={top_k} not negative.")
    if wire in FLOAT_WIRES:
        return RowLayout(hidden, wire, top_k, hidden)
    if wire not in FORMATS:
        raise ValueError(
            f"wire={wire!r} cannot travel; choose one of {', '.join(wire_names())}. Set QuantConfig.wire to one of "
            "them, or leave it 'auto'."
        )
    fmt = FORMATS[wire]
    if fmt.block_rows != 1:
        raise ValueError(
            f"wire={wire!r} shares each scale among {fmt.block_rows} rows, which part ways in the exchange; formats "
            f"with scales of their own in each row are {', '.join(wire_names())}. Use 'fp8_128' for activations."
        )
    columns = _align(hidden, mx_alignment) if fmt.scale == "e8m0" and mx_alignment else hidden
    if columns % fmt.block:
        advice = "set mx_alignment=32" if fmt.scale == "e8m0" else "use a bfloat16 wire"
        raise ValueError(
            f"wire={wire!r} quantises blocks of {fmt.block}, which do not divide hidden size {hidden}; the hidden size "
            f"must be a multiple of {fmt.block}. Pad the hidden size, or {advice}."
        )
    return RowLayout(hidden, wire, top_k, columns)


def return_layout(hidden: int, wire: str) -> RowLayout:
    """The row of an expert's output that travels back as `wire`: no ids, no weights."""
    return row_layout(hidden, wire, 0, mx_alignment=32)


def wire_names() -> tuple[str, ...]:
    """Everything that can travel: float dtypes and the formats whose scales belong to single rows."""
    return (*FLOAT_WIRES, *(f.name for f in FORMATS.values() if f.block_rows == 1))


def to_bytes(x: jax.Array) -> jax.Array:
    """The bytes of the last axis: [..., n] of any dtype -> uint8 [..., n * itemsize]."""
    raw = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return raw.reshape(*x.shape[:-1], x.shape[-1] * x.dtype.itemsize)


def from_bytes(raw: jax.Array, dtype) -> jax.Array:
    """The inverse of `to_bytes`."""
    size = jnp.dtype(dtype).itemsize
    if size > 1:
        raw = raw.reshape(*raw.shape[:-1], raw.shape[-1] // size, size)
    return jax.lax.bitcast_convert_type(raw, dtype)


def check_choices(ids: jax.Array, weights: jax.Array, layout: RowLayout) -> None:
    """Raises ValueError for ids and weights that are not what the layout says."""
    if ids.shape[-1] != layout.top_k or weights.shape != ids.shape:
        raise ValueError(
            f"ids {ids.shape} and weights {weights.shape} do not fit a row of top_k={layout.top_k}; give [T, K] of "
            "both, or make the layout for this K."
        )


def pack(x: jax.Array | QTensor, ids: jax.Array, weights: jax.Array, layout: RowLayout) -> jax.Array:
    """Rows of T tokens.

    Args:
      x: [T, D] in the wire's dtype, or a QTensor of the wire's format with row-major scales.
      ids: int32 [T, K] physical ids, -1 for none. weights: float32 [T, K].
    Returns:
      uint8 [T, row_bytes].
    Raises ValueError for rows that are not what the layout says.
    """
    check_choices(ids, weights, layout)
    parts: list[tuple[int, jax.Array]] = [(layout.ids_offset, ids.astype(jnp.int32))]
    parts.append((layout.weights_offset, weights.astype(jnp.float32)))
    if isinstance(x, QTensor):
        _check_qtensor(x, layout)
        parts += [(0, x.data), (layout.scale_offset, x.block_scale)]
        if layout.row_scale_bytes:
            assert x.global_scale is not None
            parts.append((layout.row_scale_offset, x.global_scale.reshape(-1, 1)))
    else:
        if layout.format is not None or x.dtype != layout.dtype or x.shape[-1] != layout.columns:
            raise ValueError(
                f"{x.dtype} array of shape {x.shape} for a row of {layout.columns} elements of {layout.wire}; rows "
                "carry what the layout says. Cast, or quantise first (`jmoe.formats.quantize`), or make the layout for "
                "it."
            )
        parts.append((0, x))
    return _join(sorted((p for p in parts if p[1].shape[-1]), key=lambda p: p[0]), layout.row_bytes)


def _join(parts: list[tuple[int, jax.Array]], row_bytes: int) -> jax.Array:
    """Concatenate the bytes of parts at their offsets, zeros between and after them."""
    pieces, end = [], 0
    rows = parts[0][1].shape[0] if parts else 0
    for offset, part in parts:
        if offset > end:
            pieces.append(jnp.zeros((rows, offset - end), jnp.uint8))
        raw = to_bytes(part)
        pieces.append(raw)
        end = offset + raw.shape[-1]
    if row_bytes > end:
        pieces.append(jnp.zeros((rows, row_bytes - end), jnp.uint8))
    return jnp.concatenate(pieces, axis=-1)


def _check_qtensor(q: QTensor, layout: RowLayout) -> None:
    if q.format.name != layout.wire or q.k != layout.hidden:
        raise ValueError(
            f"QTensor of format {q.format.name!r} with {q.k} columns for a row of {layout.wire!r} with "
            f"{layout.hidden}; a layout describes one format. Make the layout from what is sent."
        )
    if q.layout != "row_major":
        raise ValueError(
            f"QTensor with {q.layout} scales: a swizzle mixes 128 rows, which part ways in the exchange. Quantise with "
            'layout="row_major" and swizzle after the exchange.'
        )
    if q.data.ndim != 2 or q.data.shape[-1] * q.data.dtype.itemsize != layout.data_bytes:
        raise ValueError(
            f"QTensor data {q.data.shape} do not fill {layout.data_bytes} bytes of a row; quantise with the layout's "
            f"alignment, so that there are {layout.columns} columns."
        )


def unpack(
    rows: jax.Array,
    layout: RowLayout,
    *,
    rank: jax.Array | int,
    num_local: int,
    valid: jax.Array | None = None,
    global_scale: jax.Array | None = None,
    data: jax.Array | None = None,
) -> tuple[jax.Array | QTensor, jax.Array, jax.Array]:
    """What received rows hold.

    Args:
      rows: uint8 [N, row_bytes]; where `data` came apart from the rest, [N, row_bytes - data_bytes], or int32 words of
        it.
      rank, num_local: the receiver owns physical ids rank * num_local + (0..num_local-1).
      valid: bool [N], rows in which something arrived; what the others hold, ids included, is never looked at.
        None where padding rows carry id -1.
      global_scale: float32 decode scale that all ranks agreed on, for per-tensor formats.
      data: None, or the rows' data [N, ...], as uint8 or as the wire's dtype.
    Returns:
      x: array or QTensor [N, D], garbage where ids are all -1. ids: int32 [N, K], local, -1 for experts of other ranks
      and padding. weights: float32 [N, K], zero where the id is -1.
    """
    skip = 0 if data is None else layout.data_bytes
    physical = _part(rows, layout.ids_offset - skip, layout.weights_offset - skip, jnp.int32)
    local = physical - jnp.asarray(rank, jnp.int32) * num_local
    mine = (physical >= 0) & (local >= 0) & (local < num_local)
    if valid is not None:
        mine &= valid[:, None]
    x = unpack_data(rows, layout, global_scale=global_scale, data=data)
    return x, jnp.where(mine, local, -1), jnp.where(mine, unpack_weights(rows, layout, skip=skip), 0)


def unpack_weights(rows: jax.Array, layout: RowLayout, *, skip: int = 0) -> jax.Array:
    """The routing weights of rows (without their first `skip` bytes), float32 [N, K]."""
    start = layout.weights_offset - skip
    return _part(rows, start, start + 4 * layout.top_k, jnp.float32)


def _part(rows: jax.Array, start: int, stop: int, dtype) -> jax.Array:
    """Bytes start..stop of each row as `dtype`. rows: uint8, or int32 words, of which XLA makes no copy in between."""
    if rows.dtype == jnp.uint8:
        return from_bytes(rows[:, start:stop], dtype)
    words = rows[:, start // 4 : -(-stop // 4)]
    if jnp.dtype(dtype).itemsize == 4:
        return jax.lax.bitcast_convert_type(words, dtype)
    return from_bytes(to_bytes(words)[:, start % 4 : start % 4 + stop - start], dtype)


def unpack_data(
    rows: jax.Array, layout: RowLayout, *, global_scale: jax.Array | None = None, data: jax.Array | None = None
) -> jax.Array | QTensor:
    """The data of received rows, [N, D]: an array of the wire's dtype or a QTensor of its format. See `unpack`.

    Raises ValueError for a per-tensor format without its global_scale.
    """
    skip = 0 if data is None else layout.data_bytes
    data = rows[:, : layout.data_bytes] if data is None else data
    if data.dtype != layout.dtype:
        data = from_bytes(data, layout.dtype)
    fmt = layout.format
    if fmt is None:
        return data
    start = layout.scale_offset - skip
    scale = _part(rows, start, start + layout.scale_bytes, layout.scale_dtype)
    if fmt.global_scale == "token":
        start = layout.row_scale_offset - skip
        global_scale = _part(rows, start, start + 4, jnp.float32)[:, 0]
    elif fmt.global_scale == "tensor" and global_scale is None:
        raise ValueError(
            f"wire={layout.wire!r} has one scale for the whole tensor, which does not travel with the rows; every rank "
            "must know it. Pass global_scale (static, or `jmoe.backends.shared_global_scale`)."
        )
    elif fmt.global_scale is None:
        global_scale = None
    return QTensor(data, scale, global_scale, fmt, layout.hidden)


def capacity(tokens: int, num_targets: int, top_k: int, factor: float | None) -> int:
    """C, slots reserved for each pair of source and target.

    num_targets: R ranks (standard) or R * E_loc physical experts (batched). A token takes one slot at each of at most
    min(K, targets) targets. factor None is dropless, C = T; else ceil(factor * T * min(K, targets) / targets), at most
    T. It must come from values that are equal on all ranks.
    """
    if factor is None:
        return tokens
    return min(tokens, math.ceil(factor * tokens * min(top_k, num_targets) / num_targets))


def token_bucket(tokens: int, max_tokens: int) -> int:
    """The smallest power of two that holds `tokens`, at most max_tokens: few shapes, hence few compilations.

    ValueError beyond that.
    """
    if tokens > max_tokens:
        raise ValueError(
            f"{tokens} tokens exceed max_tokens={max_tokens}; buckets go up to that. Split the batch or raise "
            "max_tokens."
        )
    return min(max_tokens, 1 << (tokens - 1).bit_length()) if tokens > 0 else 0


def pad_tokens(tree, bucket: int):
    """Pad the leading axis of every leaf with zeros to `bucket` rows.

    Returns:
      (padded tree, valid bool [bucket]): true for the rows that were there. Invalid tokens must be routed to -1.
    Raises ValueError where leading axes differ or exceed the bucket.
    """
    leaves = jax.tree.leaves(tree)
    tokens = leaves[0].shape[0]
    if any(leaf.shape[0] != tokens for leaf in leaves) or tokens > bucket:
        raise ValueError(
            f"Leading axes {[leaf.shape[0] for leaf in leaves]} must be equal and at most bucket={bucket}; take the "
            "bucket from `token_bucket`."
        )
    pad = lambda leaf: jnp.pad(leaf, [(0, bucket - tokens)] + [(0, 0)] * (leaf.ndim - 1))  # noqa: E731
    return jax.tree.map(pad, tree), jnp.arange(bucket, dtype=jnp.int32) < tokens


def workspace_bytes(layout: RowLayout, *, num_ranks: int, capacity: int, combine_row_bytes: int | None = None) -> int:
    """Bytes of the received rows of dispatch and of combine: R * C * (row + combine row).

    combine_row_bytes: bytes of a row on the way back; None: D elements of bfloat16.
    """
    return Workspace.of(layout, num_ranks=num_ranks, capacity=capacity, combine_row_bytes=combine_row_bytes).total


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Sizes of the exchange buffers that several layers can share, in bytes."""

    dispatch_bytes: int
    combine_bytes: int
    top_k: int
    num_ranks: int

    @classmethod
    def of(cls, layout: RowLayout, *, num_ranks: int, capacity: int, combine_row_bytes: int | None = None) -> Workspace:
        """The buffers of one layer, for the rows that it really sends."""
        back = 2 * layout.hidden if combine_row_bytes is None else combine_row_bytes
        rows = num_ranks * capacity
        return cls(rows * layout.row_bytes, rows * back, layout.top_k, num_ranks)

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.dispatch_bytes + self.combine_bytes

    def union(self, other: Workspace) -> Workspace:
        """The buffers that serve both, whatever the order. ValueError where the layers route differently."""
        for field in ("top_k", "num_ranks"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                raise ValueError(
                    f"Layers with {field}={mine} and {field}={theirs} cannot share one workspace; all of its layers "
                    f"must agree on {field}. Give each its own workspace."
                )
        return Workspace(
            max(self.dispatch_bytes, other.dispatch_bytes),
            max(self.combine_bytes, other.combine_bytes),
            self.top_k,
            self.num_ranks,
        )
