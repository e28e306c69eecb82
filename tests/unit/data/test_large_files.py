"""Large files, whose rows are read on access: the same rows, hash and errors as of files that are held in memory."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.data import files, jsonl, reader
from buffer_rl.data.dataset import PromptDataset, RowError, RowKeys, build_row
from buffer_rl.data.files import LocalFile
from buffer_rl.data.jsonl import MAX_DEPTH, JsonlTable, RowsOnAccess, parse_line
from buffer_rl.data.reader import Findings, read_dataset
from buffer_rl.errors import DataError

KEYS = RowKeys(multimodal=(("image", "pictures"),))


def nested(levels: int) -> bytes:
    """A row of so many levels."""
    return b'{"prompt": "n", "metadata": {"x": ' + b"[" * (levels - 2) + b"]" * (levels - 2) + b"}}"


GOOD = [
    b'{"prompt": "a"}',
    b'{"prompt": "\xc3\xa9\xe2\x80\xa8", "label": 1}\r',
    b'{"prompt": "c", "metadata": {"rm_type": "x"}}',
]
# Good ones that are out of the ordinary.
RARE = [
    b'  {"prompt": [{"role": "user", "content": "q"}], "label": ["a", 1.5, null, true], "pictures": ["p"]}',
    b'{"prompt": [{"role": "user", "content": [{"type": "text"}]}], "tools": [{"name": "f"}], "metadata": null}',
    b'{"prompt": [{"role": "assistant", "content": null, "tool_calls": [1]}], "tools": "[{}]"}',
    b'{"prompt": "\\ud800", "metadata": {"rm_type": ["y"]}}',
    b'{"prompt": "b", "label": 123456789012345678901234567890, "metadata": {"rm_type": 18446744073709551616}}',
    b'{"prompt": "b", "label": 1e400, "metadata": {"rm_type": ""}}',
    b'{"prompt": "\\u003a \\\\u003a:", "label": null, "tools": [], "metadata": {}}',
    b'\x1e{"prompt": "after a record separator"}',
    b'\xef\xbb\xbf{"prompt": "after a byte order mark"}',
    b'{"prompt":\t"a" , "x" :{"a":1,"b":{"a":1}}}',
    nested(MAX_DEPTH),
]
BLANK = [b"", b"  \t", b"\r", b"\x0b"]
BAD = [
    b"{",
    b'{"question": 1}',
    b"\xff",
    b'{"prompt": 1}',
    b"[]",
    b"null",
    b'{"prompt": "a", "prompt": "b"}',
    b'{"prompt": "a", "x\\u003a": 1, "x:": 2}',
    b'{"prompt": "\\u003a", "x": 1, "x": 2}',
    b'{"prompt": "\\u003A", "metadata": {"x": 1, "x": 2}}',
    b'{"prompt": "a", "label": NaN}',
    b'{"prompt": "a", "label": {}}',
    b'{"prompt": "a", "label": [[]]}',
    b'{"prompt": "a", "label": %s}' % (b"1" * 5000),
    b'{"prompt": "a", "metadata": []}',
    b'{"prompt": "a", "metadata": 0}',
    b'{"prompt": "a", "tools": [1]}',
    b'{"prompt": "a", "tools": {}}',
    b'{"prompt": "a", "id": 1.5}',
    b'{"prompt": "a", "id": true}',
    b'{"prompt": "a", "id": 18446744073709551616.0}',
    b'{"prompt": " \xe3\x80\x80"}',
    b'{"prompt": []}',
    b'{"prompt": [{"role": "", "content": "a"}]}',
    b'{"prompt": [{"role": "user"}]}',
    b'{"prompt": ["a"]}',
    b"{} {}",
    nested(MAX_DEPTH + 1),
    b"[" * 100_000,
]


@pytest.fixture(autouse=True)
def on_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MIN_BYTES", 1)


def in_memory(source: str) -> Any:
    """The outcome of a file that is not large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "MIN_BYTES", 1 << 60)
        return outcome(source)


def write(path: Path, lines: list[bytes], *, end: bytes = b"\n") -> str:
    path.write_bytes(b"\n".join(lines) + end)
    return str(path)


def outcome(source: str) -> Any:
    try:
        dataset = read_dataset(source, KEYS)
    except DataError as error:
        return str(error)
    return list(dataset), dataset.source_hash, dataset.facts, [dataset.where(row) for row in dataset]


lines = st.lists(st.sampled_from([*GOOD, *GOOD, *RARE, *BLANK]), max_size=40)


