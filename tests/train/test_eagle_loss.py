"""The eagle drafter's training: its loss by hand, chains that do what drafting does, documents kept apart."""

import jax
import jax.numpy as jnp
import numpy as np
from support import tiny

from tlt_jax.models.transformer import hidden_states
from tlt_jax.train.eagle_loss import Chains, acceptance_loss, chain_states, chain_weights, eagle_loss, places

MODEL, EAGLE = tiny.transformer(scale=2.0), tiny.eagle(scale=2.0)
CHAINS = Chains(drafts=3, stride=4)
S = 12


def rows(*documents: int):
    """(tokens, segments, positions) of one row with documents of these lengths, padded to S."""
    segments, positions = np.zeros((1, S), np.int32), np.zeros((1, S), np.int32)
    start = 0
    for number, length in enumerate(documents, start=1):
        segments[0, start : start + length], positions[0, start : start + length] = number, np.arange(length)
        start += length
    tokens = np.random.default_rng(0).integers(0, tiny.SHAPE.vocab, (1, S))
    return jnp.asarray(tokens), jnp.asarray(segments), jnp.asarray(positions)


def states(batch, offset: int, chains: Chains = CHAINS):
    of_model = hidden_states(MODEL, *batch, dtype=jnp.float32)
    at_PK = jnp.minimum(places(S, chains, jnp.int32(offset)), S - 1)
    return at_PK, chain_states(MODEL, EAGLE, of_model, *batch, at_PK)


def test_the_loss_of_a_draft_by_hand():
    p, q = jnp.array([[[0.7, 0.2, 0.1]]]), jnp.array([[[0.5, 0.1, 0.4]]])
    loss, stands = acceptance_loss(jnp.log(p), jnp.log(q))
    np.testing.assert_allclose(stands, 0.7, atol=1e-6)  # 0.5 + 0.1 + 0.1
    kl, by_kl = 0.7 * np.log(1.4) + 0.2 * np.log(2.0) + 0.1 * np.log(0.25), np.exp(-2.1)
    np.testing.assert_allclose(loss, by_kl * kl + (1 - by_kl) * 0.3, atol=1e-6)
    same, all_stand = acceptance_loss(jnp.log(p), jnp.log(p))
    np.testing.assert_allclose((same, all_stand), (jnp.zeros((1, 1)), jnp.ones((1, 1))), atol=1e-6)


def test_the_weights_of_chains_by_hand():
    # Two documents of 5 and 4 tokens; the last token of each predicts nothing.
    segments = jnp.array([[[1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0]]])
    weights = jnp.array([[[1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0]]])
    found = chain_weights(segments, weights, CHAINS, jnp.int32(1))
    np.testing.assert_array_equal(places(S, CHAINS, jnp.int32(1)), [[1, 2, 3], [5, 6, 7], [9, 10, 11]])
    np.testing.assert_allclose(found, [[[[0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0, 0, 0]]]])
    # Chains from 2 and 6: 4 ends the first document, 8 the second.
    np.testing.assert_allclose(
        chain_weights(segments, weights, CHAINS, jnp.int32(2)), [[[[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 0]]]]
    )
    # One from 3 runs into the next document, where places count again, but not for it.
    np.testing.assert_allclose(
        chain_weights(segments, weights, CHAINS, jnp.int32(3)), [[[[0.5, 0, 0], [0.5, 0, 0], [0, 0, 0]]]]
    )
    assert not chain_weights(segments, jnp.zeros_like(weights), CHAINS, jnp.int32(0)).any()


def test_every_place_is_looked_at_once_in_a_strides_steps():
    firsts = [places(S, CHAINS, jnp.int32(offset))[:, 0] for offset in range(CHAINS.stride)]
    assert sorted(np.concatenate(firsts).tolist()) == list(range(S))


def test_a_first_draft_is_the_layer_over_the_whole_sequence():
    batch = rows(S)
    whole = states(batch, 0, Chains(1, 1))[1][0]
    at_PK, chain = states(batch, 2)
    np.testing.assert_allclose(chain[0], whole[:, at_PK[:, 0]], atol=1e-5)


def test_documents_in_a_row_do_not_see_each_other():
    tokens, segments, positions = rows(5, 7)
    at_PK, together = states((tokens, segments, positions), 1)  # chains from 1, 5, 9
    alone = jnp.pad(tokens[:, 5:], ((0, 0), (0, 5)))
    of_alone = rows(7)
    _, apart = states((alone, *of_alone[1:]), 0)  # from 0, 4, 8
    assert at_PK[1, 0] == 5
    for draft in range(CHAINS.drafts):
        np.testing.assert_allclose(together[draft][:, 1:], apart[draft][:, :2], atol=1e-5)


def test_gradients_reach_the_eagle_alone_and_what_has_no_weight_may_be_anything():
    batch = rows(5, 4)
    both = hidden_states(MODEL, *batch, dtype=jnp.float32)
    weights = chain_weights(batch[1][None], (batch[1] > 0)[None], CHAINS, jnp.int32(0))[0]
    at_PK = places(S, CHAINS, jnp.int32(0))

    @jax.jit
    def gradients(both):
        def loss(model, eagle, both):
            return eagle_loss(model, eagle, both, batch, weights, at_PK)

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(MODEL, EAGLE, both)

    (_, acceptance), (of_model, of_eagle, of_states) = gradients(both)
    assert acceptance.shape == (CHAINS.drafts,) and bool(jnp.all((acceptance > 0) & (acceptance < 1)))
    assert all(float(jnp.abs(a).max()) == 0 for a in jax.tree.leaves((of_model, of_states)))
    assert all(float(jnp.abs(a).max()) > 0 for a in jax.tree.leaves(of_eagle))
    other = gradients(tuple(x_BSD.at[:, 9:].set(100.0) for x_BSD in both))[1][1]
    for found, expected in zip(jax.tree.leaves(other), jax.tree.leaves(of_eagle), strict=True):
        np.testing.assert_array_equal(found, expected)
