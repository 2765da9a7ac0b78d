"""launch: starts a config on a cluster, or, with --dry-run, prints the batch script or manifest that would."""

import argparse
import re
import shutil
import subprocess

from tlt_jax.cli.clusters import TARGETS, Job
from tlt_jax.cli.codes import DONE, FAULT
from tlt_jax.cli.options import add_config_options, config_of
from tlt_jax.config import ConfigError

EXAMPLES = """examples:
  tlt launch --target slurm --nodes 8 --accelerators 8 --config X run.output_dir=/shared/runs --dry-run
  tlt launch --target jobset --nodes 8 --accelerators 4 --image registry/tlt:1 --volume runs:/runs --config X"""


def add(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser)
    parser.add_argument("--target", choices=sorted(TARGETS), required=True, help="the kind of cluster")
    parser.add_argument("--nodes", type=_positive, default=1, help="machines")
    parser.add_argument(
        "--processes-per-node", type=_positive, default=1, help="1, or as many as a node's accelerators"
    )
    parser.add_argument("--accelerators", type=_count, default=0, help="GPUs or TPU chips of a node")
    parser.add_argument(
        "--time", type=_time, default="24:00:00", help="slurm: time limit; before it, the run saves and is requeued"
    )
    parser.add_argument("--partition", type=_partition, help="slurm: partition, or several with commas")
    parser.add_argument("--image", help="jobset: container image")
    parser.add_argument("--volume", help="jobset: CLAIM:/PATH of the volume that holds the runs")
    parser.add_argument("--restarts", type=_count, default=10, help="jobset: how often all pods are made anew")
    parser.add_argument("--tpu", help="jobset: TPU type, e.g. tpu-v5p-slice")
    parser.add_argument("--topology", help="jobset: TPU topology, e.g. 2x2x4")
    parser.add_argument("--python", default="python", help="the interpreter there")
    parser.add_argument("--dry-run", action="store_true", help="print the script or manifest, and stop")


def main(arguments: argparse.Namespace) -> int:
    text = TARGETS[arguments.target].write(job_of(arguments))
    if arguments.dry_run:
        print(text, end="")
        return DONE
    command = TARGETS[arguments.target].submit
    if shutil.which(command[0]) is None:
        raise ConfigError(f"--target is {arguments.target!r}; expected {command[0]!r} to be installed, or --dry-run")
    done = subprocess.run(command, input=text, text=True, check=False)
    return DONE if done.returncode == 0 else FAULT


def job_of(arguments: argparse.Namespace) -> Job:
    """The job that the options describe. Raises ConfigError where they, or the config, cannot be."""
    config = config_of(arguments)
    if config.device.coordinator is not None:
        raise ConfigError("`device.coordinator` is set; expected none: the cluster's script says who it is")
    split = arguments.processes_per_node
    if arguments.accelerators % split:
        raise ConfigError(
            f"--processes-per-node is {split}; expected a divisor of --accelerators ({arguments.accelerators})"
        )
    source = [] if arguments.config is None else ["--config", arguments.config]
    return Job(
        name=config.run.name,
        command=[arguments.python, "-m", "tlt_jax.main", *source, *arguments.overrides],
        nodes=arguments.nodes,
        processes_per_node=split,
        accelerators=arguments.accelerators,
        time=arguments.time,
        partition=arguments.partition,
        image=arguments.image,
        volume=arguments.volume,
        restarts=arguments.restarts,
        tpu=arguments.tpu,
        topology=arguments.topology,
    )


def _positive(text: str) -> int:
    number = _count(text)
    if not number:
        raise argparse.ArgumentTypeError("0; expected 1 or more")
    return number


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r}; expected a number, 0 to 999999")
    return int(text)


def _time(text: str) -> str:
    if not re.fullmatch(r"(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2})", text, re.ASCII) or not re.search("[1-9]", text):
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r}; expected a time as SLURM takes it: 90 (minutes), 12:00:00 or 2-12"
        )
    return text


def _partition(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+(,[\w.-]+)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text[:80]!r}; expected names of letters, digits, '_', '-' and '.'")
    return text
