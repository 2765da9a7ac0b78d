"""The report of a run: report.json with every figure, report.html to read.

Whatever the run left is reported, and what is missing is named: a run that died, that did one stage, or that kept no
samples has a report too.
"""

import math
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tlt_jax.observe.figures import RL_PHASES, charts_for, is_percent, phase_label, show_number, show_value, spoken
from tlt_jax.observe.files import plain, write_json, write_text_atomically
from tlt_jax.observe.goodput import account_of
from tlt_jax.observe.plots import strong_line
from tlt_jax.observe.run_files import Row, read_run_files, section

STAGE_PHASES = {
    "pretrain": ("pretrain",),
    "finetune": ("warmup", "policy"),
    "align": ("reward_model", "ppo"),
    "distill": ("drafters",),
}
SAMPLES_SHOWN = 4  # prompts a phase
EDGE = 0.1  # share of a phase's steps that "first" and "last" of a noisy metric average over
INSIGHT = ("health", "programs", "buffers", "drafting")  # lists that only results.json holds
PHASE_FIELDS = ("stage", "phase", "steps", "tokens", "seconds", "before", "after", "time", "note", *INSIGHT)


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write report.json and report.html of a run, each atomically; returns the path of the page.

    Raises ValueError where `run_dir` holds no run.
    """
    from tlt_jax.observe.page import render_page  # and, with it, the drawings

    run_dir = Path(run_dir)
    report = build_report(run_dir)
    write_text_atomically(run_dir / "report.html", render_page(report))
    write_json(run_dir / "report.json", report)
    return run_dir / "report.html"


def build_report(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """All figures of a run, as plain JSON values.

    Keys: name, finished, created, facts, config (its text), key_figures, phases (with curves and samples), time
    (kinds, seconds by kind), account (of all starts; None where none was kept),
    missing (sentences on what the run lacks), footnotes (sentences on how to read it).
    Raises ValueError where `run_dir` holds no run.
    """
    run_dir = Path(run_dir)
    if not any((run_dir / name).exists() for name in ("config.yaml", "metrics.jsonl", "results.json")):
        raise ValueError(f"{run_dir}: no run here (expected a folder with config.yaml, metrics.jsonl or results.json)")
    files = read_run_files(run_dir)
    phases = _phases(files.rows, files.samples, files.records)
    stages = files.config.get("stages")
    stages = [stage for stage in stages if isinstance(stage, str)] if isinstance(stages, list) else []
    report = {
        "name": str(section(files.config, "run").get("name") or run_dir.resolve().name),
        "finished": files.finished,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "facts": files.facts or _facts_from_config(files.config),
        "config": files.config_text,
        "key_figures": _key_figures(phases, files.rows),
        "phases": phases,
        "time": _total_time(phases),
        "account": account_of(files.account),
        "missing": files.missing + _missing_phases(phases, stages, section(files.facts, "data")),
        "footnotes": _footnotes(phases, files.rows, files.config, files.facts),
    }
    return plain(report)


def _facts_from_config(config: dict[str, Any]) -> dict[str, Any]:
    """What is known of a run that died before it wrote its facts."""
    run, speculation = section(config, "run"), section(config, "speculation")
    facts = {
        "seed": run.get("seed"),
        "drafter": speculation.get("drafter"),
        "draft_length": speculation.get("draft_length"),
        "budget": config.get("budget"),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _phases(rows: list[Row], samples: list[Row], results: list[Row]) -> list[dict[str, Any]]:
    """One entry a phase, in the order they ran: what results.json says, else what the rows tell."""
    done = {(entry.get("stage"), entry.get("phase")): entry for entry in results}
    by_phase: dict[tuple[Any, Any], list[Row]] = {key: [] for key in done}
    for row in rows:
        by_phase.setdefault((row.get("stage"), row.get("phase")), []).append(row)
    order = [(stage, phase) for stage, names in STAGE_PHASES.items() for phase in names]
    keys = sorted(by_phase, key=lambda key: order.index(key) if key in order else len(order))
    phases, seconds_before = [], 0.0
    for stage, phase in keys:
        own = by_phase[stage, phase]
        result = done.get((stage, phase)) or _result_from_rows(stage, phase, own, seconds_before)
        seconds_before = max([seconds_before, *(row.get("seconds") or 0.0 for row in own)])
        phases.append(
            {name: result.get(name) for name in PHASE_FIELDS}
            | {
                "label": phase_label(str(stage), str(phase)),
                "finished": bool(done.get((stage, phase), {}).get("after")),
                "last": _last_values(own),
                "charts": _charts(own, result.get("before") or {}, result.get("after") or {}),
                "samples": _samples([s for s in samples if (s.get("stage"), s.get("phase")) == (stage, phase)]),
            }
        )
    return phases


def _result_from_rows(stage: Any, phase: Any, rows: list[Row], seconds_before: float) -> dict[str, Any]:
    """The entry that results.json would hold, as far as the rows of an unfinished phase tell it."""
    time: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            # time/step is the sum of the others.
            if name.startswith("time/") and name != "time/step" and isinstance(value, int | float):
                time[name.removeprefix("time/")] = time.get(name.removeprefix("time/"), 0.0) + value
    seconds = max((row.get("seconds") or 0.0 for row in rows), default=seconds_before) - seconds_before
    if seconds > sum(time.values()):
        time["other"] = time.get("other", 0.0) + seconds - sum(time.values())
    return {
        "stage": stage, "phase": phase, "steps": len(rows), "tokens": None, "seconds": seconds,
        "before": {}, "after": {}, "time": time, "note": None,
    }  # fmt: skip


def _last_values(rows: list[Row]) -> dict[str, float]:
    last: dict[str, float] = {}
    for row in rows:
        last.update({n: v for n, v in row.items() if "/" in n and isinstance(v, int | float)})
    return last


def _charts(rows: list[Row], before: Row, after: Row) -> list[dict[str, Any]]:
    """Every chart that the phase has two points or more for; null stands where a value was not finite.

    "last" of a line is where its smoothed line ends, as the last value of a noisy metric says little.
    What was measured before the phase stands at step 0, and after it at its last step.
    """
    last_step = max((_phase_step(row) for row in rows), default=0)
    charts = []
    for chart in charts_for({name for row in rows for name in row if "/" in name}):
        series: list[dict[str, Any]] = []
        for metric, label in chart.metrics:
            points = [(_phase_step(row), row[metric]) for row in rows if metric in row]
            if not points:  # two ends alone are for the table
                continue
            if before.get(metric) is not None:
                points.insert(0, (0, before[metric]))
            if after.get(metric) is not None and points[-1][0] < last_step:
                points.append((last_step, after[metric]))
            if sum(value is not None for _, value in points) >= 2:
                steps, values = [step for step, _ in points], [value for _, value in points]
                strong = strong_line([math.nan if value is None else value for value in values], chart.exact)
                last = next(value for value in reversed(strong) if not math.isnan(value))
                series.append({"metric": metric, "label": label, "last": last, "steps": steps, "values": values})
        if series:
            percent = is_percent(series[0]["metric"])
            drawn = {"title": chart.title, "minor": chart.minor, "exact": chart.exact, "marks": list(chart.marks)}
            charts.append(drawn | {"percent": percent, "last_step": last_step, "series": series})
    return charts


def _phase_step(row: Row) -> int:
    step = row.get("phase_step")
    return row["step"] if step is None else step


def _samples(samples: list[Row]) -> dict[str, Any]:
    """Completions of the same prompts before and after a phase; its latest look stands in for a missing "after"."""
    before = [sample for sample in samples if sample.get("when") == "before"]
    after = [sample for sample in samples if sample.get("when") == "after"]
    when = "after"
    if not after:
        during = [sample for sample in samples if sample.get("when") == "during"]
        after = [sample for sample in during if sample["step"] == during[-1]["step"]] if during else []
        when = f"at step {after[0]['step']}" if after else "after"
    prompts = list(dict.fromkeys(str(sample.get("prompt", "")) for sample in [*after, *before]))
    pairs = []
    for prompt in prompts:
        ends = _of_prompt(before, prompt), _of_prompt(after, prompt)
        reference = next((end["reference"] for end in ends if end and end["reference"]), None)
        pairs.append({"prompt": prompt, "before": ends[0], "after": ends[1], "reference": reference})
    return {"when": when, "kept": len(pairs), "pairs": pairs[:SAMPLES_SHOWN]}


def _of_prompt(samples: list[Row], prompt: str) -> dict[str, Any] | None:
    for sample in samples:
        if str(sample.get("prompt", "")) == prompt:
            completion = sample.get("completion")
            return {"completion": completion, "valid": sample.get("valid"), "reference": sample.get("reference")}
    return None


def _missing_phases(phases: list[dict[str, Any]], stages: list[str], data: Row) -> list[str]:
    there = {(phase["stage"], phase["phase"]) for phase in phases}
    missing = []
    for stage in stages:
        lacking = [phase_label(stage, phase) for phase in STAGE_PHASES.get(stage, ()) if (stage, phase) not in there]
        missing += [f"{label}: the run has no rows of this phase." for label in lacking]
    unfinished = [phase["label"] for phase in phases if not phase["finished"]]
    missing += [f"{label}: not finished; figures are those of its rows." for label in unfinished]
    # A reward model completes nothing, and pretraining on data without tasks has nothing to complete.
    without = {"reward_model", *(["pretrain"] if data.get("tasks_held_out") == 0 else [])}
    lacking = [p["label"] for p in phases if not p["samples"]["pairs"] and p["phase"] not in without]
    if lacking:
        missing.append(f"No completions were kept for: {', '.join(lacking)}.")
    return missing


def _key_figures(phases: list[dict[str, Any]], rows: list[Row]) -> list[dict[str, Any]]:
    """The headline row; a figure the run has no data for is left out, and the page says so under "missing"."""
    figures = [
        _bits_per_byte(phases), _valid_completions(phases), _reward_accuracy(phases), _ppo_reward(rows), _calls(rows),
    ]  # fmt: skip
    return [figure for figure in figures if figure is not None]


def _bits_per_byte(phases: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Of the first phase that measured it: pretraining, in a whole run."""
    metric = "eval/bits_per_byte"
    ends = [(phase, *_ends(phase, metric)) for phase in phases]
    ends = [end for end in ends if end[2] is not None]
    if not ends:
        return None
    phase, before, after = ends[0]
    detail = f"held-out text, {spoken(phase['label'])}"
    if len(ends) > 1:
        detail += f"; {show_value(metric, ends[-1][2])} after {spoken(ends[-1][0]['label'])}"
    return _figure("Bits per byte", metric, before, after, detail)


