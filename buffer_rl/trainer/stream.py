"""Work on a rollout that is still being generated: the deals of a reading task, and the stages of roles.

Who waits for whom: the reader waits for rows whose fields are there, in slices with a deadline for the whole wait; rows
become ready when the rollout finishes a group or another role writes a field. It ends when the rollout is closed and
the reader has got every row.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from buffer_rl.args import Args
from buffer_rl.buffer.pool import ReadRequest, RowsMeta, Writer
from buffer_rl.errors import BufferRLError, TrainError
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.kinds.trainer import Trainer
from buffer_rl.observe.timeline import WorkReport, WorkSpan
from buffer_rl.plan.roles import ADVANTAGE_FIELDS, CRITIC, FIELD_OF_MODEL, MODEL_FIELDS, SAMPLED_FIELDS
from buffer_rl.plan.schedule import Schedule
from buffer_rl.records.groups import Column, TrainBatch

if TYPE_CHECKING:
    from buffer_rl.buffer.calls import StartedCall
    from buffer_rl.buffer.client import BufferClient
    from buffer_rl.trainer.objective import Objective

STREAMED_GROUPS = 4
"""Groups that a process works on at a time, at most and where that many are ready: larger passes are cheaper, but the
last one starts only when the one before has ended."""

ROLLOUT_GRACE_S = 120.0
"""A rollout ends within ``--rollout-timeout-s`` and twice the grace that a user's rollout function has (30 s)."""

LogProbs = Callable[[str, TrainBatch], list[np.ndarray] | None]
"""``(model, batch) -> rows`` with a model of ``FIELD_OF_MODEL``; see ``Trainer.log_probs``."""

Check = Callable[[TrainBatch, Mapping[str, Column]], None]
"""Raises unless these are fields that the task writes of a micro-batch's rows."""


def _alone(error: BufferRLError | None) -> None:
    if error is not None:
        raise error


