"""The n-gram drafter: what followed the same tokens before, here or in another sequence of the same prompt.

Shape suffixes: B slots, G draft tokens, T positions, N places, M siblings, H earlier sequences.
"""

import jax
import jax.numpy as jnp

from tlt_jax.decode.propose import Choice, Context, Copies, Proposal, Rules, unfed
from tlt_jax.models.decode_view import DecodeView


def propose_ngram(view: DecodeView, context: Context, choice: Choice, rules: Rules) -> Proposal:
    """Copies what followed an earlier occurrence of the sequence's own suffix. That was looked for before the round
    (`copies_of`): where nothing is found, the round is another."""
    assert context.copies is not None
    return unfed(view, context, context.copies.drafts_BG, None, context.copies.count_B)


def copies_of(context: Context, choice: Choice, rules: Rules) -> Copies:
    """What followed an earlier occurrence of each sequence's own suffix (prompt-lookup decoding), in the sequence
    itself, in its siblings, or in earlier sequences of the same prompt.

    The longest suffix of `ngram_max` down to `ngram_min` tokens that occurs wins; then the sequence itself before
    earlier ones, these before siblings; then the latest occurrence. Without a match nothing is drafted. A draft stops
    at the newest known token.
    """
    places_BNT, length_BN = _places(context)
    rows, places, total = places_BNT.shape
    position_T = jnp.arange(total)
    shifted_BNT = jnp.pad(places_BNT, ((0, 0), (0, 0), (rules.ngram_max, 0)))
    # matched_BNT: how many tokens before position t equal the sequence's last ones, t's continuation being a candidate.
    matched_BNT = jnp.zeros_like(places_BNT)
    running_BNT = jnp.ones(places_BNT.shape, bool)
    for back in range(1, rules.ngram_max + 1):
        at_B1 = jnp.maximum(context.length_B[:, None] - back, 0)
        suffix_B11 = jnp.take_along_axis(context.tokens_BT, at_B1, axis=1)[..., None]
        long_enough_B11 = (context.length_B > back)[:, None, None]
        before_BNT = shifted_BNT[..., rules.ngram_max - back :][..., :total]
        running_BNT &= (before_BNT == suffix_B11) & (position_T >= back) & long_enough_B11
        matched_BNT += running_BNT
    candidate_BNT = (matched_BNT >= rules.ngram_min) & (position_T < length_BN[..., None])
    # The best score tells where it stands, too.
    order_NT = jnp.arange(places * total).reshape(places, total)
    best_B = jnp.max(jnp.where(candidate_BNT, matched_BNT * places * total + order_NT, -1), axis=(1, 2))
    found_B, order_B = best_B >= 0, best_B % (places * total)
    end_B = jnp.take_along_axis(length_BN, order_B[:, None] // total, axis=1)[:, 0]
    start_B = order_B % total
    last_B = order_B - start_B + total - 1
    index_BG = jnp.minimum(order_B[:, None] + jnp.arange(choice.draft_length), last_B[:, None])
    drafts_BG = jnp.take_along_axis(places_BNT.reshape(rows, -1), index_BG, axis=1)
    return Copies(drafts_BG, jnp.where(found_B, jnp.minimum(end_B - start_B, choice.draft_length), 0))


def _places(context: Context) -> tuple[jax.Array, jax.Array]:
    """(tokens [B, N, T], lengths [B, N]) in which n-grams are looked for: siblings, earlier sequences, the sequence."""
    own_B1T, own_B1 = context.tokens_BT[:, None], context.length_B[:, None]
    sibling_BM, known_BHT, known_length_BH = context.sources
    sibling_BMT = context.tokens_BT.at[sibling_BM].get(mode="fill", fill_value=0)
    sibling_length_BM = context.length_B.at[sibling_BM].get(mode="fill", fill_value=0)
    places_BNT = jnp.concatenate([sibling_BMT, known_BHT, own_B1T], axis=1)
    return places_BNT, jnp.concatenate([sibling_length_BM, known_length_BH, own_B1], axis=1)