def _valid_completions(phases: list[dict[str, Any]]) -> dict[str, Any] | None:
    metric = "eval/valid_fraction"
    # Where the drafters alone are trained, the policy does not change.
    ends = [(phase, *_ends(phase, metric)) for phase in phases if phase["stage"] != "distill"]
    ends = [end for end in ends if end[2] is not None]
    if not ends:
        return None
    detail = "held-out prompts, after " + ", ".join(
        f"{spoken(phase['label'].split(': ')[-1])} {show_value(metric, after)}" for phase, _, after in ends
    )
    return _figure("Valid completions", metric, ends[0][1], ends[-1][2], detail)


def _reward_accuracy(phases: list[dict[str, Any]]) -> dict[str, Any] | None:
    for phase in phases:
        accuracy, length = _ends(phase, "eval/accuracy")[1], _ends(phase, "eval/length_accuracy")[1]
        if phase["phase"] == "reward_model" and accuracy is not None:
            against = "no length-only baseline was measured"
            if length is not None:
                against = f"length alone gets {show_value('eval/accuracy', length)}"
            pairs, trained = _ends(phase, "eval/pairs")[1], _ends(phase, "eval/training_pairs")[1]
            counted = "" if pairs is None else f"{show_number(pairs)} "
            after = "" if trained is None else f" after {show_number(trained)} training pairs"
            detail = f"accuracy on {counted}held-out pairs{after}; {against}"
            return _figure("Reward model", "eval/accuracy", None, accuracy, detail)
    return None


