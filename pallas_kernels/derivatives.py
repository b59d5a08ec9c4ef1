"""Derivatives of derivatives, which kernels do not have: refused in words.

Without this some paths end them silently (integers that carry float bits have no derivative, so a gradient of a
gradient would be zero there), and others with what JAX says about a loop or a kernel.
"""

from __future__ import annotations

from typing import TypeVar

import jax

Tree = TypeVar("Tree")


@jax.custom_jvp
def _identity(tree):
    return tree


@_identity.defjvp
def _refuse(primals, tangents):
    raise NotImplementedError(
        "A derivative of a gradient was asked for (jax.hessian, a gradient of a gradient). Grouped matmuls and "
        "exchanges have first derivatives only; take differences of gradients, or differentiate a dense layer."
    )


def first_only(tree: Tree) -> Tree:
    """`tree` itself; NotImplementedError where it is differentiated. For what a VJP's backward pass is given."""
    return _identity(tree)
