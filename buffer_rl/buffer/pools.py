"""The pools of all steps and evaluations: filled while they are open, closed with the groups of the step."""

from __future__ import annotations

from collections import deque

from buffer_rl.buffer.columns import ColumnStore
from buffer_rl.buffer.pool import DataPool
from buffer_rl.errors import BufferRestartedError, BufferStateError
from buffer_rl.records.groups import GroupUid

REMEMBERED = 64
"""Cleared pools that are named to late readers; a reader is never later than that."""

GENERATIONS = 1 << 20
"""More often than a reader's processes are replaced before its task is opened again, for another worker: so what was
read of the task's earlier pool has a smaller generation than all that is read of this one."""


class Pools:
    """Evaluation has a store of its own: the same file may be trained and evaluated on, with equal uids.

    restarted: another Buffer, with pools of its own, was here before. revision: grows with every change that may make
    rows ready.
    """

    def __init__(self, restarted: bool = False) -> None:
        self._restarted = restarted
        self._stores = {False: ColumnStore(), True: ColumnStore()}  # by whether the rollout is an evaluation
        self._pools: dict[str, DataPool] = {}
        self._cleared: deque[str] = deque(maxlen=REMEMBERED)
        self._empty: deque[str] = deque(maxlen=REMEMBERED)  # closed without a group
        self.revision = 0

    def __contains__(self, task: str) -> bool:
        return task in self._pools

    def __bool__(self) -> bool:
        return bool(self._pools)

    def open(self, task: str, rollout_id: int, num_groups: int | None, opening: int) -> DataPool:
        """Open the pool of a selection, or of an evaluation. num_groups: how many it takes, None for all. opening:
        grows with each opening of the task."""
        store = self.store(evaluation=task.startswith("eval_"))
        self._pools[task] = DataPool(rollout_id, task, store, num_groups, opening * GENERATIONS)
        for gone in (self._cleared, self._empty):
            if task in gone:
                gone.remove(task)
        return self._pools[task]

    def store(self, *, evaluation: bool) -> ColumnStore:
        """The payloads of all evaluations, or of training groups."""
        return self._stores[evaluation]

    def clear(self, task: str) -> list[GroupUid]:
        """Forget a pool and its payloads. Returns its groups."""
        pool = self._pools.pop(task)
        self._cleared.append(task)
        if pool.selection.closed and not len(pool.selection):
            self._empty.append(task)
        self.revision += 1
        return pool.drop_payloads()

    def is_empty(self, task: str) -> bool:
        """Whether the task was closed without a group."""
        return task in self._empty

    def of_steps(self, first: int, end: int | None = None) -> list[DataPool]:
        """The pools of steps from ``first`` on, before ``end``."""
        pools = [pool for task, pool in self._pools.items() if task.startswith("train_")]
        return [pool for pool in pools if first <= pool.rollout_id and (end is None or pool.rollout_id < end)]

    def find(self, task: str) -> DataPool | None:
        """The pool, if it is open or closed and not cleared."""
        return self._pools.get(task)

    def of(self, task: str) -> DataPool:
        """Raises BufferStateError if there is no such pool, or no longer; BufferRestartedError if an earlier Buffer may
        have had it."""
        if task in self._pools:
            return self._pools[task]
        if task in self._cleared:
            raise BufferStateError(
                f"there is no pool {task} any more: it was cleared",
                hint="it was trained on and its slots were freed, or no group of it was kept",
            )
        if self._restarted:
            raise BufferRestartedError(f"{task} was lost with an earlier Buffer", hint="its rollout is produced again")
        raise BufferStateError(f"there is no pool {task}", expected=f"one of {sorted(self._pools) or 'none'}")
