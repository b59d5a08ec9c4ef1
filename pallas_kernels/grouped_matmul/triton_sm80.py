"""Grouped matmul in Triton, called through jax-triton: for Ampere and Ada, and wherever the Mosaic kernels refuse.

One program computes one tile of the output; the tiles come from schedule.py, so that empty groups cost nothing and rows
past the sum of the sizes are zeroed. Weights in block formats are turned into BF16 on the way to the matrix unit: E4M3
and E2M1 bits are moved to where BF16 has them, and one exact multiplication puts the exponent right. Products of
elements with E8M0 or E4M3 block scales are exact in BF16 too; scales in float32 multiply the sum over their block.

This module imports triton and jax_triton; `triton_entry` loads it where they are installed.

Letters: M rows, K contraction, N columns, G groups.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl
from jax import lax

from ..quantize import QTensor
from .schedule import held_bounds, tile_schedule
from .tuning import rows_per_group


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Tile of one program: block_m rows, block_out columns of the result, block_red values of the contracted axis.

    band: tiles along M that run side by side, so that the L2 cache serves the weights they share.
    """

    block_m: int
    block_out: int
    block_red: int
    num_warps: int
    num_stages: int
    band: int = 8


def choose_config(rows: int, bits: int, capability: int) -> TritonConfig:
    """rows: of an occupied group; bits: of an element of the weights; capability: 80, 89, 90, ...

    The stages fit the shared memory of a block: 163 KiB on sm_80, 227 KiB on sm_90 and sm_100, 99 KiB elsewhere.
    """
    large = capability in (80, 87) or 90 <= capability < 120
    if rows <= 64:
        block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        return TritonConfig(block_m, 64, 128, 4, 4 if bits < 16 or large else 3)
    if bits < 16:
        return TritonConfig(128, 128, 64, 8, 3)
    if not large:
        return TritonConfig(128, 128, 32, 4, 4)
    return TritonConfig(128, 256, 64, 8, 3 if capability < 90 else 4)


def choose_drhs_config(capability: int) -> TritonConfig:
    """Of the weights' gradient: block_m rows are contracted at a time, a tile is block_out of N by block_red of K."""
    large = capability in (80, 87) or 90 <= capability < 120
    return TritonConfig(64, 128, 256, 8, 3) if large else TritonConfig(32, 128, 128, 8, 3)


# Four E4M3 bytes to two pairs of BF16. Read as BF16 the bits are the value times 2^-120; NaN codes come out as 480.
_E4M3_TO_BF16: tl.constexpr = tl.constexpr("""{
.reg .b32 a, b, p, q, z, f;
mov.b32 z, 0;
mov.b32 f, 0x7B807B80;
prmt.b32 a, $2, z, 0x1404;
prmt.b32 b, $2, z, 0x3424;
shr.b32 p, a, 4;
shr.b32 q, b, 4;
and.b32 p, p, 0x07F007F0;
and.b32 q, q, 0x07F007F0;
lop3.b32 p, a, 0x80008000, p, 0xEA;
lop3.b32 q, b, 0x80008000, q, 0xEA;
mov.b32 z, 0x80008000;
fma.rn.bf16x2 $0, p, f, z;
fma.rn.bf16x2 $1, q, f, z;
}""")

# Four bytes of two E2M1 each to the pairs of BF16 of the low halves ($0, $1) and of the high halves ($2, $3).
_E2M1_TO_BF16: tl.constexpr = tl.constexpr("""{
.reg .b32 a, b, s, m, z, f;
mov.b32 z, 0;
mov.b32 f, 0x7E807E80;
prmt.b32 a, $4, z, 0x4140;
prmt.b32 b, $4, z, 0x4342;
mov.b32 z, 0x80008000;
shl.b32 m, a, 6;
shl.b32 s, a, 12;
and.b32 m, m, 0x01C001C0;
lop3.b32 m, s, z, m, 0xEA;
fma.rn.bf16x2 $0, m, f, z;
shl.b32 m, b, 6;
shl.b32 s, b, 12;
and.b32 m, m, 0x01C001C0;
lop3.b32 m, s, z, m, 0xEA;
fma.rn.bf16x2 $1, m, f, z;
shl.b32 m, a, 2;
shl.b32 s, a, 8;
and.b32 m, m, 0x01C001C0;
lop3.b32 m, s, z, m, 0xEA;
fma.rn.bf16x2 $2, m, f, z;
shl.b32 m, b, 2;
shl.b32 s, b, 8;
and.b32 m, m, 0x01C001C0;
lop3.b32 m, s, z, m, 0xEA;
fma.rn.bf16x2 $3, m, f, z;
}""")


