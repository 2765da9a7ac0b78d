"""Checkable rewards, by hand."""

import numpy as np
import pytest

from tlt_jax.config.stage_sections import RewardWeights
from tlt_jax.rl.rewards import REWARDS, Completion, diversity, is_valid, quality, score_groups, speed

PROMPT = 'def add(a, b):\n    """Adds."""\n'
GOOD = "    c = a + b\n    return c\n"
CODE_IN_DOCSTRING = 'def f(x):\n    """\n    y = x\n    return y\n    """\n'

TABLE = {
    "two statements": (PROMPT, GOOD, True),
    "nested statements": (PROMPT, "    if a:\n        return b\n", True),
    "one function within": (PROMPT, "    def inner():\n        return a\n    return inner\n", True),
    "an async function": ("async " + PROMPT, GOOD, True),
    "an escape that only warns": (PROMPT, '    c = "\\d"\n    return c\n', True),
    "one statement": (PROMPT, "    return a + b\n", False),
    "a bare pass": (PROMPT, "    pass\n", False),
    "passes alone": (PROMPT, "    pass\n    pass\n    pass\n", False),
    "one statement and passes": (PROMPT, "    pass\n    return a\n    pass\n", False),
    "a docstring only": (PROMPT, '    """More words."""\n    """And more."""\n', False),
    "dots": (PROMPT, "    ...\n    ...\n", False),
    "nothing": (PROMPT, "", False),
    "a copy of what the prompt holds": (CODE_IN_DOCSTRING, "    y = x\n    return y\n", False),
    "two functions": (PROMPT, GOOD + "\ndef g():\n    return 1\n", False),
    "a statement after the function": (PROMPT, GOOD + "print(1)\n", False),
    "a class": ("class A:\n", "    x = 1\n    y = 2\n", False),
    "no syntax": (PROMPT, "    return (a +\n", False),
    "a wrong indent": (PROMPT, "  c = a\n      return c\n", False),
    "null bytes": (PROMPT, "    c = a\x00\n    return c\n", False),
    "half a surrogate": (PROMPT, "    c = '\ud800'\n    return c\n", False),
    "deep brackets": (PROMPT, "    c = " + "(" * 5000 + "1" + ")" * 5000 + "\n    return c\n", False),
    "deep operators": (PROMPT, "    c = " + "-" * 100_000 + "1\n    return c\n", False),
    "deep attributes": (PROMPT, "    c = a" + ".b" * 100_000 + "\n    return c\n", False),
    "deep blocks": (PROMPT, "".join(" " * (4 + i) + "if a:\n" for i in range(300)) + " " * 304 + "return a\n", False),
}


@pytest.mark.parametrize("case", TABLE)
def test_what_is_valid(case):
    prompt, completion, expected = TABLE[case]
    assert is_valid(prompt, completion, ended=True) is expected


def test_what_does_not_end_is_not_valid():
    assert not is_valid(PROMPT, GOOD, ended=False)


def completion(
    text: str = GOOD, tokens=(1, 2, 3), ended: bool = True, accepted: int = 0, target_calls: int = 1
) -> Completion:
    return Completion(PROMPT, text, np.array(tokens, np.int32), ended, accepted, target_calls)


def test_quality_is_full_for_valid_and_a_fifth_for_trivial():
    group = [
        completion(),
        completion("    pass\n"),
        completion("    return (\n"),
        completion("    pass\n", ended=False),
        completion(ended=False),
    ]
    np.testing.assert_array_equal(quality(group, 5), np.array([1.0, 0.2, 0.0, 0.0, 0.0], np.float32))


def test_diversity_by_hand():
    # Bigrams {12, 23}, {12, 24}, {56, 67}: similarities 1/3, 0, 0. So 1 - (1/3 + 0) / 2 for two, 1 for the last.
    group = [completion(tokens=t) for t in ([1, 2, 3], [1, 2, 4], [5, 6, 7])]
    np.testing.assert_allclose(diversity(group, 5), [5 / 6, 5 / 6, 1.0], atol=1e-6)


