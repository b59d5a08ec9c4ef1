"""The dense work of a decode step of one token, as three kernels; everything else about it is in the caller's hands.

At one token XLA's matmuls do not reach the memory bandwidth, and norms, rotations, masks and cache updates are a dozen
kernels of two microseconds each between them. Here a layer's attention is three: norm and projections, attention to
the cache in parts, and the parts' sum with the output projection.

Letters: D hidden, N outputs of a linear map (or slots of the cache), H query heads, G key/value heads, h head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..grouped_matmul import Gate
from ..permute.thread import CONFIRMED, environment_obstacle, pick
from ..quantize import QTensor
from ..route import Rule, choose_experts
from ..route.mosaic_sm90 import obstacle as choice_obstacle
from . import mosaic_attend, mosaic_experts, mosaic_linear, reference


def obstacle() -> str | None:
    """Why these kernels are not used on this process's GPU unless they are asked for, or None."""
    return environment_obstacle() or (None if "decode" in CONFIRMED else "its kernels have not run on a GPU yet")


class Partial(NamedTuple):
    """Attention to parts of the cache. out: [parts, H, h], each part's own weighted mean of values.

    weight: float32 [parts, H, 2], log2 of the part's largest term, and the sum of its terms over that.
    """

    out: jax.Array
    weight: jax.Array


class Weighted(NamedTuple):
    """A sum of rows: weights[k] * rows[places[k]] over all k of which places[k] is not -1.

    rows: [M, D]. places: int32 [K]. weights: float32 [K].
    """

    rows: jax.Array
    places: jax.Array
    weights: jax.Array


