"""Losslessness by enumeration: what speculative decoding draws has the target's joint distribution, exactly.

Vocabulary 3, a drafter that differs, completions of G + 2 tokens (so that the bonus token and a second block occur), a
ragged batch of mixed settings, EOS in reach, slots refilled in mid-run and a pool that shrinks at the end. Chi-square
of the joint distribution, Holm-corrected over all cells. Mutations of the code must each be caught.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.enumeration import EOS, VOCAB, Setting, exact, holm_rejects, mean_total_variation, p_value

from tlt_jax.decode import drafters, loop, shallow, verify
from tlt_jax.decode.admission import Request
from tlt_jax.decode.controller import Fixed
from tlt_jax.decode.engine import Engine
from tlt_jax.decode.propose import OFF, Choice, Rules
from tlt_jax.decode.sampling import Draws, _filter, policy_of
from tlt_jax.models import decode_view
from tlt_jax.models.decode_view import LayerCache, written
from tlt_jax.models.transformer import ModelShape

SHAPE = ModelShape(
    vocab=VOCAB, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, hidden=16, exit_layer=1, exit_rank=4, tied=False
)
PROMPTS = [[0], [0, 1, 0, 1, 0], [1, 1, 1]]
PLAIN = [Setting(1.0), Setting(0.7)]
FILTERED = [
    *PLAIN,
    Setting(0.7, top_p=0.8),
    Setting(1.0, top_k=2, top_p=0.9),
    Setting(0.7, min_p=0.3),
]
SAMPLES = 1500
MODEL = tiny.transformer(SHAPE, seed=6, scale=2.0)
EXIT = tiny.shallow_exit(SHAPE, seed=6, scale=2.0)
EAGLE = tiny.eagle(SHAPE, seed=6, scale=2.0)
DRAFT = tiny.transformer(tiny.draft_shape(SHAPE), seed=7, scale=2.0)


def sample(choice: Choice, settings: list[Setting], rules: Rules, samples: int, sizes: int):
    """One run of the engine: `samples` completions of each prompt in each setting, mixed."""
    cells = [(prompt, setting) for prompt in PROMPTS for setting in settings]
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(len(cells)), samples))
    length = max(choice.draft_length, 2) + 2
    requests = [
        Request(np.array(prompt, np.int32), length, int(i), s.temperature, s.top_k, s.top_p, s.min_p)
        for i, (prompt, s) in enumerate(cells[c] for c in order)
    ]
    engine = Engine(
        SHAPE,
        tiny.mesh(),
        slots=len(requests) // 2,
        max_prompt=5,
        max_new=7,
        eos=[EOS],
        controller=Fixed(choice),
        dtype=jnp.float32,
        rules=rules,
        block_verifies=2,
        sizes=sizes,
        draft_shape=DRAFT.shape,
    )
    return cells, order, length, engine.run(engine.view(MODEL, EXIT, EAGLE, DRAFT), requests)


def cell_p_values(
    choice: Choice,
    settings: list[Setting],
    verification: str = "block",
    draws: Draws = "any",
    samples: int = SAMPLES,
    check_logp: bool = True,
    sizes: int = 2,
) -> list[float]:
    rules = Rules(
        filtered=settings is not PLAIN,
        draws=draws,
        verification=verification,
        ngram_min=1,
        ngram_max=3,
        ngram_siblings=2,
        ngram_history=2,
    )
    cells, order, length, rollout = sample(choice, settings, rules, samples, sizes)
    if choice.drafter == "ngram":
        assert rollout.accepted_B.sum() > 0.02 * len(order), "the n-gram drafter does not fire"
    p_values = []
    for c, (prompt, setting) in enumerate(cells):
        table = exact_table(tuple(prompt), length, setting)
        rows = np.flatnonzero(order == c)
        outcomes = [tuple(rollout.tokens_BT[r, len(prompt) : rollout.length_B[r]].tolist()) for r in rows]
        p_values.append(p_value(outcomes, table))
        if check_logp:
            check_log_probs(rollout.select(rows), outcomes, table)
    return p_values


@cache
def exact_table(prompt: tuple[int, ...], length: int, setting: Setting) -> dict:
    return exact(MODEL, list(prompt), length, setting)


def check_log_probs(rollout, outcomes, table):
    """Recorded log-probs equal the enumerated ones, token by token, and are 0 everywhere else."""
    for recorded, which in ((rollout.policy_logp_BT, 1), (rollout.sampler_logp_BT, 2)):
        wanted = np.zeros_like(recorded)
        for row, outcome in enumerate(outcomes):
            start = rollout.prompt_length_B[row]
            wanted[row, start : start + len(outcome)] = table[outcome][which]
        np.testing.assert_allclose(recorded, wanted, atol=1e-4)


def test_the_drafter_differs_from_the_target():
    assert 0.2 <= mean_total_variation(MODEL, EXIT, PROMPTS, 4) <= 0.5


@pytest.mark.parametrize(("verification", "draws"), [("block", "sampled"), ("token", "any"), ("coupled", "sampled")])
def test_joint_distribution_and_log_probs_are_the_targets(verification, draws):
    check(verification, draws, {3: FILTERED})


@pytest.mark.nightly
@pytest.mark.parametrize("draws", ["any", "sampled"])
@pytest.mark.parametrize("verification", ["block", "token", "coupled"])
def test_they_are_with_drafts_of_every_length(verification, draws):
    check(verification, draws, {1: FILTERED, 2: PLAIN, 3: FILTERED, 4: PLAIN, 5: FILTERED})


def check(verification: str, draws: Draws, by_length: dict[int, list[Setting]]) -> None:
    p_values = cell_p_values(OFF, FILTERED, verification, draws)
    for draft_length, settings in by_length.items():
        for drafter in ("shallow", "eagle", "draft_model", "ngram"):
            p_values += cell_p_values(Choice(drafter, draft_length), settings, verification, draws)
    assert not holm_rejects(p_values), f"smallest of {len(p_values)} p-values: {min(p_values):.2e}"


def _no_residual(p_BWV, drafts_BG, q_BGV, drafted_B, accepted_B, weight_BW):
    return jnp.take_along_axis(p_BWV, accepted_B[:, None, None], axis=1)[:, 0]


def _bonus_from_the_wrong_row(original):
    def mutated(p_BWV, drafts_BG, q_BGV, drafted_B, accepted_B, weight_BW):
        wrong_BV = jnp.take_along_axis(p_BWV, jnp.maximum(accepted_B - 1, 0)[:, None, None], axis=1)[:, 0]
        right_BV = original(p_BWV, drafts_BG, q_BGV, drafted_B, accepted_B, weight_BW)
        return jnp.where((accepted_B == drafted_B)[:, None], wrong_BV, right_BV)

    return mutated


def _q_after_filters_the_draft_did_not_use(view, context, choice, rules):
    proposal = shallow.propose_shallow(view, context, choice, replace(rules, filtered=False))
    return proposal._replace(q_BGV=_filter(proposal.q_BGV, context.sampling))


def _noise_of_positions(slots, draft_length, vocab, verification):
    """Uniforms keyed by position: seen again after a rejection."""

    def at(key, position):
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), position), (3,))

    positions_BW = slots.length_B[:, None] + jnp.arange(draft_length + 1)
    draft_BW, accept_BW, next_BW = jnp.moveaxis(jax.vmap(jax.vmap(at, (None, 0)))(slots.key_B2, positions_BW), -1, 0)
    return draft_BW[:, :-1].T, jnp.concatenate([accept_BW[:, :-1], next_BW[:, -1:]], axis=1)


def _the_drafts_noise_again(original):
    def mutated(slots, draft_length, vocab, verification):
        draft_GB, verify_BW = original(slots, draft_length, vocab, verification)
        return draft_GB, jnp.concatenate([verify_BW[:, :-1], draft_GB[:1].T], axis=1)

    return mutated


def _p_without_temperature(logits_BWV, temperature_B):
    return policy_of(logits_BWV, jnp.ones_like(temperature_B))


def _stale_write(old, k_BWKN, v_BWKN, positions_BW):
    """Keeps what an earlier, rejected draft wrote."""
    where_BTW = jnp.arange(old.value_BKTN.shape[2])[:, None] == positions_BW[:, None]
    again_B1T1 = jnp.any(where_BTW, axis=-1)[:, None, :, None] & (old.value_BKTN != 0).any((1, 3), keepdims=True)
    new = written(old, k_BWKN, v_BWKN, positions_BW)
    return LayerCache(
        jnp.where(again_B1T1.swapaxes(2, 3), old.key_BKNT, new.key_BKNT),
        jnp.where(again_B1T1, old.value_BKTN, new.value_BKTN),
    )


MUTATIONS = {
    "no residual": lambda patch: patch.setattr(verify, "_residual", _no_residual),
    "bonus from the wrong row": lambda patch: patch.setattr(
        verify, "_residual", _bonus_from_the_wrong_row(verify._residual)
    ),
    "q after filters that the draft did not use": lambda patch: patch.setitem(
        drafters.DRAFTERS, "shallow", _q_after_filters_the_draft_did_not_use
    ),
    "the drafts' noise in the residual's draw": lambda patch: patch.setattr(
        loop, "round_noise", _the_drafts_noise_again(loop.round_noise)
    ),
    "p without temperature": lambda patch: patch.setattr(loop, "policy_of", _p_without_temperature),
    "stale cache after a rejection": lambda patch: patch.setattr(decode_view, "written", _stale_write),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(mutation, monkeypatch):
    MUTATIONS[mutation](monkeypatch)
    assert holm_rejects(cell_p_values(Choice("shallow", 3), FILTERED, check_logp=False, sizes=1))


def test_noise_of_positions_biases_a_block(monkeypatch):
    """Little, for what is used again is only what fell; token by token, it would be fresh."""
    monkeypatch.setattr(loop, "round_noise", _noise_of_positions)
    assert holm_rejects(cell_p_values(Choice("shallow", 5), PLAIN, samples=20_000, check_logp=False, sizes=1))
