"""export: the model of a run's newest checkpoint as a Hugging Face directory."""

import argparse
from pathlib import Path

from tlt_jax.cli.options import DONE

EXAMPLES = """examples:
  tlt export runs/quickstart exported"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run directory")
    parser.add_argument("folder", metavar="FOLDER", help="the Hugging Face directory to write")


def main(arguments: argparse.Namespace) -> int:
    from tlt_jax.stages.pipeline import export_run

    export_run(Path(arguments.run_dir), Path(arguments.folder))
    print(arguments.folder)
    return DONE
