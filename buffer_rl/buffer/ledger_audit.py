"""Reads a ledger that may be in use: counts, tickets and selections, one group's history, the process that writes it,
and whether the accounting holds."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer_rl.buffer.ledger_file import NOTE, open_for_reading, read_failed
from buffer_rl.buffer.ledger_tables import COLUMNS, GroupState, LedgerEntry, entry_of
from buffer_rl.records.groups import GroupUid

PID = "pid"
"""The ledger's note of the process that writes it, as ``process_note`` has it."""
_DEAD = ("Z", "X")
_STARTED = 19  # the 22nd field of /proc/PID/stat, counted from the third: the two before it may hold spaces

# Each finds rows that contradict the accounting, as one line of text each.
_RULES = (
    """SELECT 'group ' || u || ' is ' || state || ', but its history ends with ' || coalesce(last, 'nothing')
       FROM (SELECT s.source || ':' || row || ':' || epoch AS u, state,
                    (SELECT to_state FROM history h WHERE h.id = newest.id) AS last
             FROM groups g JOIN sources s ON s.id = g.source
             LEFT JOIN (SELECT admitted, max(id) AS id FROM history GROUP BY admitted) newest USING (admitted))
       WHERE last IS NOT state""",
    """SELECT 'group ' || s.source || ':' || row || ':' || epoch || ' has ' || state || ' without attempt or rollout'
       FROM groups JOIN sources s ON s.id = groups.source
       WHERE state IN ('leased', 'finished', 'trained') AND (attempt < 1 OR rollout_id IS NULL)""",
    """SELECT 'group ' || s.source || ':' || row || ':' || epoch || ' was trained ' || times || ' times'
       FROM (SELECT admitted, count(*) AS times FROM history WHERE to_state = 'trained' GROUP BY admitted) t
       JOIN groups USING (admitted) JOIN sources s ON s.id = groups.source WHERE times > 1""",
    """SELECT 'group ' || s.source || ':' || row || ':' || epoch || ' left ' || from_state || ' for ' || to_state
       FROM history JOIN groups USING (admitted) JOIN sources s ON s.id = groups.source
       WHERE from_state IN ('trained', 'rejected', 'quarantined')""",
    """SELECT 'group ' || s.source || ':' || row || ':' || epoch || ' was ' || known || ', and then left ' || from_state
       FROM (SELECT admitted, from_state, lag(to_state, 1, 'pending') OVER (PARTITION BY admitted ORDER BY id) AS known
             FROM history) JOIN groups USING (admitted) JOIN sources s ON s.id = groups.source
       WHERE from_state != known""",
    """SELECT 'rollout ' || rollout_id || ' was committed with ' || num_groups || ' groups at step ' || step || ', and '
              || found || ' are trained at it'
       FROM (SELECT c.rollout_id, c.step, num_groups, count(g.admitted) AS found FROM commits c
             LEFT JOIN groups g ON g.state = 'trained' AND g.rollout_id = c.rollout_id AND g.step = c.step
             GROUP BY c.rollout_id)
       WHERE found != num_groups""",
    """SELECT 'group ' || s.source || ':' || row || ':' || epoch || ' is trained, and rollout ' || rollout_id ||
              ' was not committed at step ' || step
       FROM groups g JOIN sources s ON s.id = g.source
       WHERE state = 'trained'
         AND NOT EXISTS (SELECT 1 FROM commits c WHERE c.rollout_id = g.rollout_id AND c.step = g.step)""",
    """SELECT 'group ' || admitted || ' is of no source' FROM groups WHERE source NOT IN (SELECT id FROM sources)""",
    """SELECT 'history ' || id || ' names a group that does not exist' FROM history
       WHERE admitted NOT IN (SELECT admitted FROM groups)""",
    """SELECT 'source ' || source || ' has ' || num_rows || ' rows, and ' || seen || ' groups in epoch ' || epoch
       FROM (SELECT s.source, num_rows, epoch, count(*) AS seen FROM groups JOIN sources s ON s.id = groups.source
             GROUP BY s.id, epoch)
       WHERE num_rows IS NOT NULL AND seen > num_rows""",
)

