"""The batch script or manifest that starts one command on many machines: one pure function a kind of cluster.

Both start `python -m tlt_jax.main` once a process with its number and the coordinator's address, give it time to save
before it is taken away, and start it again, from its newest checkpoint, when a machine was lost or the time was up.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from tlt_jax.cli.codes import LOST, USER_ERROR
from tlt_jax.config import ConfigError

SAVING_SECONDS = 300  # between the signal and the end
JOBSET_PORT = 12355


@dataclass(frozen=True)
class Job:
    """What is started where. `command` is the program with the config's options; `accelerators` are a node's."""

    name: str
    command: list[str]
    nodes: int
    processes_per_node: int = 1
    accelerators: int = 0
    time: str = "24:00:00"
    partition: str | None = None
    image: str | None = None
    volume: str | None = None
    restarts: int = 10
    tpu: str | None = None
    topology: str | None = None


def slurm_script(job: Job) -> str:
    """An sbatch script. SLURM sends USR1 some minutes before the time is up; the processes then save and end with 143,
    and the job goes back into the queue, as it does after a lost process (3). A refusal (2) ends it."""
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.processes_per_node,
        "gpus-per-node": job.accelerators or None,
        "time": job.time,
        "partition": job.partition,
        "requeue": True,
        "open-mode": "append",
        "output": f"{job.name}-%j.log",
        "signal": f"B:USR1@{SAVING_SECONDS}",
    }
    lines = [
        f"#SBATCH --{key}" + ("" if value is True else f"={value}")
        for key, value in options.items()
        if value is not None
    ]
    split = f" --gpus-per-task={job.accelerators // job.processes_per_node}" if job.processes_per_node > 1 else ""
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *lines,
            "set -uo pipefail",
            "",
            'host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "port=$((20000 + SLURM_JOB_ID % 20000))  # and the one after it",
            "",
            "# Each task is one process of the run; a task that ends leaves the others a minute to end by themselves.",
            f"srun --wait=60{split if job.accelerators else ''} bash -c \\",
            """  'exec "$@" "device.processes=$SLURM_NTASKS" "device.process=$SLURM_PROCID"' launch \\""",
            f'  {shlex.join(job.command)} "device.coordinator=$host:$port" &',
            "step=$!",
            "trap 'kill -TERM \"$step\"' USR1",
            'wait "$step"; code=$?',
            'while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done  # a signal ends `wait` before the step',
            "",
            f'case "$code" in 143 | {LOST}) scontrol requeue "$SLURM_JOB_ID" ;; esac',
            'exit "$code"',
            "",
        ]
    )


def jobset_manifest(job: Job) -> str:
    """A JobSet (jobset.x-k8s.io/v1alpha2): an indexed Job whose pods are the processes. All are made anew, at most
    `restarts` times, when one fails, but not after a refusal (exit code 2)."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", job.name):
        raise ConfigError(f"`run.name` is {job.name!r}; expected lower-case letters, digits and -, for a JobSet's name")
    if not job.image:
        raise ConfigError("--image is missing; expected the container image that holds tlt_jax")
    processes = job.nodes * job.processes_per_node
    if job.processes_per_node != 1:
        raise ConfigError(f"--processes-per-node is {job.processes_per_node}; expected 1, a pod a node, with a JobSet")
    coordinator = f"device.coordinator={job.name}-workers-0-0.{job.name}:{JOBSET_PORT}"
    start = 'exec "$@" "device.process=$JOB_COMPLETION_INDEX"'
    container: dict[str, Any] = {
        "name": "tlt",
        "image": job.image,
        "command": ["bash", "-c", start, "launch", *job.command, coordinator, f"device.processes={processes}"],
    }
    if job.accelerators:
        kind = "google.com/tpu" if job.tpu else "nvidia.com/gpu"
        container["resources"] = {"limits": {kind: job.accelerators}}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVING_SECONDS,
        "containers": [container],
    }
    if job.volume:
        claim, _, path = job.volume.partition(":")
        if not (claim and path.startswith("/")):
            raise ConfigError(f"--volume is {job.volume!r}; expected CLAIM:/PATH, where all pods find the runs")
        container["volumeMounts"] = [{"name": "runs", "mountPath": path}]
        pod["volumes"] = [{"name": "runs", "persistentVolumeClaim": {"claimName": claim}}]
    if job.tpu:
        selector = {"gke-tpu-accelerator": job.tpu, "gke-tpu-topology": job.topology}
        pod["nodeSelector"] = {f"cloud.google.com/{key}": value for key, value in selector.items() if value}
    refusal = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [USER_ERROR]}}
    workers = {
        "completionMode": "Indexed",
        "parallelism": processes,
        "completions": processes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [refusal]},
        "template": {"spec": pod},
    }
    stop = {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "failurePolicy": {"maxRestarts": job.restarts, "rules": [stop]},
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": workers}}],
        },
    }
    return yaml.safe_dump(manifest, sort_keys=False, width=200)


@dataclass(frozen=True)
class Target:
    """A kind of cluster: what is written for it, and the program that takes that on its standard input."""

    write: Callable[[Job], str]
    submit: list[str]


TARGETS = {
    "slurm": Target(slurm_script, ["sbatch"]),
    "jobset": Target(jobset_manifest, ["kubectl", "apply", "-f", "-"]),
}
