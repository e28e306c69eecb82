"""The rows of one data file (or of a slice of it) in file order, and the hash that names them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from buffer_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One validated row.

    row: position among the rows that were read, from 0; it is the ``row`` of the group's uid.
    line: line of the file, from 1, blank lines counted.
    """

    row: int
    line: int
    prompt: Prompt
    label: Any = None
    metadata: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class PromptDataset(Sequence[PromptRow]):
    """Rows in file order.

    source_hash: 12 hexadecimal digits of the SHA-256 of the file's bytes, the slice and the field names. It is the
    ``source`` of every group's uid, so that state saved for other data is recognised.
    """

    rows: tuple[PromptRow, ...]
    source_hash: str

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PromptRow, ...]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | tuple[PromptRow, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[PromptRow]:
        return iter(self.rows)