@triton.jit
def _e4m3(data):
    """uint8 -> bfloat16."""
    return tl.inline_asm_elementwise(_E4M3_TO_BF16, "=&r,=&r,r", [data], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def _e2m1(data):
    """uint8 [R, C] -> bfloat16 [R, 2 C]."""
    low, high = tl.inline_asm_elementwise(
        _E2M1_TO_BF16,
        "=&r,=&r,=&r,=&r,r",
        [data],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
    return tl.interleave(low, high)


@triton.jit
def _scale(byte, SCALE: tl.constexpr):
    """uint8 E8M0 or E4M3 -> bfloat16, 2^-127 and NaN included."""
    byte = byte.to(tl.int16)
    if SCALE == "e8m0":
        bits = tl.where(byte == 255, 0x7FC0, tl.where(byte == 0, 0x0040, byte << 7)).to(tl.int16)
        return bits.to(tl.bfloat16, bitcast=True)
    bits = tl.where((byte & 0x7F) == 0x7F, 0x7FC0, (byte & 0x7F) << 4).to(tl.int16)
    return (bits.to(tl.bfloat16, bitcast=True).to(tl.float32) * 1.329227995784916e36).to(tl.bfloat16)  # 2^120


@triton.jit
def _weight_tile(
    w,
    scales,
    n,  # [ROWS]
    k0,
    in_rows,  # [ROWS], or None where all are inside
    K: tl.constexpr,
    ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_COLUMNS: tl.constexpr,
):
    """Rows n and columns k0 .. k0 + COLUMNS of one weight, block scales of one byte included; zero where masked."""
    PACK: tl.constexpr = 2 if ELEMENT == "e2m1" else 1
    c = k0 // PACK + tl.arange(0, COLUMNS // PACK)
    mask = None
    if MASK_ROWS:
        mask = in_rows[:, None]
    if MASK_COLUMNS:
        inside = (c < ROW)[None, :] if PACK == 2 else (c < K)[None, :]
        mask = inside if mask is None else mask & inside
    pointers = w + n[:, None] * ROW + c[None, :]
    data = tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)
    if ELEMENT == "e4m3":
        data = _e4m3(data)
    if ELEMENT == "e2m1":
        data = _e2m1(data)
    if SCALE == "e8m0" or SCALE == "e4m3":
        b = k0 // BLOCK + tl.arange(0, COLUMNS // BLOCK)
        pointers = scales + n[:, None] * SCALE_ROW + b[None, :]
        if MASK_ROWS or MASK_COLUMNS:
            mask = (b < SCALE_ROW)[None, :]
            if MASK_ROWS:
                mask = mask & in_rows[:, None]
            byte = tl.load(pointers, mask=mask, other=0)
        else:
            byte = tl.load(pointers)
        data = tl.reshape(data, (ROWS, COLUMNS // BLOCK, BLOCK)) * _scale(byte, SCALE)[:, :, None]
        data = tl.reshape(data, (ROWS, COLUMNS))
    return data


@triton.jit
def rows_kernel(
    x,  # [M, K], or [M, N] if TRANSPOSED
    w,  # [G, N, ROW]
    scales,  # [G, N, SCALE_ROW] bytes, or float32 [G, N / 128, SCALE_ROW]
    factors,  # float32 [G] or [G, N]
    weight,
    first,
    end,
    out,  # [M, N], or [M, K] if TRANSPOSED
    N: tl.constexpr,
    K: tl.constexpr,
    ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    SCALES: tl.constexpr,  # of one weight
    TRANSPOSED: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    FACTOR: tl.constexpr,
    TILES: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_RED: tl.constexpr,
):
    OUT: tl.constexpr = K if TRANSPOSED else N
    RED: tl.constexpr = N if TRANSPOSED else K
    UNEVEN: tl.constexpr = RED % BLOCK_RED != 0
    OUT_TILES: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    band = tl.program_id(0) // (BAND * OUT_TILES)
    within = tl.program_id(0) % (BAND * OUT_TILES)
    width = tl.minimum(TILES - band * BAND, BAND)
    tile = band * BAND + within % width
    out0 = (within // width) * BLOCK_OUT

    begin = tl.load(first + tile)
    stop = tl.minimum(tl.load(end + tile), begin + BLOCK_M)
    if begin >= stop:
        return
    g = tl.load(weight + tile)
    steps = tl.where(g >= 0, (RED + BLOCK_RED - 1) // BLOCK_RED, 0)
    g = tl.maximum(g, 0).to(tl.int64)
    w += g * N * ROW
    scales += g * SCALES
    rows = begin + tl.arange(0, BLOCK_M)
    x_rows = x + tl.minimum(rows, stop - 1).to(tl.int64)[:, None] * RED
    columns = out0 + tl.arange(0, BLOCK_OUT)
    acc = tl.zeros((BLOCK_M, BLOCK_OUT), tl.float32)
    for step in range(steps):
        red0 = step * BLOCK_RED
        red = red0 + tl.arange(0, BLOCK_RED)
        if UNEVEN:
            a = tl.load(x_rows + red[None, :], mask=(red < RED)[None, :], other=0)
        else:
            a = tl.load(x_rows + red[None, :])
        if TRANSPOSED:
            b = _weight_tile(
                w, scales, red, out0, red < N, K, ROW, SCALE_ROW, ELEMENT, SCALE, BLOCK,
                BLOCK_RED, BLOCK_OUT, UNEVEN, OUT % BLOCK_OUT != 0,
            )  # fmt: skip
        else:
            b = _weight_tile(
                w, scales, tl.minimum(columns, N - 1), red0, None, K, ROW, SCALE_ROW, ELEMENT, SCALE, BLOCK,
                BLOCK_OUT, BLOCK_RED, False, UNEVEN,
            ).T  # fmt: skip
        if SCALE == "f32":
            n0, k0 = (red0, out0) if TRANSPOSED else (out0, red0)
            s = tl.load(scales + n0 // BLOCK * SCALE_ROW + k0 // BLOCK)
            acc += tl.dot(a, b) * s
        else:
            acc = tl.dot(a, b, acc)
    if FACTOR == "group":
        acc = acc * tl.load(factors + g)
    if FACTOR == "column":
        acc = acc * tl.load(factors + g * N + tl.minimum(columns, N - 1))[None, :]
    acc = tl.where(steps > 0, acc, 0.0)
    pointers = out + rows.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=(rows < stop)[:, None] & (columns < OUT)[None, :])


@triton.jit
def drhs_kernel(
    dy,  # [M, N]
    x,  # [M, K]
    starts,
    ends,
    out,  # [G, N, K]
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    g = tl.program_id(0) // (N_TILES * K_TILES)
    within = tl.program_id(0) % (N_TILES * K_TILES)
    n = within // K_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    k = within % K_TILES * BLOCK_K + tl.arange(0, BLOCK_K)
    begin, stop = tl.load(starts + g), tl.load(ends + g)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for row0 in range(begin, stop, BLOCK_M):
        rows = row0 + tl.arange(0, BLOCK_M)
        mine = (rows < stop)[:, None]  # on both sides: a neighbour's NaN times zero would still be NaN
        offset = rows.to(tl.int64)[:, None]
        a = tl.load(dy + offset * N + n[None, :], mask=mine & (n < N)[None, :], other=0)
        b = tl.load(x + offset * K + k[None, :], mask=mine & (k < K)[None, :], other=0)
        acc = tl.dot(a.T, b, acc)
    pointers = out + (g.to(tl.int64) * N + n.to(tl.int64))[:, None] * K + k[None, :]
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


def _capability() -> int:
    """Of the device that JAX runs on: 80, 89, 90, ..."""
    text = getattr(jax.devices()[0], "compute_capability", None)
    if text is None:
        raise ValueError(f"the Triton kernels need an NVIDIA GPU, JAX runs on {jax.devices()[0].platform}")
    major, minor = str(text).split(".")
    return int(major) * 10 + int(minor)


def _rows_product(x, w, group_sizes, group_offset, out_dtype, config, *, transposed: bool) -> jax.Array:
    m, (groups, n, k) = x.shape[0], w.shape
    width = k if transposed else n
    if m == 0 or groups == 0:
        return jnp.zeros((m, width), out_dtype)
    capability = _capability()
    rows = rows_per_group(m, groups)
    # Unused operands still need an array to point to.
    scales = factors = group_sizes
    element, scale, block, factor, row = "half", "none", 1, "none", k
    if isinstance(w, QTensor):
        fmt = w.format
        element, scale, block = fmt.element, fmt.scale, fmt.block
        data, scales, row = lax.bitcast_convert_type(w.data, jnp.uint8), w.block_scale, w.data.shape[2]
        if scale != "f32":
            scales = lax.bitcast_convert_type(scales, jnp.uint8)
        if w.global_scale is not None:
            factors = w.global_scale.astype(jnp.float32)
            factors = jnp.broadcast_to(factors, (groups,)) if factors.ndim < 2 else factors
            factor = "group" if factors.ndim == 1 else "column"
    else:
        data = w.astype(x.dtype)
    c = config or choose_config(rows, 16 if element == "half" else fmt.bits, capability)
    schedule = tile_schedule(group_sizes, num_rows=m, block=c.block_m, group_offset=group_offset, num_weights=groups)
    tiles = schedule.weight.shape[0]
    quantised = element != "half"
    return jax_triton.triton_call(
        x,
        data,
        scales,
        factors,
        schedule.weight,
        schedule.first,
        schedule.end,
        kernel=rows_kernel,
        out_shape=jax.ShapeDtypeStruct((m, width), out_dtype),
        grid=(tiles * triton.cdiv(width, c.block_out),),
        num_warps=c.num_warps,
        num_stages=c.num_stages,
        compute_capability=capability,
        N=n,
        K=k,
        ROW=row,
        SCALE_ROW=scales.shape[2] if quantised else 0,
        SCALES=scales.shape[1] * scales.shape[2] if quantised else 0,
        TRANSPOSED=transposed,
        ELEMENT=element,
        SCALE=scale,
        BLOCK=block,
        FACTOR=factor,
        TILES=tiles,
        BAND=c.band,
        BLOCK_M=c.block_m,
        BLOCK_OUT=c.block_out,
        BLOCK_RED=c.block_red,
    )


def forward(x, w, group_sizes, *, group_offset=None, out_dtype, config: TritonConfig | None = None) -> jax.Array:
    """As portable.grouped_matmul, for x in BF16 or F16."""
    return _rows_product(x, w, group_sizes, group_offset, out_dtype, config, transposed=False)


def dlhs(dy, w, group_sizes, *, group_offset=None, out_dtype, config: TritonConfig | None = None) -> jax.Array:
    """As portable.grouped_matmul_dlhs; a QTensor w may have one global scale for each matrix, not for each column."""
    return _rows_product(dy, w, group_sizes, group_offset, out_dtype, config, transposed=True)


def drhs(
    dy, x, group_sizes, *, num_groups: int, group_offset=None, out_dtype, config: TritonConfig | None = None
) -> jax.Array:
    """As portable.grouped_matmul_drhs, for dy and x in BF16 or F16."""
    (m, n), k = dy.shape, x.shape[1]
    if m == 0 or num_groups == 0:
        return jnp.zeros((num_groups, n, k), out_dtype)
    capability = _capability()
    c = config or choose_drhs_config(capability)
    starts, ends = held_bounds(group_sizes, m, group_offset, num_groups)
    return jax_triton.triton_call(
        dy,
        x.astype(dy.dtype),
        starts,
        ends,
        kernel=drhs_kernel,
        out_shape=jax.ShapeDtypeStruct((num_groups, n, k), out_dtype),
        grid=(num_groups * triton.cdiv(n, c.block_out) * triton.cdiv(k, c.block_red),),
        num_warps=c.num_warps,
        num_stages=c.num_stages,
        compute_capability=capability,
        N=n,
        K=k,
        BLOCK_M=c.block_m,
        BLOCK_N=c.block_out,
        BLOCK_K=c.block_red,
    )
