"""Trains a small byte-level Qwen3-MoE on the standard library's source, expert-parallel, with quantised dispatch.

    python examples/train.py --out my_model --steps 300 --batch 8            # laptop: eight virtual devices
    python examples/train.py --out my_model --steps 8000 --dense-experts     # one GPU: how examples/tiny_model was made

Every step sends its tokens to the experts' ranks in the format of --quant; the gradient passes straight through the
rounding. The folder at --out becomes a Hugging Face Qwen3-MoE checkpoint (config.json, model.safetensors) with the loss
history and its plot beside it, and `generate.py --model` takes it.

--dense-experts computes every expert for every token on one device (examples/dense_moe.py) and rounds the experts'
input to the same format. With 16 experts of width 64 that is a single large matmul, which one GPU does faster than it
can sort.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import time


def parse(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", type=pathlib.Path, required=True, help="folder to write the model to")
    p.add_argument("--steps", type=int, default=8000)
    p.add_argument("--batch", type=int, default=64, help="sequences in a step, a multiple of --devices")
    p.add_argument("--context", type=int, default=512, help="tokens in a sequence")
    p.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of the cosine schedule")
    p.add_argument("--quant", default="nvfp4_token", help="format of the dispatch: none, mxfp8, nvfp4_token, ...")
    p.add_argument("--backend", default="auto")
    p.add_argument(
        "--devices", type=int, default=8, help="expert-parallel ranks; virtual CPU devices where there is no GPU"
    )
    p.add_argument("--dense-experts", action="store_true", help="one device, every expert for every token (see above)")
    p.add_argument(
        "--dtype", default=None, help="of the computation: bfloat16 on a GPU and float32 elsewhere, unless told"
    )
    p.add_argument("--eval-every", type=int, default=500)
    p.add_argument("--eval-windows", type=int, default=256, help="held-out windows that the curve is measured on")
    p.add_argument("--final-windows", type=int, default=None, help="held-out windows at the end; all, unless told")
    p.add_argument("--library", help="folder of the standard library to read; this Python's, unless told")
    p.add_argument("--seed", type=int, default=0)
    for name, value in TINY.items():
        if isinstance(value, int) and not isinstance(value, bool) and name not in ("vocab_size", "eos_token_id"):
            p.add_argument("--" + name.replace("_", "-"), type=int, default=value, help=argparse.SUPPRESS)
    return p.parse_args(argv)


# The model that ships with the repository, as a config.json: 2.8 million parameters, 5.6 MB in bfloat16.
TINY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": 264,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "router_aux_loss_coef": 0.01,
    "eos_token_id": 256,
    "pad_token_id": 257,
}
Z_LOSS = 1e-3


def main(argv=None) -> dict:
    args = parse(argv)
    if "jax" not in __import__("sys").modules:  # virtual devices must be asked for before JAX starts
        os.environ["XLA_FLAGS"] = (
            os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={args.devices}"
        )
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import qwen3_moe
    import text
    from dense_moe import DenseMoE
    from evaluate import bits_per_byte
    from flax import nnx
    from tqdm import tqdm

    from jmoe.config import QuantConfig
    from jmoe.nn import MoE

    devices = 1 if args.dense_experts else min(args.devices, jax.device_count())
    mesh = jax.make_mesh((devices,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    split = jax.NamedSharding(mesh, jax.P("ep"))
    hf = {name: getattr(args, name, value) for name, value in TINY.items()}
    dtype = args.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    config = qwen3_moe.Config.from_hf(hf, dtype=dtype, quant=QuantConfig(activations=args.quant))
    make_moe = DenseMoE if args.dense_experts else functools.partial(MoE, mesh=mesh, backend=args.backend)
    model = qwen3_moe.Qwen3Moe(config, moe=make_moe, rngs=nnx.Rngs(args.seed))
    if not args.dense_experts:  # a sharded layer takes a CPU several seconds to compile: do that once
        model = qwen3_moe.stack_layers(model)

    corpus, held_out = text.training_text(args.library), text.held_out_text(args.library)
    gzip_bpb = text.gzip_bits_per_byte(held_out)
    print(f"{len(corpus):,} bytes to train on, {len(held_out):,} held out (gzip -9: {gzip_bpb:.3f} bits per byte)")
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, max(1, min(200, args.steps // 10)), args.steps)
    decayed = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed)
    )
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def place(path, array):
        """Expert weights [layers, E, ...] are spread over the ranks, everything else (and its moments) is on all of
        them.
        """
        names = jax.tree_util.keystr(path)
        expert = devices > 1 and ("gate_up" in names or "down" in names)
        return jax.device_put(array, jax.NamedSharding(mesh, jax.P(None, "ep") if expert else jax.P()))

    params = jax.tree_util.tree_map_with_path(place, params)
    state = jax.tree_util.tree_map_with_path(place, optimizer.init(params))
    print(f"{sum(p.size for p in jax.tree.leaves(params)):,} parameters on {devices} device(s), {dtype}")

    def loss_of(params, tokens):
        model = nnx.merge(graph, params, rest)
        hidden, _, stats = model.hidden(tokens[:, :-1])
        nats = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), tokens[:, 1:]).mean()
        balance = stats.load_balance_loss.mean()
        loss = nats + hf["router_aux_loss_coef"] * balance + Z_LOSS * stats.z_loss.mean()
        return loss, (nats / np.log(2), balance)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        (_, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, metrics

    rng = np.random.default_rng(args.seed)
    window = np.arange(args.context + 1)
    few, final = (text.windows(held_out, args.context, limit=n) for n in (args.eval_windows, args.final_windows))
    history, started = [], time.perf_counter()
    with tqdm(total=args.steps, unit="step", mininterval=1.0) as bar:
        for i in range(1, args.steps + 1):
            starts = rng.integers(0, len(corpus) - args.context, args.batch)
            tokens = jax.device_put(corpus[starts[:, None] + window[None, :]], split)
            params, state, (bits, balance) = step(params, state, tokens)
            if i == 1 or i % max(1, args.steps // 300) == 0 or i == args.steps:
                record = {"step": i, "bytes": i * args.batch * args.context, "train": float(bits)}
                record |= {"balance": float(balance), "seconds": time.perf_counter() - started}
                if i == args.steps or i // args.eval_every > sum("held_out" in h for h in history):
                    windows = final if i == args.steps else few
                    record["held_out"] = bits_per_byte(nnx.merge(graph, params, rest), *windows, batch=32)
                history.append(record)
                bar.set_postfix({k: f"{v:.3f}" for k, v in record.items() if k in ("train", "held_out", "balance")})
                bar.update(i - bar.n)
    result = {"held_out_bits_per_byte": history[-1]["held_out"], "gzip_bits_per_byte": gzip_bpb, "history": history}
    print(f"held-out bits per byte {history[-1]['held_out']:.4f}, gzip -9 {gzip_bpb:.4f}")

    args.out.mkdir(parents=True, exist_ok=True)
    qwen3_moe.save(nnx.merge(graph, params, rest), hf, args.out, dtype=jnp.bfloat16)
    (args.out / "training.json").write_text(json.dumps(result))
    plot(result, args.out / "loss.png")
    return result


def plot(result: dict, path: pathlib.Path) -> None:
    """The loss curve in bits per byte, with the held-out text and what gzip -9 makes of it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    history = result["history"]
    x = [h["bytes"] / 1e6 for h in history]
    seen = [(h["bytes"] / 1e6, h["held_out"]) for h in history if "held_out" in h]
    fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
    ax.plot(x, [h["train"] for h in history], color="#9bb7d4", lw=1, label="training batch")
    ax.plot(*zip(*seen, strict=True), color="#1f4e79", lw=2, marker="o", ms=3, label="held-out text")
    ax.axhline(result["gzip_bits_per_byte"], color="#b5532a", ls="--", lw=1.2, label="gzip -9 on the held-out text")
    ax.annotate(
        f"{seen[-1][1]:.2f}", seen[-1], textcoords="offset points", xytext=(-4, 10), ha="right", color="#1f4e79"
    )
    ax.set(xlabel="million bytes read", ylabel="bits per byte", ylim=(0.5, 4), xlim=(0, None))
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    fig.savefig(path, dpi=150)
    plt.close(fig)


if __name__ == "__main__":
    main()
