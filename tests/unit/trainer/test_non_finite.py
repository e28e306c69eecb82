"""Steps whose loss or gradient is not finite are left out, and their rows are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from buffer_rl.errors import NonFiniteError, TrainError
from buffer_rl.files.row_file import read_rollout
from buffer_rl.options.section import Options
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.steps import NonFiniteGuard, StepReport, train_steps
from buffer_rl.trainer.torch_trainer import TorchTrainer
from harness.trainers import make_trainer

MakeArgs = Callable[..., Options]
MakeBatch = Callable[..., TrainBatch]

LOSSES = """
import torch
from buffer_rl.kinds.token_loss import TokenLoss


def infinite(args, inputs):
    '''The gradient is finite, the loss is not, where a row's advantage is above 1e9.'''
    return TokenLoss(inputs.log_probs + torch.where(inputs.advantages > 1e9, torch.inf, 0.0))
"""


def state_of(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    weights = {name: tensor.clone() for bucket in trainer.export() for name, tensor in bucket.items()}
    moments = trainer._optimizer.state_tensors()
    return weights | {f"adam.{name}": tensor.clone() for name, tensor in moments.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def poisoned(batch: TrainBatch, value: float = 3e38) -> TrainBatch:
    batch.columns["reward"][3] = np.float32(value)
    return batch


def step_of(trainer: TorchTrainer, batch: TrainBatch, guard: NonFiniteGuard) -> dict[str, float]:
    return StepReport.metrics_of([train_steps(trainer, trainer._objective, [batch], guard)])


@pytest.mark.parametrize("deterministic", [False, True])
def test_weights_moments_and_the_next_step_are_those_of_a_run_without_the_bad_step(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path, deterministic: bool
) -> None:
    args = make_args(deterministic=deterministic, max_tokens_per_gpu=40)
    hit, spared, guard = make_trainer(args), make_trainer(args), NonFiniteGuard(tmp_path, 0, 3)
    try:
        for trainer in (hit, spared):
            step_of(trainer, make_batch(seed=0), guard)
        before = state_of(hit)
        assert len(before) > 30  # Adam's moments included
        assert step_of(hit, poisoned(make_batch(seed=1)), guard) == {"non_finite_steps": 1.0}
        assert same(state_of(hit), before)
        for trainer in (hit, spared):
            step_of(trainer, make_batch(seed=2), guard)
        assert same(state_of(hit), state_of(spared))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_infinite_loss_with_a_finite_gradient_is_left_out_too(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path, deterministic: bool
) -> None:
    losses = tmp_path / "losses.py"
    losses.write_text(LOSSES)
    args = make_args(custom_loss_function_path=f"{losses}:infinite", deterministic=deterministic, max_tokens_per_gpu=40)
    trainer, guard = make_trainer(args), NonFiniteGuard(tmp_path, 0, 3)
    try:
        before = state_of(trainer)
        assert step_of(trainer, poisoned(make_batch(), 1e30), guard) == {"non_finite_steps": 1.0}
        assert same(state_of(trainer), before)
        assert np.isfinite(step_of(trainer, make_batch(), guard)["grad_norm"])
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_rows_of_a_step_that_is_left_out_are_written_counted_and_missing_from_the_means(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, guard = make_trainer(make_args()), NonFiniteGuard(tmp_path / "non_finite", 0, 3)
    good, bad = make_batch(seed=0), poisoned(make_batch(seed=1))
    metrics = StepReport.metrics_of([train_steps(trainer, trainer._objective, [good, bad], guard)])
    assert metrics["non_finite_steps"] == 1.0
    assert all(np.isfinite(value) for value in metrics.values())
    file = tmp_path / "non_finite" / "step_1_rank_0_part_1.safetensors"
    assert f"the step is left out; its rows are in {file}" in capsys.readouterr().err
    again = read_rollout(file)
    assert again.row_ids == bad.row_ids
    for left, right in zip(again.columns["tokens"], bad.columns["tokens"], strict=True):
        assert left.tolist() == right.tolist()
    assert again.columns["reward"].tolist() == bad.columns["reward"].tolist()


def test_a_rollout_without_a_step_has_no_metrics_but_the_count(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path
) -> None:
    trainer, guard = make_trainer(make_args()), NonFiniteGuard(tmp_path, 0, 3)
    assert step_of(trainer, poisoned(make_batch()), guard) == {"non_finite_steps": 1.0}


@pytest.mark.parametrize(("limit", "left_out"), [(0, 0), (1, 0), (3, 2)])
def test_so_many_bad_steps_in_a_row_end_the_run_and_a_good_one_between_starts_the_count_anew(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path, limit: int, left_out: int
) -> None:
    trainer, guard = make_trainer(make_args()), NonFiniteGuard(tmp_path, 0, limit)
    for _ in range(2):
        for _ in range(left_out):
            step_of(trainer, poisoned(make_batch()), guard)
        step_of(trainer, make_batch(), guard)
    for _ in range(left_out):
        step_of(trainer, poisoned(make_batch()), guard)
    with pytest.raises(TrainError, match=r"not finite(.|\n)*step_1_rank_0.safetensors") as caught:
        step_of(trainer, poisoned(make_batch()), guard)
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


def test_columns_that_are_not_finite_are_named_beside_the_file(
    make_batch: MakeBatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard, batch = NonFiniteGuard(tmp_path, 0, 1), make_batch()
    lengths = batch.columns["response_length"]
    batch.columns["rollout_log_probs"] = [np.full(length, np.nan, dtype=np.float32) for length in lengths]
    batch.columns["returns"] = [np.ones(length, dtype=np.float32) for length in lengths]
    batch.columns["advantages"] = [np.ones(length, dtype=np.float32) for length in lengths]
    batch.columns["advantages"][3][-1] = np.inf

    def fails() -> dict[str, float]:
        raise NonFiniteError("the loss is nan", hint="look at it")

    with pytest.raises(TrainError, match=r"\.safetensors, which has advantages that are not finite; look at it"):
        guard.step(fails, lambda: batch)
    assert "rank_0.safetensors, which has advantages that are not finite\n" in capsys.readouterr().err
