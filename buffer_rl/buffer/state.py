"""All logic of the Buffer, without Ray: what is leased, queued, finished, trained, and by whom it was asked.

One ``BufferState`` is used by one thread at a time. Methods that change state check everything first, so
that a refused request changes nothing.
"""

from __future__ import annotations

import itertools
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from buffer_rl.buffer.codec import group_from_json, group_to_json
from buffer_rl.buffer.ledger import GroupState, Ledger
from buffer_rl.buffer.pool import DataPlane, DataPool
from buffer_rl.errors import BufferStateError, CheckpointError
from buffer_rl.types import (
    Column,
    GroupUid,
    QueueHeader,
    RolloutReport,
    RowId,
    SampleGroup,
    Ticket,
    TrainBatch,
    take_rows,
)

FORMAT = 1
"""Version of ``state_dict``; a file of another version is refused."""


class PromptSource(Protocol):
    """Where new groups come from, in epoch order and without end."""

    def get_samples(self, num_samples: int) -> list[SampleGroup]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def __len__(self) -> int: ...


@dataclass(slots=True, kw_only=True)
class Lease:
    """A leased or finished group of an open rollout. ``group`` holds the prompts alone."""

    group: SampleGroup
    admitted: int
    finished: bool = False


@dataclass(slots=True, kw_only=True)
class OpenRollout:
    """A rollout between ``generate`` and ``close_rollout``."""

    ticket: Ticket
    leases: dict[GroupUid, Lease] = field(default_factory=dict)
    waiting: deque[SampleGroup] = field(default_factory=deque)
    drops: Counter[str] = field(default_factory=Counter)


