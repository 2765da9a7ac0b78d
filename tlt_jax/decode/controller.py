"""Who drafts, and how many tokens: the choice for each compiled block, on the host.

A controller sees what every block did and how long it took. `Fixed` has one choice; the others look for the one with
the most tokens per second at each size of the pool, `off` included.
"""

import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tlt_jax.config.schema import SpeculationConfig
from tlt_jax.decode.propose import OFF, Choice
from tlt_jax.decode.seen import Block, Key, Seen, key_of, named


class Controller(ABC):
    """Chooses before each block, and learns from it; `seen` is what it has measured."""

    def __init__(self, choices: Sequence[Choice], seed: int = 0):
        self.choices, self.seen = tuple(choices), Seen()

    @abstractmethod
    def choose(self, size: int) -> Choice:
        """The choice for the next block of a pool of `size` slots."""

    def observe(self, block: Block) -> None:
        """Takes what a block did."""
        self.seen.add(block)

    def time(self, size: int, choice: Choice, seconds: float) -> None:
        """Takes what a round of the choice was measured to take in a pool of `size` slots, before any was needed."""
        self.seen.time((size, choice), seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, from which `load` goes on."""
        return {"seen": self.seen.to_dict()}

    def load(self, found: dict[str, Any]) -> None:
        """Goes on from what `to_dict` of the same kind of controller gave; what it holds of other choices than these
        is never asked for."""
        self.seen.load(found["seen"])


class Fixed(Controller):
    """One choice, always."""

    def __init__(self, choice: Choice):
        super().__init__([choice])

    def choose(self, size: int) -> Choice:
        return self.choices[0]


class CostTable(Controller):
    """The choice with the most expected tokens a second, from the measured cost of its rounds and the drafts that were
    kept by position. The engine measures the costs at the start (`Engine.warm_up`); a choice without is tried first,
    `Seen.KNOWN` times, since the first time of a program can be four times as slow as those after it.

    Of drafts and times the best case is believed (an upper confidence bound, Auer et al. 2002), so that a choice is
    tried until it is known well enough, and not at all if it could not be the best with all drafts kept. Now and then a
    choice that could be is taken again, the one that was not for longest."""

    DOUBT = 1.0  # standard errors above what was seen
    AGAIN = 64  # blocks between two looks at a choice that is not the best

    def choose(self, size: int) -> Choice:
        keys = [(size, choice) for choice in self.choices]
        for key in keys:
            if len(self.seen.seconds.get(key, ())) < self.seen.KNOWN:
                return key[1]
        best = max(keys, key=lambda key: self.seen.speed(key, self.DOUBT))
        if self.seen.blocks % self.AGAIN == self.AGAIN - 1:
            # What is slow by far even if all its drafts stood is not worth the look.
            hopeful = [k for k in keys if (1 + k[1].draft_length) / self.seen.round_seconds(k) > self.seen.speed(best)]
            return min(hopeful or [best], key=lambda key: self.seen.last[key])[1]
        return best[1]


class Bandit(Controller):
    """Epsilon-greedy in buckets of the pool's size, by the median of the latest tokens a second of each choice (after
    the bucketed bandit of TLT, Hu et al. 2025)."""

    EPSILON, WINDOW = 0.1, 16

    def __init__(self, choices: Sequence[Choice], seed: int = 0):
        super().__init__(choices, seed)
        self._rewards: dict[Key, deque[float]] = {}
        self._random = np.random.default_rng(seed)

    def choose(self, size: int) -> Choice:
        for choice in self.choices:
            if (size, choice) not in self._rewards:
                return choice
        if self._random.random() < self.EPSILON:
            return self.choices[self._random.integers(len(self.choices))]
        return max(self.choices, key=lambda choice: statistics.median(self._rewards[size, choice]))

    def observe(self, block: Block) -> None:
        self.seen.add(block)
        if block.stats.calls:
            rewards = self._rewards.setdefault((block.size, block.choice), deque(maxlen=self.WINDOW))
            rewards.append(reward(block))

    def to_dict(self) -> dict[str, Any]:
        rewards = [{**named(key), "rewards": list(found)} for key, found in self._rewards.items()]
        return super().to_dict() | {"rewards": rewards, "random": self._random.bit_generator.state}

    def load(self, found: dict[str, Any]) -> None:
        super().load(found)
        self._rewards = {key_of(entry): deque(entry["rewards"], maxlen=self.WINDOW) for entry in found["rewards"]}
        self._random.bit_generator.state = found["random"]


class PolicyGradient(Controller):
    """A softmax over the choices for each size of the pool, trained by REINFORCE (Williams 1992) on tokens a second,
    measured against their running mean, in units of it."""

    RATE, BASELINE = 0.5, 0.1

    def __init__(self, choices: Sequence[Choice], seed: int = 0):
        super().__init__(choices, seed)
        self._logits: dict[int, np.ndarray] = {}
        self._mean: dict[int, float] = {}
        self._random = np.random.default_rng(seed)

    def probabilities(self, size: int) -> np.ndarray:
        logits = self._logits.setdefault(size, np.zeros(len(self.choices)))
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    def choose(self, size: int) -> Choice:
        return self.choices[self._random.choice(len(self.choices), p=self.probabilities(size))]

    def observe(self, block: Block) -> None:
        self.seen.add(block)
        if not block.stats.calls:
            return
        gain, size = reward(block), block.size
        mean = self._mean.get(size, gain)
        taken = np.array([choice == block.choice for choice in self.choices], float)
        # The gradient of the log-probability of what was taken: one-hot minus the probabilities.
        self._logits[size] = self._logits.get(size, 0.0) + self.RATE * (gain / mean - 1.0) * (
            taken - self.probabilities(size)
        )
        self._mean[size] = mean + self.BASELINE * (gain - mean)

    def to_dict(self) -> dict[str, Any]:
        sizes = [
            {
                "size": size,
                "mean": mean,
                "choices": [named((size, choice)) for choice in self.choices],
                "logits": self._logits[size].tolist(),
            }
            for size, mean in self._mean.items()
        ]
        return super().to_dict() | {"sizes": sizes, "random": self._random.bit_generator.state}

    def load(self, found: dict[str, Any]) -> None:
        super().load(found)
        for entry in found["sizes"]:
            logits = dict(zip(map(key_of, entry["choices"]), entry["logits"], strict=True))
            size = entry["size"]
            self._mean[size] = entry["mean"]
            self._logits[size] = np.array([logits.get((size, choice), 0.0) for choice in self.choices])
        self._random.bit_generator.state = found["random"]


def reward(block: Block) -> float:
    """Tokens a second of one sequence of the block, so that a pool that empties does not look slow."""
    stats = block.stats
    return float(stats.emitted / stats.calls * stats.rounds / block.seconds)


CONTROLLERS: dict[str, Callable[..., Controller]] = {
    "cost_table": CostTable,
    "bandit": Bandit,
    "policy_gradient": PolicyGradient,
}


def make_controller(config: SpeculationConfig, seed: int) -> Controller:
    """The config's controller over its drafters, or its one choice."""
    if config.drafter == "auto":
        return CONTROLLERS[config.controller](choices_of(config.auto_drafters, config.auto_draft_lengths), seed)
    return Fixed(OFF if config.drafter == "off" else Choice(config.drafter, config.draft_length))


def choices_of(drafters: Sequence[str], draft_lengths: Sequence[int]) -> list[Choice]:
    """All that a controller may choose from: each drafter with each length, and `off`."""
    drafting = [name for name in drafters if name != OFF.drafter]
    return [OFF, *(Choice(name, length) for name in drafting for length in draft_lengths)]
