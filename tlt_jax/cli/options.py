"""What the verbs share: the config's options, and how the program ends."""

import argparse
from collections.abc import Callable

from tlt_jax.config import Config, load_config

DONE, FAULT, USER_ERROR = 0, 1, 2

Verb = Callable[[argparse.Namespace], int]


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """--config FILE and key.sub=value overrides."""
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file; every key is optional (see tlt_jax/config/schema.py)"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key.sub=value", help="override a key, e.g. speculation.draft_length=7"
    )


def config_of(arguments: argparse.Namespace) -> Config:
    """The config that the options name. Raises ConfigError."""
    return load_config(arguments.config, arguments.overrides)
