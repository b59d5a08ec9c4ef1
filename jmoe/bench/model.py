"""`jmoe bench model`: generation with a whole Qwen3-30B-A3B of random weights, the model of `examples/qwen3_moe.py`.

B sequences, S tokens of a prompt, N slots of the cache, R devices.

Prefill is one compiled call over padded prompts of different lengths; decoding is one compiled loop, so Python's
launches do not count. The ceiling of decoding is reading, at the copy bandwidth of the same run, what a step cannot do
without: attention and output weights, the experts that B * K assignments of an even router touch, and the keys and
values so far. The ceiling of prefill is its matmuls at the speed of a dense one. The error of decoding compares the
logits of a token that was read with the cache with those of reading everything at once (`Compared`).

On several devices the experts are spread over them: each attends for its share of the sequences, with attention weights
of its own; a single sequence is attended to by all of them.

First one device, then all that there are. All programs are lowered in several processes; those of one device are
compiled side by side, and timed when that is done, format by format, then those of all.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jmoe.config import QuantConfig

from . import lowering
from .common import Attempts, NoProgress, Progress, Record, wanted
from .layer_case import FP8, Ceilings, Matmuls, touched_experts
from .model_case import PROMPTS_COMPARED, Compared, Decoding, Prefill, Program, example, like

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
PROMPTS, PROMPT = 8, 1024
TINY = dict(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=128, vocab_size=512,
)  # fmt: skip


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


@dataclasses.dataclass
class Format:
    """All that is measured with the experts in one format."""

    name: str
    config: Any
    prefills: list[Prefill]
    decodes: list[Decoding]
    compared: Compared | None

    @property
    def programs(self) -> list[tuple[str, Program]]:
        """What each is called, and the program."""
        found: list[tuple[str, Program]] = [(f"prefill, {self.name} weights", p) for p in self.prefills]
        found += [(f"decode, {self.name} weights, batch {d.batch}", d) for d in self.decodes]
        parts = [self.compared.whole, *self.compared.steps.values()] if self.compared else []
        return found + [(f"comparison, {self.name} weights", p) for p in parts]


@dataclasses.dataclass(frozen=True)
class Scale:
    """What is measured on so many devices: prefill of `prompts` (B, S), `steps` of decoding with each (B, context).

    only: of the records that are `wanted`.
    """

    devices: int
    decoding: tuple[tuple[int, int], ...]
    steps: int
    prompts: tuple[int, int]
    smoke: bool
    only: re.Pattern[str] | None

    @classmethod
    def make(cls, devices: int, smoke: bool, only: re.Pattern[str] | None) -> Scale:
        if smoke:
            return cls(devices, ((1, 8), (4, 8)), 4, (2 * devices, 16), smoke, only)
        return cls(devices, DECODING, STEPS, (PROMPTS * devices, PROMPT), smoke, only)

    def format(self, w: Weights, mesh: Mesh | None) -> Format | None:
        """A format with its programs, None where nothing of it is wanted."""
        batches = w.batches if mesh is None else w.spread
        reads = [q for q in w.prefills if wanted(self.only, *_prefill_names(w.name, *self.prompts, q, self.devices))]
        writes = [
            (b, context)
            for b, context in self.decoding
            if (self.smoke or b in batches) and wanted(self.only, *_decode_names(w.name, b, context, self.devices))
        ]
        if not reads and not writes:
            return None
        module, hf = example()
        hf = hf | TINY if self.smoke else hf
        config = module.Config.from_hf(hf, dtype="bfloat16", quant=QuantConfig(weights=w.fmt))
        shapes = jax.eval_shape(lambda: module.random_model(config, key=jax.random.key(0), mesh=mesh))
        model = like(shapes, None if mesh is None else functools.partial(_of_weights, mesh))
        prefills = [Prefill.make(module, model, *self.prompts, quant=q, mesh=mesh) for q in reads]
        decodes = [Decoding.make(module, model, b, context, self.steps, mesh=mesh) for b, context in writes]
        compares = writes and mesh is None and (self.smoke or w.fmt is None)
        return Format(w.name, config, prefills, decodes, Compared.make(module, model) if compares else None)


def _mesh(devices: Sequence[Any]) -> Mesh | None:
    if len(devices) == 1:
        return None
    return jax.make_mesh((len(devices),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


@functools.cache
def _format(scale: Scale, weights: int) -> Format | None:
    return scale.format(WEIGHTS[weights], _mesh(jax.devices()[: scale.devices]))


def _lowered(scale: Scale, weights: int, program: int) -> bytes:
    """Of another process."""
    found = _format(scale, weights)
    assert found is not None
    return found.programs[program][1].exported()


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
    spreads = [devices] if devices is not None else [jax.devices()[:1], jax.devices()][: jax.device_count()]
    scales = [(Scale.make(len(ds), smoke, only), ds, _mesh(ds)) for ds in spreads]
    progress.start(1 + 2 * len(scales))
    why = "they are small" if smoke else lowering.obstacle()
    progress.step("lowering" + (f" in this process: {why}" if why else ""))
    found = [(mesh, on, [scale.format(w, mesh) for w in WEIGHTS]) for scale, on, mesh in scales]
    programs: list[list[tuple[str, Program, tuple[Scale, int, int]]]] = []
    for (scale, _, _), (_, _, formats) in zip(scales, found, strict=True):
        programs.append([])
        for i, fmt in enumerate(formats):
            programs[-1] += [(what, p, (scale, i, j)) for j, (what, p) in enumerate(fmt.programs if fmt else [])]
    exported = {} if why else _exported([one for each in programs for one in each], attempt)
    matmuls = Matmuls(smoke)
    limits: Ceilings | None = None
    records: list[Record] = []
    for (mesh, on, formats), each in zip(found, programs, strict=True):
        where = f"{len(on)} x {on[0].device_kind}"
        progress.step(f"{where}: compiling {len(each)} programs")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            jobs = [(f"a matmul of {n}", pool.submit(matmuls.compile, n)) for n in matmuls.dtypes if limits is None]
            for what, p, key in each:
                if attempt(what, functools.partial(p.lower, exported.get(key))):
                    jobs.append((what, pool.submit(p.compile)))
            for what, job in jobs:
                attempt(what, job.result)
        limits = limits or matmuls.measure()
        progress.step(where)
        for fmt in formats:
            for record in measure(example()[0], fmt, limits, attempt, mesh=mesh, smoke=smoke) if fmt else ():
                records.append(record)
                progress.record(record)
    attempt.check()
    return records


def _exported(
    programs: Sequence[tuple[str, Program, tuple[Scale, int, int]]], attempt: Attempts
) -> dict[tuple[Scale, int, int], bytes | None]:
    """The programs that another process may lower, lowered there; None where that failed."""
    with lowering.processes() as pool:
        jobs = {key: (what, pool.submit(_lowered, *key)) for what, p, key in programs if p.elsewhere}
        return {key: attempt(what, job.result) for key, (what, job) in jobs.items()}
