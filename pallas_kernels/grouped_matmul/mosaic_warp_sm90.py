"""Few rows times 4-bit weights with the warps' own matrix instruction (m16n8k16), for mosaic_decode_sm90.

Each warp turns 8 weights of a register into BF16, multiplies them with their block's scale and hands them to the matrix
unit at once: no other warp to wait for, and few registers in use. (The warpgroup's instruction wants many weights in
registers before it begins, and these stay untouched until it has ended.)

A lane holds 32 consecutive bytes of 128 of a weight's row: 64 elements of E2M1, 4 or 2 block scales. Word q of them has
elements 8q .. 8q + 7; the pair of its i-th and (i + 4)-th is what four instructions leave in a register. The order of
a sum does not matter, so the activations' columns are brought in that order (`arrange_columns`), each lane's 16 bytes
for a word together.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mosaic_dequant import Packed, decoded

ROWS = 64  # of a weight, for one warpgroup
WORDS = 8  # of a lane in 128 bytes
WIDTH = 32  # elements of a row of activations that belong to one word of each of four lanes


def arrange_columns(x: jax.Array) -> jax.Array:
    """x [M, K], K a multiple of 256, as [K / 32, M, 32].

    [8c + q, m, 8t + 2i + b] is column 256c + 64t + 8q + 4b + i: for word q of lane t in 128 bytes c.
    """
    m, k = x.shape
    y = x.reshape(m, k // 256, 4, 8, 2, 4).transpose(1, 3, 0, 2, 5, 4)
    return y.reshape(k // WIDTH, m, WIDTH)


def multiply(accs, w_refs, s_refs, x_ref, packed: Packed, *, interpret: bool) -> list[jax.Array]:
    """accs + weights times activations, for one stage in shared memory.

    accs: float32 [64, T], one of each weight. w_refs: uint8 [64, 128 * chunks]. s_refs: uint8 [64, packed.scales *
    chunks]. x_ref: BF16 [8 * chunks, T, 32].
    """
    chunks = w_refs[0].shape[1] // 128
    if interpret:
        x = x_ref[...].astype(jnp.float32)
        return [acc + _product(w[...], s[...], x, packed) for acc, w, s in zip(accs, w_refs, s_refs, strict=True)]
    tokens = accs[0].shape[1]
    parts = len(accs)
    wg_swizzle = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
    layout = plgpu.Layout.WGMMA
    results = tuple(plgpu.ShapeDtypeStruct((ROWS, tokens), jnp.float32, layout=layout) for _ in accs)

    @plgpu.inline_mgpu(
        arg_types=(
            tuple(layout for _ in accs),
            tuple(plgpu.RefType(wg_swizzle) for _ in accs),
            tuple(plgpu.RefType() for _ in accs),
            plgpu.RefType(),
        ),
        return_type=results,
    )
    def step(ctx, accs, weights, scales, x):
        del ctx
        return _emit(accs, weights, scales, x, packed, parts, chunks, tokens // 8)

    return list(step(tuple(accs), tuple(w_refs), tuple(s_refs), x_ref))  # pyright: ignore[reportCallIssue]


def _product(data, scales, x, packed: Packed):
    """What `multiply` adds, for the interpreter. data [64, 128 C], scales [64, C * packed.scales], x [8 C, T, 32]."""
    values = decoded(data, scales, packed)
    return jnp.einsum("qnk,qtk->nt", arrange_columns(values).astype(jnp.float32), x, preferred_element_type=jnp.float32)


def store_rows(value: jax.Array, out_ref, first, rows, column, inside):
    """value [64, T] transposed to out_ref[first : first + min(rows, T), column : column + 64] in device memory.

    inside: whether to store at all. From registers: what few rows come to is too little for copies to be worth it.
    """
    split = plgpu.Layout.WG_SPLAT
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(), split, split, split))
    def store(ctx, value, out, first, rows, column):
        del ctx
        _emit_store(value, out, *(a.registers.item() for a in (first, rows, column)))

    store(plgpu.layout_cast(value, layout), out_ref, first, jnp.where(inside, rows, 0), column)  # pyright: ignore[reportCallIssue]


def _emit_store(value, out, first, rows, column):
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    i32, i64, i8 = (ir.IntegerType.get_signless(n) for n in (32, 64, 8))
    utils = mgpu.utils
    size = utils.bitwidth(value.mlir_dtype) // 8
    width = out.type.shape[1] if hasattr(out.type, "shape") else ir.MemRefType(out.type).shape[1]

    def const(v):
        return arith.constant(i32, v)

    thread = utils.thread_idx()
    lane, warp = arith.andi(thread, const(31)), arith.andi(arith.shrui(thread, const(5)), const(3))
    group, quad = arith.shrui(lane, const(2)), arith.andi(lane, const(3))
    token = arith.muli(quad, const(2))
    at = arith.addi(column, arith.addi(arith.muli(warp, const(16)), group))
    row = arith.extui(i64, arith.addi(first, token))
    offset = arith.addi(arith.muli(row, arith.constant(i64, width)), arith.extui(i64, at))
    pointer = utils.getelementptr(utils.memref_ptr(out), [arith.muli(offset, arith.constant(i64, size))], i8)
    left = arith.subi(rows, token)  # rows from this lane's first one on; signed
    registers = value.registers.reshape(value.shape[1] // 8, 2)
    kind = {2: ("b16", "h"), 4: ("b32", "r")}[size]
    narrow = ir.IntegerType.get_signless(8 * size)
    for c in range(registers.shape[0]):
        for i in range(2):
            there = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.sgt, left, const(8 * c + i)))
            for h in range(2):
                element = vector.extract(registers[c, h], dynamic_position=[], static_position=[i])
                bits = arith.bitcast(narrow, element)
                here = utils.getelementptr(pointer, [((8 * c + i) * width + 8 * h) * size], i8)
                text = f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.{kind[0]} [$0], $1; }}"
                llvm.inline_asm(None, [here, bits, there], text, f"l,{kind[1]},r,~{{memory}}", has_side_effects=True)


def _emit(accs, weights, scales, x, packed: Packed, parts: int, chunks: int, columns: int):
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    i32, i8, f32 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8), ir.F32Type.get()
    utils = mgpu.utils

    def const(v):
        return arith.constant(i32, v)

    def loaded(pointer, offset: int, words: int, bits: int = 32):
        at = utils.getelementptr(pointer, [offset], i8) if offset else pointer
        if words == 1:
            return llvm.load(ir.IntegerType.get_signless(bits), at, alignment=bits // 8)
        value = llvm.load(ir.VectorType.get((words,), i32), at, alignment=4 * words)
        return [vector.extract(value, dynamic_position=[], static_position=[i]) for i in range(words)]

    def asm(outs: int, operands, text: str, kind=i32, letter="r"):
        outputs, inputs = [f"=&{letter}"] * outs, ["f" if o.type == f32 else "r" for o in operands]
        if outs == 1:
            return [llvm.inline_asm(kind, operands, text, ",".join(outputs + inputs))]
        struct = llvm.StructType.get_literal([kind] * outs)
        packed_result = llvm.inline_asm(struct, operands, text, ",".join(outputs + inputs))
        return [llvm.extractvalue(kind, packed_result, [i]) for i in range(outs)]  # pyright: ignore[reportArgumentType]

    thread = utils.thread_idx()
    lane, warp = arith.andi(thread, const(31)), arith.andi(arith.shrui(thread, const(5)), const(3))
    group, quad = arith.shrui(lane, const(2)), arith.andi(lane, const(3))
    eight_rows = chunks * 1024  # bytes of 8 rows of a weight
    per_lane = packed.scales // 4
    pitch = ir.MemRefType(scales[0].type).get_strides_and_offset()[0][0]

    def bytes_of(*terms):
        total = None
        for value, factor in terms:
            term = arith.muli(value, const(factor)) if factor != 1 else value
            total = term if total is None else arith.addi(total, term)
        return total

    # 16 bytes lie where the row's number within 8 rows says, by exclusive or; a lane wants the (2t)-th and (2t + 1)-th.
    first = arith.muli(arith.xori(arith.shli(quad, const(1)), group), const(16))
    row = bytes_of((warp, 2 * eight_rows), (group, 128))
    w_at = [arith.addi(row, first), arith.addi(row, arith.xori(first, const(16)))]
    s_at = bytes_of((warp, 16 * pitch), (group, pitch), (quad, per_lane))
    x_at = arith.muli(lane, const(16))

    def pointers(refs, offset):
        return [utils.getelementptr(utils.memref_ptr(r), [offset], i8) for r in refs]

    w_ptrs = [pointers(weights, at) for at in w_at]
    s_ptrs, (x_ptr,) = pointers(scales, s_at), pointers([x], x_at)

    zero = arith.constant(f32, 0.0)
    pair = ir.VectorType.get((2,), f32)
    sums = []  # [part][column][which of two][4]
    for acc in accs:
        registers = acc.registers.reshape(columns, 2)
        sums.append(
            [
                [
                    [
                        vector.extract(registers[c, h], dynamic_position=[], static_position=[i])
                        for h in range(2)
                        for i in range(2)
                    ],
                    [zero] * 4,
                ]
                for c in range(columns)
            ]
        )
    for chunk in range(chunks):
        scale = {}  # (part, half): BF16 scales of two blocks in each register
        for part in range(parts):
            for half in range(2):
                offset = chunk * packed.scales + half * 8 * pitch
                word = loaded(s_ptrs[part], offset, 1, 8 * per_lane)
                if per_lane < 4:
                    word = arith.extui(i32, word)
                scale[part, half] = asm(per_lane // 2, [word], SCALES[packed.scale])
        for i in range(2):
            words = {
                (part, half): loaded(w_ptrs[i][part], chunk * 1024 + half * eight_rows, 4)
                for part in range(parts)
                for half in range(2)
            }
            for j in range(4):
                q = 4 * i + j
                x_words = [loaded(x_ptr, ((chunk * WORDS + q) * columns + c) * 512, 4) for c in range(columns)]
                for part in range(parts):
                    values = []
                    for half in range(2):
                        register, upper = _scale_of(packed, q)
                        text = E2M1.replace("SCALE", "{h, h}" if upper else "{l, l}")
                        values.append(asm(4, [words[part, half][j], scale[part, half][register]], text))
                    for k in range(2):
                        a = [values[half][2 * k + h] for h in range(2) for half in range(2)]
                        for c in range(columns):
                            b = x_words[c][2 * k : 2 * k + 2]
                            sums[part][c][k] = asm(4, [*a, *b, *sums[part][c][k]], MMA, f32, "f")
    out = []
    for part, acc in enumerate(accs):
        registers = acc.registers.copy().reshape(columns, 2)
        for c in range(columns):
            total = [arith.addf(p, q) for p, q in zip(*sums[part][c], strict=True)]
            for h in range(2):
                value = llvm.mlir_undef(pair)
                for i in range(2):
                    value = vector.insert(total[2 * h + i], value, dynamic_position=[], static_position=[i])
                registers[c, h] = value
        shape = acc.registers.shape
        out.append(mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=acc.layout, _is_signed=None))
    return tuple(out)


def _scale_of(packed: Packed, q: int) -> tuple[int, int]:
    """Which register, and which half of it, has the scale of a lane's q-th word."""
    block = 8 * q // packed.block
    return (block % 2, block // 2) if packed.scale == "e4m3" else (0, block)


#: A word of 8 elements (n0 lowest) as four BF16 pairs (n_i, n_{i+4}), times one half of the scale pair. Sign and
#: magnitude of two nibbles of each half are brought into one word, 7 places further apart than they were: then a mask
#: leaves the pair of one of them, a shift and a mask that of the other.
E2M1 = """{ .reg .b32 a, b, s; .reg .b16 l, h; mov.b32 {l, h}, $5; mov.b32 s, SCALE;
shr.u32 a, $4, 6; lop3.b32 a, a, $4, 0x01DC01DC, 0xE4;
and.b32 b, a, 0x81C081C0; mul.rn.bf16x2 $3, b, s;
shl.b32 b, a, 4; and.b32 b, b, 0x81C081C0; mul.rn.bf16x2 $2, b, s;
shl.b32 a, $4, 2; shl.b32 b, $4, 8; lop3.b32 a, a, b, 0x01DC01DC, 0xE4;
and.b32 b, a, 0x81C081C0; mul.rn.bf16x2 $1, b, s;
shl.b32 b, a, 4; and.b32 b, b, 0x81C081C0; mul.rn.bf16x2 $0, b, s; }"""
SCALES = {
    # Blocks 0 and 2, then 1 and 3. E4M3 bits (a scale has no sign) as BF16 are scale * 2^-120: times 2^127 and 2^100.
    "e4m3": """{ .reg .b32 a, y, z; mov.b32 y, 0x7F007F00; mov.b32 z, 0x71807180;
shl.b32 a, $2, 4; and.b32 a, a, 0x0FF00FF0; mul.rn.bf16x2 a, a, y; mul.rn.bf16x2 $0, a, z;
shr.b32 a, $2, 4; and.b32 a, a, 0x0FF00FF0; mul.rn.bf16x2 a, a, y; mul.rn.bf16x2 $1, a, z; }""",
    # Bytes become exponents, + 64 and at most that of infinity.
    "e8m0": """{ .reg .b32 z; mov.b32 z, 0; prmt.b32 $0, $1, z, 0x4140; mov.b32 z, 0x00BF00BF; min.u16x2 $0, $0, z;
mad.lo.u32 $0, $0, 128, 0x20002000; }""",
}
MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)
