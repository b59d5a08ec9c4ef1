"""What the kernels of a decode step share."""

from __future__ import annotations

import math
from typing import Any

import jax

from ..permute.thread import F, Thread, U, launch
from ..quantize import lane as lanes

MULTIPROCESSORS = 132  # of an H200; others have about as many
HEAD = 128  # size of a head
LOG2E = math.log2(math.e)


def add_lanes(o: Thread, x: F, masks=(16, 8, 4, 2, 1)) -> F:
    """The sum over the warp, or over the lanes that differ in these bits only; the same in all of them."""
    for mask in masks:
        x = x + o.float(o.shuffle_xor(o.bits(x), mask))
    return x


def pack(o: Thread, values: list[F]) -> list[U]:
    """Rounded to bfloat16, two to a word."""
    return [o.pack_half(values[i], values[i + 1], "bf16") for i in range(0, len(values), 2)]


def floats(o: Thread, words: list[U]) -> list[F]:
    """The bfloat16 values of packed words."""
    return lanes.to_floats(o, words, "bf16")


def turns(o: Thread, count: int, body):
    """body(i) for i below count, as a loop of the machine."""
    if count == 1:
        body(U(0))
    else:

        def turn(i: U) -> list[U]:
            body(i)
            return []

        o.loop(count, turn, [])


def launch_updating(program, task, operands, outputs, *, updated: tuple[str, ...] = (), **how) -> dict[str, jax.Array]:
    """`launch` with some operands that are written in place; they are among the results."""
    refs: dict[str, Any] = {name: jax.new_ref(operands[name]) for name in updated}
    out = launch(program, task, {**operands, **refs}, outputs, **how)
    return out | {name: jax.freeze(ref) for name, ref in refs.items()}
