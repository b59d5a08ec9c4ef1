"""Reading one field (elements or scales) of a layer's experts, whatever the layout it is stored in.

Letters: D hidden, F expert width, E experts, P physical slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from . import host
from .catalog import Linear, MoEBlock
from .folder import Source
from .leaves import Index, Leaf, stacked

FLOAT32 = np.dtype(np.float32)


class Field:
    """One field ("data" or "scale") of a layer's gate_up (with an axis of two halves) or down stack.

    matrix: (rows, columns) of one matrix in stored elements. An index of an expert is (halves, rows, columns) for
    gate_up and (rows, columns) for down, as slices.
    """

    def __init__(self, source: Source, block: MoEBlock, name: str, gate_up: bool):
        self.source, self.block, self.name, self.gate_up = source, block, name, gate_up
        linear = block.linears(0, gate_up)[0]
        info = source.tensors[linear.key(name)]
        self.dtype = info.numpy_dtype
        shape = info.stored_shape
        if block.fused is not None:
            if linear.kind is not None and linear.kind.name == "mxfp4" and name == "data":
                shape = (*shape[:2], shape[2] * shape[3])
            if linear.transposed:
                shape = (shape[0], shape[2], shape[1])
            shape = (shape[1] // 2, shape[2]) if gate_up else shape[1:]
        self.matrix = tuple(shape)

    def key(self, e: int, half: int = 0) -> str:
        """The tensor that holds this field of expert e's gate (0), up (1) or, of a down stack, of its only matrix."""
        linears = self.block.linears(e, self.gate_up)
        return linears[half if len(linears) > 1 else 0].key(self.name)

    def whole(self, e: int, half: int = 0) -> np.ndarray:
        """One matrix of expert e."""
        rest = tuple(slice(0, n) for n in self.matrix)
        return self.one(e, (slice(half, half + 1), *rest))[0] if self.gate_up else self.one(e, rest)

    def one(self, e: int, index: Index) -> np.ndarray:
        """Elements of expert e."""
        if self.block.fused is not None:
            return self._from_stack(self.block.linears(e, self.gate_up)[0], e, index)
        if not self.gate_up:
            return self.source.read(self.key(e), index)
        return np.stack([self.source.read(self.key(e, h), index[1:]) for h in _range(index[0])])

    def _from_stack(self, linear: Linear, e: int, index: Index) -> np.ndarray:
        """Of a stack [E, ...], in which gate and up alternate (gpt-oss) or follow each other."""
        key, rows = linear.key(self.name), self.matrix[0]
        if self.gate_up and not self.source.family.interleaved:
            _, wanted, columns = index
            cuts = [slice(h * rows + wanted.start, h * rows + wanted.stop) for h in _range(index[0])]
            return np.stack([self.source.read(key, (slice(e, e + 1), cut, columns))[0] for cut in cuts])
        value = self.source.read(key, (slice(e, e + 1),))[0]
        value = value.T if linear.transposed else value.reshape(value.shape[0], -1)
        if not self.gate_up:
            return value[index]
        return np.stack([value[h::2][index[1:]] for h in _range(index[0])])

    def _fill(self, e: int, index: Index, out: np.ndarray) -> None:
        """As `one`, into out, for matrices that are stored one by one."""
        if not self.gate_up:
            self.source.read(self.key(e), index, out=out)
            return
        for i, h in enumerate(_range(index[0])):
            self.source.read(self.key(e, h), index[1:], out=out[i])

    def leaf(
        self,
        slots: Sequence[int],
        dtype: np.dtype | None,
        convert: Callable[[np.ndarray, int, Index], np.ndarray] | None = None,
    ) -> Leaf:
        """All slots: [P, 2, rows, columns] or [P, rows, columns]. convert(value, e, index) changes what was read."""
        shape = (len(slots), 2, *self.matrix) if self.gate_up else (len(slots), *self.matrix)
        kept = np.dtype(dtype or self.dtype)
        if convert is None and kept == self.dtype and self.block.fused is None:
            return stacked(shape, kept, slots, fill=self._fill)

        def fetch(e: int, index: Index) -> np.ndarray:
            value = self.one(e, index)
            return convert(value, e, index) if convert else value

        return stacked(shape, kept, slots, fetch)


def _range(halves: slice) -> range:
    return range(halves.start, halves.stop)


def scalars(source: Source, block: MoEBlock, name: str, gate_up: bool) -> Callable[[int], np.ndarray]:
    """Decode scales ("global_scale" or "input_scale") of expert e: [2] of gate_up, [1] of down. Divisors are turned."""
    count = 2 if gate_up else 1

    def of(e: int) -> np.ndarray:
        values = []
        for linear in block.linears(e, gate_up):
            info = source.tensors[linear.key(name)]
            per_expert = block.fused is not None and info.shape not in ((), (1,))
            value = source.read(info.key, slice(e, e + 1) if per_expert else ()).reshape(-1).astype(np.float32)
            host.check_positive(value, info.where(), "it")
            assert linear.kind is not None
            if linear.kind.divisor:
                value = np.float32(1) / value
                host.check_positive(value, info.where(), "its reciprocal")
            values.append(value)
        joined = np.concatenate(values)
        return joined if len(joined) == count else np.repeat(joined, count)

    return of
