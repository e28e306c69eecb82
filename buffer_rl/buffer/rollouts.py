"""The production of groups, between the data source and the steps: the queue, the tickets with their leases, and the
finished groups.

A group is admitted when it is leased for the first time, and keeps its number: a group that returns to the queue takes
its old place, before all groups that were admitted later. Which finished groups a step trains on is no concern of this
module (see ``selections``).

Methods that change something check everything first, so that a refused request changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from buffer_rl.buffer.feed import Draw, Feed
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.queue import Admitted, GroupQueue, RequeueRule, oldest_version
from buffer_rl.errors import BufferRestartedError, BufferStateError, PayloadLostError
from buffer_rl.records.groups import GroupUid, SampleGroup, Ticket

QUARANTINED = "quarantined"
"""What drops are counted as that are quarantined; the ledger has each one's reason."""
UNREPORTED = "unreported"
SURPLUS = "surplus"
"""What foreign groups that the step does not need are counted as; those of a data source wait for the next step."""
TOO_OLD = "too_old"
"""What foreign groups are counted as whose tokens are older than the bound when the selection of a step is open."""
CURRICULUM = "curriculum"
"""What rows are counted as that an order by difficulty passes over, since their pool has weight 0."""
POSITION = "position"
"""The ledger's note of where the data source stands."""
WORKERS = 1 << 20
"""More than the workers of one Buffer's tickets: those of the Buffer that replaces it have greater numbers."""


@dataclass(slots=True, kw_only=True)
class Lease:
    """A leased or finished group. ``group`` holds the prompts alone; ``number`` is that of its admission. ``order``
    counts leases; ``ticket`` is the number of the ticket that leased it, and ``worker`` that of its worker.

    A foreign group, which the rollout function made, is leased and finished with its report. It has neither prompts nor
    a place in the queue: if its step is lost or has enough groups, it is pending until it is reported again."""

    group: SampleGroup
    number: int
    order: int = 0
    ticket: int = -1
    worker: int = 0

    @property
    def foreign(self) -> bool:
        return self.number < 0

    @property
    def queued(self) -> list[Admitted]:
        """What goes back to the queue if the group is given up."""
        return [] if self.foreign else [Admitted(group=self.group, number=self.number)]

    @property
    def imported(self) -> bool:
        """Whether it came finished, past the data source: where and when its tokens were sampled is not known."""
        return len(self.group) == 0


@dataclass(slots=True, kw_only=True)
class OpenRollout:
    """A ticket between ``generate`` and ``end_ticket``. missing: how many groups each of its workers may still lease,
    by their numbers; negative if it leased more. leases: groups that are leased and not finished. finished: the number
    of rows of each group, in the order of their reports. waiting: the prompts of an evaluation that were not leased
    yet."""

    ticket: Ticket
    missing: Counter[int]
    leases: dict[GroupUid, Lease] = field(default_factory=dict)
    finished: dict[GroupUid, int] = field(default_factory=dict)
    waiting: GroupQueue = field(default_factory=GroupQueue)
    drops: Counter[str] = field(default_factory=Counter)

    def leased_by(self, worker: int) -> list[Lease]:
        """The leases of one of its workers."""
        return [lease for lease in self.leases.values() if lease.worker == worker]

    def leave(self, uid: GroupUid) -> None:
        """A lease ends without a finished group: its worker may lease another one."""
        self.missing[self.leases.pop(uid).worker] += 1

    def live(self, uid: GroupUid, attempt: int) -> Lease:
        """The lease that a report belongs to. Raises BufferStateError if it is over, or another one."""
        lease = self.leases.get(uid)
        if lease is None or lease.group.attempt != attempt:
            what = f"the report on group {uid} (attempt {attempt}) is refused: it is not leased to {self.ticket.task}"
            raise BufferStateError(what, hint="a group is finished, rejected or given back once")
        return lease


