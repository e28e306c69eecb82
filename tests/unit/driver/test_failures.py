"""A failure of one of the driver's coroutines at every moment of the others."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.errors import BufferRLError, DeadlineError, EngineError, RolloutError
from buffer_rl.plan.schedule import Mode, Schedule, parse_early_stop
from buffer_rl.records.groups import Ticket
from harness.schedule_trial import Outcome, Saves, Setting, Stopping, TrialBuffer, world
from harness.virtual_rollouts import VirtualRollouts
from harness.virtual_time import Span, VirtualRuntime

SCHEDULES = {
    "lockstep": Schedule(mode=Mode.LOCKSTEP),
    "pipelined": Schedule(mode=Mode.PIPELINED, streams=True),
    "one step off": Schedule(mode=Mode.ONE_STEP_OFF, target=1, max_staleness=1, drains=True),
    "asynchronous": Schedule(mode=Mode.ASYNC, target=2, max_staleness=3),
}
TWO = ("lockstep", "asynchronous")
SETTING = Setting(
    schedule=SCHEDULES["lockstep"], num_steps=4, groups_per_step=2, train_s=4.0, load_s=1.0, eval_interval=2, slots=4
)
# What the first call of each pair began, the second one ends, whatever fails meanwhile.
PAIRS = {
    ("train", "train"): ("buffer", "commit"),
    ("save", "save"): ("save", "seal"),
    ("publish", "publish"): ("buffer", "release"),
}


def spans_of(name: str, folder: Path, prepare: Callable[[VirtualRuntime], None]) -> list[Span]:
    """The calls of a run until its end, or its failure, which is raised."""
    setting = replace(SETTING, schedule=SCHEDULES[name])
    buffer = TrialBuffer(folder, setting)
    changes = {"saves": True, "save_interval": 1}
    runtime, driver, _ = world(setting, buffer, Saves(buffer), Stopping(None), Outcome(setting), changes)
    prepare(runtime)
    try:
        driver.run()
    finally:
        buffer.state.ledger.close()
    return runtime.spans


def unfinished(spans: list[Span]) -> list[tuple[str, str]]:
    """Calls that another one must follow, and that it did not."""
    counts = {pair: [sum((s.role, s.method) == call for s in spans) for call in pair] for pair in PAIRS.items()}
    starts = 1  # the first release is of the start
    return [
        pair[0]
        for pair, (first, second) in counts.items()
        if second - (starts if pair[1] == ("buffer", "release") else 0) != first
    ]


def moments(spans: list[Span]) -> list[float]:
    """Shortly before, at and after each call's start and end."""
    times = {time for span in spans for time in (span.start, span.end)}
    return sorted({max(0.0, time + shift) for time in times for shift in (-0.01, 0.0, 0.01)})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in TWO else pytest.mark.slow) for name in SCHEDULES]
)
def test_a_failure_at_any_moment_leaves_as_it_is_and_interrupts_no_pair_of_calls(tmp_path: Path, name: str) -> None:
    whole = spans_of(name, tmp_path, lambda runtime: None)
    assert unfinished(whole) == []
    end = max(span.end for span in whole)
    for moment in moments(whole):
        if moment >= end - 0.01:
            continue
        runtimes: list[VirtualRuntime] = []
        with pytest.raises(EngineError) as caught:
            spans_of(name, tmp_path, partial(fail_at, moment, runtimes))
        assert caught.value.what == "no engine is left"
        spans = runtimes[0].spans
        assert unfinished(spans) == [], f"a failure at {moment}"
        later = [span for span in spans if span.start > moment and (span.role, span.method) == ("train", "train")]
        assert later == [], f"another step after a failure at {moment}"


def fail_at(moment: float, runtimes: list[VirtualRuntime], runtime: VirtualRuntime) -> None:
    async def fail() -> None:
        await runtime.loop.sleep_until(moment)
        runtime.look(EngineError("no engine is left"))

    runtimes.append(runtime)
    runtime.loop.create_task(fail())


class FailingRollouts:
    """Tickets, or evaluations, fail in place of their answer."""

    def __init__(self, rollouts: VirtualRollouts, fails: Callable[[Ticket], bool]) -> None:
        self._rollouts, self._fails = rollouts, fails

    async def run(self, ticket: Ticket) -> Any:
        answer = await self._rollouts.run(ticket)
        if self._fails(ticket):
            raise RolloutError(f"a bug in {ticket.task}")
        return answer


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("task", ["train_0", "train_1", "train_3", "eval_0", "eval_2", "eval_4"])
def test_a_rollout_or_an_evaluation_that_fails_ends_the_run_with_its_error(
    tmp_path: Path, name: str, task: str
) -> None:
    runtimes: list[VirtualRuntime] = []

    def break_rollouts(runtime: VirtualRuntime) -> None:
        runtimes.append(runtime)
        runtime.roles["rollout"] = FailingRollouts(runtime.roles["rollout"], lambda ticket: ticket.task == task)

    with pytest.raises(BufferRLError) as caught:
        spans_of(name, tmp_path, break_rollouts)
    assert str(caught.value) == f"a bug in {task}"
    assert unfinished(runtimes[0].spans) == []


def test_the_first_of_several_failures_leaves_bare(tmp_path: Path) -> None:
    def fail(runtime: VirtualRuntime) -> None:
        runtime.roles["rollout"] = FailingRollouts(runtime.roles["rollout"], lambda ticket: not ticket.evaluation)

    with pytest.raises(RolloutError, match=r"^a bug in train_\d$"):
        spans_of("asynchronous", tmp_path, fail)


