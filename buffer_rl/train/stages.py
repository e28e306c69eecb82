"""What a role does with a rollout's groups while it still runs: read those that are ready, compute, write back.

A stage is data: what it is called (the name of its reading task), which fields it needs and which it adds. The same
loop serves the reference, the actor's forward pass, the advantages and the trainer, in a process of their own or in the
idle trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from buffer_rl.buffer.pool import ReadRequest, Writer
from buffer_rl.observe.timeline import WorkSpan
from buffer_rl.observe.work import WorkReport
from buffer_rl.train.stream import RowSource, Started, StreamingDataset
from buffer_rl.types import Column, RowId, TrainBatch

SAMPLED_FIELDS = frozenset({"tokens", "response_length", "loss_mask", "reward"})
"""Fields that every finished group has."""


class FieldStore(RowSource, Protocol):
    """A row source that takes fields too."""

    def start_put_fields(
        self, task: str, row_ids: Sequence[RowId], columns: Mapping[str, Column], writer: Writer | None = None
    ) -> Started[None]:
        """Add derived fields to rows of a task, without waiting; see ``DataPool.put_fields``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One kind of work on each ready group.

    name: its reading task. needs: fields of the rows that it waits for. produces: those that it adds, none where its
    effect stays in its own process. compute: a batch to these fields. is_final: see ``ReadRequest``.
    """

    name: str
    needs: frozenset[str]
    produces: frozenset[str]
    compute: Callable[[TrainBatch], Mapping[str, Column]]
    is_final: bool = False


def run_stage(
    stage: Stage, store: FieldStore, rollout_id: int, *, rows_per_batch: int, num_readers: int = 1, timeout_s: float
) -> WorkReport:
    """Work on every group of rollout ``rollout_id`` until it is closed and read to its end.

    While a batch is computed, the next one is fetched and what was computed of the one before is written; so nothing
    of the rollout is asked for any more when this returns or raises.

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
