"""Held-out figures: loss and bits per byte, and completions of held-out prompts."""

import math
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from tlt_jax.data import PackedRows, held_out_batches
from tlt_jax.models.transformer import hidden_states, logits
from tlt_jax.parallel.hosts import to_host
from tlt_jax.parallel.sharding import put_batch
from tlt_jax.rl.rewards import Completion, quality
from tlt_jax.stages.models import Models
from tlt_jax.stages.rollouts import Sampler, batch_rows, real_sequences, request_seeds
from tlt_jax.stages.run import Run
from tlt_jax.train.losses import cross_entropy, weighted_sum


class Evaluation(NamedTuple):
    """What was found of a policy's completions."""

    metrics: dict[str, float]
    completions: list[Completion]
    valid: np.ndarray


class HeldOutLoss:
    """Mean next-token loss of a policy on the first rows of a packed held-out set."""

    def __init__(self, run: Run, rows: PackedRows, limit: int | None):
        self.run, self.rows, self.limit = run, rows, limit
        self.batch_size = batch_rows(run.config.evaluation.batch_size, run.mesh)
        self._sums = jax.jit(partial(_loss_sums, dtype=run.dtype))

    def __call__(self, policy: Any) -> float:
        """Nats a token."""
        batches = held_out_batches(self.rows, self.batch_size, self.limit)
        with jax.set_mesh(self.run.mesh):
            sums = [
                self._sums(policy, put_batch(self.run.mesh, {name: a[0] for name, a in batch.items()}))
                for batch in batches
            ]
        total, tokens = np.sum(np.asarray(to_host(sums), np.float64), axis=0)
        return float(total / max(tokens, 1.0))


def bits_per_byte(run: Run, rows: PackedRows, limit: int, nats_per_token: float) -> float:
    """The loss of the first `limit` rows in bits a byte of the text that their targets stand for."""
    counted = rows.weights[:limit] > 0
    texts = (
        run.corpus.tokenizer.decode(targets[inside]) for targets, inside in zip(rows.targets, counted, strict=False)
    )
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    return nats_per_token / math.log(2.0) * float(counted.sum()) / max(size, 1)


def _loss_sums(policy: Any, batch: dict[str, jax.Array], dtype: Any) -> tuple[jax.Array, jax.Array]:
    _, x_BSD = hidden_states(policy, batch["tokens"], batch["segments"], batch["positions"], dtype=dtype)
    losses_BS = cross_entropy(logits(policy, x_BSD), batch["targets"])
    return weighted_sum(losses_BS, batch["weights"]), batch["weights"].sum()


def evaluate_completions(
    run: Run, sampler: Sampler, models: Models, stage: str, phase: str, when: str
) -> dict[str, float]:
    """Completes held-out prompts with the config's sampling and judges them.

    The prompts and their seeds are the same at every evaluation of a run. Shares are of all the completions; a
    completion counts as distinct if no other has the same tokens. Also the real completions' likelihood.
    """
    tasks = run.corpus.held_out_tasks
    count = min(run.config.evaluation.prompts, len(tasks))
    indices = np.random.default_rng(run.config.run.seed).permutation(len(tasks))[:count]
    # One phase ends with the policy that the next begins with: what was found then holds.
    found = sampler.remembered(models, lambda: _complete(run, sampler, models, indices))
    _write_samples(run, stage, phase, when, found)
    return found.metrics


def _complete(run: Run, sampler: Sampler, models: Models, indices: np.ndarray) -> Evaluation:
    tasks, count = run.corpus.held_out_tasks, len(indices)
    start = time.monotonic()
    rollout = sampler.rollout(
        models, [tasks.prompts[i] for i in indices], request_seeds(run.config.run.seed, "evaluate", 0, count)
    )
    metrics = sampler.metrics(rollout, time.monotonic() - start)
    completions = sampler.completions(rollout, tasks, indices)
    valid = quality(completions, sampler.engine.draft_length) >= 1.0
    judged = {
        "eval/valid_fraction": float(valid.mean()),
        "eval/distinct_fraction": len({c.tokens.tobytes() for c in completions}) / count,
        "eval/body_nats_per_token": _real_nats(run, sampler, models, indices),
    }
    return Evaluation(judged | metrics, completions, valid)


def _real_nats(run: Run, sampler: Sampler, models: Models, indices: np.ndarray) -> float:
    """-log p of the real completions' tokens, EOS included, at the sampling temperature; nats a token."""
    limits = run.config.data.tasks
    tokens, prompt_length, length = real_sequences(
        run.corpus.held_out_tasks, indices, limits.max_prompt_tokens + limits.max_completion_tokens
    )
    logp = sampler.log_probs(models.policy, tokens, length)
    position = np.arange(tokens.shape[1])
    inside = (position >= prompt_length[:, None]) & (position < length[:, None])
    return float(-logp[inside].mean())


def _write_samples(run: Run, stage: str, phase: str, when: str, found: Evaluation) -> None:
    for c, valid in list(zip(found.completions, found.valid, strict=True))[: run.config.run.samples]:
        row = {"step": run.step, "stage": stage, "phase": phase, "when": when}
        texts = {"prompt": c.prompt, "completion": c.text, "reference": c.reference}
        run.samples.append({**row, **texts, "valid": bool(valid), "ended": c.ended})
