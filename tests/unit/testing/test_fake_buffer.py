from __future__ import annotations

import pytest

from buffer_rl.errors import BufferStateError
from buffer_rl.kinds.rollout import RolloutBuffer
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Ticket
from buffer_rl.testing.fake_buffer import FakeBuffer


def make_buffer(num_groups: int) -> FakeBuffer:
    uids = [GroupUid("s", row, 0) for row in range(num_groups)]
    groups = [SampleGroup(uid=uid, samples=[Sample(uid=uid, response="old")]) for uid in uids]
    return FakeBuffer(groups, Ticket(rollout_id=0, evaluation=False, num_groups=1, version=0, incarnation="i"))


def test_it_is_a_rollout_buffer() -> None:
    buffer: RolloutBuffer = make_buffer(0)
    wanted = {name for name in dir(RolloutBuffer) if not name.startswith("_")}
    assert wanted <= set(dir(buffer))


async def test_reports_are_recorded_and_returned_groups_come_back_first_as_prompts() -> None:
    buffer = make_buffer(3)
    first, second = await buffer.aget_samples(2)
    buffer.reject(first, "why not")
    await buffer.aadd_samples([second])
    assert buffer.get_buffer_length() == 1
    again, third = buffer.get_samples(5)
    assert (again.uid, again[0].response) == (second.uid, "")
    await buffer.afinish(third)
    assert buffer.rejected == [(first, "why not")]
    assert buffer.finished == [third]
    assert buffer.get_samples(1) == []


def test_a_report_of_a_group_that_is_not_leased_is_refused() -> None:
    buffer = make_buffer(1)
    (group,) = buffer.get_samples(1)
    buffer.finish(group)
    with pytest.raises(BufferStateError):
        buffer.finish(group)
