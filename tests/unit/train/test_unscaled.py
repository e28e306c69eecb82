"""Gradients and metrics that were summed before the step's totals were known equal those that knew them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.config import Options
from buffer_rl.contracts import LossInputs, LossOutputs
from buffer_rl.errors import ConfigError
from buffer_rl.train.objective import UnscaledShares
from buffer_rl.train.optimizer import GradientSum
from buffer_rl.train.torch_trainer import TorchTrainer
from buffer_rl.types import GroupUid, RowId, TrainBatch


def with_references(trainer: TorchTrainer, batch: TrainBatch) -> TrainBatch:
    noise = np.random.default_rng(5)
    for field, model in (("old_log_probs", "actor"), ("ref_log_probs", "ref")):
        rows = trainer.log_probs(model, batch)
        batch.columns[field] = [row + noise.normal(0, 0.2, len(row)).astype(np.float32) for row in rows]
    trainer.compute_advantages(batch)
    return batch


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_parts_that_did_not_know_the_totals_make_the_same_step(
    mode: str, deterministic: bool, make_args: Callable[..., Options], make_batch: Callable[..., TrainBatch]
) -> None:
    """Once the whole batch at a time, once its rows in three parts whose totals are wrong on purpose, after a step that
    was begun and discarded."""
    more: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coef": 0.02}
    args = make_args(loss_agg_mode=mode, deterministic=deterministic, max_tokens_per_gpu=60, **more)
    whole, parts = TorchTrainer(args, 0, 1), TorchTrainer(args, 0, 1)
    batch = make_batch()
    batch.row_ids = [RowId(GroupUid("data", row // 3, 0), row % 3) for row in range(12)]
    with_references(whole, batch)
    expected = whole.forward_backward(batch)
    parts.accumulate(batch.select([0, 1, 2]))
    parts.zero_grad()
    for rows in ([9, 10, 11], [3, 4, 5, 0, 1, 2], [6, 7, 8]):
        part = batch.select(rows)
        part.total_samples, part.total_tokens = 77, 3
        parts.accumulate(part)
    found = parts.finish_accumulation(batch.total_samples, batch.total_tokens)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    step = [trainer.optimizer_step() for trainer in (whole, parts)]
    assert step[1]["grad_norm"] == pytest.approx(step[0]["grad_norm"], rel=1e-6)
    weights = [dict(trainer._actor.named_parameters()) for trainer in (whole, parts)]
    if deterministic:
        for name, tensor in weights[0].items():
            assert torch.equal(weights[1][name], tensor), name


def test_a_loss_that_divides_by_both_totals_is_refused() -> None:
    def both(inputs: LossInputs) -> LossOutputs:
        return LossOutputs(
            loss=inputs.log_probs.sum() / inputs.total_tokens + inputs.log_probs.sum() / inputs.total_samples
        )

    inputs = LossInputs(
        log_probs=torch.ones(2, 3, requires_grad=True),
        old_log_probs=None,
        rollout_log_probs=None,
        ref_log_probs=None,
        advantages=None,
        loss_mask=torch.ones(2, 3),
        entropy=torch.zeros(2, 3),
        total_samples=5,
        total_tokens=9,
        sample_total_tokens=torch.full((2,), 3.0),
    )
    with pytest.raises(ConfigError, match="divides by the samples of the step as well"):
        UnscaledShares("token-mean").unscaled_loss(both, inputs)
    with pytest.raises(ConfigError, match="divides by the tokens of the step as well"):
        UnscaledShares("seq-mean-token-sum").unscaled_loss(both, inputs)


def two_rows(**changes: Any) -> LossInputs:
    """Two rows of three tokens whose advantages cancel, as those of a prompt do."""
    fields: dict[str, Any] = {
        "log_probs": torch.tensor([[-0.5, -1.0, -0.25], [-2.0, -0.5, -1.0]], requires_grad=True),
        "advantages": torch.tensor([[0.75] * 3, [-0.75] * 3]),
        "loss_mask": torch.ones(2, 3),
        "entropy": torch.zeros(2, 3),
        "sample_total_tokens": torch.full((2,), 3.0),
        **dict.fromkeys(("old_log_probs", "rollout_log_probs", "ref_log_probs")),
    }
    return LossInputs(**{**fields, **changes}, total_samples=2, total_tokens=6)


def of_samples(inputs: LossInputs) -> LossOutputs:
    """On policy, so that the ratio is 1; a mean over samples of means over tokens."""
    ratio = (inputs.log_probs - inputs.log_probs.detach()).exp()
    return LossOutputs(loss=(-inputs.advantages * ratio).mean(-1).sum() / inputs.total_samples)


def of_tokens(inputs: LossInputs) -> LossOutputs:
    ratio = (inputs.log_probs - inputs.log_probs.detach()).exp()
    return LossOutputs(loss=(-inputs.advantages * ratio).sum() / inputs.total_tokens)


def test_a_wrong_divisor_is_refused_though_the_value_is_0_as_where_advantages_cancel() -> None:
    inputs = two_rows()
    outputs = of_samples(inputs)
    assert outputs.loss.item() == 0.0
    assert torch.autograd.grad(outputs.loss, inputs.log_probs)[0].abs().sum() > 0
    with pytest.raises(ConfigError, match="divides by the samples of the step as well"):
        UnscaledShares("token-mean").unscaled_loss(of_samples, inputs)
    with pytest.raises(ConfigError, match="divides by the tokens of the step as well"):
        UnscaledShares("seq-mean-token-mean").unscaled_loss(of_tokens, inputs)


@pytest.mark.parametrize(
    ("mode", "loss", "share"), [("token-mean", of_tokens, 1), ("seq-mean-token-mean", of_samples, 3)]
)
def test_a_right_divisor_keeps_the_gradient_where_the_value_is_0(
    mode: str, loss: Callable[[LossInputs], LossOutputs], share: int
) -> None:
    inputs = two_rows()
    kept = UnscaledShares(mode).unscaled_loss(loss, inputs)
    assert kept.item() == 0.0
    kept.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(inputs.log_probs.grad, -inputs.advantages / share)


def test_the_gradient_by_the_entropy_counts_too() -> None:
    def with_bonus(inputs: LossInputs) -> LossOutputs:
        outputs = of_tokens(inputs)
        bonus = (inputs.entropy * inputs.advantages).sum() / inputs.total_samples
        return LossOutputs(loss=outputs.loss - bonus)

    with pytest.raises(ConfigError, match="divides by the samples of the step as well"):
        UnscaledShares("token-mean").unscaled_loss(with_bonus, two_rows(entropy=torch.ones(2, 3, requires_grad=True)))


def test_what_is_not_finite_is_left_to_the_guard_against_it() -> None:
    inputs = two_rows(advantages=torch.full((2, 3), torch.inf))
    assert not UnscaledShares("token-mean").unscaled_loss(of_tokens, inputs).isfinite()


def test_a_sum_in_float64_rounds_to_the_same_float32_in_any_order() -> None:
    generator = torch.Generator().manual_seed(0)
    terms = [torch.randn(5000, generator=generator) * 10.0 ** float(i % 7 - 3) for i in range(40)]
    parameter = torch.nn.Parameter(torch.zeros(5000))

    def total(order: list[int]) -> torch.Tensor:
        gradient_sum = GradientSum([parameter])
        for index in order:
            parameter.grad = terms[index].clone()
            gradient_sum.accumulate()
            assert parameter.grad is None
        return gradient_sum.flat().float()

    forward, backward = list(range(40)), list(reversed(range(40)))
    assert torch.equal(total(forward), total(backward))
    plain = [torch.zeros(5000), torch.zeros(5000)]
    for first, last in zip(forward, backward, strict=True):
        plain[0] += terms[first]
        plain[1] += terms[last]
    assert not torch.equal(*plain), "in float32 the order shows: the case above would prove nothing"
