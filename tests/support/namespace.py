"""Disks of a test's own: a shell script in a user and mount namespace, where anybody may mount a small tmpfs."""

import functools
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support import program

UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


@functools.cache
def why_not() -> str | None:
    """Why this system lets us make no namespace that can mount a tmpfs; None if it does."""
    try:
        probe = [*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"]
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "there is no unshare here"
    return done.stderr.strip() or "unshare failed" if done.returncode else None


def script(text: str, folder: Path) -> str:
    """Runs a bash script in a namespace of its own, in `folder`; its output, errors included. It ends with code 0.

    `$RUN` in it is the command of a run of the tiny config whose directories lie in `folder`/disk, which is there.
    """
    if reason := why_not():
        pytest.skip(f"no user and mount namespace here: {reason}")
    (folder / "disk").mkdir(exist_ok=True)
    run = shlex.join(
        [sys.executable, *("-m", "tlt_jax.main", "--config", str(program.ROOT / "configs/tiny.yaml")),
         f"run.output_dir={folder}/disk/runs", f"data.cache_dir={folder}/data",
         f"device.compilation_cache={os.environ['TLT_JAX_TEST_COMPILED']}"]
    )  # fmt: skip
    paths = os.pathsep.join([str(program.ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*UNSHARE, "bash", "-euc", f"RUN={shlex.quote(run)}\n{text}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths.rstrip(os.pathsep)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
