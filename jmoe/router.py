"""The router: logits to expert ids and weights, the auxiliary losses, and what is counted beside them.

Letters: T tokens, E logical experts, K experts per token, G groups of experts. Everything is computed in float32.

Well-defined for every input:
* Ties go to the lower expert id.
* A row whose logits (or biased scores) contain a NaN, or whose softmax is NaN because of a +Inf, gets ids in [0, E) and
  NaN in all its weights: that token's output is NaN, no other's is. A -Inf logit is an ordinary "never this expert".
* An invalid token (`valid` False) gets id -1 and weight 0 in every place, whatever its logits hold.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.route import Rule, choose_experts
from pallas_kernels.route.reference import NORMALIZE_EPS, mask_rows

from .config import RouterConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Where tokens go. ids: int32 [T, K] logical expert ids, -1 for invalid tokens. weights: float32 [T, K]."""

    ids: jax.Array
    weights: jax.Array


def router_logits(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [T, D] times weight [E, D] transposed, plus bias [E]; float32 [T, E], at full float32 precision.

    Near-ties decide which expert a token sees, so logits are never rounded to 16 bits. Where both operands have 16 bits
    their products are exact in float32 and are added up in float32 by the matrix unit; otherwise both are converted.
    """
    f32 = jnp.float32
    contract = (((1,), (1,)), ((), ()))
    if x.dtype == weight.dtype and x.dtype.itemsize == 2:
        logits = lax.dot_general(x, weight, contract, preferred_element_type=f32)  # [T, E]
    else:
        logits = lax.dot_general(x.astype(f32), weight.astype(f32), contract, precision=lax.Precision.HIGHEST)
    return logits if bias is None else logits + bias.astype(f32)[None, :]


def route(
    logits: jax.Array,
    config: RouterConfig,
    *,
    top_k: int,
    correction_bias: jax.Array | None = None,
    valid: jax.Array | None = None,
) -> Routing:
    """Choose K experts for each token.

    logits: [T, E], any float type. correction_bias: [E], added to the scores for the selection and never to the weights
    (required exactly where config.use_correction_bias). valid: bool [T]; False rows are padding.
    Returns ids int32 [T, K], by falling selection score, and weights float32 [T, K]. Differentiable in the logits
    through the weights. Raises ValueError for shapes that do not fit.
    Sources: Switch Transformer (softmax, top-k), DeepSeek-V3 (sigmoid, groups, correction bias), gpt-oss (softmax over
    the selected logits).
    """
    rule = checked_rule(logits, config, top_k=top_k, correction_bias=correction_bias, valid=valid)
    bias = None if correction_bias is None else correction_bias.astype(jnp.float32)
    return Routing(*choose_experts(logits.astype(jnp.float32), bias, rule, valid=valid))


def checked_rule(logits, config: RouterConfig, *, top_k: int, correction_bias, valid) -> Rule:
    """How `route` chooses; ValueError where its arguments do not fit."""
    if logits.ndim != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(
            f"Router logits are {logits.dtype}{list(logits.shape)}; route() takes floating point [tokens, experts]: "
            "reshape the leading axes into one first."
        )
    tokens, experts = logits.shape
    if not 0 < top_k <= experts:
        raise ValueError(f"top_k={top_k} of {experts} experts: choose 1..{experts}.")
    if config.num_groups is not None and experts % config.num_groups:
        raise ValueError(f"{experts} experts do not form {config.num_groups} equal groups; change num_groups.")
    if (correction_bias is not None) != config.use_correction_bias:
        given = "is missing" if correction_bias is None else "was given"
        raise ValueError(
            f"correction_bias {given}, and the router's use_correction_bias is {config.use_correction_bias}: "
            "pass an array of shape [experts] exactly where the configuration asks for one."
        )
    if correction_bias is not None and correction_bias.shape != (experts,):
        raise ValueError(f"correction_bias has shape {correction_bias.shape}; it must be ({experts},), one per expert.")
    if valid is not None and (valid.shape != (tokens,) or valid.dtype != jnp.bool_):
        raise ValueError(
            f"valid is {valid.dtype}{list(valid.shape)}; it must be bool[{tokens}], one for each row of the logits."
        )
    fields = ("score", "order", "normalize", "scaling", "num_groups", "group_topk", "group_score")
    return Rule(top_k, **{f: getattr(config, f) for f in fields})


# --- statistics and losses


def tokens_per_expert(ids: jax.Array, num_experts: int) -> jax.Array:
    """How many assignments each expert got: int32 [E]. Ids outside [0, E) count nowhere.

    A compare and a sum: XLA fuses them, so no [T, K, E] array exists, and nothing depends on the order of atomics.
    """
    hits = ids[..., None] == jnp.arange(num_experts, dtype=ids.dtype).reshape((1,) * ids.ndim + (-1,))
    return hits.sum(axis=tuple(range(ids.ndim)), dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterStats:
    """Sums over tokens, so that the statistics of a sharded batch are the `psum` of the shards'.

    tokens_per_expert: int32 [E] assignments. probability_sum: float32 [E], router probabilities summed over valid
    tokens (sigmoid scores are normalised to sum to one for each token). z_sum: float32 [], sum of
    logsumexp(logits)**2. num_tokens: int32 [], valid tokens.
    """

    tokens_per_expert: jax.Array
    probability_sum: jax.Array
    z_sum: jax.Array
    num_tokens: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEStats:
    """What `call_with_stats` returns beside the output.

    load_balance_loss, z_loss: float32 []. tokens_per_expert: int32 [E], over all ranks. dropped: int32 [], assignments
    that found no room (capacity_factor) or no live rank, over all ranks.
    """

    load_balance_loss: jax.Array
    z_loss: jax.Array
    tokens_per_expert: jax.Array
    dropped: jax.Array


def router_stats(
    logits: jax.Array, ids: jax.Array, config: RouterConfig, *, valid: jax.Array | None = None
) -> RouterStats:
    """Statistics of these tokens. logits [T, E]; ids [T, K] logical; valid bool [T]. Differentiable in the logits."""
    tokens, experts = logits.shape
    logits = mask_rows(logits.astype(jnp.float32), valid)
    if config.score == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        probabilities = scores / (scores.sum(axis=-1, keepdims=True) + NORMALIZE_EPS)
    else:
        probabilities = jax.nn.softmax(logits, axis=-1)
    z = jnp.square(jax.nn.logsumexp(logits, axis=-1))  # [T]
    if valid is None:
        count = jnp.int32(tokens)
    else:
        probabilities = jnp.where(valid[:, None], probabilities, jnp.float32(0))
        z = jnp.where(valid, z, jnp.float32(0))
        count = valid.sum(dtype=jnp.int32)
    return RouterStats(tokens_per_expert(ids, experts), probabilities.sum(axis=0), z.sum(), count)


def load_balance_loss(stats: RouterStats) -> jax.Array:
    """E * sum_e f_e p_e: f_e the share of assignments that expert e got, p_e its mean probability. float32 [].

    1 for a perfectly balanced router, up to E for one that sends everything to one expert, 0 without tokens. Source:
    Switch Transformer (arXiv 2101.03961) eq. 4; Hugging Face's `load_balancing_loss_func` is K times this.
    """
    experts = stats.tokens_per_expert.shape[0]
    counts = stats.tokens_per_expert.astype(jnp.float32)
    share = counts / jnp.maximum(counts.sum(), jnp.float32(1))
    mean = stats.probability_sum / jnp.maximum(stats.num_tokens.astype(jnp.float32), jnp.float32(1))
    return jnp.float32(experts) * (share * mean).sum()


def z_loss(stats: RouterStats) -> jax.Array:
    """Mean of logsumexp(logits)**2, which keeps logits small (ST-MoE, arXiv 2202.08906 eq. 5). float32 []."""
    return stats.z_sum / jnp.maximum(stats.num_tokens.astype(jnp.float32), jnp.float32(1))


def summarize(stats: RouterStats, dropped: jax.Array) -> MoEStats:
    """The losses and counts of (globally summed) router statistics; dropped: int32 []."""
    return MoEStats(load_balance_loss(stats), z_loss(stats), stats.tokens_per_expert, dropped)
