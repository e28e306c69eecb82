"""The ledger: which state each group is in. Pure bookkeeping; no payloads, no Ray.

    pending ──lease──▶ leased ──finish──▶ finished ──commit──▶ trained(step)
       ▲                 │  │                │
       └────requeue──────┘  ├─reject─▶ rejected(reason)      (finished ──requeue──▶ pending as well)
                            └─quarantine─▶ quarantined(reason)

A uid is in exactly one state. A lease carries an attempt number and belongs to the ledger's incarnation, which is new
whenever the ledger is opened or replaced; a report of another attempt or incarnation is refused. The attempt alone
would not do: a ledger that went back to a checkpoint gives the same attempt numbers again.

The rules of the diagram are functions from one entry to the next (``leased`` to ``requeued``), so that every ledger
refuses the same requests with the same words.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
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
    """One group's facts. ``reason`` belongs to rejected and quarantined groups, ``step`` to trained ones; ``selected``
    marks a finished group that the step of ``rollout_id`` trains on."""

    state: GroupState
    attempt: int = 0
    rollout_id: int | None = None
    reason: str = ""
    step: int | None = None
    selected: bool = False


class Ledger(Protocol):
    """What the Buffer asks of a ledger, durable or not. Every method raises BufferStateError on a
    transition that the diagram above does not have, and then changes nothing.

    ``incarnation`` of a report is the ledger's when the group was leased; None where the caller has compared it.
    """

    @property
    def incarnation(self) -> str:
        """Names this ledger from its opening, or from its last replacement, on."""
        ...

    def lease(self, uid: GroupUid, rollout_id: int) -> int:
        """pending → leased. Returns the attempt number, counted from 1."""
        ...

    def finish(self, uid: GroupUid, attempt: int, *, incarnation: str | None = None) -> None:
        """leased → finished."""
        ...

    def reject(self, uid: GroupUid, attempt: int, reason: str, *, incarnation: str | None = None) -> None:
        """leased → rejected."""
        ...

    def quarantine(self, uid: GroupUid, attempt: int, reason: str, *, incarnation: str | None = None) -> None:
        """leased → quarantined: the group failed too often by itself, and is not tried again."""
        ...

    def requeue(self, uid: GroupUid, attempt: int, *, incarnation: str | None = None) -> None:
        """leased or finished → pending."""
        ...

    def select(self, uids: Iterable[GroupUid], rollout_id: int) -> None:
        """Mark finished groups as those that the step of ``rollout_id`` trains on, all of them or none. They stay
        finished. From here on a trainer may hold their payloads."""
        ...

    def commit(self, uids: Iterable[GroupUid], rollout_id: int, step: int) -> None:
        """finished → trained, all of them or none. A rollout is committed once: a repeat with the same groups and the
        same step changes nothing, any other one is refused. Without groups nothing is recorded."""
        ...

    def entry(self, uid: GroupUid) -> LedgerEntry:
        """The facts of one group; ``pending`` with attempt 0 where it was never leased."""
        ...

    def counts(self, source: str, epoch: int, num_rows: int) -> dict[GroupState, int]:
        """How many groups of an epoch are in each state; they add up to ``num_rows``."""
        ...

    def transaction(self) -> AbstractContextManager[None]:
        """A durable ledger has all transitions of the block afterwards, or none; one in memory has those that were
        made before an error."""
        ...

    def number(self, uid: GroupUid) -> int | None:
        """The running number of the group's first lease; None where it was never leased."""
        ...

    @property
    def num_admitted(self) -> int:
        """Number of groups that were ever leased."""
        ...

    def recover(self) -> list[GroupUid]:
        """The groups that were leased before and are pending, in the order of their first lease."""
        ...

    def selected(self, rollout_id: int) -> list[GroupUid]:
        """The finished groups that were selected for the step of a rollout."""
        ...

    def commits(self) -> dict[int, int]:
        """The step of each rollout that was committed."""
        ...

    def remember(self, key: str, value: str) -> None:
        """Store a note, within the transaction of the block if there is one."""
        ...

    def recall(self, key: str) -> str | None:
        """The note of ``remember``."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON values that ``load_state_dict`` takes back. Leased and finished groups are written as pending:
        their payloads do not survive."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything by what ``state_dict`` returned, and begin a new incarnation."""
        ...


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
    return LedgerEntry(state=state, attempt=attempt, rollout_id=entry.rollout_id, reason=reason)


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
    return replace(entry, rollout_id=rollout_id, selected=True)


def trained(uid: GroupUid, entry: LedgerEntry, rollout_id: int, step: int) -> LedgerEntry:
    """The entry after ``Ledger.commit``."""
    if entry.state is not GroupState.FINISHED:
        raise BufferStateError(
            f"rollout {rollout_id} cannot be committed: group {uid} is {_describe(entry)}", expected="finished"
        )
    return LedgerEntry(state=GroupState.TRAINED, attempt=entry.attempt, rollout_id=rollout_id, step=step)


def after_restart(entry: LedgerEntry) -> LedgerEntry:
    """The entry in a ledger that was opened again: what was leased or finished is pending, its payload being gone."""
    if entry.state in (GroupState.LEASED, GroupState.FINISHED):
        return LedgerEntry(state=GroupState.PENDING, attempt=entry.attempt)
    return entry


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


def check_incarnation(uid: GroupUid, reported: str | None, current: str) -> None:
    """Refuse a report whose lease was given by an earlier incarnation."""
    if reported is not None and reported != current:
        raise BufferStateError(
            f"the report on group {uid} is refused: it was leased by an earlier Buffer", hint="it came too late"
        )


