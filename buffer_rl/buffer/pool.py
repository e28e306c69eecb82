"""One rollout's groups as columns: a task is a list of uids over a store of payloads.

``DataPlane`` is where payloads are; the pool holds which rows belong to a task, and which rank has which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from buffer_rl.buffer.partition import balanced_partition
from buffer_rl.errors import BufferStateError
from buffer_rl.types import Column, GroupUid, RowId, TrainBatch, concat_columns

DERIVED_FIELDS = frozenset({"ref_log_probs", "old_log_probs", "prox_log_probs", "advantages", "returns"})
"""Fields that others than the rollout fill in."""


class DataPlane(Protocol):
    """Keeps the columns of finished groups. A field of a group is written once."""

    def put(self, uid: GroupUid, row_ids: Sequence[RowId], columns: Mapping[str, Column]) -> None:
        """Store a finished group. Raises BufferStateError if it is there already."""
        ...

    def put_field(self, uid: GroupUid, name: str, rows: Mapping[int, np.ndarray]) -> None:
        """Add a derived field for some of the group's rows, by their position. The field is there once all rows
        came. Raises BufferStateError if a row was written before with other content."""
        ...

    def rows(self, uid: GroupUid) -> list[RowId]:
        """The group's row ids, in the order of its columns."""
        ...

    def columns(self, uid: GroupUid) -> dict[str, Column]:
        """The group's columns."""
        ...

    def drop(self, uid: GroupUid) -> None:
        """Forget a group; unknown uids are ignored."""
        ...


class LocalDataPlane:
    """Payloads in this process."""

    def __init__(self) -> None:
        self._rows: dict[GroupUid, list[RowId]] = {}
        self._columns: dict[GroupUid, dict[str, Column]] = {}
        self._partial: dict[GroupUid, dict[str, dict[int, np.ndarray]]] = {}

    def put(self, uid: GroupUid, row_ids: Sequence[RowId], columns: Mapping[str, Column]) -> None:
        """See ``DataPlane.put``."""
        if uid in self._rows:
            raise BufferStateError(f"group {uid} is stored already")
        self._rows[uid] = list(row_ids)
        self._columns[uid] = dict(columns)

    def put_field(self, uid: GroupUid, name: str, rows: Mapping[int, np.ndarray]) -> None:
        """See ``DataPlane.put_field``."""
        stored = self.columns(uid)
        known = dict(enumerate(stored[name])) if name in stored else self._partial.get(uid, {}).get(name, {})
        for position, row in rows.items():
            if position in known and not np.array_equal(known[position], row):
                raise BufferStateError(
                    f"field {name!r} of row {self._rows[uid][position]} was written before, with other content"
                )
        if name in stored:
            return
        merged = {**known, **rows}
        if len(merged) < len(self._rows[uid]):
            self._partial.setdefault(uid, {})[name] = merged
            return
        self._partial.get(uid, {}).pop(name, None)
        stored[name] = [merged[position] for position in range(len(merged))]

    def rows(self, uid: GroupUid) -> list[RowId]:
        """See ``DataPlane.rows``."""
        self._require(uid)
        return self._rows[uid]

    def columns(self, uid: GroupUid) -> dict[str, Column]:
        """See ``DataPlane.columns``."""
        self._require(uid)
        return self._columns[uid]

    def drop(self, uid: GroupUid) -> None:
        """See ``DataPlane.drop``."""
        self._rows.pop(uid, None)
        self._columns.pop(uid, None)
        self._partial.pop(uid, None)

    def _require(self, uid: GroupUid) -> None:
        if uid not in self._rows:
            raise BufferStateError(
                f"group {uid} has no stored payload", hint="was its rollout released, or the group never finished?"
            )


