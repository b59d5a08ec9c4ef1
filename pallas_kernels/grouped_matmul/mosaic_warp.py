"""4-bit weights times activations with the warps' own matrix instruction, m16n8k16.

Each warp turns 8 weights of a register into BF16, multiplies them with their block's scale and hands them to the matrix
unit at once: no other warp to wait for, and few registers in use. (The warpgroup's instruction wants many weights in
registers before it begins, and these stay untouched until it has ended.)

A lane holds 32 consecutive bytes of 128 of a weight's row: 64 elements of E2M1, 4 or 2 block scales. Word q of them has
elements 8q .. 8q + 7; the pair of its i-th and (i + 4)-th is what a mask leaves in a register. The order of a sum does
not matter, so the activations' columns are brought in that order (`arrange`), the 16 bytes for one word together.

Lane 4g + t of a warp has weight rows g and g + 8 of the warp's 16, token g of 8, and the t-th quarter of the columns;
of the products rows g and g + 8, tokens 2t and 2t + 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mosaic_dequant import BROADCAST, E2M1, Packed, decoded
from .mosaic_few_rows import ROWS

WORDS = 8  # of a lane in 128 bytes


def arrange_at(thread, tokens: int):
    """Bytes from where and to where one of 128 threads moves the first 16 of its 32 bytes in `arrange`."""
    token, place = thread >> 4, thread & 15
    quad, q = place >> 2, (place & 3) << 1
    return token * 512 + place * 32, q * (64 * tokens) + token * 64 + quad * 16


def operands_at(thread, chunks: int, pitch: int, scales: int):
    """Bytes from where a thread of a warpgroup reads its operands: two of a weight, one of scales, one of activations.

    chunks: pieces of 128 bytes in a row of the weight. pitch: bytes of a row of scales, of which `scales` belong to a
    piece. Eight rows of a piece lie together, and of their 16-byte words the i-th at i ^ row, as the copies leave them.
    """
    lane, warp = thread & 31, (thread >> 5) & 3
    g, t = lane >> 2, lane & 3
    row = warp * (2 * chunks * 1024) + g * 128
    word = ((t << 1) ^ g) << 4
    return (row + word, row + (word ^ 16)), warp * (16 * pitch) + g * pitch + t * (scales // 4), lane * 16


def arrange(x: jax.Array) -> jax.Array:
    """x [chunks, T, 256] as [chunks * 8, T, 32].

    [8c + q, m, 8t + 2i + b] is column 256c + 64t + 8q + 4b + i: for word q of lane t in 128 bytes c.
    """
    chunks, m, _ = x.shape
    return x.reshape(chunks, m, 4, 8, 2, 4).transpose(0, 3, 1, 2, 5, 4).reshape(chunks * WORDS, m, 32)


def arrange_in_place(x_ref):
    """`arrange` in shared memory, by one warpgroup, whose writes are then to be committed."""
    chunks, tokens, _ = x_ref.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(ctx, x):
        del ctx
        _emit_arrange(x, chunks, tokens)

    emit(x_ref)  # pyright: ignore[reportCallIssue]


def multiply(accs, w_refs, s_refs, x_ref, packed: Packed, *, interpret: bool) -> list[jax.Array]:
    """accs + weights times activations, for one stage in shared memory.

    accs: float32 [64, T], one of each weight. w_refs: uint8 [64, 128 * chunks]. s_refs: uint8 [64, packed.scales *
    chunks]. x_ref: BF16 [chunks, T, 256], arranged, or for the interpreter as it came.
    """
    if interpret:
        return [
            acc + _product(w[...], s[...], x_ref[...], packed) for acc, w, s in zip(accs, w_refs, s_refs, strict=True)
        ]
    chunks, tokens = w_refs[0].shape[1] // 128, accs[0].shape[1]
    layout, plain = plgpu.Layout.WGMMA, plgpu.RefType()
    swizzled = plgpu.RefType((plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128)))  # pyright: ignore[reportAbstractUsage]
    results = tuple(plgpu.ShapeDtypeStruct((ROWS, tokens), jnp.float32, layout=layout) for _ in accs)
    each = lambda kind: tuple(kind for _ in accs)  # noqa: E731

    @plgpu.inline_mgpu(arg_types=(each(layout), each(swizzled), each(plain), plain), return_type=results)
    def emit(ctx, accs, weights, scales, x):
        del ctx
        return _emit_multiply(accs, weights, scales, x, packed, chunks, tokens // 8)

    return list(emit(tuple(accs), tuple(w_refs), tuple(s_refs), x_ref))  # pyright: ignore[reportCallIssue]


def end_reading():
    """Before a warpgroup releases what it has read: copies may overwrite it then.

    Arriving on a barrier does not wait for loads whose values are used later (the compiler moves the last products
    behind it), nor does it order them before a copy's writes, which go another way to shared memory.
    """

    @plgpu.inline_mgpu()
    def emit(ctx):
        del ctx
        from jaxlib.mlir.dialects import llvm

        llvm.inline_asm(None, [], "fence.proxy.async.shared::cta;", "~{memory}", has_side_effects=True)

    emit()  # pyright: ignore[reportCallIssue]


def _product(data, scales, x, packed: Packed):
    """What `multiply` adds. data [64, 128 C], scales [64, C * packed.scales], x [C, T, 256] as it came."""
    values = decoded(data, scales, packed).astype(jnp.float32).reshape(ROWS, -1, 256)
    return jnp.einsum("nck,ctk->nt", values, x.astype(jnp.float32), preferred_element_type=jnp.float32)


def scale_of(packed: Packed, q: int) -> tuple[int, int]:
    """Which register that SCALES makes, and which half of it (1: upper), has the scale of a lane's q-th word."""
    block = 8 * q // packed.block
    return (block % 2, block // 2) if packed.scale == "e4m3" else (0, block)


#: The scales of a lane as BF16 pairs.
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


class _Emit:
    """Loads from and stores to shared memory and instructions of one thread, as MLIR."""

    def __init__(self):
        from jax.experimental.mosaic import gpu as mgpu
        from jaxlib.mlir import ir

        from ..quantize.emit import U

        self.utils, self.U = mgpu.utils, U
        self.thread = U(mgpu.utils.thread_idx())
        self.i8, self.i32, self.f32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32), ir.F32Type.get()
        self.four = ir.VectorType.get((4,), self.i32)

    def pointer(self, base, offset):
        """base: a memref or pointer. offset: bytes, U or int."""
        from jaxlib.mlir import ir

        base = self.utils.memref_ptr(base) if isinstance(base.type, ir.MemRefType) else base
        return self.utils.getelementptr(base, [offset if isinstance(offset, int) else offset.v], self.i8)

    def load4(self, pointer):
        from jaxlib.mlir.dialects import llvm, vector

        value = llvm.load(self.four, pointer, alignment=16)
        return [vector.extract(value, dynamic_position=[], static_position=[i]) for i in range(4)]

    def load_narrow(self, pointer, size: int):
        """`size` bytes, 2 or 4, as a word."""
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm

        value = llvm.load(ir.IntegerType.get_signless(8 * size), pointer, alignment=size)
        return value if size == 4 else arith.extui(self.i32, value)

    def store4(self, values, pointer):
        from jaxlib.mlir.dialects import llvm, vector

        value = llvm.mlir_undef(self.four)
        for i, v in enumerate(values):
            value = vector.insert(v, value, dynamic_position=[], static_position=[i])
        llvm.store(value, pointer, alignment=16)

    def asm(self, outs: int, operands, text: str, kind=None):
        """The results of PTX, words or, with `kind`, of that type."""
        from jaxlib.mlir.dialects import llvm

        kind = kind or self.i32
        letter = lambda t: "f" if t == self.f32 else "r"  # noqa: E731
        constraints = ",".join([f"=&{letter(kind)}"] * outs + [letter(o.type) for o in operands])
        if outs == 1:
            return [llvm.inline_asm(kind, operands, text, constraints)]
        both = llvm.inline_asm(llvm.StructType.get_literal([kind] * outs), operands, text, constraints)
        return [llvm.extractvalue(kind, both, [i]) for i in range(outs)]  # pyright: ignore[reportArgumentType]


