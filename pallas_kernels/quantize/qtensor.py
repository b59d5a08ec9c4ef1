"""QTensor: a block-quantised array that says what it is."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from .formats import BlockFormat


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A block-quantised array, x ~ data * block_scale * global_scale. A pytree: arrays are leaves, the rest is static.

    data: float8_e4m3fn [..., Kp] or packed uint8 [..., Kp/2] (E2M1, even element in the low nibble), Kp = k rounded up
        to the alignment it was quantised with (columns from k on are zero).
    block_scale: decode scales, [..., ceil(N/block_rows), ceil(Kp/block)] where data is [..., N, Kp] (block_rows 1: one
        row of scales for each row of data); uint8 E8M0 bytes, float8_e4m3fn or float32 as `format.scale` says. With
        layout="swizzled": flat uint8 bytes in the 128x4 order that block-scaled matrix units read.
    global_scale: None; float32 decode scale of each row [..., N] ("token"); or one float32 for each matrix of a stack,
        whose shape is a prefix of data's, () for a single one ("tensor").
    """

    data: jax.Array
    block_scale: jax.Array
    global_scale: jax.Array | None
    format: BlockFormat = dataclasses.field(metadata={"static": True})
    k: int = dataclasses.field(metadata={"static": True})
    layout: Literal["row_major", "swizzled"] = dataclasses.field(default="row_major", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that this stands for."""
        return (*self.data.shape[:-1], self.k)

    @property
    def ndim(self) -> int:
        """Dimensions of the array that this stands for."""
        return self.data.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves as they are kept in memory."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))
