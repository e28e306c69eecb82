"""What was found when a large file was validated, kept so that the file is not parsed again while it is the same.

Which file an entry is of: it is named by the path and the fields' names. A file is the same if device, inode, size,
mtime and ctime are those of the entry, and nobody can set a ctime. That is not enough for a file that was changed
within ``SETTLED_S`` before it was read: a second change may fall into the same tick of the clock. And it is too much
for a copy. In both cases the content's SHA-256 decides, which takes a tenth of the time that parsing takes.
Whatever is wrong with an entry, the file is parsed.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import os
import struct
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from buffer_rl.data.row import RowKeys

FORMAT = 1
SETTLED_S = 2.0
MAX_ENTRIES = 64
MIN_BYTES = 32 << 20
"""Of a file that is worth an entry and several processes; a smaller one is parsed in a second."""
_HEADER = struct.Struct("<32sQ")  # SHA-256 of what follows, and the bytes of the JSON in it


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
    """A folder of entries. One that cannot be written to keeps nothing, and nothing is said of it.

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
    except RuntimeError:  # nobody's home: nothing is kept there
        return Path(os.devnull, "buffer_rl")


def now_ns() -> int:
    """The clock that files' times are of."""
    return time.time_ns()
