"""The programs of `jmoe bench model`: prefill and decoding of the model of `examples/qwen3_moe.py`.

B sequences, S tokens of a prompt, N slots of the cache, R devices.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jmoe.config import QuantConfig

from . import lowering
from .common import relative_error

LAYERS_COMPARED, PROMPTS_COMPARED, LENGTH_COMPARED = 2, 16, 24


def example() -> tuple[ModuleType, dict[str, Any]]:
    """The model of the examples and the configuration of Qwen3-30B-A3B. ValueError where the examples are not there."""
    folder = Path(__file__).parents[2] / "examples"
    if not (folder / "qwen3_moe.py").is_file():
        raise ValueError(
            f"bench model runs examples/qwen3_moe.py, which {folder} does not have: run it from a checkout "
            "of the repository."
        )
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    import qwen3_moe  # pyright: ignore[reportMissingImports]
    from random_checkpoint import QWEN3_30B_A3B  # pyright: ignore[reportMissingImports]

    return qwen3_moe, QWEN3_30B_A3B


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _sharding(mesh: Mesh | None, batch: int) -> jax.sharding.Sharding | None:
    """Of arrays with a leading axis of sequences: spread over the devices where they divide, else on each."""
    if mesh is None:
        return None
    return jax.NamedSharding(mesh, jax.P("ep") if batch % mesh.size == 0 else jax.P())


def like(tree: Any, sharding: Any = None) -> Any:
    """Shapes and dtypes; sharding: one for all arrays with axes, or a function (path, leaf) -> sharding."""

    def one(path: Any, a: Any) -> jax.ShapeDtypeStruct:
        where = sharding(path, a) if callable(sharding) else sharding
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where)

    return jax.tree_util.tree_map_with_path(one, tree)


def _cache_like(example: ModuleType, config: Any, batch: int, size: int, mesh: Mesh | None) -> Any:
    empty = jax.eval_shape(lambda: example.Cache.empty(config, batch, size))
    split = _sharding(mesh, batch)
    everywhere = None if mesh is None else jax.NamedSharding(mesh, jax.P())
    return like(empty, lambda _, a: split if a.ndim else everywhere)


@functools.cache
def _normal(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda key: jax.random.normal(key, shape, dtype), out_shardings=sharding)


def filled_cache(
    example: ModuleType, config: Any, batch: int, context: int, size: int, *, mesh: Mesh | None = None
) -> Any:
    """A cache of `size` slots, of which every sequence has filled `context`, with random keys and values."""
    empty = _cache_like(example, config, batch, size, mesh)
    leaves, tree = jax.tree.flatten(empty.kv)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    kv = [_normal(a.shape, a.dtype, a.sharding)(key) for key, a in zip(keys, leaves, strict=True)]
    valid = jnp.broadcast_to(jnp.arange(size)[None, :] < context, (batch, size))
    cache = dataclasses.replace(empty, kv=jax.tree.unflatten(tree, kv), valid=valid, used=jnp.int32(context))
    return cache if mesh is None else jax.device_put(cache, jax.tree.map(lambda a: a.sharding, empty))


@dataclasses.dataclass
class Program:
    """A function, and the shapes and shardings of its arguments: to be lowered, and compiled beside others.

    elsewhere: whether another process may lower it; the result is then the list of its leaves.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    mesh: Mesh | None
    elsewhere: bool = True
    lowered: Any = None
    compiled: Any = None

    def exported(self) -> bytes:
        """Lowered, for another process."""
        return lowering.exported(self.function, *self.arguments)

    def lower(self, exported: bytes | None = None) -> Program:
        """exported: by another process (None: lowered here)."""
        function = self.function if exported is None else lowering.imported(exported)
        self.lowered = jax.jit(function).lower(*self.arguments)
        return self

    def compile(self) -> None:
        self.compiled, self.lowered = self.lowered.compile(), None


@dataclasses.dataclass(kw_only=True)
class Decoding(Program):
    """Decode steps of one batch size."""

    batch: int
    context: int
    steps: int

    @classmethod
    def make(
        cls, example: ModuleType, model: Any, batch: int, context: int, steps: int, *, mesh: Mesh | None = None
    ) -> Decoding:
        """model: of shapes and shardings."""
        cache = _cache_like(example, model.config, batch, context + steps, mesh)
        shape = (batch, model.config.vocab_size)
        logits = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=_sharding(mesh, batch))
        function = functools.partial(example.decode, steps=steps)
        return cls(function, (model, logits, cache), mesh, batch=batch, context=context, steps=steps)

    def seconds(self, example: ModuleType, model: Any, repeats: int) -> float:
        """Of one step."""
        size = self.context + self.steps
        cache = filled_cache(example, model.config, self.batch, self.context, size, mesh=self.mesh)
        logits = jax.random.normal(jax.random.key(self.batch), (self.batch, model.config.vocab_size))
        logits = jax.device_put(logits, _sharding(self.mesh, self.batch))
        return _seconds(lambda: self.compiled(model, logits, cache), repeats) / self.steps


