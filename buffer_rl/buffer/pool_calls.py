"""What the Buffer is asked about the rows of its pools: by trainers, roles and evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from buffer_rl.buffer.cells import BatchPlan, assemble
from buffer_rl.buffer.partition import Splitting
from buffer_rl.buffer.pool import ReadRequest, RowsMeta, Writer
from buffer_rl.buffer.pools import Pools
from buffer_rl.types import Column, RowId, TrainBatch


class PoolCalls:
    """The part of ``BufferState`` that concerns pools alone, whoever filled them."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    @property
    def revision(self) -> int:
        """Grows with every change that may make rows ready for a reader."""
        return self._pools.revision

    def plan_data(
        self,
        rollout_id: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        num_steps: int = 1,
        step: int = 0,
        splitting: Splitting = Splitting.ROWS,
    ) -> BatchPlan:
        """The share of one data-parallel rank in one mini-batch; repeats return the same rows (see
        ``DataPool.share``)."""
        return self._pools.of(f"train_{rollout_id}").share(dp_rank, dp_size, num_steps, step, splitting)

    def plan_eval_data(self, rollout_id: int) -> BatchPlan:
        """All rows of an evaluation."""
        return self._pools.plan(f"eval_{rollout_id}")

    def plan_fields(self, task: str, row_ids: Sequence[RowId], fields: Sequence[str] | None = None) -> BatchPlan:
        """Rows of a task (see ``DataPool.plan_rows``)."""
        return self._pools.of(task).plan_rows(row_ids, fields)

    def get_totals(self, rollout_id: int) -> tuple[int, int]:
        """Samples and unmasked response tokens that the step trains on."""
        return self._pools.totals(f"train_{rollout_id}")

    def get_data(
        self, rollout_id: int, dp_rank: int = 0, dp_size: int = 1, num_steps: int = 1, step: int = 0
    ) -> TrainBatch:
        """``plan_data`` with its payloads, which must all be in this process."""
        return assemble(self.plan_data(rollout_id, dp_rank, dp_size, num_steps, step))

    def get_eval_data(self, rollout_id: int) -> TrainBatch:
        """All rows of an evaluation, whose payloads must all be in this process."""
        return assemble(self.plan_eval_data(rollout_id))

    def get_meta(self, task: str, request: ReadRequest) -> RowsMeta:
        """Hand out rows that are ready to a reading task (see ``DataPool.get_meta``)."""
        return self._pools.get_meta(task, request)

    def take(
        self, task: str, request: ReadRequest, fields: Sequence[str] | None = None
    ) -> tuple[RowsMeta, BatchPlan | None]:
        """``get_meta`` and ``plan_fields`` of what it hands out, which is nothing (None) while no rows are ready."""
        meta = self._pools.get_meta(task, request)
        return meta, self.plan_fields(task, meta.row_ids, fields) if meta.row_ids else None

    def put_fields(
        self, task: str, row_ids: Sequence[RowId], columns: Mapping[str, Column], writer: Writer | None = None
    ) -> None:
        """Add derived fields (``ref_log_probs``, ``old_log_probs``) to rows of a task (see ``DataPool.put_fields``)."""
        self._pools.put_fields(task, row_ids, columns, writer)

    def offer_again(self, task: str, reader: str) -> int:
        """A reading task's process is replaced (see ``DataPool.offer_again``)."""
        return self._pools.offer_again(task, reader)
