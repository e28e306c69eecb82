"""Which finished groups a reading task of a pool gets next, and how rows are split over data-parallel ranks.

``Ready`` is an ordered queue of groups whose fields are all there and which the reader did not get yet. A sampler takes
whole prompt groups from its front, so that a call costs as much as it returns, however many groups wait.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from buffer_rl.errors import BufferStateError
from buffer_rl.types import GroupUid


class Splitting(StrEnum):
    """What of a batch goes to one rank as a whole: single rows; the rows of a prompt group; or groups where there are
    as many as ranks, and rows where there are fewer."""

    ROWS = "rows"
    GROUPS = "groups"
    GROUPS_OR_ROWS = "groups or rows"


def balanced_partition(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Row indices in ``num_parts`` parts whose sums of ``lengths`` (tokens a row) are about equal.

    Longest processing time first (Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17,
    1969): the largest part exceeds the best possible one by at most a third. Every row is in exactly one part; no
    part is empty where there are at least as many rows as parts; row counts may differ. Equal input gives equal
    output, and each part is in ascending order.

    Raises ValueError if ``num_parts`` is below 1 or a length is negative.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, not {num_parts}")
    if any(length < 0 for length in lengths):
        raise ValueError("lengths must not be negative")
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    # Entries are (tokens, rows, part): of equally loaded parts the one with the fewest rows takes the next row, so
    # that rows of length 0 spread too, and no part stays empty.
    heap = [(0, 0, part) for part in range(num_parts)]
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, rows, part = heapq.heappop(heap)
        parts[part].append(row)
        heapq.heappush(heap, (tokens + int(lengths[row]), rows + 1, part))
    return [sorted(part) for part in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyGroup:
    """tokens: prompt and response tokens of each of its rows."""

    uid: GroupUid
    tokens: list[int]


Ready = OrderedDict[GroupUid, ReadyGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """The request of a reading task: about ``num_rows`` rows, as rank ``dp_rank`` of ``dp_size``.

    reader: name of the reading task, such as ``ref_log_probs``; every row goes to each task once.
    fields: those that the rows must have. produces: those that the task adds to them.
    sampler: ``group``, or ``balanced`` for ranks that work in step.
    is_final: rows that the task got are part of the step, whatever finishes later.
    prefetch_reserve: the request prefetches a full batch, and only where this many more batches are ready for other
    processes. What is ready in a closed pool counts as full. None: it takes any ready rows.
    """

    reader: str
    fields: frozenset[str]
    num_rows: int
    produces: frozenset[str] = frozenset()
    sampler: str = "group"
    dp_rank: int = 0
    dp_size: int = 1
    is_final: bool = False
    prefetch_reserve: int | None = None

    def check(self) -> None:
        """Raises BufferStateError for less than one row, or a rank that does not exist."""
        if self.num_rows < 1:
            raise BufferStateError(f"{self.num_rows} rows were asked for", expected="at least 1")
        if not 0 <= self.dp_rank < self.dp_size:
            raise BufferStateError(f"rank {self.dp_rank} of {self.dp_size} does not exist")


class Sampler(Protocol):
    """Deals ready groups of one pool to one reader, which may have several ranks."""

    def next_ready(self, ready: Ready, request: ReadRequest, closed: bool) -> list[GroupUid]:
        """Remove groups from ``ready`` and return them; none if there are not enough yet.

        closed: no further groups will come, so what is there must do."""
        ...

    def holds_back(self, request: ReadRequest) -> bool:
        """Whether groups that left ``ready`` still wait for the request's rank."""
        ...

    def withdraw(self, uids: Collection[GroupUid]) -> None:
        """These groups left the pool."""
        ...


class GroupSampler:
    """Groups in the order in which they became ready, to the first request: as many as fit into the rows asked for,
    at least one."""

    def next_ready(self, ready: Ready, request: ReadRequest, closed: bool) -> list[GroupUid]:
        if (
            request.prefetch_reserve is not None
            and _num_batches(ready, request.num_rows, closed) <= request.prefetch_reserve
        ):
            return []
        chosen: list[GroupUid] = []
        rows = 0
        while ready:
            uid, group = next(iter(ready.items()))
            rows += len(group.tokens)
            if chosen and rows > request.num_rows:
                break
            chosen.append(uid)
            del ready[uid]
        return chosen

    def holds_back(self, request: ReadRequest) -> bool:
        return False

    def withdraw(self, uids: Collection[GroupUid]) -> None:
        pass


