"""Verification: which drafted tokens stand, and the token after them. Pure, lossless.

Shape suffixes: B slots, G draft tokens, W = G + 1 rows, V vocabulary.
"""

import jax
import jax.numpy as jnp

from tlt_jax.decode.sampling import draw


def verify_tokens(
    p_BWV: jax.Array,
    drafts_BG: jax.Array,
    q_BGV: jax.Array | None,
    drafted_B: jax.Array,
    accept_uniform_BG: jax.Array,
    next_uniform_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(accepted_B, next_B): how many leading drafts stand, and the token drawn after them.

    Token-level speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023). Draft i, drawn from q_i,
    stands if all before it do and u_i < p_i(x_i) / q_i(x_i). At the first that falls, the next token is drawn from
    max(p_i - q_i, 0), normalised; if all stand, from the row after the last draft (the bonus token). What comes out
    has exactly the distribution p.

    `q_BGV` None means one-hot drafts: q_i is 1 at the draft. `drafted_B` says how many of the G drafts are real.
    """
    draft_length = drafts_BG.shape[1]
    p_draft_BG = jnp.take_along_axis(p_BWV[:, :draft_length], drafts_BG[..., None], axis=-1)[..., 0]
    q_draft_BG = 1.0 if q_BGV is None else jnp.take_along_axis(q_BGV, drafts_BG[..., None], axis=-1)[..., 0]
    stands_BG = (accept_uniform_BG * q_draft_BG < p_draft_BG) & (jnp.arange(draft_length) < drafted_B[:, None])
    accepted_B = jnp.sum(jnp.cumprod(stands_BG.astype(jnp.int32), axis=1), axis=1)
    return accepted_B, draw(_residual(p_BWV, drafts_BG, q_BGV, drafted_B, accepted_B), next_uniform_B)


def _residual(
    p_BWV: jax.Array, drafts_BG: jax.Array, q_BGV: jax.Array | None, drafted_B: jax.Array, accepted_B: jax.Array
) -> jax.Array:
    """Unnormalised distribution [B, V] of the token after the accepted drafts."""
    draft_length, vocab = drafts_BG.shape[1], p_BWV.shape[-1]
    p_BV = jnp.take_along_axis(p_BWV, accepted_B[:, None, None], axis=1)[:, 0]
    if draft_length == 0:
        return p_BV
    row_B1 = jnp.minimum(accepted_B, draft_length - 1)[:, None]
    if q_BGV is None:
        q_BV = jax.nn.one_hot(jnp.take_along_axis(drafts_BG, row_B1, axis=1)[:, 0], vocab, dtype=p_BV.dtype)
    else:
        q_BV = jnp.take_along_axis(q_BGV, row_B1[..., None], axis=1)[:, 0]
    rejected_B1 = (accepted_B < drafted_B)[:, None]
    residual_BV = jnp.maximum(p_BV - jnp.where(rejected_B1, q_BV, 0.0), 0.0)
    # p = q to rounding leaves nothing; a rejection there has probability of the same rounding, and p is then the limit.
    return jnp.where(jnp.sum(residual_BV, axis=-1, keepdims=True) > 0, residual_BV, p_BV)
