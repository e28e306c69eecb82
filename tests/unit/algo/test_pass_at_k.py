from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from buffer_rl.algo.rewards import best_of_k


def by_enumeration(rewards: np.ndarray, k: int) -> np.ndarray:
    """From a list of all subsets."""
    subsets = list(combinations(range(len(rewards)), k))
    best = np.array([max(rewards[i] for i in subset) for subset in subsets])
    mine = [best[[i in subset for subset in subsets]].mean() for i in range(len(rewards))]
    result: np.ndarray = (np.array(mine) - best.mean()) / best.std()
    return result


def test_binary_rewards_match_the_closed_form() -> None:
    # n = 4, k = 2, one correct. Of 6 pairs 3 hold it: mean 1/2, deviation sqrt(1/2 * 1/2) = 1/2.
    # Correct: (1 - 1/2) / (1/2) = 1. Wrong: of its 3 pairs 1 holds the correct one: (1/3 - 1/2) / (1/2) = -1/3.
    np.testing.assert_allclose(best_of_k(np.array([0.0, 1.0, 0.0, 0.0]), 2), [-1 / 3, 1, -1 / 3, -1 / 3])


def test_enough_correct_samples_leave_no_gradient() -> None:
    # Every pair of 3 samples holds one of the two correct ones.
    assert best_of_k(np.array([1.0, 0.0, 1.0]), 2).tolist() == [0, 0, 0]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_any_rewards_match_the_enumeration_of_all_subsets(k: int) -> None:
    for seed in range(5):
        rewards = np.random.default_rng(seed).integers(-2, 4, size=6).astype(float)
        if len(set(np.sort(rewards)[k - 1 :])) > 1:
            found = best_of_k(rewards, k)
            np.testing.assert_allclose(found, by_enumeration(rewards, k), atol=1e-12)
            assert found.mean() == pytest.approx(0, abs=1e-12)


def test_k_of_1_is_grpo_with_the_population_deviation() -> None:
    # mean 2, deviation sqrt((4 + 1 + 9 + 0) / 4)
    np.testing.assert_allclose(best_of_k(np.array([0.0, 1.0, 5.0, 2.0]), 1), np.array([-2, -1, 3, 0]) / np.sqrt(3.5))


def test_small_groups_and_equal_rewards_give_exactly_0() -> None:
    assert best_of_k(np.array([0.1, 0.1, 0.1]), 2).tolist() == [0, 0, 0]
    assert best_of_k(np.array([0.0, 1.0]), 2).tolist() == [0, 0]
    assert best_of_k(np.array([0.0, 0.0, 0.0, 0.1, 0.1]), 4).tolist() == [0] * 5, "rounding is no deviation"
    assert best_of_k(np.array([3.0]), 2).tolist() == [0]


def test_best_rewards_that_differ_by_rounding_alone_leave_no_gradient() -> None:
    # Every pair's best is 0.3, as 0.3 or as the sum 0.1 + 0.2.
    assert best_of_k(np.array([0.0, 0.3, 0.1 + 0.2, 0.3]), 2).tolist() == [0, 0, 0, 0]
