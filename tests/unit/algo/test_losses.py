from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from buffer_rl.algo.losses import policy_loss, sft_loss
from buffer_rl.contracts import LossInputs
from buffer_rl.errors import TrainError

LOG_2 = math.log(2)


def _args(**overrides: Any) -> SimpleNamespace:
    defaults = {
        "eps_clip": 0.2,
        "eps_clip_high": None,
        "loss_agg_mode": "token-mean",
        "use_rollout_logprobs": False,
        "use_kl_loss": False,
        "kl_loss_coef": 0.0,
        "kl_loss_type": "k3",
        "entropy_coef": 0.0,
    }
    return SimpleNamespace(**(defaults | overrides))


def _inputs(**overrides: Any) -> LossInputs:
    """Two rows of two tokens; the last token is masked. The ratios are 2, 1/2, 1 and (masked) e^49."""
    old = torch.tensor([[-2.0, -1.0], [-1.5, -50.0]])
    defaults: dict[str, Any] = {
        "log_probs": (old + torch.tensor([[LOG_2, -LOG_2], [0.0, 49.0]])).requires_grad_(),
        "old_log_probs": old,
        "rollout_log_probs": None,
        "ref_log_probs": None,
        "advantages": torch.tensor([[1.0, 1.0], [-3.0, 5.0]]),
        "loss_mask": torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        "entropy": torch.tensor([[0.3, 0.6], [0.9, 7.0]]),
        "total_samples": 2,
        "total_tokens": 3,
        "sample_total_tokens": torch.tensor([2.0, 1.0]),
    }
    return LossInputs(**(defaults | overrides))


def test_the_clipped_surrogate_matches_hand_computed_numbers() -> None:
    # min(2, 1.2) x 1 = 1.2; min(0.5, 0.8) x 1 = 0.5; 1 x (-3) = -3
    outputs = policy_loss(_args(), _inputs())
    assert outputs.loss.item() == pytest.approx(-(1.2 + 0.5 - 3) / 3)
    assert outputs.metrics["pg_loss"].item() == pytest.approx(outputs.loss.item())
    assert outputs.metrics["pg_clipfrac"].item() == pytest.approx(1 / 3)
    assert outputs.metrics["ppo_kl"].item() == pytest.approx(0.0, abs=1e-6)  # (-log 2 + log 2 + 0) / 3
    assert outputs.metrics["entropy"].item() == pytest.approx(0.6)
    assert outputs.metrics["log_probs"].item() == pytest.approx((-2 + LOG_2 - 1 - LOG_2 - 1.5) / 3)


def test_clipped_and_masked_tokens_carry_no_gradient() -> None:
    inputs = _inputs()
    policy_loss(_args(), inputs).loss.backward()
    # d/d log_prob of -A x ratio is -A x ratio; the first token is clipped, the last masked
    expected = torch.tensor([[0.0, -0.5], [3.0, 0.0]]) / 3
    torch.testing.assert_close(inputs.log_probs.grad, expected)


def test_the_clip_range_may_be_asymmetric() -> None:
    advantages = torch.tensor([[1.0, -1.0], [0.0, 0.0]])
    outputs = policy_loss(_args(eps_clip=0.3, eps_clip_high=0.5), _inputs(advantages=advantages))
    # min(2, 1.5) x 1; a negative advantage takes max(0.5, 0.7) x (-1)
    assert outputs.loss.item() == pytest.approx(-(1.5 - 0.7) / 3)
    assert outputs.metrics["pg_clipfrac"].item() == pytest.approx(2 / 3)


def test_a_sequence_mean_weighs_rows_alike() -> None:
    outputs = policy_loss(_args(loss_agg_mode="seq-mean-token-mean"), _inputs())
    assert outputs.loss.item() == pytest.approx(-((1.2 + 0.5) / 2 + -3 / 1) / 2)


def test_without_old_log_probs_the_ratio_is_one_and_keeps_its_gradient() -> None:
    inputs = _inputs(old_log_probs=None)
    outputs = policy_loss(_args(), inputs)
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(-(1 + 1 - 3) / 3)
    assert outputs.metrics["pg_clipfrac"].item() == 0
    torch.testing.assert_close(inputs.log_probs.grad, torch.tensor([[-1.0, -1.0], [3.0, 0.0]]) / 3)


