"""Where documents come from: one function a kind of source, in the registry SOURCES.

Each returns its documents in an order that depends on nothing but the data, and counts of what it left out.
"""

import gzip
import json
import sysconfig
import tokenize
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tlt_jax.config import ConfigError
from tlt_jax.config.data_sections import SourceConfig

LEFT_OUT_OF_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class Document:
    """One text; `name` is stable from run to run and unique within its source."""

    name: str
    text: str


# What every run directory has, from its start on, and every entry of the cache of prepared data.
OUR_FOLDERS = ((".lock", "log.txt"), ("manifest.json", "meta.json"))
Found = tuple[list[Document], dict[str, int]]


def read_documents(source: SourceConfig) -> Found:
    """All documents of `source` that hold more than whitespace, and counts of what was skipped, by reason.

    Raises ConfigError if the source is missing, unreadable or without a single document.
    """
    documents, skipped = SOURCES[source.kind](source)
    kept = [document for document in documents if document.text.strip()]
    skipped = {**skipped, "empty": len(documents) - len(kept)}
    if not kept:
        where = source.path or source.hub_name or source.kind
        raise ConfigError(f"data.source: no document found in {where!r} (skipped: {skipped}); expected at least one")
    return kept, skipped


def read_stdlib(source: SourceConfig) -> Found:
    """The .py files of the running Python's standard library, without tests and installed packages; names are relative.

    A file's encoding is what PEP 263 says; one that cannot be decoded is skipped and counted as `unreadable`.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    documents, skipped = [], Counter(unreadable=0)
    for name, path in _files_below(root, "**/*.py"):
        if LEFT_OUT_OF_STDLIB.intersection(name.split("/")):
            continue
        try:
            with tokenize.open(path) as file:
                documents.append(Document(name, file.read()))
        except (SyntaxError, UnicodeDecodeError, OSError):
            skipped["unreadable"] += 1
    return documents, dict(skipped)


def read_directory(source: SourceConfig) -> Found:
    """The UTF-8 files of the folder `source.path` that match `source.pattern`; names are relative to the folder.

    Hidden files and folders, run directories and prepared data are passed over. Counted and skipped: `binary` (a
    zero byte), `unreadable` (not UTF-8, no access).
    """
    root = Path(source.path or "").expanduser()
    if not root.is_dir():
        raise ConfigError(f"data.source.path is {source.path!r}; expected a folder that exists")
    documents, skipped = [], Counter(binary=0, unreadable=0)
    is_ours = cache(lambda path: any(all((path / name).is_file() for name in files) for files in OUR_FOLDERS))
    for name, path in _files_below(root, source.pattern):
        inside = list(path.relative_to(root).parents)[:-1]
        if any(part.startswith(".") for part in name.split("/")) or any(is_ours(root / folder) for folder in inside):
            continue
        try:
            content = path.read_bytes()
            if b"\0" in content:
                skipped["binary"] += 1
            else:
                documents.append(Document(name, content.decode("utf-8-sig")))
        except (UnicodeDecodeError, OSError):
            skipped["unreadable"] += 1
    return documents, dict(skipped)


def read_jsonl(source: SourceConfig) -> Found:
    """One document a line of the JSONL file `source.path` (.gz too), named by file and line number; see
    `read_records`.
    """
    path = source.path or ""
    fields = {"data.source.text_field": source.text_field}
    records, bad = read_records(path, fields, source.on_bad_line, "data.source.path")
    file = Path(path).name
    return [Document(f"{file}:{line}", texts[0]) for line, texts in records], {"bad_lines": bad}


def read_hub(source: SourceConfig) -> Found:
    """One document a record of the data set `source.hub_name`, a name on the hub or a local folder; needs the extra
    `hub`.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            "data.source.kind is 'hub', which needs the extra `hub`; expected: pip install 'tlt-jax[hub]'"
        ) from None
    token = source.hub_token.get_secret_value() if source.hub_token else None
    try:
        records = datasets.load_dataset(source.hub_name, split=source.hub_split, token=token)
    except Exception as error:  # of many kinds: network, access, names, formats
        message = str(error).replace(token, "<redacted>") if token else str(error)
        raise ConfigError(
            f"data.source.hub_name is {source.hub_name!r} (split {source.hub_split!r}); it cannot be loaded: {message}"
        ) from None
    rows = ((f"record {index}", record) for index, record in enumerate(records))
    fields = {"data.source.text_field": source.text_field}
    found, bad = _texts_of(rows, fields, source.on_bad_line, str(source.hub_name))
    return [Document(f"{source.hub_split}:{place.split()[-1]}", texts[0]) for place, texts in found], {"bad_lines": bad}


