"""From logits to a token: temperature, filters, and one draw."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from support.enumeration import Setting, filtered

from tlt_jax.decode.sampling import SamplingParams, _first_above, draw, policy_of, sampling_probs

LAST = np.float32(1 - 2**-24)  # the largest float32 below 1
DRAW = jax.jit(draw)
PROBS = jax.jit(partial(sampling_probs, filtered=True))


def rows(weights, count: int):
    return jnp.broadcast_to(jnp.asarray(weights, jnp.float32), (count, len(weights)))


@pytest.mark.parametrize("vocab", [3, 63, 64, 65, 200])
def test_an_index_of_weight_zero_is_never_drawn(vocab):
    rng = np.random.default_rng(vocab)
    uniforms = np.concatenate([[0.0, LAST], np.linspace(0, LAST, 500), rng.random(500)]).astype(np.float32)
    for support in (1, 2, vocab // 3 + 1):
        weights = np.zeros(vocab, np.float32)
        chosen = np.sort(rng.choice(vocab, support, replace=False))
        weights[chosen] = rng.exponential(size=support) * 10.0 ** rng.integers(-6, 3)
        drawn = np.asarray(DRAW(rows(weights, len(uniforms)), jnp.asarray(uniforms)))
        assert np.all(weights[drawn] > 0)
        assert drawn[0] == chosen[0]
        assert drawn[1] == chosen[-1]


@pytest.mark.parametrize("where", [0, 63, 64, 127, 199])
def test_all_weight_on_one_index(where):
    weights = np.zeros(200, np.float32)
    weights[where] = 1e-20
    np.testing.assert_array_equal(DRAW(rows(weights, 3), jnp.asarray([0.0, 0.5, LAST])), where)


def test_a_draw_is_the_inverse_of_the_cdf():
    # Weights 1, 2, 0, 5 of sum 8: [0, 1/8) -> 0, [1/8, 3/8) -> 1, [3/8, 1) -> 3. A boundary belongs to the next.
    uniforms = jnp.asarray([0.0, 0.124, 0.125, 0.374, 0.375, 0.9, LAST])
    np.testing.assert_array_equal(DRAW(rows([1, 2, 0, 5], 7), uniforms), [0, 0, 1, 1, 3, 3, 3])


def test_even_uniforms_hit_every_index_as_often_as_its_weight_says():
    weights = np.random.default_rng(0).exponential(size=200).astype(np.float32)
    count = 20_000
    drawn = DRAW(rows(weights, count), jnp.asarray((np.arange(count) + 0.5) / count, jnp.float32))
    found = np.bincount(np.asarray(drawn), minlength=200)
    assert np.abs(found - count * weights / weights.sum()).max() < 2.0


def test_random_draws_have_the_distribution_by_chi_square():
    weights = np.random.default_rng(1).exponential(size=200).astype(np.float32) + 0.05
    drawn = DRAW(rows(weights, 20_000), jax.random.uniform(jax.random.key(0), (20_000,)))
    found = np.bincount(np.asarray(drawn), minlength=200)
    assert stats.chisquare(found, 20_000 * weights.astype(np.float64) / weights.sum(dtype=np.float64)).pvalue > 1e-3


SETTINGS = [
    Setting(1.0),
    Setting(0.5),
    Setting(2.0),
    Setting(1.0, top_k=1),
    Setting(1.0, top_k=5),
    Setting(1.0, top_k=20),
    Setting(1.0, top_p=0.3),
    Setting(0.7, top_p=0.9),
    Setting(1.0, top_p=1e-6),
    Setting(0.7, top_k=7, top_p=0.6),
    Setting(1.3, top_k=3, top_p=0.99),
    Setting(1.0, top_k=50),
    Setting(1.0, min_p=0.2),
    Setting(1.3, top_k=20, top_p=0.9, min_p=0.1),
]


def probs_of(logits, settings):
    """[settings, V]: each row's distribution under its own setting, in one call."""
    params = SamplingParams(
        *(jnp.asarray([getattr(s, name) for s in settings]) for name in ("temperature", "top_k", "top_p", "min_p"))
    )
    logits_BWV = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (len(settings), 1, len(logits)))
    return np.asarray(PROBS(policy_of(logits_BWV, params.temperature_B), params))[:, 0]


def softmax(x):
    x = np.exp(np.asarray(x, np.float64) - np.max(x))
    return x / x.sum()


@pytest.mark.parametrize("seed", range(4))
def test_filters_equal_a_slow_reference(seed):
    logits = np.random.default_rng(seed).normal(size=20) * 2
    for setting, found in zip(SETTINGS, probs_of(logits, SETTINGS), strict=True):
        np.testing.assert_allclose(
            found, filtered(softmax(logits / setting.temperature), setting), atol=2e-6, err_msg=str(setting)
        )


def test_ties_go_to_the_smaller_index():
    # Probabilities 1/8, 1/4, 1/4, 1/8, 1/4.
    logits = np.log([1, 2, 2, 1, 2])
    settings = [
        Setting(1.0, top_k=2),
        Setting(1.0, top_k=4),
        Setting(1.0, top_p=0.45),
        Setting(1.0, top_p=0.55),
        Setting(1.0, top_k=3, top_p=0.6),
    ]
    expected = [
        [0, 1 / 2, 1 / 2, 0, 0],
        [1 / 7, 2 / 7, 2 / 7, 0, 2 / 7],
        [0, 1 / 2, 1 / 2, 0, 0],
        [0, 1 / 3, 1 / 3, 0, 1 / 3],
        [0, 1 / 2, 1 / 2, 0, 0],  # of the three kept, two have 2/3
    ]
    np.testing.assert_allclose(probs_of(logits, settings), expected, atol=1e-6)


def test_temperature_zero_is_the_first_of_the_likeliest_whatever_the_filters():
    settings = [Setting(0.0), Setting(0.0, top_k=3), Setting(0.0, top_p=0.5)]
    np.testing.assert_array_equal(probs_of([1.0, 3.0, 2.0, 3.0], settings), [[0, 1, 0, 0]] * 3)


def test_the_recorded_policy_is_before_the_filters_and_at_the_temperature():
    logits = np.array([1.0, 3.0, 2.0])
    tokens = jnp.arange(3)[None]
    three = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (1, 3, 3))
    found = policy_of(three, jnp.asarray([0.5])).log_probs(tokens)
    np.testing.assert_allclose(found[0], np.log(softmax(logits / 0.5)), atol=1e-6)
    # At temperature 0 the policy at temperature 1.
    found = policy_of(three, jnp.asarray([0.0]))
    np.testing.assert_allclose(found.log_probs(tokens)[0], np.log(softmax(logits)), atol=1e-6)
    np.testing.assert_allclose(found.probs_BWV[0], [softmax(logits)] * 3, atol=1e-6)


def test_a_cdf_that_rounding_bends_draws_no_index_of_weight_zero():
    weights = jnp.array([[0.3, 0.0, 0.0, 0.6, 0.0]])
    cdf = jnp.array([[0.3, 0.30001, 0.29999, 0.9, 0.90001]])  # as a parallel scan may give it
    for target, index in ((0.0, 0), (0.29999, 0), (0.300005, 3), (0.8999, 3)):
        assert _first_above(cdf, weights, jnp.array([target])).tolist() == [index]


@pytest.mark.parametrize("vocab", [5, 64, 65])
def test_what_is_not_a_number_is_drawn_as_a_token_of_the_vocabulary(vocab):
    drawn = DRAW(jnp.full((2, vocab), jnp.nan), jnp.asarray([0.0, 0.9]))
    assert np.all((drawn >= 0) & (drawn < vocab))
