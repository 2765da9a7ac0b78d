"""A benchmark's last line: one JSON object, the same keys in all of them."""

import json
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any


def report(
    benchmark: str,
    machine: str,
    packages: Iterable[str],
    values: dict[str, Any],
    ratios: dict[str, Any],
    file: str | None,
) -> None:
    """Prints it, and writes it to `file` too where one is given; `packages` are those whose versions matter."""
    versions = {"python": platform.python_version()} | {name: version(name) for name in packages}
    result = {"benchmark": benchmark, "machine": machine, "versions": versions, "values": values, "ratios": ratios}
    line = json.dumps(result)
    if file:
        Path(file).write_text(line + "\n")
    print(line)
