"""Groups that the rollout function made: accepted once, trained once, and never in the data source's counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.state import BufferState
from buffer_rl.data.source import EvalSource, PromptDataSource
from buffer_rl.errors import BufferRestartedError, BufferStateError, PayloadLostError
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid, RowId, Ticket
from harness.ledger_contents import entries
from harness.saved_state import load_saved, saved_state
from harness.tickets import close_rollout

ROWS, PER_STEP = 6, 3
THEIRS = [GroupUid("my-env", row, 0) for row in range(9)]


class Run:
    """A Buffer with its ledger in a file; ``restart`` gives the file to another Buffer."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "ledger.sqlite"
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(ROWS)))
        self.args: Any = compose(CORE_SECTIONS)(
            prompt_data=str(path), n_samples_per_prompt=2, rollout_batch_size=PER_STEP, rollout_shuffle=False
        )
        self.state = self._open()

    def _open(self, restarted: bool = False) -> BufferState:
        source = PromptDataSource(self.args)
        self.source = source.source_hashes[0]
        ledger = Ledger(self.file, run="r", keep_selected=True)
        ledger.set_num_rows(self.source, ROWS)
        return BufferState(source, ledger=ledger, groups_per_step=PER_STEP, restarted=restarted)

    def restart(self) -> None:
        self.state.ledger.close()
        self.state = self._open(restarted=True)

    def lease(self, ticket: Ticket, count: int) -> list[int]:
        """Lease and finish groups of the data source; their rows."""
        groups = self.state.get_samples(ticket, count)
        for group in groups:
            report(self.state, ticket, group.uid, group.attempt)
        return [group.uid.row for group in groups]

    def end_step(self, ticket: Ticket) -> list[GroupUid]:
        """Close, train, commit and release; what was trained."""
        close_rollout(self.state, ticket)
        trained = sorted({row.uid for row in self.state.get_data(ticket.rollout_id).row_ids})
        self.state.commit(ticket.rollout_id, ticket.rollout_id + 1)
        self.state.release(ticket.rollout_id + 1)
        return trained

    def of(self, uid: GroupUid) -> GroupState:
        return self.state.ledger.entry(uid).state

    def foreign_counts(self) -> dict[str, int]:
        """The non-zero counts of the foreign groups. The accounts must hold, and say nothing of them elsewhere."""
        audit = LedgerAudit(self.file)
        try:
            assert audit.faults() == []
            epochs = audit.epochs()
        finally:
            audit.close()
        assert all(e.source == self.source and sum(e.counts.values()) == ROWS for e in epochs if e.epoch is not None)
        foreign = [e for e in epochs if e.epoch is None]
        assert len(foreign) <= 1
        return {str(state): n for e in foreign for state, n in e.counts.items() if n}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.state.ledger.close()


def report(state: BufferState, ticket: Ticket, uid: GroupUid, attempt: int = 1, **more: Any) -> None:
    rows = [RowId(uid, index) for index in range(2)]
    columns: dict[str, Any] = {
        "tokens": [np.ones(2, np.int32) for _ in rows],
        "loss_mask": [np.ones(1, np.float32) for _ in rows],
    }
    state.finish(ticket, uid, attempt, rows, columns | more)


def test_foreign_groups_count_toward_the_step_and_not_in_the_epoch(run: Run) -> None:
    ticket = run.state.generate(0)
    report(run.state, ticket, THEIRS[0])
    assert run.lease(ticket, 2) == [0, 1]
    closed = close_rollout(run.state, ticket)
    assert (closed.num_groups, closed.num_rows, closed.drops, closed.surplus) == (3, 6, {}, 0)
    assert run.foreign_counts() == {"finished": 1}
    run.state.commit(0, 1)
    assert run.foreign_counts() == {"trained": 1}
    run.state.release(1)
    ticket = run.state.generate(1)  # the next groups are numbered as if there were no foreign ones
    groups = run.state.get_samples(ticket, 2)
    assert [(group.uid.row, group[0].group_index) for group in groups] == [(2, 2), (3, 3)]
    assert [run.state.ledger.number(uid) for uid in (groups[0].uid, THEIRS[0], THEIRS[1])] == [2, -1, None]


