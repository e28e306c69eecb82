"""Tokens go to the engine's experts in the torch trainer: against a replay that is written down in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.errors import ConfigError, DataError
from buffer_rl.records.groups import TrainBatch
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.train.collate import collate, routed_experts, row_blocks
from buffer_rl.train.forward import passes
from buffer_rl.train.rank import build_trainer
from buffer_rl.train.routing_replay import RoutingReplay
from harness.replayed_experts import MUTANTS, SIZES, rows_with_experts, written_gradients, written_log_probs
from harness.trainers import make_trainer

CPU = torch.device("cpu")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz="


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mixture")
    return make_tiny_model(folder, "qwen3_moe", characters=CHARACTERS, init_scale=0.3, **SIZES)


@pytest.fixture
def make_replaying(make_args: Callable[..., Any], mixture: str) -> Callable[..., Any]:
    def make(**overrides: Any) -> Any:
        own = {"hf_checkpoint": mixture, "replay_routed_experts": True, "loss_type": "policy_loss", **overrides}
        return make_trainer(make_args(**own))

    return make


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    return rows_with_experts()


@pytest.fixture(scope="module")
def expected(mixture: str, batch: TrainBatch) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    return written_gradients(dict(model.named_parameters()), model.config, batch)


def gradients(trainer: Any, batch: TrainBatch) -> dict[str, torch.Tensor]:
    trainer.zero_grad()
    trainer.accumulate(batch)
    found = {n: p.grad.double().clone() for n, p in trainer._actor.named_parameters() if p.grad is not None}
    trainer.zero_grad()
    return found


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest of all weights, relative to the weight's own gradient."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected)


def with_column(batch: TrainBatch, column: Any) -> TrainBatch:
    return replace(batch, columns={**batch.columns, "routed_experts": column})


LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "several micro-batches": {"max_tokens_per_gpu": 16},
    "padded": {},
    "recomputed": {"recompute_granularity": "full"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_those_of_a_replay_that_is_written_down(
    layout: str, make_replaying: Any, batch: TrainBatch, expected: Any
) -> None:
    trainer = make_replaying(**LAYOUTS[layout])
    if layout == "padded":
        trainer._actor.set_attn_implementation("sdpa")
    assert distance(gradients(trainer, batch), expected) < 1e-5


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_replay_of_other_experts_has_other_gradients(
    mutant: str, make_replaying: Any, batch: TrainBatch, expected: Any
) -> None:
    trainer = make_replaying()
    column = MUTANTS[mutant](batch.columns["routed_experts"])
    assert distance(gradients(trainer, with_column(batch, column)), expected) > 0.05
