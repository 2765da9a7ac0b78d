"""report.html from the figures of a report: one file, no scripts, nothing fetched.

Every text that comes from data passes `escape`.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tlt_jax.observe.figures import show_change, show_count, show_number, show_seconds, show_value
from tlt_jax.observe.goodput import render_account
from tlt_jax.observe.markup import cells, escape
from tlt_jax.observe.page_insight import drafting_section, health_section, programs_section
from tlt_jax.observe.plots import Series, curve_svg
from tlt_jax.observe.style import CSS

# Fixed, so that a kind of time has its colour in every report.
KIND_COLOURS = {
    "rollout": 1,
    "update": 3,
    "reward": 2,
    "evaluate": 4,
    "compile": 6,
    "checkpoint": 5,
    "other": 0,
}
FACT_LABELS = {
    "device": "Device",
    "device_count": "Devices",
    "mesh": "Mesh",
    "parameters": "Parameters",
    "peak": "Peak for utilisation",
    "versions": "Versions",
    "python": "Python",
    "started": "Started",
    "finished": "Finished",
    "seed": "Seed",
    "drafter": "Drafter",
    "draft_length": "Draft length",
    "verification": "Verification",
    "evaluation_decoding": "Evaluation",
    "budget": "Budget",
    "data": "Data",
    "profile": "Trace",
}
SAMPLES_OPEN = 2  # prompts a phase that are not folded away
LEGEND_DASHES = ("", "7 3", "2 2", "6 2 2 2", "8 2 2 2 2 2", "4 4")


def render_page(report: dict[str, Any]) -> str:
    """The whole page for a report of `build_report`."""
    phases = report["phases"]
    body = [
        _header(report),
        _figures(report["key_figures"]),
        _facts(report["facts"]),
        health_section(phases),
        *(_phase(phase) for phase in phases),
        _time(phases, report["time"], report["account"]),
        drafting_section(phases),
        programs_section(phases),
        _all_metrics(phases),
        _notes(report),
    ]
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report['name'])}: training report</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(part for part in body if part) + "\n</body>\n</html>\n"


def _header(report: dict[str, Any]) -> str:
    phases = report["phases"]
    seconds = sum(phase["seconds"] or 0.0 for phase in phases)
    steps = sum(phase["steps"] or 0 for phase in phases)
    said = [f"{len(phases)} phase{'s' if len(phases) != 1 else ''}", f"{steps:,} steps", show_seconds(seconds)]
    links = [(f"#{_anchor(phase)}", phase["label"]) for phase in phases]
    compiled = [("#programs", "Compiled steps")] if any(phase["programs"] for phase in phases) else []
    last = [("#time", "Time"), *compiled, ("#metrics", "All metrics"), ("#notes", "Notes")]
    health = [("#health", "Health")] if any(phase["health"] is not None for phase in phases) else []
    links = [("#setup", "Setup"), *health, *links, *last]
    nav = "".join(f'<a href="{escape(target)}">{escape(label)}</a>' for target, label in links)
    return (
        f'<header><div class="over">Training report</div><h1>{escape(report["name"])}</h1>'
        f"<p>{escape(' · '.join(said))}</p><nav>{nav}</nav></header>{_warning(report)}"
    )


def _warning(report: dict[str, Any]) -> str:
    if report["finished"] and not report["missing"]:
        return ""
    words = "Some things are missing." if report["finished"] else "This run has not finished."
    items = "".join(f"<li>{escape(item)}</li>" for item in report["missing"])
    return f'<div class="warning"><strong>{words}</strong>{f"<ul>{items}</ul>" if items else ""}</div>'


def _figures(figures: list[dict[str, Any]]) -> str:
    cards = []
    for figure in figures:
        after, before = show_value(figure["metric"], figure["after"]), ""
        if figure["before"] is not None:
            before = f'<span class="from">{escape(show_value(figure["metric"], figure["before"]))} → </span>'
        cards.append(
            f'<div><h2>{escape(figure["label"])}</h2><p class="big">{before}{escape(after)}</p>'
            f'<p class="detail">{escape(figure["detail"])}</p></div>'
        )
    return f'<section class="figures">{"".join(cards)}</section>' if cards else ""


def _facts(facts: dict[str, Any]) -> str:
    names = [name for name in FACT_LABELS if name in facts] + [name for name in facts if name not in FACT_LABELS]
    texts = {name: _fact(name, facts[name]) for name in names if facts[name] is not None}
    rows = []
    for name in sorted(texts, key=lambda name: len(texts[name]) > 48):  # long ones last, over both columns
        label = FACT_LABELS.get(name, name.replace("_", " ").capitalize())
        wide = ' class="wide"' if len(texts[name]) > 48 else ""
        rows.append(f"<div{wide}><dt>{escape(label)}</dt><dd>{escape(texts[name])}</dd></div>")
    table = f'<dl class="facts">{"".join(rows)}</dl>' if rows else '<p class="none">Not recorded.</p>'
    return f'<section><h2 id="setup">What ran on what</h2>{table}</section>'


def _fact(name: str, value: Any) -> str:
    if isinstance(value, dict):
        if "total" in value and "unit" in value:  # a budget reads as an amount
            value = {_fact("total", value["total"]): value["unit"]} | value
            del value["total"], value["unit"]
        if name != "versions":  # packages keep their own spelling
            value = {key.replace("_", " "): item for key, item in value.items()}
        return " · ".join(f"{key} {_fact(key, item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_fact(name, item) for item in value)
    if name in ("started", "finished") and isinstance(value, int | float):
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if isinstance(value, float):
        return show_number(value)
    if isinstance(value, int) and not isinstance(value, bool) and name != "seed":
        return f"{value:,}"
    return str(value)


def _phase(phase: dict[str, Any]) -> str:
    said = [f"{phase['steps'] or 0:,} steps"]
    if phase["tokens"] is not None:
        said.append(f"{show_count(phase['tokens'])} tokens")
    said.append(show_seconds(phase["seconds"]))
    if not phase["finished"]:
        said.append("not finished")
    note = f'<p class="note">{escape(phase["note"])}</p>' if phase["note"] else ""
    return (
        f'<section><h2 id="{escape(_anchor(phase))}">{escape(phase["label"])}</h2>'
        f'<p class="meta">{escape(" · ".join(said))}</p>{note}{_charts(phase)}{_samples(phase["samples"])}</section>'
    )


def _charts(phase: dict[str, Any]) -> str:
    """The phase's main drawings, and the minor ones folded away."""
    main = [chart for chart in phase["charts"] if not chart["minor"]]
    minor = [chart for chart in phase["charts"] if chart["minor"]]
    if not main:
        main, minor = minor, []
    if not main:
        return '<p class="none">Too few rows to draw curves.</p>'
    result = f'<div class="charts">{"".join(_chart(phase, chart) for chart in main)}</div>'
    if minor:
        titles = " · ".join(chart["title"].lower() for chart in minor)
        drawings = "".join(_chart(phase, chart) for chart in minor)
        result += f'<details><summary>More: {escape(titles)}</summary><div class="charts">{drawings}</div></details>'
    return result


