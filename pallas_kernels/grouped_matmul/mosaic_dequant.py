"""Quantised weights turned into BF16 registers in the shape that Hopper's matrix unit takes its first operand in.

A lane of a warpgroup holds, of 64 rows x 128 bytes in shared memory, four consecutive bytes at a time: 4 E4M3 or 8
E2M1 elements. The matrix unit wants columns 2t, 2t+1, 2t+8, 2t+9 of every 16 in lane t (of four). Instead of moving
weights between lanes, the activations' columns are put in the order that the lanes have (`permute_columns`): a sum
does not care.

Both element formats become BF16 by moving their bits to the right place: an E4M3 or E2M1 pattern read as BF16 is its
value times 2^-120 or 2^-126, subnormals included. The multiplication with the block's scale, exact in BF16, brings it
back into range except for a power of two, which the epilogue applies to the sum (`Packed.factor`). E8M0 scales of 2^64
and more come out as infinity; 4-bit weights under scales below 2^-70 lose bits.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

_ELEMENT = {"e4m3": -120, "e2m1": -126}  # exponent of the factor that the bits come with
_E8M0_LIFT = 64  # added to the exponent of an E8M0 scale


@dataclasses.dataclass(frozen=True)
class Packed:
    """How a weight's bytes are read: element and scale as in quantize.BlockFormat, block elements under one scale."""

    element: Literal["e4m3", "e2m1"]
    scale: Literal["e8m0", "e4m3", "f32"]
    block: int

    @property
    def per_byte(self) -> int:
        return 1 if self.element == "e4m3" else 2

    @property
    def chunk(self) -> int:
        """Elements in 128 bytes."""
        return 128 * self.per_byte

    @property
    def scales(self) -> int:
        """Scales of one row in 128 bytes of elements; 0 where a scale covers whole rows of a tile (f32)."""
        return 0 if self.scale == "f32" else self.chunk // self.block

    @property
    def factor(self) -> float:
        """What the accumulated product still has to be multiplied with."""
        if self.scale == "f32":
            return 1.0
        return 2.0 ** -(_ELEMENT[self.element] + (_E8M0_LIFT if self.scale == "e8m0" else 107))


