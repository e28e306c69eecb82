"""A data file as users name it: a path, perhaps with a slice of its rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from buffer_rl.errors import DataError

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