@dataclasses.dataclass(kw_only=True)
class Prefill(Program):
    """Reading prompts of length / 2 to `length` tokens, padded to `length`; with activations in `quant`, if given."""

    batch: int
    length: int
    quant: QuantConfig | None

    @classmethod
    def make(
        cls,
        example: ModuleType,
        model: Any,
        batch: int,
        length: int,
        *,
        quant: QuantConfig | None = None,
        mesh: Mesh | None = None,
    ) -> Prefill:
        """model: of shapes and shardings."""
        model = model if quant is None else example.with_quant(model, quant)
        where = _sharding(mesh, batch)
        ids, valid = (jax.ShapeDtypeStruct((batch, length), t, sharding=where) for t in (jnp.int32, jnp.bool_))
        function = functools.partial(example.prefill, size=length, side="right")
        alone = (
            mesh is None
        )  # attention by cuDNN on several devices is split by a function of the process that lowers it
        return cls(function, (model, ids, valid), mesh, alone, batch=batch, length=length, quant=quant)

    def run(self, example: ModuleType, model: Any, repeats: int) -> tuple[float, int]:
        """Seconds, and tokens that were no padding."""
        model = model if self.quant is None else example.with_quant(model, self.quant)
        ids = jax.random.randint(jax.random.key(0), (self.batch, self.length), 0, model.config.vocab_size, jnp.int32)
        lengths = np.linspace(self.length, self.length // 2, self.batch, dtype=np.int32)
        valid = jnp.asarray(np.arange(self.length)[None, :] < lengths[:, None])
        ids, valid = jax.device_put((ids, valid), _sharding(self.mesh, self.batch))
        return _seconds(lambda: self.compiled(model, ids, valid), repeats), int(lengths.sum())


@dataclasses.dataclass
class Compared:
    """Logits of last tokens that are read with the cache, against those of prompts that are read at once.

    Of the model's first LAYERS_COMPARED layers, and the median of PROMPTS_COMPARED prompts: where two experts are
    nearly tied a rounding can choose the other one, and after that nothing is the same any more.
    """

    whole: Program
    steps: dict[int, Program]  # by batch size

    @classmethod
    def make(cls, example: ModuleType, model: Any) -> Compared:
        model = example.first_layers(model, LAYERS_COMPARED)
        ids, valid = (jax.ShapeDtypeStruct((PROMPTS_COMPARED, LENGTH_COMPARED), t) for t in (jnp.int32, jnp.bool_))
        steps = {}
        for batch in (1, PROMPTS_COMPARED):
            cache = _cache_like(example, model.config, batch, LENGTH_COMPARED + 1, None)
            token, here = (jax.ShapeDtypeStruct((batch, 1), t) for t in (jnp.int32, jnp.bool_))
            steps[batch] = Program(example.read_tokens, (model, token, here, cache), None, False)
        whole = functools.partial(example.prefill, size=LENGTH_COMPARED + 1, side="right")
        return cls(Program(whole, (model, ids, valid), None, False), steps)

    def errors(self, example: ModuleType, model: Any) -> dict[int, float]:
        """For a step of one sequence, and of several."""
        model = example.first_layers(model, LAYERS_COMPARED)
        shape = (PROMPTS_COMPARED, LENGTH_COMPARED)
        ids = jax.random.randint(jax.random.key(1), shape, 0, model.config.vocab_size, jnp.int32)
        real = jnp.ones(shape, bool)
        expected, _ = self.whole.compiled(model, ids, real)
        _, cache = self.whole.compiled(model, ids, real.at[:, -1].set(False))  # its slot is filled, and not seen
        out = {}
        for batch, step in self.steps.items():
            logits = []
            for i in range(0, PROMPTS_COMPARED, batch):
                part = jax.tree.map(lambda a, i=i: a[i : i + batch] if a.ndim else a, cache)  # noqa: B023
                logits.append(step.compiled(model, ids[i : i + batch, -1:], real[i : i + batch, -1:], part)[0])
            got = jnp.concatenate(logits)
            out[batch] = statistics.median(relative_error(a, b) for a, b in zip(got, expected, strict=True))
        return out
