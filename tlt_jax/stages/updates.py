"""From a rollout to updates of the policy: minibatches, packing, metrics."""

from typing import Any

import numpy as np

from tlt_jax.data import pack_sequences
from tlt_jax.decode.rollout import Rollout
from tlt_jax.parallel.hosts import to_host
from tlt_jax.parallel.sharding import put_batch
from tlt_jax.stages.loop import Step


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
) -> tuple[Any, dict[str, float]]:
    """Updates on shuffled minibatches, some epochs over, as the phase's config has it; the mean of their metrics.
    `frozen` are models that they see beside those that they train.

    The sequences [B, T] of `lengths` [B] are packed: an update computes little but their tokens.

    Before the first update the policy is the one that sampled: how far its log-probs are from the recorded ones there
    is the mismatch between decoding and scoring, over the first minibatch: `rollout/logprob_abs_diff_max`, and
    `rollout/logprob_kl`, the KL from what sampled to what scores (k3), in nats a token.
    """
    run, config, rows = phase.run, phase.config, len(lengths)
    parts = run.mesh.shape["data"] * run.mesh.shape["fsdp"] * config.accumulation
    shuffle = np.random.default_rng([run.config.run.seed, step.index, rows])
    collected = []
    for _ in range(config.epochs):
        for part in np.split(shuffle.permutation(rows), config.minibatches):
            packed = pack_sequences({name: array[part] for name, array in batch.items()}, lengths[part], parts)
            minibatch = put_batch(run.mesh, microbatches(packed, config.accumulation), leading=1)
            train, metrics = phase.update(train, minibatch, np.float32(step.progress), frozen)
            collected.append(metrics)
    fetched = to_host(collected)
    mean = {name: float(np.mean([m[name] for m in fetched])) for name in fetched[0] if name != "rl/logp_diff_max"}
    mismatch = {"rollout/logprob_abs_diff_max": "rl/logp_diff_max", "rollout/logprob_kl": "rl/approx_kl"}
    return train, mean | {name: float(fetched[0][found]) for name, found in mismatch.items()}


def microbatches(batch: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Arrays [rows, ...] as [count, rows / count, ...]."""
    return {name: array.reshape(count, -1, *array.shape[1:]) for name, array in batch.items()}


def kl_metrics(rollout: Rollout, ref_logp_BT: np.ndarray) -> dict[str, float]:
    """KL to the reference from the sampled tokens (k1): nats a sequence, and nats a token."""
    mask = rollout.completion_mask_BT
    difference = ((rollout.policy_logp_BT - ref_logp_BT) * mask).sum(axis=1)
    return {"rl/kl": float(difference.mean()), "rl/kl_per_token": float(difference.sum() / max(mask.sum(), 1.0))}
