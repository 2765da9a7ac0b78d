"""What it takes to start a block, and what each choice's rounds take."""

import statistics
from collections.abc import Callable, Sequence

from tlt_jax.decode.propose import Choice

TIMED = 0.1  # seconds that rounds should take to be timed, by what one takes that is run alone
LEAST = 0.1  # the share of a block's time that is its rounds', whatever its start is thought to take


def measured(
    run: Callable[[Choice, int], tuple[float, int]],
    choices: Sequence[Choice],
    most: int,
    times: int,
    led: Callable[[int], int],
) -> tuple[float, list[tuple[Choice, float]]]:
    """(seconds of a block's start, [(choice, seconds of a round), ...], `times` of each choice).

    `run` runs a block of a choice with a number of rounds, up to `most`, and gives its seconds and how many it had. The
    choices take turns, so that what else the machine does hits all alike. A program's first run tells nothing, the
    second how many rounds are long enough. What a block of one round takes beside a long one is its start, which is
    the same for all choices; the median is taken.
    """
    for choice in choices:
        run(choice, 1)
    rounds = {choice: led(min(max(int(TIMED / run(choice, 1)[0]), 1), most)) for choice in choices}
    found = [(choice, run(choice, 1)[0], *run(choice, rounds[choice])) for _ in range(times) for choice in choices]
    starts = [(one * count - many) / (count - 1) for _, one, many, count in found if count > 1]
    start = max(statistics.median(starts), 0.0) if starts else 0.0
    return start, [(choice, without(start, many) / count) for choice, _, many, count in found]


def without(start: float, seconds: float) -> float:
    """What a block's rounds take, of its seconds."""
    return max(seconds - start, LEAST * seconds)
