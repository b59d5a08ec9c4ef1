"""Qwen3-MoE in Flax NNX: the whole model, its KV cache, prefill and a jitted decode loop, in one readable file.

Letters: B sequences, S tokens of one call, N slots of the cache, D hidden, H query heads, G key/value heads, h head
size, V vocabulary, E experts, F expert width. Follows the Qwen3-MoE of Hugging Face transformers: RMSNorm before
attention and before the MoE, RMSNorm on each query and key head, rotary embeddings by halves, no bias outside the
attention's option.

Prompts of different lengths are padded on either side; a mask says which tokens are real. Padding is never attended to,
and the MoE layers do not route it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jmoe.checkpoint import Checkpoint, load_moe_layer, read_rest, write_safetensors
from jmoe.config import MoEConfig, QuantConfig
from jmoe.nn import MoE


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a Qwen3-MoE model. `moe` describes its MoE layers, `dtype` is the type of all the rest."""

    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    moe: MoEConfig
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    attention_bias: bool = False
    dense_layers: tuple[int, ...] = ()  # layers with one plain MLP of width dense_size in place of experts
    dense_size: int = 0
    dtype: str = "bfloat16"

    @classmethod
    def from_hf(cls, hf: dict, *, dtype: str = "bfloat16", **moe_options) -> Config:
        """From the contents of a config.json; `moe_options` replace fields of the MoEConfig (quant, dtype, ...)."""
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(
                f"config.json asks for {kind!r} rotary embeddings; this example has the default kind only. Use a "
                "checkpoint without rope scaling, or remove rope_scaling for contexts that the model was trained on."
            )
        if hf.get("use_sliding_window"):
            raise ValueError(
                "config.json asks for sliding-window attention; this example attends to the whole context. Use a "
                "checkpoint with use_sliding_window=false, as all published Qwen3-MoE models have it."
            )
        layers, step = hf["num_hidden_layers"], hf.get("decoder_sparse_step", 1)
        plain = set(hf.get("mlp_only_layers") or ())
        return cls(
            vocab_size=hf["vocab_size"],
            num_layers=layers,
            num_heads=hf["num_attention_heads"],
            num_kv_heads=hf["num_key_value_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            moe=MoEConfig.from_hf(hf, **({"dtype": dtype} | moe_options)),
            rope_theta=float(rope.get("rope_theta", hf.get("rope_theta", 10_000.0))),
            norm_eps=hf["rms_norm_eps"],
            tie_embeddings=hf.get("tie_word_embeddings", False),
            attention_bias=hf.get("attention_bias", False),
            dense_layers=tuple(i for i in range(layers) if i in plain or (i + 1) % step),
            dense_size=hf.get("intermediate_size", 0),
            dtype=dtype,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of what was read so far. k, v [layers, B, N, G, h]; valid bool [B, N]; used: slots filled, int32
    [].
    """

    k: jax.Array
    v: jax.Array
    valid: jax.Array
    used: jax.Array

    @classmethod
    def empty(cls, config: Config, batch: int, size: int) -> Cache:
        shape = (config.num_layers, batch, size, config.num_kv_heads, config.head_dim)
        zeros = jnp.zeros(shape, config.dtype)
        return cls(zeros, zeros, jnp.zeros((batch, size), bool), jnp.zeros((), jnp.int32))


def rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotates each pair (i, i + h/2) of x [B, S, H, h] by its position [B, S]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, :, None].astype(jnp.float32) * frequency[None, None, :]  # [B, S, h/2]
    cos, sin = jnp.cos(angle)[:, :, None, :], jnp.sin(angle)[:, :, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with RMSNorm on each query and key head."""

    def __init__(self, c: Config, *, linear: Callable, norm: Callable):
        d = c.moe.hidden_size
        self.q_proj = linear(d, c.num_heads * c.head_dim, use_bias=c.attention_bias)
        self.k_proj = linear(d, c.num_kv_heads * c.head_dim, use_bias=c.attention_bias)
        self.v_proj = linear(d, c.num_kv_heads * c.head_dim, use_bias=c.attention_bias)
        self.o_proj = linear(c.num_heads * c.head_dim, d, use_bias=c.attention_bias)
        self.q_norm, self.k_norm = norm(c.head_dim), norm(c.head_dim)
        self.config = c

    def __call__(self, x, positions, mask, cached=None, used=None):
        """x [B, S, D], mask bool [B, S, N]; cached: (k, v) [B, N, G, h] to write to at slot `used` -> y, (k, v)."""
        c, (batch, length, _) = self.config, x.shape
        q = self.q_norm(self.q_proj(x).reshape(batch, length, c.num_heads, c.head_dim))
        k = self.k_norm(self.k_proj(x).reshape(batch, length, c.num_kv_heads, c.head_dim))
        v = self.v_proj(x).reshape(batch, length, c.num_kv_heads, c.head_dim)
        q, k = rotary(q, positions, c.rope_theta), rotary(k, positions, c.rope_theta)
        if cached is not None:
            k = jax.lax.dynamic_update_slice_in_dim(cached[0], k, used, axis=1)
            v = jax.lax.dynamic_update_slice_in_dim(cached[1], v, used, axis=1)
        q = q.reshape(batch, length, c.num_kv_heads, -1, c.head_dim)  # queries by the key head that they read
        # Scores stay in the order that a batched matmul gives them: putting q before s would copy the largest array.
        scores = jnp.einsum("bsgqh,bngh->bgsqn", q, k, preferred_element_type=jnp.float32) * c.head_dim**-0.5
        scores = jnp.where(mask[:, None, :, None], scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        out = jnp.einsum("bgsqn,bngh->bsgqh", weights, v)
        return self.o_proj(out.reshape(batch, length, -1)), (k, v)


class DenseMLP(nnx.Module):
    """The plain SwiGLU MLP of a layer without experts."""

    def __init__(self, c: Config, *, linear: Callable):
        self.gate_proj = linear(c.moe.hidden_size, c.dense_size)
        self.up_proj = linear(c.moe.hidden_size, c.dense_size)
        self.down_proj = linear(c.dense_size, c.moe.hidden_size)

    def call_with_stats(self, x, *, valid=None):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x)), None


class Block(nnx.Module):
    """One decoder layer: attention, then experts (or a plain MLP), each on a normed input and added to the stream."""

    def __init__(self, c: Config, *, moe: Callable, linear: Callable, norm: Callable, dense: bool, rngs: nnx.Rngs):
        self.input_layernorm, self.post_attention_layernorm = norm(c.moe.hidden_size), norm(c.moe.hidden_size)
        self.self_attn = Attention(c, linear=linear, norm=norm)
        self.mlp = DenseMLP(c, linear=linear) if dense else moe(c.moe, rngs=rngs)

    def __call__(self, x, positions, mask, valid, cached=None, used=None):
        attended, kv = self.self_attn(self.input_layernorm(x), positions, mask, cached, used)
        x = x + attended
        y, stats = self.mlp.call_with_stats(self.post_attention_layernorm(x), valid=valid)
        return x + y, kv, stats


class Qwen3Moe(nnx.Module):
    """The decoder. `moe`: what makes a layer's MoE module from (MoEConfig, rngs=...), `jmoe.nn.MoE` unless told."""

    def __init__(self, config: Config, *, moe: Callable = MoE, param_dtype=jnp.float32, rngs: nnx.Rngs):
        options = dict(dtype=config.dtype, param_dtype=param_dtype, rngs=rngs)
        linear = functools.partial(nnx.Linear, use_bias=False, kernel_init=nnx.initializers.normal(0.02), **options)
        norm = functools.partial(nnx.RMSNorm, epsilon=config.norm_eps, **options)
        d = config.moe.hidden_size
        self.config = config
        self.embed_tokens = nnx.Embed(config.vocab_size, d, embedding_init=nnx.initializers.normal(0.02), **options)
        self.layers = nnx.List(
            [
                Block(config, moe=moe, linear=linear, norm=norm, dense=i in config.dense_layers, rngs=rngs)
                for i in range(config.num_layers)
            ]
        )
        self.norm = norm(d)
        self.lm_head = nnx.data(None) if config.tie_embeddings else linear(d, config.vocab_size)

    def embed(self, ids: jax.Array) -> jax.Array:
        """ids [B, S] -> [B, S, D]. Small vocabularies multiply by one-hot rows: the gradient of a lookup adds a batch's
        rows into a few table rows one after another, which for bytes takes a GPU longer than the rest of the step.
        """
        if self.config.vocab_size > 1024:
            return self.embed_tokens(ids)
        table = self.embed_tokens.embedding[...].astype(self.config.dtype)
        return jax.nn.one_hot(ids, self.config.vocab_size, dtype=table.dtype) @ table

    def hidden(self, ids: jax.Array, *, valid: jax.Array | None = None, cache: Cache | None = None):
        """Reads ids [B, S] after what `cache` holds -> (normed hidden states [B, S, D], cache, MoEStats of the MoE
        layers).

        valid: bool [B, S], False for padding on either side. Without a cache the S tokens attend to each other only.
        """
        real = jnp.ones(ids.shape, bool) if valid is None else valid
        before = jnp.zeros(ids.shape[:1], jnp.int32) if cache is None else cache.valid.sum(1, dtype=jnp.int32)
        positions = before[:, None] + jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1  # of real tokens; padding has none
        used = None if cache is None else cache.used
        slots = real if cache is None else jax.lax.dynamic_update_slice_in_dim(cache.valid, real, used, axis=1)
        own = jnp.arange(ids.shape[1]) + (0 if used is None else used)  # the slot of each token of this call
        mask = slots[:, None, :] & (jnp.arange(slots.shape[1])[None, :] <= own[:, None])[None]  # [B, S, N]
        x = self.embed(ids)

        def run(x, layer_and_cached):
            layer, cached = layer_and_cached
            x, kv, stats = layer(x, positions, mask, valid, cached, used)
            return x, (kv if cache is not None else None, stats)

        cached = None if cache is None else (cache.k, cache.v)
        if isinstance(self.layers, Block):  # one module whose arrays hold all layers: see `stack_layers`
            x, (kv, stats) = jax.lax.scan(run, x, (self.layers, cached))
        else:
            outputs = []
            for i, layer in enumerate(self.layers):
                x, output = run(x, (layer, jax.tree.map(operator.itemgetter(i), cached)))
                outputs.append(output)
            kvs, stats = zip(*outputs, strict=True)
            kv, stats = (
                jax.tree.map(lambda *a: jnp.stack(a), *part) if part else None
                for part in (kvs, [s for s in stats if s is not None])
            )
        return self.norm(x), None if cache is None else Cache(*kv, slots, used + ids.shape[1]), stats

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., D] -> float32 [..., V]."""
        if self.lm_head is None:
            table = self.embed_tokens.embedding[...].astype(hidden.dtype)
            return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)
        kernel = self.lm_head.kernel[...].astype(hidden.dtype)
        return jnp.einsum("...d,dv->...v", hidden, kernel, preferred_element_type=jnp.float32)

    def __call__(self, ids: jax.Array, *, valid: jax.Array | None = None) -> jax.Array:
        """ids [B, S] -> float32 logits [B, S, V] of the token after each."""
        return self.logits(self.hidden(ids, valid=valid)[0])


def blocks(model: Qwen3Moe) -> list[Block]:
    """The model's layers; of a stacked model, the one module that holds all of them."""
    return [model.layers] if isinstance(model.layers, Block) else list(model.layers)


