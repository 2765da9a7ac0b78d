"""Trackers beside metrics.jsonl: where else the numbers of a step go.

What a tracker does with steps that a restart does again: TensorBoard drops what it had of them and takes the new
numbers; W&B and MLflow cannot forget, and keep the first ones. metrics.jsonl, which is always written, has each step
once, as it was last done.
"""

import importlib.util
import io
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tlt_jax.config import Config, ConfigError
from tlt_jax.observe.files import append_whole
from tlt_jax.observe.mlflow_tracker import MlflowTracker
from tlt_jax.observe.steady import Steady, log
from tlt_jax.observe.tracking import Opening, Tracker, numbers
from tlt_jax.observe.wandb_tracker import WandbTracker

EXTRA = ("wandb", "mlflow")  # the extra `track` has the packages of these names


class TensorBoardTracker:
    """Scalars as TensorBoard event files in `<run>/tensorboard`, in the format of tensorboardX.

    Its writer would write from a thread, which a full disk ends: the run would then wait for it without end. Here a
    row is written when it is logged, and raises OSError.
    """

    def __init__(self, opening: Opening):
        """TensorBoard drops what it had from the first step on that will be logged."""
        from tensorboardX.proto import event_pb2, summary_pb2  # slow to import, and only a training run needs them
        from tensorboardX.record_writer import masked_crc32c

        self._event, self._summary, self._checksum = event_pb2.Event, summary_pb2.Summary, masked_crc32c
        folder = opening.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # Event files are named by the second: without a number, a run resumed within it would overwrite what it had.
        number = len(list(folder.glob("events.*")))
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{number}"
        self._file = io.FileIO(folder / name, "a")
        self._append(file_version="brain.Event:2")
        if number:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._append(step=opening.first, session_log=start)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the metrics among `values`; NaN and infinities are left out, as TensorBoard cannot draw them."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers(values).items()]
        self._append(step=step, summary=self._summary(value=scalars))

    def close(self, failed: bool = False) -> None:
        """Close the file; all is written."""
        self._file.close()

    def _append(self, **fields: Any) -> None:
        """One record: its length, the length's checksum, the event, its checksum."""
        record = self._event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(record))
        checks = [struct.pack("<I", self._checksum(part)) for part in (length, record)]
        append_whole(self._file, length + checks[0] + record + checks[1])


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
    config: Config,
    folder: Path,
    hyperparameters: Mapping[str, Any],
    first: int = 1,
    rows: Sequence[Mapping[str, Any]] = (),
) -> list[Tracker]:
    """The trackers that the config names; see `Opening` for the rest.

    One that cannot be opened raises ConfigError where a run begins. Where a run goes on (`first` above 1) a server
    that is away must not end it: that is told, and the run goes on without.
    """
    opening = Opening(config, folder, hyperparameters, first, rows)
    opened: list[Tracker] = []
    with ExitStack() as undo:
        for name in config.run.trackers:
            try:
                tracker = Steady(name, TRACKERS[name](opening))
            except Exception as error:
                why = f"{name} cannot be opened ({' '.join(str(error).split())[:300]})"
                if first == 1:
                    raise ConfigError(
                        f"`run.trackers`: {why}; expected it to be reached, or run.trackers without"
                    ) from error
                log.warning("%s; the run goes on without it, and metrics.jsonl has every step", why)
            else:
                opened.append(tracker)
                undo.callback(tracker.close, failed=True)
        undo.pop_all()
    return opened
