"""Verification: which drafted tokens stand, and the token after them. Pure.

`token`, `block` and `coupled` are lossless: what comes out has exactly the target's distribution, whatever the drafter
proposes. `lenient` is lossy: it keeps more drafts than the target would, and says what it drew from.

Each takes p_BWV, the target's distribution after the known tokens and after each draft; the drafts, and q_BGV, the
distributions that they were drawn from (None: each draft is certain, q is 1 there); drafted_B, how many of the G are
real; and noise that nothing else has seen, uniform in [0, 1): G columns for the drafts, one for the token after them.
Each returns (accepted_B, next_B, generated_BWV): how many leading drafts stand; the token drawn after them; and from
which distribution the token at each row was generated.

Shape suffixes: B slots, G draft tokens, W = G + 1 rows, V vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tlt_jax.decode.sampling import draw, pick

Verdict = tuple[jax.Array, jax.Array, jax.Array]


def verify_token(
    p_BWV: jax.Array, drafts_BG: jax.Array, q_BGV: jax.Array | None, drafted_B: jax.Array, uniform_BW: jax.Array
) -> Verdict:
    """Token by token (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).

    Draft i, drawn from q_i, stands if all before it do and u_i < p_i(x_i) / q_i(x_i). At the first that falls, the
    next token is drawn from max(p_i - q_i, 0), normalised; if all stand, from the row after the last (the bonus
    token).
    """
    p_draft_BG, q_draft_BG = at_drafts(p_BWV, drafts_BG), at_drafts(q_BGV, drafts_BG)
    stands_BG = (uniform_BW[:, :-1] * q_draft_BG < p_draft_BG) & _real(drafts_BG, drafted_B)
    accepted_B = jnp.sum(jnp.cumprod(stands_BG.astype(jnp.int32), axis=1), axis=1)
    residual_BV = _residual(p_BWV, drafts_BG, q_BGV, drafted_B, accepted_B, jnp.ones_like(p_BWV[..., 0]))
    return accepted_B, draw(residual_BV, uniform_BW[:, -1]), p_BWV


def verify_block(
    p_BWV: jax.Array, drafts_BG: jax.Array, q_BGV: jax.Array | None, drafted_B: jax.Array, uniform_BW: jax.Array
) -> Verdict:
    """Block verification (Sun et al. 2024, algorithm 2): in expectation never fewer tokens than token by token.

    With w_0 = 1 and w_i = min(w_{i-1} p_i(x_i) / q_i(x_i), 1), the first i drafts may stand together with probability
    h_i = s_i / (s_i + 1 - w_i), where s_i = sum_x max(w_i p_{i+1}(x) - q_{i+1}(x), 0); the whole of G drafts with
    w_G. The largest i with u_i < h_i is kept, also where one before it is not; the next token is drawn from
    max(w_i p_{i+1} - q_{i+1}, 0), normalised; after the whole, from p_{G+1}.
    """
    p_draft_BG, q_draft_BG = at_drafts(p_BWV, drafts_BG), at_drafts(q_BGV, drafts_BG)
    real_BG, tiny = _real(drafts_BG, drafted_B), jnp.finfo(p_BWV.dtype).tiny
    weight_B, weights = jnp.ones_like(p_BWV[:, 0, 0]), [jnp.ones_like(p_BWV[:, 0, 0])]
    for i in range(drafts_BG.shape[1]):
        weight_B = jnp.minimum(weight_B * p_draft_BG[:, i] / jnp.maximum(q_draft_BG[:, i], tiny), 1.0)
        weights.append(weight_B)
    weight_BW = jnp.stack(weights, axis=1)
    left_BG = _mass_left(p_BWV, drafts_BG, q_BGV, weight_BW)
    left_BW = jnp.pad(left_BG, ((0, 0), (0, 1)))
    # 0 / 0 where p is q and nothing is lost so far: the drafts after stand then, and what is taken here is no matter.
    short_BW = left_BW / jnp.maximum(left_BW + 1.0 - weight_BW, tiny)
    whole_BW = jnp.arange(weight_BW.shape[1]) == drafted_B[:, None]
    stands_BG = (uniform_BW[:, :-1] < jnp.where(whole_BW, weight_BW, short_BW)[:, 1:]) & real_BG
    accepted_B = jnp.max(jnp.where(stands_BG, jnp.arange(1, drafts_BG.shape[1] + 1), 0), axis=1, initial=0)
    residual_BV = _residual(p_BWV, drafts_BG, q_BGV, drafted_B, accepted_B, weight_BW)
    return accepted_B, draw(residual_BV, uniform_BW[:, -1]), p_BWV


def verify_coupled(
    p_BWV: jax.Array, drafts_BG: jax.Array, q_BGV: jax.Array | None, drafted_B: jax.Array, gumbel_BWV: jax.Array
) -> Verdict:
    """Drafts stand that are what the target draws itself (Gumbel coupling; Daliri et al. 2025, "Coupling without
    communication and drafter-invariant speculative decoding").

    The token at a position is argmax(log p + g) with Gumbel noise g that belongs to the position, so it depends on
    neither drafts nor blocks. The drafter draws argmax(log q + g) with the same noise, and is right with probability
    at least (1 - d) / (1 + d), d the total variation between p and q.
    """
    return *verify_own(pick(p_BWV, gumbel_BWV), drafts_BG, drafted_B), p_BWV


def verify_lenient(
    p_BWV: jax.Array,
    drafts_BG: jax.Array,
    q_BGV: jax.Array | None,
    drafted_B: jax.Array,
    uniform_BW: jax.Array,
    threshold: float,
    by_entropy: bool,
) -> Verdict:
    """Lossy: as `token`, but draft i stands if u_i < p_i(x_i) / (t q_i(x_i)), with a threshold t of at most 1.

    What is generated at a drafted row has the distribution a + (1 - sum a) r, where a = min(q, p / t) is what stands
    and r = max(p - q, 0), normalised, what is drawn else. With `by_entropy`, the threshold is t + (1 - t) H(p) / log V:
    nearer to 1, which is lossless, the less sure the target is. At temperature 0 nothing changes.
    """
    p_BGV = p_BWV[:, :-1]
    threshold_BG1 = jnp.full_like(p_BGV[..., :1], threshold)
    if by_entropy:
        entropy_BG1 = -jnp.sum(jax.scipy.special.xlogy(p_BGV, p_BGV), axis=-1, keepdims=True)
        threshold_BG1 += (1.0 - threshold) * entropy_BG1 / jnp.log(p_BWV.shape[-1])
    p_draft_BG, q_draft_BG = at_drafts(p_BWV, drafts_BG), at_drafts(q_BGV, drafts_BG)
    real_BG = _real(drafts_BG, drafted_B)
    stands_BG = (uniform_BW[:, :-1] * threshold_BG1[..., 0] * q_draft_BG < p_draft_BG) & real_BG
    accepted_B = jnp.sum(jnp.cumprod(stands_BG.astype(jnp.int32), axis=1), axis=1)
    residual_BV = _residual(p_BWV, drafts_BG, q_BGV, drafted_B, accepted_B, jnp.ones_like(p_BWV[..., 0]))
    q_BGV = _distributions(drafts_BG, q_BGV, p_BWV)
    stand_BGV = jnp.minimum(q_BGV, p_BGV / threshold_BG1)
    else_BGV = jnp.maximum(p_BGV - q_BGV, 0.0)
    else_BGV /= jnp.maximum(jnp.sum(else_BGV, axis=-1, keepdims=True), jnp.finfo(p_BWV.dtype).tiny)
    mixed_BGV = stand_BGV + (1.0 - jnp.sum(stand_BGV, axis=-1, keepdims=True)) * else_BGV
    generated_BGV = jnp.where(real_BG[..., None], mixed_BGV, p_BGV)
    return (
        accepted_B,
        draw(residual_BV, uniform_BW[:, -1]),
        jnp.concatenate([generated_BGV, p_BWV[:, -1:]], axis=1),
    )


def verify_own(own_BW: jax.Array, drafts_BG: jax.Array, drafted_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(accepted_B, next_B): drafts stand that are the target's `own` tokens, one a row. Where these are the likeliest,
    it is what every rule comes to at temperature 0."""
    stands_BG = (own_BW[:, :-1] == drafts_BG) & _real(drafts_BG, drafted_B)
    accepted_B = jnp.sum(jnp.cumprod(stands_BG.astype(jnp.int32), axis=1), axis=1)
    return accepted_B, jnp.take_along_axis(own_BW, accepted_B[:, None], axis=1)[:, 0]


VERIFIERS: dict[str, Callable[..., Verdict]] = {
    "block": verify_block,
    "token": verify_token,
    "coupled": verify_coupled,
    "lenient": verify_lenient,
}


def at_drafts(rows: jax.Array | None, drafts_BG: jax.Array) -> jax.Array:
    """What the first G `rows` [B, >= G, V] have at the drafts [B, G]; 1 where there are none."""
    if rows is None:
        return jnp.ones(drafts_BG.shape, jnp.float32)
    return jnp.take_along_axis(rows[:, : drafts_BG.shape[1]], drafts_BG[..., None], axis=-1)[..., 0]


def _real(drafts_BG: jax.Array, drafted_B: jax.Array) -> jax.Array:
    return jnp.arange(drafts_BG.shape[1]) < drafted_B[:, None]


def _distributions(drafts_BG: jax.Array, q_BGV: jax.Array | None, p_BWV: jax.Array) -> jax.Array:
    return jax.nn.one_hot(drafts_BG, p_BWV.shape[-1], dtype=p_BWV.dtype) if q_BGV is None else q_BGV


def _mass_left(p_BWV: jax.Array, drafts_BG: jax.Array, q_BGV: jax.Array | None, weight_BW: jax.Array) -> jax.Array:
    """s_i = sum_x max(w_i p(x) - q(x), 0) of each row with a draft [B, G]; of a certain draft x', w_i (1 - p(x'))."""
    weight_BG = weight_BW[:, :-1]
    if q_BGV is None:
        return weight_BG * (1.0 - at_drafts(p_BWV, drafts_BG))
    return jnp.sum(jnp.maximum(weight_BG[..., None] * p_BWV[:, :-1] - q_BGV, 0.0), axis=-1)


def _residual(
    p_BWV: jax.Array,
    drafts_BG: jax.Array,
    q_BGV: jax.Array | None,
    drafted_B: jax.Array,
    accepted_B: jax.Array,
    weight_BW: jax.Array,
) -> jax.Array:
    """max(w p - q, 0) at the row after the accepted drafts, unnormalised [B, V]; p where all real drafts stand."""
    draft_length, vocab = drafts_BG.shape[1], p_BWV.shape[-1]
    p_BV = jnp.take_along_axis(p_BWV, accepted_B[:, None, None], axis=1)[:, 0]
    if draft_length == 0:
        return p_BV
    row_B1 = jnp.minimum(accepted_B, draft_length - 1)[:, None]
    if q_BGV is None:
        q_BV = jax.nn.one_hot(jnp.take_along_axis(drafts_BG, row_B1, axis=1)[:, 0], vocab, dtype=p_BV.dtype)
    else:
        q_BV = jnp.take_along_axis(q_BGV, row_B1[..., None], axis=1)[:, 0]
    weight_B1 = jnp.take_along_axis(weight_BW, accepted_B[:, None], axis=1)
    residual_BV = jnp.where((accepted_B < drafted_B)[:, None], jnp.maximum(weight_B1 * p_BV - q_BV, 0.0), p_BV)
    # p = q to rounding leaves nothing; a rejection there has probability of the same rounding, and p is then the limit.
    return jnp.where(jnp.sum(residual_BV, axis=-1, keepdims=True) > 0, residual_BV, p_BV)
