"""The rows of one data source (a file, several files, or a slice of them) in order, and the hash that names them."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from buffer_rl.redaction import mask_url
from buffer_rl.types import Prompt

Unit = Literal["line", "row"]
"""How a file's records are counted in errors: lines from 1, or rows from 0 (as slices count them)."""


def place(path: str, unit: Unit, number: int) -> str:
    """Where a record stands: ``file.jsonl:7`` or ``file.parquet, row 6``."""
    shown = mask_url(path)
    return f"{shown}:{number}" if unit == "line" else f"{shown}, row {number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One validated row.

    row: position among the rows that were read, from 0; it is the ``row`` of the group's uid.
    line: line of the file, from 1, blank lines counted; of formats without lines, the row of the file, from 0.
    multimodal: columns passed through as they are, by media type (``--multimodal-keys``); those that the row has.
    """

    row: int
    line: int
    prompt: Prompt
    label: Any = None
    metadata: dict[str, Any]
    multimodal: dict[str, Any] | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """One file of a source of several. first: position of its first row among the rows that were read."""

    path: str
    unit: Unit
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """What rows say all together. rewards: the first row of each reward that metadata choose (``rm_type``); at most
    some thousand of them. media: the multimodal fields that a row has. has_label: whether a row has one."""

    rewards: Mapping[str, int] = field(default_factory=dict)
    media: frozenset[str] = frozenset()
    has_label: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDataset(Sequence[PromptRow]):
    """Rows in file order; of a large file each is read when it is asked for.

    source_hash: 12 hexadecimal digits of the SHA-256 of the file's bytes (decompressed), the slice and the field names.
    It is the ``source`` of every group's uid, so that state saved for other data is recognised.
    path, unit: the file, and whether its records are counted as lines or rows.
    parts: the files of a source of several, in order; empty for a single file.
    """

    rows: Sequence[PromptRow]
    source_hash: str
    path: str = ""
    unit: Unit = "line"
    parts: tuple[FilePart, ...] = ()
    facts: RowFacts = RowFacts()

    def where(self, row: PromptRow) -> str:
        """The file and the row's line or number, for errors."""
        if not self.parts:
            return place(self.path, self.unit, row.line)
        part = self.parts[bisect.bisect_right(self.parts, row.row, key=lambda part: part.first) - 1]
        return place(part.path, part.unit, row.line)

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PromptRow, ...]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | tuple[PromptRow, ...]:
        return tuple(self.rows[index]) if isinstance(index, slice) else self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[PromptRow]:
        return iter(self.rows)
