"""From short completions to all of them: pure functions of lengths, success and (seed, step)."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tlt_jax.config.stage_sections import CurriculumConfig

UNSEEN = -1.0
_DRAW = 0xD5A1  # sets these draws apart from other uses of (seed, step)


@dataclass(frozen=True)
class Curriculum:
    """`phase` from 0; `success`: running mean of the phase's success rates in [0, 1], UNSEEN (-1) before the first."""

    phase: int = 0
    success: float = UNSEEN

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)


def from_dict(state: dict[str, Any]) -> Curriculum:
    """The curriculum that `to_dict` wrote."""
    return Curriculum(int(state["phase"]), float(state["success"]))


def eligible(lengths: np.ndarray, phase: int, phases: int) -> np.ndarray:
    """Ascending indices [M] of the completions that phase `phase` of `phases` admits, from their lengths [N].

    Phase p admits every length up to the (p+1)/P quantile (equal lengths come together); the last phase and later, all.
    """
    lengths = np.asarray(lengths)
    if phase >= phases - 1 or not len(lengths):
        return np.arange(len(lengths))
    rank = -(-len(lengths) * (phase + 1) // phases) - 1  # rounded up: at least one is admitted
    return np.flatnonzero(lengths <= np.sort(lengths)[rank])


def advance(curriculum: Curriculum, success_rate: float, config: CurriculumConfig) -> Curriculum:
    """The curriculum after a step with `success_rate`: mean <- smoothing * mean + (1 - smoothing) * rate.

    The first rate of a phase is the mean. A mean of at least `advance_at` moves one phase on, where it starts anew.
    """
    past = curriculum.success
    seeded = past < 0
    mean = success_rate if seeded else config.smoothing * past + (1 - config.smoothing) * success_rate
    if mean >= config.advance_at and curriculum.phase < config.phases - 1:
        return Curriculum(curriculum.phase + 1, UNSEEN)
    return Curriculum(curriculum.phase, float(mean))


def draw(indices: np.ndarray, count: int, seed: int, step: int) -> np.ndarray:
    """`count` of `indices`, shuffled by (seed, step); none twice while there are enough, else each equally often
    (+-1).
    """
    indices = np.asarray(indices)
    assert len(indices), "draw needs at least one index"
    random = np.random.default_rng([seed, step, _DRAW])
    rounds = -(-count // len(indices))
    return np.concatenate([random.permutation(indices) for _ in range(rounds)] or [indices])[:count]
