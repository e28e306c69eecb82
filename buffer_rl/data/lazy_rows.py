"""Rows of a validated file, each read when it is asked for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import overload

from buffer_rl.data.dataset import PromptRow, place
from buffer_rl.data.index import Identity, IndexEntry
from buffer_rl.data.jsonl import parse_lines
from buffer_rl.data.row import RowError, RowKeys, build_row
from buffer_rl.data.scan import BOM
from buffer_rl.errors import DataError

_BLOCK_ROWS = 1024
_HASH_BYTES = 1 << 20


class LazyRows(Sequence[PromptRow]):
    """The rows of the file that ``entry`` is of. The file stays open; another one under its name changes nothing here.

    Raises DataError if it is another file already, and from then on for every row once it was changed in place. A file
    that was only touched is hashed again, once for each time.
    """

    def __init__(self, path: str, keys: RowKeys, entry: IndexEntry) -> None:
        self._path = path
        self._keys = keys
        self._entry = entry
        self._identity = entry.identity
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._check()

    def __len__(self) -> int:
        return len(self._entry.offsets)

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PromptRow, ...]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | tuple[PromptRow, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"there is no row {index}")
        return next(self._read(number, number + 1))

    def __iter__(self) -> Iterator[PromptRow]:
        for first in range(0, len(self), _BLOCK_ROWS):
            yield from self._read(first, min(first + _BLOCK_ROWS, len(self)))

    def _read(self, first: int, last: int) -> Iterator[PromptRow]:
        self._check()
        ends = [*self._entry.offsets[first + 1 : last + 1].tolist(), self._entry.identity.size][: last - first]
        starts = self._entry.offsets[first:last].tolist()
        lines = (self._line(start, end) for start, end in zip(starts, ends, strict=True))
        for number, record in enumerate(parse_lines(lines), start=first):
            try:
                if isinstance(record, RowError):
                    raise record
                row = build_row(record, self._keys, row=number, line=self._entry.line(number))
            except RowError as error:  # the file was changed in the same instant
                raise DataError(str(error), where=place(self._path, "line", self._entry.line(number))) from error
            yield row

    def _line(self, start: int, end: int) -> bytes:
        content = os.pread(self._file.fileno(), end - start, start)
        line = content.partition(b"\n")[0].rstrip(b"\r")  # blank lines may follow
        return line.removeprefix(BOM) if start == 0 else line

    def _check(self) -> None:
        now = self._now()
        if now == self._identity:
            return
        before = replace(self._identity, mtime_ns=now.mtime_ns)
        # Whoever reads first after the file was touched waits for the hash, which takes 2 seconds of 1 GB.
        if now != before or self._content_sha256() != self._entry.content_sha256 or self._now() != now:
            raise DataError("the file was changed since it was checked", where=self._path, hint="start again")
        self._identity = now

    def _now(self) -> Identity:
        """What the open file is now. The ctime is left out: renaming the file and changing its mode touch it too."""
        return replace(Identity.of(os.fstat(self._file.fileno())), ctime_ns=self._entry.identity.ctime_ns)

    def _content_sha256(self) -> str:
        digest = hashlib.sha256()
        position = 0
        while block := os.pread(self._file.fileno(), _HASH_BYTES, position):  # the file's own position stays
            digest.update(block)
            position += len(block)
        return digest.hexdigest()

    def __reduce__(self) -> tuple[object, ...]:
        return LazyRows, (self._path, self._keys, self._entry)

    def __del__(self) -> None:
        if (file := getattr(self, "_file", None)) is not None:
            file.close()
