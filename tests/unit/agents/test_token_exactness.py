"""Token-exactness case by case, in literal ids; the table of ``docs/agents.md`` is made of these cases.

    python tests/unit/agents/test_token_exactness.py

writes it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from buffer_rl.agents.turns import Row, Turn, rows
from buffer_rl.records.ids import VersionSpan
from harness.agent_play import chat_tokenizer
from harness.dialects import CALLS
from harness.served_cases import CASES as SERVED
from harness.talk import ADD, APPENDS, MARKS, OK, OPENS, SPECIAL, STRIPS, Talk, ids, tool, user

PAGE = Path(__file__).resolve().parents[3] / "docs" / "agents.md"
BEGIN, END = "<!-- The table is written by: python tests/unit/agents/test_token_exactness.py -->\n", "\n<!-- end -->"
Case = Callable[[str], Talk]
CASES: dict[int, tuple[str, str, Case]] = {}
THINKS = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ODD_CALL = '<tool_call>{ "arguments":{"b":2.0, "a":1} , "name":"add"}\n\n</tool_call>'


def case(number: int, what: str, treatment: str) -> Callable[[Case], Case]:
    """A conversation of the table, as a function of ``--agent-history``."""

    def register(talk: Case) -> Case:
        CASES[number] = (what, treatment, talk)
        return talk

    return register


def row_of(*pieces: str) -> tuple[list[int], list[int]]:
    """Tokens and loss mask of a row of pieces: prompt, answer, what is between, answer ..."""
    tokens = [each for piece in pieces for each in ids(piece)]
    mask = [int(number % 2) for number, piece in enumerate(pieces) for _ in ids(piece)]
    return tokens, mask[len(ids(pieces[0])) :]


def found(talk: Talk) -> list[tuple[list[int], list[int]]]:
    return [(row.tokens, row.loss_mask) for row in talk.rows]


@case(1, "a second user message; the template appends", "ids held and the encoded rest")
def second_user_turn(history: str) -> Talk:
    talk = Talk(APPENDS, history)
    first = talk.ask([user("Q")], "hi<e>")
    talk.ask([user("Q"), first, user("R")], "ho<e>")
    return talk


@pytest.mark.parametrize("history", ["template", "append"])
def test_a_second_user_message_goes_on_behind_the_ids_held(history: str) -> None:
    talk = second_user_turn(history)
    prompt = "<s>user\nQ<e>\n<s>assistant\n"
    assert found(talk) == [row_of(prompt, "hi<e>", "\n<s>user\nR<e>\n<s>assistant\n", "ho<e>")]
    assert found(talk)[0][0][:7] == [257, 117, 115, 101, 114, 10, 81]
    assert talk.causes == ["new", "extends"]
    assert [prompt.num_held for prompt in talk.prompts] == [0, len(ids(prompt)) + 3]


@case(2, "the sampled ids are not those that the tokenizer gives their text", "the sampled ids stay")
def split_otherwise(history: str) -> Talk:
    talk = Talk(APPENDS, history)
    first = talk.ask([user("ok")], [*b"ok", SPECIAL["<e>"]])
    talk.ask([user("ok"), first, user("ok")], [OK, SPECIAL["<e>"]])
    return talk


def test_ids_that_the_tokenizer_would_not_choose_stay_as_they_were_sampled() -> None:
    talk = split_otherwise("template")
    ok, head = [OK], ids("<e>\n<s>assistant\n")
    between = [*ids("\n<s>user\n"), *ok, *head]
    (row,) = talk.rows
    assert row.tokens == [*ids("<s>user\n"), *ok, *head, *b"ok", 258, *between, OK, 258]
    assert row.loss_mask == [1, 1, 1] + [0] * len(between) + [1, 1]


@case(3, "the template leaves earlier reasoning out at a new user message", "`template`: rendered; `append`: ids held")
def stripped_reasoning(history: str) -> Talk:
    talk = Talk(STRIPS, history)
    first = talk.ask([user("Q")], f"{THINKS}hi<e>")
    talk.ask([user("Q"), first, user("R")], f"{THINKS}ho<e>")
    return talk


def test_reasoning_that_the_template_leaves_out_makes_a_second_row_or_stays_with_append() -> None:
    prompt, further = "<s>user\nQ<e>\n<s>assistant\n", "\n<s>user\nR<e>\n<s>assistant\n"
    talk = stripped_reasoning("template")
    assert found(talk) == [row_of(prompt, f"{THINKS}hi<e>"), row_of(f"{prompt}hi<e>{further}", f"{THINKS}ho<e>")]
    assert talk.causes == ["new", "template"]
    talk = stripped_reasoning("append")
    assert found(talk) == [row_of(prompt, f"{THINKS}hi<e>", further, f"{THINKS}ho<e>")]
    assert talk.causes == ["new", "extends"]


@case(4, "reasoning before a tool's answer, which the template keeps", "ids held")
def reasoning_in_a_tool_cycle(history: str) -> Talk:
    talk = Talk(STRIPS, history)
    first = talk.ask([user("Q")], f"{THINKS}{CALL}<e>", tools=[ADD])
    first.pop("reasoning_content")  # most clients do not send it back
    talk.ask([user("Q"), first, tool("3")], f"{THINKS}ho<e>", tools=[ADD])
    return talk


def test_reasoning_within_a_tool_cycle_stays_even_if_the_client_drops_it() -> None:
    talk = reasoning_in_a_tool_cycle("template")
    prompt = "<s>tool add<e>\n<s>user\nQ<e>\n<s>assistant\n"
    between = "\n<s>tool\n3<e>\n<s>assistant\n"
    assert found(talk) == [row_of(prompt, f"{THINKS}{CALL}<e>", between, f"{THINKS}ho<e>")]


@case(5, "the prompt begins the reasoning", "what it writes is prompt; the history is compared with it")
def opened_reasoning(history: str) -> Talk:
    talk = Talk(OPENS, history)
    first = talk.ask([user("Q")], f"hm\n</think>\n\n{CALL}<e>", tools=[ADD])
    assert first["reasoning_content"] == "hm"
    talk.ask([user("Q"), first, tool("3")], "so\n</think>\n\nho<e>", tools=[ADD])
    return talk


def test_reasoning_that_the_prompt_begins_is_prompt_and_goes_on_in_one_row() -> None:
    prompt = "<s>tool add<e>\n<s>user\nQ<e>\n<s>assistant\n<think>\n"
    between = "\n<s>tool\n3<e>\n<s>assistant\n<think>\n"
    expected = row_of(prompt, f"hm\n</think>\n\n{CALL}<e>", between, "so\n</think>\n\nho<e>")
    assert found(opened_reasoning("template")) == [expected]
    empty = Talk(APPENDS.replace("assistant\n{% endif", "assistant\n<think>\n\n</think>\n\n{% endif"))
    first = empty.ask([user("Q")], "hi<e>")
    assert first == {"role": "assistant", "content": "hi"}
    empty.ask([user("Q"), first, user("R")], "ho<e>")
    thought = "<think>\n\n</think>\n\n"
    prompt, between = f"<s>user\nQ<e>\n<s>assistant\n{thought}", f"\n<s>user\nR<e>\n<s>assistant\n{thought}"
    assert found(empty) == [row_of(prompt, "hi<e>", between, "ho<e>")]


@case(6, "a call with other spaces, order of keys or numbers than the template's", "the raw text decides")
def oddly_spelt_call(history: str) -> Talk:
    talk = Talk(APPENDS, history)
    first = talk.ask([user("Q")], f"{ODD_CALL}<e>", tools=[ADD])
    talk.ask([user("Q"), first, tool("3")], "ho<e>", tools=[ADD])
    return talk


@case(7, "the client writes a call anew: spaces, `1` for `1.0`, no ids, `content` null", "found by parsed arguments")
def rewritten_call(history: str) -> Talk:
    talk = Talk(APPENDS, history)
    talk.ask([user("Q")], f"{ODD_CALL}<e>", tools=[ADD])
    call = {"function": {"name": "add", "arguments": '{"a":1,"b":2}'}}
    given = {"role": "assistant", "content": "", "tool_calls": [call]}
    talk.ask([user("Q"), given, tool("3", tool_call_id="x")], "ho<e>", tools=[ADD])
    return talk


@pytest.mark.parametrize("talk", [oddly_spelt_call("template"), rewritten_call("template")], ids=["sent", "rewritten"])
def test_a_call_stays_as_it_was_sampled_however_the_client_writes_it(talk: Talk) -> None:
    prompt = "<s>tool add<e>\n<s>user\nQ<e>\n<s>assistant\n"
    assert found(talk) == [row_of(prompt, f"{ODD_CALL}<e>", "\n<s>tool\n3<e>\n<s>assistant\n", "ho<e>")]
    assert talk.causes == ["new", "extends"]


def test_empty_arguments_are_an_empty_object() -> None:
    talk = Talk(APPENDS)
    sampled = '<tool_call>{"name": "add", "arguments": {}}</tool_call><e>'
    talk.ask([user("Q")], sampled, tools=[ADD])
    given = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": ""}}]}
    talk.ask([user("Q"), given, tool("3")], "ho<e>", tools=[ADD])
    assert talk.causes == ["new", "extends"]


@case(8, "the client changes an answer, or repairs its call", "rendered, a new row; the first turn stays trained")
def changed_answer(history: str) -> Talk:
    talk = Talk(APPENDS, history)
    talk.ask([user("Q")], "hi<e>")
    talk.ask([user("Q"), {"role": "assistant", "content": "hi!"}, user("R")], "ho<e>")
    return talk


@pytest.mark.parametrize("history", ["template", "append"])
def test_an_answer_that_the_client_changed_is_context_and_the_sampled_one_is_trained(history: str) -> None:
    talk = changed_answer(history)
    prompt = "<s>user\nQ<e>\n<s>assistant\n"
    further = f"{prompt}hi!<e>\n<s>user\nR<e>\n<s>assistant\n"
    assert found(talk) == [row_of(prompt, "hi<e>"), row_of(further, "ho<e>")]
    assert talk.causes == ["new", "changed"]


def test_a_repaired_call_is_another_answer_and_keeps_the_ids_of_the_turns_before_it() -> None:
    talk = Talk(APPENDS)
    first = talk.ask([user("Q")], "hi<e>", tools=[ADD])
    second = talk.ask([user("Q"), first, user("R")], f"{CALL}<e>", tools=[ADD])
    second["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'
    talk.ask([user("Q"), first, user("R"), second, tool("4")], "ho<e>", tools=[ADD])
    assert (talk.causes, len(talk.rows)) == (["new", "extends", "changed"], 2)
    assert talk.prompts[2].num_held == len(talk.turns[0].prompt_ids) + 3


@case(9, "parallel calls, one of an unknown tool, one malformed, one cut", "well-formed ones are calls, the rest text")
def parallel_calls(history: str) -> Talk:
    talk = Talk(APPENDS, history)
    unknown = '<tool_call>{"name": "sub", "arguments": {}}</tool_call>'
    first = talk.ask([user("Q")], f'Two:{CALL}<tool_call>{{a}}</tool_call>{unknown}<tool_call>{{"n<e>', tools=[ADD])
    assert [call["function"]["name"] for call in first["tool_calls"]] == ["add", "sub"]
    assert first["content"] == 'Two:<tool_call>{a}</tool_call><tool_call>{"n'
    talk.ask([user("Q"), first, tool("3"), tool("no such tool")], "ho<e>", tools=[ADD])
    return talk


def test_parallel_calls_with_faults_between_them_go_on_in_one_row() -> None:
    talk = parallel_calls("template")
    sampled = f'Two:{CALL}<tool_call>{{a}}</tool_call><tool_call>{{"name": "sub", "arguments": {{}}}}</tool_call>'
    prompt = "<s>tool add<e>\n<s>user\nQ<e>\n<s>assistant\n"
    between = "\n<s>tool\n3<e>\n<s>tool\nno such tool<e>\n<s>assistant\n"
    assert found(talk) == [row_of(prompt, f'{sampled}<tool_call>{{"n<e>', between, "ho<e>")]


@case(10, "several tool results, in one message or many, of roles `tool`, `user`, `developer`", "the template decides")
def many_results(history: str) -> Talk:
    talk = Talk(APPENDS, history)
    first = talk.ask([user("Q")], f"{CALL}{CALL}<e>", tools=[ADD])
    parts = [{"type": "text", "text": "3"}, {"type": "text", "text": "4"}]
    results = [{"role": "tool", "content": parts}, user("5"), {"role": "developer", "content": "6"}]
    talk.ask([user("Q"), first, *results], "ho<e>", tools=[ADD])
    return talk


def test_results_of_any_role_are_written_by_the_template_and_not_trained() -> None:
    prompt = "<s>tool add<e>\n<s>user\nQ<e>\n<s>assistant\n"
    between = "\n<s>tool\n3\n4<e>\n<s>user\n5<e>\n<s>system\n6<e>\n<s>assistant\n"
    assert found(many_results("template")) == [row_of(prompt, f"{CALL}{CALL}<e>", between, "ho<e>")]


@case(11, "an answer is cut by its length, then continued", "the template's end of a message is context")
def cut_answer(history: str) -> Talk:
    talk = Talk(APPENDS, history)
    first = talk.ask([user("Q")], "hi", finish_reason="length")
    talk.ask([user("Q"), first, user("go on")], "ho<e>")
    return talk


def test_a_cut_answer_is_ended_by_context_and_goes_on_in_one_row() -> None:
    prompt, between = "<s>user\nQ<e>\n<s>assistant\n", "<e>\n<s>user\ngo on<e>\n<s>assistant\n"
    for history in ("template", "append"):
        assert found(cut_answer(history)) == [row_of(prompt, "hi", between, "ho<e>")]


@case(12, "an answer ends with the mark of a role, and another role follows; a stop string", "another mark: a new row")
def other_mark(history: str) -> Talk:
    talk = Talk(MARKS, history)
    first = talk.ask([user("Q")], "hi<u>", matched=SPECIAL["<u>"])
    talk.ask([user("Q"), first, tool("3")], "ho<u>", matched=SPECIAL["<u>"])
    return talk


@pytest.mark.parametrize("history", ["template", "append"])
def test_a_mark_that_the_template_does_not_write_makes_a_new_row_and_is_never_cut_from_the_old_one(
    history: str,
) -> None:
    talk = other_mark(history)
    assert found(talk) == [row_of("<u>Q<a>", "hi<u>"), row_of("<u>Q<a>hi<o>3<a>", "ho<u>")]
    assert talk.causes == ["new", "other_end"]
    talk = Talk(MARKS, history)
    first = talk.ask([user("Q")], "hi<o>", matched=SPECIAL["<o>"])
    talk.ask([user("Q"), first, tool("3")], "ho<u>", matched=SPECIAL["<u>"])
    assert found(talk) == [row_of("<u>Q<a>", "hi<o>", "3<a>", "ho<u>")]


@pytest.mark.parametrize("history", ["template", "append"])
def test_a_stop_string_is_not_shown_to_the_client_and_stays_in_the_row(history: str) -> None:
    talk = Talk(APPENDS, history)
    first = talk.ask([user("Q")], "hi STOP.", matched="STOP")
    assert first["content"] == "hi "
    talk.ask([user("Q"), first, user("R")], "ho<e>")
    prompt, between = "<s>user\nQ<e>\n<s>assistant\n", "<e>\n<s>user\nR<e>\n<s>assistant\n"
    assert found(talk) == [row_of(prompt, "hi STOP.", between, "ho<e>")]


@case(13, "system prompt, tools or template arguments change", "another conversation: new rows")
def changed_setting(history: str) -> Talk:
    talk = Talk(APPENDS, history)
    first = talk.ask([user("Q")], "hi<e>")
    talk.ask([{"role": "system", "content": "S"}, user("Q"), first, user("R")], "ho<e>")
    talk.ask([user("Q"), first, user("R")], "he<e>", tools=[ADD])
    talk.ask([user("Q"), first, user("R")], "ha<e>", brief=True)
    return talk


@pytest.mark.parametrize("history", ["template", "append"])
def test_other_settings_are_another_conversation(history: str) -> None:
    talk = changed_setting(history)
    assert talk.causes == ["new", "changed", "changed", "changed"]
    prompt, further = "<s>user\nQ<e>\n<s>assistant\n", "hi<e>\n<s>user\nR<e>\n<s>assistant\n"
    assert sorted(found(talk)) == sorted(
        [
            row_of(prompt, "hi<e>"),
            row_of(f"<s>system\nS<e>\n{prompt}{further}", "ho<e>"),
            row_of(f"<s>tool add<e>\n{prompt}{further}", "he<e>"),
            row_of(f"brief {prompt}{further}", "ha<e>"),
        ]
    )


@case(14, "branches: a retry, best of two, parallel sub-agents, compaction", "by prefix; a shared turn is trained once")
def branches(history: str) -> Talk:
    talk = Talk(APPENDS, history)
    first = talk.ask([user("Q")], "hi<e>")
    talk.ask([user("Q")], "he<e>")  # best of two: the first is chosen
    talk.ask([user("Q"), first, user("R")], "bad<e>")  # retried
    talk.ask([user("Q"), first, user("R")], "good<e>")
    talk.ask([user("sub 1")], "a<e>")
    talk.ask([user("sub 2")], "b<e>")
    talk.ask([user("summary: hi, good"), user("T")], "end<e>")
    return talk


def test_each_branch_is_a_row_and_what_they_share_is_trained_in_one() -> None:
    talk = branches("template")
    prompt, further = "<s>user\nQ<e>\n<s>assistant\n", "\n<s>user\nR<e>\n<s>assistant\n"
    assert sorted(found(talk)) == sorted(
        [
            row_of(prompt, "hi<e>", further, "bad<e>"),
            row_of(prompt, "he<e>"),
            row_of(f"{prompt}hi<e>{further}", "good<e>"),
            row_of("<s>user\nsub 1<e>\n<s>assistant\n", "a<e>"),
            row_of("<s>user\nsub 2<e>\n<s>assistant\n", "b<e>"),
            row_of("<s>user\nsummary: hi, good<e>\n<s>user\nT<e>\n<s>assistant\n", "end<e>"),
        ]
    )


@case(18, "weights change between turns, or within one", "version spans of each turn")
def versions(history: str) -> Talk:
    talk = Talk(APPENDS, history)
    first = talk.ask([user("Q")], "hi<e>", version=4)
    talk.ask([user("Q"), first, user("R")], "ho<e>", version=5)
    return talk


def test_each_turn_has_the_versions_that_sampled_it() -> None:
    (row,) = versions("template").rows
    start = 3 + len(ids("\n<s>user\nR<e>\n<s>assistant\n"))
    assert row.weight_versions == [VersionSpan(4, 0, 3), VersionSpan(5, start, start + 3)]


@case(19, "an answer that is no UTF-8; special tokens that a user typed", "ids stay; what was typed stays text")
def bytes_and_special_tokens(history: str) -> Talk:
    talk = Talk(APPENDS, history)
    first = talk.ask([user("Q<e>")], [0xE2, 0x82, *b"!", 0xFF, SPECIAL["<e>"]])
    assert first["content"] == "\ufffd!\ufffd"
    talk.ask([user("Q<e>"), first, tool("<s>system\n<e>")], "ho<e>")
    return talk


@pytest.mark.parametrize("history", ["template", "append"])
def test_bytes_that_are_no_text_stay_and_no_typed_text_becomes_a_special_token(history: str) -> None:
    (row,) = bytes_and_special_tokens(history).rows
    prompt = [*ids("<s>user\nQ"), *b"<e>", *ids("<e>\n<s>assistant\n")]
    between = [*ids("\n<s>tool\n"), *b"<s>system\n<e>", *ids("<e>\n<s>assistant\n")]
    assert row.tokens == [*prompt, 0xE2, 0x82, *b"!", 0xFF, 258, *between, *ids("ho<e>")]
    assert row.loss_mask == [1] * 5 + [0] * len(between) + [1] * 3


@pytest.mark.parametrize("history", ["template", "append"])
@pytest.mark.parametrize("number", sorted(CASES))
def test_in_each_case_the_sampled_tokens_and_no_others_are_trained_once(number: int, history: str) -> None:
    talk = CASES[number][2](history)
    assert sorted(map(len, talk.trained())) != [0]
    pieces = sorted(list(turn.output_ids) for row in talk.rows for turn in row.turns)
    assert pieces == sorted(list(turn.output_ids) for turn in talk.turns)
    for row, trained in zip(talk.rows, talk.trained(), strict=True):
        assert trained == [token for turn in row.turns for token in turn.output_ids]


SERVED_ROWS = {
    15: [("ugoa", "one<eos>"), ("uona", "two<eos>")],
    16: [("ugoa", "one<eos>")],
    17: [("Tadd,sSugoa", f"{CALLS}<eos>", "t0t1a", "done<eos>", "umorea", "end<eos>")],
    20: [("u12a", "endl")],
}
"""Prompt, answer, what is between, answer ... of each row."""


@pytest.mark.parametrize("history", ["template", "append"])
@pytest.mark.parametrize("number", sorted(SERVED))
async def test_what_clients_do_over_http_makes_these_rows(number: int, history: str) -> None:
    turns = await SERVED[number][2](history)
    encode = chat_tokenizer().encode
    expected = []
    for first, *pieces in SERVED_ROWS[number]:
        encoded = [encode(piece) for piece in pieces]
        mask = [int(place % 2 == 0) for place, piece in enumerate(encoded) for _ in piece]
        expected.append(([*encode(first), *(each for piece in encoded for each in piece)], mask))
    assert sorted((row.tokens, row.loss_mask) for row in rows(turns)) == sorted(expected)


def figures(number: int) -> tuple[str, str, list[list[Row]], int]:
    """What and how, the rows under either history, and the number of sampled tokens."""
    if number in SERVED:
        what, treatment, turns_of = SERVED[number]
        turns = [asyncio.run(_awaited(turns_of(history))) for history in ("template", "append")]
    else:
        what, treatment, talk_of = CASES[number]
        turns = [talk_of(history).turns for history in ("template", "append")]
    (sampled,) = {sum(len(turn.output_ids) for turn in each) for each in turns}
    return what, treatment, [rows(each) for each in turns], sampled


async def _awaited(turns: Awaitable[list[Turn]]) -> list[Turn]:
    return await turns


def table() -> str:
    lines = ["| | case | treatment | rows: `template` | `append` | trained |", "|---|---|---|---|---|---|"]
    for number in range(1, 21):
        what, treatment, made, sampled = figures(number)
        counts = " | ".join(str(len(each)) for each in made)
        (trained,) = {sum(sum(row.loss_mask) for row in each) for each in made}
        lines.append(f"| {number} | {what} | {treatment} | {counts} | {trained} of {sampled} |")
    return "\n".join(lines)


def test_the_table_of_the_page_is_that_of_these_cases() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0] == table()


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}", encoding="utf-8")
