"""Stage 3: a reward model, then proximal policy optimisation against it, held near the frozen reference."""

import time
from functools import partial
from typing import Any

import jax
import numpy as np

from tlt_jax.data import curriculum as curricula
from tlt_jax.models.declare import abstract_module, initialise
from tlt_jax.rl.advantages import gae, token_weights, whiten
from tlt_jax.rl.kl import next_kl_coef, penalised_rewards, sequence_scores
from tlt_jax.rl.objectives import sequence_log_probs, sequence_rewards, sequence_values
from tlt_jax.rl.rewards import quality
from tlt_jax.stages.evaluate import evaluate_completions
from tlt_jax.stages.loop import Phase, PhaseState, Step, models_of, run_phase
from tlt_jax.stages.models import Models, by_role, scalar_head, transformer, untrained
from tlt_jax.stages.reward_model import RewardModel, scaled, trained_reward
from tlt_jax.stages.rollouts import Sampler, by_batches, request_seeds, segments
from tlt_jax.stages.run import Run
from tlt_jax.stages.training import ppo_training
from tlt_jax.stages.updates import kl_metrics, rollout_batch, run_updates


class PPO(Phase):
    """Proximal policy optimisation (Schulman et al. 2017; for language models Ziegler et al. 2019)."""

    stage, name = "align", "ppo"

    def __init__(self, run: Run, sampler: Sampler, reward: PhaseState | None):
        """`reward`: what `trained_reward` leaves of the phase before; None where this one goes on from a checkpoint."""
        self.config = config = run.config.align.ppo
        self.run, self.sampler, self.eval_every, self.reward = run, sampler, config.eval_every, reward
        self.training = ppo_training(run.config, run.shape, run.mesh)
        self.update = self.training.update()
        self._judge = jax.jit(partial(_judge, temperature=run.config.sampling.temperature, dtype=run.dtype))

    def init(self, models: Models) -> PhaseState:
        reward, self.reward = self.reward, None
        assert reward is not None, "PPO begins with a reward model"
        roles = self.training.roles
        value = initialise(roles["value"].build, self.run.mesh, jax.random.key(self.run.config.run.seed))
        train = self.training.new_state({**by_role(models), "value": value})
        arrays = {"train": train, "reference": models.policy, **untrained(models, roles), **reward.arrays}
        return PhaseState(arrays, {"kl_coef": self.config.kl_coef, **reward.host})

    def shapes(self) -> dict[str, Any]:
        models, shape, mesh = self.training.abstract_models(), self.run.shape, self.run.mesh
        return {
            "train": self.training.abstract_state(),
            "reference": models.policy,
            **untrained(models, self.training.roles),
            "reward_trunk": abstract_module(transformer(shape), mesh),
            "reward": abstract_module(scalar_head(shape), mesh),
        }

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
            exact = run.config.rollout.exact_logprobs
            train, metrics = run_updates(self, state.arrays["train"], batch, rollout.length_B, step, exact=exact)
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


def run_align(run: Run, sampler: Sampler) -> None:
    """Runs the stage, from the run's models to the run's models."""
    # Nested, so that nothing of the reward model's optimiser stays.
    run_phase(run, PPO(run, sampler, trained_reward(run_phase(run, RewardModel(run, sampler)))))
