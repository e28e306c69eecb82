"""Remote paths, by fsspec's memory file system."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from buffer_rl.data.reader import read_dataset
from buffer_rl.errors import DataError


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    if system.exists("/test_files"):
        system.rm("/test_files", recursive=True)


def test_jsonl_and_parquet_are_read_from_remote_paths(memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe("/test_files/a.jsonl", b'{"prompt": "a"}\n{"prompt": "b"}\n')
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["c"]}), content)
    memory.pipe("/test_files/b.parquet", content.getvalue())
    assert [row.prompt for row in read_dataset("memory://test_files/a.jsonl@[1:]")] == ["b"]
    assert [row.prompt for row in read_dataset("memory://test_files/b.parquet")] == ["c"]


def test_saved_folders_are_read_from_remote_paths(memory: fsspec.AbstractFileSystem) -> None:
    content = io.BytesIO()
    table = pyarrow.table({"prompt": ["a", "b"]})
    with pyarrow.ipc.new_stream(content, table.schema) as stream:
        stream.write_table(table)
    memory.pipe("/test_files/saved/data.arrow", content.getvalue())
    memory.pipe("/test_files/saved/state.json", b'{"_data_files": [{"filename": "data.arrow"}]}')
    assert [row.prompt for row in read_dataset("memory://test_files/saved")] == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("memory://test_files/absent.jsonl", "there is no such file"),
        ("nonsense://a.jsonl", "nonsense"),
    ],
)
def test_remote_paths_that_cannot_be_read_are_named(path: str, words: str) -> None:
    with pytest.raises(DataError) as caught:
        read_dataset(path)
    assert words in str(caught.value)
    assert path in str(caught.value)


@pytest.mark.parametrize("path", ["a.jsonl, b.jsonl", "a.jsonl b.jsonl", "a.jsonl,b.jsonl"])
def test_several_files_in_one_text_are_told_how_a_list_is_written(path: str) -> None:
    with pytest.raises(DataError) as caught:
        read_dataset(path)
    assert caught.value.where == path
    assert "Several are a list: [a.jsonl, b.jsonl] in a YAML file" in caught.value.hint


def test_reading_jsonl_imports_neither_fsspec_nor_pyarrow() -> None:
    program = "import sys, buffer_rl.data.source; print({'fsspec', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
