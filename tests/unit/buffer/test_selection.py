"""Production and selection against a model: whatever a run does, and whatever of it dies, each group is trained once.

``Model`` has what must be true of every group and step, as plain facts that it searches. ``Trial`` makes random calls
on a ``BufferState`` with its ledger in a file, and compares every answer with the model.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_entry import GroupState
from buffer_rl.buffer.partial import RequeueRule
from buffer_rl.buffer.pool import ReadRequest, Writer
from buffer_rl.buffer.state import BufferState
from buffer_rl.config import compose
from buffer_rl.data.source import PromptDataSource
from buffer_rl.errors import BufferRestartedError, BufferStateError
from buffer_rl.options import CORE_SECTIONS
from buffer_rl.types import GroupUid, RowId, SampleGroup, Status, Ticket, VersionSpan

PENDING, LEASED, FINISHED, TRAINED, REJECTED, QUARANTINED = GroupState
ROWS, SAMPLES = 5, 2
REF, POLICY = "ref_log_probs", "policy"


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
    """A rollout from its ticket to its release. phase: open, closed, trained, or lost, with the Buffer that closed it.
    got: what the processes of each reader hold. deals: the rows of each, in turn. to_write: deals of the reference
    model that lack its field, with the generation of the process that holds them."""

    ticket: Ticket
    phase: str = "open"
    drops: Counter[str] = field(default_factory=Counter)
    got: dict[str, set[GroupUid]] = field(default_factory=lambda: {REF: set(), POLICY: set()})
    deals: dict[str, list[list[RowId]]] = field(default_factory=dict)
    generation: Counter[str] = field(default_factory=Counter)
    to_write: list[tuple[int, list[RowId]]] = field(default_factory=list)
    written: set[RowId] = field(default_factory=set)


@dataclass(kw_only=True)
class Evaluation:
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
        place = len(self.admitted(*GroupState)) if uid.source == self.source else -1
        group = self.groups.setdefault(uid, Group(place=place))
        self.num_leases += 1
        group.attempt += 1
        group.state, group.rollout, group.order, group.tokens = LEASED, rollout, self.num_leases, 0
        return group

    def set(self, uids: Sequence[GroupUid], state: GroupState) -> None:
        for uid in uids:
            self.groups[uid].state, self.groups[uid].tokens = state, 0

    def selection(self, rollout: int) -> tuple[list[GroupUid], list[GroupUid]]:
        """What a step is closed with, and the surplus."""
        pinned = self.steps[rollout].got[POLICY]
        joined = sorted(self.joined(rollout), key=lambda uid: self.groups[uid].order)
        joined = [uid for uid in joined if uid in pinned] + [uid for uid in joined if uid not in pinned]
        return joined[: self.per_step], joined[self.per_step :]

    def has_room(self) -> bool:
        """Whether P groups of the budget are left."""
        held = 0
        for rollout, step in self.steps.items():
            if step.phase != "lost":
                held += self.per_step if step.phase == "open" else len(self.joined(rollout))
        return (self.staleness + 1) * self.per_step - held >= self.per_step


def columns() -> dict[str, Any]:
    ones = {"tokens": np.ones(3, np.int32), "loss_mask": np.ones(1, np.float32)}
    return {name: [value] * SAMPLES for name, value in ones.items()}


def rows_of(uid: GroupUid) -> list[RowId]:
    return [RowId(uid, index) for index in range(SAMPLES)]


def generate_more(group: SampleGroup, version: int) -> SampleGroup:
    """One token more for each sample."""
    for sample in group:
        at = sample.response_length
        sample.tokens = [*(sample.tokens or [7]), 8]
        sample.response_length, sample.status = at + 1, Status.ABORTED
        sample.rollout_log_probs = [*(sample.rollout_log_probs or []), -0.5]
        sample.weight_versions = [*sample.weight_versions, VersionSpan(version, at, at + 1)]
    return group


class Trial:
    """A run of random events. keeps: tokens, of partial rollouts. after_ref: the final reader waits for the reference
    model's field."""

    def __init__(self, options: Any, folder: Path, per_step: int, staleness: int, keeps: bool, after_ref: bool) -> None:
        self.options, self.file, self.keeps = options, folder / "ledger.sqlite", keeps
        self.fields = {REF: {"tokens"}, POLICY: {"tokens", REF} if after_ref else {"tokens"}}
        source = PromptDataSource(options)
        self.model = Model(source.source_hashes[0], per_step, staleness)
        self.eval_groups = source.get_samples(3)  # with the uids of training groups
        self.evaluation: Evaluation | None = None
        self.late: list[Ticket] = []  # whose calls are refused
        self.held: dict[GroupUid, SampleGroup] = {}  # as they were leased
        self.state = self.open_buffer(restarted=False)

    def open_buffer(self, restarted: bool) -> BufferState:
        ledger = Ledger(self.file, run="r", keep_selected=True)
        ledger.set_num_rows(self.model.source, ROWS)
        return BufferState(
            PromptDataSource(self.options),
            ledger=ledger,
            groups_per_step=self.model.per_step,
            eval_groups=lambda: self.eval_groups,
            rule=RequeueRule(keep_tokens=self.keeps),
            max_staleness=self.model.staleness,
            restarted=restarted,
        )

    def refused(self, call: Callable[..., object], *args: Any, restarted: bool = False) -> None:
        with pytest.raises(BufferStateError) as caught:
            call(*args)
        assert isinstance(caught.value, BufferRestartedError) is restarted, caught.value

    def check(self) -> None:
        """The ledger and the queue are those of the model."""
        model, groups = self.model, self.model.groups
        audit = LedgerAudit(self.file)
        try:
            assert audit.faults() == []
            states, epochs = audit.states(), audit.epochs()
        finally:
            audit.close()
        assert dict(states) == {uid: group.state for uid, group in groups.items()}
        assert [uid for uid, _ in states if uid.source == model.source] == model.admitted(*GroupState)
        assert all(sum(epoch.counts.values()) == ROWS for epoch in epochs if epoch.epoch is not None)
        headers = [(header.uid, header.attempts, header.version is not None) for header in self.state.get_headers()]
        assert headers == [(uid, groups[uid].attempt, groups[uid].tokens > 0) for uid in model.admitted(PENDING)]

    def pick(self, draw: Random, *phases: str) -> tuple[int, Step] | tuple[None, None]:
        found = [(rollout, step) for rollout, step in self.model.steps.items() if step.phase in phases]
        return draw.choice(found) if found else (None, None)

    # -- production ----------------------------------------------------------------------------------

    def generate(self, draw: Random) -> None:
        """The next step that is neither under way nor trained; also one that was lost with a Buffer."""
        model, rollout = self.model, self.model.num_trained
        if rollout > model.version and model.steps[rollout - 1].phase == "lost":
            return  # the driver publishes first
        while rollout in model.steps and model.steps[rollout].phase != "lost":
            rollout += 1
        if not model.has_room():
            return self.refused(self.state.generate, rollout)
        ticket = self.state.generate(rollout)
        assert (ticket.num_groups, ticket.version) == (model.per_step, model.version)
        model.set(model.of(FINISHED, rollout=rollout), PENDING)
        model.steps[rollout] = Step(ticket=ticket)
        self.refused(self.state.generate, rollout)

    def lease(self, draw: Random) -> None:
        """Over-sampling; sometimes of what a buffer filter chose, not all of which is queued still."""
        rollout, step = self.pick(draw, "open")
        if step is not None:
            known = list(self.model.groups)
            chosen = draw.sample(known, draw.randint(0, len(known))) if draw.random() < 0.3 else None
            self.lease_for(rollout, draw.randint(0, 2 * self.model.per_step + 1), chosen)

    def lease_for(self, rollout: int, count: int, chosen: list[GroupUid] | None = None) -> None:
        wanted = self.model.next_groups(count, chosen)
        kept = [self.model.groups[uid].tokens if uid in self.model.groups else 0 for uid in wanted]
        groups = self.state.get_samples(self.model.steps[rollout].ticket, count, chosen)
        assert [group.uid for group in groups] == wanted
        for group, tokens in zip(groups, kept, strict=True):
            leased = self.model.lease(group.uid, rollout)
            assert (group.attempt, group[0].group_index) == (leased.attempt, leased.place)
            assert [(s.prompt, s.response_length) for s in group] == [(f"p{group.uid.row}", tokens)] * SAMPLES
            self.held[group.uid] = group

    def end_lease(self, draw: Random, uid: GroupUid, fate: GroupState) -> None:
        """A live lease ends; the report of another attempt is refused, and so is a second one."""
        group, tokens = self.model.groups[uid], 0
        step = self.model.steps[group.rollout]
        self.refused(self.state.finish, step.ticket, uid, group.attempt - 1, rows_of(uid), columns())
        call: Callable[..., object] = self.state.finish
        args: tuple[Any, ...] = (step.ticket, uid, group.attempt, rows_of(uid), columns())
        if fate is PENDING:
            given: list[SampleGroup] = []
            if draw.random() < 0.6:  # what was generated so far
                given = [generate_more(self.held[uid], step.ticket.version)]
                tokens = self.held[uid][0].response_length if self.keeps else 0
            call, args = self.state.add_samples, (step.ticket, [(uid, group.attempt)], given)
        elif fate is not FINISHED:
            call, args = self.state.reject, (step.ticket, uid, group.attempt, "dull")
            if fate is QUARANTINED:
                call = self.state.quarantine
            step.drops["dull" if fate is REJECTED else "quarantined"] += 1
        call(*args)
        self.refused(call, *args)
        self.model.set([uid], fate)
        group.tokens = tokens

    def some_end(self, draw: Random, fate: GroupState) -> None:
        if leased := self.model.of(LEASED):
            self.end_lease(draw, draw.choice(leased), fate)

    def finish_foreign(self, draw: Random) -> None:
        """A group that the rollout function made, perhaps one that it handed in before."""
        rollout, step = self.pick(draw, "open")
        if step is None:
            return
        uid = GroupUid("theirs", draw.randrange(6), 0)
        args = (step.ticket, uid, 0, rows_of(uid), columns())
        if uid in self.model.groups and self.model.groups[uid].state is not PENDING:
            return self.refused(self.state.finish, *args)
        self.state.finish(*args)
        self.model.lease(uid, rollout)
        self.model.set([uid], FINISHED)

    def evaluate(self, draw: Random) -> None:
        """One call of an evaluation, which the ledger and the budget know nothing of."""
        if self.evaluation is None:
            ticket = self.state.generate(self.model.num_trained, True)
            self.evaluation = Evaluation(ticket=ticket, waiting=[group.uid for group in self.eval_groups])
        run, fate = self.evaluation, draw.choice(["lease", "lease", "finish", "finish", "reject", "back", "close"])
        self.refused(self.state.pass_on, run.ticket)
        if fate == "lease":
            count = draw.randint(0, 2)
            groups = self.state.get_samples(run.ticket, count)
            assert [(group.uid, group.attempt) for group in groups] == [(uid, 1) for uid in run.waiting[:count]]
            run.leased, run.waiting = run.leased + run.waiting[:count], run.waiting[count:]
        elif fate == "close":
            report = self.state.close_rollout(run.ticket)
            drops = run.drops + Counter(unreported=len(run.leased))
            assert (report.num_groups, report.drops, report.surplus) == (run.num_finished, drops, 0)
            self.state.clear(run.ticket.task)
            self.late.append(run.ticket)
            self.evaluation = None
        elif run.leased:
            uid = run.leased.pop(draw.randrange(len(run.leased)))
            if fate == "finish":
                self.state.finish(run.ticket, uid, 1, rows_of(uid), columns())
                run.num_finished += 1
            elif fate == "reject":
                self.state.reject(run.ticket, uid, 1, "dull")
                run.drops["dull"] += 1
            else:
                self.state.add_samples(run.ticket, [(uid, 1)])
                run.waiting = sorted([*run.waiting, uid])  # the rows of one epoch

    # -- readers -------------------------------------------------------------------------------------

    def read(self, draw: Random) -> None:
        rollout, step = self.pick(draw, "open", "closed", "trained")
        if step is not None:
            name = draw.choice([REF, POLICY])
            num_deals = len(step.deals.get(name, ()))
            self.deal(
                rollout, name, draw.randint(1, 3), draw.randint(0, num_deals) if draw.random() < 0.3 else num_deals
            )

    def deal(self, rollout: int, name: str, limit: int, number: int) -> bool:
        """The next deal of a reader, or a repeat of an earlier one. Returns whether it was told the end."""
        step, joined = self.model.steps[rollout], self.model.joined(rollout)
        deals, got = step.deals.setdefault(name, []), step.got[name]
        request = ReadRequest(
            reader=name,
            fields=frozenset(self.fields[name]),
            produces=frozenset({REF} if name == REF else ()),
            num_rows=SAMPLES * limit,
            deal=number,
            is_final=name == POLICY,
        )
        meta, _ = self.state.take(step.ticket.task, request)
        if number < len(deals):
            assert meta.row_ids == [row for row in deals[number] if row.uid in joined]
            return False
        ready = {uid for uid in joined if REF not in self.fields[name] or set(rows_of(uid)) <= step.written}
        num_offered = min(len(ready), self.model.per_step) if name == POLICY else len(ready)
        uids = list(dict.fromkeys(row.uid for row in meta.row_ids))
        assert len(uids) == min(limit, num_offered - len(got))
        assert set(uids) <= ready - got
        assert meta.row_ids == [row for uid in uids for row in rows_of(uid)]
        ended = not uids and step.phase != "open" and ready == joined
        assert (meta.dealt, meta.ended, meta.generation) == (bool(uids), ended, step.generation[name])
        if uids:
            deals.append(meta.row_ids)
            got.update(uids)
            if name == REF:
                step.to_write.append((meta.generation, meta.row_ids))
        return ended

    def write(self, draw: Random) -> None:
        """Some rows of a deal; their groups may have left the step, and the process may have been replaced."""
        rollout, step = self.pick(draw, "open", "closed", "trained")
        if step is not None and step.to_write:
            self.write_of(rollout, draw)

    def write_of(self, rollout: int, draw: Random) -> None:
        step = self.model.steps[rollout]
        generation, rows = step.to_write.pop(draw.randrange(len(step.to_write)))
        now = draw.sample(rows, draw.randint(1, len(rows)))
        if left := [row for row in rows if row not in now]:
            step.to_write.append((generation, left))
        values = [np.full(1, row.uid.row, np.float32) for row in now]
        self.state.put_fields(step.ticket.task, now, {REF: values}, Writer(reader=REF, generation=generation))
        if generation == step.generation[REF]:
            step.written |= {row for row in now if row.uid in self.model.joined(rollout)}

    def replace_reader(self, draw: Random) -> None:
        rollout, step = self.pick(draw, "open", "closed", "trained")
        if step is None:
            return
        name = draw.choice([REF, POLICY])
        lost = {uid for uid in step.got[name] if name == POLICY or not set(rows_of(uid)) <= step.written}
        assert self.state.requeue_for_readers(step.ticket.task, name) == len(lost)
        step.got[name] -= lost
        if name in step.deals:
            step.deals[name] = []
            step.generation[name] += 1

    def read_data(self, draw: Random) -> None:
        """The batch of a step, in the order of uids, and the shares of two ranks."""
        rollout, step = self.pick(draw, "open", "closed", "trained", "lost")
        if step is None:
            return
        if step.phase in ("open", "lost"):
            return self.refused(self.state.get_data, rollout, restarted=step.phase == "lost")
        rows = [row for uid in sorted(self.model.joined(rollout)) for row in rows_of(uid)]
        assert list(self.state.get_data(rollout).row_ids) == rows
        shares = [list(self.state.get_data(rollout, rank, 2).row_ids) for rank in (0, 1, 0, 1)]
        assert shares[:2] == shares[2:]
        assert sorted(shares[0] + shares[1]) == rows

    # -- steps ---------------------------------------------------------------------------------------

    def close(self, draw: Random) -> None:
        rollout, step = self.pick(draw, "open")
        if step is not None:
            self.close_step(rollout)

    def close_step(self, rollout: int) -> None:
        model, step = self.model, self.model.steps[rollout]
        chosen, surplus = model.selection(rollout)
        unreported = model.of(LEASED, rollout=rollout)
        foreign = [uid for uid in surplus if model.groups[uid].place < 0]
        report = self.state.close_rollout(step.ticket)
        assert (report.num_groups, report.num_rows) == (len(chosen), SAMPLES * len(chosen))
        assert report.drops == step.drops + Counter(unreported=len(unreported)) + Counter(surplus=len(foreign))
        assert report.surplus == len(surplus) - len(foreign)
        model.set(unreported, REJECTED)
        model.set(surplus, PENDING)
        self.late.append(step.ticket)
        step.phase = "closed"
        assert step.got[POLICY] <= set(chosen)
        step.got[REF] &= set(chosen)
        if not chosen:
            del model.steps[rollout]
            self.refused(self.state.commit, rollout, rollout + 1)

    def advance(self, draw: Random) -> None:
        """What the driver does next of the oldest step."""
        rollout, step = self.model.num_trained, self.model.steps.get(self.model.num_trained)
        if self.model.version < rollout:
            self.release(rollout)
        elif step is None:
            self.generate(draw)
        elif step.phase in ("closed", "lost"):
            self.commit(rollout)
        elif self.model.joined(rollout):
            self.refused(self.state.commit, rollout, rollout + 1)
            self.close_step(rollout)

    def commit(self, rollout: int) -> None:
        model, step = self.model, self.model.steps[rollout]
        for _ in range(2):
            self.state.commit(rollout, rollout + 1)
        self.refused(self.state.commit, rollout, rollout + 2)
        self.refused(self.state.generate, rollout)
        model.set(model.of(FINISHED, rollout=rollout), TRAINED)
        model.num_trained += 1
        step.phase = "lost" if step.phase == "lost" else "trained"

    def release(self, version: int) -> None:
        if version in self.model.steps and self.model.steps[version].phase != "lost":
            self.refused(self.state.release, version + 1)
        for _ in range(2):
            self.state.release(version)
        self.refused(self.state.release, version - 1)
        self.model.version = version
        step = self.model.steps.pop(version - 1)
        self.refused(self.state.get_data, version - 1, restarted=step.phase == "lost")

    # -- deaths --------------------------------------------------------------------------------------

    def lose_buffer(self, draw: Random) -> None:
        """Its payloads are lost, and the tokens in its queue; if it only hung, its changes are refused."""
        old, self.state = self.state, self.open_buffer(restarted=True)
        for rollout, step in list(self.model.steps.items()):
            if step.phase == "open":
                self.refused(old.get_samples, step.ticket, 1)
                self.model.set(self.model.of(LEASED, FINISHED, rollout=rollout), PENDING)
                self.late.append(self.model.steps.pop(rollout).ticket)
            step.phase = "lost"
        for group in self.model.groups.values():
            group.tokens = 0
        if self.evaluation is not None:
            self.late.append(self.evaluation.ticket)
            self.evaluation = None
        old.ledger.close()

    def lose_rollout_worker(self, draw: Random) -> None:
        rollout, step = self.pick(draw, "open")
        if step is None:
            return
        missing = max(0, self.model.per_step - len(self.model.joined(rollout)))
        ticket = self.state.pass_on(step.ticket)
        assert ticket == replace(step.ticket, num_groups=missing, worker=step.ticket.worker + 1)
        self.model.set(self.model.of(LEASED, rollout=rollout), PENDING)
        self.late.append(step.ticket)
        step.ticket = ticket

    def lose_payloads(self, draw: Random) -> None:
        rollout = draw.randint(max(0, self.model.num_trained - 1), self.model.num_trained + 2)
        if rollout < self.model.num_trained:
            return self.refused(self.state.abandon, rollout)
        for _ in range(2):
            self.state.abandon(rollout)
        if (step := self.model.steps.pop(rollout, None)) is not None:
            self.model.set(self.model.of(LEASED, FINISHED, rollout=rollout), PENDING)
            self.late.append(step.ticket)

    def call_late(self, draw: Random) -> None:
        """A worker that should be gone reports, even what another one holds by now."""
        if not self.late:
            return
        ticket = draw.choice(self.late)
        restarted = ticket.incarnation != self.state.ledger.fencing_token
        self.refused(self.state.get_samples, ticket, 1, restarted=restarted)
        self.refused(self.state.add_samples, ticket, [], restarted=restarted)
        self.refused(self.state.close_rollout, ticket, restarted=restarted)
        for uid in self.model.of(LEASED):
            key = (ticket, uid, self.model.groups[uid].attempt)
            self.refused(self.state.finish, *key, rows_of(uid), columns(), restarted=restarted)
            self.refused(self.state.reject, *key, "dull", restarted=restarted)
        if not ticket.evaluation:
            self.refused(self.state.pass_on, ticket, restarted=restarted)

    # -- to the end ----------------------------------------------------------------------------------

    def end_step(self, draw: Random) -> None:
        """From here on nothing is dropped and nothing dies, so each step gets its P groups, and all readers end."""
        model, rollout = self.model, self.model.num_trained
        if model.version < rollout:
            self.release(rollout)
        if (step := model.steps.get(rollout)) is None or step.phase == "lost":
            assert model.has_room()
            self.generate(draw)
        step = model.steps[rollout]
        if step.phase == "open":
            under_way = model.of(LEASED, FINISHED, rollout=rollout)
            self.lease_for(rollout, max(0, model.per_step - len(under_way)))
            for uid in model.of(LEASED, rollout=rollout):
                self.end_lease(draw, uid, FINISHED)
            self.close_step(rollout)
        assert len(model.joined(rollout)) <= model.per_step
        while not self.deal(rollout, REF, 9, len(step.deals.get(REF, ()))):
            pass
        while step.to_write:
            self.write_of(rollout, draw)
        while not self.deal(rollout, POLICY, 9, len(step.deals.get(POLICY, ()))):
            pass
        assert step.got[POLICY] == step.got[REF] == model.joined(rollout)
        self.commit(rollout)
        self.release(rollout + 1)

    def run_on(self, draw: Random) -> None:
        model = self.model
        under_way = model.of(PENDING, LEASED, FINISHED)
        for _ in range(len(under_way) // model.per_step + 2 * ROWS + 4):
            if not model.of(LEASED, FINISHED) and not model.admitted(PENDING) and len(model.groups) >= ROWS:
                return
            self.end_step(draw)
            self.check()
        raise AssertionError("the run does not come to the end of the data")


EVENTS: dict[str, tuple[int, Callable[[Trial, Random], None]]] = {
    "nothing": (1, lambda trial, draw: None),  # what other events shrink to
    "generate": (3, Trial.generate),
    "lease": (6, Trial.lease),
    "finish": (10, partial(Trial.some_end, fate=FINISHED)),
    "reject": (2, partial(Trial.some_end, fate=REJECTED)),
    "quarantine": (1, partial(Trial.some_end, fate=QUARANTINED)),
    "give back": (3, partial(Trial.some_end, fate=PENDING)),
    "finish foreign": (2, Trial.finish_foreign),
    "evaluate": (4, Trial.evaluate),
    "read": (6, Trial.read),
    "write": (4, Trial.write),
    "replace reader": (1, Trial.replace_reader),
    "read data": (1, Trial.read_data),
    "close": (1, Trial.close),
    "advance": (8, Trial.advance),
    "lose buffer": (1, Trial.lose_buffer),
    "lose rollout worker": (2, Trial.lose_rollout_worker),
    "lose payloads": (1, Trial.lose_payloads),
    "call late": (2, Trial.call_late),
}
SCHEDULES = st.fixed_dictionaries(
    {
        "per_step": st.integers(1, 3),
        "staleness": st.integers(0, 1),
        "keeps": st.booleans(),
        "after_ref": st.booleans(),
        "events": st.lists(
            st.tuples(
                st.sampled_from([name for name, (weight, _) in EVENTS.items() for _ in range(weight)]),
                st.integers(0, 9999),
            ),
            min_size=40,
            max_size=120,
        ),
    }
)


@cache
def options(folder: Path) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(ROWS)))
    return compose(CORE_SECTIONS)(prompt_data=str(path), n_samples_per_prompt=SAMPLES, rollout_shuffle=False)


def check_schedule(factory: pytest.TempPathFactory, events: list[tuple[str, int]], **kwargs: Any) -> Trial:
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(options(factory.getbasetemp()), Path(folder), **kwargs)
        try:
            for name, seed in events:
                EVENTS[name][1](trial, Random(seed))
                trial.check()
            trial.run_on(Random(0))
        finally:
            trial.state.ledger.close()
    return trial


@settings(max_examples=30, deadline=None, derandomize=True)
@given(schedule=SCHEDULES)
def test_whatever_happens_and_dies_every_group_is_trained_once_in_the_order_of_the_data(
    tmp_path_factory: pytest.TempPathFactory, schedule: dict[str, Any]
) -> None:
    check_schedule(tmp_path_factory, **schedule)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(schedule=SCHEDULES)
def test_so_it_is_in_many_more_schedules(tmp_path_factory: pytest.TempPathFactory, schedule: dict[str, Any]) -> None:
    check_schedule(tmp_path_factory, **schedule)
