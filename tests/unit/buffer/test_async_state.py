"""The Buffer of an asynchronous run: how many groups a ticket has, and which of them a step takes when."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.errors import BufferRestartedError, BufferStateError, PayloadLostError
from buffer_rl.records.groups import GroupUid, RowId
from harness.async_run import AsyncRun
from harness.saved_state import load_saved, saved_state

# -- admission ------------------------------------------------------------------------------------------------------


def test_a_ticket_opens_when_the_version_s_steps_before_it_is_published_and_has_p_groups(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path)
    assert [run.generate(0), run.generate(1)] == [2, 2]
    with pytest.raises(BufferStateError, match=r"train_2 cannot open: version 0 is published, and 4 groups are not"):
        run.generate(2)
    run.lease(0, 2)
    run.finish(0, 0, 1)
    assert run.close(0) == [0, 1]
    run.state.commit(0, 1)
    with pytest.raises(BufferStateError, match="cannot open"):
        run.generate(2)
    run.state.release(1)
    assert run.generate(2) == 2


def test_a_ticket_is_opened_once_also_after_it_has_ended(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path)
    run.generate(0)
    for _ in range(2):
        with pytest.raises(BufferStateError, match="train_0 was opened before"):
            run.state.generate(0)
        if run.tickets:
            run.end(0)


def test_the_ticket_after_one_that_ended_short_has_its_missing_groups_too(tmp_path: Path) -> None:
    """P = 2: two groups are not released at version 0, and (1 + 1 - 0) * 2 - 1 = 3 may be leased for ticket 1."""
    run = AsyncRun(tmp_path)
    run.generate(0)
    run.lease(0, 1)
    run.finish(0, 0)
    assert run.end(0).num_groups == 1
    assert run.generate(1) == 3


def test_after_a_short_step_the_budget_is_full_again(tmp_path: Path) -> None:
    """S = 1: both tickets end with one group in all, the step is short, and the next ticket has all of 2 * P groups."""
    run = AsyncRun(tmp_path)
    for number in (0, 1):
        run.generate(number)
    run.lease(1, 1)
    run.finish(1, 0)
    run.end(0)
    assert run.close(0) is None
    run.end(1)
    assert run.close(0) == [0]
    run.publish(1)
    assert run.generate(2) == 4


def test_a_ticket_leases_no_more_groups_than_it_has_but_for_those_that_replace_others(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path)
    run.generate(0)
    assert run.lease(0, 5) == [0, 1]
    for _ in range(2):
        with pytest.raises(
            BufferStateError, match=r"(?s)train_0 has 2 groups, and all of them are.*and return; further"
        ):
            run.lease(0, 1)
        assert run.lease(0, 0) == []
        if run.state_of(0) is GroupState.LEASED:
            run.finish(0, 0)
    run.reject(0, 1)
    assert run.lease(0, 5) == [2]
    run.give_back(0, 2)
    assert run.lease(0, 5) == [2]


def test_what_a_buffer_filter_chooses_is_limited_too(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path)
    run.generate(0)
    run.lease(0, 2)
    for row in (0, 1):
        run.give_back(0, row)
    assert run.lease(0, 1, [run.uid(1)]) == [1]
    assert run.lease(0, 9, [run.uid(0), run.uid(1)]) == [0]


def test_an_evaluation_is_no_part_of_the_budget_nor_of_the_window(tmp_path: Path) -> None:
    """Its groups have the uids of training groups, which stay where they are."""
    run = AsyncRun(tmp_path, bound=1)
    run.generate(0)
    run.lease(0, 2)
    evaluation = run.state.generate(0, evaluation=True)
    held = run.state.get_samples(evaluation, 9)
    assert [group.uid for group in held] == [run.uid(row) for row in range(4)]
    run.state.reject(evaluation, held[0].uid, 1, "dull")
    run.state.add_samples(evaluation, [(held[1].uid, 1)])
    run.finish(0, 1)
    assert run.generate(1) == 2
    assert run.state.end_ticket(evaluation).drops == {"dull": 1, "unreported": 2}
    assert run.close(0) is None
    run.finish(0, 0)
    assert run.close(0) == [0, 1]


# -- selection ------------------------------------------------------------------------------------------------------


def test_a_step_takes_groups_of_any_ticket_and_waits_for_one_that_would_be_passed_too_often(tmp_path: Path) -> None:
    """P = 2, W = 1 + (2 - 1) * 2 = 3: group 0 may be passed twice."""
    run = AsyncRun(tmp_path)
    for number in (0, 1):
        run.generate(number)
        run.lease(number, 2)
    run.finish(1, 2, 3)
    assert run.close(0) == [2, 3], "of ticket 1, which pass 0 and 1"
    run.end(1)
    run.publish(1)
    run.generate(2)
    run.lease(2, 2)
    run.finish(2, 4, 5)
    assert run.close(1) is None
    run.finish(0, 1)
    assert run.close(1) is None, "1 and 4 would pass 0, the latter for the third time"
    run.finish(0, 0, version=0)
    assert run.close(1) == [0, 1]


def test_the_revision_grows_with_everything_that_may_let_a_selection_close(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path)
    for number in (0, 1):
        run.generate(number)
        run.lease(number, 2)
    assert run.close(0) is None
    seen = [run.state.revision]
    run.finish(0, 0)
    seen.append(run.state.revision)
    run.reject(0, 1)
    seen.append(run.state.revision)
    run.give_back(1, 2)
    seen.append(run.state.revision)
    run.tickets[1] = run.state.pass_on(run.tickets[1])
    seen.append(run.state.revision)
    run.end(0)
    seen.append(run.state.revision)
    run.state.requeue_for_readers("train_0", "actor")
    seen.append(run.state.revision)
    assert seen == sorted(set(seen))


def test_certain_groups_are_read_while_the_selection_is_open_and_are_in_it_at_its_close(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path, per_step=3)
    run.generate(0)
    run.generate(1)
    run.lease(0, 3)
    run.lease(1, 3)
    run.finish(0, 2)
    run.finish(1, 3)
    run.state.open_selection(0)
    assert run.read(0) == [2], "two live groups are before it; 3 is not certain"
    run.reject(0, 0)
    assert run.read(0) == [2, 3]
    run.finish(1, 4, 5)
    assert run.read(0) == [2, 3], "group 1 is still before them"
    assert run.close(0) == [2, 3, 4]
    assert run.read(0) == [2, 3, 4]


def test_what_is_requeued_or_rejected_moves_those_behind_it_forward_and_comes_back_as_the_youngest(
    tmp_path: Path,
) -> None:
    run = AsyncRun(tmp_path, bound=1)
    for number in (0, 1):
        run.generate(number)
        run.lease(number, 2)
    run.finish(0, 1)
    run.finish(1, 2, 3)
    assert run.close(0) is None
    run.give_back(0, 0)
    assert run.lease(0, 1) == [0]
    run.finish(0, 0)
    assert run.close(0) == [1, 2]
    run.publish(1)
    assert run.close(1) == [0, 3]


def test_one_selection_is_open_at_a_time_and_a_closed_one_gives_its_report_again(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path)
    for number in (0, 1):
        run.generate(number)
        run.lease(number, 2)
    run.state.open_selection(0)
    with pytest.raises(BufferStateError, match=r"step 1 cannot open: that of step 0 is open"):
        run.state.open_selection(1)
    run.finish(0, 0, 1)
    run.finish(1, 2, 3)
    assert [run.close(0), run.close(0)] == [[0, 1], [0, 1]]
    run.state.open_selection(1)
    assert run.read(1) == [2, 3]


def test_a_step_is_short_only_if_nothing_is_produced_no_ticket_may_open_and_no_publication_is_pending(
    tmp_path: Path,
) -> None:
    """The run has three tickets, of which the last one ends with one group."""
    run = AsyncRun(tmp_path)
    for number in (0, 1):
        run.generate(number)
        run.lease(number, 2)
        run.finish(number, 2 * number, 2 * number + 1)
    run.end(0)
    assert run.close(0, last_ticket=2) == [0, 1]
    run.publish(1)
    run.generate(2)
    run.lease(2, 1)
    run.finish(2, 4)
    assert run.close(1, last_ticket=2) == [2, 3]
    run.end(1)
    assert run.close(2, last_ticket=2) is None, "ticket 2 is open"
    run.end(2)
    assert run.close(2, last_ticket=2) is None, "version 2 is not published"
    run.publish(2)
    assert run.close(2) is None, "in a run of more tickets, ticket 3 may open"
    assert run.close(2, last_ticket=2) == [4]


def test_fields_that_do_not_fit_leave_the_selection_open_and_what_is_in_it(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path)
    for number in (0, 1):
        run.generate(number)
        run.lease(number, 2)
    run.finish(1, 2)
    uid = run.uid(3)
    run.state.finish(run.tickets[1], uid, 1, [RowId(uid, 0)], {"tokens": [np.ones(2, np.int32)]})
    with pytest.raises(BufferStateError, match="has the fields"):
        run.state.close_selection(0)
    run.finish(0, 0, 1)
    assert run.close(0) == [0, 1]


def test_staleness_is_told_by_group_and_one_that_is_too_old_is_an_error_of_ours(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path, per_step=1, target=1, bound=2)
    run.generate(0)
    run.lease(0, 1)
    run.finish(0, 0)
    report, _ = run.state.close_selection(0)
    assert report is not None
    assert report.staleness == [0]
    run.publish(1)
    for number in (1, 2):
        run.generate(number)
        run.lease(number, 1)
    run.finish(1, 1, version=0)
    report, _ = run.state.close_selection(1)
    assert report is not None
    assert report.staleness == [1]
    run.publish(2)
    run.finish(2, 2, version=-1)  # its rows do not tell
    report, _ = run.state.close_selection(2)
    assert report is not None
    assert report.staleness == []
    run.publish(3)
    run.generate(3)
    run.lease(3, 1)
    run.finish(3, 3, version=0)
    with pytest.raises(AssertionError, match=r"step 3 would train on group .*, of version 0"):
        run.state.close_selection(3)


# -- deaths and checkpoints -----------------------------------------------------------------------------------------


def test_a_ticket_that_is_passed_on_keeps_what_is_finished_and_its_leases_are_made_again_as_the_youngest(
    tmp_path: Path,
) -> None:
    run = AsyncRun(tmp_path, per_step=3)
    for number in (0, 1):
        run.generate(number)
        run.lease(number, 3)
    run.finish(0, 1)
    dead = run.tickets[0]
    run.tickets[0] = run.state.pass_on(dead)
    assert run.tickets[0].num_groups == 2
    with pytest.raises(BufferStateError, match="another worker has train_"):
        run.state.get_samples(dead, 1)
    assert run.lease(0, 9) == [0, 2]
    run.finish(1, 3, 4, 5)
    assert run.close(0) == [1, 3, 4], "0 and 2 are behind 5"
    run.publish(1)
    run.tickets[0] = run.state.pass_on(run.tickets[0])
    assert run.tickets[0].num_groups == 2, "what is released stays finished"


def test_workers_that_share_a_ticket_have_their_own_groups_and_one_that_dies_passes_on_its_own(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path, per_step=5)
    run.generate(0)
    whole = run.tickets[0]
    first, second = run.state.share(whole, 2)
    assert [part.num_groups for part in (first, second)] == [3, 2]
    run.tickets = {0: first, 1: second}  # one worker each
    assert run.lease(0, 9) == [0, 1, 2]
    assert run.lease(1, 9) == [3, 4]
    for ticket in (second, whole):
        with pytest.raises(BufferStateError, match="all of them are leased or finished"):
            run.state.get_samples(ticket, 1)
    run.reject(1, 3)
    assert run.lease(1, 9) == [5], "what it rejects it replaces"
    run.finish(0, 1)
    run.tickets[0] = run.state.pass_on(first)
    assert run.tickets[0].num_groups == 2
    with pytest.raises(BufferStateError, match="another worker has train_"):
        run.state.get_samples(first, 1)
    assert run.lease(0, 9) == [0, 2]
    run.finish(0, 0, 2)
    run.finish(1, 4, 5)
    report = run.state.end_ticket(whole)
    assert (report.num_groups, report.drops) == (5, {"dull": 1})
    assert run.close(0, last_ticket=0) == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("num_parts", [0, 3])
def test_a_part_without_a_group_is_refused(tmp_path: Path, num_parts: int) -> None:
    run = AsyncRun(tmp_path, per_step=2)
    run.generate(0)
    with pytest.raises(BufferStateError, match="workers cannot share train_0, of 2 groups"):
        run.state.share(run.tickets[0], num_parts)
    run.state.share(run.tickets[0], 2)
    assert run.state.end_ticket(run.tickets[0]).num_groups == 0


def test_a_ticket_of_which_something_is_leased_is_not_shared(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path)
    run.generate(0)
    run.lease(0, 1)
    with pytest.raises(BufferStateError, match="nothing is leased"):
        run.state.share(run.tickets[0], 2)
    assert run.lease(0, 1) == [1]


def test_a_ticket_with_a_foreign_group_is_not_passed_on_though_the_group_is_trained_and_released(
    tmp_path: Path,
) -> None:
    """The function would begin again with its first uid, which was trained on."""
    run = AsyncRun(tmp_path)
    for number in (0, 1):
        run.generate(number)
    foreign(run, 0, 0, version=0)
    foreign(run, 1, 1, version=0)
    assert run.close(0) == [0, 1]
    run.publish(1)
    with pytest.raises(PayloadLostError):
        run.state.pass_on(run.tickets[0])


def test_production_that_starts_again_gives_up_all_but_what_the_trainer_has(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path)
    for number in (0, 1):
        run.generate(number)
        run.lease(number, 2)
    run.finish(0, 0, 1)
    run.finish(1, 2)
    assert run.close(0) == [0, 1]
    run.state.open_selection(1)
    assert run.read(1) == [2]
    old = dict(run.tickets)
    run.state.abandon(1)
    for ticket in old.values():
        with pytest.raises(BufferStateError, match="is not open"):
            run.state.get_samples(ticket, 1)
    assert [header.uid.row for header in run.state.get_headers()] == [2, 3]
    assert run.close(1, last_ticket=1) is None, "ticket 1 is to be opened again"
    assert run.generate(1) == 2
    assert run.lease(1, 9) == [2, 3]
    run.finish(1, 2, 3)
    run.end(1)
    run.state.commit(0, 1)
    assert run.close(1, last_ticket=1) == [2, 3]


def test_production_starts_again_with_no_step_that_leaves_one_out(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path)
    for number in (0, 1):
        run.generate(number)
    with pytest.raises(BufferStateError, match="the selection of step 0 is not closed"):
        run.state.abandon(1)
    run.state.open_selection(0)
    with pytest.raises(BufferStateError, match="the selection of step 0 is not closed"):
        run.state.abandon(1)


@pytest.mark.parametrize("trained", [False, True], ids=["given up", "trained"])
def test_a_buffer_that_replaces_one_that_died_goes_on_within_the_budget(tmp_path: Path, trained: bool) -> None:
    """P = 2, S = 1. The trainer has step 0: its groups count until it is released, or given up."""
    run = AsyncRun(tmp_path)
    for number in (0, 1):
        run.generate(number)
        run.lease(number, 2)
    run.finish(0, 0, 1)
    run.finish(1, 2)
    assert run.close(0) == [0, 1]
    run.restart()
    with pytest.raises(BufferRestartedError):
        run.finish(1, 3)
    with pytest.raises(BufferRestartedError):
        run.read(0)
    assert [header.uid.row for header in run.state.get_headers()] == [2, 3]
    if not trained:
        run.state.abandon(0)
        assert [header.uid.row for header in run.state.get_headers()] == [0, 1, 2, 3]
        assert [run.generate(0), run.generate(1)] == [2, 2]
        return
    run.state.abandon(1)
    assert run.generate(1) == 2
    run.state.commit(0, 1)
    assert run.state_of(0) is GroupState.TRAINED
    with pytest.raises(BufferStateError, match="cannot open"):
        run.generate(2)
    run.state.release(1)
    assert run.generate(2) == 2


def test_what_an_earlier_buffer_selected_is_not_mixed_with_a_selection_that_is_made_again(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path)
    run.generate(0)
    run.lease(0, 2)
    run.finish(0, 0, 1)
    run.close(0)
    run.restart()
    with pytest.raises(BufferRestartedError):
        run.close(0)
    run.state.abandon(0)
    run.state.open_selection(0)
    assert run.generate(0) == 2
    assert run.lease(0, 2) == [0, 1]
    run.finish(0, 0, 1)
    assert run.close(0) == [0, 1]
    run.state.commit(0, 1)


def test_a_checkpoint_in_the_middle_holds_all_that_is_not_trained_as_prompts(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path)
    for number in (0, 1):
        run.generate(number)
        run.lease(number, 2)
    run.finish(0, 1)
    run.finish(1, 2)
    assert run.close(0) == [1, 2]
    run.state.commit(0, 1)
    saved = saved_state(run.state)
    with pytest.raises(BufferStateError, match="at work"):
        load_saved(run.state, saved)
    ended = AsyncRun(tmp_path / "ended")
    ended.generate(0)
    ended.lease(0, 1)
    ended.finish(0, 0)
    ended.end(0)
    with pytest.raises(BufferStateError, match="at work"):
        load_saved(ended.state, saved)
    second = AsyncRun(tmp_path / "second")
    load_saved(second.state, saved)
    assert [header.uid.row for header in second.state.get_headers()] == [0, 3]
    second.publish(1)
    assert [second.generate(1), second.lease(1, 9)] == [2, [0, 3]]
    assert second.generate(2) == 2
    second.finish(1, 0, 3)
    assert second.close(1) == [0, 3]


# -- groups without a lease ---------------------------------------------------------------------------------------


def foreign(run: AsyncRun, number: int, row: int, version: int | None) -> GroupUid:
    """The rollout function made a group of its own."""
    uid = GroupUid("theirs", row, 0)
    columns = {"tokens": [np.zeros(2, np.int32)], "loss_mask": [np.ones(1, np.float32)]}
    if version is not None:
        columns["weight_version"] = np.asarray([version], np.int32)
    run.state.finish(run.tickets[number], uid, 0, [RowId(uid, 0)], columns)
    return uid


def test_a_group_without_a_lease_is_trained_on_within_the_bound_and_later_it_is_too_old(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path, target=1, bound=1)
    run.generate(0)
    for row in range(2):
        foreign(run, 0, row, version=0)
    run.end(0)
    report, _ = run.state.close_selection(0)
    assert report is not None
    assert (report.num_groups, report.staleness, report.drops) == (2, [0, 0], {})
    run.state.commit(0, 1)
    run.state.release(1)
    run.generate(1)
    young = [foreign(run, 1, row, version=1) for row in (2, 3)]
    run.end(1)
    assert run.state.close_selection(1)[0].staleness == [0, 0]  # type: ignore[union-attr]
    run.state.commit(1, 2)
    run.state.release(2)
    run.generate(2)
    late = foreign(run, 2, 9, version=0)  # two versions old when the selection of step 2 opens
    for row in (4, 5):
        foreign(run, 2, row, version=1)
    run.end(2)
    report, _ = run.state.close_selection(2)
    assert report is not None
    assert (report.num_groups, report.staleness, report.drops) == (2, [1, 1], {"too_old": 1})
    entry = run.state.ledger.entry(late)
    assert (entry.state, entry.reason) == (GroupState.REJECTED, "too_old")
    with pytest.raises(BufferStateError, match="no stored payload"):
        run.state._selections._stores[False][late]
    assert run.state.ledger.entry(young[0]).state is GroupState.TRAINED
    assert run.state.get_pending([late, young[0], GroupUid("theirs", 70, 0)]) == [GroupUid("theirs", 70, 0)]


def test_a_late_group_that_comes_while_the_selection_is_open_is_too_old_at_once(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path, target=1, bound=1)
    for step in range(2):
        run.generate(step)
        for row in range(2):
            foreign(run, step, 2 * step + row, version=step)
        run.end(step)
        run.state.close_selection(step)
        run.state.commit(step, step + 1)
        run.state.release(step + 1)
    run.generate(2)
    run.state.open_selection(2)
    foreign(run, 2, 8, version=0)
    foreign(run, 2, 9, version=2)
    assert run.state.close_selection(2) == (None, run.state.revision)
    foreign(run, 2, 10, version=1)
    report, _ = run.state.close_selection(2)
    assert report is not None
    assert (report.staleness, report.drops) == ([0, 1], {"too_old": 1})


def test_a_publication_drops_what_is_too_old_for_the_next_step_and_the_next_ticket_replaces_it(tmp_path: Path) -> None:
    """P = 2, S = 1: ticket 1 brings two groups of version 0, of which step 2 can train on none with M = 1."""
    run = AsyncRun(tmp_path, target=1, bound=1)
    for number in range(2):
        run.generate(number)
        for row in range(2):
            foreign(run, number, 2 * number + row, version=0)
        run.end(number)
    third = GroupUid("theirs", 2, 0)
    assert run.close(0) == [0, 1]
    run.publish(1)
    assert run.generate(2) == 2
    for row in (4, 5, 6):  # one more than is wanted, as functions that make groups may
        foreign(run, 2, row, version=1)
    assert run.close(1) == [2, 3]
    run.publish(2)
    assert run.state_of_foreign(6) is GroupState.FINISHED
    assert run.state.get_progress()["version"] == 2
    run.end(2)
    assert run.generate(3) == 1  # of 4, 3 are not released
    assert run.close(2) == [4, 5]
    run.publish(3)
    assert run.state_of_foreign(6) is GroupState.REJECTED
    assert run.state.ledger.entry(third).state is GroupState.TRAINED
    assert run.generate(4) == 3  # group 6 is replaced
    for row in (7, 8):
        foreign(run, 4, row, version=3)
    report, _ = run.state.close_selection(3)
    assert report is not None
    assert (report.num_groups, report.drops) == (2, {"too_old": 1})


def test_a_group_that_was_too_old_is_dropped_again_if_production_starts_again(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path, target=1, bound=1)
    run.generate(0)
    for row in range(2):
        foreign(run, 0, row, version=0)
    assert run.close(0) == [0, 1]
    run.publish(1)
    run.generate(1)
    for row in (2, 3):
        foreign(run, 1, row, version=1)
    assert run.close(1) == [2, 3]
    run.publish(2)
    for _ in range(2):
        run.generate(2)
        run.state.open_selection(2)
        late = foreign(run, 2, 9, version=0)
        foreign(run, 2, 10, version=2)
        assert run.state.ledger.entry(late).attempt == 1
        run.state.abandon(2)
    run.generate(2)
    foreign(run, 2, 9, version=0)
    run.state.reject(run.tickets[2], late, 1, "dull")  # as a filter may, which does not know
    assert run.end(2).drops == {"too_old": 2}


def test_a_group_without_a_lease_is_rejected_with_a_reason_that_is_counted(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path)
    run.generate(0)
    uid = GroupUid("theirs", 0, 0)
    run.state.reject(run.tickets[0], uid, 1, "dull")
    with pytest.raises(BufferStateError, match="cannot be taken over: it is rejected"):
        run.state.reject(run.tickets[0], uid, 1, "dull")
    assert run.state.ledger.entry(uid).reason == "dull"
    other = GroupUid("theirs", 1, 0)
    run.state.quarantine(run.tickets[0], other, 1, "broken")
    assert run.state.ledger.entry(other).state is GroupState.QUARANTINED
    assert run.end(0).drops == {"dull": 1, "quarantined": 1}


def test_a_group_without_a_lease_must_say_its_versions_and_stands_beside_no_leased_one(tmp_path: Path) -> None:
    run = AsyncRun(tmp_path)
    run.generate(0)
    with pytest.raises(BufferStateError, match="does not say which weights its tokens are of"):
        foreign(run, 0, 0, version=None)
    uid = GroupUid("theirs", 1, 0)
    columns = {
        "tokens": [np.zeros(2, np.int32)] * 2,
        "loss_mask": [np.ones(1, np.float32)] * 2,
        "weight_version": np.asarray([0, -1], np.int32),
    }
    with pytest.raises(BufferStateError, match="does not say which weights"):  # one of its samples
        run.state.finish(run.tickets[0], uid, 0, [RowId(uid, 0), RowId(uid, 1)], columns)
    columns["loss_mask"] = [np.ones(1, np.float32), np.zeros(1, np.float32)]  # which is not trained on
    run.state.finish(run.tickets[0], uid, 0, [RowId(uid, 0), RowId(uid, 1)], columns)
    run.lease(0, 1)
    with pytest.raises(BufferStateError, match="beside groups that it leased"):
        foreign(run, 0, 2, version=0)
