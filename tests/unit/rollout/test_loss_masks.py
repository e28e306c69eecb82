"""Masks derived by hand: a conversation as pieces of text, each 0 or 1. The tokenizer has a token for each character,
``<eos>`` is one token."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from buffer_rl.errors import DataError, RolloutError
from buffer_rl.records.groups import GroupUid, Sample
from buffer_rl.rollout.prompts import PromptEncoder
from buffer_rl.rollout.sft import SFTRollout, encode_conversation
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl.testing.tiny import make_char_tokenizer

HEAD = "{% if tools %}[{{ tools[0].name }}]{% endif %}"
ASK = "{% if add_generation_prompt %}<|assistant\n{% endif %}"
CHATML = (
    HEAD
    + "{% for m in messages %}<|{{ m.role }}\n{{ m.content }}{{ eos_token }}\n"
    + "{% if m.loss is defined or m.step_loss_mask is defined %}!{% endif %}{% endfor %}"
    + ASK
)
MARKED = (
    HEAD
    + "{% for m in messages %}<|{{ m.role }}\n{% if m.role == 'assistant' %}"
    + "{% generation %}{{ m.content }}{{ eos_token }}\n{% endgeneration %}"
    + "{% else %}{{ m.content }}{{ eos_token }}\n{% endif %}{% endfor %}"
    + ASK
)
# Thinking, "(...)", is left out of answers that a question follows; an answer without any gets an empty one.
THINKING = (
    HEAD
    + "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    + "{% endif %}{% endfor %}{% for m in messages %}<|{{ m.role }}\n{% if m.role != 'assistant' %}{{ m.content }}"
    + "{% elif loop.index0 < ns.last %}{{ m.content.split(')')[-1] }}{% elif ')' in m.content %}{{ m.content }}"
    + "{% else %}(){{ m.content }}{% endif %}{{ eos_token }}\n{% endfor %}"
    + ASK
)
TALK = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "ok"},
    {"role": "assistant", "content": "so"},
]
THOUGHTS = [
    message | {"content": f"(um){message['content']}"} if i in (2, 4) else message for i, message in enumerate(TALK)
]
BEGIN = "<|system\nbe<eos>\n<|user\nhi<eos>\n<|assistant\n"
BETWEEN = "<|user\nok<eos>\n<|assistant\n"


def prompts(template: str | None, **kwargs: Any) -> PromptEncoder:
    tokenizer = make_char_tokenizer()
    tokenizer.chat_template = template
    return PromptEncoder(tokenizer, **kwargs)


def row(messages: list[dict[str, Any]], **metadata: Any) -> Sample:
    return Sample(uid=GroupUid("source", 7, 0), prompt=messages, metadata=metadata)


def by_hand(*pieces: tuple[str, int]) -> tuple[list[int], list[int]]:
    tokenizer = make_char_tokenizer()
    encoded = [(tokenizer.encode(text, add_special_tokens=False), bit) for text, bit in pieces]
    return [token for ids, _ in encoded for token in ids], [bit for ids, bit in encoded for _ in ids]


def switched(number: int, **switch: Any) -> list[dict[str, Any]]:
    return [message | (switch if i == number else {}) for i, message in enumerate(TALK)]


@pytest.mark.parametrize("mask_type", ["auto", "qwen", "qwen3"])
def test_every_answer_is_trained_on_with_its_end_token_and_nothing_else(mask_type: str) -> None:
    wanted = by_hand((BEGIN, 0), ("yo<eos>", 1), ("\n" + BETWEEN, 0), ("so<eos>", 1), ("\n", 0))
    assert encode_conversation(prompts(CHATML), row(TALK), mask_type) == wanted


def test_the_last_answer_alone_is_trained_on_as_it_is_written() -> None:
    wanted = by_hand((BEGIN + "yo<eos>\n" + BETWEEN, 0), ("so<eos>", 1))
    assert encode_conversation(prompts(CHATML), row(TALK), "distill_qwen") == wanted
    always_drops = prompts(CHATML.replace("m.content", "m.content.split(')')[-1]"))
    wanted = by_hand((BEGIN + "yo<eos>\n" + BETWEEN, 0), ("(um)so<eos>", 1))
    assert encode_conversation(always_drops, row(THOUGHTS), "distill_qwen") == wanted


@pytest.mark.parametrize("mask_type", ["auto", "qwen", "qwen3"])
def test_what_follows_the_last_answer_is_context(mask_type: str) -> None:
    tail = [{"role": "tool", "content": "42"}, {"role": "user", "content": "?"}]
    wanted = by_hand((BEGIN, 0), ("yo<eos>", 1), ("\n<|tool\n42<eos>\n<|user\n?<eos>\n", 0))
    assert encode_conversation(prompts(CHATML), row(TALK[:3] + tail), mask_type) == wanted


def test_marks_of_the_template_say_exactly_what_is_trained_on() -> None:
    wanted = by_hand((BEGIN, 0), ("yo<eos>\n", 1), (BETWEEN, 0), ("so<eos>\n", 1))
    assert encode_conversation(prompts(MARKED), row(TALK), "auto") == wanted
    unmarked = by_hand((BEGIN, 0), ("yo<eos>", 1), ("\n" + BETWEEN, 0), ("so<eos>", 1), ("\n", 0))
    assert encode_conversation(prompts(MARKED), row(TALK), "qwen") == unmarked


@pytest.mark.parametrize("off", [{"loss": False}, {"step_loss_mask": 0}, {"loss": True, "step_loss_mask": False}])
@pytest.mark.parametrize("mask_type", ["auto", "qwen3"])
def test_a_message_that_is_switched_off_is_context_and_the_template_sees_no_switch(
    off: dict[str, Any], mask_type: str
) -> None:
    wanted = by_hand((BEGIN + "yo<eos>\n" + BETWEEN, 0), ("so<eos>", 1), ("\n", 0))
    assert encode_conversation(prompts(CHATML), row(switched(2, **off)), mask_type) == wanted


def test_a_marked_answer_can_be_switched_off_where_each_has_one_mark() -> None:
    wanted = by_hand((BEGIN, 0), ("yo<eos>\n", 1), (BETWEEN + "so<eos>\n", 0))
    assert encode_conversation(prompts(MARKED), row(switched(4, loss=False)), "auto") == wanted
    two_marks = MARKED.replace(
        "{{ eos_token }}\n{% endgeneration", "{% endgeneration %}-{% generation %}!{% endgeneration"
    )
    with pytest.raises(DataError, match=r"marks 4 pieces of text, and there are 2 answers"):
        encode_conversation(prompts(two_marks), row(switched(4, loss=False)), "auto")


@pytest.mark.parametrize("on", [{"loss": True}, {"step_loss_mask": 1}, {"loss": None, "step_loss_mask": None}])
def test_a_switch_that_is_on_or_null_changes_nothing(on: dict[str, Any]) -> None:
    same = encode_conversation(prompts(CHATML), row(TALK), "auto")
    assert encode_conversation(prompts(CHATML), row(switched(2, **on)), "auto") == same
    assert encode_conversation(prompts(CHATML), row(switched(1, **on)), "auto") == same


def test_a_switch_of_another_kind_is_refused() -> None:
    with pytest.raises(DataError, match=r"row source:7:0/0\.0: 'loss' of message 2 is 'no'"):
        encode_conversation(prompts(CHATML), row(switched(2, loss="no")), "auto")


def test_a_template_that_drops_earlier_thinking_is_refused_with_what_to_do() -> None:
    with pytest.raises(DataError) as caught:
        encode_conversation(prompts(THINKING), row(THOUGHTS), "auto")
    assert caught.value.what.startswith("the chat template renders message 2 otherwise once others follow it")
    assert caught.value.where == "row source:7:0/0.0"
    assert "qwen3 keeps it" in caught.value.hint


def test_rendered_by_themselves_all_answers_keep_their_thinking() -> None:
    wanted = by_hand((BEGIN, 0), ("(um)yo<eos>", 1), ("\n" + BETWEEN, 0), ("(um)so<eos>", 1), ("\n", 0))
    assert encode_conversation(prompts(THINKING), row(THOUGHTS), "qwen3") == wanted
    wanted = by_hand((BEGIN, 0), ("()yo<eos>", 1), ("\n" + BETWEEN, 0), ("()so<eos>", 1), ("\n", 0))
    assert encode_conversation(prompts(THINKING), row(TALK), "qwen3") == wanted


def test_an_earlier_answer_that_is_switched_off_may_lose_its_thinking() -> None:
    talk = [message | ({"loss": False} if i == 2 else {}) for i, message in enumerate(THOUGHTS)]
    wanted = by_hand((BEGIN + "yo<eos>\n" + BETWEEN, 0), ("(um)so<eos>", 1), ("\n", 0))
    assert encode_conversation(prompts(THINKING), row(talk), "auto") == wanted


def test_a_header_that_the_answer_does_not_have_is_refused() -> None:
    template = CHATML.replace("<|assistant\n{% endif", "<|assistant\n({% endif")
    for mask_type in ("auto", "qwen3"):
        with pytest.raises(DataError, match="the chat template "):
            encode_conversation(prompts(template), row(TALK), mask_type)


@pytest.mark.parametrize("mask_type", ["auto", "qwen3", "distill_qwen"])
def test_the_rows_tools_and_the_options_of_the_template_reach_it(mask_type: str) -> None:
    template = "{{ mood }}" + CHATML
    encoder = prompts(template, template_kwargs={"mood": "*"})
    sample = row(TALK[:3], tools=[{"name": "calc"}])
    wanted = by_hand(("*[calc]" + BEGIN, 0), ("yo<eos>", 1), ("" if mask_type == "distill_qwen" else "\n", 0))
    assert encode_conversation(encoder, sample, mask_type) == wanted


def test_messages_between_two_answers_are_rendered_together() -> None:
    """As where a template joins the results of several tool calls."""
    once = "{% if loop.first or m.role != loop.previtem.role %}<|{{ m.role }}{% endif %}{{ '\n' }}"
    template = CHATML.replace("<|{{ m.role }}\n", once)
    tools = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "2"}]
    wanted = by_hand(
        (BEGIN, 0), ("yo<eos>", 1), ("\n<|tool\n4<eos>\n\n2<eos>\n<|assistant\n", 0), ("so<eos>", 1), ("\n", 0)
    )
    assert encode_conversation(prompts(template), row([*TALK[:3], *tools, TALK[4]]), "qwen3") == wanted


def test_white_space_after_an_answer_without_an_end_token_ends_it() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}" + ASK.replace(
        "<|assistant\n", "assistant:"
    )
    wanted = by_hand(("user:hi\nassistant:", 0), ("yo\n", 1), ("user:ok\nassistant:", 0), ("so\n", 1))
    assert encode_conversation(prompts(template), row(TALK[1:]), "auto") == wanted


def test_a_token_that_begins_in_the_header_is_trained_on_if_the_answer_goes_on_in_it() -> None:
    """The newlines of header and answer are one token, as of a byte-pair tokenizer."""
    words = {token: i for i, token in enumerate(["<unk>", "<eos>", "\n", "\n\n", "a", "h", "u"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|."), behavior="isolated")
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = (
        CHATML.replace("<|", "").replace("{{ m.role }}", "{{ m.role[0] }}").replace("assistant", "a")
    )
    talk = [{"role": "user", "content": "h"}, {"role": "assistant", "content": "\nh"}]
    tokens, mask = encode_conversation(PromptEncoder(tokenizer), row(talk), "auto")
    assert tokens == [6, 2, 5, 1, 2, 4, 3, 5, 1, 2]
    assert mask == [0, 0, 0, 0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("messages", "mask_type", "words"),
    [
        (TALK[:2], "auto", "there is no answer to train on"),
        (TALK[:2], "distill_qwen", "there is no answer to train on"),
        ([TALK[1], TALK[2] | {"loss": False}], "qwen3", "there is no answer to train on"),
        (TALK[2:], "auto", "the conversation begins with an answer"),
        (TALK[2:], "qwen3", "the conversation begins with an answer"),
        (TALK[:4], "distill_qwen", "the last message is no answer"),
        (switched(4, loss=False), "distill_qwen", "the last message is no answer"),
    ],
)
def test_a_row_without_a_usable_answer_is_named(messages: list[dict[str, Any]], mask_type: str, words: str) -> None:
    with pytest.raises(DataError, match=rf"row source:7:0/0\.0: {words}"):
        encode_conversation(prompts(CHATML), row(messages), mask_type)


def test_the_first_token_has_no_predecessor_and_is_not_trained_on() -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert encode_conversation(prompts(template), row(TALK[2:3]), "auto") == by_hand(("y", 0), ("o", 1))
    with pytest.raises(DataError, match="the answers have no tokens"):
        encode_conversation(prompts(template), row([{"role": "assistant", "content": "y"}]), "auto")


def test_templates_and_tokenizers_that_cannot_do_it_are_named() -> None:
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        encode_conversation(prompts(None), row(TALK), "auto")
    slow = prompts(CHATML)
    slow.tokenizer = SlowTokenizer()
    with pytest.raises(RolloutError, match="fast tokenizer"):
        encode_conversation(slow, row(TALK), "auto")


class SlowTokenizer:
    """As transformers' tokenizers in Python: without character offsets."""

    is_fast = False
    chat_template = CHATML


