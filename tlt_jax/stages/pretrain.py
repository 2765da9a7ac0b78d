"""Stage 1: next-token training on packed rows of the corpus."""

from typing import Any

import numpy as np

from tlt_jax.data import make_loader
from tlt_jax.stages.evaluate import HeldOutLoss, bits_per_byte, evaluate_completions
from tlt_jax.stages.loop import Phase, PhaseState, Step, models_of, next_batch, run_phase
from tlt_jax.stages.models import Models, by_role, policy_roles, untrained
from tlt_jax.stages.rollouts import Sampler
from tlt_jax.stages.run import Run
from tlt_jax.train.losses import next_token_objective
from tlt_jax.train.state import new_state
from tlt_jax.train.step import make_update


class Pretrain(Phase):
    """Next-token training; evaluated by held-out loss, bits per byte and completions."""

    stage = name = "pretrain"

    def __init__(self, run: Run, models: Models, sampler: Sampler):
        config = run.config.pretrain
        self.run, self.models, self.sampler, self.eval_every = run, models, sampler, config.eval_every
        self.roles = policy_roles(
            models.policy.shape, config.optimizer, run.config.speculation.optimizer, config.exit_weight
        )
        objective = next_token_objective(
            dtype=run.dtype,
            remat=run.config.model.remat,
            exit_weight=config.exit_weight,
            exit_stride=run.config.speculation.exit_stride,
        )
        self.update = make_update(objective, self.roles, run.mesh)
        self.loader = make_loader(run.corpus.train, config.batch_size, config.accumulation, run.config.run.seed)
        self.rows = config.eval_rows
        self.held_out = HeldOutLoss(run, run.corpus.held_out, self.rows)

    def init(self) -> PhaseState:
        train = new_state(self.roles, by_role(self.models), self.run.mesh)
        return PhaseState({"train": train, **untrained(self.models, self.roles)}, {"loader": self.loader.get_state()})

    def step(self, state: PhaseState, step: Step) -> tuple[PhaseState, dict[str, Any], int]:
        state, batch = next_batch(self.run, self.loader, state)
        train, metrics = self.update(state.arrays["train"], batch, np.float32(step.progress))
        return PhaseState({**state.arrays, "train": train}, state.host), metrics, batch["tokens"].size

    def evaluate(self, state: PhaseState, when: str) -> tuple[PhaseState, dict[str, float]]:
        loss = self.held_out(state.arrays["train"].params["policy"])
        metrics = {
            "eval/loss": loss,
            "eval/bits_per_byte": bits_per_byte(self.run, self.run.corpus.held_out, self.rows, loss),
        }
        if when != "during" and len(self.run.corpus.held_out_tasks):
            metrics |= evaluate_completions(self.run, self.sampler, models_of(state), self.stage, self.name, when)
        return state, metrics


def run_pretrain(run: Run, models: Models, sampler: Sampler) -> Models:
    """Runs the stage; the models after it."""
    return models_of(run_phase(run, Pretrain(run, models, sampler)))
