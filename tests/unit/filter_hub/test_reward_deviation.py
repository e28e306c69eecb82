from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.records.groups import FilterDecision, GroupUid, Sample, SampleGroup
from filter_hub.difficulty import window
from filter_hub.reward_deviation import nonzero


def decide(*rewards: Any, reward_key: str | None = None) -> FilterDecision:
    uid = GroupUid("data", 0, 0)
    group = SampleGroup(uid=uid, samples=[Sample(uid=uid, reward=reward) for reward in rewards])
    return nonzero(SimpleNamespace(reward_key=reward_key), group)


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0.0, 0.0, 0.0), "zero_std"),
        ((1.0, 1.0), "zero_std"),
        ((0.1, 0.1, 0.1), "zero_std"),  # the computed deviation of these three is 1.4e-17
        ((-0.26, -0.26), "zero_std"),
        ((1.0,), "zero_std"),
        ((1, 1.0), "zero_std"),
        ((0.5, 0.5, 0.5 + 1e-9), "zero_std"),
        ((0.0, 1.4e-6), "zero_std"),  # a deviation of 0.99e-6
        ((None, 1.0, 1.0), "zero_std"),
        ((1e9 + 0.1, 1e9 + 0.3), "zero_std"),  # a float sum of this size has lost more
        ((None, None), "no_rewards"),
        ((), "no_rewards"),
    ],
)
def test_equal_rewards_are_dropped_with_a_reason(rewards: tuple[Any, ...], reason: str) -> None:
    assert decide(*rewards) == FilterDecision(keep=False, reason=reason)


@pytest.mark.parametrize("rewards", [(0.0, 1.0), (-1.0, 1.0), (0.5, 0.5, 0.5 + 1e-5), (None, 0.0, 1.0)])
def test_rewards_that_differ_are_kept_also_where_their_mean_is_zero(rewards: tuple[Any, ...]) -> None:
    assert decide(*rewards) == FilterDecision(keep=True)


def test_mappings_are_compared_by_the_reward_key() -> None:
    rewards = ({"score": 1.0, "length": 3.0}, {"score": 1.0, "length": 4.0})
    assert decide(*rewards, reward_key="score").reason == "zero_std"
    assert decide(*rewards, reward_key="length").keep


def test_a_sample_in_parts_counts_with_the_mean_of_its_parts() -> None:
    # 0.1 + 0.5 over two parts and 0.3: means 0.3 and 0.3; the rows alone deviate.
    samples = [Sample(sample_index=0, part=part, reward=reward) for part, reward in enumerate((0.1, 0.5))]
    group = SampleGroup(samples=[*samples, Sample(sample_index=1, reward=0.3)])
    args = SimpleNamespace(reward_key=None)
    assert nonzero(args, group).reason == "zero_std"
    assert window(args, group).keep
    group.samples[2].reward = 0.9
    assert nonzero(args, group).keep