class BufferState:
    """Owner of the queue, the leases, the pools and the ledger.

    eval_groups: makes the groups of all evaluation sets, anew for each evaluation.
    groups_per_step: P, the prompt groups that one step trains on.
    """

    def __init__(
        self,
        source: PromptSource | None,
        *,
        ledger: Ledger,
        plane: DataPlane,
        eval_plane: DataPlane,
        groups_per_step: int,
        eval_groups: Callable[[], Sequence[SampleGroup]] = tuple,
    ) -> None:
        self._source = source
        self._ledger = ledger
        # Evaluation has a store of its own: the same file may be trained and evaluated on, with equal uids.
        self._planes = {False: plane, True: eval_plane}
        self._groups_per_step = groups_per_step
        self._eval_groups = eval_groups
        self.incarnation = uuid.uuid4().hex
        self._queue: deque[SampleGroup] = deque()
        self._open: dict[str, OpenRollout] = {}
        self._pools: dict[str, DataPool] = {}
        self._prompts: dict[GroupUid, SampleGroup] = {}
        self._committed: dict[int, int] = {}
        self._metadata: dict[str, Any] = {}
        self._version = 0
        self._admitted = 0

    # -- rollouts ------------------------------------------------------------------------------------

    def generate(self, rollout_id: int, evaluation: bool = False) -> Ticket:
        """Open a rollout. Raises BufferStateError if it is open, or was trained on already."""
        groups = deque(group.as_prompts() for group in self._eval_groups()) if evaluation else deque()
        ticket = Ticket(
            rollout_id=rollout_id,
            evaluation=evaluation,
            num_groups=len(groups) if evaluation else self._groups_per_step,
            version=self._version,
            incarnation=self.incarnation,
        )
        if ticket.task in self._open or ticket.task in self._pools:
            raise BufferStateError(f"{ticket.task} was opened before")
        if not evaluation and rollout_id in self._committed:
            raise BufferStateError(f"rollout {rollout_id} was trained on at step {self._committed[rollout_id]}")
        if evaluation and not groups:
            raise BufferStateError("there is nothing to evaluate on", hint="name a set with --eval-prompt-data")
        self._open[ticket.task] = OpenRollout(ticket=ticket, waiting=groups)
        return ticket

    def get_headers(self) -> list[QueueHeader]:
        """What a buffer filter sees: the queue's groups, the next one first."""
        return [header_of(group) for group in self._queue]

    def get_samples(
        self, ticket: Ticket, num_samples: int, chosen: Sequence[GroupUid] | None = None
    ) -> list[SampleGroup]:
        """Lease up to ``num_samples`` groups: from the queue first, then from the data source.

        chosen: which queued groups to take, in this order, in place of the first ones; those that are no longer
        queued are passed over.
        """
        rollout = self._rollout(ticket)
        if num_samples < 0:
            raise BufferStateError(f"{num_samples} groups were asked for", where=ticket.task)
        if chosen is not None and not ticket.evaluation:
            self._bring_forward(list(dict.fromkeys(chosen))[:num_samples])
            num_queued = sum(group.uid in set(chosen) for group in itertools.islice(self._queue, num_samples))
        else:
            num_queued = num_samples
        groups = [] if num_samples == 0 else self._take(rollout, num_samples, num_queued)
        leased = []
        for group in groups:
            attempt = 1 if ticket.evaluation else self._ledger.lease(group.uid, ticket.rollout_id)
            prompts = group.as_prompts()
            prompts.attempt, prompts.incarnation = attempt, self.incarnation
            rollout.leases[group.uid] = Lease(group=prompts, admitted=self._admitted)
            self._admitted += 1
            leased.append(prompts.as_prompts())  # the caller may change what it got
        return leased

    def add_samples(self, ticket: Ticket, leases: Sequence[tuple[GroupUid, int]]) -> None:
        """Give leased groups (uid and attempt) back to the queue, as prompts."""
        rollout = self._rollout(ticket)
        if len({uid for uid, _ in leases}) != len(leases):
            raise BufferStateError("a group is given back twice", where=ticket.task)
        for uid, attempt in leases:
            self._live(rollout, uid, attempt)
        for uid, attempt in leases:
            lease = rollout.leases.pop(uid)
            self._requeue(rollout, uid, attempt, lease.group)

    def finish(
        self, ticket: Ticket, uid: GroupUid, attempt: int, row_ids: Sequence[RowId], columns: Mapping[str, Column]
    ) -> None:
        """Store a finished group's columns and take its lease back."""
        rollout = self._rollout(ticket)
        lease = self._live(rollout, uid, attempt)
        lengths = {name: len(column) for name, column in columns.items()}
        if not row_ids or any(length != len(row_ids) for length in lengths.values()):
            raise BufferStateError(f"group {uid} has {len(row_ids)} rows and columns of lengths {lengths}")
        if not ticket.evaluation:
            self._ledger.finish(uid, attempt)
        self._planes[ticket.evaluation].put(uid, row_ids, columns)
        lease.finished = True

    def reject(self, ticket: Ticket, uid: GroupUid, attempt: int, reason: str) -> None:
        """Drop a leased group; the reason is counted."""
        rollout = self._rollout(ticket)
        self._live(rollout, uid, attempt)
        self._reject(rollout, uid, attempt, reason)

    def adopt(self, ticket: Ticket, row_ids: Sequence[RowId], columns: Mapping[str, Column]) -> None:
        """Store groups that were finished elsewhere, such as in the run that recorded them. They are leased and
        finished at once, past the data source; one that waits in the queue leaves it.

        Raises BufferStateError, with nothing changed, for an evaluation, for more groups than the step trains on, or
        if one of them is not pending."""
        rollout = self._rollout(ticket)
        rows: dict[GroupUid, list[int]] = {}
        for index, row in enumerate(row_ids):
            rows.setdefault(row.uid, []).append(index)
        if ticket.evaluation or len(rows) > ticket.num_groups:
            raise BufferStateError(
                f"{len(rows)} groups cannot be taken over",
                where=ticket.task,
                expected=f"a training step of at most {ticket.num_groups} groups",
                hint=f"the rows fit --rollout-batch-size {len(rows)}",
            )
        for uid in rows:
            if (state := self._ledger.entry(uid).state) is not GroupState.PENDING:
                raise BufferStateError(f"group {uid} cannot be taken over: it is {state}", where=ticket.task)
        self._queue = deque(group for group in self._queue if group.uid not in rows)
        for uid, indices in rows.items():
            attempt = self._ledger.lease(uid, ticket.rollout_id)
            self._ledger.finish(uid, attempt)
            stored = {name: take_rows(column, indices) for name, column in columns.items()}
            self._planes[False].put(uid, [row_ids[index] for index in indices], stored)
            group = SampleGroup(uid=uid, samples=[], attempt=attempt, incarnation=self.incarnation)
            rollout.leases[uid] = Lease(group=group, admitted=self._admitted, finished=True)
            self._admitted += 1

    def close_rollout(self, ticket: Ticket) -> RolloutReport:
        """Select the step's groups: the oldest finished ones. Surplus goes back to the queue as prompts; what was
        leased and never mentioned again is rejected as ``unreported``."""
        rollout = self._rollout(ticket)
        for uid in [uid for uid, lease in rollout.leases.items() if not lease.finished]:
            self._reject(rollout, uid, rollout.leases[uid].group.attempt, "unreported")
        finished = sorted(rollout.leases, key=lambda uid: rollout.leases[uid].admitted)
        plane = self._planes[ticket.evaluation]
        wanted = len(finished) if ticket.evaluation else ticket.num_groups
        chosen, surplus = finished[:wanted], finished[wanted:]
        for uid in reversed(surplus):  # from the left, so that the oldest is first in the queue again
            lease = rollout.leases.pop(uid)
            plane.drop(uid)
            self._ledger.requeue(uid, lease.group.attempt)
            self._queue.appendleft(lease.group)
        if chosen:
            self._pools[ticket.task] = DataPool(ticket.rollout_id, ticket.task, chosen, plane)
        if not ticket.evaluation:
            self._prompts.update((uid, rollout.leases[uid].group) for uid in chosen)
        del self._open[ticket.task]
        return RolloutReport(
            ticket=ticket,
            num_groups=len(chosen),
            num_rows=sum(len(plane.rows(uid)) for uid in chosen),
            drops=dict(sorted(rollout.drops.items())),
            surplus=len(surplus),
        )

    # -- pools ---------------------------------------------------------------------------------------

    def get_data(
        self, rollout_id: int, dp_rank: int = 0, dp_size: int = 1, num_steps: int = 1, step: int = 0
    ) -> TrainBatch:
        """The share of one data-parallel rank in one mini-batch; repeats return the same rows (see
        ``DataPool.share``)."""
        return self._pool(f"train_{rollout_id}").share(dp_rank, dp_size, num_steps, step)

    def get_eval_data(self, rollout_id: int) -> TrainBatch:
        """All rows of an evaluation."""
        return self._pool(f"eval_{rollout_id}").batch()

    def put_fields(self, task: str, row_ids: Sequence[RowId], columns: Mapping[str, Column]) -> None:
        """Add derived fields (``ref_log_probs``, ``old_log_probs``) to rows of a task."""
        self._pool(task).put_fields(row_ids, columns)

    def clear(self, task: str) -> None:
        """Forget a task and its payloads. Unknown tasks are ignored, so that a repeat does no harm.

        Raises BufferStateError for a step that was not committed: its groups would be in no queue and in no step.
        """
        pool = self._pools.get(task)
        if pool is None:
            return
        if _is_train(pool) and pool.rollout_id not in self._committed:
            raise BufferStateError(f"{task} cannot be cleared: it is not committed", hint="commit it first")
        del self._pools[task]
        for uid in pool.uids:
            self._planes[not _is_train(pool)].drop(uid)
            if _is_train(pool):
                self._prompts.pop(uid, None)

    # -- steps ---------------------------------------------------------------------------------------

    def commit(self, rollout_id: int, step: int) -> None:
        """Mark the rollout's groups as trained at ``step``. A repeat with the same step changes nothing."""
        if rollout_id in self._committed:
            if self._committed[rollout_id] != step:
                raise BufferStateError(
                    f"rollout {rollout_id} was committed at step {self._committed[rollout_id]}, not {step}"
                )
            return
        self._ledger.commit(self._pool(f"train_{rollout_id}").uids, rollout_id, step)
        self._committed[rollout_id] = step

    def release(self, version: int) -> None:
        """The weights of ``version`` are published: rollouts before it give their slots and payloads back.

        Raises BufferStateError if one of them was not committed, or if ``version`` goes back.
        """
        if version < self._version:
            raise BufferStateError(f"version {version} is older than the published version {self._version}")
        done = [pool for pool in self._pools.values() if _is_train(pool) and pool.rollout_id < version]
        for pool in done:
            if pool.rollout_id not in self._committed:
                raise BufferStateError(f"version {version} cannot be released: {pool.task} is not committed")
        for pool in done:
            self.clear(pool.task)
        self._version = version

    # -- the rest ------------------------------------------------------------------------------------

    def get_metadata(self) -> dict[str, Any]:
        """The user's notes."""
        return dict(self._metadata)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Merge JSON values into the notes. Raises BufferStateError for anything that is not JSON."""
        try:
            self._metadata.update(orjson.loads(orjson.dumps(dict(metadata))))
        except TypeError as error:
            raise BufferStateError(f"metadata is not JSON: {error}") from error

    def get_buffer_length(self) -> int:
        """Number of groups in the queue."""
        return len(self._queue)

    def get_num_rollout_per_epoch(self) -> int:
        """Steps that one pass over the training data takes, at least 1."""
        return max(1, len(self._source) // self._groups_per_step) if self._source is not None else 0

    def get_progress(self) -> dict[str, Any]:
        """Counts for a display: of the newest open rollout, and of the queue."""
        shown = next(reversed(self._open.values()), None)
        leases = shown.leases.values() if shown else ()
        return {
            "task": shown.ticket.task if shown else "",
            "wanted": shown.ticket.num_groups if shown else 0,
            "leased": sum(not lease.finished for lease in leases),
            "finished": sum(lease.finished for lease in leases),
            "dropped": dict(shown.drops) if shown else {},
            "queued": len(self._queue),
            "version": self._version,
        }

    def counts(self, source: str, epoch: int, num_rows: int) -> dict[GroupState, int]:
        """Groups of an epoch by state; they add up to ``num_rows``."""
        return self._ledger.counts(source, epoch, num_rows)

    def state_dict(self) -> dict[str, Any]:
        """JSON values for a checkpoint. Groups that are leased or finished but not trained come first in the
        saved queue, as prompts and in the order in which they were admitted, then the queue itself."""
        held = [
            lease
            for rollout in self._open.values()
            if not rollout.ticket.evaluation
            for lease in rollout.leases.values()
        ]
        in_flight = [lease.group for lease in sorted(held, key=lambda lease: lease.admitted)]
        untrained = [
            group for uid, group in self._prompts.items() if self._ledger.entry(uid).state is not GroupState.TRAINED
        ]
        return {
            "format": FORMAT,
            "version": self._version,
            "queue": [group_to_json(group) for group in (*untrained, *in_flight, *self._queue)],
            "ledger": self._ledger.state_dict(),
            "source": self._source.state_dict() if self._source is not None else None,
            "committed": sorted(self._committed.items()),
            "metadata": self._metadata,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned. Raises CheckpointError if it does not fit."""
        if state.get("format") != FORMAT:
            raise CheckpointError(f"the Buffer's state has format {state.get('format')!r}", expected=str(FORMAT))
        if self._open or self._pools:
            raise BufferStateError("a Buffer that is at work cannot load another state")
        if (self._source is None) != (state["source"] is None):
            raise CheckpointError("the checkpoint's Buffer and this one differ in having training data")
        if self._source is not None:
            self._source.load_state_dict(state["source"])
        self._ledger.load_state_dict(state["ledger"])
        self._queue = deque(group_from_json(group) for group in state["queue"])
        self._committed = {int(rollout_id): int(step) for rollout_id, step in state["committed"]}
        self._metadata = dict(state["metadata"])
        self._version = int(state["version"])

    # -- helpers -------------------------------------------------------------------------------------

    def _bring_forward(self, uids: Sequence[GroupUid]) -> None:
        """Move queued groups to the front, in the order of ``uids``; the others keep theirs."""
        by_uid = {group.uid: group for group in self._queue}
        front = [by_uid[uid] for uid in uids if uid in by_uid]
        moved = {group.uid for group in front}
        self._queue = deque([*front, *(group for group in self._queue if group.uid not in moved)])

    def _take(self, rollout: OpenRollout, num_samples: int, num_queued: int) -> list[SampleGroup]:
        """At most ``num_queued`` groups of the queue, and new ones up to ``num_samples``."""
        queue = rollout.waiting if rollout.ticket.evaluation else self._queue
        queued = min(num_queued, num_samples, len(queue))
        fresh: list[SampleGroup] = []
        if queued < num_samples and not rollout.ticket.evaluation:
            if self._source is None:
                raise BufferStateError("there is no training data", hint="name it with --prompt-data")
            fresh = self._source.get_samples(num_samples - queued)  # it may fail: before anything leaves the queue
        return [queue.popleft() for _ in range(queued)] + fresh

    def _requeue(self, rollout: OpenRollout, uid: GroupUid, attempt: int, group: SampleGroup) -> None:
        if rollout.ticket.evaluation:
            rollout.waiting.append(group)
            return
        self._ledger.requeue(uid, attempt)
        self._queue.append(group)

    def _reject(self, rollout: OpenRollout, uid: GroupUid, attempt: int, reason: str) -> None:
        if not rollout.ticket.evaluation:
            self._ledger.reject(uid, attempt, reason)
        del rollout.leases[uid]
        rollout.drops[reason] += 1

    def _rollout(self, ticket: Ticket) -> OpenRollout:
        rollout = self._open.get(ticket.task)
        if ticket.incarnation != self.incarnation or rollout is None:
            raise BufferStateError(f"the report is refused: {ticket.task} is not open", hint="it came too late")
        return rollout

    def _live(self, rollout: OpenRollout, uid: GroupUid, attempt: int) -> Lease:
        lease = rollout.leases.get(uid)
        if lease is None or lease.finished or lease.group.attempt != attempt:
            raise BufferStateError(
                f"the report on group {uid} (attempt {attempt}) is refused: it is not leased to {rollout.ticket.task}",
                hint="a group is finished, rejected or given back once",
            )
        return lease

    def _pool(self, task: str) -> DataPool:
        if task not in self._pools:
            raise BufferStateError(f"there is no pool {task}", expected=f"one of {sorted(self._pools) or 'none'}")
        return self._pools[task]


def header_of(group: SampleGroup) -> QueueHeader:
    """What a buffer filter sees of a queued group."""
    sample = group[0]
    prompt = sample.prompt if isinstance(sample.prompt, str) else "".join(str(turn) for turn in sample.prompt)
    return QueueHeader(
        uid=group.uid, admitted=sample.group_index or 0, prompt_length=len(prompt), attempts=group.attempt
    )


def _is_train(pool: DataPool) -> bool:
    return pool.task.startswith("train_")
