"""A short test of the numbers that this machine computes: quantisation, grouped matmul, and the whole layer.

Everything is compared with float64 on the host. Floors are those of the test suite; quantised cases have a ceiling too,
so that a path that silently does not quantise is found.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import grouped_matmul

from .config import MoEConfig, QuantConfig
from .formats import dequantize, quantize, sqnr
from .layer import build_moe, moe
from .params import init_params

BUDGET = 10.0  # seconds; a case that would begin later is skipped, and says so
MAX_DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """One test. run() -> (SQNR in dB, how it ran); the SQNR must lie between floor and ceiling."""

    name: str
    run: Callable[[], tuple[float, str]]
    floor: float
    ceiling: float | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """One test's outcome. sqnr: dB, None where it did not run. detail: how it ran, why it failed or was skipped."""

    name: str
    status: Literal["ok", "failed", "skipped"]
    sqnr: float | None
    limits: str
    seconds: float
    detail: str


def layer_case(name: str, activations: str | None, floor: float, ceiling: float | None = None) -> Case:
    """The layer over this machine's devices, with activations of a format."""
    return Case(f"layer, {name}", lambda: run_layer(activations), floor, ceiling)


# The most telling first: a slow machine may not get through all of them in the time.
CASES = (
    layer_case("bfloat16", None, 40.0),
    layer_case("nvfp4_token", "nvfp4_token", 16.0, 30.0),
    Case("grouped matmul", lambda: run_matmul(), 45.0),
    Case("quantise to mxfp8", lambda: run_quantise("mxfp8"), 30.0, 33.0),
    layer_case("mxfp8", "mxfp8", 26.0, 40.0),
    Case("quantise to nvfp4_token", lambda: run_quantise("nvfp4_token"), 19.5, 21.5),
)


def run_self_test(
    step: Callable[[str], None] = lambda _: None, *, cases: Sequence[Case] = CASES, budget: float = BUDGET
) -> list[Result]:
    """Run the cases one after the other. Never raises: what goes wrong is in the results.

    step: called with each case's name before it runs. budget: seconds; cases that would begin after that are skipped.
    """
    begin = time.perf_counter()
    results = []
    for case in cases:
        step(case.name)
        start = time.perf_counter()
        limits = f"at least {case.floor:g}" if case.ceiling is None else f"{case.floor:g} to {case.ceiling:g}"
        if start - begin >= budget:
            results.append(Result(case.name, "skipped", None, limits, 0.0, f"the {budget:g} s for tests are over"))
            continue
        figure = None
        try:
            figure, detail = case.run()
            good = figure >= case.floor and (case.ceiling is None or figure <= case.ceiling)
            if not good:
                detail = f"SQNR is {figure:.1f} dB and must be {limits}; {detail}"
        except Exception as e:  # a self-test reports; whatever fails here is its finding
            where = traceback.extract_tb(e.__traceback__)[-1]
            message = str(e).splitlines()[0] if str(e) else ""
            good, detail = False, f"{type(e).__name__}: {message} ({where.name}, line {where.lineno})"
        status = "ok" if good else "failed"
        results.append(Result(case.name, status, figure, limits, time.perf_counter() - start, detail))
    return results


def _normal(seed: int, *shape: int) -> jax.Array:
    """N(0, 1) in bfloat16, made on the host: nothing to compile."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(jnp.bfloat16))


def run_quantise(fmt: str) -> tuple[float, str]:
    """Quantise [256, 2048] as the layer would: the noise, and on GPUs every byte against the reference's."""
    x = _normal(0, 256, 2048)
    q = jax.jit(lambda x: quantize(x, fmt))(x)
    reference = jax.jit(lambda x: quantize(x, fmt, implementation="reference"))(x)
    pairs = zip(jax.tree.leaves(q), jax.tree.leaves(reference), strict=True)
    wrong = sum(int((np.asarray(a).view(np.uint8) != np.asarray(b).view(np.uint8)).sum()) for a, b in pairs)
    if wrong:
        return float("-inf"), f"{wrong} bytes differ from the reference implementation's"
    y = jax.jit(lambda q: dequantize(q, jnp.float32))(q)
    return sqnr(np.asarray(x, np.float32), y), f"all bytes equal to the reference's, on {jax.devices()[0].device_kind}"


def run_matmul() -> tuple[float, str]:
    """A grouped matmul of many rows and one of few, an empty group in each."""
    worst = float("inf")
    for sizes in ([300, 0, 500, 200], [3, 0, 1, 4]):
        x, w = _normal(1, sum(sizes) + 24, 512), _normal(2, 4, 256, 512)
        y = jax.jit(grouped_matmul)(x, w, jnp.asarray(sizes, jnp.int32))
        group = np.repeat(np.arange(4), sizes)
        exact = np.zeros(y.shape)
        rows, weights = (np.asarray(a).astype(np.float64) for a in (x, w))
        for g in range(4):
            exact[: len(group)][group == g] = rows[: len(group)][group == g] @ weights[g].T
        worst = min(worst, sqnr(exact, np.asarray(y).astype(np.float64)))
    return worst, f"1000 and 8 rows in 4 groups, one of them empty, on {jax.devices()[0].device_kind}"


def run_layer(activations: str | None) -> tuple[float, str]:
    """The layer over all devices (at most MAX_DEVICES ranks) against a dense computation on the host."""
    devices = jax.devices()[:MAX_DEVICES]
    ranks = len(devices)
    experts = 2 * ranks if ranks > 2 else 8
    config = MoEConfig(256, 128, experts, 2, dtype="bfloat16", quant=QuantConfig(activations=activations))
    mesh = jax.sharding.Mesh(np.array(devices), ("ep",)) if ranks > 1 else None
    layer = build_moe(config, mesh=mesh)
    params = init_params(jax.random.key(0), config, dtype=jnp.bfloat16)
    x = _normal(3, 32 * ranks, 256)
    y = np.asarray(jax.jit(lambda p, v: moe(layer, p, v))(params, x).astype(jnp.float32))
    decision = layer.decision(32)
    ran = "one rank" if ranks == 1 else f"{ranks} ranks, {decision.wire} sent by {decision.backend}"
    if decision.transport == "kernel":
        ran += " through its kernel"
    return sqnr(dense(params, np.asarray(x.astype(jnp.float32)), top_k=2), y), ran


def dense(params, x: np.ndarray, *, top_k: int) -> np.ndarray:
    """The layer of softmax router and SiLU experts in float64 numpy, every token through each of its experts."""
    router, gate_up, down = (
        np.asarray(a.astype("float32"), np.float64)
        for a in (params.router, params.experts.gate_up, params.experts.down)
    )
    logits = x.astype(np.float64) @ router.T
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    ids = np.argsort(-scores, axis=-1, kind="stable")[:, :top_k]
    out = np.zeros_like(x, np.float64)
    for t, chosen in enumerate(ids):
        for e in chosen:
            gate, up = gate_up[e, 0] @ x[t], gate_up[e, 1] @ x[t]
            out[t] += scores[t, e] / scores[t, chosen].sum() * (down[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out