def test_what_was_trained_or_is_held_is_refused_and_what_was_dropped_is_not(run: Run) -> None:
    ticket = run.state.generate(0)
    for uid in THEIRS[:4]:
        report(run.state, ticket, uid)
    with pytest.raises(BufferStateError, match="my-env:0:0 cannot be taken over: it is finished"):
        report(run.state, ticket, THEIRS[0])
    close_rollout(run.state, ticket)
    run.state.commit(0, 1)
    run.state.release(1)
    ticket = run.state.generate(1)
    with pytest.raises(BufferStateError, match="my-env:0:0 cannot be taken over: it is trained") as caught:
        report(run.state, ticket, THEIRS[0])
    assert "trained on once" in caught.value.hint
    assert run.foreign_counts() == {"trained": 3, "pending": 1}
    report(run.state, ticket, THEIRS[3])
    assert close_rollout(run.state, ticket).num_groups == 1  # what was refused changed nothing


def test_a_group_of_the_data_source_must_be_leased_and_an_evaluation_takes_no_others(run: Run) -> None:
    ticket = run.state.generate(0)
    (group,) = run.state.get_samples(ticket, 1)
    for uid in (GroupUid(run.source, 4, 0), GroupUid(run.source, 0, 7)):
        with pytest.raises(BufferStateError, match="not leased to train_0"):
            report(run.state, ticket, uid)
    run.state.reject(ticket, group.uid, group.attempt, "dull")
    with pytest.raises(BufferStateError, match="not leased to train_0"):
        report(run.state, ticket, group.uid)
    assert run.foreign_counts() == {}
    args: Any = compose(CORE_SECTIONS)(eval_prompt_data=[f"held={run.args.prompt_data[0]}"])
    evals = EvalSource(args).all_groups
    state = BufferState(None, ledger=Ledger.in_memory(), groups_per_step=1, eval_groups=evals)
    with pytest.raises(BufferStateError, match="not leased to eval_0"):
        report(state, state.generate(0, evaluation=True), THEIRS[0])


def test_surplus_of_a_step_is_dropped_where_it_is_foreign_and_queued_where_it_is_not(run: Run) -> None:
    ticket = run.state.generate(0)
    assert run.lease(ticket, 1) == [0]
    for uid in THEIRS[:3]:
        report(run.state, ticket, uid)
    assert run.lease(ticket, 1) == [1]
    closed = close_rollout(run.state, ticket)
    assert (closed.num_groups, closed.drops, closed.surplus) == (3, {"surplus": 1}, 1)
    assert {row.uid for row in run.state.get_data(0).row_ids} == {GroupUid(run.source, 0, 0), *THEIRS[:2]}
    assert [header.uid.row for header in run.state.get_headers()] == [1]
    assert run.foreign_counts() == {"finished": 2, "pending": 1}


@pytest.mark.parametrize("closed", [False, True])
def test_a_rollout_that_is_given_up_loses_its_foreign_groups_and_may_get_them_again(run: Run, closed: bool) -> None:
    ticket = run.state.generate(0)
    run.lease(ticket, 1)
    report(run.state, ticket, THEIRS[0])
    if closed:
        close_rollout(run.state, ticket)
    run.state.abandon(0)
    assert run.foreign_counts() == {"pending": 1}
    assert run.state.get_buffer_length() == 1
    ticket = run.state.generate(0)
    report(run.state, ticket, THEIRS[0])
    assert run.end_step(ticket) == [THEIRS[0]]
    assert run.foreign_counts() == {"trained": 1}


def test_with_the_buffer_die_the_foreign_groups_that_no_step_has(run: Run) -> None:
    first = run.state.generate(0)
    run.lease(first, 2)
    report(run.state, first, THEIRS[0])
    close_rollout(run.state, first)
    run.restart()
    run.state.commit(0, 1)  # the trainer had the step
    assert run.foreign_counts() == {"trained": 1}
    run.state.release(1)
    lost = run.state.generate(1)
    run.lease(lost, 1)
    report(run.state, lost, THEIRS[1])
    run.restart()
    assert run.foreign_counts() == {"trained": 1, "pending": 1}
    with pytest.raises(BufferRestartedError):
        report(run.state, lost, THEIRS[2])
    ticket = run.state.generate(1)
    assert [header.uid.row for header in run.state.get_headers()] == [2]
    for uid in THEIRS[1:3]:
        report(run.state, ticket, uid)
    close_rollout(run.state, ticket)
    run.restart()
    run.state.abandon(1)  # the trainer had not taken it
    assert run.foreign_counts() == {"trained": 1, "pending": 2}


