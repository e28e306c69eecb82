"""JSONL files to datasets. Every bad line is named with file, line and reason before anything else starts.

A file may be given with a slice, ``train.jsonl@[0:100]``, that counts the file's non-blank lines as Python would.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import jsonlines

from buffer_rl.data.dataset import PromptDataset, PromptRow
from buffer_rl.data.row import RowError, RowKeys, build_row
from buffer_rl.errors import DataError

MAX_REPORTED = 20
_SLICE = re.compile(r"\[\s*([+-]?\d+)?\s*:\s*([+-]?\d+)?\s*\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPath:
    """A data file and the slice of its rows that is wanted; ``None`` is an open end."""

    path: str
    start: int | None = None
    stop: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``PATH`` or ``PATH@[start:stop]``. Raises DataError for a malformed slice."""
        path, marker, rest = text.rpartition("@[")
        if not marker:
            return cls(path=text)
        match = _SLICE.fullmatch("[" + rest)
        if match is None:
            raise DataError(f"malformed slice '@[{rest}'", where=path, expected="file.jsonl@[start:stop]")
        start, stop = (int(part) if part else None for part in match.groups())
        return cls(path=path, start=start, stop=stop)

    @property
    def sliced(self) -> bool:
        """Whether only a part of the file is wanted."""
        return self.start is not None or self.stop is not None

    def __str__(self) -> str:
        ends = ["" if end is None else str(end) for end in (self.start, self.stop)]
        return f"{self.path}@[{':'.join(ends)}]" if self.sliced else self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    number: int
    content: bytes


def read_dataset(source: str, keys: RowKeys | None = None) -> PromptDataset:
    """Read and validate ``PATH`` or ``PATH@[start:stop]``.

    Only the rows of the slice are validated. Raises DataError for a file that cannot be read, for the first
    bad lines (at most ``MAX_REPORTED``, all in one error) and where there is no row.
    """
    keys = keys or RowKeys()
    data_path = DataPath.parse(source)
    content = _read_bytes(data_path.path)
    lines = list(_numbered_lines(content))
    if not lines:
        raise DataError("the file has no rows", where=data_path.path, expected="one JSON object a line")
    first, last, _ = slice(data_path.start, data_path.stop).indices(len(lines))
    if first >= last:
        raise DataError("the slice holds no rows", where=str(data_path), hint=f"the file has {len(lines)} rows")
    rows = _build_rows(data_path.path, lines[first:last], keys)
    _check_label_key(str(data_path), keys, rows)
    return PromptDataset(tuple(rows), _source_hash(content, first, last, keys))


def _read_bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise DataError("there is no such file", where=path, hint=f"the current folder is {Path.cwd()}") from None
    except OSError as error:
        raise DataError(f"cannot read the file: {error.strerror}", where=path) from error


def _numbered_lines(content: bytes) -> Iterator[_Line]:
    """The non-blank lines with their numbers from 1. Only a line feed ends a line (JSON text may hold U+2028)."""
    for number, line in enumerate(io.BytesIO(content.removeprefix(b"\xef\xbb\xbf")), start=1):
        if line.strip():
            yield _Line(number=number, content=line.rstrip(b"\r\n"))


def _build_rows(path: str, lines: list[_Line], keys: RowKeys) -> list[PromptRow]:
    reader = jsonlines.Reader([line.content for line in lines], loads=_loads)
    rows: list[PromptRow] = []
    line_of_id: dict[str, int] = {}
    problems: list[tuple[int, str]] = []
    for position, line in enumerate(lines):
        try:
            row = build_row(_read_object(reader), keys, row=position, line=line.number)
        except RowError as error:
            problems.append((line.number, str(error)))
            continue
        if row.id is not None:
            earlier = line_of_id.setdefault(row.id, line.number)
            if earlier != line.number:
                problems.append((line.number, f"the id {row.id!r} is already used in line {earlier}"))
        rows.append(row)
    if problems:
        _refuse(path, problems)
    return rows


def _read_object(reader: jsonlines.Reader) -> dict[str, Any]:
    try:
        record = reader.read(allow_none=True)
    except jsonlines.InvalidLineError as error:
        cause = error.__cause__
        if isinstance(cause, UnicodeDecodeError):
            raise RowError(f"invalid UTF-8 at byte {cause.start + 1} of the line") from error
        raise RowError(f"invalid JSON: {cause}") from error
    if not isinstance(record, dict):
        raise RowError("the line is not a JSON object")
    return record


def _loads(text: str | bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at column {error.colno}") from error
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _refuse(path: str, problems: list[tuple[int, str]]) -> NoReturn:
    (line, reason), *others = problems
    more = [f"{path}:{number}: {why}" for number, why in others[: MAX_REPORTED - 1]]
    if len(problems) > MAX_REPORTED:
        more.append(f"... and {len(problems) - MAX_REPORTED} more bad lines")
    raise DataError("\n".join([reason, *more]), where=f"{path}:{line}")


def _check_label_key(where: str, keys: RowKeys, rows: list[PromptRow]) -> None:
    """A label key that was chosen (rows may lack the usual one) and that no row has is a mistake."""
    if keys.label not in (None, RowKeys().label) and all(row.label is None for row in rows):
        raise DataError(f"no row has the label field {keys.label!r}", where=where, hint="see --label-key")


def _source_hash(content: bytes, first: int, last: int, keys: RowKeys) -> str:
    digest = hashlib.sha256(content)
    digest.update(json.dumps([first, last, keys.prompt, keys.label, keys.metadata, keys.id]).encode())
    return digest.hexdigest()[:12]
