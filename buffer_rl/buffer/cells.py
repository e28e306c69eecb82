"""One field of one group, wherever its payload is: in the Buffer's memory or in the object store.

A small payload travels inside the call that reports it. A large one is written to the object store once, by its
producer but owned by a storage process, and only its reference travels (see ``buffer_rl.buffer.storage``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from buffer_rl.buffer.wire import Columns, stacked
from buffer_rl.types import Column, RowId, TrainBatch, concat_columns, take_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A column of one group. ``ref`` is an object reference, opaque to everybody but the clients; ``storage`` names the
    process that owns the object."""

    num_rows: int
    inline: Column | None = None
    ref: Any = None
    storage: str = ""

    @classmethod
    def of(cls, column: Column) -> Cell:
        """The column itself."""
        return cls(num_rows=len(column), inline=column)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """What batching needs to know of a group's rows without reading them: ``[num_rows]`` each.

    tokens: prompt and response tokens of each row; trained: its unmasked response tokens.
    """

    tokens: list[int]
    trained: list[float]

    @classmethod
    def of(cls, columns: Mapping[str, Column], num_rows: int) -> RowSizes:
        """From the columns ``tokens`` and ``loss_mask``; 0 where there is none."""
        zeros = [0] * num_rows
        tokens = [len(row) for row in columns["tokens"]] if "tokens" in columns else zeros
        masks = columns.get("loss_mask")
        trained = [float(np.sum(mask)) for mask in masks] if masks is not None else [0.0] * num_rows
        return cls(tokens=tokens, trained=trained)


def sample_total_tokens(row_ids: Sequence[RowId], sizes: RowSizes) -> np.ndarray:
    """The column ``sample_total_tokens`` of a whole group: ``[num_rows]`` float32, for each row the unmasked response
    tokens of its sample, summed over the parts that the sample fanned out into."""
    totals: defaultdict[int, float] = defaultdict(float)
    for row, trained in zip(row_ids, sizes.trained, strict=True):
        totals[row.sample_index] += trained
    return np.asarray([totals[row.sample_index] for row in row_ids], dtype=np.float32)


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
        return all(cell.num_rows == len(self.positions) for cell in self.cells.values()) and self.positions == list(
            range(len(self.positions))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A ``TrainBatch`` before its payloads were read; small, and free of payloads where they are in the store.

    It travels with one array for each field that is inline (see ``buffer_rl.buffer.wire``)."""

    rollout_id: int
    task: str
    slices: list[GroupSlice] = field(default_factory=list)
    total_samples: int = 0
    total_tokens: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        columns = _joint_columns(self.slices)
        slices = [
            (
                part.row_ids,
                part.positions,
                part.num_rows,
                {n: None if n in columns else c for n, c in part.cells.items()},
            )
            for part in self.slices
        ]
        return _arrived, (self.rollout_id, self.task, slices, columns, self.total_samples, self.total_tokens)


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


def _arrived(
    rollout_id: int,
    task: str,
    slices: Sequence[tuple[list[RowId], list[int], int, dict[str, Cell | None]]],
    columns: Columns,
    total_samples: int,
    total_tokens: int,
) -> BatchPlan:
    plan = BatchPlan(rollout_id=rollout_id, task=task, total_samples=total_samples, total_tokens=total_tokens)
    end = 0
    for row_ids, positions, num_rows, sent in slices:
        start, end = end, end + num_rows
        cells = {name: cell or Cell.of(columns[name][start:end]) for name, cell in sent.items()}
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
        total_samples=plan.total_samples,
        total_tokens=plan.total_tokens,
    )
