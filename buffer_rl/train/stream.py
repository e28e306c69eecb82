"""A torch dataset over a pool that is still being filled: batches come as rows become ready.

Who waits for whom: the reader waits for rows whose fields are there, in slices with a deadline for the whole wait; rows
become ready when the rollout finishes a group or another role writes a field. It ends when the rollout is closed and
the reader was handed every row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from buffer_rl.buffer.pool import ReadRequest, RowsMeta
from buffer_rl.errors import TrainError
from buffer_rl.train.collate import MicroBatch, collate
from buffer_rl.types import TrainBatch

T_co = TypeVar("T_co", covariant=True)
Taken = tuple[RowsMeta, TrainBatch | None]


class Started(Protocol[T_co]):
    """A call under way, whose answer is asked for once, or drained (see ``buffer_rl.buffer.calling.StartedCall``)."""

    def result(self) -> T_co: ...
    def drain(self) -> None: ...


class RowSource(Protocol):
    """Where rows come from; ``buffer_rl.buffer.client.BufferClient`` is one."""

    def take(self, task: str, request: ReadRequest, timeout_s: float, fields: Sequence[str] | None = None) -> Taken:
        """Rows for a reading task, as soon as there are any, with the fields named or all that they have; None at the
        end. Raises DeadlineError."""
        ...

    def start_take(self, task: str, request: ReadRequest, fields: Sequence[str] | None = None) -> Started[Taken]:
        """Ask for the rows that are ready now, without waiting for the answer; None where there are none."""
        ...


class StreamingDataset(IterableDataset[TrainBatch]):
    """Batches of one rollout's rows, whole prompt groups, each row once over all readers of the same name.

    A pass after the first replays the batches of the first one from memory, in the same order: several epochs over a
    rollout ask the Buffer once. Call ``step`` to go on to the next rollout.

    request: who reads what (see ``buffer_rl.buffer.pool.ReadRequest``). fields: what each batch has; all where None.
    timeout_s: longest wait for one batch. replay: keep the batches for a second pass.
    leave: while a batch is worked on, the next one is asked for, where it is full and so many more are ready for other
    processes that read as the same task; None: never. Who leaves the loop before its end then calls ``drain``: what
    was asked for is nobody else's.
    ``generation`` is that of the newest batch (see ``RowsMeta``).
    """

    def __init__(
        self,
        source: RowSource,
        request: ReadRequest,
        *,
        timeout_s: float,
        fields: Sequence[str] | None = None,
        replay: bool = True,
        leave: int | None = None,
    ) -> None:
        self._replay = replay
        self._ahead = None if leave is None else replace(request, prefetch_reserve=leave)
        self._asked: Started[Taken] | None = None
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
        """Wait until nothing is asked for any more."""
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
        """See ``StreamingDataset.step``."""
        self._streaming.step(partition_id)
