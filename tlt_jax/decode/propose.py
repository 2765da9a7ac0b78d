"""Drafters: each proposes up to G tokens a slot, and says from which distribution q it drew them.

A drafter may have run the target's first layers on the tokens it proposes. It then hands over their states and their
cache, and verification goes on from there instead of starting again.

Shape suffixes: B slots, G draft tokens, W = G + 1 fed tokens (the last known one and the drafts), T positions,
V vocabulary, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.decode.sampling import SamplingParams, pick, policy_log_probs, sampling_probs
from tlt_jax.models.decode_view import Cache, DecodeView, decode_layers, embed
from tlt_jax.models.heads import ShallowExit, exit_logits


@dataclass(frozen=True)
class Choice:
    """Who drafts, and how many tokens: none with "off"."""

    drafter: str
    draft_length: int


OFF = Choice("off", 0)


@dataclass(frozen=True)
class Rules:
    """What stays the same while a pool decodes. `filtered`: some slot may use top-k, top-p or min-p; the rest are the
    config's, of `speculation`."""

    filtered: bool = False
    verification: str = "block"
    accept_threshold: float = 0.7
    by_entropy: bool = False
    ngram_min: int = 2
    ngram_max: int = 4
    ngram_siblings: int = 0
    ngram_history: int = 0


class Sources(NamedTuple):
    """Where else n-grams are looked for, besides the sequence itself: `sibling_BM`, the slots that decode the same
    prompt (beyond the pool: none), and `known_BHT`, earlier sequences of the same prompt, of `known_length_BH` tokens
    (0: none)."""

    sibling_BM: Any
    known_BHT: Any
    known_length_BH: Any


class Context(NamedTuple):
    """What a drafter sees of the slots: tokens so far, their number, how they are sampled, the cache, its noise (see
    `pick`; G first)."""

    tokens_BT: jax.Array
    length_B: jax.Array
    sampling: SamplingParams
    cache: Cache
    noise_GB: jax.Array
    sources: Sources


class Proposal(NamedTuple):
    """`q_BGV` None: one-hot at the drafts. `depth` layers have already run on the fed tokens, giving `states_BWD`."""

    drafts_BG: jax.Array
    q_BGV: jax.Array | None
    drafted_B: jax.Array
    states_BWD: jax.Array
    depth: int
    cache: Cache


def last_tokens(context: Context) -> jax.Array:
    """The newest known token of each slot, [B, 1]."""
    return jnp.take_along_axis(context.tokens_BT, context.length_B[:, None] - 1, axis=1)


def propose_shallow(view: DecodeView, exit: ShallowExit, context: Context, choice: Choice, rules: Rules) -> Proposal:
    """Samples from the target's own first layers through their trained exit (after LayerSkip, Elhoushi et al. 2024).

    The same temperature and filters as the target's are applied. The first layers' states and cache are the target's
    own and are reused by verification.
    """
    depth = view.shape.exit_layer
    early, late = view.layers[:depth], context.cache[depth:]

    def feed(cache: Cache, token_B1: jax.Array, offset: Any) -> tuple[jax.Array, Cache]:
        return decode_layers(early, cache, embed(view, token_B1), context.length_B[:, None] - 1 + offset)

    def draft(carry, inputs):
        cache, token_B1 = carry
        offset, noise_B = inputs
        state_B1D, cache = feed(cache, token_B1, offset)
        log_probs_B1V = policy_log_probs(exit_logits(view, exit, state_B1D), context.sampling.temperature_B)
        q_BV = sampling_probs(log_probs_B1V, context.sampling, rules.filtered)[:, 0]
        drawn_B = pick(q_BV, noise_B)
        return (cache, drawn_B[:, None]), (drawn_B, q_BV, state_B1D[:, 0])

    inputs = (jnp.arange(choice.draft_length), context.noise_GB)
    carry, (drafts_GB, q_GBV, states_GBD) = jax.lax.scan(draft, (context.cache[:depth], last_tokens(context)), inputs)
    cache, newest_B1 = carry
    state_B1D, cache = feed(cache, newest_B1, choice.draft_length)
    states_BWD = jnp.concatenate([states_GBD.swapaxes(0, 1), state_B1D], axis=1)
    drafted_B = jnp.full_like(context.length_B, choice.draft_length)
    return Proposal(drafts_GB.T, q_GBV.swapaxes(0, 1), drafted_B, states_BWD, depth, (*cache, *late))


