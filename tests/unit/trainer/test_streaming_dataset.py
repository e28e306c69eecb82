"""One object reads a process's part of one selection after another, as often as it is asked to."""

from __future__ import annotations

import random
import weakref
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.errors import DeadlineError, PluginError, TrainError
from buffer_rl.plan.roles import Role
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, RowId, TrainBatch
from buffer_rl.trainer.role_worker import own_stage
from buffer_rl.trainer.stream import Stage, StreamingDataset, reading
from harness.streams import REF, Answer, Store, dataset_of, doubled, lose_writes, run_stage


def closed_store(num_groups: int, num_selections: int = 1) -> Store:
    """Selections that are closed, each with so many groups."""
    store = Store(num_selections)
    for number in range(num_selections):
        uids = [store.add(10 * number + row, number) for row in range(num_groups)]
        store.pools[f"train_{number}"].select(uids)
    return store


def groups_in(batches: list[TrainBatch]) -> list[list[int]]:
    return [list(dict.fromkeys(row.uid.row for row in batch.row_ids)) for batch in batches]


def test_further_passes_replay_the_first_in_its_order_and_ask_the_buffer_for_nothing() -> None:
    store = Store()
    uids = [store.add(5)]
    store.later = [
        lambda: uids.append(store.add(1)),
        lambda: uids.append(store.add(3)),
        lambda: store.pool.select(uids),
    ]
    dataset = dataset_of(REF, store, 8, replays=True)
    with dataset.step(0):
        first = list(dataset)
        asked = store.asked, len(store.ahead)
        second, third = list(dataset), list(dataset)
    assert groups_in(first) == [[5], [1], [3]]
    for replayed in (second, third):
        assert len(replayed) == len(first)
        assert all(batch is before for batch, before in zip(replayed, first, strict=True))
    assert (store.asked, len(store.ahead)) == asked
    assert dataset.report.num_rows == 3 * 6


def test_a_further_pass_has_the_columns_that_were_added_in_the_first() -> None:
    store = closed_store(3)
    dataset = dataset_of(REF, store, 2, replays=True)
    with dataset.step(0):
        for batch in dataset:
            batch.columns.update(doubled(batch))
        for batch in dataset:
            dataset.write(batch, {"ref_log_probs": batch.columns["ref_log_probs"]})
    assert store.fields("ref_log_probs") == [0, 0, 2, -2, 4, -4]


def test_a_pass_that_was_left_early_is_completed_by_the_next() -> None:
    dataset = dataset_of(REF, closed_store(4), 2, replays=True)
    with dataset.step(0):
        assert groups_in(list(islice(dataset, 2))) == [[0], [1]]
        assert groups_in([next(iter(dataset))]) == [[0]]
        assert groups_in(list(dataset)) == [[0], [1], [2], [3]]


def test_a_pass_inside_a_pass_takes_nothing_from_it() -> None:
    dataset = dataset_of(REF, closed_store(3), 2, replays=True)
    with dataset.step(0):
        pairs = [groups_in([one, other]) for one in dataset for other in dataset]
    assert pairs == [[[one], [other]] for one in range(3) for other in range(3)]


def test_a_pass_is_refused_outside_of_a_step_and_a_second_one_unless_it_replays() -> None:
    store = closed_store(2)
    dataset = dataset_of(REF, store, 2)
    with pytest.raises(TrainError, match="no pass over a selection is left"):
        list(dataset)
    with dataset.step(0):
        assert len(list(dataset)) == 2
        with pytest.raises(TrainError, match=r"(?s)the reader 'ref'.*replays=True"):
            list(dataset)
    kept = dataset_of(Stage(reading("other", (), ()), doubled), store, 2, replays=True)
    with kept.step(0):
        assert len(list(kept)) == 2
    with pytest.raises(TrainError, match="no pass"):
        list(kept)


@pytest.mark.parametrize("replays", [False, True])
def test_one_object_reads_one_selection_after_another_and_forgets_each(replays: bool) -> None:
    store = closed_store(3, num_selections=3)
    dataset, alive = dataset_of(REF, store, 2, replays=replays), []
    for selection in (0, 2, 1):
        with dataset.step(selection):
            for batch in dataset:
                assert batch.rollout_id == selection
                alive.append(weakref.ref(batch.columns["reward"]))
                dataset.write(batch, doubled(batch))
            del batch
            assert sum(ref() is not None for ref in alive) == (3 if replays else 0)
        assert not any(ref() for ref in alive)
        assert [span.rollout_id for span in dataset.report.spans] == [selection] * 3
        assert store.fields("ref_log_probs", selection)[::2] == [20 * selection + 2 * row for row in range(3)]
    assert Answer.open == []


