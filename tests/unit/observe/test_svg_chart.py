from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from buffer_rl.observe.svg_chart import MAX_BARS, MAX_POINTS, Line, format_number, line_chart, stacked_bars, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (0.0, 100.0, [0, 25, 50, 75, 100]),
        (-0.02, 0.013, [-0.02, -0.01, 0.0, 0.01]),
        (3.0, 7.0, [3, 4, 5, 6, 7]),
    ],
)
def test_ticks_are_round_numbers_inside_the_range(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_a_line_runs_from_the_lower_left_to_the_upper_right() -> None:
    svg = line_chart([Line(name="l", points=[(0, 0.0), (10, 1.0)])], label="x", width=464, height=134, unit_range=True)
    ElementTree.fromstring(svg)
    found = re.search(r'points="([^"]*)"', svg)
    assert found is not None
    # The frame is 52 pixels from the left and 12 from the right, 10 from the top and 24 from the bottom.
    assert found[1] == "52.0,110.0 452.0,10.0"


def test_long_runs_are_averaged() -> None:
    points = [(float(i), float(i % 2)) for i in range(10 * MAX_POINTS)]
    svg = line_chart([Line(name="l", points=points)], label="x")
    found = re.search(r'points="([^"]*)"', svg)
    assert found is not None
    assert len(found[1].split()) == MAX_POINTS
    bars = stacked_bars(range(1000), {"a": [1.0] * 1000}, label="x")
    assert bars.count("<rect") == MAX_BARS


def test_shares_fill_the_height_and_zeros_draw_nothing() -> None:
    svg = stacked_bars([0], {"a": [1.0], "b": [3.0], "c": [0.0]}, label="x", share=True, width=464, height=134)
    heights = [float(height) for height in re.findall(r'height="([\d.]+)"><title>', svg)]
    assert heights == [25.0, 75.0]
    assert stacked_bars([0, 1], {"a": [0.0, 0.0]}, label="x") == ""
    assert line_chart([Line(name="l", points=[])], label="x") == ""


def test_one_point_and_a_constant_are_drawn() -> None:
    assert "<circle" in line_chart([Line(name="l", points=[(5, 2.0)])], label="x")
    ElementTree.fromstring(line_chart([Line(name="<l>", points=[(0, 0.0), (1, 0.0)], marked=True)], label='"<'))


def test_numbers_are_short() -> None:
    assert [format_number(n) for n in (0, 0.5, 1234, 21340, 2.5e6, -0.001)] == [
        "0", "0.5", "1234", "21.34k", "2.5M", "-0.001",
    ]  # fmt: skip
