"""A pool while it fills: rows are handed out once per task, when their fields are there, in whole prompt groups."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.buffer.columns import Cell, ColumnStore, RowSizes, assemble
from buffer_rl.buffer.pool import DataPool, ReadRequest, RowsMeta, Writer
from buffer_rl.buffer.readers import ALL_ROWS, Share, Splitting
from buffer_rl.errors import BufferStateError
from buffer_rl.plan.flops import RowCost
from buffer_rl.records.groups import GroupUid, RowId

SAMPLED = frozenset({"tokens", "loss_mask"})


def uid_of(row: int) -> GroupUid:
    return GroupUid("data", row, 0)


def rows_of(uid: GroupUid, count: int) -> list[RowId]:
    return [RowId(uid, index) for index in range(count)]


class Pool:
    """A pool with its plane; group ``row`` has rows of ``row + 2 + index`` tokens.

    deals: the next one of each replica, by reader; ``read`` asks for it."""

    def __init__(self, num_groups: int = 100) -> None:
        self.plane = ColumnStore()
        self.pool = DataPool(3, "train_3", self.plane, num_groups)
        self.deals: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def add(self, row: int, count: int = 2) -> GroupUid:
        uid = uid_of(row)
        tokens = [np.full(row + 2 + index, row, dtype=np.int32) for index in range(count)]
        columns: dict[str, Any] = {"tokens": tokens, "loss_mask": [np.ones(2, dtype=np.float32) for _ in tokens]}
        self.plane.put(uid, rows_of(uid, count), columns)
        self.pool.join(uid)
        return uid

    def put(self, uid: GroupUid, name: str, value: float = 0.0) -> None:
        rows = self.plane[uid].rows
        self.pool.put_fields(rows, {name: [np.full(2, value, dtype=np.float32) for _ in rows]})

    def read(self, reader: str, fields: frozenset[str] = SAMPLED, num_rows: int = 100, **more: Any) -> RowsMeta:
        produces = frozenset({f"{reader}_log_probs"}) - fields
        replica = more.get("replica", 0)
        more |= {"produces": produces, "deal": self.deals[reader][replica]}
        meta = self.pool.get_meta(ReadRequest(reader=reader, fields=fields, num_rows=num_rows, **more))
        self.deals[reader][replica] += meta.dealt
        return meta

    def requeue(self, reader: str) -> int:
        """The reader's processes are replaced."""
        self.deals[reader].clear()
        return self.pool.requeue_for_readers(reader)


def groups_in(meta: RowsMeta) -> list[int]:
    return list(dict.fromkeys(row.uid.row for row in meta.row_ids))


def test_a_group_is_handed_to_each_task_once_and_the_task_ends_when_the_pool_is_closed_and_read() -> None:
    p = Pool()
    uids = [p.add(row) for row in (4, 1)]
    assert groups_in(p.read("ref")) == [4, 1]
    assert p.read("ref") == RowsMeta(row_ids=[], dealt=False, ended=False)
    uids.append(p.add(2))
    assert groups_in(p.read("actor")) == [4, 1, 2]
    p.pool.select(uids)
    assert groups_in(p.read("ref")) == [2]
    assert p.read("ref").ended
    assert p.read("actor").ended


def test_a_row_is_handed_out_when_all_rows_of_its_group_have_the_fields() -> None:
    p = Pool()
    first, second = p.add(0), p.add(1)
    wanted = SAMPLED | {"ref_log_probs"}
    assert p.read("train", wanted).row_ids == []
    p.put(second, "ref_log_probs")
    p.pool.put_fields([RowId(first, 1)], {"ref_log_probs": [np.zeros(2, dtype=np.float32)]})
    assert groups_in(p.read("train", wanted)) == [1]
    p.pool.select([first, second])
    assert not p.read("train", wanted).ended, "a group that lacks a field is still to come"
    p.pool.put_fields([RowId(first, 0)], {"ref_log_probs": [np.zeros(2, dtype=np.float32)]})
    assert groups_in(p.read("train", wanted)) == [0]
    assert p.read("train", wanted).ended


