"""The loader: shapes, orders, exact resumption; held-out batches."""

import json

import numpy as np
import pytest

from tlt_jax.config import ConfigError
from tlt_jax.data.loader import held_out_batches, make_loader
from tlt_jax.data.packing import ROW_FIELDS, PackedRows, pack_documents


def rows_of(count, length=4):
    """Row i holds i+1 alone."""
    return pack_documents([np.full(length, i + 1, np.int32) for i in range(count)], length)


def names(batch):
    return batch["tokens"][..., 0].ravel().tolist()


def test_shapes_and_types():
    batch = next(make_loader(rows_of(10), 6, 3, seed=0))
    assert {name: array.shape for name, array in batch.items()} == dict.fromkeys(
        ["tokens", "targets", "weights", "segments", "positions"], (3, 2, 4)
    )
    assert batch["weights"].dtype == np.float32 and batch["tokens"].dtype == np.int32


def test_each_epoch_shows_every_row_once_in_another_order():
    loader = make_loader(rows_of(12), 4, 1, seed=3)
    epochs = [[name for _ in range(3) for name in names(next(loader))] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(1, 13))] * 3
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(1, 13))


def test_the_seed_fixes_the_order_and_accumulation_does_not_change_it():
    def first(seed, accumulation=1):
        return names(next(make_loader(rows_of(40), 8, accumulation, seed)))

    assert first(0) == first(0) == first(0, 4)
    assert first(0) != first(1)


def test_epochs_run_on_across_a_batch():
    loader = make_loader(rows_of(5), 2, 1, seed=0)
    seen = [name for _ in range(5) for name in names(next(loader))]
    assert sorted(seen[:5]) == sorted(seen[5:]) == [1, 2, 3, 4, 5]


def test_fewer_rows_than_a_batch():
    assert sorted(names(next(make_loader(rows_of(2), 6, 2, seed=0)))) == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 6, 7, 11])  # 5 rows by 2: epochs end within and between batches
def test_resuming_is_exact_at_any_step(steps):
    loader = make_loader(rows_of(5), 2, 1, seed=7)
    for _ in range(steps):
        next(loader)
    state = json.loads(json.dumps(loader.get_state()))
    expected = [names(next(loader)) for _ in range(8)]
    fresh = make_loader(rows_of(5), 2, 1, seed=7)
    fresh.set_state(state)
    assert [names(next(fresh)) for _ in range(8)] == expected
    loader.set_state(state)  # and backwards
    assert [names(next(loader)) for _ in range(8)] == expected


def test_a_state_that_counts_other_batches_is_refused():
    state = make_loader(rows_of(5), 2, 1, seed=0).get_state()
    with pytest.raises(ConfigError, match=r"`finetune.warmup.batch_size`: the run began with 2, now 4"):
        make_loader(rows_of(5), 4, 1, 0, section="finetune.warmup").set_state(state)


def test_user_errors():
    with pytest.raises(ConfigError, match="no rows to train on"):
        make_loader(rows_of(0), 2, 1, 0)
    with pytest.raises(ConfigError, match=r"`pretrain.accumulation` \(2\) must divide batch_size \(3\)"):
        make_loader(rows_of(4), 3, 2, 0)


def test_held_out_batches_are_in_order_and_of_one_shape():
    batches = list(held_out_batches(rows_of(5), 2))
    assert [names(batch) for batch in batches] == [[1, 2], [3, 4], [5, 0]]
    assert {array.shape for batch in batches for array in batch.values()} == {(1, 2, 4)}
    assert not batches[-1]["weights"][0, 1].any() and not batches[-1]["segments"][0, 1].any()
    assert sum(batch["weights"].sum() for batch in batches) == rows_of(5).weights.sum()


def test_held_out_limit():
    assert [names(batch) for batch in held_out_batches(rows_of(5), 2, 3)] == [[1, 2], [3, 0]]
    assert [names(batch) for batch in held_out_batches(rows_of(2), 4, 100)] == [[1, 2, 0, 0]]
    assert list(held_out_batches(rows_of(0), 4)) == []


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_parts_of_processes_are_together_what_one_takes(accumulation):
    whole = make_loader(rows_of(40), 8, accumulation, seed=3)
    parts = [make_loader(rows_of(40), 8, accumulation, seed=3, part=(index, 2)) for index in range(2)]
    for _ in range(12):  # over an epoch's end
        expected, taken = next(whole), [next(part) for part in parts]
        assert taken[0]["tokens"].shape[:2] == (accumulation, 4 // accumulation)
        assert sorted(names(expected)) == sorted([*names(taken[0]), *names(taken[1])])


def test_a_place_in_the_data_holds_for_another_number_of_parts():
    half = make_loader(rows_of(40), 8, 1, seed=3, part=(1, 2))
    for _ in range(7):
        next(half)
    whole, fresh = (make_loader(rows_of(40), 8, 1, seed=3) for _ in range(2))
    whole.set_state(half.get_state())
    for _ in range(7):
        next(fresh)
    assert [names(next(whole)) for _ in range(3)] == [names(next(fresh)) for _ in range(3)]


@pytest.mark.parametrize(("workers", "factor"), [(1, 1), (1, 2), (3, 2)])
def test_reading_ahead_changes_neither_order_nor_place(workers, factor):
    def loader(workers=0, factor=1):
        return make_loader(rows_of(11), 4, 2, seed=5, workers=workers, prefetch_factor=factor)

    plain, ahead = loader(), loader(workers, factor)
    places = []
    for _ in range(9):  # over epochs' ends
        places.append(json.loads(json.dumps(plain.get_state())))
        assert ahead.get_state() == places[-1]
        expected, found = next(plain), next(ahead)
        assert all(np.array_equal(expected[name], found[name]) for name in expected)
    ahead.set_state(places[3])  # back, while batches are held ready
    fresh = loader(2, 3)
    fresh.set_state(places[3])
    plain.set_state(places[3])
    for _ in range(5):
        expected = names(next(plain))
        assert names(next(ahead)) == names(next(fresh)) == expected


def test_an_error_in_a_row_is_not_lost_in_a_thread():
    class Broken(PackedRows):
        def __getitem__(self, index):
            raise OSError("the disk is gone")

    rows = rows_of(5)
    broken = Broken(**{name: getattr(rows, name) for name in ROW_FIELDS})
    with pytest.raises(OSError, match="the disk is gone"):
        next(make_loader(broken, 2, 1, 0, workers=2, prefetch_factor=2))
