"""The loop that every phase runs in: steps until the budget is used, with evaluation, records and checkpoints."""

import logging
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import jax

from tlt_jax.config import ConfigError
from tlt_jax.config.base import Stage
from tlt_jax.models.declare import flatten, unflatten
from tlt_jax.observe.figures import show_value
from tlt_jax.parallel.hosts import to_host
from tlt_jax.parallel.programs import Program
from tlt_jax.stages.budget import Budget, Spent, phase_budget
from tlt_jax.stages.insight import Insight
from tlt_jax.stages.models import Models
from tlt_jax.stages.rollouts import Sampler
from tlt_jax.stages.run import PHASES, Run
from tlt_jax.stages.trouble import Trouble

log = logging.getLogger("tlt_jax")


@dataclass(frozen=True)
class PhaseState:
    """All that a phase resumes from: `arrays`, trees on the device by name; `host`, plain JSON values."""

    arrays: dict[str, Any]
    host: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """What a phase is told about a step: its number in the phase, from 0, and the share of the budget used, 0 to 1."""

    index: int
    progress: float


class Phase(ABC):
    """One phase of a stage. A subclass says where it stands (`stage`, `name`), at which share of its stage's budget it
    ends (`end`), and how it starts, steps, evaluates and ends early."""

    stage: ClassVar[Stage]
    name: ClassVar[str]
    eval_every: int
    end: float = 1.0
    update: Program
    sampler: Sampler
    flops_per_token: float | None = None  # of a supervised phase: of training, by the model's shape
    waited: float = 0.0  # of a supervised phase: seconds that the devices waited for data, since the last look

    @abstractmethod
    def init(self, models: Models) -> PhaseState:
        """A fresh state that begins with these models, which nobody else holds: it keeps of them what it needs."""

    @abstractmethod
    def shapes(self) -> dict[str, Any]:
        """The shapes, types and shardings of a state's arrays: what a checkpoint is restored to."""

    def prepare(self, state: PhaseState) -> PhaseState:
        """The expensive start of a fresh phase; not run when it resumes."""
        return state

    def check(self, state: PhaseState) -> None:
        """Raises ConfigError where a restored state cannot be gone on with."""
        return

    @abstractmethod
    def step(self, state: PhaseState, step: Step) -> tuple[PhaseState, dict[str, Any], int]:
        """One step: (state, metrics as numbers or device scalars, tokens spent)."""

    @abstractmethod
    def evaluate(self, state: PhaseState, when: str) -> tuple[PhaseState, dict[str, float]]:
        """Held-out figures `when` = "before", "during" or "after" the phase."""

    def after_return(self, restored: PhaseState, host: dict[str, Any]) -> PhaseState:
        """The state to go on with after a return to a checkpoint, past the data that led to the state of which `host`
        was. Steps keep counting, and what is drawn by a step's number differs by itself."""
        return restored

    def ended(self, state: PhaseState) -> bool:
        """Whether the phase is over before its budget is."""
        return False


def is_past(run: Run, stage: str, phase: str) -> bool:
    """Whether the checkpoint that the run goes on from lies behind this phase's end."""
    if run.document is None:
        return False
    return PHASES.index((stage, phase)) < PHASES.index((run.document["stage"], run.document["phase"]))


def run_phase(run: Run, phase: Phase) -> PhaseState | None:
    """Runs `phase` to the end of its budget; returns its last state, and leaves its models as the run's.

    It begins with the run's models, or goes on where the checkpoint was made. None, and nothing is done, where it lies
    behind the checkpoint. Raises Interrupted after saving, when a signal asked to stop.
    """
    if is_past(run, phase.stage, phase.name):
        return None
    with run.watchdog.during(f"{phase.stage} {phase.name}"):
        state = _PhaseRun(run, phase).to_the_end()
    run.models = models_of(state)
    return state


