"""Parquet files and folders that Hugging Face's ``Dataset.save_to_disk`` wrote, as tables.

Both are read with pyarrow alone, imported when such a path is read. Only the columns that the keys name are turned into
Python values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from buffer_rl.data import files
from buffer_rl.data.dataset import RowError, RowKeys, RowNoun
from buffer_rl.data.json_text import json_value
from buffer_rl.errors import DataError, raised_as
from buffer_rl.options.file_kind import HEAD_BYTES, not_text

STATE_FILE = "state.json"
SPLITS_FILE = "dataset_dict.json"


@dataclass(eq=False)
class ArrowTable:
    """The rows of an Arrow table; its unit is the row."""

    _table: Any
    contents: Sequence[bytes]
    unit: RowNoun = "row"

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def field_names(self) -> list[str]:
        """The names of the columns."""
        return list(self._table.column_names)

    def records(self, first: int, last: int, keys: RowKeys) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
        """The records ``first`` to ``last`` (exclusive) of the table.

        What a struct leaves out of a chat message comes from Arrow as null; such nulls are taken out of prompts and
        tools. Values that JSON does not have (times, decimals, NaN, bytes) are refused, bytes of multimodal columns
        excepted.
        """
        names = [name for name in dict.fromkeys(keys.names) if name in self._table.column_names]
        if keys.prompt not in names:  # once for the file: the columns of all rows are the same
            yield first, dict.fromkeys(self._table.column_names)
            return
        columns = self._table.slice(first, last - first).select(names)
        decode = {name: _decoder(columns.schema.field(name).type) for name in names}
        media = {field for _, field in keys.multimodal}
        for number, scalars in enumerate(zip(*columns.columns, strict=True), start=first):
            record: dict[str, Any] = {}
            try:
                for name, scalar in zip(names, scalars, strict=True):
                    record[name] = _value(scalar, name, decode[name], allow_bytes=name in media)
            except RowError as error:
                yield number, error
                continue
            for nested in (keys.prompt, keys.tools):
                if nested in record:
                    record[nested] = _without_nulls(record[nested])
            yield number, record


def read_parquet(path: str) -> ArrowTable:
    """Raises DataError for a file that cannot be read."""
    arrow = _pyarrow(path)
    import pyarrow.parquet

    content = files.read_bytes(path)
    try:
        table = pyarrow.parquet.read_table(arrow.BufferReader(content))
    except (arrow.ArrowException, OSError) as error:
        what, hint = ("", "") if content.startswith(b"PAR1") else not_text(content[:HEAD_BYTES], path)
        why = f"it looks like {what}" if what else str(error)
        raise DataError(f"the file is no Parquet file, or a damaged one: {why}", where=path, hint=hint) from error
    return ArrowTable(table, [content])


def read_saved_folder(path: str) -> ArrowTable:
    """The rows of a folder that ``Dataset.save_to_disk`` wrote: the Arrow files that its ``state.json`` lists.

    Raises DataError for another folder and for one of several splits (naming them).
    """
    if files.exists(splits_file := files.join(path, SPLITS_FILE)):
        splits = _json_file(splits_file).get("splits", [])
        expected = "one of them: " + ", ".join(files.join(path, str(split)) for split in splits)
        raise DataError("the folder holds several splits", where=path, expected=expected)
    if not files.exists(state_file := files.join(path, STATE_FILE)):
        what = f"the folder was not written by Dataset.save_to_disk: there is no {STATE_FILE} in it"
        raise DataError(what, where=path, expected="such a folder, a .parquet file or a JSONL file")
    arrow = _pyarrow(path)
    state = _json_file(state_file)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        what = "the folder has an indices file, which old versions of datasets wrote"
        raise DataError(what, where=path, hint="load_from_disk(FOLDER).flatten_indices().save_to_disk(NEW_FOLDER)")
    try:
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError("there is no list of data files in it", where=state_file) from error
    if not names:
        raise DataError("the folder has no rows", where=path)
    contents = [files.read_bytes(files.join(path, name)) for name in names]
    tables = [
        _read_arrow(arrow, files.join(path, name), content) for name, content in zip(names, contents, strict=True)
    ]
    with raised_as(DataError, "the folder's files have different columns", arrow.ArrowException, where=path):
        return ArrowTable(arrow.concat_tables(tables), contents)


def _read_arrow(arrow: Any, path: str, content: bytes) -> Any:
    import pyarrow.ipc

    caught = (arrow.ArrowException, OSError)
    with raised_as(DataError, "the file is no Arrow stream, or a damaged one", caught, where=path):
        return pyarrow.ipc.open_stream(arrow.BufferReader(content)).read_all()


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        what = "Parquet files and Arrow folders need pyarrow, which is not installed"
        raise DataError(what, where=path, hint="pip install 'buffer-rl[data]'") from error
    return pyarrow


def _json_file(path: str) -> dict[str, Any]:
    content = files.read_bytes(path)
    with raised_as(DataError, "invalid JSON", ValueError, where=path):
        value = json.loads(content)
    if not isinstance(value, dict):
        raise DataError("the file does not hold a JSON object", where=path)
    return value


def _decoder(arrow_type: Any) -> Callable[[str], Any] | None:
    """What turns a column's values into Python values, besides ``as_py``: JSON columns hold their text."""
    return json_value if getattr(arrow_type, "extension_name", "") == "arrow.json" else None


def _value(scalar: Any, name: str, decode: Callable[[str], Any] | None, *, allow_bytes: bool) -> Any:
    try:
        value = scalar.as_py(maps_as_pydicts="strict")
        if decode is not None and value is not None:
            value = decode(value)
    except (ValueError, KeyError, OverflowError) as error:  # invalid UTF-8, a key twice in a map, a date out of range
        raise RowError(f"the column {name!r} cannot be read: {error}") from error
    if foreign := _foreign(value, allow_bytes):
        raise RowError(f"the column {name!r} is or holds {foreign}, which JSON does not have")
    return value


def _foreign(value: Any, allow_bytes: bool) -> str:
    """The first thing in ``value`` that is no JSON value, in words; empty if there is none."""
    if value is None or isinstance(value, str | bool | int):
        return ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return "" if allow_bytes else "bytes"
    if isinstance(value, list):
        return next((found for item in value if (found := _foreign(item, allow_bytes))), "")
    if isinstance(value, dict):
        keys = next((f"a key that is {key!r}" for key in value if not isinstance(key, str)), "")
        return keys or _foreign(list(value.values()), allow_bytes)
    return f"a value of the type {type(value).__name__}"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