def test_a_reader_gets_as_many_whole_groups_as_fit_and_at_least_one() -> None:
    p = Pool()
    for row, count in ((0, 3), (1, 2), (2, 4), (3, 9)):
        p.add(row, count)
    taken = [groups_in(p.read("log_probs", num_rows=6)) for _ in range(3)]
    assert taken == [[0, 1], [2], [3]]


def test_a_task_that_asks_for_other_fields_than_before_is_refused() -> None:
    p = Pool()
    p.read("ref")
    p.read("ref")
    refused = "'ref' asked for other fields, or as another kind of reader, before"
    with pytest.raises(BufferStateError, match=refused):
        p.read("ref", SAMPLED | {"reward"})
    with pytest.raises(BufferStateError, match=refused):
        p.read("ref", together=True)
    with pytest.raises(BufferStateError, match=refused):
        p.pool.get_meta(ReadRequest(reader="ref", fields=SAMPLED, num_rows=1, produces=frozenset({"returns"})))


def test_a_field_that_was_written_is_accepted_again_only_with_equal_content() -> None:
    p = Pool()
    uid = p.add(0)
    p.put(uid, "ref_log_probs", 1.0)
    p.put(uid, "ref_log_probs", 1.0)
    with pytest.raises(BufferStateError, match=r"'ref_log_probs' of row data:0:0/0\.0 was written before, with other"):
        p.put(uid, "ref_log_probs", 2.0)


def test_what_a_lost_reader_had_and_did_not_write_is_handed_out_again_first() -> None:
    p = Pool()
    uids = [p.add(row, 1) for row in range(4)]
    before = p.read("ref", num_rows=3)
    assert groups_in(before) == [0, 1, 2]
    p.put(uids[1], "ref_log_probs")
    assert p.requeue("ref") == 2
    late = [np.full(2, 9.0, dtype=np.float32)]
    p.pool.put_fields([RowId(uids[0], 0)], {"ref_log_probs": late}, Writer(reader="ref", generation=before.generation))
    assert "ref_log_probs" not in p.plane[uids[0]].cells, "a replaced process still wrote"
    after = p.read("ref")
    assert groups_in(after) == [0, 2, 3]
    p.pool.put_fields([RowId(uids[0], 0)], {"ref_log_probs": late}, Writer(reader="ref", generation=after.generation))
    assert "ref_log_probs" in p.plane[uids[0]].cells
    assert p.pool.requeue_for_readers("nobody") == 0


def test_groups_that_the_step_was_closed_without_leave_every_task() -> None:
    p = Pool()
    kept, surplus = p.add(0), p.add(1)
    assert groups_in(p.read("old", num_rows=1)) == [0]
    p.pool.select([kept])
    assert groups_in(p.read("old")) == []
    assert p.read("old").ended
    assert p.pool.selection.uids == [kept]
    late = {"old_log_probs": [np.zeros(2, dtype=np.float32)] * 2}
    p.pool.put_fields(rows_of(surplus, 2), late)  # computed before it was known: passed over
    with pytest.raises(BufferStateError, match="does not belong to this task"):
        p.pool.put_fields([RowId(uid_of(9), 0)], {"old_log_probs": [np.zeros(1)]})


def test_a_final_reader_is_handed_no_more_groups_than_the_step_trains_on() -> None:
    p = Pool(num_groups=2)
    uids = [p.add(row, 1) for row in (5, 3, 1)]
    assert groups_in(p.read("train", is_final=True)) == [5, 3]
    assert p.pool.pinned() == set(uids[:2])
    p.pool.select(uids[:2])
    assert p.read("train", is_final=True).ended


def test_two_final_readers_get_the_same_groups_though_the_fields_of_others_come_first() -> None:
    """Else the step would need more groups than it trains on, and a gradient of one that it leaves out would stay."""
    p = Pool(num_groups=2)
    five, three, four = (p.add(row) for row in (5, 3, 4))
    assert groups_in(p.read("train", is_final=True)) == [5, 3]
    needs = SAMPLED | {"ref_log_probs"}
    assert groups_in(p.read("critic", needs, is_final=True)) == []
    for uid in (four, three):
        p.put(uid, "ref_log_probs")
    assert groups_in(p.read("critic", needs, is_final=True)) == [3], "4 cannot be in the step, which has 5 and 3"
    p.put(five, "ref_log_probs")
    assert groups_in(p.read("critic", needs, is_final=True)) == [5]
    assert p.pool.pinned() == {five, three}


