"""Whether the optional extra `triton` is there."""

from __future__ import annotations

import functools
import importlib.util


@functools.cache
def missing() -> str | None:
    """Why Triton kernels cannot be loaded, or None."""
    absent = [name for name in ("jax_triton", "triton") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} cannot be imported: pip install 'jmoe[triton]'" if absent else None
