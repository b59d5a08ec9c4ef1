"""Writes a Hugging Face folder of random weights in the shape of a real model, to try loading and quantising on.

    python examples/random_checkpoint.py OUT                      # Qwen3-30B-A3B: 48 layers, 61 GB of BF16
    python examples/random_checkpoint.py OUT --layers 12          # the first 12 layers of it, 16 GB
    python examples/random_checkpoint.py OUT --layers 2 --experts 8

The weights are normal with the variance of an initialised model, cut from one pool of random numbers, so that writing
runs at the speed of the disk. The folder has one shard for each layer and loads like the real one.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from jmoe.checkpoint import write_safetensors

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


def layer_shapes(config, i):
    """Names and shapes of decoder layer i."""
    d, f, width = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
    shapes = {f"model.layers.{i}.{n}_layernorm.weight": (d,) for n in ("input", "post_attention")}
    shapes |= {f"{at}.{n}_norm.weight": (width,) for n in "qk"}
    shapes |= {f"{at}.q_proj.weight": (q, d), f"{at}.o_proj.weight": (d, q)}
    shapes |= {f"{at}.{n}_proj.weight": (kv, d) for n in "kv"}
    shapes[f"{mlp}.gate.weight"] = (config["num_experts"], d)
    for e in range(config["num_experts"]):
        shapes |= {f"{mlp}.experts.{e}.{n}_proj.weight": (f, d) for n in ("gate", "up")}
        shapes[f"{mlp}.experts.{e}.down_proj.weight"] = (d, f)
    return shapes


class Pool:
    """Random numbers that are made once; every array is a window of them at another place."""

    def __init__(self, seed=0, size=1 << 23):
        rng = np.random.default_rng(seed)
        self.rng, self.size = rng, size
        values = (0.02 * rng.standard_normal(size, np.float32)).astype(ml_dtypes.bfloat16)
        self.values = np.concatenate([values, values])

    def take(self, shape):
        if len(shape) == 1:  # norms
            return np.ones(shape, ml_dtypes.bfloat16)
        count, start = int(np.prod(shape)), int(self.rng.integers(self.size))
        if count > self.size:
            return np.resize(self.values[start : start + self.size], shape)
        return self.values[start : start + count].reshape(shape)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--layers", type=int, help="decoder layers (default: 48, or as many as the disk has room for)")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    config = {**QWEN3_30B_A3B, "num_experts": arguments.experts}
    arguments.out.mkdir(parents=True)
    per_layer = 2 * sum(int(np.prod(s)) for s in layer_shapes(config, 0).values())
    room = (shutil.disk_usage(arguments.out).free - (4 << 30)) // per_layer
    config["num_hidden_layers"] = layers = arguments.layers or min(48, int(room))
    vocab, d = config["vocab_size"], config["hidden_size"]
    outer = {"model.embed_tokens.weight": (vocab, d), "lm_head.weight": (vocab, d), "model.norm.weight": (d,)}

    pool, weight_map, total, begin = Pool(arguments.seed), {}, 0, time.time()
    for i in range(layers + 1):
        shapes = layer_shapes(config, i - 1) if i else outer
        name = f"model-{i + 1:05d}-of-{layers + 1:05d}.safetensors"
        write_safetensors(arguments.out / name, {k: pool.take(s) for k, s in shapes.items()}, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shapes, name)
        total += 2 * sum(int(np.prod(s)) for s in shapes.values())
        print(f"\r{i}/{layers} layers, {total / 1e9:.1f} GB, {total / 1e9 / (time.time() - begin):.2f} GB/s", end="")
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (arguments.out / "model.safetensors.index.json").write_text(json.dumps(index))
    (arguments.out / "config.json").write_text(json.dumps(config, indent=2))
    print(f"\n{arguments.out}: {layers} layers, {total / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
