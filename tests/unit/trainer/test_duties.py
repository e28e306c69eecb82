"""How much a process of a role takes at a time."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.buffer.columns import ColumnStore
from buffer_rl.buffer.pool import DataPool, ReadRequest
from buffer_rl.records.groups import GroupUid, RowId
from buffer_rl.trainer.stream import STREAMED_GROUPS, rows_per_batch

SAMPLES = 3


def handed_out(num_groups: int, num_readers: int, deterministic: bool = False) -> list[int]:
    """Groups that each reader gets, where all groups are there before the first one asks, and each asks once."""
    args = SimpleNamespace(deterministic=deterministic, n_samples_per_prompt=SAMPLES, rollout_batch_size=num_groups)
    plane = ColumnStore()
    pool = DataPool(0, "train_0", plane, num_groups)
    for number in range(num_groups):
        uid = GroupUid("data", number, 0)
        rows = [RowId(uid, index) for index in range(SAMPLES)]
        plane.put(uid, rows, {"tokens": [np.zeros(5, dtype=np.int32)] * SAMPLES})
        pool.join(uid)
    pool.select(pool.selection.uids)
    asked = ReadRequest(
        reader="train",
        fields=frozenset({"tokens"}),
        num_rows=rows_per_batch(args, num_readers),
        num_replicas=num_readers,
        is_final=True,
    )
    return [len(pool.get_meta(replace(asked, replica=index)).row_ids) // SAMPLES for index in range(num_readers)]


def test_processes_that_ask_at_once_share_a_step_that_is_finished() -> None:
    assert handed_out(4, 2) == [2, 2]
    assert handed_out(8, 4) == [2] * 4
    assert handed_out(6, 2) == [3, 3]
    assert handed_out(16, 8) == [2] * 8
    assert handed_out(2, 4) == [1, 1, 0, 0]


def test_one_process_takes_several_groups_at_a_time_and_under_deterministic_one() -> None:
    assert handed_out(16, 1) == [STREAMED_GROUPS]
    assert handed_out(2, 1) == [2]
    assert handed_out(16, 2, deterministic=True) == [1, 1]


@given(st.integers(1, 40), st.integers(1, 10))
def test_nobody_takes_more_than_an_equal_part_rounded_up(num_groups: int, num_readers: int) -> None:
    taken = handed_out(num_groups, num_readers)
    assert 1 <= max(taken) <= -(-num_groups // num_readers)
    assert sum(taken) == num_groups or max(taken) == STREAMED_GROUPS
