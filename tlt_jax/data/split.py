"""Which documents are used, and which are held out: pure, by hashes of names, so that new files move no others."""

import hashlib
from collections.abc import Sequence

from tlt_jax.config import ConfigError
from tlt_jax.data.sources import Document


def without_duplicates(documents: Sequence[Document]) -> list[Document]:
    """The first document of each text, in order."""
    first: dict[bytes, Document] = {}
    for document in documents:
        first.setdefault(hashlib.sha256(document.text.encode("utf-8")).digest(), document)
    return list(first.values())


def choose(documents: Sequence[Document], count: int | None, seed: int) -> list[Document]:
    """At most `count` documents (None: all), chosen by the seed and their names, in their order."""
    if count is None or count >= len(documents):
        return list(documents)
    ranked = sorted(documents, key=lambda document: unit_hash("choose", seed, document.name))
    chosen = {document.name for document in ranked[:count]}
    return [document for document in documents if document.name in chosen]


def held_out_names(names: Sequence[str], fraction: float, seed: int, what: str) -> frozenset[str]:
    """The names held out: those whose hash with the seed, uniform in [0, 1), lies below `fraction`.

    Where that leaves a side empty (a handful of names), the nearest name to the threshold changes sides. Raises
    ConfigError, saying `what` there is too little of, if there are fewer than two names.
    """
    ranked = sorted(set(names), key=lambda name: (unit_hash("held_out", seed, name), name))
    if len(ranked) < 2:
        raise ConfigError(
            f"data: {len(ranked)} {what} found; expected at least 2, one to train on and one to hold out"
            f" (held_out_fraction {fraction})"
        )
    count = sum(unit_hash("held_out", seed, name) < fraction for name in ranked)
    return frozenset(ranked[: min(max(count, 1), len(ranked) - 1)])


def unit_hash(purpose: str, seed: int, name: str) -> float:
    """A number in [0, 1) that (purpose, seed, name) fix, on every machine and in every process."""
    digest = hashlib.sha256(f"{purpose}\0{seed}\0{name}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
