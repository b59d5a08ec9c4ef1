"""Operands of the FP8 gated matmul whose products, activation and sums are exact in float32, in any order.

Gates are so large that their sigmoid is 1 (or, of tiny rows, 1/2), so that nothing is left open: what is quantised is
known to the bit, on any machine.
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantize import FORMATS, QTensor, get_format, quantize

EDGES = [0, 1, 7, 63, 64, 65, 127, 128, 129, 0, 193, 2]  # rows of groups


def exact_operands(rng, sizes, *, tail, d, f):
    """(x, w, expected float32 [M, F]) for groups of these sizes and `tail` rows of nobody; see `special_rows`.

    Sums of a block are whole numbers below 2^11, scales have six bits: a total has less than 24.
    """
    m, groups, k = sum(sizes) + tail, len(sizes), d // 128
    x = rng.integers(1, 4, (m, d)).astype(np.float32)
    scale = rng.integers(33, 64, (m, 1)) / np.float32(64) * 2.0 ** rng.integers(-1, 2, (m, k))
    w = np.stack([rng.integers(1, 3, (groups, f, d)), rng.integers(-3, 4, (groups, f, d))], axis=1).astype(np.float32)
    w_scale = 2.0 ** rng.integers(-1, 1, (groups, 2, f // 128, k))
    zero, nan_code, nan_scale, large, tiny = special_rows(m)
    x[zero], scale[nan_scale], scale[large], scale[tiny] = 0, np.nan, 2.0**100, 2.0**-80
    codes = x.copy()
    codes[nan_code, 5] = np.nan
    qx = QTensor(jnp.asarray(codes, jnp.float8_e4m3fn), jnp.asarray(scale, jnp.float32), None, FORMATS["fp8_128"], d)
    qw = QTensor(jnp.asarray(w, jnp.float8_e4m3fn), jnp.asarray(w_scale, jnp.float32), None, FORMATS["fp8_128x128"], d)
    x = x * np.repeat(scale, 128, axis=1)
    w = w * np.repeat(np.repeat(w_scale, 128, axis=2), 128, axis=3)
    both, row = np.zeros((2, m, f), np.float32), 0
    with np.errstate(all="ignore"):
        for g, size in enumerate(sizes):
            for part in range(2):
                both[part, row : row + size] = x[row : row + size] @ w[g, part].T
            row += size
        sigmoid = np.where(both[0] < 1, np.float32(0.5), np.float32(1))
        product = both[0] * sigmoid * both[1]
    product[nan_code] = np.nan
    product[row:] = 0
    return qx, qw, product


def special_rows(m):
    """Rows of zeros, with a NaN code, with a NaN scale, whose products overflow, and whose products are tiny."""
    return [np.arange(start, m, 41) for start in (3, 11, 17, 23, 31)]


def assert_close(q, expected):
    """Scales agree to 1e-5, and less than one code in a thousand is off, by one step."""
    np.testing.assert_allclose(q.block_scale, expected.block_scale, rtol=1e-5)
    bits = (np.asarray(a.data).view(np.uint8).astype(int) for a in (q, expected))
    codes = [np.where(b >= 128, 128 - b, b) for b in bits]  # in the order of their values
    steps = np.abs(codes[0] - codes[1])
    assert steps.max() <= 1 and np.mean(steps) < 1e-3


def assert_quantised(q, product, rows, fmt):
    """The first `rows` rows of q are those of `product` quantised to fmt, bit for bit."""
    expected = quantize(jnp.asarray(product), fmt, implementation="reference")
    scale, wanted = np.asarray(q.block_scale)[:rows], np.asarray(expected.block_scale)[:rows]
    assert q.format == get_format(fmt) and q.shape == product.shape
    np.testing.assert_array_equal(scale, wanted)
    codes, wanted_codes = (np.asarray(a.data).view(np.uint8)[:rows] for a in (q, expected))
    nan = np.repeat(np.isnan(wanted), 128, axis=1)
    assert nan.any() and not nan.all()
    np.testing.assert_array_equal(np.where(nan, 0x7F, codes), np.where(nan, 0x7F, wanted_codes))
    assert np.all(codes[nan] & 0x7F == 0x7F)
