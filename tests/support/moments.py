"""Moments of a run, found by looking at what it leaves: when it compiles, evaluates, or saves."""

import os
from collections.abc import Callable
from pathlib import Path

UPDATE = "jit(update)"  # what JAX calls the program of a supervised step
TELLING = ("JAX_LOG_COMPILES", "1")  # the variable with which JAX says on stderr what it compiles, as it begins


def compiling(output: Path, name: str = UPDATE) -> Callable[[], bool]:
    """Whether a run that was started with TELLING, and without a cache, compiles the program `name`."""

    def ready() -> bool:
        text = output.read_text() if output.is_file() else ""
        return f"Compiling {name}" in text and f"Finished XLA compilation of {name}" not in text

    return ready


def evaluating(run: Path, times: int) -> Callable[[], bool]:
    """Whether the log's last line says that an evaluation begins, the `times`th of the run."""

    def ready() -> bool:
        lines = (run / "log.txt").read_text().splitlines() if (run / "log.txt").is_file() else []
        begun = [": evaluating, " in line for line in lines]
        return sum(begun) == times and begun[-1]

    return ready


def saving(run: Path) -> Callable[[], bool]:
    """Whether a checkpoint is being written."""

    def ready() -> bool:
        steps = run / "checkpoints/steps"
        return steps.is_dir() and any("orbax-checkpoint-tmp" in entry.name for entry in os.scandir(steps))

    return ready
