"""`jmoe bench model`: generation with a whole Qwen3-30B-A3B of random weights, the model of `examples/qwen3_moe.py`.

B sequences, S tokens of a prompt, N slots of the cache, R devices.

Prefill is one compiled call over padded prompts of different lengths; decoding is one compiled loop, so Python's
launches do not count. The ceiling of decoding is reading, at the copy bandwidth of the same run, what a step cannot do
without: attention and output weights, the experts that B * K assignments of an even router touch, and the keys and
values so far. The ceiling of prefill is its matmuls at the speed of a dense one. The error of decoding compares the
logits of a token that was read with the cache with those of reading everything at once (`Compared`).

On several devices the experts are spread over them: each attends for its share of the sequences, with attention weights
of its own; a single sequence is attended to by all of them.

First one device, then all that there are: all programs are lowered, compiled side by side, and timed when that is done,
format by format, the most telling first.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jmoe.config import QuantConfig

from .common import Attempts, NoProgress, Progress, Record, relative_error, wanted
from .layer_case import FP8, Ceilings, ceilings, touched_experts

DECODING = ((1, 1024), (64, 1024), (8, 1024), (256, 512))  # (B, tokens that each sequence has already)


@dataclasses.dataclass(frozen=True)
class Weights:
    """What the experts are kept in (None: BF16), and what is timed with it.

    batches and spread: the B of which decoding is timed, on one device and spread over several. prefills: what the
    activations of a prefill are quantised to.
    """

    name: str
    fmt: str | None
    batches: tuple[int, ...]
    spread: tuple[int, ...]
    prefills: tuple[QuantConfig | None, ...]


WEIGHTS = (
    Weights("BF16", None, (1, 8, 64, 256), (1, 8, 64, 256), (None,)),
    Weights("NVFP4", "nvfp4", (1, 8, 64, 256), (1, 64), (None,)),
    Weights("FP8-128", "fp8_128x128", (1, 8, 64, 256), (64,), (FP8,)),
)
STEPS = 32
LAYERS_COMPARED, PROMPTS_COMPARED, LENGTH_COMPARED = 2, 16, 24
PROMPTS, PROMPT = 8, 1024
TINY = dict(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=128, vocab_size=512,
)  # fmt: skip


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


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def step_bytes(model: Any, batch: int, context: int, *, ranks: int = 1) -> float:
    """Bytes that each of `ranks` devices has to read in a decode step of `batch` sequences; see the module docstring.

    Experts, and the sequences with their keys and values, are spread over the devices; all else is on each of them.
    """
    c = model.config
    total = _nbytes(model)
    experts = sum(_nbytes(layer.mlp.params.experts) for layer in model.layers)
    embedding = 0 if c.tie_embeddings else _nbytes(model.embed_tokens)
    share = touched_experts(c.moe.num_experts, c.moe.num_experts_per_tok, batch) / c.moe.num_experts
    cache = 2 * c.num_layers * batch * context * c.num_kv_heads * c.head_dim * jnp.dtype(c.dtype).itemsize
    return total - experts - embedding + (share * experts + cache) / ranks


def prefill_flops(config: Any, batch: int, length: int) -> float:
    """Operations of the matmuls over `batch` prompts of `length` tokens, causal attention included."""
    c, m = config, config.moe
    d, heads, kv, h = m.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
    dense = d * (heads + 2 * kv) * h + heads * h * d + d * m.num_experts
    experts = 3 * d * m.intermediate_size * m.num_experts_per_tok
    attention = heads * h * length  # scores and values, half of each masked
    return 2.0 * batch * length * c.num_layers * (dense + experts + attention) + 2.0 * batch * d * c.vocab_size


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


def _like(tree: Any, sharding: Any = None) -> Any:
    """Shapes and dtypes; sharding: one for all arrays with axes, or a function (path, leaf) -> sharding."""

    def one(path: Any, a: Any) -> jax.ShapeDtypeStruct:
        where = sharding(path, a) if callable(sharding) else sharding
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where)

    return jax.tree_util.tree_map_with_path(one, tree)


def _cache_like(example: ModuleType, config: Any, batch: int, size: int, mesh: Mesh | None) -> Any:
    empty = jax.eval_shape(lambda: example.Cache.empty(config, batch, size))
    split = _sharding(mesh, batch)
    everywhere = None if mesh is None else jax.NamedSharding(mesh, jax.P())
    return _like(empty, lambda _, a: split if a.ndim else everywhere)


@functools.cache
def _normal(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda key: jax.random.normal(key, shape, dtype), out_shardings=sharding)


def filled_cache(
    example: ModuleType, config: Any, batch: int, context: int, size: int, *, mesh: Mesh | None = None
) -> Any:
    """A cache of `size` slots, of which every sequence has filled `context`, with random keys and values."""
    like = _cache_like(example, config, batch, size, mesh)
    leaves, tree = jax.tree.flatten(like.kv)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    kv = [_normal(a.shape, a.dtype, a.sharding)(key) for key, a in zip(keys, leaves, strict=True)]
    valid = jnp.broadcast_to(jnp.arange(size)[None, :] < context, (batch, size))
    cache = dataclasses.replace(like, kv=jax.tree.unflatten(tree, kv), valid=valid, used=jnp.int32(context))
    return cache if mesh is None else jax.device_put(cache, jax.tree.map(lambda a: a.sharding, like))


@dataclasses.dataclass
class Decoding:
    """Decode steps of one batch size; `compiled` is made by `compile`, beside others."""

    batch: int
    context: int
    steps: int
    mesh: Mesh | None
    lowered: Any
    compiled: Any = None

    @classmethod
    def make(
        cls, example: ModuleType, model: Any, batch: int, context: int, steps: int, *, mesh: Mesh | None = None
    ) -> Decoding:
        """model: of shapes and shardings."""
        cache = _cache_like(example, model.config, batch, context + steps, mesh)
        shape = (batch, model.config.vocab_size)
        logits = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=_sharding(mesh, batch))
        return cls(batch, context, steps, mesh, example.decode.lower(model, logits, cache, steps=steps))

    def compile(self) -> None:
        self.compiled, self.lowered = self.lowered.compile(), None

    def seconds(self, example: ModuleType, model: Any, repeats: int) -> float:
        """Of one step."""
        size = self.context + self.steps
        cache = filled_cache(example, model.config, self.batch, self.context, size, mesh=self.mesh)
        logits = jax.random.normal(jax.random.key(self.batch), (self.batch, model.config.vocab_size))
        logits = jax.device_put(logits, _sharding(self.mesh, self.batch))
        return _seconds(lambda: self.compiled(model, logits, cache), repeats) / self.steps


@dataclasses.dataclass
class Prefill:
    """Reading prompts of length / 2 to `length` tokens, padded to `length`; with activations in `quant`, if given."""

    batch: int
    length: int
    quant: QuantConfig | None
    mesh: Mesh | None
    lowered: Any
    compiled: Any = None

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
        lowered = example.prefill.lower(model, ids, valid, size=length, side="right")
        return cls(batch, length, quant, mesh, lowered)

    def compile(self) -> None:
        self.compiled, self.lowered = self.lowered.compile(), None

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

    whole: Any
    steps: dict[int, Any]  # by batch size

    @classmethod
    def make(cls, example: ModuleType, model: Any) -> Compared:
        model = example.first_layers(model, LAYERS_COMPARED)
        ids, valid = (jax.ShapeDtypeStruct((PROMPTS_COMPARED, LENGTH_COMPARED), t) for t in (jnp.int32, jnp.bool_))
        step, steps = jax.jit(example.read_tokens), {}
        for batch in (1, PROMPTS_COMPARED):
            cache = _cache_like(example, model.config, batch, LENGTH_COMPARED + 1, None)
            token, here = (jax.ShapeDtypeStruct((batch, 1), t) for t in (jnp.int32, jnp.bool_))
            steps[batch] = step.lower(model, token, here, cache)
        return cls(example.prefill.lower(model, ids, valid, size=LENGTH_COMPARED + 1, side="right"), steps)

    def compile(self) -> None:
        self.whole, self.steps = self.whole.compile(), {batch: step.compile() for batch, step in self.steps.items()}

    def errors(self, example: ModuleType, model: Any) -> dict[int, float]:
        """For a step of one sequence, and of several."""
        model = example.first_layers(model, LAYERS_COMPARED)
        shape = (PROMPTS_COMPARED, LENGTH_COMPARED)
        ids = jax.random.randint(jax.random.key(1), shape, 0, model.config.vocab_size, jnp.int32)
        real = jnp.ones(shape, bool)
        expected, _ = self.whole(model, ids, real)
        _, cache = self.whole(model, ids, real.at[:, -1].set(False))  # its slot is filled, and not seen
        out = {}
        for batch, step in self.steps.items():
            logits = []
            for i in range(0, PROMPTS_COMPARED, batch):
                part = jax.tree.map(lambda a, i=i: a[i : i + batch] if a.ndim else a, cache)  # noqa: B023
                logits.append(step(model, ids[i : i + batch, -1:], real[i : i + batch, -1:], part)[0])
            got = jnp.concatenate(logits)
            out[batch] = statistics.median(relative_error(a, b) for a, b in zip(got, expected, strict=True))
        return out


@dataclasses.dataclass
class Format:
    """All that is measured with the experts in one format."""

    name: str
    config: Any
    prefills: list[Prefill]
    decodes: list[Decoding]
    compared: Compared | None

    @property
    def programs(self) -> list[tuple[str, Any]]:
        """What each is called, and the program."""
        reads = [(f"prefill, {self.name} weights", p) for p in self.prefills]
        writes = [(f"decode, {self.name} weights, batch {d.batch}", d) for d in self.decodes]
        return [*reads, *writes, *([(f"comparison, {self.name} weights", self.compared)] if self.compared else [])]


def formats(
    example: ModuleType,
    hf: dict[str, Any],
    *,
    decoding: tuple[tuple[int, int], ...],
    steps: int,
    prompts: tuple[int, int],
    mesh: Mesh | None = None,
    only: re.Pattern[str] | None = None,
    smoke: bool = False,
) -> Iterator[Format]:
    """Every format with its programs lowered: prefill of `prompts` (B, S), decoding with each (B, context).

    only: of the records that are `wanted`.
    """
    ranks = 1 if mesh is None else mesh.size
    for w in WEIGHTS:
        name, batches = w.name, w.batches if mesh is None else w.spread
        reads = [q for q in w.prefills if wanted(only, *_prefill_names(name, *prompts, q, ranks))]
        writes = [
            (b, context)
            for b, context in decoding
            if (smoke or b in batches) and wanted(only, *_decode_names(name, b, context, ranks))
        ]
        if not reads and not writes:
            continue
        config = example.Config.from_hf(hf, dtype="bfloat16", quant=QuantConfig(weights=w.fmt))
        shapes = jax.eval_shape(lambda c=config: example.random_model(c, key=jax.random.key(0), mesh=mesh))
        model = _like(shapes, None if mesh is None else functools.partial(_of_weights, mesh))
        prefills = [Prefill.make(example, model, *prompts, quant=q, mesh=mesh) for q in reads]
        decodes = [Decoding.make(example, model, b, context, steps, mesh=mesh) for b, context in writes]
        compared = Compared.make(example, model) if writes and mesh is None and (smoke or w.fmt is None) else None
        yield Format(name, config, prefills, decodes, compared)


def _decode_names(weights: str, batch: int, context: int, ranks: int) -> tuple[str, str]:
    """(name, case) of a record."""
    return f"decode, {weights} weights", f"batch {batch}, context {context}" + _on(ranks)


def _prefill_names(weights: str, batch: int, length: int, quant: QuantConfig | None, ranks: int) -> tuple[str, str]:
    """(name, case) of a record."""
    name = f"prefill, {weights} weights" + ("" if quant is None else " and activations")
    return name, f"{batch} prompts of {length // 2} to {length}" + _on(ranks)


def _on(ranks: int) -> str:
    return "" if ranks == 1 else f", R={ranks}"


def _of_weights(mesh: Mesh, path: Any, leaf: Any) -> jax.sharding.Sharding:
    """Experts are spread over the devices, everything else is on each: as `random_model` makes them."""
    expert = re.search(r"\b(gate_up|down)\b", jax.tree_util.keystr(path)) and leaf.ndim > 0
    return jax.NamedSharding(mesh, jax.P("ep") if expert else jax.P())


def measure(
    example: ModuleType,
    fmt: Format,
    limits: Ceilings,
    attempt: Attempts,
    *,
    mesh: Mesh | None = None,
    smoke: bool = False,
) -> Iterator[Record]:
    """Times those of `fmt.programs` that are compiled."""
    repeats, ranks = 1 if smoke else 2, 1 if mesh is None else mesh.size
    meaningful = not smoke and jax.default_backend() == "gpu"
    model = example.random_model(fmt.config, key=jax.random.key(0), mesh=mesh)
    compare = fmt.compared and functools.partial(fmt.compared.errors, example, model)
    errors = (compare and attempt(f"comparison, {fmt.name} weights", compare)) or {}
    shape = {"layers": fmt.config.num_layers, "weights": fmt.name, "R": ranks}

    def record(what, names, tokens, seconds, ceiling_seconds, ceiling_name, *, error=None, **parameters):
        return Record(
            name=names[0],
            case=names[1],
            value=tokens / seconds,
            unit="tokens/s",
            seconds=seconds,
            ceiling=tokens / ceiling_seconds,
            ceiling_name=ceiling_name,
            error=error,
            error_name="" if error is None else "cached against uncached logits",
            meaningful=meaningful,
            parameters={"what": what, **shape, **parameters},
        )

    for d in fmt.decodes:
        names = _decode_names(fmt.name, d.batch, d.context, ranks)
        seconds = d.compiled and attempt(", ".join(names), functools.partial(d.seconds, example, model, repeats))
        if seconds is None:
            continue
        nbytes = step_bytes(model, d.batch, d.context, ranks=ranks)
        how = dict(error=errors.get(1 if d.batch == 1 else PROMPTS_COMPARED), B=d.batch, bytes=nbytes)
        yield record("decode", names, d.batch, seconds, nbytes / limits.copy, "copy bandwidth", **how)
    for p in fmt.prefills:
        names = _prefill_names(fmt.name, p.batch, p.length, p.quant, ranks)
        timed = p.compiled and attempt(", ".join(names), functools.partial(p.run, example, model, repeats))
        if timed is None:
            continue
        seconds, tokens = timed
        flops = prefill_flops(fmt.config, p.batch, p.length) * tokens / (p.batch * p.length)
        rate = limits.flops["bfloat16"] * ranks
        yield record("prefill", names, tokens, seconds, flops / rate, "dense BF16 matmul", B=p.batch)


def run(
    smoke: bool,
    progress: Progress | None = None,
    *,
    devices: Sequence[Any] | None = None,
    only: re.Pattern[str] | None = None,
) -> list[Record]:
    """Every format, on one device and then spread over all that there are. only: of those `wanted`.

    devices: only spread over these (or on this one). Raises RuntimeError at the end if something failed; `progress` has
    been told the other figures by then.
    """
    progress, attempt = progress or NoProgress(), Attempts()
    module, hf = example()
    hf = hf | TINY if smoke else hf
    spreads = [devices] if devices is not None else [jax.devices()[:1], jax.devices()][: jax.device_count()]
    progress.start(1 + 2 * len(spreads))
    progress.step("ceilings")
    limits = ceilings(smoke)
    records: list[Record] = []
    for devices in spreads:
        on, mesh = f"{len(devices)} x {devices[0].device_kind}", None
        if len(devices) > 1:
            mesh = jax.make_mesh((len(devices),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
        prompts, length = (2, 16) if smoke else (PROMPTS, PROMPT)
        shapes: Any = dict(
            decoding=((1, 8), (4, 8)) if smoke else DECODING,
            steps=4 if smoke else STEPS,
            prompts=(prompts * len(devices), length),
        )
        progress.step(f"{on}: lowering and compiling")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            found, jobs = [], []
            for fmt in formats(module, hf, **shapes, mesh=mesh, only=only, smoke=smoke):
                found.append(fmt)
                jobs += [(what, pool.submit(program.compile)) for what, program in fmt.programs]
            for what, job in jobs:
                attempt(what, job.result)
        progress.step(f"{on}: {', '.join(fmt.name for fmt in found)} weights")
        for fmt in found:
            for record in measure(module, fmt, limits, attempt, mesh=mesh, smoke=smoke):
                records.append(record)
                progress.record(record)
    attempt.check()
    return records
