"""From a data config to what the stages train on: read, split, train a tokenizer, encode, pack; cached by a digest."""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tlt_jax.config import ConfigError
from tlt_jax.config.data_sections import DataConfig
from tlt_jax.config.load import redacted
from tlt_jax.data import cache
from tlt_jax.data.packing import PackedRows, pack_documents
from tlt_jax.data.sources import Document, read_documents
from tlt_jax.data.split import choose, held_out_names, without_duplicates
from tlt_jax.data.tasks import Tasks, read_pairs, tokenize_pairs
from tlt_jax.text import Tokenizer, load_tokenizer, train_tokenizer
from tlt_jax.text.tokenizer import from_json

FORMAT = 2  # of an entry of the cache; a change to what is computed here, or how it is stored, takes the next number
CHUNK = 32  # documents encoded between two reports of progress

Progress = Callable[[str, float], None]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Prepared data, as rows to train and evaluate on and as tasks; `summary` holds counts and the digest.

    `bytes_per_token`: UTF-8 bytes of the held-out documents over the target tokens (EOS among them) that stand for
    them, so that bits per byte = nats per token / ln 2 / bytes_per_token.
    """

    tokenizer: Tokenizer
    train: PackedRows
    held_out: PackedRows
    train_tasks: Tasks
    held_out_tasks: Tasks
    bytes_per_token: float
    summary: dict[str, Any]


@dataclass(frozen=True, eq=False)
class _Tokens:
    """What an entry of the cache holds; packing is quick, and done when read."""

    tokenizer: Tokenizer
    train: list[np.ndarray]
    held_out: list[np.ndarray]
    train_tasks: Tasks
    held_out_tasks: Tasks
    counts: dict[str, Any]


def prepare(config: DataConfig, seed: int, tokenizer_path: str | None, on_progress: Progress) -> Corpus:
    """The corpus of `config`, from the cache if an entry of the same digest is whole there, else built and stored
    there.

    The tokenizer is config.tokenizer.path's, else `tokenizer_path`'s (that of the model to start from), else trained
    on the train documents alone. `on_progress(label, fraction)` is called often. Deterministic in its arguments and
    the data read. Raises ConfigError for sources, lines and files that cannot be used, and for a corpus without two
    documents.
    """
    on_progress("reading", 0.0)
    found, skipped = read_documents(config.source)
    on_progress("reading", 0.5)
    distinct = without_duplicates(found)
    documents = choose(distinct, config.max_documents, seed)
    path = config.tokenizer.path or tokenizer_path
    given = load_tokenizer(path) if path else None
    digest = _digest(config, seed, documents, given)
    on_progress("reading", 1.0)
    counts = {
        "files": len(documents),
        "duplicates": len(found) - len(distinct),
        "not_chosen": len(distinct) - len(documents),
        "skipped": sum(skipped.values()),
        **{f"skipped_{reason}": count for reason, count in skipped.items()},
        "bytes": sum(_bytes(document.text) for document in documents),
        "digest": digest,
    }
    return _cached(config, digest, lambda: _build(config, seed, documents, given, on_progress), counts, on_progress)


def _cached(
    config: DataConfig, digest: str, build: Callable[[], _Tokens], counts: dict[str, Any], on_progress: Progress
) -> Corpus:
    folder = Path(config.cache_dir).expanduser()
    built: list[_Tokens] = []

    def fill(path: Path) -> None:
        built.append(build())
        _store(path, built[0])

    try:
        tokens = _load(folder, digest, on_progress)
        is_cached = tokens is not None
        if tokens is None:
            cache.write_entry(folder, digest, fill)  # a folder that cannot be written is found before the work
            tokens = built[0]
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir is {config.cache_dir!r}; expected a folder that can be written ({error})"
        ) from None
    on_progress("packing", 0.0)
    train = pack_documents(tokens.train, config.context_length)
    held_out = pack_documents(tokens.held_out, config.context_length)
    on_progress("packing", 1.0)
    bytes_per_token = tokens.counts["held_out_bytes"] / max(1, int(held_out.weights.sum(dtype=np.float64)))
    summary = {
        **counts,
        **tokens.counts,
        "vocab_size": tokens.tokenizer.vocab_size,
        "train_rows": len(train),
        "held_out_rows": len(held_out),
        "train_tasks": len(tokens.train_tasks),
        "held_out_tasks": len(tokens.held_out_tasks),
        "bytes_per_token": bytes_per_token,
        "cached": is_cached,
    }
    tasks = tokens.train_tasks, tokens.held_out_tasks
    return Corpus(tokens.tokenizer, train, held_out, *tasks, bytes_per_token, summary)


def _build(
    config: DataConfig, seed: int, documents: Sequence[Document], given: Tokenizer | None, on_progress: Progress
) -> _Tokens:
    names = held_out_names([document.name for document in documents], config.held_out_fraction, seed, "documents")
    train = [document for document in documents if document.name not in names]
    held_out = [document for document in documents if document.name in names]
    tokenizer = given or _train(train, config.tokenizer.vocab_size, on_progress)
    encoded = _encode([*train, *held_out], tokenizer, on_progress)
    progress = partial(on_progress, "reading tasks")
    train_pairs, held_out_pairs, pair_counts = read_pairs(train, held_out, config, seed, progress)
    limits = config.tasks.max_prompt_tokens, config.tasks.max_completion_tokens
    both = [(train_pairs, "encoding tasks"), (held_out_pairs, "encoding held-out tasks")]
    (train_tasks, dropped), (held_out_tasks, also) = [
        tokenize_pairs(pairs, tokenizer, *limits, partial(on_progress, label)) for pairs, label in both
    ]
    counts = {
        "train_files": len(train),
        "held_out_files": len(held_out),
        "held_out_bytes": sum(_bytes(document.text) for document in held_out),
        "tokens": sum(len(ids) for ids in encoded),
        "train_tokens": sum(len(ids) for ids in encoded[: len(train)]),
        "held_out_tokens": sum(len(ids) for ids in encoded[len(train) :]),
        "functions": pair_counts["task_pairs"] if config.tasks.kind == "python_functions" else 0,
        **pair_counts,
        **{reason: dropped.get(reason, 0) + also.get(reason, 0) for reason in {**dropped, **also}},
    }
    return _Tokens(tokenizer, encoded[: len(train)], encoded[len(train) :], train_tasks, held_out_tasks, counts)


def _train(documents: Sequence[Document], vocab_size: int, on_progress: Progress) -> Tokenizer:
    def texts():
        for index, document in enumerate(documents):
            on_progress("training the tokenizer", 0.5 * index / len(documents))  # the merges take about as long again
            yield document.text

    tokenizer = train_tokenizer(texts(), vocab_size)
    on_progress("training the tokenizer", 1.0)
    return tokenizer


def _encode(documents: Sequence[Document], tokenizer: Tokenizer, on_progress: Progress) -> list[np.ndarray]:
    """[bos] tokens [eos] of each document, int32."""
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    encoded = []
    for start in range(0, len(documents), CHUNK):
        on_progress("encoding", start / len(documents))
        ids = tokenizer.encode_many([document.text for document in documents[start : start + CHUNK]])
        encoded += [np.array([*bos, *tokens, tokenizer.eos_id], np.int32) for tokens in ids]
    on_progress("encoding", 1.0)
    return encoded


def _store(path: Path, tokens: _Tokens) -> None:
    for name, arrays in _ragged(tokens).items():
        cache.save_ragged(path, name, arrays)
    (path / "tokenizer.json").write_text(tokens.tokenizer.json, encoding="utf-8")
    meta = {"counts": tokens.counts, "bos_id": tokens.tokenizer.bos_id, "eos_id": tokens.tokenizer.eos_id}
    (path / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _ragged(tokens: _Tokens) -> dict[str, list[np.ndarray]]:
    return {
        "train": tokens.train,
        "held_out": tokens.held_out,
        "train_prompts": tokens.train_tasks.prompts,
        "train_completions": tokens.train_tasks.completions,
        "held_out_prompts": tokens.held_out_tasks.prompts,
        "held_out_completions": tokens.held_out_tasks.completions,
    }


def _load(folder: Path, digest: str, on_progress: Progress) -> _Tokens | None:
    """The entry if it is there and whole; a damaged one is logged and removed."""
    on_progress("looking for prepared data", 0.0)
    entry = cache.check_entry(folder, digest)
    if entry is None:
        return None
    on_progress("looking for prepared data", 0.5)
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        text = (entry / "tokenizer.json").read_text(encoding="utf-8")
        names = ("train", "held_out", "train_prompts", "train_completions", "held_out_prompts", "held_out_completions")
        train, held_out, *tasks = (cache.load_ragged(entry, name) for name in names)
    except (OSError, ValueError) as error:
        cache.discard_entry(folder, digest, str(error))
        return None
    tokenizer = from_json(text, meta["bos_id"], meta["eos_id"])
    return _Tokens(tokenizer, train, held_out, Tasks(tasks[0], tasks[1]), Tasks(tasks[2], tasks[3]), meta["counts"])


def _digest(config: DataConfig, seed: int, documents: Sequence[Document], given: Tokenizer | None) -> str:
    """SHA-256 over all that the prepared data depend on, each part with its length."""
    settings = redacted(config)
    del settings["cache_dir"], settings["source"]["hub_token"], settings["tokenizer"]["path"]
    versions = [FORMAT, tokenizers.__version__, sys.version_info[:2]]  # Python's, for it parses the functions
    digest = hashlib.sha256()

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)

    add(json.dumps([settings, seed, versions], sort_keys=True).encode())
    add(b"" if given is None else json.dumps([given.json, given.bos_id, given.eos_id]).encode())
    if config.tasks.kind == "jsonl":
        path = Path(config.tasks.path or "").expanduser()
        add(path.read_bytes() if path.is_file() else b"")
    for document in documents:
        add(document.name.encode("utf-8", "surrogateescape"))
        add(document.text.encode())
    return digest.hexdigest()


def _bytes(text: str) -> int:
    return len(text.encode("utf-8"))