@dataclass(slots=True)
class BalancedSampler:
    """Equal work for every rank: once there are rows for all ranks, the groups are dealt out so that each rank has
    about as many tokens, and a rank's k-th call gets its part of the k-th deal, in any order of calls, and whatever its
    ``prefetch_reserve`` says.

    In the last deal a rank may get nothing, if there are fewer groups than ranks. The first request says how many ranks
    there are; one that says otherwise is refused.
    """

    _deals: list[list[list[GroupUid]]] = field(default_factory=list)
    _next_deal: dict[int, int] = field(default_factory=dict)
    _dp_size: int | None = None

    def next_ready(self, ready: Ready, request: ReadRequest, closed: bool) -> list[GroupUid]:
        self._dp_size = self._dp_size or request.dp_size
        if request.dp_size != self._dp_size:
            raise BufferStateError(
                f"rank {request.dp_rank} of {request.dp_size} asks, and groups are dealt to {self._dp_size} ranks",
                expected=f"dp_size {self._dp_size}, as in the first request",
            )
        rank = request.dp_rank
        number = self._next_deal.get(rank, 0)
        while number < len(self._deals) or self._deal(ready, request, closed):
            number += 1
            self._next_deal[rank] = number
            if part := self._deals[number - 1][rank]:
                return part
        return []

    def holds_back(self, request: ReadRequest) -> bool:
        later = self._deals[self._next_deal.get(request.dp_rank, 0) :]
        return any(deal[request.dp_rank] for deal in later)

    def withdraw(self, uids: Collection[GroupUid]) -> None:
        self._deals = [[[uid for uid in part if uid not in uids] for part in deal] for deal in self._deals]

    def _deal(self, ready: Ready, request: ReadRequest, closed: bool) -> bool:
        chosen: list[ReadyGroup] = []
        rows, wanted = 0, request.num_rows * request.dp_size
        for group in ready.values():
            if rows >= wanted and len(chosen) >= request.dp_size:
                break
            chosen.append(group)
            rows += len(group.tokens)
        if not chosen or ((rows < wanted or len(chosen) < request.dp_size) and not closed):
            return False
        for group in chosen:
            del ready[group.uid]
        parts = balanced_partition([sum(group.tokens) for group in chosen], request.dp_size)
        self._deals.append([[chosen[index].uid for index in part] for part in parts])
        return True


def _num_batches(ready: Ready, num_rows: int, closed: bool) -> int:
    """How many full batches ``GroupSampler`` would make of ``ready``; the last one counts in a closed pool."""
    batches = rows = 0
    for group in ready.values():
        if rows and rows + len(group.tokens) > num_rows:
            batches, rows = batches + 1, 0
        rows += len(group.tokens)
        if rows >= num_rows:
            batches, rows = batches + 1, 0
    return batches + (closed and rows > 0)


SAMPLERS: dict[str, Callable[[], Sampler]] = {"group": GroupSampler, "balanced": BalancedSampler}
"""By the name that a reader gives."""


class Reader:
    """A named task that reads ``fields`` of every group, each group once, as soon as those fields are there, and adds
    ``produces`` to it.

    sampler: which groups it gets; raises BufferStateError for an unknown name (see ``SAMPLERS``).
    is_final: its groups are part of the step once it got them, because its effect cannot be undone.
    generation: how often its process was replaced.
    """

    def __init__(self, request: ReadRequest) -> None:
        if request.sampler not in SAMPLERS:
            raise BufferStateError(f"there is no sampler {request.sampler!r}", expected=f"one of {', '.join(SAMPLERS)}")
        self.fields = request.fields
        self.produces = request.produces
        self.is_final = request.is_final
        self.generation = 0
        self.sampler = request.sampler
        self._sampler = SAMPLERS[request.sampler]()
        self._ready: OrderedDict[GroupUid, ReadyGroup] = OrderedDict()
        self._marked: dict[GroupUid, ReadyGroup] = {}
        self._delivered: dict[GroupUid, None] = {}

    def mark_ready(self, uid: GroupUid, tokens: list[int]) -> bool:
        """All fields of the group are there. False if it was marked before."""
        if uid in self._marked:
            return False
        self._marked[uid] = self._ready[uid] = ReadyGroup(uid=uid, tokens=tokens)
        return True

    def next_ready(self, request: ReadRequest, closed: bool) -> list[GroupUid]:
        """The next groups for the request, none if there are not enough yet; they count as delivered."""
        uids = self._sampler.next_ready(self._ready, request, closed)
        self._delivered.update((uid, None) for uid in uids)
        return uids

    @property
    def num_marked(self) -> int:
        """Groups that were marked ready, delivered or not."""
        return len(self._marked)

    def is_done(self, request: ReadRequest, all_marked: bool) -> bool:
        """Whether nothing will come for the request's rank any more. all_marked: every group of the closed pool was
        marked ready."""
        return all_marked and not self._ready and not self._sampler.holds_back(request)

    def delivered(self) -> list[GroupUid]:
        """The groups that were delivered, in that order."""
        return list(self._delivered)

    def withdraw(self, uids: Iterable[GroupUid]) -> None:
        """These groups left the pool."""
        gone = set(uids)
        self._sampler.withdraw(gone)
        for uid in gone:
            self._marked.pop(uid, None)
            self._ready.pop(uid, None)
            self._delivered.pop(uid, None)

    def requeue(self, uids: Iterable[GroupUid]) -> int:
        """Redeliver these groups: the process that had them is replaced. Returns how many there are."""
        self.generation += 1
        again = [uid for uid in uids if uid in self._delivered]
        for uid in reversed(again):
            del self._delivered[uid]
            self._ready[uid] = self._marked[uid]
            self._ready.move_to_end(uid, last=False)
        return len(again)
