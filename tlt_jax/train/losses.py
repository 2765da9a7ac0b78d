"""Supervised losses: next-token cross-entropy, at the end and at an early exit.

Shape suffixes: B rows, S sequence, D width, V vocabulary, P the positions that the exit's loss looks at.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from tlt_jax.models.heads import exit_states
from tlt_jax.models.transformer import head_matrix, hidden_states, normed
from tlt_jax.train.eagle_loss import Chains, chain_batch, chain_metrics
from tlt_jax.train.head_loss import chunked_cross_entropy
from tlt_jax.train.step import Batch, Metrics, Objective, normalised


def cross_entropy(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """-log softmax(logits)[target], nats, [B, S]."""
    target_BS = jnp.take_along_axis(logits_BSV, targets_BS[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits_BSV, axis=-1) - target_BS


def weighted_sum(values: jax.Array, weights: jax.Array) -> jax.Array:
    """sum(values * weights), where a value of weight 0 may be anything, NaN included."""
    return jnp.sum(jnp.where(weights > 0, values, 0.0) * weights)


def next_token_objective(
    *,
    dtype: jnp.dtype,
    remat: str,
    exit_weight: float,
    exit_stride: int,
    loss_chunk: int = 0,
    chains: Chains | None = None,
) -> Objective:
    """Cross-entropy at the last layer plus `exit_weight` times that at the exit (LayerSkip, Elhoushi et al. 2024).

    Batch: tokens, targets, segments, positions (int32) and weights (0 or 1), each [A, B, S]. The exit looks at every
    `exit_stride`-th position, from an offset that moves with the step. Roles: policy, exit where its weight is above 0,
    and eagle where it has `chains`, whose loss reaches nothing else. All losses are means over the tokens of weight 1
    that they look at, over the whole update. The logits of `loss_chunk` positions of a row are there at once (0: of
    all).
    """

    def prepare(batch: Batch, step: jax.Array) -> Batch:
        at_exit = batch["weights"].reshape(*batch["weights"].shape[:2], -1, exit_stride)[..., step % exit_stride]
        offset = jnp.full(batch["weights"].shape[:1], step % exit_stride)
        of_exit = {"exit_weights": normalised(at_exit), "offset": offset}
        of_eagle = {} if chains is None else chain_batch(batch, batch["weights"], chains, step)
        return {**batch, "weights": normalised(batch["weights"]), **of_exit, **of_eagle}

    def loss(params: dict[str, Any], b: Batch) -> tuple[jax.Array, Metrics]:
        policy = params["policy"]
        x_exit_BSD, x_BSD = hidden_states(policy, b["tokens"], b["segments"], b["positions"], dtype=dtype, remat=remat)
        with jax.named_scope("loss"):
            main = head_loss(policy, normed(policy, x_BSD), b["targets"], b["weights"], loss_chunk)
        total, metrics = main, {"train/main_loss": main}
        if chains is not None:
            metrics |= chain_metrics(params, (x_exit_BSD, x_BSD), b, chains, 1.0)
            total += metrics["train/eagle_loss"]
        if exit_weight == 0:
            return total, metrics
        with jax.named_scope("exit_loss"):
            x_exit_BPD, targets_BP = (
                _strided(x_exit_BSD, b["offset"], exit_stride),
                _strided(b["targets"], b["offset"], exit_stride),
            )
            y_BPD = exit_states(params["exit"], x_exit_BPD)
            early = head_loss(policy, y_BPD, targets_BP, b["exit_weights"], loss_chunk)
        return total + exit_weight * early, metrics | {"train/exit_loss": early}

    return Objective(prepare, loss)


def head_loss(model: Any, y_BSD: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array, chunk: int) -> jax.Array:
    """The weighted sum of the cross-entropy of the model's head on normalised states, nats; `chunk` positions at a
    time, or as many as divide their number."""
    head_DV = head_matrix(model).astype(y_BSD.dtype)
    length = y_BSD.shape[1]
    return chunked_cross_entropy(y_BSD, head_DV, targets_BS, weights_BS, math.gcd(chunk, length) if chunk else length)


def _strided(x: jax.Array, offset: jax.Array, stride: int) -> jax.Array:
    rows, length, *rest = x.shape
    return jnp.take(x.reshape(rows, length // stride, stride, *rest), offset, axis=2)
