"""What a step's metrics are made of: its own rows, and the tickets that ended since the step before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import pstdev
from typing import Any

import pytest

from buffer_rl.driver.production_metrics import EndedTicket, ProductionMetrics, joined_metrics
from buffer_rl.observe.timeline import WorkSpan
from buffer_rl.observe.timeline_stats import Overlap, overlap_of
from buffer_rl.plan.schedule import LOCKSTEP, Mode, Schedule
from buffer_rl.records.groups import RolloutReport
from harness.schedule_trial import Setting, Silent, run
from harness.virtual_rollouts import VirtualRollouts

ASYNC = Schedule(mode=Mode.ASYNC, target=1, max_staleness=2)


def ticket(num_groups: int = 2, drops: dict[str, int] | None = None, **metrics: float) -> EndedTicket:
    own = {f"rollout/{name.replace('__', '/')}": value for name, value in metrics.items()}
    return EndedTicket(own, [], RolloutReport(num_groups=num_groups, num_rows=0, drops=drops or {}))


def selection(**more: Any) -> RolloutReport:
    return RolloutReport(num_groups=2, num_rows=4, **more)


def metrics_of(*times: float) -> ProductionMetrics:
    """With a clock that shows these times one after another."""
    return ProductionMetrics(iter(times).__next__)


def test_at_a_staleness_of_0_the_metrics_of_a_step_are_those_of_its_ticket() -> None:
    metrics = metrics_of()
    ended = ticket(raw_reward=0.5, generated_tokens=40.0, drops={"zero_std": 1})
    report = selection(drops={"surplus": 2}, staleness=[0, 0])
    assert metrics.of_both(ended, report) == {
        "rollout/raw_reward": 0.5,
        "rollout/generated_tokens": 40.0,
        "rollout/drop_surplus": 2.0,
        "rollout/drop_zero_std": 1.0,
        "rollout/num_groups": 2.0,
    }


def test_of_a_ticket_that_several_workers_share_they_are_sums_weighted_means_and_what_the_rows_say() -> None:
    """Two groups of a mean length of 3 and a group of 6, of which one is half as many tokens."""
    parts = [
        {"rollout/response_len/mean": 3.0, "rollout/generated_tokens": 24.0, "perf/reward_time": 1.0},
        {
            "rollout/response_len/mean": 6.0,
            "rollout/generated_tokens": 12.0,
            "perf/reward_time": 4.0,
            "rollout/own": 7.0,
        },
    ]
    joined = joined_metrics(parts, [2, 1])
    assert joined == {
        "rollout/response_len/mean": 4.0,
        "rollout/generated_tokens": 36.0,
        "perf/reward_time": 2.0,
        "rollout/own": 7.0,
    }
    ended = EndedTicket(joined, [], RolloutReport(num_groups=3, num_rows=3, drops={}))
    report = selection(metrics={"rollout/response_len/mean": 4.5})
    assert metrics_of().of_both(ended, report)["rollout/response_len/mean"] == 4.5


def test_several_tickets_have_the_rewards_and_counts_of_all_their_groups_at_once() -> None:
    """Of four samples a group: one kept group of rewards 1, 1, 0, 0 beside three dropped ones of 0; and three kept
    groups of 1. So 14 of 16 kept rewards are 1, and 14 of 28 with the dropped groups'."""
    counts = {"rollout/abstained": 1.0, "rollout/surplus_groups": 2.0, "rollout/dynamic_filter/drop_dull": 3.0}
    mixed = {"raw_reward": 0.5, "raw_reward_std": 0.5, "raw_reward_all": 2 / 16, "scored_groups": 4.0}
    equal = {"raw_reward": 1.0, "raw_reward_std": 0.0, "raw_reward_all": 1.0, "scored_groups": 3.0}
    parts = [{f"rollout/{name}": value for name, value in part.items()} | counts for part in (mixed, equal)]
    joined = joined_metrics(parts, [1, 3])
    kept = [1.0] * 14 + [0.0] * 2
    assert joined == {
        "rollout/raw_reward": 14 / 16,
        "rollout/raw_reward_std": pytest.approx(pstdev(kept)),
        "rollout/raw_reward_all": 0.5,
        "rollout/scored_groups": 7.0,
        "rollout/abstained": 2.0,
        "rollout/surplus_groups": 4.0,
        "rollout/dynamic_filter/drop_dull": 6.0,
    }
    own = [{name: value for name, value in part.items() if name != "rollout/scored_groups"} for part in parts]
    assert joined_metrics(own, [1, 3])["rollout/raw_reward_all"] == (2 / 16 + 3) / 4, "by kept groups, if not said"
    none_kept = {"rollout/raw_reward_all": 0.0, "rollout/scored_groups": 7.0}
    assert joined_metrics([none_kept, parts[1]], [0, 3])["rollout/raw_reward_all"] == 0.3
    assert joined_metrics([{"own": 1.0}, {"own": 3.0}, {}], [0, 0, 4])["own"] == 2.0, "of none that kept a group"


