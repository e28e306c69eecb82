"""The production of groups, between the data source and the steps: the queue, the tickets with their leases, and the
finished groups.

A group is admitted when it is leased for the first time, and keeps its number: a group that returns to the queue takes
its old place, before all groups that were admitted later. Which finished groups a step trains on is no concern of this
module (see ``selection``).

Methods that change something check everything first, so that a refused request changes nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from buffer_rl.buffer.feed import Feed
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.partial import RequeueRule, oldest_version
from buffer_rl.errors import BufferRestartedError, BufferStateError, PayloadLostError
from buffer_rl.records.groups import GroupUid, QueueHeader, SampleGroup, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A group with its running number."""

    group: SampleGroup
    number: int


class GroupQueue:
    """Groups in the order of their numbers. What is leased from it and put back costs the same however many wait."""

    def __init__(self, groups: Iterable[SampleGroup] = ()) -> None:
        self._entries = {group.uid: Admitted(group=group, number=number) for number, group in enumerate(groups)}
        # May also hold groups that were taken out: those are passed over where they come first.
        self._order = [(entry.number, uid) for uid, entry in self._entries.items()]

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[Admitted]:
        """All groups with their numbers, the next one first."""
        return sorted(self._entries.values(), key=lambda entry: entry.number)

    def first(self, num_groups: int, chosen: Sequence[GroupUid] | None = None) -> list[Admitted]:
        """The next groups, or those of ``chosen`` that are here, in its order; at most ``num_groups``. They stay."""
        if chosen is not None:
            return [self._entries[uid] for uid in dict.fromkeys(chosen) if uid in self._entries][:num_groups]
        found: dict[GroupUid, Admitted] = {}
        while self._order and len(found) < num_groups:
            number, uid = heapq.heappop(self._order)
            if (entry := self._entries.get(uid)) is not None and entry.number == number:
                found[uid] = entry
        for uid, entry in found.items():
            heapq.heappush(self._order, (entry.number, uid))
        return list(found.values())

    def remove(self, uids: Iterable[GroupUid]) -> None:
        """Take groups out; those that are not here are passed over."""
        for uid in uids:
            self._entries.pop(uid, None)
        if len(self._order) > 2 * len(self._entries) + 64:  # mostly groups that were taken out
            self._order = [(entry.number, entry.group.uid) for entry in self.entries]  # sorted, which is a heap

    def put(self, entry: Admitted) -> None:
        """Put a group at the place of its number."""
        self._entries[entry.group.uid] = entry
        heapq.heappush(self._order, (entry.number, entry.group.uid))


QUARANTINED = "quarantined"
"""What drops are counted as that are quarantined; the ledger has each one's reason."""
UNREPORTED = "unreported"
SURPLUS = "surplus"
"""What foreign groups that the step does not need are counted as; those of a data source wait for the next step."""
POSITION = "position"
"""The ledger's note of where the data source stands."""
WORKERS = 1 << 20
"""More than the workers of one Buffer's tickets: those of the Buffer that replaces it have greater numbers."""


@dataclass(slots=True, kw_only=True)
class Lease:
    """A leased or finished group. ``group`` holds the prompts alone; ``number`` is that of its admission, negative
    where the group is foreign: it has neither prompts nor a place in the queue. ``order`` counts leases; ``ticket`` is
    the number of the ticket that leased it."""

    group: SampleGroup
    number: int
    order: int = 0
    ticket: int = -1

    @property
    def foreign(self) -> bool:
        return self.number < 0


