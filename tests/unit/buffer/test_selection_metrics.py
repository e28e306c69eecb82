"""The numbers of a selection's rows, against ones worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from buffer_rl.buffer.columns import Cell, ColumnStore
from buffer_rl.buffer.selections import selection_metrics
from buffer_rl.buffer.window import Window
from buffer_rl.records.groups import GroupUid, RowId

ONE, TWO, THREE = (GroupUid(source="5c1f0a9be3d2", row=row, epoch=0) for row in (1, 2, 3))


def stored(store: ColumnStore, uid: GroupUid, rows: list[RowId], **columns: list[Any]) -> None:
    tokens = [np.arange(place + 2, dtype=np.int32) for place in range(len(rows))]  # rows of unequal lengths
    store.put(uid, rows, {"tokens": tokens, **{name: np.asarray(column) for name, column in columns.items()}})


def test_a_sample_counts_once_and_a_group_of_equal_rewards_as_such() -> None:
    store = ColumnStore()
    stored(
        store,
        ONE,
        [RowId(ONE, 0, 0), RowId(ONE, 0, 1), RowId(ONE, 1)],  # sample 0 has two parts
        raw_reward=[4.0, 0.0, 2.0],
        response_length=[10, 20, 5],
        truncated=[True, False, False],
    )
    stored(
        store,
        TWO,
        [RowId(TWO, 0), RowId(TWO, 1)],
        raw_reward=[0.0, 4.0],
        response_length=[1, 7],
        truncated=[False, True],
    )
    assert selection_metrics(store, [ONE, TWO]) == pytest.approx(
        {
            "rollout/raw_reward": (2 + 2 + 0 + 4) / 4,
            "rollout/raw_reward_std": np.sqrt((0 + 0 + 4 + 4) / 4),
            "rollout/response_len/mean": (15 + 5 + 1 + 7) / 4,
            "rollout/response_len/max": 20,
            "rollout/truncated_ratio": (0.5 + 0 + 0 + 1) / 4,
            "rollout/zero_std": 0.5,
        }
    )


def test_a_sample_is_mixed_if_one_of_its_rows_has_an_older_and_a_newer_version() -> None:
    store = ColumnStore()
    rows = [RowId(ONE, 0, 0), RowId(ONE, 0, 1), RowId(ONE, 1), RowId(ONE, 2)]
    stored(store, ONE, rows, weight_version=[3, 3, 4, -1], newest_weight_version=[3, 5, 4, -1])
    assert selection_metrics(store, [ONE]) == {"staleness/mixed": pytest.approx(1 / 3)}


def test_recomputed_experts_are_counted_over_all_rows_of_the_step() -> None:
    store = ColumnStore()
    stored(store, ONE, [RowId(ONE, 0, 0), RowId(ONE, 0, 1)], experts_recomputed=[3, 4])
    stored(store, TWO, [RowId(TWO, 0)], experts_recomputed=[0])
    assert selection_metrics(store, [ONE, TWO]) == {"rollout/experts_recomputed": 7.0}


def test_what_there_is_no_column_for_or_that_is_in_an_object_store_is_left_out() -> None:
    store = ColumnStore()
    store.put(ONE, [RowId(ONE, 0)], {"reward": np.ones(1), "raw_reward": Cell(num_rows=1, ref="elsewhere")})
    assert selection_metrics(store, [ONE]) == {}


def test_the_window_tells_what_stays_in_production_after_the_step() -> None:
    window = Window(groups_per_step=1, size=3)
    for uid in (ONE, TWO, THREE):
        window.lease(uid)
    window.finish(TWO)
    window.finish(THREE)
    window.take([TWO])
    assert selection_metrics(ColumnStore(), [], window) == {
        "production/live_groups": 2.0,
        "production/finished_groups": 1.0,
        "production/passes": 1.0,
    }