def stack_layers(model: Qwen3Moe) -> Qwen3Moe:
    """The same model with all layers in one module, run by `lax.scan`: compiles as fast as a single layer.

    The scan copies each layer's weights before it uses them. That is nothing for a small model and too much for a large
    one.
    """
    graph, state = nnx.split(model)
    stacked = nnx.merge(graph, state)
    stacked.layers = jax.tree.map(lambda *a: jnp.stack(a), *model.layers)
    return stacked


def unstack_layers(model: Qwen3Moe) -> Qwen3Moe:
    """The inverse of `stack_layers`."""
    graph, state = nnx.split(model)
    plain = nnx.merge(graph, state)
    plain.layers = nnx.List(
        [jax.tree.map(operator.itemgetter(i), model.layers) for i in range(model.config.num_layers)]
    )
    return plain


@functools.partial(jax.jit, static_argnames=("size",))
def prefill(model: Qwen3Moe, ids: jax.Array, valid: jax.Array, *, size: int) -> tuple[jax.Array, Cache]:
    """Reads padded prompts [B, S] -> logits [B, V] after each one's last real token, and a cache of `size` slots."""
    hidden, cache, _ = model.hidden(ids, valid=valid, cache=Cache.empty(model.config, ids.shape[0], size))
    last = jnp.max(jnp.where(valid, jnp.arange(ids.shape[1])[None, :], 0), axis=1)
    return model.logits(jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]), cache


