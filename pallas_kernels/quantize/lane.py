"""The arithmetic of one thread of the quantisation kernels, equal to `reference` bit for bit.

A thread owns V consecutive values of a row (V divides the block size B, so B/V neighbouring threads share a block). The
functions take an operations object `o` (`emit.Ops` in kernels, a numpy double in tests) and lists of registers: words
(uint32, two packed 16-bit values, the first in the low half) or float32 values.

E2M1 rounding: with T = 2^e the power of two below max(|y|, 1), the step of E2M1 at y is T/2. r = fma(T, 2^22 + 3, |y|)
rounds |y| to that step, to nearest even, and leaves n + 6 (n = |y| in steps) in its lowest bits; the code is n + 2e,
and r + (r >> 22) has it in its lowest four bits.
"""

from __future__ import annotations

from .emit import float_bits
from .formats import BlockFormat
from .reference import FP8_EPS, MAX_ENCODE

INF, NAN, ABS = 0x7F800000, 0x7FC00000, 0x7FFFFFFF
FLT_MAX_BITS = 0x7F7FFFFF
ROUND = 2.0**22 + 3


def to_floats(o, words, dtype: str):
    """float32 values of packed words; dtype "bf16", "f16" or "f32" (then the words are the values)."""
    if dtype == "f32":
        return [o.float(w) for w in words]
    if dtype == "f16":
        return [f for w in words for f in o.half_to_float(w)]
    return [f for w in words for f in (o.float(w << 16), o.float(w & 0xFFFF0000))]


def amax_bits(o, words, dtype: str):
    """float32 bits of the largest magnitude; above INF where there is a NaN."""
    if dtype == "f32":
        top = words[0] & ABS
        for w in words[1:]:
            top = o.umax(top, w & ABS)
        return top
    if len(words) > 1:
        parts = list(words)
        while len(parts) > 1:
            parts = [o.absmax2(*parts[i : i + 2], dtype) for i in range(0, len(parts), 2)]
        top = parts[0]
    else:
        top = words[0]
    low, high = (top << 16) & 0x7FFF0000, top & 0x7FFF0000
    if dtype == "bf16":
        return o.umax(low, high)
    a, b = o.half_to_float(o.umax(low, high) >> 16)
    return o.bits(a)


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


def round_e2m1(o, a):
    """(r, T) of the module docstring for 0 <= a < 7."""
    t = o.float(o.bits(o.fmax(a, o.F(1.0))) & INF)
    return o.fma(t, o.F(ROUND), a), t


def round_saturated(o, y):
    """r of the module docstring for any y."""
    return round_e2m1(o, o.fmin(o.abs(y), o.F(6.0)))[0]


