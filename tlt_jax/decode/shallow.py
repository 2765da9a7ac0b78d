"""The shallow drafter: the target's own first layers, and their trained exit.

Shape suffixes: B slots, G draft tokens, W = G + 1 fed tokens (the last known one and the drafts), V vocabulary,
D width.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tlt_jax.decode.propose import Choice, Context, Proposal, Rules, drawn, last_tokens
from tlt_jax.models.decode_view import Cache, DecodeView, decode_layers, embed
from tlt_jax.models.heads import exit_logits


def propose_shallow(view: DecodeView, context: Context, choice: Choice, rules: Rules) -> Proposal:
    """Samples from the target's own first layers through their trained exit (after LayerSkip, Elhoushi et al. 2024).

    The same temperature and filters as the target's are applied. The first layers' states and cache are the target's
    own and are reused by verification.
    """
    depth, exit = view.shape.exit_layer, view.exit
    assert exit is not None
    early, late = view.layers[:depth], context.cache[depth:]

    def feed(cache: Cache, token_B1: jax.Array, offset: Any) -> tuple[jax.Array, Cache]:
        return decode_layers(view, early, cache, embed(view, token_B1), context.length_B[:, None] - 1 + offset)

    def draft(carry, inputs):
        cache, token_B1 = carry
        offset, noise_B = inputs
        state_B1D, cache = feed(cache, token_B1, offset)
        token_B, q_BV = drawn(exit_logits(view, exit, state_B1D), noise_B, context, rules)
        return (cache, token_B[:, None]), (token_B, q_BV, state_B1D[:, 0])

    inputs = (jnp.arange(choice.draft_length), context.noise_GB)
    carry, (drafts_GB, q_GBV, states_GBD) = jax.lax.scan(draft, (context.cache[:depth], last_tokens(context)), inputs)
    cache, newest_B1 = carry
    state_B1D, cache = feed(cache, newest_B1, choice.draft_length)
    states_BWD = jnp.concatenate([states_GBD.swapaxes(0, 1), state_B1D], axis=1)
    drafted_B = jnp.full_like(context.length_B, choice.draft_length)
    q_BGV = None if q_GBV is None else q_GBV.swapaxes(0, 1)
    return Proposal(drafts_GB.T, q_BGV, drafted_B, states_BWD, depth, (*cache, *late), context.draft_caches)
