"""The account of a run's time: by hand, and of a run that hung, fell over and went on; the watchdog saw it hang."""

import threading
import time
from types import SimpleNamespace

import pytest
from support import program

from tlt_jax.config import load_config
from tlt_jax.observe import close_logging, read_json
from tlt_jax.observe.goodput import KINDS, account_of, render_account
from tlt_jax.stages import pipeline
from tlt_jax.stages.account import Account, CompileClock, spent_before
from tlt_jax.stages.supervised import Supervised

STEPS = 8


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def spent(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(KINDS, 0.0) | seconds


def test_what_is_nested_compiles_once():
    clock = Clock()
    compiles = CompileClock(clock)
    for now, turn in ((1.0, compiles.begin), (2.0, compiles.begin), (5.0, compiles.end)):
        clock.now = now
        turn()
    assert (compiles.seconds, compiles.busy) == (4.0, True)
    clock.now = 7.0
    compiles.end()
    compiles.end()  # one whose beginning was not seen
    clock.now = 9.0
    assert (compiles.seconds, compiles.busy) == (6.0, False)


def test_every_second_is_of_one_kind():
    clock = Clock()
    compiles = CompileClock(clock)
    account = Account(compiles, clock)
    clock.now = 3.0
    account.switch("computing")
    clock.now = 5.0
    with account.on("saving"):
        clock.now = 9.0
        compiles.begin()
        clock.now = 10.0
        compiles.end()
    clock.now = 16.0
    assert account.seconds == spent(loading=3.0, computing=8.0, saving=4.0, compiling=1.0)
    assert account.total == 16.0


def test_a_restart_charges_its_own_loading_and_what_was_done_in_vain():
    document = {"account": spent(loading=5.0, computing=20.0), "seconds": 25.0}
    results = {"account": spent(loading=5.0, computing=21.0, saving=1.0), "ended": False}
    earlier, restarted = spent_before(document, results, [{"step": 1, "seconds": 24.0}, {"step": 2, "seconds": 31.0}])
    assert (earlier, restarted) == (spent(loading=5.0, computing=20.0, restarts=6.0), True)
    clock = Clock()
    account = Account(CompileClock(clock), clock)
    clock.now = 4.0
    account.take_up(earlier, restarted)
    clock.now = 6.0
    account.switch("computing")
    assert account.seconds == spent(loading=5.0, computing=20.0, restarts=12.0)
    account.switch("loading")
    clock.now = 7.0
    assert account.seconds["loading"] == 6.0  # that of the next phase is no restart's


@pytest.mark.parametrize(
    ("document", "results", "rows", "expected"),
    [
        (None, {}, [], (spent(), False)),
        (None, {}, [{"step": 1, "seconds": 9.0}], (spent(restarts=9.0), True)),  # before the first checkpoint
        (None, {"account": {"loading": 3.0}}, [], (spent(restarts=3.0), True)),  # before the first row
        ({"seconds": 7.0}, {}, [], (spent(computing=7.0), True)),  # of before there was an account
        ({"account": spent(computing=7.0), "seconds": 7.0}, {"account": "?"}, [{}], (spent(computing=7.0), True)),
        (None, {"account": {"saving": "?", "loading": 10**400}}, [{"seconds": "?"}], (spent(), False)),
        # One that did all it was to do, and goes on with a later stage, has lost nothing.
        (
            {"account": spent(computing=7.0), "seconds": 7.0},
            {"account": spent(computing=7.0, saving=2.0), "ended": True},
            [{"seconds": 6.0}],
            (spent(computing=7.0, saving=2.0), False),
        ),
    ],
)
def test_what_earlier_starts_spent(document, results, rows, expected):
    assert spent_before(document, results, rows) == expected


def test_goodput_is_the_share_that_computed():
    account = account_of({"computing": 30.0, "loading": 5.0, "restarts": 5.0, "unknown": 99.0, "saving": None})
    assert account == {"seconds": spent(computing=30.0, loading=5.0, restarts=5.0), "whole": 40.0, "goodput": 0.75}
    page = render_account(account)
    assert "goodput 75.0%" in page and "lost to restarts" in page and page.count("12.5%") == 2
    assert account_of({}) is None and render_account(None) == ""


@pytest.fixture(scope="module")
def story(tmp_path_factory, compilation_cache):
    """A run whose second step hangs until the watchdog barks, whose sixth fails, and that goes on to its end."""
    folder = tmp_path_factory.mktemp("story")
    run = folder / "runs/tiny"
    options = [*program.plain_text(folder), f"budget.total={STEPS}", "checkpoint.every_steps=3"]
    options += [f"run.output_dir={folder}/runs", f"data.cache_dir={folder}/data"]
    options += [f"device.compilation_cache={compilation_cache}"]
    config = load_config(program.ROOT / "configs/tiny.yaml", [*options, "faults.stuck_after=0.4"])
    step, report = Supervised.step, pipeline._report
    reporting, failing, released = [0.0], [True], threading.Event()

    def log() -> str:
        return (run / "log.txt").read_text()

    def the_place_that_hangs() -> None:
        deadline = time.monotonic() + 30
        while "is stuck: step 2" not in log() or "the_place_that_hangs" not in log():
            assert time.monotonic() < deadline, "the watchdog keeps quiet"
            released.wait(0.05)

    def stumbling(self, state, at):
        if failing[0] and at.index == 1:
            the_place_that_hangs()
        if failing[0] and at.index == 4:
            time.sleep(0.5)
        if failing[0] and at.index == 5:
            raise RuntimeError("the machine fails")
        return step(self, state, at)

    def timed_report(run) -> None:
        start = time.monotonic()
        report(run)
        reporting[0] += time.monotonic() - start

    walls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Supervised, "step", stumbling)
        patch.setattr(pipeline, "_report", timed_report)
        for failing[0] in (True, False):
            start = time.monotonic()
            try:
                pipeline.run_all(config)
            except RuntimeError as error:
                assert failing[0] and "the machine fails" in str(error)
            walls.append(time.monotonic() - start)
            close_logging()
    return SimpleNamespace(folder=folder, run=run, log=log(), wall=sum(walls) - reporting[0])


