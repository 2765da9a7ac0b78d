"""Trackers beside metrics.jsonl: where else the numbers of a step go."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tlt_jax.observe.files import plain


class Tracker(Protocol):
    """Takes the numbers of each step."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the numbers among `values` at the global `step`; what is no number is left out."""

    def close(self) -> None:
        """Write out what is pending."""


class TensorBoardTracker:
    """Scalars as TensorBoard event files in `<run>/tensorboard`, written by tensorboardX."""

    def __init__(self, run_dir: str | Path, purge_step: int | None = None):
        """`purge_step`: the first step that will be logged again; TensorBoard drops what it had from there on."""
        from tensorboardX import SummaryWriter  # slow to import, and only a training run needs it

        folder = Path(run_dir) / "tensorboard"
        # Event files are named by the second: without a number, a run resumed within it would overwrite what it had.
        number = len(list(folder.glob("events.*")))
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, filename_suffix=f".{number}")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the numbers among `values`; NaN and infinities are left out, as TensorBoard cannot draw them."""
        for name, value in plain(dict(values)).items():
            # The fields that name the row (step, phase_step, ...) carry no slash.
            if "/" in name and isinstance(value, int | float):
                self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        """Write out what is pending."""
        self._writer.close()


TRACKERS: dict[str, Callable[[Path, int | None], Tracker]] = {"tensorboard": TensorBoardTracker}


def open_trackers(names: Iterable[str], run_dir: str | Path, purge_step: int | None = None) -> list[Tracker]:
    """The trackers that the config names; on resume `purge_step` is the first step that will be logged again."""
    return [TRACKERS[name](Path(run_dir), purge_step) for name in names]
