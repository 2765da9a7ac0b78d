"""export: the model of a run's newest checkpoint as a Hugging Face directory."""

import argparse

from tlt_jax.cli.codes import DONE
from tlt_jax.cli.options import path_of

EXAMPLES = """examples:
  tlt export runs/quickstart exported"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run directory")
    parser.add_argument("folder", metavar="FOLDER", help="the Hugging Face directory to write")


def main(arguments: argparse.Namespace) -> int:
    from tlt_jax.stages.pipeline import export_run

    folder = path_of("FOLDER", arguments.folder)
    export_run(path_of("RUN_DIR", arguments.run_dir), folder)
    print(folder)
    return DONE
