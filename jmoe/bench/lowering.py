"""Lowering in several processes: it is Python's work, 2 s for a layer with many rows, and a process does one at a time.

A function is lowered where `exported` runs, in a process of `processes`, and is bytes from there to `imported`, whose
result is compiled as the function itself would be. JAX writes those bytes with the package flatbuffers (`obstacle`).
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import jax
from jax import export

MOST = 8  # processes
# Whose form no JAX promises to the next one; here both are the same.
CUSTOM_CALLS = ("mosaic_gpu_v2", "triton_kernel_call", "__cudnn$fmhaSoftmax")


def obstacle() -> str | None:
    """Why nothing can be lowered in another process, or None."""
    missing = importlib.util.find_spec("flatbuffers") is None
    return "flatbuffers is not installed (pip install 'jmoe[bench]')" if missing else None


def processes() -> concurrent.futures.Executor:
    """Up to MOST processes, which take nothing of the GPUs' memory but their own contexts."""
    count = max(1, min(MOST, (os.cpu_count() or 1) // 2))
    how: Any = dict(mp_context=multiprocessing.get_context("spawn"), initializer=_begin)
    return concurrent.futures.ProcessPoolExecutor(count, **how)


def _begin() -> None:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def exported(function: Callable[..., Any], *arguments: Any) -> bytes:
    """function, lowered for arguments: pytrees of jax.ShapeDtypeStruct, with shardings for several devices."""
    leaves, tree = jax.tree.flatten(arguments)
    flat = jax.jit(lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves))))
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS]
    return bytes(export.export(flat, disabled_checks=checks)(*leaves).serialize())


def imported(data: bytes) -> Callable[..., list[jax.Array]]:
    """The function with the same arguments, for `jax.jit`; its result is the list of the leaves."""
    if jax.default_backend() == "gpu":
        importlib.import_module("jax.experimental.mosaic.gpu")  # tells XLA where the kernels' runtime library is
    call = export.deserialize(bytearray(data)).call
    return lambda *arguments: list(call(*jax.tree.leaves(arguments)))
