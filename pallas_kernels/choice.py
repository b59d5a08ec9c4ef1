"""Runs a kernel where there is a CUDA device, and what it stands for everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from .compat import refuse_varying


def batchable(kernel: Callable[[Any], Any], plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """kernel, which under `jax.vmap`, for which it has no rule, is `plain`. Both take a pytree of arrays."""

    @jax.custom_batching.custom_vmap
    def call(args):
        return kernel(args)

    @call.def_vmap
    def _(axis_size, in_batched, args):
        del axis_size
        if not any(jax.tree.leaves(in_batched)):  # JAX asks here too, where what is mapped does not reach the arguments
            out = kernel(args)
            return out, jax.tree.map(lambda _: False, out)
        leaves, tree = jax.tree.flatten(args)
        axes = [0 if batched else None for batched in jax.tree.leaves(in_batched)]
        out = jax.vmap(lambda *leaves: plain(jax.tree.unflatten(tree, leaves)), in_axes=axes)(*leaves)
        return out, jax.tree.map(lambda _: True, out)

    return call


def on_cuda(kernel: Callable[[Any], Any], plain: Callable[[Any], Any], args: Any, *, always: bool = False) -> Any:
    """kernel(args) on CUDA devices and plain(args) on others, which is decided when the program is lowered.

    args: a pytree of arrays. Both give the same results. Under `jax.vmap`, for which kernels have no rule, it is
    `plain`. always: the kernel on every device, for those who asked for it by name.
    """
    refuse_varying("A kernel", args)
    call = batchable(kernel, plain)
    return call(args) if always else lax.platform_dependent(args, cuda=call, default=plain)
