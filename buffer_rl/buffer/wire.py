"""How columns and row ids travel between processes.

Ray ships every array of a call by itself, which costs more than the bytes of a short one: a step of 64 rows and 10
fields is 400 arrays. So ``Columns`` join the rows of a field before they are sent, small fields travel inside the
message, and the receiver gets views of one array, with the values, dtypes and shapes of the sent ones. Ids of rows
travel as the numbers in them, since every object of a class of ours costs a call of Ray's pickler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from buffer_rl.records.groups import Column, GroupUid, RowId

IN_MESSAGE_BYTES = 1 << 18
"""Smaller fields are copied into the message: about as long as shipping one array by itself takes."""

_Joined = tuple[np.ndarray | bytes, Any, tuple[int, ...], list[int] | None]
"""A column as one array: the array, or its bytes; its dtype and shape; where each row ends, of a column that is a
list."""


class Columns(dict[str, Any]):
    """Columns by name, which travel joined. A value that is no column, such as a ``Cell``, travels as it is."""

    def __reduce__(self) -> tuple[Any, ...]:
        joined = {name: sent for name, column in self.items() if (sent := _joined(column)) is not None}
        return _arrived_columns, ({name: None if name in joined else c for name, c in self.items()}, joined)


def _arrived_columns(columns: Mapping[str, Any], joined: Mapping[str, _Joined]) -> Columns:
    return Columns((name, _cut(*joined[name]) if name in joined else value) for name, value in columns.items())


class RowIds(list[RowId]):
    """Ids of rows. They arrive as a list."""

    def __reduce__(self) -> tuple[Any, ...]:
        runs = [(uid, list(rows)) for uid, rows in groupby(self, key=lambda row: row.uid)]
        numbers = [
            (uid.source, uid.row, uid.epoch, [row.sample_index for row in rows], [row.part for row in rows])
            for uid, rows in runs
        ]
        return _arrived_rows, (numbers,)


def _arrived_rows(runs: Sequence[tuple[str, int, int, list[int], list[int]]]) -> list[RowId]:
    return [
        RowId(uid, index, part)
        for source, number, epoch, indices, parts in runs
        for uid in (GroupUid(source, number, epoch),)
        for index, part in zip(indices, parts, strict=True)
    ]


def stacked(blocks: Sequence[Column]) -> Column | None:
    """The rows of all ``blocks`` as one column, which can be cut again; None where they are of different kinds."""
    if all(isinstance(block, list) for block in blocks):
        return [row for block in blocks for row in block]
    return np.concatenate(blocks) if are_alike(blocks) else None


def _joined(column: Any) -> _Joined | None:
    """A column, with its rows joined where it is a list of arrays of one kind; None for what travels as it is."""
    ends = None
    if isinstance(column, list):
        if not are_alike(column):
            return None
        column, ends = np.concatenate(column), list(accumulate(map(len, column)))
    if type(column) is not np.ndarray or column.dtype.hasobject:
        return None
    dtype = column.dtype.str if column.dtype.isbuiltin == 1 else column.dtype
    data = column.tobytes() if column.nbytes < IN_MESSAGE_BYTES else column
    return data, dtype, column.shape, ends


def _cut(data: np.ndarray | bytes, dtype: Any, shape: tuple[int, ...], ends: list[int] | None) -> Column:
    """The inverse of ``_joined``."""
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=dtype).reshape(shape)
    if ends is None:
        return array
    return [array[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def are_alike(parts: Sequence[Any]) -> bool:
    """Whether ``parts`` are arrays that can be joined along their first axis, and cut again, without a change.

    Not those of a subclass, such as masked arrays, nor those whose dtype joining changes."""
    if set(map(type, parts)) != {np.ndarray}:
        return False
    dtype, shape = parts[0].dtype, parts[0].shape[1:]
    if dtype.hasobject or dtype.fields is not None or not dtype.isnative:
        return False
    return {part.dtype for part in parts} == {dtype} and all(
        part.ndim > 0 and part.shape[1:] == shape for part in parts
    )
