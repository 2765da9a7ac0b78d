"""The engine on tiny models: where sequences end, what they do not depend on, what is counted, what is compiled."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

from tlt_jax.config import ConfigError
from tlt_jax.decode import loop
from tlt_jax.decode.admission import Request
from tlt_jax.decode.controller import Fixed
from tlt_jax.decode.engine import Engine
from tlt_jax.decode.loop import Patience, decode_block, empty_slots
from tlt_jax.decode.propose import OFF, Choice, Rules
from tlt_jax.decode.sampling import Draws
from tlt_jax.models.declare import Declare
from tlt_jax.models.decode_view import decode_view
from tlt_jax.models.eagle import Eagle
from tlt_jax.models.heads import ShallowExit
from tlt_jax.models.transformer import ModelShape, Transformer

G, MAX_PROMPT, MAX_NEW = 5, 6, 12
DRAFTERS = ["shallow", "ngram", "off"]
NO_EOS = 50  # beyond the vocabulary: never drawn
# An untied head of twice its initial deviation: far from uniform, and no two tokens nearly alike. The other weights are
# drawn as they are: at three times that, float32 itself is off by up to 6e-5 nats from the same pass in float64, on
# whatever path, and differences between paths say nothing.
SHAPE = replace(tiny.SHAPE, tied=False)
MODEL, EXIT = tiny.with_scaled(tiny.transformer(SHAPE, seed=4), "head", 2.0), tiny.shallow_exit(SHAPE, scale=2.0)
PERFECT = tiny.perfect_pair(SHAPE, seed=4, scale=3.0)


@cache
def engine(drafter: str, slots: int = 16, draws: Draws = "any") -> Engine:
    return Engine(
        SHAPE,
        tiny.mesh(),
        slots=slots,
        max_prompt=MAX_PROMPT,
        max_new=MAX_NEW,
        eos=[NO_EOS],
        controller=Fixed(OFF if drafter == "off" else Choice(drafter, G)),
        dtype=jnp.float32,
        rules=Rules(ngram_min=1, draws=draws),
        block_verifies=3,
    )


def complete(drafter: str, requests, pair=(MODEL, EXIT), slots: int = 16, eos: int = NO_EOS, draws: Draws = "any"):
    e = engine(drafter, slots, draws)
    return e.run(e.view(*pair), [replace(request, ends=(eos,)) for request in requests])


@cache
def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 50, 1 + i % MAX_PROMPT).astype(np.int32) for i in range(13)]


def requests(temperature: float, limit=lambda i: MAX_NEW) -> list[Request]:
    return [Request(prompt, limit(i), 1000 + i, temperature) for i, prompt in enumerate(prompts())]


@cache
def greedy(pair: int = 0) -> np.ndarray:
    """[13, MAX_NEW] tokens by argmax of the training forward pass, one token at a time. `pair` 1: the perfect model."""
    model = (MODEL, PERFECT[0])[pair]
    rows, length = np.zeros((13, MAX_PROMPT + MAX_NEW), np.int32), np.array([len(p) for p in prompts()])
    for row, prompt in zip(rows, prompts(), strict=True):
        row[: len(prompt)] = prompt
    forward = jax.jit(tiny.plain_logits)
    for step in range(MAX_NEW):
        at = np.asarray(forward(model, jnp.asarray(rows)))[np.arange(13), length - 1 + step]
        best = np.sort(at, axis=-1)
        assert (best[:, -1] - best[:, -2]).min() > 1e-3, "two tokens are too near: take another seed"
        rows[np.arange(13), length + step] = at.argmax(axis=-1)
    return np.stack([row[n : n + MAX_NEW] for row, n in zip(rows, length, strict=True)])


def tokens_of(rollout) -> list[list[int]]:
    return [
        row[start:end].tolist()
        for row, start, end in zip(rollout.tokens_BT, rollout.prompt_length_B, rollout.length_B, strict=True)
    ]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_temperature_zero_is_greedy_decoding(drafter):
    rollout = complete(drafter, requests(0.0))
    assert tokens_of(rollout) == greedy().tolist()
    assert len(np.unique(greedy())) > 10


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_temperature_zero_is_greedy_decoding_when_every_draft_stands(drafter):
    assert tokens_of(complete(drafter, requests(0.0), PERFECT)) == greedy(1).tolist()


@pytest.mark.parametrize("position", range(G + 2))
def test_eos_inside_a_draft_ends_there(position):
    # Every draft stands, so the first block emits G + 1 tokens at once, with the EOS at each place in it.
    eos = int(greedy(1)[3, position])
    first = int(np.flatnonzero(greedy(1)[3] == eos)[0])
    rollout = complete("shallow", [Request(prompts()[3], MAX_NEW, 5, 0.0)], PERFECT, eos=eos)
    assert tokens_of(rollout) == [greedy(1)[3, : first + 1].tolist()]
    assert rollout.ended_B.tolist() == [True]
    blocks = first // (G + 1) + 1
    assert rollout.target_calls_B.tolist() == [blocks]
    assert rollout.drafted_B.tolist() == [blocks * G]
    assert rollout.accepted_B.tolist() == [min(first + 1, G) if blocks == 1 else G + min(first - G, G)]
    start = len(prompts()[3])
    assert not rollout.tokens_BT[0, start + first + 1 :].any()
    assert not rollout.policy_logp_BT[0, start + first + 1 :].any()
    assert [c.tolist() for c in rollout.completions()] == [greedy(1)[3, :first].tolist()]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_first_eos_is_the_last_token(drafter, temperature):
    eos = int(greedy()[0, 4])
    whole = complete(drafter, requests(temperature))
    rollout = complete(drafter, requests(temperature), eos=eos)
    for cut, full, ended in zip(tokens_of(rollout), tokens_of(whole), rollout.ended_B, strict=True):
        assert cut == (full[: full.index(eos) + 1] if eos in full else full)
        assert ended == (eos in full)
    assert rollout.ended_B.any()


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("pair", [(MODEL, EXIT), PERFECT], ids=["random", "perfect"])
def test_max_new_tokens_is_exact(drafter, pair):
    """Eight requests alike but for their limit, 0 to 7 (G + 1 is 6): each begins as the longest does."""
    rollout = complete(drafter, [Request(prompts()[5], limit, 7, 1.0) for limit in range(8)], pair)
    found = tokens_of(rollout)
    assert [len(tokens) for tokens in found] == list(range(8))
    assert found == [found[-1][:limit] for limit in range(8)]
    assert not rollout.ended_B.any()
    position = np.arange(rollout.tokens_BT.shape[1])
    beyond = position >= rollout.length_B[:, None]
    assert not rollout.tokens_BT[beyond].any()
    np.testing.assert_array_equal(rollout.policy_logp_BT != 0, rollout.completion_mask_BT > 0)
    np.testing.assert_array_equal(rollout.sampler_logp_BT != 0, rollout.completion_mask_BT > 0)
    np.testing.assert_array_equal(rollout.completion_mask_BT.sum(axis=1), range(8))


def test_counts_by_hand_when_every_draft_stands():
    rollout = complete("shallow", [Request(prompts()[5], limit, 7, 1.0) for limit in (0, 3, 6, 7, 12)], PERFECT)
    # A verification gives G + 1 = 6 tokens. What the limit cuts off counts as drafted, not as accepted.
    assert rollout.target_calls_B.tolist() == [0, 1, 1, 2, 2]
    assert rollout.drafted_B.tolist() == [0, 5, 5, 10, 10]
    assert rollout.accepted_B.tolist() == [0, 3, 5, 6, 10]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_counts_add_up(drafter):
    rollout = complete(drafter, requests(1.0))
    calls, length = rollout.target_calls_B, rollout.completion_length_B
    assert np.all(rollout.accepted_B <= rollout.drafted_B)
    assert np.all(rollout.drafted_B <= G * calls)
    # A call gives the accepted drafts and one token more, but where the limit cut its last one short.
    assert np.all((length == rollout.accepted_B + calls) | (length == rollout.accepted_B + calls - 1))
    if drafter == "off":
        assert np.array_equal(calls, length)
        assert not rollout.drafted_B.any()
    else:
        assert rollout.accepted_B.sum() > 0


def uneven(i: int) -> int:
    return [MAX_NEW, 2, 7, 1, 9][i % 5]


@pytest.mark.parametrize("drafter", ["shallow", "off"])
def test_refilled_slots_give_the_tokens_of_one_big_batch(drafter):
    together = complete(drafter, requests(1.0, uneven))
    refilled = complete(drafter, requests(1.0, uneven), slots=3)
    assert tokens_of(refilled) == tokens_of(together)
    for name in ("target_calls_B", "drafted_B", "accepted_B", "length_B", "prompt_length_B", "ended_B"):
        np.testing.assert_array_equal(getattr(refilled, name), getattr(together, name))
    np.testing.assert_allclose(refilled.policy_logp_BT, together.policy_logp_BT, atol=1e-5)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_completion_depends_on_neither_order_nor_company(drafter):
    every = requests(1.0, uneven)
    expected = tokens_of(complete(drafter, every))
    assert tokens_of(complete(drafter, every[::-1]))[::-1] == expected
    for i in (0, 6):
        assert tokens_of(complete(drafter, [every[i]])) == [expected[i]]


def test_the_seed_decides():
    same = [Request(prompts()[5], MAX_NEW, seed, 1.0) for seed in (1, 1, 2, 1 << 32)]
    a, b, c, d = tokens_of(complete("shallow", same))
    assert a == b
    assert c != a
    assert d != a


def test_log_probs_are_those_of_the_training_forward_pass():
    rollout = complete("shallow", requests(0.7))
    log_probs = jax.nn.log_softmax(jax.jit(tiny.plain_logits)(MODEL, jnp.asarray(rollout.tokens_BT)) / 0.7, axis=-1)
    picked = np.take_along_axis(np.asarray(log_probs)[:, :-1], rollout.tokens_BT[:, 1:, None], axis=-1)[..., 0]
    mask = rollout.completion_mask_BT
    expected = np.pad(picked, ((0, 0), (1, 0))) * mask
    np.testing.assert_allclose(rollout.policy_logp_BT, expected, atol=2e-5)
    np.testing.assert_allclose(rollout.sampler_logp_BT, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Request(np.zeros(0, np.int32), 1, 0), "a prompt has 0 tokens"),
        (Request(np.zeros(MAX_PROMPT + 1, np.int32), 1, 0), "a prompt has 7 tokens"),
        (Request(np.zeros(1, np.int32), MAX_NEW + 1, 0), "max_new_tokens is 13"),
        (Request(np.zeros(1, np.int32), -1, 0), "max_new_tokens is -1"),
        (Request(np.zeros(1, np.int32), 1, 0, top_k=3), "top_k, top_p or min_p"),
        (Request(np.zeros(1, np.int32), 1, 0, min_p=0.1), "top_k, top_p or min_p"),
        (Request(np.zeros(1, np.int32), 1, 0, ends=(1, 2)), "2 end tokens; expected at most 1"),
        (Request(np.zeros(1, np.int32), 1, 0, stop=("x",)), "an engine that reads text"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_and_takes_no_slot(request_, expected):
    e = engine("off")
    with pytest.raises(ConfigError, match=expected):
        e.run(e.view(MODEL, EXIT), [requests(1.0)[0], request_])
    assert e.free == 16


def test_no_number_of_requests_compiles_anything_new():
    e, active, compiled = engine("shallow"), True, []

    def listen(event: str, duration: float, **_) -> None:
        if active and event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            compiled.append(event)

    for count in (16, 4, 1):  # the prefills of the whole pool, a quarter and a sixteenth, and the block
        complete("shallow", requests(1.0)[:1] * count)
    jax.monitoring.register_event_duration_secs_listener(listen)
    for count in (1, 2, 3, 4, 5, 7, 11, 16, 17, 30):
        complete("shallow", requests(0.5, uneven)[:1] * count)
    active = False
    assert compiled == []
    assert e.free == 16


def test_a_round_in_which_no_sequence_has_a_draft_is_a_plain_step(monkeypatch):
    """It gives the tokens that a wide one would have given."""
    right, some_drafts, seen = loop.draft_and_verify, loop.some_drafts, []

    def watched(view, slots, choice, rules, copies):
        some = some_drafts(slots, copies)
        jax.debug.callback(lambda some: seen.append((choice.draft_length > 0, bool(some))), some)
        return right(view, slots, choice, rules, copies)

    def run():
        e = engine.__wrapped__("ngram", 2)
        return e.run(e.view(MODEL, EXIT), requests(1.0))

    monkeypatch.setattr(loop, "draft_and_verify", watched)
    some_narrow = run()
    jax.effects_barrier()
    assert set(seen) == {(False, False), (True, True)}
    monkeypatch.setattr(loop, "some_drafts", lambda *_: jnp.bool_(True))
    all_wide = run()
    jax.effects_barrier()
    assert (True, False) in seen
    assert tokens_of(some_narrow) == tokens_of(all_wide)
    for name in ("drafted_B", "accepted_B", "target_calls_B"):
        np.testing.assert_array_equal(getattr(some_narrow, name), getattr(all_wide, name))
    np.testing.assert_allclose(some_narrow.policy_logp_BT, all_wide.policy_logp_BT, atol=1e-5)


WIDE = ModelShape(
    vocab=256, width=256, layers=6, heads=4, kv_heads=2, head_dim=64, hidden=768, exit_layer=2, exit_rank=8
)


@pytest.mark.parametrize("drafter", ["shallow", "eagle", "draft_model", "ngram", "off"])
def test_a_decode_blocks_temporaries_are_a_small_share_of_the_weights(drafter):
    def abstract(build):
        return build(Declare(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32)))

    small = tiny.draft_shape(WIDE)
    models = (abstract(partial(build, WIDE)) for build in (Transformer, ShallowExit, Eagle))
    draft = abstract(partial(Transformer, small))
    view = jax.eval_shape(partial(decode_view, dtype=jnp.float32, length=16), *models, draft)
    own = {"eagle": replace(WIDE, layers=1), "draft_model": small}
    slots = jax.eval_shape(partial(empty_slots, WIDE, 2, 16, 1, Rules(), jnp.float32, own))
    choice = OFF if drafter == "off" else Choice(drafter, G)
    block = jax.jit(partial(decode_block, choice=choice, rules=Rules()), donate_argnums=1)
    temporaries = block.lower(view, slots, Patience(8, 8, 0)).compile().memory_analysis().temp_size_in_bytes
    weights = sum(leaf.size * 4 for leaf in jax.tree.leaves(view))
    assert weights > 10 * 2**20
    assert temporaries < 0.1 * weights, f"{temporaries / weights:.0%} of the weights"


def test_an_end_of_sequence_of_id_0_ends_there_though_padding_is_0_too():
    whole, cut = (complete("shallow", requests(1.0), eos=eos) for eos in (NO_EOS, 0))
    for tokens, full, ended in zip(tokens_of(cut), tokens_of(whole), cut.ended_B, strict=True):
        assert tokens == (full[: full.index(0) + 1] if 0 in full else full)
        assert ended == (0 in full)
    assert cut.ended_B.any()
    kept = [c.tolist() for c in cut.completions()]
    assert kept == [t[:-1] if e else t for t, e in zip(tokens_of(cut), cut.ended_B, strict=True)]


@pytest.mark.parametrize(("draws", "temperature"), [("greedy", 0.0), ("sampled", 1.0)])
def test_a_program_for_one_kind_of_request_gives_what_one_for_both_does(draws, temperature):
    asked = requests(temperature)
    both, one = (complete("shallow", asked, draws=kind) for kind in ("any", draws))
    assert tokens_of(one) == tokens_of(both)
    for name in ("policy_logp_BT", "sampler_logp_BT"):
        np.testing.assert_allclose(getattr(one, name), getattr(both, name), atol=1e-5)
    np.testing.assert_array_equal(one.accepted_B, both.accepted_B)
    with pytest.raises(ConfigError, match=f"temperature is {1.0 - temperature}, in an engine for {draws}"):
        complete("shallow", requests(1.0 - temperature), draws=draws)


def test_a_block_ends_when_the_host_has_something_to_do():
    """After three rounds; with a number of sequences to wait for, once no more than these are unfinished."""
    e = engine("off")
    for count, until, blocks in ((16, None, 4), (16, 0, 1), (16, 8, 3), (12, 11, 4)):
        e.reset()
        view, before = e.view(MODEL, EXIT), e.controller.seen.blocks
        # A quarter of the sequences ends with the third call, a quarter with the sixth, and so on.
        asked = [(i, Request(prompts()[0], 3 * (i % 4) + 3, i, ends=(NO_EOS,))) for i in range(count)]
        e.admit(view, asked)
        found = {}
        while len(found) < count:
            found |= e.step(view, until)
        assert e.controller.seen.blocks - before == blocks