@settings(max_examples=40)
@given(lines, st.lists(st.sampled_from(BAD), max_size=3), st.sampled_from([b"", b"\n"]), st.booleans(), st.data())
def test_files_read_the_same_on_access_and_in_memory(
    tmp_path_factory: pytest.TempPathFactory,
    content: list[bytes],
    bad: list[bytes],
    end: bytes,
    bom: bool,
    data: st.DataObject,
) -> None:
    for line in bad:
        content.insert(data.draw(st.integers(0, len(content))), line)
    if bom and content:
        content[0] = b"\xef\xbb\xbf" + content[0]
    path = write(tmp_path_factory.mktemp("equal") / "d.jsonl", content, end=end)
    with pytest.MonkeyPatch.context() as patch:
        for block_bytes, read_bytes in ((1, 7), (100, 64), (1 << 16, 1 << 18)):
            patch.setattr(jsonl, "_BLOCK_BYTES", block_bytes)
            patch.setattr(files, "_READ_BYTES", read_bytes)
            assert outcome(path) == in_memory(path)
        assert outcome(f"{path}@[1:-1]") == in_memory(f"{path}@[1:-1]")


@pytest.mark.parametrize("line", [*GOOD, *RARE, *BAD])
def test_no_line_is_taken_for_plain_that_the_row_rules_refuse(line: bytes) -> None:
    record = parse_line(line.rstrip(b"\r"))
    table = JsonlTable(b"\n" + line)  # behind a blank line: byte order marks are not the file's
    objects = table.plain_objects(0, 1)
    plain, ruled = Findings(), Findings()
    try:
        if isinstance(record, RowError):
            raise record
        ruled.add(build_row(record, KEYS, row=0, line=2))
    except RowError:
        assert objects is None or not plain.add_plain_rows(objects, 0, KEYS)
    else:
        if objects is not None and plain.add_plain_rows(objects, 0, KEYS):
            assert plain == ruled


def test_ordinary_rows_are_plain_and_one_rare_row_sends_its_block_to_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ruled: list[int] = []
    real = reader.build_row

    def counted(record: dict[str, Any], keys: RowKeys, *, row: int, line: int) -> Any:
        ruled.append(row)
        return real(record, keys, row=row, line=line)

    monkeypatch.setattr(reader, "build_row", counted)
    read_dataset(write(tmp_path / "d.jsonl", GOOD * 50), KEYS)
    assert ruled == []
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 100)
    read_dataset(write(tmp_path / "d.jsonl", [*GOOD * 50, RARE[2], *GOOD * 50]), KEYS)
    assert 150 in ruled
    assert len(ruled) < 5


def test_exact_lines_are_named_behind_blank_ones(tmp_path: Path) -> None:
    content = (GOOD + BLANK) * 50
    path = write(tmp_path / "d.jsonl", content)
    assert outcome(path) == in_memory(path)
    for number in (150, 299):
        bad = list(content)
        bad[number] = b'{"prompt": 3.5}'
        path = write(tmp_path / "bad.jsonl", bad)
        said = outcome(path)
        assert said == in_memory(path)
        assert said.startswith(f"{path}:{number + 1}: the prompt 'prompt' is a number")


def test_many_bad_lines_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [*GOOD * 30, *[b" " * n + b"{" for n in range(100)], *GOOD * 30])
    said = outcome(path)
    assert said == in_memory(path)
    assert said.startswith(f"{path}:91: ")
    assert said.endswith("... and 80 more bad lines")


def test_an_id_that_comes_twice_is_found_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 100)
    rows = [json.dumps({"prompt": "p", "id": number}).encode() for number in range(100)]
    rows[90] = rows[5].replace(b"5", b'"5"')  # the same id as text
    rows.insert(3, b"")
    path = write(tmp_path / "d.jsonl", rows)
    said = outcome(path)
    assert said == in_memory(path) == f"{path}:92: the id '5' is already used in line 7"
    bad = write(tmp_path / "bad.jsonl", [*rows, *[b" " * n + b"{" for n in range(30)]])
    assert outcome(bad) == in_memory(bad)
    assert outcome(bad).startswith(f"{bad}:92: the id '5' is already used in line 7\n{bad}:102: invalid JSON")
    assert outcome(bad).endswith("... and 11 more bad lines")


def test_ids_of_one_hash_are_not_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Findings, "repeated_ids", lambda found: set(found.id_hashes))
    assert len(read_dataset(write(tmp_path / "d.jsonl", [b'{"prompt": "p", "id": %d}' % n for n in range(9)]))) == 9


