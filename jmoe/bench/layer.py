"""`jmoe bench layer`: the whole MoE layer, from tokens to tokens, beside stock JAX and eager PyTorch.

T tokens on one rank, D hidden size, F expert width, E experts, K experts per token, R ranks.

On one GPU the layer runs with BF16, FP8-128, MXFP8 and NVFP4 weights; on several, expert-parallel over all of them with
the same tokens on each, with every format on the wire. A figure is the median of chains of calls inside one jit. The
ceiling is what two matmuls over sorted rows could do at the rates that were measured in the same run: for each the
larger of its operations at the speed of a dense matmul and its bytes (weights of experts that have tokens, and rows) at
the speed of a copy. `parameters` has the number of kernels of a call and the sum of their own times, those of the
dependence between calls included.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jmoe import compat
from jmoe.config import MoEConfig, QuantConfig
from jmoe.experts import ExpertWeights
from jmoe.formats import bits_per_value
from jmoe.layer import build_moe, moe_local, quantize_params
from jmoe.params import MoEParams
from jmoe.router import route, router_logits

from . import layer_peers
from .common import (
    NoProgress,
    Progress,
    Record,
    chain,
    copy_bandwidth,
    jit_donating,
    relative_error,
    time_chain,
)
from .plot import lines
from .profile import totals
from .timing import CHAIN_SECONDS, MOST_CALLS

AXIS = "ep"
SHAPES = {
    "qwen3-30b-a3b": MoEConfig(2048, 768, 128, 8),
    "half deepseek-v3": MoEConfig(7168, 2048, 64, 8),
}
TOKENS = (8192, 64, 1, 256, 32768)  # the most telling first: a run may be cut short
SMOKE_SHAPES = {"tiny": MoEConfig(128, 128, 8, 2)}
SMOKE_TOKENS = (1, 24)
SETS = 2  # inputs of a chain: together they touch weights beyond the L2 cache
SAMPLE = 4  # tokens that are compared with the float32 reference


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a layer is quantised."""

    name: str
    quant: QuantConfig


VARIANTS = (
    Variant("BF16", QuantConfig()),
    Variant("FP8-128", QuantConfig(activations="fp8_128", weights="fp8_128x128", intermediate="fp8_128")),
    Variant("NVFP4 weights", QuantConfig(weights="nvfp4")),
    Variant("MXFP8 weights", QuantConfig(weights="mxfp8")),
)
WIRES = tuple(
    Variant(f"EP, {name} wire", QuantConfig(wire=wire))
    for name, wire in (("BF16", "bfloat16"), ("FP8-128", "fp8_128"), ("MXFP8", "mxfp8"), ("NVFP4", "nvfp4_token"))
)


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """copy: bytes per second read plus written. flops: operations per second of a dense matmul, by operand type."""

    copy: float
    flops: dict[str, float]


def ceilings(smoke: bool) -> Ceilings:
    """Measured now, on the first device."""
    size = 128 if smoke else 8192

    def rate(dtype) -> float:
        keys = jax.random.split(jax.random.key(0), 3)
        a, b, c = (jax.random.normal(k, (size, size), jnp.bfloat16).astype(dtype) for k in keys)

        def step(a, b):  # both contract their last axis, as FP8 operands must
            return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)

        timing = time_chain(step, [(a, c), (b, c)], calls=2 if smoke else 20)
        return 2 * size**3 / timing.median

    flops = {"bfloat16": rate(jnp.bfloat16)}
    if jax.default_backend() == "gpu":
        flops["fp8"] = rate(jnp.float8_e4m3fn)
    return Ceilings(copy_bandwidth() * 1e9, flops)


def random_params(key: jax.Array, config: MoEConfig) -> MoEParams:
    """BF16 parameters of variance 1 / fan-in, made on the device in one call."""
    d, f, e = config.hidden_size, config.intermediate_size, config.num_experts

    @jax.jit
    def make(key):
        shapes = {"router": (e, d), "gate_up": (e, 2, f, d), "down": (e, d, f)}
        parts = {
            name: jax.random.normal(k, shape, jnp.bfloat16) * jnp.bfloat16(shape[-1] ** -0.5)
            for k, (name, shape) in zip(jax.random.split(key, 3), shapes.items(), strict=True)
        }
        return MoEParams(router=parts.pop("router"), experts=ExpertWeights(**parts))

    return make(key)


