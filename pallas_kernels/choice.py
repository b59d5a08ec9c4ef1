"""Runs a kernel where there is a CUDA device, and what it stands for everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def on_cuda(kernel: Callable[[Any], Any], plain: Callable[[Any], Any], args: Any, *, always: bool = False) -> Any:
    """kernel(args) on CUDA devices and plain(args) on others, which is decided when the program is lowered.

    args: a pytree of arrays. Both give the same results. Under `jax.vmap`, for which kernels have no rule, it is
    `plain`. always: the kernel on every device, for those who asked for it by name.
    """

    @jax.custom_batching.custom_vmap
    def batchable(args):
        return kernel(args)

    @batchable.def_vmap
    def _(axis_size, in_batched, args):
        del axis_size
        if not any(jax.tree.leaves(in_batched)):  # JAX asks here too, where what is mapped does not reach the arguments
            out = kernel(args)
            return out, jax.tree.map(lambda _: False, out)
        leaves, tree = jax.tree.flatten(args)
        axes = [0 if batched else None for batched in jax.tree.leaves(in_batched)]
        out = jax.vmap(lambda *leaves: plain(jax.tree.unflatten(tree, leaves)), in_axes=axes)(*leaves)
        return out, jax.tree.map(lambda _: True, out)

    return batchable(args) if always else lax.platform_dependent(args, cuda=batchable, default=plain)
