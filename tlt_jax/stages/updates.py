"""From a rollout to updates of the policy: minibatches, packing, metrics."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from tlt_jax.data import pack_sequences
from tlt_jax.decode.rollout import Rollout
from tlt_jax.parallel.hosts import to_host
from tlt_jax.parallel.sharding import put_batch
from tlt_jax.stages.loop import Step
from tlt_jax.train.step import EACH


def rollout_batch(rollout: Rollout, weights_BT: np.ndarray) -> dict[str, np.ndarray]:
    """What every policy update needs of a rollout, [B, T]."""
    return {"tokens": rollout.tokens_BT, "weights": weights_BT, "old_logp": rollout.policy_logp_BT}


def run_updates(
    phase: Any,
    train: Any,
    batch: dict[str, np.ndarray],
    lengths: np.ndarray,
    step: Step,
    frozen: dict[str, Any] | None = None,
    exact: bool = False,
) -> tuple[Any, dict[str, float]]:
    """Updates on shuffled minibatches, some epochs over, as the phase's config has it; the mean of their metrics.
    `frozen` are models that they see beside those that they train.

    The sequences [B, T] of `lengths` [B] are packed: an update computes little but their tokens.

    Before the first update the policy is the one that sampled: how far its log-probs are from the recorded ones there
    is the mismatch between decoding and scoring, over the first minibatch: `rollout/logprob_abs_diff_max`, and
    `rollout/logprob_kl`, the KL from what sampled to what scores (k3), in nats a token. `exact` has the recorded ones
    replaced before by what the update's own program makes of the first epoch's minibatches, so that the mismatch is 0,
    and tells what it was as `rollout/decoded_logprob_abs_diff_max`, over all of them.
    """
    run, config, rows = phase.run, phase.config, len(lengths)
    parts = run.mesh.shape["data"] * run.mesh.shape["fsdp"] * config.accumulation
    shuffle = np.random.default_rng([run.config.run.seed, step.index, rows])
    epochs = [np.split(shuffle.permutation(rows), config.minibatches) for _ in range(config.epochs)]

    def update(train: Any, part: np.ndarray, batch: dict[str, np.ndarray], *dry: Any) -> tuple[Any, dict[str, Any]]:
        packed = pack_sequences({name: array[part] for name, array in batch.items()}, lengths[part], parts)
        minibatch = put_batch(run.mesh, microbatches(packed, config.accumulation), leading=1)
        return phase.update(train, minibatch, np.float32(step.progress), frozen, *dry)

    known: dict[str, float] = {}
    if exact:
        train, batch, known = _rescored(train, batch, lengths, epochs[0], parts, update)
    collected = []
    for part in chain.from_iterable(epochs):
        train, metrics = update(train, part, batch, *([np.bool_(False)] if exact else []))
        collected.append({name: value for name, value in metrics.items() if not name.startswith(EACH)})
    fetched = to_host(collected)
    mean = {name: float(np.mean([m[name] for m in fetched])) for name in fetched[0] if name != "rl/logp_diff_max"}
    mismatch = {"rollout/logprob_abs_diff_max": "rl/logp_diff_max", "rollout/logprob_kl": "rl/approx_kl"}
    return train, mean | known | {name: float(fetched[0][found]) for name, found in mismatch.items()}


def _rescored(
    train: Any,
    batch: dict[str, np.ndarray],
    lengths: np.ndarray,
    minibatches: Sequence[np.ndarray],
    parts: int,
    update: Callable[..., tuple[Any, dict[str, Any]]],
) -> tuple[Any, dict[str, np.ndarray], dict[str, float]]:
    """(the training state, unchanged; the batch with the update's own log-probs as "old_logp"; by how much these
    differ from the ones before).

    An update's program is run dry, not a smaller one that scores alone: XLA fuses that otherwise, and a third of the
    tokens come out different in the last bits.
    """
    weighed = batch["weights"] != 0
    place_BT = np.arange(1, weighed.size + 1).reshape(weighed.shape)
    rescored_BT = np.zeros_like(batch["old_logp"])
    for part in minibatches:
        train, metrics = update(train, part, batch, np.bool_(True))
        place = pack_sequences({"place": place_BT[part]}, lengths[part], parts)["place"]
        logp = to_host(metrics[EACH + "logp"]).reshape(place.shape)
        rescored_BT.flat[place[place > 0] - 1] = logp[place > 0]
    rescored_BT = np.where(weighed, rescored_BT, batch["old_logp"])
    difference = np.abs(rescored_BT - batch["old_logp"]).max()
    return train, {**batch, "old_logp": rescored_BT}, {"rollout/decoded_logprob_abs_diff_max": float(difference)}


def microbatches(batch: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Arrays [rows, ...] as [count, rows / count, ...]."""
    return {name: array.reshape(count, -1, *array.shape[1:]) for name, array in batch.items()}


def kl_metrics(rollout: Rollout, ref_logp_BT: np.ndarray) -> dict[str, float]:
    """KL to the reference from the sampled tokens (k1): nats a sequence, and nats a token."""
    mask = rollout.completion_mask_BT
    difference = ((rollout.policy_logp_BT - ref_logp_BT) * mask).sum(axis=1)
    return {"rl/kl": float(difference.mean()), "rl/kl_per_token": float(difference.sum() / max(mask.sum(), 1.0))}
