"""Proposals: the n-grams by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.decode.ngram import copies_of
from tlt_jax.decode.propose import Choice, Context, Rules, Sources
from tlt_jax.decode.sampling import SamplingParams

LENGTH = 14

# name: (known tokens, drafts of at most 3 with suffixes of 2 to 4)
TABLE = {
    # [7 1 2 3] is new; [1 2 3] came at 0 (then 9) and at 4 (then 7 1 2): the latest.
    "the latest occurrence": ([1, 2, 3, 9, 1, 2, 3, 7, 1, 2, 3], [7, 1, 2]),
    # [5 1 2 3] came at 0, then 8 9 2; the later [2 3], then 6, is shorter.
    "the longest suffix before the latest": ([5, 1, 2, 3, 8, 9, 2, 3, 6, 5, 1, 2, 3], [8, 9, 2]),
    "no match": ([1, 2, 3, 4, 5], []),
    "a shorter suffix than the shortest": ([1, 2, 3, 2], []),
    "a match that runs into the end": ([1, 2, 1, 2], [1, 2]),
    "an occurrence that overlaps the suffix": ([1, 1, 1, 1], [1]),
    "one token": ([1], []),
    "two tokens": ([1, 1], []),
    "the whole pool's length": ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1, 2], [3, 4, 5]),
}


def proposals(
    known: list[list[int]], length: int, rules: Rules, rubbish: int = 0, sources: Sources | None = None
) -> list[list[int]]:
    """The drafts of each row; `rubbish` fills the places beyond the known tokens, as an earlier sequence would."""
    tokens = np.full((len(known), LENGTH), rubbish, np.int32)
    for row, tokens_of_row in zip(tokens, known, strict=True):
        row[: len(tokens_of_row)] = tokens_of_row
    ones = jnp.ones(len(known))
    rows = len(known)
    empty = Sources(np.zeros((rows, 0), int), np.zeros((rows, 0, LENGTH), int), np.zeros((rows, 0), int))
    context = Context(
        jnp.asarray(tokens),
        jnp.asarray([len(row) for row in known]),
        SamplingParams(ones, ones, ones, ones),
        (),
        ones,
        sources or empty,
        None,
        {},
    )
    copies = jax.jit(copies_of, static_argnums=(1, 2))(context, Choice("ngram", length), rules)
    return [drafts[:count].tolist() for drafts, count in zip(*map(np.asarray, copies), strict=True)]


@pytest.mark.parametrize("rubbish", [0, 1, 2])
def test_ngram_drafts_by_hand(rubbish):
    found = proposals([known for known, _ in TABLE.values()], 3, Rules(ngram_min=2, ngram_max=4), rubbish)
    assert dict(zip(TABLE, found, strict=True)) == {name: drafts for name, (_, drafts) in TABLE.items()}


def test_the_shortest_suffix_may_be_one_token():
    # The 2 at 1 is followed by 3 2.
    assert proposals([[1, 2, 3, 2]], 5, Rules(ngram_min=1, ngram_max=4)) == [[3, 2]]


@pytest.mark.parametrize(("longest", "drafts"), [(2, [6, 9, 1]), (3, [7, 8, 1])])
def test_suffixes_are_no_longer_than_asked_for(longest, drafts):
    # [9 1 2] came at 0, then 7; the later [1 2] at 5, then 6.
    assert proposals([[9, 1, 2, 7, 8, 1, 2, 6, 9, 1, 2]], 3, Rules(ngram_min=1, ngram_max=longest)) == [drafts]


def test_a_draft_is_no_longer_than_asked_for():
    assert proposals([[1, 2, 3, 4, 5, 6, 1, 2]], 1, Rules(ngram_min=2, ngram_max=4)) == [[3]]


# The last tokens are 1 2; [1 2] came in an earlier sequence of the prompt, then 5 6, and at a sibling, then 7 8 9.
SIBLINGS = [[4, 1, 2], [3, 1, 2, 7, 8, 9], [0, 1, 2, 9]]


def sources(siblings=(3, 3, 3), known=()) -> Sources:
    """The first row's sibling and earlier sequences; the others have none."""
    found = np.zeros((3, 1, LENGTH), np.int32)
    found[0, 0, : len(known)] = known
    return Sources(np.array(siblings)[:, None], found, np.array([[len(known)], [0], [0]]))


@pytest.mark.parametrize(
    ("given", "drafts"),
    [
        (sources(), []),
        (sources(siblings=(1, 3, 3)), [7, 8, 9]),
        (sources(siblings=(2, 3, 3)), [9]),  # no further than the sibling has come
        (sources(known=[1, 2, 5, 6]), [5, 6]),
        (sources(siblings=(1, 3, 3), known=[1, 2, 5, 6]), [5, 6]),  # earlier sequences before siblings
        (sources(siblings=(1, 3, 3), known=[2, 5, 6]), [7, 8, 9]),  # but a longer suffix before all
    ],
)
def test_drafts_come_from_siblings_and_earlier_sequences(given, drafts):
    found = proposals(SIBLINGS, 3, Rules(ngram_min=2, ngram_max=4), sources=given)
    assert found == [drafts, [], []]


def test_the_sequence_itself_comes_before_others():
    given = sources(known=[1, 2, 5, 6])
    assert proposals([[1, 2, 8, 1, 2], [0], [0]], 2, Rules(), sources=given)[0] == [8, 1]
