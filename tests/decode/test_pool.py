"""The pool of slots: it shrinks and grows, compiles nothing after its warm-up, and knows each request's own ends."""

import time
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

from tlt_jax.decode import loop
from tlt_jax.decode.admission import Request
from tlt_jax.decode.controller import Controller, CostTable, Fixed, choices_of
from tlt_jax.decode.engine import Engine, _pool_sizes
from tlt_jax.decode.propose import OFF, Choice, Rules
from tlt_jax.decode.stops import first_stop

MAX_PROMPT, MAX_NEW, NO_END = 6, 16, 50
SHAPE = replace(tiny.SHAPE, tied=False)
MODEL, EXIT = tiny.with_scaled(tiny.transformer(SHAPE, seed=4), "head", 2.0), tiny.shallow_exit(SHAPE, scale=2.0)


def text(tokens) -> str:
    return "".join(chr(ord("0") + int(token)) for token in tokens)


SHALLOW = Choice("shallow", 3)


def engine(
    choice: Choice = SHALLOW, slots: int = 16, sizes: int = 3, controller: Controller | None = None, **rules
) -> Engine:
    return Engine(
        SHAPE,
        tiny.mesh(),
        slots=slots,
        max_prompt=MAX_PROMPT,
        max_new=MAX_NEW,
        eos=[NO_END],
        controller=controller or Fixed(choice),
        dtype=jnp.float32,
        rules=Rules(ngram_min=1, **rules),
        block_verifies=2,
        sizes=sizes,
        most_ends=2,
        text=text,
    )


def requests(count: int = 40, seed: int = 0) -> list[Request]:
    """Of lengths that thin out: most are short, the last long."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, 50, 1 + i % MAX_PROMPT).astype(np.int32) for i in range(count)]
    return [Request(prompt, 1 + (i * i) % MAX_NEW, 1000 * seed + i) for i, prompt in enumerate(prompts)]


def tokens_of(rollout) -> list[list[int]]:
    return [
        r[a:b].tolist() for r, a, b in zip(rollout.tokens_BT, rollout.prompt_length_B, rollout.length_B, strict=True)
    ]


@cache
def shared(sizes: int = 3) -> Engine:
    return engine(sizes=sizes)


def test_sizes_are_quarters_and_the_mesh_divides_them():
    assert _pool_sizes(128, 3, 1) == [128, 32, 8]
    assert _pool_sizes(16, 5, 1) == [16, 4, 1]
    assert _pool_sizes(10, 3, 4) == [12, 4]
    assert _pool_sizes(1, 3, 1) == [1]


def test_a_pool_that_shrinks_gives_what_one_that_does_not_gives(monkeypatch):
    e, sizes = shared(), []
    step = e.step
    monkeypatch.setattr(e, "step", lambda *given: (sizes.append(len(e._owner)), step(*given))[1])
    shrinking = e.run(e.view(MODEL, EXIT), requests())
    assert sizes == sorted(sizes, reverse=True) and set(sizes) == {16, 4, 1}
    plain = shared(sizes=1)
    expected = plain.run(plain.view(MODEL, EXIT), requests())
    assert tokens_of(shrinking) == tokens_of(expected)
    np.testing.assert_allclose(shrinking.policy_logp_BT, expected.policy_logp_BT, atol=1e-5)
    np.testing.assert_array_equal(shrinking.target_calls_B, expected.target_calls_B)


def test_the_time_of_a_block_is_not_that_of_the_prompts_before_it(monkeypatch):
    """What a controller learns of a block's cost would be wrong wherever prompts were admitted before it."""
    e, seen = shared(), []
    view = e.view(MODEL, EXIT)
    monkeypatch.setattr(e.controller, "observe", lambda block: seen.append(block))
    ready = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: (time.sleep(0.5), ready(tree))[1])
    start = time.perf_counter()
    e.run(view, requests(2))
    assert time.perf_counter() - start > 0.5 and seen and max(block.seconds for block in seen) < 0.4


def test_requests_that_come_one_by_one_make_the_pool_grow():
    e, every, results = shared(), requests(12), {}
    view = e.view(MODEL, EXIT)
    e.reset()
    sizes = []
    with jax.set_mesh(e.mesh):
        for number, request in enumerate(every):
            e.admit(view, [(number, request)])
            sizes.append(len(e._owner))
            results |= e.step(view)
        while e.active:
            results |= e.step(view)
    assert sizes[0] == 1 and max(sizes) > 1
    expected = e.run(view, every)
    for number, row in results.items():
        assert row["tokens_BT"].tolist() == expected.tokens_BT[number].tolist()


@pytest.mark.parametrize("drafter", ["shallow", "ngram"])
def test_nothing_is_compiled_after_the_warm_up(drafter):
    """Twenty steps of prompts of all lengths and numbers."""
    e, compiled, active = engine(Choice(drafter, 2), ngram_siblings=2, ngram_history=2), [], False

    def listen(event: str, duration: float, **_) -> None:
        if active and event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            compiled.append(event)

    view = e.view(MODEL, EXIT)
    count = e.warm_up(view)
    assert count == 3 + (3 + 2 + 1) + 3 + 4  # empty pools, prefills, blocks, ways to the next size
    jax.monitoring.register_event_duration_secs_listener(listen)
    active = True
    for step in range(20):
        e.run(view, requests(1 + 7 * step % 45, seed=step))
    active = False
    assert compiled == []