class MemoryLedger:
    """A ledger that lives as long as its process."""

    def __init__(self) -> None:
        self._entries: dict[GroupUid, LedgerEntry] = {}
        self._commits: dict[int, tuple[int, int]] = {}
        self._notes: dict[str, str] = {}
        self._incarnation = uuid.uuid4().hex

    @property
    def incarnation(self) -> str:
        """See ``Ledger.incarnation``."""
        return self._incarnation

    def entry(self, uid: GroupUid) -> LedgerEntry:
        """See ``Ledger.entry``."""
        return self._entries.get(uid, LedgerEntry(state=GroupState.PENDING))

    def lease(self, uid: GroupUid, rollout_id: int) -> int:
        """See ``Ledger.lease``."""
        entry = self._entries[uid] = leased(uid, self.entry(uid), rollout_id)
        return entry.attempt

    def finish(self, uid: GroupUid, attempt: int, *, incarnation: str | None = None) -> None:
        """See ``Ledger.finish``."""
        check_incarnation(uid, incarnation, self._incarnation)
        self._entries[uid] = finished(uid, self.entry(uid), attempt)

    def reject(self, uid: GroupUid, attempt: int, reason: str, *, incarnation: str | None = None) -> None:
        """See ``Ledger.reject``."""
        check_incarnation(uid, incarnation, self._incarnation)
        self._entries[uid] = dropped(uid, self.entry(uid), attempt, GroupState.REJECTED, reason)

    def quarantine(self, uid: GroupUid, attempt: int, reason: str, *, incarnation: str | None = None) -> None:
        """See ``Ledger.quarantine``."""
        check_incarnation(uid, incarnation, self._incarnation)
        self._entries[uid] = dropped(uid, self.entry(uid), attempt, GroupState.QUARANTINED, reason)

    def requeue(self, uid: GroupUid, attempt: int, *, incarnation: str | None = None) -> None:
        """See ``Ledger.requeue``."""
        check_incarnation(uid, incarnation, self._incarnation)
        self._entries[uid] = requeued(uid, self.entry(uid), attempt)

    def select(self, uids: Iterable[GroupUid], rollout_id: int) -> None:
        """See ``Ledger.select``."""
        self._entries.update([(uid, selected(uid, self.entry(uid), rollout_id)) for uid in uids])

    def commit(self, uids: Iterable[GroupUid], rollout_id: int, step: int) -> None:
        """See ``Ledger.commit``."""
        chosen = list(dict.fromkeys(uids))
        if is_repeat([self.entry(uid) for uid in chosen], self._commits.get(rollout_id), rollout_id, step):
            return
        self._entries.update([(uid, trained(uid, self.entry(uid), rollout_id, step)) for uid in chosen])
        if chosen:
            self._commits[rollout_id] = (step, len(chosen))

    def counts(self, source: str, epoch: int, num_rows: int) -> dict[GroupState, int]:
        """See ``Ledger.counts``."""
        seen = Counter(e.state for uid, e in self._entries.items() if uid.source == source and uid.epoch == epoch)
        untouched = num_rows - seen.total()
        return {state: seen[state] + (untouched if state is GroupState.PENDING else 0) for state in GroupState}

    def transaction(self) -> AbstractContextManager[None]:
        """See ``Ledger.transaction``."""
        return nullcontext()

    def number(self, uid: GroupUid) -> int | None:
        """See ``Ledger.number``."""
        return next((number for number, known in enumerate(self._entries) if known == uid), None)

    @property
    def num_admitted(self) -> int:
        """See ``Ledger.num_admitted``."""
        return len(self._entries)

    def recover(self) -> list[GroupUid]:
        """See ``Ledger.recover``."""
        return [uid for uid, entry in self._entries.items() if entry.state is GroupState.PENDING]

    def selected(self, rollout_id: int) -> list[GroupUid]:
        """See ``Ledger.selected``."""
        return [uid for uid, entry in self._entries.items() if entry.selected and entry.rollout_id == rollout_id]

    def commits(self) -> dict[int, int]:
        """See ``Ledger.commits``."""
        return {rollout_id: step for rollout_id, (step, _) in self._commits.items()}

    def remember(self, key: str, value: str) -> None:
        """See ``Ledger.remember``."""
        self._notes[key] = value

    def recall(self, key: str) -> str | None:
        """See ``Ledger.recall``."""
        return self._notes.get(key)

    def state_dict(self) -> dict[str, Any]:
        """See ``Ledger.state_dict``."""
        return {"entries": [[str(uid), asdict(after_restart(entry))] for uid, entry in self._entries.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Ledger.load_state_dict``."""
        self._entries = dict(parsed_entries(state))
        self._commits = commits_of(self._entries.values())
        self._incarnation = uuid.uuid4().hex


def parsed_entries(state: Mapping[str, Any]) -> Iterable[tuple[GroupUid, LedgerEntry]]:
    """What ``Ledger.state_dict`` wrote, in its order."""
    for uid, entry in state["entries"]:
        yield GroupUid.parse(uid), LedgerEntry(**{**entry, "state": GroupState(entry["state"])})


def commits_of(entries: Iterable[LedgerEntry]) -> dict[int, tuple[int, int]]:
    """Step and number of groups of each rollout that was committed."""
    counts = Counter((e.rollout_id, e.step) for e in entries if e.state is GroupState.TRAINED)
    return {r: (step, number) for (r, step), number in counts.items() if r is not None and step is not None}


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
