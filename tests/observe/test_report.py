"""The report, on runs that went well and on runs that did not."""

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import yaml

from tlt_jax.observe import MetricsLog, build_report, write_json, write_report
from tlt_jax.observe.figures import show_change, show_count, show_number, show_seconds, show_value

PHASES = (
    ("pretrain", "pretrain", 60),
    ("finetune", "warmup", 30),
    ("finetune", "policy", 40),
    ("align", "reward_model", 25),
    ("align", "ppo", 40),
)
HOSTILE = "<script>alert('x')</script>\x1b[2J \u202e & \"quoted\""


def row_of(phase: str, index: int, steps: int) -> dict:
    done = index / steps
    if phase in ("policy", "ppo"):
        return {
            "rl/reward": -0.2 + done,
            "rl/kl": 2 * done,
            "rl/kl_coef": 0.1,
            "rl/entropy": 2 - done,
            "rl/reward_quality": done,
            "rl/reward_speed": 0.2,
            "rl/reward_std": 0.1,
            "time/rollout": 1.0,
            "time/update": 0.5,
            "time/step": 1.5,
            "rollout/target_calls_per_token": 0.5,
            "rollout/accepted_length": 1.25,
            "rollout/loop_fraction": 0.05,
            "rollout/logprob_abs_diff_max": 3e-5,
        }
    row = {"train/loss": 7 - 4 * done, "train/grad_norm": 1.0, "train/lr": 1e-3 * (1 - done), "time/update": 0.1}
    if index == steps // 2:
        row |= {"train/loss": math.nan, "eval/loss": 5.0, "eval/bits_per_byte": 2.0}
    return row


def make_run(folder, phases=PHASES, finished=True, samples=True, rows_of_last=None):
    """A run directory as a run leaves it; `rows_of_last` cuts the last phase short, and results.json with it."""
    folder.mkdir()
    config = {"run": {"name": "a <b>run</b>", "seed": 3}, "stages": ["pretrain", "finetune", "align"]}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"sampling": {"temperature": 0.9}}))
    step, seconds, results = 0, 5.0, []
    with MetricsLog(folder / "metrics.jsonl") as log, MetricsLog(folder / "samples.jsonl") as kept:
        for number, (stage, phase, steps) in enumerate(phases):
            cut = rows_of_last if number == len(phases) - 1 else None
            for index in range(1, (cut or steps) + 1):
                step, seconds = step + 1, seconds + 2.0
                head = {"step": step, "stage": stage, "phase": phase, "phase_step": index}
                log.append(head | {"progress": index / steps, "seconds": seconds} | row_of(phase, index, steps))
            for when in ("before", "after") if samples and phase != "reward_model" else ():
                head = {"step": step, "stage": stage, "phase": phase, "when": when, "prompt": "def f(x):\n"}
                kept.append(head | {"completion": HOSTILE, "reference": "return x", "valid": when == "after"})
            if not cut:
                results.append(result_of(stage, phase, steps))
    facts = {
        "device": "cpu <2 cores>",
        "versions": {"jax": "0.10.2"},
        "parameters": 1180032,
        "data": {"documents": 812},
        "budget": {"unit": "steps", "total": 195.0},
    }
    write_json(folder / "results.json", {"facts": facts, "phases": results, "finished": finished})
    return folder


def result_of(stage: str, phase: str, steps: int) -> dict:
    before, after = {"eval/valid_fraction": 0.25}, {"eval/valid_fraction": 0.5}
    if phase == "pretrain":
        before = {"eval/bits_per_byte": 3.5, "eval/loss": math.nan}
        after = {"eval/bits_per_byte": 1.25, "eval/loss": 2.0}
    if phase == "reward_model":
        before, after = {}, {"eval/accuracy": 0.75, "eval/length_accuracy": 0.525}
    return {
        "stage": stage,
        "phase": phase,
        "steps": steps,
        "tokens": 1000 * steps,
        "seconds": 2.0 * steps,
        "before": before,
        "after": after,
        "note": "n<o>te",
        "time": {"rollout": 1.0 * steps, "update": 0.5 * steps, "other": 0.5 * steps},
    }


class Page(HTMLParser):
    """Checks the nesting of a page's elements and collects its tags, its text and what it refers to."""

    void = frozenset({"meta", "br", "path", "use", "wbr"})

    def __init__(self, text: str):
        super().__init__()
        self.stack, self.tags, self.refs, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.refs += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in self.void:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.refs += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        if tag not in self.void:
            assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text += data


