from __future__ import annotations

import asyncio
from typing import Any

import pytest

from buffer_rl.errors import RolloutError
from buffer_rl.records.groups import FilterDecision, GroupUid, QueueHeader
from buffer_rl.rollout.user_functions import UserFunction, apply_filter, choose_queued


async def decide(kit: Any, function: Any) -> FilterDecision:
    chosen = None if function is None else UserFunction("filter", "my_filter:keep", function)
    return await apply_filter(chosen, kit.make_args(), kit.make_group(4))


async def test_without_a_filter_everything_is_kept(kit: Any) -> None:
    assert (await decide(kit, None)).keep


async def test_sync_async_bool_and_decision_are_all_accepted(kit: Any) -> None:
    async def asynchronous(args: Any, group: Any) -> bool:
        await asyncio.sleep(0)
        return False

    assert await decide(kit, lambda args, group: True) == FilterDecision(keep=True)
    assert await decide(kit, asynchronous) == FilterDecision(keep=False, reason="filtered")
    named = FilterDecision(keep=False, reason="zero_std")
    assert await decide(kit, lambda args, group: named) == named


async def test_an_exception_names_the_filter_the_group_and_the_line(kit: Any) -> None:
    def broken(args: Any, group: Any) -> bool:
        raise IndexError("filter bug")

    with pytest.raises(RolloutError, match="IndexError: filter bug") as caught:
        await decide(kit, broken)
    assert "my_filter:keep" in str(caught.value)
    assert "source:4:0" in str(caught.value)
    assert "in broken" in str(caught.value)


@pytest.mark.parametrize("value", [None, 1, "yes", 0.5])
async def test_other_answers_are_refused(kit: Any, value: Any) -> None:
    with pytest.raises(RolloutError, match="FilterDecision"):
        await decide(kit, lambda args, group: value)


HEADERS = [QueueHeader(uid=GroupUid("s", row, 0), admitted=row, prompt_length=9 - row) for row in range(3)]


def choose(function: Any) -> list[int]:
    chosen = UserFunction("buffer_filter", "my:filter", function)
    return [uid.row for uid in choose_queued(chosen, None, 4, HEADERS, 2)]


def test_a_buffer_filter_chooses_among_the_headers_in_its_order() -> None:
    assert choose(lambda args, rollout_id, buffer, num: sorted(buffer, key=lambda h: h.prompt_length)[:num]) == [2, 1]
    assert choose(lambda args, rollout_id, buffer, num: []) == []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda args, rollout_id, buffer, num: 1 / 0, "ZeroDivisionError"),
        (lambda args, rollout_id, buffer, num: [GroupUid("s", 0, 0)], "one of its entries is GroupUid"),
        (lambda args, rollout_id, buffer, num: None, "it returned None"),
    ],
)
def test_a_broken_buffer_filter_is_named(function: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=message) as caught:
        choose(function)
    assert caught.value.where == "buffer_filter 'my:filter', rollout 4"
