from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError, DataError, RolloutError
from buffer_rl.options.section import compose
from buffer_rl.records.groups import Sample
from buffer_rl.rollout.prompts import PromptEncoder, load_tokenizer
from buffer_rl.testing.tiny import make_char_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


class CountingTokenizer:
    """Counts how often the real tokenizer is asked."""

    def __init__(self) -> None:
        self.inner = make_char_tokenizer()
        self.chat_template = None
        self.calls = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.calls += 1
        return self.inner.encode(text, add_special_tokens=add_special_tokens)


def with_template() -> Any:
    tokenizer = make_char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_a_model_folder_without_tokenizer_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(RolloutError, match="tokenizer"):
        load_tokenizer(str(tmp_path))


def test_plain_text_is_encoded_as_it_is_by_a_tokenizer_that_adds_nothing() -> None:
    tokenizer = make_char_tokenizer("ab+")
    assert PromptEncoder(tokenizer).encode(Sample(prompt="a+b")) == [3, 5, 4]


def test_chat_messages_go_through_the_template() -> None:
    tokenizer = with_template()
    tokens = PromptEncoder(tokenizer).encode(Sample(prompt=[{"role": "user", "content": "hi"}]))
    assert tokenizer.decode(tokens) == "<user>hi<a>"


def test_plain_text_becomes_a_user_message_if_the_template_is_asked_for() -> None:
    tokenizer = with_template()
    assert tokenizer.decode(PromptEncoder(tokenizer, apply_chat_template=True).encode(Sample(prompt="hi"))) == (
        "<user>hi<a>"
    )


def test_messages_without_a_template_are_a_clear_error() -> None:
    with pytest.raises(DataError, match="list of chat messages, but the tokenizer has no chat template"):
        PromptEncoder(make_char_tokenizer()).encode(Sample(prompt=[{"role": "user", "content": "hi"}]))


def test_a_template_that_refuses_is_a_data_error() -> None:
    tokenizer = with_template()
    tokenizer.chat_template = "{{ raise_exception('system comes first') }}"
    with pytest.raises(DataError, match="system comes first"):
        PromptEncoder(tokenizer).encode(Sample(prompt=[{"role": "user", "content": "hi"}]))


def test_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(DataError, match="no tokens"):
        PromptEncoder(make_char_tokenizer()).encode(Sample(prompt=""))


def test_one_prompt_is_tokenised_once_and_callers_cannot_change_it() -> None:
    tokenizer = CountingTokenizer()
    prompts = PromptEncoder(tokenizer)
    first = prompts.encode(Sample(prompt="abc"))
    first.append(99)
    assert len(prompts.encode(Sample(prompt="abc"))) == 3
    assert tokenizer.calls == 1


def test_a_missing_tokenizer_is_named(tmp_path: Any) -> None:
    with pytest.raises(RolloutError, match="--hf-checkpoint"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(RolloutError, match="not set"):
        load_tokenizer(None)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + TEMPLATE + "{% if think %}<t>{% endif %}"
)


def with_tool_template(**kwargs: Any) -> PromptEncoder:
    tokenizer = make_char_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    return PromptEncoder(tokenizer, apply_chat_template=True, **kwargs)


def test_a_row_s_tools_reach_the_template_and_are_part_of_what_is_cached() -> None:
    encoder = with_tool_template()
    for _ in range(2):
        plain = encoder.encode(Sample(prompt="hi"))
        tooled = encoder.encode(Sample(prompt="hi", metadata={"tools": TOOLS}))
        other = [{"type": "function", "function": {"name": "sub"}}]
        assert encoder.tokenizer.decode(encoder.encode(Sample(prompt="hi", metadata={"tools": other}))).startswith(
            "[sub]"
        )
        assert encoder.tokenizer.decode(plain) == "<user>hi<a>"
        assert encoder.tokenizer.decode(tooled) == "[add]<user>hi<a>"


def test_kwargs_of_the_template_reach_it() -> None:
    encoder = with_tool_template(template_kwargs={"think": True})
    assert encoder.tokenizer.decode(encoder.encode(Sample(prompt="hi"))) == "<user>hi<a><t>"
    encoder = with_tool_template(template_kwargs={"think": False})
    assert encoder.tokenizer.decode(encoder.encode(Sample(prompt="hi"))) == "<user>hi<a>"


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [({"tools": []}, "'tools' is set by buffer_rl"), ({"think": "False"}, "think is the text 'False'")],
)
def test_kwargs_that_cannot_mean_what_they_say_are_refused(kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        with_tool_template(template_kwargs=kwargs)
    assert caught.value.where == "--apply-chat-template-kwargs"


def test_tools_that_the_template_cannot_show_name_the_row() -> None:
    encoder = with_tool_template()
    encoder.tokenizer.chat_template = "{{ raise_exception('no tools here') if tools else 'x' }}"
    with pytest.raises(DataError, match="no tools here"):
        encoder.encode(Sample(prompt="hi", metadata={"tools": TOOLS}))


def test_plain_text_gets_the_special_tokens_that_the_tokenizer_adds_unless_they_are_switched_off() -> None:
    tokenizer = make_char_tokenizer(bos=True)
    bos, bare = tokenizer.bos_token_id, tokenizer.encode("1+1=", add_special_tokens=False)
    sample = Sample(prompt="1+1=")
    assert PromptEncoder(tokenizer).encode(sample) == tokenizer("1+1=")["input_ids"] == [bos, *bare]
    assert PromptEncoder(tokenizer, add_special_tokens=False).encode(sample) == bare
    for on in (True, False):
        args = compose(CORE_SECTIONS)(add_special_tokens=on)
        assert PromptEncoder.from_args(args, tokenizer).encode(sample) == [bos] * on + bare
    assert PromptEncoder(tokenizer).too_long(sample, len(bare))
    assert not PromptEncoder(tokenizer).too_long(sample, len(bare) + 1)


def test_no_bos_is_added_twice() -> None:
    tokenizer = make_char_tokenizer(bos=True)
    tokenizer.chat_template = "<bos>" + TEMPLATE
    bos = tokenizer.bos_token_id
    talk = Sample(prompt=[{"role": "user", "content": "hi"}])
    as_text = Sample(prompt="hi")
    written = Sample(prompt="<bos>hi")
    for encoder, sample in (
        (PromptEncoder(tokenizer), talk),
        (PromptEncoder(tokenizer, apply_chat_template=True), as_text),
        (PromptEncoder(tokenizer), written),
        (PromptEncoder(tokenizer), as_text),
    ):
        tokens = encoder.encode(sample)
        assert (tokens[0], tokens.count(bos)) == (bos, 1)
        rendered = Sample(prompt=encoder.rendered(sample))
        assert encoder.encode(rendered) == tokens


def test_a_template_without_bos_gets_none_and_neither_does_a_piece_of_text() -> None:
    tokenizer = make_char_tokenizer(bos=True)
    tokenizer.chat_template = TEMPLATE
    encoder = PromptEncoder(tokenizer)
    assert tokenizer.bos_token_id not in encoder.encode(Sample(prompt=[{"role": "user", "content": "hi"}]))
    assert tokenizer.bos_token_id not in encoder.encode_text("an answer")