@functools.partial(jax.jit, static_argnames=("steps",))
def decode(
    model: Qwen3Moe, logits, cache: Cache, key, temperature=0.0, end=-1, *, steps: int
) -> tuple[jax.Array, jax.Array]:
    """Writes up to `steps` tokens [B, steps] in one compiled loop, which stops early once every sequence wrote `end`.

    temperature 0 takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature) with `key`.
    end: a token's id, -1 for none; places after a sequence's `end` hold it too. Also returns how many steps ran, int32
    [].
    """
    end, temperature = jnp.asarray(end, jnp.int32), jnp.asarray(temperature, jnp.float32)

    def body(carry):
        step, logits, cache, done, out = carry
        drawn = jax.random.categorical(jax.random.fold_in(key, step), logits / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)
        token = jnp.where(done, end, token)
        out = jax.lax.dynamic_update_slice_in_dim(out, token[:, None], step, axis=1)
        done = done | (token == end)
        hidden, cache, _ = model.hidden(token[:, None], valid=~done[:, None], cache=cache)
        return step + 1, model.logits(hidden[:, 0]), cache, done, out

    batch = logits.shape[0]
    start = (jnp.int32(0), logits, cache, jnp.zeros(batch, bool), jnp.full((batch, steps), end))
    step, _, _, _, out = jax.lax.while_loop(lambda c: (c[0] < steps) & ~jnp.all(c[3]), body, start)
    return out, step