def _anchor(phase: dict[str, Any]) -> str:
    return f"{phase['stage']}-{phase['phase']}"


def _chart(phase: dict[str, Any], chart: dict[str, Any]) -> str:
    svg = curve_svg(
        [Series(line["steps"], [_number(value) for value in line["values"]]) for line in chart["series"]],
        key=f"{_anchor(phase)} {chart['title']}",
        last_step=chart["last_step"],
        percent=chart["percent"],
        marks=chart["marks"],
        exact=chart["exact"],
    )
    svg = svg.replace("<svg", f'<svg class="chart" role="img" aria-label="{escape(chart["title"])}"', 1)
    keys = []
    for index, line in enumerate(chart["series"]):
        keys.append(
            f'<span class="key"><svg viewBox="0 0 22 8" aria-hidden="true"><path d="M0 4H22" fill="none" '
            f'stroke="var(--c{index % 6 + 1})" stroke-width="2.5" stroke-dasharray="{LEGEND_DASHES[index % 6]}"/></svg>'
            f"{escape(line['label'])} {escape(show_value(line['metric'], line['last']))}</span>"
        )
    return f"<figure><figcaption><b>{escape(chart['title'])}</b>{''.join(keys)}</figcaption>{svg}</figure>"


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _samples(samples: dict[str, Any]) -> str:
    pairs = samples["pairs"]
    if not pairs:
        return ""
    shown = f", {len(pairs)} of {samples['kept']} prompts" if samples["kept"] > len(pairs) else ""
    blocks = []
    for pair in pairs:
        reference = ""
        if pair["reference"]:
            reference = f"<details><summary>Reference</summary><pre>{escape(pair['reference'])}</pre></details>"
        blocks.append(
            f'<div class="sample"><h4>Prompt</h4><pre>{escape(pair["prompt"])}</pre><div class="pair">'
            f"{_completion('Before', pair['before'])}{_completion(samples['when'].capitalize(), pair['after'])}</div>"
            f"{reference}</div>"
        )
    folded = ""
    if len(blocks) > SAMPLES_OPEN:
        rest = blocks[SAMPLES_OPEN:]
        folded = f"<details><summary>{len(rest)} more</summary>{''.join(rest)}</details>"
    return f"<h3>Completions before and after{shown}</h3>{''.join(blocks[:SAMPLES_OPEN])}{folded}"


def _completion(title: str, sample: dict[str, Any] | None) -> str:
    if sample is None:
        return f'<div><h4>{escape(title)}</h4><p class="none">not kept</p></div>'
    tag = ""
    if sample["valid"] is not None:
        kind, words = ("yes", "✓ valid") if sample["valid"] else ("no", "✗ not valid")
        tag = f' · <span class="tag {kind}">{words}</span>'
    text = escape(sample["completion"]) if sample["completion"] else '<span class="none">(empty)</span>'
    return f"<div><h4>{escape(title)}{tag}</h4><pre>{text}</pre></div>"


