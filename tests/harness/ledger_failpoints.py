"""Kills a process at every statement of every transition of a ledger, and compares what is left with a model.

A script of operations is run in a child process that kills itself at the n-th boundary, for every n: before and after
each SQL statement, and at each page of a backup. It acknowledges each operation. What the file then holds must be the
model (a ``MemoryLedger``) after the acknowledged operations, or after one more; and once the file is opened again, the
same with all leases returned. The hook is a subclass of SQLite's connection: the ledger itself has none.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_tables import GroupState, LedgerEntry
from buffer_rl.errors import BufferRLError, CheckpointError
from buffer_rl.records.groups import GroupUid
from harness.ledger_contents import count_states
from harness.memory_ledger import MemoryLedger

RUN = "failpoints"
NUM_GROUPS = 6
Operation = tuple[str, tuple[Any, ...]]
Entries = dict[GroupUid, LedgerEntry]

SCRIPT: tuple[Operation, ...] = (
    ("open", ()),
    ("lease", (range(NUM_GROUPS), 0)),
    ("finish", (range(4), 1)),
    ("requeue", ((3,), 1)),  # finished
    ("reject", ((4,), 1)),
    ("quarantine", ((5,), 1)),
    ("select", ((0, 1), 0)),
    ("commit", ((0, 1), 0, 1)),
    ("commit", ((0, 1), 0, 1)),  # a repeat
    ("backup", ()),
    ("lease", ((3,), 1)),
    ("requeue", ((3,), 2)),  # leased
    ("open", ()),  # 2 is finished
    ("lease", ((2, 3), 1)),
    ("finish", ((2,), 2)),
    ("finish", ((3,), 3)),
    ("commit", ((2, 3), 1, 2)),
    ("restore", ()),  # to before 2 and 3 were trained
    ("lease", ((2,), 1)),
    ("late", ()),  # 2 had this attempt before
    ("finish", ((2,), 2)),
    ("select", ((2,), 1)),
    ("open", ()),  # 2 is selected
    ("commit if kept", ((2,), 1, 2)),
    ("restore", ()),
    ("lease", ((2,), 2)),
    ("finish", ((2,), 2)),
)


def uid_of(number: int) -> GroupUid:
    """The ``number``-th group that the scripts lease."""
    return GroupUid("script", number, 0)


@dataclass(slots=True, kw_only=True)
class FailpointReport:
    """points: how many there were, each of which was killed at. violations: what was wrong after which."""

    points: int = 0
    kills: int = 0
    violations: list[str] = field(default_factory=list)


def kill_everywhere(
    folder: Path,
    ledger: type[Ledger] = Ledger,
    *,
    batched: bool = False,
    keep_selected: bool = False,
    every: int = 1,
    stop: bool = False,
) -> FailpointReport:
    """Run the script once for each of its boundaries, in ``folder``, which must be empty.

    batched: each operation on several groups is one transaction, and not one for each.
    keep_selected: as of the ledger.
    every: take only every n-th boundary. stop: end at the first violation.
    """
    script = _script(batched, keep_selected)
    model = _model(script, keep_selected)
    opened = functools.partial(ledger, run=RUN, keep_selected=keep_selected)
    report = FailpointReport()
    point = 0
    while True:
        path = folder / f"{point}"
        path.mkdir()
        acknowledged, killed = _run_killed(path, opened, script, point)
        if not killed:
            if acknowledged != len(script):
                report.violations.append(f"the script stops at {script[acknowledged]} without a kill")
            report.points = point
            return report
        report.kills += 1
        where = f"point {point}, within {script[acknowledged]}" if acknowledged < len(script) else f"point {point}"
        after = model[acknowledged : acknowledged + 2]
        again = [_restarted(entries, keep_selected) for entries in after]
        found = _check(path, opened, after, again, exists=acknowledged > 0)
        report.violations += [f"{where}: {fault}" for fault in found]
        if stop and report.violations:
            return report
        shutil.rmtree(path)
        point += every


def killing_connection(kill: Callable[[], None]) -> type[sqlite3.Connection]:
    """A connection that calls ``kill`` before and after each statement, and at each page of a backup."""

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
            kill()
            cursor = super().execute(sql, parameters)
            kill()
            return cursor

        def backup(self, target: sqlite3.Connection, **options: Any) -> None:
            super().backup(target, **{**options, "pages": 1, "progress": lambda *_: kill()})

    return Connection


def _script(batched: bool, keep_selected: bool) -> tuple[Operation, ...]:
    split: list[Operation] = []
    for name, arguments in SCRIPT:
        if name == "commit if kept":
            split += [("commit", arguments)] if keep_selected else []
        elif not batched and name in ("lease", "finish"):
            split += [(name, ((number,), *arguments[1:])) for number in arguments[0]]
        else:
            split.append((name, arguments))
    return tuple(split)


def _model(script: Sequence[Operation], keep_selected: bool) -> list[Entries]:
    """What the ledger holds before the first operation, and after each."""
    ledger = MemoryLedger()
    states: list[Entries] = [{}]
    saved: Entries = {}
    for name, arguments in script:
        if name == "open":
            ledger.replace(_restarted(states[-1], keep_selected))
        elif name == "backup":
            saved = ledger.saved()
        elif name == "restore":
            ledger.replace(saved)
        elif name != "late":
            _apply(ledger, name, arguments)
        states.append({uid: ledger.entry(uid) for uid in map(uid_of, range(NUM_GROUPS)) if ledger.entry(uid).attempt})
    return states


def _apply(ledger: Ledger | MemoryLedger, name: str, arguments: tuple[Any, ...]) -> None:
    uids = [uid_of(number) for number in arguments[0]]
    if name in ("select", "commit"):
        getattr(ledger, name)(uids, *arguments[1:])
        return
    reason = ("why",) if name in ("reject", "quarantine") else ()
    for uid in uids:
        getattr(ledger, name)(uid, *arguments[1:], *reason)


def _run_killed(
    folder: Path, opened: Callable[..., Ledger], script: Sequence[Operation], point: int
) -> tuple[int, bool]:
    """Run the script in a child that kills itself at ``point``. Returns how many operations were acknowledged, and
    whether it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            _run_script(folder, opened, script, point, writer)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        acknowledged = len(pipe.read())
    _, status = os.waitpid(child, 0)
    return acknowledged, os.WIFSIGNALED(status)


