from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.section import Options, compose
from buffer_rl.records.groups import GroupUid, RowId, TrainBatch
from buffer_rl.testing.tiny import make_tiny_model

CHARACTERS = "abcdefghijklmnopqrstuvwxyz="


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 of two layers with tied embeddings."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), characters=CHARACTERS, init_scale=0.3)


@pytest.fixture
def make_args(model_path: str) -> Callable[..., Options]:
    """The options' defaults with some overrides."""

    def make(**overrides: Any) -> Options:
        changes = {"hf_checkpoint": model_path, "lr": 1e-2, "train_device": "cpu", **overrides}
        return compose(CORE_SECTIONS)().model_copy(update=changes)

    return make


@pytest.fixture
def make_batch() -> Callable[..., TrainBatch]:
    """Rows of 2 to 9 prompt and 0 to 8 response tokens, a fifth of them masked, with rewards and rollout log-probs."""

    def make(num_rows: int = 12, seed: int = 0) -> TrainBatch:
        rng = np.random.default_rng(seed)
        responses = [0, *rng.integers(1, 9, num_rows - 1).tolist()]
        prompts = rng.integers(2, 10, num_rows).tolist()
        lengths = [p + r for p, r in zip(prompts, responses, strict=True)]
        masks = [(rng.random(r) > 0.2).astype(np.float32) for r in responses]
        return TrainBatch(
            rollout_id=0,
            task="train_0",
            row_ids=[RowId(GroupUid("data", 0, 0), i) for i in range(num_rows)],
            columns={
                "tokens": [rng.integers(3, 30, n).astype(np.int32) for n in lengths],
                "response_length": np.array(responses, dtype=np.int32),
                "loss_mask": masks,
                "reward": rng.normal(size=num_rows).astype(np.float32),
                "rollout_log_probs": [-rng.random(r).astype(np.float32) * 5 for r in responses],
            },
        )

    return make