class DataPool:
    """The rows that one task reads, ordered by uid and sample, and who reads which of them.

    Raises BufferStateError if it would be empty.
    """

    def __init__(self, rollout_id: int, task: str, uids: Sequence[GroupUid], plane: DataPlane) -> None:
        if not uids:
            raise BufferStateError(f"pool {task} would be empty: no group was finished")
        self.rollout_id = rollout_id
        self.task = task
        self.uids = sorted(uids)
        self._plane = plane
        self._require_equal_fields()
        self._assignments: dict[tuple[int, int, int], list[list[int]]] = {}

    def batch(self, num_steps: int = 1, step: int = 0) -> TrainBatch:
        """The rows of the task, with the fields that every group has by now.

        num_steps, step: the rows of mini-batch ``step`` of ``num_steps`` alone, as if they were the whole task: the
        groups are cut, in uid order, into parts of equal size, of which the first ones have one more where the number
        does not divide. Raises BufferStateError if there is no such mini-batch.
        """
        uids = self._mini_batch(num_steps, step)
        groups = [self._plane.columns(uid) for uid in uids]
        common = [name for name in groups[0] if all(name in columns for columns in groups)]
        columns = concat_columns([{name: columns[name] for name in common} for columns in groups])
        total_tokens = int(sum(float(np.sum(mask)) for mask in columns["loss_mask"]))
        return TrainBatch(
            rollout_id=self.rollout_id,
            task=self.task,
            row_ids=[row for uid in uids for row in self._plane.rows(uid)],
            columns=columns,
            total_rows=len(columns["loss_mask"]),
            total_tokens=total_tokens,
        )

    def share(self, dp_rank: int, dp_size: int, num_steps: int = 1, step: int = 0) -> TrainBatch:
        """The rows of one data-parallel rank in mini-batch ``step`` of ``num_steps`` (see ``batch``), balanced by
        tokens. The first call fixes the assignment; repeats return the same rows. Raises BufferStateError if there
        are fewer rows than ranks."""
        if not 0 <= dp_rank < dp_size:
            raise BufferStateError(f"rank {dp_rank} of {dp_size} does not exist", where=self.task)
        batch = self.batch(num_steps, step)
        key = (dp_size, num_steps, step)
        if key not in self._assignments:
            if len(batch) < dp_size:
                raise BufferStateError(f"{len(batch)} rows cannot be shared among {dp_size} ranks", where=self.task)
            self._assignments[key] = balanced_partition(batch.lengths, dp_size)
        return batch.select(self._assignments[key][dp_rank])

    def put_fields(self, row_ids: Sequence[RowId], columns: Mapping[str, Column]) -> None:
        """Add derived ragged fields (one array a row) for ``row_ids``, in any order.

        Raises BufferStateError for a row of another task, a repeated row, or a field of the wrong length.
        """
        place = {row: (uid, i) for uid in self.uids for i, row in enumerate(self._plane.rows(uid))}
        if len(set(row_ids)) != len(row_ids):
            raise BufferStateError("a row is named twice", where=self.task)
        if strangers := [row for row in row_ids if row not in place]:
            raise BufferStateError(f"row {strangers[0]} does not belong to this task", where=self.task)
        for name, column in columns.items():
            if len(column) != len(row_ids):
                raise BufferStateError(f"field {name!r} has {len(column)} rows for {len(row_ids)} ids", where=self.task)
            by_group: dict[GroupUid, dict[int, np.ndarray]] = {}
            for row, value in zip(row_ids, column, strict=True):
                uid, position = place[row]
                by_group.setdefault(uid, {})[position] = value
            for uid, rows in by_group.items():
                self._plane.put_field(uid, name, rows)

    def _mini_batch(self, num_steps: int, step: int) -> list[GroupUid]:
        if not 0 <= step < num_steps:
            raise BufferStateError(f"mini-batch {step} of {num_steps} does not exist", where=self.task)
        if len(self.uids) < num_steps:
            raise BufferStateError(
                f"{len(self.uids)} groups cannot be split into {num_steps} mini-batches",
                where=self.task,
                expected="at least one group for each optimizer step",
                hint="lower --num-steps-per-rollout, or finish more groups",
            )
        size, larger = divmod(len(self.uids), num_steps)
        start = step * size + min(step, larger)
        return self.uids[start : start + size + (step < larger)]

    def _require_equal_fields(self) -> None:
        """Derived fields come later and one by one; the producer's fields must be alike from the start."""
        first = set(self._plane.columns(self.uids[0])) - DERIVED_FIELDS
        for uid in self.uids[1:]:
            fields = set(self._plane.columns(uid)) - DERIVED_FIELDS
            if fields != first:
                raise BufferStateError(
                    f"group {uid} has the fields {sorted(fields)}", where=self.task, expected=str(sorted(first))
                )
