"""One run: its directory, records, data, mesh, checkpoints, clock, and the wish to stop."""

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tlt_jax.checkpoint.store import Store
from tlt_jax.config import Config, ConfigError, dump_config
from tlt_jax.config.load import read_config_tree, redacted
from tlt_jax.config.schema import ModelConfig
from tlt_jax.data import Corpus
from tlt_jax.models.transformer import ModelShape
from tlt_jax.observe import (
    MetricsLog,
    NoLog,
    Progress,
    Tracker,
    open_trackers,
    read_json,
    read_rows,
    write_json,
    write_text_atomically,
)
from tlt_jax.observe.profile import Profiler
from tlt_jax.observe.watchdog import Watchdog, log_stuck
from tlt_jax.parallel.hosts import Company, Together
from tlt_jax.parallel.mesh import compute_dtype, make_mesh
from tlt_jax.stages.account import KIND_OF, Account, spent_before
from tlt_jax.stages.models import Models

log = logging.getLogger("tlt_jax")

PHASES = [
    ("pretrain", "pretrain"),
    ("finetune", "warmup"),
    ("finetune", "policy"),
    ("align", "reward_model"),
    ("align", "ppo"),
    ("distill", "drafters"),
]


def last_phase(stage: str) -> tuple[str, str]:
    """(stage, phase) that ends a stage."""
    return [pair for pair in PHASES if pair[0] == stage][-1]


class Interrupted(Together):
    """A signal asked the run to stop; what was done is saved, or starts again from what is."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class Run:
    """What every phase shares. Made by `stages.opening.open_run`.

    `company` are the processes of the run; `main` says whether this is process 0, which alone writes the directory.
    `checkpoint` is the number of the newest checkpoint; `document` the JSON part of the one that the run goes on from,
    or None. `results` are the phases' records so far, `step` the number of steps of the whole run.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        corpus: Corpus,
        store: Store,
        progress: Progress,
        company: Company,
        account: Account,
    ):
        self.config, self.folder, self.corpus, self.store, self.progress = config, folder, corpus, store, progress
        self.company, self.main, self.account = company, company.process == 0, account
        self.mesh = make_mesh(config.device.mesh)
        self.dtype = compute_dtype(config.device)
        check_batches(config, self.mesh.shape["data"] * self.mesh.shape["fsdp"])
        self.checkpoint = store.newest()
        if self.checkpoint is None and self._says_finished():
            raise ConfigError(
                f"results.json in {str(folder)!r} says that this run is finished, but there is no checkpoint; expected"
                " a new run.name, or that folder moved away, to begin anew"
            )
        self.document = None if self.checkpoint is None else store.document(self.checkpoint)
        self.step: int = self.document["step"] if self.document else 0
        self.results: list[dict[str, Any]] = self.document["results"] if self.document else []
        self.facts: dict[str, Any] = {}
        self.profiler = Profiler(config.profile.span if self.main else None, folder / "profile")
        self.peak_flops: float | None = None  # of all devices, once it is known
        self.models: Models | None = None  # what the next phase begins with
        self._shape: ModelShape | None = None
        self.recorded = False
        self.metrics, self.samples = (
            MetricsLog(folder / name) if self.main else NoLog() for name in ("metrics.jsonl", "samples.jsonl")
        )
        self.trackers: list[Tracker] = []
        self.stop_signal: int | None = None  # what the processes agreed on, from what each was asked
        self.asked_to_stop: int | None = None
        self.times: dict[str, float] = {}
        tell = partial(log_stuck, company.process)
        self.watchdog = Watchdog(config.faults.stuck_after, tell, lambda: account.compiles.busy)

    @property
    def finished(self) -> bool:
        """Whether the run directory holds the end of this config's last stage, exported and recorded."""
        document = self.document
        if (
            document is None
            or not document["done"]
            or (document["stage"], document["phase"]) != last_phase(self.config.stages[-1])
        ):
            return False
        return self._says_finished()

    def _says_finished(self) -> bool:
        return self.company.agree("finished", bool(self._results().get("finished")))[0]

    def _results(self) -> dict[str, Any]:
        """What results.json holds; nothing where it is lost or damaged: the checkpoint makes it again."""
        try:
            found = read_json(self.folder / "results.json")
        except (OSError, ValueError):
            found = {}
        return found if isinstance(found, dict) else {}

    @property
    def seconds(self) -> float:
        """Seconds of the whole run, all its starts together."""
        return self.account.total

    @property
    def compile_seconds(self) -> float:
        """Seconds in which JAX compiled, in this start."""
        return self.account.compiles.seconds

    def decide(self, progress: float = 0.0, save: bool = False) -> tuple[float, bool]:
        """What the host decides, for all processes: process 0's progress and whether to save; and, in `stop_signal`,
        a signal that any of them got."""
        with self.account.on("waiting"), self.watchdog.during("waiting for the other processes"):
            decisions = self.company.agree("step", [progress, save, self.asked_to_stop])
        self.stop_signal = next((asked for *_, asked in decisions if asked is not None), None)
        return decisions[0][0], decisions[0][1]

    def check_stop(self) -> None:
        """Raises Interrupted if a signal asked to stop: where everything is saved, or starts again from what is."""
        self.decide()
        if self.stop_signal is not None:
            with self.account.on("saving"):
                self.store.wait()
            if self.recorded:
                self.write_results()
            raise Interrupted(self.stop_signal)

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Counts what happens inside as `kind` in the phase's account of time, and in the run's; compilation is
        counted apart."""
        start, compiled = time.monotonic(), self.compile_seconds
        with self.account.on(KIND_OF.get(kind, "computing")), self.watchdog.during(kind):
            yield
        compiling = self.compile_seconds - compiled
        self.times[kind] = self.times.get(kind, 0.0) + time.monotonic() - start - compiling

    def begin(self, shape: ModelShape) -> None:
        """Takes the model's shape. Raises ConfigError if the run began with a model of another shape."""
        if self.document:
            _check_shape(self.document["shape"], asdict(shape), self.folder)
        self._shape = shape

    @property
    def shape(self) -> ModelShape:
        """The model's shape, once the run has begun."""
        assert self._shape is not None, "begin() comes first"
        return self._shape

    def take_models(self) -> Models:
        """The models, for whoever asks: the run holds them no longer, so that there is one copy of what is trained."""
        models, self.models = self.models, None
        assert models is not None, "a phase begins with models"
        return models

    def record(self) -> None:
        """Takes up the run directory's rows, and writes what this run is: config, tokenizer, facts. Not before it is
        sure that it can go on: a command that is refused changes nothing."""
        if self.main and not self.recorded:
            self.warn_of_changes(self.shape)
            rows = self.take_up_rows()
            tree = redacted(_resolved(self.config, self.shape))
            self.trackers = open_trackers(self.config, self.folder, tree, self.step + 1, rows)
            self.recorded = True
            write_text_atomically(self.folder / "config.yaml", dump_config(_resolved(self.config, self.shape)))
            self.corpus.tokenizer.save(self.folder)
            self.write_results()

    def take_up_rows(self) -> list[dict[str, Any]]:
        """Brings metrics.jsonl and samples.jsonl to where the checkpoint is; returns the rows of steps as they were
        written. Raises ConfigError for damaged rows."""
        try:
            self.samples.count()  # damage is found before anything is changed
            rows = read_rows(self.metrics.path)
            self.account.take_up(*spent_before(self.document, self._results(), rows))
            self.metrics.truncate_after(self.step)
            self.samples.truncate_to(self.document["samples"] if self.document else 0)
        except ValueError as error:
            raise ConfigError(f"{error}; expected the rows as they were written: mend or remove that line") from None
        faults = self.metrics.faults(self.step)
        if faults:
            log.warning("%s was changed since it was written: %s", self.metrics.path, faults)
        return rows

    def close_trackers(self, failed: bool) -> None:
        """Writes out what trackers hold back, and tells them whether the run ended before its end."""
        for tracker in self.trackers:
            tracker.close(failed)

    def warn_of_changes(self, shape: ModelShape) -> None:
        """Says which keys differ from those of the config that the run was last started with, for a model of this
        shape. Raises ConfigError if that one cannot be read."""
        if not self.main:
            return
        path = self.folder / "config.yaml"
        changed = (
            sorted(_changes(read_config_tree(path), redacted(_resolved(self.config, shape)))) if path.is_file() else []
        )
        if changed:
            log.warning("the config differs from the one this run was last started with, in: %s", ", ".join(changed))

    def write_results(self, finished: bool = False, ended: bool = False) -> None:
        """Rewrites results.json, from which the report is made; `ended`: this start has done what it was to do."""
        if self.main:
            results = {"facts": self.facts, "phases": self.results, "finished": finished, "ended": finished or ended}
            write_json(self.folder / "results.json", results | {"account": self.account.seconds})


