"""4-over-6: a thread's NVFP4 block with the better of the scales that map its maximum to 6 and to 4.

Both candidates' codes are found in few instructions, and the errors are compared in integers (`_quick`). Where that may
not settle it, the specified order of operations is followed (`specified`): one block in 1500 of normal data.

What the codes cost is what limits 4-over-6. y is a magnitude over its scale, as the reference rounds it to float32.

Map-to-4: y is at most 4.5, where E2M1 has steps of 1/2 up to 2 and of 1 from there on. So has float32 on the two sides
of 2^23: the bits of y + (2^23 - 2) are those of 2^23 - 2 plus the code, rounded once, to nearest even.

Map-to-6: float16's bits as an integer grow by 512 from each E2M1 value to the next where 1 is its smallest normal
number, hence y * 2^-14. A code is then known from the top byte, (N + 1) >> 1, if no bit that was rounded away matters.
y * (1 + 2^-9) sees to that: it puts the seven values at which E2M1 rounds in the middle between two float16, with
neighbours whose parity resolves the tie as E2M1 does. Rounded to float16 (two values for one instruction), and times
LOWER, which takes what 2^-9 added off again and also rounds, the first value of each code is a multiple of 256. Four
high bytes become a word by one PRMT.

Squared errors of 16-bit values: with x = rho * X / S and integers X, the error of a candidate with scale s is
sum (s*q - rho*X)^2 in squared decode scales, of which sum (rho*X)^2 is the same for both. The others, s^2 * sum q^2 and
s * rho * sum q*X, have integer sums, exact from byte products: X is x in 16 bits with the block's maximum at the top,
exact down to 1/24 of it, below which q is 0 for both scales. Where the difference of the errors is smaller than
DOUBT * s^2, where the row's S is outside [2^-100, 2^90), and where the block's scale is below 2^-6, so large that
map-to-4 may saturate, or not a number, the specified order is followed. Roundings make the difference of the errors
differ from the specified one by an estimated 5 * 2^-24 * sum (x/s)^2 at most, where x/s is at most 6.375: 2e-4 s^2,
which DOUBT covers (1.4e-4 was the most in 5 million blocks made for it).
"""

from __future__ import annotations

from . import lane
from .formats import FourOverSix

LIFT, LOWER = (1 + 2.0**-9) * 2.0**-14, 1 - 5 * 2.0**-11
STEPS = 2**23 - 2  # float32 bits 0x4AFFFFFC
SMALLEST, LARGEST = 2.0**-6, 300.0  # of map-to-6's scale before rounding; 1.5 * 300 rounds to 448
DOUBLED = (0x03020100, 0x0C080604)  # bytes 2q of the E2M1 codes 0..7
DOUBT = 2.0**-12  # of the squared scale


def encode_block(o, words, dtype: str, nv: lane.NvScale, rule: FourOverSix):
    """(the two words of codes, scale code in the lowest byte) of the better candidate."""
    top = o.float(lane.amax_bits(o, words, dtype))
    if rule.error != "mse" or dtype == "f32":
        *codes, scale = specified(o, words, dtype, top, nv, rule)
        return codes, scale
    return _quick(o, words, dtype, top, nv, rule)


def _quick(o, words, dtype: str, top, nv: lane.NvScale, rule: FourOverSix):
    encode, decode = nv.plain
    zero = o.bits(top).same(o.U(0))
    base = o.div_constant(top, 6.0) * encode
    largest = o.where((encode >= o.F(2.0**-100)) & (encode < o.F(2.0**90)), o.F(LARGEST), o.F(0.0))
    fits = zero | ((base >= o.F(SMALLEST)) & (base < largest))
    both = o.e4m3x2(base, base * o.F(1.5))
    six, four = o.e4m3x2_to_float(both)
    scale_six = six * decode
    to_six, to_four = o.where(zero, o.F(0.0), o.rcp(scale_six)), o.rcp(four * decode)
    exponent = o.bits(top) >> 23
    four_rho = encode * o.float((exponent - 13) << 23)
    errors = Errors(o, nv, scale_six * o.float((o.U(269) - exponent) << 23))
    for loaded in errors.by_eight(words, dtype):
        scaled = [o.abs(v) * to_six for v in loaded]
        errors.mapped_to_six(scaled)
        to_six_codes = codes_to_seven(o, scaled)
        to_four_codes = codes_to_six(o, [o.abs(v) * to_four for v in loaded], errors.sixteen, errors.left)
        errors.add(0, to_six_codes)
        errors.add(1, to_four_codes)
    difference, doubt = errors.compare(six, four, four_rho)
    map_to_four = difference < o.F(0.0)
    codes = lane.signed(o, errors.better(map_to_four), words, dtype)

    def slowly():
        hidden_top = o.float(o.opaque(o.bits(top)))  # so that nothing of this is moved into the quick way
        return specified(o, words, dtype, hidden_top, nv, rule)

    *codes, scale = o.rarely(doubt | ~fits, slowly, [*codes, o.where(map_to_four, both >> 8, both)])
    return codes, scale


