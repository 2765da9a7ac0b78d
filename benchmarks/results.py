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


def plot(ratios: dict[str, dict[str, dict[str, float]]], what: str, file: str) -> None:
    """Draws {setting: {variant: a ratio as of `paired`}}, a panel a setting: bars with their intervals, and 1."""
    from matplotlib.figure import Figure

    longest = max(map(len, ratios.values()))
    figure = Figure(figsize=(4 + 2.5 * len(ratios), 1.5 + 0.28 * longest), layout="constrained")
    panels = figure.subplots(1, len(ratios), squeeze=False, sharey=True)[0]
    for panel, (setting, rows) in zip(panels, ratios.items(), strict=True):
        names, found = list(rows)[::-1], list(rows.values())[::-1]
        middle = np.array([row["ratio"] for row in found])
        ends = np.array([[row["ratio"] - row["low"] for row in found], [row["high"] - row["ratio"] for row in found]])
        panel.barh(names, middle, xerr=ends, color="tab:blue", ecolor="black", error_kw={"linewidth": 1})
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set_title(setting, fontsize=9)
        panel.set_xlabel(what, fontsize=8)
        panel.tick_params(labelsize=8)
    figure.savefig(file)
