from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from buffer_rl.errors import DataError, RolloutError
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.evaluate import pass_rates
from buffer_rl.testing.fake_buffer import FakeBuffer


async def evaluate(kit: Any, groups: list[Any], engine: Any = None, **options: Any) -> tuple[FakeBuffer, Any]:
    buffer = FakeBuffer(groups, kit.make_ticket(len(groups), rollout_id=5, evaluation=True))
    engine = engine or kit.ScriptedEngine(respond=lambda ids, params: kit.answer([3, 4]))
    async with kit.opened(engine, **options) as context:
        output = await DefaultRollout(context.args)(context.args, 5, buffer, evaluation=True)
    return buffer, output


async def test_metrics_are_means_over_samples_by_data_set(kit: Any) -> None:
    groups = [
        kit.make_group(0, labels=["1", "0"], data_set="easy"),
        kit.make_group(1, labels=["1", "1"], data_set="easy"),
        kit.make_group(2, labels=["0.25"], data_set="hard"),
    ]
    buffer, output = await evaluate(kit, groups, custom_rm_path=kit.user("told_by_label"))
    assert len(buffer.finished) == 3
    assert output.metrics == {
        "eval/easy": 0.75,
        "eval/easy/response_len": 2.0,
        "eval/easy/truncated": 0.0,
        "eval/easy/pass_at_2": 1.0,
        "eval/hard": 0.25,
        "eval/hard/response_len": 2.0,
        "eval/hard/truncated": 0.0,
    }


def test_pass_at_k_is_the_share_of_prompts_with_a_right_sample_among_k() -> None:
    # Of 4 samples 1 is right: without it are 3 of 6 pairs, and no four. Of 4 wrong ones no k is right.
    assert pass_rates([[1.0, 0.0, 0.0, 0.0], [0.0] * 4]) == {2: (0.5 + 0) / 2, 4: (1 + 0) / 2}
    assert pass_rates([[1.0, 0.0, 0.0], [0.0] * 4]) == {2: pytest.approx((1 - 1 / 3) / 2)}
    assert pass_rates([[1.0], [0.0]]) == pass_rates([]) == pass_rates([[0.5, 1.0]]) == {}


def test_pass_at_k_is_what_drawing_k_samples_gives() -> None:
    numbers = random.Random(0)
    prompts = [[float(numbers.random() < share) for _ in range(8)] for share in (0.05, 0.3, 0.9)]
    for k, found in pass_rates(prompts).items():
        drawn = [max(subset) for prompt in prompts for subset in itertools.combinations(prompt, k)]
        assert found == pytest.approx(sum(drawn) / len(drawn))
    assert list(pass_rates(prompts)) == [2, 4, 8]


async def test_a_sample_of_many_parts_counts_as_one(kit: Any) -> None:
    groups = [kit.make_group(0, labels=["1", "0 0 0 0"], data_set="d")]
    _, output = await evaluate(kit, groups, custom_generate_function_path=kit.user("parts_by_label"))
    expected = {"eval/d": 0.5, "eval/d/response_len": 1.75, "eval/d/truncated": 0.5, "eval/d/pass_at_2": 1.0}
    assert output.metrics == expected


async def test_evaluation_uses_its_own_parameters_no_filter_and_its_own_request_ids(kit: Any) -> None:
    engine = kit.ScriptedEngine()
    options = {"dynamic_sampling_filter_path": kit.user("drop_all"), "eval_temperature": 0.0}
    groups = [kit.make_group(row, data_set="d") for row in range(3)]
    buffer, _ = await evaluate(kit, groups, engine, custom_rm_path=kit.user("slow_async"), **options)
    assert len(buffer.finished) == 3
    assert {params["temperature"] for _, _, params in engine.calls} == {0.0}
    assert all(rid.startswith("eval_5:") for rid, _, _ in engine.calls)
    assert len({rid for rid, _, _ in engine.calls}) == 6


async def test_what_a_set_says_about_sampling_is_stronger_than_the_options(kit: Any) -> None:
    engine = kit.ScriptedEngine()
    groups = [kit.make_group(row, data_set="d") for row in range(2)]
    groups[1].sampling_params = {"temperature": 0.25, "max_new_tokens": 7}
    await evaluate(kit, groups, engine, custom_rm_path=kit.user("slow_async"), eval_temperature=0.0)
    used = {rid.split(":")[2]: (params["temperature"], params["max_new_tokens"]) for rid, _, params in engine.calls}
    assert used == {"0": (0.0, 1024), "1": (0.25, 7)}


@pytest.mark.slow
async def test_the_reward_that_a_sets_configuration_names_scores_it_and_rows_name_none(kit: Any) -> None:
    group = kit.make_group(0, labels=["by engine"], data_set="d")
    group[0].metadata["rm_type"] = "reasoning_gym"
    group[0].metadata["source_dataset"] = "chain_sum"
    for of_set in ("reasoning_gym", ""):
        leased = replace(group.as_prompts(), rm_type=of_set)
        if of_set:
            _, output = await evaluate(kit, [leased], rm_type="exact_match")
            assert output.metrics["eval/d"] == 0.0
        else:
            with pytest.raises(DataError, match="--row-rm-types reasoning_gym"):
                await evaluate(kit, [leased], rm_type="exact_match")


@pytest.mark.parametrize("label", ["nan", "raise", "none"])
async def test_a_failed_reward_ends_the_evaluation_by_name(kit: Any, label: str) -> None:
    groups = [kit.make_group(0, labels=["1"]), kit.make_group(1, labels=[label])]
    with pytest.raises(RolloutError, match="could not be scored") as caught:
        await evaluate(kit, groups, custom_rm_path=kit.user("told_by_label"))
    assert "row source:1:0/0.0" in str(caught.value)


async def test_a_prompt_that_failed_in_an_earlier_evaluation_is_tried_again_in_this_one(kit: Any) -> None:
    group = kit.make_group(0, labels=["1"], epoch=77)
    buffer = FakeBuffer([group], kit.make_ticket(1, rollout_id=5, evaluation=True))
    buffer.count_failure(group, "data")  # counted over the run, and the uids of all evaluations are equal
    async with kit.opened(kit.ScriptedEngine(), custom_rm_path=kit.user("fails_at_first")) as context:
        await DefaultRollout(context.args)(context.args, 5, buffer, evaluation=True)
    assert buffer.finished_uids == [group.uid]
    assert buffer.failures["data", group.uid] == 2


async def test_an_aborted_sample_ends_the_evaluation(kit: Any) -> None:
    engine = kit.ScriptedEngine(respond=lambda ids, params: kit.answer([], finish_reason="abort"))
    with pytest.raises(RolloutError, match="aborted"):
        await evaluate(kit, [kit.make_group(0)], engine, custom_rm_path=kit.user("slow_async"))
