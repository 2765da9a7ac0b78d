"""What decoding gives back: masks, loops and figures, by hand."""

import numpy as np
import pytest

from tlt_jax.decode.rollout import Rollout, is_loop, joined, rollout_metrics


def rollout(prompt_length, length, ended, total: int = 8, **counts) -> Rollout:
    rows = len(length)
    tokens = np.arange(1, total + 1) * (np.arange(total) < np.array(length)[:, None])
    given = {name: np.array(counts.get(name, [0] * rows)) for name in ("target_calls_B", "drafted_B", "accepted_B")}
    return Rollout(
        tokens,
        np.array(prompt_length),
        np.array(length),
        np.zeros((rows, total)),
        np.zeros((rows, total)),
        np.array(ended),
        np.array(counts.get("stopped_B", [False] * rows)),
        **given,
    )


def test_masks_and_completions_by_hand():
    r = rollout([2, 3, 4], [5, 8, 4], [True, False, False])
    np.testing.assert_array_equal(r.completion_mask_BT, [[0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1], [0] * 8])
    np.testing.assert_array_equal(r.completion_length_B, [3, 5, 0])
    # The first ends with its EOS, which the mask counts and the completion leaves out.
    assert [c.tolist() for c in r.completions()] == [[3, 4], [4, 5, 6, 7, 8], []]
    # One that a stop string ended has no EOS to leave out.
    assert [c.tolist() for c in rollout([2], [5], [True], stopped_B=[True]).completions()] == [[3, 4, 5]]


def test_joined_rollouts_are_selected_apart_again():
    parts = rollout([1, 2], [4, 5], [True, False]), rollout([3], [6], [True], target_calls_B=[7])
    both = joined(parts)
    for part, rows in zip(parts, ([0, 1], [2]), strict=True):
        for name in Rollout.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(both.select(np.array(rows)), name), getattr(part, name))


@pytest.mark.parametrize("index", [np.array([2, 0]), np.array([True, False, True])])
def test_select_takes_rows_of_everything(index):
    r = rollout(
        [1, 2, 3], [4, 5, 6], [True, False, True], target_calls_B=[1, 2, 3], drafted_B=[4, 5, 6], accepted_B=[1, 1, 2]
    )
    picked = r.select(index)
    rows = [2, 0] if index.dtype != bool else [0, 2]
    np.testing.assert_array_equal(picked.prompt_length_B, np.array([1, 2, 3])[rows])
    np.testing.assert_array_equal(picked.drafted_B, np.array([4, 5, 6])[rows])
    np.testing.assert_array_equal(picked.tokens_BT, r.tokens_BT[rows])


def periodic(period: int, length: int) -> np.ndarray:
    return np.arange(length) % period


FRESH = 100 + np.arange(200)

LOOPS = {
    # Half of 32 is a window of 16, in which periods of up to 4 count; half of 31 is too short.
    "too short to say": (periodic(1, 31), False),
    "constant": (periodic(1, 32), True),
    "period 4 in a window of 16": (periodic(4, 32), True),
    "period 5 in a window of 16": (periodic(5, 32), False),
    # From 128 on the window is 64, in which periods of up to 16 count.
    "period 16": (periodic(16, 128), True),
    "period 17": (periodic(17, 128), False),
    "a loop at the end": (np.concatenate([FRESH[:64], periodic(3, 64)]), True),
    "a loop that began late": (np.concatenate([FRESH[:65], periodic(3, 63)]), False),
    "a loop that was left": (np.concatenate([periodic(3, 127), FRESH[:1]]), False),
    "no loop": (FRESH, False),
    "nothing": (FRESH[:0], False),
}


@pytest.mark.parametrize("case", LOOPS)
def test_what_is_a_loop(case):
    tokens, expected = LOOPS[case]
    assert is_loop(tokens) is expected


def mixed() -> Rollout:
    """Two sequences of 6 and 4 tokens, and one that loops for 40 tokens at perfect acceptance."""
    r = rollout(
        [2, 2, 2],
        [8, 6, 42],
        [True, False, False],
        total=42,
        target_calls_B=[3, 2, 8],
        drafted_B=[12, 8, 32],
        accepted_B=[3, 2, 32],
    )
    tokens = r.tokens_BT.copy()
    tokens[2, 2:] = 7
    return Rollout(
        tokens,
        *(
            getattr(r, name)
            for name in (
                "prompt_length_B",
                "length_B",
                "policy_logp_BT",
                "sampler_logp_BT",
                "ended_B",
                "stopped_B",
                "target_calls_B",
                "drafted_B",
                "accepted_B",
            )
        ),
    )


def test_metrics_leave_loops_out_of_speculation():
    metrics = rollout_metrics(mixed(), draft_length=4)
    assert metrics == {
        "rollout/length_mean": pytest.approx(50 / 3),
        "rollout/length_max": 40,
        "rollout/truncated_fraction": pytest.approx(2 / 3),
        "rollout/loop_fraction": pytest.approx(1 / 3),
        "rollout/target_calls_per_token": pytest.approx(5 / 10),
        "rollout/accepted_length": pytest.approx(10 / 5),
        "rollout/draft_length": 4,
        "rollout/acceptance_rate": pytest.approx(5 / 20),
    }


def test_metrics_without_a_drafter_have_no_acceptance():
    metrics = rollout_metrics(rollout([1], [4], [True], target_calls_B=[3]), draft_length=0)
    assert "rollout/acceptance_rate" not in metrics
    assert metrics["rollout/target_calls_per_token"] == 1.0


def test_metrics_of_loops_alone_or_of_nothing_generated_are_numbers():
    assert rollout_metrics(mixed().select([2]), 4)["rollout/accepted_length"] == pytest.approx(5.0)
    assert all(np.isfinite(value) for value in rollout_metrics(rollout([3], [3], [False]), 4).values())