def test_the_whole_batch_is_refused_while_the_rollout_runs() -> None:
    p = Pool()
    uid = p.add(0)
    with pytest.raises(BufferStateError, match="still runs"):
        p.pool.share(ALL_ROWS)
    p.pool.select([uid])
    assert assemble(p.pool.share(ALL_ROWS)).row_ids == rows_of(uid, 2)


@pytest.mark.parametrize("splitting", [Splitting.GROUPS, Splitting.GROUPS_OR_ROWS])
def test_whole_groups_go_to_one_rank_where_there_are_enough(splitting: Splitting) -> None:
    p = Pool()
    uids = [p.add(row, 4) for row in range(4)]
    p.pool.select(uids)
    parts = [assemble(p.pool.share(Share(rank, 2, splitting=splitting))) for rank in (0, 1)]
    for part in parts:
        for uid in {row.uid for row in part.row_ids}:
            assert [row for row in part.row_ids if row.uid == uid] == rows_of(uid, 4)
    assert sorted(row for part in parts for row in part.row_ids) == [row for uid in uids for row in rows_of(uid, 4)]


def test_fewer_groups_than_ranks_are_split_or_refused_as_was_asked() -> None:
    p = Pool()
    uids = [p.add(row, 4) for row in range(2)]
    p.pool.select(uids)
    with pytest.raises(BufferStateError, match="2 whole groups cannot be shared among 3 ranks"):
        p.pool.share(Share(0, 3, splitting=Splitting.GROUPS))
    with pytest.raises(BufferStateError, match="1 whole groups cannot be shared among 2 ranks"):
        p.pool.share(Share(0, 2, 2, 1, Splitting.GROUPS))
    parts = [assemble(p.pool.share(Share(rank, 3, splitting=Splitting.GROUPS_OR_ROWS))) for rank in range(3)]
    assert sorted(row for part in parts for row in part.row_ids) == [row for uid in uids for row in rows_of(uid, 4)]
    assert all(part.row_ids for part in parts)


def test_payloads_behind_references_are_read_once_and_only_the_rows_asked_for_arrive() -> None:
    p = Pool()
    uid = uid_of(7)
    column = [np.arange(3, dtype=np.int32), np.arange(5, dtype=np.int32)]
    reference = object()
    cell = Cell(num_rows=2, ref=reference)
    masks = [np.ones(1, dtype=np.float32) for _ in column]
    sizes = RowSizes(tokens=[3, 5], trained=[1.0, 1.0])
    p.plane.put(uid, rows_of(uid, 2), {"tokens": cell, "loss_mask": masks}, sizes)
    p.pool.join(uid)
    asked: list[Any] = []

    def resolve(cells: Any) -> Any:
        asked.extend(cell.ref for cell in cells)
        return [column for _ in cells]

    batch = assemble(p.pool.plan_rows([RowId(uid, 1)]), resolve)
    assert asked == [reference]
    assert [row.tolist() for row in batch.columns["tokens"]] == [[0, 1, 2, 3, 4]]


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), num_groups=st.integers(1, 12), ranks=st.integers(1, 3))
def test_whatever_the_order_of_events_every_kept_row_reaches_every_task_once(
    seed: int, num_groups: int, ranks: int
) -> None:
    """Groups finish, fields come row by row, and readers ask, all in a random order; some groups are surplus."""
    rng = random.Random(seed)
    p = Pool(num_groups=num_groups)
    counts = {row: rng.randint(1, 3) for row in range(num_groups + rng.randint(0, 3))}
    wanted = SAMPLED | {"ref_log_probs"}
    seen: dict[str, list[RowId]] = {"ref": [], "train": []}
    pending_fields: list[RowId] = []
    to_add = list(counts)
    rng.shuffle(to_add)
    kept: list[GroupUid] = []

    def read(reader: str) -> bool:
        if reader == "ref":
            meta = p.read("ref", num_rows=rng.randint(1, 5))
            pending_fields.extend(meta.row_ids)
        else:
            meta = p.read(
                "train", wanted, rng.randint(1, 4), together=True, replica=rng.randrange(ranks), num_replicas=ranks
            )
        seen[reader] += meta.row_ids
        for uid in {row.uid for row in meta.row_ids}:
            assert [row for row in meta.row_ids if row.uid == uid] == p.plane[uid].rows, "a prompt was cut in two"
        return meta.ended

    while to_add or not p.pool.selection.closed:
        action = rng.choice(["add", "ref", "train", "put", "close"])
        if action == "add" and to_add:
            row = to_add.pop()
            kept.append(p.add(row, counts[row]))
        elif action == "put" and pending_fields:
            row_id = pending_fields.pop(rng.randrange(len(pending_fields)))
            p.pool.put_fields([row_id], {"ref_log_probs": [np.zeros(2, dtype=np.float32)]})
        elif action == "close" and not to_add:
            kept = kept[:num_groups]
            p.pool.select(kept)
        elif action in seen:
            read(action)
    while not read("ref"):
        pass
    for row_id in pending_fields:
        p.pool.put_fields([row_id], {"ref_log_probs": [np.zeros(2, dtype=np.float32)]})
    pending_fields.clear()
    for _ in range(200):
        read("train")
    expected = {row for uid in kept for row in p.plane[uid].rows}
    for rows in seen.values():
        assert len(rows) == len(set(rows)), "a row was handed out twice"
        assert expected <= set(rows)


