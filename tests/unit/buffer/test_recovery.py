"""A Buffer that begins with the ledger of one that died: nothing is lost, nothing is trained twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger, RunRecord
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.pool import ReadRequest, Writer
from buffer_rl.buffer.state import BufferState
from buffer_rl.data.source import PromptDataSource
from buffer_rl.errors import BufferRestartedError, BufferStateError, CheckpointError, DataError
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid, RowId, SampleGroup, Ticket
from harness.ledger_contents import copied, go_back
from harness.tickets import close_rollout

ROWS, PER_STEP = 5, 2


class Run:
    """A Buffer and its file; ``kill`` replaces it by another one, which has the file alone."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "ledger.sqlite"
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(ROWS)))
        self.args: Any = compose(CORE_SECTIONS)(
            prompt_data=str(path), n_samples_per_prompt=2, rollout_batch_size=PER_STEP
        )
        self.state = self._open(restarted=False)

    def kill(self) -> BufferState:
        old = self.state.ledger
        self.state = self._open(restarted=True)
        assert isinstance(old, Ledger)
        old.close()
        return self.state

    def close(self) -> None:
        assert isinstance(self.state.ledger, Ledger)
        self.state.ledger.close()

    def _open(self, restarted: bool) -> BufferState:
        return BufferState(
            PromptDataSource(self.args),
            ledger=Ledger(self.file, run="r", keep_selected=True),
            groups_per_step=PER_STEP,
            restarted=restarted,
        )

    def entries(self) -> dict[GroupUid, GroupState]:
        audit = LedgerAudit(self.file)
        try:
            assert audit.faults() == []
            return dict(audit.states())
        finally:
            audit.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


def finish(state: BufferState, ticket: Ticket, group: SampleGroup) -> None:
    rows = [sample.row_id for sample in group]
    columns: dict[str, Any] = {
        "tokens": [np.ones(2, np.int32) for _ in rows],
        "loss_mask": [np.ones(1, np.float32) for _ in rows],
    }
    state.finish(ticket, group.uid, group.attempt, rows, columns)


def closed(state: BufferState, rollout_id: int) -> list[SampleGroup]:
    """A rollout that waits to be trained on."""
    ticket = state.generate(rollout_id)
    groups = state.get_samples(ticket, PER_STEP)
    for group in groups:
        finish(state, ticket, group)
    close_rollout(state, ticket)
    return groups


def shown(groups: list[SampleGroup]) -> list[Any]:
    return [[(s.uid, s.prompt, s.group_index, s.index, s.sample_index) for s in group] for group in groups]


def test_leased_and_finished_groups_are_handed_out_again_in_order_and_then_the_next_ones(run: Run) -> None:
    ticket = run.state.generate(0)
    groups = run.state.get_samples(ticket, 3)
    finish(run.state, ticket, groups[1])
    run.state.reject(ticket, groups[2].uid, groups[2].attempt, "dull")
    state = run.kill()
    assert state.get_buffer_length() == 2
    again = state.get_samples(state.generate(0), 3)
    assert shown(again[:2]) == shown(groups[:2])
    assert [group.attempt for group in again] == [2, 2, 1]
    assert [group[0].group_index for group in again] == [0, 1, 3]
    assert run.entries()[groups[2].uid] is GroupState.REJECTED


def test_reports_readers_and_commits_of_a_rollout_that_was_lost_are_told_so(run: Run) -> None:
    ticket = run.state.generate(0)
    (group,) = run.state.get_samples(ticket, 1)
    state = run.kill()
    asked: list[Callable[[], object]] = [
        lambda: finish(state, ticket, group),
        lambda: state.get_samples(ticket, 1),
        lambda: state.add_samples(ticket, [(group.uid, group.attempt)]),
        lambda: close_rollout(state, ticket),
        lambda: state.get_data(0),
        lambda: state.commit(0, 1),
    ]
    for ask in asked:
        with pytest.raises(BufferRestartedError):
            ask()
    assert run.entries() == {group.uid: GroupState.PENDING}


def test_a_step_that_was_taken_is_committed_by_the_ledger_alone_and_once(run: Run) -> None:
    groups = closed(run.state, 0)
    state = run.kill()
    assert state.get_buffer_length() == 0
    state.commit(0, 1)
    state = run.kill()
    state.commit(0, 1)
    state.release(1)
    assert run.entries() == {group.uid: GroupState.TRAINED for group in groups}
    with pytest.raises(BufferStateError, match="was trained on at step 1"):
        state.generate(0)
    with pytest.raises(BufferStateError, match="committed at step 1, not 2"):
        state.commit(0, 2)