def permute_columns(x: jax.Array, packed: Packed) -> jax.Array:
    """x [M, K] with its columns in the lanes' order, as [K / 64, M, 64]."""
    m, k = x.shape
    if packed.element == "e4m3":
        # position 16j + 8h + 2t + b holds column 16j + 4t + 2b + h
        y = x.reshape(m, k // 16, 4, 2, 2).transpose(0, 1, 4, 2, 3)
    else:
        # position 32j + 8i + 2t + b holds column 32j + 8t + 4b + i
        y = x.reshape(m, k // 32, 4, 2, 4).transpose(0, 1, 4, 2, 3)
    return y.reshape(m, k // 64, 64).transpose(1, 0, 2)


def _ptx(packed: Packed) -> str:
    """One 32-bit word ($n) to BF16 pairs ($0...) in the lanes' order; the scale pair is the operand after the word.

    What the logic unit does (and, shift) counts double: it takes two cycles for a warp. Another can shift to the left.
    """
    return E2M1 if packed.element == "e2m1" else "\n".join(["{", ".reg .b32 a, b;", *_e4m3(packed), "}"])


def _e4m3(packed: Packed) -> list[str]:
    """Magnitudes and signs brought to their places by a shift each, and joined by an exclusive or."""
    lines = []
    for i, (magnitude, sign) in enumerate(((("shl", 4), ("shl", 8)), (("shr", 4), None))):
        lines += [f"{magnitude[0]}.b32 a, $2, {magnitude[1]};", "and.b32 a, a, 0x07F007F0;"]
        if packed.scale == "f32":
            lines += ["mov.b32 b, 0x7B807B80;", "mul.rn.bf16x2 a, a, b;"]
        else:
            lines.append("mul.rn.bf16x2 a, a, $3;")
        lines.append("mov.b32 b, $2;" if sign is None else f"{sign[0]}.b32 b, $2, {sign[1]};")
        lines.append(f"lop3.b32 ${i}, a, b, 0x80008000, 0x78;")  # a ^ (b & sign)
    return lines


def dequantise(w_ref, scale_ref, packed: Packed, *, interpret: bool, piece: int = 0, pieces: int = 1) -> jax.Array:
    """BF16 [64, packed.chunk / pieces] from uint8 [64, 128] and scale bytes [64, packed.scales] (or None).

    Both in shared memory; the piece-th part of the columns, so that a caller with few registers can go part by part.
    """
    if interpret:
        values = _dequantise_jnp(w_ref[...], None if scale_ref is None else scale_ref[...], packed)
        width = packed.chunk // pieces
        return values[:, piece * width : (piece + 1) * width]
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import fragmented_array as fa
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    wg_swizzle = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
    outs = 2 if packed.element == "e4m3" else 4
    ptx = _ptx(packed)
    refs = (w_ref,) if scale_ref is None else (w_ref, scale_ref)
    types = (plgpu.RefType(wg_swizzle), plgpu.RefType())[: len(refs)]
    shape = (64, packed.chunk // pieces)

    @plgpu.inline_mgpu(
        arg_types=types,
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def convert(ctx, data, scales=None):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        const = lambda v: arith.constant(i32, v)  # noqa: E731
        data = mgpu.FragmentedArray.load_tiled(data, swizzle=128, is_signed=False, layout=fa.WGMMA_LAYOUT_8BIT)
        words = data.registers.reshape(8, 2)  # [16 bytes of a row, rows g and g + 8 of a warp's 16]
        mine = range(8 // pieces * piece, 8 // pieces * (piece + 1))
        out = np.empty((8 // pieces * outs, 2), dtype=object)
        if scales is not None:
            v = packed.scales
            layout = fa.TiledLayout(
                fa.Tiling(((64, v), (16, v), (8, v))),
                warp_dims=(-6,),
                lane_dims=(-2, fa.Replicated(4)),
                vector_dim=-1,
            )
            scales = mgpu.FragmentedArray.load_untiled(scales, layout=layout, is_signed=False, optimized=False)
        if packed.scale == "e4m3":  # lanes 0, 1 and lanes 2, 3 are in different blocks of 16
            high = arith.andi(arith.shrui(mgpu.utils.thread_idx(), const(1)), const(1))
            select = arith.addi(const(0x4240), arith.muli(high, const(0x0101)))
        for half in range(2):
            if scales is not None:
                packed_scales = scales.registers.reshape(2)[half]
                as_words = mgpu.utils.bitcast(packed_scales, ir.VectorType.get((packed.scales // 4,), i32))
                scale_words = [
                    vector.extract(as_words, dynamic_position=[], static_position=[i])
                    for i in range(packed.scales // 4)
                ]
            for j in mine:
                word = mgpu.utils.bitcast(words[j, half], i32)
                scale = const(0)
                if scales is not None:
                    if j % 2 == 0:
                        if packed.scale == "e4m3":
                            two = _asm(llvm, i32, [scale_words[j // 2], select], _E4M3_SCALES)
                        else:
                            first, second = (i * 16 * packed.per_byte // packed.block for i in (j, j + 1))
                            pick = const(0x4040 + first % 4 + (second % 4 << 8))
                            two = _asm(llvm, i32, [scale_words[first // 4], pick], _E8M0_SCALES)
                    scale = _asm(llvm, i32, [two], BROADCAST[j % 2])
                struct = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * outs)})>")
                constraints = ",".join(["=&r"] * outs + ["r", "r"])
                result = llvm.inline_asm(struct, [word, scale], ptx, constraints)
                for i in range(outs):
                    value = llvm.extractvalue(i32, result, [i])  # pyright: ignore[reportArgumentType]
                    out[(j - mine[0]) * outs + i, half] = mgpu.utils.bitcast(value, pair)
        out = out.reshape(fa.WGMMA_LAYOUT.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=out, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    return convert(*refs)  # pyright: ignore[reportReturnType]


#: A word of 8 elements (n0 lowest) as four BF16 pairs (n_i, n_{i+4}). Sign and magnitude of two nibbles of each half
#: are brought into one word, 6 places further apart than they were: then a mask leaves the pair of one of them, a shift
#: and a mask that of the other.
E2M1 = """{ .reg .b32 a, b;
shr.u32 a, $4, 6; lop3.b32 a, a, $4, 0x01DC01DC, 0xE4;
and.b32 b, a, 0x81C081C0; mul.rn.bf16x2 $3, b, $5;
shl.b32 b, a, 4; and.b32 b, b, 0x81C081C0; mul.rn.bf16x2 $2, b, $5;
shl.b32 a, $4, 2; shl.b32 b, $4, 8; lop3.b32 a, a, b, 0x01DC01DC, 0xE4;
and.b32 b, a, 0x81C081C0; mul.rn.bf16x2 $1, b, $5;
shl.b32 b, a, 4; and.b32 b, b, 0x81C081C0; mul.rn.bf16x2 $0, b, $5; }"""
# The scales of two words at once, as BF16. E8M0 bytes become exponents, + 64 and at most that of infinity.
_E8M0_SCALES = """{ .reg .b32 z; mov.b32 z, 0; prmt.b32 $0, $1, z, $2; mov.b32 z, 0x00BF00BF; min.u16x2 $0, $0, z;
mad.lo.u32 $0, $0, 128, 0x20002000; }"""
# E4M3 bits (a scale has no sign) as BF16 are scale * 2^-120: times 2^127 and 2^100.
_E4M3_SCALES = """{ .reg .b32 z, p; mov.b32 z, 0; prmt.b32 p, $1, z, $2; shl.b32 p, p, 4;
mov.b32 z, 0x7F007F00; mul.rn.bf16x2 p, p, z; mov.b32 z, 0x71807180; mul.rn.bf16x2 $0, p, z; }"""
BROADCAST = (  # of one half, which the multiplication takes as it is: no instruction
    "{ .reg .b16 a, b; mov.b32 {a, b}, $1; mov.b32 $0, {a, a}; }",
    "{ .reg .b16 a, b; mov.b32 {a, b}, $1; mov.b32 $0, {b, b}; }",
)


def _asm(llvm, result_type, operands, text):
    return llvm.inline_asm(result_type, operands, text, ",".join(["=&r"] + ["r"] * len(operands)))


def decoded(data: jax.Array, scales: jax.Array | None, packed: Packed) -> jax.Array:
    """uint8 [rows, bytes] and scale bytes as BF16 [rows, elements], divided by packed.factor where there are scales."""
    data = data.astype(jnp.int32)
    if packed.element == "e4m3":
        value = _minifloat(data, 4, 3)
    else:
        value = _minifloat(jnp.stack([data & 15, data >> 4], axis=-1).reshape(data.shape[0], -1), 2, 1)
    if scales is not None:
        bits = scales.astype(jnp.int32)
        scale = _minifloat(bits, 4, 3) if packed.scale == "e4m3" else jnp.exp2(bits.astype(jnp.float32) - 127.0)
        value = value * jnp.repeat(scale / packed.factor, packed.block, axis=1)
    return value.astype(jnp.bfloat16)


def _dequantise_jnp(data: jax.Array, scales: jax.Array | None, packed: Packed) -> jax.Array:
    """The same values in the same order, for the interpreter."""
    value = decoded(data, scales, packed)
    if packed.element == "e4m3":
        value = value.reshape(64, -1, 4, 2, 2).transpose(0, 1, 4, 2, 3)
    else:
        value = value.reshape(64, -1, 4, 2, 4).transpose(0, 1, 4, 2, 3)
    return value.reshape(64, packed.chunk)


def _minifloat(bits: jax.Array, exponent: int, mantissa: int) -> jax.Array:
    """Float32 values of small floats given as int32 bits, without NaN and infinities."""
    e = ((bits >> mantissa) & (2**exponent - 1)).astype(jnp.float32)
    m = (bits & (2**mantissa - 1)).astype(jnp.float32) / 2.0**mantissa
    bias = 2.0 ** (exponent - 1) - 1
    magnitude = jnp.where(e == 0, m * 2.0 ** (1 - bias), (1 + m) * jnp.exp2(e - bias))
    return jnp.where(bits >> (exponent + mantissa) == 1, -magnitude, magnitude)
