"""Large files by way of the index: the same rows, the same errors with the same line numbers, and no second parsing."""

from __future__ import annotations

import io
import json
import os
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.data import large_files
from buffer_rl.data.dataset import PromptDataset, RowKeys
from buffer_rl.data.index import MAX_ENTRIES, DataIndex, LazyRows, cache_folder
from buffer_rl.data.jsonl import scan_range
from buffer_rl.data.reader import read_dataset
from buffer_rl.errors import DataError

KEYS = RowKeys()
GOOD = [
    b'{"prompt": "a"}',
    b'{"prompt": "\xc3\xa9\xe2\x80\xa8", "label": 1}\r',
    b'{"prompt": "c", "metadata": {"rm_type": "x"}}',
]
BLANK = [b"", b"  \t", b"\r"]
BAD = [b"{", b'{"question": 1}', b"\xff", b'{"prompt": 1}', b"[]", b'{"prompt": "a", "prompt": "b"}']


@pytest.fixture
def index(tmp_path: Path) -> DataIndex:
    return DataIndex(folder=tmp_path / "index", min_bytes=1, num_processes=1)


def by_three(index: DataIndex) -> DataIndex:
    return replace(index, part_bytes=64, num_processes=3)


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A path for each time that a file is parsed as a whole."""
    found: list[str] = []
    scans = large_files._scans

    def counted(path: str, keys: RowKeys, ranges: Any) -> Any:
        found.append(path)
        return scans(path, keys, ranges)

    monkeypatch.setattr(large_files, "_scans", counted)
    return found


def in_memory(tmp_path: Path) -> DataIndex:
    return DataIndex(folder=tmp_path / "none", min_bytes=1 << 60)


def write(path: Path, lines: list[bytes], *, settled: bool = True, end: bytes = b"\n") -> str:
    path.write_bytes(b"\n".join(lines) + end)
    return settle(path) if settled else str(path)


def settle(path: Path) -> str:
    """As if the file had been written long ago: its ctime cannot be set, so the entry's clock is moved (below)."""
    past = time.time() - 3600
    os.utime(path, (past, past))
    return str(path)


def later(index: DataIndex, path: str, keys: RowKeys = KEYS) -> None:
    """Have the entry look as if it had been made a minute after the file was changed."""
    entry = index.load(path, keys)
    assert entry is not None
    index.save(path, keys, replace(entry, checked_ns=entry.checked_ns + 60 * 10**9))


def outcome(path: str, index: DataIndex) -> Any:
    try:
        dataset = read_dataset(path, KEYS, index)
    except DataError as error:
        return str(error)
    return list(dataset), dataset.source_hash, dataset.facts, [dataset.where(row) for row in dataset]


lines = st.lists(st.sampled_from([*GOOD, *GOOD, *BLANK]), max_size=40)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([*GOOD, *BLANK, *BAD]), max_size=30), st.sampled_from([b"", b"\n"]), st.booleans())
def test_a_split_at_any_byte_finds_the_same_rows_and_lines(content: list[bytes], end: bytes, bom: bool) -> None:
    whole = (b"\xef\xbb\xbf" if bom else b"") + b"\n".join(content) + end
    all_rows = scan_range(io.BytesIO(whole), 0, len(whole), KEYS)
    for cut in range(1, len(whole)):
        first, second = (scan_range(io.BytesIO(whole), *ends, KEYS) for ends in ((0, cut), (cut, len(whole))))
        assert first.num_lines + second.num_lines == all_rows.num_lines
        assert [*first.offsets, *second.offsets] == list(all_rows.offsets)
        moved = [(line + first.num_lines, reason) for line, reason in second.problems]
        assert (first.problems + moved)[:20] == all_rows.problems


@settings(max_examples=25, deadline=None)
@given(lines, st.sampled_from([b"", b"\n"]))
def test_good_files_read_the_same_with_and_without_the_index(
    tmp_path_factory: pytest.TempPathFactory, content: list[bytes], end: bytes
) -> None:
    folder = tmp_path_factory.mktemp("equal")
    index = DataIndex(folder=folder / "index", min_bytes=1, num_processes=1)
    path = write(folder / "d.jsonl", content, end=end)
    expected = outcome(path, in_memory(folder))
    assert outcome(path, index) == expected
    assert outcome(path, index) == expected  # now from the index


def test_three_processes_find_what_one_finds_and_the_exact_lines(index: DataIndex, tmp_path: Path) -> None:
    index = by_three(index)
    content = (GOOD + BLANK) * 50
    path = write(tmp_path / "d.jsonl", content)
    assert outcome(path, index) == outcome(path, in_memory(tmp_path))
    for number in (150, 299):
        bad = list(content)
        bad[number] = b'{"prompt": 3}'
        path = write(tmp_path / "bad.jsonl", bad)
        said = outcome(path, index)
        assert said == outcome(path, in_memory(tmp_path))
        assert said.startswith(f"{path}:{number + 1}: the prompt 'prompt' is a number")


