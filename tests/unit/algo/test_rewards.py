from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from buffer_rl.algo.options import AlgorithmOptions
from buffer_rl.algo.rewards import normalized, overlong_penalties, rewards_kind, shaped
from buffer_rl.plan.algorithms import ALGORITHMS, LOSSES, Rewards
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Sample, SampleGroup, equal_rewards
from buffer_rl.rollout.stats import RolloutStats
from filter_hub.reward_deviation import nonzero

UNEVEN = ([1.0, 2.0, 3.0, 4.0], [10.0, 12.0], [5.0, 6.0, 7.0])
GROUP_RELATIVE = [Rewards.CENTRED, Rewards.STANDARD, Rewards.LEAVE_ONE_OUT, Rewards.PASS_AT_K]


def run_args(**options: Any) -> SimpleNamespace:
    """Of a run with everything else at its default."""
    defaults: dict[str, Any] = {"advantage_estimator": "grpo", "custom_advantage_function_path": None}
    flags = {"disable_rewards_normalization": False, "grpo_std_normalization": True}
    return SimpleNamespace(**(defaults | flags | options))


@pytest.mark.parametrize("kind", GROUP_RELATIVE)
def test_every_group_relative_kind_gives_uneven_groups_mean_0_and_equal_rewards_0(kind: Rewards) -> None:
    for rewards in UNEVEN:
        found = normalized(kind, np.array(rewards), k=1)
        assert found.mean() == pytest.approx(0, abs=1e-12)
        assert (np.diff(found) > 0).all()
    assert normalized(kind, np.array([0.1, 0.1, 0.1]), k=2).tolist() == [0, 0, 0]
    assert normalized(kind, np.array([0.1]), k=1).tolist() == [0]


ROUNDED = [0.3, 0.1 + 0.2, 0.3, 0.3]
"""Equal rewards, one of them the float sum 0.30000000000000004."""


@pytest.mark.parametrize("kind", GROUP_RELATIVE)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("scale", [1.0, -1.0, 1e3, 1e12])
def test_rewards_that_differ_by_rounding_alone_have_advantages_of_exactly_0(
    kind: Rewards, k: int, scale: float
) -> None:
    assert normalized(kind, scale * np.array(ROUNDED), k=k).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", GROUP_RELATIVE)
@pytest.mark.parametrize("scale", [1.0, -1.0, 1e-3, 1e6])
def test_a_reward_that_is_the_mean_has_an_advantage_of_exactly_0(kind: Rewards, scale: float) -> None:
    # (1 + 2 + 3) / 3 = 2, and (1 + 3 + 2 + 2) / 4 = 2; of tenths the float sums are off by 3e-17
    for tenths, places in (((1, 2, 3), [1]), ((1, 3, 2, 2), [2, 3]), ((7, 1, 4), [2])):
        found = normalized(kind, scale * np.array([each / 10 for each in tenths]), k=1)
        assert np.flatnonzero(found == 0).tolist() == places


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4, -3e7])
def test_rewards_are_equal_if_their_deviation_is_at_most_the_limit(scale: float) -> None:
    rng = np.random.default_rng(3)
    found = set()
    for _ in range(500):
        limit = max(1e-6, 1e-9 * abs(scale))
        rewards = scale + limit * 10 ** rng.uniform(-2, 2) * rng.choice([0.0, 1.0, rng.uniform()], rng.integers(2, 40))
        mean = math.fsum(rewards) / len(rewards)
        deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
        if abs(deviation - limit) > 0.01 * limit:
            assert equal_rewards(rewards) is (deviation <= limit)
            found.add(deviation <= limit)
    assert found == {True, False}
    assert not equal_rewards([0.0, math.nan, 0.0])
    with np.errstate(invalid="ignore"):
        assert not equal_rewards([0.0, math.inf])


def test_filter_metric_and_advantages_agree_on_which_groups_have_equal_rewards() -> None:
    for rewards in (ROUNDED, [0.0, 1.4e-6], [0.0, 1.5e-6], [0.5, 0.5, 0.5 + 1e-5], [1e9, 1e9 + 2], [1.0]):
        samples = [Sample(sample_index=number, reward=reward) for number, reward in enumerate(rewards)]
        group, stats = SampleGroup(samples=samples), RolloutStats()
        stats.count_kept(group, rewards)
        without_gradient = {not normalized(kind, np.array(rewards), k=1).any() for kind in GROUP_RELATIVE}
        dropped = not nonzero(SimpleNamespace(reward_key=None), group).keep
        assert without_gradient == {dropped} == {stats.metrics_of_kept()["zero_std"] == 1}, rewards


def test_of_parts_whose_means_differ_by_rounding_alone_no_group_has_a_gradient() -> None:
    # The mean of 0.1 and 0.5 is 0.3, that of 0.1 + 0.2 is not.
    rewards, stats = [0.1, 0.5, 0.1 + 0.2], RolloutStats()
    ids = [(0, 0), (0, 1), (1, 0)]
    group = SampleGroup(samples=[Sample(sample_index=index, part=part) for index, part in ids])
    stats.count_kept(group, rewards)
    assert stats.metrics_of_kept()["zero_std"] == 1


