"""The ledger: which state each group is in, in an SQLite file that survives ``kill -9``. No payloads, no Ray.

A uid is in exactly one state (the diagram is in ``ledger_tables``). Every transition is one transaction, history
included. A lease has an attempt number; a report of another attempt is refused.

Fencing token. Opening or replacing a ledger gives it a new one, and what was leased or finished is pending again: its
payloads were in the process that died. The queue is then ``recover()``, and the data source goes on after
``num_admitted`` groups. A ticket carries the token, and ``Rollouts.of`` refuses one with an earlier token. The attempt
alone would not do: a ledger that went back to a checkpoint gives the same attempt numbers again. A Buffer that hung and
was replaced may wake up: it finds the token of its successor in the file, and every transition that it still tries is
refused.

Why no answers of ``CallLog`` are stored here. A call that was executed before the Buffer died, and is repeated after
it, is harmless by what the ledger itself knows: reports and leases have the token of the ticket, and an earlier token
is refused; ``commit`` and ``select`` recognise their repeat by its rollout, step and groups; notes are overwritten with
the same value. A stored answer would do harm: a replayed lease with an earlier token would return groups that another
worker has leased by now.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVarTuple

import orjson

from buffer_rl.buffer.ledger_file import IN_MEMORY, NOTE, TABLES, local_copy, open_ledger_file, write_backup
from buffer_rl.buffer.ledger_tables import (
    GroupState,
    LedgerEntry,
    LedgerTables,
    RewardTable,
    is_repeat,
    leased,
    passed_over,
    rejected_late,
    reported,
    selected,
    trained,
)
from buffer_rl.errors import BufferStateError, CheckpointError, raised_as
from buffer_rl.records.groups import GroupUid
from buffer_rl.records.utf8 import encodable

Ts = TypeVarTuple("Ts")

_TOKEN = "incarnation"  # the fact of the file that holds the fencing token
_VERSION, _METADATA, _FAILURES = "version", "metadata", "failures"  # the notes of ``RunRecord``
_TOTAL = "run"  # all groups, among the counts of failures


class Ledger:
    """The ledger in the file ``path``, on a local disk. One process writes it, one thread at a time. Every transition
    raises BufferStateError where the group's state does not allow it, and then changes nothing.

    run: names the run that the ledger belongs to. A file of another run is refused.
    keep_selected: whether finished groups that were selected for a step stay finished when the file is opened. So ask
    where the trainer may hold their payloads: the driver then commits the step, or gives the groups back
    (``requeue``).

    Raises ConfigError or CheckpointError as ``open_ledger_file`` does.
    """

    def __init__(self, path: str | Path, *, run: str, keep_selected: bool = False) -> None:
        self.path = Path(path)
        self._db = open_ledger_file(self.path)
        self.tables = LedgerTables(self._db, self.path)
        self.rewards = RewardTable(self._db)
        # Names this ledger from its opening, or its last replacement, on: how often that was, and a random part.
        self.fencing_token = ""
        try:
            with self.tables.atomic():
                self._check_run(run)
                self._renew_token("restart", keep_selected)
            self.tables.read_sources()
        except BaseException:
            self._db.close()
            raise

    @classmethod
    def in_memory(cls) -> Ledger:
        """A ledger that lives as long as its process."""
        return cls(IN_MEMORY, run="in memory")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make the transitions of the block one transaction: all of them are in the file afterwards, or none. It is
        also cheaper than one for each. Blocks may be nested; the outermost one counts."""
        if self._db.in_transaction:
            yield
            return
        with self.tables.atomic():
            if self.tables.fact(_TOKEN) != self.fencing_token:
                what = "another Buffer has opened the ledger; this one is out of date"
                raise BufferStateError(what, where=str(self.path))
            yield

    # -- transitions ---------------------------------------------------------------------------------

    def lease(self, uid: GroupUid, rollout_id: int, foreign: bool = False) -> int:
        """pending → leased. Returns the attempt number, from 1. foreign: of no data source; its number is negative."""
        return self._change([uid], leased, rollout_id, foreign=foreign)[uid].attempt

    def finish(self, uid: GroupUid, attempt: int) -> None:
        """leased → finished."""
        self._change([uid], reported, attempt, GroupState.FINISHED)

    def reject(self, uid: GroupUid, attempt: int, reason: str) -> None:
        """leased → rejected."""
        self._change([uid], reported, attempt, GroupState.REJECTED, reason)

    def reject_finished(self, uid: GroupUid, attempt: int, reason: str) -> None:
        """finished → rejected: no step can train on the group any longer."""
        self._change([uid], rejected_late, attempt, reason)

    def quarantine(self, uid: GroupUid, attempt: int, reason: str) -> None:
        """leased → quarantined: the group failed too often by itself, and is not tried again."""
        self._change([uid], reported, attempt, GroupState.QUARANTINED, reason)

    def pass_over(self, uid: GroupUid, rollout_id: int, reason: str) -> None:
        """pending → rejected, without a lease."""
        self._change([uid], passed_over, rollout_id, reason)

    def requeue(self, uid: GroupUid, attempt: int) -> None:
        """leased or finished → pending."""
        self._change([uid], reported, attempt, GroupState.PENDING)

    def select(self, uids: Iterable[GroupUid], rollout_id: int) -> None:
        """Mark finished groups as those that the step of ``rollout_id`` trains on, all of them or none. They stay
        finished. From here on a trainer may hold their payloads."""
        self._change(uids, selected, rollout_id)

    def commit(self, uids: Iterable[GroupUid], rollout_id: int, step: int) -> None:
        """finished → trained, all of them or none. A rollout is committed once: a repeat with the same groups and the
        same step changes nothing, any other one is refused. Without groups nothing is recorded."""
        chosen = list(dict.fromkeys(uids))
        with self.transaction():
            found = [self.tables.find(uid) for uid in chosen]
            if is_repeat([entry for _, entry in found], self.tables.commit_of(rollout_id), rollout_id, step):
                return
            self._change(chosen, trained, rollout_id, step)
            if chosen:
                self.tables.record_commit(rollout_id, step, len(chosen))
            if self.rewards.is_kept:
                self.rewards.settle([admitted for admitted, _ in found], rollout_id)

    def entry(self, uid: GroupUid) -> LedgerEntry:
        """The facts of one group; ``pending`` with attempt 0 where it was never leased."""
        return self.tables.find(uid)[1]

    def number(self, uid: GroupUid) -> int | None:
        """The running number of the group's first lease, negative of a foreign one; None where it was never leased."""
        return self.tables.find(uid)[0]

    @property
    def num_admitted(self) -> int:
        """Number of groups that were ever leased, without foreign ones."""
        return int(self._db.execute("SELECT coalesce(max(admitted) + 1, 0) FROM groups").fetchone()[0])

    def recover(self) -> list[GroupUid]:
        """The groups that were leased before and are pending, in the order of their first lease: the queue of a Buffer
        that begins with this ledger. Foreign ones are left out: no data source can make them again."""
        return self.tables.uids("state = 'pending' AND admitted >= 0")

    def selected(self, rollout_id: int) -> list[GroupUid]:
        """The finished groups that were selected for the step of a rollout, in the order of their first lease."""
        return self.tables.uids("selected = 1 AND rollout_id = ?", rollout_id)

    def commits(self) -> dict[int, int]:
        """The step of each rollout that was committed."""
        return dict(self._db.execute("SELECT rollout_id, step FROM commits ORDER BY rollout_id"))

    def num_committed(self, first: int) -> dict[int, int]:
        """The number of groups of each rollout from ``first`` on that was committed."""
        rows = "SELECT rollout_id, num_groups FROM commits WHERE rollout_id >= ?"
        return dict(self._db.execute(rows, (first,)))

    def remember(self, key: str, value: str) -> None:
        """Store a note, such as the position of a data source, within the transaction of the block if there is one."""
        with self.transaction():
            self.tables.set_fact(NOTE + key, value)

    def recall(self, key: str) -> str | None:
        """The note of ``remember``."""
        return self.tables.fact(NOTE + key)

    def set_num_rows(self, source: str, num_rows: int) -> None:
        """Note how many rows a source has, so that ``buffer-rl ledger`` can count those that were never leased."""
        with self.transaction():
            number = self.tables.source_id(source)
            self._db.execute("UPDATE sources SET num_rows = ? WHERE id = ?", (num_rows, number))

    # -- rewards, for an order of rows by difficulty ------------------------------------------------

    def keep_rewards(self) -> None:
        """Keep the rewards that ``note_reward`` names; without it they are ignored."""
        with self.transaction():
            self.rewards.create()

    def note_reward(self, uid: GroupUid, mean: float | None, number: int | None = None) -> None:
        """Note the mean reward of a leased, finished or rejected group, in the transaction of the block. number: of the
        ticket that rejected it."""
        if self.rewards.is_kept and mean is not None and (admitted := self.number(uid)) is not None:
            self.rewards.note(admitted, mean, number)

    def rows_of(self, source: str, epoch: int) -> list[int]:
        """The rows of an epoch that were leased or passed over."""
        query = "SELECT row FROM groups WHERE source = (SELECT id FROM sources WHERE source = ?) AND epoch = ?"
        return [row for (row,) in self._db.execute(f"{query} AND admitted >= 0", (source, epoch))]

    # -- copies --------------------------------------------------------------------------------------

    def backup(self, path: str | Path) -> None:
        """Copy the ledger as it is now into the new file ``path``, flushed to disk. Raises CheckpointError if it
        cannot be written, BufferStateError within a transaction, whose outcome is not known yet."""
        if self._db.in_transaction:
            raise BufferStateError("a ledger cannot be copied within a transaction", where=str(self.path))
        write_backup(self._db, self.path, Path(path))

    def restore(self, path: str | Path) -> None:
        """Replace everything by the copy ``path``, in one transaction, with a new fencing token. What was trained
        after the copy was made is pending again, because the copy says so. Raises CheckpointError for a copy that is
        damaged; nothing is changed then."""
        with local_copy(Path(path), self.path) as copy:
            with raised_as(CheckpointError, "the copy of the ledger cannot be read", sqlite3.Error, where=str(path)):
                self._db.execute("ATTACH DATABASE ? AS copy", (str(copy),))
            try:
                self._replace_by_copy()
            finally:
                self._db.execute("DETACH DATABASE copy")

    # -- inside --------------------------------------------------------------------------------------

    def _replace_by_copy(self) -> None:
        before = (self.tables.opening, self.fencing_token)
        try:
            with self.transaction():
                for table in TABLES:
                    kept = f" WHERE key NOT IN ('run', 'restarts', '{_TOKEN}')" if table == "facts" else ""
                    self._db.execute(f"DELETE FROM {table}{kept}")
                    self._db.execute(f"INSERT INTO {table} SELECT * FROM copy.{table}{kept}")
                self.rewards.replace_by_copy()
                self._renew_token("restore", keep_selected=False)
        except BaseException:
            self.tables.opening, self.fencing_token = before
            raise
        finally:
            self.tables.read_sources()

    def _check_run(self, run: str) -> None:
        known = self.tables.fact("run")
        if known is None:
            self.tables.set_fact("run", run)
        elif known != run:
            hint = "give each run a file of its own; a copy from a checkpoint is restored, not opened"
            raise CheckpointError(f"the ledger is of run {known!r}, not {run!r}", where=str(self.path), hint=hint)

    def _renew_token(self, reason: str, keep_selected: bool) -> None:
        number = int(self.tables.fact("restarts") or 0) + 1
        self.tables.opening = number
        self.fencing_token = f"{number}-{uuid.uuid4().hex}"
        self.tables.set_fact("restarts", str(number))
        self.tables.set_fact(_TOKEN, self.fencing_token)
        self.tables.return_leases(reason, keep_selected)

    def _change(
        self,
        uids: Iterable[GroupUid],
        rule: Callable[[GroupUid, LedgerEntry, *Ts], LedgerEntry],
        *args: *Ts,
        foreign: bool = False,
    ) -> dict[GroupUid, LedgerEntry]:
        """The new entries of all groups, which are written if the rule allows all of them."""
        with self.transaction():
            found = {uid: self.tables.find(uid) for uid in uids}
            new = {uid: rule(uid, entry, *args) for uid, (_, entry) in found.items()}
            for uid, (admitted, entry) in found.items():
                self.tables.write(uid, admitted, entry, new[uid], foreign)
        return new


