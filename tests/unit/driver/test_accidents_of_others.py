"""What went wrong in the asynchronous training of other projects, each as a test of its own: it cannot happen here.

The runs are in virtual time, over the real driver and Buffer. Numbers are those of the projects' issues and changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.embedded.fast_decoder import FastDecoder
from buffer_rl.embedded.sampling import SamplingParams
from buffer_rl.embedded.scheduler import Request, Scheduler
from buffer_rl.errors import BufferStateError
from buffer_rl.plan.schedule import Mode, Schedule
from buffer_rl.records.groups import Ticket
from harness.async_run import AsyncRun
from harness.engine_fixtures import model_folder as model_folder
from harness.publications import Versions
from harness.saved_state import load_saved, saved_state
from harness.schedule_trial import Setting, check, run
from harness.virtual_rollouts import VirtualRollouts

Versioned = list[tuple[Ticket, list[tuple[int, int]]]]


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Versioned:
    """The ticket of each group whose responses have ended, and the oldest and newest version of each response."""
    found: Versioned = []
    report = VirtualRollouts._report

    def noted(self: VirtualRollouts, ticket: Ticket, group: Any, versions: Any, rng: Any) -> bool:
        found.append((ticket, versions))
        return report(self, ticket, group, versions, rng)

    monkeypatch.setattr(VirtualRollouts, "_report", noted)
    return found


def asynchronous(target: int, bound: int, **changes: Any) -> Setting:
    """Long publications, while many responses of very different lengths are under way."""
    schedule = Schedule(mode=Mode.ASYNC, target=target, max_staleness=bound)
    setting = Setting(schedule=schedule, num_steps=16, slots=24, load_s=3.0, train_s=4.0, sigma=1.5)
    return replace(setting, **changes)


def train_step(a_run: AsyncRun, step: int) -> None:
    """A step whose ticket's groups all finish, from its ticket to its publication."""
    a_run.generate(step)
    a_run.finish(step, *a_run.lease(step, a_run.per_step))
    a_run.end(step)
    assert a_run.close(step) is not None
    a_run.publish(step + 1)


def test_a_bound_of_0_never_mixes_two_versions(tmp_path: Path, reported: Versioned) -> None:
    """prime-rl #1901: with 0 off-policy steps allowed, a rollout still had tokens of two policies."""
    check(run(asynchronous(0, 0, drops=0.3, fails=0.2, worker_deaths=2), tmp_path))
    spans = [versions for _, versions in reported]
    assert all(len({version for span in group for version in span}) == 1 for group in spans)
    assert {group[0][0] for group in spans} == set(range(16))


@pytest.mark.parametrize("lost", ["the run", "the Buffer"])
def test_no_capacity_is_gained_by_a_recovery(tmp_path: Path, lost: str) -> None:
    """AReaL #1345: after a recovery the version was there again and the counts were not, so that far more rollouts were
    admitted than the staleness allows."""
    a_run = AsyncRun(tmp_path / "first", per_step=2, target=1)
    for step in range(5):
        train_step(a_run, step)
    assert [a_run.generate(5), a_run.generate(6)] == [2, 2]
    a_run.lease(5, 2)
    if lost == "the run":
        saved = saved_state(a_run.state)
        a_run = AsyncRun(tmp_path / "second", per_step=2, target=1)
        load_saved(a_run.state, saved)
    else:
        a_run.restart()
        a_run.state.abandon(5)
    a_run.state.release(5)
    assert [a_run.generate(5), a_run.generate(6)] == [2, 2]
    with pytest.raises(BufferStateError, match="train_7 cannot open"):
        a_run.generate(7)


def test_a_bound_of_0_admits_a_whole_step(tmp_path: Path) -> None:
    """TRL #5650: the number of rollouts in flight was a multiple of the staleness, so 0 admitted none, for ever."""
    assert AsyncRun(tmp_path, per_step=2, target=0, bound=0).generate(0) == 2
    outcome = run(asynchronous(0, 0), tmp_path)
    check(outcome)
    assert outcome.num_selected == 16 * outcome.setting.groups_per_step


def test_groups_in_flight_at_a_checkpoint_are_the_first_of_the_resumed_run(tmp_path: Path) -> None:
    """OpenRLHF #1322, TRL #5911: the saved position was behind all prompts that were started, and what was generated or
    finished and not yet trained was skipped for good."""
    a_run = AsyncRun(tmp_path / "first", per_step=2, target=1, bound=2)
    assert [a_run.generate(0), a_run.generate(1)] == [2, 2]
    assert a_run.lease(0, 2) + a_run.lease(1, 2) == [0, 1, 2, 3]
    a_run.finish(0, 0)
    a_run.finish(1, 2, 3)
    assert a_run.close(0) == [0, 2]  # 1 is generated, 3 is finished and not trained on
    a_run.state.commit(0, 1)
    resumed = AsyncRun(tmp_path / "second", per_step=2, target=1, bound=2)
    load_saved(resumed.state, saved_state(a_run.state))
    resumed.state.release(1)
    assert [resumed.generate(1), resumed.generate(2)] == [2, 2]
    assert resumed.lease(1, 2) + resumed.lease(2, 2) == [1, 3, 4, 5]


