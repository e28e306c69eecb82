"""A ledger of dicts: the model that ``buffer_rl.buffer.ledger.Ledger`` is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from buffer_rl.buffer.ledger_tables import (
    GroupState,
    LedgerEntry,
    is_repeat,
    leased,
    reported,
    selected,
    trained,
)
from buffer_rl.records.groups import GroupUid


class MemoryLedger:
    """The methods of ``Ledger`` without files. ``entries``: by uid, in the order of the first lease."""

    def __init__(self) -> None:
        self.entries: dict[GroupUid, LedgerEntry] = {}
        self._commits: dict[int, tuple[int, int]] = {}
        self._notes: dict[str, str] = {}

    def entry(self, uid: GroupUid) -> LedgerEntry:
        return self.entries.get(uid, LedgerEntry(state=GroupState.PENDING))

    def lease(self, uid: GroupUid, rollout_id: int) -> int:
        entry = self.entries[uid] = leased(uid, self.entry(uid), rollout_id)
        return entry.attempt

    def finish(self, uid: GroupUid, attempt: int) -> None:
        self.entries[uid] = reported(uid, self.entry(uid), attempt, GroupState.FINISHED)

    def reject(self, uid: GroupUid, attempt: int, reason: str) -> None:
        self.entries[uid] = reported(uid, self.entry(uid), attempt, GroupState.REJECTED, reason)

    def quarantine(self, uid: GroupUid, attempt: int, reason: str) -> None:
        self.entries[uid] = reported(uid, self.entry(uid), attempt, GroupState.QUARANTINED, reason)

    def requeue(self, uid: GroupUid, attempt: int) -> None:
        self.entries[uid] = reported(uid, self.entry(uid), attempt, GroupState.PENDING)

    def select(self, uids: Iterable[GroupUid], rollout_id: int) -> None:
        self.entries.update([(uid, selected(uid, self.entry(uid), rollout_id)) for uid in uids])

    def commit(self, uids: Iterable[GroupUid], rollout_id: int, step: int) -> None:
        chosen = list(dict.fromkeys(uids))
        if is_repeat([self.entry(uid) for uid in chosen], self._commits.get(rollout_id), rollout_id, step):
            return
        self.entries.update([(uid, trained(uid, self.entry(uid), rollout_id, step)) for uid in chosen])
        if chosen:
            self._commits[rollout_id] = (step, len(chosen))

    def number(self, uid: GroupUid) -> int | None:
        return next((number for number, known in enumerate(self.entries) if known == uid), None)

    @property
    def num_admitted(self) -> int:
        return len(self.entries)

    def recover(self) -> list[GroupUid]:
        return [uid for uid, entry in self.entries.items() if entry.state is GroupState.PENDING]

    def selected(self, rollout_id: int) -> list[GroupUid]:
        return [uid for uid, entry in self.entries.items() if entry.selected and entry.rollout_id == rollout_id]

    def commits(self) -> dict[int, int]:
        return {rollout_id: step for rollout_id, (step, _) in self._commits.items()}

    def remember(self, key: str, value: str) -> None:
        self._notes[key] = value

    def recall(self, key: str) -> str | None:
        return self._notes.get(key)

    def saved(self) -> dict[GroupUid, LedgerEntry]:
        """The entries of a ledger that is opened again, or that goes back to a copy of now."""
        return {uid: after_restart(entry) for uid, entry in self.entries.items()}

    def replace(self, entries: Mapping[GroupUid, LedgerEntry]) -> None:
        """Replace all entries, and the commits by what these say."""
        self.entries = dict(entries)
        self._commits = commits_of(self.entries.values())


def after_restart(entry: LedgerEntry) -> LedgerEntry:
    """The entry in a ledger that was opened again: what was leased or finished is pending, its payload being gone."""
    if entry.state in (GroupState.LEASED, GroupState.FINISHED):
        return LedgerEntry(state=GroupState.PENDING, attempt=entry.attempt)
    return entry


def commits_of(entries: Iterable[LedgerEntry]) -> dict[int, tuple[int, int]]:
    """Step and number of groups of each rollout that was committed."""
    counts = Counter((e.rollout_id, e.step) for e in entries if e.state is GroupState.TRAINED)
    return {r: (step, number) for (r, step), number in counts.items() if r is not None and step is not None}
