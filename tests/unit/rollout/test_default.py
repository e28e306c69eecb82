from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.errors import BufferRLError, DeadlineError, EngineError, RolloutError
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl.types import GroupUid, RowId

RULE = "told_by_label"


async def roll(context: Any, buffer: FakeBuffer) -> Any:
    rollout = DefaultRollout(context.args)
    return await rollout(context.args, buffer.ticket.rollout_id, buffer, evaluation=buffer.ticket.evaluation)


def make_buffer(kit: Any, labels: list[str], wanted: int, *, num_samples: int = 2) -> FakeBuffer:
    groups = [kit.make_group(row, labels=[label] * num_samples) for row, label in enumerate(labels)]
    return FakeBuffer(groups, kit.make_ticket(wanted))


def rows(buffer: FakeBuffer) -> list[int]:
    return [uid.row for uid in buffer.finished_uids]


async def test_a_rollout_finishes_its_groups_with_rewards_and_metrics(kit: Any) -> None:
    engine = kit.ScriptedEngine(
        respond=lambda ids, params: kit.answer([3, 4, 5], finish_reason="length" if ids[-1] % 2 else "stop")
    )
    buffer = make_buffer(kit, ["1", "0", "3"], wanted=3)
    async with kit.opened(engine, custom_rm_path=kit.user(RULE)) as context:
        output = await roll(context, buffer)
    assert output.groups == []
    assert rows(buffer) == [0, 1, 2]
    metrics = output.metrics
    assert metrics["raw_reward"] == pytest.approx(4 / 3)
    assert metrics["raw_reward_std"] == pytest.approx((14 / 9) ** 0.5)  # of 1, 1, 0, 0, 3, 3
    assert (metrics["response_len/mean"], metrics["response_len/max"]) == (3.0, 3.0)
    assert metrics["generated_tokens"] == 18
    assert metrics["zero_std"] == 1.0
    truncated = [sample.status == "truncated" for group in buffer.finished for sample in group]
    assert metrics["truncated_ratio"] == sum(truncated) / 6
    assert 0 < sum(truncated) < 6


async def test_dropped_groups_are_replaced_one_for_one(kit: Any) -> None:
    buffer = make_buffer(kit, ["1"] * 20, wanted=3)
    options = {"custom_rm_path": kit.user(RULE), "dynamic_sampling_filter_path": kit.user("keep_odd_rows")}
    async with kit.opened(kit.ScriptedEngine(), **options) as context:
        output = await roll(context, buffer)
    assert rows(buffer) == [1, 3, 5]
    assert len(buffer.leased) == 6
    assert [(group.uid.row, reason) for group, reason in buffer.rejected] == [(0, "even"), (2, "even"), (4, "even")]
    assert output.metrics["drop_even"] == 3.0


@settings(max_examples=40, deadline=None)
@given(keep=st.lists(st.booleans(), min_size=12, max_size=12), wanted=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_the_kept_set_does_not_depend_on_the_order_of_completion(keep: list[bool], wanted: int, seed: int) -> None:
    import sys

    kit = sys.modules["__buffer_rl_rollout_kit__"]
    labels = ["1" if kept else "0" for kept in keep] + ["1"] * wanted
    expected = [row for row, label in enumerate(labels) if label == "1"][:wanted]
    buffer = make_buffer(kit, labels, wanted)
    asyncio.run(_roll_in_random_order(kit, buffer, seed))
    assert rows(buffer) == expected
    assert [uid.row for uid in buffer.leased] == list(range(expected[-1] + 1)) or len(buffer.leased) == wanted
