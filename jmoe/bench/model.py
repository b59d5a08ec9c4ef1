"""`jmoe bench model`: generation with a whole Qwen3-30B-A3B of random weights, the model of `examples/qwen3_moe.py`.

B sequences, S tokens of a prompt, N slots of the cache.

Prefill is one compiled call over padded prompts; decoding is one compiled loop, so Python's launches do not count. The
ceiling of decoding is reading, at the copy bandwidth of the same run, what a step cannot do without: attention and
output weights, the experts that B * K assignments of an even router touch, and the keys and values so far. The ceiling
of prefill is its matmuls at the speed of a dense one. The error compares the logits of a token that was read with the
cache with those of reading everything at once.
"""

from __future__ import annotations

import dataclasses
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

from jmoe.config import QuantConfig

from .common import NoProgress, Progress, Record, relative_error
from .layer import Ceilings, ceilings

BATCHES = (1, 8, 64, 256)
WEIGHTS = (("BF16", None), ("FP8-128", "fp8_128x128"), ("NVFP4", "nvfp4"))
CONTEXT = 1024  # tokens that each sequence has already when decoding is measured
STEPS = 64
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


def touched_experts(num_experts: int, top_k: int, tokens: int) -> float:
    """Experts that get a token, on average, from a router without preferences."""
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


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


def filled_cache(example: ModuleType, model: Any, batch: int, context: int, size: int) -> Any:
    """A cache of `size` slots, of which every sequence has filled `context`, with random keys and values."""
    empty = example.Cache.empty(model.config, batch, size)
    make = jax.jit(lambda key, shape, dtype: jax.random.normal(key, shape, dtype), static_argnums=(1, 2))
    kv = jax.tree.map(lambda a: make(jax.random.key(a.shape[0]), a.shape, a.dtype), empty.kv)
    valid = jnp.broadcast_to(jnp.arange(size)[None, :] < context, (batch, size))
    return dataclasses.replace(empty, kv=kv, valid=valid, used=jnp.int32(context))


def decode_seconds(
    example: ModuleType, model: Any, batch: int, *, context: int = CONTEXT, steps: int = STEPS, repeats: int = 3
) -> float:
    """Seconds of one step."""
    cache = filled_cache(example, model, batch, context, context + steps)
    logits = jax.random.normal(jax.random.key(batch), (batch, model.config.vocab_size))
    return _seconds(lambda: example.decode(model, logits, cache, steps=steps), repeats) / steps


def prefill_seconds(example: ModuleType, model: Any, batch: int, length: int, *, repeats: int = 3) -> float:
    """Seconds of reading prompts of length / 2 to `length` tokens, padded to `length`."""
    ids = jax.random.randint(jax.random.key(0), (batch, length), 0, model.config.vocab_size)
    lengths = np.linspace(length, length / 2, batch, dtype=np.int32)
    valid = jnp.asarray(np.arange(length)[None, :] < lengths[:, None])
    return _seconds(lambda: example.prefill(model, ids, valid, size=length, side="right"), repeats)


def cache_error(example: ModuleType, model: Any, length: int = 24) -> float:
    """Relative difference between the logits of a last token read with the cache, and of everything read at once."""
    ids = jax.random.randint(jax.random.key(1), (2, length), 0, model.config.vocab_size)
    real = jnp.ones(ids.shape, bool)
    whole, _ = example.prefill(model, ids, real, size=length, side="right")
    _, cache = example.prefill(model, ids[:, :-1], real[:, :-1], size=length, side="right")
    hidden, _, _ = jax.jit(lambda m, i, c: m.hidden(i, cache=c))(model, ids[:, -1:], cache)
    return relative_error(jax.jit(lambda m, h: m.logits(h))(model, hidden[:, 0]), whole)


def measure(
    example: ModuleType,
    model: Any,
    name: str,
    limits: Ceilings,
    *,
    batches: tuple[int, ...],
    context: int,
    steps: int,
    prompts: tuple[int, int],
    smoke: bool = False,
) -> list[Record]:
    """Prefill, and decoding with each batch size."""
    repeats, error = (1 if smoke else 3), cache_error(example, model)
    meaningful = not smoke and jax.default_backend() == "gpu"
    shape = {"layers": model.config.num_layers, "weights": name, "R": 1}

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
            error_name="cached against uncached logits",
            meaningful=meaningful,
            parameters={"what": what, **shape, **parameters},
        )

    batch, length = prompts
    seconds = prefill_seconds(example, model, batch, length, repeats=repeats)
    least = prefill_flops(model.config, batch, length) / limits.flops["bfloat16"]
    records = [
        record("prefill", f"{batch} prompts of {length}", batch * length, seconds, least, "dense matmul", B=batch)
    ]
    for b in batches:
        seconds = decode_seconds(example, model, b, context=context, steps=steps, repeats=repeats)
        nbytes = step_bytes(model, b, context)
        case = f"batch {b}, context {context}"
        records.append(record("decode", case, b, seconds, nbytes / limits.copy, "copy bandwidth", B=b, bytes=nbytes))
    return records


def run(smoke: bool, progress: Progress | None = None) -> list[Record]:
    """Every weight format on one device."""
    progress = progress or NoProgress()
    progress.start(len(WEIGHTS) + 1)
    module, hf = example()
    hf = hf | TINY if smoke else hf
    progress.step("ceilings")
    limits = ceilings(smoke)
    records = []
    for name, weights in WEIGHTS:
        progress.step(f"{name} weights")
        config = module.Config.from_hf(hf, dtype="bfloat16", quant=QuantConfig(weights=weights))
        model = module.random_model(config, key=jax.random.key(0))
        sizes = dict(batches=(1, 4), context=8, steps=4, prompts=(2, 16)) if smoke else dict(
            batches=BATCHES, context=CONTEXT, steps=STEPS, prompts=(PROMPTS, PROMPT)
        )  # fmt: skip
        records += measure(module, model, name, limits, smoke=smoke, **sizes)
        del model
    return records
