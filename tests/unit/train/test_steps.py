from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.config import Options
from buffer_rl.errors import TrainError
from buffer_rl.train.steps import NonFiniteGuard, require_old_log_probs, train_steps
from buffer_rl.train.torch_trainer import TorchTrainer
from buffer_rl.types import TrainBatch


def _mini_batches(batch: TrainBatch) -> list[TrainBatch]:
    parts = [batch.select(range(start, start + 4)) for start in (0, 4, 8)]
    tokens = [int(sum(float(np.sum(mask)) for mask in part.columns["loss_mask"])) for part in parts]
    return [replace(part, total_samples=4, total_tokens=count) for part, count in zip(parts, tokens, strict=True)]


def _weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in trainer.export_buckets() for name, tensor in bucket.items()}


def test_steps_equal_those_taken_by_hand_and_metrics_are_their_means(
    make_args: Callable[..., Options], make_batch: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    args: Any = make_args(
        num_steps_per_rollout=3, lr_decay_style="linear", num_rollout=2, lr_warmup_iters=0, loss_agg_mode="token-mean"
    )
    together, by_hand = (TorchTrainer(args, 0, 1) for _ in range(2))
    batches = _mini_batches(make_batch())
    old = [together.log_probs("actor", batch) for batch in batches]
    for batch, rows in zip(batches, old, strict=True):
        batch.columns["old_log_probs"] = rows
    require_old_log_probs(args, batches)
    metrics = train_steps(together, [batch.select(range(4)) for batch in batches], NonFiniteGuard(tmp_path, 0, 1))

    losses, norms, gaps = [], [], []
    for batch in batches:
        by_hand.compute_advantages(batch)
        shares = by_hand.forward_backward(batch)
        losses.append(shares["loss"])
        gaps.append(abs(shares["ppo_kl"]))
        norms.append(by_hand.optimizer_step()["grad_norm"])
    for name, tensor in _weights(together).items():
        assert torch.equal(tensor, _weights(by_hand)[name]), name
    assert metrics["sum/loss"] == pytest.approx(np.mean(losses))
    assert metrics["grad_norm"] == pytest.approx(np.mean(norms))
    assert metrics["lr"] == pytest.approx(1e-2 * (1 - 2 / 6))
    assert gaps[0] == 0.0
    assert min(gaps[1:]) > 0  # the old log-probabilities are those from before the first step


def test_several_steps_need_old_log_probs_unless_nothing_reads_them(
    make_args: Callable[..., Options], make_batch: Callable[..., TrainBatch]
) -> None:
    batches = _mini_batches(make_batch())
    with pytest.raises(TrainError, match="mini-batch 0 of 3 has no old log-probabilities"):
        require_old_log_probs(make_args(), batches)
    require_old_log_probs(make_args(), batches[:1])
    require_old_log_probs(make_args(use_rollout_logprobs=True), batches)
    require_old_log_probs(make_args(loss_type="sft_loss"), batches)
