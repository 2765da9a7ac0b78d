"""Texts that end a sequence: where one stands among its tokens, and what is left of the sequence then. On the host."""

from collections.abc import Callable, Sequence

import numpy as np


def first_stop(text: Callable[[np.ndarray], str], tokens: np.ndarray, stops: Sequence[str]) -> int | None:
    """How many of the tokens it takes until one of the `stops` stands in their text; None if none does."""
    if not any(stop in text(tokens) for stop in stops):
        return None
    low, high = 1, len(tokens)  # a text that holds a stop still holds it with more tokens
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if any(stop in text(tokens[:middle]) for stop in stops) else (middle + 1, high)
    return low


def cut(row: dict[str, np.ndarray], length: int | None) -> dict[str, np.ndarray]:
    """The sequence up to `length` tokens, where a stop stands in its text; None: where it ended by itself."""
    row["stopped_B"] = np.array(length is not None)
    if length is not None:
        row["ended_B"], row["length_B"] = np.array(True), np.array(length, np.int32)
        for name in ("tokens_BT", "policy_logp_BT", "sampler_logp_BT"):
            row[name][length:] = 0
    return row
