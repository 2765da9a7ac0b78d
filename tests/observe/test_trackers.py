"""Trackers that fail, that are missing, and that go on: what the run sees of it. Without the packages themselves."""

import importlib.util
import logging
import threading
import time

import pytest

from tlt_jax.cli.validate import check_files
from tlt_jax.config import ConfigError, load_config
from tlt_jax.observe import TRACKERS, check_trackers, open_trackers
from tlt_jax.observe.steady import Steady
from tlt_jax.observe.tracking import Opening, numbers

FRESH = load_config(None, ["run.trackers=[tensorboard]"])


class Shaky:
    """A tracker whose server is away until `away` is cleared; `hold` keeps it inside a call."""

    def __init__(self):
        self.away, self.hold, self.taken, self.closed = False, threading.Event(), [], []
        self.hold.set()

    def log(self, step, values):
        self.hold.wait(10)
        if self.away:
            raise ConnectionError("the server is\naway")
        self.taken.append((step, values))

    def close(self, failed=False):
        self.closed.append(failed)


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "tlt_jax")
    return lambda: [record.getMessage() for record in caplog.records]


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_rows_arrive_in_order_and_none_is_waited_for(said):
    shaky = Shaky()
    shaky.hold.clear()
    steady = Steady("wandb", shaky)
    row = {"train/loss": 1.0}
    for step in (1, 2, 3):
        steady.log(step, row)
    row["train/loss"] = 2.0  # the loop's own row, after it was handed over
    assert shaky.taken == []
    shaky.hold.set()
    steady.close(failed=True)
    assert shaky.taken == [(step, {"train/loss": 1.0}) for step in (1, 2, 3)]
    assert shaky.closed == [True] and said() == []


def test_a_server_that_was_away_gets_what_has_waited_and_is_told_of_once(said):
    shaky = Shaky()
    steady = Steady("mlflow", shaky, again=0.01)
    shaky.away = True
    for step in (1, 2, 3):
        steady.log(step, {})
    until(said)
    time.sleep(0.1)
    shaky.away = False
    steady.close()
    assert [step for step, _ in shaky.taken] == [1, 2, 3] and shaky.closed == [False]
    assert said() == [
        "mlflow fails (ConnectionError: the server is away); the run goes on, and metrics.jsonl has every step"
    ]


def test_a_server_that_stays_away_does_not_hold_the_end(said):
    shaky = Shaky()
    steady = Steady("mlflow", shaky, again=1000.0)
    steady.log(1, {})
    until(lambda: len(shaky.taken) == 1)
    shaky.away = True
    for step in (2, 3, 4):
        steady.log(step, {})
    until(said)
    start = time.monotonic()
    steady.close()
    assert time.monotonic() - start < 5.0
    assert said()[1:] == ["mlflow has not taken the last 3 rows; metrics.jsonl has them"]
    assert shaky.closed == []


@pytest.mark.parametrize("folder", [False, True], ids=["nothing", "a folder of its name"])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_else(monkeypatch, tmp_path, folder):
    spec = importlib.util.spec_from_loader("mlflow", None) if folder else None  # as of a folder: without an origin
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    config = load_config(None, ["run.trackers=[tensorboard, mlflow]", f"run.output_dir={tmp_path}/runs"])
    with pytest.raises(ConfigError, match=r"`run.trackers` asks for 'mlflow'.* the extra `track`"):
        check_files(config)
    from tlt_jax.stages.opening import open_run

    with pytest.raises(ConfigError, match=r"`run.trackers` asks for 'mlflow'"), open_run(config):
        pass
    assert not (tmp_path / "runs").exists()
    check_trackers(["tensorboard"])


def test_one_that_cannot_be_opened_refuses_a_new_run_and_lets_an_old_one_go_on(monkeypatch, tmp_path, said):
    def refuse(opening):
        raise ConnectionError("no answer")

    monkeypatch.setitem(TRACKERS, "tensorboard", refuse)
    with pytest.raises(ConfigError, match=r"`run.trackers`: tensorboard cannot be opened \(no answer\)"):
        open_trackers(FRESH, tmp_path, {})
    assert said() == []
    assert open_trackers(FRESH, tmp_path, {}, first=5) == []
    assert "tensorboard cannot be opened (no answer); the run goes on without it" in said()[0]


def test_trackers_opened_before_one_that_cannot_be_are_closed(monkeypatch, tmp_path):
    shaky = Shaky()

    def refuse(opening):
        raise ConnectionError("no answer")

    monkeypatch.setitem(TRACKERS, "tensorboard", lambda opening: shaky)
    monkeypatch.setitem(TRACKERS, "mlflow", refuse)
    with pytest.raises(ConfigError, match="mlflow cannot be opened"):
        open_trackers(load_config(None, ["run.trackers=[tensorboard, mlflow]"]), tmp_path, {})
    assert shaky.closed == [True]


def test_ids_are_kept_by_place_and_places_stay_secret(tmp_path):
    opening = Opening(FRESH, tmp_path, {}, 1, ())
    assert opening.kept("mlflow", "https://me:hunter2@there") is None
    opening.keep("mlflow", "https://me:hunter2@there", "abc")
    opening.keep("wandb", "me/project", "def")
    assert opening.kept("mlflow", "https://me:hunter2@there") == "abc"
    assert opening.kept("wandb", "me/project") == "def" and opening.kept("wandb", "me/other") is None
    assert "hunter2" not in (tmp_path / "trackers.json").read_text()


def test_numbers_are_the_finite_metrics_of_a_row():
    row = {"step": 3, "stage": "align", "seconds": 1.5, "rl/kl": 2, "rl/reward": float("nan"), "eval/note": "x"}
    assert numbers(row) == {"rl/kl": 2.0}
