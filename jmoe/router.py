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

from .config import RouterConfig

NORMALIZE_EPS = 1e-20  # as DeepSeek-V3 does; does not change a float32 sum that is above 1e-12


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Where tokens go. ids: int32 [T, K] logical expert ids, -1 for invalid tokens. weights: float32 [T, K]."""

    ids: jax.Array
    weights: jax.Array


def router_logits(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [T, D] times weight [E, D] transposed, plus bias [E]; float32 [T, E], at full float32 precision.

    Inputs that are not float32 already are converted: near-ties decide which expert a token sees, and rounding logits
    to bfloat16 would make that depend on the layout of the matmul.
    """
    f32 = jnp.float32
    logits = lax.dot_general(
        x.astype(f32), weight.astype(f32), (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
    )  # [T, E]
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
    _check(logits, config, top_k, correction_bias, valid)
    logits = _mask_rows(logits.astype(jnp.float32), valid)  # [T, E]
    if config.order == "topk_then_softmax":
        scores = logits
    else:
        scores = jax.nn.sigmoid(logits) if config.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    selection = lax.stop_gradient(scores)
    if correction_bias is not None:
        selection = selection + lax.stop_gradient(correction_bias.astype(jnp.float32))[None, :]
    ill_formed = jnp.isnan(selection).any(axis=-1)  # [T]
    if config.num_groups is not None:
        selection = _limit_to_groups(selection, config)
    _, ids = _top_k(selection, top_k)  # [T, K]

    weights = jnp.take_along_axis(scores, ids, axis=-1)  # [T, K]
    if config.order == "topk_then_softmax":
        weights = jax.nn.softmax(weights, axis=-1)
    elif config.normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + NORMALIZE_EPS)
    weights = weights * jnp.float32(config.scaling)
    weights = jnp.where(ill_formed[:, None], jnp.float32(jnp.nan), weights)
    if valid is not None:
        ids = jnp.where(valid[:, None], ids, -1)
        weights = jnp.where(valid[:, None], weights, jnp.float32(0))
    return Routing(ids, weights)


def _check(logits, config: RouterConfig, top_k: int, correction_bias, valid) -> None:
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


def _mask_rows(logits: jax.Array, valid: jax.Array | None) -> jax.Array:
    # Before anything else, so that NaN in padding reaches neither results nor gradients.
    return logits if valid is None else jnp.where(valid[:, None], logits, jnp.float32(0))


def _top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of the last axis, ties to the lower index. NaN counts as -Inf, -0 as 0: XLA orders them apart."""
    x = jnp.where(jnp.isnan(x), -jnp.inf, x)
    values, ids = lax.top_k(jnp.where(x == 0, jnp.float32(0), x), k)
    return values, ids.astype(jnp.int32)


def _limit_to_groups(selection: jax.Array, config: RouterConfig) -> jax.Array:
    """Selection scores [T, E] with -Inf outside the group_topk best of num_groups groups."""
    tokens, experts = selection.shape
    groups, best = config.num_groups, config.group_topk
    assert groups is not None and best is not None
    grouped = selection.reshape(tokens, groups, experts // groups)
    depth = min(2, experts // groups) if config.group_score == "top2sum" else 1
    group_scores = _top_k(grouped, depth)[0].sum(axis=-1)  # [T, G]
    _, chosen = _top_k(group_scores, best)  # [T, group_topk]
    eligible = (chosen[:, :, None] == jnp.arange(groups, dtype=jnp.int32)[None, None, :]).any(axis=1)  # [T, G]
    return jnp.where(eligible[:, :, None], grouped, -jnp.inf).reshape(tokens, experts)


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
    logits = _mask_rows(logits.astype(jnp.float32), valid)
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
