"""What all trackers share: what they are opened with, what they take, and under which id they go on."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tlt_jax.config import Config
from tlt_jax.observe.files import plain, read_json, write_json
from tlt_jax.observe.run_files import section


class Tracker(Protocol):
    """Takes the numbers of each step."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the numbers among `values` at the global `step`; what is no number is left out."""

    def close(self, failed: bool = False) -> None:
        """Write out what is pending; `failed` says whether the run ended before its end."""


@dataclass(frozen=True)
class Opening:
    """What a tracker is opened with: the config, the run directory, the resolved config as plain values without its
    secrets, the first step that will be logged, and the rows that earlier starts have written, by step: those from
    the first step on will be done again."""

    config: Config
    folder: Path
    hyperparameters: Mapping[str, Any]
    first: int
    rows: Sequence[Mapping[str, Any]]

    @property
    def logged(self) -> int:
        """The last step that an earlier start has written; 0: none."""
        return self.rows[-1]["step"] if self.rows else 0

    def kept(self, tracker: str, place: str) -> str | None:
        """The id under which `tracker` knows this run at `place`, if an earlier start has kept one."""
        entry = section(self._entries(), tracker)
        return str(entry["id"]) if entry.get("place") == _mark(place) and entry.get("id") else None

    def keep(self, tracker: str, place: str, identity: str) -> None:
        """Keeps that id for later starts, in trackers.json of the run directory."""
        entry = {tracker: {"place": _mark(place), "id": identity}}
        write_json(self.folder / "trackers.json", self._entries() | entry)

    def _entries(self) -> dict[str, Any]:
        path = self.folder / "trackers.json"
        entries = read_json(path) if path.is_file() else {}
        return entries if isinstance(entries, dict) else {}


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a row that are finite. The fields that name the row (step, phase_step, ...) carry no slash."""
    return {n: float(v) for n, v in plain(dict(values)).items() if "/" in n and isinstance(v, int | float)}


def _mark(place: str) -> str:
    """Tells places apart without writing them down: an address may carry a password."""
    return hashlib.sha256(place.encode()).hexdigest()[:16]
