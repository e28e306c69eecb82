"""One rollout's rows: filled group by group and field by field, read by named tasks while the rollout still runs.

While its selection is open, finished groups are added, roles fill in derived fields, and each reading task gets every
group in one deal, when its fields are there (``get_meta``). Once it is closed, with the groups that the step trains on,
the whole batch can be read too (``share``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from buffer_rl.buffer.codec import RowIds
from buffer_rl.buffer.columns import BatchPlan, Cell, ColumnStore, GroupSlice, RowSizes
from buffer_rl.buffer.readers import Reader, Selection, Share, Splitting, balanced_partition
from buffer_rl.buffer.readers import ReadRequest as ReadRequest
from buffer_rl.errors import BufferStateError
from buffer_rl.plan.flops import RowCost
from buffer_rl.plan.roles import DERIVED_FIELDS
from buffer_rl.records.groups import Column, GroupUid, RolloutReport, RowId, take_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsMeta:
    """The answer to a reading task; neither ``dealt`` nor ``ended`` means: not yet.

    dealt: ``row_ids`` are those of the deal that was asked for. There may be none: in a deal that is made for all
    replicas at once, or where the step was closed without its groups.
    ended: there is no such deal and there will be none: the rollout is closed and the task got every row.
    generation: fencing token, which grows when the task's processes are replaced; writes of a replaced one are ignored.
    revision: of the Buffer when it answered, for a reader that waits for a change.
    """

    row_ids: list[RowId]
    dealt: bool
    ended: bool
    generation: int = 0
    revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Identifies the process that writes: of the reading task ``reader``, of this ``generation`` (see ``RowsMeta``)."""

    reader: str
    generation: int