@dataclass(slots=True, eq=False)
class StreamingDataset:
    """What one replica of a reading task gets of one selection after another: micro-batches of whole groups, as soon as
    their fields are ready. One object serves a process for the whole run.

    Each iteration inside ``step`` is a pass, which ends once the selection is closed and read to its end. The first
    pass reads from the Buffer: while the caller works on a micro-batch, the next one is fetched, and the fields of the
    one before are written. Further passes replay these objects in their order, with the columns that the caller added,
    and ask the Buffer for nothing. A pass that was left early is completed by the next one.

    Memory: the micro-batch that is worked on and the next one; with ``replays`` the replica's part of one selection.

    request: for deal 0; a replica fetches ahead only if a batch is left for each of the others. timeout_s: longest wait
    for one deal. replays: keep what was read for further passes. in_step: micro-batches without rows come too, as the
    replicas work in step. meet: called before each micro-batch, and at the end, with what reading or writing raised;
    see ``Peers.meet``. check: called with what is to be written. report: what was worked on since ``step``, a span for
    each micro-batch and pass, to its first ``write``.

    Example:
        request = ReadRequest(reader="length", fields=SAMPLED_FIELDS, produces=frozenset({"length"}), num_rows=32)
        dataset = StreamingDataset(client, request, timeout_s=600.0)
        for selection in range(num_rollout):
            with dataset.step(selection):
                for batch in dataset:
                    dataset.write(batch, {"length": batch.columns["response_length"]})
    """

    client: BufferClient
    request: ReadRequest
    _: KW_ONLY
    timeout_s: float
    replays: bool = False
    in_step: bool = False
    meet: Callable[[BufferRLError | None], None] = _alone
    check: Check = field(default=lambda *_: None)
    report: WorkReport = field(default_factory=WorkReport, init=False)
    _passes_left: float = field(default=0, init=False)
    _deals: Iterator[TrainBatch] = field(default=iter(()), init=False)
    _kept: list[TrainBatch] = field(default_factory=list, init=False)
    _writer: Writer | None = field(default=None, init=False)
    _written: StartedCall[None] | None = field(default=None, init=False)
    _worked_until: float = field(default=0, init=False)
    _error: BufferRLError | None = field(default=None, init=False)

    @contextmanager
    def step(self, selection: int) -> Iterator[StreamingDataset]:
        """Move on to the selection of step ``selection``, for the block. When the block ends, what was written is in
        the Buffer, no call is under way, and what was read is forgotten.

        Raises what a write raised after the last micro-batch."""
        self._passes_left, self._error, self.report = math.inf if self.replays else 1, None, WorkReport()
        try:
            with closing(self._read(f"train_{selection}")) as self._deals:
                yield self
                self._finish_write()
                _alone(self._error)
        finally:
            if self._written is not None:
                self._written.drain()
            self._written, self._passes_left, self._kept = None, 0, []

    def __iter__(self) -> Iterator[TrainBatch]:
        """One pass. Raises what ``BufferClient.take`` and writing raise, and TrainError if no pass is left."""
        name = self.request.reader
        if not self._passes_left:
            expected = "one pass inside `with dataset.step(selection)`, or several with replays=True"
            raise TrainError("no pass over a selection is left", where=f"the reader {name!r}", expected=expected)
        self._passes_left -= 1
        for number in itertools.count():
            if (batch := self._next(number)) is None:
                return
            if batch.row_ids or self.in_step:
                start, self._worked_until = time.monotonic(), 0
                yield batch
                end, rows = self._worked_until or time.monotonic(), len(batch)
                self.report.add(WorkSpan(name=name, rollout_id=batch.rollout_id, start=start, end=end, num_rows=rows))

    def write(self, batch: TrainBatch, columns: Mapping[str, Column]) -> None:
        """Start to write fields of a micro-batch's rows, once those of the one before are written; nothing if there are
        no rows or no fields. What writing raises, the iteration raises next."""
        self._worked_until = self._worked_until or time.monotonic()
        self.check(batch, columns)
        try:
            self._finish_write()
            if columns and batch.row_ids:
                self._written = self.client.start_put_fields(batch.task, batch.row_ids, columns, self._writer)
        except BufferRLError as caught:
            self._error = caught

    def _finish_write(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def _next(self, number: int) -> TrainBatch | None:
        """Micro-batch ``number``, None at the end, once the peers have met. An error stays: no end comes after it."""
        batch = None
        try:
            if self._error is None:
                batch = self._kept[number] if number < len(self._kept) else next(self._deals, None)
        except BufferRLError as caught:
            self._error = caught
        self.meet(self._error)
        return batch

    def _read(self, task: str) -> Generator[TrainBatch, None, None]:
        """The replica's deals, from 0 to the end of ``task`` (see ``ReadRequest``). The next deal is requested while
        one is worked on; closing the generator waits until no request is under way."""
        asked: StartedCall[tuple[RowsMeta, TrainBatch | None]] | None = None
        try:
            for number in itertools.count():
                meta, batch = (None, None) if asked is None else asked.result()
                if meta is None or not (meta.dealt or meta.ended):
                    meta, batch = self.client.take(task, replace(self.request, deal=number), self.timeout_s)
                if batch is None:
                    return
                self._writer = Writer(reader=self.request.reader, generation=meta.generation)
                if self.replays:
                    self._kept.append(batch)
                ahead = replace(self.request, deal=number + 1, prefetch_reserve=self.request.num_replicas - 1)
                asked = self.client.start_take(task, ahead)
                yield batch
        finally:
            if asked is not None:
                asked.drain()


@dataclass(frozen=True, slots=True)
class Stage:
    """One kind of work on each ready group of a rollout that still runs: read, compute, write back. The same loop
    serves the reference, the actor's forward pass, the advantages and the trainer, in a process of their own or in the
    idle trainer.

    reads: what it asks for, but for the rows and the replica; it produces nothing if its effect stays in its process.
    compute: maps a batch to the fields that it produces. work: does all work on one selection, in place of ``compute``
    for each micro-batch. check: as in ``StreamingDataset``.
    """

    reads: ReadRequest
    compute: Callable[[TrainBatch], Mapping[str, Column]]
    work: Callable[[StreamingDataset], None] | None = None
    check: Check = field(default=lambda *_: None)

    def dataset(
        self, client: BufferClient, args: Args, replica: int, num_replicas: int, together: bool = False, **more: Any
    ) -> StreamingDataset:
        """What one of the processes of the task reads. together: as in ``ReadRequest``. more: as in
        ``StreamingDataset``."""
        rows, wait_s, replays = rows_per_batch(args, num_replicas), longest_wait(args), self.work is not None
        reads = replace(self.reads, num_rows=rows, replica=replica, num_replicas=num_replicas, together=together)
        return StreamingDataset(client, reads, timeout_s=wait_s, replays=replays, check=self.check, **more)

    def run(self, dataset: StreamingDataset, selection: int) -> WorkReport:
        """Work on what ``dataset`` gets of a selection, until that is closed and read to its end. No call is under way
        when this returns or raises."""
        with dataset.step(selection):
            if self.work is not None:
                self.work(dataset)
            else:
                for batch in dataset:
                    dataset.write(batch, self.compute(batch))
        return dataset.report


def reading(name: str, needs: Iterable[str], produces: Iterable[str], is_final: bool = False) -> ReadRequest:
    """What the task ``name`` asks for (see ``Stage.reads``), which waits for ``SAMPLED_FIELDS`` and ``needs``."""
    fields = SAMPLED_FIELDS.union(needs)
    return ReadRequest(reader=name, fields=fields, produces=frozenset(produces), is_final=is_final, num_rows=1)


def longest_wait(args: Args) -> float:
    """Seconds that a role waits for a group: longer than any ticket may take, whose own error is more precise. Each
    worker that goes on where another died has the whole time again."""
    ticket_s = Schedule.of(args).ticket_limit_s(args.rollout_timeout_s)
    return (int(args.role_max_restarts) + 1) * (ticket_s + ROLLOUT_GRACE_S)


def rows_per_batch(args: Args, num_readers: int) -> int:
    """Rows that each of a role's ``num_readers`` processes requests at a time: no more groups than its part of a step,
    so that each process gets some; under ``--deterministic`` one group."""
    if args.deterministic:
        return 1
    part = math.ceil(int(args.rollout_batch_size) / num_readers)
    return min(part, STREAMED_GROUPS) * int(args.n_samples_per_prompt)


def log_prob_stage(
    name: str, models: Sequence[str], log_probs: LogProbs, *, writes: bool = True, is_final: bool = False
) -> Stage:
    """Log-probabilities under each of ``models``. writes: whether this process is the one of its replica that writes
    them. is_final: as in ``ReadRequest``."""

    def compute(batch: TrainBatch) -> Mapping[str, Column]:
        found = {FIELD_OF_MODEL[model]: log_probs(model, batch) for model in models}
        return {field: rows for field, rows in found.items() if rows is not None and writes}

    return Stage(reading(name, (), [FIELD_OF_MODEL[model] for model in models], is_final), compute)


def advantage_stage(objective: Objective, added: Iterable[str]) -> Stage:
    """Advantages and returns of each group, and the columns that the estimator adds, once the log-probabilities that it
    needs are there, and those of the fields ``added`` by the user's roles."""

    def compute(batch: TrainBatch) -> Mapping[str, Column]:
        before = set(batch.columns)
        objective.compute_advantages(batch)
        return {name: batch.columns[name] for name in sorted(batch.columns.keys() - before)}

    needs = objective.needs.intersection({*MODEL_FIELDS, *added})
    return Stage(reading("advantages", needs, ADVANTAGE_FIELDS), compute)


def gradient_stage(
    role: str,
    trainer: Trainer,
    objective: Objective,
    models: Mapping[str, Callable[[TrainBatch], list[np.ndarray] | None]],
    external_fields: Iterable[str],
    accumulated: Callable[[Sums, TrainBatch], None],
    *,
    writes: bool = True,
) -> Stage:
    """Forward and backward of each group, after the fields that no other role computes.

    role: the trained role; a critic gives its values, and the advantages that it computes of them, to the actor.
    models: what the trainer computes itself. external_fields: fields that other roles add, waited for. accumulated:
    receives the sums of each batch, and the batch. writes: as in ``log_prob_stage``."""
    produces = ADVANTAGE_FIELDS | {FIELD_OF_MODEL[CRITIC]} if objective.critic else frozenset()

    def compute(batch: TrainBatch) -> Mapping[str, Column]:
        before = set(batch.columns)
        computed = {FIELD_OF_MODEL[model]: outputs(batch) for model, outputs in models.items()}
        if None not in computed.values():  # else the rank does not call the objective
            batch.columns.update(cast("dict[str, Column]", computed))
            objective.compute_advantages(batch)
        accumulated(trainer.accumulate(batch), batch)
        added = sorted(batch.columns.keys() - before) if produces and writes else []
        return {name: batch.columns[name] for name in added}

    return Stage(reading(role, external_fields, produces, is_final=True), compute)
