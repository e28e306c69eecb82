"""What the benchmarks of asynchronous schedules say of their runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

Script = Callable[[str], ModuleType]


def record(*values: float, staleness: float = 0.0) -> dict[str, Any]:
    """A run with an accuracy after each 25 steps."""
    accuracy = {str(25 * number): value for number, value in enumerate(values)}
    return {"accuracy": accuracy, "staleness": [staleness]}


def test_the_table_of_staleness_has_means_ranges_and_says_where_ranges_overlap(script: Script) -> None:
    runs = {
        ("decoupled PPO", 0): [record(0.25, 0.5), record(0.25, 0.75)],
        ("decoupled PPO", 2): [record(0.25, 0.5, staleness=1.5), record(0.25, 0.625, staleness=2.5)],
        ("TIS", 8): [record(0.25, 0.25), record(0.25, 0.375)],
        ("uncorrected", 8): [],
    }
    lines = script("staleness").table(runs).splitlines()
    assert lines[0] == "| loss | M | seeds | mean staleness | step 0 | step 25 |"
    assert lines[3] == "| decoupled PPO | 2 | 2 | 2.00 | 0.25 | 0.56 (0.50 to 0.62) |"
    assert lines[5] == "| uncorrected | 8 | 0 | no result | | |"
    assert "- decoupled PPO, M 2: -0.062; the ranges overlap." in lines
    assert "- TIS, M 8: -0.312; the ranges are apart." in lines


def test_the_picture_of_staleness_has_a_panel_a_loss_that_has_run(script: Script) -> None:
    runs = {("decoupled PPO", 0): [record(0.25, 0.5)], ("TIS", 2): [record(0.25, 0.25)], ("uncorrected", 8): []}
    panels = ElementTree.fromstring(script("staleness").draw(runs)).findall("{http://www.w3.org/2000/svg}svg")
    assert len(panels) == 2


def test_a_bound_of_0_is_run_with_one_loss(script: Script) -> None:
    cases = script("staleness").cases(["decoupled PPO", "TIS"])
    assert cases == [("decoupled PPO", 0), ("decoupled PPO", 2), ("decoupled PPO", 8), ("TIS", 2), ("TIS", 8)]


def test_the_page_of_schedules_has_the_marks_of_the_table_of_staleness(script: Script) -> None:
    page, module = Path(script("staleness").PAGE).read_text(encoding="utf-8"), script("staleness")
    assert page.index(module.BEGIN) < page.index(module.END)
    assert module.PICTURE.name in page


def test_steps_an_hour_leave_out_the_steps_that_fill_the_pipeline(script: Script) -> None:
    module = script("two_cores")
    run = {"ends": [10.0, 20.0, 30.0, 32.0, 34.0, 36.0]}
    assert module.steps_an_hour(run) == pytest.approx(1800)
    assert module.seconds_of(run) == [10.0, 10.0, 10.0, 2.0, 2.0, 2.0]


def test_a_long_time_is_shown_in_hours_and_minutes(script: Script) -> None:
    duration = script("many_devices").duration
    assert [duration(seconds) for seconds in (89.0, 3575.0, 3600.0, 7500.0)] == ["1 min", "1 h 00", "1 h 00", "2 h 05"]
