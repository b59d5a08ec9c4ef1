"""What the layer is measured against: the same layer in stock JAX, and in eager PyTorch.

T tokens, D hidden size, F expert width, E experts, K experts per token, M = T * K.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.config import MoEConfig
from jmoe.params import MoEParams

from .layer_case import SETS, case_name, inputs, random_params
from .timing import chain, jit_donating, run_chain


def stock_weights(params: MoEParams) -> tuple[jax.Array, jax.Array, jax.Array]:
    """router [D, E], gate_up [E, D, 2F], down [E, F, D]: as `lax.ragged_dot` takes them."""
    gate_up, down = params.experts.gate_up, params.experts.down
    assert isinstance(gate_up, jax.Array) and isinstance(down, jax.Array)
    flat = gate_up.reshape(gate_up.shape[0], -1, gate_up.shape[-1])
    return params.router.T, jnp.swapaxes(flat, 1, 2), jnp.swapaxes(down, 1, 2)


def stock_layer(x: jax.Array, router: jax.Array, gate_up: jax.Array, down: jax.Array, *, top_k: int) -> jax.Array:
    """Softmax router, sort by expert, two `lax.ragged_dot`, weighted sum: what one writes without a library."""
    experts, width = gate_up.shape[0], down.shape[1]
    weights, ids = lax.top_k(jax.nn.softmax((x @ router).astype(jnp.float32)), top_k)
    weights = weights / weights.sum(-1, keepdims=True)
    flat = ids.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=experts).astype(jnp.int32)
    hidden = lax.ragged_dot(x[order // top_k], gate_up, sizes)
    hidden = jax.nn.silu(hidden[:, :width]) * hidden[:, width:]
    y = lax.ragged_dot(hidden, down, sizes)[jnp.argsort(order)].reshape(-1, top_k, x.shape[1])
    return (y.astype(jnp.float32) * weights[..., None]).sum(1).astype(x.dtype)


def stock_bytes(config: MoEConfig, tokens: int) -> int:
    """Temporaries of `stock_layer` on GPUs, where `lax.ragged_dot` makes rows times experts times columns."""
    rows = tokens * config.num_experts_per_tok
    return rows * config.num_experts * config.hidden_size * 2 if jax.default_backend() == "gpu" else 0


@dataclasses.dataclass
class Stock:
    """A chain of `calls` calls of `stock_layer` with T tokens."""

    shape: str
    config: MoEConfig
    tokens: int
    calls: int
    lowered: Any
    compiled: Any = None

    @classmethod
    def make(cls, shape: str, config: MoEConfig, tokens: int, *, calls: int) -> Stock:
        """Lowered, which needs no arrays."""
        step = jax.jit(functools.partial(stock_layer, top_k=config.num_experts_per_tok))
        shapes = jax.eval_shape(lambda: stock_weights(random_params(jax.random.key(0), config)))
        x = jax.ShapeDtypeStruct((tokens, config.hidden_size), jnp.bfloat16)
        lowered = jit_donating(chain(step, calls=calls)).lower((x,) * SETS, ((None, *shapes),) * SETS)
        return cls(shape, config, tokens, calls, lowered)

    @property
    def title(self) -> str:
        """For people."""
        return f"stock JAX {case_name(self.shape, self.tokens, 1)}"

    def compile(self) -> None:
        self.compiled = self.lowered.compile()

    def seconds(self, weights: tuple[jax.Array, ...], repeats: int) -> float:
        """Of one call, median. weights: of `stock_weights`."""
        sets = [(x, *weights) for x in inputs(self.config, self.tokens, SETS)]
        return statistics.median(run_chain(self.compiled, sets, repeats, warmup=1)) / self.calls


def start_torch(
    shapes: Mapping[str, tuple[MoEConfig, tuple[int, ...]]],
) -> concurrent.futures.Future[dict[str, dict[int, float]]]:
    """Start eager PyTorch with `torch._grouped_mm` in a process of its own, for each shape's numbers of tokens.

    The result is seconds by shape and tokens: {} where there is no torch or no GPU, and without what does not fit into
    the memory that JAX leaves. It raises RuntimeError where the process fails.
    """
    pool = concurrent.futures.ThreadPoolExecutor(1)
    if not shapes or jax.default_backend() != "gpu" or importlib.util.find_spec("torch") is None:
        return pool.submit(dict)
    fields = ("hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok")
    asked = [(shape, [getattr(c, f) for f in fields], tokens) for shape, (c, tokens) in shapes.items()]
    command = [sys.executable, "-c", _TORCH, json.dumps(asked)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait() -> dict[str, dict[int, float]]:
        try:
            said, complaint = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RuntimeError("it took more than a minute") from None
        if process.returncode:
            raise RuntimeError(complaint.strip().rpartition("\n")[2] or f"exit status {process.returncode}")
        times = json.loads(said.splitlines()[-1])
        return {shape: {int(t): seconds for t, seconds in found.items()} for shape, found in times.items()}

    return pool.submit(wait)


_TORCH = """
import json, sys, torch
make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5

def layer(x, router, gate_up, down, f, e, k):
    weights, ids = torch.topk(torch.softmax((x @ router.T).float(), -1), k)
    weights = weights / weights.sum(-1, keepdim=True)
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ends = torch.cumsum(torch.bincount(flat, minlength=e), 0).to(torch.int32)
    h = torch._grouped_mm(x[order // k], gate_up.transpose(-2, -1), offs=ends)
    h = torch.nn.functional.silu(h[:, :f]) * h[:, f:]
    y = torch._grouped_mm(h, down.transpose(-2, -1), offs=ends)
    out = torch.zeros_like(x, dtype=torch.float32)
    out.index_add_(0, order // k, y.float() * weights.reshape(-1)[order, None])
    return out.to(x.dtype)

out = {}
for shape, (d, f, e, k), tokens in json.loads(sys.argv[1]):
    weights = make(e, d), make(e, 2 * f, d), make(e, d, f)
    out[shape] = {}
    for t in tokens:
        try:
            x = make(t, d) * d ** 0.5
            times = []
            for _ in range(6):
                a, b = torch.cuda.Event(True), torch.cuda.Event(True)
                a.record(); [layer(x, *weights, f, e, k) for _ in range(10)]; b.record(); torch.cuda.synchronize()
                times.append(a.elapsed_time(b) / 10e3)
            out[shape][t] = sorted(times[1:])[2]
        except torch.OutOfMemoryError:
            pass
print(json.dumps(out))
"""
