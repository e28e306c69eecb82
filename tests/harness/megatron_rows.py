"""Rows and options for tests of the Megatron trainer beside the default one."""

from __future__ import annotations

from typing import Any

import numpy as np

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid, RowId, TrainBatch
from buffer_rl_megatron.model_shape import ModelShapeOptions
from buffer_rl_megatron.options import MegatronOptions

CHARACTERS = "abcdefghijklmnopqrstuvwxyz="
SEEDS = (0, 1)
"""Of the rows of each optimizer step."""
SECTIONS = [*CORE_SECTIONS, MegatronOptions, ModelShapeOptions]


def make_args(model: str, **changes: Any) -> Any:
    """Options of a run on the CPU with several micro-batches a step. Epsilon: see ``harness.trainers.LARGE_EPS``."""
    given = {
        "train_backend": "megatron",
        "hf_checkpoint": model,
        "train_device": "cpu",
        "lr": 1e-2,
        "adam_eps": 1e-3,
        "weight_decay": 0.1,
        "entropy_coef": 0.01,
        "max_tokens_per_gpu": 64,
    }
    return compose(SECTIONS)().model_copy(update=given | changes)


def make_rows(num_rows: int = 12, seed: int = 0) -> TrainBatch:
    """Rows of 2 to 9 prompt and 0 to 8 response tokens, a fifth of them masked, with rewards and the sampler's
    log-probabilities; pairs of rows are of one prompt group."""
    rng = np.random.default_rng(seed)
    responses = [0, *rng.integers(1, 9, num_rows - 1).tolist()]
    lengths = [
        prompt + length for prompt, length in zip(rng.integers(2, 10, num_rows).tolist(), responses, strict=True)
    ]
    columns: dict[str, Any] = {
        "tokens": [rng.integers(3, 30, length).astype(np.int32) for length in lengths],
        "response_length": np.array(responses, dtype=np.int32),
        "loss_mask": [(rng.random(length) > 0.2).astype(np.float32) for length in responses],
        "reward": rng.normal(size=num_rows).astype(np.float32),
        "rollout_log_probs": [-rng.random(length).astype(np.float32) * 5 for length in responses],
    }
    row_ids = [RowId(GroupUid("data", row // 2, 0), row % 2) for row in range(num_rows)]
    return TrainBatch(rollout_id=seed, task=f"train_{seed}", row_ids=row_ids, columns=columns)
