"""Where sequences part from plain decoding's, and whether a sum in another order can have been what parted them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.decode.rollout import Rollout
from tlt_jax.models.transformer import Transformer, hidden_states, logits

CLOSE = 1e-4  # two values nearer than this may change places with the order of a sum

Noise = Callable[[int, int], jax.Array]  # (sequence, position) -> [V]


def no_noise(row: int, position: int) -> jax.Array:
    """Greedy decoding's."""
    return jnp.float32(0.0)


def parted(policy: Transformer, plain: Rollout, found: Rollout, noise: Noise = no_noise) -> dict[str, Any]:
    """How many sequences of `found` part from `plain`, where each token has the largest log p + noise, and by how much
    at most a token there falls short of the largest."""
    gaps = []
    for row in np.flatnonzero(np.any(plain.tokens_BT != found.tokens_BT, axis=1)):
        at = int(np.argmax(plain.tokens_BT[row] != found.tokens_BT[row]))
        gaps.append(_short(policy, found.tokens_BT[row], at, noise(int(row), at)))
    return {"divergences": len(gaps), "sequences": len(plain.tokens_BT), "largest_gap": max(gaps, default=0.0)}


def _short(policy: Transformer, tokens_T: np.ndarray, at: int, noise_V: jax.Array) -> float:
    """By how much the token at position `at` falls short of the largest of log p + noise, by a plain forward pass."""
    tokens_BT = jnp.asarray(tokens_T[None])
    positions_BT = jnp.arange(tokens_BT.shape[1])[None]
    x_BTD = hidden_states(policy, tokens_BT, jnp.ones_like(tokens_BT), positions_BT, dtype=jnp.float32)[1]
    value_V = np.asarray(jax.nn.log_softmax(logits(policy, x_BTD)[0, at - 1]) + noise_V)
    return float(value_V.max() - value_V[tokens_T[at]])
