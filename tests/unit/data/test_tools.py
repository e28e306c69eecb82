"""A row's tools become part of its metadata, whatever the file's format, or the row is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from buffer_rl.data.dataset import RowKeys
from buffer_rl.data.reader import read_dataset
from buffer_rl.errors import DataError

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}},
    {"type": "function", "function": {"name": "stop"}},
]


def jsonl(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("value", [TOOLS, json.dumps(TOOLS)], ids=["list", "JSON text"])
def test_tools_join_the_metadata(tmp_path: Path, value: Any) -> None:
    rows = [{"prompt": "p", "tools": value, "metadata": {"level": 1}}, {"prompt": "q", "tools": None}, {"prompt": "r"}]
    read = read_dataset(jsonl(tmp_path, *rows))
    assert [row.metadata for row in read] == [{"level": 1, "tools": TOOLS}, {}, {}]


def test_parquet_gives_the_same_tools_without_the_nulls_that_arrow_adds(tmp_path: Path) -> None:
    path = str(tmp_path / "data.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "p", "tools": TOOLS}]), path)
    assert read_dataset(path)[0].metadata == {"tools": TOOLS}


def test_the_field_has_another_name_or_none(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "p", "tools": "a hammer", "functions": TOOLS})
    assert read_dataset(path, RowKeys(tools="functions"))[0].metadata == {"tools": TOOLS}
    assert read_dataset(path, RowKeys(tools=None))[0].metadata == {}
    hashes = {read_dataset(path, RowKeys(tools=name)).source_hash for name in ("functions", None)}
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("a hammer", "the tools 'tools' are text that is no JSON"),
        ({"name": "add"}, "the tools 'tools' are a mapping, not a list of mappings"),
        (["add"], "the tools 'tools' are a list, not a list of mappings"),
        (3, "the tools 'tools' are a number"),
    ],
)
def test_what_are_no_tools_is_refused_by_line_and_says_how_to_leave_it_alone(
    tmp_path: Path, value: Any, problem: str
) -> None:
    with pytest.raises(DataError, match=problem) as caught:
        read_dataset(jsonl(tmp_path, {"prompt": "p"}, {"prompt": "q", "tools": value}))
    assert caught.value.where.endswith("data.jsonl:2")
    assert "'--tool-key none' leaves the field alone" in str(caught.value)
