"""Losses and their gradients equal the formulas over whole samples in float64: rows in micro-batches, on ranks and in
groups that stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer_rl.buffer.columns import ColumnStore, assemble
from buffer_rl.buffer.pool import DataPool
from buffer_rl.config import Options
from buffer_rl.errors import PluginError
from buffer_rl.plugins import PluginRegistry
from buffer_rl.train.objective import Objective
from buffer_rl.train.torch_trainer import TorchTrainer
from buffer_rl.types import GroupUid, RowId, TrainBatch

MakeArgs = Callable[..., Options]
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
PARTS = ({0: 5, 1: 1, 2: 2}, {0: 1, 3: 1})  # of each sample of the two groups
MASKED_ENTIRELY = 2
OWN_LOSSES = """
from buffer_rl.algo.aggregation import aggregate
from buffer_rl.contracts import LossOutputs
from buffer_rl.scope import scoped


@scoped("group")
def negative_entropy(args, inputs):
    return LossOutputs(loss=aggregate(-inputs.entropy, inputs, args.loss_agg_mode))


def mean_over_rows(args, inputs):
    return LossOutputs(loss=inputs.log_probs.sum() / inputs.total_rows)
"""


@pytest.fixture(scope="module")
def exact(model_path: str) -> Any:
    """The model in float64."""
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)


@pytest.fixture
def pool() -> DataPool:
    """Two groups of a step; a sample of five parts, and one of two parts that is masked entirely."""
    rng = np.random.default_rng(3)
    plane = ColumnStore()
    pool = DataPool(0, "train_0", plane, num_groups=2)
    for number, samples in enumerate(PARTS):
        uid = GroupUid("data", number, 0)
        rows = [RowId(uid, index, part) for index, parts in samples.items() for part in range(parts)]
        lengths = rng.integers(1, 9, len(rows))
        columns: dict[str, Any] = {
            "tokens": [rng.integers(3, 30, 4 + n).astype(np.int32) for n in lengths],
            "response_length": lengths.astype(np.int32),
            "loss_mask": [
                ((rng.random(n) > 0.3) * (row.sample_index != MASKED_ENTIRELY)).astype(np.float32)
                for row, n in zip(rows, lengths, strict=True)
            ],
            "old_log_probs": [-rng.random(n).astype(np.float32) * 4 for n in lengths],
            "advantages": [np.full(n, rng.normal(), dtype=np.float32) for n in lengths],
            "sample_total_tokens": np.full(len(rows), 1e9, dtype=np.float32),  # written again by the Buffer
        }
        plane.put(uid, rows, columns)
        pool.add(uid)
    pool.select([GroupUid("data", number, 0) for number in range(len(PARTS))])
    return pool


def pieces(pool: DataPool, way: str) -> Iterator[TrainBatch]:
    """The step's rows as one rank, as two ranks, or group by group."""
    if way == "streamed":
        for uid in reversed(pool.uids):
            rows = [row for row in assemble(pool.plan()).row_ids if row.uid == uid]
            yield assemble(pool.plan_rows(rows))
        return
    ranks = 2 if way == "two ranks" else 1
    for rank in range(ranks):
        yield assemble(pool.share(rank, ranks))


def run(trainer: TorchTrainer, pool: DataPool, way: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The metric ``loss`` (0 where there is none) and the gradient of the step."""
    trainer.zero_grad()
    if way == "streamed":
        for piece in pieces(pool, way):
            trainer.accumulate(piece)
        plan = pool.plan()
        shares = [trainer.finish_accumulation(plan.total_samples, plan.total_tokens)]
    else:
        shares = [trainer.forward_backward(piece) for piece in pieces(pool, way)]
    divisor = trainer._optimizer.divisor if way == "streamed" else 1.0
    gradients = {name: p.grad / divisor for name, p in trainer._actor.named_parameters() if p.grad is not None}
    return sum(share.get("loss", 0.0) for share in shares), gradients


def formula(
    exact: Any, batch: TrainBatch, mode: str, value: Callable[..., torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    """The sum of w v over all unmasked tokens, divided by D, and its gradient, in float64, row by row.

    value: of each response token, from its distribution's logarithm ``[response_length, vocabulary]``, the tokens, and
    the row's number."""
    masks = [torch.from_numpy(mask).double() for mask in batch.columns["loss_mask"]]
    samples = [(row.uid, row.sample_index) for row in batch.row_ids]
    tokens_of = {key: sum(m.sum() for k, m in zip(samples, masks, strict=True) if k == key) for key in samples}
    total = torch.zeros((), dtype=torch.float64)
    for row, (mask, sample) in enumerate(zip(masks, samples, strict=True)):
        ids = torch.tensor(batch.columns["tokens"][row].tolist())
        logits = exact(input_ids=ids[None]).logits[0, -len(mask) - 1 : -1]
        weight = mask / max(tokens_of[sample], 1) if mode == "seq-mean-token-mean" else mask
        total = total + (weight * value(logits.log_softmax(-1), ids[-len(mask) :], row)).sum()
    loss = total / (sum(m.sum() for m in masks) if mode == "token-mean" else len(tokens_of))
    exact.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in exact.named_parameters()}


