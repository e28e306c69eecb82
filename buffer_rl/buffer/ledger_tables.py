"""One group's entry in the ledger, the rules by which it changes, and the tables of the ledger's open file in SQL.

    pending ──lease──▶ leased ──finish──▶ finished ──commit──▶ trained(step)
       ▲                 │  │                │
       └────requeue──────┘  ├─reject─▶ rejected(reason)      (finished ──requeue──▶ pending, and
                            └─quarantine─▶ quarantined(reason)   finished ──reject──▶ rejected, as well)

A row that the order of an epoch passes over is rejected without being leased.

A foreign group, which the rollout function made, is leased and finished in one transaction. It is pending, and in no
queue, if it was lost before its step, or if its step had enough groups. It is rejected if it is too old for a step.

Each transition is a pure function from one entry to the next (``leased`` to ``trained``). It raises BufferStateError
where the diagram has no such arrow. ``LedgerTables`` reads and writes entries, their history, commits and facts.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from buffer_rl.buffer.ledger_file import write_failed
from buffer_rl.errors import BufferStateError
from buffer_rl.records.groups import GroupUid
from buffer_rl.records.utf8 import encodable

COLUMNS = "state, attempt, rollout_id, reason, step, selected"
"""The columns of an entry in the ledger's file."""

_LIVE = "state IN ('pending', 'leased', 'finished')"  # as in the schema, or the index `live` is not used


class GroupState(StrEnum):
    """Where a group is on its way. ``pending`` also holds for rows that were never leased."""

    PENDING = "pending"
    LEASED = "leased"
    FINISHED = "finished"
    TRAINED = "trained"
    REJECTED = "rejected"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One group's facts. ``reason`` belongs to rejected and quarantined groups, ``step`` to trained ones; ``selected``
    marks a finished group that the step of ``rollout_id`` trains on."""

    state: GroupState
    attempt: int = 0
    rollout_id: int | None = None
    reason: str = ""
    step: int | None = None
    selected: bool = False


def entry_of(row: tuple[Any, ...]) -> LedgerEntry:
    """The entry whose ``COLUMNS`` are in the row."""
    state, attempt, rollout_id, reason, step, is_selected = row
    return LedgerEntry(GroupState(state), attempt, rollout_id, reason, step, bool(is_selected))


def leased(uid: GroupUid, entry: LedgerEntry, rollout_id: int) -> LedgerEntry:
    """The entry after ``Ledger.lease``."""
    _require(uid, entry, GroupState.PENDING, "leased")
    return LedgerEntry(state=GroupState.LEASED, attempt=entry.attempt + 1, rollout_id=rollout_id)


def reported(uid: GroupUid, entry: LedgerEntry, attempt: int, state: GroupState, reason: str = "") -> LedgerEntry:
    """The entry after ``Ledger.finish``, ``reject``, ``quarantine`` or ``requeue``, as ``state`` says."""
    is_returned = state is GroupState.PENDING
    _check_live(uid, entry, attempt, (GroupState.LEASED, GroupState.FINISHED) if is_returned else (GroupState.LEASED,))
    rollout_id = None if is_returned else entry.rollout_id
    return LedgerEntry(state=state, attempt=attempt, rollout_id=rollout_id, reason=encodable(reason))


def rejected_late(uid: GroupUid, entry: LedgerEntry, attempt: int, reason: str) -> LedgerEntry:
    """The entry after ``Ledger.reject_finished``."""
    _check_live(uid, entry, attempt, (GroupState.FINISHED,))
    if entry.selected:
        raise BufferStateError(f"group {uid} is selected for rollout {entry.rollout_id}", expected="not selected")
    return LedgerEntry(state=GroupState.REJECTED, attempt=attempt, rollout_id=entry.rollout_id, reason=reason)


def selected(uid: GroupUid, entry: LedgerEntry, rollout_id: int) -> LedgerEntry:
    """The entry after ``Ledger.select``."""
    _require(uid, entry, GroupState.FINISHED, f"selected for rollout {rollout_id}")
    return LedgerEntry(state=entry.state, attempt=entry.attempt, rollout_id=rollout_id, selected=True)


def trained(uid: GroupUid, entry: LedgerEntry, rollout_id: int, step: int) -> LedgerEntry:
    """The entry after ``Ledger.commit``."""
    _require(uid, entry, GroupState.FINISHED, f"committed with rollout {rollout_id}")
    return LedgerEntry(state=GroupState.TRAINED, attempt=entry.attempt, rollout_id=rollout_id, step=step)


def passed_over(uid: GroupUid, entry: LedgerEntry, rollout_id: int, reason: str) -> LedgerEntry:
    """The entry after ``Ledger.pass_over``."""
    if entry.state is not GroupState.PENDING or entry.attempt:
        raise BufferStateError(f"group {uid} cannot be passed over: it is {_describe(entry)}", expected="never leased")
    return LedgerEntry(state=GroupState.REJECTED, rollout_id=rollout_id, reason=reason)


def is_repeat(entries: Sequence[LedgerEntry], committed: tuple[int, int] | None, rollout_id: int, step: int) -> bool:
    """Whether a commit of the groups with ``entries`` was made before. ``committed``: step and number of groups of the
    rollout's commit. Raises BufferStateError if the rollout was committed in another way."""
    if committed is None:
        return False
    if committed[0] != step:
        raise BufferStateError(f"rollout {rollout_id} was committed at step {committed[0]}, not {step}")
    same = all((e.state, e.rollout_id) == (GroupState.TRAINED, rollout_id) for e in entries)
    if not same or len(entries) != committed[1]:
        raise BufferStateError(f"rollout {rollout_id} was committed at step {step} with other groups")
    return True


