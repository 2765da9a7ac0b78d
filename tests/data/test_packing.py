"""Packing: hand-made rows, and the promises that hold for any input."""

import time

import numpy as np
import pytest

from tlt_jax.config import ConfigError
from tlt_jax.data.packing import ROW_FIELDS, pack_documents, pack_examples


def arrays(*lists):
    return [np.array(items, np.int32) for items in lists]


def random_documents(count, seed=0, longest=40):
    random = np.random.default_rng(seed)
    return [random.integers(1, 1000, random.integers(1, longest), dtype=np.int32) for _ in range(count)]


def test_documents_by_hand():
    rows = pack_documents(arrays([10, 11, 12], [20, 21, 22, 23, 24], [30, 31]), 4)
    np.testing.assert_array_equal(rows.tokens, [[10, 11, 12, 20], [21, 22, 23, 24], [30, 31, 0, 0]])
    np.testing.assert_array_equal(rows.targets, [[11, 12, 20, 21], [22, 23, 24, 30], [31, 0, 0, 0]])
    np.testing.assert_array_equal(rows.weights, [[1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 0, 0]])
    np.testing.assert_array_equal(rows.segments, [[1, 1, 1, 2], [1, 1, 1, 1], [1, 1, 0, 0]])
    np.testing.assert_array_equal(rows.positions, [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 0, 0]])
    types = {name: getattr(rows, name).dtype.name for name in ROW_FIELDS}
    assert types == {name: "float32" if name == "weights" else "int32" for name in ROW_FIELDS}


def test_every_token_but_the_first_is_a_target_once():
    documents = random_documents(60)
    rows = pack_documents(documents, 16)
    assert set(np.unique(rows.weights)) <= {0, 1}
    np.testing.assert_array_equal(rows.targets[rows.weights == 1], np.concatenate([d[1:] for d in documents]))
    np.testing.assert_array_equal(rows.tokens[rows.weights == 1], np.concatenate([d[:-1] for d in documents]))
    np.testing.assert_array_equal(rows.tokens[rows.segments > 0], np.concatenate(documents))


def test_segments_count_up_and_positions_restart():
    rows = pack_documents(random_documents(60, seed=1), 16)
    for segments, positions in zip(rows.segments, rows.positions, strict=True):
        real = segments[segments > 0]
        assert real[0] == 1 and set(np.diff(real)) <= {0, 1}
        for segment in np.unique(real):
            np.testing.assert_array_equal(positions[segments == segment], np.arange((segments == segment).sum()))


def test_documents_that_fill_rows_exactly_and_none_at_all():
    rows = pack_documents(arrays([1, 2], [3, 4]), 2)
    assert len(rows) == 2
    np.testing.assert_array_equal(rows.weights, [[1, 0], [1, 0]])
    assert pack_documents([], 4).tokens.shape == (0, 4)


def test_rows_are_a_random_access_source():
    rows = pack_documents(arrays([1, 2, 3]), 2)
    assert len(rows) == 2
    row = rows[1]
    assert set(row) == {"tokens", "targets", "weights", "segments", "positions"}
    np.testing.assert_array_equal(row["tokens"], [3, 0])


def test_examples_by_hand():
    examples = [
        (np.array([1, 2, 3]), np.array([0, 0, 1])),
        (np.array([4, 5, 6, 7, 8]), np.array([0, 0, 1, 1, 1])),
        (np.array([9, 10]), np.array([1, 1])),
    ]
    rows = pack_examples(examples, 4)
    np.testing.assert_array_equal(rows.tokens, [[4, 5, 6, 7], [1, 2, 9, 0]])
    np.testing.assert_array_equal(rows.targets, [[5, 6, 7, 8], [2, 3, 10, 0]])
    np.testing.assert_array_equal(rows.weights, [[0, 1, 1, 1], [0, 1, 1, 0]])
    np.testing.assert_array_equal(rows.segments, [[1, 1, 1, 1], [1, 1, 2, 0]])
    np.testing.assert_array_equal(rows.positions, [[0, 1, 2, 3], [0, 1, 0, 0]])
    assert rows.weights.dtype == np.float32 and rows.tokens.dtype == np.int32


def test_examples_stay_whole():
    examples = [(d, (np.arange(len(d)) > 3).astype(np.int32)) for d in random_documents(300, 2) if len(d) > 1]
    rows = pack_examples(examples, 48)
    found = []
    for row in range(len(rows)):
        for segment in range(1, rows.segments[row].max() + 1):
            here = rows.segments[row] == segment
            found.append((*rows.tokens[row][here], rows.targets[row][here][-1]))
    assert sorted(found) == sorted(tuple(tokens) for tokens, _ in examples)
    assert rows.weights.sum() == sum(mask[1:].sum() for _, mask in examples)
    assert len(rows) <= 1.1 * np.ceil(sum(len(tokens) - 1 for tokens, _ in examples) / 48)
    again = pack_examples(examples, 48)
    np.testing.assert_array_equal(rows.tokens, again.tokens)


@pytest.mark.parametrize("length", [1, 6])
def test_examples_that_do_not_fit_are_refused(length):
    good = (np.arange(5), np.ones(5))  # context_length + 1 tokens: the last is a target alone
    assert len(pack_examples([good], 4)) == 1
    with pytest.raises(ConfigError, match=f"example 1 holds {length} tokens; expected 2 to 5"):
        pack_examples([good, (np.arange(length), np.ones(length))], 4)


def test_no_examples():
    assert pack_examples([], 8).weights.shape == (0, 8)


def test_three_million_tokens_are_packed_quickly():
    documents = [np.ones(5000, np.int32)] * 600
    start = time.perf_counter()
    rows = pack_documents(documents, 128)
    assert time.perf_counter() - start < 2
    assert rows.weights.sum(dtype=np.float64) == 600 * 4999


def test_an_end_of_sequence_of_id_0_is_trained_though_padding_is_0_too():
    rows = pack_documents([np.array([5, 6, 0], np.int32), np.array([7, 0], np.int32)], 8)
    assert rows.targets[0, :4].tolist() == [6, 0, 7, 0]
    assert rows.weights[0].tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    example = (np.array([5, 6, 0], np.int32), np.array([0, 1, 1]))
    packed = pack_examples([example], 8)
    assert packed.weights[0].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
