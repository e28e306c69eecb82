"""Calls that are made at one time travel in one message, each with an answer or an error of its own."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from buffer_rl.cluster.calling import JoinedCalls
from buffer_rl.errors import BufferStateError, DeadlineError


class Line:
    """Receives messages, and answers the calls of each once ``open`` is set."""

    def __init__(self) -> None:
        self.messages: list[list[str]] = []
        self.open = asyncio.Event()
        self.calls = JoinedCalls(self.send)

    async def send(self, calls: list[str]) -> list[Any]:
        self.messages.append(calls)
        await self.open.wait()
        if "late" in calls:
            raise DeadlineError("no answer")
        return [BufferStateError("refused") if call == "bad" else f"{call} done" for call in calls]

    def start(self, *calls: str) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(self.calls.make(call)) for call in calls]

    async def reached(self, num_messages: int) -> None:
        while len(self.messages) < num_messages:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0)


async def test_calls_that_are_made_while_a_message_is_under_way_go_together_in_the_next() -> None:
    line = Line()
    first = line.start("a")
    await line.reached(1)
    others = line.start("b", "bad", "c")
    await asyncio.sleep(0)
    line.open.set()
    results = await asyncio.gather(*first, *others, return_exceptions=True)
    assert line.messages == [["a"], ["b", "bad", "c"]]
    assert [result for result in results if isinstance(result, str)] == ["a done", "b done", "c done"]
    assert isinstance(results[2], BufferStateError)
    assert await line.calls.make("d") == "d done"
    assert line.messages[2:] == [["d"]]


async def test_a_message_that_fails_fails_its_own_calls_alone() -> None:
    line = Line()
    first = line.start("a", "late")
    await line.reached(1)
    second = line.start("b")
    await asyncio.sleep(0)
    line.open.set()
    results = await asyncio.gather(*first, *second, return_exceptions=True)
    assert [type(result) for result in results] == [DeadlineError, DeadlineError, str]


async def test_a_caller_that_is_cancelled_leaves_the_others_alone_and_sends_nothing_more() -> None:
    line = Line()
    first = line.start("a", "b")
    await line.reached(1)
    second = line.start("c", "d")
    await asyncio.sleep(0)
    for task in (first[0], second[0]):
        task.cancel()
    line.open.set()
    results = await asyncio.gather(*first, *second, return_exceptions=True)
    assert [str(result) for result in results] == ["", "b done", "", "d done"]
    assert line.messages == [["a", "b"], ["d"]]


async def test_no_caller_waits_for_a_message_that_was_given_up() -> None:
    before = asyncio.all_tasks()
    line = Line()
    calls = line.start("a")
    await line.reached(1)
    calls += line.start("b")
    (sending,) = asyncio.all_tasks() - before - set(calls)
    await asyncio.sleep(0)
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sending
    for call in calls:
        with pytest.raises(asyncio.CancelledError):
            await call