def codes_to_seven(o, values):
    """Word of the E2M1 codes of eight float32 values in [0, 7)."""
    pairs = [(0, 2), (4, 6), (1, 3), (5, 7)]
    halves = [o.mul2(o.pack_half(values[a] * o.F(LIFT), values[b] * o.F(LIFT), "f16"), LOWER) for a, b in pairs]
    even, odd = (o.prmt(*halves[i : i + 2], 0x7531) for i in (0, 2))
    return o.select_bits(0x0F0F0F0F, (even + 0x01010101) >> 1, o.mad(odd, 8, o.U(0x08080808)))


def codes_to_six(o, values, sixteen, left):
    """Word of the E2M1 codes of eight float32 values in [0, 4.5]. sixteen, left: 16 and 2^16 in registers."""
    steps = [o.bits(v + o.F(STEPS)) for v in values]
    halves = []
    for i in (0, 4):
        half = steps[i + 3]
        for k in (2, 1, 0):
            half = o.mad(half, sixteen, steps[i + k])
        halves.append(half)
    return o.mad(halves[1], left, halves[0]) - (0x4AFFFFFC * 0x11111111 & 0xFFFFFFFF)


class Errors:
    """The squared errors of a block's two candidates (0: map-to-6, 1: map-to-4), as the module docstring sums them.

    to_fixed: factor from y of map-to-6 to X, which rounding makes exact.
    """

    def __init__(self, o, nv: lane.NvScale, to_fixed):
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
                yield lane.to_floats(o, part, dtype)

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


def specified(o, words, dtype: str, top, nv: lane.NvScale, rule: FourOverSix):
    """[two words of codes, scale code] of the better candidate, in the specified order of operations."""
    moved = o.fmin(top * nv.shift, o.F(2.0**60))
    base = o.div_constant(moved, 6.0) * nv.encode
    both = o.e4m3x2(base, base * o.F(1.5))
    six, four = o.e4m3x2_to_float(both)

    def candidate(i, best):
        values = lane.to_floats(o, [o.opaque(w) for w in words], dtype)  # in each round, for want of registers
        first = i.same(o.U(0))
        rounded, error = _specified_candidate(o, values, o.where(first, six, four), nv, rule)
        better = first | (error < o.float(best[3]))
        found = [*lane.e2m1_words(o, rounded), o.where(first, both, both >> 8), o.bits(error)]
        return [o.where(better, a, b) for a, b in zip(found, best, strict=True)]

    *codes, scale, _ = o.loop(2, [o.U(0)] * 4, candidate)
    nan = o.bits(top) >= o.U(lane.INF)
    return [
        *(o.where(nan, o.U(0), w) for w in lane.signed(o, codes, words, dtype)),
        o.where(nan, o.U(0x7F), scale),
    ]


def _specified_candidate(o, values, s, nv: lane.NvScale, rule: FourOverSix):
    """(r of each value, error) as `reference._nv_error` has it: q*s*amax/(6M) - x, summed in element order."""
    factor = lane.encode_factor(o, s, nv)
    top = 6.0 * rule.e4m3_max
    one, three_halves = o.div_constant(s * nv.amax, top), o.div_constant(o.F(1.5) * s * nv.amax, top)
    total, kept = o.F(0.0), []
    for v in values:
        r, m = lane.round_e2m1(o, o.fmin(o.abs(v * factor), o.F(6.0)))
        q = r - m
        power = o.bits(q) & lane.INF  # q is a power of two or 1.5 times one
        value = o.where(power.same(o.bits(q)), q * one, o.float(power) * three_halves)
        d = value - o.abs(v) * nv.shift
        total = total + (o.abs(d) if rule.error == "mae" else o.mul_rounded(d, d))
        kept.append(r)
    return kept, total
