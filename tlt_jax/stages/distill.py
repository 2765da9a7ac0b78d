"""The last stage: the drafters alone, on what the policy writes (sequence-level distillation, Kim & Rush 2016, with its
distributions at each token). The policy stays as it is."""

import time
from typing import Any

import numpy as np

from tlt_jax.config import ConfigError
from tlt_jax.data import curriculum as curricula
from tlt_jax.stages.evaluate import evaluate_completions
from tlt_jax.stages.loop import Phase, PhaseState, Step, models_of, run_phase
from tlt_jax.stages.models import Models, by_role, untrained
from tlt_jax.stages.rollouts import Sampler, request_seeds
from tlt_jax.stages.run import Run
from tlt_jax.stages.training import distill_training
from tlt_jax.stages.updates import rollout_batch, run_updates


class Distill(Phase):
    """Updates of the drafters on fresh completions of training prompts, some of them greedy."""

    stage, name = "distill", "drafters"

    def __init__(self, run: Run, sampler: Sampler):
        self.config = config = run.config.distill
        self.run, self.sampler, self.eval_every = run, sampler, config.eval_every
        self.training = distill_training(run.config, run.shape, run.mesh)
        self.update = self.training.update()
        text = config.source == "text"
        self.prompts = text_prompts(run) if text else run.corpus.train_tasks.prompts

    def init(self, models: Models) -> PhaseState:
        train = self.training.new_state(by_role(models))
        return PhaseState({"train": train, **untrained(models, self.training.roles)})

    def shapes(self) -> dict[str, Any]:
        models, train = self.training.abstract_models(), self.training.abstract_state()
        return {"train": train, **untrained(models, self.training.roles)}

    def step(self, state: PhaseState, step: Step) -> tuple[PhaseState, dict[str, Any], int]:
        run, config, started = self.run, self.config, time.monotonic()
        greedy = round(config.greedy_fraction * config.prompts)
        chosen = curricula.draw(np.arange(len(self.prompts)), config.prompts, run.config.run.seed + 2, step.index)
        with run.timed("rollout"):
            seeds = request_seeds(run.config.run.seed, self.name, step.index, len(chosen))
            rollout = self.sampler.rollout(models_of(state), [self.prompts[i] for i in chosen], seeds, greedy)
        rolled = time.monotonic()
        with run.timed("update"):
            mask = rollout.completion_mask_BT
            sampled = (np.arange(len(chosen)) >= greedy)[:, None] * mask
            batch = {**rollout_batch(rollout, mask), "sampled": sampled}
            frozen = {"policy": state.arrays["policy"]}
            train, metrics = run_updates(self, state.arrays["train"], batch, rollout.length_B, step, frozen)
        if greedy == len(chosen):  # nothing was compared
            metrics = {name: value for name, value in metrics.items() if not name.startswith("rollout/logprob")}
        metrics |= self.sampler.metrics(rollout, rolled - started) | {
            "time/rollout": rolled - started,
            "time/update": time.monotonic() - rolled,
            "time/step": time.monotonic() - started,
        }
        return PhaseState({**state.arrays, "train": train}), metrics, int(rollout.completion_length_B.sum())

    def evaluate(self, state: PhaseState, when: str) -> tuple[PhaseState, dict[str, float]]:
        if not len(self.run.corpus.held_out_tasks):
            return state, {}
        return state, evaluate_completions(self.run, self.sampler, models_of(state), self.stage, self.name, when)


def text_prompts(run: Run) -> list[np.ndarray]:
    """The first tokens of the training text's rows, of those that hold one document there. Raises ConfigError if
    there are none."""
    rows, length = run.corpus.train, min(run.config.data.tasks.max_prompt_tokens, run.config.data.context_length)
    whole = (rows.segments[:, 0] > 0) & (rows.segments[:, 0] == rows.segments[:, length - 1])
    if not whole.any():
        raise ConfigError(
            f"`distill.source` is 'text': no row of the training text begins with {length} tokens of one document;"
            " expected some, or a smaller data.tasks.max_prompt_tokens"
        )
    return list(rows.tokens[whole, :length].astype(np.int32))


def run_distill(run: Run, sampler: Sampler) -> None:
    """Runs the stage, from the run's models to the run's models."""
    run_phase(run, Distill(run, sampler))
