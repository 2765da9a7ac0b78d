"""Kills at random moments, signals in the midst of what takes long, two runs at once: nothing is lost, and the run ends
with the same bits. (Kills at moments that have a name: test_program.py; full disks: test_disks.py.)"""

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import moments, program

pytestmark = pytest.mark.faults
OPTIONS = ["stages=[pretrain]", "budget.total=8", "checkpoint.every_seconds=null", "pretrain.eval_rows=1024"]
STEPS = 8


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder in which pretraining alone ran to its end without a break."""
    folder = tmp_path_factory.mktemp("whole")
    program.run(folder, *OPTIONS)
    return folder


def assert_same(folder: Path, expected: Path) -> None:
    """The exported parameters are those of the run in `expected`, bit by bit, and each step stands once."""
    assert program.parameters(folder) == program.parameters(expected)
    assert [row["step"] for row in program.rows(folder)] == [row["step"] for row in program.rows(expected)]
    assert "Traceback" not in (folder / "out.txt").read_text()


OFTEN = "checkpoint.every_steps=1"
DISTILLING = [
    "stages=[pretrain, distill]",
    "budget.total=8",
    "distill.prompts=8",
    "distill.minibatches=2",
    "speculation.drafter=draft_model",
    "speculation.draft_model={width: 16, layers: 1, heads: 2, kv_heads: 1, head_dim: 8, hidden: 24}",
]
KILLS = {  # how many, and of what; at moments that have a name, the fast suite kills in every phase
    "ten kills of pretraining": (10, [*OPTIONS, OFTEN]),
    "three kills of a distillation": (3, [*DISTILLING, "checkpoint.every_seconds=null", OFTEN]),
    "a hundred kills of all stages": (100, [OFTEN]),
}


@pytest.mark.parametrize("case", [*[*KILLS][:-1], pytest.param([*KILLS][-1], marks=pytest.mark.nightly)])
def test_killed_at_random_moments_it_ends_with_the_same_parameters(tmp_path, case):
    """SIGKILL after a random time within what a whole run takes, and again, until so many have struck; a run that ends
    before it is struck makes room for a new one."""
    kills, options = KILLS[case]
    first, expected = tmp_path / "first", tmp_path / "expected"
    for folder in (first, expected):
        folder.mkdir()
        begun = time.monotonic()
        program.run(folder, *options)
    seconds = time.monotonic() - begun  # of the second, for which everything was compiled before
    assert_same(expected, first)
    draw, struck, runs = random.Random(kills), 0, 0
    while struck < kills:
        runs += 1
        folder = tmp_path / str(runs)
        folder.mkdir()
        ended = False
        while struck < kills and not ended:
            process = program.start(folder, *options)
            try:
                ended = process.wait(timeout=draw.uniform(0, seconds)) == 0
                assert ended, (folder / "out.txt").read_text()[-4000:]
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                struck += 1
        if not ended:
            program.run(folder, *options)
        assert_same(folder, expected)
        assert not list((folder / "runs/tiny/checkpoints/steps").glob("*tmp*"))


def test_interrupted_while_it_compiles_evaluates_or_saves_it_goes_on(whole, tmp_path, monkeypatch):
    run = tmp_path / "runs/tiny"
    monkeypatch.setenv(*moments.TELLING)
    uncached = [*OPTIONS, "device.compilation_cache="]
    assert program.kill_when(tmp_path, moments.compiling(tmp_path / "out.txt"), signal.SIGTERM, *uncached) == 143
    monkeypatch.delenv(moments.TELLING[0])
    assert len(program.rows(tmp_path)) == 1  # the step that it was compiled for
    assert program.kill_when(tmp_path, moments.evaluating(run, 2), signal.SIGTERM, *OPTIONS) == 143
    assert len(program.rows(tmp_path)) == 4  # the step that it was evaluated after
    assert program.kill_when(tmp_path, moments.saving(run), signal.SIGINT, *OPTIONS, OFTEN) == 130
    assert 5 <= len(program.rows(tmp_path)) < STEPS
    text = program.run(tmp_path, *OPTIONS)
    assert text.count("leaving after this step") == 3
    assert text.count("going on from checkpoint") == 3
    assert_same(tmp_path, whole)


def test_of_two_runs_that_begin_in_one_directory_one_is_refused(whole, tmp_path):
    started = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        places = [f"run.output_dir={tmp_path}/runs", f"data.cache_dir={tmp_path}/data"]
        started.append(program.start(tmp_path / name, *OPTIONS, *places))
    codes = program.end_many(started)
    said = {code: (tmp_path / name / "out.txt").read_text() for code, name in zip(codes, ("one", "two"), strict=True)}
    assert sorted(codes) == [0, 2], said
    assert said[2].count("\n") == 1 and "is in use by another run" in said[2]
    assert "is in use" not in (tmp_path / "runs/tiny/log.txt").read_text()
    (tmp_path / "out.txt").write_text(said[0])
    assert_same(tmp_path, whole)
