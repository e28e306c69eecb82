"""Losses and their gradients equal the formulas over whole samples in float64: rows in micro-batches, on ranks and in
groups that stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer_rl.buffer.columns import assemble
from buffer_rl.buffer.pool import DataPool
from buffer_rl.buffer.readers import ALL_ROWS
from buffer_rl.kinds.token_loss import LossInputs, Sums, TokenLoss
from buffer_rl.options.section import Options
from buffer_rl.records.groups import GroupUid, RowId, TrainBatch
from harness.losses import MODES, PARTS, WAYS, gradient, two_groups
from harness.trainers import make_trainer

MakeArgs = Callable[..., Options]
OWN = """
from buffer_rl.kinds.token_loss import TokenLoss


def negative_entropy(args, inputs):
    return TokenLoss(-inputs.entropy)
"""


@pytest.fixture(scope="module")
def exact(model_path: str) -> Any:
    """The model in float64."""
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)


@pytest.fixture
def pool() -> DataPool:
    return two_groups()


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
    for name, exact_gradient in wanted[1].items():
        assert (found[1][name] - exact_gradient).norm() < 1e-4 * exact_gradient.norm(), name


@pytest.mark.parametrize("mode", MODES)
def test_a_sample_weighs_the_same_whatever_its_number_of_parts(
    mode: str, make_args: MakeArgs, pool: DataPool, exact: Any
) -> None:
    """The supervised loss and the policy loss, in micro-batches of one to three rows, which separate the parts."""
    batch = assemble(pool.share(ALL_ROWS))
    assert sum(map(len, PARTS)) < len(batch)

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
        trainer = make_trainer(make_args(loss_agg_mode=mode, loss_type=loss_type, max_tokens_per_gpu=30))
        for way in WAYS:
            require_equal(gradient(trainer, pool, way), wanted)


def test_the_entropy_carries_its_gradient_into_a_loss_of_ones_own(
    make_args: MakeArgs, pool: DataPool, exact: Any, tmp_path: Path
) -> None:
    def negative_entropy(log_probs: torch.Tensor, _ids: torch.Tensor, _row: int) -> torch.Tensor:
        return (log_probs.exp() * log_probs).sum(-1)

    (tmp_path / "own.py").write_text(OWN)
    path = f"{tmp_path}/own.py:negative_entropy"
    wanted = formula(exact, assemble(pool.share(ALL_ROWS)), "token-mean", negative_entropy)
    for args in (make_args(custom_loss_function_path=path), make_args(loss_type=path)):
        trainer = make_trainer(args)
        for way in WAYS:
            require_equal(gradient(trainer, pool, way), wanted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_parts_of_a_step_make_the_same_step_as_the_whole(
    mode: str, deterministic: bool, make_args: MakeArgs, make_batch: Callable[..., TrainBatch]
) -> None:
    """Once the whole batch at a time, once its rows in three parts, after a step that was begun and discarded. Bit for
    bit under ``--deterministic``."""
    more: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coef": 0.02}
    args = make_args(loss_agg_mode=mode, deterministic=deterministic, max_tokens_per_gpu=60, **more)
    whole, parts = make_trainer(args), make_trainer(args)
    batch, noise = make_batch(), np.random.default_rng(5)
    batch.row_ids = [RowId(GroupUid("data", row // 3, 0), row % 3) for row in range(12)]
    for field, model in (("old_log_probs", "actor"), ("ref_log_probs", "ref")):
        rows = whole.log_probs(model, batch)
        batch.columns[field] = [row + noise.normal(0, 0.2, len(row)).astype(np.float32) for row in rows]
    batch.columns["advantages"] = [noise.normal(size=len(row)).astype(np.float32) for row in rows]
    expected = whole.accumulate(batch)
    parts.accumulate(batch.select([0, 1, 2]))
    parts.zero_grad()
    shares = [parts.accumulate(batch.select(rows)) for rows in ([9, 10, 11], [3, 4, 5, 0, 1, 2], [6, 7, 8])]
    found = Sums.of(shares)
    assert found.means() == pytest.approx(expected.means(), rel=1e-5, abs=1e-6)
    assert found.divisor == expected.divisor
    step = [trainer.optimizer_step(1 / expected.divisor) for trainer in (whole, parts)]
    assert step[1]["grad_norm"] == pytest.approx(step[0]["grad_norm"], rel=1e-5)
    weights = [dict(trainer._actor.named_parameters()) for trainer in (whole, parts)]
    if deterministic:
        for name, tensor in weights[0].items():
            assert torch.equal(weights[1][name], tensor), name


def test_rows_of_a_prompt_reach_a_loss_that_compares_them_together(make_args: MakeArgs, pool: DataPool) -> None:
    seen: list[int] = []

    def compares(args: Any, inputs: LossInputs) -> TokenLoss:
        seen.append(len(inputs.row_ids))
        return TokenLoss(inputs.log_probs)

    for unit, calls in (("group", [2, 8]), ("row", [1] * 10)):
        compares.unit = unit  # type: ignore[attr-defined]
        seen.clear()
        gradient(make_trainer(make_args(custom_loss_function_path=compares, max_tokens_per_gpu=1)), pool, "one rank")
        assert sorted(seen) == calls
