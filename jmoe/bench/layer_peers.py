"""What the layer is measured against: the same layer in stock JAX, and in eager PyTorch.

T tokens, D hidden size, F expert width, E experts, K experts per token, M = T * K.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.config import MoEConfig
from jmoe.params import MoEParams

from .layer_case import SETS, inputs, random_params
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

    config: MoEConfig
    tokens: int
    calls: int
    lowered: Any
    compiled: Any = None

    @classmethod
    def make(cls, config: MoEConfig, tokens: int, *, calls: int) -> Stock:
        """Lowered, which needs no arrays."""
        step = jax.jit(functools.partial(stock_layer, top_k=config.num_experts_per_tok))
        shapes = jax.eval_shape(lambda: stock_weights(random_params(jax.random.key(0), config)))
        x = jax.ShapeDtypeStruct((tokens, config.hidden_size), jnp.bfloat16)
        lowered = jit_donating(chain(step, calls=calls)).lower((x,) * SETS, ((None, *shapes),) * SETS)
        return cls(config, tokens, calls, lowered)

    def compile(self) -> None:
        self.compiled = self.lowered.compile()

    def seconds(self, weights: tuple[jax.Array, ...], repeats: int) -> float:
        """Of one call, median. weights: of `stock_weights`."""
        sets = [(x, *weights) for x in inputs(self.config, self.tokens, SETS)]
        return statistics.median(run_chain(self.compiled, sets, repeats, warmup=1)) / self.calls


def start_torch(config: MoEConfig, tokens: tuple[int, ...]) -> Callable[[], dict[int, float]]:
    """Start eager PyTorch with `torch._grouped_mm` in a process of its own.

    Returns what waits for it and gives seconds by tokens; {} without torch or a GPU, or where it fails.
    """
    if jax.default_backend() != "gpu" or importlib.util.find_spec("torch") is None:
        return dict
    sizes = [config.hidden_size, config.intermediate_size, config.num_experts, config.num_experts_per_tok]
    command = [sys.executable, "-c", _TORCH, json.dumps([sizes, list(tokens)])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def wait() -> dict[int, float]:
        try:
            said, _ = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            return {}
        lines = said.splitlines()
        return {int(t): s for t, s in json.loads(lines[-1]).items()} if process.returncode == 0 and lines else {}

    return wait


_TORCH = """
import json, sys, torch
(d, f, e, k), tokens = json.loads(sys.argv[1])
make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5
router, gate_up, down = make(e, d), make(e, 2 * f, d), make(e, d, f)

def layer(x):
    weights, ids = torch.topk(torch.softmax((x @ router.T).float(), -1), k)
    weights = weights / weights.sum(-1, keepdim=True)
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ends = torch.cumsum(torch.bincount(flat, minlength=e), 0).to(torch.int32)
    h = torch._grouped_mm(x[order // k], gate_up.transpose(-2, -1), offs=ends)
    h = torch.nn.functional.silu(h[:, :f]) * h[:, f:]
    y = torch._grouped_mm(h, down.transpose(-2, -1), offs=ends)
    out = torch.zeros(x.shape[0], d, device="cuda", dtype=torch.float32)
    out.index_add_(0, order // k, y.float() * weights.reshape(-1)[order, None])
    return out.to(x.dtype)

out = {}
for t in tokens:
    try:
        x = make(t, d) * d ** 0.5
        times = []
        for _ in range(6):
            a, b = torch.cuda.Event(True), torch.cuda.Event(True)
            a.record(); [layer(x) for _ in range(10)]; b.record(); torch.cuda.synchronize()
            times.append(a.elapsed_time(b) / 10e3)
        out[t] = sorted(times[1:])[2]
    except torch.OutOfMemoryError:
        pass
print(json.dumps(out))
"""
