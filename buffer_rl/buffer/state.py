"""All logic of the Buffer, without Ray: which groups are queued, leased, finished and trained.

One ``BufferState`` is used by one thread at a time. Methods that change state check everything first, so
that a refused request changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from buffer_rl.buffer.calls import mutates, reads
from buffer_rl.buffer.codec import group_from_json, group_to_json
from buffer_rl.buffer.columns import BatchPlan, Cell, RowSizes, assemble
from buffer_rl.buffer.feed import DeliveredFeed, LocalFeed
from buffer_rl.buffer.ledger import Ledger, RunRecord
from buffer_rl.buffer.ledger_tables import GroupState, LedgerEntry
from buffer_rl.buffer.partial import RequeueRule
from buffer_rl.buffer.pool import DataPool, ReadRequest, RowsMeta, Writer, check_group, split_groups
from buffer_rl.buffer.pools import Pools
from buffer_rl.buffer.readers import Splitting
from buffer_rl.buffer.rollouts import POSITION, SURPLUS, GroupQueue, Lease, Rollouts
from buffer_rl.buffer.selection_metrics import selection_metrics
from buffer_rl.buffer.window import Window
from buffer_rl.data.custom import Delivery
from buffer_rl.data.source import PromptDataSource
from buffer_rl.errors import BufferRestartedError, BufferStateError, CheckpointError
from buffer_rl.plan.schedule import LOCKSTEP, Schedule
from buffer_rl.records.groups import (
    Column,
    GroupUid,
    QueueHeader,
    RolloutReport,
    RowId,
    SampleGroup,
    Ticket,
    TrainBatch,
)

FORMAT = 3
"""Version of ``state_dict``; a file of another version is refused."""


class BufferState:
    """Owner of the production of groups (``Rollouts``), of the selections with their pools, and of the ledger.

    eval_groups: makes the groups of all evaluation sets, again for each evaluation.
    groups_per_step: P, the prompt groups that one step trains on.
    rule: what groups that go back to the queue keep; where absent, their prompts alone.
    schedule: how far production runs ahead, and which groups a step takes; None if no weights are published.
    restarted: another Buffer worked with this ledger and died. Its groups wait in the queue; its pools are lost.

    Raises an error of ``buffer_rl.errors`` if the ledger's groups cannot be made again from the data source.
    """

    def __init__(
        self,
        source: PromptDataSource | DeliveredFeed | None,
        *,
        ledger: Ledger,
        groups_per_step: int,
        eval_groups: Callable[[], Sequence[SampleGroup]] = tuple,
        rule: RequeueRule | None = None,
        schedule: Schedule | None = LOCKSTEP,
        restarted: bool = False,
    ) -> None:
        self._feed = source if isinstance(source, DeliveredFeed) else LocalFeed(source)
        self.ledger = ledger
        self._groups_per_step = groups_per_step
        self._eval_groups = eval_groups
        self._rule = rule or RequeueRule()
        self._schedule = schedule
        self._window: Window | None = None
        if schedule is not None and schedule.by_window:
            self._window = Window(groups_per_step, schedule.window(groups_per_step))
        self._record = RunRecord(ledger)
        self._rollouts = Rollouts(self._feed, ledger=ledger, rule=self._rule)
        self._pools = Pools(restarted)
        if position := ledger.recall(POSITION):
            self._feed.seek(position)
        self._rollouts.recover()
        self._inherited = ledger.selections()  # of a Buffer that died, for which the driver's answer is open
        self._lost = restarted  # the groups of open tickets and selections, until production starts again
        self._opened: set[int] = set()  # tickets

    # -- rollouts ------------------------------------------------------------------------------------

    @mutates
    def generate(self, rollout_id: int, evaluation: bool = False) -> Ticket:
        """Open a ticket. One of training has as many groups as bring those that are not released to
        ``(rollout_id + 1 - v) P``, where v is the published version: P as a rule, fewer after a short step.

        Raises BufferStateError if it is open or was trained on already, if version ``rollout_id - S`` is not published,
        or if nothing is left of the budget of (S + 1) P groups."""
        groups = GroupQueue(group.as_prompts() for group in self._eval_groups()) if evaluation else GroupQueue()
        schedule = self._schedule
        ticket = Ticket(
            rollout_id=rollout_id,
            evaluation=evaluation,
            num_groups=len(groups) if evaluation else self._groups_per_step,
            version=self._record.version,
            incarnation=self.ledger.fencing_token,
            max_staleness=None if schedule is None else schedule.max_staleness,
            mixes_versions=schedule is not None and schedule.by_window and schedule.max_staleness > 0,
            keeps_tokens=self._rule.keep_tokens,
        )
        if ticket.task in self._rollouts.open or (self._window is None and ticket.task in self._pools):
            raise BufferStateError(f"{ticket.task} was opened before")
        if not evaluation:
            self._require_untrained(rollout_id)
            self._give_up_inherited([rollout_id])
            ticket = replace(ticket, num_groups=self._num_admitted(ticket))
        elif not groups:
            raise BufferStateError("there is nothing to evaluate on", hint="name a set with --eval-prompt-data")
        ticket = self._rollouts.start(ticket, groups)
        if not evaluation:
            self._opened.add(rollout_id)
        if evaluation:
            self._pools.open(ticket.task, rollout_id, None, ticket.worker)
        return ticket

    def _num_admitted(self, ticket: Ticket) -> int:
        """How many groups a training ticket is opened with."""
        per_step, schedule = self._groups_per_step, self._schedule
        if schedule is None:
            return per_step
        kept = {pool.rollout_id for pool in self._pools.of_steps(0)}
        committed = self.ledger.num_committed(self._record.version)  # by a Buffer that died, and not released
        held = self._rollouts.num_unreleased + sum(n for step, n in committed.items() if step not in kept)
        room = (ticket.rollout_id + 1 - self._record.version) * per_step - held
        if not schedule.may_start(ticket.rollout_id, self._record.version) or room <= 0:
            raise BufferStateError(
                f"{ticket.task} has no slots: {held} groups are not released, and version {self._record.version} is "
                "published",
                where="generate",
                expected=f"version {ticket.rollout_id - schedule.target} or later, and at most "
                f"{(schedule.target + 1) * per_step} groups at a time",
                hint="train on the oldest step, commit and release it",
            )
        return room if self._window is not None else per_step

    @reads
    def get_headers(self) -> list[QueueHeader]:
        """What a buffer filter sees: the queue's groups, the next one first."""
        return self._rollouts.headers()

    @mutates
    def get_samples(
        self, ticket: Ticket, num_samples: int, chosen: Sequence[GroupUid] | None = None
    ) -> list[SampleGroup]:
        """Lease up to ``num_samples`` groups: from the queue first, then from the data source.

        chosen: which queued groups to take, in this order, in place of the first ones; those that are no longer
        queued are passed over. In an asynchronous run a ticket leases no more groups than it was opened with, but for
        those that replace rejected ones; BufferStateError says so. Raises DeliveryNeeded, with nothing leased, where a data source of the user's own must
        ``deliver`` first.
        """
        if self._window is not None and not ticket.evaluation and num_samples > 0:
            num_missing = self._rollouts.of(ticket).num_missing
            if num_missing == 0:
                raise BufferStateError(
                    f"{ticket.task} has {ticket.num_groups} groups, and all of them are leased or finished",
                    where="get_samples",
                    expected="at most that many, and one more for each that is rejected or given back",
                    hint="return, or report a group first; --target-staleness sets how many tickets run at a time",
                )
            num_samples = min(num_samples, num_missing)
        groups = self._rollouts.lease(ticket, num_samples, chosen, self._record.version)
        if not ticket.evaluation:
            self._leased(group.uid for group in groups)
        return groups

    @mutates
    def deliver(self, delivery: Delivery) -> None:
        """Take in a batch of the user's data source; a repeat is ignored (see ``DeliveredFeed.deliver``)."""
        fresh = LedgerEntry(state=GroupState.PENDING)
        self._delivered().deliver(delivery, lambda uid: self.ledger.entry(uid) != fresh)

    @mutates
    def set_source_length(self, num_rows: int) -> None:
        """Set the length of the user's data source."""
        self._delivered().set_num_rows(num_rows)

    @reads
    def get_source_state(self) -> tuple[int, bytes]:
        """Where the user's data source stands (see ``DeliveredFeed.source_state``)."""
        return self._delivered().source_state()

    @mutates
    def add_samples(
        self, ticket: Ticket, leases: Sequence[tuple[GroupUid, int]], groups: Sequence[SampleGroup] = ()
    ) -> None:
        """Give leased groups (uid and attempt) back to the queue, where each takes its place in the order of
        admission.

        groups: the same groups with what was generated of them so far, which the queue keeps where
        ``ticket.keeps_tokens`` says so (see ``RequeueRule.on_requeue``). Without it, a group is queued as prompts.
        """
        self._rollouts.requeue(ticket, leases, groups)
        self._left(uid for uid, _ in leases)

    @mutates
    def finish(
        self,
        ticket: Ticket,
        uid: GroupUid,
        attempt: int,
        row_ids: Sequence[RowId],
        columns: Mapping[str, Column | Cell],
        sizes: RowSizes | None = None,
    ) -> None:
        """Store a finished group's columns and end its lease. Readers of the rollout's pool get it at once.

        A foreign group, whose uid no data source and no lease has, is taken over as those of ``import_groups`` are.
        sizes: needed where tokens or loss masks are in the object store."""
        rollout = self._rollouts.of(ticket)
        foreign = self._rollouts.is_foreign(rollout, uid)
        lease = None if foreign else rollout.live(uid, attempt)
        sizes = check_group(uid, row_ids, columns, sizes)
        if lease is not None:
            self._rollouts.finish(rollout, lease)
        else:
            self._rollouts.require_pending(ticket, [uid])
            (lease,) = self._rollouts.import_groups(rollout, [uid], foreign=True)
            self._leased([uid])
        self._pools.store(evaluation=ticket.evaluation).put(uid, row_ids, columns, sizes)
        self._finished(ticket, lease)

    def _finished(self, ticket: Ticket, lease: Lease) -> None:
        """A finished group, whose columns are stored, joins what it is certain to be part of."""
        self._pools.revision += 1
        if self._window is not None and not ticket.evaluation:
            self._window.finish(lease.group.uid)
            self._join_certain()
        elif (pool := self._pools.find(ticket.task)) is not None:
            pool.join(lease.group.uid, lease.order)

    def _join_certain(self) -> None:
        """In an asynchronous run: groups that the open selection is certain to be closed with join it."""
        if self._window is None or (pool := self._open_selection()) is None:
            return
        for uid in self._window.certain():
            if uid not in pool.selection:
                pool.join(uid, self._rollouts.finished[uid].order)

    def _open_selection(self) -> DataPool | None:
        return next((pool for pool in self._pools.of_steps(0) if not pool.selection.closed), None)

    def _leased(self, uids: Iterable[GroupUid]) -> None:
        if self._window is not None:
            for uid in uids:
                self._window.lease(uid)

    def _left(self, uids: Iterable[GroupUid]) -> None:
        """Groups that are live no longer, so that those behind them come forward."""
        if self._window is None:
            return
        for uid in uids:
            self._window.leave(uid)
        self._join_certain()
        self._pools.revision += 1

    @mutates
    def reject(self, ticket: Ticket, uid: GroupUid, attempt: int, reason: str) -> None:
        """Drop a leased group; the reason is counted."""
        self._rollouts.drop(ticket, uid, attempt, reason)
        self._left([uid])

    @mutates
    def quarantine(self, ticket: Ticket, uid: GroupUid, attempt: int, reason: str) -> None:
        """Drop a leased group that failed by itself, so that it is never tried again; counted as ``quarantined``."""
        self._rollouts.drop(ticket, uid, attempt, reason, for_good=True)
        self._left([uid])

    @mutates
    def count_failure(self, ticket: Ticket, uid: GroupUid, kind: str) -> tuple[int, int]:
        """Count a failed attempt at a group. Returns how many of this ``kind`` the run had, over all its workers, and
        how many of them this group had."""
        self._rollouts.of(ticket)
        return self._record.count_failure(uid, kind)

    @mutates
    def import_groups(self, ticket: Ticket, row_ids: Sequence[RowId], columns: Mapping[str, Column]) -> None:
        """Store groups that were finished elsewhere, such as in the run that recorded them. They are leased and
        finished at once, past the data source; one that waits in the queue leaves it.

        Raises BufferStateError, with nothing changed, for an evaluation, for more groups than the step trains on, or
        if one of them is not pending."""
        rollout = self._rollouts.of(ticket)
        uids = list(dict.fromkeys(row.uid for row in row_ids))
        if ticket.evaluation or len(uids) > ticket.num_groups:
            raise BufferStateError(
                f"{len(uids)} groups cannot be taken over",
                where=ticket.task,
                expected=f"a training step of at most {ticket.num_groups} groups",
                hint=f"the rows fit --rollout-batch-size {len(uids)}",
            )
        self._rollouts.require_pending(ticket, uids)
        parts = split_groups(row_ids, columns)
        leases = self._rollouts.import_groups(rollout, uids)
        self._leased(uids)
        for part, lease in zip(parts, leases, strict=True):
            self._pools.store(evaluation=False).put(*part)
            self._finished(ticket, lease)

    @mutates
    def end_ticket(self, ticket: Ticket) -> RolloutReport:
        """End a ticket: what was leased and never mentioned again is rejected as ``unreported``. An evaluation is then
        complete. The report counts its finished groups."""
        rollout = self._rollouts.of(ticket)
        if ticket.evaluation:
            pool = self._pools.of(ticket.task)
            pool.require_equal_fields(pool.selection.uids)
        self._left(self._rollouts.end(rollout))
        num_rows = 0
        if ticket.evaluation:
            pool.select(pool.selection.uids)
            num_rows = pool.num_rows
            if not rollout.finished:
                self._pools.clear(ticket.task)
        self._pools.revision += 1
        drops = dict(sorted(rollout.drops.items()))
        return RolloutReport(num_groups=len(rollout.finished), num_rows=num_rows, drops=drops)

    @mutates
    def pass_on(self, ticket: Ticket) -> Ticket:
        """The worker of an open ticket died: its leases return to the queue, as prompts; what it finished stays.
        Returns the ticket for the worker that goes on, of the groups that are still missing. Calls of the worker that
        died are refused from here on. Raises PayloadLostError if it can only be made again (``Rollouts.pass_on``)."""
        if ticket.evaluation:
            raise BufferStateError(f"{ticket.task} cannot go on", hint="its metrics are of all groups: make it again")
        leased = list(self._rollouts.of(ticket).leases)
        passed = self._rollouts.pass_on(ticket)
        self._left(leased)
        return passed

    @mutates
    def abandon(self, step: int) -> None:
        """Start production again, before ``step`` is trained on: all tickets and all selections that are not committed
        are given up, since their payloads are lost. Their leased and finished groups are pending again, as prompts, in
        their places in the queue; foreign ones are lost, and may be reported again. Evaluations go on.

        Raises BufferStateError if the step was committed."""
        self._require_untrained(step)
        committed = {uid for pool in self._pools.of_steps(0, step) for uid in pool.selection.uids}
        lost = [uid for uid in self._rollouts.finished if uid not in committed]
        for pool in self._pools.of_steps(step):
            self._pools.clear(pool.task)
        for uid in lost:
            self._pools.store(evaluation=False).drop(uid)
        self._give_up_inherited([rollout_id for rollout_id in self._inherited if rollout_id >= step])
        self._rollouts.give_up(lost)
        self._rollouts.newest_ticket = step - 1
        self._lost = False
        if self._window is not None:
            self._window = self._window.empty()
        self._pools.revision += 1

    def _give_up_inherited(self, rollout_ids: Iterable[int]) -> None:
        """What a Buffer that died had selected for these steps, and that was not trained on."""
        for rollout_id in rollout_ids:
            if rollout_id in self._inherited:
                self._rollouts.give_up(self.ledger.selected(rollout_id), tickets=False)
                self._inherited.discard(rollout_id)

    # -- selections ----------------------------------------------------------------------------------

    @mutates
    def open_selection(self, rollout_id: int) -> None:
        """Open the selection of a step, so that readers get groups that it is certain to be closed with: those of the
        ticket of this number, or in an asynchronous run of the window. One that is open stays as it is."""
        task = f"train_{rollout_id}"
        if task in self._pools:
            return
        self._require_untrained(rollout_id)
        pool = self._pools.open(task, rollout_id, self._groups_per_step, self._rollouts.next_number())
        self._join_certain()
        for lease in self._rollouts.finished.values() if self._window is None else ():
            if lease.ticket == rollout_id:
                pool.join(lease.group.uid, lease.order)
        self._pools.revision += 1

    @mutates
    def close_selection(self, rollout_id: int, last_ticket: int | None = None) -> tuple[RolloutReport | None, int]:
        """Close the selection of a step: with the groups of ``Selection.choose``, once its ticket has ended, or in an
        asynchronous run with those of ``Window.choose``. Surplus goes back to the queue as prompts, or is dropped if it
        is foreign, and counted as ``surplus``.

        last_ticket: the last one that the run opens; once it has ended, a step may be short. Returns the report, or
        None if the selection must wait, and the revision of the Buffer then."""
        task = f"train_{rollout_id}"
        if self._lost and (self._window is not None or rollout_id not in self._opened):
            raise BufferRestartedError(f"{task} was lost with an earlier Buffer", hint="it is produced again")
        self.open_selection(rollout_id)
        pool = self._pools.of(task)
        if pool.report is not None:  # a repeat, of a caller that did not get the answer
            return pool.report, self.revision
        if self._window is None:
            if task in self._rollouts.open:
                return None, self.revision
            chosen, surplus = pool.selection.choose(pool.pinned())
        else:
            surplus = []
            if (chosen_or_none := self._chosen(rollout_id, last_ticket)) is None:
                return None, self.revision
            chosen = chosen_or_none
            for uid in chosen:
                if uid not in pool.selection:
                    pool.join(uid, self._rollouts.finished[uid].order)
        finished = self._rollouts.finished
        pool.require_equal_fields(chosen, [uid for uid in chosen if finished[uid].foreign])
        staleness = self._staleness(rollout_id, chosen)
        num_foreign = sum(finished[uid].foreign for uid in surplus)
        num_queued = self._rollouts.select(rollout_id, chosen, surplus)
        if self._window is not None:
            self._window.take(chosen)
        pool.select(chosen)
        self._pools.revision += 1
        report = RolloutReport(
            num_groups=len(chosen),
            num_rows=pool.num_rows,
            drops={SURPLUS: num_foreign} if num_foreign else {},
            surplus=num_queued,
            staleness=staleness,
            metrics=self._metrics(chosen),
        )
        pool.report = report
        if not chosen:
            self._pools.clear(task)
        return report, self.revision

    def _chosen(self, step: int, last_ticket: int | None) -> list[GroupUid] | None:
        """The groups that the window gives a step. It is short only if nothing is in production, none may open and no
        publication is pending."""
        assert self._window is not None
        if (chosen := self._window.choose()) is not None:
            return chosen
        if self._record.version != step or any(not r.ticket.evaluation for r in self._rollouts.open.values()):
            return None
        if not self._rollouts.has_opened(last_ticket, step + (self._schedule.target if self._schedule else 0)):
            return None
        return self._window.choose(len(self._window))

    def _metrics(self, chosen: Iterable[GroupUid]) -> dict[str, float]:
        """Of a selection, if the step's metrics cannot be those of one ticket."""
        if self._schedule is None or not self._schedule.max_staleness:
            return {}
        return selection_metrics(self._pools.store(evaluation=False), chosen, self._window)

    def _staleness(self, step: int, chosen: Iterable[GroupUid]) -> list[int]:
        """Of each group: the step minus the oldest version of its tokens. Asserts the bound."""
        store = self._pools.store(evaluation=False)
        oldest = [store.oldest_version(uid) for uid in chosen]
        staleness = [step - version for version in oldest if version is not None]
        if self._schedule is not None and not self._rule.keep_tokens:
            worst, bound = max(staleness, default=0), self._schedule.max_staleness
            assert worst <= bound, f"step {step} would train on tokens that are {worst} versions old, above {bound}"
        return staleness

    # -- pools ---------------------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        """Grows with every change that may make rows ready for a reader."""
        return self._pools.revision

    @reads
    def plan_data(
        self,
        rollout_id: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        num_steps: int = 1,
        step: int = 0,
        splitting: Splitting = Splitting.ROWS,
        given: bool = False,
    ) -> BatchPlan:
        """The share of one data-parallel rank in one mini-batch; repeats return the same rows (see
        ``DataPool.share``). Its answers hold the payloads of a whole step, too large for the log of calls."""
        return self._pools.of(f"train_{rollout_id}").share(dp_rank, dp_size, num_steps, step, splitting, given)

    def get_data(
        self, rollout_id: int, dp_rank: int = 0, dp_size: int = 1, num_steps: int = 1, step: int = 0
    ) -> TrainBatch:
        """``plan_data`` with its payloads, which must all be in this process."""
        return assemble(self.plan_data(rollout_id, dp_rank, dp_size, num_steps, step))

    @mutates
    def take(
        self, task: str, request: ReadRequest, fields: Sequence[str] | None = None
    ) -> tuple[RowsMeta, BatchPlan | None]:
        """A deal for a replica of a reading task (see ``DataPool.get_meta``), with ``fields``, or with all that its
        rows have; None while there is none. A rollout that ended without a group has none; why is in its report."""
        if self._pools.is_empty(task):
            return RowsMeta(task=task, row_ids=[], dealt=False, ended=True, revision=self.revision), None
        meta = self._pools.of(task).get_meta(request, self.revision)
        return meta, self._pools.of(task).plan_rows(meta.row_ids, fields) if meta.dealt else None

    @mutates
    def put_fields(
        self, task: str, row_ids: Sequence[RowId], columns: Mapping[str, Column], writer: Writer | None = None
    ) -> None:
        """Add derived fields (``ref_log_probs``, ``old_log_probs``) to rows of a task (see ``DataPool.put_fields``)."""
        self._pools.of(task).put_fields(row_ids, columns, writer)
        self._pools.revision += 1

    @mutates
    def requeue_for_readers(self, task: str, reader: str) -> int:
        """A reading task's processes are replaced (see ``DataPool.requeue_for_readers``)."""
        self._pools.revision += 1
        return self._pools.of(task).requeue_for_readers(reader)

    # -- steps ---------------------------------------------------------------------------------------

    @mutates
    def clear(self, task: str) -> None:
        """Forget a task and its payloads. Unknown tasks are ignored, so that a repeat does no harm.

        Raises BufferStateError for a step that was not committed: its groups would be in no queue and in no step.
        """
        if task not in self._pools:
            return
        if task.startswith("train_") and self._pools.of(task).rollout_id not in self._record.committed:
            raise BufferStateError(f"{task} cannot be cleared: it is not committed", hint="commit it first")
        is_step = task.startswith("train_")
        if not is_step:
            self._rollouts.open.pop(task, None)
        for uid in self._pools.clear(task) if task in self._pools else ():
            if is_step:
                self._rollouts.finished.pop(uid, None)

    @mutates
    def commit(self, rollout_id: int, step: int) -> None:
        """Mark the rollout's groups as trained at ``step``. A repeat with the same step changes nothing. A Buffer that
        replaces one that died needs no pool for it: the ledger has the groups that were selected."""
        committed = self._record.committed.get(rollout_id)
        if committed is not None:
            if committed != step:
                raise BufferStateError(f"rollout {rollout_id} was committed at step {committed}, not {step}")
            return
        task = f"train_{rollout_id}"
        uids = self.ledger.selected(rollout_id) if rollout_id in self._inherited else []
        if not uids:
            selection = self._pools.of(task).selection
            if not selection.closed:
                raise BufferStateError(f"rollout {rollout_id} cannot be committed: it still runs")
            uids = selection.uids
        self.ledger.commit(uids, rollout_id, step)
        self._record.commit(rollout_id, step)

    @mutates
    def release(self, version: int) -> dict[str, Any]:
        """The weights of ``version`` are published: rollouts before it give their slots and payloads back. Returns the
        counts of ``get_progress``.

        Raises BufferStateError if one of them was not committed, or if ``version`` goes back.
        """
        if version < self._record.version:
            raise BufferStateError(f"version {version} is older than the published version {self._record.version}")
        done = self._pools.of_steps(0, version)
        for pool in done:
            if pool.rollout_id not in self._record.committed:
                raise BufferStateError(f"version {version} cannot be released: {pool.task} is not committed")
        self._record.set_version(version)
        for pool in done:
            self.clear(pool.task)
        self._pools.revision += 1
        return self.get_progress()

    # -- the rest ------------------------------------------------------------------------------------

    @reads
    def get_metadata(self) -> dict[str, Any]:
        """The user's notes."""
        return self._record.metadata

    @mutates
    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Merge JSON values into the notes. Raises BufferStateError for anything that is not JSON."""
        self._record.update_metadata(metadata)

    @reads
    def get_buffer_length(self) -> int:
        """Number of groups in the queue."""
        return len(self._rollouts.queue)

    @reads
    def get_num_rollout_per_epoch(self, num_epochs: int = 1) -> int:
        """Whole steps in one pass over the training data, or in ``num_epochs`` of them together: at least 1. A step may
        begin in one epoch and end in the next."""
        return max(1, num_epochs * num_rows // self._groups_per_step) if (num_rows := self._feed.num_rows()) else 0

    def get_progress(self) -> dict[str, Any]:
        """Counts for a display: of the newest open rollout, and of the queue."""
        shown = next(reversed(self._rollouts.open.values()), None)
        return {
            "task": shown.ticket.task if shown else "",
            "wanted": shown.wanted if shown else 0,
            "leased": len(shown.leases) if shown else 0,
            "finished": len(shown.finished) if shown else 0,
            "dropped": dict(shown.drops) if shown else {},
            "queued": len(self._rollouts.queue),
            "version": self._record.version,
            "incarnation": self.ledger.fencing_token,
        }

    def state_dict(self) -> dict[str, Any]:
        """JSON values for a checkpoint, which has the ledger beside them. Groups that are leased or finished but not
        trained are saved as prompts, among those of the queue, in the order in which they were admitted."""
        return {
            "format": FORMAT,
            "version": self._record.version,
            "queue": [group_to_json(group) for group in self._rollouts.to_save()],
            "source": self._feed.state_dict(),
            "metadata": self._record.metadata,
        }

    def load_state_dict(self, state: Mapping[str, Any], restore_ledger: Callable[[], None]) -> None:
        """Continue from what ``state_dict`` returned, and from the ledger of the same moment, which
        ``restore_ledger`` brings back. Raises CheckpointError if they do not fit each other or this run."""
        if state.get("format") != FORMAT:
            raise CheckpointError(f"the Buffer's state has format {state.get('format')!r}", expected=str(FORMAT))
        if self._rollouts.open or self._pools:
            raise BufferStateError("a Buffer that is at work cannot load another state")
        self._feed.load_state_dict(state["source"])
        restore_ledger()
        self._record.restore(int(state["version"]), state["metadata"])
        if position := self._feed.position():
            self.ledger.remember(POSITION, position)
        try:
            self._rollouts.recover([group_from_json(group) for group in state["queue"]], self._record.version)
            self._inherited = self.ledger.selections()
        except BufferStateError as error:
            raise CheckpointError(f"the Buffer's state and its ledger differ: {error.what}") from error

    def _require_untrained(self, rollout_id: int) -> None:
        if rollout_id in self._record.committed:
            raise BufferStateError(f"rollout {rollout_id} was trained on at step {self._record.committed[rollout_id]}")

    def _delivered(self) -> DeliveredFeed:
        if not isinstance(self._feed, DeliveredFeed):
            raise BufferStateError("this Buffer reads its data itself", hint="there is no --data-source-path")
        return self._feed
