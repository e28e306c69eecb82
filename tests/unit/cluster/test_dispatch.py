"""Where calls on a group go, what each member gets, and how their answers are joined; without processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.cluster.dispatch import (
    Dispatch,
    Later,
    To,
    all_answers,
    dispatch,
    dispatch_of,
    first_answer,
    plan_calls,
    settled,
)
from buffer_rl.errors import WorkerError
from buffer_rl.records.groups import GroupUid, RowId, Topology, TrainBatch


class Doubler:
    @dispatch(To.SCATTER)
    def double(self, rows: list[int], factor: int = 2) -> list[int]:
        return [factor * row for row in rows]

    @dispatch(To.SCATTER, collect=lambda role, rows: sum(rows))
    def total(self, rows: list[int]) -> list[int]:
        return rows

    @dispatch(To.HEADS)
    def place(self) -> int: ...

    @dispatch(To.ONE)
    def next(self) -> int: ...

    def plain(self) -> int: ...


class Given(Later):
    """An answer that is there once it is waited for."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def wait(self, timeout_s: float | None = None) -> Any:
        return self.value


class LoudDoubler(Doubler):
    """Inherits what its base class declares."""


def replicas(count: int) -> list[Topology]:
    return [Topology(dp_rank=rank, dp_size=count) for rank in range(count)]


def called(method: Callable[..., Any], places: list[Topology], *args: Any) -> tuple[list[tuple[Any, ...]], Any]:
    """What each member gets, and the group's answer, where the members are ``Doubler``s."""
    calls, collect = plan_calls(dispatch_of(method), args, places)
    return [*calls.values()], collect("doubler", [method(Doubler(), *own) for own in calls.values()])