class DataPool:
    """The groups of one task's selection, in the order of their uids, and their readers.

    num_groups: how many groups the step trains on, None for all; final readers never get others. report: what the
    selection was closed with.
    first_generation: of its readers (see ``RowsMeta``). Writes of an earlier one are of a pool that was given up.
    """

    def __init__(
        self, rollout_id: int, task: str, store: ColumnStore, num_groups: int | None, first_generation: int = 0
    ) -> None:
        self.rollout_id = rollout_id
        self.task = task
        self.selection = Selection(num_groups)
        self.report: RolloutReport | None = None
        self._store = store
        self._first_generation = first_generation
        self._readers: dict[str, Reader] = {}
        self._reserved: set[GroupUid] = set()  # what final readers get
        self._assignments: dict[tuple[int, int, int, Splitting], list[dict[GroupUid, list[int]]]] = {}

    # -- filling -------------------------------------------------------------------------------------

    def join(self, uid: GroupUid, order: int = 0) -> None:
        """A finished group, which is stored. order: of its lease (see ``Selection.join``)."""
        self.selection.join(uid, order)
        if self._readers:
            self._mark_ready(uid)

    def select(self, uids: Sequence[GroupUid]) -> list[GroupUid]:
        """Close the selection: the step trains on these groups. The others, which are returned, leave the pool.

        Check them with ``require_equal_fields`` first."""
        surplus = self.selection.close(uids)
        self._reserved.difference_update(surplus)
        for reader in self._readers.values():
            reader.withdraw(surplus)
        self._store.drop(surplus)
        if self._readers:
            for uid in self.selection.joined:
                self._mark_ready(uid)
        return surplus

    def drop_payloads(self) -> list[GroupUid]:
        """Forget the groups' columns. Returns the groups."""
        self._store.drop(self.selection.uids)
        return self.selection.uids

    @property
    def num_rows(self) -> int:
        """Rows of all groups."""
        return sum(len(self._store[uid].rows) for uid in self.selection.uids)

    def pinned(self) -> set[GroupUid]:
        """Groups that the step must train on: a final reader got them."""
        return {uid for reader in self._readers.values() if reader.request.is_final for uid in reader.delivered}

    def put_fields(self, row_ids: Sequence[RowId], columns: Mapping[str, Column], writer: Writer | None = None) -> None:
        """Add derived ragged fields (one array a row) for ``row_ids``, in any order. Rows of a group that the step was
        closed without are passed over: their writer could not know.

        writer: the process that writes; writes of a replaced one are ignored.
        Raises BufferStateError for a row of another task, a repeated row, or a field of the wrong length."""
        if writer is not None:
            reader = self._readers.get(writer.reader)
            if writer.generation < (self._first_generation if reader is None else reader.generation):
                return
        if len(set(row_ids)) != len(row_ids):
            raise BufferStateError("a row is named twice", where=self.task)
        place = [None if self.selection.is_withdrawn(row.uid) else (row.uid, self._position(row)) for row in row_ids]
        writes: dict[tuple[GroupUid, str], dict[int, np.ndarray]] = {}
        for name, column in columns.items():
            if len(column) != len(row_ids):
                raise BufferStateError(f"field {name!r} has {len(column)} rows for {len(row_ids)} ids", where=self.task)
            for where, value in zip(place, column, strict=True):
                if where is not None:
                    writes.setdefault((where[0], name), {})[where[1]] = value
        for (uid, name), rows in writes.items():
            self._store.check_field(uid, name, rows)
        for (uid, name), rows in writes.items():
            if self._store.put_field(uid, name, rows):
                self._mark_ready(uid)

    # -- reading while it fills ----------------------------------------------------------------------

    def get_meta(self, request: ReadRequest, revision: int = 0) -> RowsMeta:
        """A deal for a replica of a reading task: whole groups whose fields are there, each group in one deal of one
        replica. Repeats return the same rows, but those of groups that the step was closed without.

        Raises BufferStateError if the replica does not exist, or skips a deal; and if the task asked otherwise before:
        for other fields, or as another kind of reader.
        """
        request.check()
        reader = self._reader(request)
        uids = reader.deal(request, self.selection.closed)
        return RowsMeta(
            row_ids=RowIds(row for uid in uids or () if uid in self.selection for row in self._store[uid].rows),
            dealt=uids is not None,
            ended=uids is None and self.selection.closed and reader.is_done(len(self.selection)),
            generation=reader.generation,
            revision=revision,
        )

    def requeue_for_readers(self, reader_name: str) -> int:
        """The processes that read as ``reader_name`` are replaced, and ask for deals from 0 again: groups that were
        dealt and that lack the fields that the reader produces are redelivered. Returns their number. The work of a
        final reader is lost with it, so all its groups are redelivered."""
        reader = self._readers.get(reader_name)
        if reader is None:
            return 0
        lost = [
            uid
            for uid in reader.delivered
            if reader.request.is_final or not reader.request.produces <= self._store[uid].cells.keys()
        ]
        reader.requeue(lost)
        return len(lost)

    def plan_rows(self, row_ids: Sequence[RowId]) -> BatchPlan:
        """Rows of the pool in the given order, with the fields that every one of their groups has. Rows of a group that
        the step was closed without are left out: their reader could not know.

        Raises BufferStateError for a row of another task."""
        kept = [row for row in row_ids if not self.selection.is_withdrawn(row.uid)]
        runs = groupby(kept, key=lambda row: row.uid)
        slices = [(uid, [self._position(row) for row in rows]) for uid, rows in runs]
        return self._plan(slices, self._common_fields([uid for uid, _ in slices]))

    # -- reading when it is closed -------------------------------------------------------------------

    def share(self, share: Share) -> BatchPlan:
        """The rows of one data-parallel replica, with the fields that every group has by now. The first call fixes the
        assignment; repeats return the same rows, whatever their ``cost``. Raises BufferStateError if there is no such
        replica or mini-batch, while the rollout still runs, or if there is less to split than replicas."""
        dp_rank, dp_size, num_steps, step, splitting, given, cost = share
        if not 0 <= dp_rank < dp_size:
            raise BufferStateError(f"rank {dp_rank} of {dp_size} does not exist", where=self.task)
        uids = self._mini_batch(num_steps, step)
        key = (dp_size, num_steps, step, splitting)
        if key not in self._assignments:
            self._assignments[key] = self._assign(uids, dp_size, splitting, cost)
        mine = self._assignments[key][dp_rank]
        names = [n for n in self._common_fields(uids) if not given or all(n in self._store[uid].given for uid in uids)]
        return self._plan([(uid, mine[uid]) for uid in uids if uid in mine], names)

    # -- helpers -------------------------------------------------------------------------------------

    def _assign(
        self, uids: Sequence[GroupUid], dp_size: int, splitting: Splitting, cost: RowCost | None
    ) -> list[dict[GroupUid, list[int]]]:
        """For each replica the positions of its rows in their groups, in order."""
        if dp_size == 1:
            return [{uid: self._positions(uid) for uid in uids}]
        blocks = [(uid, [position]) for uid in uids for position in self._positions(uid)]
        loads = [load for uid in uids for load in self._loads(uid, cost)]
        if len(blocks) < dp_size:
            raise BufferStateError(f"{len(blocks)} rows cannot be shared among {dp_size} ranks", where=self.task)
        enough = len(uids) >= dp_size
        if splitting is Splitting.GROUPS and not enough:
            what = f"{len(uids)} whole groups cannot be shared among {dp_size} ranks"
            expected = "at least one group for each rank, since the loss compares the rows of a prompt"
            hint = "fewer --num-train-ranks, or more groups for each optimizer step, if a filter dropped some"
            raise BufferStateError(what, where=self.task, expected=expected, hint=hint)
        if splitting is not Splitting.ROWS and enough:
            blocks = [(uid, self._positions(uid)) for uid in uids]
            loads = [sum(self._loads(uid, cost)) for uid in uids]
        shares: list[dict[GroupUid, list[int]]] = []
        for part in balanced_partition(loads, dp_size):
            shares.append({})
            for uid, positions in (blocks[index] for index in part):
                shares[-1].setdefault(uid, []).extend(positions)
        return shares

    def _loads(self, uid: GroupUid, cost: RowCost | None) -> list[int]:
        """Of each row of a group. Its trained tokens stand for those of its response, which only the payload has."""
        sizes = self._store[uid].sizes
        if cost is None:
            return sizes.tokens
        return [cost.forward(*row) for row in zip(sizes.tokens, map(int, sizes.trained), strict=True)]

    def _positions(self, uid: GroupUid) -> list[int]:
        return list(range(len(self._store[uid].rows)))

    def _plan(self, slices: Sequence[tuple[GroupUid, list[int]]], names: Sequence[str]) -> BatchPlan:
        """Of each group the rows at these positions, with the fields ``names``, which it has."""
        parts = []
        for uid, positions in slices:
            cells, rows = self._store[uid].cells, self._store[uid].rows
            parts.append(
                GroupSlice(
                    row_ids=[rows[position] for position in positions],
                    positions=positions,
                    cells={name: cells[name] for name in names},
                )
            )
        return BatchPlan(rollout_id=self.rollout_id, task=self.task, slices=parts)

    def _common_fields(self, uids: Sequence[GroupUid]) -> list[str]:
        cells = [self._store[uid].cells for uid in uids]
        return [name for name in cells[0] if all(name in other for other in cells)] if cells else []

    def _position(self, row: RowId) -> int:
        position = self._store.position(row) if row.uid in self.selection else None
        if position is None:
            raise BufferStateError(f"row {row} does not belong to this task", where=self.task)
        return position

    def _reader(self, request: ReadRequest) -> Reader:
        reader = self._readers.get(request.reader)
        if reader is None:
            reader = self._readers[request.reader] = Reader(request, self._first_generation)
            for uid in self.selection.joined:
                self._mark_ready(uid)
        if request.kind != reader.request.kind:
            shown = {name: sorted(v) if isinstance(v, frozenset) else v for name, v in reader.request.kind.items()}
            what = f"the task {request.reader!r} asked for other fields, or as another kind of reader, before"
            expected = ", ".join(f"{name} {value}" for name, value in shown.items())
            raise BufferStateError(what, where=self.task, expected=expected)
        return reader

    def _mark_ready(self, uid: GroupUid) -> None:
        there = self._store[uid].cells.keys()
        limit = self.selection.num_groups
        for reader in self._readers.values():
            if not reader.request.fields <= there:
                continue
            if reader.request.is_final:  # all of them together get P groups
                if limit is not None and uid not in self._reserved and len(self._reserved) >= limit:
                    continue
                self._reserved.add(uid)
            reader.mark_ready(uid, self._store[uid].sizes.tokens)

    def _mini_batch(self, num_steps: int, step: int) -> list[GroupUid]:
        if not self.selection.closed:
            raise BufferStateError("the rollout still runs, its batch is not complete", where=self.task)
        if not 0 <= step < num_steps:
            raise BufferStateError(f"mini-batch {step} of {num_steps} does not exist", where=self.task)
        uids = self.selection.uids
        if len(uids) < num_steps:
            what = f"{len(uids)} groups cannot be split into {num_steps} mini-batches"
            expected = "at least one group for each optimizer step"
            hint = "lower --num-steps-per-rollout, or finish more groups"
            raise BufferStateError(what, where=self.task, expected=expected, hint=hint)
        # Neighbours are of one source and from one place in its file: cut into pieces, a step would be of one source.
        return uids[step::num_steps]

    def require_equal_fields(self, uids: Sequence[GroupUid], foreign: Collection[GroupUid] = ()) -> None:
        """Raises BufferStateError if these groups have different fields from their producer; the ``foreign`` ones among
        them may have ``rollout_log_probs`` by themselves. Derived fields come later and one by one."""
        given = {uid: self._store[uid].given - DERIVED_FIELDS for uid in uids}
        outside = set(foreign)
        first = given[min(given, key=lambda uid: (uid in outside, uid))] if given else frozenset()
        either = {first, first | {"rollout_log_probs"}}
        others = [uid for uid, names in given.items() if names not in (either if uid in outside else (first,))]
        if others:
            what = f"group {min(others)} has the fields {sorted(given[min(others)])}"
            raise BufferStateError(what, where=self.task, expected=str(sorted(first)))


