"""The runtime with threads and futures, over targets that the tests hold in their hands."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import ray

from buffer_rl.cluster.calling import Call
from buffer_rl.cluster.dispatch import all_answers
from buffer_rl.driver.runtime import LocalTarget, RayRuntime
from buffer_rl.driver.tasks import unbroken
from buffer_rl.errors import DeadlineError, EndedBySignal, EngineError, TrainError, WorkerError


class Members:
    """A target whose members answer when the test says so."""

    def __init__(self, count: int, role: str = "train") -> None:
        self._role = role
        self.futures: list[Future[Any]] = [Future() for _ in range(count)]

    def step(self) -> int: ...

    def start(self, method: Callable[..., object], *args: Any) -> Call:
        names = [f"{self._role} {rank}" for rank in range(len(self.futures))]
        return Call(role=self._role, method=method.__name__, members=names, futures=self.futures, collect=all_answers)


def answer(runtime: RayRuntime, task: Any, timeout_s: float = 60.0, look: Any = lambda error: None) -> Any:
    async def main() -> Any:
        return await runtime.answer(task, timeout_s)

    return runtime.run(main, look)


def test_answers_of_all_members_are_combined_in_rank_order() -> None:
    members = Members(3)
    runtime = RayRuntime({"train": members})
    task = runtime.submit("train", Members.step)
    for rank in (2, 0, 1):
        assert not task.ended()
        members.futures[rank].set_result(rank)
    assert answer(runtime, task) == [0, 1, 2]


def test_one_failing_member_ends_the_wait_while_the_others_are_still_at_work() -> None:
    members = Members(3)
    runtime = RayRuntime({"train": members})
    task = runtime.submit("train", Members.step)
    threading.Timer(0.05, members.futures[1].set_exception, [ValueError("no")]).start()
    with pytest.raises(WorkerError, match=r"train 1\.step: ValueError: no"):
        answer(runtime, task)


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
    task = runtime.submit("train", Members.step)
    for rank in (0, 1):
        members.futures[rank].set_exception(RuntimeError("connection closed by peer"))
    members.futures[2].set_exception(root)
    with pytest.raises((TrainError, WorkerError), match=named):
        answer(runtime, task)


def test_a_deadline_names_the_call_and_neither_ends_it_nor_keeps_its_answer() -> None:
    members = Members(1)
    runtime = RayRuntime({"train": members})
    with pytest.raises(DeadlineError, match=r"train\.step: no answer within 0\.01 s") as caught:
        runtime.run(lambda: runtime.answer(runtime.submit("train", Members.step), 0.01), lambda error: None)
    (future,) = members.futures
    assert not future.cancelled()
    payload = Payload()
    kept = weakref.ref(payload)
    future.set_result(payload)  # later, when the loop is closed: no error
    members.futures.clear()
    del future, payload
    gc.collect()
    assert kept() is None, "the error keeps the call"
    assert caught.value.where == "train.step"


def test_a_cancellation_leaves_the_call_under_way_and_others_can_wait_for_it() -> None:
    members = Members(1)
    runtime = RayRuntime({"train": members})
    task = runtime.submit("train", Members.step)

    async def main() -> Any:
        waiting = asyncio.ensure_future(runtime.answer(task, 60))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        members.futures[0].set_result(7)
        return await runtime.answer(task, 60)

    assert runtime.run(main, lambda error: None) == [7]


def test_watchers_have_a_thread_of_their_own_and_their_errors_come_to_the_loop() -> None:
    calls: list[str] = []

    def watcher() -> None:
        calls.append(threading.current_thread().name)
        if len(calls) == 2:
            raise EngineError("engine 0 was killed by signal 9")

    runtime = RayRuntime({"rollout": Members(1)}, [watcher])
    runtime.poll_s = 0.01
    failed: list[BaseException | None] = []
    is_over = asyncio.Event()

    def look(error: BaseException | None) -> None:
        failed.append(error)
        if error is not None:
            is_over.set()

    runtime.run(is_over.wait, look)
    assert [str(error) for error in failed if error is not None] == ["engine 0 was killed by signal 9"]
    assert calls == ["watchers", "watchers"]


def test_a_run_can_be_started_inside_an_event_loop_that_runs() -> None:
    members = Members(1)
    members.futures[0].set_result(3)
    runtime = RayRuntime({"train": members})
    task = runtime.submit("train", Members.step)

    async def notebook() -> Any:
        return answer(runtime, task)

    before = set(threading.enumerate())
    assert asyncio.run(notebook()) == [3]
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before


def test_the_exception_of_a_signals_handler_ends_the_run_at_once_and_cancels_what_is_under_way() -> None:
    runtime = RayRuntime({"train": Members(1)})
    cancelled: list[str] = []

    async def main() -> None:
        try:
            await unbroken(runtime.answer(runtime.submit("train", Members.step), 60))
        except asyncio.CancelledError:
            cancelled.append("main")
            raise

    def handle(number: int, frame: Any) -> None:
        raise EndedBySignal(number)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        with pytest.raises(EndedBySignal):
            runtime.run(main, lambda error: None)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert cancelled == ["main"]


def test_work_that_is_unbroken_ends_although_its_caller_is_cancelled() -> None:
    ended: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0.05)
        ended.append("work")

    async def main() -> None:
        task = asyncio.ensure_future(unbroken(work()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        ended.append("caller")

    RayRuntime({}).run(main, lambda error: None)
    assert ended == ["work", "caller"]


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
    tasks = [runtime.submit("buffer", Local.note, number) for number in range(20)]
    failing = runtime.submit("buffer", Local.fail)
    after = runtime.submit("buffer", Local.note, 20)
    assert after.wait(60) == 20
    assert [task.result() for task in tasks] == local.seen[:20] == list(range(20))
    with pytest.raises(WorkerError, match=r"buffer\.fail: SystemExit: 3"):
        answer(runtime, failing)


def test_a_local_call_that_hangs_holds_up_neither_stop_nor_the_end_of_the_process() -> None:
    before = set(threading.enumerate())
    target, gate = LocalTarget("publish", Local()), threading.Event()
    (future,) = target.start(Local.hang, gate).futures
    (thread,) = set(threading.enumerate()) - before
    target.stop()
    assert not future.done()
    assert thread.daemon  # the interpreter joins all others when it ends
    gate.set()
    thread.join(60)
    assert not thread.is_alive()


def test_calls_that_were_started_are_waited_for_after_stop_and_not_longer_than_allowed() -> None:
    target, gate = LocalTarget("save", Local()), threading.Event()
    (hanging,) = target.start(Local.hang, gate).futures
    (last,) = target.start(Local.note, 1).futures
    target.stop()
    assert not target.join(0.01)
    assert not hanging.done()
    gate.set()
    assert target.join(60)
    assert last.result(0) == 1


def test_an_answer_is_forgotten_with_its_task() -> None:
    target = LocalTarget("buffer", Local())
    (future,) = target.start(Local.payload).futures
    answer = weakref.ref(future.result(60))
    target.start(Local.note, 1).wait(60)
    del future
    gc.collect()
    assert answer() is None
    target.stop()
