"""Columns of sample groups: how the Buffer stores them, and plans batches of them.

A ``Cell`` is one field of one group. Its payload is in the Buffer's memory, or in the object store: a small payload
travels inside the call that reports it (see ``buffer_rl.buffer.codec``); a large one is put there by the process that
owns it, and only its reference is in the Buffer (see ``buffer_rl.buffer.storage``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from buffer_rl.buffer.codec import Columns, RowIds, are_alike, stacked
from buffer_rl.errors import BufferStateError
from buffer_rl.records.groups import SAMPLE_SIZES, Column, GroupUid, RowId, TrainBatch, take_rows


class Cell(NamedTuple):
    """A column of one group. ``ref`` is an object reference, opaque to everybody but the clients; ``storage`` names the
    process that owns the object."""

    num_rows: int
    inline: Column | None = None
    ref: Any = None
    storage: str = ""

    @classmethod
    def of(cls, column: Column) -> Cell:
        """The column itself."""
        return cls(len(column), column)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """What batching needs to know of a group's rows without reading them: ``[num_rows]`` each.

    tokens: prompt and response tokens of each row; trained: its unmasked response tokens.
    """

    tokens: list[int]
    trained: list[float]

    @classmethod
    def of(cls, columns: Mapping[str, Column | Cell], num_rows: int) -> RowSizes:
        """From the columns ``tokens`` and ``loss_mask``; 0 where there is none."""
        inline = {name: column for name, column in columns.items() if not isinstance(column, Cell)}
        zeros = [0] * num_rows
        tokens = [len(row) for row in inline["tokens"]] if "tokens" in inline else zeros
        masks = inline.get("loss_mask")
        return cls(tokens=tokens, trained=[0.0] * num_rows if masks is None else _sums(masks))


def _sums(rows: Column) -> list[float]:
    """The sum of each row."""
    if isinstance(rows, list) and are_alike(rows) and all(map(len, rows)):
        starts = [0, *accumulate(map(len, rows[:-1]))]
        return [float(total) for total in np.add.reduceat(np.concatenate(rows), starts)]
    return [float(np.sum(row)) for row in rows]


def sample_sizes(row_ids: Sequence[RowId], sizes: RowSizes) -> dict[str, np.ndarray]:
    """The columns ``SAMPLE_SIZES`` of a whole group, each ``[num_rows]`` float32: for each row the unmasked response
    tokens of its sample, summed over the parts that the sample fanned out into, and the number of these parts."""
    samples = [row.sample_index for row in row_ids]
    parts, totals = Counter(samples), dict(zip(samples, sizes.trained, strict=True))
    if len(parts) < len(samples):
        totals = dict.fromkeys(samples, 0.0)
        for sample, trained in zip(samples, sizes.trained, strict=True):
            totals[sample] += trained
    columns = ([counts[sample] for sample in samples] for counts in (totals, parts))
    return {name: np.asarray(column, dtype=np.float32) for name, column in zip(SAMPLE_SIZES, columns, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSlice:
    """Some rows of one group. ``positions`` count within the group's cells."""

    row_ids: list[RowId]
    positions: list[int]
    cells: dict[str, Cell]

    @property
    def num_rows(self) -> int:
        """Rows of the whole group; 0 where there are no cells."""
        return next((cell.num_rows for cell in self.cells.values()), 0)

    @property
    def is_whole(self) -> bool:
        """Whether every row of the group is here, in order."""
        num_rows = len(self.positions)
        return self.positions == [*range(num_rows)] and all(c.num_rows == num_rows for c in self.cells.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A ``TrainBatch`` before its payloads were read; small, and free of payloads where they are in the store.

    It travels with one array for each field that is inline (see ``buffer_rl.buffer.columns``)."""

    rollout_id: int
    task: str
    slices: list[GroupSlice] = field(default_factory=list)

    def __reduce__(self) -> tuple[Any, ...]:
        columns = _joint_columns(self.slices)
        slices = [
            (
                RowIds(part.row_ids),
                None if part.is_whole else part.positions,
                part.num_rows,
                {n: None if n in columns else c for n, c in part.cells.items()},
            )
            for part in self.slices
        ]
        return _arrived_plan, (self.rollout_id, self.task, slices, columns)


def _joint_columns(slices: Sequence[GroupSlice]) -> Columns:
    """The fields that all slices have inline, each as one column of all their groups' rows."""
    columns = Columns()
    for name in slices[0].cells if slices else ():
        cells = [cell for part in slices if (cell := part.cells.get(name)) is not None and cell.inline is not None]
        once = len({id(cell) for cell in cells})  # a group in several slices is better sent once, as it is
        blocks = [cell.inline for cell in cells if cell.inline is not None]
        if len(blocks) == once == len(slices) and (column := stacked(blocks)) is not None:
            columns[name] = column
    return columns


def _arrived_plan(
    rollout_id: int,
    task: str,
    slices: Sequence[tuple[list[RowId], list[int] | None, int, dict[str, Cell | None]]],
    columns: Columns,
) -> BatchPlan:
    plan = BatchPlan(rollout_id=rollout_id, task=task)
    end = 0
    for row_ids, positions, num_rows, sent in slices:
        start, end = end, end + num_rows
        cells = {name: cell or Cell.of(columns[name][start:end]) for name, cell in sent.items()}
        positions = list(range(num_rows)) if positions is None else positions
        plan.slices.append(GroupSlice(row_ids=row_ids, positions=positions, cells=cells))
    return plan


Resolve = Callable[[Sequence[Cell]], Sequence[Column]]
"""Reads the payloads of cells that are in an object store, all at once."""


def column_bytes(column: Column) -> int:
    """Bytes of a column's numbers."""
    return column.nbytes if isinstance(column, np.ndarray) else sum(getattr(row, "nbytes", 8) for row in column)


def assemble(plan: BatchPlan, resolve: Resolve | None = None) -> TrainBatch:
    """Read the plan's payloads, each reference once. ``resolve`` may be absent where nothing is in a store.

    Arrays out of a store are views of it, and cannot be written to."""
    wanted = {id(cell.ref): cell for part in plan.slices for cell in part.cells.values() if cell.inline is None}
    found: dict[int, Column] = {}
    if wanted:
        assert resolve is not None, "payloads are in an object store"
        found = dict(zip(wanted, resolve(list(wanted.values())), strict=True))
    blocks = []
    for part in plan.slices:
        columns = {
            name: found[id(cell.ref)] if cell.inline is None else cell.inline for name, cell in part.cells.items()
        }
        if not part.is_whole:
            columns = {name: take_rows(column, part.positions) for name, column in columns.items()}
        blocks.append(columns)
    return TrainBatch(
        rollout_id=plan.rollout_id,
        task=plan.task,
        row_ids=[row for part in plan.slices for row in part.row_ids],
        columns=concat_columns(blocks),
    )


@dataclass(slots=True, kw_only=True)
class StoredGroup:
    """One group. given: the fields that it came with. place: the position of each row, once it is asked for. partial:
    rows by position, of fields that lack some rows yet."""

    rows: list[RowId]
    cells: dict[str, Cell]
    sizes: RowSizes
    given: frozenset[str]
    place: dict[RowId, int] = field(default_factory=dict)
    partial: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)


