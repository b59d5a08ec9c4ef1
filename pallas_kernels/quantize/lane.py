"""The arithmetic of one thread of the quantisation kernels, equal to `reference` bit for bit.

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
DOUBLED = (0x03020100, 0x0C080604)  # bytes 2q of the E2M1 codes 0..7
DOUBT = (
    2.0**-12
)  # of the squared scale: above what the specified order of operations can be off by, see `_four_over_six`


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


def _round_e2m1(o, y):
    """(r, M) of the module docstring for |y| < 7."""
    m = o.fma(o.float(o.bits(y) & 0x40800000), o.F(SLOPE), o.F(BASE))
    return o.abs(y) + m, m


def round_saturated(o, y):
    """r of the module docstring for any y but NaN."""
    return _round_e2m1(o, o.fmin(o.abs(y), o.F(6.0)))[0]


def e2m1_words(o, rounded, sixteen=16):
    """Codes of the magnitudes, eight to a word, from r of `_round_e2m1`."""
    out = []
    for i in range(0, len(rounded), 8):
        halves = []
        for j in (i, i + 4):
            half = o.bits(rounded[j + 3])
            for k in (2, 1, 0):
                half = o.mad(half, sixteen, o.bits(rounded[j + k]))
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


def _encode(o, s, nv: NvScale):
    """What takes x to E2M1's range for the block scale s (float32)."""
    return o.where(o.bits(s).same(o.U(0)), o.F(2.0**127), o.rcp(s * nv.decode) * nv.shift)


def nvfp4_block(o, words, dtype: str, amax, nv: NvScale, fmt: BlockFormat):
    """(packed codes, scale code) of the block that this thread's words belong to; 4-over-6 wants a whole block."""
    if fmt.four_over_six is not None:
        return _four_over_six(o, words, dtype, o.float(amax), nv, fmt.four_over_six)
    nan = amax >= o.U(INF)
    top = o.float(o.where(nan, o.U(0), amax))
    code = o.e4m3x2(o.fmin(top * nv.shift * nv.sixth, o.F(448.0)), o.F(0.0))
    factor = _encode(o, o.e4m3x2_to_float(code)[0], nv)
    codes = e2m1_words(o, [round_saturated(o, v * factor) for v in to_floats(o, words, dtype)])
    return [o.where(nan, o.U(0), w) for w in signed(o, codes, words, dtype)], o.where(nan, o.U(0x7F), code)


def _four_over_six(o, words, dtype: str, top, nv: NvScale, rule):
    """(the two words of codes, scale code in the lowest byte) of the better candidate.

    Squared errors of 16-bit values: with x = rho * X * (decode scale) and integers X, the error of a candidate with
    scale s is sum (s*q - rho*X)^2 in squared decode scales, of which sum (rho*X)^2 is the same for both. The others,
    s^2 * sum q^2 and s * rho * sum q*X, have integer sums, exact from byte products: X is x in 16 bits with the block's
    maximum at the top, exact down to 1/24 of it, below which q is 0 for both scales. The difference is then good to
    1e-4 s^2, and so is the one that the specified order of operations gives. Where it is smaller than DOUBT * s^2, or a
    value saturates or is not a number, that order is followed; one block in 1500 of normal data needs it.
    """
    both, six, four, moved = _two_scales(o, top, nv)

    def as_specified():
        values = to_floats(o, [o.opaque(w) for w in words], dtype)  # nothing of this may be moved into the quick way
        return _specified(o, lambda: values, words, dtype, top, (both, six, four), nv, rule)

    if rule.error != "mse" or dtype == "f32":
        *codes, scale = as_specified()
        return codes, scale
    exponent = o.bits(moved) >> 23
    four_rho = nv.encode * o.float((exponent - 13) << 23)
    errors = Errors(o, nv, six * nv.decode * o.float((o.U(269) - exponent) << 23))
    factors = [_encode(o, six, nv), o.rcp(four * nv.decode) * nv.shift]  # four is 0 only where six is: map-to-6 then
    for values in errors.by_eight(words, dtype):
        for k, factor in enumerate(factors):
            scaled = [o.abs(v) * factor for v in values]
            if k == 0:
                errors.mapped_to_six(scaled)
            (codes,) = e2m1_words(o, [_round_e2m1(o, y)[0] for y in scaled], errors.sixteen)
            errors.add(k, codes)
    difference, doubt = errors.compare(six, four, four_rho)
    fits = top * factors[0] < o.F(7.0)
    map_to_four = difference < o.F(0.0)
    codes = signed(o, errors.better(map_to_four), words, dtype)
    *codes, scale = o.rarely(doubt | ~fits, as_specified, [*codes, o.where(map_to_four, both >> 8, both)])
    return codes, scale


