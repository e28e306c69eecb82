"""The ledger that survives ``kill -9``: every transition is one SQLite transaction, history included.

Opening a ledger begins a new incarnation: what was leased or finished is pending again, because its payloads were in
the process that died. The queue is then ``recover()``, and the data source goes on after ``num_admitted`` groups.

Why no answers of ``CallLog`` are stored here. A call that was executed before the Buffer died, and is repeated after
it, is harmless by what the ledger itself knows: reports and leases bear the incarnation of the ticket, and those of a
dead one are refused (their groups are pending again); ``commit`` and ``select`` recognise their repeat by its rollout,
step and groups; notes are overwritten with the same value. A stored answer would do harm: a lease of a dead
incarnation, replayed, would hand out groups that somebody else has leased by now.

A Buffer that hung and was replaced may wake up: it finds the incarnation of its successor in the file, and every
transition that it still tries is refused.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from buffer_rl.buffer.ledger import (
    GroupState,
    LedgerEntry,
    after_restart,
    check_incarnation,
    commits_of,
    dropped,
    finished,
    is_repeat,
    leased,
    parsed_entries,
    requeued,
    selected,
    trained,
)
from buffer_rl.buffer.ledger_copy import local_copy, write_backup
from buffer_rl.buffer.ledger_file import TABLES, open_ledger_file
from buffer_rl.buffer.ledger_tables import COLUMNS, LedgerTables, entry_of
from buffer_rl.errors import BufferStateError, CheckpointError
from buffer_rl.types import GroupUid

NOTE = "note:"
_Rule = Callable[[LedgerEntry], LedgerEntry]


class SqliteLedger:
    """A ``Ledger`` in the file ``path``, on a local disk. One process writes it, one thread at a time.

    run: names the run that the ledger belongs to. A file of another run is refused: a ledger is never begun anew, or
    continued, by mistake.
    keep_selected: whether finished groups that were selected for a step stay finished when the file is opened. So ask
    where the trainer may hold their payloads: the driver then commits the step, or gives the groups back
    (``requeue``).
    connection: the class of the SQLite connection, which tests of the ledger replace.

    Raises ConfigError or CheckpointError as ``open_ledger_file`` does.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        run: str,
        keep_selected: bool = False,
        connection: type[sqlite3.Connection] = sqlite3.Connection,
    ) -> None:
        self.path = Path(path)
        self._db = open_ledger_file(self.path, connection)
        self._tables = LedgerTables(self._db, self.path)
        self._incarnation = ""
        try:
            with self._tables.atomic():
                self._check_run(run)
                self.returned = self._begin_incarnation("restart", keep_selected)
            self._tables.count()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close the file. Whoever reads it later finds the same."""
        self._db.close()

    @property
    def incarnation(self) -> str:
        """See ``Ledger.incarnation``: how often the file was opened, and a random part."""
        return self._incarnation

    @property
    def seconds(self) -> float:
        """Time spent in transactions since the file was opened."""
        return self._tables.seconds

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make the transitions of the block one transaction: all of them are in the file afterwards, or none. It is
        also cheaper than one for each. Blocks may be nested; the outermost one counts."""
        if self._db.in_transaction:
            yield
            return
        with self._tables.atomic():
            self._check_writer()
            yield

    # -- transitions ---------------------------------------------------------------------------------

    def lease(self, uid: GroupUid, rollout_id: int) -> int:
        """See ``Ledger.lease``."""
        return self._change(uid, lambda entry: leased(uid, entry, rollout_id)).attempt

    def finish(self, uid: GroupUid, attempt: int, *, incarnation: str | None = None) -> None:
        """See ``Ledger.finish``."""
        self._report(uid, incarnation, lambda entry: finished(uid, entry, attempt))

    def reject(self, uid: GroupUid, attempt: int, reason: str, *, incarnation: str | None = None) -> None:
        """See ``Ledger.reject``."""
        self._report(uid, incarnation, lambda entry: dropped(uid, entry, attempt, GroupState.REJECTED, reason))

    def quarantine(self, uid: GroupUid, attempt: int, reason: str, *, incarnation: str | None = None) -> None:
        """See ``Ledger.quarantine``."""
        self._report(uid, incarnation, lambda entry: dropped(uid, entry, attempt, GroupState.QUARANTINED, reason))

    def requeue(self, uid: GroupUid, attempt: int, *, incarnation: str | None = None) -> None:
        """See ``Ledger.requeue``."""
        self._report(uid, incarnation, lambda entry: requeued(uid, entry, attempt))

    def select(self, uids: Iterable[GroupUid], rollout_id: int) -> None:
        """See ``Ledger.select``."""
        with self.transaction():
            found = {uid: self._tables.find(uid) for uid in uids}
            new = {uid: selected(uid, entry, rollout_id) for uid, (_, entry) in found.items()}
            for uid, (admitted, entry) in found.items():
                self._tables.write(uid, admitted, entry, new[uid])

    def commit(self, uids: Iterable[GroupUid], rollout_id: int, step: int) -> None:
        """See ``Ledger.commit``."""
        chosen = list(dict.fromkeys(uids))
        with self.transaction():
            found = [self._tables.find(uid) for uid in chosen]
            if is_repeat([entry for _, entry in found], self._tables.commit_of(rollout_id), rollout_id, step):
                return
            new = [trained(uid, entry, rollout_id, step) for uid, (_, entry) in zip(chosen, found, strict=True)]
            for uid, (admitted, entry), after in zip(chosen, found, new, strict=True):
                self._tables.write(uid, admitted, entry, after)
            if chosen:
                self._tables.record_commit(rollout_id, step, len(chosen))

    # -- questions -----------------------------------------------------------------------------------

    def entry(self, uid: GroupUid) -> LedgerEntry:
        """See ``Ledger.entry``."""
        return self._tables.find(uid)[1]

    def counts(self, source: str, epoch: int, num_rows: int) -> dict[GroupState, int]:
        """See ``Ledger.counts``."""
        counts = self._tables.counts(source, epoch)
        counts[GroupState.PENDING] += num_rows - sum(counts.values())
        return counts

    def number(self, uid: GroupUid) -> int | None:
        """See ``Ledger.number``."""
        return self._tables.find(uid)[0]

    @property
    def num_admitted(self) -> int:
        """Number of groups that were ever leased."""
        return int(self._db.execute("SELECT coalesce(max(admitted) + 1, 0) FROM groups").fetchone()[0])

    def recover(self) -> list[GroupUid]:
        """The groups that were leased before and are pending, in the order of their admission: the queue of a Buffer
        that begins with this ledger."""
        return self._tables.uids("state = 'pending'")

    def selected(self, rollout_id: int) -> list[GroupUid]:
        """The finished groups that were selected for the step of a rollout, in the order of their admission."""
        return self._tables.uids("selected = 1 AND rollout_id = ?", rollout_id)

    def commits(self) -> dict[int, int]:
        """The step of each rollout that was committed."""
        return dict(self._db.execute("SELECT rollout_id, step FROM commits ORDER BY rollout_id"))

    # -- facts beside the groups ---------------------------------------------------------------------

    def remember(self, key: str, value: str) -> None:
        """Store a note, such as the position of a data source, within the transaction of the block if there is one."""
        with self.transaction():
            self._tables.set_fact(NOTE + key, value)

    def recall(self, key: str) -> str | None:
        """The note of ``remember``."""
        return self._tables.fact(NOTE + key)

    def set_num_rows(self, source: str, num_rows: int) -> None:
        """Note how many rows a source has, so that ``buffer-rl ledger`` can count those that nobody asked for yet."""
        with self.transaction():
            number = self._tables.source_id(source)
            self._db.execute("UPDATE sources SET num_rows = ? WHERE id = ?", (num_rows, number))

    # -- copies --------------------------------------------------------------------------------------

    def backup(self, path: str | Path) -> None:
        """Copy the ledger as it is now into the new file ``path``, flushed to disk. Raises CheckpointError if it
        cannot be written, BufferStateError within a transaction, which nobody knows yet whether to believe."""
        if self._db.in_transaction:
            raise BufferStateError("a ledger cannot be copied within a transaction", where=str(self.path))
        write_backup(self._db, self.path, Path(path))

    def restore(self, path: str | Path) -> None:
        """Replace everything by the copy ``path``, in one transaction, and begin a new incarnation. What was trained
        after the copy was made is pending again, because the copy says so. Raises CheckpointError for a copy that is
        damaged; nothing is changed then."""
        with local_copy(Path(path), self.path) as copy:
            try:
                self._db.execute("ATTACH DATABASE ? AS copy", (str(copy),))
            except sqlite3.Error as error:
                raise CheckpointError(f"the copy of the ledger cannot be read: {error}", where=str(path)) from error
            try:
                with self._replacing("restore"):
                    for table in TABLES:
                        kept = " WHERE key NOT IN ('run', 'restarts', 'incarnation')" if table == "facts" else ""
                        self._db.execute(f"DELETE FROM {table}{kept}")
                        self._db.execute(f"INSERT INTO {table} SELECT * FROM copy.{table}{kept}")
            finally:
                self._db.execute("DETACH DATABASE copy")

    def state_dict(self) -> dict[str, Any]:
        """See ``Ledger.state_dict``. All of it in memory: ``backup`` is what checkpoints of long runs hold."""
        query = f"SELECT s.source, row, epoch, {COLUMNS} FROM groups JOIN sources s ON s.id = groups.source"
        rows = self._db.execute(f"{query} ORDER BY admitted")
        return {"entries": [[str(GroupUid(*row[:3])), asdict(after_restart(entry_of(row[3:])))] for row in rows]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Ledger.load_state_dict``."""
        entries = dict(parsed_entries(state))
        with self._replacing("loaded"):
            for table in ("groups", "commits", "history"):
                self._db.execute(f"DELETE FROM {table}")
            for uid, entry in entries.items():
                self._tables.write(uid, None, LedgerEntry(state=GroupState.PENDING), entry)
            for rollout_id, (step, num_groups) in commits_of(entries.values()).items():
                self._tables.record_commit(rollout_id, step, num_groups)

    # -- inside --------------------------------------------------------------------------------------

    @contextmanager
    def _replacing(self, reason: str) -> Iterator[None]:
        """Replace the tables in the block; a new incarnation then begins, in the same transaction."""
        before = (self._tables.incarnation, self._incarnation)
        try:
            with self._tables.atomic():
                self._check_writer()
                yield
                self.returned = self._begin_incarnation(reason, keep_selected=False)
        except BaseException:
            self._tables.incarnation, self._incarnation = before
            raise
        finally:
            self._tables.count()

    def _check_run(self, run: str) -> None:
        known = self._tables.fact("run")
        if known is None:
            self._tables.set_fact("run", run)
        elif known != run:
            raise CheckpointError(
                f"the ledger is of run {known!r}, not {run!r}",
                where=str(self.path),
                hint="give each run a file of its own; a copy from a checkpoint is restored, not opened",
            )

    def _begin_incarnation(self, reason: str, keep_selected: bool) -> int:
        """Returns how many groups went back to pending."""
        number = int(self._tables.fact("restarts") or 0) + 1
        self._tables.incarnation = number
        self._incarnation = f"{number}-{uuid.uuid4().hex}"
        self._tables.set_fact("restarts", str(number))
        self._tables.set_fact("incarnation", self._incarnation)
        return self._return_leases(reason, keep_selected)

    def _return_leases(self, reason: str, keep_selected: bool) -> int:
        return self._tables.return_leases(reason, keep_selected)

    def _check_writer(self) -> None:
        if self._tables.fact("incarnation") != self._incarnation:
            raise BufferStateError(
                "another Buffer has opened the ledger; this one is out of date", where=str(self.path)
            )

    def _report(self, uid: GroupUid, incarnation: str | None, rule: _Rule) -> None:
        check_incarnation(uid, incarnation, self._incarnation)
        self._change(uid, rule)

    def _change(self, uid: GroupUid, rule: _Rule) -> LedgerEntry:
        with self.transaction():
            admitted, before = self._tables.find(uid)
            after = rule(before)
            self._tables.write(uid, admitted, before, after)
        return after
