"""From logits to the distribution that is sampled, and one draw from it.

Shape suffixes: B slots, W rows a slot, V vocabulary; `...` any leading axes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.parallel.sharding import constrain

CDF_BLOCK = 64
Draws = Literal["any", "greedy", "sampled"]  # at temperature 0 or not; all of them at 0; none


@partial(
    jax.tree_util.register_dataclass, data_fields=["temperature_B", "top_k_B", "top_p_B", "min_p_B"], meta_fields=[]
)
@dataclass(frozen=True)
class SamplingParams:
    """How each slot is sampled: temperature (0: greedy), top_k (0: all), top_p (1: all), min_p (0: all)."""

    temperature_B: Any
    top_k_B: Any
    top_p_B: Any
    min_p_B: Any


class Policy(NamedTuple):
    """The policy at the sampling temperature, before any filter: its probabilities [B, W, V], and their logarithms as
    what is 0 at the likeliest token, and what is to be taken off that, one number a row."""

    probs_BWV: jax.Array
    shifted_BWV: jax.Array
    log_sum_BW1: jax.Array

    def log_probs(self, tokens_BW: jax.Array) -> jax.Array:
        """Of one token a row, [B, W]."""
        at_tokens_BW1 = jnp.take_along_axis(self.shifted_BWV, tokens_BW[..., None], axis=-1)
        return (at_tokens_BW1 - self.log_sum_BW1)[..., 0]


def policy_of(logits_BWV: jax.Array, temperature_B: jax.Array) -> Policy:
    """softmax(logits / T): the policy at the sampling temperature, before any filter.

    At temperature 0, where that limit is degenerate, the policy at temperature 1 is given. The vocabulary is put
    together here, in one go: all that follows a draw would otherwise cross the devices that split it, many times.
    """
    logits_BWV = constrain(logits_BWV, "batch", None, None)
    scale_B = 1.0 / jnp.where(temperature_B > 0, temperature_B, 1.0)
    scaled_BWV = logits_BWV * scale_B[:, None, None]
    shifted_BWV = scaled_BWV - jnp.max(scaled_BWV, axis=-1, keepdims=True)
    exp_BWV = jnp.exp(shifted_BWV)
    sum_BW1 = jnp.sum(exp_BWV, axis=-1, keepdims=True)
    return Policy(exp_BWV / sum_BW1, shifted_BWV, jnp.log(sum_BW1))


def sampling_probs(policy: Policy, params: SamplingParams, filtered: bool, draws: Draws = "any") -> jax.Array:
    """The distribution that tokens are drawn from, [B, W, V].

    Temperature 0 puts all mass on the likeliest token. Static: `filtered` says whether any slot may use top-k, top-p or
    min-p, `draws` whether any may be greedy. The filters keep the k likeliest tokens, then the shortest prefix of the
    sorted tokens whose mass reaches p (Holtzman et al. 2020), then those at least min_p times as likely as the
    likeliest (Nguyen et al. 2024), and renormalise.
    """
    probs_BWV = _filter(policy.probs_BWV, params) if filtered else policy.probs_BWV
    if draws == "sampled":
        return probs_BWV
    greedy_BWV = (jnp.arange(probs_BWV.shape[-1]) == likeliest(policy)[..., None]).astype(probs_BWV.dtype)
    return jnp.where((params.temperature_B > 0)[:, None, None], probs_BWV, greedy_BWV)


def likeliest(policy: Policy) -> jax.Array:
    """The likeliest token of each row at temperature 0, [B, W]; the first of several. (At another, what is shifted may
    miss 0 by a rounding.)"""
    # An argmax goes through pairs one by one on a CPU; the least index of the largest does not.
    return first(policy.shifted_BWV == 0.0).astype(jnp.int32)


def _filter(probs_BWV: jax.Array, params: SamplingParams) -> jax.Array:
    order_BWV = jnp.argsort(-probs_BWV, axis=-1, stable=True)
    rank_BWV = jnp.argsort(order_BWV, axis=-1, stable=True)
    vocab = probs_BWV.shape[-1]
    k_B11 = jnp.where(params.top_k_B > 0, params.top_k_B, vocab)[:, None, None]
    sorted_BWV = jnp.take_along_axis(probs_BWV, order_BWV, axis=-1)
    sorted_BWV = jnp.where(jnp.arange(vocab) < k_B11, sorted_BWV, 0.0)
    sorted_BWV = sorted_BWV / jnp.sum(sorted_BWV, axis=-1, keepdims=True)
    before_BWV = jnp.cumsum(sorted_BWV, axis=-1) - sorted_BWV
    p_B11 = params.top_p_B[:, None, None]
    kept_BWV = jnp.where((before_BWV < p_B11) | (p_B11 >= 1.0), sorted_BWV, 0.0)
    kept_BWV = jnp.where(kept_BWV >= params.min_p_B[:, None, None] * kept_BWV[..., :1], kept_BWV, 0.0)
    kept_BWV = kept_BWV / jnp.sum(kept_BWV, axis=-1, keepdims=True)
    return jnp.take_along_axis(kept_BWV, rank_BWV, axis=-1)


def pick(weights: jax.Array, noise: jax.Array) -> jax.Array:
    """One index a row of weights [..., V]: by the inverse CDF with one uniform a row [...], or the largest of
    log(weights) + noise with Gumbel noise of the weights' own shape (Gumbel 1954; Maddison et al. 2014)."""
    if noise.ndim < weights.ndim:
        return draw(weights, noise)
    return jnp.argmax(jnp.log(weights) + noise, axis=-1).astype(jnp.int32)


def draw(weights_BV: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """One index a row, [B] int32, with probability weights / sum(weights), by the inverse CDF at `uniform` in [0, 1).

    The CDF is taken in two levels, blocks and then one block's entries: one pass over V instead of a scan, and one
    uniform a draw instead of V. An index of weight 0 is never drawn.
    """
    rows, vocab = weights_BV.shape
    blocks = -(-vocab // CDF_BLOCK)
    padded = jnp.pad(weights_BV, ((0, 0), (0, blocks * CDF_BLOCK - vocab))).reshape(rows, blocks, CDF_BLOCK)
    mass = jnp.sum(padded, axis=-1)
    cdf, total = _cdf(mass)
    target = jnp.minimum(uniform_B * total, _below(total))
    block = _first_above(cdf, mass, target)
    start = jnp.where(block > 0, jnp.take_along_axis(cdf, jnp.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    entries = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
    inner, total = _cdf(entries)
    index = _first_above(inner, entries, jnp.minimum(target - start, _below(total)))
    return jnp.minimum(block * CDF_BLOCK + index, vocab - 1).astype(jnp.int32)  # beyond it are NaN's alone


def _cdf(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(running sums, the largest of them where something is added). A parallel scan's may fall, or rise where nothing
    is added, by rounding."""
    cdf = jnp.cumsum(weights, axis=-1)
    return cdf, jnp.max(jnp.where(weights > 0, cdf, 0.0), axis=-1)


def _first_above(cdf: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """The first index of positive weight at which the CDF exceeds `target`."""
    return first((cdf > target[:, None]) & (weights > 0))


def first(where: jax.Array) -> jax.Array:
    """The first index along the last axis at which `where` is true; the last, if none is."""
    last = where.shape[-1] - 1
    return jnp.min(jnp.where(where, jnp.arange(last + 1), last), axis=-1)


def _below(x: jax.Array) -> jax.Array:
    """The next smaller float: a target strictly below the total, so that there is always an entry above it."""
    return jnp.nextafter(x, jnp.zeros_like(x))
