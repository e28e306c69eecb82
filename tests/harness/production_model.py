"""What must be true of every group and step of a run, as plain facts that are searched: a model of the Buffer's
production and selection, which shares no code with it but names and types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.pool import ReadRequest
from buffer_rl.records.groups import GroupUid, RowId, SampleGroup, Status, Ticket, VersionSpan

PENDING, LEASED, FINISHED, TRAINED, REJECTED, QUARANTINED = GroupState
ROWS, SAMPLES = 5, 2
"""Of the data; of a group."""
REF, POLICY = "ref_log_probs", "policy"
"""The readers: the reference model, named as its field, and a trainer whose reads cannot be undone."""


def rows_of(uid: GroupUid) -> list[RowId]:
    """The rows of a group."""
    return [RowId(uid, index) for index in range(SAMPLES)]


def columns(version: int = 0) -> dict[str, Any]:
    """What a group is finished with. version: of its tokens."""
    ones = {"tokens": np.ones(3, np.int32), "loss_mask": np.ones(1, np.float32)}
    return {name: [value] * SAMPLES for name, value in ones.items()} | {
        "weight_version": np.full(SAMPLES, version, np.int32)
    }


def generate_more(group: SampleGroup, version: int) -> SampleGroup:
    """One token more for each sample."""
    for sample in group:
        at = sample.response_length
        sample.tokens = [*(sample.tokens or [7]), 8]
        sample.response_length, sample.status = at + 1, Status.ABORTED
        sample.rollout_log_probs = [*(sample.rollout_log_probs or []), -0.5]
        sample.weight_versions = [*sample.weight_versions, VersionSpan(version, at, at + 1)]
    return group


def request(name: str, fields: Iterable[str], limit: int, number: int) -> ReadRequest:
    """For deal ``number`` of a reader, of at most ``limit`` groups."""
    return ReadRequest(
        reader=name,
        fields=frozenset(fields),
        produces=frozenset({REF} if name == REF else ()),
        num_rows=SAMPLES * limit,
        deal=number,
        is_final=name == POLICY,
    )


@dataclass(kw_only=True)
class Group:
    """place: the number of its admission, -1 of a foreign group. order: of its newest lease, among all leases. tokens:
    how many each sample keeps in the queue."""

    place: int
    state: GroupState = PENDING
    attempt: int = 0
    rollout: int = -1
    order: int = 0
    tokens: int = 0


@dataclass(kw_only=True)
class Step:
    """A rollout from its ticket to its release. phase: open, ended (the ticket), closed, empty (closed without a
    group), trained, or lost, with the Buffer that closed it. has_pool: its selection was opened. got: what the
    processes of each reader hold. deals: the rows of each, in turn. to_write: deals of the reference model that lack
    its field, with the generation of the process that holds them."""

    ticket: Ticket
    phase: str = "open"
    has_pool: bool = False
    drops: Counter[str] = field(default_factory=Counter)
    got: dict[str, set[GroupUid]] = field(default_factory=lambda: {REF: set(), POLICY: set()})
    deals: dict[str, list[list[RowId]]] = field(default_factory=dict)
    generation: Counter[str] = field(default_factory=Counter)
    to_write: list[tuple[int, list[RowId]]] = field(default_factory=list)
    written: set[RowId] = field(default_factory=set)

    def lacks_field(self, uid: GroupUid) -> bool:
        """Whether the reference model's field is not there for all of the group's rows."""
        return not set(rows_of(uid)) <= self.written


@dataclass(kw_only=True)
class Evaluation:
    """One that runs. Its groups have the uids of training groups, and are not those."""

    ticket: Ticket
    waiting: list[GroupUid]
    leased: list[GroupUid] = field(default_factory=list)
    num_finished: int = 0
    drops: Counter[str] = field(default_factory=Counter)


class Model:
    """What must be true. per_step: P. staleness: S."""

    def __init__(self, source: str, per_step: int, staleness: int) -> None:
        self.source, self.per_step, self.staleness = source, per_step, staleness
        self.groups: dict[GroupUid, Group] = {}
        self.steps: dict[int, Step] = {}
        self.num_trained = self.version = self.num_leases = 0

    def of(self, *states: GroupState, rollout: int | None = None) -> list[GroupUid]:
        """The groups in these states, of all rollouts or of one."""
        return [u for u, g in self.groups.items() if g.state in states and rollout in (None, g.rollout)]

    def admitted(self, *states: GroupState) -> list[GroupUid]:
        """Groups of the data, in the order of admission; the pending ones are the queue."""
        own = [uid for uid in self.of(*states) if self.groups[uid].place >= 0]
        return sorted(own, key=lambda uid: self.groups[uid].place)

    def joined(self, rollout: int) -> set[GroupUid]:
        """The groups of a step's selection."""
        return set(self.of(FINISHED, TRAINED, rollout=rollout))

    def next_groups(self, count: int, chosen: Sequence[GroupUid] | None) -> list[GroupUid]:
        """What a lease of ``count`` groups gets: the first of the queue, or the ``chosen`` of it, then fresh rows."""
        queue, first = self.admitted(PENDING), len(self.admitted(*GroupState))
        taken = (queue if chosen is None else [uid for uid in chosen if uid in queue])[:count]
        fresh = range(first, first + count - len(taken))
        return taken + [GroupUid(self.source, number % ROWS, number // ROWS) for number in fresh]

    def lease(self, uid: GroupUid, rollout: int) -> Group:
        """A lease begins."""
        place = len(self.admitted(*GroupState)) if uid.source == self.source else -1
        group = self.groups.setdefault(uid, Group(place=place))
        self.num_leases += 1
        group.attempt += 1
        group.state, group.rollout, group.order, group.tokens = LEASED, rollout, self.num_leases, 0
        return group

    def set(self, uids: Sequence[GroupUid], state: GroupState) -> None:
        """The groups are in another state, and keep no tokens."""
        for uid in uids:
            self.groups[uid].state, self.groups[uid].tokens = state, 0

    def selection(self, rollout: int) -> tuple[list[GroupUid], list[GroupUid]]:
        """What a step is closed with, and the surplus."""
        pinned = self.steps[rollout].got[POLICY]
        joined = sorted(self.joined(rollout), key=lambda uid: self.groups[uid].order)
        joined = [uid for uid in joined if uid in pinned] + [uid for uid in joined if uid not in pinned]
        return joined[: self.per_step], joined[self.per_step :]

    def may_open(self, rollout: int) -> bool:
        """Whether the version that is S steps before the rollout is published."""
        return rollout - self.staleness <= self.version

    def may_start_with(self, rollout: int) -> bool:
        """Whether production may start again with this step: each one before it was trained on, or its selection is
        closed, perhaps by a Buffer that died since."""
        phases = [self.steps[step].phase if step in self.steps else "" for step in range(self.num_trained, rollout)]
        return all(phase in ("closed", "empty", "lost") for phase in phases)
