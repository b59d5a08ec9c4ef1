"""The public choice of experts: picks an implementation, and carries its own gradient."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..permute.thread import environment_obstacle, pick
from . import mosaic_sm90, reference
from .reference import Rule


def choose_experts(
    logits: jax.Array,
    bias: jax.Array | None,
    rule: Rule,
    *,
    valid: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """K experts for each token: logits float32 [T, E] -> ids int32 [T, K], weights float32 [T, K].

    Ids come by falling selection score, ties to the lower id. A token with a NaN among its selection scores gets ids in
    [0, E) and NaN weights. bias: float32 [E], added to the scores for the selection only. valid: bool [T]; tokens where
    it is False get ids -1 and weights 0, whatever their logits hold.
    implementation: "mosaic_sm90", "xla" or None for the best that can. Differentiable in the logits, by the weights.
    """
    return _choose(rule, implementation, logits, bias, valid)


def _weigh(logits, bias, valid, ids, rule):
    """Weights [T, K] of ids that may be -1."""
    logits = reference.mask_rows(logits, valid)
    weights = reference.weigh(logits, bias, jnp.maximum(ids, 0), rule)
    return weights if valid is None else jnp.where(valid[:, None], weights, jnp.float32(0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _choose(rule, implementation, logits, bias, valid):
    def plain(args):
        logits, bias, valid = args
        ids = reference.select(reference.mask_rows(logits, valid), bias, rule)
        weights = _weigh(logits, bias, valid, ids, rule)
        return ids if valid is None else jnp.where(valid[:, None], ids, -1), weights

    tokens, experts = logits.shape
    why = mosaic_sm90.obstacle(tokens, experts, rule) or environment_obstacle()
    args = (logits, bias, valid)
    return pick("route", implementation, why, lambda a: mosaic_sm90.run_choose(rule, *a), plain, args)


def _forward(rule, implementation, logits, bias, valid):
    out: Any = _choose(rule, implementation, logits, bias, valid)
    return out, (logits, bias, valid, out[0])


def _backward(rule, implementation, residuals, cotangents):
    del implementation
    logits, bias, valid, ids = residuals
    _, pull = jax.vjp(lambda x: _weigh(x, bias, valid, ids, rule), logits)
    (d_logits,) = pull(cotangents[1])
    return d_logits, None if bias is None else jnp.zeros_like(bias), None


_choose.defvjp(_forward, _backward)
