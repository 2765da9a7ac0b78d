"""Skipped steps, checkpoints and returns: a phase whose steps are told in advance, in the loop of all phases."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from tlt_jax.checkpoint.store import Store
from tlt_jax.config import ConfigError, load_config
from tlt_jax.stages import insight, trouble
from tlt_jax.stages.pipeline import run_all
from tlt_jax.stages.pretrain import Pretrain
from tlt_jax.stages.run import Interrupted

ROOT = Path(__file__).resolve().parents[2]


class Told:
    """Pretraining whose steps compute nothing: those at `bad` places of the data are skipped; the run is told to stop
    in the step at place `stop`. What it did stands in `places`, `saved` and `numbers`, of
    the checkpoints that were restored."""

    def __init__(self, folder: Path, data: Path, patch: pytest.MonkeyPatch):
        self.bad: tuple[int, ...] = ()
        self.stop: int | None = None
        self.places: list[int] = []
        self.saved: list[dict] = []
        self.numbers: list[int] = []
        self.overrides = [
            f"run.output_dir={folder}/runs", f"data.cache_dir={data}", "stages=[pretrain]", "run.trackers=[]",
            "run.export=false", "device.compilation_cache=", "checkpoint.every_seconds=null", "budget.total=12",
            "faults.rollback_after=3", "faults.stop_after=2",
        ]  # fmt: skip
        save, restore = Store.save, Store.restore
        patch.setattr(insight, "peak_flops", lambda dtype: (1.0, "one"))
        patch.setattr(Pretrain, "evaluate", lambda phase, state, when: (state, {}))
        patch.setattr(Pretrain, "step", lambda phase, state, step: self.step(phase, state))
        patch.setattr(Store, "save", lambda s, n, a, document: (self.saved.append(document), save(s, n, a, document)))
        patch.setattr(Store, "restore", lambda s, number, like: self.restore(restore, s, number, like))

    def run(self, *overrides: str):
        return run_all(load_config(ROOT / "configs/tiny.yaml", [*self.overrides, *overrides]))

    def restore(self, restore, store, number, like):
        self.numbers.append(number)
        return restore(store, number, like)

    def step(self, phase, state):
        loader = state.host["loader"]
        place = loader["position"]["next_index"]
        self.places.append(place)
        if place == self.stop:
            phase.run.asked_to_stop = 15
        metrics = {"train/loss": 1.0, "train/grad_norm": 1.0, "train/skipped": jnp.float32(place in self.bad)}
        moved = {**loader, "position": {**loader["position"], "next_index": place + 1}}
        return type(state)(state.arrays, {**state.host, "loader": moved}), metrics, 1

    @property
    def steps_saved(self) -> list[int]:
        return [document["spent"]["steps"] for document in self.saved]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def told(tmp_path, data, monkeypatch) -> Told:
    return Told(tmp_path, data, monkeypatch)


EACH = ["checkpoint.every_steps=1", "run.log_every=4"]  # what was skipped is not known yet when a checkpoint is due


def test_a_row_of_skipped_steps_is_not_saved_and_its_data_are_left_behind(told):
    told.bad = (4, 5, 6)
    told.run(*EACH)
    assert told.places == list(range(12))
    assert told.numbers == [4]
    assert told.steps_saved == [1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 12]
    assert [document["trouble"]["returns"] for document in told.saved] == [0] * 4 + [1] * 7


def test_skipped_steps_that_are_few_are_gone_on_from(told):
    told.bad = (4, 5)
    told.run(*EACH)
    assert told.numbers == []
    assert told.steps_saved == [1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 12]


def test_who_stops_within_such_a_row_goes_on_there_and_goes_back_to_before_it(told):
    told.bad, told.stop = (4, 5, 6, 8), 5
    with pytest.raises(Interrupted):
        told.run(*EACH)
    assert told.steps_saved == [1, 2, 3, 4, 6]
    assert told.saved[-1]["trouble"] == {"skipped": 2, "sound": 0, "returns": 0, "checkpoint": 4}
    assert told.saved[-2]["trouble"] == {"skipped": 0, "sound": 4, "returns": 0, "checkpoint": 4}
    told.stop, told.places, told.numbers = None, [], []
    told.run(*EACH)
    assert told.places == list(range(6, 12))
    assert told.numbers == [5, 4]  # to go on, and to go back


def test_what_a_signal_saved_is_not_gone_back_to(told):
    """A run that was stopped goes back to where one that was not does."""
    every = ["checkpoint.every_steps=2"]
    told.bad, told.stop = (3, 4, 5), 2
    with pytest.raises(Interrupted):
        told.run(*every)
    told.stop = None
    told.run(*every)
    assert told.steps_saved[:2] == [2, 3]
    assert told.numbers == [2, 1]


def test_what_was_pruned_or_damaged_since_is_not_gone_back_to(told):
    told.bad, told.stop = (4, 5, 6), 5
    with pytest.raises(Interrupted):
        told.run(*EACH, "checkpoint.keep=1")
    told.stop = None
    with pytest.raises(ConfigError, match="3 updates in a row were not finite or spikes, after 0 returns"):
        told.run(*EACH, "checkpoint.keep=1")


def test_who_stops_within_many_skipped_steps_saves_before_going_back(told):
    told.bad, told.stop = (4, 5, 6), 6
    with pytest.raises(Interrupted):
        told.run(*EACH)
    assert told.numbers == [] and told.steps_saved[-1] == 7
    told.stop = None
    told.run(*EACH)
    assert told.places == list(range(12)) and told.numbers == [5, 4]


def test_a_restart_remembers_how_often_it_went_back(told):
    told.bad, told.stop = tuple(range(4, 100)), 8
    with pytest.raises(Interrupted):
        told.run(*EACH, "budget.total=40")
    assert told.numbers == [4] and told.steps_saved[-2:] == [7, 9]
    told.stop = None
    with pytest.raises(ConfigError, match="3 updates in a row were not finite or spikes, after 2 returns"):
        told.run(*EACH, "budget.total=40")
    assert told.places == list(range(13))


def test_returns_are_forgotten_after_many_updates(told, monkeypatch):
    monkeypatch.setattr(trouble, "SETTLED", 4)
    told.bad = (2, 3, 4, 8, 9, 10, 15, 16, 17, 22, 23, 24)  # three sound ones between the first two rows
    told.run(*EACH, "budget.total=30")
    assert [document["trouble"]["returns"] for document in told.saved[-1:]] == [0]
    assert len(told.numbers) == 4


def test_without_a_checkpoint_of_its_own_a_phase_that_diverges_stops(told):
    told.bad = tuple(range(3))
    with pytest.raises(ConfigError, match="3 updates in a row were not finite or spikes, after 0 returns"):
        told.run()
