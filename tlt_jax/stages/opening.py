"""Opening a run: its devices and processes, its directory, its data; and closing all of that, however it ends."""

import fcntl
import logging
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from tlt_jax.checkpoint.store import Store
from tlt_jax.config import Config, ConfigError
from tlt_jax.config.load import redacted
from tlt_jax.data import Corpus, prepare
from tlt_jax.observe import (
    Progress,
    check_trackers,
    close_logging,
    log_errors_alone,
    set_up_logging,
    sweep_temporary,
)
from tlt_jax.parallel.hosts import Company, join
from tlt_jax.parallel.mesh import check_devices, set_up_devices
from tlt_jax.stages.account import Account, compile_clock
from tlt_jax.stages.facts import announce, facts_of
from tlt_jax.stages.models import tokenizer_path
from tlt_jax.stages.run import Run

log = logging.getLogger("tlt_jax")


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
