"""ReMax's baseline: one greedy response to each prompt, whose reward every row of the group gets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from buffer_rl.engines.client import EngineClient
from buffer_rl.errors import RolloutError
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import RowId, Sample
from buffer_rl.rollout.baseline import greedy_group
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl.testing.fake_engine import FakeEngine, Fault
from buffer_rl.testing.tiny import make_char_tokenizer

REMAX = {"advantage_estimator": "remax"}
DIGIT_0 = make_char_tokenizer().encode("0")[0]


def respond(kit: Any) -> Any:
    """A greedy response to ``prompt N`` has N + 3 tokens, any other has 1 or 2."""

    def answer(input_ids: list[int], params: dict[str, Any]) -> Any:
        seed, row = params["sampling_seed"], input_ids[-1] - DIGIT_0
        return kit.answer([7] * (row + 3) if params["temperature"] == 0 else [9] * (1 + seed % 3 % 2))

    return answer


async def roll(kit: Any, engine: Any, buffer: FakeBuffer, **options: Any) -> Any:
    """The metrics of a rollout that is rewarded with the number of response tokens."""
    if "custom_group_rm_path" not in options:
        options["custom_rm_path"] = kit.user("length_async")
    async with kit.opened(engine, **options) as context:
        output = await DefaultRollout(context.args)(context.args, 0, buffer)
    return output.metrics


def buffer_of(kit: Any, *labels: str, wanted: int | None = None) -> FakeBuffer:
    """Groups of two samples, one for each label."""
    groups = [kit.make_group(row, labels=[label] * 2) for row, label in enumerate(labels)]
    return FakeBuffer(groups, kit.make_ticket(len(labels) if wanted is None else wanted))


def columns_of(kit: Any, buffer: FakeBuffer, **options: Any) -> dict[RowId, tuple[float, float]]:
    """Baseline and raw reward of each row that is trained on."""
    converter = GroupConverter.from_args(kit.make_args(**options), PluginRegistry())
    found = {}
    for group in buffer.finished:
        row_ids, columns = converter.encode(group, False)
        assert columns["baseline_reward"].dtype == np.float32
        pairs = zip(columns["baseline_reward"].tolist(), columns["raw_reward"].tolist(), strict=True)
        found |= dict(zip(row_ids, pairs, strict=True))
    return found


async def test_every_row_gets_the_reward_of_its_prompts_greedy_response_which_is_no_row(kit: Any) -> None:
    buffer, engine = buffer_of(kit, "", ""), kit.ScriptedEngine(respond=respond(kit))
    metrics = await roll(kit, engine, buffer, **REMAX, rollout_temperature=0.8, rollout_top_p=0.9, rollout_stop=["!"])
    rows = columns_of(kit, buffer, **REMAX)
    assert {(row.uid.row, row.sample_index): baseline for row, (baseline, _) in rows.items()} == {
        (0, 0): 3.0,
        (0, 1): 3.0,
        (1, 0): 4.0,
        (1, 1): 4.0,
    }
    rewards = [reward for _, reward in rows.values()]
    assert set(rewards) == {1.0, 2.0}
    assert metrics["baseline_reward"] == 3.5
    assert metrics["raw_reward"] == metrics["response_len/mean"] == pytest.approx(np.mean(rewards))
    assert metrics["response_len/max"] == 2.0
    assert metrics["generated_tokens"] == sum(rewards) + 3 + 4  # the engine made those too
    greedy = [params for _, _, params in engine.calls if params["temperature"] == 0]
    assert len(greedy) == 2
    for params in greedy:
        assert (params["top_p"], params["top_k"], params["min_p"], params["stop"]) == (1.0, -1, 0.0, ["!"])
    assert len({rid for rid, _, _ in engine.calls}) == len({p["sampling_seed"] for _, _, p in engine.calls}) == 6


async def test_the_requests_and_tokens_of_the_samples_are_those_of_a_run_without_baseline(kit: Any) -> None:
    asked, tokens = [], []
    for options in REMAX, {}:
        buffer, engine = buffer_of(kit, "", ""), kit.ScriptedEngine(respond=respond(kit))
        await roll(kit, engine, buffer, **options)
        asked.append([call for call in engine.calls if call[2]["temperature"] > 0])
        tokens.append({sample.row_id: sample.tokens for group in buffer.finished for sample in group})
    assert sorted(asked[0], key=str) == sorted(asked[1], key=str)
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 4


async def test_the_greedy_response_is_generated_together_with_its_group(kit: Any) -> None:
    together = asyncio.Barrier(3)

    class Waits(kit.ScriptedEngine):  # type: ignore[misc, name-defined]
        async def agenerate(self, *request: Any, **more: Any) -> Any:
            await together.wait()
            return await super().agenerate(*request)

    buffer = buffer_of(kit, "")
    await roll(kit, Waits(), buffer, **REMAX, rollout_timeout_s=10.0)
    assert len(buffer.finished) == 1


async def test_a_dynamic_filter_sees_the_samples_alone_with_their_baseline(kit: Any) -> None:
    buffer, engine = buffer_of(kit, "", "", wanted=1), kit.ScriptedEngine(respond=respond(kit))
    path = kit.user("two_with_a_baseline")
    metrics = await roll(kit, engine, buffer, **REMAX, dynamic_sampling_filter_path=path)
    assert [uid.row for uid in buffer.finished_uids] == [1]
    assert [(group.uid.row, reason) for group, reason in buffer.rejected] == [(0, "low_baseline")]
    assert metrics["baseline_reward"] == 4.0


async def test_a_group_reward_scores_the_greedy_response_as_a_group_of_one(kit: Any) -> None:
    buffer = buffer_of(kit, "")
    options = {**REMAX, "custom_group_rm_path": kit.user("size_of_group")}
    await roll(kit, kit.ScriptedEngine(), buffer, **options)
    assert set(columns_of(kit, buffer, **options).values()) == {(1.0, 2.0)}


async def test_the_penalty_of_long_responses_is_in_the_baseline(kit: Any) -> None:
    buffer, engine = buffer_of(kit, "", ""), kit.ScriptedEngine(respond=respond(kit))
    options = {"rollout_max_response_len": 4, "overlong_buffer_len": 2, "overlong_penalty_factor": 2.0}
    await roll(kit, engine, buffer, **REMAX, **options)
    baselines = {row.uid.row: baseline for row, (baseline, _) in columns_of(kit, buffer, **REMAX).items()}
    assert baselines == {0: 3 - 1.0, 1: 4 - 2.0}  # 1 and 2 tokens over the 2 that are free of it


async def test_of_several_parts_of_a_greedy_response_the_baseline_is_the_mean(kit: Any) -> None:
    buffer = buffer_of(kit, "parts")
    path = kit.user("greedy_as_label_says")
    await roll(kit, None, buffer, **REMAX, custom_generate_function_path=path)
    assert set(columns_of(kit, buffer, **REMAX).values()) == {(1.5, 1.0)}
    assert all(sample.train_metadata["mine"] == 7 for sample in buffer.finished[0])


@pytest.mark.parametrize("status", ["aborted", "failed"])
async def test_a_group_whose_greedy_response_was_given_up_is_dropped_with_the_reason(kit: Any, status: str) -> None:
    buffer = buffer_of(kit, status, "", wanted=1)
    path = kit.user("greedy_as_label_says")
    metrics = await roll(kit, None, buffer, **REMAX, custom_generate_function_path=path)
    assert [uid.row for uid in buffer.finished_uids] == [1]
    assert [(group.uid.row, reason) for group, reason in buffer.rejected] == [(0, f"baseline_{status}")]
    assert metrics[f"drop_baseline_{status}"] == 1.0


async def test_a_group_whose_greedy_response_is_not_judged_is_dropped_with_the_reason(kit: Any) -> None:
    buffer = buffer_of(kit, "greedy_abstains", "", wanted=1)
    await roll(kit, kit.ScriptedEngine(), buffer, **REMAX)
    assert [(group.uid.row, reason) for group, reason in buffer.rejected] == [(0, "baseline_abstained")]


async def test_a_greedy_response_without_a_reward_puts_its_group_into_quarantine(kit: Any) -> None:
    buffer = buffer_of(kit, "greedy_raises", "", wanted=1)
    await roll(kit, kit.ScriptedEngine(), buffer, **REMAX)
    assert [uid.row for uid in buffer.finished_uids] == [1]
    assert [(group.uid.row, reason) for group, reason in buffer.quarantined] == [(0, "reward_failed:exception")]


@pytest.mark.parametrize(("fault", "tries"), [(Fault.SERVER_ERROR, 2), (Fault.ABORT, 1)])
async def test_what_an_engine_does_to_a_greedy_request_its_group_meets(kit: Any, fault: Fault, tries: int) -> None:
    """A failed request is repeated with its group; one that the engine aborts costs the group."""
    buffer = buffer_of(kit, "", "", wanted=1)
    struck: list[str] = []

    def strikes(body: dict[str, Any], number: int) -> Fault | None:
        if body["sampling_params"]["temperature"] > 0 or struck:
            return None
        struck.append(body["rid"])
        return fault

    with FakeEngine(fault=strikes) as engine:
        client = EngineClient(engine.url, [engine.url], timeout_s=10.0, max_retries=0)
        metrics = await roll(kit, client, buffer, **REMAX)
        await client.aclose()
    assert [uid.row for uid in buffer.leased].count(0) == tries
    if fault is Fault.ABORT:
        assert [(group.uid.row, reason) for group, reason in buffer.rejected] == [(0, "baseline_aborted")]
    else:
        assert [uid.row for uid in buffer.finished_uids] == [0]
        assert metrics["infra_failures"] == 1.0


async def test_a_greedy_response_of_other_weights_than_the_steps_is_generated_again(kit: Any) -> None:
    versions = [1, 0]  # the engine is a version ahead, then at the ticket's

    def answer(input_ids: list[int], params: dict[str, Any]) -> Any:
        return kit.answer([7], version=versions.pop(0) if params["temperature"] == 0 else 0)

    ticket = replace(kit.make_ticket(1), max_staleness=0)
    buffer = FakeBuffer([kit.make_group(0)], ticket)
    metrics = await roll(kit, kit.ScriptedEngine(respond=answer), buffer, **REMAX)
    assert versions == []
    assert metrics["infra_failures"] == 1.0
    assert [uid.row for uid in buffer.leased] == [0, 0]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, 2),
        (REMAX, 3),
        ({**REMAX, "loss_type": "sft_loss"}, 2),
        ({"custom_advantage_function_path": "minus_baseline"}, 3),
        ({**REMAX, "custom_convert_samples_to_train_data_path": "last_token_with_baseline"}, 2),
    ],
)
async def test_a_greedy_response_is_asked_for_where_the_estimator_needs_it_and_no_converter_gives_it(
    kit: Any, options: dict[str, Any], asked: int
) -> None:
    options = {name: kit.user(value) if name.endswith("_path") else value for name, value in options.items()}
    buffer, engine = buffer_of(kit, ""), kit.ScriptedEngine()
    metrics = await roll(kit, engine, buffer, **options)
    assert len(engine.calls) == asked
    assert ("baseline_reward" in metrics) == (asked == 3)
    _, columns = GroupConverter.from_args(kit.make_args(**options), PluginRegistry()).encode(buffer.finished[0], False)
    assert ("baseline_reward" in columns) == (asked == 3 or "custom_convert_samples_to_train_data_path" in options)


@pytest.mark.parametrize("given", [None, {}, {"baseline_reward": None}, {"baseline_reward": float("nan")}])
def test_a_rollout_function_that_gives_no_baseline_is_told_where_to_set_it(kit: Any, given: Any) -> None:
    group = kit.make_group(0)
    for sample in group:
        sample.tokens, sample.response_length, sample.reward, sample.status = [5, 6], 1, 1.0, "completed"
        sample.train_metadata = {"baseline_reward": 0.25}
    converter = GroupConverter.from_args(kit.make_args(**REMAX), PluginRegistry())
    assert converter.encode(group, False)[1]["baseline_reward"].tolist() == [0.25, 0.25]
    group[1].train_metadata = given
    with pytest.raises(RolloutError, match=r'train_metadata\["baseline_reward"\]') as caught:
        converter.encode(group, False)
    assert caught.value.where == f"row {group[1].row_id}"
    assert "sets it on every sample" in caught.value.hint
    assert "baseline_reward" not in converter.encode(group, True)[1]  # an evaluation has none


def test_the_greedy_sample_shares_nothing_that_changes_with_its_group(kit: Any) -> None:
    group = kit.make_group(0)
    first = group[0]
    first.prompt, first.metadata, first.index = [{"role": "user", "content": "hello"}], {"tools": []}, 5
    first.multimodal_inputs = {"images": ["a"]}
    own: Sample = greedy_group(group)[0]
    assert (own.uid, own.sample_index, own.index, own.label) == (group.uid, 2, None, first.label)
    assert (own.prompt, own.metadata) == (first.prompt, first.metadata)
    own.prompt[0]["content"] = "changed"  # type: ignore[index]
    own.metadata["tools"].append("changed")
    own.multimodal_inputs["more"] = 1  # type: ignore[index]
    assert (first.prompt[0]["content"], first.metadata) == ("hello", {"tools": []})  # type: ignore[index]
    assert first.multimodal_inputs == {"images": ["a"]}
