"""Steps of runs whose tickets run while earlier steps are trained on, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.observe.observer import RunObserver
from buffer_rl.observe.report import read_report, write_report
from buffer_rl.observe.svg_chart import names_shown, step_picture
from buffer_rl.observe.timeline import WorkSpan, read_trace
from buffer_rl.observe.timeline_stats import (
    Overlap,
    Spans,
    advice,
    overlap_of,
    spans_after,
    spans_within,
    step_stats,
    step_windows,
    without,
)
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry


def span(name: str, rollout_id: int, start: float, end: float) -> WorkSpan:
    return WorkSpan(name=name, rollout_id=rollout_id, start=start, end=end)


# Steps end at 13, 20 and 30. Ticket 2 runs from the release of version 1 until after the publication of version 3.
ASYNC: Spans = {
    "rollout": [
        span("rollout", 0, 1, 8),
        span("rollout", 1, 1, 15),
        span("rollout", 2, 13, 29.5),
        span("evaluate", 1, 14, 18),
    ],
    "ref": [span("ref", 0, 8, 9), span("ref", 1, 13, 14), span("ref", 2, 24, 25)],
    "train": [span("update", 0, 9, 12), span("update", 1, 14, 19), span("update", 2, 25, 28)],
    "save": [span("save", 2, 19, 19.5)],
    "publish": [
        span("publish", 0, 0, 1),
        span("publish", 1, 12, 13),
        span("publish", 2, 19.5, 20),
        span("publish", 3, 28, 30),
        span("pause", 3, 29, 30),
    ],
}
# Ticket 1 starts at the release of version 0, ends before version 1 is published, and so on.
ONE_STEP_OFF: Spans = {
    "rollout": [span("rollout", 0, 0, 4), span("rollout", 1, 4, 10), span("rollout", 2, 11, 15)],
    "train": [span("update", 0, 4, 7), span("update", 1, 11, 18)],
    "publish": [span("publish", 1, 10, 11), span("publish", 2, 18, 20)],
}


def test_a_step_goes_from_the_end_of_the_one_before_to_its_own() -> None:
    assert step_windows(ASYNC) == {0: (1, 13), 1: (13, 20), 2: (20, 30)}
    assert step_windows(ONE_STEP_OFF) == {0: (0, 11), 1: (11, 20)}


def test_tickets_that_run_during_an_earlier_update_show_the_schedule() -> None:
    assert overlap_of(ASYNC) is Overlap.ASYNC  # ticket 2 runs on through a publication
    assert overlap_of(ONE_STEP_OFF) is Overlap.ONE_STEP_OFF
    after = [span("rollout", 0, 0, 4), span("rollout", 1, 11, 15)]
    assert overlap_of({**ONE_STEP_OFF, "rollout": after}) is Overlap.LOCKSTEP


def test_engines_are_idle_when_no_ticket_and_no_evaluation_runs_or_while_they_are_paused() -> None:
    stats = step_stats(ASYNC, 2)
    assert (stats.wall, stats.generation) == (10, 9)  # ticket 2 until 29.5, without the pause from 29 on
    assert stats.idle == pytest.approx({"rollout": 0.1, "ref": 0.9, "train": 0.7})
    assert stats.waits["rollout"] == {"publish": 1}
    assert step_stats(ASYNC, 0).idle["rollout"] == pytest.approx(0)  # ticket 1 runs through all of step 0
    spans = {**ASYNC, "rollout": ASYNC["rollout"][:2]}
    assert step_stats(spans, 1, kind=Overlap.ASYNC).idle["rollout"] == pytest.approx(5 / 7)


def test_the_bound_of_an_asynchronous_step_is_the_longer_of_generation_and_training() -> None:
    first, second, third = (step_stats(ASYNC, step) for step in range(3))
    assert first.bound == max(12, 1 + 3 + 1)
    assert second.bound == max(7, 1 + 5 + 0.5 + 0.5)
    assert (third.bound, third.wall_to_bound) == (9, pytest.approx(10 / 9))
    assert (second.streamed, second.overlapped, second.overlap_share) == (6, 6, 1.0)
    spans = {**ASYNC, "rollout": ASYNC["rollout"][:2]}
    assert step_stats(spans, 1, kind=Overlap.ASYNC).overlapped == 2  # ticket 1 ended at 15


def test_one_step_off_a_publication_comes_after_both() -> None:
    assert step_stats(ONE_STEP_OFF, 0).bound == max(4 + 6, 3) + 1
    stats = step_stats(ONE_STEP_OFF, 1)
    assert (stats.bound, stats.wall_to_bound) == (max(4, 7) + 2, 1.0)


@pytest.mark.parametrize(
    ("engines", "trainer", "text"),
    [
        (10, 4, "engines idle 0%, trainer idle 60%: give the engines a device more"),
        (5, 9, "engines idle 50%, trainer idle 10%: give the trainer a device more"),
        (9, 9.5, "engines idle 10%, trainer idle 5%: their devices are divided well"),
        (6, 5, "engines idle 40%, trainer idle 50%: they wait for each other; a higher --max-staleness"),
    ],
)
def test_the_side_that_the_other_waits_for_gets_a_device(engines: float, trainer: float, text: str) -> None:
    starts = range(100, 150, 10)
    spans = {
        "rollout": [span("rollout", 0, 0, 90), *(span("rollout", i + 1, t, t + engines) for i, t in enumerate(starts))],
        "train": [span("update", 0, 90, 99), *(span("update", i + 1, t, t + trainer) for i, t in enumerate(starts))],
        "publish": [span("publish", i, t, t) for i, t in enumerate((0, 100, 110, 120, 130, 140, 150))],
    }
    # The last ticket ends at 150; then the trainer works on what is left.
    spans["rollout"].append(span("rollout", 6, 150, 150))
    spans["train"].append(span("update", 6, 150, 400))
    assert advice(spans, Overlap.ASYNC).startswith(text)


def test_there_is_no_advice_for_other_schedules_and_for_the_first_steps() -> None:
    assert advice(ASYNC, Overlap.LOCKSTEP) == ""
    assert advice(ONE_STEP_OFF) == ""
    assert advice(ASYNC) != ""


def test_a_union_without_another_one() -> None:
    assert without([(0, 4), (6, 9)], [(-1, 1), (3, 7)]) == [(1, 3), (7, 9)]
    assert without([(0, 4)], []) == [(0, 4)]


def test_the_picture_shows_tickets_below_each_other_with_evaluations_and_pauses() -> None:
    stats = step_stats(ASYNC, 1)
    members = spans_within(ASYNC, stats.start, stats.end)
    svg = step_picture(members, stats)
    assert [name in svg for name in ("rollout, rollout 1:", "rollout, rollout 2:", "evaluate, rollout 1:")] == [
        True
    ] * 3
    assert names_shown(members).keys() >= {"generation", "evaluation", "update"}
    assert "engines paused" in names_shown(ASYNC)


def test_later_steps_know_what_ran_across_the_end_of_a_step() -> None:
    kept = spans_after(ASYNC, 1, Overlap.ASYNC)
    assert step_stats(kept, 2, kind=Overlap.ASYNC) == step_stats(ASYNC, 2)
    assert kept["rollout"] == ASYNC["rollout"][1:]  # ticket 0 ended before step 1
    assert spans_after(ASYNC, 1, Overlap.LOCKSTEP)["rollout"] == [ASYNC["rollout"][2]]


def test_the_metrics_of_a_step_count_tickets_that_have_not_ended(tmp_path: Path) -> None:
    args: Any = compose(CORE_SECTIONS)(run_dir=str(tmp_path), progress="none", logger=[], schedule="async")
    with RunObserver(args, PluginRegistry()) as observer:
        for step, end in enumerate((13, 20, 30)):
            for role, members in ASYNC.items():
                new = [s for s in members if (13, 20, 30)[step - 1] * (step > 0) < s.end <= end]
                observer.worked(role, new)
            open_ones = [s for s in ASYNC["rollout"] if s.start < end < s.end]
            observer.under_way({"rollout": [span(s.name, s.rollout_id, s.start, end) for s in open_ones]})
            observer.step(step, {"train/loss": 0.5})
    perf = {record["step"]: record for record in read_metrics(tmp_path) if record["kind"] == "perf"}
    for step in range(3):
        stats = step_stats(ASYNC, step)
        assert perf[step]["perf/idle/rollout"] == pytest.approx(stats.idle["rollout"])
        assert perf[step]["perf/wall_to_bound"] == pytest.approx(stats.wall_to_bound)
    written = read_trace(tmp_path)
    assert {role: len(members) for role, members in written.items()} == {role: len(ASYNC[role]) for role in ASYNC}
    page = write_report(read_report(tmp_path), tmp_path).read_text()
    assert '<p id="advice"><strong>engines idle' in page
