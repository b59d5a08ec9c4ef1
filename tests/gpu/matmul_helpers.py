"""What the GPU tests of all grouped matmuls share: rows, edge sizes, the float32 product, and the error against it.

Compilations are what these tests take: everything but the kernels is numpy, and quantised weights are made once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import gated_product
from pallas_kernels.quantize import dequantize, quantize, quantize_weights

EDGES = [0, 1, 7, 64, 65, 191, 192, 193]  # rows of groups, and numbers of rows in all


def normal(rng, *shape):
    """BF16, on the device."""
    return jnp.asarray(rng.standard_normal(shape, np.float32).astype(jnp.bfloat16))


def edge_sizes(m):
    """Sizes of 16 groups, EDGES there and back, halved until they fit m rows."""
    sizes = np.asarray(EDGES + EDGES[::-1])
    while sizes.sum() > m:
        sizes = sizes // 2
    return sizes.astype(np.int32)


@functools.cache
def weights(fmt, *shape, scale=1.0):
    """Random weights in a format (None: BF16), on the device, and their values in float32, in numpy."""
    w = normal(np.random.default_rng(len(shape)), *shape) * jnp.bfloat16(scale)
    if fmt is None:
        return w, np.asarray(w, np.float32)
    q = jax.jit(lambda w: quantize(w, fmt) if fmt == "nvfp4_token" else quantize_weights(w, fmt))(w)
    return q, np.asarray(jax.jit(lambda q: dequantize(q, jnp.float32))(q))


def exact(x, w, sizes):
    """x [M, K] times the transposed w [G, N, K] of each row's group, in float32; zero where there is none."""
    x, w = np.asarray(x, np.float32), np.asarray(w, np.float32)
    out, row = np.zeros((x.shape[0], w.shape[1]), np.float32), 0
    for g, size in enumerate(np.asarray(sizes)):
        out[row : row + size] = x[row : row + size] @ w[g].T
        row += size
    return out


def assert_gated(y, x, plain, bias, sizes, gate, case):
    """y is the gated product of x [M, K] with plain [G, 2, N, K] and bias [G, 2, N], zero past the groups' rows."""
    total, owner = sizes.sum(), np.repeat(np.arange(len(sizes)), sizes)
    halves = [jnp.asarray(exact(x, plain[:, i], sizes)[:total] + bias[owner, i]) for i in (0, 1)]
    assert relative(y[:total], gated_product(*halves, gate)) < 4e-3, case
    assert not np.any(np.asarray(y[total:], np.float32)), case


def with_nan(x, *rows):
    """x with NaN in these rows."""
    x = np.array(x)
    for r in rows:
        x[r] = np.nan
    return jnp.asarray(x)


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b) if b.any() else np.abs(a).max(initial=0.0)
