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
LARGEST_DRAWN = 1e100  # beyond it, an axis overflows
SMOOTH_FROM = 20  # points; fewer are drawn as they are, with markers
LINE_STYLES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), "-.", (0, (7, 2, 1, 2, 1, 2)), (0, (3, 3)))
# Stand-ins that the drawing is made with and that are then replaced by what the page decides.
_COLOURS = ("#010101", "#020202", "#030303", "#040404", "#050505", "#060606")
_INK, _GRID = "#0a0a0a", "#0b0b0b"


@dataclass(frozen=True)
class Series:
    """One line: `steps` and `values` of the same length; NaN makes a gap."""

    steps: Sequence[float]
    values: Sequence[float]


def smooth(values: Sequence[float], half: int) -> list[float]:
    """Running mean over the `half` points on either side, so that it lags behind nothing.

    Towards an end the window narrows, down to half its reach: at full width a steep start would be flattened, and with
    no width at all the line would end in one noisy value. A NaN stays NaN and is left out of its neighbours' means.
    """
    sums, counts = [0.0], [0]
    for value in values:
        known = not math.isnan(value)
        sums.append(sums[-1] + (value if known else 0.0))
        counts.append(counts[-1] + known)
    result = []
    for index, value in enumerate(values):
        reach = min(half, max(half // 2, min(index, len(values) - 1 - index)))
        low, high = max(0, index - reach), min(len(values), index + reach + 1)
        result.append(value if math.isnan(value) else (sums[high] - sums[low]) / (counts[high] - counts[low]))
    return result


def strong_line(values: Sequence[float], exact: bool = False) -> list[float]:
    """What is drawn strong: the values smoothed over a tenth of them, or as they are where few or `exact`."""
    return list(values) if exact or len(values) < SMOOTH_FROM else smooth(values, len(values) // 20)


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


def curve_svg(
    series: Sequence[Series],
    key: str,
    *,
    last_step: float,
    percent: bool = False,
    marks: Sequence[float] = (),
    exact: bool = False,
) -> str:
    """An `<svg>` element with one line a series: the raw line light, its smoothed line strong.

    Legend and title are left to the page, which sets them in its own type. `key` names the drawing, so that ids
    inside it differ from other drawings' on the page. The horizontal axis runs from 0 to `last_step`, so that the
    drawings of a phase line up; `percent` labels the vertical axis in percent; `marks` are levels drawn as thin lines
    (a baseline); `exact` lines are not smoothed. Values that are not finite leave gaps.
    """
    import matplotlib  # half a second, which only a report should pay
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": key, "font.size": 8.0, "path.simplify": True}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(3.6, 2.0))
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.125, 0.13, 0.855, 0.83))
        for level in marks:
            axes.axhline(level, color=_INK, linewidth=0.7, alpha=0.5, linestyle=(0, (2, 2)))
        for index, line in enumerate(series):
            _draw_line(axes, line, index, exact)
        axes.set_xlim(0, last_step or 1)
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
        ticks = [float(tick) for tick in axes.get_yticks()]
        digits, small = _digits(ticks, percent), max(map(abs, ticks), default=1.0) < 0.01
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, digits, percent, small)))
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return _for_page(buffer.getvalue())


def _draw_line(axes: Any, line: Series, index: int, exact: bool) -> None:
    colour, style = _COLOURS[index % len(_COLOURS)], LINE_STYLES[index % len(LINE_STYLES)]
    values = [value if abs(value) < LARGEST_DRAWN else math.nan for value in line.values]
    if len(values) < SMOOTH_FROM:
        axes.plot(line.steps, values, color=colour, linewidth=1.5, linestyle=style, marker="o", markersize=2.8,
                  clip_on=False)  # fmt: skip
        return
    strong = strong_line(values, exact)
    if not exact:
        axes.plot(*thin(line.steps, values), color=colour, linewidth=0.7, alpha=0.28)
    axes.plot(*thin(line.steps, strong), color=colour, linewidth=1.5, linestyle=style)


def _set_limits(axes: Any, series: Sequence[Series], marks: Sequence[float]) -> None:
    """Fit the y axis to the curves without their rarest outliers, so that one spike doesn't flatten the rest."""
    lows, highs = list(marks), list(marks)
    for line in series:
        values = sorted(value for value in line.values if abs(value) < LARGEST_DRAWN)
        if values:
            cut = len(values) // 100 if len(values) >= SMOOTH_FROM else 0
            lows.append(values[cut])
            highs.append(values[-1 - cut])
    if not lows:
        return
    low, high = min(lows), max(highs)
    # What varies by rounding alone is drawn as flat.
    margin = 0.07 * (high - low) if high - low > 1e-5 * abs(high) else 0.05 * abs(high) or 1.0
    # A quantity that is never negative gets no axis below 0.
    axes.set_ylim(max(low - margin, 0.0) if low >= 0 else low - margin, high + margin)


def _digits(ticks: Sequence[float], percent: bool) -> int:
    """Decimals that tell neighbouring ticks apart."""
    gap = (ticks[1] - ticks[0]) * (100 if percent else 1) if len(ticks) > 1 else 1.0
    digits = 0
    while digits < 12 and abs(round(gap, digits) - gap) > 1e-6 * gap:
        digits += 1
    return digits


def _tick(value: float, digits: int = 0, percent: bool = False, small: bool = False) -> str:
    """A tick's label with `digits` decimals; `small`: on an axis of small numbers, as a power of ten."""
    if percent:
        return f"{100 * value:.{digits}f}%"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k" if abs(value) < 1e7 else f"{value:.1e}".replace("e+0", "e")
    if not small or not value:
        return f"{value:.{0 if small else digits}f}"
    places = max(digits + math.floor(math.log10(abs(value))), 0)
    mantissa, exponent = f"{value:.{places}e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


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
