"""One figure of `jmoe bench layer`: a chain of calls of a layer, compiled before anything is timed.

T tokens on one rank, D hidden size, F expert width, E experts, K experts per token, R ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmoe import compat
from jmoe.config import MoEConfig, QuantConfig
from jmoe.experts import ExpertWeights
from jmoe.formats import bits_per_value
from jmoe.layer import MoELayer, build_moe, moe_local, quantize_params
from jmoe.params import MoEParams
from jmoe.policy import explain
from jmoe.router import route, router_logits

from . import lowering
from .common import Record, chain, copy_bandwidth, jit_donating, relative_error
from .profile import totals
from .timing import CHAIN_SECONDS, MOST_CALLS, Chain, run_chain

AXIS = "ep"
FP8 = QuantConfig(activations="fp8_128", weights="fp8_128x128", intermediate="fp8_128")
SETS = 2  # inputs of a chain: together they touch weights beyond the L2 cache
SAMPLE = 4  # tokens that are compared with the float32 reference
REPEATS = 5
# A figure is what so many more chains add to one: the start and end of a run on two H200s cost 0.6 ms together.
MORE_CHAINS = 2


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a layer is quantised, and with how many tokens on each rank it is timed."""

    name: str
    quant: QuantConfig
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """copy: bytes per second read plus written. flops: operations per second of a dense matmul, by operand type."""

    copy: float
    flops: dict[str, float]


NOMINAL = Ceilings(4e12, {"bfloat16": 800e12, "fp8": 1500e12})  # of an H200, for the length of a chain


class Matmuls:
    """Dense matmuls of BF16 and, on GPUs, of FP8, whose speed is a ceiling: lowered, to be compiled beside others.

    Apart they take half a minute to compile, because XLA tries many ways.
    """

    CALLS = 20

    def __init__(self, smoke: bool):
        self.size, self.smoke = 128 if smoke else 8192, smoke
        self.dtypes = {"bfloat16": jnp.bfloat16}
        if jax.default_backend() == "gpu":
            self.dtypes["fp8"] = jnp.float8_e4m3fn

        def step(a, b):  # both contract their last axis, as FP8 operands must
            return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)

        run = jit_donating(chain(step, calls=2 if smoke else self.CALLS))
        like = {name: jax.ShapeDtypeStruct((self.size, self.size), dtype) for name, dtype in self.dtypes.items()}
        self.lowered = {name: run.lower((a, a), ((None, a), (None, a))) for name, a in like.items()}
        self.compiled: dict[str, Any] = {}

    def compile(self, name: str) -> None:
        """name: a key of `dtypes`."""
        self.compiled[name] = self.lowered[name].compile()

    def measure(self) -> Ceilings:
        """On the first device, with the copy bandwidth."""
        flops = {}
        for name, dtype in self.dtypes.items():
            keys = jax.random.split(jax.random.key(0), 3)
            a, b, c = (_normal(k, (self.size, self.size)).astype(dtype) for k in keys)
            seconds = statistics.median(run_chain(self.compiled[name], [(a, c), (b, c)], 1 if self.smoke else 5))
            flops[name] = 2 * self.size**3 * (2 if self.smoke else self.CALLS) / seconds
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
    """Least seconds of one of `ranks` ranks with `tokens` tokens each: two matmuls over sorted rows.

    For each the larger of its operations at the speed of a dense matmul and its bytes (weights of experts that have
    tokens, and rows) at the speed of a copy.
    """
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


