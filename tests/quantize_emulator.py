"""Runs the kernels' per-thread programs with numpy: all threads of a grid at once, memory with bounds.

`Machine` stands for `emit.Ops`, `Memory` for `emit.Pointer`. A read or write outside an operand raises, a word that no
thread wrote keeps its poison, and a store under a false predicate or an untaken branch does nothing.
"""

import numpy as np
from quantize_numpy import Numpy, U

from pallas_kernels.quantize import mosaic_sm90

POISON = 0xA5


class Machine(Numpy):
    """blocks x threads threads; branches are masks."""

    def __init__(self, blocks, threads):
        self.blocks, self.threads = blocks, threads
        self.active = np.ones(blocks * threads, bool)

    def thread(self):
        return U(np.tile(np.arange(self.threads), self.blocks))

    def block(self):
        return U(np.repeat(np.arange(self.blocks), self.threads))

    def warp_max(self, a):
        top = np.asarray(a).reshape(-1, 32).max(1)
        return U(np.repeat(top, 32))

    def shuffle_xor(self, a, mask):
        lanes = np.arange(32) ^ mask
        return U(np.asarray(a).reshape(-1, 32)[:, lanes].reshape(-1))

    def barrier(self):
        pass

    def barrier_of(self, index, threads):
        whole = np.bincount(np.asarray(index)[self.active])
        assert set(whole) <= {0, *(threads * n for n in range(1, self.blocks + 1))} and len(whole) <= 16

    def when(self, condition, fn):
        before = self.active
        self.active = before & np.asarray(condition)
        fn()
        self.active = before

    def exp2_approx(self, a):
        return np.exp2(a).astype(np.float32)

    def rsqrt_approx(self, a):
        return (1 / np.sqrt(a)).astype(np.float32)

    def rcp_approx(self, a):
        return (1 / a).astype(np.float32)


class Memory:
    """Bytes of one operand, or of each block's shared memory."""

    machine: Machine

    def __init__(self, data, *, shared=False, offset=0):
        self.data, self.shared, self.offset = data, shared, offset

    def at(self, row, stride, offset=0):
        out = np.asarray(self.offset, np.int64)
        if row is not None:
            out = out + np.asarray(row).astype(np.int64) * stride
        return Memory(self.data, shared=self.shared, offset=out + np.asarray(offset).astype(np.int64))

    def _places(self, size, where):
        m = self.machine
        on = m.active if where is None else m.active & np.broadcast_to(where, m.active.shape)
        start = np.broadcast_to(self.offset, on.shape).copy()
        if self.shared:
            start += np.repeat(np.arange(m.blocks), m.threads) * (len(self.data) // m.blocks)
        if not ((start[on] >= 0) & (start[on] + size <= len(self.data))).all():
            raise IndexError(f"{size} bytes at {start[on].max()} (lowest {start[on].min()}) of {len(self.data)}")
        assert not (start[on] % min(size, 16)).any(), "unaligned"
        return on, start

    def load(self, words, where=None, *, bits=32, offset=0, fresh=False):
        if offset:
            return self.at(None, 0, offset).load(words, where, bits=bits)
        size = words * bits // 8
        on, start = self._places(size, where)
        out = np.zeros((len(on), 4 * words), np.uint8)
        out[on, :size] = self.data[start[on, None] + np.arange(size)]
        return [U(w) for w in out.view(np.uint32).T]

    def store(self, values, where=None, *, bits=32):
        size = len(values) * bits // 8
        on, start = self._places(size, where)
        words = np.stack([np.broadcast_to(np.asarray(v, np.uint32), on.shape) for v in values], 1)
        data = np.ascontiguousarray(words).view(np.uint8)[:, :size]
        self.data[start[on, None] + np.arange(size)] = data[on]


def launch(program, task, operands, outputs, blocks, *, scratch=False):
    """`mosaic_sm90._launch` on the host."""
    machine = Machine(blocks, task.tuning.threads)
    Memory.machine = machine
    memory = {name: np.ascontiguousarray(np.asarray(v)).reshape(-1).view(np.uint8) for name, v in operands.items()}
    sizes = {name: int(np.prod(v.shape)) * v.dtype.itemsize for name, v in outputs.items()}
    memory.update({name: np.full(size, POISON, np.uint8) for name, size in sizes.items()})
    refs = dict(memory)
    if scratch:
        refs["scratch"] = np.zeros(blocks * task.tuning.threads // 32 * 8, np.uint8)
    with np.errstate(all="ignore"):
        program(machine, task, refs)
    return {name: memory[name].view(out.dtype).reshape(out.shape) for name, out in outputs.items()}


def install(monkeypatch):
    """Make `mosaic_sm90` run here."""
    monkeypatch.setattr(mosaic_sm90, "U", U)
    monkeypatch.setattr(mosaic_sm90, "Pointer", Memory)
    monkeypatch.setattr(mosaic_sm90, "_launch", launch)
    for name in ("run_quantize", "run_dequantize", "run_maxima"):
        monkeypatch.setattr(mosaic_sm90, name, getattr(mosaic_sm90, name).__wrapped__)
