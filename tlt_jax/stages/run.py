"""One run: its directory, records, data, mesh, checkpoints, clock, and the wish to stop."""

import fcntl
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tlt_jax.checkpoint.store import Store
from tlt_jax.config import Config, ConfigError, dump_config
from tlt_jax.config.load import read_config_tree, redacted
from tlt_jax.config.schema import ModelConfig
from tlt_jax.data import Corpus, prepare
from tlt_jax.models.transformer import ModelShape
from tlt_jax.observe import (
    MetricsLog,
    NoLog,
    Progress,
    Tracker,
    check_trackers,
    close_logging,
    log_errors_alone,
    open_trackers,
    read_json,
    read_rows,
    set_up_logging,
    sweep_temporary,
    write_json,
    write_text_atomically,
)
from tlt_jax.observe.profile import Profiler
from tlt_jax.observe.watchdog import Watchdog, log_stuck
from tlt_jax.parallel.hosts import Company, Together, join
from tlt_jax.parallel.mesh import check_devices, compute_dtype, make_mesh, set_up_devices
from tlt_jax.stages.account import KIND_OF, Account, compile_clock, spent_before
from tlt_jax.stages.facts import announce, facts_of
from tlt_jax.stages.models import tokenizer_path

log = logging.getLogger("tlt_jax")

PHASES = [
    ("pretrain", "pretrain"),
    ("finetune", "warmup"),
    ("finetune", "policy"),
    ("align", "reward_model"),
    ("align", "ppo"),
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
    """What every phase shares. Made by `open_run`.

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
        self.shape: ModelShape | None = None
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
        self.shape = shape

    def record(self) -> None:
        """Takes up the run directory's rows, and writes what this run is: config, tokenizer, facts. Not before it is
        sure that it can go on: a command that is refused changes nothing."""
        if self.main and self.shape is not None and not self.recorded:
            self.warn_of_changes(self.shape)
            logged = self.take_up_rows()
            tree = redacted(_resolved(self.config, self.shape))
            self.trackers = open_trackers(self.config, self.folder, tree, self.step + 1, logged)
            self.recorded = True
            write_text_atomically(self.folder / "config.yaml", dump_config(_resolved(self.config, self.shape)))
            self.corpus.tokenizer.save(self.folder)
            self.write_results()

    def take_up_rows(self) -> int:
        """Brings metrics.jsonl and samples.jsonl to where the checkpoint is; returns the last step that was written.
        Raises ConfigError for damaged rows."""
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
        return rows[-1]["step"] if rows else 0

    def close_trackers(self, failed: bool) -> None:
        """Writes out what trackers hold back, and tells them whether the run ended before its end."""
        for tracker in self.trackers:
            tracker.close(failed)

    def warn_of_changes(self, shape: ModelShape) -> None:
        """Says which keys differ from those of the config that the run directory holds, for a model of this shape.
        Raises ConfigError if that one cannot be read."""
        if not self.main:
            return
        path = self.folder / "config.yaml"
        changed = (
            sorted(_changes(read_config_tree(path), redacted(_resolved(self.config, shape)))) if path.is_file() else []
        )
        if changed:
            log.warning("the config differs from the one this run began with, in: %s", ", ".join(changed))

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
    for stage in config.stages:
        key, rows = microbatches[stage]
        if rows % parts:
            raise ConfigError(
                f"`{key}` is {rows}; expected a multiple of {parts}, the devices that split a batch (`device.mesh`)"
            )


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """Opens (or goes on with) the run directory of `config`, prepares devices and data, and closes everything after.

    Raises ConfigError where the config, the data or the directory cannot be used.
    """
    folder = Path(config.run.output_dir).expanduser() / config.run.name
    check_trackers(config.run.trackers)
    set_up_devices(config.device)
    with ExitStack() as stack:
        account = Account(stack.enter_context(compile_clock()))
        company = stack.enter_context(join(config.device, _agreed(config)))
        check_devices(config.device)
        if company.process == 0:
            _make_folder(config, folder)
            stack.enter_context(_locked(config, folder))
            set_up_logging(folder)
            # After a failure the log stays open, for whoever reports it.
            stack.push(lambda kind, error, traceback: close_logging() if kind is None else None)
            sweep_temporary(folder)
        else:
            log_errors_alone()
        progress = stack.enter_context(Progress(None if company.process == 0 else Console(quiet=True)))
        log.info("%s: %s", config.run.name, ", ".join(config.stages))
        corpus = _prepared(config, progress, company)
        store = stack.enter_context(Store(folder / "checkpoints", config.checkpoint.keep, company=company))
        run = Run(config, folder, corpus, store, progress, company, account)
        stack.enter_context(run.metrics)
        stack.enter_context(run.samples)
        stack.push(lambda kind, error, traceback: run.close_trackers(failed=kind is not None))
        stack.enter_context(run.profiler)
        stack.enter_context(_signals(run))
        stack.enter_context(run.watchdog)
        run.facts = facts_of(config, run.mesh, run.dtype, corpus)
        announce(folder, run.facts, corpus)
        if run.document:
            place = (
                f"{run.document['stage']} {run.document['phase']}, step {run.document['spent']['steps']} of the phase"
            )
            log.info("going on from checkpoint %d: %s, %d of the run", run.checkpoint, place, run.step)
        yield run


def _agreed(config: Config) -> dict[str, Any]:
    """What all processes of a run must have been started with."""
    tree = redacted(config)
    del tree["device"]["process"]
    return tree


def _make_folder(config: Config, folder: Path) -> None:
    begun = any((folder / name).exists() for name in ("config.yaml", "metrics.jsonl", "checkpoints"))
    if config.run.resume == "never" and begun:
        raise ConfigError(
            f"`run.resume` is 'never' and {str(folder)!r} holds a run; expected a new run.name, or run.resume=auto"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(config, error) from None


def _unwritable(config: Config, error: OSError) -> ConfigError:
    return ConfigError(
        f"`run.output_dir` is {config.run.output_dir!r}; expected a folder that can be written ({error})"
    )


def _prepared(config: Config, progress: Progress, company: Company) -> Corpus:
    """The data. Process 0 prepares them first: the others find them in the cache, where they share one."""

    def read() -> Corpus:
        return prepare(config.data, config.run.seed, tokenizer_path(config.model), progress.prepare)

    mine = read() if company.process == 0 else None
    company.agree("process 0 has its data", None)
    corpus = mine or read()
    digests = company.agree("all have their data", corpus.summary["digest"])
    if len(set(digests)) > 1:
        raise ConfigError("`data`: the processes read different data; expected the same files, and versions, for all")
    return corpus


@contextmanager
def _locked(config: Config, folder: Path) -> Iterator[None]:
    """Holds the run directory. Raises ConfigError if another process does, or it cannot be written."""
    try:
        file = open(folder / ".lock", "w")  # noqa: SIM115 - what happens inside the context raises errors of its own
    except OSError as error:
        raise _unwritable(config, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"run directory {str(folder)!r} is in use by another run; expected a run.name of its own"
            ) from None
        yield


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


@contextmanager
def _signals(run: Run) -> Iterator[None]:
    """SIGINT and SIGTERM ask the run to stop after the step at hand; a second one ends it at once."""

    def handle(number: int, frame: Any) -> None:
        if run.asked_to_stop is not None:
            raise SystemExit(128 + number)
        run.asked_to_stop = number
        log.info("%s: leaving after this step; what is done is saved", signal.Signals(number).name)

    try:
        old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs us there handles signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
