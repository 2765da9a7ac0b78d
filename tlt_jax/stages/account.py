"""The account of a whole run: on what the seconds of all its starts went, those that a restart lost among them.

Every second between the opening of the run directory and its end belongs to exactly one kind, so that the kinds add up
to the wall time by construction. Not seen is what lies outside: Python's imports before a start, the report after the
last record, and, of a start that was killed, what came after its last row.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from tlt_jax.observe.goodput import KINDS, account_of, sound_seconds
from tlt_jax.observe.run_files import section

COMPILE_EVENTS = "/jax/core/compile/"  # tracing, lowering, compiling
# What is timed inside a phase, where it is no computing.
KIND_OF = {"data": "waiting", "checkpoint": "saving"}


class CompileClock:
    """The seconds in which JAX traced, lowered or compiled; what is nested in another counts once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._depth, self._began, self._ended = clock, 0, 0.0, 0.0

    @property
    def busy(self) -> bool:
        """Whether JAX is compiling right now."""
        return self._depth > 0

    @property
    def seconds(self) -> float:
        """Seconds so far, those of what is going on among them."""
        return self._ended + (self._clock() - self._began if self._depth else 0.0)

    def begin(self) -> None:
        """Something begins to be traced, lowered or compiled."""
        if not self._depth:
            self._began = self._clock()
        self._depth += 1

    def end(self) -> None:
        """It ends; an end whose beginning was not seen counts nothing."""
        if self._depth == 1:
            self._ended += self._clock() - self._began
        self._depth = max(self._depth - 1, 0)


@contextmanager
def compile_clock() -> Iterator[CompileClock]:
    """A clock that JAX's own events drive."""
    clock = CompileClock()

    def begin(event: str, value: float | int, **_: str | int) -> None:
        if event.startswith(COMPILE_EVENTS):
            clock.begin()

    def end(event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith(COMPILE_EVENTS):
            clock.end()

    jax.monitoring.register_scalar_listener(begin)
    jax.monitoring.register_event_duration_secs_listener(end)
    try:
        yield clock
    finally:
        jax.monitoring.unregister_scalar_listener(begin)
        jax.monitoring.unregister_event_duration_listener(end)


class Account:
    """Seconds by kind (`KINDS`), of this start and of those that it takes up. One kind is being charged at any time;
    what JAX compiles meanwhile is charged as compiling."""

    def __init__(self, compiles: CompileClock, clock: Callable[[], float] = time.monotonic):
        self.compiles, self._clock, self._kind = compiles, clock, "loading"
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._since, self._compiled = clock(), compiles.seconds

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by kind up to now."""
        now, compiled = self._clock(), self.compiles.seconds
        elapsed = now - self._since
        compiling = min(compiled - self._compiled, elapsed)
        self._seconds["compiling"] += compiling
        self._seconds[self._kind] += elapsed - compiling
        self._since, self._compiled = now, compiled
        return dict(self._seconds)

    @property
    def total(self) -> float:
        """Seconds of all starts, up to now."""
        return sum(self.seconds.values())

    def switch(self, kind: str) -> str:
        """Charges `kind` from now on; returns the kind that was charged before."""
        assert kind in KINDS, kind
        self._seconds, before = self.seconds, self._kind
        self._kind = kind
        return before

    @contextmanager
    def on(self, kind: str) -> Iterator[None]:
        """Charges `kind` inside."""
        before = self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def take_up(self, earlier: Mapping[str, float], restarted: bool) -> None:
        """Adds what earlier starts spent. After a start that did not end (`restarted`), the loading of this one, so
        far and until the next switch, is lost to the restart."""
        self._seconds = self.seconds
        if restarted:
            self._seconds["restarts"] += self._seconds["loading"]
            self._seconds["loading"] = 0.0
            self._kind = "restarts" if self._kind == "loading" else self._kind
        for kind, seconds in earlier.items():
            self._seconds[kind] += seconds


def spent_before(
    document: Mapping[str, Any] | None, results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, float], bool]:
    """Seconds by kind of the starts before this one, and whether the last of them did not end: this is a restart.

    `document` is that of the checkpoint which the run goes on from, `results` what results.json holds, `rows` those of
    metrics.jsonl. All that was done after the checkpoint, up to the last sign of life, has to be done again, and is
    lost to the restart; after a start that did all it was to do nothing is.
    """
    found = account_of(section(dict(results), "account"))
    recorded = found["seconds"] if found else dict.fromkeys(KINDS, 0.0)
    if results.get("ended"):
        return recorded, False
    kept = dict.fromkeys(KINDS, 0.0)
    if document is not None:  # one of before there was an account counts as computing
        kept |= document.get("account", {"computing": document["seconds"]})
    last_row = sound_seconds(rows[-1].get("seconds")) if rows else 0.0
    lost = max(sum(recorded.values()), last_row) - sum(kept.values())
    kept["restarts"] += max(lost, 0.0)
    return kept, sum(kept.values()) > 0.0
