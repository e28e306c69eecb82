"""Data files to datasets. Every bad row is named with file, line or row, and reason before anything else starts.

The format follows from the path: ``.parquet`` is Parquet, a folder is one that Hugging Face's ``Dataset.save_to_disk``
wrote or holds several files, ``data/*.parquet`` is all files that match, everything else is JSONL; compressed files
are decompressed. A path may have a slice, ``train.jsonl@[0:100]``, that counts rows as Python would, through all files.

A row is checked by ``build_row`` alone. ``Findings.add_plain_rows`` takes whole blocks of rows for which that is not
needed: a column at a time, it accepts what the rules surely accept, and leaves everything else to them.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NoReturn

import numpy as np

from buffer_rl.data import files
from buffer_rl.data.arrow import SPLITS_FILE, STATE_FILE, ArrowTable, read_parquet, read_saved_folder
from buffer_rl.data.dataset import (
    FilePart,
    PromptDataset,
    PromptRow,
    RowError,
    RowFacts,
    RowKeys,
    RowNoun,
    build_row,
    label_in,
    likely_label,
    missing_field,
    row_label,
)
from buffer_rl.data.files import Content, LocalFile, digest_of, split_slice
from buffer_rl.data.jsonl import JsonlTable, RowsOnAccess
from buffer_rl.errors import DataError
from buffer_rl.kinds.reward import reward_weights
from buffer_rl.options.file_kind import HEAD_BYTES, not_jsonl
from buffer_rl.options.redaction import mask_url

# What counts as data in a folder, besides a suffix of a compression. Other files in it are left alone.
DATA_SUFFIXES = (".parquet", ".jsonl", ".ndjson")
_MAGIC = "*?["
MAX_PROBLEMS = 20
MAX_REWARD_NAMES = 1000
_NONE: type = type(None)
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
    elif files.is_folder(path) and not any(files.exists(files.join(path, name)) for name in (STATE_FILE, SPLITS_FILE)):
        paths = [files.join(path, name) for name in files.list_folder(path) if _is_data(name)]
        if not paths:
            saved = f"a folder that Dataset.save_to_disk wrote (with {STATE_FILE})"
            expected = f"files {', '.join(DATA_SUFFIXES)}, or {saved}"
            raise DataError("there are no data files in the folder", where=mask_url(path), expected=expected)
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
    what, hint = not_jsonl(content[:HEAD_BYTES], mask_url(name := files.uncompressed_name(path)))
    if what:
        hint = f"unpack the file, then {hint}" if hint and name != path else hint
        raise DataError(f"this looks like {what}", where=mask_url(path), expected="one JSON object a line", hint=hint)
    return JsonlTable(content)


def _is_pattern(path: str) -> bool:
    """Whether ``path`` is to be matched: ``?`` begins the query of a web address, and a file may have such a name."""
    if path.startswith(("http://", "https://")) or not any(character in path for character in _MAGIC):
        return False
    return not files.exists(path)


def _is_data(name: str) -> bool:
    return not name.startswith((".", "_")) and files.uncompressed_name(name).lower().endswith(DATA_SUFFIXES)


@dataclass(slots=True, kw_only=True)
class Problem:
    """A reason for which rows are refused. position, where: of the first such row. count: of such rows."""

    position: int
    where: str
    error: RowError
    count: int = 1


@dataclass(slots=True, kw_only=True)
class Findings:
    """What is found of a source's rows as they are checked: the bad ones, ids that come twice, what rows say together.

    problems: the first reasons for which rows are refused; num_problems: number of all refused rows. id_hashes: of
    each row's id. facts: of the good rows."""

    problems: dict[str, Problem] = field(default_factory=dict)
    num_problems: int = 0
    id_hashes: array[int] = field(default_factory=lambda: array("q"))
    facts: RowFacts = field(default_factory=RowFacts)

    def refuse(self, position: int, where: str, error: RowError) -> None:
        """Count a bad row."""
        self.num_problems += 1
        if error.reason in self.problems:
            self.problems[error.reason].count += 1
        elif len(self.problems) < MAX_PROBLEMS:
            self.problems[error.reason] = Problem(position=position, where=where, error=error)

    def add(self, row: PromptRow) -> None:
        """Count a good row."""
        if row.id is not None:
            self.id_hashes.append(hash(row.id))
        self.facts.has_label = self.facts.has_label or row.label is not None
        self.facts.media.update(row.multimodal or ())
        self.facts.decoded.update(row.decoded)
        try:
            names = reward_weights(row.metadata)
        except DataError as error:
            self.facts.bad_rewards = self.facts.bad_rewards or (row.row, error)
            return
        for name in names:
            if len(self.facts.rewards) < MAX_REWARD_NAMES:
                self.facts.rewards.setdefault(name, row.row)

    def add_plain_rows(self, records: list[dict[str, Any]], position: int, keys: RowKeys) -> bool:
        """Count the rows that begin at ``position`` if all are surely good; false if ``build_row`` has to say."""
        prompts, metadata, tools, ids = (
            [record.get(name) for record in records]  # type: ignore[arg-type]  # no field is called None
            for name in (keys.prompt, keys.metadata, keys.tools, keys.id)
        )
        labels = [label_in(record, keys) for record in records]
        label_types = _types(labels)
        if list in label_types:
            labels = list(chain.from_iterable(label if type(label) is list else (label,) for label in labels))
        if not (
            _are_plain_prompts(prompts, may_hold_json=keys.decode_json)
            and _types(labels) <= {str, int, float, bool, _NONE}
            and _types(metadata) <= {dict, _NONE}
            and not any("rewards" in values for values in metadata if values)
            and _types(rewards := [values.get("rm_type") if values else None for values in metadata]) <= {str, _NONE}
            and _types(tools) <= {list, _NONE}
            and _types(chain.from_iterable(filter(None, tools))) <= {dict}
            and _types(ids) <= {str, int, _NONE}
        ):
            return False
        self.id_hashes.extend([hash(str(name)) for name in ids if name is not None])
        self.facts.has_label = self.facts.has_label or label_types != {_NONE}
        self.facts.media.update(
            media for media, name in keys.multimodal if any(record.get(name) is not None for record in records)
        )
        for reward in set(filter(None, rewards)) - self.facts.rewards.keys():
            if len(self.facts.rewards) < MAX_REWARD_NAMES:
                self.facts.rewards[reward] = position + rewards.index(reward)
        return True

    def repeated_ids(self) -> set[int]:
        """The hashes that several ids have; hardly ever because two ids have the same one."""
        hashes = np.sort(np.asarray(self.id_hashes))
        return set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())


