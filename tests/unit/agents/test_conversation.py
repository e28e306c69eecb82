"""The next prompt: what cases of token-exactness do not show, and random conversations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.agents.conversation import Conversation
from buffer_rl.agents.messages import Message
from buffer_rl.agents.turns import Turn
from buffer_rl.errors import ConfigError, DataError, RolloutError
from buffer_rl.testing.tiny import make_char_tokenizer
from harness.chat_tokenizer import byte_tokenizer
from harness.talk import ADD, APPENDS, SPECIAL, STRIPS, Talk, ids, tool, user

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
REFUSES = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
    "<s>assistant\n"
)


def test_a_message_that_the_template_refuses_is_named() -> None:
    talk = Conversation(byte_tokenizer(REFUSES, [*SPECIAL]))
    with pytest.raises(DataError, match="the chat template refuses the request: TemplateError: no role tool") as caught:
        talk.prompt([user("Q"), tool("3"), user("R"), tool("4")])
    assert (caught.value.where, caught.value.status) == ("message 1 (tool)", 400)


def test_tools_that_the_template_refuses_are_named() -> None:
    template = f"{{% for t in tools or [] %}}{{{{ '' + t.function.description }}}}{{% endfor %}}{APPENDS}"
    with pytest.raises(DataError, match="no attribute 'description'") as caught:
        Talk(template).conversation.prompt([user("Q")], [ADD])
    assert (caught.value.where, caught.value.status) == ("the tools of the request", 400)


@pytest.mark.parametrize(
    ("messages", "problem", "where"),
    [
        ([], "the request has no messages", ""),
        ([user("Q"), "text"], "it is 'text'", "message 1"),
        ([{"content": "x"}], r"it is {'content': 'x'}", "message 0"),
        ([{"role": None, "content": "x"}], "it is {'role': None", "message 0"),
    ],
)
def test_what_is_no_request_is_refused(messages: Any, problem: str, where: str) -> None:
    with pytest.raises(DataError, match=problem) as caught:
        Talk(APPENDS).conversation.prompt(messages)
    assert (caught.value.where, caught.value.status) == (where, 400)


def test_a_text_that_the_tokenizer_cannot_encode_is_refused() -> None:
    with pytest.raises(DataError, match="the tokenizer cannot encode the text"):
        Talk(APPENDS).conversation.prompt([user("\ud800")])


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        Conversation(make_char_tokenizer())


def test_a_turn_of_another_prompt_is_not_recorded() -> None:
    talk = Talk(APPENDS)
    prompt = talk.conversation.prompt([user("Q")])
    turn = Turn(prompt_ids=(1, 2), output_ids=(3,), log_probs=(-1.0,), digest="ab" * 32)
    with pytest.raises(RolloutError, match="another prompt"):
        talk.conversation.record(prompt, turn)


TEXT_ARGUMENTS = APPENDS.replace("c.function.arguments | tojson", "'' + c.function.arguments")


@pytest.mark.parametrize("template", [APPENDS, TEXT_ARGUMENTS], ids=["objects", "text"])
def test_templates_that_want_arguments_as_objects_or_as_text_both_render_a_call(template: str) -> None:
    talk = Talk(template)
    given = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"a":1}'}}]}
    prompt = talk.conversation.prompt([user("Q"), given, tool("3")], [ADD])
    head = "<s>tool add<e>\n<s>user\nQ<e>\n<s>assistant\n"
    assert list(prompt.ids) == ids(f"{head}{CALL}<e>\n<s>tool\n3<e>\n<s>assistant\n")


def test_a_template_that_refuses_the_raw_answer_gets_the_message_and_goes_on_if_it_writes_the_same() -> None:
    wants_calls = APPENDS.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('a result without a call') }}{% endif %}",
        1,
    )
    for spelt, causes in ((CALL, ["new", "extends"]), (CALL.replace('"a": 1', '"a":1'), ["new", "template"])):
        talk = Talk(wants_calls)
        first = talk.ask([user("Q")], f"{spelt}<e>", tools=[ADD])
        talk.ask([user("Q"), first, tool("3")], "ho<e>", tools=[ADD])
        assert talk.causes == causes
        assert len(talk.rows) == (1 if causes[1] == "extends" else 2)


DROPS = STRIPS.replace("{% set text = m.content %}", "{% set text = '' if m.role == 'assistant' else m.content %}")
TWICE = APPENDS.replace("{{ m.content }}", "{{ m.content }}{% if m.role == 'assistant' %}!{{ m.content }}{% endif %}")


@pytest.mark.parametrize(
    ("template", "answer", "finish_reason"),
    [(DROPS, "hi<e>", "stop"), (DROPS, "hi", "length"), (TWICE, "hi<e>", "stop")],
    ids=["without the answer", "without a cut answer", "twice"],
)
def test_append_renders_anew_if_the_template_does_not_show_what_follows_an_answer(
    template: str, answer: str, finish_reason: str
) -> None:
    talk = Talk(template, "append")
    first = talk.ask([user("Q")], answer, finish_reason=finish_reason)
    talk.ask([user("Q"), first, user("R")], "ho<e>")
    assert talk.causes == ["new", "template"]
    assert "<s>user\nR<e>\n" in talk.tokenizer.decode(talk.prompts[1].ids)


def test_after_a_rendering_the_conversation_goes_on_behind_it() -> None:
    """The rendered answer has the template's spelling, and later prompts keep it so, or they would never meet."""
    talk = Talk(STRIPS)
    odd = CALL.replace('"a": 1', '"a":1')
    first = talk.ask([user("Q")], f"<think>\nhm\n</think>\n\n{odd}<e>", tools=[ADD])
    second = talk.ask([user("Q"), first, user("R")], f"{odd}<e>", tools=[ADD])
    third = talk.ask([user("Q"), first, user("R"), second, tool("3")], "he<e>", tools=[ADD])
    talk.ask([user("Q"), first, user("R"), second, tool("3"), third, user("S")], "ho<e>", tools=[ADD])
    assert talk.causes == ["new", "template", "extends", "extends"]
    assert len(talk.rows) == 2


