"""Smoothing, thinning, and the drawings themselves."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from tlt_jax.observe.plots import Series, _digits, _tick, curve_svg, smooth, strong_line, thin


def test_smooth_by_hand():
    # Inside: means of three. At the ends half the reach is 0, so that the value itself stays.
    assert smooth([0.0, 3.0, 6.0, 0.0], 1) == [0.0, 3.0, 3.0, 0.0]
    # Reach 2 inside; 1 at the ends, cut at the edge.
    assert smooth([1.0, 2.0, 3.0, 4.0, 15.0], 2) == [1.5, 2.0, 5.0, 22 / 3, 9.5]


def test_smooth_leaves_nan_out():
    result = smooth([1.0, math.nan, 3.0, 5.0], 1)
    assert result[0] == 1.0 and math.isnan(result[1]) and result[2:] == [4.0, 5.0]


def test_few_or_exact_points_are_not_smoothed():
    assert strong_line([1.0, 9.0]) == [1.0, 9.0]
    assert strong_line([0.0, 1.0] * 30, exact=True) == [0.0, 1.0] * 30
    assert strong_line([0.0, 1.0] * 30) != [0.0, 1.0] * 30


def test_thin_keeps_spikes_and_gaps():
    values = [1.0] * 10_000
    values[7777] = 50.0
    values[100:300] = [math.nan] * 200
    steps, kept = thin(list(range(10_000)), values, points=200)
    assert len(kept) <= 200 and max(v for v in kept if v == v) == 50.0 and any(math.isnan(v) for v in kept)
    assert steps == sorted(steps) and steps[kept.index(50.0)] == 7777


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0],
        [0.0] * 50,
        [math.nan, 1.0, math.nan, 2.0],
        [1e-5 * i for i in range(60)],
        [math.inf, 1.0, 2.0],
        [-3e8, 4e9],
    ],
)
def test_svg_is_well_formed_and_takes_its_colours_from_the_page(values):
    svg = curve_svg([Series(range(len(values)), values)], "key", last_step=len(values) - 1, marks=(1.0,))
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg") and "width" not in root.attrib and "viewBox" in root.attrib
    assert "var(--c1)" in svg and "<style" not in svg and "<metadata" not in svg
    assert not re.search(r"(href|src)=\"(?!#)", svg)
    text = "".join(root.itertext())
    assert "nan" not in text and "inf" not in text


def test_ticks():
    assert _digits([0.0, 0.25], False) == 2 and _digits([0.0, 0.25], True) == 0 and _digits([0.0, 500.0], False) == 0
    assert [_tick(0.25, 2), _tick(0.25, 0, True), _tick(0.0, 5, small=True)] == ["0.25", "25%", "0"]
    assert [_tick(2.4e-4, 5, small=True), _tick(2.4e-4, 4, small=True)] == ["2.4e-4", "2e-4"]
    # Neighbours are told apart, however near: 3.69120 and 3.69122 on one axis.
    digits = _digits([3.6912, 3.69122], False)
    assert _tick(3.6912, digits) == "3.69120" and _tick(3.69122, digits) == "3.69122"
    assert [_tick(12_500), _tick(950)] == ["12.5k", "950"]


def test_numbers_too_large_to_draw_leave_gaps():
    svg = curve_svg([Series(list(range(40)), [1e308, -1e308] * 20)], key="x", last_step=40)
    assert "<svg" in svg
