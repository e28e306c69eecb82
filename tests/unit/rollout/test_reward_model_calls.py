"""Samples as the reward model sees them, which of its processes is asked, and what it cannot score."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from buffer_rl.records.groups import SampleGroup, Status
from buffer_rl.rollout.failures import FailureKind
from buffer_rl.rollout.reward_model_client import RewardRows
from buffer_rl.testing.tiny import DEFAULT_CHARACTERS, make_char_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}"


def make_group(kit: Any, *responses: str, row: int = 0) -> SampleGroup:
    """Completed samples with these responses, in tokens of the character tokenizer."""
    group: SampleGroup = kit.make_group(row, labels=["7"] * len(responses))
    for sample, response in zip(group, responses, strict=True):
        sample.tokens = make_char_tokenizer().encode(f"{sample.prompt}{response}")
        sample.response, sample.response_length = response, len(response)
        sample.status = Status.COMPLETED
    return group


def by_transformers(folder: str, text: str) -> float:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0, 0])


async def test_each_sample_has_the_score_of_its_prompt_and_response(kit: Any, tmp_path: Path) -> None:
    folder = kit.make_reward_model(tmp_path)
    group = make_group(kit, "7", "a longer one", "")
    async with kit.opened(reward_model=[kit.LocalRewardModel(folder)], rm_model=folder) as context:
        assert await context.scorer.score(group.samples) == []
    expected = [by_transformers(folder, f"prompt 0{text}") for text in ("7", "a longer one", "")]
    assert [sample.reward for sample in group] == pytest.approx(expected, abs=1e-6)
    assert len(set(expected)) == 3


async def test_an_evaluation_set_may_choose_a_reward_of_its_own(kit: Any, tmp_path: Path) -> None:
    folder = kit.make_reward_model(tmp_path)
    group = make_group(kit, "7", "8")
    for sample in group:
        sample.metadata["rm_type"] = "exact_match"
    async with kit.opened(reward_model=[kit.LocalRewardModel(folder)], rm_model=folder) as context:
        assert await context.scorer.score(group.samples, of_set="exact_match") == []
    assert [sample.reward for sample in group] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([5] * 17, "the sample has 17 tokens"),
        ([], "the sample has 0 tokens"),
        ([5, 99_999], "the token 99999 is not in the vocabulary"),
    ],
)
async def test_what_the_model_cannot_score_is_a_failure_of_its_sample_alone(
    kit: Any, tmp_path: Path, tokens: list[int], message: str
) -> None:
    folder = kit.make_reward_model(tmp_path, max_position_embeddings=16)
    group = make_group(kit, "7", "8", "9")
    group[1].tokens = tokens
    async with kit.opened(reward_model=[kit.LocalRewardModel(folder)], rm_model=folder) as context:
        (failure,) = await context.scorer.score(group.samples)
    assert failure.reward is FailureKind.INVALID
    assert message in str(failure.error)
    assert str(group[1].row_id) in str(failure.error)
    assert [sample.reward is None for sample in group] == [False, True, False]
    assert group[1].status is Status.FAILED
    assert group[0].reward == pytest.approx(by_transformers(folder, "prompt 07"), abs=1e-6)


async def test_a_group_goes_to_the_process_with_the_fewest_rows_to_score(kit: Any, tmp_path: Path) -> None:
    folder = kit.make_reward_model(tmp_path)
    processes = [kit.LocalRewardModel(folder) for _ in range(2)]
    for process in processes:
        process.open.clear()
    groups = [make_group(kit, *["7"] * size, row=size) for size in (3, 1, 4)]
    async with kit.opened(reward_model=processes, rm_model=folder) as context:
        scoring = [asyncio.create_task(context.scorer.score(group.samples)) for group in groups]
        await asyncio.sleep(0)  # each has asked, and waits for its answer
        assert context.scorer.model.num_asked == [3, 5]
        for process in processes:
            process.open.set()
        assert await asyncio.gather(*scoring) == [[], [], []]
        assert context.scorer.model.num_asked == [0, 0]


def rows_with(kit: Any, folder: Path, policy: Any, characters: str, template: str | None = None) -> RewardRows:
    """The encoder of a reward model of a tokenizer with ``characters``, for samples of the tokenizer ``policy``."""
    kit.make_reward_model(folder, characters=characters)
    if template:
        tokenizer: Any = make_char_tokenizer(characters)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
    return RewardRows(kit.make_args(rm_model=str(folder)), policy)


@pytest.mark.parametrize("characters", [DEFAULT_CHARACTERS, DEFAULT_CHARACTERS + "ß"], ids=["same", "more"])
def test_a_samples_own_tokens_are_scored_where_they_mean_the_same(kit: Any, tmp_path: Path, characters: str) -> None:
    rows = rows_with(kit, tmp_path, make_char_tokenizer(), characters)
    (sample,) = make_group(kit, "7")
    sample.tokens.append(1)  # the end token, which is no text
    assert rows.shares_tokens
    np.testing.assert_array_equal(rows.encode(sample), sample.tokens)


def test_a_samples_text_is_scored_where_the_reward_model_has_other_tokens(kit: Any, tmp_path: Path) -> None:
    other = DEFAULT_CHARACTERS[::-1]
    rows = rows_with(kit, tmp_path, make_char_tokenizer(), other)
    (sample,) = make_group(kit, "7")
    sample.tokens.append(1)
    assert not rows.shares_tokens
    assert make_char_tokenizer(other).decode(rows.encode(sample)) == "prompt 07"


def test_a_conversation_is_scored_under_the_reward_models_chat_template(kit: Any, tmp_path: Path) -> None:
    other = DEFAULT_CHARACTERS[::-1]
    rows = rows_with(kit, tmp_path, make_char_tokenizer(), other, TEMPLATE)
    (sample,) = make_group(kit, "7")
    sample.prompt = [{"role": "user", "content": "3+4="}]
    assert make_char_tokenizer(other).decode(rows.encode(sample)) == "[user:3+4=][assistant:7]"
