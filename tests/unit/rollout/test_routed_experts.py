"""The experts of each token: from the engine's answers to a sample, its rows and columns. Of request r, token t has the
expert 10 r + t, so that each number says where it comes from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from buffer_rl.errors import ConfigError, RolloutError
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.experts import ExpertSizes
from buffer_rl.records.groups import SampleGroup, Status, VersionSpan
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.generate import add_observation, generate, generate_turn, sampling_params_for
from buffer_rl.testing.tiny import make_tiny_model

SIZES = ExpertSizes(num_experts=200, top_k=1, layers=(0,), num_layers=1)


def numbered(request: int, start: int, end: int) -> np.ndarray:
    return np.arange(10 * request + start, 10 * request + end, dtype=np.uint8).reshape(-1, 1, 1)


class Engine:
    """Answers with ``outputs``, one after another, and the experts of its tokens from where it was asked to; with
    ``drops`` from the first, as behind a router that drops what is asked."""

    def __init__(self, kit: Any, *outputs: tuple[list[int], str], drops: bool = False) -> None:
        self.starts: list[int] = []
        self._kit, self._outputs, self._drops = kit, list(outputs), drops

    async def agenerate(self, rid: str, input_ids: list[int], params: Any, **more: Any) -> Any:
        tokens, reason = self._outputs[len(self.starts)]
        self.starts.append(more.get("experts_start", 0))
        start = 0 if self._drops else self.starts[-1]
        answer = self._kit.answer(tokens, reason)
        answer.experts = numbered(len(self.starts), start, max(len(input_ids) + len(tokens) - 1, start))
        answer.experts_start = start
        return answer


def found(sample: Any) -> list[int]:
    return sample.rollout_routed_experts.reshape(-1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("drops", [False, True])
async def test_a_continued_response_keeps_the_experts_of_the_request_that_sampled_its_tokens(
    drops: bool, kit: Any
) -> None:
    sample = kit.make_group(0)[0]
    engine = Engine(kit, ([4, 5], "abort"), ([], "abort"), ([7, 8], "stop"), drops=drops)
    for _ in range(3):
        async with kit.opened(engine, partial_rollout=True) as context:
            stop = context.tokenizer.decode([5, 7])
            await generate(context.args, sample, {**sampling_params_for(context.args, False), "stop": [stop]})
    assert len(sample.tokens) - sample.response_length == 8  # "prompt 0"
    assert sample.tokens[8:] == [4, 5, 7]  # the stop string ends in the second part
    # Token 9 was sampled by request 1, and ran through the model in request 3, which sampled the token behind it.
    assert engine.starts == [0, 9, 9]
    assert found(sample) == [*range(10, 19), 39]


async def test_an_observation_has_the_experts_of_the_turn_behind_it_and_behind_the_last_one_none(kit: Any) -> None:
    sample = kit.make_group(0)[0]
    engine = Engine(kit, ([4, 5], "stop"), ([6], "stop"))
    async with kit.opened(engine) as context:
        for _ in range(2):
            await generate_turn(context.args, sample, sampling_params_for(context.args, False))
            add_observation(sample, "ab")
    assert engine.starts == [0, 9]
    assert found(sample) == [*range(10, 19), *range(29, 32)]  # of 8 + 2 + 2 + 1 tokens and two of an observation
    sample.reward = 1.0
    group = SampleGroup(uid=sample.uid, samples=[sample])
    (column,) = GroupConverter(kit.make_args(), experts=SIZES).encode(group, False)[1]["routed_experts"]
    assert column.reshape(-1).tolist() == found(sample)


async def test_an_evaluation_and_a_response_that_is_generated_again_keep_none_of_before(kit: Any) -> None:
    sample = kit.make_group(0)[0]
    engine = Engine(kit, ([4, 5], "abort"), ([7], "stop"), ([7], "stop"))
    for _ in range(2):
        async with kit.opened(engine) as context:  # without --partial-rollout
            await generate(context.args, sample, sampling_params_for(context.args, False))
    assert engine.starts == [0, 0]
    assert found(sample) == [*range(20, 28)]
    async with kit.opened(engine) as context:
        lease = kit.make_lease(context, kit.make_group(1), kit.make_ticket(1, evaluation=True))
        judged = kit.make_group(1)[0]
        await generate(context.args, judged, sampling_params_for(context.args, True), lease)
    assert judged.rollout_routed_experts is None


async def test_tokens_before_a_publication_that_retracts_have_recomputed_experts(kit: Any) -> None:
    sample = kit.make_group(0)[0]
    engine = Engine(kit, ([4, 5, 6, 7], "stop"))
    ask = engine.agenerate

    async def across_versions(*arguments: Any, **more: Any) -> Any:
        answer = await ask(*arguments, **more)
        answer.spans = [VersionSpan(3, 0, 1), VersionSpan(4, 1, 3), VersionSpan(5, 3, 4)]
        return answer

    engine.agenerate = across_versions  # type: ignore[method-assign]
    async with kit.opened(engine) as context:
        await generate(context.args, sample, sampling_params_for(context.args, False))
    assert sample.experts_recomputed == 3
    sample.reward = 1.0
    group = SampleGroup(uid=sample.uid, samples=[sample])
    columns = GroupConverter(kit.make_args(), experts=SIZES).encode(group, False)[1]
    assert columns["experts_recomputed"].tolist() == [3]
    assert columns["experts_recomputed"].dtype == np.int32


def scored(kit: Any, *experts: Any) -> SampleGroup:
    group: SampleGroup = kit.make_group(0, labels=["x"] * len(experts))
    for sample, own in zip(group, experts, strict=True):
        sample.tokens, sample.response_length, sample.rollout_routed_experts = [5, 6, 7], 2, own
        sample.reward, sample.status = float(sample.sample_index), Status.COMPLETED
    return group


def encode(
    kit: Any, group: SampleGroup, evaluation: bool = False, sizes: ExpertSizes | None = SIZES, **args: Any
) -> Any:
    return GroupConverter(kit.make_args(**args), experts=sizes).encode(group, evaluation)[1]


def test_the_column_is_of_training_groups_alone_and_beside_the_users_conversion(kit: Any, tmp_path: Any) -> None:
    group = scored(kit, numbered(1, 0, 2).astype(np.int64), numbered(2, 0, 2).tolist())
    columns = encode(kit, group)
    assert [row.reshape(-1).tolist() for row in columns["routed_experts"]] == [[10, 11], [20, 21]]
    assert {row.dtype for row in columns["routed_experts"]} == {np.dtype(np.uint8)}
    for others in (encode(kit, group, sizes=None), encode(kit, group, evaluation=True)):
        assert not others.keys() & {"routed_experts", "experts_recomputed"}
    model = make_tiny_model(tmp_path, "qwen3_moe", num_hidden_layers=1, num_experts=30, num_experts_per_tok=1)
    own = {"custom_convert_samples_to_train_data_path": kit.user("last_token_only"), "hf_checkpoint": model}
    converter = GroupConverter.from_args(kit.make_args(**own, replay_routed_experts=True), PluginRegistry())
    columns = converter.encode(group, False)[1]
    assert [row.reshape(-1).tolist() for row in columns["routed_experts"]] == [[10, 11], [20, 21]]
    assert columns["note"] == ["x", "x"]


def test_a_dense_model_has_no_experts_to_replay(kit: Any, tmp_path: Any) -> None:
    args = kit.make_args(hf_checkpoint=make_tiny_model(tmp_path), replay_routed_experts=True)
    with pytest.raises(ConfigError, match="no mixture of experts"):
        GroupConverter.from_args(args, PluginRegistry())


def test_a_sample_without_them_is_an_error_that_names_the_engine_and_removed_and_foreign_ones_have_none(
    kit: Any,
) -> None:
    group = scored(kit, numbered(1, 0, 2), None)
    with pytest.raises(
        RolloutError, match=r"of the engine 'other' at http://r(.|\n)*--return-routed-experts"
    ) as caught:
        encode(kit, group, rollout_engine="other", router_url="http://r")
    assert str(group[1].row_id) in caught.value.where
    group[1].remove_sample = True
    assert [row.shape for row in encode(kit, group)["routed_experts"]] == [(2, 1, 1), (0, 1, 1)]
    group[1].tokens, group[1].response_length = [5], 0  # given up before its first token
    assert [row.shape for row in encode(kit, group)["routed_experts"]] == [(2, 1, 1), (0, 1, 1)]
    group = scored(kit, None)
    group.foreign = True
    assert [row.shape for row in encode(kit, group)["routed_experts"]] == [(0, 1, 1)]


@pytest.mark.parametrize(
    "wrong",
    [
        numbered(1, 0, 1),  # the last trained token was computed with no known experts
        numbered(1, 0, 3),
        numbered(1, 0, 2)[:, 0],
        np.zeros((2, 2, 1), dtype=np.uint8),
        np.zeros((2, 1, 1)),
        np.full((2, 1, 1), 200),
        np.full((2, 1, 1), -1),
        "experts",
        7,
    ],
    ids=str,
)
def test_what_is_no_array_of_experts_of_its_tokens_is_refused(wrong: Any, kit: Any) -> None:
    with pytest.raises(RolloutError, match="routed_experts"):
        encode(kit, scored(kit, wrong))


def test_one_expert_twice_is_no_choice(kit: Any) -> None:
    twice = np.array([[[3, 4]], [[5, 5]]], dtype=np.uint8)
    sizes = ExpertSizes(num_experts=8, top_k=2, layers=(0,), num_layers=1)
    with pytest.raises(RolloutError, match=r"holds something else(.|\n)*2 different numbers"):
        encode(kit, scored(kit, twice), sizes=sizes)


def test_tokens_that_are_not_trained_need_none_behind_them(kit: Any) -> None:
    group = scored(kit, numbered(1, 0, 1))
    group[0].loss_mask = [1, 0]
    assert [len(row) for row in encode(kit, group)["routed_experts"]] == [1]
    group[0].loss_mask = [0, 0]
    group[0].rollout_routed_experts = numbered(1, 0, 0)
    assert [len(row) for row in encode(kit, group)["routed_experts"]] == [0]
