"""Swapping a running model's weights: the same shapes, types and buffers, other numbers, no new trace.

`reload` reads everything first, compares all metadata, and only then writes into the old buffers (by donation), so that
whatever fails leaves the old weights as they were. `LiveWeights` does that under threads that keep calling the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.params import MoEParams
from jmoe.placement import Placement

from .folder import Checkpoint, MemoryCheckpoint, Source
from .leaves import Leaf, bounds, is_leaf
from .load import load_moe_layers, placement_for, read_rest
from .online import load_online
from .plan import StaticScales, as_dtype, plan_moe_layer, plan_rest


class MetadataChangedError(RuntimeError):
    """New weights that a compiled model cannot take: another structure, shape, type or sharding. Nothing changed."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """A whole model's: moe, the blocks' parameters by layer; rest, all other tensors by Hugging Face name."""

    moe: dict[int, MoEParams]
    rest: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How weights are loaded, so that they can be loaded again in the same way. Fields as of `load_moe_layer`."""

    sharding: jax.sharding.Sharding | None = None
    placement: Placement | None = None
    dtype: str | None = None
    dequantize: str | None = None
    quant: str | None = None
    static_scales: StaticScales = "uniform"


def load_weights(ckpt: Source, options: LoadOptions = LoadOptions(), *, progress: bool | None = None) -> Weights:
    """All of a model: MoE blocks and the rest."""
    fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    rest = read_rest(ckpt, dtype=options.dtype, sharding=options.sharding)
    return Weights(load_moe_layers(ckpt, progress=progress, **fields), rest)


def _plan(source: Source, like, options: LoadOptions) -> Any:
    """A tree of leaves (or, quantised online, of arrays) with the structure of `like`: Weights, or layers by number."""
    placement = placement_for(source, options.sharding, options.placement)

    def layer(i: int):
        if options.quant is not None:
            return load_online(
                source,
                i,
                options.quant,
                sharding=options.sharding,
                placement=placement,
                dtype=as_dtype(options.dtype),
                static_scales=options.static_scales,
            )
        return plan_moe_layer(
            source,
            i,
            placement=placement,
            dtype=as_dtype(options.dtype),
            dequantize=as_dtype(options.dequantize),
            static_scales=options.static_scales,
        )

    if isinstance(like, Weights):
        rest: Any = plan_rest(source, dtype=as_dtype(options.dtype))
        return Weights({i: layer(i) for i in like.moe}, {k: rest[k] for k in like.rest if k in rest})
    return {i: layer(i) for i in like}


def _describe(x) -> str:
    if isinstance(x, Leaf | np.ndarray):
        return f"{x.dtype}{list(x.shape)}"
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return f"{x.dtype}{list(x.shape)}{' weak' if x.weak_type else ''}"
    return type(x).__name__


def _differs(old: jax.Array, new) -> str | None:
    """What makes `new` unfit to take the place of `old`; None if nothing does."""
    if not isinstance(new, Leaf | np.ndarray | jax.Array | jax.ShapeDtypeStruct):
        return f"is a {type(new).__name__}, was {_describe(old)}"
    weak = getattr(new, "weak_type", False)
    if tuple(new.shape) != old.shape or new.dtype != old.dtype or weak != old.weak_type:
        return f"is {_describe(new)}, was {_describe(old)}"
    if isinstance(new, jax.Array) and not new.sharding.is_equivalent_to(old.sharding, old.ndim):
        return f"has sharding {new.sharding}, was {old.sharding}"
    return None


def check_metadata(old: Any, new: Any) -> None:
    """MetadataChangedError, listing what differs, unless the trees agree in structure and every leaf's metadata."""
    old_leaves, old_tree = jax.tree.flatten_with_path(old)
    new_leaves, new_tree = jax.tree.flatten_with_path(new, is_leaf=is_leaf)
    problems = []
    if old_tree != new_tree:
        old_names, new_names = ({jax.tree_util.keystr(p) for p, _ in leaves} for leaves in (old_leaves, new_leaves))
        lost, extra = sorted(old_names - new_names), sorted(new_names - old_names)
        problems += [f"{name} is gone" for name in lost] + [f"{name} is new" for name in extra]
        problems = problems or ["a format or another static field differs"]
    else:
        for (path, a), (_, b) in zip(old_leaves, new_leaves, strict=True):
            what = _differs(a, b)
            if what is not None:
                problems.append(f"{jax.tree_util.keystr(path)} {what}")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise MetadataChangedError(
            f"Weight metadata changed: {'; '.join(problems[:5])}{more}. The compiled model takes equal structure, "
            "shapes, types and shardings only; load these weights anew and compile again. No weight was modified."
        )


@functools.cache
def _writer(shardings):
    """Copies new values into the buffers of old ones."""
    return jax.jit(
        lambda old, new: [jnp.copy(x) for x in new], donate_argnums=0, keep_unused=True, out_shardings=list(shardings)
    )


def _write(old: list[jax.Array], new: list[jax.Array]) -> list[jax.Array]:
    return _writer(tuple(x.sharding for x in old))(old, new)


def _host_parts(leaf, old: jax.Array) -> list[tuple[Any, np.ndarray]]:
    """What each device of `old` gets, on the host; equal parts are read once."""
    known: dict[tuple, np.ndarray] = {}
    out = []
    for device, index in old.sharding.addressable_devices_indices_map(old.shape).items():
        index = bounds(index or (), old.shape)
        key = tuple((s.start, s.stop) for s in index)
        if key not in known:
            known[key] = leaf.read(index) if isinstance(leaf, Leaf) else np.array(leaf[index])
        out.append((device, known[key]))
    return out