def quantised(params: MoEParams, quant: QuantConfig) -> MoEParams:
    """The parameters with their expert weights in quant.weights."""
    fmt = quant.weights
    return params if fmt is None else jax.jit(lambda p: quantize_params(p, fmt))(params)


def roofline_seconds(config: MoEConfig, tokens: int, ceilings: Ceilings, *, ranks: int = 1) -> float:
    """Least seconds of one of `ranks` ranks with `tokens` tokens each; see the module docstring."""
    d, f, rows = config.hidden_size, config.intermediate_size, tokens * config.num_experts_per_tok
    touched = touched_experts(config.num_experts, config.num_experts_per_tok, tokens * ranks) / ranks
    quant = config.quant
    fp8 = quant.activations == "fp8_128" and quant.weights == "fp8_128x128"
    rate = ceilings.flops.get("fp8" if fp8 else "bfloat16", ceilings.flops["bfloat16"])
    bits = bits_per_value(quant.weights or config.dtype)
    seconds = 0.0
    for n, k, rows_in, rows_out in ((2 * f, d, tokens, rows), (d, f, rows, tokens)):
        nbytes = touched * n * k * bits / 8 + 2 * (rows_in * k + rows_out * (n if n == d else f))
        seconds += max(2.0 * rows * n * k / rate, nbytes / ceilings.copy)
    return seconds


def touched_experts(num_experts: int, top_k: int, tokens: int) -> float:
    """Experts that get a token, on average, from a router without preferences."""
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def reference(config: MoEConfig, params: MoEParams, x: jax.Array) -> jax.Array:
    """The layer in float32, for a few tokens [T, D], from unquantised parameters; the routing is the layer's own."""
    routing = route(router_logits(x, params.router), config.router, top_k=config.num_experts_per_tok)
    return jnp.stack([_one_token(params, x[t], routing.ids[t], routing.weights[t]) for t in range(x.shape[0])])


