"""A tracker whose troubles are its own: it neither ends the run nor holds it."""

import logging
import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

from tlt_jax.observe.tracking import Tracker

log = logging.getLogger("tlt_jax")

AGAIN_SECONDS = 30.0  # between two attempts of a tracker that fails
CLOSING_SECONDS = 60.0  # how long the end of a run waits for one that works
MOST_ROWS = 100_000  # held for a tracker that fails; what comes then is dropped


class Steady:
    """Hands rows to `tracker` in a thread of its own. Where it fails, that is told once, and it is tried again each
    `again` seconds with all that has waited; what it has not taken when the run ends is told too."""

    def __init__(self, name: str, tracker: Tracker, again: float = AGAIN_SECONDS):
        self._name, self._tracker, self._again = name, tracker, again
        self._rows: SimpleQueue[tuple[int, dict[str, Any]] | None] = SimpleQueue()
        self._closing, self._failed, self._told, self._lost = threading.Event(), False, False, 0
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Takes a row, and returns at once."""
        if self._rows.qsize() < MOST_ROWS:
            self._rows.put((step, dict(values)))
        else:
            self._lost += 1

    def close(self, failed: bool = False) -> None:
        """Waits until everything is handed over, a minute at most; a tracker that fails is tried once more."""
        self._failed = failed
        self._rows.put(None)
        self._closing.set()
        self._thread.join(CLOSING_SECONDS)
        lost = self._lost + (self._rows.qsize() if self._thread.is_alive() else 0)
        if lost or self._thread.is_alive():
            log.warning("%s has not taken the last %d rows; metrics.jsonl has them", self._name, lost)

    def _work(self) -> None:
        while (row := self._rows.get()) is not None:
            while not self._attempt(lambda row=row: self._tracker.log(*row)):
                if self._closing.is_set():  # this row, and those behind it but for the None at the end
                    self._lost += self._rows.qsize()
                    return
                self._closing.wait(self._again)
        self._attempt(lambda: self._tracker.close(self._failed))

    def _attempt(self, act: Any) -> bool:
        try:
            act()
        except Exception as error:  # whatever a tracker's library, or the way to its server, comes up with
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            level = logging.DEBUG if self._told else logging.WARNING
            self._told = True
            log.log(level, "%s fails (%s); the run goes on, and metrics.jsonl has every step", self._name, said)
            return False
        return True