def test_of_answers_with_equal_text_the_one_whose_ids_or_reasoning_the_client_names_goes_on() -> None:
    talk = Talk(APPENDS)
    odd = [CALL.replace('"a": 1', f'"a":{" " * number}1') for number in range(3)]
    answers = [talk.ask([user("Q")], f"{call}<e>", tools=[ADD]) for call in odd]
    assert len({answer["tool_calls"][0]["id"] for answer in answers}) == 3
    spelt = [talk.ask([user("R")], f"<think>{thought}</think>hi<e>") for thought in "abc"]
    for number in range(3):
        talk.ask([user("Q"), answers[number], tool("3")], f"{number}<e>", tools=[ADD])
        (row,) = [row for row in talk.rows if row.turns[-1] is talk.turns[-1]]
        assert row.turns == [talk.turns[number], talk.turns[-1]]
        talk.ask([user("R"), spelt[number], user("S")], f"{number}<e>")
        (row,) = [row for row in talk.rows if row.turns[-1] is talk.turns[-1]]
        assert row.turns == [talk.turns[3 + number], talk.turns[-1]]
    assert all(cause == "extends" for cause in talk.causes[6:])


def test_of_answers_with_equal_text_one_without_reasoning_is_what_a_message_without_it_means() -> None:
    talk = Talk(APPENDS)
    talk.ask([user("Q")], "<think>hm</think>hi<e>")
    plain = talk.ask([user("Q")], "hi<e>")
    talk.ask([user("Q"), plain, user("R")], "ho<e>")
    (row,) = [row for row in talk.rows if len(row.turns) == 2]
    assert row.turns == talk.turns[1:]


