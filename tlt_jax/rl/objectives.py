"""What the reinforcement-learning phases minimise, as `Objective`s of the shared update step.

Shape suffixes: B sequences, T positions of a sequence, S = T - 1 positions that predict a next token, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.models.heads import scalars
from tlt_jax.models.transformer import hidden_states, logits
from tlt_jax.rl.losses import bradley_terry_loss, clipped_policy_loss, clipped_value_loss, entropy, kl_estimate
from tlt_jax.train.distillation import INPUTS, DrafterTerms, drafter_losses, drafters_batch, predicting
from tlt_jax.train.losses import weighted_sum
from tlt_jax.train.step import Batch, Metrics, Objective, normalised


class PolicyTerms(NamedTuple):
    """Static weights and ranges of a policy update; a weight of 0 leaves its term out of the program."""

    clip_low: float
    clip_high: float
    drafters: DrafterTerms
    entropy_coef: float
    kl_coef: float = 0.0
    kl_estimator: str = "k2"
    value_coef: float = 0.0
    value_clip: float = 0.2
    with_logp: bool = False


def policy_objective(terms: PolicyTerms, *, dtype: jnp.dtype, remat: str) -> Objective:
    """Clipped policy loss + KL to the reference - entropy bonus + clipped value loss + the drafters' distillation.

    Batch, each [A, B, T]: tokens, segments, positions of packed sequences; weights, advantages, old_logp, and as the
    terms need them ref_logp, old_values, returns, at the position of the token they speak of. The weight of a
    sequence's first token is 0. Roles: policy; value if value_coef; exit and eagle as `drafters` says. Log-probs
    divide the logits by the drafters' temperature, which is that of sampling; values never see it. Terms `with_logp`
    have the tokens' log-probs come back as "each/logp", [A, B, T], 0 at position 0.
    """

    def prepare(batch: Batch, step: jax.Array) -> Batch:
        of_drafters = drafters_batch(batch, terms.drafters, step)
        return {**batch, "weights": normalised(batch["weights"]), **of_drafters}

    def loss(params: dict[str, Any], b: Batch) -> tuple[jax.Array, Metrics]:
        policy = params["policy"]
        # What speaks of token t stands at t; the state that predicts it stands at t - 1.
        x_exit_BSD, x_BSD = hidden_states(policy, *predicting(b).values(), dtype=dtype, remat=remat)
        at_token = {name: b[name][:, 1:] for name in b.keys() - {*INPUTS, "eagle_weights", "eagle_offset"}}
        weights_BS = at_token["weights"]
        # What has no weight may hold anything: cleared here, it reaches neither loss nor gradient.
        at_token = {name: jnp.where(weights_BS > 0, array, 0.0) for name, array in at_token.items()}
        with jax.named_scope("policy_loss"):
            log_probs_BSV = jax.nn.log_softmax(logits(policy, x_BSD) / terms.drafters.temperature, axis=-1)
            logp_BS = jnp.take_along_axis(log_probs_BSV, b["tokens"][:, 1:, None], axis=-1)[..., 0]
            each_BS, diagnostics = clipped_policy_loss(
                logp_BS, at_token["old_logp"], at_token["advantages"], terms.clip_low, terms.clip_high
            )
            entropy_BS = entropy(log_probs_BSV)
        total = policy_loss = weighted_sum(each_BS, weights_BS)
        metrics = {"rl/policy_loss": policy_loss, "rl/entropy": weighted_sum(entropy_BS, weights_BS)}
        metrics |= {name: weighted_sum(value_BS, weights_BS) for name, value_BS in diagnostics.items()}
        metrics["rl/logp_diff_max"] = jnp.max(jnp.where(weights_BS > 0, jnp.abs(logp_BS - at_token["old_logp"]), 0.0))
        if terms.with_logp:
            metrics["each/logp"] = jnp.pad(logp_BS, ((0, 0), (1, 0)))
        if terms.entropy_coef:
            total -= terms.entropy_coef * metrics["rl/entropy"]
        if terms.kl_coef:
            total += terms.kl_coef * weighted_sum(
                kl_estimate(logp_BS, at_token["ref_logp"], terms.kl_estimator), weights_BS
            )
        if terms.value_coef:
            with jax.named_scope("value_loss"):
                values_BS = scalars(params["value"], policy, x_BSD)
                value_loss = clipped_value_loss(
                    values_BS, at_token["old_values"], at_token["returns"], terms.value_clip
                )
            metrics["rl/value_loss"] = weighted_sum(value_loss, weights_BS)
            total += terms.value_coef * metrics["rl/value_loss"]
        of_drafters, found = drafter_losses(params, terms.drafters, (x_exit_BSD, x_BSD), log_probs_BSV, b, weights_BS)
        return total + of_drafters, metrics | found

    return Objective(prepare, loss)


def sequence_log_probs(
    model: Any, tokens_BT: jax.Array, segments_BT: jax.Array, *, temperature: float, dtype: jnp.dtype
) -> jax.Array:
    """log p(token t | tokens before it) at the temperature, [B, T]; 0 at position 0, meaningless on padding."""
    x_BSD = _predicting_states(model, tokens_BT, segments_BT, dtype)
    log_probs_BSV = jax.nn.log_softmax(logits(model, x_BSD) / temperature, axis=-1)
    logp_BS = jnp.take_along_axis(log_probs_BSV, tokens_BT[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(logp_BS, ((0, 0), (1, 0)))


def _predicting_states(model: Any, tokens_BT: jax.Array, segments_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What leaves the last layer [B, T - 1, D] of right-padded sequences, at the positions that predict a token."""
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    return hidden_states(model, tokens_BT[:, :-1], segments_BT[:, :-1], positions_BT[:, :-1], dtype=dtype)[1]


