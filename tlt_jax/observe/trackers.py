"""Trackers beside metrics.jsonl: where else the numbers of a step go."""

import io
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tlt_jax.observe.files import append_whole, plain


class Tracker(Protocol):
    """Takes the numbers of each step."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the numbers among `values` at the global `step`; what is no number is left out."""

    def close(self) -> None:
        """Write out what is pending."""


class TensorBoardTracker:
    """Scalars as TensorBoard event files in `<run>/tensorboard`, in the format of tensorboardX.

    Its writer would write from a thread, which a full disk ends: the run would then wait for it without end. Here a
    row is written when it is logged, and raises OSError.
    """

    def __init__(self, run_dir: str | Path, purge_step: int | None = None):
        """`purge_step`: the first step that will be logged again; TensorBoard drops what it had from there on."""
        from tensorboardX.proto import event_pb2, summary_pb2  # slow to import, and only a training run needs them
        from tensorboardX.record_writer import masked_crc32c

        self._event, self._summary, self._checksum = event_pb2.Event, summary_pb2.Summary, masked_crc32c
        folder = Path(run_dir) / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # Event files are named by the second: without a number, a run resumed within it would overwrite what it had.
        number = len(list(folder.glob("events.*")))
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{number}"
        self._file = io.FileIO(folder / name, "a")
        self._append(file_version="brain.Event:2")
        if purge_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._append(step=purge_step, session_log=start)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the numbers among `values`; NaN and infinities are left out, as TensorBoard cannot draw them."""
        # The fields that name the row (step, phase_step, ...) carry no slash.
        scalars = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in plain(dict(values)).items()
            if "/" in name and isinstance(value, int | float)
        ]
        self._append(step=step, summary=self._summary(value=scalars))

    def close(self) -> None:
        """Close the file; all is written."""
        self._file.close()

    def _append(self, **fields: Any) -> None:
        """One record: its length, the length's checksum, the event, its checksum."""
        record = self._event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(record))
        checks = [struct.pack("<I", self._checksum(part)) for part in (length, record)]
        append_whole(self._file, length + checks[0] + record + checks[1])


TRACKERS: dict[str, Callable[[Path, int | None], Tracker]] = {"tensorboard": TensorBoardTracker}


def open_trackers(names: Iterable[str], run_dir: str | Path, purge_step: int | None = None) -> list[Tracker]:
    """The trackers that the config names; on resume `purge_step` is the first step that will be logged again."""
    return [TRACKERS[name](Path(run_dir), purge_step) for name in names]