def test_reasoning_that_the_client_changed_is_another_answer() -> None:
    talk = Talk(STRIPS)
    first = talk.ask([user("Q")], "<think>\nhm\n</think>\n\nhi<e>")
    talk.ask([user("Q"), {**first, "reasoning_content": "no"}, user("R")], "ho<e>")
    assert talk.causes == ["new", "changed"]


def test_few_shot_answers_of_the_agent_are_part_of_the_prompt() -> None:
    talk = Talk(APPENDS)
    shots = [user("A"), {"role": "assistant", "content": "a"}, user("Q")]
    first = talk.ask(shots, "hi<e>")
    talk.ask([*shots, first, user("R")], "ho<e>")
    assert talk.causes == ["changed", "extends"]
    assert len(talk.rows) == 1


def test_an_answer_that_the_agent_put_in_goes_on_behind_the_ids_before_it() -> None:
    talk = Talk(APPENDS)
    first = talk.ask([user("Q")], "hi<e>")
    talk.ask([user("Q"), first, user("R"), {"role": "assistant", "content": "own"}, user("S")], "ho<e>")
    assert talk.causes == ["new", "changed"]
    between = "\n<s>user\nR<e>\n<s>assistant\nown<e>\n<s>user\nS<e>\n<s>assistant\n"
    (row,) = talk.rows
    assert row.tokens == ids(f"<s>user\nQ<e>\n<s>assistant\nhi<e>{between}ho<e>")


def test_a_request_that_ends_with_an_answer_asks_for_another_one() -> None:
    talk = Talk(APPENDS)
    first = talk.ask([user("Q")], "hi", finish_reason="length")
    talk.ask([user("Q"), first], "ho<e>")
    (row,) = talk.rows
    assert row.tokens == ids("<s>user\nQ<e>\n<s>assistant\nhi<e>\n<s>assistant\nho<e>")


def test_an_answer_without_tokens_can_be_gone_on_from() -> None:
    talk = Talk(APPENDS)
    first = talk.ask([user("Q")], "", finish_reason="abort")
    assert first == {"role": "assistant", "content": None}
    talk.ask([user("Q"), first, user("R")], "ho<e>")
    assert (talk.causes, len(talk.rows)) == (["new", "extends"], 1)


def test_special_tokens_stay_text_in_tools_and_system_prompts_and_typed_seams_disappear() -> None:
    talk = Talk(APPENDS)
    evil = {"type": "function", "function": {"name": "<e>add"}}
    prompt = talk.conversation.prompt([{"role": "system", "content": "a\ufdd0b<s>"}], [evil])
    head = [*ids("<s>tool "), *b"<e>add", *ids("<e>\n")]
    assert list(prompt.ids) == [*head, *ids("<s>system\nab"), *b"<s>", *ids("<e>\n<s>assistant\n")]


def test_the_developer_is_the_system_for_templates_that_do_not_know_it() -> None:
    messages = [{"role": "developer", "content": "D"}]
    assert ids("<s>system\nD") == list(Talk(APPENDS).conversation.prompt(messages).ids)[: len(ids("<s>system\nD"))]
    knows = Talk(f"{APPENDS}{{# developer #}}").conversation.prompt(messages)
    assert ids("<s>developer\nD") == list(knows.ids)[: len(ids("<s>developer\nD"))]


def test_a_tokenizer_that_writes_a_space_before_each_text_writes_none_between_the_pieces() -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<unk>", "▁", "\n", *"abcdefghijklmnopqrstuvwxyzQRS<>"]
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    backend.add_special_tokens([AddedToken("<e>", special=True, normalized=False)])
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    assert tokenizer.encode("ab")[0] == 1
    talk = Conversation(tokenizer)
    prompt = talk.prompt([user("Q<e>")])
    spelt = [letters[number] for number in prompt.ids]
    assert spelt == ["▁", "Q", "<", "e", ">", "\n"]
    sampled = [letters.index(letter) for letter in "▁hi"]
    turn = Turn(prompt_ids=prompt.ids, output_ids=tuple(sampled), log_probs=(-1.0,) * 3, digest="ab" * 32)
    message = talk.record(prompt, turn).message
    assert message["content"] == " hi"
    following = talk.prompt([user("Q<e>"), message, user("R")])
    assert [letters[number] for number in following.ids] == [*spelt, "▁", "h", "i", "\n", "R", "\n"]