class ColumnStore:
    """The rows, sizes and cells of finished groups. A field of a group is written once.

    Of payloads that are in an object store it holds the references; an object is freed when the last one is dropped.
    """

    def __init__(self) -> None:
        self._groups: dict[GroupUid, StoredGroup] = {}

    def put(
        self,
        uid: GroupUid,
        row_ids: Sequence[RowId],
        columns: Mapping[str, Column | Cell],
        sizes: RowSizes | None = None,
    ) -> None:
        """Store a finished group, with the columns of its samples' sizes (see ``TrainBatch``) where it has a
        ``loss_mask``. sizes: needed where ``tokens`` or ``loss_mask`` are in an object store.

        Raises BufferStateError if the group is there already."""
        self.require_new(uid)
        sizes = sizes or RowSizes.of(columns, len(row_ids))
        cells = {name: column if isinstance(column, Cell) else Cell.of(column) for name, column in columns.items()}
        if "loss_mask" in cells:
            cells |= {name: Cell.of(column) for name, column in sample_sizes(row_ids, sizes).items()}
        self._groups[uid] = StoredGroup(rows=list(row_ids), cells=cells, sizes=sizes, given=frozenset(cells))

    def require_new(self, uid: GroupUid) -> None:
        """Raises BufferStateError if the group is there already."""
        if uid in self._groups:
            raise BufferStateError(f"group {uid} is stored already")

    def check_field(self, uid: GroupUid, name: str, rows: Mapping[int, np.ndarray]) -> None:
        """Raises what ``put_field`` would raise; changes nothing."""
        group = self[uid]
        complete = group.cells.get(name)
        if complete is not None and complete.inline is None:
            raise BufferStateError(f"field {name!r} of group {uid} came with the group and is not derived")
        known = group.partial.get(name, {}) if complete is None else dict(enumerate(complete.inline or ()))
        for position, row in rows.items():
            if position in known and not np.array_equal(known[position], row):
                what = f"field {name!r} of row {group.rows[position]} was written before, with other content"
                raise BufferStateError(what)

    def put_field(self, uid: GroupUid, name: str, rows: Mapping[int, np.ndarray]) -> bool:
        """Add a derived field for some of the group's rows, by their position. Returns whether this completed it:
        all rows came. Raises BufferStateError if a row was written before with other content."""
        self.check_field(uid, name, rows)
        group = self[uid]
        if name in group.cells:
            return False
        merged = group.partial.setdefault(name, {})
        merged.update(rows)
        if len(merged) < len(group.rows):
            return False
        del group.partial[name]
        group.cells[name] = Cell.of([merged[position] for position in range(len(merged))])
        return True

    def position(self, row: RowId) -> int | None:
        """Where a row is in its group's cells; None if it is unknown."""
        group = self._groups.get(row.uid)
        if group is not None and not group.place:
            group.place = {known: position for position, known in enumerate(group.rows)}
        return None if group is None else group.place.get(row)

    def drop(self, uids: Iterable[GroupUid]) -> None:
        """Forget groups; unknown uids are ignored."""
        for uid in uids:
            self._groups.pop(uid, None)

    def __getitem__(self, uid: GroupUid) -> StoredGroup:
        group = self._groups.get(uid)
        if group is None:
            what = f"group {uid} has no stored payload"
            raise BufferStateError(what, hint="was its rollout released, or the group never finished?")
        return group


