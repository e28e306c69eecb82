"""Selections in this process that a task reads while they fill, and a stage that reads them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np

from buffer_rl.buffer.columns import ColumnStore, assemble
from buffer_rl.buffer.pool import DataPool, ReadRequest, RowsMeta, Writer
from buffer_rl.buffer.readers import ALL_ROWS
from buffer_rl.errors import DeadlineError, TrainError
from buffer_rl.observe.timeline import WorkReport
from buffer_rl.records.groups import Column, GroupUid, RowId, TrainBatch
from buffer_rl.trainer.stream import Stage, StreamingDataset, reading


class Answer:
    """The answer of a call that was executed when it was made. ``open`` are those that nobody asked for."""

    open: ClassVar[list[Answer]] = []

    def __init__(self, value: Any) -> None:
        self.value = value
        self.error: TrainError | None = None
        self.open.append(self)

    def result(self) -> Any:
        self.open.remove(self)
        if self.error is not None:
            raise self.error
        return self.value

    def drain(self) -> None:
        if self in self.open:
            with suppress(TrainError):
                self.result()


class Store:
    """Selections 0 to ``num_selections`` - 1 in this process. What ``later`` does, one a wait, makes rows ready; then
    nothing comes any more.

    asked: requests that waited; ahead: rows of each that did not; puts: writes."""

    def __init__(self, num_selections: int = 1) -> None:
        Answer.open.clear()
        self.plane = ColumnStore()
        tasks = [f"train_{number}" for number in range(num_selections)]
        self.pools = {task: DataPool(number, task, self.plane, 100) for number, task in enumerate(tasks)}
        self.later: list[Any] = []
        self.asked = 0
        self.ahead: list[int] = []
        self.puts = 0

    @property
    def pool(self) -> DataPool:
        """Selection 0."""
        return self.pools["train_0"]

    def add(self, row: int, selection: int = 0) -> GroupUid:
        """A finished group of two rows, with the rewards ``row`` and -``row``."""
        uid = GroupUid("data", row, 0)
        columns: dict[str, Any] = {
            "tokens": [np.arange(3 + row, dtype=np.int32)] * 2,
            "response_length": np.array([2, 2], dtype=np.int32),
            "loss_mask": [np.ones(2, dtype=np.float32)] * 2,
            "reward": np.array([row, -row], dtype=np.float32),
        }
        self.plane.put(uid, [RowId(uid, 0), RowId(uid, 1)], columns)
        self.pools[f"train_{selection}"].join(uid)
        return uid

    def fields(self, name: str, selection: int = 0) -> list[float]:
        """The first value of the field of each row of a closed selection."""
        return [
            float(np.ravel(row)[0]) for row in assemble(self.pools[f"train_{selection}"].share(ALL_ROWS)).columns[name]
        ]

    def take(self, task: str, request: ReadRequest, timeout_s: float) -> tuple[RowsMeta, TrainBatch | None]:
        pool = self.pools[task]
        while True:
            meta = pool.get_meta(request)
            self.asked += 1
            if meta.dealt or meta.ended:
                return meta, assemble(pool.plan_rows(meta.row_ids)) if meta.dealt else None
            if not self.later:
                raise DeadlineError("nothing came")
            self.later.pop(0)()

    def start_take(self, task: str, request: ReadRequest) -> Answer:
        pool = self.pools[task]
        meta = pool.get_meta(request)
        self.ahead.append(len(meta.row_ids))
        return Answer((meta, assemble(pool.plan_rows(meta.row_ids)) if meta.dealt else None))

    def start_put_fields(
        self, task: str, row_ids: Sequence[RowId], columns: Mapping[str, Column], writer: Writer | None = None
    ) -> Answer:
        self.puts += 1
        self.pools[task].put_fields(row_ids, columns, writer)
        return Answer(None)


def doubled(batch: TrainBatch) -> dict[str, Column]:
    """Twice the reward for each token, as the reference's log-probabilities."""
    return {"ref_log_probs": [np.full(2, 2 * reward, dtype=np.float32) for reward in batch.columns["reward"]]}


REF = Stage(reading("ref", (), ["ref_log_probs"]), doubled)


def dataset_of(
    stage: Stage, store: Store, num_rows: int, replica: int = 0, num_replicas: int = 1, **more: Any
) -> StreamingDataset:
    """What a process of the stage reads. more: as in ``StreamingDataset``, and ``together``."""
    together = more.pop("together", False)
    reads = replace(stage.reads, num_rows=num_rows, replica=replica, num_replicas=num_replicas, together=together)
    more = {"replays": stage.work is not None, "check": stage.check, **more}
    return StreamingDataset(cast("Any", store), reads, timeout_s=1.0, **more)


def run_stage(stage: Stage, store: Store, num_rows: int, *place: int, **more: Any) -> WorkReport:
    """A stage's work on selection 0, by one process."""
    return stage.run(dataset_of(stage, store, num_rows, *place, **more), 0)


def deals_of(store: Store, replica: int, num_rows: int) -> Generator[TrainBatch, None, None]:
    """What replica 0 or 1 of the task ``ref`` reads of selection 0."""
    dataset = dataset_of(REF, store, num_rows, replica, 2)
    with dataset.step(0):
        yield from dataset


def lose_writes(message: str) -> None:
    """Have every write that is under way fail."""
    for answer in Answer.open:
        if answer.value is None:
            answer.error = TrainError(message)
