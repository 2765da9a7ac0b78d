"""report: writes report.html and report.json of a run directory again."""

import argparse

from tlt_jax.cli.codes import DONE
from tlt_jax.cli.options import path_of
from tlt_jax.config import ConfigError

EXAMPLES = """examples:
  tlt report runs/quickstart"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run directory")


def main(arguments: argparse.Namespace) -> int:
    from tlt_jax.observe.report import write_report

    try:
        print(write_report(path_of("RUN_DIR", arguments.run_dir)))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return DONE