def check_batches(config: Config, parts: int) -> None:
    """Raises ConfigError for a batch that `parts`, the devices that split it, do not divide."""
    pretrain, warmup, reward = config.pretrain, config.finetune.warmup, config.align.reward_model
    microbatches = {
        "pretrain": ("pretrain.batch_size / accumulation", pretrain.batch_size // pretrain.accumulation),
        "finetune": ("finetune.warmup.batch_size / accumulation", warmup.batch_size // warmup.accumulation),
        "align": ("align.reward_model.batch_size / accumulation", reward.batch_size // reward.accumulation),
    }
    for stage, (key, rows) in microbatches.items():
        if stage in config.stages and rows % parts:
            raise ConfigError(
                f"`{key}` is {rows}; expected a multiple of {parts}, the devices that split a batch (`device.mesh`)"
            )


def _resolved(config: Config, shape: ModelShape) -> Config:
    """The config with the model's shape in it, wherever that came from."""
    known = {name: value for name, value in asdict(shape).items() if name in ModelConfig.model_fields}
    return config.model_copy(update={"model": config.model.model_copy(update=known)})


def _check_shape(old: dict[str, Any], new: dict[str, Any], folder: Path) -> None:
    keys = {"vocab": "data.tokenizer"}
    changed = [
        f"`{keys.get(name, f'model.{name}')}` was {old.get(name)}, now {value}"
        for name, value in new.items()
        if old.get(name) != value
    ]
    if changed:
        raise ConfigError(
            f"the run in {str(folder)!r} began with another model: {'; '.join(changed)}; expected the same, or a new"
            " run.name"
        )


def _changes(old: Any, new: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            yield from _changes(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
    elif old != new:
        yield prefix
