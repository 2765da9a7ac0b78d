"""What a drafter sees of the slots, and what it hands over: up to G tokens a slot, and from which distribution q it
drew them. Each drafter is a file of its own; `decode/drafters.py` lists them.

A drafter may have run the target's first layers on the tokens it proposes. It then hands over their states and their
cache, and verification goes on from there instead of starting again.

Shape suffixes: B slots, G draft tokens, W = G + 1 fed tokens (the last known one and the drafts), T positions,
V vocabulary, D width.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.decode.sampling import Draws, SamplingParams, likeliest, pick, policy_of, sampling_probs
from tlt_jax.models.decode_view import Cache, DecodeView, embed


@dataclass(frozen=True)
class Choice:
    """Who drafts, and how many tokens: none with "off"."""

    drafter: str
    draft_length: int


OFF = Choice("off", 0)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What stays the same while a pool decodes. `filtered`: some slot may use top-k, top-p or min-p; `draws`: whether
    some slots, or all, may be at temperature 0; the rest are the config's, of `speculation`."""

    filtered: bool = False
    draws: Draws = "any"
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


class DraftCache(NamedTuple):
    """What a drafter with layers of its own keeps of the slots: their keys and values, of the first `fed_B` tokens."""

    layers: Cache
    fed_B: jax.Array


class Copies(NamedTuple):
    """For `ngram`: what it copies, and of how many tokens that is."""

    drafts_BG: jax.Array
    count_B: jax.Array


class Context(NamedTuple):
    """What a drafter sees of the slots: tokens so far, their number, how they are sampled, the cache, its noise (see
    `pick`; G first); for `eagle`, what left the target's exit layer and its last one where it was fed; the caches of
    drafters with layers of their own; for `ngram`, what it has found."""

    tokens_BT: jax.Array
    length_B: jax.Array
    sampling: SamplingParams
    cache: Cache
    noise_GB: jax.Array
    sources: Sources
    states_BTE: jax.Array | None
    draft_caches: dict[str, DraftCache]
    copies: Copies | None = None


class Proposal(NamedTuple):
    """`q_BGV` None: one-hot at the drafts. `depth` layers have already run on the fed tokens, giving `states_BWD`.
    The caches are as drafting left them."""

    drafts_BG: jax.Array
    q_BGV: jax.Array | None
    drafted_B: jax.Array
    states_BWD: jax.Array
    depth: int
    cache: Cache
    draft_caches: dict[str, DraftCache]


def last_tokens(context: Context) -> jax.Array:
    """The newest known token of each slot, [B, 1]."""
    return jnp.take_along_axis(context.tokens_BT, context.length_B[:, None] - 1, axis=1)


def drawn(
    logits_B1V: jax.Array, noise_B: jax.Array, context: Context, rules: Rules
) -> tuple[jax.Array, jax.Array | None]:
    """(a draft [B], the distribution q [B, V] that it was drawn from): the logits at the target's temperature and
    filters. None where all are greedy: q is one-hot at the draft then."""
    policy = policy_of(logits_B1V, context.sampling.temperature_B)
    if rules.draws == "greedy":
        return likeliest(policy)[:, 0], None
    q_BV = sampling_probs(policy, context.sampling, rules.filtered, rules.draws)[:, 0]
    return pick(q_BV, noise_B), q_BV


def stacked(first: Any, rest: Any) -> Any:
    """What was found for the first draft [B, ...] and for those after it [G - 1, B, ...], together [B, G, ...]."""
    return jax.tree.map(lambda one, more: jnp.concatenate([one[None], more]).swapaxes(0, 1), first, rest)


def unfed(
    view: DecodeView,
    context: Context,
    drafts_BG: jax.Array,
    q_BGV: jax.Array | None,
    drafted_B: jax.Array,
    caches: dict[str, DraftCache] | None = None,
) -> Proposal:
    """The proposal of a drafter that has run none of the target's layers; `caches`: its own, if it has one."""
    states_BWD = embed(view, jnp.concatenate([last_tokens(context), drafts_BG], axis=1))
    draft_caches = context.draft_caches | (caches or {})
    return Proposal(drafts_BG, q_BGV, drafted_B, states_BWD, 0, context.cache, draft_caches)


def propose_nothing(view: DecodeView, context: Context, choice: Choice, rules: Rules) -> Proposal:
    """No drafts: plain decoding, one token a target call."""
    none_B0 = jnp.zeros((context.length_B.shape[0], 0), jnp.int32)
    return unfed(view, context, none_B0, None, jnp.zeros_like(context.length_B))
