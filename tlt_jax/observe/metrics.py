"""Rows of a run, one JSON object a line: metrics.jsonl (one a step) and samples.jsonl (several a step).

Appending never rewrites, so a crash can tear the last line and nothing else. Readers skip a torn last line; the log
cuts it off when it is opened again, as a new row must not be glued to it.
"""

import io
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from tlt_jax.observe.files import append_whole, naming, to_json, write_text_atomically


class MetricsLog:
    """An append-only file of rows that carry "step".

    Every row is handed to the system as it is appended, so that a killed process loses none. Usable as a context
    manager.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Open `path` for appending; makes it and its folder where missing, and cuts off a torn last line."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _mend_last_line(self.path)
        self._file = self._open()

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, whole or not at all. Values that are not finite are written as null. Raises ValueError without
        an integer step, OSError where the disk is full."""
        if not _is_step(row.get("step")):
            raise ValueError(f"a row needs an integer 'step', got {row.get('step')!r}")
        append_whole(self._file, (to_json(row) + "\n").encode())

    def truncate_after(self, step: int) -> int:
        """Drop every row with a step above `step`, atomically; returns how many.

        Called when a run goes on from a checkpoint taken after `step`: the steps that follow are done, and written,
        again, and so each stands exactly once.
        """
        self._file.close()
        rows = read_rows(self.path)
        kept = [row for row in rows if row["step"] <= step]
        if len(kept) < len(rows):
            write_text_atomically(self.path, "".join(to_json(row) + "\n" for row in kept))
        self._file = self._open()
        return len(rows) - len(kept)

    def faults(self, step: int) -> str | None:
        """What is wrong with the rows of a run that has done `step` steps, each of which should stand once; or None."""
        counts = Counter(row["step"] for row in read_rows(self.path))
        missing = [number for number in range(1, step + 1) if number not in counts]
        twice = [number for number, count in counts.items() if count > 1]
        said = [
            f"{len(steps)} steps {what} (the first: {steps[0]})"
            for steps, what in ((missing, "are missing"), (twice, "stand more than once"))
            if steps
        ]
        return ", ".join(said) or None

    def truncate_to(self, count: int) -> int:
        """Drop every row after the first `count`, atomically; returns how many."""
        self._file.close()
        rows = read_rows(self.path)
        if count < len(rows):
            write_text_atomically(self.path, "".join(to_json(row) + "\n" for row in rows[:count]))
        self._file = self._open()
        return max(len(rows) - count, 0)

    def count(self) -> int:
        """How many rows the file holds."""
        return len(read_rows(self.path))

    def close(self) -> None:
        """Sync to disk and close; closing twice does no harm."""
        if not self._file.closed:
            with self._file, naming(self.path):
                os.fsync(self._file.fileno())

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> io.FileIO:
        return io.FileIO(self.path, "a")


class NoLog(MetricsLog):
    """The log of a process that writes nothing."""

    def __init__(self) -> None:
        super().__init__(os.devnull)

    def close(self) -> None:
        """Nothing is synced, for there is nothing."""
        self._file.close()


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All rows of a file of rows, in order; [] where there is no file.

    A last line that is torn is left out. Any other line that is not a JSON object with an integer "step" raises
    ValueError with the file and the line: that is damage, not an interrupted write.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise ValueError(f"{path}, line {number}: not a JSON object with an integer 'step'")
    return rows


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # malformed JSON, or bytes that are no UTF-8
        return None
    return row if isinstance(row, dict) and _is_step(row.get("step")) else None


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _mend_last_line(path: Path) -> None:
    """Cut off a last line without its newline; only a whole row that lost nothing but the newline is completed.

    In place: shortening a file and appending one byte leave no state in between that a reader would not accept.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n", 0, len(content) - 1 if content.endswith(b"\n") else None) + 1
    last = content[end:]
    if not last:
        return
    if _parse(last) is None:
        os.truncate(path, end)
    elif not last.endswith(b"\n"):
        with open(path, "ab") as file:
            file.write(b"\n")
