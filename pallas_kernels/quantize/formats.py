"""The number formats of block quantisation, as data.

A value x is stored as x ~ q * s * g: q an E4M3 or E2M1 element, s the decode scale of its block, g an optional float32
decode scale of its row or tensor. Sources: OCP MX 1.0 (MXFP8, MXFP4), NVIDIA's NVFP4, DeepSeek-V3 (FP8 128).
"""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class FourOverSix:
    """Choose for each NVFP4 block whether its maximum maps to 6 or to 4 (arXiv 2512.02010), by the smaller error.

    e4m3_max: 448 or 256, the largest block scale that the global scale aims at (256 leaves 1.5x headroom for map-to-4).
    error: "mae" or "mse", accumulated in float32 in element order; ties go to 6.
    """

    e4m3_max: int = 256
    error: Literal["mae", "mse"] = "mse"

    def __post_init__(self):
        if self.e4m3_max not in (256, 448):
            raise ValueError(f"e4m3_max={self.e4m3_max}: 4-over-6 is defined for 256 and 448.")
        if self.error not in ("mae", "mse"):
            raise ValueError(f"error={self.error!r}: choose 'mae' or 'mse'.")


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """One block format.

    element: "e4m3" (data is float8_e4m3fn [..., K]) or "e2m1" (data is uint8 [..., K/2], even element in the low
    nibble). block: elements along the last axis that share a scale. block_rows: rows that share it (128 for weights,
    else 1). scale: "e8m0" (uint8 bytes), "e4m3" (float8_e4m3fn) or "f32". rule: rounding of a power-of-two scale:
    "ceil" (smallest power of two that does not clip; NVIDIA), "floor" (OCP). A scale of "f32" with pow2 is rounded up
    to a power of two before quantising (DeepSeek's ue8m0 scale_fmt) and kept as float32.
    global_scale: None, "tensor" (one float32 for the array) or "token" (one float32 for each row).
    """

    name: str
    element: Literal["e4m3", "e2m1"]
    block: int
    scale: Literal["e8m0", "e4m3", "f32"]
    block_rows: int = 1
    rule: Literal["ceil", "floor"] = "ceil"
    pow2: bool = False
    global_scale: Literal["tensor", "token"] | None = None
    four_over_six: FourOverSix | None = None

    @property
    def row_local(self) -> bool:
        """Whether each row's bytes depend on that row alone, so that quantising commutes with moving rows."""
        return self.block_rows == 1 and self.global_scale != "tensor"

    @property
    def bits(self) -> int:
        """Bits of one element, without its share of the scales."""
        return 8 if self.element == "e4m3" else 4

    @property
    def scale_bytes(self) -> int:
        """Bytes of one block scale."""
        return 4 if self.scale == "f32" else 1

    @property
    def e4m3_max(self) -> int:
        """Largest NVFP4 block scale that the global scale aims at."""
        return self.four_over_six.e4m3_max if self.four_over_six else 448

    def data_bytes(self, k: int) -> int:
        """Bytes of the elements of one row of k values."""
        return k * self.bits // 8

    def num_scales(self, k: int) -> int:
        """Block scales of one row of k values."""
        return -(-k // self.block)


def _table(*formats: BlockFormat) -> dict[str, BlockFormat]:
    return {f.name: f for f in formats}


FORMATS: dict[str, BlockFormat] = _table(
    BlockFormat("mxfp8", "e4m3", 32, "e8m0"),
    BlockFormat("mxfp8_floor", "e4m3", 32, "e8m0", rule="floor"),
    BlockFormat("mxfp4", "e2m1", 32, "e8m0"),
    BlockFormat("mxfp4_floor", "e2m1", 32, "e8m0", rule="floor"),
    BlockFormat("nvfp4", "e2m1", 16, "e4m3", global_scale="tensor"),
    BlockFormat("nvfp4_token", "e2m1", 16, "e4m3", global_scale="token"),
    BlockFormat("nvfp4_4o6", "e2m1", 16, "e4m3", global_scale="tensor", four_over_six=FourOverSix()),
    BlockFormat("nvfp4_token_4o6", "e2m1", 16, "e4m3", global_scale="token", four_over_six=FourOverSix()),
    BlockFormat("fp8_128", "e4m3", 128, "f32"),
    BlockFormat("fp8_128_ue8m0", "e4m3", 128, "f32", pow2=True),
    BlockFormat("fp8_128x128", "e4m3", 128, "f32", block_rows=128),
    BlockFormat("fp8_128x128_ue8m0", "e4m3", 128, "f32", block_rows=128, pow2=True),
)


def get_format(name: str | BlockFormat) -> BlockFormat:
    """The format called `name`; a BlockFormat is returned as it is. ValueError lists the names that exist."""
    if isinstance(name, BlockFormat):
        return name
    if name not in FORMATS:
        raise ValueError(f"Format {name!r} is not known; choose one of {', '.join(FORMATS)}.")
    return FORMATS[name]
