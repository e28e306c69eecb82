from __future__ import annotations

import numpy as np
import pytest

from buffer_rl.algo.advantages import grpo
from buffer_rl.errors import DataError
from buffer_rl.records.groups import GroupUid, RowId, TrainBatch


def _batch(**columns: object) -> TrainBatch:
    ids = [RowId(GroupUid("data", 0, 0), i) for i in range(3)]
    return TrainBatch(
        rollout_id=0,
        task="train_0",
        row_ids=ids,
        columns={"response_length": np.array([2, 0, 3], dtype=np.int32), **columns},  # type: ignore[dict-item]
    )


def test_grpo_gives_each_response_token_its_samples_reward() -> None:
    batch = _batch(reward=np.array([0.5, 9.0, -1.5], dtype=np.float32))
    grpo(None, batch)
    for name in ("advantages", "returns"):
        assert [row.tolist() for row in batch.columns[name]] == [[0.5, 0.5], [], [-1.5, -1.5, -1.5]]
        assert all(row.dtype == np.float32 for row in batch.columns[name])
    batch.columns["advantages"][0][0] = 7.0
    assert batch.columns["returns"][0][0] == 0.5, "the two columns must not share memory"


def test_a_missing_reward_column_is_an_error() -> None:
    with pytest.raises(DataError, match="no rewards"):
        grpo(None, _batch())


def test_a_reward_that_is_not_finite_names_its_row() -> None:
    with pytest.raises(DataError, match="data:0:0/1"):
        grpo(None, _batch(reward=np.array([0.0, np.nan, 1.0], dtype=np.float32)))
