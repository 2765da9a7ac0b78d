"""Trackers beside metrics.jsonl: where else the numbers of a step go.

What a tracker does with steps that a restart does again: TensorBoard drops what it had of them and takes the new
numbers; W&B and MLflow cannot forget, and keep the first ones. metrics.jsonl, which is always written, has each step
once, as it was last done.
"""

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tlt_jax.config import Config, ConfigError
from tlt_jax.observe.mlflow_tracker import MlflowTracker
from tlt_jax.observe.steady import Steady, log
from tlt_jax.observe.tracking import Opening, Tracker, numbers
from tlt_jax.observe.wandb_tracker import WandbTracker

EXTRA = ("wandb", "mlflow")  # the extra `track` has the packages of these names


class TensorBoardTracker:
    """Scalars as TensorBoard event files in `<run>/tensorboard`, written by tensorboardX."""

    def __init__(self, opening: Opening):
        """TensorBoard drops what it had from the first step on that will be logged."""
        from tensorboardX import SummaryWriter  # slow to import, and only a training run needs it

        folder = opening.folder / "tensorboard"
        # Event files are named by the second: without a number, a run resumed within it would overwrite what it had.
        number = len(list(folder.glob("events.*")))
        purge_step = opening.first if number else None
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, filename_suffix=f".{number}")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the metrics among `values`; NaN and infinities are left out, as TensorBoard cannot draw them."""
        for name, value in numbers(values).items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool = False) -> None:
        """Write out what is pending."""
        self._writer.close()


TRACKERS: dict[str, Callable[[Opening], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def check_trackers(names: Iterable[str]) -> None:
    """Raises ConfigError for a tracker whose package is not installed; imports none."""
    for name in names:
        spec = importlib.util.find_spec(name) if name in EXTRA else None
        # A folder of that name, as W&B leaves one, is found too: it has no file of its own.
        if name in EXTRA and (spec is None or spec.origin is None):
            raise ConfigError(
                f"`run.trackers` asks for {name!r}, which is not installed; expected the extra `track`"
                " (pip install 'tlt_jax[track]'), or run.trackers without it"
            )


def open_trackers(
    config: Config, folder: Path, hyperparameters: Mapping[str, Any], first: int = 1, logged: int = 0
) -> list[Tracker]:
    """The trackers that the config names; see `Opening` for the rest.

    One that cannot be opened raises ConfigError where a run begins. Where a run goes on (`first` above 1) a server
    that is away must not end it: that is told, and the run goes on without.
    """
    opening = Opening(config, folder, hyperparameters, first, logged)
    opened: list[Tracker] = []
    for name in config.run.trackers:
        try:
            opened.append(Steady(name, TRACKERS[name](opening)))
        except Exception as error:
            why = f"{name} cannot be opened ({' '.join(str(error).split())[:300]})"
            if first == 1:
                raise ConfigError(
                    f"`run.trackers`: {why}; expected it to be reached, or run.trackers without"
                ) from error
            log.warning("%s; the run goes on without it, and metrics.jsonl has every step", why)
    return opened