def page_of(folder) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_whole_run(tmp_path):
    folder = make_run(tmp_path / "run")
    page = page_of(folder)
    report = json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)
    assert report["finished"] and report["missing"] == []
    assert [phase["phase"] for phase in report["phases"]] == [phase for _, phase, _ in PHASES]
    figures = {figure["label"]: figure for figure in report["key_figures"]}
    assert (figures["Bits per byte"]["before"], figures["Bits per byte"]["after"]) == (3.5, 1.25)
    assert (figures["Valid completions"]["before"], figures["Valid completions"]["after"]) == (0.25, 0.5)
    assert figures["Reward model"]["after"] == 0.75 and "length alone gets 52.5%" in figures["Reward model"]["detail"]
    # First and last 4 of 40 steps: -0.2 + mean(1..4) / 40 and -0.2 + mean(37..40) / 40.
    assert figures["PPO reward"]["before"] == pytest.approx(-0.1375)
    assert figures["PPO reward"]["after"] == pytest.approx(0.7625)
    assert "KL to the reference 1.925" in figures["PPO reward"]["detail"]
    calls = figures["Target calls per token"]
    assert calls["after"] == 0.5 and "1.250 tokens a call" in calls["detail"]
    assert report["time"] == {"rollout": 195.0, "update": 97.5, "other": 97.5}
    assert "3.500 → 1.250" in page.text and "1,180,032" in page.text and "195 steps" in page.text
    assert "not finite" in page.text  # the loss before pretraining
    assert "This run has not finished" not in page.text and "missing" not in page.text


def test_nothing_is_fetched_and_nothing_is_run(tmp_path):
    page = page_of(make_run(tmp_path / "run"))
    assert page.refs and all(ref.startswith("#") for ref in page.refs)
    assert not {"script", "link", "iframe", "img", "b>run"} & set(page.tags)
    text = (tmp_path / "run" / "report.html").read_text()
    assert not re.search(r"url\((?!#)|@import", text)


def test_text_from_data_is_escaped_and_visible(tmp_path):
    page = page_of(make_run(tmp_path / "run"))
    assert "<script>alert('x')</script>\\x1b[2J \\u202e & \"quoted\"" in page.text
    assert "a <b>run</b>" in page.text and "cpu <2 cores>" in page.text and "n<o>te" in page.text


def test_curves_start_before_and_end_after_the_phase(tmp_path):
    report = build_report(make_run(tmp_path / "run"))
    charts = {chart["title"]: chart for chart in report["phases"][0]["charts"]}
    (line,) = charts["Bits per byte, held out"]["series"]
    assert (line["steps"], line["values"], line["last"]) == ([0, 30, 60], [3.5, 2.0, 1.25], 1.25)
    training = charts["Loss"]["series"][0]
    assert training["values"][29] is None and len(training["values"]) == 60
    policy = {chart["title"]: chart for chart in report["phases"][2]["charts"]}
    assert [line["label"] for line in policy["Parts of the reward"]["series"]] == ["quality", "speed"]
    assert any("not finite (NaN or infinite): 3;" in note for note in report["footnotes"])


def test_run_of_one_stage_that_ended(tmp_path):
    folder = make_run(tmp_path / "run", phases=PHASES[:1])
    page = page_of(folder)
    assert "Finetune: policy: the run has no rows of this phase." in page.text
    assert "Some things are missing." in page.text and "PPO reward" not in page.text


def test_run_that_died_inside_a_phase(tmp_path):
    folder = make_run(tmp_path / "run", phases=PHASES[:3], finished=False, rows_of_last=10)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 101, "sta')
    page = page_of(folder)
    assert "This run has not finished." in page.text
    assert "Finetune: policy: not finished; figures are those of its rows." in page.text
    policy = json.loads((folder / "report.json").read_text())["phases"][2]
    assert (policy["steps"], policy["finished"], policy["seconds"]) == (10, False, 20.0)
    assert policy["time"] == {"rollout": 10.0, "update": 5.0, "other": 5.0}


def test_run_that_died_before_any_result(tmp_path):
    folder = make_run(tmp_path / "run", phases=PHASES[:1], rows_of_last=1)
    (folder / "results.json").unlink()
    (folder / "samples.jsonl").unlink()
    page = page_of(folder)
    for words in (
        "results.json is missing",
        "samples.jsonl is missing",
        "No completions were kept for: Pretrain",
        "Too few rows to draw curves",
    ):
        assert words in page.text
    assert "Seed" in page.text  # from the config


