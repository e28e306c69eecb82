"""All logic of the Buffer, without Ray: which groups are queued, leased, finished and trained.

One ``BufferState`` is used by one thread at a time. Methods that change state check everything first, so
that a refused request changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from buffer_rl.buffer.calls import mutates, reads
from buffer_rl.buffer.codec import group_from_json, group_to_json
from buffer_rl.buffer.columns import BatchPlan, Cell, RowSizes, assemble
from buffer_rl.buffer.feed import DeliveredFeed, Feed, LocalFeed
from buffer_rl.buffer.ledger import Ledger, RunRecord
from buffer_rl.buffer.ledger_tables import GroupState, LedgerEntry
from buffer_rl.buffer.pool import ReadRequest, RowsMeta, Writer, check_group, split_groups
from buffer_rl.buffer.queue import RequeueRule
from buffer_rl.buffer.readers import ALL_ROWS, Share
from buffer_rl.buffer.rollouts import POSITION, Rollouts
from buffer_rl.buffer.selections import Selections
from buffer_rl.data.custom import Delivery, DeliveryRequest
from buffer_rl.data.source import PromptDataSource
from buffer_rl.errors import BufferStateError, CheckpointError
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
    """The Buffer's operations: on the production of groups (``Rollouts``: queue, tickets, leases), on the selections
    and their pools (``Selections``), and on the run's record in the ledger (``RunRecord``).

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
        self._feed = source if isinstance(source, Feed) else Feed() if source is None else LocalFeed(source, ledger)
        self.ledger = ledger
        self._groups_per_step = groups_per_step
        self._eval_groups = eval_groups
        self._rule = rule or RequeueRule()
        self._schedule = schedule
        self._record = RunRecord(ledger)
        self._ended: tuple[Ticket, RolloutReport] | None = None  # by ``end_and_close``, whose second half raised
        is_limited = schedule is not None and schedule.by_window
        self._rollouts = Rollouts(self._feed, ledger=ledger, rule=self._rule, is_limited=is_limited)
        self._selections = Selections(
            self._rollouts,
            self._record,
            groups_per_step=groups_per_step,
            schedule=schedule,
            keeps_tokens=self._rule.keep_tokens,
            restarted=restarted,
        )
        if position := ledger.recall(POSITION):
            self._feed.seek(position)
            self._feed.recover()
        self._rollouts.recover()

    # -- tickets -------------------------------------------------------------------------------------

    @mutates
    def generate(self, rollout_id: int, evaluation: bool = False) -> Ticket:
        """Open a ticket. One of training opens once version ``rollout_id - S`` is published, with the number of groups
        that ``Schedule.num_admitted`` gives.

        Raises BufferStateError if it was opened or trained on before, or may not open yet."""
        groups = self._eval_groups() if evaluation else ()
        ticket = Ticket(
            rollout_id=rollout_id,
            evaluation=evaluation,
            num_groups=len(groups),
            version=self._record.version,
            incarnation=self.ledger.fencing_token,
            max_staleness=None if self._schedule is None else self._schedule.max_staleness,
            mixes_versions=self._schedule is not None and self._schedule.mixes_versions,
            keeps_tokens=self._rule.keep_tokens,
        )
        if ticket.task in self._rollouts.open or (evaluation and ticket.task in self._selections):
            raise BufferStateError(f"{ticket.task} was opened before")
        if not evaluation:
            ticket = replace(ticket, num_groups=self._selections.num_admitted(rollout_id))
            self._selections.give_up_inherited(rollout_id)
            self._feed.open_ticket(rollout_id, rollout_id - (0 if self._schedule is None else self._schedule.target))
        elif not groups:
            raise BufferStateError("there is nothing to evaluate on", hint="name a set with --eval-prompt-data")
        ticket = self._rollouts.start(ticket, groups)
        if evaluation:
            self._selections.open_evaluation(ticket)
        return ticket

    @mutates
    def share(self, ticket: Ticket, num_parts: int) -> list[Ticket]:
        """Several workers produce a training ticket: returns a part for each, of equal numbers of groups or one more.
        The ticket itself leases nothing then; it ends all parts. Raises BufferStateError if a part would be empty, or
        if something is leased or finished."""
        return self._rollouts.share(ticket, num_parts)

    @reads
    def get_headers(self) -> list[QueueHeader]:
        """What a buffer filter sees: the queue's groups, the next one first."""
        return self._rollouts.queue.headers(self._rule)

    @mutates
    def get_samples(
        self, ticket: Ticket, num_samples: int, chosen: Sequence[GroupUid] | None = None
    ) -> list[SampleGroup]:
        """Lease up to ``num_samples`` groups: from the queue first, then from the data source.

        chosen: which queued groups to take, in this order, in place of the first ones; those that are no longer
        queued are passed over. In an asynchronous run a ticket leases no more groups than it was opened with, but for
        those that replace rejected or returned ones. Raises BufferStateError if it has all of them, and DeliveryNeeded,
        with nothing leased, if a data source of the user's own must ``deliver`` first.
        """
        groups = self._rollouts.lease(ticket, num_samples, chosen, self._record.version)
        self._selections.leased(ticket, [group.uid for group in groups])
        return groups

    @reads
    def get_delivery_request(self, num_groups: int) -> DeliveryRequest | None:
        """The batch that the user's data source must deliver next; None if ``num_groups`` groups are in stock."""
        return self._delivered().request(num_groups)

    @mutates
    def deliver(self, delivery: Delivery) -> None:
        """Take in a batch of the user's data source; a repeat is ignored (see ``DeliveredFeed.deliver``)."""
        fresh = LedgerEntry(state=GroupState.PENDING)
        self._delivered().deliver(delivery, lambda uid: self.ledger.entry(uid) != fresh)

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
        self._selections.left(ticket, [uid for uid, _ in leases])

    @mutates
    def finish(
        self,
        ticket: Ticket,
        uid: GroupUid,
        attempt: int,
        row_ids: Sequence[RowId],
        columns: Mapping[str, Column | Cell],
        sizes: RowSizes | None = None,
        reward: float | None = None,
    ) -> None:
        """Store a finished group's columns and end its lease. Readers of the selection that it joins get it at once.

        A foreign group is taken in with its report (see ``Rollouts.reported``).
        sizes: needed where tokens or loss masks are in the object store. reward: the mean over its samples, for an
        order by difficulty."""
        sizes = check_group(uid, row_ids, columns, sizes)
        if (lease := self._rollouts.reported(ticket, uid, attempt)) is None:
            return
        self._selections.check_report(ticket, lease, columns, sizes)
        self._rollouts.finish(ticket, [(lease, len(row_ids))], reward)
        self._selections.add(ticket, lease, row_ids, columns, sizes)

    @mutates
    def reject(self, ticket: Ticket, uid: GroupUid, attempt: int, reason: str, reward: float | None = None) -> None:
        """Drop a leased group, or a foreign one that is pending; the reason is counted. reward: as in ``finish``."""
        self._rollouts.drop(ticket, uid, attempt, reason, reward=reward)
        self._selections.left(ticket, [uid])

    @reads
    def get_pending(self, uids: Sequence[GroupUid]) -> list[GroupUid]:
        """Those of the foreign groups that may be reported: they are in no step, and were not trained on or dropped."""
        return [uid for uid in uids if self.ledger.entry(uid).state is GroupState.PENDING]

    @mutates
    def quarantine(self, ticket: Ticket, uid: GroupUid, attempt: int, reason: str) -> None:
        """Drop a leased group that failed by itself, so that it is never tried again; counted as ``quarantined``."""
        self._rollouts.drop(ticket, uid, attempt, reason, for_good=True)
        self._selections.left(ticket, [uid])

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

        Raises BufferStateError, with nothing changed, for an evaluation, for more groups than the ticket has, or if one
        of them is not pending."""
        self._rollouts.of(ticket)
        uids = list(dict.fromkeys(row.uid for row in row_ids))
        if ticket.evaluation or len(uids) > ticket.num_groups:
            what = f"{len(uids)} groups cannot be taken over"
            expected = f"a training step of at most {ticket.num_groups} groups"
            hint = f"the rows fit --rollout-batch-size {len(uids)}"
            raise BufferStateError(what, where=ticket.task, expected=expected, hint=hint)
        leases = self._rollouts.past_source(ticket, uids)
        parts = split_groups(row_ids, columns)
        self._rollouts.finish(ticket, [(lease, len(part[1])) for lease, part in zip(leases, parts, strict=True)])
        for lease, (_, rows, values, sizes) in zip(leases, parts, strict=True):
            self._selections.add(ticket, lease, rows, values, sizes)

    @mutates
    def end_ticket(self, ticket: Ticket) -> RolloutReport:
        """End a ticket: what was leased and never mentioned again is rejected as ``unreported``. An evaluation is then
        complete. The report counts the groups that were finished under it."""
        rollout = self._rollouts.of(ticket)
        if ticket.evaluation:
            self._selections.check_evaluation(ticket)
        self._selections.left(ticket, self._rollouts.end(rollout))
        if ticket.evaluation:
            self._selections.close_evaluation(ticket)
        self._selections.revision += 1
        num_rows, drops = sum(rollout.finished.values()), dict(sorted(rollout.drops.items()))
        return RolloutReport(num_groups=len(rollout.finished), num_rows=num_rows, drops=drops)

    @mutates
    def pass_on(self, ticket: Ticket) -> Ticket:
        """A worker of an open ticket died: its leases return to the queue, as prompts; what it finished stays.
        Returns the ticket for the worker that goes on, of the groups that are still missing. Calls of the worker that
        died are refused from here on. Raises PayloadLostError if it can only be made again (``Rollouts.pass_on``)."""
        if ticket.evaluation:
            raise BufferStateError(f"{ticket.task} cannot go on", hint="its metrics are of all groups: make it again")
        leased = [lease.group.uid for lease in self._rollouts.of(ticket).leased_by(ticket.worker)]
        passed = self._rollouts.pass_on(ticket)
        self._selections.left(ticket, leased)
        return passed

    @mutates
    def abandon(self, step: int) -> None:
        """Start production again with ticket ``step``, since payloads are lost: all training tickets are given up, and
        the selections of this step and of later ones. What was leased for them, or finished and not selected for an
        earlier step, is pending again, as prompts, at its place in the queue; foreign groups are lost, and may be
        reported again. Selections of earlier steps, which the trainer has, and evaluations stay.

        Raises BufferStateError if the step was committed, or if an earlier one has no closed selection."""
        self._selections.abandon(step)
        self._ended = None

    # -- selections ----------------------------------------------------------------------------------

    @mutates
    def open_selection(self, rollout_id: int) -> None:
        """Open the selection of a step, so that readers get what joins it: the groups of the ticket of this number, or
        in an asynchronous run those that it is certain to be closed with. One that was opened stays as it is.

        Raises BufferStateError if the step was committed, or in an asynchronous run while another one is open."""
        self._selections.open(rollout_id)

    @mutates
    def close_selection(self, rollout_id: int, last_ticket: int | None = None) -> tuple[RolloutReport | None, int]:
        """Close the selection of a step, which need not be open: once the ticket of its number has ended, with the
        groups of ``readers.Selection.choose``; in an asynchronous run with those of ``Window.choose``. Surplus goes
        back to the queue as prompts, or is dropped if it is foreign, and counted as ``surplus``.

        last_ticket: the last one of the run. In an asynchronous run a step is short only if all tickets that may open
        have ended and its own version is published. Returns the report, or None if the selection must wait, and the
        revision of the Buffer then; of a selection that is closed the same report again. Raises BufferStateError if its
        groups have different fields, BufferRestartedError if they were lost with an earlier Buffer."""
        report = self._selections.close(rollout_id, last_ticket)
        if report is not None and (known := self._feed.metrics_of(rollout_id)):
            report = replace(report, metrics={**report.metrics, **known})
        return report, self.revision

    @mutates
    def end_and_close(self, ticket: Ticket) -> tuple[RolloutReport, RolloutReport]:
        """``end_ticket``, and ``close_selection`` of the step of its number, which takes its groups alone. If the
        second one raises, a repeat passes over the first."""
        if self._ended is None or self._ended[0] != ticket:
            self._ended = ticket, self.end_ticket(ticket)
        _, ended = self._ended
        closed, _ = self.close_selection(ticket.rollout_id)
        assert closed is not None  # its ticket has ended
        self._ended = None
        return ended, closed

    # -- pools ---------------------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        """Grows with every change that may make rows ready for a reader, or let a selection close."""
        return self._selections.revision

    @reads
    def plan_data(self, rollout_id: int, share: Share = ALL_ROWS) -> BatchPlan:
        """The share of one data-parallel rank in one mini-batch; repeats return the same rows (see
        ``DataPool.share``). Its answers hold the payloads of a whole step, too large for the log of calls."""
        return self._selections.of(f"train_{rollout_id}").share(share)

    def get_data(self, rollout_id: int, share: Share = ALL_ROWS) -> TrainBatch:
        """``plan_data`` with its payloads, which must all be in this process."""
        return assemble(self.plan_data(rollout_id, share))

    @mutates
    def take(self, task: str, request: ReadRequest) -> tuple[RowsMeta, BatchPlan | None]:
        """A deal for a replica of a reading task (see ``DataPool.get_meta``), with all fields that its rows have; None
        while there is none. A step that was closed without a group has none; why is in its report."""
        meta = self._selections.of(task).get_meta(request, self.revision)
        return meta, self._selections.of(task).plan_rows(meta.row_ids) if meta.dealt else None

    @mutates
    def put_fields(
        self, task: str, row_ids: Sequence[RowId], columns: Mapping[str, Column], writer: Writer | None = None
    ) -> None:
        """Add derived fields (``ref_log_probs``, ``old_log_probs``) to rows of a task (see ``DataPool.put_fields``)."""
        self._selections.of(task).put_fields(row_ids, columns, writer)
        self._selections.revision += 1

    @mutates
    def requeue_for_readers(self, task: str, reader: str) -> int:
        """A reading task's processes are replaced (see ``DataPool.requeue_for_readers``)."""
        number = self._selections.of(task).requeue_for_readers(reader)
        self._selections.revision += 1
        return number

    # -- steps ---------------------------------------------------------------------------------------

    @mutates
    def clear(self, task: str) -> None:
        """Forget a task and its payloads. Unknown tasks are ignored, so that a repeat does no harm.

        Raises BufferStateError for a step that was not committed: its groups would be in no queue and in no step.
        """
        if task.startswith("eval_"):
            self._rollouts.open.pop(task, None)
        self._selections.clear(task)

    @mutates
    def commit(self, rollout_id: int, step: int) -> None:
        """Mark the rollout's groups as trained at ``step``. A repeat with the same step changes nothing. A Buffer that
        replaces one that died needs no pool for it: the ledger has the groups that were selected."""
        self._selections.commit(rollout_id, step)

    @mutates
    def release(self, version: int) -> dict[str, Any]:
        """The weights of ``version`` are published: the groups and payloads of steps before it are forgotten, and
        tickets may open in their place. Returns the counts of ``get_progress``.

        Raises BufferStateError if one of these steps was not committed, or if ``version`` goes back.
        """
        self._selections.release(version)
        return self.get_progress()

    # -- the rest ------------------------------------------------------------------------------------

    @reads
    def get_metadata(self) -> dict[str, Any]:
        """The user's notes."""
        return dict(self._record.metadata)

    @mutates
    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Merge JSON values into the notes. Raises BufferStateError for anything that is not JSON."""
        self._record.update_metadata(metadata)

    @reads
    def get_buffer_length(self) -> int:
        """Number of groups in the queue."""
        return len(self._rollouts.queue)

    @reads
    def get_num_rollout_per_epoch(self, num_epochs: int, num_rows: int | None) -> int:
        """Whole steps in one pass over the training data, or in ``num_epochs`` of them together: at least 1. A step may
        begin in one epoch and end in the next. num_rows: the length of a user's data source, which that alone knows."""
        rows = self._feed.num_rows() if num_rows is None else num_rows
        return max(1, num_epochs * rows // self._groups_per_step) if rows else 0

    @reads
    def get_version(self) -> int:
        """The version of the weights that are published."""
        return self._record.version

    @reads
    def get_progress(self) -> dict[str, Any]:
        """Counts for a display: of the newest open rollout, and of the queue."""
        run = {"version": self._record.version, "incarnation": self.ledger.fencing_token, "revision": self.revision}
        return self._rollouts.progress() | run

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
        if self._rollouts.open or self._rollouts.finished or self._selections:
            raise BufferStateError("a Buffer that is at work cannot load another state")
        self._feed.load_state_dict(state["source"])
        restore_ledger()
        self._feed.recover()
        self._record.restore(int(state["version"]), state["metadata"])
        if position := self._feed.position():
            self.ledger.remember(POSITION, position)
        try:
            self._rollouts.recover([group_from_json(group) for group in state["queue"]], self._record.version)
        except BufferStateError as error:
            raise CheckpointError(f"the Buffer's state and its ledger differ: {error.what}") from error

    def _delivered(self) -> DeliveredFeed:
        if not isinstance(self._feed, DeliveredFeed):
            raise BufferStateError("this Buffer reads its data itself", hint="there is no --data-source-path")
        return self._feed
