"""The rules behind the hints, on figures made for them."""

import math

import numpy as np

from tlt_jax.observe import health


def test_input_bound_is_said_of_the_last_steps_alone():
    assert health.input_bound([0.9] * 19) is None  # too few
    assert health.input_bound([0.9] * 30 + [0.05] * 20) is None
    assert health.input_bound([0.19] * 20) is None
    said = health.input_bound([0.0] * 30 + [0.3] * 20)
    assert said is not None and "30 % of the time of 20 steps" in said and "data.workers" in said


def test_memory_bound_names_the_largest_buffers():
    buffers = [("temporaries of update", 600 * 2**20), ("train/params/policy/embedding", 2**20)]
    assert health.memory_bound(900.0, 1000.0, buffers) is None
    said = health.memory_bound(950 * 2**20, 1000 * 2**20, buffers)
    assert said is not None and "950 of 1,000 MiB" in said
    assert "temporaries of update 600.0 MiB, train/params/policy/embedding 1.0 MiB" in said


def noisy(losses: np.ndarray, noise: float, seed: int) -> list[float]:
    return (losses + noise * np.random.default_rng(seed).standard_normal(len(losses))).tolist()


def test_a_loss_that_stays_where_it_is_is_noticed():
    flat = np.full(400, 7.6)
    assert all(health.loss_not_falling(noisy(flat, 0.02, seed)) for seed in range(20))
    assert health.loss_not_falling(noisy(flat, 0.02, 0)[:59]) is None  # too few
    rising = health.loss_not_falling((4.0 + 0.001 * np.arange(400)).tolist())
    assert rising is not None and "over the last 200 steps" in rising


def test_a_loss_that_falls_through_noise_is_not():
    """As losses of language models do: by a power of the step, at every length that a phase may be judged at."""
    steps = np.arange(1, 3001)
    curve = 1.7 + 6.0 * steps**-0.25
    for seed in range(5):
        losses = noisy(curve, 0.15, seed)
        assert not [n for n in range(health.LOSS_STEPS, 3001, 97) if health.loss_not_falling(losses[:n])]
    # Too much noise to tell is no hint either.
    assert not [seed for seed in range(20) if health.loss_not_falling(noisy(np.full(60, 3.0), 0.5, seed))]


def test_losses_that_are_not_finite_are_left_out():
    assert health.loss_not_falling([math.nan] * 100) is None
    assert health.loss_not_falling([7.0, math.nan] * 100)


def test_recompiling_names_the_steps_and_their_seconds():
    assert health.recompiling([(12, 3.0), (40, 2.5)]) is None
    said = health.recompiling([(12, 3.0), (40, 2.5), (41, 1.0)])
    assert said is not None and "steps 12, 40, 41 compiled anew, for 6.5 s" in said