def _ppo_reward(rows: list[Row]) -> dict[str, Any] | None:
    own = [row for row in rows if row.get("phase") == "ppo"]
    first, last = _edges(own, "rl/reward")
    if last is None:
        return None
    kl = _edges(own, "rl/kl")[1]
    detail = "mean of the first and the last tenth of the steps"
    detail += f"; KL to the reference {show_number(kl)} at the end" if kl is not None else "; no KL was measured"
    return _figure("PPO reward", "rl/reward", first, last, detail)


def _calls(rows: list[Row]) -> dict[str, Any] | None:
    own = [row for row in rows if row.get("phase") in RL_PHASES]
    calls = _finite(own, "rollout/target_calls_per_token")
    if not calls:
        return None
    detail = "mean over the rollouts; 1 without speculation"
    accepted = _finite(own, "rollout/accepted_length")
    if accepted:
        detail += f"; {show_number(sum(accepted) / len(accepted))} tokens a call, its own among them"
    return _figure("Target calls per token", "rollout/target_calls_per_token", None, sum(calls) / len(calls), detail)


def _figure(label: str, metric: str, before: float | None, after: float | None, detail: str) -> dict[str, Any]:
    return {"label": label, "metric": metric, "before": before, "after": after, "detail": detail}


def _ends(phase: dict[str, Any], metric: str) -> tuple[float | None, float | None]:
    """A metric before and after a phase; of an unfinished phase, its last row's."""
    before, after = (phase["before"] or {}).get(metric), (phase["after"] or {}).get(metric)
    return before, phase["last"].get(metric) if after is None and not phase["finished"] else after


