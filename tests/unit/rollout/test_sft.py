from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.errors import RolloutError
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.failure_policy import QUARANTINE_FILE
from buffer_rl.rollout.sft import SFTRollout
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl.testing.tiny import make_char_tokenizer

EOS = 1  # of the character tokenizer


async def roll(kit: Any, groups: list[Any], **options: Any) -> tuple[FakeBuffer, Any, Any]:
    buffer = FakeBuffer(groups, kit.make_ticket(len(groups)))
    async with kit.opened(**options) as context:
        output = await SFTRollout(context.args)(context.args, 0, buffer)
    return buffer, output, context


async def test_tokens_are_prompt_answer_and_end_token_with_a_mask_on_the_answer(kit: Any) -> None:
    group = kit.make_group(7, labels=["42"])
    buffer, output, context = await roll(kit, [group])
    (sample,) = buffer.finished[0]
    prompt = context.tokenizer.encode("prompt 7", add_special_tokens=False)
    answer = context.tokenizer.encode("42", add_special_tokens=False)
    assert sample.tokens == [*prompt, *answer, EOS]
    assert (sample.response_length, sample.loss_mask, sample.reward) == (3, [1, 1, 1], 0.0)
    assert sample.response == "42"
    assert output.metrics["response_len/mean"] == 3.0


async def test_the_rows_convert_without_log_probs_or_versions(kit: Any) -> None:
    buffer, _, context = await roll(kit, [kit.make_group(7, labels=["42", "42"])])
    _, columns = GroupConverter(context.args).encode(buffer.finished[0], False)
    assert columns["reward"].tolist() == [0.0, 0.0]
    assert columns["weight_version"].tolist() == [-1, -1]
    assert "rollout_log_probs" not in columns


@pytest.mark.parametrize(
    ("label", "error"),
    [
        (None, "the label is None"),
        ("", "the label is ''"),
        (42, "the label is 42"),
        ("four", "prompt and answer have 13 tokens"),
    ],
)
async def test_a_row_of_which_no_training_row_can_be_made_is_in_quarantine_and_another_takes_its_place(
    kit: Any, tmp_path: Path, label: Any, error: str
) -> None:
    groups = [kit.make_group(row, labels=[label if row == 3 else "4"]) for row in (2, 3, 5)]
    buffer = FakeBuffer(groups, kit.make_ticket(2))
    async with kit.opened(rollout_max_context_len=12) as context:
        context.run_dir = tmp_path
        output = await SFTRollout(context.args)(context.args, 0, buffer)
    assert buffer.finished_uids == [groups[0].uid, groups[2].uid]
    assert [(group.uid.row, reason) for group, reason in buffer.quarantined] == [(3, "conversion_failed")]
    assert (output.metrics["drop_quarantined"], output.metrics["data_failures"]) == (1.0, 1.0)
    (line,) = (tmp_path / QUARANTINE_FILE).read_text().splitlines()
    assert "row source:3:0/0.0" in json.loads(line)["error"]
    assert error in json.loads(line)["error"]


async def test_a_run_in_which_no_row_has_an_answer_ends_with_the_first_of_them(kit: Any) -> None:
    buffer = FakeBuffer([kit.make_group(row, labels=[None]) for row in range(9)], kit.make_ticket(2))
    words = r"the training rows of 2 groups[\s\S]*row source:0:0/0\.0: the label is None"
    async with kit.opened() as context:
        with pytest.raises(RolloutError, match=words):
            await SFTRollout(context.args)(context.args, 0, buffer)


async def test_it_declares_that_it_needs_no_engine_but_its_evaluation_does(kit: Any) -> None:
    assert SFTRollout.uses_engine is False
    buffer = FakeBuffer([kit.make_group(0)], kit.make_ticket(1, evaluation=True))
    async with kit.opened() as context:
        with pytest.raises(RolloutError, match="no engine"):
            await SFTRollout(context.args)(context.args, 0, buffer, evaluation=True)


async def test_a_prompt_that_is_too_long_is_rejected_and_replaced(kit: Any) -> None:
    groups = [kit.make_group(row, labels=["4"]) for row in (100, 7, 8)]
    buffer = FakeBuffer(groups, kit.make_ticket(2))
    async with kit.opened(rollout_max_prompt_len=8) as context:
        await SFTRollout(context.args)(context.args, 0, buffer)
    assert sorted(group.uid.row for group in buffer.finished) == [7, 8]
    assert [(group.uid.row, reason) for group, reason in buffer.rejected] == [(100, "prompt_too_long")]


async def test_only_too_long_prompts_end_the_rollout(kit: Any) -> None:
    groups = [kit.make_group(row, labels=["4"]) for row in range(9)]
    buffer = FakeBuffer(groups, kit.make_ticket(2))
    async with kit.opened(rollout_max_prompt_len=1, dynamic_sampling_max_drops=2, rollout_batch_size=2) as context:
        with pytest.raises(RolloutError, match="prompt_too_long"):
            await SFTRollout(context.args)(context.args, 0, buffer)


async def test_an_answer_follows_the_prompt_with_the_special_tokens_of_generation(kit: Any) -> None:
    buffer = FakeBuffer([kit.make_group(7, labels=["42"])], kit.make_ticket(1))
    async with kit.opened() as context:
        context.prompts.tokenizer = tokenizer = make_char_tokenizer(bos=True)
        await SFTRollout(context.args)(context.args, 0, buffer)
    (sample,) = buffer.finished[0]
    assert sample.tokens == [*tokenizer("prompt 7")["input_ids"], *tokenizer("42")["input_ids"][1:], EOS]
    assert sample.loss_mask == [1, 1, 1]
