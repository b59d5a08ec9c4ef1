"""The arithmetic of one thread of the quantisation kernels, equal to `reference` bit for bit.

A thread owns V consecutive values of a row (V divides the block size B, so B/V neighbouring threads share a block). The
functions take an operations object `o` (`emit.Ops` in kernels, a numpy double in tests) and lists of registers: words
(uint32, two packed 16-bit values, the first in the low half) or float32 values.

E2M1 rounding: with T = 2^e the power of two below max(|y|, 1), the step of E2M1 at y is T/2. r = fma(T, 2^22 + 3, |y|)
rounds |y| to that step, to nearest even, and leaves n + 6 (n = |y| in steps) in its lowest bits; the code is n + 2e, and
r + (r >> 22) has it in its lowest four bits.
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


def round_e2m1(o, y):
    """(r, T) of the module docstring, and |y| saturated at 6."""
    a = o.fmin(o.abs(y), o.F(6.0))
    t = o.float(o.bits(o.fmax(a, o.F(1.0))) & INF)
    return o.fma(t, o.F(ROUND), a), t


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
    s = o.div(o.float(o.umin(o.umax(amax, o.U(float_bits(FP8_EPS))), o.U(FLT_MAX_BITS))), o.F(448.0))
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
    """(S, g, stored g) of a row from the bits of its finite maximum."""
    top = 6 * e4m3_max
    zero = amax.same(o.U(0))
    s = o.div(o.F(top), o.float(o.umax(amax, o.U(float_bits(top / MAX_ENCODE)))))
    s = o.where(zero, o.F(1.0), o.fmin(s, o.F(MAX_ENCODE)))
    g = o.rcp(s)
    return s, g, o.where(zero, o.F(0.0), g)


def _encode(o, code, nv: NvScale):
    """Value of a block scale code and the factor that takes x to E2M1's range."""
    s, _ = o.e4m3x2_to_float(code)
    return s, o.where(code.same(o.U(0)), o.F(2.0**127), o.rcp(s * nv.decode) * nv.shift)


def nvfp4_block(o, values, amax, nv: NvScale, fmt: BlockFormat):
    """(rounded values, scale code, nan) for one block of which this thread holds `values`."""
    nan = amax >= o.U(INF)
    top = o.float(o.where(nan, o.U(0), amax)) * nv.shift
    if fmt.four_over_six is None:
        code = o.e4m3x2(o.fmin(top * nv.sixth, o.F(448.0)), o.F(0.0))
        _, factor = _encode(o, code, nv)
        rounded = [round_e2m1(o, v * factor)[0] for v in values]
    else:
        rounded, code = _four_over_six(o, values, top, nv, fmt.four_over_six)
    return rounded, o.where(nan, o.U(0x7F), code), nan


def _four_over_six(o, values, top, nv: NvScale, rule):
    top = o.where(top < o.F(2.0**-60), o.F(0.0), o.fmin(top, o.F(2.0**60)))
    base = o.div(top, o.F(6.0)) * nv.encode
    moved = [o.abs(v) * nv.shift for v in values]
    tried = []
    for factor in (1.0, 1.5):
        code = o.e4m3x2(o.fmin(base * o.F(factor), o.F(448.0)), o.F(0.0))
        s, encode = _encode(o, code, nv)
        rounded = [round_e2m1(o, v * encode) for v in values]
        step = s * nv.decode
        error = o.F(0.0)
        for (r, t), x in zip(rounded, moved, strict=True):
            q = o.fma(t, o.F(-ROUND), r)
            d = o.fma(q, step, -x)
            error = o.fma(d, d, error) if rule.error == "mse" else error + o.abs(d)
        tried.append((code, s, [r for r, _ in rounded], [t for _, t in rounded], error))
    (code6, s6, r6, t6, e6), (code4, s4, r4, t4, e4) = tried
    # A decoded value is within 2^-21 of the largest one of what the specified order of operations gives. Only where the
    # errors are closer than that can explain, the specified order decides, and it is evaluated only there.
    if rule.error == "mse":
        doubt = o.fma(top * top, o.F(2.0**-23), (e4 + e6) * o.F(2.0**-12))
    else:
        doubt = o.fma(top, o.F(2.0**-15), (e4 + e6) * o.F(2.0**-18))
    close = o.abs(e4 - e6) < doubt
    differ = ~code4.same(code6)
    near = close & differ

    def specified():
        e6x = _exact_error(o, r6, t6, s6, moved, nv, rule)
        return _exact_error(o, r4, t4, s4, moved, nv, rule) - e6x

    gap = o.rarely(near, specified, e4 - e6)
    four = differ & (gap < o.F(0.0))
    return [o.where(four, a, b) for a, b in zip(r4, r6, strict=True)], o.where(four, code4, code6)


def _exact_error(o, rounded, powers, s, moved, nv: NvScale, rule):
    """The error of `reference._nv_error`: q*s*amax/(6M) - x, summed in element order."""
    top = o.F(6.0 * rule.e4m3_max)
    one, three_halves = o.div(s * nv.amax, top), o.div(o.F(1.5) * s * nv.amax, top)
    total = None
    for r, t, x in zip(rounded, powers, moved, strict=True):
        q = o.fma(t, o.F(-ROUND), r)
        odd = o.bits(q).same(o.bits(t * o.F(1.5)))
        d = o.where(odd, t * three_halves, q * one) - x
        term = o.abs(d) if rule.error == "mae" else o.mul_rounded(d, d)
        total = term if total is None else total + term
    return total


def swiglu(o, gate, up, activation: str, alpha: float, limit: float):
    """act(gate) * up in float32. "silu", or "swiglu_oai": clip(g) * sigmoid(alpha*g) * (clip(u) + 1)."""
    if activation == "swiglu_oai":
        gate = o.fmin(gate, o.F(limit))
        up = o.fmax(o.fmin(up, o.F(limit)), o.F(-limit)) + o.F(1.0)
    else:
        alpha = 1.0
    sigmoid = o.rcp_approx(o.exp2_approx(gate * o.F(-alpha * 1.4426950408889634)) + o.F(1.0))
    return gate * sigmoid * up
