"""The eagle drafter in the engine: it draws from what its training saw, whoever drafted before it."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

from tlt_jax.decode import drafters
from tlt_jax.decode.controller import Controller
from tlt_jax.decode.eagle import propose_eagle
from tlt_jax.decode.engine import Engine, Request
from tlt_jax.decode.propose import OFF, Choice
from tlt_jax.models.eagle import eagle_logits
from tlt_jax.models.transformer import hidden_states
from tlt_jax.train.eagle_loss import Chains, chain_states, places

MODEL, EXIT, EAGLE = tiny.transformer(scale=2.0), tiny.shallow_exit(), tiny.eagle(scale=2.0)
DRAFTS, LENGTH = 3, 26
BY_EAGLE = Choice("eagle", DRAFTS)


class InTurn(Controller):
    """Its choices, one block after the other."""

    def choose(self, size: int) -> Choice:
        return self.choices[self.seen.blocks % len(self.choices)]


@cache
def expected_q() -> "jax.stages.Wrapped":
    """q [K, V] of the drafts of the chain that begins at a place of a sequence, as training has it."""

    def of(tokens_T: jax.Array, start: jax.Array) -> jax.Array:
        batch = tokens_T[None], jnp.ones_like(tokens_T)[None], jnp.arange(LENGTH)[None]
        both = hidden_states(MODEL, *batch, dtype=jnp.float32)
        at_PK = places(LENGTH, Chains(DRAFTS, LENGTH), start)
        chain = chain_states(MODEL, EAGLE, both, *batch, jnp.minimum(at_PK, LENGTH - 1))
        return jnp.stack([jax.nn.softmax(eagle_logits(MODEL, EAGLE, y)[0, 0]) for y in chain])

    return jax.jit(of)


@pytest.mark.parametrize(
    "choices", [[BY_EAGLE], [OFF, Choice("shallow", 5), BY_EAGLE, BY_EAGLE]], ids=["alone", "auto"]
)
def test_drafts_are_drawn_from_what_training_sees(choices, monkeypatch):
    """Each round's q equals that of training's chain over the same tokens, in a pool whose slots are used again and
    which shrinks, with prompts of one token, after blocks of other drafters."""
    seen = []

    def watched(view, context, choice, rules):
        proposal = propose_eagle(view, context, choice, rules)
        jax.debug.callback(
            lambda *found: seen.append(jax.tree.map(np.array, found)),
            context.tokens_BT,
            context.length_B,
            proposal.drafts_BG,
            proposal.q_BGV,
        )
        return proposal

    monkeypatch.setitem(drafters.DRAFTERS, "eagle", watched)
    rng = np.random.default_rng(0)
    requests = [
        Request(rng.integers(0, tiny.SHAPE.vocab, 1 + i % 6).astype(np.int32), 4 + 4 * (i % 5), i) for i in range(40)
    ]
    engine = Engine(
        tiny.SHAPE,
        tiny.mesh(),
        slots=4,
        max_prompt=6,
        max_new=20,
        eos=[tiny.SHAPE.vocab],
        controller=InTurn(choices),
        dtype=jnp.float32,
        block_verifies=3,
        sizes=2,
    )
    rollout = engine.run(engine.view(MODEL, EXIT, EAGLE), requests)
    jax.effects_barrier()
    assert len(seen) > 10
    compared = 0
    for tokens_BT, length_B, drafts_BG, q_BGV in seen:
        for tokens_T, length, drafts_G, q_GV in zip(tokens_BT, length_B, drafts_BG, q_BGV, strict=True):
            if length + DRAFTS > LENGTH or not is_live(tokens_T, length, rollout):
                continue
            tokens_T = tokens_T.copy()
            tokens_T[length : length + DRAFTS] = drafts_G
            np.testing.assert_allclose(q_GV, expected_q()(tokens_T, length - 1), atol=2e-5)
            compared += 1
    assert compared > 20


def is_live(tokens_T, length, rollout) -> bool:
    """Whether these known tokens are the beginning of one of the rollout's sequences, not yet whole."""
    return any(
        length < whole and np.array_equal(tokens_T[:length], row[:length])
        for row, whole in zip(rollout.tokens_BT, rollout.length_B, strict=True)
    )


def test_an_engine_without_eagle_keeps_nothing_for_it():
    engine = Engine(
        tiny.SHAPE,
        tiny.mesh(),
        slots=4,
        max_prompt=6,
        max_new=6,
        eos=[0],
        controller=InTurn([OFF]),
        dtype=jnp.float32,
    )
    assert engine.view(MODEL, EXIT, EAGLE).eagle is None
    engine.admit(engine.view(MODEL, EXIT), [(0, Request(np.array([1], np.int32), 4, 0))])
    assert engine._state.states_BTE is None and engine._state.eagle is None
