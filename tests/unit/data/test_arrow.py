"""Parquet files and saved folders read as the same rows in JSONL would, and their mistakes are named by row."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from buffer_rl.data.dataset import RowKeys
from buffer_rl.data.reader import read_dataset
from buffer_rl.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "label": "1", "metadata": {"level": 1}, "id": "x"},
    {"prompt": "b", "label": None, "metadata": {"level": 2}, "id": "y"},
    {"prompt": "c", "label": "3", "metadata": None, "id": "z"},
]


def write_parquet(folder: Path, rows: Any, name: str = "data.parquet") -> str:
    table = pyarrow.Table.from_pylist(rows) if isinstance(rows, list) else rows
    pyarrow.parquet.write_table(table, folder / name)
    return str(folder / name)


def write_saved_folder(folder: Path, *parts: list[dict[str, Any]], **state: Any) -> str:
    """The layout of ``datasets.Dataset.save_to_disk``: Arrow streams, listed in state.json."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
    schema = pyarrow.Table.from_pylist([row for rows in parts for row in rows]).schema  # one for all files
    for name, rows in zip(names, parts, strict=True):
        table = pyarrow.Table.from_pylist(rows, schema=schema)
        with pyarrow.OSFile(str(folder / name), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    content = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None, **state}
    (folder / "state.json").write_text(json.dumps(content))
    (folder / "dataset_info.json").write_text("{}")
    return str(folder)


def facts(source: str, keys: RowKeys | None = None) -> list[tuple[Any, ...]]:
    return [(row.row, row.prompt, row.label, row.metadata, row.id) for row in read_dataset(source, keys)]


def refusal(source: str, keys: RowKeys | None = None) -> str:
    with pytest.raises(DataError) as caught:
        read_dataset(source, keys)
    return str(caught.value)


@pytest.mark.parametrize("cut", ["", "@[1:]", "@[-2:-1]"])
def test_every_format_reads_the_same_rows_and_slices(tmp_path: Path, cut: str) -> None:
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    wanted = facts(f"{tmp_path / 'data.jsonl'}{cut}")
    assert wanted
    assert facts(write_parquet(tmp_path, ROWS) + cut) == wanted
    assert facts(write_saved_folder(tmp_path / "saved", ROWS[:2], ROWS[2:]) + cut) == wanted


def test_places_are_rows_of_the_file_also_in_a_slice(tmp_path: Path) -> None:
    dataset = read_dataset(write_parquet(tmp_path, ROWS) + "@[1:]")
    assert [dataset.where(row) for row in dataset] == [f"{tmp_path}/data.parquet, row {n}" for n in (1, 2)]


def test_chat_messages_lose_the_nulls_that_a_struct_cannot_leave_out(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "q", "name": "n"}]
    path = write_parquet(tmp_path, [{"prompt": prompt}])
    assert pyarrow.parquet.read_table(path).to_pylist()[0]["prompt"][0]["name"] is None
    assert read_dataset(path)[0].prompt == prompt


