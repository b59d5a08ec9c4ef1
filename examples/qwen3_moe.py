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
import one_token
from flax import nnx

from jmoe.checkpoint import Checkpoint, load_moe_layer, read_rest, write_safetensors
from jmoe.config import MoEConfig, QuantConfig
from jmoe.experts import ExpertWeights
from jmoe.layer import quantize_params
from jmoe.nn import MoE
from jmoe.params import MoEParams


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
    """Keys and values of what was read so far. valid bool [B, N]; used: slots filled, int32 [].

    kv: for each layer keys and values [B, G, N, h], which a decode loop updates in place; of a stacked model one pair
    of arrays [layers, ...].
    """

    kv: tuple
    valid: jax.Array
    used: jax.Array

    @classmethod
    def empty(cls, config: Config, batch: int, size: int, *, stacked: bool = False) -> Cache:
        shape = (batch, config.num_kv_heads, size, config.head_dim)
        pair = lambda *lead: tuple(jnp.zeros((*lead, *shape), config.dtype) for _ in "kv")  # noqa: E731
        kv = pair(config.num_layers) if stacked else tuple(pair() for _ in range(config.num_layers))
        return cls(kv, jnp.zeros((batch, size), bool), jnp.zeros((), jnp.int32))


def rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotates each pair (i, i + h/2) of x [B, S, H, h] by its position [B, S]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, :, None].astype(jnp.float32) * frequency[None, None, :]  # [B, S, h/2]
    cos, sin = jnp.cos(angle)[:, :, None, :], jnp.sin(angle)[:, :, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Linear(nnx.Module):
    """A linear map x [..., in] -> [..., out]; weight [out, in], as checkpoints have it, bias [out] or None."""

    def __init__(self, size_in: int, size_out: int, *, use_bias: bool, dtype, param_dtype, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.weight = nnx.Param(init(rngs.params(), (size_out, size_in), param_dtype))
        self.bias = nnx.Param(jnp.zeros(size_out, param_dtype)) if use_bias else nnx.data(None)
        self.dtype = dtype

    def __call__(self, x, *, out_dtype=None):
        """In the layer's dtype unless told; summed in float32 where that is what is asked for."""
        rows = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        weight = self.weight[...].astype(self.dtype)
        # XLA turns a product with a single row into products with every weight and a sum, which it may write out.
        # Beside rows of zeros it stays a matmul, which reads the weights once.
        alone = rows.shape[0] == 1
        rows = jnp.pad(rows, ((0, 7), (0, 0))) if alone else rows
        y = jnp.einsum("nd,vd->nv", rows, weight, preferred_element_type=out_dtype or self.dtype)
        y = y if self.bias is None else y + self.bias[...].astype(y.dtype)[None]
        return (y[:1] if alone else y).reshape(*x.shape[:-1], -1)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x [..., H, h] with a root mean square of 1 in each head, times scale [H, h]."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * (inverse * scale.astype(jnp.float32)[None, None])).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with RMSNorm on each query and key head."""

    def __init__(self, c: Config, *, linear: Callable, norm: Callable):
        d = c.moe.hidden_size
        heads = c.num_heads + 2 * c.num_kv_heads  # queries, keys and values are one product
        self.qkv_proj = linear(d, heads * c.head_dim, use_bias=c.attention_bias)
        self.o_proj = linear(c.num_heads * c.head_dim, d, use_bias=c.attention_bias)
        self.q_norm, self.k_norm = norm(c.head_dim), norm(c.head_dim)
        self.config = c

    def __call__(self, x, positions, mask, cached=None, used=None):
        """x [B, S, D] -> y, (k, v); cached: those so far, [B, G, N, h], to write to at slot `used`.

        mask: bool [B, S, N or S], what each token sees of the cache (or, without one, of this call); None: of this call
        what comes before it.
        """
        c, (batch, length, _) = self.config, x.shape
        heads = self.qkv_proj(x).reshape(batch, length, -1, c.head_dim)
        qk, v = jnp.split(heads, [c.num_heads + c.num_kv_heads], axis=2)
        # Queries and keys go through norm and rotation together: fewer kernels where those are what counts.
        counts = ((self.q_norm, c.num_heads), (self.k_norm, c.num_kv_heads))
        scale = jnp.concatenate([jnp.broadcast_to(n.scale[...], (count, c.head_dim)) for n, count in counts])
        qk = rms_norm(qk, scale, c.norm_eps)
        q, k = jnp.split(rotary(qk, positions, c.rope_theta), [c.num_heads], axis=2)
        kv = (jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))  # [B, G, S, h]
        if cached is not None:
            write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=used, axis=2)
            kv = tuple(write(old, new) for old, new in zip(cached, kv, strict=True))
        if mask is None:
            flash = jax.default_backend() == "gpu" and q.dtype != jnp.float32
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if flash else "xla")
        else:
            out = _attend(q, *kv, mask)
        return self.o_proj(out.reshape(batch, length, -1)), kv


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """q [B, S, H, h], k and v [B, G, N, h], mask bool [B, S, N] -> [B, S, H, h].

    The query heads that share a key head are rows of one matmul, in which the cache is read as it lies.
    """
    batch, length, heads, size = q.shape
    groups = k.shape[1]
    q = jnp.swapaxes(q.reshape(batch, length, groups, -1, size), 1, 2)  # [B, G, S, H/G, h]
    rows = q.reshape(batch, groups, -1, size)
    scores = jnp.einsum("bgqh,bgnh->bgqn", rows, k, preferred_element_type=jnp.float32) * size**-0.5
    scores = scores.reshape(*q.shape[:4], -1)  # [B, G, S, H/G, N]
    scores = jnp.where(mask[:, None, :, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(batch, groups, -1, k.shape[2])
    out = jnp.einsum("bgqn,bgnh->bgqh", weights, v).reshape(q.shape)
    return jnp.swapaxes(out, 1, 2).reshape(batch, length, heads, size)


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


@jax.jit
def run_block(layer: Block, x, positions, mask, valid, cached, used):
    """One layer. A jitted function of its own, so that equal layers are traced once."""
    return layer(x, positions, mask, valid, cached, used)


class Qwen3Moe(nnx.Module):
    """The decoder. `moe`: what makes a layer's MoE module from (MoEConfig, rngs=...), `jmoe.nn.MoE` unless told."""

    def __init__(self, config: Config, *, moe: Callable = MoE, param_dtype=jnp.float32, rngs: nnx.Rngs):
        options = dict(dtype=config.dtype, param_dtype=param_dtype, rngs=rngs)
        linear = functools.partial(Linear, use_bias=False, **options)
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

    def hidden(
        self,
        ids: jax.Array,
        *,
        valid: jax.Array | None = None,
        cache: Cache | None = None,
        causal: bool = False,
    ):
        """Reads ids [B, S] after what `cache` holds -> (normed hidden states [B, S, D], cache, MoEStats of the MoE
        layers).

        valid: bool [B, S], False for padding on either side. Without a cache the S tokens attend to each other only.
        causal: the cache is empty and padding, if any, comes last; then nothing has to be masked, and attention is a
        plain causal one (cuDNN's on GPUs).
        """
        real = jnp.ones(ids.shape, bool) if valid is None else valid
        before = jnp.zeros(ids.shape[:1], jnp.int32) if cache is None else cache.valid.sum(1, dtype=jnp.int32)
        positions = before[:, None] + jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1  # of real tokens; padding has none
        used = None if cache is None else cache.used
        slots = real if cache is None else jax.lax.dynamic_update_slice_in_dim(cache.valid, real, used, axis=1)
        mask = None
        if not causal and (cache is not None or valid is not None):
            own = jnp.arange(ids.shape[1]) + (0 if used is None else used)  # the slot of each token of this call
            mask = slots[:, None, :] & (jnp.arange(slots.shape[1])[None, :] <= own[:, None])[None]  # [B, S, N]
        x = self.embed(ids)

        def run(x, layer_and_cached):
            layer, cached = layer_and_cached
            x, kv, stats = run_block(layer, x, positions, mask, valid, cached, used)
            return x, (kv if cache is not None else None, stats)

        cached = None if cache is None else cache.kv
        if isinstance(self.layers, Block):  # one module whose arrays hold all layers: see `stack_layers`
            x, (kv, stats) = jax.lax.scan(run, x, (self.layers, cached))
        else:
            outputs = []
            for i, layer in enumerate(self.layers):
                x, output = run(x, (layer, None if cached is None else cached[i]))
                outputs.append(output)
            kv, stats = zip(*outputs, strict=True)
            found = [s for s in stats if s is not None]
            stats = jax.tree.map(lambda *a: jnp.stack(a), *found) if found else None
        return self.norm(x), None if cache is None else Cache(kv, slots, used + ids.shape[1]), stats

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., D] -> float32 [..., V]."""
        if self.lm_head is None:
            table = self.embed_tokens.embedding[...].astype(hidden.dtype)
            return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)
        return self.lm_head(hidden, out_dtype=jnp.float32)

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


def with_quant(model: Qwen3Moe, quant: QuantConfig) -> Qwen3Moe:
    """The same arrays with other formats of activations; their weights must be in `quant.weights` already."""
    graph, state = nnx.split(model)
    other = nnx.merge(graph, state)
    moe = dataclasses.replace(model.config.moe, quant=quant)
    other.config = dataclasses.replace(model.config, moe=moe)
    for block in other.layers:
        if isinstance(block.mlp, MoE):
            block.mlp = MoE.from_params(moe, block.mlp.params, mesh=block.mlp.mesh, backend=block.mlp.backend)
    return other


def first_layers(model: Qwen3Moe, count: int) -> Qwen3Moe:
    """The same arrays without the later layers: a model to compare with, where rounding has not grown yet."""
    graph, state = nnx.split(model)
    other = nnx.merge(graph, state)
    other.config = dataclasses.replace(model.config, num_layers=count)
    other.layers = nnx.List(list(other.layers)[:count])
    return other


def read_tokens(model: Qwen3Moe, ids: jax.Array, valid: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Reads the next token of each sequence, [B, 1] -> float32 logits [B, V] of the one after it, and the cache."""
    if one_token.why_not(model, ids.shape[0]) is None:
        return one_token.read(model, ids, valid, cache)
    hidden, cache, _ = model.hidden(ids, valid=valid, cache=cache)
    return model.logits(hidden[:, 0]), cache


@functools.partial(jax.jit, static_argnames=("size", "side"))
def prefill(
    model: Qwen3Moe, ids: jax.Array, valid: jax.Array, *, size: int, side: str = "left"
) -> tuple[jax.Array, Cache]:
    """Reads padded prompts [B, S] -> logits [B, V] after each one's last real token, and a cache of `size` slots.

    side: where the prompts are padded; on the right is faster, because nothing has to be masked.
    """
    cache = Cache.empty(model.config, ids.shape[0], size, stacked=isinstance(model.layers, Block))
    hidden, cache, _ = model.hidden(ids, valid=valid, cache=cache, causal=side == "right")
    last = jnp.max(jnp.where(valid, jnp.arange(ids.shape[1])[None, :], 0), axis=1)
    return model.logits(jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]), cache


