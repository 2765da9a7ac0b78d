"""What the verbs share: the config's options, and paths as arguments."""

import argparse
from pathlib import Path

from tlt_jax.config import Config, ConfigError, load_config
from tlt_jax.config.base import usable_path


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """--config FILE and key.sub=value overrides."""
    parser.add_argument("--config", metavar="FILE", help="YAML file; every key is optional (see tlt_jax/config/)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.sub=value", help="override a key, e.g. speculation.draft_length=7"
    )


def config_of(arguments: argparse.Namespace) -> Config:
    """The config that the options name. Raises ConfigError."""
    path = None if arguments.config is None else path_of("--config", arguments.config)
    return load_config(path, arguments.overrides)


def path_of(name: str, text: str) -> Path:
    """The path that the argument `name` gives. Raises ConfigError for a text that no path can be."""
    try:
        return Path(usable_path(text)).expanduser()
    except ValueError as error:
        raise ConfigError(f"{name} {error}") from None
