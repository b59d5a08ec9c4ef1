"""Writes text with a Qwen3-MoE model, expert-parallel, with a quantised dispatch, and says what that put on the wire.

    python examples/generate.py                            # the small model of this repository, 8 virtual devices
    python examples/generate.py --model Qwen3-30B-A3B --devices 4 --quant mxfp8 --prompt "Give me a short poem."
    python examples/generate.py --random --weights nvfp4 --batch 64           # how fast a GPU would be

The small model was trained by train.py on the Python standard library's source and writes something that looks like it.
Its run ends with a table of what each wire format costs in bytes and in quality, on modules that it was not trained on.

--random makes a Qwen3-30B-A3B of random weights instead, reads --batch prompts of different lengths, writes
--max-tokens tokens for each, and says how fast that was and which share of the memory bandwidth decoding used.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

TINY_MODEL = pathlib.Path(__file__).parent / "tiny_model"
PROMPTS = [
    "class Queue:\n    def __init__(self",
    "def main():\n    parser = argparse.ArgumentParser(",
    'def read_file(path):\n    """Return the',
]
WIRES = {"BF16": None, "MXFP8": "mxfp8", "NVFP4 per token": "nvfp4_token", "NVFP4 4-over-6": "nvfp4_token_4o6"}


def parse(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=pathlib.Path, default=TINY_MODEL, help="a Hugging Face Qwen3-MoE folder")
    p.add_argument("--prompt", action="append", help="what to continue; several make a batch")
    p.add_argument(
        "--devices", type=int, help="expert-parallel ranks: all GPUs, or eight virtual CPU devices, unless told"
    )
    p.add_argument("--backend", default="auto", help="how tokens move between ranks")
    p.add_argument(
        "--quant", default="nvfp4_token", help="what the experts take and tokens travel as: none, mxfp8, ..."
    )
    p.add_argument("--random", action="store_true", help="measure a Qwen3-30B-A3B of random weights (see above)")
    p.add_argument("--weights", help="--random: format of the experts: fp8_128x128, mxfp8, nvfp4; BF16 unless told")
    p.add_argument("--batch", type=int, default=8, help="--random: prompts")
    p.add_argument("--prompt-length", type=int, default=1024, help="--random: tokens of the longest; the shortest half")
    p.add_argument("--layers", type=int, default=48, help="--random: of the model")
    p.add_argument("--max-tokens", type=int, default=160, help="tokens to write for each prompt")
    p.add_argument("--temperature", type=float, default=0.6, help="0 takes the likeliest token")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dtype", help="of the computation: float32 on a CPU, which has no bfloat16 matmul, else bfloat16")
    p.add_argument(
        "--windows", type=int, default=32, help="held-out text for the table, in windows of 512 bytes; 0: no table"
    )
    args = p.parse_args(argv)
    if args.max_tokens < 1:
        p.error(f"--max-tokens {args.max_tokens}: at least 1")
    return args


def start_jax(devices: int | None) -> None:
    """Asks for virtual CPU devices, which must happen before JAX starts, and for patience with their collectives."""
    if "jax" not in sys.modules:
        flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={devices or 8}"
        os.environ["XLA_FLAGS"] = flags + " --xla_cpu_collective_call_terminate_timeout_seconds=900"


def main(argv=None) -> None:
    args = parse(argv)
    start_jax(args.devices)
    import jax
    from rich.console import Console

    console = Console()
    count = args.devices or jax.device_count()
    if count > jax.device_count():
        raise SystemExit(
            f"--devices {count} was asked for, and JAX sees {jax.device_count()} ({jax.default_backend()}); ask for at "
            "most that many, or set JAX_PLATFORMS=cpu for virtual devices."
        )
    mesh = jax.make_mesh((count,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:count])

    if args.random:
        measure(console, args, mesh)
    else:
        write(console, args, mesh)


