"""Answers as messages, and equality of messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.agents.messages import Answer, message_key, read_answer, same_reasoning, split_reasoning, text_of

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "1", "b": 2}}\n</tool_call>'


def read(text: str, opened: str = "", tools: Any = (ADD,), finish_reason: str = "stop") -> Answer:
    return read_answer(text, opened, tools, finish_reason, "turn")


def calls(text: str) -> list[tuple[str, Any]]:
    found = read(text).message.get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]


def test_a_plain_text_is_the_content_as_it_is() -> None:
    assert read(" Four.\n") == Answer(message={"role": "assistant", "content": " Four.\n"}, finish_reason="stop")
    assert read("") == Answer(message={"role": "assistant", "content": None}, finish_reason="stop")


def test_a_call_has_an_id_a_name_and_arguments_as_text() -> None:
    answer = read(f"Let me see.\n{CALL}")
    (call,) = answer.message["tool_calls"]
    assert call == {
        "id": call["id"],
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": "1", "b": 2}'},
    }
    assert (answer.message["content"], answer.finish_reason) == ("Let me see.", "tool_calls")
    assert read(CALL).message["content"] is None


def test_ids_of_calls_are_nine_letters_and_digits_and_functions_of_the_turn_and_the_place() -> None:
    ids = [call["id"] for call in read(CALL * 3).message["tool_calls"]]
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert len(set(ids)) == 3
    assert ids == [call["id"] for call in read(CALL * 3).message["tool_calls"]]
    other = read_answer(CALL, "", [ADD], "stop", "another turn").message["tool_calls"]
    assert other[0]["id"] not in ids


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "add", "arguments": {"a": "1", "b": 2}}',
        '\n{ "arguments" :{"b":2,"a":"1"},"name":"add" }\n\n',
        '{"name": "add", "parameters": {"a": "1", "b": 2}}',
        '{"name": "add", "arguments": "{\\"a\\": \\"1\\", \\"b\\": 2}"}',
        "\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n",
        "<function=add><parameter=a>1</parameter><parameter=b>2</parameter></function>",
        "add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n",
    ],
)
def test_the_common_forms_of_a_call_are_read_with_the_types_of_the_tool(call: str) -> None:
    assert calls(f"<tool_call>{call}</tool_call>") == [("add", {"a": "1", "b": 2})]


def test_values_of_tagged_calls_are_json_unless_the_tool_says_text_or_they_are_none() -> None:
    pieces = {"a": "[1]", "b": "7", "c": "[1, 2]", "d": "null", "e": "two words", "f": '"x"', "g": "\n two\nlines\n"}
    body = "".join(f"<parameter={key}>{value}</parameter>" for key, value in pieces.items())
    (call,) = calls(f"<tool_call><function=add>{body}</function></tool_call>")
    expected = {"a": "[1]", "b": 7, "c": [1, 2], "d": None, "e": "two words", "f": "x", "g": " two\nlines"}
    assert call == ("add", expected)
    assert calls("<tool_call><function=now></function></tool_call>") == [("now", {})]
    assert calls("<tool_call>now</tool_call>") == [("now", {})]


def test_strings_of_json_calls_may_have_line_breaks_and_the_mark_that_closes_a_call() -> None:
    assert calls('<tool_call>{"name": "add", "arguments": {"a": "x\n</tool_call>"}}</tool_call>') == [
        ("add", {"a": "x\n</tool_call>"})
    ]


MALFORMED = [
    "<tool_call>{a}</tool_call>",
    '<tool_call>{"name": "add", "argum</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "add", "arguments": "one"}</tool_call>',
    '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {}} and more</tool_call>',
    '<tool_call>{"name": "add", "arguments": {}}',
    "<tool_call>" + '{"name": "add", "arguments": {"a": ' + "[" * 100_000,
    "<tool_call><function=add><parameter=a>1</function></tool_call>",
    "<tool_call><function=add><parameter=a>1</parameter></tool_call>",
    "<tool_call>add<arg_key>a</arg_key></tool_call>",
    "<tool_call>two words</tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>",
    "</tool_call>",
]


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_no_call_stays_text_and_the_calls_beside_it_are_read(text: str) -> None:
    alone = read(text)
    assert alone == Answer(message={"role": "assistant", "content": text}, finish_reason="stop")
    both = read(f"{CALL}{text}{CALL}")
    assert [call["function"]["name"] for call in both.message["tool_calls"]] == ["add", "add"]
    assert both.message["content"] == text


def test_calls_of_unknown_tools_are_calls_and_without_tools_nothing_is() -> None:
    assert calls('<tool_call>{"name": "sub", "arguments": {}}</tool_call>') == [("sub", {})]
    assert read(CALL, tools=()).message == {"role": "assistant", "content": CALL}


def test_an_answer_that_was_cut_says_length_whatever_it_calls() -> None:
    answer = read(f'{CALL}\n<tool_call>{{"na', finish_reason="length")
    assert (answer.finish_reason, len(answer.message["tool_calls"])) == ("length", 1)
    assert answer.message["content"] == '<tool_call>{"na'


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        ("", "<think>\nhm\n</think>\n\nFour.", "hm", "Four."),
        ("", "\n<think>hm</think>\nFour.", "hm", "Four."),
        ("<think>\n", "hm\n</think>\n\nFour.", "hm", "Four."),
        ("<think>", "hm", "hm", None),
        ("<think>\n\n</think>\n\n", "Four.", None, "Four."),
        ("<think>\n\n</think>\n\n", "<think>no</think>", None, "<think>no</think>"),
        ("", "Four.<think>hm</think>", None, "Four.<think>hm</think>"),
        ("", "hm</think>Four.", None, "hm</think>Four."),
    ],
)
def test_reasoning_is_what_an_answer_begins_with(
    opened: str, text: str, reasoning: str | None, content: str | None
) -> None:
    message = read(text, opened).message
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_calls_within_reasoning_are_no_calls() -> None:
    assert "tool_calls" not in read(f"<think>{CALL}</think>Four.").message
    assert split_reasoning(f"<think>{CALL}</think>Four.") == (CALL, "Four.")


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", CALL, '{"name"', "x y", " ", "\n"])))
def test_no_letter_of_an_answer_is_lost(pieces: list[str]) -> None:
    text = "".join(pieces)
    message = read(text).message
    found = [call["function"] for call in message.get("tool_calls", [])]
    written = (f'{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}' for call in found)
    kept = (message["content"] or "") + "".join(f"<tool_call>{call}</tool_call>" for call in written)
    assert sorted("".join(kept.split())) == sorted("".join(text.split()))


@pytest.mark.timeout(60)  # some milliseconds each; many minutes if a text is searched again from each mark
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=f>" + "<parameter=a>" * 50_000 + "</function></tool_call>",
        "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 50_000 + "</arg_value></tool_call>",
        '<tool_call>{"a":' * 50_000,
        "<tool_call>" * 50_000,
        "<think>" * 50_000,
    ],
    ids=["parameters", "keys", "objects", "opened", "thoughts"],
)
def test_hostile_answers_are_read_in_a_time_that_grows_with_their_length(text: str) -> None:
    assert "tool_calls" not in read(text).message


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": "x"}, {"content": [{"type": "text", "text": "x"}]}),
        ({"content": None}, {"content": ""}),
        ({"content": None}, {}),
        ({"content": "x", "reasoning_content": "hm"}, {"content": "x"}),
        ({"tool_calls": []}, {"tool_calls": None}),
        ({"content": "x", "name": "a", "tool_call_id": "1"}, {"content": "x", "tool_call_id": "2"}),
    ],
)
def test_messages_of_equal_role_text_and_calls_are_equal(one: Any, other: Any) -> None:
    assert message_key({"role": "assistant", **one}) == message_key({"role": "assistant", **other})
    assert message_key({"role": "user", **one}) != message_key({"role": "assistant", **other})


def call(arguments: Any, name: str = "add", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}, **more}]}


def test_the_spelling_of_arguments_has_no_influence() -> None:
    same = [
        '{"a": 1, "b": [2.5, true]}',
        '{"b":[2.5,true],"a":1.0}',
        {"a": 1, "b": [2.5, True]},
        '{"a":1e0,"b":[25e-1,true]}',
    ]
    assert len({message_key(call(arguments)) for arguments in same}) == 1
    assert len({message_key(call(arguments)) for arguments in ("", " ", "{}", {}, None)}) == 1
    assert message_key(call("{}", id="1")) == message_key(call("{}", id="2", type="function"))


def test_other_arguments_names_and_orders_are_other_messages() -> None:
    others = [
        '{"a": 1}',
        '{"a": true}',
        '{"a": "1"}',
        '{"a": 2}',
        '{"b": 1}',
        '{"a": null}',
        "{}",
        "no json",
        '"a"',
        "[1]",
    ]
    assert len({message_key(call(arguments)) for arguments in others}) == len(others)
    assert message_key(call("{}")) != message_key(call("{}", name="sub"))
    two = [call("{}")["tool_calls"][0], call("{}", name="sub")["tool_calls"][0]]
    assert message_key({"tool_calls": two}) != message_key({"tool_calls": two[::-1]})


def test_parts_of_a_message_are_lines_and_other_parts_count_too() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text_of({"content": parts}) == "a\nb"
    image = {"type": "image_url", "image_url": {"url": "x"}}
    assert text_of({"content": [*parts, image]}) == f"a\nb\n{json.dumps(image, sort_keys=True)}"


def test_reasoning_that_a_client_changed_is_other_reasoning_and_none_is_the_recorded_one() -> None:
    recorded = {"reasoning_content": "hm"}
    assert all(same_reasoning(recorded, given) for given in ({}, {"reasoning_content": None}, {"reasoning": "hm\n"}))
    assert not same_reasoning(recorded, {"reasoning_content": "hm, no"})
    assert not same_reasoning({}, {"reasoning_content": "hm"})
