"""Batches of packed rows: endless, shuffled and resumable for training (over Grain), in order for evaluation.

Shapes: A accumulation (microbatches an update), B rows a microbatch, S context_length, P processes' parts of a batch.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tlt_jax.config import ConfigError
from tlt_jax.data.packing import ROW_FIELDS, PackedRows

Batch = dict[str, np.ndarray]


class Loader:
    """An endless iterator of updates' batches; its state is exact to the sample, at any step, for any number of parts:
    together they are the rows that a single process would take. Threads that read ahead change neither the order nor
    the state, which counts what was handed out.
    """

    def __init__(
        self,
        rows: PackedRows,
        batch_size: int,
        accumulation: int,
        seed: int,
        section: str,
        part: tuple[int, int],
        workers: int,
        prefetch_factor: int,
    ):
        import grain  # takes a while: not paid by whoever loads no data

        if not len(rows):
            raise ConfigError("data: no rows to train on; expected at least one")
        if batch_size % accumulation:
            raise ConfigError(f"`{section}.accumulation` ({accumulation}) must divide batch_size ({batch_size})")
        self._section, self._accumulation, self._batch_size = section, accumulation, batch_size
        # Repeated before batched: fewer rows than a batch work, and no row is dropped at an epoch's end.
        dataset = grain.MapDataset.source(rows).seed(seed).shuffle().repeat()
        index, parts = part
        dataset = dataset[index::parts].batch(batch_size // parts, drop_remainder=True)
        ahead = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=workers * prefetch_factor)
        self._iterator = iter(dataset.to_iter_dataset(ahead))

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        return {name: array.reshape(self._accumulation, -1, array.shape[-1]) for name, array in batch.items()}

    def get_state(self) -> dict[str, Any]:
        """JSON-able: where the next batch starts, and what that is counted in."""
        return {"batch_size": self._batch_size, "position": self._iterator.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was taken. Raises ConfigError if it counts other batches."""
        if state["batch_size"] != self._batch_size:
            raise ConfigError(
                f"`{self._section}.batch_size`: the run began with {state['batch_size']}, now {self._batch_size};"
                " expected the same, for its place in the data is counted in batches, or a new run.name"
            )
        self._iterator.set_state(dict(state["position"]))


def make_loader(
    rows: PackedRows,
    batch_size: int,
    accumulation: int,
    seed: int,
    section: str = "pretrain",
    part: tuple[int, int] = (0, 1),
    workers: int = 0,
    prefetch_factor: int = 1,
) -> Loader:
    """An iterator of dicts of [A, B / P, S] arrays with A * B = batch_size; every epoch in another order that the seed
    fixes. `section` is the config's that gives the sizes, for messages; `part` (which, of P) is this process's.
    `workers` threads read up to `prefetch_factor` batches each ahead; without any, a batch is read as it is asked for.
    """
    return Loader(rows, batch_size, accumulation, seed, section, part, workers, prefetch_factor)


def held_out_batches(rows: PackedRows, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
    """The first `limit` rows (None: all) in order, as dicts of [1, batch_size, S] arrays.

    The last batch is filled up with rows of weight 0 and segment 0, so that all batches have one shape.
    """
    count = len(rows) if limit is None else min(limit, len(rows))
    for start in range(0, count, batch_size):
        stop = min(start + batch_size, count)
        missing = ((0, batch_size - (stop - start)), (0, 0))
        yield {name: np.pad(getattr(rows, name)[start:stop], missing)[None] for name in ROW_FIELDS}
