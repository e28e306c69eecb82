"""Which finished groups one step trains on, which of them a reading task gets next, and how rows are split over
data-parallel ranks.

A ticket is a batch of admissions: what a rollout function may lease. A ``Selection`` is what a step trains on. Unless a
run is asynchronous, its groups are those that finish under the ticket of the same number. A final reader may take the
first P of them, and what it took is pinned: its effect cannot be undone. When the selection closes, the pinned groups
and then those leased first are chosen, whatever finished first. An asynchronous run chooses by ``window``.

A ``Reader`` makes numbered deals of whole prompt groups for each of its replicas and keeps them: all ranks of a replica
get the same rows. A deal is taken from the front of the queue of ready groups, so that it costs as much as it returns,
however many groups wait.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from buffer_rl.errors import BufferStateError
from buffer_rl.plan.flops import RowCost
from buffer_rl.records.groups import GroupUid


class Selection:
    """The groups of one step, or of one evaluation: open while groups join it, then closed.

    num_groups: P, how many it takes; None where all that join are chosen (an evaluation). joined: its groups, in the
    order in which they joined, each with the place of its lease among all leases.

    Example:
        four, five, six = (GroupUid(source="5c1f0a9be3d2", row=row, epoch=0) for row in (4, 5, 6))
        selection = Selection(num_groups=2)
        for order, uid in ((2, six), (0, four), (1, five)):  # the order of their leases; six finished first
            selection.join(uid, order)
        assert selection.choose(pinned=()) == ([four, five], [six])
        assert selection.choose(pinned={six}) == ([six, four], [five])  # a final reader got it
    """

    def __init__(self, num_groups: int | None) -> None:
        self.num_groups = num_groups
        self.closed = False
        self.joined: dict[GroupUid, int] = {}
        self._withdrawn: set[GroupUid] = set()
        self._uids: list[GroupUid] = []  # sorted once it is closed

    def __contains__(self, uid: GroupUid) -> bool:
        return uid in self.joined

    def __len__(self) -> int:
        return len(self.joined)

    @property
    def uids(self) -> list[GroupUid]:
        """Its groups, sorted."""
        return self._uids if self.closed else sorted(self.joined)

    def join(self, uid: GroupUid, order: int) -> None:
        """A finished group. order: the place of its lease among all leases."""
        assert not self.closed, "the selection is closed"
        self.joined[uid] = order

    def choose(self, pinned: Collection[GroupUid]) -> tuple[list[GroupUid], list[GroupUid]]:
        """What it would be closed with, the ``pinned`` groups and then those leased first, and the surplus. Changes
        nothing."""
        ordered = sorted(self.joined, key=lambda uid: (uid not in pinned, self.joined[uid]))
        wanted = len(ordered) if self.num_groups is None else self.num_groups
        return ordered[:wanted], ordered[wanted:]

    def close(self, chosen: Sequence[GroupUid]) -> list[GroupUid]:
        """Fix its groups, those of ``chosen``. Returns the others, which leave it."""
        kept = set(chosen)
        surplus = [uid for uid in self.joined if uid not in kept]
        for uid in surplus:
            del self.joined[uid]
        self._withdrawn.update(surplus)
        self._uids = sorted(self.joined)
        self.closed = True
        return surplus

    def is_withdrawn(self, uid: GroupUid) -> bool:
        """Whether the group had joined and was not chosen."""
        return uid in self._withdrawn


class Splitting(StrEnum):
    """What of a batch goes to one rank as a whole: single rows; the rows of a prompt group; or groups where there are
    as many as ranks, and rows where there are fewer."""

    ROWS = "rows"
    GROUPS = "groups"
    GROUPS_OR_ROWS = "groups or rows"


class Share(NamedTuple):
    """The rows of a closed task for the data-parallel replica ``dp_rank`` of ``dp_size``, balanced by ``cost``, or by
    tokens if it is None.

    num_steps, step: the rows of mini-batch ``step`` of ``num_steps`` alone, as if they were the whole task: the groups
    are dealt, in uid order, one to each mini-batch in turn, so the first ones have one more where the number does not
    divide, and each has its share of every source. splitting: what goes to one replica as a whole. given: only the
    fields that the groups came with, without those that roles added."""

    dp_rank: int = 0
    dp_size: int = 1
    num_steps: int = 1
    step: int = 0
    splitting: Splitting = Splitting.ROWS
    given: bool = False
    cost: RowCost | None = None


ALL_ROWS = Share()


def balanced_partition(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Row indices in ``num_parts`` parts whose sums of ``lengths`` (tokens or FLOPs of each row) are about equal.

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
class ReadRequest:
    """The request of a reading task for deal ``deal`` of replica ``replica`` of ``num_replicas``, about ``num_rows``
    rows. A replica's deals are requested in order, from 0; a repeat, by another rank of the replica or of a lost call,
    is answered with the same rows, but for groups that have left the pool meanwhile (none do where ``is_final``).

    reader: name of the reading task, such as ``ref_log_probs``; every row goes to each task once.
    fields: those that the rows must have. produces: those that the task adds to them.
    together: the replicas work in step, so each deal is made for all of them at once, of about equal tokens, and all
    end at the same deal; a replica's part may have no rows. Otherwise a deal is made for the replica that asks first.
    is_final: rows that the task got are part of the step, whatever finishes later.
    prefetch_reserve: the request prefetches a full batch, and only where this many more batches are ready for other
    replicas. What is ready in a closed pool counts as full. None: it takes any ready rows. Without effect on deals that
    are made for all replicas.

    Example:
        # The second replica of two asks for its fourth deal: whole groups of at most 8 rows, or one larger group.
        ReadRequest(
            reader="ref_log_probs", fields=frozenset({"tokens"}), produces=frozenset({"ref_log_probs"}),
            num_rows=8, replica=1, num_replicas=2, deal=3,
        )
    """

    reader: str
    fields: frozenset[str]
    num_rows: int
    produces: frozenset[str] = frozenset()
    replica: int = 0
    num_replicas: int = 1
    deal: int = 0
    together: bool = False
    is_final: bool = False
    prefetch_reserve: int | None = None

    @property
    def kind(self) -> dict[str, object]:
        """What the first request of a reader fixes for the later ones, by name."""
        names = ("fields", "produces", "num_replicas", "together", "is_final")
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Raises BufferStateError for less than one row, a replica that does not exist, or a negative deal."""
        if self.num_rows < 1:
            raise BufferStateError(f"{self.num_rows} rows were asked for", expected="at least 1")
        if not 0 <= self.replica < self.num_replicas:
            raise BufferStateError(f"replica {self.replica} of {self.num_replicas} does not exist")
        if self.deal < 0:
            raise BufferStateError(f"deal {self.deal} was asked for", expected="at least 0")


