"""Where the Buffer keeps what it knows of finished groups: their rows, their sizes, and a cell for each field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from buffer_rl.buffer.cells import Cell, RowSizes, sample_total_tokens
from buffer_rl.errors import BufferStateError
from buffer_rl.types import Column, GroupUid, RowId


class DataPlane(Protocol):
    """Keeps the cells of finished groups. A field of a group is written once."""

    def put(
        self, uid: GroupUid, row_ids: Sequence[RowId], columns: Mapping[str, Column | Cell], sizes: RowSizes | None
    ) -> None:
        """Store a finished group, with the column ``sample_total_tokens`` (see ``TrainBatch``) where it has a
        ``loss_mask``. sizes: needed where ``tokens`` or ``loss_mask`` are in an object store.

        Raises BufferStateError if the group is there already."""
        ...

    def check_field(self, uid: GroupUid, name: str, rows: Mapping[int, np.ndarray]) -> None:
        """Raises what ``put_field`` would raise; changes nothing."""
        ...

    def put_field(self, uid: GroupUid, name: str, rows: Mapping[int, np.ndarray]) -> bool:
        """Add a derived field for some of the group's rows, by their position. Returns whether this completed it:
        all rows came. Raises BufferStateError if a row was written before with other content."""
        ...

    def rows(self, uid: GroupUid) -> list[RowId]:
        """The group's row ids, in the order of its cells."""
        ...

    def sizes(self, uid: GroupUid) -> RowSizes:
        """Tokens of each row."""
        ...

    def position(self, row: RowId) -> int | None:
        """Where a row is in its group's cells; None if it is unknown."""
        ...

    def cells(self, uid: GroupUid) -> Mapping[str, Cell]:
        """The fields that all rows of the group have."""
        ...

    def drop(self, uid: GroupUid) -> None:
        """Forget a group; unknown uids are ignored."""
        ...


class _Stored:
    """One group."""

    __slots__ = ("cells", "partial", "place", "rows", "sizes")

    def __init__(self, rows: list[RowId], cells: dict[str, Cell], sizes: RowSizes) -> None:
        self.rows = rows
        self.cells = cells
        self.sizes = sizes
        self.place = {row: position for position, row in enumerate(rows)}
        self.partial: dict[str, dict[int, np.ndarray]] = {}


class LocalDataPlane:
    """Everything in this process, except payloads that are in an object store: of those it holds the references,
    and an object is freed when the last one is dropped."""

    def __init__(self) -> None:
        self._groups: dict[GroupUid, _Stored] = {}

    def put(
        self,
        uid: GroupUid,
        row_ids: Sequence[RowId],
        columns: Mapping[str, Column | Cell],
        sizes: RowSizes | None = None,
    ) -> None:
        """See ``DataPlane.put``."""
        if uid in self._groups:
            raise BufferStateError(f"group {uid} is stored already")
        if sizes is None:
            inline = {name: column for name, column in columns.items() if not isinstance(column, Cell)}
            sizes = RowSizes.of(inline, len(row_ids))
        cells = {name: column if isinstance(column, Cell) else Cell.of(column) for name, column in columns.items()}
        if "loss_mask" in cells:
            cells["sample_total_tokens"] = Cell.of(sample_total_tokens(row_ids, sizes))
        self._groups[uid] = _Stored(list(row_ids), cells, sizes)

    def check_field(self, uid: GroupUid, name: str, rows: Mapping[int, np.ndarray]) -> None:
        """See ``DataPlane.check_field``."""
        group = self._group(uid)
        complete = group.cells.get(name)
        if complete is not None and complete.inline is None:
            raise BufferStateError(f"field {name!r} of group {uid} came with the group and is not derived")
        known = group.partial.get(name, {}) if complete is None else dict(enumerate(complete.inline or ()))
        for position, row in rows.items():
            if position in known and not np.array_equal(known[position], row):
                raise BufferStateError(
                    f"field {name!r} of row {group.rows[position]} was written before, with other content"
                )

    def put_field(self, uid: GroupUid, name: str, rows: Mapping[int, np.ndarray]) -> bool:
        """See ``DataPlane.put_field``."""
        self.check_field(uid, name, rows)
        group = self._group(uid)
        if name in group.cells:
            return False
        merged = group.partial.setdefault(name, {})
        merged.update(rows)
        if len(merged) < len(group.rows):
            return False
        del group.partial[name]
        group.cells[name] = Cell.of([merged[position] for position in range(len(merged))])
        return True

    def rows(self, uid: GroupUid) -> list[RowId]:
        """See ``DataPlane.rows``."""
        return self._group(uid).rows

    def sizes(self, uid: GroupUid) -> RowSizes:
        """See ``DataPlane.sizes``."""
        return self._group(uid).sizes

    def position(self, row: RowId) -> int | None:
        """See ``DataPlane.position``."""
        group = self._groups.get(row.uid)
        return None if group is None else group.place.get(row)

    def cells(self, uid: GroupUid) -> Mapping[str, Cell]:
        """See ``DataPlane.cells``."""
        return self._group(uid).cells

    def drop(self, uid: GroupUid) -> None:
        """See ``DataPlane.drop``."""
        self._groups.pop(uid, None)

    def _group(self, uid: GroupUid) -> _Stored:
        group = self._groups.get(uid)
        if group is None:
            raise BufferStateError(
                f"group {uid} has no stored payload", hint="was its rollout released, or the group never finished?"
            )
        return group
