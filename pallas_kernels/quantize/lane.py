"""The arithmetic of one thread of the quantisation kernels, equal to `reference` bit for bit; more in `four_over_six`.

A thread owns V consecutive values of a row (V divides the block size B, so B/V neighbouring threads share a block). The
functions take an operations object `o` (`emit.Ops` in kernels, a numpy double in tests) and lists of registers: words
(uint32, two packed 16-bit values, the first in the low half) or float32 values.

E2M1 rounding: the step of E2M1 at y is half of T, the power of two below max(|y|, 1). For |y| < 8 two bits of y's
exponent are t = T where T is 2 or 4, and about 0 where it is 1, so that M = t * (2^22 - 1) + 3 * 2^21 - 4 is a float
whose last bit counts steps, and r = |y| + M is rounded to a step, to nearest even. M's constants are those for which
the low 16 bits of r are the code less 8 in each of the three ranges. Eight such codes become a word in six
multiply-adds: what is above bit 15 of a half falls out, and what eight borrows leave is one constant.
"""

from __future__ import annotations

from .emit import float_bits
from .formats import BlockFormat
from .reference import FP8_EPS, MAX_ENCODE

INF, NAN, ABS = 0x7F800000, 0x7FC00000, 0x7FFFFFFF
FLT_MAX_BITS = 0x7F7FFFFF
SLOPE, BASE = 2.0**22 - 1, 3 * 2.0**21 - 4  # of M in the module docstring


def to_floats(o, words, dtype: str):
    """float32 values of packed words; dtype "bf16", "f16" or "f32" (then the words are the values)."""
    if dtype == "f32":
        return [o.float(w) for w in words]
    if dtype == "f16":
        return [f for w in words for f in o.half_to_float(w)]
    return [f for w in words for f in (o.float(w << 16), o.float(w & 0xFFFF0000))]


def packed_max(o, words, dtype: str):
    """Word of two 16-bit values, the larger magnitude of which is that of all in `words`; a NaN wins."""
    parts = list(words)
    while len(parts) > 1:
        parts = [
            o.absmax2(*parts[i : i + 2], dtype) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)
        ]
    return parts[0]


def amax_bits(o, words, dtype: str):
    """float32 bits of the largest magnitude; above INF where there is a NaN."""
    if dtype == "f32":
        top = words[0] & ABS
        for w in words[1:]:
            top = o.umax(top, w & ABS)
        return top
    top = packed_max(o, words, dtype)
    if dtype == "bf16":
        return o.absmax2(top, o.prmt(top, top, 0x1032), dtype) & 0x7FFF0000
    low, high = (top << 16) & 0x7FFF0000, top & 0x7FFF0000
    a, b = o.half_to_float(o.umax(low, high) >> 16)
    return o.bits(a)


def finite_amax_bits(o, blocks, dtype: str):
    """float32 bits of the largest magnitude of those blocks (lists of words) that have neither NaN nor infinity."""

    def one_by_one():
        top = o.U(0)
        for words in blocks:
            amax = amax_bits(o, words, dtype)
            top = o.umax(top, o.where(amax >= o.U(INF), o.U(0), amax))
        return [top]

    if dtype == "f32":
        return one_by_one()[0]
    top = amax_bits(o, [packed_max(o, words, dtype) for words in blocks], dtype)
    return o.rarely(top >= o.U(INF), one_by_one, [top])[0]


def group_max(o, top, lanes: int):
    """Maximum over `lanes` neighbouring threads."""
    mask = 1
    while mask < lanes:
        top = o.umax(top, o.shuffle_xor(top, mask))
        mask *= 2
    return top


