"""JSONL files as tables: one JSON object a line, blank lines skipped but counted."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jsonlines

from buffer_rl.data.dataset import Unit
from buffer_rl.data.row import RowError, RowKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    number: int
    content: bytes


class JsonlTable:
    """The non-blank lines of one file; its unit is the line."""

    unit: Unit = "line"

    def __init__(self, content: bytes) -> None:
        self.contents: Sequence[bytes] = [content]
        self._lines = list(_numbered_lines(content))

    def __len__(self) -> int:
        return len(self._lines)

    def records(self, first: int, last: int, keys: RowKeys) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
        """See ``Table.records``."""
        lines = self._lines[first:last]
        reader = jsonlines.Reader([line.content for line in lines], loads=_loads)
        for line in lines:
            try:
                record: dict[str, Any] | RowError = _read_object(reader)
            except RowError as error:
                record = error
            yield line.number, record


def _numbered_lines(content: bytes) -> Iterator[_Line]:
    """The non-blank lines with their numbers from 1. Only a line feed ends a line (JSON text may hold U+2028)."""
    for number, line in enumerate(io.BytesIO(content.removeprefix(b"\xef\xbb\xbf")), start=1):
        if line.strip():
            yield _Line(number=number, content=line.rstrip(b"\r\n"))


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
