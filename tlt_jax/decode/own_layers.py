"""Drafting by layers that are not the target's: what every drafter with a cache of its own has in common.

Three functions make such a drafter, and a constant says whether what it made of its own drafts stays true of them once
they stand. Between rounds its cache holds the first `fed_B` tokens, at most all but the newest; what else came to be
known since is fed when it next drafts, in the same pass as the newest token.

Shape suffixes: B slots, G draft tokens, W tokens fed at once, T positions, V vocabulary, D the drafter's width.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.decode.propose import Choice, Context, DraftCache, Proposal, Rules, drawn, stacked, unfed
from tlt_jax.models.decode_view import Cache, DecodeView

AT_ONCE = 16  # tokens of a sequence fed at once to a drafter that catches up


class Known(NamedTuple):
    """The sequences so far, and for `eagle` what left the target's exit layer and its last one where it was fed."""

    tokens_BT: jax.Array
    states_BTE: jax.Array | None

    def tokens_at(self, place_BW: jax.Array) -> jax.Array:
        """The tokens at the places [B, W]; beyond the last, anything."""
        return jnp.take_along_axis(self.tokens_BT, place_BW, axis=1, mode="clip")


# (view, sequences, places [B, W], cache) -> (what leaves the layers [B, W, D], cache)
Feed = Callable[[DecodeView, Known, jax.Array, Cache], tuple[jax.Array, Cache]]
# (view, what left the layers before [B, 1, D], a draft [B, 1], its place [B, 1], cache) -> (what leaves them, cache)
Advance = Callable[[DecodeView, jax.Array, jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]
# (view, what leaves the layers [B, 1, D]) -> logits [B, 1, V], float32
Logits = Callable[[DecodeView, jax.Array], jax.Array]


class OwnLayers(NamedTuple):
    """A drafter with a cache of its own. `feed` takes tokens that are known, `advance` a draft; `logits` gives what the
    next is drawn from. `keeps`: a draft that stands need not be fed again."""

    name: str
    feed: Feed
    advance: Advance
    logits: Logits
    keeps: bool

    def most_unfed(self, draft_length: int) -> int:
        """How many known tokens are not in the cache after a round in which it drafted, at most."""
        return 2 if self.keeps else draft_length + 1


def propose(view: DecodeView, context: Context, choice: Choice, rules: Rules, own: OwnLayers) -> Proposal:
    """Samples from the layers' distribution, token by token. At most `own.most_unfed` tokens are not fed yet
    (`caught_up`)."""
    cache = context.draft_caches[own.name]
    unfed_B = context.length_B - cache.fed_B
    places_BW = _next_places(cache, own.most_unfed(choice.draft_length))
    y_BWD, layers = own.feed(view, _known(context), places_BW, cache.layers)
    y_B1D = jnp.take_along_axis(y_BWD, jnp.maximum(unfed_B - 1, 0)[:, None, None], axis=1)

    def draft(carry, inputs):
        layers, y_B1D, token_B = carry
        offset, noise_B = inputs
        y_B1D, layers = own.advance(view, y_B1D, token_B[:, None], context.length_B[:, None] + offset, layers)
        token_B, q_BV = drawn(own.logits(view, y_B1D), noise_B, context, rules)
        return (layers, y_B1D, token_B), (token_B, q_BV)

    first = drawn(own.logits(view, y_B1D), context.noise_GB[0], context, rules)
    inputs = (jnp.arange(choice.draft_length - 1), context.noise_GB[1:])
    (layers, _, _), rest = jax.lax.scan(draft, (layers, y_B1D, first[0]), inputs)
    drafts_BG, q_BGV = stacked(first, rest)
    drafted_B = jnp.full_like(context.length_B, choice.draft_length)
    fed_B = context.length_B + (choice.draft_length - 1 if own.keeps else 0)
    return unfed(view, context, drafts_BG, q_BGV, drafted_B, {own.name: DraftCache(layers, fed_B)})


def standing(cache: DraftCache, length_B: jax.Array) -> DraftCache:
    """The cache after a verification has left `length_B` tokens: the newest is not the draft that was fed there."""
    return cache._replace(fed_B=jnp.minimum(cache.fed_B, length_B - 1))


def caught_up(view: DecodeView, context: Context, done_B: jax.Array, draft_length: int, own: OwnLayers) -> DraftCache:
    """The cache with as many known tokens of each sequence that is not done as `propose` wants, after blocks in which
    somebody else drafted."""
    most = own.most_unfed(draft_length)

    def behind(cache: DraftCache) -> jax.Array:
        return ~done_B & (context.length_B - cache.fed_B > most)

    def feed(cache: DraftCache) -> DraftCache:
        _, layers = own.feed(view, _known(context), _next_places(cache, AT_ONCE), cache.layers)
        fed = standing(DraftCache(layers, cache.fed_B + AT_ONCE), context.length_B)
        return fed._replace(fed_B=jnp.where(behind(cache), fed.fed_B, cache.fed_B))

    return jax.lax.while_loop(lambda cache: jnp.any(behind(cache)), feed, context.draft_caches[own.name])


def _next_places(cache: DraftCache, count: int) -> jax.Array:
    """Places of the next `count` tokens, [B, count]. What is fed at those beyond the newest token means nothing, and is
    written again before it is read."""
    return cache.fed_B[:, None] + jnp.arange(count)


def _known(context: Context) -> Known:
    return Known(context.tokens_BT, context.states_BTE)
