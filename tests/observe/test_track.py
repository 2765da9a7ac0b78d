"""W&B and MLflow by their real packages: a run of the program that is stopped and goes on, offline."""

import glob
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support import program

from tlt_jax.config import ConfigError, load_config
from tlt_jax.observe import open_trackers, read_json

pytestmark = pytest.mark.track

OPTIONS = ["budget.total=6", "checkpoint.every_steps=2"]
TRACKED = ["run.trackers=[tensorboard, wandb, mlflow]", "data.source.hub_token=hunter2"]


@pytest.fixture
def trap(monkeypatch, tmp_path):
    """Sends all that looks for a network to a port of ours; what came."""
    came: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            came.append(connection.recv(1000))
            connection.close()

    threading.Thread(target=listen, daemon=True).start()
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        for spelling in (name, name.lower()):
            monkeypatch.setenv(spelling, f"http://127.0.0.1:{server.getsockname()[1]}")
    for name in ("NO_PROXY", "no_proxy", "WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield came
    server.close()


def wandb_steps(run) -> list[int]:
    """The steps that W&B's own files in a run directory hold, in the order they were written."""
    from wandb.proto.wandb_internal_pb2 import Record

    steps = []
    for path in sorted(glob.glob(f"{run}/wandb/offline-run-*/*.wandb"), key=os.path.getmtime):
        for data in wandb_records(Path(path).read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                steps.append(record.history.step.num)
    return steps


def wandb_records(file: bytes) -> list[bytes]:
    """The records of a W&B file: 7 bytes of its own, then LevelDB's log format. Blocks of 32 KiB hold chunks of
    checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle, 4: last) and data."""
    records, position, parts = [], 7, b""
    while position + 7 <= len(file):
        rest = 32768 - position % 32768
        if rest < 7:
            position += rest
            continue
        length, kind = int.from_bytes(file[position + 4 : position + 6], "little"), file[position + 6]
        parts = (b"" if kind in (1, 2) else parts) + file[position + 7 : position + 7 + length]
        if kind in (1, 4):
            records.append(parts)
        position += 7 + length
    return records


def mlflow_run(folder):
    """(client, run) of the only run in the database beside the run directories."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("tlt_jax")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def test_a_run_that_is_killed_goes_on_in_the_same_runs_of_both(tmp_path, trap):
    options = [*program.plain_text(tmp_path), *OPTIONS, *TRACKED, "tracking.wandb.mode=offline"]
    assert program.kill_when(tmp_path, lambda: len(program.rows(tmp_path)) >= 3, signal.SIGKILL, *options) == -9
    text = program.run(tmp_path, *options)
    run = tmp_path / "runs/tiny"
    kept = read_json(run / "trackers.json")
    folders = sorted(path.name for path in (run / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(name.endswith(f"-{kept['wandb']['id']}") for name in folders)
    steps = wandb_steps(run)
    assert steps == sorted(set(steps)) and 6 in steps
    client, found = mlflow_run(tmp_path)
    assert (found.info.run_id, found.info.run_name, found.info.status) == (kept["mlflow"]["id"], "tiny", "FINISHED")
    history = [point.step for point in client.get_metric_history(found.info.run_id, "train/loss")]
    assert history == [1, 2, 3, 4, 5, 6]
    loss = {row["step"]: row["train/loss"] for row in program.rows(tmp_path)}
    assert found.data.metrics["train/loss"] == pytest.approx(loss[6])
    assert found.data.params["model.width"] == "32" and found.data.params["data.source.hub_token"] == "<redacted>"
    assert trap == [] and "fails" not in text and "cannot be opened" not in text
    for path in (tmp_path / "runs").rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes(), path


def test_steps_that_are_done_again_keep_their_first_values_and_parameters_do_not_change(tmp_path, trap):
    folder = tmp_path / "runs/tiny"
    folder.mkdir(parents=True)
    options = ["run.name=tiny", "run.trackers=[wandb, mlflow]", "tracking.wandb.mode=offline"]
    config = load_config(None, [*options, f"run.output_dir={tmp_path}/runs"])
    written = [{"step": step, "train/loss": float(16 + step)} for step in range(1, 6)]
    for first, rows, width in ((1, [], 16), (3, written, 32)):
        for tracker in open_trackers(config, folder, {"model": {"width": width}}, first, rows):
            for step in range(first, first + 5):
                tracker.log(step, {"train/loss": float(width + step)})
            tracker.close()
    assert wandb_steps(folder) == [1, 2, 3, 4, 5, 6, 7]
    client, run = mlflow_run(tmp_path)
    history = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "train/loss")}
    assert history == {1: 17.0, 2: 18.0, 3: 19.0, 4: 20.0, 5: 21.0, 6: 38.0, 7: 39.0}
    assert run.data.params == {"model.width": "16"}
    assert trap == []


def test_rows_that_a_killed_start_did_not_hand_over_are_handed_over_by_the_next(tmp_path, trap):
    folder = tmp_path / "runs/tiny"
    folder.mkdir(parents=True)
    config = load_config(None, ["run.name=tiny", "run.trackers=[mlflow]", f"run.output_dir={tmp_path}/runs"])
    written = [{"step": step, "train/loss": float(step)} for step in range(1, 6)]
    for first, rows, handed in ((1, [], 2), (5, written, 6)):
        (tracker,) = open_trackers(config, folder, {}, first, rows)
        for step in range(first, handed + 1):
            tracker.log(step, {"train/loss": float(10 * first + step)})
        tracker.close()
    client, run = mlflow_run(tmp_path)
    history = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "train/loss")}
    assert history == {1: 11.0, 2: 12.0, 3: 3.0, 4: 4.0, 5: 55.0, 6: 56.0}


def test_the_terminal_is_the_runs_and_nothing_is_left_where_it_was_started(tmp_path, trap):
    config = load_config(program.ROOT / "configs/tiny.yaml", [*TRACKED, f"run.output_dir={tmp_path}/runs"])
    folder = tmp_path / "runs/tiny"
    folder.mkdir(parents=True)
    code = (
        "import sys, pathlib\nfrom tlt_jax.config import load_config\nfrom tlt_jax.observe import open_trackers\n"
        f"config = load_config({str(program.ROOT / 'configs/tiny.yaml')!r}, sys.argv[1:])\n"
        f"for tracker in open_trackers(config, pathlib.Path({str(folder)!r}), {{'model': {{'width': 32}}}}):\n"
        "    tracker.log(1, {'train/loss': 1.0, 'train/lr': float('inf')})\n    tracker.close(failed=True)\n"
    )
    options = [*TRACKED, f"run.output_dir={config.run.output_dir}", "tracking.wandb.mode=offline"]
    here = tmp_path / "here"
    here.mkdir()
    environment = os.environ | {"PYTHONPATH": str(program.ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *options], cwd=here, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "" and len(done.stderr.splitlines()) < 12, done.stderr
    assert list(here.iterdir()) == [] and trap == []
    assert mlflow_run(tmp_path)[1].info.status == "FAILED"
    assert mlflow_run(tmp_path)[1].data.metrics == {"train/loss": 1.0, "step": 1.0}


def test_wandb_without_an_account_is_the_users_error(tmp_path, trap):
    config = load_config(None, ["run.trackers=[wandb]"])
    with pytest.raises(ConfigError, match=r"`run.trackers`: wandb cannot be opened \(.*expected it to be reached"):
        open_trackers(config, tmp_path, {})


def test_an_mlflow_server_that_goes_away_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    port = program.free_ports()
    address, store = f"http://127.0.0.1:{port}", f"sqlite:///{tmp_path}/server.db"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--port", str(port)]
    command += ["--workers", "1", "--default-artifact-root", str(tmp_path / "artifacts")]
    with open(tmp_path / "server.txt", "w") as out:
        server = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not _answers(port):
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "server.txt").read_text()
            time.sleep(0.1)
        options = ["budget.total=100000", "run.trackers=[mlflow]", f"tracking.mlflow.tracking_uri={address}"]
        process = program.start(tmp_path, *program.plain_text(tmp_path), *options)
        try:
            _wait_for_rows(tmp_path, process, 20)
            os.killpg(server.pid, signal.SIGKILL)
            _wait_for_rows(tmp_path, process, len(program.rows(tmp_path)) + 50)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=120) == 143
        finally:
            process.kill()
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    text = (tmp_path / "out.txt").read_text()
    assert text.count("warning: mlflow fails (") == 1
    assert re.search(r"warning: mlflow has not taken the last \d+ rows; metrics.jsonl has them", text)
    assert "Traceback" not in text
    steps = [row["step"] for row in program.rows(tmp_path)]
    assert steps == list(range(1, len(steps) + 1))


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return b"200" in connection.recv(100)
    except OSError:
        return False


def _wait_for_rows(folder, process, count: int) -> None:
    deadline = time.monotonic() + 240
    while len(program.rows(folder)) < count:
        assert process.poll() is None and time.monotonic() < deadline, (folder / "out.txt").read_text()[-4000:]
        time.sleep(0.05)
