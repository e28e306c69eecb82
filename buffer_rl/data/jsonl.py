"""JSONL files as tables: one JSON object a line, blank lines skipped but counted."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jsonlines

from buffer_rl.data.dataset import Unit
from buffer_rl.data.row import RowError, RowKeys

_TOO_DEEP = "nested too deeply"
MAX_LINE_BYTES = 16 << 20
"""A longer line is a file of another format, or one without line ends."""
MAX_DEPTH = 128
"""Levels of a value. What is written of samples later is limited too, to some 250."""


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
        for line, record in zip(lines, parse_lines(line.content for line in lines), strict=True):
            yield line.number, record


def parse_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any] | RowError]:
    """The object of each line, or why there is none. The lines are not blank and have no line ends."""
    length = 0

    def counted() -> Iterator[bytes]:
        nonlocal length
        for line in lines:
            length = len(line)
            yield line if length <= MAX_LINE_BYTES else b""

    reader = jsonlines.Reader(counted(), loads=_loads)
    while True:
        try:
            yield _read_object(reader)
        except EOFError:
            return
        except RowError as error:
            yield error if length <= MAX_LINE_BYTES else too_long()


def too_long() -> RowError:
    """Why a line of more than ``MAX_LINE_BYTES`` is refused."""
    return RowError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")


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


def _loads(line: str | bytes) -> Any:
    text = line if isinstance(line, str) else line.decode()  # it is text: the reader has decoded it
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_mapping)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at column {error.colno}") from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    # Counting is quick, and hardly a row has so many brackets at all.
    if text.count("{") + text.count("[") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError(_TOO_DEEP)
    return value


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} comes twice in one object")
    return found


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
