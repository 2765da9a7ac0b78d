"""Logs, progress and trackers."""

import io
import logging
import subprocess
import sys
from typing import get_args

import numpy as np
import pytest
from rich.console import Console

from tlt_jax.config import Config
from tlt_jax.config.base import TrackerName
from tlt_jax.observe import TRACKERS, Progress, close_logging, open_trackers, set_up_logging
from tlt_jax.observe.progress import clock_time, describe_row, short_number


@pytest.fixture
def quiet_logging():
    yield
    close_logging()


def make_console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)


def test_log_goes_to_file_with_traceback_and_to_console_without(tmp_path, quiet_logging):
    console = make_console(False)
    set_up_logging(tmp_path, console)
    logger = set_up_logging(tmp_path, console)  # a second time changes nothing
    child = logging.getLogger("tlt_jax.stages")
    child.info("plain [bold]text[/bold]")
    child.debug("only in the file")
    child.warning("careful")
    try:
        raise KeyError("inner")
    except KeyError:
        child.exception("it broke")
    assert console.file.getvalue() == "plain [bold]text[/bold]\nwarning: careful\nerror: it broke\n"
    text = (tmp_path / "log.txt").read_text()
    assert text.count("plain [bold]text[/bold]") == 1
    assert "INFO    tlt_jax.stages: plain" in text and "only in the file" in text
    assert "Traceback" in text and "KeyError: 'inner'" in text
    close_logging()
    assert not logger.handlers and logger.propagate


def test_what_a_library_raises_is_told_by_who_catches_it_and_stands_in_the_file(tmp_path, quiet_logging):
    console, library = make_console(False), logging.getLogger("absl")
    set_up_logging(tmp_path, console)
    try:
        raise OSError("no room")
    except OSError:
        library.exception("the save failed")
    library.error("something that nobody raises")
    assert console.file.getvalue() == "error: something that nobody raises\n"
    text = (tmp_path / "log.txt").read_text()
    assert "the save failed" in text and "OSError: no room" in text and "something that nobody raises" in text
    close_logging()
    assert library.propagate and not [handler for handler in library.handlers if handler.level <= logging.INFO]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_when_not_a_terminal():
    console, clock = make_console(False), Clock()
    with Progress(console, clock) as progress:
        progress.prepare("reading [files]", 0.5)
        progress.prepare("reading [files]", 1.0)
        progress.start("align", "reward_model")
        for step in range(1, 26):
            clock.now += 1.0
            progress.update(step / 50, {"train/loss": 0.5, "train/tokens_per_second": 12345.0})
        progress.note("a note")
        progress.finish("done in 25 s")
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "reading [files]  100%"
    assert lines[1] == "align reward model    0%  starting"
    assert lines[2] == "align reward model   20%  loss 0.500  12.3k tok/s  0:40 left"
    assert lines[3].startswith("align reward model   40%")
    assert lines[4:] == ["a note", "align reward model  100%  done in 25 s"]


def test_time_left_counts_from_where_the_run_went_on():
    console, clock = make_console(False), Clock()
    progress = Progress(console, clock)
    progress.start("pretrain", "pretrain")
    clock.now = 500.0  # compilation
    progress.update(0.50, {})
    clock.now = 520.0
    progress.update(0.60, {})
    assert console.file.getvalue().splitlines()[-1] == "pretrain   60%  1:20 left"


def test_live_lines_on_a_terminal():
    console = make_console(True)
    with Progress(console) as progress:
        progress.start("finetune", "policy")
        progress.update(0.25, {"rl/reward": 0.5, "rollout/target_calls_per_token": 0.4})
        progress.note("see [this]")
        progress.finish("reward [0.5]")
    text = console.file.getvalue()
    assert "finetune policy" in text and "reward [0.5]" in text and "see [this]" in text


def test_a_row_on_a_line():
    row = {"rl/reward": np.float32(0.25), "train/loss": 3.0, "rollout/tokens_per_second": 999.7, "train/lr": 1.0}
    assert describe_row(row) == ["reward 0.250", "1k tok/s"]
    assert describe_row({"train/loss": float("nan")}) == []
    assert [short_number(v) for v in (0, 812, 12345, 999_700, 4.5e6)] == ["0", "812", "12.3k", "1M", "4.5M"]
    assert [clock_time(s) for s in (5, 65.4, 3725)] == ["0:05", "1:05", "1:02:05"]


def test_trackers_are_those_the_config_offers():
    assert set(TRACKERS) == set(get_args(TrackerName))


def test_tensorboard_purges_what_is_logged_again(tmp_path):
    for first, steps in ((1, (1, 2, 3)), (3, (3, 4))):
        (tracker,) = open_trackers(Config(), tmp_path, {}, first)
        for step in steps:
            values = {"step": step, "train/loss": np.float32(1.5), "eval/loss": float("nan"), "stage": "pretrain"}
            tracker.log(step, values)
        tracker.close()
    events = [event for path in sorted((tmp_path / "tensorboard").iterdir()) for event in read_events(path)]
    scalars = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert sorted(scalars) == [(1, "train/loss", 1.5), (2, "train/loss", 1.5), *[(3, "train/loss", 1.5)] * 2,
                               (4, "train/loss", 1.5)]  # fmt: skip
    # TensorBoard drops the points from a START on, at its step.
    assert [event.step for event in events if event.HasField("session_log")] == [3]


def read_events(path):
    """The records of an event file: length (8 bytes), its checksum (4), the record, its checksum (4)."""
    from tensorboardX.proto.event_pb2 import Event

    data, position, events = path.read_bytes(), 0, []
    while position < len(data):
        length = int.from_bytes(data[position : position + 8], "little")
        events.append(Event.FromString(data[position + 12 : position + 12 + length]))
        position += length + 16
    return events


def test_a_reader_that_leaves_ends_nothing():
    code = (
        "import time\nfrom tlt_jax.observe.logs import CONSOLE\n"
        "for i in range(200):\n    CONSOLE.print(f'line {i}')\n    time.sleep(0.001)\n"
        "import sys\nsys.stderr.write('to the end')"
    )
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout and program.stderr
    assert program.stdout.readline() == "line 0\n"
    program.stdout.close()
    assert program.stderr.read() == "to the end"
    assert program.wait(timeout=60) == 0
