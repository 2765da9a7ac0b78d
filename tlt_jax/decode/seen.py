"""What blocks of draft and verify were seen to do: their times, and how many of the drafts were kept."""

import statistics
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from tlt_jax.decode.loop import BlockStats
from tlt_jax.decode.propose import Choice

Key = tuple[int, Choice]  # the pool's size, and the choice


@dataclass(frozen=True)
class Block:
    """What one block did, on the host. `size` is the pool's; `seconds` are its rounds', for what it takes to start a
    block is the same for all choices, and falls due as often as sequences end."""

    size: int
    choice: Choice
    seconds: float
    stats: BlockStats


class Seen:
    """What was measured: seconds a round of each size and choice; by drafter and position, in how many rounds a draft
    was asked for there and those before it stood (`reached`), how often there was one, and how often it was kept; how
    often each was chosen.

    The machine's pace changes while others use it too. What is run often would look slow then beside what was measured
    before; so times are kept in units of `pace`, which follows what is run.
    """

    RECENT = 32  # blocks whose median is a round's time
    KNOWN = 3  # times after which a round's is known well enough to tell the machine's pace from
    FOLLOW = 0.1  # how much of the latest block's pace is taken over
    HALF = 20_000.0  # rounds of a sequence after which what was seen counts half
    ALIKE = 32.0  # rounds of one sequence, which are much alike
    SPREAD = 0.25  # standard deviation, from sequence to sequence, of their tokens a round, as a share of them
    GOOD = 0.9  # the chance with which a good drafter's draft is kept
    NOISE = 0.26  # standard deviation of a block's time, as a share of it, on a machine that is not ours alone

    def __init__(self) -> None:
        self.seconds: dict[Key, deque[float]] = {}  # in units of the pace
        self.pace = 1.0
        self.reached: dict[str, np.ndarray] = {}
        self.offered: dict[str, np.ndarray] = {}
        self.kept: dict[str, np.ndarray] = {}
        self.chosen: Counter[Key] = Counter()
        self.last: Counter[Key] = Counter()
        self.blocks = 0
        self._median: dict[Key, float] = {}
        self._tokens: dict[tuple[str, float], list[float]] = {}

    def time(self, key: Key, seconds: float) -> None:
        """Takes what a round was measured to take."""
        times = self.seconds.setdefault(key, deque(maxlen=self.RECENT))
        if len(times) >= self.KNOWN:
            self.pace *= min(max(seconds / self.round_seconds(key), 0.5), 2.0) ** self.FOLLOW
        times.append(seconds / self.pace)
        self._median[key] = statistics.median(times)

    def add(self, block: Block) -> None:
        stats, key = block.stats, (block.size, block.choice)
        if not stats.rounds:
            return
        self.blocks += 1
        self.last[key] = self.blocks
        self.chosen[key] += int(stats.rounds)
        self.time(key, block.seconds / int(stats.rounds))
        name, length, fade = block.choice.drafter, block.choice.draft_length, 0.5 ** (int(stats.calls) / self.HALF)
        reached = np.array([stats.calls, *stats.kept_G][:length], float)
        for store, new in ((self.reached, reached), (self.offered, stats.offered_G), (self.kept, stats.kept_G)):
            store[name] = fade * _wide(store.get(name), length)
            store[name][:length] += new
        self._tokens = {key: found for key, found in self._tokens.items() if key[0] != name}

    def round_seconds(self, key: Key) -> float:
        return self.pace * self._median[key]

    def tokens(self, choice: Choice, doubt: float = 0.0) -> float:
        """Expected tokens of a sequence's round: 1 and the chances that the first, second, ... draft is kept. With
        `doubt`, in the best case: so many standard errors above what was seen, with one sequence's rounds added in
        which the drafts were a good drafter's."""
        known = self._tokens.get((choice.drafter, doubt), ())
        if choice.draft_length >= len(known):
            width = max(choice.draft_length, len(self.reached.get(choice.drafter, ())))
            tokens = 1.0 + np.cumsum([0.0, *self.survival(Choice(choice.drafter, width), hopeful=doubt > 0)])
            sequences = _wide(self.reached.get(choice.drafter), 1)[0] / self.ALIKE
            better = 1.0 + doubt * self.SPREAD / (sequences + 1.0) ** 0.5
            known = self._tokens[choice.drafter, doubt] = np.minimum(
                better * tokens, np.arange(width + 1) + 1.0
            ).tolist()
        return known[choice.draft_length]

    def survival(self, choice: Choice, hopeful: bool = False) -> np.ndarray:
        """How likely a first, second, ... draft of the choice is there and kept, with those before it: the product of
        their chances where those before it are, of which shorter drafts tell, too. `hopeful`: as if there had been a
        sequence more, of a good drafter."""
        name, length = choice.drafter, choice.draft_length
        reached, kept = (_wide(store.get(name), length)[:length] for store in (self.reached, self.kept))
        if hopeful:
            good = self.ALIKE * self.GOOD ** np.arange(length)
            reached, kept = reached + good, kept + self.GOOD * good
        return np.cumprod(kept / np.maximum(reached, 1.0))

    def acceptance(self, drafter: str) -> np.ndarray:
        """The share of the drafter's first, second, ... drafts that was kept."""
        return self.kept.get(drafter, np.zeros(0)) / np.maximum(self.offered.get(drafter, np.zeros(0)), 1.0)

    def speed(self, key: Key, doubt: float = 0.0) -> float:
        """Expected tokens a second of one sequence, other things equal; what is not measured has none. With `doubt`, in
        the best case: so many standard errors above what was seen, of drafts and times."""
        if key not in self.seconds:
            return 0.0
        fastest = 1.0 - min(doubt * self.NOISE / len(self.seconds[key]) ** 0.5, 0.5)
        return self.tokens(key[1], doubt) / (fastest * self.round_seconds(key))

    def table(self) -> list[dict[str, Any]]:
        rounds = max(sum(self.chosen.values()), 1)
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
            "pace": self.pace,
            "keys": [
                {**named(key), "seconds": list(times), "chosen": self.chosen[key], "last": self.last[key]}
                for key, times in self.seconds.items()
            ],
            "drafts": {
                name: {part: getattr(self, part)[name].tolist() for part in ("reached", "offered", "kept")}
                for name in self.reached
            },
        }

    def load(self, found: dict[str, Any]) -> None:
        """Takes what `to_dict` gave."""
        self.blocks, self.pace = found["blocks"], found["pace"]
        for entry in found["keys"]:
            key = key_of(entry)
            self.seconds[key] = deque(entry["seconds"], maxlen=self.RECENT)
            self._median[key] = statistics.median(self.seconds[key])
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
    known = 0 if array is None else len(array)
    wide = np.zeros(max(length, known))
    if array is not None:
        wide[:known] = array
    return wide
