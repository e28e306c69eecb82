"""Answers that a response template of transformers reads: as its parser does, but nothing is lost."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from buffer_rl.agents.messages import read_answer
from buffer_rl.agents.template_reader import TemplateReader, reader_of
from buffer_rl.errors import ConfigError
from harness.agent_play import AgentEngine, session_of, user
from harness.talk import ADD

CALL: Any = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
JSON_CALLS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<s>assistant\n",
    "fields": {
        "content": {"content": "text"},
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": CALL,
        },
    },
}
PROMPT = "<s>user\nQ<e>\n<s>assistant\n"
GOOD, OTHER = (
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
)
BAD = '<tool_call>{"name": "add", "arg</tool_call>'


def read(text: str, template: Any = JSON_CALLS, prompt: str = PROMPT, tools: Any = (ADD,), reason: str = "stop") -> Any:
    return TemplateReader(template)(text, prompt, tools, reason, "turn")


def calls_of(answer: Any) -> list[tuple[str, Any]]:
    calls = answer.message.get("tool_calls", ())
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_two_good_calls_are_read_and_a_malformed_one_between_them_stays_text() -> None:
    text = f"Two: {GOOD}{BAD}{OTHER}"
    with pytest.raises(ValueError, match="JSON"):
        parse_response(text, JSON_CALLS, prefix=PROMPT, tools=[ADD])
    answer = read(text)
    assert calls_of(answer) == [("add", {"a": 1}), ("sub", {})]
    assert answer.message["content"] == f"Two:\n{BAD}"
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("hi", PROMPT),
        (" spaces \n", PROMPT),
        ("", PROMPT),
        (f"<think>\nhm\n</think>\n\nso{GOOD}\n{OTHER}", PROMPT),
        ("hm\n</think>\n\nho", f"{PROMPT}<think>\n"),
        ("ho", f"{PROMPT}<think>\n\n</think>\n\n"),
        ("<think>never ended", PROMPT),
    ],
)
def test_answers_without_faults_are_those_of_the_usual_reader(text: str, prompt: str) -> None:
    assert read(text, prompt=prompt) == read_answer(text, prompt, [ADD], "stop", "turn")


def test_a_call_that_is_cut_and_calls_of_a_request_without_tools_stay_text() -> None:
    cut = '<tool_call>{"name": "add", "arguments": {"a": 1}}'
    assert read(f"so{cut}", reason="length").message["content"] == f"so{cut}"
    assert read(f"so{GOOD}", tools=()).message == {"role": "assistant", "content": f"so{GOOD}"}


def test_a_call_inside_one_that_never_ends_is_read() -> None:
    answer = read(f'<tool_call>{{"n{GOOD}')
    assert calls_of(answer) == [("add", {"a": 1})]
    assert answer.message["content"] == '<tool_call>{"n'


@pytest.mark.parametrize("arguments", ['"x"', "[1]", '{"a": NaN}', '{"a": "\\ud800"}'])
def test_arguments_that_no_client_could_read_stay_text(arguments: str) -> None:
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert read(text).message == {"role": "assistant", "content": text}


def test_text_that_no_field_takes_is_kept() -> None:
    fields = {name: field for name, field in JSON_CALLS["fields"].items() if name != "content"}
    template = JSON_CALLS | {"fields": fields}
    assert "content" not in parse_response(f"so{GOOD}", template, prefix=PROMPT)
    assert read(f"so{GOOD}", template).message["content"] == "so"


TAGS: dict[str, Any] = {
    "start_anchor": "<s>assistant\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"<call:(?P<name>\w+)>",
            "close": "</call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"},
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def test_tagged_arguments_are_typed_and_a_call_of_which_the_parser_would_drop_a_part_stays_text() -> None:
    good, bad = "<call:add><a>7</a></call>", "<call:add><a>7</a><b>8</call>"
    (dropped,) = parse_response(bad, TAGS, prefix="", tools=[ADD])["tool_calls"]
    assert dropped["function"]["arguments"] == {"a": 7}
    answer = read(f"{good}{bad}", TAGS)
    assert calls_of(answer) == [("add", {"a": 7})]
    assert answer.message["content"] == bad


CHANNELS: dict[str, Any] = {
    "start_anchor": "<s>assistant",
    "fields": {
        "thinking": {"open": "<c>analysis<m>", "close": "<e>", "repeats": True, "join": "\n"},
        "content": {"open": "<c>final<m>", "close": "<e>"},
        "tool_calls": {
            "open_pattern": r"<c>commentary to=functions\.(?P<name>\w+)<m>",
            "close_pattern": r"<call>|<e>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "preamble": {"open": "<c>commentary<m>", "close": "<e>"},
    },
}


def test_a_template_of_channels_is_read_and_a_field_without_a_place_in_a_message_stays_text() -> None:
    text = '<c>analysis<m>hm<e><c>commentary<m>first<e><c>commentary to=functions.add<m>{"a": 1}'
    answer = read(text, CHANNELS)
    assert calls_of(answer) == [("add", {"a": 1})]
    assert answer.message["reasoning_content"] == "hm"
    assert answer.message["content"] == "<c>commentary<m>first<e>"
    assert read("<c>final<m>ho", CHANNELS).message == {"role": "assistant", "content": "ho"}


@pytest.mark.parametrize("seed", range(20))
def test_of_random_answers_every_good_call_and_every_other_piece_is_kept(seed: int) -> None:
    chosen = random.Random(seed)
    pieces = [
        chosen.choice([GOOD, OTHER, BAD, "<tool_call>{a}</tool_call>", "word", "</tool_call>"]) for _ in range(12)
    ]
    answer = read("|".join(pieces))
    names = {GOOD: "add", OTHER: "sub"}
    assert [name for name, _ in calls_of(answer)] == [names[piece] for piece in pieces if piece in names]
    rest = [piece for piece in pieces if piece not in names]
    content, at = answer.message["content"] or "", 0
    for piece in rest:
        at = content.index(piece, at) + len(piece)


def test_what_is_no_template_is_refused() -> None:
    unknown = {"start_anchor": "x", "fields": {"content": {"unknown": 1}}}
    refused: list[dict[str, Any]] = [{"fields": {}}, unknown]
    for template in refused:
        with pytest.raises(ConfigError, match="--response-template"):
            TemplateReader(template)


async def test_the_option_comes_before_the_template_of_the_tokenizer_and_both_leave_the_ids_as_they_were() -> None:
    engine = AgentEngine(lambda prompt, params: "<call:add><a>7</a></call>")
    assert reader_of(engine.tokenizer, None) is read_answer
    engine.tokenizer.response_template = JSON_CALLS
    for template, names in ((None, []), (TAGS, ["add"])):
        async with session_of(engine, response_template=template) as session:
            exchange = await session.chat(user("go"), [ADD])
            assert exchange.answer is not None
            assert [name for name, _ in calls_of(exchange.answer)] == names
            said = engine.tokenizer.decode(exchange.turn.output_ids)
            assert said == "<call:add><a>7</a></call><eos>"
