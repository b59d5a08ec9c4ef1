"""Block quantisation in registers, for the dispatch kernel; plain jnp, so that it can be checked without a GPU.

Letters: N blocks, B values of a block. The results equal `pallas_kernels.quantize.reference` bit for bit. What differs
is the way there: the GPU's multiplications keep subnormals, its float8 cast saturates, and E2M1 codes come from one
addition whose rounding leaves the code in the low bits of the sum. Divisions must round to nearest, which neither XLA's
nor Mosaic's do: `divide` is the reference's own, or the kernel's `div.rn`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.quantize.exact import INF, exact_div
from pallas_kernels.quantize.formats import BlockFormat
from pallas_kernels.quantize.reference import MAX_ENCODE, SATURATE_EXPONENT

_BF16_INF = np.int32(INF >> 16)
i32, f32 = np.int32, np.float32


def _bits(x):
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)


def _shift_right(x, n: int):
    return lax.shift_right_logical(x, i32(n))


def _across(per_block, like):
    """[N] -> [N, B], the same value for each element of a block."""
    return lax.broadcast_in_dim(per_block, like.shape, (0,))


def e4m3_bits(y: jax.Array) -> jax.Array:
    """uint8 codes of float32 y; NaN gives 0x7F. What exceeds 448 saturates in a kernel; elsewhere, clip it first."""
    return lax.bitcast_convert_type(y.astype(jnp.float8_e4m3fn), jnp.uint8)


def exact_quotient(numerator: int, x: jax.Array) -> jax.Array:
    """numerator / x rounded to nearest, for positive x; what a kernel passes as `divide` must equal it."""
    return exact_div(jnp.full_like(x, numerator), x)


def mxfp8_blocks(x: jax.Array, fmt: BlockFormat) -> tuple[jax.Array, jax.Array]:
    """x float32 [N, 32] -> E4M3 codes uint8 [N, 32] and E8M0 bytes uint8 [N]."""
    amax = jnp.max(_bits(x) & i32(0x7FFFFFFF), axis=1)
    exponent = _shift_right(amax, 23)
    if fmt.rule == "ceil":
        exponent = exponent + ((amax & i32(0x7FFFFF)) > i32(0x600000)).astype(jnp.int32)
    byte = jnp.minimum(jnp.maximum(exponent - i32(8), i32(0)), i32(254))
    byte = jnp.where(amax == i32(INF), i32(254 if fmt.rule == "ceil" else 255), byte)
    byte = jnp.where(amax > i32(INF), i32(255), byte)
    inverse = jnp.where(byte == i32(254), i32(0x400000), lax.shift_left(i32(254) - byte, i32(23)))  # 2^(127 - byte)
    inverse = _float(jnp.where(byte == i32(255), i32(0x7FC00000), inverse))  # NaN makes each code 0x7F
    y = x * _across(inverse, x)
    if fmt.rule == "floor":  # only this rule lets finite values exceed 448
        y = jnp.clip(y, f32(-448), f32(448))
    return e4m3_bits(y), byte.astype(jnp.uint8)


def pair_amax(words: jax.Array) -> jax.Array:
    """int32 [N, B/2] words of two bf16 -> int32 [N], bf16 bits of each block's largest magnitude."""
    low = jnp.max(words & i32(0x7FFF), axis=1)
    high = _shift_right(jnp.max(words & i32(0x7FFFFFFF), axis=1), 16)  # the lower half never decides
    return jnp.maximum(low, high)


def finite_or_zero(amax: jax.Array) -> jax.Array:
    """bf16 magnitudes with infinity and NaN as 0: such a block costs only itself."""
    return jnp.where(amax >= _BF16_INF, i32(0), amax)


def token_scales(
    amax: jax.Array, fmt: BlockFormat, divide=exact_quotient
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """From a row's largest finite magnitude (bf16 bits, int32 of any shape): all that its blocks need.

    Returns the decode scale that travels, 2^shift by which the row is multiplied first, and the encode scale (over 6)
    and decode scale of the shifted row, float32 of the same shape. See `reference._quantize_nv`.
    """
    top = 6 * fmt.e4m3_max
    largest = jnp.maximum(_float(lax.shift_left(amax, i32(16))), f32(top / MAX_ENCODE))
    encode = jnp.minimum(divide(top, largest), f32(MAX_ENCODE))
    encode = jnp.where(amax == i32(0), f32(1), encode)
    decode = divide(1, encode)
    exponent = _shift_right(_bits(encode), 23)  # of the encode scale, which moves to [2^9, 2^10)
    shift = exponent - i32(127 + 9)
    back = lax.shift_left(shift, i32(23))
    power = _float(lax.shift_left(shift + i32(127), i32(23)))
    stored = jnp.where(amax == i32(0), f32(0), decode)
    return stored, power, _float(_bits(encode) - back) * f32(1 / 6), _float(_bits(decode) + back)


def e4m3_value(code: jax.Array) -> jax.Array:
    """float32 of int32 E4M3 codes 0..0x7E, from the bits."""
    normal = _float(lax.shift_left(code, i32(20)) + i32(120 << 23))
    return jnp.where(code < i32(8), code.astype(jnp.float32) * f32(2.0**-9), normal)


def e2m1_magnitude(a: jax.Array) -> jax.Array:
    """int32 whose three low bits are the E2M1 code of a >= 0 (float32), nearest even, saturating at 6; the others of
    its low byte are 0.

    Before rounding, the code is min(2a, a + 2, a/2 + 4): steps of 0.5, 1 and 2 below 2, 4 and 6. Added to 1.5 * 2^23,
    each of the three is rounded once, to an integer, ties to even; rounding is monotone, so the minimum may follow.
    """
    magic = 1.5 * 2**23
    a = jnp.minimum(a, f32(6))  # also keeps the product that a is from being contracted with the sums
    low = jnp.minimum(a * f32(2) + f32(magic), a + f32(magic + 2))
    return _bits(jnp.minimum(low, a * f32(0.5) + f32(magic + 4)))


def nvfp4_blocks(words, amax, power, encode_sixth, decode, divide=exact_quotient) -> tuple[jax.Array, jax.Array]:
    """int32 words [N, 8] of two bf16 each -> bytes of two codes, uint8 [N, 8], and E4M3 scale bytes uint8 [N].

    amax: int32 [N] from `pair_amax`. power, encode_sixth, decode: float32 [N] from `token_scales`, of each block's row.
    """
    nan = amax >= _BF16_INF
    shifted = _float(lax.shift_left(finite_or_zero(amax), i32(16))) * power
    s_code = e4m3_bits(jnp.minimum(shifted * encode_sixth, f32(448))).astype(jnp.int32)
    zero = s_code == i32(0)
    scale = jnp.where(zero, f32(1), e4m3_value(s_code) * decode)
    # One multiplier: a power of two times the quotient, both far from the ends of float32, is exact.
    factor = jnp.where(zero, f32(2.0**SATURATE_EXPONENT), power * divide(1, scale))
    factor = _across(factor, words)
    low = _float(lax.shift_left(words & i32(0x7FFF), i32(16)))
    high = _float(words & i32(0x7FFF0000))
    packed = e2m1_magnitude(low * factor) + lax.shift_left(e2m1_magnitude(high * factor), i32(4))
    packed = packed | (_shift_right(words, 12) & i32(8)) | (_shift_right(words, 24) & i32(0x80))
    keep = _across(jnp.where(nan, i32(0), i32(0xFF)), words)
    return (packed & keep).astype(jnp.uint8), jnp.where(nan, i32(0x7F), s_code).astype(jnp.uint8)