def test_a_resumed_run_skips_no_group_that_was_ever_started(tmp_path: Path) -> None:
    """The same two, as a whole run that ends at half of its steps."""
    outcome = run(asynchronous(2, 4, stops_at=8), tmp_path)
    check(outcome)
    due = list(outcome.offered)[: outcome.setting.groups_per_step * (16 - 4 - 1)]
    assert set(due) <= outcome.trained.keys()


def test_slow_groups_are_waited_for_and_trained_on(tmp_path: Path) -> None:
    """tinker-cookbook #822: what became too old was discarded, which are the groups that take longest; they were
    sampled again and again, and the model was trained on the quick ones."""
    a_run = AsyncRun(tmp_path, per_step=2, target=1, bound=2)
    for number in (0, 1):
        a_run.generate(number)
        a_run.lease(number, 2)
    a_run.finish(0, 1)
    a_run.finish(1, 2, 3)
    assert a_run.close(0) == [1, 2]  # both pass group 0, which is as many as may
    a_run.publish(1)
    a_run.generate(2)
    a_run.finish(2, *a_run.lease(2, 2))
    assert a_run.close(1) is None
    a_run.finish(0, 0, version=0)
    assert a_run.close(1) == [0, 3]
    a_run.publish(2)
    assert a_run.state_of(0) is GroupState.TRAINED


def test_each_group_that_a_filter_drops_is_replaced_by_one(tmp_path: Path) -> None:
    """slime #2218: what a dynamic filter dropped was refilled by whole batches, and the surplus was aborted."""
    a_run = AsyncRun(tmp_path, per_step=2)
    a_run.generate(0)
    a_run.lease(0, 2)
    for row in range(1, 6):
        a_run.reject(0, row)
        assert a_run.lease(0, 5) == [row + 1]
    a_run.finish(0, 0, 6)
    with pytest.raises(BufferStateError, match="train_0 has 2 groups"):
        a_run.lease(0, 1)
    assert a_run.end(0).num_groups == 2


def test_steps_are_whole_and_nothing_is_aborted_where_a_filter_drops_most_groups(tmp_path: Path) -> None:
    """The same, as a whole run."""
    outcome = run(asynchronous(1, 2, drops=0.7, groups_per_step=2, num_steps=12), tmp_path)
    check(outcome)
    assert Counter(outcome.trained.values()) == dict.fromkeys(range(1, 13), 2)
    states = outcome.states
    live = states[GroupState.LEASED] + states[GroupState.FINISHED]
    assert len(outcome.offered) == states[GroupState.TRAINED] + states[GroupState.REJECTED] + live
    assert states[GroupState.PENDING] == states[GroupState.QUARANTINED] == 0


def test_no_prefix_of_older_weights_is_left_after_a_publication(model_folder: Callable[..., str]) -> None:
    """NeMo-RL #4018: the prefix cache was kept across publications, so that later requests with the same prompt were
    answered over keys and values of weights up to 17 versions old."""
    versions = Versions(model_folder("qwen3"))
    prompt = tuple(range(3, 40))

    def ask(scheduler: Scheduler, rid: str) -> Request:
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        scheduler.add(request := Request(rid=rid, prompt_ids=prompt, params=params, seed=0))
        while scheduler.has_work:
            scheduler.step()
        return request

    engine = Scheduler(FastDecoder(versions.module(0), 64), max_running_requests=4)
    assert [ask(engine, rid).cached_tokens for rid in "ab"] == [0, len(prompt)]  # it does cache prefixes
    engine.pause("retract")
    engine.decoder.load(versions.module(1))  # type: ignore[attr-defined]
    engine.weights_changed("1")
    engine.resume()
    after = ask(engine, "c")
    fresh = ask(Scheduler(FastDecoder(versions.module(1), 64), max_running_requests=4), "c")
    assert after.cached_tokens == 0
    assert (after.output_ids, after.log_probs) == (fresh.output_ids, fresh.log_probs)


def test_an_evaluation_is_neither_ended_nor_mixed_by_a_publication(tmp_path: Path, reported: Versioned) -> None:
    """miles #1740: weights were updated while an evaluation ran, which aborted its requests or mixed versions."""
    outcome = run(asynchronous(2, 4, eval_interval=1, train_s=1.0, load_s=0.5), tmp_path)
    check(outcome)
    evaluated = Counter(ticket.rollout_id for ticket, _ in reported if ticket.evaluation)
    assert len(evaluated) > 3
    assert set(evaluated.values()) == {3}  # all groups of each
    for ticket, versions in reported:
        if ticket.evaluation:
            assert {version for span in versions for version in span} == {ticket.rollout_id}
