"""The training groups between the data source and a step: the queue, the open rollouts and their leases.

A group is admitted when it is leased for the first time, and keeps its number: a group that returns to the queue takes
its old place, before all groups that were admitted later.

Methods that change something check everything first, so that a refused request changes nothing.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from buffer_rl.buffer.feed import Feed
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_entry import GroupState
from buffer_rl.buffer.partial import RequeueRule, oldest_version
from buffer_rl.errors import BufferRestartedError, BufferStateError
from buffer_rl.types import GroupUid, QueueHeader, SampleGroup, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A group with its running number."""

    group: SampleGroup
    number: int


class GroupQueue:
    """Iterates over the groups, the next one first."""

    def __init__(self, groups: Iterable[SampleGroup] = ()) -> None:
        self._entries = [Admitted(group=group, number=number) for number, group in enumerate(groups)]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[SampleGroup]:
        return (entry.group for entry in self._entries)

    @property
    def entries(self) -> Sequence[Admitted]:
        """The groups with their numbers."""
        return tuple(self._entries)

    def first(self, num_groups: int, chosen: Sequence[GroupUid] | None = None) -> list[Admitted]:
        """The next groups, or those of ``chosen`` that are here, in its order; at most ``num_groups``. They stay."""
        if chosen is None:
            return self._entries[:num_groups]
        by_uid = {entry.group.uid: entry for entry in self._entries}
        return [by_uid[uid] for uid in list(dict.fromkeys(chosen))[:num_groups] if uid in by_uid]

    def remove(self, uids: Collection[GroupUid]) -> None:
        """Take groups out; those that are not here are passed over."""
        gone = set(uids)
        self._entries = [entry for entry in self._entries if entry.group.uid not in gone]

    def put(self, entry: Admitted) -> None:
        """Put a group at the place of its number."""
        bisect.insort(self._entries, entry, key=lambda other: other.number)


QUARANTINED = "quarantined"
"""What drops are counted as that are quarantined; the ledger has each one's reason."""
UNREPORTED = "unreported"
SURPLUS = "surplus"
"""What foreign groups that the step does not need are counted as; those of a data source wait for the next step."""
POSITION = "position"
"""The ledger's note of where the data source stands."""


@dataclass(slots=True, kw_only=True)
class Lease:
    """A leased or finished group. ``group`` holds the prompts alone; ``number`` is that of its admission, negative
    where the group is foreign: it has neither prompts nor a place in the queue."""

    group: SampleGroup
    number: int
    finished: bool = False

    @property
    def foreign(self) -> bool:
        return self.number < 0


@dataclass(slots=True, kw_only=True)
class OpenRollout:
    """A rollout between ``generate`` and ``close_rollout``. ``leases`` are in the order in which they were given."""

    ticket: Ticket
    leases: dict[GroupUid, Lease] = field(default_factory=dict)
    waiting: GroupQueue = field(default_factory=GroupQueue)
    drops: Counter[str] = field(default_factory=Counter)

    def live(self, uid: GroupUid, attempt: int) -> Lease:
        """The lease that a report belongs to. Raises BufferStateError if it is over, or another one."""
        lease = self.leases.get(uid)
        if lease is None or lease.finished or lease.group.attempt != attempt:
            raise BufferStateError(
                f"the report on group {uid} (attempt {attempt}) is refused: it is not leased to {self.ticket.task}",
                hint="a group is finished, rejected or given back once",
            )
        return lease


