from __future__ import annotations

import asyncio
from typing import Any

import pytest

from buffer_rl.errors import RolloutError
from buffer_rl.rollout.filtering import apply_filter
from buffer_rl.types import FilterDecision


async def decide(kit: Any, function: Any) -> FilterDecision:
    return await apply_filter(function, "my_filter:keep", kit.make_args(), kit.make_group(4))


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
