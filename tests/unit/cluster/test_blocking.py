"""The synchronous methods of a rollout's buffer, which wait for the asynchronous ones."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import pytest

from buffer_rl.buffer.feed import DeliveredFeed
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.rollout_client import RolloutClient
from buffer_rl.buffer.state import BufferState
from buffer_rl.cluster.calling import blocking
from buffer_rl.data.custom import Delivery
from buffer_rl.errors import BufferStateError
from buffer_rl.records.groups import GroupUid, QueueHeader, Sample, SampleGroup
from harness.local_buffer import DirectCalls

WHO: ContextVar[str] = ContextVar("who", default="no one")


class Multiplier:
    """Has a method of both forms."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    async def atimes(self, number: int, *, add: int = 0) -> tuple[int, str]:
        """The product."""
        if number < 0:
            raise BufferStateError("no negative numbers")
        await asyncio.sleep(0)
        return self.factor * number + add, WHO.get()

    times = blocking(atimes)


def test_a_blocking_method_works_in_any_thread_with_the_context_and_the_errors_of_the_caller() -> None:
    twice = Multiplier(2)

    async def in_an_event_loop() -> tuple[int, str]:
        WHO.set("the loop")
        return twice.times(5)

    assert twice.times(3, add=1) == (7, "no one")
    assert asyncio.run(in_an_event_loop()) == (10, "the loop")
    assert asyncio.run(asyncio.to_thread(twice.times, 4)) == (8, "no one")
    assert twice.times.__doc__ == "The product."
    with pytest.raises(BufferStateError, match="no negative numbers"):
        twice.times(-1)


def test_a_blocking_lease_asks_the_filter_and_the_data_source_also_in_the_thread_of_an_event_loop() -> None:
    state = BufferState(DeliveredFeed("mine:Source"), ledger=Ledger.in_memory(), groups_per_step=2)
    filtered: list[tuple[int, str]] = []

    def newest_first(headers: list[QueueHeader], num_samples: int) -> list[GroupUid]:
        filtered.append((len(headers), WHO.get()))
        return [header.uid for header in headers][::-1]

    async def deliver(num_groups: int) -> None:
        """As a data source of the user's own: groups of one sample, as many as the Buffer asks for."""
        request = state.get_delivery_request(num_groups)
        assert request is not None
        uids = [GroupUid("s", request.first_group + index, 0) for index in range(request.num_groups)]
        groups = [SampleGroup(uid=uid, samples=[Sample(uid=uid, prompt="p", group_index=uid.row)]) for uid in uids]
        state.deliver(Delivery(number=request.number, groups=groups, state=b""))

    calls: Any = DirectCalls(state)
    encoder: Any = None  # no group is finished
    client = RolloutClient(calls, state.generate(0), encoder, newest_first, deliver)

    async def in_an_event_loop() -> list[int]:
        WHO.set("the loop")
        return [group.uid.row for group in client.get_samples(3)]

    first = client.get_samples(2)
    assert [group.uid.row for group in first] == [0, 1]  # of the data source; the queue was empty
    client.add_samples(first)
    assert asyncio.run(in_an_event_loop()) == [1, 0, 2]
    assert filtered == [(2, "the loop")]
