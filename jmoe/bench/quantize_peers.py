"""What block quantisation is compared with: the plain way to write it in jax.numpy and in torch, compiled.

These follow the same formats without promises about subnormals, NaN or the last bit, as one would write them by hand.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.formats import FORMATS, QTensor

TORCH_SETS, TORCH_CALLS = 8, 5
TORCH_LIMIT = 36.0  # seconds for all of them
MARK = "torch peer: "


def _e2m1_pack(y: jax.Array) -> jax.Array:
    """Packed E2M1 codes of y [..., K], |y| <= 6: comparisons with the midpoints, then two codes to a byte."""
    a = jnp.abs(y)
    code = sum((a > jnp.float32(m)).astype(jnp.uint8) for m in (0.25, 1.25, 2.5, 5.0))
    code = code + sum((a >= jnp.float32(m)).astype(jnp.uint8) for m in (0.75, 1.75, 3.5))
    code = code | (jnp.signbit(y).astype(jnp.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4)


def _e4m3_scale(amax: jax.Array, g: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array]:
    """E4M3 scale that maps a block's maximum to `top`, and the factor that takes the block to E2M1's range."""
    stored = jnp.minimum(amax / (top * g), jnp.float32(448)).astype(jnp.float8_e4m3fn)
    scale = lax.optimization_barrier(stored)  # or XLA drops the rounding
    return scale, 1 / jnp.maximum(scale.astype(jnp.float32) * g, jnp.float32(1e-30))


def _e2m1_round(y: jax.Array) -> jax.Array:
    """y rounded to E2M1, |y| <= 6."""
    a = jnp.abs(y)
    step = jnp.where(a < 2, jnp.float32(0.5), jnp.where(a < 4, jnp.float32(1), jnp.float32(2)))
    return jnp.round(y / step) * step


def _four_over_six(blocks: jax.Array, amax: jax.Array, g: jax.Array, shape) -> tuple[jax.Array, jax.Array]:
    """Data and scales of blocks [T, C, 16]: of the scales for 6 and for 4, the one with the smaller squared error."""
    found = []
    for top in (6.0, 4.0):
        scale, factor = _e4m3_scale(amax, g, jnp.float32(top))
        y = jnp.clip(blocks * factor[..., None], -6, 6)
        error = jnp.sum((_e2m1_round(y) / factor[..., None] - blocks) ** 2, axis=-1)
        found.append((scale, y, error))
    (six, y_six, error_six), (four, y_four, error_four) = found
    better = error_four < error_six
    return _e2m1_pack(jnp.where(better[..., None], y_four, y_six).reshape(shape)), jnp.where(better, four, six)


def plain_xla(x: jax.Array, name: str) -> tuple[jax.Array, ...]:
    """Data and scales of x [T, D] as a user of jax.numpy would compute them."""
    fmt = FORMATS[name]
    top = 448.0 if fmt.element == "e4m3" else 6.0
    blocks = x.astype(jnp.float32).reshape(x.shape[0], -1, fmt.block)
    amax = jnp.max(jnp.abs(blocks), axis=-1)
    extra: tuple[jax.Array, ...] = ()
    if fmt.scale == "e8m0":
        bits = lax.bitcast_convert_type(amax / jnp.float32(top), jnp.uint32)
        byte = jnp.clip((bits + jnp.uint32(0x7FFFFF)) >> 23, 1, 254)
        factor = lax.bitcast_convert_type((jnp.uint32(254) - byte) << 23, jnp.float32)
        scale = byte.astype(jnp.uint8)
    elif fmt.scale == "f32":
        scale = jnp.maximum(amax, jnp.float32(1e-10)) / jnp.float32(448)
        if fmt.pow2:
            bits = lax.bitcast_convert_type(scale, jnp.uint32) + jnp.uint32(0x7FFFFF)
            scale = lax.bitcast_convert_type(bits & jnp.uint32(0x7F800000), jnp.float32)
        factor = 1 / scale
    else:
        if fmt.global_scale == "token":
            g = jnp.max(amax, axis=-1, keepdims=True) / jnp.float32(6 * fmt.e4m3_max)
            extra = (g,)
        else:
            g = jnp.float32(5.5 / (6 * fmt.e4m3_max))
        if fmt.four_over_six:
            return *_four_over_six(blocks, amax, g, x.shape), *extra
        scale, factor = _e4m3_scale(amax, g, jnp.float32(6))
    y = jnp.clip(blocks * factor[..., None], -top, top).reshape(x.shape)
    data = y.astype(jnp.float8_e4m3fn) if fmt.element == "e4m3" else _e2m1_pack(y)
    return (data, scale, *extra)


def plain_xla_inverse(q: QTensor) -> jax.Array:
    """bfloat16 [T, D] of q."""
    fmt = q.format
    if fmt.element == "e4m3":
        value = q.data.astype(jnp.float32)
    else:
        table = jnp.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], jnp.float32)
        value = table[jnp.stack([q.data & 15, q.data >> 4], axis=-1).astype(jnp.int32)]
    value = value.reshape(q.shape[0], -1, fmt.block)
    if fmt.scale == "e8m0":
        scale = lax.bitcast_convert_type(q.block_scale.astype(jnp.uint32) << 23, jnp.float32)
    else:
        scale = q.block_scale.astype(jnp.float32)
    if q.global_scale is not None:
        scale = scale * q.global_scale.reshape(-1, *(1,) * q.global_scale.ndim)
    return (value * scale[..., None]).reshape(q.shape).astype(jnp.bfloat16)


def _torch_functions(torch: Any) -> dict[str, Any]:
    """Quantisation in plain torch operations, by format."""
    fmt = FORMATS["nvfp4"]

    def mxfp8(x):
        blocks = x.float().reshape(x.shape[0], -1, 32)
        amax = blocks.abs().amax(-1)
        byte = (((amax * (1 / 448)).view(torch.int32) + 0x7FFFFF) >> 23).clamp(1, 254)
        factor = ((254 - byte) << 23).view(torch.float32)
        data = (blocks * factor[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).reshape(x.shape)
        return data, byte.to(torch.uint8)

    def nvfp4(x):
        g = 5.5 / (6 * fmt.e4m3_max)
        blocks = x.float().reshape(x.shape[0], -1, 16)
        scale = (blocks.abs().amax(-1) * (1 / (6 * g))).clamp(max=448).to(torch.float8_e4m3fn)
        y = (blocks / (scale.float() * g).clamp(min=1e-30)[..., None]).clamp(-6, 6).reshape(x.shape)
        a = y.abs()
        code = torch.zeros_like(a, dtype=torch.uint8)
        for midpoint in (0.25, 1.25, 2.5, 5.0):
            code += (a > midpoint).to(torch.uint8)
        for midpoint in (0.75, 1.75, 3.5):
            code += (a >= midpoint).to(torch.uint8)
        code |= torch.signbit(y).to(torch.uint8) << 3
        return code[:, 0::2] | (code[:, 1::2] << 4), scale

    return {"mxfp8": torch.compile(mxfp8, dynamic=False), "nvfp4": torch.compile(nvfp4, dynamic=False)}


def _torchao_functions(torch: Any) -> dict[str, Any]:
    """torchao's: its Triton kernel for FP8, its compiled tensor code for the others (its kernels for these want
    Blackwell)."""
    from torchao.kernel.blockwise_quantization import fp8_blockwise_act_quant
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    compiled = functools.partial(torch.compile, dynamic=False)
    mxfp8 = compiled(lambda x: to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL))
    scale = torch.tensor(5.5 / (6 * FORMATS["nvfp4"].e4m3_max), device="cuda")
    nvfp4 = compiled(lambda x: nvfp4_quantize(x, 16, scale))
    return {"mxfp8": mxfp8, "nvfp4": nvfp4, "fp8_128": fp8_blockwise_act_quant}


def _torch_time(torch: Any, run: Any, rows: int, columns: int) -> float:
    """Median seconds of run(x) for x [rows, columns] bfloat16; many calls in one CUDA graph, if it can be captured."""
    sets = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(TORCH_SETS)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for x in sets[:2]:
            run(x)
    torch.cuda.synchronize()

    def once():
        return [run(x) for x in sets]

    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = once()
        step = graph.replay  # while `results` holds what it writes to
    except RuntimeError:
        results = once()
        step = once
    times = []
    for _ in range(TORCH_CALLS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(sets))
    del results
    return statistics.median(times)


def _torch_rows(shapes: Sequence[tuple[int, int]]) -> Iterator[tuple]:
    """(peer, format or "", rows, columns, seconds or None, reason) of every torch peer that there is."""
    import torch

    if not torch.cuda.is_available():
        yield "torch", "", 0, 0, None, f"torch {torch.__version__} sees no GPU"
        return
    for peer, functions in (("torchao", _torchao_functions), ("torch.compile", _torch_functions)):
        try:
            runs = functions(torch)
        except ImportError as e:
            yield peer, "", 0, 0, None, f"cannot be imported: {e}"
            continue
        for rows, columns in shapes:
            for name, run in runs.items():
                try:
                    yield peer, name, rows, columns, _torch_time(torch, run, rows, columns), ""
                except Exception as e:  # a peer's compiler may refuse a device or version; the others are worth having
                    yield peer, name, rows, columns, None, f"{type(e).__name__}: {str(e)[:200]}"


class TorchPeers:
    """The torch peers in a process of their own, which neither shares memory with JAX nor takes it down."""

    def __init__(self, shapes: Sequence[tuple[int, int]]):
        """Starts them; they compile and run while the caller compiles."""
        self.seconds: dict[tuple[str, int, int], dict[str, float]] = {}
        self.reasons: dict[str, str] = {}
        self.process: subprocess.Popen | None = None
        self.started = time.monotonic()
        if shapes:
            command = [sys.executable, "-m", __name__, *(f"{rows}x{columns}" for rows, columns in shapes)]
            pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.process = subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, **pipes)

    def wait(self, limit: float = TORCH_LIMIT) -> None:
        """Fills in `seconds` and `reasons`, with what was done `limit` seconds after the start."""
        if self.process is None:
            return
        ended = True
        try:
            out, errors = self.process.communicate(timeout=max(0.1, self.started + limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            ended = False
            self.process.kill()
            out, errors = self.process.communicate()
        for line in out.splitlines():
            if not line.startswith(MARK):
                continue
            peer, name, rows, columns, seconds, reason = json.loads(line.removeprefix(MARK))
            if seconds is None:
                self.reasons[f"{peer} {name} {rows}x{columns}" if name else peer] = reason
            else:
                self.seconds.setdefault((name, rows, columns), {})[peer] = seconds
        if not ended:
            self.reasons["torch"] = f"not done after {limit:.0f} s"
        elif self.process.returncode:
            self.reasons["torch"] = (errors.strip().splitlines() or [f"exit status {self.process.returncode}"])[-1]
        self.process = None


def main(shapes: Sequence[str]) -> int:
    """What the process of `TorchPeers` does: a line for each figure."""
    try:
        for row in _torch_rows([(int(r), int(c)) for r, c in (s.split("x") for s in shapes)]):
            print(MARK + json.dumps(row), flush=True)
    except ImportError as e:
        print(MARK + json.dumps(("torch", "", 0, 0, None, f"cannot be imported: {e}")), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
