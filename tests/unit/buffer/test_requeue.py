"""Groups on their way back: order, tokens, save and load, and that no group is ever lost or trained twice."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.queue import RequeueRule
from buffer_rl.buffer.state import BufferState
from buffer_rl.data.source import PromptDataSource
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid, SampleGroup, Status, Ticket, VersionSpan
from filter_hub import buffer_order
from harness.ledger_contents import count_states
from harness.saved_state import load_saved, saved_state
from harness.tickets import close_rollout

KEEP = RequeueRule(keep_tokens=True)
MASK = RequeueRule(keep_tokens=True, mask_older=True)


def write_rows(folder: Path, count: int) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(count)))
    return str(path)


def make_state(path: str, groups_per_step: int, rule: RequeueRule | None = None, *, samples: int = 2) -> BufferState:
    args: Any = compose(CORE_SECTIONS)(
        prompt_data=path, n_samples_per_prompt=samples, rollout_batch_size=groups_per_step, rollout_shuffle=False
    )
    return BufferState(
        PromptDataSource(args),
        ledger=Ledger.in_memory(),
        groups_per_step=groups_per_step,
        rule=rule,
    )


def lease(state: BufferState, ticket: Ticket, count: int, chosen: list[GroupUid] | None = None) -> list[SampleGroup]:
    groups = state.get_samples(ticket, count, chosen)
    assert isinstance(groups, list)
    return groups


def generate_some(group: SampleGroup, version: int, reward: float | None = None) -> SampleGroup:
    """One token more for every unfinished sample; the first sample is then complete."""
    for sample in group:
        if sample.status is Status.COMPLETED:
            continue
        if not sample.tokens:
            sample.tokens, sample.rollout_log_probs = [1, 2], []
        at = sample.response_length
        sample.tokens = [*sample.tokens, 10 + version]
        sample.response_length = at + 1
        sample.rollout_log_probs = [*(sample.rollout_log_probs or []), -0.5 - version]
        sample.weight_versions = [*sample.weight_versions, VersionSpan(version, at, at + 1)]
        if sample.loss_mask is not None:
            sample.loss_mask = [*sample.loss_mask, 1]
        sample.status = Status.ABORTED
    group[0].status, group[0].reward = Status.COMPLETED, reward
    return group


def finish(state: BufferState, ticket: Ticket, group: SampleGroup) -> None:
    columns: dict[str, Any] = {
        "tokens": [np.asarray([1, 2], dtype=np.int32) for _ in group],
        "loss_mask": [np.ones(1, dtype=np.float32) for _ in group],
    }
    state.finish(ticket, group.uid, group.attempt, [sample.row_id for sample in group], columns)


def give_back(state: BufferState, ticket: Ticket, groups: list[SampleGroup]) -> None:
    state.add_samples(ticket, [(group.uid, group.attempt) for group in groups], groups)


def end_step(state: BufferState, ticket: Ticket) -> list[GroupUid]:
    """Close, commit and release; what was trained."""
    close_rollout(state, ticket)
    trained = sorted({row.uid for row in state.get_data(ticket.rollout_id).row_ids})
    state.commit(ticket.rollout_id, ticket.rollout_id + 1)
    state.release(ticket.rollout_id + 1)
    return trained


def reloaded(state: BufferState, path: str, groups_per_step: int, rule: RequeueRule | None = None) -> BufferState:
    other = make_state(path, groups_per_step, rule)
    load_saved(other, saved_state(state))
    return other


def shown(groups: list[SampleGroup]) -> list[Any]:
    """What of a lease must not depend on a restart."""
    return [
        (str(g.uid), g.attempt, [(s.tokens, s.rollout_log_probs, s.loss_mask, s.status, s.reward) for s in g])
        for g in groups
    ]


def test_what_is_admitted_after_a_restart_comes_behind_what_was_admitted_before(tmp_path: Path) -> None:
    path = write_rows(tmp_path, 9)
    state = make_state(path, 2)
    ticket = state.generate(0)
    give_back(state, ticket, lease(state, ticket, 3))
    state = reloaded(state, path, 2)
    ticket = state.generate(0)
    give_back(state, ticket, lease(state, ticket, 5))
    assert [header.uid.row for header in state.get_headers()] == [0, 1, 2, 3, 4]


def test_prompts_alone_come_back_where_the_rule_says_so(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 4), 1)
    ticket = state.generate(0)
    assert ticket.keeps_tokens is False
    (group,) = lease(state, ticket, 1)
    give_back(state, ticket, [generate_some(group, 0)])
    (again,) = lease(state, ticket, 1)
    assert all(s.tokens == [] and s.weight_versions == [] and s.status is Status.PENDING for s in again)


def test_a_group_is_gone_on_with_after_a_restart_and_its_older_tokens_are_masked(tmp_path: Path) -> None:
    path = write_rows(tmp_path, 6)
    state = make_state(path, 1, MASK)
    ticket = state.generate(0)
    assert (ticket.keeps_tokens, ticket.max_staleness) == (True, 0)
    slow, quick = lease(state, ticket, 2)
    finish(state, ticket, quick)
    give_back(state, ticket, [generate_some(slow, 0, reward=1.0)])
    end_step(state, ticket)
    for restart in (True, False):
        other = reloaded(state, path, 1, MASK) if restart else state
        (again,) = lease(other, other.generate(1), 1)
        assert (again.uid, again.attempt) == (slow.uid, 2)
        done, aborted = again
        assert (done.status, done.reward, done.loss_mask) == (Status.COMPLETED, 1.0, [0])
        assert (aborted.status, aborted.tokens, aborted.loss_mask) == (Status.ABORTED, [1, 2, 10], [0])
        assert (aborted.rollout_log_probs, aborted.weight_versions) == ([-0.5], [VersionSpan(0, 0, 1)])


def test_what_is_leased_when_the_state_is_saved_comes_back_as_prompts(tmp_path: Path) -> None:
    path = write_rows(tmp_path, 6)
    state = make_state(path, 1, KEEP)
    ticket = state.generate(0)
    first, second = lease(state, ticket, 2)
    give_back(state, ticket, [generate_some(first, 0), generate_some(second, 0)])
    lease(state, ticket, 1)
    restored = reloaded(state, path, 1, KEEP)
    groups = lease(restored, restored.generate(0), 2)
    assert [(group.uid, group[0].response_length) for group in groups] == [(first.uid, 0), (second.uid, 1)]


def test_filters_see_versions_and_rewards_and_their_orders_differ(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 9), 1, KEEP)
    ticket = state.generate(0)
    old_good, old_bad, quick = lease(state, ticket, 3)
    give_back(state, ticket, [generate_some(old_good, 0, 1.0), generate_some(old_bad, 0, -1.0)])
    finish(state, ticket, quick)
    end_step(state, ticket)
    ticket = state.generate(1)
    newer, fresh, quick = lease(state, ticket, 5)[2:]
    finish(state, ticket, quick)
    live = [old_good, old_bad]
    for group in live:
        group.attempt = 2
    give_back(state, ticket, [*live, generate_some(newer, 1, 0.0), fresh])
    headers = {header.uid.row: header for header in state.get_headers()}
    assert [(h.version, h.reward, h.attempts) for h in headers.values()] == [
        (0, 1.0, 2), (0, -1.0, 2), (1, 0.0, 1), (None, None, 1)
    ]  # fmt: skip

    def order(function: Any) -> list[int]:
        return [header.uid.row for header in function(None, 1, state.get_headers(), 4)]

    assert order(buffer_order.first_in) == [0, 1, 3, 4]
    assert order(buffer_order.freshest) == [4, 3, 0, 1]
    assert order(buffer_order.highest_reward) == [0, 3, 1, 4]
    assert order(buffer_order.lowest_reward) == [1, 3, 0, 4]
    chosen = [header.uid for header in buffer_order.freshest(None, 1, state.get_headers(), 2)]
    assert [group.uid.row for group in lease(state, ticket, 2, chosen)] == [4, 3]
    assert [header.uid.row for header in state.get_headers()] == [0, 1]


def test_a_batch_over_three_epochs_of_three_rows_trains_every_row_three_times(tmp_path: Path) -> None:
    state = make_state(write_rows(tmp_path, 3), 9)
    ticket = state.generate(0)
    for group in reversed(lease(state, ticket, 9)):
        finish(state, ticket, group)
    trained = end_step(state, ticket)
    assert Counter(uid.row for uid in trained) == {0: 3, 1: 3, 2: 3}
    assert len(set(trained)) == 9


STEP = st.tuples(st.integers(0, 3), st.lists(st.sampled_from(["reject", "back", "finish"]), max_size=6))


@settings(max_examples=60)
@given(
    rows=st.integers(1, 6),
    per_step=st.integers(1, 3),
    steps=st.lists(STEP, min_size=6, max_size=6),
    cut=st.integers(0, 6),
    rule=st.sampled_from([None, KEEP, MASK]),
)
@pytest.mark.slow
def test_restored_after_any_rollout_the_next_groups_are_those_of_an_uninterrupted_run(
    tmp_path_factory: pytest.TempPathFactory, rows: int, per_step: int, steps: Any, cut: int, rule: RequeueRule | None
) -> None:
    path = write_rows(tmp_path_factory.mktemp("rows"), rows)

    def run(state: BufferState, start: int, end: int) -> list[Any]:
        leased = []
        for rollout_id in range(start, end):
            extra, fates = steps[rollout_id]
            ticket = state.generate(rollout_id)
            groups = lease(state, ticket, per_step + extra + len(fates))
            leased.append(shown(groups))
            for group, fate in zip(groups, [*fates, *["finish"] * (per_step + extra)], strict=True):
                if fate == "reject":
                    state.reject(ticket, group.uid, group.attempt, "why")
                elif fate == "back":
                    give_back(state, ticket, [generate_some(group, ticket.version)])
                else:
                    finish(state, ticket, group)
            end_step(state, ticket)
        return leased

    whole = run(make_state(path, per_step, rule), 0, 6)
    first = make_state(path, per_step, rule)
    head = run(first, 0, cut)
    assert head + run(reloaded(first, path, per_step, rule), cut, 6) == whole


class Model:
    """What must hold of the groups that one state, or its restored successors, handed out."""

    def __init__(self, path: str, rows: int, per_step: int, rule: RequeueRule | None) -> None:
        self.path, self.rows, self.per_step, self.rule = path, rows, per_step, rule
        self.state = make_state(path, per_step, rule)
        self.rollout_id = 0
        self.ticket: Ticket | None = self.state.generate(0)
        self.leased: dict[GroupUid, SampleGroup] = {}
        self.finished: set[GroupUid] = set()
        self.selected: set[GroupUid] = set()
        self.where: dict[GroupUid, GroupState] = {}
        self.trained: Counter[GroupUid] = Counter()

    def pick(self, number: int) -> SampleGroup | None:
        return list(self.leased.values())[number % len(self.leased)] if self.leased else None

    def act(self, action: str, number: int) -> None:
        ticket, group = self.ticket, self.pick(number)
        if action == "reload":
            self.reload()
        elif ticket is None:
            self.commit()
        elif action == "lease":
            for leased in lease(self.state, ticket, number % 4):
                self.leased[leased.uid], self.where[leased.uid] = leased, GroupState.LEASED
        elif action == "close":
            if self.finished:
                self.close(ticket)
        elif group is not None:
            del self.leased[group.uid]
            if action == "finish":
                finish(self.state, ticket, group)
                self.finished.add(group.uid)
                self.where[group.uid] = GroupState.FINISHED
            elif action == "reject":
                self.state.reject(ticket, group.uid, group.attempt, "why")
                self.where[group.uid] = GroupState.REJECTED
            else:
                give_back(self.state, ticket, [generate_some(group, ticket.version)])
                self.where[group.uid] = GroupState.PENDING

    def close(self, ticket: Ticket) -> None:
        report = close_rollout(self.state, ticket)
        assert report.num_groups == min(self.per_step, len(self.finished))
        assert report.num_groups + report.surplus == len(self.finished)
        assert report.drops.get("unreported", 0) == len(self.leased)
        self.selected = {row.uid for row in self.state.get_data(self.rollout_id).row_ids}
        self.where.update(dict.fromkeys(self.leased, GroupState.REJECTED))
        self.where.update(dict.fromkeys(self.finished - self.selected, GroupState.PENDING))
        self.leased, self.finished, self.ticket = {}, set(), None

    def commit(self) -> None:
        self.state.commit(self.rollout_id, self.rollout_id + 1)
        self.state.release(self.rollout_id + 1)
        self.trained.update(self.selected)
        self.where.update(dict.fromkeys(self.selected, GroupState.TRAINED))
        self.selected = set()
        self.rollout_id += 1
        self.ticket = self.state.generate(self.rollout_id)

    def reload(self) -> None:
        """Whatever was not trained yet is pending again; the rollout is opened anew."""
        self.state = reloaded(self.state, self.path, self.per_step, self.rule)
        back = {*self.leased, *self.finished, *self.selected}
        self.where.update(dict.fromkeys(back, GroupState.PENDING))
        self.leased, self.finished, self.selected = {}, set(), set()
        self.ticket = self.state.generate(self.rollout_id)

    def check(self) -> None:
        queued = [header.uid for header in self.state.get_headers()]
        assert len(queued) == len(set(queued)) == self.state.get_buffer_length()
        assert set(queued) == {uid for uid, state in self.where.items() if state is GroupState.PENDING}
        assert [(uid.epoch) for uid in queued] == sorted(uid.epoch for uid in queued)
        for uid in self.where:
            counts = count_states(self.state.ledger, uid.source, uid.epoch, self.rows)
            of_epoch = Counter(state for other, state in self.where.items() if other.epoch == uid.epoch)
            of_epoch[GroupState.PENDING] += self.rows - of_epoch.total()  # nobody asked for these yet
            assert {state: count for state, count in counts.items() if count} == +of_epoch
            assert sum(counts.values()) == self.rows
        assert max(self.trained.values(), default=1) == 1


@settings(max_examples=80)
@given(
    rows=st.integers(1, 5),
    per_step=st.integers(1, 3),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["lease", "lease", "finish", "finish", "back", "reject", "close", "reload"]),
            st.integers(0, 9),
        ),
        max_size=40,
    ),
    rule=st.sampled_from([None, KEEP, MASK]),
)
@pytest.mark.slow
def test_every_group_is_in_one_state_and_is_trained_once(
    tmp_path_factory: pytest.TempPathFactory, rows: int, per_step: int, actions: Any, rule: RequeueRule | None
) -> None:
    model = Model(write_rows(tmp_path_factory.mktemp("rows"), rows), rows, per_step, rule)
    for action, number in actions:
        model.act(action, number)
        model.check()
    # From here on nothing is dropped: after enough steps, every row of the epochs so far was trained once.
    model.reload()
    last_epoch = max((uid.epoch for uid in model.where), default=0)
    rejected = {uid for uid, state in model.where.items() if state is GroupState.REJECTED}
    for _ in range((last_epoch + 1) * rows // per_step + 1):
        model.act("lease", 0)
        assert model.ticket is not None
        for group in lease(model.state, model.ticket, per_step):
            model.leased[group.uid], model.where[group.uid] = group, GroupState.LEASED
        for _ in range(per_step):
            model.act("finish", 0)
        model.act("close", 0)
        model.act("commit", 0)
        model.check()
    everything = {(row, epoch) for row in range(rows) for epoch in range(last_epoch + 1)}
    done = {(uid.row, uid.epoch) for uid in (*model.trained, *rejected)}
    assert everything <= done
    assert not rejected & model.trained.keys()


@pytest.mark.parametrize("rule", [None, KEEP])
def test_a_run_with_another_number_of_samples_has_no_groups_of_the_old_one(
    tmp_path: Path, rule: RequeueRule | None
) -> None:
    path = write_rows(tmp_path, 8)
    state = make_state(path, 2, rule)
    ticket = state.generate(0)
    groups = lease(state, ticket, 4)
    for group in groups[:2]:
        finish(state, ticket, group)
    give_back(state, ticket, [generate_some(group, 0) for group in groups[2:]])
    end_step(state, ticket)
    saved = saved_state(state)
    same = make_state(path, 2, rule)
    load_saved(same, saved)
    again = lease(same, same.generate(1), 4)
    assert [(group.uid.row, len(group), group.attempt) for group in again] == [
        (2, 2, 2),
        (3, 2, 2),
        (4, 2, 1),
        (5, 2, 1),
    ]
    assert [bool(group[0].tokens) for group in again] == [rule is KEEP, rule is KEEP, False, False]
    for samples in (1, 3):
        other = make_state(path, 2, rule, samples=samples)
        load_saved(other, saved)
        groups = lease(other, other.generate(1), 4)
        assert [(group.uid.row, len(group)) for group in groups] == [(row, samples) for row in (2, 3, 4, 5)]
        assert [group.attempt for group in groups] == [2, 2, 1, 1]
        assert not any(sample.tokens for group in groups for sample in group)
        assert [[s.sample_index for s in group] for group in groups] == [list(range(samples))] * 4


def test_a_saved_group_whose_samples_fanned_out_is_as_large_as_it_was(tmp_path: Path) -> None:
    path = write_rows(tmp_path, 4)
    state = make_state(path, 2, KEEP)
    ticket = state.generate(0)
    (group,) = lease(state, ticket, 1)
    for sample in generate_some(group, 0):
        sample.status = Status.COMPLETED
    part = replace(group[0], part=1)
    give_back(state, ticket, [replace(group, samples=[group[0], part, group[1]])])
    other = reloaded(state, path, 2, KEEP)
    (again,) = lease(other, other.generate(0), 1)
    assert [(sample.sample_index, sample.part, bool(sample.tokens)) for sample in again] == [
        (0, 0, True),
        (0, 1, True),
        (1, 0, True),
    ]
