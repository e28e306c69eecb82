"""What a ledger holds, and one that goes back to its own copy, for tests over a ``Ledger`` in memory or in a file."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState, LedgerEntry
from buffer_rl.records.groups import GroupUid


def entries(ledger: Ledger) -> dict[GroupUid, LedgerEntry]:
    """Every group that was ever leased, in the order of the first lease."""
    rows = ledger._db.execute(
        "SELECT s.source, row, epoch FROM groups JOIN sources s ON s.id = groups.source ORDER BY admitted"
    )
    return {uid: ledger.entry(uid) for uid in [GroupUid(*row) for row in rows]}


def count_states(ledger: Ledger, source: str, epoch: int, num_rows: int) -> dict[GroupState, int]:
    """How many groups of an epoch are in each state; those that were never leased are pending."""
    found = Counter(e.state for uid, e in entries(ledger).items() if (uid.source, uid.epoch) == (source, epoch))
    found[GroupState.PENDING] += num_rows - found.total()
    return {state: found[state] for state in GroupState}


def copied(ledger: Ledger) -> bytes:
    """The file of a backup."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.sqlite"
        ledger.backup(copy)
        return copy.read_bytes()


def go_back(ledger: Ledger, copy: bytes) -> None:
    """Restore what ``copied`` returned."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy.sqlite"
        path.write_bytes(copy)
        ledger.restore(path)


def entries_of(copy: bytes) -> dict[GroupUid, LedgerEntry]:
    """``entries`` of a ledger that goes on from what ``copied`` returned."""
    ledger = Ledger.in_memory()
    go_back(ledger, copy)
    return entries(ledger)
