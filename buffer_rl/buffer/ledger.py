"""The ledger: which state each group is in. Pure bookkeeping; no payloads, no Ray.

    pending ──lease──▶ leased ──finish──▶ finished ──commit──▶ trained(step)
       ▲                 │  │                │
       └────requeue──────┘  └─reject─▶ rejected(reason)      (finished ──requeue──▶ pending as well)

A uid is in exactly one state. A lease carries an attempt number; a report with another attempt is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Protocol

from buffer_rl.errors import BufferStateError
from buffer_rl.types import GroupUid


class GroupState(StrEnum):
    """Where a group is on its way. ``pending`` also holds for rows that nobody asked for yet."""

    PENDING = "pending"
    LEASED = "leased"
    FINISHED = "finished"
    TRAINED = "trained"
    REJECTED = "rejected"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One group's facts. ``reason`` belongs to rejected and quarantined groups, ``step`` to trained ones."""

    state: GroupState
    attempt: int = 0
    rollout_id: int | None = None
    reason: str = ""
    step: int | None = None


class Ledger(Protocol):
    """What the Buffer asks of a ledger, durable or not. Every method raises BufferStateError on a
    transition that the diagram above does not have, and then changes nothing."""

    def lease(self, uid: GroupUid, rollout_id: int) -> int:
        """pending → leased. Returns the attempt number, counted from 1."""
        ...

    def finish(self, uid: GroupUid, attempt: int) -> None:
        """leased → finished."""
        ...

    def reject(self, uid: GroupUid, attempt: int, reason: str) -> None:
        """leased → rejected."""
        ...

    def requeue(self, uid: GroupUid, attempt: int) -> None:
        """leased or finished → pending."""
        ...

    def commit(self, uids: Iterable[GroupUid], rollout_id: int, step: int) -> None:
        """finished → trained, all of them or none."""
        ...

    def entry(self, uid: GroupUid) -> LedgerEntry:
        """The facts of one group; ``pending`` with attempt 0 where it was never leased."""
        ...

    def counts(self, source: str, epoch: int, num_rows: int) -> dict[GroupState, int]:
        """How many groups of an epoch are in each state; they add up to ``num_rows``."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON values that ``load_state_dict`` takes back. Leased and finished groups are written as pending:
        their payloads do not survive."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything by what ``state_dict`` returned."""
        ...


class MemoryLedger:
    """A ledger that lives as long as its process."""

    def __init__(self) -> None:
        self._entries: dict[GroupUid, LedgerEntry] = {}

    def entry(self, uid: GroupUid) -> LedgerEntry:
        """See ``Ledger.entry``."""
        return self._entries.get(uid, LedgerEntry(state=GroupState.PENDING))

    def lease(self, uid: GroupUid, rollout_id: int) -> int:
        """See ``Ledger.lease``."""
        entry = self.entry(uid)
        if entry.state is not GroupState.PENDING:
            raise BufferStateError(f"group {uid} cannot be leased: it is {_describe(entry)}", expected="pending")
        attempt = entry.attempt + 1
        self._entries[uid] = LedgerEntry(state=GroupState.LEASED, attempt=attempt, rollout_id=rollout_id)
        return attempt

    def finish(self, uid: GroupUid, attempt: int) -> None:
        """See ``Ledger.finish``."""
        entry = self._live(uid, attempt, (GroupState.LEASED,))
        self._entries[uid] = LedgerEntry(state=GroupState.FINISHED, attempt=attempt, rollout_id=entry.rollout_id)

    def reject(self, uid: GroupUid, attempt: int, reason: str) -> None:
        """See ``Ledger.reject``."""
        entry = self._live(uid, attempt, (GroupState.LEASED,))
        self._entries[uid] = LedgerEntry(
            state=GroupState.REJECTED, attempt=attempt, rollout_id=entry.rollout_id, reason=reason
        )

    def requeue(self, uid: GroupUid, attempt: int) -> None:
        """See ``Ledger.requeue``."""
        self._live(uid, attempt, (GroupState.LEASED, GroupState.FINISHED))
        self._entries[uid] = LedgerEntry(state=GroupState.PENDING, attempt=attempt)

    def commit(self, uids: Iterable[GroupUid], rollout_id: int, step: int) -> None:
        """See ``Ledger.commit``."""
        chosen = list(uids)
        for uid in chosen:
            entry = self.entry(uid)
            if entry.state is not GroupState.FINISHED:
                raise BufferStateError(
                    f"rollout {rollout_id} cannot be committed: group {uid} is {_describe(entry)}", expected="finished"
                )
        for uid in chosen:
            attempt = self._entries[uid].attempt
            self._entries[uid] = LedgerEntry(
                state=GroupState.TRAINED, attempt=attempt, rollout_id=rollout_id, step=step
            )

    def counts(self, source: str, epoch: int, num_rows: int) -> dict[GroupState, int]:
        """See ``Ledger.counts``."""
        seen = Counter(e.state for uid, e in self._entries.items() if uid.source == source and uid.epoch == epoch)
        untouched = num_rows - seen.total()
        return {state: seen[state] + (untouched if state is GroupState.PENDING else 0) for state in GroupState}

    def state_dict(self) -> dict[str, Any]:
        """See ``Ledger.state_dict``."""
        rows = []
        for uid, entry in self._entries.items():
            if entry.state in (GroupState.LEASED, GroupState.FINISHED):
                entry = LedgerEntry(state=GroupState.PENDING, attempt=entry.attempt)
            rows.append([str(uid), asdict(entry)])
        return {"entries": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Ledger.load_state_dict``."""
        self._entries = {
            GroupUid.parse(uid): LedgerEntry(**{**entry, "state": GroupState(entry["state"])})
            for uid, entry in state["entries"]
        }

    def _live(self, uid: GroupUid, attempt: int, states: tuple[GroupState, ...]) -> LedgerEntry:
        entry = self.entry(uid)
        if entry.state not in states:
            raise BufferStateError(
                f"the report on group {uid} is refused: it is {_describe(entry)}", expected=" or ".join(states)
            )
        if entry.attempt != attempt:
            raise BufferStateError(
                f"the report on group {uid} is refused: it is of attempt {attempt}, the live lease is {entry.attempt}"
            )
        return entry


def _describe(entry: LedgerEntry) -> str:
    if entry.state is GroupState.TRAINED:
        return f"trained (step {entry.step})"
    if entry.reason:
        return f"{entry.state} ({entry.reason})"
    return str(entry.state)
