"""Float32 arithmetic whose result does not depend on the compiler or the device, from integers where that is needed.

XLA:CPU flushes subnormals and XLA:GPU keeps them; XLA:GPU divides with `div.full`/`rcp.approx` (up to 2 ulp off),
turns a division by a constant into a multiplication, and drops a narrowing cast followed by its inverse. A quantiser
that is specified to the bit can use none of these, so powers of two, divisions and decodes are done here on bit
patterns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

INF = 0x7F800000  # float32 bits of infinity; magnitudes above are NaN
NAN = 0x7FC00000


def _u32(value: int) -> jax.Array:
    return jnp.uint32(value)


def f32_bits(x: jax.Array) -> jax.Array:
    """uint32 bits of x (bf16, f16 or f32) widened to float32; bf16 by a shift, subnormals included."""
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def from_bits(bits: jax.Array) -> jax.Array:
    """float32 of a uint32 bit pattern."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def magnitude(bits: jax.Array) -> jax.Array:
    """Bits of |x|. As integers they order like the magnitudes, with infinity and then NaN above every number."""
    return bits & _u32(0x7FFFFFFF)


def scale_pow2(bits: jax.Array, n: jax.Array) -> jax.Array:
    """x * 2**n as float32 for the bits of x and int32 n: exact, truncated where the result is subnormal.

    Subnormal x and subnormal results are handled with integers. Infinity and NaN are returned as they are.
    """
    sign, mag = bits & _u32(0x80000000), magnitude(bits)
    widened = lax.bitcast_convert_type(mag.astype(jnp.int32).astype(jnp.float32), jnp.uint32)  # subnormal: mag * 2^-149
    subnormal = mag < _u32(1 << 23)
    norm = jnp.where(subnormal, widened, mag)
    exponent = (norm >> 23).astype(jnp.int32) - jnp.where(subnormal, 149, 0).astype(jnp.int32) + n
    fraction = norm & _u32(0x7FFFFF)
    normal = (jnp.clip(exponent, 1, 254).astype(jnp.uint32) << 23) | fraction
    small = (fraction | _u32(1 << 23)) >> jnp.clip(1 - exponent, 0, 31).astype(jnp.uint32)
    out = jnp.where(exponent >= 255, _u32(INF), jnp.where(exponent >= 1, normal, small))
    out = jnp.where(mag == 0, _u32(0), jnp.where(mag >= _u32(INF), mag, out))
    return from_bits(sign | out)


def pow2(n: jax.Array) -> jax.Array:
    """2.0**n for int32 n in -126..127."""
    return from_bits((n + 127).astype(jnp.uint32) << 23)


def exact_div(a: jax.Array, b: jax.Array) -> jax.Array:
    """a / b rounded to nearest even, for a >= 0, b > 0 and a normal quotient; 0 where a is 0.

    The device's own division gives a first quotient; its remainder, exact modulo 2^32, corrects it.
    """
    ba, bb = f32_bits(a), f32_bits(b)
    ma, mb = (ba & _u32(0x7FFFFF)) | _u32(1 << 23), (bb & _u32(0x7FFFFF)) | _u32(1 << 23)
    first = from_bits((ba & _u32(0x7FFFFF)) | _u32(0x3F800000)) / from_bits((bb & _u32(0x7FFFFF)) | _u32(0x3F800000))
    q = (first * jnp.float32(1 << 25)).astype(jnp.int32).astype(jnp.uint32)
    rest = ((ma << 25) - q * mb).astype(jnp.int32)
    divisor = mb.astype(jnp.int32)
    step = jnp.floor(rest.astype(jnp.float32) / divisor.astype(jnp.float32)).astype(jnp.int32)
    q, rest = q.astype(jnp.int32) + step, rest - step * divisor
    for _ in range(2):  # the estimate of the step is off by one at most
        low, high = rest < 0, rest >= divisor
        move = high.astype(jnp.int32) - low.astype(jnp.int32)
        q, rest = q + move, rest - move * divisor
    wide = (q >= (1 << 25)).astype(jnp.int32)
    shift = wide + 1
    kept, below = q >> shift, q & ((1 << shift) - 1)
    half = 1 << wide
    up = (below > half) | ((below == half) & ((rest > 0) | ((kept & 1) == 1)))
    kept = (kept + up.astype(jnp.int32)).astype(jnp.float32)
    exponent = (ba >> 23).astype(jnp.int32) - (bb >> 23).astype(jnp.int32) - 25 + shift
    bits = (f32_bits(kept).astype(jnp.int32) + (exponent << 23)).astype(jnp.uint32)
    return jnp.where(a == 0, jnp.float32(0), from_bits(bits))


def e4m3_code(y: jax.Array) -> jax.Array:
    """uint8 code of float32 y: nearest even, saturating at 448, sign of zero kept. y must not be NaN."""
    y = jnp.clip(y, jnp.float32(-448), jnp.float32(448))
    return lax.bitcast_convert_type(y.astype(jnp.float8_e4m3fn), jnp.uint8)


def e4m3_value(code: jax.Array) -> jax.Array:
    """float32 of uint8 E4M3 codes, from the bits (a cast could be merged with the cast that made the code)."""
    c = code.astype(jnp.uint32)
    sign, exponent, fraction = (c & _u32(0x80)) << 24, (c >> 3) & _u32(15), c & _u32(7)
    normal = ((exponent + _u32(120)) << 23) | (fraction << 20)
    tiny = f32_bits(fraction.astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-9))
    bits = jnp.where(exponent == 0, tiny, normal)
    bits = jnp.where((c & _u32(0x7F)) == 0x7F, _u32(NAN), bits)
    return from_bits(sign | bits)


def e2m1_code(y: jax.Array) -> jax.Array:
    """uint8 code 0..15 of float32 y: nearest even, saturating at 6, sign kept (-0 is 8). NaN gives 0 or 8."""
    bits = f32_bits(y)
    a = from_bits(magnitude(bits))
    code = (bits >> 28) & _u32(8)
    for midpoint, tie_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += ((a >= jnp.float32(midpoint)) if tie_up else (a > jnp.float32(midpoint))).astype(jnp.uint32)
    return code.astype(jnp.uint8)


def e2m1_value(code: jax.Array) -> jax.Array:
    """float32 of E2M1 codes 0..15."""
    c = code.astype(jnp.uint32)
    normal = ((((c >> 1) & _u32(3)) + _u32(126)) << 23) | ((c & _u32(1)) << 22)
    small = jnp.where((c & _u32(7)) == 1, _u32(0x3F000000), _u32(0))
    return from_bits(((c & _u32(8)) << 28) | jnp.where((c & _u32(7)) < 2, small, normal))


def to_dtype(x: jax.Array, dtype) -> jax.Array:
    """float32 x rounded to `dtype` to nearest even; bfloat16 from the bits, so that its subnormals survive."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return x.astype(dtype)
    bits = f32_bits(x)
    rounded = (bits + _u32(0x7FFF) + ((bits >> 16) & _u32(1))) >> 16
    rounded = jnp.where(magnitude(bits) > _u32(INF), _u32(0x7FC0), rounded)
    return lax.bitcast_convert_type(rounded.astype(jnp.uint16), jnp.bfloat16)
