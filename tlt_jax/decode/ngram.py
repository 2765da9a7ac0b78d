"""The n-gram drafter: what followed the same tokens before, here or in another sequence of the same prompt.

Shape suffixes: B slots, G draft tokens, T positions, N places, M siblings, H earlier sequences.
"""

import jax
import jax.numpy as jnp

from tlt_jax.decode.propose import Choice, Context, Proposal, Rules, unfed
from tlt_jax.models.decode_view import DecodeView


def propose_ngram(view: DecodeView, context: Context, choice: Choice, rules: Rules) -> Proposal:
    """Copies what followed an earlier occurrence of the sequence's own suffix, `drafts_of`."""
    drafts_BG, drafted_B = drafts_of(context, choice, rules)
    return unfed(view, context, drafts_BG, None, drafted_B)


def drafts_of(context: Context, choice: Choice, rules: Rules) -> tuple[jax.Array, jax.Array]:
    """(drafts [B, G], how many of them there are [B]): what followed an earlier occurrence of the sequence's own suffix
    (prompt-lookup decoding), in the sequence itself, in its siblings, or in earlier sequences of the same prompt.

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
    return drafts_BG, drafted_B


def _places(context: Context) -> tuple[jax.Array, jax.Array]:
    """(tokens [B, N, T], lengths [B, N]) in which n-grams are looked for: siblings, earlier sequences, the sequence."""
    own_B1T, own_B1 = context.tokens_BT[:, None], context.length_B[:, None]
    sibling_BM, known_BHT, known_length_BH = context.sources
    sibling_BMT = context.tokens_BT.at[sibling_BM].get(mode="fill", fill_value=0)
    sibling_length_BM = context.length_B.at[sibling_BM].get(mode="fill", fill_value=0)
    places_BNT = jnp.concatenate([sibling_BMT, known_BHT, own_B1T], axis=1)
    return places_BNT, jnp.concatenate([sibling_length_BM, known_length_BH, own_B1], axis=1)
