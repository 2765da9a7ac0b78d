"""Drafters with layers of their own in the engine: they draw from what their training saw, whoever drafted before."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

from tlt_jax.decode import drafters, own_layers
from tlt_jax.decode.admission import Request
from tlt_jax.decode.controller import Controller
from tlt_jax.decode.engine import Engine
from tlt_jax.decode.propose import OFF, Choice
from tlt_jax.models.eagle import eagle_logits
from tlt_jax.models.transformer import Transformer, hidden_states
from tlt_jax.train.eagle_loss import Chains, chain_states, places

MODEL, EXIT, EAGLE = tiny.transformer(scale=2.0), tiny.shallow_exit(), tiny.eagle(scale=2.0)
DRAFT = tiny.transformer(tiny.draft_shape(), seed=5, scale=2.0)
ITSELF = tiny.transformer(replace(tiny.SHAPE, exit_layer=0, exit_rank=0), scale=2.0)
DRAFTS, LENGTH = 3, 26


class InTurn(Controller):
    """Its choices, one block after the other."""

    def choose(self, size: int) -> Choice:
        return self.choices[self.seen.blocks % len(self.choices)]


@cache
def expected_q(drafter: str, model: Transformer) -> "jax.stages.Wrapped":
    """q [K, V] of the drafts of the chain that begins at a place of a sequence, as training has it."""

    def of_draft_model(tokens_T: jax.Array, start: jax.Array) -> jax.Array:
        q_TV = jax.nn.softmax(tiny.plain_logits(model, tokens_T[None])[0])
        return jax.lax.dynamic_slice_in_dim(q_TV, start, DRAFTS)

    def of_eagle(tokens_T: jax.Array, start: jax.Array) -> jax.Array:
        batch = tokens_T[None], jnp.ones_like(tokens_T)[None], jnp.arange(LENGTH)[None]
        both = hidden_states(MODEL, *batch, dtype=jnp.float32)
        at_PK = places(LENGTH, Chains(DRAFTS, LENGTH), start)
        chain = chain_states(MODEL, EAGLE, both, *batch, jnp.minimum(at_PK, LENGTH - 1))
        return jnp.stack([jax.nn.softmax(eagle_logits(MODEL, EAGLE, y)[0, 0]) for y in chain])

    return jax.jit(of_eagle if drafter == "eagle" else of_draft_model)


@pytest.mark.parametrize(
    ("drafter", "model", "others"),
    [
        ("eagle", DRAFT, []),
        ("eagle", DRAFT, [OFF, Choice("shallow", 5)]),
        ("draft_model", DRAFT, [OFF, Choice("shallow", 5)]),
        ("draft_model", ITSELF, []),
    ],
    ids=["eagle alone", "eagle among others", "draft model among others", "all drafts stand"],
)
def test_drafts_are_drawn_from_what_training_sees(drafter, model, others, monkeypatch):
    """Each round's q equals that of training's pass over the same tokens, in a pool whose slots are used again and
    which shrinks, with prompts of one token, after blocks of other drafters, and where all drafts stand."""
    seen = []

    def watched(view, context, choice, rules):
        proposal = own_layers.propose(view, context, choice, rules, drafters.OWN_LAYERS[drafter])
        jax.debug.callback(
            lambda *found: seen.append(jax.tree.map(np.array, found)),
            context.tokens_BT,
            context.length_B,
            proposal.drafts_BG,
            proposal.q_BGV,
        )
        return proposal

    monkeypatch.setitem(drafters.DRAFTERS, drafter, watched)
    mine = Choice(drafter, DRAFTS)
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
        controller=InTurn([*others, mine, mine] if others else [mine]),
        dtype=jnp.float32,
        block_verifies=3,
        sizes=2,
        draft_shape=model.shape,
    )
    rollout = engine.run(engine.view(MODEL, EXIT, EAGLE, model), requests)
    jax.effects_barrier()
    assert len(seen) > 10
    compared = 0
    for tokens_BT, length_B, drafts_BG, q_BGV in seen:
        for tokens_T, length, drafts_G, q_GV in zip(tokens_BT, length_B, drafts_BG, q_BGV, strict=True):
            if length + DRAFTS > LENGTH or not is_live(tokens_T, length, rollout):
                continue
            tokens_T = tokens_T.copy()
            tokens_T[length : length + DRAFTS] = drafts_G
            np.testing.assert_allclose(q_GV, expected_q(drafter, model)(tokens_T, length - 1), atol=2e-5)
            compared += 1
    assert compared > 20
    if model is ITSELF and not others:
        assert rollout.accepted_B.sum() > 0.9 * rollout.completion_length_B.sum() * DRAFTS / (DRAFTS + 1)


def is_live(tokens_T, length, rollout) -> bool:
    """Whether these known tokens are the beginning of one of the rollout's sequences, not yet whole."""
    return any(
        length < whole and np.array_equal(tokens_T[:length], row[:length])
        for row, whole in zip(rollout.tokens_BT, rollout.length_B, strict=True)
    )


def test_an_engine_keeps_nothing_for_those_that_never_draft():
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
    view = engine.whole(engine.view(MODEL, EXIT, EAGLE, DRAFT))
    assert view.eagle is None and view.draft_model is None
    engine.admit(engine.view(MODEL, EXIT), [(0, Request(np.array([1], np.int32), 4, 0))])
    assert engine._state.states_BTE is None and engine._state.draft_caches == {}


@pytest.mark.parametrize("after", ["eagle", "draft_model", "off"])
def test_an_admission_feeds_the_prompt_to_the_drafter_at_work_alone(after):
    """The others would be fed for nothing if they never draft; they catch up when they do."""
    ours = {name: Choice(name, DRAFTS if name != "off" else 0) for name in ("off", "eagle", "draft_model")}
    first = ours.pop(after)
    engine = Engine(
        tiny.SHAPE,
        tiny.mesh(),
        slots=2,
        max_prompt=6,
        max_new=20,
        eos=[tiny.SHAPE.vocab],
        controller=InTurn([first, *ours.values()]),
        dtype=jnp.float32,
        block_verifies=1,
        draft_shape=DRAFT.shape,
    )
    view, prompt = engine.view(MODEL, EXIT, EAGLE, DRAFT), np.arange(6, dtype=np.int32)
    engine.admit(view, [(0, Request(prompt, 20, 0))])
    assert {name: int(cache.fed_B[0]) for name, cache in engine._state.draft_caches.items()} == {
        "eagle": 0,
        "draft_model": 0,
    }
    engine.step(view)
    engine.admit(view, [(1, Request(prompt, 20, 1))])
    fed = {name: int(cache.fed_B[1]) for name, cache in engine._state.draft_caches.items()}
    assert fed == {name: 5 if name == after else 0 for name in ("eagle", "draft_model")}
