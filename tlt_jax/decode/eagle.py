"""The eagle drafter: one layer of its own, over the target's states and its own (EAGLE, Li et al. 2024).

What the verification before left, the target's states of the tokens that stand, is fed first: those tokens' entries in
the layer's cache were made from the drafter's own states, and are made again from the target's.

Shape suffixes: B slots, G draft tokens, W = G + 1, T positions, V vocabulary, D width.
"""

import jax
import jax.numpy as jnp

from tlt_jax.decode.propose import Choice, Context, DraftCache, Proposal, Rules, drawn, stacked, unfed
from tlt_jax.models.decode_view import Cache, DecodeView, decode_layers, embed
from tlt_jax.models.eagle import eagle_inputs, eagle_logits, known_inputs


def propose_eagle(view: DecodeView, context: Context, choice: Choice, rules: Rules) -> Proposal:
    """Samples from the layer's distribution, token by token, each from the state that the one before left. At most W
    tokens are not fed yet (`caught_up`)."""
    assert view.eagle is not None and context.eagle is not None
    eagle, unfed_B = view.eagle, context.length_B - context.eagle.fed_B
    y_BWD, layers = feed_known(view, context, context.eagle, choice.draft_length + 1)
    y_B1D = jnp.take_along_axis(y_BWD, jnp.maximum(unfed_B - 1, 0)[:, None, None], axis=1)

    def draw(y_B1D: jax.Array, noise_B: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        return drawn(eagle_logits(view, eagle, y_B1D), noise_B, context, rules)

    def draft(carry, inputs):
        layers, y_B1D, token_B = carry
        offset, noise_B = inputs
        x_B1D = eagle_inputs(eagle, y_B1D, embed(view, token_B[:, None]))
        y_B1D, layers = decode_layers(view, (eagle.layer,), layers, x_B1D, context.length_B[:, None] + offset)
        token_B, q_BV = draw(y_B1D, noise_B)
        return (layers, y_B1D, token_B), (token_B, q_BV)

    first = draw(y_B1D, context.noise_GB[0])
    inputs = (jnp.arange(choice.draft_length - 1), context.noise_GB[1:])
    (layers, _, _), rest = jax.lax.scan(draft, (layers, y_B1D, first[0]), inputs)
    drafts_BG, q_BGV = stacked(first, rest)
    drafted_B = jnp.full_like(context.length_B, choice.draft_length)
    return unfed(view, context, drafts_BG, q_BGV, drafted_B, DraftCache(layers, context.length_B))


def feed_known(view: DecodeView, context: Context, cache: DraftCache, count: int) -> tuple[jax.Array, Cache]:
    """Feeds the next `count` tokens with the target's states before them: (what leaves the layer [B, count, D], its
    cache). Rows beyond the newest known token mean nothing, and are written again before they are read."""
    assert view.eagle is not None and context.states_BTE is not None
    place_BW = cache.fed_B[:, None] + jnp.arange(count)
    tokens_BW = jnp.take_along_axis(context.tokens_BT, place_BW, axis=1, mode="clip")
    before_BWE = jnp.take_along_axis(context.states_BTE, jnp.maximum(place_BW - 1, 0)[..., None], axis=1, mode="clip")
    before_BWE = jnp.where(place_BW[..., None] > 0, before_BWE, 0.0)
    x_BWD = known_inputs(view.eagle, before_BWE, embed(view, tokens_BW))
    return decode_layers(view, (view.eagle.layer,), cache.layers, x_BWD, place_BW)


def caught_up(view: DecodeView, context: Context, done_B: jax.Array, count: int) -> DraftCache:
    """The cache with all but the last `count` known tokens of each sequence that is not done, after blocks in which
    somebody else drafted."""
    assert context.eagle is not None

    def behind(cache: DraftCache) -> jax.Array:
        return ~done_B & (context.length_B - cache.fed_B > count)

    def feed(cache: DraftCache) -> DraftCache:
        _, layers = feed_known(view, context, cache, count)
        return DraftCache(layers, jnp.where(behind(cache), cache.fed_B + count, cache.fed_B))

    return jax.lax.while_loop(lambda cache: jnp.any(behind(cache)), feed, context.eagle)