def test_many_bad_lines_are_counted_and_the_first_are_named(index: DataIndex, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [*GOOD * 30, *[b"{}"] * 100, *GOOD * 30])
    said = outcome(path, index)
    assert said == outcome(path, in_memory(tmp_path))
    assert said.startswith(f"{path}:91: ")
    assert said.endswith("... and 80 more bad lines")


def test_an_id_that_comes_twice_is_found_across_processes(index: DataIndex, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": "p", "id": number}).encode() for number in range(100)]
    rows[90] = rows[5].replace(b"5", b'"5"')  # the same id as text
    rows.insert(3, b"")
    path = write(tmp_path / "d.jsonl", rows)
    said = outcome(path, by_three(index))
    assert said == outcome(path, in_memory(tmp_path)) == f"{path}:92: the id '5' is already used in line 7"


def test_a_known_file_is_not_parsed_again(index: DataIndex, tmp_path: Path, parses: list[str]) -> None:
    path = write(tmp_path / "d.jsonl", GOOD * 50)
    first = read_dataset(path, KEYS, index)
    later(index, path)
    again = read_dataset(path, KEYS, index)
    assert parses == [path]
    assert (list(again), again.source_hash, again.facts) == (list(first), first.source_hash, first.facts)
    read_dataset(path, replace(KEYS, label=None), index)  # other fields: another validation
    assert len(parses) == 2


@pytest.mark.parametrize("keeps_times", [False, True])
def test_a_changed_file_is_parsed_again_even_with_its_old_size_and_mtime(
    index: DataIndex, tmp_path: Path, parses: list[str], keeps_times: bool
) -> None:
    path = write(tmp_path / "d.jsonl", GOOD * 50)
    before = os.stat(path)
    first = read_dataset(path, KEYS, index)
    later(index, path)
    write(Path(path), [GOOD[0].replace(b"a", b"z"), *GOOD[1:], *GOOD * 49])
    if keeps_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = read_dataset(path, KEYS, index)
    assert len(parses) == 2
    assert again[0].prompt == "z"
    assert again.source_hash != first.source_hash


def test_a_touched_file_and_one_just_written_are_hashed_not_parsed(
    index: DataIndex, tmp_path: Path, parses: list[str]
) -> None:
    path = write(tmp_path / "d.jsonl", GOOD * 50, settled=False)
    first = read_dataset(path, KEYS, index)
    assert read_dataset(path, KEYS, index).source_hash == first.source_hash  # within the clock's tick: by its content
    Path(path).touch()
    assert read_dataset(path, KEYS, index).source_hash == first.source_hash
    assert parses == [path]


def test_a_change_in_the_same_instant_with_the_same_size_is_seen(index: DataIndex, tmp_path: Path) -> None:
    """The identity is the same although the content is not, as on a file system with a coarse clock."""
    path = write(tmp_path / "d.jsonl", GOOD * 50, settled=False)
    first = read_dataset(path, KEYS, index)
    Path(path).write_bytes(Path(path).read_bytes().replace(b'"a"', b'"z"'))
    entry = index.load(path, KEYS)
    assert entry is not None
    index.save(path, KEYS, replace(entry, identity=large_files.Identity.of(os.stat(path)), checked_ns=time.time_ns()))
    again = read_dataset(path, KEYS, index)
    assert again.source_hash != first.source_hash
    assert again.source_hash == read_dataset(path, KEYS, in_memory(tmp_path)).source_hash


@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied", "garbage"])
def test_a_damaged_entry_is_of_no_account(index: DataIndex, tmp_path: Path, parses: list[str], damage: str) -> None:
    path = write(tmp_path / "d.jsonl", GOOD * 50)
    expected = outcome(path, index)
    (entry,) = index.folder.glob("*.index")
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    entry.write_bytes({"truncated": content[:-8], "flipped": content, "emptied": b"", "garbage": b"x" * 99}[damage])
    assert outcome(path, index) == expected
    assert len(parses) == 2


def test_a_folder_that_cannot_be_written_to_keeps_nothing(tmp_path: Path, parses: list[str]) -> None:
    (tmp_path / "file").write_text("")
    index = DataIndex(folder=tmp_path / "file" / "index", min_bytes=1)
    path = write(tmp_path / "d.jsonl", GOOD)
    assert len(read_dataset(path, KEYS, index)) == len(read_dataset(path, KEYS, index)) == 3
    assert len(parses) == 2


def test_only_the_newest_entries_are_kept(tmp_path: Path) -> None:
    index = DataIndex(folder=tmp_path / "index", min_bytes=1)
    path = write(tmp_path / "d.jsonl", GOOD)
    for number in range(MAX_ENTRIES + 5):
        read_dataset(path, replace(KEYS, id=f"id{number}"), index)
    assert len(list(index.folder.iterdir())) == MAX_ENTRIES


def test_a_file_that_is_changed_in_place_during_the_run_is_an_error_not_other_rows(
    index: DataIndex, tmp_path: Path
) -> None:
    path = write(tmp_path / "d.jsonl", GOOD * 50)
    dataset = read_dataset(path, KEYS, index)
    with open(path, "ab") as file:
        file.write(b"\n")
    with pytest.raises(DataError, match="changed since it was checked"):
        dataset[0]


def test_a_file_that_is_touched_during_the_run_is_hashed_once_and_read_on(
    index: DataIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    real = LazyRows._content_sha256
    monkeypatch.setattr(LazyRows, "_content_sha256", lambda rows: hashed.append(real(rows)) or hashed[-1])
    path = write(tmp_path / "d.jsonl", GOOD * 50)
    dataset = read_dataset(path, KEYS, index)
    rows = list(dataset)
    for touches in (1, 2):
        os.utime(path)
        assert list(dataset) == rows
        assert dataset[7] == rows[7]
        assert len(hashed) == touches
    assert list(pickle.loads(pickle.dumps(dataset))) == rows


@pytest.mark.parametrize("changed", [0, 1500])
def test_a_byte_that_changes_in_place_is_an_error_whatever_the_size_and_for_every_later_row(
    index: DataIndex, tmp_path: Path, changed: int
) -> None:
    path = write(tmp_path / "d.jsonl", GOOD * 50)
    dataset = read_dataset(path, KEYS, index)
    with open(path, "r+b") as file:
        file.seek(changed)
        byte = file.read(1)
        file.seek(changed)
        file.write(bytes([byte[0] ^ 1]))
    for _ in range(2):
        with pytest.raises(DataError, match="changed since it was checked"):
            dataset[len(dataset) - 1]


def test_a_file_that_is_replaced_during_the_run_changes_nothing(index: DataIndex, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", GOOD * 50)
    dataset = read_dataset(path, KEYS, index)
    rows = list(dataset)
    os.rename(path, tmp_path / "old.jsonl")
    write(tmp_path / "d.jsonl", GOOD[::-1] * 50)
    assert dataset[0].prompt == rows[0].prompt


def test_rows_are_a_sequence(index: DataIndex, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", GOOD * 3)
    dataset = read_dataset(path, KEYS, index)
    rows = list(dataset)
    assert isinstance(dataset, PromptDataset)
    assert (dataset[-1], dataset[1:3], dataset[::4]) == (rows[8], tuple(rows[1:3]), tuple(rows[::4]))
    with pytest.raises(IndexError):
        dataset[9]
    assert list(pickle.loads(pickle.dumps(dataset))) == rows


def test_a_line_that_is_too_long_is_named_and_the_next_ones_are_read(
    index: DataIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer_rl.data.jsonl.MAX_LINE_BYTES", 100)
    path = write(tmp_path / "d.jsonl", [GOOD[0], b'{"prompt": "%s"}' % (b"x" * 5000), GOOD[0], b"{"])
    said = outcome(path, index)
    assert said == outcome(path, in_memory(tmp_path))
    assert [line.partition(": ")[0] for line in said.splitlines()] == [f"{path}:2", f"{path}:4"]
    exact = b'{"prompt": "%s"}' % (b"x" * (100 - 14))
    assert len(exact) == 100
    assert len(read_dataset(write(tmp_path / "e.jsonl", [exact, exact], end=b""), KEYS, index)) == 2


def test_compressed_sliced_small_and_other_files_go_the_ordinary_way(tmp_path: Path) -> None:
    index = DataIndex(folder=tmp_path / "index", min_bytes=1)
    path = write(tmp_path / "d.jsonl", GOOD)
    assert large_files.is_indexed(path, index)
    assert not large_files.is_indexed(path, replace(index, min_bytes=10**6))
    for other in ("d.jsonl.gz", "d.parquet", "nowhere.jsonl", "memory://d.jsonl"):
        assert not large_files.is_indexed(str(tmp_path / other) if "://" not in other else other, index)
    assert not large_files.is_indexed(str(tmp_path), index)
    read_dataset(f"{path}@[0:1]", KEYS, index)
    assert not index.folder.exists()


def test_the_cache_is_in_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "buffer_rl"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/buffer_rl")
