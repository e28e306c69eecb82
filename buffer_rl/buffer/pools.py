"""The pools of all rollouts: opened with them, filled while they run, closed with the groups of the step."""

from __future__ import annotations

from collections import deque

from buffer_rl.buffer.columns import ColumnStore
from buffer_rl.buffer.pool import DataPool
from buffer_rl.errors import BufferRestartedError, BufferStateError
from buffer_rl.records.groups import GroupUid, Ticket

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

    def open(self, ticket: Ticket) -> None:
        """A rollout started."""
        store, wanted = self._stores[ticket.evaluation], None if ticket.evaluation else ticket.num_groups
        first_generation = ticket.worker * GENERATIONS
        self._pools[ticket.task] = DataPool(ticket.rollout_id, ticket.task, store, wanted, first_generation)
        for gone in (self._cleared, self._empty):
            if ticket.task in gone:
                gone.remove(ticket.task)

    def clear(self, task: str) -> list[GroupUid]:
        """Forget a pool and its payloads. Returns its groups."""
        pool = self._pools.pop(task)
        self._cleared.append(task)
        if pool.selection.closed and not len(pool.selection):
            self._empty.append(task)
        self.revision += 1
        return pool.drop_payloads()

    def require_slots(self, ticket: Ticket, groups_per_step: int) -> None:
        """Raises BufferStateError where the training tasks hold so many of the (S + 1) * P slots that less than P are
        left. A task holds slots until it is cleared, when the weights that it was trained into are published.

        The ticket is the budget: ``get_samples`` never waits for a slot, and over-sampling may lease more than P."""
        held = {task: pool.selection.num_slots for task, pool in self._pools.items() if task.startswith("train_")}
        if ticket.max_staleness is None or sum(held.values()) <= ticket.max_staleness * groups_per_step:
            return
        raise BufferStateError(
            f"{ticket.task} has no slots: {', '.join(held)} hold all of them",
            where="generate",
            expected=f"at most {ticket.max_staleness + 1} rollouts of {groups_per_step} groups at a time",
            hint="train on the oldest one, commit and release it",
        )

    def is_empty(self, task: str) -> bool:
        """Whether the task was closed without a group."""
        return task in self._empty

    def before(self, version: int) -> list[DataPool]:
        """The training pools of rollouts before ``version``."""
        return [p for task, p in self._pools.items() if task.startswith("train_") and p.rollout_id < version]

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
