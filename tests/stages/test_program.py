"""The main job from outside: what it leaves, killed and resumed, interrupted, refused."""

import gzip
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jax.profiler import ProfileData
from safetensors.numpy import load_file
from support import program

from tlt_jax.observe.trace_names import PERFETTO, operation_names

STEPS = 20
EAGLE = ("speculation.drafter=eagle", "speculation.eagle_drafts=1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder in which the tiny config ran to its end without a break, drafting with an eagle; two steps of the group
    policy were traced."""
    folder = tmp_path_factory.mktemp("finished")
    program.run(folder, *EAGLE, "profile.steps=12:13", "data.source.hub_token=hunter2")
    return folder


def test_a_run_leaves_all_that_it_promises(finished):
    run = finished / "runs/tiny"
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "samples.jsonl",
        "results.json",
        "log.txt",
        "report.html",
        "report.json",
        "tokenizer.json",
        "export/model.safetensors",
        "export/config.json",
        "export/tokenizer.json",
        "export/drafter.safetensors",
    ):
        assert (run / name).is_file(), name
    assert list((run / "tensorboard").glob("events*"))
    assert "is stuck" not in (run / "log.txt").read_text()
    assert not list(run.rglob("*.partial*"))
    rows = program.rows(finished)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [phase["phase"] for phase in program.results(finished)["phases"]] == [
        "pretrain",
        "warmup",
        "policy",
        "reward_model",
        "ppo",
    ]
    assert program.results(finished)["finished"]


def test_metrics_carry_the_fields_names(finished):
    rows = program.rows(finished)
    by_phase = {row["phase"]: row for row in rows}
    of_supervised = {"train/loss", "train/lr", "train/grad_norm", "train/tokens_per_second", "train/exit_loss"}
    assert of_supervised | {"train/eagle_loss", "train/eagle_acceptance"} <= by_phase["pretrain"].keys()
    rollout = {
        "rollout/target_calls_per_token",
        "rollout/accepted_length",
        "rollout/acceptance_rate",
        "rollout/length_mean",
        "rollout/truncated_fraction",
        "rollout/loop_fraction",
        "rollout/logprob_abs_diff_max",
        "rollout/logprob_kl",
        "rollout/draft_length",
        "train/eagle_acceptance",
    }
    shared = rollout | {
        "rl/reward",
        "rl/kl",
        "rl/kl_coef",
        "rl/entropy",
        "rl/policy_loss",
        "time/rollout",
        "time/reward",
        "time/update",
        "time/step",
    }
    assert (
        shared | {"rl/reward_quality", "rl/reward_diversity", "rl/reward_speed", "rl/zero_std_groups"}
        <= by_phase["policy"].keys()
    )
    assert shared | {"rl/value_loss", "rl/explained_variance"} <= by_phase["ppo"].keys()
    for name, bound in (("rollout/logprob_abs_diff_max", 1e-4), ("rollout/logprob_kl", 1e-6)):
        assert all(abs(row[name]) < bound for row in rows if name in row)


def test_the_policy_starts_at_its_reference(finished):
    first = next(row for row in program.rows(finished) if row["phase"] == "policy")
    assert abs(first["rl/kl"]) < 1e-3
    assert abs(first["rl/approx_kl"]) < 1e-3


def test_the_trace_opens_and_holds_the_named_scopes(finished):
    """In the programs that xprof reads, and on the slices that Perfetto shows."""
    (planes,) = (finished / "runs/tiny/profile").glob("plugins/profile/*/*.xplane.pb")
    assert "/host:CPU" in [plane.name for plane in ProfileData.from_file(str(planes)).planes]
    scopes = " ".join(operation_names(planes.read_bytes()).values())
    events = json.loads(gzip.decompress(planes.with_name(PERFETTO).read_bytes()))["traceEvents"]
    slices = " ".join({event["args"]["scope"] for event in events if "scope" in event.get("args", {})})
    for scope in ("attention", "mlp", "loss", "optimizer", "draft", "verify"):
        assert scope in scopes and scope in slices, scope
    steps = [event["args"]["step_num"] for event in events if event.get("name") == "step"]
    assert steps == ["12", "13"]
    assert (finished / "runs/tiny/profile/device_memory.prof").stat().st_size


def test_a_healthy_run_gets_no_hints_and_says_what_it_compiled(finished):
    found = program.results(finished)
    assert [phase["health"] for phase in found["phases"]] == [[]] * 5
    assert "measured by a bare matmul" in found["facts"]["peak"]
    first = {entry["name"]: entry for entry in found["phases"][0]["programs"]}
    assert set(first) == {"update", "decode block eagle 3"} and first["update"]["shape"] == "1 x 4 x 128"
    assert all(entry[figure] > 0 for entry in first.values() for figure in ("flops", "arguments", "temporaries"))
    assert all(
        [entry["name"] for entry in phase["programs"]].count("decode block eagle 3") == 0
        for phase in found["phases"][1:]
    )
    assert found["phases"][0]["buffers"][0] == {"name": "train/params/policy/embedding", "bytes": 512 * 32 * 4}
    page = (finished / "runs/tiny/report.html").read_text()
    for words in ("Nothing was found", "Compiled steps", "update, 1 x 4 x 128", "train/params/policy/embedding 64 KiB"):
        assert words in page
    supervised = [row for row in program.rows(finished) if row["phase"] in ("pretrain", "warmup")]
    assert all(0 < row["train/mfu"] < 1 and 0 <= row["train/data_wait_fraction"] <= 1 for row in supervised)
    ratios = [row["train/tokens_per_second"] / row["train/mfu"] for row in supervised]
    assert max(ratios) == pytest.approx(min(ratios))  # the peak over the FLOPs of a token


def test_a_finished_run_says_so_and_exits_0(finished):
    before = program.parameters(finished)
    shutil.rmtree(finished / "runs/tiny/export")  # which is made again
    text = program.run(finished, *EAGLE, "sampling.temperature=0.5")
    assert "this run is finished" in text and "exported to" in text
    assert program.parameters(finished) == before
    assert "differs from the one this run was last started with, in: " in text
    assert "profile.steps" in text and "sampling.temperature" in text
    assert "`model.hidden` was 64, now 128" in program.run(finished, "model.hidden=128", code=2)
    assert "began with other data" in program.run(finished, "run.seed=3", code=2)
    assert program.parameters(finished) == before
    assert len(program.rows(finished)) == STEPS


def test_a_stage_runs_alone_from_an_export_and_from_a_run(finished):
    for name, source in (("from_export", "runs/tiny/export"), ("from_run", "runs/tiny")):
        program.run(
            finished,
            f"run.name={name}",
            "stages=[finetune]",
            f"model.init_from={finished}/{source}",
            "budget.total=5",
            "run.trackers=[]",
            "run.export=false",
        )
        assert {row["phase"] for row in program.rows(finished, name)} == {"warmup", "policy"}
    starts = [
        program.results(finished, name)["phases"][0]["before"]["eval/loss"] for name in ("from_export", "from_run")
    ]
    assert starts[0] == starts[1]


def test_killed_at_any_moment_it_ends_with_the_same_parameters(finished, tmp_path):
    """SIGKILL in data preparation, a training step, a save, and once a phase is under way in each phase of rollouts;
    then the same command to the end."""
    saving = [*EAGLE, "checkpoint.every_steps=1"]
    steps = tmp_path / "runs/tiny/checkpoints/steps"

    def last_phase() -> str:
        found = program.rows(tmp_path)
        return found[-1]["phase"] if found else ""

    def sealed(phase: str) -> bool:
        """Whether there is a checkpoint to go on from that was made inside `phase`."""
        manifests = sorted((steps.parent / "manifests").glob("*.json"), key=lambda p: int(p.stem))
        document = steps / manifests[-1].stem / "document/metadata" if manifests else None
        return bool(document and document.is_file() and json.loads(document.read_text())["phase"] == phase)

    moments = {
        "data preparation": lambda: "training the tokenizer" in (tmp_path / "out.txt").read_text(),
        "a step": lambda: len(program.rows(tmp_path)) >= 3,
        "a save": lambda: any("tmp" in p.name for p in steps.glob("*")) and last_phase() == "warmup",
        "the group policy": lambda: sealed("policy"),
        "the reward model": lambda: sealed("reward_model"),
        "PPO": lambda: sealed("ppo"),
    }
    for moment, ready in moments.items():
        assert program.kill_when(tmp_path, ready, signal.SIGKILL, *saving) == -signal.SIGKILL, moment
    text = program.run(tmp_path, *saving)
    for phase in ("finetune policy", "align reward_model", "align ppo"):
        assert re.search(rf"going on from checkpoint \d+: {phase}, step [1-9]", text), phase
    assert program.parameters(tmp_path) == program.parameters(finished)
    assert [row["step"] for row in program.rows(tmp_path)] == list(range(1, STEPS + 1))
    assert not list(steps.glob("*tmp*"))
    account = program.results(tmp_path)["account"]
    assert account["restarts"] > 0.0
    assert sum(account.values()) > program.rows(tmp_path)[-1]["seconds"]


@pytest.mark.faults
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_interrupted_it_saves_and_exits(finished, tmp_path, number, code):
    assert (
        program.kill_when(
            tmp_path,
            lambda: len(program.rows(tmp_path)) >= 2,
            number,
            "stages=[pretrain]",
            "checkpoint.every_seconds=null",
        )
        == code
    )
    done = len(program.rows(tmp_path))
    assert 2 <= done < STEPS
    text = program.run(tmp_path, "stages=[pretrain]", "checkpoint.every_seconds=null")
    assert re.search(rf"going on from checkpoint 1: .*, {done} of the run", text)
    assert [row["step"] for row in program.rows(tmp_path)] == list(range(1, STEPS + 1))


def test_interrupted_while_pairs_are_made_it_ends_before_they_are(tmp_path):
    def making() -> bool:
        return "making training pairs" in (tmp_path / "out.txt").read_text()

    options = ["stages=[align]", "align.reward_model.pairs=128"]
    assert program.kill_when(tmp_path, making, signal.SIGTERM, *options) == 143
    assert "making held-out pairs" not in (tmp_path / "out.txt").read_text()
    assert not program.rows(tmp_path)
    assert not list((tmp_path / "runs/tiny/checkpoints/steps").iterdir())


def test_rows_that_somebody_changed_are_noticed(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    metrics = tmp_path / "runs/tiny/metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines[:4], *lines[5:]]))
    assert "1 steps are missing (the first: 5)" in program.run(tmp_path)


@pytest.mark.faults
def test_a_run_that_diverges_goes_back_and_then_stops_and_says_what_it_saw(tmp_path):
    options = ["stages=[pretrain]", "budget.total=100", "run.export=false", "pretrain.eval_every=1000"]
    options += ["pretrain.optimizer.learning_rate=1e30", "pretrain.optimizer.warmup_fraction=0.04"]
    faults = ["faults.rollback_after=2", "faults.stop_after=2", "checkpoint.every_steps=1"]
    text = program.run(tmp_path, *options, *faults, code=2)
    assert re.search(r"warning: step \d+: not finite or a spike, so that nothing was updated \(loss ", text)
    assert text.count("going back to checkpoint") == 2
    last = text.splitlines()[-1]
    assert "pretrain pretrain diverges: 2 updates in a row" in last and "after 2 returns" in last
    rows = program.rows(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert sum(row["train/skipped"] for row in rows) >= 6


def test_secrets_stay_out_of_the_run_directory(finished):
    for path in (finished / "runs").rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes(), path


@pytest.mark.faults
def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path):
    options = ["stages=[pretrain]", "budget.total=4", "checkpoint.every_steps=2", "run.export=false"]
    program.run(tmp_path, *options)
    data = next(
        p for p in (tmp_path / "runs/tiny/checkpoints/steps/3").rglob("*") if p.is_file() and p.stat().st_size > 1000
    )
    whole = bytearray(data.read_bytes())
    whole[len(whole) // 2] ^= 1
    data.write_bytes(whole)
    text = program.run(tmp_path, *options)
    assert "checkpoint 3 does not verify" in text
    assert "going on from checkpoint 2" in text
    assert [row["step"] for row in program.rows(tmp_path)] == [1, 2, 3, 4]


def test_report_verb_writes_the_report_again(finished):
    report = finished / "runs/tiny/report.json"
    before = json.loads(report.read_text())
    report.unlink()
    subprocess.run(
        [sys.executable, "-m", "tlt_jax.main", "report", str(finished / "runs/tiny")], cwd=program.ROOT, check=True
    )
    again = json.loads(report.read_text())
    assert again | {"created": None} == before | {"created": None}


def test_a_run_is_exported_and_used_on_another_number_of_devices(tmp_path):
    program.run(tmp_path, "device.cpu_devices=2", "stages=[pretrain]", "budget.total=2")
    command = [sys.executable, "-m", "tlt_jax.main", "export", str(tmp_path / "runs/tiny"), str(tmp_path / "exported")]
    subprocess.run(command, cwd=program.ROOT, check=True)
    for name in ("model.safetensors", "drafter.safetensors"):
        ours, theirs = (load_file(folder / name) for folder in (tmp_path / "runs/tiny/export", tmp_path / "exported"))
        assert {key: array.tobytes() for key, array in ours.items()} == {
            key: array.tobytes() for key, array in theirs.items()
        }
    options = [
        "run.name=more",
        "stages=[pretrain]",
        "budget.total=1",
        "run.export=false",
        f"model.init_from={tmp_path}/runs/tiny",
    ]
    program.run(tmp_path, *options)
    losses = [program.results(tmp_path, name)["phases"][0] for name in ("tiny", "more")]
    assert losses[1]["before"]["eval/loss"] == pytest.approx(losses[0]["after"]["eval/loss"], abs=1e-5)


def test_the_plan_is_of_the_tokenizer_that_is_given(finished, tmp_path):
    tokenizer = finished / "runs/tiny/tokenizer.json"
    entries = len(json.loads(tokenizer.read_text())["model"]["vocab"])
    options = [f"data.tokenizer.path={tokenizer}", "data.tokenizer.vocab_size=4096", "--dry-run"]
    assert f"vocabulary {entries}" in program.run(tmp_path, *options)


def test_the_plan_is_printed_and_nothing_is_run(tmp_path):
    text = program.run(tmp_path, "--dry-run")
    for words in ("parameters", "mesh data 1", "memory", "reward_model", "4,096"):
        assert words in text, text
    assert not (tmp_path / "runs").exists()
