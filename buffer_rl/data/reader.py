"""Data files to datasets. Every bad row is named with file, line or row, and reason before anything else starts.

The format follows from the path: ``.parquet`` is Parquet, a folder is one that Hugging Face's ``Dataset.save_to_disk``
wrote or holds several files, ``data/*.parquet`` is all files that match, everything else is JSONL; compressed files
are decompressed. A path may have a slice, ``train.jsonl@[0:100]``, that counts rows as Python would, through all files.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

from buffer_rl.data import files
from buffer_rl.data.arrow import SPLITS_FILE, STATE_FILE, ArrowTable, read_parquet, read_saved_folder
from buffer_rl.data.check import MAX_PROBLEMS, Findings
from buffer_rl.data.dataset import (
    FilePart,
    PromptDataset,
    PromptRow,
    RowError,
    RowFacts,
    RowKeys,
    Unit,
    build_row,
    likely_label,
    missing_field,
    row_label,
)
from buffer_rl.data.files import Content, DataPath, LocalFile, digest_of
from buffer_rl.data.jsonl import JsonlTable, RowsOnAccess
from buffer_rl.errors import DataError
from buffer_rl.options.file_kind import HEAD_BYTES, not_jsonl
from buffer_rl.options.redaction import mask_url

# What counts as data in a folder, besides a suffix of a compression. Other files in it are left alone.
DATA_SUFFIXES = (".parquet", ".jsonl", ".ndjson")
_MAGIC = "*?["
Table = JsonlTable | ArrowTable
"""The records of one file or folder. contents: the bytes that they were read from, which the source hash covers."""


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
        table = _open(each, alone=len(paths) == 1)
        parts.append(OpenPart(path=each, table=table, start=parts[-1].stop if parts else 0))
    return parts


def _open(path: str, *, alone: bool) -> Table:
    """alone: the only file of its source. Of several, none stays open."""
    if files.is_folder(path):
        return read_saved_folder(path)
    if files.uncompressed_name(path).lower().endswith(".parquet"):
        return read_parquet(path)
    content = files.open_content(path) if alone else files.read_bytes(path)
    what, hint = not_jsonl(content[:HEAD_BYTES], mask_url(files.uncompressed_name(path)))
    if what:
        raise DataError(f"this looks like {what}", where=mask_url(path), expected="one JSON object a line", hint=hint)
    return JsonlTable(content)


def _is_pattern(path: str) -> bool:
    """Whether ``path`` is to be matched: ``?`` begins the query of a web address, and a file may have such a name."""
    if path.startswith(("http://", "https://")) or not any(character in path for character in _MAGIC):
        return False
    return not files.exists(path)


def _is_saved_folder(path: str) -> bool:
    return any(files.exists(files.join(path, name)) for name in (STATE_FILE, SPLITS_FILE))


def _is_data(name: str) -> bool:
    return not name.startswith((".", "_")) and files.uncompressed_name(name).lower().endswith(DATA_SUFFIXES)


def read_dataset(source: str, keys: RowKeys | None = None) -> PromptDataset:
    """Read and validate ``PATH`` or ``PATH@[start:stop]``.

    The rows of one large local JSONL file are read on access, all others are held in memory.

    Only the rows of the slice are validated. Raises DataError for a file that cannot be read, for the first
    bad rows (at most ``MAX_PROBLEMS``, all in one error) and where there is no row.
    """
    keys = keys or RowKeys()
    data_path = DataPath.parse(source)
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
    with ThreadPoolExecutor(max_workers=1) as pool:  # hashing leaves the interpreter to others
        digest = pool.submit(digest_of, *_contents(parts))
        rows, found = _checked_rows(parts, first, last, keys)
    if isinstance(rows, RowsOnAccess):
        rows.file.seal(digest.result().hexdigest())
    _find_repeated_ids(parts, first, last, keys, found)
    if found.problems:
        _refuse(found, parts[0].table.unit, last - first)
    if keys.label is not None and not found.facts.has_label:
        table = next(part.table for part in parts if len(part.table))
        _explain_labels(mask_url(str(data_path)), keys, found.facts, table.field_names())
    several = len(parts) > 1
    return PromptDataset(
        rows=rows,
        source_hash=_source_hash(digest.result(), first, last, keys),
        path=data_path.path if several else parts[0].path,
        unit=parts[0].table.unit,
        parts=tuple(FilePart(path=part.path, unit=part.table.unit, first=part.start - first) for part in parts)
        if several
        else (),
        facts=found.facts,
    )


def _checked_rows(
    parts: Sequence[OpenPart], first: int, last: int, keys: RowKeys
) -> tuple[Sequence[PromptRow], Findings]:
    """The rows, which are good if no problems were found. Repeated ids are not looked for."""
    found = Findings()
    table, content = parts[0].table, parts[0].table.contents[0]
    if not (isinstance(table, JsonlTable) and isinstance(content, LocalFile)):
        return tuple(row for _, row in _good_rows(parts, first, last, keys, found)), found
    for begin, end in table.blocks(first, last):
        records = table.plain_objects(begin, end)
        if records is None or not found.add_plain_rows(records, begin - first, keys):
            deque(_good_rows(parts, begin, end, keys, found, begin - first), maxlen=0)
    return RowsOnAccess(content, table, first, last, keys), found


def _good_rows(
    parts: Sequence[OpenPart], first: int, last: int, keys: RowKeys, found: Findings, position: int = 0
) -> Iterator[tuple[str, PromptRow]]:
    """Those of the records ``first`` to ``last`` and the file and line of each. position: of the first one."""
    for row_number, (part, number, record) in enumerate(_records(parts, first, last, keys), start=position):
        where = row_label(part.path, part.table.unit, number)
        try:
            if isinstance(record, RowError):
                raise record
            row = build_row(record, keys, row=row_number, line=number)
        except RowError as error:
            found.refuse(row_number, where, error)
            continue
        found.add(row)
        yield where, row


def _find_repeated_ids(parts: Sequence[OpenPart], first: int, last: int, keys: RowKeys, found: Findings) -> None:
    """Rows whose ids have the hash of another one are read again to see whether it is the same id."""
    repeated = found.repeated_ids()
    if not repeated:
        return
    twice = Findings()
    place_of_id: dict[str, str] = {}
    for where, row in _good_rows(parts, first, last, keys, Findings()):
        if row.id is not None and hash(row.id) in repeated:
            here = where if len(parts) > 1 else f"{parts[0].table.unit} {row.line}"
            earlier = place_of_id.setdefault(row.id, here)
            if earlier != here:
                twice.refuse(row.row, where, RowError(f"the id {row.id!r} is already used in {earlier}"))
    found.problems |= twice.problems
    found.num_problems += twice.num_problems


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


def _refuse(found: Findings, unit: Unit, num_rows: int) -> NoReturn:
    """One line for each reason, with the first place of it and the number of rows."""
    problems = sorted(found.problems.values(), key=lambda problem: problem.position)[:MAX_PROBLEMS]
    lines = []
    for problem in problems:
        others = problem.count - 1
        more = f", also in {others} more {unit}{'s' if others > 1 else ''}" if others else ""
        more = f" in all {num_rows} {unit}s" if problem.count == num_rows > 1 else more
        lines.append(f"{problem.where}: {problem.error.reason}{more}{problem.error.detail}")
    if left := found.num_problems - sum(problem.count for problem in problems):
        lines.append(f"... and {left} more bad {unit}s")
    where = problems[0].where
    of_all = problems[0].count == num_rows or unit == "row"  # tables have the same columns in all rows
    hint = problems[0].error.hint if of_all else ""
    raise DataError("\n".join(lines).removeprefix(f"{where}: "), where=where, hint=hint)


def _explain_labels(where: str, keys: RowKeys, facts: RowFacts, fields: list[str]) -> None:
    """A label key that was chosen (rows may lack the usual one) and that no row has is a mistake."""
    if keys.label != RowKeys().label:
        shown, hint = missing_field(keys, "label", fields)
        raise DataError(f"no row has the label field {keys.label!r}{shown}", where=where, hint=hint)
    facts.likely_label = likely_label(keys, fields)


def _contents(parts: Sequence[OpenPart]) -> list[Content]:
    """What is hashed. Of several files also where each ends: moving a row to the next file makes another source."""
    contents = [content for part in parts for content in part.table.contents]
    if len(parts) == 1:
        return contents
    sizes = [[len(content) for content in part.table.contents] for part in parts]
    return [json.dumps(sizes).encode(), *contents]


def _source_hash(digest: hashlib._Hash, first: int, last: int, keys: RowKeys) -> str:
    """digest: of the contents; it is updated."""
    named: list[object] = [first, last, keys.prompt, keys.label, keys.metadata, keys.id]
    if keys.multimodal:
        named.append(keys.multimodal)
    if keys.tools != RowKeys().tools:
        named.append(["tools", keys.tools])
    digest.update(json.dumps(named).encode())
    return digest.hexdigest()[:12]