def write(console, args: argparse.Namespace, mesh) -> None:
    """Continues the prompts, and says what each wire format costs."""
    import jax
    import qwen3_moe
    import text
    from rich.panel import Panel

    from jmoe.config import QuantConfig
    from jmoe.nn import MoE

    on_cpu = jax.default_backend() == "cpu"
    dtype = args.dtype or ("float32" if on_cpu else "bfloat16")

    def load(name):
        quant = QuantConfig(activations=name)
        if quant.activations is None:
            quant = QuantConfig(wire="bfloat16")
        model = qwen3_moe.load(args.model, mesh=mesh, backend=args.backend, quant=quant, dtype=dtype)
        # On a CPU most of the time would go into compiling every layer; on a GPU the scan's copies would cost more.
        return qwen3_moe.stack_layers(model) if on_cpu and not model.config.dense_layers else model

    model, tokenizer = load(args.quant), text.load_tokenizer(args.model)
    prompts = args.prompt or PROMPTS
    ids, valid = qwen3_moe.pad_prompts([tokenizer.encode(p) for p in prompts], pad=tokenizer.pad, side="right")
    size = ids.shape[1] + args.max_tokens
    longest = json.loads((args.model / "config.json").read_text()).get("max_position_embeddings", size)
    if size > longest:
        raise SystemExit(
            f"A prompt of {ids.shape[1]} tokens and --max-tokens {args.max_tokens} make {size}; the model was trained "
            f"on contexts of {longest}. Shorten the prompt, or ask for at most {longest - ids.shape[1]} tokens."
        )
    moe = next(block.mlp for block in qwen3_moe.blocks(model) if isinstance(block.mlp, MoE))
    console.print(
        Panel(reasons(moe.layer, len(prompts)), title=f"decoding {len(prompts)} prompts with {args.model.name}")
    )

    with console.status("compiling the prefill and the decode loop"):
        started = time.perf_counter()
        read = qwen3_moe.prefill.lower(model, ids, valid, size=size, side="right").compile()
        logits, cache = read(model, ids, valid)
        key = jax.random.key(args.seed) if args.temperature > 0 else None
        inputs = (model, logits, cache, key, args.temperature, tokenizer.end)
        write = qwen3_moe.decode.lower(*inputs, steps=args.max_tokens).compile()
        compiled = time.perf_counter() - started
    started = time.perf_counter()
    out, steps = jax.device_get(write(*inputs))
    seconds = time.perf_counter() - started
    for prompt, tokens in zip(prompts, out, strict=True):
        tokens = tokens[: list(tokens).index(tokenizer.end)] if tokenizer.end in tokens else tokens
        console.print(Panel(f"[bold]{escape(prompt)}[/bold]{escape(tokenizer.decode(tokens))}", title_align="left"))
    console.print(
        f"{len(prompts)} x {steps} tokens in {seconds:.2f} s: "
        f"[bold]{len(prompts) * steps / seconds:.0f} tokens/s[/bold] "
        f"on {mesh.size} x {jax.devices()[0].device_kind}, after {compiled:.1f} s of compiling"
    )
    if args.windows and isinstance(tokenizer, text.ByteTokenizer):
        table(console, load, args.windows, model.config.num_layers)


