"""4-bit weights by the warps' own matrix instruction: its assembly, and which bytes a lane reads, in numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from aot_report import aot_report
from test_grouped_matmul_dequant import PACKED, elements, halves, pair, run

from jmoe import compat
from pallas_kernels.compat import REGISTERS_MOVE
from pallas_kernels.grouped_matmul import Gate, mosaic_entry, mosaic_warp, tuning
from pallas_kernels.quantize import quantize_weights

PACKED = [p for p in PACKED if p.element == "e2m1"]


def every_scale(packed):
    """Words of a lane's block scales, uint32 [n], and their values, float64 [blocks, n]: every code in every place."""
    if packed.scale == "e4m3":
        codes = np.stack([np.roll(np.arange(127), 31 * i) for i in range(4)]).astype(np.uint8)
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(float)
    else:
        codes = np.stack([np.arange(60, 191), np.arange(60, 191)[::-1]]).astype(np.uint8)
        values = 2.0 ** (codes.astype(float) - 127)
    return sum(c.astype(np.uint32) << np.uint32(8 * i) for i, c in enumerate(codes)), values


def products(word, scale, packed):
    """The four registers that a word of elements becomes, times the scale [n] of its block."""
    return run(mosaic_warp.E2M1, 4, [word, pair(np.stack([scale, scale]))])


