"""Agents beside the worker's event loop: those that hang, block, raise or cancel themselves."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.agents.runner import AgentTimeoutError, Functions
from buffer_rl.errors import RolloutError
from buffer_rl.plugin.calls import UncommonError, original

LONG_S = 60.0
FOREVER_S = 600.0


@asynccontextmanager
async def a_runner(**options: Any) -> AsyncIterator[Functions]:
    runner = Functions(print, SimpleNamespace(), **options)
    try:
        yield runner
    finally:
        await runner.aclose()


async def test_async_agents_share_a_thread_and_plain_ones_have_one_each() -> None:
    meeting = threading.Barrier(2, timeout=30)

    async def awaits(number: int) -> tuple[int, str]:
        await asyncio.sleep(0)
        return number, threading.current_thread().name

    def plain(number: int) -> tuple[int, str]:
        meeting.wait()
        return number, threading.current_thread().name

    async with a_runner() as runner:
        for agent, name in ((awaits, "agents"), (plain, "agent")):
            runs = [runner.call(agent, i, name=str(i), timeout_s=LONG_S) for i in range(2)]
            assert await asyncio.gather(*runs) == [(0, name), (1, name)]


async def test_agents_see_the_context_of_the_rollout() -> None:
    where: ContextVar[str] = ContextVar("where", default="")
    where.set("here")

    async def awaits() -> str:
        return where.get()

    async with a_runner() as runner:
        assert await runner.call(awaits, name="a", timeout_s=LONG_S) == "here"
        assert await runner.call(where.get, name="a", timeout_s=LONG_S) == "here"


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError, StopIteration])
@pytest.mark.parametrize("plain", [False, True])
async def test_what_an_agent_raises_comes_as_an_exception(error: type[BaseException], plain: bool) -> None:
    def raises() -> None:
        raise error("no")

    async def raises_too() -> None:
        raise error("no")

    if error is StopIteration and not plain:
        return  # Python itself makes it a RuntimeError
    async with a_runner() as runner:
        with pytest.raises(Exception) as caught:  # noqa: PT011 (of any kind)
            await runner.call(raises if plain else raises_too, name="the agent", timeout_s=LONG_S)
        if error is asyncio.CancelledError and not plain:
            assert isinstance(caught.value, RolloutError)
            assert "it cancelled itself" in str(caught.value)
        else:
            assert isinstance(original(caught.value), error)
            assert error is ValueError or isinstance(caught.value, UncommonError)
        assert await runner.call(lambda: 5, name="next", timeout_s=LONG_S) == 5


async def test_an_agent_that_cancels_its_task_has_failed_and_the_caller_goes_on() -> None:
    async def gives_up() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(LONG_S)

    async with a_runner() as runner:
        with pytest.raises(RolloutError, match="it cancelled itself"):
            await runner.call(gives_up, name="the agent", timeout_s=LONG_S)


async def test_the_line_where_a_plain_agent_hangs_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    goes_on, began = threading.Event(), []

    def hangs() -> None:
        began.append(1)
        goes_on.wait(LONG_S)

    async with a_runner() as runner:
        for name in ("the agent of row a", "the agent of row b"):
            with pytest.raises(AgentTimeoutError, match=name):
                await runner.call(hangs, name=name, timeout_s=0.5)
    goes_on.set()
    assert len(began) == 2
    line = hangs.__code__.co_firstlineno + 2
    assert [record.getMessage() for record in caplog.records] == [
        f"the agent of row a was at {__file__}:{line} (hangs) after 0.5 s; its thread is left to itself"
    ]


async def test_an_async_agent_is_cancelled_at_its_deadline() -> None:
    ended = threading.Event()

    async def hangs() -> None:
        try:
            await asyncio.sleep(FOREVER_S)
        finally:
            ended.set()

    async with a_runner() as runner:
        with pytest.raises(AgentTimeoutError, match=r"the agent was not done within 0\.05 s"):
            await runner.call(hangs, name="the agent", timeout_s=0.05)
        assert await asyncio.to_thread(ended.wait, 30)


async def test_an_async_agent_that_does_not_end_at_its_deadline_is_left_to_itself() -> None:
    free = asyncio.Event()

    async def stays() -> None:
        while not free.is_set():
            try:
                await asyncio.sleep(FOREVER_S)
            except asyncio.CancelledError:
                continue

    async with a_runner() as runner:
        with pytest.raises(AgentTimeoutError):
            await runner.call(stays, name="the agent", timeout_s=0.05)


async def test_a_plain_agent_is_left_to_itself_at_its_deadline() -> None:
    free, ended = threading.Event(), threading.Event()

    def hangs() -> str:
        free.wait(30)
        ended.set()
        return "late"

    async with a_runner() as runner:
        with pytest.raises(AgentTimeoutError):
            await runner.call(hangs, name="the agent", timeout_s=0.05)
        free.set()
        assert await asyncio.to_thread(ended.wait, 30)


async def test_a_time_out_of_the_agents_own_is_no_deadline() -> None:
    async def raises() -> None:
        raise TimeoutError("of the agent's")

    async with a_runner() as runner:
        with pytest.raises(TimeoutError, match="of the agent's"):
            await runner.call(raises, name="the agent", timeout_s=LONG_S)


async def test_an_agent_whose_caller_is_cancelled_is_cancelled() -> None:
    ended, begun = threading.Event(), threading.Event()

    async def hangs() -> None:
        begun.set()
        try:
            await asyncio.sleep(FOREVER_S)
        finally:
            ended.set()

    async with a_runner() as runner:
        task = asyncio.ensure_future(runner.call(hangs, name="the agent", timeout_s=LONG_S))
        await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(ended.wait, 30)


class Blocker:
    """An async agent that blocks its loop, in a task of its own or in one that it starts."""

    def __init__(self) -> None:
        self.begun, self.free = threading.Event(), threading.Event()

    async def directly(self) -> str:
        self.begun.set()
        self.free.wait(30)
        return "done"

    async def in_a_task(self) -> str:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.directly())
        return task.result()


async def sleeps() -> None:
    await asyncio.sleep(FOREVER_S)


@pytest.mark.parametrize("how", ["directly", "in_a_task"])
async def test_an_agent_that_blocks_the_loop_is_named_once_with_its_line(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = Blocker()
    with caplog.at_level(logging.WARNING, "buffer_rl.agents"):
        async with a_runner(blocked_s=0.05) as runner:
            task = asyncio.ensure_future(runner.call(getattr(blocker, how), name="agent 7", timeout_s=LONG_S))
            deadline = time.monotonic() + 30
            while not caplog.records and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)  # in which it would be named again
            blocker.free.set()
            assert await task == "done"
    (notice,) = [record.getMessage() for record in caplog.records]
    assert notice.startswith(f"agent 7 at {__file__}:")
    assert "has blocked the event loop of all agents for 0.05 s" in notice


async def test_a_loop_that_is_blocked_at_the_deadline_of_the_blocker_is_left_behind_and_the_others_have_failed() -> (
    None
):
    blocker = Blocker()
    async with a_runner(answer_s=0.05) as runner:
        other = asyncio.ensure_future(runner.call(sleeps, name="other", timeout_s=LONG_S))
        await asyncio.sleep(0)
        task = asyncio.ensure_future(runner.call(blocker.directly, name="blocker", timeout_s=0.2))
        with pytest.raises(AgentTimeoutError):
            await task
        with pytest.raises(RolloutError, match=r"blocker at .* blocked the event loop of all agents"):
            await other

        async def answers() -> int:
            return 5

        assert await runner.call(answers, name="next", timeout_s=LONG_S) == 5
    blocker.free.set()


async def test_at_the_deadline_of_another_the_blocker_stays_and_the_others_have_failed() -> None:
    blocker = Blocker()
    async with a_runner(answer_s=0.05) as runner:
        blocking = asyncio.ensure_future(runner.call(blocker.in_a_task, name="blocker", timeout_s=LONG_S))
        await asyncio.to_thread(blocker.begun.wait, 30)
        others = [runner.call(sleeps, name=f"other {limit}", timeout_s=limit) for limit in (0.1, LONG_S)]
        for result in await asyncio.gather(*others, return_exceptions=True):
            assert isinstance(result, RolloutError)
            assert "blocker at" in str(result)
        assert not blocking.done()
        blocker.free.set()
        assert await blocking == "done"
