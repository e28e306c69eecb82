"""Work on a rollout that is still being generated: a torch dataset of rows that are ready, and the stages of roles.

Who waits for whom: the reader waits for rows whose fields are there, in slices with a deadline for the whole wait; rows
become ready when the rollout finishes a group or another role writes a field. It ends when the rollout is closed and
the reader has got every row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from buffer_rl.buffer.pool import DERIVED_FIELDS, ReadRequest, RowsMeta, Writer
from buffer_rl.contracts import Trainer
from buffer_rl.errors import TrainError
from buffer_rl.observe.timeline import WorkReport, WorkSpan
from buffer_rl.token_loss import Sums
from buffer_rl.train.collate import MicroBatch, collate
from buffer_rl.train.objective import Objective
from buffer_rl.train.roles import ADVANTAGE_FIELDS, FIELD_OF_MODEL, SAMPLED_FIELDS
from buffer_rl.types import Column, TrainBatch

if TYPE_CHECKING:
    from buffer_rl.buffer.calling import StartedCall
    from buffer_rl.buffer.client import BufferClient

STREAMED_GROUPS = 4
"""Groups that a process works on at a time, at most and where that many are ready: larger passes are cheaper, but the
last one starts only when the one before has ended."""

ROLLOUT_GRACE_S = 120.0
"""A rollout ends within ``--rollout-timeout-s`` and twice the grace that a user's rollout function has (30 s)."""

LogProbs = Callable[[str, TrainBatch], list[np.ndarray] | None]
"""``(model, batch) -> rows`` with the model ``ref`` or ``actor``; see ``Trainer.log_probs``."""

Taken = tuple[RowsMeta, TrainBatch | None]


class StreamingDataset(IterableDataset[TrainBatch]):
    """Batches of one rollout's rows, whole prompt groups, each row once over all processes of the same reader.

    A pass after the first replays the batches of the first one from memory, in the same order: several epochs over a
    rollout ask the Buffer once. Call ``step`` to go on to the next rollout.

    request: the reader and its fields (see ``buffer_rl.buffer.pool.ReadRequest``). fields: fields of each batch; all
    where None. timeout_s: longest wait for one batch. replay: keep the batches for a second pass.
    leave: prefetch the next batch while one is worked on, if it is full and so many more are ready for the other
    processes of the same reader; None: never. A loop that is left before its end must be followed by ``drain``: rows
    that were requested go to no other process.
    ``generation`` is that of the newest batch (see ``RowsMeta``).
    """

    def __init__(
        self,
        source: BufferClient,
        request: ReadRequest,
        *,
        timeout_s: float,
        fields: Sequence[str] | None = None,
        replay: bool = True,
        leave: int | None = None,
    ) -> None:
        self._replay = replay
        self._ahead = None if leave is None else replace(request, prefetch_reserve=leave)
        self._asked: StartedCall[Taken] | None = None
        self._source = source
        self._request = request
        self._fields = fields
        self._timeout_s = timeout_s
        self._task: str | None = None
        self._seen: list[TrainBatch] = []
        self._ended = False
        self.generation = 0

    def step(self, partition_id: int) -> None:
        """Go on to rollout ``partition_id``; batches of the one before are forgotten."""
        self.drain()
        self._task = f"train_{partition_id}"
        self._seen.clear()
        self._ended = False

    def __iter__(self) -> Iterator[TrainBatch]:
        if self._task is None:
            raise TrainError("no rollout was chosen", where="StreamingDataset", hint="call step(rollout_id) first")
        yield from list(self._seen)
        while not self._ended:
            meta, batch = self._next(self._task)
            if batch is None:
                self._ended = True
                return
            self.generation = meta.generation
            if self._replay:
                self._seen.append(batch)
            if self._ahead is not None:
                self._asked = self._source.start_take(self._task, self._ahead, self._fields)
            yield batch

    def drain(self) -> None:
        """Wait until no request for rows is under way."""
        if self._asked is not None:
            self._asked.drain()
            self._asked = None

    def _next(self, task: str) -> Taken:
        if self._asked is not None:
            asked, self._asked = self._asked, None
            meta, batch = asked.result()
            if batch is not None or meta.ended:
                return meta, batch
        return self._source.take(task, self._request, self._timeout_s, self._fields)