@functools.partial(jax.jit, static_argnames=("steps",))
def decode(
    model: Qwen3Moe, logits, cache: Cache, key=None, temperature=0.0, end=-1, *, steps: int
) -> tuple[jax.Array, jax.Array]:
    """Writes up to `steps` tokens [B, steps] in one compiled loop, which stops early once every sequence wrote `end`.

    key: None takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature) with it (the
    likeliest where temperature is 0).
    end: a token's id, -1 for none; places after a sequence's `end` hold it too. Also returns how many steps ran, int32
    [].
    """
    end, temperature = jnp.asarray(end, jnp.int32), jnp.asarray(temperature, jnp.float32)

    def body(carry):
        step, logits, cache, done, out = carry
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if key is not None:
            drawn = jax.random.categorical(jax.random.fold_in(key, step), logits / jnp.maximum(temperature, 1e-6))
            token = jnp.where(temperature > 0, drawn.astype(jnp.int32), token)
        token = jnp.where(done, end, token)
        out = jax.lax.dynamic_update_slice_in_dim(out, token[:, None], step, axis=1)
        done = done | (token == end)
        logits, cache = read_tokens(model, token[:, None], ~done[:, None], cache)
        return step + 1, logits, cache, done, out

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
    """(checkpoint names, parameter) of everything but the MoE layers; several names are stacked in one parameter."""
    yield ["model.embed_tokens.weight"], model.embed_tokens.embedding
    yield ["model.norm.weight"], model.norm.scale
    if model.lm_head is not None:
        yield ["lm_head.weight"], model.lm_head.weight
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield [f"{prefix}{name}.weight"], getattr(layer, name).scale
        for name in ("q_norm", "k_norm"):
            yield [f"{prefix}self_attn.{name}.weight"], getattr(layer.self_attn, name).scale
        attention = layer.self_attn
        maps = [(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], attention.qkv_proj)]
        maps += [(["self_attn.o_proj"], attention.o_proj)]
        if isinstance(layer.mlp, DenseMLP):
            maps += [([f"mlp.{name}"], getattr(layer.mlp, name)) for name in ("gate_proj", "up_proj", "down_proj")]
        for names, linear in maps:
            yield [f"{prefix}{name}.weight" for name in names], linear.weight
            if linear.bias is not None:
                yield [f"{prefix}{name}.bias" for name in names], linear.bias


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
        for names, param in _names(model):
            values = [rest.pop(name) for name in names]
            param.set_value(values[0] if len(values) == 1 else jnp.concatenate(values))
        if rest.keys() - {"lm_head.weight"}:
            raise ValueError(f"{folder} has tensors that a Qwen3-MoE model does not: {', '.join(sorted(rest))}.")
        for i, layer in enumerate(model.layers):
            if i not in config.dense_layers:
                params = load_moe_layer(checkpoint, i, sharding=sharding, dtype=dtype)
                layer.mlp = MoE.from_params(config.moe, params, mesh=mesh, backend=backend)
    return model