def test_else_they_are_of_the_selection_and_those_of_tickets_are_named_production() -> None:
    metrics = metrics_of(0.0, 10.0)
    metrics.begin()
    ended = [
        ticket(raw_reward=0.5, response_len__max=30.0, generated_tokens=40.0, infra_failures=1.0, drops={"dull": 1}),
        ticket(raw_reward=1.0, response_len__max=20.0, generated_tokens=60.0, infra_failures=1.0, drops={"dull": 2}),
    ]
    ended[0].metrics["perf/reward_time"] = 2.0
    report = selection(drops={"too_old": 1}, metrics={"rollout/raw_reward": 0.25}, staleness=[0, 1, 2, 2])
    assert metrics.of_selection(report) == {
        "rollout/raw_reward": 0.25,
        "rollout/drop_too_old": 1.0,
        "rollout/num_groups": 2.0,
        "staleness/mean": 1.25,
        "staleness/max": 2.0,
    }
    assert metrics.of_tickets(ended) == {
        "production/raw_reward": 0.75,
        "production/response_len/max": 30.0,
        "production/generated_tokens": 100.0,
        "production/infra_failures": 2.0,
        "production/drop_dull": 3.0,
        "production/tickets": 2.0,
        "perf/reward_time": 2.0,
        "perf/tokens_per_s": 10.0,
    }


def test_tokens_of_a_step_without_an_ended_ticket_are_part_of_the_next_steps_rate() -> None:
    metrics = metrics_of(0.0, 10.0, 25.0)
    metrics.begin()
    metrics.begin()  # another ticket, which reads no clock
    assert "perf/tokens_per_s" not in metrics.of_tickets([])
    assert metrics.of_tickets([ticket(generated_tokens=100.0)])["perf/tokens_per_s"] == 10.0
    assert metrics.of_tickets([ticket(generated_tokens=30.0)])["perf/tokens_per_s"] == 2.0


def test_the_length_ratio_is_of_all_groups_trained_and_offered_so_far() -> None:
    metrics = metrics_of()
    metrics.of_selection(selection(metrics={"rollout/response_len/mean": 5.0}))
    first = metrics.of_tickets([ticket(1, response_len__mean=10.0)])
    assert first["production/length_ratio"] == 0.5
    metrics.of_selection(selection(metrics={"rollout/response_len/mean": 7.0}))
    second = metrics.of_tickets([ticket(3, response_len__mean=2.0)])
    assert second["production/length_ratio"] == ((5 * 2 + 7 * 2) / 4) / ((10 * 1 + 2 * 3) / 4)


class Counting(VirtualRollouts):
    """Reports one token for each group of a ticket, and the ticket's number as its reward."""

    async def run(self, ticket: Any) -> Any:
        await super().run(ticket)
        return {
            "rollout/generated_tokens": float(ticket.num_groups),
            "rollout/raw_reward": float(ticket.rollout_id),
        }, []


def test_a_run_counts_each_ticket_once_and_its_tokens_over_the_time_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.schedule_trial.VirtualRollouts", Counting)
    setting = Setting(schedule=ASYNC, groups_per_step=4, num_samples=1, num_steps=20, slots=4, train_s=8.0)
    outcome = run(setting, tmp_path)
    steps = outcome.metrics
    assert len(steps) == 20
    # The last ticket has ended once the last step's groups are finished.
    assert sum(metrics["production/tickets"] for metrics in steps) == 20
    assert sum(metrics.get("production/generated_tokens", 0.0) for metrics in steps) == 4 * 20
    assert all(metrics["rollout/num_groups"] == 4 and "rollout/raw_reward" not in metrics for metrics in steps)
    assert max(metrics["production/live_groups"] for metrics in steps) <= 4  # of (S + 1) P = 8, a step has taken 4
    assert all(metrics["production/finished_groups"] <= metrics["production/live_groups"] for metrics in steps)
    assert 1 <= max(metrics["production/passes"] for metrics in steps) <= 4  # W - 1
    assert [metrics["production/length_ratio"] for metrics in steps if "production/length_ratio" in metrics] == []
    # Tickets end in about the order of their numbers; of several, the mean.
    rewards = [metrics["production/raw_reward"] for metrics in steps if "production/raw_reward" in metrics]
    assert all(later >= earlier - 2 for earlier, later in pairwise(rewards))
    seconds = sum(metrics["perf/step_time"] for metrics in steps)
    counted = sum(m["production/generated_tokens"] / m["perf/tokens_per_s"] for m in steps if "perf/tokens_per_s" in m)
    assert counted <= seconds
    assert counted == pytest.approx(seconds, rel=0.2)


