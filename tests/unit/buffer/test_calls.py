"""A repeated call returns the stored answer and changes nothing."""

from __future__ import annotations

import pytest

from buffer_rl.buffer.calls import CallLog
from buffer_rl.errors import BufferStateError


def test_a_repeat_returns_the_first_answer_without_executing_again() -> None:
    log, counter = CallLog(), [0]

    def bump() -> int:
        counter[0] += 1
        return counter[0]

    assert log.once("a", 0, bump) == 1
    assert log.once("a", 0, bump) == 1
    assert log.once("b", 0, bump) == 2
    assert log.once("a", 1, bump) == 3
    assert counter == [3]


def test_a_call_that_raised_is_executed_by_its_repeat() -> None:
    log = CallLog()
    with pytest.raises(ZeroDivisionError):
        log.once("a", 0, lambda: 1 / 0)
    assert log.once("a", 0, lambda: "done") == "done"


def test_a_repeat_older_than_the_kept_answers_is_refused_and_calls_may_come_out_of_order() -> None:
    log = CallLog(kept_answers=2)
    assert [log.once("a", number, lambda n=number: n) for number in (1, 0, 3, 2)] == [1, 0, 3, 2]
    assert log.once("a", 3, lambda: "again") == 3
    with pytest.raises(BufferStateError, match="no longer kept"):
        log.once("a", 1, lambda: "again")