def oldest_version(columns: Mapping[str, Column | Cell]) -> int | None:
    """The oldest weights that a trained token of the rows was sampled from; None if they do not tell."""
    return min((int(version) for version in _versions(columns) or () if version >= 0), default=None)


def have_versions(columns: Mapping[str, Column | Cell], sizes: RowSizes) -> bool:
    """Whether each row that is trained on tells the version of its tokens; rows without a loss mask need not."""
    if (versions := _versions(columns)) is None:
        return False
    return all(version >= 0 or not trained for version, trained in zip(versions, sizes.trained, strict=True))


def _versions(columns: Mapping[str, Column | Cell]) -> list[Any] | None:
    """The oldest version of each row; None without them, or where they are in an object store."""
    column = columns.get("weight_version")
    values = column.inline if isinstance(column, Cell) else column
    return None if values is None else list(values)


def concat_columns(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Rows of several blocks one after another. Every block must have the same fields.

    Raises ``ValueError`` naming the fields that differ.
    """
    first = parts[0] if parts else {}
    if other := next((part for part in parts if set(part) != set(first)), None):
        raise ValueError(f"blocks have different fields: {sorted(first)} and {sorted(other)}")
    joined: dict[str, Column] = {}
    for name in first:
        blocks = [part[name] for part in parts]
        are_arrays = all(isinstance(block, np.ndarray) for block in blocks)
        joined[name] = np.concatenate(blocks) if are_arrays else [row for block in blocks for row in block]
    return joined