class Rollouts:
    """Owner of the queue, the tickets, and the leases; writes every change to the ledger.

    is_limited: a ticket leases no more groups than it was opened with, but for those that replace rejected or returned
    ones; without it, as many as it asks for. finished: the training groups that are finished, and not released yet.
    newest_ticket: number of the training ticket that was opened last; -1 before, and where production starts again.
    has_shared: several workers shared a ticket.
    """

    def __init__(
        self, feed: Feed, *, ledger: Ledger, rule: RequeueRule | None = None, is_limited: bool = False
    ) -> None:
        self.queue = GroupQueue()
        self.open: dict[str, OpenRollout] = {}
        self.finished: dict[GroupUid, Lease] = {}
        self.newest_ticket = -1
        self.has_shared = False
        self._feed = feed
        self._ledger = ledger
        self._rule = rule or RequeueRule()
        self._is_limited = is_limited
        self._admitted = 0
        self._num_leases = 0
        self._num_workers = ledger.tables.opening * WORKERS

    def of(self, ticket: Ticket) -> OpenRollout:
        """The ticket's rollout. Raises BufferStateError if it is closed, of another Buffer, or where another worker
        goes on with it."""
        rollout = self.open.get(ticket.task)
        if ticket.incarnation != self._ledger.fencing_token:
            raise BufferRestartedError(f"{ticket.task} was lost with an earlier Buffer", hint="it is produced again")
        if rollout is None:
            raise BufferStateError(f"the report is refused: {ticket.task} is not open", hint="it came too late")
        if ticket.worker not in rollout.missing:
            raise BufferStateError(f"the report is refused: another worker has {ticket.task} now")
        return rollout

    def start(self, ticket: Ticket, waiting: Sequence[SampleGroup] = ()) -> Ticket:
        """Open a ticket. Returns it for a worker of its own: those of an earlier ticket of the task are refused.
        waiting: the groups of an evaluation."""
        ticket = self._for_next_worker(ticket)
        if not ticket.evaluation:
            self.newest_ticket = ticket.rollout_id
        queue = GroupQueue(group.as_prompts() for group in waiting)
        missing = Counter({ticket.worker: ticket.num_groups})
        self.open[ticket.task] = OpenRollout(ticket=ticket, missing=missing, waiting=queue)
        return ticket

    def share(self, ticket: Ticket, num_parts: int) -> list[Ticket]:
        """See ``BufferState.share``."""
        rollout = self.of(ticket)
        if ticket.evaluation or rollout.leases or rollout.finished or not 0 < num_parts <= ticket.num_groups:
            what = f"{num_parts} workers cannot share {ticket.task}, of {ticket.num_groups} groups"
            expected = "a training ticket of which nothing is leased, and a group or more for each worker"
            raise BufferStateError(what, expected=expected)
        self.has_shared = True
        least, more = divmod(ticket.num_groups, num_parts)
        sizes = [least + (part < more) for part in range(num_parts)]
        parts = [self._for_next_worker(replace(ticket, num_groups=size, num_parts=num_parts)) for size in sizes]
        rollout.missing = Counter({ticket.worker: 0, **{part.worker: part.num_groups for part in parts}})
        return parts

    def lease(
        self, ticket: Ticket, num_samples: int, chosen: Sequence[GroupUid] | None, version: int
    ) -> list[SampleGroup]:
        """Lease groups of the queue, then of the data source. version: the published one."""
        rollout = self.of(ticket)
        if num_samples < 0:
            raise BufferStateError(f"{num_samples} groups were asked for", where=ticket.task)
        if ticket.evaluation:
            waiting = rollout.waiting.first(num_samples)
            rollout.waiting.remove([entry.group.uid for entry in waiting])
            return [self._lease(rollout, ticket.worker, entry, attempt=1, version=version) for entry in waiting]
        if self._is_limited and num_samples > 0:
            num_samples = min(num_samples, self._num_allowed(rollout, ticket))
        queued = self.queue.first(num_samples, chosen)
        num_fresh = num_samples - len(queued)
        drawn = self._feed.draw_prompts(num_fresh) if num_fresh else []
        try:
            attempts = self._write_leases(ticket, queued, drawn)
        except BaseException:  # nothing is leased then, so nothing may be gone from the source
            if drawn:
                self._feed.rollback(drawn)
            raise
        numbered = enumerate(drawn, self._admitted)  # rows that are passed over have numbers, too
        fresh = [Admitted(group=draw, number=number) for number, draw in numbered if isinstance(draw, SampleGroup)]
        self._admitted += len(drawn)
        if passed := len(drawn) - len(fresh):
            rollout.drops[CURRICULUM] += passed
        self.queue.remove([entry.group.uid for entry in queued])
        pairs = zip([*queued, *fresh], attempts, strict=True)
        return [self._lease(rollout, ticket.worker, entry, attempt, version) for entry, attempt in pairs]

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
            rollout.leave(entry.group.uid)
            (rollout.waiting if ticket.evaluation else self.queue).put(entry)

    def pass_on(self, ticket: Ticket) -> Ticket:
        """Requeue all leases of the ticket's worker as prompts. Returns the ticket for another worker, which produces
        what is missing beside the groups that are finished. Raises PayloadLostError if groups are missing and foreign
        ones are finished: the rollout function begins again with its first uid, and a uid is taken once."""
        rollout = self.of(ticket)
        leases = rollout.leased_by(ticket.worker)
        missing = max(0, rollout.missing[ticket.worker] + len(leases))
        if missing and any((self._ledger.number(uid) or 0) < 0 for uid in rollout.finished):
            what = "the worker died, and the rollout function does not know which groups of its own are finished"
            raise PayloadLostError(what, where=ticket.task)
        self.requeue(ticket, [(lease.group.uid, lease.group.attempt) for lease in leases])
        passed = self._for_next_worker(replace(ticket, num_groups=missing))
        del rollout.missing[ticket.worker]
        rollout.missing[passed.worker] = missing
        return passed

    def reported(self, ticket: Ticket, uid: GroupUid, attempt: int) -> Lease | None:
        """The lease that a report belongs to: a live one, or that of a foreign group, which begins and ends with its
        report. A group is foreign if no data source has its uid, nor a lease. None if it was rejected as too old, since
        production started again with its ticket; it is dropped again, and counted.

        Raises BufferStateError if the lease is over, or if the foreign group is not pending."""
        rollout = self.of(ticket)
        number = 0 if uid in rollout.leases or self._feed.has_source(uid.source) else self._ledger.number(uid)
        if ticket.evaluation or (number is not None and number >= 0):
            return rollout.live(uid, attempt)
        entry = self._ledger.entry(uid)
        if entry.state is GroupState.REJECTED and entry.reason == TOO_OLD:
            rollout.drops[TOO_OLD] += 1
            return None
        return self.past_source(ticket, [uid], foreign=True)[0]

    def past_source(self, ticket: Ticket, uids: Iterable[GroupUid], foreign: bool = False) -> list[Lease]:
        """Leases of groups that come finished, past the source and the queue; what ends them writes them, too. Raises
        BufferStateError for a group that is not pending."""
        leases = []
        for index, uid in enumerate(uids):
            entry = self._ledger.entry(uid)
            if entry.state is not GroupState.PENDING:
                what = f"group {uid} cannot be taken over: it is {entry.state}"
                hint = "a group is trained on once; one that a rollout function makes has a uid of its own, or none"
                raise BufferStateError(what, where=ticket.task, expected="a group that no step has", hint=hint)
            number, order = -1 if foreign else self._admitted + index, self._num_leases + 1 + index
            group = SampleGroup(uid=uid, samples=[], attempt=entry.attempt + 1, incarnation=self._ledger.fencing_token)
            lease = Lease(group=group, number=number, order=order, ticket=ticket.rollout_id, worker=ticket.worker)
            leases.append(lease)
        return leases

    def finish(self, ticket: Ticket, ended: Sequence[tuple[Lease, int]], reward: float | None = None) -> None:
        """End leases that were ``reported``, or are ``past_source``: their groups are finished, of so many rows, with
        the mean reward ``reward``."""
        rollout, leases = self.of(ticket), {lease.group.uid: lease for lease, _ in ended}
        new = [lease for uid, lease in leases.items() if uid not in rollout.leases]
        if not ticket.evaluation:
            with self._ledger.transaction():
                for lease in new:
                    self._ledger.lease(lease.group.uid, lease.ticket, lease.foreign)
                for uid, lease in leases.items():
                    self._ledger.finish(uid, lease.group.attempt)
                    self._ledger.note_reward(uid, reward)
            self.finished.update(leases)
        for lease, num_rows in ended:
            rollout.finished[lease.group.uid] = num_rows
            rollout.leases.pop(lease.group.uid, None)
        rollout.missing[ticket.worker] -= len(new)
        self._num_leases += len(new)
        self._admitted += sum(not lease.foreign for lease in new)
        self.queue.remove([lease.group.uid for lease in new])

    def drop(
        self,
        ticket: Ticket,
        uid: GroupUid,
        attempt: int,
        reason: str,
        *,
        for_good: bool = False,
        reward: float | None = None,
    ) -> None:
        """Drop a group that is ``reported``; the reason is counted. for_good: the group is quarantined, and counted as
        that. reward: the group's mean reward."""
        rollout = self.of(ticket)
        if (lease := self.reported(ticket, uid, attempt)) is None:
            return
        if not ticket.evaluation:
            with self._ledger.transaction():
                if lease.foreign:
                    self._ledger.lease(uid, lease.ticket, foreign=True)
                (self._ledger.quarantine if for_good else self._ledger.reject)(uid, lease.group.attempt, reason)
                self._ledger.note_reward(uid, reward, ticket.rollout_id)
        if not lease.foreign:
            rollout.leave(uid)
        rollout.drops[QUARANTINED if for_good else reason] += 1

    def reject_too_old(self, uids: Sequence[GroupUid]) -> None:
        """Reject finished groups that no step may train on any longer."""
        with self._ledger.transaction():
            for uid in uids:
                self._ledger.reject_finished(uid, self.finished[uid].group.attempt, TOO_OLD)
        for uid in uids:
            del self.finished[uid]

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
        """Finished groups are ``chosen`` for a step, or ``surplus``, which is queued again as prompts. Returns how many
        were queued (see ``Lease.queued``)."""
        returned = [self.finished[uid] for uid in surplus]
        with self._ledger.transaction():
            self._write_returns({lease.group.uid: lease.group.attempt for lease in returned})
            self._ledger.select(chosen, rollout_id)
        return self._put_back(returned)

    def give_up(self, finished: Iterable[GroupUid], first_ticket: int | None = None) -> None:
        """Queue ``finished`` training groups again, as prompts (see ``Lease.queued``), also those of an earlier Buffer.
        first_ticket: production starts again with it, so that leased groups are queued too, and all training
        tickets forgotten."""
        leases = [self.finished.get(uid) or self.lease_of(uid) for uid in finished]
        ended = [] if first_ticket is None else self._running()
        for rollout in ended:
            leases += rollout.leases.values()
        self._write_returns({lease.group.uid: lease.group.attempt for lease in leases})
        self._put_back(leases)
        for rollout in ended:
            del self.open[rollout.ticket.task]
        if first_ticket is not None:
            self.newest_ticket = min(self.newest_ticket, first_ticket - 1)

    def progress(self) -> dict[str, Any]:
        """Counts of the ticket that was opened last, if it is open, and of the queue."""
        shown = next(reversed(self.open.values()), None)
        return {
            "task": shown.ticket.task if shown else "",
            "wanted": shown.ticket.num_groups if shown else 0,
            "leased": len(shown.leases) if shown else 0,
            "finished": len(shown.finished) if shown else 0,
            "dropped": dict(shown.drops) if shown else {},
            "queued": len(self.queue),
        }

    def has_ended(self, ticket: int) -> bool:
        """Whether a training ticket was opened and is open no longer."""
        return ticket <= self.newest_ticket and f"train_{ticket}" not in self.open

    def have_all_ended(self, last: int) -> bool:
        """Whether all training tickets up to ``last`` were opened, and none is open."""
        return last <= self.newest_ticket and not self._running()

    @property
    def num_unreleased(self) -> int:
        """Finished groups that are not released, leased ones, and those that open tickets may still lease."""
        running = self._running()
        missing = sum(max(0, number) for rollout in running for number in rollout.missing.values())
        return len(self.finished) + sum(len(rollout.leases) for rollout in running) + missing

    def selected(self, rollout_id: int) -> list[GroupUid]:
        """The finished groups that the ledger has as selected for a step."""
        return self._ledger.selected(rollout_id)

    def lease_of(self, uid: GroupUid) -> Lease:
        """What an earlier Buffer leased, made again from the data source; of a foreign group nothing can be."""
        number = self._ledger.number(uid) or 0
        group = SampleGroup(uid=uid, samples=[]) if number < 0 else self._feed.group_of(uid, number).as_prompts()
        attempt = self._ledger.entry(uid).attempt
        group = replace(group, attempt=attempt, incarnation=self._ledger.fencing_token)
        return Lease(group=group, number=number)

    def to_save(self) -> list[SampleGroup]:
        """What a restored run leases first, in the order of admission: groups that are leased, or finished and not
        trained (these as prompts), and the queue."""
        trained = GroupState.TRAINED
        held = [lease for uid, lease in self.finished.items() if self._ledger.entry(uid).state is not trained]
        for rollout in self.open.values():
            if not rollout.ticket.evaluation:
                held.extend(rollout.leases.values())
        entries = [*(entry for lease in held for entry in lease.queued), *self.queue.entries]
        return [entry.group for entry in sorted(entries, key=lambda entry: entry.number)]

    def recover(self, saved: Sequence[SampleGroup] = (), version: int = 0) -> None:
        """Begin with the ledger's pending groups as the queue.

        saved: what ``to_save`` gave of them at ``version``, with what was generated so far; the others are made again,
        as prompts, and so are those of another number of samples than this run's groups have. Raises BufferStateError
        if one of ``saved`` is not pending."""
        known = {group.uid: self._rule.on_restore(group, version) for group in saved}
        pending = self._ledger.recover()
        if other := known.keys() - set(pending):
            state = self._ledger.entry(uid := min(other)).state
            raise BufferStateError(f"the saved queue holds group {uid}, which the ledger has as {state}")
        self.newest_ticket = -1
        self.queue = GroupQueue()
        for uid in pending:
            number = self._ledger.number(uid) or 0
            group = self._feed.resize(known[uid], number) if uid in known else self.lease_of(uid).group
            self.queue.put(Admitted(group=group, number=number))
        self._admitted = self._ledger.num_admitted

    def _running(self) -> list[OpenRollout]:
        """The open training tickets."""
        return [rollout for rollout in self.open.values() if not rollout.ticket.evaluation]

    def _num_allowed(self, rollout: OpenRollout, ticket: Ticket) -> int:
        """How many groups a worker of a ticket may still lease. Raises BufferStateError if there are none."""
        if (missing := rollout.missing[ticket.worker]) <= 0:
            raise BufferStateError(
                f"{ticket.task} has {ticket.num_groups} groups, and all of them are leased or finished",
                where="get_samples",
                expected="at most buffer.ticket.num_groups, and one more for each that is rejected or given back",
                hint="report the leased groups and return; further groups are those of the next ticket, and "
                "--target-staleness sets how many tickets are in production",
            )
        return missing

    def _write_leases(self, ticket: Ticket, queued: Sequence[Admitted], drawn: Sequence[Draw]) -> list[int]:
        """Where the data source stands is written with its groups: neither is known without the other."""
        with self._ledger.transaction():
            attempts = [self._ledger.lease(entry.group.uid, ticket.rollout_id) for entry in queued]
            for draw in drawn:
                if isinstance(draw, SampleGroup):
                    attempts.append(self._ledger.lease(draw.uid, ticket.rollout_id))
                else:
                    self._ledger.pass_over(draw, ticket.rollout_id, CURRICULUM)
            if drawn:
                self._ledger.remember(POSITION, self._feed.position())
        return attempts

    def _put_back(self, leases: Sequence[Lease]) -> int:
        """Returns how many groups were queued."""
        for lease in leases:
            self.finished.pop(lease.group.uid, None)
        entries = [entry for lease in leases for entry in lease.queued]
        for entry in entries:
            self.queue.put(entry)
        return len(entries)

    def next_number(self) -> int:
        """A number that grows with each ticket, worker and selection, also over the Buffers of a run."""
        self._num_workers += 1
        return self._num_workers

    def _for_next_worker(self, ticket: Ticket) -> Ticket:
        return replace(ticket, worker=self.next_number())

    def _write_returns(self, attempts: Mapping[GroupUid, int]) -> None:
        with self._ledger.transaction():
            for uid, attempt in attempts.items():
                self._ledger.requeue(uid, attempt)

    def _lease(self, rollout: OpenRollout, worker: int, entry: Admitted, attempt: int, version: int) -> SampleGroup:
        uid, token = entry.group.uid, self._ledger.fencing_token
        prompts = entry.group.as_prompts(attempt=attempt, incarnation=token, version=version)
        self._num_leases += 1
        order, ticket = self._num_leases, rollout.ticket.rollout_id
        rollout.leases[uid] = Lease(group=prompts, number=entry.number, order=order, ticket=ticket, worker=worker)
        rollout.missing[worker] -= 1
        if oldest_version(entry.group) is None:
            return prompts.as_prompts()  # the caller may change what it got
        return self._rule.on_lease(replace(entry.group, attempt=attempt, incarnation=token, version=version), version)