@pytest.mark.parametrize("packed", PACKED, ids=str)
def test_every_4_bit_code_times_every_scale_is_exact(packed):
    words, scales = every_scale(packed)
    registers = run(mosaic_warp.SCALES[packed.scale], len(scales) // 2, [words])
    for q in range(mosaic_warp.WORDS):
        register, upper = mosaic_warp.scale_of(packed, q)
        scale, wanted = halves(registers[register])[upper], scales[8 * q // packed.block]
        for rotation in range(16):  # each of the 16 codes in each of the 8 places
            codes = [(7 * i + rotation) % 16 for i in range(8)]
            word = np.full(words.shape, sum(c << 4 * i for i, c in enumerate(codes)), np.uint32)
            exact = elements(word, packed) * wanted
            for i, result in enumerate(products(word, scale, packed)):
                np.testing.assert_array_equal(halves(result) * packed.factor, exact[[i, i + 4]])


@pytest.mark.parametrize("tokens", [8, 16, 24])
def test_128_threads_arrange_the_columns_in_place(tokens):
    x = np.arange(2 * tokens * 256, dtype=np.uint16).reshape(2, tokens, 256)
    before = x.tobytes()
    after = np.full(len(before), 255, np.uint8)
    writes = np.zeros(len(before), int)
    for thread in range(128):
        source, target = mosaic_warp.arrange_at(thread, tokens)
        for chunk, eight, word in np.ndindex(2, tokens // 8, 2):
            start = chunk * 512 * tokens
            at = source + start + eight * 8 * 512 + word * 16
            row = np.frombuffer(before[at : at + 16], np.uint16)
            to = target + start + word * 64 * tokens + eight * 8 * 64
            after[to : to + 16] = row.reshape(2, 4).T.copy().view(np.uint8).ravel()  # pairs (i, i + 4)
            writes[to : to + 16] += 1
    np.testing.assert_array_equal(writes, 1)
    np.testing.assert_array_equal(after.view(np.uint16).reshape(16, tokens, 32), np.asarray(mosaic_warp.arrange(x)))


@pytest.mark.parametrize("packed", PACKED, ids=str)
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_warpgroup_multiplies_each_weight_with_its_scale_and_its_column(rng, packed, chunks):
    """All bytes that the 128 threads read, decoded and multiplied as the instruction does, give the matrix product."""
    tokens, k = 8, 256 * chunks
    data = rng.integers(0, 256, (64, 128 * chunks), np.uint8)
    scale_bits = rng.integers(*((0, 127) if packed.scale == "e4m3" else (120, 135)), (64, k // packed.block), np.uint8)
    x = rng.integers(-8, 8, (tokens, k)).astype(np.float32)
    # As the copies leave it: eight rows of 128 bytes together, 16 bytes of row r at the place of their number ^ r.
    places = np.arange(8) ^ np.arange(8)[:, None]
    tiles = data.reshape(8, 8, chunks, 8, 16).transpose(0, 2, 1, 3, 4)  # [eight rows, chunk, row, 16 bytes, byte]
    held = np.take_along_axis(tiles, places[None, None, :, :, None], axis=3).tobytes()
    scales, pitch = scale_bits.tobytes(), scale_bits.shape[1]
    arranged = np.asarray(mosaic_warp.arrange(x.reshape(tokens, chunks, 256).swapaxes(0, 1)))
    b_bytes = arranged.tobytes()  # of float32, where the kernel has BF16
    per_lane = packed.scales // 4
    got = np.zeros((64, tokens))
    for chunk, q, warp, half in np.ndindex(chunks, 8, 4, 2):
        a, b = np.zeros((8, 4, 4, 2)), np.zeros((8, 4, 4, 2))  # [g, t, register, half of it]
        for lane in range(32):
            w_at, s_at, x_at = mosaic_warp.operands_at(32 * warp + lane, chunks, pitch, packed.scales)
            at = w_at[q // 4] + chunk * 1024 + half * chunks * 1024 + q % 4 * 4
            word = np.frombuffer(held[at : at + 4], np.uint32)
            at = s_at + chunk * packed.scales + half * 8 * pitch
            codes = np.frombuffer(scales[at : at + per_lane] + bytes(4 - per_lane), np.uint32)
            register, upper = mosaic_warp.scale_of(packed, q)
            scale = halves(run(mosaic_warp.SCALES[packed.scale], per_lane // 2, [codes])[register])[upper]
            at = 2 * (x_at + (chunk * 8 + q) * 512)
            a[lane // 4, lane % 4] = [halves(r)[:, 0] for r in products(word, scale, packed)]
            b[lane // 4, lane % 4] = np.frombuffer(b_bytes[at : at + 32], np.float32).reshape(4, 2)
        rows = 16 * warp + 8 * half + np.arange(8)
        got[rows] += np.einsum("gtrh,mtrh->gm", a, b) * packed.factor
    values = np.stack([data & 15, data >> 4], -1).reshape(64, k)
    values = elements_of(values) * np.repeat(scale_values(scale_bits, packed), packed.block, axis=1)
    np.testing.assert_allclose(got, values @ x.T.astype(float), rtol=1e-12, atol=1e-9)


def elements_of(codes):
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
    return np.where(codes > 7, -magnitude, magnitude)


def scale_values(bits, packed):
    return bits.view(ml_dtypes.float8_e4m3fn).astype(float) if packed.scale == "e4m3" else 2.0 ** (bits - 127.0)


needs_kernels = pytest.mark.skipif(not compat.KERNELS_SUPPORTED, reason=compat.KERNELS_REASON)


@needs_kernels
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("block_t", [8, 16])
def test_the_kernel_lowers_for_a_gpu_that_is_not_there(fmt, parts, block_t):
    x, sizes = jax.ShapeDtypeStruct((48, 512), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
    w = jax.ShapeDtypeStruct((4, 256, 512) if parts == 1 else (4, 2, 256, 512), jnp.bfloat16)
    q = jax.eval_shape(lambda w: quantize_weights(w, fmt), w)
    gate = (Gate("silu"),) if parts == 2 else ()
    product = mosaic_entry.gated if parts == 2 else mosaic_entry.forward
    f = jax.jit(lambda x, w, s: product(x, w, s, *gate, out_dtype=jnp.bfloat16))
    config = dict(block_t=block_t, consumers=2, chunks=1, stages=4, per_sm=1, warp=True)
    with tuning.override({"decode": config, "decode_gated": config}):
        text = f.trace(x, q, sizes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1 and "stablehlo.transpose" not in text  # columns are arranged in the kernel


@pytest.mark.slow
@pytest.mark.aot
@needs_kernels
@pytest.mark.parametrize(
    ("formats", "cases"),
    [("bfloat16", 20), ("mxfp8", 14), ("fp8_128x128", 15 + 2 * REGISTERS_MOVE), ("nvfp4 mxfp4", 36)],
)
def test_every_shipped_rule_compiles_without_spilling_a_register(formats, cases):
    report = aot_report("aot_grouped_matmul.py", *formats.split())
    assert len(report) == cases
    for name, (registers, spilled, serialized) in report.items():
        # The FP8 prefill kernel keeps two totals and two products of a tile of 256 rows. What it spills is where a tile
        # lies, once a tile; with 224 registers for its warpgroups it spills less and takes 870 instead of 767 us.
        allowed = 184 if name == "fp8" else 0
        assert spilled <= allowed and 0 < registers <= 168 and not serialized, (name, registers, spilled, serialized)
