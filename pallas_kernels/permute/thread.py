"""Kernels written for one thread, as those of `quantize.emit`: what sorting, moving rows and routing need beyond it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from .. import compat
from ..choice import on_cuda
from ..quantize.emit import F, Ops, P, Pointer, U, _asm, _i32

IMPLEMENTATIONS = ("mosaic_sm90", "xla")
#: Kernels that have passed tests/gpu since their last change; the others run only where they are asked for.
CONFIRMED: set[str] = {
    *("sort", "gather", "spread", "spread_decoded", "combine", "slots", "route", "decode"),
    *("experts", "routed_experts"),
}


class Thread(Ops):
    """Operations of one thread that involve its warp or block, and loops."""

    def lane(self) -> U:
        return self.thread() & 31

    def _of_warp(self, text: str, a: U) -> U:
        return U(_asm([_i32()], [a], text, "=r,r", effects=True)[0])

    def warp_min(self, a: U) -> U:
        return self._of_warp("redux.sync.min.u32 $0, $1, 0xffffffff;", a)

    def warp_add(self, a: U) -> U:
        return self._of_warp("redux.sync.add.u32 $0, $1, 0xffffffff;", a)

    def warp_or(self, a: U) -> U:
        return self._of_warp("redux.sync.or.b32 $0, $1, 0xffffffff;", a)

    def match(self, a: U) -> U:
        """Bit mask of the warp's threads that hold the same value."""
        return self._of_warp("match.any.sync.b32 $0, $1, 0xffffffff;", a)

    def shuffle_up(self, a: U, distance: int) -> U:
        """The value of the thread `distance` below in the warp; the own one where there is none."""
        return self._of_warp(f"shfl.sync.up.b32 $0, $1, {distance}, 0, 0xffffffff;", a)

    def warp_barrier(self):
        """What the warp's threads have written is there for all of them."""
        _asm([], [], "bar.warp.sync 0xffffffff;", "~{memory}", effects=True)

    def popcount(self, a: U) -> U:
        return U(_asm([_i32()], [a], "popc.b32 $0, $1;", "=r,r")[0])

    def mul_bf16(self, a: U, b: U) -> U:
        """Products of two pairs of bfloat16, rounded; subnormals are kept."""
        return U(_asm([_i32()], [a, b], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r")[0])

    def half_twice(self, a: U, upper: bool) -> U:
        """One half of a in both halves. As a factor it costs no instruction."""
        text = f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; mov.b32 $0, {{{'h, h' if upper else 'l, l'}}}; }}"
        return U(_asm([_i32()], [a], text, "=r,r")[0])

    def mma(self, a: Sequence[U], b: Sequence[U], c: Sequence[F], half: str) -> list[F]:
        """c [16, 8] + a [16, 16] . b [16, 8] of the warp, of pairs of `half` ("bf16" or "f16"), as m16n8k16 has them.

        Lane 4g + t has rows g and g + 8, columns 2t, 2t + 1 of a (then the columns 8 further), rows 2t, 2t + 1 of b's
        column g (then the rows 8 further), and columns 2t, 2t + 1 of c's rows g, then g + 8.
        """
        text = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{half}.{half}.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
        return [F(v) for v in _asm([ir.F32Type.get()] * 4, [*a, *b, *c], text, constraints)]

    def prefetch(self, at: Pointer, size: U, where: P):
        """Asks for `size` bytes of device memory to be brought into L2; both multiples of 16."""
        text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$0], $1; }"
        _asm([], [at.address, size, arith.extui(_i32(), where.v)], text, "l,r,r", effects=True)

    def add_shared(self, at: Pointer, value: U, where: P):
        """Atomic addition to a word of shared memory."""
        text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p red.shared.add.u32 [$0], $1; }"
        operands = [at.address, value, arith.extui(_i32(), where.v)]
        _asm([], operands, text, "l,r,r,~{memory}", effects=True)

    def loop(
        self, count: int, body: Callable[..., Sequence[U]], carry: Sequence[U] = (), *, rolled: bool = False
    ) -> list[U]:
        """carry = body(i, *carry) for i = 0 .. count - 1. rolled: kept from being unrolled, which takes registers."""
        index = ir.IndexType.get()
        start, stop, step = (arith.constant(index, v) for v in (0, count, 1))
        if rolled:
            stop = arith.index_cast(index, self.opaque(U(count)).v)
        op = scf.ForOp(start, stop, step, [c.v for c in carry])
        with ir.InsertionPoint(op.body):
            i = U(arith.index_cast(_i32(), op.induction_variable))
            scf.yield_([v.v for v in body(i, *(U(a) for a in op.inner_iter_args))])
        return [U(v) for v in op.results]


def environment_obstacle(capability: float | None = None) -> str | None:
    """Why no kernel of this kind runs on a GPU of this compute capability (None: this process's first GPU).

    None where one can, or where a program is compiled for another machine.
    """
    if not compat.KERNELS_SUPPORTED:
        return compat.KERNELS_REASON
    if capability is None:
        try:
            capability = float(jax.devices("gpu")[0].compute_capability)
        except (RuntimeError, AttributeError, ValueError):
            return None
    return (
        None if capability >= 9.0 else f"it needs a GPU of compute capability 9.0 or later (this one has {capability})"
    )


def launch(
    program: Callable[[Thread, Any, dict], Any],
    task: Any,
    operands: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    blocks: int,
    threads: int,
    scratch_words: int = 0,
    name: str,
) -> dict[str, jax.Array]:
    """Run `program(thread, task, pointers by name)` on `blocks` blocks of `threads` threads; "scratch" is shared."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    names = (*operands, *outputs)

    def body(*refs):
        @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() for _ in refs))
        def emit(ctx, *memrefs):
            del ctx
            pointers = {n: Pointer(r) for n, r in zip(names, memrefs, strict=False)}
            if scratch_words:
                pointers["scratch"] = Pointer(memrefs[-1], shared=True)
            program(Thread(), task, pointers)

        emit(*refs)

    groups = threads // 128
    kernel = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=(plgpu.SMEM((scratch_words,), jnp.int32),) if scratch_words else (),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        num_threads=groups if groups > 1 else None,
        thread_name="group" if groups > 1 else None,
        kernel_name=name,
    )
    return dict(zip(outputs, kernel(*operands.values()), strict=True))


def pick(name: str, implementation: str | None, why_not: str | None, kernel, plain, args: Any) -> Any:
    """kernel(args) on NVIDIA GPUs where nothing speaks against it, else plain(args); both of pytrees of arrays.

    name: of the kernel, as in CONFIRMED.
    ValueError for an unknown name, and for "mosaic_sm90" where `why_not` says why it cannot be.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation={implementation!r} is not known; choose None or one of {', '.join(IMPLEMENTATIONS)}."
        )
    if implementation == "mosaic_sm90" and why_not:
        raise ValueError(f"implementation='mosaic_sm90' cannot do this: {why_not}; use 'xla' or None.")
    if implementation == "xla" or why_not or (implementation is None and name not in CONFIRMED):
        return plain(args)
    return on_cuda(kernel, plain, args, always=implementation == "mosaic_sm90")


__all__ = ["F", "P", "Pointer", "Thread", "U", "environment_obstacle", "launch", "pick"]