@dataclass(slots=True, kw_only=True)
class OpenRollout:
    """A ticket between ``generate`` and ``end_ticket``. wanted: how many groups it was opened with; ``ticket`` has those
    that are still missing. leases: groups that are leased and not finished. finished: in the order of their reports.
    waiting: the prompts of an evaluation that were not leased yet."""

    ticket: Ticket
    wanted: int
    leases: dict[GroupUid, Lease] = field(default_factory=dict)
    finished: dict[GroupUid, None] = field(default_factory=dict)
    waiting: GroupQueue = field(default_factory=GroupQueue)
    drops: Counter[str] = field(default_factory=Counter)

    @property
    def num_missing(self) -> int:
        """How many groups it may still lease, to finish as many as are wanted."""
        return max(0, self.wanted - len(self.finished) - len(self.leases))

    def live(self, uid: GroupUid, attempt: int) -> Lease:
        """The lease that a report belongs to. Raises BufferStateError if it is over, or another one."""
        lease = self.leases.get(uid)
        if lease is None or lease.group.attempt != attempt:
            raise BufferStateError(
                f"the report on group {uid} (attempt {attempt}) is refused: it is not leased to {self.ticket.task}",
                hint="a group is finished, rejected or given back once",
            )
        return lease


class Rollouts:
    """Owner of the queue, the tickets, and the leases; writes every change to the ledger.

    finished: the training groups that are finished, and not released yet. newest_ticket: number of the training ticket
    that was opened last.
    """

    def __init__(self, feed: Feed, *, ledger: Ledger, rule: RequeueRule | None = None) -> None:
        self.queue = GroupQueue()
        self.open: dict[str, OpenRollout] = {}
        self.finished: dict[GroupUid, Lease] = {}
        self.newest_ticket = -1
        self._feed = feed
        self._ledger = ledger
        self._rule = rule or RequeueRule()
        self._admitted = 0
        self._num_leases = 0
        self._num_workers = ledger.opening * WORKERS

    def of(self, ticket: Ticket) -> OpenRollout:
        """The ticket's rollout. Raises BufferStateError if it is closed, of another Buffer, or where another worker
        goes on with it."""
        rollout = self.open.get(ticket.task)
        if ticket.incarnation != self._ledger.fencing_token:
            raise BufferRestartedError(f"{ticket.task} was lost with an earlier Buffer", hint="it is produced again")
        if rollout is None:
            raise BufferStateError(f"the report is refused: {ticket.task} is not open", hint="it came too late")
        if ticket.worker != rollout.ticket.worker:
            raise BufferStateError(f"the report is refused: another worker goes on with {ticket.task}")
        return rollout

    def start(self, ticket: Ticket, waiting: GroupQueue) -> Ticket:
        """Open a ticket. Returns it for a worker of its own: those of an earlier ticket of the task are refused."""
        ticket = self._for_next_worker(ticket)
        if not ticket.evaluation:
            self.newest_ticket = ticket.rollout_id
        self.open[ticket.task] = OpenRollout(ticket=ticket, wanted=ticket.num_groups, waiting=waiting)
        return self.open[ticket.task].ticket

    def headers(self) -> list[QueueHeader]:
        """What a buffer filter sees: the queue's groups, the next one first."""
        return [self._header(entry.group) for entry in self.queue.entries]

    def lease(
        self, ticket: Ticket, num_samples: int, chosen: Sequence[GroupUid] | None, version: int | None = None
    ) -> list[SampleGroup]:
        """Lease groups of the queue, then of the data source. version: the published one; by default the ticket's."""
        rollout = self.of(ticket)
        version = ticket.version if version is None else version
        if num_samples < 0:
            raise BufferStateError(f"{num_samples} groups were asked for", where=ticket.task)
        if ticket.evaluation:
            waiting = rollout.waiting.first(num_samples)
            rollout.waiting.remove([entry.group.uid for entry in waiting])
            return [self._lease(rollout, entry, attempt=1, version=version) for entry in waiting]
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
        return [self._lease(rollout, *pair, version) for pair in zip([*queued, *fresh], attempts, strict=True)]

    def requeue(
        self, ticket: Ticket, leases: Sequence[tuple[GroupUid, int]], groups: Sequence[SampleGroup] = ()
    ) -> None:
        rollout = self.of(ticket)
        if len({uid for uid, _ in leases}) != len(leases):
            raise BufferStateError("a group is given back twice", where=ticket.task)
        for uid, attempt in leases:
            rollout.live(uid, attempt)
        kept = {group.uid: group for group in groups}
        returned = []
        for lease in (rollout.leases[uid] for uid, _ in leases):
            group = lease.group if ticket.evaluation else self._rule.on_requeue(kept.get(lease.group.uid), lease.group)
            returned.append(Admitted(group=group, number=lease.number))
        if not ticket.evaluation:
            self._write_returns(dict(leases))
        for entry in returned:
            del rollout.leases[entry.group.uid]
            (rollout.waiting if ticket.evaluation else self.queue).put(entry)

    def pass_on(self, ticket: Ticket) -> Ticket:
        """Requeue all leases of a ticket as prompts. Returns it for another worker, which produces what is missing
        beside the groups that are finished. Raises PayloadLostError if groups are missing and foreign ones are
        finished: the rollout function begins again with its first uid, and a uid is taken once."""
        rollout = self.of(ticket)
        missing = max(0, rollout.wanted - len(rollout.finished))
        unreleased = (self.finished.get(uid) for uid in rollout.finished)
        if missing and any(lease is not None and lease.foreign for lease in unreleased):
            what = "the worker died, and the rollout function does not know which groups of its own are finished"
            raise PayloadLostError(what, where=ticket.task)
        self.requeue(ticket, [(uid, lease.group.attempt) for uid, lease in rollout.leases.items()])
        rollout.ticket = self._for_next_worker(replace(ticket, num_groups=missing))
        return rollout.ticket

    def finish(self, rollout: OpenRollout, lease: Lease) -> None:
        """End a live lease: its group is finished."""
        uid = lease.group.uid
        if not rollout.ticket.evaluation:
            self._ledger.finish(uid, lease.group.attempt)
            self.finished[uid] = lease
        rollout.finished[uid] = None
        del rollout.leases[uid]

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
        if uid in rollout.leases or rollout.ticket.evaluation or self._feed.has_source(uid.source):
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

    def import_groups(self, rollout: OpenRollout, uids: Sequence[GroupUid], foreign: bool = False) -> list[Lease]:
        """Lease and finish pending groups past the source and the queue; their payloads came from elsewhere. foreign:
        the groups themselves did, too."""
        with self._ledger.transaction():
            attempts = [self._ledger.lease(uid, rollout.ticket.rollout_id, foreign) for uid in uids]
            for uid, attempt in zip(uids, attempts, strict=True):
                self._ledger.finish(uid, attempt)
        self.queue.remove(uids)
        for uid, attempt in zip(uids, attempts, strict=True):
            group = SampleGroup(uid=uid, samples=[], attempt=attempt, incarnation=self._ledger.fencing_token)
            number = -1 if foreign else self._admitted
            self._admitted += not foreign
            rollout.finished[uid] = None
            ticket = rollout.ticket.rollout_id
            self.finished[uid] = Lease(group=group, number=number, order=self._count_lease(), ticket=ticket)
        return [self.finished[uid] for uid in uids]

    def end(self, rollout: OpenRollout) -> list[GroupUid]:
        """End a ticket: what was leased and never mentioned again is rejected as ``unreported``. Returns these."""
        unreported = list(rollout.leases)
        if not rollout.ticket.evaluation:
            with self._ledger.transaction():
                for uid, lease in rollout.leases.items():
                    self._ledger.reject(uid, lease.group.attempt, UNREPORTED)
        if unreported:
            rollout.drops[UNREPORTED] += len(unreported)
        del self.open[rollout.ticket.task]
        return unreported

    def select(self, rollout_id: int, chosen: Sequence[GroupUid], surplus: Sequence[GroupUid]) -> int:
        """Finished groups are ``chosen`` for a step, or ``surplus``, which is queued again as prompts; foreign ones are
        lost. Returns how many were queued."""
        returned = [self.finished[uid] for uid in surplus]
        with self._ledger.transaction():
            self._write_returns({lease.group.uid: lease.group.attempt for lease in returned})
            self._ledger.select(chosen, rollout_id)
        self._put_back(returned)
        return sum(not lease.foreign for lease in returned)

    def give_up(self, finished: Iterable[GroupUid], *, tickets: bool = True) -> None:
        """Queue ``finished`` training groups again, as prompts; with ``tickets``, leased ones too, and forget all
        training tickets. Foreign groups are lost: pending, not queued."""
        leases = [self.finished.get(uid) or self.lease_of(uid) for uid in finished]
        ended = [rollout for rollout in self.open.values() if tickets and not rollout.ticket.evaluation]
        for rollout in ended:
            leases += rollout.leases.values()
        self._write_returns({lease.group.uid: lease.group.attempt for lease in leases})
        self._put_back(leases)
        for rollout in ended:
            del self.open[rollout.ticket.task]

    def has_opened(self, last_ticket: int | None, newest: int) -> bool:
        """Whether no ticket up to ``newest`` is left to open, in a run whose last one is ``last_ticket``."""
        return self.newest_ticket >= (newest if last_ticket is None else min(newest, last_ticket))

    @property
    def num_unreleased(self) -> int:
        """Groups of the budget of (S + 1) P: finished ones that are not released, leased ones, and those that open
        tickets may still lease."""
        running = [rollout for rollout in self.open.values() if not rollout.ticket.evaluation]
        return len(self.finished) + sum(len(rollout.leases) + rollout.num_missing for rollout in running)

    def lease_of(self, uid: GroupUid) -> Lease:
        """What an earlier Buffer leased, made again from the data source; of a foreign group nothing can be."""
        number = self._ledger.number(uid) or 0
        group = SampleGroup(uid=uid, samples=[]) if number < 0 else self._feed.group_of(uid, number).as_prompts()
        attempt = self._ledger.entry(uid).attempt
        group = replace(group, attempt=attempt, incarnation=self._ledger.fencing_token)
        return Lease(group=group, number=number)

    def to_save(self) -> list[SampleGroup]:
        """What a restored run leases first, in the order of admission: groups that are leased, or finished and not
        trained (these as prompts), and the queue. Foreign groups are not among them."""
        trained = GroupState.TRAINED
        held = [lease for uid, lease in self.finished.items() if self._ledger.entry(uid).state is not trained]
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

    def _put_back(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self.finished.pop(lease.group.uid, None)
            if not lease.foreign:
                self.queue.put(Admitted(group=lease.group, number=lease.number))

    def next_number(self) -> int:
        """A number that grows with each ticket, worker and selection, also over the Buffers of a run."""
        self._num_workers += 1
        return self._num_workers

    def _for_next_worker(self, ticket: Ticket) -> Ticket:
        return replace(ticket, worker=self.next_number())

    def _count_lease(self) -> int:
        self._num_leases += 1
        return self._num_leases

    def _write_returns(self, attempts: Mapping[GroupUid, int]) -> None:
        with self._ledger.transaction():
            for uid, attempt in attempts.items():
                self._ledger.requeue(uid, attempt)

    def _lease(self, rollout: OpenRollout, entry: Admitted, attempt: int, version: int) -> SampleGroup:
        uid, token = entry.group.uid, self._ledger.fencing_token
        prompts = entry.group.as_prompts(attempt=attempt, incarnation=token, version=version)
        rollout.leases[uid] = Lease(
            group=prompts, number=entry.number, order=self._count_lease(), ticket=rollout.ticket.rollout_id
        )
        if oldest_version(entry.group) is None:
            return prompts.as_prompts()  # the caller may change what it got
        return self._rule.on_lease(replace(entry.group, attempt=attempt, incarnation=token, version=version), version)

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
