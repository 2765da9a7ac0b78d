"""Stage 3: a reward model, then proximal policy optimisation against it, held near the frozen reference."""

import time
from functools import partial
from typing import Any

import jax
import numpy as np

from tlt_jax.data import curriculum as curricula
from tlt_jax.models.declare import initialise
from tlt_jax.rl.advantages import gae, token_weights, whiten
from tlt_jax.rl.kl import next_kl_coef, penalised_rewards, sequence_scores
from tlt_jax.rl.objectives import sequence_log_probs, sequence_rewards, sequence_values
from tlt_jax.rl.rewards import quality
from tlt_jax.stages.evaluate import evaluate_completions
from tlt_jax.stages.loop import Phase, PhaseState, Step, models_of, run_phase
from tlt_jax.stages.models import Models, by_role, untrained
from tlt_jax.stages.reward_model import RewardModel, scaled
from tlt_jax.stages.rollouts import Sampler, by_batches, request_seeds, segments
from tlt_jax.stages.run import Run
from tlt_jax.stages.training import ppo_training
from tlt_jax.stages.updates import kl_metrics, rollout_batch, run_updates


class PPO(Phase):
    """Proximal policy optimisation (Schulman et al. 2017; for language models Ziegler et al. 2019)."""

    stage, name = "align", "ppo"

    def __init__(self, run: Run, models: Models, sampler: Sampler, reward: PhaseState):
        self.config = config = run.config.align.ppo
        self.run, self.models, self.sampler, self.eval_every, self.reward = (
            run,
            models,
            sampler,
            config.eval_every,
            reward,
        )
        training = ppo_training(run.config, models.policy.shape, run.mesh)
        self.roles, self.new_state, self.update = training.roles, training.new_state, training.update()
        self._judge = jax.jit(partial(_judge, temperature=run.config.sampling.temperature, dtype=run.dtype))

    def init(self) -> PhaseState:
        value = initialise(self.roles["value"].build, self.run.mesh, jax.random.key(self.run.config.run.seed))
        train = self.new_state({**by_role(self.models), "value": value})
        reward = self.reward.arrays["train"].params
        arrays = {
            "train": train,
            "reference": jax.tree.map(jax.numpy.copy, self.models.policy),
            **untrained(self.models, self.roles),
            "reward_trunk": reward["reward_trunk"],
            "reward": reward["reward"],
        }
        return PhaseState(arrays, {"kl_coef": self.config.kl_coef, **self.reward.host})

    def step(self, state: PhaseState, step: Step) -> tuple[PhaseState, dict[str, Any], int]:
        run, config, started = self.run, self.config, time.monotonic()
        tasks = run.corpus.train_tasks
        chosen = curricula.draw(np.arange(len(tasks)), config.prompts, run.config.run.seed + 1, step.index)
        with run.timed("rollout"):
            seeds = request_seeds(run.config.run.seed, self.name, step.index, len(chosen))
            rollout = self.sampler.rollout(models_of(state), [tasks.prompts[i] for i in chosen], seeds)
        rolled = time.monotonic()
        with run.timed("reward"):
            judged = by_batches(
                run.mesh,
                self.sampler.engine.slots,
                lambda b: self._judge(state.arrays, b),
                {
                    "tokens": rollout.tokens_BT,
                    "segments": segments(rollout.tokens_BT, rollout.length_B),
                    "length": rollout.length_B,
                },
            )
            model_scores = scaled(judged["score"], rollout.completion_length_B, state.host)
            qualities = quality(self.sampler.completions(rollout, tasks, chosen), self.sampler.engine.draft_length)
            scores = sequence_scores(model_scores, qualities, rollout.ended_B, config)
            coef, mask = state.host["kl_coef"], rollout.completion_mask_BT
            rewards_BT = penalised_rewards(
                scores, rollout.policy_logp_BT, judged["ref_logp"], mask, rollout.length_B, coef
            )
            values_BT = judged["values"] * mask
            advantages, returns = gae(rewards_BT, values_BT, mask, config.gamma, config.gae_lambda)
        rewarded = time.monotonic()
        with run.timed("update"):
            batch = rollout_batch(rollout, token_weights(mask, config.aggregation)) | {
                "advantages": whiten(advantages, mask),
                "returns": returns,
                "old_values": values_BT,
            }
            train, metrics = run_updates(self, state.arrays["train"], batch, rollout.length_B, step)
        kl = kl_metrics(rollout, judged["ref_logp"])
        metrics |= self.sampler.metrics(rollout, rolled - started) | kl
        inside = mask > 0
        metrics |= {
            "rl/reward": float(scores.mean()),
            "rl/reward_model": float(model_scores.mean()),
            "rl/reward_quality": float(qualities.mean()),
            "rl/reward_std": float(scores.std()),
            "rl/kl_coef": coef,
            "rl/advantage_mean": float(advantages[inside].mean()),
            "rl/advantage_std": float(advantages[inside].std()),
            "rl/explained_variance": explained_variance(values_BT[inside], returns[inside]),
            "time/rollout": rolled - started,
            "time/reward": rewarded - rolled,
            "time/update": time.monotonic() - rewarded,
            "time/step": time.monotonic() - started,
        }
        host = {**state.host, "kl_coef": next_kl_coef(config, coef, kl["rl/kl"], len(chosen))}
        return PhaseState({**state.arrays, "train": train}, host), metrics, int(rollout.completion_length_B.sum())

    def evaluate(self, state: PhaseState, when: str) -> tuple[PhaseState, dict[str, float]]:
        return state, evaluate_completions(self.run, self.sampler, models_of(state), self.stage, self.name, when)


def _judge(arrays: dict[str, Any], batch: dict[str, jax.Array], temperature: float, dtype: Any) -> dict[str, jax.Array]:
    """The reward model's score [B], the reference's log-probs [B, T] and the values [B, T] of finished sequences."""
    tokens, inside, params = batch["tokens"], batch["segments"], arrays["train"].params
    length = jax.numpy.maximum(batch["length"], 1)
    return {
        "score": sequence_rewards(arrays["reward_trunk"], arrays["reward"], tokens, length, dtype=dtype),
        "ref_logp": sequence_log_probs(arrays["reference"], tokens, inside, temperature=temperature, dtype=dtype),
        "values": sequence_values(params["policy"], params["value"], tokens, inside, dtype=dtype),
    }


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(returns - values) / Var(returns); 0 where the returns do not vary."""
    variance = returns.var()
    return float(1.0 - (returns - values).var() / variance) if variance > 1e-12 else 0.0


def run_align(run: Run, models: Models, sampler: Sampler) -> Models:
    """Runs the stage; the models after it."""
    reward = run_phase(run, RewardModel(run, models, sampler))
    return models_of(run_phase(run, PPO(run, models_of(reward), sampler, reward)))