def measure(console, args: argparse.Namespace, mesh) -> None:
    """Prefill and decoding with random weights, beside what the memory bandwidth allows."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import qwen3_moe
    from random_checkpoint import QWEN3_30B_A3B
    from rich.table import Table

    from jmoe.bench.common import copy_bandwidth, time_call
    from jmoe.bench.model import step_bytes
    from jmoe.config import QuantConfig

    quant = QuantConfig(weights=args.weights)
    hf = QWEN3_30B_A3B | {"num_hidden_layers": args.layers}
    config = qwen3_moe.Config.from_hf(hf, dtype=args.dtype or "bfloat16", quant=quant)
    batch, length, ranks = args.batch, args.prompt_length, mesh.size
    lengths = np.linspace(length, (length + 1) // 2, batch, dtype=np.int32)
    ids = np.random.default_rng(args.seed).integers(0, config.vocab_size, (batch, length))
    split = jax.NamedSharding(mesh, jax.P("ep") if batch % ranks == 0 else jax.P())  # each GPU attends for its own
    ids, valid = jax.device_put((jnp.asarray(ids, jnp.int32), np.arange(length)[None, :] < lengths[:, None]), split)
    with console.status("making the weights, and compiling the prefill and the decode loop"):
        model = qwen3_moe.random_model(config, key=jax.random.key(args.seed), mesh=mesh if ranks > 1 else None)
        read = qwen3_moe.prefill.lower(model, ids, valid, size=length + args.max_tokens, side="right").compile()
        logits, cache = read(model, ids, valid)
        write = qwen3_moe.decode.lower(model, logits, cache, steps=args.max_tokens).compile()
    reading, _ = time_call(read, model, ids, valid, repeats=3)
    writing, _ = time_call(write, model, logits, cache, repeats=3)
    step = writing / args.max_tokens
    nbytes = step_bytes(model, batch, int(lengths.mean()) + args.max_tokens // 2, ranks=ranks)
    copy = copy_bandwidth() * 1e9
    out = Table(title=f"Qwen3-30B-A3B, {args.layers} layers, experts in {args.weights or config.dtype}, on {ranks} x "
                f"{jax.devices()[0].device_kind}")  # fmt: skip
    for name in ("", "tokens/s", "time", "of the memory bandwidth"):
        out.add_column(name, justify="left" if not name else "right")
    out.add_row(f"prefill, {batch} prompts of {lengths.min()} to {length}", f"{lengths.sum() / reading:,.0f}",
                f"{reading * 1e3:.1f} ms", "")  # fmt: skip
    share = f"{nbytes / step / copy:.0%} ({nbytes / 1e9:.2f} GB a step at {copy / 1e12:.2f} TB/s)"
    out.add_row(f"decode, batch {batch}", f"{batch / step:,.0f}", f"{step * 1e3:.2f} ms a step", share)
    console.print(out)


def reasons(layer, tokens: int):
    """What the policy decided for a call with `tokens` tokens; `moe.explain(tokens)` adds all the alternatives."""
    from rich.table import Table

    tokens = -(-tokens // layer.token_shards)  # on each rank
    decision, layout = layer.decision(tokens), layer.layout(tokens)
    grid = Table.grid(padding=(0, 2))
    c = layer.config
    grid.add_row("layer", f"{c.num_experts} experts, top {c.num_experts_per_tok}, over {layer.num_ranks} ranks")
    grid.add_row("backend", f"{decision.backend}, moved by {decision.transport_reason}")
    grid.add_row("wire", f"{decision.wire}, {layout.row_bytes} bytes a row, quantised by {decision.where}")
    grid.add_row("because", escape(decision.reason))
    for note in decision.notes:
        grid.add_row("note", escape(note))
    return grid


def escape(s: str) -> str:
    from rich.markup import escape

    return escape(s)


def table(console, load, limit: int, layers: int) -> None:
    """What each wire format costs: bytes for a token, bits per byte of held-out text, the logits' SNR against BF16."""
    import evaluate
    import numpy as np
    import qwen3_moe
    import text
    from rich.table import Table

    held_out = text.held_out_text()
    inputs, scored = text.windows(held_out, 512, limit=limit)
    out = Table(title=f"What the dispatch costs, on {scored.sum():,} bytes of modules that the model has not seen")
    out.add_column("wire format")
    for name in ("bytes a row", "wire bytes per token", "BF16 : this", "bits per byte", "SNR of the logits"):
        out.add_column(name, justify="right")
    reference, plain = [], None
    for name, fmt in WIRES.items():
        with console.status(f"reading the held-out text with {name} on the wire"):
            model = load(fmt)
            row = qwen3_moe.blocks(model)[0].mlp.layer.layout(inputs[:, 1:].size).row_bytes
            report = evaluate.compare(evaluate.count_ranks(model), reference, inputs, scored)
        wire = row * report.other_ranks.sum()
        plain = plain or wire
        snr = "" if np.isinf(report.snr) else f"{report.snr:.1f} dB"
        out.add_row(name, f"{row}", f"{wire:,.0f}", f"{plain / wire:.2f}", f"{report.bits_per_byte:.3f}", snr)
    console.print(out)
    console.print(
        f"gzip -9 over all {len(held_out):,} bytes of them: {text.gzip_bits_per_byte(held_out):.3f} bits per byte. "
        f"A token visits {report.other_ranks.mean():.2f} other ranks in each of {layers} layers; wire bytes are its "
        "rows on the way to them (expert outputs come back unquantised)."
    )


if __name__ == "__main__":
    main()