def _to_device(parts: list[tuple[Any, np.ndarray]], old: jax.Array) -> jax.Array:
    arrays = [jax.device_put(np.reshape(value, old.sharding.shard_shape(old.shape)), d) for d, value in parts]
    return jax.make_array_from_single_device_arrays(old.shape, old.sharding, arrays)


def _stage(old, new, staging: str) -> list:
    """Everything read: arrays on the devices, or each device's parts on the host."""
    staged = []
    for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new, is_leaf=is_leaf), strict=True):
        if isinstance(b, jax.Array):
            staged.append(b)
        else:
            parts = _host_parts(b, a)
            staged.append(parts if staging == "host" else _to_device(parts, a))
    jax.block_until_ready([s for s in staged if isinstance(s, jax.Array)])
    return staged


def _swap(old, staged: list):
    """Writes staged values into the old leaves' buffers and returns the new tree; the old arrays are gone then.

    On the CPU a leaf may still be a view of the host array it was made from. Such a buffer cannot be donated: the first
    reload allocates there, and those after it reuse.
    """
    leaves, treedef = jax.tree.flatten(old)
    if all(isinstance(s, jax.Array) for s in staged):
        return jax.tree.unflatten(treedef, _write(leaves, staged))
    out = []
    for a, s in zip(leaves, staged, strict=True):  # leaf by leaf, so that one leaf at a time is there twice
        out += jax.block_until_ready(_write([a], [s if isinstance(s, jax.Array) else _to_device(s, a)]))
    return jax.tree.unflatten(treedef, out)


def _prepare(params, source, options: LoadOptions, derive, staging):
    """(weights, derived or None, staged leaves): all that can fail, before anything is written."""
    if staging not in ("device", "host"):
        raise ValueError(f"staging={staging!r} is not known; choose 'device' (fast) or 'host' (no second copy there).")
    weights, derived = params if derive is not None else (params, None)
    with contextlib.ExitStack() as stack:
        if isinstance(source, str | Path):
            source = stack.enter_context(Checkpoint(source))
        is_source = isinstance(source, Checkpoint | MemoryCheckpoint)
        new = _plan(source, weights, options) if is_source else source
        check_metadata(weights, new)
        if derive is not None:
            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type), weights)
            check_metadata(derived, jax.eval_shape(derive, shapes))
        return weights, derived, _stage(weights, new, staging)


def _finish(weights, derived, derive, staged):
    new = _swap(weights, staged)
    if derive is None:
        return new
    fresh = jax.jit(derive, out_shardings=jax.tree.map(lambda a: a.sharding, derived))(new)
    leaves, treedef = jax.tree.flatten(derived)
    return new, jax.tree.unflatten(treedef, _write(leaves, jax.tree.leaves(fresh)))


def reload(
    params: Any,
    source: Any,
    *,
    options: LoadOptions = LoadOptions(),
    derive: Callable | None = None,
    staging: Literal["device", "host"] = "device",
) -> Any:
    """New values in the buffers of `params`, for functions that are compiled for them.

    Args:
      params: `Weights`, or MoE parameters by layer; for in-memory sources any tree of arrays. Its arrays are donated:
        use the returned tree from then on. With `derive`, a pair (weights, derived).
      source: a folder, a `Checkpoint`, a `MemoryCheckpoint` (a trainer's tensors under Hugging Face names), or a tree
        like the weights.
      options: how the weights were loaded.
      derive: recomputes values that depend on weights, derive(weights) -> derived; they are refreshed last.
      staging: where new weights wait until all of them are there: on the devices, or on the host.
    Returns the tree with the new values, in the old buffers.
    Raises MetadataChangedError (a RuntimeError) or CheckpointError before anything is modified.
    """
    weights, derived, staged = _prepare(params, source, options, derive, staging)
    return _finish(weights, derived, derive, staged)


class LiveWeights:
    """Weights that threads use while another one reloads them: every use sees all old or all new ones.

    Reading new weights overlaps with use; only the copy into place waits until nobody is dispatching with the old ones.
    Work that was dispatched before is finished by the device with the old values.
    """

    def __init__(self, params: Any, *, options: LoadOptions = LoadOptions(), derive: Callable | None = None):
        """params, options, derive: as of `reload`; with `derive`, the weights alone: derived values are made here."""
        self._options, self._derive = options, derive
        self._params = params if derive is None else (params, jax.jit(derive)(params))
        self._changed = threading.Condition()
        self._users = 0
        self._writing = False
        self._reloading = threading.Lock()
        self.version = 0

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """The parameters (with `derive` the pair), unchanged until the block ends. Dispatch in it; do not keep them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)
            self._users += 1
        try:
            yield self._params
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def reload(self, source: Any, *, staging: Literal["device", "host"] = "device") -> None:
        """As the function `reload`, once nobody is inside `use`. Whatever it raises, the old weights stay in use."""
        with self._reloading:
            weights, derived, staged = _prepare(self._params, source, self._options, self._derive, staging)
            with self._changed:
                self._writing = True
                self._changed.wait_for(lambda: self._users == 0)
            try:
                self._params = _finish(weights, derived, self._derive, staged)
                self.version += 1
            finally:
                with self._changed:
                    self._writing = False
                    self._changed.notify_all()
