"""Stage 2: a supervised warm-up on tasks, then group-relative policy optimisation on rewards that can be checked."""

import time
from typing import Any

import numpy as np

from tlt_jax.data import PackedRows, Tasks, pack_examples
from tlt_jax.data import curriculum as curricula
from tlt_jax.rl.advantages import group_advantages, token_weights
from tlt_jax.rl.rewards import score_groups
from tlt_jax.stages.evaluate import HeldOutLoss, evaluate_completions
from tlt_jax.stages.loop import Phase, PhaseState, Step, models_of, run_phase
from tlt_jax.stages.models import Models, by_role, untrained
from tlt_jax.stages.rollouts import Sampler, request_seeds
from tlt_jax.stages.run import Run
from tlt_jax.stages.supervised import Supervised
from tlt_jax.stages.training import group_policy_training
from tlt_jax.stages.updates import kl_metrics, rollout_batch, run_updates


class Warmup(Supervised):
    """Supervised warm-up: next-token loss on the completions alone, until it stops falling or its share is used."""

    stage, name, section = "finetune", "warmup", "finetune.warmup"

    def __init__(self, run: Run, sampler: Sampler):
        config, context = run.config.finetune.warmup, run.config.data.context_length
        rows = _packed(run.corpus.train_tasks, context)
        super().__init__(run, sampler, config, rows, run.config.run.seed + 1)
        self.patience, self.end = config.patience, config.share
        self.held_out = HeldOutLoss(run, _packed(run.corpus.held_out_tasks, context), None)

    def init(self, models: Models) -> PhaseState:
        state = super().init(models)
        return PhaseState(state.arrays, {**state.host, "best_loss": None, "worse": 0})

    def evaluate(self, state: PhaseState, when: str) -> tuple[PhaseState, dict[str, float]]:
        loss = self.held_out(models_of(state).policy)
        best = state.host["best_loss"]
        better = best is None or loss < best
        host = {**state.host, "best_loss": loss if better else best, "worse": 0 if better else state.host["worse"] + 1}
        metrics = {"eval/loss": loss}
        if when != "during":
            metrics |= evaluate_completions(self.run, self.sampler, models_of(state), self.stage, self.name, when)
        return PhaseState(state.arrays, host), metrics

    def ended(self, state: PhaseState) -> bool:
        return state.host["worse"] >= self.patience


class GroupPolicy(Phase):
    """Group-relative policy optimisation, with a curriculum from short completions to all."""

    stage, name = "finetune", "policy"

    def __init__(self, run: Run, sampler: Sampler):
        self.config = config = run.config.finetune.policy
        self.run, self.sampler, self.eval_every = run, sampler, config.eval_every
        self.training = group_policy_training(run.config, run.shape, run.mesh)
        self.update = self.training.update()
        self.lengths = np.array([len(c) for c in run.corpus.train_tasks.completions])

    def init(self, models: Models) -> PhaseState:
        train = self.training.new_state(by_role(models))
        arrays = {"train": train, "reference": models.policy, **untrained(models, self.training.roles)}
        return PhaseState(arrays, {"curriculum": curricula.Curriculum().to_dict()})

    def shapes(self) -> dict[str, Any]:
        models, train = self.training.abstract_models(), self.training.abstract_state()
        return {"train": train, "reference": models.policy, **untrained(models, self.training.roles)}

    def step(self, state: PhaseState, step: Step) -> tuple[PhaseState, dict[str, Any], int]:
        run, config, started = self.run, self.config, time.monotonic()
        progress = curricula.from_dict(state.host["curriculum"])
        allowed = curricula.eligible(self.lengths, progress.phase, config.curriculum.phases)
        chosen = curricula.draw(allowed, config.prompts, run.config.run.seed, step.index)
        with run.timed("rollout"):
            prompts = [run.corpus.train_tasks.prompts[i] for i in np.repeat(chosen, config.group_size)]
            rollout = self.sampler.rollout(
                models_of(state), prompts, request_seeds(run.config.run.seed, self.name, step.index, len(prompts))
            )
        rolled = time.monotonic()
        with run.timed("reward"):
            completions = self.sampler.completions(
                rollout, run.corpus.train_tasks, np.repeat(chosen, config.group_size)
            )
            rewards, parts = score_groups(
                completions, config.group_size, config.rewards, self.sampler.engine.draft_length
            )
            advantages, equal = group_advantages(rewards, config.group_size, config.normalize_by_std)
            ref_logp = self.sampler.log_probs(state.arrays["reference"], rollout.tokens_BT, rollout.length_B)
        rewarded = time.monotonic()
        with run.timed("update"):
            mask = rollout.completion_mask_BT
            batch = rollout_batch(rollout, token_weights(mask, config.aggregation)) | {
                "advantages": advantages[:, None] * mask,
                "ref_logp": ref_logp * mask,
            }
            exact = run.config.rollout.exact_logprobs
            train, metrics = run_updates(self, state.arrays["train"], batch, rollout.length_B, step, exact=exact)
        success = float((parts["quality"] >= 1.0).mean())
        progress = curricula.advance(progress, success, config.curriculum)
        metrics |= self.sampler.metrics(rollout, rolled - started)
        metrics |= {f"rl/reward_{name}": float(part.mean()) for name, part in parts.items()}
        metrics |= kl_metrics(rollout, ref_logp)
        metrics |= {
            "rl/reward": float(rewards.mean()),
            "rl/reward_std": float(rewards.std()),
            "rl/kl_coef": config.kl_coef,
            "rl/advantage_mean": float(advantages.mean()),
            "rl/advantage_std": float(advantages.std()),
            "rl/zero_std_groups": equal,
            "rl/success": success,
            "rl/curriculum_phase": progress.phase + 1,
            "time/rollout": rolled - started,
            "time/reward": rewarded - rolled,
            "time/update": time.monotonic() - rewarded,
            "time/step": time.monotonic() - started,
        }
        state = PhaseState({**state.arrays, "train": train}, {"curriculum": progress.to_dict()})
        return state, metrics, int(rollout.completion_length_B.sum())

    def evaluate(self, state: PhaseState, when: str) -> tuple[PhaseState, dict[str, float]]:
        return state, evaluate_completions(self.run, self.sampler, models_of(state), self.stage, self.name, when)


def _packed(tasks: Tasks, context: int) -> PackedRows:
    """The tasks as packed rows whose loss is on the completions alone."""
    examples = [
        (np.concatenate([prompt, completion]), np.concatenate([np.zeros(len(prompt)), np.ones(len(completion))]))
        for prompt, completion in zip(tasks.prompts, tasks.completions, strict=True)
    ]
    return pack_examples(examples, context)


def run_finetune(run: Run, sampler: Sampler) -> None:
    """Runs the stage, from the run's models to the run's models."""
    run_phase(run, Warmup(run, sampler))
    run_phase(run, GroupPolicy(run, sampler))