def test_the_warm_up_tells_a_controller_what_the_rounds_of_each_choice_take():
    choices = choices_of(["shallow", "ngram"], [1, 3])
    e = engine(controller=CostTable(choices))
    seen = e.controller.seen
    view = e.view(MODEL, EXIT)
    e.warm_up(view)
    expected = {(size, choice) for size in e.sizes for choice in choices}
    assert set(seen.seconds) == expected and seen.blocks == 0
    assert all(len(times) >= seen.KNOWN and min(times) > 0 for times in seen.seconds.values())
    # Nothing is tried for its time any more: what is chosen first could be the best.
    fastest = max(choices, key=lambda c: (1 + c.draft_length) / seen.round_seconds((e.sizes[0], c)))
    assert e.controller.choose(e.sizes[0]) == fastest
    rollout = e.run(view, requests(20))
    assert rollout.completion_length_B.sum() > 0 and seen.blocks > 0


@pytest.mark.parametrize("drafter", ["shallow", "ngram", "off"])
def test_each_request_ends_at_its_own_ends(drafter):
    e = engine(OFF if drafter == "off" else Choice(drafter, 3), sizes=1)
    whole = tokens_of(e.run(e.view(MODEL, EXIT), requests()))
    ends = [(), (3,), (3, 7), (int(whole[3][0]),)]
    asked = [replace(request, ends=ends[i % 4]) for i, request in enumerate(requests())]
    rollout = e.run(e.view(MODEL, EXIT), asked)
    for i, (found, full, ended) in enumerate(zip(tokens_of(rollout), whole, rollout.ended_B, strict=True)):
        at = [j for j, token in enumerate(full) if token in ends[i % 4]]
        assert found == (full[: at[0] + 1] if at else full)
        assert ended == bool(at)
    assert rollout.ended_B.any() and not rollout.ended_B.all() and not rollout.stopped_B.any()


def test_a_stop_string_cuts_tokens_and_log_probs_where_it_stands():
    # One size of the pool: where it shrinks earlier, another program rounds the same log-probs otherwise.
    e = shared(sizes=1)
    view = e.view(MODEL, EXIT)
    every = [replace(request, max_new_tokens=MAX_NEW) for request in requests(12)]
    whole = e.run(view, every)
    # The third and fourth token of every other sequence: a stop that spans two tokens.
    stops = [text(full[2:4]) if i % 2 else "never" for i, full in enumerate(tokens_of(whole))]
    rollout = e.run(view, [replace(r, stop=(stop, "no")) for r, stop in zip(every, stops, strict=True)])
    for i, (found, full) in enumerate(zip(tokens_of(rollout), tokens_of(whole), strict=True)):
        assert found == (full[: first_stop(text, np.array(full), (stops[i],))] if i % 2 else full)
        assert rollout.stopped_B[i] == rollout.ended_B[i] == bool(i % 2)
        assert text(found).endswith(stops[i]) or not i % 2
        start, end = rollout.prompt_length_B[i], rollout.length_B[i]
        np.testing.assert_array_equal(rollout.policy_logp_BT[i, :end], whole.policy_logp_BT[i, :end])
        assert not rollout.policy_logp_BT[i, end:].any() and not rollout.tokens_BT[i, end:].any() and end > start
    assert [len(c) for c in rollout.completions()] == rollout.completion_length_B.tolist()


def test_a_slot_whose_sequence_a_stop_ended_is_free_on_the_device_too():
    e = shared()
    view = e.view(MODEL, EXIT)
    request = replace(requests(6)[5], max_new_tokens=MAX_NEW)
    whole = tokens_of(e.run(view, [request]))[0]
    e.reset()
    with jax.set_mesh(e.mesh):
        e.admit(view, [(0, replace(request, stop=(text(whole[:1]),)))])
        assert list(e.step(view)) == [0]
        assert e._state.done_B.all() and e.active == 0
        calls = int(e._state.target_calls_B[0])
        e.step(view)
    assert int(e._state.target_calls_B[0]) == calls < MAX_NEW


def test_the_first_stop_is_the_shortest_prefix_that_holds_one():
    tokens = np.array([1, 2, 3, 1, 2])
    assert first_stop(text, tokens, ("12",)) == 2
    assert first_stop(text, tokens, ("31", "23")) == 3
    assert first_stop(text, tokens, ("13",)) is None
    assert first_stop(text, tokens[:0], ("1",)) is None


COUPLED = [Choice("shallow", 1), Choice("shallow", 4), Choice("ngram", 3), OFF]


def coupled(choice: Choice, slots: int) -> list[list[int]]:
    e = engine(choice, slots, 1, verification="coupled")
    return tokens_of(e.run(e.view(MODEL, EXIT), requests(16)))


def test_coupled_tokens_depend_on_the_seed_alone():
    expected = coupled(OFF, 16)
    for choice in COUPLED:
        assert coupled(choice, 16 if choice.draft_length != 4 else 3) == expected
    assert tokens_of(shared().run(shared().view(MODEL, EXIT), requests(16))) != expected


def test_coupled_with_the_noise_of_blocks_is_caught(monkeypatch):
    expected, right = coupled(OFF, 16), loop.round_noise

    def of_blocks(slots, draft_length, vocab, verification):
        """Gumbel noise that belongs to the block and the offset in it."""
        keys = jax.vmap(lambda key, start: jax.random.fold_in(jax.random.wrap_key_data(key), start))
        gumbel = jax.vmap(lambda key: jax.random.gumbel(key, (draft_length + 1, vocab)))
        noise_BWV = gumbel(keys(slots.key_B2, slots.length_B))
        assert noise_BWV.shape == right(slots, draft_length, vocab, verification)[1].shape
        return noise_BWV[:, :-1].swapaxes(0, 1), noise_BWV

    monkeypatch.setattr(loop, "round_noise", of_blocks)
    assert coupled(Choice("shallow", 4), 16) != expected
