"""The Buffer's logic without Ray: leases, queue, pools, commit and release, save and load."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.columns import assemble
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.pool import ReadRequest, Writer
from buffer_rl.buffer.readers import Share
from buffer_rl.buffer.rollouts import Admitted, GroupQueue
from buffer_rl.buffer.state import BufferState
from buffer_rl.data.source import EvalSource, PromptDataSource
from buffer_rl.errors import BufferStateError, CheckpointError
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid, RowId, Sample, SampleGroup, Ticket
from harness.ledger_contents import count_states
from harness.saved_state import load_saved, saved_state
from harness.tickets import close_rollout, schedule_of


def write_rows(folder: Path, count: int) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "label": str(i)}) + "\n" for i in range(count)))
    return str(path)


def make_state(
    path: str | list[str],
    *,
    groups_per_step: int,
    samples: int = 2,
    eval_too: bool = False,
    max_staleness: int | None = 0,
) -> BufferState:
    args: Any = compose(CORE_SECTIONS)(
        prompt_data=path,
        n_samples_per_prompt=samples,
        rollout_batch_size=groups_per_step,
        eval_prompt_data=[f"held={path}"] if eval_too else [],
    )
    evals = EvalSource(args)
    return BufferState(
        PromptDataSource(args),
        ledger=Ledger.in_memory(),
        groups_per_step=groups_per_step,
        eval_groups=lambda: [group for name in evals.datasets for group in evals.groups(name)],
        schedule=schedule_of(max_staleness),
    )


def columns_of(group: SampleGroup) -> dict[str, Any]:
    """Rows whose first token is the row number, and whose lengths differ."""
    rows = len(group)
    return {
        "tokens": [np.full(3 + i, group.uid.row, dtype=np.int32) for i in range(rows)],
        "loss_mask": [np.ones(2 + i, dtype=np.float32) for i in range(rows)],
        "reward": np.arange(rows, dtype=np.float32),
    }


def finish(state: BufferState, ticket: Ticket, group: SampleGroup) -> None:
    rows = [sample.row_id for sample in group]
    state.finish(ticket, group.uid, group.attempt, rows, columns_of(group))


def run_step(state: BufferState, rollout_id: int) -> list[str]:
    ticket = state.generate(rollout_id)
    groups = state.get_samples(ticket, ticket.num_groups)
    for group in groups:
        finish(state, ticket, group)
    close_rollout(state, ticket)
    state.commit(rollout_id, rollout_id + 1)
    state.release(rollout_id + 1)
    return [str(group.uid) for group in groups]


def test_a_step_moves_its_groups_through_all_states(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 5), groups_per_step=3)
    ticket = state.generate(0)
    groups = state.get_samples(ticket, 3)
    source = groups[0].uid.source

    def counts() -> dict[str, int]:
        found = count_states(state.ledger, source, 0, 5)
        assert sum(found.values()) == 5
        return {name: number for name, number in found.items() if number}

    assert counts() == {"pending": 2, "leased": 3}
    for group in groups:
        finish(state, ticket, group)
    assert counts() == {"pending": 2, "finished": 3}
    report = close_rollout(state, ticket)
    assert (report.num_groups, report.num_rows, report.drops, report.surplus) == (3, 6, {}, 0)
    batch = state.get_data(0)
    assert [str(row.uid) for row in batch.row_ids[::2]] == sorted(str(group.uid) for group in groups)
    assert sum(mask.sum() for mask in batch.columns["loss_mask"]) == 3 * (2 + 3)
    state.commit(0, 1)
    assert counts() == {"pending": 2, "trained": 3}
    state.release(1)
    with pytest.raises(BufferStateError, match="no pool train_0"):
        state.get_data(0)


def test_a_ticket_that_ends_with_its_selection_has_the_reports_of_both(tmp_path: Path) -> None:
    state, apart = (make_state(write_rows(tmp_path, 8), groups_per_step=2) for _ in range(2))
    tickets = []
    for each in (state, apart):
        ticket = each.generate(0)
        tickets.append(ticket)
        for group in each.get_samples(ticket, 4)[:3]:  # one is never mentioned again, and one is surplus
            finish(each, ticket, group)
    ended, closed = state.end_and_close(tickets[0])
    assert (ended, closed) == (apart.end_ticket(tickets[1]), apart.close_selection(0)[0])
    assert (ended.drops, closed.num_groups, closed.surplus) == ({"unreported": 1}, 2, 1)
    assert state.get_data(0).row_ids == apart.get_data(0).row_ids


def test_surplus_goes_back_as_prompts_in_the_order_of_admission_and_is_leased_first(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 8), groups_per_step=2)
    ticket = state.generate(0)
    groups = state.get_samples(ticket, 5)
    for group in reversed(groups):
        for sample in group:
            sample.response, sample.response_length = "written", 2
        finish(state, ticket, group)
    report = close_rollout(state, ticket)
    assert (report.num_groups, report.surplus) == (2, 3)
    assert {row.uid for row in state.get_data(0).row_ids} == {groups[0].uid, groups[1].uid}
    assert state.get_buffer_length() == 3
    state.commit(0, 1)
    state.release(1)
    again = state.get_samples(state.generate(1), 3)
    assert [group.uid for group in again] == [group.uid for group in groups[2:]]
    assert [group.attempt for group in again] == [2, 2, 2]
    assert all(sample.response == "" and sample.tokens == [] for group in again for sample in group)


def test_reports_without_a_live_lease_are_refused_and_change_nothing(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 6), groups_per_step=2)
    ticket = state.generate(0)
    group, other = state.get_samples(ticket, 2)
    finish(state, ticket, group)
    with pytest.raises(BufferStateError, match="not leased"):
        finish(state, ticket, group)
    with pytest.raises(BufferStateError, match="not leased"):
        state.reject(ticket, group.uid, group.attempt, "late")
    with pytest.raises(BufferStateError, match="not leased"):
        state.reject(ticket, other.uid, other.attempt + 1, "of another attempt")
    finish(state, ticket, other)
    close_rollout(state, ticket)
    with pytest.raises(BufferStateError, match="not open"):
        state.get_samples(ticket, 1)
    assert count_states(state.ledger, group.uid.source, 0, 6)[GroupState.FINISHED] == 2


def test_ranks_get_each_row_once_and_the_same_rows_again(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 9), groups_per_step=5, samples=3)
    ticket = state.generate(0)
    for group in state.get_samples(ticket, 5):
        finish(state, ticket, group)
    close_rollout(state, ticket)
    shares = [state.get_data(0, Share(rank, 2)) for rank in range(2)]
    rows = [row for share in shares for row in share.row_ids]
    assert sorted(rows) == sorted(state.get_data(0).row_ids)
    assert state.get_data(0, Share(1, 2)).row_ids == shares[1].row_ids
    assert abs(sum(shares[0].lengths) - sum(shares[1].lengths)) <= 5
    for share in shares:
        for row, tokens, reward in zip(share.row_ids, share.columns["tokens"], share.columns["reward"], strict=True):
            assert (tokens[0], len(tokens), reward) == (row.uid.row, 3 + row.sample_index, row.sample_index)


def test_mini_batches_are_whole_groups_that_are_dealt_in_uid_order(tmp_path: Path) -> None:
    """Five groups in two steps: 3 and 2. Each group has two rows."""
    state = make_state(write_rows(tmp_path, 9), groups_per_step=5)
    ticket = state.generate(0)
    for group in state.get_samples(ticket, 5):
        finish(state, ticket, group)
    close_rollout(state, ticket)
    parts = [state.get_data(0, Share(0, 1, 2, step)) for step in range(2)]
    assert sorted(row for part in parts for row in part.row_ids) == state.get_data(0).row_ids
    first, second, third, fourth, fifth = sorted({row.uid for row in state.get_data(0).row_ids})
    assert [{row.uid for row in part.row_ids} for part in parts] == [{first, third, fifth}, {second, fourth}]
    assert [len(part) for part in parts] == [6, 4]
    for step, part in enumerate(parts):
        shares = [state.get_data(0, Share(rank, 2, 2, step)) for rank in range(2)]
        assert sorted(row for share in shares for row in share.row_ids) == part.row_ids
    for step, expected in ((2, "does not exist"), (0, "5 groups cannot be split into 6")):
        with pytest.raises(BufferStateError, match=expected):
            state.get_data(0, Share(0, 1, 2 if step else 6, step))


def test_what_cannot_be_answered_is_refused_by_its_name(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 2), groups_per_step=1)
    ticket = state.generate(0)
    with pytest.raises(BufferStateError, match="-1 groups were asked for"):
        state.get_samples(ticket, -1)
    finish(state, ticket, *state.get_samples(ticket, 1))
    close_rollout(state, ticket)
    with pytest.raises(BufferStateError, match="rank 2 of 2 does not exist"):
        state.get_data(0, Share(2, 2))
    empty = BufferState(None, ledger=Ledger.in_memory(), groups_per_step=1)
    with pytest.raises(BufferStateError, match="there is no training data"):
        empty.get_samples(empty.generate(0), 1)
    with pytest.raises(BufferStateError, match="there is nothing to evaluate on"):
        empty.generate(0, evaluation=True)


def test_each_mini_batch_has_its_share_of_every_source(tmp_path: Path) -> None:
    """Of six groups of one source and three of another, in three steps: two and one a step."""
    (tmp_path / "more").mkdir()
    sources = [write_rows(tmp_path, 6), write_rows(tmp_path / "more", 3)]
    state = make_state(sources, groups_per_step=9)
    ticket = state.generate(0)
    for group in state.get_samples(ticket, 9):
        finish(state, ticket, group)
    close_rollout(state, ticket)
    of_sources = [{row.uid for row in state.get_data(0, Share(0, 1, 3, step)).row_ids} for step in range(3)]
    assert [sorted(Counter(uid.source for uid in uids).values()) for uids in of_sources] == [[1, 2]] * 3


def test_groups_that_were_finished_elsewhere_are_taken_over_once_and_trained(tmp_path: Path) -> None:
    path = write_rows(tmp_path, 6)
    first = make_state(path, groups_per_step=2)
    ticket = first.generate(0)
    for group in first.get_samples(ticket, 2):
        finish(first, ticket, group)
    close_rollout(first, ticket)
    batch = first.get_data(0)

    second = make_state(path, groups_per_step=2)
    ticket = second.generate(0)
    second.import_groups(ticket, batch.row_ids, batch.columns)
    with pytest.raises(BufferStateError, match="finished"):
        second.import_groups(ticket, batch.row_ids, batch.columns)
    report = close_rollout(second, ticket)
    assert (report.num_groups, report.num_rows, report.surplus) == (2, 4, 0)
    again = second.get_data(0)
    assert again.row_ids == batch.row_ids
    for name, column in batch.columns.items():
        assert all(np.array_equal(a, b) for a, b in zip(again.columns[name], column, strict=True))
    second.commit(0, 1)
    second.release(1)
    with pytest.raises(BufferStateError, match="trained"):
        second.import_groups(second.generate(1), batch.row_ids, batch.columns)


def test_a_group_that_is_taken_over_leaves_the_queue_and_is_admitted_before_later_ones(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 6), groups_per_step=3)
    ticket = state.generate(0)
    first, second, third = state.get_samples(ticket, 3)
    state.add_samples(ticket, [(first.uid, 1)])
    columns = {"tokens": [np.ones(2, np.int32)] * 2, "loss_mask": [np.ones(1, np.float32)] * 2}
    later = GroupUid(first.uid.source, 5, 7)
    state.import_groups(ticket, [RowId(first.uid, 0), RowId(later, 0)], columns)
    assert state.get_buffer_length() == 0
    (last,) = state.get_samples(ticket, 1)
    state.add_samples(ticket, [(group.uid, 1) for group in (last, third, second)])
    assert [header.uid for header in state.get_headers()] == [second.uid, third.uid, last.uid]
    assert [state.ledger.number(group) for group in (later, last.uid)] == [3, 4]
    saved = [second.uid, third.uid, first.uid, later, last.uid]
    assert [group.uid for group in state._rollouts.to_save()] == saved


def test_more_groups_than_a_step_trains_on_are_not_taken_over(tmp_path: Path) -> None:
    path = write_rows(tmp_path, 6)
    first = make_state(path, groups_per_step=3)
    ticket = first.generate(0)
    for group in first.get_samples(ticket, 3):
        finish(first, ticket, group)
    close_rollout(first, ticket)
    batch = first.get_data(0)
    second = make_state(path, groups_per_step=2)
    with pytest.raises(BufferStateError, match="--rollout-batch-size 3"):
        second.import_groups(second.generate(0), batch.row_ids, batch.columns)


def test_commit_and_release_are_two_things(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 6), groups_per_step=2)
    ticket = state.generate(0)
    for group in state.get_samples(ticket, 2):
        finish(state, ticket, group)
    with pytest.raises(BufferStateError, match="no pool train_0"):
        state.commit(0, 1)
    state.open_selection(0)
    with pytest.raises(BufferStateError, match="its selection is not closed"):
        state.commit(0, 1)
    close_rollout(state, ticket)
    with pytest.raises(BufferStateError, match="not committed"):
        state.release(1)
    state.commit(0, 1)
    state.commit(0, 1)
    with pytest.raises(BufferStateError, match="committed at step 1"):
        state.commit(0, 2)
    assert len(state.get_data(0)) == 4
    state.release(1)
    with pytest.raises(BufferStateError, match="older than"):
        state.release(0)
    with pytest.raises(BufferStateError, match="trained on at step 1"):
        state.generate(0)


def test_an_evaluation_hands_out_each_prompt_once_and_leaves_the_ledger_alone(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 4), groups_per_step=2, eval_too=True)
    train = state.generate(0)
    mine = state.get_samples(train, 2)
    ticket = state.generate(0, evaluation=True)
    assert ticket.num_groups == 4
    groups = state.get_samples(ticket, 3)
    groups += state.get_samples(ticket, 3)
    assert state.get_samples(ticket, 3) == []
    assert [group.samples[0].prompt for group in groups] == ["p0", "p1", "p2", "p3"]
    assert {group.data_set for group in groups} == {"held"}
    for group in groups:
        finish(state, ticket, group)
    assert close_rollout(state, ticket).num_groups == 4
    plan = state.take(ticket.task, ReadRequest(reader="metrics", fields=frozenset({"tokens"}), num_rows=4))[1]
    assert plan is not None
    rows = [sample.row_id for group in groups for sample in group]
    assert assemble(plan).row_ids == rows
    state.clear(ticket.task)
    assert count_states(state.ledger, mine[0].uid.source, 0, 4)[GroupState.LEASED] == 2


def test_three_epochs_in_one_batch_take_every_row_three_times(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 3), groups_per_step=9)
    groups = state.get_samples(state.generate(0), 9)
    assert Counter(group.uid.row for group in groups) == {0: 3, 1: 3, 2: 3}
    assert Counter(group.uid.epoch for group in groups) == {0: 3, 1: 3, 2: 3}


def test_put_fields_fill_a_field_row_by_row_and_refuse_other_content(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 4), groups_per_step=2)
    ticket = state.generate(0)
    for group in state.get_samples(ticket, 2):
        finish(state, ticket, group)
    close_rollout(state, ticket)
    shares = [state.get_data(0, Share(rank, 2)) for rank in range(2)]
    for number, share in enumerate(shares):
        values = [np.full(len(mask), row.sample_index + 0.5) for row, mask in _masks(share)]
        assert ("ref_log_probs" in state.get_data(0).columns) is False
        state.put_fields("train_0", share.row_ids, {"ref_log_probs": values})
        state.put_fields("train_0", share.row_ids, {"ref_log_probs": values})
        assert number in (0, 1)
    batch = state.get_data(0)
    for row, value in zip(batch.row_ids, batch.columns["ref_log_probs"], strict=True):
        assert value.tolist() == [row.sample_index + 0.5] * (2 + row.sample_index)
    with pytest.raises(BufferStateError, match="other content"):
        state.put_fields("train_0", batch.row_ids[:1], {"ref_log_probs": [np.zeros(2)]})
    with pytest.raises(BufferStateError, match="named twice"):
        state.put_fields("train_0", [batch.row_ids[0]] * 2, {"x": [np.zeros(2)] * 2})


def _masks(batch: Any) -> Any:
    return zip(batch.row_ids, batch.columns["loss_mask"], strict=True)


def test_metadata_merges_and_must_be_json(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 3), groups_per_step=1)
    state.update_metadata({"a": 1})
    state.update_metadata({"b": [2]})
    assert state.get_metadata() == {"a": 1, "b": [2]}
    with pytest.raises(BufferStateError, match="not JSON"):
        state.update_metadata({"c": object()})


@settings(max_examples=40)
@given(rows=st.integers(1, 7), per_step=st.integers(1, 5), cut=st.integers(0, 4), data=st.data())
@pytest.mark.slow
def test_after_a_restore_the_next_groups_are_those_of_an_uninterrupted_run(
    tmp_path_factory: pytest.TempPathFactory, rows: int, per_step: int, cut: int, data: st.DataObject
) -> None:
    path = write_rows(tmp_path_factory.mktemp("rows"), rows)
    extra = data.draw(st.lists(st.integers(0, 3), min_size=7, max_size=7), label="surplus of each step")

    def steps(state: BufferState, start: int, end: int) -> list[list[str]]:
        taken = []
        for rollout_id in range(start, end):
            ticket = state.generate(rollout_id)
            groups = state.get_samples(ticket, per_step + extra[rollout_id])
            for group in groups:
                finish(state, ticket, group)
            close_rollout(state, ticket)
            state.commit(rollout_id, rollout_id + 1)
            state.release(rollout_id + 1)
            taken.append([str(group.uid) for group in groups])
        return taken

    whole = steps(make_state(path, groups_per_step=per_step), 0, 7)
    first = make_state(path, groups_per_step=per_step)
    head = steps(first, 0, cut)
    saved = saved_state(first)
    second = make_state(path, groups_per_step=per_step)
    load_saved(second, saved)
    assert head + steps(second, cut, 7) == whole


def test_a_state_saved_in_mid_rollout_brings_back_what_was_not_trained_first(tmp_path: Path) -> None:
    path = write_rows(tmp_path, 9)
    state = make_state(path, groups_per_step=2)
    ticket = state.generate(0)
    leased = state.get_samples(ticket, 3)
    finish(state, ticket, leased[1])
    state.add_samples(ticket, [(leased[2].uid, leased[2].attempt)])
    saved = saved_state(state)
    restored = make_state(path, groups_per_step=2)
    load_saved(restored, saved)
    again = restored.get_samples(restored.generate(0), 3)
    assert [group.uid for group in again] == [group.uid for group in leased]
    assert [sample.prompt for group in again for sample in group] == [s.prompt for g in leased for s in g]
    assert count_states(restored.ledger, leased[0].uid.source, 0, 9)[GroupState.LEASED] == 3


def test_a_state_of_other_data_or_another_format_is_refused(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 4), groups_per_step=2)
    saved = saved_state(state)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(CheckpointError, match="sources"):
        load_saved(make_state(write_rows(other, 5), groups_per_step=2), saved)
    with pytest.raises(CheckpointError, match="format"):
        load_saved(make_state(write_rows(tmp_path, 4), groups_per_step=2), {**saved, "format": 99})


def test_prompts_handed_out_do_not_share_state_with_the_buffer(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 4), groups_per_step=1)
    ticket = state.generate(0)
    (group,) = state.get_samples(ticket, 1)
    group.samples[0].metadata["touched"] = True
    group.samples.append(Sample())
    state.add_samples(ticket, [(group.uid, group.attempt)])
    (again,) = state.get_samples(ticket, 1)
    assert len(again) == 2
    assert "touched" not in again[0].metadata


def test_a_group_given_back_twice_in_one_call_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 4), groups_per_step=2)
    ticket = state.generate(0)
    (group,) = state.get_samples(ticket, 1)
    with pytest.raises(BufferStateError, match="given back twice"):
        state.add_samples(ticket, [(group.uid, group.attempt)] * 2)
    assert state.get_buffer_length() == 0
    finish(state, ticket, group)


def test_a_step_that_was_not_committed_cannot_be_cleared(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 4), groups_per_step=2)
    ticket = state.generate(0)
    groups = state.get_samples(ticket, 2)
    for group in groups:
        finish(state, ticket, group)
    close_rollout(state, ticket)
    with pytest.raises(BufferStateError, match="not committed"):
        state.clear("train_0")
    saved = state.state_dict()
    assert len(saved["queue"]) == 2  # whoever resumes from here trains on them
    state.commit(0, 1)
    state.clear("train_0")
    state.clear("train_0")
    state.release(1)


class FailingSource(PromptDataSource):
    """Hands out one group and then breaks."""

    def draw(self, num_samples: int) -> list[SampleGroup | GroupUid]:
        if self._group_index:
            raise OSError("the disk is gone")
        return super().draw(num_samples)


def test_a_data_source_that_fails_costs_no_queued_group(tmp_path: Path) -> None:
    args: Any = compose(CORE_SECTIONS)(prompt_data=write_rows(tmp_path, 4), rollout_batch_size=1)
    state = BufferState(
        FailingSource(args),
        ledger=Ledger.in_memory(),
        groups_per_step=1,
    )
    ticket = state.generate(0)
    (group,) = state.get_samples(ticket, 1)
    state.add_samples(ticket, [(group.uid, group.attempt)])
    with pytest.raises(OSError, match="disk is gone"):
        state.get_samples(ticket, 2)
    assert state.get_buffer_length() == 1


def queue_of(state: BufferState, count: int) -> tuple[Ticket, list[SampleGroup]]:
    """A state whose queue holds ``count`` groups, in order."""
    ticket = state.generate(0)
    groups = state.get_samples(ticket, count)
    state.add_samples(ticket, [(group.uid, group.attempt) for group in groups])
    return ticket, groups


def test_chosen_groups_leave_the_queue_in_the_chosen_order_and_new_rows_fill_up(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 9), groups_per_step=4)
    ticket, queued = queue_of(state, 4)
    uids = [group.uid for group in queued]
    assert [header.uid for header in state.get_headers()] == uids
    assert [(header.admitted, header.prompt_length, header.attempts) for header in state.get_headers()] == [
        (number, 2, 1) for number in range(4)
    ]
    taken = state.get_samples(ticket, 3, [uids[3], uids[1]])
    assert [group.uid for group in taken[:2]] == [uids[3], uids[1]]
    assert taken[2].uid not in uids
    assert [header.uid for header in state.get_headers()] == [uids[0], uids[2]]


def test_choosing_nothing_leaves_the_queue_and_unknown_choices_are_passed_over(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 9), groups_per_step=4)
    ticket, queued = queue_of(state, 2)
    (fresh,) = state.get_samples(ticket, 1, [])
    assert fresh.uid not in {group.uid for group in queued}
    assert state.get_buffer_length() == 2
    (again,) = state.get_samples(ticket, 1, [fresh.uid, queued[1].uid, queued[0].uid][1:])
    assert again.uid == queued[1].uid
    assert [header.uid for header in state.get_headers()] == [queued[0].uid]


def test_a_group_with_rows_of_two_prompts_or_with_a_row_twice_is_refused_and_stays_leased(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 4), groups_per_step=2)
    ticket = state.generate(0)
    mine, other = state.get_samples(ticket, 2)
    for rows, message in (
        ([mine[0].row_id, other[0].row_id], r"was reported with row .*expected: rows of one prompt"),
        ([mine[0].row_id, mine[0].row_id], "with a row twice"),
    ):
        with pytest.raises(BufferStateError, match=f"(?s){message}"):
            state.finish(ticket, mine.uid, mine.attempt, rows, columns_of(mine))
    finish(state, ticket, mine)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_ticket_opens_when_the_version_that_is_s_steps_before_it_is_published(tmp_path: Path, staleness: int) -> None:
    state = make_state(write_rows(tmp_path, 40), groups_per_step=2, eval_too=True, max_staleness=staleness)
    for rollout_id in range(staleness + 1):
        ticket = state.generate(rollout_id)
        for group in state.get_samples(ticket, 2):
            finish(state, ticket, group)
        close_rollout(state, ticket)
    late = staleness + 1
    with pytest.raises(
        BufferStateError,
        match=rf"train_{late} cannot open: version 0 is published, and {2 * late} groups are not released\n"
        rf".*version 1 or later, and at most {2 * late} groups",
    ):
        state.generate(late)
    state.generate(0, evaluation=True)  # whose groups do not count
    state.commit(0, 1)
    with pytest.raises(BufferStateError, match="cannot open"):
        state.generate(late)
    state.release(1)
    assert state.generate(late).task == f"train_{late}"


def test_where_no_weights_are_published_any_number_of_rollouts_is_open(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 4), groups_per_step=2, max_staleness=None)
    assert [state.generate(rollout_id).task for rollout_id in range(4)] == [f"train_{i}" for i in range(4)]


def test_a_reader_of_a_cleared_pool_is_told_so_and_of_one_that_kept_nothing_has_ended(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 4), groups_per_step=2)
    run_step(state, 0)
    state.release(1)
    close_rollout(state, state.generate(1))
    request = ReadRequest(reader="ref", fields=frozenset({"tokens"}), num_rows=2)
    with pytest.raises(BufferStateError, match="no pool train_0 any more: it was cleared"):
        state.take("train_0", request)
    assert state.take("train_1", request)[0].ended, "why there are no groups is in the rollout's report"
    with pytest.raises(BufferStateError, match="there is no pool train_2"):
        state.take("train_2", request)


def test_what_was_computed_of_a_rollout_that_was_given_up_is_no_field_of_the_one_that_is_made_again(
    tmp_path: Path,
) -> None:
    state = make_state(write_rows(tmp_path, 2), groups_per_step=2)
    request = ReadRequest(reader="ref", fields=frozenset({"tokens"}), num_rows=8, produces=frozenset({"ref_log_probs"}))

    def produced() -> tuple[list[RowId], Writer]:
        ticket = state.generate(0)
        state.open_selection(0)
        for group in state.get_samples(ticket, 2):
            finish(state, ticket, group)
        meta, _ = state.take("train_0", request)
        return meta.row_ids, Writer(reader="ref", generation=meta.generation)

    def write(writer: Writer, value: float) -> None:
        columns = {"ref_log_probs": [np.full(1, value, dtype=np.float32) for _ in rows]}
        state.put_fields("train_0", rows, columns, writer)

    rows, late = produced()
    state.abandon(0)
    again, writer = produced()
    assert again == rows
    write(late, 1.0)
    write(writer, 2.0)  # refused if the late one had been written
    plan = state.take("train_0", ReadRequest(reader="train", fields=frozenset({"ref_log_probs"}), num_rows=4))[1]
    assert plan is not None
    batch = assemble(plan)
    assert [values.tolist() for values in batch.columns["ref_log_probs"]] == [[2.0]] * 4


def test_nothing_is_kept_of_steps_that_are_released_however_many_groups_came_back(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 9), groups_per_step=2, eval_too=True)
    for rollout_id in range(60):
        ticket = state.generate(rollout_id)
        groups = state.get_samples(ticket, 4)
        state.add_samples(ticket, [(group.uid, group.attempt) for group in groups])
        groups = state.get_samples(ticket, 4, [group.uid for group in groups])  # as a buffer filter has it
        for group in groups[:3]:
            finish(state, ticket, group)
        close_rollout(state, ticket)
        evaluation = state.generate(rollout_id, evaluation=True)
        for group in state.get_samples(evaluation, 9):
            finish(state, evaluation, group)
        close_rollout(state, evaluation)
        state.clear(evaluation.task)
        state.commit(rollout_id, rollout_id + 1)
        state.release(rollout_id + 1)
    made = state._rollouts
    assert not made.open
    assert not made.finished
    assert not state._selections
    assert [len(store._groups) for store in state._selections._stores.values()] == [0, 0]
    assert len(made.queue) == 1


def test_a_queue_keeps_no_trace_of_groups_that_were_chosen_out_of_it() -> None:
    queue = GroupQueue()
    entry = Admitted(group=SampleGroup(uid=GroupUid("s", 0, 0), samples=[]), number=0)
    for _ in range(1000):
        queue.put(entry)
        queue.remove([entry.group.uid])
    assert len(queue) == 0
    assert len(queue._order) < 100
