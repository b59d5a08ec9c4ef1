"""`jmoe bench model`: generation with a whole Qwen3-30B-A3B of random weights, the model of `examples/qwen3_moe.py`.

B sequences, S tokens of a prompt, N slots of the cache.

Prefill is one compiled call over padded prompts; decoding is one compiled loop, so Python's launches do not count. The
ceiling of decoding is reading, at the copy bandwidth of the same run, what a step cannot do without: attention and
output weights, the experts that B * K assignments of an even router touch, and the keys and values so far. The ceiling
of prefill is its matmuls at the speed of a dense one. The error compares the logits of a token that was read with the
cache with those of reading everything at once.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.config import QuantConfig

from .common import NoProgress, Progress, Record, relative_error
from .layer_case import Ceilings, ceilings, touched_experts

DECODING = ((1, 1024), (8, 1024), (64, 1024), (256, 512))  # (B, tokens that each sequence has already)
WEIGHTS = (("BF16", None), ("FP8-128", "fp8_128x128"), ("NVFP4", "nvfp4"))
STEPS = 32
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


def _like(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def filled_cache(example: ModuleType, model: Any, batch: int, context: int, size: int) -> Any:
    """A cache of `size` slots, of which every sequence has filled `context`, with random keys and values."""
    empty = jax.eval_shape(lambda: example.Cache.empty(model.config, batch, size))
    make = jax.jit(lambda key, shape, dtype: jax.random.normal(key, shape, dtype), static_argnums=(1, 2))
    leaves, tree = jax.tree.flatten(empty.kv)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    kv = [make(key, a.shape, a.dtype) for key, a in zip(keys, leaves, strict=True)]
    valid = jnp.broadcast_to(jnp.arange(size)[None, :] < context, (batch, size))
    return dataclasses.replace(empty, kv=jax.tree.unflatten(tree, kv), valid=valid, used=jnp.int32(context))


@dataclasses.dataclass
class Decoding:
    """Decode steps of one batch size; `compiled` is made by `compile`, beside others."""

    batch: int
    context: int
    steps: int
    lowered: Any
    compiled: Any = None

    @classmethod
    def make(cls, example: ModuleType, model: Any, batch: int, context: int, steps: int) -> Decoding:
        cache = jax.eval_shape(lambda: example.Cache.empty(model.config, batch, context + steps))
        logits = jax.ShapeDtypeStruct((batch, model.config.vocab_size), jnp.float32)
        return cls(batch, context, steps, example.decode.lower(_like(model), logits, cache, steps=steps))

    def compile(self) -> None:
        self.compiled = self.lowered.compile()

    def seconds(self, example: ModuleType, model: Any, repeats: int) -> float:
        """Of one step."""
        cache = filled_cache(example, model, self.batch, self.context, self.context + self.steps)
        logits = jax.random.normal(jax.random.key(self.batch), (self.batch, model.config.vocab_size))
        return _seconds(lambda: self.compiled(model, logits, cache), repeats) / self.steps


@dataclasses.dataclass
class Prefill:
    """Reading prompts of length / 2 to `length` tokens, padded to `length`."""

    batch: int
    length: int
    lowered: Any
    compiled: Any = None

    @classmethod
    def make(cls, example: ModuleType, model: Any, batch: int, length: int) -> Prefill:
        ids, valid = (jax.ShapeDtypeStruct((batch, length), t) for t in (jnp.int32, jnp.bool_))
        return cls(batch, length, example.prefill.lower(_like(model), ids, valid, size=length, side="right"))

    def compile(self) -> None:
        self.compiled = self.lowered.compile()

    def run(self, model: Any, repeats: int) -> tuple[float, int]:
        """Seconds, and tokens that were no padding."""
        ids = jax.random.randint(jax.random.key(0), (self.batch, self.length), 0, model.config.vocab_size, jnp.int32)
        lengths = np.linspace(self.length, self.length // 2, self.batch, dtype=np.int32)
        valid = jnp.asarray(np.arange(self.length)[None, :] < lengths[:, None])
        return _seconds(lambda: self.compiled(model, ids, valid), repeats), int(lengths.sum())


def cache_error(example: ModuleType, model: Any, length: int = 24) -> float:
    """Relative difference between the logits of a last token read with the cache, and of everything read at once."""
    ids = jax.random.randint(jax.random.key(1), (2, length), 0, model.config.vocab_size, jnp.int32)
    real = jnp.ones(ids.shape, bool)
    read = functools.partial(example.prefill, model, ids, size=length + 1, side="right")
    whole, _ = read(real)
    _, cache = read(real.at[:, -1].set(False))  # its slot is filled, and not seen

    @jax.jit
    def last(model, ids, cache):
        return model.logits(model.hidden(ids, cache=cache)[0][:, 0])

    return relative_error(last(model, ids[:, -1:], cache), whole)


def measure(
    example: ModuleType,
    model: Any,
    name: str,
    limits: Ceilings,
    *,
    decoding: tuple[tuple[int, int], ...],
    steps: int,
    prompts: tuple[int, int],
    error: float | None,
    smoke: bool = False,
) -> Iterator[Record]:
    """Prefill of `prompts` (B, S), and decoding with each (B, context)."""
    repeats = 1 if smoke else 2
    meaningful = not smoke and jax.default_backend() == "gpu"
    shape = {"layers": model.config.num_layers, "weights": name, "R": 1}
    prefill = Prefill.make(example, model, *prompts)
    decodes = [Decoding.make(example, model, b, context, steps) for b, context in decoding]
    with concurrent.futures.ThreadPoolExecutor() as pool:  # nothing is timed meanwhile
        list(pool.map(lambda case: case.compile(), [prefill, *decodes]))

    def record(what, case, tokens, seconds, ceiling_seconds, ceiling_name, **parameters):
        return Record(
            name=f"{what}, {name} weights",
            case=case,
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

    seconds, tokens = prefill.run(model, repeats)
    batch, length = prompts
    least = prefill_flops(model.config, batch, length) * tokens / (batch * length) / limits.flops["bfloat16"]
    case = f"{batch} prompts of {length // 2} to {length}"
    yield record("prefill", case, tokens, seconds, least, "dense matmul", B=batch)
    for d in decodes:
        seconds = d.seconds(example, model, repeats)
        nbytes = step_bytes(model, d.batch, d.context)
        case = f"batch {d.batch}, context {d.context}"
        yield record("decode", case, d.batch, seconds, nbytes / limits.copy, "copy bandwidth", B=d.batch, bytes=nbytes)


def run(smoke: bool, progress: Progress | None = None) -> list[Record]:
    """Every weight format on one device."""
    progress = progress or NoProgress()
    progress.start(len(WEIGHTS) + 1)
    module, hf = example()
    hf = hf | TINY if smoke else hf
    progress.step("ceilings")
    limits = ceilings(smoke)
    records, error = [], None
    for name, weights in WEIGHTS:
        progress.step(f"{name} weights")
        config = module.Config.from_hf(hf, dtype="bfloat16", quant=QuantConfig(weights=weights))
        model = module.random_model(config, key=jax.random.key(0))
        error = cache_error(module, model) if error is None else error  # the cache is the same for all
        decoding, steps, prompts = (((1, 8), (4, 8)), 4, (2, 16)) if smoke else (DECODING, STEPS, (PROMPTS, PROMPT))
        figures = measure(
            module, model, name, limits, decoding=decoding, steps=steps, prompts=prompts, error=error, smoke=smoke
        )
        for record in figures:
            records.append(record)
            progress.record(record)
        del model
    return records
