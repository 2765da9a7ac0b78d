"""Advantages, by hand."""

import numpy as np
import pytest

from tlt_jax.config.stage_sections import PPOConfig
from tlt_jax.rl.advantages import gae, group_advantages, token_weights, whiten
from tlt_jax.rl.kl import next_kl_coef, penalised_rewards, sequence_scores


def test_group_advantages_by_hand():
    # Group 1: mean 2, std sqrt(2/3) = 0.8164966. Group 2: mean 6, deviations -4, 0, 4, std sqrt(32/3) = 3.2659863.
    advantages, equal = group_advantages(np.array([1, 2, 3, 2, 6, 10], np.float32), 3, by_std=True)
    np.testing.assert_allclose(advantages, [-1.2247449, 0, 1.2247449, -1.2247449, 0, 1.2247449], atol=1e-6)
    assert equal == 0
    plain, _ = group_advantages(np.array([1, 2, 3, 2, 6, 10], np.float32), 3, by_std=False)
    np.testing.assert_array_equal(plain, np.array([-1, 0, 1, -4, 0, 4], np.float32))
    assert plain.dtype == advantages.dtype == np.float32


@pytest.mark.parametrize("by_std", [True, False])
def test_groups_of_equal_rewards_get_zero_and_are_counted(by_std):
    # 0.1 is not exact in binary: the mean of seven times 0.1 may differ from 0.1 in the last place.
    rewards = np.array([*[0.1] * 7, *range(7), *[-3.0] * 7], np.float32)
    advantages, equal = group_advantages(rewards, 7, by_std)
    assert equal == 2
    np.testing.assert_array_equal(advantages[:7], 0.0)
    np.testing.assert_array_equal(advantages[14:], 0.0)
    assert np.all(advantages[7:10] < 0)


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="group_size is 1"):
        group_advantages(np.ones(4, np.float32), 1, by_std=True)


def test_gae_by_hand():
    # gamma 0.9, lambda 0.8, gamma * lambda 0.72. From the end:
    # delta_2 = 2 - 1.5 = 0.5, A_2 = 0.5; delta_1 = 0 + 0.9 * 1.5 - 1 = 0.35, A_1 = 0.35 + 0.72 * 0.5 = 0.71;
    # delta_0 = 1 + 0.9 * 1 - 0.5 = 1.4, A_0 = 1.4 + 0.72 * 0.71 = 1.9112.
    rewards, values = np.array([[1, 0, 2]], np.float32), np.array([[0.5, 1.0, 1.5]], np.float32)
    advantages, returns = gae(rewards, values, np.ones((1, 3)), 0.9, 0.8)
    np.testing.assert_allclose(advantages, [[1.9112, 0.71, 0.5]], atol=1e-6)
    np.testing.assert_allclose(returns, [[2.4112, 1.71, 2.0]], atol=1e-6)


def test_gae_sees_nothing_outside_the_mask():
    # The row of the test above, between a prompt and padding that hold rubbish, and a row that is all masked.
    rewards = np.array([[7, 1, 0, 2, 9, -4], [5, 5, 5, 5, 5, 5]], np.float32)
    values = np.array([[8, 0.5, 1.0, 1.5, 99, -99], [3, 3, 3, 3, 3, 3]], np.float32)
    mask = np.array([[0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]], np.float32)
    advantages, returns = gae(rewards, values, mask, 0.9, 0.8)
    np.testing.assert_allclose(advantages, [[0, 1.9112, 0.71, 0.5, 0, 0], [0] * 6], atol=1e-6)
    np.testing.assert_allclose(returns, [[0, 2.4112, 1.71, 2.0, 0, 0], [0] * 6], atol=1e-6)


def test_gae_with_gamma_and_lambda_one_is_monte_carlo():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 4, 6)).astype(np.float32)
    advantages, returns = gae(rewards, values, np.ones((4, 6)), 1.0, 1.0)
    to_go = np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]
    np.testing.assert_allclose(returns, to_go, atol=1e-5)
    np.testing.assert_allclose(advantages, to_go - values, atol=1e-5)


