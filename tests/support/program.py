"""The program as a user starts it, in a process of its own, on configs/tiny.yaml."""

import json
import os
import signal
import socket
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


def plain_text(folder: Path) -> list[str]:
    """Overrides for pretraining on a few files of text without functions: no completions are compiled for."""
    (folder / "text").mkdir()
    paragraphs = (ROOT / "README.md").read_text().split("\n\n")
    for number in range(12):
        (folder / f"text/{number}.txt").write_text("\n\n".join(paragraphs[number::12]))
    return [f"data.source={{kind: directory, path: {folder}/text}}", "stages=[pretrain]", "run.export=false"]


def start_many(folder: Path, processes: int, *overrides: str, only: list[int] | None = None) -> list[subprocess.Popen]:
    """Starts a run of so many processes over loopback (or `only` some of them), each with a folder for its output."""
    port = free_ports()
    started = []
    for process in range(processes) if only is None else only:
        own = folder / f"process{process}"
        own.mkdir(parents=True, exist_ok=True)
        company = [f"device.coordinator=127.0.0.1:{port}", f"device.processes={processes}", f"device.process={process}"]
        places = [f"run.output_dir={folder}/runs", f"data.cache_dir={folder}/data"]
        started.append(start(own, *places, *company, *overrides))
    return started


def free_ports() -> int:
    """A port of loopback that is free, and the one after it too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port
            except OSError:
                continue


def end_many(started: list[subprocess.Popen], seconds: float = 280) -> list[int]:
    """Their exit codes, waiting so long for all of them at most; what still runs then is ended."""
    deadline = time.monotonic() + seconds
    try:
        return [process.wait(timeout=max(deadline - time.monotonic(), 0.1)) for process in started]
    finally:
        for process in started:
            process.kill()


def said(folder: Path, process: int) -> str:
    """What one of many processes has printed."""
    return (folder / f"process{process}" / "out.txt").read_text()


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
