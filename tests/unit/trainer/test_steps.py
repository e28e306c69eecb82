from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.errors import TrainError
from buffer_rl.options.section import Options
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.objective import LOG_PROB_GAP
from buffer_rl.trainer.steps import NonFiniteGuard, StepReport, require_old_log_probs, train_steps
from buffer_rl.trainer.torch_trainer import TorchTrainer
from harness.trainers import make_trainer, step


def _mini_batches(batch: TrainBatch) -> list[TrainBatch]:
    return [batch.select(range(start, start + 4)) for start in (0, 4, 8)]


def _weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in trainer.export() for name, tensor in bucket.items()}


def test_steps_equal_those_taken_by_hand_and_metrics_are_their_means(
    make_args: Callable[..., Options], make_batch: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    args: Any = make_args(
        num_steps_per_rollout=3, lr_decay_style="linear", num_rollout=2, lr_warmup_iters=0, loss_agg_mode="token-mean"
    )
    together, by_hand = (make_trainer(args) for _ in range(2))
    batches = _mini_batches(make_batch())
    old = [together.log_probs("actor", batch) for batch in batches]
    for batch, rows in zip(batches, old, strict=True):
        batch.columns["old_log_probs"] = rows
    require_old_log_probs(args, batches)
    parts, guard = [batch.select(range(4)) for batch in batches], NonFiniteGuard(tmp_path, 0, 1)
    metrics = StepReport.metrics_of([train_steps(together, together._objective, parts, guard)])

    losses, norms, gaps = [], [], []
    for batch in batches:
        found = step(by_hand, batch)
        losses.append(found["loss"])
        gaps.append(abs(found["ppo_kl"]))
        norms.append(found["grad_norm"])
    for name, tensor in _weights(together).items():
        assert torch.equal(tensor, _weights(by_hand)[name]), name
    assert metrics["loss"] == pytest.approx(np.mean(losses))
    assert metrics["grad_norm"] == pytest.approx(np.mean(norms))
    assert metrics["lr"] == pytest.approx(1e-2 * (1 - 2 / 6))
    masks = [mask for batch in batches for mask in batch.columns["loss_mask"]]
    assert metrics["divisor"] == metrics["loss_tokens"] == np.sum(np.concatenate(masks))
    assert metrics["loss_samples"] == 12
    assert gaps[0] == 0.0
    assert min(gaps[1:]) > 0  # the old log-probabilities are those from before the first step


def test_two_passes_equal_a_loop_over_the_mini_batches_written_twice(
    make_args: Callable[..., Options], make_batch: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    args: Any = make_args(num_steps_per_rollout=3, num_passes_per_rollout=2, lr_decay_style="linear", num_rollout=1)
    together, by_hand = (make_trainer(args) for _ in range(2))
    batches = _mini_batches(make_batch())
    for batch in batches:
        batch.columns["old_log_probs"] = together.log_probs("actor", batch)
    parts, guard = [batch.select(range(4)) for batch in batches], NonFiniteGuard(tmp_path, 0, 1)
    require_old_log_probs(args, parts)
    metrics = StepReport.metrics_of([train_steps(together, together._objective, parts, guard, passes=2)])

    found = [step(by_hand, batch) for _ in range(2) for batch in batches]
    for name, tensor in _weights(together).items():
        assert torch.equal(tensor, _weights(by_hand)[name]), name
    assert metrics["loss"] == pytest.approx(np.mean([metrics["loss"] for metrics in found]))
    assert metrics["lr"] == pytest.approx(1e-2 * (1 - 5 / 6))  # the last of six steps
    assert abs(found[3]["ppo_kl"]) > 0  # the second pass starts from the weights that the first left


@pytest.mark.parametrize(
    "options",
    [
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01},
        {"use_tis": True, "tis_mode": "sequence", "tis_clip_low": 0.0, "deterministic": True},
        {"loss_type": "gspo", "rollout_temperature": 0.7},
        {"loss_type": "decoupled_ppo", "loss_agg_mode": "seq-mean-token-sum"},
    ],
)
def test_one_step_a_rollout_without_old_log_probs_equals_that_with_those_of_a_pass_of_their_own(
    options: dict[str, Any],
    make_args: Callable[..., Options],
    make_batch: Callable[..., TrainBatch],
    tmp_path: Path,
) -> None:
    args: Any = make_args(max_tokens_per_gpu=60, **options)
    one_pass, two_passes = (make_trainer(args) for _ in range(2))
    before = _weights(one_pass)
    for rollout in range(4):
        found = []
        for trainer in (one_pass, two_passes):
            batch = make_batch(24, seed=rollout)
            batch.columns["ref_log_probs"] = trainer.log_probs("ref", batch)
            if trainer is two_passes:
                batch.columns["old_log_probs"] = trainer.log_probs("actor", batch)
            report = train_steps(trainer, trainer._objective, [batch], NonFiniteGuard(tmp_path, 0, 1))
            found.append(StepReport.metrics_of([report]))
        assert found[0] == found[1]
        assert {"loss", "grad_norm", "lr", "log_probs", "entropy", "ppo_kl", LOG_PROB_GAP} <= found[0].keys()
    for name, tensor in _weights(one_pass).items():
        assert torch.equal(tensor, _weights(two_passes)[name]), name
    assert any(not torch.equal(tensor, before[name]) for name, tensor in _weights(one_pass).items())


def test_advantages_are_computed_once_for_all_passes(
    make_args: Callable[..., Options], make_batch: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    (tmp_path / "counting.py").write_text(COUNTING)
    args: Any = make_args(custom_advantage_function_path=f"{tmp_path / 'counting.py'}:numbered")
    trainer, batches = make_trainer(args), _mini_batches(make_batch())
    train_steps(trainer, trainer._objective, batches, NonFiniteGuard(tmp_path, 0, 1), passes=3)
    assert [batch.columns["advantages"][-1][0] for batch in batches] == [1, 2, 3]


COUNTING = """
import itertools

import numpy as np

CALLS = itertools.count(1)


def numbered(args, batch):
    number = next(CALLS)
    columns = [np.full(length, number, dtype=np.float32) for length in batch.columns["response_length"]]
    batch.columns["advantages"] = batch.columns["returns"] = columns
"""


def test_a_later_pass_needs_old_log_probs_too(
    make_args: Callable[..., Options], make_batch: Callable[..., TrainBatch]
) -> None:
    with pytest.raises(TrainError, match="mini-batch 0 of 1 has no old log-probabilities"):
        require_old_log_probs(make_args(num_passes_per_rollout=2), [make_batch()])


def test_several_steps_need_old_log_probs_unless_nothing_reads_them(
    make_args: Callable[..., Options], make_batch: Callable[..., TrainBatch]
) -> None:
    batches = _mini_batches(make_batch())
    with pytest.raises(TrainError, match="mini-batch 0 of 3 has no old log-probabilities"):
        require_old_log_probs(make_args(), batches)
    require_old_log_probs(make_args(), batches[:1])
    require_old_log_probs(make_args(use_rollout_logprobs=True), batches)
    require_old_log_probs(make_args(loss_type="sft_loss"), batches)