def random_model(config: Config, *, key: jax.Array, mesh=None, backend: str = "auto") -> Qwen3Moe:
    """A model of random weights with an initialised model's variance, for measuring: made where they will be used.

    The experts are kept in `config.moe.quant.weights`, and spread over the axis "ep" of `mesh`.
    """
    moe, dtype = config.moe, config.dtype
    everywhere = None if mesh is None else jax.NamedSharding(mesh, jax.P())

    @functools.partial(jax.jit, static_argnames=("shape",), out_shardings=everywhere)
    def normal(key, shape):
        return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)

    def layer(key):
        keys = jax.random.split(key, 3)
        e, f, d = moe.num_experts, moe.intermediate_size, moe.hidden_size
        scaled = lambda key, *shape: jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype)  # noqa: E731
        experts = ExpertWeights(gate_up=scaled(keys[0], e, 2, f, d), down=scaled(keys[1], e, d, f))
        params = MoEParams(router=scaled(keys[2], e, d), experts=experts)
        return params if moe.quant.weights is None else quantize_params(params, moe.quant.weights)

    key, experts_key = jax.random.split(key)
    shapes = jax.eval_shape(layer, key)
    split = lambda leaf: jax.NamedSharding(mesh, jax.P("ep") if leaf.ndim else jax.P())  # noqa: E731
    placed = None
    if mesh is not None:
        placed = dataclasses.replace(
            jax.tree.map(lambda _: everywhere, shapes), experts=jax.tree.map(split, shapes.experts)
        )
    make_layer = jax.jit(layer, out_shardings=placed)
    model = nnx.eval_shape(lambda: Qwen3Moe(config, moe=lambda *_, **__: nnx.data(None), rngs=nnx.Rngs(0)))
    for i, (names, param) in enumerate(_names(model)):
        shape = param.get_value().shape
        scale = names[0].endswith("norm.weight")
        param.set_value(
            jnp.ones(shape, dtype, device=everywhere) if scale else normal(jax.random.fold_in(key, i), shape)
        )
    for i, block in enumerate(model.layers):
        if i not in config.dense_layers:
            params = make_layer(jax.random.fold_in(experts_key, i))
            block.mlp = MoE.from_params(moe, params, mesh=mesh, backend=backend)
    return model


def save(model: Qwen3Moe, hf: dict, folder, *, dtype=jnp.bfloat16) -> None:
    """Writes a Hugging Face folder: config.json with the contents of `hf`, and model.safetensors in `dtype`."""
    if isinstance(model.layers, Block):
        model = unstack_layers(model)
    tensors = {}
    for names, param in _names(model):
        c = model.config
        sizes = [c.num_heads, c.num_kv_heads, c.num_kv_heads] if len(names) == 3 else [1]
        ends = np.cumsum(sizes)[:-1] * c.head_dim
        tensors |= dict(zip(names, np.split(np.asarray(param[...]), ends), strict=True))
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