def _run_script(
    folder: Path, opened: Callable[..., Ledger], script: Sequence[Operation], point: int, writer: int
) -> None:
    left = point

    def kill() -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    connection = killing_connection(kill)
    ledger: Ledger | None = None
    former = ""
    for name, arguments in script:
        if name == "open":
            if ledger is not None:
                ledger.close()
            with patch.object(sqlite3, "connect", functools.partial(sqlite3.connect, factory=connection)):
                ledger = opened(folder / "ledger.sqlite")
        elif ledger is not None:
            if name == "backup":
                ledger.backup(folder / "copy.sqlite")
            elif name == "restore":
                former = ledger.fencing_token
                ledger.restore(folder / "copy.sqlite")
            elif name == "late":
                if ledger.fencing_token == former:
                    raise AssertionError("a report of a lease from before the copy would be accepted")
            else:
                with ledger.transaction() if name in ("lease", "finish") and len(arguments[0]) > 1 else nullcontext():
                    _apply(ledger, name, arguments)
        os.write(writer, b".")


def _check(
    folder: Path,
    opened: Callable[..., Ledger],
    allowed: Sequence[Entries],
    restarted: Sequence[Entries],
    *,
    exists: bool,
) -> list[str]:
    """What is wrong with the file. allowed: what it may hold as it is; restarted: what, for each of these, it must hold
    after it was opened."""
    path = folder / "ledger.sqlite"
    faults: list[str] = []
    try:
        audit = LedgerAudit(path)
    except CheckpointError as error:
        if exists:  # else the kill came before there was a file
            return [str(error)]
    else:
        found = _entries(audit)
        faults += audit.faults()
        audit.close()
        restarted = [after for before, after in zip(allowed, restarted, strict=True) if before == found]
        if not restarted:
            return [*faults, f"the ledger holds {_text(found)}"]
    try:
        ledger = opened(path)
    except BufferRLError as error:
        return [*faults, str(error)]
    again = {uid: ledger.entry(uid) for uid in map(uid_of, range(NUM_GROUPS)) if ledger.entry(uid).attempt}
    counts = count_states(ledger, "script", 0, NUM_GROUPS)
    queue = ledger.recover()
    ledger.close()
    if again not in restarted:
        faults.append(f"after a restart the ledger holds {_text(again)}")
    if sum(counts.values()) != NUM_GROUPS:
        faults.append(f"the counts do not add up: {counts}")
    if queue != sorted(uid for uid, entry in again.items() if entry.state is GroupState.PENDING):
        faults.append(f"after a restart the queue is {queue}")
    audit = LedgerAudit(path)
    faults += audit.faults()
    audit.close()
    return faults


def _entries(audit: LedgerAudit) -> Entries:
    found = ((uid, audit.entry(uid)) for uid in map(uid_of, range(NUM_GROUPS)))
    return {uid: entry for uid, entry in found if entry is not None}


def _restarted(entries: Entries, keep_selected: bool) -> Entries:
    """Written down apart from the ledger's own rule."""

    def is_lost(entry: LedgerEntry) -> bool:
        kept = keep_selected and entry.selected
        return entry.state is GroupState.LEASED or (entry.state is GroupState.FINISHED and not kept)

    return {
        uid: LedgerEntry(state=GroupState.PENDING, attempt=entry.attempt) if is_lost(entry) else entry
        for uid, entry in entries.items()
    }


def _text(entries: Entries) -> str:
    return ", ".join(f"{uid.row}: {entry.state} (attempt {entry.attempt})" for uid, entry in entries.items())
