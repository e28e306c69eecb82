"""What every file format gives to the reader: records with their places, not yet validated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from buffer_rl.data.dataset import Unit
from buffer_rl.data.row import RowError, RowKeys


class Table(Protocol):
    """The records of one file or folder."""

    @property
    def unit(self) -> Unit: ...

    @property
    def contents(self) -> Sequence[bytes]:
        """The bytes that the records were read from; what the source hash covers."""
        ...

    def __len__(self) -> int: ...

    def records(self, first: int, last: int, keys: RowKeys) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
        """The records ``first`` to ``last`` (exclusive): the number of each one's line or row, and what it holds or
        why it cannot be read."""
        ...
