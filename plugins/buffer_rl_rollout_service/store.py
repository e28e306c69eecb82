"""Groups of trajectories in one SQLite file: written once, leased to readers, delivered once, and all of it counted.

A group is ``open`` while it has fewer than ``group_size`` members, and ``ready`` once it is complete. One that nothing
was written to for ``timeout_s`` is ready as a partial one, or, with fewer than ``min_group_size`` members, ``dropped``.
A reader leases ready groups; a lease ends as ``delivered``, as ``dropped`` with the reader's reason, or, after
``lease_s``, with the group ``ready`` for any reader. What is written to a problem whose group is no longer open begins
its next group, so every trajectory is in exactly one group, and the states of the groups count them all.

**A reader that goes back.** A reader names its position (the number of its rollout) with each read. Groups that it got
at ``again_from`` (by default its position) or later, and does not list as those it has, are given to it again: an
answer was lost on the way, or the reader was restarted from a checkpoint. What it got before ``keep_from`` it never
asks for again.

The file is in WAL mode with ``synchronous=NORMAL``, as the run's ledger is: what a call wrote survives the death of the
process, and of the machine all but the last moments. One process has the file at a time.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer_rl.errors import BufferStateError, ConfigError

FILE = "trajectories.sqlite"
VERSION = 1
STATES = ("open", "ready", "leased", "delivered", "dropped")
LIVE = "('open', 'ready', 'leased')"
ENDABLE = "state IN ('leased', 'ready')"
"""Of a group that names a reader: its lease runs, or expired and no other reader took the group since."""
TIMED_OUT = "timed_out"
NUM_BUCKETS = 60
MAX_GROUPS = 1024  # of one read over HTTP
_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE counts (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE groups (
    number INTEGER PRIMARY KEY AUTOINCREMENT, instance_id TEXT NOT NULL, state TEXT NOT NULL DEFAULT 'open',
    size INTEGER NOT NULL DEFAULT 0, partial INTEGER NOT NULL DEFAULT 0, changed REAL NOT NULL, reader TEXT,
    position INTEGER, lease_end REAL, reason TEXT, has_bodies INTEGER NOT NULL DEFAULT 1);
CREATE UNIQUE INDEX open_groups ON groups (instance_id) WHERE state = 'open';
CREATE INDEX groups_by_state ON groups (state, number);
CREATE INDEX groups_by_reader ON groups (reader, position) WHERE has_bodies = 1;
CREATE TABLE items (
    number INTEGER PRIMARY KEY, instance_id TEXT NOT NULL, uid TEXT NOT NULL, member_of INTEGER NOT NULL,
    written REAL NOT NULL, reward REAL NOT NULL, UNIQUE (instance_id, uid));
CREATE INDEX items_by_group ON items (member_of);
CREATE TABLE bodies (item INTEGER PRIMARY KEY, member_of INTEGER NOT NULL, body BLOB NOT NULL);
CREATE INDEX bodies_by_group ON bodies (member_of);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """group_size: members of a complete group. min_group_size: those that a group needs once its time is out.
    timeout_s: since the last write to the group. capacity: groups that are open, ready or leased. lease_s: of a reader,
    from a read to its acknowledgement."""

    group_size: int
    min_group_size: int = 1
    timeout_s: float = 600.0
    capacity: int = 10_000
    lease_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The answer to a write: which group the trajectory is in, and how many members that has."""

    group: int
    size: int
    complete: bool
    duplicate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """One group as a reader gets it. bodies: what was written, in the order of writing."""

    number: int
    instance_id: str
    partial: bool
    bodies: Sequence[bytes]


class FullError(BufferStateError):
    """The store has as many groups as it may."""


