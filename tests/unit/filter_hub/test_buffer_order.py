from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.records.groups import GroupUid, QueueHeader
from filter_hub import buffer_order

ORDERS = ["first_in", "freshest", "shortest", "longest", "highest_reward", "lowest_reward"]


def header(
    admitted: int, prompt_length: int = 5, reward: float | None = None, version: int | None = None
) -> QueueHeader:
    uid = GroupUid("data", admitted, 0)
    return QueueHeader(uid=uid, admitted=admitted, prompt_length=prompt_length, reward=reward, version=version)


QUEUE = [
    header(0, 7, None, 3),
    header(1, 2, 0.5, 1),
    header(2, 9, -1.0, 3),
    header(3, 2, 0.5, None),
]


@pytest.mark.parametrize(
    ("name", "admitted"),
    [
        ("first_in", [0, 1, 2, 3]),
        ("freshest", [3, 0, 2, 1]),
        ("shortest", [1, 3, 0, 2]),
        ("longest", [2, 0, 1, 3]),
        ("highest_reward", [1, 3, 2, 0]),
        ("lowest_reward", [2, 1, 3, 0]),
    ],
)
def test_the_chosen_headers_in_their_order(name: str, admitted: list[int]) -> None:
    choose: Callable[..., Any] = getattr(buffer_order, name)
    assert [h.admitted for h in choose(None, 0, QUEUE, 4)] == admitted
    assert [h.admitted for h in choose(None, 0, QUEUE, 2)] == admitted[:2]
    assert choose(None, 0, QUEUE, 0) == []
    assert choose(None, 0, [], 3) == []


rows = st.lists(
    st.tuples(st.integers(1, 3), st.none() | st.sampled_from([0.0, 1.0]), st.none() | st.integers(0, 2)), max_size=8
)


@given(rows, st.integers(0, 10), st.randoms())
def test_headers_are_chosen_once_and_whatever_the_order_they_are_stored_in(
    rows: list[Any], num_samples: int, order: random.Random
) -> None:
    queue = [header(i, *fields) for i, fields in enumerate(rows)]
    shuffled = order.sample(queue, len(queue))
    for name in ORDERS:
        choose: Callable[..., Any] = getattr(buffer_order, name)
        chosen = choose(None, 0, shuffled, num_samples)
        assert chosen == choose(None, 0, queue, num_samples)
        assert len({h.uid for h in chosen}) == len(chosen) == min(num_samples, len(queue))
