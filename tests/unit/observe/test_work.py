"""What roles report from machines with clocks of their own, as the driver sees it."""

from __future__ import annotations

import pickle
import time

import pytest

from buffer_rl.observe.timeline import WorkReport, WorkSpan, clock_origin
from buffer_rl.observe.timeline_stats import Overlap, step_metrics

NOW = 1_800_000_000.0


def spans_of(name: str, *times: tuple[float, float]) -> list[WorkSpan]:
    return [WorkSpan(name=name, rollout_id=0, start=start, end=end) for start, end in times]


@pytest.mark.parametrize("ahead", [5000.0, -5000.0])
def test_a_role_on_another_machine_does_not_change_the_figures_of_a_step(ahead: float) -> None:
    ref = [(2.0, 3.0), (4.0, 5.0), (10.0, 11.0)]
    here = {"rollout": spans_of("rollout", (0, 10)), "train": spans_of("update", (11, 14))}
    # That machine's monotonic clock shows ``ahead`` more, because it was started so much earlier.
    there = WorkReport(spans=spans_of("ref", *((a + ahead, b + ahead) for a, b in ref)), origin=NOW - ahead)
    expected = step_metrics({**here, "ref": spans_of("ref", *ref)}, 0, Overlap.PIPELINED)
    assert expected["perf/wall_to_bound"] == 1.0
    assert step_metrics({**here, "ref": there.spans_on(NOW)}, 0, Overlap.PIPELINED) == expected


def test_processes_of_one_machine_keep_the_times_that_they_measured() -> None:
    report = WorkReport(spans=spans_of("ref", (0.1, 0.7)), origin=NOW)
    assert report.spans_on(NOW + 2e-4) == report.spans


def test_processes_of_a_role_on_several_machines_are_on_one_clock_when_they_are_joined() -> None:
    first = WorkReport(spans=spans_of("ref", (1, 2)), num_rows=4, origin=NOW)
    second = WorkReport(spans=spans_of("ref", (102, 103)), num_rows=8, origin=NOW - 100)
    joined = WorkReport.joined([first, second])
    assert (joined.num_rows, joined.origin) == (12, NOW)
    assert joined.spans == spans_of("ref", (1, 2), (2, 3))
    assert WorkReport.joined([]).spans == []


def test_a_report_says_the_clock_of_the_process_that_made_it() -> None:
    before = time.time()
    sent: WorkReport = pickle.loads(pickle.dumps(WorkReport(origin=1.0)))
    assert sent.origin == 1.0
    assert abs(WorkReport().origin - (before - time.monotonic())) < 60
    assert abs(clock_origin() + time.monotonic() - time.time()) < 60
