"""Rewards that rows weigh: what is summed, what abstains, what fails, and what is counted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.data.reader import read_dataset
from buffer_rl.errors import DataError
from buffer_rl.kinds.reward import reward_weights, weighted_reward
from buffer_rl.records.groups import Status
from buffer_rl.rollout.evaluate import eval_metrics
from buffer_rl.rollout.failures import FailureKind
from buffer_rl.rollout.stats import RolloutStats, rewards_of

TWO_PLUGINS = """
from buffer_rl.kinds.marks import rows_may_choose
from buffer_rl.kinds.reward import Abstain
from buffer_rl.plugin.hookspecs import hookimpl


@rows_may_choose
def of_label(args, sample):  # text abstains, a number is the reward
    if sample.label == "raise":
        raise KeyError("broken")
    if sample.label == "abstain":
        raise Abstain("cannot tell")
    return None if isinstance(sample.label, str) else sample.label


@rows_may_choose
def notes(args, sample):  # under names that choose rewards
    sample.metadata |= {"rewards": {"other": 1.0}, "rm_type": "other", "seen": True}
    return 1.0


@rows_may_choose
async def length(args, sample):
    return {"length": float(len(sample.response)), "other": 100.0}


@hookimpl
def buffer_rl_provide(kind):
    return {"of_label": of_label, "length": length, "notes": notes} if kind == "reward" else {}