class RestartingReader:
    """A reading task that may be replaced at any time, and what it must have seen by then.

    held: rows of groups that it was handed and that were not taken from it by a restart.
    """

    def __init__(self, pool: Pool, name: str, ranks: int, rng: random.Random) -> None:
        self.pool, self.name, self.ranks, self.rng = pool, name, ranks, rng
        self.field = f"{name}_log_probs"
        self.held: set[GroupUid] = set()
        self.pending: list[tuple[GroupUid, int]] = []

    def read(self) -> bool:
        meta = self.pool.read(
            self.name,
            num_rows=self.rng.randint(1, 4),
            together=self.ranks > 1,
            replica=self.rng.randrange(self.ranks),
            num_replicas=self.ranks,
        )
        assert len(set(meta.row_ids)) == len(meta.row_ids)
        for uid in dict.fromkeys(row.uid for row in meta.row_ids):
            assert uid not in self.held, "a row was handed out twice"
            assert [row for row in meta.row_ids if row.uid == uid] == self.pool.plane[uid].rows
            self.held.add(uid)
            self.pending.append((uid, meta.generation))
        return meta.ended

    def write(self) -> None:
        """Deliver one pending result, maybe of a process that was replaced since."""
        uid, generation = self.pending.pop(self.rng.randrange(len(self.pending)))
        rows = self.pool.plane[uid].rows
        values = [np.full(2, row.uid.row, dtype=np.float32) for row in rows]
        self.pool.pool.put_fields(rows, {self.field: values}, Writer(reader=self.name, generation=generation))

    def restart(self) -> None:
        lost = {uid for uid in self.held if self.field not in self.pool.plane[uid].cells}
        # More of a reader with several ranks: what was dealt to ranks that did not ask for it yet.
        num_lost = self.pool.requeue(self.name)
        assert num_lost == len(lost) if self.ranks == 1 else num_lost >= len(lost)
        self.held -= lost

    def is_complete(self, uids: list[GroupUid]) -> bool:
        return all(self.field in self.pool.plane[uid].cells for uid in uids)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), num_groups=st.integers(1, 10), ranks=st.integers(2, 3))
def test_however_often_readers_are_replaced_no_row_is_held_twice_and_every_field_is_written(
    seed: int, num_groups: int, ranks: int
) -> None:
    """Three tasks, one of them with several ranks; results of replaced processes arrive late."""
    rng = random.Random(seed)
    p = Pool(num_groups=num_groups)
    readers = [RestartingReader(p, name, width, rng) for name, width in (("ref", 1), ("old", 1), ("prox", ranks))]
    to_add = list(range(num_groups))
    restarts = 4
    for _ in range(20 * num_groups):
        reader = rng.choice(readers)
        action = rng.choice(["add", "read", "write", "restart"])
        if action == "add" and to_add:
            p.add(to_add.pop(), rng.randint(1, 3))
        elif action == "read":
            reader.read()
        elif action == "write" and reader.pending:
            reader.write()
        elif action == "restart" and restarts:
            restarts -= 1
            reader.restart()
    for row in to_add:
        p.add(row)
    uids = [uid_of(row) for row in range(num_groups)]
    p.pool.select(uids)
    for reader in readers:
        for _ in range(200):
            reader.read()
            while reader.pending:
                reader.write()
        assert reader.is_complete(uids)
        assert reader.held == set(uids)