@pytest.mark.parametrize("moves", [True, False])
def test_a_ticket_that_queues_behind_others_has_its_deadline_from_the_last_change(tmp_path: Path, moves: bool) -> None:
    """One slot for the groups of three tickets, so that a ticket takes longer than a rollout may."""
    setting = replace(
        SETTING,
        schedule=SCHEDULES["asynchronous"],
        slots=1,
        sigma=0.5,
        groups_per_step=4,
        load_s=0.1,
        eval_interval=None,
    )
    buffer = TrialBuffer(tmp_path, setting)
    changes = {"rollout_timeout_s": 12}
    runtime, driver, _ = world(setting, buffer, Saves(buffer), Stopping(None), Outcome(setting), changes)
    if not moves:
        runtime.roles["rollout"].length = lambda uid, index: 1e9
        with pytest.raises(DeadlineError, match=r"no answer within 36 s"):
            driver.run()
        assert runtime.now() == 72.0  # it looked once whether anything moves
        return
    driver.run()
    runs = [span.start for span in runtime.spans if span.method == "run" and not span.args[0].evaluation]
    ends = [span.start for span in runtime.spans if span.method == "end_ticket" and not span.args[0].evaluation]
    assert max(end - start for start, end in zip(runs, ends, strict=True)) > 36


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_ends_the_run_after_the_step_or_in_its_rollout_and_saves_it(
    tmp_path: Path, name: str, number: int
) -> None:
    setting = replace(SETTING, schedule=SCHEDULES[name])
    whole = spans_of(name, tmp_path, lambda runtime: None)
    first = next(span.end for span in whole if span.method == "run" and not span.args[0].evaluation)
    for moment in moments(whole)[::3]:
        if not first < moment < max(span.start for span in whole if span.method == "train"):
            continue
        buffer = TrialBuffer(tmp_path, setting)
        saves, changes = Saves(buffer), {"saves": True}
        runtime, driver, _ = world(setting, buffer, saves, Stopping(None), Outcome(setting), changes)
        runtime.loop.create_task(at(runtime, moment, lambda driver=driver: driver._stop.take(number)))
        result = driver.run()
        committed = sum(span.method == "commit" for span in runtime.spans)
        assert (result.steps, saves.step) == (committed, committed), moment
        assert result.signal == (number if committed < setting.num_steps else None), moment
        assert committed <= sum(span.method == "commit" and span.start <= moment for span in runtime.spans) + 1
        assert unfinished(runtime.spans) == [] or number == signal.SIGTERM
        buffer.state.ledger.close()


@pytest.mark.parametrize("name", ["lockstep", "one step off"])
def test_after_ctrl_c_only_the_ticket_of_the_step_under_way_opens(tmp_path: Path, name: str) -> None:
    """The first ticket may be followed by another one as it ends, later ones only by a publication; with one group at a
    time the trainer waits for each of them."""
    setting = replace(SETTING, schedule=SCHEDULES[name], num_steps=4, slots=1, train_s=1.0, eval_interval=None)

    def run_until(moment: float) -> tuple[list[Span], int]:
        buffer = TrialBuffer(tmp_path, setting)
        runtime, driver, _ = world(setting, buffer, Saves(buffer), Stopping(None), Outcome(setting), {"saves": True})
        runtime.loop.create_task(at(runtime, moment, lambda: driver._stop.take(signal.SIGINT)))
        steps = driver.run().steps
        buffer.state.ledger.close()
        return runtime.spans, steps

    releases = [span.start for span in run_until(1e6)[0] if span.method == "release"]
    for begin, end in pairwise(releases):
        for moment in (begin + 0.01, (begin + end) / 2, end - 0.01, end):
            spans, steps = run_until(moment)
            assert sum(span.method == "commit" for span in spans) == steps
            tickets = [span.args[0] for span in spans if span.method == "generate" and span.start > moment]
            assert [number for number in tickets if number >= steps] == [], moment


@pytest.mark.parametrize(("name", "steps"), [("lockstep", 0), ("lockstep", 2), ("one step off", 0)])
def test_ctrl_c_between_a_release_and_the_ticket_that_it_lets_open_leaves_no_step_waiting(
    tmp_path: Path, name: str, steps: int
) -> None:
    setting = replace(SETTING, schedule=SCHEDULES[name], eval_interval=None)
    buffer = TrialBuffer(tmp_path, setting)
    runtime, driver, observer = world(setting, buffer, Saves(buffer), Stopping(None), Outcome(setting))

    def phase(name: str) -> None:
        released = sum(span.method == "release" for span in runtime.spans)
        if name == "generate" and released == steps + 1:  # the first one is of the start
            opened = [span.args[0] for span in runtime.spans if span.method == "generate"]
            assert steps not in opened
            driver._stop.take(signal.SIGINT)

    observer.phase = phase  # type: ignore[method-assign]
    assert driver.run().steps == steps + 1


async def at(runtime: VirtualRuntime, moment: float, act: Callable[[], object]) -> None:
    await runtime.loop.sleep_until(moment)
    act()


def test_an_evaluation_that_ends_an_asynchronous_run_does_so_while_groups_are_in_production(tmp_path: Path) -> None:
    setting = replace(SETTING, schedule=SCHEDULES["asynchronous"], num_steps=30, eval_interval=2)
    buffer = TrialBuffer(tmp_path, setting)
    saves = Saves(buffer)
    changes = {"saves": True, "early_stop": parse_early_stop("eval/held>=0"), "eval_before_train": False}
    _, driver, _ = world(setting, buffer, saves, Stopping(None), Outcome(setting), changes)
    result = driver.run()
    assert result.stopped_early
    assert 2 <= result.steps == saves.step < 30
    assert saves.saved is not None
    assert len(saves.saved["queue"]) > 0  # the groups that were in production, as prompts
