"""Calls whose answers are waited for later: executed once, repeated where they were lost, and never kept open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from buffer_rl.buffer.calls import CallLog, OpenCalls, Sending, StartedCall
from buffer_rl.errors import BufferStateError, DeadlineError


class Actor:
    """A Buffer's call log behind calls of which the first ``lose`` answers, or calls, are lost."""

    def __init__(self, lose: int = 0, executed_first: bool = False) -> None:
        self.log, self.calls = CallLog(), OpenCalls()
        self.executed: list[str] = []
        self.asked: list[str] = []
        self.lose, self.executed_first = lose, executed_first

    def wait(self, method: str, ask: Callable[[], Any]) -> Any:
        """What ``Answers.wait`` does with Ray's references."""
        while (answer := ask()) is None:
            pass
        return answer

    def start(self, what: str, fails: Exception | None = None) -> StartedCall[str]:
        def execute() -> Any:
            self.executed.append(what)
            return fails or f"{what} done"

        @contextmanager
        def sending() -> Iterator[Sending]:
            with self.calls.numbered() as number:

                def ask() -> Any:
                    self.asked.append(what)
                    if what == "unsendable":
                        raise TypeError("cannot pickle")
                    lost, self.lose = self.lose > 0, self.lose - 1
                    if lost and not self.executed_first:
                        return None
                    answer = self.log.once("me", *number, execute)
                    return None if lost else [answer]

                yield cast("Any", self), ask, None

        return StartedCall[str](what, sending()).then(lambda answer: f"{answer}!")

    @property
    def open_from(self) -> int:
        """From which number on answers are kept."""
        with self.calls.numbered() as (_, open_from):
            return open_from


def test_a_call_is_made_at_once_and_its_answer_is_understood_later():
    actor = Actor()
    first, second = actor.start("first"), actor.start("second")
    assert actor.executed == ["first", "second"]
    assert actor.open_from == 0
    assert second.result() == "second done!"
    assert actor.open_from == 0  # the first may have to be repeated
    assert first.result() == "first done!"
    assert actor.open_from > 1  # both answers may be let go
    assert actor.executed == actor.asked == ["first", "second"]


@pytest.mark.parametrize("executed_first", [False, True])
def test_a_call_that_was_lost_is_made_again_and_executed_once(executed_first):
    actor = Actor(lose=2, executed_first=executed_first)
    call = actor.start("take")
    other = actor.start("put")  # lost, too
    assert call.result() == "take done!"
    assert other.result() == "put done!"
    assert sorted(actor.executed) == ["put", "take"]
    assert sorted(actor.asked) == ["put", "put", "take", "take"]


def test_a_settled_call_is_over_whatever_its_answer():
    actor = Actor()
    understood: list[str] = []
    call = actor.start("take").then(understood.append)
    call.drain()
    call.drain()
    actor.start("put", fails=DeadlineError("late")).drain()
    assert actor.open_from > 1
    assert actor.asked == ["take", "put"]  # a call that is over is not made again
    assert understood == []


def test_an_error_ends_the_call_too():
    actor = Actor()
    with pytest.raises(BufferStateError, match="no such row"):
        actor.start("put", fails=BufferStateError("no such row")).result()
    with pytest.raises(TypeError, match="cannot pickle"):
        actor.start("unsendable")
    assert actor.open_from > 1