def sequence_values(
    model: Any, head: Any, tokens_BT: jax.Array, segments_BT: jax.Array, *, dtype: jnp.dtype
) -> jax.Array:
    """The value of the state in which token t is chosen, [B, T]; 0 at position 0."""
    x_BSD = _predicting_states(model, tokens_BT, segments_BT, dtype)
    return jnp.pad(scalars(head, model, x_BSD), ((0, 0), (1, 0)))


def sequence_rewards(
    model: Any, head: Any, tokens_BT: jax.Array, length_B: jax.Array, *, dtype: jnp.dtype, remat: str = "none"
) -> jax.Array:
    """The reward model's score of each whole sequence, [B], read at its last real token."""
    position_T = jnp.arange(tokens_BT.shape[1])
    segments_BT = (position_T < length_B[:, None]).astype(jnp.int32)
    positions_BT = jnp.broadcast_to(position_T, tokens_BT.shape)
    _, x_BTD = hidden_states(model, tokens_BT, segments_BT, positions_BT, dtype=dtype, remat=remat)
    scores_BT = scalars(head, model, x_BTD)
    return jnp.take_along_axis(scores_BT, length_B[:, None] - 1, axis=1)[:, 0]


def reward_objective(*, dtype: jnp.dtype, remat: str) -> Objective:
    """Bradley-Terry on pairs. Batch, [A, B, T]: chosen, rejected; [A, B]: chosen_length, rejected_length, weights.

    Roles: reward_trunk (a transformer) and reward (its scalar head).
    """

    def prepare(batch: Batch, step: jax.Array) -> Batch:
        return {**batch, "weights": normalised(batch["weights"])}

    def loss(params: dict[str, Any], b: Batch) -> tuple[jax.Array, Metrics]:
        both_BT = jnp.concatenate([b["chosen"], b["rejected"]])
        lengths_B = jnp.concatenate([b["chosen_length"], b["rejected_length"]])
        scores_B = sequence_rewards(
            params["reward_trunk"], params["reward"], both_BT, lengths_B, dtype=dtype, remat=remat
        )
        chosen_B, rejected_B = jnp.split(scores_B, 2)
        accuracy = weighted_sum((chosen_B > rejected_B).astype(jnp.float32), b["weights"])
        return weighted_sum(bradley_terry_loss(chosen_B, rejected_B), b["weights"]), {"train/pair_accuracy": accuracy}

    return Objective(prepare, loss)
