"""Deals: a replica's k-th answer is the same for all its ranks, and every group is in one deal of one replica."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.buffer.columns import ColumnStore, assemble
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.pool import DataPool, ReadRequest, RowsMeta
from buffer_rl.buffer.state import BufferState
from buffer_rl.errors import BufferStateError
from buffer_rl.records.groups import GroupUid, RowId
from harness.tickets import close_rollout

KINDS = pytest.mark.parametrize("together", [False, True])


def uid_of(row: int) -> GroupUid:
    return GroupUid("data", row, 0)


def request(replica: int = 0, deal: int = 0, num_rows: int = 2, num_replicas: int = 2, **more: Any) -> ReadRequest:
    """A request of the task ``train``; the same kind of reader unless ``more`` says otherwise."""
    more = {"produces": frozenset({"ref_log_probs"}), **more}
    return ReadRequest(
        reader="train",
        fields=frozenset({"tokens"}),
        num_rows=num_rows,
        replica=replica,
        num_replicas=num_replicas,
        deal=deal,
        **more,
    )


class Pool:
    """An open pool, which ``add`` fills with groups of the named tokens a row."""

    def __init__(self, num_groups: int = 100) -> None:
        self.store = ColumnStore()
        self.pool = DataPool(3, "train_3", self.store, num_groups)

    def add(self, row: int, *tokens: int) -> GroupUid:
        uid = uid_of(row)
        columns: dict[str, Any] = {"tokens": [np.zeros(count, dtype=np.int32) for count in tokens]}
        self.store.put(uid, [RowId(uid, index) for index in range(len(tokens))], columns)
        self.pool.join(uid)
        return uid

    def close(self, *rows: int) -> None:
        self.pool.select([uid_of(row) for row in rows])

    def ask(self, replica: int = 0, deal: int = 0, **more: Any) -> RowsMeta:
        return self.pool.get_meta(request(replica, deal, **more))

    def groups(self, replica: int = 0, deal: int = 0, **more: Any) -> list[int]:
        meta = self.ask(replica, deal, **more)
        assert meta.dealt, "the deal is not made"
        return list(dict.fromkeys(row.uid.row for row in meta.row_ids))


def state_of(meta: RowsMeta) -> str:
    assert not (meta.dealt and meta.ended)
    return "ended" if meta.ended else "dealt" if meta.dealt else "not yet"


def test_ranks_of_a_replica_get_the_same_rows_for_the_same_deal_in_any_order_of_asking() -> None:
    p = Pool()
    for row in range(6):
        p.add(row, 5)
    assert p.groups(0, 0) == [0, 1]
    assert p.groups(0, 1) == [2, 3]
    assert p.groups(1, 0) == [4, 5], "another replica gets what is left"
    assert [p.groups(0, 0), p.groups(0, 1), p.groups(1, 0)] == [[0, 1], [2, 3], [4, 5]]
    p.add(6, 5)
    assert p.groups(0, 0) == [0, 1], "a repeat makes no deal"
    assert p.groups(1, 1) == [6]
    assert p.groups(0, 1, num_rows=100) == [2, 3], "what a repeat asks for besides changes nothing"
    assert p.ask(0, 1).row_ids == [RowId(uid_of(2), 0), RowId(uid_of(3), 0)]


def test_a_deal_for_all_replicas_has_about_as_many_tokens_for_each_whichever_asks_first() -> None:
    p = Pool()
    for row, tokens in enumerate((11, 3, 6)):
        p.add(row, tokens)
    assert state_of(p.ask(1, 0, together=True)) == "not yet", "4 rows are needed for two replicas of two"
    p.add(3, 7)
    p.add(4, 1)
    assert p.groups(1, 0, together=True) == [2, 3]  # 11 | 7, 7 + 6 = 13 | 11 + 3 = 14
    assert state_of(p.ask(1, 1, together=True)) == "not yet"
    assert p.groups(0, 0, together=True) == [0, 1]
    assert p.groups(1, 0, together=True) == [2, 3]


def test_a_deal_for_all_replicas_waits_for_a_group_for_each() -> None:
    p = Pool()
    p.add(0, 5, 5, 5, 5)
    assert state_of(p.ask(0, together=True)) == "not yet"
    p.add(1, 5)
    assert [p.groups(replica, together=True) for replica in (0, 1)] == [[0], [1]]


@KINDS
def test_a_repeat_after_the_close_returns_the_rows_that_the_step_kept(together: bool) -> None:
    p = Pool()
    for row in range(4):
        p.add(row, 5)
    before = [p.groups(replica, together=together) for replica in (0, 1)]
    assert sorted(before[0] + before[1]) == [0, 1, 2, 3]
    p.close(*before[0], before[1][1])
    assert p.groups(0, together=together) == before[0]
    assert p.groups(1, together=together) == before[1][1:]


@KINDS
def test_a_deal_whose_groups_all_left_is_a_deal_without_rows(together: bool) -> None:
    p = Pool()
    for row in range(4):
        p.add(row, 5)
    kept = p.groups(0, together=together)
    assert p.groups(1, together=together)
    p.close(*kept)
    assert p.ask(1, together=together).row_ids == []
    assert [state_of(p.ask(1, deal, together=together)) for deal in (0, 1)] == ["dealt", "ended"]


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_replica_without_a_group_gets_a_deal_without_rows_and_all_end_at_the_same_deal(num_replicas: int) -> None:
    p = Pool()
    for row in range(num_replicas + 1):
        p.add(row, 5)
    ask: dict[str, Any] = {"together": True, "num_rows": 1, "num_replicas": num_replicas}
    replicas = range(num_replicas)
    assert [len(p.ask(replica, 0, **ask).row_ids) for replica in replicas] == [1] * num_replicas
    assert [state_of(p.ask(replica, 1, **ask)) for replica in replicas] == ["not yet"] * num_replicas
    p.close(*range(num_replicas + 1))
    last = [p.ask(replica, 1, **ask) for replica in reversed(replicas)]
    assert [state_of(meta) for meta in last] == ["dealt"] * num_replicas
    assert sorted(len(meta.row_ids) for meta in last) == [0] * (num_replicas - 1) + [1]
    assert [state_of(p.ask(replica, 2, **ask)) for replica in replicas] == ["ended"] * num_replicas


def test_no_replica_is_told_the_end_while_a_group_lacks_a_field() -> None:
    p = Pool()
    uids = [p.add(row, 5) for row in range(2)]
    ask: dict[str, Any] = {"together": True, "fields": frozenset({"tokens", "ref_log_probs"}), "produces": frozenset()}

    def meta_of(replica: int, deal: int) -> RowsMeta:
        return p.pool.get_meta(ReadRequest(reader="t", num_rows=1, replica=replica, num_replicas=2, deal=deal, **ask))

    def write(uid: GroupUid) -> None:
        p.pool.put_fields([RowId(uid, 0)], {"ref_log_probs": [np.zeros(2, dtype=np.float32)]})

    p.close(0, 1)
    write(uids[1])
    found = [meta_of(replica, 0) for replica in (0, 1)]
    assert sorted(len(meta.row_ids) for meta in found) == [0, 1]
    assert [state_of(meta_of(replica, 1)) for replica in (0, 1)] == ["not yet"] * 2
    write(uids[0])
    assert [state_of(meta_of(replica, 1)) for replica in (1, 0)] == ["dealt"] * 2
    assert [state_of(meta_of(replica, 2)) for replica in (1, 0)] == ["ended"] * 2


@KINDS
def test_a_skipped_deal_another_number_of_replicas_and_another_kind_are_refused_and_change_nothing(
    together: bool,
) -> None:
    p = Pool()
    for row in range(8):
        p.add(row, 5)
    with pytest.raises(BufferStateError, match="replica 1 of 'train' asks for deal 1") as caught:
        p.ask(1, 1, together=together)
    assert caught.value.expected == "deal 0, its next one, or one before it"
    with pytest.raises(BufferStateError, match="asked for other fields, or as another kind") as caught:
        p.ask(0, num_replicas=3, together=together)
    assert "num_replicas 2" in str(caught.value.expected)
    with pytest.raises(BufferStateError, match="asked for other fields, or as another kind") as caught:
        p.ask(0, together=not together)
    assert f"together {together}" in str(caught.value.expected)
    for replica in (2, -1):
        with pytest.raises(BufferStateError, match=f"replica {replica} of 2 does not exist"):
            p.ask(replica, together=together)
    with pytest.raises(BufferStateError, match="deal -1 was asked for"):
        p.ask(0, -1, together=together)
    first = p.groups(0, together=together)
    with pytest.raises(BufferStateError, match="asks for deal 2") as caught:
        p.ask(0, 2, together=together)
    assert caught.value.expected == "deal 1, its next one, or one before it"
    assert sorted(first + p.groups(1, together=together)) == [0, 1, 2, 3]


@KINDS
def test_processes_that_replace_others_start_at_deal_0_with_the_groups_that_lack_fields(together: bool) -> None:
    p = Pool()
    uids = [p.add(row, 5) for row in range(5)]
    dealt = p.groups(0, together=together)
    if not together:
        assert dealt == [0, 1]
    p.pool.put_fields([RowId(uid_of(dealt[0]), 0)], {"ref_log_probs": [np.zeros(2, dtype=np.float32)]})
    lost = 3 if together else 1  # a deal for both replicas has 4 groups
    assert p.pool.requeue_for_readers("train") == lost
    p.close(*(uid.row for uid in uids))
    found = [p.groups(replica, together=together) for replica in (1, 0)]
    assert sorted(found[0] + found[1]) == sorted({0, 1, 2, 3, 4} - {dealt[0]})
    assert p.ask(0, together=together).generation == 1
    assert state_of(p.ask(0, 1, together=together)) == "ended"


def test_a_prefetch_that_finds_too_little_takes_no_deal_number_and_one_of_a_made_deal_is_answered() -> None:
    p = Pool()
    for row in range(3):
        p.add(row, 5)
    assert p.groups(0, 0) == [0, 1]
    assert state_of(p.ask(0, 1, prefetch_reserve=0)) == "not yet", "one row is less than a full batch"
    p.add(3, 5)
    assert state_of(p.ask(0, 1, prefetch_reserve=1)) == "not yet", "none would be left for the other replica"
    assert p.groups(0, 1) == [2, 3]
    assert p.groups(0, 1, prefetch_reserve=1) == [2, 3]
    p.add(4, 5)
    assert state_of(p.ask(0, 2, prefetch_reserve=0)) == "not yet"
    p.close(0, 1, 2, 3, 4)
    assert p.groups(0, 2, prefetch_reserve=0) == [4], "what is ready in a closed pool counts as full"
    assert state_of(p.ask(1, 0, prefetch_reserve=0)) == "ended"


def test_a_deal_for_all_replicas_is_made_for_a_prefetch_too_whatever_it_leaves() -> None:
    p = Pool()
    for row in range(4):
        p.add(row, 5)
    assert len(p.groups(0, together=True, prefetch_reserve=1)) == 2


def test_groups_that_were_dealt_to_a_final_reader_are_part_of_the_step_whichever_replica_asked() -> None:
    for together, expected in ((True, {0, 1, 2, 3}), (False, {0, 1})):
        p = Pool(num_groups=4)
        for row in range(6):
            p.add(row, 5)
        p.ask(0, together=together, is_final=True)
        assert {uid.row for uid in p.pool.pinned()} == expected


def test_a_deal_without_rows_is_an_empty_batch_and_an_end_or_a_wait_is_none() -> None:
    state = BufferState(None, ledger=Ledger.in_memory(), groups_per_step=1)
    ticket = state.generate(0)
    state.open_selection(0)
    assert state.take(ticket.task, request(together=True))[1] is None
    state.import_groups(ticket, [RowId(uid_of(0), 0)], {"tokens": [np.zeros(5, dtype=np.int32)]})
    close_rollout(state, ticket)
    sizes = []
    for replica in (0, 1):
        plan = state.take(ticket.task, request(replica, together=True))[1]
        assert plan is not None
        batch = assemble(plan)
        sizes.append((len(batch), list(batch.columns)))
        assert state.take(ticket.task, request(replica, 1, together=True))[1] is None
    assert sizes == [(1, ["tokens"]), (0, [])]


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10_000), num_groups=st.integers(1, 12), num_replicas=st.integers(1, 3), together=st.booleans()
)
def test_whatever_the_order_of_events_all_ranks_agree_and_every_group_is_in_one_deal(
    seed: int, num_groups: int, num_replicas: int, together: bool
) -> None:
    """Two ranks a replica, which read, prefetch, and repeat requests in a random order while groups finish."""
    rng = random.Random(seed)
    p = Pool()
    num_rows = rng.randint(1, 4)
    to_add = list(range(num_groups))
    rng.shuffle(to_add)
    ranks = {(replica, rank): 0 for replica in range(num_replicas) for rank in (0, 1)}  # next deal
    ends: dict[tuple[int, int], int] = {}
    answers: dict[tuple[int, int], list[RowId]] = {}
    while len(ends) < len(ranks):
        if rng.random() < 0.3:
            if to_add:
                p.add(to_add.pop(), *(rng.randint(0, 9) for _ in range(rng.randint(1, 3))))
            elif not p.pool.selection.closed:
                p.close(*range(num_groups))
        who = rng.choice(list(ranks))
        deal = rng.randint(0, ranks[who])
        reserve = rng.choice([None, num_replicas - 1])
        meta = p.ask(
            who[0], deal, num_rows=num_rows, num_replicas=num_replicas, together=together, prefetch_reserve=reserve
        )
        if meta.dealt:
            ranks[who] = max(ranks[who], deal + 1)
            assert answers.setdefault((who[0], deal), meta.row_ids) == meta.row_ids, "the answer to a repeat differs"
            assert together or meta.row_ids
        elif meta.ended:
            assert deal == ranks[who]
            assert ends.setdefault(who, deal) == deal
        else:
            assert deal == ranks[who], "a deal that was made is not there"
    everything = [row for rows in answers.values() for row in rows]
    assert sorted(everything) == sorted(row for uid in p.pool.selection.uids for row in p.store[uid].rows)
    assert all(ends[replica, 0] == ends[replica, 1] for replica in range(num_replicas))
    if together:
        assert len(set(ends.values())) == 1
