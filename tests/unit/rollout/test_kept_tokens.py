"""The tokens that truncated sampling kept: from the engine's answer to the columns of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from buffer_rl.errors import RolloutError
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import SampleGroup, Status, VersionSpan
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.generate import add_observation, generate, generate_turn, sampling_params_for

REPLAY = {"replay_kept_tokens": True, "rollout_top_p": 0.9}


def sets(*rows: Sequence[int]) -> list[bytes]:
    return [np.array(row, dtype=np.int32).tobytes() for row in rows]


def answering(kit: Any, tokens: list[int], kept: list[bytes] | None, finish_reason: str = "stop") -> Any:
    """An engine that gives ``tokens`` and what they were drawn from."""

    def respond(input_ids: list[int], params: dict[str, Any]) -> Any:
        given = kit.answer(tokens, finish_reason)
        given.kept = kept
        return given

    return kit.ScriptedEngine(respond)


def scored(kit: Any, *kept: list[bytes] | None) -> SampleGroup:
    group: SampleGroup = kit.make_group(0, labels=["x"] * len(kept))
    for sample, own in zip(group, kept, strict=True):
        sample.tokens, sample.response_length, sample.rollout_kept_tokens = [5, 6, 7], 2, own
        sample.reward, sample.status = float(sample.sample_index), Status.COMPLETED
    return group


def encode(kit: Any, group: SampleGroup, evaluation: bool = False, **options: Any) -> Any:
    return GroupConverter(kit.make_args(**options)).encode(group, evaluation)[1]


def test_the_columns_are_numbers_of_kept_tokens_and_their_ids_one_after_another(kit: Any) -> None:
    group = scored(kit, sets([6, 9], [7]), sets([], [3, 7, 8]))
    columns = encode(kit, group, **REPLAY)
    assert [row.tolist() for row in columns["kept_counts"]] == [[2, 1], [0, 3]]
    assert [row.tolist() for row in columns["kept_tokens"]] == [[6, 9, 7], [3, 7, 8]]
    assert {row.dtype for name in ("kept_counts", "kept_tokens") for row in columns[name]} == {np.dtype(np.int32)}
    assert not encode(kit, group).keys() & {"kept_counts", "kept_tokens"}
    assert not encode(kit, group, evaluation=True, **REPLAY).keys() & {"kept_counts", "kept_tokens"}


def test_they_are_beside_the_columns_of_the_users_conversion(kit: Any) -> None:
    args = kit.make_args(**REPLAY, custom_convert_samples_to_train_data_path=kit.user("last_token_only"))
    group = scored(kit, sets([6, 9], [7]))
    columns = GroupConverter.from_args(args, PluginRegistry()).encode(group, False)[1]
    assert [columns[name][0].tolist() for name in ("kept_counts", "kept_tokens")] == [[2, 1], [6, 9, 7]]
    assert columns["note"] == ["x"]


def test_a_sample_without_them_is_an_error_that_names_the_engine_and_a_removed_one_has_none(kit: Any) -> None:
    group = scored(kit, sets([6], [7]), None)
    with pytest.raises(RolloutError, match=r"of the engine 'other' at http://r(.|\n)*top_p_token_ids") as caught:
        encode(kit, group, **REPLAY, rollout_engine="other", router_url="http://r")
    assert str(group[1].row_id) in caught.value.where
    group[1].remove_sample = True
    assert [row.tolist() for row in encode(kit, group, **REPLAY)["kept_counts"]] == [[1, 1], [0, 0]]
    # given up before its first token
    group[1].tokens, group[1].response_length, group[1].rollout_kept_tokens = [5], 0, []
    assert [row.tolist() for row in encode(kit, group, **REPLAY)["kept_counts"]] == [[1, 1], [0]]
    group[0].rollout_kept_tokens = sets([6])
    with pytest.raises(RolloutError, match="rollout_kept_tokens has 1 entries"):
        encode(kit, group, **REPLAY)


async def test_a_continued_response_has_the_kept_tokens_of_both_parts_up_to_its_end(kit: Any) -> None:
    sample = kit.make_group(0)[0]
    async with kit.opened(answering(kit, [4, 5], sets([4], [5, 6]), "abort"), partial_rollout=True) as context:
        await generate(context.args, sample, sampling_params_for(context.args, False))
    assert sample.rollout_kept_tokens == sets([4], [5, 6])
    async with kit.opened(answering(kit, [7, 8], sets([7, 9], [8])), partial_rollout=True) as context:
        stop = context.tokenizer.decode([5, 7])
        await generate(context.args, sample, {**sampling_params_for(context.args, False), "stop": [stop]})
    assert sample.tokens[-sample.response_length :] == [4, 5, 7]  # the stop string begins in the first part
    assert sample.rollout_kept_tokens == sets([4], [5, 6], [7, 9])
    assert sample.weight_versions == [VersionSpan(3, 0, 2), VersionSpan(3, 2, 3)]


async def test_an_observation_was_not_sampled_and_has_no_kept_tokens(kit: Any) -> None:
    sample = kit.make_group(0)[0]
    async with kit.opened(answering(kit, [4, 5], sets([4], [5, 6]))) as context:
        for _ in range(2):
            await generate_turn(context.args, sample, sampling_params_for(context.args, False))
            add_observation(sample, "ab")
    turn = sets([4], [5, 6], [], [])
    assert sample.rollout_kept_tokens == turn * 2
    sample = kit.make_group(1)[0]
    async with kit.opened(answering(kit, [4, 5], None)) as context:
        await generate_turn(context.args, sample, sampling_params_for(context.args, False))
        add_observation(sample, "ab")
    assert sample.rollout_kept_tokens is None
