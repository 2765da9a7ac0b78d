"""run: the stages of a config, from where the run directory stands; --dry-run prints the plan."""

import argparse

from tlt_jax.cli.codes import DONE
from tlt_jax.cli.options import add_config_options, config_of

EXAMPLES = """examples:
  python -m tlt_jax.main --config configs/quickstart.yaml
  python -m tlt_jax.main --config configs/quickstart.yaml run.name=seed1 run.seed=1
  python -m tlt_jax.main --config configs/quickstart.yaml 'stages=[align]' model.init_from=runs/quickstart/export
  python -m tlt_jax.main --config configs/quickstart.yaml --dry-run"""


def add(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print stages, steps, parameters, mesh and memory, and stop"
    )


def main(arguments: argparse.Namespace) -> int:
    config = config_of(arguments)
    if arguments.dry_run:
        from tlt_jax.cli.plan import print_plan

        print_plan(config)
        return DONE
    from tlt_jax.stages.pipeline import run_all
    from tlt_jax.stages.run import Interrupted

    try:
        run_all(config)
    except Interrupted as interruption:
        return 128 + interruption.number
    return DONE