class Rollouts:
    """Owner of the queue and of the leases; writes every change to the ledger."""

    def __init__(self, feed: Feed, *, ledger: Ledger, rule: RequeueRule | None = None) -> None:
        self.queue = GroupQueue()
        self.open: dict[str, OpenRollout] = {}
        self._feed = feed
        self._ledger = ledger
        self._rule = rule or RequeueRule()
        self._admitted = 0

    def of(self, ticket: Ticket) -> OpenRollout:
        """The ticket's rollout. Raises BufferStateError if it is closed, or of another Buffer."""
        rollout = self.open.get(ticket.task)
        if ticket.incarnation != self._ledger.fencing_token:
            raise BufferRestartedError(f"{ticket.task} was lost with an earlier Buffer", hint="it is produced again")
        if rollout is None:
            raise BufferStateError(f"the report is refused: {ticket.task} is not open", hint="it came too late")
        return rollout

    def headers(self) -> list[QueueHeader]:
        """What a buffer filter sees: the queue's groups, the next one first."""
        return [self._header(group) for group in self.queue]

    def lease(self, ticket: Ticket, num_samples: int, chosen: Sequence[GroupUid] | None) -> list[SampleGroup]:
        rollout = self.of(ticket)
        if num_samples < 0:
            raise BufferStateError(f"{num_samples} groups were asked for", where=ticket.task)
        if ticket.evaluation:
            waiting = rollout.waiting.first(num_samples)
            rollout.waiting.remove([entry.group.uid for entry in waiting])
            return [self._lease(rollout, entry, attempt=1) for entry in waiting]
        queued = self.queue.first(num_samples, chosen)
        fresh = self._admit(num_samples - len(queued))
        try:
            attempts = self._write_leases(ticket, queued, fresh)
        except BaseException:  # nothing is leased then, so nothing may be gone from the source
            if fresh:
                self._feed.rollback([entry.group for entry in fresh])
            raise
        self._admitted += len(fresh)
        self.queue.remove([entry.group.uid for entry in queued])
        return [self._lease(rollout, *pair) for pair in zip([*queued, *fresh], attempts, strict=True)]

    def requeue(
        self, ticket: Ticket, leases: Sequence[tuple[GroupUid, int]], groups: Sequence[SampleGroup] = ()
    ) -> None:
        rollout = self.of(ticket)
        if len({uid for uid, _ in leases}) != len(leases):
            raise BufferStateError("a group is given back twice", where=ticket.task)
        for uid, attempt in leases:
            rollout.live(uid, attempt)
        kept = {group.uid: group for group in groups}
        if not ticket.evaluation:
            self._write_returns(dict(leases))
        for uid, _ in leases:
            lease = rollout.leases.pop(uid)
            if ticket.evaluation:
                rollout.waiting.put(Admitted(group=lease.group, number=lease.number))
            else:
                self.queue.put(Admitted(group=self._rule.on_requeue(kept.get(uid), lease.group), number=lease.number))

    def drop(self, ticket: Ticket, uid: GroupUid, attempt: int, reason: str, *, for_good: bool = False) -> None:
        """Drop a live lease; the reason is counted. for_good: the group is quarantined, and counted as that."""
        rollout = self.of(ticket)
        rollout.live(uid, attempt)
        if not ticket.evaluation:
            (self._ledger.quarantine if for_good else self._ledger.reject)(uid, attempt, reason)
        del rollout.leases[uid]
        rollout.drops[QUARANTINED if for_good else reason] += 1

    def is_foreign(self, rollout: OpenRollout, uid: GroupUid) -> bool:
        """Whether the rollout function made a group of this uid: no data source has it, nor a lease."""
        if (lease := rollout.leases.get(uid)) is not None:
            return lease.foreign
        if rollout.ticket.evaluation or self._feed.has_source(uid.source):
            return False
        return (number := self._ledger.number(uid)) is None or number < 0

    def require_pending(self, ticket: Ticket, uids: Iterable[GroupUid]) -> None:
        """Raises BufferStateError for a group that cannot be taken over, because it was before."""
        for uid in uids:
            if (state := self._ledger.entry(uid).state) is not GroupState.PENDING:
                raise BufferStateError(
                    f"group {uid} cannot be taken over: it is {state}",
                    where=ticket.task,
                    expected="a group that no step has",
                    hint="a group is trained on once; one that a rollout function makes has a uid of its own, or none",
                )

    def import_groups(self, rollout: OpenRollout, uids: Sequence[GroupUid], foreign: bool = False) -> None:
        """Lease and finish pending groups past the source and the queue; their payloads came from elsewhere. foreign:
        the groups themselves did, too."""
        with self._ledger.transaction():
            attempts = [self._ledger.lease(uid, rollout.ticket.rollout_id, foreign) for uid in uids]
            for uid, attempt in zip(uids, attempts, strict=True):
                self._ledger.finish(uid, attempt)
        self.queue.remove(uids)
        for uid, attempt in zip(uids, attempts, strict=True):
            group = SampleGroup(uid=uid, samples=[], attempt=attempt, incarnation=self._ledger.fencing_token)
            rollout.leases[uid] = Lease(group=group, number=-1 if foreign else self._admitted, finished=True)
            self._admitted += not foreign

    def choose(self, rollout: OpenRollout, pinned: Collection[GroupUid] = ()) -> list[GroupUid]:
        """The finished groups that the step trains on: those ``pinned``, then those leased first; a foreign group was,
        so to say, when it was handed in."""
        finished = [uid for uid, lease in rollout.leases.items() if lease.finished]
        wanted = len(finished) if rollout.ticket.evaluation else rollout.ticket.num_groups
        return sorted(finished, key=lambda uid: uid not in pinned)[:wanted]  # stable: else in the order of leases

    def split_selected(self, rollout: OpenRollout, chosen: Collection[GroupUid]) -> list[GroupUid]:
        """Finished groups beyond ``chosen``, which are selected for the step, are queued again, and returned; foreign
        ones are not queued, and counted as ``surplus``. What was leased and never mentioned again is rejected as
        ``unreported``."""
        kept = set(chosen)
        leases, evaluation = rollout.leases, rollout.ticket.evaluation
        unreported = [uid for uid, lease in leases.items() if not lease.finished]
        surplus = [uid for uid, lease in leases.items() if lease.finished and uid not in kept]
        foreign = sum(leases[uid].foreign for uid in surplus)
        if not evaluation:
            with self._ledger.transaction():
                for uid in unreported:
                    self._ledger.reject(uid, leases[uid].group.attempt, UNREPORTED)
                self._write_returns({uid: leases[uid].group.attempt for uid in surplus})
                self._ledger.select(chosen, rollout.ticket.rollout_id)
        counts = {UNREPORTED: len(unreported), SURPLUS: foreign}
        rollout.drops.update({reason: count for reason, count in counts.items() if count})
        for uid in unreported:
            del leases[uid]
        for uid in surplus:
            self._put_back(leases.pop(uid))
        return surplus

    def abandon(self, leases: Mapping[GroupUid, Lease]) -> None:
        """Queue leased or finished training groups again, as prompts. Foreign ones are lost: pending, not queued."""
        self._write_returns({uid: lease.group.attempt for uid, lease in leases.items()})
        for lease in leases.values():
            self._put_back(lease)

    def lease_of(self, uid: GroupUid) -> Lease:
        """What an earlier Buffer leased, made again from the data source; of a foreign group nothing can be."""
        number = self._ledger.number(uid) or 0
        group = SampleGroup(uid=uid, samples=[]) if number < 0 else self._feed.group_of(uid, number).as_prompts()
        attempt = self._ledger.entry(uid).attempt
        group = replace(group, attempt=attempt, incarnation=self._ledger.fencing_token)
        return Lease(group=group, number=number, finished=True)

    def to_save(self, untrained: Sequence[Lease]) -> list[SampleGroup]:
        """What a restored run leases first, in the order of admission: groups that are selected but ``untrained``,
        leased or finished (all of these as prompts), and the queue. Foreign groups are not among them."""
        held = [*untrained]
        for rollout in self.open.values():
            if not rollout.ticket.evaluation:
                held.extend(rollout.leases.values())
        entries = [Admitted(group=lease.group, number=lease.number) for lease in held if not lease.foreign]
        return [entry.group for entry in sorted([*entries, *self.queue.entries], key=lambda entry: entry.number)]

    def recover(self, saved: Sequence[SampleGroup] = (), version: int = 0) -> None:
        """Begin with the ledger's pending groups as the queue.

        saved: what ``to_save`` gave of them at ``version``, with what was generated so far; the others are made again,
        as prompts, and so are those of another number of samples than this run's groups have. Raises BufferStateError
        if one of ``saved`` is not pending."""
        known = {group.uid: self._rule.on_restore(group, version) for group in saved}
        pending = self._ledger.recover()
        if foreign := known.keys() - set(pending):
            state = self._ledger.entry(uid := min(foreign)).state
            raise BufferStateError(f"the saved queue holds group {uid}, which the ledger has as {state}")
        self.queue = GroupQueue()
        for uid in pending:
            number = self._ledger.number(uid) or 0
            group = self._feed.resize(known[uid], number) if uid in known else self.lease_of(uid).group
            self.queue.put(Admitted(group=group, number=number))
        self._admitted = self._ledger.num_admitted

    def _write_leases(self, ticket: Ticket, queued: Sequence[Admitted], fresh: Sequence[Admitted]) -> list[int]:
        """Where the data source stands is written with its groups: neither is known without the other."""
        with self._ledger.transaction():
            attempts = [self._ledger.lease(entry.group.uid, ticket.rollout_id) for entry in [*queued, *fresh]]
            if fresh:
                self._ledger.remember(POSITION, self._feed.position())
        return attempts

    def _put_back(self, lease: Lease) -> None:
        if not lease.foreign:
            self.queue.put(Admitted(group=lease.group, number=lease.number))

    def _write_returns(self, attempts: Mapping[GroupUid, int]) -> None:
        with self._ledger.transaction():
            for uid, attempt in attempts.items():
                self._ledger.requeue(uid, attempt)

    def _lease(self, rollout: OpenRollout, entry: Admitted, attempt: int) -> SampleGroup:
        ticket, uid = rollout.ticket, entry.group.uid
        prompts = replace(entry.group.as_prompts(), attempt=attempt, incarnation=self._ledger.fencing_token)
        rollout.leases[uid] = Lease(group=prompts, number=entry.number)
        if oldest_version(entry.group) is None:
            return prompts.as_prompts()  # the caller may change what it got
        return self._rule.on_lease(
            replace(entry.group, attempt=attempt, incarnation=self._ledger.fencing_token), ticket.version
        )

    def _admit(self, num_samples: int) -> list[Admitted]:
        """New groups of the data source."""
        if num_samples == 0:
            return []
        return [
            Admitted(group=g, number=self._admitted + i) for i, g in enumerate(self._feed.draw_prompts(num_samples))
        ]

    def _header(self, group: SampleGroup) -> QueueHeader:
        """What a buffer filter sees of a queued group."""
        prompt = group[0].prompt
        text = prompt if isinstance(prompt, str) else "".join(str(turn) for turn in prompt)
        return QueueHeader(
            uid=group.uid,
            admitted=group[0].group_index or 0,
            prompt_length=len(text),
            attempts=group.attempt,
            reward=self._rule.reward(group),
            version=oldest_version(group),
        )
