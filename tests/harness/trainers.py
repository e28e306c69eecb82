"""One rank of the torch trainer, and its steps, for tests without a driver."""

from __future__ import annotations

from typing import Any

from buffer_rl.kinds.token_loss import Sums
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.objective import Objective
from buffer_rl.trainer.pretrained import prepare_torch
from buffer_rl.trainer.torch_trainer import TorchTrainer

LARGE_EPS: dict[str, float] = {"adam_eps": 1e-2}
"""Options of a test that compares weights after steps whose sums have different orders. Adam's first step moves a
weight by ``lr * g / (|g| + eps)``. With the default eps a gradient that is rounding alone moves its weight by the
learning rate, in a direction that depends on the processor; with this one a difference d of gradients becomes at most
``lr * d / eps``."""


def make_trainer(args: Any, rank: int = 0, world_size: int = 1) -> TorchTrainer:
    """The trainer with the objective that ``args`` name, in this process."""
    prepare_torch(args, args.seed + rank)
    return TorchTrainer(args, rank, world_size, Objective(args, PluginRegistry.from_flags(args.plugin)))


def with_advantages(trainer: TorchTrainer, batch: TrainBatch) -> TrainBatch:
    """``batch``, whose columns ``advantages`` and ``returns`` the estimator has set."""
    trainer._objective.compute_advantages(batch)  # type: ignore[attr-defined]
    return batch


def accumulate(trainer: TorchTrainer, batch: TrainBatch) -> Sums:
    """Advantages, forward and backward."""
    return trainer.accumulate(with_advantages(trainer, batch))


def step(trainer: TorchTrainer, batch: TrainBatch) -> dict[str, float]:
    """One optimizer step on all rows of a step, and its metrics."""
    sums = accumulate(trainer, batch)
    return sums.means() | trainer.optimizer_step(1 / sums.divisor)