@pytest.mark.parametrize("tokens", [[1, 2, 3], [4], []])
def test_equal_completions_have_no_diversity(tokens):
    np.testing.assert_allclose(diversity([completion(tokens=tokens)] * 3, 5), [0.0] * 3, atol=1e-6)


def test_speed_by_hand():
    # 10 accepted in 4 calls of 5 drafts: half of them; all of them; none
    group = [
        completion(accepted=10, target_calls=4),
        completion(accepted=20, target_calls=4),
        completion(accepted=0, target_calls=4),
    ]
    np.testing.assert_allclose(speed(group, 5), [0.5, 1.0, 0.0], atol=1e-7)


def test_speed_is_zero_without_a_drafter_and_without_calls():
    np.testing.assert_array_equal(
        speed([completion(accepted=0, target_calls=9), completion(accepted=0, target_calls=0)], 0), [0.0, 0.0]
    )
    np.testing.assert_array_equal(speed([completion(accepted=0, target_calls=0)], 5), [0.0])


def test_score_groups_by_hand():
    # Two groups of two. Group 1: a valid one and a trivial one, nothing in common. Group 2: the same valid one twice.
    completions = [
        completion(tokens=[1, 2], accepted=5, target_calls=2),
        completion("    pass\n", tokens=[3, 4], accepted=0),
        completion(tokens=[1, 2]),
        completion(tokens=[1, 2]),
    ]
    total, parts = score_groups(completions, 2, RewardWeights(quality=2.0, diversity=0.5, speed=0.1), draft_length=5)
    np.testing.assert_allclose(parts["quality"], [1.0, 0.2, 1.0, 1.0], atol=1e-7)
    np.testing.assert_allclose(parts["diversity"], [1.0, 1.0, 0.0, 0.0], atol=1e-7)
    np.testing.assert_allclose(parts["speed"], [0.5, 0.0, 0.0, 0.0], atol=1e-7)
    # 2 + 0.5 * 1 + 0.1 * 0.5; 0.4 and no diversity, as it is not valid; 2; 2
    np.testing.assert_allclose(total, [2.55, 0.4, 2.0, 2.0], atol=1e-6)
    assert total.dtype == np.float32


def raises(group, draft_length):
    raise KeyError("no such thing")


FAULTY = {
    "raises": raises,
    "gives nothing": lambda group, draft_length: None,
    "gives one number": lambda group, draft_length: np.float32(1.0),
    "gives too many": lambda group, draft_length: np.ones(len(group) + 1),
    "gives NaN": lambda group, draft_length: np.full(len(group), np.nan),
    "gives text": lambda group, draft_length: ["good"] * len(group),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_group_whose_reward_fails_gets_zero_and_is_counted(monkeypatch, fault):
    groups = [[completion(), completion("    pass\n")] for _ in range(3)]
    everything = [c for group in groups for c in group]
    whole, _ = score_groups(everything, 2, RewardWeights(), 5)

    def sometimes(group, draft_length):
        return FAULTY[fault](group, draft_length) if group[0] is groups[1][0] else diversity(group, draft_length)

    monkeypatch.setitem(REWARDS, "diversity", sometimes)
    scores, parts = score_groups(everything, 2, RewardWeights(), 5)
    assert parts["failures"].tolist() == [0, 0, 1, 1, 0, 0]
    assert scores.tolist() == [*whole[:2], 0, 0, *whole[4:]]
    assert all(part[2:4].tolist() == [0, 0] for name, part in parts.items() if name != "failures")
    monkeypatch.setitem(REWARDS, "diversity", FAULTY[fault])
    with pytest.raises(RuntimeError, match="rewards failed on 3 of 3 groups"):
        score_groups(everything, 2, RewardWeights(), 5)
