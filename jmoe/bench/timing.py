"""Timing of steps on devices, so that nothing is optimised away and Python does not count.

A jitted call costs about 100 us of Python, so a step is timed as a loop of many calls inside one jit. Each call
depends on the one before: an element of its first argument is rewritten, with itself, if an element of the previous
result is not an impossible number, which no compiler can know. (An optimization barrier does not do: XLA drops it
before it merges equal computations.) All results are carried through the loop, so that they have to be computed whole.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

L2_BYTES = 60 * 2**20  # NVIDIA H200; input sets together must be larger than this
CHAIN_SECONDS = 10e-3  # of one chain, so that the 100 us of its launch are 1 %
MOST_CALLS = 2000
_IMPOSSIBLE = np.float32(1.2345678e30)

Chain = Callable[[tuple, Sequence[tuple]], tuple[tuple, tuple]]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median and the best of `repeats` chains of `calls` calls."""

    median: float
    best: float
    calls: int
    repeats: int


def depend(first: Any, on: Any) -> Any:
    """`first` (a pytree of arrays), which nobody can have before `on` is computed; in place where the compiler can."""
    tokens = [leaf[(0,) * leaf.ndim].astype(jnp.float32) for leaf in jax.tree.leaves(on) if leaf.size]
    leaves, tree = jax.tree.flatten(first)
    where = next((i for i, leaf in enumerate(leaves) if leaf.size), None)
    if where is None or not tokens:
        return first
    never = jnp.stack(tokens).max() == _IMPOSSIBLE
    leaf = leaves[where]
    # Read and written at one index that only the device knows: at a constant one XLA rewrites the whole array, which
    # for 268 MB of activations took a tenth of the time that was measured.
    start = (never.astype(jnp.int32),) * leaf.ndim
    element = lax.dynamic_slice(leaf, start, (1,) * leaf.ndim)
    leaves[where] = lax.dynamic_update_slice(leaf, jnp.where(never, jnp.zeros_like(element), element), start)
    return jax.tree.unflatten(tree, leaves)


def chain(step: Callable[..., Any], *, calls: int = 20) -> Chain:
    """A function (firsts, inputs) -> (firsts, results) that calls `step` at least `calls` times, one after another.

    inputs: tuples of arguments, cycled through; firsts: the first argument of each, which take the dependence (donate
    them). The number of calls is `calls` rounded up to a multiple of the sets. The dependence is one small kernel for
    each call. Put the chain inside shard_map, not around it: outside, that kernel would be a collective.
    """

    def chained(firsts: tuple, inputs: Sequence[tuple]) -> tuple[tuple, tuple]:
        def one_round(firsts: tuple, results: tuple) -> tuple[tuple, tuple]:
            new_firsts, new_results = [], []
            last = results[-1] if results else None
            for first, args in zip(firsts, inputs, strict=True):
                first = first if last is None else depend(first, last)
                last = step(first, *args[1:])
                new_firsts.append(first)
                new_results.append(last)
            return tuple(new_firsts), tuple(new_results)

        carry = one_round(tuple(firsts), ())
        rounds = -(-calls // len(inputs))
        return lax.fori_loop(1, rounds, lambda _, c: one_round(*c), carry) if rounds > 1 else carry

    return chained


def feed_back(step: Callable[..., Any], *, calls: int = 20) -> Chain:
    """As `chain`, for a step whose result replaces the first argument of the next call: no dependence to be made.

    With one set each call is an iteration of its own; with several, plain XLA steps may fuse with each other.
    """

    def chained(firsts: tuple, inputs: Sequence[tuple]) -> tuple[tuple, tuple]:
        def one_round(_, x):
            for args in inputs:
                x = lax.optimization_barrier(step(x, *args[1:]))
            return x

        return (lax.fori_loop(0, -(-calls // len(inputs)), one_round, firsts[0]), *firsts[1:]), ()

    return chained


def jit_donating(f: Chain) -> Callable[..., Any]:
    """How a chain is compiled: the first arguments are donated, so that the dependence copies nothing."""
    return jax.jit(f, donate_argnums=0)


def time_chain(
    step: Callable[..., Any],
    inputs: Sequence[Sequence[Any]],
    *,
    calls: int | None = None,
    repeats: int = 5,
    build: Callable[..., Chain] = chain,
    wrap: Callable[[Chain], Callable[..., Any]] = jit_donating,
) -> Timing:
    """Seconds of one call of `step(*inputs[i])`, timed as this module's docstring says.

    inputs: tuples of arguments, cycled through; see `num_sets`. Put the activations first: the first argument is
    copied. calls: of one chain; None: at least 20, and as many as fill 10 ms on a GPU. build: `chain` or `feed_back`.
    wrap: what makes the chain runnable; for several devices
    `lambda f: jit_donating(shard_map(f, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec)))`.
    """
    if not inputs:
        raise ValueError("time_chain needs at least one input set, got none; pass a list of argument tuples.")
    sets = tuple(tuple(s) for s in inputs)
    count = -(-(calls or 20) // len(sets)) * len(sets)
    seconds = run_chain(wrap(build(step, calls=count)), sets, repeats)
    if calls is None and jax.default_backend() == "gpu" and statistics.median(seconds) < CHAIN_SECONDS:
        more = min(MOST_CALLS, math.ceil(count * CHAIN_SECONDS / statistics.median(seconds)))
        count = -(-more // len(sets)) * len(sets)
        seconds = run_chain(wrap(build(step, calls=count)), sets, repeats)
    return Timing(statistics.median(seconds) / count, min(seconds) / count, count, repeats)


def run_chain(run: Callable[..., Any], sets: Sequence[tuple], repeats: int, warmup: int = 2) -> list[float]:
    """Seconds of each of `repeats` runs of a chain that is compiled, or compiled by its first run."""
    firsts = jax.tree.map(jnp.copy, tuple(s[0] for s in sets))
    rest = tuple((None, *s[1:]) for s in sets)
    seconds = []
    for i in range(warmup + repeats):
        jax.block_until_ready(firsts)
        start = time.perf_counter()
        firsts, results = run(firsts, rest)
        jax.block_until_ready((firsts, results))
        if i >= warmup:
            seconds.append(time.perf_counter() - start)
        del results
    return seconds


def time_call(f: Callable[..., Any], *args: Any, repeats: int = 5, warmup: int = 2) -> tuple[float, float]:
    """Median and best seconds of `f(*args)`, complete, over `repeats` calls after `warmup` calls. Python counts."""
    for _ in range(warmup):
        jax.block_until_ready(f(*args))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), min(seconds)


def num_sets(nbytes: int, *, at_most: int = 16) -> int:
    """How many input sets of `nbytes` each exceed twice the L2 cache (at least 2)."""
    return int(min(max(2, -(-2 * L2_BYTES // max(nbytes, 1))), at_most))


def copy_bandwidth(nbytes: int | None = None, *, device: Any = None) -> float:
    """GB/s, read plus written, of a pass over `nbytes` on one device (default 256 MiB on a GPU, 1 MiB elsewhere)."""
    device = device or jax.local_devices()[0]
    if nbytes is None:
        nbytes = 256 * 2**20 if device.platform == "gpu" else 2**20
    x = jax.device_put(np.random.default_rng(0).integers(0, 2**32, nbytes // 4, dtype=np.uint32), device)
    timing = time_chain(lambda v: v ^ np.uint32(1), [(x,)], build=feed_back)
    return 2 * x.nbytes / timing.best / 1e9
