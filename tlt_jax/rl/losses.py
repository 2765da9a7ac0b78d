"""The terms of a policy-gradient loss, token by token. Pure maths on log-probs; arrays are [B, T].

r = exp(logp - old_logp) is the ratio, A the advantage, eps the clip range.
"""

import jax
import jax.numpy as jnp


def clipped_policy_loss(
    logp: jax.Array, old_logp: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), and per-token diagnostics (PPO, Schulman et al. 2017, eq. 7).

    The diagnostics: whether the low or the high clip bites; approx_kl = r - 1 - log r estimates KL(old || new).
    """
    log_ratio = logp - old_logp
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = -jnp.minimum(ratio * advantages, clipped * advantages)
    return loss, {
        "rl/clip_fraction_low": ((ratio < 1.0 - clip_low) & (advantages < 0)).astype(jnp.float32),
        "rl/clip_fraction_high": ((ratio > 1.0 + clip_high) & (advantages > 0)).astype(jnp.float32),
        "rl/approx_kl": ratio - 1.0 - log_ratio,
    }


def clipped_value_loss(values: jax.Array, old_values: jax.Array, returns: jax.Array, clip: float) -> jax.Array:
    """1/2 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2)."""
    clipped = old_values + jnp.clip(values - old_values, -clip, clip)
    return 0.5 * jnp.maximum((values - returns) ** 2, (clipped - returns) ** 2)


def kl_estimate(logp: jax.Array, ref_logp: jax.Array, estimator: str) -> jax.Array:
    """Per-token estimates of KL(policy || reference) from sampled tokens (after Schulman's note of 2020)

    With d = logp - ref_logp: k1 = d, unbiased. k2 = d^2 / 2, biased as a value, but its gradient is that of the KL when
    the tokens are the policy's own. k3 = exp(-d) - 1 + d, unbiased and never negative; its gradient is that of the KL
    the other way round. As a loss, k1's gradient is 0 in expectation.
    """
    d = logp - ref_logp
    if estimator == "k1":
        return d
    return 0.5 * d * d if estimator == "k2" else jnp.expm1(-d) + d


def entropy(log_probs_BTV: jax.Array) -> jax.Array:
    """-sum p log p over the vocabulary, nats, [B, T]."""
    return -jnp.sum(jnp.exp(log_probs_BTV) * log_probs_BTV, axis=-1)


def bradley_terry_loss(chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    """-log sigmoid(r_chosen - r_rejected) a pair (Bradley & Terry 1952; Ouyang et al. 2022, eq. 1)."""
    return jax.nn.softplus(rejected - chosen)
