from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.data.dataset import RowKeys
from buffer_rl.data.files import split_slice
from buffer_rl.data.reader import read_dataset
from buffer_rl.errors import DataError


def write(folder: Path, *lines: str | bytes | dict[str, Any]) -> str:
    path = folder / "data.jsonl"
    encoded = [
        line if isinstance(line, bytes) else (json.dumps(line) if isinstance(line, dict) else line).encode()
        for line in lines
    ]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return str(path)


def refusal(source: str, keys: RowKeys | None = None) -> str:
    with pytest.raises(DataError) as caught:
        read_dataset(source, keys)
    return str(caught.value)


def test_text_and_chat_prompts_with_labels_and_metadata_are_read(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    path = write(
        tmp_path,
        {"prompt": "1+1=", "label": "2", "metadata": {"level": 1}, "id": 7},
        {"prompt": chat, "label": ["a", 1, None]},
    )
    first, second = read_dataset(path)
    assert (first.row, first.line, first.prompt, first.label, first.metadata, first.id) == (
        0, 1, "1+1=", "2", {"level": 1}, "7",
    )  # fmt: skip
    assert (second.row, second.prompt, second.label, second.metadata, second.id) == (1, chat, ["a", 1, None], {}, None)


def test_field_names_are_chosen_by_the_keys(tmp_path: Path) -> None:
    path = write(tmp_path, {"question": "q", "answer": 3, "extra": {"a": 1}, "uid": "x", "label": "other"})
    keys = RowKeys(prompt="question", label="answer", metadata="extra", id="uid")
    (row,) = read_dataset(path, keys)
    assert (row.prompt, row.label, row.metadata, row.id) == ("q", 3, {"a": 1}, "x")
    (row,) = read_dataset(path, RowKeys(prompt="question", label=None))
    assert row.label is None


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_dots_in_the_label_key_lead_into_mappings_unless_a_field_has_that_name(tmp_path: Path, suffix: str) -> None:
    """The rows of verl, which other fields of other kinds do not disturb; in a table each row has all fields."""
    whole = {"prompt": "a", "reward_model": {"style": "rule", "ground_truth": "72"}, "ability": "math"}
    rows = [whole, {**whole, "reward_model": None}, {**whole, "reward_model": {"style": "rule", "ground_truth": None}}]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        write(tmp_path, *rows, {**whole, "reward_model": "text"}, {**whole, "reward_model.ground_truth": 5})
        (tmp_path / "data.jsonl").rename(path)
    keys = RowKeys(label="reward_model.ground_truth")
    expected = ["72", None, None, None, 5][: 5 if suffix == ".jsonl" else 3]
    assert [row.label for row in read_dataset(str(path), keys)] == expected
    assert "no row has the label field 'reward_model.truth'" in refusal(str(path), RowKeys(label="reward_model.truth"))
    assert read_dataset(str(path)).facts.likely_label == "--label-key reward_model.ground_truth"


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    path = write(tmp_path, "", {"prompt": "a"}, "  \t", "", {"prompt": "b"})
    assert [(row.row, row.line) for row in read_dataset(path)] == [(0, 2), (1, 5)]
    path = write(tmp_path, "", {"prompt": "a"}, "", "{")
    assert f"{path}:4: invalid JSON" in refusal(path)


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a\u2028b\u0085c"}\r', {"prompt": "d"})
    assert [row.prompt for row in read_dataset(path)] == ["a\u2028b\u0085c", "d"]


def test_the_number_of_a_task_and_a_label_that_is_a_mapping_are_read(tmp_path: Path) -> None:
    (row,) = read_dataset(write(tmp_path, {"prompt": 3, "label": {"ground_truth": ["x", 1]}}))
    assert (row.prompt, row.label) == ("3", {"ground_truth": ["x", 1]})


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}')
    assert read_dataset(path)[0].prompt == "a"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "invalid JSON: Expecting property name enclosed in double quotes at column 2"),
        ('{"prompt": "a"} x', "invalid JSON: Extra data at column 17"),
        ('{"prompt": "a", "label": NaN}', "NaN is no JSON value"),
        ("[" * 100_000, "nested too deeply"),
        (b'{"prompt": "\xff"}', "invalid UTF-8 at byte 13"),
        ("[1]", "not a JSON object"),
        ("null", "not a JSON object"),
        ({"promt": "a"}, "no prompt: the field 'prompt' is missing (fields: 'promt'); did you mean promt?"),
        ({}, "fields: none"),
        ({"prompt": " \n"}, "the prompt 'prompt' is empty"),
        ({"prompt": []}, "empty list of chat messages"),
        ({"prompt": None}, "the prompt 'prompt' is null"),
        ({"prompt": 3.5}, "the prompt 'prompt' is a number"),
        ({"prompt": ["hi"]}, "message 0 of 'prompt' is text"),
        ({"prompt": [{"role": "user", "content": "a"}, {"content": "b"}]}, "message 1 of 'prompt' has no role"),
        ({"prompt": [{"role": "user"}]}, "message 0 of 'prompt' has no content"),
        ({"prompt": [{"role": "user", "content": 3}]}, "content of message 0 of 'prompt' is a number"),
        ({"prompt": "a", "label": [["x"]]}, "the label 'label' is or holds a list"),
        ({"prompt": "a", "metadata": "x"}, "the metadata 'metadata' is text, not a mapping"),
        ({"prompt": "a", "metadata": []}, "the metadata 'metadata' is a list"),
        ({"prompt": "a", "id": 1.5}, "the id 'id' is a number"),
        ({"prompt": "a", "id": True}, "the id 'id' is a boolean"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_reason(
    tmp_path: Path, line: str | bytes | dict[str, Any], reason: str
) -> None:
    path = write(tmp_path, {"prompt": "good"}, line, {"prompt": "good"})
    message = refusal(path)
    assert message.startswith(f"{path}:2: ")
    assert reason in message
    assert len(message.splitlines()) == 1


def test_an_assistant_message_may_call_tools_without_content(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert read_dataset(write(tmp_path, {"prompt": [message]}))[0].prompt == [message]


def test_duplicate_ids_name_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a", "id": "x"}, "", {"prompt": "b", "id": "y"}, {"prompt": "c", "id": "x"})
    message = refusal(path)
    assert message.startswith(f"{path}:4: ")
    assert "'x' is already used in line 1" in message


def test_bad_lines_are_told_at_once_up_to_twenty(tmp_path: Path) -> None:
    bad = [f'{" " * number}{{"prompt": }}' for number in range(23)]
    assert len(refusal(write(tmp_path, *bad[:20])).splitlines()) == 20
    path = write(tmp_path, *bad)
    lines = refusal(path).splitlines()
    assert [line.split(": ")[0] for line in lines[:20]] == [f"{path}:{number}" for number in range(1, 21)]
    assert lines[20] == "... and 3 more bad lines"


@pytest.mark.parametrize("min_bytes", [0, 1 << 60])
def test_lines_with_one_mistake_are_one_line_with_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, min_bytes: int
) -> None:
    monkeypatch.setattr("buffer_rl.data.files.MIN_BYTES", min_bytes)
    empty: dict[str, Any] = {"prompt": " "}
    lines = [{"prompt": "a"}, empty, {"promt": "a", "x": 1}, empty, {"prompt": 3.5}, {"x": 1}, empty]
    path = write(tmp_path, *lines)
    assert refusal(path).splitlines() == [
        f"{path}:2: the prompt 'prompt' is empty, also in 2 more lines",
        f"{path}:3: no prompt: the field 'prompt' is missing, also in 1 more line (fields: 'promt', 'x'); did you "
        "mean promt?",
        f"{path}:5: the prompt 'prompt' is a number, not text or a list of chat messages",
    ]


@pytest.mark.parametrize(
    ("fields", "keys", "flag"),
    [
        (("id", "question", "answer"), RowKeys(), "did you mean --input-key question --label-key answer?"),
        (("label", "text", "problem"), RowKeys(), "did you mean --input-key problem?"),
        (("text", "answer"), RowKeys(label=None), "did you mean --input-key text?"),
        (("messages", "tools"), RowKeys(flags="--eval-"), "did you mean --eval-input-key messages?"),
        (("question", "questions"), RowKeys(prompt="qestions"), "did you mean --input-key questions?"),
        (("x", "y"), RowKeys(), "--input-key FIELD names the field"),
    ],
)
def test_a_file_without_prompts_is_one_message_with_the_likely_flag(
    tmp_path: Path, fields: tuple[str, ...], keys: RowKeys, flag: str
) -> None:
    path = write(tmp_path, *[dict.fromkeys(fields, "a")] * 5800)
    what, hint = refusal(path, keys).splitlines()
    assert what.startswith(
        f"{path}:1: no prompt: the field {keys.prompt!r} is missing in all 5800 lines "
        f"(fields: {', '.join(map(repr, fields))})"
    )
    assert hint == f"  hint: {flag}"


@pytest.mark.parametrize(
    ("keys", "flag"),
    [
        (RowKeys(label="lable"), "did you mean --label-key answer?"),
        (RowKeys(label="anser", flags="--eval-"), "did you mean --eval-label-key answer?"),
    ],
)
def test_the_likely_label_field_is_named(tmp_path: Path, keys: RowKeys, flag: str) -> None:
    path = write(tmp_path, {"prompt": "a", "ground_truth": "b", "answer": "c"})
    what, hint = refusal(path, keys).splitlines()
    assert what.startswith(
        f"{path}: no row has the label field {keys.label!r} (fields: 'prompt', 'ground_truth', 'answer')"
    )
    assert hint == f"  hint: {flag}"


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    assert "the file has no rows" in refusal(write(tmp_path, "", " "))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert "the file has no rows" in refusal(str(tmp_path / "empty.jsonl"))
    absent = refusal(str(tmp_path / "absent.jsonl"))
    assert "no such file" in absent
    assert "hf download" not in absent + refusal("absent")
    assert "hf download --repo-type dataset openai/gsm8k --local-dir FOLDER" in refusal("openai/gsm8k")
    (tmp_path / "folder.parquet").mkdir()
    assert "there are no data files in the folder" in refusal(str(tmp_path / "folder.parquet"))
    assert "none of the 2 files has rows" in refusal(str(tmp_path))


def test_an_empty_slice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    for empty in ("[2:]", "[1:1]", "[-1:0]"):
        message = refusal(f"{path}@{empty}")
        assert "the slice holds no rows" in message
        assert "the file has 2 rows" in message


@pytest.mark.parametrize("text", ["a.jsonl@[1]", "a.jsonl@[1:2:3]", "a.jsonl@[a:b]", "a.jsonl@[1:2", "a.jsonl@[]"])
def test_a_malformed_slice_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="malformed slice"):
        split_slice(text)


