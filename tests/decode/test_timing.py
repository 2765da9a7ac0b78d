"""What a block's start takes, and a round, by a clock that is made up."""

import pytest

from tlt_jax.decode.propose import OFF, Choice
from tlt_jax.decode.timing import LEAST, TIMED, measured, without

START = 0.001
ROUNDS = {OFF: 0.0001, Choice("eagle", 3): 0.0003, Choice("eagle", 7): 0.2}


def timed(ends: int = 1000, slow: float = 1.0):
    """(`measured` of programs whose first run takes long, and whose sequences end after so many rounds; its blocks)."""
    blocks = []

    def run(choice: Choice, rounds: int) -> tuple[float, int]:
        first = choice not in [other for other, _ in blocks]
        blocks.append((choice, rounds))
        had = min(rounds, ends)
        return (slow if first else 0.0) + START + had * ROUNDS[choice], had

    return measured(run, list(ROUNDS), 128, 3, lambda number: number), blocks


@pytest.mark.parametrize("ends", [1000, 40])
def test_start_and_rounds_are_told_apart(ends):
    (start, times), blocks = timed(ends)
    assert start == pytest.approx(START)
    assert [choice for choice, _ in times] == 3 * list(ROUNDS)
    for choice, seconds in times:
        # A choice of which one round is long enough cannot tell them apart: the others say what the start takes.
        assert seconds == pytest.approx(ROUNDS[choice])
    longest = {choice: max(rounds for other, rounds in blocks if other == choice) for choice in ROUNDS}
    assert longest == {OFF: min(int(TIMED / (START + ROUNDS[OFF])), 128), Choice("eagle", 3): 76, Choice("eagle", 7): 1}


def test_a_block_takes_time_whatever_its_start_is_thought_to_take():
    assert without(0.001, 0.003) == pytest.approx(0.002)
    assert without(0.001, 0.0009) == pytest.approx(LEAST * 0.0009)
