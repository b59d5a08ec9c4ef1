"""Runs the kernels of `pallas_kernels.permute` and `.route` with numpy: all threads of a grid at once, in lockstep."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from quantize_emulator import POISON, Machine, Memory
from quantize_numpy import U


def warps(a, fn):
    """fn([warps, 32]) -> [warps, 32] or [warps]."""
    out = fn(np.asarray(a).reshape(-1, 32))
    return U((np.repeat(out, 32) if out.ndim == 1 else out.reshape(-1)).astype(np.uint32))


def _halves(words, half):
    """float32 values of the lower and the upper halves."""
    dtype = ml_dtypes.bfloat16 if half == "bf16" else np.float16
    return [(np.asarray(words) >> s).astype(np.uint16).view(dtype).astype(np.float32) for s in (0, 16)]


class Threads(Machine):
    """`thread.Thread`. Loops are Python's; every thread takes every turn."""

    def all(self, a):
        return np.broadcast_to(np.asarray(a), self.active.shape)

    def lane(self):
        return self.thread() & 31

    def warp_max(self, a):
        return warps(self.all(a), lambda w: w.max(1))

    def warp_min(self, a):
        return warps(self.all(a), lambda w: w.min(1))

    def warp_add(self, a):
        return warps(self.all(a), lambda w: w.sum(1, dtype=np.uint32))

    def warp_or(self, a):
        return warps(self.all(a), lambda w: np.bitwise_or.reduce(w, axis=1))

    def match(self, a):
        bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
        return warps(self.all(a), lambda w: ((w[:, :, None] == w[:, None, :]) * bits).sum(2))

    def shuffle_up(self, a, distance):
        return warps(self.all(a), lambda w: np.concatenate([w[:, :distance], w[:, :-distance]], axis=1))

    def warp_barrier(self):
        pass

    def popcount(self, a):
        return U(np.bitwise_count(np.asarray(self.all(a), np.uint32)))

    def mul_bf16(self, a, b):
        pairs = zip(_halves(self.all(a), "bf16"), _halves(self.all(b), "bf16"), strict=True)
        low, high = ((p * q).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32) for p, q in pairs)
        return U(low | high << 16)

    def half_twice(self, a, upper):
        half = np.asarray(self.all(a)) >> (16 if upper else 0) & 0xFFFF
        return U(half | half << 16)

    def mma(self, a, b, c, half):
        left, right = np.zeros((2, self.active.size // 32, 16, 16))
        right = right[:, :, :8]
        g, t = np.divmod(np.arange(32), 4)
        for i, word in enumerate(a):
            for j, value in enumerate(_halves(self.all(word), half)):
                left[:, g + 8 * (i % 2), 2 * t + 8 * (i // 2) + j] = value.reshape(-1, 32)
        for i, word in enumerate(b):
            for j, value in enumerate(_halves(self.all(word), half)):
                right[:, 2 * t + 8 * i + j, g] = value.reshape(-1, 32)
        product = left @ right
        return [
            (self.all(c[i]) + product[:, g + 8 * (i // 2), 2 * t + i % 2].reshape(-1)).astype(np.float32)
            for i in range(4)
        ]

    def prefetch(self, at, size, where):
        on, start = at._places(16, self.all(where))
        assert not (start[on] % 16).any() and not (self.all(size)[on] % 16).any()
        assert (self.all(size)[on] > 0).all() and (start[on] + self.all(size)[on] <= len(at.data)).all()

    def add_shared(self, at, value, where):
        on, start = at._places(4, where)
        words = at.data.view(np.uint32)
        np.add.at(words, start[on] // 4, self.all(value)[on].astype(np.uint32))

    def loop(self, count, body, carry=(), *, rolled=False):
        carry = tuple(U(c) for c in carry)
        for i in range(count):
            carry = tuple(body(U(i), *carry))
        return list(carry)


def launch(program, task, operands, outputs, *, blocks, threads, scratch_words=0, name):
    machine = Threads(blocks, threads)
    Memory.machine = machine
    data = {n: np.ascontiguousarray(np.asarray(v)).reshape(-1).view(np.uint8) for n, v in operands.items()}
    sizes = {n: int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for n, v in outputs.items()}
    data.update({n: np.full(size, POISON, np.uint8) for n, size in sizes.items()})
    pointers = {n: Memory(d) for n, d in data.items()}
    if scratch_words:
        pointers["scratch"] = Memory(np.full(blocks * scratch_words * 4, POISON, np.uint8), shared=True)
    with np.errstate(all="ignore"):
        program(machine, task, pointers)
    return {n: jnp.asarray(data[n].view(np.dtype(v.dtype)).reshape(v.shape)) for n, v in outputs.items()}


def install(monkeypatch, *modules):
    """Make these kernel modules run here."""
    for module in modules:
        for attribute, double in (("U", U), ("Pointer", Memory), ("launch", launch)):
            monkeypatch.setattr(module, attribute, double, raising=False)
        for name in dir(module):
            if name.startswith("run_"):
                monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
