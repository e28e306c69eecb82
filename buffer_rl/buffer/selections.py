"""The selections of a run: which finished groups each step trains on, and the pools that hold their rows.

A step takes the groups that finished under the ticket of its number (``readers.Selection``), in an asynchronous run
those that the window gives it (``window``). A group joins a selection once it is certain to be chosen, or could be, so
that readers get it while the selection is open. ``selection_metrics`` is what its rows say about the step, from the
columns that the Buffer has in its own memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from buffer_rl.buffer.columns import Cell, ColumnStore, RowSizes, have_versions, oldest_version
from buffer_rl.buffer.ledger import RunRecord
from buffer_rl.buffer.pool import DataPool
from buffer_rl.buffer.rollouts import SURPLUS, TOO_OLD, Lease, Rollouts
from buffer_rl.buffer.window import Window
from buffer_rl.errors import BufferRestartedError, BufferStateError
from buffer_rl.plan.schedule import Schedule
from buffer_rl.records.groups import Column, GroupUid, RolloutReport, RowId, Ticket, equal_rewards, sample_means

REMEMBERED = 64
"""Cleared pools that are named to late readers; a reader is never later than that."""

GENERATIONS = 1 << 20
"""More often than a reader's processes are replaced before its task is opened again: so what was read of the task's
earlier pool has a smaller generation than all that is read of this one."""


class Selections:
    """Owner of the pools of all steps and evaluations, and of their payloads. Evaluations have a store of their own:
    the same file may be trained and evaluated on, with equal uids. Methods check everything first, and write the ledger
    before they change what is here.

    groups_per_step: P. schedule: how a step chooses; None if no weights are published. keeps_tokens: groups go on with
    tokens of earlier leases, so that the schedule's bound does not hold. restarted: another Buffer, with pools of its
    own, was here before. revision: grows with every change that may make rows ready, or let a selection close.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        record: RunRecord,
        *,
        groups_per_step: int,
        schedule: Schedule | None,
        keeps_tokens: bool,
        restarted: bool,
    ) -> None:
        self._rollouts = rollouts
        self._record = record
        self._groups_per_step = groups_per_step
        self._schedule = schedule
        self._bound = None if schedule is None or keeps_tokens else schedule.max_staleness
        self._window: Window | None = None
        if schedule is not None and schedule.by_window:
            self._window = Window(groups_per_step, schedule.window(groups_per_step))
        self._restarted = restarted
        self._lost = restarted  # what was finished and not selected, until production starts again
        self._stores = {False: ColumnStore(), True: ColumnStore()}  # by whether it is of evaluations
        self._pools: dict[str, DataPool] = {}
        self._cleared: deque[str] = deque(maxlen=REMEMBERED)
        self._has_leased = False
        self._num_too_old = 0  # since the last selection was closed
        self.revision = 0

    def __bool__(self) -> bool:
        return bool(self._pools)

    def __contains__(self, task: str) -> bool:
        return task in self._pools

    # -- groups --------------------------------------------------------------------------------------

    def leased(self, ticket: Ticket, uids: Iterable[GroupUid]) -> None:
        """Groups are leased under the ticket."""
        if self._window is not None and not ticket.evaluation:
            self._has_leased = True
            for uid in uids:
                self._window.lease(uid)

    def left(self, ticket: Ticket, uids: Iterable[GroupUid]) -> None:
        """Leased groups are rejected or given back, so that those behind them come forward."""
        if self._window is not None and not ticket.evaluation:
            for uid in uids:
                self._window.leave(uid)
            self._join_certain()
            self.revision += 1

    def check_report(self, ticket: Ticket, lease: Lease, columns: Mapping[str, Column | Cell], sizes: RowSizes) -> None:
        """Raises BufferStateError if the group's columns are stored already. A foreign group of an asynchronous run
        must say how old its tokens are, as no lease does; if steps take the groups of any ticket, all groups of the run
        must be foreign."""
        uid = lease.group.uid
        self._stores[ticket.evaluation].require_new(uid)
        if not (self._bound and lease.foreign):
            return
        if self._has_leased:
            what = f"group {uid} was made by the rollout function, beside groups that it leased"
            expected = "groups of one kind in an asynchronous run, since their ages are bounded in different ways"
            hint = "lease all groups, or make all of them; or --schedule lockstep"
            raise BufferStateError(what, where=ticket.task, expected=expected, hint=hint)
        if not have_versions(columns, sizes):
            raise BufferStateError(
                f"group {uid} does not say which weights its tokens are of",
                where=ticket.task,
                expected="in an asynchronous run, version spans in every sample: "
                "sample.weight_versions = [VersionSpan(version, 0, sample.response_length)]",
                hint="engines report the version of their tokens in meta_info; or --schedule lockstep",
            )

    def add(
        self,
        ticket: Ticket,
        lease: Lease,
        row_ids: Sequence[RowId],
        columns: Mapping[str, Column | Cell],
        sizes: RowSizes,
    ) -> None:
        """Store a finished group. It joins the selection of its ticket, and in an asynchronous run the open one, once
        that is certain to be closed with it."""
        uid = lease.group.uid
        self._stores[ticket.evaluation].put(uid, row_ids, columns, sizes)
        self.revision += 1
        if self._window is None or ticket.evaluation:
            if ticket.task in self._pools:
                self._pools[ticket.task].join(uid, lease.order)
            return
        if lease.imported:
            self._window.lease(uid)
        self._window.finish(uid)
        if (pool := self._open_step()) is not None:
            self._drop_too_old(pool.rollout_id)
        self._join_certain()

    def num_admitted(self, rollout_id: int) -> int:
        """How many groups a training ticket is opened with (``Schedule.num_admitted``). Raises BufferStateError if it
        was opened or trained on before, or may not open yet."""
        version, per_step, schedule = self._record.version, self._groups_per_step, self._schedule
        self._record.require_untrained(rollout_id)
        if rollout_id <= self._rollouts.newest_ticket:
            raise BufferStateError(f"train_{rollout_id} was opened before", hint="abandon starts production again")
        if schedule is None:
            return per_step
        held = self._rollouts.num_unreleased
        for step, num_groups in self._record.selected_since(version).items():  # by an earlier Buffer
            if step != rollout_id and f"train_{step}" not in self._pools:
                held += num_groups
        if admitted := schedule.num_admitted(rollout_id, version, held, per_step):
            return admitted
        raise BufferStateError(
            f"train_{rollout_id} cannot open: version {version} is published, and {held} groups are not released",
            where="generate",
            expected=f"version {rollout_id - schedule.target} or later, and at most "
            f"{(schedule.target + 1) * per_step} groups at a time",
            hint="train on the oldest step, commit and release it",
        )

    # -- steps ---------------------------------------------------------------------------------------

    def open(self, step: int) -> None:
        """See ``BufferState.open_selection``."""
        if f"train_{step}" in self._pools:
            return
        self._record.require_untrained(step)
        if self._window is not None and (other := self._open_step()) is not None:
            what = f"the selection of step {step} cannot open: that of step {other.rollout_id} is open"
            expected = "one open selection at a time, since the oldest groups are those of the next step"
            raise BufferStateError(what, expected=expected, hint="close it first")
        self.give_up_inherited(step)
        self._drop_too_old(step)
        pool = self._open(f"train_{step}", step, self._groups_per_step, self._rollouts.next_number())
        self._join_certain()
        for lease in self._rollouts.finished.values() if self._window is None else ():
            if lease.ticket == step:
                pool.join(lease.group.uid, lease.order)
        self.revision += 1

    def close(self, step: int, last_ticket: int | None) -> RolloutReport | None:
        """See ``BufferState.close_selection``."""
        task = f"train_{step}"
        if self._lost and (self._window is not None or step > self._rollouts.newest_ticket):
            raise BufferRestartedError(f"{task} was lost with an earlier Buffer", hint="it is produced again")
        self.open(step)
        pool = self._pools[task]
        if pool.report is not None:  # a repeat, of a caller that did not get the answer
            return pool.report
        if (choice := self._choose(pool, last_ticket)) is None:
            return None
        chosen, surplus = choice
        finished = self._rollouts.finished
        pool.require_equal_fields(chosen, [uid for uid in chosen if finished[uid].foreign])
        staleness = self._staleness(step, chosen)
        num_queued = self._rollouts.select(step, chosen, surplus)
        if self._window is not None:
            self._window.take(chosen)
        pool.report = RolloutReport(
            num_groups=len(chosen),
            num_rows=self._close(pool, chosen),
            drops={name: n for name, n in ((SURPLUS, len(surplus) - num_queued), (TOO_OLD, self._num_too_old)) if n},
            surplus=num_queued,
            staleness=staleness,
            metrics=self._metrics(chosen),
        )
        self._num_too_old = 0
        return pool.report

    def commit(self, rollout_id: int, step: int) -> None:
        """See ``BufferState.commit``."""
        if self._record.is_repeat(rollout_id, step):
            return
        if rollout_id in self._record.inherited:
            uids = self._rollouts.selected(rollout_id)
        else:
            selection = self.of(f"train_{rollout_id}").selection
            if not selection.closed:
                raise BufferStateError(f"rollout {rollout_id} cannot be committed: its selection is not closed")
            if not (uids := selection.uids):
                raise BufferStateError(f"rollout {rollout_id} cannot be committed: it was closed without a group")
        self._record.commit(uids, rollout_id, step)

    def release(self, version: int) -> None:
        """See ``BufferState.release``."""
        if version < self._record.version:
            raise BufferStateError(f"version {version} is older than the published version {self._record.version}")
        record = self._record
        is_new = self._rollouts.newest_ticket < 0 and not (record.committed or record.inherited)
        for step in () if is_new else range(record.version, version):  # a run that only evaluates has no steps
            if step not in record.committed:
                raise BufferStateError(f"version {version} cannot be released: step {step} is not committed")
        self._record.set_version(version)
        for pool in self._of_steps(0, version):
            self.clear(pool.task)
        self._drop_too_old(version)  # so that the ticket that may open now replaces them
        self.revision += 1

    def abandon(self, step: int) -> None:
        """See ``BufferState.abandon``."""
        record, rollouts = self._record, self._rollouts
        record.require_untrained(step)
        answered = record.committed.keys() | record.inherited
        for earlier in range(record.version, step):
            pool = self._pools.get(f"train_{earlier}")
            if earlier not in answered and not (pool and pool.selection.closed):
                what = f"production cannot start again with step {step}: the selection of step {earlier} is not closed"
                raise BufferStateError(what, hint=f"abandon {earlier}")
        kept = {uid for pool in self._of_steps(0, step) for uid in pool.selection.uids}
        lost = [uid for uid in rollouts.finished if uid not in kept]
        inherited = [number for number in record.inherited if number >= step]
        selected = [uid for number in inherited for uid in rollouts.selected(number)]
        rollouts.give_up([*lost, *selected], first_ticket=step)
        record.inherited.difference_update(inherited)
        for pool in self._of_steps(step):
            self._forget(pool)
        self._stores[False].drop(lost)
        if self._window is not None:
            self._window = self._window.empty()
        self._lost = False
        self.revision += 1

    def give_up_inherited(self, step: int) -> None:
        """What a Buffer that died had selected for a step is not trained on: the step is made again."""
        if step in self._record.inherited:
            self._rollouts.give_up(self._rollouts.selected(step))
            self._record.inherited.discard(step)

    def clear(self, task: str) -> None:
        """See ``BufferState.clear``."""
        if (pool := self._pools.get(task)) is None:
            return
        is_step = task.startswith("train_")
        if is_step and pool.rollout_id not in self._record.committed:
            raise BufferStateError(f"{task} cannot be cleared: it is not committed", hint="commit it first")
        for uid in self._forget(pool):
            if is_step:
                self._rollouts.finished.pop(uid, None)

    # -- evaluations ---------------------------------------------------------------------------------

    def open_evaluation(self, ticket: Ticket) -> None:
        """An evaluation takes all groups that are finished under its ticket."""
        self._open(ticket.task, ticket.rollout_id, None, ticket.worker)

    def check_evaluation(self, ticket: Ticket) -> None:
        """Raises BufferStateError if its groups cannot be one batch."""
        pool = self.of(ticket.task)
        pool.require_equal_fields(pool.selection.uids)

    def close_evaluation(self, ticket: Ticket) -> None:
        """Its ticket has ended."""
        pool = self._pools[ticket.task]
        self._close(pool, pool.selection.uids)

    # -- what is there -------------------------------------------------------------------------------

    def of(self, task: str) -> DataPool:
        """Raises BufferStateError if there is no such pool, or no longer; BufferRestartedError if an earlier Buffer may
        have had it."""
        if task in self._pools:
            return self._pools[task]
        if task in self._cleared:
            what = f"there is no pool {task} any more: it was cleared"
            raise BufferStateError(what, hint="it was trained on and released, or given up")
        if self._restarted:
            raise BufferRestartedError(f"{task} was lost with an earlier Buffer", hint="its rollout is produced again")
        raise BufferStateError(f"there is no pool {task}", expected=f"one of {sorted(self._pools) or 'none'}")

    # -- inside --------------------------------------------------------------------------------------

    def _open(self, task: str, rollout_id: int, num_groups: int | None, opening: int) -> DataPool:
        store = self._stores[task.startswith("eval_")]
        self._pools[task] = DataPool(rollout_id, task, store, num_groups, opening * GENERATIONS)
        if task in self._cleared:
            self._cleared.remove(task)
        return self._pools[task]

    def _choose(self, pool: DataPool, last_ticket: int | None) -> tuple[list[GroupUid], list[GroupUid]] | None:
        """What a step's open selection can be closed with, and the surplus; None if it must wait. Changes nothing."""
        step, rollouts = pool.rollout_id, self._rollouts
        if self._window is None or self._schedule is None:
            return pool.selection.choose(pool.pinned()) if rollouts.has_ended(step) else None
        chosen = self._window.choose()
        newest = step + self._schedule.target  # which may open once version ``step`` is published
        newest = newest if last_ticket is None else min(newest, last_ticket)
        if chosen is None and self._record.version == step and rollouts.have_all_ended(newest):
            chosen = self._window.choose(len(self._window))  # no other group will be finished before
        return None if chosen is None else (chosen, [])

    def _staleness(self, step: int, chosen: Iterable[GroupUid]) -> list[int]:
        """Of each group whose rows tell it: the step minus the oldest version of its tokens. Asserts the bound for all
        that were leased."""
        staleness = []
        for uid in chosen:
            if (oldest := oldest_version(self._stores[False][uid].cells)) is None:
                continue
            staleness.append(step - oldest)
            if self._bound is not None and not self._rollouts.finished[uid].imported:
                assert step - oldest <= self._bound, f"step {step} would train on group {uid}, of version {oldest}"
        return staleness

    def _metrics(self, chosen: Iterable[GroupUid]) -> dict[str, float]:
        """Of a selection, if the step's metrics cannot be those that one worker has of one ticket."""
        if not self._rollouts.has_shared and (self._schedule is None or not self._schedule.max_staleness):
            return {}
        return selection_metrics(self._stores[False], chosen, self._window)

    def _close(self, pool: DataPool, chosen: list[GroupUid]) -> int:
        """Returns how many rows the groups have."""
        for uid in chosen:
            if uid not in pool.selection:
                pool.join(uid, self._rollouts.finished[uid].order)
        pool.select(chosen)
        self.revision += 1
        return pool.num_rows

    def _forget(self, pool: DataPool) -> list[GroupUid]:
        """Forget a pool and its payloads. Returns its groups."""
        del self._pools[pool.task]
        self._cleared.append(pool.task)
        self.revision += 1
        return pool.drop_payloads()

    def _of_steps(self, first: int = 0, end: int | None = None) -> list[DataPool]:
        """The pools of steps from ``first`` on, before ``end``."""
        pools = [pool for task, pool in self._pools.items() if task.startswith("train_")]
        return [pool for pool in pools if first <= pool.rollout_id and (end is None or pool.rollout_id < end)]

    def _open_step(self) -> DataPool | None:
        return next((pool for pool in self._of_steps() if not pool.selection.closed), None)

    def _drop_too_old(self, step: int) -> None:
        """Reject foreign groups whose tokens are too old for a step of an asynchronous run, and for all later ones."""
        if self._window is None or not self._bound:
            return
        late = [
            uid
            for uid, lease in self._rollouts.finished.items()
            if lease.foreign
            and uid in self._window
            and (oldest_version(self._stores[False][uid].cells) or 0) < step - self._bound
        ]
        if late:
            self._rollouts.reject_too_old(late)
        for uid in late:
            self._window.leave(uid)
        self._stores[False].drop(late)
        self._num_too_old += len(late)

    def _join_certain(self) -> None:
        """Groups of the window that the open selection is certain to be closed with join it."""
        if self._window is None or (pool := self._open_step()) is None:
            return
        for uid in self._window.certain():
            if uid not in pool.selection:
                pool.join(uid, self._rollouts.finished[uid].order)