def test_what_a_method_declares_is_found_through_its_class_and_its_subclasses() -> None:
    for member_class in (Doubler, LoudDoubler):
        assert dispatch_of(member_class.double).to is To.SCATTER
        assert dispatch_of(member_class.place) == Dispatch(To.HEADS, all_answers)
        assert dispatch_of(member_class.next) == Dispatch(To.ONE, first_answer)
        assert dispatch_of(member_class.plain) == Dispatch(To.ALL, first_answer)


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [
        (1, [[0], [0], [0], [0]]),
        (8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (10, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1]]),
        (0, [[], [], [], []]),
    ],
)
def test_rows_are_split_over_four_workers_and_what_pads_them_reaches_neither_result_nor_caller(
    num_rows: int, expected: list[list[int]]
) -> None:
    rows = list(range(num_rows))
    shares, answer = called(Doubler.double, replicas(4), rows)
    assert [own[0] for own in shares] == expected
    assert answer == [2 * row for row in range(num_rows)]
    assert rows == list(range(num_rows))
    assert called(Doubler.total, replicas(4), rows)[1] == sum(range(num_rows))


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 3))
def test_every_row_is_answered_once_and_in_order_whatever_the_ranks(
    num_rows: int, dp: int, ranks_a_replica: int
) -> None:
    places = [
        Topology(dp_rank=rank // ranks_a_replica, dp_size=dp, is_head=rank % ranks_a_replica == ranks_a_replica - 1)
        for rank in range(dp * ranks_a_replica)
    ]
    shares, answer = called(Doubler.double, places, list(range(num_rows)), 3)
    assert answer == [3 * row for row in range(num_rows)]
    assert len({len(own[0]) for own in shares}) == 1
    assert all(own[1] == 3 for own in shares)


@given(st.lists(st.integers(), max_size=30), st.integers(1, 7), st.booleans())
def test_rows_that_are_not_there_yet_are_cut_as_those_that_are(rows: list[int], dp: int, is_one_there: bool) -> None:
    other = [-row for row in rows]
    there, _ = plan_calls(dispatch_of(Doubler.double), (rows, other, "whole"), replicas(dp))
    late, collect = plan_calls(
        dispatch_of(Doubler.double), (rows if is_one_there else Given(rows), Given(other), "whole"), replicas(dp)
    )
    arrived = {rank: settled(own) for rank, own in late.items()}
    assert arrived == there
    assert collect("doubler", [own[1] for own in arrived.values()]) == other


def test_answers_that_do_not_fit_the_rows_are_refused_where_they_arrive() -> None:
    for args in (([1, 2, 3], Given([1, 2, 3, 4])), (Given([1, 2, 3]), Given([1])), ([1], Given(5)), (Given("abc"),)):
        calls, _ = plan_calls(dispatch_of(Doubler.double), args, replicas(2))
        for own in calls.values():
            with pytest.raises(ValueError, match="arguments to scatter have the lengths"):
                settled(own)


def test_an_answer_that_is_not_scattered_arrives_whole() -> None:
    calls, _ = plan_calls(Dispatch(), (Given([1, 2]), 3), replicas(2))
    assert [settled(own) for own in calls.values()] == [([1, 2], 3), ([1, 2], 3)]


def test_a_dispatch_of_the_callers_own_says_who_gets_what_and_collects_by_rank() -> None:
    own = Dispatch(lambda places, value: {2: (value,), 0: (value + len(places),)}, all_answers)
    calls, collect = plan_calls(own, (5,), replicas(3))
    assert [*calls.items()] == [(0, (8,)), (2, (5,))]
    assert collect("doubler", ["a", "b"]) == ["a", "b"]
    for wrong in ({}, {3: ()}, {0: [1]}):
        with pytest.raises(ValueError, match="a dispatch gave"):
            plan_calls(Dispatch(lambda places, given=wrong: given), (), replicas(3))


def test_ranks_of_one_replica_get_equal_rows_and_the_heads_alone_answer() -> None:
    # Two replicas of two tensor-parallel ranks, of which the second is the head, and the replicas are interleaved.
    places = [Topology(dp_rank=rank % 2, dp_size=2, is_head=rank >= 2) for rank in range(4)]
    calls, collect = plan_calls(dispatch_of(Doubler.double), ([1, 2, 3, 4],), places)
    assert [own[0] for own in calls.values()] == [[1, 2], [3, 4], [1, 2], [3, 4]]
    assert collect("doubler", [None, None, ["a", "b"], ["c", "d"]]) == ["a", "b", "c", "d"]


def test_heads_alone_are_called_where_a_method_says_so() -> None:
    places = [Topology(dp_rank=rank // 2, dp_size=2, is_head=rank % 2 == 1) for rank in range(4)]
    calls, collect = plan_calls(dispatch_of(Doubler.place), (), places)
    assert calls == {1: (), 3: ()}
    assert collect("doubler", [1, 3]) == [1, 3]


def test_calls_to_one_member_take_turns() -> None:
    turns = [[*plan_calls(dispatch_of(Doubler.next), (), replicas(3), turn)[0]] for turn in range(4)]
    assert turns == [[0], [1], [2], [0]]


def test_a_list_as_long_as_the_group_is_sent_whole_where_nothing_is_scattered() -> None:
    calls, _ = plan_calls(Dispatch(), (["a", "b"],), replicas(2))
    assert calls == {0: (["a", "b"],), 1: (["a", "b"],)}


def test_a_batch_is_scattered_by_its_rows_and_stays_what_it_is() -> None:
    uid = GroupUid("data", 0, 0)
    batch = TrainBatch(
        rollout_id=0,
        task="train_0",
        row_ids=[RowId(uid, index) for index in range(3)],
        columns={"reward": np.arange(3, dtype=np.float32), "tokens": [np.full(index, index) for index in range(3)]},
    )
    calls, _ = plan_calls(dispatch_of(Doubler.double), (batch, [5, 6, 7]), replicas(2))
    first, second = calls.values()
    assert (first[0].columns["reward"].tolist(), first[1]) == ([0, 1], [5, 6])
    assert (second[0].columns["reward"].tolist(), second[1]) == ([2, 0], [7, 5])
    assert len(batch) == 3
    assert set(batch.columns) == {"reward", "tokens"}


def test_arguments_of_different_lengths_or_without_rows_are_refused() -> None:
    for args in (([1, 2], [1]), (7,), ()):
        with pytest.raises(ValueError, match="arguments to scatter have the lengths"):
            plan_calls(dispatch_of(Doubler.double), args, replicas(2))


def test_an_answer_of_another_length_than_its_rows_is_refused_and_not_joined() -> None:
    _, collect = plan_calls(dispatch_of(Doubler.double), ([1, 2, 3, 4],), replicas(2))
    with pytest.raises(WorkerError, match="a list of 2 values"):
        collect("doubler", [[1, 2], [3]])