def e2m1_words(o, rounded, signs):
    """Packed codes, eight to a word, from r of `round_e2m1` and the words of `sign_words`."""
    out = []
    codes = [o.bits(r) + (o.bits(r) >> 22) for r in rounded]
    halves = []
    for i in range(0, len(codes), 4):
        low = o.prmt(o.prmt(codes[i], codes[i + 1], 0x0040), o.prmt(codes[i + 2], codes[i + 3], 0x0040), 0x5410)
        nibbles = (low & 0x07070707) | ((signs[i // 4] >> 4) & 0x08080808)
        halves.append(nibbles | (nibbles >> 4))  # bytes 0 and 2 hold two codes each
    for i in range(0, len(halves), 2):
        out.append(o.prmt(halves[i], halves[i + 1], 0x6420))
    return out


def sign_words(o, words, dtype: str):
    """For each four values one word with their signs in bits 7, 15, 23 and 31."""
    if dtype == "f32":
        return [
            o.prmt(o.prmt(words[i], words[i + 1], 0x0073), o.prmt(words[i + 2], words[i + 3], 0x0073), 0x5410)
            for i in range(0, len(words), 4)
        ]
    return [o.prmt(words[i], words[i + 1], 0x7531) for i in range(0, len(words), 2)]


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
    """

    def __init__(self, o, encode, decode, amax_g, *, four_over_six: bool):
        moved = (o.bits(encode) >> 23) - 135  # e, modulo 2^32
        self.shift = o.float((moved + 127) << 23)
        self.encode = o.float(o.bits(encode) - (moved << 23))
        self.decode = o.float(o.bits(decode) + (moved << 23))
        self.sixth = self.encode * o.F(1 / 6)
        if four_over_six:
            a = amax_g * self.shift
            self.amax = o.where(a < o.F(2.0**-60), o.F(0.0), a)


def row_scale(o, amax, e4m3_max: int):
    """(S, g, stored g, amax that S stands for) of a row from the bits of its finite maximum."""
    top = 6 * e4m3_max
    zero = amax.same(o.U(0))
    large = o.float(o.umax(amax, o.U(float_bits(top / MAX_ENCODE))))
    s = o.div(o.F(top), large)
    s = o.where(zero, o.F(1.0), o.fmin(s, o.F(MAX_ENCODE)))
    g = o.rcp(s)
    return s, g, o.where(zero, o.F(0.0), g), large


def _encode(o, code, nv: NvScale):
    """Value of a block scale code and the factor that takes x to E2M1's range."""
    s, _ = o.e4m3x2_to_float(code)
    return s, o.where(code.same(o.U(0)), o.F(2.0**127), o.rcp(s * nv.decode) * nv.shift)


def nvfp4_block(o, words, dtype: str, amax, nv: NvScale, fmt: BlockFormat):
    """(packed codes, scale code) of the block that this thread's words belong to; 4-over-6 wants a whole block."""
    nan = amax >= o.U(INF)
    top = o.float(o.where(nan, o.U(0), amax))
    if fmt.four_over_six is None:
        code = o.e4m3x2(o.fmin(top * nv.shift * nv.sixth, o.F(448.0)), o.F(0.0))
        _, factor = _encode(o, code, nv)
        rounded = [round_saturated(o, v * factor) for v in to_floats(o, words, dtype)]
        out = e2m1_words(o, rounded, sign_words(o, words, dtype))
    else:
        *out, code = _four_over_six(o, words, dtype, top, nv, fmt.four_over_six)
    return [o.where(nan, o.U(0), w) for w in out], o.where(nan, o.U(0x7F), code)


def _four_over_six(o, words, dtype: str, top, nv: NvScale, rule):
    """The two words of codes and the scale code of the better candidate.

    The candidates are compared by d = (q - y) * s, in units of the decode scale, which is good to about 2^-21 of the
    block's maximum. Where that leaves doubt, or a candidate saturates, the order of operations that defines the format
    decides; few blocks need it.
    """
    moved = top * nv.shift
    moved = o.where(moved < o.F(2.0**-60), o.F(0.0), o.fmin(moved, o.F(2.0**60)))
    base = o.div_constant(moved, 6.0) * nv.encode
    codes = [o.e4m3x2(o.fmin(base * o.F(factor), o.F(448.0)), o.F(0.0)) for factor in (1.0, 1.5)]
    magnitudes = to_floats(o, [w & (ABS if dtype == "f32" else 0x7FFF7FFF) for w in words], dtype)
    rounded, errors = [], []
    encoded = [_encode(o, code, nv) for code in codes]
    y_top = top * encoded[0][1]
    top_d = y_top * encoded[0][0]
    for s, factor in encoded:
        kept, error = [], o.F(0.0)
        for a in magnitudes:
            y = a * factor
            r, t = round_e2m1(o, y)
            kept.append(r)
            d = o.fma(t, o.F(-ROUND), r) - y
            error = o.fma(d, d, error) if rule.error == "mse" else error + o.abs(d)
        rounded.append(kept)
        errors.append(error * s * s if rule.error == "mse" else error * s)
    six, four = errors
    if rule.error == "mse":
        doubt = o.fma(top_d * top_d, o.F(2.0**-23), (six + four) * o.F(2.0**-12))
    else:
        doubt = o.fma(top_d, o.F(2.0**-15), (six + four) * o.F(2.0**-18))
    differ = ~codes[0].same(codes[1])
    close = differ & (o.abs(four - six) < doubt)
    pick = differ & (four < six)
    chosen = [o.where(pick, a, b) for a, b in zip(rounded[1], rounded[0], strict=True)]
    quick = [*e2m1_words(o, chosen, sign_words(o, words, dtype)), o.where(pick, codes[1], codes[0])]

    def specified():
        again = [o.opaque(w) for w in words]  # nothing of this may be shared with, or moved into, the quick way
        values = to_floats(o, again, dtype)
        sixes, fours = (_specified_candidate(o, values, code, nv, rule) for code in codes)
        pick = fours[1] < sixes[1]
        chosen = [o.where(pick, a, b) for a, b in zip(fours[0], sixes[0], strict=True)]
        return [*e2m1_words(o, chosen, sign_words(o, again, dtype)), o.where(pick, codes[1], codes[0])]

    return o.rarely(close | (y_top >= o.F(7.0)), specified, quick)


def _specified_candidate(o, values, code, nv: NvScale, rule):
    """(r of each value, error) as `reference._nv_error` has it: q*s*amax/(6M) - x, summed in element order."""
    s, factor = _encode(o, code, nv)
    top = o.F(6.0 * rule.e4m3_max)
    one, three_halves = o.div(s * nv.amax, top), o.div(o.F(1.5) * s * nv.amax, top)
    total, kept = o.F(0.0), []
    for v in values:
        r, t = round_e2m1(o, o.fmin(o.abs(v * factor), o.F(6.0)))
        q = o.fma(t, o.F(-ROUND), r)
        odd = o.bits(q).same(o.bits(t * o.F(1.5)))
        d = o.where(odd, t * three_halves, q * one) - o.abs(v) * nv.shift
        term = o.abs(d) if rule.error == "mae" else o.mul_rounded(d, d)
        total = total + term
        kept.append(r)
    return kept, total


def encode_unit(o, words, dtype: str, values, lanes: int, nv: NvScale | None, fmt: BlockFormat):
    """(words of codes, scale) of one thread's values; `lanes` neighbouring threads share a block. nv: formats that have
    a global scale."""
    amax = group_max(o, amax_bits(o, words, dtype), lanes)
    if nv is not None:
        return nvfp4_block(o, words, dtype, amax, nv, fmt)
    scale, factor = (mx_scale if fmt.scale == "e8m0" else fp8_scale)(o, amax, fmt)
    scaled = [v * factor for v in values]
    if fmt.element == "e4m3":
        return e4m3_words(o, scaled), scale
    rounded = [round_saturated(o, y) for y in scaled]
    nan = scale.same(o.U(255))
    return [o.where(nan, o.U(0), w) for w in e2m1_words(o, rounded, sign_words(o, words, dtype))], scale


def swiglu(o, gate, up, activation: str, alpha: float, limit: float):
    """act(gate) * up in float32. "silu", or "swiglu_oai": clip(g) * sigmoid(alpha*g) * (clip(u) + 1)."""
    if activation == "swiglu_oai":
        gate = o.fmin(gate, o.F(limit))
        up = o.fmax(o.fmin(up, o.F(limit)), o.F(-limit)) + o.F(1.0)
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
