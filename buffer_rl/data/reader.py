"""Data files to datasets. Every bad row is named with file, line or row, and reason before anything else starts.

The format follows from the path: ``.parquet`` is Parquet, a folder is one that Hugging Face's ``Dataset.save_to_disk``
wrote or holds several files, ``data/*.parquet`` is all files that match, everything else is JSONL; compressed files
are decompressed. A path may have a slice, ``train.jsonl@[0:100]``, that counts rows as Python would, through all files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from buffer_rl.data import files
from buffer_rl.data.arrow import SPLITS_FILE, STATE_FILE, read_parquet, read_saved_folder
from buffer_rl.data.dataset import (
    FilePart,
    PromptDataset,
    PromptRow,
    RowError,
    RowFacts,
    RowKeys,
    Unit,
    build_row,
    row_label,
)
from buffer_rl.data.files import DataPath
from buffer_rl.data.index import DataIndex, LazyRows
from buffer_rl.data.jsonl import MAX_PROBLEMS, JsonlTable
from buffer_rl.data.large_files import BadRowsError, indexed_entry, is_indexed
from buffer_rl.errors import DataError
from buffer_rl.redaction import mask_url

# What counts as data in a folder, besides a suffix of a compression. Other files in it are left alone.
DATA_SUFFIXES = (".parquet", ".jsonl", ".ndjson")
_MAGIC = "*?["


class Table(Protocol):
    """The records of one file or folder."""

    @property
    def unit(self) -> Unit: ...

    @property
    def contents(self) -> Sequence[bytes]:
        """The bytes that the records were read from; what the source hash covers."""
        ...

    def __len__(self) -> int: ...

    def records(self, first: int, last: int, keys: RowKeys) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
        """The records ``first`` to ``last`` (exclusive): the number of each one's line or row, and what it holds or
        why it cannot be read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPart:
    """One file's records. start: number of records in the files before it."""

    path: str
    table: Table
    start: int

    @property
    def stop(self) -> int:
        """Number of records up to the end of this file."""
        return self.start + len(self.table)


def open_parts(path: str) -> list[OpenPart]:
    """The files behind ``path`` in the order of their names. Raises DataError if there is none or one is unreadable.

    A folder that Hugging Face's ``Dataset.save_to_disk`` wrote is one part; of any other folder, its data files
    (``DATA_SUFFIXES``), those in folders below it and those that begin with ``.`` or ``_`` excepted.
    """
    if _is_pattern(path):
        paths = files.matches(path)
        if not paths:
            raise DataError("no file matches the pattern", where=mask_url(path))
    elif files.is_folder(path) and not _is_saved_folder(path):
        paths = [files.join(path, name) for name in files.list_folder(path) if _is_data(name)]
        if not paths:
            raise DataError(
                "there are no data files in the folder",
                where=mask_url(path),
                expected=f"files {', '.join(DATA_SUFFIXES)}, or a folder that Dataset.save_to_disk wrote "
                f"(with {STATE_FILE})",
            )
    else:
        paths = [path]
    parts: list[OpenPart] = []
    for each in paths:
        parts.append(OpenPart(path=each, table=_open(each), start=parts[-1].stop if parts else 0))
    return parts


def _open(path: str) -> Table:
    if files.is_folder(path):
        return read_saved_folder(path)
    if files.uncompressed_name(path).lower().endswith(".parquet"):
        return read_parquet(path)
    return JsonlTable(files.read_bytes(path))


def _is_pattern(path: str) -> bool:
    """Whether ``path`` is to be matched: ``?`` begins the query of a web address, and a file may have such a name."""
    if path.startswith(("http://", "https://")) or not any(character in path for character in _MAGIC):
        return False
    return not files.exists(path)


def _is_saved_folder(path: str) -> bool:
    return any(files.exists(files.join(path, name)) for name in (STATE_FILE, SPLITS_FILE))


def _is_data(name: str) -> bool:
    return not name.startswith((".", "_")) and files.uncompressed_name(name).lower().endswith(DATA_SUFFIXES)


def read_dataset(source: str, keys: RowKeys | None = None, index: DataIndex | None = None) -> PromptDataset:
    """Read and validate ``PATH`` or ``PATH@[start:stop]``.

    A large local JSONL file without slice is validated by several processes, and only if it is not known to ``index``
    (the user's, where None); its rows are read on access. Everything else is held in memory.

    Only the rows of the slice are validated. Raises DataError for a file that cannot be read, for the first
    bad rows (at most ``MAX_PROBLEMS``, all in one error) and where there is no row.
    """
    keys = keys or RowKeys()
    data_path = DataPath.parse(source)
    index = index or DataIndex()
    if not data_path.sliced and is_indexed(data_path.path, index):
        return _read_indexed(data_path.path, keys, index)
    parts = open_parts(data_path.path)
    num_rows = parts[-1].stop
    if not num_rows:
        expected = "one JSON object a line" if parts[0].table.unit == "line" else "at least one row"
        what = "the file has no rows" if len(parts) == 1 else f"none of the {len(parts)} files has rows"
        raise DataError(what, where=mask_url(data_path.path), expected=expected)
    first, last, _ = slice(data_path.start, data_path.stop).indices(num_rows)
    if first >= last:
        what = "the file has" if len(parts) == 1 else f"the {len(parts)} files have"
        raise DataError("the slice holds no rows", where=mask_url(str(data_path)), hint=f"{what} {num_rows} rows")
    rows = _build_rows(parts, first, last, keys)
    facts = _facts(rows)
    _check_label_key(mask_url(str(data_path)), keys, facts)
    several = len(parts) > 1
    return PromptDataset(
        rows=tuple(rows),
        source_hash=_source_hash(_digest(_contents(parts)), first, last, keys),
        path=data_path.path if several else parts[0].path,
        unit=parts[0].table.unit,
        parts=tuple(_file_parts(parts, first)) if several else (),
        facts=facts,
    )