def test_maps_and_json_columns_are_metadata(tmp_path: Path) -> None:
    maps = pyarrow.array([[("a", 1)], [("b", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    texts = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(['{"a": [1]}', None]))
    table = pyarrow.table({"prompt": ["p", "q"], "metadata": maps, "extra": texts})
    path = write_parquet(tmp_path, table)
    assert [row.metadata for row in read_dataset(path)] == [{"a": 1}, {"b": 2}]
    assert [row.metadata for row in read_dataset(path, RowKeys(metadata="extra"))] == [{"a": [1]}, {}]


def test_multimodal_columns_pass_through_with_their_bytes(tmp_path: Path) -> None:
    images = [{"bytes": b"\x89PNG", "path": None}]
    path = write_parquet(tmp_path, [{"prompt": "p", "pictures": images}, {"prompt": "q", "pictures": None}])
    first, second = read_dataset(path, RowKeys(multimodal=(("image", "pictures"),)))
    assert first.multimodal == {"image": images}
    assert second.multimodal is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": " "}, "the prompt 'prompt' is empty"),
        ({"prompt": None}, "the prompt 'prompt' is null"),
        ({"prompt": "p", "label": float("nan")}, "the column 'label' is or holds nan, which JSON does not have"),
        ({"prompt": "p", "metadata": {"at": datetime.datetime(2026, 1, 1)}}, "a value of the type datetime"),
        ({"prompt": "p", "metadata": {"raw": b"x"}}, "the column 'metadata' is or holds bytes"),
        ({"prompt": "p", "id": "x"}, "the id 'x' is already used in row 0"),
    ],
)
def test_a_bad_row_is_named_with_file_row_and_reason(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    good = {"prompt": "good", "label": 1.0, "metadata": None, "id": "x"}
    path = write_parquet(tmp_path, [good, row])
    message = refusal(path)
    assert message.startswith(f"{path}, row 1: ")
    assert reason in message


def test_text_that_is_no_utf8_is_named_by_row(tmp_path: Path) -> None:
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(),
        2,
        [None, pyarrow.py_buffer(b"\x00\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00"), pyarrow.py_buffer(b"a\xff")],
    )
    path = write_parquet(tmp_path, pyarrow.table({"prompt": bad}))
    assert refusal(path).startswith(f"{path}, row 1: the column 'prompt' cannot be read")


def test_a_missing_prompt_column_is_told_once(tmp_path: Path) -> None:
    message = refusal(write_parquet(tmp_path, [{"promt": "a"}, {"promt": "b"}]))
    assert "no prompt: the field 'prompt' is missing (fields: 'promt'); did you mean promt?" in message
    assert message.splitlines()[1:] == ["  hint: did you mean --input-key promt?"]


def test_files_and_folders_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no")
    assert "no Parquet file, or a damaged one" in refusal(str(tmp_path / "text.parquet"))
    assert "no such file" in refusal(str(tmp_path / "absent.parquet"))
    folder = write_saved_folder(tmp_path / "a", ROWS, _indices_data_files=[{"filename": "i"}])
    assert "flatten_indices" in refusal(folder)
    folder = write_saved_folder(tmp_path / "b", ROWS)
    (Path(folder) / "data-00000-of-00001.arrow").write_bytes(b"no")
    assert "no Arrow stream, or a damaged one" in refusal(folder)
    other = write_saved_folder(tmp_path / "d", [{"prompt": "a"}], [{"prompt": "b"}])
    (Path(other) / "data-00001-of-00002.arrow").write_bytes(
        (Path(write_saved_folder(tmp_path / "e", [{"text": "a"}])) / "data-00000-of-00001.arrow").read_bytes()
    )
    assert "the folder's files have different columns" in refusal(other)
    (Path(folder) / "data-00000-of-00001.arrow").unlink()
    assert "no such file" in refusal(folder)
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert f"{tmp_path}/splits/train, {tmp_path}/splits/test" in refusal(str(tmp_path / "splits"))
    assert "the slice holds no rows" in refusal(write_parquet(tmp_path, ROWS[:1], "one.parquet") + "@[1:]")


def test_without_pyarrow_the_extra_is_named_and_jsonl_still_reads(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, ROWS)
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n')
    program = (
        "import sys; sys.modules['pyarrow'] = None; sys.modules['fsspec'] = None\n"
        "from buffer_rl.data.reader import read_dataset\n"
        f"assert len(read_dataset({str(tmp_path / 'data.jsonl')!r})) == 1\n"
        f"for path in ({path!r}, 'memory://x.jsonl'):\n"
        "    try: read_dataset(path)\n"
        "    except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("pip install 'buffer-rl[data]'") == 2, done.stdout


def test_the_source_hash_covers_all_files_of_a_folder(tmp_path: Path) -> None:
    first = read_dataset(write_saved_folder(tmp_path / "a", ROWS[:1], ROWS[1:2])).source_hash
    same = read_dataset(write_saved_folder(tmp_path / "b", ROWS[:1], ROWS[1:2])).source_hash
    other = read_dataset(write_saved_folder(tmp_path / "c", ROWS[:1], ROWS[2:])).source_hash
    assert first == same != other
