from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.algo.rewards import group_normalize
from buffer_rl.errors import RewardError


def test_normalised_rewards_match_hand_computed_numbers() -> None:
    # mean 2.5, sample variance (2.25 + 0.25 + 0.25 + 2.25) / 3 = 5/3
    deviation = math.sqrt(5 / 3)
    expected = np.array([-1.5, -0.5, 0.5, 1.5]) / (deviation + 1e-6)
    np.testing.assert_allclose(group_normalize([1, 2, 3, 4], std=True), expected, rtol=1e-12)


def test_without_std_rewards_are_only_centred() -> None:
    np.testing.assert_allclose(group_normalize([10, 12], std=False), [-1.0, 1.0])


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e9, -7.7])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("std", [True, False])
def test_equal_rewards_give_exactly_zero(reward: float, count: int, std: bool) -> None:
    assert group_normalize([reward] * count, std=std).tolist() == [0.0] * count


def test_groups_of_different_sizes_each_have_mean_zero() -> None:
    for group in ([1, 2, 3, 4], [10, 12], [5, 6, 7]):
        assert abs(group_normalize(group, std=False).mean()) < 1e-12
        assert abs(group_normalize(group, std=True).mean()) < 1e-12


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20), st.floats(-100, 100))
def test_a_constant_added_to_all_rewards_changes_nothing(rewards: list[float], constant: float) -> None:
    shifted = [reward + constant for reward in rewards]
    np.testing.assert_allclose(group_normalize(shifted, std=False), group_normalize(rewards, std=False), atol=1e-9)


@pytest.mark.parametrize("rewards", [[], [1.0, float("nan")], [float("inf"), 0.0], [[1.0, 2.0]]])
def test_rewards_that_are_empty_nested_or_not_finite_are_an_error(rewards: list[float]) -> None:
    with pytest.raises(RewardError):
        group_normalize(rewards, std=True)