def check_group(
    uid: GroupUid, row_ids: Sequence[RowId], columns: Mapping[str, Column | Cell], sizes: RowSizes | None = None
) -> RowSizes:
    """The group's sizes, made of its columns where they are not given. Raises BufferStateError for a group with rows of
    another prompt, a row twice, or columns that do not have a value for each row."""
    if foreign := [row for row in row_ids if row.uid is not uid and row.uid != uid]:
        expected, hint = "rows of one prompt", "a group's samples keep the uid that they were leased with"
        raise BufferStateError(f"group {uid} was reported with row {foreign[0]}", expected=expected, hint=hint)
    if len(set(row_ids)) != len(row_ids):
        raise BufferStateError(f"group {uid} was reported with a row twice")
    lengths = {name: c.num_rows if isinstance(c, Cell) else len(c) for name, c in columns.items()}
    if sizes is not None:
        lengths |= {"sizes": len(sizes.tokens), "trained sizes": len(sizes.trained)}
    if not row_ids or any(length != len(row_ids) for length in lengths.values()):
        raise BufferStateError(f"group {uid} has {len(row_ids)} rows and columns of lengths {lengths}")
    return sizes or RowSizes.of(columns, len(row_ids))


def split_groups(
    row_ids: Sequence[RowId], columns: Mapping[str, Column]
) -> list[tuple[GroupUid, list[RowId], dict[str, Column], RowSizes]]:
    """What ``Selections.add`` takes of each group of a batch, in the order of their first rows. Raises BufferStateError
    for a row that comes twice, and for columns of other lengths."""
    if lengths := {name: len(column) for name, column in columns.items() if len(column) != len(row_ids)}:
        raise BufferStateError(f"there are {len(row_ids)} rows and columns of lengths {lengths}")
    places: dict[GroupUid, list[int]] = {}
    for index, row in enumerate(row_ids):
        places.setdefault(row.uid, []).append(index)
    parts = []
    for uid, indices in places.items():
        rows = [row_ids[index] for index in indices]
        own = {name: take_rows(column, indices) for name, column in columns.items()}
        parts.append((uid, rows, own, check_group(uid, rows, own)))
    return parts
