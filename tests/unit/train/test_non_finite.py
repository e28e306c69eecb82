"""Steps whose loss or gradient is not finite are left out, and their rows are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.buffer.row_file import read_rollout
from buffer_rl.config import Options
from buffer_rl.errors import NonFiniteError, TrainError
from buffer_rl.train.steps import NonFiniteGuard, train_steps
from buffer_rl.train.torch_trainer import TorchTrainer
from buffer_rl.types import TrainBatch

MakeArgs = Callable[..., Options]
MakeBatch = Callable[..., TrainBatch]

LOSSES = """
import torch
from buffer_rl.contracts import LossOutputs
from buffer_rl.scope import scoped


@scoped("group")
def infinite(args, inputs):
    '''The gradient is finite, the loss is not, where a row's advantage is above 1e9.'''
    tokens = max(inputs.total_tokens, 1)
    loss = (inputs.log_probs * inputs.loss_mask).sum() / tokens
    if bool((inputs.advantages > 1e9).any()):
        loss = loss + torch.tensor(float("inf"))
    return LossOutputs(loss=loss, metrics={"loss": loss.detach()})
"""


def state_of(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    weights = {name: tensor.clone() for bucket in trainer.export_buckets() for name, tensor in bucket.items()}
    moments = trainer._optimizer.state_tensors()
    return weights | {f"adam.{name}": tensor.clone() for name, tensor in moments.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def poisoned(batch: TrainBatch, value: float = 3e38) -> TrainBatch:
    batch.columns["reward"][3] = np.float32(value)
    return batch


def accumulated(trainer: TorchTrainer, batch: TrainBatch) -> None:
    trainer.compute_advantages(batch)
    trainer.accumulate(batch)
    trainer.finish_accumulation(batch.total_samples, batch.total_tokens)


def at_once(trainer: TorchTrainer, batch: TrainBatch) -> None:
    trainer.compute_advantages(batch)
    trainer.forward_backward(batch)


@pytest.mark.parametrize("work", [at_once, accumulated])
@pytest.mark.parametrize("deterministic", [False, True])
def test_weights_moments_and_the_next_step_are_those_of_a_run_without_the_bad_step(
    make_args: MakeArgs, make_batch: MakeBatch, work: Any, deterministic: bool
) -> None:
    args = make_args(deterministic=deterministic, max_tokens_per_gpu=40)
    hit, spared = TorchTrainer(args, 0, 1), TorchTrainer(args, 0, 1)
    try:
        for trainer in (hit, spared):
            work(trainer, make_batch(seed=0))
            trainer.optimizer_step()
        before = state_of(hit)
        assert len(before) > 30  # Adam's moments included
        work(hit, poisoned(make_batch(seed=1)))
        with pytest.raises(NonFiniteError, match="the loss is not finite"):
            hit.optimizer_step()
        assert same(state_of(hit), before)
        for trainer in (hit, spared):
            work(trainer, make_batch(seed=2))
            trainer.optimizer_step()
        assert same(state_of(hit), state_of(spared))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("work", [at_once, accumulated])
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_infinite_loss_with_a_finite_gradient_is_left_out_too(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path, work: Any, deterministic: bool
) -> None:
    losses = tmp_path / "losses.py"
    losses.write_text(LOSSES)
    args = make_args(custom_loss_function_path=f"{losses}:infinite", deterministic=deterministic, max_tokens_per_gpu=40)
    trainer = TorchTrainer(args, 0, 1)
    try:
        before = state_of(trainer)
        work(trainer, poisoned(make_batch(), 1e30))
        with pytest.raises(NonFiniteError):
            trainer.optimizer_step()
        assert same(state_of(trainer), before)
        work(trainer, make_batch())
        assert np.isfinite(trainer.optimizer_step()["grad_norm"])
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_rows_of_a_step_that_is_left_out_are_written_counted_and_missing_from_the_means(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path
) -> None:
    trainer, guard = TorchTrainer(make_args(), 0, 1), NonFiniteGuard(tmp_path / "non_finite", 0, 3)
    good, bad = make_batch(seed=0), poisoned(make_batch(seed=1))
    metrics = train_steps(trainer, [good, bad], guard)
    assert metrics["non_finite_steps"] == 1.0
    assert all(np.isfinite(value) for value in metrics.values())
    file = tmp_path / "non_finite" / "step_1_rank_0_part_1.safetensors"
    again = read_rollout(file)
    assert again.row_ids == bad.row_ids
    assert (again.total_samples, again.total_tokens) == (bad.total_samples, bad.total_tokens)
    for left, right in zip(again.columns["tokens"], bad.columns["tokens"], strict=True):
        assert left.tolist() == right.tolist()
    assert again.columns["reward"].tolist() == bad.columns["reward"].tolist()


def test_a_rollout_without_a_step_has_no_metrics_but_the_count(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path
) -> None:
    trainer, guard = TorchTrainer(make_args(), 0, 1), NonFiniteGuard(tmp_path, 0, 3)
    assert train_steps(trainer, [poisoned(make_batch())], guard) == {"non_finite_steps": 1.0}


@pytest.mark.parametrize(("limit", "left_out"), [(0, 0), (1, 0), (3, 2)])
def test_so_many_bad_steps_in_a_row_end_the_run_and_a_good_one_between_starts_the_count_anew(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path, limit: int, left_out: int
) -> None:
    trainer, guard = TorchTrainer(make_args(), 0, 1), NonFiniteGuard(tmp_path, 0, limit)
    for _ in range(2):
        for _ in range(left_out):
            train_steps(trainer, [poisoned(make_batch())], guard)
        train_steps(trainer, [make_batch()], guard)
    for _ in range(left_out):
        train_steps(trainer, [poisoned(make_batch())], guard)
    with pytest.raises(TrainError, match=r"not finite(.|\n)*step_1_rank_0.safetensors") as caught:
        train_steps(trainer, [poisoned(make_batch())], guard)
    assert not isinstance(caught.value, NonFiniteError)
    assert guard.total == 3 * left_out + 1


def test_rows_that_cannot_be_written_do_not_hide_the_step(make_batch: MakeBatch, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder would be")
    guard = NonFiniteGuard(tmp_path / "taken", 0, 2)

    def fails() -> dict[str, float]:
        raise NonFiniteError("the loss is nan")

    assert guard.step(fails, make_batch) is None
    with pytest.raises(TrainError, match="no file"):
        guard.step(fails, make_batch)