def _read_indexed(path: str, keys: RowKeys, index: DataIndex) -> PromptDataset:
    try:
        entry = indexed_entry(path, keys, index, lambda digest, rows: _source_hash(digest, 0, rows, keys))
    except BadRowsError as error:
        _refuse([(row_label(path, "line", line), reason) for line, reason in error.problems], "line", error.count)
    if not len(entry.offsets):
        raise DataError("the file has no rows", where=path, expected="one JSON object a line")
    facts = RowFacts(rewards=entry.rewards, media=entry.media, has_label=entry.has_label)
    _check_label_key(path, keys, facts)
    return PromptDataset(rows=LazyRows(path, keys, entry), source_hash=entry.source_hash, path=path, facts=facts)


def _facts(rows: Sequence[PromptRow]) -> RowFacts:
    rewards: dict[str, int] = {}
    for row in rows:
        if name := row.metadata.get("rm_type"):
            rewards.setdefault(str(name), row.row)
    media = frozenset(name for row in rows for name in row.multimodal or ())
    return RowFacts(rewards=rewards, media=media, has_label=any(row.label is not None for row in rows))


def _file_parts(parts: Sequence[OpenPart], first: int) -> Iterator[FilePart]:
    for part in parts:
        yield FilePart(path=part.path, unit=part.table.unit, first=part.start - first)


def _build_rows(parts: Sequence[OpenPart], first: int, last: int, keys: RowKeys) -> list[PromptRow]:
    rows: list[PromptRow] = []
    place_of_id: dict[str, str] = {}
    problems: list[tuple[str, str]] = []
    for position, (part, number, record) in enumerate(_records(parts, first, last, keys)):
        where = row_label(part.path, part.table.unit, number)
        try:
            if isinstance(record, RowError):
                raise record
            row = build_row(record, keys, row=position, line=number)
        except RowError as error:
            problems.append((where, str(error)))
            continue
        if row.id is not None:
            here = where if len(parts) > 1 else f"{part.table.unit} {number}"
            earlier = place_of_id.setdefault(row.id, here)
            if earlier != here:
                problems.append((where, f"the id {row.id!r} is already used in {earlier}"))
        rows.append(row)
    if problems:
        _refuse(problems, parts[0].table.unit)
    return rows


def _records(
    parts: Sequence[OpenPart], first: int, last: int, keys: RowKeys
) -> Iterator[tuple[OpenPart, int, dict[str, Any] | RowError]]:
    """Those of the records ``first`` to ``last``, counted through all files, that each file has."""
    for part in parts:
        begin, end = max(first, part.start), min(last, part.stop)
        if begin >= end:
            continue
        for number, record in part.table.records(begin - part.start, end - part.start, keys):
            yield part, number, record


def _refuse(problems: list[tuple[str, str]], unit: Unit, count: int = 0) -> NoReturn:
    """count: how many there are in all, where ``problems`` are the first ones."""
    count = count or len(problems)
    (first, reason), *others = problems
    more = [f"{where}: {why}" for where, why in others[: MAX_PROBLEMS - 1]]
    if count > MAX_PROBLEMS:
        more.append(f"... and {count - MAX_PROBLEMS} more bad {unit}s")
    raise DataError("\n".join([reason, *more]), where=first)


def _check_label_key(where: str, keys: RowKeys, facts: RowFacts) -> None:
    """A label key that was chosen (rows may lack the usual one) and that no row has is a mistake."""
    if keys.label not in (None, RowKeys().label) and not facts.has_label:
        raise DataError(f"no row has the label field {keys.label!r}", where=where, hint="see --label-key")


def _contents(parts: Sequence[OpenPart]) -> list[bytes]:
    """What is hashed. Of several files also where each ends: moving a row to the next file makes another source."""
    if len(parts) == 1:
        return list(parts[0].table.contents)
    sizes = [[len(content) for content in part.table.contents] for part in parts]
    return [json.dumps(sizes).encode(), *(content for part in parts for content in part.table.contents)]


def _digest(contents: Sequence[bytes]) -> hashlib._Hash:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest


def _source_hash(digest: hashlib._Hash, first: int, last: int, keys: RowKeys) -> str:
    """digest: of the contents; it is updated."""
    named: list[object] = [first, last, keys.prompt, keys.label, keys.metadata, keys.id]
    if keys.multimodal:
        named.append(keys.multimodal)
    if keys.tools != RowKeys().tools:
        named.append(["tools", keys.tools])
    digest.update(json.dumps(named).encode())
    return digest.hexdigest()[:12]
