"""Choosing experts in plain jnp.

T tokens, E experts, K experts per token, G groups of experts. Everything is float32.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

NORMALIZE_EPS = 1e-20  # as DeepSeek-V3 does; does not change a float32 sum that is above 1e-12


@dataclasses.dataclass(frozen=True)
class Rule:
    """How logits become ids and weights; the fields are those of `jmoe.config.RouterConfig`."""

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    order: Literal["score_then_topk", "topk_then_softmax"] = "score_then_topk"
    normalize: bool = True
    scaling: float = 1.0
    num_groups: int | None = None
    group_topk: int | None = None
    group_score: Literal["top2sum", "max"] = "top2sum"


def mask_rows(logits: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Zeros in the rows of invalid tokens: before anything else, so that NaN there reaches no result or gradient."""
    return logits if valid is None else jnp.where(valid[:, None], logits, jnp.float32(0))


def _scores(logits: jax.Array, rule: Rule) -> jax.Array:
    if rule.order == "topk_then_softmax":
        return logits
    return jax.nn.sigmoid(logits) if rule.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)


def _selection(scores: jax.Array, bias: jax.Array | None) -> jax.Array:
    selection = lax.stop_gradient(scores)
    return selection if bias is None else selection + lax.stop_gradient(bias)[None, :]


def select(logits: jax.Array, bias: jax.Array | None, rule: Rule) -> jax.Array:
    """Ids int32 [T, K] by falling selection score, ties to the lower id; NaN counts as -Inf."""
    selection = _selection(_scores(logits, rule), bias)
    if rule.num_groups is not None:
        selection = _limit_to_groups(selection, rule)
    return _top_k(selection, rule.top_k)[1]


def weigh(logits: jax.Array, bias: jax.Array | None, ids: jax.Array, rule: Rule) -> jax.Array:
    """Weights float32 [T, K] of the selected ids; all NaN for a token with a NaN among its selection scores."""
    scores = _scores(logits, rule)
    ill_formed = jnp.isnan(_selection(scores, bias)).any(axis=-1)  # [T]
    weights = jnp.take_along_axis(scores, ids, axis=-1)  # [T, K]
    if rule.order == "topk_then_softmax":
        weights = jax.nn.softmax(weights, axis=-1)
    elif rule.normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + NORMALIZE_EPS)
    weights = weights * jnp.float32(rule.scaling)
    return jnp.where(ill_formed[:, None], jnp.float32(jnp.nan), weights)


def _top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of the last axis, ties to the lower index. NaN counts as -Inf, -0 as 0: XLA orders them apart."""
    x = jnp.where(jnp.isnan(x), -jnp.inf, x)
    values, ids = lax.top_k(jnp.where(x == 0, jnp.float32(0), x), k)
    return values, ids.astype(jnp.int32)


def _limit_to_groups(selection: jax.Array, rule: Rule) -> jax.Array:
    """Selection scores [T, E] with -Inf outside the group_topk best of num_groups groups."""
    tokens, experts = selection.shape
    groups, best = rule.num_groups, rule.group_topk
    assert groups is not None and best is not None
    grouped = selection.reshape(tokens, groups, experts // groups)
    depth = min(2, experts // groups) if rule.group_score == "top2sum" else 1
    group_scores = _top_k(grouped, depth)[0].sum(axis=-1)  # [T, G]
    _, chosen = _top_k(group_scores, best)  # [T, group_topk]
    eligible = (chosen[:, :, None] == jnp.arange(groups, dtype=jnp.int32)[None, None, :]).any(axis=1)  # [T, G]
    return jnp.where(eligible[:, :, None], grouped, -jnp.inf).reshape(tokens, experts)
