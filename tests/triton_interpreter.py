"""Runs the Triton kernels in Triton's interpreter; `python triton_interpreter.py matmul|quantize|assembly` prints one
JSON line: {"CASE": relative error, ...}, {"CASE": [bytes that differ from the reference, distinct bytes], ...}, or for
the inline assembly {"CASE": [values that differ, values], ...}.

Triton decides at import time whether it interprets, hence a process of its own. The interpreter knows neither inline
assembly nor BF16 arithmetic, and takes torch tensors: all three are replaced here, by jnp's results and by numpy.
"""

import json
import os
import sys

os.environ.update(TRITON_INTERPRET="1", JAX_PLATFORMS="cpu")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter

from pallas_kernels.grouped_matmul import portable, triton_entry, triton_sm80
from pallas_kernels.quantize import QTensor, dequantize, get_format, quantize, quantize_weights, reference
from pallas_kernels.quantize import triton_sm80 as triton_quantize

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


def call(*args, kernel, out_shape, grid, num_warps, compute_capability, num_stages=0, enable_fp_fusion=True, **meta):
    outs = [Tensor(np.full(s.shape, 255).astype(s.dtype)) for s in jax.tree.leaves(out_shape)]
    kernel[grid](*(Tensor(np.array(a)) for a in args), *outs, **meta)
    return jax.tree.unflatten(jax.tree.structure(out_shape), [jnp.asarray(out.array) for out in outs])


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b) if b.any() else np.abs(a).max(initial=0.0))


def matmul():
    triton_sm80._e4m3, triton_sm80._e2m1 = e4m3, e2m1
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
    return errors


def hostile(rng, rows, k, dtype):
    """Values of every exponent, ties of the elements, zeros of both signs, subnormals, infinities and NaN."""
    x = rng.standard_normal((rows, k), np.float32) * np.exp2(rng.integers(-30, 30, (rows, 1)).astype(np.float32))
    x[1] = rng.integers(0, 2**32, k, np.uint32).view(np.float32)
    x[2] = 0.25 * rng.integers(-30, 30, k)
    x[3, ::2], x[3, 1::2] = 0.0, -0.0
    x[4] *= np.float32(1e-40) / np.abs(x[4]).max()
    x[5, ::70], x[6, ::90] = np.nan, np.inf
    x[7] = np.float32(448) * rng.integers(-8, 9, k) / 8
    with np.errstate(over="ignore"):
        return jnp.asarray(x.astype(jnp.dtype(dtype)))


def quantizing():
    rng, report = np.random.default_rng(0), {}
    formats = ("mxfp8", "mxfp8_floor", "mxfp4", "mxfp4_floor", "fp8_128", "fp8_128_ue8m0", "nvfp4", "nvfp4_token")
    for dtype in ("bfloat16", "float32"):
        x = hostile(rng, 33, 384, dtype)
        for fmt in formats:
            options = {"": {}}
            if fmt == "nvfp4":
                options |= {" given": dict(global_scale=jnp.float32(0.0123)), " swizzled": dict(layout="swizzled")}
            for label, kw in options.items():
                ours = triton_quantize.quantize(x, get_format(fmt), **kw)
                expected = jax.jit(lambda x, fmt=fmt, kw=kw: reference.quantize(x, fmt, **kw))(x)
                differ, seen = 0, 0
                for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
                    assert a.shape == b.shape and a.dtype == b.dtype, (fmt, label, a.shape, b.shape, a.dtype, b.dtype)
                    a, b = (np.atleast_1d(np.asarray(v)) for v in (a, b))
                    nan = np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32))  # float32 NaN of any bits
                    bytes_a, bytes_b = (v.view(np.uint8).reshape(*v.shape, -1) for v in (a, b))
                    differ += int(np.sum((bytes_a != bytes_b).any(axis=-1) & ~nan))
                    seen = max(seen, len(np.unique(bytes_b)))
                report[f"{fmt}{label} {dtype}"] = [differ, seen]
    return report


def executed(text, word):
    """Output registers of a piece of PTX whose last operand is the 32-bit `word`; the few instructions that we use."""
    instructions = [line.strip("{} ;") for line in text.splitlines()]
    instructions = [i.split(None, 1) for i in instructions if i and not i.startswith(".reg")]
    count = text.count("fma.rn")
    registers = {f"${count}": word}

    def value(name):
        return registers[name] if name in registers else int(name, 0)

    def halves(word):
        return np.array([word & 0xFFFF, word >> 16], np.uint16).view(BF16).astype(np.float64)

    for name, operands in instructions:
        target, *sources = (o.strip() for o in operands.split(","))
        a = [value(s) for s in sources]
        if name == "mov.b32":
            out = a[0]
        elif name == "prmt.b32":
            bytes_ = (a[0] | (a[1] << 32)).to_bytes(8, "little")
            out = int.from_bytes(bytes(bytes_[(a[2] >> (4 * i)) & 7] for i in range(4)), "little")
        elif name in ("shl.b32", "shr.b32"):
            out = (a[0] << a[1] if name[2] == "l" else a[0] >> a[1]) & 0xFFFFFFFF
        elif name == "and.b32":
            out = a[0] & a[1]
        elif name == "lop3.b32" and a[3] == 0xEA:
            out = (a[0] & a[1]) | a[2]
        elif name == "fma.rn.bf16x2":
            low, high = (halves(a[0]) * halves(a[1]) + halves(a[2])).astype(BF16).view(np.uint16)
            out = int(low) | (int(high) << 16)
        else:
            raise ValueError(f"{name} {operands} is not one of the instructions known here")
        registers[target] = out
    return np.array([registers[f"${i}"] for i in range(count)], np.uint32).view(BF16)


def assembly():
    """Every byte in every place of a word against ml_dtypes; the NaN codes of E4M3, which come out as 480, left out."""
    report = {}
    numbers = [b for b in range(256) if b & 0x7F != 0x7F]
    words = np.array([np.roll(numbers, i) for i in range(4)]).T.astype(np.uint8)  # [bytes, places]
    got = [executed(triton_sm80._E4M3_TO_BF16.value, int(w.view("<u4")[0])) for w in np.ascontiguousarray(words)]
    expected = words.view(ml_dtypes.float8_e4m3fn).astype(BF16)
    report["e4m3"] = [int(np.sum(np.array(got).view(np.uint16) != expected.view(np.uint16))), expected.size]
    words = np.array([np.roll(np.arange(256), 37 * i) for i in range(4)]).T.astype(np.uint8)
    got = [executed(triton_sm80._E2M1_TO_BF16.value, int(w.view("<u4")[0])) for w in np.ascontiguousarray(words)]
    nibbles = np.concatenate([words & 15, words >> 4], axis=1)  # low halves of the four bytes, then the high halves
    expected = nibbles.view(ml_dtypes.float4_e2m1fn).astype(BF16)
    report["e2m1"] = [int(np.sum(np.array(got).view(np.uint16) != expected.view(np.uint16))), expected.size]
    return report


if __name__ == "__main__":
    teach_the_interpreter()
    triton_sm80.jax_triton.triton_call = call
    print(json.dumps({"matmul": matmul, "quantize": quantizing, "assembly": assembly}[sys.argv[1]]()))
