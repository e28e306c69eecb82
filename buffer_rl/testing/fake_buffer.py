"""A Buffer in memory for tests of rollout functions: leases given groups and records every report."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from buffer_rl.errors import BufferStateError
from buffer_rl.records.groups import GroupUid, SampleGroup, Ticket


class FakeBuffer:
    """Implements ``buffer_rl.kinds.rollout.RolloutBuffer`` over ``groups``, in their order.

    Unlike the real one it runs out: it then leases fewer groups than asked, and at last none.

    ticket: the rollout that it works for. leased: uids in lease order. finished: groups in report order. rejected:
    (group, reason) in report order; quarantined likewise.
    returned: groups given back with ``add_samples``, which are leased again first.
    progressed_at: see ``RolloutBuffer``.
    """

    def __init__(self, groups: Iterable[SampleGroup], ticket: Ticket) -> None:
        self.ticket = ticket
        self._queue: deque[SampleGroup] = deque()
        self._source: deque[SampleGroup] = deque(groups)
        self._live: set[GroupUid] = set()
        self._metadata: dict[str, Any] = {}
        self._version = ticket.version
        self.leased: list[GroupUid] = []
        self.finished: list[SampleGroup] = []
        self.rejected: list[tuple[SampleGroup, str]] = []
        self.quarantined: list[tuple[SampleGroup, str]] = []
        self.failures: Counter[tuple[str, GroupUid]] = Counter()
        self.returned: list[SampleGroup] = []
        self.progressed_at = 0.0

    @property
    def finished_uids(self) -> list[GroupUid]:
        """Uids of the finished groups, sorted."""
        return sorted(group.uid for group in self.finished)

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        """Lease up to ``num_samples`` groups."""
        taken: list[SampleGroup] = []
        while len(taken) < num_samples and (self._queue or self._source):
            taken.append((self._queue or self._source).popleft())
        for group in taken:
            self._live.add(group.uid)
            self.leased.append(group.uid)
            self._version = max(self._version, group.version or 0)
        self.progressed_at = time.monotonic()
        return taken

    def add_samples(self, groups: Sequence[SampleGroup]) -> None:
        """Give leased groups back."""
        for group in groups:
            self._end(group)
            self.returned.append(group)
            self._queue.append(group.as_prompts())

    def encode(self, group: SampleGroup) -> Any:
        """The group itself: nothing is stored here."""
        return group

    def finish(self, group: SampleGroup, encoded: Any = None) -> None:
        """Report a finished group."""
        self._end(group)
        self.finished.append(group)

    def reject(self, group: SampleGroup, reason: str) -> None:
        """Drop a leased group."""
        self._end(group)
        self.rejected.append((group, reason))

    def quarantine(self, group: SampleGroup, reason: str) -> None:
        """Drop a leased group for good."""
        self._end(group)
        self.quarantined.append((group, reason))

    def count_failure(self, group: SampleGroup, kind: str) -> tuple[int, int]:
        """Count a failed attempt."""
        self.failures[kind, group.uid] += 1
        return sum(n for (k, _), n in self.failures.items() if k == kind), self.failures[kind, group.uid]

    def get_pending(self, uids: Sequence[GroupUid]) -> list[GroupUid]:
        """Those of the groups that were never leased here: this Buffer takes no foreign ones."""
        return [uid for uid in uids if uid not in self.leased]

    def get_version(self) -> int:
        """The newest one of the ticket and of the leases."""
        return self._version

    def get_buffer_length(self) -> int:
        """Number of groups in the queue."""
        return len(self._queue)

    def get_metadata(self) -> dict[str, Any]:
        """The notes."""
        return dict(self._metadata)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Merge ``metadata`` into the notes."""
        self._metadata.update(metadata)

    async def aget_samples(self, num_samples: int) -> list[SampleGroup]:
        return self.get_samples(num_samples)

    async def aadd_samples(self, groups: Sequence[SampleGroup]) -> None:
        self.add_samples(groups)

    async def afinish(self, group: SampleGroup, encoded: Any = None) -> None:
        self.finish(group)

    async def areject(self, group: SampleGroup, reason: str) -> None:
        self.reject(group, reason)

    async def aquarantine(self, group: SampleGroup, reason: str) -> None:
        self.quarantine(group, reason)

    async def acount_failure(self, group: SampleGroup, kind: str) -> tuple[int, int]:
        return self.count_failure(group, kind)

    async def aget_pending(self, uids: Sequence[GroupUid]) -> list[GroupUid]:
        return self.get_pending(uids)

    async def aget_version(self) -> int:
        return self.get_version()

    def _end(self, group: SampleGroup) -> None:
        if group.uid not in self._live:
            raise BufferStateError(f"group {group.uid} is not leased", where=self.ticket.task)
        self._live.discard(group.uid)
        self.progressed_at = time.monotonic()
