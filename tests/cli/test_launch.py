"""Batch scripts and manifests: as written, as shells and readers of YAML take them, and run for real."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support import program

from tlt_jax.cli import codes
from tlt_jax.main import main
from tlt_jax.parallel import peers

GOLDEN = Path(__file__).parent / "golden"
SLURM = ["--target", "slurm", "--nodes", "8", "--accelerators", "8", "--time", "12:00:00", "--partition", "a100"]
JOBSET = ["--target", "jobset", "--nodes", "4", "--accelerators", "4", "--image", "registry/tlt:1", "--volume"]
COMMANDS = {
    "slurm.sh": [*SLURM, "run.name=big", "run.output_dir=/shared/my runs", "stages=[pretrain, align]"],
    "slurm_process_per_gpu.sh": [*SLURM, "--processes-per-node", "8", "run.name=big"],
    "jobset.yaml": [*JOBSET, "runs:/runs", "run.name=big", "run.output_dir=/runs", "run.seed=3"],
    "jobset_tpu.yaml": [*JOBSET, "runs:/runs", "--tpu", "tpu-v5p-slice", "--topology", "2x2x4", "run.name=big"],
}


def launched(capsys, *words: str, code: int = 0) -> str:
    assert main(["launch", *words]) == code
    out = capsys.readouterr()
    return out.out + out.err


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_written_is_the_golden_file(capsys, name):
    assert launched(capsys, "--dry-run", *COMMANDS[name]) == (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.endswith(".sh")])
def test_a_script_is_bash(name):
    subprocess.run(["bash", "-n", str(GOLDEN / name)], check=True)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.endswith(".yaml")])
def test_a_manifest_has_the_fields_of_a_jobset(name):
    tree = yaml.safe_load((GOLDEN / name).read_text())
    assert (tree["apiVersion"], tree["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert tree["spec"].keys() == {"network", "failurePolicy", "replicatedJobs"}
    (workers,) = tree["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"] == 4
    assert job["backoffLimit"] == 0  # a lost pod ends the Job, so that the JobSet makes all of them anew
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 60
    (container,) = pod["containers"]
    where = f"{tree['metadata']['name']}-{workers['name']}-0-0.{tree['spec']['network']['subdomain']}"
    assert f"device.coordinator={where}:12355" in container["command"]
    assert "device.processes=4" in container["command"]
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
    assert {v["name"] for v in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "slurm", "run.sede=1"], "did you mean `run.seed`"),
        (["--target", "slurm", "device={coordinator: 'a:1', processes: 2, process: 0}"], "expected none"),
        (["--target", "slurm", "--accelerators", "8", "--processes-per-node", "3"], "a divisor of --accelerators (8)"),
        (["--target", "jobset", "--image", "x", "run.name=My_Run"], "lower-case letters"),
        (["--target", "jobset"], "--image is missing"),
        (["--target", "jobset", "--image", "x", "--volume", "runs"], "CLAIM:/PATH"),
        (["--target", "jobset", "--image", "x", "--accelerators", "4", "--processes-per-node", "4"], "expected 1"),
    ],
)
def test_what_cannot_be_launched_is_refused(capsys, words, message):
    text = launched(capsys, "--dry-run", *words, code=2)
    assert text.startswith("error: ") and message in text


def test_without_the_clusters_program_nothing_is_submitted(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "'sbatch' to be installed" in launched(capsys, "--target", "slurm", code=2)


def test_what_is_submitted_is_what_a_dry_run_prints(capsys, monkeypatch, tmp_path):
    tool(tmp_path, "sbatch", f"cat > {tmp_path}/submitted")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    text = launched(capsys, "--dry-run", "--target", "slurm")
    launched(capsys, "--target", "slurm")
    assert (tmp_path / "submitted").read_text() == text


def test_a_lost_process_is_requeued_by_the_code_that_it_ends_with():
    assert codes.LOST == peers.LOST
    assert "143 | 3) scontrol requeue" in (GOLDEN / "slurm.sh").read_text()


def tool(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.multiprocess
def test_the_script_runs_saves_at_the_signal_is_requeued_and_goes_on(capsys, tmp_path):
    """The script itself, with stand-ins for SLURM's two programs that start real processes on this machine."""
    srun = """
        while [[ $1 == --* ]]; do shift; done
        trap 'kill -TERM "${tasks[@]}"' TERM
        for ((i = 0; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i "$@" > "$OUT.$i" 2>&1 & tasks+=($!); done
        code=0
        for task in "${tasks[@]}"; do
          wait "$task"; c=$?; while kill -0 "$task" 2>/dev/null; do wait "$task"; c=$?; done
          ((c > code)) && code=$c
        done
        exit $code"""
    tool(tmp_path, "srun", srun)
    tool(tmp_path, "scontrol", f'[[ $1 == show ]] && echo 127.0.0.1 || echo "$@" >> {tmp_path}/requeued')
    options = ["run.trackers=[]", "stages=[pretrain]", "budget.total=30", "pretrain.batch_size=8", "run.export=false"]
    places = [f"run.output_dir={tmp_path}/runs", f"data.cache_dir={tmp_path}/data"]
    cache = f"device.compilation_cache={os.environ['TLT_JAX_TEST_COMPILED']}"
    words = ["--target", "slurm", "--nodes", "2", "--python", sys.executable, "--config", "configs/tiny.yaml"]
    script = launched(capsys, "--dry-run", *words, *options, *places, cache)
    (tmp_path / "job.sh").write_text(script)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "here",
        "SLURM_JOB_ID": str(program.free_ports() - 20000),
        "SLURM_NTASKS": "2",
        "OUT": str(tmp_path / "out"),
    }

    def start() -> subprocess.Popen:
        return subprocess.Popen(["bash", str(tmp_path / "job.sh")], env=environment, cwd=program.ROOT)

    first = start()
    try:
        while len(program.rows(tmp_path)) < 3:
            assert first.poll() is None, (tmp_path / "out.0").read_text()
        first.send_signal(10)  # USR1, as SLURM sends it to the batch shell
        assert first.wait(timeout=120) == 143
    finally:
        first.kill()
    assert (tmp_path / "requeued").read_text() == f"requeue {environment['SLURM_JOB_ID']}\n"
    done = len(program.rows(tmp_path))
    assert 3 <= done < 30
    assert start().wait(timeout=200) == 0, (tmp_path / "out.0").read_text()
    assert f", {done} of the run" in (tmp_path / "out.0").read_text()
    assert [row["step"] for row in program.rows(tmp_path)] == list(range(1, 31))
