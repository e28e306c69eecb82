from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.errors import ConfigError, PluginError, RewardError
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Sample, Status
from rm_hub.compose import weighted


def brevity(args: Any, sample: Sample) -> float:
    return 1 / len(sample.response)


async def judge(args: Any, sample: Sample) -> float:
    await asyncio.sleep(0)
    return 0.25


def give(value: Any) -> Any:
    def given(args: Any, sample: Sample) -> Any:
        return value

    return given


SAMPLE = Sample(response="yes!", label="yes!", status=Status.COMPLETED)


def test_the_reward_is_the_weighted_sum_of_its_parts() -> None:
    combined = weighted(("rm_hub.exact_match:score", 0.5), (brevity, -2))
    assert combined(None, SAMPLE) == 0.5 * 1.0 - 2 * 0.25


def test_the_parts_are_told_apart_where_the_reward_key_is_total() -> None:
    combined = weighted(("rm_hub.exact_match:score", 0.5), (brevity, 2))
    assert combined(SimpleNamespace(reward_key="total"), SAMPLE) == {
        "total": 1.0,
        "rm_hub.exact_match:score": 1.0,
        "brevity": 0.25,
    }


def test_asynchronous_parts_are_awaited() -> None:
    combined = weighted((judge, 4), (brevity, 1))
    assert asyncio.run(combined(None, SAMPLE)) == 1.25


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1.0", [1.0], {"score": 1.0}])
def test_a_part_without_a_finite_number_is_named(value: Any) -> None:
    with pytest.raises(RewardError, match="part 'given'"):
        weighted((give(value), 1.0), (brevity, 1.0))(None, SAMPLE)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([], ConfigError, "nothing to compose"),
        ([(brevity, float("nan"))], ConfigError, "weight"),
        ([(brevity, "1")], ConfigError, "weight"),
        ([(brevity, 1.0), (brevity, 1.0)], ConfigError, "two rewards are called 'brevity'"),
        ([("rm_hub.exact_match:scroe", 1.0)], PluginError, "scroe"),
        ([("no_such_module:score", 1.0)], PluginError, "no_such_module"),
        ([("exact_match", 1.0)], PluginError, "module:function"),
        ([("rm_hub.numeric:MAX_DIGITS", 1.0)], PluginError, "cannot be called"),
    ],
)
def test_a_wrong_part_is_found_when_the_users_file_is_imported(parts: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        weighted(*parts)


def test_a_file_with_a_composed_reward_is_a_plugin_like_any_other(tmp_path: Any) -> None:
    path = tmp_path / "composed_reward.py"
    path.write_text(
        "from rm_hub.compose import weighted\n\n"
        "score = weighted(('rm_hub.exact_match:score', 0.75), ('rm_hub.f1:score', 0.25))\n"
    )
    registry = PluginRegistry()
    registry.locate("reward", f"{path}:score")
    assert registry.resolve("reward", f"{path}:score")(None, SAMPLE) == 1.0