@pytest.mark.parametrize("kind", list(Rewards))
def test_the_order_of_samples_changes_nothing(kind: Rewards) -> None:
    rewards, order = np.array([3.0, -1.0, 0.5, 0.5, 7.0]), [4, 2, 0, 3, 1]
    found = normalized(kind, rewards[order], k=2)
    np.testing.assert_allclose(found, normalized(kind, rewards, k=2)[order], atol=1e-12)


def test_each_kind_is_its_formula() -> None:
    rewards = np.array([1.0, 2.0, 6.0])  # mean 3, sample deviation sqrt((4 + 1 + 9) / 2) = sqrt(7)
    assert normalized(Rewards.RAW, rewards, k=1).tolist() == [1, 2, 6]
    assert normalized(Rewards.CENTRED, rewards, k=1).tolist() == [-2, -1, 3]
    np.testing.assert_allclose(normalized(Rewards.STANDARD, rewards, k=1), np.array([-2, -1, 3]) / 7**0.5, rtol=1e-6)
    np.testing.assert_allclose(normalized(Rewards.LEAVE_ONE_OUT, rewards, k=1), [-3, -1.5, 4.5])
    # Best of 2: pairs give 2, 6, 6: mean 14/3, variance (64 + 16 + 16) / 27. With 1: 4, with 2: 4, with 6: 6.
    expected = (np.array([4, 4, 6]) - 14 / 3) / (96 / 27) ** 0.5
    np.testing.assert_allclose(normalized(Rewards.PASS_AT_K, rewards, k=2), expected)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, Rewards.STANDARD),
        ({"grpo_std_normalization": False}, Rewards.CENTRED),
        ({"advantage_estimator": "dr_grpo"}, Rewards.CENTRED),
        ({"advantage_estimator": "rloo", "grpo_std_normalization": False}, Rewards.LEAVE_ONE_OUT),
        ({"advantage_estimator": "gae"}, Rewards.RAW),
        ({"advantage_estimator": "rloo", "disable_rewards_normalization": True}, Rewards.RAW),
        ({"advantage_estimator": "gae", "custom_advantage_function_path": "mine:fn"}, Rewards.STANDARD),
    ],
)
def test_the_algorithm_says_how_rewards_are_normalised_and_the_options_take_it_back(
    options: dict[str, Any], kind: Rewards
) -> None:
    assert rewards_kind(run_args(**options)) is kind


def test_long_responses_are_punished_by_how_far_they_reach_into_the_buffer() -> None:
    # L_max = 100, L_cache = 20: 0 up to 80 tokens, (80 - 85) / 20 = -0.25 at 85, -1 at 100 and beyond; times 2.
    args = SimpleNamespace(rollout_max_response_len=100, overlong_buffer_len=20, overlong_penalty_factor=2.0)
    found = overlong_penalties(args, np.array([1, 80, 85, 100, 130]))
    np.testing.assert_allclose(found, [0, 0, -0.5, -2, -2])
    args.overlong_buffer_len = 0
    assert overlong_penalties(args, np.array([1, 130])).tolist() == [0, 0]


def test_each_algorithm_is_registered_by_its_row_and_reads_options_that_there_are() -> None:
    registry = PluginRegistry(autoload=False)
    assert {*registry.names("advantage")} == ALGORITHMS.keys()
    assert {*registry.names("loss")} == LOSSES.keys()
    for name, algorithm in ALGORITHMS.items():
        assert registry.resolve("advantage", name) is not None
        assert algorithm.options <= AlgorithmOptions.model_fields.keys()
        assert algorithm.loss in LOSSES


def test_rewards_are_clipped_then_scaled_and_penalties_of_length_are_neither() -> None:
    off = {"overlong_buffer_len": 0, "overlong_penalty_factor": 1.0, "length_penalty": 0.0, "reward_clip": []}
    args = SimpleNamespace(rollout_max_response_len=10, reward_scale=1.0, **off)
    rewards, lengths = np.array([-3.0, 0.1, 8.0]), np.array([10, 5, 14])
    assert shaped(args, rewards, lengths).tolist() == rewards.tolist()
    args.reward_clip = [2.0]
    assert shaped(args, rewards, lengths).tolist() == [-2, 0.1, 2]
    args.reward_clip = [0.0, 6.0]
    args.reward_scale = 0.5
    assert shaped(args, rewards, lengths).tolist() == [0, 0.05, 3]
    # 0.2 for each of 10 tokens
    args.length_penalty = 2.0
    np.testing.assert_allclose(shaped(args, rewards, lengths), [0 - 2, 0.05 - 1, 3 - 2.8], rtol=1e-12)
    # and of the last 5 tokens below 10: all, none, all
    args.overlong_buffer_len = 5
    np.testing.assert_allclose(shaped(args, rewards, lengths), [0 - 2 - 1, 0.05 - 1, 3 - 2.8 - 1], rtol=1e-12)
