"""Runs the Triton grouped matmul in Triton's interpreter; prints one JSON line {"CASE": relative error, ...}.

Triton decides at import time whether it interprets, hence a process of its own. The interpreter knows neither inline
assembly nor BF16 arithmetic, and takes torch tensors: all three are replaced here, by jnp's results and by numpy.
"""

import json
import os

os.environ.update(TRITON_INTERPRET="1", JAX_PLATFORMS="cpu")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter

from pallas_kernels.grouped_matmul import portable, triton_entry, triton_sm80
from pallas_kernels.quantize import QTensor, dequantize, quantize, quantize_weights

BF16 = ml_dtypes.bfloat16
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "uint8": "u8"}


class Tensor:
    """As much of a torch tensor as the interpreter asks for."""

    def __init__(self, array=None):
        self.array, self.dtype = array, None if array is None else DTYPES[str(array.dtype)]

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    cpu = untyped_storage

    def new_empty(self, *_, **__):
        return Tensor()

    def set_(self, source, *_):
        self.array, self.dtype = source.array, source.dtype

    def storage_offset(self):
        return 0

    size = stride = storage_offset

    def copy_(self, _):
        pass


def wide(handle):
    return handle.data.view(BF16).astype(np.float32) if handle.dtype.scalar == tl.bfloat16 else handle.data


def dot(self, a, b, d, *_):
    sums = np.matmul(wide(a).astype(np.float32), wide(b).astype(np.float32)) + d.data
    return interpreter.TensorHandle(sums, d.dtype.scalar)


def multiply(self, a, b):
    if a.dtype.scalar == tl.bfloat16:
        return interpreter.TensorHandle((wide(a) * wide(b)).astype(BF16).view(np.uint16), tl.bfloat16)
    return self.binary_op(a, b, np.multiply)


def cast(self, source, target, *_):
    if source.dtype.scalar == tl.bfloat16 and target.scalar == tl.float32:
        return interpreter.TensorHandle(wide(source), tl.float32)
    if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
        return interpreter.TensorHandle(source.data.astype(BF16).view(np.uint16), tl.bfloat16)
    return self.cast_impl(source, target)


def teach_the_interpreter():
    builder = interpreter.InterpreterBuilder
    builder.create_dot, builder.create_fmul = dot, multiply
    builder.create_fp_ext = builder.create_fp_trunc = builder.create_fp_to_fp = cast
    patch = interpreter._patch_lang_tensor

    def patch_with_scalar_index(tensor, scope):  # numpy 2.5 makes no int of an array with one element
        patch(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_scalar_index


@triton.jit
def e4m3(data):
    byte = data.to(tl.int16)
    bits = (((byte & 0x7F) << 4) | ((byte & 0x80) << 8)).to(tl.int16)
    return (bits.to(tl.bfloat16, bitcast=True).to(tl.float32) * 1.329227995784916e36).to(tl.bfloat16)


@triton.jit
def e2m1_half(nibble):
    bits = (((nibble & 7) << 6) | ((nibble & 8) << 12)).to(tl.int16)
    return (bits.to(tl.bfloat16, bitcast=True).to(tl.float32) * 8.507059173023462e37).to(tl.bfloat16)


@triton.jit
def e2m1(data):
    byte = data.to(tl.int16)
    return tl.interleave(e2m1_half(byte & 15), e2m1_half(byte >> 4))


def call(*args, kernel, out_shape, grid, num_warps, num_stages, compute_capability, **meta):
    out = Tensor(np.full(out_shape.shape, np.nan, out_shape.dtype))
    kernel[grid](*(Tensor(np.array(a)) for a in args), out, **meta)
    return jnp.asarray(out.array)


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b) if b.any() else np.abs(a).max(initial=0.0))


def main():
    teach_the_interpreter()
    triton_sm80._e4m3, triton_sm80._e2m1 = e4m3, e2m1
    triton_sm80.jax_triton.triton_call = call
    triton_sm80._capability = lambda: 80
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(jnp.bfloat16)

    config = triton_sm80.TritonConfig(16, 32, 32, 4, 3, band=2)
    groups, errors = 5, {}
    for m, n, k, sizes in ((50, 72, 136, [0, 1, 7, 17, 20]), (40, 64, 128, [40, 0, 0, 0, 0])):
        x, w, dy, sizes = normal(m, k), normal(groups, n, k), normal(m, n), jnp.asarray(sizes, jnp.int32)
        total = int(sizes.sum())
        bad_x, bad_dy = x.at[total:].set(jnp.nan), dy.at[total:].set(jnp.nan)
        wide_x, wide_dy = x.astype(jnp.float32), dy.astype(jnp.float32)
        options, exact = dict(out_dtype=jnp.bfloat16), dict(out_dtype=jnp.float32)
        weights = {"bf16": w}
        for fmt in ("mxfp8", "mxfp4", "nvfp4", "fp8_128x128") if k % 16 == 0 else ("mxfp8",):
            weights[fmt] = jax.jit(lambda w, fmt=fmt: quantize_weights(w, fmt))(w)
        if "nvfp4" in weights:
            q = weights["nvfp4"]
            columns = q.global_scale[:, None] * jnp.exp2(jnp.arange(n) % 5).astype(jnp.float32)[None, :]
            weights["nvfp4 columns"] = QTensor(q.data, q.block_scale, columns, q.format, q.k)
        for name, weight in weights.items():
            plain = w.astype(jnp.float32)
            if name != "bf16":
                plain = dequantize(weight, jnp.float32)
            y = triton_entry.forward(bad_x, weight, sizes, config=config, **options)
            errors[f"{name} forward {k}"] = relative(y, portable.grouped_matmul(wide_x, plain, sizes, **exact))
            if name != "nvfp4 columns":  # left to the portable form
                dx = triton_entry.dlhs(bad_dy, weight, sizes, config=config, **options)
                expected = portable.grouped_matmul_dlhs(wide_dy, plain, sizes, **exact)
                errors[f"{name} dlhs {k}"] = relative(dx, expected)
        dw = triton_entry.drhs(bad_dy, bad_x, sizes, num_groups=groups, config=config, **options)
        expected = portable.grouped_matmul_drhs(wide_dy, wide_x, sizes, num_groups=groups, **exact)
        errors[f"drhs {k}"] = relative(dw, expected)
        part = dict(group_offset=jnp.int32(3))
        y = triton_entry.forward(bad_x, w[3:], sizes, config=config, **options, **part)
        expected = portable.grouped_matmul(wide_x, w[3:].astype(jnp.float32), sizes, **exact, **part)
        errors[f"part forward {k}"] = relative(y, expected)
        q = jax.jit(lambda x: quantize(x, "mxfp8"))(jnp.nan_to_num(bad_x))
        y = triton_entry.forward(q, w, sizes, config=config, **options)
        expected = portable.grouped_matmul(dequantize(q, jnp.float32), w.astype(jnp.float32), sizes, **exact)
        errors[f"mxfp8 rows {k}"] = relative(y, expected)
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
