"""A watchdog over the loop: when nothing ends for too long, it says what is going on and where every thread stands.

It is a thread of Python's: code that hangs and holds the interpreter's lock silences it too.
"""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("tlt_jax")

PATIENCE_COMPILING = 10  # limits that pass before a compilation counts as stuck
LONGEST_NAP = 10.0  # seconds between two looks
# What is timed, as it goes on.
WORDS = {
    "evaluate": "evaluating",
    "checkpoint": "saving",
    "prepare": "preparing",
    "data": "waiting for data",
    "reward": "rewards",
}


class Watchdog:
    """Warns once nothing that the loop tells it of has begun or ended for `limit` seconds, and again after each
    further `limit`; 0: never.

    While `compiling()` it waits ten times as long, and the end of a compilation counts as an end. Outside of `during`
    it watches nothing. `tell` takes the warning and the stacks of all threads. Usable as a context manager, inside
    which a thread looks; `check` is one look.
    """

    def __init__(
        self,
        limit: float,
        tell: Callable[[str, str], None],
        compiling: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._limit, self._tell, self._compiling, self._clock = limit, tell, compiling, clock
        self._doing: tuple[str, ...] = ()
        self._last = self._told = self._compiled = clock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._limit:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._limit:
            self._thread.join()

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Inside, `what` is going on, within whatever already is."""
        before = self._doing
        self._doing, self._last = (*before, WORDS.get(what, what)), self._clock()
        try:
            yield
        finally:
            self._doing, self._last = before, self._clock()

    def check(self) -> None:
        """One look: tells if it is time to."""
        last, doing, now = self._last, self._doing, self._clock()
        if not doing or not self._limit:
            return
        since, limit = max(last, self._told), self._limit
        if self._compiling():
            self._compiled, limit = now, PATIENCE_COMPILING * limit
        else:
            since = max(since, self._compiled)
        if now - since >= limit:
            self._told = now
            what = ", ".join(doing[1:]) or "between two steps"
            self._tell(f"{doing[0]} is stuck: {what} for {now - last:.0f} s, and nothing ends", stacks())

    def _watch(self) -> None:
        while not self._stop.wait(min(self._limit / 4, LONGEST_NAP)):
            self.check()


def log_stuck(process: int, message: str, stacks: str) -> None:
    """Warns, and writes the stacks to the log's file; a process that has none, and shows errors alone, shows both."""
    if process == 0:
        log.warning("%s; the stacks of all threads are in log.txt", message)
        log.debug("stacks of all threads:\n%s", stacks)
    else:
        log.error("process %d: %s; the stacks of its threads:\n%s", process, message, stacks)


def stacks() -> str:
    """Where each thread but the calling one stands, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
        if ident != own
    )
