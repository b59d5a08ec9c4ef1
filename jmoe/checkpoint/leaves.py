"""Leaves that are not read yet: what shape and type an array of the model has, and how to read any part of it.

A tree of `Leaf` has the structure of the parameters it will become. `materialize` turns it into JAX arrays, of which
each device gets only its own part, read when it is needed: host memory holds one part at a time.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from pallas_kernels.quantize import QTensor

Index = tuple[slice, ...]
PARALLEL_BYTES = 8 << 20  # below this, threads cost more than they bring
_THREADS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """An array to be read. read(index) returns the elements at slices with explicit bounds, one for each axis.

    experts: axis 0 counts physical expert slots, so that it is the one to be sharded.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]
    experts: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def whole(self) -> np.ndarray:
        return self.read(tuple(slice(0, n) for n in self.shape))


def bounds(index: Index, shape: Sequence[int]) -> Index:
    """The same slices with explicit bounds, for every axis of `shape`."""
    full = tuple(index) + (slice(None),) * (len(shape) - len(index))
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(full, shape, strict=True))


def lengths(index: Index) -> tuple[int, ...]:
    return tuple(max(0, s.stop - s.start) for s in index)


def stacked(
    shape: tuple[int, ...],
    dtype: np.dtype,
    slots: Sequence[int],
    fetch: Callable[[int, Index], np.ndarray] | None = None,
    *,
    fill: Callable[[int, Index, np.ndarray], None] | None = None,
) -> Leaf:
    """A leaf [P, ...] whose slot p is fetch(slots[p], rest of the index); slots of -1 hold zeros.

    fill(expert, index, out), in place of fetch, writes into the leaf's own memory, of type `dtype`.
    """

    def read(index: Index) -> np.ndarray:
        index = bounds(index, shape)
        out = np.empty(lengths(index), dtype)
        # Integers of the same width copy without numpy's slow path for foreign types.
        raw = out.view(f"u{dtype.itemsize}") if out.size else out

        def one(i: int) -> None:
            expert = slots[index[0].start + i]
            if expert < 0:
                raw[i] = 0
            elif fill is not None:
                fill(expert, index[1:], out[i])
            elif fetch is not None:
                raw[i] = np.asarray(fetch(expert, index[1:]), dtype).view(raw.dtype)

        in_parallel(one, out.shape[0] if out.size else 0, out.nbytes)
        return out

    return Leaf(shape, np.dtype(dtype), read, experts=True)


def in_parallel(task: Callable[[int], None], count: int, nbytes: int) -> None:
    """task(0..count-1), in threads where `nbytes` of output make that worth it. The first failure is raised."""
    if count < 2 or nbytes < PARALLEL_BYTES:
        for i in range(count):
            task(i)
        return
    with ThreadPoolExecutor(min(_THREADS, count)) as pool:
        for _ in pool.map(task, range(count)):
            pass


def is_leaf(x) -> bool:
    return isinstance(x, Leaf)


def tree_nbytes(tree) -> int:
    """Bytes of all leaves of a tree of `Leaf`."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree, is_leaf=is_leaf))


def leaf_sharding(leaf: Leaf, sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """`sharding` for leaves with an expert axis, the same mesh without it (replicated) for all others."""
    if leaf.experts:
        return sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return sharding


def num_ranks(sharding: jax.sharding.Sharding | None) -> int:
    """Parts into which `sharding` cuts the expert axis. ValueError if it cuts another axis too."""
    if sharding is None or not isinstance(sharding, jax.sharding.NamedSharding):
        return 1
    spec = tuple(sharding.spec)
    if any(s is not None for s in spec[1:]):
        raise ValueError(
            f"sharding={sharding.spec} cuts axes behind the expert axis; expert weights are sharded by experts only: "
            "give NamedSharding(mesh, P(axis))."
        )
    names = spec[0] if spec else None
    names = () if names is None else names if isinstance(names, tuple) else (names,)
    return math.prod(sharding.mesh.shape[n] for n in names)


def _once(read: Callable[[Index], np.ndarray], shape) -> Callable[[Index | None], np.ndarray]:
    """Reads each part once, also where several devices hold it."""
    known: dict[tuple, np.ndarray] = {}
    lock = threading.Lock()

    def call(index: Index | None) -> np.ndarray:
        index = bounds(index or (), shape)
        key = tuple((s.start, s.stop) for s in index)
        with lock:
            if key not in known:
                known[key] = read(index)
            return known[key]

    return call


def to_array(leaf: Leaf, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
    """The leaf as a JAX array; with a sharding, every device's part is read on its own."""
    if sharding is None:
        return jax.device_put(leaf.whole())
    return jax.make_array_from_callback(leaf.shape, leaf_sharding(leaf, sharding), _once(leaf.read, leaf.shape))


def materialize(tree, sharding: jax.sharding.Sharding | None = None, *, done: Callable[[int], None] | None = None):
    """Reads a tree of `Leaf` into JAX arrays, leaf by leaf. done(bytes) is called after each."""

    def one(leaf: Leaf) -> jax.Array:
        array = to_array(leaf, sharding)
        if done is not None:
            done(leaf.nbytes)
        return array

    return jax.tree.map(one, tree, is_leaf=is_leaf)


__all__ = ["Leaf", "QTensor", "bounds", "lengths", "materialize", "num_ranks", "stacked", "to_array", "tree_nbytes"]
