"""A short test of the layer on the machine at hand, against a dense float32 computation on the host."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable

import numpy as np

# (name, quantised activations, least SQNR in dB against float32). The floors are those of the test suite's layer tests;
# the last two also have a ceiling, so that a path that does not quantise is found.
CASES = (
    ("bfloat16", None, 40.0, None),
    ("mxfp8", "mxfp8", 26.0, 40.0),
    ("nvfp4_token", "nvfp4_token", 16.0, 30.0),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """One self-test. sqnr: of the layer's output, dB; None if it did not run. detail: why it failed, or how it ran."""

    name: str
    ok: bool
    sqnr: float | None
    seconds: float
    detail: str


def self_test(cases=CASES, step: Callable[[str], None] = lambda _: None, *, max_devices: int = 8) -> list[Result]:
    """Run the layer over this machine's devices, in each case. Never raises: what goes wrong is in the results.

    step: called with each case's name before it runs. max_devices: use no more ranks than this.
    """
    results = []
    for name, activations, floor, ceiling in cases:
        step(name)
        start = time.perf_counter()
        try:
            sqnr, detail = _run(activations, max_devices)
            ok = sqnr >= floor and (ceiling is None or sqnr <= ceiling)
            if not ok:
                limit = f"at least {floor:.0f}" if sqnr < floor else f"at most {ceiling:.0f}"
                detail = f"SQNR is {sqnr:.1f} dB and must be {limit}; {detail}"
            results.append(Result(name, ok, sqnr, time.perf_counter() - start, detail))
        except Exception as e:  # a self-test reports; whatever fails here is its finding
            where = traceback.extract_tb(e.__traceback__)[-1]
            message = str(e).splitlines()[0] if str(e) else ""
            detail = f"{type(e).__name__}: {message} ({where.name}, line {where.lineno})"
            results.append(Result(name, False, None, time.perf_counter() - start, detail))
    return results


def _run(activations: str | None, max_devices: int) -> tuple[float, str]:
    import jax
    import jax.numpy as jnp

    from .config import MoEConfig, QuantConfig
    from .formats import sqnr
    from .layer import build_moe, moe
    from .params import init_params

    dtype = "bfloat16"
    devices = jax.devices()[:max_devices]
    ranks = len(devices)
    experts = 2 * ranks if ranks > 2 else 8
    config = MoEConfig(256, 128, experts, 2, dtype=dtype, quant=QuantConfig(activations=activations))
    mesh = jax.sharding.Mesh(np.array(devices), ("ep",)) if ranks > 1 else None
    layer = build_moe(config, mesh=mesh)
    params = init_params(jax.random.key(0), config, dtype=jnp.dtype(dtype))
    x = jax.random.normal(jax.random.key(1), (32 * ranks, 256), jnp.dtype(dtype))
    y = np.asarray(jax.jit(lambda p, v: moe(layer, p, v))(params, x).astype(jnp.float32))
    decision = layer.decision(32)
    ran = f"{ranks} rank{'s' * (ranks > 1)}, {decision.backend}, {decision.wire} sent, {decision.transport_reason}"
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
