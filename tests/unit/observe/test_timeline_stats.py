"""Idle shares, waits, overlap and bounds against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.observe.timeline import WorkSpan
from buffer_rl.observe.timeline_stats import (
    Overlap,
    Spans,
    common,
    length,
    merged,
    overlap_of,
    step_metrics,
    step_stats,
    step_windows,
)

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda t: (t[0], t[0] + t[1])), max_size=8)


def spans_of(name: str, *times: tuple[float, float], rollout_id: int = 0) -> list[WorkSpan]:
    return [WorkSpan(name=name, rollout_id=rollout_id, start=start, end=end) for start, end in times]


# Generation ends at 10; reference 2 s, old 1 s, update 4 s, publish 1 s, save 2 s.
LOCKSTEP: Spans = {
    "rollout": spans_of("rollout", (0, 10)),
    "train": [
        *spans_of("ref_log_probs", (10, 12)),
        *spans_of("old_log_probs", (12, 13)),
        *spans_of("update", (13, 17)),
    ],
    "publish": spans_of("publish", (17, 18), rollout_id=1),
    "save": spans_of("save", (18, 20), rollout_id=1),
}
# The reference works on four groups, the last of which is finished at 10; the trainer takes 1 s for each of them after
# the reference, and while it waits 0.5 s before the update no role works.
PIPELINED: Spans = {
    "rollout": spans_of("rollout", (0, 10)),
    "ref": spans_of("ref", (2, 3), (4, 5), (5, 6), (10, 11)),
    "train": [*spans_of("train_log_probs", (3, 4), (5, 6), (6, 7), (11, 12)), *spans_of("update", (12.5, 16.5))],
    "publish": spans_of("publish", (16.5, 17.5), rollout_id=1),
}


def test_lockstep_is_bounded_by_the_sum_of_its_parts() -> None:
    stats = step_stats(LOCKSTEP, 0)
    assert stats.kind is Overlap.LOCKSTEP
    assert (stats.wall, stats.bound, stats.wall_to_bound) == (20, 10 + 2 + 1 + 4 + 1 + 2, 1.0)
    assert (stats.streamed, stats.overlapped, stats.overlap_share) == (3, 0, 0)


def test_lockstep_with_roles_side_by_side_is_bounded_by_the_time_in_which_any_worked() -> None:
    spans = {
        "rollout": spans_of("rollout", (0, 10)),
        "ref": spans_of("ref", (10, 13)),
        "actor_fwd": spans_of("actor_fwd", (10, 12)),
        "train": spans_of("update", (14, 16)),
    }
    stats = step_stats(spans, 0)
    assert (stats.kind, stats.bound, stats.wall) == (Overlap.LOCKSTEP, 10 + 3 + 2, 16)


def test_pipelined_is_bounded_by_generation_the_tail_the_update_and_publishing() -> None:
    stats = step_stats(PIPELINED, 0)
    assert stats.kind is Overlap.PIPELINED
    # The tail is the last group's reference (10 to 11) and trainer pass (11 to 12).
    assert (stats.tail, stats.bound, stats.wall) == (2, 10 + 2 + 4 + 1, 17.5)
    # Three of four reference spans and of four trainer passes lie before 10.
    assert (stats.streamed, stats.overlapped, stats.overlap_share) == (8, 6, 0.75)


def test_streamed_work_longer_than_generation_takes_its_place() -> None:
    spans = {
        "rollout": spans_of("rollout", (0, 4)),
        "train": [*spans_of("train", (1, 3), (3, 5), (5, 7)), *spans_of("update", (7, 7.5))],
        "publish": spans_of("publish", (7.5, 8), rollout_id=1),
    }
    stats = step_stats(spans, 0)
    assert stats.kind is Overlap.STREAMED_GRADIENTS
    assert (stats.tail, stats.bound) == (2, 6 + 0.5 + 0.5)
    assert stats.overlapped == 2 + 1  # the second span is inside generation from 3 to 4


def test_one_pass_over_all_groups_after_generation_is_counted_once() -> None:
    spans = {
        "rollout": spans_of("rollout", (0, 1)),
        "train": [*spans_of("train", (1, 5)), *spans_of("update", (5, 5.125))],
        "publish": spans_of("publish", (5.125, 5.25), rollout_id=1),
    }
    stats = step_stats(spans, 0)
    assert (stats.bound, stats.wall_to_bound) == (5.25, 1.0)


def test_what_runs_on_after_the_step_or_beside_other_work_is_not_in_the_bound() -> None:
    # The second rollout starts at 20, while the checkpoint of the first step is written until 24; publishing, 2 s of
    # which something else runs beside, adds the rest alone.
    spans = {
        "rollout": [*spans_of("rollout", (0, 10)), *spans_of("rollout", (20, 30), rollout_id=1)],
        "train": spans_of("update", (10, 14)),
        "publish": spans_of("publish", (12, 16), rollout_id=1),
        "save": spans_of("save", (16, 24), rollout_id=1),
    }
    for kind in (Overlap.LOCKSTEP, Overlap.PIPELINED, Overlap.STREAMED_GRADIENTS):
        assert step_stats(spans, 0, kind=kind).bound == 10 + 4 + 2 + 4


def test_a_group_whose_work_began_before_generation_ended_has_the_rest_as_its_tail() -> None:
    spans = {
        "rollout": spans_of("rollout", (0, 10)),
        "train": [*spans_of("train", (2, 3), (9.5, 10.5)), *spans_of("update", (10.5, 11))],
    }
    stats = step_stats(spans, 0)
    assert (stats.tail, stats.bound, stats.wall) == (0.5, 10 + 0.5 + 0.5, 11)


def test_groups_dropped_at_the_end_leave_no_tail() -> None:
    spans = {"rollout": spans_of("rollout", (0, 10)), "ref": spans_of("ref", (2, 3))}
    assert step_stats(spans, 0).tail == 0


def test_a_rollout_that_ended_before_any_work_started_is_still_of_a_pipelined_run() -> None:
    # Two groups are finished at 10, and the reference takes 2 s for each. Pipelined asks for one of them to be done
    # before, so that only the last one is tail.
    short = {
        "rollout": spans_of("rollout", (40, 50), rollout_id=1),
        "ref": spans_of("ref", (50, 52), (52, 54), rollout_id=1),
        "train": spans_of("update", (54, 55), rollout_id=1),
    }
    spans = {role: [*PIPELINED[role], *short.get(role, [])] for role in PIPELINED}
    stats = step_stats(spans, 1)
    assert (stats.kind, stats.bound, stats.wall) == (Overlap.PIPELINED, 10 + 2 + 1, 15)
    assert step_stats(short, 1).bound == 10 + 4 + 1
    assert step_stats(short, 1, kind=Overlap.PIPELINED).bound == 13


@pytest.mark.parametrize(
    ("schedule", "streams", "max_staleness", "kind"),
    [
        ("lockstep", False, 0, Overlap.LOCKSTEP),
        ("pipelined", False, 0, Overlap.PIPELINED),
        ("pipelined", True, 0, Overlap.STREAMED_GRADIENTS),
        ("one-step-off", False, 1, Overlap.ONE_STEP_OFF),
        ("async", False, 2, Overlap.ASYNC),
        ("async", True, 2, Overlap.ASYNC),
        ("async", False, 0, Overlap.LOCKSTEP),
        ("async", True, 0, Overlap.STREAMED_GRADIENTS),
    ],
)
def test_the_options_say_what_may_overlap(schedule: str, streams: bool, max_staleness: int, kind: Overlap) -> None:
    assert Overlap.of_options(schedule, streams, max_staleness) is kind


def test_log_probabilities_of_single_groups_show_a_pipelined_run() -> None:
    spans = {"rollout": spans_of("rollout", (0, 10)), "train": spans_of("train_log_probs", (10, 11))}
    assert overlap_of(spans) is Overlap.PIPELINED
    assert overlap_of(LOCKSTEP) is Overlap.LOCKSTEP


def test_idle_is_the_share_of_the_step_without_work_of_the_role() -> None:
    stats = step_stats(PIPELINED, 0)
    assert stats.idle == pytest.approx({"rollout": 7.5 / 17.5, "ref": 13.5 / 17.5, "train": 9.5 / 17.5})
    assert stats.busy == {"rollout": 10, "ref": 4, "train": 8, "publish": 1}


def test_work_on_another_rollout_keeps_a_role_busy_and_is_not_in_the_bound() -> None:
    other = spans_of("ref", (11, 13), rollout_id=1)
    stats = step_stats({**PIPELINED, "ref": [*PIPELINED["ref"], *other]}, 0, (0, 17.5))
    assert stats.busy["ref"] == 6
    assert replace(stats, busy={}, idle={}, waits={}) == replace(step_stats(PIPELINED, 0), busy={}, idle={}, waits={})


def test_two_processes_of_a_role_at_once_are_busy_once() -> None:
    spans = {"rollout": spans_of("rollout", (0, 10)), "ref": spans_of("ref", (1, 4), (2, 5), (7, 8))}
    stats = step_stats(spans, 0)
    assert stats.busy["ref"] == 5
    assert stats.streamed == 7


def test_while_one_waits_the_others_that_work_are_named() -> None:
    waits = step_stats(PIPELINED, 0).waits
    assert waits["rollout"] == pytest.approx({"ref": 1, "train": 5, "publish": 1, "no role": 0.5})
    # Before 10 the trainer waits for 7 s, in 2 of which the reference is at work (2 to 3, 4 to 5), and then 1 s more.
    assert waits["train"] == pytest.approx({"rollout": 7, "ref": 3, "publish": 1, "no role": 0.5})
    assert set(waits) == {"rollout", "ref", "train"}


def test_a_step_ends_where_the_next_rollout_or_an_evaluation_starts() -> None:
    later = {
        role: [replace(s, rollout_id=s.rollout_id + 1, start=s.start + 30, end=s.end + 30) for s in spans]
        for role, spans in PIPELINED.items()
    }
    spans = {role: [*PIPELINED[role], *later[role]] for role in PIPELINED}
    assert step_windows(spans) == {0: (0, 30), 1: (30, 47.5)}
    assert step_stats(spans, 0).wall_to_bound == 30 / 17
    spans["rollout"] += spans_of("evaluate", (18, 29), rollout_id=1)
    assert step_windows(spans) == {0: (0, 18), 1: (30, 47.5)}
    assert step_stats(spans, 0).idle["rollout"] == 8 / 18
    assert step_stats(spans, 1) == replace(step_stats(PIPELINED, 0), rollout_id=1, start=30, end=47.5)


def test_what_comes_before_the_first_rollout_is_of_no_step() -> None:
    before = {"publish": spans_of("publish", (-5, -3)), "rollout": spans_of("evaluate", (-3, -1))}
    spans = {role: [*before.get(role, []), *members] for role, members in LOCKSTEP.items()}
    assert step_stats(spans, 0) == step_stats(LOCKSTEP, 0)


def test_metrics_of_a_step_are_its_idle_shares_overlap_and_distance_from_the_bound() -> None:
    assert step_metrics(PIPELINED, 0) == pytest.approx(
        {
            "perf/idle/rollout": 7.5 / 17.5,
            "perf/idle/ref": 13.5 / 17.5,
            "perf/idle/train": 9.5 / 17.5,
            "perf/overlap": 0.75,
            "perf/wall_to_bound": 17.5 / 17,
        }
    )
    assert step_metrics(PIPELINED, 1) == {}
    assert "perf/overlap" not in step_metrics({"rollout": spans_of("rollout", (0, 1))}, 0)


@given(INTERVALS, st.dictionaries(st.sampled_from(["ref", "actor_fwd", "advantages", "train"]), INTERVALS), INTERVALS)
def test_no_step_takes_less_than_its_bound_whatever_ran_when(rollouts: list, roles: dict, late: list) -> None:
    spans = {role: spans_of(role, *times) for role, times in roles.items()}
    spans["rollout"] = [*spans_of("rollout", (3, 9)), *spans_of("rollout", *rollouts, rollout_id=1)]
    spans["train"] = [*spans.get("train", []), *spans_of("update", *late[::2])]
    spans["publish"] = spans_of("publish", *late[1::2], rollout_id=1)
    for kind in Overlap:
        stats = step_stats(spans, 0, (2, 12) if kind.crosses_steps else None, kind)
        assert 0 <= stats.bound <= stats.wall


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1), st.integers(1, 4), st.integers(0, 5))
def test_a_trainer_that_works_on_whatever_is_ready_takes_no_less_than_the_bound_of_streamed_gradients(
    groups: list, most: int, update: int
) -> None:
    # groups: when each is finished, and how long its pass takes. A pass takes at most ``most`` of those that are ready.
    waiting, free, passes = sorted(groups), 0, []
    while waiting:
        begin = max(free, waiting[0][0])
        taken = [group for group in waiting if group[0] <= begin][:most]
        waiting = waiting[len(taken) :]
        free = begin + sum(work for _, work in taken)
        passes.append((begin, free))
    generation, streamed = max(finished for finished, _ in groups), sum(work for _, work in groups)
    spans = {
        "rollout": spans_of("rollout", (0, generation)),
        "train": [*spans_of("train", *passes), *spans_of("update", (free, free + update))],
    }
    stats = step_stats(spans, 0, kind=Overlap.STREAMED_GRADIENTS)
    assert stats.bound == max(generation, streamed - stats.tail) + stats.tail + update <= stats.wall


@given(INTERVALS, INTERVALS)
def test_unions_and_what_they_have_in_common_are_those_of_sets(left: list, right: list) -> None:
    def points(intervals: list) -> set[int]:
        return {point for start, end in intervals for point in range(start, end)}

    a, b = merged(left), merged(right)
    assert length(a) == len(points(left))
    assert points(common(a, b)) == points(left) & points(right)
    assert all(first[1] < second[0] for first, second in pairwise(a))
