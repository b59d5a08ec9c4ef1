"""Speculative decoding: the model's own first layer drafts a few tokens, the whole model checks them in one call.

    python examples/speculative.py                                       # the small model of this repository
    python examples/speculative.py --model Qwen3-30B-A3B --window 4 --prompt "The three laws are"

What is written is what plain greedy decoding writes, token for token: the draft only decides how many tokens one call
of the model settles. Target and draft run in one compiled loop and share one set of exchange buffers.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import qwen3_moe
from flax import nnx
from qwen3_moe import Cache, Qwen3Moe

from jmoe.checkpoint import Checkpoint, draft_format, share_workspace
from jmoe.config import QuantConfig


def first_layers(model: Qwen3Moe, count: int = 1) -> Qwen3Moe:
    """A draft: the first `count` layers of `model` under its own embedding, norm and head. No weight is copied."""
    draft = nnx.merge(*nnx.split(model))
    draft.layers = nnx.List(list(model.layers)[:count])
    dense = tuple(i for i in model.config.dense_layers if i < count)
    draft.config = dataclasses.replace(model.config, num_layers=count, dense_layers=dense)
    return draft


def rewind(cache: Cache, used: jax.Array) -> Cache:
    """The cache as it was when `used` slots were filled: nothing sees the keys and values beyond."""
    before = jnp.arange(cache.valid.shape[1])[None, :] < used
    return dataclasses.replace(cache, valid=cache.valid & before, used=used)


def greedy(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("steps", "window"))
def speculate(target: Qwen3Moe, draft: Qwen3Moe, logits, cache: Cache, draft_cache: Cache, *, steps: int, window: int):
    """Writes `steps` tokens after one prompt -> (tokens int32 [steps], calls of the target int32 []).

    logits [1, V]: the target's after the prompt, which both caches hold. window: tokens that the draft proposes for
    each call of the target. Both caches need room for steps + window tokens more.
    """

    def body(carry):
        count, calls, token, cache, draft_cache, out = carry
        start = cache.used

        def propose(carry, _):  # one more step than tokens are proposed, so that the draft has read all it proposed
            token, draft_cache = carry
            hidden, draft_cache, _ = draft.hidden(token[:, None], cache=draft_cache)
            return (greedy(draft.logits(hidden[:, 0])), draft_cache), token

        (_, draft_cache), read = jax.lax.scan(propose, (token, draft_cache), length=window + 1)
        read = read.T  # [1, window + 1]: the last token that is settled, and the proposals
        hidden, cache, _ = target.hidden(read, cache=cache)
        said = greedy(target.logits(hidden))  # [1, window + 1]: what plain decoding writes after each
        agreed = jnp.sum(jnp.cumprod(said[0, :-1] == read[0, 1:], dtype=jnp.int32), dtype=jnp.int32)
        out = jax.lax.dynamic_update_slice_in_dim(out, said[0], count, 0)  # later rounds overwrite what was not agreed
        token = jax.lax.dynamic_slice_in_dim(said, agreed, 1, axis=1)[:, 0]
        used = start + agreed + 1
        return count + agreed + 1, calls + 1, token, rewind(cache, used), rewind(draft_cache, used), out

    token = greedy(logits)  # [1], the first one, settled by the prompt
    out = jnp.zeros(steps + window + 1, jnp.int32).at[0].set(token[0])
    start = (jnp.int32(1), jnp.int32(1), token, cache, draft_cache, out)
    _, calls, _, _, _, out = jax.lax.while_loop(lambda c: c[0] < steps, body, start)
    return out[:steps], calls


def run(model: Qwen3Moe, draft: Qwen3Moe, ids: jax.Array, *, steps: int, window: int):
    """ids [1, S] -> (tokens by speculation, tokens by plain decoding, calls of the target), after compiling both."""
    size, valid = ids.shape[1] + steps + window + 1, jnp.ones(ids.shape, bool)
    logits, cache = qwen3_moe.prefill(model, ids, valid, size=size)
    _, draft_cache = qwen3_moe.prefill(draft, ids, valid, size=size)
    tokens, calls = speculate(model, draft, logits, cache, draft_cache, steps=steps, window=window)
    plain, _ = qwen3_moe.decode(model, logits, cache, jax.random.key(0), steps=steps)
    return tokens, plain[0], int(calls)


def main(argv=None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=pathlib.Path, default=pathlib.Path(__file__).parent / "tiny_model")
    p.add_argument("--prompt", default="import os\nimport sys\n\n")
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--window", type=int, default=3, help="tokens that the draft proposes for each call of the model")
    p.add_argument("--quant", default="none", help="what the experts take: none, mxfp8, nvfp4_online, ...")
    args = p.parse_args(argv)
    import text

    quant = QuantConfig(activations=args.quant)
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    model = qwen3_moe.load(args.model, quant=quant, dtype=dtype)
    draft = first_layers(model)
    per_token = quant.activations == "nvfp4_token"
    with Checkpoint(args.model) as checkpoint:
        module = f"model.layers.{checkpoint.moe_layers[0]}.mlp.experts.0.up_proj"
        form = draft_format(module, per_token=per_token, source_ignore=checkpoint.scheme.ignore)
        kept = form if quant.activations is not None else checkpoint.scheme.name
    layers = [m.layers[checkpoint.moe_layers[0]].mlp.layer for m in (model, draft)]
    buffers = share_workspace(*layers, tokens=args.window + 1)
    print(f"draft: layer 0 of {model.config.num_layers}, experts: {kept}; shared buffers: {buffers.total / 1e3:.1f} kB")
    tokenizer = text.load_tokenizer(args.model)
    ids = jnp.asarray([tokenizer.encode(args.prompt)], jnp.int32)
    run(model, draft, ids, steps=args.max_tokens, window=args.window)  # compiles
    begin = time.perf_counter()
    tokens, plain, calls = run(model, draft, ids, steps=args.max_tokens, window=args.window)
    seconds = time.perf_counter() - begin
    print(args.prompt + tokenizer.decode(list(map(int, tokens))))
    same = "the same text" if bool(jnp.all(tokens == plain)) else "OTHER TEXT"
    print(f"{args.max_tokens} tokens in {calls} calls of the model, {args.max_tokens / calls:.2f} a call: {same} as by")
    print(f"plain greedy decoding, which takes {args.max_tokens} calls; both together {seconds:.2f} s")


if __name__ == "__main__":
    main()