def test_a_reader_of_many_finished_groups_is_told_the_end_only_after_the_last_field() -> None:
    p = Pool()
    uids = [p.add(row, 1) for row in range(5)]
    surplus = p.add(9, 1)
    wanted = SAMPLED | {"ref_log_probs"}
    for uid in (*uids[:4], surplus):
        p.put(uid, "ref_log_probs")
    assert groups_in(p.read("train", wanted)) == [0, 1, 2, 3, 9]
    p.pool.select(uids)
    assert not p.read("train", wanted).ended, "as many were offered as there are groups, but one of them left"
    p.put(uids[4], "ref_log_probs")
    assert groups_in(p.read("train", wanted)) == [4]
    assert p.read("train", wanted).ended


def test_a_refused_write_changes_no_field_of_any_group() -> None:
    p = Pool()
    first, second = p.add(1), p.add(2)
    p.put(second, "ref_log_probs", 1.0)
    rows = [*p.plane[first].rows, *p.plane[second].rows]
    zeros = [np.zeros(2, dtype=np.float32)] * 4
    with pytest.raises(BufferStateError, match="with other content"):
        p.pool.put_fields(rows, {"ref_log_probs": zeros})
    with pytest.raises(BufferStateError, match="has 1 rows for 4 ids"):
        p.pool.put_fields(rows, {"old_log_probs": zeros, "advantages": zeros[:1]})
    stored = SAMPLED | {"sample_total_tokens", "sample_parts"}
    assert p.plane[first].cells.keys() == stored
    assert p.plane[second].cells.keys() == stored | {"ref_log_probs"}


def test_a_group_that_the_step_was_closed_without_is_left_out_of_what_a_reader_was_handed() -> None:
    p = Pool()
    kept, surplus = p.add(1), p.add(2)
    handed = p.read("ref").row_ids
    mixed = [handed[0], handed[2], handed[1]]
    assert assemble(p.pool.plan_rows(mixed)).row_ids == mixed  # in the order that was asked for
    p.pool.select([kept])
    p.plane.drop([surplus])
    assert assemble(p.pool.plan_rows(handed)).row_ids == rows_of(kept, 2)


def test_groups_whose_derived_fields_came_at_different_times_close_together_and_are_recorded_as_they_came() -> None:
    """An advantage estimator may add columns of any name, while other groups are still generated."""
    p = Pool()
    first, second = p.add(1), p.add(2)
    p.put(first, "whitened", 1.0)
    p.pool.require_equal_fields([first, second])
    p.pool.select([first, second])
    p.put(second, "whitened", 2.0)
    assert "whitened" in assemble(p.pool.share(ALL_ROWS)).columns
    assert assemble(p.pool.share(Share(0, 1, given=True))).columns.keys() == SAMPLED | {
        "sample_total_tokens",
        "sample_parts",
    }


def test_shares_are_of_equal_cost_if_it_is_known_and_the_first_call_fixes_them() -> None:
    cost = RowCost(per_token=0, output_layer=0, width=1, num_full=1)  # attention alone: rows of 3, 5, 6 and 10 tokens
    by_tokens, by_cost = ([[0, 3], [1, 2]], [[3], [0, 1, 2]])
    for first, expected in ((None, by_tokens), (cost, by_cost)):
        p = Pool()
        p.pool.select([p.add(row, 1) for row in (1, 3, 4, 8)])
        shares = [p.pool.share(Share(rank, 2, cost=asked)).slices for rank, asked in ((0, first), (1, None))]
        rows = {1: 0, 3: 1, 4: 2, 8: 3}
        assert [[rows[part.row_ids[0].uid.row] for part in share] for share in shares] == expected
