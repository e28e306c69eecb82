"""Several files as one source, and compressed files."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.data.reader import read_dataset
from buffer_rl.errors import DataError

PLAIN_HASH = "9bb74d3169c8"  # of before there were compressed files: uids of saved runs hold it


def lines(*prompts: str) -> bytes:
    return b"".join(json.dumps({"prompt": prompt}).encode() + b"\n" for prompt in prompts)


def parquet(path: Path, *prompts: str) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": list(prompts)}), path)


def prompts_of(source: Path | str) -> list[object]:
    return [row.prompt for row in read_dataset(str(source))]


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_a_compressed_file_is_the_source_that_its_content_is(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines("a", "b"))
    (tmp_path / f"a.jsonl{suffix}").write_bytes(compress(lines("a", "b")))
    plain, packed = read_dataset(str(tmp_path / "a.jsonl")), read_dataset(str(tmp_path / f"a.jsonl{suffix}"))
    assert [row.prompt for row in packed] == ["a", "b"]
    assert packed.source_hash == plain.source_hash == PLAIN_HASH


def test_what_fsspec_alone_decompresses_and_compressed_parquet_are_read(tmp_path: Path) -> None:
    with fsspec.open(str(tmp_path / "a.jsonl.zip"), "wb", compression="zip") as file:
        file.write(lines("a"))
    assert prompts_of(tmp_path / "a.jsonl.zip") == ["a"]
    parquet(tmp_path / "b.parquet", "b")
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress((tmp_path / "b.parquet").read_bytes()))
    assert prompts_of(tmp_path / "b.parquet.gz") == ["b"]


def test_errors_in_compressed_files_have_lines_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines("a") + b"{\n"))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz:2: invalid JSON"):
        read_dataset(str(path))
    for content in (b"not packed", gzip.compress(lines("a"))[:-9]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.jsonl\.gz: the file is no \.gz file, or a damaged one"):
            read_dataset(str(path))


def test_a_folder_and_a_pattern_are_their_files_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(lines("b1", "b2"))
    parquet(tmp_path / "a.parquet", "a1", "a2")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines("c1")))
    for name in ("README.md", "_SUCCESS", ".hidden.jsonl", "_metadata.parquet"):
        (tmp_path / name).write_text("no data")
    (tmp_path / "below").mkdir()
    assert prompts_of(tmp_path) == ["a1", "a2", "b1", "b2", "c1"]
    assert prompts_of(tmp_path / "[bc].jsonl*") == ["b1", "b2", "c1"]
    assert prompts_of(f"{tmp_path}@[1:-1]") == ["a2", "b1", "b2"]
    assert [row.row for row in read_dataset(f"{tmp_path}@[1:-1]")] == [0, 1, 2]


def test_a_pattern_of_one_file_is_that_file_and_a_name_may_look_like_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").write_bytes(lines("a", "b"))
    one, matched = read_dataset(str(tmp_path / "a[1].jsonl")), read_dataset(str(tmp_path / "*.jsonl"))
    assert one.source_hash == matched.source_hash == PLAIN_HASH
    assert matched.where(matched[1]).endswith("a[1].jsonl:2")


def test_errors_and_rows_of_several_files_name_file_and_line(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", "a1", "a2")
    (tmp_path / "b.jsonl").write_bytes(b"\n" + lines("b1", "b2"))
    dataset = read_dataset(f"{tmp_path}@[1:]")
    assert [dataset.where(row).removeprefix(f"{tmp_path}/") for row in dataset] == [
        "a.parquet, row 1",
        "b.jsonl:2",
        "b.jsonl:3",
    ]
    (tmp_path / "b.jsonl").write_bytes(lines("b1") + b'{"prompt": ""}\n')
    with pytest.raises(DataError, match=r"b\.jsonl:2: the prompt 'prompt' is empty"):
        read_dataset(str(tmp_path))


def test_ids_are_unique_through_all_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(b'{"prompt": "p", "id": "same"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl:1: the id 'same' is already used in .*a\.jsonl:1"):
        read_dataset(str(tmp_path))


def test_a_source_of_several_files_is_another_one_if_a_row_moves_to_the_next_file(tmp_path: Path) -> None:
    def source_hash(first: bytes, second: bytes) -> str:
        (tmp_path / "a.jsonl").write_bytes(first)
        (tmp_path / "b.jsonl").write_bytes(second)
        return read_dataset(str(tmp_path)).source_hash

    before = source_hash(lines("a", "b"), lines("c"))
    assert source_hash(lines("a"), lines("b", "c")) != before
    assert source_hash(lines("a", "b"), lines("c")) == before


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(-13, 13), st.integers(-13, 13))
def test_a_slice_of_several_files_is_that_slice_of_their_rows(sizes: list[int], start: int, stop: int) -> None:
    system = fsspec.filesystem("memory")
    rows, folder = [], f"/parts_{'_'.join(map(str, sizes))}"
    for number, size in enumerate(sizes):
        names = [f"{number}.{row}" for row in range(size)]
        system.pipe(f"{folder}/{number}.jsonl", lines(*names))
        rows += names
    source = f"memory:/{folder}/*.jsonl@[{start}:{stop}]"
    if rows[start:stop]:
        assert prompts_of(source) == rows[start:stop]
    else:
        with pytest.raises(DataError, match=r"the slice holds no rows|has rows|has no rows"):
            read_dataset(source)
    system.rm(folder, recursive=True)


def test_a_pattern_that_matches_nothing_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file matches the pattern"):
        read_dataset(str(tmp_path / "*.parquet"))