@pytest.mark.faults
def test_a_step_that_hangs_is_told_and_then_goes_on(story):
    assert "WARNING tlt_jax: pretrain pretrain is stuck: step 2 for " in story.log
    assert "stacks of all threads:\nthread MainThread:" in story.log and "in the_place_that_hangs" in story.log
    assert [row["step"] for row in program.rows(story.folder)] == list(range(1, STEPS + 1))


@pytest.mark.faults
def test_the_account_adds_up_to_the_wall_time_of_all_starts(story):
    seconds = read_json(story.run / "results.json")["account"]
    assert set(seconds) == set(KINDS) and all(value >= 0.0 for value in seconds.values())
    # Not seen: closing, and what came after the last row of the start that failed.
    assert story.wall - 2.0 < sum(seconds.values()) < story.wall
    assert seconds["restarts"] > 0.5  # the sleep in step 5, which was done again
    assert seconds["computing"] > 0.4 and seconds["saving"] > 0.0 and seconds["loading"] > 0.0
    rows = [row["seconds"] for row in program.rows(story.folder)]
    assert rows == sorted(rows)  # time does not go back with a restart


@pytest.mark.faults
def test_the_report_has_the_account(story):
    account, results = read_json(story.run / "report.json")["account"], read_json(story.run / "results.json")
    assert account["seconds"] == pytest.approx(results["account"])
    assert account["goodput"] == pytest.approx(account["seconds"]["computing"] / account["whole"])
    assert "The whole run: goodput" in (story.run / "report.html").read_text()


@pytest.mark.faults
def test_the_step_after_a_save_says_how_long_it_held_the_loop(story):
    held = {row["step"]: row["time/checkpoint"] for row in program.rows(story.folder) if "time/checkpoint" in row}
    assert list(held) == [7] and held[7] > 0.0  # saved after step 6; of step 3, the row of step 4 was done again