class _PhaseRun:
    """The state of the loop, too much to hand around."""

    def __init__(self, run: Run, phase: Phase):
        self.run, self.phase = run, phase
        self.started = self.last_save = time.monotonic()
        document = run.document
        resumed = document and (document["stage"], document["phase"]) == (phase.stage, phase.name)
        run.times = dict(document["times"]) if document and resumed else {}
        self.spent = Spent(**document["spent"]) if document and resumed else Spent()
        before = [r for r in run.results if r["stage"] == phase.stage and r["phase"] != phase.name]
        self.budget: Budget = phase_budget(run.config, phase.stage, phase.end, [Spent(**r["spent"]) for r in before])
        run.progress.start(phase.stage, phase.name, self.budget.progress(self.spent))
        self.seconds_before, self.saved_at = self.spent.seconds, self.spent.steps
        self.compiled_before = run.compile_seconds - run.times.get("compile", 0.0)
        self.done = bool(document and resumed and document["done"])
        self.pending: list[tuple[dict[str, Any], dict[str, Any], int]] = []
        self.last_flush, self.idle = time.monotonic(), 0.0
        self.held = 0.0  # seconds that saving has held the loop since the last step
        self.trouble = Trouble(**document["trouble"]) if document and resumed else Trouble()
        if document and resumed:
            assert run.checkpoint is not None
            self.state = self._restored(run.checkpoint, document)
            run.record()
        else:
            run.record()
            with run.timed("prepare"):
                self.state = phase.prepare(phase.init(run.take_models()))
            run.results.append({"stage": phase.stage, "phase": phase.name, "before": self._evaluate("before")})
        self.insight = Insight(run, phase, self.state.arrays)
        run.document = None  # what it said has been used: later phases start fresh

    @property
    def record(self) -> dict[str, Any]:
        return self.run.results[-1]

    def to_the_end(self) -> PhaseState:
        self.run.account.switch("computing")
        while not self.done:
            self._clock()
            progress, save = self.run.decide(self.budget.progress(self.spent), self._save_due())
            stopping = self.run.stop_signal is not None
            if save or stopping:
                self._flush()  # so that it is known what was skipped
            if self.trouble.skipped >= self.run.config.faults.rollback_after and not stopping:
                self._return()
            if stopping or (save and not self.trouble.skipped):
                self._save(to_go_back_to=save)
            if stopping:
                break
            if progress >= 1.0 or self.phase.ended(self.state):
                self._finish()
            else:
                self._one_step(progress)
        self.run.check_stop()
        self.run.account.switch("loading")
        return self.state

    def _one_step(self, progress: float) -> None:
        run, phase, index = self.run, self.phase, self.spent.steps
        with run.watchdog.during(f"step {run.step + 1}"), self.insight.step(lambda: self.state.arrays):
            self.state, metrics, tokens = phase.step(self.state, Step(index, progress))
        if self.held:
            metrics, self.held = {**metrics, "time/checkpoint": self.held}, 0.0
        run.step += 1
        self.spent.steps += 1
        self.spent.tokens += tokens
        row = {
            "step": run.step,
            "stage": phase.stage,
            "phase": phase.name,
            "phase_step": index + 1,
            "progress": progress,
            "seconds": run.seconds,
        }
        if (index + 1) % phase.eval_every == 0:
            jax.block_until_ready(metrics)
            start = time.monotonic()
            metrics = {**metrics, **self._evaluate("during")}
            self.idle += time.monotonic() - start
        self.pending.append((row, metrics, tokens))
        if len(self.pending) >= run.config.run.log_every or "time/step" in metrics:
            self._flush()

    def _flush(self) -> None:
        """Fetches the pending steps' metrics in one go and writes their rows."""
        if not self.pending:
            return
        with self.run.watchdog.during("fetching metrics"):
            fetched = to_host([metrics for _, metrics, _ in self.pending])
        now = time.monotonic()
        seconds = max(now - self.last_flush - self.idle, 1e-9)
        speed = sum(tokens for _, _, tokens in self.pending) / seconds
        rates = {"train/tokens_per_second": speed, **self.insight.rates(speed, seconds)}
        for (row, _, _), metrics in zip(self.pending, fetched, strict=True):
            row |= {name: float(value) for name, value in metrics.items()} | rates
            self.run.metrics.append(row)
            for tracker in self.run.trackers:
                tracker.log(row["step"], row)
            self._watch(row)
        self.insight.look([row for row, _, _ in self.pending])
        self.run.progress.update(self.budget.progress(self.spent), row)
        self.pending, self.last_flush, self.idle = [], time.monotonic(), 0.0

    def _watch(self, row: dict[str, Any]) -> None:
        """Counts steps whose updates were all skipped."""
        self.trouble.count(row.get("train/skipped", 0.0) >= 1.0)
        if self.trouble.skipped == 1:
            said = "step %d: not finite or a spike, so that nothing was updated (loss %.4g, gradient norm %.4g)"
            log.warning(said, row["step"], row["train/loss"], row["train/grad_norm"])

    def _return(self) -> None:
        """Goes back to the phase's newest checkpoint from outside of such a row. Raises ConfigError where there is
        none, or where to go back has not helped."""
        run, phase, trouble = self.run, self.phase, self.trouble
        run.store.wait()
        number = trouble.checkpoint
        if number is None or not run.store.verifies(number) or trouble.returns >= run.config.faults.stop_after:
            raise ConfigError(
                f"{phase.stage} {phase.name} diverges: {trouble.skipped} updates in a row were not finite or spikes,"
                f" after {trouble.returns} returns to a checkpoint; expected a smaller learning rate for it, or other"
                " data"
            )
        log.warning("%d steps in a row without an update: going back to checkpoint %d", trouble.skipped, number)
        host = self.state.host
        del self.state  # its arrays make room for those that come
        self.state = phase.after_return(self._restored(number, run.store.document(number)), host)
        trouble.skipped, trouble.returns = 0, trouble.returns + 1

    def _evaluate(self, when: str) -> dict[str, float]:
        log.debug("%s %s: evaluating, %s its steps", self.phase.stage, self.phase.name, when)
        with self.run.timed("evaluate"):
            self.state, metrics = self.phase.evaluate(self.state, when)
        return metrics

    def _clock(self) -> None:
        self.spent.seconds = self.seconds_before + time.monotonic() - self.started

    def _finish(self) -> None:
        self._flush()
        self.record["after"] = self._evaluate("after")
        self.done = True
        self._save(to_go_back_to=True)
        if not self.spent.steps:
            log.warning("%s %s took no step: its budget was used up before", self.phase.stage, self.phase.name)
        log.debug("%s %s: %s", self.phase.stage, self.phase.name, self.record)
        shown = list(self.record["after"].items())[:3]
        summary = "  ".join(f"{name.removeprefix('eval/')} {show_value(name, value)}" for name, value in shown)
        self.run.progress.finish(f"{self.spent.steps} steps in {self.spent.seconds:.0f} s  {summary}")

    def _save_due(self) -> bool:
        every = self.run.config.checkpoint
        steps, seconds = every.every_steps, every.every_seconds
        if self.spent.steps == self.saved_at:
            return False
        return bool(steps and self.spent.steps % steps == 0) or bool(
            seconds and time.monotonic() - self.last_save >= seconds
        )

    def _save(self, to_go_back_to: bool) -> None:
        """Saves a checkpoint. They are numbered one by one: a step may be saved before and after its phase's end.

        What a signal saves is not `to_go_back_to`: a run that was stopped ends as one that was not.
        """
        run = self.run
        self._flush()
        start = time.monotonic()
        with run.timed("checkpoint"):
            self._clock()
            self._account()
            run.checkpoint = (run.checkpoint or 0) + 1
            if to_go_back_to:
                self.trouble.saved(run.checkpoint)
            draft = models_of(self.state).draft_model
            document = {
                "stage": self.phase.stage,
                "phase": self.phase.name,
                "step": run.step,
                "spent": self.spent.to_dict(),
                "done": self.done,
                "trouble": self.trouble.to_dict(),
                "times": run.times,
                "host": self.state.host,
                "results": run.results,
                "seconds": run.seconds,
                "account": run.account.seconds,
                "samples": run.samples.count(),
                "controller": self.phase.sampler.state(),
                "shape": asdict(run.shape),
                "draft_shape": draft and asdict(draft.shape),
                "data": run.corpus.summary["digest"],
            }
            run.store.save(run.checkpoint, flatten(self.state.arrays), document)
            run.write_results()
        self.last_save, self.saved_at = time.monotonic(), self.spent.steps
        self.held += self.last_save - start

    def _account(self) -> None:
        """Brings the phase's record up to date: what it spent, and on what."""
        # Compilation counts as such wherever it happens, in what is timed or outside of it.
        self.run.times["compile"] = self.run.compile_seconds - self.compiled_before
        times = dict(self.run.times)
        rest = max(self.spent.seconds - sum(times.values()), 0.0)
        times["other" if "update" in times else "update"] = rest
        self.record.update(
            spent=self.spent.to_dict(),
            steps=self.spent.steps,
            tokens=self.spent.tokens,
            seconds=self.spent.seconds,
            time=times,
            drafting=self.phase.sampler.drafting(),
            **self.insight.figures(),
        )

    def _restored(self, number: int, document: dict[str, Any]) -> PhaseState:
        shapes = self.phase.shapes()
        with self.run.watchdog.during("restoring"):
            arrays = self.run.store.restore(number, flatten(shapes))
        state = PhaseState(unflatten(shapes, arrays), document["host"])
        self.phase.check(state)
        return state


def models_of(state: PhaseState) -> Models:
    """The policy and drafters that a phase's state holds, trained or not."""
    held = {**state.arrays, **(state.arrays["train"].params if "train" in state.arrays else {})}
    return Models(held["policy"], held["exit"], held.get("eagle"), held.get("draft_model"))