def late(seconds: float) -> type[Counting]:
    """Tickets end so long after their groups are finished."""

    class Late(Counting):
        async def run(self, ticket: Any) -> Any:
            answer = await super().run(ticket)
            await self.runtime.loop.sleep_until(self.runtime.loop.time() + seconds)
            return answer

    return Late


@pytest.mark.parametrize("mode", [Mode.LOCKSTEP, Mode.ASYNC])
def test_at_a_staleness_of_0_every_step_has_the_metrics_of_its_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    monkeypatch.setattr("harness.schedule_trial.VirtualRollouts", late(3.0))
    outcome = run(Setting(schedule=Schedule(mode=mode), num_steps=5), tmp_path)
    assert [metrics["rollout/raw_reward"] for metrics in outcome.metrics] == [0, 1, 2, 3, 4]
    assert all(not name.startswith(("production", "staleness")) for metrics in outcome.metrics for name in metrics)


def test_tickets_that_end_after_the_last_step_are_reported_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reports(Silent):
        def __init__(self) -> None:
            super().__init__()
            self.ended: list[int] = []

        def rollout_ended(self, rollout_id: int, *_: Any) -> None:
            self.ended.append(rollout_id)

    for seconds, num_in_steps in ((3.0, 9), (5.2, 8)):  # during the last update, and during its publication
        reports = Reports()
        monkeypatch.setattr("harness.schedule_trial.Silent", lambda reports=reports: reports)
        monkeypatch.setattr("harness.schedule_trial.VirtualRollouts", late(seconds))
        outcome = run(Setting(schedule=ASYNC, num_steps=9, train_s=5.0, load_s=0.5), tmp_path)
        assert sorted(reports.ended) == list(range(9))
        assert sum(metrics["production/tickets"] for metrics in outcome.metrics) == num_in_steps


class Timeline(Silent):
    """Keeps what is shown, and what is under way at the end of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[str, WorkSpan]] = []
        self.open: list[list[WorkSpan]] = []

    def worked(self, role: str, spans: Sequence[WorkSpan]) -> None:
        self.spans += [(role, span) for span in spans]

    def under_way(self, spans: Mapping[str, Sequence[WorkSpan]]) -> None:
        self.open.append(list(spans.get("rollout", ())))


def test_the_span_of_a_rollout_is_from_the_opening_of_its_ticket_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = Timeline()
    monkeypatch.setattr("harness.schedule_trial.Silent", lambda: timeline)
    setting = Setting(schedule=ASYNC, groups_per_step=4, num_samples=1, num_steps=12, slots=4, eval_interval=5)
    run(setting, tmp_path)
    tickets = {s.rollout_id: s for role, s in timeline.spans if (role, s.name) == ("rollout", "rollout")}
    published = {s.rollout_id: s.end for role, s in timeline.spans if (role, s.name) == ("publish", "publish")}
    evaluated = [s.rollout_id for role, s in timeline.spans if s.name == "evaluate"]
    assert sorted(tickets) == list(range(12))
    assert evaluated == [0, 5, 10, 12]
    assert all(tickets[number].start >= published.get(number - 1, 0.0) for number in tickets)
    assert any(tickets[number].end > tickets[number + 1].start for number in range(11))
    assert len(timeline.open) == 12
    # What a step's end found under way is the beginning of what is shown later.
    for span in [span for spans in timeline.open for span in spans if span.name == "rollout"]:
        assert span.start == tickets[span.rollout_id].start
        assert span.end <= tickets[span.rollout_id].end
    assert overlap_of(shown_of(timeline)) is Overlap.ASYNC


def shown_of(timeline: Timeline) -> dict[str, list[WorkSpan]]:
    roles = dict.fromkeys(role for role, _ in timeline.spans)
    return {role: [span for of, span in timeline.spans if of == role] for role in roles}


def test_at_a_staleness_of_0_it_is_the_time_for_which_the_step_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = Timeline()
    monkeypatch.setattr("harness.schedule_trial.Silent", lambda: timeline)
    run(Setting(schedule=LOCKSTEP, num_steps=4), tmp_path)
    rollouts = [span for span in shown_of(timeline)["rollout"] if span.name == "rollout"]
    assert [span.rollout_id for span in rollouts] == [0, 1, 2, 3]
    assert [span.seconds for span in rollouts] == [metrics["perf/rollout_time"] for metrics in timeline.metrics]
    assert timeline.open == []
    assert overlap_of(shown_of(timeline)) is Overlap.LOCKSTEP