def require_equal(found: tuple[float, dict[str, torch.Tensor]], wanted: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-5, abs=1e-6)
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() < 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("mode", MODES)
def test_a_sample_weighs_the_same_whatever_its_number_of_parts(
    mode: str, make_args: MakeArgs, pool: DataPool, exact: Any
) -> None:
    """The supervised loss and the policy loss, in micro-batches of one to three rows, which separate the parts."""
    batch = assemble(pool.plan())
    assert batch.total_samples == sum(map(len, PARTS)) < len(batch)

    def likelihood(log_probs: torch.Tensor, ids: torch.Tensor, _row: int) -> torch.Tensor:
        return -log_probs.gather(-1, ids[:, None])[:, 0]

    def surrogate(log_probs: torch.Tensor, ids: torch.Tensor, row: int) -> torch.Tensor:
        advantage, old = (
            torch.from_numpy(batch.columns[name][row]).double() for name in ("advantages", "old_log_probs")
        )
        ratio = (-likelihood(log_probs, ids, row) - old).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)

    for loss_type, value in (("sft_loss", likelihood), ("policy_loss", surrogate)):
        wanted = formula(exact, batch, mode, value)
        trainer = TorchTrainer(make_args(loss_agg_mode=mode, loss_type=loss_type, max_tokens_per_gpu=30), 0, 1)
        for way in ("one rank", "two ranks", "streamed"):
            require_equal(run(trainer, pool, way), wanted)


def test_the_entropy_carries_its_gradient_into_a_loss_of_ones_own(
    make_args: MakeArgs, pool: DataPool, exact: Any, tmp_path: Path
) -> None:
    def negative_entropy(log_probs: torch.Tensor, _ids: torch.Tensor, _row: int) -> torch.Tensor:
        return (log_probs.exp() * log_probs).sum(-1)

    (tmp_path / "own.py").write_text(OWN_LOSSES)
    path = f"{tmp_path}/own.py:negative_entropy"
    wanted = formula(exact, assemble(pool.plan()), "token-mean", negative_entropy)
    for args in (make_args(custom_loss_function_path=path), make_args(loss_type=path)):
        trainer = TorchTrainer(args, 0, 1)
        for way in ("one rank", "streamed"):
            require_equal((wanted[0], run(trainer, pool, way)[1]), wanted)


def test_the_built_in_losses_have_a_graph_of_the_entropy_only_for_its_bonus(
    make_args: MakeArgs, pool: DataPool
) -> None:
    for loss_type in ("policy_loss", "sft_loss"):
        for coefficient in (0.0, 0.1):
            args = make_args(loss_type=loss_type, entropy_coef=coefficient)
            assert Objective(args, PluginRegistry.from_flags(())).entropy_gradient == (coefficient > 0)
    trainer = TorchTrainer(make_args(), 0, 1)
    assert not next(trainer._loss_inputs(assemble(pool.plan()))).entropy.requires_grad


def test_a_loss_that_still_divides_by_rows_is_named_with_what_to_divide_by(
    make_args: MakeArgs, pool: DataPool, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN_LOSSES)
    batch = assemble(pool.plan())
    trainer = TorchTrainer(make_args(custom_loss_function_path=f"{tmp_path}/own.py:mean_over_rows"), 0, 1)
    with pytest.raises(PluginError, match=r"own\.py:mean_over_rows'.* there is no total_rows: divide by total_samples"):
        trainer.forward_backward(batch)
    with pytest.raises(AttributeError, match="divide by total_samples"):
        batch.total_rows  # noqa: B018 - what a trainer backend would read