class Store:
    """The groups in ``folder``, whose files are for their owner alone. It is for one thread at a time. clock: seconds
    since 1970.

    Raises ConfigError if the file is of another program or version, damaged, or another process has it."""

    def __init__(self, folder: Path, rules: Rules, clock: Callable[[], float] = time.time) -> None:
        self.rules = rules
        self._clock = clock
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / FILE
        path.touch(mode=0o600)
        for own in (path, *folder.glob(f"{FILE}-*")):  # SQLite makes what it has beside a file with the file's mode
            own.chmod(0o600)
        self._db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            self._open()
        except (sqlite3.Error, TypeError) as error:
            self._db.close()
            expected = f"a store of this service, version {VERSION}, that no other process has, or no file"
            raise ConfigError(f"the store cannot be opened: {error}", where=str(path), expected=expected) from error

    def _open(self) -> None:
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        with self._atomic():
            if not self._one("SELECT COUNT(*) FROM sqlite_master"):
                for statement in filter(str.strip, _TABLES.split(";")):
                    self._db.execute(statement)
                self._db.execute("INSERT INTO about VALUES ('store', ?)", (secrets.token_hex(6),))
                self._db.execute(f"PRAGMA user_version={VERSION}")
            if (version := self._one("PRAGMA user_version")) != VERSION:
                raise sqlite3.DatabaseError(f"it is of version {version}")
            now = self._clock()
            # The time that the service was down counts for no time-out: nothing could be written or acknowledged.
            self._db.execute("UPDATE groups SET changed = ? WHERE state = 'open'", (now,))
            self._db.execute("UPDATE groups SET lease_end = ? WHERE state = 'leased'", (now + self.rules.lease_s,))
            complete = "UPDATE groups SET state = 'ready' WHERE state = 'open' AND size >= ?"
            self._db.execute(complete, (self.rules.group_size,))
        self.store_id: str = self._one("SELECT value FROM about WHERE name = 'store'")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def write(self, instance_id: str, uid: str, reward: float, body: bytes) -> Written:
        """Add a trajectory to the open group of its problem; one that was written before changes nothing. It is on disk
        when this returns. Raises FullError if it would begin a group that there is no room for."""
        with self._transaction() as now:
            of_items = "SELECT g.number, g.size, g.state FROM items i JOIN groups g ON g.number = i.member_of"
            by_name = f"{of_items} WHERE i.instance_id = ? AND i.uid = ?"
            known = self._db.execute(by_name, (instance_id, uid)).fetchone()
            if known:
                self._count("duplicates")
                return Written(group=known[0], size=known[1], complete=known[2] != "open", duplicate=True)
            number = self._open_group(instance_id, now)
            add = "INSERT INTO items (instance_id, uid, member_of, written, reward) VALUES (?, ?, ?, ?, ?)"
            item = self._db.execute(add, (instance_id, uid, number, now, reward)).lastrowid
            self._db.execute("INSERT INTO bodies VALUES (?, ?, ?)", (item, number, body))
            self._db.execute("UPDATE groups SET size = size + 1, changed = ? WHERE number = ?", (now, number))
            size: int = self._one("SELECT size FROM groups WHERE number = ?", number)
            if complete := size >= self.rules.group_size:
                self._db.execute("UPDATE groups SET state = 'ready' WHERE number = ?", (number,))
        return Written(group=number, size=size, complete=complete, duplicate=False)

    def _open_group(self, instance_id: str, now: float) -> int:
        found = self._one("SELECT number FROM groups WHERE state = 'open' AND instance_id = ?", instance_id)
        if found is not None:
            return int(found)
        live = self._one(f"SELECT COUNT(*) FROM groups WHERE state IN {LIVE}")
        if live >= self.rules.capacity:
            what, where = f"there are {live} groups that no reader has taken", f"instance_id {instance_id!r}"
            hint = "write it again later; members of groups that are open are still taken"
            raise FullError(what, where=where, expected=f"fewer than {self.rules.capacity} groups", hint=hint)
        made = self._db.execute("INSERT INTO groups (instance_id, changed) VALUES (?, ?)", (instance_id, now))
        return int(made.lastrowid or 0)

    def expire(self) -> None:
        """End the groups and the leases whose time is out."""
        with self._transaction():
            pass

    def read(
        self,
        reader: str,
        num_groups: int,
        *,
        position: int | None = None,
        again_from: int | None = None,
        keep_from: int = 0,
        have: Sequence[int] = (),
    ) -> list[StoredGroup]:
        """Lease up to ``num_groups`` groups in the order of their beginning, after those that the reader got at
        ``again_from`` or later (by default ``position``) and that are not in ``have``. It asks no more for what it got
        before ``keep_from``."""
        again_from = position if again_from is None else again_from
        with self._transaction() as now:
            self._forget("reader = ? AND position < ?", reader, keep_from)
            lease_end = now + self.rules.lease_s
            held = f"UPDATE groups SET state = 'leased', lease_end = ? WHERE number = ? AND reader = ? AND {ENDABLE}"
            self._db.executemany(held, [(lease_end, number, reader) for number in have])
            again = [] if again_from is None else self._given_since(reader, again_from, set(have))
            numbers = again[:num_groups]
            numbers += self._numbers("state = 'ready' ORDER BY number LIMIT ?", num_groups - len(numbers))
            lease = "UPDATE groups SET state = 'leased', changed = ?, reader = ?, position = ?, lease_end = ?"
            given = [(now, reader, position, lease_end, number) for number in numbers]
            self._db.executemany(f"{lease} WHERE number = ?", given)
            return [self._group(number) for number in numbers]

    def _given_since(self, reader: str, position: int, have: set[int]) -> list[int]:
        where = "reader = ? AND position >= ? AND has_bodies = 1 AND state IN ('leased', 'delivered')"
        numbers = self._numbers(f"{where} ORDER BY position, number", reader, position)
        return [number for number in numbers if number not in have]

    def acknowledge(self, reader: str, delivered: Sequence[int], dropped: Mapping[int, str]) -> None:
        """End leases of the reader: its groups are delivered, or dropped with a reason. A repeat changes nothing.

        Raises BufferStateError, with nothing changed, for groups that the reader does not have."""
        with self._transaction() as now:
            has = "number = ? AND reader = ? AND state != 'open'"
            if lost := [number for number in (*delivered, *dropped) if not self._numbers(has, number, reader)]:
                what = f"the groups {lost} are not leased by this reader"
                expected = f"groups that it read, acknowledged within {self.rules.lease_s:g} s"
                raise BufferStateError(what, where=f"reader {reader!r}", expected=expected)
            end = f"UPDATE groups SET state = ?, reason = ?, changed = ? WHERE number = ? AND {ENDABLE}"
            for number in delivered:
                self._db.execute(end, ("delivered", None, now, number))
                self._forget("number = ? AND position IS NULL", number)
            for number, reason in dropped.items():
                self._db.execute(end, ("dropped", reason, now, number))
                self._forget("number = ? AND state = 'dropped'", number)

    def peek(self, num_groups: int) -> list[StoredGroup]:
        """The groups that a reader would get next. Nothing changes."""
        with self._transaction():
            return [self._group(n) for n in self._numbers("state = 'ready' ORDER BY number LIMIT ?", num_groups)]

    def statistics(self) -> dict[str, Any]:
        """Groups and trajectories by state, dropped trajectories by reason, repeated writes, leases that expired, mean
        reward of what was written, and how long the oldest group has waited for its next member, in seconds."""
        with self._transaction() as now:
            counted = self._db.execute("SELECT state, COUNT(*), SUM(size), SUM(partial) FROM groups GROUP BY state")
            by_state = {state: counts for state, *counts in counted}
            dropped = self._db.execute("SELECT reason, SUM(size) FROM groups WHERE state = 'dropped' GROUP BY reason")
            written, reward = self._db.execute("SELECT COUNT(*), AVG(reward) FROM items").fetchone()
            oldest = self._one("SELECT MIN(changed) FROM groups WHERE state = 'open'")
            num_groups = sum(row[0] for row in by_state.values())
            return {
                "store": self.store_id,
                "group_size": self.rules.group_size,
                "capacity": self.rules.capacity,
                "groups": {state: by_state.get(state, (0, 0, 0))[0] for state in STATES},
                "trajectories": {"written": written} | {state: by_state.get(state, (0, 0, 0))[1] for state in STATES},
                "partial_groups": sum(row[2] for row in by_state.values()),
                "dropped": dict(sorted(dropped.fetchall())),
                "avg_reward": reward,
                "avg_group_size": written / num_groups if num_groups else None,
                "oldest_open_s": None if oldest is None else now - oldest,
                **{"duplicates": 0, "leases_expired": 0, **dict(self._db.execute("SELECT name, value FROM counts"))},
            }

    def history(self) -> dict[str, Any]:
        """Trajectories written, delivered and dropped, and the mean reward of those written, over time.

        ``width_s``: seconds of a bucket; each series maps buckets, counted back from now (0, -1, …), to its value."""
        with self._transaction() as now:
            first = self._one("SELECT MIN(written) FROM items")
            width = max(1.0, (now - (now if first is None else first)) / NUM_BUCKETS)

            def series(columns: str, source: str, when: str) -> dict[int, float]:
                bucket = f"-CAST((? - {when}) / ? AS INTEGER)"
                return dict(self._db.execute(f"SELECT {bucket}, {columns} FROM {source} GROUP BY 1", (now, width)))

            ended = "groups WHERE state = "
            return {
                "width_s": width,
                "written": series("COUNT(*)", "items", "written"),
                "delivered": series("SUM(size)", f"{ended}'delivered'", "changed"),
                "dropped": series("SUM(size)", f"{ended}'dropped'", "changed"),
                "reward": series("AVG(reward)", "items", "written"),
            }

    @contextmanager
    def _transaction(self) -> Iterator[float]:
        """A transaction that begins with what time ended; gives the time."""
        now = self._clock()
        with self._atomic():
            self._end_overdue(now)
            yield now

    @contextmanager
    def _atomic(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _end_overdue(self, now: float) -> None:
        rules = self.rules
        late = "state = 'open' AND changed <= ?"
        partial = f"UPDATE groups SET state = 'ready', partial = 1, changed = ? WHERE {late} AND size >= ?"
        self._db.execute(partial, (now, now - rules.timeout_s, rules.min_group_size))
        for number in self._numbers(late, now - rules.timeout_s):
            end = "UPDATE groups SET state = 'dropped', reason = ?, changed = ? WHERE number = ?"
            self._db.execute(end, (TIMED_OUT, now, number))
            self._forget("number = ?", number)
        freed = self._db.execute("UPDATE groups SET state = 'ready' WHERE state = 'leased' AND lease_end <= ?", (now,))
        if freed.rowcount:
            self._count("leases_expired", freed.rowcount)

    def _forget(self, where: str, *values: Any) -> None:
        """Remove the bodies of ended groups; their ids stay, so that what is written again is known."""
        for number in self._numbers(f"{where} AND has_bodies = 1 AND state IN ('delivered', 'dropped')", *values):
            self._db.execute("DELETE FROM bodies WHERE member_of = ?", (number,))
            self._db.execute("UPDATE groups SET has_bodies = 0 WHERE number = ?", (number,))

    def _group(self, number: int) -> StoredGroup:
        group = self._db.execute("SELECT instance_id, partial FROM groups WHERE number = ?", (number,))
        instance_id, partial = group.fetchone()
        found = self._db.execute("SELECT body FROM bodies WHERE member_of = ? ORDER BY item", (number,))
        bodies = [body for (body,) in found]
        return StoredGroup(number=number, instance_id=instance_id, partial=bool(partial), bodies=bodies)

    def _numbers(self, where: str, *values: Any) -> list[int]:
        return [number for (number,) in self._db.execute(f"SELECT number FROM groups WHERE {where}", values)]

    def _count(self, name: str, by: int = 1) -> None:
        count = "INSERT INTO counts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value"
        self._db.execute(count, (name, by))

    def _one(self, query: str, *values: Any) -> Any:
        row = self._db.execute(query, values).fetchone()
        return None if row is None else row[0]