def test_version_notes_and_position_are_those_of_the_buffer_that_died(run: Run) -> None:
    closed(run.state, 0)
    run.state.commit(0, 1)
    run.state.release(1)
    run.state.update_metadata({"a": [1], "b": None})
    state = run.kill()
    assert state.get_metadata() == {"a": [1], "b": None}
    assert state.generate(1).version == 1
    with pytest.raises(BufferStateError, match="older than the published version 1"):
        state.release(0)


def test_a_lease_that_the_disk_refuses_costs_no_group(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = run.state.generate(0)
    first = run.state.get_samples(ticket, 1)
    run.state.add_samples(ticket, [(first[0].uid, first[0].attempt)])

    def refuse(key: str, value: str) -> None:
        raise BufferStateError("the ledger cannot be written: disk I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(run.state.ledger, "remember", refuse)
        with pytest.raises(BufferStateError, match="disk I/O"):
            run.state.get_samples(ticket, 3)
    assert run.entries() == {first[0].uid: GroupState.PENDING}
    assert [group[0].group_index for group in run.state.get_samples(ticket, 3)] == [0, 1, 2]


def test_data_that_changed_under_a_run_is_an_error_and_not_another_prompt(run: Run) -> None:
    run.state.get_samples(run.state.generate(0), 2)
    Path(run.args.prompt_data[0]).write_text('{"prompt": "other"}\n')
    with pytest.raises((DataError, CheckpointError)):
        run.kill()


def test_a_report_is_refused_where_a_copy_gives_its_attempt_again(run: Run) -> None:
    ledger = run.state.ledger
    copy = copied(ledger)
    ticket = run.state.generate(0)
    (group,) = run.state.get_samples(ticket, 1)
    go_back(ledger, copy)
    assert ledger.lease(group.uid, 0) == group.attempt
    with pytest.raises(BufferRestartedError, match="earlier Buffer"):
        finish(run.state, ticket, group)
    assert ledger.entry(group.uid).state is GroupState.LEASED


def test_what_failed_before_is_still_counted(run: Run) -> None:
    ticket = run.state.generate(0)
    (group,) = run.state.get_samples(ticket, 1)
    assert run.state.count_failure(ticket, group.uid, "data") == (1, 1)
    state = run.kill()
    ticket = state.generate(0)
    other = state.get_samples(ticket, 2)[1]
    assert state.count_failure(ticket, group.uid, "data") == (2, 2)
    assert state.count_failure(ticket, other.uid, "data") == (3, 1)
    assert state.count_failure(ticket, other.uid, "infra") == (1, 1)


def test_a_resumed_runs_budget_stays_new_when_its_buffer_dies(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", run="r")
    record = RunRecord(ledger)
    uid = GroupUid("s", 0, 0)
    assert [record.count_failure(uid, "data") for _ in range(2)] == [(1, 1), (2, 2)]
    record.restore(3, {})
    assert RunRecord(ledger).count_failure(uid, "data") == (1, 3), "of the run, and of the group"
    ledger.close()


def test_what_was_read_of_a_buffer_that_died_is_not_written_into_the_same_groups_of_the_next_one(run: Run) -> None:
    fields = {"fields": frozenset({"tokens"}), "produces": frozenset({"ref_log_probs"})}
    request = ReadRequest(reader="reference", num_rows=8, **fields)

    def opened(state: BufferState) -> Writer:
        ticket = state.generate(0)
        state.open_selection(0)
        for group in state.get_samples(ticket, 1):
            finish(state, ticket, group)
        meta, _ = state.take(ticket.task, request)
        rows.append(meta.row_ids)
        return Writer(reader=request.reader, generation=meta.generation)

    rows: list[list[RowId]] = []
    late, state = opened(run.state), run.kill()
    live = opened(state)
    assert rows[0] == rows[1]
    for writer, value in ((late, 1.0), (live, 2.0)):
        columns = {"ref_log_probs": [np.full(1, value, np.float32) for _ in rows[1]]}
        state.put_fields("train_0", rows[1], columns, writer)
    close_rollout(state, state._rollouts.open["train_0"].ticket)
    assert [float(row[0]) for row in state.get_data(0).columns["ref_log_probs"]] == [2.0, 2.0]
