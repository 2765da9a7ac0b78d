"""What n-grams are looked for in besides the sequence itself: who decodes the same prompt, and who has done so."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from tlt_jax.decode.propose import Rules, Sources

MOST_PROMPTS = 4096  # whose sequences are remembered; the prompt that was not seen for longest is forgotten


class History:
    """Finished sequences by prompt, the latest `ngram_history` of each. `changed`: what `sources` gives is not what it
    gave before."""

    def __init__(self, rules: Rules, length: int):
        self._siblings, self._kept, self._length = rules.ngram_siblings, rules.ngram_history, length
        self._sequences: OrderedDict[bytes, list[np.ndarray]] = OrderedDict()
        self.changed = True

    def add(self, prompt: np.ndarray, tokens: np.ndarray) -> None:
        """Remembers a finished sequence: its prompt, and prompt and completion together."""
        self.changed = True
        if not self._kept:
            return
        key = prompt.tobytes()
        self._sequences[key] = [*self._sequences.pop(key, []), tokens][-self._kept :]
        if len(self._sequences) > MOST_PROMPTS:
            self._sequences.popitem(last=False)

    def sources(self, prompts: Sequence[np.ndarray | None]) -> Sources:
        """For slots that decode these prompts (None: free)."""
        slots = len(prompts)
        keys = [None if prompt is None else prompt.tobytes() for prompt in prompts]
        together: dict[bytes, list[int]] = {}
        for slot, key in enumerate(keys):
            if key is not None:
                together.setdefault(key, []).append(slot)
        sibling = np.full((slots, self._siblings), slots, np.int32)
        known = np.zeros((slots, self._kept, self._length), np.int32)
        known_length = np.zeros((slots, self._kept), np.int32)
        for slot, key in enumerate(keys):
            if key is None:
                continue
            others = [other for other in together[key] if other != slot][: self._siblings]
            sibling[slot, : len(others)] = others
            for row, tokens in enumerate(self._sequences.get(key, [])):
                known[slot, row, : len(tokens)], known_length[slot, row] = tokens, len(tokens)
        self.changed = False
        return Sources(sibling, known, known_length)
