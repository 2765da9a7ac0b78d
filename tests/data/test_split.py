"""Which documents are used and held out."""

import pytest

from tlt_jax.config import ConfigError
from tlt_jax.data.sources import Document
from tlt_jax.data.split import choose, held_out_names, unit_hash, without_duplicates

NAMES = [f"file{i}.py" for i in range(400)]


def test_duplicates_keep_the_first():
    documents = [Document("a", "x"), Document("b", "y"), Document("c", "x")]
    assert [d.name for d in without_duplicates(documents)] == ["a", "b"]


def test_hash_is_a_fixed_number():
    assert unit_hash("held_out", 0, "a.py") == 0.21232889802010035
    assert 0 <= unit_hash("held_out", 1, "\udcff.py") < 1  # a file name that is not UTF-8


def test_share_and_stability():
    held = held_out_names(NAMES, 0.1, 0, "documents")
    assert 20 < len(held) < 65
    more = held_out_names([*NAMES, *(f"new{i}" for i in range(50))], 0.1, 0, "documents")
    assert {name for name in more if name in NAMES} == held  # new files move no others
    assert held_out_names(list(reversed(NAMES)), 0.1, 0, "documents") == held
    assert held_out_names(NAMES, 0.1, 1, "documents") != held


def test_both_sides_hold_something():
    for fraction in (1e-9, 0.999999):
        assert len(held_out_names(["a", "b"], fraction, 0, "documents")) == 1
    with pytest.raises(ConfigError, match="1 documents found; expected at least 2"):
        held_out_names(["a", "a"], 0.5, 0, "documents")


def test_chosen_by_seed():
    documents = [Document(name, name) for name in NAMES]
    assert choose(documents, None, 0) == choose(documents, 400, 0) == documents
    some = choose(documents, 10, 0)
    assert len(some) == 10 and some == [d for d in documents if d in some]
    assert set(some) <= set(choose(documents, 11, 0))
    assert some != choose(documents, 10, 1)