def test_gae_with_lambda_zero_is_the_one_step_error():
    rewards, values = np.array([[1, 2]], np.float32), np.array([[3, 5]], np.float32)
    # 1 + 0.5 * 5 - 3 = 0.5, 2 - 5 = -3
    np.testing.assert_allclose(gae(rewards, values, np.ones((1, 2)), 0.5, 0.0)[0], [[0.5, -3.0]], atol=1e-6)


def test_whiten_by_hand():
    x, mask = np.array([[1, 3, 100], [1, 3, np.nan]], np.float32), np.array([[1, 1, 0], [1, 1, 0]])
    # mean 2, standard deviation 1
    np.testing.assert_allclose(whiten(x, mask), [[-1, 1, 0], [-1, 1, 0]], atol=1e-6)
    np.testing.assert_allclose(whiten(4 * x, mask, keep_mean=True), [[7, 9, 0], [7, 9, 0]], atol=1e-6)


@pytest.mark.parametrize("x", [[[5.0, 9.0, 9.0]], [[5.0, 5.0, 5.0]]])
def test_whiten_of_one_entry_or_equal_ones_is_zero_or_their_mean(x):
    mask = np.array([[1, 0, 0]]) if x[0][1] == 9.0 else np.ones((1, 3))
    np.testing.assert_array_equal(whiten(np.array(x, np.float32), mask), np.zeros((1, 3)))
    np.testing.assert_array_equal(whiten(np.array(x, np.float32), mask, keep_mean=True), 5.0 * mask)


def test_whiten_of_nothing_is_zero():
    np.testing.assert_array_equal(whiten(np.full((2, 2), np.nan, np.float32), np.zeros((2, 2))), np.zeros((2, 2)))


def test_token_weights_by_hand():
    mask = np.array([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], np.float32)
    np.testing.assert_array_equal(token_weights(mask, "token_mean"), mask)
    np.testing.assert_array_equal(token_weights(mask, "sequence_mean"), [[0, 0.5, 0.5, 0], [0.25] * 4, [0] * 4])


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (2.2, 0.1005),  # error 0.1: 0.1 * (1 + 0.1 * 100 / 2000)
        (2.0, 0.1),
        (10.0, 0.101),  # error clipped to 0.2
        (0.0, 0.099),  # error clipped to -0.2
        (-1.0, 0.099),
    ],
)
def test_adaptive_kl_coefficient_by_hand(kl, expected):
    config = PPOConfig(kl_controller="adaptive", kl_target=2.0, kl_horizon=2000.0)
    assert next_kl_coef(config, 0.1, kl, 100) == pytest.approx(expected, abs=1e-12)


def test_fixed_kl_coefficient_stays():
    assert next_kl_coef(PPOConfig(kl_controller="fixed"), 0.1, 50.0, 100) == 0.1


def test_the_kl_is_subtracted_and_the_score_stands_on_the_last_token():
    logp = np.array([[9.0, -1.0, -2.0, 9.0], [9.0, 9.0, -0.5, -3.0]], np.float32)
    ref = np.array([[8.0, -1.5, -1.0, 7.0], [8.0, 8.0, -0.5, -4.0]], np.float32)
    mask = np.array([[0, 1, 1, 0], [0, 0, 1, 1]], np.float32)
    rewards = penalised_rewards(np.array([2.0, -1.0], np.float32), logp, ref, mask, np.array([3, 4]), 0.1)
    # Row 1: -0.1 * 0.5, then -0.1 * -1 + 2. Row 2: 0, then -0.1 * 1 - 1.
    np.testing.assert_allclose(rewards, [[0, -0.05, 2.1, 0], [0, 0, 0, -1.1]], atol=1e-6)


def test_a_score_is_model_and_quality_or_what_a_truncated_completion_gets():
    config = PPOConfig(quality_coef=4.0, truncated_reward=-2.0)
    ended = np.array([True, True, False])
    scores = sequence_scores(np.array([0.5, -1.0, 3.0]), np.array([1.0, 0.2, 1.0]), ended, config)
    np.testing.assert_allclose(scores, [4.5, -0.2, -2.0], atol=1e-6)