def _time(phases: list[dict[str, Any]], total: dict[str, float], account: dict[str, Any] | None) -> str:
    """A bar a phase, as long as the phase took, split by kind; the same in numbers below; then the whole run's."""
    if not sum(total.values()):
        return '<section><h2 id="time">Where the time went</h2><p class="none">Not measured.</p></section>'
    kinds = [kind for kind, seconds in total.items() if seconds > 0]
    longest = max(sum(_times(phase).values()) for phase in phases)
    bars = []
    for phase in phases:
        times = _times(phase)
        seconds = sum(times.values())
        parts = "".join(
            f'<i style="width:{100 * times[kind] / seconds:.2f}%;background:{_colour(kind)}" '
            f'title="{escape(kind)} {escape(show_seconds(times[kind]))}"></i>'
            for kind in kinds
            if times.get(kind) and seconds
        )
        bars.append(
            f"<span>{escape(phase['label'])}</span><span>{escape(show_seconds(seconds))}</span>"
            f'<span class="bar" style="width:{100 * seconds / longest:.2f}%">{parts}</span>'
        )
    legend = "".join(
        f'<span><span class="dot" style="background:{_colour(kind)}"></span>{escape(kind)}</span>' for kind in kinds
    )
    return (
        f'<section><h2 id="time">Where the time went</h2><div class="bars">{"".join(bars)}</div>'
        f'<div class="legend">{legend}</div>{_time_table(phases, total, kinds)}{render_account(account)}</section>'
    )


def _time_table(phases: list[dict[str, Any]], total: dict[str, float], kinds: Sequence[str]) -> str:
    head = "".join(f'<th scope="col" class="n">{escape(kind)}</th>' for kind in kinds)
    rows = [
        f'<tr><th scope="row">{escape(phase["label"])}</th>'
        + cells(show_seconds(_times(phase).get(kind) or None) for kind in kinds)
        + cells([show_seconds(sum(_times(phase).values()))])
        + "</tr>"
        for phase in phases
    ]
    everything = sum(total.values())
    rows.append(
        '<tr><th scope="row">All</th>'
        + cells(show_seconds(total[kind]) for kind in kinds)
        + cells([show_seconds(everything)])
        + '</tr><tr class="sum"><th scope="row">Share</th>'
        + cells(f"{100 * total[kind] / everything:.1f}%" for kind in kinds)
        + cells(["100%"])
        + "</tr>"
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr><th scope="col">Phase</th>{head}'
        f'<th scope="col" class="n">all</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _times(phase: dict[str, Any]) -> dict[str, float]:
    return {kind: seconds for kind, seconds in (phase["time"] or {}).items() if seconds}


def _colour(kind: str) -> str:
    return f"var(--c{KIND_COLOURS.get(kind, 0)})"


def _all_metrics(phases: list[dict[str, Any]]) -> str:
    """Every metric measured before and after a phase, with its change."""
    groups = []
    for phase in phases:
        before, after = phase["before"] or {}, phase["after"] or {}
        names = list(dict.fromkeys([*before, *after]))
        rows = "".join(
            f'<tr><th scope="row">{escape(name).replace("_", "_<wbr>")}</th>'
            + cells(
                [
                    _measured(name, before),
                    _measured(name, after),
                    show_change(name, before.get(name), after.get(name)),
                ]
            )
            + "</tr>"
            for name in names
        )
        rows = rows or '<tr><td colspan="4" class="none">nothing was measured before or after</td></tr>'
        groups.append(f'<tbody><tr class="group"><th colspan="4">{escape(phase["label"])}</th></tr>{rows}</tbody>')
    title = '<h2 id="metrics">Before and after each phase</h2>'
    if not groups:
        return f'<section>{title}<p class="none">No phase has run.</p></section>'
    head = "".join(f'<th scope="col" class="n">{word}</th>' for word in ("Before", "After", "Change"))
    return (
        f'<section>{title}<table class="all"><thead><tr>'
        f'<th scope="col">Metric</th>{head}</tr></thead>{"".join(groups)}</table></section>'
    )


def _measured(name: str, values: dict[str, Any]) -> str:
    return "not finite" if name in values and values[name] is None else show_value(name, values.get(name))


def _notes(report: dict[str, Any]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in report["footnotes"])
    config = ""
    if report["config"]:
        config = f"<details><summary>The config, resolved</summary><pre>{escape(report['config'])}</pre></details>"
    return (
        f'<section><h2 id="notes">How to read this</h2><ul class="notes">{items}</ul>{config}</section>'
        f"<footer>Written {escape(report['created'])} from the run's own files. "
        "The same figures are in report.json.</footer>"
    )
