"""validate: whether a config is right, without touching a device."""

import argparse
from pathlib import Path

from tlt_jax.cli.options import DONE, add_config_options, config_of
from tlt_jax.config import Config, ConfigError

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
    """Raises ConfigError for a file or folder that the config names and that is not there."""
    source, tasks = config.data.source, config.data.tasks
    named = {
        "model.init_from": config.model.init_from,
        "data.source.path": source.path if source.kind in ("directory", "jsonl") else None,
        "data.tasks.path": tasks.path if tasks.kind == "jsonl" else None,
        "data.tokenizer.path": config.data.tokenizer.path,
    }
    for key, value in named.items():
        if value is not None and not Path(value).expanduser().exists():
            raise ConfigError(f"`{key}` is {value!r}; expected a file or folder that exists")