"""


@pytest.mark.parametrize(
    ("metadata", "weights"),
    [
        ({}, {}),
        ({"rm_type": ""}, {}),
        ({"rm_type": "math"}, {"math": 1.0}),
        ({"rewards": {"math": 1, "format": 0.2, "shown": 0}}, {"math": 1.0, "format": 0.2, "shown": 0.0}),
        ({"rewards": {"math": -0.5}}, {"math": -0.5}),
    ],
)
def test_metadata_choose_one_reward_or_several_with_weights(metadata: Any, weights: Any) -> None:
    assert reward_weights(metadata) == weights


@pytest.mark.parametrize(
    "rewards",
    [{}, [], "math", 1.0, {"math": "1"}, {"math": True}, {"math": None}, {"math": math.inf}, {1: 1.0}, {"math": 0}],
)
def test_another_form_is_refused(rewards: Any) -> None:
    with pytest.raises(DataError, match="the metadata have rewards"):
        reward_weights({"rewards": rewards})


def test_one_name_and_several_together_are_refused() -> None:
    with pytest.raises(DataError, match="rm_type 'math' and rewards"):
        reward_weights({"rewards": {"math": 1}, "rm_type": "math"})


@pytest.mark.parametrize(
    ("weights", "rewards", "total"),
    [
        ({"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 1.0}, 1.5),
        ({"a": 1.0, "b": 0.5}, {"a": 1.0, "b": None}, 1.5),  # as if b were as good as a
        ({"a": 1.0, "b": 0.5}, {"a": None, "b": 0.2}, 0.3),
        ({"a": 1.0, "b": -0.5}, {"a": None, "b": 1.0}, -1.5),
        ({"a": 1.0, "b": 0.0}, {"a": 0.25, "b": None}, 0.25),
        ({"a": 1.0, "b": 0.0}, {"a": None, "b": 1.0}, None),
        ({"a": 1.0, "b": 0.5}, {"a": None, "b": None}, None),
    ],
)
def test_what_abstains_is_no_zero(weights: Any, rewards: Any, total: float | None) -> None:
    found = weighted_reward(weights, rewards)
    assert found is None if total is None else found == pytest.approx(total)


def chosen(kit: Any, labels: list[Any], **metadata: Any) -> Any:
    group = kit.make_group(0, labels=labels)
    for sample in group:
        sample.metadata |= metadata
        sample.response, sample.status = "four", Status.COMPLETED
    return group


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "two_rewards.py").write_text(TWO_PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    return {"plugin": ["two_rewards"], "row_rm_types": ["of_label", "length", "notes"], "reward_key": "length"}


async def test_several_rewards_of_a_row_are_summed_and_counted_by_name_and_data_set(
    kit: Any, options: dict[str, Any]
) -> None:
    weights = {"of_label": 1.0, "length": 0.5}
    group = chosen(kit, [0.5, "abstain", "none"], rewards=weights)
    async with kit.opened(**options) as context:
        assert await context.scorer.score(group.samples) == []
    assert [sample.rewards_by_name for sample in group] == [
        {"of_label": 0.5, "length": 4.0},
        {"of_label": None, "length": 4.0},
        {"of_label": None, "length": 4.0},
    ]
    assert rewards_of(context.args, group) == [2.5, 6.0, 6.0]  # 0.5 * 4 * 1.5 / 0.5
    stats = RolloutStats()
    group.data_set = "sums"
    stats.count_kept(group, rewards_of(context.args, group))
    metrics = stats.metrics_of_kept()
    assert {name: value for name, value in metrics.items() if name.startswith("reward/")} == {
        "reward/of_label": 0.5, "reward/of_label/sums": 0.5, "reward/length": 4.0, "reward/length/sums": 4.0,
    }  # fmt: skip
    assert metrics["abstained"] == 2
    assert eval_metrics(context.args, [group])["eval/sums/of_label"] == 0.5


def test_a_sample_of_several_rows_counts_once_in_the_rewards_by_name(kit: Any) -> None:
    """Rows of 0, 0 and 3 are a sample of 1, another one has 3: 2 on average, and not 1.5."""
    group = kit.make_group(0, labels=["1"] * 5)
    for sample, place, reward in zip(group, [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)], [0, 0, 3, 3, None], strict=True):
        (sample.sample_index, sample.part), sample.rewards_by_name = place, {"length": reward}
        sample.reward = 0.0
    stats = RolloutStats()
    stats.count_kept(group, [0.0] * 5)
    assert (stats.metrics_of_kept()["reward/length"], stats.metrics_of_kept()["abstained"]) == (2.0, 1.0)


def test_each_number_of_a_reward_that_is_a_mapping_is_a_metric_of_training_too(kit: Any) -> None:
    """Of a sample of two rows the mean counts; a text is no number, and 7, a name that is no text, is a name."""
    group = kit.make_group(0, labels=["1"] * 3)
    rewards = ({"right": 1.0, "form": 0.5, "why": "a", 7: 2}, {"right": 0.0, "form": 0.25}, {"right": True, "no": None})
    for sample, place, reward in zip(group, [(0, 0), (0, 1), (1, 0)], rewards, strict=True):
        (sample.sample_index, sample.part), sample.reward = place, reward
    stats = RolloutStats()
    stats.count_kept(group, [1.0, 0.0, 1.0])
    metrics = stats.metrics_of_kept()
    assert {name: value for name, value in metrics.items() if name.startswith("reward/")} == {
        "reward/right": 0.75, "reward/form": 0.375, "reward/7": 2.0,
    }  # fmt: skip
    assert "abstained" not in metrics


async def test_a_sample_that_nothing_judges_is_masked_and_its_siblings_stay(kit: Any, options: dict[str, Any]) -> None:
    for metadata in ({"rewards": {"of_label": 1.0, "length": 0.0}}, {"rm_type": "of_label"}):
        group = chosen(kit, ["abstain", 1.0], **metadata)
        async with kit.opened(**options) as context:
            assert await context.scorer.score(group.samples) == []
        assert [sample.remove_sample for sample in group] == [True, False]
        stats = RolloutStats()
        stats.count_kept(group, rewards_of(context.args, group))
        assert stats.metrics_of_kept()["abstained"] == 1
        assert rewards_of(context.args, group) == [None, 1.0]


@pytest.mark.parametrize("metadata", [{"rewards": {"notes": 1.0, "length": 0.0}}, {"rm_type": "notes"}])
async def test_what_a_reward_notes_does_not_choose_rewards(kit: Any, options: dict[str, Any], metadata: Any) -> None:
    group = chosen(kit, ["1"], **metadata)
    async with kit.opened(**options) as context:
        assert await context.scorer.score(group.samples) == []
        assert group[0].metadata == {**metadata, "seen": True}
        again = group.as_prompts()
        again[0].response, again[0].status = "four", Status.COMPLETED
        assert await context.scorer.score(again.samples) == []
    assert rewards_of(context.args, group) == [1.0]


async def test_a_reward_that_fails_is_named_and_is_no_number(kit: Any, options: dict[str, Any]) -> None:
    group = chosen(kit, ["raise", 1.0], rewards={"length": 1.0, "of_label": 1.0})
    async with kit.opened(**options) as context:
        (failure,) = await context.scorer.score(group.samples)
    assert failure.reward is FailureKind.EXCEPTION
    assert "'of_label'" in failure.error.where
    assert rewards_of(context.args, group) == [None, 5.0]
    assert group[0].status is Status.FAILED


async def test_a_reward_without_a_number_fails_if_the_row_chose_it_alone(kit: Any, options: dict[str, Any]) -> None:
    group = chosen(kit, ["text"], rm_type="of_label")
    async with kit.opened(**options) as context:
        (failure,) = await context.scorer.score(group.samples)
    assert failure.reward is FailureKind.INVALID


async def test_rows_weigh_only_what_the_run_lists(kit: Any) -> None:
    group = chosen(kit, ["1"], rewards={"exact_match": 1.0, "numeric": 1.0})
    async with kit.opened(rm_type="exact_match", row_rm_types=["f1"]) as context:
        with pytest.raises(DataError, match="'numeric', which this run does not let rows choose"):
            await context.scorer.score(group.samples)


def test_the_names_and_the_first_bad_row_are_found_when_data_are_read(tmp_path: Path) -> None:
    rows = [{"rewards": {"math": 1, "f1": 0.5}}, {"rm_type": "gpqa"}, {}, {"rewards": {"f1": "x"}}, {"rewards": [1]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "metadata": metadata}) + "\n" for metadata in rows))
    facts = read_dataset(str(path)).facts
    assert facts.rewards == {"math": 0, "f1": 0, "gpqa": 1}
    assert facts.bad_rewards is not None
    assert facts.bad_rewards[0] == 3
