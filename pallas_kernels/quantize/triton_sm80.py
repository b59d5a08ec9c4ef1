"""Quantisation in Triton, called through jax-triton, for GPUs and JAX versions that the Mosaic kernel does not serve.

The array is taken as a flat list of blocks, which is what it is where K is a multiple of the block. Every operation is
one that IEEE 754 defines to the bit (products, quotients rounded to nearest, integers) in the reference's order, and
nothing is contracted, so the bytes are the reference's. Global maxima and the scales from them are left to XLA.

This module imports triton and jax_triton; the entry points load it where they are installed.

Letters: R rows, K values of a row, B block size, C = K / B block scales of a row.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl
from jax import lax

from . import exact, reference
from .formats import BlockFormat
from .qtensor import QTensor
from .swizzle import swizzle_scales

#: Values of one program: 16 for each of 128 threads.
TILE = 2048


@triton.jit
def _pow2(n):
    """2^n as float32 for int32 n in -126 .. 127."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(x, n):
    """x * 2^n in two exact steps, for n in -252 .. 254."""
    half = n >> 1
    return x * _pow2(half) * _pow2(n - half)


@triton.jit
def _e4m3_code(y):
    """int32 code of float32 y that is not NaN: nearest even, saturating at 448, sign of zero kept."""
    bits = y.to(tl.int32, bitcast=True)
    a = tl.minimum(tl.abs(y), 448.0)
    magnitude = a.to(tl.int32, bitcast=True)
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) >> 20) - (120 << 3)
    tiny = (a + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # multiples of 2^-9, below 2^-6
    return tl.where(a < 0.015625, tiny, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _e4m3_value(code):
    """float32 of int32 E4M3 codes that are neither negative nor NaN."""
    normal = ((((code >> 3) + 120) << 23) | ((code & 7) << 20)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, (code & 7).to(tl.float32) * 0.001953125, normal)


@triton.jit
def _e2m1_code(y):
    """int32 code of float32 y: nearest even, saturating at 6, sign of zero kept."""
    bits = y.to(tl.int32, bitcast=True)
    a = tl.abs(y)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return code | ((bits >> 28) & 8)


@triton.jit
def quantize_kernel(
    x,  # [R * C, B]
    encode,  # float32, NVFP4: encode scale S, decode scale g (both moved by 2^shift), for each row or one
    decode,
    shift,  # int32
    codes,  # uint8 [R * C, B or B / 2]
    scales,  # uint8 or float32 [R * C]
    BLOCKS: tl.constexpr,  # R * C
    COLUMNS: tl.constexpr,  # C where encode is for each row, else 0
    B: tl.constexpr,
    E2M1: tl.constexpr,
    SCALE: tl.constexpr,
    CEIL: tl.constexpr,
    POW2: tl.constexpr,
    TILE: tl.constexpr,
):
    NUM: tl.constexpr = TILE // B
    first = tl.program_id(0).to(tl.int64) * NUM
    x += first * B
    codes += first * (B // 2 if E2M1 else B)
    scales += first
    i = tl.arange(0, NUM)
    inside = first + i < BLOCKS
    place = i[:, None] * B + tl.arange(0, B)[None, :]
    value = tl.load(x + place, mask=inside[:, None], other=0).to(tl.float32)
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=1)  # bits order like magnitudes, with infinity and NaN above all numbers
    INF: tl.constexpr = 0x7F800000
    if SCALE == "e8m0":
        exponent = amax >> 23
        if CEIL:
            exponent += ((amax & 0x7FFFFF) > (0x400000 if E2M1 else 0x600000)).to(tl.int32)
        byte = tl.minimum(tl.maximum(exponent - (2 if E2M1 else 8), 0), 254)
        byte = tl.where(amax >= INF, tl.where((amax == INF) & CEIL, 254, 255), byte)
        nan = byte == 255
        scaled = _scaled(value, 127 - byte[:, None])
        stored = byte.to(tl.uint8)
    elif SCALE == "f32":
        nan = amax > INF
        low: tl.constexpr = 0x2EDBE6FF  # 1e-10
        clipped = tl.minimum(tl.maximum(amax, low), 0x7F7FFFFF).to(tl.float32, bitcast=True)
        s = tl.div_rn(clipped, tl.full((NUM,), 448.0, tl.float32))
        if POW2:
            s = ((s.to(tl.int32, bitcast=True) + 0x7FFFFF) & INF).to(tl.float32, bitcast=True)
        scaled = value * tl.div_rn(tl.full((NUM,), 1.0, tl.float32), s)[:, None]
        stored = tl.where(nan, float("nan"), s)
    else:
        nan = amax >= INF
        row = ((first + i) // COLUMNS) if COLUMNS else i * 0
        row = tl.where(inside, row, 0)
        big, g, n = tl.load(encode + row), tl.load(decode + row), tl.load(shift + row)
        top = _scaled(tl.where(nan, 0, amax).to(tl.float32, bitcast=True), n)
        code = _e4m3_code(tl.minimum(top * (big * 0.16666667163372040), 448.0))
        zero = code == 0
        inverse = tl.div_rn(tl.full((NUM,), 1.0, tl.float32), tl.where(zero, 1.0, _e4m3_value(code) * g))
        scaled = _scaled(value, n[:, None]) * inverse[:, None]
        scaled = tl.where(zero[:, None], _scaled(value, tl.full((NUM, B), 127, tl.int32)), scaled)
        stored = tl.where(nan, 0x7F, code).to(tl.uint8)
    tl.store(scales + i, stored, mask=inside)
    if E2M1:
        code = tl.where(nan[:, None], 0, _e2m1_code(scaled))
        even, odd = tl.split(tl.reshape(code, (NUM, B // 2, 2)))
        place = i[:, None] * (B // 2) + tl.arange(0, B // 2)[None, :]
        tl.store(codes + place, (even | (odd << 4)).to(tl.uint8), mask=inside[:, None])
    else:
        code = tl.where(nan[:, None], 0x7F, _e4m3_code(scaled))
        tl.store(codes + place, code.to(tl.uint8), mask=inside[:, None])


def quantize(
    x: jax.Array,
    fmt: BlockFormat,
    *,
    global_scale: jax.Array | None = None,
    layout: str = "row_major",
    num_valid_rows: jax.Array | None = None,
    capability: int | None = None,
) -> QTensor:
    """As reference.quantize, for whole blocks without padding and formats with a scale for each row and block.

    capability: 80, 89, ...; None asks the device.
    """
    *lead, k = x.shape
    rows, columns = math.prod(lead), k // fmt.block
    encode = decode = shift = jnp.zeros((1,), jnp.float32)
    stored, per_row = None, False
    if fmt.scale == "e4m3":
        encode, decode, shift, stored = _global_scales(x, fmt, global_scale, num_valid_rows)
        per_row = encode.size > 1
        if per_row:
            full = lambda a: jnp.broadcast_to(a.reshape(*a.shape, *(1,) * (len(lead) - a.ndim)), lead).reshape(-1)  # noqa: E731
            encode, decode, shift = full(encode), full(decode), full(shift)
    codes, scales = jax_triton.triton_call(
        x,
        encode.reshape(-1),
        decode.reshape(-1),
        shift.reshape(-1),
        kernel=quantize_kernel,
        out_shape=(
            jax.ShapeDtypeStruct((*lead, fmt.data_bytes(k)), jnp.uint8),
            jax.ShapeDtypeStruct((*lead, columns), jnp.float32 if fmt.scale == "f32" else jnp.uint8),
        ),
        grid=(triton.cdiv(rows * columns, TILE // fmt.block),),
        num_warps=4,
        enable_fp_fusion=False,  # a sum that swallows the rounding of a product gives other bytes
        compute_capability=capability,
        BLOCKS=rows * columns,
        COLUMNS=columns if per_row else 0,
        B=fmt.block,
        E2M1=fmt.element == "e2m1",
        SCALE=fmt.scale,
        CEIL=fmt.rule == "ceil",
        POW2=fmt.pow2,
        TILE=TILE,
    )
    if layout == "swizzled":
        scales = swizzle_scales(scales if scales.ndim > 1 else scales[None])
    elif fmt.scale == "e4m3":
        scales = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn)
    data = codes if fmt.element == "e2m1" else lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return QTensor(data, scales, stored, fmt, k, layout)  # pyright: ignore[reportArgumentType]


def _global_scales(x, fmt, global_scale, num_valid_rows):
    """NVFP4's encode and decode scale, moved to [2^8, 2^9) by 2^shift, and the decode scale as it is stored."""
    *lead, k = x.shape
    if global_scale is None:
        bits = exact.magnitude(exact.f32_bits(x))
        if num_valid_rows is not None:
            valid = (lax.iota(jnp.int32, math.prod(lead)) < num_valid_rows).reshape(*lead, 1)
            bits = jnp.where(valid, bits, jnp.uint32(0))
        amax = jnp.max(bits.reshape(*lead, k // fmt.block, fmt.block), axis=-1)
        amax = jnp.where(amax >= exact.INF, jnp.uint32(0), amax)
        amax = jnp.max(amax, axis=-1 if fmt.global_scale == "token" else None, initial=0)
        encode = reference.encode_scale(amax, fmt.e4m3_max)
        decode = exact.exact_div(jnp.ones_like(encode), encode)
        stored = jnp.where(amax == 0, jnp.float32(0), decode) if fmt.global_scale == "token" else decode
    else:
        stored = global_scale
        decode = jnp.maximum(global_scale, jnp.float32(1 / reference.MAX_ENCODE))
        decode = jnp.where(global_scale == 0, jnp.float32(1), decode)
        encode = exact.exact_div(jnp.ones_like(decode), decode)
    shift = (exact.f32_bits(encode) >> 23).astype(jnp.int32) - (127 + 8)
    encode = exact.scale_pow2(exact.f32_bits(encode), -shift)
    decode = exact.scale_pow2(exact.f32_bits(decode), shift)
    return encode, decode, shift, stored