_MEANS = {
    "raw_reward": "rollout/raw_reward",
    "response_length": "rollout/response_len/mean",
    "truncated": "rollout/truncated_ratio",
    "baseline_reward": "rollout/baseline_reward",
}
_OLDEST, _NEWEST = "weight_version", "newest_weight_version"
_RECOMPUTED = "experts_recomputed"
_READ = (*_MEANS, _OLDEST, _NEWEST, _RECOMPUTED)


def selection_metrics(store: ColumnStore, uids: Iterable[GroupUid], window: Window | None = None) -> dict[str, float]:
    """Flat numbers of the groups that a step trains on: ``rollout/*`` as a rollout reports them of its own groups, and
    ``staleness/mixed``, the share of samples with tokens of several versions, and with ``--replay-routed-experts``
    ``rollout/experts_recomputed``, tokens whose experts are not those of the weights that sampled them. A sample of
    several parts counts once, with their mean. What a column is missing for, or in an object store, is left out.

    window: after the groups were taken from it; adds ``production/live_groups``, ``production/finished_groups`` (of the
    live ones) and ``production/passes``, the most younger groups that passed a live one.
    """
    values: dict[str, list[float]] = {}
    longest, zero_std, mixed, recomputed = 0.0, [], [], []
    for uid in uids:
        cells = store[uid].cells
        samples = [row.sample_index for row in store[uid].rows]
        inline = {name: cell.inline for name in _READ if (cell := cells.get(name)) is not None}
        columns = {name: np.asarray(values) for name, values in inline.items() if values is not None}
        for name in _MEANS.keys() & columns.keys():
            means = sample_means(samples, columns[name].astype(np.float64).tolist())
            values.setdefault(name, []).extend(means)
            if name == "raw_reward":
                zero_std.append(equal_rewards(means))
        if "response_length" in columns:
            longest = max(longest, float(columns["response_length"].max()))
        if _RECOMPUTED in columns:
            recomputed.append(int(columns[_RECOMPUTED].sum()))
        if _OLDEST in columns and _NEWEST in columns:
            several = columns[_NEWEST] > columns[_OLDEST]
            mixed += [share > 0 for share in sample_means(samples, several.astype(np.float64).tolist())]
    # Groups come in the order of their leases, and the last bits of a sum depend on its order.
    metrics = {_MEANS[name]: float(np.mean(sorted(values[name]))) for name in _MEANS if name in values}
    if "raw_reward" in values:
        metrics["rollout/raw_reward_std"] = float(np.std(sorted(values["raw_reward"])))
        metrics["rollout/zero_std"] = sum(zero_std) / len(zero_std)
    if "response_length" in values:
        metrics["rollout/response_len/max"] = longest
    if recomputed:
        metrics[f"rollout/{_RECOMPUTED}"] = float(sum(recomputed))
    if mixed:
        metrics["staleness/mixed"] = sum(mixed) / len(mixed)
    if window is not None:
        metrics["production/live_groups"] = float(len(window))
        metrics["production/finished_groups"] = float(window.num_finished)
        metrics["production/passes"] = float(window.num_passed)
    return metrics
