"""The runtime with threads and futures, over targets that the tests hold in their hands."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import Future
from typing import Any

import pytest
import ray

from buffer_rl.cluster.actor_group import Call
from buffer_rl.cluster.dispatch import all_answers
from buffer_rl.driver.runtime import POLL_S, LocalTarget, RayRuntime
from buffer_rl.errors import DeadlineError, EngineError, TrainError, WorkerError


class Members:
    """A target whose members answer when the test says so."""

    def __init__(self, count: int, role: str = "train") -> None:
        self._role = role
        self.futures: list[Future[Any]] = [Future() for _ in range(count)]

    def start(self, method: str, *args: Any) -> Call:
        names = [f"{self._role} {rank}" for rank in range(len(self.futures))]
        return Call(role=self._role, method=method, members=names, futures=self.futures, collect=all_answers)


def test_answers_of_all_members_are_combined_in_rank_order() -> None:
    members = Members(3)
    runtime = RayRuntime({"train": members})
    task = runtime.submit("train", "step")
    for rank in (2, 0, 1):
        assert not task.ended()
        members.futures[rank].set_result(rank)
    assert runtime.wait_any([task], 60) is task
    assert runtime.result(task) == [0, 1, 2]


def test_one_failing_member_ends_the_wait_while_the_others_are_still_at_work() -> None:
    members = Members(3)
    runtime = RayRuntime({"train": members})
    task = runtime.submit("train", "step")
    members.futures[1].set_exception(ValueError("no"))
    assert runtime.wait_any([task], 60) is task
    with pytest.raises(WorkerError, match=r"train 1\.step: ValueError: no"):
        runtime.result(task)


@pytest.mark.parametrize(
    ("root", "named"),
    [
        (TrainError("not finite"), r"train 2\.step: not finite"),
        (ray.exceptions.ActorDiedError(), r"train 2\.step: the process died"),
    ],
)
def test_of_several_failures_the_cause_is_raised_not_the_lost_connections(root: Exception, named: str) -> None:
    members = Members(3)
    runtime = RayRuntime({"train": members})
    task = runtime.submit("train", "step")
    for rank in (0, 1):
        members.futures[rank].set_exception(RuntimeError("connection closed by peer"))
    members.futures[2].set_exception(root)
    with pytest.raises((TrainError, WorkerError), match=named):
        runtime.result(task)


def test_the_task_that_ends_first_is_returned() -> None:
    slow, fast = Members(1), Members(1)
    runtime = RayRuntime({"rollout": slow, "train": fast})
    tasks = [runtime.submit("rollout", "run"), runtime.submit("train", "step")]
    fast.futures[0].set_result(None)
    assert runtime.wait_any(tasks, 60) is tasks[1]


def test_a_deadline_names_all_that_was_waited_for() -> None:
    runtime = RayRuntime({"rollout": Members(1, "rollout"), "train": Members(2)})
    tasks = [runtime.submit("rollout", "run"), runtime.submit("train", "step")]
    with pytest.raises(DeadlineError, match=r"rollout\.run, train\.step: no answer within 0\.01 s"):
        runtime.wait_any(tasks, 0.01)


def test_a_watcher_that_raises_ends_the_wait_and_a_finished_task_needs_no_watcher() -> None:
    calls = []

    def watcher() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise EngineError("engine 0 was killed by signal 9")

    members = Members(1)
    runtime = RayRuntime({"rollout": members}, [watcher])
    task = runtime.submit("rollout", "run")
    with pytest.raises(EngineError, match="signal 9"):
        runtime.wait_any([task], 60)
    assert len(calls) == 3
    members.futures[0].set_result(None)
    assert runtime.wait_any([task], 60) is task
    assert len(calls) == 3


class LateFuture(Future[Any]):
    """Not done when it is first looked at."""

    looked_at = False

    def done(self) -> bool:
        before, self.looked_at = self.looked_at, True
        return before and super().done()


def test_watchers_follow_a_clock_and_not_the_number_of_calls() -> None:
    seen: list[float] = []
    clock = [100.0]

    class Clocked(RayRuntime):
        def now(self) -> float:
            return clock[0]

    class Answering:
        """Answers between the first look, when the runtime starts to wait, and the second one."""

        def start(self, method: str, *args: Any) -> Call:
            future = LateFuture()
            future.set_result(None)
            return Call(role="buffer", method=method, members=["buffer"], futures=[future])

    runtime = Clocked({"buffer": Answering()}, [lambda: seen.append(clock[0])])

    def call() -> None:
        task = runtime.submit("buffer", "commit")
        assert runtime.wait_any([task], 60) is task

    for _ in range(5):
        call()
    assert seen == [100.0]
    clock[0] += POLL_S / 2
    call()
    assert seen == [100.0]
    clock[0] += POLL_S / 2
    call()
    assert seen == [100.0, 100.0 + POLL_S]


class Local:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def note(self, number: int) -> int:
        self.seen.append(number)
        return number

    def fail(self) -> None:
        raise SystemExit(3)

    def hang(self, gate: threading.Event) -> None:
        gate.wait(60)

    def payload(self) -> Any:
        return Payload()


class Payload:
    pass


def test_local_calls_follow_one_another_and_raise_what_they_raise() -> None:
    local = Local()
    runtime = RayRuntime({"buffer": LocalTarget("buffer", local)})
    tasks = [runtime.submit("buffer", "note", number) for number in range(20)]
    failing = runtime.submit("buffer", "fail")
    after = runtime.submit("buffer", "note", 20)
    runtime.wait_any([after], 60)
    assert [runtime.result(task) for task in tasks] == local.seen[:20] == list(range(20))
    with pytest.raises(WorkerError, match=r"buffer\.fail: SystemExit: 3"):
        runtime.result(failing)


def test_a_local_call_that_hangs_holds_up_neither_stop_nor_the_end_of_the_process() -> None:
    before = set(threading.enumerate())
    target, gate = LocalTarget("publish", Local()), threading.Event()
    (future,) = target.start("hang", gate).futures
    (thread,) = set(threading.enumerate()) - before
    target.stop()
    assert not future.done()
    assert thread.daemon  # the interpreter joins all others when it ends
    gate.set()
    thread.join(60)
    assert not thread.is_alive()


def test_calls_that_were_started_are_waited_for_after_stop_and_not_longer_than_allowed() -> None:
    target, gate = LocalTarget("save", Local()), threading.Event()
    (hanging,) = target.start("hang", gate).futures
    (last,) = target.start("note", 1).futures
    target.stop()
    assert not target.join(0.01)
    assert not hanging.done()
    gate.set()
    assert target.join(60)
    assert last.result(0) == 1


def test_an_answer_is_forgotten_with_its_task() -> None:
    target = LocalTarget("buffer", Local())
    (future,) = target.start("payload").futures
    answer = weakref.ref(future.result(60))
    target.start("note", 1).wait(60)
    del future
    gc.collect()
    assert answer() is None
    target.stop()


def test_a_rollout_watcher_is_called_only_while_the_call_that_is_waited_for_is_a_rollout() -> None:
    calls: list[str] = []
    rollout, train = Members(1, "rollout"), Members(1)

    def at_rollout() -> None:
        calls.append("rollout")
        rollout.futures[0].set_result(None)

    def always() -> None:
        calls.append("any")
        train.futures[0].set_result(None)

    targets = {"rollout": rollout, "train": train}
    running = RayRuntime(targets).submit("rollout", "run")
    RayRuntime(targets, (always,), (at_rollout,)).wait_any([RayRuntime(targets).submit("train", "step"), running], 60)
    assert calls == ["any"]
    RayRuntime(targets, (), (at_rollout,)).wait_any([running], 60)
    assert calls == ["any", "rollout"]
