"""Calls on a ``BufferState`` with its ledger in a file, each compared with ``harness.production_model``: the answer, or
that it is refused. The methods that take a ``Random`` are events: of production, of readers, of steps, and deaths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.pool import Writer
from buffer_rl.buffer.queue import RequeueRule
from buffer_rl.buffer.readers import Share
from buffer_rl.buffer.selections import GENERATIONS
from buffer_rl.buffer.state import BufferState
from buffer_rl.data.source import PromptDataSource
from buffer_rl.errors import BufferRestartedError, BufferStateError, PayloadLostError
from buffer_rl.records.groups import GroupUid, SampleGroup, Ticket
from harness.production_model import (
    FINISHED,
    LEASED,
    PENDING,
    POLICY,
    REF,
    REJECTED,
    ROWS,
    SAMPLES,
    TRAINED,
    Evaluation,
    Model,
    Step,
    columns,
    generate_more,
    request,
    rows_of,
)
from harness.tickets import schedule_of


class Trial:
    """A run of events. keeps: tokens, of partial rollouts. after_ref: the final reader waits for the reference model's
    field. late: tickets whose calls are refused. held: groups as they were leased."""

    def __init__(self, options: Any, folder: Path, per_step: int, staleness: int, keeps: bool, after_ref: bool) -> None:
        self.options, self.file, self.keeps = options, folder / "ledger.sqlite", keeps
        self.fields = {REF: {"tokens"}, POLICY: {"tokens", REF} if after_ref else {"tokens"}}
        source = PromptDataSource(options)
        self.model = Model(source.source_hashes[0], per_step, staleness)
        self.eval_groups = source.get_samples(3)  # with the uids of training groups
        self.evaluation: Evaluation | None = None
        self.late: list[Ticket] = []
        self.held: dict[GroupUid, SampleGroup] = {}
        self.restarted = False
        self.cleared: set[int] = set()  # steps whose pools this Buffer had
        self.state = self.open_buffer(restarted=False)
        self.audit = LedgerAudit(self.file)

    def open_buffer(self, restarted: bool) -> BufferState:
        ledger = Ledger(self.file, run="r", keep_selected=True)
        ledger.set_num_rows(self.model.source, ROWS)
        return BufferState(
            PromptDataSource(self.options),
            ledger=ledger,
            groups_per_step=self.model.per_step,
            eval_groups=lambda: self.eval_groups,
            rule=RequeueRule(keep_tokens=self.keeps),
            schedule=schedule_of(self.model.staleness),
            restarted=restarted,
        )

    def check(self) -> None:
        """The groups' states and the queue are those of the model."""
        model, groups = self.model, self.model.groups
        states = self.audit.states()
        assert dict(states) == {uid: group.state for uid, group in groups.items()}
        assert [uid for uid, _ in states if uid.source == model.source] == model.admitted(*GroupState)
        headers = [(header.uid, header.attempts, header.version is not None) for header in self.state.get_headers()]
        assert headers == [(uid, groups[uid].attempt, groups[uid].tokens > 0) for uid in model.admitted(PENDING)]

    def check_accounts(self) -> None:
        """The ledger's history fits its states, and each epoch adds up."""
        assert self.audit.faults() == []
        epochs = [epoch for epoch in self.audit.epochs() if epoch.epoch is not None]
        assert all(sum(epoch.counts.values()) == ROWS for epoch in epochs)

    def end(self) -> None:
        """Close the files."""
        self.audit.close()
        self.state.ledger.close()

    def refused(self, call: Callable[..., object], *args: Any, restarted: bool = False) -> None:
        with pytest.raises(BufferStateError) as caught:
            call(*args)
        assert isinstance(caught.value, BufferRestartedError) is restarted, caught.value

    # -- production ----------------------------------------------------------------------------------

    def generate(self, draw: Random) -> None:
        """The next step that is neither under way nor trained; also one that was lost with a Buffer."""
        model, rollout = self.model, self.model.num_trained
        while rollout in model.steps and model.steps[rollout].phase != "lost":
            rollout += 1
        if not model.may_open(rollout):
            return self.refused(self.state.generate, rollout)
        ticket = self.state.generate(rollout)
        assert (ticket.num_groups, ticket.version) == (model.per_step, model.version)
        model.set(model.of(FINISHED, rollout=rollout), PENDING)
        model.steps[rollout] = Step(ticket=ticket)
        self.refused(self.state.generate, rollout)

    def lease(self, draw: Random, rollout: int, count: int | None = None) -> None:
        """Over-sampling; sometimes of what a buffer filter chose, not all of which is queued still."""
        known, chosen = self.model.groups, None
        if count is None:
            count = draw.randint(0, 2 * self.model.per_step + 1)
            chosen = draw.sample(list(known), draw.randint(0, len(known))) if draw.random() < 0.3 else None
        wanted = self.model.next_groups(count, chosen)
        kept = [known[uid].tokens if uid in known else 0 for uid in wanted]
        groups = self.state.get_samples(self.model.steps[rollout].ticket, count, chosen)
        assert [group.uid for group in groups] == wanted
        for group, tokens in zip(groups, kept, strict=True):
            leased = self.model.lease(group.uid, rollout)
            assert (group.attempt, group[0].group_index) == (leased.attempt, leased.place)
            assert [(s.prompt, s.response_length) for s in group] == [(f"p{group.uid.row}", tokens)] * SAMPLES
            self.held[group.uid] = group

    def end_lease(self, draw: Random, rollout: int, fate: GroupState) -> None:
        """A report on a lease of the step; that of another attempt is refused, and so is a second one."""
        if not (leased := self.model.of(LEASED, rollout=rollout)):
            return
        step, uid, tokens = self.model.steps[rollout], draw.choice(leased), 0
        attempt = self.model.groups[uid].attempt
        self.refused(self.state.finish, step.ticket, uid, attempt - 1, rows_of(uid), columns())
        call: Callable[..., object] = self.state.finish
        args: tuple[Any, ...] = (step.ticket, uid, attempt, rows_of(uid), columns(step.ticket.version))
        if fate is PENDING:
            given: list[SampleGroup] = []
            if draw.random() < 0.6:  # what was generated so far
                given = [generate_more(self.held[uid], step.ticket.version)]
                tokens = given[0][0].response_length if self.keeps else 0
            call, args = self.state.add_samples, (step.ticket, [(uid, attempt)], given)
        elif fate is not FINISHED:
            call = self.state.reject if fate is REJECTED else self.state.quarantine
            args = (step.ticket, uid, attempt, "dull")
            step.drops["dull" if fate is REJECTED else "quarantined"] += 1
        call(*args)
        self.refused(call, *args)
        self.model.set([uid], fate)
        self.model.groups[uid].tokens = tokens

    def finish_foreign(self, draw: Random, rollout: int) -> None:
        """A group that the rollout function made, perhaps one that it reported before."""
        uid = GroupUid("theirs", draw.randrange(6), 0)
        ticket = self.model.steps[rollout].ticket
        args = (ticket, uid, 0, rows_of(uid), columns(ticket.version))
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
            report = self.state.end_ticket(run.ticket)
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

    def read(self, draw: Random, rollout: int, name: str = "") -> bool:
        """The next deal of a reader, or a repeat of an earlier one. Returns whether it was told the end."""
        repeats, name = not name and draw.random() < 0.3, name or draw.choice([REF, POLICY])
        step, joined, limit = self.model.steps[rollout], self.model.joined(rollout), draw.randint(1, 3)
        task, fields = step.ticket.task, self.fields[name]
        if not step.has_pool:
            self.refused(self.state.take, task, request(name, fields, limit, 0), restarted=self.was_lost(rollout))
            return False
        deals, got = step.deals.setdefault(name, []), step.got[name]
        number = draw.randint(0, len(deals)) if repeats else len(deals)
        meta, _ = self.state.take(task, request(name, fields, limit, number))
        if number < len(deals):
            assert meta.row_ids == [row for row in deals[number] if row.uid in joined]
            return False
        ready = {uid for uid in joined if REF not in self.fields[name] or not step.lacks_field(uid)}
        num_offered = min(len(ready), self.model.per_step) if name == POLICY else len(ready)
        uids = list(dict.fromkeys(row.uid for row in meta.row_ids))
        assert len(uids) == min(limit, num_offered - len(got))
        assert set(uids) <= ready - got
        assert meta.row_ids == [row for uid in uids for row in rows_of(uid)]
        ended = not uids and step.phase not in ("open", "ended") and ready == joined
        assert (meta.dealt, meta.ended, meta.generation % GENERATIONS) == (bool(uids), ended, step.generation[name])
        if uids:
            deals.append(meta.row_ids)
            got.update(uids)
            if name == REF:
                step.to_write.append((meta.generation, meta.row_ids))
        return ended

    def write(self, draw: Random, rollout: int) -> None:
        """Some rows of a deal; their groups may have left the step, and the process may have been replaced."""
        step = self.model.steps[rollout]
        if not step.to_write:
            return
        generation, rows = step.to_write.pop(draw.randrange(len(step.to_write)))
        now = draw.sample(rows, draw.randint(1, len(rows)))
        if left := [row for row in rows if row not in now]:
            step.to_write.append((generation, left))
        values = [np.full(1, row.uid.row, np.float32) for row in now]
        self.state.put_fields(step.ticket.task, now, {REF: values}, Writer(reader=REF, generation=generation))
        if generation % GENERATIONS == step.generation[REF]:
            step.written |= {row for row in now if row.uid in self.model.joined(rollout)}

    def replace_reader(self, draw: Random, rollout: int) -> None:
        step, name = self.model.steps[rollout], draw.choice([REF, POLICY])
        if not step.has_pool:
            return self.refused(
                self.state.requeue_for_readers, step.ticket.task, name, restarted=self.was_lost(rollout)
            )
        lost = {uid for uid in step.got[name] if name == POLICY or step.lacks_field(uid)}
        assert self.state.requeue_for_readers(step.ticket.task, name) == len(lost)
        step.got[name] -= lost
        if name in step.deals:
            step.deals[name] = []
            step.generation[name] += 1

    def read_data(self, draw: Random, rollout: int) -> None:
        """The batch of a step, in the order of uids, and the shares of two ranks."""
        step = self.model.steps[rollout]
        if step.phase not in ("closed", "trained"):
            restarted = not step.has_pool and self.was_lost(rollout)
            return self.refused(self.state.get_data, rollout, restarted=restarted)
        rows = [row for uid in sorted(self.model.joined(rollout)) for row in rows_of(uid)]
        assert list(self.state.get_data(rollout).row_ids) == rows
        shares = [list(self.state.get_data(rollout, Share(rank, 2)).row_ids) for rank in (0, 1, 0, 1)]
        assert shares[:2] == shares[2:]
        assert sorted(shares[0] + shares[1]) == rows

    # -- steps ---------------------------------------------------------------------------------------

    def was_lost(self, rollout: int) -> bool:
        """Whether the Buffer takes a pool that it lacks for one of an earlier Buffer."""
        return self.restarted and rollout not in self.cleared

    def select(self, draw: Random, rollout: int) -> None:
        """Open the selection, which what is finished joins."""
        step = self.model.steps[rollout]
        for _ in range(2):
            self.state.open_selection(rollout)
        step.has_pool = True
        self.cleared.discard(rollout)

    def end_ticket(self, draw: Random, rollout: int) -> None:
        model, step = self.model, self.model.steps[rollout]
        num_finished, unreported = len(model.joined(rollout)), model.of(LEASED, rollout=rollout)
        report = self.state.end_ticket(step.ticket)
        assert (report.num_groups, report.num_rows) == (num_finished, SAMPLES * num_finished)
        assert report.drops == step.drops + Counter(unreported=len(unreported))
        model.set(unreported, REJECTED)
        self.late.append(step.ticket)
        step.phase = "ended"

    def close(self, draw: Random, rollout: int) -> None:
        """Close the selection, which must wait for its ticket."""
        model, step = self.model, self.model.steps[rollout]
        self.refused(self.state.commit, rollout, rollout + 1, restarted=not step.has_pool and self.was_lost(rollout))
        step.has_pool = True
        self.cleared.discard(rollout)
        if step.phase == "open":
            assert self.state.close_selection(rollout) == (None, self.state.revision)
            return
        chosen, surplus = model.selection(rollout)
        foreign = [uid for uid in surplus if model.groups[uid].place < 0]
        report = self.state.close_selection(rollout)[0]
        assert report is not None
        assert (report.num_groups, report.num_rows) == (len(chosen), SAMPLES * len(chosen))
        assert report.drops == ({"surplus": len(foreign)} if foreign else {})
        assert report.surplus == len(surplus) - len(foreign)
        model.set(surplus, PENDING)
        step.phase = "closed" if chosen else "empty"
        assert step.got[POLICY] <= set(chosen)
        step.got[REF] &= set(chosen)
        assert self.state.close_selection(rollout)[0] == report  # for a caller that did not get the answer
        if not chosen:
            self.refused(self.state.commit, rollout, rollout + 1)

    def advance(self, draw: Random) -> None:
        """What the driver does next of the oldest step."""
        rollout = self.model.num_trained
        if self.model.version < rollout:
            self.release(rollout)
        elif (step := self.model.steps.get(rollout)) is None:
            self.generate(draw)
        elif step.phase == "empty":
            self.abandon(rollout)
        elif step.phase in ("closed", "lost"):
            self.commit(rollout)
        elif step.phase == "ended":
            self.close(draw, rollout)
        elif len(self.model.joined(rollout)) >= self.model.per_step:
            self.end_ticket(draw, rollout)

    def commit(self, rollout: int) -> None:
        for _ in range(2):
            self.state.commit(rollout, rollout + 1)
        self.refused(self.state.commit, rollout, rollout + 2)
        self.refused(self.state.generate, rollout)
        self.model.set(self.model.of(FINISHED, rollout=rollout), TRAINED)
        self.model.num_trained += 1
        if self.model.steps[rollout].phase == "closed":
            self.model.steps[rollout].phase = "trained"

    def release(self, version: int) -> None:
        self.refused(self.state.release, version + 1)
        self.read_data(Random(0), version - 1)
        for _ in range(2):
            self.state.release(version)
        self.refused(self.state.release, version - 1)
        self.model.version = version
        if self.model.steps.pop(version - 1).has_pool:
            self.cleared.add(version - 1)
        self.refused(self.state.get_data, version - 1, restarted=self.was_lost(version - 1))

    # -- deaths --------------------------------------------------------------------------------------

    def lose_buffer(self, draw: Random) -> None:
        """Its payloads are lost, and the tokens in its queue; if it only hung, its changes are refused."""
        old, self.state = self.state, self.open_buffer(restarted=True)
        self.restarted, self.cleared = True, set()
        for rollout, step in list(self.model.steps.items()):
            if step.phase in ("open", "ended", "empty"):
                self.model.set(self.model.of(LEASED, FINISHED, rollout=rollout), PENDING)
                self.late.append(self.model.steps.pop(rollout).ticket)
            if step.phase == "open":
                self.refused(old.get_samples, step.ticket, 1)
            step.phase, step.has_pool = "lost", False
        self.model.set(self.model.of(PENDING), PENDING)
        if self.evaluation is not None:
            self.late.append(self.evaluation.ticket)
            self.evaluation = None
        old.ledger.close()
        self.check_accounts()

    def lose_rollout_worker(self, draw: Random, rollout: int) -> None:
        """Another one goes on, unless a finished group is foreign; leases are queued, what was finished stays."""
        step, joined = self.model.steps[rollout], self.model.joined(rollout)
        missing = max(0, self.model.per_step - len(joined))
        if missing and any(self.model.groups[uid].place < 0 for uid in joined):
            with pytest.raises(PayloadLostError):
                self.state.pass_on(step.ticket)
            return
        ticket = self.state.pass_on(step.ticket)
        assert replace(ticket, worker=0) == replace(step.ticket, num_groups=missing, worker=0)
        assert ticket.worker > step.ticket.worker
        self.model.set(self.model.of(LEASED, rollout=rollout), PENDING)
        self.late.append(step.ticket)
        step.ticket = ticket

    def lose_payloads(self, draw: Random) -> None:
        """Production starts again with a step; it may not leave one out."""
        rollout = draw.randint(max(0, self.model.num_trained - 1), self.model.num_trained + 2)
        if rollout < self.model.num_trained or not self.model.may_start_with(rollout):
            return self.refused(self.state.abandon, rollout)
        for _ in range(2):
            self.abandon(rollout)

    def abandon(self, rollout: int) -> None:
        """All tickets are given up, and the selections from this step on."""
        self.state.abandon(rollout)
        for number, step in list(self.model.steps.items()):
            if step.phase == "open":
                self.model.set(self.model.of(LEASED, rollout=number), PENDING)
            if number >= rollout:
                self.model.set(self.model.of(FINISHED, rollout=number), PENDING)
                self.late.append(self.model.steps.pop(number).ticket)
                if step.has_pool:
                    self.cleared.add(number)

    def call_late(self, draw: Random) -> None:
        """A worker that should be gone calls, even with what another one holds by now."""
        if not self.late:
            return
        ticket = draw.choice(self.late)
        refused = partial(self.refused, restarted=ticket.incarnation != self.state.ledger.fencing_token)
        refused(self.state.get_samples, ticket, 1)
        refused(self.state.add_samples, ticket, [])
        refused(self.state.end_ticket, ticket)
        for uid in self.model.of(LEASED):
            attempt = self.model.groups[uid].attempt
            refused(self.state.finish, ticket, uid, attempt, rows_of(uid), columns())
            refused(self.state.reject, ticket, uid, attempt, "dull")
        if not ticket.evaluation:
            refused(self.state.pass_on, ticket)

    def end_step(self, draw: Random) -> None:
        """The oldest step to its end, where nothing is dropped and nothing dies: all readers end."""
        model, rollout = self.model, self.model.num_trained
        if model.version < rollout:
            self.release(rollout)
        if rollout not in model.steps or model.steps[rollout].phase == "lost":
            self.generate(draw)
        step = model.steps[rollout]
        if step.phase == "open":
            self.lease(draw, rollout, max(0, model.per_step - len(model.of(LEASED, FINISHED, rollout=rollout))))
            while model.of(LEASED, rollout=rollout):
                self.end_lease(draw, rollout, FINISHED)
            self.end_ticket(draw, rollout)
            assert len(model.joined(rollout)) >= model.per_step
        if step.phase == "ended":
            self.close(draw, rollout)
        if step.phase == "empty":  # its ticket ended before anything was finished
            return self.abandon(rollout)
        while not self.read(draw, rollout, REF):
            pass
        while step.to_write:
            self.write(draw, rollout)
        while not self.read(draw, rollout, POLICY):
            pass
        self.read_data(draw, rollout)
        self.commit(rollout)
        self.release(rollout + 1)

    def run_to_the_end(self, draw: Random) -> None:
        """Until each group that was admitted, and each of an epoch at least, has its fate."""
        for _ in range(len(self.model.groups) + ROWS + 3):
            if not self.model.steps and not self.model.admitted(PENDING) and len(self.model.groups) >= ROWS:
                return self.check_accounts()
            self.end_step(draw)
            self.check()
        raise AssertionError("the run does not come to the end of the data")