def test_bad_lines_outside_the_slice_do_not_matter(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a"}, {"prompt": "b"}, "{")
    assert [row.prompt for row in read_dataset(f"{path}@[:2]")] == ["a", "b"]


ends = st.one_of(st.none(), st.integers(-9, 9))


@given(num_rows=st.integers(1, 7), start=ends, stop=ends)
def test_slices_are_those_of_python(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, start: int | None, stop: int | None
) -> None:
    path = write(tmp_path_factory.mktemp("slices"), *[{"prompt": f"p{row}"} for row in range(num_rows)])
    source = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    assert split_slice(source) == (path, slice(start, stop))
    wanted = [f"p{row}" for row in range(num_rows)][start:stop]
    if wanted:
        rows = read_dataset(source).rows
        assert [row.prompt for row in rows] == wanted
        assert [row.row for row in rows] == list(range(len(wanted)))
    else:
        assert "no rows" in refusal(source)


def test_the_source_hash_covers_bytes_slice_and_keys(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    whole = read_dataset(path).source_hash
    digest = hashlib.sha256(Path(path).read_bytes() + b'[0, 2, "prompt", "label", "metadata", "id"]').hexdigest()
    assert whole == digest[:12]
    assert read_dataset(f"{path}@[-2:9]").source_hash == whole
    others = {
        read_dataset(f"{path}@[:1]").source_hash,
        read_dataset(path, RowKeys(metadata="extra")).source_hash,
        read_dataset(write(tmp_path, {"prompt": "a"}, {"prompt": "c"})).source_hash,
    }
    assert len({whole, *others}) == 4


def test_a_chosen_label_key_that_no_row_has_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a", "answer": "1"})
    assert "no row has the label field 'anwser'" in refusal(path, RowKeys(label="anwser"))
    assert read_dataset(path)[0].label is None


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("row", "name"),
    [
        ('{"prompt": "a \\ud800"}', "prompt"),
        ('{"prompt": [{"role": "user", "content": [{"type": "text", "text": "\\udcff"}]}]}', "prompt"),
        ('{"prompt": "a", "label": ["b", "\\ud800"]}', "label"),
        ('{"prompt": "a", "metadata": {"\\ud800": 1}}', "metadata"),
        ('{"prompt": "a", "tools": [{"name": "\\ud800"}]}', "metadata"),
        ('{"prompt": "a", "id": "\\ud800"}', "id"),
    ],
)
def test_text_that_utf_8_cannot_encode_is_refused_by_line(tmp_path: Path, row: str, name: str, suffix: str) -> None:
    if suffix == ".jsonl":
        path, where = write(tmp_path, {"prompt": "\U0001f600"}, row), "data.jsonl:2"  # a whole pair is a character
    else:
        path, where = str(tmp_path / "data.parquet"), "data.parquet, row 1"
        rows = [{"prompt": '"first"'}, {key: json.dumps(value) for key, value in json.loads(row).items()}]
        table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema([(key, pyarrow.json_()) for key in rows[1]]))
        pyarrow.parquet.write_table(table, path)
    message = refusal(path)
    assert f"{where}: the {name} holds \\ud" in message
    assert "a lone surrogate, which UTF-8 cannot encode" in message


def test_tools_of_json_text_are_read_under_the_rules_of_a_line(tmp_path: Path) -> None:
    for text, reason in (
        ("[" * 2000 + "]" * 2000, "nested too deeply"),
        ('[{"a": 1, "a": 2}]', "the key 'a' comes twice"),
    ):
        message = refusal(write(tmp_path, {"prompt": "p", "tools": text}))
        assert "data.jsonl:1" in message
        assert reason in message
