"""Thread-level code for Mosaic GPU kernels: 32-bit register values with Python operators, emitted as MLIR.

Mosaic's arrays are spread over a warpgroup in layouts made for matrix units. Block quantisation wants one thread to
own a few neighbouring values of a row at any column and row stride, with predicated accesses, so its kernels are
written for one thread, inside `plgpu.inline_mgpu`. `U` (uint32), `F` (float32) and `P` (predicate) wrap an MLIR value;
`Ops` holds what
operators cannot say. The arithmetic in `lane.py` only uses this interface, for which the tests have a numpy double.
"""

from __future__ import annotations

import struct

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, scf


def _i32():
    return ir.IntegerType.get_signless(32)


def _i64():
    return ir.IntegerType.get_signless(64)


def _asm(results, operands, text, constraints, *, effects=False):
    """Inline PTX. results: list of types; returns a list of values."""
    values = [o.v if isinstance(o, (U, F, P)) else o for o in operands]
    if not results:
        llvm.inline_asm(None, values, text, constraints, has_side_effects=effects)
        return []
    if len(results) == 1:
        return [llvm.inline_asm(results[0], values, text, constraints, has_side_effects=effects)]
    struct_type = llvm.StructType.get_literal(results)
    packed = llvm.InlineAsmOp(struct_type, values, text, constraints, has_side_effects=effects).result
    return [llvm.extractvalue(t, packed, ir.DenseI64ArrayAttr.get([i])) for i, t in enumerate(results)]


class P:
    """A predicate."""

    def __init__(self, v):
        self.v = v

    def __and__(self, other):
        return P(arith.andi(self.v, other.v))

    def __or__(self, other):
        return P(arith.ori(self.v, other.v))

    def __invert__(self):
        return P(arith.xori(self.v, arith.constant(ir.IntegerType.get_signless(1), 1)))


class U:
    """uint32."""

    def __init__(self, v):
        self.v = v if isinstance(v, ir.Value) else arith.constant(_i32(), _signed(int(v)))

    def _two(self, fn, other):
        return U(fn(self.v, other.v if isinstance(other, U) else U(other).v))

    def __add__(self, other):
        return self._two(arith.addi, other)

    def __sub__(self, other):
        return self._two(arith.subi, other)

    def __mul__(self, other):
        return self._two(arith.muli, other)

    def __and__(self, other):
        return self._two(arith.andi, other)

    def __or__(self, other):
        return self._two(arith.ori, other)

    def __xor__(self, other):
        return self._two(arith.xori, other)

    def __lshift__(self, other):
        return self._two(arith.shli, other)

    def __rshift__(self, other):
        return self._two(arith.shrui, other)

    def __floordiv__(self, other):
        return self._two(arith.divui, other)

    def __mod__(self, other):
        return self._two(arith.remui, other)

    def _cmp(self, kind, other):
        return P(arith.cmpi(kind, self.v, other.v if isinstance(other, U) else U(other).v))

    def __lt__(self, other):
        return self._cmp(arith.CmpIPredicate.ult, other)

    def __ge__(self, other):
        return self._cmp(arith.CmpIPredicate.uge, other)

    def __gt__(self, other):
        return self._cmp(arith.CmpIPredicate.ugt, other)

    def same(self, other):
        return self._cmp(arith.CmpIPredicate.eq, other)


class F:
    """float32; subnormals are kept."""

    def __init__(self, v):
        self.v = v if isinstance(v, ir.Value) else arith.constant(ir.F32Type.get(), float(v))

    def _two(self, fn, other):
        return F(fn(self.v, other.v if isinstance(other, F) else F(other).v))

    def __add__(self, other):
        return self._two(arith.addf, other)

    def __sub__(self, other):
        return self._two(arith.subf, other)

    def __mul__(self, other):
        return self._two(arith.mulf, other)

    def __neg__(self):
        return F(arith.negf(self.v))

    def _cmp(self, kind, other):
        return P(arith.cmpf(kind, self.v, other.v if isinstance(other, F) else F(other).v))

    def __lt__(self, other):
        return self._cmp(arith.CmpFPredicate.OLT, other)

    def __ge__(self, other):
        return self._cmp(arith.CmpFPredicate.OGE, other)


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def float_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


