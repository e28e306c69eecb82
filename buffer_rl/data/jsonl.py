"""JSONL files: one JSON object a line, blank lines skipped but counted.

Of each row the position of its first byte is held, no more; rows are parsed on access (``parse_line``).
``plain_objects`` parses a block of rows several times as quickly and says nothing of the rows that it cannot: whatever
is not surely fine goes to ``parse_line``, which alone knows what is refused, and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson

from buffer_rl.data.dataset import PromptRow, RowError, RowKeys, RowNoun, build_row, row_label
from buffer_rl.data.files import Content, LocalFile, read_in_blocks
from buffer_rl.data.json_text import MAX_DEPTH, json_value
from buffer_rl.errors import DataError

MAX_LINE_BYTES = 16 << 20
"""A longer line is a file of another format, or one without line ends."""
BOM = b"\xef\xbb\xbf"
_SKIPPED = ("\ufeff", "\x1e")
"""At most one of them may begin a line: a byte order mark, or the separator of RFC 7464."""
_BLOCK_BYTES = 1 << 16
_DUMPED_LEVELS = 254
"""orjson writes no value of more levels."""


class JsonlTable:
    """The non-blank lines of one file; its unit is the line."""

    unit: RowNoun = "line"

    def __init__(self, content: Content) -> None:
        self.contents = [content]
        self._content = content
        starts, not_objects = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        position, before = 0, b"\n"
        for block in read_in_blocks(content):
            values = np.frombuffer(before + block, np.uint8)
            found = np.flatnonzero(values[:-1] == ord("\n"))
            not_objects.append(found[values[found + 1] != ord("{")] + position)
            starts.append(found + position)
            position, before = position + len(block), block[-1:]
        self._starts = np.concatenate([*starts, [len(content)]])
        lines = np.searchsorted(self._starts, np.concatenate(not_objects))
        blank = np.array([line for line in lines if not self._line(line).strip()], np.int64)
        self._blank_before = blank - np.arange(len(blank))  # of each blank line, the rows before it
        if len(blank):
            self._starts = np.delete(self._starts, blank)  # now of rows

    def __len__(self) -> int:
        return len(self._starts) - 1

    def field_names(self) -> list[str]:
        """The names of the first row's fields; none if it is no object."""
        first = parse_line(self._line(0))
        return list(first) if isinstance(first, dict) else []

    def records(self, first: int, last: int, keys: RowKeys) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
        for row in range(first, last):
            line = row + 1 + int(np.searchsorted(self._blank_before, row, side="right"))
            yield line, parse_line(self._line(row))

    def blocks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The rows ``first`` to ``last`` (exclusive) as ranges of a few each, or of one that is long."""
        while first < last:
            end = int(np.searchsorted(self._starts, self._starts[first] + _BLOCK_BYTES, side="right")) - 1
            end = min(max(end, first + 1), last)
            yield first, end
            first = end

    def plain_objects(self, first: int, last: int) -> list[dict[str, Any]] | None:
        """What ``parse_line`` makes of the rows, but for integers of more than 64 bits, which are floats here; None if
        it might refuse one."""
        start, end = self._starts[first], self._starts[last]
        if end - start > MAX_LINE_BYTES:
            return None
        block = self._content[start:end]
        try:
            found = list(map(orjson.loads, filter(bytes.strip, block.split(b"\n"))))
            deeper: list[Any] = found
            for _ in range(_DUMPED_LEVELS - MAX_DEPTH - 1):
                deeper = [deeper]
            dumped = orjson.dumps(deeper)
        except (orjson.JSONDecodeError, orjson.JSONEncodeError):
            return None
        # A key that comes twice is lost, and its colon with it; one that is written as an escape would be one more.
        if _num_colons(dumped) != _num_colons(block) or (b"\\" in block and b"\\u003" in block):
            return None
        return found if set(map(type, found)) == {dict} else None

    def _line(self, row: int) -> bytes:
        """The line without its end, and without the blank ones behind it; of one that is too long, a part that is."""
        start, end = self._starts[row : row + 2].tolist()
        line = self._content[start : min(end, start + MAX_LINE_BYTES + 8)].partition(b"\n")[0].rstrip(b"\r")
        return line.removeprefix(BOM) if start == 0 else line


def _num_colons(text: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord(":")))  # three times as quick as bytes.count


class RowsOnAccess(Sequence[PromptRow]):
    """The rows ``first`` to ``last`` (exclusive) of a validated file. Raises DataError for every row once the file was
    changed in place."""

    def __init__(self, file: LocalFile, table: JsonlTable, first: int, last: int, keys: RowKeys) -> None:
        self.file = file
        self._table = table
        self._rows = range(first, last)
        self._keys = keys

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        self.file.check()
        row = self._rows[index]
        ((line, record),) = self._table.records(row, row + 1, self._keys)
        try:
            return build_row(record, self._keys, row=row - self._rows.start, line=line)
        except RowError as error:  # the file was changed in the same instant
            raise DataError(str(error), where=row_label(self.file.path, "line", line)) from error


def parse_line(line: bytes) -> dict[str, Any] | RowError:
    """The object of a line that is not blank and has no line end, or why there is none."""
    if len(line) > MAX_LINE_BYTES:
        return RowError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        text = line.decode()
        value = json_value(text[1:] if text.startswith(_SKIPPED) else text)
    except UnicodeDecodeError as error:
        return RowError(f"invalid UTF-8 at byte {error.start + 1} of the line")
    except ValueError as error:
        return RowError(f"invalid JSON: {error}")
    return value if isinstance(value, dict) else RowError("the line is not a JSON object")
