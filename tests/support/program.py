"""The program as a user starts it, in a process of its own, on configs/tiny.yaml."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path, *overrides: str) -> subprocess.Popen:
    """Starts the tiny config with its run directory and data cache below `folder`; output goes to `folder`/out.txt."""
    command = [
        sys.executable,
        "-m",
        "tlt_jax.main",
        "--config",
        str(ROOT / "configs/tiny.yaml"),
        f"run.output_dir={folder}/runs",
        f"data.cache_dir={folder}/data",
        f"device.compilation_cache={os.environ['TLT_JAX_TEST_COMPILED']}",
        *overrides,
    ]
    with open(folder / "out.txt", "a") as out:
        return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def run(folder: Path, *overrides: str, code: int = 0) -> str:
    """Runs it to the end; the output of this and earlier calls."""
    process = start(folder, *overrides)
    found = process.wait(timeout=300)
    text = (folder / "out.txt").read_text()
    assert found == code, f"exit code {found}, expected {code}\n{text[-4000:]}"
    return text


def kill_when(folder: Path, ready: Callable[[], bool], number: int = signal.SIGKILL, *overrides: str) -> int:
    """Starts the program, sends the signal once `ready()` holds, and returns the exit code."""
    process = start(folder, *overrides)
    deadline = time.monotonic() + 240
    try:
        while not ready():
            assert process.poll() is None, (
                f"it ended before the moment came\n{(folder / 'out.txt').read_text()[-4000:]}"
            )
            assert time.monotonic() < deadline, "the moment never came"
            time.sleep(0.002)
        process.send_signal(number)
        return process.wait(timeout=120)
    finally:
        process.kill()


def rows(folder: Path, name: str = "tiny") -> list[dict]:
    """The whole rows of metrics.jsonl so far."""
    path = folder / "runs" / name / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines]


def results(folder: Path, name: str = "tiny") -> dict:
    return json.loads((folder / "runs" / name / "results.json").read_text())


def parameters(folder: Path, name: str = "tiny") -> dict[str, bytes]:
    """{array: bytes} of the exported weights, drafter included."""
    export = folder / "runs" / name / "export"
    return {key: array.tobytes() for path in export.glob("*.safetensors") for key, array in load_file(path).items()}
