"""Numpy doubles of the registers and operations of `pallas_kernels.quantize.emit`."""

import ml_dtypes
import numpy as np


class U(np.ndarray):
    """uint32 registers of many threads at once, with the operators of `emit.U`."""

    def __new__(cls, v):
        if isinstance(v, int):
            v = v & 0xFFFFFFFF
        return np.asarray(v, np.uint32).view(cls)

    def same(self, other):
        return np.asarray(self) == np.asarray(other)


class Numpy:
    """`emit.Ops` on arrays: one element is one thread. fma is exact because it is done in long double."""

    U = staticmethod(U)
    F = staticmethod(np.float32)

    def bits(self, x):
        return U(np.asarray(x, np.float32).view(np.uint32))

    def float(self, x):
        return np.asarray(x, np.uint32).view(np.float32)

    def where(self, c, a, b):
        out = np.where(c, a, b)
        return U(out) if out.dtype == np.uint32 else out.astype(np.float32)

    def fma(self, a, b, c):
        return (np.longdouble(a) * np.longdouble(b) + np.longdouble(c)).astype(np.float32)

    def fms(self, a, b, c):
        return self.fma(a, b, -np.asarray(c))

    def mul_rounded(self, a, b):
        return (a * b).astype(np.float32)

    def abs(self, a):
        return np.abs(a)

    fmin, fmax = staticmethod(np.fmin), staticmethod(np.fmax)

    def exp2_approx(self, a):
        return np.exp2(a, dtype=np.float32)

    def rcp_approx(self, a):
        return self.rcp(a)

    def umax(self, a, b):
        return U(np.maximum(a, b))

    def umin(self, a, b):
        return U(np.minimum(a, b))

    def rcp(self, a):
        return (np.float32(1) / a).astype(np.float32)

    def div_constant(self, a, b):
        return self.div_by(a, np.float32(b), np.float32(1 / b))

    def div(self, a, b):
        return (a / b).astype(np.float32)

    def div_by(self, a, b, inverse):
        """As the kernels do it, which gives NaN where the quotient is infinite."""
        q = (a * inverse).astype(np.float32)
        return self.fma(self.fma(q, -b, a), inverse, q)

    def prmt(self, a, b, selector):
        a, b, selector = np.broadcast_arrays(a, b, selector)
        pool = np.stack([(w >> s) & 0xFF for w in (a, b) for s in (0, 8, 16, 24)])
        out = 0
        for i in range(4):
            nibble = (selector >> (4 * i)) & 15
            byte = np.take_along_axis(pool, (nibble & 7)[None].astype(np.int64), 0)[0]
            byte = np.where(nibble & 8, (byte >> 7) * np.uint32(255), byte)
            out = out | byte.astype(np.uint32) << (8 * i)
        return U(out)

    def and_or(self, a, b, c):
        return (a & b) | c

    def select_bits(self, mask, a, b):
        return (a & mask) | (b & (mask ^ 0xFFFFFFFF))

    def mad(self, a, b, c):
        return a * U(b) + c

    def dot4(self, a, b, c):
        return c + sum(((a >> s) & 255) * ((b >> s) & 255) for s in (0, 8, 16, 24))

    def dot2(self, a, b, c, half):
        return c + (a & 0xFFFF) * ((b >> (16 * half)) & 255) + (a >> 16) * ((b >> (16 * half + 8)) & 255)

    def from_int(self, a):
        return np.asarray(a).astype(np.float32)

    def absmax2(self, a, b, half):
        pairs = [(np.asarray(w) >> s) & 0x7FFF for s in (0, 16) for w in (a, b)]
        return U(np.maximum(*pairs[:2]) | np.maximum(*pairs[2:]) << 16)

    def half_to_float(self, a):
        low, high = (np.asarray((np.asarray(a) >> s) & 0xFFFF, np.uint16).view(np.float16) for s in (0, 16))
        return low.astype(np.float32), high.astype(np.float32)

    def e4m3x2(self, low, high):
        codes = []
        for v in (low, high):
            v = np.broadcast_to(np.asarray(v, np.float32), np.broadcast(low, high).shape)
            code = np.clip(v, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            codes.append(np.where(np.isnan(v), 0x7F, code).astype(np.uint32))
        return U(codes[0] | codes[1] << 8)

    def e4m3x2_to_float(self, a):
        return tuple(
            ((np.asarray(a) >> s) & 0xFF).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            for s in (0, 8)
        )

    def pack_half(self, low, high, half):
        dtype = ml_dtypes.bfloat16 if half == "bf16" else np.float16
        bits = [np.asarray(v, np.float32).astype(dtype).view(np.uint16).astype(np.uint32) for v in (low, high)]
        return U(bits[0] | bits[1] << 16)

    def mul2(self, a, b):
        halves = [np.asarray((np.asarray(a) >> s) & 0xFFFF, np.uint16).view(np.float16) for s in (0, 16)]
        low, high = ((h * np.float16(b)).view(np.uint16).astype(np.uint32) for h in halves)
        return U(low | high << 16)

    def hidden_zero(self):
        return U(0)

    def opaque(self, a):
        return a

    def loop(self, times, carried, body):
        for i in range(times):
            carried = body(U(i), carried)
        return carried

    def rarely(self, condition, fn, default):
        self.rare = float(np.mean(condition))
        return [self.where(condition, a, b) for a, b in zip(fn(), default, strict=True)]
