"""What pretraining and the supervised warm-up share: next-token updates on packed rows from a loader."""

import time
from concurrent.futures import Future
from threading import Thread
from typing import Any, ClassVar

import jax
import numpy as np

from tlt_jax.config.stage_sections import PretrainConfig, WarmupConfig
from tlt_jax.data import PackedRows, make_loader
from tlt_jax.observe.utilisation import training_flops
from tlt_jax.parallel.sharding import batch_part, put_local_batch
from tlt_jax.stages.loop import Phase, PhaseState, Step
from tlt_jax.stages.models import Models, by_role, untrained
from tlt_jax.stages.rollouts import Sampler
from tlt_jax.stages.run import Run
from tlt_jax.stages.training import supervised_training


class Supervised(Phase):
    """Next-token updates on shuffled packed rows; the loader's position is part of the state.

    `section` is the config's section of the phase.
    """

    section: ClassVar[str]

    def __init__(
        self,
        run: Run,
        sampler: Sampler,
        config: PretrainConfig | WarmupConfig,
        rows: PackedRows,
        seed: int,
    ):
        self.run, self.sampler, self.eval_every = run, sampler, config.eval_every
        self.training = supervised_training(run.config, config, run.shape, run.mesh)
        self.update = self.training.update()
        part = batch_part(run.mesh, config.batch_size // config.accumulation)
        data = run.config.data
        ahead = data.workers, data.prefetch_factor
        self.loader = make_loader(rows, config.batch_size, config.accumulation, seed, self.section, part, *ahead)
        self.flops_per_token = training_flops(run.shape, data.context_length)
        self._done: Future[float] | None = None  # when the devices were done with the update before

    def init(self, models: Models) -> PhaseState:
        arrays = {"train": self.training.new_state(by_role(models)), **untrained(models, self.training.roles)}
        return PhaseState(arrays, {"loader": self.loader.get_state()})

    def shapes(self) -> dict[str, Any]:
        training = self.training
        return {"train": training.abstract_state(), **untrained(training.abstract_models(), training.roles)}

    def check(self, state: PhaseState) -> None:
        self.loader.set_state(state.host["loader"])

    def after_return(self, restored: PhaseState, host: dict[str, Any]) -> PhaseState:
        return PhaseState(restored.arrays, {**restored.host, "loader": host["loader"]})

    def step(self, state: PhaseState, step: Step) -> tuple[PhaseState, dict[str, Any], int]:
        if self.loader.get_state() != state.host["loader"]:
            self.loader.set_state(state.host["loader"])
        with self.run.timed("data"):
            batch = put_local_batch(self.run.mesh, self._next(), leading=1)
        train, metrics = self.update(state.arrays["train"], batch, np.float32(step.progress))
        self._done = when_ready(metrics["train/loss"])
        host = {**state.host, "loader": self.loader.get_state()}
        return PhaseState({**state.arrays, "train": train}, host), metrics, batch["tokens"].size

    def _next(self) -> dict[str, np.ndarray]:
        """The next batch. To wait for it counts from when the devices have run out of work."""
        started = time.monotonic()
        batch = next(self.loader)
        came = time.monotonic()
        if self._done is None:
            self.waited += came - started
        elif self._done.done() and self._done.exception() is None:
            self.waited += max(came - max(started, self._done.result()), 0.0)
        return batch


def when_ready(array: jax.Array) -> Future[float]:
    """The time at which an array of the devices' is there. Whoever waits is not waited for when the program ends."""
    found: Future[float] = Future()

    def wait() -> None:
        try:
            jax.block_until_ready(array)
        except Exception as error:  # the devices': whoever fetches the array is told
            found.set_exception(error)
        else:
            found.set_result(time.monotonic())

    Thread(target=wait, name="devices", daemon=True).start()
    return found
