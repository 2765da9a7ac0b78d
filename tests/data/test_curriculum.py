"""The curriculum: admission by length, advance by success, draws."""

import json

import numpy as np
import pytest

from tlt_jax.config.stage_sections import CurriculumConfig
from tlt_jax.data.curriculum import UNSEEN, Curriculum, advance, draw, eligible, from_dict

CONFIG = CurriculumConfig(phases=3, advance_at=0.5, smoothing=0.75)


def test_phases_admit_the_shortest():
    lengths = np.array([50, 10, 40, 20, 30])
    assert [eligible(lengths, phase, 5).tolist() for phase in range(5)] == [
        [1], [1, 3], [1, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4],
    ]  # fmt: skip
    assert eligible(lengths, 9, 5).tolist() == [0, 1, 2, 3, 4]


def test_ties_few_lengths_and_none():
    assert eligible(np.array([5, 5, 5, 9]), 0, 4).tolist() == [0, 1, 2]
    assert eligible(np.array([7, 3]), 0, 5).tolist() == [1]
    assert eligible(np.array([], int), 0, 5).tolist() == []
    assert eligible(np.array([2, 1]), 0, 1).tolist() == [0, 1]


def test_running_mean_by_hand():
    state = advance(Curriculum(), 0.4, CONFIG)
    assert state == Curriculum(0, 0.4)  # the first observation is the mean
    state = advance(state, 0.0, CONFIG)
    assert state.success == pytest.approx(0.3)
    assert advance(Curriculum(0, 0.0), 0.4, CONFIG).success == pytest.approx(0.1)  # a mean of 0 is not "none yet"


def test_advance_one_phase_and_start_anew():
    assert advance(Curriculum(0, 0.45), 0.65, CONFIG) == Curriculum(1, UNSEEN)  # mean 0.5, reached
    assert advance(Curriculum(1, UNSEEN), 0.9, CONFIG) == Curriculum(2, UNSEEN)
    assert advance(Curriculum(2, UNSEEN), 0.9, CONFIG) == Curriculum(2, 0.9)  # the last phase stays


def test_an_explicit_zero_threshold_is_one():
    assert advance(Curriculum(), 0.0, CurriculumConfig(advance_at=0.0)).phase == 1


def test_state_survives_json():
    state = Curriculum(2, 0.125)
    assert from_dict(json.loads(json.dumps(state.to_dict()))) == state


def test_draws():
    indices = np.arange(100, 120)
    drawn = draw(indices, 8, seed=0, step=3)
    assert len(set(drawn.tolist())) == 8 and set(drawn) <= set(indices)
    np.testing.assert_array_equal(drawn, draw(indices, 8, seed=0, step=3))
    assert drawn.tolist() != draw(indices, 8, seed=0, step=4).tolist()
    assert drawn.tolist() != draw(indices, 8, seed=1, step=3).tolist()


def test_draws_of_more_than_there_are():
    counts = np.bincount(draw(np.arange(3), 8, seed=0, step=0), minlength=3)
    assert sorted(counts) == [2, 3, 3]