def propose_ngram(view: DecodeView, exit: ShallowExit, context: Context, choice: Choice, rules: Rules) -> Proposal:
    """Copies what followed an earlier occurrence of the sequence's own suffix (prompt-lookup decoding): in the sequence
    itself, in its siblings, or in earlier sequences of the same prompt.

    The longest suffix of `ngram_max` down to `ngram_min` tokens that occurs wins; then the sequence itself before
    earlier ones, these before siblings; then the latest occurrence. Without a match nothing is drafted. A draft stops
    at the newest known token.
    """
    places_BNT, length_BN = _places(context)
    rows, places, total = places_BNT.shape
    position_T = jnp.arange(total)
    # matched_BNT: how many tokens before position t equal the sequence's last ones, t's continuation being a candidate.
    matched_BNT = jnp.zeros_like(places_BNT)
    running_BNT = jnp.ones(places_BNT.shape, bool)
    for back in range(1, rules.ngram_max + 1):
        at_B1 = jnp.maximum(context.length_B[:, None] - back, 0)
        suffix_B11 = jnp.take_along_axis(context.tokens_BT, at_B1, axis=1)[..., None]
        long_enough_B11 = (context.length_B > back)[:, None, None]
        running_BNT &= (jnp.roll(places_BNT, back, axis=2) == suffix_B11) & (position_T >= back) & long_enough_B11
        matched_BNT += running_BNT
    candidate_BNT = (matched_BNT >= rules.ngram_min) & (position_T < length_BN[..., None])
    order_NT = jnp.arange(places * total).reshape(places, total)
    score_BNT = jnp.where(candidate_BNT, matched_BNT * places * total + order_NT, -1)
    best_B = jnp.argmax(score_BNT.reshape(rows, -1), axis=1)
    place_B, start_B = best_B // total, best_B % total
    found_BT = jnp.take_along_axis(places_BNT, place_B[:, None, None], axis=1)[:, 0]
    end_B = jnp.take_along_axis(length_BN, place_B[:, None], axis=1)[:, 0]
    index_BG = start_B[:, None] + jnp.arange(choice.draft_length)
    drafts_BG = jnp.take_along_axis(found_BT, jnp.minimum(index_BG, total - 1), axis=1)
    any_B = jnp.any(candidate_BNT, axis=(1, 2))
    drafted_B = jnp.where(any_B, jnp.minimum(end_B - start_B, choice.draft_length), 0)
    states_BWD = embed(view, jnp.concatenate([last_tokens(context), drafts_BG], axis=1))
    return Proposal(drafts_BG, None, drafted_B, states_BWD, 0, context.cache)


def _places(context: Context) -> tuple[jax.Array, jax.Array]:
    """(tokens [B, N, T], lengths [B, N]) in which n-grams are looked for: siblings, earlier sequences, the sequence."""
    own_B1T, own_B1 = context.tokens_BT[:, None], context.length_B[:, None]
    sibling_BM, known_BHT, known_length_BH = context.sources
    sibling_BMT = context.tokens_BT.at[sibling_BM].get(mode="fill", fill_value=0)
    sibling_length_BM = context.length_B.at[sibling_BM].get(mode="fill", fill_value=0)
    places_BNT = jnp.concatenate([sibling_BMT, known_BHT, own_B1T], axis=1)
    return places_BNT, jnp.concatenate([sibling_length_BM, known_length_BH, own_B1], axis=1)


def propose_nothing(view: DecodeView, exit: ShallowExit, context: Context, choice: Choice, rules: Rules) -> Proposal:
    """No drafts: plain decoding, one token a target call."""
    none_B0 = jnp.zeros((context.length_B.shape[0], 0), jnp.int32)
    return Proposal(
        none_B0, None, jnp.zeros_like(context.length_B), embed(view, last_tokens(context)), 0, context.cache
    )


DRAFTERS: dict[str, Callable[[DecodeView, ShallowExit, Context, Choice, Rules], Proposal]] = {
    "shallow": propose_shallow,
    "ngram": propose_ngram,
    "off": propose_nothing,
}
