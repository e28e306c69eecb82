"""The ``buffer`` that a rollout function receives: its ticket's groups, leased and reported."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.codec import Columns, RowIds, for_queue
from buffer_rl.buffer.columns import RowSizes
from buffer_rl.buffer.queue import check_versions
from buffer_rl.buffer.state import BufferState
from buffer_rl.cluster.calling import blocking
from buffer_rl.data.custom import DeliveryNeeded
from buffer_rl.errors import RolloutError
from buffer_rl.kinds.rollout import as_leased_group, check_statuses
from buffer_rl.observe.pulse import progress
from buffer_rl.records.groups import NO_UID, Column, GroupUid, QueueHeader, RowId, Sample, SampleGroup, Ticket
from buffer_rl.records.utf8 import lone_surrogate

FOREIGN = "foreign"
"""The source in the uid of a group that the rollout function made without one: its row counts those of the rollout, its
epoch is the rollout's number."""


class GroupEncoder(Protocol):
    """Turns a group that user code filled into rows and columns."""

    def encode(self, group: SampleGroup, evaluation: bool) -> tuple[list[RowId], dict[str, Column]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedGroup:
    """One group's rows and columns, ready to be reported."""

    row_ids: RowIds
    columns: Columns
    sizes: RowSizes


ChooseQueued = Callable[[list[QueueHeader], int], list[GroupUid]]
"""A buffer filter: of the queue's headers, which groups to lease next, in order."""


class RolloutClient:
    """The ``buffer`` of one rollout (see ``buffer_rl.kinds.rollout.RolloutBuffer``).

    It records its leases, so that plain lists of samples can become groups again, marks foreign groups, and checks the
    status of each reported sample.

    ticket: the rollout that this buffer works for. deliver: has a batch of at most so many groups delivered to the
    Buffer, if that does not read its data itself. where: names the rollout function in errors. on_lease: called with
    each leased group. reward_of: the mean reward of a group, if the Buffer keeps it.
    groups: by uid, the newest lease. finished: by uid, what was reported. progressed_at: see ``RolloutBuffer``.
    """

    def __init__(
        self,
        client: BufferClient,
        ticket: Ticket,
        encoder: GroupEncoder,
        choose: ChooseQueued | None = None,
        deliver: Callable[[int], Awaitable[None]] | None = None,
        *,
        where: str = "",
        on_lease: Callable[[SampleGroup], object] | None = None,
        reward_of: Callable[[SampleGroup], float | None] = lambda group: None,
    ) -> None:
        self._client = client
        self.ticket = ticket
        self._encoder = encoder
        self._choose = None if ticket.evaluation else choose
        self._deliver = deliver
        self._where = where or ticket.task
        self._on_lease = on_lease
        self._reward_of = reward_of
        self._unnamed = itertools.count()
        self.groups: dict[GroupUid, SampleGroup] = {}
        self.finished: dict[GroupUid, SampleGroup] = {}
        self.progressed_at = 0.0

    async def aget_samples(self, num_samples: int) -> list[SampleGroup]:
        """Lease groups; the queued ones that the buffer filter chooses come first."""
        chosen = None
        if self._choose is not None and (headers := await self._client.acall(BufferState.get_headers)):
            chosen = await asyncio.to_thread(self._choose, headers, num_samples)
        while True:  # each round has a batch delivered, which is not empty
            try:
                groups = await self._client.acall(BufferState.get_samples, self.ticket, num_samples, chosen)
                for group in groups:
                    if self._on_lease is not None:
                        self._on_lease(group)
                    self.groups[group.uid] = group
                self._progressed()
                return groups
            except DeliveryNeeded as needed:
                if self._deliver is None:
                    raise
                await self._deliver(needed.num_groups)

    async def aadd_samples(self, groups: Sequence[SampleGroup | Sequence[Sample]]) -> None:
        """Give leased groups back; a list of a group's samples stands for the group."""
        found = [self._leased(group) for group in groups]
        leases = [(group.uid, group.attempt) for group in found]
        kept = for_queue(found) if self.ticket.keeps_tokens else ()
        await self._client.acall(BufferState.add_samples, self.ticket, leases, kept)

    def encode(self, group: SampleGroup) -> EncodedGroup:
        """The group as the Buffer stores it. Raises RolloutError for one that cannot be trained on."""
        check_statuses(self.marked(group), where=self._where)
        leased = self.groups.get(group.uid)
        check_versions(self.ticket, group, None if leased is None else leased.version)
        row_ids, columns = self._encoder.encode(group, self.ticket.evaluation)
        return EncodedGroup(row_ids=RowIds(row_ids), columns=Columns(columns), sizes=RowSizes.of(columns, len(row_ids)))

    async def afinish(self, group: SampleGroup, encoded: EncodedGroup | None = None) -> None:
        """Report a finished group."""
        rows = encoded or self.encode(group)
        report = (group.uid, group.attempt, rows.row_ids, rows.columns, rows.sizes, self._reward_of(group))
        await self._client.acall(BufferState.finish, self.ticket, *report)
        self.finished[group.uid] = group
        self._progressed()

    async def areject(self, group: SampleGroup, reason: str) -> None:
        """Drop a leased group, or a foreign one."""
        reward = self._reward_of(group)
        await self._client.acall(BufferState.reject, self.ticket, group.uid, group.attempt, reason, reward)
        self._progressed()

    async def aget_pending(self, uids: Sequence[GroupUid]) -> list[GroupUid]:
        """Those of the foreign groups that may be reported."""
        return await self._client.acall(BufferState.get_pending, list(uids))

    async def aget_version(self) -> int:
        """The version of the weights that are published."""
        return await self._client.acall(BufferState.get_version)

    async def aquarantine(self, group: SampleGroup, reason: str) -> None:
        """Drop a leased group for good."""
        await self._client.acall(BufferState.quarantine, self.ticket, group.uid, group.attempt, reason)
        self._progressed()

    async def acount_failure(self, group: SampleGroup, kind: str) -> tuple[int, int]:
        """Count a failed attempt; returns how many of this kind the run had, and how many of them the group."""
        return await self._client.acall(BufferState.count_failure, self.ticket, group.uid, kind)

    def marked(self, group: SampleGroup) -> SampleGroup:
        """The group, marked in place as foreign if this rollout did not lease it. One without a uid gets one, and so do
        its samples, which are numbered in order if all have one number."""
        if group.uid in self.groups:
            return group
        group.foreign = True
        if group.uid == NO_UID:
            group.uid = GroupUid(FOREIGN, next(self._unnamed), self.ticket.rollout_id)
        same = len({(sample.sample_index, sample.part) for sample in group}) == 1
        if surrogate := lone_surrogate(group.uid.source):
            raise RolloutError(f"the uid of a group holds {surrogate}, a lone surrogate", where=self._where)
        for number, sample in enumerate(group):
            sample.uid = sample.uid or group.uid
            sample.sample_index = number if same else sample.sample_index
        return group

    def _leased(self, group: object) -> SampleGroup:
        found = as_leased_group(group, self.groups)
        if found is None:
            what = f"{type(group).__name__} is no leased group"
            raise RolloutError(what, where="buffer.add_samples", expected="groups of this rollout")
        check_statuses(found, where=self._where)
        return found

    def _progressed(self) -> None:
        self.progressed_at = asyncio.get_running_loop().time()
        progress()

    get_samples = blocking(aget_samples)
    add_samples = blocking(aadd_samples)
    finish = blocking(afinish)
    reject = blocking(areject)
    quarantine = blocking(aquarantine)
    get_pending = blocking(aget_pending)
    get_version = blocking(aget_version)
    count_failure = blocking(acount_failure)

    def get_buffer_length(self) -> int:
        """Number of groups in the queue."""
        return self._client.call(BufferState.get_buffer_length)

    def get_metadata(self) -> dict[str, Any]:
        """The user's notes."""
        return self._client.call(BufferState.get_metadata)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Merge JSON values into the notes."""
        self._client.call(BufferState.update_metadata, dict(metadata))