# A group's attempt is one lease: its lines begin with that of the ticket. What a step does with finished groups is no
# production, but for what it gives back or rejects.
_TICKETS = """SELECT ticket, sum(leased), sum(finished), sum(requeued), sum(rejected), sum(quarantined)
    FROM (SELECT max(iif(to_state = 'leased', rollout_id, NULL)) AS ticket,
                 sum(to_state = 'leased') AS leased, sum(to_state = 'finished') AS finished,
                 sum(to_state = 'pending') AS requeued, sum(to_state = 'rejected') AS rejected,
                 sum(to_state = 'quarantined') AS quarantined
          FROM history WHERE from_state != 'finished' OR to_state IN ('pending', 'rejected') GROUP BY admitted, attempt)
    WHERE ticket IS NOT NULL GROUP BY ticket ORDER BY ticket DESC LIMIT ?"""
# The history has no index: it is read once, and each line's group is looked up, not each group's lines.
_SELECTIONS = """SELECT g.rollout_id, count(*), g.step, group_concat(DISTINCT h.rollout_id)
    FROM history h CROSS JOIN groups g USING (admitted)
    WHERE h.to_state = 'leased' AND h.attempt = g.attempt AND (g.state = 'trained' OR g.selected = 1)
    GROUP BY g.rollout_id, g.step ORDER BY g.rollout_id DESC LIMIT ?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCounts:
    """Groups of one epoch of one source by state. ``num_rows`` is None where the ledger does not know it: only
    groups that were leased before are then counted as pending.

    ``epoch`` is None for all foreign groups of a source, which the rollout function made: those that are pending were
    lost before their step, or not needed, and may be imported again."""

    source: str
    epoch: int | None
    num_rows: int | None
    counts: dict[GroupState, int]


@dataclass(frozen=True, slots=True)
class TicketCounts:
    """What became of the leases of one ticket. A group that it leased twice counts twice; one that it finished and that
    went back to the queue afterwards is ``finished`` and ``requeued``; a foreign group counts as leased."""

    rollout_id: int
    leased: int
    finished: int
    requeued: int
    rejected: int
    quarantined: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionFacts:
    """The groups of one step. ``step``: where they were trained, None where they were not yet. ``tickets``: the
    rollouts whose tickets leased them, ascending."""

    rollout_id: int
    num_groups: int
    step: int | None
    tickets: list[int]


@dataclass(frozen=True, slots=True)
class Transition:
    """One line of a group's history. ``time`` is in seconds since 1970; ``incarnation`` says how often the ledger had
    been opened; ``rollout_id`` is the ticket's or selection's, of a group that is pending again the one that it left
    (None in ledgers of earlier versions)."""

    time: float
    before: GroupState
    after: GroupState
    attempt: int
    rollout_id: int | None
    reason: str
    step: int | None
    incarnation: int


class LedgerAudit:
    """A ledger as of one moment for each question. Raises CheckpointError for a file that is damaged or cannot
    be read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._db = open_for_reading(self.path)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def facts(self) -> dict[str, str]:
        """The run, how often the ledger was opened (``restarts``), its fencing token (``incarnation``), and the notes
        (``note:KEY``)."""
        return dict(self._rows("SELECT key, value FROM facts"))

    def commits(self) -> list[tuple[int, int, int]]:
        """Rollout, step and number of groups of each commit."""
        return self._rows("SELECT rollout_id, step, num_groups FROM commits ORDER BY rollout_id")

    def epochs(self) -> list[EpochCounts]:
        """The counts of every epoch that was begun, in the order in which they were, and then of the foreign groups."""
        query = """SELECT s.source, iif(admitted < 0, NULL, epoch) AS of, num_rows, state,
                          count(*), min(admitted) AS first
                   FROM groups JOIN sources s ON s.id = groups.source GROUP BY s.id, of, state
                   ORDER BY of IS NULL, abs(first)"""
        found: dict[tuple[str, int | None], EpochCounts] = {}
        for source, epoch, num_rows, state, number, _ in self._rows(query):
            empty = EpochCounts(source=source, epoch=epoch, num_rows=num_rows, counts=dict.fromkeys(GroupState, 0))
            found.setdefault((source, epoch), empty).counts[GroupState(state)] = number
        for row in found.values():
            if row.num_rows is not None:
                row.counts[GroupState.PENDING] += row.num_rows - sum(row.counts.values())
        return list(found.values())

    def tickets(self, limit: int = 10) -> list[TicketCounts]:
        """The newest tickets that leased anything, the newest first. Reads the whole history."""
        return [TicketCounts(*row) for row in self._rows(_TICKETS, limit)]

    def selections(self, limit: int = 10) -> list[SelectionFacts]:
        """The newest selections that are closed, trained on or not yet, the newest first. Reads the whole history."""
        return [
            SelectionFacts(rollout_id=rollout_id, num_groups=number, step=step, tickets=sorted(map(int, of.split(","))))
            for rollout_id, number, step, of in self._rows(_SELECTIONS, limit)
        ]

    def entry(self, uid: GroupUid) -> LedgerEntry | None:
        """One group's facts; None where it was never leased."""
        query = f"SELECT {COLUMNS} FROM groups JOIN sources s ON s.id = groups.source WHERE {_UID}"
        return next(map(entry_of, self._rows(query, uid.source, uid.row, uid.epoch)), None)

    def states(self) -> list[tuple[GroupUid, GroupState]]:
        """Every group that was ever leased, in the order of admission."""
        query = "SELECT s.source, row, epoch, state FROM groups JOIN sources s ON s.id = groups.source"
        return [(GroupUid(*uid), GroupState(state)) for *uid, state in self._rows(f"{query} ORDER BY admitted")]

    def history(self, uid: GroupUid) -> list[Transition]:
        """What happened to one group, the oldest first."""
        number = f"SELECT admitted FROM groups g JOIN sources s ON s.id = g.source WHERE {_UID}"
        found = self._transitions(f"h.admitted = ({number})", uid.source, uid.row, uid.epoch)
        return [transition for _, transition in found]

    def of_rollout(self, rollout_id: int) -> list[tuple[GroupUid, Transition]]:
        """What happened to groups by the ticket, or the selection, of a rollout, the oldest first. Reads the whole
        history."""
        return self._transitions("h.rollout_id = ?", rollout_id)

    def _transitions(self, condition: str, *values: str | int) -> list[tuple[GroupUid, Transition]]:
        query = (
            "SELECT s.source, row, epoch, time, from_state, to_state, h.attempt, h.rollout_id, h.reason, h.step,"
            " incarnation FROM history h CROSS JOIN groups USING (admitted) JOIN sources s ON s.id = groups.source"
            f" WHERE {condition} ORDER BY h.id"
        )
        return [
            (GroupUid(*row[:3]), Transition(row[3], GroupState(row[4]), GroupState(row[5]), *row[6:]))
            for row in self._rows(query, *values)
        ]

    def faults(self, limit: int = 20) -> list[str]:
        """What contradicts the accounting, up to ``limit`` lines for each rule. Empty where all holds: the file is
        whole, each group's state is what its history ends with, the history has no gaps, none was trained twice or left
        a final state, each commit has all its groups, and no epoch has more groups than rows."""
        with self._reading():
            pages = [str(row[0]) for row in self._db.execute(f"PRAGMA integrity_check({limit})")]
            if pages != ["ok"]:
                return [f"the file is damaged: {page}" for page in pages]
            return [str(row[0]) for rule in _RULES for row in self._db.execute(f"{rule} LIMIT {limit}")]

    def _rows(self, query: str, *values: str | int) -> list[Any]:
        with self._reading():
            return list(self._db.execute(query, values))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN")
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise read_failed(self.path, error) from error
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")


_UID = "s.source = ? AND row = ? AND epoch = ?"


def process_note(process: int) -> str | None:
    """The process as ``ID START``, where START is when it began, in ticks since the machine did: the two are never
    another process's. None if it is gone or dead, and without ``/proc``."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = status.rpartition(")")[2].split()
    return None if fields[0] in _DEAD else f"{process} {fields[_STARTED]}"


def ledger_writer(path: Path) -> int | None:
    """The id of the process of this machine that writes the ledger; None where it is gone, or not there yet, or where
    another process has its id by now."""
    if not path.exists():
        return None
    with closing(LedgerAudit(path)) as audit:
        note = audit.facts().get(f"{NOTE}{PID}", "")
    process = int(note.split()[0]) if note else 0
    return process if process > 0 and process_note(process) == note else None
