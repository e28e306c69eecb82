"""One group's entry in the ledger, and the rules by which it changes. Pure functions; no files.

    pending ──lease──▶ leased ──finish──▶ finished ──commit──▶ trained(step)
       ▲                 │  │                │
       └────requeue──────┘  ├─reject─▶ rejected(reason)      (finished ──requeue──▶ pending as well)
                            └─quarantine─▶ quarantined(reason)

A foreign group, which the rollout function made, is leased and finished in one transaction. It is pending, and in no
queue, where it was lost before its step, or where its step had enough groups.

Each transition is a function from one entry to the next (``leased`` to ``trained``). It raises BufferStateError where
the diagram has no such arrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from buffer_rl.errors import BufferStateError
from buffer_rl.records.groups import GroupUid
from buffer_rl.records.utf8 import encodable

COLUMNS = "state, attempt, rollout_id, reason, step, selected"
"""The columns of an entry in the ledger's file."""


class GroupState(StrEnum):
    """Where a group is on its way. ``pending`` also holds for rows that were never leased."""

    PENDING = "pending"
    LEASED = "leased"
    FINISHED = "finished"
    TRAINED = "trained"
    REJECTED = "rejected"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
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
    return LedgerEntry(
        state=GroupState(state),
        attempt=attempt,
        rollout_id=rollout_id,
        reason=reason,
        step=step,
        selected=bool(is_selected),
    )


def leased(uid: GroupUid, entry: LedgerEntry, rollout_id: int) -> LedgerEntry:
    """The entry after ``Ledger.lease``."""
    if entry.state is not GroupState.PENDING:
        raise BufferStateError(f"group {uid} cannot be leased: it is {_describe(entry)}", expected="pending")
    return LedgerEntry(state=GroupState.LEASED, attempt=entry.attempt + 1, rollout_id=rollout_id)


def finished(uid: GroupUid, entry: LedgerEntry, attempt: int) -> LedgerEntry:
    """The entry after ``Ledger.finish``."""
    _check_live(uid, entry, attempt, (GroupState.LEASED,))
    return LedgerEntry(state=GroupState.FINISHED, attempt=attempt, rollout_id=entry.rollout_id)


def dropped(uid: GroupUid, entry: LedgerEntry, attempt: int, state: GroupState, reason: str) -> LedgerEntry:
    """The entry after ``Ledger.reject`` or ``Ledger.quarantine``, as ``state`` says."""
    _check_live(uid, entry, attempt, (GroupState.LEASED,))
    return LedgerEntry(state=state, attempt=attempt, rollout_id=entry.rollout_id, reason=encodable(reason))


def requeued(uid: GroupUid, entry: LedgerEntry, attempt: int) -> LedgerEntry:
    """The entry after ``Ledger.requeue``."""
    _check_live(uid, entry, attempt, (GroupState.LEASED, GroupState.FINISHED))
    return LedgerEntry(state=GroupState.PENDING, attempt=attempt)


def selected(uid: GroupUid, entry: LedgerEntry, rollout_id: int) -> LedgerEntry:
    """The entry after ``Ledger.select``."""
    if entry.state is not GroupState.FINISHED:
        raise BufferStateError(
            f"group {uid} cannot be selected for rollout {rollout_id}: it is {_describe(entry)}", expected="finished"
        )
    return LedgerEntry(state=entry.state, attempt=entry.attempt, rollout_id=rollout_id, selected=True)


def trained(uid: GroupUid, entry: LedgerEntry, rollout_id: int, step: int) -> LedgerEntry:
    """The entry after ``Ledger.commit``."""
    if entry.state is not GroupState.FINISHED:
        raise BufferStateError(
            f"rollout {rollout_id} cannot be committed: group {uid} is {_describe(entry)}", expected="finished"
        )
    return LedgerEntry(state=GroupState.TRAINED, attempt=entry.attempt, rollout_id=rollout_id, step=step)


def is_repeat(entries: Sequence[LedgerEntry], committed: tuple[int, int] | None, rollout_id: int, step: int) -> bool:
    """Whether a commit of the groups with ``entries`` was made before. ``committed``: step and number of groups of the
    rollout's commit. Raises BufferStateError if the rollout was committed in another way."""
    if committed is None:
        return False
    if committed[0] != step:
        raise BufferStateError(f"rollout {rollout_id} was committed at step {committed[0]}, not {step}")
    same = all(e.state is GroupState.TRAINED and (e.rollout_id, e.step) == (rollout_id, step) for e in entries)
    if not same or len(entries) != committed[1]:
        raise BufferStateError(f"rollout {rollout_id} was committed at step {step} with other groups")
    return True


def _check_live(uid: GroupUid, entry: LedgerEntry, attempt: int, states: tuple[GroupState, ...]) -> None:
    if entry.state not in states:
        raise BufferStateError(
            f"the report on group {uid} is refused: it is {_describe(entry)}", expected=" or ".join(states)
        )
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