def _edges(rows: list[Row], metric: str) -> tuple[float | None, float | None]:
    """Means over the first and the last tenth of the steps, as one step of a reward is mostly noise."""
    values = _finite(rows, metric)
    if not values:
        return None, None
    count = max(1, math.ceil(EDGE * len(values)))
    return sum(values[:count]) / count, sum(values[-count:]) / count


def _finite(rows: list[Row], metric: str) -> list[float]:
    return [row[metric] for row in rows if isinstance(row.get(metric), int | float)]


def _total_time(phases: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by kind over all phases, the largest first and "other" last."""
    total: dict[str, float] = {}
    for phase in phases:
        for kind, seconds in (phase["time"] or {}).items():
            total[kind] = total.get(kind, 0.0) + (seconds or 0.0)
    return dict(sorted(total.items(), key=lambda item: (item[0] == "other", -item[1])))


def _footnotes(phases: list[Row], rows: list[Row], config: dict[str, Any], facts: Row) -> list[str]:
    """What a careful reader would ask."""
    notes = []
    loops = [(phase["label"], _ends(phase, "eval/loop_fraction")[1], phase["last"]) for phase in phases]
    shares = [(label, last.get("rollout/loop_fraction") if share is None else share) for label, share, last in loops]
    measured = [(label, share) for label, share in shares if share is not None]
    said = ", ".join(f"{spoken(label)} {show_value('_fraction', share)}" for label, share in measured)
    if said:
        notes.append(f"Completions that end in a loop can still be valid. Their share at the last measurement: {said}.")
    elif any("eval/valid_fraction" in phase["last"] or phase["after"] for phase in phases):
        notes.append("The share of completions that end in a loop was not measured.")
    temperature = section(config, "sampling").get("temperature")
    if isinstance(temperature, int | float) and any(phase["phase"] in RL_PHASES for phase in phases):
        notes.append(f"Rollouts were sampled at temperature {temperature:g}.")
    if facts.get("evaluation_decoding"):
        notes.append(f"Evaluated and shown completions: {facts['evaluation_decoding']}.")
    else:
        notes.append("How evaluated and shown completions were drawn (greedy or sampled) is not recorded in this run.")
    if any(phase["phase"] == "ppo" for phase in phases):
        notes.append(
            "The reward in PPO is the opinion of the reward model that this run trained, not a judgement from outside; "
            "it counts for little where the KL to the reference has grown large."
        )
    differences = _finite(rows, "rollout/logprob_abs_diff_max")
    if differences:
        notes.append(
            "Largest difference between a token's log-probability when it was sampled and when the update computed it "
            f"again: {show_number(max(differences))}."
        )
    nulls = sum(value is None for row in rows for name, value in row.items() if "/" in name)
    if nulls:
        notes.append(f"Measured values that were not finite (NaN or infinite): {nulls}; curves have gaps there.")
    notes.append(
        "Curves: the light line is every step, the strong line a running mean over a tenth of the phase. The number "
        "beside a curve's name is where its strong line ends."
    )
    return notes
