"""The assembly that turns quantised weights into BF16, run word by word in numpy against the formats' own values."""

import re

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mosaic_dequant
from pallas_kernels.grouped_matmul.mosaic_dequant import Packed

PACKED = [
    Packed("e4m3", "e8m0", 32),
    Packed("e2m1", "e8m0", 32),
    Packed("e2m1", "e4m3", 16),
    Packed("e4m3", "f32", 128),
]


def halves(words):
    """uint32 [n] -> the two BF16 values of each, as float64 [2, n]."""
    words = np.asarray(words, np.uint32)
    return (
        np.stack([(words & 0xFFFF).astype(np.uint16), (words >> 16).astype(np.uint16)])
        .view(ml_dtypes.bfloat16)
        .astype(float)
    )


def pair(values):
    """float [2, n] -> uint32 [n]."""
    bits = np.asarray(values).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    return bits[0] | bits[1] << 16


def lop3(a, b, c, table):
    out = np.zeros_like(a)
    for i in range(8):
        if int(table) >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def prmt(a, b, select):
    source = np.stack([(r >> np.uint32(8 * i)) & np.uint32(255) for r in (a, b) for i in range(4)])
    picks = [(int(select[0]) >> 4 * i) & 7 for i in range(4)]
    return sum(source[p] << np.uint32(8 * i) for i, p in enumerate(picks)).astype(np.uint32)


def each_half(fn, a, b):
    low, high = fn(a & 0xFFFF, b & 0xFFFF), fn(a >> 16, b >> 16)
    return (low | high << 16).astype(np.uint32)


OPERATIONS = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, n: a << n,
    "shr.b32": lambda a, n: a >> n,
    "shr.u32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "min.u16x2": lambda a, b: each_half(np.minimum, a, b),
    "mul.rn.bf16x2": lambda a, b: pair(halves(a) * halves(b)),
    "lop3.b32": lambda a, b, c, table: lop3(a, b, c, table[0]),
    "prmt.b32": prmt,
}


def run(text, outs, operands):
    """The first `outs` operands after `text`, uint32 [n] each."""
    registers = {f"${outs + i}": np.asarray(a, np.uint32) for i, a in enumerate(operands)}
    size = registers[f"${outs}"].shape
    for line in re.split(r"[;{}\n]", text):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, arguments = line.split(None, 1)
        target, *sources = [a.strip() for a in arguments.split(",")]
        values = [registers[a] if a in registers else np.full(size, int(a, 0), np.uint32) for a in sources]
        registers[target] = OPERATIONS[name](*values).astype(np.uint32)
    return [registers[f"${i}"] for i in range(outs)]


def elements(words, packed):
    """The elements of each word in memory order, float64 [4 or 8, n]."""
    if packed.element == "e4m3":
        raw = np.stack([(words >> np.uint32(8 * i)) & np.uint32(255) for i in range(4)]).astype(np.uint8)
        return raw.view(ml_dtypes.float8_e4m3fn).astype(float)
    codes = np.stack([(words >> np.uint32(4 * i)) & np.uint32(15) for i in range(8)])
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
    return np.where(codes > 7, -magnitude, magnitude)


@pytest.mark.parametrize("packed", PACKED, ids=str)
def test_every_element_comes_out_times_its_scale_in_the_order_of_the_lanes(rng, packed):
    words = rng.integers(0, 2**32, 4000, dtype=np.uint32)
    if packed.element == "e4m3":  # without its NaN
        words &= np.uint32(0xFBFBFBFB)
    lift = {"f32": 0, "e8m0": 64, "e4m3": 107}[packed.scale]
    scale = np.ones(4000) if packed.scale == "f32" else rng.integers(8, 16, 4000) * 2.0 ** rng.integers(-12, 4, 4000)
    outs = 4 if packed.element == "e2m1" else 2
    results = run(mosaic_dequant._ptx(packed), outs, [words, pair(np.stack([scale, scale]) * 2.0**lift)])
    value = elements(words, packed)
    for i, result in enumerate(results):
        columns = [i, i + 4] if packed.element == "e2m1" else [i, i + 2]
        exact = value[columns] * scale
        rounded = (exact / packed.factor).astype(np.float32).astype(ml_dtypes.bfloat16).astype(float)
        np.testing.assert_array_equal(halves(result), rounded)
        if packed.element == "e2m1":  # 2 bits times 4 bits: nothing is rounded
            np.testing.assert_array_equal(halves(result) * packed.factor, exact)


@pytest.mark.parametrize("high", [0, 1])
def test_every_e4m3_scale_becomes_bf16_exactly_subnormals_too(high):
    codes = np.arange(127, dtype=np.uint32)  # a scale has no sign, and 127 is NaN
    words = codes << np.uint32(8 * high) | (126 - codes) << np.uint32(8 * high + 16)
    select = np.full(127, 0x4240 + 0x0101 * high, np.uint32)
    (result,) = run(mosaic_dequant._E4M3_SCALES, 1, [words, select])
    value = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(float) * 2.0**107
    np.testing.assert_array_equal(halves(result), [value, value[::-1]])


def test_every_e8m0_scale_becomes_its_power_of_two_or_infinity():
    codes = np.arange(256, dtype=np.uint32)
    (result,) = run(mosaic_dequant._E8M0_SCALES, 1, [codes | codes << np.uint32(8), np.full(256, 0x4140, np.uint32)])
    wanted = np.where(codes < 191, 2.0 ** (codes.astype(float) - 127 + 64), np.inf)
    np.testing.assert_array_equal(halves(result), [wanted, wanted])
