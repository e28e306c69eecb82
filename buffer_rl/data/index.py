"""The results of validating a large file, kept so that an unchanged file is not parsed again.

Which file an entry is of: it is named by the path and the fields' names. A file is the same if device, inode, size,
mtime and ctime are those of the entry; no program can set a ctime. That is not enough for a file that was changed
within ``SETTLED_S`` before it was read: a second change may fall into the same tick of the clock. And it is too much
for a copy. In both cases the content's SHA-256 decides, which takes a tenth of the time that parsing takes.
Whatever is wrong with an entry, the file is parsed.

``LazyRows`` reads the rows of a validated file on access.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from buffer_rl.data.dataset import PromptRow, RowError, RowKeys, build_row, row_label
from buffer_rl.data.jsonl import BOM, parse_lines
from buffer_rl.errors import DataError

FORMAT = 1
SETTLED_S = 2.0
MAX_ENTRIES = 64
MIN_BYTES = 32 << 20
"""Of a file that is worth an entry and several processes; a smaller one is parsed in a second."""
_HEADER = struct.Struct("<32sQ")  # SHA-256 of what follows, and the bytes of the JSON in it


_BLOCK_ROWS = 1024
_HASH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which file, and which state of it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        """From ``os.stat`` or ``os.fstat``."""
        return cls(
            device=status.st_dev,
            inode=status.st_ino,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """A file whose rows are all good.

    content_sha256: of its bytes. source_hash: see ``PromptDataset``. offsets: int64, first byte of each row. jumps:
    pairs (row, line), lines from 1: from that row on, rows and lines go together. rewards: first row of each reward
    that rows choose. media, has_label: what some row has of the multimodal fields and of labels. checked_ns: when the
    check began, by the clock.
    """

    identity: Identity
    checked_ns: int
    content_sha256: str
    source_hash: str
    offsets: np.ndarray
    jumps: tuple[tuple[int, int], ...]
    rewards: Mapping[str, int]
    media: frozenset[str]
    has_label: bool

    def line(self, row: int) -> int:
        """The line of the file that a row stands in, from 1."""
        first_row, first_line = self.jumps[bisect.bisect_right(self.jumps, row, key=lambda jump: jump[0]) - 1]
        return first_line + row - first_row

    def settled(self) -> bool:
        """Whether a change after the check must show in the identity."""
        changed = max(self.identity.mtime_ns, self.identity.ctime_ns)
        return self.checked_ns - changed > SETTLED_S * 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DataIndex:
    """A folder of entries. One that cannot be written to keeps nothing, without an error.

    min_bytes: smaller files have no entry. part_bytes: least that a process reads. num_processes: at most; 0 is one
    for each CPU that this process may use.
    """

    folder: Path = field(default_factory=lambda: cache_folder() / "data_index")
    min_bytes: int = MIN_BYTES
    part_bytes: int = 16 << 20
    num_processes: int = 0

    def load(self, path: str, keys: RowKeys) -> IndexEntry | None:
        """The entry of ``path``, whether the file is the same or not; None if there is none, or a damaged one."""
        try:
            content = self._place(path, keys).read_bytes()
            digest, length = _HEADER.unpack_from(content)
            body = memoryview(content)[32:]
            if hashlib.sha256(body).digest() != digest:
                return None
            position = _HEADER.size + length
            facts: dict[str, Any] = json.loads(content[_HEADER.size : position])
            if facts.pop("format") != FORMAT:
                return None
            return IndexEntry(
                identity=Identity(**facts.pop("identity")),
                offsets=np.frombuffer(content, np.int64, offset=position),
                jumps=tuple((row, line) for row, line in facts.pop("jumps")),
                media=frozenset(facts.pop("media")),
                **facts,
            )
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            return None

    def save(self, path: str, keys: RowKeys, entry: IndexEntry) -> None:
        """Keep ``entry``: in a temporary file, then renamed; a reader sees all of it or the one before."""
        facts = {
            "format": FORMAT,
            "identity": asdict(entry.identity),
            "checked_ns": entry.checked_ns,
            "content_sha256": entry.content_sha256,
            "source_hash": entry.source_hash,
            "jumps": entry.jumps,
            "rewards": dict(entry.rewards),
            "media": sorted(entry.media),
            "has_label": entry.has_label,
        }
        text = json.dumps(facts).encode()
        body = struct.pack("<Q", len(text)) + text + entry.offsets.astype("<i8").tobytes()
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=".")
            try:
                with open(descriptor, "wb") as file:
                    file.write(hashlib.sha256(body).digest() + body)
                os.replace(temporary, self._place(path, keys))
            except OSError:
                os.unlink(temporary)
            self._prune()

    def _place(self, path: str, keys: RowKeys) -> Path:
        named = json.dumps([FORMAT, os.path.realpath(path), asdict(keys)])
        return self.folder / f"{hashlib.sha256(named.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}.index"

    def _prune(self) -> None:
        entries = sorted(self.folder.glob("*.index"), key=lambda entry: entry.stat().st_mtime_ns)
        for old in entries[:-MAX_ENTRIES]:
            old.unlink(missing_ok=True)


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/buffer_rl``, or ``~/.cache/buffer_rl``; a place that holds nothing where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return Path(base if os.path.isabs(base) else Path("~/.cache").expanduser(), "buffer_rl")
    except RuntimeError:  # there is no home folder: nothing is kept
        return Path(os.devnull, "buffer_rl")


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
                raise DataError(str(error), where=row_label(self._path, "line", self._entry.line(number))) from error
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
        # The first reader after the file was touched waits for the hash, which takes 2 seconds of 1 GB.
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
