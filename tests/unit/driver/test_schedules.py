"""Bound on staleness, accounting and order of whole runs, in virtual time over the real driver and Buffer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.buffer.calls import mutates
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.selections import Selections
from buffer_rl.buffer.state import BufferState
from buffer_rl.buffer.window import Window
from buffer_rl.errors import BufferStateError
from buffer_rl.plan.schedule import Mode, Schedule
from buffer_rl.records.groups import GroupUid, RolloutReport, Ticket
from harness.broken_windows import Forgetful, Greedy, OldPlace
from harness.schedule_trial import Outcome, Setting, check, drawn, run
from harness.virtual_rollouts import VirtualRollouts


def asynchronous(target: int, bound: int, **changes: Any) -> Setting:
    """Long tails, many slots and a fast trainer: groups are passed as often as they may be."""
    schedule = Schedule(mode=Mode.ASYNC, target=target, max_staleness=bound)
    given = {"groups_per_step": 2, "num_samples": 1, "num_steps": 25, "sigma": 2.0, "slots": 50, "train_s": 0.2}
    return Setting(schedule=schedule, **{**given, "load_s": 0.01, **changes})


def run_and_check(seeds: Iterable[int], folder: Path) -> list[Outcome]:
    outcomes = [run(drawn(seed), folder) for seed in seeds]
    for outcome in outcomes:
        check(outcome)
    return outcomes


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_whatever_happens_no_token_is_older_than_the_bound_and_every_group_has_one_fate(
    tmp_path: Path, first: int
) -> None:
    run_and_check(range(first, first + 10), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1200, 20))
def test_so_it_is_in_many_more_schedules(tmp_path: Path, first: int) -> None:
    outcomes = run_and_check(range(first, first + 20), tmp_path)
    assert {outcome.setting.schedule.mode for outcome in outcomes} >= {Mode.ASYNC}


def test_tickets_open_when_a_publication_that_was_passed_over_is_made_up_for_after_the_buffers_death(
    tmp_path: Path,
) -> None:
    """The second Buffer dies while an evaluation is pinned to version 0, and step 2 waits for its first groups."""
    changes = {"num_samples": 2, "num_steps": 12, "sigma": 1.5, "slots": 4, "load_s": 40.0, "train_s": 10.0}
    setting = asynchronous(1, 3, fails=0.2, quarantines=0.1, buffer_deaths=2, eval_interval=3, seed=10709, **changes)
    check(run(setting, tmp_path))


def test_a_run_whose_last_tickets_end_short_by_all_groups_of_a_step_ends_with_the_step_before(tmp_path: Path) -> None:
    for seed in (1, 3, 10):
        outcome = run(asynchronous(1, 2, drops=0.6, ends_short=1.0, num_steps=6, eval_interval=4, seed=seed), tmp_path)
        check(outcome)
        assert set(outcome.trained.values()) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("target", "bound"), [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (2, 4), (3, 3), (3, 5), (4, 4), (4, 6)]
)
def test_the_bound_is_reached(tmp_path: Path, target: int, bound: int) -> None:
    outcome = run(asynchronous(target, bound), tmp_path)
    check(outcome)
    assert max(outcome.staleness) == bound


@pytest.mark.parametrize("mode", [Mode.LOCKSTEP, Mode.PIPELINED, Mode.ASYNC])
def test_at_a_bound_of_0_every_schedule_takes_the_same_groups_in_the_same_steps(tmp_path: Path, mode: Mode) -> None:
    trained = []
    for other in (Mode.LOCKSTEP, mode):
        schedule = Schedule(mode=other, streams=other is Mode.PIPELINED)
        outcome = run(Setting(schedule=schedule, drops=0.3, fails=0.2, eval_interval=2, slots=12), tmp_path)
        check(outcome)
        trained.append(outcome.trained)
    assert trained[0] == trained[1]
    assert max(outcome.staleness) == 0


def test_one_step_off_each_group_is_of_the_version_one_step_before(tmp_path: Path) -> None:
    schedule = Schedule(mode=Mode.ONE_STEP_OFF, target=1, max_staleness=1, drains=True)
    outcome = run(Setting(schedule=schedule, drops=0.3, fails=0.2, eval_interval=4), tmp_path)
    check(outcome)
    assert Counter(outcome.staleness) == {0: 3, 1: 3 * (outcome.setting.num_steps - 1)}  # step 0 has version 0 too


def test_a_trainer_that_waits_for_nothing_and_an_engine_that_idles_never_take_longer_than_lockstep(
    tmp_path: Path,
) -> None:
    seconds = {}
    for name, schedule in {
        "lockstep": Schedule(mode=Mode.LOCKSTEP),
        "one step off": Schedule(mode=Mode.ONE_STEP_OFF, target=1, max_staleness=1, drains=True),
        "at most 1": Schedule(mode=Mode.ASYNC, target=1, max_staleness=1),
        "at most 2": Schedule(mode=Mode.ASYNC, target=1, max_staleness=2),
        "at most 4": Schedule(mode=Mode.ASYNC, target=2, max_staleness=4),
    }.items():
        setting = Setting(schedule=schedule, groups_per_step=4, num_samples=4, num_steps=20, slots=16, train_s=8.0)
        seconds[name] = run(setting, tmp_path).seconds
    order = ["lockstep", "one step off", "at most 1", "at most 2", "at most 4"]
    assert sorted(seconds, key=lambda name: -seconds[name]) == order, seconds
    assert seconds["lockstep"] > 1.6 * seconds["at most 4"]


def test_trained_lengths_are_those_that_were_offered(tmp_path: Path) -> None:
    """Of groups that were leased long before the end. Long ones come later, not less often."""
    offered, trained = [], []
    for seed in range(6):
        setting = asynchronous(2, 4, num_steps=40, groups_per_step=3, train_s=2.0, seed=seed, fails=0.1)
        outcome = run(setting, tmp_path)
        check(outcome)
        first = list(outcome.offered)[: 3 * (40 - 5)]
        offered += [outcome.offered[uid] for uid in first]
        trained += [outcome.offered[uid] for uid in first if uid in outcome.trained]
    assert len(trained) == len(offered)  # so the ratio of their lengths is 1


@pytest.mark.parametrize("interval", [1, 3])
def test_an_evaluation_is_of_one_version_while_generation_and_training_go_on(tmp_path: Path, interval: int) -> None:
    outcome = run(asynchronous(2, 4, eval_interval=interval, num_steps=12, train_s=3.0), tmp_path)
    check(outcome)
    assert any(metrics["perf/step_time"] < 8.0 for metrics in outcome.metrics)


# -- mutants: each rule of the schedule, broken ----------------------------------------------------------


class Hasty(Window):
    """Takes a short step while others are live."""

    def choose(self, num_groups: int | None = None) -> list[GroupUid] | None:
        return super().choose(num_groups) or [uid for uid, place in self._places.items() if place.finished][:1] or None


def with_window(window: type[Window]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr("buffer_rl.buffer.selections.Window", window)


def admits_on_commit(patch: pytest.MonkeyPatch) -> None:
    """A ticket opens when the version that it needs is trained, and not published yet."""
    patch.setattr(Schedule, "may_start", lambda self, number, version: number <= version + self.target + 1)
    patch.setattr(Selections, "num_admitted", lambda self, rollout_id: self._groups_per_step)


def keeps_debts(patch: pytest.MonkeyPatch) -> None:
    """What a ticket that ended short lacks is added to the next one, although a short step needed less."""
    end, owed = BufferState.end_ticket, Counter[int]()

    def end_ticket(self: BufferState, ticket: Ticket) -> RolloutReport:
        report = end(self, ticket)
        owed[id(self._selections)] += ticket.num_groups - report.num_groups
        return report

    def num_admitted(self: Selections, rollout_id: int) -> int:
        return self._groups_per_step + owed.pop(id(self), 0)

    patch.setattr(BufferState, "end_ticket", mutates(end_ticket))
    patch.setattr(Selections, "num_admitted", num_admitted)


def keeps_tokens(patch: pytest.MonkeyPatch) -> None:
    """What was generated of a group before it was requeued is trained on."""
    report, oldest = VirtualRollouts._report, {}

    def kept(self: VirtualRollouts, ticket: Ticket, group: Any, versions: Any, rng: Any) -> bool:
        first = oldest.setdefault((self.seed, group.uid), versions)
        return report(self, ticket, group, first, rng)

    patch.setattr(VirtualRollouts, "_report", kept)


MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Setting]] = {
    "admission on commit": (admits_on_commit, asynchronous(1, 1, load_s=400.0, train_s=1.0)),
    "debt kept after a short step": (keeps_debts, asynchronous(1, 1, ends_short=0.5, drops=0.7, groups_per_step=8)),
    "an old place for a requeued group": (with_window(OldPlace), asynchronous(1, 1, fails=0.4, slots=4)),
    "passes forgotten with each selection": (with_window(Forgetful), asynchronous(1, 3, num_steps=40)),
    "greedy choice": (with_window(Greedy), asynchronous(2, 2)),
    "a short step while others are live": (with_window(Hasty), asynchronous(2, 2)),
    "tokens kept by a requeued group": (keeps_tokens, asynchronous(1, 1, fails=0.5)),
}


def run_all(setting: Setting, folder: Path) -> None:
    for seed in range(12):
        check(run(replace(setting, seed=seed), folder))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_schedule_with_a_broken_rule_is_found(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, setting = MUTANTS[name]
    check(run(setting, tmp_path))
    breaks(monkeypatch)
    with pytest.raises((AssertionError, BufferStateError)):
        run_all(setting, tmp_path)


def test_the_states_of_all_groups_add_up(tmp_path: Path) -> None:
    outcome = run(asynchronous(2, 3, drops=0.4, fails=0.2, worker_deaths=2, buffer_deaths=2, stops_at=10), tmp_path)
    check(outcome)
    live = outcome.states[GroupState.LEASED] + outcome.states[GroupState.FINISHED] + outcome.states[GroupState.PENDING]
    ended = outcome.states[GroupState.TRAINED] + outcome.states[GroupState.REJECTED]
    assert ended + live == sum(outcome.states.values())
    assert outcome.states[GroupState.TRAINED] == 50
