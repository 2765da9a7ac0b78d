"""A row of the table of bad inputs: what it breaks in the current folder, the words that must then be refused, and what
the message says."""

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple


class Broken:
    """What a row breaks, and holds while the program runs: `stack` lets go of it. `port` is what {port} stands for."""

    def __init__(self, stack: ExitStack):
        self.stack, self.port = stack, 0


class Row(NamedTuple):
    """`breaks` something in the current folder; the `words` after it must be refused with all that is in `said`."""

    breaks: Callable[[Broken], object]
    words: list[str]
    said: list[str]
    variables: dict[str, str] | None = None  # in a process of its own, with these


def nothing(_: Broken) -> None:
    """What is wrong lies in the words."""


def write(name: str, content: bytes | str) -> Callable[[Broken], object]:
    return lambda _: (
        Path(name).parent.mkdir(parents=True, exist_ok=True),
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content),
    )


def write_rows(name: str, rows: list[dict], folder: Path = Path()) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*overrides: str) -> list[str]:
    return ["run", "--config", "base.yaml", *overrides]


def resume(*overrides: str) -> list[str]:
    return run("run.name=standing", *overrides)


def each(*breaks: Callable[[Broken], object]) -> Callable[[Broken], object]:
    return lambda broken: [one(broken) for one in breaks]


def remove(name: str) -> Callable[[Broken], object]:
    return lambda _: shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink()


def cut(name: str, by: int) -> Callable[[Broken], object]:
    return lambda _: Path(name).write_bytes(Path(name).read_bytes()[:-by])
