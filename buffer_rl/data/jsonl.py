"""JSONL files: one JSON object a line, blank lines skipped but counted.

Small files are a table in memory (``JsonlTable``). Of a large one, ranges of bytes are validated (``scan_range``): a
range has the lines that begin in it; so ranges that cover the file have each line once. Line numbers count from the
range's first line, and become those of the file when all ranges before are known.
"""

from __future__ import annotations

import hashlib
import io
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn

import jsonlines

from buffer_rl.data.dataset import RowError, RowKeys, Unit, build_row

_TOO_DEEP = "nested too deeply"
MAX_LINE_BYTES = 16 << 20
"""A longer line is a file of another format, or one without line ends."""
MAX_DEPTH = 128
"""Levels of a value. What is written of samples later is limited too, to some 250."""
MAX_PROBLEMS = 20
MAX_REWARD_NAMES = 1000
BOM = b"\xef\xbb\xbf"
_BLOCK_LINES = 256
_BLOCK_BYTES = 1 << 20


class JsonlTable:
    """The non-blank lines of one file; its unit is the line."""

    unit: Unit = "line"

    def __init__(self, content: bytes) -> None:
        self.contents: Sequence[bytes] = [content]
        self._lines = list(_numbered_lines(content))

    def __len__(self) -> int:
        return len(self._lines)

    def records(self, first: int, last: int, keys: RowKeys) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
        lines = self._lines[first:last]
        for (number, _), record in zip(lines, parse_lines(content for _, content in lines), strict=True):
            yield number, record


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


def _numbered_lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The non-blank lines with their numbers from 1. Only a line feed ends a line (JSON text may hold U+2028)."""
    for number, line in enumerate(io.BytesIO(content.removeprefix(b"\xef\xbb\xbf")), start=1):
        if line.strip():
            yield number, line.rstrip(b"\r\n")


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


@dataclass(slots=True, kw_only=True)
class RangeScan:
    """What was found in a range.

    num_lines: all lines, blank ones too. offsets: first byte of each row. jumps: pairs (row, line), from which row on
    ``line - row`` is another; both count from the range's first. id_hashes: 64 bits for each row that has an id, and
    ``id_rows`` the row; rewards: first row of each reward that rows choose. media: the multimodal fields
    that a row has.
    """

    num_lines: int = 0
    num_problems: int = 0
    problems: list[tuple[int, str]] = field(default_factory=list)
    offsets: array[int] = field(default_factory=lambda: array("q"))
    id_rows: array[int] = field(default_factory=lambda: array("q"))
    id_hashes: array[int] = field(default_factory=lambda: array("Q"))
    jumps: list[tuple[int, int]] = field(default_factory=list)
    rewards: dict[str, int] = field(default_factory=dict)
    media: set[str] = field(default_factory=set)
    has_label: bool = False

    def add_problem(self, line: int, reason: str) -> None:
        """Count a bad line; the first ones are kept."""
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append((line, reason))

    def add_line(self, line: int, offset: int, record: dict[str, object] | RowError, keys: RowKeys) -> None:
        """Validate the next line that is not blank; ``line`` counts from the range's first, from 0."""
        number = len(self.offsets)
        try:
            if isinstance(record, RowError):
                raise record
            row = build_row(record, keys, row=number, line=line + 1)
        except RowError as error:
            self.add_problem(line, str(error))
            return
        if not self.jumps or line - number != self.jumps[-1][1] - self.jumps[-1][0]:
            self.jumps.append((number, line))
        self.offsets.append(offset)
        if row.id is not None:
            self.id_rows.append(number)
            self.id_hashes.append(id_hash(row.id))
        self.has_label = self.has_label or row.label is not None
        if row.multimodal:
            self.media |= set(row.multimodal)
        name = row.metadata.get("rm_type")
        if name and len(self.rewards) < MAX_REWARD_NAMES:
            self.rewards.setdefault(str(name), number)


def id_hash(text: str) -> int:
    """64 bits of an id; ids of equal hashes are compared in full before they are refused."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def scan_range(file: BinaryIO, start: int, stop: int, keys: RowKeys) -> RangeScan:
    """Validate the lines of ``file`` that begin at ``start`` or later, and before ``stop``."""
    found = RangeScan()
    block: list[tuple[int, int, bytes]] = []
    size = 0
    for number, (offset, line) in enumerate(_lines(file, start, stop)):
        found.num_lines += 1
        if line is None:
            _add_block(found, block, keys)
            found.add_problem(number, str(too_long()))
        elif line.strip():
            block.append((number, offset, line.rstrip(b"\r\n")))
            size += len(line)
            if len(block) == _BLOCK_LINES or size >= _BLOCK_BYTES:  # rows with images are few to a block
                _add_block(found, block, keys)
                size = 0
    _add_block(found, block, keys)
    return found


def _add_block(found: RangeScan, block: list[tuple[int, int, bytes]], keys: RowKeys) -> None:
    records = parse_lines(content for _, _, content in block)
    for (line, offset, _), record in zip(block, records, strict=True):
        found.add_line(line, offset, record, keys)
    block.clear()


def _lines(file: BinaryIO, start: int, stop: int) -> Iterator[tuple[int, bytes | None]]:
    """Offset and bytes of each line that begins in the range; None for one that is too long."""
    position = start
    if start > 0:
        file.seek(start - 1)
        position = start - 1 + _skip_line(file)  # the line that byte ``start - 1`` belongs to is another range's
    else:
        file.seek(0)
    while position < stop:
        line = file.readline(MAX_LINE_BYTES + 2)
        if not line:
            return
        length = len(line)
        whole = line.endswith(b"\n") or length < MAX_LINE_BYTES + 2
        if not whole:
            length += _skip_line(file)
        if position == 0:
            line = line.removeprefix(BOM)
        yield position, line if whole else None
        position += length


def _skip_line(file: BinaryIO) -> int:
    """Read on to the end of the line; returns how many bytes that was."""
    length = 0
    while part := file.readline(_BLOCK_BYTES):
        length += len(part)
        if part.endswith(b"\n"):
            break
    return length