def read_dataset(source: str, keys: RowKeys | None = None) -> PromptDataset:
    """Read and validate ``PATH`` or ``PATH@[start:stop]``.

    The rows of one large local JSONL file are read on access, all others are held in memory.

    Only the rows of the slice are validated. Raises DataError for a file that cannot be read, for the first
    bad rows (at most ``MAX_PROBLEMS``, all in one error) and where there is no row.
    """
    keys = keys or RowKeys()
    path, wanted = split_slice(source)
    parts = open_parts(path)
    num_rows = parts[-1].stop
    if not num_rows:
        expected = "one JSON object a line" if parts[0].table.unit == "line" else "at least one row"
        what = "the file has no rows" if len(parts) == 1 else f"none of the {len(parts)} files has rows"
        raise DataError(what, where=mask_url(path), expected=expected)
    first, last, _ = wanted.indices(num_rows)
    if first >= last:
        what = "the file has" if len(parts) == 1 else f"the {len(parts)} files have"
        raise DataError("the slice holds no rows", where=mask_url(source), hint=f"{what} {num_rows} rows")
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
        _explain_labels(mask_url(source), keys, found.facts, table.field_names())
    return PromptDataset(
        rows=rows,
        source_hash=_source_hash(digest.result(), first, last, keys),
        path=path if len(parts) > 1 else parts[0].path,
        parts=tuple(FilePart(path=part.path, unit=part.table.unit, first=part.start - first) for part in parts),
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
    """Those of the records ``first`` to ``last``, counted through all files, and the file and line of each. position:
    of the first one."""
    for part in parts:
        begin, end = max(first, part.start) - part.start, min(last, part.stop) - part.start
        for number, record in part.table.records(begin, end, keys) if begin < end else ():
            where = row_label(part.path, part.table.unit, number)
            try:
                row = build_row(record, keys, row=position, line=number)
            except RowError as error:
                found.refuse(position, where, error)
            else:
                found.add(row)
                yield where, row
            position += 1


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


def _refuse(found: Findings, unit: RowNoun, num_rows: int) -> NoReturn:
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


def _are_plain_prompts(prompts: list[Any], *, may_hold_json: bool) -> bool:
    """Whether all are text, or all are chat messages with role and content. may_hold_json: those of which a part may be
    JSON text are not."""
    types = _types(prompts)
    if types == {str}:
        stripped = list(map(str.strip, prompts))
        return all(stripped) and not (may_hold_json and any(text[0] == "[" for text in stripped))
    if types != {list} or not all(prompts):
        return False
    messages = list(chain.from_iterable(prompts))
    if _types(messages) != {dict}:
        return False
    if may_hold_json and any("tool_calls" in message for message in messages):
        return False
    roles = [message.get("role") for message in messages]
    contents = [message.get("content") for message in messages]
    return _types(roles) == {str} and all(roles) and _types(contents) <= {str, list}


def _types(values: Iterable[Any]) -> set[type]:
    return set(map(type, values))
