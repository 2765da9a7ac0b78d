"""What benchmarks share: the last line, one JSON object with the same keys in all of them, and paired ratios."""

import json
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats


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


def paired(speeds: list[float], plain: list[float]) -> dict[str, float]:
    """The geometric mean of the rounds' ratios, and its 95 % interval by Student's t."""
    logs = np.log(np.array(speeds) / np.array(plain))
    half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5 if len(logs) > 1 else 0.0
    return {
        "ratio": float(np.exp(logs.mean())),
        "low": float(np.exp(logs.mean() - half)),
        "high": float(np.exp(logs.mean() + half)),
    }
