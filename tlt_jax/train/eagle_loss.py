"""Training the eagle drafter: chains of drafts from many places at once, and a loss aimed at how many of them stand.

A chain is what the drafter does when it drafts: from a place where the target's state is known it goes on over its own
states (as EAGLE-3's training, Li et al. 2025), on the tokens that are there. Each draft's loss is

    m KL(p || q) + (1 - m) TV(p, q),    m = exp(-3 a),    a = 1 - TV(p, q) = sum_v min(p, q)

a being the chance that the draft stands: while few do, KL leads, whose gradient is large; then the total variation,
which is what counts (the hybrid of LK losses, Samarin et al. 2026, with m at each place; TV at the end also after
Bebop, Li et al. 2026). Target, embedding and head are held fixed.

Shape suffixes: A microbatches, B rows, S sequence, D width, V vocabulary, P places where chains begin, K drafts of one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.models.attention import as_cached, causal_attention, mixed_values
from tlt_jax.models.eagle import Eagle, both_states, eagle_inputs, eagle_logits, known_inputs
from tlt_jax.models.transformer import Transformer, block, cast, logits, look_up, rotary
from tlt_jax.train.step import Batch

LED_BY_KL = 3.0  # how fast the weight of KL falls with the acceptance


class Chains(NamedTuple):
    """`drafts` of a chain; one begins at every `stride`-th place, from an offset that moves with the step."""

    drafts: int
    stride: int


def places(length: int, chains: Chains, offset: jax.Array) -> jax.Array:
    """[P, K]: where the drafts of each chain stand, some beyond the sequence of `length`."""
    start_P = offset + chains.stride * jnp.arange(-(-length // chains.stride))
    return start_P[:, None] + jnp.arange(chains.drafts)


def chain_weights(segments_ABS: jax.Array, weights_ABS: jax.Array, chains: Chains, offset: jax.Array) -> jax.Array:
    """[A, B, P, K]: alike for all drafts of a chain's first, second, ... place whose prediction has a weight in
    `weights_ABS` and whose chain began in the same document; they sum to 1 over the whole update for each of K. Every
    token counts alike, so that a long sequence has as much say as it has tokens."""
    length = segments_ABS.shape[-1]
    at_PK = places(length, chains, offset)
    inside_PK, at_PK = at_PK < length, jnp.minimum(at_PK, length - 1)
    same_ABPK = segments_ABS[..., at_PK] == segments_ABS[..., at_PK[:, :1]]
    counts_ABPK = ((weights_ABS[..., at_PK] > 0) & same_ABPK & inside_PK).astype(jnp.float32)
    return counts_ABPK / jnp.maximum(jnp.sum(counts_ABPK, axis=(0, 1, 2)), 1.0)


def chain_batch(batch: Batch, weights_ABS: jax.Array, chains: Chains, step: jax.Array) -> Batch:
    """What an update's batch needs for `chain_metrics`, from its segments [A, B, S] and the weights of its
    predictions."""
    offset = step % chains.stride
    weights = chain_weights(batch["segments"], weights_ABS, chains, offset)
    return {"eagle_weights": weights, "eagle_offset": jnp.full(weights.shape[:1], offset)}


def chain_metrics(
    params: dict[str, Any], states: tuple[jax.Array, jax.Array], b: Batch, chains: Chains, temperature: float
) -> dict[str, jax.Array]:
    """`train/eagle_loss`, to be added to the loss of a microbatch with `chain_batch`, and `train/eagle_acceptance`.
    `states` are what left the target's exit layer and its last one, each [B, S, D]."""
    batch = b["tokens"], b["segments"], b["positions"]
    at_PK = places(states[1].shape[1], chains, b["eagle_offset"])
    loss, acceptance = eagle_loss(
        params["policy"], params["eagle"], states, batch, b["eagle_weights"], at_PK, temperature
    )
    return {"train/eagle_loss": loss, "train/eagle_acceptance": acceptance[0]}


