"""Rows for tests of advantage estimators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from buffer_rl.records.groups import Column, GroupUid, RowId, TrainBatch

Ids = Sequence[tuple[int, int, int]]


@pytest.fixture
def make_rows() -> Callable[..., TrainBatch]:
    """A batch of rows with the ids (prompt, sample, part), a reward and a loss mask each, and further columns."""

    def make(ids: Ids, rewards: Sequence[float], masks: Sequence[Sequence[int]], **more: Any) -> TrainBatch:
        columns: dict[str, Column] = {
            "reward": np.array(rewards, dtype=np.float32),
            "response_length": np.array([len(mask) for mask in masks], dtype=np.int32),
            "loss_mask": [np.array(mask, dtype=np.float32) for mask in masks],
            **more,
        }
        row_ids = [RowId(GroupUid("data", prompt, 0), sample, part) for prompt, sample, part in ids]
        return TrainBatch(rollout_id=0, task="train_0", row_ids=row_ids, columns=columns)

    return make


@pytest.fixture
def make_algo_args() -> Callable[..., SimpleNamespace]:
    """What estimators read of the options."""

    def make(**options: Any) -> SimpleNamespace:
        defaults = {
            "gamma": 1.0,
            "lambd": 1.0,
            "kl_coef": 0.0,
            "turn_rewards": False,
            "use_rollout_logprobs": False,
            "stream_gradients": False,
            "schedule": "lockstep",
            "max_staleness": None,
        }
        return SimpleNamespace(**(defaults | options))

    return make