def test_the_fields_of_a_micro_batch_are_written_while_the_next_one_is_worked_on() -> None:
    dataset = dataset_of(REF, closed_store(3), 2)
    under_way = []
    with dataset.step(0):
        for batch in dataset:
            under_way.append(len(Answer.open))
            dataset.write(batch, doubled(batch))
    assert under_way == [1, 2, 2]  # the request for the next one, and the write of the one before


def test_a_step_that_is_read_again_begins_anew() -> None:
    """As where a selection is produced again under its number, or what was not written is requeued."""
    store = closed_store(3)
    dataset = dataset_of(REF, store, 2, replays=True)
    with dataset.step(0):
        batch = next(iter(dataset))
        dataset.write(batch, doubled(batch))
    assert Answer.open == []
    assert store.pool.requeue_for_readers("ref") == 1  # what was requested ahead
    with dataset.step(0):
        assert groups_in(list(dataset)) == [[1], [2]]


def test_an_iteration_whose_deadline_passed_has_no_end_in_that_step() -> None:
    store, seen = Store(), list[int]()
    store.add(1)
    dataset = dataset_of(REF, store, 2, replays=True)

    def work() -> None:
        with dataset.step(0):
            for _ in range(2):
                with suppress(DeadlineError):
                    seen.extend(len(batch) for batch in dataset)
                    seen.append(-1)  # as if that were all

    with pytest.raises(DeadlineError, match="nothing came"):
        work()
    assert seen == [2]
    assert Answer.open == []


@pytest.mark.parametrize("last", [False, True])
def test_a_write_that_fails_is_raised_by_the_iteration_or_after_the_last_by_the_step(last: bool) -> None:
    store = closed_store(3)
    dataset, worked = dataset_of(REF, store, 2), list[int]()

    def work() -> None:
        with dataset.step(0):
            for batch in dataset:
                worked.append(batch.row_ids[0].uid.row)
                dataset.write(batch, doubled(batch))
                if worked[-1] == (2 if last else 0):
                    lose_writes("lost")

    with pytest.raises(TrainError, match="lost"):
        work()
    assert worked == ([0, 1, 2] if last else [0, 1])  # the next one is worked on while it is written
    assert Answer.open == []


RELATIVE = """
import numpy as np


class Relative:
    def __init__(self, args):
        self.args, self.mean = args, None

    def work(self, dataset):
        rewards = [reward for batch in dataset for reward in batch.columns["reward"]]
        self.mean = np.mean(np.abs(rewards))
        self.args(self)
        for batch in dataset:
            dataset.write(batch, self.compute(batch))

    def compute(self, batch):
        return {"relative": np.abs(batch.columns["reward"]) - self.mean}
"""


def relative(tmp_path: Path, between: Any = lambda role: None, row: Role | None = None) -> Stage:
    """A user's own role that reads a selection twice. between: called with it between the passes."""
    (tmp_path / "relative.py").write_text(RELATIVE)
    row = row or Role(name="relative", fields=("relative",))
    return own_stage(f"{tmp_path / 'relative.py'}:Relative", row, between, PluginRegistry())


def test_a_users_own_role_reads_two_passes_over_groups_that_finish_meanwhile(tmp_path: Path) -> None:
    store = Store()
    uids = [store.add(1)]
    store.later = [
        lambda: uids.append(store.add(2)),
        lambda: uids.append(store.add(6)),
        lambda: store.pool.select(uids),
    ]
    report = run_stage(relative(tmp_path), store, 8)
    assert store.fields("relative") == [-2, -2, -1, -1, 3, 3]
    assert [span.num_rows for span in report.spans] == [2] * 6
    assert all(span.start <= span.end for span in report.spans)  # the first pass writes nothing
    assert Answer.open == []


def test_what_a_role_of_several_passes_read_stays_in_the_step_and_is_read_again_by_its_replacement(
    tmp_path: Path,
) -> None:
    store = closed_store(4)

    def dies(role: Any) -> None:
        assert store.pool.pinned() == {GroupUid("data", row, 0) for row in range(4)}
        written = role.compute(batch := next(iter(dataset)))
        store.pool.put_fields(batch.row_ids, written)  # of one group it is there
        raise KeyboardInterrupt

    stage = relative(tmp_path, dies)
    dataset = dataset_of(stage, store, 2)
    with pytest.raises(PluginError, match="KeyboardInterrupt"):
        stage.run(dataset, 0)
    assert Answer.open == []
    assert store.pool.requeue_for_readers("relative") == 4
    run_stage(relative(tmp_path), store, 2)
    assert store.fields("relative") == [-1.5, -1.5, -0.5, -0.5, 0.5, 0.5, 1.5, 1.5]


