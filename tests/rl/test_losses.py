"""The terms of the losses, by hand, and what their gradients are in expectation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.rl.losses import bradley_terry_loss, clipped_policy_loss, clipped_value_loss, entropy, kl_estimate

LOG = np.log


def test_clipped_policy_loss_by_hand():
    # Columns: ratio 0.5, 1, 1.5. Rows: advantage 1, advantage -1. Clip range 1 - 0.2 to 1 + 0.3.
    logp = jnp.asarray([[LOG(0.5), 0.0, LOG(1.5)]] * 2) - 2.0
    advantages = jnp.asarray([[1.0] * 3, [-1.0] * 3])
    loss, told = clipped_policy_loss(logp, jnp.full((2, 3), -2.0), advantages, 0.2, 0.3)
    # A = 1: -min(0.5, 0.8), -1, -min(1.5, 1.3). A = -1: -min(-0.5, -0.8), 1, -min(-1.5, -1.3).
    np.testing.assert_allclose(loss, [[-0.5, -1.0, -1.3], [0.8, 1.0, 1.5]], atol=1e-6)
    np.testing.assert_array_equal(told["rl/clip_fraction_low"], [[0, 0, 0], [1, 0, 0]])
    np.testing.assert_array_equal(told["rl/clip_fraction_high"], [[0, 0, 1], [0, 0, 0]])
    # r - 1 - log r: 0.5 - 1 + 0.6931472, 0, 1.5 - 1 - 0.4054651
    np.testing.assert_allclose(told["rl/approx_kl"], [[0.1931472, 0.0, 0.0945349]] * 2, atol=1e-6)


def test_the_clip_stops_the_gradient_where_it_bites_and_only_there():
    advantages = jnp.asarray([1.0, 1.0, -1.0, -1.0])
    logp = jnp.log(jnp.asarray([0.5, 1.5, 0.5, 1.5]))
    gradient = jax.grad(lambda x: clipped_policy_loss(x, jnp.zeros(4), advantages, 0.2, 0.3)[0].sum())(logp)
    # d/dlogp of -r A is -r A
    np.testing.assert_allclose(gradient, [-0.5, 0.0, 0.0, 1.5], atol=1e-6)


def test_clipped_value_loss_by_hand():
    # V_old 0, range 0.2, R 1. V 0.5: max(0.25, 0.64) / 2; V -0.5: max(2.25, 1.44) / 2; V 0.1: 0.81 / 2.
    values = jnp.asarray([0.5, -0.5, 0.1])
    np.testing.assert_allclose(
        clipped_value_loss(values, jnp.zeros(3), jnp.ones(3), 0.2), [0.32, 1.125, 0.405], atol=1e-6
    )


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # d = log 0.5 - log 0.25 = log 2, and its negative
        ("k1", [0.6931472, -0.6931472]),
        ("k2", [0.2402265, 0.2402265]),  # log(2)^2 / 2
        ("k3", [0.1931472, 0.3068528]),  # 0.5 - 1 + log 2; 2 - 1 - log 2
    ],
)
def test_kl_estimates_by_hand(estimator, expected):
    logp, ref = jnp.log(jnp.asarray([0.5, 0.25])), jnp.log(jnp.asarray([0.25, 0.5]))
    np.testing.assert_allclose(kl_estimate(logp, ref, estimator), expected, atol=1e-6)


def test_k3_is_exact_for_tiny_differences():
    # d = 1e-4: exp(-d) - 1 + d = d^2 / 2 - d^3 / 6 = 5e-9, which float32 loses if 1 is subtracted from the exponential.
    assert float(kl_estimate(jnp.float32(1e-4), jnp.float32(0.0), "k3")) >= 0.0
    assert float(kl_estimate(jnp.float32(1e-4), jnp.float32(0.0), "k3")) == pytest.approx(5e-9, abs=6e-12)


TARGET, REFERENCE = np.array([1.0, -0.5, 0.3, 0.0]), np.array([0.2, 0.6, -1.0, 0.1])


def forward_kl(x, y):
    """KL(softmax(x) || softmax(y))."""
    return jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - jax.nn.log_softmax(y)))


def expected_gradient(estimator: str) -> np.ndarray:
    """The exact mean of the estimator's gradient over tokens that the policy itself draws."""
    x, ref = jnp.asarray(TARGET, jnp.float32), jax.nn.log_softmax(jnp.asarray(REFERENCE, jnp.float32))
    jacobian = jax.jacobian(lambda x: kl_estimate(jax.nn.log_softmax(x), ref, estimator))(x)
    return np.asarray(jax.nn.softmax(x) @ jacobian)


def test_k2_has_the_gradient_of_the_kl():
    exact = jax.grad(forward_kl)(jnp.asarray(TARGET, jnp.float32), jnp.asarray(REFERENCE, jnp.float32))
    np.testing.assert_allclose(expected_gradient("k2"), exact, atol=1e-6)


def test_k1_has_no_gradient_in_expectation():
    np.testing.assert_allclose(expected_gradient("k1"), 0.0, atol=1e-6)


def test_k3_has_the_gradient_of_the_kl_the_other_way_round():
    x, y = jnp.asarray(TARGET, jnp.float32), jnp.asarray(REFERENCE, jnp.float32)
    np.testing.assert_allclose(expected_gradient("k3"), jax.grad(lambda x: forward_kl(y, x))(x), atol=1e-6)
    assert np.abs(expected_gradient("k3") - jax.grad(forward_kl)(x, y)).max() > 0.05


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_as_values(estimator):
    x, y = jnp.asarray(TARGET, jnp.float32), jnp.asarray(REFERENCE, jnp.float32)
    mean = jax.nn.softmax(x) @ kl_estimate(jax.nn.log_softmax(x), jax.nn.log_softmax(y), estimator)
    assert float(mean) == pytest.approx(float(forward_kl(x, y)), abs=1e-6)


def test_entropy_by_hand():
    # uniform over 4: log 4; (1/2, 1/4, 1/4): 0.5 log 2 + 0.5 log 4 = 1.5 log 2
    log_probs = jnp.log(jnp.asarray([[[0.25] * 4, [0.5, 0.25, 0.25, 1e-30]]]))
    np.testing.assert_allclose(entropy(log_probs), [[1.3862944, 1.0397208]], atol=1e-6)


def test_bradley_terry_by_hand():
    # log(1 + exp(rejected - chosen)): log 2; log(1 + e^-2); log(1 + e^2); and no overflow far out
    chosen, rejected = jnp.asarray([3.0, 2.0, 0.0, 200.0, 0.0]), jnp.asarray([3.0, 0.0, 2.0, 0.0, 200.0])
    np.testing.assert_allclose(
        bradley_terry_loss(chosen, rejected), [0.6931472, 0.1269280, 2.1269280, 0.0, 200.0], atol=1e-6
    )