def _require(uid: GroupUid, entry: LedgerEntry, state: GroupState, what: str) -> None:
    if entry.state is not state:
        raise BufferStateError(f"group {uid} cannot be {what}: it is {_describe(entry)}", expected=state)


def _check_live(uid: GroupUid, entry: LedgerEntry, attempt: int, states: tuple[GroupState, ...]) -> None:
    if entry.state not in states:
        what = f"the report on group {uid} is refused: it is {_describe(entry)}"
        raise BufferStateError(what, expected=" or ".join(states))
    if entry.attempt != attempt:
        raise BufferStateError(
            f"the report on group {uid} is refused: it is of attempt {attempt}, the live lease is {entry.attempt}"
        )


def _describe(entry: LedgerEntry) -> str:
    if entry.state is GroupState.TRAINED:
        return f"trained (step {entry.step})"
    if entry.reason:
        return f"{entry.state} ({entry.reason})"
    return str(entry.state)


class LedgerTables:
    """Reads and writes the tables of one open file. ``opening``: how often it was opened or replaced, which the lines
    of the history carry. ``seconds``: time spent in transactions since it was opened."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self.db = db
        self.path = path
        self.opening = 0
        self._source_ids: dict[str, int] = {}
        self._new_sources: list[str] = []
        self.seconds = 0.0

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """One transaction. Raises BufferStateError where the disk refuses it."""
        started = time.perf_counter()
        try:
            self.db.execute("BEGIN IMMEDIATE")
            yield
            self.db.execute("COMMIT")
        except BaseException as error:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            for source in self._new_sources:
                self._source_ids.pop(source, None)
            self._new_sources.clear()
            if isinstance(error, sqlite3.Error):
                raise write_failed(self.path, error) from error
            raise
        finally:
            self.seconds += time.perf_counter() - started
        self._new_sources.clear()

    def find(self, uid: GroupUid) -> tuple[int | None, LedgerEntry]:
        """The running number of a group's first lease, None where it was never leased, and its entry."""
        where = (self._source_ids.get(uid.source, -1), uid.epoch, uid.row)
        query = f"SELECT admitted, {COLUMNS} FROM groups WHERE source = ? AND epoch = ? AND row = ?"
        row = self.db.execute(query, where).fetchone()
        return (None, LedgerEntry(state=GroupState.PENDING)) if row is None else (row[0], entry_of(row[1:]))

    def write(
        self, uid: GroupUid, admitted: int | None, before: LedgerEntry, after: LedgerEntry, foreign: bool = False
    ) -> None:
        """Store a group's new entry, and the change in the history, with the rollout that a group left which is pending
        again. foreign: a new group is numbered downwards."""
        facts = (after.state, after.attempt, after.rollout_id, after.reason, after.step, after.selected)
        reason = "selected" if after.selected else after.reason
        rollout_id = before.rollout_id if after.rollout_id is None else after.rollout_id
        source = self.source_id(uid.source)
        if admitted is None:
            number = "min(coalesce(min(admitted), 0), 0) - 1" if foreign else "coalesce(max(admitted) + 1, 0)"
            admitted = self.db.execute(
                f"INSERT INTO groups (admitted, source, epoch, row, {COLUMNS}) VALUES"
                f" ((SELECT {number} FROM groups), ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (source, uid.epoch, uid.row, *facts),
            ).lastrowid
        else:
            assignments = "state = ?, attempt = ?, rollout_id = ?, reason = ?, step = ?, selected = ?"
            self.db.execute(f"UPDATE groups SET {assignments} WHERE admitted = ?", (*facts, admitted))
        self.db.execute(
            "INSERT INTO history (admitted, time, from_state, to_state, attempt, rollout_id, reason, step, incarnation)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (admitted, time.time(), before.state, *facts[:2], rollout_id, reason, after.step, self.opening),
        )

    def return_leases(self, reason: str, keep_selected: bool) -> None:
        """leased and finished → pending, but for the selected ones if these are kept."""
        held = f"{_LIVE} AND state != 'pending'" + (" AND selected = 0" if keep_selected else "")
        self.db.execute(
            "INSERT INTO history (admitted, time, from_state, to_state, attempt, rollout_id, reason, incarnation)"
            " SELECT admitted, ?, state, 'pending', attempt, rollout_id, ?, ? FROM groups INDEXED BY live"
            f" WHERE {held}",
            (time.time(), reason, self.opening),
        )
        update = "UPDATE groups INDEXED BY live SET state = 'pending', rollout_id = NULL, selected = 0"
        self.db.execute(f"{update} WHERE {held}")

    def uids(self, condition: str, *values: int) -> list[GroupUid]:
        """The groups under way that meet the condition, in the order of their first lease."""
        rows = self.db.execute(
            "SELECT s.source, row, epoch FROM groups INDEXED BY live JOIN sources s ON s.id = groups.source"
            f" WHERE {_LIVE} AND {condition} ORDER BY admitted",
            values,
        )
        return [GroupUid(*row) for row in rows]

    def selections(self) -> set[int]:
        """The rollouts that groups under way are selected for."""
        found = self.db.execute(f"SELECT rollout_id FROM groups INDEXED BY live WHERE {_LIVE} AND selected = 1")
        return {rollout_id for (rollout_id,) in found}

    def record_commit(self, rollout_id: int, step: int, num_groups: int) -> None:
        """Note that a rollout is committed."""
        self.db.execute("INSERT INTO commits VALUES (?, ?, ?)", (rollout_id, step, num_groups))

    def commit_of(self, rollout_id: int) -> tuple[int, int] | None:
        """Step and number of groups of a rollout's commit."""
        query = "SELECT step, num_groups FROM commits WHERE rollout_id = ?"
        row: tuple[int, int] | None = self.db.execute(query, (rollout_id,)).fetchone()
        return row

    def source_id(self, source: str) -> int:
        """The number of a source, a new one if it has none."""
        if source not in self._source_ids:
            number = self.db.execute("INSERT INTO sources (source) VALUES (?)", (source,)).lastrowid
            assert number is not None  # it was an INSERT
            self._source_ids[source] = number
            self._new_sources.append(source)
        return self._source_ids[source]

    def read_sources(self) -> None:
        """Read the numbers of all sources from the file."""
        self._source_ids = dict(self.db.execute("SELECT source, id FROM sources"))
        self._new_sources.clear()

    def fact(self, key: str) -> str | None:
        """A fact of the file."""
        row = self.db.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set_fact(self, key: str, value: str) -> None:
        """Store a fact in place of the one before."""
        self.db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, value))


