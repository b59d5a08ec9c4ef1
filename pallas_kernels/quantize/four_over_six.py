"""4-over-6 of one thread's block of 16-bit values in fewer instructions than `lane` takes, with the same bytes.

Compiled for sm_90 and held to the reference on the host; it has not run on a GPU yet, so that nothing chooses it by
itself: implementation="mosaic_sm90_halves". Once it has, it takes the place of `lane._four_over_six`.

What the codes cost is what limits 4-over-6. y is a magnitude over its scale, as the reference rounds it to float32.

Map-to-4: y is at most 4.5, where E2M1 has steps of 1/2 up to 2 and of 1 from there on. So has float32 on the two sides
of 2^23: the bits of y + (2^23 - 2) are those of 2^23 - 2 plus the code, rounded once, to nearest even.

Map-to-6: float16's bits as an integer grow by 512 from each E2M1 value to the next where 1 is its smallest normal
number, hence y * 2^-14. A code is then known from the top byte, (N + 1) >> 1, if no bit that was rounded away matters.
y * (1 + 2^-9) sees to that: it puts the seven values at which E2M1 rounds in the middle between two float16, with
neighbours whose parity resolves the tie as E2M1 does. Rounded to float16 (two values for one instruction), and times
LOWER, which takes what 2^-9 added off again and also rounds, the first value of each code is a multiple of 256. Four
high bytes become a word by one PRMT.

The errors are summed and compared by `lane.Errors`, with the scales S and g as they are and not moved: rows whose S is
outside [2^-100, 2^90) go the slow way, and so do blocks with a scale below 2^-6 or so large that map-to-4 may saturate.
Roundings make the difference of the errors differ from the specified one by an estimated 5 * 2^-24 * sum (x/s)^2 at
most, where x/s is at most 6.375: 2e-4 s^2, which DOUBT covers (1.4e-4 was the most in 5 million blocks made for it).
"""

from __future__ import annotations

from . import lane
from .formats import BlockFormat

LIFT, LOWER = (1 + 2.0**-9) * 2.0**-14, 1 - 5 * 2.0**-11
STEPS = 2**23 - 2  # float32 bits 0x4AFFFFFC
SMALLEST, LARGEST = 2.0**-6, 300.0  # of map-to-6's scale before rounding; 1.5 * 300 rounds to 448


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


def encode_unit(o, words, dtype: str, values, lanes: int, nv: lane.NvScale | None, fmt: BlockFormat):
    """`lane.encode_unit`; what this file is not for is done there."""
    rule = fmt.four_over_six
    if rule is None or rule.error != "mse" or dtype == "f32" or lanes != 1 or nv is None:
        return lane.encode_unit(o, words, dtype, values, lanes, nv, fmt)
    top = o.float(lane.amax_bits(o, words, dtype))
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
    errors = lane.Errors(o, nv, scale_six * o.float((o.U(269) - exponent) << 23))
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
        return lane.specified(o, words, dtype, hidden_top, nv, rule)

    *codes, scale = o.rarely(doubt | ~fits, slowly, [*codes, o.where(map_to_four, both >> 8, both)])
    return codes, scale


def finite_amax_bits(o, blocks, dtype: str):
    """float32 bits of the largest magnitude of those blocks (lists of words) that have neither NaN nor infinity."""

    def one_by_one():
        top = o.U(0)
        for words in blocks:
            amax = lane.amax_bits(o, words, dtype)
            top = o.umax(top, o.where(amax >= o.U(lane.INF), o.U(0), amax))
        return [top]

    if dtype == "f32":
        return one_by_one()[0]
    top = lane.amax_bits(o, [lane.packed_max(o, words, dtype) for words in blocks], dtype)
    return o.rarely(top >= o.U(lane.INF), one_by_one, [top])[0]
