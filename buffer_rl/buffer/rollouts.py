"""The training groups between the data source and a step: the queue, the open rollouts and their leases.

Methods that change something check everything first, so that a refused request changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from buffer_rl.buffer.feed import Feed
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.partial import RequeueRule, oldest_version
from buffer_rl.buffer.queue import Admitted, GroupQueue
from buffer_rl.errors import BufferStateError
from buffer_rl.types import GroupUid, QueueHeader, SampleGroup, Ticket


@dataclass(slots=True, kw_only=True)
class Lease:
    """A leased or finished group. ``group`` holds the prompts alone; ``number`` is that of its admission."""

    group: SampleGroup
    number: int
    finished: bool = False


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
    """Owner of the queue and of the leases; the ledger is told of every change."""

    def __init__(self, feed: Feed, *, ledger: Ledger, incarnation: str, rule: RequeueRule | None = None) -> None:
        self.queue = GroupQueue()
        self.open: dict[str, OpenRollout] = {}
        self._feed = feed
        self._ledger = ledger
        self._incarnation = incarnation
        self._rule = rule or RequeueRule()
        self._admitted = 0

    def of(self, ticket: Ticket) -> OpenRollout:
        """The ticket's rollout. Raises BufferStateError if it is closed, or of another Buffer."""
        rollout = self.open.get(ticket.task)
        if ticket.incarnation != self._incarnation or rollout is None:
            raise BufferStateError(f"the report is refused: {ticket.task} is not open", hint="it came too late")
        return rollout

    def headers(self) -> list[QueueHeader]:
        """What a buffer filter sees: the queue's groups, the next one first."""
        return [self._header(group) for group in self.queue]

    def lease(self, ticket: Ticket, num_samples: int, chosen: Sequence[GroupUid] | None) -> list[SampleGroup]:
        """See ``BufferState.get_samples``."""
        rollout = self.of(ticket)
        if num_samples < 0:
            raise BufferStateError(f"{num_samples} groups were asked for", where=ticket.task)
        queue = rollout.waiting if ticket.evaluation else self.queue
        entries = queue.first(num_samples, None if ticket.evaluation else chosen)
        entries += self._admit(ticket, num_samples - len(entries))  # it may fail: before anything leaves the queue
        queue.remove([entry.group.uid for entry in entries])
        return [self._lease(rollout, entry) for entry in entries]

    def give_back(
        self, ticket: Ticket, leases: Sequence[tuple[GroupUid, int]], groups: Sequence[SampleGroup] = ()
    ) -> None:
        """See ``BufferState.add_samples``."""
        rollout = self.of(ticket)
        if len({uid for uid, _ in leases}) != len(leases):
            raise BufferStateError("a group is given back twice", where=ticket.task)
        for uid, attempt in leases:
            rollout.live(uid, attempt)
        kept = {group.uid: group for group in groups}
        for uid, attempt in leases:
            lease = rollout.leases.pop(uid)
            if ticket.evaluation:
                rollout.waiting.put(Admitted(group=lease.group, number=lease.number))
            else:
                self._ledger.requeue(uid, attempt)
                self.queue.put(Admitted(group=self._rule.queued(kept.get(uid), lease.group), number=lease.number))

    def reject(self, rollout: OpenRollout, uid: GroupUid, attempt: int, reason: str) -> None:
        """Drop a live lease; the reason is counted."""
        if not rollout.ticket.evaluation:
            self._ledger.reject(uid, attempt, reason)
        del rollout.leases[uid]
        rollout.drops[reason] += 1

    def adopt(self, rollout: OpenRollout, uids: Sequence[GroupUid]) -> None:
        """Lease and finish pending groups past the source and the queue; their payloads came from elsewhere."""
        self.queue.remove(uids)
        for uid in uids:
            attempt = self._ledger.lease(uid, rollout.ticket.rollout_id)
            self._ledger.finish(uid, attempt)
            group = SampleGroup(uid=uid, samples=[], attempt=attempt, incarnation=self._incarnation)
            rollout.leases[uid] = Lease(group=group, number=self._next_number(), finished=True)

    def choose(self, rollout: OpenRollout, pinned: Collection[GroupUid] = ()) -> list[GroupUid]:
        """The finished groups that the step trains on: those ``pinned``, then those leased first."""
        finished = [uid for uid, lease in rollout.leases.items() if lease.finished]
        wanted = len(finished) if rollout.ticket.evaluation else rollout.ticket.num_groups
        return sorted(finished, key=lambda uid: uid not in pinned)[:wanted]  # stable: else in the order of leases

    def settle(self, rollout: OpenRollout, chosen: Collection[GroupUid]) -> list[GroupUid]:
        """Finished groups beyond ``chosen`` are queued again, and returned. What was leased and never mentioned again
        is rejected as ``unreported``."""
        kept = set(chosen)
        for uid in [uid for uid, lease in rollout.leases.items() if not lease.finished]:
            self.reject(rollout, uid, rollout.leases[uid].group.attempt, "unreported")
        surplus = [uid for uid in rollout.leases if uid not in kept]
        for uid in surplus:
            lease = rollout.leases.pop(uid)
            self._ledger.requeue(uid, lease.group.attempt)
            self.queue.put(Admitted(group=lease.group, number=lease.number))
        return surplus

    def to_save(self, untrained: Sequence[Lease]) -> list[SampleGroup]:
        """What a restored run leases first, in the order of admission: groups that are selected but ``untrained``,
        leased or finished (all of these as prompts), and the queue."""
        held = [*untrained]
        for rollout in self.open.values():
            if not rollout.ticket.evaluation:
                held.extend(rollout.leases.values())
        entries = [Admitted(group=lease.group, number=lease.number) for lease in held]
        return [entry.group for entry in sorted([*entries, *self.queue.entries], key=lambda entry: entry.number)]

    def restore(self, groups: Sequence[SampleGroup], version: int) -> None:
        """Continue with ``groups``, which ``to_save`` gave at ``version``, as the queue."""
        self.queue = GroupQueue(self._rule.restored(group, version) for group in groups)
        self._admitted = len(groups)

    def _lease(self, rollout: OpenRollout, entry: Admitted) -> SampleGroup:
        ticket, uid = rollout.ticket, entry.group.uid
        attempt = 1 if ticket.evaluation else self._ledger.lease(uid, ticket.rollout_id)
        prompts = replace(entry.group.as_prompts(), attempt=attempt, incarnation=self._incarnation)
        rollout.leases[uid] = Lease(group=prompts, number=entry.number)
        if oldest_version(entry.group) is None:
            return prompts.as_prompts()  # the caller may change what it got
        return self._rule.leased(replace(entry.group, attempt=attempt, incarnation=self._incarnation), ticket.version)

    def _admit(self, ticket: Ticket, num_samples: int) -> list[Admitted]:
        """New groups of the data source."""
        if ticket.evaluation or num_samples == 0:
            return []
        return [Admitted(group=group, number=self._next_number()) for group in self._feed.take(num_samples)]

    def _next_number(self) -> int:
        self._admitted += 1
        return self._admitted - 1

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
