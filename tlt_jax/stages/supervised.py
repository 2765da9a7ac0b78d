"""What pretraining and the supervised warm-up share: next-token updates on packed rows from a loader."""

from typing import Any, ClassVar

import numpy as np

from tlt_jax.config.stage_sections import PretrainConfig, WarmupConfig
from tlt_jax.data import PackedRows, make_loader
from tlt_jax.parallel.sharding import batch_part, put_local_batch
from tlt_jax.stages.loop import Phase, PhaseState, Step
from tlt_jax.stages.models import Models, by_role, untrained
from tlt_jax.stages.programs import supervised_program
from tlt_jax.stages.rollouts import Sampler
from tlt_jax.stages.run import Run


class Supervised(Phase):
    """Next-token updates on shuffled packed rows; the loader's position is part of the state.

    `section` is the config's section of the phase.
    """

    section: ClassVar[str]

    def __init__(
        self,
        run: Run,
        models: Models,
        sampler: Sampler,
        config: PretrainConfig | WarmupConfig,
        rows: PackedRows,
        seed: int,
    ):
        self.run, self.models, self.sampler, self.eval_every = run, models, sampler, config.eval_every
        program = supervised_program(run.config, config, models.policy.shape, run.mesh)
        self.roles, self.new_state, self.update = program.roles, program.new_state, program.update()
        part = batch_part(run.mesh, config.batch_size // config.accumulation)
        self.loader = make_loader(rows, config.batch_size, config.accumulation, seed, self.section, part)

    def init(self) -> PhaseState:
        train = self.new_state(by_role(self.models))
        return PhaseState({"train": train, **untrained(self.models, self.roles)}, {"loader": self.loader.get_state()})

    def check(self, state: PhaseState) -> None:
        self.loader.set_state(state.host["loader"])

    def after_return(self, restored: PhaseState, current: PhaseState) -> PhaseState:
        return PhaseState(restored.arrays, {**restored.host, "loader": current.host["loader"]})

    def step(self, state: PhaseState, step: Step) -> tuple[PhaseState, dict[str, Any], int]:
        if self.loader.get_state() != state.host["loader"]:
            self.loader.set_state(state.host["loader"])
        with self.run.timed("data"):
            batch = put_local_batch(self.run.mesh, next(self.loader), leading=1)
        train, metrics = self.update(state.arrays["train"], batch, np.float32(step.progress))
        host = {**state.host, "loader": self.loader.get_state()}
        return PhaseState({**state.arrays, "train": train}, host), metrics, batch["tokens"].size
