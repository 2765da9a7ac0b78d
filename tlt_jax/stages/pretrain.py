"""Stage 1: next-token training on packed rows of the corpus."""

from typing import Any

import numpy as np

from tlt_jax.data import make_loader
from tlt_jax.parallel.sharding import put_batch
from tlt_jax.stages.evaluate import HeldOutLoss, bits_per_byte
from tlt_jax.stages.loop import Phase, PhaseState, Step, run_phase
from tlt_jax.stages.models import Models, policy_roles
from tlt_jax.stages.run import Run
from tlt_jax.train.losses import next_token_objective
from tlt_jax.train.state import new_state
from tlt_jax.train.step import make_update


class Pretrain(Phase):
    stage = name = "pretrain"

    def __init__(self, run: Run, models: Models):
        config = run.config.pretrain
        self.run, self.models, self.eval_every = run, models, config.eval_every
        self.roles = policy_roles(models.policy.shape, config.optimizer, run.config.speculation.optimizer, config.exit_weight)
        objective = next_token_objective(dtype=run.dtype, remat=run.config.model.remat, exit_weight=config.exit_weight,
                                         exit_stride=run.config.speculation.exit_stride)
        self.update = make_update(objective, self.roles, run.mesh)
        self.loader = make_loader(run.corpus.train, config.batch_size, config.accumulation, run.config.run.seed)
        self.held_out = HeldOutLoss(run, run.corpus.held_out, config.eval_rows)

    def init(self) -> PhaseState:
        train = new_state(self.roles, vars_of(self.models), self.run.mesh)
        return PhaseState({"train": train, **untrained(self.models, self.roles)}, {"loader": self.loader.get_state()})

    def step(self, state: PhaseState, step: Step) -> tuple[PhaseState, dict[str, Any], int]:
        state, batch = next_batch(self.run, self.loader, state)
        train, metrics = self.update(state.arrays["train"], batch, np.float32(step.progress))
        return PhaseState({**state.arrays, "train": train}, state.host), metrics, batch["tokens"].size

    def evaluate(self, state: PhaseState, when: str) -> tuple[PhaseState, dict[str, float]]:
        loss = self.held_out(state.arrays["train"].params["policy"])
        return state, {"eval/loss": loss, "eval/bits_per_byte": bits_per_byte(self.run, loss)}


def next_batch(run: Run, loader: Any, state: PhaseState) -> tuple[PhaseState, dict[str, Any]]:
    """The batch after the position that the state holds, on the mesh, and the state with the position after it."""
    if loader.get_state() != state.host["loader"]:
        loader.set_state(state.host["loader"])
    with run.timed("data"):
        batch = put_batch(run.mesh, next(loader), leading=1)
    return PhaseState(state.arrays, {**state.host, "loader": loader.get_state()}), batch


def vars_of(models: Models) -> dict[str, Any]:
    """The models by role."""
    return {"policy": models.policy, "exit": models.exit}


def untrained(models: Models, roles: dict[str, Any]) -> dict[str, Any]:
    """The models that a phase does not train, which its checkpoints keep beside what it does."""
    return {name: module for name, module in vars_of(models).items() if name not in roles}


def models_of(state: PhaseState) -> Models:
    """The policy and exit that a phase's state holds, trained or not."""
    held = {**state.arrays, **(state.arrays["train"].params if "train" in state.arrays else {})}
    return Models(held["policy"], held["exit"])


def run_pretrain(run: Run, models: Models) -> Models:
    """Runs the stage; the models after it."""
    return models_of(run_phase(run, Pretrain(run, models)))
