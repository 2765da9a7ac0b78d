"""What a run directory holds, as the report reads it: whatever is sound, and sentences on what is not."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tlt_jax.observe.files import read_json
from tlt_jax.observe.metrics import read_rows

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFiles:
    """A run's files. `records` are the phases of results.json; `missing` says what is lacking or left out."""

    config_text: str
    config: dict[str, Any]
    rows: list[Row]
    samples: list[Row]
    records: list[Row]
    facts: dict[str, Any]
    account: dict[str, Any]
    finished: bool
    missing: list[str]


def read_run_files(run_dir: Path) -> RunFiles:
    """Reads what is there; nothing in it can make this fail."""
    missing: list[str] = []
    config_text, config = _read(missing, run_dir, "config.yaml", _read_config, ("", {}))
    rows: list[Row] = _read(missing, run_dir, "metrics.jsonl", read_rows, [])
    samples: list[Row] = _read(missing, run_dir, "samples.jsonl", read_rows, [])
    results: Row = _read(missing, run_dir, "results.json", read_json, {})
    records = results.get("phases")
    return RunFiles(
        config_text,
        config,
        _sound(missing, rows, "metrics.jsonl", _is_row),
        _sound(missing, samples, "samples.jsonl", _is_sample),
        _sound(missing, records if isinstance(records, list) else [], "results.json", _is_record),
        section(results, "facts"),
        section(results, "account"),
        bool(results.get("finished")),
        missing,
    )


def section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """The mapping `name` of a tree that somebody else may have written; {} where it is something else."""
    value = tree.get(name)
    return value if isinstance(value, dict) else {}


def _read(missing: list[str], run_dir: Path, name: str, reader: Callable[[Path], Any], default: Any) -> Any:
    path = run_dir / name
    if not path.exists():
        missing.append(f"{name} is missing.")
        return default
    try:
        value = reader(path)
    except Exception as error:  # YAML's and JSON's are of many kinds
        # Named in the report itself: one damaged file must not hide what the others say.
        logging.getLogger(__name__).warning("the report leaves out %s: %s", name, error)
        missing.append(f"{name} could not be read and is left out: {error}")
        return default
    if not value and name != "samples.jsonl":  # what should have samples and has none is said by phase
        missing.append(f"{name} is empty.")
    return value if isinstance(value, type(default)) else default


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    return text, config if isinstance(config, dict) else {}


def _sound(missing: list[str], entries: list[Any], name: str, fits: Callable[[Any], bool]) -> list[Row]:
    """The entries whose values are of the kinds that a run writes; how many are not is said in `missing`."""
    kept = [entry for entry in entries if fits(entry)]
    if len(kept) < len(entries):
        missing.append(f"{name}: {len(entries) - len(kept)} entries hold values of another kind and are left out.")
    return kept


def _is_row(row: Row) -> bool:
    measured = {name: value for name, value in row.items() if "/" in name or name == "seconds"}
    return _numbers(measured) and isinstance(row.get("phase_step"), int | None) and _is_named(row)


def _is_sample(row: Row) -> bool:
    return _is_named(row) and all(
        isinstance(row.get(name), str | None) for name in ("prompt", "completion", "reference")
    )


def _is_record(entry: Any) -> bool:
    if not isinstance(entry, dict) or not _is_named(entry):
        return False
    parts = [entry[name] for name in ("before", "after", "time") if entry.get(name) is not None]
    return (
        all(map(_numbers, parts))
        and _is_insight(entry)
        and _numbers({name: entry.get(name) for name in ("steps", "tokens", "seconds")})
    )


def _is_insight(entry: Row) -> bool:
    """Whether the lists on health, compiled programs, buffers and drafting, where there are any, hold what they
    should."""
    texts = {"health": ("name", "text"), "programs": ("name",), "buffers": ("name",), "drafting": ("drafter",)}
    measured = ("size", "draft_length", "round_ms", "tokens_per_call", "tokens_per_second", "share")
    numbers = {
        "programs": ("flops", "arguments", "temporaries", "output", "aliased"),
        "buffers": ("bytes",),
        "drafting": measured,
    }
    for field, names in texts.items():
        items = [] if entry.get(field) is None else entry[field]
        if not isinstance(items, list):
            return False
        for item in items:
            if not isinstance(item, dict) or not all(isinstance(item.get(name), str) for name in names):
                return False
            if not _numbers({name: item.get(name) for name in numbers.get(field, ())}):
                return False
    return True


def _is_named(entry: Row) -> bool:
    return all(isinstance(entry.get(name), str | None) for name in ("stage", "phase", "note"))


def _numbers(values: Any) -> bool:
    return isinstance(values, dict) and all(
        isinstance(value, int | float | None) and not isinstance(value, bool) for value in values.values()
    )