def _emit_arrange(x, chunks: int, tokens: int):
    e = _Emit()
    source, target = (e.pointer(x, at) for at in arrange_at(e.thread & 127, tokens))
    moved = []
    for chunk in range(chunks):
        for eight in range(tokens // 8):
            start = chunk * 512 * tokens
            for word in range(2):
                r = e.load4(e.pointer(source, start + eight * 8 * 512 + word * 16))
                pairs = [
                    e.asm(1, [r[i // 2], r[i // 2 + 2]], f"prmt.b32 $0, $1, $2, {('0x5410', '0x7632')[i % 2]};")[0]
                    for i in range(4)
                ]
                moved.append((start + word * 64 * tokens + eight * 8 * 64, pairs))
    e.utils.warpgroup_barrier()
    for offset, pairs in moved:
        e.store4(pairs, e.pointer(target, offset))


def _emit_multiply(accs, weights, scales, x, packed: Packed, chunks: int, columns: int):
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    e = _Emit()
    parts = range(len(accs))
    pitch = ir.MemRefType(scales[0].type).get_strides_and_offset()[0][0]
    w_at, s_at, x_at = operands_at(e.thread, chunks, pitch, packed.scales)
    w_ptr = [[e.pointer(w, at) for w in weights] for at in w_at]
    s_ptr, x_ptr = [e.pointer(s, s_at) for s in scales], e.pointer(x, x_at)
    zero = arith.constant(e.f32, 0.0)

    def part_of(value, i):
        return vector.extract(value, dynamic_position=[], static_position=[i])

    # Two sums of each eight tokens, so that an instruction need not wait for the last one. [part][eight][2][4]
    sums = [
        [
            [[part_of(r, i) for r in acc.registers.reshape(columns, 2)[c] for i in range(2)], [zero] * 4]
            for c in range(columns)
        ]
        for acc in accs
    ]
    for chunk in range(chunks):
        scale = {
            (part, half): e.asm(
                packed.scales // 4 // 2,
                [e.load_narrow(e.pointer(s_ptr[part], chunk * packed.scales + half * 8 * pitch), packed.scales // 4)],
                SCALES[packed.scale],
            )
            for part in parts
            for half in range(2)
        }
        for q in range(WORDS):
            if q % 4 == 0:
                words = {
                    (part, half): e.load4(e.pointer(w_ptr[q // 4][part], chunk * 1024 + half * chunks * 1024))
                    for part in parts
                    for half in range(2)
                }
            x_words = [e.load4(e.pointer(x_ptr, ((chunk * WORDS + q) * columns + c) * 512)) for c in range(columns)]
            register, upper = scale_of(packed, q)
            for part in parts:
                values = []
                for half in range(2):
                    both = e.asm(1, [scale[part, half][register]], BROADCAST[upper])
                    values.append(e.asm(4, [words[part, half][q % 4], *both], E2M1))
                for k in range(2):
                    a = [values[half][2 * k + h] for h in range(2) for half in range(2)]
                    for c in range(columns):
                        b = x_words[c][2 * k : 2 * k + 2]
                        sums[part][c][k] = e.asm(4, [*a, *b, *sums[part][c][k]], MMA, e.f32)
    out = []
    for part, acc in enumerate(accs):
        registers = acc.registers.copy().reshape(columns, 2)
        for c in range(columns):
            total = [arith.addf(p, q) for p, q in zip(*sums[part][c], strict=True)]
            for half in range(2):
                value = llvm.mlir_undef(ir.VectorType.get((2,), e.f32))
                for i in range(2):
                    value = vector.insert(total[2 * half + i], value, dynamic_position=[], static_position=[i])
                registers[c, half] = value
        registers = registers.reshape(acc.registers.shape)
        out.append(mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None))
    return tuple(out)