@jax.jit
def _one_token(params: MoEParams, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    out = jnp.zeros(x.shape, jnp.float32)
    assert isinstance(params.experts.gate_up, jax.Array) and isinstance(params.experts.down, jax.Array)
    for k in range(ids.shape[0]):
        gate_up = params.experts.gate_up[ids[k]].astype(jnp.float32)  # [2, F, D]
        gate, up = jnp.matmul(gate_up, x.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        down = params.experts.down[ids[k]].astype(jnp.float32)
        y = jnp.matmul(down, jax.nn.silu(gate) * up, precision=lax.Precision.HIGHEST)
        out = out + weights[k] * y
    return out


def _inputs(config: MoEConfig, tokens: int, sets: int, ranks: int = 1) -> list[jax.Array]:
    make = jax.jit(lambda k: jax.random.normal(k, (ranks * tokens, config.hidden_size), jnp.bfloat16))
    return [make(k) for k in jax.random.split(jax.random.key(tokens), sets)]


@dataclasses.dataclass
class Case:
    """One figure on one device: a chain of calls, compiled once for the time, the error and the kernels."""

    shape: str
    config: MoEConfig
    tokens: int
    variant: str
    params: MoEParams
    calls: int
    lowered: Any
    compiled: Any = None

    @classmethod
    def make(cls, shape: str, config: MoEConfig, tokens: int, variant: Variant, params: MoEParams, limits, smoke):
        """params: in the variant's format."""
        config = dataclasses.replace(config, quant=variant.quant)
        layer = build_moe(config)
        guess = 1.5 * roofline_seconds(config, tokens, limits)
        calls = SETS if smoke else SETS * math.ceil(max(2, min(MOST_CALLS / SETS, CHAIN_SECONDS / guess)))
        run = jit_donating(chain(lambda x, params: moe_local(layer, params, x), calls=calls))
        x = jax.ShapeDtypeStruct((tokens, config.hidden_size), jnp.bfloat16)
        return cls(shape, config, tokens, variant.name, params, calls, run.lower((x,) * SETS, ((None, params),) * SETS))

    def compile(self) -> None:
        self.compiled = self.lowered.compile()

    def measure(self, exact: MoEParams, limits: Ceilings, *, smoke: bool, peers: dict[str, float] | None) -> Record:
        """exact: the BF16 parameters."""
        xs = tuple(_inputs(self.config, self.tokens, SETS))
        sample = jnp.copy(xs[-1][:SAMPLE])
        rest, seconds = ((None, self.params),) * SETS, []
        for i in range(2 if smoke else 7):
            jax.block_until_ready(xs)
            start = time.perf_counter()
            xs, ys = self.compiled(xs, rest)
            jax.block_until_ready((xs, ys))
            seconds += [time.perf_counter() - start] if i else []
            if i == 0:
                error = relative_error(ys[-1][:SAMPLE], reference(self.config, exact, sample))
        seen = None if smoke else totals(lambda: self.compiled(xs, rest))
        more = {}
        if seen is not None:
            kernels, busy, span = seen
            more = {"kernels": kernels / self.calls, "busy_us": 1e6 * busy / self.calls}
            more["span_us"] = 1e6 * span / self.calls
        return _record(
            self.shape,
            self.config,
            self.tokens,
            self.variant,
            statistics.median(seconds) / self.calls,
            1,
            roofline_seconds(self.config, self.tokens, limits),
            peers=peers,
            error=error,
            smoke=smoke,
            parameters=more,
        )


def measure_ep(
    shape: str,
    config: MoEConfig,
    tokens: int,
    variant: Variant,
    params: MoEParams,
    limits: Ceilings,
    *,
    smoke: bool = False,
    backend: str = "auto",
    devices=None,
) -> Record:
    """One figure expert-parallel over all devices, `tokens` tokens on each. params: BF16, on the first device."""
    devices = jax.devices() if devices is None else devices
    ranks = len(devices)
    mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
    config = dataclasses.replace(config, quant=variant.quant)
    layer = build_moe(config, mesh=mesh, backend=backend)
    specs = dataclasses.replace(
        jax.tree.map(lambda _: P(), params), experts=jax.tree.map(lambda _: P(AXIS), params.experts)
    )
    put = lambda tree, specs: jax.device_put(  # noqa: E731
        tree, jax.tree.map(lambda s: jax.sharding.NamedSharding(mesh, s), specs)
    )
    spread = put(params, specs)
    xs = [put(x, P(AXIS)) for x in _inputs(config, tokens, 2, ranks)]
    step = lambda x, params: moe_local(layer, params, x)  # noqa: E731

    def wrap(chain):
        firsts = tuple(P(AXIS) for _ in xs)
        inputs = tuple((None, specs) for _ in xs)
        return jit_donating(compat.shard_map(chain, mesh=mesh, in_specs=(firsts, inputs), out_specs=(firsts, P(AXIS))))

    timing = time_chain(
        step, [(x, spread) for x in xs], calls=2 if smoke else None, repeats=1 if smoke else 5, wrap=wrap
    )
    run = jax.jit(compat.shard_map(step, mesh=mesh, in_specs=(P(AXIS), specs), out_specs=P(AXIS)))
    error = relative_error(
        run(xs[0], spread)[:SAMPLE], reference(config, params, jnp.asarray(np.asarray(xs[0])[:SAMPLE]))
    )
    return _record(
        shape,
        config,
        tokens,
        variant.name,
        timing.median,
        ranks,
        roofline_seconds(config, tokens, limits, ranks=ranks),
        error=error,
        smoke=smoke,
        parameters={"backend": layer.decision(tokens).backend, "wire": layer.decision(tokens).wire},
    )


def _record(
    shape,
    config,
    tokens,
    name,
    seconds,
    ranks,
    ceiling_seconds,
    *,
    peers=None,
    error=None,
    smoke=False,
    parameters=None,
) -> Record:
    """Tokens per second of all ranks together."""
    best = min(peers, key=lambda n: peers[n]) if peers else None
    case = f"{shape} T={tokens}" + (f" R={ranks}" if ranks > 1 else "")
    return Record(
        name=name,
        case=case,
        value=ranks * tokens / seconds,
        unit="tokens/s",
        seconds=seconds,
        ceiling=ranks * tokens / ceiling_seconds if ceiling_seconds else None,
        ceiling_name="roofline at the rates of this run" if ceiling_seconds else "",
        peer=ranks * tokens / peers[best] if peers and best else None,
        peer_name=best or "",
        error=error,
        error_name="" if error is None else "relative to float32",
        meaningful=not smoke and jax.default_backend() == "gpu",
        parameters={
            "shape": shape,
            "T": tokens,
            "D": config.hidden_size,
            "F": config.intermediate_size,
            "E": config.num_experts,
            "K": config.num_experts_per_tok,
            "R": ranks,
            **(parameters or {}),
        },
    )


def _stock(config: MoEConfig, tokens: int, params: MoEParams, smoke: bool) -> float | None:
    """Seconds of the layer in stock JAX; None where it does not fit into memory."""
    if layer_peers.stock_bytes(config, tokens) > 70e9:
        return None
    weights = layer_peers.stock_weights(params)
    xs = _inputs(config, tokens, 2)
    step = functools.partial(layer_peers.stock_layer, top_k=config.num_experts_per_tok)
    calls, repeats = (2, 1) if smoke or tokens > 1024 else (20, 3)
    return time_chain(step, [(x, *weights) for x in xs], calls=calls, repeats=repeats).median


def run(smoke: bool, progress: Progress | None = None) -> list[Record]:
    """Every shape, format and number of tokens, and then the peers of the shape."""
    progress = progress or NoProgress()
    shapes, tokens = (SMOKE_SHAPES, SMOKE_TOKENS) if smoke else (SHAPES, TOKENS)
    several = len(jax.devices()) > 1
    progress.start(len(shapes) * (len(VARIANTS) + 2 + several * len(WIRES)))
    limits = ceilings(smoke)
    records = []
    for shape, config in shapes.items():
        progress.step(f"{shape}: PyTorch")
        eager = {} if smoke else layer_peers.torch_seconds(config, tokens)
        exact = random_params(jax.random.key(0), config)
        progress.step(f"{shape}: stock JAX")
        stock = {t: s for t in tokens if (s := _stock(config, t, exact, smoke)) is not None}
        for variant in VARIANTS:
            progress.step(f"{shape}: {variant.name}")
            params = quantised(exact, variant.quant)
            cases = [Case.make(shape, config, t, variant, params, limits, smoke) for t in tokens]
            with concurrent.futures.ThreadPoolExecutor() as pool:  # nothing is timed meanwhile
                list(pool.map(Case.compile, cases))
            for case in cases:
                peers = {
                    n: ts[case.tokens] for n, ts in (("torch eager", eager), ("stock JAX", stock)) if case.tokens in ts
                }
                records.append(case.measure(exact, limits, smoke=smoke, peers=peers))
                progress.record(records[-1])
            del params, cases, case
        for variant in WIRES if several else ():
            progress.step(f"{shape}: {variant.name}")
            for t in tokens:
                records.append(measure_ep(shape, config, t, variant, exact, limits, smoke=smoke))
                progress.record(records[-1])
        for name, times in (("torch eager", eager), ("stock JAX", stock)):
            records += [_record(shape, config, t, name, s, 1, 0.0, smoke=smoke) for t, s in times.items()]
        del exact
    return records


def plot(records: list[Record], path: str | Path) -> None:
    """Tokens per second over tokens; peers are lines of their own."""
    shape = records[0].parameters["shape"] if records else ""
    mine = [dataclasses.replace(r, peer=None, ceiling=None) for r in records if r.parameters.get("shape") == shape]
    lines(mine, path, x="T", x_label="tokens on one rank", title=f"the MoE layer, {shape}", log_y=True)
