"""The public choice of experts: picks an implementation, and carries its own gradient."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ..permute.thread import environment_obstacle, pick
from . import mosaic_sm90, reference
from .reference import Rule


def choose_experts(
    logits: jax.Array, bias: jax.Array | None, rule: Rule, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """K experts for each token: logits float32 [T, E] -> ids int32 [T, K], weights float32 [T, K].

    Ids come by falling selection score, ties to the lower id. A token with a NaN among its selection scores gets ids in
    [0, E) and NaN weights. bias: float32 [E], added to the scores for the selection only.
    implementation: "mosaic_sm90", "xla" or None for the best that can. Differentiable in the logits, by the weights.
    """
    return _choose(rule, implementation, logits, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _choose(rule, implementation, logits, bias):
    def plain(args):
        ids = reference.select(*args, rule)
        return ids, reference.weigh(*args, ids, rule)

    why = mosaic_sm90.obstacle(*logits.shape, rule) or environment_obstacle()
    return pick("route", implementation, why, lambda a: mosaic_sm90.run_choose(rule, *a), plain, (logits, bias))


def _forward(rule, implementation, logits, bias):
    ids, weights = _choose(rule, implementation, logits, bias)
    return (ids, weights), (logits, bias, ids)


def _backward(rule, implementation, residuals, cotangents):
    del implementation
    logits, bias, ids = residuals
    _, pull = jax.vjp(lambda x: reference.weigh(x, bias, ids, rule), logits)
    return *pull(cotangents[1]), None if bias is None else jnp.zeros_like(bias)


_choose.defvjp(_forward, _backward)
