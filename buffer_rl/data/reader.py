"""Data files to datasets. Every bad row is named with file, line or row, and reason before anything else starts.

The format follows from the path: ``.parquet`` is Parquet, a folder is one that Hugging Face's ``Dataset.save_to_disk``
wrote, everything else is JSONL. A path may have a slice, ``train.jsonl@[0:100]``, that counts rows as Python would.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NoReturn

from buffer_rl.data import files
from buffer_rl.data.arrow import read_parquet, read_saved_folder
from buffer_rl.data.dataset import PromptDataset, PromptRow, Unit, place
from buffer_rl.data.jsonl import JsonlTable
from buffer_rl.data.path import DataPath
from buffer_rl.data.row import RowError, RowKeys, build_row
from buffer_rl.data.table import Table
from buffer_rl.errors import DataError

MAX_REPORTED = 20


def read_dataset(source: str, keys: RowKeys | None = None) -> PromptDataset:
    """Read and validate ``PATH`` or ``PATH@[start:stop]``.

    Only the rows of the slice are validated. Raises DataError for a file that cannot be read, for the first
    bad rows (at most ``MAX_REPORTED``, all in one error) and where there is no row.
    """
    keys = keys or RowKeys()
    data_path = DataPath.parse(source)
    table = _open(data_path.path)
    if not len(table):
        expected = "one JSON object a line" if table.unit == "line" else "at least one row"
        raise DataError("the file has no rows", where=data_path.path, expected=expected)
    first, last, _ = slice(data_path.start, data_path.stop).indices(len(table))
    if first >= last:
        raise DataError("the slice holds no rows", where=str(data_path), hint=f"the file has {len(table)} rows")
    rows = _build_rows(data_path.path, table, first, last, keys)
    _check_label_key(str(data_path), keys, rows)
    return PromptDataset(
        rows=tuple(rows),
        source_hash=_source_hash(table.contents, first, last, keys),
        path=data_path.path,
        unit=table.unit,
    )


def _open(path: str) -> Table:
    if path.lower().endswith(".parquet") and not files.is_folder(path):
        return read_parquet(path)
    if files.is_folder(path):
        return read_saved_folder(path)
    return JsonlTable(files.read_bytes(path))


def _build_rows(path: str, table: Table, first: int, last: int, keys: RowKeys) -> list[PromptRow]:
    rows: list[PromptRow] = []
    number_of_id: dict[str, int] = {}
    problems: list[tuple[int, str]] = []
    for position, (number, record) in enumerate(table.records(first, last, keys)):
        try:
            if isinstance(record, RowError):
                raise record
            row = build_row(record, keys, row=position, line=number)
        except RowError as error:
            problems.append((number, str(error)))
            continue
        if row.id is not None:
            earlier = number_of_id.setdefault(row.id, number)
            if earlier != number:
                problems.append((number, f"the id {row.id!r} is already used in {table.unit} {earlier}"))
        rows.append(row)
    if problems:
        _refuse(path, table.unit, problems)
    return rows


def _refuse(path: str, unit: Unit, problems: list[tuple[int, str]]) -> NoReturn:
    (first, reason), *others = problems
    more = [f"{place(path, unit, number)}: {why}" for number, why in others[: MAX_REPORTED - 1]]
    if len(problems) > MAX_REPORTED:
        more.append(f"... and {len(problems) - MAX_REPORTED} more bad {unit}s")
    raise DataError("\n".join([reason, *more]), where=place(path, unit, first))


def _check_label_key(where: str, keys: RowKeys, rows: list[PromptRow]) -> None:
    """A label key that was chosen (rows may lack the usual one) and that no row has is a mistake."""
    if keys.label not in (None, RowKeys().label) and all(row.label is None for row in rows):
        raise DataError(f"no row has the label field {keys.label!r}", where=where, hint="see --label-key")


def _source_hash(contents: Sequence[bytes], first: int, last: int, keys: RowKeys) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    named: list[object] = [first, last, keys.prompt, keys.label, keys.metadata, keys.id]
    if keys.multimodal:
        named.append(keys.multimodal)
    digest.update(json.dumps(named).encode())
    return digest.hexdigest()[:12]
