"""What blocks of draft and verify were seen to do: their times, and how many of the drafts were kept."""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from tlt_jax.decode.loop import BlockStats
from tlt_jax.decode.propose import Choice

Key = tuple[int, Choice]  # the pool's size, and the choice


@dataclass(frozen=True)
class Block:
    """What one block did, on the host; `size` is the pool's, `seconds` from its start to its last result."""

    size: int
    choice: Choice
    seconds: float
    stats: BlockStats


class Seen:
    """What was measured: seconds a round of each size and choice; by drafter and position, how often drafts were asked
    for, offered and kept; how often each was chosen."""

    RECENT = 32  # blocks whose median is a round's time
    HALF = 20_000.0  # rounds of a sequence after which what was seen counts half
    GOOD = 0.9  # the chance with which a good drafter's draft is kept

    def __init__(self) -> None:
        self.seconds: dict[Key, deque[float]] = {}
        self.asked: dict[str, np.ndarray] = {}
        self.offered: dict[str, np.ndarray] = {}
        self.kept: dict[str, np.ndarray] = {}
        self.chosen: Counter[Key] = Counter()
        self.last: dict[Key, int] = {}
        self.blocks = 0

    def add(self, block: Block) -> None:
        stats, key = block.stats, (block.size, block.choice)
        if not stats.rounds:
            return
        self.blocks += 1
        self.last[key] = self.blocks
        self.chosen[key] += int(stats.rounds)
        self.seconds.setdefault(key, deque(maxlen=self.RECENT)).append(block.seconds / int(stats.rounds))
        name, length, fade = block.choice.drafter, block.choice.draft_length, 0.5 ** (int(stats.calls) / self.HALF)
        asked = np.full(length, float(stats.calls))
        for store, new in ((self.asked, asked), (self.offered, stats.offered_G), (self.kept, stats.kept_G)):
            store[name] = fade * _wide(store.get(name), length)
            store[name][:length] += new

    def round_seconds(self, key: Key) -> float:
        return float(np.median(self.seconds[key]))

    def tokens(self, choice: Choice, hope: float = 0.0) -> float:
        """Expected tokens of a sequence's round: 1 and the chances that the first, second, ... draft is kept."""
        return 1.0 + float(self.survival(choice, hope).sum())

    def survival(self, choice: Choice, hope: float = 0.0) -> np.ndarray:
        """How likely a first, second, ... draft of the choice is there and kept, with those before it. `hope`: as many
        rounds are added in which drafts were kept as a good drafter's are."""
        name, length = choice.drafter, choice.draft_length
        asked, kept = (_wide(store.get(name), length)[:length] for store in (self.asked, self.kept))
        good = self.GOOD ** np.arange(1, length + 1)
        return (kept + hope * good) / np.maximum(asked + hope, 1.0)

    def acceptance(self, drafter: str) -> np.ndarray:
        """The share of the drafter's first, second, ... drafts that was kept."""
        return self.kept.get(drafter, np.zeros(0)) / np.maximum(self.offered.get(drafter, np.zeros(0)), 1.0)

    def speed(self, key: Key, hope: float = 0.0) -> float:
        """Expected tokens a second of one sequence, other things equal; what is not measured has none."""
        return self.tokens(key[1], hope) / self.round_seconds(key) if key in self.seconds else 0.0

    def table(self) -> list[dict[str, Any]]:
        rounds = sum(self.chosen.values())
        return [
            {
                **named((size, choice)),
                "round_ms": 1e3 * self.round_seconds((size, choice)),
                "tokens_per_call": self.tokens(choice),
                "tokens_per_second": size * self.speed((size, choice)),
                "share": self.chosen[size, choice] / rounds,
            }
            for size, choice in sorted(self.seconds, key=lambda key: (-key[0], key[1].drafter, key[1].draft_length))
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, from which `load` goes on."""
        return {
            "blocks": self.blocks,
            "keys": [
                {**named(key), "seconds": list(times), "chosen": self.chosen[key], "last": self.last[key]}
                for key, times in self.seconds.items()
            ],
            "drafts": {
                name: {part: getattr(self, part)[name].tolist() for part in ("asked", "offered", "kept")}
                for name in self.asked
            },
        }

    def load(self, found: dict[str, Any]) -> None:
        """Takes what `to_dict` gave."""
        self.blocks = found["blocks"]
        for entry in found["keys"]:
            key = key_of(entry)
            self.seconds[key] = deque(entry["seconds"], maxlen=self.RECENT)
            self.chosen[key], self.last[key] = entry["chosen"], entry["last"]
        for name, parts in found["drafts"].items():
            for part, values in parts.items():
                getattr(self, part)[name] = np.array(values)


def named(key: Key) -> dict[str, Any]:
    """A key in plain JSON values."""
    size, choice = key
    return {"size": size, "drafter": choice.drafter, "draft_length": choice.draft_length}


def key_of(entry: dict[str, Any]) -> Key:
    """The key that `named` gave."""
    return entry["size"], Choice(entry["drafter"], entry["draft_length"])


def _wide(array: np.ndarray | None, length: int) -> np.ndarray:
    """The array with at least `length` entries, zeros where it had none."""
    array = np.zeros(0) if array is None else array
    return np.pad(array, (0, max(length - len(array), 0)))