def eagle_loss(
    model: Transformer,
    eagle: Eagle,
    states: tuple[jax.Array, jax.Array],
    batch: tuple[jax.Array, jax.Array, jax.Array],
    weights_BPK: jax.Array,
    at_PK: jax.Array,
    temperature: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """(loss, acceptance [K] of a chain's first, second, ... draft), weighted sums. `states`: what left the target's
    exit layer and its last one; `batch`: its tokens, segments and positions, each [B, S]. Gradients reach the eagle
    alone."""
    with jax.named_scope("eagle_loss"):
        model, states = jax.lax.stop_gradient((model, states))
        x_BSD = states[1]
        at_PK = jnp.minimum(at_PK, x_BSD.shape[1] - 1)
        loss, acceptance = jnp.float32(0.0), []
        for draft, y_BPD in enumerate(chain_states(model, eagle, states, *batch, at_PK)):
            weights_BP = weights_BPK[..., draft]
            p_log_BPV = jax.nn.log_softmax(logits(model, x_BSD[:, at_PK[:, draft]]) / temperature)
            q_log_BPV = jax.nn.log_softmax(eagle_logits(model, eagle, y_BPD) / temperature)
            each_BP, stands_BP = acceptance_loss(p_log_BPV, q_log_BPV)
            # A place without weight may hold anything.
            loss += jnp.sum(jnp.where(weights_BP > 0, each_BP, 0.0) * weights_BP) / weights_BPK.shape[-1]
            acceptance.append(jnp.sum(jnp.where(weights_BP > 0, stands_BP, 0.0) * weights_BP))
        return loss, jnp.stack(acceptance)


def acceptance_loss(p_log_BPV: jax.Array, q_log_BPV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(loss, chance that the draft stands), each [B, P]; see above."""
    p_BPV = jnp.exp(p_log_BPV)
    stands_BP = jnp.sum(jnp.minimum(p_BPV, jnp.exp(q_log_BPV)), axis=-1)
    kl_BP = jnp.sum(p_BPV * (p_log_BPV - q_log_BPV), axis=-1)
    by_kl_BP = jnp.exp(-LED_BY_KL * jax.lax.stop_gradient(stands_BP))
    return by_kl_BP * kl_BP + (1.0 - by_kl_BP) * (1.0 - stands_BP), jax.lax.stop_gradient(stands_BP)


def chain_states(
    model: Transformer,
    eagle: Eagle,
    states: tuple[jax.Array, jax.Array],
    tokens_BS: jax.Array,
    segments_BS: jax.Array,
    positions_BS: jax.Array,
    at_PK: jax.Array,
) -> list[jax.Array]:
    """What leaves the drafter's layer at each chain's first, second, ... place, each [B, P, D].

    The first goes over the whole sequence, with the target's states. The later ones see of that what lies up to the
    chain's beginning, and the chain's own places before them.
    """
    known_BSE = both_states(*states)
    s, eagle = eagle.shape, cast(eagle, known_BSE.dtype)
    embedded_BSD = look_up(model.embedding.astype(known_BSE.dtype), tokens_BS)
    follows_BS = jnp.pad(segments_BS[:, 1:] == segments_BS[:, :-1], ((0, 0), (1, 0)))
    before_BSE = jnp.where(follows_BS[..., None], jnp.roll(known_BSE, 1, axis=1), 0.0)

    def over_all(q, k, v):
        return causal_attention(q, k, v, segments_BS), as_cached(k, v)

    inputs_BSD = known_inputs(eagle, before_BSE, embedded_BSD)
    y_BSD, known = block(eagle.layer, inputs_BSD, rotary(positions_BS, s.head_dim, s.rope_theta), over_all)
    start_P = at_PK[:, 0]
    sees_BPS = segments_BS[:, start_P, None] == segments_BS[:, None, :]
    sees_BPS &= jnp.arange(segments_BS.shape[1]) <= start_P[:, None]
    own_BPP = jnp.broadcast_to(jnp.eye(len(start_P), dtype=bool), (*sees_BPS.shape[:2], len(start_P)))

    found, mask_B1PT = [y_BSD[:, start_P]], sees_BPS[:, None]
    for at_P in at_PK.T[1:]:
        mask_B1PT = jnp.concatenate([mask_B1PT, own_BPP[:, None]], axis=-1)

        def over_chain(q, k, v, known=known, mask_B1PT=mask_B1PT):
            k_BKNP, v_BKPN = as_cached(k, v)
            kept = jnp.concatenate([known[0], k_BKNP], axis=3), jnp.concatenate([known[1], v_BKPN], axis=2)
            return mixed_values(q, *kept, mask_B1PT), kept

        inputs_BPD = eagle_inputs(eagle, found[-1], embedded_BSD[:, at_P])
        cos_sin = rotary(positions_BS[:, at_P], s.head_dim, s.rope_theta)
        y_BPD, known = block(eagle.layer, inputs_BPD, cos_sin, over_chain)
        found.append(y_BPD)
    return found
