"""The public grouped matmul: picks an implementation, and carries its own gradient.

Letters: M rows, K contraction, N columns, G groups.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..compat import refuse_varying
from ..derivatives import first_only
from ..quantize import QTensor
from . import blackwell_entry, mosaic_entry, portable, triton_entry


@dataclasses.dataclass(frozen=True)
class Problem:
    """What one call asks for, as an implementation needs to know it before tracing.

    op: "forward" (x . w), "dlhs" (dy . w, the gradient of x) or "drhs" (the gradient of w). m, n, k, groups: as in
    `grouped_matmul`; groups counts those that w holds. x, w, out: names of dtypes, or of the format where it is a
    QTensor (for the gradients, x is dy in "dlhs", and w is dy in "drhs"). platform: "cpu", "gpu" or "tpu";
    compute_capability: for example "9.0", None where there is no such thing.
    """

    op: Literal["forward", "dlhs", "drhs"]
    m: int
    n: int
    k: int
    groups: int
    x: str
    w: str
    out: str
    platform: str
    compute_capability: str | None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute a grouped matmul and its gradients.

    why_not: a reason why it cannot do a Problem, or None if it can. forward, dlhs, drhs: functions with the signatures
    of `portable.grouped_matmul`, `grouped_matmul_dlhs` and `grouped_matmul_drhs`; why_not is asked for each separately;
    drhs may be None where it always has a reason.
    opt_in: why it is only used where it is named, empty where None may choose it.
    dequantises: the dtype to which forward dequantises all rows of a QTensor x before it multiplies, None where it does
    not; see `input_dtype`.
    """

    name: str
    why_not: Callable[[Problem], str | None]
    forward: Callable[..., jax.Array]
    dlhs: Callable[..., jax.Array]
    drhs: Callable[..., jax.Array] | None = None
    opt_in: str = ""
    dequantises: Callable[[Problem], str | None] = lambda problem: None


# In the order of preference. "portable" does everything and comes last.
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(
        name="mosaic_sm90",
        why_not=mosaic_entry.why_not,
        forward=mosaic_entry.forward,
        dlhs=mosaic_entry.dlhs,
        drhs=mosaic_entry.drhs,
        dequantises=mosaic_entry.dequantises,
    ),
    Implementation(
        name="mosaic_sm100",
        why_not=blackwell_entry.why_not,
        forward=blackwell_entry.forward,
        dlhs=blackwell_entry.dlhs,
        opt_in="nobody has run it on its hardware yet",
    ),
    Implementation(
        name="triton",
        why_not=triton_entry.why_not,
        forward=triton_entry.forward,
        dlhs=triton_entry.dlhs,
        drhs=triton_entry.drhs,
    ),
    Implementation(
        name="portable",
        why_not=lambda problem: None,
        forward=portable.grouped_matmul,
        dlhs=portable.grouped_matmul_dlhs,
        drhs=portable.grouped_matmul_drhs,
    ),
)


def choose(problem: Problem, implementation: str | None = None) -> Implementation:
    """The implementation called `implementation`, or for None the first that can do `problem` and is not opt-in.

    ValueError if there is none of that name, or if it cannot do the problem: the message has its reason and those that
        can.
    """
    able = [i for i in IMPLEMENTATIONS if i.why_not(problem) is None]
    default = next(i for i in able if not i.opt_in)
    if implementation is None:
        return default
    found = next((i for i in IMPLEMENTATIONS if i.name == implementation), None)
    if found is None:
        raise ValueError(
            f"grouped_matmul has no implementation={implementation!r}; there are "
            f"{', '.join(repr(i.name) for i in IMPLEMENTATIONS)}, or None to choose."
        )
    reason = found.why_not(problem)
    if reason is not None:
        raise ValueError(
            f"grouped_matmul cannot use implementation={implementation!r} here: {reason}. "
            f"These can: {', '.join(repr(i.name) for i in able)}; None chooses {default.name!r}."
        )
    return found


