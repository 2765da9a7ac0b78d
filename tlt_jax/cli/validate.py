"""validate: whether a config is right, without touching a device."""

import argparse
from collections.abc import Callable
from pathlib import Path

from tlt_jax.cli.codes import DONE
from tlt_jax.cli.options import add_config_options, config_of
from tlt_jax.config import Config, ConfigError
from tlt_jax.observe import check_trackers

EXAMPLES = """examples:
  tlt validate --config configs/quickstart.yaml
  tlt validate --config configs/quickstart.yaml speculation.drafter=ngram"""


def add(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser)


def main(arguments: argparse.Namespace) -> int:
    config = config_of(arguments)
    check_files(config)
    name, budget = arguments.config or "the default config", config.budget
    print(f"{name} is right: {', '.join(config.stages)}; {budget.total:g} {budget.unit}")
    return DONE


def check_files(config: Config) -> None:
    """Raises ConfigError for a file or folder that the config names and that is not there, or is of another kind, and
    for a tracker that is not installed."""
    check_trackers(config.run.trackers)
    source, tasks = config.data.source, config.data.tasks
    _expect(source.kind == "directory", "data.source.path", source.path, Path.is_dir, "a folder that exists")
    _expect(source.kind == "jsonl", "data.source.path", source.path, Path.is_file, "a file that exists")
    _expect(tasks.kind == "jsonl", "data.tasks.path", tasks.path, Path.is_file, "a file that exists")
    tokenizer = config.data.tokenizer.path
    _expect(True, "data.tokenizer.path", tokenizer, _is_tokenizer, "a tokenizer.json, or a folder that holds one")
    _expect(
        True,
        "model.init_from",
        config.model.init_from,
        _is_model,
        "a Hugging Face directory (config.json) or a run directory (config.yaml)",
    )


def _expect(read: bool, key: str, value: str | None, fits: Callable[[Path], bool], expected: str) -> None:
    if read and value is not None and not fits(Path(value).expanduser()):
        raise ConfigError(f"`{key}` is {value!r}; expected {expected}")


def _is_tokenizer(path: Path) -> bool:
    return path.is_file() or (path / "tokenizer.json").is_file()


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() or (path / "config.yaml").is_file()
