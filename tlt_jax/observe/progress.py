"""Progress of a run: live bars on a terminal, a plain line now and then anywhere else."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

from tlt_jax.observe.files import plain
from tlt_jax.observe.logs import CONSOLE

PLAIN_INTERVAL = 10.0  # seconds between two plain lines


class Progress:
    """One line a phase: a bar by the phase's progress, loss or reward, tokens per second, target calls per token in
    reinforcement learning, and the time left.

    A context manager. On a terminal the lines are live; elsewhere (a file, a batch system's log) one plain line is
    written every 10 seconds and one at each phase's end. Time left is estimated from the progress made since the
    phase's first update, so that neither compilation nor what an earlier run did distorts it.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        """`console` defaults to the one shared with the log; `clock` gives seconds."""
        self._console = console or CONSOLE
        self._clock = clock
        self._live = _make_bars(self._console) if self._console.is_terminal else None
        self._tasks: dict[str, TaskID] = {}
        self._label = ""
        self._first: tuple[float, float] | None = None  # (progress, time) at the phase's first update
        self._last_plain = clock()

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def start(self, stage: str, phase: str, progress: float = 0.0) -> None:
        """Begin the line of a phase, or go on with it from `progress`."""
        self._label = stage if stage == phase else f"{stage} {phase.replace('_', ' ')}"
        self._first = None
        self._last_plain = self._clock()
        self._show(self._label, progress, "starting", always=True)

    def update(self, progress: float, row: Mapping[str, Any]) -> None:
        """Show the phase's `progress` (0 to 1) and the metrics of its latest row."""
        now = self._clock()
        if self._first is None:
            self._first = (progress, now)
        parts = [*describe_row(row), *self._time_left(progress, now)]
        self._show(self._label, progress, "  ".join(parts))

    def finish(self, summary: str) -> None:
        """End the phase's line with a summary that stays."""
        self._show(self._label, 1.0, summary, always=True)

    def note(self, text: str) -> None:
        """Print a line of its own, above the bars."""
        self._console.print(Text(text), soft_wrap=True)

    def prepare(self, label: str, fraction: float) -> None:
        """Show how far a preparation (reading, tokenising) is, 0 to 1; usable as the data preparation's callback."""
        self._show(label, fraction, "", always=fraction >= 1.0)

    def _show(self, label: str, fraction: float, info: str, always: bool = False) -> None:
        fraction = min(max(fraction, 0.0), 1.0)
        if self._live:
            if label not in self._tasks:
                self._tasks[label] = self._live.add_task(label, total=1.0, info="")
            self._live.update(self._tasks[label], completed=fraction, info=info)
        elif always or self._clock() - self._last_plain >= PLAIN_INTERVAL:
            self._last_plain = self._clock()
            self._console.print(Text(f"{label}  {fraction:4.0%}  {info}".rstrip()), soft_wrap=True)

    def _time_left(self, progress: float, now: float) -> list[str]:
        assert self._first is not None
        made, spent = progress - self._first[0], now - self._first[1]
        if made <= 0 or spent <= 0:
            return []
        return [f"{clock_time(spent * (1 - progress) / made)} left"]


def describe_row(row: Mapping[str, Any]) -> list[str]:
    """The few numbers of a row that fit on a line: reward or loss, speed, target calls per token."""
    row, parts = plain(dict(row)), []
    for name, word in (("rl/reward", "reward"), ("train/main_loss", "loss"), ("train/loss", "loss")):
        if isinstance(row.get(name), int | float):
            parts.append(f"{word} {row[name]:.3f}")
            break
    speed = row.get("train/tokens_per_second", row.get("rollout/tokens_per_second"))
    if isinstance(speed, int | float):
        parts.append(f"{short_number(speed)} tok/s")
    calls = row.get("rollout/target_calls_per_token")
    if isinstance(calls, int | float):
        parts.append(f"{calls:.2f} calls/tok")
    return parts


def clock_time(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short_number(value: float) -> str:
    """A count or a speed in at most five characters: 812, 12.3k, 4.56M."""
    for divisor, suffix in ((1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "B")):
        if abs(value) < 999.5 * divisor:  # above, three digits would round to 1000
            scaled = value / divisor
            return f"{scaled:.0f}" if not suffix else f"{scaled:.3g}{suffix}"
    return f"{value:.2g}"


def _make_bars(console: Console) -> RichProgress:
    gives_way = Column(no_wrap=True, overflow="ellipsis", ratio=1)  # where the line is too long
    return RichProgress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=12 if console.width <= 120 else 28),
        TaskProgressColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[info]}", markup=False, table_column=gives_way),
        console=console,
        refresh_per_second=4,
    )