def _kind(a: Any) -> str:
    return a.format.name if isinstance(a, QTensor) else str(a.dtype)


def problem_of(op, m, n, k, groups, x, w, out_dtype) -> Problem:
    """The Problem of these operands on the first device."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    return Problem(op, m, n, k, groups, _kind(x), _kind(w), str(jnp.dtype(out_dtype)), device.platform, capability)


def input_dtype(x: QTensor, w: Any, *, num_rows: int, out_dtype, implementation: str | None = None) -> str | None:
    """The float dtype in which `grouped_matmul` would rather have its input than as rows of x, None if it reads those.

    Its kernels dequantise most formats in a step before the matmul; whoever moves the rows can do it on the way.
    x: rows of the input's format. w: [G, .., N, K]. num_rows: M of the call. The others are those of `grouped_matmul`.
    """
    n, k = w.shape[-2:]
    problem = problem_of("forward", num_rows, n, k, w.shape[0], x, w, out_dtype)
    return choose(problem, implementation).dequantises(problem)


@dataclasses.dataclass(frozen=True)
class _Static:
    out_dtype: Any
    implementation: str | None
    zero_tail: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(static, x, stand_in, w, group_sizes, group_offset):
    del stand_in
    (m, k), (groups, n, _) = x.shape, w.shape
    chosen = choose(problem_of("forward", m, n, k, groups, x, w, static.out_dtype), static.implementation)
    return chosen.forward(
        x, w, group_sizes, group_offset=group_offset, out_dtype=static.out_dtype, zero_tail=static.zero_tail
    )


def _forward(static, x, stand_in, w, group_sizes, group_offset):
    # Only the dtype of the stand-in is needed later: an empty array carries it without keeping the values alive.
    like = None if stand_in is None else jnp.zeros((0,), stand_in.dtype)
    static = dataclasses.replace(static, zero_tail=True)  # a gradient multiplies with what is there
    return _grouped_matmul(static, x, stand_in, w, group_sizes, group_offset), (x, like, w, group_sizes, group_offset)


def _backward(static, residuals, dy):
    (x, like, w), (group_sizes, group_offset), dy = first_only(residuals[:3]), residuals[3:], first_only(dy)
    (m, k), (groups, n, _) = x.shape, w.shape

    def run(op, a, b, dtype, **options):
        # A kernel that has no such gradient leaves it to the best implementation that has.
        problem = problem_of(op, m, n, k, groups, a, b, dtype)
        named = next((i for i in IMPLEMENTATIONS if i.name == static.implementation), None)
        chosen = named if named is not None and named.why_not(problem) is None else choose(problem)
        function = chosen.dlhs if op == "dlhs" else chosen.drhs
        assert function is not None, f"{chosen.name} says that it can do drhs and has none"
        return function(a, b, group_sizes, group_offset=group_offset, out_dtype=dtype, **options)

    dx = d_stand_in = dw = None
    if not isinstance(x, QTensor):
        dx = run("dlhs", dy, w, x.dtype)
    elif like is not None:
        d_stand_in = run("dlhs", dy, w, like.dtype)
    if not isinstance(w, QTensor):
        dw = run("drhs", dy, x, w.dtype, num_groups=groups)
    return dx, d_stand_in, dw, None, None


_grouped_matmul.defvjp(_forward, _backward)


def grouped_matmul(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor,
    group_sizes: jax.Array,
    *,
    group_offset: jax.Array | int | None = None,
    straight_through: jax.Array | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    zero_tail: bool = True,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies each row with the weight of its group: out[m] = w[group of m] @ x[m], accumulated in float32.

    Arguments:
        x: [M, K], bf16, f16 or f32, or a row-wise QTensor. The rows of group 0 come first, then those of group 1, ...
        w: [G, N, K], a float array (cast to x's dtype first) or a QTensor, for which the global scale may be [G] (one
            for each matrix) or [G, N] (one for each output column).
        group_sizes: int32 [G], rows of each group. Rows past their sum belong to nobody: their output is zero, whatever
            they hold. A sum above M is cut at M.
        group_offset: int32 scalar, for weights that are a part of the groups: group_sizes is then [any number] and w
            holds the groups group_offset .. group_offset + G - 1; rows of other groups come out as zero.
        straight_through: for a QTensor x, the float array [M, K] that it was quantised from. Its values are not read;
            it receives the gradient of the dequantised x.
        out_dtype: x's dtype where it is a float array, else float32, unless given.
        zero_tail: False where nobody reads the rows past the sum: they may then hold anything, and cost nothing. Under
            differentiation they are zero all the same.
        implementation: a name in IMPLEMENTATIONS, or None for the first of them that can do this.

    Returns: [M, N].

    Differentiable in float x and w (and `straight_through`); a QTensor w is a constant. The weight gradient of a group
    without rows is exactly zero, and no row touches the result or gradient of another group, NaN or not.

    Raises ValueError for shapes that do not fit, integers, a swizzled QTensor, or an implementation that cannot do
    this.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(
            f"grouped_matmul got x {x.shape} and w {w.shape}; it takes x [M, K] and w [G, N, K] with the same K (both "
            "contract their last axis): transpose w if it is [G, K, N]."
        )
    group_sizes = jnp.asarray(group_sizes)
    refuse_varying("grouped_matmul", (x, w, group_sizes))
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer) or w.shape[0] == 0:
        raise ValueError(
            f"grouped_matmul got {w.shape[0]} weights and group_sizes of {group_sizes.dtype}; it takes one weight or "
            "more and an integer for each, its number of rows."
        )
    if group_sizes.ndim != 1 or (group_offset is None and group_sizes.shape[0] != w.shape[0]):
        raise ValueError(
            f"group_sizes has shape {group_sizes.shape} for {w.shape[0]} weights; it must be [{w.shape[0]}], or any "
            "length together with group_offset, the first group that w holds."
        )
    for name, a in (("x", x), ("w", w)):
        if not isinstance(a, QTensor) and not jnp.issubdtype(a.dtype, jnp.floating):
            raise ValueError(
                f"{name} is an array of {a.dtype}; grouped_matmul takes bfloat16, float16 or float32, or a QTensor. "
                "Cast it, or keep its data and scales together (quantize)."
            )
        if isinstance(a, QTensor) and a.layout != "row_major":
            raise ValueError(
                f"{name} is a QTensor with layout={a.layout!r}; grouped_matmul takes 'row_major' scales: "
                "unswizzle_scales brings them back."
            )
    if isinstance(x, QTensor) and x.format.block_rows != 1:
        raise ValueError(
            f"x is a QTensor of format {x.format.name!r}, whose scales span {x.format.block_rows} rows; activations "
            "need a format with a scale for each row, such as 'fp8_128' or 'mxfp8'."
        )
    if straight_through is not None and (not isinstance(x, QTensor) or straight_through.shape != x.shape):
        raise ValueError(
            f"straight_through {straight_through.shape} goes with a QTensor x of the same shape, got x {x.shape} "
            f"({type(x).__name__}); leave it out for a float x, which is differentiable itself."
        )
    if out_dtype is None:
        out_dtype = jnp.float32 if isinstance(x, QTensor) else x.dtype
    elif not jnp.issubdtype(out_dtype, jnp.floating):
        raise ValueError(f"out_dtype={jnp.dtype(out_dtype)} must be a float type, such as bfloat16.")
    offset = None if group_offset is None else jnp.asarray(group_offset, jnp.int32).reshape(())
    static = _Static(jnp.dtype(out_dtype), implementation, zero_tail)
    return _grouped_matmul(static, x, straight_through, w, group_sizes, offset)
