"""A torch dataset over a pool that is still being filled: batches come as rows become ready.

Who waits for whom: the reader waits for rows whose fields are there, in slices with a deadline for the whole wait; rows
become ready when the rollout finishes a group or another role writes a field. It ends when the rollout is closed and
the reader was handed every row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from buffer_rl.buffer.pool import ReadRequest, RowsMeta
from buffer_rl.errors import TrainError
from buffer_rl.train.collate import MicroBatch, collate
from buffer_rl.types import TrainBatch


class RowSource(Protocol):
    """Where rows come from; ``buffer_rl.buffer.client.BufferClient`` is one."""

    def take(
        self, task: str, request: ReadRequest, timeout_s: float, fields: Sequence[str] | None = None
    ) -> tuple[RowsMeta, TrainBatch | None]:
        """Rows for a reading task, as soon as there are any, with the fields named or all that they have; None at the
        end. Raises DeadlineError."""
        ...


class StreamingDataset(IterableDataset[TrainBatch]):
    """Batches of one rollout's rows, whole prompt groups, each row once over all readers of the same name.

    A pass after the first replays the batches of the first one from memory, in the same order: several epochs over a
    rollout ask the Buffer once. Call ``step`` to go on to the next rollout.

    request: who reads what (see ``buffer_rl.buffer.pool.ReadRequest``). fields: what each batch has; all where None.
    timeout_s: longest wait for one batch. replay: keep the batches for a second pass.
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
    ) -> None:
        self._replay = replay
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
        self._task = f"train_{partition_id}"
        self._seen.clear()
        self._ended = False

    def __iter__(self) -> Iterator[TrainBatch]:
        if self._task is None:
            raise TrainError("no rollout was chosen", where="StreamingDataset", hint="call step(rollout_id) first")
        yield from list(self._seen)
        while not self._ended:
            meta, batch = self._source.take(self._task, self._request, self._timeout_s, self._fields)
            if batch is None:
                self._ended = True
                return
            self.generation = meta.generation
            if self._replay:
                self._seen.append(batch)
            yield batch


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
