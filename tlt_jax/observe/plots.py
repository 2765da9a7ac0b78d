"""Curves as small inline SVG drawings.

Lines take their colours from the page by CSS variables (`--c1` to `--c6`, after Okabe and Ito, told apart by
colour-blind readers) and text from `currentColor`, so that one drawing serves light, dark and paper. Line styles
differ too, as a printed page may have no colour at all.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_POINTS = 240  # per line: more than a small drawing has pixels to show
SMOOTH_FROM = 20  # points; fewer are drawn as they are, with markers
LINE_STYLES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), "-.", (0, (7, 2, 1, 2, 1, 2)), (0, (3, 3)))
# Stand-ins that the drawing is made with and that are then replaced by what the page decides.
_COLOURS = ("#010101", "#020202", "#030303", "#040404", "#050505", "#060606")
_INK, _GRID = "#0a0a0a", "#0b0b0b"


@dataclass(frozen=True)
class Series:
    """One line: `steps` and `values` of the same length; NaN makes a gap."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]


def smooth(values: Sequence[float], window: float) -> list[float]:
    """Exponential moving average over about `window` points, corrected for its start as Adam's moments are.

    m_t = d m_{t-1} + (1 - d) v_t with d = 1 - 1 / window, divided by 1 - d^t. A NaN stays NaN and leaves the mean alone.
    """
    decay = 1.0 - 1.0 / max(window, 1.0)
    mean, weight, result = 0.0, 0.0, []
    for value in values:
        if math.isnan(value):
            result.append(value)
            continue
        mean = decay * mean + (1.0 - decay) * value
        weight = decay * weight + (1.0 - decay)
        result.append(mean / weight)
    return result


def thin(steps: Sequence[float], values: Sequence[float], points: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """At most about `points` of a line's points; each bin keeps its lowest and its highest, so that spikes survive."""
    if len(values) <= points:
        return list(steps), list(values)
    size = math.ceil(len(values) / (points // 2))
    kept: list[int] = []
    for start in range(0, len(values), size):
        finite = [i for i in range(start, min(start + size, len(values))) if not math.isnan(values[i])]
        if not finite:
            kept.append(start)
            continue
        lowest, highest = min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)
        kept.extend(sorted({lowest, highest}))
    return [steps[i] for i in kept], [values[i] for i in kept]


def curve_svg(series: Sequence[Series], key: str, percent: bool = False, marks: Sequence[float] = ()) -> str:
    """An `<svg>` element with one line a series: the raw line light, its smoothed line strong.

    Legend and title are left to the page, which sets them in its own type. `key` names the drawing, so that ids
    inside it differ from other drawings' on the page; `percent` labels the axis in percent; `marks` are levels drawn
    as thin lines (a baseline). Values that are not finite leave gaps.
    """
    import matplotlib  # half a second, which only a report should pay
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    settings = {"svg.fonttype": "none", "svg.hashsalt": key, "font.size": 8.0, "path.simplify": True}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(3.6, 2.0))
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.125, 0.13, 0.855, 0.83))
        for level in marks:
            axes.axhline(level, color=_INK, linewidth=0.7, alpha=0.5, linestyle=(0, (2, 2)))
        for index, line in enumerate(series):
            _draw_line(axes, line, index)
        _set_limits(axes, series, marks)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(_GRID)
        axes.grid(axis="y", color=_GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(colors=_INK, length=0, pad=3)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
        ticks = axes.get_yticks()
        digits = _digits(ticks, percent)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, digits, percent)))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _for_page(buffer.getvalue())


def _draw_line(axes: Any, line: Series, index: int) -> None:
    colour, style = _COLOURS[index % len(_COLOURS)], LINE_STYLES[index % len(LINE_STYLES)]
    values = [value if math.isfinite(value) else math.nan for value in line.values]
    if len(values) < SMOOTH_FROM:
        axes.plot(line.steps, values, color=colour, linewidth=1.5, linestyle=style, marker="o", markersize=2.8)
        return
    axes.plot(*thin(line.steps, values), color=colour, linewidth=0.7, alpha=0.28)
    axes.plot(*thin(line.steps, smooth(values, len(values) / 20)), color=colour, linewidth=1.5, linestyle=style)


def _set_limits(axes: Any, series: Sequence[Series], marks: Sequence[float]) -> None:
    """Fit the y axis to the curves without their rarest outliers, so that one spike doesn't flatten the rest."""
    lows, highs = list(marks), list(marks)
    for line in series:
        values = sorted(value for value in line.values if math.isfinite(value))
        if values:
            cut = len(values) // 100 if len(values) >= SMOOTH_FROM else 0
            lows.append(values[cut])
            highs.append(values[-1 - cut])
    if not lows:
        return
    low, high = min(lows), max(highs)
    margin = 0.07 * (high - low) or 0.05 * abs(high) or 1.0
    # A quantity that is never negative gets no axis below 0.
    axes.set_ylim(max(low - margin, 0.0) if low >= 0 else low - margin, high + margin)


def _digits(ticks: Sequence[float], percent: bool) -> int:
    gap = float(ticks[1] - ticks[0]) * (100 if percent else 1) if len(ticks) > 1 else 1.0
    return max(0, -math.floor(math.log10(gap) + 1e-9) + (1 if round(gap / 10 ** math.floor(math.log10(gap)), 6) % 1 else 0))


def _tick(value: float, digits: int = 0, percent: bool = False) -> str:
    if percent:
        return f"{100 * value:.{digits}f}%"
    if value and (digits > 4 or abs(value) >= 1e7):
        mantissa, exponent = f"{value:.2g}".split("e") if "e" in f"{value:.2g}" else (f"{value:.2g}", "")
        return f"{mantissa}e{int(exponent)}" if exponent else mantissa
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.{digits}f}"


def _for_page(svg: str) -> str:
    """Strip what a page doesn't need and hand colours and type to its style sheet."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    # A rule for every element of the whole page, once it stands inline; the page sets it for drawings alone.
    svg = re.sub(r"<defs>\s*<style type=\"text/css\">.*?</style>\s*</defs>", "", svg, flags=re.S)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"<g id=\"[^\"]*\"", "<g", svg)
    svg = re.sub(r"(<svg[^>]*?) width=\"[^\"]*\"", r"\1", re.sub(r"(<svg[^>]*?) height=\"[^\"]*\"", r"\1", svg))
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    for number, colour in enumerate(_COLOURS, start=1):
        svg = svg.replace(colour, f"var(--c{number})")
    svg = svg.replace(_INK, "currentColor").replace(_GRID, "var(--grid)")
    return re.sub(r"\n\s*", "\n", svg).strip()
