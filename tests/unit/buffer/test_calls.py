"""A repeated call returns the stored answer and changes nothing; what nobody will repeat is forgotten."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.buffer.calls import CallLog, OpenCalls
from buffer_rl.errors import BufferStateError


def test_a_repeat_returns_the_first_answer_without_executing_again() -> None:
    log, counter = CallLog(), [0]

    def bump() -> int:
        counter[0] += 1
        return counter[0]

    assert log.once("a", 0, 0, bump) == 1
    assert log.once("a", 0, 0, bump) == 1
    assert log.once("b", 0, 0, bump) == 2
    assert log.once("a", 1, 0, bump) == 3
    assert log.once("a", 0, 0, bump) == 1
    assert counter == [3]


def test_a_call_that_raised_is_executed_by_its_repeat() -> None:
    log = CallLog()
    with pytest.raises(ZeroDivisionError):
        log.once("a", 0, 0, lambda: 1 / 0)
    assert log.once("a", 0, 0, lambda: "done") == "done"


def test_a_call_that_its_caller_gave_up_is_refused_and_calls_may_come_out_of_order() -> None:
    log = CallLog()
    assert [log.once("a", number, 0, lambda n=number: n) for number in (1, 0, 3)] == [1, 0, 3]
    assert log.once("a", 5, 3, lambda: 5) == 5
    assert log.once("a", 3, 3, lambda: "again") == 3
    assert log.once("a", 4, 2, lambda: 4) == 4  # sent before call 5, come after it
    for late in (1, 2):
        with pytest.raises(BufferStateError, match=f"no longer waits for its call {late}"):
            log.once("a", late, 0, lambda: "again")
    assert log.once("b", 0, 0, lambda: "another caller's") == "another caller's"


class Answer:
    """Something large."""


def test_an_answer_is_let_go_with_the_first_call_that_is_made_after_it_came() -> None:
    log, calls, answers = CallLog(), OpenCalls(), []
    for _ in range(5):
        with calls.numbered() as (sequence, open_from):
            answers.append(weakref.ref(log.once("a", sequence, open_from, Answer)))
    gc.collect()
    assert [answer() is not None for answer in answers] == [False] * 4 + [True]


def test_numbers_are_given_once_and_calls_under_way_are_never_said_to_be_settled() -> None:
    calls, seen, failures = OpenCalls(), [], []

    def work() -> None:
        for _ in range(200):
            with calls.numbered() as (sequence, open_from), calls.numbered() as (inner, inner_from):
                seen.extend((sequence, inner))
                if not open_from <= sequence or not inner_from <= sequence < inner:
                    failures.append((sequence, open_from, inner, inner_from))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failures == []
    assert sorted(seen) == list(range(4 * 200 * 2))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_whatever_overlaps_a_repeat_of_a_call_under_way_finds_its_answer(turns: list[tuple[int, bool]]) -> None:
    log, calls = CallLog(), OpenCalls()
    under_way: dict[int, tuple[object, int, int]] = {}
    for slot, ends in turns:
        if slot not in under_way:
            call = calls.numbered()
            sequence, open_from = call.__enter__()
            assert log.once("a", sequence, open_from, lambda n=sequence: n) == sequence
            under_way[slot] = (call, sequence, open_from)
        else:
            call, sequence, open_from = under_way[slot]
            assert log.once("a", sequence, open_from, lambda: "executed again") == sequence
            if ends:
                call.__exit__(None, None, None)  # type: ignore[attr-defined]
                del under_way[slot]