@pytest.mark.parametrize("change", ["grows", "shrinks", "vanishes"])
def test_a_file_that_is_changed_while_it_is_validated_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = write(tmp_path / "d.jsonl", GOOD * 50)
    real = JsonlTable.blocks

    def changing(table: JsonlTable, first: int, last: int) -> Any:
        write(Path(path), GOOD * 60) if change == "grows" else os.truncate(path, 10 if change == "shrinks" else 0)
        return real(table, first, last)

    monkeypatch.setattr(JsonlTable, "blocks", changing)
    assert outcome(path).startswith(f"{path}: the file was changed while it was read\n")


def test_a_file_that_is_changed_in_place_during_the_run_is_an_error_not_other_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", GOOD * 50)
    dataset = read_dataset(path, KEYS)
    with open(path, "ab") as file:
        file.write(b"\n")
    with pytest.raises(DataError, match="changed since it was checked"):
        dataset[0]


def test_a_file_that_is_touched_during_the_run_is_hashed_once_and_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "d.jsonl", GOOD * 50)
    dataset = read_dataset(path, KEYS)
    hashed: list[str] = []
    real = files.digest_of
    monkeypatch.setattr(files, "digest_of", lambda file: hashed.append(path) or real(file))
    rows = list(dataset)
    for touches in (1, 2):
        os.utime(path)
        assert list(dataset) == rows
        assert dataset[7] == rows[7]
        assert len(hashed) == touches
    assert list(pickle.loads(pickle.dumps(dataset))) == rows


@pytest.mark.parametrize("changed", [0, 1500])
def test_a_byte_that_changes_in_place_is_an_error_whatever_the_size_and_for_every_later_row(
    tmp_path: Path, changed: int
) -> None:
    path = write(tmp_path / "d.jsonl", GOOD * 50)
    dataset = read_dataset(path, KEYS)
    with open(path, "r+b") as file:
        file.seek(changed)
        byte = file.read(1)
        file.seek(changed)
        file.write(bytes([byte[0] ^ 1]))
    for _ in range(2):
        with pytest.raises(DataError, match="changed since it was checked"):
            dataset[len(dataset) - 1]


def test_a_file_that_is_replaced_during_the_run_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", GOOD * 50)
    dataset = read_dataset(path, KEYS)
    rows = list(dataset)
    os.rename(path, tmp_path / "old.jsonl")
    write(tmp_path / "d.jsonl", GOOD[::-1] * 50)
    assert dataset[0].prompt == rows[0].prompt


def test_rows_are_a_sequence(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", GOOD * 3)
    dataset = read_dataset(path, KEYS)
    rows = list(dataset)
    assert isinstance(dataset, PromptDataset)
    assert (dataset[-1], dataset[1:3], dataset[::4]) == (rows[8], tuple(rows[1:3]), tuple(rows[::4]))
    with pytest.raises(IndexError):
        dataset[9]
    assert list(pickle.loads(pickle.dumps(dataset))) == rows


def test_a_line_that_is_too_long_is_named_and_the_next_ones_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer_rl.data.jsonl.MAX_LINE_BYTES", 100)
    path = write(tmp_path / "d.jsonl", [GOOD[0], b'{"prompt": "%s"}' % (b"x" * 5000), GOOD[0], b"{"])
    said = outcome(path)
    assert said == in_memory(path)
    assert [line.partition(": ")[0] for line in said.splitlines()] == [f"{path}:2", f"{path}:4"]
    exact = b'{"prompt": "%s"}' % (b"x" * (100 - 14))
    assert len(exact) == 100
    assert len(read_dataset(write(tmp_path / "e.jsonl", [exact, exact], end=b""), KEYS)) == 2


def test_compressed_small_and_other_files_are_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "d.jsonl", GOOD)
    assert isinstance(files.open_content(path), LocalFile)
    assert isinstance(read_dataset(path, KEYS).rows, RowsOnAccess)
    assert isinstance(read_dataset(f"{path}@[0:1]", KEYS).rows, RowsOnAccess)
    write(tmp_path / "e.jsonl", GOOD)
    assert isinstance(read_dataset(str(tmp_path / "*.jsonl"), KEYS).rows, tuple)
    with pytest.raises(DataError, match="no such file"):
        files.open_content(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(DataError, match=r"no \.gz file"):
        files.open_content(str(Path(path).rename(tmp_path / "d.jsonl.gz")))
    monkeypatch.setattr(files, "MIN_BYTES", 10**6)
    assert isinstance(read_dataset(write(tmp_path / "d.jsonl", GOOD), KEYS).rows, tuple)
