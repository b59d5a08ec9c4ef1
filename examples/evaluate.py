"""How good a model's predictions are, how far a quantised dispatch moves them, and how many rows it sends."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import qwen3_moe
from flax import nnx

from jmoe.nn import MoE
from jmoe.router import route, router_logits


class CountRanks(nnx.Module):
    """Wraps a MoE module: its statistics become the mean number of other ranks that a token's row goes to, float32 [].

    Experts are in order, `num_local` on each rank, and tokens are split over the ranks in order.
    """

    def __init__(self, moe):
        self.moe = moe

    def call_with_stats(self, x, *, valid=None):
        layer, rows = self.moe.layer, x.reshape(-1, x.shape[-1])
        c, ranks = layer.config, jnp.arange(layer.num_ranks, dtype=jnp.int32)
        ids = route(router_logits(rows, self.moe.router[...]), c.router, top_k=c.num_experts_per_tok).ids  # [T, K]
        goes = (ids[:, :, None] // layer.num_local == ranks[None, None, :]).any(axis=1)  # [T, R]
        home = jnp.arange(len(rows), dtype=jnp.int32) * layer.num_ranks // len(rows)
        away = goes & (ranks[None, :] != home[:, None])
        return self.moe(x, valid=valid), away.sum().astype(jnp.float32) / len(rows)


def count_ranks(model):
    """Puts CountRanks around the MoE modules of a Qwen3Moe, in place; returns it."""
    for block in qwen3_moe.blocks(model):
        if isinstance(block.mlp, MoE):
            block.mlp = CountRanks(block.mlp)
    return model


@jax.jit
def _score(model, inputs, scored):
    hidden, _, stats = model.hidden(inputs[:, :-1])  # [W, S, D]
    logits = model.logits(hidden)  # [W, S, V]
    target = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), inputs[:, 1:, None], axis=-1)[:, :, 0]
    return -jnp.where(scored, target, 0.0).sum(), logits, stats


def _batches(inputs, scored, batch):
    """Equal batches, so that one program serves them all; the last is filled up with windows that do not score."""
    for start in range(0, len(inputs), batch):
        i, s = inputs[start : start + batch], scored[start : start + batch]
        missing = batch - len(i)
        yield np.pad(i, ((0, missing), (0, 0))), np.pad(s, ((0, missing), (0, 0)))


def bits_per_byte(model, inputs: np.ndarray, scored: np.ndarray, *, batch: int = 32) -> float:
    """Bits that `model` needs for each scored byte of the windows that `text.windows` cut."""
    nats = sum(float(_score(model, i, s)[0]) for i, s in _batches(inputs, scored, batch))
    return nats / np.log(2) / scored.sum()


@dataclasses.dataclass(frozen=True)
class Report:
    """bits_per_byte; snr in dB; other_ranks: to how many ranks but its own a token goes on average, by layer [L]."""

    bits_per_byte: float
    snr: float
    other_ranks: np.ndarray


def compare(model, reference: list[np.ndarray], inputs, scored, *, batch: int = 32) -> Report:
    """Scores a model made by `count_ranks` and compares its logits with `reference`, one array for each batch of
    windows.

    SNR = 10 log10(sum r**2 / sum (y - r)**2) over the logits of scored bytes, each row's mean taken out because softmax
    ignores it. An empty `reference` is filled with this model's logits, and its own SNR is infinite.
    """
    fill, nats, signal, noise, ranks = not reference, 0.0, 0.0, 0.0, []
    for index, (i, s) in enumerate(_batches(inputs, scored, batch)):
        loss, logits, other_ranks = _score(model, i, s)
        logits = np.asarray(logits)[s]  # [scored, V]
        logits -= logits.mean(axis=-1, keepdims=True)
        if fill:
            reference.append(logits)
        nats += float(loss)
        signal += float(np.square(reference[index]).sum())
        noise += float(np.square(logits - reference[index]).sum())
        ranks.append(np.asarray(other_ranks))
    snr = 10 * np.log10(signal / noise) if noise else np.inf
    return Report(nats / np.log(2) / scored.sum(), snr, np.mean(ranks, axis=0))