def test_a_role_that_fails_at_its_own_work_or_writes_other_fields_than_its_own_is_named(tmp_path: Path) -> None:
    def fails(role: Any) -> None:
        raise ValueError("no mean")

    with pytest.raises(PluginError, match=r"role '.*relative\.py:Relative', work: it raised ValueError: no mean"):
        run_stage(relative(tmp_path, fails), closed_store(1), 2)
    other = Role(name="relative", fields=("other",))
    with pytest.raises(
        PluginError, match=r"(?s)role '.*relative\.py:Relative'.*expected: a mapping with the fields other"
    ):
        run_stage(relative(tmp_path, row=other), closed_store(1), 2)
    assert Answer.open == []


class Reading:
    """Replicas that read selection 0 of a store whose groups become ready in a random order, and write ``score``."""

    def __init__(self, seed: int, num_groups: int, num_replicas: int, together: bool) -> None:
        self.rng = random.Random(seed)
        self.store = Store()
        self.is_final = self.rng.random() < 0.5
        stage = Stage(reading("score", ["ref_log_probs"], ["score"], self.is_final), doubled)
        place = {"together": together, "in_step": together, "replays": True}
        self.datasets = [
            dataset_of(stage, self.store, self.rng.randint(1, 6), replica, num_replicas, **place)
            for replica in range(num_replicas)
        ]
        self.kept: list[GroupUid] = []
        surplus = 0 if self.is_final else self.rng.randint(0, 2)
        events: list[Any] = [lambda row=row: self._finish(row, True) for row in range(num_groups)]
        events += [lambda row=row: self._finish(row, False) for row in range(num_groups, num_groups + surplus)]
        self.rng.shuffle(events)
        for index in sorted((self.rng.randrange(len(events)) for _ in range(num_groups)), reverse=True):
            events.insert(index + 1, self._write_fields)
        self.store.later = [*events, lambda: self.store.pool.select(self.kept), lambda: self._write_fields(every=True)]
        self.unwritten: list[GroupUid] = []

    def _finish(self, row: int, stays: bool) -> None:
        uid = self.store.add(row)
        self.unwritten.append(uid)
        self.kept += [uid] * stays

    def _write_fields(self, every: bool = False) -> None:
        for uid in list(self.unwritten) if every else self.rng.sample(self.unwritten, min(1, len(self.unwritten))):
            self.unwritten.remove(uid)
            if uid in self.store.pool.selection:
                rows = self.store.plane[uid].rows
                self.store.pool.put_fields(rows, {"ref_log_probs": [np.zeros(2, dtype=np.float32)] * len(rows)})

    def first_pass(self) -> list[list[TrainBatch]]:
        """Of each replica what it read; they go on in a random order, and some leave their first pass early."""
        seen: list[list[TrainBatch]] = [[] for _ in self.datasets]
        running = dict(enumerate(map(iter, self.datasets)))
        while running:
            replica = self.rng.choice(sorted(running))
            if self.rng.random() < 0.1:  # begins again, and gets what it had before the rest
                running[replica], before = iter(self.datasets[replica]), seen[replica]
                assert all(next(running[replica]) is batch for batch in before)
            batch = next(running[replica], None)
            if batch is None:
                del running[replica]
                continue
            seen[replica].append(batch)
            self.datasets[replica].write(batch, {"score": np.arange(len(batch), dtype=np.float32)})
        return seen


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10_000), num_groups=st.integers(1, 8), num_replicas=st.integers(1, 3), together=st.booleans()
)
def test_every_row_comes_once_in_each_pass_whenever_its_fields_become_ready(
    seed: int, num_groups: int, num_replicas: int, together: bool
) -> None:
    reading = Reading(seed, num_groups, num_replicas, together)
    store = reading.store
    with ExitStack() as stack:
        for dataset in reading.datasets:
            stack.enter_context(dataset.step(0))
        first = reading.first_pass()
        asked = store.asked, len(store.ahead)
        for dataset, batches in zip(reading.datasets, first, strict=True):
            assert all(batch is before for batch, before in zip(dataset, batches, strict=True))
        assert (store.asked, len(store.ahead)) == asked
    rows = [row for batches in first for batch in batches for row in batch.row_ids]
    expected = {row for uid in reading.kept for row in store.plane[uid].rows}
    assert len(rows) == len(set(rows)), "a row came twice"
    assert expected <= set(rows), "a row did not come"
    assert len(store.fields("score")) == len(expected)
    assert Answer.open == []


def _rows(uid: GroupUid) -> list[RowId]:
    return [RowId(uid, 0), RowId(uid, 1)]


def test_rows_that_left_the_step_are_replayed_and_what_is_written_of_them_is_passed_over() -> None:
    store = Store()
    kept, surplus = store.add(1), store.add(2)
    dataset: StreamingDataset = dataset_of(REF, store, 2, replays=True)
    with dataset.step(0):
        first = list(islice(dataset, 2))
        assert [batch.row_ids for batch in first] == [_rows(kept), _rows(surplus)]
        store.pool.select([kept])
        for batch in dataset:
            dataset.write(batch, doubled(batch))
    assert store.fields("ref_log_probs") == [2, -2]