def test_config_alone_and_damaged_files(tmp_path):
    folder = make_run(tmp_path / "run", phases=())
    (folder / "metrics.jsonl").write_text('{"st\n{"step": 1}\n')
    (folder / "results.json").write_text("[1, 2")
    page = page_of(folder)
    assert "metrics.jsonl could not be read and is left out" in page.text
    assert "results.json could not be read and is left out" in page.text and "No phase has run." in page.text


def test_no_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no run here"):
        build_report(tmp_path)


def test_latest_look_stands_in_for_a_missing_after(tmp_path):
    folder = make_run(tmp_path / "run", phases=PHASES[:1], samples=False)
    with MetricsLog(folder / "samples.jsonl") as log:
        for step, when in ((0, "before"), (20, "during"), (40, "during")):
            head = {"step": step, "stage": "pretrain", "phase": "pretrain", "when": when, "prompt": "p"}
            log.append(head | {"completion": f"at {step}" if step else "", "reference": None, "valid": False})
    samples = build_report(folder)["phases"][0]["samples"]
    assert samples["when"] == "at step 40" and samples["pairs"][0]["after"]["completion"] == "at 40"
    assert "(empty)" in page_of(folder).text


def test_hints_and_compiled_steps_are_shown(tmp_path):
    folder = make_run(tmp_path / "run", PHASES[:2])
    results = json.loads((folder / "results.json").read_text())
    sizes = {"arguments": 1536.0, "temporaries": 3 * 2**20, "output": None, "aliased": 0.0}
    results["phases"][0] |= {
        "health": [{"name": "input-bound", "text": "<i>slow</i>"}],
        "programs": [{"name": "update", "shape": "1 x 4 x 128", "flops": 182_612_832.0, **sizes}],
        "buffers": [{"name": "train/w", "bytes": 2048.0}],
        "drafting": [
            {"size": 8, "drafter": "off", "draft_length": 0, "round_ms": 2.5, "tokens_per_call": 1.0,
             "tokens_per_second": 3200.0, "share": 0.25},
            {"size": 8, "drafter": "<eagle>", "draft_length": 5, "round_ms": 5.0, "tokens_per_call": 3.5,
             "tokens_per_second": 5600.0, "share": 0.75},
        ],
    }  # fmt: skip
    write_json(folder / "results.json", results)
    text = " ".join(page_of(folder).text.split())
    assert "Pretrain: input-bound: <i>slow</i>." in text and "Nothing was found" not in text
    assert "8<eagle>553.5005,60075.0%8off02.50013,20025.0%" in text
    assert "update, 1 x 4 x 128182.61 M1.500 KiB3 MiB–0 B" in text and "Pretrain: train/w 2 KiB" in text
    results["phases"][0]["health"] = []
    write_json(folder / "results.json", results)
    assert "Nothing was found" in page_of(folder).text


@pytest.mark.parametrize(
    "damage",
    [
        {"health": 5},
        {"health": ["x"]},
        {"programs": [{"name": "u", "flops": "x"}]},
        {"buffers": [{}]},
        {"drafting": [{"drafter": "off", "share": "much"}]},
    ],
)
def test_what_is_not_as_a_run_writes_it_is_left_out(tmp_path, damage):
    folder = make_run(tmp_path / "run", PHASES[:2])
    results = json.loads((folder / "results.json").read_text())
    results["phases"][0] |= damage
    write_json(folder / "results.json", results)
    assert "results.json: 1 entries hold values of another kind" in page_of(folder).text


def test_values_as_written():
    assert show_value("eval/valid_fraction", 0.4567) == "45.7%" and show_value("eval/loss", None) == "–"
    assert show_change("eval/valid_fraction", 0.25, 0.5) == "+25.0 pts"
    assert show_change("eval/loss", 3.0, 2.5) == "−0.500"
    numbers = (0.0, 12345.6, 123.45, 12.345, -1.2345, 0.01234, 1.2e-5)
    assert [show_number(v) for v in numbers] == ["0", "12,346", "123.5", "12.35", "−1.234", "0.0123", "1.2e-5"]
    seconds = (0.0, 1.5, 59.94, 200.0, 3900.0)
    assert [show_seconds(v) for v in seconds] == ["0 s", "1.50 s", "59.9 s", "3 min 20 s", "1 h 05 min"]
    assert [show_count(v) for v in (None, 812, 4_915_200, 2e9)] == ["–", "812", "4.92 M", "2.00 B"]


def test_importing_the_room_loads_nothing_slow():
    code = "import sys, tlt_jax.observe; print([m for m in ('jax', 'matplotlib', 'tensorboardX') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