def test_the_engines_log_probs_can_be_the_old_ones() -> None:
    rollout = torch.tensor([[-2.0 + LOG_2, -1.0 - LOG_2], [-1.5, -50.0]])
    outputs = policy_loss(_args(use_rollout_logprobs=True), _inputs(rollout_log_probs=rollout))
    assert outputs.loss.item() == pytest.approx(-(1 + 1 - 3) / 3)


def test_the_gap_between_trainer_and_engine_is_measured() -> None:
    rollout = torch.tensor([[-2.1, -1.2], [-1.5, 9.0]])
    metrics = policy_loss(_args(), _inputs(rollout_log_probs=rollout)).metrics
    assert metrics["train_rollout_logprob_abs_diff"].item() == pytest.approx(0.1)


def test_the_kl_penalty_is_added_with_its_weight() -> None:
    log_probs = torch.zeros(2, 2).requires_grad_()
    inputs = _inputs(log_probs=log_probs, old_log_probs=None, ref_log_probs=torch.full((2, 2), -1.0))
    outputs = policy_loss(_args(use_kl_loss=True, kl_loss_coef=0.1), inputs)
    k3 = math.exp(-1) - 1 + 1
    assert outputs.metrics["kl_loss"].item() == pytest.approx(k3)
    assert outputs.loss.item() == pytest.approx(1 / 3 + 0.1 * k3)


def test_the_entropy_bonus_is_subtracted_and_carries_its_gradient() -> None:
    entropy = torch.tensor([[0.3, 0.6], [0.9, 7.0]], requires_grad=True)
    outputs = policy_loss(_args(entropy_coef=0.5), _inputs(old_log_probs=None, entropy=entropy))
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(1 / 3 - 0.5 * 0.6)
    torch.testing.assert_close(entropy.grad, -0.5 * torch.tensor([[1.0, 1.0], [1.0, 0.0]]) / 3)


def test_an_infinite_masked_log_prob_does_not_reach_loss_or_gradient() -> None:
    old = torch.tensor([[-2.0, -1.0], [-1.5, -math.inf]])
    inputs = _inputs(old_log_probs=old)
    outputs = policy_loss(_args(), inputs)
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(-(1.2 + 0.5 - 3) / 3)
    assert torch.isfinite(inputs.log_probs.grad).all()


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({}, "advantages"),
        ({"use_kl_loss": True}, "ref_log_probs"),
        ({"use_rollout_logprobs": True}, "rollout_log_probs"),
    ],
)
def test_a_missing_column_is_named(options: dict[str, Any], missing: str) -> None:
    with pytest.raises(TrainError, match=f"no {missing}"):
        policy_loss(_args(**options), _inputs(**{missing: None}))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_shares_of_rows_add_up_to_the_whole_batch(mode: str) -> None:
    args = _args(loss_agg_mode=mode, use_kl_loss=True, kl_loss_coef=0.3, entropy_coef=0.1)
    ref = torch.full((2, 2), -1.0)
    whole = policy_loss(args, _inputs(ref_log_probs=ref))
    fields = ("log_probs", "old_log_probs", "ref_log_probs", "advantages", "loss_mask", "entropy")
    fields += ("sample_total_tokens",)
    shares = []
    for row in range(2):
        inputs = _inputs(ref_log_probs=ref)
        shares.append(policy_loss(args, _inputs(**{name: getattr(inputs, name)[row : row + 1] for name in fields})))
    torch.testing.assert_close(sum(share.loss for share in shares), whole.loss)
    for name, value in whole.metrics.items():
        torch.testing.assert_close(sum(share.metrics[name] for share in shares), value)


def test_the_supervised_loss_is_the_mean_negative_log_likelihood() -> None:
    log_probs = torch.tensor([[-1.0, -2.0], [-6.0, -99.0]], requires_grad=True)
    inputs = _inputs(log_probs=log_probs, old_log_probs=None, advantages=None)
    outputs = sft_loss(_args(), inputs)
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(3.0)
    assert outputs.metrics["loss"].item() == pytest.approx(3.0)
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-1.0, -1.0], [-1.0, 0.0]]) / 3)
    assert sft_loss(_args(loss_agg_mode="seq-mean-token-sum"), inputs).loss.item() == pytest.approx(4.5)