def test_a_resumed_run_knows_what_was_trained_and_has_lost_what_was_not(run: Run, tmp_path: Path) -> None:
    ticket = run.state.generate(0)
    run.lease(ticket, 2)
    report(run.state, ticket, THEIRS[0])
    run.end_step(ticket)
    ticket = run.state.generate(1)
    report(run.state, ticket, THEIRS[1])
    run.lease(ticket, 1)
    close_rollout(run.state, ticket)
    saved = saved_state(run.state)
    (tmp_path / "again").mkdir()
    again = Run(tmp_path / "again")
    load_saved(again.state, saved)
    assert again.foreign_counts() == {"trained": 1, "pending": 1}
    ticket = again.state.generate(1)
    assert [header.uid.row for header in again.state.get_headers()] == [2]
    with pytest.raises(BufferStateError, match="trained"):
        report(again.state, ticket, THEIRS[0])
    report(again.state, ticket, THEIRS[1])
    assert again.lease(ticket, 2) == [2, 3]
    assert len(again.end_step(ticket)) == 3
    again.state.ledger.close()


def test_foreign_groups_may_have_the_engines_log_probabilities_by_themselves(run: Run) -> None:
    unknown: dict[str, Any] = {"rollout_log_probs": [np.full(1, np.nan, np.float32)] * 2}
    ticket = run.state.generate(0)
    run.lease(ticket, 1)
    report(run.state, ticket, THEIRS[0], **unknown)
    close_rollout(run.state, ticket)
    assert "rollout_log_probs" not in run.state.get_data(0).columns
    run.state.abandon(0)
    ticket = run.state.generate(0)
    report(run.state, ticket, THEIRS[0], reward=np.ones(2, np.float32))
    run.lease(ticket, 1)
    with pytest.raises(BufferStateError, match=r"my-env:0:0 has the fields .*reward"):
        close_rollout(run.state, ticket)


EVENTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, len(THEIRS) - 1), max_size=4),  # foreign groups that are handed in
        st.integers(0, 3),  # groups that are leased
        st.sampled_from(["trained", "trained", "given up", "restart", "restart closed", "checkpoint", "go back"]),
    ),
    max_size=8,
)


@settings(max_examples=25)
@given(events=EVENTS)
def test_whatever_happens_nothing_is_trained_twice_and_the_data_keep_their_order(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[list[int], int, str]]
) -> None:
    run = Run(tmp_path_factory.mktemp("run"))
    trained: set[int] = set()  # the model: foreign rows that were trained, and the next row of the data
    next_row, step = 0, 0
    kept: Any = (saved_state(run.state), set(trained), next_row, step)
    for offered, count, end in events:
        ticket = run.state.generate(step)
        held: list[int] = []
        for row in offered:
            if row in trained | set(held):
                with pytest.raises(BufferStateError):
                    report(run.state, ticket, THEIRS[row])
            else:
                report(run.state, ticket, THEIRS[row])
                held.append(row)
        leased = run.lease(ticket, count)
        assert leased == [row % ROWS for row in range(next_row, next_row + count)]
        if end in ("trained", "checkpoint", "go back") and held + leased:
            mine = {uid.row for uid in run.end_step(ticket) if uid.source == "my-env"}
            assert mine == set(held[:PER_STEP])
            trained |= mine
            next_row += min(count, PER_STEP - len(mine))
            step += 1
        else:
            if end == "restart closed":
                close_rollout(run.state, ticket)
            if end.startswith("restart"):
                run.restart()
            run.state.abandon(step)
        if end == "checkpoint":
            kept = (saved_state(run.state), set(trained), next_row, step)
        if end == "go back":
            saved, trained, next_row, step = kept[0], set(kept[1]), kept[2], kept[3]
            run.restart()
            load_saved(run.state, saved)
        known = {uid.row: e.state for uid, e in entries(run.state.ledger).items() if uid.source == "my-env"}
        assert {row for row, state in known.items() if state is GroupState.TRAINED} == trained
        assert set(known.values()) <= {GroupState.TRAINED, GroupState.PENDING}
        run.foreign_counts()
    run.state.ledger.close()


def test_where_a_worker_dies_after_a_foreign_group_the_rollout_is_made_again_with_the_same_uids(run: Run) -> None:
    ticket = run.state.generate(0)
    report(run.state, ticket, THEIRS[0])
    assert run.lease(ticket, 1) == [0]
    with pytest.raises(PayloadLostError, match=r"train_0: .*groups of its own"):
        run.state.pass_on(ticket)
    assert run.foreign_counts() == {"finished": 1}
    run.state.abandon(0)
    ticket = run.state.generate(0)
    report(run.state, ticket, THEIRS[0])
    assert run.lease(ticket, 1) == [0]
    report(run.state, ticket, THEIRS[1])
    passed = run.state.pass_on(ticket)  # nothing is missing
    assert passed.num_groups == 0
    assert run.end_step(passed) == sorted([*THEIRS[:2], GroupUid(run.source, 0, 0)])