class Errors:
    """The squared errors of a block's two candidates (0: map-to-6, 1: map-to-4), as `_four_over_six` sums them.

    to_fixed: factor from y of map-to-6 to X, which rounding makes exact.
    """

    def __init__(self, o, nv: NvScale, to_fixed):
        self.o, self.to_fixed = o, to_fixed
        # A multiply-add by a known power of two becomes a shift, in the pipe of the logic instructions, which these
        # kernels fill; a table that is a known constant, or the same in all threads, is copied for each use.
        self.sixteen, self.left = nv.hidden + 16, nv.hidden + 0x10000
        self.table = [o.hidden_zero() + DOUBLED[0], o.U(DOUBLED[1])]
        # The second constant undoes what the first leaves above bit 15.
        self.lifts = o.F(2.0**23), o.F(2.0**23 + 0x10000 - 0x4B00)
        self.fixed = []
        self.packed, self.squares, self.products = ([], []), [o.U(0), o.U(0)], [o.U(0), o.U(0)]

    def by_eight(self, words, dtype: str):
        """The block's 16-bit values as float32, eight at a time: registers."""
        o = self.o
        for part in (words[: len(words) // 2], words[len(words) // 2 :]):
            if dtype == "bf16":
                yield [o.float(v) for w in part for v in (o.mad(w, self.left, o.U(0)), w & 0xFFFF0000)]
            else:
                yield to_floats(o, part, dtype)

    def mapped_to_six(self, scaled):
        """Takes X from eight magnitudes over the scale of map-to-6, before codes of them are added."""
        o = self.o
        low, high = ([o.bits(o.fma(y, self.to_fixed, c)) for y in scaled[n::2]] for n, c in enumerate(self.lifts))
        self.fixed = [o.mad(b, self.left, a) for a, b in zip(low, high, strict=True)]

    def add(self, k: int, codes):
        """Adds the codes of eight values to candidate k."""
        o = self.o
        self.packed[k].append(codes)
        for i, half in enumerate((codes, codes >> 16)):
            doubled = o.prmt(*self.table, half)
            self.squares[k] = o.dot4(doubled, doubled, self.squares[k])
            self.products[k] = o.dot2(self.fixed[2 * i], doubled, self.products[k], 0)
            self.products[k] = o.dot2(self.fixed[2 * i + 1], doubled, self.products[k], 1)

    def compare(self, six, four, four_rho):
        """(error of map-to-4 less that of map-to-6, four times; whether its sign is in doubt)."""
        o = self.o
        squares, products = ([o.from_int(v) for v in integers] for integers in (self.squares, self.products))
        # s * (s * sum (2q)^2 - 4 * rho * sum 2q*X) for each.
        sums = zip((six, four), squares, products, strict=True)
        terms = [o.fms(s, squared, four_rho * product) for s, squared, product in sums]
        difference = o.fms(four, terms[1], six * terms[0])
        return difference, o.abs(difference) < six * six * o.F(4 * DOUBT)

    def better(self, map_to_four):
        """The words of codes of the candidate that was chosen, without signs."""
        return [self.o.where(map_to_four, b, a) for a, b in zip(*self.packed, strict=True)]


def _two_scales(o, top, nv: NvScale):
    """(codes of the scales that map to 6 and to 4, their values, the moved maximum)."""
    moved = o.fmin(top * nv.shift, o.F(2.0**60))
    base = o.div_constant(moved, 6.0) * nv.encode
    both = o.e4m3x2(base, base * o.F(1.5))
    return both, *o.e4m3x2_to_float(both), moved


def specified(o, words, dtype: str, top, nv: NvScale, rule):
    """[two words of codes, scale code] of the better candidate, in the specified order of operations."""
    *scales, _ = _two_scales(o, top, nv)
    # Unpacked in each round of its loop, for want of registers.
    return _specified(o, lambda: to_floats(o, [o.opaque(w) for w in words], dtype), words, dtype, top, scales, nv, rule)


def _specified(o, unpacked, words, dtype: str, top, scales, nv: NvScale, rule):
    both, six, four = scales

    def candidate(i, best):
        values = unpacked()
        first = i.same(o.U(0))
        rounded, error = _specified_candidate(o, values, o.where(first, six, four), nv, rule)
        better = first | (error < o.float(best[3]))
        found = [*e2m1_words(o, rounded), o.where(first, both, both >> 8), o.bits(error)]
        return [o.where(better, a, b) for a, b in zip(found, best, strict=True)]

    *codes, scale, _ = o.loop(2, [o.U(0)] * 4, candidate)
    nan = o.bits(top) >= o.U(INF)
    return [*(o.where(nan, o.U(0), w) for w in signed(o, codes, words, dtype)), o.where(nan, o.U(0x7F), scale)]


def _specified_candidate(o, values, s, nv: NvScale, rule):
    """(r of each value, error) as `reference._nv_error` has it: q*s*amax/(6M) - x, summed in element order."""
    factor = _encode(o, s, nv)
    top = 6.0 * rule.e4m3_max
    one, three_halves = o.div_constant(s * nv.amax, top), o.div_constant(o.F(1.5) * s * nv.amax, top)
    total, kept = o.F(0.0), []
    for v in values:
        r, m = _round_e2m1(o, o.fmin(o.abs(v * factor), o.F(6.0)))
        q = r - m
        power = o.bits(q) & INF  # q is a power of two or 1.5 times one
        value = o.where(power.same(o.bits(q)), q * one, o.float(power) * three_halves)
        d = value - o.abs(v) * nv.shift
        total = total + (o.abs(d) if rule.error == "mae" else o.mul_rounded(d, d))
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
    codes = e2m1_words(o, [round_saturated(o, y) for y in scaled])
    nan = scale.same(o.U(255))
    return [o.where(nan, o.U(0), w) for w in signed(o, codes, words, dtype)], scale


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