class RunRecord:
    """What the Buffer knows of the run beside its groups: the published version, the commits, failures, the user's
    notes. Read from ``ledger`` when it is made, and written to it with every change, so that a Buffer that begins with
    the ledger of one that died knows the same.

    version: the newest published weights. committed: the step of each rollout that was trained on. inherited: rollouts
    that a Buffer that died had selected groups for, which are neither committed nor given up. metadata: the user's
    notes, which are replaced as a whole.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.version = int(ledger.recall(_VERSION) or 0)
        self.committed = ledger.commits()
        self.inherited = ledger.tables.selections()
        self.metadata: dict[str, Any] = orjson.loads(ledger.recall(_METADATA) or "{}")
        self._failures: dict[str, dict[str, int]] = orjson.loads(ledger.recall(_FAILURES) or "{}")

    def require_untrained(self, rollout_id: int) -> None:
        """Raises BufferStateError if the rollout was committed."""
        if rollout_id in self.committed:
            raise BufferStateError(f"rollout {rollout_id} was trained on at step {self.committed[rollout_id]}")

    def is_repeat(self, rollout_id: int, step: int) -> bool:
        """Whether the rollout was committed before. Raises BufferStateError if that was at another step."""
        committed = self.committed.get(rollout_id)
        if committed not in (None, step):
            raise BufferStateError(f"rollout {rollout_id} was committed at step {committed}, not {step}")
        return committed is not None

    def commit(self, uids: Iterable[GroupUid], rollout_id: int, step: int) -> None:
        """The rollout was trained on, with these groups."""
        self._ledger.commit(uids, rollout_id, step)
        self.committed[rollout_id] = step
        self.inherited.discard(rollout_id)

    def selected_since(self, version: int) -> dict[int, int]:
        """The number of groups of each step from ``version`` on that is committed, or that a Buffer that died had
        selected."""
        return self._ledger.num_committed(version) | {step: len(self._ledger.selected(step)) for step in self.inherited}

    def set_version(self, version: int) -> None:
        """Another version is published."""
        self._ledger.remember(_VERSION, str(version))
        self.version = version

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Merge JSON values into the notes; lone surrogates become escapes. Raises BufferStateError for what is
        not JSON."""
        with raised_as(BufferStateError, "metadata is not JSON", (TypeError, RecursionError)):
            merged = self.metadata | orjson.loads(orjson.dumps(encodable(dict(metadata))))
        self._ledger.remember(_METADATA, orjson.dumps(merged).decode())
        self.metadata = merged

    def count_failure(self, uid: GroupUid, kind: str) -> tuple[int, int]:
        """Count a failed attempt. Returns how many of this ``kind`` the run had, and how many of them the group."""
        failures = {known: dict(counts) for known, counts in self._failures.items()}
        counts = failures.setdefault(kind, {})
        for counted in (_TOTAL, str(uid)):
            counts[counted] = counts.get(counted, 0) + 1
        self._ledger.remember(_FAILURES, orjson.dumps(failures).decode())
        self._failures = failures
        return counts[_TOTAL], counts[str(uid)]

    def restore(self, version: int, metadata: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, whose ledger was restored. The run has its full budget of failures again."""
        self.set_version(version)
        self.metadata = {}
        self.update_metadata(metadata)
        self.committed = self._ledger.commits()
        self.inherited = self._ledger.tables.selections()
        failures = orjson.loads(self._ledger.recall(_FAILURES) or "{}")
        self._failures = {
            kind: {name: count for name, count in counts.items() if name != _TOTAL} for kind, counts in failures.items()
        }
        self._ledger.remember(_FAILURES, orjson.dumps(self._failures).decode())
