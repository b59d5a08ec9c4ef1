"""Trains a small byte-level Qwen3-MoE on the standard library's source, expert-parallel, with quantised dispatch.

    python examples/train.py --out my_model --steps 300 --batch 8            # laptop: eight virtual devices
    python examples/train.py --out my_model --steps 8000 --dense-experts     # one GPU: how examples/tiny_model was made
    python examples/train.py --out runs --large --context 1024 --batch 32 --steps 110 --lr 3e-4 --quant none mxfp8 \\
        --final-windows 0 --curves-only            # fills two GPUs: how docs/figures/training.json was made

Every step sends its tokens to the experts' ranks in the format of --quant; the gradient passes straight through the
rounding. The folder at --out becomes a Hugging Face Qwen3-MoE checkpoint (config.json, model.safetensors) with the loss
history and its plot beside it, and `generate.py --model` takes it. Several formats are trained one after another on the
same batches (their programs are compiled side by side), and their curves are drawn over each other.

--dense-experts computes every expert for every token on one device (examples/dense_moe.py) and rounds the experts'
input to the same format. With 16 experts of width 64 that is a single large matmul, which one GPU does faster than it
can sort.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import re
import time
from typing import Any


def parse(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=pathlib.Path, required=True, help="folder to write the model to")
    p.add_argument("--steps", type=int, default=8000)
    p.add_argument("--batch", type=int, default=64, help="sequences in a step, a multiple of --devices")
    p.add_argument("--context", type=int, default=512, help="tokens in a sequence")
    p.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of the cosine schedule")
    p.add_argument(
        "--quant", nargs="+", default=["nvfp4_token"], help="format of the dispatch: none, mxfp8, nvfp4_token, ..."
    )
    p.add_argument("--large", action="store_true", help="a model with 2.5 billion parameters, 0.4 of them active")
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
    p.add_argument(
        "--final-windows", type=int, default=None, help="held-out windows at the end; all, unless told; 0: none at all"
    )
    p.add_argument("--curves-only", action="store_true", help="write the history and its plot, and no model")
    p.add_argument("--library", help="folder of the standard library to read; this Python's, unless told")
    p.add_argument("--seed", type=int, default=0)
    for name, value in TINY.items():
        if isinstance(value, int) and not isinstance(value, bool) and name not in ("vocab_size", "eos_token_id"):
            p.add_argument("--" + name.replace("_", "-"), type=int, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.steps < 2:
        p.error(f"--steps {args.steps}: at least 2, the first of which warms the learning rate up")
    if args.context < 2:
        p.error(f"--context {args.context}: at least 2, for a byte and the one to predict")
    return args


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
LARGE = dict(
    hidden_size=2048, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, head_dim=128,
    num_experts=64, num_experts_per_tok=8, moe_intermediate_size=768, max_position_embeddings=1024,
)  # fmt: skip
Z_LOSS = 1e-3
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12}  # BF16, datasheets


def flops_per_token(config, context: int) -> float:
    """Of a training step: 6 for each weight that a token meets, and causal attention."""
    m = config.moe
    attention = 2 * m.hidden_size * (config.num_heads + config.num_kv_heads) * config.head_dim
    experts = 3 * m.hidden_size * m.intermediate_size * m.num_experts_per_tok + m.hidden_size * m.num_experts
    weights = config.num_layers * (attention + experts) + m.hidden_size * config.vocab_size
    return 6.0 * weights + 6.0 * config.num_layers * config.num_heads * config.head_dim * context


def main(argv=None) -> dict:
    args = parse(argv)
    args.quant = list(dict.fromkeys(args.quant))
    if "jax" not in __import__("sys").modules:  # virtual devices must be asked for before JAX starts
        os.environ["XLA_FLAGS"] = (
            os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={args.devices}"
        )
    import jax.numpy as jnp
    import qwen3_moe

    sizes = TINY | (LARGE if args.large else {})
    hf = {name: value if getattr(args, name, None) is None else getattr(args, name) for name, value in sizes.items()}
    args.out.mkdir(parents=True, exist_ok=True)
    data, results, first = Text.read(args), {}, None
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs, jobs = [], []
        for quant in args.quant:
            runs.append(Run.make(args, hf, quant))
            jobs.append(pool.submit(runs[-1].compile))
        for run in runs:
            # The first model is made while the programs are compiled; nothing is timed before all of them are.
            results[run.quant], model = train(args, run, data, ready=jobs)
            first = first or (None if args.curves_only else model)
            del model
            result = summary(results)
            (args.out / "training.json").write_text(json.dumps(result))  # what there is, should the next run be cut
    if first is not None:
        qwen3_moe.save(first, hf, args.out, dtype=jnp.bfloat16)
    plot(result, args.out / "loss.png")
    return result


def summary(results: dict[str, dict]) -> dict:
    """Of all runs: the first one's figures, every one's history ("runs") and figures."""
    histories = {quant: r["history"] for quant, r in results.items()}
    figures = {quant: {k: v for k, v in r.items() if k != "history"} for quant, r in results.items()}
    return next(iter(results.values())) | {"runs": histories, "figures": figures}


@dataclasses.dataclass
class Text:
    """What is learnt from, and what is held out: token ids."""

    corpus: Any
    held_out: Any
    gzip: float

    @classmethod
    def read(cls, args) -> Text:
        import text

        corpus, held_out = text.training_text(args.library), text.held_out_text(args.library)
        gzip = text.gzip_bits_per_byte(held_out)
        print(f"{len(corpus):,} bytes to train on, {len(held_out):,} held out (gzip -9: {gzip:.3f} bits per byte)")
        return cls(corpus, held_out, gzip)

    def windows(self, context: int, limit: int | None):
        import text

        return text.windows(self.held_out, context, limit=limit)


@dataclasses.dataclass
class Run:
    """One run's program, with the dispatch in `quant`; `compiled` is made by `compile`, beside others.

    make_model() -> the initialised model; place(tree) puts parameters and their moments where they belong. step(params,
    state, rest, tokens) -> params, state, (bits per byte, balance loss); the first two are donated.
    """

    quant: str
    devices: int
    config: Any
    dtype: str
    tokens: Any  # shape and sharding of a batch
    make_model: Any
    place: Any
    optimizer: Any
    lowered: Any
    compiled: Any = None

    @classmethod
    def make(cls, args, hf: dict, quant: str) -> Run:
        import jax
        import jax.numpy as jnp
        import numpy as np
        import optax
        import qwen3_moe
        from dense_moe import DenseMoE
        from flax import nnx

        from jmoe.config import QuantConfig
        from jmoe.nn import MoE

        count = 1 if args.dense_experts else min(args.devices, jax.device_count())
        if args.batch % count:
            raise SystemExit(f"--batch {args.batch} must be a multiple of the {count} devices.")
        devices = jax.devices()[:count]
        mesh = jax.make_mesh((count,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
        on_gpu = jax.default_backend() == "gpu"
        dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
        config = qwen3_moe.Config.from_hf(hf, dtype=dtype, quant=QuantConfig(activations=quant))
        make_moe = DenseMoE if args.dense_experts else functools.partial(MoE, mesh=mesh, backend=args.backend)

        def make_model():
            model = qwen3_moe.Qwen3Moe(config, moe=make_moe, rngs=nnx.Rngs(args.seed))
            # A sharded layer takes a CPU several seconds to compile: do that once.
            return model if args.dense_experts or on_gpu else qwen3_moe.stack_layers(model)

        schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, max(1, min(200, args.steps // 10)), args.steps)
        decayed = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed)
        )
        model = nnx.eval_shape(make_model)
        axes = (None, "ep") if isinstance(model.layers, qwen3_moe.Block) else ("ep",)
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def sharding(path, leaf):
            """Expert weights [E, ...] (stacked: [layers, E, ...]) are spread over the ranks, everything else (and its
            moments) is on all of them.
            """
            del leaf
            expert = count > 1 and re.search(r"\b(gate_up|down)\b", jax.tree_util.keystr(path))
            return jax.NamedSharding(mesh, jax.P(*axes) if expert else jax.P())

        def shardings(tree):
            return jax.tree_util.tree_map_with_path(sharding, tree)

        def loss_of(params, rest, tokens):
            model = nnx.merge(graph, params, rest)
            hidden, _, stats = model.hidden(tokens[:, :-1])
            nats = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), tokens[:, 1:]).mean()
            balance = stats.load_balance_loss.mean()
            loss = nats + hf["router_aux_loss_coef"] * balance + Z_LOSS * stats.z_loss.mean()
            return loss, (nats / np.log(2), balance)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, rest, tokens):
            (_, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(params, rest, tokens)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, metrics

        def like(tree):
            struct = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)  # noqa: E731
            return jax.tree.map(struct, tree, shardings(tree))

        split = jax.NamedSharding(mesh, jax.P("ep"))
        tokens = jax.ShapeDtypeStruct((args.batch, args.context + 1), jnp.int32, sharding=split)
        lowered = step.lower(like(params), like(jax.eval_shape(optimizer.init, params)), like(rest), tokens)
        place = lambda tree: jax.tree.map(jax.device_put, tree, shardings(tree))  # noqa: E731
        return cls(quant, count, config, dtype, tokens, make_model, place, optimizer, lowered)

    def compile(self) -> None:
        self.compiled, self.lowered = self.lowered.compile(), None


def train(args, run: Run, data: Text, *, ready: list[concurrent.futures.Future]):
    """(what was measured, the model). ready: is done once `run` is compiled, and nothing else is compiled any more."""
    import jax
    import numpy as np
    from evaluate import bits_per_byte
    from flax import nnx
    from tqdm import tqdm

    graph, params, rest = nnx.split(run.make_model(), nnx.Param, ...)
    params, rest = run.place(params), run.place(rest)
    state = run.place(run.optimizer.init(params))
    count = sum(p.size for p in jax.tree.leaves(params))
    print(f"{count:,} parameters on {run.devices} device(s), {run.dtype}, {run.quant}")
    for job in ready:
        job.result()

    rng = np.random.default_rng(args.seed)
    window = np.arange(args.context + 1)
    judged = args.final_windows != 0
    few = final = None
    if judged:
        few, final = (data.windows(args.context, n) for n in (args.eval_windows, args.final_windows))
    history, started, evaluating = [], time.perf_counter(), 0.0
    speed_from = (0, started)  # steps and time before the speed is measured
    waiting = None  # a step's metrics are fetched when the next one is on its way

    def fetch(i, bits, balance):
        record = {"step": i, "bytes": i * args.batch * args.context, "train": float(bits), "balance": float(balance)}
        history.append(record | {"seconds": time.perf_counter() - started})

    with tqdm(total=args.steps, unit="step", mininterval=1.0) as bar:
        for i in range(1, args.steps + 1):
            starts = rng.integers(0, len(data.corpus) - args.context, args.batch)
            tokens = jax.device_put(data.corpus[starts[:, None] + window[None, :]], run.tokens.sharding)
            params, state, metrics = run.compiled(params, state, rest, tokens)
            if waiting:
                fetch(*waiting)
                waiting = None
            if i <= 2:
                jax.block_until_ready(params)
                speed_from, evaluating = (i, time.perf_counter()), 0.0
            seen = judged and (i == args.steps or i // args.eval_every > sum("held_out" in h for h in history))
            if i == 1 or i % max(1, args.steps // 300) == 0 or i == args.steps:
                waiting = (i, *metrics)
            if i == args.steps or (seen and waiting):
                fetch(*waiting)
                waiting = None
            if i == args.steps:
                spent = time.perf_counter() - speed_from[1] - evaluating
            if seen and history[-1]["step"] == i:
                before = time.perf_counter()
                windows = final if i == args.steps else few
                history[-1]["held_out"] = bits_per_byte(nnx.merge(graph, params, rest), *windows, batch=32)
                evaluating += time.perf_counter() - before
            if history:
                shown = {k: v for k, v in history[-1].items() if k in ("train", "held_out", "balance")}
                bar.set_postfix({k: f"{v:.3f}" for k, v in shown.items()})
            bar.update(i - bar.n)
    result = {"gzip_bits_per_byte": data.gzip, "history": history}
    result |= {"steps": args.steps, "batch": args.batch, "context": args.context, "parameters": count}
    if judged:
        result["held_out_bits_per_byte"] = history[-1]["held_out"]
        print(f"{run.quant}: held-out bits per byte {history[-1]['held_out']:.4f}, gzip -9 {data.gzip:.4f}")
    if args.steps > speed_from[0]:
        rate = (args.steps - speed_from[0]) * args.batch * args.context / spent
        kind = jax.devices()[0].device_kind
        peak = next((p for name, p in PEAK_FLOPS.items() if name in kind), None)
        flops = rate * flops_per_token(run.config, args.context) / run.devices
        result |= {"tokens_per_second": rate, "mfu": None if peak is None else flops / peak}
        result |= {"devices": run.devices, "device_kind": kind}
        share = "" if peak is None else f", {flops / peak:.1%} of the {peak / 1e12:.0f} TFLOP/s of its datasheet"
        print(f"{run.quant}: {rate:,.0f} tokens/s on {run.devices} x {kind}, {flops / 1e12:.1f} TFLOP/s on each{share}")
    return result, nnx.merge(graph, params, rest)


PAIRS = [("#9bb7d4", "#1f4e79"), ("#e8b9a0", "#b5532a"), ("#a9d0b0", "#2e6b3e"), ("#c9b6dc", "#5b3a85")]  # colours


def plot(result: dict, path: pathlib.Path, **metadata: str) -> None:
    """The loss curves in bits per byte, with the held-out text and what gzip -9 makes of it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
    runs, figures = result["runs"], result.get("figures", {})
    for (quant, history), (light, dark) in zip(runs.items(), PAIRS * len(runs), strict=False):
        name = "unquantised" if quant == "none" else quant
        mark = f", {name} dispatch" if len(runs) > 1 else ""
        of = figures.get(quant, {})
        if len(runs) > 1 and of.get("mfu"):
            mark += f": {of['tokens_per_second']:,.0f} tokens/s, {of['mfu']:.1%} of peak"
        x = [h["bytes"] / 1e6 for h in history]
        seen = [(h["bytes"] / 1e6, h["held_out"]) for h in history if "held_out" in h]
        ax.plot(x, [h["train"] for h in history], color=light if seen else dark, lw=1, label="training batch" + mark)
        if seen:
            ax.plot(*zip(*seen, strict=True), color=dark, lw=2, marker="o", ms=3, label="held-out text" + mark)
    ax.axhline(result["gzip_bits_per_byte"], color="#7f7f7f", ls="--", lw=1.2, label="gzip -9 on the held-out text")
    last = [h for h in result["history"] if "held_out" in h][-1:]
    for h in last:
        end = (h["bytes"] / 1e6, h["held_out"])
        ax.annotate(f"{end[1]:.2f}", end, textcoords="offset points", xytext=(-4, 10), ha="right", color="#1f4e79")
    ax.set(xlabel="million bytes read", ylabel="bits per byte", ylim=(0.5, 4) if last else (1, 9), xlim=(0, None))
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)
    if result.get("device_kind"):
        size = f"{result['parameters'] / 1e9:.2g} billion parameters"
        ax.set_title(f"{size}, {result['devices']} x {result['device_kind']}", fontsize=9, loc="left")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    fig.savefig(path, dpi=150, metadata=metadata)
    plt.close(fig)


if __name__ == "__main__":
    main()
