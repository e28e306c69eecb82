"""The trace file: what other programs and the report read from it, also after a kill and a resume."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.errors import DataError
from buffer_rl.observe.timeline import TRACE_FILE, TraceFile, WorkSpan, in_order, read_trace


def span(name: str, rollout_id: int, start: float, end: float, num_rows: int = 0) -> WorkSpan:
    return WorkSpan(name=name, rollout_id=rollout_id, start=start, end=end, num_rows=num_rows)


def events(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / TRACE_FILE).read_text()))


def write_step(trace: TraceFile, step: int, start: float) -> None:
    trace.write("rollout", [span("rollout", step, start, start + 2)])
    trace.write("train", [span("update", step, start + 2, start + 3)])
    trace.write("publish", [span("publish", step + 1, start + 3, start + 4)])


def test_a_trace_that_ended_well_is_a_json_array_of_complete_events_in_microseconds(tmp_path: Path) -> None:
    with TraceFile(tmp_path) as trace:
        trace.write("train", [span("update", 0, 100.5, 102.0, num_rows=8)])
        trace.write("rollout", [span("rollout", 0, 100.75, 101.0)])
    update, rollout = [event for event in events(tmp_path) if event["ph"] == "X"]
    assert (update["ts"], update["dur"], update["args"]) == (0, 1_500_000, {"rollout_id": 0, "rows": 8})
    assert (rollout["ts"], rollout["dur"], rollout["args"]) == (250_000, 250_000, {"rollout_id": 0})
    rows = {e["args"]["name"]: e["pid"] for e in events(tmp_path) if e["name"] == "process_name"}
    assert rows == {"train": update["pid"], "rollout": rollout["pid"]}
    order = {e["pid"]: e["args"]["sort_index"] for e in events(tmp_path) if e["name"] == "process_sort_index"}
    assert order[rows["rollout"]] < order[rows["train"]]


def test_spans_of_several_processes_come_in_any_order(tmp_path: Path) -> None:
    with TraceFile(tmp_path) as trace:
        trace.write("ref", [span("ref", 0, start, start + 1) for start in (8.0, 6.0, 7.0)])
    found = [(event["ts"], event["tid"]) for event in events(tmp_path) if event["ph"] == "X"]
    assert found == [(0, 1), (1_000_000, 1), (2_000_000, 1)]


def test_a_run_without_work_leaves_an_empty_array(tmp_path: Path) -> None:
    with TraceFile(tmp_path):
        pass
    assert events(tmp_path) == []
    assert read_trace(tmp_path) == {}


def test_the_folder_of_a_run_without_a_trace_has_no_spans(tmp_path: Path) -> None:
    assert read_trace(tmp_path) == {}


def test_what_is_read_is_what_was_written_from_the_first_span_on(tmp_path: Path) -> None:
    with TraceFile(tmp_path) as trace:
        write_step(trace, 0, 1e6)
        trace.write("ref", [span("ref", 0, 1e6 + 1, 1e6 + 1.5, 4), span("ref", 0, 1e6 + 0.5, 1e6 + 1, 4)])
    assert read_trace(tmp_path / TRACE_FILE) == {
        "rollout": [span("rollout", 0, 0, 2)],
        "ref": [span("ref", 0, 0.5, 1, 4), span("ref", 0, 1, 1.5, 4)],
        "train": [span("update", 0, 2, 3)],
        "publish": [span("publish", 1, 3, 4)],
    }


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.001, 2)), max_size=30))
def test_spans_of_one_lane_do_not_overlap(tmp_path_factory: pytest.TempPathFactory, times: Any) -> None:
    folder = tmp_path_factory.mktemp("trace")
    with TraceFile(folder) as trace:
        trace.write("ref", [span("ref", 0, start, start + length) for start, length in times])
    lanes = defaultdict(list)
    for event in events(folder):
        if event["ph"] == "X":
            lanes[event["tid"]].append(event)
    for lane in lanes.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in pairwise(lane))


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_trace_that_a_kill_cut_off_is_read_up_to_its_last_whole_line(tmp_path: Path, cut: int) -> None:
    with TraceFile(tmp_path) as trace:
        write_step(trace, 0, 5.0)
    text = (tmp_path / TRACE_FILE).read_text().removesuffix("\n]\n")
    (tmp_path / TRACE_FILE).write_text(text)
    assert len(read_trace(tmp_path)) == 3
    (tmp_path / TRACE_FILE).write_text(text[:-cut])
    assert list(read_trace(tmp_path)) == ["rollout", "train"]


@pytest.mark.parametrize("line", ["oops", "[]", '{"ph": "X", "name": "n"}', '{"ph": "X", "name": "n", "args": 3}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    with TraceFile(tmp_path) as trace:
        write_step(trace, 0, 5.0)
    lines = (tmp_path / TRACE_FILE).read_text().splitlines()
    lines[3] = line
    (tmp_path / TRACE_FILE).write_text("\n".join(lines))
    with pytest.raises(DataError) as caught:
        read_trace(tmp_path)
    assert caught.value.where.endswith("trace.json:4")


def test_a_line_of_a_trace_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    with TraceFile(tmp_path) as trace:
        trace.write("my role", [span("generate", 0, 1.0, 2.0)])
    path = tmp_path / TRACE_FILE
    path.write_text(path.read_text().replace("my role", "my\u2028role"))
    assert list(read_trace(tmp_path)) == ["my\u2028role"]


@pytest.mark.parametrize("end", ["\n]\n", "", ',\n{"ph": "X", "na'])
@pytest.mark.parametrize("clock", [3.0, 1e5])
def test_a_resumed_run_goes_on_from_its_checkpoint_whatever_its_clock_says(
    tmp_path: Path, end: str, clock: float
) -> None:
    with TraceFile(tmp_path) as trace:
        for step in range(3):
            write_step(trace, step, 1000.0 + 4 * step)
        trace.write("rollout", [span("evaluate", 2, 1012.0, 1013.0), span("evaluate", 3, 1013.0, 1014.0)])
    path = tmp_path / TRACE_FILE
    path.write_text(path.read_text().removesuffix("\n]\n") + end)
    with TraceFile(tmp_path, resume_step=2) as trace:
        write_step(trace, 2, clock)
    spans = read_trace(tmp_path)
    # The evaluation at version 2 is kept and ends after 13 seconds; the resumed step follows.
    assert [(s.name, s.rollout_id, s.start) for s in spans["rollout"]] == [
        ("rollout", 0, 0.0),
        ("rollout", 1, 4.0),
        ("evaluate", 2, 12.0),
        ("rollout", 2, 13.0),
    ]
    assert [s.start for s in spans["publish"]] == [3.0, 7.0, 16.0]
    found = events(tmp_path)
    rows = [event["args"]["name"] for event in found if event["name"] == "process_name"]
    assert sorted(rows) == ["publish", "rollout", "train"]


def test_a_new_run_in_a_used_folder_keeps_the_earlier_trace_aside(tmp_path: Path) -> None:
    for _ in range(2):
        with TraceFile(tmp_path) as trace:
            write_step(trace, 0, 1.0)
    assert len(read_trace(tmp_path)["rollout"]) == 1
    assert (tmp_path / "trace.1.json").is_file()


def test_a_resumed_run_without_an_earlier_trace_starts_one(tmp_path: Path) -> None:
    with TraceFile(tmp_path, resume_step=5) as trace:
        write_step(trace, 5, 1.0)
    assert read_trace(tmp_path)["rollout"] == [span("rollout", 5, 0.0, 2.0)]


def test_roles_are_shown_in_the_order_of_the_data_and_unknown_ones_last() -> None:
    assert in_order(["judge", "save", "train", "rollout", "ref", "a", "critic"]) == [
        "rollout",
        "ref",
        "critic",
        "train",
        "save",
        "a",
        "judge",
    ]


def test_publish_save_and_evaluation_belong_to_the_step_before() -> None:
    assert [span(name, 3, 0, 1).step for name in ("rollout", "update", "publish", "save", "evaluate")] == [
        3,
        3,
        2,
        2,
        2,
    ]