def e4m3_words(o, values):
    """Codes of scaled values, four to a word."""
    pairs = [o.e4m3x2(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return [o.prmt(pairs[i], pairs[i + 1], 0x5410) for i in range(0, len(pairs), 2)]


def round_e2m1(o, y):
    """(r, M) of the module docstring for |y| < 7."""
    m = o.fma(o.float(o.bits(y) & 0x40800000), o.F(SLOPE), o.F(BASE))
    return o.abs(y) + m, m


def round_saturated(o, y):
    """r of the module docstring for any y but NaN."""
    return round_e2m1(o, o.fmin(o.abs(y), o.F(6.0)))[0]


def e2m1_words(o, rounded):
    """Codes of the magnitudes, eight to a word, from r of `round_e2m1`."""
    out = []
    for i in range(0, len(rounded), 8):
        halves = []
        for j in (i, i + 4):
            half = o.bits(rounded[j + 3])
            for k in (2, 1, 0):
                half = o.mad(half, 16, o.bits(rounded[j + k]))
            halves.append(half)
        out.append(o.prmt(*halves, 0x5410) + 0x88878888)
    return out


def signed(o, codes, words, dtype: str):
    """Words of eight codes with the signs of the values."""
    out = []
    for i, code in enumerate(codes):
        if dtype == "f32":
            w = words[8 * i : 8 * i + 8]
            even, odd = (
                o.prmt(o.prmt(w[k], w[k + 2], 0x00FB), o.prmt(w[k + 4], w[k + 6], 0x00FB), 0x5410) for k in (0, 1)
            )
        else:  # bytes 0 or 255 by the sign: of values 0, 2, 1, 3
            w = words[4 * i : 4 * i + 4]
            low, high = (o.prmt(w[k], w[k + 1], 0xFBD9) for k in (0, 2))
            even, odd = o.prmt(low, high, 0x5410), o.prmt(low, high, 0x7632)
        out.append(o.and_or(odd, 0x80808080, o.and_or(even, 0x08080808, code)))
    return out


def mx_scale(o, amax, fmt: BlockFormat):
    """E8M0 byte (as a word) and the multiplier 2^(127-byte); NaN for byte 255."""
    exponent, fraction = (8, 0x600000) if fmt.element == "e4m3" else (2, 0x400000)
    if fmt.rule == "ceil":
        biased = (amax + (0x7FFFFF - fraction)) >> 23  # one more where the fraction is above 1.75 or 1.5
    else:
        biased = amax >> 23
    byte = o.umax(biased, o.U(exponent)) - exponent
    special = o.where(amax.same(o.U(INF)), o.U(254 if fmt.rule == "ceil" else 255), o.U(255))
    byte = o.where(amax >= o.U(INF), special, byte)
    m = (o.U(254) - byte) << 23
    m = o.where(byte.same(o.U(254)), o.U(0x00400000), m)
    return byte, o.float(o.where(byte.same(o.U(255)), o.U(NAN), m))


def fp8_scale(o, amax, fmt: BlockFormat):
    """float32 scale (as bits) and its reciprocal; both NaN for a block with a NaN."""
    nan = amax > o.U(INF)
    s = o.div_constant(o.float(o.umin(o.umax(amax, o.U(float_bits(FP8_EPS))), o.U(FLT_MAX_BITS))), 448.0)
    if fmt.pow2:
        s = o.float((o.bits(s) + 0x7FFFFF) & INF)
    inverse = o.rcp(s)
    return o.where(nan, o.U(NAN), o.bits(s)), o.where(nan, o.float(o.U(NAN)), inverse)


class NvScale:
    """What a row's or tensor's NVFP4 global scale is for one thread: S and g moved to [2^8, 2^9) and its reciprocal.

    shift: float32 2^e with which x moves. encode: S'. sixth: S' * fl(1/6). decode: g'. amax: amax * 2^e (4-over-6).
    hidden: 0 in a form that the assembler does not know, for constants that are better kept in registers (4-over-6).
    plain: S and g as they are.
    """

    def __init__(self, o, encode, decode, amax_g, *, four_over_six: bool):
        self.plain = encode, decode
        moved = (o.bits(encode) >> 23) - 135  # e, modulo 2^32
        self.shift = o.float((moved + 127) << 23)
        self.encode = o.float(o.bits(encode) - (moved << 23))
        self.decode = o.float(o.bits(decode) + (moved << 23))
        self.sixth = self.encode * o.F(1 / 6)
        if four_over_six:
            a = amax_g * self.shift
            self.amax = o.where(a < o.F(2.0**-60), o.F(0.0), a)
            self.hidden = o.bits(encode) >> 31


def given_scale(o, g, e4m3_max: int):
    """(S, g, amax that S stands for) of the decode scale that a caller gave."""
    zero = (o.bits(g) & ABS).same(o.U(0))
    g = o.where(zero, o.F(1.0), o.fmax(g, o.F(1 / MAX_ENCODE)))
    return o.rcp(g), g, g * o.F(6.0 * e4m3_max)


def row_scale(o, amax, e4m3_max: int):
    """(S, g, stored g, amax that S stands for) of a row or tensor from the bits of its finite maximum."""
    top = 6 * e4m3_max
    zero = amax.same(o.U(0))
    large = o.float(o.umax(amax, o.U(float_bits(top / MAX_ENCODE))))
    exponent = (o.bits(large) & INF) - 0x3F800000  # divided by the fraction, so that nothing is subnormal
    fraction = o.float(o.bits(large) - exponent)
    s = o.float(o.bits(o.div_by(o.F(float(top)), fraction, o.rcp(fraction))) - exponent)
    s = o.where(zero, o.F(1.0), o.fmin(s, o.F(MAX_ENCODE)))
    g = o.rcp(s)
    return s, g, o.where(zero, o.F(0.0), g), large


def encode_factor(o, s, nv: NvScale):
    """What takes x to E2M1's range for the block scale s (float32)."""
    return o.where(o.bits(s).same(o.U(0)), o.F(2.0**127), o.rcp(s * nv.decode) * nv.shift)


def nvfp4_block(o, words, dtype: str, amax, nv: NvScale):
    """(packed codes, scale code) of the block that this thread's words belong to."""
    nan = amax >= o.U(INF)
    top = o.float(o.where(nan, o.U(0), amax))
    code = o.e4m3x2(o.fmin(top * nv.shift * nv.sixth, o.F(448.0)), o.F(0.0))
    factor = encode_factor(o, o.e4m3x2_to_float(code)[0], nv)
    codes = e2m1_words(o, [round_saturated(o, v * factor) for v in to_floats(o, words, dtype)])
    return [o.where(nan, o.U(0), w) for w in signed(o, codes, words, dtype)], o.where(nan, o.U(0x7F), code)


def swiglu(o, gate, up, activation: str, alpha: float, limit: float):
    """act(gate) * up in float32. "silu", or "swiglu_oai": clip(g) * sigmoid(alpha*g) * (clip(u) + 1)."""
    if activation == "swiglu_oai":
        low, high = o.F(-limit), o.F(limit)  # by selects, because fmin and fmax lose a NaN
        gate = o.where(high < gate, high, gate)
        up = o.where(up < low, low, o.where(high < up, high, up)) + o.F(1.0)
    else:
        alpha = 1.0
    sigmoid = o.rcp_approx(o.exp2_approx(gate * o.F(-alpha * 1.4426950408889634)) + o.F(1.0))
    return gate * sigmoid * up


def decode(o, words, scale, row_scale, fmt: BlockFormat):
    """float32 values of packed codes with the stored scale (a word) and row scale (float32 bits), as `dequantize`."""
    if fmt.element == "e4m3":
        values = [v for w in words for v in (*o.e4m3x2_to_float(w), *o.e4m3x2_to_float(w >> 16))]
    else:
        values = []
        for w in words:
            for i in range(8):
                moved = (w << (22 - 4 * i)) if 4 * i <= 22 else (w >> (4 * i - 22))
                sign = w << (28 - 4 * i)
                bits = (moved & 0x01C00000) | (sign & 0x80000000)
                values.append(o.float(bits) * o.F(2.0**126))  # codes 1..7 as the bits of 2^-127 .. 6*2^-126
    if fmt.scale == "e8m0":
        factor = o.where(scale.same(o.U(0)), o.U(0x00400000), scale << 23)
        factor = o.float(o.where(scale.same(o.U(255)), o.U(NAN), factor))
        return [v * factor for v in values]
    if fmt.scale == "f32":
        return [v * o.float(scale) for v in values]
    s, _ = o.e4m3x2_to_float(scale)
    g = o.float(row_scale)
    return [v * s * g for v in values]
