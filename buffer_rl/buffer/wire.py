"""How columns travel between processes.

Ray ships every array of a call by itself, which costs more than the bytes of a short one: a step of 64 rows and 10
fields is 400 arrays. So the rows of a field are joined before they are sent, small fields travel inside the message,
and what arrives are views of one array, with the values, dtypes and shapes of what was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from buffer_rl.types import Column

IN_MESSAGE_BYTES = 1 << 18
"""Smaller fields are copied into the message: about as long as shipping one array by itself takes."""


class Columns(dict[str, Any]):
    """Columns by name, which travel joined. A value that is no column, such as a ``Cell``, travels as it is."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, ({name: _sent(column) for name, column in self.items()},)


def stacked(blocks: Sequence[Column]) -> Column | None:
    """The rows of all ``blocks`` as one column, which can be cut again; None where they are of different kinds."""
    if all(isinstance(block, list) for block in blocks):
        return [row for block in blocks for row in block]
    return np.concatenate(blocks) if _are_alike(blocks) else None


@dataclass(frozen=True, slots=True)
class _Sent:
    """A column as one array. data: the array, or its bytes. ends: where each row ends, of a column that is a list."""

    data: np.ndarray | bytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    ends: list[int] | None

    def column(self) -> Column:
        data = self.data
        array = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=self.dtype).reshape(self.shape)
        if self.ends is None:
            return array
        return [array[start:end] for start, end in zip([0, *self.ends], self.ends, strict=False)]


def _arrived(sent: Mapping[str, Any]) -> Columns:
    return Columns((name, value.column() if isinstance(value, _Sent) else value) for name, value in sent.items())


def _sent(column: Any) -> Any:
    """``column``, joined where it is a list of arrays of one kind."""
    ends = None
    if isinstance(column, list):
        if not _are_alike(column):
            return column
        column, ends = np.concatenate(column), np.cumsum([len(row) for row in column]).tolist()
    if type(column) is not np.ndarray or column.dtype.hasobject:
        return column
    data = column.tobytes() if column.nbytes < IN_MESSAGE_BYTES else column
    return _Sent(data, column.dtype, column.shape, ends)


def _are_alike(parts: Sequence[Any]) -> bool:
    """Whether ``parts`` are arrays that can be joined along their first axis, and cut again, without a change.

    Not those of a subclass, such as masked arrays, nor those whose dtype joining changes."""
    if not parts or type(parts[0]) is not np.ndarray or parts[0].ndim == 0:
        return False
    dtype, shape = parts[0].dtype, parts[0].shape[1:]
    if dtype.hasobject or dtype.fields is not None or not dtype.isnative:
        return False
    return all(
        type(part) is np.ndarray and part.ndim > 0 and part.dtype == dtype and part.shape[1:] == shape for part in parts
    )