def pad_prompts(prompts: list[list[int]], *, pad: int = 0, side: str = "left"):
    """Token lists of different lengths -> ids int32 [B, S] and valid bool [B, S], padded on the `side` named."""
    length = max(len(p) for p in prompts)
    ids = [[pad] * (length - len(p)) + p if side == "left" else p + [pad] * (length - len(p)) for p in prompts]
    valid = [[False] * (length - len(p)) + [True] * len(p) for p in prompts]
    return jnp.array(ids, jnp.int32), jnp.array(valid if side == "left" else [v[::-1] for v in valid])


def _names(model: Qwen3Moe):
    """(checkpoint name, parameter, whether it is stored transposed) of everything but the MoE layers."""
    yield "model.embed_tokens.weight", model.embed_tokens.embedding, False
    yield "model.norm.weight", model.norm.scale, False
    if model.lm_head is not None:
        yield "lm_head.weight", model.lm_head.kernel, True
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", getattr(layer, name).scale, False
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}self_attn.{name}.weight", getattr(layer.self_attn, name).scale, False
        plain = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj")}
        if isinstance(layer.mlp, DenseMLP):
            plain["mlp"] = ("gate_proj", "up_proj", "down_proj")
        for part, names in plain.items():
            for name in names:
                linear = getattr(getattr(layer, part), name)
                yield f"{prefix}{part}.{name}.weight", linear.kernel, True
                if linear.bias is not None:
                    yield f"{prefix}{part}.{name}.bias", linear.bias, False


def load(
    folder, *, mesh=None, backend: str = "auto", quant: QuantConfig | None = None, dtype: str = "bfloat16"
) -> Qwen3Moe:
    """The model in a Hugging Face Qwen3-MoE folder, its experts spread over the axis "ep" of `mesh` (None: one device).

    Each device reads the experts that it holds. Experts that the folder keeps in a low-bit format stay in it.
    """
    sharding = None if mesh is None else jax.NamedSharding(mesh, jax.P("ep"))
    with Checkpoint(folder) as checkpoint:
        config = Config.from_hf(checkpoint.config, dtype=dtype, quant=quant or QuantConfig())
        # No weight is initialised: the modules are made of shapes alone, and then given the checkpoint's arrays.
        model = nnx.eval_shape(lambda: Qwen3Moe(config, moe=lambda *_, **__: nnx.data(None), rngs=nnx.Rngs(0)))
        rest = read_rest(checkpoint, dtype=dtype, sharding=sharding)
        for name, param, transposed in _names(model):
            value = rest.pop(name)
            param.set_value(value.T if transposed else value)
        if rest.keys() - {"lm_head.weight"}:
            raise ValueError(f"{folder} has tensors that a Qwen3-MoE model does not: {', '.join(sorted(rest))}.")
        for i, layer in enumerate(model.layers):
            if i not in config.dense_layers:
                params = load_moe_layer(checkpoint, i, sharding=sharding, dtype=dtype)
                layer.mlp = MoE.from_params(config.moe, params, mesh=mesh, backend=backend)
    return model


def save(model: Qwen3Moe, hf: dict, folder, *, dtype=jnp.bfloat16) -> None:
    """Writes a Hugging Face folder: config.json with the contents of `hf`, and model.safetensors in `dtype`."""
    if isinstance(model.layers, Block):
        model = unstack_layers(model)
    tensors = {name: param[...].T if transposed else param[...] for name, param, transposed in _names(model)}
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}.mlp."
        if isinstance(layer.mlp, DenseMLP):
            continue
        tensors[prefix + "gate.weight"] = layer.mlp.router[...]
        gate_up, down = np.asarray(layer.mlp.gate_up[...]), np.asarray(layer.mlp.down[...])
        for e in range(model.config.moe.num_experts):  # slots beyond, where E does not divide into the ranks, are empty
            names = {"gate_proj": gate_up[e, 0], "up_proj": gate_up[e, 1], "down_proj": down[e]}
            tensors |= {f"{prefix}experts.{e}.{name}.weight": value for name, value in names.items()}
    folder = pathlib.Path(folder)
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    arrays = {name: np.asarray(jnp.asarray(value, dtype)) for name, value in tensors.items()}
    write_safetensors(folder / "model.safetensors", arrays, metadata={"format": "pt"})
