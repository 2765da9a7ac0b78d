"""Several real processes over loopback: one program, and what happens when one of them is not there any more."""

import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from support import moments, program

pytestmark = pytest.mark.multiprocess
BATCHES = ["pretrain.batch_size=8", "finetune.warmup.batch_size=8", "run.trackers=[]"]
PRETRAIN = [*BATCHES, "stages=[pretrain]", "budget.total=8"]
FOREVER = [*BATCHES, "stages=[pretrain]", "budget.total=100000", "run.export=false"]


def largest_difference(a: Path, b: Path) -> float:
    ours, theirs = ({k: np.frombuffer(v, np.float32) for k, v in program.parameters(f).items()} for f in (a, b))
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[key] - theirs[key]).max()) for key in ours)


def wait_for(ready, started, pause: float = 0.02) -> None:
    deadline = time.monotonic() + 300
    try:
        while not ready():
            assert all(process.poll() is None for process in started), "a process ended before the moment came"
            assert time.monotonic() < deadline, "the moment never came"
            time.sleep(pause)
    except BaseException:
        for process in started:
            process.kill()
        raise


def test_two_processes_train_what_one_process_with_two_devices_does(tmp_path):
    """All three stages, rollouts and their reward models included; process 0 alone writes."""
    many, one = tmp_path / "many", tmp_path / "one"
    assert program.end_many(program.start_many(many, 2, *BATCHES)) == [0, 0], program.said(many, 0)[-3000:]
    one.mkdir()
    program.run(one, *BATCHES, "device.cpu_devices=2")
    assert largest_difference(many, one) < 1e-5
    rows = program.rows(many)
    assert [row["step"] for row in rows] == list(range(1, 21))
    for ours, theirs in zip(rows, program.rows(one), strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-5)
        assert ours.get("rl/reward") == pytest.approx(theirs.get("rl/reward"), abs=1e-5)
    assert program.results(many)["facts"]["processes"] == 2
    assert "INFO" not in program.said(many, 1) and "pretrain" not in program.said(many, 1)
    assert program.end_many(program.start_many(many, 2, *BATCHES)) == [0, 0]
    assert "this run is finished" in program.said(many, 0)


def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    """Four processes, stopped by a signal to one of them; then two; then one. As one would have trained alone."""
    many, one = tmp_path / "many", tmp_path / "one"
    stop = [*PRETRAIN, "pretrain.eval_every=1", "evaluation.prompts=4"]
    for count, steps in ((4, 2), (2, 5)):
        started = program.start_many(many, count, *stop)
        wait_for(lambda steps=steps: len(program.rows(many)) >= steps, started)
        started[-1].send_signal(signal.SIGTERM)
        assert program.end_many(started) == [143] * count, program.said(many, 0)[-3000:]
    text = program.said(many, 0)
    assert "going on from checkpoint 1" in text
    assert program.run(many, *stop, "device.cpu_devices=2")
    one.mkdir()
    program.run(one, *stop, "device.cpu_devices=2")
    assert largest_difference(many, one) < 1e-5
    assert [row["step"] for row in program.rows(many)] == list(range(1, 9))


@pytest.mark.nightly
def test_interrupted_while_they_compile_evaluate_or_save_they_go_on(tmp_path, monkeypatch):
    """A signal to one of two, at the worst moments, ends both after what they are at; then as without."""
    many, whole = tmp_path / "many", tmp_path / "whole"
    options = [*PRETRAIN, "checkpoint.every_seconds=null", "pretrain.eval_rows=1024"]
    often, uncached = [*options, "checkpoint.every_steps=1"], [*options, "device.compilation_cache="]
    run = many / "runs/tiny"
    monkeypatch.setenv(*moments.TELLING)
    for ready, to, number, overrides, rows in (
        (moments.compiling(many / "process1/out.txt"), 1, signal.SIGTERM, uncached, (1, 1)),
        (moments.evaluating(run, 2), 1, signal.SIGTERM, options, (4, 4)),
        (moments.saving(run), 0, signal.SIGINT, often, (5, 7)),
    ):
        started = program.start_many(many, 2, *overrides)
        wait_for(ready, started, 0.002)
        started[to].send_signal(number)
        assert program.end_many(started) == [128 + number] * 2, program.said(many, 0)[-3000:]
        assert rows[0] <= len(program.rows(many)) <= rows[1]
    monkeypatch.delenv(moments.TELLING[0])
    assert program.end_many(program.start_many(many, 2, *options)) == [0, 0], program.said(many, 0)[-3000:]
    assert program.said(many, 0).count("going on from checkpoint") == 3
    assert program.end_many(program.start_many(whole, 2, *options)) == [0, 0]
    assert program.parameters(many) == program.parameters(whole)
    assert [row["step"] for row in program.rows(many)] == list(range(1, 9))


@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_process_dies_the_other_ends_soon_and_says_why(tmp_path, victim):
    started = program.start_many(tmp_path, 2, *FOREVER)
    wait_for(lambda: len(program.rows(tmp_path)) >= 3, started)
    started[victim].kill()
    died = time.monotonic()
    codes = program.end_many(started, 60)
    assert time.monotonic() - died < 60
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 3
    text = program.said(tmp_path, 1 - victim)
    assert text.count(f"process {victim} on") == 1, text
    assert "ended before the run did" in text
    assert "Traceback" not in text


def refused(folder: Path, started, message: str, codes: list[int]) -> None:
    begun = time.monotonic()
    found = program.end_many(started, 60)
    text = "".join(path.read_text() for path in sorted(folder.glob("process*/out.txt")))
    assert found == codes, text
    assert time.monotonic() - begun < 60
    assert message in text, text
    assert "Traceback" not in text
    assert not (folder / "runs/tiny/metrics.jsonl").exists()


def test_who_does_not_come_is_named(tmp_path):
    soon = [*FOREVER, "device.join_seconds=3"]
    refused(tmp_path / "a", program.start_many(tmp_path / "a", 3, *soon, only=[0, 2]), "process 1 did not come", [2, 2])
    alone = program.start_many(tmp_path / "b", 2, *soon, only=[1])
    refused(tmp_path / "b", alone, "process 0 at 127.0.0.1", [2])


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_that_is_taken_is_named(tmp_path, monkeypatch, offset):
    port = program.free_ports()
    monkeypatch.setattr(program, "free_ports", lambda: port)
    with socket.create_server(("127.0.0.1", port + offset)):
        started = program.start_many(tmp_path, 2, *FOREVER, "device.join_seconds=5")
        refused(tmp_path, started, f"port {port + offset} of 127.0.0.1 cannot be had", [2, 2])


def test_processes_that_were_started_differently_part_at_once(tmp_path, monkeypatch):
    port = program.free_ports()
    monkeypatch.setattr(program, "free_ports", lambda: port)
    started = program.start_many(tmp_path, 2, *FOREVER, only=[0])
    started += program.start_many(tmp_path, 2, *FOREVER, "run.seed=7", only=[1])
    refused(tmp_path, started, "was started with another config", [2, 2])


def test_what_one_process_cannot_do_ends_all(tmp_path):
    started = program.start_many(tmp_path, 2, *FOREVER, "device.mesh.data=3")
    refused(tmp_path, started, "`device.mesh`", [2, 2])
