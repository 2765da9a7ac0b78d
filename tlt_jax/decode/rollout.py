"""What decoding gives back, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Rollout:
    """Sequences in the order of their requests. Shape suffixes: B sequences, T positions.

    tokens_BT: prompt, then completion (its EOS included), then zeros.
    prompt_length_B, length_B: tokens of the prompt; of prompt and completion.
    policy_logp_BT: log-prob of each completion token under the policy at the sampling temperature; 0 elsewhere.
    sampler_logp_BT: under the distribution that generated it, after top-k and top-p; 0 elsewhere.
    ended_B: the completion ends with EOS or with a stop string; if not, it was cut at its limit.
    stopped_B: a stop string ended it; the token with which that stood in the text is the last.
    target_calls_B, drafted_B, accepted_B: verifications of the sequence while it was unfinished (its prefill is not
    counted); tokens proposed; proposed tokens that were kept.
    """

    tokens_BT: np.ndarray
    prompt_length_B: np.ndarray
    length_B: np.ndarray
    policy_logp_BT: np.ndarray
    sampler_logp_BT: np.ndarray
    ended_B: np.ndarray
    stopped_B: np.ndarray
    target_calls_B: np.ndarray
    drafted_B: np.ndarray
    accepted_B: np.ndarray

    @property
    def completion_mask_BT(self) -> np.ndarray:
        """1.0 at the completion's tokens, 0.0 elsewhere."""
        position_T = np.arange(self.tokens_BT.shape[1])
        inside = (position_T >= self.prompt_length_B[:, None]) & (position_T < self.length_B[:, None])
        return inside.astype(np.float32)

    @property
    def completion_length_B(self) -> np.ndarray:
        return self.length_B - self.prompt_length_B

    def completions(self) -> list[np.ndarray]:
        """Each completion's tokens, without its EOS."""
        ends = self.length_B - (self.ended_B & ~self.stopped_B).astype(int)
        return [row[start:end] for row, start, end in zip(self.tokens_BT, self.prompt_length_B, ends, strict=True)]

    def select(self, index: Any) -> "Rollout":
        """The sequences that `index` (an array of indices or a mask) picks."""
        return Rollout(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


def joined(rollouts: Sequence[Rollout]) -> Rollout:
    """The sequences of all, one after the other."""
    return Rollout(**{f.name: np.concatenate([getattr(r, f.name) for r in rollouts]) for f in fields(Rollout)})


def is_loop(tokens: np.ndarray, window: int = 64, longest_period: int = 16) -> bool:
    """Whether the last `window` tokens repeat with a period of at most `longest_period`.

    Completions shorter than two windows are judged on their last half, if that has at least 16 tokens, with periods
    of at most a quarter of it. Loops flatter every drafter: figures on speculation leave them out, and say so.
    """
    window = min(window, len(tokens) // 2)
    if window < 16:
        return False
    tail = tokens[-window:]
    return any(
        np.array_equal(tail[period:], tail[:-period]) for period in range(1, min(longest_period, window // 4) + 1)
    )


def rollout_metrics(rollout: Rollout, draft_length: float) -> dict[str, float]:
    """The `rollout/` metrics. Calls and acceptance leave loops out; `rollout/loop_fraction` is their share."""
    loops = np.array([is_loop(tokens) for tokens in rollout.completions()], bool)
    counted = rollout.select(~loops) if not loops.all() else rollout
    length, calls = counted.completion_length_B, counted.target_calls_B
    metrics = {
        "rollout/length_mean": float(rollout.completion_length_B.mean()),
        "rollout/length_max": int(rollout.completion_length_B.max()),
        "rollout/truncated_fraction": float(1.0 - rollout.ended_B.mean()),
        "rollout/loop_fraction": float(loops.mean()),
        "rollout/target_calls_per_token": float(calls.sum() / max(length.sum(), 1)),
        "rollout/accepted_length": float(length.sum() / max(calls.sum(), 1)),
        "rollout/draft_length": draft_length,
    }
    if draft_length:
        metrics["rollout/acceptance_rate"] = float(counted.accepted_B.sum() / max(counted.drafted_B.sum(), 1))
    return metrics
