"""Whole files or none, and JSON that every reader accepts.

A run directory never holds half a file: what is rewritten is written beside its place, synced and renamed.

JSON has no NaN and no infinity. A number that is not finite is written as null: a key that is absent was not
measured, a key that is null was measured and came out not finite. The report counts the nulls.
"""

import io
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_text_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` (UTF-8) to `path` so that a reader, or a crash, sees the old file or the new one, never a part.

    Missing parent folders are made. Raises OSError where the disk does, and then leaves no temporary file behind.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, as a rename is atomic within one file system only; the pid keeps two writers apart.
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            with open(beside, "w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give an OSError from inside the path, if it has none: a write, unlike an open, does not say what it was on."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def append_whole(file: io.FileIO, content: bytes) -> None:
    """Append `content` to a file that was opened for appending without a buffer: all of it, or nothing.

    Raises OSError, with the path, where the disk is full. A buffer would keep what could not be written, and fail again
    with it when the file is closed.
    """
    before, rest = os.fstat(file.fileno()).st_size, memoryview(content)
    try:
        with naming(os.fspath(file.name)):
            while rest:
                rest = rest[file.write(rest) :]
    except OSError:
        os.ftruncate(file.fileno(), before)
        raise


def sweep_temporary(folder: str | os.PathLike[str]) -> None:
    """Remove what writers of `folder` that were killed left beside their files; nobody else may be writing there."""
    for path in Path(folder).glob(".*.tmp"):
        path.unlink(missing_ok=True)


def to_json(value: Any, indent: int | None = None) -> str:
    """`value` as valid JSON: NaN and infinities as null, NumPy and JAX scalars and arrays as numbers and lists.

    Non-ASCII is escaped, so that a lone surrogate in a decoded completion can neither break the encoding nor a line.
    Raises TypeError for what has no plain form.
    """
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, atomically; what is not finite becomes null (see `to_json`)."""
    write_text_atomically(path, to_json(value, indent=2) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file; ValueError with the path where it is no JSON, FileNotFoundError where there is none."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error


def plain(value: Any) -> Any:
    """`value` in JSON's own types: what is not finite as None, NumPy and JAX values as numbers and lists."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # NumPy and JAX alike, without importing either
        return plain(value.tolist())
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be opened (Windows does not)."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