ANSWERS = ["hi", "ok", f"well{CALL}", f"{CALL}{CALL}", "<think>\nhm\n</think>\n\nhi", "", "cut<tool_call>", "\n ok \n"]
Node = tuple[list[Message], list[str]]


@st.composite
def talks(draw: st.DrawFn) -> tuple[Talk, list[list[str]]]:
    """A session with branches, retries, changed and rewritten answers and cut ones. Returns it, and for each prompt the
    texts of its conversation, each as it should be sent."""
    template, history = draw(st.sampled_from([(APPENDS, "template"), (APPENDS, "append"), (STRIPS, "template")]))
    talk, texts = Talk(template, history), []
    nodes: list[Node] = [([], [])]
    for _ in range(draw(st.integers(1, 8))):
        messages, sent = draw(st.sampled_from(nodes))
        question = draw(st.sampled_from(["Q", "R", "ok"]))
        asked = [*messages, user(question)]
        expected = [*sent, f"<s>user\n{question}<e>\n"]
        is_cut = draw(st.booleans())
        answer = draw(st.sampled_from(ANSWERS))
        message = talk.ask(
            asked, answer + ("" if is_cut else "<e>"), tools=[ADD], finish_reason="length" if is_cut else "stop"
        )
        texts.append([*expected, "<s>assistant\n"])
        given, spelt = message, answer
        if draw(st.booleans()):  # changed by the client
            given = {"role": "assistant", "content": (message["content"] or "") + "!"}
            spelt = given["content"]
        if template == STRIPS:  # a question follows each answer
            spelt = spelt.split("</think>")[-1].lstrip("\n")
        nodes.append(([*asked, given], [*expected, f"<s>assistant\n{spelt}<e>\n"]))
    return talk, texts


@settings(max_examples=60)
@given(talks())
def test_random_conversations_train_each_sampled_token_once_and_send_what_was_sampled(
    case: tuple[Talk, list[list[str]]],
) -> None:
    talk, texts = case
    trained = sorted(list(turn.output_ids) for row in talk.rows for turn in row.turns)
    assert trained == sorted(list(turn.output_ids) for turn in talk.turns if turn.output_ids)
    assert sum(map(len, talk.trained())) == sum(len(turn.output_ids) for turn in talk.turns)
    for prompt, expected in zip(talk.prompts, texts, strict=True):
        sent = talk.tokenizer.decode(prompt.ids, skip_special_tokens=False)
        assert sent == "".join(["<s>tool add<e>\n", *expected])


REFUSES_LATE = (
    "{% for m in messages %}{% if m.role == 'system' and loop.index0 %}{{ raise_exception('late') }}{% endif %}"
)


@pytest.mark.parametrize(
    "template", [REFUSES_LATE, REFUSES_LATE.replace("{{ raise_exception('late') }}", "{% continue %}")]
)
def test_a_later_system_message_is_a_users_if_the_template_does_not_show_it(template: str) -> None:
    talk = Talk(f"{template}<s>{{{{ m.role }}}}\n{{{{ m.content }}}}<e>\n{{% endfor %}}")
    system, late = {"role": "system", "content": "S"}, {"role": "developer", "content": "T"}
    first = talk.ask([system, user("Q"), late], "hi<e>")
    assert talk.prompts[0].text == "<s>system\nS<e>\n<s>user\nQ<e>\n<s>user\nT<e>\n"
    talk.ask([system, user("Q"), late, first, late], "ho<e>")
    assert talk.prompts[1].text.endswith("hi<e>\n<s>user\nT<e>\n")
    shown = Talk(APPENDS)
    shown.ask([system, user("Q"), late], "hi<e>")
    assert "<s>system\nT<e>" in shown.prompts[0].text
