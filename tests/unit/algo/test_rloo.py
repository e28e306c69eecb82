from __future__ import annotations

import numpy as np
import pytest

from buffer_rl.algo.rewards import leave_one_out
from buffer_rl.errors import RewardError


def test_the_baseline_of_each_sample_is_the_mean_of_the_others() -> None:
    # 1 - (2 + 6) / 2 = -3; 2 - (1 + 6) / 2 = -1.5; 6 - (1 + 2) / 2 = 4.5
    np.testing.assert_allclose(leave_one_out(np.array([1.0, 2.0, 6.0])), [-3.0, -1.5, 4.5])


def test_uneven_groups_have_mean_0() -> None:
    # 10 - 12 = -2 and 12 - 10 = 2; of 1, 2, 3, 4 the first is 1 - 9 / 3 = -2
    for rewards, first in (([1.0, 2.0, 3.0, 4.0], -2.0), ([10.0, 12.0], -2.0), ([5.0, 6.0, 7.0], -1.5)):
        found = leave_one_out(np.array(rewards))
        assert found[0] == pytest.approx(first)
        assert found.mean() == pytest.approx(0, abs=1e-12)


def test_equal_rewards_and_a_single_one_give_exactly_0() -> None:
    assert leave_one_out(np.array([0.1, 0.1, 0.1])).tolist() == [0, 0, 0]
    assert leave_one_out(np.array([7.0])).tolist() == [0]


def test_rewards_that_are_not_finite_are_refused() -> None:
    with pytest.raises(RewardError, match="not finite"):
        leave_one_out(np.array([0.0, np.inf]))


def test_it_is_the_difference_to_the_others_for_any_rewards_in_any_order() -> None:
    rewards = np.random.default_rng(0).normal(size=9)
    alone = [rewards[i] - np.delete(rewards, i).mean() for i in range(9)]
    np.testing.assert_allclose(leave_one_out(rewards), alone, atol=1e-12)
    order = np.random.default_rng(1).permutation(9)
    np.testing.assert_allclose(leave_one_out(rewards[order]), np.array(alone)[order], atol=1e-12)
