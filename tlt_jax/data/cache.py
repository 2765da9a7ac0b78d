"""A folder of prepared data, one entry a digest: whole or absent, checked when read, safe for many processes at once.

An entry holds .npy files, a tokenizer.json, a meta.json and a manifest.json with every file's size and SHA-256. It is
built in a temporary folder beside its place and renamed into it.
"""

import hashlib
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MANIFEST = "manifest.json"
STALE_SECONDS = 24 * 3600
_log = logging.getLogger("tlt_jax")


def write_entry(folder: Path, digest: str, fill: Callable[[Path], None]) -> None:
    """Fills a temporary folder, adds the manifest and renames it to folder/digest; if another process was first, its
    entry stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    temporary = folder / f"{digest}.tmp-{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        fill(temporary)
        files = {path.name: _fingerprint(path) for path in sorted(temporary.iterdir())}
        (temporary / MANIFEST).write_text(json.dumps(files, indent=1), encoding="utf-8")
        try:
            os.rename(temporary, folder / digest)
        except OSError:
            if not (folder / digest).is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_entry(folder: Path, digest: str) -> Path | None:
    """The entry's folder if every file is there, of the stored size and hash; a damaged entry is logged, removed, and
    None.
    """
    entry = folder / digest
    if not entry.is_dir():
        return None
    fault = _fault(entry)
    if fault is None:
        return entry
    discard_entry(folder, digest, fault)
    return None


def discard_entry(folder: Path, digest: str, fault: str) -> None:
    """Logs why the entry cannot be used and takes it away, in one rename, so that nobody finds half of it."""
    _log.warning("prepared data %s is damaged (%s); it is prepared again", folder / digest, fault)
    aside = folder / f"{digest}.tmp-{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        os.rename(folder / digest, aside)
    except FileNotFoundError:
        return  # another process did the same
    shutil.rmtree(aside, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Removes temporary folders whose process is dead; those of other hosts, when they are a day old."""
    for path in sorted(folder.glob("*.tmp-*-*-*")):
        host, pid, _ = path.name.split(".tmp-", 1)[1].rsplit("-", 2)
        try:
            alive = _alive(int(pid)) if host == _host() else time.time() - path.stat().st_mtime < STALE_SECONDS
        except (ValueError, FileNotFoundError):
            continue  # not one of ours, or gone by now
        if not alive:
            shutil.rmtree(path, ignore_errors=True)


def save_ragged(path: Path, name: str, arrays: Sequence[np.ndarray]) -> None:
    """Arrays [n_i] of int32 as NAME.tokens.npy (all, end to end) and NAME.lengths.npy."""
    tokens = np.concatenate(arrays) if len(arrays) else np.zeros(0)
    np.save(path / f"{name}.tokens.npy", tokens.astype(np.int32), allow_pickle=False)
    np.save(path / f"{name}.lengths.npy", np.array([len(array) for array in arrays], np.int64), allow_pickle=False)


def load_ragged(path: Path, name: str) -> list[np.ndarray]:
    """What `save_ragged` wrote. Raises ValueError or OSError for files that are not so."""
    tokens = np.load(path / f"{name}.tokens.npy", allow_pickle=False)
    lengths = np.load(path / f"{name}.lengths.npy", allow_pickle=False)
    if lengths.sum() != len(tokens):
        raise ValueError(f"{name}: {len(tokens)} tokens, but lengths add up to {lengths.sum()}")
    ends = np.cumsum(lengths)
    return [tokens[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _fault(entry: Path) -> str | None:
    try:
        manifest: dict[str, Any] = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        for name, expected in manifest.items():
            if (entry / name).stat().st_size != expected["size"]:
                return f"{name} has another size"
            if _fingerprint(entry / name) != expected:
                return f"{name} has another SHA-256"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
