"""What the GPU tests of all grouped matmuls share: rows, edge sizes, the float32 product, and the error against it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

EDGES = [0, 1, 7, 64, 65, 191, 192, 193]  # rows of groups, and numbers of rows in all


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(jnp.bfloat16)


def edge_sizes(m):
    """Sizes of 16 groups, EDGES there and back, halved until they fit m rows."""
    sizes = np.asarray(EDGES + EDGES[::-1])
    while sizes.sum() > m:
        sizes = sizes // 2
    return sizes.astype(np.int32)


@jax.jit
def exact(x, w, sizes):
    x, w = x.astype(jnp.float32), jnp.swapaxes(w.astype(jnp.float32), 1, 2)
    return lax.ragged_dot(x, w, sizes, precision=lax.Precision.HIGHEST)


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b) if b.any() else np.abs(a).max(initial=0.0)
