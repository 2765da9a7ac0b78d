"""Token sequences into rows of one length. Shapes: N rows, S = context_length inputs a row, T tokens in all."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from tlt_jax.config import ConfigError


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows to train or score on, all [N, S]; a random-access source of dicts of [S] arrays."""

    tokens: np.ndarray  # int32: inputs; 0 in padding
    targets: np.ndarray  # int32: the token after each input
    weights: np.ndarray  # float32: 1 where the target is to be predicted, else 0
    segments: np.ndarray  # int32: 1, 2, 3... for the row's sequences, which do not see each other; 0 is padding
    positions: np.ndarray  # int32: from 0 in every segment of the row; 0 in padding

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: getattr(self, name)[index] for name in ROW_FIELDS}


ROW_FIELDS = tuple(field.name for field in fields(PackedRows))


def pack_documents(documents: Sequence[np.ndarray], context_length: int) -> PackedRows:
    """Documents ([bos] tokens [eos], each at least one token) end to end, cut into rows of `context_length` inputs.

    Every token but a document's first is a target exactly once, also across a cut; the last row is padded. A document
    that goes on in the next row starts a new segment there, at position 0.
    """
    lengths = np.array([len(document) for document in documents], np.int64)
    assert len(lengths) == 0 or lengths.min() > 0, "documents to pack hold at least one token"
    total = int(lengths.sum())
    rows = -(-total // context_length)
    cells = rows * context_length
    stream = np.zeros(cells + 1, np.int32)
    if total:
        stream[:total] = np.concatenate(documents)
    ends = np.cumsum(lengths)
    starts_document = np.zeros(cells, bool)
    starts_document[(ends - lengths)[: len(lengths)]] = True
    weights = np.zeros(cells, np.float32)
    weights[:total] = 1
    weights[ends - 1] = 0  # the next token is another document's, or padding
    real = (np.arange(cells) < total).reshape(rows, context_length)
    starts = starts_document.reshape(rows, context_length)
    starts[:, :1] = True
    columns = np.arange(context_length, dtype=np.int32)
    segments = np.cumsum(starts, axis=1, dtype=np.int32)
    positions = columns - np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
    shape = (rows, context_length)
    return PackedRows(
        tokens=stream[:-1].reshape(shape),
        targets=stream[1:].reshape(shape),
        weights=weights.reshape(shape),
        segments=np.where(real, segments, 0).astype(np.int32),
        positions=np.where(real, positions, 0).astype(np.int32),
    )


def pack_examples(examples: Sequence[tuple[np.ndarray, np.ndarray]], context_length: int) -> PackedRows:
    """(tokens [n], loss_mask [n]) examples, whole, into rows by first-fit-decreasing; equal lengths keep their order.

    An example takes n - 1 inputs, as its last token is a target alone; weights at an input are the loss mask of its
    target. Raises ConfigError for an example of fewer than 2 tokens or more than context_length + 1, for it is never
    cut.
    """
    sizes = np.array([len(tokens) - 1 for tokens, _ in examples], np.int64)
    for index in np.flatnonzero((sizes < 1) | (sizes > context_length))[:1]:
        raise ConfigError(
            f"example {index} holds {sizes[index] + 1} tokens; expected 2 to {context_length + 1}"
            f" (data.context_length is {context_length})"
        )
    row_of, count = _first_fit_decreasing(sizes, context_length)
    arrays = {name: np.zeros((count, context_length), np.int32) for name in ROW_FIELDS}
    arrays["weights"] = arrays["weights"].astype(np.float32)
    used = np.zeros(count, np.int64)
    segment = np.zeros(count, np.int32)
    for index, (tokens, mask) in enumerate(examples):
        row, size = row_of[index], sizes[index]
        cells = slice(used[row], used[row] + size)
        used[row] += size
        segment[row] += 1
        arrays["tokens"][row, cells] = tokens[:-1]
        arrays["targets"][row, cells] = tokens[1:]
        arrays["weights"][row, cells] = np.asarray(mask)[1:] != 0
        arrays["segments"][row, cells] = segment[row]
        arrays["positions"][row, cells] = np.arange(size)
    return PackedRows(**arrays)


def pack_sequences(arrays: dict[str, np.ndarray], lengths: np.ndarray, multiple: int) -> dict[str, np.ndarray]:
    """Whole right-padded sequences, [B, T] arrays of `lengths` [B], into fewer rows: [R, T] arrays, with `segments` and
    `positions` added.

    R is rounded up to a multiple of `multiple` and of about B / 8, so that at most 8 shapes occur; what is not used is
    0 and of segment 0.
    """
    count, width = next(iter(arrays.values())).shape
    row_of, used_rows = _first_fit_decreasing(lengths, width)
    unit = -(-max(count // 8, 1) // multiple) * multiple
    rows = -(-used_rows // unit) * unit
    packed = {name: np.zeros((rows, width), array.dtype) for name, array in arrays.items()}
    packed |= {name: np.zeros((rows, width), np.int32) for name in ("segments", "positions")}
    used, segment = np.zeros(rows, np.int64), np.zeros(rows, np.int32)
    for index, (row, size) in enumerate(zip(row_of, lengths, strict=True)):
        cells = slice(used[row], used[row] + size)
        used[row] += size
        segment[row] += 1
        for name, array in arrays.items():
            packed[name][row, cells] = array[index, :size]
        packed["segments"][row, cells] = segment[row]
        packed["positions"][row, cells] = np.arange(size)
    return packed


def _first_fit_decreasing(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """The row of each size, and the count of rows."""
    row_of = np.zeros(len(sizes), np.int64)
    free = np.full(len(sizes), capacity, np.int64)
    count = 0
    for index in np.argsort(-sizes, kind="stable"):
        row = int(np.argmax(free[: count + 1] >= sizes[index]))  # row `count` is untouched, so there is always one
        row_of[index] = row
        free[row] -= sizes[index]
        count = max(count, row + 1)
    return row_of, count