class Ops:
    """Operations on U, F and P of one thread."""

    U, F = U, F

    def bits(self, x: F) -> U:
        return U(arith.bitcast(_i32(), x.v))

    def float(self, x: U) -> F:
        return F(arith.bitcast(ir.F32Type.get(), x.v))

    def where(self, c: P, a, b):
        return type(a)(arith.select(c.v, a.v, b.v))

    def fma(self, a: F, b: F, c: F) -> F:
        return F(_asm([ir.F32Type.get()], [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f")[0])

    def fms(self, a: F, b: F, c: F) -> F:
        """a * b - c, rounded once."""
        text = "{ .reg .f32 n; neg.f32 n, $3; fma.rn.f32 $0, $1, $2, n; }"
        return F(_asm([ir.F32Type.get()], [a, b, c], text, "=f,f,f,f")[0])

    def mul_rounded(self, a: F, b: F) -> F:
        """a * b, never contracted with a sum."""
        return F(_asm([ir.F32Type.get()], [a, b], "mul.rn.f32 $0, $1, $2;", "=f,f,f")[0])

    def abs(self, a: F) -> F:
        return F(_asm([ir.F32Type.get()], [a], "abs.f32 $0, $1;", "=f,f")[0])

    def fmin(self, a: F, b: F) -> F:
        """The number where the other is NaN."""
        return F(_asm([ir.F32Type.get()], [a, b], "min.f32 $0, $1, $2;", "=f,f,f")[0])

    def fmax(self, a: F, b: F) -> F:
        return F(_asm([ir.F32Type.get()], [a, b], "max.f32 $0, $1, $2;", "=f,f,f")[0])

    def umax(self, a: U, b: U) -> U:
        return U(arith.maxui(a.v, b.v))

    def umin(self, a: U, b: U) -> U:
        return U(arith.minui(a.v, b.v))

    def rcp(self, a: F) -> F:
        """1 / a, correctly rounded, for a and 1 / a normal: what `rcp.rn` does once it has excluded the rest."""
        text = (
            "{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; fma.rn.f32 e, $1, r, 0fBF800000; neg.f32 e, e; "
            "fma.rn.f32 $0, r, e, r; }"
        )
        return F(_asm([ir.F32Type.get()], [a], text, "=&f,f")[0])

    def div_by(self, a: F, b: F, inverse: F) -> F:
        """a / b, correctly rounded, from the rounded 1 / b (Markstein). a is 0 or a, a / b, a / b / 2^24 normal."""
        q = a * inverse
        return self.fma(self.fma(q, -b, a), inverse, q)

    def div_constant(self, a: F, b: float) -> F:
        """`div_by` of a constant."""
        return self.div_by(a, F(b), F(1 / b))

    def div(self, a: F, b: F) -> F:
        return F(_asm([ir.F32Type.get()], [a, b], "div.rn.f32 $0, $1, $2;", "=f,f,f")[0])

    def rcp_approx(self, a: F) -> F:
        return F(_asm([ir.F32Type.get()], [a], "rcp.approx.ftz.f32 $0, $1;", "=f,f")[0])

    def rsqrt_approx(self, a: F) -> F:
        return F(_asm([ir.F32Type.get()], [a], "rsqrt.approx.ftz.f32 $0, $1;", "=f,f")[0])

    def exp2_approx(self, a: F) -> F:
        return F(_asm([ir.F32Type.get()], [a], "ex2.approx.ftz.f32 $0, $1;", "=f,f")[0])

    def prmt(self, a: U, b: U, selector: int | U) -> U:
        """Bytes of (a, b), numbered 0..7 from a's lowest, picked by the low nibbles of `selector`, lowest first.

        A nibble of 8 + n gives 255 or 0, by the sign of byte n.
        """
        selector = selector if isinstance(selector, U) else U(selector)
        return U(_asm([_i32()], [a, b, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")[0])

    def and_or(self, a: U, b: int, c: U) -> U:
        """(a & b) | c."""
        return U(_asm([_i32()], [a, U(b), c], "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r")[0])

    def select_bits(self, mask: int, a: U, b: U) -> U:
        """Bits of a where mask has ones, of b elsewhere."""
        return U(_asm([_i32()], [U(mask), a, b], "lop3.b32 $0, $1, $2, $3, 0xCA;", "=r,r,r,r")[0])

    def mad(self, a: U, b: int | U, c: U) -> U:
        """a * b + c."""
        b = b if isinstance(b, U) else U(b)
        return U(_asm([_i32()], [a, b, c], "mad.lo.u32 $0, $1, $2, $3;", "=r,r,r,r")[0])

    def dot4(self, a: U, b: U, c: U) -> U:
        """c + the sum of products of four bytes."""
        return U(_asm([_i32()], [a, b, c], "dp4a.u32.u32 $0, $1, $2, $3;", "=r,r,r,r")[0])

    def dot2(self, a: U, b: U, c: U, half: int) -> U:
        """c + the sum of products of a's two 16-bit halves and the lower (0) or upper (1) two bytes of b."""
        name = f"dp2a.{('lo', 'hi')[half]}.u32.u32"
        return U(_asm([_i32()], [a, b, c], f"{name} $0, $1, $2, $3;", "=r,r,r,r")[0])

    def from_int(self, a: U) -> F:
        """float32 of a, exact below 2^24."""
        return F(_asm([ir.F32Type.get()], [a], "cvt.rn.f32.u32 $0, $1;", "=f,r")[0])

    def absmax2(self, a: U, b: U, half: str) -> U:
        """Larger magnitude (up to sign) of two packed pairs, half "bf16" or "f16"; a NaN wins."""
        return U(_asm([_i32()], [a, b], f"max.NaN.xorsign.abs.{half}x2 $0, $1, $2;", "=r,r,r")[0])

    def half_to_float(self, a: U) -> tuple[F, F]:
        """The two float16 of a."""
        text = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
        low, high = _asm([ir.F32Type.get()] * 2, [a], text, "=f,=f,r")
        return F(low), F(high)

    def e4m3x2(self, low: F, high: F) -> U:
        """Two E4M3 codes, nearest even, saturating, NaN 0x7F; low in bits 0..7, the upper half zero."""
        text = "{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $2, $1; cvt.u32.u16 $0, t; }"
        return U(_asm([_i32()], [low, high], text, "=r,f,f")[0])

    def e4m3x2_to_float(self, a: U) -> tuple[F, F]:
        """Values of the two E4M3 codes in bits 0..15 of a."""
        text = (
            "{ .reg .b16 t, l, h; .reg .b32 p; cvt.u16.u32 t, $2; cvt.rn.f16x2.e4m3x2 p, t; mov.b32 {l, h}, p; "
            "cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
        )
        low, high = _asm([ir.F32Type.get()] * 2, [a], text, "=f,=f,r")
        return F(low), F(high)

    def pack_half(self, low: F, high: F, half: str) -> U:
        """Two float32 rounded to bf16 or f16 and packed."""
        return U(_asm([_i32()], [low, high], f"cvt.rn.{half}x2.f32 $0, $2, $1;", "=r,f,f")[0])

    def mul2(self, a: U, b: float) -> U:
        """The two float16 of a times the constant b; subnormals are kept."""
        pair = struct.unpack("<H", struct.pack("<e", b))[0] * 0x10001
        return U(_asm([_i32()], [a, U(pair)], "mul.rn.f16x2 $0, $1, $2;", "=r,r,r")[0])

    def shuffle_xor(self, a: U, mask: int) -> U:
        text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;"
        return U(_asm([_i32()], [a], text, "=r,r", effects=True)[0])

    def warp_max(self, a: U) -> U:
        return U(_asm([_i32()], [a], "redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r", effects=True)[0])

    def barrier(self):
        _asm([], [], "bar.sync 0;", "", effects=True)

    def barrier_of(self, index: U, threads: int):
        """Waits for the `threads` threads (whole warps, 16 groups at most) that give the same index."""
        _asm([], [index], f"bar.sync $0, {threads};", "r", effects=True)

    def hidden_zero(self) -> U:
        """0, which the compiler neither knows nor takes for the same in all threads: keeps a constant in a register."""
        t = self.thread()
        return (t * (t + 1)) & 1

    def opaque(self, a: U) -> U:
        """a, in a way that the compiler cannot see through."""
        return U(_asm([_i32()], [a], "mov.b32 $0, $1;", "=r,r", effects=True)[0])

    def rarely(self, condition: P, fn, default: list[U]) -> list[U]:
        """fn() where condition holds, `default` elsewhere; for code that almost no thread runs."""
        op = scf.IfOp(condition.v, [d.v.type for d in default], has_else=True)
        with ir.InsertionPoint(op.then_block):
            scf.yield_([v.v for v in fn()])
        with ir.InsertionPoint(op.else_block):  # pyright: ignore[reportArgumentType, reportCallIssue]
            scf.yield_([d.v for d in default])
        return [U(v) for v in op.results]

    def when(self, condition: P, fn):
        """fn() for its stores, where condition holds."""
        op = scf.IfOp(condition.v)
        with ir.InsertionPoint(op.then_block):
            fn()
            scf.yield_([])

    def loop(self, times: int, carried: list[U], body) -> list[U]:
        """`carried = body(i, carried)` for i below `times`, as a loop of the machine; returns the last."""
        zero, end, one = (arith.constant(_i32(), v) for v in (0, times, 1))
        op = scf.ForOp(zero, end, one, [c.v for c in carried])
        with ir.InsertionPoint(op.body):
            out = body(U(op.induction_variable), [U(v) for v in op.inner_iter_args])
            scf.yield_([v.v for v in out])
        return [U(v) for v in op.results]

    def thread(self) -> U:
        return U(arith.index_cast(_i32(), gpu.thread_id(gpu.Dimension.x)))

    def block(self) -> U:
        return U(arith.index_cast(_i32(), gpu.block_id(gpu.Dimension.x)))


_TYPES = {32: "b32", 16: "u16", 8: "u8"}  # by bits


class Pointer:
    """A byte address in device memory: base + row * stride in 64 bits."""

    def __init__(self, ref, *, shared: bool = False):
        self.address = ref if not isinstance(ref.type, ir.MemRefType) else _address(ref)
        self.space = "shared" if shared else "global"

    def at(self, row: U | None, stride: int, offset: U | int = 0) -> Pointer:
        """self + row * stride + offset (bytes)."""
        out = self.address
        if row is not None:
            wide = arith.extui(_i64(), row.v)
            out = arith.addi(out, arith.muli(wide, arith.constant(_i64(), stride)))
        if isinstance(offset, U):
            out = arith.addi(out, arith.extui(_i64(), offset.v))
        elif offset:
            out = arith.addi(out, arith.constant(_i64(), offset))
        return Pointer(out, shared=self.space == "shared")

    def load(
        self, words: int, where: P | None = None, *, bits: int = 32, offset: int = 0, fresh: bool = False
    ) -> list[U]:
        """1, 2 or 4 words (or one of 8 or 16 bits) at `offset` bytes from here; 0 where the predicate is false.

        fresh: for device memory that is written while the kernel runs, which the read-only path must not serve.
        """
        vector = {1: "", 2: ".v2", 4: ".v4"}[words]
        outs = [f"${i}" for i in range(words)]
        target = outs[0] if words == 1 else "{" + ", ".join(outs) + "}"
        space = "global.nc" if self.space == "global" and not fresh else self.space
        instruction = f"ld.{space}{vector}.{_TYPES[bits]} {target}, [${words}+{offset}];"
        constraints = ",".join(["=&r"] * words + ["l"])
        operands = [self.address]
        if where is not None:
            zero = " ".join(f"mov.b32 {o}, 0;" for o in outs)
            test = f"setp.ne.b32 p, ${words + 1}, 0;"
            instruction = f"{{ .reg .pred p; {test} {zero} @p {instruction} }}"
            constraints += ",r"
            operands.append(arith.extui(_i32(), where.v))
        effects = self.space == "shared" or fresh
        return [U(v) for v in _asm([_i32()] * words, operands, instruction, constraints, effects=effects)]

    def store(self, values: list[U], where: P | None = None, *, bits: int = 32):
        """1, 2 or 4 words (or the low 8 or 16 bits of one)."""
        n = len(values)
        vector = {1: "", 2: ".v2", 4: ".v4"}[n]
        ins = [f"${i}" for i in range(n)]
        source = ins[0] if n == 1 else "{" + ", ".join(ins) + "}"
        instruction = f"st.{self.space}{vector}.{_TYPES[bits]} [${n}], {source};"
        constraints = ",".join(["r"] * n + ["l"])
        operands = [*values, self.address]
        if where is not None:
            instruction = f"{{ .reg .pred p; setp.ne.b32 p, ${n + 1}, 0; @p {instruction} }}"
            constraints += ",r"
            operands.append(arith.extui(_i32(), where.v))
        _asm([], operands, instruction, constraints + ",~{memory}", effects=True)


def _address(ref):
    index = memref.extract_aligned_pointer_as_index(ref)
    return arith.index_cast(_i64(), index)
