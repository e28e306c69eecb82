from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from buffer_rl.testing.tiny import make_tiny_model
from harness.megatron_ranks import HAS_MEGATRON, REASON, RankPool

if not HAS_MEGATRON:
    pytest.skip(REASON, allow_module_level=True)

from harness.megatron_rows import CHARACTERS, SEEDS, make_args, make_rows
from harness.megatron_steps import Found
from harness.trainers import make_trainer, step


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Ranks that run functions of ``harness`` modules; started once for all tests."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A folder with a random model of an architecture, of four layers."""

    @cache
    def make(architecture: str) -> str:
        shape: dict[str, Any] = {"num_hidden_layers": 4}
        if architecture == "qwen3_moe":
            shape = {"num_hidden_layers": 2, "norm_topk_prob": True}
        if architecture == "untied":
            architecture, shape = "qwen3", {"num_hidden_layers": 4, "tie_word_embeddings": False}
        folder = tmp_path_factory.mktemp(architecture)
        return make_tiny_model(folder, architecture, characters=CHARACTERS, init_scale=0.2, **shape)

    return make


@pytest.fixture(scope="session")
def by_transformers(model_of: Callable[[str], str]) -> Callable[[str], Found]:
    """What transformers' model and torch's AdamW find with the same rows, on one rank."""

    @cache
    def train(architecture: str) -> Found:
        trainer = make_trainer(make_args(model_of(architecture)))
        first = make_rows(12, SEEDS[0])
        found = Found(outputs=dict(zip(first.row_ids, trainer.log_probs("actor", first), strict=True)))
        found.steps = [step(trainer, make_rows(12, seed)) for seed in SEEDS]
        found.weights = {name: tensor.clone() for bucket in trainer.export() for name, tensor in bucket.items()}
        return found

    return train
