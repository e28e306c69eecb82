"""Rewards of single answers: where they stand, that they add nothing to the sample's, and what refuses them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from buffer_rl.agents.finish import Finish
from buffer_rl.algo.gae import gae
from buffer_rl.algo.options import AlgorithmOptions
from buffer_rl.algo.reinforce import reinforce_plus_plus
from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError, RolloutError
from buffer_rl.options.section import compose
from buffer_rl.plan.algorithm import estimator_needs
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, RowId, Sample, TrainBatch
from buffer_rl.rollout.conversion import GroupConverter
from harness.agent_play import AgentEngine, make_args, roll, user

ON = {"turn_rewards": True, "advantage_estimator": "reinforce_plus_plus"}


async def two_turns_and_a_branch(args: Any, sample: Sample, session: Any) -> float:
    """Two turns of one conversation, which earn 0.25 and 0.5, and one of another, which earns 2."""
    messages = user("go")
    first = await session.chat(messages)
    session.reward(0.25)
    await session.chat([*messages, first, *user("more")])
    await session.chat(user("other"))
    session.reward(2.0)
    session.reward(0.5, first)
    session.reward(-0.5, first)
    return 3.0


async def test_each_reward_stands_at_the_end_of_its_turn_and_all_add_up_to_nothing() -> None:
    fake, _ = await roll(two_turns_and_a_branch, AgentEngine(), reward_scale=2.0, **ON)
    (group,) = fake.finished
    args = make_args(reward_scale=2.0, **ON)
    row_ids, columns = GroupConverter.from_args(args, PluginRegistry()).encode(group, False)
    for row_id, given, mask in zip(row_ids, columns["turn_rewards"], columns["loss_mask"], strict=True):
        ends = np.flatnonzero((mask != 0) & (np.append(mask[1:], 0) == 0))  # the last sampled token of each turn
        expected = np.zeros(len(mask), dtype=np.float32)
        rewards = [2.0] if len(ends) == 1 else [0.25, 0.0]
        expected[ends] = 2 * np.asarray(rewards, dtype=np.float32)
        expected[ends[-1]] -= 2 * 2.25
        assert given.tolist() == expected.tolist(), row_id
    assert {len(np.flatnonzero(np.diff(np.append(0, mask)) == 1)) for mask in columns["loss_mask"]} == {1, 2}


async def test_a_run_without_the_option_refuses_them_and_says_so() -> None:
    with pytest.raises(RolloutError, match="add --turn-rewards to the run"):
        await roll(two_turns_and_a_branch, AgentEngine(), more_groups=2)


async def test_an_agent_that_gives_them_returns_the_samples_reward() -> None:
    async def forgets(args: Any, sample: Sample, session: Any) -> None:
        await session.chat(user("go"))
        session.reward(1.0)

    with pytest.raises(RolloutError, match="it gave rewards to answers and returned none"):
        await roll(forgets, AgentEngine(), more_groups=2, **ON)


@pytest.mark.parametrize("number", [float("nan"), "1", None, {"a": 1.0}])
async def test_what_is_no_number_is_a_failure(number: Any) -> None:
    async def wrong(args: Any, sample: Sample, session: Any) -> float:
        await session.chat(user("go"))
        session.reward(number)
        return 1.0

    with pytest.raises(RolloutError, match="reward"):
        await roll(wrong, AgentEngine(), more_groups=2, **ON)


def test_programs_tell_them_by_the_ids_of_completions() -> None:
    assert Finish.of({"reward": 1, "turn_rewards": {"chatcmpl-a": 0.5}}).turn_rewards == {"chatcmpl-a": 0.5}
    wrong_ones: list[Any] = [{"reward": 1, "turn_rewards": each} for each in ([1], {"a": "x"}, "a", {"a": 10**400})]
    for wrong in [*wrong_ones, {"turn_rewards": {"a": 1.0}}]:
        assert "turn_rewards" in Finish.of(wrong).fault


def batch_of_two_turns() -> TrainBatch:
    """A response of two turns with an observation between them; the first earns 1 of the reward of 3."""
    columns = {
        "reward": np.asarray([3.0], dtype=np.float32),
        "loss_mask": [np.asarray([1, 1, 0, 1, 1], dtype=np.float32)],
        "turn_rewards": [np.asarray([0, 1, 0, 0, -1], dtype=np.float32)],
        "values": [np.asarray([1, 1, 9, 1, 1], dtype=np.float32)],
        "response_length": np.asarray([5]),
    }
    row_ids = [RowId(GroupUid("data", 0, 0), 0, 0)]
    return TrainBatch(task="train_0", rollout_id=0, row_ids=row_ids, columns=columns)


def test_returns_by_hand() -> None:
    """Token rewards are 0, 1, 0, 2; half of the rest counts at each token."""
    args = compose(CORE_SECTIONS)(gamma=0.5, **ON)
    batch = batch_of_two_turns()
    reinforce_plus_plus(args, batch)
    assert batch.columns["returns"][0].tolist() == [0.75, 1.5, 0.0, 1.0, 2.0]
    whole = compose(CORE_SECTIONS)(**ON)
    reinforce_plus_plus(whole, batch)
    assert batch.columns["returns"][0].tolist() == [3.0, 3.0, 0.0, 2.0, 2.0]  # what was earned is behind it


def test_advantages_of_ppo_by_hand() -> None:
    args = compose(CORE_SECTIONS)(turn_rewards=True, advantage_estimator="gae", gamma=0.5, lambd=0.0)
    batch = batch_of_two_turns()
    gae(args, batch)
    # r + gamma V' - V: 0 + 0.5 - 1, 1 + 0.5 - 1, 0 + 0.5 - 1, 2 - 1
    assert batch.columns["advantages"][0].tolist() == [-0.5, 0.5, 0.0, -0.5, 1.0]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "remax", "gpg", "reinforce_plus_plus_baseline"])
def test_estimators_with_a_baseline_of_the_group_refuse_them_with_the_reason(estimator: str) -> None:
    args = compose(CORE_SECTIONS)(turn_rewards=True, advantage_estimator=estimator)
    with pytest.raises(ConfigError, match=r"reinforce_plus_plus, gae, ppo(.|\n)*how many turns a sample has is the"):
        AlgorithmOptions.check(args)


def test_an_estimator_waits_for_the_column_if_it_is_on() -> None:
    assert "turn_rewards" in estimator_needs(compose(CORE_SECTIONS)(**ON), reinforce_plus_plus)
    assert "turn_rewards" not in estimator_needs(compose(CORE_SECTIONS)(), reinforce_plus_plus)