async def roll(kit: Any, conversations: list[list[dict[str, Any]]], count: int, **options: Any) -> FakeBuffer:
    groups = [kit.make_group(number, labels=[None]) for number in range(len(conversations))]
    for group, messages in zip(groups, conversations, strict=True):
        group[0].prompt = messages
    buffer = FakeBuffer(groups, kit.make_ticket(count))
    async with kit.opened(**options) as context:
        context.tokenizer.chat_template = CHATML
        await SFTRollout(context.args)(context.args, 0, buffer)
    return buffer


async def test_the_response_of_a_conversation_begins_with_its_first_answer(kit: Any) -> None:
    (group,) = (await roll(kit, [TALK], 1)).finished
    tokens, mask = by_hand((BEGIN, 0), ("yo<eos>", 1), ("\n" + BETWEEN, 0), ("so<eos>", 1), ("\n", 0))
    start = mask.index(1)
    (sample,) = group
    assert (sample.tokens, sample.loss_mask) == (tokens, mask[start:])
    assert sample.response_length == len(tokens) - start
    assert sample.response == "yo<eos>\n" + BETWEEN + "so<eos>\n"


async def test_a_conversation_with_too_much_before_its_first_answer_is_rejected_and_replaced(kit: Any) -> None:
    start = len(by_hand((BEGIN, 0))[0])
    buffer = await roll(kit, [TALK, TALK[1:]], 1, rollout_max_prompt_len=start - 1)
    assert [(group.uid.row, reason) for group, reason in buffer.rejected] == [(0, "prompt_too_long")]
    assert [group.uid.row for group in buffer.finished] == [1]
    assert not (await roll(kit, [TALK], 1, rollout_max_prompt_len=start)).rejected


async def test_a_conversation_that_exceeds_the_context_is_in_quarantine(kit: Any) -> None:
    buffer = await roll(kit, [TALK, TALK[1:3]], 1, rollout_max_context_len=50)
    assert [(group.uid.row, reason) for group, reason in buffer.quarantined] == [(0, "conversion_failed")]
    assert [group.uid.row for group in buffer.finished] == [1]


async def test_the_options_type_is_used(kit: Any) -> None:
    (group,) = (await roll(kit, [TALK], 1, loss_mask_type="distill_qwen")).finished
    assert group[0].response == "so<eos>"
