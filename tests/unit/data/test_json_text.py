"""JSON text in prompts, which tables and OpenAI's form of tool calls have, is decoded, and the user is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cli import main
from buffer_rl.data import files
from buffer_rl.data.dataset import PromptDataset, RowKeys
from buffer_rl.data.reader import read_dataset
from buffer_rl.errors import DataError
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, Sample
from buffer_rl.rollout.prompts import PromptEncoder
from buffer_rl.testing.tiny import make_char_tokenizer
from buffer_rl.verbs.train import read_data

TEMPLATES = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "chat_templates"
ARGUMENTS = {"city": "Köln", "days": 2, "also": ["a"]}
TEXT = '{"city":"K\\u00f6ln", "days": 2,"also": ["a"]}'
LOOP = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
AS_JSON = LOOP + "{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}{% endfor %}"
AS_ITEMS = LOOP + "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
AS_TEXT = LOOP + "{{ 'json ' + c.function.arguments }}{% endfor %}{% endfor %}"


def talk(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call_0001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0001", "name": "weather", "content": "rain"},
        {"role": "assistant", "content": "wet"},
    ]


def read(folder: Path, *prompts: Any, suffix: str = ".jsonl", **keys: Any) -> PromptDataset:
    path = folder / f"rows{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"prompt": list(prompts)}), path)
    return read_dataset(str(path), RowKeys(**keys))


def rendered(prompt: Any, template: str) -> str:
    tokenizer = make_char_tokenizer()
    tokenizer.chat_template = template
    return str(PromptEncoder(tokenizer).rendered(Sample(uid=GroupUid("s", 0, 0), prompt=prompt)))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_prompt_that_is_the_json_text_of_chat_messages_is_these_messages(tmp_path: Path, suffix: str) -> None:
    messages = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": None, "tool_calls": [{"a": None}]},
    ]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    dataset = read(tmp_path, json.dumps(messages), "plain", " \n" + json.dumps(parts), suffix=suffix)
    assert [row.prompt for row in dataset] == [messages, "plain", parts]
    assert dataset.notices == [
        f"{tmp_path}/rows{suffix}: the prompts of 2 rows are JSON text of chat messages, and are read as messages "
        "(--no-decode-json leaves them as text)"
    ]
    as_text = read(tmp_path, json.dumps(messages), "plain", suffix=suffix, decode_json=False)
    assert [row.prompt for row in as_text] == [json.dumps(messages), "plain"]
    assert as_text.notices == []


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3] sums to",
        "[1, 2]",
        "[]",
        '["role", "content"]',
        '[{"role": "user"}]',
        '[{"role": "user", "content": 3}]',
        '[{"role": "", "content": "a"}]',
        '[{"role": "user", "content": "a"}, 3]',
        '{"role": "user", "content": "a"}',
        '[{"role": "user", "content": "a"}',
        "[" * 3000,
    ],
)
def test_any_other_text_stays_a_text(tmp_path: Path, text: str) -> None:
    dataset = read(tmp_path, text)
    assert (dataset[0].prompt, dataset.notices) == (text, [])


def test_a_lone_surrogate_in_decoded_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:1: the prompt holds \\ud800"):
        read(tmp_path, '[{"role": "user", "content": "\\ud800"}]')


def test_arguments_of_tool_calls_are_decoded_where_they_are_the_text_of_an_object(tmp_path: Path) -> None:
    others = ["", "{", "[1]", "null", '"a"', None, 3, {"a": "{}"}]
    dataset = read(tmp_path, talk(TEXT), talk(ARGUMENTS), *map(talk, others), json.dumps(talk(TEXT)))
    prompts = [row.prompt for row in dataset]
    assert prompts == [talk(ARGUMENTS), talk(ARGUMENTS), *map(talk, others), talk(ARGUMENTS)]
    assert dataset.notices[1].startswith(f"{tmp_path}/rows.jsonl: the arguments of tool calls in 2 rows are JSON text")
    assert read(tmp_path, talk(TEXT), decode_json=False)[0].prompt == talk(TEXT)


def test_the_form_without_function_is_decoded_too_and_strange_calls_are_left_alone(tmp_path: Path) -> None:
    def message(calls: Any) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": "", "tool_calls": calls}]

    strange = [
        message(calls) for calls in ("text", [3, "x"], [{"function": "f", "arguments": 3}], [{"function": None}])
    ]
    dataset = read(tmp_path, message([{"name": "weather", "arguments": TEXT}]), *strange)
    assert [row.prompt for row in dataset] == [message([{"name": "weather", "arguments": ARGUMENTS}]), *strange]


def test_rows_that_are_read_on_access_are_decoded_and_counted_as_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["plain", talk(TEXT), json.dumps(talk(TEXT)), [{"role": "user", "content": "hi"}]] * 3
    held = read(tmp_path, *prompts)
    monkeypatch.setattr(files, "MIN_BYTES", 1)
    on_access = read(tmp_path, *prompts)
    assert type(on_access.rows) is not type(held.rows)
    assert list(on_access) == list(held)
    assert on_access.notices == held.notices
    assert len(held.notices) == 2


def test_what_is_decoded_is_no_other_data_for_a_resume(tmp_path: Path) -> None:
    assert read(tmp_path, talk(TEXT)).source_hash == read(tmp_path, talk(TEXT), decode_json=False).source_hash


def test_a_template_writes_the_arguments_once_and_one_that_wants_text_names_the_option(tmp_path: Path) -> None:
    prompt = read(tmp_path, talk(TEXT))[0].prompt
    assert rendered(prompt, AS_JSON) == 'hi{"city": "Köln", "days": 2, "also": ["a"]}rainwet'
    assert rendered(prompt, AS_ITEMS) == "city=Köln;days=2;also=['a'];"
    with pytest.raises(DataError, match="--no-decode-json"):
        rendered(prompt, AS_TEXT)
    as_text = read(tmp_path, talk(TEXT), decode_json=False)[0].prompt
    assert rendered(as_text, AS_TEXT) == f"json {TEXT}"


PUBLIC = ("glm4moe", "gptoss", "lfm2_2_5", "llama3_1", "llama3_2", "nemotron_3_nano", "nemotron_3_super")
PUBLIC += ("nemotron_3_ultra", "qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_instruct_2507")


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason=f"there are no public chat templates in {TEMPLATES}")
@pytest.mark.parametrize("name", PUBLIC)
def test_public_templates_write_arguments_of_openais_form_once(tmp_path: Path, name: str) -> None:
    template = "{% set bos_token = '' %}" + (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    text = rendered(read(tmp_path, talk(TEXT))[0].prompt, template)
    assert "Köln" in text
    assert '\\"' not in text


def test_a_run_reports_what_is_decoded_of_training_and_evaluation_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = read(tmp_path, talk(TEXT), "plain").path
    args = compose(CORE_SECTIONS)(prompt_data=[path], eval_prompt_data=[f"dev={path}"])
    assert [file.use for file in read_data(args, PluginRegistry())] == ["train", "eval/dev"]
    line = f"buffer-rl: notice: {path}: the arguments of tool calls in 1 row are JSON text"
    assert [text.startswith(line) for text in capsys.readouterr().err.splitlines()] == [True, True]


def test_validation_reports_what_is_decoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = read(tmp_path, talk(TEXT), json.dumps(talk(TEXT))).path
    assert main(["data", "validate", path]) == 0
    notices = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2].startswith(f"notice: {path}: the ") for line in notices] == [True, True]
    assert main(["data", "validate", "--no-decode-json", path]) == 0
    assert capsys.readouterr().err == ""