class Reader:
    """A named task that reads ``fields`` of every group, each group once, as soon as those fields are there, and adds
    ``produces`` to it.

    request: its first one, whose ``kind`` all of them have. If it is ``is_final``, the reader's groups are part of the
    step once they were dealt, because its effect cannot be undone.
    generation: grows when its processes are replaced. delivered: the groups of all deals, in that order.
    """

    def __init__(self, request: ReadRequest, generation: int) -> None:
        self.request = request
        self.generation = generation
        self._deals: list[list[list[GroupUid]]] = [[] for _ in range(request.num_replicas)]
        self._marked: dict[GroupUid, list[int]] = {}  # tokens of each row
        self._ready: OrderedDict[GroupUid, list[int]] = OrderedDict()
        self.delivered: dict[GroupUid, None] = {}

    def mark_ready(self, uid: GroupUid, tokens: list[int]) -> None:
        """All fields of the group are there. A group that was marked before is passed over."""
        if uid not in self._marked:
            self._marked[uid] = self._ready[uid] = tokens

    def deal(self, request: ReadRequest, closed: bool) -> list[GroupUid] | None:
        """The groups of the deal that is asked for, which count as delivered; None while there are not enough for it.

        closed: no further groups will come, so what is there must do. Raises BufferStateError if the replica did not
        get the deal before this one."""
        made = self._deals[request.replica]
        if request.deal > len(made):
            what = f"replica {request.replica} of {request.reader!r} asks for deal {request.deal}"
            raise BufferStateError(what, expected=f"deal {len(made)}, its next one, or one before it")
        if request.deal == len(made):
            if request.together:
                self._deal_to_all(request, closed)
            else:
                self._deal_to_one(request, closed)
        return made[request.deal] if request.deal < len(made) else None

    def is_done(self, num_groups: int) -> bool:
        """Whether there will be no further deal in a closed pool of ``num_groups``."""
        return len(self._marked) == num_groups and not self._ready

    def withdraw(self, uids: Iterable[GroupUid]) -> None:
        """These groups left the pool. The deals keep their uids."""
        for uid in uids:
            self._marked.pop(uid, None)
            self._ready.pop(uid, None)
            self.delivered.pop(uid, None)

    def requeue(self, uids: Sequence[GroupUid]) -> None:
        """Redeliver these groups, of those that were delivered: the processes that had them are replaced, and ask for
        deals from 0 again."""
        self.generation += 1
        for deals in self._deals:
            deals.clear()
        for uid in reversed(uids):
            del self.delivered[uid]
            self._ready[uid] = self._marked[uid]
            self._ready.move_to_end(uid, last=False)

    def _deal_to_one(self, request: ReadRequest, closed: bool) -> None:
        """Groups in the order in which they became ready: as many as fit into the rows asked for, at least one."""
        reserve = request.prefetch_reserve
        if reserve is not None and not _has_batches(self._ready, reserve + 1, request.num_rows, closed):
            return
        chosen: list[GroupUid] = []
        rows = 0
        for uid, tokens in self._ready.items():
            rows += len(tokens)
            if chosen and rows > request.num_rows:
                break
            chosen.append(uid)
        if chosen:
            self._deals[request.replica].append(self._delivering(chosen))

    def _deal_to_all(self, request: ReadRequest, closed: bool) -> None:
        """Once there are the rows and a group for each replica: parts of about as many tokens."""
        wanted = request.num_rows * request.num_replicas
        chosen: list[GroupUid] = []
        rows = 0
        for uid, tokens in self._ready.items():
            if rows >= wanted and len(chosen) >= request.num_replicas:
                break
            chosen.append(uid)
            rows += len(tokens)
        if not chosen or ((rows < wanted or len(chosen) < request.num_replicas) and not closed):
            return
        parts = balanced_partition([sum(self._ready[uid]) for uid in chosen], request.num_replicas)
        for deals, part in zip(self._deals, parts, strict=True):
            deals.append([chosen[index] for index in part])
        self._delivering(chosen)

    def _delivering(self, uids: list[GroupUid]) -> list[GroupUid]:
        for uid in uids:
            del self._ready[uid]
            self.delivered[uid] = None
        return uids


def _has_batches(ready: Mapping[GroupUid, Sequence[int]], wanted: int, num_rows: int, closed: bool) -> bool:
    """Whether ``ready`` makes the ``wanted`` full batches of whole groups; the last one counts in a closed pool."""
    batches = rows = 0
    for tokens in ready.values():
        if rows and rows + len(tokens) > num_rows:
            batches, rows = batches + 1, 0
        rows += len(tokens)
        if rows >= num_rows:
            batches, rows = batches + 1, 0
        if batches >= wanted:
            return True
    return batches + (closed and rows > 0) >= wanted