def normed_linear(
    x: jax.Array,
    scale: jax.Array,
    w: jax.Array,
    *,
    eps: float,
    add: jax.Array | Weighted | None = None,
    out_dtype=None,
    copies: int = 1,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """RMSNorm of a row (x, or x + add) and a linear map of it.

    x: [1, D]. add: [1, D], or a sum of rows. scale: [D]. w: [N, D]. Returns ([1, N] of out_dtype (x's, unless told),
    x + add [1, D], the normed row [copies, D]). Products are summed in float32. implementation: "mosaic_sm90", "xla",
    or None for the best that can.
    """
    if x.shape[0] != 1 or w.shape[1] != x.shape[1] or scale.shape != x.shape[1:]:
        raise ValueError(
            f"normed_linear got x {x.shape}, scale {scale.shape} and w {w.shape}; it takes [1, D], [D] and [N, D]."
        )
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    why = mosaic_linear.linear_obstacle(x, w, out_dtype) or environment_obstacle()
    how = dict(eps=eps, out_dtype=out_dtype, copies=copies)
    return pick(
        "decode",
        implementation,
        why,
        lambda a: mosaic_linear.run_normed_linear(*a, **how),
        lambda a: reference.normed_linear(*a, **how),
        (x, scale, w, *(add if isinstance(add, Weighted) else (add, None, None))),
    )


def route(
    logits: jax.Array,
    bias: jax.Array | None,
    rule: Rule,
    *,
    valid: jax.Array,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token's experts, and where its K copies lie in expert order.

    logits: float32 [1, E]; bias, rule as for `choose_experts`; valid: bool [1]. Returns weights float32 [K], places
    int32 [K] (-1 for a token that is not valid), and the rows of each expert, int32 [E].
    """
    args = (logits, bias, valid)
    why = choice_obstacle(1, logits.shape[1], rule) or environment_obstacle()
    kernel, plain = (lambda a, f=f: f(rule, *a) for f in (mosaic_experts.run_route, reference.route))
    return pick("decode", implementation, why, kernel, plain, args)


def experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array | QTensor,
    down: jax.Array | QTensor,
    *,
    gate: Gate = Gate(),  # noqa: B008
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    out_dtype=None,
    otherwise: Callable[..., jax.Array] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """A few tokens through their experts: for each token the weighted sum over its ids e of

    down[e] . (act(gate[e] . x) * (up[e] . x)), with biases where given.

    x: [T, D]. ids: int32 [T, K], anything outside [0, E) for none. weights: float32 [T, K]. gate_up: [E, 2, F, D],
    down: [E, D, F], arrays or QTensors. gate_up_bias: [E, 2, F]. down_bias: [E, D]. otherwise: what computes it from
    (x, ids, weights, gate_up, down, gate_up_bias, down_bias) where the kernels do not, in place of plain JAX.
    Returns [T, D] in out_dtype, x's unless given. There is no gradient.
    """
    fits = gate_up.shape[0] == down.shape[0] and gate_up.shape[2:] == (down.shape[2], x.shape[1])
    if not fits or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"experts got x {x.shape}, ids {ids.shape}, weights {weights.shape}, gate_up {gate_up.shape} and down "
            f"{down.shape}; it takes [T, D], [T, K], [T, K], [E, 2, F, D] and [E, D, F]."
        )
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    why = mosaic_experts.experts_obstacle(x, ids, gate_up, down, gate_up_bias, down_bias) or environment_obstacle()
    args = (x, ids, weights, gate_up, down, gate_up_bias, down_bias)
    how = dict(gate=gate, out_dtype=out_dtype)

    def plain(a):
        return reference.experts(*a, **how) if otherwise is None else otherwise(*a)

    return pick("experts", implementation, why, lambda a: mosaic_experts.run_experts(*a, **how), plain, args)


def experts_obstacle(
    x: jax.Array,
    ids: jax.Array,
    gate_up: jax.Array | QTensor,
    down: jax.Array | QTensor,
    *,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
) -> str | None:
    """Why `experts` has no kernels for these, or does not use them unless it is asked to; or None."""
    if "experts" not in CONFIRMED:
        return "its kernels have not run on a GPU since their last change"
    why = mosaic_experts.experts_obstacle(x, ids, gate_up, down, gate_up_bias, down_bias)
    return why or environment_obstacle()


def routed_experts(
    x: jax.Array,
    logits: jax.Array,
    rule: Rule,
    gate_up: jax.Array | QTensor,
    down: jax.Array | QTensor,
    *,
    bias: jax.Array | None = None,
    valid: jax.Array | None = None,
    gate: Gate = Gate(),  # noqa: B008
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    out_dtype=None,
    otherwise: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`choose_experts` for one token, and `experts` of it, in two kernels instead of three.

    x: [1, D]. logits: float32 [1, E], bias, rule and valid as for `choose_experts`; the others as for `experts`, also
    where it raises ValueError. otherwise: what computes it from (x, logits, bias, valid, gate_up, down, gate_up_bias,
    down_bias) where the kernels do not.
    Returns what `experts` returns, ids int32 [1, K], and weights float32 [1, K].
    """
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    ids = jax.ShapeDtypeStruct((x.shape[0], rule.top_k), jnp.int32)
    why = mosaic_experts.experts_obstacle(x, ids, gate_up, down, gate_up_bias, down_bias) or environment_obstacle()
    if x.shape[0] != 1 or logits.shape != (1, gate_up.shape[0]):
        why = f"it takes one token and its logits for all experts, not {x.shape} and {logits.shape}"
    why = why or choice_obstacle(1, logits.shape[1], rule)
    args = (x, logits, bias, valid, gate_up, down, gate_up_bias, down_bias)
    how = dict(gate=gate, out_dtype=out_dtype)

    def plain(a):
        if otherwise is not None:
            return otherwise(*a)
        x, logits, bias, valid, *rest = a
        ids, weights = choose_experts(logits, bias, rule, valid=valid)
        return reference.experts(x, ids, weights, *rest, **how), ids, weights

    kernel = lambda a: mosaic_experts.run_routed(*a, rule=rule, **how)  # noqa: E731
    return pick("routed_experts", implementation, why, kernel, plain, args)


def routed_obstacle(x: jax.Array, logits: jax.Array, rule: Rule) -> str | None:
    """Why `routed_experts` has no kernels of its own where `experts` has, or does not use them by itself; or None."""
    if "routed_experts" not in CONFIRMED:
        return "its kernels have not run on a GPU since their last change"
    return "it takes one token" if x.shape[0] != 1 else choice_obstacle(1, logits.shape[1], rule)


def attend(
    qkv: jax.Array,
    q_scale: jax.Array,
    k_scale: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    cache: tuple[jax.Array, jax.Array],
    valid: jax.Array,
    slot: jax.Array,
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[Partial, tuple[jax.Array, jax.Array]]:
    """One token's attention to a cache that it is written into first.

    qkv: [1, (H + 2 * G) * h], queries, keys and values before norm and rotation. q_scale, k_scale: [h], of the RMSNorm
    of each head. rotation: cosines and sines of the token's angles, float32 [h / 2] each. cache: keys and values,
    [1, G, N, h]. valid: bool [1, N], which slots may be seen. slot: int32 [], where the token goes; later slots are
    not read. Returns the parts, and the cache, updated in place where its buffers are the caller's to give.
    """
    keys, values = cache
    groups, slots, size = keys.shape[1:]
    if keys.shape != values.shape or keys.shape[0] != 1 or valid.shape != (1, slots) or qkv.shape[1] % size:
        raise ValueError(
            f"attend got qkv {qkv.shape}, a cache {keys.shape} and {values.shape}, and valid {valid.shape}; it takes "
            "[1, (H + 2 * G) * h], [1, G, N, h] twice and [1, N]."
        )
    why = mosaic_attend.attend_obstacle(qkv, keys) or environment_obstacle()
    how = dict(eps=eps, splits=mosaic_attend.parts(slots))
    args = (qkv, q_scale, k_scale, *rotation, keys, values, valid, slot)
    out, weight, keys, values = pick(
        "decode",
        implementation,
        why,
        lambda a: mosaic_attend.run_attend(*a, **how),
        lambda a: reference.attend(*a, **how),
        args,
    )
    return Partial(out, weight), (keys, values)


def merged_linear(partial: Partial, w: jax.Array, add: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """add [1, D] + the parts' sum [1, H * h] times w [D, H * h], in add's dtype."""
    if w.shape != (add.shape[1], partial.out.shape[1] * partial.out.shape[2]):
        raise ValueError(
            f"merged_linear got parts {partial.out.shape}, w {w.shape} and add {add.shape}; it takes [parts, H, h], "
            "[D, H * h] and [1, D]."
        )
    why = mosaic_linear.merged_obstacle(partial.out, w, add) or environment_obstacle()
    return pick(
        "decode",
        implementation,
        why,
        lambda a: mosaic_linear.run_merged_linear(*a),
        lambda a: a[3] + reference.linear(reference.merge(a[0], a[1]), a[2], a[3].dtype),
        (*partial, w, add),
    )
