"""Training the drafters on what the policy writes: beside its own updates, or alone. No gradient reaches the policy.

Shape suffixes: A microbatches, B rows, T positions, S = T - 1 positions that predict a next token, D width,
V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.models.heads import ShallowExit, exit_logits
from tlt_jax.models.transformer import Transformer, hidden_states, logits
from tlt_jax.train.eagle_loss import Chains, acceptance_loss, chain_batch, chain_metrics
from tlt_jax.train.losses import weighted_sum
from tlt_jax.train.step import Batch, Metrics, Objective, normalised

INPUTS = "tokens", "segments", "positions"


class DrafterTerms(NamedTuple):
    """Which drafters are trained, at which sampling temperature: the exit if its weight is above 0, eagle if it has
    chains, the draft model if so told."""

    temperature: float
    exit_weight: float
    chains: Chains | None = None
    draft_model: bool = False


def predicting(b: Batch) -> Batch:
    """Tokens, segments and positions [B, S] of the places that predict a token."""
    return {name: b[name][:, :-1] for name in INPUTS}


def drafters_batch(batch: Batch, terms: DrafterTerms, step: jax.Array) -> Batch:
    """What an update's batch of packed sequences, with "weights" [A, B, T], needs for `drafter_losses`."""
    if terms.chains is None:
        return {}
    segments = {"segments": batch["segments"][..., :-1]}
    return chain_batch(segments, batch["weights"][..., 1:], terms.chains, step)


def drafter_losses(
    params: dict[str, Any],
    terms: DrafterTerms,
    states: tuple[jax.Array, jax.Array],
    log_probs_BSV: jax.Array,
    b: Batch,
    weights_BS: jax.Array,
) -> tuple[jax.Array, Metrics]:
    """(loss, metrics) of the drafters among `params`. `states` are what left the policy's exit layer and its last one,
    `log_probs` its own at the temperature; `b` is a microbatch with `drafters_batch`."""
    total, metrics = jnp.float32(0.0), {}
    if terms.exit_weight:
        metrics["train/exit_loss"], metrics["train/exit_acceptance"] = exit_distillation(
            params["policy"], params["exit"], states[0], log_probs_BSV, terms.temperature, weights_BS
        )
        total += terms.exit_weight * metrics["train/exit_loss"]
    if terms.chains is not None:
        metrics |= chain_metrics(params, states, {**b, **predicting(b)}, terms.chains, terms.temperature)
        total += metrics["train/eagle_loss"]
    if terms.draft_model:
        metrics |= draft_model_metrics(params["draft_model"], b, log_probs_BSV, terms.temperature, states[1].dtype)
        total += metrics["train/draft_model_loss"]
    return total, metrics


def draft_model_metrics(
    model: Transformer, b: Batch, log_probs_BSV: jax.Array, temperature: float, dtype: jnp.dtype
) -> Metrics:
    """`train/draft_model_loss`, to be added to the loss of a microbatch, and `train/draft_model_acceptance`: of the
    draft model against the policy's own distribution, weighted sums of `acceptance_loss`. Nothing reaches the policy.
    """
    with jax.named_scope("draft_model_loss"):
        weights_BS = b["weights"][:, 1:]
        _, x_BSD = hidden_states(model, *predicting(b).values(), dtype=dtype)
        q_log_BSV = jax.nn.log_softmax(logits(model, x_BSD) / temperature, axis=-1)
        found = acceptance_loss(jax.lax.stop_gradient(log_probs_BSV), q_log_BSV)
        loss, acceptance = (weighted_sum(values_BS, weights_BS) for values_BS in found)
        return {"train/draft_model_loss": loss, "train/draft_model_acceptance": acceptance}


def exit_distillation(
    policy: Transformer,
    exit: ShallowExit,
    x_exit_BSD: jax.Array,
    log_probs_BSV: jax.Array,
    temperature: float,
    weights_BS: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(loss, acceptance) of the exit against the policy's own distribution, as weighted sums.

    loss: cross-entropy from the policy's distribution to the exit's, nats. acceptance: 1 - total variation, the chance
    that one drafted token stands (Leviathan et al. 2023). No gradient reaches the policy.
    """
    with jax.named_scope("exit_loss"):
        frozen = jax.lax.stop_gradient(policy)
        q_log_BSV = jax.nn.log_softmax(
            exit_logits(frozen, exit, jax.lax.stop_gradient(x_exit_BSD)) / temperature, axis=-1
        )
        p_BSV = jnp.exp(jax.lax.stop_gradient(log_probs_BSV))
        overlap_BS = jnp.sum(jnp.minimum(p_BSV, jnp.exp(jax.lax.stop_gradient(q_log_BSV))), axis=-1)
        return weighted_sum(-jnp.sum(p_BSV * q_log_BSV, axis=-1), weights_BS), weighted_sum(overlap_BS, weights_BS)


def distillation_objective(terms: DrafterTerms, *, dtype: jnp.dtype) -> Objective:
    """The drafters' losses on completions of the policy, which is frozen: it stands in "policy", and is not trained.

    Batch, each [A, B, T]: tokens, segments, positions of packed sequences; weights; old_logp, and in "sampled" the
    weights of the tokens of which that is the log-prob at the temperature: those that were not greedy. What speaks of
    a token stands at its position. Also how far these log-probs are from those of this forward pass.
    """

    def prepare(batch: Batch, step: jax.Array) -> Batch:
        weights = {name: normalised(batch[name]) for name in ("weights", "sampled")}
        return {**batch, **weights, **drafters_batch(batch, terms, step)}

    def loss(params: dict[str, Any], b: Batch) -> tuple[jax.Array, Metrics]:
        policy = params["policy"]
        states = hidden_states(policy, *predicting(b).values(), dtype=dtype)
        log_probs_BSV = jax.nn.log_softmax(logits(policy, states[1]) / terms.temperature, axis=-1)
        total, metrics = drafter_losses(params, terms, states, log_probs_BSV, b, b["weights"][:, 1:])
        logp_BS = jnp.take_along_axis(log_probs_BSV, b["tokens"][:, 1:, None], axis=-1)[..., 0]
        sampled_BS = b["sampled"][:, 1:]
        difference_BS = jnp.where(sampled_BS > 0, logp_BS - b["old_logp"][:, 1:], 0.0)
        metrics["rl/logp_diff_max"] = jnp.max(jnp.abs(difference_BS))
        metrics["rl/approx_kl"] = weighted_sum(jnp.expm1(difference_BS) - difference_BS, sampled_BS)
        return total, metrics

    return Objective(prepare, loss)
