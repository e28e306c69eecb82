"""The timeline on the report: lanes to scale, what stands beside them, and pictures that stay small."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from buffer_rl.observe.report import Report, render_report
from buffer_rl.observe.svg_chart import MAX_POINTS, format_seconds, step_picture
from buffer_rl.observe.timeline import WorkSpan
from buffer_rl.observe.timeline_stats import Spans, chosen_steps, step_stats


def spans_of(name: str, *times: tuple[float, float], rollout_id: int = 0) -> list[WorkSpan]:
    return [WorkSpan(name=name, rollout_id=rollout_id, start=start, end=end, num_rows=4) for start, end in times]


SPANS: Spans = {
    "rollout": spans_of("rollout", (100, 108)),
    "ref": spans_of("ref", (102, 104), (103, 105)),
    "train": spans_of("update", (108, 109)),
    "publish": spans_of("publish", (109, 110), rollout_id=1),
}


def bars(svg: str) -> list[dict[str, str]]:
    root = ElementTree.fromstring(svg)
    return [{**rect.attrib, "title": str(rect.findtext("title"))} for rect in root.iter("rect")]


def timeline_section(spans: Spans) -> str:
    """What the page has between the heading of the timeline and the page's own script at its end."""
    page = render_report(Report(title="t", metrics=[], spans=spans))
    return page.partition("<h2>Who worked when")[2].rpartition("<script>")[0]


def test_bars_lie_where_their_seconds_are() -> None:
    found = bars(step_picture(SPANS, step_stats(SPANS, 0)))
    # 1000 pixels less 108 on the left and 84 on the right for 10 seconds: 80.8 pixels a second.
    assert [(bar["x"], bar["width"]) for bar in found] == [
        ("108.0", "645.8"),
        ("269.6", "161.0"),
        ("350.4", "161.0"),
        ("754.4", "80.2"),
        ("835.2", "80.2"),
    ]
    assert found[1]["title"] == "ref, rollout 0, 4 rows: 2.00 s from 2.00 s"
    # Two processes at once: below each other within the lane.
    assert float(found[1]["y"]) + float(found[1]["height"]) <= float(found[2]["y"])


def test_each_lane_says_how_idle_its_role_was_and_publishing_is_no_role() -> None:
    svg = step_picture(SPANS, step_stats(SPANS, 0))
    texts = [text.text for text in ElementTree.fromstring(svg).iter("text")]
    assert [text for text in texts if text and text.startswith("idle")] == ["idle 20%", "idle 70%", "idle 90%"]
    assert [text for text in texts if text in SPANS] == list(SPANS)


def test_the_section_names_overlap_and_distance_from_the_bound() -> None:
    section = timeline_section(SPANS)
    # Generation 8, no tail, update 1, publish 1.
    assert "Step 0: 10.0 s, pipelined · overlap 4.00 s of 4.00 s (100%) · 1.00× the minimum" in section
    assert "<td>rollout</td>" in section
    assert "publish 1.00 s, train 1.00 s" in section or "train 1.00 s, publish 1.00 s" in section


def test_a_run_without_spans_has_no_section() -> None:
    assert timeline_section({}) == ""
    assert timeline_section({"publish": SPANS["publish"]}) == ""
    assert "Who worked when" not in render_report(Report(title="t", metrics=[]))


def test_the_report_has_the_section_and_every_colour_is_a_class_of_the_style() -> None:
    page = render_report(Report(title="t", metrics=[], spans=SPANS))
    assert "Who worked when" in page
    for number in re.findall(r'class="bar c(\d+)"', page):
        assert f".c{number}{{" in page


def test_the_first_the_last_and_the_middling_of_the_others_are_shown() -> None:
    lengths = [50, 3, 9, 4, 1, 2]
    windows = {step: (0.0, float(length)) for step, length in enumerate(lengths)}
    # Between are 3, 9, 4 and 1: of the two middle ones the longer.
    assert list(chosen_steps(windows)) == [0, 3, 5]
    assert list(chosen_steps({4: (0, 1), 5: (1, 2)})) == [4, 5]
    assert list(chosen_steps({4: (0, 1)})) == [4]


def test_steps_are_shown_without_the_evaluation_between_them() -> None:
    later = {
        role: [replace(s, rollout_id=s.rollout_id + 1, start=s.start + 30, end=s.end + 30) for s in members]
        for role, members in SPANS.items()
    }
    spans = {role: [*SPANS[role], *later[role]] for role in SPANS}
    spans["rollout"] += spans_of("evaluate", (110, 129), rollout_id=1)
    section = timeline_section(spans)
    assert section.count("10.0 s, pipelined") == 2
    assert "evaluate" not in section


def test_names_of_roles_and_work_are_text() -> None:
    nasty = "<script>alert(1)</script>"
    section = timeline_section({**SPANS, nasty: spans_of(nasty, (101, 102))})
    assert "<script" not in section
    assert "&lt;script&gt;" in section


def test_thousands_of_groups_are_drawn_as_few_bars_that_cover_the_same_seconds() -> None:
    count = 20 * MAX_POINTS
    times = [(8 * i / count, 8 * (i + 0.9) / count) for i in range(count)]
    spans = {"rollout": spans_of("rollout", (0, 8)), "ref": spans_of("ref", *times)}
    found = bars(step_picture(spans, step_stats(spans, 0)))
    assert len(found) <= 2 * 808 + 1
    assert sum(float(bar["width"]) for bar in found[1:]) == pytest.approx(808, rel=0.02)
    assert "(8000 times)" in found[1]["title"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.0123, "12.3 ms"), (0.5, "500 ms"), (1, "1.00 s"), (12.34, "12.3 s"), (2000.4, "2000 s")],
)
def test_seconds_have_about_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