SOURCES: dict[str, Callable[[SourceConfig], Found]] = {
    "stdlib": read_stdlib,
    "directory": read_directory,
    "jsonl": read_jsonl,
    "hub": read_hub,
}


def read_records(
    path: str, fields: dict[str, str], on_bad_line: str, key: str
) -> tuple[list[tuple[int, list[str]]], int]:
    """The texts of `fields` ({config key: field}) in each line of a JSONL file, with its line number from 1, and the
    count of bad lines skipped.

    A line may end in CRLF, may be of any length, and is ignored if blank. A bad line is one that is not UTF-8, not
    JSON, not an object, or whose field is missing, null, not a string, or text that UTF-8 cannot hold: ConfigError
    with file and line, or skipped and counted with on_bad_line="skip". A missing file raises ConfigError naming
    `key`.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{key} is {path!r}; expected a JSONL file that exists")
    found, bad = _texts_of(_lines(file), fields, on_bad_line, str(path))
    return [(int(place.split()[-1]), texts) for place, texts in found], bad


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:  # in bytes: only "\n" ends a line, and one bad line does not spoil the rest
            for number, line in enumerate(file, 1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield f"line {number}", line
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"file {str(path)!r} cannot be read: {error}") from None


def _texts_of(
    rows: Iterable[tuple[str, Any]], fields: dict[str, str], on_bad_line: str, where: str
) -> tuple[list[tuple[str, list[str]]], int]:
    found, bad = [], 0
    for place, row in rows:
        try:
            found.append((place, [_text_field(row, field, key) for key, field in fields.items()]))
        except _BadLine as error:
            if on_bad_line != "skip":
                raise ConfigError(
                    f"{where}, {place}: {error}; data.source.on_bad_line=skip leaves such lines out"
                ) from None
            bad += 1
    return found, bad


class _BadLine(Exception):
    """Why a line cannot be used."""


def _text_field(row: Any, field: str, key: str) -> str:
    if isinstance(row, bytes):
        try:
            row = json.loads(row.decode("utf-8"))
        except json.JSONDecodeError as error:
            raise _BadLine(f"not JSON ({error.msg}, column {error.colno})") from None
        except (ValueError, RecursionError) as error:
            raise _BadLine(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise _BadLine(f"expected an object, got {type(row).__name__}")
    if field not in row:
        raise _BadLine(f"no field {field!r} (`{key}`); it has {', '.join(sorted(map(str, row))[:8]) or 'none'}")
    if not isinstance(row[field], str):
        kind = "null" if row[field] is None else type(row[field]).__name__
        raise _BadLine(f"field {field!r} (`{key}`) is {kind}; expected text")
    try:
        row[field].encode("utf-8")
    except UnicodeEncodeError:
        raise _BadLine(f"field {field!r} holds a lone surrogate, which is not text") from None
    return row[field]


def _files_below(root: Path, pattern: str) -> list[tuple[str, Path]]:
    """(name relative to root with "/", path) of the files that match, sorted by name."""
    try:
        paths = [path for path in root.glob(pattern) if path.is_file()]
    except (ValueError, NotImplementedError, IndexError) as error:
        raise ConfigError(
            f"data.source.pattern is {pattern!r}; expected a relative glob like '**/*.py' ({error})"
        ) from None
    return sorted((path.relative_to(root).as_posix(), path) for path in paths)
