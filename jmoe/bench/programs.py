"""Programs of all ranks of one mesh axis that are compiled side by side, and then timed one after another.

A benchmark of many shapes spends most of its time compiling. Here a program is lowered when it is made and compiled in
a pool of threads; `Ranks.compile` waits for all of them, so that nothing is compiled while something is timed.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmoe import compat

from .timing import depend

AXIS = "ep"
CHAIN_SECONDS = 6e-3  # of one chain, as long as it is guessed to take
# Chains that are timed beyond the first. The start and end of a run on two H200s cost 0.6 ms together, which several
# runs in a row pay once: calls of 338 us in the profiler's records take 384 in one chain of 20, 353 in one of 100.
MORE_CHAINS = 2
# Calls in one turn of a chain's loop. XLA records a loop's body as one command buffer if it has five operations; what
# has fewer is launched one by one, and then the host is measured: a combine of 128 rows, 20 us in a command buffer as
# in any layer, takes 28 so. An even number, so that calls whose results and inputs change places copy nothing.
CALLS_PER_TURN = 4


@dataclasses.dataclass(frozen=True)
class Timer:
    """calls in one jitted chain (None: as many as fill CHAIN_SECONDS), and how many chains are timed."""

    calls: int | None = None
    repeats: int = 5


class Ranks:
    """The devices (at most 8) as ranks of AXIS, and the pool in which their programs are compiled."""

    def __init__(self, timer: Timer):
        devices = jax.devices()[:8]
        self.mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
        self.sharding = NamedSharding(self.mesh, P(AXIS))
        self.num_ranks, self.timer = len(devices), timer
        self.pool, self.compiling = concurrent.futures.ThreadPoolExecutor(), []

    def mapped(self, function, **jit):
        """`function` of one rank's arrays, jitted over the mesh; outside, arrays have a leading axis of ranks."""

        def local(*args):
            return jax.tree.map(lambda v: v[None], function(*jax.tree.map(lambda v: v[0], args)))

        return jax.jit(compat.shard_map(local, mesh=self.mesh, in_specs=P(AXIS), out_specs=P(AXIS)), **jit)

    def compile(self) -> None:
        """Returns when all programs that were made are compiled."""
        concurrent.futures.wait(self.compiling)
        self.compiling.clear()


class Program:
    """A function of one rank's arrays over the mesh: lowered at once, compiled beside others, run when it is needed.

    arguments: arrays with a leading axis of ranks, or other programs, whose results are meant.
    """

    def __init__(self, ranks: Ranks, function: Callable, *arguments: Any, **jit: Any):
        self.arguments = arguments
        lowered = ranks.mapped(function, **jit).lower(*(a.out if isinstance(a, Program) else a for a in arguments))
        like = lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=ranks.sharding)  # noqa: E731
        self.out = jax.tree.map(like, lowered.out_info)
        self._compiling = ranks.pool.submit(lowered.compile)
        ranks.compiling.append(self._compiling)

    @property
    def compiled(self) -> Callable:
        return self._compiling.result()

    def inputs(self) -> list[Any]:
        return [a.result if isinstance(a, Program) else a for a in self.arguments]

    @functools.cached_property
    def result(self) -> Any:
        return self.compiled(*self.inputs())


class Chain(Program):
    """At least `calls` calls of `step(first, *rest)` in a row: multiples of `per_turn`, those of a turn of the loop.

    step returns the next `first`; else (waits) it waits for the result.
    """

    def __init__(
        self,
        ranks: Ranks,
        step: Callable,
        *arguments: Any,
        calls: int,
        waits: bool = True,
        per_turn: int = CALLS_PER_TURN,
    ):
        turns = -(-calls // per_turn)
        self.timer, self.calls = ranks.timer, turns * per_turn
        call = jax.jit(step)  # traced and lowered once for all calls of a turn

        def chain(first, *rest):
            def turn(_, first):
                for _ in range(per_turn):
                    out = call(first, *rest)
                    first = depend(first, lax.optimization_barrier(out)) if waits else out
                return first

            return lax.fori_loop(0, turns, turn, first)

        super().__init__(ranks, chain, *arguments, donate_argnums=0)

    @functools.cached_property
    def seconds(self) -> float:
        """Median of one call: what MORE_CHAINS after the first one add."""
        first, *rest = self.inputs()
        first = self.compiled(jax.tree.map(jnp.copy, first), *rest)

        def run(chains: int) -> float:
            nonlocal first
            jax.block_until_ready(first)
            begin = time.perf_counter()
            for _ in range(chains):
                first = self.compiled(first, *rest)
            jax.block_until_ready(first)
            return time.perf_counter() - begin

        added = statistics.median(run(1 + MORE_CHAINS) - run(1) for _ in range(self.timer.repeats))
        return max(added, 1e-9) / (MORE_CHAINS * self.calls)
