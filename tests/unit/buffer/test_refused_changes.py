"""A change that is refused, by the disk at any of its statements or for its arguments, changes nothing."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.queue import RequeueRule
from buffer_rl.buffer.state import BufferState
from buffer_rl.data.source import PromptDataSource
from buffer_rl.errors import BufferStateError
from buffer_rl.options.section import compose
from buffer_rl.plan.schedule import Mode, Schedule
from buffer_rl.records.groups import (
    GroupUid,
    RolloutReport,
    RowId,
    Sample,
    SampleGroup,
    Status,
    Ticket,
    VersionSpan,
)


class FullDisk(sqlite3.Connection):
    """Refuses one statement that writes, after ``left`` of them; none where it is negative."""

    left = -1

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql.split()[0] in ("BEGIN", "INSERT", "UPDATE", "COMMIT"):
            FullDisk.left -= 1
            if FullDisk.left == -1:
                raise sqlite3.OperationalError("database or disk is full")
        return super().execute(sql, *args)


@pytest.fixture
def options(tmp_path: Path) -> Any:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(9)))
    return compose(CORE_SECTIONS)(prompt_data=str(path), n_samples_per_prompt=2, rollout_batch_size=2)


LOCKSTEP, ASYNC = Schedule(mode=Mode.LOCKSTEP), Schedule(mode=Mode.ASYNC, target=1, max_staleness=2)


@dataclass
class Run:
    """Where a Buffer begins. By the window a step takes five groups, so that its ticket may lease four."""

    options: Any
    folder: Path
    schedule: Schedule = LOCKSTEP

    def open_buffer(self, restarted: bool = False) -> BufferState:
        with patch.object(sqlite3, "connect", partial(sqlite3.connect, factory=FullDisk)):
            ledger = Ledger(self.folder / "ledger.sqlite", run="r", keep_selected=True)
        return BufferState(
            PromptDataSource(self.options),
            ledger=ledger,
            groups_per_step=5 if self.schedule.by_window else 2,
            rule=RequeueRule(keep_tokens=True),
            schedule=self.schedule,
            restarted=restarted,
        )


def columns(rows: int = 2) -> dict[str, Any]:
    return {"tokens": [np.ones(3, np.int32)] * rows, "loss_mask": [np.ones(2, np.float32)] * rows}


def finish(state: BufferState, uid: GroupUid, attempt: int = 1) -> None:
    state.finish(ticket(state), uid, attempt, [RowId(uid, 0), RowId(uid, 1)], columns())


def ticket(state: BufferState) -> Ticket:
    return state._rollouts.open["train_0"].ticket


def leases(state: BufferState) -> list[tuple[GroupUid, int]]:
    return [(uid, lease.group.attempt) for uid, lease in state._rollouts.open["train_0"].leases.items()]


def half_way(run: Run) -> BufferState:
    """Two groups are leased, one is queued again, one is finished, and so is a foreign one."""
    state = run.open_buffer()
    groups = state.get_samples(state.generate(0), 4)
    state.add_samples(ticket(state), [(groups[3].uid, 1)])
    finish(state, groups[0].uid)
    finish(state, GroupUid("theirs", 0, 0))
    return state


def without_foreign(run: Run) -> BufferState:
    """Two groups are leased, and one is finished."""
    state = run.open_buffer()
    finish(state, state.get_samples(state.generate(0), 3)[0].uid)
    return state


def ended(run: Run) -> BufferState:
    """The ticket has ended, with three finished groups; the selection is open."""
    state = half_way(run)
    finish(state, leases(state)[0][0])
    state.end_ticket(ticket(state))
    state.open_selection(0)
    return state


def close(state: BufferState) -> RolloutReport:
    report = state.close_selection(0, last_ticket=0)[0]  # so that a short step need not wait
    assert report is not None
    return report


def closed(run: Run) -> BufferState:
    state = ended(run)
    close(state)
    return state


def inherited(run: Run) -> BufferState:
    """The Buffer died after the selection was closed."""
    closed(run).ledger.close()
    return run.open_buffer(restarted=True)


def committed(run: Run) -> BufferState:
    state = closed(run)
    state.commit(0, 1)
    return state


def contents(state: BufferState) -> list[Any]:
    """All that the Buffer knows."""
    made, selections = state._rollouts, state._selections
    window = selections._window
    tables = ("groups", "history", "facts", "commits", "sources")
    return [
        [(entry.group.uid, entry.group.attempt, entry.number) for entry in made.queue.entries],
        [
            (task, run.ticket, run.leases.copy(), run.finished.copy(), dict(run.drops))
            for task, run in made.open.items()
        ],
        dict(made.finished),
        (made._admitted, made._num_leases, made._num_workers, made.newest_ticket),
        [(task, pool.selection.closed, pool.selection.uids) for task, pool in selections._pools.items()],
        [sorted(store._groups) for store in selections._stores.values()],
        window and [(uid, place.finished, place.passed) for uid, place in window._places.items()],
        (state._feed.state_dict(), sorted(state._record.inherited)),
        (dict(state._record.committed), state._record.version),
        [state.ledger._db.execute(f"SELECT * FROM {table}").fetchall() for table in tables],
    ]


IMPORTED = [RowId(GroupUid("recorded", row, 0), 0) for row in range(2)]
CHANGES: dict[str, tuple[Callable[[Run], BufferState], Callable[[BufferState], object]]] = {
    "lease": (half_way, lambda state: state.get_samples(ticket(state), 3)),
    "give back": (half_way, lambda state: state.add_samples(ticket(state), leases(state))),
    "finish": (half_way, lambda state: finish(state, *leases(state)[0])),
    "finish a foreign group": (half_way, lambda state: finish(state, GroupUid("others", 1, 0))),
    "reject": (half_way, lambda state: state.reject(ticket(state), *leases(state)[0], "dull")),
    "take over": (half_way, lambda state: state.import_groups(ticket(state), IMPORTED, columns())),
    "end the ticket": (half_way, lambda state: state.end_ticket(ticket(state))),
    "close": (ended, close),
    "pass on": (without_foreign, lambda state: state.pass_on(ticket(state))),
    "give up a ticket": (half_way, lambda state: state.abandon(0)),
    "give up an open selection": (ended, lambda state: state.abandon(0)),
    "give up a closed selection": (closed, lambda state: state.abandon(0)),
    "give up what another Buffer selected": (inherited, lambda state: state.abandon(0)),
    "produce again": (inherited, lambda state: state.generate(0)),
    "select again": (inherited, lambda state: state.open_selection(0)),
    "commit": (closed, lambda state: state.commit(0, 1)),
    "commit what another Buffer selected": (inherited, lambda state: state.commit(0, 1)),
    "release": (committed, lambda state: state.release(1)),
}


def is_refused(state: BufferState, call: Callable[[BufferState], object], left: int) -> bool:
    """Whether the disk refuses the call, at the statement behind ``left`` others."""
    FullDisk.left = left
    try:
        call(state)
    except BufferStateError as error:
        return "disk is full" in str(error)
    finally:
        FullDisk.left = -1
    return False


@pytest.mark.parametrize("schedule", [LOCKSTEP, ASYNC], ids=lambda schedule: schedule.mode)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_the_disk_refuses_changes_nothing_and_can_be_made_again(
    options: Any, tmp_path: Path, change: str, schedule: Schedule
) -> None:
    begin, call = CHANGES[change]
    state = begin(Run(options, tmp_path, schedule))
    before = contents(state)
    refused = 0
    while is_refused(state, call, refused):
        assert contents(state) == before
        refused += 1
    assert refused >= 3  # the first statement, the last one, and one between them
    assert contents(state) != before


@pytest.mark.parametrize("schedule", [LOCKSTEP, ASYNC], ids=lambda schedule: schedule.mode)
def test_a_selection_that_the_disk_refuses_to_close_is_open_and_closes_with_what_is_oldest_when_it_is_asked_again(
    options: Any, tmp_path: Path, schedule: Schedule
) -> None:
    """The groups that it would have been closed with do not join it before."""
    state = half_way(Run(options, tmp_path, schedule))
    finish(state, leases(state)[1][0])
    state.end_ticket(ticket(state))
    refused = 0
    while is_refused(state, close, refused):
        assert not state._selections.of("train_0").selection.closed
        assert sorted(state._rollouts.finished) == sorted(state._selections._stores[False]._groups)
        refused += 1
    assert refused >= 3
    assert len(state.get_data(0)) == (6 if schedule.by_window else 4)


def test_a_ticket_that_ends_with_its_selection_can_be_ended_again_whichever_half_the_disk_refuses(
    options: Any, tmp_path: Path
) -> None:
    """Two groups are reported, and two are not. Each half is a transaction of at least three statements."""
    state = half_way(Run(options, tmp_path))
    of = ticket(state)
    reports: list[tuple[RolloutReport, RolloutReport]] = []
    refused = 0
    while is_refused(state, lambda state: reports.append(state.end_and_close(of)), refused):
        refused += 1
    ((ended, closed),) = reports
    assert refused >= 3
    assert (ended.num_groups, ended.drops, closed.num_groups) == (2, {"unreported": 2}, 2)
    with pytest.raises(BufferStateError, match="train_0 is not open"):
        state.end_and_close(of)


def unreadable(uid: GroupUid) -> SampleGroup:
    """A group that user code gives back, with a token that is no number."""
    spans = [VersionSpan(0, 0, 1)]
    more: dict[str, Any] = {"tokens": [1, "two"], "response_length": 1, "rollout_log_probs": [-0.5]}
    return SampleGroup(
        uid=uid,
        attempt=1,
        samples=[
            Sample(prompt="p", uid=uid, sample_index=i, status=Status.ABORTED, weight_versions=spans, **more)
            for i in range(2)
        ],
    )


NO_TOKENS: Any = {"tokens": [1]}
WRONG: dict[str, Callable[[BufferState], object]] = {
    "give back what cannot be read": lambda state: state.add_samples(
        ticket(state), leases(state), [unreadable(uid) for uid, _ in leases(state)]
    ),
    "finish with columns that cannot be read": lambda state: state.finish(
        ticket(state), *leases(state)[0], [RowId(leases(state)[0][0], 0)], NO_TOKENS
    ),
    "take over a row twice": lambda state: state.import_groups(ticket(state), IMPORTED[:1] * 2, columns()),
    "take over too few values": lambda state: state.import_groups(ticket(state), IMPORTED, columns(1)),
}


@pytest.mark.parametrize("change", WRONG)
def test_a_change_whose_arguments_are_wrong_changes_nothing_and_the_step_goes_on(
    options: Any, tmp_path: Path, change: str
) -> None:
    state = half_way(Run(options, tmp_path))
    before = contents(state)
    with pytest.raises((BufferStateError, TypeError, ValueError)):
        WRONG[change](state)
    assert contents(state) == before
    finish(state, leases(state)[0][0])
    state.end_ticket(ticket(state))
    assert close(state).num_groups == 2