class StreamingDataLoader(DataLoader[Any]):
    """``StreamingDataset`` as padded tensors: yields ``(batch, micro)`` pairs of ``TrainBatch`` and ``MicroBatch``.

    Batches are formed by the Buffer, so there is no batch size here, and no worker processes: a batch is a view of
    shared memory already.
    """

    def __init__(self, dataset: StreamingDataset, device: torch.device | None = None) -> None:
        target = torch.device("cpu") if device is None else device

        def with_tensors(batch: Any) -> tuple[TrainBatch, MicroBatch]:
            return batch, collate(batch, target)

        super().__init__(dataset, batch_size=None, num_workers=0, collate_fn=with_tensors)
        self._streaming = dataset

    def step(self, partition_id: int) -> None:
        self._streaming.step(partition_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One kind of work on each ready group of a rollout that still runs: read, compute, write back. The same loop
    serves the reference, the actor's forward pass, the advantages and the trainer, in a process of their own or in the
    idle trainer.

    name: of its reading task. needs: fields of the rows that it waits for. produces: fields that it adds, none where
    its effect stays in its process. compute: maps a batch to these fields. is_final: as in ``ReadRequest``.
    """

    name: str
    needs: frozenset[str]
    produces: frozenset[str]
    compute: Callable[[TrainBatch], Mapping[str, Column]]
    is_final: bool = False


def run_stage(
    stage: Stage, store: BufferClient, rollout_id: int, *, rows_per_batch: int, num_readers: int = 1, timeout_s: float
) -> WorkReport:
    """Work on every group of rollout ``rollout_id`` until it is closed and read to its end.

    While a batch is computed, the next one is fetched and the fields of the one before are written. No call is under
    way when this returns or raises.

    rows_per_batch: whole groups of about so many rows at a time. num_readers: processes that read as this stage; one of
    them fetches ahead only where a batch is left for each of the others. timeout_s: longest wait for one group.
    """
    request = ReadRequest(
        reader=stage.name,
        fields=stage.needs,
        produces=stage.produces,
        num_rows=rows_per_batch,
        is_final=stage.is_final,
    )
    dataset = StreamingDataset(store, request, timeout_s=timeout_s, replay=False, leave=num_readers - 1)
    dataset.step(rollout_id)
    report, written = WorkReport(), None
    try:
        for batch in dataset:
            started = time.monotonic()
            columns = stage.compute(batch)
            ended = time.monotonic()
            if written is not None:
                written.result()
            writer = Writer(reader=stage.name, generation=dataset.generation)
            written = store.start_put_fields(batch.task, batch.row_ids, columns, writer) if columns else None
            report.add(WorkSpan(name=stage.name, rollout_id=rollout_id, start=started, end=ended, num_rows=len(batch)))
        if written is not None:
            written.result()
    finally:
        dataset.drain()
        if written is not None:
            written.drain()
    return report


def longest_wait(args: Any) -> float:
    """Seconds that a role waits for a group: longer than any rollout may take, whose own error is more precise."""
    return float(args.rollout_timeout_s) + ROLLOUT_GRACE_S


def rows_per_batch(args: Any, num_readers: int) -> int:
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

    produces = frozenset(FIELD_OF_MODEL[model] for model in models)
    return Stage(name=name, needs=SAMPLED_FIELDS, produces=produces, compute=compute, is_final=is_final)


def advantage_stage(
    compute_advantages: Callable[[TrainBatch], None], external_fields: frozenset[str] = frozenset()
) -> Stage:
    """Advantages and returns of each group; ``compute_advantages`` sets them as columns, and needs one group alone.
    Advantages that came with the group, from the user's converter, are kept.

    external_fields: fields that other roles add and the estimator needs, waited for. It sees no other derived field,
    even if one is there already."""

    def compute(batch: TrainBatch) -> Mapping[str, Column]:
        if "advantages" in batch.columns:
            return {} if "returns" in batch.columns else {"returns": batch.columns["advantages"]}
        for name in DERIVED_FIELDS - external_fields:
            batch.columns.pop(name, None)
        before = set(batch.columns)
        compute_advantages(batch)
        return {name: batch.columns[name] for name in sorted(batch.columns.keys() - before)}

    return Stage(name="advantages", needs=SAMPLED_FIELDS | external_fields, produces=ADVANTAGE_FIELDS, compute=compute)


def gradient_stage(
    trainer: Trainer,
    objective: Objective,
    models: Sequence[str],
    external_fields: frozenset[str],
    accumulated: Callable[[Sums], None],
) -> Stage:
    """Forward and backward of each group, after the fields that no other role computes.

    models: models whose log-probabilities the trainer computes itself. external_fields: fields that other roles add,
    waited for. accumulated: receives the sums of each batch."""

    def compute(batch: TrainBatch) -> Mapping[str, Column]:
        for model in models:
            if (rows := trainer.log_probs(model, batch)) is not None:
                batch.columns[FIELD_OF_MODEL[model]] = rows
        # A role or the user's converter may give them.
        if "advantages" not in external_fields and "advantages" not in batch.columns:
            objective.compute_advantages(batch)
        accumulated(trainer.accumulate(batch))
        return {}

    return Stage(
        name="train", needs=SAMPLED_FIELDS | external_fields, produces=frozenset(), compute=compute, is_final=True
    )