class RewardTable:
    """The mean reward of each group that was scored, for an order of rows by difficulty; a table of its own, which only
    runs with such an order have.

    A reward counts once its group is trained, or rejected: it is then of the number of that step or ticket. ``new``
    reads them in this order, each once.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.is_kept = False
        self.read_until: int | None = None

    def create(self) -> None:
        """Keep rewards from here on; those that the file has stay."""
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS rewards (admitted INTEGER PRIMARY KEY, mean REAL NOT NULL, number INTEGER)"
        )
        self._db.execute("CREATE INDEX IF NOT EXISTS rewards_by_number ON rewards (number) WHERE number IS NOT NULL")
        self.is_kept = True

    def note(self, admitted: int, mean: float, number: int | None) -> None:
        """Store a group's mean reward. number: of the ticket that rejected the group. One that is below what was read
        counts as the next one."""
        if number is not None and self.read_until is not None:
            number = max(number, self.read_until)
        self._db.execute("INSERT OR REPLACE INTO rewards VALUES (?, ?, ?)", (admitted, mean, number))

    def settle(self, admitted: Iterable[int | None], number: int) -> None:
        """Groups are trained at the step ``number``."""
        self._db.executemany("UPDATE rewards SET number = ? WHERE admitted = ?", ((number, one) for one in admitted))

    def new(self, end: int) -> list[tuple[str, int, float]]:
        """Source, row and mean reward of all that count before ``end`` and were not read yet; the newest last."""
        query = (
            "SELECT s.source, row, mean FROM rewards r JOIN groups g USING (admitted) JOIN sources s ON s.id = g.source"
            " WHERE r.number < ? AND r.number >= ? ORDER BY r.number, epoch, admitted"
        )
        first = -1 if self.read_until is None else self.read_until
        found = list(self._db.execute(query, (end, first)))
        self.read_until = max(first, end)
        return found

    def replace_by_copy(self) -> None:
        """Take over those of the attached database ``copy``, if it has any."""
        if not self.is_kept:
            return
        self._db.execute("DELETE FROM rewards")
        if self._db.execute("SELECT 1 FROM copy.sqlite_master WHERE name = 'rewards'").fetchone():
            self._db.execute("INSERT INTO rewards SELECT * FROM copy.rewards")