@functools.partial(jax.jit, static_argnums=0)
def reference(config: MoEConfig, params: MoEParams, x: jax.Array) -> jax.Array:
    """The layer in float32, for a few tokens [T, D], from unquantised parameters; the routing is the layer's own."""
    routing = route(router_logits(x, params.router), config.router, top_k=config.num_experts_per_tok)
    gate_ups, downs = params.experts.gate_up, params.experts.down
    assert isinstance(gate_ups, jax.Array) and isinstance(downs, jax.Array)

    def add(total, chosen):
        x, expert, weight = chosen
        gate_up, down = (w[expert].astype(jnp.float32) for w in (gate_ups, downs))
        gate, up = jnp.matmul(gate_up, x.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        return total + weight * jnp.matmul(down, jax.nn.silu(gate) * up, precision=lax.Precision.HIGHEST), None

    def one(token):
        x, ids, weights = token
        rows = jnp.broadcast_to(x, (*ids.shape, *x.shape))
        return lax.scan(add, jnp.zeros(x.shape, jnp.float32), (rows, ids, weights))[0]

    return lax.map(one, (x, routing.ids, routing.weights))


def inputs(config: MoEConfig, rows: int, sets: int) -> list[jax.Array]:
    """Normal BF16 rows [rows, D], the same for every variant."""
    return [_normal(k, (rows, config.hidden_size)) for k in jax.random.split(jax.random.key(rows), sets)]


@functools.partial(jax.jit, static_argnums=1)
def _normal(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def parameter_specs(params: MoEParams) -> MoEParams:
    """How the ranks share them: experts are spread, the rest is everywhere."""
    return dataclasses.replace(
        jax.tree.map(lambda _: P(), params), experts=jax.tree.map(lambda _: P(AXIS), params.experts)
    )


@functools.cache
def parameter_shapes(config: MoEConfig) -> MoEParams:
    """Of parameters with the expert weights in config.quant.weights."""
    return jax.eval_shape(lambda: quantised(random_params(jax.random.key(0), config), config.quant))


@dataclasses.dataclass
class Case:
    """A chain of `calls` calls of one layer with `tokens` tokens on each rank, one rank where `mesh` is None.

    config: with the variant's quantisation. mesh: of one axis, AXIS. lowered and compiled: the chain, compiled once for
    the time, the error and the kernels.
    """

    shape: str
    config: MoEConfig
    tokens: int
    variant: Variant
    mesh: Mesh | None
    layer: MoELayer
    calls: int
    lowered: Any = None
    compiled: Any = None

    @classmethod
    def make(
        cls,
        shape: str,
        config: MoEConfig,
        tokens: int,
        variant: Variant,
        *,
        mesh: Mesh | None = None,
        smoke: bool = False,
        backend: str = "auto",
    ) -> Case:
        """Not lowered yet. config: without quantisation."""
        config = dataclasses.replace(config, quant=variant.quant)
        layer = build_moe(config, mesh=mesh, backend=backend)
        guess = 1.5 * roofline_seconds(config, tokens, NOMINAL, ranks=layer.num_ranks) + 20e-6
        calls = SETS if smoke else SETS * math.ceil(max(2, min(MOST_CALLS / SETS, CHAIN_SECONDS / guess)))
        return cls(shape, config, tokens, variant, mesh, layer, calls)

    @property
    def ranks(self) -> int:
        return self.layer.num_ranks

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.variant.name} {case_name(self.shape, self.tokens, self.ranks)}"

    def _program(self) -> tuple[Chain, tuple[Any, ...]]:
        """The chain, and the shapes of its arguments."""
        layer, mesh, params = self.layer, self.mesh, parameter_shapes(self.config)
        # A jitted step is traced and lowered once, though the chain has four copies of it.
        run = chain(jax.jit(lambda x, params: moe_local(layer, params, x)), calls=self.calls)
        x = jax.ShapeDtypeStruct((self.ranks * self.tokens, self.config.hidden_size), jnp.bfloat16)
        if mesh is not None:
            specs, firsts = parameter_specs(params), (P(AXIS),) * SETS
            place = lambda a, spec: jax.ShapeDtypeStruct(  # noqa: E731
                a.shape, a.dtype, sharding=NamedSharding(mesh, spec)
            )
            params, x = jax.tree.map(place, params, specs), place(x, P(AXIS))
            in_specs = (firsts, ((None, specs),) * SETS)
            run = compat.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=(firsts, P(AXIS)))
        return run, ((x,) * SETS, ((None, params),) * SETS)

    def exported(self) -> bytes:
        """The chain, lowered for another process."""
        run, arguments = self._program()
        return lowering.exported(run, *arguments)

    def lower(self, exported: bytes | None = None) -> Case:
        """exported: by another process (None: lowered here)."""
        run, arguments = self._program()
        if exported is not None:
            call = lowering.imported(exported)

            def run(firsts: tuple, inputs: Sequence[tuple], /) -> tuple[tuple, tuple]:  # noqa: F811
                out = call(firsts, inputs)
                return tuple(out[:SETS]), tuple(out[SETS:])

        self.lowered = jit_donating(run).lower(*arguments)
        return self

    def compile(self) -> None:
        self.compiled, self.lowered = self.lowered.compile(), None

    def placed(self, params: MoEParams) -> MoEParams:
        """The parameters where this case wants them."""
        if self.mesh is None:
            return params
        mesh = self.mesh
        return jax.device_put(params, jax.tree.map(lambda s: NamedSharding(mesh, s), parameter_specs(params)))

    def inputs(self) -> list[jax.Array]:
        xs = inputs(self.config, self.ranks * self.tokens, SETS)
        return xs if self.mesh is None else [jax.device_put(x, NamedSharding(self.mesh, P(AXIS))) for x in xs]

    def measure(
        self,
        params: MoEParams,
        exact: MoEParams,
        limits: Ceilings,
        *,
        smoke: bool = False,
        peers: dict[str, float] | None = None,
    ) -> Record:
        """params: `placed`, in the variant's format. exact: the BF16 parameters on one device."""
        xs = tuple(self.inputs())
        sample = jnp.asarray(np.asarray(xs[-1][:SAMPLE]))
        rest = ((None, params),) * SETS
        ys: Any = ()

        def seconds(chains: int) -> float:
            nonlocal xs, ys
            jax.block_until_ready(xs)
            start = time.perf_counter()
            for _ in range(chains):
                xs, ys = self.compiled(xs, rest)
            jax.block_until_ready((xs, ys))
            return time.perf_counter() - start

        seconds(1)
        plain = dataclasses.replace(self.config, quant=QuantConfig())
        error = relative_error(np.asarray(ys[-1][:SAMPLE]), reference(plain, exact, sample))
        if smoke:
            median = seconds(1) / self.calls
        else:
            added = statistics.median(seconds(1 + MORE_CHAINS) - seconds(1) for _ in range(REPEATS))
            median = max(added, 1e-9) / (MORE_CHAINS * self.calls)
        more = self._predicted(median)
        if self.ranks > 1:
            decision = self.layer.decision(self.tokens)
            more |= {"backend": decision.backend, "wire": decision.wire}
        seen = None if smoke else totals(lambda: self.compiled(xs, rest))
        if seen is not None:
            count, busy, span = seen
            more |= {"kernels": count / self.calls, "busy_us": 1e6 * busy / self.calls}
            more |= {"span_us": 1e6 * span / self.calls}
        return record(
            self.shape,
            self.config,
            self.tokens,
            self.variant.name,
            median,
            self.ranks,
            roofline_seconds(self.config, self.tokens, limits, ranks=self.ranks),
            peers=peers,
            error=error,
            smoke=smoke,
            parameters=more,
        )

    def _predicted(self, seconds: float) -> dict[str, Any]:
        """What `jmoe explain` says of this layer, beside what was measured."""
        layer = explain(
            self.config,
            backend=self.layer.backend,
            num_ranks=self.ranks,
            tokens=self.tokens,
            caps=self.layer.caps,
        ).chosen.layer
        if layer is None:
            return {}
        return {"predicted_us": 1e6 * layer.total, "predicted_over_measured": layer.total / seconds}


def case_name(shape: str, tokens: int, ranks: int) -> str:
    """What a record's case is called."""
    return f"{shape} T={tokens}" + (f" R={ranks}" if ranks > 1 else "")


def record(
    shape: str,
    config: MoEConfig,
    tokens: int,
    name: str,
    seconds: float,
    ranks: int,
    ceiling_seconds: float,
    *,
    peers: dict[str, float] | None = None,
    error: float | None = None,
    smoke: bool = False,
    parameters: dict[str, Any] | None = None,
) -> Record:
    """Tokens per second of all ranks together."""
    best = min(peers, key=lambda n: peers[n]) if peers else None
    return Record(
        name=name,
        case=case_name(shape, tokens, ranks),
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
            **({"peers": {n: ranks * tokens / s for n, s in peers.items()}} if peers else {}),
            **(parameters or {}),
        },
    )
